use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn view(tier: u8, device: u8, free_bytes: u64) -> DeviceView {
    DeviceView {
        id: DeviceId { tier, device },
        tier_name: ["ram", "nvme", "disk"][usize::from(tier)].into(),
        free_bytes,
        reserved_bytes: 0,
        used_bytes: 0,
        cap_bytes: free_bytes,
        writers: 0,
        bandwidth_bytes_per_second: 1_000_000_000,
        load_bytes_per_second: 0,
        healthy: true,
        leases: true,
        survives: if tier == 0 { Survives::Agent } else { Survives::Reboot },
    }
}

fn create(expected: Expected) -> Ask {
    Ask {
        kind: AskKind::Create { expected },
        preferred_tier: None,
        direct_possible: true,
        must_persist: false,
        mode: Mode::Copy,
        dirty: DirtyRoom { bytes: 0, bytes_max: u64::MAX },
        until_the_end: None,
        salt: 0,
    }
}

fn device(tier: u8, device: u8, direct: bool, reserve_bytes: u64) -> Place {
    Place::Device { id: DeviceId { tier, device }, direct, reserve_bytes }
}

#[test]
fn unknown_size_is_direct_only_with_ample_space() {
    // 200 ms of one writer at 1 GB/s.
    let enough = view(0, 0, 200_000_000);
    let (place, reason) = choose(&create(Expected::Unknown), std::slice::from_ref(&enough));
    assert_eq!(place, device(0, 0, true, 0));
    assert!(reason.to_string().contains("ample"), "{reason}");

    let a_byte_short = DeviceView { free_bytes: 199_999_999, ..enough.clone() };
    assert_eq!(choose(&create(Expected::Unknown), &[a_byte_short]).0, device(0, 0, false, 0));
    let another_writer = DeviceView { writers: 1, ..enough.clone() };
    assert_eq!(choose(&create(Expected::Unknown), &[another_writer]).0, device(0, 0, false, 0));
    let unprivileged = Ask { direct_possible: false, ..create(Expected::Unknown) };
    assert_eq!(choose(&unprivileged, &[enough]).0, device(0, 0, false, 0));
}

#[test]
fn known_size_is_placed_where_all_of_it_fits() {
    let views = [view(0, 0, 10 * MIB), view(1, 0, GIB)];
    assert_eq!(choose(&create(Expected::Hint(4 * MIB)), &views).0, device(0, 0, true, 4 * MIB));
    let (place, reason) = choose(&create(Expected::Hint(11 * MIB)), &views);
    assert_eq!(place, device(1, 0, true, 11 * MIB));
    assert!(reason.to_string().contains("ram has 10 MiB free of the 11 MiB wanted"), "{reason}");
    // It fits nowhere as a whole: it begins on the fastest, and the agent moves it.
    assert_eq!(choose(&create(Expected::Hint(10 * GIB)), &views).0, device(0, 0, false, 0));
}

#[test]
fn history_of_three_samples_reserves_twice_its_maximum() {
    let views = [view(0, 0, 100 * MIB)];
    let history = |max_bytes, samples| create(Expected::History { max_bytes, samples });
    assert_eq!(choose(&history(6 * MIB, 3), &views).0, device(0, 0, true, 12 * MIB));
    assert_eq!(choose(&history(6 * MIB, 2), &views).0, device(0, 0, false, 0));
    assert_eq!(choose(&history(60 * MIB, 9), &views).0, device(0, 0, false, 0));
    assert_eq!(choose(&history(0, 9), &views).0, device(0, 0, true, RESERVE_BYTES_MIN));
}

#[test]
fn file_that_must_persist_skips_volatile_tiers() {
    let views = [view(0, 0, GIB), view(1, 0, GIB)];
    let ask = Ask { must_persist: true, ..create(Expected::Unknown) };
    let (place, reason) = choose(&ask, &views);
    assert_eq!(place, device(1, 0, true, 0));
    assert!(reason.to_string().contains("ram does not outlive"), "{reason}");
    assert_eq!(choose(&ask, &views[..1]).0, Place::Store);
}

#[test]
fn undrained_data_on_volatile_tiers_stays_below_limit() {
    let views = [view(0, 0, 8 * GIB), view(1, 0, 8 * GIB)];
    let dirty = |bytes, bytes_max| DirtyRoom { bytes, bytes_max };
    let hint = |mode, dirty| Ask { mode, dirty, ..create(Expected::Hint(100 * MIB)) };
    assert_eq!(choose(&hint(Mode::Copy, dirty(400 * MIB, 500 * MIB)), &views).0, device(0, 0, true, 100 * MIB));
    let (place, reason) = choose(&hint(Mode::Copy, dirty(401 * MIB, 500 * MIB)), &views);
    assert_eq!(place, device(1, 0, true, 100 * MIB));
    assert!(reason.to_string().contains("not in the store yet"), "{reason}");
    assert_eq!(choose(&hint(Mode::Move, dirty(401 * MIB, 500 * MIB)), &views[..1]).0, device(0, 0, false, 0));
    assert_eq!(choose(&hint(Mode::Move, dirty(500 * MIB, 500 * MIB)), &views[..1]).0, Place::Store);
    // A file that is never drained does not count.
    assert_eq!(choose(&hint(Mode::Remove, dirty(500 * MIB, 500 * MIB)), &views).0, device(0, 0, true, 100 * MIB));
    // Ample space on the device does not suffice when little may be undrained.
    let unknown = Ask { dirty: dirty(0, 100 * MIB), ..create(Expected::Unknown) };
    assert_eq!(choose(&unknown, &views).0, device(0, 0, false, 0));
}

#[test]
fn file_too_large_to_drain_in_time_skips_volatile_tiers() {
    let views = [view(0, 0, 8 * GIB), view(1, 0, 8 * GIB)];
    let end = |bytes, bytes_max| Ask {
        until_the_end: Some(DirtyRoom { bytes, bytes_max }),
        ..create(Expected::Hint(100 * MIB))
    };
    assert_eq!(choose(&end(400 * MIB, 500 * MIB), &views).0, device(0, 0, true, 100 * MIB));
    // It may still begin: the agent moves it if it becomes too large.
    assert_eq!(choose(&end(401 * MIB, 500 * MIB), &views).0, device(0, 0, false, 0));
    let (place, reason) = choose(&end(500 * MIB, 500 * MIB), &views);
    assert_eq!(place, Place::Store);
    assert!(reason.to_string().contains("when the job ends"), "{reason}");
    let lasting = DeviceView { survives: Survives::Node, ..view(2, 0, 8 * GIB) };
    let views = [views[0].clone(), views[1].clone(), lasting];
    assert_eq!(choose(&end(500 * MIB, 500 * MIB), &views).0, device(2, 0, true, 100 * MIB));
    // A file that is never drained does not count.
    let temporary = Ask { mode: Mode::Remove, ..end(500 * MIB, 500 * MIB) };
    assert_eq!(choose(&temporary, &views).0, device(0, 0, true, 100 * MIB));
}

#[test]
fn spill_never_returns_to_its_device_or_a_faster_tier() {
    let from = DeviceId { tier: 1, device: 0 };
    let spill = |have_bytes, want_bytes| Ask {
        kind: AskKind::Spill { have_bytes, want_bytes, from },
        ..create(Expected::Unknown)
    };
    let views = [view(0, 0, 8 * GIB), view(1, 0, 8 * GIB), view(1, 1, 50 * MIB), view(2, 0, GIB)];
    assert_eq!(choose(&spill(40 * MIB, 10 * MIB), &views).0, device(1, 1, false, 50 * MIB));
    assert_eq!(choose(&spill(40 * MIB, 11 * MIB), &views).0, device(2, 0, false, 51 * MIB));
    let (place, reason) = choose(&spill(2 * GIB, 0), &views);
    assert_eq!(place, Place::Store);
    assert!(
        reason.to_string().starts_with("in the store: no tier can take it; ram is what it had to leave"),
        "{reason}"
    );
}

#[test]
fn spill_between_volatile_devices_adds_only_its_growth() {
    let from = DeviceId { tier: 0, device: 0 };
    let ask = |bytes_max| Ask {
        kind: AskKind::Spill { have_bytes: 90 * MIB, want_bytes: 10 * MIB, from },
        dirty: DirtyRoom { bytes: 90 * MIB, bytes_max },
        ..create(Expected::Unknown)
    };
    let views = [view(0, 0, 0), view(0, 1, GIB)];
    assert_eq!(choose(&ask(100 * MIB), &views).0, device(0, 1, false, 100 * MIB));
    assert_eq!(choose(&ask(99 * MIB), &views).0, Place::Store);
}

#[test]
fn copy_up_needs_ample_space_and_prefetch_leaves_space() {
    let ask = |kind| Ask { kind, ..create(Expected::Unknown) };
    let up = ask(AskKind::CopyUp { bytes: 100_000_000 });
    assert_eq!(choose(&up, &[view(0, 0, 300_000_000)]).0, device(0, 0, true, 100_000_000));
    assert_eq!(choose(&up, &[view(0, 0, 299_999_999)]).0, device(0, 0, false, 100_000_000));
    assert_eq!(choose(&up, &[view(0, 0, 99_999_999)]).0, Place::Store);
    let prefetch = |bytes| ask(AskKind::Prefetch { bytes });
    assert_eq!(choose(&prefetch(15 * MIB), &[view(0, 0, 16 * MIB)]).0, device(0, 0, false, 15 * MIB));
    assert_eq!(choose(&prefetch(15 * MIB + 1), &[view(0, 0, 16 * MIB)]).0, Place::Store);
}

#[test]
fn preferred_tier_is_tried_first_then_slower_ones() {
    let views = [view(0, 0, GIB), view(1, 0, 0), view(2, 0, GIB)];
    let ask = Ask { preferred_tier: Some(1), ..create(Expected::Unknown) };
    assert_eq!(choose(&ask, &views).0, device(2, 0, true, 0));
    assert_eq!(choose(&ask, &views[..2]).0, device(0, 0, true, 0));
    assert_eq!(choose(&Ask { preferred_tier: Some(9), ..ask }, &views).0, device(0, 0, true, 0));
}

#[test]
fn file_without_known_size_begins_on_tiny_tier() {
    let tiny = DeviceView { cap_bytes: 16 * MIB, ..view(0, 0, MIB / 4) };
    assert_eq!(choose(&create(Expected::Unknown), std::slice::from_ref(&tiny)).0, device(0, 0, false, 0));
    let full = DeviceView { free_bytes: MIB / 4 - 1, ..tiny };
    assert_eq!(choose(&create(Expected::Unknown), &[full]).0, Place::Store);
    assert_eq!(choose(&create(Expected::Unknown), &[]).0, Place::Store);
}

#[test]
fn busy_device_among_equals_is_avoided() {
    let busy = DeviceView { load_bytes_per_second: 1_000_000_000, ..view(0, 0, GIB) };
    let crowded = DeviceView { writers: 4, ..view(0, 1, GIB) };
    let calm = view(0, 2, GIB);
    for salt in 0..6 {
        let ask = Ask { salt, ..create(Expected::Unknown) };
        assert_eq!(choose(&ask, &[busy.clone(), crowded.clone(), calm.clone()]).0, device(0, 2, true, 0));
    }
}

fn views() -> impl Strategy<Value = Vec<DeviceView>> {
    let sizes = || prop_oneof![Just(0), 0..4 * MIB, 0..8 * GIB, any::<u64>()];
    let one = (0..3u8, sizes(), sizes(), 0..4u32, 0..8_000_000_000u64, any::<bool>(), any::<bool>());
    prop::collection::vec(one, 0..7).prop_map(|all| {
        let mut count = [0u8; 3];
        let mut views: Vec<DeviceView> = all
            .into_iter()
            .map(|(tier, free, cap, writers, load, healthy, volatile)| {
                let index = count[usize::from(tier)];
                count[usize::from(tier)] += 1;
                DeviceView {
                    cap_bytes: cap.max(free),
                    writers,
                    load_bytes_per_second: load,
                    healthy,
                    survives: if volatile { Survives::Agent } else { Survives::Reboot },
                    ..view(tier, index, free)
                }
            })
            .collect();
        views.sort_by_key(|view| view.id);
        views
    })
}

fn ask() -> impl Strategy<Value = Ask> {
    let bytes = || prop_oneof![0..4 * MIB, 0..8 * GIB, any::<u64>()];
    let from = (0..3u8, 0..3u8).prop_map(|(tier, device)| DeviceId { tier, device });
    let kind = prop_oneof![
        Just(AskKind::Create { expected: Expected::Unknown }),
        bytes().prop_map(|bytes| AskKind::Create { expected: Expected::Hint(bytes) }),
        (bytes(), 0..6u32)
            .prop_map(|(max_bytes, samples)| AskKind::Create { expected: Expected::History { max_bytes, samples } }),
        (bytes(), bytes(), from).prop_map(|(have_bytes, want_bytes, from)| AskKind::Spill {
            have_bytes,
            want_bytes,
            from
        }),
        bytes().prop_map(|bytes| AskKind::CopyUp { bytes }),
        bytes().prop_map(|bytes| AskKind::Prefetch { bytes }),
    ];
    let mode = prop_oneof![Just(Mode::Keep), Just(Mode::Copy), Just(Mode::Move), Just(Mode::Remove)];
    (kind, prop::option::of(0..4u8), any::<bool>(), any::<bool>(), mode, bytes(), bytes(), any::<u64>()).prop_map(
        |(kind, preferred_tier, direct_possible, must_persist, mode, dirty, dirty_max, salt)| Ask {
            kind,
            preferred_tier,
            direct_possible,
            must_persist,
            mode,
            dirty: DirtyRoom { bytes: dirty, bytes_max: dirty_max },
            until_the_end: None,
            salt,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn every_decision_keeps_the_invariants(ask in ask(), views in views()) {
        let (place, reason) = choose(&ask, &views);
        prop_assert_eq!(&(place, reason.clone()), &choose(&ask, &views), "not deterministic");
        prop_assert!(!reason.to_string().is_empty());
        let Place::Device { id, direct, reserve_bytes } = place else {
            return Ok(());
        };
        let view = views.iter().find(|view| view.id == id).unwrap();
        prop_assert!(view.healthy);
        prop_assert!(!(ask.must_persist && view.survives == Survives::Agent));
        prop_assert!(reserve_bytes <= view.free_bytes);
        prop_assert!(!direct || ask.direct_possible);
        if direct {
            let guaranteed = match ask.kind {
                AskKind::Create { .. } if reserve_bytes >= RESERVE_BYTES_MIN => true,
                AskKind::Create { .. } => view.free_bytes >= ample_bytes(view),
                AskKind::CopyUp { .. } => u128::from(view.free_bytes) >= u128::from(ample_bytes(view)) + u128::from(reserve_bytes),
                AskKind::Spill { .. } | AskKind::Prefetch { .. } | AskKind::Fetch { .. } => false,
            };
            prop_assert!(guaranteed, "{:?} {:?}", ask, view);
        }
        if let AskKind::Spill { have_bytes, want_bytes, from } = ask.kind {
            prop_assert!(id != from && id.tier >= from.tier);
            prop_assert_eq!(reserve_bytes, have_bytes.saturating_add(want_bytes));
        }
        let counts = is_dirty(&ask) && view.survives == Survives::Agent;
        let moves_within = matches!(ask.kind, AskKind::Spill { from, .. } if is_volatile(&views, from));
        if counts && !moves_within {
            prop_assert!(ask.dirty.bytes.saturating_add(reserve_bytes) <= ask.dirty.bytes_max);
        }
    }

    /// A run of creations and deletions over three tiers: caps hold at every step.
    #[test]
    fn caps_hold_over_creations_and_deletions(
        steps in prop::collection::vec((0..64 * MIB, any::<bool>(), any::<u64>(), 0..4u32), 1..300)
    ) {
        let mut views = vec![view(0, 0, 256 * MIB), view(0, 1, 128 * MIB), view(1, 0, GIB), view(2, 0, 2 * GIB)];
        let mut held: Vec<(usize, u64)> = Vec::new();
        for (bytes, delete, salt, samples) in steps {
            if delete && !held.is_empty() {
                let (index, bytes) = held.swap_remove(salt as usize % held.len());
                views[index].free_bytes += bytes;
                views[index].reserved_bytes -= bytes;
            }
            let expected = Expected::History { max_bytes: bytes, samples };
            let (place, _) = choose(&Ask { salt, ..create(expected) }, &views);
            if let Place::Device { id, reserve_bytes, .. } = place {
                let index = views.iter().position(|view| view.id == id).unwrap();
                views[index].free_bytes = views[index].free_bytes.checked_sub(reserve_bytes).expect("beyond the cap");
                views[index].reserved_bytes += reserve_bytes;
                prop_assert!(views[index].reserved_bytes <= views[index].cap_bytes);
                held.push((index, reserve_bytes));
            }
        }
    }

    /// Equal devices fill evenly: they differ by at most a sixteenth of the free space and the largest file.
    #[test]
    fn equal_devices_fill_evenly(count in 2..6u8, sizes in prop::collection::vec(1..4 * MIB, 50..400)) {
        let mut views: Vec<DeviceView> = (0..count).map(|device| view(0, device, 4 * GIB)).collect();
        for (salt, bytes) in sizes.iter().enumerate() {
            let ask = Ask { salt: salt as u64, ..create(Expected::Unknown) };
            let (Place::Device { id, .. }, _) = choose(&ask, &views) else { panic!("there is room") };
            views[usize::from(id.device)].free_bytes -= bytes;
            views[usize::from(id.device)].used_bytes += bytes;
        }
        let most = views.iter().map(|view| view.used_bytes).max().unwrap();
        let least = views.iter().map(|view| view.used_bytes).min().unwrap();
        prop_assert!(most - least <= 4 * GIB / 16 + 4 * MIB, "{most} {least}");
        // By number as well: equal devices alternate even before a byte is written.
        let used = views.iter().filter(|view| view.used_bytes > 0).count();
        prop_assert_eq!(used, usize::from(count));
    }
}
