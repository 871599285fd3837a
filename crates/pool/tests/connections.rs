//! Connections between members over real sockets: what is delivered, and what is refused.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use surgetank_pool::connection::{Closed, Event, Hello, PROTOCOL, Purpose, QUEUED_BYTES_MAX};
use surgetank_pool::{Connection, MemberId, Secret, Term};

const PATIENCE: Duration = Duration::from_secs(10);

type Text = Vec<u8>;

fn hello() -> Hello {
    Hello { version: PROTOCOL, pool: [7; 16], uid: 1000, member: None, purpose: Purpose::Control }
}

/// One side's result, and what it receives.
type Side = (Result<Connection, Closed>, Receiver<Event<Text>>);

/// An open side.
type Open = (Connection, Receiver<Event<Text>>);

fn accept(listener: &TcpListener, secret: &Secret, hello: Hello, patience: Duration) -> Side {
    let (deliver, events) = channel();
    let socket = listener.accept().unwrap().0;
    let deliver = move |event| drop(deliver.send(event));
    (Connection::accept(socket, (&secret.tls().unwrap(), hello), patience, |_| true, deliver), events)
}

fn connect(address: &str, secret: &Secret, hello: Hello) -> Side {
    let (deliver, events) = channel();
    let deliver = move |event| drop(deliver.send(event));
    (Connection::connect(address, (&secret.tls().unwrap(), hello), PATIENCE, |_| true, deliver), events)
}

/// Two sides, with what each says, directly or through `between`.
fn pair(one: (&Secret, Hello), other: (&Secret, Hello), between: Option<&Between>) -> (Side, Side) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = listener.local_addr().unwrap().to_string();
    if let Some(between) = between {
        address = between.stand_before(address);
    }
    thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(&listener, other.0, other.1, PATIENCE));
        let connected = connect(&address, one.0, one.1);
        (connected, accepted.join().unwrap())
    })
}

fn open_pair(between: Option<&Between>) -> (Open, Open) {
    let secret = Secret::random().unwrap();
    let ((one, at_one), (other, at_other)) = pair((&secret, hello()), (&secret, hello()), between);
    ((one.unwrap(), at_one), (other.unwrap(), at_other))
}

fn message(events: &Receiver<Event<Text>>) -> Text {
    match events.recv_timeout(PATIENCE).unwrap() {
        Event::Message(text) => text,
        Event::Closed(why) => panic!("{why}"),
    }
}

fn closed(events: &Receiver<Event<Text>>) -> Closed {
    loop {
        if let Event::Closed(why) = events.recv_timeout(PATIENCE).unwrap() {
            return why;
        }
    }
}

/// A stranger on the path: keeps what the client sends, and may change one byte of it.
#[derive(Clone, Default)]
struct Between {
    seen: Arc<Mutex<Vec<u8>>>,
    /// Which byte from now on is changed.
    changes: Arc<Mutex<Option<usize>>>,
}

impl Between {
    fn stand_before(&self, address: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap().to_string();
        let between = self.clone();
        thread::spawn(move || {
            let client = listener.accept().unwrap().0;
            let server = TcpStream::connect(address).unwrap();
            let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = (&client).read(&mut bytes) {
                between.seen.lock().unwrap().extend_from_slice(&bytes[..count]);
                let mut changes = between.changes.lock().unwrap();
                match *changes {
                    Some(at) if at < count => {
                        bytes[at] ^= 1;
                        *changes = None;
                    }
                    Some(at) => *changes = Some(at - count),
                    None => {}
                }
                if (&server).write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = server.shutdown(Shutdown::Both);
        });
        here
    }
}

#[test]
fn messages_come_in_order_and_each_once_in_both_directions() {
    let ((one, at_one), (other, at_other)) = open_pair(None);
    let text = |number: usize| -> Text { format!("{number} ").repeat(1 + number * 37 % 9001).into_bytes() };
    thread::scope(|scope| {
        scope.spawn(|| (0..600).for_each(|number| one.send(&text(number), PATIENCE).unwrap()));
        scope.spawn(|| (0..600).for_each(|number| other.send(&text(number + 1), PATIENCE).unwrap()));
        scope.spawn(move || (0..600).for_each(|number| assert_eq!(message(&at_other), text(number))));
        (0..600).for_each(|number| assert_eq!(message(&at_one), text(number + 1)));
    });
    let sent: usize = (0..600).map(|number| text(number).len()).sum();
    let (_, written) = one.network_bytes();
    let (read, _) = other.network_bytes();
    // TLS adds 22 bytes to each 16 KiB, and some 800 for the handshake.
    assert!(written > sent as u64 && written < sent as u64 * 11 / 10, "{written} for {sent}");
    assert!(read > sent as u64, "{read} for {sent}");
}

#[test]
fn peer_with_another_secret_is_refused_by_both_sides() {
    let (one, other) = (Secret::random().unwrap(), Secret::random().unwrap());
    let ((connected, _), (accepted, _)) = pair((&one, hello()), (&other, hello()), None);
    let (connected, accepted) = (connected.unwrap_err(), accepted.unwrap_err());
    assert!(matches!(connected, Closed::Stranger(_)), "{connected}");
    // (Its alert may be lost when the peer closes.)
    assert!(matches!(accepted, Closed::Stranger(_) | Closed::Io(_)), "{accepted}");
    assert!(connected.to_string().starts_with("the peer does not have the pool's secret"), "{connected}");
}

#[test]
fn peer_of_another_pool_user_or_version_is_refused() {
    let secret = Secret::random().unwrap();
    let others = [
        (Hello { pool: [8; 16], ..hello() }, "the peer is a member of another pool"),
        (Hello { uid: 1001, ..hello() }, "the peer runs as another user"),
        (Hello { version: PROTOCOL + 1, ..hello() }, "the peer has another version of Surgetank"),
    ];
    for (other, why) in others {
        let ((connected, _), (accepted, _)) = pair((&secret, hello()), (&secret, other), None);
        for refused in [connected.unwrap_err(), accepted.unwrap_err()] {
            assert!(matches!(refused, Closed::Refused(_)), "{refused}");
            assert_eq!(refused.to_string(), why);
        }
    }
}

#[test]
fn client_that_speaks_no_tls_is_refused_at_once() {
    let secret = Secret::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], &[0x16, 0x03, 0x01, 0xff, 0xff]] {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(garbage).unwrap();
        let began = Instant::now();
        assert!(accept(&listener, &secret, hello(), PATIENCE).0.is_err(), "{garbage:?}");
        assert!(began.elapsed() < PATIENCE / 2, "{garbage:?}: {:?}", began.elapsed());
    }
}

// A patience for each read, instead of one for the handshake, would let such a client hold a thread indefinitely.
#[test]
fn client_that_sends_a_byte_now_and_then_is_refused_after_the_patience() {
    let secret = Secret::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    thread::spawn(move || {
        // The head of a record of 16 KiB, and then its bytes one by one.
        let mut bytes = [&[0x16, 0x03, 0x01, 0x40, 0x00][..], &[0; 100]].concat().into_iter();
        while bytes.next().is_some_and(|byte| client.write_all(&[byte]).is_ok()) {
            thread::sleep(Duration::from_millis(50));
        }
    });
    let began = Instant::now();
    let refused = accept(&listener, &secret, hello(), Duration::from_millis(500)).0.unwrap_err();
    assert!(matches!(&refused, Closed::Io(why) if why.kind() == std::io::ErrorKind::TimedOut), "{refused}");
    assert!((400..4000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
}

#[test]
fn peer_that_does_not_read_costs_a_bounded_queue_and_a_patience() {
    let secret = Secret::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stuck, go_on) = channel::<()>();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let socket = listener.accept().unwrap().0;
            // Its first message is never done with.
            let deliver = move |event| {
                if let Event::Message::<Text>(_) = event {
                    let _ = go_on.recv();
                }
            };
            Connection::accept(socket, (&secret.tls().unwrap(), hello()), PATIENCE, |_| true, deliver).unwrap()
        });
        let (one, events) = connect(&address, &secret, hello());
        let (one, other) = (one.unwrap(), accepted.join().unwrap());
        let text = vec![b'x'; 1 << 19];
        let mut sent = 0;
        let refused = loop {
            match one.send(&text, Duration::from_millis(300)) {
                Ok(()) => sent += text.len(),
                Err(why) => break why,
            }
            // What the kernel's buffers take comes on top.
            assert!(sent < QUEUED_BYTES_MAX + (64 << 20), "{sent} bytes are queued");
        };
        assert!(matches!(&refused, Closed::Io(why) if why.kind() == std::io::ErrorKind::TimedOut), "{refused}");
        assert!(matches!(closed(&events), Closed::Here));
        assert!(one.send(&text, PATIENCE).is_err());
        drop((stuck, other));
    });
}

#[test]
fn connection_that_one_side_drops_ends_on_both() {
    let ((one, at_one), (other, at_other)) = open_pair(None);
    one.send(&b"last".to_vec(), PATIENCE).unwrap();
    assert_eq!(message(&at_other), b"last");
    drop(one);
    assert!(matches!(closed(&at_one), Closed::Here));
    let why = closed(&at_other);
    assert!(matches!(why, Closed::Io(_)), "{why}");
    assert!(other.send(&b"more".to_vec(), PATIENCE).is_err());
}

#[test]
fn changed_byte_ends_the_connection_and_is_not_delivered() {
    // (The first five bytes are the record's head.)
    for at in [5, 30, 500] {
        let between = Between::default();
        let ((one, _at_one), (_other, at_other)) = open_pair(Some(&between));
        one.send(&b"before".to_vec(), PATIENCE).unwrap();
        assert_eq!(message(&at_other), b"before");
        *between.changes.lock().unwrap() = Some(at);
        one.send(&vec![b'y'; 1000], PATIENCE).unwrap();
        match at_other.recv_timeout(PATIENCE).unwrap() {
            Event::Closed(Closed::Stranger(_)) => {}
            other => panic!("byte {at}: {other:?}"),
        }
    }
}

#[test]
fn repeated_session_is_refused_and_shows_no_text() {
    let between = Between::default();
    let secret = Secret::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let recorded = thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(&listener, &secret, hello(), PATIENCE));
        let (one, _events) = connect(&between.stand_before(address.clone()), &secret, hello());
        let one = one.unwrap();
        one.send(&b"unlink results/final".to_vec(), PATIENCE).unwrap();
        let (_other, at_other) = accepted.join().unwrap();
        assert_eq!(message(&at_other), b"unlink results/final");
        between.seen.lock().unwrap().clone()
    });
    assert!(!recorded.windows(6).any(|bytes| bytes == b"unlink"));
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(&recorded).unwrap();
    let (accepted, events) = accept(&listener, &secret, hello(), PATIENCE);
    let refused = accepted.unwrap_err();
    assert!(matches!(refused, Closed::Stranger(_)), "{refused}");
    assert!(events.try_recv().is_err());
}

// All members have the same key: only its greeting tells one from another.
#[test]
fn member_that_is_not_the_expected_one_is_refused() {
    let secret = Secret::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (third, second) = ((MemberId(3), Term(1)), (MemberId(2), Term(4)));
    for (there, expected) in [(third, second), ((second.0, Term(3)), second), (second, second)] {
        let says = Hello { member: Some(there), ..hello() };
        thread::scope(|scope| {
            let accepted = scope.spawn(|| accept(&listener, &secret, says, PATIENCE));
            let tls = secret.tls().unwrap();
            let is_it = |peer: &Hello| peer.member == Some(expected);
            let made = Connection::connect::<Text>(&address, (&tls, hello()), PATIENCE, is_it, |_| {});
            assert_eq!(made.is_ok(), there == expected, "{made:?}");
            assert!(made.is_ok() || made.unwrap_err().to_string() == "the peer is another member");
            drop(accepted.join().unwrap());
        });
    }
}
