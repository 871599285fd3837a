/* Modes, owners, access, extended attributes, results of stat. */
#include "posix.h"

static void chmods(void) {
    static const mode_t modes[] = {0, 0444, 0777, 04755, 02755, 01777, 06777};
    put("new", "x");
    for (int n = 0; n < 7; n++) {
        T(chmod("new", modes[n]));
        look("new");
        T(chmod("stored", modes[n]));
        look("stored");
        T(chmod("sdir", modes[n]));
        look("sdir");
    }
    int fd = open("new", O_RDONLY);
    T(fchmod(fd, 0640));
    look("new");
    T(chmod("missing", 0644));
    T(chmod("stored/x", 0644));
    T(chmod("slink", 0604));
    look("stored");
    look("slink");
}

static void chmod_no_follow(void) {
    T(fchmodat(AT_FDCWD, "slink", 0600, AT_SYMLINK_NOFOLLOW));
    T(fchmodat(AT_FDCWD, "stored", 0600, 0));
    look("stored");
}

static void changes_denied(void) {
    T(chmod("stored", 0777));
    T(chown("stored", USER, USER));
    T(chown("own", 0, -1));
    T(chown("own", -1, 0));
    T(chown("own", USER, USER));
    T(chown("own", -1, -1));
    T(chmod("own", 0600));
    T(chmod("foreign-group", 02755));
    look("foreign-group");
}

static void changing_denied(void) {
    put("own", "x");
    put("foreign-group", "x");
    T(chown("own", USER, USER));
    T(chown("foreign-group", USER, 2000));
    as_user(changes_denied);
    look("stored");
    look("own");
}

static void chowns(void) {
    put("new", "x");
    T(chown("new", USER, 2000));
    look("new");
    T(chown("new", -1, 0));
    look("new");
    T(chown("stored", 12345, 54321));
    look("stored");
    T(lchown("slink", 5, 6));
    look("slink");
    T(chown("sdir", 7, 8));
    look("sdir");
    int fd = open("new", O_RDONLY);
    T(fchown(fd, 1, 1));
    look("new");
    T(fchownat(AT_FDCWD, "missing", 1, 1, 0));
    T(fchownat(fd, "", 2, 2, AT_EMPTY_PATH));
    look("new");
}

static void chown_clears_setuid(void) {
    put("new", "x");
    T(chmod("new", 06755));
    T(chown("new", 1, 1));
    look("new");
    T(chmod("stored", 06745));
    T(chown("stored", -1, 1));
    look("stored");
    T(chmod("sdir", 06755));
    T(chown("sdir", 1, 1));
    look("sdir");
    T(chmod("stored", 06755));
    T(chown("stored", -1, -1));
    look("stored");
}

static void touch_setuid(void) {
    int fd = open("written", O_WRONLY);
    T(write(fd, "y", 1));
    look("written");
    T(truncate("cut", 0));
    look("cut");
    fd = open("emptied", O_WRONLY | O_TRUNC);
    look("emptied");
    fd = open("opened", O_WRONLY);
    close(fd);
    look("opened");
    fd = open("grown", O_WRONLY);
    T(ftruncate(fd, 100));
    look("grown");
    fd = open("group-only", O_WRONLY);
    T(write(fd, "y", 1));
    look("group-only");
    fd = open("allocated", O_WRONLY);
    T(fallocate(fd, 0, 0, 100));
    look("allocated");
    fd = open("none", O_WRONLY);
    T(write(fd, "", 0));
    look("none");
}

static void write_clears_setuid(void) {
    static const char *const names[] = {"written", "cut", "emptied", "opened", "grown", "group-only", "allocated", "none"};
    for (int n = 0; n < 8; n++) {
        put(names[n], "x");
        chmod(names[n], n == 5 ? 02767 : 06777);
    }
    as_user(touch_setuid);
}

static void root_keeps_setuid(void) {
    put("new", "x");
    T(chmod("new", 06777));
    int fd = open("new", O_WRONLY);
    T(write(fd, "y", 1));
    look("new");
    T(truncate("new", 0));
    look("new");
}

static void umasks(void) {
    umask(0137);
    put("f", "x");
    T(mkdir("d", 0777));
    T(mkfifo("p", 0777));
    T(symlink("x", "l"));
    look("f");
    look("d");
    look("p");
    look("l");
    T(umask(0));
}

static void asked(void) {
    static const char *const names[] = {"m0", "m4", "m6", "m7", "m40", "m44", "m444", "m755"};
    for (int n = 0; n < 8; n++)
        say("%s %d %d %d", names[n], access(names[n], R_OK), access(names[n], W_OK), access(names[n], X_OK));
    T(faccessat(AT_FDCWD, "m0", R_OK, AT_EACCESS));
    T(faccessat(AT_FDCWD, "m4", R_OK, AT_EACCESS));
}

static void accesses(void) {
    static const mode_t modes[] = {0, 04, 06, 07, 040, 044, 0444, 0755};
    for (int n = 0; n < 8; n++) {
        char name[16];
        snprintf(name, sizeof name, "m%o", modes[n]);
        put(name, "x");
        chmod(name, modes[n]);
    }
    asked();
    as_user(asked);
    T(access("missing", F_OK));
    T(access("stored", 8));
    T(access("sdir", X_OK));
    T(faccessat(AT_FDCWD, "slink", F_OK, AT_SYMLINK_NOFOLLOW));
    T(faccessat(AT_FDCWD, "stored", F_OK, 0x8000));
}

static void stable_numbers(void) {
    static const char *const names[] = {"new", "stored", "sdir", "slink"};
    struct stat root, st[4], now;
    put("new", "x");
    T(stat(".", &root));
    for (int n = 0; n < 4; n++)
        lstat(names[n], &st[n]);
    say("device %d %d %d %d", st[0].st_dev == root.st_dev, st[1].st_dev == root.st_dev, st[2].st_dev == root.st_dev, st[3].st_dev == root.st_dev);
    say("differ %d", st[0].st_ino != st[1].st_ino && st[1].st_ino != st[2].st_ino && st[2].st_ino != st[3].st_ino);
    put("stored", "changed");
    T(chmod("stored", 0600));
    T(rename("new", "new2"));
    T(rename("sdir", "sdir2"));
    T(link("stored", "stored2"));
    T(lstat("new2", &now));
    say("same %d", now.st_ino == st[0].st_ino);
    T(lstat("stored2", &now));
    say("same %d", now.st_ino == st[1].st_ino);
    T(lstat("sdir2", &now));
    say("same %d", now.st_ino == st[2].st_ino);
    int fd = open("stored", O_RDWR);
    T(fstat(fd, &now));
    say("same %d", now.st_ino == st[1].st_ino && now.st_dev == st[1].st_dev);
    T(fsync(fd));
    T(stat("stored", &now));
    say("same %d block size %d", now.st_ino == st[1].st_ino, now.st_blksize > 0);
}

static void stat_errors(void) {
    struct stat st;
    T(stat("missing", &st));
    T(stat("stored/x", &st));
    T(stat("", &st));
    T(fstatat(AT_FDCWD, "", &st, AT_EMPTY_PATH));
    T(fstatat(999, "x", &st, 0));
    T(fstat(999, &st));
    T(lstat("slink", &st));
    say("%ld", (long)st.st_size);
    T(lstat("slink/", &st));
    struct statx more;
    T(statx(AT_FDCWD, "stored", 0, STATX_BASIC_STATS, &more));
    say("%d %llu", (more.stx_mask & STATX_BASIC_STATS) == STATX_BASIC_STATS, (unsigned long long)more.stx_size);
    T(statx(AT_FDCWD, "slink", AT_SYMLINK_NOFOLLOW, STATX_SIZE, &more));
    T(statx(AT_FDCWD, "stored", 0x10000, STATX_SIZE, &more));
}

static void file_system_numbers(void) {
    struct statvfs fs, other;
    T(statvfs("stored", &fs));
    say("%d %d %d %lu", fs.f_bsize > 0, fs.f_blocks > 0, fs.f_bavail <= fs.f_bfree && fs.f_bfree <= fs.f_blocks, fs.f_namemax);
    int fd = open("sdir", O_RDONLY);
    T(fstatvfs(fd, &other));
    say("%d", fs.f_blocks == other.f_blocks);
    T(statvfs("missing", &fs));
    T(pathconf(".", _PC_NAME_MAX));
    T(pathconf(".", _PC_PATH_MAX));
}

static void xattr_on(const char *name) {
    char value[64] = "";
    say("-- %s", name);
    T(setxattr(name, "user.a", "one", 3, 0));
    T(setxattr(name, "user.a", "two", 3, XATTR_CREATE));
    T(setxattr(name, "user.b", "two", 3, XATTR_REPLACE));
    T(setxattr(name, "user.a", "three", 5, XATTR_REPLACE));
    T(setxattr(name, "user.b", "", 0, XATTR_CREATE));
    T(getxattr(name, "user.a", NULL, 0));
    T(getxattr(name, "user.a", value, 3));
    T(getxattr(name, "user.a", value, sizeof value));
    say("%s", value);
    T(getxattr(name, "user.b", value, sizeof value));
    T(getxattr(name, "user.c", value, sizeof value));
    T(listxattr(name, NULL, 0));
    T(listxattr(name, value, 8));
    T(listxattr(name, value, sizeof value));
    T(removexattr(name, "user.c"));
    T(removexattr(name, "user.b"));
    T(listxattr(name, value, sizeof value));
    T(setxattr(name, "user.a", "x", 1, XATTR_CREATE | XATTR_REPLACE));
}

static void xattrs(void) {
    put("new", "x");
    xattr_on("new");
    xattr_on("stored");
    xattr_on("sdir");
    xattr_on("slink");
    xattr_on("missing");
}

static void xattr_limits(void) {
    char name[300], *value = calloc(1, 70000);
    put("new", "x");
    memset(name, 'n', sizeof name);
    memcpy(name, "user.", 5);
    name[255] = 0;
    T(setxattr("new", name, "x", 1, 0));
    T(getxattr("new", name, value, 10));
    T(removexattr("new", name));
    name[255] = 'n', name[256] = 0;
    T(setxattr("new", name, "x", 1, 0));
    T(getxattr("new", name, value, 10));
    T(setxattr("new", "user.big", value, 65537, 0));
    T(setxattr("new", "user.", "x", 1, 0));
    T(setxattr("new", "", "x", 1, 0));
    T(setxattr("new", "plain", "x", 1, 0));
    T(setxattr("new", "other.x", "x", 1, 0));
    T(listxattr("new", value, 70000));
}

static void xattr_large(void) {
    char *value = calloc(1, 3000);
    memset(value, 'v', 3000);
    put("new", "x");
    T(setxattr("new", "user.large", value, 3000, 0));
    T(getxattr("new", "user.large", NULL, 0));
    T(setxattr("stored", "user.large", value, 3000, 0));
    T(getxattr("stored", "user.large", value, 2999));
}

static void xattr_on_special(void) {
    char value[8];
    T(mkfifo("pipe", 0644));
    T(setxattr("pipe", "user.a", "x", 1, 0));
    T(getxattr("pipe", "user.a", value, 8));
    T(lsetxattr("slink", "user.a", "x", 1, 0));
    T(lgetxattr("slink", "user.a", value, 8));
    T(llistxattr("slink", value, 8));
}

static void xattrs_stay(void) {
    char value[8] = "";
    T(setxattr("stored", "user.a", "kept", 4, 0));
    T(rename("stored", "moved"));
    put("moved", "new content");
    T(link("moved", "second"));
    T(getxattr("second", "user.a", value, 8));
    say("%s", value);
    int fd = open("moved", O_RDONLY);
    T(fsetxattr(fd, "user.b", "x", 1, 0));
    T(flistxattr(fd, NULL, 0));
    T(unlink("moved"));
    T(fgetxattr(fd, "user.b", value, 8));
    T(fremovexattr(fd, "user.b"));
}

static void attributed(void) {
    char value[8];
    T(setxattr("stored", "user.b", "x", 1, 0));
    T(removexattr("stored", "user.a"));
    T(getxattr("stored", "user.a", value, 8));
    T(getxattr("secret", "user.a", value, 8));
    T(listxattr("secret", value, 8));
    T(setxattr("tmp", "user.a", "x", 1, 0));
    T(setxattr("writable", "user.a", "x", 1, 0));
}

static void xattr_denied(void) {
    put("secret", "x");
    put("writable", "x");
    T(mkdir("tmp", 0777));
    T(chmod("tmp", 01777));
    T(chmod("writable", 0666));
    T(setxattr("stored", "user.a", "x", 1, 0));
    T(setxattr("secret", "user.a", "x", 1, 0));
    T(chmod("secret", 0600));
    as_user(attributed);
}

static void xattr_namespaces(void) {
    char value[64];
    T(setxattr("stored", "trusted.x", "x", 1, 0));
    T(getxattr("stored", "trusted.y", value, 8));
    T(getxattr("stored", "security.selinux", value, 8));
    T(getxattr("stored", "system.posix_acl_access", value, 64));
    T(removexattr("stored", "trusted.x"));
}

const struct one_case attributes[] = {
    {"chmods", chmods}, {"chmod_no_follow", chmod_no_follow}, {"changing_denied", changing_denied}, {"chowns", chowns},
    {"chown_clears_setuid", chown_clears_setuid}, {"write_clears_setuid", write_clears_setuid}, {"root_keeps_setuid", root_keeps_setuid},
    {"umasks", umasks}, {"accesses", accesses}, {"stable_numbers", stable_numbers}, {"stat_errors", stat_errors},
    {"file_system_numbers", file_system_numbers}, {"xattrs", xattrs}, {"xattr_limits", xattr_limits}, {"xattr_large", xattr_large},
    {"xattr_on_special", xattr_on_special}, {"xattrs_stay", xattrs_stay}, {"xattr_denied", xattr_denied},
    {"xattr_namespaces", xattr_namespaces}, {NULL, NULL}};
