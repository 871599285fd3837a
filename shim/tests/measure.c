/* Nanoseconds of processor time per call, the best of many short rounds. libc's function (under the shim, the shim's)
 * and the bare system call alternate, so that a busy machine disturbs both.
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CALLS 500
#define ROUNDS 400

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

#define EACH(best, call)                         \
    do {                                         \
        double start = now();                    \
        for (int at = 0; at < CALLS; at++)       \
            (void)!(call);                       \
        double each = (now() - start) / CALLS;   \
        best = each < best ? each : best;        \
    } while (0)

#define MEASURE(name, call, native)                                                                \
    do {                                                                                           \
        double best = 1e18, bare = 1e18;                                                           \
        for (int round = 0; round < ROUNDS; round++) {                                             \
            EACH(best, call);                                                                      \
            EACH(bare, native);                                                                    \
        }                                                                                          \
        printf("%-37s %7.0f   native %7.0f   %+6.0f\n", name, best, bare, best - bare);            \
    } while (0)

#define OPEN(dir, path, flags) (int)syscall(SYS_openat, dir, path, flags)
#define STAT(dir, path) syscall(SYS_newfstatat, dir, path, &out, 0)

void measure(const char *mount, const char *tier)
{
    struct stat out;
    /* Outside on another device than the mount: the mount's stand-in shares its device with most of the machine. */
    const char *outside = strdup(below(tier, "a/file"));
    const char *inside = strdup(below(mount, "a/b/c/deep")), *direct = strdup(below(tier, "a/b/c/deep"));
    const char *mapped = strcpy(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), outside);
    CHECK(chdir(below(tier, "a")) == 0);
    MEASURE("outside, open+close", close(open(outside, O_RDONLY)), close(OPEN(AT_FDCWD, outside, O_RDONLY)));
    MEASURE("outside, open+close, relative", close(open("file", O_RDONLY)), close(OPEN(AT_FDCWD, "file", O_RDONLY)));
    MEASURE("outside, stat", stat(outside, &out), STAT(AT_FDCWD, outside));
    MEASURE("outside, stat, path in mapped memory", stat(mapped, &out), STAT(AT_FDCWD, mapped));
    MEASURE("outside, stat, relative", stat("file", &out), STAT(AT_FDCWD, "file"));
    int directory = open(tier, O_RDONLY | O_DIRECTORY);
    MEASURE("outside, fstatat, descriptor", fstatat(directory, "a/file", &out, 0), STAT(directory, "a/file"));
    close(directory);
    directory = open(outside, O_RDONLY);
    MEASURE("outside, fstat", fstat(directory, &out), syscall(SYS_fstat, directory, &out));
    close(directory);
    CHECK(chdir(mount) == 0);
    MEASURE("inside, open+close (plain file)", close(open(inside, O_RDONLY)), close(OPEN(AT_FDCWD, direct, O_RDONLY)));
    MEASURE("inside, open+close, relative", close(open("a/b/c/deep", O_RDONLY)), close(OPEN(AT_FDCWD, direct, O_RDONLY)));
    MEASURE("inside, stat", stat(inside, &out), STAT(AT_FDCWD, inside));
    MEASURE("inside, stat, relative", stat("a/b/c/deep", &out), STAT(AT_FDCWD, "a/b/c/deep"));
    MEASURE("inside, stat of what is missing", stat("a/b/c/nothing", &out), STAT(AT_FDCWD, "a/b/c/nothing"));
    directory = open("a", O_RDONLY | O_DIRECTORY);
    MEASURE("inside, fstatat, descriptor", fstatat(directory, "b/c/deep", &out, 0), STAT(directory, "b/c/deep"));
    close(directory);
    directory = open(inside, O_RDONLY);
    MEASURE("inside, fstat", fstat(directory, &out), syscall(SYS_fstat, directory, &out));
    close(directory);
    MEASURE("inside, open for writing + close", close(open("a/file", O_WRONLY)), close(OPEN(AT_FDCWD, direct, O_WRONLY)));
}
