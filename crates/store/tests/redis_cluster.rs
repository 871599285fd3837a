//! The Redis driver with a cluster: whichever server is asked, and whatever happens to the servers meanwhile.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::redis::driver::*;
use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Objects, When, Words};
use surgetank_store::redis::{Durability, Place, Redis};
use surgetank_testkit::servers::redis::RedisServer;
use surgetank_testkit::servers::redis::cluster::RedisCluster;

const PREFIX: &str = "{project}:";

/// Waits as long as a test permits, not as long as a user does.
fn patient(server: &RedisServer) -> Redis {
    Redis::open(timeout(server)).unwrap_or_else(|why| panic!("{why}"))
}

fn timeout(server: &RedisServer) -> Place {
    let mut place = place(server, PREFIX);
    (place.limits.tries, place.limits.all_tries) = (1000, Duration::from_secs(60));
    place.limits.doubt = Duration::from_millis(500);
    place
}

#[test]
fn any_server_of_the_cluster_leads_to_the_keys() {
    let Some(cluster) = RedisCluster::start() else { return };
    for server in [&cluster.other, &cluster.replica, &cluster.owner] {
        let store = patient(server);
        assert_eq!(store.durability(), Some(Durability::Replicated(Box::new(Durability::Always))));
        let content = pattern(2 * PART + 5, 3);
        put(&store, "dir/short", b"content", When::Always).unwrap();
        put(&store, "dir/long", &content[..300_000], When::Always).unwrap();
        let id = store.begin("dir/parts", &Words::new()).unwrap();
        let pieces = content.chunks(PART).zip(1..);
        let parts: Vec<_> = pieces
            .map(|(piece, number)| store.part("dir/parts", &id, number, &piece, of_bytes(piece)).unwrap())
            .collect();
        store.complete("dir/parts", &id, &parts, of_bytes(&content), When::Always).unwrap();
        store.settle().unwrap();
        assert!(get(&store, "dir/parts", 0..content.len() as u64) == content);
        let names = ["dir/long", "dir/parts", "dir/short"].map(str::to_owned);
        assert_eq!(all(&store, "", false).0, BTreeSet::from(names));
        assert!(store.counters().connections <= 4, "{:?}", store.counters());
        let of_replica = cluster.replica.cli(&["-c", "EXISTS", "{project}:dir/parts"]);
        assert_eq!(of_replica, "1");
        for name in ["dir/short", "dir/long", "dir/parts"] {
            store.delete(name).unwrap();
        }
    }
    // The wrong server is first asked for a transaction.
    let store = Redis::new(timeout(&cluster.other)).unwrap();
    let id = store.begin("x", &Words::new()).unwrap();
    store.abort("x", &id).unwrap();
    assert!(keys(&cluster.owner).iter().all(|key| key.starts_with("{project}://surgetank/settled")));
}

#[test]
fn store_without_hash_tag_on_a_cluster_is_refused() {
    let Some(cluster) = RedisCluster::start() else { return };
    for prefix in ["", "project:", "{}:", "a}b{:"] {
        let why = Redis::open(place(&cluster.other, prefix)).unwrap_err().to_string();
        assert!(why.contains("?prefix={NAME}:"), "{prefix}: {why}");
    }
    // A user that may not ask what the server is finds out too.
    cluster.owner.cli(&["ACL", "SETUSER", "default", "-info"]);
    cluster.other.cli(&["ACL", "SETUSER", "default", "-info"]);
    let why = Redis::open(place(&cluster.other, "project:")).unwrap_err().to_string();
    assert!(why.contains("?prefix={NAME}:"), "{why}");
    // That does not block the drain either.
    let store = patient(&cluster.other);
    put(&store, "k", b"x", When::Absent).unwrap();
    store.settle().unwrap();
    assert_eq!(store.durability(), Some(Durability::Untold));
}

/// What was acknowledged and settled exists, and only what was written.
#[test]
fn settled_values_survive_the_loss_of_the_owner() {
    let Some(mut cluster) = RedisCluster::start() else { return };
    let store = patient(&cluster.other);
    let mut written = BTreeMap::new();
    for nth in 0..50 {
        let content = pattern(1000 * nth, nth as u64);
        put(&store, &format!("before/{nth}"), &content, When::Absent).unwrap();
        written.insert(format!("before/{nth}"), content);
    }
    store.settle().unwrap();
    cluster.owner.kill();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = BTreeMap::new();
            for nth in 0..50 {
                let content = pattern(1000 * nth, nth as u64);
                put(&store, &format!("after/{nth}"), &content, When::Absent).unwrap();
                written.insert(format!("after/{nth}"), content);
            }
            written
        });
        std::thread::sleep(Duration::from_millis(500));
        cluster.take_over();
        written.append(&mut writer.join().unwrap());
    });
    assert_eq!(written.len(), 100);
    let seen = all(&store, "", false).0;
    assert_eq!(seen, written.keys().cloned().collect());
    for (name, content) in &written {
        assert!(get(&store, name, 0..content.len() as u64) == *content, "{name}");
    }
    // Without a replica settling fails after a limited time.
    surgetank_testkit::servers::redis::cluster::eventually("it is durable", || store.settle().is_ok());
    // The old server returns as a replica, and redirects clients that still ask it.
    cluster.owner.restart();
    surgetank_testkit::servers::redis::cluster::eventually("it follows", || {
        cluster.owner.cli(&["INFO", "replication"]).contains("role:slave")
    });
    let store = patient(&cluster.owner);
    assert_eq!(all(&store, "", false).0.len(), 100);
}

/// What a dead server had acknowledged counted as durable, because the next server had all of its own data.
#[test]
fn settle_after_failover_fails_for_earlier_writes() {
    let Some(mut cluster) = RedisCluster::start() else { return };
    let store = patient(&cluster.other);
    put(&store, "first", b"x", When::Absent).unwrap();
    store.settle().unwrap();
    cluster.replica.sleep(true);
    put(&store, "second", b"acknowledged by one", When::Absent).unwrap();
    cluster.owner.kill();
    cluster.replica.sleep(false);
    cluster.take_over();
    let why = store.settle().unwrap_err();
    assert_eq!(why.raw_os_error(), Some(libc::EHOSTDOWN), "{why}");
    assert!(store.settle().is_err(), "others relied on it, too");
    std::thread::sleep(Duration::from_millis(600));
    store.settle().unwrap();
    assert!(store.head("first").unwrap().is_some());
}

/// Independent servers would be asked in order.
#[test]
fn several_independent_servers_are_refused() {
    let (Some(one), Some(other)) = (RedisServer::start(), RedisServer::start()) else { return };
    let url = format!("redis://127.0.0.1:{},127.0.0.1:{}/?prefix={{a}}:", one.port(), other.port());
    let why = Redis::open(Place::parse(&url).unwrap()).unwrap_err().to_string();
    assert!(why.contains("does not belong to a cluster"), "{why}");
}

/// A change that found half of the keys took files for deleted whose values had already moved.
#[test]
fn changes_during_a_move_of_keys_are_complete() {
    let Some(cluster) = RedisCluster::start() else { return };
    let store = patient(&cluster.owner);
    for nth in 0..40 {
        put(&store, &format!("k{nth}"), format!("content {nth}").as_bytes(), When::Absent).unwrap();
    }
    let slot = cluster.begin_move();
    // Some keys are on one server, some on the other.
    assert_eq!(cluster.move_keys(&slot, 21, |key| !key.contains("//")), 21);
    // Keys that have not moved are served.
    let (here, there): (Vec<_>, Vec<_>) =
        (0..40).partition(|nth| keys(&cluster.owner).contains(&format!("{PREFIX}k{nth}")));
    assert_eq!((here.len(), there.len()), (19, 21));
    for nth in here {
        assert!(store.head(&format!("k{nth}")).unwrap().is_some());
    }
    let hasty = {
        let mut place = place(&cluster.owner, PREFIX);
        place.limits.tries = 2;
        Redis::new(place).unwrap()
    };
    for nth in 0..40 {
        let why = hasty.head(&format!("k{nth}"));
        let gone = matches!(&why, Ok(None));
        assert!(!gone, "k{nth} has only gone elsewhere");
    }
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let store = &store;
                scope.spawn(move || {
                    for nth in (writer..40).step_by(4) {
                        let key = format!("k{nth}");
                        let seen = store.head(&key).unwrap().unwrap_or_else(|| panic!("{key} is gone"));
                        let content = format!("another {nth}");
                        put(store, &key, content.as_bytes(), When::Is(&seen.etag)).unwrap();
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        while cluster.move_keys(&slot, 10, |_| true) > 0 {}
        cluster.end_move(&slot);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    assert_eq!(all(&store, "", false).0.len(), 40);
    for nth in 0..40 {
        let content = format!("another {nth}");
        assert_eq!(get(&store, &format!("k{nth}"), 0..content.len() as u64), content.as_bytes());
    }
    assert!(keys(&cluster.other).contains("{project}:k7"), "{:?}", keys(&cluster.other));
}
