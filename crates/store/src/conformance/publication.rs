//! Publishing: over nothing, over files, links and directories.

use super::*;

pub fn publish_over_one_link(store: &dyn Store) {
    let first = deliver(store, "f", b"old", &meta(0o644));
    let reader = store.features().plain_files.then(|| store.open(me(), &path("f"), false).unwrap());
    let second = deliver(store, "f", b"new content", &meta(0o600));
    assert_ne!(first.ino, second.ino);
    assert_eq!(read(store, "f"), b"new content");
    if let Some(mut reader) = reader {
        let mut old = String::new();
        reader.read_to_string(&mut old).unwrap();
        assert_eq!(old, "old", "an open descriptor keeps the old version");
    }
}

pub fn publish_over_several_links(store: &dyn Store) {
    let first = deliver(store, "f", &noise(100_000), &meta(0o644));
    store.link(me(), &path("f"), &path("g")).unwrap();
    let bytes = noise(50_001);
    let second = deliver(store, "f", &bytes, &meta(0o600));
    assert_eq!(first.ino, second.ino, "the inode stays");
    assert!(read(store, "g") == bytes, "the other name sees it too");
    let attr = store.stat(me(), &path("g")).unwrap().attr;
    assert_eq!((attr.perm, attr.links, attr.mtime), (0o600, 2, time()));
    assert_eq!(store.stat(me(), &path("f")).unwrap().identity, second);
    assert_eq!(names(store, "", true), ["f", "g"]);
}

pub fn replace_one_of_several_links(store: &dyn Store) {
    let first = deliver(store, "f", b"the first", &meta(0o644));
    store.link(me(), &path("f"), &path("g")).unwrap();
    let (temporary, _) = staged(store, "f", &source(b"another"), &meta(0o600));
    let second = store.replace(me(), &temporary, &path("f"), &meta(0o600)).unwrap();
    assert_ne!(first.ino, second.ino);
    assert_eq!((read(store, "f"), read(store, "g")), (b"another".to_vec(), b"the first".to_vec()));
    assert_eq!(store.stat(me(), &path("g")).unwrap().attr.links, 1);
    assert!(store.check(me(), &path("f"), &Expect::Inode(second.ino)).unwrap());
    assert!(!store.check(me(), &path("f"), &Expect::Inode(first.ino)).unwrap());
    assert!(!store.check(me(), &path("absent"), &Expect::Inode(first.ino)).unwrap());
    assert_eq!(names(store, "", true), ["f", "g"]);
}

pub fn publish_over_a_symlink(store: &dyn Store) {
    deliver(store, "target", b"untouched", &meta(0o644));
    store.stage_symlink(me(), &path(".surgetank-tmp-l"), b"target", &meta(0o777)).unwrap();
    store.publish(me(), &path(".surgetank-tmp-l"), &path("f"), &meta(0o777)).unwrap();
    deliver(store, "f", b"plain", &meta(0o644));
    assert_eq!((read(store, "f"), read(store, "target")), (b"plain".to_vec(), b"untouched".to_vec()));
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.kind, Kind::File);
}

pub fn directories(store: &dyn Store) {
    for perm in [0o755, 0o500, 0o1777, 0o000] {
        let name = format!("d{perm:o}");
        store.stage_dir(me(), &path(".surgetank-tmp-d"), &meta(perm)).unwrap();
        let identity = store.publish(me(), &path(".surgetank-tmp-d"), &path(&name), &meta(perm)).unwrap();
        let stat = store.stat(me(), &path(&name)).unwrap();
        assert_eq!(
            (stat.attr.kind, stat.attr.perm, stat.attr.mtime, stat.attr.ino),
            (Kind::Directory, perm, time(), identity.ino)
        );
    }
    deliver(store, "d755/f", b"x", &meta(0o644));
    assert_eq!(errno(store.remove_dir(me(), &path("d755"))), libc::ENOTEMPTY);
    store.unlink(me(), &path("d755/f")).unwrap();
    store.remove_dir(me(), &path("d755")).unwrap();
    assert_eq!(errno(store.stat(me(), &path("d755"))), libc::ENOENT);
    assert!(store.may_write_dir(me(), &StorePath::root()).is_ok());
    assert_eq!(errno(store.list(me(), &path("d755"), false)), libc::ENOENT);
}

/// A copy that was staged before its directory was renamed is published at the new path; also one that is so large that a store
/// of objects has sent it already.
pub fn staged_copies_move(store: &dyn Store) {
    make_dir(store, "d");
    make_dir(store, "d/e");
    let large = noise(17 << 20);
    let (small_at, small) = staged(store, "d/e/small", &source(b"small"), &meta(0o644));
    let (large_at, copy) = staged(store, "d/large", &source(&large), &meta(0o644));
    store.rename(me(), &path("d"), &path("f")).unwrap();
    let moved = |at: &StorePath| path(&format!("f{}", std::str::from_utf8(&at.0[1..]).unwrap()));
    assert_eq!(errno(store.stat(me(), &small_at)), libc::ENOENT);
    store.settle(me(), &[moved(&small_at), moved(&large_at)]).unwrap();
    store.verify(me(), &moved(&small_at), &small, Verify::Cache, no_gate()).unwrap();
    store.verify(me(), &moved(&large_at), &copy, Verify::Cache, no_gate()).unwrap();
    store.publish(me(), &moved(&small_at), &path("f/e/small"), &meta(0o644)).unwrap();
    store.publish(me(), &moved(&large_at), &path("f/large"), &meta(0o644)).unwrap();
    assert_eq!(read(store, "f/e/small"), b"small");
    assert!(read(store, "f/large") == large);
    assert_eq!(names(store, "f", true), ["e", "large"]);
    assert_eq!(store.collect().unwrap(), 0);
}

pub fn a_tree_in_one_step(store: &dyn Store) {
    let tree = path(".surgetank-tmp-tree");
    store.stage_dir(me(), &tree, &meta(0o555)).unwrap();
    store.stage_dir(me(), &tree.join(b"sub"), &meta(0o755)).unwrap();
    let leaf = tree.join(b"sub").join(b"leaf");
    let copy = store.stage_file(me(), &leaf, &StorePath::root(), &source(b"leaf"), &meta(0o444), no_gate()).unwrap();
    store.settle(me(), &[leaf.clone(), tree.join(b"sub"), tree.clone()]).unwrap();
    store.verify(me(), &leaf, &copy, Verify::Reread, no_gate()).unwrap();
    store.publish(me(), &tree, &path("tree"), &meta(0o555)).unwrap();
    assert_eq!(read(store, "tree/sub/leaf"), b"leaf");
    assert_eq!(store.stat(me(), &path("tree/sub/leaf")).unwrap().attr.perm, 0o444);
    let attr = store.stat(me(), &path("tree")).unwrap().attr;
    assert_eq!((attr.perm, attr.mtime), (0o555, time()));
}

pub fn a_directory_that_is_there(store: &dyn Store) {
    make_dir(store, "d");
    deliver(store, "d/kept", b"x", &meta(0o644));
    let before = store.stat(me(), &path("d")).unwrap().attr.ino;
    store.stage_dir(me(), &path(".surgetank-tmp-d"), &meta(0o700)).unwrap();
    let identity = store.publish(me(), &path(".surgetank-tmp-d"), &path("d"), &meta(0o700)).unwrap();
    assert_eq!((identity.ino, read(store, "d/kept")), (before, b"x".to_vec()));
    assert_eq!(names(store, "", true), ["d"]);
    // A filled one is not merged into a filled one, and a file never replaces a directory.
    store.stage_dir(me(), &path(".surgetank-tmp-d"), &meta(0o700)).unwrap();
    store
        .stage_file(me(), &path(".surgetank-tmp-d/f"), &StorePath::root(), &source(b"y"), &meta(0o644), no_gate())
        .unwrap();
    assert_eq!(errno(store.publish(me(), &path(".surgetank-tmp-d"), &path("d"), &meta(0o700))), libc::ENOTEMPTY);
    let (temporary, _) = staged(store, "d", &source(b"file"), &meta(0o644));
    assert_eq!(errno(store.publish(me(), &temporary, &path("d"), &meta(0o644))), libc::EISDIR);
    assert_eq!(errno(store.publish(me(), &path(".surgetank-tmp-d"), &path("d/kept"), &meta(0o644))), libc::ENOTDIR);
    assert_eq!(read(store, "d/kept"), b"x");
}
