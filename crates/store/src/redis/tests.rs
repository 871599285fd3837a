//! The tree of files on a real server. (The driver alone: `tests/redis.rs`.)

use std::time::Duration;

use surgetank_testkit::servers::redis::RedisServer;
use surgetank_testkit::servers::redis::cluster::{RedisCluster, TAG};

use super::{Place, Redis};
use crate::conformance::{self, deliver, errno, me, meta, names, noise, path, read};
use crate::object::ObjectStore;
use crate::{Expect, Store, Verify};
use surgetank_types::sync::Arc;

fn open(server: &RedisServer, prefix: &str, state: &std::path::Path, ttl: Duration) -> ObjectStore {
    let mut place = Place::parse(&server.url(prefix)).unwrap();
    place.limits.scan = Duration::ZERO;
    ObjectStore::new(Arc::new(Redis::open(place).unwrap()), state, Verify::Reread, ttl).unwrap()
}

#[test]
fn redis_store_conforms() {
    let Some(server) = RedisServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let nth = std::cell::Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        Box::new(open(&server, &format!("case{}:", nth.get()), state.path(), Duration::ZERO))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}

#[test]
fn redis_store_without_expiry_conforms() {
    let Some(server) = RedisServer::start_with(&["--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru"]) else {
        return;
    };
    let state = tempfile::tempdir().unwrap();
    let nth = std::cell::Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        Box::new(open(&server, &format!("case{}:", nth.get()), state.path(), Duration::ZERO))
    });
    let keyspace = server.cli(&["INFO", "keyspace"]);
    assert!(keyspace.contains("expires=0"), "the server may discard keys: {keyspace}");
}

#[test]
fn redis_store_on_a_cluster_conforms() {
    let Some(cluster) = RedisCluster::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let nth = std::cell::Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        // The store sends its requests to the server that does not have the keys.
        Box::new(open(&cluster.other, &format!("{TAG}:case{}:", nth.get()), state.path(), Duration::ZERO))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}

#[test]
fn values_of_other_clients_are_files_and_changes_are_seen() {
    let Some(server) = RedisServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = open(&server, "p:", state.path(), Duration::ZERO);
    server.cli(&["SET", "p:d/theirs", "hello"]);
    server.cli(&["SET", "other", "not in the store"]);
    server.cli(&["RPUSH", "p:list", "no file"]);
    assert_eq!(names(&store, "", false), ["d"]);
    let seen = store.stat(me(), &path("d/theirs")).unwrap();
    assert_eq!((seen.attr.uid, seen.attr.perm, seen.attr.size_bytes), (me().uid, 0o644, 5));
    assert_eq!(read(&store, "d/theirs"), b"hello");

    let ours = deliver(&store, "d/ours", b"12345", &meta(0o600));
    server.cli(&["SET", "p:d/ours", "54321"]);
    let is = store.stat(me(), &path("d/ours")).unwrap();
    assert_ne!(is.identity, ours, "other bytes of the same length give the same identity");
    assert_eq!((is.attr.perm, read(&store, "d/ours")), (0o644, b"54321".to_vec()));
    assert!(
        !store.check(me(), &path("d/ours"), &Expect::Identity(ours)).unwrap(),
        "the other client's file would be overwritten"
    );
    server.cli(&["DEL", "p:d/ours", "p:d/theirs"]);
    assert_eq!(errno(store.stat(me(), &path("d/ours"))), libc::ENOENT);
    assert_eq!(names(&store, "", false), [""; 0], "the directory still has an entry");
}

#[test]
fn large_file_after_rename_reads_back() {
    let Some(server) = RedisServer::start() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = open(&server, "", state.path(), Duration::from_secs(60));
    let bytes = noise((40 << 20) + 3);
    deliver(&store, "big", &bytes, &meta(0o640));
    let before = store.stat(me(), &path("big")).unwrap();
    store.rename(me(), &path("big"), &path("bigger")).unwrap();
    let after = store.stat(me(), &path("bigger")).unwrap();
    assert_eq!((after.attr.ino, after.attr.mtime), (before.attr.ino, before.attr.mtime));
    assert!(read(&store, "bigger") == bytes);
    let left = server.cli(&["KEYS", "*"]);
    let mut left: Vec<&str> = left.lines().filter(|key| !key.is_empty()).collect();
    left.sort_unstable();
    assert_eq!(left, [".surgetank-store", "//surgetank/index", "//surgetank/records", "bigger"]);
}
