//! The user of a request: the thread that carries it out takes the user's ids for the mount, and gives them back.
//!
//! All members of a pool belong to one user, so the ids differ only where that user is root and starts programs as
//! others. The ids are those of the thread alone (`fsuid`, `fsgid`, groups).
//! The danger that it avoids: a thread that keeps another user's ids. If they cannot be given back, the process ends.

use std::marker::PhantomData;
use std::process;

use rustix::fs::Gid;
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};
use rustix::thread::set_thread_groups;

/// The ids of the process.
#[derive(Debug)]
pub struct Own {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
    /// The process is root, and may set groups. (In a user namespace root may not.)
    may_switch: bool,
}

impl Own {
    /// The ids that every thread of the process has at its start.
    pub fn now() -> Self {
        let (uid, groups) = (geteuid().as_raw(), getgroups().unwrap_or_default());
        // Sets what is set already: so it is known that the groups can be restored.
        let may_switch = uid == 0 && set_thread_groups(&groups).is_ok();
        Self { uid, gid: getegid().as_raw(), groups, may_switch }
    }

    /// The thread acts as this user until the value is dropped. None: it does so already. Errors: EPERM, the process
    /// may not act as another user.
    ///
    /// A process without privileges keeps its own group: the user is the same, and it is not allowed another group.
    pub fn switched(&self, uid: u32, gid: u32) -> Result<Option<Switched<'_>>, Errno> {
        if self.uid == uid && (self.gid == gid || !self.may_switch) {
            return Ok(None);
        }
        if !self.may_switch {
            return Err(Errno::PERM);
        }
        set_thread_groups(&[])?;
        // From here on a failure restores what was changed.
        let switched = Switched { own: self, _thread: PhantomData };
        set_ids(uid, gid)?;
        Ok(Some(switched))
    }
}

/// The thread has the ids of a user.
#[derive(Debug)]
pub struct Switched<'a> {
    own: &'a Own,
    /// The ids are of one thread: the value stays there.
    _thread: PhantomData<*const ()>,
}

impl Drop for Switched<'_> {
    fn drop(&mut self) {
        let restored = set_ids(self.own.uid, self.own.gid).and_then(|()| set_thread_groups(&self.own.groups));
        if let Err(error) = restored {
            tracing::error!("the pool's process cannot restore its own ids, and ends: {error}");
            process::abort();
        }
    }
}

fn set_ids(uid: u32, gid: u32) -> Result<(), Errno> {
    // The group is first in both directions: the process is root, and keeps its capability to set ids.
    // SAFETY: these calls take plain numbers and change only the ids of this thread.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        // Neither reports a failure. An impossible id changes nothing, and the present one is returned.
        (libc::syscall(libc::SYS_setfsuid, u32::MAX), libc::syscall(libc::SYS_setfsgid, u32::MAX))
    };
    if now == (i64::from(uid), i64::from(gid)) { Ok(()) } else { Err(Errno::PERM) }
}
