//! What programs do, and what happens around them, as values: made at random over so few names that they collide all the
//! time, printed as they are when a sequence fails, and shrunk to the few that matter.

use proptest::prelude::*;

/// Files that can be open at once.
pub const SLOTS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Both,
}

impl Access {
    pub fn writes(self) -> bool {
        self != Self::Read
    }
    pub fn reads(self) -> bool {
        self != Self::Write
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renaming {
    Plain,
    NoReplace,
    Exchange,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocating {
    Extend,
    KeepSize,
    Punch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    Any,
    Create,
    Replace,
}

/// What programs do. Paths are relative, of names of one letter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    Create {
        path: String,
        slot: usize,
        perm: u32,
        access: Access,
        exclusive: bool,
        append: bool,
        truncate: bool,
    },
    Open {
        path: String,
        slot: usize,
        access: Access,
        append: bool,
        truncate: bool,
    },
    Read {
        slot: usize,
        offset: u64,
        length: usize,
    },
    Write {
        slot: usize,
        offset: u64,
        length: usize,
        byte: u8,
    },
    Truncate {
        path: String,
        size: u64,
    },
    TruncateOpen {
        slot: usize,
        size: u64,
    },
    Allocate {
        slot: usize,
        offset: u64,
        length: u64,
        how: Allocating,
    },
    Close {
        slot: usize,
    },
    Unlink {
        path: String,
    },
    Mkdir {
        path: String,
        perm: u32,
    },
    Rmdir {
        path: String,
    },
    Rename {
        from: String,
        to: String,
        how: Renaming,
    },
    Link {
        from: String,
        to: String,
    },
    Symlink {
        path: String,
    },
    Readlink {
        path: String,
    },
    Chmod {
        path: String,
        perm: u32,
    },
    /// Sets the time of modification.
    Utimens {
        path: String,
        seconds: i64,
    },
    SetXattr {
        path: String,
        name: String,
        byte: u8,
        how: Setting,
    },
    RemoveXattr {
        path: String,
        name: String,
    },
    ListXattr {
        path: String,
    },
    List {
        path: String,
    },
    Stat {
        path: String,
    },
    StatOpen {
        slot: usize,
    },
    Fsync {
        slot: usize,
    },
    FsyncDir {
        path: String,
    },
}

/// What happens around the programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The drain has done all it can.
    Settle,
    StopDrain,
    StartDrain,
    /// Whatever the store has leaves the tiers.
    Evict,
    /// Whatever only the store has comes into a tier.
    Prefetch,
    /// The kernel forgets all that it does not have open.
    Forget,
    /// The agent dies and another one takes up.
    Kill,
    /// A version that goes over a file in place has broken off.
    BrokenOff,
    /// A file is about to be published, and is held.
    Held,
    /// The drain is cut off after so many steps in store and catalog; then as `Kill`.
    KillDrain {
        steps: u64,
    },
    /// A workflow says what becomes of a file or name; until everything shall be in the store.
    Hint {
        path: String,
        mode: &'static str,
        timing: &'static str,
        /// As an attribute, where there is such a file.
        attribute: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Do(Operation),
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

/// Programs, what happens around them, and what their workflow says of it.
pub fn hinted_steps(at_most: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => operation().prop_map(Step::Do),
        2 => event().prop_map(Step::Happens),
        4 => hint().prop_map(Step::Happens),
    ];
    prop::collection::vec(step, 1..=at_most)
}

/// Programs and what happens around them.
pub fn steps(at_most: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => operation().prop_map(Step::Do),
        1 => event().prop_map(Step::Happens),
    ];
    prop::collection::vec(step, 1..=at_most)
}
