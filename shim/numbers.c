/* Functions that create a descriptor outside the run's files: cached facts about its number become void. Danger
 * avoided: pipes and sockets that count as the file which had the number before, if that was closed without libc (libuv
 * does so).
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdarg.h>

static int result_of(long raw)
{
    if (!st_sys_failed(raw))
        return (int)raw;
    errno = (int)-raw;
    return -1;
}

#define LIST(...) __VA_ARGS__
#define MAKES(name, TYPES, PARAMETERS, ARGUMENTS, raw)                                             \
    ST_WRAP(int, name, PARAMETERS)                                                               \
    {                                                                                               \
        int (*next)(TYPES) = ST_NEXT(name);                                                       \
        return st_fresh(next ? next(ARGUMENTS) : result_of(raw));                                   \
    }
MAKES(dup, LIST(int), LIST(int a), LIST(a), st_sys(__NR_dup, a))
MAKES(socket, LIST(int, int, int), LIST(int a, int b, int c), LIST(a, b, c), st_sys(__NR_socket, a, b, c))
MAKES(accept, LIST(int, void *, void *), LIST(int a, void *b, void *c), LIST(a, b, c), st_sys(__NR_accept4, a, b, c, 0))
MAKES(accept4, LIST(int, void *, void *, int), LIST(int a, void *b, void *c, int d), LIST(a, b, c, d),
      st_sys(__NR_accept4, a, b, c, d))
MAKES(epoll_create, LIST(int), LIST(int a), LIST(a), a > 0 ? st_sys(__NR_epoll_create1, 0) : -EINVAL)
MAKES(epoll_create1, LIST(int), LIST(int a), LIST(a), st_sys(__NR_epoll_create1, a))
MAKES(eventfd, LIST(unsigned, int), LIST(unsigned a, int b), LIST(a, b), st_sys(__NR_eventfd2, a, b))
MAKES(memfd_create, LIST(const char *, unsigned), LIST(const char *a, unsigned b), LIST(a, b), st_sys(__NR_memfd_create, a, b))
MAKES(timerfd_create, LIST(int, int), LIST(int a, int b), LIST(a, b), st_sys(__NR_timerfd_create, a, b))
/* (The kernel's set of signals has 64.) */
MAKES(signalfd, LIST(int, const void *, int), LIST(int a, const void *b, int c), LIST(a, b, c),
      st_sys(__NR_signalfd4, a, b, 8, c))
MAKES(inotify_init1, LIST(int), LIST(int a), LIST(a), st_sys(__NR_inotify_init1, a))

ST_WRAP(int, inotify_init, void)
{
    int (*next)(void) = ST_NEXT(inotify_init);
    return st_fresh(next ? next() : result_of(st_sys(__NR_inotify_init1, 0)));
}

#define MAKES_TWO(name, TYPES, PARAMETERS, ARGUMENTS, raw)                                         \
    ST_WRAP(int, name, PARAMETERS)                                                               \
    {                                                                                               \
        int (*next)(TYPES) = ST_NEXT(name);                                                       \
        int result = next ? next(ARGUMENTS) : result_of(raw);                                       \
        if (result == 0) {                                                                          \
            st_fresh(two[0]);                                                                       \
            st_fresh(two[1]);                                                                       \
        }                                                                                           \
        return result;                                                                              \
    }
MAKES_TWO(pipe, LIST(int *), LIST(int *two), LIST(two), st_sys(__NR_pipe2, two, 0))
MAKES_TWO(pipe2, LIST(int *, int), LIST(int *two, int a), LIST(two, a), st_sys(__NR_pipe2, two, a))
MAKES_TWO(socketpair, LIST(int, int, int, int *), LIST(int a, int b, int c, int *two), LIST(a, b, c, two),
          st_sys(__NR_socketpair, a, b, c, two))

#define FCNTL(name)                                                                                \
    ST_WRAP(int, name, int descriptor, int command, ...)                                         \
    {                                                                                               \
        va_list arguments;                                                                          \
        va_start(arguments, command);                                                               \
        void *argument = va_arg(arguments, void *);                                                 \
        va_end(arguments);                                                                          \
        int (*next)(int, int, ...) = ST_NEXT(name);                                               \
        int result = next ? next(descriptor, command, argument)                                     \
                          : result_of(st_sys(__NR_fcntl, descriptor, command, argument));           \
        return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? st_fresh(result) : result;        \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
FCNTL(__fcntl)
