//! The filter: decides which system calls the agent sees.
//!
//! Calls that name a file, or query a descriptor's file, are trapped; reading, writing and mapping are not. The call's
//! number alone decides what is allowed, and the kernel caches that: an untrapped call costs nothing.

use std::mem::offset_of;

/// In a trapped call's sixth argument, which none of them uses: the preload shim marks calls that must pass unchanged.
pub const PASS: u64 = 0x5374_7261_6e6b_5365;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;
/// The bit in the number of an x32 call.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// Numbers that are the same on all architectures, and too new for the tables of some C libraries.
pub mod number {
    use libc::c_long;
    pub const IO_URING_SETUP: c_long = 425;
    pub const OPEN_TREE: c_long = 428;
    pub const MOVE_MOUNT: c_long = 429;
    pub const OPENAT2: c_long = 437;
    pub const FACCESSAT2: c_long = 439;
    pub const FCHMODAT2: c_long = 452;
    pub const SETXATTRAT: c_long = 463;
    pub const GETXATTRAT: c_long = 464;
    pub const LISTXATTRAT: c_long = 465;
    pub const REMOVEXATTRAT: c_long = 466;
    pub const OPEN_TREE_ATTR: c_long = 467;
    pub const FILE_GETATTR: c_long = 468;
    pub const FILE_SETATTR: c_long = 469;
}

const EVERYWHERE: [libc::c_long; 61] = [
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_faccessat,
    number::FACCESSAT2,
    libc::SYS_readlinkat,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_getdents64,
    libc::SYS_chdir,
    libc::SYS_getcwd,
    libc::SYS_inotify_add_watch,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_mknodat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    number::FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_truncate,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    number::OPENAT2,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    number::SETXATTRAT,
    number::GETXATTRAT,
    number::LISTXATTRAT,
    number::REMOVEXATTRAT,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_bind,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    number::OPEN_TREE,
    number::MOVE_MOUNT,
    number::OPEN_TREE_ATTR,
    number::FILE_GETATTR,
    number::FILE_SETATTR,
    libc::SYS_acct,
    libc::SYS_swapon,
    libc::SYS_renameat,
];

#[cfg(target_arch = "x86_64")]
const HERE: [libc::c_long; 21] = [
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_getdents,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_mknod,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_uselib,
];
#[cfg(target_arch = "aarch64")]
const HERE: [libc::c_long; 0] = [];

pub fn trapped() -> impl Iterator<Item = libc::c_long> {
    EVERYWHERE.into_iter().chain(HERE)
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;
const NO_SUCH_CALL: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

fn step(code: u16, yes: usize, no: usize, k: u32) -> libc::sock_filter {
    let jump = |to: usize| u8::try_from(to).unwrap_or(u8::MAX);
    libc::sock_filter { code, jt: jump(yes), jf: jump(no), k }
}

pub fn program() -> Vec<libc::sock_filter> {
    let sixth = (offset_of!(libc::seccomp_data, args) + 5 * 8) as u32;
    let mut steps = vec![
        step(LOAD, 0, 0, offset_of!(libc::seccomp_data, arch) as u32),
        // Another architecture's calls (32-bit programs) have other numbers: all are refused.
        step(EQUAL, 1, 0, ARCHITECTURE),
        step(RETURN, 0, 0, NO_SUCH_CALL),
        step(LOAD, 0, 0, offset_of!(libc::seccomp_data, nr) as u32),
    ];
    #[cfg(target_arch = "x86_64")]
    steps.extend([step(AT_LEAST, 0, 1, X32), step(RETURN, 0, 0, NO_SUCH_CALL)]);
    // A file that is opened through a ring passes no filter.
    steps.extend([step(EQUAL, 0, 1, number::IO_URING_SETUP as u32), step(RETURN, 0, 0, NO_SUCH_CALL)]);
    let trapped: Vec<_> = trapped().collect();
    for (index, number) in trapped.iter().enumerate() {
        // Jumps over the rest of the list and the ALLOW after it.
        steps.push(step(EQUAL, trapped.len() - index, 0, *number as u32));
    }
    steps.push(step(RETURN, 0, 0, ALLOW));
    steps.extend([
        step(LOAD, 0, 0, sixth),
        step(EQUAL, 0, 3, PASS as u32),
        step(LOAD, 0, 0, sixth + 4),
        step(EQUAL, 0, 1, (PASS >> 32) as u32),
        step(RETURN, 0, 0, ALLOW),
        step(RETURN, 0, 0, NOTIFY),
    ]);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The filter's verdict, evaluated as the kernel would.
    fn run(program: &[libc::sock_filter], number: u32, architecture: u32, sixth: u64) -> u32 {
        let mut data = [0_u8; 64];
        data[..4].copy_from_slice(&number.to_ne_bytes());
        data[4..8].copy_from_slice(&architecture.to_ne_bytes());
        data[56..].copy_from_slice(&sixth.to_ne_bytes());
        let (mut at, mut a) = (0, 0_u32);
        loop {
            let step = program[at];
            at += 1;
            let holds = match step.code {
                LOAD => {
                    let from = step.k as usize;
                    a = u32::from_ne_bytes([data[from], data[from + 1], data[from + 2], data[from + 3]]);
                    continue;
                }
                EQUAL => a == step.k,
                AT_LEAST => a >= step.k,
                RETURN => return step.k,
                other => panic!("{other}"),
            };
            at += usize::from(if holds { step.jt } else { step.jf });
        }
    }

    #[test]
    fn only_calls_that_name_a_file_are_trapped() {
        let program = program();
        assert!(program.len() < 255);
        for number in 0..500_u32 {
            let is_trapped = trapped().any(|one| one as u32 == number);
            let verdict = run(&program, number, ARCHITECTURE, 0);
            let expected = match number {
                425 => NO_SUCH_CALL,
                _ if is_trapped => NOTIFY,
                _ => ALLOW,
            };
            assert_eq!(verdict, expected, "{number}");
            if is_trapped {
                assert_eq!(run(&program, number, ARCHITECTURE, PASS), ALLOW);
                assert_eq!(run(&program, number, ARCHITECTURE, PASS ^ 1 << 40), NOTIFY);
            }
        }
        assert_eq!(run(&program, 5, 0x4000_0003, 0), NO_SUCH_CALL, "of 32 bits");
        #[cfg(target_arch = "x86_64")]
        assert_eq!(run(&program, X32 | 2, ARCHITECTURE, 0), NO_SUCH_CALL);
    }
}
