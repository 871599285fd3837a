//! An optional second socket, where the members of a group may ask for the agent's status, and nothing else.
//!
//! The group is that of the socket's directory. The danger that it avoids: a socket that another user put in its place.
//! So the directory must belong to the user or root, and no other user may write there.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use surgetank_types::error::{Error, Result};

use super::address::Address;
use super::line::{self, Broken, Limits};

/// Removes its file when dropped.
pub struct GroupSocket {
    path: PathBuf,
    pub listener: UnixListener,
    pub gid: u32,
}

impl GroupSocket {
    /// Replaces the socket of an agent that was killed. `over`: the directory that the agent serves.
    pub fn bind(path: &Path, over: &Path) -> Result<Self> {
        let refuse = |why: String| {
            Error::new(format!("the group's socket {} cannot be made", path.display()))
                .why(why)
                .remedy("name a path in a directory of yours that belongs to the group and that only you can write: mkdir -m 750 DIR; chgrp GROUP DIR")
        };
        let dir =
            path.parent().filter(|_| path.file_name().is_some()).ok_or_else(|| refuse("it has no name".into()))?;
        if dir.starts_with(over) {
            return Err(refuse(format!("it is below the directory that is served, {}", over.display())));
        }
        let around = fs::metadata(dir).map_err(|why| refuse(format!("{}: {why}", dir.display())))?;
        let me = rustix::process::geteuid().as_raw();
        if around.uid() != me && around.uid() != 0 {
            return Err(refuse(format!("{} belongs to user {}", dir.display(), around.uid())));
        }
        if around.mode() & 0o022 != 0 {
            let mode = around.mode() & 0o7777;
            return Err(refuse(format!(
                "the mode of {} is {mode:04o}: other users could replace the socket",
                dir.display()
            )));
        }
        match fs::symlink_metadata(path) {
            Ok(there) if there.file_type().is_socket() && there.uid() == me => {
                if matches!(line::connect(path, &Limits::default()), Ok(_) | Err(Broken::Silent(_))) {
                    return Err(refuse("another agent of yours has it".into()));
                }
                fs::remove_file(path).map_err(|why| refuse(why.to_string()))?;
            }
            Ok(_) => return Err(refuse("something else is there already".into())),
            Err(_) => {}
        }
        let bind = || UnixListener::bind(Address::of(path)?.path());
        let listener = bind().map_err(|why| refuse(why.to_string()))?;
        let socket = Self { path: path.to_owned(), listener, gid: around.gid() };
        // Before that the umask sets the mode; the agent checks each connecting process in any case.
        std::os::unix::fs::chown(path, None, Some(socket.gid))
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o660)))
            .map_err(|why| refuse(format!("group {}: {why}", socket.gid)))?;
        Ok(socket)
    }
}

impl Drop for GroupSocket {
    fn drop(&mut self) {
        // A missing file is the wanted result.
        drop(fs::remove_file(&self.path));
    }
}

/// Is the process at the other end a member of the group?
pub fn is_member(peer: BorrowedFd<'_>, gid: u32) -> io::Result<bool> {
    const GROUPS_MAX: usize = 65_536;
    let mut groups = vec![0 as libc::gid_t; 64];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(&*groups)).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes to `groups`, which has so many, and reports how many there
        // are.
        let done = unsafe {
            libc::getsockopt(
                peer.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if done == 0 {
            return Ok(groups[..count.min(groups.len())].contains(&gid));
        }
        let why = io::Error::last_os_error();
        if why.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > GROUPS_MAX {
            return Err(why);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn socket_replaceable_by_other_users_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        for (mode, good) in [(0o750, true), (0o755, true), (0o770, false), (0o1777, false)] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let bound = GroupSocket::bind(&path, Path::new("/nowhere"));
            assert_eq!(bound.is_ok(), good, "{mode:o}: {:?}", bound.err());
            drop(bound);
            assert!(!path.exists());
        }
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(&path, "a file").unwrap();
        assert!(GroupSocket::bind(&path, Path::new("/nowhere")).err().unwrap().why.contains("something else"));
        fs::remove_file(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        let bound = GroupSocket::bind(&path, Path::new("/nowhere")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o660, "left by one that was killed");
        assert_eq!(bound.gid, fs::metadata(dir.path()).unwrap().gid());
        assert!(GroupSocket::bind(&path, Path::new("/nowhere")).err().unwrap().why.contains("another agent"));
        assert!(GroupSocket::bind(&path, dir.path()).err().unwrap().why.contains("below"));
    }

    #[test]
    fn group_membership_is_known() {
        let (one, _other) = UnixStream::pair().unwrap();
        for group in rustix::process::getgroups().unwrap() {
            assert!(is_member(one.as_fd(), group.as_raw()).unwrap());
        }
        assert!(!is_member(one.as_fd(), 0xfff_fff1).unwrap());
    }
}
