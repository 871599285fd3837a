/* System calls that a program makes by number, through libc's syscall(). Danger avoided: trusting cached facts about a
 * descriptor, the working directory or the identity after a call that bypassed the wrapper of its name. (Calls without
 * libc are not seen: catalogue.md, "Limits".)
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>

static long call(long number, long a, long b, long c, long d, long e, long f)
{
    long result = st_sys(number, a, b, c, d, e, f);
    if (!st_sys_failed(result))
        return result;
    errno = (int)-result;
    return -1;
}

/* Many calls of these two only query. */
static bool ends_paths(long number, long a)
{
    switch (number) {
    case __NR_seccomp: return (unsigned)a == SECCOMP_SET_MODE_STRICT || (unsigned)a == SECCOMP_SET_MODE_FILTER;
    case __NR_prctl: return (int)a == PR_SET_SECCOMP || (int)a == PR_SET_NO_NEW_PRIVS;
    default: return true;
    }
}

/* Returns the function that makes the call. */
__attribute__((used, visibility("hidden"))) void *st_syscall_begins(long number, long a)
{
    switch (number) {
    case __NR_close:
        st_kind_forget((int)a);
        break;
    /* These are rare, and their outcome is not known. */
#ifdef __NR_dup2
    case __NR_dup2:
#endif
#ifdef __NR_vfork
    case __NR_vfork:
#endif
#ifdef __NR_close_range
    case __NR_close_range:
#endif
#ifdef __NR_clone3
    case __NR_clone3:
#endif
    case __NR_dup3: case __NR_clone: case __NR_chdir: case __NR_fchdir:
        st_base_never();
        break;
    case __NR_setuid: case __NR_setgid: case __NR_setreuid: case __NR_setregid: case __NR_setresuid: case __NR_setresgid:
    case __NR_setfsuid: case __NR_setfsgid: case __NR_setgroups: case __NR_capset:
        st_off(ST_ON_INDEX);
        break;
    case __NR_unshare:
        st_base_never();
        if (a & ~(CLONE_FILES | CLONE_SYSVSEM))
            st_off(ST_ON_INDEX | ST_ON_PATHS);
        break;
    case __NR_seccomp: case __NR_prctl: case __NR_setns: case __NR_chroot:
        if (ends_paths(number, a))
            st_off(ST_ON_INDEX | ST_ON_PATHS);
        break;
    default:
        break;
    }
    void *next = ST_NEXT(syscall);
    return next ? next : (void *)call;
}

/* The stack has nothing of the shim when the call is made: it may return twice, or on another stack. */
#if defined(__x86_64__)
__asm__(".text\n.globl syscall\n.type syscall, @function\nsyscall:\n"
        "\tendbr64\n\tpushq %rdi\n\tpushq %rsi\n\tpushq %rdx\n\tpushq %rcx\n\tpushq %r8\n\tpushq %r9\n\tsubq $8, %rsp\n"
        "\tcall st_syscall_begins\n"
        "\taddq $8, %rsp\n\tpopq %r9\n\tpopq %r8\n\tpopq %rcx\n\tpopq %rdx\n\tpopq %rsi\n\tpopq %rdi\n\tjmp *%rax\n"
        ".size syscall, .-syscall\n");
#else
__asm__(".text\n.globl syscall\n.type syscall, %function\nsyscall:\n"
        "\thint #34\n\tstp x29, x30, [sp, #-80]!\n\tstp x0, x1, [sp, #16]\n\tstp x2, x3, [sp, #32]\n\tstp x4, x5, [sp, #48]\n"
        "\tstp x6, x7, [sp, #64]\n\tbl st_syscall_begins\n\tmov x16, x0\n"
        "\tldp x0, x1, [sp, #16]\n\tldp x2, x3, [sp, #32]\n\tldp x4, x5, [sp, #48]\n\tldp x6, x7, [sp, #64]\n"
        "\tldp x29, x30, [sp], #80\n\tbr x16\n"
        ".size syscall, .-syscall\n");
#endif
