/* Checks of the shim, run under it by `run`: check live MOUNT TIER LOG | dead MOUNT | stress MOUNT ROUNDS | fuzz INDEX
 * MOUNT ROUNDS | pointers MOUNT | poke MOUNT | measure MOUNT TIER | memory MOUNT. Files below MOUNT begin with "mount",
 * those of the tier with "plain", so every check can tell which side served, and fails without the shim.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int failures;
static const char *mount, *tier, *log_path;
extern char **environ;

const char *below(const char *base, const char *path)
{
    static __thread char texts[8][8192];
    static __thread int turn;
    char *text = texts[turn++ % 8];
    snprintf(text, sizeof texts[0], "%s/%s", base, path);
    return text;
}
#define IN(path) below(mount, path)

const char *who(int descriptor)
{
    static __thread char text[6];
    ssize_t bytes = descriptor < 0 ? 0 : pread(descriptor, text, 5, 0);
    text[bytes > 0 ? bytes : 0] = 0;
    if (descriptor >= 0)
        close(descriptor);
    return text;
}
#define SERVED(who_, open_) CHECK(!strcmp(who(open_), who_))
#define FAILS(error_, call) CHECK((call) < 0 && errno == (error_))

static const char *who_stream(FILE *stream)
{
    static char text[6];
    size_t bytes = stream ? fread(text, 1, 5, stream) : 0;
    text[bytes] = 0;
    if (stream)
        fclose(stream);
    return text;
}

/* ---- Reading */

static void check_reading(void)
{
    SERVED("plain", open(IN("top"), O_RDONLY));
    SERVED("plain", open64(IN("a/b/c/deep"), O_RDONLY | O_CLOEXEC));
    SERVED("plain", open(IN("//a/./b//c/deep"), O_RDONLY));
    SERVED("plain", open(IN("top"), O_RDONLY | O_CREAT, 0600));
    SERVED("plain", open(IN("live-file"), O_RDONLY | O_NOFOLLOW));
    SERVED("plain", open(IN("linked-file"), O_RDONLY));
    SERVED("mount", open(IN("linked-wrong"), O_RDONLY));
    SERVED("mount", open(IN("cold-file"), O_RDONLY));
    SERVED("mount", open(IN("hidden-file"), O_RDONLY));
    SERVED("mount", open(IN("link"), O_RDONLY));
    SERVED("mount", open(IN("closed-dir/file"), O_RDONLY));
    SERVED("mount", open(IN("partial-dir/unlisted-file"), O_RDONLY));
    SERVED("plain", open(IN("partial-dir/file"), O_RDONLY));
    SERVED("mount", open(IN("a/../top"), O_RDONLY));
    SERVED("mount", open(IN("linkdir/file"), O_RDONLY));
    FAILS(ENOTDIR, open(IN("top/"), O_RDONLY));
    FAILS(ENOTDIR, open(IN("top/x"), O_RDONLY));
    FAILS(ENOENT, open(IN("missing"), O_RDONLY));
    FAILS(ENOENT, open(IN("missing/x"), O_RDONLY));
    FAILS(ENOENT, open(IN("a/unlisted-ghost"), O_RDONLY)); /* exists below the mount, but the index says it does not */
    FAILS(ENOENT, open(IN("a/unlisted-ghost"), O_WRONLY));
    FAILS(ENOENT, open("", O_RDONLY));
    FAILS(EFAULT, open((const char *)(uintptr_t)8, O_RDONLY));
    char longer[6000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    FAILS(ENAMETOOLONG, open(IN(longer), O_RDONLY));
    SERVED("plain", openat(AT_FDCWD, IN("a/file"), O_RDONLY));
    int directory = open(IN("a"), O_RDONLY | O_DIRECTORY);
    CHECK(directory >= 0);
    for (int again = 0; again < 3; again++) {
        SERVED("plain", openat(directory, "file", O_RDONLY));
        SERVED("plain", openat(directory, "./b/c/deep", O_RDONLY));
        SERVED("mount", openat(directory, "../top", O_RDONLY));
        FAILS(ENOENT, openat(directory, "nothing", O_RDONLY));
    }
    CHECK(chdir("/") == 0);
    FAILS(ENOENT, open("top", O_RDONLY));
    CHECK(chdir(IN("a/b")) == 0);
    for (int again = 0; again < 3; again++)
        SERVED("plain", open("c/deep", O_RDONLY));
    CHECK(fchdir(directory) == 0);
    SERVED("plain", open("file", O_RDONLY));
    FAILS(ENOENT, open("c/deep", O_RDONLY));
    CHECK(chdir(mount) == 0);
    SERVED("plain", open("top", O_RDONLY));
    close(directory);
    CHECK(!strcmp(who_stream(fopen("top", "re")), "plain"));
    CHECK(!strcmp(who_stream(fopen64(IN("a/file"), "r+")), "plain"));
    CHECK(!strcmp(who_stream(fopen("cold-file", "r")), "mount"));
    CHECK(fopen("missing", "r") == NULL && errno == ENOENT);
    CHECK(fopen("top", "q") == NULL && errno == EINVAL);
    int cloexec = open("top", O_RDONLY | O_CLOEXEC), inherited = open("top", O_RDONLY);
    CHECK(fcntl(cloexec, F_GETFD) == FD_CLOEXEC && fcntl(inherited, F_GETFD) == 0);
    close(cloexec);
    close(inherited);
    errno = 77;
    int opened = open("top", O_RDONLY);
    int after = errno;
    CHECK(after == 77);
    close(opened);
}

/* ---- Identity */

static bool same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_mode == b->st_mode && a->st_uid == b->st_uid &&
           a->st_nlink == b->st_nlink && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static uint64_t statx_ino(int dirfd, const char *path, int flags, dev_t *dev)
{
    struct statx out;
    memset(&out, 0, sizeof out);
    if (statx(dirfd, path, flags, STATX_BASIC_STATS, &out))
        return 0;
    *dev = (dev_t)(((uint64_t)out.stx_dev_major & 0xfff) << 8 | (out.stx_dev_minor & 0xff) |
                   (uint64_t)(out.stx_dev_minor & ~0xffu) << 12);
    return out.stx_ino;
}

static void check_identity_of(const char *name)
{
    struct stat by_path, by_link, by_descriptor, by_at, by_empty, raw, of_mount, of_tier;
    dev_t dev = 0;
    int opened = open(name, O_RDONLY);
    CHECK(stat(mount, &of_mount) == 0 && stat(tier, &of_tier) == 0);
    CHECK(syscall(SYS_fstat, opened, &raw) == 0 && raw.st_dev == of_tier.st_dev); /* it is diverted */
    CHECK(stat(name, &by_path) == 0 && by_path.st_dev == of_mount.st_dev && by_path.st_size == raw.st_size);
    CHECK(lstat(IN(name), &by_link) == 0 && same(&by_path, &by_link));
    CHECK(fstat(opened, &by_descriptor) == 0 && same(&by_path, &by_descriptor));
    CHECK(fstatat(AT_FDCWD, name, &by_at, 0) == 0 && same(&by_path, &by_at));
    CHECK(fstatat(opened, "", &by_empty, AT_EMPTY_PATH) == 0 && same(&by_path, &by_empty));
    CHECK(statx_ino(AT_FDCWD, name, 0, &dev) == by_path.st_ino && dev == by_path.st_dev);
    CHECK(statx_ino(opened, "", AT_EMPTY_PATH, &dev) == by_path.st_ino && dev == by_path.st_dev);
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", opened);
    ssize_t bytes = readlink(link, target, sizeof target);
    CHECK(bytes > 0 && (size_t)bytes == strlen(IN(name)) && !memcmp(target, IN(name), (size_t)bytes));
    CHECK(readlink(link, target, 5) == 5 && !memcmp(target, mount, 5));
    CHECK(stat(link, &by_link) == 0 && same(&by_path, &by_link));
    CHECK(realpath(link, target) && !strcmp(target, IN(name)));
    SERVED("plain", open(link, O_RDONLY));
    int copy = dup(opened);
    CHECK(fstat(copy, &by_link) == 0 && same(&by_path, &by_link));
    struct statfs a, b;
    CHECK(fstatfs(opened, &a) == 0 && statfs(mount, &b) == 0 && a.f_type == b.f_type);
    close(copy);
    close(opened);
}

static void check_stat(void)
{
    struct stat out, raw;
    CHECK(chdir(mount) == 0);
    check_identity_of("top");
    check_identity_of("a/file");
    check_identity_of("live-file");
    check_identity_of("linked-file");
    FAILS(ENOENT, stat("a/unlisted-ghost", &out));
    FAILS(ENOENT, access("a/unlisted-ghost", F_OK));
    FAILS(ENOENT, faccessat(AT_FDCWD, "a/unlisted-ghost", F_OK, 0));
    CHECK(access("a/unlisted-ghost", R_OK) == 0); /* only existence is answered */
    CHECK(access("top", F_OK) == 0 && access("link", F_OK) == 0);
    CHECK(stat("a", &out) == 0 && S_ISDIR(out.st_mode));
    CHECK(lstat("link", &out) == 0 && S_ISLNK(out.st_mode));
    CHECK(stat("link", &out) == 0 && S_ISREG(out.st_mode));
    CHECK(stat(".", &out) == 0 && syscall(SYS_newfstatat, AT_FDCWD, ".", &raw, 0) == 0 && out.st_ino == raw.st_ino);
    /* The size in the index is the plain file's, the file below the mount has another one: this shows which side
     * answered.
     */
    CHECK(stat("top", &out) == 0 && syscall(SYS_newfstatat, AT_FDCWD, "top", &raw, 0) == 0 && out.st_size != raw.st_size);
    CHECK(stat("hidden-file", &out) == 0 && syscall(SYS_newfstatat, AT_FDCWD, "hidden-file", &raw, 0) == 0 &&
          out.st_size == raw.st_size);
    int growing = syscall(SYS_openat, AT_FDCWD, below(tier, "live-file"), O_WRONLY | O_APPEND);
    CHECK(stat("live-file", &raw) == 0 && write(growing, "more", 4) == 4 && stat("live-file", &out) == 0 &&
          out.st_size == raw.st_size + 4);
    close(growing);
    /* A file of the tier's file system that Surgetank does not serve keeps its identity. */
    char name[4096];
    snprintf(name, sizeof name, "%s/../foreign", tier);
    int foreign = open(name, O_RDWR | O_CREAT, 0600);
    CHECK(fstat(foreign, &out) == 0 && syscall(SYS_fstat, foreign, &raw) == 0 && !memcmp(&out, &raw, sizeof out));
    close(foreign);
}

/* ---- Writing, through the fixture */

static bool logged(const char *line)
{
    char text[512];
    bool found = false;
    FILE *stream = fopen(log_path, "r");
    while (stream && fgets(text, sizeof text, stream)) {
        text[strcspn(text, "\n")] = 0;
        found = !strcmp(text, line);
    }
    if (stream)
        fclose(stream);
    return found; /* the last line */
}

static void check_writing(void)
{
    struct stat out, by_path;
    char line[128];
    CHECK(chdir(mount) == 0);
    umask(027);
    int opened = open("a/new", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_APPEND, 0777);
    snprintf(line, sizeof line, "1 new %o 750 0 0", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_APPEND);
    CHECK(opened >= 0 && opened < 20 && logged(line));
    CHECK(fcntl(opened, F_GETFD) == FD_CLOEXEC && (fcntl(opened, F_GETFL) & O_APPEND));
    CHECK(write(opened, "plain new", 9) == 9 && fstat(opened, &out) == 0 && (out.st_mode & 07777) == 0750);
    CHECK(stat("a/new", &by_path) == 0 && same(&out, &by_path));
    CHECK(fchmod(opened, 0640) == 0 && logged("3  0 640 1 0"));
    CHECK(fstat(opened, &out) == 0 && (out.st_mode & 07777) == 0640);
    struct timespec times[2] = {{0, UTIME_OMIT}, {1234567, 89}};
    CHECK(futimens(opened, times) == 0 && logged("3  0 0 16 0"));
    CHECK(fsync(opened) == 0 && logged("2  0 0 0 0"));
    FILE *truncated = fopen(log_path, "w");
    fclose(truncated);
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open("a/new2", O_RDWR | O_CREAT, 0600), 0);
    CHECK(memory != MAP_FAILED && truncate("a/file", 8) == 0);
    CHECK(msync(memory, 4096, MS_SYNC) == 0 && logged("2  0 0 0 0"));
    munmap(memory, 4096);
    close(opened);
    SERVED("plain", open("a/new", O_RDONLY));
    FAILS(EEXIST, open("a/new", O_WRONLY | O_CREAT | O_EXCL, 0600));
    FAILS(EDQUOT, open("refused", O_WRONLY | O_CREAT, 0600));
    opened = open("askmount", O_WRONLY | O_CREAT, 0600);
    CHECK(opened >= 0 && syscall(SYS_fstat, opened, &out) == 0 && stat(mount, &by_path) == 0 && out.st_dev == by_path.st_dev);
    close(opened);
    opened = creat("a/made", 0666);
    CHECK(opened >= 0 && fcntl(opened, F_GETFD) == 0 && logged("1 made 1101 640 0 0"));
    close(opened);
    FILE *stream = fopen("a/stream", "ax");
    CHECK(stream && fputs("plain text", stream) > 0 && ftell(stream) == 10 && fclose(stream) == 0 &&
          logged("1 stream 2301 640 0 0"));
    stream = fopen("a/stream", "a");
    CHECK(stream && ftell(stream) == 10 && fputs("!", stream) > 0 && fclose(stream) == 0);
    FAILS(EIO, open("silence", O_WRONLY | O_CREAT | O_EXCL, 0600));
    opened = open("silence2", O_WRONLY | O_CREAT, 0600);
    CHECK(opened >= 0);
    close(opened);
    SERVED("plain", open("top", O_RDWR));
    SERVED("mount", open("top", O_RDWR | O_SYNC));
    CHECK(mkdir("partial-dir/dir", 0700) == 0 && rmdir("partial-dir/dir") == 0);
    FAILS(ENOENT, unlink("a/unlisted-ghost"));
    FAILS(ENOENT, remove("a/unlisted-ghost"));
    FAILS(ENOENT, rmdir("a/unlisted-ghost"));
    FAILS(ENOENT, unlinkat(AT_FDCWD, "a/unlisted-ghost", 0));
    FAILS(EINVAL, unlinkat(AT_FDCWD, "a/unlisted-ghost", AT_EMPTY_PATH));
    CHECK(access("a/unlisted-ghost", R_OK) == 0);
    /* The lowest number, as open promises. */
    int low = dup(0);
    close(low);
    opened = open("a/lowest", O_WRONLY | O_CREAT, 0600);
    CHECK(opened == low);
    close(opened);
    umask(022);
}

/* ---- Children, threads, closed descriptors */

static int child_of(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 200;
}

static void check_children(const char *self)
{
    char fd_text[16];
    CHECK(chdir(mount) == 0);
    open("top", O_RDONLY);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        SERVED("plain", open("a/file", O_RDONLY));
        CHECK(chdir("a") == 0);
        SERVED("plain", open("file", O_RDONLY));
        int opened = open("by-child", O_WRONLY | O_CREAT, 0600);
        CHECK(opened >= 0 && opened < 20 && logged("1 by-child 101 600 0 0"));
        _exit(failures);
    }
    CHECK(child_of(child) == 0);
    SERVED("plain", open("a/file", O_RDONLY));
    child = vfork();
    if (child == 0) {
        /* A vfork child's directory and mask are its own, and its memory is the parent's. */
        if (chdir("a/b") || (umask(077), 0) || open("c/deep", O_RDONLY) < 0)
            _exit(1);
        int made = open("by-vfork", O_WRONLY | O_CREAT, 0666);
        _exit(made < 0 || !logged("1 by-vfork 101 600 0 0") ? 2 : 0);
    }
    CHECK(child_of(child) == 0);
    SERVED("plain", open("a/file", O_RDONLY));
    int made = open("after-vfork", O_WRONLY | O_CREAT, 0666);
    CHECK(made >= 0 && logged("1 after-vfork 101 644 0 0"));
    close(made);
    /* An inherited descriptor keeps its identity in the next program. */
    int opened = open("top", O_RDONLY);
    snprintf(fd_text, sizeof fd_text, "%d", opened);
    const char *arguments[] = {self, "inherited", mount, fd_text, NULL};
    CHECK(posix_spawn(&child, self, NULL, NULL, (char *const *)arguments, environ) == 0 && child_of(child) == 0);
    child = fork();
    if (child == 0) {
        execl(self, self, "inherited", mount, fd_text, (char *)NULL);
        _exit(9);
    }
    CHECK(child_of(child) == 0);
    child = fork();
    if (child == 0) {
        execle(self, self, "inherited", mount, fd_text, (char *)NULL, environ);
        _exit(9);
    }
    CHECK(child_of(child) == 0);
    close(opened);
    /* All descriptors closed, the shim's too, and their numbers reused. */
    child = fork();
    if (child == 0) {
        failures = 0;
        made = open("before-closing", O_WRONLY | O_CREAT, 0600);
        syscall(SYS_close_range, 3, ~0u, 0);
        for (int at = 3; at < 600; at++)
            dup(0);
        for (int at = 3; at < 10; at++)
            close(at);
        made = open("after-closing", O_WRONLY | O_CREAT, 0600);
        CHECK(made == 3 && logged("1 after-closing 101 600 0 0"));
        for (int at = 10; at < 600; at++)
            CHECK(fcntl(at, F_GETFD) == 0); /* none of them was confused with the shim's */
        SERVED("plain", open("top", O_RDONLY));
        _exit(failures);
    }
    CHECK(child_of(child) == 0);
}

static void *reader_thread(void *unused)
{
    (void)unused;
    for (int at = 0; at < 2000; at++) {
        struct stat out;
        if (strcmp(who(open("a/b/c/deep", O_RDONLY)), "plain") || stat(IN("top"), &out) || fchdir(-1) == 0)
            __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
        char name[64];
        snprintf(name, sizeof name, "thread-%d", at % 50);
        if (at % 20 == 0) {
            int made = open(name, O_WRONLY | O_CREAT, 0600);
            if (made < 0)
                __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
            close(made);
        }
    }
    return NULL;
}

static void check_threads(void)
{
    pthread_t threads[8];
    CHECK(chdir(mount) == 0);
    int before = failures;
    for (int at = 0; at < 8; at++)
        pthread_create(&threads[at], NULL, reader_thread, NULL);
    for (int at = 0; at < 8; at++)
        pthread_join(threads[at], NULL);
    CHECK(failures == before);
}

/* The last check: from here on the process leaves every call to the mount. */
static void check_giving_up(void)
{
    CHECK(chdir(mount) == 0);
    int opened = open("top", O_RDONLY);
    struct stat before, after;
    CHECK(fstat(opened, &before) == 0 && setuid(getuid()) == 0);
    SERVED("plain", open("top", O_RDONLY)); /* nothing changed */
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        SERVED("mount", open("top", O_RDONLY));
        _exit(failures);
    }
    CHECK(child_of(child) == 0);
    child = fork();
    if (child == 0) {
        failures = 0;
        if (unshare(CLONE_FS) == 0)
            SERVED("mount", open("top", O_RDONLY));
        _exit(failures);
    }
    CHECK(child_of(child) == 0);
    child = fork();
    if (child == 0) {
        failures = 0;
        CHECK(syscall(SYS_setresuid, -1, geteuid(), -1) == 0); /* by hand: the shim does not check what it changed */
        SERVED("mount", open("top", O_RDONLY));
        _exit(failures);
    }
    CHECK(child_of(child) == 0);
    if (getuid() == 0) {
        CHECK(seteuid(65534) == 0);
        SERVED("mount", open("top", O_RDONLY));
        CHECK(fstat(opened, &after) == 0 && after.st_ino == before.st_ino && after.st_dev == before.st_dev);
        CHECK(seteuid(0) == 0);
        SERVED("mount", open("top", O_RDONLY));
    }
}

static long resident_kib(void)
{
    long pages = 0, total = 0;
    FILE *stream = fopen("/proc/self/statm", "r");
    if (fscanf(stream, "%ld %ld", &total, &pages) != 2)
        pages = -1;
    fclose(stream);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void check_memory(void)
{
    struct stat out;
    long before = 0;
    CHECK(chdir(mount) == 0);
    for (int at = 0; at < 1000000; at++) {
        if (at == 1000 || at == 2000) /* the first rounds load what the measurement itself needs */
            before = resident_kib();
        stat(at % 2 ? "a/file" : "/nowhere", &out);
        if (at % 4 == 0)
            close(open("top", O_RDONLY));
    }
    long grown = resident_kib() - before;
    printf("grown by %ld KiB\n", grown);
    CHECK(grown == 0);
}

int main(int count, char **arguments)
{
    if (count < 3)
        errx(2, "check live MOUNT TIER LOG | dead MOUNT | ...");
    const char *what = arguments[1];
    mount = arguments[2];
    if (!strcmp(what, "live") && count == 5) {
        tier = arguments[3];
        log_path = arguments[4];
        check_reading();
        check_numbers(mount);
        check_anchors(mount);
        check_stat();
        check_writing();
        check_children(arguments[0]);
        check_threads();
        check_giving_up();
    } else if (!strcmp(what, "inherited")) {
        struct stat a, b;
        CHECK(fstat(atoi(arguments[3]), &a) == 0 && stat(IN("top"), &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev);
        SERVED("plain", open(IN("top"), O_RDONLY));
    } else if (!strcmp(what, "plain")) {
        SERVED("plain", open(IN("top"), O_RDONLY));
    } else if (!strcmp(what, "mount")) {
        SERVED("mount", open(IN("top"), O_RDONLY));
    } else if (!strcmp(what, "memory")) {
        check_memory();
    } else if (!strcmp(what, "dead")) {
        check_dead(mount);
    } else if (!strcmp(what, "pointers")) {
        check_pointers(mount);
    } else if (!strcmp(what, "stress")) {
        check_stress(mount, atoi(arguments[3]));
    } else if (!strcmp(what, "fuzz")) {
        check_fuzz(arguments[3], mount, atoi(arguments[4]));
    } else if (!strcmp(what, "poke")) {
        struct stat out;
        stat(IN("top"), &out);
        open(IN("a/b/c/deep"), O_RDONLY);
        chdir(mount);
        open("a/file", O_RDONLY);
        fstat(open("top", O_RDONLY), &out);
        return 0;
    } else if (!strcmp(what, "measure")) {
        measure(mount, arguments[3]);
    } else {
        errx(2, "%s?", what);
    }
    if (failures)
        fprintf(stderr, "check %s: %d failed\n", what, failures);
    return failures != 0;
}
