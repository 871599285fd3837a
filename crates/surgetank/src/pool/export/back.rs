//! Content of this node for files of a lost member: back under its path, as a program of this node would write it.
//!
//! The danger that this avoids: a file that was made again meanwhile is replaced by the one that was lost.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Timespec, Timestamps, Uid, fchmod, fchown, futimens,
    mkdirat, openat2, renameat_with, unlinkat,
};
use rustix::io::Errno;

use super::place::{Root, checked};

/// The name of a thread that acts as a program of this node.
const BACK: &std::ffi::CStr = c"pool-back";
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_MAGICLINKS);

struct AsProgram;

impl AsProgram {
    fn begin() -> Self {
        // (Without the name nothing is put back.)
        let _ = rustix::thread::set_name(BACK);
        Self
    }
}

impl Drop for AsProgram {
    fn drop(&mut self) {
        let _ = rustix::thread::set_name(c"pool-agent");
    }
}

/// Returns `false` if something has the path already.
///
/// `number`: of the file's content; `None`: it is a directory, which may be there. `syncs`: a sync makes it durable without the
/// store.
pub fn put(
    root: &Root,
    (number, syncs): (Option<u64>, bool),
    path: &[u8],
    perm: u32,
    owner: (u32, u32),
) -> Result<bool, Errno> {
    let content = number.map(|number| Ok::<_, Errno>((File::from(root.open_home(number, OFlags::RDONLY)?), number)));
    let content = content.transpose()?;
    let _as = AsProgram::begin();
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let Some((name, above)) = names.split_last() else { return Err(Errno::INVAL) };
    names.iter().try_for_each(|name| checked(name))?;
    let mut at: Option<OwnedFd> = None;
    for component in above {
        let next = match &at {
            Some(at) => directory(at, component, owner),
            None => directory(&root.fd, component, owner),
        }?;
        at = Some(next);
    }
    match &at {
        Some(at) => put_into(at, name, (content, syncs), perm, owner),
        None => put_into(&root.fd, name, (content, syncs), perm, owner),
    }
}

/// Root gives it to its owner. Another user's file is that user's.
fn own(file: impl AsFd, (uid, gid): (u32, u32)) -> Result<(), Errno> {
    let owned = fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    if rustix::process::geteuid().is_root() { owned } else { Ok(()) }
}

/// A directory that was lost, too, is made for the file's owner only: which mode it had is not known.
fn directory(above: impl AsFd, name: &[u8], owner: (u32, u32)) -> Result<OwnedFd, Errno> {
    let open = || openat2(&above, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), BENEATH);
    match open() {
        Err(Errno::NOENT) => match mkdirat(&above, name, Mode::RWXU) {
            Ok(()) => {
                let made = openat2(&above, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), BENEATH)?;
                own(&made, owner)?;
                open()
            }
            Err(Errno::EXIST) => open(),
            Err(why) => Err(why),
        },
        opened => opened,
    }
}

fn put_into(
    dir: impl AsFd,
    name: &[u8],
    (content, syncs): (Option<(File, u64)>, bool),
    perm: u32,
    owner: (u32, u32),
) -> Result<bool, Errno> {
    let Some((content, number)) = content else {
        let made = match mkdirat(&dir, name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(why) => return Err(why),
        };
        // (One that was there may not be readable.)
        let path = if made { OFlags::empty() } else { OFlags::PATH };
        let opened = openat2(&dir, name, path | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), BENEATH);
        return match opened {
            // (Its owner has to make what was inside.)
            Ok(opened) if made => own(&opened, owner)
                .and_then(|()| fchmod(&opened, Mode::from_raw_mode(perm & 0o7777 | 0o700)))
                .map(|()| true),
            Ok(_) => Ok(true),
            Err(Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(why) => Err(why),
        };
    };
    let part = format!(".surgetank-back-{number}");
    // (Of an earlier try.)
    match unlinkat(&dir, &*part, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(why) => return Err(why),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(openat2(&dir, &*part, flags, Mode::RUSR | Mode::WUSR, BENEATH)?);
    let put = || {
        let (mut from, mut to) = (&content, &file);
        io::copy(&mut from, &mut to).map_err(|why| Errno::from_io_error(&why).unwrap_or(Errno::IO))?;
        own(&file, owner)?;
        let is_owner = rustix::fs::fstat(&file).is_ok_and(|found| (found.st_uid, found.st_gid) == owner);
        // (Nothing runs as another user than before.)
        let may_be = if is_owner { 0o7777 } else { 0o777 };
        fchmod(&file, Mode::from_raw_mode(perm & may_be))?;
        let found = rustix::fs::fstat(&content)?;
        let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let last_access = time(found.st_atime, found.st_atime_nsec as _);
        futimens(
            &file,
            &Timestamps { last_access, last_modification: time(found.st_mtime, found.st_mtime_nsec as _) },
        )?;
        // (It may have been synced before, and the other copy goes. If this one cannot be synced, the other one stays. Once it
        // has its name, it is not put there again: a program may remove it.)
        if syncs {
            rustix::fs::fsync(&file)?;
        }
        renameat_with(&dir, &*part, &dir, name, RenameFlags::NOREPLACE)?;
        if syncs && let Err(why) = rustix::fs::fsync(&file) {
            tracing::warn!(%why, number, "the name of a file that was put back is not synced yet");
        }
        Ok(())
    };
    let put = put();
    if put.is_err() {
        let _ = unlinkat(&dir, &*part, AtFlags::empty());
    }
    match put {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(why) => Err(why),
    }
}
