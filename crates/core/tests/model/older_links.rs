//! What went wrong with files that had several names in the store before we came: `a/a`, `c` and `a/b/a` are one file.

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
fn a_link_renamed_to_a_name_that_a_new_file_had_taken_from_another_link() {
    // The new file is never published: in the store the name is still that of the old link.
    let terms = Terms { quiet: Duration::from_secs(3600), ..terms() };
    holds_often(&terms, &[create("new", 0), close(0), stat("c"), rename("new", "c"), rename("a/a", "c")]);
}

#[test]
fn the_other_links_live_on_when_an_open_one_is_unlinked() {
    for caps in [[8 << 10, 16 << 10], [4 << 30, 4 << 30]] {
        let terms = Terms { caps, direct: true, forgets: true, ..terms() };
        holds_often(&terms, &[open("c", 0, false), unlink("c"), Step::Happens(Event::Evict)]);
        holds_often(&terms, &[open("c", 0, true), rename("b", "c"), Step::Happens(Event::Evict)]);
    }
}

#[test]
fn what_is_written_to_an_unlinked_link_shows_in_the_others() {
    let write = does(Operation::Write { slot: 3, offset: 279, length: 143, byte: 183 });
    let steps = [open("c", 3, false), unlink("a/a"), unlink("c"), Step::Happens(Event::Evict), write];
    holds_often(&Terms { caps: [8 << 10, 16 << 10], forgets: true, ..terms() }, &steps);
    holds_often(&Terms { store_ttl: Duration::from_secs(60), copy_up_bytes_max: 1 << 20, ..terms() }, &steps);
}

#[test]
fn what_was_written_in_place_before_a_kill_is_seen_through_the_other_links() {
    for steps in [0, 4, 8, 16, 32] {
        let terms = Terms { drain_at_start: false, ..terms() };
        let kill = Step::Happens(Event::KillDrain { steps });
        holds_often(&terms, &[open("c", 2, true), rename("b", "c"), kill]);
    }
}

#[test]
fn attributes_that_were_set_by_a_link_are_not_lost_with_it() {
    let terms = Terms { drain_at_start: false, ..terms() };
    let xattr = SetXattr { path: "c".into(), name: "user.one".into(), byte: 197, how: Setting::Any };
    holds_often(&terms, &[does(xattr), unlink("c")]);
}

#[test]
fn links_that_come_and_go_are_no_conflict_and_are_counted() {
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
fn the_last_times_set_count_when_a_file_is_written_in_place() {
    let utimens = |path: &str, seconds| does(Utimens { path: path.into(), seconds });
    let steps = [open("c", 3, false), utimens("a/a", 1_001_092_807), utimens("c", 1_397_184_454)];
    holds_often(&terms(), &steps);
    holds_often(&terms(), &[&steps[..], &[Step::Happens(Event::Kill)]].concat());
}

#[test]
fn fsync_of_a_spilled_file_publishes_it_and_it_is_written_on() {
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
    // Its other name keeps the file that it is in the store: what is published is written over that one.
    let link = Operation::Link { from: "a/c".into(), to: "d".into() };
    holds_often(&terms, &[&[does(link), Step::Happens(Event::Settle)], &steps[..]].concat());
}

#[test]
fn a_spilled_copy_that_was_not_wanted_may_be_wanted_again() {
    let terms = Terms { caps: [8 << 10, 16 << 10], older_links: false, copy_up_bytes_max: 1 << 20, ..terms() };
    let steps = [open("a/c", 1, false), close(1), open("a/c", 0, false), close(0), open("a/c", 0, false)];
    holds_often(&terms, &steps);
    let terms = Terms { drain_at_start: false, ..terms };
    holds_often(&terms, &[&steps[..2], &[Step::Happens(Event::Kill)]].concat());
}

#[test]
fn an_exchange_with_a_link_leaves_the_others() {
    holds_often(&terms(), &[exchange("c", "b"), rename("a/a", "c"), exchange("a/b/a", "a/c")]);
}
