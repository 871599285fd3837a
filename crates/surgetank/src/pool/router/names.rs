//! Look-ups of names at other members.
//!
//! The danger that this avoids: two programs that rename crosswise wait for each other. The kernel looks names up for rename(2)
//! while it holds the locks of both directories. One of them may be this member's, and the program at the other member does
//! the same. Each look-up then needs the lock that the other program holds.

use std::time::Duration;

use rustix::io::Errno;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId, Kind};

use super::super::call::{Answer, Ask, Found};
use super::super::export::checked;
use super::Router;
use super::remote::At;
use crate::mount::{Filesystem, Looked};

/// Looks a name up in a directory of another member. If that takes long during a rename, the agent there is asked, which needs
/// no lock.
pub(super) fn look_up<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    at: At,
    (name, keep): (&[u8], bool),
) -> FsResult<Answer> {
    let ask = Ask::Lookup { parent: at.node, name: name.into(), keep };
    match router.remote.ask_unless(caller, at, ask, &|| is_in_rename(caller.pid)) {
        Err(fault) if fault.errno == Errno::DEADLK => {
            let ask = Ask::NameOf { who: (caller.uid, caller.gid), parent: at.node, name: name.into() };
            router.remote.ask(caller, at, ask)
        }
        answer => answer,
    }
}

/// Is the thread in rename(2)? (Not known where the agent may not trace it.)
fn is_in_rename(thread: u32) -> bool {
    const RENAMES: [libc::c_long; 2] = [libc::SYS_renameat, libc::SYS_renameat2];
    let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse().ok());
    #[cfg(target_arch = "x86_64")]
    if number == Some(libc::SYS_rename) {
        return true;
    }
    number.is_some_and(|number| RENAMES.contains(&number))
}

/// What a name here leads to, for a program of another member.
pub(super) fn named<F: Filesystem>(router: &Router<F>, who: (u32, u32), (parent, name): (u64, &[u8])) -> Answer {
    if let Err(why) = checked(name) {
        return Answer::Failed(why.raw_os_error());
    }
    let caller = Caller { uid: who.0, gid: who.1, pid: 0, umask: 0 };
    if !router.is_ours(FileId(parent)) || FileId(parent) == router.namespace.homes.directory() {
        return Answer::NotOwner;
    }
    match router.door.lookup(&caller, parent, name) {
        Ok(Looked::Found(entry)) => {
            router.door.forget(entry.id, 1);
            if entry.attr.kind == Kind::Directory && !router.is_ours(FileId(entry.id)) {
                return Answer::OfTheStore;
            }
            Answer::Found(Found { node: entry.id, attr: entry.attr, ttl: Duration::ZERO })
        }
        Ok(Looked::Missing { .. }) => Answer::Failed(Errno::NOENT.raw_os_error()),
        Err(fault) => Answer::Failed(fault.errno.raw_os_error()),
    }
}
