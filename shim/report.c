/* Prints one line at the end of a program on request (SURGETANK_REPORT=1). Danger avoided: stdio, which may not work
 * any more by then.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <string.h>

uint64_t st_counts[ST_COUNTS];

static char *put(char *to, const char *text)
{
    size_t bytes = strlen(text);
    memcpy(to, text, bytes + 1);
    return to + bytes;
}

static char *put_count(char *to, enum st_count which, const char *text)
{
    return put(st_write_number(to, __atomic_load_n(&st_counts[which], __ATOMIC_RELAXED)), text);
}

__attribute__((destructor)) static void report(void)
{
    char line[768], name[64];
    struct st_io total;
    uint64_t reads = 0, writes = 0;
    if (!st_process.report)
        return;
    st_streams_end(true);
    st_counts_total(&total);
    for (unsigned size = 0; size < ST_SIZES; size++) {
        reads += total.read_sizes[size];
        writes += total.write_sizes[size];
    }
    strncpy(name, program_invocation_short_name, sizeof name - 1);
    name[sizeof name - 1] = 0;
    char *at = put(put(put(line, "surgetank: "), name), "[");
    at = put(st_write_number(at, (unsigned long)st_sys_getpid()), "]: ");
    at = put_count(at, ST_OPEN_INDEX, " opens from the index, ");
    at = put_count(at, ST_OPEN_AGENT, " from the agent, ");
    at = put_count(at, ST_OPEN_LEFT, " left to the mount; ");
    at = put_count(at, ST_STAT_INDEX, " stats from the index, ");
    at = put_count(at, ST_STAT_LEFT, " left");
    if (st_counting) {
        at = put(st_write_number(put(at, "; "), total.read_bytes), " bytes read in ");
        at = put(st_write_number(at, reads), " calls, ");
        at = put(st_write_number(at, total.write_bytes), " written in ");
        at = put(st_write_number(at, writes), "");
    }
    at = put_count(put(at, "; "), ST_OPEN_DELEGATED, " created in delegated directories\n");
    st_sys(__NR_write, 2, line, at - line);
}
