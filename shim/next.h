/* The next functions: every libc function that the shim wraps, by name (catalogue.md gives the reasons). */
#ifndef SURGETANK_NEXT_H
#define SURGETANK_NEXT_H

#define ST_NEXTS(X)                                                                                                      \
    X(open) X(open64) X(__open) X(__open64) X(__open_2) X(__open64_2) X(openat) X(openat64) X(__openat_2)              \
    X(__openat64_2) X(creat) X(creat64) X(fopen) X(fopen64) X(freopen) X(freopen64) X(fdopen)                           \
    X(stat) X(stat64) X(lstat) X(lstat64) X(fstat) X(fstat64) X(fstatat) X(fstatat64) X(statx)                          \
    X(__xstat) X(__xstat64) X(__lxstat) X(__lxstat64) X(__fxstat) X(__fxstat64) X(__fxstatat) X(__fxstatat64)           \
    X(access) X(faccessat) X(eaccess) X(euidaccess) X(copy_file_range)                                                                    \
    X(fchmod) X(fchown) X(futimens) X(futimes) X(utimensat) X(futimesat) X(fsync) X(fdatasync) X(msync)                 \
    X(fstatfs) X(fstatfs64) X(fstatvfs) X(fstatvfs64) X(fgetxattr) X(fsetxattr) X(flistxattr) X(fremovexattr)           \
    X(readlink) X(readlinkat) X(__readlink_chk) X(__readlinkat_chk) X(linkat) X(fexecve) X(execveat)                    \
    X(_exit) X(_Exit) X(quick_exit)                                                                                      \
    X(chdir) X(fchdir) X(umask) X(fork) X(__fork) X(vfork) X(clone) X(__clone) X(syscall) X(daemon) X(unshare) X(setns) X(chroot) X(prctl) X(capset)           \
    X(setuid) X(setgid) X(seteuid) X(setegid) X(setreuid) X(setregid) X(setresuid) X(setresgid) X(setfsuid)             \
    X(setfsgid) X(setgroups) X(initgroups) X(nftw) X(nftw64) X(fts_open) X(fts64_open)                                   \
    X(execve) X(execv) X(execvp) X(execvpe) X(posix_spawn) X(posix_spawnp)                                               \
    X(posix_spawn_file_actions_addopen) X(posix_spawn_file_actions_addchdir_np) X(posix_spawn_file_actions_addchdir)    \
    X(opendir) X(closedir) X(scandir) X(scandir64) X(scandirat) X(scandirat64) X(ftw) X(ftw64) X(glob) X(glob64)                    \
    X(mkstemp) X(mkstemp64) X(mkostemp) X(mkostemp64) X(mkstemps) X(mkstemps64) X(mkostemps) X(mkostemps64)             \
    X(mkdtemp) X(tmpfile) X(tmpfile64) X(setmntent)                                                                      \
    X(chmod) X(lchmod) X(fchmodat) X(chown) X(lchown) X(fchownat) X(utime) X(utimes) X(lutimes)                         \
    X(link) X(symlink) X(symlinkat) X(unlink) X(unlinkat) X(remove) X(rename) X(renameat) X(renameat2)                  \
    X(mkdir) X(mkdirat) X(rmdir) X(mknod) X(mknodat) X(__xmknod) X(__xmknodat) X(mkfifo) X(mkfifoat)                    \
    X(truncate) X(truncate64) X(realpath) X(__realpath_chk) X(canonicalize_file_name)                                    \
    X(statfs) X(statfs64) X(statvfs) X(statvfs64) X(pathconf) X(ftok)                                                    \
    X(getxattr) X(lgetxattr) X(setxattr) X(lsetxattr) X(listxattr) X(llistxattr) X(removexattr) X(lremovexattr)         \
    X(read) X(__read) X(write) X(__write) X(pread) X(pread64) X(__pread64) X(pwrite) X(pwrite64) X(__pwrite64)           \
    X(__read_chk) X(__pread_chk) X(__pread64_chk) X(readv) X(writev) X(preadv) X(preadv64) X(pwritev) X(pwritev64)      \
    X(preadv2) X(preadv64v2) X(pwritev2) X(pwritev64v2) X(sendfile) X(sendfile64) X(splice) X(mmap) X(mmap64)           \
    X(close) X(__close) X(close_range) X(closefrom) X(dup2) X(__dup2) X(dup3) X(lseek) X(lseek64)                                  \
    X(wait) X(waitpid) X(wait3) X(wait4) X(system) X(fclose) X(fseek) X(fseeko) X(fseeko64) X(fsetpos) X(fsetpos64) X(rewind)                                           \
    X(dup) X(fcntl) X(fcntl64) X(__fcntl) X(socket) X(socketpair) X(accept) X(accept4) X(pipe) X(pipe2)                 \
    X(epoll_create) X(epoll_create1) X(eventfd) X(memfd_create) X(timerfd_create) X(signalfd) X(inotify_init)           \
    X(inotify_init1) X(inotify_add_watch) X(fanotify_mark) X(name_to_handle_at) X(bind) X(connect)

enum st_next_number {
#define ST_NEXT_NUMBER(name) ST_N_##name,
    ST_NEXTS(ST_NEXT_NUMBER)
#undef ST_NEXT_NUMBER
    ST_NEXT_COUNT
};

#define ST_NEXT_NOBODY ((void *)1) /* searched and not found */

extern void *st_next_found[ST_NEXT_COUNT];
void *st_next_search(enum st_next_number which);

/* The next function of that name, or NULL. */
static inline void *st_next(enum st_next_number which)
{
    void *found = __atomic_load_n(&st_next_found[which], __ATOMIC_RELAXED);
    if (__builtin_expect(found > ST_NEXT_NOBODY, 1))
        return found;
    return found ? (void *)0 : st_next_search(which);
}
#define ST_NEXT(name) st_next(ST_N_##name)

#endif
