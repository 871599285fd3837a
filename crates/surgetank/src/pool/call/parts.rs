//! What requests and answers between members consist of.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_policy::hint::Acting;
use surgetank_types::model::{Attr, Kind, StoreIdentity, Timestamp, Xattrs};

use crate::mount::{SetAttr, TimeChange};

/// A copy in the store: as which user, where, under which name later, and with which attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    pub who: (u32, u32),
    pub path: Box<[u8]>,
    pub bound: Box<[u8]>,
    pub perm: u32,
    pub owner: (u32, u32),
    pub times: Option<(Timestamp, Timestamp)>,
    pub xattrs: Option<Xattrs>,
    pub acting: Acting,
    /// Grows with each try.
    pub attempt: u64,
}

/// A request that renames a file between two members' directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// The kernel's number of it at the asking member.
    pub request: u64,
    /// An earlier agent there may have asked for the same.
    pub again: bool,
}

/// A file that gets its name in another member's directory, as the store has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Its number at the member that had it.
    pub number: u64,
    /// Below the store's root.
    pub path: Box<[u8]>,
    pub identity: StoreIdentity,
    /// User and group.
    pub owner: (u32, u32),
}

/// May a file get its name in another member's directory?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departs {
    Now(Box<Moved>),
    /// The store does not have all of it.
    NotYet,
    /// A program may still write it.
    IsOpen,
}

/// Content at its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// Its size, blocks and times.
    pub attr: Attr,
    /// The home's time (`CLOCK_BOOTTIME`) before it looked.
    pub stamp_nanos: u64,
}

/// The member that has a file's content, and the file's number there: that at the owner of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    pub member: u32,
    pub number: u64,
}

/// What becomes of content at its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Need {
    /// It is the only copy.
    Needed,
    /// The store has it.
    InStore,
    /// The file was removed.
    Gone,
}

/// New attributes. A `None` stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Change {
    pub perm: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size_bytes: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
}

impl Change {
    /// What a request changes.
    pub fn of(change: &SetAttr) -> Self {
        let time = |time: Option<TimeChange>| {
            time.map(|time| match time {
                TimeChange::Now => Time::Now,
                TimeChange::At(time) => Time::At(time),
            })
        };
        let SetAttr { perm, uid, gid, size_bytes, atime, mtime, .. } = *change;
        Self { perm, uid, gid, size_bytes, atime: time(atime), mtime: time(mtime) }
    }
}

/// A new time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Time {
    /// That of the owner's clock.
    Now,
    At(Timestamp),
}

/// A lock of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// The number of the lock owner at the asking member.
    pub owner: u64,
    /// flock(2), for the whole file.
    pub flock: bool,
    pub kind: LockKind,
    /// First and last byte of the range; `i64::MAX`: to the end.
    pub first: u64,
    pub last: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockKind {
    Shared,
    Exclusive,
    /// Unlocks, or says that nothing is in the way.
    None,
}

/// A node. Each one that is answered counts as a look-up, until [`super::Ask::Forget`] takes it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    pub node: u64,
    pub attr: Attr,
    /// So long the name and the attributes may be believed, from the request on: that of a directory. Else none.
    pub ttl: Duration,
}

/// A directory whose names are all in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    pub node: u64,
    /// Below the store's root.
    pub path: Box<[u8]>,
    /// Its inode number in the store.
    pub ino: u64,
}

/// One name of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub ino: u64,
    pub kind: Kind,
    pub name: Box<[u8]>,
}

/// A directory that the asking member may answer for, until it is recalled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delegated {
    pub serial: u64,
    pub attr: Attr,
    /// In their order.
    pub names: Vec<DelegatedName>,
    /// There are no more names.
    pub is_all: bool,
}

/// One name of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelegatedName {
    pub name: Box<[u8]>,
    pub node: u64,
    pub ino: u64,
    pub kind: Kind,
    /// `None`: they are to be asked for.
    pub attr: Option<Attr>,
}
