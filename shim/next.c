/* Finds the next function of a name: walks the loaded objects' hash tables on the first call. Danger avoided: dlsym in
 * a signal handler or a vfork child (it locks and may allocate), and its cost at every start. The objects that were
 * loaded at start are never unloaded and never change their order, so reading them needs no lock. Objects from dlopen
 * come after them and are not searched.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/auxv.h>

void *st_next_found[ST_NEXT_COUNT];

static const char names[ST_NEXT_COUNT][40] = {
#define ST_NEXT_NAME(name) #name,
    ST_NEXTS(ST_NEXT_NAME)
#undef ST_NEXT_NAME
};

extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));

struct tables {
    const ElfW(Sym) *symbols;
    const char *strings;
    const ElfW(Half) *versions;
    const uint32_t *gnu_hash, *hash;
};

static const void *table_at(const struct link_map *object, ElfW(Addr) address)
{
    /* glibc has made them absolute, except where the section is read-only (vdso). */
    return (const void *)(address < object->l_addr ? address + object->l_addr : address);
}

static bool read_tables(const struct link_map *object, struct tables *out)
{
    memset(out, 0, sizeof *out);
    for (const ElfW(Dyn) *entry = object->l_ld; entry && entry->d_tag != DT_NULL; entry++) {
        const void *table = table_at(object, entry->d_un.d_ptr);
        switch (entry->d_tag) {
        case DT_SYMTAB: out->symbols = table; break;
        case DT_STRTAB: out->strings = table; break;
        case DT_VERSYM: out->versions = table; break;
        case DT_GNU_HASH: out->gnu_hash = table; break;
        case DT_HASH: out->hash = table; break;
        default: break;
        }
    }
    return out->symbols && out->strings;
}

/* A function that is defined here, in its default version. */
static void *usable(const struct link_map *object, const struct tables *tables, uint32_t index, const char *name)
{
    const ElfW(Sym) *symbol = &tables->symbols[index];
    unsigned type = symbol->st_info & 15, binding = symbol->st_info >> 4;
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_shndx == SHN_ABS || !symbol->st_value)
        return NULL;
    if ((type != STT_FUNC && type != STT_NOTYPE) || (binding != STB_GLOBAL && binding != STB_WEAK))
        return NULL;
    if (tables->versions && ((tables->versions[index] & 0x8000) || !tables->versions[index]))
        return NULL;
    if (strcmp(tables->strings + symbol->st_name, name) != 0)
        return NULL;
    return (void *)(object->l_addr + symbol->st_value);
}

static void *find_gnu(const struct link_map *object, const struct tables *tables, const char *name, uint32_t hash)
{
    const uint32_t *head = tables->gnu_hash;
    uint32_t buckets = head[0], first = head[1], words = head[2], shift = head[3];
    const ElfW(Addr) *bloom = (const void *)(head + 4);
    if (!buckets || !words)
        return NULL;
    const unsigned bits = 8 * sizeof(ElfW(Addr));
    ElfW(Addr) word = bloom[(hash / bits) & (words - 1)];
    if (!((word >> (hash % bits)) & (word >> ((hash >> shift) % bits)) & 1))
        return NULL;
    const uint32_t *bucket = (const void *)(bloom + words);
    const uint32_t *chain = bucket + buckets;
    uint32_t index = bucket[hash % buckets];
    if (index < first)
        return NULL;
    for (;; index++) {
        uint32_t entry = chain[index - first];
        void *found = (entry | 1) == (hash | 1) ? usable(object, tables, index, name) : NULL;
        if (found || (entry & 1))
            return found;
    }
}

static void *find_sysv(const struct link_map *object, const struct tables *tables, const char *name)
{
    uint32_t hash = 0;
    for (const char *at = name; *at; at++) {
        hash = (hash << 4) + (unsigned char)*at;
        hash = (hash ^ ((hash & 0xf0000000) >> 24)) & 0x0fffffff;
    }
    const uint32_t *bucket = tables->hash + 2;
    const uint32_t *chain = bucket + tables->hash[0];
    if (!tables->hash[0])
        return NULL;
    for (uint32_t index = bucket[hash % tables->hash[0]]; index; index = chain[index]) {
        void *found = usable(object, tables, index, name);
        if (found)
            return found;
    }
    return NULL;
}

/* glibc's; weak, so that another loader loads the shim as well. Every loader writes the address of its own into the
 * program.
 */
#pragma weak _r_debug

static const struct link_map *first, *last; /* of those that were there at start */

static const struct r_debug *of_program(void)
{
    const ElfW(Phdr) *headers = (const void *)getauxval(AT_PHDR), *dynamic = NULL;
    unsigned long count = getauxval(AT_PHNUM);
    ElfW(Addr) base = 0;
    for (unsigned long at = 0; headers && at < count; at++) {
        if (headers[at].p_type == PT_PHDR)
            base = (ElfW(Addr))headers - headers[at].p_vaddr;
        if (headers[at].p_type == PT_DYNAMIC)
            dynamic = &headers[at];
    }
    for (const ElfW(Dyn) *entry = dynamic ? (const void *)(base + dynamic->p_vaddr) : NULL; entry && entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == DT_DEBUG)
            return (const void *)entry->d_un.d_ptr;
    return NULL;
}

/* Other libraries' constructors may call the shim before its own have run. */
static const struct link_map *first_object(void)
{
    const struct link_map *object = __atomic_load_n(&first, __ATOMIC_ACQUIRE);
    if (!object) {
        const struct r_debug *known = &_r_debug ? &_r_debug : of_program();
        object = known ? known->r_map : NULL;
        __atomic_store_n(&first, object, __ATOMIC_RELEASE);
    }
    return object;
}

__attribute__((constructor(101))) static void remember_last(void)
{
    const struct link_map *object = first_object();
    while (object && object->l_next)
        object = object->l_next;
    __atomic_store_n(&last, object, __ATOMIC_RELEASE);
}

void *st_next_search(enum st_next_number which)
{
    const char *name = names[which];
    uint32_t hash = 5381;
    for (const char *at = name; *at; at++)
        hash = hash * 33 + (unsigned char)*at;
    const struct link_map *end = __atomic_load_n(&last, __ATOMIC_ACQUIRE);
    void *found = NULL;
    bool after_ours = false;
    for (const struct link_map *object = first_object(); object && !found; object = object->l_next) {
        struct tables tables;
        if (after_ours && read_tables(object, &tables)) {
            if (tables.gnu_hash)
                found = find_gnu(object, &tables, name, hash);
            else if (tables.hash)
                found = find_sysv(object, &tables, name);
        }
        after_ours = after_ours || object->l_ld == _DYNAMIC;
        if (object == end)
            break;
    }
    __atomic_store_n(&st_next_found[which], found ? found : ST_NEXT_NOBODY, __ATOMIC_RELAXED);
    return found;
}
