//! Look-ups of names at other members.
//!
//! A program's stat(2) or open(2) looks a name up and then asks for the attributes. The answer to the look-up has them. So the
//! second request of the same call is answered here, and costs no round trip.
//!
//! The danger that this avoids: two programs that rename crosswise wait for each other. The kernel looks names up for rename(2)
//! while it holds the locks of both directories. One of them may be this member's, and the program at the other member does
//! the same. Each look-up then needs the lock that the other program holds.

use std::time::Duration;

use rustix::io::Errno;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId, Kind};

use super::super::call::{self, Answer, Ask};
use super::super::export::checked;
use super::Router;
use super::remote::At;
use crate::mount::{Attributes, Entry, Filesystem, Looked};

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

/// A program's call has looked up a file of another member: the same call may ask for its attributes next.
pub(super) fn found<F: Filesystem>(router: &Router<F>, caller: &Caller, entry: &Entry) {
    if entry.attr.kind == Kind::File
        && let Some(call) = call_of(caller.pid)
        && !may_follow_another(&call)
    {
        router.here.found(caller.pid, Found { id: entry.id, attr: entry.attr, call });
    }
}

/// What the look-up of the same call said.
pub(super) fn found_before<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64) -> Option<Attributes> {
    router.remote.at(id)?;
    let Found { id: found, attr, call } = router.here.take_found(caller.pid)?;
    (found == id && call_of(caller.pid)? == call).then_some(Attributes { attr, ttl: Duration::ZERO })
}

/// What a thread has looked up, and in which call.
pub(super) struct Found {
    id: u64,
    attr: Attr,
    call: String,
}

/// The system call in which a thread waits, with its arguments and the place in the program. `None`: not known where the agent may
/// not trace the thread.
fn call_of(thread: u32) -> Option<String> {
    let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
    // (A thread of the kernel is in none.)
    number_of(&call).is_some_and(|number| number >= 0).then_some(call)
}

fn number_of(call: &str) -> Option<libc::c_long> {
    call.split(' ').next().and_then(|number| number.parse().ok())
}

/// May two such calls be alike, and only the first one look the file up? One call may carry out many operations, or be about an
/// open file.
fn may_follow_another(call: &str) -> bool {
    let argument = |number| {
        let text = call.split(' ').nth(number)?.strip_prefix("0x")?;
        u64::from_str_radix(text, 16).ok()
    };
    let flags = match number_of(call) {
        Some(libc::SYS_io_uring_enter) => return true,
        Some(libc::SYS_newfstatat) => argument(4),
        Some(libc::SYS_statx) => argument(3),
        _ => return false,
    };
    flags.is_none_or(|flags| flags & libc::AT_EMPTY_PATH as u64 != 0)
}

/// Is the thread in rename(2)?
fn is_in_rename(thread: u32) -> bool {
    const RENAMES: [libc::c_long; 2] = [libc::SYS_renameat, libc::SYS_renameat2];
    let number = call_of(thread).as_deref().and_then(number_of);
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
            Answer::Found(call::Found { node: entry.id, attr: entry.attr, ttl: Duration::ZERO })
        }
        Ok(Looked::Missing { .. }) => Answer::Failed(Errno::NOENT.raw_os_error()),
        Err(fault) => Answer::Failed(fault.errno.raw_os_error()),
    }
}
