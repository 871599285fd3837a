/* Declarations that the shim's files share. None is a libc symbol; none of the functions allocates, locks or prints.
 * Danger avoided: two meanings of one thing in two files. catalogue.md says which libc function is in which file.
 */
#ifndef SURGETANK_SHIM_H
#define SURGETANK_SHIM_H

#include <stddef.h>

#include "abi.h"
#include "counts.h"
#include "next.h"
#include "sys.h"

#define ST_DOMAINS_MAX 4u
#define ST_PASS (-2)   /* make the call as if there were no shim */
/* paths built here: the buffers are on stacks that may be a signal's, so longer paths are left to the mount */
#define ST_TEXT 1024u
#define ST_CHAIN 24u
#define ST_DESCRIPTORS 1024

#define st_likely(x) __builtin_expect(!!(x), 1)
#define st_unlikely(x) __builtin_expect(!!(x), 0)

/* A function under libc's name, visible to programs. The shim itself does not call it, so its C name is never written. */
#define ST_WRAP(result, name, ...)                                                                   \
    result st_wrap_##name(__VA_ARGS__) __asm__(#name) __attribute__((visibility("default")));      \
    result st_wrap_##name(__VA_ARGS__)

/* ---- State of the process (start.c); `on` only ever loses bits after the constructor. */

#define ST_ON_INDEX 1u    /* look-ups of paths, and requests to the agent */
#define ST_ON_PATHS 2u    /* paths below the mount mean the same here as to the agent */
#define ST_ON_IDENTITY 4u /* descriptors of plain files are shown as the mount's */
#define ST_ON_DEAD 8u     /* a mount is absent: its paths are refused */

struct st_domain {
    const struct st_header *index; /* NULL: not usable, or dead */
    uint64_t mapped_bytes;
    uint32_t mount_bytes;
    uint32_t socket_bytes;
    bool dead;
    const char *mount;  /* no slash at its end */
    const char *socket;
    const char *index_path;
    uint32_t run; /* its number; 0: not known */
};

struct st_process {
    uint32_t on;
    uint32_t domain_count;
    bool report;
    bool writes; /* this program may open for writing through the agent */
    bool wrote;  /* it has done so */
    struct st_domain domains[ST_DOMAINS_MAX];
};
extern struct st_process st_process;

static inline uint32_t st_on(uint32_t bits)
{
    return __atomic_load_n(&st_process.on, __ATOMIC_RELAXED) & bits;
}

void st_anchor_end(void);
static inline void st_off(uint32_t bits)
{
    __atomic_fetch_and(&st_process.on, ~bits, __ATOMIC_RELAXED);
    if (bits & ST_ON_INDEX)
        st_anchor_end();
}

/* ---- Memory that a program passes (memory.c): is it mapped? Checked before the shim reads it. */

static inline uintptr_t st_this_thread(void)
{
    uintptr_t self;
#if defined(__x86_64__)
    __asm__("movq %%fs:0, %0" : "=r"(self));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(self));
#endif
    return self;
}

/* attributes.c: a POSIX ACL, which the mount refuses. */
bool st_is_acl(const char *name);

void st_memory_start(void);
extern uintptr_t st_stack_end, st_heap_begin, st_program, st_program_bytes;
extern void *__curbrk __attribute__((weak)); /* libc's: the end of the heap */
static inline uintptr_t st_break(void)
{
    return &__curbrk ? (uintptr_t)__curbrk : 0;
}
#define ST_STACK_MAX (64u << 20) /* less than the kernel leaves free below the first thread's stack */
#define ST_MEMORY_MIN 4096u      /* no memory is below */
/* Without a call: on the stack in use, if it is the first thread's, or in the heap, with room for a path after it. */
static inline bool st_surely_there(uintptr_t at, size_t bytes)
{
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    if (st_stack_end - here < ST_STACK_MAX && at >= here && at < st_stack_end && bytes <= st_stack_end - at)
        return true;
    uintptr_t end = st_break();
    return at >= __atomic_load_n(&st_heap_begin, __ATOMIC_RELAXED) && at < end && end - at > bytes + 4096;
}
bool st_text_slow(const char *text);
bool st_memory_slow(const void *memory, size_t bytes, bool to_write);
static inline bool st_is_text(const char *text)
{
    return st_likely(st_surely_there((uintptr_t)text, 1)) || (uintptr_t)text - st_program < st_program_bytes ||
           st_text_slow(text);
}
static inline bool st_readable(const void *memory, size_t bytes)
{
    return st_likely(st_surely_there((uintptr_t)memory, bytes)) || st_memory_slow(memory, bytes, false);
}
static inline bool st_writable(const void *memory, size_t bytes)
{
    return st_likely(st_surely_there((uintptr_t)memory, bytes)) || st_memory_slow(memory, bytes, true);
}
/* A path as the program passed it; an unreadable one becomes an address for which the kernel returns EFAULT, too. Every
 * wrapper begins with this, or with `st_through`.
 */
#define ST_NO_MEMORY ((const char *)1)
static inline const char *st_path(const char *path)
{
    if (st_likely(!st_on(~0u)) || (uintptr_t)path < ST_MEMORY_MIN)
        return path;
    return st_likely(st_is_text(path)) ? path : ST_NO_MEMORY;
}

/* ---- Counters for SURGETANK_REPORT (report.c). */

enum st_count { ST_OPEN_INDEX, ST_OPEN_AGENT, ST_OPEN_DELEGATED, ST_OPEN_LEFT, ST_STAT_INDEX, ST_STAT_LEFT, ST_COUNTS };
extern uint64_t st_counts[ST_COUNTS];

static inline void st_count(enum st_count which)
{
    if (st_unlikely(st_process.report))
        __atomic_fetch_add(&st_counts[which], 1, __ATOMIC_RELAXED);
}

/* ---- Which process is this (self.c)? A vfork child has its parent's memory; a fork child has a wiped page. */

enum st_self { ST_SELF_OWN, ST_SELF_VFORKED, ST_SELF_UNKNOWN };
void st_self_start(void);
void st_self_forked(void); /* in the child of a fork through the wrapper */
enum st_self st_self(int *pid);
/* Without a system call, if no thread has called vfork. A child of a bare system call counts as its parent here. */
bool st_is_vforked(void);
/* Certain: neither in a vfork child, nor in the child of an unseen fork. Without a system call, as above. */
bool st_owns_memory(void);

#define ST_UMASK_UNKNOWN (~UINT32_C(0))
uint32_t st_umask(void); /* ST_UMASK_UNKNOWN: leave the call to the mount */
void st_umask_start(void);

/* ---- The start of relative paths (base.c). */

struct st_base {
    const struct st_domain *domain;
    uint32_t record;
    uint64_t id;
};
bool st_base_known_outside(int dirfd); /* cheap; true: leave the call to the mount */
bool st_base_of(int dirfd, struct st_base *out);
void st_base_moving(void); /* around chdir */
void st_base_moved(void);
void st_base_never(void); /* they may change unseen: never trust cached values again */

void st_base_forked(void); /* in the child of a fork through the wrapper */

/* The cached facts about a directory's descriptor (base.c explains them). */
struct st_known {
    uint64_t turn;   /* grows when the number may mean another file */
    uint64_t filled; /* the turn of these values + 1; 0: none */
    uint64_t id;
    uint32_t record;
    uint16_t domain;
    uint16_t asking; /* number of threads that are asking */
};
extern struct st_known st_known[ST_DESCRIPTORS];

/* ---- A directory of a tier to open from (anchor.c): turn and number of its descriptor; number 0: there is none. */
extern uint64_t st_anchor_word;
#define ST_ANCHOR_BITS 16
#define ST_ANCHOR_NUMBER UINT64_C(0xffff)
struct st_anchor {
    uint64_t word;
    uint32_t moves;
    int number;
    char name[ST_NAME_BYTES_MAX + 1];
};
struct st_place;
/* True: the file is at `number` + `name`, if that can be opened, and `still` is true afterwards. */
bool st_anchor_of(const struct st_place *place, struct st_anchor *out);
bool st_anchor_still(const struct st_place *place, const struct st_anchor *anchor);
void st_anchor_forked(void);
/* opened by its path, which is cut: the next files may be there, too */
void st_anchor_opened(const struct st_place *place, char *path);
void st_anchor_lost(int descriptor);

/* The number is about to mean another file, or means it already. */
static inline void st_base_forget(int descriptor)
{
    if (st_unlikely((__atomic_load_n(&st_anchor_word, __ATOMIC_RELAXED) & ST_ANCHOR_NUMBER) == (unsigned)descriptor))
        st_anchor_lost(descriptor);
    struct st_known *known = &st_known[(unsigned)descriptor % ST_DESCRIPTORS];
    if (st_unlikely(__atomic_load_n(&known->filled, __ATOMIC_RELAXED) || __atomic_load_n(&known->asking, __ATOMIC_RELAXED)) &&
        (unsigned)descriptor < ST_DESCRIPTORS)
        __atomic_fetch_add(&known->turn, 1, __ATOMIC_SEQ_CST);
}

/* ---- Counting (counts.c; streams.c for stdio). For each descriptor: which file is it of? */

#define ST_KINDS 65536u /* higher descriptors are not counted */
#define ST_KIND_FOREIGN 1u
#define ST_KIND_OURS 2u /* + domain * ST_IOS + ST_IO_PLAIN or ST_IO_MOUNT; 0: not known yet */
extern uint8_t st_kinds[ST_KINDS];
extern bool st_counting; /* becomes true in the constructor only, and stays so */
void st_counts_map(unsigned domain, const char *path);
void st_counts_start(char *const *arguments);
void st_counts_forked(void); /* in the child of a fork through the wrapper */
void st_counts_end(bool flushed); /* the process is about to end; `flushed`: data that waits in streams will be written */
void st_counts_total(struct st_io *out);
int st_counted_open(const struct st_domain *domain, int descriptor, int flags); /* returns the descriptor */
/* The begin of a syncing call; 0: the file is not counted. */
uint64_t st_sync_begins(int descriptor);
void st_counted_sync(int descriptor, uint64_t begun_ns);
unsigned st_kind_learn(int descriptor);
void st_kind_over(int descriptor, bool still_open);
struct st_io *st_io_of(unsigned kind); /* NULL: not counted */
uint64_t st_now_ns(void);

static inline unsigned st_kind_of(int descriptor)
{
    if (!st_counting || (unsigned)descriptor >= ST_KINDS)
        return ST_KIND_FOREIGN;
    unsigned kind = __atomic_load_n(&st_kinds[descriptor], __ATOMIC_RELAXED);
    return st_likely(kind) ? kind : st_kind_learn(descriptor);
}

/* The number is about to mean another file. */
static inline void st_kind_forget(int descriptor)
{
    st_base_forget(descriptor);
    unsigned kind = (unsigned)descriptor < ST_KINDS ? __atomic_load_n(&st_kinds[descriptor], __ATOMIC_RELAXED) : 0;
    if (st_unlikely(kind >= ST_KIND_OURS))
        st_kind_over(descriptor, true);
    else if (kind)
        __atomic_store_n(&st_kinds[descriptor], 0, __ATOMIC_RELAXED);
}

static inline void st_add(uint64_t *to, uint64_t what)
{
    __atomic_fetch_add(to, what, __ATOMIC_RELAXED);
}

/* Around calls that move bytes from one descriptor to another; 0: not counted. */
uint64_t st_copy_begun(int in, int out);
/* A place: the pointer to the caller's offset; NULL: the descriptor's position, which has moved. */
void st_counted_copy(int in, const void *from_place, int out, const void *to_place, uint64_t begun, long bytes);

struct _IO_FILE;
void st_streams_start(void);
void st_streams_rebase(void); /* in a fork child: counts from here on are its own */
void st_streams_end(bool flushed);
void st_streams_forking(void);
void st_streams_leave(void); /* before exec, which loses data that waits to be written */
void st_streams_passed(int descriptor, uint64_t bytes); /* by read or write on it, not by stdio */
void st_streams_shifted(int descriptor, int64_t by);    /* its position, by lseek */
void st_streams_over(int descriptor, bool still_open);  /* its number is about to mean, or means, another file */
/* Around calls that put another file under a stream, which continues there; ST_NO_STREAM: there is none. */
#define ST_NO_STREAM (~0u)
#define ST_STANDARD 128u /* the first of the standard streams */
unsigned st_streams_on(int descriptor);
void st_streams_again(unsigned which, int descriptor);
#define ST_STREAM_DIRECT 255u
extern uint8_t st_stream_marks[ST_KINDS];
static inline bool st_has_stream(int descriptor)
{
    unsigned mark = (unsigned)descriptor < ST_KINDS ? __atomic_load_n(&st_stream_marks[descriptor], __ATOMIC_RELAXED) : 0;
    return mark && mark != ST_STREAM_DIRECT;
}
void st_stream_opened(struct _IO_FILE *stream, int descriptor);
void st_stream_closing(struct _IO_FILE *stream);

extern uint8_t st_hints[ST_DESCRIPTORS]; /* 1: this directory was outside of all mounts */
/* A call that was passed on returned this descriptor: cached facts about its number are void. */
static inline int st_fresh(int descriptor)
{
    st_base_forget(descriptor);
    if ((unsigned)descriptor < ST_DESCRIPTORS && __atomic_load_n(&st_hints[descriptor], __ATOMIC_RELAXED))
        __atomic_store_n(&st_hints[descriptor], 0, __ATOMIC_RELAXED);
    if ((unsigned)descriptor >= ST_KINDS)
        return descriptor;
    unsigned kind = __atomic_load_n(&st_kinds[descriptor], __ATOMIC_RELAXED);
    if (st_unlikely(kind >= ST_KIND_OURS))
        st_kind_over(descriptor, false); /* it was closed unseen */
    else if (kind)
        __atomic_store_n(&st_kinds[descriptor], 0, __ATOMIC_RELAXED);
    if (st_unlikely((unsigned)descriptor <= 2))
        st_streams_again((unsigned)descriptor + ST_STANDARD, descriptor);
    return descriptor;
}

/* ---- Paths → records (lookup.c, index.c). */

struct st_link {
    uint32_t record, seq;
};

struct st_place {
    struct st_base from; /* the start of `rest` */
    const char *rest;
    const char *name; /* the last component */
    uint32_t name_bytes;
    uint32_t rest_bytes;  /* normalised, without a leading slash */
    uint32_t dir;         /* record of the directory with the last name */
    uint32_t dir_flags;   /* flags as read from that record */
    uint32_t dir_device;
    uint32_t dir_seq;
    uint64_t dir_id;
    uint32_t number;      /* of `record` */
    struct st_record record;
    const struct st_name *slot; /* the place of the last name */
    struct st_name slot_read;
    uint64_t generation;
    uint32_t depth; /* > ST_CHAIN: the chain is incomplete */
    struct st_link chain[ST_CHAIN];
};

enum st_found {
    ST_LEAVE,   /* unknown: leave the call to the mount */
    ST_FOUND,   /* `record` is the last name's */
    ST_MISSING, /* certain: the name does not exist, and its directory does */
    ST_NOWHERE, /* certain: a directory on the way does not exist */
    ST_UNSURE,  /* the directory is known, but not whether it has the name */
};

/* Is the path below a mount whose index is in use? Fills `from` and `rest`. */
bool st_begin_slow(struct st_place *place, int dirfd, const char *path);
enum st_found st_find(struct st_place *place);
/* The plain file's path in `text`, or NULL. */
char *st_plain_path(struct st_place *place, char text[ST_TEXT]);
/* Is the result still valid? And for the directories: was none on the way written since? */
bool st_still(const struct st_place *place);
bool st_chain_still(const struct st_place *place);
bool st_mount_prefix(const struct st_domain *domain, const char *path, const char **rest);

static inline bool st_begin(struct st_place *place, int dirfd, const char *path)
{
    if (st_likely(!st_on(ST_ON_INDEX)) || st_unlikely((uintptr_t)path < ST_MEMORY_MIN))
        return false;
    if (*path != '/' && st_base_known_outside(dirfd))
        return false;
    return st_begin_slow(place, dirfd, path);
}

/* index.c: each reads the mapped index once; false: leave the call to the mount */
bool st_index_alive(const struct st_domain *domain);
bool st_index_generation(const struct st_domain *domain, uint64_t *out);
bool st_index_same_generation(const struct st_domain *domain, uint64_t generation);
const struct st_record *st_index_record_at(const struct st_domain *domain, uint32_t number);
bool st_index_read(const struct st_domain *domain, uint32_t number, struct st_record *out);
bool st_index_read_head(const struct st_domain *domain, uint32_t number, struct st_record *out);
bool st_index_label(const struct st_domain *domain, const struct st_record *directory, uint32_t number, struct st_label *out);
enum st_found st_index_name(const struct st_domain *domain, uint64_t dir_id, const char *name, uint64_t bytes,
                            const struct st_name **slot, struct st_name *out);
bool st_index_directory(const struct st_domain *domain, uint64_t ino, struct st_record *out, uint32_t *number);
bool st_index_plain(const struct st_domain *domain, uint32_t device, uint64_t ino, struct st_record *out, uint32_t *number,
                    bool *busy);
bool st_index_device(const struct st_domain *domain, uint32_t device, struct st_device *out, const char **root);
/* Which device of which domain. */
struct st_owner {
    uint32_t number, device;
};
bool st_index_device_of(uint64_t dev, struct st_owner *owner, bool after);

/* ---- Descriptors that are diverted (diverted.c). */

struct st_diverted {
    const struct st_domain *domain;
    uint32_t device;
    uint32_t number;
    struct st_record record;
    struct stat stat; /* of the plain file */
};
bool st_diverted(int descriptor, struct st_diverted *out);
/* `descriptor`: the descriptor of that stat; -1: unknown. */
bool st_diverted_as(int descriptor, const struct stat *stat, struct st_diverted *out);
/* The record with which a number was opened last: a hint that must be checked. */
extern uint32_t st_opened_as[ST_DESCRIPTORS];
/* The path below the mount of a diverted descriptor's file, in `text`; NULL: it has none, or it is not known. */
const char *st_diverted_path(const struct st_diverted *diverted, int descriptor, char text[ST_TEXT]);
char *st_write_number(char *to, unsigned long number);
const char *st_proc_path(int descriptor, char text[32]);
/* "/proc/self/fd/N" and the like of a diverted descriptor → its path below the mount; any other path unchanged. */
const char *st_through_slow(const char *path, char text[ST_TEXT]);
static inline const char *st_through(const char *path, char text[ST_TEXT])
{
    path = st_path(path);
    if (st_likely(!st_on(ST_ON_PATHS)) || (uintptr_t)path < ST_MEMORY_MIN || path[0] != '/' || (path[1] != 'p' && path[1] != 'd'))
        return path;
    return st_through_slow(path, text);
}

/* ---- An absent mount (refuse.c). Sets errno if so. */
bool st_refused_slow(int dirfd, const char *path);
static inline bool st_refused(int dirfd, const char *path)
{
    return st_unlikely(st_on(ST_ON_DEAD)) && st_refused_slow(dirfd, path);
}

/* ---- The agent (agent.c). 0 or an errno, ST_ASK_MOUNT, or one of these. */
#define ST_UNSENT (-2) /* the request was not sent */
#define ST_UNHEARD (-3) /* sent, but no answer came */
int st_ask(const struct st_domain *domain, const struct st_request *request, bool cloexec, int *descriptor);
/* The data after the request and the reply of ST_SETXATTR and ST_GETXATTR. */
struct st_attribute {
    const char *name;
    uint32_t name_bytes;
    uint32_t room_bytes;  /* for the value */
    uint32_t value_bytes; /* of the value */
    void *value;
};
int st_ask_attribute(const struct st_domain *domain, const struct st_request *request, struct st_attribute *about);
/* The agent was killed: returns when another one serves the mount, and on later calls after a moment; false: none will. */
bool st_agent_replaced(const struct st_domain *domain, int turn);

/* Changes the times of the path's file through the agent; -1 with errno, or ST_PASS (descriptors.c). */
int st_change_times(int dirfd, const char *path, const struct timespec times[2]);

/* ---- Delegated directories (delegation.c) */

/* Call it before the look-up. False: no directory is delegated. */
bool st_delegated_begin(const struct st_domain *domain, uint64_t *epoch);
/* Creates a missing file in a delegated directory: a descriptor, or ST_PASS: ask the agent. */
int st_delegated_make(struct st_place *place, int flags, mode_t permissions, uint64_t epoch);
/* For look-ups in index and ring together: the turn before both must equal the turn after both. False: not readable. */
bool st_delegated_turn(const struct st_domain *domain, uint64_t *turn);
bool st_delegated_same_turn(const struct st_domain *domain, uint64_t turn);
bool st_delegated_has(const struct st_domain *domain, uint64_t dir_id, const char *name, uint64_t bytes);
bool st_delegated_any_in(const struct st_domain *domain, uint64_t dir_id);
/* A created plain file that the index does not have yet. */
bool st_delegated_plain(const struct st_domain *domain, uint32_t device, uint64_t ino, struct st_record *out);

/* ---- Opening (open.c): a descriptor, -1 and errno, or ST_PASS. */
int st_open(int dirfd, const char *path, int flags, mode_t mode);

/* exec.c: the environment without the shim, for a program that cannot take it. `copy` has room for as many entries and
 * one more, `list` for a path list as long as LD_PRELOAD's.
 */
size_t st_environment_count(char *const *environment, size_t *list_bytes);
void st_environment_without(char *const *environment, char **copy, char *list);

/* stat.c */
void st_identify(int descriptor, struct stat *out);

#endif
