//! Requests on names: look-ups, new entries, links, renames and removals.
//!
//! The danger that it avoids: a wait for another member. A name that is a directory of the store with another owner is
//! answered as such; the asking member goes there itself.

use std::iter;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, getxattr, linkat, mkdirat, mknodat, readlinkat, renameat_with,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use surgetank_types::model::Kind;

use super::holdings::Holdings;
use super::place::{PATH, checked, known_kind, open_name, path_of, reopened};
use crate::pool::call::Answer;

/// Its value at a directory says which member decides the names in it. Other members do not see it.
pub const AUTHORITY: &str =
    // (Unit tests serve a plain directory, which takes only names of users.)
    if cfg!(test) { "user.surgetank.authority" } else { "system.surgetank.authority" };
const OURS: &[u8] = b"ours";

/// The directory of a path below the root.
pub fn directory(of: &Holdings, path: &[u8]) -> Result<Answer, Errno> {
    of.found(of.root.of_path(path)?, None).map(Answer::Found)
}

/// The node of a name.
pub fn look_up(of: &Holdings, parent: u64, name: &[u8]) -> Result<Answer, Errno> {
    let fd = open_name(&*of.node(parent)?.fd, name, PATH, Mode::empty())?;
    // (The attributes of another member's directory would be asked there.)
    if known_kind(&fd)? == Kind::Directory && !is_ours(&fd)? {
        return Ok(Answer::OfTheStore);
    }
    of.found(of.root.place(fd)?, Some((parent, name))).map(Answer::Found)
}

/// The node of a name, and its file stays for a moment if it is replaced. (The kernel here may know the old name until the
/// program that replaces it has its answer.)
pub fn look_up_and_keep(of: &Holdings, parent: u64, name: &[u8]) -> Result<Answer, Errno> {
    const TRIES: usize = 400;
    const PAUSE: Duration = Duration::from_micros(500);
    for _ in 0..TRIES {
        let fd = open_name(&*of.node(parent)?.fd, name, PATH, Mode::empty())?;
        if known_kind(&fd)? != Kind::File {
            break;
        }
        match reopened(&fd, OFlags::RDONLY) {
            Ok(open) => {
                of.keep(open);
                return of.found(of.root.place(fd)?, Some((parent, name))).map(Answer::Found);
            }
            Err(Errno::STALE) => thread::sleep(PAUSE),
            // (It may not be read. Then it is not kept.)
            Err(_) => break,
        }
    }
    look_up(of, parent, name)
}

fn is_ours(directory: impl AsFd) -> Result<bool, Errno> {
    let mut value = [0; 64];
    match getxattr(path_of(directory), AUTHORITY, &mut value[..]) {
        Ok(length) => Ok(value.get(..length) == Some(OURS)),
        // A longer value is that of another member.
        Err(Errno::RANGE) => Ok(false),
        // A mount outside a pool.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The node of a name that was just made.
fn made(of: &Holdings, directory: impl AsFd, (parent, name): (u64, &[u8])) -> Result<Answer, Errno> {
    of.found(of.root.of_name(directory, name)?, Some((parent, name))).map(Answer::Found)
}

/// The target of a symbolic link.
pub fn read_link(of: &Holdings, node: u64) -> Result<Answer, Errno> {
    let node = of.node(node)?;
    if node.kind != Kind::Symlink {
        return Err(Errno::INVAL);
    }
    Ok(Answer::Bytes(readlinkat(&*node.fd, c"", Vec::new())?.into_bytes()))
}

/// A new symbolic link.
pub fn make_link(of: &Holdings, parent: u64, name: &[u8], target: &[u8]) -> Result<Answer, Errno> {
    checked(name)?;
    let directory = of.node(parent)?.fd;
    symlinkat(target, &*directory, name)?;
    made(of, &*directory, (parent, name))
}

/// A new file of any kind but a directory or a link. `mode` has the type.
pub fn make_node(of: &Holdings, parent: u64, name: &[u8], mode: u32, device: u64) -> Result<Answer, Errno> {
    checked(name)?;
    let directory = of.node(parent)?.fd;
    let kind = match mode & libc::S_IFMT {
        libc::S_IFREG | 0 => FileType::RegularFile,
        libc::S_IFIFO => FileType::Fifo,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharacterDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        libc::S_IFDIR => return Err(Errno::PERM),
        _ => return Err(Errno::INVAL),
    };
    mknodat(&*directory, name, kind, perm_bits(mode), device)?;
    made(of, &*directory, (parent, name))
}

/// A new directory.
pub fn make_directory(of: &Holdings, parent: u64, name: &[u8], perm: u32) -> Result<Answer, Errno> {
    checked(name)?;
    let directory = of.node(parent)?.fd;
    mkdirat(&*directory, name, perm_bits(perm))?;
    made(of, &*directory, (parent, name))
}

/// The permission bits of a mode.
pub fn perm_bits(mode: u32) -> Mode {
    Mode::from_bits_retain(mode & 0o7777)
}

/// Removes a name.
pub fn remove(of: &Holdings, parent: u64, name: &[u8], directory: bool) -> Result<Answer, Errno> {
    checked(name)?;
    let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    unlinkat(&*of.node(parent)?.fd, name, flags)?;
    Ok(Answer::Done)
}

/// Renames. `from`, `to`: parent and name. `flags`: of renameat2(2).
pub fn rename(of: &Holdings, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32) -> Result<Answer, Errno> {
    checked(from.1)?;
    checked(to.1)?;
    // A whiteout is for overlays on local disks.
    let allowed = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
    let flags = RenameFlags::from_bits(flags).filter(|flags| allowed.contains(*flags)).ok_or(Errno::INVAL)?;
    let (old, new) = (of.node(from.0)?.fd, of.node(to.0)?.fd);
    renameat_with(&*old, from.1, &*new, to.1, flags)?;
    let exchanged = flags.contains(RenameFlags::EXCHANGE).then_some((&old, from));
    for (directory, (parent, name)) in iter::once((&new, to)).chain(exchanged) {
        // (The kernel knows the name. If it is another one by now, the node is looked up again later.)
        if let Ok(place) = of.root.as_known(&**directory, name) {
            of.renamed(place, (parent, name));
        }
    }
    Ok(Answer::Done)
}

/// A further name of a file.
pub fn link(of: &Holdings, node: u64, new_parent: u64, new_name: &[u8]) -> Result<Answer, Errno> {
    checked(new_name)?;
    let (node, directory) = (of.node(node)?.fd, of.node(new_parent)?.fd);
    // The path of the descriptor is itself a link, which the kernel follows to the file, also to a symbolic link.
    // (An empty path instead would need the capability to pass all permissions.)
    linkat(CWD, path_of(&*node), &*directory, new_name, AtFlags::SYMLINK_FOLLOW)?;
    made(of, &*directory, (new_parent, new_name))
}
