/* Listings of directories. */
#include "posix.h"
#include <ftw.h>

static void fill(const char *dir, int count) {
    char name[64];
    mkdir(dir, 0755);
    for (int n = 0; n < count; n++) {
        snprintf(name, sizeof name, "%s/%04d", dir, n);
        close(open(name, O_WRONLY | O_CREAT, 0644));
    }
}

static void list_many(void) {
    fill("many", 700);
    struct dirent **found;
    say("%d", scandir("many", &found, NULL, alphasort));
}

static void list_while_removing(void) {
    fill("many", 400);
    DIR *dir = opendir("many");
    struct dirent *entry;
    int removed = 0;
    while ((entry = readdir(dir)))
        if (entry->d_name[0] != '.')
            removed += unlinkat(dirfd(dir), entry->d_name, 0) == 0;
    say("removed %d", removed);
    T(rmdir("many"));
}

static void list_while_making(void) {
    fill("many", 100);
    DIR *dir = opendir("many");
    struct dirent *entry;
    int seen = 0, extra = 0;
    char name[64];
    while ((entry = readdir(dir)) && seen + extra < 1000) {
        int number = atoi(entry->d_name);
        if (entry->d_name[0] == '.' || number >= 100)
            continue;
        seen++;
        snprintf(name, sizeof name, "many/%04d", 100 + number);
        close(open(name, O_WRONLY | O_CREAT, 0644));
    }
    say("each old name once: %d", seen);
    rewinddir(dir);
    for (seen = 0; readdir(dir); seen++)
        ;
    say("after rewinding %d", seen);
}

static void list_positions(void) {
    fill("many", 50);
    DIR *dir = opendir("many");
    long places[60];
    char names[60][32];
    struct dirent *entry;
    int count = 0, wrong = 0;
    for (places[0] = telldir(dir); (entry = readdir(dir)) && count < 59; places[++count] = telldir(dir))
        strcpy(names[count], entry->d_name);
    say("%d", count);
    for (int n = count - 1; n >= 0; n--) {
        seekdir(dir, places[n]);
        entry = readdir(dir);
        wrong += !entry || strcmp(entry->d_name, names[n]);
    }
    say("wrong %d", wrong);
    seekdir(dir, places[count]);
    say("end %d", readdir(dir) == NULL);
}

static void list_kinds_and_numbers(void) {
    T(mkfifo("pipe", 0644));
    put("new", "x");
    T(mkdir("made", 0755));
    struct dirent **found;
    int count = scandir(".", &found, NULL, alphasort);
    for (int n = 0; n < count; n++) {
        struct stat st;
        lstat(found[n]->d_name, &st);
        say("%s kind %d number %d", found[n]->d_name, found[n]->d_type == DT_UNKNOWN || (mode_t)DTTOIF(found[n]->d_type) == (st.st_mode & S_IFMT),
            !strcmp(found[n]->d_name, "..") || found[n]->d_ino == st.st_ino);
    }
}

static void list_errors(void) {
    T(opendir("missing") ? 0 : -1);
    T(opendir("stored") ? 0 : -1);
    T(opendir("") ? 0 : -1);
    char buffer[1024];
    int fd = open("stored", O_RDONLY);
    T(syscall(SYS_getdents64, fd, buffer, sizeof buffer));
    T(fdopendir(fd) ? 0 : -1);
    fd = open("sdir", O_RDONLY);
    T(syscall(SYS_getdents64, fd, buffer, 5));
    T(mkdir("gone", 0755));
    fd = open("gone", O_RDONLY);
    T(rmdir("gone"));
    T(syscall(SYS_getdents64, fd, buffer, sizeof buffer));
}

static void listed(void) {
    T(opendir("entered") ? 0 : -1);
    T(opendir("read") ? 0 : -1);
    T(access("entered/f", F_OK));
    T(access("read/f", F_OK));
    list("read");
}

static void list_denied(void) {
    T(mkdir("entered", 0711));
    T(mkdir("read", 0744));
    put("entered/f", "x");
    put("read/f", "x");
    as_user(listed);
}

static void directory_links(void) {
    look("sdir");
    T(mkdir("sdir/a", 0755));
    T(mkdir("sdir/b", 0755));
    look("sdir");
    T(rename("sdir/a", "a"));
    look("sdir");
    T(rmdir("sdir/b"));
    look("sdir");
    T(mkdir("new", 0755));
    T(mkdir("new/a", 0755));
    look("new");
}

static int visited;
static int visit(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)path, (void)st, (void)at;
    visited += 1 + 1000 * (kind == FTW_DP) + 1000000 * (kind == FTW_SL);
    return remove(path);
}

static void walk_and_remove(void) {
    T(mkdir("tree", 0755));
    for (int n = 0; n < 5; n++) {
        char name[32];
        snprintf(name, sizeof name, "tree/%d", n);
        fill(name, 20);
    }
    T(symlink("..", "tree/up"));
    T(rename("sdir", "tree/sdir"));
    T(nftw("tree", visit, 8, FTW_DEPTH | FTW_PHYS));
    say("%d", visited);
    list(".");
}

static void list_is_current(void) {
    DIR *dir = opendir("sdir");
    int count = 0;
    put("sdir/late", "x");
    rewinddir(dir);
    while (readdir(dir))
        count++;
    say("%d", count);
    T(unlink("sdir/inner"));
    rewinddir(dir);
    for (count = 0; readdir(dir); count++)
        ;
    say("%d", count);
    list("sdir");
}

static void make_elsewhere(void) {
    put("sdir/from-child", "child");
    unlink("stored");
    mkdir("child-dir", 0755);
}

static void another_process_sees(void) {
    T(access("sdir/from-child", F_OK));
    T(access("child-dir", F_OK));
    aside(make_elsewhere);
    T(access("sdir/from-child", F_OK));
    T(access("stored", F_OK));
    show("sdir/from-child");
    list(".");
}

const struct one_case listing[] = {
    {"list_many", list_many}, {"list_while_removing", list_while_removing}, {"list_while_making", list_while_making},
    {"list_positions", list_positions}, {"list_kinds_and_numbers", list_kinds_and_numbers}, {"list_errors", list_errors},
    {"list_denied", list_denied}, {"directory_links", directory_links}, {"walk_and_remove", walk_and_remove},
    {"list_is_current", list_is_current}, {"another_process_sees", another_process_sees}, {NULL, NULL}};
