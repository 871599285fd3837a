//! The store: the authoritative place. Drivers behind one interface, one conformance suite for all.
//!
//! The drain works in two steps so that copying can be parallel and publishing ordered:
//! *stage* puts a complete copy under a temporary name in the destination directory (or inside a staged
//! directory), *publish* makes it visible by one atomic step. Nothing half-copied ever has its final name.

#[macro_use]
extern crate surgetank_types;

mod at_once;
pub mod checksum;
#[cfg(test)]
pub mod conformance;
pub mod distant;
mod extents;
pub mod faulty;
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
pub use sites::sites;
pub use source::{Remote, Source};

use std::fs::File;
use std::io;

use surgetank_types::model::{Attr, Kind, PART_PREFIX, STORE_TEMPORARY_PREFIX, StoreIdentity, Timestamp, Xattrs};

/// A path in the store, relative to its root; empty is the root itself. Never absolute, never with `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StorePath(pub Vec<u8>);

impl StorePath {
    pub fn root() -> Self {
        Self(Vec::new())
    }
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
    #[must_use]
    pub fn parent(&self) -> Self {
        let slash = self.0.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        Self(self.0[..slash].to_vec())
    }
    /// The temporary beside it of a copy that is staged in or out: the same one another time. On a server it is no key,
    /// in a directory a file (which may be served, and then takes none of the drain's names), another one for each owner.
    #[must_use]
    pub fn part(&self, in_directory: Option<&[u8]>) -> Self {
        let prefix = if in_directory.is_some() { PART_PREFIX.as_bytes() } else { STORE_TEMPORARY_PREFIX };
        let owner = in_directory.unwrap_or_default();
        let number = format!("{:016x}", checksum::of_bytes(&[&self.0, owner].concat()));
        self.parent().join(&[prefix, number.as_bytes()].concat())
    }
    /// Some component says that all below is the drain's, to be replaced and removed.
    pub fn is_temporary(&self) -> bool {
        self.0.split(|byte| *byte == b'/').any(|name| name.starts_with(STORE_TEMPORARY_PREFIX))
    }
    /// A copy that is staged in or out, as `part` names it. (In a store that is served it may be anybody's file.)
    pub fn is_part(&self) -> bool {
        self.0.rsplit(|byte| *byte == b'/').next().is_some_and(|name| name.starts_with(PART_PREFIX.as_bytes()))
    }
    /// At whatever depth.
    pub fn is_below(&self, dir: &Self) -> bool {
        dir.0.is_empty() || self.0.strip_prefix(&*dir.0).is_some_and(|rest| rest.first() == Some(&b'/'))
    }
}

impl std::fmt::Display for StorePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// With whose ids store I/O is done (root_squash, quota). Only a privileged agent can differ from itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cred {
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreStat {
    pub attr: Attr,
    pub identity: StoreIdentity,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreEntry {
    pub name: Box<[u8]>,
    pub kind: Kind,
    pub ino: u64,
}

/// `statfs` numbers in bytes and inodes, as the calling user may use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub available_bytes: u64,
    pub inodes_total: u64,
    pub inodes_free: u64,
    pub name_bytes_max: u32,
    pub block_bytes: u32,
}

/// What must be under the final name just before publishing; anything else is a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    Absent,
    Identity(StoreIdentity),
    /// The same of a file with several names: its ctime changes when one of them comes or goes.
    Linked(StoreIdentity),
    /// A program writes this file in place: only the inode number stays as it is.
    Inode(u64),
    /// Not known (first contact after recovery of an old record): overwrite is not allowed, absent is fine.
    Unknown,
}

/// How a staged copy is checked (SEMANTICS "Verification").
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// After the sync, through the page cache: finds short copies and bytes that went wrong in flight.
    Cache,
    /// Dropped from the cache and read back from the device.
    Reread,
}

/// All of a file but its bytes, as it shall be in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    /// Access and modification; `None`: leave as they are (a program writes the file in place).
    pub times: Option<(Timestamp, Timestamp)>,
    /// `None`: leave as they are. `Some`: exactly these `user.*` attributes.
    pub xattrs: Option<Xattrs>,
}

/// Called between chunks of a copy with the bytes just moved: throttles, counts, and may stop the copy (`Err(Interrupted)`).
pub type Gate<'a> = &'a (dyn Fn(u64) -> io::Result<()> + Sync);

/// A complete copy under a temporary name, not visible yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staged {
    pub identity: StoreIdentity,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
}

/// What not every store can do. The drain and the namespace choose by it how they are careful.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Content lies there in plain files that can be opened, written in place and spilled to.
    pub plain_files: bool,
    pub hard_links: bool,
    /// Directories are more than what is in them: they have times, which change with it, and temporaries lie in them, which
    /// others see.
    pub directories: bool,
    /// A rename is one step. If not, a crash may leave a file under both names.
    pub atomic_renames: bool,
    /// Each request takes its time there: so many files are settled, compared and published at the same time.
    pub publications_at_once: usize,
}

impl Features {
    /// Of a local file system.
    pub const POSIX: Self =
        Self { plain_files: true, hard_links: true, directories: true, atomic_renames: true, publications_at_once: 1 };

    /// A file system that is not a local one: each file is synced by itself. (What packs files, or sends them to a server of
    /// objects, makes many of them durable together.)
    #[must_use]
    pub fn syncs_each_file(&self) -> bool {
        self.plain_files && self.publications_at_once > 1
    }
}

/// What compressing and deduplicating saved and cost, since the agent began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Savings {
    pub compressed_files: u64,
    pub content_bytes: u64,
    pub stored_bytes: u64,
    /// Did not get smaller, and went as they are.
    pub vain_files: u64,
    /// Time of threads of the drain.
    pub compress_ms: u64,
    pub deduplicated_files: u64,
    pub deduplicated_bytes: u64,
    /// Of these, what the store did not have.
    pub new_bytes: u64,
    /// Time of threads of the drain.
    pub hash_ms: u64,
}

impl Savings {
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

/// The order in which what is published at the same time shows.
pub trait TakesTurn: Sync {
    /// Returns when all that has to be in the store before is there. An error: something of it will not be.
    fn wait(&self) -> io::Result<()>;
    /// It shows: what is left to be done keeps nobody waiting. To be called in its turn.
    fn pass(&self) {}
}

impl<F: Fn() -> io::Result<()> + Sync> TakesTurn for F {
    fn wait(&self) -> io::Result<()> {
        self()
    }
}

pub type Turn<'a> = &'a dyn TakesTurn;

/// One directory tree that keeps what is durable. Paths are relative to its root; no operation follows a symlink or leaves the root.
pub trait Store: Send + Sync {
    /// For messages: `file:///scratch/project`.
    fn describe(&self) -> String;
    fn features(&self) -> Features {
        Features::POSIX
    }
    /// Can a file ever be kept under this name? EILSEQ, ENAMETOOLONG as they come; without asking anybody.
    fn may_hold(&self, _path: &StorePath) -> io::Result<()> {
        Ok(())
    }

    /// `None`: nothing is ever compressed or deduplicated there.
    fn savings(&self) -> Option<Savings> {
        None
    }

    // ---- reading
    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat>;
    /// What a listing told a moment ago. `None`: nothing; the store would have to be asked.
    fn told(&self, _who: Cred, _path: &StorePath) -> Option<io::Result<StoreStat>> {
        None
    }
    /// As `stat`, perhaps from what a listing told a moment ago.
    fn glance(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.told(who, path).unwrap_or_else(|| self.stat(who, path))
    }
    /// Something that is there and that no listing shows, because it has no name that a path can be; the first that was found.
    fn hidden(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
    /// Entries without `.` and `..`; our own temporaries are included only when `temporaries`.
    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>>;
    /// The names in a directory, for one who wants to know which are absent. `None`: there are more than `at_most`, or it is not told quickly, or
    /// more can be looked up than is listed.
    fn names(&self, _who: Cred, _path: &StorePath, _at_most: usize) -> io::Result<Option<Vec<Box<[u8]>>>> {
        Ok(None)
    }
    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>>;
    /// `user.*` attributes.
    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs>;
    fn space(&self, path: &StorePath) -> io::Result<Space>;
    /// May `who` create and remove names here (`W_OK | X_OK`)? EACCES, EROFS, EDQUOT as they come.
    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    /// A process that is acted for has these groups. Returns whether they were unknown, so that what it was denied may
    /// succeed now.
    fn learn_groups(&self, _who: Cred, _groups: &[u32]) -> bool {
        false
    }
    /// Opens the store's own file, for reading or for writing in place (never creating). EOPNOTSUPP without plain files.
    fn open(&self, who: Cred, path: &StorePath, write: bool) -> io::Result<File>;
    /// The content of a file, to be read.
    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        Ok(Source::Plain(self.open(who, path, false)?))
    }

    // ---- staging (any order, in parallel)
    /// Creates an empty temporary to be written directly (a spill to the store). EOPNOTSUPP without plain files.
    fn create_temporary(&self, who: Cred, path: &StorePath, perm: u32) -> io::Result<File>;
    /// Copies `source` (its holes too) to the temporary `path`, replacing what is there, with `meta`. Not synced yet.
    /// `bound` is where it will be published if nothing comes between.
    fn stage_file(
        &self,
        who: Cred,
        path: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged>;
    /// For a spilled temporary that already holds the bytes: applies `meta`, computes the checksum.
    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged>;
    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged>;
    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged>;
    /// Fifos; `kind` and `device` as for mknod.
    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged>;
    /// Makes staged copies survive the store's power loss: one sync for many small ones, fsync for few large ones.
    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()>;
    /// Compares length and checksum at the destination. `Err(InvalidData)` names the difference.
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()>;
    /// Gives up what was begun there and nobody wants any more, when nothing waits to be published. Returns how much.
    fn collect(&self) -> io::Result<u64> {
        Ok(0)
    }
    /// Of what is staged under this temporary nothing that lies on a tier is held any more: it can only be discarded.
    fn let_go(&self, _temporary: &StorePath) {}
    /// What others changed is seen from now on: nothing that a listing told is believed any more.
    fn refresh(&self) {}
    /// Removes a temporary; absent is fine.
    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()>;

    // ---- publishing (in order, each atomic)
    /// Is the name as expected? `Ok(false)` is a conflict.
    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool>;
    /// Would `publish` write over what has the name, in place? Cut off in the middle of that, it is half of two versions.
    fn writes_over(&self, _who: Cred, _temporary: &StorePath, _path: &StorePath) -> io::Result<bool> {
        Ok(false)
    }
    /// A new file, or the next version of the one that has the name. Absent target or one link, ours: an atomic rename.
    /// Otherwise (several links, another owner) overwrites in place from the temporary, which stays until the target is synced.
    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity>;
    /// As `publish`, and nobody sees it before its turn. What can be done before that, is.
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
    /// As `publish` or `publish_in_turn`, where nothing has the name. EEXIST: something has, or it is not known; it has to be
    /// looked at. (Where each look is a request of its own, new files spare it.)
    fn publish_absent(
        &self,
        _who: Cred,
        _temporary: &StorePath,
        _path: &StorePath,
        _turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        Err(rustix::io::Errno::EXIST.into())
    }
    /// A file instead of another one that has the name: an atomic rename, nothing of the other one stays, and its further
    /// names keep it.
    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity>;
    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()>;
    /// Can two names change places in one step? (Not everything that is mounted can.)
    fn exchanges(&self) -> bool {
        false
    }
    fn exchange(&self, who: Cred, a: &StorePath, b: &StorePath) -> io::Result<()>;
    fn link(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()>;
    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()>;
    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity>;
    /// Makes names in these directories survive power loss.
    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()>;
}
