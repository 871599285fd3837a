/* The anchor: a descriptor of the tier's directory from which files were opened last. The next files are opened from
 * there, by name alone. (When a program reads many small files, walking the tier's whole path for each costs more than
 * the shim's look-ups.) There is one anchor. It names a directory and has no other use (O_PATH), is closed on exec, and
 * has a number that programs do not use. It is released with the index (chroot, setuid, sandboxes).
 *
 * Dangers avoided:
 * - The directory of another path: one of its files must be in it, under its name, when it is found. It is valid until
 *   its record is written, the index is rebuilt, or any directory moves on the tiers.
 * - Another directory under its number: each call that closes or replaces the number releases the anchor. A reader
 *   checks after its open that the anchor is still the one that it used.
 * - Closing a number that belongs to another file by now: the thread that releases the anchor closes the number, unless
 *   the program did, and checks that it still is the anchor.
 *
 * A fork at the moment of the anchor's creation leaves the child an unknown descriptor.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <fcntl.h>
#include <string.h>

#define NUMBERS_FROM 192
#define IN_A_ROW_MIN 3u
#define IN_A_ROW_MAX 1024u
#define SERVES 8u   /* an anchor that served fewer opens was not worth it */
#define LOST_MAX 16 /* limit of closes by the program */

#define RELAXED(from) __atomic_load_n(&(from), __ATOMIC_RELAXED)
#define PUT(to, what) __atomic_store_n(&(to), (what), __ATOMIC_RELAXED)

uint64_t st_anchor_word;
/* For the word's turn: the directory, the validity conditions when it was found, and the descriptor's identity. */
static struct {
    uint64_t id, generation, dev, ino;
    uint32_t domain, device, record, seq, moves;
} at;
static uint32_t writing;   /* a thread writes that */
static uint64_t candidate; /* the directory from which a file was opened last */
static uint32_t in_a_row, wanted = IN_A_ROW_MIN, served;
static int lost;
static bool stopped;

static uint32_t number_of(const struct st_domain *domain)
{
    return (uint32_t)(domain - st_process.domains);
}

static uint32_t moves_of(const struct st_domain *domain)
{
    return __atomic_load_n(&domain->index->moves, __ATOMIC_ACQUIRE);
}

/* Releases the anchor. The thread that does so must handle the descriptor. */
static bool take(uint64_t *word)
{
    uint64_t none = ((*word >> ST_ANCHOR_BITS) + 1) << ST_ANCHOR_BITS;
    if (!__atomic_compare_exchange_n(&st_anchor_word, word, none, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return false;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    *word = none;
    return true;
}

static bool is(int number, uint64_t dev, uint64_t ino)
{
    struct stat now;
    return !st_sys_failed(st_sys_fstat(number, &now)) && now.st_dev == dev && now.st_ino == ino;
}

/* The name as it was looked up: another thread may change the path. */
static bool copy_name(const struct st_place *place, char *to)
{
    for (uint32_t byte = 0; byte < place->name_bytes; byte++) {
        to[byte] = ((const volatile char *)place->name)[byte];
        if (!to[byte] || to[byte] == '/')
            return false;
    }
    to[place->name_bytes] = 0;
    return true;
}

bool st_anchor_of(const struct st_place *place, struct st_anchor *out)
{
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    if (!(word & ST_ANCHOR_NUMBER) || RELAXED(at.id) != place->dir_id || RELAXED(at.seq) != place->dir_seq ||
        RELAXED(at.record) != place->dir || RELAXED(at.device) != place->record.device ||
        RELAXED(at.domain) != number_of(place->from.domain) || RELAXED(at.generation) != place->generation ||
        RELAXED(at.moves) != moves_of(place->from.domain) || !st_owns_memory() || !copy_name(place, out->name))
        return false;
    PUT(served, RELAXED(served) + 1);
    out->word = word;
    out->moves = RELAXED(at.moves);
    out->number = (int)(word & ST_ANCHOR_NUMBER);
    return true;
}

bool st_anchor_still(const struct st_place *place, const struct st_anchor *anchor)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return RELAXED(st_anchor_word) == anchor->word && moves_of(place->from.domain) == anchor->moves;
}

/* Is an anchor wanted for that file's directory? */
static bool is_wanted(const struct st_place *place)
{
    if (RELAXED(stopped) || !st_on(ST_ON_INDEX) || (place->record.flags & ST_LINKED))
        return false;
    if (RELAXED(candidate) != place->dir_id) {
        PUT(candidate, place->dir_id);
        PUT(in_a_row, 1);
        return false;
    }
    uint32_t opened = RELAXED(in_a_row) + 1;
    PUT(in_a_row, opened);
    if (opened < RELAXED(wanted) || !st_owns_memory())
        return false;
    PUT(in_a_row, 0);
    return true;
}

/* The next anchor needs more opens in a row. */
static void was_in_vain(void)
{
    uint32_t more = RELAXED(wanted) * 2;
    PUT(wanted, more < IN_A_ROW_MAX ? more : IN_A_ROW_MAX);
}

static void close_if(int number, const struct stat *directory)
{
    if (is(number, directory->st_dev, directory->st_ino))
        st_sys_close(number);
}

/* Its stat is taken at once, while no other thread can know the descriptor. */
static int open_directory(const char *path, struct stat *directory)
{
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0, ST_OWN_CALL);
    if (st_sys_failed(opened) || st_sys_failed(st_sys_fstat((int)opened, directory)))
        return -1;
    long number = st_sys(__NR_fcntl, opened, F_DUPFD_CLOEXEC, NUMBERS_FROM);
    close_if((int)opened, directory);
    if (!st_sys_failed(number) && number < ST_DESCRIPTORS)
        return (int)number;
    if (!st_sys_failed(number))
        close_if((int)number, directory);
    PUT(stopped, true); /* the program may have no such numbers, or uses all of them */
    return -1;
}

static void publish(const struct st_place *place, const struct stat *directory, uint32_t moves, int number)
{
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE), dev = RELAXED(at.dev), ino = RELAXED(at.ino);
    int old = (int)(word & ST_ANCHOR_NUMBER);
    if (!take(&word)) {
        close_if(number, directory);
        return;
    }
    if (old && RELAXED(served) < SERVES)
        was_in_vain();
    else
        PUT(wanted, IN_A_ROW_MIN);
    PUT(served, 0);
    PUT(at.id, place->dir_id);
    PUT(at.generation, place->generation);
    PUT(at.dev, directory->st_dev);
    PUT(at.ino, directory->st_ino);
    PUT(at.domain, number_of(place->from.domain));
    PUT(at.device, place->record.device);
    PUT(at.record, place->dir);
    PUT(at.seq, place->dir_seq);
    PUT(at.moves, moves);
    if (!__atomic_compare_exchange_n(&st_anchor_word, &word, word | (unsigned)number, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        close_if(number, directory);
    if (old && is(old, dev, ino))
        st_sys_close(old);
    /* Until now no wrapper knew the number: another thread may have closed or replaced it unseen. */
    uint64_t now = __atomic_load_n(&st_anchor_word, __ATOMIC_SEQ_CST);
    if ((now & ST_ANCHOR_NUMBER) == (unsigned)number && !is(number, directory->st_dev, directory->st_ino))
        take(&now);
    /* A sandbox may have begun meanwhile. */
    if (__atomic_load_n(&stopped, __ATOMIC_SEQ_CST))
        st_anchor_end();
}

void st_anchor_opened(const struct st_place *place, char *path)
{
    char *end = is_wanted(place) ? strrchr(path, '/') : NULL;
    if (!end || end == path || __atomic_exchange_n(&writing, 1, __ATOMIC_ACQUIRE))
        return;
    *end = 0;
    uint32_t moves = moves_of(place->from.domain);
    const char *root;
    struct st_device device;
    struct stat directory, file;
    char name[ST_NAME_BYTES_MAX + 1];
    int number = open_directory(path, &directory);
    /* Nothing on the way was written, and the file is there. (A change in the index may not be done on the tier yet.) */
    bool sure = number >= 0 && copy_name(place, name) &&
                st_index_device(place->from.domain, place->record.device, &device, &root) &&
                !st_sys_failed(st_sys(__NR_newfstatat, number, name, &file, AT_SYMLINK_NOFOLLOW, 0, ST_OWN_CALL)) &&
                file.st_ino == place->record.backing_ino && file.st_dev == device.dev && st_still(place) &&
                st_chain_still(place) && moves_of(place->from.domain) == moves;
    if (sure) {
        publish(place, &directory, moves, number);
    } else {
        was_in_vain();
        if (number >= 0)
            close_if(number, &directory);
    }
    __atomic_store_n(&writing, 0, __ATOMIC_RELEASE);
}

void st_anchor_lost(int descriptor)
{
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    /* (A vfork child has its own descriptors.) */
    if (!descriptor || (word & ST_ANCHOR_NUMBER) != (unsigned)descriptor || st_is_vforked() || !take(&word))
        return;
    if (__atomic_add_fetch(&lost, 1, __ATOMIC_RELAXED) >= LOST_MAX)
        PUT(stopped, true);
}

/* Also in the child of an unseen fork: it has its own descriptor. */
void st_anchor_end(void)
{
    if (st_is_vforked())
        return;
    __atomic_store_n(&stopped, true, __ATOMIC_SEQ_CST);
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_SEQ_CST), dev = RELAXED(at.dev), ino = RELAXED(at.ino);
    int number = (int)(word & ST_ANCHOR_NUMBER);
    if (number && take(&word) && is(number, dev, ino))
        st_sys_close(number);
}

/* A fork copies descriptors before memory: here the number may be another file's. */
void st_anchor_forked(void)
{
    uint64_t word = RELAXED(st_anchor_word);
    int number = (int)(word & ST_ANCHOR_NUMBER);
    PUT(writing, 0);
    if (number && !is(number, RELAXED(at.dev), RELAXED(at.ino)))
        take(&word);
}
