/* Bytes: reads, writes, truncations, allocations, copies. */
#include "posix.h"

static void read_at_the_end(void) {
    char text[32] = "";
    int fd;
    D(fd, open("stored", O_RDONLY));
    T(read(fd, text, 32));
    T(read(fd, text, 32));
    T(lseek(fd, 8, SEEK_SET));
    T(read(fd, text, 32));
    T(pread(fd, text, 5, 9));
    T(pread(fd, text, 5, 10));
    T(pread(fd, text, 5, 1000));
    T(pread(fd, text, 5, -1));
    T(read(fd, text, 0));
    T(lseek(fd, 0, SEEK_SET));
    T(read(fd, (char *)1, 5));
    T(read(999, text, 1));
}

static void write_beyond(void) {
    int fd;
    D(fd, open("new", O_RDWR | O_CREAT, 0644));
    T(pwrite(fd, "b", 1, 5));
    show("new");
    T(lseek(fd, 10, SEEK_END));
    T(write(fd, "c", 1));
    look("new");
    show("new");
    T(pwrite(fd, "x", 1, -1));
    T(write(fd, (char *)1, 4));
    T(write(fd, "", 0));
    D(fd, open("stored", O_RDWR));
    T(pwrite(fd, "end", 3, 20));
    show("stored");
}

static void vectors(void) {
    char a[4] = "", b[10] = "", c[10] = "";
    struct iovec in[3] = {{a, 3}, {b, 4}, {c, 9}}, out[2] = {{"one", 3}, {"two!", 4}}, none = {NULL, 0};
    int fd;
    D(fd, open("stored", O_RDWR));
    T(readv(fd, in, 3));
    say("%s %s %s", a, b, c);
    T(writev(fd, out, 2));
    T(pwritev(fd, out, 2, 1));
    T(preadv(fd, in, 2, 0));
    T(writev(fd, &none, 1));
    T(writev(fd, out, -1));
    T(preadv2(fd, in, 1, -1, 0));
    T(pwritev2(fd, out, 1, 0, RWF_APPEND));
    T(pwritev2(fd, out, 1, 0, RWF_DSYNC));
    show("stored");
}

static void seeks(void) {
    int fd;
    D(fd, open("stored", O_RDWR));
    T(lseek(fd, 3, SEEK_SET));
    T(lseek(fd, 3, SEEK_CUR));
    T(lseek(fd, -1, SEEK_END));
    T(lseek(fd, -100, SEEK_CUR));
    T(lseek(fd, -1, SEEK_SET));
    T(lseek(fd, 1L << 40, SEEK_SET));
    T(lseek(fd, 0, 99));
    T(lseek(fd, 0, SEEK_CUR));
    int ends[2];
    if (pipe(ends) == 0)
        T(lseek(ends[0], 0, SEEK_SET));
}

static void holes(void) {
    int fd;
    D(fd, open("sparse", O_RDWR | O_CREAT, 0644));
    char *block = calloc(1, 65536);
    memset(block, 'x', 65536);
    T(ftruncate(fd, 1 << 20));
    T(pwrite(fd, block, 65536, 262144));
    T(lseek(fd, 0, SEEK_DATA));
    T(lseek(fd, 0, SEEK_HOLE));
    T(lseek(fd, 262144, SEEK_HOLE));
    T(lseek(fd, 300000, SEEK_DATA));
    T(lseek(fd, 400000, SEEK_DATA));
    T(lseek(fd, 1 << 20, SEEK_DATA));
    T(lseek(fd, (1 << 20) + 1, SEEK_HOLE));
    T(lseek(fd, -1, SEEK_DATA));
    struct stat st;
    T(fstat(fd, &st));
    say("sparse %d", st.st_blocks * 512 < st.st_size / 2);
    D(fd, open("stored", O_RDONLY));
    T(lseek(fd, 0, SEEK_DATA));
    T(lseek(fd, 0, SEEK_HOLE));
    T(lseek(fd, 10, SEEK_DATA));
}

static void truncates(void) {
    int fd;
    T(truncate("stored", 4));
    show("stored");
    T(truncate("stored", 8));
    show("stored");
    T(truncate("stored", 0));
    look("stored");
    T(truncate("stored", -1));
    T(truncate("sdir", 0));
    T(truncate("missing", 0));
    T(truncate("stored/x", 0));
    T(truncate("slink", 3));
    show("stored");
    D(fd, open("sdir/inner", O_RDWR));
    T(lseek(fd, 5, SEEK_SET));
    T(ftruncate(fd, 2));
    T(write(fd, "x", 1));
    show("sdir/inner");
    T(ftruncate(fd, -1));
    T(ftruncate(fd, LONG_MAX));
    T(ftruncate(fd, 6));
    T(mkfifo("pipe", 0644));
    T(truncate("pipe", 0));
}

static void large_offsets(void) {
    int fd;
    D(fd, open("large", O_RDWR | O_CREAT, 0644));
    T(pwrite(fd, "x", 1, 5L << 30));
    struct stat st;
    T(fstat(fd, &st));
    say("%ld %d", (long)st.st_size, st.st_blocks < 1000);
    char byte = 0;
    T(pread(fd, &byte, 1, 5L << 30));
    T(pread(fd, &byte, 1, 4L << 30));
    T(lseek(fd, 0, SEEK_END));
    T(ftruncate(fd, 10));
    T(pwrite(fd, "x", 1, LONG_MAX));
}

static void size_limit(void) {
    struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    T(setrlimit(RLIMIT_FSIZE, &limit));
    int fd;
    char text[2000] = "";
    D(fd, open("new", O_RDWR | O_CREAT, 0644));
    T(write(fd, text, 2000));
    T(write(fd, text, 1));
    T(ftruncate(fd, 1001));
    T(truncate("stored", 1001));
    T(fallocate(fd, 0, 0, 2000));
    look("new");
}

static void allocates(void) {
    int fd;
    D(fd, open("new", O_RDWR | O_CREAT, 0644));
    T(fallocate(fd, 0, 0, 10000));
    look("new");
    T(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 20000));
    look("new");
    T(pwrite(fd, "abcdefgh", 8, 0));
    T(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2, 3));
    show("new");
    T(fallocate(fd, FALLOC_FL_PUNCH_HOLE, 0, 1));
    T(fallocate(fd, 0, 0, 0));
    T(fallocate(fd, 0, -1, 10));
    T(fallocate(fd, 0x200, 0, 10));
    T(posix_fallocate(fd, 0, 30000));
    look("new");
    D(fd, open("stored", O_RDWR));
    T(fallocate(fd, 0, 5, 100));
    look("stored");
    T(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1, 2));
    show("stored");
    T(ftruncate(fd, 10));
}

static void allocate_zero_range(void) {
    int fd = open("stored", O_RDWR);
    T(fallocate(fd, FALLOC_FL_ZERO_RANGE, 2, 3));
    if (pwrite(fd, "\0\0\0", 3, 2) != 3)
        say("write");
    show("stored");
}

static void allocate_collapse_insert(void) {
    int fd = open("new", O_RDWR | O_CREAT, 0644);
    T(ftruncate(fd, 16384));
    T(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096));
    T(fallocate(fd, FALLOC_FL_INSERT_RANGE, 0, 4096));
}

static void copy_range(void) {
    int in, out;
    off_t from = 2, to = 1;
    D(in, open("stored", O_RDONLY));
    D(out, open("copy", O_RDWR | O_CREAT, 0644));
    T(copy_file_range(in, &from, out, &to, 5, 0));
    say("%ld %ld", (long)from, (long)to);
    show("copy");
    T(copy_file_range(in, NULL, out, NULL, 100, 0));
    T(copy_file_range(in, NULL, out, NULL, 100, 0));
    show("copy");
    T(copy_file_range(out, NULL, in, NULL, 1, 0));
    T(copy_file_range(in, NULL, out, NULL, 1, 1));
    int append = open("copy", O_WRONLY | O_APPEND), dir = open("sdir", O_RDONLY);
    T(copy_file_range(in, NULL, append, NULL, 1, 0));
    T(copy_file_range(dir, NULL, out, NULL, 1, 0));
    from = 0, to = 5;
    T(copy_file_range(out, &from, out, &to, 3, 0));
    from = 0, to = 1;
    T(copy_file_range(out, &from, out, &to, 3, 0));
    show("copy");
}

static void send_file(void) {
    int in, out, ends[2];
    off_t from = 3;
    D(in, open("stored", O_RDONLY));
    D(out, open("copy", O_RDWR | O_CREAT, 0644));
    T(sendfile(out, in, &from, 4));
    T(sendfile(out, in, NULL, 100));
    T(sendfile(out, in, NULL, 100));
    show("copy");
    T(sendfile(in, out, NULL, 1));
    if (pipe(ends) < 0)
        return;
    from = 0;
    T(splice(in, &from, ends[1], NULL, 6, 0));
    from = 20;
    T(splice(ends[0], NULL, out, &from, 6, 0));
    look("copy");
}

static void copy_large(void) {
    int in = open("big", O_RDWR | O_CREAT, 0644), out;
    char *block = malloc(1 << 20);
    for (int n = 0; n < 1 << 20; n++)
        block[n] = (char)(n * 31 >> 3);
    for (int n = 0; n < 3; n++)
        T(pwrite(in, block, 1 << 20, (off_t)n << 20));
    T(lseek(in, 0, SEEK_SET));
    D(out, open("copy", O_RDWR | O_CREAT, 0644));
    ssize_t length;
    while ((length = copy_file_range(in, NULL, out, NULL, 1 << 22, 0)) > 0)
        ;
    T(length);
    look("copy");
    char *again = malloc(1 << 20);
    T(pread(out, again, 1 << 20, 2 << 20));
    say("same %d", !memcmp(block, again, 1 << 20));
}

static int shared;
static void move_on(void) {
    char text[4] = "";
    T(read(shared, text, 3));
    say("%s", text);
}

static void shared_offset(void) {
    int copy, other;
    char text[4] = "";
    D(shared, open("stored", O_RDWR));
    D(copy, dup(shared));
    D(other, open("stored", O_RDWR));
    T(read(copy, text, 2));
    T(lseek(shared, 0, SEEK_CUR));
    T(lseek(other, 0, SEEK_CUR));
    aside(move_on);
    T(lseek(copy, 0, SEEK_CUR));
    T(close(shared));
    T(read(copy, text, 2));
    say("%s", text);
}

static void append_together(void) {
    int fd = open("log", O_WRONLY | O_CREAT | O_APPEND, 0644);
    for (int n = 0; n < 4; n++)
        if (fork() == 0) {
            int own = n % 2 ? open("log", O_WRONLY | O_APPEND) : fd;
            for (int m = 0; m < 50; m++)
                if (write(own, "0123456789\n", 11) != 11)
                    _exit(1);
            _exit(0);
        }
    int status, wrong = 0;
    while (wait(&status) > 0)
        wrong += status != 0;
    say("wrong %d", wrong);
    look("log");
    FILE *file = fopen("log", "r");
    char line[64];
    int good = 0;
    while (fgets(line, sizeof line, file))
        good += !strcmp(line, "0123456789\n");
    say("lines %d", good);
}

static void two_descriptors_see(void) {
    int writer, reader;
    char text[16] = "";
    D(writer, open("new", O_WRONLY | O_CREAT, 0644));
    D(reader, open("new", O_RDONLY));
    T(write(writer, "hello", 5));
    T(read(reader, text, 16));
    T(ftruncate(writer, 2));
    T(pread(reader, text, 16, 0));
    T(lseek(reader, 0, SEEK_END));
    D(reader, open("stored", O_RDONLY));
    D(writer, open("stored", O_WRONLY));
    T(write(writer, "hello", 5));
    T(pread(reader, text, 16, 0));
    say("%.10s", text);
    T(ftruncate(writer, 2));
    T(pread(reader, text, 16, 0));
}

static void syncs(void) {
    int fd, dir;
    D(fd, open("new", O_RDWR | O_CREAT, 0644));
    T(write(fd, "x", 1));
    T(fsync(fd));
    T(fdatasync(fd));
    T(syncfs(fd));
    T(sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE));
    D(fd, open("stored", O_RDONLY));
    T(fsync(fd));
    D(dir, open("sdir", O_RDONLY));
    T(fsync(dir));
    T(fdatasync(dir));
    T(fsync(999));
    int ends[2];
    if (pipe(ends) == 0)
        T(fsync(ends[0]));
}

static void hints(void) {
    int fd = open("stored", O_RDWR), count = -1;
    T(posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL));
    T(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
    T(posix_fadvise(fd, 0, 0, 99));
    T(readahead(fd, 0, 10));
    T(lseek(fd, 3, SEEK_SET));
    T(ioctl(fd, FIONREAD, &count));
    say("%d", count);
    T(ioctl(fd, TCGETS, NULL));
    T(isatty(fd));
}

static void streams(void) {
    FILE *file = fopen("stored", "r+");
    char text[64] = "";
    say("%s", fgets(text, 4, file));
    T(fseek(file, 5, SEEK_SET));
    T(fputs("XX", file) < 0);
    T(fflush(file));
    show("stored");
    T(fclose(file));
    file = fopen("stored", "a+");
    T(fputs("end", file) < 0);
    rewind(file);
    say("%s", fgets(text, 64, file));
    T(fclose(file));
    file = fopen("stored", "wx");
    T(file ? 0 : -1);
    file = tmpfile();
    T(file ? 0 : -1);
    char name[] = "tempXXXXXX";
    int fd;
    D(fd, mkstemp(name));
    T(unlink(name));
}

const struct one_case content[] = {
    {"read_at_the_end", read_at_the_end}, {"write_beyond", write_beyond}, {"vectors", vectors}, {"seeks", seeks}, {"holes", holes},
    {"truncates", truncates}, {"large_offsets", large_offsets}, {"size_limit", size_limit}, {"allocates", allocates},
    {"allocate_zero_range", allocate_zero_range}, {"allocate_collapse_insert", allocate_collapse_insert}, {"copy_range", copy_range},
    {"send_file", send_file}, {"copy_large", copy_large}, {"shared_offset", shared_offset}, {"append_together", append_together},
    {"two_descriptors_see", two_descriptors_see}, {"syncs", syncs}, {"hints", hints}, {"streams", streams}, {NULL, NULL}};
