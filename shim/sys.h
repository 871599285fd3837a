/* System calls without libc: they return a negative errno and leave `errno` unchanged, are not cancellation points, and
 * other preloaded libraries do not see them. Danger avoided: a shim that changes the errno of a call that succeeds.
 */
#ifndef SURGETANK_SYS_H
#define SURGETANK_SYS_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* The sixth argument's register is cleared afterwards: otherwise the program's next call would carry ST_OWN_CALL, and
 * reach the bare directory.
 */
static inline long st_sys6(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall\n\txorl %%r9d, %%r9d"
                     : "=a"(result), "+r"(r9)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "cc", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0\n\tmov x5, xzr"
                     : "+r"(x0), "+r"(x5)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory");
    return x0;
#else
#error "the shim knows x86_64 and aarch64"
#endif
}

#define ST_SYS_PICK(number, a, b, c, d, e, f, ...) \
    st_sys6((number), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
/* st_sys(number, up to six arguments) */
#define st_sys(...) ST_SYS_PICK(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

static inline bool st_sys_failed(long result)
{
    return result < 0 && result >= -4095;
}

/* Without a mount the agent sees each call that names a file (seccomp), unless the sixth argument has this value. These
 * calls do not use that argument. The value marks the shim's own access to a tier.
 * crates/surgetank/src/seccomp/filter.rs has the same.
 */
#define ST_OWN_CALL 0x537472616e6b5365L

static inline void st_sys_close(int descriptor)
{
    st_sys(__NR_close, descriptor);
}

static inline long st_sys_fstat(int descriptor, struct stat *out)
{
    return st_sys(__NR_fstat, descriptor, out, 0, 0, 0, ST_OWN_CALL);
}

/* st_dev from the major and minor numbers of statx, in the form of stat */
static inline uint64_t st_device_number(uint32_t major, uint32_t minor)
{
    return ((uint64_t)(major & 0xfffu) << 8) | ((uint64_t)(major & ~0xfffu) << 32) | (minor & 0xffu) |
           ((uint64_t)(minor & ~0xffu) << 12);
}

static inline uint32_t st_device_major(uint64_t dev)
{
    return (uint32_t)((dev >> 8) & 0xfffu) | (uint32_t)((dev >> 32) & ~UINT64_C(0xfff));
}

static inline uint32_t st_device_minor(uint64_t dev)
{
    return (uint32_t)(dev & 0xffu) | (uint32_t)((dev >> 12) & ~UINT64_C(0xff));
}

static inline int st_sys_getpid(void)
{
    return (int)st_sys(__NR_getpid);
}

#endif
