use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::*;

const MIB: u64 = 1 << 20;

fn tier(name: &str, paths: &[&Path], cap_bytes: Option<u64>) -> TierConfig {
    TierConfig {
        name: name.to_owned(),
        paths: paths.iter().map(|path| path.to_path_buf()).collect(),
        cap_bytes,
        survives: None,
    }
}

fn shm() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

const FIRST: DeviceId = DeviceId { tier: 0, device: 0 };

/// Runs `test` with tmpfs mounts of the given sizes in a mount namespace of the test's own thread, where no other process sees
/// them. They end with the thread. Needs root; without root the test reports that it was left out.
fn with_tmpfs(sizes: &[&str], test: impl FnOnce(&[PathBuf]) + Send) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let base = tempfile::tempdir().unwrap();
    let outcome = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: gives this thread a mount namespace of its own; no memory is touched.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                eprintln!("left out: needs root to mount a tmpfs ({})", io::Error::last_os_error());
                return;
            }
            mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
            let paths: Vec<PathBuf> = sizes
                .iter()
                .enumerate()
                .map(|(index, size)| {
                    let path = base.path().join(index.to_string());
                    fs::create_dir(&path).unwrap();
                    let options = std::ffi::CString::new(format!("size={size}")).unwrap();
                    mount("surgetank-test", &path, "tmpfs", MountFlags::empty(), options.as_c_str()).unwrap();
                    path
                })
                .collect();
            test(&paths);
        });
        thread.join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

fn ballast_of(path: &Path) -> PathBuf {
    path.join(format!("surgetank-{}/k/ballast", rustix::process::geteuid().as_raw()))
}

#[test]
fn capped_tier_at_clean_end_leaves_nothing() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(10 * MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    assert_eq!((device.tier_name(), device.survives(), device.in_memory()), ("ram", Survives::Agent, true));
    assert!(device.leases());
    assert_eq!(device.free_bytes(), 10 * MIB);
    assert!(device.try_reserve(4 * MIB));
    assert!(!device.try_reserve(7 * MIB));
    let file = device.create(b"a/b", 0o600).unwrap();
    file.write_all_at(&vec![1; 4 * MIB as usize], 0).unwrap();
    device.add_used(4 * MIB as i64);
    device.unreserve(4 * MIB);
    tiers.poll();
    let view = &tiers.views()[0];
    let ballast_bytes = 10 * MIB / 100;
    assert_eq!((view.used_bytes, view.reserved_bytes, view.cap_bytes), (4 * MIB, 0, 10 * MIB));
    assert_eq!(view.free_bytes, 6 * MIB - ballast_bytes);

    device.sweep().unwrap();
    assert!(dir.path().read_dir().unwrap().next().is_some(), "a file is left, so the scope is");
    device.unlink(b"a/b").unwrap();
    device.sweep().unwrap();
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}

#[test]
fn ballast_after_release_is_allocated_again_with_space() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(100 * MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    assert!(!device.release_ballast(), "none is there before the first poll");
    tiers.poll();
    assert_eq!(fs::metadata(ballast_of(dir.path())).unwrap().len(), MIB);
    assert_eq!(device.free_bytes(), 99 * MIB);
    assert!(device.release_ballast());
    assert!(!device.release_ballast());
    assert!(!ballast_of(dir.path()).exists());
    assert_eq!(device.free_bytes(), 100 * MIB);

    // No space: not allocated again. Space is back: allocated again.
    assert!(device.try_reserve(97 * MIB));
    tiers.poll();
    assert!(!ballast_of(dir.path()).exists());
    device.unreserve(97 * MIB);
    tiers.poll();
    assert!(ballast_of(dir.path()).exists());
    // Use beyond the cap: the files come first.
    device.add_used(101 * MIB as i64);
    tiers.poll();
    assert!(!ballast_of(dir.path()).exists());
    assert_eq!(device.excess_bytes(), MIB);
    device.add_used(-(101 * MIB as i64));
    // Not allocated without direct writers; and the ballast of a killed agent is removed at the next start.
    device.want_ballast(false);
    tiers.poll();
    assert!(!ballast_of(dir.path()).exists());
    fs::write(ballast_of(dir.path()), b"left").unwrap();
    let again = Tiers::open(&[tier("ram", &[dir.path()], Some(100 * MIB))], "k").unwrap();
    assert!(!ballast_of(dir.path()).exists());
    again.device(FIRST).sweep().unwrap();
}

#[test]
fn unnamed_files_when_closed_leave_nothing() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    let count = || {
        let mut count = 0;
        device.walk(&mut |_, _| count += 1).unwrap();
        count
    };
    let file = device.create_unnamed(0o640).unwrap();
    assert_eq!(count(), 0);
    file.write_all_at(b"x", 0).unwrap();
    let unlinked = device.create_unlinked(rustix::fs::Mode::RUSR).unwrap();
    unlinked.write_all_at(b"y", 0).unwrap();
    assert_eq!(count(), 0);
    drop((file, unlinked));
    device.sweep().unwrap();
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}

#[test]
fn ledger_under_concurrent_writers_keeps_exact_sums() {
    let dir = shm();
    let cap = 1000;
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(cap))], "k").unwrap();
    let device = tiers.device(FIRST);
    device.want_ballast(false);
    let totals: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|seed| {
                scope.spawn(move || {
                    let (mut used, mut reserved) = (0u64, 0u64);
                    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                    for _ in 0..20_000 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let bytes = random % 97;
                        match random >> 60 {
                            0..=6 => {
                                if device.try_reserve(bytes) {
                                    reserved += bytes;
                                }
                            }
                            7..=10 => {
                                let bytes = bytes.min(reserved);
                                device.add_used(bytes as i64);
                                device.unreserve(bytes);
                                used += bytes;
                                reserved -= bytes;
                            }
                            _ => {
                                let bytes = bytes.min(used);
                                device.add_used(-(bytes as i64));
                                used -= bytes;
                            }
                        }
                        // Only granted reservations become use, so this holds at every moment. The transient double count of a
                        // write makes the free space too small, by at most its own bytes.
                        let view = device.view();
                        assert!(view.used_bytes + view.reserved_bytes <= cap + 4 * 97);
                    }
                    (used, reserved)
                })
            })
            .collect();
        let poller = scope.spawn(|| (0..200).for_each(|_| tiers.poll()));
        let totals = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        poller.join().unwrap();
        totals
    });
    let view = device.view();
    assert_eq!(view.used_bytes, totals.iter().map(|(used, _)| used).sum::<u64>());
    assert_eq!(view.reserved_bytes, totals.iter().map(|(_, reserved)| reserved).sum::<u64>());
    assert!(view.used_bytes + view.reserved_bytes <= cap);
    device.sweep().unwrap();
}

#[test]
fn cap_shares_follow_free_space_and_never_exceed_cap() {
    with_tmpfs(&["64m", "192m"], |paths| {
        let config = [tier("ram", &[&paths[0], &paths[1]], Some(100 * MIB))];
        let tiers = Tiers::open(&config, "k").unwrap();
        let devices: Vec<&Device> = tiers.devices().collect();
        devices.iter().for_each(|device| device.want_ballast(false));
        let caps: Vec<u64> = tiers.views().iter().map(|view| view.cap_bytes).collect();
        assert_eq!(caps.iter().sum::<u64>(), 100 * MIB);
        // 60 to 180 after their floors.
        assert!((24 * MIB..=26 * MIB).contains(&caps[0]), "{caps:?}");

        assert!(devices[0].try_reserve(20 * MIB));
        // Another user takes most of the larger device: the smaller one's share grows, reservations stay.
        let stranger = fs::File::create(paths[1].join("stranger")).unwrap();
        stranger.write_all_at(&vec![1; 170 * MIB as usize], 0).unwrap();
        tiers.poll();
        let views = tiers.views();
        assert_eq!(views.iter().map(|view| view.cap_bytes).sum::<u64>(), 100 * MIB);
        assert!(views[0].cap_bytes > 80 * MIB, "{}", views[0].cap_bytes);
        assert!(views[1].free_bytes <= 10 * MIB);

        // Reservations race with the moves of shares; together they stay below the cap.
        let granted: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = devices
                .iter()
                .map(|device| scope.spawn(|| (0..4000).filter(|_| device.try_reserve(MIB / 16)).count() as u64))
                .collect();
            for round in 0..50 {
                stranger.set_len(if round % 2 == 0 { 0 } else { 170 * MIB }).unwrap();
                tiers.poll();
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(20 * MIB + granted * (MIB / 16) <= 100 * MIB);
        assert_eq!(tiers.views().iter().map(|view| view.cap_bytes).sum::<u64>(), 100 * MIB);
    });
}

#[test]
fn other_users_of_tiny_device_reduce_free_space() {
    with_tmpfs(&["16m"], |paths| {
        let tiers = Tiers::open(&[tier("ram", &[&paths[0]], Some(1 << 40))], "k").unwrap();
        let device = tiers.device(FIRST);
        device.want_ballast(false);
        assert_eq!(device.free_bytes(), 15 * MIB, "a sixteenth stays for others");
        let file = device.create(b"f", 0o600).unwrap();
        file.write_all_at(&vec![1; 8 * MIB as usize], 0).unwrap();
        device.add_used(8 * MIB as i64);
        tiers.poll();
        // Directories cost tmpfs nothing; the file's own pages are what counts.
        assert_eq!(device.free_bytes(), 7 * MIB);
        fs::write(paths[0].join("stranger"), vec![1; 3 * MIB as usize]).unwrap();
        assert_eq!(device.free_bytes(), 7 * MIB, "not seen before the poll");
        tiers.poll();
        assert_eq!(device.free_bytes(), 4 * MIB);
        fs::write(paths[0].join("more"), vec![1; 5 * MIB as usize]).unwrap();
        tiers.poll();
        assert_eq!(device.free_bytes(), 0);
        assert!(!device.try_reserve(1));
        fs::remove_file(paths[0].join("more")).unwrap();
        fs::remove_file(paths[0].join("stranger")).unwrap();
        tiers.poll();
        assert_eq!(device.free_bytes(), 7 * MIB);
    });
}

#[test]
fn devices_on_one_file_system_share_its_free_space() {
    with_tmpfs(&["64m"], |paths| {
        let (a, b) = (paths[0].join("a"), paths[0].join("b"));
        fs::create_dir(&a).unwrap();
        fs::create_dir(&b).unwrap();
        let config = [tier("one", &[&a], Some(1 << 40)), tier("two", &[&b], Some(1 << 40))];
        let tiers = Tiers::open(&config, "k").unwrap();
        let free: u64 = tiers.views().iter().map(|view| view.free_bytes).sum();
        assert_eq!(free, 60 * MIB);
    });
}

#[test]
fn full_device_stays_healthy() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    device.want_ballast(false);
    device.report_error(Errno::NOSPC);
    assert!(device.healthy());
    assert_eq!(device.free_bytes(), 0);
    tiers.poll();
    assert_eq!(device.free_bytes(), MIB);
    device.report_error(Errno::ACCESS);
    assert!(device.healthy());
    assert_eq!(device.counters().errors.load(Ordering::Relaxed), 2);
    device.sweep().unwrap();
}

#[test]
fn read_only_device_is_unused_until_writable_again() {
    use rustix::mount::{MountFlags, mount_remount};
    with_tmpfs(&["16m", "16m"], |paths| {
        let tiers = Tiers::open(&[tier("ram", &[&paths[0], &paths[1]], Some(20 * MIB))], "k").unwrap();
        tiers.poll();
        let (sick, sound) = (tiers.device(FIRST), tiers.device(DeviceId { tier: 0, device: 1 }));
        mount_remount(&paths[0], MountFlags::RDONLY, c"").unwrap();
        let refused = sick.create(b"f", 0o600).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        tiers.poll();
        assert_eq!(sick.sickness(), Some(Errno::ROFS));
        assert!(sound.healthy());
        assert!(!tiers.views()[0].healthy);
        tiers.poll();
        // The cap moves to the devices that can use it.
        assert!(tiers.views()[1].cap_bytes > 14 * MIB, "{}", tiers.views()[1].cap_bytes);

        sick.probe();
        assert_eq!(sick.sickness(), Some(Errno::ROFS), "still read-only");
        mount_remount(&paths[0], MountFlags::empty(), c"").unwrap();
        sick.probe();
        assert!(sick.healthy());
        tiers.poll();
        assert!(sick.free_bytes() > 0);
        assert!(sick.create(b"f", 0o600).is_ok());
    });
}

#[test]
fn sick_device_after_repair_is_used_again_by_monitor() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    device.report_error(Errno::IO);
    assert_eq!(device.sickness(), Some(Errno::IO));
    // The first back-off is one second; the minute is for machines under load.
    for _ in 0..600 {
        tiers.poll();
        if device.healthy() {
            break;
        }
        std::thread::sleep(POLL_PERIOD);
    }
    assert!(device.healthy());
    device.sweep().unwrap();
}

#[test]
fn device_with_removed_directory_is_taken_out_of_use() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(MIB))], "k").unwrap();
    tiers.poll();
    fs::remove_dir_all(dir.path()).unwrap();
    tiers.poll();
    assert_eq!(tiers.device(FIRST).sickness(), Some(Errno::NODEV));
}

#[test]
fn files_are_private_and_keep_their_relative_path() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], None)], "key").unwrap();
    let device = tiers.device(FIRST);
    device.create(b"results/tile_1.tif", 0o640).unwrap();
    let files = dir.path().join(format!("surgetank-{}-key", rustix::process::geteuid().as_raw()));
    assert!(files.join("results/tile_1.tif").is_file());
    assert_eq!(fs::metadata(files.join("results")).unwrap().permissions().mode() & 0o7777, 0o700);
    assert!(device.view().cap_bytes > 0, "a cap was chosen");
    device.follow_dir(b"results", b"moved").unwrap();
    device.open(b"moved/tile_1.tif", true).unwrap();
    device.unlink(b"moved/tile_1.tif").unwrap();
    device.sweep().unwrap();
}

/// A full device did not carry out a rename: its plain files were not found afterwards, and new files overwrote them.
#[test]
fn file_on_full_device_after_failed_rename_is_found() {
    with_tmpfs(&["1m,nr_inodes=30"], |paths| {
        let tiers = Tiers::open(&[tier("ram", &[&paths[0]], None)], "k").unwrap();
        let device = tiers.device(FIRST);
        let put = |path: &[u8], text: &[u8]| device.create(path, 0o600).unwrap().write_all_at(text, 0).unwrap();
        let holds = |path: &[u8], text: &[u8]| {
            let mut bytes = vec![0; text.len()];
            device.open(path, false).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, text, "{}", String::from_utf8_lossy(path));
        };
        put(b"a", b"1");
        put(b"d/f", b"2");
        let filler = |number: u32| paths[0].join(format!("filler-{number}"));
        let count = (0..).find(|number| fs::File::create(filler(*number)).is_err()).unwrap();
        device.follow(b"a", b"new/a").unwrap_err();
        device.follow_dir(b"d", b"new/d").unwrap_err();
        device.follow(b"none", b"new/none").unwrap_err();
        holds(b"new/a", b"1");
        holds(b"new/d/f", b"2");
        assert!(device.plain_at(b"a").unwrap().is_none() && device.plain_at(b"new/none").unwrap().is_none());
        device.follow_dir(b"new", b"newer").unwrap();
        holds(b"newer/a", b"1");
        holds(b"newer/d/f", b"2");
        assert!(device.open(b"new/a", false).is_err() && device.open(b"new/d/f", false).is_err());
        (0..count).for_each(|number| fs::remove_file(filler(number)).unwrap());
        put(b"a", b"3");
        put(b"d/f", b"4");
        put(b"newer/d/g", b"5");
        device.follow(b"newer/d/f", b"newer/f").unwrap();
        for (path, text) in [(b"newer/a", b"1"), (b"newer/f", b"2")] {
            holds(path, text);
        }
        for (path, text) in [(&b"a"[..], b"3"), (b"d/f", b"4"), (b"newer/d/g", b"5")] {
            holds(path, text);
        }
        // At its path as soon as it is renamed again.
        device.follow(b"newer/a", b"b").unwrap();
        holds(b"b", b"1");
        for path in [&b"a"[..], b"b", b"d/f", b"newer/f", b"newer/d/g"] {
            device.unlink(path).unwrap();
        }
        device.remove_dir(b"newer/d").unwrap();
        device.sweep().unwrap();
        assert_eq!(paths[0].read_dir().unwrap().count(), 0);
    });
}

#[test]
fn one_directory_for_two_tiers_is_refused() {
    let dir = shm();
    let config = [tier("ram", &[dir.path()], None), tier("disk", &[&dir.path().join(".")], None)];
    let text = Tiers::open(&config, "k").unwrap_err().to_string();
    assert!(text.contains("tier ram and tier disk use the same directory"), "{text}");
}

#[test]
fn quota_refusal_after_next_poll_still_counts() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(MIB))], "k").unwrap();
    let device = tiers.device(FIRST);
    device.report_error(Errno::DQUOT);
    assert!(device.healthy());
    tiers.poll();
    assert_eq!(device.free_bytes(), 0);
    device.measure(surgetank_types::clock::tick() + Duration::from_secs(3600));
    assert!(device.free_bytes() > 0);
    device.sweep().unwrap();
}

#[test]
fn unusable_path_gives_error_with_tier_and_path() {
    let missing = Path::new("/dev/shm/surgetank-test-not-there");
    let text = Tiers::open(&[tier("nvme", &[missing], None)], "k").unwrap_err().to_string();
    assert!(text.contains("tier nvme") && text.contains("surgetank-test-not-there") && text.contains("try:"), "{text}");
}

/// Figures for `docs/performance.md`: `cargo test -p surgetank-tier steps -- --ignored --nocapture`.
#[test]
#[ignore = "measures; asserts only that every step succeeds"]
fn steps_of_a_device_print_their_cost() {
    let dir = shm();
    let tiers = Tiers::open(&[tier("ram", &[dir.path()], Some(1 << 30))], "k").unwrap();
    let device = tiers.device(FIRST);
    tiers.poll();
    let measure = |name: &str, rounds: u32, step: &mut dyn FnMut(u32)| {
        let start = surgetank_types::clock::tick();
        (0..rounds).for_each(step);
        println!("{name}: {:.2} µs", start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
    };
    let path = |round: u32| format!("results/run/tile_{round}.tif").into_bytes();
    measure("create + close", 20_000, &mut |round| drop(device.create(&path(round), 0o600).unwrap()));
    measure("open + close", 20_000, &mut |round| drop(device.open(&path(round), false).unwrap()));
    measure("unlink", 20_000, &mut |round| device.unlink(&path(round)).unwrap());
    measure("reserve + unreserve", 1_000_000, &mut |_| {
        assert!(device.try_reserve(4096));
        device.unreserve(4096);
    });
    measure("views", 100_000, &mut |_| assert_eq!(tiers.views().len(), 1));
    measure("poll", 1_000, &mut |_| tiers.poll());
    device.sweep().unwrap();
}
