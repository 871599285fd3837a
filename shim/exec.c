/* Starts programs. The mount serves their files. The shim refuses programs on an absent mount, and replaces a link to a
 * descriptor by the path below the mount. It starts programs that cannot take the shim without it. Danger avoided:
 * operations beyond plain calls on the stack, since these functions run in vfork children. libc itself searches names
 * without a slash.
 */
#define _GNU_SOURCE
#include "foreign.h"
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

extern char **environ;

static const char LIST_NAME[] = "LD_PRELOAD=", OURS[] = "/libsurgetank";

size_t st_environment_count(char *const *environment, size_t *list_bytes)
{
    size_t count = 0;
    *list_bytes = 1;
    for (; environment && environment[count]; count++)
        if (!strncmp(environment[count], LIST_NAME, sizeof LIST_NAME - 1) && strlen(environment[count]) >= *list_bytes)
            *list_bytes = strlen(environment[count]) + 1; /* the longest of several */
    return count;
}

/* Keeps other preloaded libraries. */
static bool others_in(const char *from, char *list)
{
    char *to = list + sizeof LIST_NAME - 1;
    memcpy(list, LIST_NAME, sizeof LIST_NAME);
    while (*from) {
        size_t bytes = strcspn(from, ": ");
        const char *ours = strstr(from, OURS);
        if (bytes && !(ours && ours < from + bytes)) {
            if (to != list + sizeof LIST_NAME - 1)
                *to++ = ':';
            memcpy(to, from, bytes);
            to += bytes;
        }
        from += bytes + (from[bytes] != 0);
    }
    *to = 0;
    return to != list + sizeof LIST_NAME - 1;
}

void st_environment_without(char *const *environment, char **copy, char *list)
{
    for (; environment && *environment; environment++)
        if (strncmp(*environment, LIST_NAME, sizeof LIST_NAME - 1) != 0)
            *copy++ = *environment;
        else if (others_in(*environment + sizeof LIST_NAME - 1, list))
            *copy++ = list;
    *copy = NULL;
}

/* PATH where a name is searched, as execvp does. */
static const char *search_path(bool search)
{
    for (char *const *entry = environ; search && entry && *entry; entry++)
        if (!strncmp(*entry, "PATH=", 5))
            return *entry + 5;
    return search ? "/bin:/usr/bin" : NULL;
}

/* Also in a program that the shim does not serve: its children inherit the environment. */
static bool is_foreign(const char *path, bool search)
{
    return st_is_text(path) && st_is_foreign(path, search_path(search));
}

typedef int exec_call(const char *, char *const *, char *const *);

__attribute__((noinline)) static int exec_without(exec_call *next, const char *path, char *const *arguments,
                                                  char *const *environment)
{
    size_t list_bytes, count = st_environment_count(environment, &list_bytes);
    char *copy[count + 1], list[list_bytes];
    st_environment_without(environment, copy, list);
    return next(path, arguments, copy);
}

/* `with`: the variant that takes an environment. */
#define EXEC(name, with, search, TYPES, PARAMETERS, ARGUMENTS, environment)                       \
    ST_WRAP(int, name, const char *path, PARAMETERS)                                          \
    {                                                                                           \
        char text[ST_TEXT];                                                                     \
        path = st_through(path, text);                                                          \
        if (refused_program(path, search))                                                      \
            return -1;                                                                          \
        int (*next)(const char *, TYPES) = ST_NEXT(name);                                     \
        exec_call *next_with = ST_NEXT(with);                                                  \
        st_streams_leave();                                                                     \
        if (next_with && is_foreign(path, search))                                             \
            return exec_without(next_with, path, a, environment);                              \
        if (next)                                                                               \
            return next(path, ARGUMENTS);                                                       \
        errno = ENOSYS;                                                                         \
        return -1;                                                                              \
    }
EXEC(execve, execve, false, LIST(char *const *, char *const *), LIST(char *const *a, char *const *b), LIST(a, b), b)
EXEC(execv, execve, false, LIST(char *const *), LIST(char *const *a), LIST(a), environ)
EXEC(execvp, execvpe, true, LIST(char *const *), LIST(char *const *a), LIST(a), environ)
EXEC(execvpe, execvpe, true, LIST(char *const *, char *const *), LIST(char *const *a, char *const *b), LIST(a, b), b)

/* The variants with a list, which becomes an array on the stack, as in libc. */
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

typedef int spawn_call(pid_t *, const char *, const void *, const void *, char *const *, char *const *);

/* (The working directory that the actions give the child is not known here: a relative path may be another program's
 * there.)
 */
__attribute__((noinline)) static int spawn_without(spawn_call *next, pid_t *pid, const char *path, const void *actions,
                                                   const void *attributes, char *const *arguments, char *const *environment)
{
    size_t list_bytes, count = st_environment_count(environment, &list_bytes);
    char *copy[count + 1], list[list_bytes];
    st_environment_without(environment, copy, list);
    return next(pid, path, actions, attributes, arguments, copy);
}

/* These functions return the error. */
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
        spawn_call *next = ST_NEXT(name);                                                                              \
        if (!next)                                                                                                      \
            return ENOSYS;                                                                                              \
        if (is_foreign(path, search))                                                                                   \
            return spawn_without(next, pid, path, actions, attributes, arguments, environment);                         \
        return next(pid, path, actions, attributes, arguments, environment);                                            \
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
