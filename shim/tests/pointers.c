/* Pointers to unmapped memory: the shim returns EFAULT, as the kernel does, and the program lives. Memory at the edge
 * of a mapping is served. It runs once with a present mount and once with an absent one.
 */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define FAULTS(call)                                                                              \
    do {                                                                                          \
        errno = 0;                                                                                \
        long result = (long)(call);                                                               \
        if ((result != -1 && result != 0) || errno != EFAULT) {                                   \
            fprintf(stderr, "%s:%d: %s with %p: %ld, errno %d\n", __FILE__, __LINE__, #call,      \
                    (const void *)bad, result, errno);                                            \
            failures++;                                                                           \
        }                                                                                         \
    } while (0)

extern char **environ;

/* Three pages, of which the middle one is mapped. */
static char *island(int protection)
{
    long page = sysconf(_SC_PAGESIZE);
    char *area = mmap(NULL, 3 * (size_t)page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(area + page, (size_t)page, PROT_READ | PROT_WRITE);
    memset(area + page, 'x', (size_t)page);
    mprotect(area + page, (size_t)page, protection);
    return area + page;
}

static void bad_paths(const char *bad, const char *good)
{
    struct stat stats;
    struct statx extended;
    struct statfs fs;
    struct statvfs vfs;
    char text[100];
    char *arguments[] = {text, NULL};
    FAULTS(open(bad, O_RDONLY));
    FAULTS(open(bad, O_CREAT | O_WRONLY, 0600));
    FAULTS(open(bad, O_RDONLY | O_NOFOLLOW));
    FAULTS(openat(AT_FDCWD, bad, O_RDONLY));
    FAULTS(creat(bad, 0600));
    FAULTS(fopen(bad, "r"));
    FAULTS(freopen(bad, "r", fopen("/dev/null", "r")));
    FAULTS(stat(bad, &stats));
    FAULTS(lstat(bad, &stats));
    FAULTS(fstatat(AT_FDCWD, bad, &stats, 0));
    FAULTS(fstatat(AT_FDCWD, bad, &stats, AT_SYMLINK_NOFOLLOW));
    FAULTS(statx(AT_FDCWD, bad, 0, STATX_BASIC_STATS, &extended));
    FAULTS(access(bad, F_OK));
    FAULTS(eaccess(bad, F_OK));
    FAULTS(faccessat(AT_FDCWD, bad, F_OK, 0));
    FAULTS(chmod(bad, 0600));
    FAULTS(fchmodat(AT_FDCWD, bad, 0600, 0));
    FAULTS(chown(bad, 0, 0));
    FAULTS(lchown(bad, 0, 0));
    FAULTS(fchownat(AT_FDCWD, bad, 0, 0, 0));
    FAULTS(truncate(bad, 0));
    FAULTS(utime(bad, NULL));
    FAULTS(utimes(bad, NULL));
    FAULTS(lutimes(bad, NULL));
    FAULTS(utimensat(AT_FDCWD, bad, NULL, 0));
    FAULTS(utimensat(AT_FDCWD, bad, NULL, AT_SYMLINK_NOFOLLOW));
    FAULTS(futimesat(AT_FDCWD, bad, NULL));
    FAULTS(unlink(bad));
    FAULTS(unlinkat(AT_FDCWD, bad, 0));
    FAULTS(rmdir(bad));
    FAULTS(remove(bad));
    FAULTS(mkdir(bad, 0700));
    FAULTS(mkdirat(AT_FDCWD, bad, 0700));
    FAULTS(mkfifo(bad, 0700));
    FAULTS(mknod(bad, S_IFIFO | 0600, 0));
    FAULTS(mknodat(AT_FDCWD, bad, S_IFIFO | 0600, 0));
    FAULTS(symlink(good, bad));
    FAULTS(symlink(bad, good));
    FAULTS(symlinkat(good, AT_FDCWD, bad));
    FAULTS(link(bad, good));
    FAULTS(linkat(AT_FDCWD, bad, AT_FDCWD, good, 0));
    FAULTS(linkat(AT_FDCWD, bad, AT_FDCWD, good, AT_SYMLINK_FOLLOW));
    FAULTS(rename(bad, good));
    FAULTS(renameat(AT_FDCWD, bad, AT_FDCWD, good));
    FAULTS(renameat2(AT_FDCWD, bad, AT_FDCWD, good, 0));
    FAULTS(readlink(bad, text, sizeof text));
    FAULTS(readlinkat(AT_FDCWD, bad, text, sizeof text));
    FAULTS(chdir(bad));
    FAULTS(statfs(bad, &fs));
    FAULTS(statvfs(bad, &vfs));
    FAULTS(getxattr(bad, "user.a", text, sizeof text));
    FAULTS(lgetxattr(bad, "user.a", text, sizeof text));
    FAULTS(setxattr(bad, "user.a", text, 1, 0));
    FAULTS(lsetxattr(bad, "user.a", text, 1, 0));
    FAULTS(listxattr(bad, text, sizeof text));
    FAULTS(removexattr(bad, "user.a"));
    FAULTS(inotify_add_watch(inotify_init(), bad, IN_OPEN));
    FAULTS(execv(bad, arguments));
    FAULTS(execve(bad, arguments, environ));
    FAULTS(execveat(AT_FDCWD, bad, arguments, environ, 0));
    pid_t child;
    CHECK(posix_spawn(&child, bad, NULL, NULL, arguments, environ) == EFAULT);
}

/* `out`: memory that cannot be written. */
static void bad_structures(const char *bad, void *out, const char *path, int descriptor)
{
    FAULTS(stat(path, out));
    FAULTS(lstat(path, out));
    FAULTS(fstat(descriptor, out));
    FAULTS(fstatat(AT_FDCWD, path, out, 0));
    FAULTS(statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, out));
    FAULTS(readlink("/proc/self/exe", out, 10));
    FAULTS(statfs(path, out));
    FAULTS(utimensat(AT_FDCWD, path, (const void *)bad, 0));
    FAULTS(futimens(descriptor, (const void *)bad));
    FAULTS(bind(socket(AF_UNIX, SOCK_STREAM, 0), (const void *)bad, sizeof(struct sockaddr_un)));
    FAULTS(connect(socket(AF_UNIX, SOCK_STREAM, 0), (const void *)bad, sizeof(struct sockaddr_un)));
    FAULTS(setxattr(path, (const char *)bad, "v", 1, 0));
    FAULTS(setxattr(path, "user.a", bad, 20, 0));
    FAULTS(getxattr(path, (const char *)bad, NULL, 0));
}

/* A path whose end is the page's end, on the stack, in the heap, among the program's own data; and the memory for an
 * answer.
 */
static void edges(const char *path)
{
    long page = sysconf(_SC_PAGESIZE);
    size_t bytes = strlen(path) + 1;
    char *area = island(PROT_READ | PROT_WRITE), *heap = strdup(path), stack[4096];
    static char data[4096];
    const char *paths[] = {memcpy(area + page - bytes, path, bytes), memcpy(stack, path, bytes), memcpy(data, path, bytes), heap};
    struct stat *out = (void *)area, named;
    for (size_t which = 0; which < sizeof paths / sizeof *paths; which++) {
        CHECK(!strcmp(who(open(paths[which], O_RDONLY)), "plain"));
        CHECK(stat(paths[which], &named) == 0);
        CHECK(stat(paths[which], out) == 0 && out->st_ino == named.st_ino);
    }
    free(heap);
    /* Memory next to an unaligned structure stays unchanged. */
    char *beside = island(PROT_READ | PROT_WRITE);
    size_t odd[] = {4, (size_t)page - sizeof named - 1};
    for (size_t which = 0; which < sizeof odd / sizeof *odd; which++) {
        char *at = beside + odd[which];
        memset(beside, 'x', (size_t)page);
        CHECK(stat(path, (void *)at) == 0);
        for (char *byte = beside; byte < beside + page; byte++)
            CHECK(*byte == 'x' || (byte >= at && byte < at + sizeof named));
    }
}

static void *look(void *of)
{
    const char *mount = of, *path = below(mount, "top");
    char *unmapped = island(PROT_READ), *cut = island(PROT_READ) + sysconf(_SC_PAGESIZE) - 10, *constant = island(PROT_READ);
    munmap(unmapped, (size_t)sysconf(_SC_PAGESIZE));
    const char *bad[] = {island(PROT_NONE), unmapped, cut, (char *)UINTPTR_MAX, (char *)(uintptr_t)0xdeadc0de, (char *)(uintptr_t)8,
                         (char *)(UINTPTR_MAX - 4095), (char *)(uintptr_t)0x8000000000000000u};
    for (size_t which = 0; which < sizeof bad / sizeof *bad; which++)
        bad_paths(bad[which], "/nowhere");
    if (access(path, F_OK))
        return NULL; /* the mount is absent */
    int descriptor = open(path, O_RDONLY);
    /* (The name of an attribute is text, and the truncated one is mapped.) */
    for (size_t which = 0; which < sizeof bad / sizeof *bad; which++)
        if (bad[which] != cut)
            bad_structures(bad[which], (void *)(uintptr_t)bad[which], path, descriptor);
    bad_structures(bad[0], constant, path, descriptor);
    bad_structures(cut, island(PROT_READ | PROT_WRITE) + sysconf(_SC_PAGESIZE) - 8, path, descriptor);
    close(descriptor);
    edges(path);
    return NULL;
}

void check_pointers(const char *mount)
{
    pthread_t thread;
    look((void *)(uintptr_t)mount);
    CHECK(pthread_create(&thread, NULL, look, (void *)(uintptr_t)mount) == 0 && pthread_join(thread, NULL) == 0);
}
