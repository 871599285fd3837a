/* The stat family and checks of existence. Paths are answered from the index; descriptors of plain files are shown as
 * the mount's files. Danger avoided: two identities of one file; tar, cp -a, git, rsync and tail -F compare (st_dev,
 * st_ino) of path and descriptor.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES 4096

static int failed(int error)
{
    errno = error;
    return -1;
}

static bool later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec != b->tv_sec ? a->tv_sec > b->tv_sec : a->tv_nsec > b->tv_nsec;
}

static void put_identity(const struct st_domain *domain, const struct st_record *record, struct stat *out)
{
    out->st_dev = domain->index->mount_dev;
    out->st_ino = record->ino;
    out->st_mode = record->mode;
    out->st_uid = record->uid;
    out->st_gid = record->gid;
    out->st_nlink = record->nlink;
    out->st_blksize = BLOCK_BYTES;
}

static void put_times(const struct st_record *record, struct stat *out)
{
    out->st_atim = (struct timespec){record->atime_s, record->atime_ns};
    out->st_mtim = (struct timespec){record->mtime_s, record->mtime_ns};
    out->st_ctim = (struct timespec){record->ctime_s, record->ctime_ns};
}

/* Changes `out` from the plain file's attributes to the mount's. */
static void put_over(const struct st_domain *domain, const struct st_record *record, struct stat *out)
{
    struct timespec changed = {record->ctime_s, record->ctime_ns};
    mode_t plain = out->st_mode & 0777;
    put_identity(domain, record, out);
    if ((record->flags & ST_FRESH) && (record->mode & 07600) == 0600)
        out->st_mode = (record->mode & ~0777u) | plain;
    else if ((record->flags & ST_FRESH) && !(record->mode & 07000) && (plain & 0600) == 0600)
        out->st_mode = (record->mode & ~0177u) | (plain & 0177); /* (every plain file has the owner's rights) */
    if (!(record->flags & ST_LIVE))
        put_times(record, out);
    else if (later(&changed, &out->st_ctim))
        out->st_ctim = changed;
}

void st_identify(int descriptor, struct stat *out)
{
    struct st_diverted diverted;
    if (st_likely(!st_on(ST_ON_IDENTITY)))
        return;
    if (st_diverted_as(descriptor, out, &diverted))
        put_over(diverted.domain, &diverted.record, out);
}

static bool stat_plain(struct st_place *place, struct stat *out)
{
    char text[ST_TEXT];
    struct st_anchor anchor;
    if (!(place->record.flags & ST_RESIDENT))
        return false;
    if (st_anchor_of(place, &anchor) &&
        !st_sys_failed(st_sys(__NR_newfstatat, anchor.number, anchor.name, out, AT_SYMLINK_NOFOLLOW, 0, ST_OWN_CALL)) &&
        out->st_ino == place->record.backing_ino && st_anchor_still(place, &anchor))
        return st_still(place);
    const char *path = st_plain_path(place, text);
    return path && !st_sys_failed(st_sys(__NR_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW, 0, ST_OWN_CALL)) &&
           out->st_ino == place->record.backing_ino && st_still(place);
}

/* 0, -1 with errno, or ST_PASS. */
__attribute__((noinline)) static int stat_inside(struct st_place *place, struct stat *out, bool follow)
{
    const struct st_record *record = &place->record;
    switch (st_find(place)) {
    case ST_MISSING:
    case ST_NOWHERE:
        return failed(ENOENT);
    case ST_FOUND:
        break;
    default:
        return ST_PASS;
    }
    if (follow && S_ISLNK(record->mode))
        return ST_PASS;
    if (st_unlikely(record->flags & ST_DELEGATED) &&
        (st_delegated_any_in(place->from.domain, record->id) || !st_still(place)))
        return ST_PASS; /* its times are those of the last creation in it */
    if (record->flags & ST_LIVE) {
        if (!stat_plain(place, out))
            return ST_PASS;
        put_over(place->from.domain, record, out);
        return 0;
    }
    memset(out, 0, sizeof *out);
    put_identity(place->from.domain, record, out);
    put_times(record, out);
    out->st_rdev = record->rdev;
    out->st_size = (off_t)record->size_bytes;
    out->st_blocks = (blkcnt_t)record->blocks;
    return 0;
}

static int stat_path(int dirfd, const char *path, struct stat *out, bool follow)
{
    struct st_place place;
    if (st_refused(dirfd, path))
        return -1;
    if (!st_begin(&place, dirfd, path))
        return ST_PASS;
    int result = st_writable(out, sizeof *out) ? stat_inside(&place, out, follow) : ST_PASS;
    st_count(result == ST_PASS ? ST_STAT_LEFT : ST_STAT_INDEX);
    return result;
}

/* "" with AT_EMPTY_PATH is the descriptor itself. */
static bool names_descriptor(const char *path, int flags)
{
    return (flags & AT_EMPTY_PATH) && ((uintptr_t)path < ST_MEMORY_MIN ? !path : !*path);
}

static int raw_stat(int dirfd, const char *path, struct stat *out, int flags)
{
    long result = st_sys(__NR_newfstatat, dirfd, path, out, flags);
    return st_sys_failed(result) ? failed((int)-result) : 0;
}

static int identified(int descriptor, int result, struct stat *out)
{
    if (result == 0)
        st_identify(descriptor, out);
    return result;
}

#define PATH_STAT(name, flags)                                                                          \
    ST_WRAP(int, name, const char *path, struct stat *out)                                            \
    {                                                                                                   \
        char text[ST_TEXT];                                                                             \
        path = (flags) & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);                  \
        int result = stat_path(AT_FDCWD, path, out, !((flags) & AT_SYMLINK_NOFOLLOW));                  \
        if (result != ST_PASS)                                                                          \
            return result;                                                                              \
        int (*next)(const char *, struct stat *) = ST_NEXT(name);                                     \
        return next ? next(path, out) : raw_stat(AT_FDCWD, path, out, flags);                           \
    }
PATH_STAT(stat, 0)
PATH_STAT(stat64, 0)
PATH_STAT(lstat, AT_SYMLINK_NOFOLLOW)
PATH_STAT(lstat64, AT_SYMLINK_NOFOLLOW)

/* The versioned functions: 0 is the kernel's structure, 1 is x86_64's, and both are `struct stat`. */
#define PATH_XSTAT(name, flags)                                                                         \
    ST_WRAP(int, name, int version, const char *path, struct stat *out)                               \
    {                                                                                                   \
        char text[ST_TEXT];                                                                             \
        path = (flags) & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);                  \
        int result = (unsigned)version > 1                                                              \
                         ? ST_PASS                                                                      \
                         : stat_path(AT_FDCWD, path, out, !((flags) & AT_SYMLINK_NOFOLLOW));            \
        if (result != ST_PASS)                                                                          \
            return result;                                                                              \
        int (*next)(int, const char *, struct stat *) = ST_NEXT(name);                                \
        return next ? next(version, path, out) : raw_stat(AT_FDCWD, path, out, flags);                  \
    }
PATH_XSTAT(__xstat, 0)
PATH_XSTAT(__xstat64, 0)
PATH_XSTAT(__lxstat, AT_SYMLINK_NOFOLLOW)
PATH_XSTAT(__lxstat64, AT_SYMLINK_NOFOLLOW)

#define DESCRIPTOR_STAT(name)                                                                           \
    ST_WRAP(int, name, int descriptor, struct stat *out)                                              \
    {                                                                                                   \
        int (*next)(int, struct stat *) = ST_NEXT(name);                                              \
        return identified(descriptor, next ? next(descriptor, out) : raw_stat(descriptor, "", out, AT_EMPTY_PATH), \
                          out);                                                                         \
    }
DESCRIPTOR_STAT(fstat)
DESCRIPTOR_STAT(fstat64)

#define DESCRIPTOR_XSTAT(name)                                                                          \
    ST_WRAP(int, name, int version, int descriptor, struct stat *out)                                 \
    {                                                                                                   \
        int (*next)(int, int, struct stat *) = ST_NEXT(name);                                         \
        return identified(                                                                              \
            descriptor, next ? next(version, descriptor, out) : raw_stat(descriptor, "", out, AT_EMPTY_PATH), out); \
    }
DESCRIPTOR_XSTAT(__fxstat)
DESCRIPTOR_XSTAT(__fxstat64)

#define KNOWN (AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_EMPTY_PATH)
#define AT_STAT(name, PARAMETERS, TYPES, ARGUMENTS)                                                     \
    ST_WRAP(int, name, PARAMETERS)                                                                    \
    {                                                                                                   \
        char text[ST_TEXT];                                                                             \
        bool follow = !(flags & AT_SYMLINK_NOFOLLOW);                                                   \
        path = follow ? st_through(path, text) : st_path(path);                                         \
        bool descriptor = names_descriptor(path, flags);                                                \
        int result = st_refused(dirfd, path)           ? -1                                             \
                     : descriptor || (flags & ~KNOWN)  ? ST_PASS                                        \
                                                       : stat_path(dirfd, path, out, follow);           \
        if (result != ST_PASS)                                                                          \
            return result;                                                                              \
        int (*next)(TYPES) = ST_NEXT(name);                                                           \
        result = next ? next(ARGUMENTS) : raw_stat(dirfd, path, out, flags);                            \
        return descriptor ? identified(dirfd, result, out) : result;                                        \
    }
#define LIST(...) __VA_ARGS__
AT_STAT(fstatat, LIST(int dirfd, const char *path, struct stat *out, int flags),
        LIST(int, const char *, struct stat *, int), LIST(dirfd, path, out, flags))
AT_STAT(fstatat64, LIST(int dirfd, const char *path, struct stat *out, int flags),
        LIST(int, const char *, struct stat *, int), LIST(dirfd, path, out, flags))
AT_STAT(__fxstatat, LIST(int version, int dirfd, const char *path, struct stat *out, int flags),
        LIST(int, int, const char *, struct stat *, int), LIST(version, dirfd, path, out, flags))
AT_STAT(__fxstatat64, LIST(int version, int dirfd, const char *path, struct stat *out, int flags),
        LIST(int, int, const char *, struct stat *, int), LIST(version, dirfd, path, out, flags))

/* ---- statx */

static void put_time(struct statx_timestamp *to, struct timespec from)
{
    to->tv_sec = from.tv_sec;
    to->tv_nsec = (uint32_t)from.tv_nsec;
}

static void put_statx(const struct stat *from, struct statx *out)
{
    out->stx_dev_major = st_device_major(from->st_dev);
    out->stx_dev_minor = st_device_minor(from->st_dev);
    out->stx_ino = from->st_ino;
    out->stx_mode = (uint16_t)from->st_mode;
    out->stx_uid = from->st_uid;
    out->stx_gid = from->st_gid;
    out->stx_nlink = (uint32_t)from->st_nlink;
    out->stx_blksize = BLOCK_BYTES;
    put_time(&out->stx_atime, from->st_atim);
    put_time(&out->stx_mtime, from->st_mtim);
    put_time(&out->stx_ctime, from->st_ctim);
}

static int statx_path(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
    struct stat stat;
    const unsigned ours = STATX_BASIC_STATS | STATX_BTIME;
    if (st_refused(dirfd, path))
        return -1;
    if ((flags & ~(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_EMPTY_PATH | AT_STATX_DONT_SYNC)) || (mask & ~ours))
        return ST_PASS;
    int result = stat_path(dirfd, path, &stat, !(flags & AT_SYMLINK_NOFOLLOW));
    if (result != 0 || !st_writable(out, sizeof *out))
        return result == 0 ? ST_PASS : result;
    memset(out, 0, sizeof *out);
    put_statx(&stat, out);
    out->stx_mask = STATX_BASIC_STATS;
    out->stx_size = (uint64_t)stat.st_size;
    out->stx_blocks = (uint64_t)stat.st_blocks;
    out->stx_rdev_major = st_device_major(stat.st_rdev);
    out->stx_rdev_minor = st_device_minor(stat.st_rdev);
    return 0;
}

/* A descriptor's statx returns only the requested fields, so the identifying fields are requested again if the file may
 * be served.
 */
static void identify_statx(int descriptor, struct statx *out)
{
    struct st_diverted diverted;
    struct st_owner owner;
    uint64_t dev = st_device_number(out->stx_dev_major, out->stx_dev_minor);
    if (!st_on(ST_ON_IDENTITY) || !st_index_device_of(dev, &owner, false) || !st_diverted(descriptor, &diverted))
        return;
    put_over(diverted.domain, &diverted.record, &diverted.stat);
    put_statx(&diverted.stat, out);
    out->stx_mask &= ~STATX_BTIME;
    memset(&out->stx_btime, 0, sizeof out->stx_btime);
}

ST_WRAP(int, statx, int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
    char text[ST_TEXT];
    path = flags & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);
    bool descriptor = names_descriptor(path, flags);
    int result = descriptor ? ST_PASS : statx_path(dirfd, path, flags, mask, out);
    if (result != ST_PASS)
        return result;
    int (*next)(int, const char *, int, unsigned, struct statx *) = ST_NEXT(statx);
    if (next) {
        result = next(dirfd, path, flags, mask, out);
    } else {
        long raw = st_sys(__NR_statx, dirfd, path, flags, mask, out);
        result = st_sys_failed(raw) ? failed((int)-raw) : 0;
    }
    if (descriptor && result == 0)
        identify_statx(dirfd, out);
    return result;
}

/* ---- Existence. Only F_OK is answered: the mount decides about permissions. */

static int exists(int dirfd, const char *path, int mode)
{
    struct st_place place;
    if (st_refused(dirfd, path))
        return -1;
    if (mode != F_OK || !st_begin(&place, dirfd, path))
        return ST_PASS;
    int result = ST_PASS;
    switch (st_find(&place)) {
    case ST_MISSING:
    case ST_NOWHERE:
        result = failed(ENOENT);
        break;
    case ST_FOUND:
        if (!S_ISLNK(place.record.mode))
            result = 0;
        break;
    default:
        break;
    }
    st_count(result == ST_PASS ? ST_STAT_LEFT : ST_STAT_INDEX);
    return result;
}

static int raw_access(int dirfd, const char *path, int mode)
{
    long result = st_sys(__NR_faccessat, dirfd, path, mode);
    return st_sys_failed(result) ? failed((int)-result) : 0;
}

#define ACCESS(name)                                                                    \
    ST_WRAP(int, name, const char *path, int mode)                                    \
    {                                                                                   \
        char text[ST_TEXT];                                                             \
        path = st_through(path, text);                                                  \
        int result = exists(AT_FDCWD, path, mode);                                      \
        if (result != ST_PASS)                                                          \
            return result;                                                              \
        int (*next)(const char *, int) = ST_NEXT(name);                               \
        return next ? next(path, mode) : raw_access(AT_FDCWD, path, mode);              \
    }
ACCESS(access)
ACCESS(eaccess)
ACCESS(euidaccess)

ST_WRAP(int, faccessat, int dirfd, const char *path, int mode, int flags)
{
    char text[ST_TEXT];
    path = flags & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);
    int result = st_refused(dirfd, path) ? -1 : flags & ~AT_EACCESS ? ST_PASS : exists(dirfd, path, mode);
    if (result != ST_PASS)
        return result;
    int (*next)(int, const char *, int, int) = ST_NEXT(faccessat);
    return next ? next(dirfd, path, mode, flags) : raw_access(dirfd, path, mode);
}
