/* The cost of counting per call, in nanoseconds. libc's function (the shim's, if it is preloaded) and the bare system call
 * alternate, and the best of many short rounds counts. The script bench/report/cost runs it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

#define EACH(best, calls, call)                    \
    do {                                           \
        double start = now();                      \
        for (int at = 0; at < (calls); at++)       \
            (void)!(call);                         \
        double each = (now() - start) / (calls);   \
        best = each < best ? each : best;          \
    } while (0)

#define MEASURE(name, calls, call, native)                                                          \
    do {                                                                                            \
        double best = 1e18, bare = 1e18;                                                            \
        for (int round = 0; round < 400; round++) {                                                 \
            EACH(best, calls, call);                                                                \
            EACH(bare, calls, native);                                                              \
        }                                                                                           \
        printf("%-28s %9.1f   native %9.1f   %+7.1f\n", name, best, bare, best - bare);             \
    } while (0)

int main(int count, char **words)
{
    static char bytes[1 << 20];
    for (int at = 1; at < count; at++) {
        int file = open(words[at], O_RDWR | O_CREAT, 0644);
        if (file < 0 || write(file, bytes, sizeof bytes) != sizeof bytes)
            return perror(words[at]), 1;
        printf("%s\n", words[at]);
        MEASURE("pread 1 B", 500, pread(file, bytes, 1, 0), syscall(SYS_pread64, file, bytes, 1, 0));
        MEASURE("pread 4 KiB", 500, pread(file, bytes, 4096, 0), syscall(SYS_pread64, file, bytes, 4096, 0));
        MEASURE("pwrite 4 KiB", 500, pwrite(file, bytes, 4096, 0), syscall(SYS_pwrite64, file, bytes, 4096, 0));
        MEASURE("pread 1 MiB", 5, pread(file, bytes, sizeof bytes, 0), syscall(SYS_pread64, file, bytes, sizeof bytes, 0));
        close(file);
    }
    return 0;
}
