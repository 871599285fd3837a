/* Directories' descriptors: cached facts about a number must not outlive it, whatever gives it to another directory. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *mount;

/* Makes a call that the shim cannot see. */
static long unseen(long number, long a, long b, long c)
{
    long result;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = 0;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    result = x0;
#endif
    return result;
}

static int open_unseen(const char *name)
{
#ifdef SYS_open
    return (int)unseen(SYS_open, (long)below(mount, name), O_RDONLY | O_DIRECTORY, 0);
#else
    return (int)unseen(SYS_openat, AT_FDCWD, (long)below(mount, name), O_RDONLY | O_DIRECTORY);
#endif
}

/* Is "file" in this directory the one of `name`, and did the tier serve it? */
static bool leads_to(int directory, const char *name)
{
    char text[64] = "", wanted[64];
    int opened = openat(directory, "file", O_RDONLY);
    ssize_t bytes = opened < 0 ? 0 : read(opened, text, sizeof text - 1);
    if (opened >= 0)
        close(opened);
    text[bytes > 0 ? bytes : 0] = 0;
    snprintf(wanted, sizeof wanted, "plain %s/file\n", name);
    return !strcmp(text, wanted);
}

/* A number that is cached as that of "a": 40, whatever else is open. */
static int remembered(void)
{
    int opened = open(below(mount, "a"), O_RDONLY | O_DIRECTORY);
    int number = fcntl(opened, F_DUPFD, 40);
    close(opened);
    CHECK(number == 40);
    for (int again = 0; again < 3; again++)
        CHECK(leads_to(number, "a"));
    return number;
}

/* Its number is free: "target-dir" gets it by unseen calls. */
static void other_at(int number)
{
    int opened = open_unseen("target-dir");
    CHECK(opened >= 0 && unseen(SYS_dup3, opened, number, 0) == number);
    unseen(SYS_close, opened, 0, 0);
    for (int again = 0; again < 3; again++)
        CHECK(leads_to(number, "target-dir"));
    close(number);
}

static bool by_close_range; /* or by unshare */

static void *in_a_thread_of_its_own(void *argument)
{
    int number = *(int *)argument;
    CHECK(by_close_range ? close_range(900, 901, CLOSE_RANGE_UNSHARE) == 0 : unshare(CLONE_FILES) == 0);
    int opened = open(below(mount, "target-dir"), O_RDONLY | O_DIRECTORY);
    CHECK(unseen(SYS_dup3, opened, number, 0) == number && leads_to(number, "target-dir"));
    return NULL;
}

void check_numbers(const char *where)
{
    mount = where;
    int number = remembered();
    CHECK(close(number) == 0);
    other_at(number);

    number = remembered();
    CHECK(syscall(SYS_close, number) == 0);
    other_at(number);

    number = remembered();
    CHECK(close_range((unsigned)number, (unsigned)number, 0) == 0);
    other_at(number);

    number = remembered();
    CHECK(closedir(fdopendir(number)) == 0);
    other_at(number);

    number = remembered();
    CHECK(fclose(fdopen(number, "r")) == 0);
    other_at(number);

    number = remembered();
    int other = open(below(mount, "target-dir"), O_RDONLY | O_DIRECTORY);
    CHECK(dup2(other, number) == number && leads_to(number, "target-dir"));
    close(number);
    number = remembered();
    CHECK(dup3(other, number, O_CLOEXEC) == number && leads_to(number, "target-dir"));
    close(number);

    /* Closed unseen, but then returned by a call that is seen. */
    number = remembered();
    unseen(SYS_close, number, 0, 0);
    CHECK(fcntl(other, F_DUPFD, number) == number && leads_to(number, "target-dir"));
    close(number);

    /* A vfork child has other descriptors in the same memory. */
    number = remembered();
    pid_t child = vfork();
    if (child == 0) {
        bool right = unseen(SYS_dup3, other, number, 0) == number && leads_to(number, "target-dir");
        _exit(!right);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && leads_to(number, "a"));
    close(number);

    /* Each of these ends caching permanently, so it runs in a child. */
    child = fork();
    if (child == 0) {
        failures = 0;
        number = remembered();
        CHECK(syscall(SYS_dup3, other, number, 0) == number && leads_to(number, "target-dir"));
        _exit(failures);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (int how = 0; how < 2; how++) {
        by_close_range = how;
        child = fork();
        if (child == 0) {
            failures = 0;
            number = remembered();
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, in_a_thread_of_its_own, &number) == 0 && pthread_join(thread, NULL) == 0);
            CHECK(leads_to(number, "a"));
            _exit(failures);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }

    /* A vfork child of a child that the shim does not know: of a fork by a bare system call. */
    child = (pid_t)unseen(SYS_clone, SIGCHLD, 0, 0);
    if (child == 0) {
        failures = 0;
        number = remembered();
        pid_t its = vfork();
        if (its == 0) {
            bool right = unseen(SYS_dup3, other, number, 0) == number && leads_to(number, "target-dir");
            _exit(!right);
        }
        CHECK(waitpid(its, &status, 0) == its && status == 0 && leads_to(number, "a"));
        _exit(failures);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close(other);
}
