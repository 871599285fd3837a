/* Starting programs. They are found through the mount; here they are refused on a mount that is not here, and a link to a
 * descriptor is followed to the path below the mount. Danger avoided: anything but plain calls on the stack, since these run
 * in vfork children. Names without a slash are searched by libc itself.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <spawn.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#define LIST(...) __VA_ARGS__

static bool refused_program(const char *path, bool search)
{
    if (search && st_on(ST_ON_DEAD) && (uintptr_t)path >= ST_MEMORY_MIN && !strchr(path, '/'))
        return false;
    return st_refused(AT_FDCWD, path);
}

#define EXEC(name, search, TYPES, PARAMETERS, ARGUMENTS)                                        \
    ST_WRAP(int, name, const char *path, PARAMETERS)                                          \
    {                                                                                           \
        char text[ST_TEXT];                                                                     \
        path = st_through(path, text);                                                          \
        if (refused_program(path, search))                                                      \
            return -1;                                                                          \
        int (*next)(const char *, TYPES) = ST_NEXT(name);                                     \
        st_streams_leave();                                                                     \
        if (next)                                                                               \
            return next(path, ARGUMENTS);                                                       \
        errno = ENOSYS;                                                                         \
        return -1;                                                                              \
    }
EXEC(execve, false, LIST(char *const *, char *const *), LIST(char *const *a, char *const *b), LIST(a, b))
EXEC(execv, false, LIST(char *const *), LIST(char *const *a), LIST(a))
EXEC(execvp, true, LIST(char *const *), LIST(char *const *a), LIST(a))
EXEC(execvpe, true, LIST(char *const *, char *const *), LIST(char *const *a, char *const *b), LIST(a, b))

/* The ones with a list: it becomes an array on the stack, as in libc. */
static size_t count_list(va_list arguments)
{
    size_t count = 1;
    while (va_arg(arguments, const char *))
        count++;
    return count;
}

#define EXEC_LIST(name, search, after, call)                                                    \
    ST_WRAP(int, name, const char *path, const char *first, ...)                              \
    {                                                                                           \
        va_list arguments;                                                                      \
        va_start(arguments, first);                                                             \
        size_t count = first ? count_list(arguments) : 0;                                       \
        va_end(arguments);                                                                      \
        const char *list[count + 1];                                                            \
        list[0] = first;                                                                        \
        va_start(arguments, first);                                                             \
        for (size_t at = 1; at <= count; at++)                                                  \
            list[at] = va_arg(arguments, const char *);                                         \
        after;                                                                                  \
        va_end(arguments);                                                                      \
        return call;                                                                            \
    }
EXEC_LIST(execl, false, , st_wrap_execv(path, (char *const *)list))
EXEC_LIST(execlp, true, , st_wrap_execvp(path, (char *const *)list))
EXEC_LIST(execle, false, char *const *environment = va_arg(arguments, char *const *),
          st_wrap_execve(path, (char *const *)list, environment))

/* These return the error. */
#define SPAWN(name, search)                                                                                             \
    ST_WRAP(int, name, pid_t *pid, const char *path, const void *actions, const void *attributes, char *const *arguments, \
            char *const *environment)                                                                                   \
    {                                                                                                                   \
        char text[ST_TEXT];                                                                                             \
        int error = errno;                                                                                              \
        path = st_through(path, text);                                                                                  \
        if (refused_program(path, search)) {                                                                            \
            errno = error;                                                                                              \
            return ENOTCONN;                                                                                            \
        }                                                                                                               \
        int (*next)(pid_t *, const char *, const void *, const void *, char *const *, char *const *) = ST_NEXT(name); \
        return next ? next(pid, path, actions, attributes, arguments, environment) : ENOSYS;                            \
    }
SPAWN(posix_spawn, false)
SPAWN(posix_spawnp, true)

#define FILE_ACTION(name, TYPES, PARAMETERS, ARGUMENTS, path)                                    \
    ST_WRAP(int, name, void *actions, PARAMETERS)                                              \
    {                                                                                            \
        int error = errno;                                                                       \
        if (st_refused(AT_FDCWD, path)) {                                                        \
            errno = error;                                                                       \
            return ENOTCONN;                                                                     \
        }                                                                                        \
        int (*next)(void *, TYPES) = ST_NEXT(name);                                            \
        return next ? next(actions, ARGUMENTS) : ENOSYS;                                         \
    }
FILE_ACTION(posix_spawn_file_actions_addopen, LIST(int, const char *, int, mode_t),
            LIST(int a, const char *path, int b, mode_t c), LIST(a, path, b, c), path)
FILE_ACTION(posix_spawn_file_actions_addchdir_np, LIST(const char *), LIST(const char *path), path, path)
FILE_ACTION(posix_spawn_file_actions_addchdir, LIST(const char *), LIST(const char *path), path, path)
