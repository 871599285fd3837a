/* The start of a relative path: the record of the working directory or of a directory's descriptor. Danger avoided:
 * confusing two directories. The kernel's answer is cached until a call changes the working directory, or gives the
 * descriptor's number to another file. A wrong cached "outside" only costs time. A cached "inside" is dropped
 * permanently as soon as an unseen call may change its meaning.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <string.h>

#ifndef AT_STATX_DONT_SYNC
#define AT_STATX_DONT_SYNC 0x4000
#endif

uint8_t st_hints[ST_DESCRIPTORS];
struct st_known st_known[ST_DESCRIPTORS];

/* `turn` grows with every change of the working directory; a value cached in another turn is void. */
static uint64_t turn = 2;
static uint32_t moving;
static bool never;
static uint64_t outside_turn; /* the turn in which it was outside of all mounts */
static struct {
    uint64_t seq; /* odd: being written */
    uint64_t turn, id;
    uint32_t domain, record;
} inside;

void st_base_moving(void)
{
    __atomic_fetch_add(&moving, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&turn, 1, __ATOMIC_SEQ_CST);
}

void st_base_moved(void)
{
    __atomic_fetch_add(&turn, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&moving, 1, __ATOMIC_SEQ_CST);
}

void st_base_never(void)
{
    __atomic_store_n(&never, true, __ATOMIC_SEQ_CST);
    st_anchor_end();
}

bool st_base_known_outside(int dirfd)
{
    if (dirfd == AT_FDCWD)
        return __atomic_load_n(&outside_turn, __ATOMIC_RELAXED) == __atomic_load_n(&turn, __ATOMIC_RELAXED);
    return (unsigned)dirfd < ST_DESCRIPTORS && __atomic_load_n(&st_hints[dirfd], __ATOMIC_RELAXED);
}

/* Device, inode and number of links of a directory, without a request from the mount to its agent. */
static bool ask(int dirfd, uint64_t *dev, uint64_t *ino, bool *removed)
{
    static bool no_statx;
    if (!__atomic_load_n(&no_statx, __ATOMIC_RELAXED)) {
        struct statx out;
        long result = st_sys(__NR_statx, dirfd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO | STATX_NLINK, &out);
        if (!st_sys_failed(result)) {
            *dev = st_device_number(out.stx_dev_major, out.stx_dev_minor);
            *ino = out.stx_ino;
            *removed = !out.stx_nlink;
            return true;
        }
        if (result != -ENOSYS && result != -EPERM)
            return false;
        __atomic_store_n(&no_statx, true, __ATOMIC_RELAXED);
    }
    struct stat out;
    if (st_sys_failed(st_sys(__NR_newfstatat, dirfd, "", &out, AT_EMPTY_PATH)))
        return false;
    *dev = out.st_dev;
    *ino = out.st_ino;
    *removed = !out.st_nlink;
    return true;
}

static bool remembered(struct st_base *out)
{
    if (__atomic_load_n(&never, __ATOMIC_RELAXED))
        return false;
    uint64_t seq = __atomic_load_n(&inside.seq, __ATOMIC_ACQUIRE);
    uint64_t then = __atomic_load_n(&inside.turn, __ATOMIC_RELAXED);
    uint32_t domain = __atomic_load_n(&inside.domain, __ATOMIC_RELAXED);
    out->record = __atomic_load_n(&inside.record, __ATOMIC_RELAXED);
    out->id = __atomic_load_n(&inside.id, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if ((seq & 1) || __atomic_load_n(&inside.seq, __ATOMIC_RELAXED) != seq || !then ||
        then != __atomic_load_n(&turn, __ATOMIC_RELAXED) || __atomic_load_n(&moving, __ATOMIC_RELAXED))
        return false;
    out->domain = &st_process.domains[domain];
    /* A removed directory has no record under that id any more. */
    struct st_record record;
    return st_index_read_head(out->domain, out->record, &record) && record.id == out->id;
}

static void remember(const struct st_base *base, uint64_t then)
{
    int pid;
    uint64_t seq = __atomic_load_n(&inside.seq, __ATOMIC_RELAXED);
    if (__atomic_load_n(&never, __ATOMIC_RELAXED) || __atomic_load_n(&moving, __ATOMIC_RELAXED) || (seq & 1) ||
        st_self(&pid) != ST_SELF_OWN ||
        !__atomic_compare_exchange_n(&inside.seq, &seq, seq + 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&inside.turn, then, __ATOMIC_RELAXED);
    __atomic_store_n(&inside.domain, (uint32_t)(base->domain - st_process.domains), __ATOMIC_RELAXED);
    __atomic_store_n(&inside.record, base->record, __ATOMIC_RELAXED);
    __atomic_store_n(&inside.id, base->id, __ATOMIC_RELAXED);
    __atomic_store_n(&inside.seq, seq + 2, __ATOMIC_RELEASE);
}

/* ---- Descriptors. A number's cached value is valid if `filled` has the present turn. */

#define FILLING UINT64_MAX

/* A fork copies descriptors before memory, so a value that another thread found in between concerns the parent's
 * descriptors.
 */
#define FORK (UINT64_C(1) << 48)
static uint64_t forks;

void st_base_forked(void)
{
    __atomic_fetch_add(&forks, FORK, __ATOMIC_RELAXED);
    /* The same holds for the working directory, and no thread here is changing it. */
    __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&moving, 0, __ATOMIC_RELAXED);
    st_anchor_forked();
}

static uint64_t turn_of(const struct st_known *known)
{
    return __atomic_load_n(&known->turn, __ATOMIC_SEQ_CST) + __atomic_load_n(&forks, __ATOMIC_RELAXED);
}

static bool may_know(int dirfd)
{
    /* libc itself replaces standard streams (daemon, forkpty); a vfork child has its own descriptors. */
    return dirfd > 2 && dirfd < ST_DESCRIPTORS && !__atomic_load_n(&never, __ATOMIC_RELAXED) && st_owns_memory();
}

static bool known(int dirfd, struct st_base *out)
{
    if (!may_know(dirfd))
        return false;
    const struct st_known *known = &st_known[dirfd];
    uint64_t filled = __atomic_load_n(&known->filled, __ATOMIC_ACQUIRE);
    if (!filled || filled != turn_of(known) + 1)
        return false;
    out->domain = &st_process.domains[__atomic_load_n(&known->domain, __ATOMIC_RELAXED) % ST_DOMAINS_MAX];
    out->record = __atomic_load_n(&known->record, __ATOMIC_RELAXED);
    out->id = __atomic_load_n(&known->id, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    struct st_record record; /* no record has that id: the directory was removed */
    return __atomic_load_n(&known->filled, __ATOMIC_RELAXED) == filled &&
           st_index_read_head(out->domain, out->record, &record) && record.id == out->id;
}

static void know(int dirfd, const struct st_base *base, uint64_t then)
{
    struct st_known *known = &st_known[dirfd];
    uint64_t before = __atomic_load_n(&known->filled, __ATOMIC_RELAXED);
    if (before == FILLING || turn_of(known) != then ||
        !__atomic_compare_exchange_n(&known->filled, &before, FILLING, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&known->domain, (uint16_t)(base->domain - st_process.domains), __ATOMIC_RELAXED);
    __atomic_store_n(&known->record, base->record, __ATOMIC_RELAXED);
    __atomic_store_n(&known->id, base->id, __ATOMIC_RELAXED);
    __atomic_store_n(&known->filled, then + 1, __ATOMIC_RELEASE);
}

static bool ask_base_of(int dirfd, struct st_base *out)
{
    uint64_t then = __atomic_load_n(&turn, __ATOMIC_SEQ_CST), dev, ino;
    bool removed;
    if (!ask(dirfd, &dev, &ino, &removed))
        return false;
    for (uint32_t number = 0; number < st_process.domain_count; number++) {
        const struct st_domain *domain = &st_process.domains[number];
        if (!domain->index || domain->index->mount_dev != dev)
            continue;
        struct st_record record;
        if (removed || !st_index_directory(domain, ino, &record, &out->record))
            return false;
        out->domain = domain;
        out->id = record.id;
        if (dirfd == AT_FDCWD)
            remember(out, then);
        return true;
    }
    if (dirfd == AT_FDCWD)
        __atomic_store_n(&outside_turn, then, __ATOMIC_RELAXED);
    else if ((unsigned)dirfd < ST_DESCRIPTORS)
        __atomic_store_n(&st_hints[dirfd], 1, __ATOMIC_RELAXED);
    return false;
}

bool st_base_of(int dirfd, struct st_base *out)
{
    if (dirfd == AT_FDCWD)
        return remembered(out) || ask_base_of(dirfd, out);
    if (known(dirfd, out))
        return true;
    if (!may_know(dirfd))
        return ask_base_of(dirfd, out);
    /* A thread that gives the number to another file meanwhile sees `asking`, and begins another turn. */
    struct st_known *known = &st_known[dirfd];
    __atomic_fetch_add(&known->asking, 1, __ATOMIC_SEQ_CST);
    uint64_t then = turn_of(known);
    bool found = ask_base_of(dirfd, out);
    if (found)
        know(dirfd, out, then);
    __atomic_fetch_sub(&known->asking, 1, __ATOMIC_SEQ_CST);
    return found;
}
