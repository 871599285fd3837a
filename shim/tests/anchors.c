/* The anchor, a descriptor of the tier's directory. Files are opened from the right directory whatever happens to its
 * number. There is at most one anchor, and none is left in a program that confines itself.
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *mount;

static bool is_plain(const char *path)
{
    char text[64] = "", wanted[64];
    int opened = open(below(mount, path), O_RDONLY);
    ssize_t bytes = opened < 0 ? 0 : read(opened, text, sizeof text - 1);
    struct stat by_descriptor, by_path;
    bool same = opened >= 0 && fstat(opened, &by_descriptor) == 0 && stat(below(mount, path), &by_path) == 0 &&
                by_descriptor.st_ino == by_path.st_ino && by_descriptor.st_dev == by_path.st_dev;
    if (opened >= 0)
        close(opened);
    text[bytes > 0 ? bytes : 0] = 0;
    snprintf(wanted, sizeof wanted, "plain %s\n", path);
    return same && !strcmp(text, wanted);
}

/* Counts directories' descriptors without another use; the last one is put into `number`. */
static int anchors(int *number)
{
    int count = 0;
    struct stat file;
    for (int at = 100; at < 1024; at++) {
        int flags = fcntl(at, F_GETFL);
        if (flags < 0 || !(flags & O_PATH))
            continue;
        *number = at;
        count++;
        CHECK(fcntl(at, F_GETFD) & FD_CLOEXEC && fstat(at, &file) == 0 && S_ISDIR(file.st_mode));
    }
    return count;
}

static int anchored_at(const char *file)
{
    int number = -1;
    for (int again = 0; again < 2000; again++)
        CHECK(is_plain(file));
    CHECK(anchors(&number) == 1 && number >= 192);
    return number;
}

static void *opens(void *file)
{
    for (int again = 0; again < 20000; again++)
        CHECK(is_plain(file));
    return NULL;
}

/* In a child, since it ends anchoring. */
static void ends(bool (*confine)(void))
{
    int status = -1, number;
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        anchored_at("a/file");
        CHECK(confine() && anchors(&number) == 0);
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static bool by_prctl(void) { return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0; }
static bool by_number(void) { return syscall(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0; }
static bool by_chroot(void)
{
    /* (/proc is read afterwards.) */
    return geteuid() != 0 ? by_prctl() : chroot("/") == 0;
}
static bool by_setuid(void) { return geteuid() != 0 ? by_prctl() : setgid(65534) == 0; }

void check_anchors(const char *where)
{
    mount = where;
    int number = anchored_at("a/file"), other, status = -1;

    /* From one directory to another, and back. */
    anchored_at("target-dir/file");
    CHECK(is_plain("a/file") && is_plain("a/b/c/deep") && is_plain("top") && is_plain("target-dir/file"));

    /* Closed, by every kind of call. */
    number = anchored_at("a/file");
    CHECK(close(number) == 0 && is_plain("a/file"));
    number = anchored_at("a/file");
    CHECK(close_range((unsigned)number, (unsigned)number + 9, 0) == 0 && is_plain("a/file"));
    number = anchored_at("a/file");
    CHECK(syscall(SYS_close, number) == 0 && is_plain("a/file"));

    /* Replaced by a directory that has a file of that name; the number stays the program's. */
    number = anchored_at("a/file");
    other = open(below(mount, "target-dir"), O_RDONLY | O_DIRECTORY);
    CHECK(dup2(other, number) == number && is_plain("a/file"));
    for (int again = 0; again < 100; again++)
        CHECK(is_plain("a/file"));
    CHECK(fcntl(number, F_GETFD) == 0 && close(number) == 0);
    /* Closed unseen, but then returned by a call that is seen. */
    number = anchored_at("a/file");
    CHECK(close(number) == 0 && fcntl(other, F_DUPFD, number) == number && is_plain("a/file") && close(number) == 0);
    close(other);

    /* A vfork child closes its own; none is left in its parent. */
    for (int again = 0; again < 40; again++) {
        number = anchored_at("a/file");
        pid_t child = vfork();
        if (child == 0) {
            close_range((unsigned)number, (unsigned)number + 9, 0);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0 && is_plain("a/file") && anchors(&number) == 1);
    }
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        CHECK(is_plain("a/file") && anchors(&number) == 1);
        anchored_at("target-dir/file");
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    ends(by_prctl);
    ends(by_number);
    ends(by_chroot);
    ends(by_setuid);

    /* Several threads, each in its own directory; and no room. */
    static const char *files[] = {"a/file", "target-dir/file", "a/b/c/deep"};
    pthread_t threads[3];
    for (int at = 0; at < 3; at++)
        CHECK(pthread_create(&threads[at], NULL, opens, (void *)files[at]) == 0);
    for (int at = 0; at < 3; at++)
        pthread_join(threads[at], NULL);
    CHECK(anchors(&number) <= 1);
    child = fork();
    if (child == 0) {
        failures = 0;
        close_range((unsigned)number, (unsigned)number + 9, 0);
        struct rlimit limit = {64, 64};
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        for (int again = 0; again < 100; again++)
            CHECK(is_plain("a/file"));
        CHECK(anchors(&number) == 0);
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}
