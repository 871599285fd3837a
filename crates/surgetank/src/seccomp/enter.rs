//! Enters a directory, or executes a file. The kernel does this itself, after the agent has checked the permission and
//! the bare directory is up to date.

use std::ffi::CString;

use rustix::io::Errno;
use surgetank_types::clock;
use surgetank_types::model::Kind;

use super::call::{Answer, Answered, Call, errno};
use super::walk::Walked;
use super::{bare, program};

/// Interpreters that are scripts themselves: the kernel has a similar limit.
const SCRIPTS_MAX: usize = 5;

pub(super) fn chdir(call: &Call<'_>) -> Answered {
    let path = call.path(0)?;
    let spot = match call.walk_at(libc::AT_FDCWD, &path, true)? {
        Walked::Outside(to) => return bare::go_outside(call, libc::AT_FDCWD, &path, to.as_deref()),
        Walked::Inside(spot) => spot,
    };
    let known = spot.known()?;
    if known.attr.kind != Kind::Directory {
        return Err(Errno::NOTDIR);
    }
    call.namespace().attributes.access(&call.caller()?, known.id, 1).map_err(errno)?;
    let until = clock::tick() + bare::DRAIN_WAIT_MAX;
    loop {
        let (file, real) = bare::directory(call, known.id, libc::O_PATH)?;
        if !real.in_place {
            bare::wait(call, until, "a directory that was moved")?;
        } else if bare::await_path(call, libc::AT_FDCWD, &path, rustix::fs::fstat(&file)?, until)? {
            // The kernel checks the permission at the bare directory.
            call.namespace().files.access.attributes_ahead(known.id);
            return Ok(Answer::Continue);
        }
    }
}

pub(super) fn chroot(call: &Call<'_>) -> Answered {
    let path = call.path(0)?;
    match call.walk_at(libc::AT_FDCWD, &path, true)? {
        Walked::Outside(to) => {
            call.supervisor.rooted.store(true, std::sync::atomic::Ordering::Relaxed);
            bare::go_outside(call, libc::AT_FDCWD, &path, to.as_deref())
        }
        Walked::Inside(_) => call.refuse("chroot into the directory", Errno::PERM),
    }
}

pub(super) fn exec(call: &Call<'_>, dirfd: i32, path: usize, flags: i32) -> Answered {
    let path = call.path(path)?;
    if path.is_empty() {
        // The open file itself.
        return Ok(Answer::Continue);
    }
    executable(call, dirfd, &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0, 0)
}

fn executable(call: &Call<'_>, dirfd: i32, path: &[u8], follow: bool, depth: usize) -> Answered {
    let interpreter = match call.walk_at(dirfd, path, follow)? {
        Walked::Outside(to) => {
            bare::go_outside(call, dirfd, path, to.as_deref())?;
            match bare::seen_from_here(call, dirfd, path) {
                Ok(seen) => program::interpreter_of(&seen),
                Err(_) => None,
            }
        }
        Walked::Inside(spot) => {
            let known = spot.known()?;
            if known.attr.kind != Kind::File {
                return Err(Errno::ACCESS);
            }
            call.namespace().files.descriptors.catch_up();
            call.namespace().attributes.access(&call.caller()?, known.id, 1).map_err(errno)?;
            let below = bare::await_file(call, known.id)?;
            bare::await_name(call, dirfd, path, &spot, &below)?;
            CString::new(bare::path_of(call, &below)).ok().and_then(|seen| program::interpreter_of(&seen))
        }
    };
    // The kernel opens it itself.
    match interpreter {
        Some(interpreter) if depth < SCRIPTS_MAX => executable(call, libc::AT_FDCWD, &interpreter, true, depth + 1),
        _ => Ok(Answer::Continue),
    }
}
