/* stdio reads and writes inside libc, unseen. A stream moved as many bytes as its descriptor's position moved, minus
 * seeks, plus data that waits to be written. The shim checks this when the stream is closed or moved, or when the
 * program ends.
 *
 * Dangers avoided: counting twice what a program itself reads or writes on the descriptor beneath a stream; touching a
 * FILE that another thread closes. A FILE that is neither the caller's own argument nor one of libc's three is read
 * through /proc/self/mem, which returns an error for unmapped memory. The result counts only if the stream is still the
 * same afterwards.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <sys/mman.h>
#include <sys/types.h>

#define STREAMS ST_STANDARD
#define ALL_STREAMS (STREAMS + 3u)
#define PROBES 8u
#define TAKEN ((FILE *)1)
#define APPENDING 0x1000 /* libc's own: flushed to the file's end, at any position */

struct stream {
    FILE *file; /* NULL: free; TAKEN: about to be in use */
    uint32_t turn; /* grows each time that another stream uses it */
    int descriptor;
    bool appends;
    uint64_t passed;   /* by read and write on the descriptor since `position` */
    /* Everything up to here is counted: the descriptor's position, and the position at which a writing program
     * continues (if it appends: the file's end). Between two seeks a stream is only read or only written, as the
     * standard requires.
     */
    int64_t position, logical;
    int64_t buffered; /* at the begin of a seek: libc has the file's content from here to `position` */
    bool inherited;   /* from a parent, or by a child: its position moves for all of them */
    int64_t seen;     /* the part of the family's total that is included */
};
static struct stream streams[ALL_STREAMS];
static struct stream *const standard = streams + STREAMS; /* the last three, whose FILEs are never freed */
static uint32_t open_streams; /* the number of the other streams */
/* For each stream, what a process and its fork children have accounted for, in a page that they share; NULL: none yet. */
static int64_t *family;

/* For each descriptor: its stream's number + 1. A stream's facts about a descriptor without this mark are void. */
#define DIRECT ST_STREAM_DIRECT /* no stream, and the program has moved its position */
uint8_t st_stream_marks[ST_KINDS];

static void mark(int descriptor, unsigned what)
{
    if ((unsigned)descriptor < ST_KINDS)
        __atomic_store_n(&st_stream_marks[descriptor], (uint8_t)what, __ATOMIC_RELAXED);
}

static unsigned marked(int descriptor)
{
    return (unsigned)descriptor < ST_KINDS ? __atomic_load_n(&st_stream_marks[descriptor], __ATOMIC_RELAXED) : 0;
}

static bool has_descriptor(const struct stream *stream)
{
    return marked(stream->descriptor) == (unsigned)(stream - streams) + 1;
}

static struct stream *stream_on(int descriptor)
{
    unsigned which = marked(descriptor);
    return which && which <= ALL_STREAMS ? &streams[which - 1] : NULL;
}

/* (In a sandbox the shim may make no system call.) */
static int64_t position_of(int descriptor)
{
    if (!st_on(ST_ON_INDEX))
        return -1;
    long at = st_sys(__NR_lseek, descriptor, 0, SEEK_CUR);
    return st_sys_failed(at) ? -1 : at;
}

/* A vfork child has its parent's memory and its own descriptors. */
static bool is_own(void)
{
    int pid;
    return st_self(&pid) == ST_SELF_OWN;
}

static struct stream *find(FILE *file)
{
    unsigned from = (unsigned)((uintptr_t)file >> 4);
    for (unsigned which = 0; which < 3; which++)
        if (standard[which].file == file)
            return &standard[which];
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct stream *stream = &streams[(from + probe) % STREAMS];
        if (__atomic_load_n(&stream->file, __ATOMIC_ACQUIRE) == file)
            return stream;
    }
    return NULL;
}

/* A stream to fill, which no thread reads before `publish`. */
static struct stream *claim(FILE *file)
{
    unsigned from = (unsigned)((uintptr_t)file >> 4);
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct stream *stream = &streams[(from + probe) % STREAMS];
        FILE *free = NULL;
        if (__atomic_compare_exchange_n(&stream->file, &free, TAKEN, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            __atomic_fetch_add(&open_streams, 1, __ATOMIC_RELAXED);
            return stream;
        }
    }
    return NULL;
}

static void publish(struct stream *stream, FILE *file)
{
    __atomic_fetch_add(&stream->turn, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&stream->file, file, __ATOMIC_RELEASE);
}

static int64_t of_family(const struct stream *stream)
{
    return family ? __atomic_load_n(&family[stream - streams], __ATOMIC_RELAXED) : 0;
}

/* Other family members must subtract the bytes that are accounted for here from their position's movement. */
static void tell_family(struct stream *stream, int64_t bytes)
{
    if (!stream->inherited || !family)
        return;
    __atomic_fetch_add(&family[stream - streams], bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&stream->seen, bytes, __ATOMIC_RELAXED);
}

/* ---- The state of a FILE */

struct look {
    bool writes, used;
    int64_t pending; /* waits to be written */
    int64_t ahead;   /* negative: was read ahead, and is returned before the next write */
};

/* `file` may be a copy, and of anything: its pointers are not followed unless it is the program's own. */
static struct look look_at(FILE *file, bool own)
{
    int64_t room = file->_IO_buf_end - file->_IO_buf_base, pending = file->_IO_write_ptr - file->_IO_write_base;
    int64_t ahead = file->_flags & APPENDING ? 0 : file->_IO_write_base - file->_IO_read_end;
    struct look look = {.writes = __fwriting(file) != 0, .used = room != 0 || file->_mode > 0};
    if (look.writes && file->_mode > 0)
        look.pending = own ? (int64_t)__fpending(file) : 0;
    else if (look.writes && pending > 0 && pending <= room)
        look.pending = pending;
    if (look.pending && file->_mode <= 0 && ahead < 0 && ahead >= -room && __freadable(file))
        look.ahead = ahead;
    return look;
}

static int open_memory(void)
{
    if (!st_on(ST_ON_INDEX))
        return -1;
    long opened = st_sys(__NR_openat, AT_FDCWD, "/proc/self/mem", O_RDONLY | O_CLOEXEC, 0, 0, ST_OWN_CALL);
    return st_sys_failed(opened) ? -1 : (int)opened;
}

static bool copied(const struct stream *stream, int memory, FILE *copy)
{
    FILE *file = __atomic_load_n(&stream->file, __ATOMIC_ACQUIRE);
    return file && file != TAKEN && memory >= 0 &&
           st_sys(__NR_pread64, memory, copy, sizeof *copy, file) == (long)sizeof *copy &&
           copy->_fileno == stream->descriptor;
}

/* Counts up to now; `flushed`: includes data that waits to be written. `own`: the caller's argument, or NULL. */
static void account(struct stream *stream, FILE *own, int memory, bool flushed)
{
    FILE *file = __atomic_load_n(&stream->file, __ATOMIC_ACQUIRE), copy;
    uint32_t turn = __atomic_load_n(&stream->turn, __ATOMIC_ACQUIRE);
    if (!file || file == TAKEN || !has_descriptor(stream))
        return;
    if (!own && stream >= standard)
        own = file;
    if (!own && !copied(stream, memory, &copy))
        return;
    struct look look = look_at(own ? own : &copy, own != NULL);
    struct st_io *io = st_io_of(st_kind_of(stream->descriptor));
    int64_t now = io ? position_of(stream->descriptor) : -1;
    if (now < 0 || !has_descriptor(stream) || __atomic_load_n(&stream->file, __ATOMIC_ACQUIRE) != file ||
        __atomic_load_n(&stream->turn, __ATOMIC_ACQUIRE) != turn)
        return;
    /* An appending stream has its descriptor at any position until it writes. */
    bool at_end = look.writes && stream->appends && now == stream->position;
    int64_t to = (at_end ? stream->logical : now + look.ahead) + (flushed ? look.pending : 0);
    int64_t passed = (int64_t)__atomic_load_n(&stream->passed, __ATOMIC_RELAXED);
    int64_t others = stream->inherited ? of_family(stream) - stream->seen : 0;
    int64_t bytes = to - (look.writes ? stream->logical : stream->position) - passed - others;
    if (bytes < 0 && stream->inherited)
        return; /* another process of the family is ending, and has accounted for the data that it is about to write */
    __atomic_fetch_sub(&stream->passed, (uint64_t)passed, __ATOMIC_RELAXED);
    __atomic_fetch_add(&stream->seen, others, __ATOMIC_RELAXED);
    /* A standard stream without a buffer was never used: other streams share its descriptor. */
    bool used = look.used || stream < standard;
    stream->position = look.writes && stream->appends ? now : to;
    stream->logical = look.writes || !stream->appends ? to : stream->logical;
    if (bytes <= 0 || !used)
        return;
    tell_family(stream, bytes);
    st_add(look.writes ? &io->write_bytes : &io->read_bytes, (uint64_t)bytes);
    st_add(look.writes ? &io->stream_write_bytes : &io->stream_read_bytes, (uint64_t)bytes);
}

static void account_all(bool flushed)
{
    bool others = __atomic_load_n(&open_streams, __ATOMIC_RELAXED) != 0;
    int memory = others ? open_memory() : -1;
    for (unsigned at = others ? 0 : STREAMS; at < ALL_STREAMS; at++)
        account(&streams[at], NULL, memory, flushed);
    if (memory >= 0)
        st_sys_close(memory);
}

static int64_t end_of(int descriptor, int64_t otherwise)
{
    struct stat stat;
    return st_sys_failed(st_sys_fstat(descriptor, &stat)) ? otherwise : stat.st_size;
}

/* Counts its movements from here on. */
static void begin(struct stream *stream, int descriptor)
{
    int64_t now = position_of(descriptor);
    long flags = now < 0 ? 0 : st_sys(__NR_fcntl, descriptor, F_GETFL);
    stream->appends = !st_sys_failed(flags) && (flags & O_APPEND);
    stream->descriptor = descriptor;
    stream->passed = 0;
    stream->seen = of_family(stream);
    stream->position = now;
    stream->logical = stream->appends ? end_of(descriptor, now) : now;
    mark(descriptor, (unsigned)(stream - streams) + 1);
}

static void account_on(int descriptor)
{
    struct stream *stream = stream_on(descriptor);
    int memory = stream && stream < standard ? open_memory() : -1;
    if (stream)
        account(stream, NULL, memory, false);
    if (memory >= 0)
        st_sys_close(memory);
}

void st_stream_opened(FILE *file, int descriptor)
{
    if (!st_counting || !file || st_kind_of(descriptor) < ST_KIND_OURS || !is_own())
        return;
    struct stream *stream = find(file);
    account_on(descriptor);
    if (!stream && !(stream = claim(file))) {
        /* At its close it is known only if it began at the front. */
        mark(descriptor, position_of(descriptor) ? DIRECT : 0);
        return;
    }
    stream->inherited = false;
    begin(stream, descriptor);
    publish(stream, file);
}

static int fileno_of(FILE *file)
{
    int before = errno, descriptor = fileno(file);
    errno = before;
    return descriptor;
}

/* A stream whose open was not seen: it began at the front, and only stdio has moved it. */
static struct stream *known(FILE *file)
{
    struct stream *stream = find(file);
    if (stream)
        return stream;
    int descriptor = fileno_of(file);
    if (descriptor < 0 || st_kind_of(descriptor) < ST_KIND_OURS || marked(descriptor) || !is_own() ||
        !(stream = claim(file)))
        return NULL;
    stream->inherited = false;
    begin(stream, descriptor);
    if (!stream->appends)
        stream->position = stream->logical = 0;
    publish(stream, file);
    return stream;
}

void st_stream_closing(FILE *file)
{
    if (!st_counting && file)
        st_base_forget(fileno_of(file));
    if (!st_counting || !file)
        return;
    struct stream *stream = known(file);
    int descriptor = fileno_of(file);
    if (stream && is_own()) {
        account(stream, file, -1, true);
        if (has_descriptor(stream))
            mark(stream->descriptor, 0);
        if (stream < standard) {
            __atomic_store_n(&stream->file, NULL, __ATOMIC_RELEASE);
            __atomic_fetch_sub(&open_streams, 1, __ATOMIC_RELAXED);
        }
    }
    if (descriptor >= 0)
        st_kind_forget(descriptor);
}

static void begin_standard(unsigned number, FILE *file)
{
    standard[number].descriptor = (int)number;
    if (st_kind_of((int)number) >= ST_KIND_OURS)
        begin(&standard[number], (int)number);
    publish(&standard[number], file);
}

void st_streams_start(void)
{
    begin_standard(0, stdin);
    begin_standard(1, stdout);
    begin_standard(2, stderr);
}

void st_streams_rebase(void)
{
    for (unsigned at = 0; at < ALL_STREAMS; at++) {
        struct stream *stream = &streams[at];
        if (has_descriptor(stream) && stream->inherited)
            stream->passed = 0;
        else if (has_descriptor(stream))
            begin(stream, stream->descriptor);
    }
}

void st_streams_end(bool flushed)
{
    if (is_own())
        account_all(flushed);
}

void st_streams_leave(void)
{
    if (st_counting && is_own())
        account_all(false);
}

unsigned st_streams_on(int descriptor)
{
    struct stream *stream = stream_on(descriptor);
    if (stream)
        return (unsigned)(stream - streams);
    return (unsigned)descriptor <= 2 ? STREAMS + (unsigned)descriptor : ST_NO_STREAM;
}

void st_streams_again(unsigned which, int descriptor)
{
    struct stream *stream = &streams[which];
    if (!st_counting || st_kind_of(descriptor) < ST_KIND_OURS || !is_own())
        return;
    FILE *file = __atomic_load_n(&stream->file, __ATOMIC_ACQUIRE);
    if (!file || file == TAKEN || (stream < standard && stream->descriptor != descriptor))
        return;
    stream->inherited = false;
    begin(stream, descriptor);
}

void st_streams_over(int descriptor, bool still_open)
{
    if (still_open && stream_on(descriptor) && is_own())
        account_on(descriptor);
    if (marked(descriptor))
        mark(descriptor, 0);
}

void st_streams_passed(int descriptor, uint64_t bytes)
{
    struct stream *stream = stream_on(descriptor);
    if (stream) {
        __atomic_fetch_add(&stream->passed, bytes, __ATOMIC_RELAXED);
        tell_family(stream, (int64_t)bytes);
    } else if (!marked(descriptor)) {
        mark(descriptor, DIRECT);
    }
}

void st_streams_shifted(int descriptor, int64_t by)
{
    struct stream *stream = stream_on(descriptor);
    if (!stream)
        return;
    tell_family(stream, by);
    __atomic_fetch_add(&stream->position, by, __ATOMIC_RELAXED);
    if (!stream->appends)
        __atomic_fetch_add(&stream->logical, by, __ATOMIC_RELAXED);
}

/* ---- The functions that programs call. */

ST_WRAP(int, fclose, FILE *file)
{
    int (*next)(FILE *) = ST_NEXT(fclose);
    st_stream_closing(file);
    if (next)
        return next(file);
    errno = ENOSYS;
    return EOF;
}

ST_WRAP(FILE *, fdopen, int descriptor, const char *mode)
{
    FILE *(*next)(int, const char *) = ST_NEXT(fdopen);
    FILE *file = NULL;
    if (next)
        file = next(descriptor, mode);
    else
        errno = ENOSYS;
    st_stream_opened(file, descriptor);
    return file;
}

/* A seek to a position whose content is in the buffer moves nothing. Any other seek goes to the beginning of a block,
 * and reads at least up to the program's target.
 */
static struct stream *seeking(FILE *file)
{
    struct stream *stream = st_counting && file ? known(file) : NULL;
    if (!stream || !has_descriptor(stream))
        return NULL;
    account(stream, file, -1, true);
    /* (Written data was flushed, and not kept; before its first seek libc does not know its position.) */
    bool has = !__fwriting(file) && file->_IO_read_base && file->_offset >= 0;
    stream->buffered = stream->position - (has ? file->_IO_read_end - file->_IO_buf_base : 0);
    return stream;
}

/* The position at which the program continues, or -1. It does not wait for another holder of the stream's lock. */
static int64_t logical_of(FILE *file)
{
    int before = errno;
    int64_t at = -1;
    if (ftrylockfile(file) == 0) {
        at = ftello(file);
        funlockfile(file);
    }
    errno = before;
    return at;
}

static void sought(struct stream *stream, FILE *file)
{
    int64_t now = stream ? position_of(stream->descriptor) : -1;
    if (now < 0)
        return;
    int64_t logical = logical_of(file);
    struct st_io *io = st_io_of(st_kind_of(stream->descriptor));
    bool had_it = stream->buffered < stream->position && logical >= stream->buffered && logical <= stream->position;
    int64_t read = file->_IO_read_end - file->_IO_read_base, block = (int64_t)__fbufsize(file);
    struct stat stat;
    /* Beyond the file's end libc has read in vain, and discarded that. */
    if (io && !had_it && read == 0 && logical > 0 && block > 0 && logical % block && __freadable(file) &&
        !st_sys_failed(st_sys_fstat(stream->descriptor, &stat)) && stat.st_size < logical)
        read = stat.st_size - (logical - logical % block);
    if (io && logical >= 0 && !had_it && read > 0) {
        st_add(&io->read_bytes, (uint64_t)read);
        st_add(&io->stream_read_bytes, (uint64_t)read);
    }
    tell_family(stream, now - stream->position);
    stream->position = now;
    stream->logical = stream->appends ? end_of(stream->descriptor, now) : logical >= 0 ? logical : now;
}

#define SEEKS(result, name, failure, TYPES, PARAMETERS, ARGUMENTS)                    \
    ST_WRAP(result, name, FILE *file, PARAMETERS)                                   \
    {                                                                                  \
        result (*next)(FILE *, TYPES) = ST_NEXT(name);                               \
        struct stream *stream = seeking(file);                                         \
        if (!next) {                                                                   \
            errno = ENOSYS;                                                            \
            return failure;                                                            \
        }                                                                              \
        result answer = next(file, ARGUMENTS);                                         \
        sought(stream, file);                                                                \
        return answer;                                                                 \
    }
#define LIST(...) __VA_ARGS__
SEEKS(int, fseek, -1, LIST(long, int), LIST(long at, int whence), LIST(at, whence))
SEEKS(int, fseeko, -1, LIST(off_t, int), LIST(off_t at, int whence), LIST(at, whence))
SEEKS(int, fseeko64, -1, LIST(off64_t, int), LIST(off64_t at, int whence), LIST(at, whence))
SEEKS(int, fsetpos, -1, const void *, const void *at, at)
SEEKS(int, fsetpos64, -1, const void *, const void *at, at)

ST_WRAP(void, rewind, FILE *file)
{
    void (*next)(FILE *) = ST_NEXT(rewind);
    struct stream *stream = seeking(file);
    if (next)
        next(file);
    sought(stream, file);
}

/* ---- Children have the same streams and descriptors. Fork children account for theirs together with the parent. What
 * later programs of a child, or spawned programs, moved on standard streams between fork and wait is theirs.
 */

static void share(void)
{
    int64_t *none = NULL;
    if (__atomic_load_n(&family, __ATOMIC_ACQUIRE))
        return;
    long page = st_sys(__NR_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!st_sys_failed(page) && !__atomic_compare_exchange_n(&family, &none, (int64_t *)page, false, __ATOMIC_ACQ_REL,
                                                             __ATOMIC_ACQUIRE))
        st_sys(__NR_munmap, page, 4096);
}

void st_streams_forking(void)
{
    bool any = false;
    for (unsigned at = 0; st_counting && at < ALL_STREAMS; at++)
        any = any || has_descriptor(&streams[at]);
    if (!any || !is_own())
        return;
    account_all(false);
    share();
    for (unsigned at = 0; at < ALL_STREAMS; at++) {
        if (has_descriptor(&streams[at]) && !streams[at].inherited) {
            streams[at].seen = of_family(&streams[at]);
            streams[at].inherited = true;
        }
    }
}

static void waited(void)
{
    for (unsigned which = 0; st_counting && which < 3; which++)
        if (has_descriptor(&standard[which]) && is_own())
            begin(&standard[which], (int)which);
}

#define WAITS(name, TYPES, PARAMETERS, ARGUMENTS)             \
    ST_WRAP(pid_t, name, PARAMETERS)                        \
    {                                                          \
        pid_t (*next)(TYPES) = ST_NEXT(name);                \
        pid_t child = -1;                                      \
        if (next)                                              \
            child = next(ARGUMENTS);                           \
        else                                                   \
            errno = ENOSYS;                                    \
        if (child > 0)                                         \
            waited();                                          \
        return child;                                          \
    }
WAITS(wait, void *, void *status, status)
WAITS(waitpid, LIST(pid_t, void *, int), LIST(pid_t pid, void *status, int options), LIST(pid, status, options))
WAITS(wait3, LIST(void *, int, void *), LIST(void *status, int options, void *usage), LIST(status, options, usage))
WAITS(wait4, LIST(pid_t, void *, int, void *), LIST(pid_t pid, void *status, int options, void *usage),
      LIST(pid, status, options, usage))

ST_WRAP(int, system, const char *line)
{
    int (*next)(const char *) = ST_NEXT(system);
    st_streams_forking();
    if (!next) {
        errno = ENOSYS;
        return -1;
    }
    int status = next(line);
    int before = errno;
    waited();
    errno = before;
    return status;
}
