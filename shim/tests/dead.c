/* An absent mount: every function that takes a path refuses paths at or below it, and the bare directory stays
 * unchanged (`run` compares). Paths that lead out of it work.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <mntent.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

extern char **environ;
static int calls;

#define DEAD(call)                                                                                \
    do {                                                                                          \
        errno = 0;                                                                                \
        long result_ = (long)(call);                                                              \
        calls++;                                                                                  \
        if (!((result_ == -1 || result_ == 0) && errno == ENOTCONN)) {                            \
            fprintf(stderr, "%s:%d: %s: not refused: %ld, errno %d\n", __FILE__, __LINE__, #call, result_, errno); \
            failures++;                                                                           \
        }                                                                                         \
    } while (0)
#define DEAD_RETURNS(call) DEAD((errno = (call), -1))

/* Functions that only old programs call. */
extern int __xstat(int, const char *, struct stat *);
extern int __lxstat(int, const char *, struct stat *);
extern int __fxstatat(int, int, const char *, struct stat *, int);
extern int __xstat64(int, const char *, struct stat *);
extern int __open_2(const char *, int);
extern int __open64_2(const char *, int);
extern int __openat_2(int, const char *, int);
extern int __openat64_2(int, const char *, int);
extern int __xmknod(int, const char *, mode_t, dev_t *);
extern int __xmknodat(int, int, const char *, mode_t, dev_t *);
extern ssize_t __readlink_chk(const char *, char *, size_t, size_t);
extern ssize_t __readlinkat_chk(int, const char *, char *, size_t, size_t);
extern char *__realpath_chk(const char *, char *, size_t);

static int visit(const char *path, const struct stat *stat, int type)
{
    (void)path, (void)stat, (void)type;
    return 0;
}
static int visit_more(const char *path, const struct stat *stat, int type, struct FTW *where)
{
    (void)path, (void)stat, (void)type, (void)where;
    return 0;
}

static void opening(int dir, const char *file, const char *fresh)
{
    DEAD(openat(dir, fresh, O_WRONLY | O_CREAT, 0600));
    DEAD(openat64(dir, fresh, O_WRONLY | O_CREAT, 0600));
    DEAD(__openat_2(dir, file, O_RDONLY));
    DEAD(__openat64_2(dir, file, O_RDONLY));
    if (dir != AT_FDCWD)
        return;
    DEAD(open(file, O_RDONLY));
    DEAD(open(fresh, O_WRONLY | O_CREAT, 0600));
    DEAD(open64(fresh, O_WRONLY | O_CREAT, 0600));
    DEAD(open(file, O_PATH));
    DEAD(open(file, O_DIRECTORY));
    DEAD(__open_2(file, O_RDONLY));
    DEAD(__open64_2(file, O_RDONLY));
    DEAD(creat(fresh, 0600));
    DEAD(creat64(fresh, 0600));
    DEAD(fopen(fresh, "w"));
    DEAD(fopen64(fresh, "w"));
    DEAD(fopen(file, "r,ccs=utf8"));
    DEAD(freopen(fresh, "w", fopen("/dev/null", "r")));
    DEAD(freopen64(fresh, "w", fopen("/dev/null", "r")));
    DEAD(setmntent(fresh, "a"));
    DEAD(opendir(file));
    struct dirent **list;
    DEAD(scandir(file, &list, NULL, NULL));
    DEAD(ftw(file, visit, 3));
    DEAD(ftw64(file, (__ftw64_func_t)(void *)visit, 3));
    DEAD(nftw(file, visit_more, 3, 0));
    DEAD(nftw64(file, (__nftw64_func_t)(void *)visit_more, 3, 0));
    char *paths[] = {(char *)(uintptr_t)file, NULL};
    DEAD(fts_open(paths, FTS_PHYSICAL, NULL));
    glob_t globbed;
    DEAD(glob(file, 0, NULL, &globbed) == GLOB_ABORTED ? -1 : 1);
    DEAD(glob64(file, 0, NULL, (glob64_t *)(void *)&globbed) == GLOB_ABORTED ? -1 : 1);
}

static void making(int dir, const char *file, const char *fresh)
{
    char pattern[4096];
    dev_t device = 0;
#define PATTERN(suffix) (snprintf(pattern, sizeof pattern, "%s-XXXXXX%s", fresh, suffix), pattern)
    DEAD(mkdirat(dir, fresh, 0700));
    DEAD(mknodat(dir, fresh, S_IFREG | 0600, 0));
    DEAD(__xmknodat(0, dir, fresh, S_IFREG | 0600, &device));
    DEAD(mkfifoat(dir, fresh, 0600));
    DEAD(symlinkat("x", dir, fresh));
    DEAD(unlinkat(dir, file, 0));
    DEAD(renameat(dir, file, AT_FDCWD, "/tmp/surgetank-nobody"));
    DEAD(renameat(AT_FDCWD, "/tmp/surgetank-nobody", dir, fresh));
    DEAD(renameat2(dir, file, AT_FDCWD, "/tmp/surgetank-nobody", 0));
    DEAD(linkat(dir, file, AT_FDCWD, "/tmp/surgetank-nobody", 0));
    DEAD(linkat(AT_FDCWD, "/bin/true", dir, fresh, 0));
    if (dir != AT_FDCWD)
        return;
    DEAD(mkdir(fresh, 0700));
    DEAD(mknod(fresh, S_IFREG | 0600, 0));
    DEAD(__xmknod(0, fresh, S_IFREG | 0600, &device));
    DEAD(mkfifo(fresh, 0600));
    DEAD(symlink("x", fresh));
    DEAD(link("/bin/true", fresh));
    DEAD(link(file, "/tmp/surgetank-nobody"));
    DEAD(rename(file, fresh));
    DEAD(rename("/tmp/surgetank-nobody", fresh));
    DEAD(unlink(file));
    DEAD(rmdir(file));
    DEAD(remove(file));
    DEAD(mkstemp(PATTERN("")));
    DEAD(mkstemp64(PATTERN("")));
    DEAD(mkostemp(PATTERN(""), 0));
    DEAD(mkostemp64(PATTERN(""), 0));
    DEAD(mkstemps(PATTERN(".x"), 2));
    DEAD(mkstemps64(PATTERN(".x"), 2));
    DEAD(mkostemps(PATTERN(".x"), 2, 0));
    DEAD(mkostemps64(PATTERN(".x"), 2, 0));
    DEAD(mkdtemp(PATTERN("")));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int unconnected = socket(AF_UNIX, SOCK_STREAM, 0);
    if (strlen(fresh) < sizeof address.sun_path) {
        strcpy(address.sun_path, fresh);
        DEAD(bind(unconnected, (struct sockaddr *)&address, sizeof address));
        DEAD(connect(unconnected, (struct sockaddr *)&address, sizeof address));
    }
    close(unconnected);
}

static void asking(int dir, const char *file)
{
    struct stat out;
    struct stat64 out64;
    struct statx extended;
    struct file_handle handle = {.handle_bytes = 0};
    char text[4096];
    int number;
    DEAD(fstatat(dir, file, &out, 0));
    DEAD(fstatat64(dir, file, &out64, 0));
    DEAD(__fxstatat(0, dir, file, &out, 0));
    DEAD(statx(dir, file, 0, STATX_BASIC_STATS, &extended));
    DEAD(statx(dir, file, AT_STATX_FORCE_SYNC, ~0u >> 1, &extended));
    DEAD(faccessat(dir, file, R_OK, 0));
    DEAD(readlinkat(dir, file, text, sizeof text));
    DEAD(__readlinkat_chk(dir, file, text, sizeof text, sizeof text));
    DEAD(name_to_handle_at(dir, file, &handle, &number, 0));
    if (dir != AT_FDCWD)
        return;
    struct statfs system;
    struct statvfs system2;
    DEAD(stat(file, &out));
    DEAD(stat64(file, &out64));
    DEAD(lstat(file, &out));
    DEAD(lstat64(file, &out64));
    DEAD(__xstat(0, file, &out));
    DEAD(__xstat64(0, file, &out));
    DEAD(__lxstat(0, file, &out));
    DEAD(access(file, F_OK));
    DEAD(eaccess(file, R_OK));
    DEAD(euidaccess(file, R_OK));
    DEAD(readlink(file, text, sizeof text));
    DEAD(__readlink_chk(file, text, sizeof text, sizeof text));
    DEAD(realpath(file, NULL));
    DEAD(__realpath_chk(file, text, sizeof text));
    DEAD(canonicalize_file_name(file));
    DEAD(statfs(file, &system));
    DEAD(statvfs(file, &system2));
    DEAD(statfs64(file, (struct statfs64 *)(void *)&system));
    DEAD(statvfs64(file, (struct statvfs64 *)(void *)&system2));
    DEAD(pathconf(file, _PC_NAME_MAX));
    DEAD(ftok(file, 1));
    DEAD(getxattr(file, "user.x", text, 10));
    DEAD(lgetxattr(file, "user.x", text, 10));
    DEAD(listxattr(file, text, 10));
    DEAD(llistxattr(file, text, 10));
    int watch = inotify_init();
    DEAD(inotify_add_watch(watch, file, IN_CREATE));
    close(watch);
    DEAD(fanotify_mark(-1, FAN_MARK_ADD, FAN_OPEN, dir, file));
}

static void changing(int dir, const char *file)
{
    struct timespec times[2] = {{1, 1}, {1, 1}};
    struct timeval micro[2] = {{1, 1}, {1, 1}};
    struct utimbuf seconds = {1, 1};
    DEAD(fchmodat(dir, file, 0600, 0));
    DEAD(fchownat(dir, file, 0, 0, 0));
    DEAD(utimensat(dir, file, times, 0));
    DEAD(futimesat(dir, file, micro));
    if (dir != AT_FDCWD)
        return;
    DEAD(chmod(file, 0600));
    DEAD(lchmod(file, 0600));
    DEAD(chown(file, 0, 0));
    DEAD(lchown(file, 0, 0));
    DEAD(utime(file, &seconds));
    DEAD(utimes(file, micro));
    DEAD(lutimes(file, micro));
    DEAD(truncate(file, 0));
    DEAD(truncate64(file, 0));
    DEAD(setxattr(file, "user.x", "y", 1, 0));
    DEAD(lsetxattr(file, "user.x", "y", 1, 0));
    DEAD(removexattr(file, "user.x"));
    DEAD(lremovexattr(file, "user.x"));
    DEAD(chdir(file));
    DEAD(chroot(file));
}

static void running(int dir, const char *file)
{
    char *arguments[] = {(char *)(uintptr_t)"x", NULL};
    pid_t child;
    posix_spawn_file_actions_t actions;
    DEAD(execveat(dir, file, arguments, environ, 0));
    if (dir != AT_FDCWD)
        return;
    DEAD(execve(file, arguments, environ));
    DEAD(execv(file, arguments));
    if (strchr(file, '/')) {
        DEAD(execvp(file, arguments));
        DEAD(execvpe(file, arguments, environ));
        DEAD(execlp(file, "x", (char *)NULL));
        DEAD_RETURNS(posix_spawnp(&child, file, NULL, NULL, arguments, environ));
    }
    DEAD(execl(file, "x", "y", (char *)NULL));
    DEAD(execle(file, "x", (char *)NULL, environ));
    DEAD_RETURNS(posix_spawn(&child, file, NULL, NULL, arguments, environ));
    posix_spawn_file_actions_init(&actions);
    DEAD_RETURNS(posix_spawn_file_actions_addopen(&actions, 1, file, O_WRONLY, 0));
    DEAD_RETURNS(posix_spawn_file_actions_addchdir_np(&actions, file));
    posix_spawn_file_actions_destroy(&actions);
}

static void everything(int dir, const char *file, const char *fresh)
{
    opening(dir, file, fresh);
    making(dir, file, fresh);
    asking(dir, file);
    changing(dir, file);
    running(dir, file);
}

void check_dead(const char *mount)
{
    char with_dots[4096], parent[4096];
    snprintf(parent, sizeof parent, "%s", mount);
    const char *last = strrchr(mount, '/') + 1;
    parent[last - mount - 1] = 0;
    everything(AT_FDCWD, below(mount, "top"), below(mount, "fresh"));
    everything(AT_FDCWD, mount, below(mount, "a/fresh"));
    snprintf(with_dots, sizeof with_dots, "%s/elsewhere/.././/%s/./a/..", parent, last);
    everything(AT_FDCWD, with_dots, below(mount, ".//fresh"));
    /* Relative paths: from above, from a descriptor, and from inside (which only the kernel itself can reach). */
    CHECK(chdir(parent) == 0);
    everything(AT_FDCWD, below(last, "top"), below(last, "fresh"));
    int above = open(parent, O_RDONLY | O_DIRECTORY), inside = (int)syscall(SYS_openat, AT_FDCWD, below(mount, "a"), O_RDONLY | O_DIRECTORY);
    everything(above, below(last, "top"), below(last, "fresh"));
    everything(inside, "file", "fresh");
    everything(inside, "../top", "../fresh");
    CHECK(syscall(SYS_chdir, below(mount, "a")) == 0);
    everything(AT_FDCWD, "file", "fresh");
    /* Paths outside work. */
    struct stat out;
    CHECK(stat("../..", &out) == 0 && stat("/", &out) == 0);
    int elsewhere = open("../../elsewhere", O_WRONLY | O_CREAT, 0600);
    CHECK(elsewhere >= 0 && unlink("../../elsewhere") == 0);
    snprintf(with_dots, sizeof with_dots, "%s-other", mount);
    CHECK(mkdir(with_dots, 0700) == 0 && rmdir(with_dots) == 0);
    CHECK(chdir("/") == 0 && calls > 600);
    printf("%d calls refused\n", calls);
}
