/* `posix prepare DIR` makes a directory for each case, `posix run DIR [CASE]` runs the cases there, `posix list` names them. */
#include "posix.h"
#include <grp.h>
#include <stdarg.h>

static const struct one_case *const groups[] = {opening, making, renaming, attributes, set_ids, times, content, mapping, locking, listing};

void say(const char *format, ...) {
    va_list words;
    va_start(words, format);
    vprintf(format, words);
    va_end(words);
    putchar('\n');
    fflush(stdout);
}

long print_result(const char *call, long result) {
    int error = errno;
    if (result == -1)
        say("%s: %s", call, strerrorname_np(error));
    else
        say("%s: %ld", call, result);
    errno = error;
    return result;
}

void put(const char *name, const char *text) {
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text) || close(fd) < 0)
        say("put %s: %s", name, strerrorname_np(errno));
}

void show(const char *name) {
    char text[101];
    int fd = open(name, O_RDONLY | O_NONBLOCK);
    ssize_t length = fd < 0 ? -1 : read(fd, text, 100);
    if (length < 0) {
        say("%s holds: %s", name, strerrorname_np(errno));
    } else {
        for (ssize_t n = 0; n < length; n++)
            text[n] = text[n] ? text[n] : '.';
        text[length] = 0;
        say("%s holds: %s", name, text);
    }
    close(fd);
}

void look(const char *name) {
    struct stat st;
    if (lstat(name, &st) < 0) {
        say("%s: %s", name, strerrorname_np(errno));
        return;
    }
    const char *kind = S_ISREG(st.st_mode) ? "file" : S_ISDIR(st.st_mode) ? "directory" : S_ISLNK(st.st_mode) ? "link"
        : S_ISFIFO(st.st_mode) ? "fifo" : S_ISSOCK(st.st_mode) ? "socket" : S_ISCHR(st.st_mode) ? "device" : "other";
    long size = S_ISREG(st.st_mode) || S_ISLNK(st.st_mode) ? (long)st.st_size : 0;
    say("%s: %s %o links %ld owner %d:%d size %ld", name, kind, st.st_mode & 07777, (long)st.st_nlink, st.st_uid, st.st_gid, size);
}

void list(const char *name) {
    struct dirent **found;
    int count = scandir(name, &found, NULL, alphasort);
    printf("%s lists:", name);
    for (int n = 0; n < count; n++)
        if (strcmp(found[n]->d_name, ".") && strcmp(found[n]->d_name, ".."))
            printf(" %s", found[n]->d_name);
    say("%s", count < 0 ? strerrorname_np(errno) : "");
}

void pause_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void in_child(void (*run)(void), bool privileged) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!privileged && (setgroups(0, NULL) < 0 || setresgid(USER, USER, USER) < 0 || setresuid(USER, USER, USER) < 0))
            say("another user: %s", strerrorname_np(errno));
        run();
        fflush(stdout);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status)
        say("ended with %s", WIFSIGNALED(status) ? sigabbrev_np(WTERMSIG(status)) : "an exit code");
}

void aside(void (*run)(void)) { in_child(run, true); }
void as_user(void (*run)(void)) { in_child(run, false); }

/* A case that hangs is killed, and its result is the signal. */
static void run_one(const struct one_case *one, const char *root) {
    say("== %s", one->name);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (chdir(root) < 0 || chdir(one->name) < 0) {
            say("no directory: %s", strerrorname_np(errno));
            _exit(0);
        }
        umask(022);
        setpgid(0, 0);
        const char *hurried = getenv("HURRIED");
        alarm(hurried && strstr(hurried, one->name) ? 3 : 30);
        one->run();
        fflush(stdout);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    kill(-child, SIGKILL);
    if (status)
        say("ended with %s", WIFSIGNALED(status) ? sigabbrev_np(WTERMSIG(status)) : "an exit code");
}

static void prepare_one(const struct one_case *one) {
    umask(022);
    if (mkdir(one->name, 0755) < 0 || chdir(one->name) < 0) {
        perror(one->name);
        exit(1);
    }
    put("stored", "0123456789");
    mkdir("sdir", 0755);
    put("sdir/inner", "inner");
    if (symlink("stored", "slink") < 0 || chdir("..") < 0)
        exit(1);
}

int main(int count, char **words) {
    if (count < 2)
        return 2;
    bool preparing = !strcmp(words[1], "prepare");
    if (preparing && chdir(words[2]) < 0)
        return 1;
    for (size_t group = 0; group < sizeof groups / sizeof *groups; group++)
        for (const struct one_case *one = groups[group]; one->name; one++) {
            if (preparing)
                prepare_one(one);
            else if (!strcmp(words[1], "list"))
                say("%s", one->name);
            else if (count < 4 || !strcmp(words[3], one->name))
                run_one(one, words[2]);
        }
    return 0;
}
