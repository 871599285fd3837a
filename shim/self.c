/* Which process is this, and what is its umask? Danger avoided: a child that shares its parent's memory (vfork) or has a copy
 * of it (fork) using what belongs to the parent.
 *
 * The process's number stands in a page that the kernel wipes in fork children; a vfork child sees its parent's number, which
 * is not its own. Only children of a fork that went through our wrapper write their own number: in any other child the page
 * stays wiped, because the one who looks might be a vfork child of a fork child, and would write the wrong number.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <sys/mman.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static int *owner;      /* in the page that is wiped; NULL: none */
static bool wiped;      /* the kernel does that */
static uint32_t mask = ST_UMASK_UNKNOWN;

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
