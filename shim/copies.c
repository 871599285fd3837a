/* copy_file_range between a plain file and a file of the mount: two file systems to the kernel (EXDEV), one to the
 * program, which may know no other way. Danger avoided: a copy that fails only because of how a file was opened.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <sys/types.h>

#define PIECE 16384
/* The program calls again for the rest, as it must in any case. */
#define AT_ONCE (1 << 20)

/* Bytes copied, or the kernel's error if there are none. */
static long copy(int in, off_t from, int out, off_t to, size_t bytes)
{
    char piece[PIECE];
    size_t done = 0;
    while (done < bytes) {
        size_t wanted = bytes - done < sizeof piece ? bytes - done : sizeof piece;
        long got = st_sys(__NR_pread64, in, piece, wanted, from + (off_t)done);
        if (got == 0)
            break;
        for (long put = 0; got > 0 && put < got;) {
            long written = st_sys(__NR_pwrite64, out, piece + put, (size_t)(got - put), to + (off_t)done);
            if (st_sys_failed(written))
                return done ? (long)done : written;
            put += written;
            done += (size_t)written;
        }
        if (st_sys_failed(got))
            return done ? (long)done : got;
    }
    return (long)done;
}

static bool between_doors(int in, int out)
{
    struct st_diverted diverted;
    return st_on(ST_ON_INDEX | ST_ON_PATHS) && (st_diverted(in, &diverted) || st_diverted(out, &diverted));
}

static ssize_t copy_file_range_uncounted(int in, off_t *from, int out, off_t *to, size_t bytes, unsigned flags)
{
    ssize_t (*next)(int, off_t *, int, off_t *, size_t, unsigned) = ST_NEXT(copy_file_range);
    int before = errno;
    long copied;
    if (next) {
        ssize_t result = next(in, from, out, to, bytes, flags);
        if (result >= 0 || errno != EXDEV)
            return result;
        copied = -EXDEV;
    } else {
        copied = st_sys(__NR_copy_file_range, in, from, out, to, bytes, flags);
    }
    if (copied == -EXDEV && between_doors(in, out)) {
        off_t start = from ? *from : st_sys(__NR_lseek, in, 0, SEEK_CUR);
        off_t end = to ? *to : st_sys(__NR_lseek, out, 0, SEEK_CUR);
        copied = copy(in, start, out, end, bytes < AT_ONCE ? bytes : AT_ONCE);
        if (copied > 0) {
            if (from)
                *from += copied;
            else
                st_sys(__NR_lseek, in, start + copied, SEEK_SET);
            if (to)
                *to += copied;
            else
                st_sys(__NR_lseek, out, end + copied, SEEK_SET);
        }
    }
    if (st_sys_failed(copied)) {
        errno = (int)-copied;
        return -1;
    }
    errno = before;
    return copied;
}

ST_WRAP(ssize_t, copy_file_range, int in, off_t *from, int out, off_t *to, size_t bytes, unsigned flags)
{
    uint64_t begun = st_copy_begun(in, out);
    ssize_t copied = copy_file_range_uncounted(in, from, out, to, bytes, flags);
    if (begun)
        st_counted_copy(in, from, out, to, begun, copied);
    return copied;
}
