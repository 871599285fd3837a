//! The layout that the shim reads: `shim/abi.h` in Rust; that header explains each field. A test compares the two.

pub const MAGIC: u64 = 0x5844_494b_4e41_5453;
pub const LAYOUT: u32 = 4;
pub const DEVICES_MAX: usize = 16;
pub const NAME_BYTES_MAX: usize = 255;

pub mod of_record {
    pub const KNOWN: u32 = 1;
    pub const RESIDENT: u32 = 2;
    pub const LIVE: u32 = 4;
    pub const COMPLETE: u32 = 8;
    pub const SEARCHABLE: u32 = 16;
    pub const LINKED: u32 = 32;
    pub const FRESH: u32 = 64;
    pub const DELEGATED: u32 = 128;
}
pub const WRITES: u32 = 1;
pub const RING: u32 = 2;
pub const NOEXEC: u32 = 1;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Extent {
    pub offset: u64,
    pub capacity: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Device {
    pub dev: u64,
    pub flags: u32,
    pub root_bytes: u32,
    pub root_offset: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Header {
    pub magic: u64,
    pub layout: u32,
    pub flags: u32,
    pub total_bytes: u64,
    pub alive_until_ns: u64,
    pub generation: u64,
    pub key: [u64; 2],
    pub mount_dev: u64,
    pub root: u32,
    pub uid: u32,
    pub names: Extent,
    pub records: Extent,
    pub labels: Extent,
    pub dirs: Extent,
    pub plain: Extent,
    pub device_count: u32,
    pub moves: u32,
    pub devices: [Device; DEVICES_MAX],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Name {
    pub a: u64,
    pub b: u64,
    pub id: u64,
    pub record: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    pub seq: u32,
    pub flags: u32,
    pub id: u64,
    pub ino: u64,
    pub backing_ino: u64,
    pub device: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub label: u32,
    pub rdev: u64,
    pub size_bytes: u64,
    pub blocks: u64,
    pub atime_s: i64,
    pub mtime_s: i64,
    pub ctime_s: i64,
    pub atime_ns: u32,
    pub mtime_ns: u32,
    pub ctime_ns: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Label {
    pub parent: u32,
    pub name_bytes: u32,
    pub name: [u8; NAME_BYTES_MAX + 1],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Dir {
    pub ino: u64,
    pub record: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Plain {
    pub backing_ino: u64,
    pub device: u32,
    pub record: u32,
}

pub const RING_MAGIC: u64 = 0x474e_4952_4b4e_4154;
pub const INTAKE_ENTRIES: u64 = 1024;
pub const RING_SLOTS_OFFSET: usize = 4096;

pub mod phase {
    pub const FREE: u64 = 0;
    pub const MADE: u64 = 1;
    pub const DONE: u64 = 2;
    pub const VOID: u64 = 3;
    pub const REVOKED: u64 = 4;
    pub const SKIP: u64 = 5;
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Ring {
    pub magic: u64,
    pub layout: u32,
    pub entries: u32,
    pub epoch: u64,
    pub turn: u64,
    pub first: u64,
    pub limit: u64,
    pub giving: u64,
    pub unused: u64,
    pub next: u64,
    pub filler: [u64; 7],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IntakeEntry {
    pub state: u64,
    pub number: u64,
    pub dir: u64,
    pub dev: u64,
    pub ino: u64,
    pub run: u32,
    pub mode: u32,
    pub device: u32,
    pub name_bytes: u32,
    pub uid: u32,
    pub gid: u32,
    pub name: [u8; NAME_BYTES_MAX + 1],
}

pub mod op {
    pub const OPEN: u32 = 1;
    pub const SYNC: u32 = 2;
    pub const SETATTR: u32 = 3;
    pub const SETATTR_NAMED: u32 = 4;
    pub const SETXATTR: u32 = 5;
    pub const GETXATTR: u32 = 6;
}
pub const MORE_BYTES_MAX: usize = 1024;
pub const VALUE_BYTES_MAX: usize = 4096;
pub mod set {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 2;
    pub const GID: u32 = 4;
    pub const ATIME: u32 = 8;
    pub const MTIME: u32 = 16;
    pub const ATIME_NOW: u32 = 32;
    pub const MTIME_NOW: u32 = 64;
}
pub const ASK_MOUNT: i32 = -1;
/// In `valid` of an OPEN: the program sent it before, to an agent that was killed.
pub const AGAIN: u32 = 1;

/// Without the name, which follows.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Request {
    pub op: u32,
    pub flags: u32,
    pub mode: u32,
    pub valid: u32,
    pub dir: u64,
    pub dev: u64,
    pub ino: u64,
    pub uid: u32,
    pub gid: u32,
    pub atime_s: i64,
    pub mtime_s: i64,
    pub atime_ns: u32,
    pub mtime_ns: u32,
    pub name_bytes: u32,
    pub more_bytes: u32,
}

pub fn fold(x: u64, y: u64) -> u64 {
    let product = u128::from(x) * u128::from(y);
    product as u64 ^ (product >> 64) as u64
}

pub fn mix(x: u64) -> u64 {
    fold(x ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93)
}

/// `st_hash`.
pub fn hash(key: [u64; 2], parent: u64, name: &[u8]) -> (u64, u64) {
    let mut x = fold(key[0] ^ parent, 0xa076_1d64_78bd_642f);
    let mut y = fold(key[1] ^ parent, 0xe703_7ed1_a0b4_28db);
    let eight = |at: usize| (0..8).fold(0, |word, n| word | u64::from(name[at + n]) << (8 * n));
    let four = |at: usize| (0..4).fold(0, |word, n| word | u64::from(name[at + n]) << (8 * n));
    for at in (0..name.len()).step_by(8) {
        let word = match name.len() {
            bytes if bytes - at >= 8 => eight(at),
            bytes if bytes >= 8 => eight(bytes - 8),
            bytes if bytes >= 4 => four(0) | four(bytes - 4) << 32,
            bytes => u64::from(name[0]) | u64::from(name[bytes / 2]) << 8 | u64::from(name[bytes - 1]) << 16,
        };
        x = fold(x ^ word, 0x8ebc_6af0_9c88_c6e3);
        y = fold(y ^ word, 0x5899_65cc_7537_4cc3);
    }
    x = fold(x ^ name.len() as u64, 0x1d8e_4e27_c47d_124f);
    y = fold(y ^ name.len() as u64, 0xeb44_acca_b455_d165);
    (if x < 2 { x + 2 } else { x }, y)
}
