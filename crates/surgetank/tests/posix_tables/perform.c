/* Executes a script of system calls and prints the outcome of each step on a line.
 *
 * `perform DIR < SCRIPT`. `= NAME` begins a scenario: an empty directory below DIR becomes the working directory, and the files of
 * the scenario before it are removed. Any other line is a step: `USER CALL WORDS… [, CALL WORDS…]`, with USER as `UID/GID[,GID…]`.
 * Calls of one step share a descriptor. The outcome is that of the last call, or the name of the first error.
 * This one process changes its user for each step, as servers do: a fork for each step would take minutes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_WORDS 64
/* The clock of file times may tick every 10 ms. */
#define TICK_NS 12000000

struct words {
    char *word[MOST_WORDS];
    int count;
};

static int root, fd = -1;
static pid_t running;
static char result_text[4096];
static sigjmp_buf before;

/* A word that names a path; some words mean invalid pointers. */
static const char *path(const char *word) {
    if (!strcmp(word, "NULL"))
        return NULL;
    if (!strcmp(word, "BAD"))
        return (const char *)0xdeadc0de;
    return strcmp(word, "EMPTY") ? word : "";
}

static long number(const char *word) { return strtol(word, NULL, 0); }
static mode_t mode(const char *word) { return (mode_t)strtol(word, NULL, 8); }

static int flags(char *word) {
    static const struct { const char *name; int flag; } known[] = {
        {"RDONLY", O_RDONLY}, {"WRONLY", O_WRONLY}, {"RDWR", O_RDWR}, {"CREAT", O_CREAT}, {"EXCL", O_EXCL}, {"TRUNC", O_TRUNC},
        {"APPEND", O_APPEND}, {"NONBLOCK", O_NONBLOCK}, {"NOFOLLOW", O_NOFOLLOW}, {"DIRECTORY", O_DIRECTORY},
    };
    int all = 0;
    for (char *rest = NULL, *one = strtok_r(word, "|", &rest); one; one = strtok_r(NULL, "|", &rest)) {
        size_t n = 0;
        while (n < sizeof known / sizeof *known && strcmp(known[n].name, one))
            n++;
        if (n == sizeof known / sizeof *known) {
            fprintf(stderr, "no such flag: %s\n", one);
            exit(2);
        }
        all |= known[n].flag;
    }
    return all;
}

static void owner(const char *word, uid_t *uid, gid_t *gid) {
    int user = -1, group = -1;
    sscanf(word, "%d:%d", &user, &group);
    *uid = (uid_t)user;
    *gid = (gid_t)group;
}

static const char *kind(mode_t mode) {
    return S_ISREG(mode) ? "regular" : S_ISDIR(mode) ? "dir" : S_ISLNK(mode) ? "symlink" : S_ISFIFO(mode) ? "fifo"
        : S_ISSOCK(mode) ? "socket" : S_ISCHR(mode) ? "char" : "block";
}

/* The fields that a step requests, in its order. */
static int fields(int result, const struct stat *st, char *names) {
    if (result < 0)
        return result;
    size_t used = 0;
    result_text[0] = 0;
    for (char *rest = NULL, *one = strtok_r(names, ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        char text[64] = "no such field";
#define FIELD(name, ...) if (!strcmp(one, name)) snprintf(text, sizeof text, __VA_ARGS__)
#define TIME(time) "%ld.%09ld", (long)(time).tv_sec, (long)(time).tv_nsec
        FIELD("type", "%s", kind(st->st_mode));
        FIELD("mode", "%04o", st->st_mode & 07777);
        FIELD("owner", "%u:%u", st->st_uid, st->st_gid);
        FIELD("nlink", "%lu", (unsigned long)st->st_nlink);
        FIELD("size", "%ld", (long)st->st_size);
        FIELD("inode", "%lu", (unsigned long)st->st_ino);
        FIELD("device", "%u:%u", major(st->st_rdev), minor(st->st_rdev));
        FIELD("atime", TIME(st->st_atim));
        FIELD("mtime", TIME(st->st_mtim));
        FIELD("ctime", TIME(st->st_ctim));
        used += (size_t)snprintf(result_text + used, sizeof result_text - used, "%s%s", used ? "," : "", text);
    }
    return 0;
}

static int bind_socket(const char *name) {
    struct sockaddr_un place = {.sun_family = AF_UNIX};
    strncpy(place.sun_path, name, sizeof place.sun_path - 1);
    int made = socket(AF_UNIX, SOCK_STREAM, 0);
    int result = bind(made, (struct sockaddr *)&place, sizeof place);
    int error = errno;
    close(made);
    errno = error;
    return result;
}

/* A file of this kind, with the usual mode. */
static int make(const char *what, const char *name) {
    if (!strcmp(what, "none"))
        return 0;
    if (!strcmp(what, "regular")) {
        int made = open(name, O_CREAT | O_EXCL | O_WRONLY, 0644);
        return made < 0 ? made : close(made);
    }
    if (!strcmp(what, "dir"))
        return mkdir(name, 0755);
    if (!strcmp(what, "fifo"))
        return mkfifo(name, 0644);
    if (!strcmp(what, "socket"))
        return bind_socket(name);
    if (!strcmp(what, "symlink"))
        return symlink("test", name);
    return mknod(name, (mode_t)(0644 | (what[0] == 'b' ? S_IFBLK : S_IFCHR)), makedev(1, 2));
}

static int make_node(char **word) {
    mode_t type = word[1][0] == 'b' ? S_IFBLK : word[1][0] == 'c' ? S_IFCHR : word[1][0] == 's' ? S_IFSOCK : S_IFIFO;
    return mknod(path(word[0]), type | mode(word[2]), makedev((unsigned)number(word[3]), (unsigned)number(word[4])));
}

/* Every directory above the last name. */
static int make_above(char *name) {
    for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int result = mkdir(name, 0755);
        *slash = '/';
        if (result < 0)
            return result;
    }
    return 0;
}

static int fill(const char *name, long size) {
    int made = open(name, O_CREAT | O_WRONLY | O_TRUNC, 0644);
    if (made < 0)
        return made;
    char *bytes = malloc((size_t)size);
    memset(bytes, 'x', (size_t)size);
    ssize_t written = write(made, bytes, (size_t)size);
    free(bytes);
    return close(made) < 0 || written != size ? -1 : 0;
}

/* A copy of this program that runs until `stop`. */
static int start(const char *name) {
    char bytes[65536];
    int from = open("/proc/self/exe", O_RDONLY), to = open(name, O_CREAT | O_WRONLY, 0755);
    for (ssize_t length; (length = read(from, bytes, sizeof bytes)) > 0;)
        if (write(to, bytes, (size_t)length) != length)
            return -1;
    close(from);
    close(to);
    int ready[2];
    if (pipe(ready) < 0)
        return -1;
    running = fork();
    if (running == 0) {
        dup2(ready[1], 1);
        close(ready[0]);
        execl(name, name, "wait", NULL);
        _exit(1);
    }
    close(ready[1]);
    /* The copy writes a byte when it runs. */
    ssize_t length = read(ready[0], bytes, 1);
    close(ready[0]);
    return length == 1 ? 0 : -1;
}

static int stop(void) {
    kill(running, SIGKILL);
    int status;
    return waitpid(running, &status, 0) == running && WIFSIGNALED(status) ? 0 : -1;
}

static int set_times(char **word) {
    struct timespec times[2];
    for (int n = 0; n < 2; n++) {
        char *text = word[1 + n];
        times[n] = (struct timespec){0};
        if (!strcmp(text, "now"))
            times[n].tv_nsec = UTIME_NOW;
        else if (!strcmp(text, "omit"))
            times[n].tv_nsec = UTIME_OMIT;
        else
            sscanf(text, "%ld.%9ld", &times[n].tv_sec, &times[n].tv_nsec);
    }
    return utimensat(AT_FDCWD, path(word[0]), times, strcmp(word[3], "link") ? 0 : AT_SYMLINK_NOFOLLOW);
}

static int waits(void) {
    struct timespec time = {0, TICK_NS};
    return nanosleep(&time, NULL);
}

static int opens(char **word, int count) {
    fd = open(path(word[0]), flags(word[1]), count > 2 ? mode(word[2]) : 0);
    return fd < 0 ? fd : 0;
}

static int reads(long length, long from) {
    ssize_t got = pread(fd, result_text, (size_t)length, from);
    if (got >= 0)
        result_text[got] = 0;
    return (int)got;
}

static int places(const char *name) {
    ssize_t got = readlink(name, result_text, sizeof result_text - 1);
    if (got >= 0)
        result_text[got] = 0;
    return (int)got;
}

static int chowns(int (*call)(const char *, uid_t, gid_t), char **word) {
    uid_t uid;
    gid_t gid;
    owner(word[1], &uid, &gid);
    return call(path(word[0]), uid, gid);
}

static int fchowns(const char *word) {
    uid_t uid;
    gid_t gid;
    owner(word, &uid, &gid);
    return fchown(fd, uid, gid);
}

/* Calls on an open file or directory. */
static bool by_descriptor(const char *call, char **word, int *result) {
    struct stat st;
#define CALL(name, ...) if (!strcmp(call, name)) { *result = (int)(__VA_ARGS__); return true; }
    CALL("write", write(fd, word[0], strlen(word[0])) < 0 ? -1 : 0)
    CALL("pwrite", pwrite(fd, word[0], strlen(word[0]), number(word[1])) < 0 ? -1 : 0)
    CALL("pread", reads(number(word[0]), number(word[1])))
    CALL("fstat", fields(fstat(fd, &st), &st, word[0]))
    CALL("ftruncate", ftruncate(fd, number(word[0])))
    CALL("fchmod", fchmod(fd, mode(word[0])))
    CALL("fchown", fchowns(word[0]))
    CALL("posix_fallocate", (errno = posix_fallocate(fd, number(word[0]), number(word[1]))) ? -1 : 0)
    return false;
}

static int perform(const char *call, char **word, int count) {
    struct stat st;
    int result;
    if (by_descriptor(call, word, &result))
        return result;
#undef CALL
#define CALL(name, ...) if (!strcmp(call, name)) return (__VA_ARGS__);
    CALL("open", opens(word, count))
    CALL("make", make(word[0], word[1]) < 0 ? -1 : count > 2 && strcmp(word[0], "none") ? chowns(lchown, word + 1) : 0)
    CALL("above", make_above(word[0]))
    CALL("fill", fill(word[0], number(word[1])))
    CALL("mkdir", mkdir(path(word[0]), mode(word[1])))
    CALL("rmdir", rmdir(path(word[0])))
    CALL("unlink", unlink(path(word[0])))
    CALL("link", link(path(word[0]), path(word[1])))
    CALL("symlink", symlink(path(word[0]), path(word[1])))
    CALL("readlink", places(path(word[0])))
    CALL("rename", rename(path(word[0]), path(word[1])))
    CALL("mkfifo", mkfifo(path(word[0]), mode(word[1])))
    CALL("mknod", make_node(word))
    CALL("bind", bind_socket(word[0]))
    CALL("chmod", chmod(path(word[0]), mode(word[1])))
    CALL("chown", chowns(chown, word))
    CALL("lchown", chowns(lchown, word))
    CALL("truncate", truncate(path(word[0]), number(word[1])))
    CALL("stat", fields(stat(path(word[0]), &st), &st, word[1]))
    CALL("lstat", fields(lstat(path(word[0]), &st), &st, word[1]))
    CALL("utimensat", set_times(word))
    CALL("umask", (umask(mode(word[0])), 0))
    CALL("later", waits())
    CALL("start", start(word[0]))
    CALL("stop", stop())
    fprintf(stderr, "no such call: %s\n", call);
    exit(2);
}

/* Takes the user and the groups of a step. The saved user id stays root's, so that the process can become root again. */
static void become(char *user) {
    gid_t groups[16];
    size_t count = 0;
    char *rest = NULL;
    uid_t uid = (uid_t)number(strtok_r(user, "/", &rest));
    for (char *one = strtok_r(NULL, ",", &rest); one && count < 16; one = strtok_r(NULL, ",", &rest))
        groups[count++] = (gid_t)number(one);
    if (setgroups(count, groups) < 0 || setresgid(groups[0], groups[0], 0) < 0 || setresuid(uid, uid, 0) < 0) {
        perror(user);
        exit(2);
    }
}

/* A call that crashes on a bad pointer, instead of refusing it, ends its step only. */
static void dies(int signal) { siglongjmp(before, signal); }

static void step(struct words *words) {
    char root[] = "0/0";
    bool privileged = !strcmp(words->word[0], root);
    if (!privileged)
        become(words->word[0]);
    volatile int result = 0;
    volatile int first = 1;
    int died = sigsetjmp(before, 1);
    while (!died && first < words->count && result >= 0) {
        int last = first;
        while (last < words->count && strcmp(words->word[last], ","))
            last++;
        errno = 0;
        result_text[0] = 0;
        result = perform(words->word[first], words->word + first + 1, last - first - 1);
        first = last + 1;
    }
    const char *error = died ? "SIGSEGV" : result < 0 ? strerrorname_np(errno) : NULL;
    if (fd >= 0)
        close(fd);
    fd = -1;
    if (!privileged && (setresuid(0, 0, 0) < 0 || setresgid(0, 0, 0) < 0 || setgroups(0, NULL) < 0)) {
        perror("root");
        exit(2);
    }
    puts(error ? error : result < 0 ? "no error" : *result_text ? result_text : "0");
}

static void fails(const char *call, const char *name) {
    fprintf(stderr, "%s %s: %s\n", call, name, strerrorname_np(errno));
    exit(2);
}

/* Removes the files of a scenario. Its paths are deep, so it enters one directory after another. */
static void clear(int parent, const char *name) {
    int dir = openat(parent, name, O_RDONLY | O_DIRECTORY);
    DIR *list = dir < 0 ? NULL : fdopendir(dir);
    if (!list)
        fails("open", name);
    for (struct dirent *entry; (entry = readdir(list));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (unlinkat(dir, entry->d_name, 0) == 0)
            continue;
        clear(dir, entry->d_name);
    }
    closedir(list);
    if (unlinkat(parent, name, AT_REMOVEDIR) < 0)
        fails("rmdir", name);
}

static void scenario(const char *now) {
    static const char *const place = "scenario";
    static bool made;
    if (fchdir(root) < 0)
        exit(2);
    if (made)
        clear(root, place);
    made = now != NULL;
    umask(0);
    if (made && (mkdir(place, 0755) < 0 || chdir(place) < 0)) {
        perror(now);
        exit(2);
    }
}

int main(int count, char **word) {
    if (count == 2 && !strcmp(word[1], "wait")) {
        puts("running");
        fflush(stdout);
        for (;;)
            pause();
    }
    if (count != 2 || (root = open(word[1], O_RDONLY | O_DIRECTORY)) < 0)
        return 2;
    signal(SIGSEGV, dies);
    setvbuf(stdout, NULL, _IOLBF, 0);
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        struct words words = {0};
        char *rest = NULL;
        for (char *one = strtok_r(line, " \n", &rest); one && words.count < MOST_WORDS; one = strtok_r(NULL, " \n", &rest))
            words.word[words.count++] = one;
        if (words.count > 1 && !strcmp(words.word[0], "="))
            scenario(words.word[1]);
        else if (words.count > 1)
            step(&words);
    }
    scenario(NULL);
    return 0;
}
