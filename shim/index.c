/* Reads the index that the agent writes: every read is bounded, checked against the mapping, and repeated if the agent
 * wrote meanwhile. Danger avoided: trusting a number in shared memory. No byte outside [0, mapped_bytes) is ever read,
 * whatever the file contains.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <time.h>

#define TRIES 3
#define PROBES_MAX 4096u /* a table that needs more is not from the agent */

#define RELAXED(from) __atomic_load_n(from, __ATOMIC_RELAXED)

/* The current place of a table; `capacity` 0 if it is not inside the mapping. */
struct span {
    const uint8_t *entries;
    uint64_t capacity;
};

static inline struct span span_of(const struct st_domain *domain, const struct st_table *table, uint64_t entry_bytes)
{
    uint64_t offset = RELAXED(&table->offset), capacity = RELAXED(&table->capacity);
    struct span span = {NULL, 0};
    /* The product cannot overflow after the first condition. */
    if (capacity >> 32 || offset % 8 || offset < sizeof(struct st_header) || offset > domain->mapped_bytes ||
        capacity * entry_bytes > domain->mapped_bytes - offset)
        return span;
    span.entries = (const uint8_t *)domain->index + offset;
    span.capacity = capacity;
    return span;
}

static inline bool power_of_two(uint64_t number)
{
    return number && !(number & (number - 1));
}

bool st_index_alive(const struct st_domain *domain)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec < RELAXED(&domain->index->alive_until_ns);
}

bool st_index_generation(const struct st_domain *domain, uint64_t *out)
{
    *out = __atomic_load_n(&domain->index->generation, __ATOMIC_ACQUIRE);
    return !(*out & 1);
}

bool st_index_same_generation(const struct st_domain *domain, uint64_t generation)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return RELAXED(&domain->index->generation) == generation;
}

const struct st_record *st_index_record_at(const struct st_domain *domain, uint32_t number)
{
    struct span records = span_of(domain, &domain->index->records, sizeof(struct st_record));
    if (!number || number >= records.capacity)
        return NULL;
    return (const struct st_record *)records.entries + number;
}

/* The first `words` words of a record. */
static inline bool read_words(const struct st_domain *domain, uint32_t number, struct st_record *out, size_t words)
{
    const struct st_record *record = st_index_record_at(domain, number);
    _Static_assert(sizeof *record % 8 == 0, "read by words");
    for (int try = 0; record && try < TRIES; try++) {
        uint32_t seq = __atomic_load_n(&record->seq, __ATOMIC_ACQUIRE);
        if (seq & 1)
            continue;
        for (size_t word = 0; word < words; word++) {
            uint64_t value = RELAXED((const uint64_t *)record + word);
            __builtin_memcpy((uint8_t *)out + 8 * word, &value, 8);
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (out->seq == seq && RELAXED(&record->seq) == seq)
            return out->id != 0;
    }
    return false;
}

bool st_index_read(const struct st_domain *domain, uint32_t number, struct st_record *out)
{
    return read_words(domain, number, out, sizeof *out / 8);
}

/* Was it skipped because it is changing? (Otherwise it is free.) */
static bool st_index_is_written(const struct st_domain *domain, uint32_t number)
{
    const struct st_record *record = st_index_record_at(domain, number);
    return record && (RELAXED(&record->seq) & 1 || RELAXED(&record->id));
}

/* Only up to `label`: a directory on the way needs no more. */
bool st_index_read_head(const struct st_domain *domain, uint32_t number, struct st_record *out)
{
    return read_words(domain, number, out, offsetof(struct st_record, rdev) / 8);
}

/* The label of a directory that was just read; false if the directory was written since. */
bool st_index_label(const struct st_domain *domain, const struct st_record *directory, uint32_t number, struct st_label *out)
{
    struct span labels = span_of(domain, &domain->index->labels, sizeof(struct st_label));
    const struct st_record *record = st_index_record_at(domain, number);
    if (!record || !directory->label || directory->label >= labels.capacity)
        return false;
    const struct st_label *label = (const struct st_label *)labels.entries + directory->label;
    out->parent = RELAXED(&label->parent);
    out->name_bytes = RELAXED(&label->name_bytes);
    if (out->name_bytes > ST_NAME_BYTES_MAX)
        return false;
    /* labels are 264 bytes each, from an offset that is a multiple of 8 */
    const uint64_t *words = (const void *)label->name;
    for (uint32_t at = 0; at < out->name_bytes; at += 8) {
        uint64_t value = RELAXED(words + at / 8);
        __builtin_memcpy(out->name + at, &value, 8);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (RELAXED(&record->seq) != directory->seq)
        return false;
    for (uint32_t at = 0; at < out->name_bytes; at++)
        if (!out->name[at] || out->name[at] == '/')
            return false;
    return true;
}

/* ST_FOUND, ST_MISSING (the table does not have it), or ST_LEAVE. */
enum st_found st_index_name(const struct st_domain *domain, uint64_t dir_id, const char *name, uint64_t bytes,
                            const struct st_name **slot, struct st_name *out)
{
    struct span names = span_of(domain, &domain->index->names, sizeof(struct st_name));
    if (!power_of_two(names.capacity))
        return ST_LEAVE;
    uint64_t key[2] = {RELAXED(&domain->index->key[0]), RELAXED(&domain->index->key[1])};
    uint64_t a, b;
    st_hash(key, dir_id, name, bytes, &a, &b);
    uint64_t limit = names.capacity < PROBES_MAX ? names.capacity : PROBES_MAX;
    for (uint64_t probe = 0; probe < limit; probe++) {
        const struct st_name *entry = (const struct st_name *)names.entries + ((a + probe) & (names.capacity - 1));
        uint64_t seen = __atomic_load_n(&entry->a, __ATOMIC_ACQUIRE);
        if (!seen)
            return ST_MISSING;
        if (seen != a || RELAXED(&entry->b) != b)
            continue;
        out->a = a;
        out->b = b;
        out->id = RELAXED(&entry->id);
        out->record = RELAXED(&entry->record);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (RELAXED(&entry->a) != a || RELAXED(&entry->b) != b || RELAXED(&entry->id) != out->id ||
            RELAXED(&entry->record) != out->record)
            return ST_LEAVE;
        *slot = entry;
        return ST_FOUND;
    }
    return ST_LEAVE;
}

bool st_index_directory(const struct st_domain *domain, uint64_t ino, struct st_record *out, uint32_t *number)
{
    uint64_t generation;
    if (!st_index_generation(domain, &generation))
        return false;
    struct span dirs = span_of(domain, &domain->index->dirs, sizeof(struct st_dir));
    if (!power_of_two(dirs.capacity))
        return false;
    uint64_t start = st_mix(ino), limit = dirs.capacity < PROBES_MAX ? dirs.capacity : PROBES_MAX;
    for (uint64_t probe = 0; probe < limit; probe++) {
        const struct st_dir *entry = (const struct st_dir *)dirs.entries + ((start + probe) & (dirs.capacity - 1));
        *number = __atomic_load_n(&entry->record, __ATOMIC_ACQUIRE);
        if (!*number)
            return false;
        if (*number != ~UINT32_C(0) && RELAXED(&entry->ino) == ino && st_index_read(domain, *number, out) &&
            out->ino == ino && S_ISDIR(out->mode))
            return st_index_same_generation(domain, generation);
    }
    return false;
}

/* Also for files whose agent is dead: a file's name does not change any more. `busy`: the record exists, and is being
 * written, by a writer that may have lost its processor.
 */
bool st_index_plain(const struct st_domain *domain, uint32_t device, uint64_t ino, struct st_record *out, uint32_t *number,
                    bool *busy)
{
    uint64_t generation;
    *busy = false;
    if (!st_index_generation(domain, &generation))
        return false;
    struct span plain = span_of(domain, &domain->index->plain, sizeof(struct st_plain));
    if (!power_of_two(plain.capacity))
        return false;
    uint64_t start = st_mix(ino + device), limit = plain.capacity < PROBES_MAX ? plain.capacity : PROBES_MAX;
    for (uint64_t probe = 0; probe < limit; probe++) {
        const struct st_plain *entry = (const struct st_plain *)plain.entries + ((start + probe) & (plain.capacity - 1));
        *number = __atomic_load_n(&entry->record, __ATOMIC_ACQUIRE);
        if (!*number)
            return false;
        if (*number == ~UINT32_C(0) || RELAXED(&entry->backing_ino) != ino || RELAXED(&entry->device) != device)
            continue;
        if (!st_index_read(domain, *number, out))
            *busy |= st_index_is_written(domain, *number);
        else if (out->backing_ino == ino && out->device == device)
            return st_index_same_generation(domain, generation);
    }
    return false;
}

bool st_index_device(const struct st_domain *domain, uint32_t device, struct st_device *out, const char **root)
{
    if (device >= ST_DEVICES_MAX || device >= RELAXED(&domain->index->device_count))
        return false;
    const struct st_device *from = &domain->index->devices[device];
    out->dev = RELAXED(&from->dev);
    out->flags = RELAXED(&from->flags);
    out->root_bytes = RELAXED(&from->root_bytes);
    out->root_offset = RELAXED(&from->root_offset);
    if (!out->root_bytes || out->root_bytes >= ST_TEXT || out->root_bytes >= domain->mapped_bytes ||
        out->root_offset > domain->mapped_bytes - out->root_bytes - 1)
        return false;
    *root = (const char *)domain->index + out->root_offset;
    return **root == '/';
}

/* Which plain files have this st_dev? Several tiers, of several agents, may be on one file system: this returns the
 * next one after `after`, if `after` was one of them.
 */
bool st_index_device_of(uint64_t dev, struct st_owner *owner, bool after)
{
    uint32_t first = after ? owner->number : 0;
    for (uint32_t number = first; number < st_process.domain_count; number++) {
        const struct st_domain *candidate = &st_process.domains[number];
        if (!candidate->index)
            continue;
        uint32_t count = RELAXED(&candidate->index->device_count);
        for (uint32_t at = after && number == first ? owner->device + 1 : 0; at < count && at < ST_DEVICES_MAX; at++)
            if (RELAXED(&candidate->index->devices[at].dev) == dev) {
                *owner = (struct st_owner){.number = number, .device = at};
                return true;
            }
    }
    return false;
}
