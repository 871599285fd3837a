//! Staging, settling and verifying: what a copy keeps, what it leaves, what is detected.

use super::*;

pub fn a_file_arrives_whole(store: &dyn Store) {
    let bytes = noise(3_000_001);
    let identity = deliver(store, "result.dat", &bytes, &meta(0o640));
    assert_eq!(read(store, "result.dat"), bytes);
    let stat = store.stat(me(), &path("result.dat")).unwrap();
    assert_eq!(stat.identity, identity);
    assert_eq!((stat.attr.kind, stat.attr.perm, stat.attr.links), (Kind::File, 0o640, 1));
    assert_eq!((stat.attr.uid, stat.attr.gid, stat.attr.size_bytes), (me().uid, me().gid, 3_000_001));
    assert_eq!(stat.attr.mtime, time());
}

pub fn sizes_around_the_chunk(store: &dyn Store) {
    for size in [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (9 << 20) + 5, (50 << 20) + 1] {
        let bytes = noise(size);
        let (temporary, copy) = staged(store, "f", &source(&bytes), &meta(0o600));
        let mut expected = Checksum::default();
        expected.bytes(&bytes);
        assert_eq!((copy.checksum, copy.identity.size_bytes), (expected.value(), size as u64), "{size}");
        store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
        store.verify(me(), &temporary, &copy, Verify::Reread, no_gate()).unwrap();
        store.publish(me(), &temporary, &path("f"), &meta(0o600)).unwrap();
        assert!(read(store, "f") == bytes, "{size}");
    }
}

pub fn holes_stay_holes(store: &dyn Store) {
    let file = tempfile::tempfile().unwrap();
    let size = 1_u64 << 40;
    file.write_all_at(b"in the middle", 512 << 20).unwrap();
    file.write_all_at(b"unaligned", (700 << 20) + 12_345).unwrap();
    file.set_len(size).unwrap();
    let (temporary, copy) = staged(store, "sparse", &file, &meta(0o644));
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    for how in [Verify::Cache, Verify::Reread] {
        store.verify(me(), &temporary, &copy, how, no_gate()).unwrap();
    }
    store.publish(me(), &temporary, &path("sparse"), &meta(0o644)).unwrap();
    let stat = store.stat(me(), &path("sparse")).unwrap().attr;
    assert_eq!(stat.size_bytes, size);
    assert!(stat.blocks * 512 < 4 << 20, "holes are kept: {} blocks", stat.blocks);
    let kept = store.open(me(), &path("sparse"), false).unwrap();
    let mut found = [0; 9];
    kept.read_exact_at(&mut found, (700 << 20) + 12_345).unwrap();
    assert_eq!(&found, b"unaligned");

    // Only a hole; and the same content without holes has the same checksum.
    let (hollow, dense) = (tempfile::tempfile().unwrap(), source(&vec![0; 5 << 20]));
    hollow.set_len(5 << 20).unwrap();
    let sums = [hollow, dense].map(|file| staged(store, "z", &file, &meta(0o644)).1.checksum);
    assert_eq!(sums[0], sums[1]);
}

pub fn extended_attributes(store: &dyn Store) {
    let of =
        |pairs: &[(&[u8], &[u8])]| Some(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect());
    let first = Meta {
        xattrs: of(&[(b"user.origin", b"run 7"), (b"user.empty", b""), (b"user.bytes", &[0, 255, 10])]),
        ..meta(0o444)
    };
    deliver(store, "f", b"x", &first);
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), first.xattrs);
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.perm, 0o444);

    let second = Meta { xattrs: of(&[(b"user.origin", b"run 8"), (b"user.new", b"1")]), ..meta(0o644) };
    store.set_meta(me(), &path("f"), Kind::File, &second).unwrap();
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), second.xattrs);
    // `None` keeps them: on a change of attributes and on a new version.
    store.set_meta(me(), &path("f"), Kind::File, &Meta { xattrs: None, ..meta(0o600) }).unwrap();
    deliver(store, "f", b"y", &Meta { xattrs: None, ..meta(0o600) });
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), second.xattrs);
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.mtime, time());
    deliver(store, "f", b"z", &meta(0o600));
    assert!(store.xattrs(me(), &path("f")).unwrap().is_empty());
}

pub fn times_in_nanoseconds(store: &dyn Store) {
    // Before 1970 too.
    for (number, nanos) in [1, 999_999_999, 1_700_000_000_000_000_001, -1, -1_500_000_000].into_iter().enumerate() {
        let (atime, mtime) = (Timestamp { nanos }, Timestamp { nanos: nanos + 7_000_000_003 });
        let name = format!("f{number}");
        let identity = deliver(store, &name, b"x", &Meta { times: Some((atime, mtime)), ..meta(0o644) });
        let attr = store.stat(me(), &path(&name)).unwrap().attr;
        assert_eq!((attr.mtime, identity.mtime_nanos), (mtime, mtime.nanos));
    }
}

pub fn every_mode(store: &dyn Store) {
    for perm in [0o000, 0o200, 0o400, 0o444, 0o111, 0o600, 0o777, 0o4755, 0o2755, 0o6711, 0o1644, 0o4000] {
        let (temporary, copy) = staged(store, "f", &source(b"#!"), &meta(perm));
        store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
        store.verify(me(), &temporary, &copy, Verify::Reread, no_gate()).unwrap();
        store.publish(me(), &temporary, &path("f"), &meta(perm)).unwrap();
        assert_eq!(store.stat(me(), &path("f")).unwrap().attr.perm, perm, "{perm:o}");
    }
}

pub fn names_of_any_bytes(store: &dyn Store) {
    let long = vec![b'n'; 255];
    let tricky: [&[u8]; 6] = [b"\xff\xfe\x80", b" leading and trailing ", b"new\nline", b"-rf", b"...", &long];
    for (number, name) in tricky.iter().enumerate() {
        let temporary = path(&format!(".surgetank-tmp-{number}"));
        store.stage_file(me(), &temporary, &StorePath::root(), &source(name), &meta(0o644), no_gate()).unwrap();
        store.publish(me(), &temporary, &StorePath(name.to_vec()), &meta(0o644)).unwrap();
    }
    let listed = store.list(me(), &StorePath::root(), true).unwrap();
    assert_eq!(listed.len(), tricky.len());
    for name in tricky {
        let found = listed.iter().find(|entry| *entry.name == *name).unwrap();
        let stat = store.stat(me(), &StorePath(name.to_vec())).unwrap().attr;
        assert_eq!((found.kind, found.ino), (Kind::File, stat.ino));
    }
    assert_eq!(
        errno(store.stage_dir(me(), &StorePath([b".surgetank-tmp-", &long[..]].concat()), &meta(0o755))),
        libc::ENAMETOOLONG
    );
}

pub fn paths_longer_than_path_max(store: &dyn Store) {
    let mut at = String::new();
    while at.len() < 9000 {
        at = format!(
            "{at}{}{}",
            if at.is_empty() { "" } else { "/" },
            "d".repeat(if at.len().is_multiple_of(3) { 250 } else { 31 })
        );
        make_dir(store, &at);
    }
    let file = format!("{at}/file");
    deliver(store, &file, b"deep", &meta(0o644));
    assert_eq!(read(store, &file), b"deep");
    assert_eq!(names(store, &at, true), ["file"]);
    store.rename(me(), &path(&file), &path("shallow")).unwrap();
    assert_eq!(read(store, "shallow"), b"deep");
}

pub fn plain_paths_only(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    for bad in ["/f", "../f", "./f", "f/", "a//f", "a/../f", "a\0b"] {
        assert_eq!(errno(store.stat(me(), &path(bad))), libc::EINVAL, "{bad}");
        assert_eq!(errno(store.unlink(me(), &path(bad))), libc::EINVAL, "{bad}");
    }
    assert_eq!(errno(store.unlink(me(), &StorePath::root())), libc::EBUSY);
}

pub fn temporaries_are_hidden(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    staged(store, "f", &source(b"y"), &meta(0o644));
    assert_eq!(names(store, "", false), ["f"]);
    assert_eq!(names(store, "", true).len(), 2);
    assert_eq!(read(store, "f"), b"x", "staging does not touch the final name");
}

pub fn a_stopped_stage_leaves_nothing(store: &dyn Store) {
    let calls = Cell::new(0_u64);
    let calls = std::sync::Mutex::new(calls);
    let stop = |_: u64| {
        let calls = calls.lock().unwrap();
        calls.set(calls.get() + 1);
        if calls.get() == 3 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    };
    let error = store
        .stage_file(me(), &path(".surgetank-tmp-s"), &StorePath::root(), &source(&noise(10 << 20)), &meta(0o644), &stop)
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    assert_eq!(calls.into_inner().unwrap().get(), 3, "it stopped at once");
    assert!(names(store, "", true).is_empty());
}

pub fn leftovers_give_way(store: &dyn Store) {
    let temporary = path(".surgetank-tmp-left");
    let inner = path(".surgetank-tmp-left/deeper");
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    store.stage_dir(me(), &inner, &meta(0o700)).unwrap();
    store.stage_file(me(), &inner.join(b"file"), &StorePath::root(), &source(b"old"), &meta(0o400), no_gate()).unwrap();
    store.stage_file(me(), &temporary, &StorePath::root(), &source(b"new"), &meta(0o644), no_gate()).unwrap();
    assert_eq!(read(store, ".surgetank-tmp-left"), b"new");
    store.stage_symlink(me(), &temporary, b"elsewhere", &meta(0o777)).unwrap();
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    assert_eq!(names(store, "", true), [".surgetank-tmp-left"]);
    // A spill is not replaced: it may be the only copy.
    store.create_temporary(me(), &path(".surgetank-tmp-spill"), 0o644).unwrap();
    assert_eq!(errno(store.create_temporary(me(), &path(".surgetank-tmp-spill"), 0o644)), libc::EEXIST);
}

pub fn discard_twice(store: &dyn Store) {
    let (temporary, _) = staged(store, "f", &source(b"x"), &meta(0o644));
    for _ in 0..2 {
        store.discard(me(), &temporary).unwrap();
    }
    store.discard(me(), &path("no/such/.surgetank-tmp-1")).unwrap();
    assert!(names(store, "", true).is_empty());
}

pub fn discard_spares(store: &dyn Store) {
    deliver(store, "precious", b"x", &meta(0o644));
    assert_eq!(errno(store.discard(me(), &path("precious"))), libc::EINVAL);
    assert_eq!(
        errno(store.stage_file(me(), &path("precious"), &StorePath::root(), &source(b"y"), &meta(0o644), no_gate())),
        libc::EEXIST
    );
    assert_eq!(read(store, "precious"), b"x");
}

pub fn spill_in_place(store: &dyn Store) {
    let temporary = path(".surgetank-tmp-spill");
    let bytes = noise(2_000_000);
    let file = store.create_temporary(me(), &temporary, 0o444).unwrap();
    file.write_all_at(&bytes[..1_000_000], 0).unwrap();
    drop(file);
    // After a restart it is opened again and extended.
    store.open(me(), &temporary, true).unwrap().write_all_at(&bytes[1_000_000..], 1_000_000).unwrap();
    let wanted = Meta { xattrs: Some([(b"user.a"[..].into(), b"b"[..].into())].into()), ..meta(0o444) };
    let copy = store.stage_in_place(me(), &temporary, &wanted, no_gate()).unwrap();
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.verify(me(), &temporary, &copy, Verify::Cache, no_gate()).unwrap();
    store.publish(me(), &temporary, &path("f"), &wanted).unwrap();
    assert!(read(store, "f") == bytes);
    let attr = store.stat(me(), &path("f")).unwrap().attr;
    assert_eq!((attr.perm, attr.mtime), (0o444, time()));
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), wanted.xattrs);
}

pub fn verify_finds_differences(store: &dyn Store) {
    let bytes = noise(3 << 20);
    for how in [Verify::Cache, Verify::Reread] {
        let (temporary, copy) = staged(store, "f", &source(&bytes), &meta(0o644));
        store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
        store.verify(me(), &temporary, &copy, how, no_gate()).unwrap();
        let file = store.open(me(), &temporary, true).unwrap();
        for (at, byte) in [(0, bytes[0]), (1_700_001, bytes[1_700_001]), ((3 << 20) - 1, bytes[(3 << 20) - 1])] {
            file.write_all_at(&[byte ^ 1], at).unwrap();
            file.sync_all().unwrap();
            assert_eq!(
                store.verify(me(), &temporary, &copy, how, no_gate()).unwrap_err().kind(),
                io::ErrorKind::InvalidData,
                "byte {at}"
            );
            file.write_all_at(&[byte], at).unwrap();
        }
        file.set_len((3 << 20) - 1).unwrap();
        let error = store.verify(me(), &temporary, &copy, how, no_gate()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("3145727 bytes instead of 3145728"), "{error}");
        // A hole in place of bytes.
        file.set_len(0).unwrap();
        file.set_len(3 << 20).unwrap();
        assert_eq!(
            store.verify(me(), &temporary, &copy, how, no_gate()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}

pub fn verify_a_replaced_copy(store: &dyn Store) {
    let (temporary, copy) = staged(store, "f", &source(b"same"), &meta(0o644));
    let (other, _) = staged(store, "f", &source(b"same"), &meta(0o644));
    store.rename(me(), &other, &temporary).unwrap();
    assert_eq!(
        store.verify(me(), &temporary, &copy, Verify::Cache, no_gate()).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
}
