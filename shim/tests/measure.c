/* Nanoseconds a call, the best of some rounds; `run measure` prints them without and with the shim. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CALLS 20000

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

#define MEASURE(name, call)                                           \
    do {                                                              \
        double best = 1e18;                                           \
        for (int round = 0; round < 15; round++) {                    \
            double start = now();                                     \
            for (int at = 0; at < CALLS; at++)                        \
                (void)!(call);                                        \
            double each = (now() - start) / CALLS;                    \
            best = each < best ? each : best;                         \
        }                                                             \
        printf("%-44s %8.0f\n", name, best);                          \
    } while (0)

void measure(const char *mount, const char *tier)
{
    struct stat out;
    const char *outside = "/usr/bin/env", *inside = below(mount, "a/b/c/deep"), *direct = below(tier, "a/b/c/deep");
    CHECK(chdir("/usr/bin") == 0);
    MEASURE("outside, open+close", close(open(outside, O_RDONLY)));
    MEASURE("outside, open+close, relative", close(open("env", O_RDONLY)));
    MEASURE("outside, stat", stat(outside, &out));
    MEASURE("outside, stat, relative", stat("env", &out));
    int directory = open("/usr", O_RDONLY | O_DIRECTORY);
    MEASURE("outside, fstatat, descriptor", fstatat(directory, "bin/env", &out, 0));
    close(directory);
    directory = open(outside, O_RDONLY);
    MEASURE("outside, fstat", fstat(directory, &out));
    close(directory);
    CHECK(chdir(mount) == 0);
    MEASURE("plain file itself, open+close", close(open(direct, O_RDONLY)));
    MEASURE("inside, open+close", close(open(inside, O_RDONLY)));
    MEASURE("inside, open+close, relative", close(open("a/b/c/deep", O_RDONLY)));
    MEASURE("inside, stat", stat(inside, &out));
    MEASURE("inside, stat, relative", stat("a/b/c/deep", &out));
    MEASURE("inside, stat of what is missing", stat("a/b/c/nothing", &out));
    directory = open("a", O_RDONLY | O_DIRECTORY);
    MEASURE("inside, fstatat, descriptor", fstatat(directory, "b/c/deep", &out, 0));
    close(directory);
    directory = open(inside, O_RDONLY);
    MEASURE("inside, fstat", fstat(directory, &out));
    close(directory);
    MEASURE("inside, open for writing + close", close(open("a/file", O_WRONLY)));
}
