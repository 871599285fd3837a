/* rename(2): every kind of file over every kind. */
#include "posix.h"

static const char *const kinds[] = {"none", "file", "stored", "empty", "filled", "link", "dangling", "pipe"};
#define KINDS 8

static void make_kind(int kind, const char *path) {
    char below[64];
    switch (kind) {
    case 1: put(path, path); break;
    case 2: if (link("stored", path) < 0) say("link: %s", strerrorname_np(errno)); break;
    case 3: mkdir(path, 0755); break;
    case 4:
        mkdir(path, 0755);
        snprintf(below, sizeof below, "%s/below", path);
        put(below, "x");
        break;
    case 5: if (symlink("stored", path) < 0) say("symlink"); break;
    case 6: if (symlink("nowhere", path) < 0) say("symlink"); break;
    case 7: mkfifo(path, 0644); break;
    }
}

static void matrix(unsigned flags) {
    for (int from = 0; from < KINDS; from++)
        for (int to = 0; to < KINDS; to++) {
            char a[64], b[64];
            snprintf(a, sizeof a, "%s-%s-a", kinds[from], kinds[to]);
            snprintf(b, sizeof b, "sdir/%s-%s-b", kinds[from], kinds[to]);
            make_kind(from, a);
            make_kind(to, b);
            errno = 0;
            int result = renameat2(AT_FDCWD, a, AT_FDCWD, b, flags);
            say("%s to %s: %s", kinds[from], kinds[to], result ? strerrorname_np(errno) : "OK");
            look(a);
            look(b);
        }
}

static void rename_matrix(void) { matrix(0); }
static void rename_matrix_noreplace(void) { matrix(RENAME_NOREPLACE); }
static void rename_matrix_exchange(void) { matrix(RENAME_EXCHANGE); }

static void rename_into_itself(void) {
    T(mkdir("a", 0755));
    T(mkdir("a/b", 0755));
    T(mkdir("a/b/c", 0755));
    T(rename("a", "a/x"));
    T(rename("a", "a/b/c/x"));
    T(rename("a/b", "a"));
    T(rename("a/b/c", "a"));
    T(rename("a", "a"));
    T(renameat2(AT_FDCWD, "a", AT_FDCWD, "a/b", RENAME_EXCHANGE));
    T(renameat2(AT_FDCWD, "a/b", AT_FDCWD, "a", RENAME_EXCHANGE));
    T(renameat2(AT_FDCWD, "a", AT_FDCWD, "a", RENAME_NOREPLACE));
    T(rename(".", "x"));
    T(rename("..", "x"));
    T(rename("a", "."));
    T(rename("a", "b/.."));
}

static void rename_errors(void) {
    T(rename("missing", "x"));
    T(rename("stored", "missing/x"));
    T(rename("stored", "slink/x"));
    T(rename("stored/x", "y"));
    T(rename("", "y"));
    T(rename("stored", ""));
    T(renameat2(AT_FDCWD, "stored", AT_FDCWD, "x", 0x80));
    T(renameat2(AT_FDCWD, "stored", AT_FDCWD, "x", RENAME_NOREPLACE | RENAME_EXCHANGE));
    T(rename("stored", "/proc/x"));
    list(".");
}

static void rename_over_another_name_of_it(void) {
    T(link("stored", "same"));
    T(rename("stored", "same"));
    look("stored");
    look("same");
    T(renameat2(AT_FDCWD, "stored", AT_FDCWD, "same", RENAME_EXCHANGE));
    look("same");
}

static void rename_of_open_files(void) {
    int a, b;
    char text[20] = "";
    put("new", "new");
    D(a, open("new", O_RDWR));
    D(b, open("stored", O_RDWR));
    T(rename("new", "stored"));
    T(write(a, "NEW+", 4));
    T(write(b, "OLD", 3));
    T(pread(b, text, 10, 0));
    say("%s", text);
    show("stored");
    T(close(a));
    T(close(b));
    show("stored");
    look("stored");
}

static void rename_of_a_filled_directory(void) {
    int fd;
    T(mkdir("d", 0755));
    put("d/f", "x");
    T(mkdir("d/e", 0755));
    D(fd, open("d/f", O_WRONLY));
    T(rename("d", "sdir/d"));
    T(write(fd, "moved", 5));
    T(rename("sdir", "top"));
    T(write(fd, "again", 5));
    close(fd);
    show("top/d/f");
    struct stat up, here;
    T(stat("top/d/..", &up));
    T(stat("top", &here));
    say("same %d", up.st_ino == here.st_ino);
    look("top");
    look(".");
    T(access("d", F_OK));
    T(mkdir("d", 0755));
    T(access("d/f", F_OK));
}

static void rename_and_make_again(void) {
    for (int n = 0; n < 20; n++) {
        char text[16];
        snprintf(text, sizeof text, "round %d", n);
        put("log", text);
        if (rename("log", "log.old") < 0)
            say("%s", strerrorname_np(errno));
    }
    show("log.old");
    T(access("log", F_OK));
    T(rename("log.old", "stored"));
    show("stored");
    show("slink");
}

static void rename_swaps_contents(void) {
    put("new", "new");
    T(renameat2(AT_FDCWD, "new", AT_FDCWD, "stored", RENAME_EXCHANGE));
    show("new");
    show("stored");
    T(renameat2(AT_FDCWD, "sdir", AT_FDCWD, "new", RENAME_EXCHANGE));
    show("sdir");
    list("new");
    T(renameat2(AT_FDCWD, "new/inner", AT_FDCWD, "slink", RENAME_EXCHANGE));
    show("slink");
    look("new/inner");
}

static void rename_whiteout(void) {
    T(renameat2(AT_FDCWD, "stored", AT_FDCWD, "x", RENAME_WHITEOUT));
    if (!access("x", F_OK))
        rename("x", "stored");
}

static void renamed_by_user(void) {
    T(rename("open/dir", "open/sub/dir"));
    T(rename("open/file", "open/sub/file"));
    T(rename("open/file", "shut/file"));
    T(rename("shut/file", "open/file2"));
    T(rename("open/own", "open/own2"));
    T(rename("open/own2", "shut/own"));
}

/* A directory gets another "..", so its own write permission counts. */
static void rename_denied(void) {
    T(mkdir("open", 0755));
    T(mkdir("open/dir", 0755));
    T(mkdir("open/sub", 0755));
    T(mkdir("open/own", 0755));
    T(mkdir("shut", 0755));
    put("open/file", "x");
    put("shut/file", "x");
    T(chmod("open", 0777));
    T(chmod("open/sub", 0777));
    T(chown("open/own", USER, USER));
    as_user(renamed_by_user);
    list("open");
    list("open/sub");
}

const struct one_case renaming[] = {
    {"rename_matrix", rename_matrix}, {"rename_matrix_noreplace", rename_matrix_noreplace}, {"rename_matrix_exchange", rename_matrix_exchange},
    {"rename_into_itself", rename_into_itself}, {"rename_errors", rename_errors},
    {"rename_over_another_name_of_it", rename_over_another_name_of_it}, {"rename_of_open_files", rename_of_open_files},
    {"rename_of_a_filled_directory", rename_of_a_filled_directory}, {"rename_and_make_again", rename_and_make_again},
    {"rename_swaps_contents", rename_swaps_contents}, {"rename_whiteout", rename_whiteout}, {"rename_denied", rename_denied}, {NULL, NULL}};
