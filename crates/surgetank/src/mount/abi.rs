//! Numbers of the kernel's FUSE protocol (7.31 to 7.45): opcodes, flags, sizes, device ioctls, and a checked reader of its
//! fields. All integers travel in the machine's own byte order.
//!
//! The kernel's names are in include/uapi/linux/fuse.h. A module's documentation gives the prefix of its constants there.

use rustix::io::Errno;

/// `FUSE_KERNEL_VERSION`.
pub(crate) const VERSION_MAJOR: u32 = 7;
/// The newest revision (`FUSE_KERNEL_MINOR_VERSION`) whose requests are understood here.
pub(crate) const VERSION_MINOR: u32 = 45;
/// The oldest supported kernel protocol (Linux 5.4): older structures are shorter.
pub(crate) const VERSION_MINOR_MIN: u32 = 31;

/// `FUSE_ROOT_ID`: the node of the mounted directory.
pub const ROOT_NODE: u64 = 1;
/// Size of `struct fuse_in_header`, which begins every request.
pub const IN_HEADER_BYTES: usize = 40;
/// Size of `struct fuse_out_header`, which begins every answer.
pub(crate) const OUT_HEADER_BYTES: usize = 16;
/// Bytes in front of the payload of a WRITE request: its header and `struct fuse_write_in`.
pub(crate) const WRITE_PREFIX_BYTES: usize = IN_HEADER_BYTES + 40;
pub(crate) const PAGE_BYTES: usize = 4096;
/// Room for everything in a request that is not written data.
pub(crate) const REQUEST_SLACK_BYTES: usize = PAGE_BYTES;

/// Kinds of requests (`enum fuse_opcode`).
pub mod opcode {
    /// `FUSE_LOOKUP` finds a name in a directory.
    pub const LOOKUP: u32 = 1;
    /// `FUSE_FORGET` drops look-ups of a node.
    pub const FORGET: u32 = 2;
    /// `FUSE_GETATTR` reads attributes.
    pub const GETATTR: u32 = 3;
    /// `FUSE_SETATTR` changes attributes.
    pub const SETATTR: u32 = 4;
    /// `FUSE_READLINK` reads the target of a symbolic link.
    pub const READLINK: u32 = 5;
    /// `FUSE_SYMLINK` makes a symbolic link.
    pub const SYMLINK: u32 = 6;
    /// `FUSE_MKNOD` makes a file, pipe, socket or device.
    pub const MKNOD: u32 = 8;
    /// `FUSE_MKDIR` makes a directory.
    pub const MKDIR: u32 = 9;
    /// `FUSE_UNLINK` removes a name of a file.
    pub const UNLINK: u32 = 10;
    /// `FUSE_RMDIR` removes an empty directory.
    pub const RMDIR: u32 = 11;
    /// `FUSE_RENAME` moves a name.
    pub const RENAME: u32 = 12;
    /// `FUSE_LINK` makes another name of a file.
    pub const LINK: u32 = 13;
    /// `FUSE_OPEN` opens a file.
    pub const OPEN: u32 = 14;
    /// `FUSE_READ` reads content.
    pub const READ: u32 = 15;
    /// `FUSE_WRITE` writes content.
    pub const WRITE: u32 = 16;
    /// `FUSE_STATFS` reports space.
    pub const STATFS: u32 = 17;
    /// `FUSE_RELEASE` ends an open file.
    pub const RELEASE: u32 = 18;
    /// `FUSE_FSYNC` makes content durable.
    pub const FSYNC: u32 = 20;
    /// `FUSE_SETXATTR` changes an extended attribute.
    pub const SETXATTR: u32 = 21;
    /// `FUSE_GETXATTR` reads an extended attribute.
    pub const GETXATTR: u32 = 22;
    /// `FUSE_LISTXATTR` lists extended attributes.
    pub const LISTXATTR: u32 = 23;
    /// `FUSE_REMOVEXATTR` removes an extended attribute.
    pub const REMOVEXATTR: u32 = 24;
    /// `FUSE_FLUSH` follows each close of a descriptor.
    pub const FLUSH: u32 = 25;
    /// `FUSE_INIT` is the handshake.
    pub const INIT: u32 = 26;
    /// `FUSE_OPENDIR` opens a directory.
    pub const OPENDIR: u32 = 27;
    /// `FUSE_READDIR` lists a directory.
    pub const READDIR: u32 = 28;
    /// `FUSE_RELEASEDIR` ends an open directory.
    pub const RELEASEDIR: u32 = 29;
    /// `FUSE_FSYNCDIR` makes a directory durable.
    pub const FSYNCDIR: u32 = 30;
    /// `FUSE_GETLK` finds the lock that blocks another one.
    pub const GETLK: u32 = 31;
    /// `FUSE_SETLK` takes or releases a lock, without waiting.
    pub const SETLK: u32 = 32;
    /// `FUSE_SETLKW` takes a lock and waits for it.
    pub const SETLKW: u32 = 33;
    /// `FUSE_ACCESS` checks permissions.
    pub const ACCESS: u32 = 34;
    /// `FUSE_CREATE` makes and opens a file.
    pub const CREATE: u32 = 35;
    /// `FUSE_INTERRUPT` reports a signal to the program of an earlier request.
    pub const INTERRUPT: u32 = 36;
    /// `FUSE_DESTROY` ends the session.
    pub const DESTROY: u32 = 38;
    /// `FUSE_IOCTL` is a device request on a file.
    pub const IOCTL: u32 = 39;
    /// `FUSE_BATCH_FORGET` drops look-ups of several nodes.
    pub const BATCH_FORGET: u32 = 42;
    /// `FUSE_FALLOCATE` allocates or frees a range.
    pub const FALLOCATE: u32 = 43;
    /// `FUSE_READDIRPLUS` lists a directory with attributes.
    pub const READDIRPLUS: u32 = 44;
    /// `FUSE_RENAME2` moves a name, with flags.
    pub const RENAME2: u32 = 45;
    /// `FUSE_LSEEK` finds data or a hole.
    pub const LSEEK: u32 = 46;
    /// `FUSE_COPY_FILE_RANGE` copies between two open files.
    pub const COPY_FILE_RANGE: u32 = 47;
    /// `FUSE_SYNCFS` makes the file system durable.
    pub const SYNCFS: u32 = 50;
    /// `FUSE_TMPFILE` makes and opens a file without a name.
    pub const TMPFILE: u32 = 51;
    /// `FUSE_COPY_FILE_RANGE_64` copies between two open files; its answer has 64 bits for the count.
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Features that kernel and server offer each other in INIT (`FUSE_…`). Bits from 32 on are in a second word.
pub(crate) mod init {
    pub(crate) const ASYNC_READ: u64 = 1;
    pub(crate) const POSIX_LOCKS: u64 = 1 << 1;
    pub(crate) const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    pub(crate) const FLOCK_LOCKS: u64 = 1 << 10;
    pub(crate) const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub(crate) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(crate) const ASYNC_DIO: u64 = 1 << 15;
    pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const CACHE_SYMLINKS: u64 = 1 << 23;
    pub(crate) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub(crate) const INIT_EXT: u64 = 1 << 30;
    pub(crate) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(crate) const PASSTHROUGH: u64 = 1 << 37;
    pub(crate) const HAS_RESEND: u64 = 1 << 39;
}

/// The behaviour of an open file or directory, in the answer to OPEN, CREATE and OPENDIR (`FOPEN_…`).
pub(crate) mod fopen {
    pub(crate) const DIRECT_IO: u32 = 1;
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    pub(crate) const NONSEEKABLE: u32 = 1 << 2;
    pub(crate) const CACHE_DIR: u32 = 1 << 3;
    pub(crate) const NOFLUSH: u32 = 1 << 5;
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub(crate) const PASSTHROUGH: u32 = 1 << 7;
}

/// The fields of SETATTR that are valid (`FATTR_…`).
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const LOCKOWNER: u32 = 1 << 9;
    pub(crate) const CTIME: u32 = 1 << 10;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// `FUSE_UNIQUE_RESEND`. The number of a request that the kernel sends again: this flag, and its earlier number.
pub(crate) const UNIQUE_RESEND: u64 = 1 << 63;

/// `FUSE_GETATTR_FH`: GETATTR names an open file.
pub(crate) const GETATTR_FH: u32 = 1;
/// `FUSE_OPEN_KILL_SUIDGID`: a truncating open also clears setuid and setgid.
pub(crate) const OPEN_KILL_SUIDGID: u32 = 1;
/// `FUSE_WRITE_CACHE`: the write comes from the page cache.
pub(crate) const WRITE_CACHE: u32 = 1;
/// `FUSE_WRITE_KILL_SUIDGID`: the write also clears setuid and setgid.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `FUSE_RELEASE_FLUSH`.
pub(crate) const RELEASE_FLUSH: u32 = 1;
/// `FUSE_RELEASE_FLOCK_UNLOCK`.
pub(crate) const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// `FUSE_FSYNC_FDATASYNC`: the attributes need no sync.
pub(crate) const FSYNC_DATA_ONLY: u32 = 1;
/// `FUSE_LK_FLOCK`: the lock is flock(2)'s.
pub(crate) const LK_FLOCK: u32 = 1;

/// Unsolicited messages of the server (`FUSE_NOTIFY_…`); the code replaces an answer's error.
pub(crate) mod notify {
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
    pub(crate) const DELETE: i32 = 6;
    pub(crate) const RESEND: i32 = 7;
}

/// ioctls on `/dev/fuse` itself (`FUSE_DEV_IOC_…`).
pub(crate) mod device {
    use rustix::ioctl::{Opcode, opcode};

    /// Argument of [`BACKING_OPEN`] (`struct fuse_backing_map`).
    #[repr(C)]
    pub(crate) struct BackingMap {
        pub(crate) fd: i32,
        pub(crate) flags: u32,
        pub(crate) padding: u64,
    }

    const GROUP: u8 = 229;
    pub(crate) const CLONE: Opcode = opcode::read::<u32>(GROUP, 0);
    pub(crate) const BACKING_OPEN: Opcode = opcode::write::<BackingMap>(GROUP, 1);
    pub(crate) const BACKING_CLOSE: Opcode = opcode::write::<u32>(GROUP, 2);
}

/// Takes fields off the front of a message; a message that ends too early is EINVAL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Errno::INVAL)?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Errno> {
        self.array().map(u16::from_ne_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Errno> {
        self.array().map(u32::from_ne_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Errno> {
        self.array().map(u64::from_ne_bytes)
    }

    /// Bytes up to a NUL, which is consumed too.
    pub(crate) fn text(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.rest.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
        let text = self.take(end)?;
        self.take(1)?;
        Ok(text)
    }

    /// One component of a path: never empty, and never a way out of its directory.
    pub(crate) fn name(&mut self) -> Result<&'a [u8], Errno> {
        match self.text()? {
            b"" | b"." | b".." => Err(Errno::INVAL),
            name if name.contains(&b'/') => Err(Errno::INVAL),
            name => Ok(name),
        }
    }
}
