/* Many operations at once: threads, fork, vfork, posix_spawn, a signal handler that opens and asks, opens in
 * destructors of threads' values. It looks for a lock, an allocation or a lost errno in a place where there must be
 * none.
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static const char *deep, *top, *made_name;
static int wrong, handled, destroyed;
static pthread_key_t key;

static void expect_plain(const char *path)
{
    char text[6] = "";
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    if (opened < 0 || read(opened, text, 5) != 5 || strcmp(text, "plain"))
        __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    close(opened);
}

static void on_alarm(int number)
{
    (void)number;
    struct stat out;
    int before = errno = 4711;
    expect_plain(deep);
    if (stat(top, &out) || errno != before)
        __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    if (__atomic_fetch_add(&handled, 1, __ATOMIC_RELAXED) % 16 == 0)
        close(open(made_name, O_WRONLY | O_CREAT, 0600));
}

static void on_exit_of_thread(void *value)
{
    (void)value;
    expect_plain(top);
    expect_plain("a/file");
    __atomic_fetch_add(&destroyed, 1, __ATOMIC_RELAXED);
}

static void *short_thread(void *unused)
{
    (void)unused;
    pthread_setspecific(key, &key);
    expect_plain("a/b/c/deep");
    return NULL;
}

static void child_checks(int status)
{
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
}

static void children(int round)
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        wrong = 0;
        expect_plain(deep);
        if (chdir("a"))
            _exit(3);
        expect_plain("file");
        if (round % 4 == 0)
            close(open(made_name, O_WRONLY | O_CREAT, 0600));
        _exit(wrong != 0);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    child_checks(status);
    child = vfork();
    if (child == 0)
        _exit(chdir("a/b") || access("c/deep", F_OK) || !access("file", F_OK));
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    child_checks(status);
    expect_plain("a/file");
    char *arguments[] = {(char *)(uintptr_t)"true", NULL};
    if (round % 8 == 0 && posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0) {
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
        child_checks(status);
    }
}

static void *busy_thread(void *stop)
{
    struct stat out;
    while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED)) {
        expect_plain(deep);
        expect_plain("top");
        if (stat("a/file", &out) || stat("nothing", &out) == 0)
            __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

void check_stress(const char *mount, int rounds)
{
    static int stop;
    char texts[3][4096];
    snprintf(texts[0], sizeof texts[0], "%s/a/b/c/deep", mount);
    snprintf(texts[1], sizeof texts[1], "%s/top", mount);
    snprintf(texts[2], sizeof texts[2], "%s/a/stressed", mount);
    deep = texts[0], top = texts[1], made_name = texts[2];
    CHECK(chdir(mount) == 0 && pthread_key_create(&key, on_exit_of_thread) == 0);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 700}, {0, 700}}, off = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    pthread_t busy;
    pthread_create(&busy, NULL, busy_thread, &stop);
    for (int round = 0; round < rounds; round++) {
        pthread_t threads[3];
        for (int at = 0; at < 3; at++)
            pthread_create(&threads[at], NULL, short_thread, NULL);
        children(round);
        for (int at = 0; at < 3; at++)
            pthread_join(threads[at], NULL);
    }
    setitimer(ITIMER_REAL, &off, NULL);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(busy, NULL);
    CHECK(wrong == 0 && handled > 0 && destroyed == 3 * rounds);
    printf("%d rounds, %d signals, %d wrong\n", rounds, handled, wrong);
}
