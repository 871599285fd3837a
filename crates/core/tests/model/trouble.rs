//! What came of a store that did not answer a question, or broke off in the middle of a file: it was taken for an answer, and
//! for somebody else's doing.

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

/// Each of the first questions of the drain in turn is not answered.
fn whatever_is_not_answered(steps: &[Step]) {
    for number in 0..14 {
        let terms = Terms { unanswered: [number, u64::MAX, u64::MAX], ..Terms::plain() };
        if let Err(why) = run(&terms, steps) {
            panic!("question {number}: {why}");
        }
    }
}

#[test]
fn a_directory_that_the_store_did_not_show_was_not_removed() {
    whatever_is_not_answered(&[
        does(Mkdir { path: "d".into(), perm: 0o755 }),
        SETTLE,
        does(Rmdir { path: "d".into() }),
    ]);
}

#[test]
fn an_exchange_of_names_that_the_store_did_not_show_was_left_out() {
    whatever_is_not_answered(&[exchange("a/a", "b")]);
}

#[test]
fn a_rename_of_a_file_that_the_store_did_not_show_was_left_out() {
    whatever_is_not_answered(&[rename("a/a", "c"), rename("b", "d"), SETTLE, truncate("d", 3), SETTLE, unlink("c")]);
    whatever_is_not_answered(&[rename("a", "c"), unlink("c/a")]);
}

#[test]
fn a_deletion_of_a_file_that_the_store_did_not_show_was_left_out() {
    whatever_is_not_answered(&[unlink("b"), unlink("a/a")]);
    // Not even the second time.
    for number in 0..6 {
        let terms = Terms { unanswered: [number, number + 1, u64::MAX], ..Terms::plain() };
        run(&terms, &[unlink("b")]).unwrap_or_else(|why| panic!("questions {number} and the next: {why}"));
    }
}

#[test]
fn a_file_with_another_name_that_the_store_did_not_show_was_taken_for_anothers() {
    whatever_is_not_answered(&[link("b", "c"), SETTLE, unlink("c"), SETTLE, truncate("b", 7)]);
    whatever_is_not_answered(&[link("b", "c"), SETTLE, truncate("c", 7), SETTLE, unlink("b"), SETTLE, unlink("c")]);
}

#[test]
fn a_new_version_whose_place_the_store_did_not_show_was_a_conflict() {
    whatever_is_not_answered(&[
        truncate("b", 7),
        does(Chmod { path: "b".into(), perm: 0o700 }),
        SETTLE,
        truncate("b", 9),
    ]);
    whatever_is_not_answered(&[
        does(Symlink { path: "d".into() }),
        SETTLE,
        unlink("d"),
        does(Symlink { path: "d".into() }),
    ]);
}

/// Goes over the file that both names are, and the store breaks off in the middle of that, so often.
fn broken_off(times: u64, after: &[Step]) {
    let begin = [link("b", "c"), SETTLE, Step::Happens(Event::StartDrain), truncate("b", 7)];
    for direct in [false, true] {
        let caps = if direct { [4 << 30; 2] } else { Terms::plain().caps };
        let terms = Terms { direct, caps, broken_off: times, unanswered: ALL_ANSWERED, ..Terms::plain() };
        let steps = [&begin[..], after].concat();
        run(&terms, &steps).unwrap_or_else(|why| panic!("{times} times, {direct}: {why}"));
    }
}

#[test]
fn a_file_of_several_names_that_was_half_written_was_taken_for_anothers() {
    broken_off(1, &[]);
    broken_off(2, &[]);
}

fn when_half_written(steps: &[Step]) -> Vec<Step> {
    [&[Step::Happens(Event::BrokenOff)], steps].concat()
}

#[test]
fn written_again_when_it_was_half_written_it_was_taken_for_anothers() {
    let open = Open { path: "c".into(), slot: 0, access: Access::Write, append: true, truncate: false };
    let write = Write { slot: 0, offset: 0, length: 5000, byte: 3 };
    broken_off(1, &when_half_written(&[does(open), does(write), close(0)]));
}

#[test]
fn deleted_or_replaced_when_it_was_half_written_it_was_taken_for_anothers() {
    broken_off(1, &when_half_written(&[unlink("b")]));
    broken_off(1, &when_half_written(&[unlink("b"), unlink("c")]));
    broken_off(1, &when_half_written(&[rename("a/a", "b")]));
    broken_off(1, &when_half_written(&[rename("b", "a/d"), link("a/d", "e")]));
}

#[test]
fn half_written_when_the_agent_was_killed_it_was_taken_for_anothers() {
    broken_off(1, &when_half_written(&[Step::Happens(Event::Kill)]));
    broken_off(1, &when_half_written(&[Step::Happens(Event::Kill), unlink("c")]));
    broken_off(1, &when_half_written(&[truncate("b", 30), Step::Happens(Event::Kill)]));
    for steps in 0..8 {
        broken_off(1, &[Step::Happens(Event::KillDrain { steps }), unlink("c")]);
    }
}

#[test]
fn an_exchange_that_somebody_else_prevented_was_said_by_nobody() {
    let mut world = World::new(&Terms::plain());
    let exchange = Rename { from: "a/a".into(), to: "b".into(), how: Renaming::Exchange };
    assert_eq!(Mounted::new(world.namespace().clone(), false, false).apply(&exchange).0, Outcome::Fine);
    let theirs = world.base.join("store/b");
    std::fs::remove_file(&theirs).unwrap();
    std::fs::write(&theirs, "theirs").unwrap();
    world.settle().unwrap();
    let told = world.namespace().troubles();
    assert!(
        told.iter().any(|noted| noted.what.contains("another client") && noted.what.contains("exchanged")),
        "{told:?}"
    );
    assert_eq!(std::fs::read(&theirs).unwrap(), b"theirs");
    assert_eq!(std::fs::metadata(world.base.join("store/a/a")).unwrap().len(), 5000);
}

/// Files that find no room in a tier.
fn spilled(number: u64) -> Terms {
    Terms { caps: [8 << 10, 16 << 10], unanswered_at_start: number, ..Terms::plain() }
}

fn write(offset: u64, length: usize) -> Step {
    does(Write { slot: 0, offset, length, byte: 3 })
}

#[test]
fn what_was_spilled_and_open_was_forgotten_when_the_store_did_not_show_it_at_the_start() {
    for number in 0..6 {
        let steps = [create("d", 0), write(0, 60_000), Step::Happens(Event::Kill)];
        run(&spilled(number), &steps).unwrap_or_else(|why| panic!("question {number}: {why}"));
    }
}

/// One version was published just before the kill, and the next one lay in a temporary.
#[test]
fn the_version_after_a_published_one_was_forgotten_when_the_store_did_not_show_it_at_the_start() {
    for number in 0..6 {
        let open = Open { path: "d".into(), slot: 0, access: Access::Write, append: false, truncate: false };
        let held =
            [create("d", 0), write(0, 5000), close(0), Step::Happens(Event::StartDrain), Step::Happens(Event::Held)];
        let killed = [does(open), write(0, 60_000), Step::Happens(Event::KillDrain { steps: 0 })];
        let terms = Terms { holds: true, ..spilled(number) };
        run(&terms, &[&held[..], &killed].concat()).unwrap_or_else(|why| panic!("question {number}: {why}"));
    }
}

/// Names that changed places just before the kill, and one look at them that failed: all stayed in doubt, and what was read
/// then was another's (ESTALE).
#[test]
fn an_exchange_before_a_kill_stayed_in_doubt_when_the_store_did_not_show_it_at_the_start() {
    let terms = Terms { older_links: true, forgets: true, store_ttl: Duration::from_secs(60), ..spilled(0) };
    holds_often(&terms, &[exchange("c", "b"), Step::Happens(Event::KillDrain { steps: 3 })]);
}
