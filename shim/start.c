/* The beginning: environment, the mounts and their indices, and whether the shim serves this program. Danger avoided:
 * slowing every program's start, and trusting a variable that a mount is here: a job step on another node or in a
 * container inherits the variable, and finds the bare directory.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#define FUSE_MAGIC 0x65735546
#define TEXTS 16384

struct st_process st_process;
static char texts[TEXTS]; /* a private copy: programs overwrite their environment with a new title */

static const char *variable(char *const *environment, const char *name, size_t bytes)
{
    for (; environment && *environment; environment++)
        if (!strncmp(*environment, name, bytes))
            return *environment + bytes;
    return NULL;
}
#define VARIABLE(environment, name) variable(environment, name "=", sizeof name)

static bool listed(const char *list, const char separator, const char *name)
{
    size_t bytes = strlen(name);
    while (list && *list) {
        const char *end = strchr(list, separator);
        size_t length = end ? (size_t)(end - list) : strlen(list);
        if (length == bytes && !memcmp(list, name, bytes))
            return true;
        list = end ? end + 1 : NULL;
    }
    return false;
}

/* The Go runtime makes its own system calls: it changes the directory unseen. */
static bool is_go(void)
{
    const ElfW(Phdr) *headers = (const void *)getauxval(AT_PHDR);
    unsigned long count = getauxval(AT_PHNUM);
    ElfW(Addr) base = 0;
    for (unsigned long at = 0; headers && at < count; at++)
        if (headers[at].p_type == PT_PHDR)
            base = (ElfW(Addr))headers - headers[at].p_vaddr;
    for (unsigned long at = 0; headers && at < count; at++) {
        const ElfW(Phdr) *note = &headers[at];
        bool loaded = false;
        for (unsigned long with = 0; with < count && note->p_type == PT_NOTE; with++)
            loaded = loaded || (headers[with].p_type == PT_LOAD && (headers[with].p_flags & PF_R) &&
                                note->p_vaddr >= headers[with].p_vaddr &&
                                note->p_vaddr + note->p_filesz <= headers[with].p_vaddr + headers[with].p_filesz);
        const char *start = (const char *)(base + note->p_vaddr);
        for (size_t offset = 0; loaded && offset + sizeof(ElfW(Nhdr)) + 4 <= note->p_filesz;) {
            const ElfW(Nhdr) *head = (const void *)(start + offset);
            if (head->n_namesz == 4 && !memcmp(head + 1, "Go\0", 4))
                return true;
            size_t step = sizeof *head + ((head->n_namesz + 3u) & ~3ul) + ((head->n_descsz + 3u) & ~3ul);
            offset += step;
        }
    }
    return false;
}

static bool is_shell(const char *program)
{
    return listed("sh:bash:dash:zsh:ksh:mksh:csh:tcsh:fish:busybox", ':', program);
}

/* ---- One mount */

static bool good_header(const struct st_header *header, const struct stat *file)
{
    return header->magic == ST_MAGIC && header->layout == ST_LAYOUT && header->total_bytes >= sizeof *header &&
           header->total_bytes <= (uint64_t)file->st_size;
}

/* Opens and checks the index; -1 if there is no valid one. */
static int open_index(const char *path, struct st_header *header)
{
    struct stat file;
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    if (st_sys_failed(opened))
        return -1;
    if (!st_sys_failed(st_sys_fstat((int)opened, &file)) && S_ISREG(file.st_mode) &&
        file.st_uid == (uid_t)st_sys(__NR_geteuid) && !(file.st_mode & 022) &&
        st_sys(__NR_pread64, opened, header, sizeof *header, 0) == (long)sizeof *header && good_header(header, &file))
        return (int)opened;
    st_sys_close((int)opened);
    return -1;
}

enum presence { ABSENT, PRESENT, SEALED };

static enum presence presence_of(long result)
{
    /* Without the right to look there, the program cannot write there either. */
    return result == -EACCES || result == -EPERM ? SEALED : st_sys_failed(result) ? ABSENT : PRESENT;
}

static enum presence device_of(const char *mount, uint64_t *dev)
{
    struct statx extended;
    long result = st_sys(__NR_statx, AT_FDCWD, mount, AT_STATX_DONT_SYNC, STATX_INO, &extended);
    if (!st_sys_failed(result)) {
        *dev = st_device_number(extended.stx_dev_major, extended.stx_dev_minor);
        return PRESENT;
    }
    struct stat stat;
    if (result == -ENOSYS || result == -EPERM) {
        result = st_sys(__NR_newfstatat, AT_FDCWD, mount, &stat, 0);
        *dev = stat.st_dev;
    }
    return presence_of(result);
}

/* Without an index that states the mount's device, any FUSE mount suffices. */
static enum presence fuse_at(const char *mount)
{
    struct statfs stat;
    long result = st_sys(__NR_statfs, mount, &stat);
    return presence_of(result) == PRESENT && stat.f_type != FUSE_MAGIC ? ABSENT : presence_of(result);
}

/* The number at the end of the path, or 0. */
static uint32_t run_of(const char *counts)
{
    const char *at = counts ? strrchr(counts, '-') : NULL;
    uint32_t run = 0;
    while (at && *++at >= '0' && *at <= '9')
        run = run * 10 + (uint32_t)(*at - '0');
    return run;
}

static void start_domain(struct st_domain *domain, const char *index_path)
{
    struct st_header header;
    uint64_t dev = 0;
    int opened = open_index(index_path, &header);
    enum presence presence = opened >= 0 ? device_of(domain->mount, &dev) : fuse_at(domain->mount);
    domain->dead = presence == ABSENT || (opened >= 0 && presence == PRESENT && dev != header.mount_dev);
    if (opened < 0)
        return;
    if (!domain->dead && presence == PRESENT && header.uid == (uint32_t)st_sys(__NR_geteuid)) {
        long mapped = st_sys(__NR_mmap, 0, header.total_bytes, PROT_READ, MAP_SHARED, opened, 0);
        if (!st_sys_failed(mapped)) {
            domain->index = (const struct st_header *)mapped;
            domain->mapped_bytes = header.total_bytes;
        }
    }
    st_sys_close(opened);
}

/* "INDEX<TAB>SOCKET<TAB>MOUNT" per line, plus "<TAB>COUNTS" if there is such a file; cut into strings in place. */
static void start_domains(char *lines)
{
    while (lines && *lines && st_process.domain_count < ST_DOMAINS_MAX) {
        char *end = strchr(lines, '\n');
        if (end)
            *end++ = 0;
        char *socket = strchr(lines, '\t');
        char *mount = socket ? strchr(socket + 1, '\t') : NULL;
        if (mount && *lines == '/' && mount[1] == '/' && mount[2]) {
            struct st_domain *domain = &st_process.domains[st_process.domain_count++];
            *socket++ = 0;
            *mount++ = 0;
            char *counts = strchr(mount, '\t');
            if (counts)
                *counts++ = 0;
            domain->socket = socket;
            domain->socket_bytes = (uint32_t)strlen(socket);
            domain->mount = mount;
            domain->mount_bytes = (uint32_t)strlen(mount);
            domain->index_path = lines;
            domain->run = run_of(counts);
            start_domain(domain, lines);
            if (counts && domain->index)
                st_counts_map((unsigned)(domain - st_process.domains), counts);
        }
        lines = end;
    }
}

/* Under another C library the shim only passes calls on; that library does not even pass arguments here. Its children
 * may use glibc.
 */
extern const char *gnu_get_libc_version(void) __attribute__((weak));

__attribute__((constructor)) static void start(int count, char **arguments, char **environment)
{
    (void)count;
    if (!gnu_get_libc_version)
        return;
    const char *lines = VARIABLE(environment, "SURGETANK_SHIM");
    if (!lines || !*lines || listed(VARIABLE(environment, "SURGETANK_PRELOAD"), ':', "0") ||
        listed(VARIABLE(environment, "SURGETANK_PRELOAD_SKIP"), ':', program_invocation_short_name))
        return;
    size_t bytes = strlen(lines);
    if (bytes >= TEXTS)
        return;
    memcpy(texts, lines, bytes + 1);
    start_domains(texts);
    st_memory_start();

    uint32_t on = 0;
    for (uint32_t number = 0; number < st_process.domain_count; number++) {
        on |= st_process.domains[number].dead ? ST_ON_DEAD : 0;
        on |= st_process.domains[number].index ? ST_ON_INDEX | ST_ON_PATHS | ST_ON_IDENTITY : 0;
    }
    if (on & ST_ON_INDEX) {
        bool go = is_go();
        st_self_start();
        st_umask_start();
        if (go)
            st_base_never();
        st_process.writes = !go && !is_shell(program_invocation_short_name);
    }
    st_process.report = listed(VARIABLE(environment, "SURGETANK_REPORT"), ':', "1");
    __atomic_store_n(&st_process.on, on, __ATOMIC_RELEASE);
    st_counts_start(arguments);
}
