/* The open family and fopen. Reading: the shim opens the plain file, and checks afterwards that it is still the file.
 * Writing and creating: the agent opens and sends the descriptor. Danger avoided: a descriptor of another file than the
 * path's, or a file that is created without the agent's knowledge.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifndef O_TMPFILE
#define O_TMPFILE (020000000 | O_DIRECTORY)
#endif
#ifdef __aarch64__ /* the kernel's O_LARGEFILE, which has no meaning here */
#define LARGEFILE 0400000
#else
#define LARGEFILE 0100000
#endif
#define SERVED                                                                                                     \
    (O_ACCMODE | O_CREAT | O_EXCL | O_NOCTTY | O_TRUNC | O_APPEND | O_NONBLOCK | O_SYNC | O_NOFOLLOW | O_NOATIME | \
     O_CLOEXEC | LARGEFILE)

static int failed(int error)
{
    errno = error;
    return -1;
}

static bool writes(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC);
}

/* Copies on the tier all belong to the agent's user: if the file's own mode denies access, the mount must refuse. */
static bool may_read(const struct st_domain *domain, const struct st_record *record)
{
    uint32_t uid = domain->index->uid;
    return !uid || (record->uid == uid ? record->mode & 0400 : record->mode & 0044);
}

static long open_by_path(struct st_place *place, int flags)
{
    char text[ST_TEXT];
    char *path = st_plain_path(place, text);
    if (!path)
        return -1;
    long opened = st_sys(__NR_openat, AT_FDCWD, path, flags, 0, 0, ST_OWN_CALL);
    if (!st_sys_failed(opened))
        st_anchor_opened(place, path);
    return opened;
}

static int open_plain(struct st_place *place, int flags)
{
    const char *root;
    struct st_device device;
    const struct st_record *record = &place->record;
    if (!(record->flags & ST_RESIDENT) || !may_read(place->from.domain, record) ||
        !st_index_device(place->from.domain, record->device, &device, &root) ||
        ((device.flags & ST_DEVICE_NOEXEC) && (record->mode & 0111)))
        return ST_PASS;
    int as = (flags & ~O_CREAT) | O_NOFOLLOW | O_NOCTTY;
    struct st_anchor anchor;
    long opened = -1;
    if (st_anchor_of(place, &anchor)) {
        opened = st_sys(__NR_openat, anchor.number, anchor.name, as, 0, 0, ST_OWN_CALL);
        if (!st_sys_failed(opened) && !st_anchor_still(place, &anchor)) {
            st_sys_close((int)opened);
            opened = -1;
        }
    }
    if (st_sys_failed(opened))
        opened = open_by_path(place, as);
    if (st_sys_failed(opened))
        return ST_PASS;
    struct stat stat;
    bool sure = st_still(place);
    if (sure && ((record->flags & ST_LINKED) || !st_chain_still(place)))
        sure = !st_sys_failed(st_sys_fstat((int)opened, &stat)) && stat.st_ino == record->backing_ino &&
               stat.st_dev == device.dev;
    if (sure) {
        if (opened < ST_DESCRIPTORS)
            __atomic_store_n(&st_opened_as[opened], place->number, __ATOMIC_RELAXED);
        return st_counted_open(place->from.domain, (int)opened, flags & ~O_CREAT);
    }
    st_sys_close((int)opened);
    return ST_PASS;
}

static int open_by_agent(struct st_place *place, int flags, mode_t mode)
{
    const struct st_domain *domain = place->from.domain;
    struct st_request request;
    uint32_t mask = flags & O_CREAT ? st_umask() : 0;
    if (!st_process.writes || mask == ST_UMASK_UNKNOWN || (flags & (O_SYNC | O_DSYNC)) ||
        !(__atomic_load_n(&domain->index->flags, __ATOMIC_RELAXED) & ST_WRITES))
        return ST_PASS;
    memset(&request, 0, offsetof(struct st_request, name));
    request.op = ST_OPEN;
    request.flags = (uint32_t)flags;
    request.mode = mode & 07777 & ~mask;
    request.dir = place->dir_id;
    request.name_bytes = place->name_bytes;
    memcpy(request.name, place->name, place->name_bytes);
    if (flags & O_EXCL) {
        /* These values identify the request: without an answer, the shim asks the next agent about it. */
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        request.dev = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        request.ino = (uint64_t)st_sys(__NR_gettid);
    }
    int opened, answer = st_ask(domain, &request, flags & O_CLOEXEC, &opened);
    if (answer == ST_UNHEARD && (flags & O_EXCL)) {
        request.valid = ST_AGAIN;
        for (int turn = 0; (answer == ST_UNHEARD || answer == ST_UNSENT) && st_agent_replaced(domain, turn); turn++)
            answer = st_ask(domain, &request, flags & O_CLOEXEC, &opened);
    }
    if (answer == 0 && opened >= 0) {
        if ((flags & O_ACCMODE) != O_RDONLY)
            __atomic_store_n(&st_process.wrote, true, __ATOMIC_RELAXED);
        st_count(ST_OPEN_AGENT);
        return st_counted_open(domain, opened, flags);
    }
    if (answer > 0)
        return failed(answer);
    /* No answer: the agent may have carried it out. Only this flag makes a repetition visible. */
    bool unsure = answer == ST_UNHEARD || (answer == ST_UNSENT && request.valid);
    return unsure && (flags & O_EXCL) ? failed(EIO) : ST_PASS;
}

/* The agent has delegated the directory: the shim creates missing files here. */
static int create_delegated(struct st_place *place, int flags, mode_t mode, uint64_t epoch)
{
    uint32_t mask = st_umask();
    if (!(place->dir_flags & ST_DELEGATED) || !st_process.writes || mask == ST_UMASK_UNKNOWN ||
        (flags & O_ACCMODE) == O_RDONLY || (flags & (O_SYNC | O_DSYNC)))
        return ST_PASS;
    int opened = st_delegated_make(place, flags, mode & 07777 & ~mask, epoch);
    if (opened < 0)
        return ST_PASS;
    __atomic_store_n(&st_process.wrote, true, __ATOMIC_RELAXED);
    st_count(ST_OPEN_DELEGATED);
    return st_counted_open(place->from.domain, opened, flags);
}

static int open_found(struct st_place *place, int flags, mode_t mode)
{
    uint64_t epoch = 0;
    int made = ST_PASS;
    bool delegated = (flags & O_CREAT) && st_delegated_begin(place->from.domain, &epoch);
    switch (st_find(place)) {
    case ST_FOUND:
        if (!S_ISREG(place->record.mode))
            return ST_PASS;
        if ((flags & O_CREAT) && (flags & O_EXCL))
            return failed(EEXIST);
        return writes(flags) ? open_by_agent(place, flags, mode) : open_plain(place, flags);
    case ST_MISSING:
        if (delegated)
            made = create_delegated(place, flags, mode, epoch);
        return made >= 0         ? made
               : flags & O_CREAT ? open_by_agent(place, flags, mode)
                                 : failed(ENOENT);
    case ST_NOWHERE:
        return failed(ENOENT);
    case ST_UNSURE:
        return writes(flags) || (flags & O_CREAT) ? open_by_agent(place, flags, mode) : ST_PASS;
    default:
        return ST_PASS;
    }
}

/* The mount alone serves O_PATH, O_DIRECTORY, O_TMPFILE, O_DIRECT, and flags newer than this code. */
__attribute__((noinline)) static int open_inside(struct st_place *place, int flags, mode_t mode)
{
    int opened = ST_PASS;
    if (!(flags & ~SERVED) && (flags & O_ACCMODE) != O_ACCMODE)
        opened = open_found(place, flags, mode);
    if (opened == ST_PASS)
        st_count(ST_OPEN_LEFT);
    else if (opened < 0 || !writes(flags))
        st_count(ST_OPEN_INDEX);
    return opened;
}

int st_open(int dirfd, const char *path, int flags, mode_t mode)
{
    if (st_refused(dirfd, path))
        return -1;
    struct st_place place;
    if (!st_begin(&place, dirfd, path))
        return ST_PASS;
    return open_inside(&place, flags, mode);
}

/* ---- The functions that programs call. */

#define TAKES_MODE(flags) (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE)

#define MODE_FROM_ARGUMENTS              \
    mode_t mode = 0;                     \
    if (TAKES_MODE(flags)) {             \
        va_list arguments;               \
        va_start(arguments, flags);      \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments);               \
    }

static int raw_openat(int dirfd, const char *path, int flags, mode_t mode)
{
    long opened = st_sys(__NR_openat, dirfd, path, flags, mode);
    return st_sys_failed(opened) ? failed((int)-opened) : (int)opened;
}

/* A link to a descriptor is followed unless the caller forbids that. */
#define SERVE(dirfd)                                                  \
    path = flags & (O_NOFOLLOW | O_PATH) ? st_path(path) : st_through(path, text); \
    int opened = st_open(dirfd, path, flags, mode);                   \
    if (opened != ST_PASS)                                            \
        return opened;

#define OPEN(name)                                                                                           \
    ST_WRAP(int, name, const char *path, int flags, ...)                                                   \
    {                                                                                                        \
        MODE_FROM_ARGUMENTS                                                                                  \
        char text[ST_TEXT];                                                                                  \
        SERVE(AT_FDCWD)                                                                                      \
        int (*next)(const char *, int, ...) = ST_NEXT(name);                                               \
        return st_fresh(next ? next(path, flags, mode) : raw_openat(AT_FDCWD, path, flags, mode));           \
    }

#define OPENAT(name)                                                                                         \
    ST_WRAP(int, name, int dirfd, const char *path, int flags, ...)                                        \
    {                                                                                                        \
        MODE_FROM_ARGUMENTS                                                                                  \
        char text[ST_TEXT];                                                                                  \
        SERVE(dirfd)                                                                                         \
        int (*next)(int, const char *, int, ...) = ST_NEXT(name);                                          \
        return st_fresh(next ? next(dirfd, path, flags, mode) : raw_openat(dirfd, path, flags, mode));       \
    }

/* Programs call the checked variants only without a mode; libc itself reports an error otherwise. */
#define OPEN_2(name)                                                                                         \
    ST_WRAP(int, name, const char *path, int flags)                                                        \
    {                                                                                                        \
        const mode_t mode = 0;                                                                               \
        char text[ST_TEXT];                                                                                  \
        if (!TAKES_MODE(flags)) {                                                                            \
            SERVE(AT_FDCWD)                                                                                  \
        }                                                                                                    \
        int (*next)(const char *, int) = ST_NEXT(name);                                                    \
        return st_fresh(next ? next(path, flags) : raw_openat(AT_FDCWD, path, flags, mode));                 \
    }

#define OPENAT_2(name)                                                                                       \
    ST_WRAP(int, name, int dirfd, const char *path, int flags)                                             \
    {                                                                                                        \
        const mode_t mode = 0;                                                                               \
        char text[ST_TEXT];                                                                                  \
        if (!TAKES_MODE(flags)) {                                                                            \
            SERVE(dirfd)                                                                                     \
        }                                                                                                    \
        int (*next)(int, const char *, int) = ST_NEXT(name);                                               \
        return st_fresh(next ? next(dirfd, path, flags) : raw_openat(dirfd, path, flags, mode));             \
    }

#define CREAT(name)                                                                                          \
    ST_WRAP(int, name, const char *path, mode_t mode)                                                      \
    {                                                                                                        \
        const int flags = O_CREAT | O_WRONLY | O_TRUNC;                                                      \
        char text[ST_TEXT];                                                                                  \
        SERVE(AT_FDCWD)                                                                                      \
        int (*next)(const char *, mode_t) = ST_NEXT(name);                                                 \
        return st_fresh(next ? next(path, mode) : raw_openat(AT_FDCWD, path, flags, mode));                  \
    }

OPEN(open)
OPEN(open64)
OPEN(__open)
OPEN(__open64)
OPENAT(openat)
OPENAT(openat64)
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)
CREAT(creat)
CREAT(creat64)

/* ---- fopen */

/* fopen's mode as open's flags, or -1: leave the call to libc (conversions, and modes that it would reject). */
static int flags_of(const char *mode)
{
    int flags;
    switch (*mode) {
    case 'r': flags = O_RDONLY; break;
    case 'w': flags = O_WRONLY | O_CREAT | O_TRUNC; break;
    case 'a': flags = O_WRONLY | O_CREAT | O_APPEND; break;
    default: return -1;
    }
    for (int at = 1; mode[at]; at++) {
        if (at == 5) /* fdopen reads no further than that */
            return -1;
        switch (mode[at]) {
        case '+': flags = (flags & ~O_ACCMODE) | O_RDWR; break;
        case 'x': flags |= O_EXCL; break;
        case 'e': flags |= O_CLOEXEC; break;
        case 'b': case 'c': case 'm': case 't': break;
        default: return -1;
        }
    }
    return flags;
}

static FILE *open_stream(const char *path, const char *mode, bool *pass)
{
    FILE *(*stream_of)(int, const char *) = ST_NEXT(fdopen);
    int flags = st_is_text(mode) ? flags_of(mode) : -1;
    int opened = flags < 0 || !stream_of ? ST_PASS : st_open(AT_FDCWD, path, flags, 0666);
    *pass = opened == ST_PASS;
    if (opened < 0)
        return NULL;
    if ((flags & (O_APPEND | O_ACCMODE)) == (O_APPEND | O_WRONLY))
        st_sys(__NR_lseek, opened, 0, SEEK_END); /* like fopen; fdopen does not do it */
    FILE *stream = stream_of(opened, mode);
    if (!stream)
        st_sys_close(opened);
    st_stream_opened(stream, opened);
    return stream;
}

#define FOPEN(name)                                                       \
    ST_WRAP(FILE *, name, const char *path, const char *mode)           \
    {                                                                     \
        char text[ST_TEXT];                                               \
        bool pass;                                                        \
        path = st_through(path, text);                                    \
        if (st_refused(AT_FDCWD, path))                                   \
            return NULL;                                                  \
        if (st_on(ST_ON_INDEX)) {                                         \
            FILE *stream = open_stream(path, mode, &pass);                \
            if (!pass)                                                    \
                return stream;                                            \
        }                                                                 \
        FILE *(*next)(const char *, const char *) = ST_NEXT(name);      \
        FILE *stream = NULL;                                              \
        if (next)                                                         \
            stream = next(path, mode);                                    \
        else                                                              \
            errno = ENOSYS;                                               \
        if (stream && st_counting)                                        \
            st_stream_opened(stream, st_fresh(fileno(stream)));           \
        return stream;                                                    \
    }

FOPEN(fopen)
FOPEN(fopen64)
