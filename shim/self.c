/* Which process is this, and what is its umask? Danger avoided: a child that shares its parent's memory (vfork), or has
 * a copy of it (fork), and uses what belongs to the parent.
 *
 * The process's number is in a page that the kernel wipes in fork children. A vfork child sees its parent's number,
 * which is not its own. Only children of a fork through the wrapper write their own number. In any other child the page
 * stays wiped: the reader might be a vfork child of a fork child, and would write the wrong number.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/mman.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static int *owner;      /* in the wiped page; NULL: none */
static bool wiped;      /* the kernel supports that */
static uint32_t mask = ST_UMASK_UNKNOWN;

#define MANY UINTPTR_MAX
static uintptr_t vforker; /* the thread that called vfork; MANY: several, or a similar call */

void st_self_start(void)
{
    long page = st_sys(__NR_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (st_sys_failed(page))
        return;
    owner = (int *)page;
    /* The length is rounded up to the machine's page. */
    wiped = !st_sys_failed(st_sys(__NR_madvise, page, 4096, MADV_WIPEONFORK));
    st_self_forked();
}

void st_self_forked(void)
{
    __atomic_store_n(&vforker, 0, __ATOMIC_RELAXED);
    if (owner)
        __atomic_store_n(owner, st_sys_getpid(), __ATOMIC_RELAXED);
}

enum st_self st_self(int *pid)
{
    *pid = st_sys_getpid();
    int written = owner ? __atomic_load_n(owner, __ATOMIC_RELAXED) : 0;
    if (written == *pid)
        return ST_SELF_OWN;
    return written && wiped ? ST_SELF_VFORKED : ST_SELF_UNKNOWN;
}

/* ---- Without a system call: has a thread called vfork since this process last had its memory alone? Only for uses
 * where an error is harmless: a child of a bare system call would count for its parent.
 */

static void shares_memory(uintptr_t who)
{
    uintptr_t before = __atomic_load_n(&vforker, __ATOMIC_RELAXED), now;
    do
        now = before && before != who ? MANY : who;
    while (!__atomic_compare_exchange_n(&vforker, &before, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* The thread that called vfork runs again, so its child has ended. */
static bool is_own(uintptr_t who, enum st_self self)
{
    if (self == ST_SELF_OWN && who == st_this_thread())
        __atomic_compare_exchange_n(&vforker, &who, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return self == ST_SELF_OWN;
}

bool st_owns_memory(void)
{
    int pid;
    /* Wiped: the child of an unseen fork, which may itself have called vfork by now. */
    if (!wiped || !__atomic_load_n(owner, __ATOMIC_RELAXED))
        return false;
    uintptr_t who = __atomic_load_n(&vforker, __ATOMIC_RELAXED);
    return st_likely(!who) || is_own(who, st_self(&pid));
}

bool st_is_vforked(void)
{
    int pid;
    uintptr_t who = __atomic_load_n(&vforker, __ATOMIC_RELAXED);
    if (st_likely(!who))
        return false;
    enum st_self self = st_self(&pid);
    return !is_own(who, self) && self == ST_SELF_VFORKED;
}

/* A caller of vfork returns twice, so no C function may be in between: the wrapper only records it, and jumps to the
 * next function.
 */
__attribute__((used, visibility("hidden"))) void *st_vfork_begins(void)
{
    void *next = ST_NEXT(vfork);
    shares_memory(st_this_thread());
    return next ? next : ST_NEXT(fork);
}

#if defined(__x86_64__)
__asm__(".text\n.globl vfork\n.type vfork, @function\nvfork:\n"
        "\tendbr64\n\tsubq $8, %rsp\n\tcall st_vfork_begins\n\taddq $8, %rsp\n\tjmp *%rax\n"
        ".size vfork, .-vfork\n.globl __vfork\n.set __vfork, vfork\n");
#else
__asm__(".text\n.globl vfork\n.type vfork, %function\nvfork:\n"
        "\thint #34\n\tstp x29, x30, [sp, #-16]!\n\tbl st_vfork_begins\n\tldp x29, x30, [sp], #16\n\tmov x16, x0\n\tbr x16\n"
        ".size vfork, .-vfork\n.globl __vfork\n.set __vfork, vfork\n");
#endif

/* A child that shares the memory and is not a thread may live for any time. */
#define CLONES(name)                                                                                           \
    ST_WRAP(int, name, int (*begins)(void *), void *stack, int flags, void *argument, ...)                     \
    {                                                                                                          \
        va_list more;                                                                                          \
        va_start(more, argument);                                                                              \
        void *a = va_arg(more, void *), *b = va_arg(more, void *), *c = va_arg(more, void *);                  \
        va_end(more);                                                                                          \
        int (*next)(int (*)(void *), void *, int, void *, ...) = ST_NEXT(name);                                \
        if ((flags & CLONE_VM) && !(flags & CLONE_THREAD))                                                     \
            shares_memory(MANY);                                                                               \
        if (!(flags & CLONE_VM) != !(flags & CLONE_FILES))                                                     \
            st_base_never(); /* one of memory and descriptors is shared, the other is not */                   \
        if ((flags & CLONE_VM) && (flags & CLONE_FILES) && !(flags & CLONE_THREAD))                            \
            st_anchor_end(); /* it looks like a vfork child, which has descriptors of its own */               \
        if (next)                                                                                              \
            return next(begins, stack, flags, argument, a, b, c);                                              \
        errno = ENOSYS;                                                                                        \
        return -1;                                                                                             \
    }
CLONES(clone)
CLONES(__clone)

static uint32_t ask_umask(void)
{
    uint32_t old = (uint32_t)st_sys(__NR_umask, 0);
    st_sys(__NR_umask, old);
    return old;
}

void st_umask_start(void)
{
    __atomic_store_n(&mask, ask_umask(), __ATOMIC_RELAXED);
}

uint32_t st_umask(void)
{
    int pid;
    switch (st_self(&pid)) {
    case ST_SELF_OWN: return __atomic_load_n(&mask, __ATOMIC_RELAXED);
    case ST_SELF_VFORKED: return ask_umask(); /* its own, and it has one thread */
    default: return ST_UMASK_UNKNOWN;
    }
}

ST_WRAP(mode_t, umask, mode_t to)
{
    mode_t (*next)(mode_t) = ST_NEXT(umask);
    mode_t old = next ? next(to) : (mode_t)st_sys(__NR_umask, to);
    if (st_on(ST_ON_INDEX)) {
        int pid;
        enum st_self self = st_self(&pid);
        if (self == ST_SELF_OWN)
            __atomic_store_n(&mask, to & 0777, __ATOMIC_RELAXED);
        else if (self == ST_SELF_UNKNOWN)
            __atomic_store_n(&mask, ST_UMASK_UNKNOWN, __ATOMIC_RELAXED);
    }
    return old;
}
