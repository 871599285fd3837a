//! Look-ups of names at other members.
//!
//! A program's stat(2) or open(2) looks a name up and then asks for the attributes. The answer to the look-up has them. So the
//! second request of the same call is answered here, and costs no round trip.
//!
//! The kernel takes an answer for newer than all that came before its request. So an old one is not given again if another answer
//! has come since, or if a program here has the content open: its kernel would cut off what programs read.
//!
//! The danger that this avoids: two programs that rename crosswise wait for each other. The kernel looks names up for rename(2)
//! while it holds the locks of both directories. One of them may be this member's, and the program at the other member does
//! the same. Each look-up then needs the lock that the other program holds.

use std::io;
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

/// A program's call has looked up a file of another member: the same call may ask for its attributes next. `before`: how many
/// answers there were before.
pub(super) fn found<F: Filesystem>(router: &Router<F>, caller: &Caller, entry: &Entry, before: u64) {
    let answers = before + 1;
    if entry.attr.kind != Kind::File || router.remote.answers() != answers || router.here.may_not_look() {
        return;
    }
    match call_of(caller.pid) {
        Ok(Some(call)) if !may_follow_another(&call) => {
            router.here.found(caller.pid, Found { id: entry.id, attr: entry.attr, call, answers });
        }
        // (Each refusal may be a line in the kernel's log.)
        Err(why) if why.kind() == io::ErrorKind::PermissionDenied => router.here.is_refused(),
        _ => {}
    }
}

/// What the look-up of the same call said.
pub(super) fn found_before<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64) -> Option<Attributes> {
    router.remote.at(id)?;
    let Found { id: found, attr, call, answers } = router.here.take_found(caller.pid)?;
    let is_last = found == id && router.remote.answers() == answers;
    // (An earlier agent's programs may have it open, too.)
    let is_open = || router.link.had_earlier() || router.here.is_open(id);
    let is_it = is_last && !is_open() && call_of(caller.pid).is_ok_and(|now| now.as_deref() == Some(&*call));
    is_it.then_some(Attributes { attr, ttl: Duration::ZERO })
}

/// What a thread has looked up, and in which call.
pub(super) struct Found {
    id: u64,
    attr: Attr,
    call: String,
    /// How many answers of other members there were with this one.
    answers: u64,
}

/// The system call in which a thread waits, with its arguments and the place in the program. `None`: in none. Errors: the agent may
/// not trace the thread.
fn call_of(thread: u32) -> io::Result<Option<String>> {
    const LOOKS: usize = 3;
    let path = format!("/proc/{thread}/syscall");
    let mut call = std::fs::read_to_string(&path)?;
    // (It has not gone to sleep yet.)
    for _ in 1..LOOKS {
        if !call.starts_with("running") {
            break;
        }
        std::thread::yield_now();
        call = std::fs::read_to_string(&path)?;
    }
    // A thread of the kernel, or one that works for io_uring, is at no place in a program: all its requests look alike.
    let is_in_program = call.split_whitespace().last().is_some_and(|place| place != "0x0");
    Ok(Some(call).filter(|call| is_in_program && number_of(call).is_some_and(|number| number >= 0)))
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
    let call = call_of(thread).ok().flatten();
    let number = call.as_deref().and_then(number_of);
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
