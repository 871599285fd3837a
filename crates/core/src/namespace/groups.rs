//! The groups of a process, from the process itself. The agent's groups, and the system's list for the user, may
//! differ: `setgroups` and batch systems set others. The agent reads them only where a group decides, while the process
//! waits for its answer.
//!
//! The danger that this avoids: a process gets access, or a refusal, through groups that are not its own.

use std::io;

use surgetank_store::Cred;
use surgetank_types::model::{Caller, FileId};

use super::Namespace;

impl Namespace {
    /// Is the calling process a member of the group?
    pub(super) fn is_in_group(&self, caller: &Caller, gid: u32) -> bool {
        caller.gid == gid || groups_of(caller).as_deref().unwrap_or(&self.groups).contains(&gid)
    }

    /// As `let_in`, for requests to the store with the ids of a process. If the store denies, it gets the process's groups.
    pub(super) fn let_caller_in<T>(
        &self,
        caller: &Caller,
        id: FileId,
        ask: impl Fn(Cred) -> io::Result<T>,
    ) -> io::Result<T> {
        let who = Self::who(caller);
        let learns = || groups_of(caller).is_some_and(|groups| self.store.learn_groups(who, &groups));
        match self.let_in(id, || ask(who)) {
            Err(why) if why.raw_os_error() == Some(libc::EACCES) && learns() => self.let_in(id, || ask(who)),
            other => other,
        }
    }
}

/// `None`: the caller is the agent itself, or a process that is not visible here (another name space, or it ended).
fn groups_of(caller: &Caller) -> Option<Vec<u32>> {
    if caller.pid == 0 {
        return None;
    }
    let text = std::fs::read_to_string(format!("/proc/{}/status", caller.pid)).ok()?;
    let numbers = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::split_whitespace);
    let mut groups: Vec<u32> = numbers("Groups:")?.filter_map(|gid| gid.parse().ok()).collect();
    // The fourth is the group for file access.
    groups.extend(numbers("Gid:")?.nth(3).and_then(|gid| gid.parse::<u32>().ok()));
    Some(groups)
}
