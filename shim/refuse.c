/* An absent mount (srun, ssh, a container, an agent that has ended): is a path at or below it? Danger avoided: writing
 * into the bare directory under the mount, or trusting it. Speed does not matter here. Paths are normalised as text, so
 * a symbolic link that leads there from outside is not seen.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

/* Adds a path's components to a clean absolute path of `bytes` bytes (0: the root). Returns the new length, or -1. */
static long append(char *text, long bytes, const char *path)
{
    while (*path) {
        const char *end = path;
        while (*end && *end != '/')
            end++;
        long part = end - path;
        if (part == 2 && path[0] == '.' && path[1] == '.') {
            while (bytes > 0 && text[--bytes] != '/') {
            }
        } else if (part && !(part == 1 && *path == '.')) {
            if (bytes + part + 1 >= PATH_MAX)
                return -1;
            text[bytes++] = '/';
            memcpy(text + bytes, path, (size_t)part);
            bytes += part;
        }
        path = *end ? end + 1 : end;
    }
    text[bytes] = 0;
    return bytes;
}

/* The start of a relative path; false: not known. */
static bool place_of(int dirfd, char text[PATH_MAX])
{
    char link[32];
    long bytes;
    if (dirfd == AT_FDCWD) {
        bytes = st_sys(__NR_getcwd, text, PATH_MAX);
    } else {
        bytes = dirfd < 0 ? -1 : st_sys(__NR_readlinkat, AT_FDCWD, st_proc_path(dirfd, link), text, PATH_MAX - 1);
        if (!st_sys_failed(bytes))
            text[bytes] = 0;
    }
    return !st_sys_failed(bytes) && *text == '/';
}

static bool is_dead(const char *clean, long bytes)
{
    for (uint32_t number = 0; number < st_process.domain_count; number++) {
        const struct st_domain *domain = &st_process.domains[number];
        if (domain->dead && bytes >= (long)domain->mount_bytes && !memcmp(clean, domain->mount, domain->mount_bytes) &&
            (clean[domain->mount_bytes] == '/' || !clean[domain->mount_bytes]))
            return true;
    }
    return false;
}

bool st_refused_slow(int dirfd, const char *path)
{
    char text[PATH_MAX];
    long bytes = 0;
    if (!st_is_text(path) || !*path)
        return false;
    if (*path != '/') {
        if (!place_of(dirfd, text))
            return false;
        bytes = (long)strlen(text);
        if (bytes == 1)
            bytes = 0;
    }
    bytes = append(text, bytes, path);
    if (bytes < 0 || !is_dead(text, bytes))
        return false;
    errno = ENOTCONN;
    return true;
}
