//! The S3 driver on a real server: every method of the interface, and a server that becomes unavailable.

#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::time::Duration;

use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Body, Objects, When, Words, is_condition_failed};
use surgetank_store::s3::{Kind, Payload, Place, S3};
use surgetank_testkit::servers::s3::S3Server;

const MIB: usize = 1 << 20;

fn place(server: &S3Server, prefix: &str) -> Place {
    let mut place = Place::parse(&server.url(prefix)).unwrap();
    place.credentials_file = Some(server.credentials_file());
    place
}

fn open(server: &S3Server, prefix: &str) -> S3 {
    S3::open(place(server, prefix)).unwrap_or_else(|why| panic!("{why}"))
}

fn words(pairs: &[(&str, &str)]) -> Words {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn put(store: &S3, key: &str, content: &[u8], when: When<'_>) -> std::io::Result<String> {
    store.put(key, &content, of_bytes(content), &Words::new(), when)
}

fn get(store: &S3, key: &str, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut content = Vec::new();
    store.get(key, range, None).unwrap().read_to_end(&mut content).unwrap();
    content
}

/// Bytes that depend on their offset.
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

#[test]
fn probe_finds_abilities_and_leaves_nothing() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "a/b");
    let able = store.abilities();
    assert!(able.if_absent && able.if_same && able.checksums && able.copies && able.uploads_in_parts, "{able:?}");
    assert_eq!(store.describe(), "s3://bucket/a/b");
    assert_eq!(able.key_bytes_max, 1024 - "a/b/".len());
    let whole = open(&server, "");
    assert_eq!(whole.list("", false, None).unwrap().objects, []);
    assert_eq!(whole.uploads("").unwrap(), []);
    let asked = store.counters().requests();
    store.abilities();
    assert_eq!(store.counters().requests(), asked, "asked again");
}

#[test]
fn put_object_reads_back() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "p");
    assert_eq!(store.head("x").unwrap(), None);
    let content = pattern(300_000, 1);
    let said = words(&[("mtime", "1700000000.123456789"), ("mode", "0644"), ("odd", "a=b; c \"d\"")]);
    let etag = store.put("dir/x", &content.as_slice(), of_bytes(&content), &said, When::Always).unwrap();
    let object = store.head("dir/x").unwrap().unwrap();
    assert_eq!((object.key.as_str(), object.size_bytes, &object.etag), ("dir/x", 300_000, &etag));
    assert_eq!((object.words, object.crc64nvme), (Some(said), Some(of_bytes(&content))));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as i64;
    assert!((now - object.modified_nanos).abs() < 3_600_000_000_000, "{}", object.modified_nanos);

    assert_eq!(get(&store, "dir/x", 0..300_000), content);
    assert_eq!(get(&store, "dir/x", 70_000..70_001), content[70_000..70_001]);
    assert_eq!(get(&store, "dir/x", 299_990..300_000), content[299_990..]);
    let mut wrong = store.get("dir/x", 0..10, Some("0123456789abcdef0123456789abcdef")).err().unwrap();
    assert!(is_condition_failed(&wrong), "{wrong:?}");
    wrong = store.get("dir/y", 0..10, None).err().unwrap();
    assert_eq!(wrong.kind(), ErrorKind::NotFound);

    put(&store, "empty", b"", When::Always).unwrap();
    assert_eq!(store.head("empty").unwrap().unwrap().size_bytes, 0);
    store.delete("dir/x").unwrap();
    store.delete("dir/x").unwrap();
    assert_eq!(store.head("dir/x").unwrap(), None);
}

#[test]
fn keys_with_special_characters_read_back() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "o dd+");
    let long = format!("{}{}", "long/".repeat(180), "z".repeat(95));
    assert!(long.len() + "o dd+/".len() > 1000);
    let names = [
        "a b",
        "a+b",
        "a%41",
        "a%20b",
        "a&<>b",
        "a'\"b",
        "a?b",
        "a#b",
        "a=b",
        "ä€𝄞",
        "a;b,c",
        "~tilde",
        "a*b(c)!",
        "a\\b",
        "a|b^c`d{e}[f]",
        "ends.",
        ".begins",
        "d/e f/+g",
        "a@b:c$",
        " before",
        "behind ",
        "two  spaces",
        "line\nbreak",
        "tab\there",
        &long,
    ];
    for name in names {
        let said = words(&[("name", "x")]);
        store
            .put(name, &name.as_bytes(), of_bytes(name.as_bytes()), &said, When::Absent)
            .unwrap_or_else(|why| panic!("{name}: {why}"));
    }
    let listed = all(&store, "", false).0;
    assert_eq!(listed, names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>());
    for name in names {
        assert_eq!(get(&store, name, 0..name.len() as u64), name.as_bytes(), "{name}");
        assert_eq!(store.head(name).unwrap().unwrap().key, name);
        let copied = format!("copies/{name}");
        if copied.len() < 1000 {
            store.copy(name, None, &copied, None).unwrap_or_else(|why| panic!("{name}: {why}"));
            assert_eq!(get(&store, &copied, 0..name.len() as u64), name.as_bytes(), "{name}");
            store.delete(&copied).unwrap();
        }
        store.delete(name).unwrap();
        assert_eq!(store.head(name).unwrap(), None, "{name}");
    }
    assert_eq!(all(&store, "", false).0, BTreeSet::new());
}

/// Keys and prefixes of all pages, each of them once and in order.
fn all(store: &S3, prefix: &str, delimited: bool) -> (BTreeSet<String>, BTreeSet<String>) {
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
    assert!(keys.is_sorted() && prefixes.is_sorted(), "not in the order of their bytes");
    let (count, sets) = (keys.len() + prefixes.len(), (BTreeSet::from_iter(keys), BTreeSet::from_iter(prefixes)));
    assert_eq!(count, sets.0.len() + sets.1.len(), "something is listed twice");
    sets
}

#[test]
fn long_listing_has_pages() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "many");
    // Written without the driver, which is faster: the server lists plain files too.
    let directory = server.files().join("many");
    let mut expected = BTreeSet::new();
    for nth in 0..2_345 {
        let name = format!("in/file {nth:05}+x");
        std::fs::create_dir_all(directory.join("in")).unwrap();
        std::fs::write(directory.join(&name), "x").unwrap();
        expected.insert(name);
    }
    for name in ["in/sub/a", "in/sub/b", "in/sub2/c", "other"] {
        put(&store, name, b"yy", When::Always).unwrap();
        expected.insert(name.to_owned());
    }
    let before = store.counters().of(Kind::List);
    assert_eq!(all(&store, "", false).0, expected);
    assert_eq!(store.counters().of(Kind::List) - before, 3);
    let (keys, prefixes) = all(&store, "", true);
    assert_eq!((keys.len(), prefixes), (1, BTreeSet::from(["in/".to_owned()])));
    let (keys, prefixes) = all(&store, "in/", true);
    assert_eq!(keys.len(), 2_345);
    assert_eq!(prefixes, BTreeSet::from(["in/sub/".to_owned(), "in/sub2/".to_owned()]));
    assert_eq!(all(&store, "in/su", true).1.len(), 2);
    assert_eq!(all(&store, "in/sub/", false).0.len(), 2);
    assert_eq!(all(&store, "nothing/", false), (BTreeSet::new(), BTreeSet::new()));
    let page = store.list_behind("in/", "in/file 02340+x").unwrap().unwrap();
    let names: Vec<&str> = page.objects.iter().map(|object| &*object.key).collect();
    assert_eq!(names[..2], ["in/file 02341+x", "in/file 02342+x"]);
    assert_eq!((names.len(), names[4], page.next), (7, "in/sub/a", None));
    assert_eq!(store.list_behind("in/", "in/").unwrap().unwrap().objects.len(), 1000);
    let page = store.list("in/sub/", false, None).unwrap();
    assert_eq!((page.objects[0].size_bytes, page.objects[0].words.as_ref()), (2, None));
    assert_eq!(Some(&page.objects[0].etag), store.head("in/sub/a").unwrap().map(|object| object.etag).as_ref());
}

#[test]
fn conditional_writes_succeed_or_fail() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "c");
    let first = put(&store, "k", b"one", When::Absent).unwrap();
    let large = pattern(3 * MIB, 2);
    for content in [b"two".as_slice(), &large] {
        assert!(is_condition_failed(&put(&store, "k", content, When::Absent).unwrap_err()));
        assert!(is_condition_failed(
            &put(&store, "k", content, When::Is("0123456789abcdef0123456789abcdef")).unwrap_err()
        ));
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
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "race");
    for round in 0..10 {
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
}

#[test]
fn body_with_wrong_checksum_is_refused() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "sum");
    let why = store.put("k", &b"content".as_slice(), 1, &Words::new(), When::Always).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    assert_eq!(store.head("k").unwrap(), None);
    let id = store.begin("k", &Words::new()).unwrap();
    let why = store.part("k", &id, 1, &b"content".as_slice(), 1).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    let part = store.part("k", &id, 1, &b"content".as_slice(), of_bytes(b"content")).unwrap();
    let why = store.complete("k", &id, std::slice::from_ref(&part), 1, When::Always).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::InvalidData, "{why:?}");
    assert_eq!(store.head("k").unwrap(), None);
    store.complete("k", &id, &[part], of_bytes(b"content"), When::Always).unwrap();
}

#[test]
fn copies_keep_words_or_get_new_ones() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "copy");
    let old = words(&[("a", "1"), ("b", "2")]);
    let etag = store.put("from", &b"content".as_slice(), of_bytes(b"content"), &old, When::Always).unwrap();
    store.copy("from", Some(&etag), "kept", None).unwrap();
    let new = words(&[("c", "3")]);
    store.copy("from", None, "replaced", Some(&new)).unwrap();
    store.copy("from", None, "none", Some(&Words::new())).unwrap();
    for (key, said) in [("kept", &old), ("replaced", &new), ("none", &Words::new())] {
        let object = store.head(key).unwrap().unwrap();
        assert_eq!((object.words.as_ref(), object.crc64nvme), (Some(said), Some(of_bytes(b"content"))), "{key}");
        assert_eq!(get(&store, key, 0..7), b"content");
    }
    // Onto itself: new words, the same content.
    store.copy("from", Some(&etag), "from", Some(&new)).unwrap();
    assert_eq!(store.head("from").unwrap().unwrap().words, Some(new));
    assert!(is_condition_failed(&store.copy("from", Some("0123456789abcdef0123456789abcdef"), "x", None).unwrap_err()));
    assert_eq!(store.copy("missing", None, "x", None).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.head("x").unwrap(), None);
}

#[test]
fn upload_in_parts_completes_and_aborts() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "parts");
    let content = pattern(11 * MIB + 5, 3);
    let said = words(&[("mode", "0600")]);
    let id = store.begin("dir/big", &said).unwrap();
    let piece = |nth: usize| &content[nth * 5 * MIB..content.len().min((nth + 1) * 5 * MIB)];
    let put_part =
        |store: &S3, nth: usize| store.part("dir/big", &id, nth as u32 + 1, &piece(nth), of_bytes(piece(nth))).unwrap();
    put_part(&store, 2);
    put_part(&store, 0);
    assert_eq!(store.head("dir/big").unwrap(), None);

    // Another process without any state continues.
    let store = open(&server, "parts");
    let uploads = store.uploads("dir/").unwrap();
    assert_eq!(uploads.len(), 1);
    assert_eq!((uploads[0].key.as_str(), uploads[0].id.as_str()), ("dir/big", id.as_str()));
    assert!(uploads[0].begun_nanos > 0);
    assert_eq!(store.uploads("other").unwrap(), []);
    let parts = store.parts("dir/big", &id).unwrap();
    assert_eq!(parts.iter().map(|part| part.number).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(parts[1].crc64nvme, Some(of_bytes(piece(2))));
    put_part(&store, 1);
    let parts = store.parts("dir/big", &id).unwrap();
    assert_eq!(parts.iter().map(|part| part.size_bytes).sum::<u64>(), content.len() as u64);

    put(&store, "dir/big", b"in the way", When::Always).unwrap();
    let sum = of_bytes(&content);
    assert!(is_condition_failed(&store.complete("dir/big", &id, &parts, sum, When::Absent).unwrap_err()));
    store.delete("dir/big").unwrap();
    let etag = store.complete("dir/big", &id, &parts, sum, When::Absent).unwrap();
    let object = store.head("dir/big").unwrap().unwrap();
    assert_eq!((&object.etag, object.size_bytes, object.crc64nvme), (&etag, content.len() as u64, Some(sum)));
    assert_eq!(object.words, Some(said));
    assert!(get(&store, "dir/big", 0..content.len() as u64) == content);
    assert_eq!(get(&store, "dir/big", 5 * MIB as u64 - 3..5 * MIB as u64 + 3), content[5 * MIB - 3..5 * MIB + 3]);
    assert_eq!(store.parts("dir/big", &id).unwrap_err().kind(), ErrorKind::NotFound);
    // A second completion: some servers report success, others that there is no such upload.
    match store.complete("dir/big", &id, &parts, sum, When::Always) {
        Ok(again) => assert_eq!(again, etag),
        Err(why) => assert_eq!(why.kind(), ErrorKind::NotFound),
    }

    // Parts made of what the server has.
    let whole = content.len() as u64;
    let id = store.begin("joined", &Words::new()).unwrap();
    let first = store.part_of("joined", &id, 1, "dir/big", 5..whole, &etag).unwrap();
    let tail = pattern(100, 4);
    let second = store.part("joined", &id, 2, &tail.as_slice(), of_bytes(&tail)).unwrap();
    assert_eq!(first.size_bytes, whole - 5);
    let wrong = store.part_of("joined", &id, 3, "dir/big", 0..5, "0123456789abcdef0123456789abcdef").unwrap_err();
    assert!(is_condition_failed(&wrong), "{wrong:?}");
    let joined = [&content[5..], &tail].concat();
    store.complete("joined", &id, &[first, second], of_bytes(&joined), When::Always).unwrap();
    assert!(get(&store, "joined", 0..joined.len() as u64) == joined);

    let id = store.begin("given-up", &Words::new()).unwrap();
    store.part("given-up", &id, 1, &tail.as_slice(), of_bytes(&tail)).unwrap();
    store.abort("given-up", &id).unwrap();
    store.abort("given-up", &id).unwrap();
    assert_eq!(store.uploads("").unwrap(), []);
    assert_eq!(store.parts("given-up", &id).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn requests_during_a_restart_of_the_server_succeed() {
    let Some(mut server) = S3Server::start() else { return };
    let mut place = place(&server, "back");
    // Long enough for the slowest machine: the test is about the result, not the time.
    (place.limits.tries, place.limits.all_tries) = (12, Duration::from_secs(60));
    let store = S3::open(place).unwrap();
    let content = pattern(40 * MIB, 5);
    put(&store, "k", &content, When::Always).unwrap();

    let mut reader = store.get("k", 0..content.len() as u64, None).unwrap();
    let mut read = vec![0; MIB];
    reader.read_exact(&mut read).unwrap();
    server.kill();
    std::thread::scope(|scope| {
        let rest = scope.spawn(|| {
            reader.read_to_end(&mut read).unwrap();
            drop(reader);
        });
        let written = scope.spawn(|| put(&store, "new", b"while it was away", When::Absent).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        server.restart();
        rest.join().unwrap();
        written.join().unwrap();
    });
    assert!(read == content);
    assert!(store.counters().tries_again > 0);
    assert_eq!(get(&store, "new", 0..17), b"while it was away");

    // The server dies while it receives a body.
    struct Killing<'a>(&'a [u8], std::sync::Mutex<Option<&'a mut S3Server>>);
    impl Body for Killing<'_> {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
            if offset > 8 * MIB as u64
                && let Some(server) = self.1.lock().unwrap().take()
            {
                server.restart();
            }
            self.0.read_at(buffer, offset)
        }
    }
    let before = store.counters().tries_again;
    let body = Killing(&content, Some(&mut server).into());
    store.put("interrupted", &body, of_bytes(&content), &Words::new(), When::Absent).unwrap();
    assert!(store.counters().tries_again > before);
    assert!(get(&store, "interrupted", 0..content.len() as u64) == content);
}

#[test]
fn unavailable_server_gives_error_of_the_socket() {
    let Some(mut server) = S3Server::start() else { return };
    let mut place = place(&server, "away");
    place.limits.pause = Duration::from_millis(1);
    let store = S3::open(place.clone()).unwrap();
    server.kill();
    assert_eq!(store.head("k").unwrap_err().raw_os_error(), Some(libc::ECONNREFUSED));
    let why = S3::open(place).unwrap_err().to_string();
    assert!(why.contains("refused") && why.contains("127.0.0.1"), "{why}");
}

#[test]
fn unreadable_body_gives_its_own_error() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "body");
    struct Broken;
    impl Body for Broken {
        fn len(&self) -> u64 {
            3 << 20
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
            buffer.fill(0);
            if offset > 1 << 20 { Err(ErrorKind::Interrupted.into()) } else { Ok(()) }
        }
    }
    let why = store.put("k", &Broken, 0, &Words::new(), When::Always).unwrap_err();
    assert_eq!(why.kind(), ErrorKind::Interrupted);
    assert_eq!(store.counters().tries_again, 0);
    assert_eq!(store.head("k").unwrap(), None);
    put(&store, "k", b"later", When::Absent).unwrap();
}

#[test]
fn wrong_or_missing_credentials_have_a_remedy() {
    let Some(server) = S3Server::start() else { return };
    let mut wrong = place(&server, "x");
    let file = server.files().join("credentials");
    std::fs::write(&file, "[default]\naws_access_key_id = surgetank-test\naws_secret_access_key = hunter2hunter2\n")
        .unwrap();
    wrong.credentials_file = Some(file.clone());
    let why = S3::open(wrong.clone()).unwrap_err();
    let told = format!("{why} {why:?}");
    assert!(told.contains("SignatureDoesNotMatch") && told.contains("credentials"), "{told}");
    let store = S3::new(wrong.clone()).unwrap();
    let error = store.head("k").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    let told = format!("{told} {error:?} {store:?} {:?}", store.trouble());
    assert!(!told.contains("hunter2"), "{told}");

    std::fs::write(&file, "[other]\n").unwrap();
    let why = S3::open(wrong).unwrap_err().to_string();
    assert!(why.contains("AWS_ACCESS_KEY_ID"), "{why}");

    // The answer has no code: the bucket's name may be the cause, or anything else.
    let mut strange = place(&server, "x");
    strange.bucket = "No_Such.Bucket".into();
    let why = S3::open(strange).unwrap_err().to_string();
    assert!(why.contains("bucket's name"), "{why}");

    let mut missing = place(&server, "x");
    missing.bucket = "no-such-bucket".into();
    let why = S3::open(missing).unwrap_err().to_string();
    assert!(why.contains("NoSuchBucket") && why.contains("make the bucket"), "{why}");
}

#[test]
fn server_without_trusted_certificate_is_refused() {
    let Some(server) = S3Server::start_tls() else { return };
    let mut place = place(&server, "tls");
    place.ca_bundle = Some(server.authority());
    let store = S3::open(place.clone()).unwrap_or_else(|why| panic!("{why}"));
    let content = pattern(3 * MIB, 7);
    put(&store, "k", &content, When::Absent).unwrap();
    let other = pattern(30 * MIB, 8);
    assert!(is_condition_failed(&put(&store, "k", &other, When::Absent).unwrap_err()));
    assert_eq!(store.counters().tries_again, 0, "a refusal is heard while we still send");
    assert!(get(&store, "k", 0..content.len() as u64) == content);

    place.ca_bundle = None;
    let why = S3::open(place.clone()).unwrap_err().to_string();
    assert!(why.contains("certificate") && why.contains("AWS_CA_BUNDLE"), "{why}");
    let store = S3::new(place).unwrap();
    assert_eq!(store.head("k").unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(store.counters().tries_again, 0, "it does not get better");
}

#[test]
fn signed_bodies_and_request_rate_work() {
    let Some(server) = S3Server::start() else { return };
    let mut place = place(&server, "signed");
    place.payload = Payload::Signed;
    place.requests_per_second = Some(1000);
    let store = S3::open(place).unwrap();
    let content = pattern(2 * MIB + 1, 6);
    put(&store, "k", &content, When::Absent).unwrap();
    assert!(get(&store, "k", 0..content.len() as u64) == content);
}

#[test]
fn concurrent_requests_use_few_connections_and_memory() {
    let Some(server) = S3Server::start() else { return };
    let store = open(&server, "threads");
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let store = &store;
            scope.spawn(move || {
                for nth in 0..25 {
                    let (key, content) = (format!("{thread}/{nth}"), pattern(10_000, thread * 100 + nth));
                    put(store, &key, &content, When::Absent).unwrap();
                    assert!(get(store, &key, 0..10_000) == content);
                }
            });
        }
    });
    assert_eq!(all(&store, "", false).0.len(), 200);
    let counts = store.counters();
    assert_eq!((counts.of(Kind::Get), counts.received_bytes), (200, 2_000_000));
    assert!(counts.sent_bytes >= 2_000_000);
}
