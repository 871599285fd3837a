//! Numbers of the kernel's FUSE protocol (7.31 to 7.45): opcodes, flags, sizes, device ioctls, and a checked reader of its
//! fields. All integers travel in the machine's own byte order.

use rustix::io::Errno;

pub(crate) const VERSION_MAJOR: u32 = 7;
/// The newest revision whose requests are understood here.
pub(crate) const VERSION_MINOR: u32 = 45;
/// The oldest supported kernel protocol (Linux 5.4): older structures are shorter.
pub(crate) const VERSION_MINOR_MIN: u32 = 31;

pub const ROOT_NODE: u64 = 1;
pub const IN_HEADER_BYTES: usize = 40;
pub(crate) const OUT_HEADER_BYTES: usize = 16;
/// Bytes in front of the payload of a WRITE request.
pub(crate) const WRITE_PREFIX_BYTES: usize = IN_HEADER_BYTES + 40;
pub(crate) const PAGE_BYTES: usize = 4096;
/// Room for everything in a request that is not written data.
pub(crate) const REQUEST_SLACK_BYTES: usize = PAGE_BYTES;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Features that kernel and server offer each other in INIT. Bits from 32 on are in a second word.
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

/// The behaviour of an open file or directory, in the answer to OPEN, CREATE and OPENDIR.
pub(crate) mod fopen {
    pub(crate) const DIRECT_IO: u32 = 1;
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    pub(crate) const NONSEEKABLE: u32 = 1 << 2;
    pub(crate) const CACHE_DIR: u32 = 1 << 3;
    pub(crate) const NOFLUSH: u32 = 1 << 5;
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub(crate) const PASSTHROUGH: u32 = 1 << 7;
}

/// The fields of SETATTR that are valid.
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

/// The number of a request that the kernel sends again: this flag, and its earlier number.
pub(crate) const UNIQUE_RESEND: u64 = 1 << 63;

pub(crate) const GETATTR_FH: u32 = 1;
pub(crate) const OPEN_KILL_SUIDGID: u32 = 1;
pub(crate) const WRITE_CACHE: u32 = 1;
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub(crate) const RELEASE_FLUSH: u32 = 1;
pub(crate) const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
pub(crate) const FSYNC_DATA_ONLY: u32 = 1;
pub(crate) const LK_FLOCK: u32 = 1;

/// Unsolicited messages of the server; the code replaces an answer's error.
pub(crate) mod notify {
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
    pub(crate) const DELETE: i32 = 6;
    pub(crate) const RESEND: i32 = 7;
}

/// ioctls on `/dev/fuse` itself.
pub(crate) mod device {
    use rustix::ioctl::{Opcode, opcode};

    /// Argument of [`BACKING_OPEN`].
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
