//! Changes a file's attributes: permissions, owners, times, size, extended attributes.

use rustix::io::Errno;
use surgetank_core::namespace::SetAttr;
use surgetank_types::model::{FileId, Kind, Timestamp};

use super::bare;
use super::call::{Answer, Answered, Call, DONE, Known, errno};
use super::walk::Walked;

const XATTR_VALUE_BYTES_MAX: usize = 65536;
const XATTR_NAME_BYTES_MAX: usize = 256;

/// `None`: the path is outside.
fn target(call: &Call<'_>, dirfd: i32, path: usize, flags: i32) -> Result<Option<Known>, Errno> {
    let text = call.path(path)?;
    if text.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        return call.of_descriptor(dirfd);
    }
    match call.walk_flags(dirfd, &text, flags)? {
        Walked::Outside(to) => {
            bare::go_outside(call, dirfd, &text, to.as_deref())?;
            Ok(None)
        }
        Walked::Inside(spot) => spot.known().map(Some),
    }
}

fn change(call: &Call<'_>, id: FileId, change: &SetAttr) -> Answered {
    call.namespace().files.descriptors.catch_up();
    call.namespace().attributes.setattr(&call.caller()?, id, None, change).map_err(errno)?;
    DONE
}

pub(super) fn chmod(call: &Call<'_>, dirfd: i32, path: usize, mode: u32, flags: i32) -> Answered {
    let Some(known) = target(call, dirfd, path, flags)? else { return Ok(Answer::Continue) };
    if known.attr.kind == Kind::Symlink {
        return Err(Errno::OPNOTSUPP);
    }
    change(call, known.id, &SetAttr { perm: Some(mode & 0o7777), ..SetAttr::default() })
}

pub(super) fn fchmod(call: &Call<'_>) -> Answered {
    let Some(known) = call.of_descriptor(call.int(0))? else { return Ok(Answer::Continue) };
    change(call, known.id, &SetAttr { perm: Some(call.arg(1) as u32 & 0o7777), ..SetAttr::default() })
}

fn give(call: &Call<'_>, id: FileId, (uid, gid): (u64, u64)) -> Answered {
    let given = |id: u64| Some(id as u32).filter(|id| *id != u32::MAX);
    change(call, id, &SetAttr { uid: given(uid), gid: given(gid), ..SetAttr::default() })
}

pub(super) fn chown(call: &Call<'_>, dirfd: i32, path: usize, ids: (u64, u64), flags: i32) -> Answered {
    match target(call, dirfd, path, flags)? {
        Some(known) => give(call, known.id, ids),
        None => Ok(Answer::Continue),
    }
}

pub(super) fn fchown(call: &Call<'_>) -> Answered {
    match call.of_descriptor(call.int(0))? {
        Some(known) => give(call, known.id, (call.arg(1), call.arg(2))),
        None => Ok(Answer::Continue),
    }
}

fn set_times(call: &Call<'_>, id: FileId, atime: Option<Timestamp>, mtime: Option<Timestamp>, now: bool) -> Answered {
    if atime.is_none() && mtime.is_none() {
        return DONE;
    }
    change(call, id, &SetAttr { atime, mtime, times_now: now, ..SetAttr::default() })
}

pub(super) fn utimens(call: &Call<'_>) -> Answered {
    let flags = call.int(3);
    let known = if call.arg(1) == 0 { call.of_descriptor(call.int(0))? } else { target(call, call.int(0), 1, flags)? };
    let Some(known) = known else { return Ok(Answer::Continue) };
    let now = surgetank_types::clock::now();
    if call.arg(2) == 0 {
        return set_times(call, known.id, Some(now), Some(now), true);
    }
    let times: [i64; 4] = call.task.get(call.arg(2))?;
    let time = |secs: i64, nanos: i64| match nanos {
        libc::UTIME_NOW => Ok(Some(now)),
        libc::UTIME_OMIT => Ok(None),
        0..=999_999_999 => Ok(Some(Timestamp::from_parts(secs, nanos as u32))),
        _ => Err(Errno::INVAL),
    };
    let all_now = times[1] == libc::UTIME_NOW && times[3] == libc::UTIME_NOW;
    set_times(call, known.id, time(times[0], times[1])?, time(times[2], times[3])?, all_now)
}

/// utimes, futimesat: in microseconds.
#[cfg(target_arch = "x86_64")]
pub(super) fn utimes(call: &Call<'_>, dirfd: i32, path: usize, times: usize) -> Answered {
    let known = if call.arg(path) == 0 { call.of_descriptor(dirfd)? } else { target(call, dirfd, path, 0)? };
    let Some(known) = known else { return Ok(Answer::Continue) };
    let now = surgetank_types::clock::now();
    if call.arg(times) == 0 {
        return set_times(call, known.id, Some(now), Some(now), true);
    }
    let times: [i64; 4] = call.task.get(call.arg(times))?;
    let time = |secs: i64, micros: i64| match micros {
        0..=999_999 => Ok(Some(Timestamp::from_parts(secs, micros as u32 * 1000))),
        _ => Err(Errno::INVAL),
    };
    set_times(call, known.id, time(times[0], times[1])?, time(times[2], times[3])?, false)
}

#[cfg(target_arch = "x86_64")]
pub(super) fn utime(call: &Call<'_>) -> Answered {
    let Some(known) = target(call, libc::AT_FDCWD, 0, 0)? else { return Ok(Answer::Continue) };
    let now = surgetank_types::clock::now();
    if call.arg(1) == 0 {
        return set_times(call, known.id, Some(now), Some(now), true);
    }
    let times: [i64; 2] = call.task.get(call.arg(1))?;
    let time = |secs| Some(Timestamp::from_parts(secs, 0));
    set_times(call, known.id, time(times[0]), time(times[1]), false)
}

/// Truncates through a descriptor, like every write.
pub(super) fn truncate(call: &Call<'_>) -> Answered {
    let Some(known) = target(call, libc::AT_FDCWD, 0, 0)? else { return Ok(Answer::Continue) };
    match known.attr.kind {
        Kind::File => {}
        Kind::Directory => return Err(Errno::ISDIR),
        _ => return Err(Errno::INVAL),
    }
    let size_bytes = u64::try_from(call.arg(1).cast_signed()).map_err(|_| Errno::INVAL)?;
    let flags = libc::O_WRONLY | if size_bytes == 0 { libc::O_TRUNC } else { 0 };
    call.namespace().files.descriptors.catch_up();
    let caller = call.caller()?;
    let file = call.namespace().grants.open_plain(&caller, known.id, flags).map_err(errno)?;
    rustix::fs::ftruncate(&file, size_bytes)?;
    if caller.uid != 0 {
        call.namespace().attributes.clear_suidgid(&caller, known.id);
    }
    DONE
}

fn xattr_target(call: &Call<'_>, follow: bool) -> Result<Option<Known>, Errno> {
    target(call, libc::AT_FDCWD, 0, if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW })
}

fn xattr_name(call: &Call<'_>) -> Result<Vec<u8>, Errno> {
    let name = call
        .task
        .string(call.arg(1), XATTR_NAME_BYTES_MAX)
        .map_err(|errno| if errno == Errno::NAMETOOLONG { Errno::RANGE } else { errno })?;
    if name.is_empty() { Err(Errno::RANGE) } else { Ok(name) }
}

/// Copies a value, as far as there is room; no room at all asks for its size.
fn put_value(call: &Call<'_>, value: &[u8], out: usize, room: usize) -> Answered {
    let room = usize::try_from(call.arg(room)).unwrap_or(usize::MAX);
    if room > 0 {
        if value.len() > room {
            return Err(Errno::RANGE);
        }
        call.task.write(call.arg(out), value)?;
    }
    Ok(Answer::Value(value.len() as i64))
}

fn get_value(call: &Call<'_>, known: Known) -> Answered {
    let name = xattr_name(call)?;
    if name.starts_with(b"user.") {
        call.namespace().attributes.access(&call.caller()?, known.id, 4).map_err(errno)?;
    }
    let value = call.namespace().xattrs.getxattr(known.id, &name).map_err(errno)?;
    put_value(call, &value, 2, 3)
}

fn set_value(call: &Call<'_>, known: Known) -> Answered {
    let bytes = usize::try_from(call.arg(3)).ok().filter(|bytes| *bytes <= XATTR_VALUE_BYTES_MAX);
    let mut value = vec![0; bytes.ok_or(Errno::TOOBIG)?];
    if !value.is_empty() {
        call.task.read(call.arg(2), &mut value)?;
    }
    let name = xattr_name(call)?;
    call.check()?;
    call.namespace().xattrs.setxattr(&call.caller()?, known.id, &name, &value, call.int(4)).map_err(errno)?;
    DONE
}

fn list_values(call: &Call<'_>, known: Known) -> Answered {
    let list = call.namespace().xattrs.listxattr(known.id).map_err(errno)?;
    put_value(call, &list, 1, 2)
}

fn remove_value(call: &Call<'_>, known: Known) -> Answered {
    call.namespace().xattrs.removexattr(&call.caller()?, known.id, &xattr_name(call)?).map_err(errno)?;
    DONE
}

pub(super) fn getxattr(call: &Call<'_>, follow: bool) -> Answered {
    xattr_target(call, follow)?.map_or(Ok(Answer::Continue), |known| get_value(call, known))
}
pub(super) fn setxattr(call: &Call<'_>, follow: bool) -> Answered {
    xattr_target(call, follow)?.map_or(Ok(Answer::Continue), |known| set_value(call, known))
}
pub(super) fn listxattr(call: &Call<'_>, follow: bool) -> Answered {
    xattr_target(call, follow)?.map_or(Ok(Answer::Continue), |known| list_values(call, known))
}
pub(super) fn removexattr(call: &Call<'_>, follow: bool) -> Answered {
    xattr_target(call, follow)?.map_or(Ok(Answer::Continue), |known| remove_value(call, known))
}

pub(super) fn descriptor_xattr(call: &Call<'_>, number: libc::c_long) -> Answered {
    let Some(known) = call.of_descriptor(call.int(0))? else { return Ok(Answer::Continue) };
    match number {
        libc::SYS_fgetxattr => get_value(call, known),
        libc::SYS_fsetxattr => set_value(call, known),
        libc::SYS_flistxattr => list_values(call, known),
        _ => remove_value(call, known),
    }
}
