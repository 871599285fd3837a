/* The other functions that take a path: the mount serves them. The shim wraps them for two reasons. It must refuse them
 * on an absent mount, and it must replace a link to a descriptor (/proc/self/fd/N) by the file's path below the mount.
 * Danger avoided: a function without a wrapper writes into the bare directory.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <glob.h>
#include <mntent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ipc.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <utime.h>

struct statvfs;

#define LIST(...) __VA_ARGS__

static long unknown(void)
{
    errno = ENOSYS;
    return -1;
}

/* `failure` is the function's return value on failure. */
#define PATH_CALL(result, failure, name, TYPES, PARAMETERS, ARGUMENTS, dirfd, path) \
    ST_WRAP(result, name, PARAMETERS)                                             \
    {                                                                               \
        if (st_refused(dirfd, path))                                                \
            return failure;                                                         \
        result (*next)(TYPES) = ST_NEXT(name);                                    \
        if (next)                                                                   \
            return next(ARGUMENTS);                                                 \
        unknown();                                                                  \
        return failure;                                                             \
    }

#define FOLLOW_CALL(result, failure, name, TYPES, PARAMETERS, ARGUMENTS, dirfd, path) \
    ST_WRAP(result, name, PARAMETERS)                                               \
    {                                                                                 \
        char text[ST_TEXT];                                                           \
        path = st_through(path, text);                                                \
        if (st_refused(dirfd, path))                                                  \
            return failure;                                                           \
        result (*next)(TYPES) = ST_NEXT(name);                                      \
        if (next)                                                                     \
            return next(ARGUMENTS);                                                   \
        unknown();                                                                    \
        return failure;                                                               \
    }

/* One path, from the working directory, and one more argument. */
#define FOLLOW1(name, type) \
    FOLLOW_CALL(int, -1, name, LIST(const char *, type), LIST(const char *path, type a), LIST(path, a), AT_FDCWD, path)
#define PATH0(name) PATH_CALL(int, -1, name, LIST(const char *), LIST(const char *path), LIST(path), AT_FDCWD, path)
#define PATH1(name, type) \
    PATH_CALL(int, -1, name, LIST(const char *, type), LIST(const char *path, type a), LIST(path, a), AT_FDCWD, path)
#define PATH2(name, type, type2)                                                                                   \
    PATH_CALL(int, -1, name, LIST(const char *, type, type2), LIST(const char *path, type a, type2 b), LIST(path, a, b), \
              AT_FDCWD, path)

/* Attributes */
FOLLOW1(chmod, mode_t)
PATH1(lchmod, mode_t)
FOLLOW_CALL(int, -1, chown, LIST(const char *, uid_t, gid_t), LIST(const char *path, uid_t a, gid_t b), LIST(path, a, b),
            AT_FDCWD, path)
PATH2(lchown, uid_t, gid_t)
#define TIMES(name, type, nano)                                                              \
    ST_WRAP(int, name, const char *path, type times)                                         \
    {                                                                                        \
        char text[ST_TEXT];                                                                  \
        path = st_through(path, text);                                                       \
        if (st_refused(AT_FDCWD, path))                                                      \
            return -1;                                                                       \
        struct timespec both[2];                                                             \
        bool good = !times || nano(times, both);                                             \
        int result = good ? st_change_times(AT_FDCWD, path, times ? both : NULL) : ST_PASS;  \
        if (result != ST_PASS)                                                               \
            return result;                                                                   \
        int (*next)(const char *, type) = ST_NEXT(name);                                     \
        return next ? next(path, times) : (int)unknown();                                    \
    }
static inline bool of_seconds(const struct utimbuf *times, struct timespec both[2])
{
    if (!st_readable(times, sizeof *times))
        return false;
    both[0] = (struct timespec){times->actime, 0};
    both[1] = (struct timespec){times->modtime, 0};
    return true;
}
static inline bool of_micros(const struct timeval times[2], struct timespec both[2])
{
    if (!st_readable(times, 2 * sizeof *times))
        return false;
    for (int at = 0; at < 2; at++) {
        if (times[at].tv_usec < 0 || times[at].tv_usec >= 1000000)
            return false;
        both[at] = (struct timespec){times[at].tv_sec, times[at].tv_usec * 1000};
    }
    return true;
}
TIMES(utime, const struct utimbuf *, of_seconds)
TIMES(utimes, const struct timeval *, of_micros)
PATH1(lutimes, const struct timeval *)
FOLLOW1(truncate, off_t)
FOLLOW1(truncate64, off_t)
FOLLOW1(statfs, struct statfs *)
FOLLOW1(statfs64, struct statfs *)
FOLLOW1(statvfs, struct statvfs *)
FOLLOW1(statvfs64, struct statvfs *)
FOLLOW_CALL(long, -1, pathconf, LIST(const char *, int), LIST(const char *path, int a), LIST(path, a), AT_FDCWD, path)
FOLLOW_CALL(key_t, -1, ftok, LIST(const char *, int), LIST(const char *path, int a), LIST(path, a), AT_FDCWD, path)

ST_WRAP(int, fchmodat, int dirfd, const char *path, mode_t mode, int flags)
{
    char text[ST_TEXT];
    path = flags & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);
    if (st_refused(dirfd, path))
        return -1;
    int (*next)(int, const char *, mode_t, int) = ST_NEXT(fchmodat);
    return next ? next(dirfd, path, mode, flags) : (int)unknown();
}

FOLLOW_CALL(ssize_t, -1, listxattr, LIST(const char *, char *, size_t), LIST(const char *path, char *a, size_t b),
            LIST(path, a, b), AT_FDCWD, path)
PATH_CALL(ssize_t, -1, llistxattr, LIST(const char *, char *, size_t), LIST(const char *path, char *a, size_t b),
          LIST(path, a, b), AT_FDCWD, path)
FOLLOW1(removexattr, const char *)
PATH1(lremovexattr, const char *)

/* Names. A program that recreates a file removes it first, to be sure (git). If the index says that the file is
 * missing, the shim does not ask the mount.
 */
static bool is_missing(int dirfd, const char *path)
{
    struct st_place place;
    if (!st_begin(&place, dirfd, st_path(path)))
        return false;
    enum st_found found = st_find(&place);
    return found == ST_MISSING || found == ST_NOWHERE;
}

#define REMOVAL(name, TYPES, PARAMETERS, ARGUMENTS, dirfd, known)                \
    ST_WRAP(int, name, PARAMETERS)                                               \
    {                                                                            \
        if (st_refused(dirfd, path))                                             \
            return -1;                                                           \
        int (*next)(TYPES) = ST_NEXT(name);                                      \
        bool missing = (known) && is_missing(dirfd, path);                       \
        if (next && !missing)                                                    \
            return next(ARGUMENTS);                                              \
        errno = missing ? ENOENT : ENOSYS;                                       \
        return -1;                                                               \
    }
REMOVAL(unlink, LIST(const char *), LIST(const char *path), LIST(path), AT_FDCWD, true)
REMOVAL(rmdir, LIST(const char *), LIST(const char *path), LIST(path), AT_FDCWD, true)
REMOVAL(remove, LIST(const char *), LIST(const char *path), LIST(path), AT_FDCWD, true)
REMOVAL(unlinkat, LIST(int, const char *, int), LIST(int dirfd, const char *path, int flags), LIST(dirfd, path, flags), dirfd,
        !(flags & ~AT_REMOVEDIR))
PATH1(mkdir, mode_t)
PATH1(mkfifo, mode_t)
PATH_CALL(int, -1, mkdirat, LIST(int, const char *, mode_t), LIST(int dirfd, const char *path, mode_t a),
          LIST(dirfd, path, a), dirfd, path)
PATH_CALL(int, -1, mkfifoat, LIST(int, const char *, mode_t), LIST(int dirfd, const char *path, mode_t a),
          LIST(dirfd, path, a), dirfd, path)
PATH_CALL(int, -1, __xmknod, LIST(int, const char *, mode_t, dev_t *), LIST(int a, const char *path, mode_t b, dev_t *c),
          LIST(a, path, b, c), AT_FDCWD, path)
PATH_CALL(int, -1, __xmknodat, LIST(int, int, const char *, mode_t, dev_t *),
          LIST(int a, int dirfd, const char *path, mode_t b, dev_t *c), LIST(a, dirfd, path, b, c), dirfd, path)
PATH_CALL(int, -1, symlinkat, LIST(const char *, int, const char *), LIST(const char *a, int dirfd, const char *path),
          LIST(a, dirfd, path), dirfd, path)
PATH_CALL(int, -1, symlink, LIST(const char *, const char *), LIST(const char *a, const char *path), LIST(a, path),
          AT_FDCWD, path)

/* Before glibc 2.33 these were not functions of libc.so. */
ST_WRAP(int, mknodat, int dirfd, const char *path, mode_t mode, dev_t device)
{
    if (st_refused(dirfd, path))
        return -1;
    int (*next)(int, const char *, mode_t, dev_t) = ST_NEXT(mknodat);
    if (next)
        return next(dirfd, path, mode, device);
    long result = st_sys(__NR_mknodat, dirfd, path, mode, (unsigned)device);
    return st_sys_failed(result) ? (errno = (int)-result, -1) : 0;
}

ST_WRAP(int, mknod, const char *path, mode_t mode, dev_t device)
{
    int (*next)(const char *, mode_t, dev_t) = ST_NEXT(mknod);
    if (st_refused(AT_FDCWD, path))
        return -1;
    return next ? next(path, mode, device) : st_wrap_mknodat(AT_FDCWD, path, mode, device);
}

ST_WRAP(int, link, const char *path, const char *to)
{
    if (st_refused(AT_FDCWD, path) || st_refused(AT_FDCWD, to))
        return -1;
    int (*next)(const char *, const char *) = ST_NEXT(link);
    return next ? next(path, to) : (int)unknown();
}

ST_WRAP(int, rename, const char *path, const char *to)
{
    if (st_refused(AT_FDCWD, path) || st_refused(AT_FDCWD, to))
        return -1;
    int (*next)(const char *, const char *) = ST_NEXT(rename);
    return next ? next(path, to) : (int)unknown();
}

ST_WRAP(int, renameat, int dirfd, const char *path, int to_dirfd, const char *to)
{
    if (st_refused(dirfd, path) || st_refused(to_dirfd, to))
        return -1;
    int (*next)(int, const char *, int, const char *) = ST_NEXT(renameat);
    return next ? next(dirfd, path, to_dirfd, to) : (int)unknown();
}

ST_WRAP(int, renameat2, int dirfd, const char *path, int to_dirfd, const char *to, unsigned flags)
{
    if (st_refused(dirfd, path) || st_refused(to_dirfd, to))
        return -1;
    int (*next)(int, const char *, int, const char *, unsigned) = ST_NEXT(renameat2);
    if (next)
        return next(dirfd, path, to_dirfd, to, flags);
    long result = st_sys(__NR_renameat2, dirfd, path, to_dirfd, to, flags);
    return st_sys_failed(result) ? (errno = (int)-result, -1) : 0;
}

/* Directories, trees, patterns. A directory's descriptor is a new one. */
ST_WRAP(DIR *, opendir, const char *path)
{
    if (st_refused(AT_FDCWD, path))
        return NULL;
    DIR *(*next)(const char *) = ST_NEXT(opendir);
    DIR *opened = next ? next(path) : (unknown(), NULL);
    if (opened && st_on(ST_ON_INDEX))
        st_fresh(dirfd(opened));
    return opened;
}

ST_WRAP(int, closedir, DIR *directory)
{
    int (*next)(DIR *) = ST_NEXT(closedir);
    if (directory)
        st_kind_forget(dirfd(directory));
    return next ? next(directory) : (int)unknown();
}

#define SCANDIR(name)                                                                                                \
    PATH_CALL(int, -1, name, LIST(const char *, void *, void *, void *), LIST(const char *path, void *a, void *b, void *c), \
              LIST(path, a, b, c), AT_FDCWD, path)
#define SCANDIRAT(name)                                                                   \
    PATH_CALL(int, -1, name, LIST(int, const char *, void *, void *, void *),             \
              LIST(int dirfd, const char *path, void *a, void *b, void *c), LIST(dirfd, path, a, b, c), dirfd, path)
SCANDIR(scandir)
SCANDIR(scandir64)
SCANDIRAT(scandirat)
SCANDIRAT(scandirat64)
PATH2(ftw, void *, int)
PATH2(ftw64, void *, int)
#define GLOB(name)                                                                                                      \
    PATH_CALL(int, GLOB_ABORTED, name, LIST(const char *, int, void *, void *), LIST(const char *path, int a, void *b, void *c), \
              LIST(path, a, b, c), AT_FDCWD, path)
GLOB(glob)
GLOB(glob64)

/* Temporary files */
#define TEMPORARY(name, TYPES, PARAMETERS, ARGUMENTS)                 \
    ST_WRAP(int, name, char *path PARAMETERS)                       \
    {                                                                 \
        if (st_refused(AT_FDCWD, path))                               \
            return -1;                                                \
        int (*next)(char *TYPES) = ST_NEXT(name);                   \
        return next ? st_fresh(next(path ARGUMENTS)) : (int)unknown(); \
    }
#define AND(...) , __VA_ARGS__
TEMPORARY(mkstemp, , , )
TEMPORARY(mkstemp64, , , )
TEMPORARY(mkostemp, AND(int), AND(int a), AND(a))
TEMPORARY(mkostemp64, AND(int), AND(int a), AND(a))
TEMPORARY(mkstemps, AND(int), AND(int a), AND(a))
TEMPORARY(mkstemps64, AND(int), AND(int a), AND(a))
TEMPORARY(mkostemps, AND(int, int), AND(int a, int b), AND(a, b))
TEMPORARY(mkostemps64, AND(int, int), AND(int a, int b), AND(a, b))
PATH_CALL(char *, NULL, mkdtemp, LIST(char *), LIST(char *path), LIST(path), AT_FDCWD, path)
PATH_CALL(FILE *, NULL, tmpfile, LIST(void), LIST(void), LIST(), AT_FDCWD, P_tmpdir)
PATH_CALL(FILE *, NULL, tmpfile64, LIST(void), LIST(void), LIST(), AT_FDCWD, P_tmpdir)

/* Streams: libc reopens an existing stream on the mount, and its number means another file. */
#define REOPENS(name)                                                               \
    ST_WRAP(FILE *, name, const char *path, const char *mode, FILE *stream)       \
    {                                                                               \
        char text[ST_TEXT];                                                         \
        path = st_through(path, text);                                              \
        if (st_refused(AT_FDCWD, path))                                             \
            return NULL;                                                            \
        FILE *(*next)(const char *, const char *, FILE *) = ST_NEXT(name);        \
        st_stream_closing(stream);                                                  \
        FILE *opened = next ? next(path, mode, stream) : (unknown(), NULL);         \
        if (opened && st_counting)                                                  \
            st_stream_opened(opened, fileno(opened));                               \
        return opened;                                                              \
    }
REOPENS(freopen)
REOPENS(freopen64)
PATH_CALL(FILE *, NULL, setmntent, LIST(const char *, const char *), LIST(const char *path, const char *a), LIST(path, a),
          AT_FDCWD, path)

/* Paths built from paths */
FOLLOW_CALL(char *, NULL, realpath, LIST(const char *, char *), LIST(const char *path, char *a), LIST(path, a), AT_FDCWD,
            path)
FOLLOW_CALL(char *, NULL, __realpath_chk, LIST(const char *, char *, size_t), LIST(const char *path, char *a, size_t b),
            LIST(path, a, b), AT_FDCWD, path)
FOLLOW_CALL(char *, NULL, canonicalize_file_name, LIST(const char *), LIST(const char *path), LIST(path), AT_FDCWD, path)

/* Watching */
FOLLOW_CALL(int, -1, inotify_add_watch, LIST(int, const char *, uint32_t), LIST(int a, const char *path, uint32_t b),
            LIST(a, path, b), AT_FDCWD, path)
PATH_CALL(int, -1, fanotify_mark, LIST(int, unsigned, uint64_t, int, const char *),
          LIST(int a, unsigned b, uint64_t c, int dirfd, const char *path), LIST(a, b, c, dirfd, path), dirfd, path)
PATH_CALL(int, -1, name_to_handle_at, LIST(int, const char *, void *, int *, int),
          LIST(int dirfd, const char *path, void *a, int *b, int c), LIST(dirfd, path, a, b, c), dirfd, path)

/* Sockets with a path: bind creates a file. */
static bool socket_refused(const struct sockaddr *address, socklen_t bytes)
{
    struct sockaddr_un copy;
    char path[sizeof copy.sun_path + 1];
    if (!st_on(ST_ON_DEAD) || bytes <= offsetof(struct sockaddr_un, sun_path) ||
        bytes > sizeof copy || !st_readable(address, bytes) || address->sa_family != AF_UNIX)
        return false;
    size_t room = bytes - offsetof(struct sockaddr_un, sun_path);
    for (size_t at = 0; at < room; at++)
        path[at] = ((const struct sockaddr_un *)(const void *)address)->sun_path[at];
    path[room] = 0;
    return st_refused(AT_FDCWD, path);
}

#define SOCKET_CALL(name)                                                                          \
    ST_WRAP(int, name, int descriptor, const struct sockaddr *address, socklen_t bytes)          \
    {                                                                                              \
        if (socket_refused(address, bytes))                                                        \
            return -1;                                                                             \
        int (*next)(int, const struct sockaddr *, socklen_t) = ST_NEXT(name);                    \
        return next ? next(descriptor, address, bytes) : (int)unknown();                           \
    }
SOCKET_CALL(bind)
SOCKET_CALL(connect)
