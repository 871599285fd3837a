/* Operations on descriptors of plain files that the mount must know about: attributes, syncing, extended attributes,
 * names. Danger avoided: a change of the plain file that the agent does not learn about. The shim sends a request to
 * the agent; without an agent it does the same through the mount by path. A file without a path is changed directly.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/vfs.h>

struct statvfs;

static int failed(int error)
{
    errno = error;
    return -1;
}

static int result_of(long raw)
{
    return st_sys_failed(raw) ? failed((int)-raw) : (int)raw;
}

/* Is it diverted, and is the mount there? */
static bool diverted_by_mount(int descriptor, struct st_diverted *diverted)
{
    return st_on(ST_ON_INDEX | ST_ON_PATHS) && st_diverted(descriptor, diverted);
}

/* 0, -1 with errno, or ST_PASS: not done. */
static int ask_about(const struct st_diverted *diverted, struct st_request *request)
{
    if (!st_on(ST_ON_INDEX))
        return ST_PASS;
    request->dev = diverted->stat.st_dev;
    request->ino = diverted->stat.st_ino;
    int answer = st_ask(diverted->domain, request, true, NULL);
    return answer > 0 ? failed(answer) : answer == 0 ? 0 : ST_PASS;
}

/* ---- Attributes */

#define OWNER_ONLY 07600 /* of a mode: the owner's right to read and write, and the special bits */

/* The plain file's own attributes are valid, and will be until this descriptor is closed. (Of its mode not the owner's right to
 * read and write, which a plain file always has: that is the record's.)
 */
static bool is_fresh(const struct st_diverted *diverted, int descriptor)
{
    const struct st_record *record = &diverted->record;
    if (!(record->flags & ST_FRESH) || !st_on(ST_ON_INDEX) || !st_index_alive(diverted->domain))
        return false;
    long flags = st_sys(__NR_fcntl, descriptor, F_GETFL);
    return !st_sys_failed(flags) && (flags & O_ACCMODE) != O_RDONLY;
}

static int change_mode(int descriptor, mode_t mode)
{
    struct st_diverted diverted;
    if (!diverted_by_mount(descriptor, &diverted))
        return ST_PASS;
    if (!(mode & 07000) && (mode & OWNER_ONLY) == (diverted.record.mode & OWNER_ONLY) && is_fresh(&diverted, descriptor))
        return result_of(st_sys(__NR_fchmod, descriptor, (mode & 0777) | 0600));
    struct st_request request = {.op = ST_SETATTR, .valid = ST_SET_MODE, .mode = mode & 07777};
    int result = ask_about(&diverted, &request);
    if (result != ST_PASS)
        return result;
    char text[ST_TEXT];
    const char *path = st_diverted_path(&diverted, descriptor, text);
    return path ? result_of(st_sys(__NR_fchmodat, AT_FDCWD, path, mode)) : ST_PASS;
}

static int change_owner(int descriptor, uid_t uid, gid_t gid)
{
    struct st_diverted diverted;
    if (!diverted_by_mount(descriptor, &diverted))
        return ST_PASS;
    struct st_request request = {.op = ST_SETATTR, .uid = uid, .gid = gid};
    /* The file has these owners already. (The time of the change is that of the writing.) */
    if ((uid == (uid_t)-1 || uid == diverted.record.uid) && (gid == (gid_t)-1 || gid == diverted.record.gid) &&
        is_fresh(&diverted, descriptor))
        return 0;
    request.valid = (uid == (uid_t)-1 ? 0 : ST_SET_UID) | (gid == (gid_t)-1 ? 0 : ST_SET_GID);
    int result = request.valid ? ask_about(&diverted, &request) : ST_PASS;
    if (result != ST_PASS)
        return result;
    char text[ST_TEXT];
    const char *path = st_diverted_path(&diverted, descriptor, text);
    return path ? result_of(st_sys(__NR_fchownat, AT_FDCWD, path, uid, gid, 0)) : ST_PASS;
}

static bool good_time(const struct timespec *time)
{
    return time->tv_nsec == UTIME_NOW || time->tv_nsec == UTIME_OMIT || (time->tv_nsec >= 0 && time->tv_nsec < 1000000000);
}

static const struct timespec NOW[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}};

/* The times passed, or the present; false: leave the call to the kernel. */
static bool good_times(const struct timespec **times)
{
    if (!*times) {
        *times = NOW;
        return true;
    }
    return st_readable(*times, 2 * sizeof **times) && good_time(&(*times)[0]) && good_time(&(*times)[1]);
}

static void ask_for_times(struct st_request *request, uint32_t op, const struct timespec times[2])
{
    memset(request, 0, offsetof(struct st_request, name));
    request->op = op;
    if (times[0].tv_nsec == UTIME_NOW) {
        request->valid |= ST_SET_ATIME_NOW;
    } else if (times[0].tv_nsec != UTIME_OMIT) {
        request->valid |= ST_SET_ATIME;
        request->atime_s = times[0].tv_sec;
        request->atime_ns = (uint32_t)times[0].tv_nsec;
    }
    if (times[1].tv_nsec == UTIME_NOW) {
        request->valid |= ST_SET_MTIME_NOW;
    } else if (times[1].tv_nsec != UTIME_OMIT) {
        request->valid |= ST_SET_MTIME;
        request->mtime_s = times[1].tv_sec;
        request->mtime_ns = (uint32_t)times[1].tv_nsec;
    }
}

/* The mount needs two requests, the agent needs one. */
int st_change_times(int dirfd, const char *path, const struct timespec times[2])
{
    struct st_place place;
    struct st_request request;
    if (!good_times(&times) || !st_begin(&place, dirfd, path))
        return ST_PASS;
    enum st_found found = st_find(&place);
    bool made_here = found == ST_UNSURE && (place.dir_flags & ST_DELEGATED); /* and not taken in yet */
    if (!made_here && !(found == ST_FOUND && S_ISREG(place.record.mode)))
        return ST_PASS;
    ask_for_times(&request, ST_SETATTR_NAMED, times);
    if (!request.valid)
        return ST_PASS;
    request.dir = place.dir_id;
    request.name_bytes = place.name_bytes;
    memcpy(request.name, place.name, place.name_bytes);
    int answer = st_ask(place.from.domain, &request, true, NULL);
    return answer > 0 && answer != EINVAL ? failed(answer) : answer == 0 ? 0 : ST_PASS;
}

static int change_times(int descriptor, const struct timespec times[2])
{
    struct st_diverted diverted;
    if (!good_times(&times) || !diverted_by_mount(descriptor, &diverted))
        return ST_PASS;
    if (is_fresh(&diverted, descriptor))
        return result_of(st_sys(__NR_utimensat, descriptor, 0, times, 0));
    struct st_request request;
    ask_for_times(&request, ST_SETATTR, times);
    int result = request.valid ? ask_about(&diverted, &request) : ST_PASS;
    if (result != ST_PASS)
        return result;
    char text[ST_TEXT];
    const char *path = st_diverted_path(&diverted, descriptor, text);
    return path ? result_of(st_sys(__NR_utimensat, AT_FDCWD, path, times, 0)) : ST_PASS;
}

static int change_micro_times(int descriptor, const struct timeval times[2])
{
    if (!times)
        return change_times(descriptor, NULL);
    if (!st_readable(times, 2 * sizeof *times))
        return ST_PASS;
    struct timespec nano[2];
    for (int at = 0; at < 2; at++) {
        if (times[at].tv_usec < 0 || times[at].tv_usec >= 1000000)
            return ST_PASS;
        nano[at] = (struct timespec){times[at].tv_sec, times[at].tv_usec * 1000};
    }
    return change_times(descriptor, nano);
}

#define LIST(...) __VA_ARGS__
#define DESCRIPTOR_CALL(name, TYPES, PARAMETERS, ARGUMENTS, attempt, raw) \
    ST_WRAP(int, name, PARAMETERS)                                      \
    {                                                                     \
        int result = attempt;                                             \
        if (result != ST_PASS)                                            \
            return result;                                                \
        int (*next)(TYPES) = ST_NEXT(name);                             \
        return next ? next(ARGUMENTS) : result_of(raw);                   \
    }
DESCRIPTOR_CALL(fchmod, LIST(int, mode_t), LIST(int descriptor, mode_t mode), LIST(descriptor, mode),
                change_mode(descriptor, mode), st_sys(__NR_fchmod, descriptor, mode))
DESCRIPTOR_CALL(fchown, LIST(int, uid_t, gid_t), LIST(int descriptor, uid_t uid, gid_t gid), LIST(descriptor, uid, gid),
                change_owner(descriptor, uid, gid), st_sys(__NR_fchown, descriptor, uid, gid))
DESCRIPTOR_CALL(futimens, LIST(int, const struct timespec *), LIST(int descriptor, const struct timespec *times),
                LIST(descriptor, times), change_times(descriptor, times),
                st_sys(__NR_utimensat, descriptor, 0, times, 0))
DESCRIPTOR_CALL(futimes, LIST(int, const struct timeval *), LIST(int descriptor, const struct timeval *times),
                LIST(descriptor, times), change_micro_times(descriptor, times), -ENOSYS)

static bool empty_path(const char *path, int flags)
{
    return (flags & AT_EMPTY_PATH) && (uintptr_t)path >= ST_MEMORY_MIN && !*path;
}

ST_WRAP(int, utimensat, int dirfd, const char *path, const struct timespec *times, int flags)
{
    char text[ST_TEXT];
    path = flags & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);
    int result = ST_PASS;
    if ((!path || empty_path(path, flags)) && dirfd >= 0)
        result = change_times(dirfd, times);
    else if (st_refused(dirfd, path))
        return -1;
    else if (path && !(flags & ~AT_SYMLINK_NOFOLLOW))
        result = st_change_times(dirfd, path, times);
    if (result != ST_PASS)
        return result;
    int (*next)(int, const char *, const struct timespec *, int) = ST_NEXT(utimensat);
    return next ? next(dirfd, path, times, flags) : result_of(st_sys(__NR_utimensat, dirfd, path, times, flags));
}

ST_WRAP(int, futimesat, int dirfd, const char *path, const struct timeval *times)
{
    char text[ST_TEXT];
    path = st_through(path, text);
    int result = path ? ST_PASS : change_micro_times(dirfd, times);
    if (st_refused(dirfd, path))
        return -1;
    if (result != ST_PASS)
        return result;
    int (*next)(int, const char *, const struct timeval *) = ST_NEXT(futimesat);
    return next ? next(dirfd, path, times) : failed(ENOSYS);
}

ST_WRAP(int, fchownat, int dirfd, const char *path, uid_t uid, gid_t gid, int flags)
{
    char text[ST_TEXT];
    path = flags & AT_SYMLINK_NOFOLLOW ? st_path(path) : st_through(path, text);
    if (st_refused(dirfd, path))
        return -1;
    int result = empty_path(path, flags) && dirfd >= 0 ? change_owner(dirfd, uid, gid) : ST_PASS;
    if (result != ST_PASS)
        return result;
    int (*next)(int, const char *, uid_t, gid_t, int) = ST_NEXT(fchownat);
    return next ? next(dirfd, path, uid, gid, flags) : result_of(st_sys(__NR_fchownat, dirfd, path, uid, gid, flags));
}

/* ---- Syncing: the plain file first, then the agent's further guarantees. */

static int sync_by_mount(const struct st_diverted *diverted, int descriptor)
{
    char text[ST_TEXT];
    const char *path = descriptor < 0 ? NULL : st_diverted_path(diverted, descriptor, text);
    if (!path)
        return 0; /* no name: no program will look for it after a crash */
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (opened == -EACCES)
        opened = st_sys(__NR_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (opened == -ENOENT)
        return 0;
    if (st_sys_failed(opened))
        return failed(EIO); /* the shim cannot say that it is safe */
    long result = st_sys(__NR_fsync, opened);
    st_sys_close((int)opened);
    return result_of(result);
}

static int sync_diverted(const struct st_diverted *diverted, int descriptor)
{
    struct st_request request = {.op = ST_SYNC};
    int result = ask_about(diverted, &request);
    return result == ST_PASS ? sync_by_mount(diverted, descriptor) : result;
}

static int sync_descriptor(int result, int descriptor)
{
    struct st_diverted diverted;
    return result == 0 && diverted_by_mount(descriptor, &diverted) ? sync_diverted(&diverted, descriptor) : result;
}

#define SYNC(name)                                                                          \
    ST_WRAP(int, name, int descriptor)                                                    \
    {                                                                                       \
        int (*next)(int) = ST_NEXT(name);                                                 \
        uint64_t begun_ns = st_sync_begins(descriptor);                                   \
        int result = next ? next(descriptor) : result_of(st_sys(__NR_##name, descriptor)); \
        result = sync_descriptor(result, descriptor);                                       \
        st_counted_sync(descriptor, begun_ns);                                              \
        return result;                                                                      \
    }
SYNC(fsync)
SYNC(fdatasync)

/* ---- msync names memory: /proc/self/maps says which files are mapped there. */

struct reader {
    int descriptor;
    int at, bytes;
    char text[512];
};

static int next_byte(struct reader *reader)
{
    if (reader->at == reader->bytes) {
        long got;
        do
            got = st_sys(__NR_read, reader->descriptor, reader->text, sizeof reader->text);
        while (got == -EINTR);
        if (got <= 0)
            return -1;
        reader->at = 0;
        reader->bytes = (int)got;
    }
    return (unsigned char)reader->text[reader->at++];
}

/* A number in `base` up to the first other byte, which is consumed too. */
static unsigned long next_number(struct reader *reader, unsigned base, int *end)
{
    unsigned long number = 0;
    for (;;) {
        int byte = next_byte(reader);
        int digit = byte >= '0' && byte <= '9' ? byte - '0' : byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : 99;
        *end = byte;
        if (digit >= (int)base)
            return number;
        number = number * base + (unsigned)digit;
    }
}

/* "from-to permissions offset major:minor inode path"; false at the end. */
static bool next_mapping(struct reader *reader, unsigned long *from, unsigned long *to, struct stat *file)
{
    int end;
    *from = next_number(reader, 16, &end);
    if (end != '-')
        return false;
    *to = next_number(reader, 16, &end);
    for (int spaces = 0; spaces < 2;) {
        int byte = next_byte(reader);
        if (byte < 0)
            return false;
        spaces += byte == ' ';
    }
    unsigned long major = next_number(reader, 16, &end), minor = next_number(reader, 16, &end);
    memset(file, 0, sizeof *file);
    file->st_dev = st_device_number((uint32_t)major, (uint32_t)minor);
    file->st_ino = next_number(reader, 10, &end);
    file->st_mode = S_IFREG;
    while (end != '\n' && end >= 0)
        end = next_byte(reader);
    return end == '\n';
}

static int sync_memory(uintptr_t start, size_t bytes)
{
    struct reader reader = {.at = 0};
    long opened = st_sys(__NR_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
    if (st_sys_failed(opened))
        return 0;
    reader.descriptor = (int)opened;
    unsigned long from, to;
    struct stat file;
    int result = 0;
    while (result == 0 && next_mapping(&reader, &from, &to, &file)) {
        struct st_diverted diverted;
        if (from < start + bytes && start < to && file.st_ino && st_diverted_as(-1, &file, &diverted))
            result = sync_diverted(&diverted, -1);
    }
    st_sys_close((int)opened);
    return result;
}

ST_WRAP(int, msync, void *start, size_t bytes, int flags)
{
    int (*next)(void *, size_t, int) = ST_NEXT(msync);
    int result = next ? next(start, bytes, flags) : result_of(st_sys(__NR_msync, start, bytes, flags));
    if (result == 0 && (flags & MS_SYNC) && __atomic_load_n(&st_process.wrote, __ATOMIC_RELAXED) && st_on(ST_ON_INDEX))
        result = sync_memory((uintptr_t)start, bytes);
    return result;
}

/* ---- Queries about the file system, and extended attributes */

#define STATFS(name, by_path, type)                                                     \
    ST_WRAP(int, name, int descriptor, struct type *out)                                \
    {                                                                                   \
        struct st_diverted diverted;                                                    \
        int (*path_next)(const char *, struct type *) = ST_NEXT(by_path);               \
        if (st_on(ST_ON_PATHS) && path_next && st_diverted(descriptor, &diverted))      \
            return path_next(diverted.domain->mount, out);                              \
        int (*next)(int, struct type *) = ST_NEXT(name);                                \
        return next ? next(descriptor, out) : failed(ENOSYS);                           \
    }
STATFS(fstatfs, statfs, statfs)
STATFS(fstatfs64, statfs64, statfs)
STATFS(fstatvfs, statvfs, statvfs)
STATFS(fstatvfs64, statvfs64, statvfs)

#define XATTR(result, name, by_path, TYPES, PARAMETERS, ARGUMENTS, is_answered)         \
    ST_WRAP(result, name, int descriptor, PARAMETERS)                                   \
    {                                                                                   \
        struct st_diverted diverted;                                                    \
        char text[ST_TEXT];                                                             \
        const char *path;                                                               \
        result (*path_next)(const char *, TYPES) = ST_NEXT(by_path);                    \
        if (st_on(ST_ON_PATHS) && path_next && st_diverted(descriptor, &diverted)) {    \
            if (is_answered)                                                            \
                return failed(EOPNOTSUPP);                                              \
            if ((path = st_diverted_path(&diverted, descriptor, text)))                 \
                return path_next(path, ARGUMENTS);                                      \
        }                                                                               \
        result (*next)(int, TYPES) = ST_NEXT(name);                                     \
        return next ? next(descriptor, ARGUMENTS) : failed(ENOSYS);                     \
    }
XATTR(ssize_t, fgetxattr, getxattr, LIST(const char *, void *, size_t), LIST(const char *name, void *value, size_t bytes),
      LIST(name, value, bytes), st_is_acl(name))
XATTR(int, fsetxattr, setxattr, LIST(const char *, const void *, size_t, int),
      LIST(const char *name, const void *value, size_t bytes, int flags), LIST(name, value, bytes, flags),
      !flags && st_is_acl(name))
XATTR(ssize_t, flistxattr, listxattr, LIST(char *, size_t), LIST(char *list, size_t bytes), LIST(list, bytes), false)
XATTR(int, fremovexattr, removexattr, LIST(const char *), LIST(const char *name), name, false)
