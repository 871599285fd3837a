//! Attributes of a file as the mount reports them.

use serde::{Deserialize, Serialize};

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket of the Unix domain.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl Kind {
    /// The `S_IFMT` bits of `st_mode`.
    pub const fn type_bits(self) -> u32 {
        match self {
            Self::File => libc::S_IFREG,
            Self::Directory => libc::S_IFDIR,
            Self::Symlink => libc::S_IFLNK,
            Self::Fifo => libc::S_IFIFO,
            Self::Socket => libc::S_IFSOCK,
            Self::CharDevice => libc::S_IFCHR,
            Self::BlockDevice => libc::S_IFBLK,
        }
    }

    /// The type in the `S_IFMT` bits of `mode`. Unknown bits give [`Kind::File`].
    pub const fn from_mode(mode: u32) -> Self {
        match mode & libc::S_IFMT {
            libc::S_IFDIR => Self::Directory,
            libc::S_IFLNK => Self::Symlink,
            libc::S_IFIFO => Self::Fifo,
            libc::S_IFSOCK => Self::Socket,
            libc::S_IFCHR => Self::CharDevice,
            libc::S_IFBLK => Self::BlockDevice,
            _ => Self::File,
        }
    }

    /// The `d_type` of a directory entry.
    pub const fn dirent_type(self) -> u32 {
        self.type_bits() >> 12
    }
}

/// A moment of the wall clock, in nanoseconds since 1970-01-01 UTC (covers the years 1678 to 2262).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Timestamp {
    /// Nanoseconds since 1970-01-01 UTC; negative before.
    pub nanos: i64,
}

impl Timestamp {
    /// From seconds and nanoseconds, as in `struct timespec`. A value out of range becomes the nearest one in range.
    pub fn from_parts(secs: i64, nanos: u32) -> Self {
        Self { nanos: secs.saturating_mul(1_000_000_000).saturating_add(i64::from(nanos)) }
    }
    /// Whole seconds since 1970-01-01 UTC, rounded down.
    pub fn secs(self) -> i64 {
        self.nanos.div_euclid(1_000_000_000)
    }
    /// Nanoseconds within the second, 0 to 999,999,999.
    pub fn subsec_nanos(self) -> u32 {
        self.nanos.rem_euclid(1_000_000_000) as u32
    }
}

/// Attributes of a file, as `stat(2)` reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Type of the file.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky (07777); `kind` has the type.
    pub perm: u32,
    /// User id of the Unix owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Inode number, as programs see it.
    pub ino: u64,
    /// Number of hard links.
    pub links: u32,
    /// Length in bytes; of a symbolic link, the length of its target.
    pub size_bytes: u64,
    /// 512-byte blocks, as `st_blocks`.
    pub blocks: u64,
    /// `st_rdev` of a device file, else 0.
    pub device: u64,
    /// Time of the last access.
    pub atime: Timestamp,
    /// Time of the last change of the content.
    pub mtime: Timestamp,
    /// Time of the last change of the content or the attributes.
    pub ctime: Timestamp,
}

impl Attr {
    /// `st_mode`: the type and the permission bits.
    pub fn mode(&self) -> u32 {
        self.kind.type_bits() | self.perm
    }

    /// Bytes of the file that hold data; holes hold none.
    pub fn data_bytes(&self) -> u64 {
        data_bytes(self.size_bytes, self.blocks)
    }
}

/// Bytes of a file that hold data, from its size in bytes and its number of 512-byte blocks.
pub fn data_bytes(size_bytes: u64, blocks: u64) -> u64 {
    // Some file systems store a small file in its inode, which then has no blocks.
    const INLINE_BYTES_MAX: u64 = 4096;
    size_bytes.min(blocks.saturating_mul(512).max(INLINE_BYTES_MAX))
}
