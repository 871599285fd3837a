/* Programs that cannot take the shim: the loader or a sanitizer's runtime would end them, or print an error. They start
 * without it and use the mount. Danger avoided: a program that dies because it was started here. Unlike the shim's
 * other files, this one is also part of `surgetank`, which starts the first program. So it needs none of the other
 * files, and makes only system calls, since it runs in vfork children.
 *
 * Foreign programs are:
 * - an ELF file of another machine or word size, or with a loader that is neither glibc's nor musl's (under musl the
 *   shim is inactive);
 * - a program that is linked to a sanitizer's library, which must come first;
 * - a script whose interpreter is one of these.
 *
 * A static program has no loader, and passes the environment on. An unreadable file counts as an ordinary program.
 */
#define _GNU_SOURCE
#include "foreign.h"
#include "sys.h"

#include <elf.h>
#include <string.h>

#define SCRIPTS_MAX 5 /* the kernel's limit */
#define PIECE 512
#define SEGMENTS_MAX 64
#define ENTRIES_MAX 512
#define ENTRIES_AT_ONCE 32
#define LIBRARIES_MAX 64

#if defined(__x86_64__)
#define MACHINE EM_X86_64
#else
#define MACHINE EM_AARCH64
#endif

static long read_at(int file, void *to, size_t bytes, uint64_t at)
{
    long got;
    do
        got = st_sys(__NR_pread64, file, to, bytes, at);
    while (got == -4 /* EINTR */);
    return got;
}

static bool begins(const char *text, const char *with)
{
    return !strncmp(text, with, strlen(with));
}

static bool loads_us(const char *loader)
{
    const char *name = strrchr(loader, '/');
    name = name ? name + 1 : loader;
    return begins(name, "ld-linux") || begins(name, "ld-musl");
}

static bool is_sanitizer(const char *library)
{
    static const char names[][20] = {"libasan.so", "libhwasan.so", "libtsan.so", "liblsan.so", "libclang_rt.asan",
                                     "libclang_rt.hwasan", "libclang_rt.tsan", "libclang_rt.msan"};
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (begins(library, names[at]))
            return true;
    return false;
}

/* The offset in the file of an address of the program; 0: none. */
static uint64_t offset_of(int file, const Elf64_Ehdr *head, uint64_t address)
{
    Elf64_Phdr segment;
    for (unsigned at = 0; at < head->e_phnum && at < SEGMENTS_MAX; at++)
        if (read_at(file, &segment, sizeof segment, head->e_phoff + at * sizeof segment) == sizeof segment &&
            segment.p_type == PT_LOAD && address - segment.p_vaddr < segment.p_filesz)
            return address - segment.p_vaddr + segment.p_offset;
    return 0;
}

static bool needs_sanitizer(int file, const Elf64_Ehdr *head, const Elf64_Phdr *dynamic)
{
    Elf64_Dyn entries[ENTRIES_AT_ONCE];
    uint64_t strings = 0, libraries[LIBRARIES_MAX];
    uint64_t count = dynamic->p_filesz / sizeof *entries;
    unsigned found = 0;
    char name[32];
    count = count < ENTRIES_MAX ? count : ENTRIES_MAX;
    for (unsigned at = 0; at < count; at++) {
        unsigned of = at % ENTRIES_AT_ONCE;
        size_t bytes = (count - at < ENTRIES_AT_ONCE ? count - at : ENTRIES_AT_ONCE) * sizeof *entries;
        if (of == 0 && read_at(file, entries, bytes, dynamic->p_offset + at * sizeof *entries) != (long)bytes)
            return false;
        if (entries[of].d_tag == DT_NULL)
            break;
        if (entries[of].d_tag == DT_STRTAB)
            strings = offset_of(file, head, entries[of].d_un.d_ptr);
        else if (entries[of].d_tag == DT_NEEDED && found < LIBRARIES_MAX)
            libraries[found++] = entries[of].d_un.d_val;
    }
    for (unsigned at = 0; at < found && strings; at++) {
        long got = read_at(file, name, sizeof name - 1, strings + libraries[at]);
        name[got > 0 ? got : 0] = 0;
        if (is_sanitizer(name))
            return true;
    }
    return false;
}

static bool is_foreign_program(int file, const Elf64_Ehdr *head)
{
    Elf64_Phdr segment;
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_machine != MACHINE)
        return true;
    if (head->e_phentsize != sizeof segment)
        return false;
    for (unsigned at = 0; at < head->e_phnum && at < SEGMENTS_MAX; at++) {
        if (read_at(file, &segment, sizeof segment, head->e_phoff + at * sizeof segment) != sizeof segment)
            return false;
        if (segment.p_type == PT_INTERP) {
            char loader[PIECE];
            long got = read_at(file, loader, segment.p_filesz < PIECE - 1 ? segment.p_filesz : PIECE - 1, segment.p_offset);
            loader[got > 0 ? got : 0] = 0;
            if (got > 0 && !loads_us(loader))
                return true;
        } else if (segment.p_type == PT_DYNAMIC && needs_sanitizer(file, head, &segment)) {
            return true;
        }
    }
    return false;
}

/* A script's interpreter replaces `text`; false: it is not a script. */
static bool interpreter_in(char text[PIECE])
{
    char *from = text + 2, *to = text;
    if (text[0] != '#' || text[1] != '!')
        return false;
    while (*from == ' ' || *from == '\t')
        from++;
    while (*from && *from != ' ' && *from != '\t' && *from != '\n')
        *to++ = *from++;
    *to = 0;
    return to != text;
}

bool st_is_foreign_file(int file, char script[ST_FOREIGN_TEXT])
{
    union {
        char text[PIECE];
        Elf64_Ehdr head;
    } start;
    long got = read_at(file, start.text, PIECE - 1, 0);
    *script = 0;
    if (got <= 0)
        return false;
    start.text[got] = 0;
    if (got >= (long)sizeof start.head && !memcmp(start.text, ELFMAG, SELFMAG))
        return is_foreign_program(file, &start.head);
    if (interpreter_in(start.text))
        memcpy(script, start.text, strlen(start.text) + 1);
    return false;
}

/* -1: no readable file. */
static int foreign_at(const char *path)
{
    char script[ST_FOREIGN_TEXT];
    for (int depth = 0; depth < SCRIPTS_MAX; depth++) {
        /* The open must not wait at a fifo, nor acquire a terminal. */
        long file = st_sys(__NR_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
        if (st_sys_failed(file))
            return depth ? 0 : -1;
        bool foreign = st_is_foreign_file((int)file, script);
        st_sys_close((int)file);
        if (foreign || !*script)
            return foreign;
        path = script;
    }
    return 0;
}

bool st_is_foreign(const char *program, const char *search)
{
    char path[1024];
    size_t bytes = strlen(program);
    if (!search || strchr(program, '/'))
        return foreign_at(program) > 0;
    for (const char *end; search; search = *end ? end + 1 : NULL) {
        end = strchr(search, ':');
        end = end ? end : search + strlen(search);
        size_t head = (size_t)(end - search);
        if (head + bytes + 2 > sizeof path)
            continue;
        memcpy(path, search, head);
        if (head)
            path[head++] = '/';
        memcpy(path + head, program, bytes + 1);
        int foreign = foreign_at(path);
        if (foreign >= 0)
            return foreign;
    }
    return false;
}
