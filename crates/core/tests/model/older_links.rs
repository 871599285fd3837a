//! Regressions of files that had several names in the store before the agent started: `a/a`, `c` and `a/b/a` are one file.

use std::time::Duration;

use super::world::{Terms, World};
use super::{close, create, does, exchange, holds_often, rename};
use surgetank_testkit::model::operation::Operation::{Fsync, Open, SetXattr, Truncate, Unlink, Utimens};
use surgetank_testkit::model::operation::{Access, Event, Operation, Setting, Step};

fn terms() -> Terms {
    Terms { older_links: true, drain_at_start: true, quiet: Duration::from_millis(5), ..Terms::plain() }
}

fn unlink(path: &str) -> Step {
    does(Unlink { path: path.into() })
}

fn open(path: &str, slot: usize, truncate: bool) -> Step {
    does(Open { path: path.into(), slot, access: Access::Both, append: false, truncate })
}

fn stat(path: &str) -> Step {
    does(Operation::Stat { path: path.into() })
}

#[test]
fn link_renamed_over_an_unpublished_file_is_applied() {
    // The drain never publishes the new file, so the name in the store still belongs to the old link.
    let terms = Terms { quiet: Duration::from_secs(3600), ..terms() };
    holds_often(&terms, &[create("new", 0), close(0), stat("c"), rename("new", "c"), rename("a/a", "c")]);
}

#[test]
fn unlinked_open_link_leaves_its_other_links() {
    for caps in [[8 << 10, 16 << 10], [4 << 30, 4 << 30]] {
        let terms = Terms { caps, direct: true, forgets: true, ..terms() };
        holds_often(&terms, &[open("c", 0, false), unlink("c"), Step::Happens(Event::Evict)]);
        holds_often(&terms, &[open("c", 0, true), rename("b", "c"), Step::Happens(Event::Evict)]);
    }
}

#[test]
fn write_to_an_unlinked_link_shows_in_its_other_links() {
    let write = does(Operation::Write { slot: 3, offset: 279, length: 143, byte: 183 });
    let steps = [open("c", 3, false), unlink("a/a"), unlink("c"), Step::Happens(Event::Evict), write];
    holds_often(&Terms { caps: [8 << 10, 16 << 10], forgets: true, ..terms() }, &steps);
    holds_often(&Terms { store_ttl: Duration::from_secs(60), copy_up_bytes_max: 1 << 20, ..terms() }, &steps);
}

#[test]
fn write_in_place_before_a_kill_shows_in_other_links() {
    for steps in [0, 4, 8, 16, 32] {
        let terms = Terms { drain_at_start: false, ..terms() };
        let kill = Step::Happens(Event::KillDrain { steps });
        holds_often(&terms, &[open("c", 2, true), rename("b", "c"), kill]);
    }
}

#[test]
fn attributes_set_by_a_link_outlive_the_link() {
    let terms = Terms { drain_at_start: false, ..terms() };
    let xattr = SetXattr { path: "c".into(), name: "user.one".into(), byte: 197, how: Setting::Any };
    holds_often(&terms, &[does(xattr), unlink("c")]);
}

#[test]
fn links_made_and_removed_are_counted_without_conflict() {
    let terms = Terms { forgets: true, ..terms() };
    holds_often(&terms, &[unlink("c"), unlink("b"), unlink("a/b/a")]);
    holds_often(&terms, &[unlink("c"), stat("a/b/a"), stat("a/a"), unlink("a/a")]);
    holds_often(&terms, &[does(Truncate { path: "c".into(), size: 12_542 }), unlink("c"), stat("a/a")]);
    let kill = Step::Happens(Event::Kill);
    holds_often(&terms, &[unlink("c"), create("c", 0), rename("c", "a/a"), kill.clone(), kill.clone()]);
    let terms = Terms { drain_at_start: false, ..terms };
    let steps = [unlink("c"), create("c", 0), Step::Happens(Event::StartDrain), rename("c", "a/a"), kill.clone(), kill];
    holds_often(&terms, &steps);
    holds_often(&terms, &[unlink("a/a"), Step::Happens(Event::Kill), stat("c"), unlink("c")]);
}

#[test]
fn last_times_set_apply_to_a_file_written_in_place() {
    let utimens = |path: &str, seconds| does(Utimens { path: path.into(), seconds });
    let steps = [open("c", 3, false), utimens("a/a", 1_001_092_807), utimens("c", 1_397_184_454)];
    holds_often(&terms(), &steps);
    holds_often(&terms(), &[&steps[..], &[Step::Happens(Event::Kill)]].concat());
}

#[test]
fn spilled_file_stays_writable_after_fsync_publishes_it() {
    let terms = Terms {
        caps: [8 << 10, 16 << 10],
        older_links: false,
        copy_up_bytes_max: 1 << 20,
        fsync: surgetank_types::model::FsyncTarget::Store,
        ..terms()
    };
    let write = |offset, byte| does(Operation::Write { slot: 3, offset, length: 7000, byte });
    let fsync = || does(Fsync { slot: 3 });
    let steps = [open("a/c", 3, false), write(122, 1), fsync(), write(90_000, 2), fsync(), write(5, 3), close(3)];
    holds_often(&terms, &steps);
    let mut world = World::new(&terms);
    steps[..3].iter().for_each(|step| world.step(step).unwrap());
    assert_eq!(world.published(), ["synced, spilled", "a/c"]);
    drop(world);
    holds_often(&terms, &[&steps[..6], &[Step::Happens(Event::Kill)]].concat());
    // The other name keeps its file in the store, and the drain writes the published content over that file.
    let link = Operation::Link { from: "a/c".into(), to: "d".into() };
    holds_often(&terms, &[&[does(link), Step::Happens(Event::Settle)], &steps[..]].concat());
}

#[test]
fn unneeded_spilled_copy_can_be_used_again() {
    let terms = Terms { caps: [8 << 10, 16 << 10], older_links: false, copy_up_bytes_max: 1 << 20, ..terms() };
    let steps = [open("a/c", 1, false), close(1), open("a/c", 0, false), close(0), open("a/c", 0, false)];
    holds_often(&terms, &steps);
    let terms = Terms { drain_at_start: false, ..terms };
    holds_often(&terms, &[&steps[..2], &[Step::Happens(Event::Kill)]].concat());
}

#[test]
fn exchange_with_a_link_leaves_its_other_links() {
    holds_often(&terms(), &[exchange("c", "b"), rename("a/a", "c"), exchange("a/b/a", "a/c")]);
}
