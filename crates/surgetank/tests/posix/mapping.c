/* Memory-mapped files. */
#include "posix.h"
#include <setjmp.h>

static void map_shared(void) {
    int fd, other;
    char text[16] = "";
    D(fd, open("stored", O_RDWR));
    D(other, open("stored", O_RDWR));
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    T(map == MAP_FAILED ? -1 : 0);
    say("%.10s", map);
    memcpy(map, "MAP", 3);
    T(pread(other, text, 10, 0));
    say("%s", text);
    T(pwrite(other, "write", 5, 5));
    say("%.10s", map);
    T(close(fd));
    map[3] = '!';
    T(munmap(map, 4096));
    show("stored");
    look("stored");
}

static void map_private(void) {
    int fd;
    D(fd, open("stored", O_RDONLY));
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    T(map == MAP_FAILED ? -1 : 0);
    memcpy(map, "own", 3);
    say("%.10s", map);
    show("stored");
}

static void map_errors(void) {
    int fd, dir;
    D(fd, open("stored", O_RDONLY));
    T(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
    T(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 1) == MAP_FAILED ? -1 : 0);
    T(mmap(NULL, 0, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
    D(fd, open("stored", O_WRONLY));
    T(mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
    D(dir, open("sdir", O_RDONLY));
    T(mmap(NULL, 4096, PROT_READ, MAP_SHARED, dir, 0) == MAP_FAILED ? -1 : 0);
}

static sigjmp_buf back;
static void fault(int number) { siglongjmp(back, number); }

static void touch_at(const char *map, long at) {
    signal(SIGBUS, fault);
    if (sigsetjmp(back, 1))
        say("at %ld: BUS", at);
    else
        say("at %ld: %d", at, ((const volatile char *)map)[at]);
}

static void map_and_cut(void) {
    int fd = open("new", O_RDWR | O_CREAT, 0644);
    char block[8192];
    memset(block, 'x', sizeof block);
    T(pwrite(fd, block, sizeof block, 0));
    char *map = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    touch_at(map, 8191);
    touch_at(map, 8192);
    T(ftruncate(fd, 100));
    touch_at(map, 99);
    touch_at(map, 100);
    touch_at(map, 4096);
    T(ftruncate(fd, 12288));
    touch_at(map, 100);
    touch_at(map, 4096);
    touch_at(map, 12287);
    touch_at(map, 12288);
    map[12287] = 'y';
    T(pread(fd, block, 1, 12287));
    say("%c", block[0]);
}

static void map_after_unlink(void) {
    int fd = open("stored", O_RDWR);
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    T(close(fd));
    T(unlink("stored"));
    map[0] = 'M';
    say("%.10s", map);
    T(munmap(map, 4096));
    T(access("stored", F_OK));
}

static char *common;
static void write_common(void) { strcpy(common + 100, "from the child"); }

static void map_between_processes(void) {
    int fd = open("new", O_RDWR | O_CREAT, 0644);
    T(ftruncate(fd, 4096));
    common = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    aside(write_common);
    say("%s", common + 100);
    T(msync(common, 4096, MS_SYNC));
    T(msync(common, 4096, MS_ASYNC));
    T(msync(common + 1, 10, MS_SYNC));
    char text[32] = "";
    T(pread(fd, text, 14, 100));
    say("%s", text);
    T(mprotect(common, 4096, PROT_READ));
    T(madvise(common, 4096, MADV_DONTNEED));
    say("%s", common + 100);
}

static void map_grows(void) {
    int fd = open("new", O_RDWR | O_CREAT, 0644);
    T(ftruncate(fd, 4096));
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    T(ftruncate(fd, 65536));
    map = mremap(map, 4096, 65536, MREMAP_MAYMOVE);
    T(map == MAP_FAILED ? -1 : 0);
    memset(map, 'g', 65536);
    T(munmap(map, 65536));
    char byte = 0;
    T(pread(fd, &byte, 1, 65535));
    say("%c", byte);
}

static void map_tail_is_not_kept(void) {
    int fd = open("stored", O_RDWR);
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(map + 10, 'T', 100);
    T(msync(map, 4096, MS_SYNC));
    T(munmap(map, 4096));
    T(ftruncate(fd, 20));
    show("stored");
}

const struct one_case mapping[] = {
    {"map_shared", map_shared}, {"map_private", map_private}, {"map_errors", map_errors}, {"map_and_cut", map_and_cut},
    {"map_after_unlink", map_after_unlink}, {"map_between_processes", map_between_processes}, {"map_grows", map_grows},
    {"map_tail_is_not_kept", map_tail_is_not_kept}, {NULL, NULL}};
