//! Attributes of a file as the mount reports them.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

impl Kind {
    /// The `S_IFMT` bits.
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

/// Nanoseconds since the epoch (covers the years 1678 to 2262).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Timestamp {
    pub nanos: i64,
}

impl Timestamp {
    pub fn from_parts(secs: i64, nanos: u32) -> Self {
        Self { nanos: secs.saturating_mul(1_000_000_000).saturating_add(i64::from(nanos)) }
    }
    pub fn secs(self) -> i64 {
        self.nanos.div_euclid(1_000_000_000)
    }
    pub fn subsec_nanos(self) -> u32 {
        self.nanos.rem_euclid(1_000_000_000) as u32
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky (07777); the type is in `kind`.
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    /// Inode number as programs see it.
    pub ino: u64,
    pub links: u32,
    pub size_bytes: u64,
    /// 512-byte blocks, as `st_blocks`.
    pub blocks: u64,
    pub device: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
}

impl Attr {
    pub fn mode(&self) -> u32 {
        self.kind.type_bits() | self.perm
    }

    /// Bytes that were written; holes have none.
    pub fn data_bytes(&self) -> u64 {
        data_bytes(self.size_bytes, self.blocks)
    }
}

/// Bytes of a file that hold data, by its size and its 512-byte blocks.
pub fn data_bytes(size_bytes: u64, blocks: u64) -> u64 {
    // A small file may lie in its inode and then has no blocks.
    const INLINE_BYTES_MAX: u64 = 4096;
    size_bytes.min(blocks.saturating_mul(512).max(INLINE_BYTES_MAX))
}
