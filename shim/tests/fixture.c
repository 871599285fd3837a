/* A stand-in for the agent: writes an index for two plain directory trees, MOUNT (the mount's view) and TIER (the plain
 * files), and serves the socket. Files of the two differ in content, so a test sees which side served. Words in a
 * record's name decide its content: cold, live, linked, hidden (not ST_KNOWN), partial, closed.
 *
 *   fixture INDEX SOCKET MOUNT TIER [serve LOG]
 *
 * Danger avoided: testing the shim against itself; it uses only abi.h from the shim.
 */
#define _GNU_SOURCE
#include "../abi.h"

#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CAPACITY 4096u
#define TOTAL (4u << 20)

static uint8_t *base;
static struct st_header *header;
static struct st_name *names;
static struct st_record *records;
static struct st_label *labels;
static struct st_dir *dirs;
static struct st_plain *plain;
static const char *mount_path, *tier_path;
static uint32_t record_count = 1, label_count = 1;
static char record_path[CAPACITY][512]; /* below the mount */

static void add_name(uint64_t parent, const char *name, uint32_t record)
{
    uint64_t a, b;
    st_hash(header->key, parent, name, strlen(name), &a, &b);
    for (uint64_t at = a;; at++) {
        struct st_name *entry = &names[at & (CAPACITY - 1)];
        if (entry->a > 1)
            continue;
        entry->b = b;
        entry->id = records[record].id;
        entry->record = record;
        __atomic_store_n(&entry->a, a, __ATOMIC_RELEASE);
        return;
    }
}

static void add_dir(uint64_t ino, uint32_t record)
{
    for (uint64_t at = st_mix(ino);; at++) {
        struct st_dir *entry = &dirs[at & (CAPACITY - 1)];
        if (entry->record)
            continue;
        entry->ino = ino;
        __atomic_store_n(&entry->record, record, __ATOMIC_RELEASE);
        return;
    }
}

static void add_plain(uint64_t ino, uint32_t record)
{
    for (uint64_t at = st_mix(ino);; at++) {
        struct st_plain *entry = &plain[at & (CAPACITY - 1)];
        if (entry->record)
            continue;
        entry->backing_ino = ino;
        __atomic_store_n(&entry->record, record, __ATOMIC_RELEASE);
        return;
    }
}

static void fill(struct st_record *record, const struct stat *stat)
{
    record->ino = stat->st_ino;
    record->mode = stat->st_mode;
    record->uid = stat->st_uid;
    record->gid = stat->st_gid;
    record->nlink = (uint32_t)stat->st_nlink;
    record->rdev = stat->st_rdev;
    record->size_bytes = (uint64_t)stat->st_size;
    record->blocks = (uint64_t)stat->st_blocks;
    record->atime_s = stat->st_atim.tv_sec;
    record->mtime_s = stat->st_mtim.tv_sec;
    record->ctime_s = stat->st_ctim.tv_sec;
    record->atime_ns = (uint32_t)stat->st_atim.tv_nsec;
    record->mtime_ns = (uint32_t)stat->st_mtim.tv_nsec;
    record->ctime_ns = (uint32_t)stat->st_ctim.tv_nsec;
}

/* Makes the record of PATH (below the mount; "" is the root), whose parent's record is known. */
static uint32_t add_record(uint32_t parent, const char *path, const char *name)
{
    char text[PATH_MAX];
    struct stat stat;
    uint32_t number = record_count++;
    struct st_record *record = &records[number];
    snprintf(text, sizeof text, "%s%s%s", mount_path, *path ? "/" : "", path);
    if (number >= CAPACITY / 2 || lstat(text, &stat))
        err(2, "%s", text);
    snprintf(record_path[number], sizeof record_path[number], "%s", path);
    record->id = 1000000 + number;
    record->flags = strstr(name, "hidden") ? 0 : ST_KNOWN;
    fill(record, &stat);
    if (S_ISDIR(stat.st_mode)) {
        record->flags |= (strstr(name, "partial") ? 0 : ST_COMPLETE) | (strstr(name, "closed") ? 0 : ST_SEARCHABLE);
        record->label = label_count++;
        struct st_label *label = &labels[record->label];
        label->parent = parent ? parent : number;
        label->name_bytes = (uint32_t)strlen(name);
        memcpy(label->name, name, label->name_bytes);
        add_dir(stat.st_ino, number);
    } else if (S_ISREG(stat.st_mode) && !strstr(name, "cold")) {
        snprintf(text, sizeof text, "%s/%s", tier_path, path);
        struct stat backing;
        if (!lstat(text, &backing)) {
            record->flags |= ST_RESIDENT | (strstr(name, "live") ? ST_LIVE : 0) | (strstr(name, "linked") ? ST_LINKED : 0);
            record->size_bytes = (uint64_t)backing.st_size;
            record->blocks = (uint64_t)backing.st_blocks;
            record->backing_ino = backing.st_ino;
            add_plain(backing.st_ino, number);
        }
    }
    if (parent)
        add_name(records[parent].id, name, number);
    return number;
}

static void scan(uint32_t number, const char *path)
{
    char text[PATH_MAX];
    snprintf(text, sizeof text, "%s/%s", mount_path, path);
    DIR *directory = opendir(text);
    if (!directory)
        err(2, "%s", text);
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || strstr(entry->d_name, "unlisted"))
            continue;
        snprintf(text, sizeof text, "%s%s%s", path, *path ? "/" : "", entry->d_name);
        uint32_t child = add_record(number, text, entry->d_name);
        if (S_ISDIR(records[child].mode))
            scan(child, text);
    }
    closedir(directory);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void make_index(const char *path)
{
    struct stat mount, tier;
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, TOTAL) || stat(mount_path, &mount) || stat(tier_path, &tier))
        err(2, "%s", path);
    base = mmap(NULL, TOTAL, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED)
        err(2, "mmap");
    close(descriptor);
    header = (struct st_header *)base;
    header->layout = ST_LAYOUT;
    header->flags = ST_WRITES;
    header->total_bytes = TOTAL;
    header->alive_until_ns = now_ns() + UINT64_C(3600000000000);
    header->generation = 2;
    header->key[0] = UINT64_C(0x1234567887654321);
    header->key[1] = UINT64_C(0xfeedfacecafebeef);
    header->mount_dev = mount.st_dev;
    header->uid = geteuid();
    header->names = (struct st_table){4096, CAPACITY};
    header->records = (struct st_table){header->names.offset + CAPACITY * sizeof *names, CAPACITY};
    header->labels = (struct st_table){header->records.offset + CAPACITY * sizeof *records, CAPACITY};
    header->dirs = (struct st_table){header->labels.offset + CAPACITY * sizeof *labels, CAPACITY};
    header->plain = (struct st_table){header->dirs.offset + CAPACITY * sizeof *dirs, CAPACITY};
    header->device_count = 1;
    header->devices[0].dev = tier.st_dev;
    header->devices[0].root_bytes = (uint32_t)strlen(tier_path);
    header->devices[0].root_offset = header->plain.offset + CAPACITY * sizeof *plain;
    if (header->devices[0].root_offset + PATH_MAX > TOTAL)
        errx(2, "TOTAL is too small");
    memcpy(base + header->devices[0].root_offset, tier_path, strlen(tier_path) + 1);
    names = (struct st_name *)(base + header->names.offset);
    records = (struct st_record *)(base + header->records.offset);
    labels = (struct st_label *)(base + header->labels.offset);
    dirs = (struct st_dir *)(base + header->dirs.offset);
    plain = (struct st_plain *)(base + header->plain.offset);
    header->root = add_record(0, "", "");
    scan(header->root, "");
    header->magic = ST_MAGIC;
}

/* ---- The socket */

static FILE *log_file;

static uint32_t by_id(uint64_t id)
{
    for (uint32_t number = 1; number < record_count; number++)
        if (records[number].id == id)
            return number;
    return 0;
}

static uint32_t by_backing(uint64_t ino)
{
    for (uint32_t number = 1; number < record_count; number++)
        if (records[number].backing_ino == ino)
            return number;
    return 0;
}

/* Opens on the tier; a new file gets a record and a stand-in below MOUNT. */
static int serve_open(const struct st_request *request, const char *name, int *opened)
{
    char path[PATH_MAX], text[2 * PATH_MAX];
    uint32_t dir = by_id(request->dir);
    if (!dir)
        return ENOENT;
    if (strstr(name, "askmount"))
        return ST_ASK_MOUNT;
    if (strstr(name, "refused"))
        return EDQUOT;
    snprintf(path, sizeof path, "%s%s%s", record_path[dir], *record_path[dir] ? "/" : "", name);
    snprintf(text, sizeof text, "%s/%s", mount_path, path);
    int stand_in = open(text, O_WRONLY | (request->flags & (O_CREAT | O_EXCL)), 0600);
    if (stand_in < 0)
        return errno;
    close(stand_in);
    snprintf(text, sizeof text, "%s/%s", tier_path, path);
    *opened = open(text, (int)((request->flags & ~(unsigned)O_EXCL) | O_CLOEXEC), request->mode);
    if (*opened < 0)
        return errno;
    struct stat stat;
    fstat(*opened, &stat);
    uint32_t number = by_backing(stat.st_ino);
    if (!number) {
        number = add_record(dir, path, name);
        records[number].flags |= ST_LIVE;
    }
    records[number].mode = stat.st_mode;
    return 0;
}

static int serve_attributes(const struct st_request *request)
{
    uint32_t number = by_backing(request->ino);
    if (!number)
        return ENOENT;
    struct st_record *record = &records[number];
    __atomic_store_n(&record->seq, record->seq + 1, __ATOMIC_RELEASE);
    if (request->valid & ST_SET_MODE)
        record->mode = (record->mode & S_IFMT) | request->mode;
    if (request->valid & ST_SET_MTIME) {
        record->mtime_s = request->mtime_s;
        record->mtime_ns = request->mtime_ns;
    }
    __atomic_store_n(&record->seq, record->seq + 1, __ATOMIC_RELEASE);
    return 0;
}

static void reply(int client, int status, int descriptor)
{
    struct st_reply answer = {.status = status};
    struct iovec vector = {&answer, sizeof answer};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &descriptor, sizeof descriptor);
    }
    sendmsg(client, &message, MSG_NOSIGNAL);
    if (descriptor >= 0)
        close(descriptor);
}

static int serve_one(int client)
{
    struct st_request request;
    char name[ST_NAME_BYTES_MAX + 1] = "";
    ssize_t bytes = recv(client, &request, sizeof request, 0);
    if (bytes <= 0)
        return -1;
    int opened = -1, status = EINVAL;
    if ((size_t)bytes != offsetof(struct st_request, name) + request.name_bytes || request.name_bytes > ST_NAME_BYTES_MAX)
        errx(2, "a request of %zd bytes", bytes);
    memcpy(name, request.name, request.name_bytes);
    if (request.op == ST_OPEN)
        status = serve_open(&request, name, &opened);
    else if (request.op == ST_SYNC)
        status = by_backing(request.ino) ? 0 : ENOENT;
    else if (request.op == ST_SETATTR) /* (not ST_SETATTR_NAMED: the mount is asked) */
        status = serve_attributes(&request);
    fprintf(log_file, "%u %s %o %o %u %d\n", request.op, name, request.flags, request.mode, request.valid, status);
    fflush(log_file);
    if (strstr(name, "silence"))
        return -1; /* dies before it answers */
    reply(client, status, opened);
    return 0;
}

static void serve(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct pollfd sockets[512];
    int count = 1;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) || listen(listening, 64))
        err(2, "%s", path);
    printf("ready\n");
    fclose(stdout);
    sockets[0] = (struct pollfd){.fd = listening, .events = POLLIN};
    for (;;) {
        if (poll(sockets, (nfds_t)count, -1) < 0)
            continue;
        if ((sockets[0].revents & POLLIN) && count < 512)
            sockets[count++] = (struct pollfd){.fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC), .events = POLLIN};
        for (int at = count - 1; at > 0; at--) {
            if (!sockets[at].revents || serve_one(sockets[at].fd) == 0)
                continue;
            close(sockets[at].fd);
            sockets[at] = sockets[--count];
        }
    }
}

int main(int count, char **arguments)
{
    if (count < 5)
        errx(2, "fixture INDEX SOCKET MOUNT TIER [serve LOG]");
    mount_path = arguments[3];
    tier_path = arguments[4];
    umask(0);
    make_index(arguments[1]);
    if (count == 7) {
        if (!(log_file = fopen(arguments[6], "a")))
            err(2, "%s", arguments[6]);
        serve(arguments[2]);
    }
    return 0;
}
