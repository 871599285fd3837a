//! The bare directory, as the kernel finds it.
//!
//! The kernel continues some calls itself: on paths that lead outside, `chdir`, `exec`, fifos and devices. The functions
//! here wait for the drain until the kernel finds the same file or directory as the namespace. The danger that they
//! avoid: the kernel opens or executes another file, or creates one that no catalog entry identifies.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_core::namespace::Real;
use surgetank_types::clock;
use surgetank_types::model::FileId;

use super::call::{Answer, Answered, Call, errno};
use super::task;
use super::walk::Spot;

/// The longest wait of a call for the drain of a change that the kernel must find in the bare directory.
pub(super) const DRAIN_WAIT_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The kernel continues the call. A path that passed through the directory must lead the kernel to the same place.
/// Links and moved directories have to be drained for that.
pub(super) fn go_outside(call: &Call<'_>, dirfd: i32, path: &[u8], leads_to: Option<&[u8]>) -> Answered {
    let Some(leads_to) = leads_to else { return Ok(Answer::Continue) };
    let theirs = seen_from_here(call, dirfd, path)?.into_bytes();
    let until = clock::tick() + DRAIN_WAIT_MAX;
    let agree = || {
        let theirs = end_of(&theirs);
        let nowhere = absent(&theirs) && absent(leads_to);
        same(&theirs, leads_to) || nowhere && (absent(above(leads_to)) || same(above(&theirs), above(leads_to)))
    };
    while !agree() {
        wait(call, until, "paths that lead out by links that are not drained yet")?;
    }
    Ok(Answer::Continue)
}

/// Does this path lead the kernel to the file `ours`? If it does not, waits a moment; the caller asks again.
pub(super) fn await_path(
    call: &Call<'_>,
    dirfd: i32,
    path: &[u8],
    ours: rustix::fs::Stat,
    until: Instant,
) -> Result<bool, Errno> {
    let theirs = rustix::fs::stat(seen_from_here(call, dirfd, path)?.as_c_str());
    if let Ok(theirs) = theirs
        && (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
    {
        return Ok(true);
    }
    wait(call, until, "a path whose links are not drained yet")?;
    Ok(false)
}

/// Waits until the store has the file as programs see it. Returns its path below the bare directory.
pub(super) fn await_file(call: &Call<'_>, id: FileId) -> Result<Vec<u8>, Errno> {
    let until = clock::tick() + DRAIN_WAIT_MAX;
    loop {
        match call.namespace().eager.real_file(id) {
            Ok(path) => return Ok(path.0),
            Err(fault) if fault.errno == Errno::AGAIN => {
                wait(call, until, "a program that does not get into the store")?
            }
            Err(fault) if fault.errno == Errno::ACCESS => {
                return call.refuse("executing a file that is never drained", Errno::ACCESS).map(|_| Vec::new());
            }
            Err(fault) => return Err(errno(fault)),
        }
    }
}

/// Waits until this path leads the kernel to the file at `below`.
pub(super) fn await_name(call: &Call<'_>, dirfd: i32, path: &[u8], spot: &Spot, below: &[u8]) -> Result<(), Errno> {
    // Through /proc it is the open file itself, at any path.
    if !spot.name.is_empty() {
        let until = clock::tick() + DRAIN_WAIT_MAX;
        let ours = rustix::fs::stat(&*path_of(call, below))?;
        while !await_path(call, dirfd, path, ours, until)? {}
    }
    Ok(())
}

/// The path of the caller, as the agent can access it.
pub(super) fn seen_from_here(call: &Call<'_>, dirfd: i32, path: &[u8]) -> Result<CString, Errno> {
    let mut whole = if path.first() == Some(&b'/') {
        let root = call.supervisor.root_of(call.task);
        if root == b"/" { Vec::new() } else { root }
    } else {
        let mut base = call.link_of(dirfd).into_bytes();
        base.push(b'/');
        base
    };
    whole.extend_from_slice(path);
    CString::new(whole).map_err(|_| Errno::NOENT)
}

/// Opens a directory where the drain has it now.
pub(super) fn directory(call: &Call<'_>, id: FileId, flags: i32) -> Result<(OwnedFd, Real), Errno> {
    let until = clock::tick() + DRAIN_WAIT_MAX;
    let mut opened_up = false;
    loop {
        match call.namespace().eager.real_dir(id) {
            Ok(real) => {
                match task::open_directory(
                    &path_of(call, &real.path.0),
                    OFlags::from_bits_retain(flags.cast_unsigned()),
                ) {
                    Ok(file) => {
                        let stat = rustix::fs::fstat(&file)?;
                        // Unless the drain moved it during the open.
                        if call.namespace().eager.real_dir(id).is_ok_and(|now| now == real) {
                            if call.supervisor.remember_dir(stat.st_dev, stat.st_ino, id) {
                                call.keep(id);
                            }
                            return Ok((file, real));
                        }
                    }
                    Err(Errno::NOENT | Errno::NOTDIR) if clock::tick() < until => {}
                    // The mode that admits the caller may wait in the queue.
                    Err(Errno::ACCESS) if !opened_up => {
                        opened_up = true;
                        call.namespace().files.access.attributes_ahead(id);
                        continue;
                    }
                    Err(why) => return Err(why),
                }
            }
            Err(fault) if fault.errno == Errno::AGAIN => {}
            Err(fault) => return Err(errno(fault)),
        }
        wait(call, until, "a directory that takes the place of another")?;
    }
}

/// The absolute path of a path below the bare directory.
pub(super) fn path_of(call: &Call<'_>, below: &[u8]) -> Vec<u8> {
    let mut path = call.supervisor.over.clone();
    if !below.is_empty() {
        path.push(b'/');
        path.extend_from_slice(below);
    }
    path
}

/// Makes everything due now, and waits a moment. After `until`, refuses the call with EBUSY; `what` is the reason for the
/// user.
pub(super) fn wait(call: &Call<'_>, until: Instant, what: &'static str) -> Result<(), Errno> {
    call.check()?;
    if clock::tick() >= until {
        return call.refuse(what, Errno::BUSY).map(drop);
    }
    call.namespace().files.descriptors.catch_up();
    call.namespace().eager.hurry_everything();
    std::thread::sleep(LOOK_EVERY);
    Ok(())
}

/// Do both paths lead to the same file?
fn same(a: &[u8], b: &[u8]) -> bool {
    match (rustix::fs::lstat(a), rustix::fs::lstat(b)) {
        (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) => true,
        // One of them names a link, the other its target.
        (Ok(_), Ok(_)) => match (rustix::fs::stat(a), rustix::fs::stat(b)) {
            (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
            _ => false,
        },
        _ => false,
    }
}

/// The target of a dangling link; any other path unchanged.
fn end_of(path: &[u8]) -> Vec<u8> {
    const LINKS_MAX: usize = 40;
    let mut end = path.to_vec();
    for _ in 0..LINKS_MAX {
        if rustix::fs::stat(&*end).is_ok() {
            return path.to_vec();
        }
        let Ok(target) = rustix::fs::readlink(&*end, Vec::new()) else { return end };
        let target = target.into_bytes();
        end = if target.first() == Some(&b'/') { target } else { [above(&end), b"/", &target].concat() };
    }
    path.to_vec()
}

fn absent(path: &[u8]) -> bool {
    rustix::fs::lstat(path).is_err()
}

/// The path's parent directory.
fn above(path: &[u8]) -> &[u8] {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(0) | None => b"/",
        Some(end) => &path[..end],
    }
}
