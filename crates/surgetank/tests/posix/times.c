/* Which operation changes which time, and times that are set. */
#include "posix.h"

static void print_times(const char *name) {
    struct stat st;
    if (lstat(name, &st) < 0)
        say("%s: %s", name, strerrorname_np(errno));
    else
        say("%s: atime %ld.%09ld mtime %ld.%09ld", name, st.st_atim.tv_sec, st.st_atim.tv_nsec, st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
}

static bool later(struct timespec a, struct timespec b) { return a.tv_sec > b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec > b.tv_nsec); }

/* The times that the call changes: of the name itself, and of its directory. (The mount decides whether a read changes atime.) */
#define MOVES(name, call) do { \
    struct stat before, up, after, upper; \
    lstat(name, &before), stat(".", &up), pause_ms(12); \
    errno = 0; \
    long result = (long)(call); \
    say("%s: %s", #call, result < 0 ? strerrorname_np(errno) : "OK"); \
    if (lstat(name, &after) == 0 && stat(".", &upper) == 0) \
        say("  moved:%s%s directory:%s%s", later(after.st_mtim, before.st_mtim) ? " mtime" : "", \
            later(after.st_ctim, before.st_ctim) ? " ctime" : "", later(upper.st_mtim, up.st_mtim) ? " mtime" : "", \
            later(upper.st_ctim, up.st_ctim) ? " ctime" : ""); \
} while (0)

static void moved_by(const char *name) {
    char byte;
    say("-- %s", name);
    int fd = open(name, O_RDWR), fresh;
    MOVES(name, close(open(name, O_RDONLY)));
    MOVES(name, pread(fd, &byte, 1, 0));
    MOVES(name, pwrite(fd, "x", 1, 0));
    MOVES(name, write(fd, "", 0));
    MOVES(name, ftruncate(fd, 5));
    MOVES(name, ftruncate(fd, 5));
    MOVES(name, truncate(name, 5));
    MOVES(name, truncate(name, 50));
    MOVES(name, fallocate(fd, 0, 0, 100));
    MOVES(name, chmod(name, 0600));
    MOVES(name, chmod(name, 0600));
    MOVES(name, chown(name, 1, 1));
    MOVES(name, chown(name, -1, -1));
    MOVES(name, setxattr(name, "user.x", "1", 1, 0));
    MOVES(name, link(name, "linked"));
    MOVES(name, unlink("linked"));
    MOVES(name, fsync(fd));
    MOVES(name, close(fd));
    MOVES(name, close(fresh = open(name, O_WRONLY)));
    MOVES(name, close(fresh = open(name, O_WRONLY | O_TRUNC)));
    MOVES(name, close(fresh = open(name, O_WRONLY | O_TRUNC)));
    MOVES(name, utimensat(AT_FDCWD, name, (struct timespec[2]){{0, UTIME_OMIT}, {0, UTIME_OMIT}}, 0));
    MOVES(name, utimensat(AT_FDCWD, name, NULL, 0));
}

static void times_moved_new(void) {
    put("new", "x");
    moved_by("new");
}
static void times_moved_stored(void) { moved_by("stored"); }

static void times_moved_directory(void) {
    MOVES("sdir", mkdir("sdir/d", 0755));
    MOVES("sdir", close(open("sdir/f", O_WRONLY | O_CREAT, 0644)));
    MOVES("sdir", close(open("sdir/f", O_WRONLY | O_CREAT, 0644)));
    MOVES("sdir", symlink("x", "sdir/l"));
    MOVES("sdir", rename("sdir/f", "sdir/g"));
    MOVES("sdir", rename("sdir/g", "sdir/g"));
    MOVES("sdir", rename("sdir/g", "out"));
    MOVES("sdir", rename("out", "sdir/back"));
    MOVES("sdir", unlink("sdir/l"));
    MOVES("sdir", rmdir("sdir/d"));
    MOVES("sdir", chmod("sdir", 0700));
    MOVES("sdir", chmod("sdir/back", 0700));
    MOVES("sdir", mkfifo("sdir/p", 0644));
    MOVES("sdir", unlink("sdir/missing"));
}

static void times_moved_names(void) {
    put("a", "x");
    put("b", "x");
    MOVES("b", rename("a", "b"));
    MOVES("b", (rename("b", "c"), rename("c", "b")));
    MOVES("slink", chown("slink", 0, 0));
    MOVES("slink", lchown("slink", 1, 1));
    MOVES("b", link("b", "c"));
    MOVES("b", unlink("c"));
}

static void times_by_mapping(void) {
    int fd = open("stored", O_RDWR);
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct stat before, after;
    fstat(fd, &before);
    pause_ms(12);
    map[0] = 'M';
    T(msync(map, 4096, MS_SYNC));
    T(munmap(map, 4096));
    T(close(fd));
    stat("stored", &after);
    say("moved %d", later(after.st_mtim, before.st_mtim));
    show("stored");
}

static void times_set(void) {
    static const char *const names[] = {"new", "stored", "sdir", "slink"};
    put("new", "x");
    for (int n = 0; n < 4; n++) {
        struct timespec both[2] = {{1000000000 + n, 123456789}, {1100000000 + n, 987654321}}, one[2] = {{0, UTIME_OMIT}, {1200000000, 1}};
        T(utimensat(AT_FDCWD, names[n], both, AT_SYMLINK_NOFOLLOW));
        print_times(names[n]);
        T(utimensat(AT_FDCWD, names[n], one, AT_SYMLINK_NOFOLLOW));
        print_times(names[n]);
    }
    struct timespec other[2] = {{1300000000, 5}, {0, UTIME_OMIT}};
    int fd = open("new", O_RDONLY);
    T(futimens(fd, other));
    print_times("new");
    T(utimensat(AT_FDCWD, "slink", other, 0));
    print_times("stored");
    /* Following the link may have changed its atime. */
    struct stat st;
    lstat("slink", &st);
    say("mtime %ld", st.st_mtim.tv_sec);
}

static void times_extreme(void) {
    static const time_t seconds[] = {0, -1, -2000000000, 2147483647, 4294967296, 8589934592};
    for (int n = 0; n < 6; n++) {
        struct timespec both[2] = {{seconds[n], 999999999}, {seconds[n], 0}};
        T(utimensat(AT_FDCWD, "stored", both, 0));
        print_times("stored");
    }
    struct timespec bad[2] = {{0, 1000000000}, {0, 0}};
    T(utimensat(AT_FDCWD, "stored", bad, 0));
    T(utimensat(AT_FDCWD, "missing", NULL, 0));
    T(utimensat(AT_FDCWD, "stored/x", NULL, 0));
}

static void times_now(void) {
    struct timespec old[2] = {{1000, 0}, {1000, 0}}, mixed[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}}, now;
    struct stat st;
    T(utimensat(AT_FDCWD, "stored", old, 0));
    T(utimensat(AT_FDCWD, "stored", mixed, 0));
    clock_gettime(CLOCK_REALTIME, &now);
    stat("stored", &st);
    say("now %d kept %ld", now.tv_sec - st.st_atim.tv_sec < 5, st.st_mtim.tv_sec);
    T(utimensat(AT_FDCWD, "stored", NULL, 0));
    stat("stored", &st);
    say("now %d", now.tv_sec - st.st_mtim.tv_sec < 5);
    say("same %d", st.st_mtim.tv_nsec == st.st_atim.tv_nsec);
}

static void stamped(void) {
    struct timespec set[2] = {{1000, 0}, {1000, 0}}, now[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}}, mixed[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}},
        omit[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    static const char *const names[] = {"stored", "writable", "own"};
    for (int n = 0; n < 3; n++) {
        T(utimensat(AT_FDCWD, names[n], set, 0));
        T(utimensat(AT_FDCWD, names[n], now, 0));
        T(utimensat(AT_FDCWD, names[n], mixed, 0));
        T(utimensat(AT_FDCWD, names[n], NULL, 0));
        T(utimensat(AT_FDCWD, names[n], omit, 0));
    }
}

static void times_denied(void) {
    put("writable", "x");
    put("own", "x");
    T(chmod("writable", 0666));
    T(chmod("own", 0));
    T(chown("own", USER, USER));
    as_user(stamped);
}

static void times_stay_after(void) {
    struct timespec old[2] = {{1000000000, 7}, {1100000000, 9}};
    put("new", "x");
    int fd = open("new", O_RDWR);
    T(write(fd, "y", 1));
    T(futimens(fd, old));
    print_times("new");
    T(close(fd));
    print_times("new");
    T(rename("new", "renamed"));
    T(chmod("renamed", 0600));
    T(link("renamed", "second"));
    print_times("renamed");
    T(mkdir("d", 0755));
    put("d/f", "x");
    T(utimensat(AT_FDCWD, "d", old, 0));
    pause_ms(50);
    print_times("d");
}

const struct one_case times[] = {
    {"times_moved_new", times_moved_new}, {"times_moved_stored", times_moved_stored}, {"times_moved_directory", times_moved_directory},
    {"times_moved_names", times_moved_names}, {"times_by_mapping", times_by_mapping}, {"times_set", times_set},
    {"times_extreme", times_extreme}, {"times_now", times_now}, {"times_denied", times_denied}, {"times_stay_after", times_stay_after},
    {NULL, NULL}};
