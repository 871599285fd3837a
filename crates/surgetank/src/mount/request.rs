//! The kernel's requests: their operations with what these carry, and the decoder. Nothing is copied: names and data
//! point into the buffer that was read.
//!
//! Every field is length-checked. A short message, a wrong length or an invalid name is EINVAL, never a panic, for any
//! input (fuzzed).

mod decode;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_types::model::{Caller, LockRequest, Timestamp};

use super::abi::{Fields, opcode};
pub use decode::decode;

/// The header of every request (`struct fuse_in_header`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of the operation, one of [`super::abi::opcode`].
    pub opcode: u32,
    /// Identifies the request in its answer.
    pub unique: u64,
    /// The node that the request is about; for operations on a name, its directory.
    pub node: u64,
    /// The caller's user id.
    pub uid: u32,
    /// The caller's group id.
    pub gid: u32,
    /// The caller's process id; 0 when the kernel does not report one.
    pub pid: u32,
    /// The size of the whole message, according to the sender.
    bytes: u32,
    /// Bytes of extensions at the end.
    extension_bytes: usize,
}

impl Header {
    /// Decodes the front of a message. EINVAL: the message is too short.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Errno> {
        let mut fields = Fields::new(bytes);
        let bytes = fields.u32()?;
        let header = Self {
            bytes,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
            pid: fields.u32()?,
            extension_bytes: usize::from(fields.u16()?) * 8,
        };
        fields.u16()?;
        Ok(header)
    }

    /// FORGETs are the only requests without an answer.
    pub(crate) fn wants_answer(&self) -> bool {
        !matches!(self.opcode, opcode::FORGET | opcode::BATCH_FORGET)
    }

    pub(crate) fn caller(&self, umask: u32) -> Caller {
        Caller { uid: self.uid, gid: self.gid, pid: self.pid, umask }
    }
}

/// A new timestamp in SETATTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeChange {
    /// The server's current time.
    Now,
    /// This time.
    At(Timestamp),
}

/// The changes of SETATTR; a `None` stays unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub perm: Option<u32>,
    /// The new owner.
    pub uid: Option<u32>,
    /// The new group.
    pub gid: Option<u32>,
    /// The new size in bytes.
    pub size_bytes: Option<u64>,
    /// The new time of the last access.
    pub atime: Option<TimeChange>,
    /// The new time of the last modification.
    pub mtime: Option<TimeChange>,
    /// The new time of the last change of attributes.
    pub ctime: Option<Timestamp>,
    /// The open file of the request (ftruncate, fchmod…).
    pub fh: Option<u64>,
    /// The lock owner of the program that truncates.
    pub lock_owner: Option<u64>,
    /// Also clear setuid, and setgid of an executable.
    pub kill_suidgid: bool,
}

/// The circumstances of a WRITE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteFlags {
    /// From the page cache (a shared mapping): `fh` is any writable handle of the file.
    pub cached: bool,
    /// The write also clears setuid, and setgid of an executable.
    pub kill_suidgid: bool,
    /// `O_DIRECT`, `O_SYNC`, `O_APPEND`… of the open file.
    pub open: u32,
}

/// The flags of a RELEASE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReleaseFlags {
    /// A flush belongs to this release (`FUSE_RELEASE_FLUSH`).
    pub flush: bool,
    /// The release ends the flock of the open file (`FUSE_RELEASE_FLOCK_UNLOCK`).
    pub flock_unlock: bool,
}

/// A range of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePlace {
    /// The file's node.
    pub id: u64,
    /// The handle of the open file.
    pub fh: u64,
    /// The start of the range, in bytes.
    pub offset: u64,
}

/// One decoded request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The kind, the node and the caller.
    pub header: Header,
    /// The operation and its arguments.
    pub operation: Operation<'a>,
}

/// An operation with its arguments. Names and data point into the buffer that was read.
#[derive(Debug, Clone, Copy)]
pub enum Operation<'a> {
    /// `FUSE_LOOKUP`: find a name in the directory.
    Lookup {
        /// The name in the directory.
        name: &'a [u8],
    },
    /// `FUSE_FORGET`: the kernel drops look-ups of the node.
    Forget {
        /// The number of dropped look-ups.
        count: u64,
    },
    /// `FUSE_BATCH_FORGET`: the kernel drops look-ups of several nodes.
    BatchForget {
        /// The nodes with their counts.
        forgets: Forgets<'a>,
    },
    /// `FUSE_GETATTR`: read attributes.
    Getattr {
        /// The handle, if the program asks through an open file.
        fh: Option<u64>,
    },
    /// `FUSE_SETATTR`: change attributes.
    Setattr {
        /// The attributes that change.
        change: SetAttr,
    },
    /// `FUSE_READLINK`: read the target of a symbolic link.
    Readlink,
    /// `FUSE_SYMLINK`: make a symbolic link.
    Symlink {
        /// The name in the directory.
        name: &'a [u8],
        /// The link's target, unchecked.
        target: &'a [u8],
    },
    /// `FUSE_MKNOD`: make a file, pipe, socket or device.
    Mknod {
        /// The name in the directory.
        name: &'a [u8],
        /// The file type and the permission bits.
        mode: u32,
        /// The device number (`dev_t`) of a device.
        device: u64,
        /// The caller's umask.
        umask: u32,
    },
    /// `FUSE_MKDIR`: make a directory.
    Mkdir {
        /// The name in the directory.
        name: &'a [u8],
        /// The permission bits (07777).
        perm: u32,
        /// The caller's umask.
        umask: u32,
    },
    /// `FUSE_UNLINK`: remove a name of a file.
    Unlink {
        /// The name in the directory.
        name: &'a [u8],
    },
    /// `FUSE_RMDIR`: remove an empty directory.
    Rmdir {
        /// The name in the directory.
        name: &'a [u8],
    },
    /// `FUSE_RENAME` and `FUSE_RENAME2`: move a name.
    Rename {
        /// The old name.
        name: &'a [u8],
        /// The node of the new directory.
        new_parent: u64,
        /// The name in the new directory.
        new_name: &'a [u8],
        /// The flags of renameat2(2).
        flags: RenameFlags,
    },
    /// `FUSE_LINK`: make another name of a file in this directory.
    Link {
        /// The node of the file.
        source: u64,
        /// The new name in the directory.
        new_name: &'a [u8],
    },
    /// `FUSE_OPEN`: open a file.
    Open {
        /// The flags of open(2), without `O_CREAT`.
        flags: OFlags,
        /// A truncating open also clears setuid and setgid.
        kill_suidgid: bool,
    },
    /// `FUSE_CREATE`: make a file if it does not exist, and open it.
    Create {
        /// The name in the directory.
        name: &'a [u8],
        /// The permission bits (07777).
        perm: u32,
        /// The caller's umask.
        umask: u32,
        /// The flags of open(2).
        flags: OFlags,
        /// A truncating open also clears setuid and setgid.
        kill_suidgid: bool,
    },
    /// `FUSE_TMPFILE`: make a file without a name, and open it.
    Tmpfile {
        /// The permission bits (07777).
        perm: u32,
        /// The caller's umask.
        umask: u32,
        /// The flags of open(2).
        flags: OFlags,
    },
    /// `FUSE_READ`: read content.
    Read {
        /// The handle of the open file.
        fh: u64,
        /// The first byte of the range.
        offset: u64,
        /// The most bytes that the kernel takes.
        size: u32,
    },
    /// `FUSE_WRITE`: write content.
    Write {
        /// The handle of the open file.
        fh: u64,
        /// The position of the first byte.
        offset: u64,
        /// The content.
        bytes: &'a [u8],
        /// The circumstances of the write.
        flags: WriteFlags,
    },
    /// `FUSE_FLUSH`: a program closes a descriptor.
    Flush {
        /// The handle of the open file.
        fh: u64,
        /// The lock owner of the closing program.
        lock_owner: u64,
    },
    /// `FUSE_RELEASE`: the last descriptor and mapping of the open file ended.
    Release {
        /// The handle of the open file.
        fh: u64,
        /// The locks and the flush that end with it.
        flags: ReleaseFlags,
    },
    /// `FUSE_FSYNC`: make content durable.
    Fsync {
        /// The handle of the open file.
        fh: u64,
        /// The attributes need no sync (fdatasync).
        data_only: bool,
    },
    /// `FUSE_FALLOCATE`: allocate or free a range.
    Fallocate {
        /// The handle of the open file.
        fh: u64,
        /// The mode of fallocate(2).
        mode: u32,
        /// The first byte of the range.
        offset: u64,
        /// The length of the range in bytes.
        length: u64,
    },
    /// `FUSE_LSEEK`: find data or a hole.
    Lseek {
        /// The handle of the open file.
        fh: u64,
        /// The position in bytes where the search starts.
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`.
        whence: u32,
    },
    /// `FUSE_COPY_FILE_RANGE` and `FUSE_COPY_FILE_RANGE_64`: copy between two open files.
    CopyFileRange {
        /// The source.
        from: FilePlace,
        /// The destination.
        to: FilePlace,
        /// The bytes to copy.
        length: u64,
        /// The flags of copy_file_range(2).
        flags: u64,
        /// The answer has 64 bits for the count.
        wide: bool,
    },
    /// `FUSE_OPENDIR`: open a directory.
    Opendir,
    /// `FUSE_READDIR`: list a directory.
    Readdir {
        /// The handle of the open directory.
        fh: u64,
        /// The position in the listing: 0, or an entry's next offset.
        offset: u64,
        /// The most bytes that the kernel takes.
        size: u32,
    },
    /// `FUSE_READDIRPLUS`: list a directory with the attributes.
    Readdirplus {
        /// The handle of the open directory.
        fh: u64,
        /// The position in the listing: 0, or an entry's next offset.
        offset: u64,
        /// The most bytes that the kernel takes.
        size: u32,
    },
    /// `FUSE_RELEASEDIR`: the last descriptor of the open directory ended.
    Releasedir {
        /// The handle of the open directory.
        fh: u64,
    },
    /// `FUSE_FSYNCDIR`: make a directory durable.
    Fsyncdir {
        /// The handle of the open directory.
        fh: u64,
        /// The attributes need no sync (fdatasync).
        data_only: bool,
    },
    /// `FUSE_STATFS`: report space.
    Statfs,
    /// `FUSE_GETXATTR`: read an extended attribute.
    Getxattr {
        /// The attribute's name.
        name: &'a [u8],
        /// The most bytes that the kernel takes; 0 asks for the size.
        size: u32,
    },
    /// `FUSE_SETXATTR`: change an extended attribute.
    Setxattr {
        /// The attribute's name.
        name: &'a [u8],
        /// The new value.
        value: &'a [u8],
        /// `XATTR_CREATE`, `XATTR_REPLACE` or 0.
        flags: u32,
    },
    /// `FUSE_LISTXATTR`: list the names of extended attributes.
    Listxattr {
        /// The most bytes that the kernel takes; 0 asks for the size.
        size: u32,
    },
    /// `FUSE_REMOVEXATTR`: remove an extended attribute.
    Removexattr {
        /// The attribute's name.
        name: &'a [u8],
    },
    /// `FUSE_GETLK`: find the lock that blocks this one.
    Getlk {
        /// The lock in question.
        asked: LockRequest,
    },
    /// `FUSE_SETLK` and `FUSE_SETLKW`: take or release a lock.
    Setlk {
        /// The lock, or the range to unlock.
        asked: LockRequest,
        /// The program waits until the lock is free (`FUSE_SETLKW`).
        wait: bool,
    },
    /// `FUSE_ACCESS`: check permissions.
    Access {
        /// The mode of access(2): `R_OK`, `W_OK`, `X_OK`.
        mask: u32,
    },
    /// `FUSE_SYNCFS`: make the whole file system durable.
    Syncfs,
    /// `FUSE_IOCTL`: a device request; its arguments are not decoded.
    Ioctl,
    /// `FUSE_INIT`: the handshake.
    Init {
        /// The kernel's side of it.
        offer: Offer,
    },
    /// `FUSE_INTERRUPT`: a signal reaches the program of an earlier request.
    Interrupt {
        /// The number of the interrupted request.
        unique: u64,
    },
    /// `FUSE_DESTROY`: the mount ends.
    Destroy,
    /// Poll, bmap, statx, DAX and later additions.
    Unknown,
}

/// The kernel's side of the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The major number of the kernel's protocol.
    pub major: u32,
    /// The minor number of the kernel's protocol.
    pub minor: u32,
    /// The most bytes that the kernel reads ahead.
    pub readahead_bytes_max: u32,
    /// The features that the kernel offers (`FUSE_…` of INIT, both words).
    pub flags: u64,
}

/// Pairs of (node, count) of a BATCH_FORGET, already checked to be complete.
#[derive(Debug, Clone, Copy)]
pub struct Forgets<'a> {
    pairs: &'a [[u8; 16]],
}

impl Forgets<'_> {
    /// The pairs in the kernel's order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.pairs.iter().filter_map(|pair| {
            let mut fields = Fields::new(pair);
            Some((fields.u64().ok()?, fields.u64().ok()?))
        })
    }
}
