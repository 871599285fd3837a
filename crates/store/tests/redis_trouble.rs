//! The Redis driver with a server that is unavailable, full, or refuses the user.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Read;
use std::time::Duration;

use crate::redis::driver::*;
use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Objects, When, Words};
use surgetank_store::redis::{Place, Redis};
use surgetank_testkit::servers::redis::RedisServer;

#[test]
fn acknowledged_values_survive_a_killed_server() {
    let Some(mut server) = RedisServer::start() else { return };
    let mut place = place(&server, "k:");
    // Long enough for the slowest machine: the test is about the result, not the time.
    (place.limits.tries, place.limits.all_tries) = (12, Duration::from_secs(60));
    let store = Redis::open(place).unwrap();
    let content = pattern(20 * MIB, 5);
    let large = put(&store, "large", &content, When::Always).unwrap();
    let mut reader = store.get("large", 0..content.len() as u64, None).unwrap();
    let mut read = vec![0; MIB];
    reader.read_exact(&mut read).unwrap();
    let acknowledged = std::thread::scope(|scope| {
        let store = &store;
        let writers: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn(move || {
                    let mut written = Vec::new();
                    for nth in 0..150 {
                        let key = format!("{thread}/{nth}");
                        // A lost answer must not look like another client's earlier write.
                        written.push((put(store, &key, key.as_bytes(), When::Absent).unwrap(), key));
                    }
                    written
                })
            })
            .collect();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(60));
            server.restart();
        }
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect::<Vec<_>>()
    });
    reader.read_to_end(&mut read).unwrap();
    assert!(read == content, "a reading goes on");
    assert!(store.counters().tries_again > 0, "it was never away");
    assert_eq!(store.head("large").unwrap().unwrap().etag, large);
    for (etag, key) in &acknowledged {
        assert_eq!(store.head(key).unwrap().map(|object| object.etag).as_ref(), Some(etag), "{key}");
        assert_eq!(get(&store, key, 0..key.len() as u64), key.as_bytes());
    }
    assert_eq!(all(&store, "", false).0.len(), 601);
}

#[test]
fn change_sent_twice_is_made_once() {
    let Some(mut server) = RedisServer::start() else { return };
    let mut place = place(&server, "");
    (place.limits.progress, place.limits.tries) = (Duration::from_millis(300), 20);
    (place.limits.pause, place.limits.all_tries) = (Duration::from_millis(20), Duration::from_secs(60));
    let store = Redis::open(place).unwrap();
    // The server accepts the command and answers late.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slow = "local t = redis.call('TIME')[1] + 0 while redis.call('TIME')[1] - t < 2 do end";
            server.cli(&["EVAL", slow, "0"]);
        });
        std::thread::sleep(Duration::from_millis(100));
        put(&store, "small", b"x", When::Absent).unwrap();
    });
    assert!(store.counters().tries_again > 0, "every answer came in time");
    assert_eq!(get(&store, "small", 0..1), b"x");
    server.kill();
    assert!(errno(store.head("small")).is_some());
}

#[test]
fn unavailable_server_gives_error_of_the_socket() {
    let Some(mut server) = RedisServer::start() else { return };
    let mut place = place(&server, "away");
    place.limits.pause = Duration::from_millis(1);
    let store = Redis::open(place.clone()).unwrap();
    server.kill();
    assert_eq!(errno(store.head("k")), Some(libc::ECONNREFUSED));
    let why = Redis::open(place).unwrap_err().to_string();
    assert!(why.contains("refused") && why.contains("127.0.0.1") && why.contains("port"), "{why}");
}

#[test]
fn full_memory_gives_enospc_and_keeps_values() {
    let Some(server) = RedisServer::start_with(&["--maxmemory", "30mb"]) else { return };
    let store = open(&server, "");
    let content = pattern(10 * MIB, 1);
    put(&store, "fits", &content, When::Absent).unwrap();
    let begun = store.begin("begun", &Words::new()).unwrap();
    server.cli(&["SET", "theirs", "x"]);
    server.cli(&["CONFIG", "SET", "maxmemory", "5mb"]);
    for size in [10, MIB] {
        assert_eq!(errno(put(&store, "more", &content[..size], When::Absent)), Some(libc::ENOSPC), "{size}");
    }
    assert_eq!(errno(store.begin("parts", &Words::new())), Some(libc::ENOSPC));
    let (part, sum) = (&content[..MIB], of_bytes(&content[..MIB]));
    assert_eq!(errno(store.part("begun", &begun, 1, &part, sum)), Some(libc::ENOSPC));
    store.abort("begun", &begun).unwrap();
    assert!(get(&store, "fits", 0..content.len() as u64) == content, "what is there can be read");
    assert_eq!(store.head("theirs").unwrap().unwrap().size_bytes, 1);
    assert!(all(&store, "", false).0.contains("fits"));
    store.delete("fits").unwrap();
    server.cli(&["CONFIG", "SET", "maxmemory", "30mb"]);
    put(&store, "more", &content, When::Absent).unwrap();
}

#[test]
fn value_longer_than_server_limit_is_refused() {
    let Some(server) = RedisServer::start_with(&["--proto-max-bulk-len", "20mb"]) else { return };
    let store = open(&server, "");
    assert_eq!(store.abilities().object_bytes_max, 20 << 20);
    let content = pattern(PART, 1);
    let id = store.begin("big", &Words::new()).unwrap();
    store.part("big", &id, 1, &content.as_slice(), of_bytes(&content)).unwrap();
    let second = store.part("big", &id, 2, &content.as_slice(), of_bytes(&content));
    assert_eq!(errno(second), Some(libc::EFBIG));
}

#[test]
fn authentication_failures_have_a_remedy() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["ACL", "SETUSER", "me", "on", ">right", "~p:*", "+@all"]);
    server.cli(&["CONFIG", "SET", "requirepass", "secret-of-all"]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    let url = |user: &str, prefix: &str| {
        let file = file.display();
        format!("redis://{user}127.0.0.1:{}/0?prefix={prefix}&password_file={file}", server.port())
    };
    let try_with = |password: &str, user: &str, prefix: &str| {
        std::fs::write(&file, format!("{password}\n")).unwrap();
        Redis::open(Place::parse(&url(user, prefix)).unwrap())
    };
    for (password, user) in [("right", "me@"), ("secret-of-all", "")] {
        let store = try_with(password, user, "p:").unwrap_or_else(|why| panic!("{why}"));
        put(&store, "k", b"x", When::Always).unwrap();
        assert!(!format!("{store:?} {}", store.describe()).contains(password));
    }
    for (password, user) in [("hunter2", "me@"), ("hunter2", ""), ("right", "nobody@")] {
        let why = try_with(password, user, "p:").unwrap_err();
        let told = format!("{why} {why:?}");
        assert!(told.contains("WRONGPASS") && told.contains("REDISCLI_AUTH"), "{told}");
        assert!(!told.contains(password), "{told}");
    }
    let why = try_with("right", "me@", "q:").unwrap_err().to_string();
    assert!(why.contains("NOPERM") && why.contains("ACL"), "{why}");
    std::fs::remove_file(&file).unwrap();
    let why = Redis::open(Place::parse(&url("", "p:")).unwrap()).unwrap_err().to_string();
    assert!(why.contains("password") && why.contains("No such file"), "{why}");
    let mut place = place(&server, "p:");
    let why = Redis::open(place.clone()).unwrap_err().to_string();
    assert!(why.contains("NOAUTH") && why.contains("REDISCLI_AUTH"), "{why}");
    place.limits.tries = 1;
    assert_eq!(errno(Redis::new(place).unwrap().head("k")), Some(libc::EACCES));
}

#[test]
fn server_without_trusted_certificate_is_refused() {
    let Some(server) = RedisServer::start_tls() else { return };
    let mut place = Place::parse(&format!("rediss://localhost:{}", server.port())).unwrap();
    place.authority_file = Some(server.authority());
    let store = Redis::open(place.clone()).unwrap_or_else(|why| panic!("{why}"));
    let content = pattern(3 * MIB, 7);
    put(&store, "k", &content, When::Absent).unwrap();
    assert!(get(&store, "k", 0..content.len() as u64) == content);
    assert!(store.describe().starts_with("rediss://localhost"));

    place.authority_file = None;
    let why = Redis::open(place.clone()).unwrap_err().to_string();
    assert!(why.contains("certificate") && why.contains("authority_file"), "{why}");
    place.tls = false;
    place.limits.tries = 1;
    Redis::open(place).unwrap_err();
}

#[test]
fn replica_as_server_is_refused() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let why = Redis::open(place(&server, "")).unwrap_err().to_string();
    assert!(why.contains("replica") && why.contains("written"), "{why}");
}
