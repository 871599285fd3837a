//! Names: special files, conflicts, moves, links that must not be followed, attributes, opening.

use super::*;

pub fn links_and_fifos(store: &dyn Store) {
    store.stage_symlink(me(), &path(".surgetank-tmp-l"), b"../any/where\xff", &meta(0o777)).unwrap();
    store.stage_node(me(), &path(".surgetank-tmp-f"), Kind::Fifo, 0, &meta(0o620)).unwrap();
    store.settle(me(), &[path(".surgetank-tmp-l"), path(".surgetank-tmp-f")]).unwrap();
    store.publish(me(), &path(".surgetank-tmp-l"), &path("link"), &meta(0o777)).unwrap();
    store.publish(me(), &path(".surgetank-tmp-f"), &path("fifo"), &meta(0o620)).unwrap();
    assert_eq!(&*store.read_link(me(), &path("link")).unwrap(), b"../any/where\xff");
    let link = store.stat(me(), &path("link")).unwrap().attr;
    assert_eq!((link.kind, link.mtime), (Kind::Symlink, time()));
    let fifo = store.stat(me(), &path("fifo")).unwrap().attr;
    assert_eq!((fifo.kind, fifo.perm, fifo.mtime), (Kind::Fifo, 0o620, time()));
    let other = Timestamp { nanos: 42_000_000_000 };
    let changed = Meta { times: Some((other, other)), ..meta(0o777) };
    store.set_meta(me(), &path("link"), Kind::Symlink, &changed).unwrap();
    assert_eq!(store.stat(me(), &path("link")).unwrap().attr.mtime, other);
    let mut kinds: Vec<_> = store
        .list(me(), &StorePath::root(), false)
        .unwrap()
        .into_iter()
        .map(|entry| (entry.name, entry.kind))
        .collect();
    kinds.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(kinds, [(b"fifo"[..].into(), Kind::Fifo), (b"link"[..].into(), Kind::Symlink)]);
}

pub fn conflicts_are_seen(store: &dyn Store) {
    let at = path("f");
    assert!(store.check(me(), &at, &Expect::Absent).unwrap());
    assert!(store.check(me(), &at, &Expect::Unknown).unwrap());
    let identity = deliver(store, "f", b"ours", &meta(0o644));
    let known = Expect::Identity(identity);
    assert!(store.check(me(), &at, &known).unwrap());
    assert!(!store.check(me(), &at, &Expect::Absent).unwrap());
    assert!(!store.check(me(), &at, &Expect::Unknown).unwrap());
    // Same length, same mtime: the ctime tells.
    store.open(me(), &at, true).unwrap().write_all_at(b"hers", 0).unwrap();
    store.set_meta(me(), &at, Kind::File, &meta(0o644)).unwrap();
    assert!(!store.check(me(), &at, &known).unwrap());
    let identity = deliver(store, "f", b"ours again", &meta(0o644));
    // Another name changes the ctime, but nothing else of the file.
    std::thread::sleep(std::time::Duration::from_millis(20));
    store.link(me(), &at, &path("g")).unwrap();
    assert!(store.check(me(), &at, &Expect::Linked(identity)).unwrap());
    assert!(store.check(me(), &path("g"), &Expect::Linked(identity)).unwrap());
    store.open(me(), &at, true).unwrap().write_all_at(b"longer than ours", 0).unwrap();
    assert!(!store.check(me(), &at, &Expect::Linked(identity)).unwrap());
    store.unlink(me(), &path("g")).unwrap();
    let identity = deliver(store, "f", b"ours a third time", &meta(0o644));
    store.unlink(me(), &at).unwrap();
    assert!(!store.check(me(), &at, &Expect::Identity(identity)).unwrap());
    // The times of a directory change all the time.
    make_dir(store, "d");
    let dir = store.stat(me(), &path("d")).unwrap().identity;
    deliver(store, "d/f", b"x", &meta(0o644));
    assert!(store.check(me(), &path("d"), &Expect::Identity(dir)).unwrap());
    deliver(store, "was-dir", b"x", &meta(0o644));
    assert!(!store.check(me(), &path("was-dir"), &Expect::Identity(dir)).unwrap());
    assert!(store.check(me(), &path("no/such"), &Expect::Absent).unwrap());
}

pub fn names_move_and_go(store: &dyn Store) {
    make_dir(store, "d");
    deliver(store, "a", b"A", &meta(0o644));
    deliver(store, "d/b", b"B", &meta(0o644));
    if store.exchanges() {
        store.exchange(me(), &path("a"), &path("d/b")).unwrap();
    } else {
        assert_eq!(errno(store.exchange(me(), &path("a"), &path("d/b"))), libc::EINVAL);
        deliver(store, "a", b"B", &meta(0o644));
        deliver(store, "d/b", b"A", &meta(0o644));
    }
    assert_eq!((read(store, "a"), read(store, "d/b")), (b"B".to_vec(), b"A".to_vec()));
    store.rename(me(), &path("a"), &path("d/b")).unwrap();
    assert_eq!(names(store, "", true), ["d"]);
    assert_eq!(read(store, "d/b"), b"B");
    store.rename(me(), &path("d"), &path("e")).unwrap();
    store.link(me(), &path("e/b"), &path("c")).unwrap();
    assert_eq!(store.stat(me(), &path("c")).unwrap().attr.links, 2);
    store.unlink(me(), &path("e/b")).unwrap();
    store.remove_dir(me(), &path("e")).unwrap();
    assert_eq!(read(store, "c"), b"B");
    if store.exchanges() {
        assert_eq!(errno(store.exchange(me(), &path("c"), &path("nothing"))), libc::ENOENT);
        assert_eq!(names(store, "", true), ["c"]);
    }
    assert_eq!(errno(store.unlink(me(), &path("nothing"))), libc::ENOENT);
    assert_eq!(errno(store.link(me(), &path("c"), &path("c"))), libc::EEXIST);
}

pub fn links_are_not_followed(store: &dyn Store) {
    make_dir(store, "real");
    deliver(store, "real/f", b"x", &meta(0o644));
    store.stage_symlink(me(), &path(".surgetank-tmp-l"), b"real", &meta(0o777)).unwrap();
    store.publish(me(), &path(".surgetank-tmp-l"), &path("link"), &meta(0o777)).unwrap();
    store.stage_symlink(me(), &path(".surgetank-tmp-l"), b"real/f", &meta(0o777)).unwrap();
    store.publish(me(), &path(".surgetank-tmp-l"), &path("leaf"), &meta(0o777)).unwrap();
    let (inside, temporary) = (path("link/f"), path("link/.surgetank-tmp-1"));
    assert_eq!(errno(store.stat(me(), &inside)), libc::ELOOP);
    assert_eq!(errno(store.list(me(), &path("link"), false)), libc::ELOOP);
    assert_eq!(errno(store.open(me(), &inside, true)), libc::ELOOP);
    assert_eq!(errno(store.open(me(), &path("leaf"), true)), libc::ELOOP);
    assert_eq!(errno(store.unlink(me(), &inside)), libc::ELOOP);
    assert_eq!(
        errno(store.stage_file(me(), &temporary, &StorePath::root(), &source(b"y"), &meta(0o644), no_gate())),
        libc::ELOOP
    );
    assert_eq!(errno(store.stage_dir(me(), &temporary, &meta(0o755))), libc::ELOOP);
    assert_eq!(errno(store.create_temporary(me(), &temporary, 0o644)), libc::ELOOP);
    assert_eq!(errno(store.rename(me(), &path("real/f"), &path("link/g"))), libc::ELOOP);
    assert_eq!(errno(store.set_meta(me(), &inside, Kind::File, &meta(0o777))), libc::ELOOP);
    assert_eq!(errno(store.set_meta(me(), &path("leaf"), Kind::File, &meta(0o777))), libc::ENOENT);
    assert_eq!(errno(store.sync_dirs(me(), &[path("link")])), libc::ELOOP);
    assert_eq!(errno(store.may_write_dir(me(), &path("link"))), libc::ELOOP);
    assert_eq!(errno(store.check(me(), &inside, &Expect::Absent)), libc::ELOOP);
    // A staged copy whose directory was swapped for a link is not published through it.
    make_dir(store, "trap");
    let (copy, _) = staged(store, "trap/g", &source(b"y"), &meta(0o644));
    store.rename(me(), &path("trap"), &path("moved")).unwrap();
    store.rename(me(), &path("link"), &path("trap")).unwrap();
    assert_eq!(errno(store.publish(me(), &copy, &path("trap/g"), &meta(0o644))), libc::ELOOP);
    assert_eq!(names(store, "real", true), ["f"]);
    assert_eq!(store.stat(me(), &path("real/f")).unwrap().attr.perm, 0o644);
}

pub fn set_meta_is_exact(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    make_dir(store, "d");
    let fine = i64::from(!in_whole_seconds());
    for (name, kind, perm) in [
        ("f", Kind::File, 0o4711),
        ("d", Kind::Directory, 0o2750),
        ("f", Kind::File, 0o000),
        ("d", Kind::Directory, 0o700),
    ] {
        let wanted = Meta {
            times: Some((Timestamp { nanos: 5 * fine }, Timestamp { nanos: 1_000_000_000 + 7 * fine })),
            ..meta(perm)
        };
        let identity = store.set_meta(me(), &path(name), kind, &wanted).unwrap();
        let stat = store.stat(me(), &path(name)).unwrap();
        assert_eq!((stat.attr.perm, Some((stat.attr.atime, stat.attr.mtime))), (perm, wanted.times));
        assert_eq!(stat.identity, identity);
        // The times stay, although the mode changes.
        let untimed = Meta { times: None, ..meta(perm | 0o004) };
        store.set_meta(me(), &path(name), kind, &untimed).unwrap();
        let attr = store.stat(me(), &path(name)).unwrap().attr;
        assert_eq!((attr.perm, Some((attr.atime, attr.mtime))), (perm | 0o004, wanted.times));
        let identity = store.set_meta(me(), &path(name), kind, &wanted).unwrap();
        // Nothing to change: nothing changes, not even the ctime.
        assert_eq!(store.set_meta(me(), &path(name), kind, &wanted).unwrap(), identity);
    }
    assert_eq!(errno(store.set_meta(me(), &path("d"), Kind::File, &meta(0o644))), libc::ENOENT);
}

pub fn batches_settle(store: &dyn Store) {
    store.settle(me(), &[]).unwrap();
    store.sync_dirs(me(), &[]).unwrap();
    let copies: Vec<_> =
        (0..40).map(|number| staged(store, "f", &source(&noise(number * 100)), &meta(0o644))).collect();
    let paths: Vec<_> = copies.iter().map(|(path, _)| path.clone()).collect();
    store.settle(me(), &paths).unwrap();
    for (number, (temporary, copy)) in copies.iter().enumerate() {
        store.verify(me(), temporary, copy, Verify::Cache, no_gate()).unwrap();
        store.publish(me(), temporary, &path(&format!("f{number}")), &meta(0o644)).unwrap();
    }
    store.sync_dirs(me(), &vec![StorePath::root(); 40]).unwrap();
    assert_eq!(store.list(me(), &StorePath::root(), true).unwrap().len(), 40);
    assert_eq!(errno(store.settle(me(), &[path(".surgetank-tmp-none")])), libc::ENOENT);
}

pub fn open_is_for_plain_files(store: &dyn Store) {
    make_dir(store, "d");
    store.stage_node(me(), &path(".surgetank-tmp-f"), Kind::Fifo, 0, &meta(0o666)).unwrap();
    // An ordinary open of a fifo would block.
    assert_ne!(errno(store.open(me(), &path(".surgetank-tmp-f"), false)), 0);
    assert_ne!(errno(store.open(me(), &path(".surgetank-tmp-f"), true)), 0);
    assert_eq!(errno(store.open(me(), &path("d"), false)), libc::EISDIR);
    assert_eq!(errno(store.open(me(), &path("none"), true)), libc::ENOENT, "never creates");
    deliver(store, "f", b"0123456789", &meta(0o644));
    let mut file = store.open(me(), &path("f"), true).unwrap();
    file.write_all_at(b"X", 5).unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    assert_eq!((read(store, "f"), file.metadata().unwrap().size()), (b"01234X6789".to_vec(), 10));
}

pub fn room(store: &dyn Store) {
    let space = store.space(&StorePath::root()).unwrap();
    assert!(
        space.total_bytes >= space.free_bytes && space.free_bytes >= space.available_bytes && space.total_bytes > 0
    );
    assert_eq!(space.name_bytes_max, 255);
    assert_eq!(errno(store.space(&path("none"))), libc::ENOENT);
}

/// A name that a listing does not contain counts as absent.
pub fn listed_names_are_complete(store: &dyn Store) {
    make_dir(store, "d");
    for number in 0..20 {
        deliver(store, &format!("d/f{number}"), b"x", &meta(0o644));
    }
    make_dir(store, "d/sub");
    let told = |at_most| store.names(me(), &path("d"), at_most).unwrap();
    if let Some(all) = told(1000) {
        let listed = store.list(me(), &path("d"), true).unwrap();
        assert_eq!(listed.len(), 21);
        assert!(listed.iter().all(|entry| all.contains(&entry.name)), "{all:?}");
        assert_eq!(told(10), None, "more than were asked for");
    }
}

/// A store without notices forms no pool.
pub fn notices_between_agents(store: &dyn Store) {
    let names =
        [".surgetank-tmp-notice-1-a", ".surgetank-tmp-notice-1-b", ".surgetank-tmp-notice-12-a"].map(str::as_bytes);
    match store.has_notice(names[0]) {
        Ok(is_there) => assert!(!is_there),
        Err(why) => return assert_eq!(why.raw_os_error(), Some(libc::EOPNOTSUPP)),
    }
    for name in names {
        store.leave_notice(name).unwrap();
        store.leave_notice(name).unwrap();
        assert!(store.has_notice(name).unwrap());
    }
    assert!(store.list(me(), &StorePath::root(), false).unwrap().is_empty(), "programs see notices");
    store.remove_notices(b".surgetank-tmp-notice-1-").unwrap();
    assert_eq!(names.map(|name| store.has_notice(name).unwrap()), [false, false, true]);
}
