//! What the agent and the pool's process say to each other, and how.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use surgetank_pool::frame::{Frames, encode};

use super::super::call::{Ask, Stored};
use super::super::status::PoolStatus;

/// What the agent sends.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToProcess {
    /// The mount is served from now on: other members may come.
    Serving,
    /// Own the directory.
    Claim { id: u64, directory: Box<[u8]>, moves: Option<Moves> },
    /// A directory that is claimed gets this new path, or the request for which some were claimed has failed (`None`).
    Moving { renamed: Option<Renamed> },
    /// What the agent believed of a directory is forgotten.
    Forgotten { token: u64 },
    /// The [`super::super::call::Answer`] to [`FromProcess::Asked`], as it goes to the other member.
    Answered {
        token: u64,
        #[serde(with = "serde_bytes")]
        answer: Vec<u8>,
    },
    /// Give back this directory, and say when the pool knows. Nothing in it is queued.
    GiveBack { id: u64, directory: Box<[u8]> },
    /// Ask the registry for news.
    Look { id: u64 },
    /// Put the content for a lost member's file of this number under its path. `None`: it is a directory.
    /// `syncs`: a sync makes it durable without the store.
    PutBack { id: u64, number: Option<u64>, path: Box<[u8]>, perm: u32, owner: (u32, u32), syncs: bool },
    /// This member is about to get copies of the agent's files.
    MayHold { id: u64, member: u32 },
    /// Where is the member?
    Find { id: u64, member: u32 },
    /// Members may believe the old name, or the old attributes, of this directory: an answer when they do no more.
    /// `thread`: that made the change.
    Changed { id: u64, node: u64, thread: u32 },
    /// Give back all directories. Everything in them is in the store.
    Release { id: u64 },
    /// Which directories of this member another one has looked up, and where they are in the store.
    LookedUp { id: u64, member: u32 },
    /// End the membership, if no other member needs this one.
    Leave { id: u64 },
    /// Close what other members have open: the mount ends.
    Close { id: u64 },
    /// Who is a member, and who owns what.
    Status { id: u64 },
}

/// A directory that is claimed to be renamed, with all below it. Other members know each by the path of its claim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Moves {
    /// The directory that gets another name, with the inode number that programs see.
    Itself(u64),
    /// One below it.
    Below,
}

/// A path, and the next one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Renamed {
    pub from: Box<[u8]>,
    pub to: Box<[u8]>,
}

/// What the process sends.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromProcess {
    /// First: who this member is, all claims, and until when the agent may serve.
    Joined {
        me: Me,
        claims: Vec<(Box<[u8]>, Owner)>,
        lost: Vec<(u32, String)>,
        serves_until: Duration,
    },
    /// First: why there is no membership.
    Refused(String),
    /// The member is lost. The names of its temporaries in the store begin so.
    Lost(u32, String),
    /// Content of a lost member's file is back under its path (0), is not needed there (1), or stays (2).
    PutBack {
        id: u64,
        end: u32,
    },
    /// Who owns a directory now.
    Claims(Box<[u8]>, Owner),
    /// Another member has claimed it.
    Forget {
        token: u64,
        directory: Box<[u8]>,
        owner: Owner,
    },
    /// Another member asks the agent itself.
    Asked {
        token: u64,
        member: u32,
        ask: Ask,
    },
    /// Another member leaves ([`super::super::call::Ask::Leaves`]).
    Leaves {
        member: u32,
        directories: Vec<Stored>,
    },
    LookedUp {
        id: u64,
        directories: Vec<Stored>,
    },
    /// The agent may serve until this time of the machine.
    ServesUntil(Duration),
    Claimed {
        id: u64,
        claimed: Claimed,
    },
    Found {
        id: u64,
        place: Place,
    },
    /// The change is seen by all members.
    Seen {
        id: u64,
    },
    Released {
        id: u64,
    },
    /// `others`: members that still need this one.
    Left {
        id: u64,
        others: u32,
    },
    Closed {
        id: u64,
        handles: u32,
    },
    Status {
        id: u64,
        status: PoolStatus,
    },
}

/// What the agent needs to speak for its member.
#[derive(Serialize, Deserialize)]
pub struct Me {
    /// The member's number, from 1.
    pub member: u32,
    pub term: u32,
    /// The number of the pool's process.
    pub process: u32,
    /// The pool's number.
    pub pool: [u8; 16],
    pub secret: String,
    /// An agent was there before.
    pub had_earlier: bool,
    /// Members that may have copies of its files.
    pub holders: Vec<u32>,
}

impl std::fmt::Debug for Me {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // (Without the secret.)
        f.debug_struct("Me").field("member", &self.member).field("term", &self.term).finish_non_exhaustive()
    }
}

/// Where a member is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// Its term, and `HOST:PORT`.
    At(u32, String),
    Unknown,
    /// It has left, or is lost.
    Gone,
    /// This member is none any more.
    Expelled,
}

/// Who decides the names of a directory of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// The store: the first change claims it.
    TheStore,
    /// This agent.
    Us,
    /// Another member, in this epoch.
    Member(u32, u64),
    /// A member that is lost.
    Lost(u32),
    /// A claim or a release is under way.
    Between,
}

/// The end of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claimed {
    Ours,
    /// Look who owns it.
    NotOurs,
    /// It is not there any more.
    Missing,
    /// The membership has ended.
    Expelled,
    TimedOut,
}

/// Reads one message.
pub fn receive<M: DeserializeOwned>(socket: &mut UnixStream, frames: &mut Frames) -> io::Result<M> {
    let mut bytes = vec![0; 64 << 10];
    loop {
        if let Some(message) = frames.next_message().map_err(io::Error::other)? {
            return Ok(message);
        }
        match socket.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => frames.push(&bytes[..count]),
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
}

/// Writes one message.
pub fn send(socket: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    socket.write_all(&encode(message).map_err(io::Error::other)?)
}
