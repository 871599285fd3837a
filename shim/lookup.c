/* Paths → records, and records → the plain file's path. Danger avoided: an answer for a path that meant another file at
 * that moment. Everything read on the way is kept (`chain`, `slot`), so that it can be checked afterwards.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <limits.h>
#include <string.h>

#define TRIES 3
#define LEVELS_MAX 256

/* Skips slashes and "." components. */
static const char *skip(const char *at)
{
    for (;;) {
        if (*at == '/')
            at++;
        else if (*at == '.' && (at[1] == '/' || !at[1]))
            at++;
        else
            return at;
    }
}

/* `path` is at or below the mount (textually; ".." never matches): `rest` is what follows. */
bool st_mount_prefix(const struct st_domain *domain, const char *path, const char **rest)
{
    const char *want = domain->mount;
    while (*want) {
        if (*want != *path)
            return false;
        want++;
        path++;
        if (want[-1] == '/' && (*path == '/' || *path == '.'))
            path = skip(path);
    }
    *rest = path;
    return *path == '/' || !*path;
}

bool st_begin_slow(struct st_place *place, int dirfd, const char *path)
{
    if (*path != '/') {
        place->rest = path;
        return *path && st_base_of(dirfd, &place->from);
    }
    for (uint32_t number = 0; number < st_process.domain_count; number++) {
        const struct st_domain *domain = &st_process.domains[number];
        if (domain->index && st_mount_prefix(domain, path, &place->rest)) {
            place->from.domain = domain;
            place->from.record = 0;
            return true;
        }
    }
    return false;
}

static bool read_directory(struct st_place *place, uint32_t number, uint64_t id, struct st_record *out)
{
    if (!st_index_read_head(place->from.domain, number, out) || out->id != id || !S_ISDIR(out->mode))
        return false;
    if (place->depth < ST_CHAIN) {
        place->chain[place->depth].record = number;
        place->chain[place->depth].seq = out->seq;
    }
    place->depth++;
    return out->flags & ST_SEARCHABLE;
}

/* A name that is not in the index may be in the ring, and move from there into the index during the look-up. */
__attribute__((noinline)) static enum st_found step_delegated(struct st_place *place, const struct st_record *directory,
                                                              uint32_t number, const char *name, uint32_t bytes,
                                                              struct st_name *entry)
{
    const struct st_domain *domain = place->from.domain;
    for (int try = 0; try < TRIES; try++) {
        uint64_t turn;
        if (!st_delegated_turn(domain, &turn))
            return ST_UNSURE;
        enum st_found found = st_index_name(domain, directory->id, name, bytes, &place->slot, entry);
        if (found != ST_MISSING)
            return found;
        bool has = st_delegated_has(domain, directory->id, name, bytes);
        if (!st_delegated_same_turn(domain, turn))
            continue;
        struct st_record now;
        return !has && (directory->flags & ST_COMPLETE) && st_index_read_head(domain, number, &now) && now.id == directory->id &&
                       (now.flags & (ST_COMPLETE | ST_DELEGATED)) == (ST_COMPLETE | ST_DELEGATED)
                   ? ST_MISSING
                   : ST_UNSURE;
    }
    return ST_UNSURE;
}

/* One component in a directory: its entry, or whether its absence is certain. */
static enum st_found step(struct st_place *place, const struct st_record *directory, uint32_t number, const char *name,
                          uint32_t bytes, struct st_name *entry)
{
    const struct st_domain *domain = place->from.domain;
    if (st_unlikely(directory->flags & ST_DELEGATED))
        return step_delegated(place, directory, number, name, bytes, entry);
    enum st_found found = st_index_name(domain, directory->id, name, bytes, &place->slot, entry);
    if (found != ST_MISSING)
        return found;
    if (!(directory->flags & ST_COMPLETE))
        return ST_UNSURE;
    const struct st_record *record = st_index_record_at(domain, number);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* A directory that is being written is about to gain or lose a name: read again. */
    return record && __atomic_load_n(&record->seq, __ATOMIC_RELAXED) == directory->seq ? ST_MISSING : ST_LEAVE;
}

static enum st_found walk(struct st_place *place)
{
    const struct st_domain *domain = place->from.domain;
    uint32_t number = place->from.record;
    struct st_record directory;
    place->depth = 0;
    place->rest_bytes = 0;
    if (!number) {
        number = __atomic_load_n(&domain->index->root, __ATOMIC_RELAXED);
        if (!st_index_read_head(domain, number, &directory))
            return ST_LEAVE;
        place->from.id = directory.id;
    }
    uint64_t id = place->from.id;
    for (const char *at = skip(place->rest); *at;) {
        const char *name = at;
        while (*at && *at != '/')
            at++;
        size_t bytes = (size_t)(at - name);
        if (bytes > ST_NAME_BYTES_MAX || (bytes == 2 && name[0] == '.' && name[1] == '.'))
            return ST_LEAVE;
        bool final = !*at;
        at = skip(at);
        if (!final && !*at)
            return ST_LEAVE; /* a slash at the end: the mount knows best what that requires */
        place->rest_bytes += (uint32_t)bytes + (place->rest_bytes ? 1 : 0);
        if (place->rest_bytes >= PATH_MAX || !read_directory(place, number, id, &directory))
            return ST_LEAVE;
        enum st_found found = step(place, &directory, number, name, (uint32_t)bytes, &place->slot_read);
        if (final) {
            place->name = name;
            place->name_bytes = (uint32_t)bytes;
            place->dir = number;
            place->dir_id = id;
            place->dir_flags = directory.flags;
            place->dir_device = directory.device;
            place->dir_seq = directory.seq;
        }
        if (found == ST_UNSURE && !final)
            return ST_LEAVE;
        if (found != ST_FOUND)
            return found == ST_MISSING && !final ? ST_NOWHERE : found;
        number = place->slot_read.record;
        id = place->slot_read.id;
        if (final) {
            place->number = number;
            if (!st_index_read(domain, number, &place->record) || place->record.id != id)
                return ST_LEAVE;
            return place->record.flags & ST_KNOWN ? ST_FOUND : ST_UNSURE;
        }
    }
    return ST_LEAVE; /* the root itself */
}

enum st_found st_find(struct st_place *place)
{
    const struct st_domain *domain = place->from.domain;
    if (!st_index_alive(domain))
        return ST_LEAVE;
    for (int try = 0; try < TRIES; try++) {
        if (!st_index_generation(domain, &place->generation))
            return ST_LEAVE;
        enum st_found found = walk(place);
        if (found != ST_LEAVE && st_index_same_generation(domain, place->generation))
            return found;
        if (found == ST_LEAVE && st_index_same_generation(domain, place->generation) && try > 0)
            return ST_LEAVE; /* twice the same result: the agent was not writing */
    }
    return ST_LEAVE;
}

/* Puts `name` and a slash before `at`; NULL: no room. */
static char *before(char *text, char *at, const void *name, size_t bytes)
{
    if ((size_t)(at - text) < bytes + 1)
        return NULL;
    *--at = '/';
    at -= bytes;
    memcpy(at, name, bytes);
    return at;
}

/* Puts the names from the root down to the start of the relative path before `at`. */
static char *climb(struct st_place *place, char *text, char *at)
{
    const struct st_domain *domain = place->from.domain;
    uint32_t number = place->from.record, root = __atomic_load_n(&domain->index->root, __ATOMIC_RELAXED);
    uint32_t expected_depth = place->depth;
    for (int level = 0; number != root; level++) {
        struct st_record directory;
        struct st_label label;
        if (level == LEVELS_MAX || !st_index_read_head(domain, number, &directory) || !S_ISDIR(directory.mode) ||
            (level == 0 && directory.id != place->from.id) || !st_index_label(domain, &directory, number, &label) ||
            !label.name_bytes || label.parent == number)
            return NULL;
        if (expected_depth < ST_CHAIN) {
            place->chain[expected_depth].record = number;
            place->chain[expected_depth].seq = directory.seq;
        }
        expected_depth++;
        at = before(text, at, label.name, label.name_bytes);
        if (!at)
            return NULL;
        number = label.parent;
    }
    place->depth = expected_depth;
    return at;
}

/* Written from the end of `text` to its front: the path, its starting directory, the device's root. */
char *st_plain_path(struct st_place *place, char text[ST_TEXT])
{
    const char *root;
    struct st_device device;
    if (!st_index_device(place->from.domain, place->record.device, &device, &root) || place->rest_bytes + 1 >= ST_TEXT)
        return NULL;
    char *at = text + ST_TEXT - 1 - place->rest_bytes;
    char *to = at;
    for (const char *from = skip(place->rest); *from; from = skip(from)) {
        if (to != at)
            *to++ = '/';
        while (*from && *from != '/') {
            if (to == text + ST_TEXT - 1)
                return NULL; /* another thread changed the path */
            *to++ = *from++;
        }
    }
    *to = 0;
    if (place->from.record && !(at = climb(place, text, at)))
        return NULL;
    return before(text, at, root, device.root_bytes);
}

bool st_chain_still(const struct st_place *place)
{
    if (place->depth > ST_CHAIN)
        return false;
    for (uint32_t at = 0; at < place->depth; at++) {
        const struct st_record *record = st_index_record_at(place->from.domain, place->chain[at].record);
        if (!record || __atomic_load_n(&record->seq, __ATOMIC_RELAXED) != place->chain[at].seq)
            return false;
    }
    return true;
}

bool st_still(const struct st_place *place)
{
    const struct st_domain *domain = place->from.domain;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const struct st_record *record = st_index_record_at(domain, place->number);
    const struct st_name *slot = place->slot;
    bool same = record && __atomic_load_n(&record->seq, __ATOMIC_RELAXED) == place->record.seq &&
                __atomic_load_n(&slot->a, __ATOMIC_RELAXED) == place->slot_read.a &&
                __atomic_load_n(&slot->b, __ATOMIC_RELAXED) == place->slot_read.b &&
                __atomic_load_n(&slot->id, __ATOMIC_RELAXED) == place->slot_read.id;
    return same && st_index_same_generation(domain, place->generation);
}
