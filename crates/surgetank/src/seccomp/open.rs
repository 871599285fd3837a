//! Opens files and directories, watches and syncs them. The program gets a descriptor of the plain file or of the bare
//! directory, which the kernel serves itself.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;
use surgetank_types::model::{Caller, FileId, Kind};

use super::bare;
use super::call::{Answer, Answered, Call, DONE, Known, errno};
use super::walk::{Spot, Walked};

const TRIES_MAX: usize = 100;

/// struct open_how
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct How {
    flags: u64,
    mode: u64,
    resolve: u64,
}

pub(super) fn openat2(call: &Call<'_>) -> Answered {
    if call.arg(3) < size_of::<How>() as u64 {
        return Ok(Answer::Continue);
    }
    let how: How = call.task.get(call.arg(2))?;
    let path = call.path(1)?;
    if how.resolve == 0 {
        return open(call, call.int(0), 1, how.flags as i32, how.mode as u32);
    }
    // Only the kernel itself can guarantee how a path is resolved.
    match call.walk_at(call.int(0), &path, how.flags as i32 & libc::O_NOFOLLOW == 0)? {
        Walked::Outside(to) => bare::go_outside(call, call.int(0), &path, to.as_deref()),
        Walked::Inside(_) => call.refuse("openat2 with RESOLVE flags", Errno::NOSYS),
    }
}

pub(super) fn open(call: &Call<'_>, dirfd: i32, path: usize, flags: i32, mode: u32) -> Answered {
    let path = call.path(path)?;
    let creates = flags & libc::O_CREAT != 0;
    let excludes = creates && flags & libc::O_EXCL != 0;
    let follow = flags & libc::O_NOFOLLOW == 0 && !excludes;
    for _ in 0..TRIES_MAX {
        let spot = match call.walk_at(dirfd, &path, follow)? {
            Walked::Outside(to) => return bare::go_outside(call, dirfd, &path, to.as_deref()),
            Walked::Inside(spot) => spot,
        };
        if creates && flags & libc::O_DIRECTORY != 0 {
            return Err(Errno::INVAL);
        }
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            // As in file systems without the feature: a program with that errno creates a named file.
            if spot.known()?.attr.kind != Kind::Directory {
                return Err(Errno::NOTDIR);
            }
            return call.refuse("files without a name (O_TMPFILE)", Errno::OPNOTSUPP);
        }
        // As in the kernel for a slash after a name, whichever file has it.
        if creates && spot.must_be_dir && !spot.name.is_empty() {
            return Err(Errno::ISDIR);
        }
        let file: OwnedFd = match spot.found {
            Some(_) if excludes => return Err(Errno::EXIST),
            Some(known) => match open_known(call, &spot, known, flags) {
                // The file was deleted meanwhile: as if it had never existed.
                Err(Errno::NOENT | Errno::STALE) if !spot.name.is_empty() => continue,
                // A deleted directory that is a process's working directory.
                Err(Errno::STALE) => return Err(Errno::NOENT),
                other => match other? {
                    Some(file) => file,
                    None => return special(call, dirfd, &path, &spot, known.id),
                },
            },
            None if !creates => return Err(Errno::NOENT),
            None => match create(call, &spot, flags, mode) {
                Err(Errno::EXIST) if !excludes => continue,
                other => other?,
            },
        };
        return Ok(Answer::Descriptor { file, close_on_exec: flags & libc::O_CLOEXEC != 0 });
    }
    Err(Errno::AGAIN)
}

fn create(call: &Call<'_>, spot: &Spot, flags: i32, mode: u32) -> Result<OwnedFd, Errno> {
    let caller = call.creator()?;
    call.namespace().files.descriptors.catch_up();
    let perm = mode & 0o7777 & !caller.umask;
    let (id, file) = call
        .namespace()
        .grants
        .create_plain(&caller, spot.dir, &spot.name, perm, flags & !libc::O_EXCL)
        .map_err(errno)?;
    remember(call, id, rustix::fs::fstat(&file));
    if flags & libc::O_ACCMODE == libc::O_RDONLY {
        drop(file);
        // The mode does not restrict the process that creates the file.
        let maker = Caller { uid: 0, ..caller };
        let flags = flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
        let file = call.namespace().grants.open_plain(&maker, id, flags).map_err(errno)?;
        remember(call, id, rustix::fs::fstat(&file));
        (call.supervisor.gave)(call.task.tid, id, flags, false);
        return Ok(file.into());
    }
    (call.supervisor.gave)(call.task.tid, id, flags, true);
    Ok(file.into())
}

fn remember(call: &Call<'_>, id: FileId, there: Result<rustix::fs::Stat, Errno>) {
    if let Ok(stat) = there
        && call.supervisor.remember_file(stat.st_dev, stat.st_ino, id)
    {
        call.keep(id);
    }
}

fn plain(call: &Call<'_>, id: FileId, flags: i32) -> Result<OwnedFd, Errno> {
    let caller = call.caller()?;
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    if writes {
        call.namespace().files.descriptors.catch_up();
    }
    let file = call.namespace().grants.open_plain(&caller, id, flags).map_err(errno)?;
    remember(call, id, rustix::fs::fstat(&file));
    (call.supervisor.gave)(call.task.tid, id, flags, false);
    // The agent does not see writes to the plain file.
    if writes && caller.uid != 0 {
        call.namespace().attributes.clear_suidgid(&caller, id);
    }
    Ok(file.into())
}

/// `None`: the kernel opens it itself.
fn open_known(call: &Call<'_>, spot: &Spot, known: Known, flags: i32) -> Result<Option<OwnedFd>, Errno> {
    let path_only = flags & libc::O_PATH != 0;
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    if flags & libc::O_NOATIME != 0 && !path_only {
        let caller = call.caller()?;
        if caller.uid != 0 && caller.uid != known.attr.uid {
            return Err(Errno::PERM);
        }
    }
    match known.attr.kind {
        Kind::Directory if flags & libc::O_CREAT != 0 || writes && !path_only => Err(Errno::ISDIR),
        Kind::Directory => {
            if !path_only {
                call.namespace().attributes.access(&call.caller()?, known.id, 4).map_err(errno)?;
            }
            // The kernel injects no O_PATH descriptors: a readable one can do everything that an O_PATH one can.
            bare::directory(call, known.id, flags & libc::O_NOATIME).map(|(file, _)| Some(file))
        }
        _ if spot.must_be_dir || flags & libc::O_DIRECTORY != 0 => Err(Errno::NOTDIR),
        Kind::Symlink if path_only => {
            call.report("O_PATH of symbolic links");
            Err(Errno::OPNOTSUPP)
        }
        Kind::Symlink => Err(Errno::LOOP),
        Kind::File if path_only => {
            // Opening with O_PATH needs no permission to read.
            let privileged = Caller { uid: 0, gid: 0, pid: call.task.tid, umask: 0 };
            let file = call.namespace().grants.open_plain(&privileged, known.id, libc::O_RDONLY).map_err(errno)?;
            remember(call, known.id, rustix::fs::fstat(&file));
            Ok(Some(file.into()))
        }
        Kind::File => plain(call, known.id, flags & !(libc::O_CREAT | libc::O_EXCL)).map(Some),
        // A fifo or a device is the store's own: all processes must open the same one.
        _ => Ok(None),
    }
}

/// The kernel opens the file, and must find it under this one of its names: otherwise O_CREAT creates a file there.
fn special(call: &Call<'_>, dirfd: i32, path: &[u8], spot: &Spot, id: FileId) -> Answered {
    let below = bare::await_file(call, id)?;
    bare::await_name(call, dirfd, path, spot, &below)?;
    // The catalog answers later calls on the program's descriptor, because it has the attributes.
    remember(call, id, rustix::fs::lstat(&*bare::path_of(call, &below)));
    Ok(Answer::Continue)
}

/// A watcher of a file (tail -f) gets the plain file's events: the bare one does not change. A directory's events
/// come from the drain.
pub(super) fn inotify_add_watch(call: &Call<'_>) -> Answered {
    let path = call.path(1)?;
    let mask = call.arg(2) as u32;
    let spot = match call.walk_at(libc::AT_FDCWD, &path, mask & libc::IN_DONT_FOLLOW == 0)? {
        Walked::Outside(to) => return bare::go_outside(call, libc::AT_FDCWD, &path, to.as_deref()),
        Walked::Inside(spot) => spot,
    };
    let known = spot.known()?;
    let plain = match known.attr.kind {
        Kind::File => plain(call, known.id, libc::O_RDONLY)?,
        Kind::Directory => bare::directory(call, known.id, 0)?.0,
        _ => return call.refuse("inotify on links and special files", Errno::ACCESS),
    };
    let theirs = call.task.descriptor(call.int(0))?;
    let link = format!("/proc/self/fd/{}", plain.as_raw_fd());
    let flags = WatchFlags::from_bits_retain(mask & !libc::IN_DONT_FOLLOW);
    Ok(Answer::Value(inotify::add_watch(&theirs, link, flags)?.into()))
}

pub(super) fn fsync(call: &Call<'_>) -> Answered {
    let Some(known) = call.of_descriptor(call.int(0))? else { return Ok(Answer::Continue) };
    call.namespace().files.descriptors.catch_up();
    match known.attr.kind {
        Kind::Directory => call.namespace().files.syncs.fsync_dir(known.id).map_err(errno)?,
        Kind::File => call.namespace().files.descriptors.fsync_granted(known.id).map_err(errno)?,
        _ => return Ok(Answer::Continue),
    }
    DONE
}
