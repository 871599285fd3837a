//! The store: the authoritative place of every file. Drivers share one interface, [`Store`], and one conformance suite.
//!
//! The drain works in two steps, so that copying can be parallel and publishing ordered. *Staging* puts a complete copy under a
//! temporary name in the destination directory (or inside a staged directory). *Publishing* makes it visible by one atomic
//! step.
//!
//! Invariant: an incomplete copy never has its final name.

#![warn(missing_docs)]

#[macro_use]
extern crate surgetank_types;

mod at_once;
pub mod blocks;
pub mod checksum;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod extents;
#[cfg(feature = "gridfs")]
pub mod gridfs;
#[cfg(any(feature = "s3", feature = "webhdfs"))]
mod http;
pub mod object;
#[cfg(any(feature = "compress", feature = "dedup"))]
pub mod packed;
pub mod posix;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "s3")]
pub mod s3;
mod sites;
pub mod source;
pub mod verdict;
#[cfg(feature = "webhdfs")]
pub mod webhdfs;

pub use at_once::at_once;
pub use blocks::BlockSums;
pub use sites::sites;
pub use source::{Remote, Source};

use std::fs::File;
use std::io;

use surgetank_types::model::{Attr, Kind, PART_PREFIX, STORE_TEMPORARY_PREFIX, StoreIdentity, Timestamp, Xattrs};

/// A path in the store, relative to its root, as any bytes; empty is the root itself. Never absolute, never with `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StorePath(pub Vec<u8>);

impl StorePath {
    /// The root of the store.
    pub fn root() -> Self {
        Self(Vec::new())
    }
    /// The path of a name in this directory.
    #[must_use]
    pub fn join(&self, name: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(self.0.len() + 1 + name.len());
        bytes.extend_from_slice(&self.0);
        if !bytes.is_empty() {
            bytes.push(b'/');
        }
        bytes.extend_from_slice(name);
        Self(bytes)
    }
    /// The directory that contains this path; the root contains itself.
    #[must_use]
    pub fn parent(&self) -> Self {
        let slash = self.0.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        Self(self.0[..slash].to_vec())
    }
    /// The temporary beside this path for a copy that is staged in or out. It is the same at every call, so that an interrupted
    /// copy can continue.
    ///
    /// On a server (`None`) it has the drain's prefix. In a directory it has its own prefix, because a served directory refuses
    /// the drain's names, and differs for each owner.
    #[must_use]
    pub fn part(&self, in_directory: Option<&[u8]>) -> Self {
        let prefix = if in_directory.is_some() { PART_PREFIX.as_bytes() } else { STORE_TEMPORARY_PREFIX };
        let owner = in_directory.unwrap_or_default();
        let number = format!("{:016x}", checksum::of_bytes(&[&self.0, owner].concat()));
        self.parent().join(&[prefix, number.as_bytes()].concat())
    }
    /// Whether a component has the drain's prefix: the drain may replace and remove everything below it.
    pub fn is_temporary(&self) -> bool {
        self.0.split(|byte| *byte == b'/').any(|name| name.starts_with(STORE_TEMPORARY_PREFIX))
    }
    /// Whether the name is one of [`Self::part`]. (In a served store it may also be a file of another program.)
    pub fn is_part(&self) -> bool {
        self.0.rsplit(|byte| *byte == b'/').next().is_some_and(|name| name.starts_with(PART_PREFIX.as_bytes()))
    }
    /// Whether this path is below the directory, at any depth. Every path is below the root.
    pub fn is_below(&self, dir: &Self) -> bool {
        dir.0.is_empty() || self.0.strip_prefix(&*dir.0).is_some_and(|rest| rest.first() == Some(&b'/'))
    }
}

impl std::fmt::Display for StorePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// The ids with which store I/O is done (root_squash, quota). They differ from the agent's only if the agent is privileged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cred {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A file in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreStat {
    /// Its attributes.
    pub attr: Attr,
    /// What identifies this version of it.
    pub identity: StoreIdentity,
}

/// A name in a directory of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreEntry {
    /// The name, as any bytes.
    pub name: Box<[u8]>,
    /// The type of the file.
    pub kind: Kind,
    /// Its inode number.
    pub ino: u64,
}

/// Space of the store, as the calling user may use it (`statfs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// Size of the file system.
    pub total_bytes: u64,
    /// Free bytes, with those that are reserved for root.
    pub free_bytes: u64,
    /// Free bytes that an ordinary user may use.
    pub available_bytes: u64,
    /// Number of inodes; 0 if there is no limit.
    pub inodes_total: u64,
    /// Number of free inodes.
    pub inodes_free: u64,
    /// Longest name, in bytes.
    pub name_bytes_max: u32,
    /// Size of a block.
    pub block_bytes: u32,
}

/// What must have the final name just before publishing; anything else is a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Nothing.
    Absent,
    /// Exactly this version.
    Identity(StoreIdentity),
    /// This version of a file with several names, whose ctime changes when a name is added or removed.
    Linked(StoreIdentity),
    /// This file, which a program writes in place: only its inode number is constant.
    Inode(u64),
    /// Unknown (first contact after recovery of an old record): nothing may be overwritten; an absent name is accepted.
    Unknown,
}

/// How a staged copy is verified (`docs/semantics.md`, "Verification").
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// After the sync, through the page cache: finds short copies and bytes that were damaged on the way.
    Cache,
    /// Dropped from the page cache and read back from the device.
    Reread,
}

/// All of a file but its content, as it is to be in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Access and modification time; `None` leaves both unchanged (a program writes the file in place).
    pub times: Option<(Timestamp, Timestamp)>,
    /// Exactly these `user.*` attributes; `None` leaves them unchanged.
    pub xattrs: Option<Xattrs>,
}

/// Called between chunks of a copy with the number of bytes just moved: throttles, counts, and may stop the copy
/// (`Err(Interrupted)`).
pub type Gate<'a> = &'a (dyn Fn(u64) -> io::Result<()> + Sync);

/// A complete copy under a temporary name, not visible yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staged {
    /// What identifies the copy in the store.
    pub identity: StoreIdentity,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
}

/// Abilities that not every store has. The drain and the namespace choose their precautions by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Content is in plain files, which can be opened, written in place and spilled to.
    pub plain_files: bool,
    /// A file can have several names.
    pub hard_links: bool,
    /// Directories are objects of their own: they have times, which change with their entries, and temporaries in them are
    /// visible to other clients.
    pub directories: bool,
    /// A rename is one step. Otherwise a crash can leave a file under both names.
    pub atomic_renames: bool,
    /// Number of files that are settled, compared and published at the same time, because a request takes long.
    pub publications_at_once: usize,
}

impl Features {
    /// The features of a local file system.
    pub const POSIX: Self =
        Self { plain_files: true, hard_links: true, directories: true, atomic_renames: true, publications_at_once: 1 };

    /// Whether this is a file system that is not local, which syncs each file separately. (A store that packs files, or sends
    /// them to a server of objects, makes many durable together.)
    #[must_use]
    pub fn syncs_each_file(&self) -> bool {
        self.plain_files && self.publications_at_once > 1
    }
}

/// What compression and deduplication saved and cost since the agent started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Savings {
    /// Number of files that were compressed.
    pub compressed_files: u64,
    /// Bytes of their content.
    pub content_bytes: u64,
    /// Bytes that they take in the store.
    pub stored_bytes: u64,
    /// Number of files that did not become smaller and are stored unchanged.
    pub vain_files: u64,
    /// Time that threads of the drain spent compressing.
    pub compress_ms: u64,
    /// Number of files that were deduplicated.
    pub deduplicated_files: u64,
    /// Bytes of their content.
    pub deduplicated_bytes: u64,
    /// Bytes of these that the store did not have before.
    pub new_bytes: u64,
    /// Time that threads of the drain spent hashing.
    pub hash_ms: u64,
}

impl Savings {
    /// The sum of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            compressed_files: self.compressed_files + other.compressed_files,
            content_bytes: self.content_bytes + other.content_bytes,
            stored_bytes: self.stored_bytes + other.stored_bytes,
            vain_files: self.vain_files + other.vain_files,
            compress_ms: self.compress_ms + other.compress_ms,
            deduplicated_files: self.deduplicated_files + other.deduplicated_files,
            deduplicated_bytes: self.deduplicated_bytes + other.deduplicated_bytes,
            new_bytes: self.new_bytes + other.new_bytes,
            hash_ms: self.hash_ms + other.hash_ms,
        }
    }
}

/// The order in which files that are published at the same time become visible.
pub trait TakesTurn: Sync {
    /// Blocks until everything that must be in the store before is there. Errors: a part of it will not be there.
    fn wait(&self) -> io::Result<()>;
    /// Reports that the file is visible, so that the next one need not wait for the remaining work. To be called after
    /// [`Self::wait`].
    fn pass(&self) {}
}

impl<F: Fn() -> io::Result<()> + Sync> TakesTurn for F {
    fn wait(&self) -> io::Result<()> {
        self()
    }
}

/// The turn of one file.
pub type Turn<'a> = &'a dyn TakesTurn;

/// One directory tree that holds what is durable. Paths are relative to its root; no operation follows a symlink or leaves the
/// root.
///
/// Every method may be called from any thread. Errors carry an errno; [`verdict::advise`] says what each means. A change may be
/// sent twice after a lost answer: an operation recognises its own work.
pub trait Store: Send + Sync {
    /// The store's URL, for messages, never with credentials: `file:///scratch/project`.
    fn describe(&self) -> String;
    /// The store's abilities, which do not change.
    fn features(&self) -> Features {
        Features::POSIX
    }
    /// Whether a file can ever have this name; asks no server. Errors: EILSEQ, ENAMETOOLONG.
    fn may_hold(&self, _path: &StorePath) -> io::Result<()> {
        Ok(())
    }

    /// Savings since the agent started; `None` if nothing is ever compressed or deduplicated.
    fn savings(&self) -> Option<Savings> {
        None
    }

    // ---- reading
    /// Attributes and identity of a file. A symbolic link is not followed.
    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat>;
    /// The answer of a recent listing; `None` if only the store can tell.
    fn known_stat(&self, _who: Cred, _path: &StorePath) -> Option<io::Result<StoreStat>> {
        None
    }
    /// Like [`Self::stat`], possibly from a recent listing.
    fn glance(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.known_stat(who, path).unwrap_or_else(|| self.stat(who, path))
    }
    /// An entry that no listing shows, because its name cannot be a path; the first one found.
    fn hidden(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
    /// Entries without `.` and `..`. The drain's temporaries are included only with `temporaries`.
    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>>;
    /// The names in a directory, for a caller that needs to know which are absent. `None` if there are more than `at_most`, if
    /// the listing would be slow, or if look-ups can find names that listings do not contain.
    fn names(&self, _who: Cred, _path: &StorePath, _at_most: usize) -> io::Result<Option<Vec<Box<[u8]>>>> {
        Ok(None)
    }
    /// The target of a symbolic link.
    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>>;
    /// The `user.*` attributes of a file.
    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs>;
    /// Free space at this path.
    fn space(&self, path: &StorePath) -> io::Result<Space>;
    /// Whether `who` may create and remove names here (`W_OK | X_OK`). Errors: EACCES, EROFS, EDQUOT.
    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    /// Records the groups of a process for which the agent acts. Returns whether any was unknown, so that a refused operation
    /// may succeed now.
    fn learn_groups(&self, _who: Cred, _groups: &[u32]) -> bool {
        false
    }
    /// Opens the store's own file, for reading or for writing in place; never creates one. Errors: EOPNOTSUPP without plain
    /// files.
    fn open(&self, who: Cred, path: &StorePath, write: bool) -> io::Result<File>;
    /// The content of a file, for reading.
    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        Ok(Source::Plain(self.open(who, path, false)?))
    }

    // ---- staging (any order, in parallel)
    /// Creates an empty temporary for direct writing (a spill to the store). Errors: EOPNOTSUPP without plain files.
    fn create_temporary(&self, who: Cred, path: &StorePath, perm: u32) -> io::Result<File>;
    /// Copies `source`, with its holes, to the temporary `path`, with `meta`; replaces what is there. The copy is not synced
    /// yet. `bound` is the path at which it will probably be published.
    fn stage_file(
        &self,
        who: Cred,
        path: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged>;
    /// The checksums of a staged copy's blocks, compared with its own. `None` where [`Self::restage_file`] does not work.
    /// Errors: InvalidData names the difference.
    fn block_sums(&self, _who: Cred, _path: &StorePath, _staged: &Staged) -> io::Result<Option<BlockSums>> {
        Ok(None)
    }
    /// Makes an earlier version of a file, which has the temporary name `path`, equal to `source`: only the blocks whose
    /// checksums differ are written. The copy is synced and the written blocks are compared. `former` identifies the earlier
    /// version and `sums` describes it; after an error neither is true any more. Returns the bytes written, too.
    ///
    /// Errors: ResourceBusy if another process has the earlier version open, or changed it, or if it has extended attributes.
    fn restage_file(
        &self,
        _who: Cred,
        _path: &StorePath,
        _source: &File,
        _meta: &Meta,
        _earlier: (&StoreIdentity, &mut BlockSums),
        _gate: Gate<'_>,
    ) -> io::Result<(Staged, u64)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Stages a spilled temporary that holds the bytes already: applies `meta` and computes the checksum.
    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged>;
    /// Makes a directory under a temporary name; files can be staged inside.
    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged>;
    /// Makes a symbolic link under a temporary name.
    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged>;
    /// Makes a fifo, socket or device under a temporary name; `kind` and `device` as for mknod.
    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged>;
    /// Makes staged copies survive the store's power loss: one sync for many small ones, fsync for few large ones.
    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()>;
    /// Compares length and checksum at the destination. Errors: InvalidData names the difference.
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()>;
    /// Removes what was begun in the store and is no longer needed, when nothing waits to be published. Returns the number of
    /// removed items.
    fn collect(&self) -> io::Result<u64> {
        Ok(0)
    }
    /// Releases what the copy under this temporary holds on a tier: it can then only be discarded.
    fn release(&self, _temporary: &StorePath) {}
    /// Drops every cached listing, so that changes by other clients are seen from now on.
    fn refresh(&self) {}
    /// Removes a temporary, with everything inside. An absent one is not an error.
    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()>;

    // ---- publishing (in order, each atomic)
    /// Whether the name has what is expected; `Ok(false)` is a conflict.
    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool>;
    /// Whether [`Self::publish`] would overwrite the present file in place. An interruption would then leave a mixture of two
    /// versions.
    fn writes_over(&self, _who: Cred, _temporary: &StorePath, _path: &StorePath) -> io::Result<bool> {
        Ok(false)
    }
    /// Publishes a new file, or the next version of the one that has the name. If the name is absent, or its file has one link
    /// and the same owner, this is an atomic rename. Otherwise the file is overwritten in place from the temporary, which stays
    /// until the target is synced.
    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity>;
    /// Like [`Self::publish`], but the version before gets the temporary's name. Returns the identities of both; `None` if that
    /// is not possible, and then nothing was done.
    fn publish_keeping(
        &self,
        _who: Cred,
        _temporary: &StorePath,
        _path: &StorePath,
        _meta: &Meta,
    ) -> io::Result<Option<(StoreIdentity, StoreIdentity)>> {
        Ok(None)
    }
    /// Like [`Self::publish`], but not visible before its turn. Whatever can be done before is done before.
    fn publish_in_turn(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
        turn: Turn<'_>,
    ) -> io::Result<StoreIdentity> {
        turn.wait()?;
        self.publish(who, temporary, path, meta)
    }
    /// Like [`Self::publish`] or [`Self::publish_in_turn`], for a name that is absent. Where a look is a separate request, new
    /// files need none. Errors: EEXIST if the name is taken or unknown; the caller must then look.
    fn publish_absent(
        &self,
        _who: Cred,
        _temporary: &StorePath,
        _path: &StorePath,
        _turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        Err(rustix::io::Errno::EXIST.into())
    }
    /// Replaces another file by this one in an atomic rename. Nothing of the other file stays at this name; its further names
    /// keep it.
    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity>;
    /// Renames a file or directory, and replaces what is at `to` as rename(2) does.
    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()>;
    /// Whether two names can be exchanged in one step. (Not every mounted file system can.)
    fn exchanges(&self) -> bool {
        false
    }
    /// Exchanges two names in one step. Errors: EOPNOTSUPP or EINVAL if the store cannot.
    fn exchange(&self, who: Cred, a: &StorePath, b: &StorePath) -> io::Result<()>;
    /// Adds the name `to` to the file at `from`. Errors: EOPNOTSUPP without hard links.
    fn link(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()>;
    /// Removes a name of a file. Errors: ENOENT if it is absent.
    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    /// Removes an empty directory. Errors: ENOTEMPTY, ENOENT.
    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    /// Gives the file exactly these attributes, and changes only what differs. Returns its identity afterwards.
    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity>;
    /// Makes the names in these directories survive the store's power loss.
    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()>;

    // ---- between agents
    /// Leaves a *notice* for other agents: an empty file at the root, whose name begins as a temporary's. It may be there
    /// already. It is durable then. Errors: EOPNOTSUPP, where agents form no pool.
    fn leave_notice(&self, _name: &[u8]) -> io::Result<()> {
        Err(rustix::io::Errno::OPNOTSUPP.into())
    }
    /// Is the notice there now, whatever this machine has believed?
    fn has_notice(&self, _name: &[u8]) -> io::Result<bool> {
        Err(rustix::io::Errno::OPNOTSUPP.into())
    }
    /// Removes all notices whose names begin so.
    fn remove_notices(&self, _prefix: &[u8]) -> io::Result<()> {
        Err(rustix::io::Errno::OPNOTSUPP.into())
    }
}
