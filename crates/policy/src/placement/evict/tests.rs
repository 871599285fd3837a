use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn file(id: u64, bytes: u64) -> Candidate {
    Candidate {
        id: FileId(id),
        bytes,
        durable: true,
        pinned: false,
        open: false,
        mode: Mode::Copy,
        droppable: false,
        prefetched: false,
        next_read: None,
        reads: 0,
        idle: Duration::from_secs(10),
    }
}

fn ids(victims: &[(FileId, EvictReason)]) -> Vec<u64> {
    victims.iter().map(|(id, _)| id.0).collect()
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Keep), Just(Mode::Copy), Just(Mode::Move), Just(Mode::Remove)]
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let bytes = prop_oneof![4 => 0..5_000_000u64, 1 => Just(u64::MAX)];
    let next = prop_oneof![
        3 => Just(None),
        1 => Just(Some(NextRead::Never)),
        3 => (0..20u64).prop_map(|turn| Some(NextRead::At(turn)))
    ];
    let one = (bytes, flags, mode(), (0..5u32, next), 0..100_000u64);
    prop::collection::vec(one, 0..80).prop_map(|all| {
        let numbered = all.into_iter().enumerate();
        numbered
            .map(|(id, (bytes, (durable, pinned, open, droppable, prefetched), mode, (reads, next_read), idle_ms))| {
                Candidate {
                    id: FileId(id as u64),
                    bytes,
                    durable,
                    pinned,
                    open,
                    mode,
                    droppable,
                    prefetched,
                    next_read,
                    reads,
                    idle: Duration::from_millis(idle_ms),
                }
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn victims_are_evictable_sufficient_and_minimal(
        candidates in candidates(), want in prop_oneof![0..20_000_000u64, any::<u64>()]
    ) {
        let by_id: HashMap<FileId, Candidate> = candidates.iter().map(|c| (c.id, *c)).collect();
        let victims = victims(candidates.iter().copied(), want);
        let may_go = |c: &Candidate| {
            (c.durable || (c.mode == Mode::Remove && c.droppable)) && !c.pinned && !c.open
        };
        let mut freed: u128 = 0;
        let mut seen = std::collections::HashSet::new();
        for (id, _) in &victims {
            let candidate = by_id[id];
            prop_assert!(may_go(&candidate), "{candidate:?} must stay");
            prop_assert!(seen.insert(*id), "twice");
            freed += u128::from(candidate.bytes);
        }
        let possible: u128 = candidates.iter().filter(|c| may_go(c)).map(|c| u128::from(c.bytes)).sum();
        prop_assert!(freed >= u128::from(want).min(possible));
        for (id, _) in &victims {
            prop_assert!(want > 0 && (freed - u128::from(by_id[id].bytes) < u128::from(want)), "{id:?} goes needlessly");
        }
        // The most valuable victim is worth at most what a full sort would have had to take.
        let mut sorted: Vec<&Candidate> = candidates.iter().filter(|c| c.evictable()).collect();
        sorted.sort_by_key(|c| (c.class(), c.value(), c.id));
        let mut prefix: u128 = 0;
        let needed: Vec<FileId> = sorted
            .iter()
            .take_while(|c| { let resume = prefix < u128::from(want); prefix += u128::from(c.bytes); resume })
            .map(|c| c.id)
            .collect();
        for (id, _) in &victims {
            prop_assert!(needed.contains(id), "{id:?} is worth more than others that suffice");
        }
    }
}

#[test]
fn victims_follow_the_order_of_classes() {
    let temporary = Candidate { mode: Mode::Remove, droppable: true, durable: false, ..file(1, 100) };
    let moved = Candidate { mode: Mode::Move, reads: 9, idle: Duration::ZERO, ..file(2, 100) };
    let consumed = Candidate { prefetched: true, reads: 1, idle: Duration::ZERO, ..file(3, 100) };
    let ordinary = Candidate { idle: Duration::from_secs(1_000_000), ..file(4, 100) };
    let all = [ordinary, consumed, moved, temporary];
    let chosen = victims(all.into_iter(), 400);
    assert_eq!(ids(&chosen), [1, 2, 3, 4]);
    assert_eq!(chosen[0].1, EvictReason::Droppable);
    assert_eq!(chosen[1].1, EvictReason::Moved);
    assert_eq!(chosen[2].1, EvictReason::PrefetchedAndRead);
    assert_eq!(ids(&victims(all.into_iter(), 150)), [1, 2]);
}

#[test]
fn temporary_is_evicted_only_if_its_rule_allows() {
    let kept = Candidate { mode: Mode::Remove, droppable: false, durable: false, ..file(1, 100) };
    // The flag alone does not suffice for a file that is to be drained.
    let undrained = Candidate { mode: Mode::Copy, droppable: true, durable: false, ..file(2, 100) };
    assert_eq!(victims([kept, undrained].into_iter(), 1), []);
}

#[test]
fn large_old_unread_files_are_evicted_first() {
    let by_age = [Candidate { idle: Duration::from_secs(1), ..file(1, 1 << 20) }, file(2, 1 << 20)];
    assert_eq!(ids(&victims(by_age.into_iter(), 1)), [2]);
    let by_use = [Candidate { reads: 5, ..file(1, 1 << 20) }, file(2, 1 << 20)];
    assert_eq!(ids(&victims(by_use.into_iter(), 1)), [2]);
    // 4 KiB frees little and costs a round trip to fetch again.
    let by_size = [file(1, 4096), file(2, 64 << 20)];
    assert_eq!(ids(&victims(by_size.into_iter(), 1)), [2]);
    // A prefetched file that was not read yet is about to be read.
    let ahead = [Candidate { prefetched: true, ..file(1, 1 << 20) }, Candidate { reads: 3, ..file(2, 1 << 20) }];
    assert_eq!(ids(&victims(ahead.into_iter(), 1)), [2]);
}

#[test]
fn latest_next_read_is_evicted_first_among_planned() {
    let known =
        |id, next_read| Candidate { next_read: Some(next_read), reads: 100, idle: Duration::ZERO, ..file(id, 10) };
    let all = [
        known(1, NextRead::At(7)),
        known(2, NextRead::At(3)),
        known(3, NextRead::Never),
        file(4, 10),
        known(5, NextRead::At(9)),
        Candidate { prefetched: true, reads: 1, ..known(6, NextRead::At(1)) },
        Candidate { prefetched: true, reads: 1, ..file(7, 10) },
    ];
    for (want, goes) in [(10, vec![3]), (20, vec![3, 7]), (30, vec![3, 7, 4]), (60, vec![3, 7, 4, 5, 1, 2])] {
        assert_eq!(ids(&victims(all.into_iter(), want)), goes);
    }
    let (_, why) = victims([all[0]].into_iter(), 1)[0];
    assert!(why.to_string().contains("next_read 7"));
}

/// A loop over files that do not all fit: the least recently used file is always the next one needed. Belady's rule needs the
/// fewest fetches possible, which the test computes in another way.
#[test]
fn loop_over_too_many_files_needs_fewest_fetches() {
    let (files, fit, rounds) = (10_u64, 6_usize, 20_u64);
    let fetches = |knows: bool| {
        let mut here: Vec<(u64, u64)> = Vec::new();
        let mut fetched = 0;
        for now in 0..files * rounds {
            let wanted = now % files;
            if let Some(known) = here.iter_mut().find(|(id, _)| *id == wanted) {
                known.1 = now;
                continue;
            }
            fetched += 1;
            if here.len() == fit {
                let candidates = here.iter().map(|(id, used)| Candidate {
                    next_read: knows.then(|| NextRead::At(now + (id + files - wanted) % files)),
                    idle: Duration::from_secs(now - used),
                    ..file(*id, 10)
                });
                let (goes, _) = victims(candidates, 10)[0];
                here.retain(|(id, _)| *id != goes.0);
            }
            here.push((wanted, now));
        }
        fetched
    };
    assert_eq!(fetches(false), files * rounds, "the loop is one that time of use is wrong about");
    // After the first round: of every `files` - 1 reads, `fit` - 1 are hits (the files that stay from one fetch to the next).
    let least = files + (files * (rounds - 1) * (files - fit as u64)).div_ceil(files - 1);
    assert!(fetches(true).abs_diff(least) <= 2, "{} and not {least}", fetches(true));
}
