//! The protocol: one JSON object per line, requests in one direction, answers in the other. Documented in
//! `docs/internals/protocol.md`.
//!
//! The size of a request is bounded before it is parsed. An unknown request gets an error as its answer. No input makes
//! the decoder panic (a fuzzer runs [`decode_request`]).

use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use surgetank_core::report::{
    AgentStatus, Audit, CopyOn, HintOf, Holder, Listing, Located, Lost, PathText, Prefetch, Progress, RefusedHint,
    Same, Scope, Summary, Trouble, Verdict, Visibility, Why,
};
use surgetank_types::error::Error;
use surgetank_types::model::RunId;

use crate::pool::status::PoolStatus;

/// Both sides must use the same number: agent and verbs come from the same binary but may differ in age.
pub const PROTOCOL: u32 = 2;
/// Longest request line that is read.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Longest answer line that a client reads (lists are bounded; paths may be long).
pub const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// It must be the first request.
    Hello {
        /// The client's [`PROTOCOL`].
        protocol: u32,
    },
    /// The connection becomes a run; it ends with `release` or with the connection.
    Join {
        /// The process id of the run: `surgetank run` itself.
        pid: u32,
        /// The command line, for people.
        command: String,
        /// The run's number at an earlier agent, which was killed.
        #[serde(default)]
        again: Option<RunId>,
    },
    /// The state of the agent: [`Answer::Status`].
    Status,
    /// The pool that the agent is a member of: [`Answer::Pool`].
    Pool,
    /// The writers that wait for room now: cheap, so that a run can ask every other second.
    Waiting,
    /// Every copy that tier and store both have is read and compared: [`Answer::Audit`].
    Scrub {
        /// The agent repairs what it can.
        repair: bool,
    },
    /// The user acknowledges the losses.
    ForgetLosses,
    /// Where a file is, and why: [`Answer::Why`].
    Why {
        /// A path below the served directory.
        path: PathText,
    },
    /// Where the contents of files are, over all members of a pool: [`Answer::Located`].
    Locate {
        /// Paths below the served directory.
        paths: Vec<PathText>,
    },
    /// Between members of a pool: which copies the receiver has: [`Answer::Copies`].
    Copies {
        /// Of the asking member's files, and of others', by number.
        numbers: Vec<u64>,
        /// Of files in directories that no member has claimed.
        files: Vec<Same>,
    },
    /// Final drain of the scope: progress lines, then one verdict.
    Wait {
        /// The files that the client waits for.
        scope: Scope,
        /// The limit of the wait in milliseconds; `None`: no limit.
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    /// The scope's verdict now, without a drain: [`Answer::Verdict`].
    Verdict {
        /// The files in question.
        scope: Scope,
    },
    /// The counters of tiers, drain and mount: [`Answer::Summary`].
    Summary {
        /// The run whose final drain and files without room are reported; `None`: all runs.
        #[serde(default)]
        run: Option<RunId>,
    },
    /// Durable files leave the tiers: [`Answer::Evicted`].
    Evict {
        /// A file, or a directory with all files below it.
        path: PathText,
    },
    /// Files stay in their tier, or may leave it again: [`Answer::Done`].
    Pin {
        /// A file or directory below the served directory.
        path: PathText,
        /// `false` removes the pin.
        on: bool,
    },
    /// Thousands at once; a request's size is bounded.
    Hint {
        /// The hints, one entry a path.
        hints: Vec<HintOf>,
    },
    /// Changes by other clients of the store become visible: [`Answer::Done`].
    Refresh,
    /// Files of the store come to the tiers: [`Answer::Prefetching`].
    Prefetch {
        /// Paths or globs below the served directory.
        patterns: Vec<PathText>,
    },
    /// Everything in the scope is due at once: its run has a signal to end.
    Hasten {
        /// The files that are due.
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
        /// The limit of the drain in milliseconds; `None`: no limit.
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
}

/// The facts that `surgetank run` knows about its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// The exit code of the command.
    pub command_exit: u8,
    /// The exit code of `surgetank run`.
    pub exit: u8,
    /// The reason why `exit` differs from the command's code; empty if it does not.
    pub reason: String,
    /// The time since the command ended, in microseconds.
    pub ended_us_ago: u64,
}

/// The agent's answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The answer to [`Request::Hello`].
    Hello(Hello),
    /// The answer to [`Request::Join`].
    Joined {
        /// The run's number.
        run: RunId,
    },
    /// The answer to [`Request::Status`].
    Status(Box<AgentStatus>),
    /// The answer to [`Request::Pool`]; `None`: the agent belongs to none.
    Pool(Option<Box<PoolStatus>>),
    /// The answer to [`Request::Waiting`]: the writers without room.
    Waiting(Vec<Trouble>),
    /// The answer to [`Request::Why`].
    Why(Box<Why>),
    /// The answer to [`Request::Locate`].
    Located {
        /// In the order of the paths; or why a file cannot be found.
        files: Vec<std::result::Result<Located, String>>,
    },
    /// The answer to [`Request::Copies`].
    Copies {
        /// In the order of the numbers, and then of the files.
        copies: Vec<Option<CopyOn>>,
    },
    /// The answer to [`Request::Scrub`].
    Audit(Box<Audit>),
    /// The answer to [`Request::ForgetLosses`]: the losses that are not reported any more.
    Forgotten(Listing<Lost>),
    /// A state of the drain, before the verdict of [`Request::Wait`] or [`Request::Unmount`].
    Progress(Progress),
    /// The end of [`Request::Wait`], or the answer to [`Request::Verdict`].
    Verdict {
        /// The files that are not durable, and the reasons.
        verdict: Box<Verdict>,
        /// The time limit ended before the drain.
        timed_out: bool,
    },
    /// The answer to [`Request::Summary`].
    Summary(Box<Summary>),
    /// The answer to [`Request::Evict`].
    Evicted {
        /// The bytes that the tiers have free again.
        bytes: u64,
    },
    /// The answer to [`Request::Hint`].
    Hinted {
        /// The hints that the agent refuses, and the reasons.
        refused: Listing<RefusedHint>,
    },
    /// The answer to [`Request::Prefetch`]: the work that began.
    Prefetching(Prefetch),
    /// The request succeeded and has no other answer.
    Done,
    /// The answer to [`Request::Release`].
    Released {
        /// No other user or work is left: the agent leaves at once, and the connection closes when it has ended.
        last: bool,
        /// The reason, if the run's record is not written.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        unrecorded: String,
    },
    /// Not the last answer to [`Request::Unmount`]: the mount waits for other members of the pool.
    Waits {
        /// How many.
        members: usize,
        /// Until they have left; else until they have closed files of this one.
        to_leave: bool,
    },
    /// The directory is in use: the answer to [`Request::Unmount`].
    Busy {
        /// The processes that use it.
        holders: Vec<Holder>,
    },
    /// The agent refuses the request.
    Error(Refusal),
}

/// Which agent serves what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The agent's [`PROTOCOL`].
    pub protocol: u32,
    /// The agent's version of Surgetank.
    pub version: String,
    /// The served directory.
    pub over: PathText,
    /// The store: a directory, or the address of a server.
    pub store: PathText,
    /// Device number of the served directory as seen through the mount: a program inside recognises the mount by it.
    pub mount_device: u64,
    /// The programs that see the mount.
    pub visibility: Visibility,
    /// The preload shim's door, if it is open.
    #[serde(default)]
    pub shim: Option<super::engine::ShimPlace>,
    /// Without a mount: the socket to which runs bring the listeners of their filters.
    #[serde(default)]
    pub listeners: Option<PathText>,
    /// Inode number of the agent's user namespace.
    pub user_namespace: u64,
    /// Inode number of the agent's mount namespace.
    pub mount_namespace: u64,
    /// A sentence about the leftovers of an earlier agent; empty if there were none.
    pub inherited: String,
    /// The pool of which the agent is a member.
    #[serde(default)]
    pub pool: Option<String>,
}

/// The kind of a [`Refusal`].
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
    /// The cause, for programs.
    pub kind: RefusalKind,
    /// The failure, as in [`Error::what`].
    pub what: String,
    /// The cause, as in [`Error::why`]; may be empty.
    #[serde(default)]
    pub why: String,
    /// The next step, as in [`Error::remedy`]; may be empty.
    #[serde(default)]
    pub remedy: String,
    /// The state of the data, as in [`Error::data`]; may be empty.
    #[serde(default)]
    pub data: String,
}

impl Refusal {
    pub(crate) fn new(kind: RefusalKind, what: impl Into<String>) -> Self {
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
