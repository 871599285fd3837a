//! The protocol: one JSON object per line, requests in one direction, answers in the other. Documented in
//! `docs/internals/protocol.md`.
//!
//! The size of a request is bounded before it is parsed. An unknown request gets an error as its answer. No input makes
//! the decoder panic (a fuzzer runs [`decode_request`]).

use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use surgetank_core::report::{
    AgentStatus, Audit, HintOf, Holder, Listing, Lost, PathText, Prefetch, Progress, RefusedHint, Scope, Summary,
    Trouble, Verdict, Visibility, Why,
};
use surgetank_types::error::Error;
use surgetank_types::model::RunId;

/// Both sides must use the same number: agent and verbs come from the same binary but may differ in age.
pub const PROTOCOL: u32 = 2;
/// Longest request line that is read.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Longest answer line that a client reads (lists are bounded; paths may be long).
pub const ANSWER_BYTES_MAX: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// It must be the first request.
    Hello {
        protocol: u32,
    },
    /// The connection becomes a run; it ends with `release` or with the connection.
    Join {
        pid: u32,
        command: String,
        /// The run's number at an earlier agent, which was killed.
        #[serde(default)]
        again: Option<RunId>,
    },
    Status,
    /// The writers that wait for room now: cheap, so that a run can ask every other second.
    Waiting,
    Scrub {
        repair: bool,
    },
    /// The user acknowledges the losses.
    ForgetLosses,
    Why {
        path: PathText,
    },
    /// Final drain of the scope: progress lines, then one verdict.
    Wait {
        scope: Scope,
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    Verdict {
        scope: Scope,
    },
    Summary {
        #[serde(default)]
        run: Option<RunId>,
    },
    Evict {
        path: PathText,
    },
    Pin {
        path: PathText,
        on: bool,
    },
    /// Thousands at once; a request's size is bounded.
    Hint {
        hints: Vec<HintOf>,
    },
    Refresh,
    Prefetch {
        patterns: Vec<PathText>,
    },
    /// Everything in the scope is due at once: its run has a signal to end.
    Hasten {
        scope: Scope,
    },
    /// The agent records each request of this connection's run from now on.
    Trace,
    /// How this connection's run ended, for its record.
    Account(Account),
    /// This connection's run ends.
    Release,
    /// `surgetank umount`: drain, then leave. Progress lines, then a verdict and the end of the connection, or `busy`.
    Unmount {
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
}

/// The facts that `surgetank run` knows about its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    pub command_exit: u8,
    pub exit: u8,
    pub reason: String,
    /// The time since the command ended.
    pub ended_us_ago: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Hello(Hello),
    Joined {
        run: RunId,
    },
    Status(Box<AgentStatus>),
    Waiting(Vec<Trouble>),
    Why(Box<Why>),
    Audit(Box<Audit>),
    Forgotten(Listing<Lost>),
    Progress(Progress),
    Verdict {
        verdict: Box<Verdict>,
        timed_out: bool,
    },
    Summary(Box<Summary>),
    Evicted {
        bytes: u64,
    },
    Hinted {
        refused: Listing<RefusedHint>,
    },
    Prefetching(Prefetch),
    Done,
    /// `last`: no other user or work is left; the agent leaves at once, and the connection closes when it has ended.
    Released {
        last: bool,
        /// The reason, if the run's record is not written.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        unrecorded: String,
    },
    Busy {
        holders: Vec<Holder>,
    },
    Error(Refusal),
}

/// Which agent serves what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    pub version: String,
    pub over: PathText,
    pub store: PathText,
    /// Device number of the served directory as seen through the mount: a program inside recognises the mount by it.
    pub mount_device: u64,
    pub visibility: Visibility,
    /// The preload shim's door, if it is open.
    #[serde(default)]
    pub shim: Option<super::engine::ShimPlace>,
    /// Without a mount: the socket to which runs bring the listeners of their filters.
    #[serde(default)]
    pub listeners: Option<PathText>,
    /// Inode numbers of the agent's namespaces.
    pub user_namespace: u64,
    pub mount_namespace: u64,
    /// A sentence about the leftovers of an earlier agent; empty if there were none.
    pub inherited: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// The request cannot be decoded.
    Malformed,
    /// The peer uses another protocol version.
    Protocol,
    /// The agent is leaving; ask again when it has ended.
    Leaving,
    /// The engine refused.
    Failed,
}

/// An [`Error`] on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub kind: RefusalKind,
    pub what: String,
    #[serde(default)]
    pub why: String,
    #[serde(default)]
    pub remedy: String,
    #[serde(default)]
    pub data: String,
}

impl Refusal {
    pub fn new(kind: RefusalKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), why: String::new(), remedy: String::new(), data: String::new() }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { kind: RefusalKind::Failed, what: error.what, why: error.why, remedy: error.remedy, data: error.data }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self { what: refusal.what, why: refusal.why, remedy: refusal.remedy, data: refusal.data }
    }
}

/// Decodes one request from one line; otherwise the reason.
pub fn decode_request(line: &[u8]) -> Result<Request, Refusal> {
    serde_json::from_slice(line).map_err(|error| {
        let mut refusal = Refusal::new(RefusalKind::Malformed, "the request is not understood");
        refusal.why = error.to_string();
        refusal
    })
}

/// Reads one line of at most `bytes_max`. `None` at the end of the stream.
pub fn read_line(from: &mut impl BufRead, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let got = from.by_ref().take(bytes_max as u64 + 1).read_until(b'\n', &mut line)?;
    if got == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(Some(line));
    }
    if got > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line longer than {bytes_max} bytes")));
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// Reads one message; `None` at the end of the stream.
pub fn read<T: DeserializeOwned>(from: &mut impl BufRead, bytes_max: usize) -> io::Result<Option<T>> {
    match read_line(from, bytes_max)? {
        None => Ok(None),
        Some(line) => Ok(Some(serde_json::from_slice(&line)?)),
    }
}

/// Writes one message with a single write.
pub fn write<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_survive_the_wire() {
        for request in [
            Request::Hello { protocol: PROTOCOL },
            Request::Status,
            Request::Scrub { repair: true },
            Request::Why { path: PathText(b"a\xff".to_vec()) },
            Request::Wait { scope: Scope::run(RunId(3)), timeout_ms: Some(5) },
            Request::Release,
        ] {
            let mut line = Vec::new();
            write(&mut line, &request).unwrap();
            let mut from = line.as_slice();
            let read_back = read_line(&mut from, REQUEST_BYTES_MAX).unwrap().unwrap();
            assert_eq!(decode_request(&read_back).unwrap(), request);
        }
    }

    #[test]
    fn line_too_long_or_cut_off_is_an_error() {
        assert_eq!(read_line(&mut &b"12345\n"[..], 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read_line(&mut &b"12345\n"[..], 6).unwrap().unwrap(), b"12345");
        assert_eq!(read_line(&mut &b"123"[..], 6).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(read_line(&mut &b""[..], 6).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            if let Err(refusal) = decode_request(&bytes) {
                prop_assert_eq!(refusal.kind, RefusalKind::Malformed);
            }
        }

        #[test]
        fn nearly_right_requests_never_panic(verb in "[a-z_]{0,8}", depth in 0usize..200, number in any::<i64>()) {
            let line = format!("{{\"{verb}\":{}{number}{}}}", "[".repeat(depth), "]".repeat(depth));
            let _ = decode_request(line.as_bytes()).is_ok();
        }
    }
}
