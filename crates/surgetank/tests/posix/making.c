/* Creation and removal of names: directories, links, special files. */
#include "posix.h"

static void mkdir_errors(void) {
    T(mkdir("stored", 0755));
    T(mkdir("sdir", 0755));
    T(mkdir("slink", 0755));
    T(symlink("nowhere", "dangling"));
    T(mkdir("dangling", 0755));
    T(mkdir("missing/below", 0755));
    T(mkdir("stored/below", 0755));
    T(mkdir("", 0755));
    T(mkdir(".", 0755));
    T(mkdir("slashed/", 0755));
    T(mkdir("a//b", 0755));
    T(mkdir("slashed//b", 0755));
    list(".");
}

static void mkdir_modes(void) {
    static const mode_t masks[] = {0, 022, 077}, modes[] = {0, 0755, 0777, 01777, 02755};
    for (int m = 0; m < 3; m++)
        for (int n = 0; n < 5; n++) {
            char name[32];
            snprintf(name, sizeof name, "m%o-%o", masks[m], modes[n]);
            umask(masks[m]);
            mkdir(name, modes[n]);
            look(name);
        }
}

static void setgid_directory_hands_on(void) {
    T(mkdir("team", 0755));
    T(chown("team", 0, 2000));
    T(chmod("team", 02775));
    put("team/file", "x");
    T(mkdir("team/below", 0755));
    T(symlink("x", "team/link"));
    T(mkfifo("team/pipe", 0644));
    look("team/file");
    look("team/below");
    look("team/link");
    look("team/pipe");
}

static void rmdir_errors(void) {
    T(rmdir("sdir"));
    T(rmdir("stored"));
    T(rmdir("missing"));
    T(rmdir("slink"));
    T(symlink("sdir", "dlink"));
    T(rmdir("dlink"));
    T(rmdir("dlink/"));
    T(rmdir("."));
    T(rmdir("sdir/."));
    T(rmdir("sdir/.."));
    T(rmdir("stored/below"));
    T(mkdir("empty", 0755));
    T(rmdir("empty/"));
    T(unlink("sdir/inner"));
    T(rmdir("sdir"));
    list(".");
}

static void unlink_errors(void) {
    T(unlink("sdir"));
    T(unlink("missing"));
    T(unlink("stored/"));
    T(unlink("slink/"));
    T(unlink("stored/below"));
    T(unlink(""));
    T(unlink("."));
    T(unlinkat(AT_FDCWD, "stored", AT_REMOVEDIR));
    T(unlinkat(AT_FDCWD, "stored", 0x4000));
    T(unlink("slink"));
    look("stored");
    T(unlink("stored"));
    list(".");
}

static void unlink_open(void) {
    static const char *const names[] = {"new", "stored"};
    put("new", "0123456789");
    for (int n = 0; n < 2; n++) {
        int fd;
        char text[20] = "";
        struct stat st;
        D(fd, open(names[n], O_RDWR));
        T(unlink(names[n]));
        T(pwrite(fd, "still", 5, 5));
        T(pread(fd, text, 10, 0));
        say("%s", text);
        T(fstat(fd, &st));
        say("links %ld size %ld", (long)st.st_nlink, (long)st.st_size);
        T(ftruncate(fd, 3));
        T(fchmod(fd, 0600));
        T(fsync(fd));
        T(open(names[n], O_RDONLY));
        put(names[n], "another");
        T(pread(fd, text, 10, 0));
        T(close(fd));
        show(names[n]);
    }
}

static void hard_links(void) {
    T(link("stored", "second"));
    T(link("second", "sdir/third"));
    look("stored");
    int fd;
    D(fd, open("second", O_WRONLY | O_APPEND));
    T(write(fd, "!", 1));
    show("sdir/third");
    T(chmod("sdir/third", 0600));
    look("second");
    T(unlink("stored"));
    look("second");
    struct stat a, b;
    T(stat("second", &a));
    T(stat("sdir/third", &b));
    say("same %d", a.st_ino == b.st_ino);
    put("new", "x");
    T(link("new", "new2"));
    T(unlink("new"));
    look("new2");
}

static void link_errors(void) {
    T(link("stored", "sdir"));
    T(link("stored", "slink"));
    T(link("sdir", "dir2"));
    T(link("missing", "x"));
    T(link("stored", "missing/x"));
    T(link("stored", "stored/x"));
    T(link("stored", "x/"));
    T(link("stored/", "x"));
    T(linkat(AT_FDCWD, "stored", AT_FDCWD, "x", 0x4000));
    list(".");
}

static void link_of_a_link(void) {
    T(link("slink", "as-link"));
    look("as-link");
    T(linkat(AT_FDCWD, "slink", AT_FDCWD, "as-file", AT_SYMLINK_FOLLOW));
    look("as-file");
    int fd = open("stored", O_RDONLY);
    T(linkat(fd, "", AT_FDCWD, "by-descriptor", AT_EMPTY_PATH));
    look("by-descriptor");
}

static void link_to_unlinked(void) {
    char path[64];
    put("new", "x");
    int fd = open("new", O_RDONLY);
    T(unlink("new"));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    T(linkat(AT_FDCWD, path, AT_FDCWD, "again", AT_SYMLINK_FOLLOW));
}

static void symlinks(void) {
    char text[5000] = "", target[4200];
    T(symlink("stored", "sdir"));
    T(symlink("", "empty"));
    T(symlink("x", "missing/y"));
    T(symlink("x", "stored/y"));
    T(symlink("anything goes/../\n", "odd"));
    T(readlink("odd", text, sizeof text));
    T(readlink("odd", text, 4));
    T(readlink("stored", text, sizeof text));
    T(readlink("sdir", text, sizeof text));
    T(readlink("missing", text, sizeof text));
    T(readlink("odd", text, 0));
    memset(target, 't', sizeof target);
    target[4095] = 0;
    T(symlink(target, "long"));
    T(readlink("long", text, sizeof text));
    target[4095] = 't', target[4096] = 0;
    T(symlink(target, "too-long"));
    look("slink");
    look("odd");
}

static void links_that_lead_out(void) {
    T(symlink("../../outside", "relative"));
    T(symlink("/proc/version", "absolute"));
    T(symlink("..", "up"));
    int fd;
    T(open("relative", O_RDONLY));
    D(fd, open("absolute", O_RDONLY));
    D(fd, open("up/links_that_lead_out/stored", O_RDONLY));
    T(access("up/up", F_OK));
    T(symlink("/dev/shm", "memory"));
    T(mkdir("memory/surgetank-posix-case", 0755));
    T(access("/dev/shm/surgetank-posix-case", F_OK));
    T(rmdir("memory/surgetank-posix-case"));
}

static void link_to_itself_in_proc(void) {
    int fd;
    T(symlink("/proc/self/status", "status"));
    D(fd, open("status", O_RDONLY));
}

static void special_files(void) {
    T(mkfifo("pipe", 0666));
    T(mkfifo("pipe", 0666));
    T(mknod("plain", S_IFREG | 0640, 0));
    T(mknod("none", 0640, 0));
    T(mknod("directory", S_IFDIR | 0755, 0));
    T(mknod("stored", S_IFIFO | 0644, 0));
    T(mknod("sock", S_IFSOCK | 0600, 0));
    T(mknod("zero", S_IFCHR | 0600, makedev(1, 5)));
    look("pipe");
    look("plain");
    look("none");
    look("sock");
    look("zero");
    T(link("pipe", "pipe2"));
    T(rename("pipe2", "pipe3"));
    T(unlink("sock"));
    struct stat st;
    T(stat("zero", &st));
    say("device %d,%d", major(st.st_rdev), minor(st.st_rdev));
}

static void devices_denied(void) {
    T(mknod("d/zero", S_IFCHR | 0600, makedev(1, 5)));
    T(mkfifo("d/pipe", 0600));
    look("d/pipe");
}

static void special_files_denied(void) {
    T(mkdir("d", 0755));
    T(chown("d", USER, USER));
    as_user(devices_denied);
}

static void made_denied(void) {
    T(mkdir("new", 0755));
    T(rmdir("sdir"));
    T(unlink("stored"));
    T(unlink("sdir/inner"));
    T(symlink("x", "y"));
    T(link("stored", "y"));
    T(mkfifo("y", 0600));
    T(rename("stored", "y"));
    T(mkdir("sdir", 0755));
    T(unlink("missing"));
    T(mkdir("closed/x", 0755));
    T(rmdir("closed/x"));
    T(access("closed/x", F_OK));
}

static void making_denied(void) {
    T(mkdir("closed", 0700));
    as_user(made_denied);
    list(".");
}

static void in_sticky(void) {
    T(unlink("tmp/theirs"));
    T(rename("tmp/theirs", "tmp/mine"));
    T(rmdir("tmp/dir"));
    put("tmp/own", "x");
    T(rename("tmp/own", "tmp/theirs"));
    T(rename("tmp/own", "tmp/own2"));
    T(unlink("tmp/own2"));
    T(unlink("tmp/given"));
    T(link("tmp/theirs", "tmp/linked"));
}

static void sticky_directory(void) {
    T(mkdir("tmp", 0755));
    T(chmod("tmp", 01777));
    put("tmp/theirs", "x");
    T(mkdir("tmp/dir", 0777));
    put("tmp/given", "x");
    T(chown("tmp/given", USER, USER));
    as_user(in_sticky);
    list("tmp");
}

static void odd_paths(void) {
    int fd;
    D(fd, open("sdir/./inner", O_RDONLY));
    D(fd, open("sdir//inner", O_RDONLY));
    D(fd, open("./sdir/../stored", O_RDONLY));
    D(fd, open("sdir/../sdir/inner", O_RDONLY));
    T(open("stored/../stored", O_RDONLY));
    T(mkdir("a", 0755));
    T(mkdir("a/.", 0755));
    T(rename("a/.", "b"));
    T(rename("a", "b/."));
    T(rename("a/", "b/"));
    T(rename("stored/", "c"));
    T(rename("stored", "c/"));
    T(access("slink/", F_OK));
    T(access("b/", F_OK));
}

static void hostile_names(void) {
    static const char *const names[] = {"new\nline", "\x01\x02\x1b[0m", "\xff\xfe", "-rf", "--", " ", "tab\there", "...", "..x", "*?[", "\"'\\", "\xc3\x28", "%s%n"};
    T(mkdir("odd", 0755));
    T(chdir("odd"));
    for (int n = 0; n < 13; n++) {
        put(names[n], names[n]);
        struct stat st;
        T(stat(names[n], &st));
    }
    T(rename(names[0], "\n"));
    T(unlink(names[12]));
    T(link("-rf", "-rf\n"));
    T(symlink("\n", "\xfe"));
    T(mkdir("d\n", 0755));
    put("d\n/\xff", "x");
    say("%d", (int)sizeof names);
}

static void working_directory(void) {
    char path[PATH_MAX];
    T(chdir("sdir"));
    T(rename("../sdir", "../moved"));
    say("%s", getcwd(path, sizeof path));
    put("here", "x");
    T(chdir("inner"));
    T(chdir("missing"));
    T(chdir("../slink"));
    T(getcwd(path, 3) ? 0 : -1);
    int up = open("..", O_RDONLY | O_DIRECTORY);
    T(fchdir(up));
    say("%s", getcwd(path, sizeof path));
    list("moved");
    say("%s", realpath("slink", path));
}

const struct one_case making[] = {
    {"mkdir_errors", mkdir_errors}, {"mkdir_modes", mkdir_modes}, {"setgid_directory_hands_on", setgid_directory_hands_on},
    {"rmdir_errors", rmdir_errors}, {"unlink_errors", unlink_errors}, {"unlink_open", unlink_open}, {"hard_links", hard_links},
    {"link_errors", link_errors}, {"link_of_a_link", link_of_a_link}, {"link_to_unlinked", link_to_unlinked}, {"symlinks", symlinks},
    {"links_that_lead_out", links_that_lead_out}, {"link_to_itself_in_proc", link_to_itself_in_proc}, {"special_files", special_files}, {"special_files_denied", special_files_denied},
    {"making_denied", making_denied}, {"sticky_directory", sticky_directory}, {"odd_paths", odd_paths}, {"hostile_names", hostile_names},
    {"working_directory", working_directory}, {NULL, NULL}};
