/* A descriptor of the tier's directory from which files were opened last: the next ones are opened from there, by their name
 * alone. (For who reads many small files, walking the tier's whole path for each cost more than our look-ups.) There is one,
 * it names a directory and can do nothing else (O_PATH), is closed on exec, stands where programs have no numbers, and is
 * given up with the index (chroot, setuid, sandboxes).
 *
 * Dangers avoided: another directory under its number (whatever closes or replaces it makes it nobody's, and a reader looks
 * again afterwards whether it still is the one that he opened from); the directory of another path (it counts as long as its
 * record has not been written since); closing a number that is somebody else's by now (whoever makes it nobody's closes it,
 * unless that is the program).
 */
#define _GNU_SOURCE
#include "shim.h"

#include <fcntl.h>
#include <string.h>

#define NUMBERS_FROM 192
#define SLOTS 8u
#define IN_A_ROW_MIN 3u
#define IN_A_ROW_MAX 1024u
#define SERVES 8u   /* an anchor that was good for less was not worth it */
#define LOST_MAX 16 /* so often the program closed it */

#define RELAXED(from) __atomic_load_n(&(from), __ATOMIC_RELAXED)
#define PUT(to, what) __atomic_store_n(&(to), (what), __ATOMIC_RELAXED)

uint64_t st_anchor_word;
/* Of which directory, and as it was written last. Of the turn in the word, modulo. */
static struct {
    uint64_t id;
    uint32_t domain, device, record, seq;
} slots[SLOTS];
static uint64_t candidate; /* the directory from which a file was opened last */
static uint32_t in_a_row, wanted = IN_A_ROW_MIN, served;
static int lost;
static bool over;

static uint32_t number_of(const struct st_domain *domain)
{
    return (uint32_t)(domain - st_process.domains);
}

/* Makes it nobody's. Whoever does so answers for the descriptor. */
static bool take(uint64_t *word)
{
    uint64_t none = ((*word >> ST_ANCHOR_BITS) + 1) << ST_ANCHOR_BITS;
    if (!__atomic_compare_exchange_n(&st_anchor_word, word, none, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return false;
    *word = none;
    return true;
}

bool st_anchor_of(const struct st_place *place, struct st_anchor *out)
{
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    unsigned slot = (unsigned)(word >> ST_ANCHOR_BITS) % SLOTS;
    if (!(word & ST_ANCHOR_NUMBER) || RELAXED(slots[slot].id) != place->dir_id || RELAXED(slots[slot].seq) != place->dir_seq ||
        RELAXED(slots[slot].record) != place->dir || RELAXED(slots[slot].device) != place->record.device ||
        RELAXED(slots[slot].domain) != number_of(place->from.domain) || !st_owns_memory())
        return false;
    PUT(served, RELAXED(served) + 1);
    *out = (struct st_anchor){word, (int)(word & ST_ANCHOR_NUMBER)};
    return true;
}

bool st_anchor_still(const struct st_anchor *anchor)
{
    return __atomic_load_n(&st_anchor_word, __ATOMIC_SEQ_CST) == anchor->word;
}

/* Shall there be one of that file's directory? */
static bool is_wanted(const struct st_place *place)
{
    if (RELAXED(over) || !st_on(ST_ON_INDEX))
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

static int open_directory(const char *path)
{
    long opened = st_sys(__NR_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0, ST_OWN_CALL);
    if (st_sys_failed(opened))
        return -1;
    long number = st_sys(__NR_fcntl, opened, F_DUPFD_CLOEXEC, NUMBERS_FROM);
    st_sys_close((int)opened);
    if (!st_sys_failed(number) && number < ST_DESCRIPTORS)
        return (int)number;
    if (!st_sys_failed(number))
        st_sys_close((int)number);
    PUT(over, true); /* the program may have no such numbers, or has them all */
    return -1;
}

void st_anchor_opened(const struct st_place *place, char *path)
{
    if (!is_wanted(place))
        return;
    char *end = strrchr(path, '/');
    if (!end || end == path)
        return;
    *end = 0;
    int number = open_directory(path);
    if (number < 0)
        return;
    /* Nothing on the way was written: what had that path is the directory. */
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    int old = (int)(word & ST_ANCHOR_NUMBER);
    if (!st_still(place) || !st_chain_still(place) || !take(&word)) {
        st_sys_close(number);
        return;
    }
    if (old) {
        uint32_t more = RELAXED(wanted) * 2;
        PUT(wanted, RELAXED(served) >= SERVES ? IN_A_ROW_MIN : more < IN_A_ROW_MAX ? more : IN_A_ROW_MAX);
    }
    PUT(served, 0);
    unsigned slot = (unsigned)(word >> ST_ANCHOR_BITS) % SLOTS;
    PUT(slots[slot].id, place->dir_id);
    PUT(slots[slot].domain, number_of(place->from.domain));
    PUT(slots[slot].device, place->record.device);
    PUT(slots[slot].record, place->dir);
    PUT(slots[slot].seq, place->dir_seq);
    if (!__atomic_compare_exchange_n(&st_anchor_word, &word, word | (unsigned)number, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        st_sys_close(number);
    if (old)
        st_sys_close(old);
}

void st_anchor_lost(int descriptor)
{
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    /* (A vfork child has a descriptor of its own.) */
    if (!descriptor || (word & ST_ANCHOR_NUMBER) != (unsigned)descriptor || st_is_vforked() || !take(&word))
        return;
    if (__atomic_add_fetch(&lost, 1, __ATOMIC_RELAXED) >= LOST_MAX)
        PUT(over, true);
}

void st_anchor_end(void)
{
    PUT(over, true);
    uint64_t word = __atomic_load_n(&st_anchor_word, __ATOMIC_ACQUIRE);
    int number = (int)(word & ST_ANCHOR_NUMBER);
    if (number && st_owns_memory() && take(&word))
        st_sys_close(number);
}
