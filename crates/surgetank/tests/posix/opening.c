/* open(2): flags, errors, and properties of descriptors. */
#include "posix.h"
#include <linux/openat2.h>

static void open_missing(void) {
    T(open("missing", O_RDONLY));
    T(open("", O_RDONLY));
    T(open("missing/below", O_RDONLY));
    T(open("stored/below", O_RDONLY));
    T(open("stored/", O_RDONLY));
    T(open("missing/", O_WRONLY | O_CREAT, 0644));
    T(open("missing/below", O_WRONLY | O_CREAT, 0644));
    T(open("stored/below", O_WRONLY | O_CREAT, 0644));
    T(open("stored/.", O_RDONLY));
    T(open("missing/..", O_RDONLY));
}

static void open_directory_for_writing(void) {
    int fd;
    T(open("sdir", O_WRONLY));
    T(open("sdir", O_RDWR));
    T(open("sdir", O_RDONLY | O_CREAT, 0644));
    T(open("sdir", O_RDONLY | O_TRUNC));
    T(open(".", O_WRONLY | O_CREAT, 0644));
    D(fd, open("sdir", O_RDONLY));
    char byte;
    T(read(fd, &byte, 1));
    T(write(fd, "x", 1));
    T(ftruncate(fd, 0));
}

static void open_create_modes(void) {
    static const mode_t masks[] = {0, 022, 027, 077, 0777}, modes[] = {0, 0644, 0777, 04755, 02755, 01666};
    for (int m = 0; m < 5; m++)
        for (int n = 0; n < 6; n++) {
            char name[32];
            snprintf(name, sizeof name, "m%o-%o", masks[m], modes[n]);
            umask(masks[m]);
            close(open(name, O_WRONLY | O_CREAT, modes[n]));
            look(name);
        }
}

static void open_mode_stays(void) {
    int fd;
    D(fd, open("stored", O_WRONLY | O_CREAT, 0600));
    close(fd);
    look("stored");
}

static void open_mode_zero(void) {
    int fd;
    D(fd, open("closed", O_RDWR | O_CREAT | O_EXCL, 0));
    T(write(fd, "abc", 3));
    T(close(fd));
    look("closed");
    show("closed");
}

static void open_exclusive(void) {
    int fd;
    T(open("stored", O_WRONLY | O_CREAT | O_EXCL, 0644));
    T(open("slink", O_WRONLY | O_CREAT | O_EXCL, 0644));
    T(open("sdir", O_RDONLY | O_CREAT | O_EXCL, 0644));
    T(symlink("nowhere", "dangling"));
    T(open("dangling", O_WRONLY | O_CREAT | O_EXCL, 0644));
    D(fd, open("fresh", O_WRONLY | O_CREAT | O_EXCL, 0644));
    T(open("fresh", O_WRONLY | O_CREAT | O_EXCL, 0644));
    T(unlink("fresh"));
    D(fd, open("fresh", O_WRONLY | O_CREAT | O_EXCL, 0644));
    list(".");
}

static void open_truncates(void) {
    int fd;
    put("new", "content");
    D(fd, open("new", O_WRONLY | O_TRUNC));
    look("new");
    T(write(fd, "ab", 2));
    close(fd);
    show("new");
    D(fd, open("stored", O_RDWR | O_TRUNC));
    look("stored");
    close(fd);
    put("read", "content");
    D(fd, open("read", O_RDONLY | O_TRUNC));
    look("read");
    D(fd, open("sdir/inner", O_RDONLY | O_TRUNC));
    look("sdir/inner");
}

static void open_truncates_under_a_reader(void) {
    int reader, writer;
    char text[20] = "";
    put("new", "0123456789");
    D(reader, open("new", O_RDONLY));
    T(read(reader, text, 4));
    D(writer, open("new", O_WRONLY | O_TRUNC));
    T(read(reader, text, 4));
    T(write(writer, "abcdefgh", 8));
    memset(text, 0, sizeof text);
    T(read(reader, text, 10));
    say("%s", text);
}

static void open_appends(void) {
    int fd;
    D(fd, open("stored", O_RDWR | O_APPEND));
    T(lseek(fd, 0, SEEK_CUR));
    T(write(fd, "A", 1));
    T(lseek(fd, 0, SEEK_CUR));
    T(lseek(fd, 2, SEEK_SET));
    T(write(fd, "B", 1));
    T(pwrite(fd, "C", 1, 0));
    T(lseek(fd, 0, SEEK_CUR));
    show("stored");
    T(ftruncate(fd, 3));
    T(write(fd, "D", 1));
    show("stored");
}

static void open_appends_twice(void) {
    int a, b;
    D(a, open("log", O_WRONLY | O_CREAT | O_APPEND, 0644));
    D(b, open("log", O_WRONLY | O_APPEND));
    for (int n = 0; n < 3; n++) {
        T(write(a, "a", 1));
        T(write(b, "b", 1));
    }
    show("log");
}

static void open_append_set_later(void) {
    int fd;
    D(fd, open("stored", O_RDWR));
    T(fcntl(fd, F_SETFL, O_APPEND));
    T(write(fd, "end", 3));
    show("stored");
    say("append %d", !!(fcntl(fd, F_GETFL) & O_APPEND));
}

static void open_append_taken_away(void) {
    int fd;
    D(fd, open("stored", O_RDWR | O_APPEND));
    T(write(fd, "end", 3));
    T(fcntl(fd, F_SETFL, 0));
    T(lseek(fd, 0, SEEK_SET));
    T(write(fd, "X", 1));
    show("stored");
}

static void open_as_directory(void) {
    T(open("stored", O_RDONLY | O_DIRECTORY));
    T(open("missing", O_RDONLY | O_DIRECTORY));
    T(symlink("sdir", "dlink"));
    int fd;
    D(fd, open("dlink", O_RDONLY | O_DIRECTORY));
    T(open("dlink", O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    T(open("slink", O_RDONLY | O_DIRECTORY));
    T(open("x", O_RDONLY | O_DIRECTORY | O_CREAT, 0644));
    D(fd, open("dlink/", O_RDONLY | O_NOFOLLOW));
}

static void open_not_following(void) {
    int fd;
    T(open("slink", O_RDONLY | O_NOFOLLOW));
    T(open("slink", O_WRONLY | O_CREAT | O_NOFOLLOW, 0644));
    T(symlink("sdir", "dlink"));
    D(fd, open("dlink/inner", O_RDONLY | O_NOFOLLOW));
    D(fd, open("stored", O_RDONLY | O_NOFOLLOW));
}

static void open_creates_behind_a_link(void) {
    int fd;
    T(symlink("sdir/made", "dangling"));
    D(fd, open("dangling", O_WRONLY | O_CREAT, 0640));
    T(write(fd, "made", 4));
    look("sdir/made");
    T(symlink("no/where", "lost"));
    T(open("lost", O_WRONLY | O_CREAT, 0640));
    T(open("lost", O_RDONLY));
}

static void open_access_modes(void) {
    int fd;
    char byte;
    D(fd, open("stored", O_RDONLY));
    T(write(fd, "x", 1));
    T(ftruncate(fd, 1));
    T(fallocate(fd, 0, 0, 100));
    D(fd, open("stored", O_WRONLY));
    T(read(fd, &byte, 1));
    T(pread(fd, &byte, 1, 0));
    T(write(fd, "x", 1));
    show("stored");
}

static void unnamed_file_is_linked(void) {
    int fd;
    char path[64];
    D(fd, open(".", O_TMPFILE | O_RDWR, 0640));
    T(write(fd, "unnamed", 7));
    struct stat st = {0}; /* printed even without a descriptor */
    T(fstat(fd, &st));
    say("mode %o links %ld size %ld", st.st_mode & 07777, (long)st.st_nlink, (long)st.st_size);
    list(".");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    T(linkat(AT_FDCWD, path, AT_FDCWD, "named", AT_SYMLINK_FOLLOW));
    look("named");
    T(write(fd, "+more", 5));
    close(fd);
    show("named");
}

static void unnamed_file_errors(void) {
    int fd;
    char path[64];
    T(open(".", O_TMPFILE | O_RDONLY, 0640));
    T(open("stored", O_TMPFILE | O_RDWR, 0640));
    T(open("missing", O_TMPFILE | O_RDWR, 0640));
    D(fd, open("sdir", O_TMPFILE | O_RDWR | O_EXCL, 0640));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    T(linkat(AT_FDCWD, path, AT_FDCWD, "named", AT_SYMLINK_FOLLOW));
}

static void path_descriptor(void) {
    int fd, again;
    char byte, path[64];
    struct stat st;
    D(fd, open("stored", O_PATH));
    T(read(fd, &byte, 1));
    T(fstat(fd, &st));
    say("size %ld", (long)st.st_size);
    T(fchmod(fd, 0600));
    T(lseek(fd, 0, SEEK_SET));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    D(again, open(path, O_RDONLY));
    T(read(again, &byte, 1));
    D(fd, open("sdir", O_PATH | O_DIRECTORY));
    D(again, openat(fd, "inner", O_RDONLY));
    T(fchdir(fd));
    list(".");
}

static void path_descriptor_of_a_link(void) {
    int fd;
    char text[32] = "";
    struct stat st;
    D(fd, open("slink", O_PATH | O_NOFOLLOW));
    T(readlinkat(fd, "", text, sizeof text));
    say("%s", text);
    T(fstat(fd, &st));
    say("link %d", S_ISLNK(st.st_mode));
}

static void descriptor_by_proc(void) {
    int fd, again;
    char path[64], text[PATH_MAX] = "";
    D(fd, open("stored", O_RDONLY));
    T(lseek(fd, 5, SEEK_SET));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    D(again, open(path, O_RDWR));
    T(lseek(again, 0, SEEK_CUR));
    T(pwrite(again, "XY", 2, 0));
    show("stored");
    if (readlink(path, text, sizeof text - 1) > 0)
        say("%s", text);
    struct stat a, b;
    T(stat(path, &a));
    T(stat("stored", &b));
    say("same %d", a.st_ino == b.st_ino && a.st_dev == b.st_dev);
}

static void descriptor_by_proc_after_unlink(void) {
    int fd, again;
    char path[64], text[10] = "";
    put("new", "content");
    D(fd, open("new", O_RDONLY));
    T(unlink("new"));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    D(again, open(path, O_RDWR));
    T(pwrite(again, "CON", 3, 0));
    T(read(fd, text, 7));
    say("%s", text);
}

static void denied(void) {
    int fd;
    T(open("secret", O_RDONLY));
    T(open("stored", O_WRONLY));
    D(fd, open("stored", O_RDONLY));
    T(open("made", O_WRONLY | O_CREAT, 0644));
    T(open("blind/inner", O_RDONLY));
    T(open("listed/inner", O_RDONLY));
    T(open("listed", O_RDONLY) >= 0);
    T(open("blind", O_RDONLY));
    T(open("stored", O_RDONLY | O_TRUNC));
    T(open("stored", O_RDONLY | O_NOATIME));
    T(open("own/made", O_RDWR | O_CREAT, 0) >= 0);
    T(open("own/made", O_RDONLY));
    T(truncate("stored", 1));
    T(open("secret", O_RDONLY | O_CREAT | O_EXCL, 0644));
}

static void open_denied(void) {
    put("secret", "x");
    T(chmod("secret", 0600));
    T(mkdir("blind", 0711));
    put("blind/inner", "x");
    T(chmod("blind/inner", 0600));
    T(mkdir("listed", 0744));
    put("listed/inner", "x");
    T(mkdir("own", 0777));
    T(chmod("own", 0777));
    as_user(denied);
    look("own/made");
    show("stored");
}

static void open_loops(void) {
    T(symlink("b", "a"));
    T(symlink("a", "b"));
    T(symlink("self", "self"));
    T(open("a", O_RDONLY));
    T(open("self", O_WRONLY | O_CREAT, 0644));
    T(open("self/below", O_RDONLY));
    struct stat st;
    T(stat("a", &st));
    T(lstat("a", &st));
    T(chdir("a"));
    T(truncate("a", 0));
    T(mkdir("a", 0755));
    T(mkdir("a/b", 0755));
    T(unlink("a"));
}

static void open_long_chains(void) {
    char name[16], target[16] = "stored";
    for (int n = 1; n <= 41; n++) {
        snprintf(name, sizeof name, "c%d", n);
        if (symlink(target, name) < 0)
            say("%s: %s", name, strerrorname_np(errno));
        strcpy(target, name);
    }
    int fd;
    D(fd, open("c40", O_RDONLY));
    D(fd, open("c41", O_RDONLY));
}

static void open_long_names(void) {
    char name[300], path[5000] = "";
    int fd;
    memset(name, 'n', sizeof name);
    name[255] = 0;
    D(fd, open(name, O_WRONLY | O_CREAT, 0644));
    T(mkdir(name, 0755));
    T(rename(name, "short"));
    T(rename("short", name));
    name[255] = 'n', name[256] = 0;
    T(open(name, O_WRONLY | O_CREAT, 0644));
    T(open(name, O_RDONLY));
    T(mkdir(name, 0755));
    T(symlink("x", name));
    T(link("stored", name));
    T(rename("stored", name));
    T(unlink(name));
    T(mkfifo(name, 0644));
    T(access(name, F_OK));
    while (strlen(path) < 4094)
        strcat(path, "./");
    T(access(path, F_OK));
    strcat(path, "/");
    T(access(path, F_OK));
    strcat(path, "/");
    T(access(path, F_OK));
}

static void fifo_opens(void) {
    int reader, writer;
    char text[8] = "";
    T(mkfifo("pipe", 0640));
    T(open("pipe", O_WRONLY | O_NONBLOCK));
    D(reader, open("pipe", O_RDONLY | O_NONBLOCK));
    T(read(reader, text, 4));
    D(writer, open("pipe", O_WRONLY | O_NONBLOCK));
    T(read(reader, text, 4));
    T(write(writer, "abcd", 4));
    T(read(reader, text, 8));
    T(lseek(reader, 0, SEEK_SET));
    T(ftruncate(writer, 0));
    say("%s", text);
    look("pipe");
}

static void socket_in_the_directory(void) {
    struct sockaddr_un place = {.sun_family = AF_UNIX, .sun_path = "socket"};
    int server = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);
    T(bind(server, (struct sockaddr *)&place, sizeof place));
    T(listen(server, 1));
    T(connect(client, (struct sockaddr *)&place, sizeof place));
    T(bind(client, (struct sockaddr *)&place, sizeof place));
    T(open("socket", O_RDONLY));
    look("socket");
    T(unlink("socket"));
}

static void device_opens(void) {
    int fd;
    T(mknod("null", S_IFCHR | 0666, makedev(1, 3)));
    look("null");
    D(fd, open("null", O_RDWR));
    T(unlink("null"));
}

static void open_synchronous(void) {
    int fd;
    D(fd, open("new", O_RDWR | O_CREAT | O_SYNC, 0644));
    T(write(fd, "sync", 4));
    D(fd, open("stored", O_RDWR | O_DSYNC));
    T(pwrite(fd, "sync", 4, 2));
    show("new");
    show("stored");
}

static void open_direct(void) {
    int fd;
    char *block = aligned_alloc(4096, 8192);
    memset(block, 'd', 8192);
    D(fd, open("direct", O_RDWR | O_CREAT | O_DIRECT, 0644));
    T(pwrite(fd, block, 8192, 0));
    T(pread(fd, block, 4096, 4096));
    T(pread(fd, block, 4096, 8192));
    say("flag %d", !!(fcntl(fd, F_GETFL) & O_DIRECT));
    look("direct");
}

static void running_program_is_busy(void) {
    int in = open("/bin/sleep", O_RDONLY), out = open("program", O_WRONLY | O_CREAT, 0755), ready[2];
    while (sendfile(out, in, NULL, 1 << 20) > 0)
        ;
    close(out);
    pid_t child;
    if (pipe2(ready, O_CLOEXEC) < 0)
        return;
    if ((child = fork()) == 0) {
        execl("./program", "program", "10", NULL);
        say("exec: %s", strerrorname_np(errno));
        _exit(1);
    }
    /* Closed by exec. */
    char byte;
    close(ready[1]);
    T(read(ready[0], &byte, 1));
    T(open("program", O_WRONLY));
    T(truncate("program", 0));
    int fd;
    D(fd, open("program", O_RDONLY));
    T(unlink("program"));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void written_program_is_busy(void) {
    int in = open("/bin/true", O_RDONLY), out = open("program", O_WRONLY | O_CREAT, 0755);
    while (sendfile(out, in, NULL, 1 << 20) > 0)
        ;
    T(execl("./program", "program", NULL));
    close(out);
    T(chmod("program", 0644));
    T(execl("./program", "program", NULL));
    T(execl("./sdir", "sdir", NULL));
    T(execl("./missing", "missing", NULL));
}

static void descriptor_flags(void) {
    int fd, copy;
    D(fd, open("stored", O_RDWR | O_CLOEXEC | O_NONBLOCK | O_APPEND));
    say("cloexec %d", fcntl(fd, F_GETFD));
    say("flags %d %d %d", (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR, !!(fcntl(fd, F_GETFL) & O_NONBLOCK), !!(fcntl(fd, F_GETFL) & O_APPEND));
    D(copy, dup(fd));
    say("cloexec of a copy %d", fcntl(copy, F_GETFD));
    D(copy, fcntl(fd, F_DUPFD_CLOEXEC, 100));
    say("at least 100: %d", copy >= 100);
    T(dup2(fd, 150));
    T(close(fd));
    T(close(fd));
    T(write(150, "end", 3));
    show("stored");
}

static void open_relative_to(void) {
    int dir, fd;
    D(dir, open("sdir", O_RDONLY | O_DIRECTORY));
    D(fd, openat(dir, "inner", O_RDONLY));
    D(fd, openat(dir, "../stored", O_RDONLY));
    T(openat(fd, "inner", O_RDONLY));
    T(openat(999, "inner", O_RDONLY));
    T(openat(dir, "", O_RDONLY));
    D(fd, openat(dir, "new", O_WRONLY | O_CREAT, 0600));
    T(mkdirat(dir, "deep", 0700));
    T(symlinkat("inner", dir, "link"));
    T(linkat(dir, "inner", AT_FDCWD, "hard", 0));
    T(renameat(dir, "new", AT_FDCWD, "moved"));
    T(unlinkat(dir, "deep", AT_REMOVEDIR));
    T(mknodat(dir, "pipe", S_IFIFO | 0600, 0));
    T(faccessat(dir, "inner", R_OK, 0));
    T(fchmodat(dir, "inner", 0600, 0));
    T(rename("sdir", "elsewhere"));
    D(fd, openat(dir, "inner", O_RDONLY));
    D(fd, openat(dir, "after", O_WRONLY | O_CREAT, 0600));
    list("elsewhere");
    list(".");
}

static void open_beneath(void) {
    struct open_how how = {.flags = O_RDONLY, .resolve = RESOLVE_BENEATH};
    int dir, fd;
    D(dir, open("sdir", O_RDONLY | O_DIRECTORY));
    D(fd, (int)syscall(SYS_openat2, dir, "inner", &how, sizeof how));
    D(fd, (int)syscall(SYS_openat2, dir, "../stored", &how, sizeof how));
    how.resolve = RESOLVE_NO_SYMLINKS;
    D(fd, (int)syscall(SYS_openat2, AT_FDCWD, "slink", &how, sizeof how));
}

static void in_a_removed_directory(void) {
    int dir;
    T(mkdir("gone", 0755));
    D(dir, open("gone", O_RDONLY | O_DIRECTORY));
    T(chdir("gone"));
    T(rmdir("../gone"));
    T(openat(dir, "new", O_WRONLY | O_CREAT, 0644));
    T(open("new", O_WRONLY | O_CREAT, 0644));
    T(mkdir("new", 0755));
    T(access(".", F_OK));
    char path[PATH_MAX];
    T(getcwd(path, sizeof path) ? 0 : -1);
    struct stat st;
    T(fstat(dir, &st));
    say("links %ld", (long)st.st_nlink);
    T(chdir(".."));
    list(".");
}

const struct one_case opening[] = {
    {"open_missing", open_missing}, {"open_directory_for_writing", open_directory_for_writing}, {"open_create_modes", open_create_modes},
    {"open_mode_stays", open_mode_stays}, {"open_mode_zero", open_mode_zero}, {"open_exclusive", open_exclusive},
    {"open_truncates", open_truncates}, {"open_truncates_under_a_reader", open_truncates_under_a_reader}, {"open_appends", open_appends},
    {"open_appends_twice", open_appends_twice}, {"open_append_set_later", open_append_set_later},
    {"open_append_taken_away", open_append_taken_away}, {"open_as_directory", open_as_directory}, {"open_not_following", open_not_following},
    {"open_creates_behind_a_link", open_creates_behind_a_link}, {"open_access_modes", open_access_modes},
    {"unnamed_file_is_linked", unnamed_file_is_linked}, {"unnamed_file_errors", unnamed_file_errors}, {"path_descriptor", path_descriptor},
    {"path_descriptor_of_a_link", path_descriptor_of_a_link}, {"descriptor_by_proc", descriptor_by_proc},
    {"descriptor_by_proc_after_unlink", descriptor_by_proc_after_unlink}, {"open_denied", open_denied}, {"open_loops", open_loops},
    {"open_long_chains", open_long_chains}, {"open_long_names", open_long_names}, {"fifo_opens", fifo_opens},
    {"socket_in_the_directory", socket_in_the_directory}, {"device_opens", device_opens}, {"open_synchronous", open_synchronous},
    {"open_direct", open_direct}, {"running_program_is_busy", running_program_is_busy}, {"written_program_is_busy", written_program_is_busy},
    {"descriptor_flags", descriptor_flags}, {"open_relative_to", open_relative_to}, {"open_beneath", open_beneath},
    {"in_a_removed_directory", in_a_removed_directory}, {NULL, NULL}};
