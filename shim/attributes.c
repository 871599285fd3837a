/* Extended attributes by path ("user.*" and ACLs: others are not served). For served files the shim sends one request to the
 * agent, where the mount would need two. Such attributes are hints, locations, and values that a store without the file
 * cannot know. Danger avoided: an attribute that is set twice, or an answer about another file. The shim leaves
 * uncertain and unusual cases to the mount.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

static const char SERVED[] = "user.";
static const char ACL[] = "system.posix_acl_";

/* The mount has no ACLs: it refuses them for each of its files. (cp -a and rsync -A set one on each file.) */
bool st_is_acl(const char *name)
{
    return st_is_text(name) && strncmp(name, ACL, sizeof ACL - 1) == 0;
}

/* 0: done; > 0: errno; ST_PASS. */
static int ask(const char *path, struct st_request *request, struct st_attribute *about)
{
    struct st_place place;
    bool is_acl = st_is_acl(about->name);
    if (!st_begin(&place, AT_FDCWD, path) || !st_is_text(about->name) ||
        (!is_acl && strncmp(about->name, SERVED, sizeof SERVED - 1) != 0))
        return ST_PASS;
    about->name_bytes = (uint32_t)strnlen(about->name, ST_NAME_BYTES_MAX + 1);
    if (about->name_bytes > ST_NAME_BYTES_MAX)
        return ST_PASS;
    enum st_found found = st_find(&place);
    bool made_here = found == ST_UNSURE && (place.dir_flags & ST_DELEGATED); /* and not taken in yet */
    if (is_acl && found == ST_FOUND)
        return EOPNOTSUPP;
    if (is_acl || (!made_here && !(found == ST_FOUND && S_ISREG(place.record.mode))))
        return ST_PASS;
    request->mode = about->name_bytes;
    request->more_bytes += about->name_bytes;
    request->dir = place.dir_id;
    request->name_bytes = place.name_bytes;
    memcpy(request->name, place.name, place.name_bytes);
    int answer = st_ask_attribute(place.from.domain, request, about);
    return answer > 0 && answer != EINVAL ? answer : answer == 0 ? 0 : ST_PASS;
}

static int set(const char *path, const char *name, const void *value, size_t bytes, int flags)
{
    struct st_request request;
    struct st_attribute about = {.name = name, .value = (void *)(uintptr_t)value};
    if (flags || bytes > ST_MORE_BYTES_MAX - ST_NAME_BYTES_MAX || (bytes && (uintptr_t)value < ST_MEMORY_MIN))
        return ST_PASS;
    memset(&request, 0, offsetof(struct st_request, name));
    request.op = ST_SETXATTR;
    request.valid = (uint32_t)bytes;
    request.more_bytes = (uint32_t)bytes;
    int answer = ask(path, &request, &about);
    return answer > 0 ? (errno = answer, -1) : answer;
}

static ssize_t get(const char *path, const char *name, void *value, size_t room)
{
    struct st_request request;
    struct st_attribute about = {.name = name, .value = value};
    if (room && (uintptr_t)value < ST_MEMORY_MIN)
        return ST_PASS;
    about.room_bytes = room < ST_VALUE_BYTES_MAX ? (uint32_t)room : ST_VALUE_BYTES_MAX;
    memset(&request, 0, offsetof(struct st_request, name));
    request.op = ST_GETXATTR;
    request.valid = about.room_bytes;
    int answer = ask(path, &request, &about);
    return answer > 0 ? (errno = answer, -1) : answer < 0 ? ST_PASS : (ssize_t)about.value_bytes;
}

static int missing(void)
{
    errno = ENOSYS;
    return -1;
}

#define ATTRIBUTE(result, name, follows, PARAMETERS, ARGUMENTS, TYPES, attempt) \
    ST_WRAP(result, name, PARAMETERS)                                         \
    {                                                                           \
        char text[ST_TEXT];                                                     \
        path = (follows) ? st_through(path, text) : st_path(path);              \
        if (st_refused(AT_FDCWD, path))                                         \
            return -1;                                                          \
        result answer = attempt;                                                \
        if (answer != ST_PASS)                                                  \
            return answer;                                                      \
        result (*next)(TYPES) = ST_NEXT(name);                                  \
        return next ? next(ARGUMENTS) : missing();                              \
    }
#define LIST(...) __VA_ARGS__
#define GET(name, follows)                                                                                                 \
    ATTRIBUTE(ssize_t, name, follows, LIST(const char *path, const char *a, void *b, size_t c), LIST(path, a, b, c), \
              LIST(const char *, const char *, void *, size_t), get(path, a, b, c))
#define SET(name, follows)                                                                                                  \
    ATTRIBUTE(int, name, follows, LIST(const char *path, const char *a, const void *b, size_t c, int d),              \
              LIST(path, a, b, c, d), LIST(const char *, const char *, const void *, size_t, int), set(path, a, b, c, d))
GET(getxattr, true)
GET(lgetxattr, false)
SET(setxattr, true)
SET(lsetxattr, false)
