//! What a member asks another one about files, and the answers: requests of POSIX on nodes of the other member.
//!
//! A node is a file or directory that the asking member has looked up, like a node of the kernel. The owner keeps it
//! until it is forgotten, whatever happens to its names.

mod parts;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_types::model::{Attr, StoreIdentity};

use super::replicas::{Hold, Record};
pub use parts::{
    Change, Content, Copied, Delegated, DelegatedName, Departs, Found, Home, Listed, Lock, LockKind, Moved, Moving,
    Need, Stored, Time,
};

/// A program's request, as its member sends it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The user and group of the program.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// What it wants.
    pub ask: Ask,
}

/// What is asked. `node`, `parent`: from [`Found`]; `handle`: from [`Answer::Opened`] or [`Answer::Created`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The node of a directory of the store, by its path below the root.
    Directory(Box<[u8]>),
    /// The node of a name. `keep`: an open of a file under it has just found that it was replaced. So that the next open
    /// does not, the receiver keeps the file for a moment.
    Lookup {
        parent: u64,
        name: Box<[u8]>,
        keep: bool,
    },
    /// Nodes, and how many look-ups of each are taken back.
    Forget(Vec<(u64, u64)>),
    Attributes {
        node: u64,
        handle: Option<u64>,
    },
    /// The same of a file whose content the asking member has, without what its content decides.
    NameAttributes {
        node: u64,
    },
    SetAttributes {
        node: u64,
        handle: Option<u64>,
        change: Change,
    },
    ReadLink {
        node: u64,
    },
    SymbolicLink {
        parent: u64,
        name: Box<[u8]>,
        target: Box<[u8]>,
    },
    /// `mode` has the type.
    MakeNode {
        parent: u64,
        name: Box<[u8]>,
        mode: u32,
        device: u64,
    },
    MakeDirectory {
        parent: u64,
        name: Box<[u8]>,
        perm: u32,
    },
    Unlink {
        parent: u64,
        name: Box<[u8]>,
    },
    RemoveDirectory {
        parent: u64,
        name: Box<[u8]>,
    },
    /// `flags`: of renameat2(2).
    Rename {
        parent: u64,
        name: Box<[u8]>,
        new_parent: u64,
        new_name: Box<[u8]>,
        flags: u32,
    },
    Link {
        node: u64,
        new_parent: u64,
        new_name: Box<[u8]>,
    },
    /// `flags`: of open(2), with `O_TRUNC`.
    Open {
        node: u64,
        flags: u32,
    },
    /// Opens for reading what the asking member has open as `key`: a file of the store that it opened before this member
    /// claimed the directory. The same key gets the same handle.
    OpenMoved {
        node: u64,
        key: u64,
    },
    /// The asking member's `key` is closed, whether it has a handle or not.
    CloseMoved {
        key: u64,
    },
    /// `flags`: of open(2), with `O_EXCL`.
    Create {
        parent: u64,
        name: Box<[u8]>,
        perm: u32,
        flags: u32,
    },
    Read {
        handle: u64,
        offset: u64,
        bytes: u32,
    },
    /// `at_end`: the program's descriptor has `O_APPEND` by now.
    Write {
        handle: u64,
        offset: u64,
        at_end: bool,
        #[serde(with = "serde_bytes")]
        content: Vec<u8>,
    },
    /// The program's last descriptor has ended.
    Close {
        handle: u64,
    },
    /// The same at the name of a file whose content the asking member has.
    CloseWritten {
        handle: u64,
        content: Content,
    },
    Sync {
        handle: u64,
        data_only: bool,
    },
    /// A program closes a descriptor of a file for which that waits: other members are to have its content.
    Flush {
        handle: u64,
    },
    SyncDirectory {
        node: u64,
    },
    Allocate {
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    },
    /// `whence`: `SEEK_DATA` or `SEEK_HOLE`.
    Seek {
        handle: u64,
        offset: u64,
        whence: u32,
    },
    /// Opens a directory for listing: [`Answer::Opened`].
    OpenDirectory {
        node: u64,
    },
    /// The next names of it, at most 1,000. None: the end.
    /// `from_the_beginning`: as after rewinddir(3).
    List {
        handle: u64,
        from_the_beginning: bool,
    },
    GetXattr {
        node: u64,
        name: Box<[u8]>,
    },
    SetXattr {
        node: u64,
        name: Box<[u8]>,
        value: Box<[u8]>,
        flags: u32,
    },
    ListXattrs {
        node: u64,
    },
    RemoveXattr {
        node: u64,
        name: Box<[u8]>,
    },
    /// The lock that is in the way of this one.
    TestLock {
        handle: u64,
        lock: Lock,
    },
    /// Takes or releases a lock; does not wait (EAGAIN).
    Lock {
        handle: u64,
        lock: Lock,
    },
    /// How far the changes of the asking member's programs are, as [`super::others::Wish`] and
    /// [`super::others::Drained`] in JSON: [`Answer::Bytes`].
    Drain {
        wish: Vec<u8>,
    },
    /// Give back the directory of the store at this path, if it is empty: its parent's owner removes it.
    GiveBack {
        path: Box<[u8]>,
    },
    /// What a user's command asks the agent about its files, in JSON; the answer is [`Answer::Bytes`].
    Tend {
        request: Vec<u8>,
    },
    /// What the member has to drain, and the bytes between it and others, as [`super::others::reports::Report`] in JSON:
    /// [`Answer::Bytes`].
    Report,
    /// Up to which moment (nanoseconds, Unix) the receiver has everything in the store: [`Answer::Count`]. The answer comes when
    /// the owners know all closes of the receiver's programs from before it. `needed_nanos`: the asking member waits for this
    /// moment; 0: for the closes only.
    Published {
        needed_nanos: u64,
    },
    /// The asking member leaves, and the receiver has looked up these directories of it.
    Leaves {
        directories: Vec<Stored>,
    },
    /// A descriptor of this lock owner was closed: its locks on ranges end.
    Unlock {
        handle: u64,
        owner: u64,
    },
    /// The home of a node's content: [`Answer::Home`].
    HomeOf {
        node: u64,
    },
    /// Opens content that the receiver has for another member's file of this number. The same key gets the same handle, and
    /// [`Ask::CloseMoved`] closes it.
    OpenHome {
        number: u64,
        key: u64,
        flags: u32,
    },
    /// Size and times of content that the receiver has for another member's file: [`Answer::Content`].
    HomeAttributes {
        number: u64,
    },
    /// Changes them.
    ChangeHome {
        number: u64,
        change: Change,
    },
    /// Copy the content for a file of the asking member to a temporary in the store, sync and compare it: [`Answer::Staged`].
    Stage {
        number: u64,
        copy: Box<Copied>,
    },
    /// No copy of a try before this one is wanted. Done: none is being made, and none will be.
    EndStage {
        number: u64,
        attempt: u64,
    },
    /// Which of these files still need the content that the asking member has: [`Answer::Needed`].
    Needs {
        numbers: Vec<u64>,
    },
    /// The BLAKE3 hash of content that the receiver has for another member's file: [`Answer::Bytes`].
    SumHome {
        number: u64,
    },
    /// Send that member the content that the receiver has for a file of the asking member: all but the message with which the copy
    /// counts. Done: it is there. EBUSY: a program has synced it, and the store does not have it. `to`: if it is the receiver,
    /// it only says that.
    SendHome {
        to: u32,
        attempt: u64,
        record: Box<Record>,
        is_stored: bool,
    },
    /// What a name leads to: [`Answer::Found`], which does not count as a look-up. The receiver's kernel is not asked: a program
    /// may hold the directory's lock there, and wait for the asking member.
    NameOf {
        who: (u32, u32),
        parent: u64,
        name: Box<[u8]>,
    },
    /// The asking member's content for this file is to go, or is gone. Done: the store has it, and no member is sent there any more.
    EndHome {
        number: u64,
    },
    /// A file of the receiver is to get its name in another member's directory: have the store get it, and keep its names for
    /// this request: [`Answer::Departs`].
    Depart {
        who: (u32, u32),
        parent: u64,
        name: Box<[u8]>,
        mover: Moving,
    },
    /// The request has ended without that.
    Stay {
        parent: u64,
        number: u64,
        mover: Moving,
    },
    /// Make the file's new name in this directory: [`Answer::Count`], its number there.
    Arrive {
        who: (u32, u32),
        parent: u64,
        name: Box<[u8]>,
        moved: Box<Moved>,
        mover: Moving,
        noreplace: bool,
    },
    /// Done: the store has the new name. EAGAIN: not yet.
    Settled {
        parent: u64,
        number: u64,
    },
    /// That member is lost, and this is how the names of its temporaries begin. What have programs of the receiver's node changed
    /// there? [`super::others::written::Changed`] in JSON: [`Answer::Bytes`].
    LostWith {
        member: u32,
        temporaries: String,
    },
    /// The age of the receiver's oldest change that the store does not have: [`Answer::Count`], milliseconds. 0: it has all;
    /// `u64::MAX`: not known.
    OldestAge,
    /// Up to which moment (nanoseconds, Unix) that member had everything in the store, as far as the receiver knows:
    /// [`Answer::Count`]; 0: not known.
    StoredUntil {
        member: u32,
    },
    /// Names that were lost with a member have been made again.
    MadeAgain {
        paths: Vec<Vec<u8>>,
    },
    /// A read delegation of a directory of the receiver: [`Answer::Delegated`]. `from`: the names after so many, of one that has
    /// this number. (0: a new one.)
    Delegate {
        node: u64,
        serial: u64,
        from: u64,
    },
    /// Is it still held? Done: yes.
    IsDelegated {
        node: u64,
        serial: u64,
    },
    /// The content of small files in a directory that is delegated with this number: [`Answer::Contents`].
    Contents {
        node: u64,
        serial: u64,
        files: Vec<u64>,
    },
    /// Which member may have more of a large file in a directory that is delegated with this number: [`Answer::Count`]; 0: none.
    Source {
        node: u64,
        serial: u64,
        file: u64,
    },
    /// A piece of a large file in a directory that a third member has delegated to the asking one and to the receiver:
    /// [`Answer::Bytes`]. EAGAIN: it is not here.
    Piece {
        owner: u32,
        directory: u64,
        file: u64,
        piece: u64,
    },
    /// The read delegations of these directories of the asking member end. Without any: those of all. Done: nothing of them is
    /// believed any more.
    Recall {
        nodes: Vec<u64>,
    },
    /// About copies of the asking member's files that the receiver has, or is to have.
    Hold(Box<Hold>),
    /// Remove the old name: [`Answer::Changed`] if the file was written meanwhile.
    Leave {
        who: (u32, u32),
        parent: u64,
        name: Box<[u8]>,
        moved: Box<Moved>,
        mover: Moving,
    },
    /// Done: the store does not have the old name any more. EAGAIN: it still does.
    Removed {
        parent: u64,
        number: u64,
    },
}

impl Ask {
    /// The receiver's agent answers it, not the pool's process.
    #[must_use]
    pub fn is_for_the_agent(&self) -> bool {
        matches!(
            self,
            Self::Drain { .. }
                | Self::GiveBack { .. }
                | Self::Tend { .. }
                | Self::Report
                | Self::Published { .. }
                | Self::Stage { .. }
                | Self::EndStage { .. }
                | Self::HomeAttributes { .. }
                | Self::ChangeHome { .. }
                | Self::SumHome { .. }
                | Self::SendHome { .. }
                | Self::Needs { .. }
                | Self::EndHome { .. }
                | Self::NameOf { .. }
                | Self::Depart { .. }
                | Self::Stay { .. }
                | Self::Arrive { .. }
                | Self::Settled { .. }
                | Self::Leave { .. }
                | Self::Removed { .. }
                | Self::LostWith { .. }
                | Self::StoredUntil { .. }
                | Self::OldestAge
                | Self::MadeAgain { .. }
                | Self::Delegate { .. }
                | Self::IsDelegated { .. }
                | Self::Contents { .. }
                | Self::Source { .. }
                | Self::Piece { .. }
                | Self::Recall { .. }
                | Self::Hold(_)
        )
    }
}

/// A call or an answer, as it goes to another member.
#[must_use]
pub fn encoded(message: &impl Serialize) -> Vec<u8> {
    // (In one piece of memory: it may have some MiB. Nothing in a message fails to be written.)
    let bytes = postcard::experimental::serialized_size(message).unwrap_or(0);
    postcard::to_extend(message, Vec::with_capacity(bytes)).unwrap_or_default()
}

/// The answer to a [`Call`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Found(Found),
    /// The name is a directory of the store that this member does not own: the asking member looks there itself.
    OfTheStore,
    /// `ttl`: as in [`Found`].
    Attributes {
        attr: Attr,
        ttl: Duration,
    },
    /// `waits`: a writer's close waits until other members have copies ([`Ask::Flush`]).
    Opened {
        handle: u64,
        waits: bool,
    },
    Created {
        found: Found,
        handle: u64,
        waits: bool,
    },
    /// As [`Answer::Opened`] and [`Answer::Created`]: the content is opened at its home, and the handle is to be closed after
    /// that there.
    OpenedAt {
        handle: u64,
        home: Home,
        waits: bool,
    },
    CreatedAt {
        found: Found,
        handle: u64,
        home: Home,
        waits: bool,
        /// The attributes of its directory after that, and how long they may be believed.
        parent: Option<Box<(Attr, Duration)>>,
    },
    Content(Content),
    Home(Option<Home>),
    Staged {
        identity: StoreIdentity,
        checksum: u64,
    },
    /// In the order of the numbers.
    Needed(Vec<Need>),
    Bytes(#[serde(with = "serde_bytes")] Vec<u8>),
    Count(u64),
    Names(Vec<Listed>),
    Lock(Lock),
    Departs(Departs),
    Delegated(Box<Delegated>),
    /// In the order of the files: how long each one is, and then all of them. `None`: it is not given.
    Contents {
        lengths: Vec<Option<u32>>,
        #[serde(with = "serde_bytes")]
        content: Vec<u8>,
    },
    /// The file was written while it was to leave.
    Changed,
    /// The number of the error.
    Failed(i32),
    /// The member does not own the directory any more: the asking member finds out who does.
    NotOwner,
}
