//! Operations on names: create, remove, rename.

use rustix::io::Errno;
use surgetank_types::model::{Caller, Kind};

use super::bare;
use super::call::{Answer, Answered, Call, DONE, Known, errno, known_flags};
use super::walk::{Spot, Walked};

/// A place for a new name.
fn vacant(call: &Call<'_>, dirfd: i32, path: usize, is_dir: bool) -> Result<Option<Spot>, Errno> {
    let text = call.path(path)?;
    match call.walk_at(dirfd, &text, false)? {
        Walked::Outside(to) => {
            bare::go_outside(call, dirfd, &text, to.as_deref())?;
            Ok(None)
        }
        Walked::Inside(spot) if spot.found.is_some() => Err(Errno::EXIST),
        Walked::Inside(spot) if spot.must_be_dir && !is_dir => Err(Errno::NOENT),
        Walked::Inside(spot) => Ok(Some(spot)),
    }
}

pub(super) fn mkdir(call: &Call<'_>, dirfd: i32, path: usize, mode: u32) -> Answered {
    let Some(spot) = vacant(call, dirfd, path, true)? else { return Ok(Answer::Continue) };
    let caller = call.creator()?;
    call.namespace().files.descriptors.catch_up();
    let made =
        call.namespace().names.mkdir(&caller, spot.dir, &spot.name, mode & 0o1777 & !caller.umask).map_err(errno)?;
    call.made(made.id);
    // The bare directory is made at once, so that a program that enters it need not wait. If this fails with EAGAIN,
    // the program waits.
    if let Err(fault) = call.namespace().eager.real_dir(made.id)
        && fault.errno != Errno::AGAIN
    {
        tracing::debug!(errno = %fault.errno, "a directory was not made underneath");
    }
    DONE
}

pub(super) fn unlinkat(call: &Call<'_>) -> Answered {
    let flags = call.int(2);
    known_flags(flags, libc::AT_REMOVEDIR)?;
    unlink(call, call.int(0), 1, flags & libc::AT_REMOVEDIR != 0)
}

pub(super) fn unlink(call: &Call<'_>, dirfd: i32, path: usize, is_dir: bool) -> Answered {
    let text = call.path(path)?;
    let spot = match call.walk_at(dirfd, &text, false)? {
        Walked::Outside(to) => return bare::go_outside(call, dirfd, &text, to.as_deref()),
        Walked::Inside(spot) => spot,
    };
    if spot.name.is_empty() {
        let ends_with_dot = text.ends_with(b".") && !text.ends_with(b"..");
        return Err(match is_dir {
            true if ends_with_dot => Errno::INVAL,
            true if text.ends_with(b"..") => Errno::NOTEMPTY,
            true => Errno::BUSY,
            false => Errno::ISDIR,
        });
    }
    let known = spot.found.ok_or(Errno::NOENT)?;
    let caller = call.caller()?;
    let namespace = call.namespace();
    namespace.files.descriptors.catch_up();
    match (is_dir, known.attr.kind) {
        (true, Kind::Directory) => namespace.names.rmdir(&caller, spot.dir, &spot.name),
        (true, _) => return Err(Errno::NOTDIR),
        (false, Kind::Directory) => return Err(Errno::ISDIR),
        (false, _) if spot.must_be_dir => return Err(Errno::NOTDIR),
        (false, _) => namespace.names.unlink(&caller, spot.dir, &spot.name),
    }
    .map_err(errno)?;
    DONE
}

pub(super) fn rename(call: &Call<'_>, from: (i32, usize), to: (i32, usize), flags: u32) -> Answered {
    let (from_text, to_text) = (call.path(from.1)?, call.path(to.1)?);
    if from_text.is_empty() || to_text.is_empty() {
        return Err(Errno::NOENT);
    }
    let (source, target) = (call.walk_at(from.0, &from_text, false)?, call.walk_at(to.0, &to_text, false)?);
    let (source, target) = match (source, target) {
        (Walked::Inside(source), Walked::Inside(target)) => (source, target),
        (Walked::Outside(source), Walked::Outside(target)) => {
            bare::go_outside(call, from.0, &from_text, source.as_deref())?;
            return bare::go_outside(call, to.0, &to_text, target.as_deref());
        }
        _ => return Err(Errno::XDEV),
    };
    if source.name.is_empty() || target.name.is_empty() {
        return Err(Errno::BUSY);
    }
    let known = source.known()?;
    if target.must_be_dir && known.attr.kind != Kind::Directory {
        return Err(Errno::NOTDIR);
    }
    call.namespace().files.descriptors.catch_up();
    call.namespace()
        .names
        .rename(&call.caller()?, source.dir, &source.name, target.dir, &target.name, flags)
        .map_err(errno)?;
    DONE
}

pub(super) fn link(call: &Call<'_>, from: (i32, usize), to: (i32, usize), flags: i32) -> Answered {
    known_flags(flags, libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH)?;
    let text = call.path(from.1)?;
    let mut leads_to = None;
    let source = if text.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        call.of_descriptor(from.0)?
    } else {
        match call.walk_at(from.0, &text, flags & libc::AT_SYMLINK_FOLLOW != 0)? {
            Walked::Outside(path) => {
                leads_to = path;
                None
            }
            Walked::Inside(spot) => Some(spot.known()?),
        }
    };
    let to_text = call.path(to.1)?;
    if to_text.is_empty() {
        return Err(Errno::NOENT);
    }
    let target = match (source, call.walk_at(to.0, &to_text, false)?) {
        (None, Walked::Outside(target)) => {
            bare::go_outside(call, from.0, &text, leads_to.as_deref())?;
            return bare::go_outside(call, to.0, &to_text, target.as_deref());
        }
        (Some(_), Walked::Inside(target)) => target,
        _ => return Err(Errno::XDEV),
    };
    // As in the kernel: a file without a name gets no new one.
    let source = source.filter(|source| source.attr.links > 0).ok_or(Errno::NOENT)?;
    if target.found.is_some() {
        return Err(Errno::EXIST);
    }
    if target.must_be_dir {
        return Err(Errno::NOENT);
    }
    call.namespace().files.descriptors.catch_up();
    let caller = call.caller()?;
    permit_link(call, &caller, &source)?;
    let made = call.namespace().names.link(&caller, source.id, target.dir, &target.name).map_err(errno)?;
    call.made(made.id);
    DONE
}

/// As in the kernel with `fs.protected_hardlinks`: no new names for a file that the caller could not write, or that
/// runs as another user.
fn permit_link(call: &Call<'_>, caller: &Caller, source: &Known) -> Result<(), Errno> {
    let protected = || std::fs::read("/proc/sys/fs/protected_hardlinks").is_ok_and(|text| text.starts_with(b"1"));
    let attr = source.attr;
    if caller.uid == 0 || caller.uid == attr.uid || !protected() {
        return Ok(());
    }
    let gains = attr.perm & 0o4000 != 0 || attr.perm & 0o2010 == 0o2010;
    let may_write = || call.namespace().attributes.access(caller, source.id, 6).is_ok();
    if attr.kind == Kind::File && !gains && may_write() { Ok(()) } else { Err(Errno::PERM) }
}

pub(super) fn symlink(call: &Call<'_>, target: usize, dirfd: i32, path: usize) -> Answered {
    let Some(spot) = vacant(call, dirfd, path, false)? else { return Ok(Answer::Continue) };
    let target = call.path(target)?;
    if target.is_empty() {
        return Err(Errno::NOENT);
    }
    call.namespace().files.descriptors.catch_up();
    let made = call.namespace().names.symlink(&call.creator()?, spot.dir, &spot.name, &target).map_err(errno)?;
    call.made(made.id);
    DONE
}

pub(super) fn mknod(call: &Call<'_>, dirfd: i32, path: usize, mode: u32, device: u64) -> Answered {
    let Some(spot) = vacant(call, dirfd, path, false)? else { return Ok(Answer::Continue) };
    let caller = call.creator()?;
    let kind = match mode & libc::S_IFMT {
        0 => libc::S_IFREG,
        libc::S_IFSOCK => return call.refuse("sockets in the directory", Errno::OPNOTSUPP),
        libc::S_IFCHR | libc::S_IFBLK if caller.uid != 0 => {
            // The kernel checks the directory first.
            call.namespace().attributes.access(&caller, spot.dir, 3).map_err(errno)?;
            return Err(Errno::PERM);
        }
        libc::S_IFDIR => return Err(Errno::PERM),
        kind => kind,
    };
    call.namespace().files.descriptors.catch_up();
    let perm = mode & 0o7777 & !caller.umask;
    if kind == libc::S_IFREG {
        // A regular file is created through a descriptor, which is closed at once.
        let flags = libc::O_WRONLY | libc::O_CREAT;
        let made = call.namespace().grants.create_plain(&caller, spot.dir, &spot.name, perm, flags).map_err(errno)?;
        drop(made);
        return DONE;
    }
    let made = call.namespace().names.mknod(&caller, spot.dir, &spot.name, kind | perm, device).map_err(errno)?;
    call.made(made.id);
    DONE
}
