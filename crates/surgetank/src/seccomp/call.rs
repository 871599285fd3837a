//! One call that waits for its answer: the caller, the arguments and the answer.
//!
//! The handlers of system calls are functions that take a `Call`. Invariant: each look-up that the namespace counted for
//! a call is forgotten when the call ends, unless `keep` took it over.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use surgetank_core::namespace::Namespace;
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Attr, Caller, FileId};

use super::listener::{Listener, Notice};
use super::reach::Reach;
use super::supervisor::Supervisor;
use super::task::Task;

/// The answer for the kernel.
pub enum Answer {
    /// Continue the call unchanged.
    Continue,
    Value(i64),
    Descriptor {
        file: OwnedFd,
        close_on_exec: bool,
    },
}

pub type Answered = Result<Answer, Errno>;

pub const DONE: Answered = Ok(Answer::Value(0));

pub struct Call<'a> {
    pub supervisor: &'a Supervisor,
    pub listener: &'a Listener,
    pub notice: Notice,
    pub task: Task<'a>,
    caller: Cell<Option<Caller>>,
    /// The last path that was read, for the message about a refusal.
    named: RefCell<Vec<u8>>,
    /// The look-ups that the namespace counts for this call.
    looked: RefCell<Vec<FileId>>,
}

/// A file as a look-up found it.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub id: FileId,
    pub attr: Attr,
}

impl<'a> Call<'a> {
    pub fn new(supervisor: &'a Supervisor, listener: &'a Listener, reach: Option<&'a Reach>, notice: Notice) -> Self {
        let task = Task::reached(notice.tid, reach);
        Self {
            supervisor,
            listener,
            notice,
            task,
            caller: Cell::new(None),
            named: RefCell::default(),
            looked: RefCell::default(),
        }
    }

    pub fn namespace(&self) -> &'a Namespace {
        &self.supervisor.namespace
    }

    pub fn arg(&self, index: usize) -> u64 {
        self.notice.args[index]
    }

    /// An argument of type int: its upper half has no meaning.
    pub fn int(&self, index: usize) -> i32 {
        self.notice.args[index] as i32
    }

    /// The caller's identity. An ordinary user's agent serves only this user, and need not look it up (which takes
    /// longer than most calls).
    pub fn caller(&self) -> Result<Caller, Errno> {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        if uid.is_root() {
            return self.creator();
        }
        Ok(Caller { uid: uid.as_raw(), gid: gid.as_raw(), pid: self.task.tid, umask: 0o777 })
    }

    /// The owner of a new file, with the current umask.
    pub fn creator(&self) -> Result<Caller, Errno> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller);
        }
        let caller = self.task.status().ok_or(Errno::SRCH)?.caller;
        self.caller.set(Some(caller));
        Ok(caller)
    }

    /// The path at an argument. The bytes are the caller's only if the caller still waits after the read.
    pub fn path(&self, index: usize) -> Result<Vec<u8>, Errno> {
        let path = match self.task.string(self.arg(index), super::task::PATH_BYTES_MAX) {
            Err(Errno::PERM) => {
                self.report("a program whose memory cannot be read (not dumpable, or its run has ended)");
                return Err(Errno::PERM);
            }
            path => path?,
        };
        self.check()?;
        self.named.borrow_mut().clone_from(&path);
        Ok(path)
    }

    pub fn check(&self) -> Result<(), Errno> {
        if self.listener.is_valid(self.notice.id) { Ok(()) } else { Err(Errno::INTR) }
    }

    pub fn lookup(&self, dir: FileId, name: &[u8]) -> FsResult<Known> {
        let found = self.namespace().resolver.lookup(&self.caller()?, dir, name)?;
        self.looked.borrow_mut().push(found.id);
        Ok(Known { id: found.id, attr: found.attr })
    }

    /// The namespace counted a look-up for the new file.
    pub fn made(&self, id: FileId) {
        self.looked.borrow_mut().push(id);
    }

    /// The file stays known after the call.
    pub fn keep(&self, id: FileId) {
        let mut looked = self.looked.borrow_mut();
        if let Some(index) = looked.iter().position(|one| *one == id) {
            looked.swap_remove(index);
        }
    }

    pub fn known(&self, id: FileId) -> Result<Known, Errno> {
        Ok(Known { id, attr: self.namespace().attributes.getattr(id, None).map_err(errno)?.attr })
    }

    /// Refuses a call that cannot be served, and reports it to the user.
    pub fn refuse(&self, what: &'static str, with: Errno) -> Answered {
        self.report(what);
        Err(with)
    }

    pub fn report(&self, what: &'static str) {
        self.supervisor.refusals.add(what, || {
            let command = std::fs::read_to_string(self.task.proc("comm")).unwrap_or_default();
            (command.trim().to_owned(), self.named.borrow().clone())
        });
    }

    /// For a path that `path` did not read.
    pub fn names(&self, path: &[u8]) {
        path.clone_into(&mut self.named.borrow_mut());
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        for id in self.looked.get_mut() {
            self.supervisor.namespace.resolver.forget(*id, 1);
        }
    }
}

pub fn errno(fault: Fault) -> Errno {
    if !fault.note.is_empty() {
        tracing::warn!(errno = %fault.errno, note = %fault.note, "refused");
    }
    fault.errno
}

/// A flag that a future kernel defines may be essential, so an unknown flag is refused.
pub(super) fn known_flags(flags: i32, known: i32) -> Result<(), Errno> {
    if flags & !known == 0 { Ok(()) } else { Err(Errno::INVAL) }
}
