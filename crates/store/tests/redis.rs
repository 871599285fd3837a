//! The Redis driver against a real server: every method of the interface.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod driver;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::time::Duration;

use driver::*;
use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Objects, Part, When, Words, is_condition_failed};
use surgetank_store::redis::{Durability, Redis};
use surgetank_testkit::servers::redis::RedisServer;

#[test]
fn probe_finds_abilities_and_leaves_nothing() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "a:b/");
    let able = store.abilities();
    assert!(able.if_absent && able.if_same && able.copies && able.uploads_in_parts && !able.checksums, "{able:?}");
    assert_eq!(able.object_bytes_max, 512 << 20);
    assert_eq!(store.describe(), format!("redis://127.0.0.1:{}/0?prefix=a:b/", server.port()));
    assert_eq!(store.durability(), Some(Durability::Always));
    assert_eq!(keys(&server), BTreeSet::new());
    let asked = store.counters().requests;
    store.abilities();
    assert_eq!(store.counters().requests, asked, "asked again");
}

#[test]
fn durability_of_the_server_is_reported() {
    let Some(server) = RedisServer::start_with(&["--appendonly", "no", "--save", "3600 1"]) else { return };
    assert_eq!(open(&server, "").durability(), Some(Durability::Snapshots("3600 1".into())));
    server.cli(&["CONFIG", "SET", "appendonly", "yes", "appendfsync", "everysec"]);
    // Redis 7.2 and newer can be asked to wait.
    let kept = open(&server, "").durability().unwrap();
    assert!(matches!(kept, Durability::EverySecond | Durability::Waits), "{kept:?}");
    server.cli(&["CONFIG", "SET", "appendfsync", "always", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru"]);
    let kept = open(&server, "").durability().unwrap();
    assert_eq!(kept, Durability::Evicts("allkeys-lru", Box::new(Durability::Always)));
    open(&server, "").settle().unwrap();
    // The user may not ask: that is not a promise.
    server.cli(&["ACL", "SETUSER", "default", "-config", "-info", "-command"]);
    assert_eq!(open(&server, "").durability(), Some(Durability::Untold));
}

#[test]
fn put_value_is_read_by_driver_and_redis_cli() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "p:");
    assert_eq!(store.head("x").unwrap(), None);
    for size in [0, 1, 65_536, 65_537, 300_000, 5 * MIB] {
        let content = pattern(size, 1);
        let said = words(&[("mtime", "1700000000.123456789"), ("mode", "0644"), ("odd", "a=b; c \"d\" ü\n")]);
        let etag = store.put("dir/x", &content.as_slice(), of_bytes(&content), &said, When::Always).unwrap();
        let object = store.head("dir/x").unwrap().unwrap();
        assert_eq!((object.key.as_str(), object.size_bytes, &object.etag), ("dir/x", size as u64, &etag));
        assert_eq!((object.words, object.crc64nvme), (Some(said), Some(of_bytes(&content))));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as i64;
        assert!((now - object.modified_nanos).abs() < 3_600_000_000_000, "{}", object.modified_nanos);
        if size > 0 {
            assert!(get(&store, "dir/x", 0..size as u64) == content, "{size}");
            assert_eq!(get(&store, "dir/x", size as u64 - 1..size as u64), content[size - 1..]);
        }
        let raw = server.cli_bytes(&["--raw", "GET", "p:dir/x"]);
        assert!(raw[..raw.len() - 1] == content, "redis-cli GET tells other bytes");
    }
    for range in [0..10, 0..5 * MIB as u64] {
        let wrong = store.get("dir/x", range, Some(WRONG)).err().unwrap();
        assert!(is_condition_failed(&wrong), "{wrong:?}");
    }
    assert_eq!(errno(store.get("dir/y", 0..10, None)), Some(libc::ENOENT));
    assert_eq!(errno(store.get("dir/y", 0..MIB as u64, None)), Some(libc::ENOENT));
    store.delete("dir/x").unwrap();
    store.delete("dir/x").unwrap();
    assert_eq!(store.head("dir/x").unwrap(), None);
    assert_eq!(keys(&server), BTreeSet::new(), "records, index and values go with the last file");
}

#[test]
fn keys_with_special_characters_read_back() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "[o]*?\\");
    server.cli(&["SET", "other*", "does not begin with the prefix"]);
    server.cli(&["SET", "[o]*?\\theirs", "x"]);
    let long = format!("{}{}", "long/".repeat(2000), "z".repeat(95));
    let names =
        ["a b", "a%41", "a'\"b", "a?b[c]*", "ä€𝄞", " before", "line\nbreak", "tab\there", "d/", "d/e/", "d/e/f", &long];
    for name in names {
        store.put(name, &name.as_bytes(), of_bytes(name.as_bytes()), &words(&[("a", name)]), When::Absent).unwrap();
    }
    let listed = all(&store, "", false).0;
    let mut expected: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    expected.insert("theirs".into());
    assert_eq!(listed, expected);
    for name in names {
        assert_eq!(get(&store, name, 0..name.len() as u64), name.as_bytes(), "{name}");
        assert_eq!(store.head(name).unwrap().unwrap().words, Some(words(&[("a", name)])));
        store.delete(name).unwrap();
    }
    assert_eq!(all(&store, "", false).0, BTreeSet::from(["theirs".to_owned()]));
}

#[test]
fn listing_of_100_000_keys_has_pages_and_skips_prefixes() {
    let Some(server) = RedisServer::start_with(&["--appendonly", "no"]) else { return };
    // Written without the driver, as by another client.
    server.cli(&[
        "EVAL",
        "for n = 1, 100000 do redis.call('SET', string.format('p:in/%03d/%05d', n % 100, n), n) end",
        "0",
    ]);
    server.cli(&["EVAL", "for n = 1, 1000 do redis.call('SET', 'other' .. n, n) end", "0"]);
    let store = open(&server, "p:");
    put(&store, "top", b"x", When::Absent).unwrap();
    put(&store, "in/000", b"a file beside a directory", When::Absent).unwrap();
    put(&store, "in/000-", b"before the slash", When::Absent).unwrap();
    let asked = || store.counters().requests;
    let mut before = asked();
    assert_eq!(all(&store, "", true), (BTreeSet::from(["top".into()]), BTreeSet::from(["in/".into()])));
    let scanned = asked() - before;
    assert!(scanned <= 110, "{scanned} requests for a look at all keys and one page");
    let store = &{
        let mut place = place(&server, "p:");
        place.limits.scan = Duration::from_secs(3600);
        let store = Redis::open(place).unwrap();
        store.list("nothing", true, None).unwrap();
        store
    };
    let asked = || store.counters().requests;
    before = asked();
    let (keys, prefixes) = all(store, "in/", true);
    assert_eq!((keys.len(), prefixes.len()), (2, 100));
    assert_eq!(asked() - before, 1, "100,000 keys are stepped over");
    assert_eq!(all(store, "in/00", true).1.len(), 10);
    before = asked();
    assert_eq!(all(store, "in/007/", true).0.len(), 1000);
    assert_eq!(asked() - before, 5, "others' keys count five times");
    before = asked();
    assert_eq!(all(store, "", false).0.len(), 100_003);
    assert!(asked() - before <= 501, "{}", asked() - before);
    assert_eq!(all(store, "nothing/", false), (BTreeSet::new(), BTreeSet::new()));
    let page = store.list("in/000", false, None).unwrap();
    assert_eq!(page.objects[0].words, Some(Words::new()));
    assert_eq!(Some(&page.objects[0].etag), store.head("in/000").unwrap().map(|object| object.etag).as_ref());
    // What other clients remove is not shown, nor a directory of it.
    server.cli(&[
        "EVAL",
        "for n = 1, 100000 do if n % 100 == 7 then redis.call('DEL', string.format('p:in/007/%05d', n)) end end",
        "0",
    ]);
    assert_eq!(all(store, "in/", true).1.len(), 99);
}

#[test]
fn keys_added_by_other_clients_appear_after_a_scan() {
    let Some(server) = RedisServer::start() else { return };
    let mut place = place(&server, "");
    place.limits.scan = Duration::from_secs(3600);
    let store = Redis::open(place).unwrap();
    server.cli(&["SET", "first", "x"]);
    assert_eq!(all(&store, "", false).0, BTreeSet::from(["first".into()]));
    server.cli(&["SET", "second", "x"]);
    let before = store.counters().requests;
    assert_eq!(all(&store, "", false).0, BTreeSet::from(["first".into()]));
    assert_eq!(store.counters().requests - before, 1, "no look at all keys for each listing");
    assert_eq!(store.head("second").unwrap().unwrap().size_bytes, 1, "asked for by name it is there");
    server.cli(&["SET", "third", "x"]);
    store.refresh();
    assert_eq!(all(&store, "", false).0, ["first", "second", "third"].map(str::to_owned).into());
}

#[test]
fn values_set_by_other_clients_are_noticed() {
    for (options, exact) in [(&[][..], true), (&["--maxmemory-policy", "volatile-lru"][..], false)] {
        let Some(server) = RedisServer::start_with(options) else { return };
        let store = open(&server, "p:");
        let said = words(&[("mode", "0600")]);
        for size in [0, 5, 4096, 100_000] {
            let content = pattern(size, 3);
            let ours = store.put("k", &content.as_slice(), of_bytes(&content), &said, When::Always).unwrap();
            let mut theirs = content.clone();
            // Where values carry no mark, the first and last bytes of a long one are compared, not all of them.
            if let Some(byte) = theirs.get_mut(if exact { 77 * size / 100 } else { size.saturating_sub(1) }) {
                *byte ^= 1;
            }
            let text: String = theirs.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            set_bytes(&server, "p:k", &text);
            let seen = store.head("k").unwrap().unwrap();
            if size > 0 || exact {
                assert_ne!(seen.etag, ours, "{size} bytes, {options:?}");
                assert_eq!((&seen.words, seen.crc64nvme), (&Some(Words::new()), None));
                assert!(is_condition_failed(&put(&store, "k", b"more", When::Is(&ours)).unwrap_err()));
                assert!(is_condition_failed(&store.copy("k", Some(&ours), "c", None).unwrap_err()));
            }
            assert!(get(&store, "k", 0..size as u64) == theirs);
            assert_eq!(store.head("k").unwrap().unwrap(), seen, "it is the same until a client changes it");
            assert_eq!(all(&store, "", false).0.len(), 1);
            let next = put(&store, "k", b"ours again", When::Is(&seen.etag)).unwrap();
            server.cli(&["APPEND", "p:k", "!"]);
            assert_ne!(store.head("k").unwrap().unwrap().etag, next);
            server.cli(&["DEL", "p:k"]);
            assert_eq!(store.head("k").unwrap(), None);
        }
        // A value of another type is neither shown nor overwritten.
        server.cli(&["RPUSH", "p:k", "x"]);
        assert_eq!(store.head("k").unwrap(), None);
        for when in [When::Always, When::Absent] {
            assert_eq!(errno(put(&store, "k", b"x", when)), Some(libc::EEXIST), "{when:?}");
        }
        store.delete("k").unwrap();
        assert_eq!(server.cli(&["LRANGE", "p:k", "0", "-1"]), "x");
    }
}

/// `text`: as redis-cli reads it between quotes.
fn set_bytes(server: &RedisServer, key: &str, text: &str) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("commands");
    std::fs::write(&file, format!("SET {key} \"{text}\"\n")).unwrap();
    let output = std::process::Command::new("redis-cli")
        .args(["-p", &server.port().to_string()])
        .stdin(std::fs::File::open(file).unwrap())
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"OK\n");
}

#[test]
fn conditional_writes_succeed_or_fail() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "c:");
    let first = put(&store, "k", b"one", When::Absent).unwrap();
    let large = pattern(3 * MIB, 2);
    for content in [b"two".as_slice(), &large] {
        assert!(is_condition_failed(&put(&store, "k", content, When::Absent).unwrap_err()));
        assert!(is_condition_failed(&put(&store, "k", content, When::Is(WRONG)).unwrap_err()));
        assert!(is_condition_failed(&put(&store, "gone", content, When::Is(&first)).unwrap_err()));
    }
    assert_eq!(get(&store, "k", 0..3), b"one");
    assert_eq!(store.counters().tries_again, 0, "a refusal is an answer");
    let second = put(&store, "k", b"two", When::Is(&first)).unwrap();
    assert_ne!(first, second);
    assert!(is_condition_failed(&put(&store, "k", b"three", When::Is(&first)).unwrap_err()));
    assert_eq!(get(&store, "k", 0..3), b"two");
}

#[test]
fn one_of_many_conditional_writers_succeeds() {
    let Some(server) = RedisServer::start_with(&["--appendfsync", "no"]) else { return };
    let store = open(&server, "race:");
    for round in 0..20 {
        let key = format!("k{round}");
        let won = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|nth| {
                    let (store, key) = (&store, &key);
                    let content = format!("writer {nth}").repeat(if round % 2 == 0 { 1 } else { 20_000 });
                    scope.spawn(move || match put(store, key, content.as_bytes(), When::Absent) {
                        Ok(_) => Some(nth),
                        Err(why) if is_condition_failed(&why) => None,
                        Err(why) => panic!("{why}"),
                    })
                })
                .collect();
            writers.into_iter().filter_map(|writer| writer.join().unwrap()).collect::<Vec<u64>>()
        });
        assert_eq!(won.len(), 1, "{won:?}");
        assert_eq!(get(&store, &key, 0..8), format!("writer {}", won[0]).as_bytes());
    }
    assert!(store.counters().connections <= 9, "{:?}", store.counters());
    let left: Vec<String> = keys(&server).into_iter().filter(|key| key.contains("//surgetank/bytes/")).collect();
    for key in left {
        assert_ne!(server.cli(&["TTL", &key]), "-1", "the losing value stays indefinitely: {key}");
    }
}

#[test]
fn copies_keep_words_or_get_new_ones() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "copy:");
    let old = words(&[("a", "1"), ("b", "2")]);
    let etag = store.put("from", &b"content".as_slice(), of_bytes(b"content"), &old, When::Always).unwrap();
    store.copy("from", Some(&etag), "kept", None).unwrap();
    let new = words(&[("c", "3")]);
    let other = store.copy("from", None, "replaced", Some(&new)).unwrap();
    assert_ne!(other, etag, "another version");
    store.copy("from", None, "none", Some(&Words::new())).unwrap();
    for (key, said) in [("kept", &old), ("replaced", &new), ("none", &Words::new())] {
        let object = store.head(key).unwrap().unwrap();
        assert_eq!((object.words.as_ref(), object.crc64nvme), (Some(said), Some(of_bytes(b"content"))), "{key}");
        assert_eq!(get(&store, key, 0..7), b"content");
    }
    // Onto itself: new words, the same content.
    store.copy("from", Some(&etag), "from", Some(&new)).unwrap();
    assert_eq!(store.head("from").unwrap().unwrap().words, Some(new));
    assert!(is_condition_failed(&store.copy("from", Some(&etag), "x", None).unwrap_err()));
    assert_eq!(store.copy("missing", None, "x", None).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.head("x").unwrap(), None);
    server.cli(&["SET", "copy:theirs", "content"]);
    store.copy("theirs", None, "ours", Some(&old)).unwrap();
    assert_eq!(store.head("ours").unwrap().unwrap().words, Some(old));
}

#[test]
fn body_with_wrong_checksum_is_refused() {
    let Some(server) = RedisServer::start() else { return };
    let store = open(&server, "");
    for content in [&b"content"[..], &pattern(MIB, 1)] {
        let why = store.put("k", &content, 1, &Words::new(), When::Always).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    }
    let id = store.begin("k", &Words::new()).unwrap();
    let why = store.part("k", &id, 1, &b"content".as_slice(), 1).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    let part = store.part("k", &id, 1, &b"content".as_slice(), of_bytes(b"content")).unwrap();
    let why = store.complete("k", &id, std::slice::from_ref(&part), 1, When::Always).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    assert_eq!(store.head("k").unwrap(), None);
    store.complete("k", &id, &[part], of_bytes(b"content"), When::Always).unwrap();
    assert_eq!(get(&store, "k", 0..7), b"content");
}

#[test]
fn upload_in_parts_completes_and_aborts() {
    let Some(server) = RedisServer::start_with(&["--appendfsync", "no"]) else { return };
    let store = open(&server, "parts:");
    let content = pattern(2 * PART + 5, 3);
    let said = words(&[("mode", "0600")]);
    let id = store.begin("dir/big", &said).unwrap();
    let piece = |nth: usize| &content[nth * PART..content.len().min((nth + 1) * PART)];
    let put_part = |store: &Redis, nth: usize| {
        store.part("dir/big", &id, nth as u32 + 1, &piece(nth), of_bytes(piece(nth))).unwrap()
    };
    put_part(&store, 2);
    put_part(&store, 0);
    assert_eq!(store.head("dir/big").unwrap(), None);
    assert_eq!(all(&store, "", false).0, BTreeSet::new());

    // Another process without any state continues.
    let store = open(&server, "parts:");
    let uploads = store.uploads("dir/").unwrap();
    assert_eq!(uploads.len(), 1);
    assert_eq!((uploads[0].key.as_str(), uploads[0].id.as_str()), ("dir/big", id.as_str()));
    assert!(uploads[0].begun_nanos > 0);
    assert_eq!(store.uploads("other").unwrap(), []);
    let parts = store.parts("dir/big", &id).unwrap();
    assert_eq!(parts.iter().map(|part| part.number).collect::<Vec<_>>(), [1, 3]);
    let sum = of_bytes(&content);
    let whole = |parts: &[Part], when| store.complete("dir/big", &id, parts, sum, when);
    assert_eq!(errno(whole(&parts, When::Always)), Some(libc::EINVAL), "one is missing");
    put_part(&store, 1);
    let parts = store.parts("dir/big", &id).unwrap();
    assert_eq!(parts.iter().map(|part| part.size_bytes).sum::<u64>(), content.len() as u64);

    put(&store, "dir/big", b"in the way", When::Always).unwrap();
    assert!(is_condition_failed(&whole(&parts, When::Absent).unwrap_err()));
    store.delete("dir/big").unwrap();
    let etag = whole(&parts, When::Absent).unwrap();
    let object = store.head("dir/big").unwrap().unwrap();
    assert_eq!((&object.etag, object.size_bytes, object.crc64nvme), (&etag, content.len() as u64, Some(sum)));
    assert_eq!(object.words, Some(said));
    assert!(get(&store, "dir/big", 0..content.len() as u64) == content);
    assert_eq!(get(&store, "dir/big", PART as u64 - 3..PART as u64 + 3), content[PART - 3..PART + 3]);
    assert_eq!(store.parts("dir/big", &id).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(whole(&parts, When::Always).unwrap_err().kind(), ErrorKind::NotFound);

    // Parts made of what the server has.
    let id = store.begin("joined", &Words::new()).unwrap();
    let first = store.part_of("joined", &id, 1, "dir/big", 5..5 + PART as u64, &etag).unwrap();
    let tail = pattern(100, 4);
    let second = store.part("joined", &id, 2, &tail.as_slice(), of_bytes(&tail)).unwrap();
    let wrong = store.part_of("joined", &id, 3, "dir/big", 0..5, WRONG).unwrap_err();
    assert!(is_condition_failed(&wrong), "{wrong:?}");
    let joined = [&content[5..5 + PART], &tail].concat();
    store.complete("joined", &id, &[first, second], of_bytes(&joined), When::Always).unwrap();
    assert!(get(&store, "joined", 0..joined.len() as u64) == joined);

    let id = store.begin("given-up", &Words::new()).unwrap();
    store.part("given-up", &id, 1, &tail.as_slice(), of_bytes(&tail)).unwrap();
    for key in keys(&server).iter().filter(|key| key.contains(&id)) {
        assert_ne!(server.cli(&["TTL", key]), "-1", "it stays indefinitely: {key}");
    }
    store.abort("given-up", &id).unwrap();
    store.abort("given-up", &id).unwrap();
    assert_eq!(store.uploads("").unwrap(), []);
    assert_eq!(errno(store.part("given-up", &id, 2, &tail.as_slice(), of_bytes(&tail))), Some(libc::ENOENT));
    assert!(keys(&server).iter().all(|key| !key.contains(&id)), "{:?}", keys(&server));
}
