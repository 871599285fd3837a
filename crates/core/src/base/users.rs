//! The groups of a process, from the process itself. The agent's groups, and the system's list for the user, may
//! differ: `setgroups` and batch systems set others. The agent reads them only where a group decides, while the process
//! waits for its answer.
//!
//! The danger that this avoids: a process gets access, or a refusal, through groups that are not its own.

use surgetank_store::Cred;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, Mode};

/// Who may do what, where the kernel does not check it.
pub struct Permissions {
    /// The agent checks permissions itself (a mount without `default_permissions`).
    pub checks_permissions: bool,
    /// The supplementary groups of the agent itself.
    groups: Vec<u32>,
}

/// Does the mode bring the file to the store as soon as it is closed?
pub(crate) fn is_drained(mode: Mode) -> bool {
    matches!(mode, Mode::Copy | Mode::Move)
}

/// The ids of a process, for requests to the store.
pub(crate) fn who(caller: &Caller) -> Cred {
    Cred { uid: caller.uid, gid: caller.gid }
}

/// Credentials for the agent's own requests, not on behalf of a caller: root where the agent is root.
pub(crate) fn own_cred(owner: Cred) -> Cred {
    if rustix::process::geteuid().is_root() { Cred { uid: 0, gid: 0 } } else { owner }
}

impl Permissions {
    pub(crate) fn new(checks_permissions: bool) -> Self {
        let groups = rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
        Self { checks_permissions, groups }
    }

    /// Is the calling process a member of the group?
    pub(crate) fn is_in_group(&self, caller: &Caller, gid: u32) -> bool {
        caller.gid == gid || groups_of(caller).as_deref().unwrap_or(&self.groups).contains(&gid)
    }

    /// May the caller do this (1 execute or search, 2 write, 4 read)? Asked only where the kernel does not check.
    pub(crate) fn permit(&self, caller: &Caller, attr: &Attr, want: u32) -> FsResult<()> {
        if !self.checks_permissions || caller.uid == 0 {
            return Ok(());
        }
        let allows = |class: u32| class & want == want;
        let (group, other) = (allows(attr.perm >> 3), allows(attr.perm));
        let allowed = if caller.uid == attr.uid {
            allows(attr.perm >> 6)
        } else if group == other {
            // Both classes agree, so the look-up of the group is saved.
            group
        } else if self.is_in_group(caller, attr.gid) {
            group
        } else {
            other
        };
        if allowed { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }

    /// May the caller change attributes of the file?
    pub(crate) fn permit_owner(&self, caller: &Caller, attr: &Attr) -> FsResult<()> {
        if self.checks_permissions && caller.uid != 0 && caller.uid != attr.uid {
            return Err(Errno::PERM.into());
        }
        Ok(())
    }
}

/// `None`: the caller is the agent itself, or a process that is not visible here (another name space, or it ended).
pub(crate) fn groups_of(caller: &Caller) -> Option<Vec<u32>> {
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
