//! A link to a server: counts the bytes in each direction, and limits their rate.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CHUNK_BYTES: usize = 64 << 10;

/// A TCP proxy on this machine. It ends with the process.
pub struct Link {
    port: u16,
    up: Arc<Lane>,
    down: Arc<Lane>,
}

/// One direction. A sender takes the next free stretch of time.
struct Lane {
    passed: AtomicU64,
    bytes_per_second: Option<u64>,
    free_at: Mutex<Instant>,
}

impl Lane {
    fn new(bytes_per_second: Option<u64>) -> Arc<Self> {
        Arc::new(Self { passed: AtomicU64::new(0), bytes_per_second, free_at: Mutex::new(Instant::now()) })
    }

    fn pass(&self, bytes: usize) {
        self.passed.fetch_add(bytes as u64, Ordering::Relaxed);
        let Some(rate) = self.bytes_per_second else { return };
        let at = {
            let mut free_at = self.free_at.lock().unwrap();
            *free_at = (*free_at).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / rate as f64);
            *free_at
        };
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
    }
}

impl Link {
    /// A link to a port of this machine, with this rate in each direction; `None`: no limit.
    pub fn to(port: u16, bytes_per_second: Option<u64>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Self {
            port: listener.local_addr().unwrap().port(),
            up: Lane::new(bytes_per_second),
            down: Lane::new(bytes_per_second),
        };
        let (up, down) = (link.up.clone(), link.down.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (up, down) = (up.clone(), down.clone());
                std::thread::spawn(move || forward(from, to, &up));
                std::thread::spawn(move || forward(server, client, &down));
            }
        });
        link
    }

    /// URL of the link: `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Bytes sent to the server so far.
    pub fn sent(&self) -> u64 {
        self.up.passed.load(Ordering::Relaxed)
    }

    /// Bytes received from the server so far.
    pub fn received(&self) -> u64 {
        self.down.passed.load(Ordering::Relaxed)
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, lane: &Lane) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(bytes) = from.read(&mut buffer) {
        if bytes == 0 {
            break;
        }
        lane.pass(bytes);
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}
