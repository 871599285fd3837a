/* Shared by the shim's checks: a condition that does not hold is printed with its place and counted. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <string.h>

extern int failures;

#define CHECK(condition)                                                                                   \
    do {                                                                                                   \
        errno = 0;                                                                                         \
        if (!(condition)) {                                                                                \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);              \
            failures++;                                                                                    \
        }                                                                                                  \
    } while (0)

/* The source of an open file: "plain" from the tier, "mount" from below the mount, "" closed or not opened. */
const char *who(int descriptor);
const char *below(const char *mount, const char *path);

void check_dead(const char *mount);
void check_stress(const char *mount, int rounds);
void check_numbers(const char *mount);
void check_anchors(const char *mount);
void check_pointers(const char *mount);
void check_fuzz(const char *index, const char *mount, int rounds);
void measure(const char *mount, const char *tier);

#endif
