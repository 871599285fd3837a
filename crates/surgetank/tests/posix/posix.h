/* What the cases share: each runs in a process and a directory of its own and prints what it saw, the same words every time.
 * The directory has, from before the run: `stored` ("0123456789", 0644), `sdir/inner` ("inner") and `slink` -> stored. */
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
/* Each ends with an empty one. */
extern const struct one_case opening[], making[], renaming[], attributes[], set_ids[], times[], content[], mapping[], locking[], listing[];

#define USER 1000

/* The call as it is written, and its value or the name of its error. */
#define T(call) told(#call, (errno = 0, (long)(call)))
/* The same for a call that gives a descriptor, whose number tells nothing. */
#define D(fd, call) told(#call, ((fd) = (errno = 0, (call))) < 0 ? -1 : 0)

long told(const char *call, long result);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Makes or replaces a file. */
void put(const char *name, const char *text);
/* Prints the first bytes of a file, zeros as dots. */
void show(const char *name);
/* Prints kind, mode, links, owner and (of files and links) size. */
void look(const char *name);
/* Prints the sorted names in a directory. */
void list(const char *name);
/* In another process. */
void aside(void (*run)(void));
/* In another process, without privileges, in no group but its own. */
void as_user(void (*run)(void));
void pause_ms(long ms);
#endif
