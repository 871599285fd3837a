/* Set-user-id and set-group-id: the calls that clear them, and the users that may keep them. */
#include "posix.h"

static const mode_t modes[] = {04777, 02777, 06777, 02767, 04666};
#define MODES (sizeof modes / sizeof *modes)
static const char *name_of(const char *what, mode_t mode) {
    static char name[64];
    snprintf(name, sizeof name, "%s-%o", what, mode);
    return name;
}

/* A kernel with a cached mode need not request the mode alone, as it requests times and size. */
static void mode_of(const char *name) {
    struct statx out;
    if (statx(AT_FDCWD, name, AT_SYMLINK_NOFOLLOW, STATX_MODE, &out) < 0)
        say("%s: %s", name, strerrorname_np(errno));
    else
        say("%s: %o", name, out.stx_mode & 07777);
    look(name);
}

static void by_write(int fd) { T(write(fd, "y", 1)); }
static void by_second_write(int fd) {
    T(write(fd, "y", 1));
    T(write(fd, "z", 1));
}
static void by_truncate(int fd) { T(ftruncate(fd, 5)); }
static void by_growing(int fd) { T(ftruncate(fd, 50)); }
static void by_allocate(int fd) { T(fallocate(fd, 0, 0, 100)); }
static void by_copy(int fd) {
    int from = open("source", O_RDONLY);
    T(copy_file_range(from, NULL, fd, NULL, 4, 0));
}
static void by_sendfile(int fd) {
    int from = open("source", O_RDONLY);
    T(sendfile(fd, from, NULL, 4));
}
static const struct way {
    const char *name;
    void (*act)(int fd);
} ways[] = {{"write", by_write}, {"second", by_second_write}, {"truncate", by_truncate}, {"growing", by_growing},
            {"allocate", by_allocate}, {"copy", by_copy}, {"sendfile", by_sendfile}};
#define WAYS (sizeof ways / sizeof *ways)

static void each_way(int access) {
    for (size_t way = 0; way < WAYS; way++)
        for (size_t n = 0; n < MODES; n++) {
            const char *name = name_of(ways[way].name, modes[n]);
            int fd = open(name, access);
            ways[way].act(fd);
            struct stat st;
            fstat(fd, &st);
            say("%s while it is open: %o", name, st.st_mode & 07777);
            close(fd);
            mode_of(name);
        }
}
static void reading_too(void) { each_way(O_RDWR); }

static void files_of_all_modes(void) {
    put("source", "0123456789");
    for (size_t way = 0; way < WAYS; way++)
        for (size_t n = 0; n < MODES; n++) {
            const char *name = name_of(ways[way].name, modes[n]);
            put(name, "0123456789");
            chmod(name, modes[n]);
            mode_of(name);
        }
}

static void writing_clears_set_ids(void) {
    files_of_all_modes();
    as_user(reading_too);
}

static void root_keeps_set_ids(void) {
    files_of_all_modes();
    reading_too();
}

/* On Linux only a call clears them. */
static void write_mapped(void) {
    int fd = open("mapped", O_RDWR);
    char *mapped = mmap(NULL, 10, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    mapped[0] = 'm';
    T(msync(mapped, 10, MS_SYNC));
    close(fd);
    look("mapped");
}
static void mapping_keeps_set_ids(void) {
    put("mapped", "0123456789");
    T(chmod("mapped", 06777));
    as_user(write_mapped);
    show("mapped");
}

static void write_made(void) {
    for (size_t n = 0; n < MODES; n++) {
        int fd = open(name_of("made", modes[n]), n % 2 ? O_RDWR : O_WRONLY);
        T(write(fd, "x", 1));
        struct stat st;
        fstat(fd, &st);
        say("made: %o", st.st_mode & 07777);
    }
}

/* Made with the bits, empty, and then written by another user: pjdfstest, chmod/12. */
static void made_with_set_ids(void) {
    umask(0);
    for (size_t n = 0; n < MODES; n++) {
        close(open(name_of("made", modes[n]), O_WRONLY | O_CREAT | O_EXCL, modes[n]));
        mode_of(name_of("made", modes[n]));
    }
    as_user(write_made);
    for (size_t n = 0; n < MODES; n++)
        mode_of(name_of("made", modes[n]));
    int fd = open("kept", O_WRONLY | O_CREAT, 06755);
    T(write(fd, "x", 1));
    close(fd);
    mode_of("kept");
}

static void write_stored(void) {
    int fd = open("stored", O_WRONLY | O_APPEND);
    T(write(fd, "more", 4));
    mode_of("stored");
    T(truncate("read", 3));
    mode_of("read");
    fd = open("emptied", O_WRONLY | O_TRUNC);
    mode_of("emptied");
}

static void stored_with_set_ids(void) {
    T(chmod("stored", 06777));
    mode_of("stored");
    put("read", "0123456789");
    put("emptied", "0123456789");
    T(chmod("read", 06777));
    T(chmod("emptied", 06777));
    int fd = open("read", O_RDONLY);
    char byte;
    T(read(fd, &byte, 1));
    as_user(write_stored);
}

/* The bits are set while the file is open for writing. */
static void own_file(void) {
    umask(0);
    int fd = open("own", O_RDWR | O_CREAT, 04755);
    mode_of("own");
    T(write(fd, "abc", 3));
    mode_of("own");
    T(fchmod(fd, 06755));
    mode_of("own");
    T(write(fd, "defg", 4));
    mode_of("own");
    T(chmod("own", 04755));
    close(fd);
    mode_of("own");
    fd = open("late", O_RDWR | O_CREAT, 0755);
    T(write(fd, "abc", 3));
    T(fchmod(fd, 04755));
    T(write(fd, "defg", 4));
    close(fd);
    mode_of("late");
}
static void set_ids_of_an_open_file(void) {
    T(chmod(".", 0777));
    as_user(own_file);
}

static int go[2], ready[2];
static void write_in_two_turns(void) {
    int fd = open("before", O_WRONLY | O_APPEND);
    char byte = 'x';
    T(write(fd, "1", 1));
    write(ready[1], &byte, 1);
    close(ready[1]);
    close(go[1]);
    read(go[0], &byte, 1);
    T(write(fd, "2", 1));
    look("before");
}
static void give_set_ids(void) {
    char byte;
    close(ready[1]);
    if (read(ready[0], &byte, 1) == 1)
        T(chmod("before", 06777));
    mode_of("before");
    write(go[1], "x", 1);
    _exit(0);
}
static void set_ids_after_the_open(void) {
    put("before", "x");
    chmod("before", 0666);
    pipe(go);
    pipe(ready);
    fflush(stdout);
    if (fork() == 0)
        give_set_ids();
    as_user(write_in_two_turns);
    wait(NULL);
    mode_of("before");
}

/* The process opens the file with privileges, and then drops them. */
static int inherited;
static void write_inherited(void) {
    T(write(inherited, "y", 1));
    look("inherited");
}
static void inherited_descriptor_clears_set_ids(void) {
    put("inherited", "x");
    T(chmod("inherited", 06777));
    inherited = open("inherited", O_WRONLY | O_APPEND);
    as_user(write_inherited);
    close(inherited);
    look("inherited");
}
static void inherited_before_set_ids(void) {
    put("inherited", "x");
    inherited = open("inherited", O_WRONLY | O_APPEND);
    T(chmod("inherited", 06777));
    as_user(write_inherited);
    close(inherited);
    look("inherited");
}

static const mode_t kinds[] = {S_IFREG, S_IFIFO, S_IFCHR, S_IFBLK};
static const char *const kind_names[] = {"file", "fifo", "character", "block"};
#define KINDS 4
static const int ids[][2] = {{USER, USER}, {USER, -1}, {-1, USER}, {-1, -1}};
static const char *given_name(int kind, int n, bool by_owner) {
    static char name[64];
    snprintf(name, sizeof name, "%s-%d-%s", kind_names[kind], n, by_owner ? "owner" : "root");
    return name;
}
static void give_each(void) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int n = 0; n < 4; n++) {
            const char *name = given_name(kind, n, getuid() != 0);
            T(chown(name, ids[n][0], ids[n][1]));
            mode_of(name);
        }
}
/* pjdfstest, chown/00. */
static void chown_clears_set_ids(void) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int n = 0; n < 8; n++) {
            const char *name = given_name(kind, n / 2, n % 2);
            T(mknod(name, kinds[kind] | 0644, S_ISCHR(kinds[kind]) || S_ISBLK(kinds[kind]) ? makedev(1, 3) : 0));
            T(chown(name, USER, USER));
            T(chmod(name, 06555));
            mode_of(name);
        }
    give_each();
    as_user(give_each);
}

/* On one line, for a door without sockets. */
static void give_socket(void) {
    struct stat st[4];
    for (int n = 0; n < 4; n++)
        if (chmod("socket", 06555) < 0 || chown("socket", ids[n][0], ids[n][1]) < 0 || lstat("socket", &st[n]) < 0) {
            say("socket: %s", strerrorname_np(errno));
            return;
        }
    say("socket: %o %o %o %o", st[0].st_mode, st[1].st_mode, st[2].st_mode, st[3].st_mode);
}
static void chown_of_socket_clears_set_ids(void) {
    mknod("socket", S_IFSOCK | 0644, 0);
    chown("socket", USER, USER);
    give_socket();
    as_user(give_socket);
    unlink("socket");
}

static void change_foreign(void) {
    T(chown("foreign", -1, -1));
    T(chown("plain", -1, -1));
    T(chmod("foreign", 0777));
    mode_of("foreign");
}
static void foreign_set_ids_stay(void) {
    put("foreign", "x");
    put("plain", "x");
    T(chmod("foreign", 06755));
    as_user(change_foreign);
}

const struct one_case set_ids[] = {
    {"writing_clears_set_ids", writing_clears_set_ids}, {"root_keeps_set_ids", root_keeps_set_ids},
    {"mapping_keeps_set_ids", mapping_keeps_set_ids}, {"made_with_set_ids", made_with_set_ids},
    {"stored_with_set_ids", stored_with_set_ids},
    {"set_ids_of_an_open_file", set_ids_of_an_open_file}, {"set_ids_after_the_open", set_ids_after_the_open},
    {"inherited_descriptor_clears_set_ids", inherited_descriptor_clears_set_ids},
    {"inherited_before_set_ids", inherited_before_set_ids}, {"chown_clears_set_ids", chown_clears_set_ids},
    {"chown_of_socket_clears_set_ids", chown_of_socket_clears_set_ids}, {"foreign_set_ids_stay", foreign_set_ids_stay},
    {NULL, NULL}};
