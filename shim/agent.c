/* The connection to the agent: one request, one reply. Danger avoided: a descriptor of the shim that conflicts with the
 * program's. The program may close a connection or reuse its number at any time, so the shim checks each before use. A
 * child never uses its parent's connections. Only system calls: no lock, no cancellation point, nothing that a signal
 * handler may not do.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/un.h>
#include <time.h>

#define POOL 8
#define HIGH 512 /* descriptors from here on conflict with no program's, and are kept */

struct connection {
    uint32_t claimed;
    int descriptor; /* 0: none; it is always a high one */
    uint64_t dev, ino;
    const struct st_domain *domain;
};
static struct connection pool[POOL];
static int pool_owner; /* process; -1: a process is taking it over */

static bool is_ours(const struct connection *connection)
{
    struct stat now;
    return connection->descriptor && !st_sys_failed(st_sys_fstat(connection->descriptor, &now)) &&
           now.st_dev == connection->dev && now.st_ino == connection->ino;
}

/* Moves it to a high number: the agent's descriptor must get the lowest free one, as open promises. */
static int raise(int descriptor)
{
    static const int least[] = {HIGH, 200, 50, 20};
    for (unsigned at = 0; at < sizeof least / sizeof *least; at++) {
        long high = st_sys(__NR_fcntl, descriptor, F_DUPFD_CLOEXEC, least[at]);
        if (st_sys_failed(high))
            continue;
        st_sys_close(descriptor);
        return (int)high;
    }
    return descriptor;
}

static long connect_to(int descriptor, const struct sockaddr_un *address)
{
    long result;
    do
        result = st_sys(__NR_connect, descriptor, address, sizeof *address);
    while (result == -EINTR);
    return result;
}

/* A path that is too long for an address is reached through a descriptor of its directory. */
static __attribute__((noinline)) long connect_far(int descriptor, const struct st_domain *domain)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char dir[ST_TEXT], link[32];
    const char *slash = strrchr(domain->socket, '/');
    if (!slash || domain->socket_bytes >= sizeof dir)
        return -ENAMETOOLONG;
    const size_t dir_bytes = (size_t)(slash - domain->socket);
    const size_t name_bytes = domain->socket_bytes - dir_bytes; /* with its slash */
    memcpy(dir, domain->socket, dir_bytes);
    dir[dir_bytes] = 0;
    long at = st_sys(__NR_openat, AT_FDCWD, dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (st_sys_failed(at))
        return at;
    const size_t link_bytes = strlen(st_proc_path((int)at, link));
    long result = -ENAMETOOLONG;
    if (link_bytes + name_bytes < sizeof address.sun_path) {
        memcpy(address.sun_path, link, link_bytes);
        memcpy(address.sun_path + link_bytes, slash, name_bytes);
        result = connect_to(descriptor, &address);
    }
    st_sys_close((int)at);
    return result;
}

static int dial(const struct st_domain *domain)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!domain->socket_bytes)
        return -1;
    long descriptor = st_sys(__NR_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (st_sys_failed(descriptor))
        return -1;
    long result;
    if (domain->socket_bytes < sizeof address.sun_path) {
        memcpy(address.sun_path, domain->socket, domain->socket_bytes);
        result = connect_to((int)descriptor, &address);
    } else {
        result = connect_far((int)descriptor, domain);
    }
    if (st_sys_failed(result)) {
        st_sys_close((int)descriptor);
        return -1;
    }
    return raise((int)descriptor);
}

/* In a fork child: closes the parent's connections instead of using them. */
static bool take_over(int pid)
{
    int before = __atomic_load_n(&pool_owner, __ATOMIC_ACQUIRE);
    if (before == pid)
        return true;
    if (before == -1 || !__atomic_compare_exchange_n(&pool_owner, &before, -1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return false;
    for (int at = 0; at < POOL; at++) {
        if (is_ours(&pool[at]))
            st_sys_close(pool[at].descriptor);
        pool[at].descriptor = 0;
        __atomic_store_n(&pool[at].claimed, 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&pool_owner, pid, __ATOMIC_RELEASE);
    return true;
}

static bool claim(struct connection *connection)
{
    uint32_t free = 0;
    return !__atomic_load_n(&connection->claimed, __ATOMIC_RELAXED) &&
           __atomic_compare_exchange_n(&connection->claimed, &free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void release(struct connection *connection)
{
    __atomic_store_n(&connection->claimed, 0, __ATOMIC_RELEASE);
}

/* A place of the pool for this domain, connected or not; NULL: none is free. */
static struct connection *claim_one(const struct st_domain *domain)
{
    int pid;
    if (st_self(&pid) != ST_SELF_OWN || !take_over(pid))
        return NULL;
    for (int connected = 1; connected >= 0; connected--)
        for (int at = 0; at < POOL; at++) {
            if (!claim(&pool[at]))
                continue;
            if (pool[at].descriptor && !is_ours(&pool[at]))
                pool[at].descriptor = 0; /* the program has closed it; the number is another file's now */
            if (pool[at].descriptor ? pool[at].domain == domain : !connected)
                return &pool[at];
            release(&pool[at]);
        }
    return NULL;
}

static void keep(struct connection *connection, const struct st_domain *domain, int descriptor)
{
    struct stat stat;
    if (descriptor < HIGH || st_sys_failed(st_sys_fstat(descriptor, &stat)))
        return;
    connection->dev = stat.st_dev;
    connection->ino = stat.st_ino;
    connection->domain = domain;
    connection->descriptor = descriptor;
}

/* `about`: an attribute. Its name and value are the program's memory, which only the kernel reads. */
static int send_request(int socket, const struct st_request *request, const struct st_attribute *about)
{
    size_t bytes = offsetof(struct st_request, name) + request->name_bytes;
    struct iovec parts[] = {{(void *)(uintptr_t)request, bytes}, {NULL, 0}, {NULL, 0}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = about ? 3 : 1};
    long result;
    if (about) {
        parts[1] = (struct iovec){(void *)(uintptr_t)about->name, about->name_bytes};
        parts[2] = (struct iovec){about->value, request->more_bytes - about->name_bytes};
        bytes += request->more_bytes;
    }
    do
        result = about ? st_sys(__NR_sendmsg, socket, &message, MSG_NOSIGNAL)
                       : st_sys(__NR_sendto, socket, request, bytes, MSG_NOSIGNAL, 0, 0);
    while (result == -EINTR);
    return result == (long)bytes ? 0 : -1;
}

static int receive_reply(int socket, bool cloexec, int *descriptor, struct st_attribute *asked)
{
    struct st_reply reply;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec parts[] = {{&reply, sizeof reply}, {NULL, 0}};
    struct msghdr message = {.msg_iov = parts,
                             .msg_iovlen = asked ? 2 : 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    if (asked)
        parts[1] = (struct iovec){asked->value, asked->room_bytes};
    long result;
    do
        result = st_sys(__NR_recvmsg, socket, &message, cloexec ? MSG_CMSG_CLOEXEC : 0);
    while (result == -EINTR);
    struct cmsghdr *head = st_sys_failed(result) ? NULL : CMSG_FIRSTHDR(&message);
    *descriptor = -1;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && head->cmsg_len >= CMSG_LEN(sizeof(int)))
        memcpy(descriptor, CMSG_DATA(head), sizeof(int));
    if (st_sys_failed(result) || (size_t)result < sizeof reply ||
        (size_t)result != sizeof reply + (asked && asked->room_bytes && !reply.status ? reply.value_bytes : 0))
        return ST_UNHEARD;
    if (asked)
        asked->value_bytes = reply.value_bytes;
    if (*descriptor < 0 && (message.msg_flags & MSG_CTRUNC))
        return EMFILE;
    return reply.status;
}

/* The mount answers only when an agent serves it, and with an error when none will. The agent's socket opens just after
 * that.
 */
bool st_agent_replaced(const struct st_domain *domain, int turn)
{
    const struct timespec moment = {.tv_nsec = 1000000};
    struct statfs stat;
    if (turn >= 5000 || st_sys_failed(st_sys(__NR_statfs, domain->mount, &stat)))
        return false;
    st_sys(__NR_nanosleep, &moment, NULL);
    return true;
}

static int ask(const struct st_domain *domain, const struct st_request *request, bool cloexec, int *descriptor,
               struct st_attribute *about)
{
    int unused = -1, answer = ST_UNSENT;
    int *out = descriptor ? descriptor : &unused;
    *out = -1;
    for (int try = 0; try < 2 && answer == ST_UNSENT; try++) {
        struct connection *connection = claim_one(domain);
        bool old = connection && connection->descriptor;
        int socket = old ? connection->descriptor : dial(domain);
        if (socket >= 0 && connection && !old)
            keep(connection, domain, socket);
        if (socket >= 0 && send_request(socket, request, about) == 0)
            answer = receive_reply(socket, cloexec, out, about && request->op == ST_GETXATTR ? about : NULL);
        bool pooled = connection && connection->descriptor == socket && socket >= 0;
        if (socket >= 0 && (!pooled || answer == ST_UNSENT || answer == ST_UNHEARD)) {
            if (pooled)
                connection->descriptor = 0;
            st_sys_close(socket);
        }
        if (connection)
            release(connection);
        if (!old)
            break; /* a new connection is not tried again */
    }
    if (*out >= 0 && (answer != 0 || !descriptor)) {
        st_sys_close(*out);
        *out = -1;
    }
    return answer;
}

int st_ask(const struct st_domain *domain, const struct st_request *request, bool cloexec, int *descriptor)
{
    return ask(domain, request, cloexec, descriptor, NULL);
}

int st_ask_attribute(const struct st_domain *domain, const struct st_request *request, struct st_attribute *about)
{
    return ask(domain, request, true, NULL, about);
}
