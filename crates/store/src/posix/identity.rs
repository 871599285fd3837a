//! The ids with which a store operation is done.
//!
//! A privileged agent acts as the caller: file-system uid, gid and supplementary groups of this one thread change for the
//! length of an operation (so that root_squash, quotas and permissions are the caller's) and are restored on every way out. The
//! calls go directly to the kernel: the C library's wrappers would change every thread of the agent.
//!
//! The danger that it avoids: a thread that keeps the caller's ids and does its next work with them. If they cannot be
//! restored, the agent ends at once: recovery from a dead agent is possible, files with the wrong owner are not repaired.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use rustix::thread::CapabilitySet;

use crate::Cred;

type Groups = Arc<[libc::gid_t]>;

/// The kernel's limit.
const GROUPS_MAX: usize = 65536;

/// The agent's own ids, and the groups of the users for whom it has acted.
pub struct Identity {
    uid: u32,
    gid: u32,
    groups: Vec<libc::gid_t>,
    privileged: bool,
    known: Mutex<HashMap<(u32, u32), Groups>>,
}

impl Identity {
    pub fn of_this_agent() -> io::Result<Self> {
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
        let privileged =
            rustix::process::geteuid().is_root() && rustix::thread::capabilities(None)?.effective.contains(needed);
        Ok(Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: rustix::process::getgroups()?.iter().map(|group| group.as_raw()).collect(),
            privileged,
            known: Mutex::new(HashMap::new()),
        })
    }

    /// Whether the agent may give files away and act as other users.
    pub fn privileged(&self) -> bool {
        self.privileged
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Whether operations for `who` use other ids than the agent's.
    pub fn differs(&self, who: Cred) -> bool {
        self.privileged && who.uid != self.uid
    }

    /// Runs `operation` with the ids of `who`, or with the agent's own if it is not privileged or is that user already.
    pub fn act<T>(&self, who: Cred, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if !self.differs(who) {
            return operation();
        }
        let groups = self.groups_of(who);
        let restore = Restore(self);
        // Groups first: changing them needs the capability that changes with the uid.
        set_groups(&groups)?;
        set_fs_ids(who.uid, who.gid)?;
        let result = operation();
        drop(restore);
        result
    }

    /// Adds groups to those of the system's list: a process may have been given others. Returns whether any is new.
    pub fn learn_groups(&self, who: Cred, groups: &[u32]) -> bool {
        if !self.differs(who) {
            return false;
        }
        let known = self.groups_of(who);
        let new: Vec<_> = groups.iter().copied().filter(|group| !known.contains(group)).collect();
        if new.is_empty() || known.len() + new.len() > GROUPS_MAX {
            return false;
        }
        let all = known.iter().copied().chain(new).collect();
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert((who.uid, who.gid), all);
        true
    }

    fn groups_of(&self, who: Cred) -> Groups {
        let key = (who.uid, who.gid);
        if let Some(groups) = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return groups.clone();
        }
        // Not under the lock: the look-up may use the network.
        let groups: Groups = look_up_groups(who).into();
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, groups.clone());
        groups
    }
}

struct Restore<'a>(&'a Identity);

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        let ids = set_fs_ids(self.0.uid, self.0.gid);
        if ids.and_then(|()| set_groups(&self.0.groups)).is_err() {
            tracing::error!(
                "the agent's own ids could not be restored; it ends so that nothing is written with another user's"
            );
            std::process::abort();
        }
    }
}

fn set_groups(groups: &[libc::gid_t]) -> io::Result<()> {
    // SAFETY: the pointer and the length are those of one live slice; the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // The group while the uid is still the agent's, in both directions: the agent is root.
    // SAFETY: these calls take plain numbers and change only the ids of this thread.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        // They report no failure; a request for an impossible id returns the present one and changes nothing.
        (libc::syscall(libc::SYS_setfsuid, u32::MAX), libc::syscall(libc::SYS_setfsgid, u32::MAX))
    };
    if now == (i64::from(uid), i64::from(gid)) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// All groups of the user, as the system knows them; only the given one for an unknown user.
fn look_up_groups(who: Cred) -> Vec<libc::gid_t> {
    let mut text = vec![0_u8; 16 << 10];
    // SAFETY: an all-zero passwd is a valid value; the call below fills it.
    let mut passwd: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to live locals, and the length is that of `text`.
    let status = unsafe { libc::getpwuid_r(who.uid, &mut passwd, text.as_mut_ptr().cast(), text.len(), &mut found) };
    if status != 0 || found.is_null() {
        return vec![who.gid];
    }
    // SAFETY: on success `pw_name` points to a terminated string inside `text`, which lives to the end of this function.
    let name = unsafe { CStr::from_ptr(passwd.pw_name) };
    let mut groups = vec![0; 64];
    loop {
        let mut count = i32::try_from(groups.len()).unwrap_or(i32::MAX);
        // SAFETY: `groups` has room for `count` ids and `name` is a live terminated string.
        let result = unsafe { libc::getgrouplist(name.as_ptr(), who.gid, groups.as_mut_ptr(), &mut count) };
        let count = usize::try_from(count).unwrap_or(0);
        if result >= 0 {
            groups.truncate(count);
            return groups;
        }
        if count <= groups.len() {
            return vec![who.gid];
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fs_ids() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().filter(|line| ["Uid:", "Gid:", "Groups:"].iter().any(|key| line.starts_with(key))).collect()
    }

    #[test]
    fn ids_after_operation_or_panic_are_restored() {
        let identity = Identity::of_this_agent().unwrap();
        let before = fs_ids();
        let who = Cred { uid: 12_345, gid: 23_456 };
        let during = identity.act(who, || Ok(fs_ids())).unwrap();
        assert_eq!(during.contains("12345") && during.contains("23456"), identity.privileged, "{during}");
        assert_eq!(fs_ids(), before);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            identity.act(who, || -> io::Result<()> { panic!("in the middle") })
        }));
        assert!(panicked.is_err());
        assert_eq!(fs_ids(), before);
        assert_eq!(identity.act(Cred { uid: identity.uid, gid: 7 }, || Ok(fs_ids())).unwrap(), before);
    }

    #[test]
    fn groups_of_known_and_unknown_users_are_found() {
        assert!(look_up_groups(Cred { uid: 0, gid: 77 }).contains(&77));
        assert_eq!(look_up_groups(Cred { uid: 3_999_999_999, gid: 5 }), vec![5]);
    }
}
