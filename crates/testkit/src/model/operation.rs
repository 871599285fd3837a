//! Operations of programs, and events around them, as values. A random search makes them over so few names that they often
//! collide; a failing sequence is printed and shrunk to its relevant steps.

use proptest::prelude::*;

/// Number of files that can be open at the same time.
pub const SLOTS: usize = 4;

/// The access of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// `O_RDONLY`.
    Read,
    /// `O_WRONLY`.
    Write,
    /// `O_RDWR`.
    Both,
}

impl Access {
    /// Whether it permits writing.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
    /// Whether it permits reading.
    pub fn reads(self) -> bool {
        self != Self::Write
    }
}

/// The flags of a rename.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renaming {
    /// No flag: an existing target is replaced.
    Plain,
    /// `RENAME_NOREPLACE`.
    NoReplace,
    /// `RENAME_EXCHANGE`.
    Exchange,
}

/// The mode of `fallocate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocating {
    /// No flag: the file grows.
    Extend,
    /// `FALLOC_FL_KEEP_SIZE`.
    KeepSize,
    /// `FALLOC_FL_PUNCH_HOLE`.
    Punch,
}

/// The flag of `setxattr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// No flag.
    Any,
    /// `XATTR_CREATE`.
    Create,
    /// `XATTR_REPLACE`.
    Replace,
}

/// An operation of a program. Paths are relative, with names of one letter; `slot` is the number of an open file; offsets and
/// lengths are in bytes.
#[allow(missing_docs, reason = "the fields are the arguments of the system call that each variant names")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// `open` with `O_CREAT`.
    Create { path: String, slot: usize, perm: u32, access: Access, exclusive: bool, append: bool, truncate: bool },
    /// `open` of an existing file.
    Open { path: String, slot: usize, access: Access, append: bool, truncate: bool },
    /// `pread`.
    Read { slot: usize, offset: u64, length: usize },
    /// `pwrite` of `length` times `byte`.
    Write { slot: usize, offset: u64, length: usize, byte: u8 },
    /// `truncate`.
    Truncate { path: String, size: u64 },
    /// `ftruncate`.
    TruncateOpen { slot: usize, size: u64 },
    /// `fallocate`.
    Allocate { slot: usize, offset: u64, length: u64, how: Allocating },
    /// `close`.
    Close { slot: usize },
    /// `unlink`.
    Unlink { path: String },
    /// `mkdir`.
    Mkdir { path: String, perm: u32 },
    /// `rmdir`.
    Rmdir { path: String },
    /// `renameat2`.
    Rename { from: String, to: String, how: Renaming },
    /// `link`.
    Link { from: String, to: String },
    /// `symlink` to a target that does not exist.
    Symlink { path: String },
    /// `readlink`.
    Readlink { path: String },
    /// `chmod`.
    Chmod { path: String, perm: u32 },
    /// `utimensat` of the modification time, in seconds since 1970.
    Utimens { path: String, seconds: i64 },
    /// `setxattr` with a value of one byte.
    SetXattr { path: String, name: String, byte: u8, how: Setting },
    /// `removexattr`.
    RemoveXattr { path: String, name: String },
    /// `listxattr` and `getxattr` of all.
    ListXattr { path: String },
    /// `readdir` of the whole directory.
    List { path: String },
    /// `lstat`.
    Stat { path: String },
    /// `fstat`.
    StatOpen { slot: usize },
    /// `fsync`.
    Fsync { slot: usize },
    /// `fsync` of a directory.
    FsyncDir { path: String },
}

/// An event around the programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The drain finishes everything that it can.
    Settle,
    /// The drain stops.
    StopDrain,
    /// The drain continues.
    StartDrain,
    /// Every file that the store has leaves the tiers.
    Evict,
    /// Every file that only the store has is copied to a tier.
    Prefetch,
    /// The kernel drops every inode that it does not have open.
    Forget,
    /// The agent dies, and another one takes over.
    Kill,
    /// The write of a version over a file in place is interrupted.
    BrokenOff,
    /// The drain stops at a file just before it publishes it.
    Held,
    /// The drain is interrupted after this many steps in store and catalog; then as [`Self::Kill`].
    KillDrain {
        /// Number of steps in store and catalog before the interruption.
        steps: u64,
    },
    /// A workflow gives a hint for a file or name. It applies until the end of the sequence, when everything must be in the
    /// store.
    Hint {
        /// The file or name.
        path: String,
        /// The hint `mode`.
        mode: &'static str,
        /// The hint `timing`.
        timing: &'static str,
        /// Whether it is set as an extended attribute, if the file exists.
        attribute: bool,
    },
}

/// One step of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A program's operation.
    Do(Operation),
    /// An event around the programs.
    Happens(Event),
}

fn path() -> impl Strategy<Value = String> {
    let name = || prop::sample::select(vec!["a", "b", "c"]);
    prop_oneof![
        4 => name().prop_map(str::to_owned),
        4 => (name(), name()).prop_map(|(a, b)| format!("{a}/{b}")),
        1 => (name(), name(), name()).prop_map(|(a, b, c)| format!("{a}/{b}/{c}")),
    ]
}

fn slot() -> impl Strategy<Value = usize> {
    0..SLOTS
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Both), Just(Access::Write), Just(Access::Read)]
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(0_u64), 3 => 0..300_u64, 1 => 0..150_000_u64]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1..200_usize, 2 => 4000..9000_usize, 1 => 60_000..140_000_usize]
}

fn file_perm() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![0o644, 0o600, 0o755, 0o444])
}

fn dir_perm() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![0o755, 0o700, 0o775])
}

fn xattr_name() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["user.one", "user.two"]).prop_map(str::to_owned)
}

/// A random operation.
pub fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        10 => (path(), slot(), file_perm(), access(), any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(path, slot, perm, access, exclusive, append, truncate)| Create { path, slot, perm, access, exclusive, append, truncate: truncate && access.writes() }),
        6 => (path(), slot(), access(), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(path, slot, access, append, truncate)| Open { path, slot, access, append, truncate: truncate && access.writes() }),
        5 => (slot(), offset(), length()).prop_map(|(slot, offset, length)| Read { slot, offset, length }),
        12 => (slot(), offset(), length(), 1..=255_u8).prop_map(|(slot, offset, length, byte)| Write { slot, offset, length, byte }),
        3 => (path(), offset()).prop_map(|(path, size)| Truncate { path, size }),
        2 => (slot(), offset()).prop_map(|(slot, size)| TruncateOpen { slot, size }),
        2 => (slot(), offset(), 1..9000_u64, prop::sample::select(vec![Allocating::Extend, Allocating::KeepSize, Allocating::Punch]))
            .prop_map(|(slot, offset, length, how)| Allocate { slot, offset, length, how }),
        8 => slot().prop_map(|slot| Close { slot }),
        6 => path().prop_map(|path| Unlink { path }),
        8 => (path(), dir_perm()).prop_map(|(path, perm)| Mkdir { path, perm }),
        4 => path().prop_map(|path| Rmdir { path }),
        10 => (path(), path(), prop_oneof![5 => Just(Renaming::Plain), 1 => Just(Renaming::NoReplace), 2 => Just(Renaming::Exchange)])
            .prop_map(|(from, to, how)| Rename { from, to, how }),
        5 => (path(), path()).prop_map(|(from, to)| Link { from, to }),
        3 => path().prop_map(|path| Symlink { path }),
        1 => path().prop_map(|path| Readlink { path }),
        3 => (path(), file_perm()).prop_map(|(path, perm)| Chmod { path, perm: perm | 0o100 }),
        3 => (path(), 1_000_000..1_500_000_000_i64).prop_map(|(path, seconds)| Utimens { path, seconds }),
        3 => (path(), xattr_name(), any::<u8>(), prop_oneof![3 => Just(Setting::Any), 1 => Just(Setting::Create), 1 => Just(Setting::Replace)])
            .prop_map(|(path, name, byte, how)| SetXattr { path, name, byte, how }),
        1 => (path(), xattr_name()).prop_map(|(path, name)| RemoveXattr { path, name }),
        1 => path().prop_map(|path| ListXattr { path }),
        3 => prop_oneof![Just(String::new()), path()].prop_map(|path| List { path }),
        4 => path().prop_map(|path| Stat { path }),
        1 => slot().prop_map(|slot| StatOpen { slot }),
        1 => slot().prop_map(|slot| Fsync { slot }),
        1 => path().prop_map(|path| FsyncDir { path }),
    ]
}

/// A random event, without hints.
pub fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => Just(Event::Settle),
        2 => Just(Event::StopDrain),
        2 => Just(Event::StartDrain),
        3 => Just(Event::Evict),
        1 => Just(Event::Prefetch),
        3 => Just(Event::Forget),
        2 => Just(Event::Kill),
        2 => (0..40_u64).prop_map(|steps| Event::KillDrain { steps }),
    ]
}

fn hint() -> impl Strategy<Value = Event> {
    let mode = prop::sample::select(vec!["keep", "copy", "move", "remove"]);
    let timing = prop::sample::select(vec!["soon", "last"]);
    let of = prop_oneof![1 => Just(String::new()), 9 => path()];
    (of, mode, timing, any::<bool>()).prop_map(|(path, mode, timing, attribute)| Event::Hint {
        path,
        mode,
        timing,
        attribute,
    })
}

/// A sequence of operations, events and hints, of at most `at_most` steps.
pub fn hinted_steps(at_most: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => operation().prop_map(Step::Do),
        2 => event().prop_map(Step::Happens),
        4 => hint().prop_map(Step::Happens),
    ];
    prop::collection::vec(step, 1..=at_most)
}

/// A sequence of operations and events, of at most `at_most` steps.
pub fn steps(at_most: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => operation().prop_map(Step::Do),
        1 => event().prop_map(Step::Happens),
    ];
    prop::collection::vec(step, 1..=at_most)
}
