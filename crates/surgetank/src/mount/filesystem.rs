//! The adapter's trait for file systems: one synchronous method per operation.
//!
//! Methods run on the session's threads, several at once, and may block (the pool grows). A method that is not
//! implemented answers ENOSYS. For flush, fsync, access, xattrs, lseek, fallocate, copy_file_range, syncfs and tmpfile
//! the kernel takes that as "never ask again".
//!
//! Node ids (`id`) are the kernel's names for files; inode numbers (`Attr::ino`) are what programs see. The two are
//! independent. Every [`Entry`] that is returned counts as one look-up of its node until [`Filesystem::forget`] takes
//! it back.

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileLock, LockRequest};

use super::handshake::Agreed;
use super::notifier::Notifier;
use super::reply::{Attributes, DirectoryPlusSink, DirectorySink, Entry, Looked, Opened, OpenedDirectory, SpaceReport};
use super::request::{FilePlace, ReleaseFlags, SetAttr, WriteFlags};

fn absent<T>() -> FsResult<T> {
    Err(Errno::NOSYS.into())
}

/// A file system that a [`super::Session`] serves.
#[allow(unused_variables)]
pub trait Filesystem: Send + Sync + 'static {
    /// The handshake is complete; requests follow. Unsolicited messages to the kernel go through the notifier.
    fn started(&self, notifier: &Notifier, agreed: &Agreed) {}

    /// A request for this node follows; the number may come from an earlier server of the mount.
    fn recall(&self, id: u64) {}

    /// The session ended: no request follows, open handles are void.
    fn ended(&self) {}

    /// Finds a name in a directory.
    fn lookup(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<Looked>;

    /// The kernel dropped `count` look-ups of the node.
    fn forget(&self, id: u64, count: u64) {}

    /// Reads attributes; `fh` is the open file through which the program asks.
    fn getattr(&self, caller: &Caller, id: u64, fh: Option<u64>) -> FsResult<Attributes>;

    /// Changes attributes and returns the new ones.
    fn setattr(&self, caller: &Caller, id: u64, change: &SetAttr) -> FsResult<Attributes> {
        absent()
    }

    /// The target of a symbolic link.
    fn readlink(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        absent()
    }

    /// Makes a symbolic link.
    fn symlink(&self, caller: &Caller, parent: u64, name: &[u8], target: &[u8]) -> FsResult<Entry> {
        absent()
    }

    /// `mode` has the file type; the caller's umask is already applied.
    fn mknod(&self, caller: &Caller, parent: u64, name: &[u8], mode: u32, device: u64) -> FsResult<Entry> {
        absent()
    }

    /// Makes a directory; the caller's umask is already applied.
    fn mkdir(&self, caller: &Caller, parent: u64, name: &[u8], perm: u32) -> FsResult<Entry> {
        absent()
    }

    /// Removes a name of a file.
    fn unlink(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        absent()
    }

    /// Removes a directory. ENOTEMPTY: it has entries.
    fn rmdir(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        absent()
    }

    /// Moves a name. `flags` are those of renameat2(2).
    fn rename(
        &self,
        caller: &Caller,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> FsResult<()> {
        absent()
    }

    /// Makes another name of a file.
    fn link(&self, caller: &Caller, id: u64, new_parent: u64, new_name: &[u8]) -> FsResult<Entry> {
        absent()
    }

    /// `flags` never has O_CREAT. This method must obey O_TRUNC, which clears setuid/setgid if `kill_suidgid`.
    fn open(&self, caller: &Caller, id: u64, flags: OFlags, kill_suidgid: bool) -> FsResult<Opened>;

    /// Creates and opens. Without O_EXCL the name may exist by now, and is then opened.
    fn create(
        &self,
        caller: &Caller,
        parent: u64,
        name: &[u8],
        perm: u32,
        flags: OFlags,
        kill_suidgid: bool,
    ) -> FsResult<(Entry, Opened)> {
        absent()
    }

    /// O_TMPFILE: a file without a name (`link` may give it one).
    fn tmpfile(&self, caller: &Caller, parent: u64, perm: u32, flags: OFlags) -> FsResult<(Entry, Opened)> {
        Err(Errno::OPNOTSUPP.into())
    }

    /// Fills `buffer` from `offset`; fewer bytes than its length mean the end of the file.
    fn read(&self, caller: &Caller, id: u64, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize>;

    /// `bytes` starts on a page boundary of memory. Returns the number of bytes taken.
    fn write(
        &self,
        caller: &Caller,
        id: u64,
        fh: u64,
        offset: u64,
        bytes: &[u8],
        flags: WriteFlags,
    ) -> FsResult<usize> {
        absent()
    }

    /// One `close` of a descriptor (there may be more: dup and fork share the open file).
    fn flush(&self, caller: &Caller, id: u64, fh: u64, lock_owner: u64) -> FsResult<()> {
        absent()
    }

    /// The last descriptor and mapping are gone. `close` has returned by then.
    fn release(&self, id: u64, fh: u64, flags: ReleaseFlags) {}

    /// Makes the file's content durable; with `data_only` the attributes need no sync.
    fn fsync(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        absent()
    }

    /// Allocates or frees a range in bytes. `mode` is that of fallocate(2).
    fn fallocate(&self, caller: &Caller, id: u64, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        absent()
    }

    /// Only SEEK_DATA and SEEK_HOLE come here. Not implemented: the kernel treats files as all data.
    fn lseek(&self, caller: &Caller, id: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        absent()
    }

    /// Not implemented: the kernel reads and writes instead.
    fn copy_file_range(
        &self,
        caller: &Caller,
        from: FilePlace,
        to: FilePlace,
        length: u64,
        flags: u64,
    ) -> FsResult<u64> {
        absent()
    }

    /// Opens a directory.
    fn opendir(&self, caller: &Caller, id: u64) -> FsResult<OpenedDirectory>;

    /// Adds entries from `offset` (0, or the `next_offset` of an entry) until the sink is full or none is left.
    fn readdir(&self, caller: &Caller, id: u64, fh: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()>;

    /// Requested only with [`super::Options::readdirplus`]. Every entry that the sink took counts as a look-up.
    fn readdirplus(
        &self,
        caller: &Caller,
        id: u64,
        fh: u64,
        offset: u64,
        sink: &mut DirectoryPlusSink<'_>,
    ) -> FsResult<()> {
        absent()
    }

    /// The last descriptor of the open directory ended.
    fn releasedir(&self, id: u64, fh: u64) {}

    /// Makes the directory's entries durable.
    fn fsyncdir(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        absent()
    }

    /// Reports space and inodes.
    fn statfs(&self, caller: &Caller, id: u64) -> FsResult<SpaceReport>;

    /// The value of an extended attribute. ENODATA: there is none.
    fn getxattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        absent()
    }

    /// `flags`: XATTR_CREATE, XATTR_REPLACE.
    fn setxattr(&self, caller: &Caller, id: u64, name: &[u8], value: &[u8], flags: u32) -> FsResult<()> {
        absent()
    }

    /// Names, each ended by a NUL.
    fn listxattr(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        absent()
    }

    /// Removes an extended attribute. ENODATA: there is none.
    fn removexattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<()> {
        absent()
    }

    /// The lock that blocks this one; [`surgetank_types::model::LockKind::None`] if there is none. Locks are requested
    /// only with [`super::Options::locks`].
    fn getlk(&self, caller: &Caller, id: u64, asked: &LockRequest) -> FsResult<FileLock> {
        absent()
    }

    /// Takes or releases a lock. If another lock blocks it: EAGAIN; with `wait`, it waits until that lock is gone
    /// ([`super::wait_long`], and EINTR when [`super::interrupted`]). The kernel does not unlock at close.
    /// [`Filesystem::flush`] ends the range locks of its `lock_owner`, [`Filesystem::release`] all locks taken through
    /// the handle.
    fn setlk(&self, caller: &Caller, id: u64, asked: &LockRequest, wait: bool) -> FsResult<()> {
        absent()
    }

    /// access(2), requested only on a mount without `default_permissions`.
    fn access(&self, caller: &Caller, id: u64, mask: u32) -> FsResult<()> {
        absent()
    }

    /// Makes the whole file system durable.
    fn syncfs(&self, caller: &Caller, id: u64) -> FsResult<()> {
        absent()
    }
}
