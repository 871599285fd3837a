//! Maps a call's number to its handler.

use rustix::io::Errno;
use surgetank_types::model::Kind;

use super::call::{Answer, Answered, Call, DONE, errno};
use super::filter::number;
use super::walk::Walked;

const FDCWD: i32 = libc::AT_FDCWD;

/// Flags of chmod, chown, stat…
fn follows(flags: i32) -> bool {
    flags & libc::AT_SYMLINK_NOFOLLOW == 0
}

/// A flag that a future kernel defines may be essential, so an unknown flag is refused.
pub(super) fn known_flags(flags: i32, known: i32) -> Result<(), Errno> {
    if flags & !known == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

impl Call<'_> {
    pub fn answer(&self) -> Answered {
        let int = |index| self.int(index);
        let number = libc::c_long::from(self.notice.number);
        match number {
            libc::SYS_openat => self.open(int(0), 1, int(2), self.arg(3) as u32),
            number::OPENAT2 => self.openat2(),
            libc::SYS_newfstatat => self.stat(int(0), 1, 2, int(3)),
            libc::SYS_statx => self.statx(),
            libc::SYS_fstat => self.fstat(int(0), 1),
            libc::SYS_faccessat => self.access(int(0), 1, int(2), 0),
            number::FACCESSAT2 => self.access(int(0), 1, int(2), int(3)),
            libc::SYS_readlinkat => self.readlink(int(0), 1, 2, int(3)),
            libc::SYS_getdents64 => self.getdents(true),
            libc::SYS_chdir => self.chdir(),
            libc::SYS_getcwd => self.getcwd(),
            libc::SYS_inotify_add_watch => self.inotify_add_watch(),
            libc::SYS_execve => self.exec(FDCWD, 0, 0),
            libc::SYS_execveat => self.exec(int(0), 1, int(4)),
            libc::SYS_mkdirat => self.mkdir(int(0), 1, self.arg(2) as u32),
            libc::SYS_unlinkat => self.unlinkat(),
            libc::SYS_renameat => self.rename((int(0), 1), (int(2), 3), 0),
            libc::SYS_renameat2 => self.rename((int(0), 1), (int(2), 3), self.arg(4) as u32),
            libc::SYS_linkat => self.link((int(0), 1), (int(2), 3), int(4)),
            libc::SYS_symlinkat => self.symlink(0, int(1), 2),
            libc::SYS_mknodat => self.mknod(int(0), 1, self.arg(2) as u32, self.arg(3)),
            libc::SYS_fchmodat => self.chmod(int(0), 1, self.arg(2) as u32, 0),
            number::FCHMODAT2 => self.chmod(int(0), 1, self.arg(2) as u32, int(3)),
            libc::SYS_fchmod => self.fchmod(),
            libc::SYS_fchownat => self.chown(int(0), 1, (self.arg(2), self.arg(3)), int(4)),
            libc::SYS_fchown => self.fchown(),
            libc::SYS_utimensat => self.utimens(),
            libc::SYS_truncate => self.truncate(),
            libc::SYS_statfs => self.statfs(),
            libc::SYS_fstatfs => self.fstatfs(),
            libc::SYS_fsync | libc::SYS_fdatasync => self.fsync(),
            libc::SYS_getxattr => self.getxattr(true),
            libc::SYS_lgetxattr => self.getxattr(false),
            libc::SYS_setxattr => self.setxattr(true),
            libc::SYS_lsetxattr => self.setxattr(false),
            libc::SYS_listxattr => self.listxattr(true),
            libc::SYS_llistxattr => self.listxattr(false),
            libc::SYS_removexattr => self.removexattr(true),
            libc::SYS_lremovexattr => self.removexattr(false),
            libc::SYS_fgetxattr | libc::SYS_fsetxattr | libc::SYS_flistxattr | libc::SYS_fremovexattr => {
                self.descriptor_xattr(number)
            }
            libc::SYS_name_to_handle_at => self.outside_only(int(0), 1, "file handles", Errno::OPNOTSUPP),
            libc::SYS_open_by_handle_at => self.refuse("opening by file handle", Errno::PERM),
            number::SETXATTRAT | number::GETXATTRAT | number::LISTXATTRAT | number::REMOVEXATTRAT => {
                // Libraries fall back to the older calls.
                Err(Errno::NOSYS)
            }
            number::FILE_GETATTR | number::FILE_SETATTR => Err(Errno::NOSYS),
            libc::SYS_bind => self.bind(),
            libc::SYS_chroot => self.chroot(),
            libc::SYS_pivot_root => self.refuse("pivot_root (containers started inside)", Errno::PERM),
            // In other cases the source of the mount is not a path ("none", "tmpfs"), although it could be the name of
            // a file.
            libc::SYS_mount if self.arg(3) & (libc::MS_BIND | libc::MS_MOVE) == 0 => Ok(Answer::Continue),
            libc::SYS_mount => self.outside_only(FDCWD, 0, "mounting the directory elsewhere", Errno::PERM),
            number::OPEN_TREE | number::MOVE_MOUNT | number::OPEN_TREE_ATTR => {
                self.outside_only(int(0), 1, "mounting the directory elsewhere", Errno::PERM)
            }
            libc::SYS_acct | libc::SYS_swapon => self.outside_only(FDCWD, 0, "acct and swapon", Errno::PERM),
            other => self.older(other),
        }
    }

    /// Calls that only x86 has.
    #[cfg(target_arch = "x86_64")]
    fn older(&self, number: libc::c_long) -> Answered {
        let mode = |index| self.arg(index) as u32;
        match number {
            libc::SYS_open => self.open(FDCWD, 0, self.int(1), mode(2)),
            libc::SYS_creat => self.open(FDCWD, 0, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode(1)),
            libc::SYS_stat => self.stat(FDCWD, 0, 1, 0),
            libc::SYS_lstat => self.stat(FDCWD, 0, 1, libc::AT_SYMLINK_NOFOLLOW),
            libc::SYS_access => self.access(FDCWD, 0, self.int(1), 0),
            libc::SYS_readlink => self.readlink(FDCWD, 0, 1, self.int(2)),
            libc::SYS_getdents => self.getdents(false),
            libc::SYS_mkdir => self.mkdir(FDCWD, 0, mode(1)),
            libc::SYS_rmdir => self.unlink(FDCWD, 0, true),
            libc::SYS_unlink => self.unlink(FDCWD, 0, false),
            libc::SYS_rename => self.rename((FDCWD, 0), (FDCWD, 1), 0),
            libc::SYS_link => self.link((FDCWD, 0), (FDCWD, 1), 0),
            libc::SYS_symlink => self.symlink(0, FDCWD, 1),
            libc::SYS_mknod => self.mknod(FDCWD, 0, mode(1), self.arg(2)),
            libc::SYS_chmod => self.chmod(FDCWD, 0, mode(1), 0),
            libc::SYS_chown => self.chown(FDCWD, 0, (self.arg(1), self.arg(2)), 0),
            libc::SYS_lchown => self.chown(FDCWD, 0, (self.arg(1), self.arg(2)), libc::AT_SYMLINK_NOFOLLOW),
            libc::SYS_utime => self.utime(),
            libc::SYS_utimes => self.utimes(FDCWD, 0, 1),
            libc::SYS_futimesat => self.utimes(self.int(0), 1, 2),
            libc::SYS_uselib => self.outside_only(FDCWD, 0, "uselib", Errno::PERM),
            _ => Err(Errno::NOSYS),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn older(&self, _number: libc::c_long) -> Answered {
        Err(Errno::NOSYS)
    }

    /// Calls that do not work inside.
    fn outside_only(&self, dirfd: i32, path: usize, what: &'static str, with: Errno) -> Answered {
        if self.arg(path) == 0 {
            return Ok(Answer::Continue);
        }
        let path = self.path(path)?;
        match self.walk_at(dirfd, &path, true)? {
            Walked::Outside(to) => self.go_outside(dirfd, &path, to.as_deref()),
            Walked::Inside(_) => self.refuse(what, with),
        }
    }

    /// The kernel would create the socket in the bare directory, where no program would find it.
    fn bind(&self) -> Answered {
        const FAMILY_BYTES: usize = 2;
        let bytes = usize::try_from(self.int(2)).unwrap_or(0).min(size_of::<libc::sockaddr_un>());
        if bytes <= FAMILY_BYTES {
            return Ok(Answer::Continue);
        }
        let mut address = vec![0; bytes];
        self.task.read(self.arg(1), &mut address)?;
        self.check()?;
        let family = u16::from_ne_bytes([address[0], address[1]]);
        let path = &address[FAMILY_BYTES..];
        let path = &path[..path.iter().position(|byte| *byte == 0).unwrap_or(path.len())];
        if i32::from(family) != libc::AF_UNIX || path.is_empty() {
            return Ok(Answer::Continue);
        }
        self.names(path);
        match self.walk_at(FDCWD, path, false)? {
            Walked::Outside(to) => self.go_outside(FDCWD, path, to.as_deref()),
            Walked::Inside(spot) if spot.found.is_some() => Err(Errno::ADDRINUSE),
            Walked::Inside(_) => self.refuse("sockets in the directory", Errno::OPNOTSUPP),
        }
    }

    fn chroot(&self) -> Answered {
        let path = self.path(0)?;
        match self.walk_at(FDCWD, &path, true)? {
            Walked::Outside(to) => {
                self.supervisor.rooted.store(true, std::sync::atomic::Ordering::Relaxed);
                self.go_outside(FDCWD, &path, to.as_deref())
            }
            Walked::Inside(_) => self.refuse("chroot into the directory", Errno::PERM),
        }
    }

    fn fsync(&self) -> Answered {
        let Some(known) = self.of_descriptor(self.int(0))? else { return Ok(Answer::Continue) };
        self.namespace().files.descriptors.catch_up();
        match known.attr.kind {
            Kind::Directory => self.namespace().files.syncs.fsync_dir(known.id).map_err(errno)?,
            Kind::File => self.namespace().files.descriptors.fsync_handed(known.id).map_err(errno)?,
            _ => return Ok(Answer::Continue),
        }
        DONE
    }

    pub(super) fn walk_flags(&self, dirfd: i32, path: &[u8], flags: i32) -> Result<Walked, Errno> {
        self.walk_at(dirfd, path, follows(flags))
    }
}
