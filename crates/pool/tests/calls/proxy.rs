//! The network between a caller and a receiver: cuts connections, or holds what the caller sends.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

pub struct Proxy {
    pub address: String,
    state: Mutex<State>,
    changed: Condvar,
    cuts: [AtomicUsize; 2],
}

#[derive(Default)]
struct State {
    /// After so many bytes of a connection it is cut.
    cut_after: Option<[Range<usize>; 2]>,
    /// So many bytes of callers go through.
    room: Option<usize>,
    sockets: Vec<TcpStream>,
}

impl Proxy {
    pub fn stand_before(receiver: &str) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let proxy =
            Arc::new(Self { address, state: Mutex::default(), changed: Condvar::new(), cuts: Default::default() });
        let (accepts, receiver) = (proxy.clone(), receiver.to_owned());
        thread::spawn(move || {
            for caller in listener.incoming() {
                let (caller, receiver) = (caller.unwrap(), TcpStream::connect(&receiver).unwrap());
                caller.set_nodelay(true).unwrap();
                receiver.set_nodelay(true).unwrap();
                accepts
                    .state
                    .lock()
                    .unwrap()
                    .sockets
                    .extend([caller.try_clone().unwrap(), receiver.try_clone().unwrap()]);
                for direction in 0..2 {
                    let (from, to) = (caller.try_clone().unwrap(), receiver.try_clone().unwrap());
                    let (from, to) = if direction == 0 { (from, to) } else { (to, from) };
                    let proxy = accepts.clone();
                    thread::spawn(move || proxy.pass(direction, from, to));
                }
            }
        });
        proxy
    }

    /// From now on each connection is cut after a number of bytes of one of these ranges, in one direction.
    pub fn cut_after(&self, bytes: [Range<usize>; 2]) {
        self.state.lock().unwrap().cut_after = Some(bytes);
    }

    /// So many bytes of callers go through. All others wait.
    pub fn hold_after(&self, bytes: usize) {
        self.state.lock().unwrap().room = Some(bytes);
    }

    pub fn let_through(&self) {
        self.state.lock().unwrap().room = None;
        self.changed.notify_all();
    }

    /// Ends the connections so far, as their callers did.
    pub fn end_those_held(&self) {
        for socket in self.state.lock().unwrap().sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// How often it cut: while a caller sent, while a receiver replied.
    pub fn cuts(&self) -> (usize, usize) {
        (self.cuts[0].load(Ordering::Relaxed), self.cuts[1].load(Ordering::Relaxed))
    }

    fn pass(&self, direction: usize, from: TcpStream, to: TcpStream) {
        let ranges = self.state.lock().unwrap().cut_after.clone();
        let mut left = ranges.map(|ranges| fastrand::usize(fastrand::choice(ranges).unwrap()));
        let mut bytes = vec![0; 16 << 10];
        while let Ok(count @ 1..) = (&from).read(&mut bytes) {
            if direction == 0 {
                self.wait_for_room(count);
            }
            let passes = left.map_or(count, |left| left.min(count));
            let is_sent = (&to).write_all(&bytes[..passes]).is_ok();
            if let Some(left) = &mut left {
                *left -= passes;
                if *left == 0 {
                    self.cuts[direction].fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
            if !is_sent {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    fn wait_for_room(&self, bytes: usize) {
        let mut state = self.state.lock().unwrap();
        while state.room.is_some_and(|room| room < bytes) {
            state = self.changed.wait(state).unwrap();
        }
        if let Some(room) = &mut state.room {
            *room -= bytes;
        }
    }
}
