//! Connections, and what is sent over them: commands packed here, so that a value is copied once, and answers of the crate
//! `redis`.
//!
//! A connection belongs to one thread while it asks. After any error it is dropped. A batch is sent whole and can be sent
//! again: everything in it may be done twice.

use std::time::Duration;

use redis::{Connection, ConnectionLike, Value};

use super::failure::Failure;
use super::nodes::Nodes;
use super::place::{Limits, Place};
use super::scripts::TEXTS;
use crate::checksum::Checksum;
use crate::object::Body;
use surgetank_types::error::Error;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most idle connections.
const IDLE_MAX: usize = 32;
const CHUNK_BYTES: usize = 1 << 20;
/// Most redirections in a row; no cluster needs more.
const MOVES_MAX: u32 = 8;
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Requests and connections since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Round trips; every try counts.
    pub requests: u64,
    /// How many of them were another try.
    pub tries_again: u64,
    /// Connections that were opened.
    pub connections: u64,
}

#[derive(Default)]
pub struct Counters {
    requests: AtomicU64,
    tries_again: AtomicU64,
    connections: AtomicU64,
}

impl Counters {
    pub fn read(&self) -> Counts {
        Counts {
            requests: self.requests.load(Ordering::Relaxed),
            tries_again: self.tries_again.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
        }
    }
}

/// Bytes that are kept free before the first command for its prefix, so that a long value need not move.
const ROOM: usize = 24;

/// One command in the server's encoding, without the number of its words.
pub struct Command {
    bytes: Vec<u8>,
    words: usize,
}

pub fn command(name: &str) -> Command {
    Command { bytes: vec![0; ROOM], words: 0 }.arg(name.as_bytes())
}

impl Command {
    #[must_use]
    pub fn arg(mut self, word: &[u8]) -> Self {
        self.bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        self.bytes.extend_from_slice(word);
        self.bytes.extend_from_slice(b"\r\n");
        self.words += 1;
        self
    }

    #[must_use]
    pub fn number(self, number: u64) -> Self {
        self.arg(number.to_string().as_bytes())
    }

    /// Appends a body, which must have the checksum.
    pub fn body(mut self, body: &dyn Body, crc64nvme: u64) -> std::io::Result<Self> {
        let size = usize::try_from(body.len()).map_err(std::io::Error::other)?;
        // With space for what follows.
        self.bytes.reserve_exact(size + 2 * ROOM * ROOM);
        self.bytes.extend_from_slice(format!("${size}\r\n").as_bytes());
        let start = self.bytes.len();
        self.bytes.resize(start + size, 0);
        let mut sum = Checksum::default();
        for (nth, chunk) in self.bytes[start..].chunks_mut(CHUNK_BYTES).enumerate() {
            body.read_at(chunk, (nth * CHUNK_BYTES) as u64)?;
            sum.bytes(chunk);
        }
        if sum.value() != crc64nvme {
            let text = "the source does not have its checksum";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        self.bytes.extend_from_slice(b"\r\n");
        self.words += 1;
        Ok(self)
    }
}

/// Commands that are sent together.
pub struct Batch {
    /// From `start` on.
    bytes: Vec<u8>,
    start: usize,
    commands: usize,
    at_once: bool,
}

impl Batch {
    pub fn of(command: Command) -> Self {
        let mut batch = Self { bytes: command.bytes, start: ROOM, commands: 1, at_once: false };
        batch.put_before(format!("*{}\r\n", command.words).as_bytes());
        batch
    }

    #[must_use]
    pub fn and(mut self, command: Command) -> Self {
        self.bytes.extend_from_slice(format!("*{}\r\n", command.words).as_bytes());
        self.bytes.extend_from_slice(&command.bytes[ROOM..]);
        self.commands += 1;
        self
    }

    /// In one transaction: no other client's command comes between.
    #[must_use]
    pub fn at_once(mut self) -> Self {
        self.put_before(b"*1\r\n$5\r\nMULTI\r\n");
        self.bytes.extend_from_slice(b"*1\r\n$4\r\nEXEC\r\n");
        self.at_once = true;
        self
    }

    fn put_before(&mut self, head: &[u8]) {
        let end = self.start;
        self.start -= head.len();
        self.bytes[self.start..end].copy_from_slice(head);
    }
}

/// A connection, the number of the server for which it was made, and the server's `run_id` (empty if it may not be asked).
struct Live {
    connection: Connection,
    turn: u64,
    run: Arc<str>,
    is_fresh: bool,
}

/// The result of a try.
struct Tried {
    turn: u64,
    is_fresh: bool,
    answers: Result<(Vec<Value>, Arc<str>), Failure>,
}

pub struct Wire {
    pub nodes: Nodes,
    limits: Limits,
    idle: Mutex<Vec<Live>>,
    /// `run_id`s of the servers that have acknowledged something since the last reset.
    heard: Mutex<Vec<Arc<str>>>,
    pub counters: Counters,
}

impl Wire {
    pub fn new(place: &Place) -> Result<Self, Error> {
        let (nodes, limits) = (Nodes::new(place)?, place.limits.clone());
        Ok(Self { nodes, limits, idle: Mutex::default(), heard: Mutex::default(), counters: Counters::default() })
    }

    /// The answers to all commands, or the first that is an error; tried again while that may help.
    pub fn ask(&self, batch: &Batch) -> Result<Vec<Value>, Failure> {
        Ok(self.ask_whom(batch)?.0)
    }

    /// Whether a server other than this one acknowledged something. Each is reported once.
    pub fn have_others_acknowledged(&self, run: &str) -> bool {
        let mut heard = self.heard();
        let before = heard.len();
        heard.retain(|one| **one == *run);
        heard.len() < before
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Arc<str>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like `ask`, with the `run_id` of the server that answered.
    pub fn ask_whom(&self, batch: &Batch) -> Result<(Vec<Value>, Arc<str>), Failure> {
        let begun = surgetank_types::clock::tick();
        let mut pause = self.limits.pause;
        let mut nth = 1;
        let mut moves = 0;
        loop {
            let Tried { turn, is_fresh, answers } = self.ask_once(batch);
            let why = match answers {
                Ok(answers) => {
                    let mut heard = self.heard();
                    if !heard.contains(&answers.1) {
                        heard.push(Arc::clone(&answers.1));
                    }
                    return Ok(answers);
                }
                Err(why) => why,
            };
            let at_once = self.nodes.heed(turn, is_fresh, &why) && moves < MOVES_MAX;
            if !self.nodes.is_now(turn) {
                self.idle().retain(|idle| self.nodes.is_now(idle.turn));
            }
            if at_once {
                moves += 1;
                continue;
            }
            if !why.again || nth >= self.limits.tries || begun.elapsed() >= self.limits.all_tries {
                return Err(why);
            }
            tracing::debug!(nth, "another try: {why}");
            surgetank_types::sync::thread::sleep(part_of(pause).min(PAUSE_MAX));
            self.counters.tries_again.fetch_add(1, Ordering::Relaxed);
            (pause, nth) = ((pause * 3).min(PAUSE_MAX * 3), nth + 1);
        }
    }

    fn ask_once(&self, batch: &Batch) -> Tried {
        let mut live = match self.connection() {
            Ok(live) => live,
            Err((turn, why)) => return Tried { turn, is_fresh: true, answers: Err(why) },
        };
        let (turn, is_fresh, run) = (live.turn, live.is_fresh, Arc::clone(&live.run));
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        let (skipped, count) = if batch.at_once { (batch.commands + 1, 1) } else { (0, batch.commands) };
        let asked = live.connection.req_packed_commands(&batch.bytes[batch.start..], skipped, count);
        // If a connection broke, the idle ones are usually broken too: each would cost a try.
        let asked = asked.map_err(Failure::of).inspect_err(|why| {
            if why.code.is_empty() {
                self.idle().clear()
            }
        });
        let answers = asked.and_then(|mut answers| match batch.at_once {
            true => array_of(answers.pop().unwrap_or_default()),
            false => Ok(answers),
        });
        let answers = answers.and_then(|answers| {
            let answer = |answer| match answer {
                Value::ServerError(why) => Err(Failure::of(why.into())),
                answer => Ok(answer),
            };
            answers.into_iter().map(answer).collect::<Result<Vec<Value>, Failure>>()
        });
        // A server without the scripts gets them with the next connection.
        if !answers.as_ref().is_err_and(|why| why.again || why.code.is_empty()) {
            let mut idle = self.idle();
            if idle.len() < IDLE_MAX {
                live.is_fresh = false;
                idle.push(live);
            }
        }
        Tried { turn, is_fresh, answers: answers.map(|answers| (answers, run)) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Live>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> Result<Live, (u64, Failure)> {
        if let Some(idle) = self.idle().pop() {
            return Ok(idle);
        }
        let (client, turn) = self.nodes.now();
        let connect = || -> redis::RedisResult<Connection> {
            let mut connection = client.get_connection_with_timeout(self.limits.connect)?;
            connection.set_read_timeout(Some(self.limits.progress))?;
            connection.set_write_timeout(Some(self.limits.progress))?;
            let mut load = redis::pipe();
            for text in TEXTS {
                load.cmd("SCRIPT").arg("LOAD").arg(text).ignore();
            }
            load.query::<()>(&mut connection)?;
            Ok(connection)
        };
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        let mut connection = connect().map_err(|why| (turn, Failure::of(why)))?;
        // The other servers are known only while one can be asked.
        if self.nodes.is_cluster() {
            match redis::cmd("CLUSTER").arg("NODES").query::<String>(&mut connection) {
                Ok(told) => self.nodes.learn(&told),
                Err(why) => match Failure::of(why) {
                    why if why.code == "NOPERM" => {}
                    // Another server has the address now, and does not belong to the cluster.
                    why => return Err((turn, Failure { again: true, code: "CLUSTERDOWN".into(), ..why })),
                },
            }
        }
        let info = redis::cmd("INFO").arg("server").query::<String>(&mut connection).unwrap_or_default();
        let run = info.lines().find_map(|line| line.trim_end().strip_prefix("run_id:")).unwrap_or_default();
        Ok(Live { connection, turn, run: run.into(), is_fresh: true })
    }
}

/// A random part of the pause: clients that failed together must not return together.
fn part_of(pause: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0);
    Duration::from_nanos(random % u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX).max(1))
}

// ---- answers

pub fn bytes_of(answer: Value) -> Result<Vec<u8>, Failure> {
    match answer {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.into_bytes()),
        Value::Okay => Ok(b"OK".to_vec()),
        Value::Int(number) => Ok(number.to_string().into_bytes()),
        Value::ServerError(why) => Err(Failure::of(why.into())),
        _ => Err(Failure::garbled()),
    }
}

pub fn text_of(answer: Value) -> Result<String, Failure> {
    String::from_utf8(bytes_of(answer)?).map_err(|_| Failure::garbled())
}

pub fn array_of(answer: Value) -> Result<Vec<Value>, Failure> {
    match answer {
        Value::Array(values) => Ok(values),
        Value::ServerError(why) => Err(Failure::of(why.into())),
        _ => Err(Failure::garbled()),
    }
}
