//! A file's attributes: the catalog's answer, the same for a name and for a descriptor of its plain file.

use rustix::io::Errno;
use surgetank_types::model::Attr;

use super::bare;
use super::call::{Answer, Answered, Call, DONE, Known, errno, known_flags};
use super::walk::Walked;

const BLOCK_BYTES: u32 = 4096;

/// The bytes of a structure of plain numbers.
fn bytes_of<T>(value: &T) -> &[u8] {
    // SAFETY: only used for the kernel's structures below, which begin as zeros: padding is initialised too.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

const LOOK_FLAGS: i32 = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH;

fn zeroed<T>() -> T {
    // SAFETY: only used for the kernel's structures below, of which zeros are a value.
    unsafe { std::mem::zeroed() }
}

/// The file of a path with AT_EMPTY_PATH and the like; `None`: it is outside the directory.
fn meant(call: &Call<'_>, dirfd: i32, path: usize, flags: i32) -> Result<Option<Known>, Errno> {
    let empty = flags & libc::AT_EMPTY_PATH != 0;
    let text = if call.arg(path) == 0 && empty { Vec::new() } else { call.path(path)? };
    if text.is_empty() && empty {
        return match dirfd {
            libc::AT_FDCWD => call.object(&call.task.proc("cwd")),
            number => call.of_descriptor(number),
        };
    }
    match call.walk_flags(dirfd, &text, flags)? {
        Walked::Outside(to) => {
            bare::go_outside(call, dirfd, &text, to.as_deref())?;
            Ok(None)
        }
        Walked::Inside(spot) => spot.known().map(Some),
    }
}

pub(super) fn stat(call: &Call<'_>, dirfd: i32, path: usize, out: usize, flags: i32) -> Answered {
    known_flags(flags, LOOK_FLAGS)?;
    match meant(call, dirfd, path, flags)? {
        Some(known) => put_stat(call, &known.attr, out),
        None => Ok(Answer::Continue),
    }
}

pub(super) fn fstat(call: &Call<'_>, number: i32, out: usize) -> Answered {
    match call.of_descriptor(number)? {
        Some(known) => put_stat(call, &known.attr, out),
        None => Ok(Answer::Continue),
    }
}

fn put_stat(call: &Call<'_>, attr: &Attr, out: usize) -> Answered {
    let mut stat: libc::stat = zeroed();
    stat.st_dev = call.supervisor.over_dev;
    stat.st_ino = attr.ino;
    stat.st_nlink = attr.links as _;
    stat.st_mode = attr.kind.type_bits() | attr.perm;
    stat.st_uid = attr.uid;
    stat.st_gid = attr.gid;
    stat.st_rdev = attr.device;
    stat.st_size = attr.size_bytes.cast_signed();
    stat.st_blksize = BLOCK_BYTES as _;
    stat.st_blocks = attr.blocks.cast_signed();
    (stat.st_atime, stat.st_atime_nsec) = (attr.atime.secs(), attr.atime.subsec_nanos().into());
    (stat.st_mtime, stat.st_mtime_nsec) = (attr.mtime.secs(), attr.mtime.subsec_nanos().into());
    (stat.st_ctime, stat.st_ctime_nsec) = (attr.ctime.secs(), attr.ctime.subsec_nanos().into());
    call.task.write(call.arg(out), bytes_of(&stat))?;
    DONE
}

pub(super) fn statx(call: &Call<'_>) -> Answered {
    known_flags(call.int(2), LOOK_FLAGS | libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC)?;
    let Some(known) = meant(call, call.int(0), 1, call.int(2))? else { return Ok(Answer::Continue) };
    let attr = known.attr;
    let time = |time: surgetank_types::model::Timestamp| {
        let mut out: libc::statx_timestamp = zeroed();
        out.tv_sec = time.secs();
        out.tv_nsec = time.subsec_nanos();
        out
    };
    let mut out: libc::statx = zeroed();
    out.stx_mask = libc::STATX_BASIC_STATS;
    out.stx_blksize = BLOCK_BYTES;
    out.stx_nlink = attr.links;
    out.stx_uid = attr.uid;
    out.stx_gid = attr.gid;
    out.stx_mode = (attr.kind.type_bits() | attr.perm) as u16;
    out.stx_ino = attr.ino;
    out.stx_size = attr.size_bytes;
    out.stx_blocks = attr.blocks;
    (out.stx_atime, out.stx_mtime, out.stx_ctime) = (time(attr.atime), time(attr.mtime), time(attr.ctime));
    (out.stx_rdev_major, out.stx_rdev_minor) = (libc::major(attr.device), libc::minor(attr.device));
    let dev = call.supervisor.over_dev;
    (out.stx_dev_major, out.stx_dev_minor) = (libc::major(dev), libc::minor(dev));
    call.task.write(call.arg(4), bytes_of(&out))?;
    DONE
}

pub(super) fn access(call: &Call<'_>, dirfd: i32, path: usize, mask: i32, flags: i32) -> Answered {
    known_flags(mask, 7)?;
    known_flags(flags, libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH)?;
    let Some(known) = meant(call, dirfd, path, flags)? else { return Ok(Answer::Continue) };
    call.namespace().attributes.access(&call.caller()?, known.id, mask.cast_unsigned()).map_err(errno)?;
    DONE
}

pub(super) fn readlink(call: &Call<'_>, dirfd: i32, path: usize, out: usize, room: i32) -> Answered {
    let text = call.path(path)?;
    if room <= 0 {
        return Err(Errno::INVAL);
    }
    if let Some(name) = name_of_descriptor(call, &text)? {
        return put_link(call, &name, out, room);
    }
    let spot = match call.walk_at(dirfd, &text, false)? {
        Walked::Outside(to) => return bare::go_outside(call, dirfd, &text, to.as_deref()),
        Walked::Inside(spot) => spot,
    };
    let known = spot.known()?;
    let target = call.namespace().attributes.readlink(known.id).map_err(errno)?;
    put_link(call, &target, out, room)
}

fn put_link(call: &Call<'_>, target: &[u8], out: usize, room: i32) -> Answered {
    let shown = &target[..target.len().min(usize::try_from(room).unwrap_or(0))];
    call.task.write(call.arg(out), shown)?;
    Ok(Answer::Value(shown.len() as i64))
}

/// /proc/…/fd/N of a served file: its name here instead of the plain file's.
fn name_of_descriptor(call: &Call<'_>, path: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
    let Ok(text) = std::str::from_utf8(path) else { return Ok(None) };
    let parts: Vec<&str> = text.split('/').collect();
    let link = match parts.as_slice() {
        ["", "proc", "self" | "thread-self", "cwd"] => call.task.proc("cwd"),
        ["", "proc", _, "cwd"] => text.to_owned(),
        ["", "proc", "self" | "thread-self", "fd", number] | ["", "dev", "fd", number] => {
            call.task.proc(&format!("fd/{number}"))
        }
        ["", "proc", _, "fd", _] => text.to_owned(),
        _ => return Ok(None),
    };
    Ok(call.object(&link)?.and_then(|known| name_of(call, known)))
}

/// The whole path; `None`: the file has no name any more.
fn name_of(call: &Call<'_>, known: Known) -> Option<Vec<u8>> {
    let path = call.namespace().eager.path_of(known.id)?;
    let mut name = call.supervisor.over.clone();
    if !path.is_empty() {
        name.push(b'/');
        name.extend_from_slice(&path);
    }
    Some(name)
}

/// While a rename waits for the drain, the bare directory's path is not the path that programs see.
pub(super) fn getcwd(call: &Call<'_>) -> Answered {
    let Some(known) = call.object(&call.task.proc("cwd"))? else { return Ok(Answer::Continue) };
    let mut name = name_of(call, known).ok_or(Errno::NOENT)?;
    name.push(0);
    // The kernel returns no longer path.
    if name.len() > super::task::PATH_BYTES_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    if u64::try_from(name.len()).is_ok_and(|bytes| bytes > call.arg(1)) {
        return Err(Errno::RANGE);
    }
    call.task.write(call.arg(0), &name)?;
    Ok(Answer::Value(name.len() as i64))
}

pub(super) fn statfs(call: &Call<'_>) -> Answered {
    let text = call.path(0)?;
    match call.walk_at(libc::AT_FDCWD, &text, true)? {
        Walked::Outside(to) => bare::go_outside(call, libc::AT_FDCWD, &text, to.as_deref()),
        Walked::Inside(spot) => spot.known().and_then(|_| put_space(call)),
    }
}

pub(super) fn fstatfs(call: &Call<'_>) -> Answered {
    match call.of_descriptor(call.int(0))? {
        Some(_) => put_space(call),
        None => Ok(Answer::Continue),
    }
}

fn put_space(call: &Call<'_>) -> Answered {
    let space = call.namespace().attributes.statfs().map_err(errno)?;
    let path = std::ffi::CString::new(call.supervisor.over.clone()).map_err(|_| Errno::IO)?;
    let mut out: libc::statfs = zeroed();
    // The file system's type is the bare directory's: drained files will be on it.
    // SAFETY: a C string and room for the answer.
    if unsafe { libc::statfs(path.as_ptr(), &raw mut out) } != 0 {
        return Err(Errno::IO);
    }
    let block = u64::from(space.block_bytes.max(512));
    out.f_bsize = block as _;
    out.f_frsize = block as _;
    out.f_blocks = space.total_bytes / block;
    out.f_bfree = space.free_bytes / block;
    out.f_bavail = space.available_bytes / block;
    out.f_files = space.inodes_total;
    out.f_ffree = space.inodes_free;
    call.task.write(call.arg(1), bytes_of(&out))?;
    DONE
}
