//! Maps a call's number to its handler. A handler is a function that takes the call, and the numbers of the arguments
//! that its variants have at different places.

use rustix::io::Errno;

use super::call::{Answer, Answered, Call};
use super::filter::number;
use super::{attributes, enter, listing, names, open, stat, unsupported};

const FDCWD: i32 = libc::AT_FDCWD;

pub(super) fn answer(call: &Call<'_>) -> Answered {
    let int = |index| call.int(index);
    let number = libc::c_long::from(call.notice.number);
    match number {
        libc::SYS_openat => open::open(call, int(0), 1, int(2), call.arg(3) as u32),
        number::OPENAT2 => open::openat2(call),
        libc::SYS_newfstatat => stat::stat(call, int(0), 1, 2, int(3)),
        libc::SYS_statx => stat::statx(call),
        libc::SYS_fstat => stat::fstat(call, int(0), 1),
        libc::SYS_faccessat => stat::access(call, int(0), 1, int(2), 0),
        number::FACCESSAT2 => stat::access(call, int(0), 1, int(2), int(3)),
        libc::SYS_readlinkat => stat::readlink(call, int(0), 1, 2, int(3)),
        libc::SYS_getdents64 => listing::getdents(call, true),
        libc::SYS_chdir => enter::chdir(call),
        libc::SYS_getcwd => stat::getcwd(call),
        libc::SYS_inotify_add_watch => open::inotify_add_watch(call),
        libc::SYS_execve => enter::exec(call, FDCWD, 0, 0),
        libc::SYS_execveat => enter::exec(call, int(0), 1, int(4)),
        libc::SYS_mkdirat => names::mkdir(call, int(0), 1, call.arg(2) as u32),
        libc::SYS_unlinkat => names::unlinkat(call),
        libc::SYS_renameat => names::rename(call, (int(0), 1), (int(2), 3), 0),
        libc::SYS_renameat2 => names::rename(call, (int(0), 1), (int(2), 3), call.arg(4) as u32),
        libc::SYS_linkat => names::link(call, (int(0), 1), (int(2), 3), int(4)),
        libc::SYS_symlinkat => names::symlink(call, 0, int(1), 2),
        libc::SYS_mknodat => names::mknod(call, int(0), 1, call.arg(2) as u32, call.arg(3)),
        libc::SYS_fchmodat => attributes::chmod(call, int(0), 1, call.arg(2) as u32, 0),
        number::FCHMODAT2 => attributes::chmod(call, int(0), 1, call.arg(2) as u32, int(3)),
        libc::SYS_fchmod => attributes::fchmod(call),
        libc::SYS_fchownat => attributes::chown(call, int(0), 1, (call.arg(2), call.arg(3)), int(4)),
        libc::SYS_fchown => attributes::fchown(call),
        libc::SYS_utimensat => attributes::utimens(call),
        libc::SYS_truncate => attributes::truncate(call),
        libc::SYS_statfs => stat::statfs(call),
        libc::SYS_fstatfs => stat::fstatfs(call),
        libc::SYS_fsync | libc::SYS_fdatasync => open::fsync(call),
        libc::SYS_getxattr => attributes::getxattr(call, true),
        libc::SYS_lgetxattr => attributes::getxattr(call, false),
        libc::SYS_setxattr => attributes::setxattr(call, true),
        libc::SYS_lsetxattr => attributes::setxattr(call, false),
        libc::SYS_listxattr => attributes::listxattr(call, true),
        libc::SYS_llistxattr => attributes::listxattr(call, false),
        libc::SYS_removexattr => attributes::removexattr(call, true),
        libc::SYS_lremovexattr => attributes::removexattr(call, false),
        libc::SYS_fgetxattr | libc::SYS_fsetxattr | libc::SYS_flistxattr | libc::SYS_fremovexattr => {
            attributes::descriptor_xattr(call, number)
        }
        libc::SYS_name_to_handle_at => unsupported::outside_only(call, int(0), 1, "file handles", Errno::OPNOTSUPP),
        libc::SYS_open_by_handle_at => call.refuse("opening by file handle", Errno::PERM),
        number::SETXATTRAT | number::GETXATTRAT | number::LISTXATTRAT | number::REMOVEXATTRAT => {
            // Libraries fall back to the older calls.
            Err(Errno::NOSYS)
        }
        number::FILE_GETATTR | number::FILE_SETATTR => Err(Errno::NOSYS),
        libc::SYS_bind => unsupported::bind(call),
        libc::SYS_chroot => enter::chroot(call),
        libc::SYS_pivot_root => call.refuse("pivot_root (containers started inside)", Errno::PERM),
        // In other cases the source of the mount is not a path ("none", "tmpfs"), although it could be the name of
        // a file.
        libc::SYS_mount if call.arg(3) & (libc::MS_BIND | libc::MS_MOVE) == 0 => Ok(Answer::Continue),
        libc::SYS_mount => unsupported::outside_only(call, FDCWD, 0, "mounting the directory elsewhere", Errno::PERM),
        number::OPEN_TREE | number::MOVE_MOUNT | number::OPEN_TREE_ATTR => {
            unsupported::outside_only(call, int(0), 1, "mounting the directory elsewhere", Errno::PERM)
        }
        libc::SYS_acct | libc::SYS_swapon => unsupported::outside_only(call, FDCWD, 0, "acct and swapon", Errno::PERM),
        other => older(call, other),
    }
}

/// Calls that only x86 has.
#[cfg(target_arch = "x86_64")]
fn older(call: &Call<'_>, number: libc::c_long) -> Answered {
    let mode = |index| call.arg(index) as u32;
    match number {
        libc::SYS_open => open::open(call, FDCWD, 0, call.int(1), mode(2)),
        libc::SYS_creat => open::open(call, FDCWD, 0, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode(1)),
        libc::SYS_stat => stat::stat(call, FDCWD, 0, 1, 0),
        libc::SYS_lstat => stat::stat(call, FDCWD, 0, 1, libc::AT_SYMLINK_NOFOLLOW),
        libc::SYS_access => stat::access(call, FDCWD, 0, call.int(1), 0),
        libc::SYS_readlink => stat::readlink(call, FDCWD, 0, 1, call.int(2)),
        libc::SYS_getdents => listing::getdents(call, false),
        libc::SYS_mkdir => names::mkdir(call, FDCWD, 0, mode(1)),
        libc::SYS_rmdir => names::unlink(call, FDCWD, 0, true),
        libc::SYS_unlink => names::unlink(call, FDCWD, 0, false),
        libc::SYS_rename => names::rename(call, (FDCWD, 0), (FDCWD, 1), 0),
        libc::SYS_link => names::link(call, (FDCWD, 0), (FDCWD, 1), 0),
        libc::SYS_symlink => names::symlink(call, 0, FDCWD, 1),
        libc::SYS_mknod => names::mknod(call, FDCWD, 0, mode(1), call.arg(2)),
        libc::SYS_chmod => attributes::chmod(call, FDCWD, 0, mode(1), 0),
        libc::SYS_chown => attributes::chown(call, FDCWD, 0, (call.arg(1), call.arg(2)), 0),
        libc::SYS_lchown => attributes::chown(call, FDCWD, 0, (call.arg(1), call.arg(2)), libc::AT_SYMLINK_NOFOLLOW),
        libc::SYS_utime => attributes::utime(call),
        libc::SYS_utimes => attributes::utimes(call, FDCWD, 0, 1),
        libc::SYS_futimesat => attributes::utimes(call, call.int(0), 1, 2),
        libc::SYS_uselib => unsupported::outside_only(call, FDCWD, 0, "uselib", Errno::PERM),
        _ => Err(Errno::NOSYS),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn older(_call: &Call<'_>, _number: libc::c_long) -> Answered {
    Err(Errno::NOSYS)
}
