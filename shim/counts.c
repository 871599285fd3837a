/* Counts this process's use of files of the mount, in a slot of its run's file (counts.h). Danger avoided: a program
 * that is slower, or dies, because of counting. Every addition is to memory that exists already, and no call waits. A
 * process without a slot is not counted. In a fork child the kernel wipes the page that names the slot: the child takes
 * its own.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#define FUSE_MAGIC 0x65735546

#include <sys/vfs.h>

uint8_t st_kinds[ST_KINDS];
bool st_counting;

struct own {
    int claimed;
    struct st_slot *slots[ST_DOMAINS_MAX];
    uint32_t *states[ST_DOMAINS_MAX];
};
static struct own *own; /* in a page that is wiped at fork */
static struct st_counts *files[ST_DOMAINS_MAX];
static uint8_t program[ST_PROGRAM_BYTES], command[ST_COMMAND_BYTES];

uint64_t st_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- The run's file */

void st_counts_map(unsigned domain, const char *path)
{
    struct stat file;
    struct st_counts head;
    const size_t bytes = ST_SLOTS_OFFSET + (size_t)ST_SLOTS_MAX * sizeof(struct st_slot);
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0, 0, ST_OWN_CALL);
    if (st_sys_failed(opened))
        return;
    long mapped = -1;
    if (!st_sys_failed(st_sys_fstat((int)opened, &file)) && S_ISREG(file.st_mode) &&
        file.st_uid == (uid_t)st_sys(__NR_geteuid) && !(file.st_mode & 077) && (size_t)file.st_size == bytes &&
        st_sys(__NR_pread64, opened, &head, offsetof(struct st_counts, states), 0) ==
            (long)offsetof(struct st_counts, states) &&
        head.magic == ST_COUNTS_MAGIC && head.layout == ST_COUNTS_LAYOUT && head.slot_bytes == sizeof(struct st_slot))
        mapped = st_sys(__NR_mmap, 0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    st_sys_close((int)opened);
    if (!st_sys_failed(mapped))
        files[domain] = (struct st_counts *)mapped;
}

/* ---- /proc/self/io */

static const char *number_in(const char *at, uint64_t *out)
{
    while (*at && (*at < '0' || *at > '9'))
        at++;
    for (*out = 0; *at >= '0' && *at <= '9'; at++)
        *out = *out * 10 + (uint64_t)(*at - '0');
    return at;
}

static void kernel_counts(uint64_t out[ST_KERNEL])
{
    char text[512];
    if (!st_on(ST_ON_INDEX))
        return;
    long opened = st_sys(__NR_openat, AT_FDCWD, "/proc/self/io", O_RDONLY | O_CLOEXEC, 0, 0, ST_OWN_CALL);
    if (st_sys_failed(opened))
        return;
    long bytes = st_sys(__NR_read, opened, text, sizeof text - 1);
    st_sys_close((int)opened);
    if (st_sys_failed(bytes))
        return;
    text[bytes] = 0;
    const char *at = text;
    for (unsigned which = 0; which < ST_KERNEL; which++)
        at = number_in(at, &out[which]);
}

/* ---- The slot */

static void claim_in(unsigned domain, int pid)
{
    struct st_counts *file = files[domain];
    uint32_t usable = __atomic_load_n(&file->usable, __ATOMIC_ACQUIRE);
    if (usable > ST_SLOTS_MAX)
        return;
    for (uint32_t at = 0; at < usable; at++) {
        uint32_t free = ST_SLOT_FREE;
        if (__atomic_load_n(&file->states[at], __ATOMIC_RELAXED) != ST_SLOT_FREE)
            continue;
        struct st_slot *slot = (struct st_slot *)((char *)file + ST_SLOTS_OFFSET) + at;
        if (!__atomic_compare_exchange_n(&file->states[at], &free, ST_SLOT_LIVE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        slot->parent = (uint32_t)st_sys(__NR_getppid);
        slot->begun_ns = st_now_ns();
        memcpy(slot->program, program, sizeof program);
        memcpy(slot->command, command, sizeof command);
        __atomic_store_n(&slot->pid, (uint32_t)pid, __ATOMIC_RELEASE);
        own->states[domain] = &file->states[at];
        __atomic_store_n(&own->slots[domain], slot, __ATOMIC_RELEASE);
        return;
    }
    __atomic_fetch_add(&file->lost, 1, __ATOMIC_RELAXED);
}

static void claim(void)
{
    int unclaimed = 0;
    if (!__atomic_compare_exchange_n(&own->claimed, &unclaimed, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    int pid = st_sys_getpid();
    for (unsigned domain = 0; domain < st_process.domain_count; domain++)
        if (files[domain])
            claim_in(domain, pid);
}

static struct st_slot *slot_of(unsigned domain)
{
    if (st_unlikely(!__atomic_load_n(&own->claimed, __ATOMIC_RELAXED)))
        claim();
    return __atomic_load_n(&own->slots[domain], __ATOMIC_ACQUIRE);
}

static size_t put_word(uint8_t *to, size_t at, size_t room, const char *word)
{
    size_t bytes = strlen(word);
    if (at >= room)
        return at;
    bytes = bytes < room - at - 1 ? bytes : room - at - 1;
    memcpy(to + at, word, bytes);
    return at + bytes + 1;
}

void st_counts_start(char *const *arguments)
{
    bool any = false;
    for (unsigned domain = 0; domain < st_process.domain_count; domain++)
        any = any || files[domain];
    if (!any)
        return;
    long page = st_sys(__NR_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (st_sys_failed(page))
        return;
    own = (struct own *)page;
    st_sys(__NR_madvise, page, 4096, MADV_WIPEONFORK);
    put_word(program, 0, sizeof program, program_invocation_short_name);
    size_t at = 0;
    for (char *const *word = arguments; word && *word && at < sizeof command; word++)
        at = put_word(command, at, sizeof command, *word);
    claim();
    __atomic_store_n(&st_counting, true, __ATOMIC_RELEASE);
    st_streams_start();
}

void st_counts_forked(void)
{
    if (!st_counting)
        return;
    memset(own, 0, sizeof *own); /* if the kernel does not wipe it */
    claim();
    st_streams_rebase();
}

static bool has_moved(const struct st_slot *slot)
{
    uint64_t bytes = 0;
    for (unsigned which = 0; which < ST_IOS; which++)
        bytes |= slot->io[which].read_bytes | slot->io[which].write_bytes;
    return bytes != 0;
}

void st_counts_end(bool flushed)
{
    /* A process that never had a slot has no counts: a child of an unseen fork, or one that came when all slots were
     * taken.
     */
    if (!st_counting || !__atomic_load_n(&own->claimed, __ATOMIC_ACQUIRE))
        return;
    st_streams_end(flushed);
    for (unsigned domain = 0; domain < st_process.domain_count; domain++) {
        struct st_slot *slot = files[domain] ? slot_of(domain) : NULL;
        /* A vfork child: the slot is its parent's. */
        if (!slot || !st_on(ST_ON_INDEX) || slot->pid != (uint32_t)st_sys_getpid())
            continue;
        /* It costs tens of microseconds, so only processes that have read or written pay it. */
        if (has_moved(slot))
            kernel_counts(slot->kernel_ended);
        __atomic_store_n(&slot->ended_ns, st_now_ns(), __ATOMIC_RELEASE);
    }
}

__attribute__((destructor)) static void end(void)
{
    st_counts_end(true);
}

/* ---- Which file is a descriptor of? */

static unsigned learn(int descriptor)
{
    struct stat stat;
    if (!st_on(ST_ON_INDEX)) /* perhaps in a sandbox: the shim may make no system call */
        return ST_KIND_FOREIGN;
    if (st_sys_failed(st_sys_fstat(descriptor, &stat)))
        return 0;
    if (!S_ISREG(stat.st_mode))
        return ST_KIND_FOREIGN;
    for (unsigned domain = 0; domain < st_process.domain_count; domain++) {
        const struct st_header *index = st_process.domains[domain].index;
        struct statfs system;
        if (index && stat.st_dev == index->mount_dev &&
            !st_sys_failed(st_sys(__NR_fstatfs, descriptor, &system)) && system.f_type == FUSE_MAGIC)
            return ST_KIND_OURS + domain * ST_IOS + ST_IO_MOUNT;
    }
    struct st_owner owner;
    for (bool found = st_index_device_of(stat.st_dev, &owner, false); found;
         found = st_index_device_of(stat.st_dev, &owner, true)) {
        struct st_record record;
        uint32_t number;
        bool busy = false;
        if (st_index_plain(&st_process.domains[owner.number], owner.device, stat.st_ino, &record, &number, &busy))
            return ST_KIND_OURS + owner.number * ST_IOS + ST_IO_PLAIN;
        if (busy || st_delegated_plain(&st_process.domains[owner.number], owner.device, stat.st_ino, &record))
            return 0; /* the next call checks again */
    }
    return ST_KIND_FOREIGN;
}

/* A vfork child has its parent's memory and its own descriptors. So its findings are not recorded, except those that
 * only make the parent count less.
 */
unsigned st_kind_learn(int descriptor)
{
    unsigned kind = learn(descriptor);
    if (kind == ST_KIND_FOREIGN || (kind && !st_is_vforked()))
        __atomic_store_n(&st_kinds[descriptor], (uint8_t)kind, __ATOMIC_RELAXED);
    return kind;
}

void st_kind_over(int descriptor, bool still_open)
{
    if (st_is_vforked())
        return;
    st_streams_over(descriptor, still_open);
    __atomic_store_n(&st_kinds[descriptor], 0, __ATOMIC_RELAXED);
}

struct st_io *st_io_of(unsigned kind)
{
    if (kind < ST_KIND_OURS)
        return NULL;
    struct st_slot *slot = slot_of((kind - ST_KIND_OURS) / ST_IOS);
    return slot ? &slot->io[(kind - ST_KIND_OURS) % ST_IOS] : NULL;
}

/* ---- Opens */

int st_counted_open(const struct st_domain *domain, int descriptor, int flags)
{
    if (!st_counting || (unsigned)descriptor >= ST_KINDS)
        return descriptor;
    unsigned kind = ST_KIND_OURS + (unsigned)(domain - st_process.domains) * ST_IOS + ST_IO_PLAIN;
    st_fresh(descriptor);
    if (!st_is_vforked())
        __atomic_store_n(&st_kinds[descriptor], (uint8_t)kind, __ATOMIC_RELAXED);
    struct st_io *io = st_io_of(kind);
    if (io) {
        st_add((flags & O_ACCMODE) == O_RDONLY ? &io->read_opens : &io->write_opens, 1);
        if (flags & O_CREAT)
            st_add(&io->create_opens, 1);
    }
    return descriptor;
}

uint64_t st_sync_begins(int descriptor)
{
    return st_io_of(st_kind_of(descriptor)) ? st_now_ns() : 0;
}

void st_counted_sync(int descriptor, uint64_t begun_ns)
{
    struct st_io *io = begun_ns ? st_io_of(st_kind_of(descriptor)) : NULL;
    if (io) {
        st_add(&io->sync_calls, 1);
        st_add(&io->sync_ns, st_now_ns() - begun_ns);
    }
}

/* ---- Totals, for SURGETANK_REPORT */

void st_counts_total(struct st_io *out)
{
    memset(out, 0, sizeof *out);
    for (unsigned domain = 0; st_counting && domain < st_process.domain_count; domain++) {
        struct st_slot *slot = files[domain] ? slot_of(domain) : NULL;
        for (unsigned which = 0; slot && which < ST_IOS; which++) {
            const struct st_io *io = &slot->io[which];
            out->read_bytes += io->read_bytes;
            out->write_bytes += io->write_bytes;
            for (unsigned size = 0; size < ST_SIZES; size++) {
                out->read_sizes[size] += io->read_sizes[size];
                out->write_sizes[size] += io->write_sizes[size];
            }
        }
    }
}
