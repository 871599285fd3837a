/* Names of descriptors: readlink of /proc/self/fd/N, linkat and execveat of a descriptor. Danger avoided: a program
 * that learns a tier's path, which is not valid later; a link or a program that is created without the agent's
 * knowledge.
 */
#define _GNU_SOURCE
#include "foreign.h"
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>

static int failed(int error)
{
    errno = error;
    return -1;
}

/* Only the kernel's own links to descriptors; a user's symbolic link is shown unchanged. */
static bool may_be_descriptor(int dirfd, const char *path)
{
    if ((uintptr_t)path < ST_MEMORY_MIN)
        return false;
    return *path == '/' ? !strncmp(path, "/proc/", 6) || !strncmp(path, "/dev/fd/", 8) : dirfd != AT_FDCWD && *path;
}

/* The link's text with the tier's root replaced by the mount; 0: leave it. */
static ssize_t read_instead(int dirfd, const char *path, char *out, size_t bytes)
{
    char text[ST_TEXT];
    struct st_diverted diverted;
    struct st_device device;
    const char *root;
    long got = st_sys(__NR_readlinkat, dirfd, path, text, ST_TEXT);
    if (st_sys_failed(got) || got >= (long)ST_TEXT || *text != '/' ||
        st_sys_failed(st_sys(__NR_newfstatat, dirfd, path, &diverted.stat, 0)) ||
        !st_diverted_as(-1, &diverted.stat, &diverted) ||
        !st_index_device(diverted.domain, diverted.device, &device, &root) || (size_t)got <= device.root_bytes ||
        memcmp(text, root, device.root_bytes) != 0 || text[device.root_bytes] != '/')
        return 0;
    size_t head = diverted.domain->mount_bytes, tail = (size_t)got - device.root_bytes;
    size_t first = head < bytes ? head : bytes, second = tail < bytes - first ? tail : bytes - first;
    memcpy(out, diverted.domain->mount, first);
    memcpy(out + first, text + device.root_bytes, second);
    return (ssize_t)(first + second);
}

static ssize_t improved(ssize_t result, int dirfd, const char *path, char *out, size_t bytes)
{
    if (result <= 0 || !st_on(ST_ON_PATHS) || *out != '/' || !may_be_descriptor(dirfd, path))
        return result;
    ssize_t instead = read_instead(dirfd, path, out, bytes);
    return instead ? instead : result;
}

ST_WRAP(ssize_t, readlink, const char *path, char *out, size_t bytes)
{
    if (st_refused(AT_FDCWD, path))
        return -1;
    ssize_t (*next)(const char *, char *, size_t) = ST_NEXT(readlink);
    return next ? improved(next(path, out, bytes), AT_FDCWD, path, out, bytes) : failed(ENOSYS);
}

ST_WRAP(ssize_t, readlinkat, int dirfd, const char *path, char *out, size_t bytes)
{
    if (st_refused(dirfd, path))
        return -1;
    ssize_t (*next)(int, const char *, char *, size_t) = ST_NEXT(readlinkat);
    return next ? improved(next(dirfd, path, out, bytes), dirfd, path, out, bytes) : failed(ENOSYS);
}

ST_WRAP(ssize_t, __readlink_chk, const char *path, char *out, size_t bytes, size_t room)
{
    if (st_refused(AT_FDCWD, path))
        return -1;
    ssize_t (*next)(const char *, char *, size_t, size_t) = ST_NEXT(__readlink_chk);
    return next ? improved(next(path, out, bytes, room), AT_FDCWD, path, out, bytes) : failed(ENOSYS);
}

ST_WRAP(ssize_t, __readlinkat_chk, int dirfd, const char *path, char *out, size_t bytes, size_t room)
{
    if (st_refused(dirfd, path))
        return -1;
    ssize_t (*next)(int, const char *, char *, size_t, size_t) = ST_NEXT(__readlinkat_chk);
    return next ? improved(next(dirfd, path, out, bytes, room), dirfd, path, out, bytes) : failed(ENOSYS);
}

/* "" with AT_EMPTY_PATH: the path of a diverted descriptor, or NULL. */
static const char *path_of(int descriptor, const char *path, int flags, char text[ST_TEXT])
{
    struct st_diverted diverted;
    if (!(flags & AT_EMPTY_PATH) || (uintptr_t)path < ST_MEMORY_MIN || *path || !st_on(ST_ON_PATHS) ||
        !st_diverted(descriptor, &diverted))
        return NULL;
    return st_diverted_path(&diverted, descriptor, text);
}

ST_WRAP(int, linkat, int dirfd, const char *path, int to_dirfd, const char *to, int flags)
{
    char text[ST_TEXT];
    path = st_path(path);
    if (st_refused(dirfd, path) || st_refused(to_dirfd, to))
        return -1;
    const char *instead = path_of(dirfd, path, flags, text);
    if (!instead && (flags & AT_SYMLINK_FOLLOW) && (instead = st_through(path, text)) == path)
        instead = NULL;
    int (*next)(int, const char *, int, const char *, int) = ST_NEXT(linkat);
    if (!next)
        return failed(ENOSYS);
    if (instead)
        return next(AT_FDCWD, instead, to_dirfd, to, flags & ~(AT_EMPTY_PATH | AT_SYMLINK_FOLLOW));
    return next(dirfd, path, to_dirfd, to, flags);
}

/* Whether the descriptor's program, or the script's interpreter, cannot take the shim. */
static bool is_foreign_descriptor(int descriptor)
{
    char script[ST_FOREIGN_TEXT];
    return descriptor >= 0 && (st_is_foreign_file(descriptor, script) || (*script && st_is_foreign(script, NULL)));
}

/* For a descriptor ("" with AT_EMPTY_PATH) or a path relative to one. */
static bool is_foreign_at(int dirfd, const char *path, int flags)
{
    if (!st_is_text(path))
        return false;
    if (!*path)
        return (flags & AT_EMPTY_PATH) && is_foreign_descriptor(dirfd);
    if (*path == '/' || dirfd == AT_FDCWD)
        return st_is_foreign(path, NULL);
    long opened = st_sys(__NR_openat, dirfd, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
    bool foreign = !st_sys_failed(opened) && is_foreign_descriptor((int)opened);
    if (!st_sys_failed(opened))
        st_sys_close((int)opened);
    return foreign;
}

static int exec_at(int dirfd, const char *path, char *const *arguments, char *const *environment, int flags)
{
    char text[ST_TEXT];
    const char *instead = path_of(dirfd, path, flags, text);
    if (!instead && !(flags & AT_SYMLINK_NOFOLLOW) && (instead = st_through(path, text)) == path)
        instead = NULL;
    int (*path_next)(const char *, char *const *, char *const *) = ST_NEXT(execve);
    if (instead && path_next)
        return path_next(instead, arguments, environment);
    int (*next)(int, const char *, char *const *, char *const *, int) = ST_NEXT(execveat);
    return next ? next(dirfd, path, arguments, environment, flags)
                : failed((int)-st_sys(__NR_execveat, dirfd, path, arguments, environment, flags));
}

__attribute__((noinline)) static int exec_at_without(int dirfd, const char *path, char *const *arguments, char *const *environment,
                                                     int flags)
{
    size_t list_bytes, count = st_environment_count(environment, &list_bytes);
    char *copy[count + 1], list[list_bytes];
    st_environment_without(environment, copy, list);
    return exec_at(dirfd, path, arguments, copy, flags);
}

__attribute__((noinline)) static int exec_descriptor_without(int (*next)(int, char *const *, char *const *), int descriptor,
                                                             char *const *arguments, char *const *environment)
{
    size_t list_bytes, count = st_environment_count(environment, &list_bytes);
    char *copy[count + 1], list[list_bytes];
    st_environment_without(environment, copy, list);
    return next(descriptor, arguments, copy);
}

static int exec_descriptor(int descriptor, char *const *arguments, char *const *environment)
{
    static const char nothing[] = "";
    char text[ST_TEXT];
    const char *instead = path_of(descriptor, nothing, AT_EMPTY_PATH, text);
    int (*path_next)(const char *, char *const *, char *const *) = ST_NEXT(execve);
    if (instead && path_next)
        return path_next(instead, arguments, environment);
    int (*next)(int, char *const *, char *const *) = ST_NEXT(fexecve);
    return next ? next(descriptor, arguments, environment) : failed(ENOSYS);
}

ST_WRAP(int, fexecve, int descriptor, char *const *arguments, char *const *environment)
{
    return is_foreign_descriptor(descriptor) ? exec_descriptor_without(exec_descriptor, descriptor, arguments, environment)
                                             : exec_descriptor(descriptor, arguments, environment);
}

ST_WRAP(int, execveat, int dirfd, const char *path, char *const *arguments, char *const *environment, int flags)
{
    path = st_path(path);
    if (st_refused(dirfd, path))
        return -1;
    return is_foreign_at(dirfd, path, flags) ? exec_at_without(dirfd, path, arguments, environment, flags)
                                             : exec_at(dirfd, path, arguments, environment, flags);
}
