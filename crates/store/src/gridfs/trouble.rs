//! Regression tests: servers, other clients and moments that the driver was not made for.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use surgetank_testkit::servers::mongo::MongoServer;

use super::bson::{Document, Value, fields};
use super::scripted::{Does, Heard, Scripted, batch, refusal};
use super::server::{Kind, Sure};
use super::{GridFs, Place};
use crate::checksum::of_bytes;
use crate::conformance::noise;
use crate::object::{Objects, Page, When, Words, is_condition_failed};
use crate::verdict::errno_of;

fn open(server: &MongoServer) -> GridFs {
    GridFs::open(Place::parse(&server.url("")).unwrap()).unwrap()
}

fn before(server: &MongoServer, script: impl FnMut(&Heard) -> Does + Send + 'static) -> Scripted {
    Scripted::new(Some(server.port()), script)
}

fn put(store: &GridFs, key: &str, content: &[u8], when: When<'_>) -> std::io::Result<String> {
    let words = Words::from([("surgetank-id".to_owned(), format!("of {key}"))]);
    store.put(key, &content, of_bytes(content), &words, when)
}

fn get(store: &GridFs, key: &str) -> Vec<u8> {
    let size_bytes = store.head(key).unwrap().unwrap().size_bytes;
    let mut content = Vec::new();
    std::io::Read::read_to_end(&mut store.get(key, 0..size_bytes, None).unwrap(), &mut content).unwrap();
    content
}

fn errno<T>(result: std::io::Result<T>) -> i32 {
    errno_of(&result.err().expect("it must not work")).raw_os_error()
}

fn document(name: &str) -> Document {
    file_document(Value::from(name), Value::from(name))
}

fn file_document(id: Value, name: Value) -> Document {
    fields! { "_id": &id, "filename": &name, "length": 0, "chunkSize": 261_120, "uploadDate": Value::Date(1_700_000_000_000) }
}

/// As another client does.
fn insert(store: &GridFs, kind: Kind, documents: Vec<Document>) {
    store.0.insert(kind, documents, Sure::Durable).unwrap();
}

fn index(store: &GridFs, collection: &str, key: Document, name: &str, unique: bool) {
    let index = fields! { "key": key, "name": name, "unique": unique };
    let create = fields! { "createIndexes": collection, "indexes": vec![index.into()], "$db": "db" };
    store.0.wire.ask(&create.into()).unwrap();
}

fn count(store: &GridFs, kind: Kind) -> usize {
    store.0.find(kind, Document::default(), None, None).unwrap().len()
}

fn keys(page: &Page) -> Vec<&str> {
    page.objects.iter().map(|object| object.key.as_str()).collect()
}

// ---- publishing

#[test]
fn unique_index_on_names_destroys_no_file() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    put(&store, "f", b"precious", When::Always).unwrap();
    index(&store, "b.files", fields! { "filename": 1 }, "strange", true);
    let why = put(&store, "f", b"new", When::Always).unwrap_err();
    assert!(why.to_string().contains("11000"), "the server's own message: {why}");
    assert_eq!(get(&store, "f"), b"precious");
    assert_eq!((count(&store, Kind::Files), count(&store, Kind::Chunks)), (1, 1), "and nothing of the new file stays");
    put(&store, "g", b"another name", When::Absent).unwrap();
}

#[test]
fn unreplicated_duplicate_is_not_reported_as_durable() {
    let Some(server) = MongoServer::start() else { return };
    let nth = Arc::new(AtomicU32::new(0));
    let asked = Arc::clone(&nth);
    let not_kept = || {
        let why = fields! { "code": 91, "errmsg": "not replicated" };
        refusal(11000, "E11000 duplicate key").with("writeConcernError", why)
    };
    let scripted = before(&server, move |heard| match heard.is("insert", "files") {
        true if asked.fetch_add(1, Ordering::SeqCst) == 0 => Does::CutAfter,
        true if asked.load(Ordering::SeqCst) == 2 => Does::Say(not_kept()),
        _ => Does::Pass,
    });
    put(&scripted.store(), "f", b"once", When::Absent).unwrap();
    let confirmed = scripted.heard("update", "files");
    assert_eq!((nth.load(Ordering::SeqCst), confirmed.len()), (3, 1));
    let sure = confirmed[0].body.document("writeConcern");
    assert_eq!(sure, Some(&fields! { "w": "majority", "j": true }));

    // If it stays so, nothing is durable.
    let scripted = before(&server, move |heard| match heard.is("insert", "files") {
        true => Does::Say(not_kept()),
        _ => Does::Pass,
    });
    put(&scripted.store(), "g", b"never", When::Absent).unwrap_err();
}

#[test]
fn repeated_publication_removes_the_old_version() {
    let Some(server) = MongoServer::start() else { return };
    let cuts = Arc::new(AtomicU32::new(0));
    let left = Arc::clone(&cuts);
    let scripted = before(&server, move |heard| {
        let is = heard.is("delete", "files") && left.load(Ordering::SeqCst) > 0;
        if is && left.fetch_sub(1, Ordering::SeqCst) > 0 { Does::Cut } else { Does::Pass }
    });
    let store = scripted.store();
    let first = put(&store, "f", b"one", When::Absent).unwrap();
    cuts.store(3, Ordering::SeqCst);
    put(&store, "f", b"two", When::Is(&first)).unwrap_err();
    let etag = put(&store, "f", b"two", When::Is(&first)).unwrap();
    assert_eq!((store.head("f").unwrap().unwrap().etag, get(&store, "f")), (etag.clone(), b"two".to_vec()));
    assert_eq!((count(&store, Kind::Files), count(&store, Kind::Chunks)), (1, 1));
    // An upload in parts.
    let id = store.begin("f", &Words::new()).unwrap();
    let part = store.part("f", &id, 1, &&b"three"[..], of_bytes(b"three")).unwrap();
    cuts.store(3, Ordering::SeqCst);
    let complete = || store.complete("f", &id, std::slice::from_ref(&part), of_bytes(b"three"), When::Is(&etag));
    complete().unwrap_err();
    complete().unwrap();
    assert_eq!((count(&store, Kind::Files), count(&store, Kind::Chunks), get(&store, "f")), (1, 1, b"three".to_vec()));
}

#[test]
fn publication_stops_when_half_the_lock_time_is_used() {
    let Some(server) = MongoServer::start() else { return };
    let is_cut = Arc::new(AtomicU32::new(0));
    let cut = Arc::clone(&is_cut);
    let scripted = before(&server, move |heard| {
        if heard.is("insert", "files") {
            cut.store(1, Ordering::SeqCst);
            return Does::Cut;
        }
        if heard.name == "hello" && cut.load(Ordering::SeqCst) == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        Does::Pass
    });
    let mut place = scripted.place();
    place.limits.hold = Duration::from_secs(5);
    assert_eq!(errno(put(&GridFs::new(place).unwrap(), "f", b"late", When::Always)), libc::EAGAIN);
    assert_eq!(scripted.heard("insert", "files").len(), 1, "another agent may hold the lock");
}

#[test]
fn older_version_written_after_the_lock_time_is_a_conflict() {
    let Some(server) = MongoServer::start() else { return };
    let mut theirs = Place::parse(&server.url("")).unwrap();
    theirs.limits.hold = Duration::from_secs(1);
    let theirs = GridFs::new(theirs).unwrap();
    let other = theirs.clone();
    let scripted = before(&server, move |heard| {
        if heard.is("insert", "files") {
            // (The server delays the insert.) Meanwhile the other client waits for the lock, and takes it.
            put(&other, "f", b"theirs", When::Absent).unwrap();
        }
        Does::Pass
    });
    let mut place = scripted.place();
    place.limits.hold = Duration::from_secs(1);
    let why = put(&GridFs::new(place).unwrap(), "f", b"ours", When::Absent).unwrap_err();
    assert!(is_condition_failed(&why), "{why}");
    assert_eq!(get(&theirs, "f"), b"theirs");
    assert_eq!((count(&theirs, Kind::Files), count(&theirs, Kind::Chunks)), (1, 1));
}

#[test]
fn full_server_keeps_no_chunks_of_a_refused_file() {
    let Some(server) = MongoServer::start() else { return };
    let nth = AtomicU32::new(0);
    let scripted = before(&server, move |heard| match heard.is("insert", "chunks") {
        true if nth.fetch_add(1, Ordering::SeqCst) == 1 => {
            Does::Say(refusal(14031, "available disk space of 500 bytes"))
        }
        _ => Does::Pass,
    });
    let store = scripted.store();
    assert_eq!(errno(put(&store, "f", &noise(9 << 20), When::Always)), libc::ENOSPC);
    assert_eq!(count(&store, Kind::Chunks), 0);
}

#[test]
fn lock_without_a_holder_expires() {
    let Some(server) = MongoServer::start() else { return };
    let mut place = Place::parse(&server.url("")).unwrap();
    place.limits.hold = Duration::from_secs(1);
    let store = GridFs::new(place).unwrap();
    insert(&store, Kind::Locks, vec![fields! { "_id": "f" }]);
    put(&store, "f", b"x", When::Absent).unwrap();
    assert_eq!(count(&store, Kind::Locks), 0);
}

#[test]
fn lock_that_cannot_be_taken_ends_in_an_error() {
    let scripted = Scripted::new(None, |heard| match (heard.name.as_str(), heard.collection.as_str()) {
        ("insert", "surgetank.locks") => Does::Say(refusal(11000, "E11000 an index on something else")),
        ("find", _) => batch(true, 0, Vec::new()),
        ("insert", "chunks") | ("createIndexes" | "delete", _) => Does::Say(fields! { "ok": 1, "n": 1 }),
        _ => Does::Pass,
    });
    let mut place = scripted.place();
    place.limits.hold = Duration::from_millis(20);
    assert_eq!(errno(put(&GridFs::new(place).unwrap(), "f", b"x", When::Absent)), libc::EAGAIN);
}

#[test]
fn standard_index_under_another_name_is_accepted() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    index(&store, "b.files", fields! { "filename": 1, "uploadDate": 1 }, "mine", false);
    index(&store, "b.chunks", fields! { "files_id": 1, "n": 1 }, "mine", true);
    put(&store, "f", b"x", When::Absent).unwrap();
}

#[test]
fn conflicting_index_is_named() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    index(&store, "b.chunks", fields! { "other": 1 }, "files_id_1_n_1", false);
    let why = put(&store, "f", b"x", When::Absent).unwrap_err();
    assert!(why.to_string().contains("files_id_1_n_1"), "{why}");
}

// ---- listings

/// Answers listings like a server that has these names, in their order.
fn shelf(names: Vec<Value>) -> Scripted {
    let key = |name: &Value| match name {
        Value::Array(values) => values[0].bytes()[5..].to_vec(),
        other => other.bytes()[5..].to_vec(),
    };
    Scripted::new(None, move |heard| {
        if !heard.is("find", "files") {
            return Does::Pass;
        }
        let range = heard.body.document("filter").and_then(|filter| filter.document("filename"));
        let Some((how, from)) = range.map(|range| range.0[0].clone()) else { return batch(true, 0, Vec::new()) };
        let number = |name: &str| heard.body.number(name).unwrap_or(0) as usize;
        let found = names.iter().filter(|name| key(name) > key(&from) || how == "$gte" && key(name) == key(&from));
        let found = found.skip(number("skip")).take(number("limit"));
        batch(true, 0, found.map(|name| file_document(7.into(), name.clone())).collect())
    })
}

fn raw(name: &[u8]) -> Value {
    let length = (name.len() as i32 + 1).to_le_bytes();
    Value::Other(2, [&length[..], name, b"\0"].concat())
}

#[test]
fn name_that_is_not_text_does_not_end_a_listing() {
    let list = Value::Array(vec!["d/mm".into(), "q".into()]);
    let scripted = shelf(vec!["d/aa".into(), list.clone(), raw(b"d/n\xe9"), "d/zz".into(), "e".into()]);
    let page = scripted.store().list("d/", false, None).unwrap();
    assert_eq!((keys(&page), page.next.as_deref()), (vec!["d/aa", "d/zz"], None));

    let mut names = vec!["d/aa".into()];
    names.extend(vec![list; 2500]);
    names.extend(["d/zz".into(), "e".into()]);
    let page = shelf(names).store().list("d/", false, None).unwrap();
    assert_eq!((keys(&page), page.next.as_deref()), (vec!["d/aa", "d/zz"], None), "more than a page of them");
}

#[test]
fn files_without_a_valid_path_are_reported_as_hidden() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    insert(&store, Kind::Files, vec![document("d/aa"), document("d/zz")]);
    assert_eq!(store.hidden().unwrap(), None);
    insert(&store, Kind::Files, vec![document("d//x")]);
    assert!(store.hidden().unwrap().unwrap().contains("d//x"));
    store.0.delete(Kind::Files, fields! { "filename": "d//x" }, Sure::Seen).unwrap();
    for odd in [
        file_document("odd".into(), Value::Int(5)),
        file_document("odd".into(), "d/f".into()).with("chunkSize", 0),
        file_document("odd".into(), Value::Array(vec!["d/mm".into()])),
    ] {
        insert(&store, Kind::Files, vec![odd]);
        assert!(store.hidden().unwrap().is_some());
        store.0.delete(Kind::Files, fields! { "_id": "odd" }, Sure::Seen).unwrap();
    }
    assert_eq!(store.hidden().unwrap(), None);
}

#[test]
fn names_with_empty_parts_hide_nothing() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    let odd = (0..1000).map(|nth| document(&format!("a//{nth:05}")));
    insert(&store, Kind::Files, odd.chain(["a/real", "a/zz", "b"].map(document)).collect());
    let mut page = store.list("a/", true, None).unwrap();
    assert_eq!(page.prefixes, ["a//"]);
    if let Some(next) = &page.next {
        page = store.list("a/", true, Some(next)).unwrap();
    }
    assert_eq!(keys(&page), ["a/real", "a/zz"]);
}

#[test]
fn listing_continues_after_a_cut_answer() {
    let names: Vec<Document> = (0..40).map(|nth| document(&format!("{nth:03}"))).collect();
    let cuts = AtomicU32::new(0);
    let scripted = Scripted::new(None, move |heard| {
        let single = heard.body.get("singleBatch") == Some(&Value::Bool(true));
        match (heard.name.as_str(), heard.body.document("filter")) {
            // As MongoDB does at 16 MiB.
            ("find", Some(filter)) if filter.document("filename").is_some() => {
                batch(true, if single { 0 } else { 5 }, names[..10].to_vec())
            }
            ("find", _) => batch(true, 0, Vec::new()),
            ("getMore", _) if cuts.fetch_add(1, Ordering::SeqCst) == 0 => Does::CutAfter,
            ("getMore", _) => batch(false, 0, names[10..].to_vec()),
            _ => Does::Pass,
        }
    });
    let page = scripted.store().list("", false, None).unwrap();
    assert_eq!((page.objects.len(), page.next), (40, None));
    // The server does not send the lost page again.
    let order = scripted.order("files");
    assert_eq!(order[order.len() - 4..], ["find", "getMore", "find", "getMore"], "{order:?}");
}

#[test]
fn endless_cursor_ends_in_an_error() {
    let scripted = Scripted::new(None, |heard| match heard.name.as_str() {
        name @ ("find" | "getMore") => batch(name == "find", 77, Vec::new()),
        _ => Does::Pass,
    });
    let store = scripted.store();
    assert_eq!(errno(store.list("", false, None)), libc::EIO);
    assert_eq!(errno(store.0.versions("f").map_err(|why| why.into_io("f"))), libc::EIO);
    // More than the limit.
    let scripted = Scripted::new(None, |heard| match heard.name.as_str() {
        name @ ("find" | "getMore") => batch(name == "find", 77, vec![document("x"); 600]),
        _ => Does::Pass,
    });
    assert_eq!(errno(scripted.store().list("", false, None)), libc::EIO);
}

#[test]
fn trickling_answer_times_out() {
    let scripted = Scripted::new(None, |heard| if heard.name == "find" { Does::Trickle } else { Does::Pass });
    let mut place = scripted.place();
    (place.limits.request, place.limits.tries) = (Duration::from_millis(500), 2);
    assert_eq!(errno(GridFs::new(place).unwrap().head("f")), libc::ETIMEDOUT);
}

#[test]
fn answer_with_too_many_fields_is_refused() {
    let scripted = Scripted::new(None, |heard| {
        if heard.name != "find" {
            return Does::Pass;
        }
        let mut bytes = (4_000_005_i32).to_le_bytes().to_vec();
        bytes.extend(b"\x0a\0".repeat(2_000_000));
        bytes.push(0);
        Does::SayBytes(bytes)
    });
    let why = scripted.store().head("f").unwrap_err();
    assert!(why.to_string().contains("fields"), "{why}");
}

// ---- files of other clients

#[test]
fn file_replaced_under_its_id_is_another_version() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    let theirs = |millis: i64, byte: u8| {
        let chunk = fields! { "_id": "c", "files_id": "my id", "n": 0, "data": Value::Binary(vec![byte; 100]) };
        insert(&store, Kind::Chunks, vec![chunk]);
        let file = file_document("my id".into(), "f".into()).with("length", 100);
        insert(&store, Kind::Files, vec![file.with("uploadDate", Value::Date(millis))]);
    };
    theirs(1_700_000_000_000, b'A');
    let etag = store.head("f").unwrap().unwrap().etag;
    let reworded = store.copy("f", Some(&etag), "f", Some(&Words::from([("mode".into(), "0600".into())]))).unwrap();
    assert_ne!(reworded, etag);
    assert!(store.get("f", 0..100, Some(&etag)).is_ok(), "other words are the same bytes");
    for kind in [Kind::Files, Kind::Chunks] {
        store.0.delete(kind, Document::default(), Sure::Durable).unwrap();
    }
    theirs(1_700_000_000_001, b'B');
    assert!(is_condition_failed(&store.get("f", 0..100, Some(&etag)).err().unwrap()));
    assert!(is_condition_failed(&store.copy("f", Some(&etag), "g", None).unwrap_err()));
    let id = store.begin("g", &Words::new()).unwrap();
    assert!(is_condition_failed(&store.part_of("g", &id, 1, "f", 0..100, &etag).unwrap_err()));
    assert_eq!(get(&store, "f"), [b'B'; 100]);
}

#[test]
fn file_replaced_during_a_copy_is_not_mixed() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    insert(&store, Kind::Files, vec![file_document("my id".into(), "f".into()).with("length", 100)]);
    let chunk = |byte: u8| fields! { "_id": "c", "files_id": "my id", "n": 0, "data": Value::Binary(vec![byte; 100]) };
    insert(&store, Kind::Chunks, vec![chunk(b'A')]);
    let stranger = store.clone();
    let scripted = before(&server, move |heard| {
        if heard.is("find", "chunks") {
            stranger.0.delete(Kind::Chunks, Document::default(), Sure::Durable).unwrap();
            insert(&stranger, Kind::Chunks, vec![chunk(b'B')]);
            let later = fields! { "$set": fields! { "uploadDate": Value::Date(1_700_000_000_001) } };
            stranger.0.update(Kind::Files, fields! { "_id": "my id" }, later, false).unwrap();
        }
        Does::Pass
    });
    assert!(is_condition_failed(&scripted.store().copy("f", None, "g", Some(&Words::new())).unwrap_err()));
    assert_eq!(store.head("g").unwrap(), None);
}

#[test]
fn metadata_of_other_clients_survives_chmod_and_rename() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    let said = Words::from([("mode".to_owned(), "0600".to_owned())]);
    let theirs = |name: &str, metadata: Value| {
        let aliases = Value::Array(vec!["z".into()]);
        let file = document(name).with("contentType", "text/plain").with("aliases", aliases);
        file.with("metadata", metadata)
    };
    let found = |name: &str| store.0.find(Kind::Files, fields! { "filename": name }, None, None).unwrap().remove(0);
    insert(&store, Kind::Files, vec![theirs("text", "a string".into()), theirs("k", fields! { "k": 1 }.into())]);
    insert(&store, Kind::Files, vec![theirs("null", Value::Null), document("none")]);
    for key in ["k", "null", "none"] {
        store.copy(key, None, key, Some(&said)).unwrap();
        assert_eq!(store.head(key).unwrap().unwrap().words.as_ref(), Some(&said), "{key}");
        let moved = format!("{key} moved");
        store.copy(key, None, &moved, None).unwrap();
        assert_eq!(store.head(&moved).unwrap().unwrap().words.as_ref(), Some(&said), "{key}");
    }
    for name in ["k", "k moved"] {
        let there = found(name);
        assert_eq!((there.text("contentType"), there.array("aliases").len()), (Some("text/plain"), 1), "{name}");
        assert_eq!(there.document("metadata").unwrap().number("k"), Some(1), "{name}");
    }
    let as_it_was = found("text");
    assert_eq!(errno(store.copy("text", None, "text", Some(&said))), libc::EPERM);
    assert_eq!(errno(store.copy("text", None, "other", Some(&said))), libc::EPERM);
    assert_eq!(found("text"), as_it_was);
}

#[test]
fn missing_chunk_is_damage_and_not_another_version() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    let etag = put(&store, "f", &noise(600_000), When::Always).unwrap();
    store.0.delete(Kind::Chunks, fields! { "n": 1 }, Sure::Durable).unwrap();
    let why = store.get("f", 0..600_000, Some(&etag)).err().unwrap();
    assert!(!is_condition_failed(&why) && why.to_string().contains("damaged"), "{why}");
    assert_eq!(errno_of(&why).raw_os_error(), libc::EIO);
    store.delete("f").unwrap();
}

#[test]
fn unreadable_version_is_an_error_and_not_an_absent_file() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    put(&store, "f", b"older", When::Always).unwrap();
    let late = Value::Date(4_000_000_000_000);
    let theirs = file_document("i".repeat(600).into(), "f".into()).with("uploadDate", late);
    insert(&store, Kind::Files, vec![theirs]);
    let why = store.head("f").unwrap_err();
    assert!(why.to_string().contains("cannot be read"), "{why}");
    assert_eq!(errno(put(&store, "f", b"newer", When::Absent)), libc::EIO);
    assert_eq!(keys(&store.list("", false, None).unwrap()), [""; 0]);
    assert_eq!((count(&store, Kind::Files), count(&store, Kind::Chunks)), (2, 1));
}

#[test]
fn copy_that_outlasts_cleanup_is_whole_or_an_error() {
    let Some(server) = MongoServer::start() else { return };
    let store = open(&server);
    let content = noise((8 << 20) + (1 << 20));
    put(&store, "f", &content, When::Always).unwrap();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let (gc, removed) = (store.clone(), Arc::clone(&seen));
    let scripted = before(&server, move |heard| {
        if heard.is("insert", "files") {
            // Another process cleans up without any delay.
            for upload in gc.uploads("").unwrap() {
                gc.abort(&upload.key, &upload.id).unwrap();
                removed.lock().unwrap().push(upload.key);
            }
        }
        Does::Pass
    });
    put(&store, "g", b"is to be replaced", When::Absent).unwrap();
    scripted.store().copy("f", None, "g", None).unwrap_err();
    assert_eq!(*seen.lock().unwrap(), ["g"], "it has a name");
    assert_eq!(get(&store, "g"), b"is to be replaced");
    assert!(get(&store, "f") == content);
    store.copy("f", None, "g", None).unwrap();
    assert!(get(&store, "g") == content);
    assert_eq!((count(&store, Kind::Uploads), store.uploads("").unwrap()), (0, Vec::new()));
}
