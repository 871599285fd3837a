/* Shared parts of the cases. Each case runs in a process and a directory of its own. Its output is the same every time.
 * Before the run the directory has: `stored` ("0123456789", 0644), `sdir/inner` ("inner") and `slink` -> stored. */
#ifndef POSIX_H
#define POSIX_H
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

struct one_case {
    const char *name;
    void (*run)(void);
};
/* Each table ends with an empty entry. */
extern const struct one_case opening[], making[], renaming[], attributes[], set_ids[], times[], content[], mapping[], locking[], listing[];

#define USER 1000

/* Prints the source text of the call, and its value or the name of its error. */
#define T(call) print_result(#call, (errno = 0, (long)(call)))
/* The same for a call that returns a descriptor, whose number varies. */
#define D(fd, call) print_result(#call, ((fd) = (errno = 0, (call))) < 0 ? -1 : 0)

long print_result(const char *call, long result);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Makes or replaces a file. */
void put(const char *name, const char *text);
/* Prints the first bytes of a file, zeros as dots. */
void show(const char *name);
/* Prints kind, mode, links, owner and (of files and links) size. */
void look(const char *name);
/* Prints the sorted names in a directory. */
void list(const char *name);
/* Runs in another process. */
void aside(void (*run)(void));
/* Runs in another process, without privileges, in its own group only. */
void as_user(void (*run)(void));
void pause_ms(long ms);
#endif
