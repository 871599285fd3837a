/* Descriptors of plain files: is one diverted, which record does it have, and what is its path below the mount? Danger
 * avoided: a program that learns the tier's paths or inode numbers. Stateless: the file's own (device, inode) is looked
 * up, so dup, fork, exec and descriptors sent through sockets need no special care.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <string.h>

#define WAITS_MAX 10000 /* of a millisecond each */
#define TURNS_MAX 200 /* yields to other processes, while the agent rebuilds its tables, or a record */

uint32_t st_opened_as[ST_DESCRIPTORS];

/* The record with which the descriptor was opened, if it is still the file's: it is in the cache, and a table's entry
 * for it is not.
 */
static bool diverted_as_opened(int descriptor, struct st_diverted *out)
{
    uint64_t generation;
    if ((unsigned)descriptor >= ST_DESCRIPTORS)
        return false;
    out->number = __atomic_load_n(&st_opened_as[descriptor], __ATOMIC_RELAXED);
    return out->number && st_index_generation(out->domain, &generation) &&
           st_index_read(out->domain, out->number, &out->record) && out->record.backing_ino == out->stat.st_ino &&
           out->record.device == out->device && S_ISREG(out->record.mode) &&
           st_index_same_generation(out->domain, generation);
}

static bool diverted_in(int descriptor, struct st_diverted *out)
{
    int wait = 0;
    if (diverted_as_opened(descriptor, out))
        return true;
    for (int turn = 0; turn < TURNS_MAX; turn++) {
        uint64_t generation, epoch, given = 0;
        bool busy = false, delegates = st_delegated_begin(out->domain, &epoch);
        bool quiet = st_delegated_turn(out->domain, &given);
        bool steady = st_index_generation(out->domain, &generation);
        if (steady && st_index_plain(out->domain, out->device, out->stat.st_ino, &out->record, &out->number, &busy))
            return true;
        if (delegates && st_delegated_plain(out->domain, out->device, out->stat.st_ino, &out->record)) {
            out->number = 0;
            return true;
        }
        steady &= !busy && (!delegates || (quiet && st_delegated_same_turn(out->domain, given)));
        if (steady && st_index_same_generation(out->domain, generation) && turn >= 1)
            return false; /* another file of that device */
        if (!steady && turn < TURNS_MAX - 1)
            st_sys(__NR_sched_yield);
        else if (!steady && !(wait++ < WAITS_MAX && st_agent_replaced(out->domain, wait)))
            return false;
        else if (!steady)
            turn--; /* another agent fills it again */
    }
    return false;
}

bool st_diverted_as(int descriptor, const struct stat *stat, struct st_diverted *out)
{
    struct st_owner owner;
    if (!st_on(ST_ON_IDENTITY) || !S_ISREG(stat->st_mode))
        return false;
    bool found = st_index_device_of(stat->st_dev, &owner, false);
    if (found && &out->stat != stat)
        out->stat = *stat;
    for (; found; found = st_index_device_of(out->stat.st_dev, &owner, true)) {
        out->domain = &st_process.domains[owner.number];
        out->device = owner.device;
        if (diverted_in(descriptor, out))
            return true;
    }
    return false;
}

bool st_diverted(int descriptor, struct st_diverted *out)
{
    return st_on(ST_ON_IDENTITY) && !st_sys_failed(st_sys_fstat(descriptor, &out->stat)) &&
           st_diverted_as(descriptor, &out->stat, out);
}

char *st_write_number(char *to, unsigned long number)
{
    char digits[20];
    int count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    while (count)
        *to++ = digits[--count];
    *to = 0;
    return to;
}

const char *st_proc_path(int descriptor, char text[32])
{
    memcpy(text, "/proc/self/fd/", 14);
    st_write_number(text + 14, (unsigned long)descriptor);
    return text;
}

const char *st_diverted_path(const struct st_diverted *diverted, int descriptor, char text[ST_TEXT])
{
    char link[32];
    const char *root;
    struct st_device device;
    static const char deleted[] = " (deleted)";
    const size_t deleted_bytes = sizeof deleted - 1;
    if (!st_on(ST_ON_PATHS) || !diverted->stat.st_nlink || descriptor < 0 ||
        !st_index_device(diverted->domain, diverted->device, &device, &root))
        return NULL;
    long bytes = st_sys(__NR_readlinkat, AT_FDCWD, st_proc_path(descriptor, link), text, ST_TEXT - 1, 0,
                        ST_OWN_CALL);
    if (st_sys_failed(bytes) || bytes >= ST_TEXT - 1 || (size_t)bytes <= device.root_bytes)
        return NULL;
    text[bytes] = 0;
    if (memcmp(text, root, device.root_bytes) != 0 || text[device.root_bytes] != '/' ||
        ((size_t)bytes >= deleted_bytes && !strcmp(text + bytes - deleted_bytes, deleted)))
        return NULL;
    size_t rest = (size_t)bytes - device.root_bytes;
    if (diverted->domain->mount_bytes + rest >= ST_TEXT)
        return NULL;
    memmove(text + diverted->domain->mount_bytes, text + device.root_bytes, rest + 1);
    memcpy(text, diverted->domain->mount, diverted->domain->mount_bytes);
    /* If the index knows that path, it must be that file. */
    struct st_place place;
    if (st_on(ST_ON_INDEX) && st_begin(&place, AT_FDCWD, text)) {
        enum st_found found = st_find(&place);
        if (found == ST_MISSING || found == ST_NOWHERE || (found == ST_FOUND && place.record.ino != diverted->record.ino))
            return NULL;
    }
    return text;
}

static const char *after(const char *path, const char *prefix)
{
    size_t bytes = strlen(prefix);
    return strncmp(path, prefix, bytes) ? NULL : path + bytes;
}

static int number_in(const char **at)
{
    int number = 0;
    const char *from = *at;
    if (*from < '0' || *from > '9' || (*from == '0' && from[1] >= '0' && from[1] <= '9'))
        return -1;
    while (*from >= '0' && *from <= '9') {
        if (number > 100000000)
            return -1;
        number = number * 10 + (*from++ - '0');
    }
    *at = from;
    return number;
}

/* The descriptor that a path of /proc or /dev names, or -1. */
static int descriptor_in(const char *path)
{
    const char *rest;
    if (!strcmp(path, "/dev/stdin"))
        return 0;
    if (!strcmp(path, "/dev/stdout"))
        return 1;
    if (!strcmp(path, "/dev/stderr"))
        return 2;
    if (!(rest = after(path, "/dev/fd/")) && !(rest = after(path, "/proc/self/fd/")) &&
        !(rest = after(path, "/proc/thread-self/fd/"))) {
        rest = after(path, "/proc/");
        if (!rest || number_in(&rest) != st_sys_getpid() || !(rest = after(rest, "/fd/")))
            return -1;
    }
    int number = number_in(&rest);
    return *rest ? -1 : number;
}

const char *st_through_slow(const char *path, char text[ST_TEXT])
{
    struct st_diverted diverted;
    int descriptor = descriptor_in(path);
    if (descriptor < 0 || !st_diverted(descriptor, &diverted))
        return path;
    const char *instead = st_diverted_path(&diverted, descriptor, text);
    return instead ? instead : path;
}
