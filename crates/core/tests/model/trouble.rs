//! Regressions of a store that does not answer a query, or interrupts the write of a file. The agent took the missing answer for
//! an answer, and the half-written file for another client's.

use std::time::Duration;

use super::door::Mounted;
use super::world::{ALL_ANSWERED, Terms, World};
use super::{close, create, does, exchange, holds_often, rename, run};
use surgetank_testkit::model::operation::Operation::{
    Chmod, Link, Mkdir, Open, Rename, Rmdir, Symlink, Truncate, Unlink, Write,
};
use surgetank_testkit::model::operation::{Access, Event, Renaming, Step};
use surgetank_testkit::model::reference::Outcome;

const SETTLE: Step = Step::Happens(Event::Settle);

fn unlink(path: &str) -> Step {
    does(Unlink { path: path.into() })
}
fn link(from: &str, to: &str) -> Step {
    does(Link { from: from.into(), to: to.into() })
}
fn truncate(path: &str, size: u64) -> Step {
    does(Truncate { path: path.into(), size })
}

/// Runs once for each of the drain's first queries, which then fails.
fn each_query_unanswered(steps: &[Step]) {
    for number in 0..14 {
        let terms = Terms { unanswered: [number, u64::MAX, u64::MAX], ..Terms::plain() };
        if let Err(why) = run(&terms, steps) {
            panic!("query {number}: {why}");
        }
    }
}

/// Regression: the drain did not remove a directory that the store failed to show once.
#[test]
fn rmdir_is_applied_when_one_store_query_fails() {
    each_query_unanswered(&[does(Mkdir { path: "d".into(), perm: 0o755 }), SETTLE, does(Rmdir { path: "d".into() })]);
}

/// Regression: the drain left out an exchange of names that the store failed to show once.
#[test]
fn exchange_is_applied_when_one_store_query_fails() {
    each_query_unanswered(&[exchange("a/a", "b")]);
}

/// Regression: the drain left out a rename of a file that the store failed to show once.
#[test]
fn rename_is_applied_when_one_store_query_fails() {
    each_query_unanswered(&[rename("a/a", "c"), rename("b", "d"), SETTLE, truncate("d", 3), SETTLE, unlink("c")]);
    each_query_unanswered(&[rename("a", "c"), unlink("c/a")]);
}

/// Regression: the drain left out the deletion of a file that the store failed to show.
#[test]
fn unlink_is_applied_when_store_queries_fail() {
    each_query_unanswered(&[unlink("b"), unlink("a/a")]);
    // The second query fails too.
    for number in 0..6 {
        let terms = Terms { unanswered: [number, number + 1, u64::MAX], ..Terms::plain() };
        run(&terms, &[unlink("b")]).unwrap_or_else(|why| panic!("queries {number} and the next: {why}"));
    }
}

/// Regression: the drain took a file of several names for another client's when the store failed to show one name.
#[test]
fn linked_file_stays_ours_when_one_store_query_fails() {
    each_query_unanswered(&[link("b", "c"), SETTLE, unlink("c"), SETTLE, truncate("b", 7)]);
    each_query_unanswered(&[link("b", "c"), SETTLE, truncate("c", 7), SETTLE, unlink("b"), SETTLE, unlink("c")]);
}

/// Regression: a new version was a conflict when the store failed to show its place once.
#[test]
fn new_version_is_not_a_conflict_when_one_store_query_fails() {
    each_query_unanswered(&[truncate("b", 7), does(Chmod { path: "b".into(), perm: 0o700 }), SETTLE, truncate("b", 9)]);
    each_query_unanswered(&[
        does(Symlink { path: "d".into() }),
        SETTLE,
        unlink("d"),
        does(Symlink { path: "d".into() }),
    ]);
}

/// A write over a file with two names, which the store interrupts this many times.
fn broken_off(times: u64, after: &[Step]) {
    let begin = [link("b", "c"), SETTLE, Step::Happens(Event::StartDrain), truncate("b", 7)];
    for direct in [false, true] {
        let caps = if direct { [4 << 30; 2] } else { Terms::plain().caps };
        let terms = Terms { direct, caps, broken_off: times, unanswered: ALL_ANSWERED, ..Terms::plain() };
        let steps = [&begin[..], after].concat();
        run(&terms, &steps).unwrap_or_else(|why| panic!("{times} times, {direct}: {why}"));
    }
}

/// Regression: the drain took a half-written file of several names for another client's.
#[test]
fn half_written_linked_file_is_recognised() {
    broken_off(1, &[]);
    broken_off(2, &[]);
}

fn when_half_written(steps: &[Step]) -> Vec<Step> {
    [&[Step::Happens(Event::BrokenOff)], steps].concat()
}

/// Regression: the drain took a half-written file for another client's when a program wrote it again.
#[test]
fn half_written_file_is_recognised_after_a_write() {
    let open = Open { path: "c".into(), slot: 0, access: Access::Write, append: true, truncate: false };
    let write = Write { slot: 0, offset: 0, length: 5000, byte: 3 };
    broken_off(1, &when_half_written(&[does(open), does(write), close(0)]));
}

/// Regression: the drain took a half-written file for another client's when a program deleted or replaced it.
#[test]
fn half_written_file_can_be_deleted_or_replaced() {
    broken_off(1, &when_half_written(&[unlink("b")]));
    broken_off(1, &when_half_written(&[unlink("b"), unlink("c")]));
    broken_off(1, &when_half_written(&[rename("a/a", "b")]));
    broken_off(1, &when_half_written(&[rename("b", "a/d"), link("a/d", "e")]));
}

/// Regression: the next agent took a half-written file for another client's.
#[test]
fn half_written_file_is_recognised_after_an_agent_kill() {
    broken_off(1, &when_half_written(&[Step::Happens(Event::Kill)]));
    broken_off(1, &when_half_written(&[Step::Happens(Event::Kill), unlink("c")]));
    broken_off(1, &when_half_written(&[truncate("b", 30), Step::Happens(Event::Kill)]));
    for steps in 0..8 {
        broken_off(1, &[Step::Happens(Event::KillDrain { steps }), unlink("c")]);
    }
}

/// Regression: nothing reported the exchange that the drain could not do.
#[test]
fn exchange_prevented_by_another_client_is_reported() {
    let mut world = World::new(&Terms::plain());
    let exchange = Rename { from: "a/a".into(), to: "b".into(), how: Renaming::Exchange };
    assert_eq!(Mounted::new(world.namespace().clone(), false, false).apply(&exchange).0, Outcome::Fine);
    let theirs = world.base.join("store/b");
    std::fs::remove_file(&theirs).unwrap();
    std::fs::write(&theirs, "theirs").unwrap();
    world.settle().unwrap();
    let troubles = world.namespace().base.notes.troubles();
    assert!(
        troubles.iter().any(|noted| noted.what.contains("another client") && noted.what.contains("exchanged")),
        "{troubles:?}"
    );
    assert_eq!(std::fs::read(&theirs).unwrap(), b"theirs");
    assert_eq!(std::fs::metadata(world.base.join("store/a/a")).unwrap().len(), 5000);
}

/// Files without room in a tier.
fn spilled(number: u64) -> Terms {
    Terms { caps: [8 << 10, 16 << 10], unanswered_at_start: number, ..Terms::plain() }
}

fn write(offset: u64, length: usize) -> Step {
    does(Write { slot: 0, offset, length, byte: 3 })
}

/// Regression: the next agent forgot an open spilled file that the store failed to show at the start.
#[test]
fn open_spilled_file_is_kept_when_a_query_at_the_start_fails() {
    for number in 0..6 {
        let steps = [create("d", 0), write(0, 60_000), Step::Happens(Event::Kill)];
        run(&spilled(number), &steps).unwrap_or_else(|why| panic!("query {number}: {why}"));
    }
}

/// One version is published just before the kill; the next one is stored in a temporary. Regression: the next agent
/// forgot the temporary that the store failed to show at the start.
#[test]
fn next_version_is_kept_when_a_query_at_the_start_fails() {
    for number in 0..6 {
        let open = Open { path: "d".into(), slot: 0, access: Access::Write, append: false, truncate: false };
        let held =
            [create("d", 0), write(0, 5000), close(0), Step::Happens(Event::StartDrain), Step::Happens(Event::Held)];
        let killed = [does(open), write(0, 60_000), Step::Happens(Event::KillDrain { steps: 0 })];
        let terms = Terms { holds: true, ..spilled(number) };
        run(&terms, &[&held[..], &killed].concat()).unwrap_or_else(|why| panic!("query {number}: {why}"));
    }
}

/// Regression: two names exchanged just before the kill, and one failed query about them, left all of them in doubt.
/// Reads of them failed with ESTALE.
#[test]
fn exchange_before_a_kill_is_decided_after_a_failed_query() {
    let terms = Terms { older_links: true, forgets: true, store_ttl: Duration::from_secs(60), ..spilled(0) };
    holds_often(&terms, &[exchange("c", "b"), Step::Happens(Event::KillDrain { steps: 3 })]);
}

/// A program that writes and syncs, again and again.
fn synced_again() -> Vec<Step> {
    let write = |offset, length, byte| {
        does(surgetank_testkit::model::operation::Operation::Write { slot: 0, offset, length, byte })
    };
    let fsync = || does(surgetank_testkit::model::operation::Operation::Fsync { slot: 0 });
    let mut steps = vec![create("c", 0), write(0, 20_000, 1), fsync()];
    for turn in 0..7_u8 {
        steps.extend([write(u64::from(turn) * 2500, 900, 2 + turn), fsync()]);
    }
    steps.extend([rename("c", "a/d"), write(30_000, 1, 9), fsync(), fsync(), write(3, 1, 10), close(0)]);
    steps
}

fn synced_terms() -> Terms {
    Terms { fsync: surgetank_types::model::FsyncTarget::Store, ..Terms::plain() }
}

/// The names of a file and of its earlier version were exchanged, and the sync of the directory failed: the repetition must not
/// publish the earlier version.
#[test]
fn fsync_after_a_failed_directory_sync_publishes_the_newest_version() {
    for unsynced in 0..12 {
        run(&Terms { unsynced, ..synced_terms() }, &synced_again())
            .unwrap_or_else(|why| panic!("sync {unsynced} fails: {why}"));
    }
}

#[test]
fn repeated_fsyncs_survive_unanswered_queries() {
    for number in (0..60).step_by(3) {
        let terms = Terms { unanswered: [number, number + 3, u64::MAX], ..synced_terms() };
        run(&terms, &synced_again()).unwrap_or_else(|why| panic!("query {number}: {why}"));
    }
}

#[test]
fn repeated_fsyncs_survive_an_agent_kill() {
    let all = synced_again();
    for at in 3..all.len() {
        for cut in [0, 1, 2, 3, 4, 5, 6, 9] {
            let mut steps = all.clone();
            steps.insert(at, Step::Happens(Event::KillDrain { steps: cut }));
            run(&synced_terms(), &steps).unwrap_or_else(|why| panic!("{cut} steps before {at}: {why}"));
        }
    }
}
