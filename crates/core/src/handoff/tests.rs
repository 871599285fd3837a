use super::*;

fn mirror(id: u64) -> Record<'static> {
    Record::Mirror { id: FileId(id), dir: FileId::ROOT, name: b"name", ino: id, kind: Kind::File }
}

fn opened(fh: u64) -> Record<'static> {
    Record::Opened { fh, id: FileId(9), flags: 1, writes: true, run: RunId(2), direct: true, by: 77 }
}

#[test]
fn closed_or_forgotten_records_are_not_handed_off() {
    let handoff = Handoff::new().unwrap();
    handoff.put(&mirror(5));
    handoff.put(&mirror(6));
    handoff.put(&opened(1));
    handoff.put(&opened(2));
    handoff.put(&Record::Listing { fh: 3, dir: FileId::ROOT, uid: 1, gid: 2 });
    handoff.put(&Record::Listed { fh: 3, offset: 40, before: b"m" });
    handoff.put(&Record::Backed { id: FileId(9), backing: 4 });
    handoff.put(&Record::Forgotten { id: FileId(5) });
    handoff.put(&Record::Closed { fh: 1 });
    let left = handoff.left();
    assert_eq!(left.mirrors.keys().collect::<Vec<_>>(), [&FileId(6)]);
    assert_eq!(left.handles.keys().collect::<Vec<_>>(), [&2]);
    assert_eq!(left.listings[&3].at, Some((40, b"m".as_slice().into())));
    assert_eq!((left.backings[&FileId(9)], left.handle_max), (4, 3));
}

#[test]
fn compacted_log_says_the_same_in_less_room() {
    let handoff = Handoff::of_size(64 << 10).unwrap();
    handoff.put(&Record::Joined { run: RunId(1), pid: 10, command: "make" });
    for round in 0..20_000 {
        handoff.put(&mirror(round));
        handoff.put(&opened(round));
        handoff.put(&Record::Touched { dir: FileId(3), nanos: round as i64, links: 2 });
        if round >= 10 {
            handoff.put(&Record::Forgotten { id: FileId(round - 10) });
            handoff.put(&Record::Closed { fh: round - 10 });
        }
    }
    let left = handoff.left();
    assert!(handoff.is_whole());
    assert_eq!((left.mirrors.len(), left.handles.len(), left.handle_max), (10, 10, 19_999));
    assert_eq!(left.dirs[&FileId(3)], (19_999, 2));
    assert_eq!(left.runs[&RunId(1)], LeftRun { pid: 10, command: "make".into() });
}

#[test]
fn full_log_reports_that_records_are_missing() {
    let handoff = Handoff::of_size(4 << 10).unwrap();
    (0..1000).for_each(|id| handoff.put(&mirror(id)));
    assert!(!handoff.is_whole());
}

/// Regression: the next agent left a damaged record out, or believed what the damage made of it.
#[test]
fn damaged_record_is_noticed() {
    let log = |handoff: &Handoff| {
        (0..20).for_each(|number| handoff.put(&opened(number)));
        handoff.used()
    };
    let used = log(&Handoff::of_size(64 << 10).unwrap());
    for at in 0..used {
        let handoff = Handoff::of_size(64 << 10).unwrap();
        log(&handoff);
        let right = handoff.left();
        // SAFETY: within the log's first half, which no other thread reads or writes.
        unsafe { *handoff.at(0).as_ptr().add(at) ^= 1 << (at % 8) };
        assert!(handoff.left() != right && !handoff.is_whole(), "byte {at}");
    }
}

/// The parent reads what a fork wrote before it was killed.
#[test]
fn handoff_survives_its_writer() {
    let handoff = Handoff::new().unwrap();
    // SAFETY: the child writes to shared memory and ends, without touching a lock that another thread may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        handoff.put(&opened(8));
        // SAFETY: ends the child here, as a kill would.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    // SAFETY: waits for the child that was just made.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    assert!(handoff.left().handles.contains_key(&8));
}
