/* Calls that change the meaning of paths or the identity of this process: working directory, user, namespaces,
 * sandboxes, fork. Danger avoided: an answer from the index to a process without the permission, or about another tree.
 * Afterwards such a process leaves all calls to the mount; paths of absent mounts stay refused.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fts.h>
#include <ftw.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <unistd.h>

static int failed(int error)
{
    errno = error;
    return -1;
}

static int result_of(long raw)
{
    return st_sys_failed(raw) ? failed((int)-raw) : (int)raw;
}

/* ---- Working directory */

static void about_to_move(void)
{
    int pid;
    if (st_self(&pid) != ST_SELF_OWN)
        st_base_never(); /* perhaps the parent's memory, but not its working directory */
    st_base_moving();
}

ST_WRAP(int, chdir, const char *path)
{
    if (st_refused(AT_FDCWD, path))
        return -1;
    int (*next)(const char *) = ST_NEXT(chdir);
    bool watch = st_on(ST_ON_INDEX);
    if (watch)
        about_to_move();
    int result = next ? next(path) : result_of(st_sys(__NR_chdir, path));
    if (watch)
        st_base_moved();
    return result;
}

ST_WRAP(int, fchdir, int descriptor)
{
    int (*next)(int) = ST_NEXT(fchdir);
    bool watch = st_on(ST_ON_INDEX);
    if (watch)
        about_to_move();
    int result = next ? next(descriptor) : result_of(st_sys(__NR_fchdir, descriptor));
    if (watch)
        st_base_moved();
    return result;
}

/* Inside these functions libc calls chdir itself. */
#define NFTW(name)                                                                                      \
    ST_WRAP(int, name, const char *path, void *visit, int descriptors, int flags)                     \
    {                                                                                                   \
        if (st_refused(AT_FDCWD, path))                                                                 \
            return -1;                                                                                  \
        if (flags & FTW_CHDIR)                                                                          \
            st_base_never();                                                                            \
        int (*next)(const char *, void *, int, int) = ST_NEXT(name);                                  \
        return next ? next(path, visit, descriptors, flags) : failed(ENOSYS);                           \
    }
NFTW(nftw)
NFTW(nftw64)

#define FTS_OPEN(name)                                                                                  \
    ST_WRAP(FTS *, name, char *const *paths, int options, void *compare)                              \
    {                                                                                                   \
        for (char *const *path = paths; st_on(ST_ON_DEAD) && path && *path; path++)                     \
            if (st_refused(AT_FDCWD, *path))                                                            \
                return NULL;                                                                            \
        if (!(options & FTS_NOCHDIR))                                                                   \
            st_base_never();                                                                            \
        FTS *(*next)(char *const *, int, void *) = ST_NEXT(name);                                     \
        if (next)                                                                                       \
            return next(paths, options, compare);                                                       \
        errno = ENOSYS;                                                                                 \
        return NULL;                                                                                    \
    }
FTS_OPEN(fts_open)
FTS_OPEN(fts64_open)

/* ---- Children */

#define FORKS(name)                                                                                       \
    ST_WRAP(pid_t, name, void)                                                                            \
    {                                                                                                     \
        pid_t (*next)(void) = ST_NEXT(name);                                                              \
        st_streams_forking();                                                                             \
        pid_t child = next ? next() : failed(ENOSYS);                                                     \
        if (child == 0) {                                                                                 \
            st_base_forked(); /* before any fact is taken as this process's */                                        \
            st_self_forked();                                                                             \
            for (int which = 0; which < ST_COUNTS; which++)                                               \
                __atomic_store_n(&st_counts[which], 0, __ATOMIC_RELAXED); /* the parent reports its own */ \
            st_counts_forked();                                                                           \
        }                                                                                                 \
        return child;                                                                                     \
    }
FORKS(fork)
FORKS(__fork)

/* A fork and a chdir inside libc. */
ST_WRAP(int, daemon, int stay, int keep)
{
    int (*next)(int, int) = ST_NEXT(daemon);
    st_base_moving();
    int result = next ? next(stay, keep) : failed(ENOSYS);
    st_base_moved();
    st_base_forked();
    if (st_on(ST_ON_INDEX))
        st_self_forked();
    st_counts_forked();
    return result;
}

/* ---- Ends without destructors: recorded as ends. Unwritten data in streams is lost. */

#define ENDS(name)                                                        \
    __attribute__((noreturn)) ST_WRAP(void, name, int status)           \
    {                                                                     \
        void (*next)(int) = ST_NEXT(name);                              \
        st_counts_end(false);                                             \
        if (next)                                                         \
            next(status);                                                 \
        for (;;)                                                          \
            st_sys(__NR_exit_group, status);                              \
    }
ENDS(_exit)
ENDS(_Exit)
ENDS(quick_exit)

/* ---- Users and groups: a call that keeps the identity changes nothing. */

struct identity {
    int uid, gid;
};

static struct identity identity_now(void)
{
    return (struct identity){(int)st_sys(__NR_geteuid), (int)st_sys(__NR_getegid)};
}

static int after_identity(int result, struct identity before)
{
    struct identity now = identity_now();
    if (now.uid != before.uid || now.gid != before.gid)
        st_off(ST_ON_INDEX);
    return result;
}

#define LIST(...) __VA_ARGS__
#define SET_ID(name, TYPES, PARAMETERS, ARGUMENTS)                                                          \
    ST_WRAP(int, name, PARAMETERS)                                                                        \
    {                                                                                                       \
        int (*next)(TYPES) = ST_NEXT(name);                                                               \
        if (!next)                                                                                          \
            return failed(ENOSYS);                                                                          \
        if (!st_on(ST_ON_INDEX)) {                                                                          \
            st_anchor_end(); /* a vfork child may have ended the rest */                                    \
            return next(ARGUMENTS);                                                                         \
        }                                                                                                   \
        struct identity before = identity_now();                                                            \
        return after_identity(next(ARGUMENTS), before);                                                     \
    }
SET_ID(setuid, LIST(uid_t), LIST(uid_t a), LIST(a))
SET_ID(setgid, LIST(gid_t), LIST(gid_t a), LIST(a))
SET_ID(seteuid, LIST(uid_t), LIST(uid_t a), LIST(a))
SET_ID(setegid, LIST(gid_t), LIST(gid_t a), LIST(a))
SET_ID(setreuid, LIST(uid_t, uid_t), LIST(uid_t a, uid_t b), LIST(a, b))
SET_ID(setregid, LIST(gid_t, gid_t), LIST(gid_t a, gid_t b), LIST(a, b))
SET_ID(setresuid, LIST(uid_t, uid_t, uid_t), LIST(uid_t a, uid_t b, uid_t c), LIST(a, b, c))
SET_ID(setresgid, LIST(gid_t, gid_t, gid_t), LIST(gid_t a, gid_t b, gid_t c), LIST(a, b, c))

/* These functions do not report whether anything changed. */
#define GIVES_UP(name, condition, bits, TYPES, PARAMETERS, ARGUMENTS)                                       \
    ST_WRAP(int, name, PARAMETERS)                                                                        \
    {                                                                                                       \
        int (*next)(TYPES) = ST_NEXT(name);                                                               \
        int result = next ? next(ARGUMENTS) : failed(ENOSYS);                                               \
        if (condition)                                                                                      \
            st_off(bits);                                                                                   \
        return result;                                                                                      \
    }
GIVES_UP(setfsuid, (uid_t)result != a && a != (uid_t)-1, ST_ON_INDEX, LIST(uid_t), LIST(uid_t a), LIST(a))
GIVES_UP(setfsgid, (gid_t)result != a && a != (gid_t)-1, ST_ON_INDEX, LIST(gid_t), LIST(gid_t a), LIST(a))
GIVES_UP(setgroups, result == 0, ST_ON_INDEX, LIST(size_t, const gid_t *), LIST(size_t a, const gid_t *b), LIST(a, b))
GIVES_UP(initgroups, result == 0, ST_ON_INDEX, LIST(const char *, gid_t), LIST(const char *a, gid_t b), LIST(a, b))
GIVES_UP(capset, result == 0, ST_ON_INDEX, LIST(void *, const void *), LIST(void *a, const void *b), LIST(a, b))
ST_WRAP(int, unshare, int flags)
{
    int (*next)(int) = ST_NEXT(unshare);
    if (flags & CLONE_FILES)
        st_base_never(); /* this thread's descriptors differ from its neighbours' */
    int result = next ? next(flags) : result_of(st_sys(__NR_unshare, flags));
    if (result == 0 && (flags & ~(CLONE_FILES | CLONE_SYSVSEM)))
        st_off(ST_ON_INDEX | ST_ON_PATHS);
    return result;
}
GIVES_UP(setns, result == 0, ST_ON_INDEX | ST_ON_PATHS, LIST(int, int), LIST(int a, int b), LIST(a, b))

ST_WRAP(int, chroot, const char *path)
{
    if (st_refused(AT_FDCWD, path))
        return -1;
    int (*next)(const char *) = ST_NEXT(chroot);
    int result = next ? next(path) : result_of(st_sys(__NR_chroot, path));
    if (result == 0)
        st_off(ST_ON_INDEX | ST_ON_PATHS);
    return result;
}

/* Sandboxes (seccomp, Landlock) begin with one of these; their lists may forbid the shim's system calls. */
ST_WRAP(int, prctl, int option, ...)
{
    va_list arguments;
    va_start(arguments, option);
    unsigned long a = va_arg(arguments, unsigned long), b = va_arg(arguments, unsigned long);
    unsigned long c = va_arg(arguments, unsigned long), d = va_arg(arguments, unsigned long);
    va_end(arguments);
    if (option == PR_SET_SECCOMP || option == PR_SET_NO_NEW_PRIVS)
        st_off(ST_ON_INDEX | ST_ON_PATHS);
    int (*next)(int, ...) = ST_NEXT(prctl);
    return next ? next(option, a, b, c, d) : result_of(st_sys(__NR_prctl, option, a, b, c, d));
}
