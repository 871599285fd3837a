//! The dispatcher: at operations on files it asks the hints that want to be asked
//! ([`Module`](surgetank_policy::hint::module::Module)), and carries out what they answer.
//!
//! Everything that opens, cuts or replaces a file passes here first, through whichever door. In a pool that is the member that
//! has the file's name. The danger that this avoids: a hint that holds for one door, or on one member, only.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use surgetank_policy::hint::module::{Act, Event, Moment, is_set_aside};
use surgetank_policy::hint::{Acting, acts, listens};
use surgetank_policy::rule::Decision;
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Caller, FileId, RunId};
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::base::notes::Notes;
use crate::base::succession::{Flag, Succession};
use crate::base::waits::Waits;
use crate::base::{Base, Door};
use crate::files::descriptor_grant::Descriptors;
use crate::metadata::asked::{decision_if_asked, may_be_asked};
use crate::metadata::inode_locks::InodeLocks;
use crate::metadata::{Metadata, TTL_OURS};

/// A reader waits so long for the end of a file's writers.
pub const SEAL_TIMEOUT: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// For closes that the kernel reports late.
const CLOSES_TIMEOUT: Duration = Duration::from_secs(2);
/// After its last close a file is sealed soon.
const SEALED_TIMEOUT: Duration = Duration::from_millis(200);
const SEALED_LOOK_EVERY: Duration = Duration::from_millis(2);

/// Keeps the content of a file beside it: so many contents at most.
pub(crate) type SetAside = Box<dyn Fn(&Caller, FileId, u32) -> FsResult<()> + Send + Sync>;

thread_local! {
    /// Does the thread do something of the agent's own?
    static UNASKED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Asks hints at operations.
pub struct Dispatcher {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    notes: Arc<Notes>,
    waits: Arc<Waits>,
    descriptors: Arc<Descriptors>,
    metadata: Arc<Metadata>,
    set_aside: OnceLock<SetAside>,
    /// One at a time for each file.
    aside: InodeLocks,
    /// Names of earlier contents that programs have given lately: the kernel may believe them still.
    given: Mutex<VecDeque<Given>>,
}

/// When a program gave it, in which directory, and the name.
type Given = (Instant, FileId, Box<[u8]>);

/// So many are remembered.
const GIVEN_MAX: usize = 10_000;

/// A program still writes the file, and its readers wait. In a pool it is the answer to a program's open: the member of the program
/// asks again. No file system fails with this error.
pub const STILL_WRITTEN: Errno = Errno::ISNAM;

/// What an operation finds.
struct Looked {
    decision: Decision,
    name: Vec<u8>,
    path: Vec<u8>,
    sealed: bool,
    is_empty: bool,
    run: RunId,
    ino: u64,
}

impl Looked {
    /// The content is complete, although its version may be made a moment later.
    fn is_complete(&self, metadata: &Metadata, id: FileId) -> bool {
        self.sealed || metadata.open_of(id).is_none_or(|open| open.writers() == 0)
    }
}

impl Dispatcher {
    pub(crate) fn new(base: &Base, descriptors: &Arc<Descriptors>, metadata: &Arc<Metadata>) -> Self {
        Self {
            door: base.door.clone(),
            notes: base.notes.clone(),
            waits: base.waits.clone(),
            descriptors: descriptors.clone(),
            metadata: metadata.clone(),
            set_aside: OnceLock::new(),
            aside: InodeLocks::new(),
            given: Mutex::default(),
        }
    }

    /// The function that keeps contents. (It works on names, and those are made of files.)
    pub(crate) fn set_keeper(&self, keeper: SetAside) {
        // (Set once.)
        let _ = self.set_aside.set(keeper);
    }

    /// The content of the file is about to go: a program opens it for writing, cuts it, or gives its name to another file. Errors: EINTR,
    /// the program is being killed.
    pub(crate) fn before_change(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        let Some(mut looked) = self.look_settled(id, Moment::Changes) else { return Ok(()) };
        let event = |looked: &Looked| {
            let event = Event::Changes { name: &looked.name };
            acts(&looked.decision.acting, &event).collect::<Vec<Act>>()
        };
        for act in event(&looked) {
            let Act::SetAside { contents } = act else { continue };
            self.waits.begin_long();
            let _alone = loop {
                match self.aside.lock_within(id, LOOK_EVERY) {
                    Some(alone) => break alone,
                    None if self.waits.is_killed() => return Err(Errno::INTR.into()),
                    None => {}
                }
            };
            match self.look(id, Moment::Changes) {
                Some(now) => looked = now,
                None => return Ok(()),
            }
            if !looked.is_complete(&self.metadata, id) || looked.sealed && looked.is_empty {
                return Ok(());
            }
            let keep = || self.set_aside.get().map_or(Ok(()), |keep| keep(caller, id, contents));
            let done = Succession::besides(|| Self::unasked(keep));
            match done {
                Ok(()) => {}
                Err(_) if self.waits.is_killed() => return Err(Errno::INTR.into()),
                // A hint advises: the program goes on.
                Err(why) => {
                    let path = String::from_utf8_lossy(&looked.path).into_owned();
                    let what = format!("its content before a change could not be kept beside it ({why})");
                    self.notes.note(looked.run, path, what, false);
                }
            }
        }
        Ok(())
    }

    /// A program has given a file this name, by a rename.
    pub(crate) fn is_given(&self, dir: FileId, name: &[u8]) {
        if UNASKED.get() || !is_set_aside(name) {
            return;
        }
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if given.len() >= GIVEN_MAX {
            given.pop_front();
        }
        given.push_back((clock::tick(), dir, name.into()));
    }

    /// Has a program done that lately? The kernel would take the name for that file, whichever has it now.
    pub(crate) fn was_given(&self, dir: FileId, name: &[u8]) -> bool {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        while given.front().is_some_and(|(at, ..)| at.elapsed() > TTL_OURS) {
            given.pop_front();
        }
        given.iter().any(|(_, of, one)| *of == dir && **one == *name)
    }

    /// A program is about to open the file for reading. Errors: EBUSY, it is still written; EINTR; in a pool [`STILL_WRITTEN`].
    pub(crate) fn before_read(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        match self.waits_for_seal(caller, id) {
            Some(_) if self.metadata.pool.get().is_some() => Err(STILL_WRITTEN.into()),
            Some(looked) => self.await_seal(id, &looked),
            None => Ok(()),
        }
    }

    /// The same while the kernel holds a lock of the directory, which the writer may need. Errors: ESTALE, the kernel comes again
    /// without it.
    pub(crate) fn before_read_locked(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        self.waits_for_seal(caller, id).map_or(Ok(()), |_| Err(Errno::STALE.into()))
    }

    fn waits_for_seal(&self, caller: &Caller, id: FileId) -> Option<Looked> {
        let looked = self.look_settled(id, Moment::Reads)?;
        let event = Event::Reads { is_written: !looked.is_complete(&self.metadata, id) };
        let waits = acts(&looked.decision.acting, &event).any(|act| act == Act::AwaitSeal);
        (waits && !self.writes_it(caller, &looked)).then_some(looked)
    }

    fn await_seal(&self, id: FileId, looked: &Looked) -> FsResult<()> {
        let until = clock::tick() + SEAL_TIMEOUT;
        self.waits.begin_long();
        loop {
            let is_complete = self.metadata.open_of(id).is_none_or(|open| open.writers() == 0);
            let tree = self.metadata.read_tree();
            if is_complete || tree.get(id).is_none_or(|inode| inode.sealed) {
                return Ok(());
            }
            let left = until.saturating_duration_since(clock::tick());
            if left.is_zero() {
                let path = String::from_utf8_lossy(&looked.path);
                let why =
                    format!("{path}: a program still writes it, and its hint consistency=sealed has readers wait");
                return Err(Fault::new(Errno::BUSY, why));
            }
            if self.waits.is_interrupted() {
                return Err(Errno::INTR.into());
            }
            drop(self.metadata.wait_changed(tree, left.min(LOOK_EVERY)));
            self.descriptors.catch_up();
        }
    }

    /// Would the program wait for itself? It would not by another name of the file, or with a mapping of it. (In a pool another member's
    /// process may stand for it: then it does.)
    fn writes_it(&self, caller: &Caller, looked: &Looked) -> bool {
        use std::os::unix::ffi::OsStrExt;
        if self.metadata.pool.get().is_some() {
            return false;
        }
        let of = format!("/proc/{}", caller.pid);
        let Ok(descriptors) = std::fs::read_dir(format!("{of}/fd")) else { return false };
        descriptors.flatten().any(|descriptor| {
            let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
            if target.file_name().is_none_or(|name| name.as_bytes() != looked.name) {
                return false;
            }
            let number = descriptor.file_name();
            let info = std::fs::read_to_string(format!("{of}/fdinfo/{}", number.to_string_lossy())).unwrap_or_default();
            let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let flags = field("flags:").and_then(|flags| i32::from_str_radix(flags, 8).ok());
            // (Before Linux 5.14 the path has to do.)
            let is_it = match field("ino:") {
                Some(ino) => ino.parse() == Ok(looked.ino),
                None => target.as_os_str().as_bytes().ends_with(&looked.path),
            };
            is_it && flags.is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
        })
    }

    /// Has the file hints that are asked at its opens? Then only the mount serves it.
    pub(crate) fn is_asked(&self, id: FileId) -> bool {
        [Moment::Changes, Moment::Reads].into_iter().any(|moment| self.look(id, moment).is_some())
    }

    /// The same of a file that is about to be made.
    pub(crate) fn is_asked_new(&self, dir: FileId, name: &[u8]) -> bool {
        let tree = self.metadata.read_tree();
        if !may_be_asked(&self.metadata, &tree) {
            return false;
        }
        let path = tree.child_path(dir, name).unwrap_or_default();
        let acting = self.metadata.decided_new(&tree, dir, &path).acting;
        listens(&acting, Moment::Changes) || listens(&acting, Moment::Reads)
    }

    /// What the drain does between two pieces of a file.
    pub(crate) fn drained(acting: &Acting, took: Duration, others_wait: bool) -> Duration {
        let event = Event::Drains { took, others_wait };
        let rests = acts(acting, &event).map(|act| if let Act::Rest(rest) = act { rest } else { Duration::ZERO });
        rests.sum()
    }

    /// As [`Self::look`]. Programs may have closed the file already.
    fn look_settled(&self, id: FileId, moment: Moment) -> Option<Looked> {
        let looked = self.look(id, moment)?;
        if looked.sealed {
            return Some(looked);
        }
        if let Some(door) = self.door.get() {
            // (The closes need threads, too.)
            self.waits.begin_long();
            door.closes_are_done(CLOSES_TIMEOUT);
        }
        self.descriptors.catch_up();
        let until = clock::tick() + SEALED_TIMEOUT;
        loop {
            let looked = self.look(id, moment)?;
            if looked.sealed || !looked.is_complete(&self.metadata, id) || clock::tick() >= until {
                return Some(looked);
            }
            surgetank_types::sync::thread::sleep(SEALED_LOOK_EVERY);
        }
    }

    /// What the thread does meanwhile is the agent's own act: no hint is asked.
    pub fn unasked<T>(act: impl FnOnce() -> T) -> T {
        let _flag = Flag::set(&UNASKED);
        act()
    }

    /// `None`: nothing of the file is asked at such operations, or the agent itself does this.
    fn look(&self, id: FileId, moment: Moment) -> Option<Looked> {
        if UNASKED.get() {
            return None;
        }
        let tree = self.metadata.read_tree();
        let decision = decision_if_asked(&self.metadata, &tree, id, moment)?;
        let inode = tree.get(id)?;
        let (_, name) = inode.logical.as_ref()?;
        Some(Looked {
            decision,
            name: name.to_vec(),
            path: tree.logical_path(id)?,
            sealed: inode.sealed,
            is_empty: inode.attr.size_bytes == 0,
            run: inode.run,
            ino: inode.attr.ino,
        })
    }
}
