use super::*;

fn mirror(id: u64) -> Record<'static> {
    Record::Mirror { id: FileId(id), dir: FileId::ROOT, name: b"name", ino: id, kind: Kind::File }
}

fn opened(fh: u64) -> Record<'static> {
    Record::Opened { fh, id: FileId(9), flags: 1, writes: true, run: RunId(2), direct: true, by: 77 }
}

#[test]
fn what_was_closed_or_forgotten_is_not_left() {
    let bequest = Bequest::new().unwrap();
    bequest.put(&mirror(5));
    bequest.put(&mirror(6));
    bequest.put(&opened(1));
    bequest.put(&opened(2));
    bequest.put(&Record::Listing { fh: 3, dir: FileId::ROOT, uid: 1, gid: 2 });
    bequest.put(&Record::Listed { fh: 3, offset: 40, before: b"m" });
    bequest.put(&Record::Backed { id: FileId(9), backing: 4 });
    bequest.put(&Record::Forgotten { id: FileId(5) });
    bequest.put(&Record::Closed { fh: 1 });
    let left = bequest.left();
    assert_eq!(left.mirrors.keys().collect::<Vec<_>>(), [&FileId(6)]);
    assert_eq!(left.handles.keys().collect::<Vec<_>>(), [&2]);
    assert_eq!(left.listings[&3].at, Some((40, b"m".as_slice().into())));
    assert_eq!((left.backings[&FileId(9)], left.handle_max), (4, 3));
}

#[test]
fn a_log_that_is_looked_through_says_the_same_and_takes_less_room() {
    let bequest = Bequest::of_size(64 << 10).unwrap();
    bequest.put(&Record::Joined { run: RunId(1), pid: 10, command: "make" });
    for round in 0..20_000 {
        bequest.put(&mirror(round));
        bequest.put(&opened(round));
        bequest.put(&Record::Touched { dir: FileId(3), nanos: round as i64, links: 2 });
        if round >= 10 {
            bequest.put(&Record::Forgotten { id: FileId(round - 10) });
            bequest.put(&Record::Closed { fh: round - 10 });
        }
    }
    let left = bequest.left();
    assert!(bequest.is_whole());
    assert_eq!((left.mirrors.len(), left.handles.len(), left.handle_max), (10, 10, 19_999));
    assert_eq!(left.dirs[&FileId(3)], (19_999, 2));
    assert_eq!(left.runs[&RunId(1)], LeftRun { pid: 10, command: "make".into() });
}

#[test]
fn a_full_log_says_that_something_is_lacking() {
    let bequest = Bequest::of_size(4 << 10).unwrap();
    (0..1000).for_each(|id| bequest.put(&mirror(id)));
    assert!(!bequest.is_whole());
}

/// It was left out, or taken for what it had become.
#[test]
fn a_record_that_is_not_as_it_was_written_went_unnoticed() {
    let log = |bequest: &Bequest| {
        (0..20).for_each(|number| bequest.put(&opened(number)));
        bequest.used()
    };
    let used = log(&Bequest::of_size(64 << 10).unwrap());
    for at in 0..used {
        let bequest = Bequest::of_size(64 << 10).unwrap();
        log(&bequest);
        let right = bequest.left();
        // SAFETY: within the log's first half, which nobody else reads or writes.
        unsafe { *bequest.at(0).as_ptr().add(at) ^= 1 << (at % 8) };
        assert!(bequest.left() != right && !bequest.is_whole(), "byte {at}");
    }
}

/// What a fork wrote before it was killed, its parent reads.
#[test]
fn it_survives_who_wrote_it() {
    let bequest = Bequest::new().unwrap();
    // SAFETY: the child writes to shared memory and ends, without touching a lock that another thread may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        bequest.put(&opened(8));
        // SAFETY: ends the child here, as a kill would.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    // SAFETY: waits for the child that was just made.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    assert!(bequest.left().handles.contains_key(&8));
}
