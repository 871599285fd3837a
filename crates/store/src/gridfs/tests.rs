//! The tree of files over a real server. (The driver alone: `tests/gridfs.rs`.)

use std::time::Duration;

use surgetank_testkit::servers::mongo::MongoServer;

use super::{GridFs, Place};
use crate::conformance::{self, deliver, errno, me, meta, names, noise, path, read};
use crate::object::ObjectStore;
use crate::{Expect, Store, Verify};
use surgetank_types::sync::Arc;

fn open(url: &str, state: &std::path::Path, verify: Verify) -> ObjectStore {
    let place = Place::parse(url).unwrap();
    ObjectStore::new(Arc::new(GridFs::open(place).unwrap()), state, verify, Duration::ZERO).unwrap()
}

#[test]
fn conforms() {
    let Some(server) = MongoServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let nth = std::cell::Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        Box::new(open(&server.bucket_url(&format!("case{}", nth.get())), state.path(), Verify::Cache))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}

#[test]
fn files_of_other_clients_are_files_and_changes_are_seen() {
    let Some(server) = MongoServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = open(&server.url("p/"), state.path(), Verify::Reread);
    server.client_put("p/d/theirs", b"hello");
    server.client_put("other", b"not in the store");
    assert_eq!(names(&store, "", false), ["d"]);
    let seen = store.stat(me(), &path("d/theirs")).unwrap();
    assert_eq!((seen.attr.uid, seen.attr.perm, seen.attr.size_bytes), (me().uid, 0o644, 5));
    assert_eq!(read(&store, "d/theirs"), b"hello");
    // Of several files with one name, the youngest counts.
    server.client_put("p/d/theirs", b"HELLO");
    assert_ne!(store.stat(me(), &path("d/theirs")).unwrap().identity, seen.identity);
    assert_eq!(read(&store, "d/theirs"), b"HELLO");

    let ours = deliver(&store, "d/ours", b"12345", &meta(0o600));
    assert_eq!(server.client_get("p/d/ours"), b"12345");
    server.client_put("p/d/ours", b"54321");
    let is = store.stat(me(), &path("d/ours")).unwrap();
    assert_ne!(is.identity, ours, "other bytes of the same length give the same identity");
    assert_eq!((is.attr.perm, read(&store, "d/ours")), (0o644, b"54321".to_vec()));
    assert!(
        !store.check(me(), &path("d/ours"), &Expect::Identity(ours)).unwrap(),
        "the other client's file would be overwritten"
    );
    server.client(&["rename", "p/d/theirs", "p/d/moved"]);
    server.client(&["delete", "p/d/ours"]);
    assert_eq!(errno(store.stat(me(), &path("d/ours"))), libc::ENOENT);
    server.client(&["delete", "p/d/moved"]);
    server.client(&["delete", "p/d/theirs"]);
    assert_eq!(names(&store, "", false), [""; 0], "the directory still has an entry");
}

#[test]
fn large_file_is_renamed_and_read_back() {
    let Some(server) = MongoServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = open(&server.url(""), state.path(), Verify::Reread);
    let bytes = noise((20 << 20) + 3);
    deliver(&store, "big", &bytes, &meta(0o640));
    let before = store.stat(me(), &path("big")).unwrap();
    store.rename(me(), &path("big"), &path("bigger")).unwrap();
    let after = store.stat(me(), &path("bigger")).unwrap();
    assert_eq!((after.attr.ino, after.attr.mtime), (before.attr.ino, before.attr.mtime));
    assert!(read(&store, "bigger") == bytes);
    assert!(server.client_get("bigger") == bytes, "their client has other bytes");
    let count = |collection: &str| server.client(&["count", collection]);
    assert_eq!((count("chunks"), count("files")), ("82".into(), "2".into()), "81 chunks, and one of the mark");
    for collection in ["surgetank.uploads", "surgetank.parts", "surgetank.locks"] {
        assert_eq!(count(collection), "0", "{collection}");
    }
}
