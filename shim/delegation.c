/* Directories that the agent has delegated. The shim creates the plain file itself and reports it in a ring in shared
 * memory. The agent reads the ring before it answers any request (docs/internals/doors.md). Dangers avoided: a file
 * that the agent does not know; a file that is created where the directory was a moment ago. In any unexpected state
 * the shim sends a request to the agent.
 *
 * The order is: write the entry, check that directories are still delegated, create the plain file. An agent that ends
 * a delegation reads the entries after that, and waits for those in progress.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <string.h>
#include <sys/mman.h>

#define RELAXED(from) __atomic_load_n(from, __ATOMIC_RELAXED)
#define RING_BYTES (ST_RING_SLOTS_OFFSET + ST_INTAKE_ENTRIES * sizeof(struct st_intake_entry))
#define NO_RING ((struct st_ring *)-1)
#define OWN_NAMES ".surgetank"
#define OWN_INODES (UINT64_C(1) << 56) /* as crates/state/src/tree.rs has it */
/* Of open's flags, those that an open file keeps, and those of the descriptor. */
#define PASSED_ON (O_ACCMODE | O_APPEND | O_NONBLOCK | O_NOATIME | O_CLOEXEC)

/* The agent closes its copy right after sending, unless the shim runs on its processor. */
#define GIVING_TURNS 8

static struct st_ring *rings[ST_DOMAINS_MAX];

static inline uint64_t state_of(uint64_t entry, unsigned phase)
{
    return entry << 3 | phase;
}

static inline struct st_intake_entry *slot_of(struct st_ring *ring, uint64_t entry)
{
    return (struct st_intake_entry *)((char *)ring + ST_RING_SLOTS_OFFSET) + entry % ST_INTAKE_ENTRIES;
}

static struct st_ring *map(const struct st_domain *domain)
{
    static const char suffix[] = ".ring";
    char path[ST_TEXT];
    size_t bytes = strlen(domain->index_path);
    if (bytes + sizeof suffix > sizeof path)
        return NO_RING;
    memcpy(path, domain->index_path, bytes);
    memcpy(path + bytes, suffix, sizeof suffix);
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    if (st_sys_failed(opened))
        return NO_RING;
    struct stat file;
    struct st_ring head, *ring = NO_RING;
    if (!st_sys_failed(st_sys_fstat((int)opened, &file)) && S_ISREG(file.st_mode) &&
        file.st_uid == domain->index->uid && !(file.st_mode & 077) && (uint64_t)file.st_size >= RING_BYTES &&
        st_sys(__NR_pread64, opened, &head, sizeof head, 0) == (long)sizeof head && head.magic == ST_RING_MAGIC &&
        head.layout == ST_LAYOUT && head.entries == ST_INTAKE_ENTRIES) {
        long mapped = st_sys(__NR_mmap, 0, RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
        if (!st_sys_failed(mapped))
            ring = (struct st_ring *)mapped;
    }
    st_sys_close((int)opened);
    return ring;
}

/* Mapped on first use; NULL: there is none. */
static struct st_ring *ring_of(const struct st_domain *domain)
{
    if (!(RELAXED(&domain->index->flags) & ST_RING))
        return NULL;
    struct st_ring **at = &rings[domain - st_process.domains], *none = NULL;
    struct st_ring *ring = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    if (st_unlikely(!ring)) {
        ring = map(domain);
        if (!__atomic_compare_exchange_n(at, &none, ring, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            if (ring != NO_RING)
                st_sys(__NR_munmap, ring, RING_BYTES);
            ring = none;
        }
    }
    return ring == NO_RING ? NULL : ring;
}

bool st_delegated_begin(const struct st_domain *domain, uint64_t *epoch)
{
    struct st_ring *ring = ring_of(domain);
    if (ring)
        *epoch = __atomic_load_n(&ring->epoch, __ATOMIC_SEQ_CST);
    return ring != NULL;
}

bool st_delegated_turn(const struct st_domain *domain, uint64_t *turn)
{
    struct st_ring *ring = ring_of(domain);
    if (ring)
        *turn = __atomic_load_n(&ring->turn, __ATOMIC_ACQUIRE);
    return ring && !(*turn & 1);
}

bool st_delegated_same_turn(const struct st_domain *domain, uint64_t turn)
{
    struct st_ring *ring = ring_of(domain);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return ring && RELAXED(&ring->turn) == turn;
}

/* The entries that may be in the ring, from `*at` on; returns their number. */
static uint64_t entries(struct st_ring *ring, uint64_t *at)
{
    uint64_t next = __atomic_load_n(&ring->next, __ATOMIC_ACQUIRE);
    *at = __atomic_load_n(&ring->first, __ATOMIC_ACQUIRE);
    uint64_t count = next - *at;
    return count > ST_INTAKE_ENTRIES ? 0 : count; /* it was read while both changed; the turn has changed, too */
}

bool st_delegated_has(const struct st_domain *domain, uint64_t dir_id, const char *name, uint64_t bytes)
{
    struct st_ring *ring = ring_of(domain);
    uint64_t at;
    for (uint64_t left = ring ? entries(ring, &at) : 0; left; left--, at++) {
        const struct st_intake_entry *slot = slot_of(ring, at);
        if (__atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) == state_of(at, ST_INTAKE_DONE) &&
            RELAXED(&slot->dir) == dir_id && RELAXED(&slot->name_bytes) == bytes && !memcmp(slot->name, name, bytes))
            return true;
    }
    return false;
}

bool st_delegated_any_in(const struct st_domain *domain, uint64_t dir_id)
{
    struct st_ring *ring = ring_of(domain);
    uint64_t at;
    if (!ring)
        return true;
    for (uint64_t left = entries(ring, &at); left; left--, at++) {
        const struct st_intake_entry *slot = slot_of(ring, at);
        if (__atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) == state_of(at, ST_INTAKE_DONE) && RELAXED(&slot->dir) == dir_id)
            return true;
    }
    return false;
}

bool st_delegated_plain(const struct st_domain *domain, uint32_t device, uint64_t ino, struct st_record *out)
{
    struct st_ring *ring = ring_of(domain);
    uint64_t at;
    for (uint64_t left = ring ? entries(ring, &at) : 0; left; left--, at++) {
        const struct st_intake_entry *slot = slot_of(ring, at);
        if (__atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) != state_of(at, ST_INTAKE_DONE) || RELAXED(&slot->ino) != ino ||
            RELAXED(&slot->device) != device)
            continue;
        memset(out, 0, sizeof *out);
        out->flags = ST_KNOWN | ST_RESIDENT | ST_LIVE | ST_FRESH;
        out->ino = OWN_INODES + RELAXED(&slot->number); /* (it has no id yet) */
        out->backing_ino = ino;
        out->device = device;
        out->mode = S_IFREG | (RELAXED(&slot->mode) & 0777);
        out->uid = RELAXED(&slot->uid);
        out->gid = RELAXED(&slot->gid);
        out->nlink = 1;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return RELAXED(&slot->state) == state_of(at, ST_INTAKE_DONE);
    }
    return false;
}

/* The next entry, if its slot is free. */
static struct st_intake_entry *take(struct st_ring *ring, uint64_t *entry)
{
    uint64_t next = __atomic_load_n(&ring->next, __ATOMIC_RELAXED);
    for (;;) {
        struct st_intake_entry *slot = slot_of(ring, next);
        if (next - RELAXED(&ring->first) >= RELAXED(&ring->limit))
            return NULL;
        uint64_t state = __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE);
        if (state == state_of(next, ST_INTAKE_SKIP)) {
            __atomic_compare_exchange_n(&ring->next, &next, next + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
            next = __atomic_load_n(&ring->next, __ATOMIC_RELAXED);
        } else if (state != state_of(next, ST_INTAKE_FREE)) {
            uint64_t now = __atomic_load_n(&ring->next, __ATOMIC_RELAXED);
            if (now == next)
                return NULL; /* full */
            next = now;
        } else if (__atomic_compare_exchange_n(&ring->next, &next, next + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
            *entry = next;
            return slot;
        }
    }
}

static bool change(struct st_intake_entry *slot, uint64_t entry, unsigned from, unsigned to)
{
    uint64_t before = state_of(entry, from);
    return __atomic_compare_exchange_n(&slot->state, &before, state_of(entry, to), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

/* Before a file is created, the agent must have closed its copy of a descriptor that it just sent and the program may
 * have closed.
 */
static bool all_given(struct st_ring *ring)
{
    for (int turn = 0; __atomic_load_n(&ring->giving, __ATOMIC_SEQ_CST); turn++) {
        if (turn == GIVING_TURNS)
            return false;
        st_sys(__NR_sched_yield);
    }
    return true;
}

int st_delegated_make(struct st_place *place, int flags, mode_t permissions, uint64_t epoch)
{
    const struct st_domain *domain = place->from.domain;
    struct st_ring *ring = ring_of(domain);
    char text[ST_TEXT];
    if (!ring || (permissions & ~0777u) ||
        (place->name_bytes >= sizeof OWN_NAMES - 1 && !memcmp(place->name, OWN_NAMES, sizeof OWN_NAMES - 1)) || !all_given(ring))
        return ST_PASS;
    place->record.device = place->dir_device;
    const char *path = st_plain_path(place, text);
    uint64_t entry;
    struct st_intake_entry *slot = path ? take(ring, &entry) : NULL;
    if (!slot)
        return ST_PASS;
    uint32_t gid = (uint32_t)st_sys(__NR_getegid);
    __atomic_store_n(&slot->dir, place->dir_id, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->run, domain->run, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->mode, (uint32_t)permissions, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->device, place->dir_device, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->uid, domain->index->uid, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->gid, gid, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->name_bytes, place->name_bytes, __ATOMIC_RELAXED);
    memcpy(slot->name, place->name, place->name_bytes);
    if (!change(slot, entry, ST_INTAKE_FREE, ST_INTAKE_MADE))
        return ST_PASS;
    long opened = -1;
    if (__atomic_load_n(&ring->epoch, __ATOMIC_SEQ_CST) == epoch)
        opened = st_sys(__NR_openat, AT_FDCWD, path, (flags & PASSED_ON) | O_CREAT | O_EXCL | O_NOFOLLOW | O_NOCTTY,
                        permissions | 0600, /* (the agent reads and writes every plain file) */
                        0, ST_OWN_CALL);
    struct stat stat;
    if (st_sys_failed(opened)) {
        change(slot, entry, ST_INTAKE_MADE, ST_INTAKE_VOID);
        return ST_PASS;
    }
    /* (If it fails, an unrecorded file remains; the agent replaces it when a program requests the name.) */
    bool done = !st_sys_failed(st_sys_fstat((int)opened, &stat)) && stat.st_gid == gid;
    if (done) {
        __atomic_store_n(&slot->dev, stat.st_dev, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->ino, stat.st_ino, __ATOMIC_RELAXED);
        done = change(slot, entry, ST_INTAKE_MADE, ST_INTAKE_DONE);
    } else {
        change(slot, entry, ST_INTAKE_MADE, ST_INTAKE_VOID);
    }
    if (done)
        return (int)opened;
    st_sys_close((int)opened);
    return ST_PASS;
}
