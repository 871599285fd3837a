//! The driver against a server that misbehaves: a TCP server that sends the answers that a test prescribes.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::Turn;
use crate::checksum::of_bytes;
use crate::object::is_condition_failed;

const ABLE: Abilities = Abilities {
    if_absent: true,
    if_same: true,
    checksums: true,
    copies: true,
    uploads_in_parts: true,
    ..probe::NOTHING
};

enum Reply {
    /// Status, headers (each with its line end), body.
    Say(u16, String, Vec<u8>),
    /// The server reads the request, and closes the connection without an answer.
    Hang,
    /// The body ends early.
    Cut(u16, String, Vec<u8>),
    /// The server answers before it reads the request's body, and closes the connection.
    Early(u16, Vec<u8>),
}

fn say(status: u16, headers: &str, body: impl AsRef<[u8]>) -> Reply {
    Reply::Say(status, headers.to_owned(), body.as_ref().to_vec())
}

fn error(status: u16, code: &str) -> Reply {
    say(
        status,
        "",
        format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code><Message>as prescribed</Message></Error>"),
    )
}

/// The first line of the request, and its headers in lower case.
#[derive(Debug, Clone)]
struct Heard {
    line: String,
    headers: String,
}

type Script = Arc<Mutex<dyn FnMut(&Heard) -> Reply + Send>>;

struct Scripted {
    port: u16,
    heard: Arc<Mutex<Vec<Heard>>>,
    /// Number of received bytes of bodies.
    got: Arc<AtomicU64>,
    directory: tempfile::TempDir,
}

impl Scripted {
    fn with(script: impl FnMut(&Heard) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let script: Script = Arc::new(Mutex::new(script));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let directory = tempfile::tempdir().unwrap();
        let got: Arc<AtomicU64> = Arc::default();
        let (all, bytes) = (Arc::clone(&heard), Arc::clone(&got));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, all, bytes) = (Arc::clone(&script), Arc::clone(&all), Arc::clone(&bytes));
                std::thread::spawn(move || serve(&stream.unwrap(), &script, &all, &bytes));
            }
        });
        let made = Self { port, heard, got, directory };
        write_credentials(&made.directory.path().join("credentials"), "AKIDFIRST");
        made
    }

    /// A server with these answers, in this order.
    fn saying(replies: impl IntoIterator<Item = Reply>) -> Self {
        let mut replies: VecDeque<Reply> = replies.into_iter().collect();
        Self::with(move |heard| replies.pop_front().unwrap_or_else(|| panic!("an unexpected request: {heard:?}")))
    }

    fn unasked(&self) -> S3 {
        let mut place = Place::parse(&format!("s3://b/p?endpoint=http://127.0.0.1:{}&region=here", self.port)).unwrap();
        place.credentials_file = Some(self.directory.path().join("credentials"));
        place.limits.pause = Duration::from_millis(1);
        S3::new(place).unwrap()
    }

    fn store(&self) -> S3 {
        let store = self.unasked();
        store.0.abilities.set(ABLE).unwrap();
        store
    }

    fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }
}

fn write_credentials(path: &std::path::Path, id: &str) {
    std::fs::write(path, format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = s\n")).unwrap();
}

struct Counted<'a>(&'a AtomicU64);

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn serve(stream: &TcpStream, script: &Script, all: &Mutex<Vec<Heard>>, got: &AtomicU64) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut heard = Heard { line: String::new(), headers: String::new() };
        if reader.read_line(&mut heard.line).unwrap_or(0) == 0 {
            return;
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap();
            let name = name.to_ascii_lowercase();
            if name == "content-length" {
                length = value.trim().parse().unwrap();
            }
            heard.headers.push_str(&format!("{name}:{}\n", value.trim()));
        }
        all.lock().unwrap().push(heard.clone());
        let reply = (script.lock().unwrap())(&heard);
        let mut writer = stream;
        let mut send = |status: u16, headers: &str, body: &[u8], length: usize| {
            let head = format!("HTTP/1.1 {status} Said\r\ncontent-length: {length}\r\n{headers}\r\n");
            writer.write_all(head.as_bytes()).and_then(|()| writer.write_all(body)).is_ok()
        };
        if let Reply::Early(status, body) = &reply {
            send(*status, "connection: close\r\n", body, body.len());
            // Closes with unread bytes, so that the client sees a reset.
            return;
        }
        if std::io::copy(&mut reader.by_ref().take(length), &mut Counted(got)).unwrap() < length {
            return;
        }
        let goes_on = match reply {
            Reply::Say(status, headers, body) => {
                let length = if heard.line.starts_with("HEAD") { 0 } else { body.len() };
                // The length of a HEAD is that of the answer to GET.
                if length == 0 && headers.contains("content-length") {
                    let head = format!("HTTP/1.1 {status} Said\r\n{headers}\r\n");
                    let mut writer = stream;
                    writer.write_all(head.as_bytes()).is_ok()
                } else {
                    send(status, &headers, &body[..length], length)
                }
            }
            Reply::Cut(status, headers, body) => {
                send(status, &headers, &body, body.len() + 5);
                false
            }
            Reply::Hang | Reply::Early(..) => false,
        };
        if !goes_on {
            return;
        }
    }
}

const ETAG: &str = "etag: \"0123456789abcdef0123456789abcdef\"\r\n";

fn head_of(content: &[u8], word: &str) -> Reply {
    let crc = answers::crc_text(of_bytes(content));
    let date = "last-modified: Wed, 01 Jul 2026 10:00:00 GMT\r\n";
    let sum = format!("x-amz-checksum-crc64nvme: {crc}\r\nx-amz-checksum-type: FULL_OBJECT\r\n");
    say(200, &format!("content-length: {}\r\n{ETAG}{date}{sum}x-amz-meta-who: {word}\r\n", content.len()), "")
}

fn put(store: &S3, content: &[u8], when: When<'_>) -> io::Result<String> {
    let words = Words::from([("who".to_owned(), "us".to_owned())]);
    store.put("k", &content, of_bytes(content), &words, when)
}

#[test]
fn busy_server_is_asked_again() {
    let server = Scripted::saying([
        error(503, "SlowDown"),
        say(500, "", ""),
        say(200, ETAG, ""),
        say(429, "retry-after: 0\r\n", ""),
        Reply::Hang,
        head_of(b"content", "us"),
    ]);
    let store = server.store();
    put(&store, b"content", When::Always).unwrap();
    assert_eq!(store.head("k").unwrap().unwrap().size_bytes, 7);
    let counts = store.counters();
    assert_eq!((counts.of(Kind::Put), counts.of(Kind::Head), counts.tries_again), (3, 3, 4));
    assert_eq!(counts.sent_bytes, 21);
    assert_eq!(store.trouble(), None);
}

#[test]
fn server_that_stays_busy_fails_after_some_tries() {
    let server = Scripted::with(|_| error(503, "SlowDown"));
    let store = server.store();
    let why = put(&store, b"content", When::Always).unwrap_err();
    assert_eq!(why.raw_os_error(), Some(libc::EAGAIN));
    assert_eq!(server.heard().len(), 5);
    assert!(store.trouble().unwrap().contains("SlowDown"));
}

#[test]
fn error_inside_a_success_is_an_error() {
    let copied = format!("<CopyObjectResult><ETag>\"{}\"</ETag></CopyObjectResult>", "ab".repeat(16));
    let server = Scripted::saying([
        error(200, "InternalError"),
        say(200, "", copied),
        error(200, "SlowDown"),
        say(200, "", "<CompleteMultipartUploadResult><ETag>&quot;x-1&quot;</ETag></CompleteMultipartUploadResult>"),
        error(200, "AccessDenied"),
    ]);
    let store = server.store();
    assert_eq!(store.copy("a", None, "b", None).unwrap(), "ab".repeat(16));
    assert_eq!(store.complete("k", "id", &[], 0, When::Always).unwrap(), "x-1");
    let why = store.copy("a", None, "b", None).unwrap_err();
    assert_eq!(why.raw_os_error(), Some(libc::EACCES));
}

#[test]
fn interrupted_answer_is_continued_from_there() {
    let server = Scripted::saying([
        Reply::Cut(206, ETAG.into(), b"01234".to_vec()),
        Reply::Hang,
        Reply::Cut(206, ETAG.into(), Vec::new()),
        say(206, ETAG, "56789"),
        Reply::Cut(200, String::new(), b"<ListBucketResult><Contents>".to_vec()),
        say(200, "", "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
    ]);
    let store = server.store();
    let mut content = String::new();
    store.get("k", 100..110, None).unwrap().read_to_string(&mut content).unwrap();
    assert_eq!(content, "0123456789");
    let heard = server.heard();
    assert!(heard[0].headers.contains("range:bytes=100-109\n") && !heard[0].headers.contains("if-match"));
    assert!(heard[3].headers.contains("range:bytes=105-109\n"), "{heard:?}");
    assert!(heard[3].headers.contains("if-match:\"0123456789abcdef0123456789abcdef\"\n"), "{heard:?}");
    assert_eq!(store.list("", false, None).unwrap(), Page::default());
}

#[test]
fn content_changed_between_requests_is_an_error() {
    let server = Scripted::saying([Reply::Cut(206, ETAG.into(), b"01234".to_vec()), error(412, "PreconditionFailed")]);
    let store = server.store();
    let why = store.get("k", 0..10, None).unwrap().read_to_end(&mut Vec::new()).unwrap_err();
    assert!(is_condition_failed(&why), "{why:?}");
}

#[test]
fn server_without_ranges_is_detected() {
    let server = Scripted::with(|_| say(200, ETAG, "0123456789"));
    let store = server.store();
    let mut content = Vec::new();
    store.get("k", 0..10, None).unwrap().read_to_end(&mut content).unwrap();
    assert_eq!(content, b"0123456789");
    assert_eq!(store.get("k", 3..10, None).err().unwrap().raw_os_error(), Some(libc::EIO));
    assert_eq!(store.get("k", 3..3, None).err().unwrap().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn conditional_write_with_lost_answer_succeeds() {
    let lost = || [Reply::Hang, error(412, "PreconditionFailed")];
    for when in [When::Absent, When::Is("0123456789abcdef0123456789abcdee")] {
        let server = Scripted::saying(lost().into_iter().chain([head_of(b"content", "us")]));
        assert_eq!(put(&server.store(), b"content", when).unwrap(), "0123456789abcdef0123456789abcdef");
        for other in [head_of(b"another", "us"), head_of(b"content", "them"), say(404, "", "")] {
            let server = Scripted::saying(lost().into_iter().chain([other]));
            assert!(is_condition_failed(&put(&server.store(), b"content", when).unwrap_err()));
        }
    }
    // The answer to the first try is certain, so the driver does not query the object.
    let server = Scripted::saying([error(412, "PreconditionFailed")]);
    assert!(is_condition_failed(&put(&server.store(), b"content", When::Absent).unwrap_err()));
}

#[test]
fn completion_with_lost_answer_succeeds() {
    let part = Part { number: 1, size_bytes: 7, etag: "x".into(), crc64nvme: None };
    let complete = |server: &Scripted, when| {
        server.store().complete("k", "id", std::slice::from_ref(&part), of_bytes(b"content"), when)
    };
    for last in ["NoSuchUpload", "PreconditionFailed"] {
        let status = if last == "NoSuchUpload" { 404 } else { 412 };
        let server = Scripted::saying([Reply::Hang, error(status, last), head_of(b"content", "us")]);
        assert_eq!(complete(&server, When::Absent).unwrap(), "0123456789abcdef0123456789abcdef");
    }
    let server = Scripted::saying([say(500, "", ""), error(404, "NoSuchUpload"), head_of(b"another", "us")]);
    assert_eq!(complete(&server, When::Always).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    let server = Scripted::saying([error(404, "NoSuchUpload")]);
    assert_eq!(complete(&server, When::Always).unwrap_err().raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn refusal_before_body_is_read_is_reported() {
    let refusal = |code| format!("<Error><Code>{code}</Code><Message>x</Message></Error>").into_bytes();
    let server = Scripted::saying([
        Reply::Early(412, refusal("PreconditionFailed")),
        Reply::Early(403, refusal("AccessDenied")),
    ]);
    let store = server.store();
    let large = vec![7; 64 << 20];
    assert!(is_condition_failed(&put(&store, &large, When::Absent).unwrap_err()));
    assert_eq!(put(&store, &large, When::Always).unwrap_err().raw_os_error(), Some(libc::EACCES));
    assert_eq!(store.counters().tries_again, 0);
}

/// Without an etag the version is unknown.
#[test]
fn object_without_etag_is_an_error() {
    let server = Scripted::with(|_| say(200, "last-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n", "x"));
    let store = server.store();
    assert_eq!(store.head("k").unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(put(&store, b"x", When::Always).is_err(), "the put object cannot be distinguished from another client's");
}

#[test]
fn requests_stay_below_their_rate() {
    let server = Scripted::with(|_| head_of(b"x", "a"));
    let mut place = server.unasked().0.place.clone();
    place.requests_per_second = Some(20);
    let store = S3::new(place).unwrap();
    store.0.abilities.set(ABLE).unwrap();
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..3).for_each(|_| drop(store.head("k").unwrap())));
        }
    });
    assert_eq!(server.heard().len(), 12);
    // The first request is sent at once.
    assert!(begun.elapsed() >= Duration::from_millis(11 * 50), "{:?}", begun.elapsed());
}

#[test]
fn expired_credentials_are_read_again() {
    // The server's script renews the credentials between the first request and the second.
    let file: Arc<std::sync::OnceLock<std::path::PathBuf>> = Arc::default();
    let renewed = Arc::clone(&file);
    let server = Scripted::with(move |heard| {
        if heard.headers.contains("AKIDSECOND") {
            return say(200, ETAG, "");
        }
        write_credentials(renewed.get().unwrap(), "AKIDSECOND");
        error(400, "ExpiredToken")
    });
    file.set(server.directory.path().join("credentials")).unwrap();
    let store = server.store();
    put(&store, b"x", When::Always).unwrap();
    assert_eq!(server.heard().len(), 2);
}

#[test]
fn bodies_are_signed_after_server_requires_it() {
    let server = Scripted::saying([error(400, "XAmzContentSHA256Mismatch"), say(200, ETAG, ""), say(200, ETAG, "")]);
    let store = server.store();
    put(&store, b"abc", When::Always).unwrap();
    put(&store, b"abc", When::Always).unwrap();
    let hashes: Vec<bool> = server
        .heard()
        .iter()
        .map(|heard| {
            heard
                .headers
                .contains("x-amz-content-sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
        })
        .collect();
    assert_eq!(hashes, [false, true, true]);
}

#[test]
fn error_of_other_region_names_it() {
    let server = Scripted::with(|_| say(301, "x-amz-bucket-region: eu-north-1\r\n", ""));
    let why = S3::open(server.unasked().0.place.clone()).unwrap_err().to_string();
    assert!(why.contains("region=eu-north-1"), "{why}");
}

#[test]
fn server_that_ignores_conditions_has_no_abilities() {
    let server = Scripted::with(|heard| match heard.line.split(' ').next() {
        Some("HEAD") => {
            say(200, &format!("content-length: 38\r\n{ETAG}last-modified: Wed, 01 Jul 2026 10:00:00 GMT\r\n"), "")
        }
        Some("POST") if heard.line.contains("uploads=") => {
            say(200, "", "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        }
        _ => say(200, ETAG, "<Result><ETag>\"e\"</ETag></Result>"),
    });
    let store = server.unasked();
    let able = store.abilities();
    assert!(!able.if_absent && !able.if_same && !able.checksums, "{able:?}");
    let why = put(&store, b"x", When::Absent).unwrap_err();
    assert_eq!(why.raw_os_error(), Some(libc::EOPNOTSUPP));
    let puts = |heard: &[Heard]| heard.iter().filter(|heard| heard.line.contains("/p/k ")).count();
    assert_eq!(puts(&server.heard()), 0, "a put with an ignored condition overwrites");
    put(&store, b"x", When::Always).unwrap();
    assert!(server.heard().last().unwrap().headers.contains("content-md5:"));
}

#[test]
fn read_only_bucket_can_be_read() {
    let server = Scripted::with(|heard| match heard.line.split(' ').next() {
        Some("PUT" | "DELETE") => error(403, "AccessDenied"),
        _ => say(200, "", "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
    });
    let store = S3::open(server.unasked().0.place.clone()).unwrap();
    assert_eq!(store.list("", true, None).unwrap(), Page::default());
    assert_eq!(put(&store, b"x", When::Always).unwrap_err().raw_os_error(), Some(libc::EACCES));
}

#[test]
fn silent_server_fails_after_a_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Scripted::saying([]);
    let mut place = server.unasked().0.place.clone();
    place.endpoint = format!("http://{}", listener.local_addr().unwrap());
    (place.limits.progress, place.limits.tries) = (Duration::from_millis(50), 2);
    let why = S3::new(place).unwrap().head("k").unwrap_err();
    assert_eq!(why.raw_os_error(), Some(libc::ETIMEDOUT));
}

struct InTurn<'a>(&'a [u8], Turn<'a>);

impl Body for InTurn<'_> {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_at(buffer, offset)
    }
    fn last_byte_waits(&self) -> Option<Turn<'_>> {
        Some(self.1)
    }
}

#[test]
fn body_before_its_turn_lacks_only_the_last_byte() {
    for (content, comes) in [(vec![7; 300_000], true), (vec![7; 300_000], false), (vec![7; 5], true), (vec![7], false)]
    {
        let server = Scripted::with(|_| say(200, ETAG, ""));
        let (store, got) = (server.store(), Arc::clone(&server.got));
        let all = content.len() as u64;
        let waited_at = AtomicU64::new(u64::MAX);
        let turn = || {
            let begun = std::time::Instant::now();
            while got.load(Ordering::SeqCst) < all - 1 {
                assert!(begun.elapsed() < Duration::from_secs(30), "the bytes do not arrive");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            waited_at.store(got.load(Ordering::SeqCst), Ordering::SeqCst);
            if comes { Ok(()) } else { Err(Errno::CANCELED.into()) }
        };
        let sent = store.put("k", &InTurn(&content, &turn), of_bytes(&content), &Words::new(), When::Absent);
        assert_eq!(waited_at.into_inner(), all - 1);
        assert_eq!(sent.map_err(|why| why.raw_os_error()).err(), (!comes).then_some(Some(libc::ECANCELED)));
        assert_eq!(server.heard().len(), 1, "the request was repeated");
        assert_eq!(got.load(Ordering::SeqCst), if comes { all } else { all - 1 });
    }
}
