/* Reading, writing and mapping: passed on, and counted if the descriptor is one of the run's files. Dangers avoided:
 * cost for other descriptors beyond one table look-up; a descriptor's number that is trusted after its file was closed.
 * All large requests and vectors are timed, and one in sixteen small ones.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>

#define TIMED_BYTES 65536u
#define TIMED_EACH 16u

static long result_of(long raw)
{
    if (!st_sys_failed(raw))
        return raw;
    errno = (int)-raw;
    return -1;
}

struct request {
    struct st_io *io;
    uint64_t begun;
    uint64_t times;
};

/* The next call's time represents this many calls; 0: it is not taken. */
static uint64_t times_of(const struct st_io *io, bool write, size_t bytes)
{
    if (bytes >= TIMED_BYTES)
        return 1;
    /* Any number that changes with each call suffices. */
    const uint64_t *sizes = write ? io->write_sizes : io->read_sizes;
    unsigned class = bytes ? 64u - (unsigned)__builtin_clzll(bytes) : 0;
    return __atomic_load_n(&sizes[class], __ATOMIC_RELAXED) % TIMED_EACH ? 0 : TIMED_EACH;
}

static struct request begin(struct st_io *io, bool write, size_t bytes)
{
    struct request request = {io, 0, io ? times_of(io, write, bytes) : 0};
    if (request.times)
        request.begun = st_now_ns();
    return request;
}

/* `descriptor`: the one whose position moved; NONE: no position moved. */
#define NONE (-1)
static void moved(const struct request *request, bool write, int descriptor, long bytes)
{
    struct st_io *io = request->io;
    if (!io)
        return;
    if (request->times)
        st_add(write ? &io->write_ns : &io->read_ns, (st_now_ns() - request->begun) * request->times);
    if (bytes < 0)
        return;
    unsigned class = bytes ? 64u - (unsigned)__builtin_clzll((uint64_t)bytes) : 0;
    st_add(&(write ? io->write_sizes : io->read_sizes)[class < ST_SIZES ? class : ST_SIZES - 1], 1);
    st_add(write ? &io->write_bytes : &io->read_bytes, (uint64_t)bytes);
    if (descriptor != NONE)
        st_streams_passed(descriptor, (uint64_t)bytes);
}

/* A vector may be in unmapped memory, which only the kernel may discover; so all calls with a vector are timed. */
#define VECTOR_BYTES TIMED_BYTES

#define LIST(...) __VA_ARGS__
#define COUNTED(type, name, write, moves, wanted, TYPES, PARAMETERS, ARGUMENTS, raw)                   \
    ST_WRAP(type, name, int descriptor, PARAMETERS)                                                  \
    {                                                                                                   \
        type (*next)(int, TYPES) = ST_NEXT(name);                                                     \
        unsigned kind = st_kind_of(descriptor);                                                         \
        if (st_likely(kind < ST_KIND_OURS))                                                             \
            return next ? next(descriptor, ARGUMENTS) : (type)result_of(raw);                           \
        struct request request = begin(st_io_of(kind), write, wanted);                                  \
        type result = next ? next(descriptor, ARGUMENTS) : (type)result_of(raw);                        \
        moved(&request, write, moves, result);                                                          \
        return result;                                                                                  \
    }

#define READS(name) \
    COUNTED(ssize_t, name, false, descriptor, bytes, LIST(void *, size_t), LIST(void *to, size_t bytes), LIST(to, bytes), \
            st_sys(__NR_read, descriptor, to, bytes))
READS(read)
READS(__read)
#define WRITES(name) \
    COUNTED(ssize_t, name, true, descriptor, bytes, LIST(const void *, size_t), LIST(const void *from, size_t bytes), \
            LIST(from, bytes), st_sys(__NR_write, descriptor, from, bytes))
WRITES(write)
WRITES(__write)
#define PREADS(name) \
    COUNTED(ssize_t, name, false, NONE, bytes, LIST(void *, size_t, off_t), LIST(void *to, size_t bytes, off_t at), \
            LIST(to, bytes, at), st_sys(__NR_pread64, descriptor, to, bytes, at))
PREADS(pread)
PREADS(pread64)
PREADS(__pread64)
#define PWRITES(name) \
    COUNTED(ssize_t, name, true, NONE, bytes, LIST(const void *, size_t, off_t), LIST(const void *from, size_t bytes, off_t at), \
            LIST(from, bytes, at), st_sys(__NR_pwrite64, descriptor, from, bytes, at))
PWRITES(pwrite)
PWRITES(pwrite64)
PWRITES(__pwrite64)

/* libc itself checks these, and ends the program if `room` is too small. */
COUNTED(ssize_t, __read_chk, false, descriptor, bytes, LIST(void *, size_t, size_t), LIST(void *to, size_t bytes, size_t room),
        LIST(to, bytes, room), ((void)room, st_sys(__NR_read, descriptor, to, bytes)))
#define PREADS_CHECKED(name) \
    COUNTED(ssize_t, name, false, NONE, bytes, LIST(void *, size_t, off_t, size_t), \
            LIST(void *to, size_t bytes, off_t at, size_t room), LIST(to, bytes, at, room), \
            ((void)room, st_sys(__NR_pread64, descriptor, to, bytes, at)))
PREADS_CHECKED(__pread_chk)
PREADS_CHECKED(__pread64_chk)

#define VECTORS(name, write, number) \
    COUNTED(ssize_t, name, write, descriptor, VECTOR_BYTES, LIST(const struct iovec *, int), \
            LIST(const struct iovec *vector, int count), LIST(vector, count), st_sys(number, descriptor, vector, count))
VECTORS(readv, false, __NR_readv)
VECTORS(writev, true, __NR_writev)
/* The kernel takes the offset as two halves. */
#define PLACED(name, write, number) \
    COUNTED(ssize_t, name, write, NONE, VECTOR_BYTES, LIST(const struct iovec *, int, off_t), \
            LIST(const struct iovec *vector, int count, off_t at), LIST(vector, count, at), \
            st_sys(number, descriptor, vector, count, at, 0))
PLACED(preadv, false, __NR_preadv)
PLACED(preadv64, false, __NR_preadv)
PLACED(pwritev, true, __NR_pwritev)
PLACED(pwritev64, true, __NR_pwritev)
#ifdef __NR_preadv2
#define PLACED_2(name, write, number) \
    COUNTED(ssize_t, name, write, at == -1 ? descriptor : NONE, VECTOR_BYTES, LIST(const struct iovec *, int, off_t, int), \
            LIST(const struct iovec *vector, int count, off_t at, int flags), LIST(vector, count, at, flags), \
            st_sys(number, descriptor, vector, count, at, 0, flags))
PLACED_2(preadv2, false, __NR_preadv2)
PLACED_2(preadv64v2, false, __NR_preadv2)
PLACED_2(pwritev2, true, __NR_pwritev2)
PLACED_2(pwritev64v2, true, __NR_pwritev2)
#endif

/* ---- From one descriptor to another: a read of one and a write of the other, both with the call's time. */

void st_counted_copy(int in, const void *from_place, int out, const void *to_place, uint64_t begun, long bytes)
{
    struct st_io *from = st_io_of(st_kind_of(in)), *to = st_io_of(st_kind_of(out));
    struct request reading = {from, begun, begun != 0}, writing = {to, begun, begun != 0};
    moved(&reading, false, from_place ? NONE : in, bytes);
    moved(&writing, true, to_place ? NONE : out, bytes);
}

uint64_t st_copy_begun(int in, int out)
{
    return st_unlikely(st_kind_of(in) >= ST_KIND_OURS || st_kind_of(out) >= ST_KIND_OURS) ? st_now_ns() : 0;
}

#define SENDFILE(name)                                                                                       \
    ST_WRAP(ssize_t, name, int out, int in, off_t *from, size_t bytes)                                     \
    {                                                                                                        \
        ssize_t (*next)(int, int, off_t *, size_t) = ST_NEXT(name);                                        \
        uint64_t begun = st_copy_begun(in, out);                                                             \
        ssize_t sent = next ? next(out, in, from, bytes) : result_of(st_sys(__NR_sendfile, out, in, from, bytes)); \
        if (begun)                                                                                           \
            st_counted_copy(in, from, out, NULL, begun, sent);                                               \
        return sent;                                                                                         \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

ST_WRAP(ssize_t, splice, int in, off64_t *from, int out, off64_t *to, size_t bytes, unsigned flags)
{
    ssize_t (*next)(int, off64_t *, int, off64_t *, size_t, unsigned) = ST_NEXT(splice);
    uint64_t begun = st_copy_begun(in, out);
    ssize_t moved_bytes = next ? next(in, from, out, to, bytes, flags)
                               : result_of(st_sys(__NR_splice, in, from, out, to, bytes, flags));
    if (begun)
        st_counted_copy(in, from, out, to, begun, moved_bytes);
    return moved_bytes;
}

/* ---- Mapping: the kernel loads pages without calls. */

#define MAPS(name)                                                                                              \
    ST_WRAP(void *, name, void *at, size_t bytes, int protection, int flags, int descriptor, off_t from)      \
    {                                                                                                           \
        void *(*next)(void *, size_t, int, int, int, off_t) = ST_NEXT(name);                                  \
        void *mapped = next ? next(at, bytes, protection, flags, descriptor, from)                              \
                            : (void *)result_of(st_sys(__NR_mmap, at, bytes, protection, flags, descriptor, from)); \
        if (mapped != MAP_FAILED && !(flags & MAP_ANONYMOUS)) {                                                 \
            struct st_io *io = st_io_of(st_kind_of(descriptor));                                                \
            if (io) {                                                                                           \
                st_add(&io->map_calls, 1);                                                                      \
                st_add(&io->mapped_bytes, bytes);                                                               \
            }                                                                                                   \
        }                                                                                                       \
        return mapped;                                                                                          \
    }
MAPS(mmap)
MAPS(mmap64)

/* ---- Numbers that mean another file from here on */

#define CLOSES(name)                                                                             \
    ST_WRAP(int, name, int descriptor)                                                         \
    {                                                                                            \
        int (*next)(int) = ST_NEXT(name);                                                      \
        st_kind_forget(descriptor);                                                              \
        return next ? next(descriptor) : (int)result_of(st_sys(__NR_close, descriptor));        \
    }
CLOSES(close)
CLOSES(__close)

static void forget_range(unsigned first, unsigned last)
{
    unsigned end = st_counting ? ST_KINDS : ST_DESCRIPTORS;
    for (unsigned at = first; at <= last && at < end; at++)
        st_kind_forget((int)at);
}

#ifndef __NR_close_range
#define __NR_close_range 436
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2
#endif
#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4
#endif
ST_WRAP(int, close_range, unsigned first, unsigned last, int flags)
{
    int (*next)(unsigned, unsigned, int) = ST_NEXT(close_range);
    if (flags & CLOSE_RANGE_UNSHARE)
        st_base_never(); /* like unshare(CLONE_FILES) */
    if (!(flags & CLOSE_RANGE_CLOEXEC)) /* which closes no descriptor now */
        forget_range(first, last);
    return next ? next(first, last, flags) : (int)result_of(st_sys(__NR_close_range, first, last, flags));
}

ST_WRAP(void, closefrom, int first)
{
    void (*next)(int) = ST_NEXT(closefrom);
    forget_range(first < 0 ? 0 : (unsigned)first, ~0u);
    if (next)
        next(first);
    else
        st_sys(__NR_close_range, first < 0 ? 0 : first, ~0u, 0);
}

#define DUPLICATES(name)                                                                          \
    ST_WRAP(int, name, int from, int to)                                                          \
    {                                                                                             \
        int (*next)(int, int) = ST_NEXT(name);                                                    \
        unsigned stream = from != to ? st_streams_on(to) : ST_NO_STREAM;                          \
        if (from != to)                                                                           \
            st_kind_forget(to);                                                                   \
        int result = next ? next(from, to) : (int)result_of(st_sys(__NR_dup3, from, to, 0));      \
        st_base_forget(to); /* a thread may have cached it in between */                                            \
        if (stream != ST_NO_STREAM)                                                               \
            st_streams_again(stream, to);                                                         \
        return result;                                                                            \
    }
DUPLICATES(dup2)
DUPLICATES(__dup2)

ST_WRAP(int, dup3, int from, int to, int flags)
{
    int (*next)(int, int, int) = ST_NEXT(dup3);
    unsigned stream = from != to ? st_streams_on(to) : ST_NO_STREAM;
    if (from != to)
        st_kind_forget(to);
    int result = next ? next(from, to, flags) : (int)result_of(st_sys(__NR_dup3, from, to, flags));
    st_base_forget(to);
    if (stream != ST_NO_STREAM)
        st_streams_again(stream, to);
    return result;
}

/* ---- A position that the program moves beneath a stream */

#define LSEEKS(name)                                                                                         \
    ST_WRAP(off_t, name, int descriptor, off_t at, int whence)                                             \
    {                                                                                                        \
        off_t (*next)(int, off_t, int) = ST_NEXT(name);                                                    \
        long before = -1;                                                                                    \
        if (st_unlikely(st_has_stream(descriptor)) && st_on(ST_ON_INDEX))                                    \
            before = st_sys(__NR_lseek, descriptor, 0, SEEK_CUR);                                            \
        off_t now = next ? next(descriptor, at, whence) : result_of(st_sys(__NR_lseek, descriptor, at, whence)); \
        if (before >= 0 && now >= 0 && now != before)                                                        \
            st_streams_shifted(descriptor, now - before);                                                    \
        return now;                                                                                          \
    }
LSEEKS(lseek)
LSEEKS(lseek64)
