/* Locks of all three kinds, between processes. */
#include "posix.h"

static struct flock range(short kind, off_t from, off_t length) {
    return (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = from, .l_len = length};
}

static int set(int fd, int command, short kind, off_t from, off_t length) {
    struct flock lock = range(kind, from, length);
    return fcntl(fd, command, &lock);
}

/* For 20 ms after a close a request may be refused: docs/semantics.md, "Locks". */
static int set_soon(int fd, int command, short kind, off_t from, off_t length) {
    int result = -1;
    for (int n = 0; n < 100 && (result = set(fd, command, kind, from, length)) < 0; n++)
        pause_ms(10);
    return result;
}

static int flock_soon(int fd, int kind) {
    int result = -1;
    for (int n = 0; n < 100 && (result = flock(fd, kind | LOCK_NB)) < 0; n++)
        pause_ms(10);
    return result;
}

static void ask_flock(void) {
    int fd = open("stored", O_RDONLY);
    T(flock(fd, LOCK_SH | LOCK_NB));
    T(flock(fd, LOCK_UN));
    T(flock(fd, LOCK_EX | LOCK_NB));
}

static void flocks(void) {
    int a, b;
    D(a, open("stored", O_RDONLY));
    D(b, open("stored", O_RDWR));
    T(flock(a, LOCK_SH));
    aside(ask_flock);
    T(flock(b, LOCK_SH | LOCK_NB));
    T(flock(b, LOCK_EX | LOCK_NB));
    T(flock(a, LOCK_UN));
    T(flock_soon(b, LOCK_EX));
    aside(ask_flock);
    T(flock(b, LOCK_SH));
    aside(ask_flock);
    T(flock(999, LOCK_SH));
    T(flock(a, 0));
    T(close(b));
    T(flock_soon(a, LOCK_EX));
}

static int held;
static void unlock_held(void) { T(flock(held, LOCK_UN)); }

static void flock_is_shared_by_copies(void) {
    int copy, other;
    D(held, open("stored", O_RDWR));
    D(copy, dup(held));
    D(other, open("stored", O_RDWR));
    T(flock(held, LOCK_EX));
    T(flock(copy, LOCK_EX | LOCK_NB));
    T(close(held));
    T(flock(other, LOCK_EX | LOCK_NB));
    held = copy;
    aside(unlock_held);
    T(flock_soon(other, LOCK_EX));
}

static void flock_on_directory(void) {
    int a, b;
    D(a, open("sdir", O_RDONLY));
    D(b, open("sdir", O_RDONLY));
    T(flock(a, LOCK_EX | LOCK_NB));
    T(flock(b, LOCK_EX | LOCK_NB));
    T(flock(a, LOCK_UN));
    T(flock_soon(b, LOCK_SH));
}

static void ask_ranges(void) {
    int fd = open("stored", O_RDWR);
    for (int at = 0; at < 10; at += 3) {
        struct flock lock = range(F_WRLCK, at, 1);
        T(fcntl(fd, F_GETLK, &lock));
        say("at %d: kind %d from %ld length %ld holder %d", at, lock.l_type, (long)lock.l_start, (long)lock.l_len,
            lock.l_type == F_UNLCK ? 1 : lock.l_pid == getppid());
    }
    T(set(fd, F_SETLK, F_RDLCK, 0, 3));
    T(set(fd, F_SETLK, F_WRLCK, 0, 3));
    T(set(fd, F_SETLK, F_WRLCK, 6, 0));
}

static void range_locks(void) {
    int fd;
    D(fd, open("stored", O_RDWR));
    T(set(fd, F_SETLK, F_RDLCK, 0, 3));
    T(set(fd, F_SETLK, F_WRLCK, 3, 3));
    aside(ask_ranges);
    T(set(fd, F_SETLK, F_UNLCK, 4, 1));
    aside(ask_ranges);
    T(set(fd, F_SETLK, F_WRLCK, 0, 0));
    aside(ask_ranges);
    T(set(fd, F_SETLK, F_UNLCK, 0, 0));
    aside(ask_ranges);
}

static void range_lock_errors(void) {
    int reader, writer;
    D(reader, open("stored", O_RDONLY));
    D(writer, open("stored", O_WRONLY));
    T(set(reader, F_SETLK, F_WRLCK, 0, 1));
    T(set(writer, F_SETLK, F_RDLCK, 0, 1));
    T(set(reader, F_SETLK, F_RDLCK, 0, 1));
    T(set(writer, F_SETLK, F_WRLCK, 5, 1));
    T(set(writer, F_SETLK, F_WRLCK, -1, 1));
    T(set(writer, F_SETLK, F_WRLCK, 5, -2));
    T(set(writer, F_SETLK, F_WRLCK, 1, -2));
    T(set(writer, F_SETLK, 77, 0, 1));
    T(set(999, F_SETLK, F_RDLCK, 0, 1));
}

static void ask_all(void) {
    int fd = open("stored", O_RDWR);
    T(set(fd, F_SETLK, F_WRLCK, 0, 0));
}
static void ask_all_soon(void) {
    int fd = open("stored", O_RDWR);
    T(set_soon(fd, F_SETLK, F_WRLCK, 0, 0));
}

static void any_close_unlocks(void) {
    int a, b;
    D(a, open("stored", O_RDWR));
    D(b, open("stored", O_RDWR));
    T(set(a, F_SETLK, F_WRLCK, 0, 0));
    aside(ask_all);
    T(close(b));
    aside(ask_all_soon);
}

static void end_unlocks(void) {
    aside(ask_all);
    aside(ask_all_soon);
}

static void children_have_no_range_locks(void) {
    held = open("stored", O_RDWR);
    T(set(held, F_SETLK, F_WRLCK, 0, 0));
    aside(ask_all);
    T(set(held, F_SETLK, F_WRLCK, 0, 0));
}

static void locks_of_open_files(void) {
    int a, b;
    D(a, open("stored", O_RDWR));
    D(b, open("stored", O_RDWR));
    T(set(a, F_OFD_SETLK, F_WRLCK, 0, 5));
    T(set(b, F_OFD_SETLK, F_WRLCK, 0, 5));
    T(set(b, F_OFD_SETLK, F_WRLCK, 5, 5));
    T(set(b, F_SETLK, F_WRLCK, 0, 5));
    aside(ask_all);
    struct flock lock = range(F_WRLCK, 0, 0);
    T(fcntl(b, F_OFD_GETLK, &lock));
    say("%d %ld %ld %d", lock.l_type, (long)lock.l_start, (long)lock.l_len, lock.l_pid);
    lock = range(F_WRLCK, 0, 0);
    lock.l_pid = 7;
    T(fcntl(b, F_OFD_SETLK, &lock));
    T(close(a));
    T(set_soon(b, F_OFD_SETLK, F_WRLCK, 0, 0));
    aside(ask_all);
}

static void kinds_do_not_mix(void) {
    int a, b;
    D(a, open("stored", O_RDWR));
    D(b, open("stored", O_RDWR));
    T(flock(a, LOCK_EX));
    T(set(b, F_SETLK, F_WRLCK, 0, 0));
    T(set(a, F_OFD_SETLK, F_RDLCK, 0, 1));
}

static void waits(void) {
    int fd = open("stored", O_RDWR), ends[2];
    char byte;
    if (pipe(ends) < 0)
        return;
    T(set(fd, F_SETLK, F_WRLCK, 0, 0));
    pid_t child = fork();
    if (child == 0) {
        int own = open("stored", O_RDWR);
        if (write(ends[1], "r", 1) != 1)
            _exit(1);
        int result = set(own, F_SETLKW, F_WRLCK, 0, 0);
        pwrite(own, "child", 5, 0);
        _exit(result < 0);
    }
    T(read(ends[0], &byte, 1));
    pause_ms(100);
    T(pwrite(fd, "parent", 6, 0));
    T(set(fd, F_SETLK, F_UNLCK, 0, 0));
    int status;
    waitpid(child, &status, 0);
    say("status %d", status);
    show("stored");
}

static void on_alarm(int number) { (void)number; }
static void wait_in_vain(void) {
    struct sigaction action = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &action, NULL);
    int fd = open("stored", O_RDWR);
    struct itimerval soon = {{0, 0}, {0, 100000}};
    setitimer(ITIMER_REAL, &soon, NULL);
    T(set(fd, F_SETLKW, F_WRLCK, 0, 0));
    setitimer(ITIMER_REAL, &soon, NULL);
    T(flock(fd, LOCK_EX));
}

static void waiting_is_interrupted(void) {
    int fd = open("stored", O_RDWR);
    T(set(fd, F_SETLK, F_WRLCK, 0, 0));
    T(flock(fd, LOCK_EX));
    aside(wait_in_vain);
}

static void deadlock(void) {
    int fd = open("stored", O_RDWR), ends[2];
    char byte;
    if (pipe(ends) < 0)
        return;
    T(set(fd, F_SETLK, F_WRLCK, 0, 1));
    pid_t child = fork();
    if (child == 0) {
        int own = open("stored", O_RDWR);
        set(own, F_SETLK, F_WRLCK, 1, 1);
        if (write(ends[1], "r", 1) != 1)
            _exit(1);
        set(own, F_SETLKW, F_WRLCK, 0, 1);
        _exit(0);
    }
    T(read(ends[0], &byte, 1));
    pause_ms(100);
    struct sigaction action = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval soon = {{0, 0}, {1, 0}};
    setitimer(ITIMER_REAL, &soon, NULL);
    T(set(fd, F_SETLKW, F_WRLCK, 1, 1));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void leases(void) {
    int fd, other;
    /* The signal that reports a broken lease. */
    signal(SIGIO, SIG_IGN);
    put("new", "x");
    D(fd, open("new", O_RDONLY));
    T(fcntl(fd, F_GETLEASE));
    T(fcntl(fd, F_SETLEASE, F_RDLCK));
    T(fcntl(fd, F_GETLEASE));
    D(other, open("new", O_RDONLY));
    T(open("new", O_WRONLY | O_NONBLOCK));
    T(fcntl(fd, F_SETLEASE, F_UNLCK));
    D(other, open("new", O_WRONLY | O_NONBLOCK));
    T(fcntl(fd, F_SETLEASE, F_WRLCK));
}

static void lock_by_section(void) {
    int fd = open("stored", O_RDWR);
    T(lseek(fd, 5, SEEK_SET));
    T(lockf(fd, F_TLOCK, 2));
    T(lockf(fd, F_TEST, 2));
    aside(ask_all);
    T(lockf(fd, F_ULOCK, 0));
    aside(ask_all_soon);
}

const struct one_case locking[] = {
    {"flocks", flocks}, {"flock_is_shared_by_copies", flock_is_shared_by_copies}, {"flock_on_directory", flock_on_directory},
    {"range_locks", range_locks}, {"range_lock_errors", range_lock_errors}, {"any_close_unlocks", any_close_unlocks},
    {"end_unlocks", end_unlocks}, {"children_have_no_range_locks", children_have_no_range_locks}, {"locks_of_open_files", locks_of_open_files},
    {"kinds_do_not_mix", kinds_do_not_mix}, {"waits", waits}, {"waiting_is_interrupted", waiting_is_interrupted}, {"deadlock", deadlock},
    {"leases", leases}, {"lock_by_section", lock_by_section}, {NULL, NULL}};
