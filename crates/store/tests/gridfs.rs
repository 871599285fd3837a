//! The GridFS driver against a real server: the interface, strangers, and a server that goes away or does not let us in.

#![cfg(feature = "gridfs")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use surgetank_store::checksum::of_bytes;
use surgetank_store::gridfs::{GridFs, Place};
use surgetank_store::object::{Objects, Part, When, Words, is_condition_failed};
use surgetank_testkit::servers::mongo::{MongoServer, PASSWORD, USER};

const MIB: usize = 1 << 20;
const CHUNK: usize = 255 << 10;
const PART: usize = 64 * CHUNK;
const WRONG: &str = "0123456789abcdef";

fn place(server: &MongoServer, prefix: &str) -> Place {
    Place::parse(&server.url(prefix)).unwrap()
}

fn open(server: &MongoServer, prefix: &str) -> GridFs {
    GridFs::open(place(server, prefix)).unwrap_or_else(|why| panic!("{why}"))
}

fn words(pairs: &[(&str, &str)]) -> Words {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn put(store: &GridFs, key: &str, content: &[u8], when: When<'_>) -> std::io::Result<String> {
    store.put(key, &content, of_bytes(content), &Words::new(), when)
}

fn get(store: &GridFs, key: &str, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut content = Vec::new();
    store.get(key, range, None).unwrap().read_to_end(&mut content).unwrap();
    content
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|why| why.raw_os_error())
}

/// Bytes that differ from place to place.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state >> 11).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Keys and prefixes of all pages, each of them once and in order.
fn all(store: &GridFs, prefix: &str, delimited: bool) -> (Vec<String>, Vec<String>) {
    let (mut keys, mut prefixes, mut from) = (Vec::new(), Vec::new(), None);
    loop {
        let page = store.list(prefix, delimited, from.as_deref()).unwrap();
        keys.extend(page.objects.into_iter().map(|object| object.key));
        prefixes.extend(page.prefixes);
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    let sorted = |names: &[String]| names.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(sorted(&keys) && sorted(&prefixes), "out of order, or twice");
    (keys, prefixes)
}

#[test]
fn put_file_is_read_by_a_mongodb_client() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "p/");
    assert_eq!(store.describe(), format!("mongodb://127.0.0.1:{}/db?bucket=b&prefix=p/", server.port()));
    assert_eq!(store.head("x").unwrap(), None);
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * MIB] {
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
        assert!(server.client_get("p/dir/x") == content, "their client gets other bytes");
        assert_eq!(server.client(&["count", "chunks"]), size.div_ceil(CHUNK).to_string(), "the last version's stay");
    }
    let wrong = store.get("dir/x", 0..10, Some(WRONG)).err().unwrap();
    assert!(is_condition_failed(&wrong), "{wrong:?}");
    // A version is read to its end or not at all.
    let etag = store.head("dir/x").unwrap().unwrap().etag;
    let mut reader = store.get("dir/x", 0..9 * MIB as u64, Some(&etag)).unwrap();
    put(&store, "dir/x", b"another one", When::Is(&etag)).unwrap();
    assert!(is_condition_failed(&reader.read_to_end(&mut Vec::new()).unwrap_err()));
    assert_eq!(errno(store.get("dir/y", 0..10, None)), Some(libc::ENOENT));
    store.delete("dir/x").unwrap();
    store.delete("dir/x").unwrap();
    assert_eq!(store.head("dir/x").unwrap(), None);
    for collection in ["files", "chunks", "surgetank.locks"] {
        assert_eq!(server.client(&["count", collection]), "0", "{collection}");
    }
}

#[test]
fn conditions_hold_or_fail() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "c/");
    let first = put(&store, "k", b"one", When::Absent).unwrap();
    assert!(is_condition_failed(&put(&store, "k", b"two", When::Absent).unwrap_err()));
    assert!(is_condition_failed(&put(&store, "k", b"two", When::Is(WRONG)).unwrap_err()));
    assert!(is_condition_failed(&put(&store, "gone", b"two", When::Is(&first)).unwrap_err()));
    assert_eq!(server.client(&["count", "chunks"]), "1", "what did not come about stays");
    let second = put(&store, "k", b"two", When::Is(&first)).unwrap();
    assert!(is_condition_failed(&put(&store, "k", b"three", When::Is(&first)).unwrap_err()));
    assert_eq!((get(&store, "k", 0..3), store.counters().tries_again), (b"two".to_vec(), 0), "a refusal is an answer");
    // What strangers put is another version, however long, and goes with ours.
    server.client_put("c/k", b"222");
    assert!(is_condition_failed(&put(&store, "k", b"three", When::Is(&second)).unwrap_err()));
    let theirs = store.head("k").unwrap().unwrap();
    assert_eq!((theirs.size_bytes, theirs.words), (3, Some(Words::new())));
    put(&store, "k", b"three", When::Is(&theirs.etag)).unwrap();
    assert_eq!(server.client(&["list"]), "c/k 5 ['surgetank']");
    // Whose clock is ahead is followed all the same: a kill may leave both, and the younger counts.
    server.client(&["delete", "c/k"]);
    server.client_put("c/k", b"4444");
    server.client(&["tomorrow", "c/k"]);
    let theirs = store.head("k").unwrap().unwrap();
    put(&store, "k", b"three", When::Is(&theirs.etag)).unwrap();
    assert!(store.head("k").unwrap().unwrap().modified_nanos > theirs.modified_nanos);
    // Other words are another version; what strangers said beside them stays.
    server.client_put("c/t", b"theirs");
    let theirs = store.head("t").unwrap().unwrap();
    let said = words(&[("mode", "0600")]);
    let etag = store.copy("t", Some(&theirs.etag), "t", Some(&said)).unwrap();
    assert_eq!(server.client(&["list"]), "c/k 5 ['surgetank']\nc/t 6 ['surgetank', 'theirs']");
    let object = store.head("t").unwrap().unwrap();
    assert_eq!((&object.etag, object.words), (&etag, Some(said)));
    assert!(is_condition_failed(&store.copy("t", Some(&theirs.etag), "t", Some(&Words::new())).unwrap_err()));
}

#[test]
fn one_of_many_conditional_writers_succeeds() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "race/");
    for round in 0..5 {
        let key = format!("k{round}");
        let won = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|nth| {
                    let (store, key) = (&store, &key);
                    scope.spawn(move || match put(store, key, format!("writer {nth}").as_bytes(), When::Absent) {
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
    assert_eq!(server.client(&["count", "files"]), "5");
    assert_eq!(server.client(&["count", "chunks"]), "5");
}

#[test]
fn lock_of_a_dead_client_expires() {
    let Some(server) = MongoServer::start() else { return };
    let waiting = |hold| {
        let mut place = place(&server, "");
        place.limits.hold = hold;
        GridFs::open(place).unwrap()
    };
    server.client(&["lock", "k"]);
    // One name, and no other: this would wait for an hour.
    put(&waiting(Duration::from_secs(3600)), "other", b"x", When::Absent).unwrap();
    let begun = Instant::now();
    put(&waiting(Duration::from_secs(2)), "k", b"x", When::Absent).unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(2), "it was not waited for");
    assert_eq!(server.client(&["count", "surgetank.locks"]), "0");
}

#[test]
fn thousands_of_files_are_listed_in_pages_and_stepped_over() {
    let Some(server) = MongoServer::start() else { return };
    server.client(&["fill", "p/in/", "12000"]);
    server.client(&["fill", "q/", "20"]);
    let store = open(&server, "p/");
    put(&store, "top", b"x", When::Absent).unwrap();
    put(&store, "in/3", b"a file beside a directory", When::Absent).unwrap();
    put(&store, "in/3-", b"before the slash", When::Absent).unwrap();
    for _ in 0..2 {
        server.client_put("p/in/30", b"two versions");
    }
    assert_eq!(all(&store, "", true), (vec!["top".into()], vec!["in/".into()]));
    let before = store.counters().requests;
    let (keys, prefixes) = all(&store, "in/", true);
    assert_eq!((keys, prefixes.len()), (vec!["in/3".into(), "in/3-".into(), "in/30".into()], 10));
    assert!(store.counters().requests - before <= 11, "12,000 keys are stepped over");
    assert_eq!(all(&store, "in/7/", true).0.len(), 1200);
    assert_eq!(all(&store, "", false).0.len(), 12_004);
    assert_eq!(all(&store, "nothing/", false), (Vec::new(), Vec::new()));
    let page = store.list_behind("in/", "in/9/11989").unwrap().unwrap();
    assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["in/9/11999"]);
}

#[test]
fn copies_keep_words_or_have_others() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "copy/");
    let old = words(&[("a", "1"), ("b", "2")]);
    let content = pattern(5 * MIB, 9);
    let etag = store.put("from", &content.as_slice(), of_bytes(&content), &old, When::Always).unwrap();
    store.copy("from", Some(&etag), "kept", None).unwrap();
    let new = words(&[("c", "3")]);
    assert_ne!(store.copy("from", None, "replaced", Some(&new)).unwrap(), etag, "another version");
    for (key, said) in [("kept", &old), ("replaced", &new)] {
        let object = store.head(key).unwrap().unwrap();
        assert_eq!((object.words.as_ref(), object.crc64nvme), (Some(said), Some(of_bytes(&content))), "{key}");
        assert!(get(&store, key, 0..content.len() as u64) == content);
    }
    assert!(is_condition_failed(&store.copy("from", Some(WRONG), "x", None).unwrap_err()));
    assert_eq!(store.copy("missing", None, "x", None).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.head("x").unwrap(), None);
}

#[test]
fn upload_in_parts_completes_or_leaves_nothing() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "parts/");
    let content = pattern(PART + 5, 3);
    let said = words(&[("mode", "0600")]);
    let id = store.begin("dir/big", &said).unwrap();
    let piece = |nth: usize| &content[nth * PART..content.len().min((nth + 1) * PART)];
    let put_part = |store: &GridFs, nth: usize| {
        store.part("dir/big", &id, nth as u32 + 1, &piece(nth), of_bytes(piece(nth))).unwrap()
    };
    put_part(&store, 1);
    assert_eq!((store.head("dir/big").unwrap(), all(&store, "", false).0), (None, Vec::new()));
    assert_eq!(server.client(&["list"]), "", "their client sees nothing of it");

    // Another process that knows nothing goes on.
    let store = open(&server, "parts/");
    let uploads = store.uploads("dir/").unwrap();
    assert_eq!(uploads.iter().map(|one| (&one.key, &one.id)).collect::<Vec<_>>(), [(&"dir/big".to_owned(), &id)]);
    assert_eq!(store.uploads("other").unwrap(), []);
    let parts = store.parts("dir/big", &id).unwrap();
    assert_eq!(parts.iter().map(|part| part.number).collect::<Vec<_>>(), [2]);
    let sum = of_bytes(&content);
    let whole = |parts: &[Part], when| store.complete("dir/big", &id, parts, sum, when);
    assert_eq!(errno(whole(&parts, When::Always)), Some(libc::EINVAL), "one is missing");
    // Sent once with other bytes: the last ones count.
    let other = pattern(PART, 8);
    store.part("dir/big", &id, 1, &other.as_slice(), of_bytes(&other)).unwrap();
    put_part(&store, 0);
    let why = store.part("dir/big", &id, 1, &piece(0), 1).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    put_part(&store, 0);
    let parts = store.parts("dir/big", &id).unwrap();
    put(&store, "dir/big", b"in the way", When::Always).unwrap();
    assert!(is_condition_failed(&whole(&parts, When::Absent).unwrap_err()));
    store.delete("dir/big").unwrap();
    let etag = whole(&parts, When::Absent).unwrap();
    let object = store.head("dir/big").unwrap().unwrap();
    assert_eq!((&object.etag, object.size_bytes, object.crc64nvme), (&etag, content.len() as u64, Some(sum)));
    assert_eq!(object.words, Some(said));
    assert!(get(&store, "dir/big", 0..content.len() as u64) == content);
    assert_eq!(whole(&parts, When::Always).unwrap_err().kind(), ErrorKind::NotFound);
    // Given up when it is a file already (an answer was lost): it stays one.
    store.abort("dir/big", &id).unwrap();
    assert_eq!(get(&store, "dir/big", PART as u64..PART as u64 + 5), content[PART..]);
    store.delete("dir/big").unwrap();

    // An agent that was killed between two requests left chunks, and no word of them; a stranger just begins.
    put(&store, "killed", b"in the middle", When::Absent).unwrap();
    put(&store, "lives", b"on", When::Absent).unwrap();
    server.client(&["retire", "parts/killed", "100000"]);
    server.client_put("parts/theirs", b"x");
    server.client(&["retire", "parts/theirs", "100000"]);
    let orphans = store.uploads("").unwrap();
    assert_eq!(orphans.len(), 1, "{orphans:?}");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as i64;
    assert!(now - orphans[0].begun_nanos > 90_000_000_000_000, "{orphans:?}");
    store.abort(&orphans[0].key, &orphans[0].id).unwrap();
    assert_eq!(store.uploads("").unwrap(), []);
    assert_eq!(server.client(&["count", "chunks"]), "2", "of what lives, and the stranger's");
    assert_eq!(get(&store, "lives", 0..2), b"on");
    for collection in ["surgetank.uploads", "surgetank.parts", "surgetank.locks"] {
        assert_eq!(server.client(&["count", collection]), "0", "{collection}");
    }
}

#[test]
fn wrong_checksum_is_refused() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server, "");
    let why = store.put("k", &b"content".as_slice(), 1, &Words::new(), When::Always).unwrap_err();
    assert_eq!((why.kind(), store.head("k").unwrap()), (ErrorKind::InvalidData, None), "{why:?}");
    assert_eq!(server.client(&["count", "chunks"]), "0");
}

/// Between us and the server: once, one bit of a long message is another.
fn unreliable_link(to: u16) -> (u16, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, broken) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&broken);
    std::thread::spawn(move || {
        for ours in listener.incoming() {
            let (mut ours, broken) = (ours.unwrap(), Arc::clone(&broken));
            let mut server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            let (mut back_from, mut back_to) = (server.try_clone().unwrap(), ours.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Both);
            });
            std::thread::spawn(move || {
                let (mut buffer, mut passed) = (vec![0; 65_536], 0);
                while let Ok(count @ 1..) = ours.read(&mut buffer) {
                    passed += count;
                    if passed > 200_000 && !broken.swap(true, Ordering::SeqCst) {
                        buffer[count / 2] ^= 4;
                    }
                    if server.write_all(&buffer[..count]).is_err() {
                        break;
                    }
                }
                let _ = server.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (port, told)
}

#[test]
fn bit_lost_in_transit_is_refused_by_the_server() {
    let Some(server) = MongoServer::start() else { return };
    let (port, broken) = unreliable_link(server.port());
    let mut place = place(&server, "");
    place.port = port;
    let store = GridFs::open(place).unwrap();
    let content = pattern(MIB, 6);
    put(&store, "k", &content, When::Absent).unwrap();
    assert!(broken.load(Ordering::SeqCst) && store.counters().tries_again > 0, "{:?}", store.counters());
    assert!(server.client_get("k") == content);
}

#[test]
fn acknowledged_file_survives_a_server_kill() {
    let Some(mut server) = MongoServer::start() else { return };
    let mut place = place(&server, "k/");
    // Long enough for the slowest machine: the test is of what happens, not of when.
    (place.limits.tries, place.limits.all_tries) = (40, Duration::from_secs(60));
    let store = GridFs::open(place).unwrap();
    let content = pattern(6 * MIB, 5);
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
                    for nth in 0..25 {
                        let key = format!("{thread}/{nth}");
                        // An answer that is lost must not look like an earlier write of another client.
                        written.push((put(store, &key, key.as_bytes(), When::Absent).unwrap(), key));
                    }
                    written
                })
            })
            .collect();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(150));
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
    assert_eq!(all(&store, "", false).0.len(), 101);
    assert_eq!(server.client(&["count", "files"]), "101", "nothing is there twice");
}

#[test]
fn unreachable_server_gives_a_socket_error() {
    let Some(mut server) = MongoServer::start() else { return };
    let mut place = place(&server, "away");
    place.limits.pause = Duration::from_millis(1);
    let store = GridFs::open(place.clone()).unwrap();
    server.kill();
    assert_eq!(errno(store.head("k")), Some(libc::ECONNREFUSED));
    let why = GridFs::open(place).unwrap_err().to_string();
    assert!(why.contains("refused") && why.contains("127.0.0.1") && why.contains("port"), "{why}");
}

#[test]
fn login_succeeds_only_with_correct_credentials() {
    let Some(server) = MongoServer::start_guarded() else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    let try_with = |user: &str, password: &str| {
        std::fs::write(&file, format!("{password}\n")).unwrap();
        let file = file.display();
        let url = format!("mongodb://{user}127.0.0.1:{}/db?authSource=db&password_file={file}", server.port());
        let mut place = Place::parse(&url).unwrap();
        place.limits.tries = 1;
        GridFs::open(place)
    };
    let store = try_with(&format!("{USER}@"), PASSWORD).unwrap_or_else(|why| panic!("{why}"));
    let content = pattern(MIB, 2);
    put(&store, "k", &content, When::Always).unwrap();
    assert!(get(&store, "k", 0..content.len() as u64) == content);
    assert!(!format!("{store:?} {}", store.describe()).contains(PASSWORD));
    for (user, password) in [("ann@", "hunter2"), ("nobody@", PASSWORD), ("", PASSWORD), ("ann@", "höhle7")] {
        let why = try_with(user, password).unwrap_err();
        let told = format!("{why} {why:?}");
        assert!(told.contains("MONGODB_PASSWORD") || user.is_empty(), "{user}: {told}");
        assert!(!told.contains(password), "{told}");
    }
}

#[test]
fn server_without_a_trusted_certificate_is_refused() {
    let Some(server) = MongoServer::start_tls() else { return };
    let url = |more: &str| format!("mongodb://localhost:{}/db?tls=true{more}", server.port());
    let authority = format!("&tlsCAFile={}", server.authority().display());
    let store = GridFs::open(Place::parse(&url(&authority)).unwrap()).unwrap_or_else(|why| panic!("{why}"));
    let content = pattern(3 * MIB, 7);
    put(&store, "k", &content, When::Absent).unwrap();
    assert!(get(&store, "k", 0..content.len() as u64) == content);
    let why = GridFs::open(Place::parse(&url("")).unwrap()).unwrap_err().to_string();
    assert!(why.contains("certificate") && why.contains("tlsCAFile"), "{why}");
    let mut place = Place::parse(&url(&authority)).unwrap();
    (place.tls, place.limits.tries) = (false, 1);
    GridFs::open(place).unwrap_err();
}
