/* An index that is overwritten with random values while it is read: the shim must not crash, hang, or open a file
 * outside the two trees.
 */
#define _GNU_SOURCE
#include "check.h"

#include "../abi.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t state = UINT64_C(88172645463325252);

static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static uint64_t interesting(void)
{
    static const uint64_t values[] = {0, 1, 2, 3, 7, 8, 4095, 4096, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX, UINT64_MAX - 7,
                                      (uint64_t)1 << 63, 4u << 20, (4u << 20) - 8, (4u << 20) + 8};
    uint64_t choice = next_random();
    return choice % 3 ? values[choice / 3 % (sizeof values / sizeof *values)] : next_random();
}

static void poke(const char *mount)
{
    struct stat out;
    int opened = open(below(mount, "top"), O_RDONLY), other;
    stat(below(mount, "a/b/c/deep"), &out);
    stat("a/file", &out);
    stat("nothing/at/all", &out);
    other = open("a/b/c/deep", O_RDONLY);
    if (opened >= 0)
        fstat(opened, &out);
    close(other);
    close(opened);
}

void check_fuzz(const char *index, const char *mount, int rounds)
{
    struct stat file;
    int opened = open(index, O_RDWR);
    CHECK(opened >= 0 && fstat(opened, &file) == 0 && chdir(mount) == 0);
    uint8_t *bytes = mmap(NULL, (size_t)file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    uint8_t *before = malloc((size_t)file.st_size);
    const struct st_header *header = (const struct st_header *)bytes;
    memcpy(before, bytes, (size_t)file.st_size);
    struct st_header good = *header;
    close(opened);
    for (int round = 0; round < rounds; round++) {
        /* Half of the changes are in the header, half in the entries in use; the header's clock and counter stay valid. */
        for (int change = 0; change < 1 + round % 4; change++) {
            uint64_t value = interesting(), choice = next_random();
            size_t at = 24 + next_random() % (sizeof *header - 32);
            if (choice % 4 == 1)
                at = good.records.offset + next_random() % (20 * sizeof(struct st_record));
            else if (choice % 4 == 2)
                at = good.labels.offset + next_random() % (10 * sizeof(struct st_label));
            else if (choice % 4 == 3)
                at = good.names.offset + next_random() % (good.names.capacity * sizeof(struct st_name) - 8);
            memcpy(bytes + at, &value, 1 + choice / 16 % 8);
        }
        memcpy(bytes + 24, &good.alive_until_ns, 8);
        if (round % 3)
            memcpy(bytes + 32, &good.generation, 8);
        poke(mount);
        if (round % 8 == 7)
            memcpy(bytes, before, (size_t)file.st_size);
    }
    memcpy(bytes, before, (size_t)file.st_size);
    /* Not a relative path: the shim may have cached that the directory was outside for a moment. */
    CHECK(!strcmp(who(open(below(mount, "top"), O_RDONLY)), "plain"));
    printf("%d rounds\n", rounds);
}
