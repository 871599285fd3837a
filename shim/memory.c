/* Memory that a program passes: is it mapped? The kernel returns EFAULT if it is not. The shim must do the same, and it
 * reads the memory first. Danger avoided: a program that dies of the shim's read.
 *
 * Some memory needs no system call, because it is certainly mapped: the stack in use, the heap up to the program's
 * break, the program's own segments. For other memory the shim makes a call that copies eight bytes and has no other
 * effect. The answer is not cached: mapped memory may be unmapped later.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <elf.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <string.h>
#include <sys/auxv.h>

#define PAGE 4096u /* the smallest page: a larger one is tested several times */
#define SEGMENTS_MAX 8
#define THREAD_STACK_MAX (16u << 20)

uintptr_t st_stack_end, st_heap_begin = UINTPTR_MAX, st_program, st_program_bytes;

static struct {
    uintptr_t from, to;
    bool writable;
} segments[SEGMENTS_MAX];
static uintptr_t program_end;

void st_memory_start(void)
{
    const ElfW(Phdr) *headers = (const void *)getauxval(AT_PHDR);
    unsigned long count = getauxval(AT_PHNUM);
    uintptr_t base = 0, sealed_from = 0, sealed_to = 0;
    for (unsigned long at = 0; headers && at < count; at++)
        if (headers[at].p_type == PT_PHDR)
            base = (uintptr_t)headers - headers[at].p_vaddr;
    for (unsigned long at = 0; headers && at < count; at++)
        if (headers[at].p_type == PT_GNU_RELRO) {
            sealed_from = base + headers[at].p_vaddr;
            sealed_to = sealed_from + headers[at].p_memsz;
        }
    unsigned used = 0;
    bool known = false; /* the segments' base: the headers must be in one of them */
    for (unsigned long at = 0; headers && at < count; at++) {
        const ElfW(Phdr) *header = &headers[at];
        uintptr_t from = base + header->p_vaddr, to = from + header->p_memsz;
        if (header->p_type != PT_LOAD)
            continue;
        if (to > program_end)
            program_end = to;
        if (!(header->p_flags & PF_R) || used == SEGMENTS_MAX)
            continue;
        segments[used].from = from;
        segments[used].to = to;
        segments[used].writable = (header->p_flags & PF_W) && !(sealed_from < to && from < sealed_to);
        known = known || ((uintptr_t)headers >= from && (uintptr_t)headers < to);
        used++;
    }
    if (!known)
        memset(segments, 0, sizeof segments);
    /* The contiguous ones, page by page. */
    st_program = segments[0].from;
    uintptr_t end = segments[0].to;
    for (unsigned at = 1; at < SEGMENTS_MAX && segments[at].to && segments[at].from - end < PAGE - (end - 1) % PAGE; at++)
        end = segments[at].to;
    st_program_bytes = end - st_program;
    /* The kernel puts this name above the arguments and the environment, at the end of the first thread's stack. */
    st_stack_end = getauxval(AT_EXECFN);
    long now = st_sys(__NR_brk, 0);
    if (!st_sys_failed(now))
        st_heap_begin = (uintptr_t)now;
}

/* Any answer except EFAULT (a filter's, for example) says nothing about memory. To test whether memory is writable the
 * kernel writes eight bytes there: the caller passes eight bytes that the program lets the shim write.
 */
static bool is_there(uintptr_t at, bool to_write)
{
    if (!to_write)
        at &= ~(uintptr_t)7;
    return (to_write ? st_sys(__NR_rt_sigprocmask, 0, 0, at, 8) : st_sys(__NR_rt_sigprocmask, -1, at, 0, 8)) != -EFAULT;
}

/* Certainly mapped: a segment of the program, or the stack of a thread, above which libc keeps the thread's own
 * structure.
 */
static bool is_known(uintptr_t at, size_t bytes, bool to_write)
{
    uintptr_t here = (uintptr_t)__builtin_frame_address(0), thread = st_this_thread();
    if (thread - here < THREAD_STACK_MAX && at >= here && at < thread && bytes <= thread - at)
        return true;
    for (unsigned which = 0; which < SEGMENTS_MAX && segments[which].to; which++)
        if (at >= segments[which].from && at < segments[which].to && bytes <= segments[which].to - at)
            return !to_write || segments[which].writable;
    return false;
}

/* The heap may have begun before the shim. It is contiguous, so mapped memory before its known beginning is part of it. */
static void learn_heap(uintptr_t at)
{
    uintptr_t begin = __atomic_load_n(&st_heap_begin, __ATOMIC_RELAXED);
    at &= ~(uintptr_t)(PAGE - 1);
    if (program_end && at > program_end && at < begin && begin <= (uintptr_t)st_break())
        __atomic_store_n(&st_heap_begin, at, __ATOMIC_RELAXED);
}

bool st_text_slow(const char *text)
{
    uintptr_t at = (uintptr_t)text;
    if (at < PAGE)
        return false;
    if (is_known(at, 1, false))
        return true;
    for (size_t seen = 0; seen < PATH_MAX;) {
        size_t piece = PAGE - (at + seen) % PAGE;
        if (!is_there(at + seen, false))
            return false;
        if (memchr(text + seen, 0, piece))
            break;
        seen += piece;
    }
    learn_heap(at);
    return true;
}

bool st_memory_slow(const void *memory, size_t bytes, bool to_write)
{
    uintptr_t at = (uintptr_t)memory, last = at + bytes - 1;
    if (at < PAGE || last < at)
        return false;
    if (is_known(at, bytes, to_write))
        return true;
    /* Eight bytes of the structure itself, on each of its pages; a shorter structure is not tested. */
    for (uintptr_t page = at; page <= last; page += PAGE - page % PAGE) {
        uintptr_t eight = !to_write || last - page >= 7 ? page : last - 7;
        if ((!to_write || bytes >= 8) && !is_there(eight, to_write))
            return false;
    }
    learn_heap(at);
    return true;
}
