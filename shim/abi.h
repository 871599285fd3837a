/* The interface between agent and shim: the index in shared memory, and the messages on the socket.
 *
 * There is one writer (the agent, under its tree's lock) and any number of readers in foreign processes. Readers map
 * the file read-only and trust nothing that they cannot check. `crates/surgetank/src/shimdoor/abi.rs` is the same in
 * Rust; a test compares the two. docs/internals/doors.md explains it. All numbers are little-endian, like the
 * machine's.
 *
 * Reading. `generation` odd, or changed during the look-up: tables are being rebuilt, leave the call to the mount. A
 * record is read under its own `seq`. Odd: being written. Changed: read again, at most a few times, then leave the call
 * to the mount. `alive_until_ns` in the past: the agent is dead or stopped, leave the call to the mount.
 */
#ifndef SURGETANK_ABI_H
#define SURGETANK_ABI_H

#include <stdint.h>

#define ST_MAGIC UINT64_C(0x5844494b4e415453) /* "STANKIDX" */
#define ST_LAYOUT 4u
#define ST_DEVICES_MAX 16u
#define ST_NAME_BYTES_MAX 255u

/* Flags of a record. */
#define ST_KNOWN 1u       /* the attributes here are the file's: stat may use them */
#define ST_RESIDENT 2u    /* a plain file on `device`, at the path of its first name, that may be opened there for reading */
#define ST_LIVE 4u        /* size, blocks and times are the plain file's own now: read them there (fstatat on the tier) */
#define ST_COMPLETE 8u    /* directory: a name that is not in the table does not exist */
#define ST_SEARCHABLE 16u /* directory: the agent's user may look names up in it */
/* with ST_LIVE, until the first version: permissions and access time are the plain file's too. A process that has it
 * open for writing changes them there, while the owner may read and write
 */
#define ST_FRESH 64u
#define ST_LINKED 32u     /* several names: a file opened under this one must have `backing_ino` */

/* directory, with ST_COMPLETE: it is delegated. The shim itself creates new plain files in it, on `device`, and reports
 * them in the ring. A name that is not in the table may exist there already
 */
#define ST_DELEGATED 128u

/* Flags of the index. */
#define ST_WRITES 1u /* the agent accepts requests to create and to open for writing */
#define ST_RING 2u   /* the ring exists: directories may be delegated */

/* Flags of a device. */
#define ST_DEVICE_NOEXEC 1u /* the tier is mounted noexec: files with an execute bit are left to the mount */

/* A table: `capacity` entries (a power of two) from `offset` on are in use. It grows in place, under an odd generation. */
struct st_table {
    uint64_t offset;
    uint64_t capacity;
};

/* `root` + "/" + path below the mount = the plain file. */
struct st_device {
    uint64_t dev; /* st_dev of the plain files */
    uint32_t flags;
    uint32_t root_bytes;
    uint64_t root_offset; /* of the path, without a slash at its end; followed by a NUL */
};

struct st_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t flags;
    uint64_t total_bytes;    /* of the file */
    uint64_t alive_until_ns; /* CLOCK_MONOTONIC */
    uint64_t generation;
    uint64_t key[2];     /* of st_hash */
    uint64_t mount_dev;  /* st_dev of the mount */
    uint32_t root;       /* the root directory's record */
    uint32_t uid;        /* the agent's user; a process of another user leaves every call to the mount */
    struct st_table names;   /* struct st_name, open addressing, linear probing from a & (capacity - 1) */
    struct st_table records; /* struct st_record; number 0 is never used */
    struct st_table labels;  /* struct st_label; number 0 is never used */
    struct st_table dirs;    /* struct st_dir, probing from st_mix(ino) & (capacity - 1) */
    struct st_table plain;   /* struct st_plain, probing from st_mix(backing_ino + device) & (capacity - 1) */
    uint32_t device_count;
    uint32_t moves; /* grows before and after a directory is moved on the tiers */
    struct st_device devices[ST_DEVICES_MAX];
};

/* Name in a directory → record. `a` 0: never used, the end of a probe; 1: was used. */
struct st_name {
    uint64_t a, b; /* st_hash(parent's id, name) */
    uint64_t id;   /* the record's `id` must be this */
    uint32_t record;
    uint32_t reserved;
};

struct st_record {
    uint32_t seq;
    uint32_t flags;
    uint64_t id; /* 0: free. Never given to another file */
    uint64_t ino;
    uint64_t backing_ino; /* of the plain file; 0 without one */
    uint32_t device;
    uint32_t mode; /* type and permissions */
    uint32_t uid, gid;
    uint32_t nlink;
    uint32_t label; /* directories: their own name and parent */
    uint64_t rdev;
    uint64_t size_bytes;
    uint64_t blocks; /* of 512 bytes */
    int64_t atime_s, mtime_s, ctime_s;
    uint32_t atime_ns, mtime_ns, ctime_ns;
    uint32_t reserved;
};

/* The place of a directory: read under its record's `seq`. */
struct st_label {
    uint32_t parent; /* record; the root's is itself */
    uint32_t name_bytes;
    uint8_t name[ST_NAME_BYTES_MAX + 1];
};

/* Inode number of a directory as programs see it → record (whose `ino` must be the same). Record 0: never used; ~0: was
 * used.
 */
struct st_dir {
    uint64_t ino;
    uint32_t record;
    uint32_t reserved;
};

/* Plain file → record (whose `device` and `backing_ino` must be the same). Record 0: never used; ~0: was used. */
struct st_plain {
    uint64_t backing_ino;
    uint32_t device;
    uint32_t record;
};

/* ---- The ring: next to the index, under its name plus ".ring"; programs write it too. An entry is a number taken from
 * `next`. Its slot is number `entry % ST_INTAKE_ENTRIES`. The slot belongs to the entry if its `state` is `entry << 3 | phase`.
 */

#define ST_RING_MAGIC UINT64_C(0x474e49524b4e4154) /* "TANKRING" */
#define ST_INTAKE_ENTRIES 1024u
#define ST_INTAKE_FREE 0u    /* may be taken; or was, by a program that got no further */
#define ST_INTAKE_MADE 1u    /* the program is about to create the plain file */
#define ST_INTAKE_DONE 2u    /* the plain file exists, and `dev` and `ino` are its */
#define ST_INTAKE_VOID 3u    /* no file was created */
#define ST_INTAKE_REVOKED 4u /* by the agent, after its time limit: a file created now does not count */
#define ST_INTAKE_SKIP 5u    /* the slot is retired: the program with the revoked entry may still write there */

struct st_ring {
    uint64_t magic;
    uint32_t layout;
    uint32_t entries;
    uint64_t epoch; /* grows when a delegation ends: earlier look-ups are void */
    uint64_t turn;  /* odd: slots are being returned. A reader that finds it changed reads the slots again */
    uint64_t first; /* the oldest entry that may be read */
    uint64_t limit; /* at most this many entries may wait for the agent; beyond that the shim sends a request */
    uint64_t giving; /* number of sent descriptors of which the agent still has a copy: meanwhile no file is created */
    uint64_t unused;
    uint64_t next; /* in a cache line of its own */
    uint64_t filler[7];
};
#define ST_RING_SLOTS_OFFSET 4096u

struct st_intake_entry {
    uint64_t state;
    uint64_t number; /* of the file's inode, by the agent */
    uint64_t dir; /* id of the directory's record */
    uint64_t dev, ino;
    uint32_t run; /* the program's, or 0 */
    uint32_t mode; /* permissions, the umask applied */
    uint32_t device;
    uint32_t name_bytes;
    uint32_t uid, gid; /* of the plain file */
    uint8_t name[ST_NAME_BYTES_MAX + 1];
};

static inline uint64_t st_fold(uint64_t x, uint64_t y)
{
    unsigned __int128 product = (unsigned __int128)x * y;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t st_mix(uint64_t x)
{
    return st_fold(x ^ UINT64_C(0x9e3779b97f4a7c15), UINT64_C(0xd6e8feb86659fd93));
}

static inline uint64_t st_load8(const char *at)
{
    uint64_t word;
    __builtin_memcpy(&word, at, 8);
    return word;
}

static inline uint64_t st_load4(const char *at)
{
    uint32_t word;
    __builtin_memcpy(&word, at, 4);
    return word;
}

/* 128 bits under a random key: names are not compared afterwards. It reads words of 8 bytes; the last one ends where
 * the name ends and may overlap the one before. A shorter name is covered completely, with some bytes read twice.
 */
static inline void st_hash(const uint64_t key[2], uint64_t parent, const char *name, uint64_t bytes, uint64_t *a, uint64_t *b)
{
    uint64_t x = st_fold(key[0] ^ parent, UINT64_C(0xa0761d6478bd642f));
    uint64_t y = st_fold(key[1] ^ parent, UINT64_C(0xe7037ed1a0b428db));
    for (uint64_t at = 0; at < bytes; at += 8) {
        uint64_t word;
        if (bytes - at >= 8)
            word = st_load8(name + at);
        else if (bytes >= 8)
            word = st_load8(name + bytes - 8);
        else if (bytes >= 4)
            word = st_load4(name) | st_load4(name + bytes - 4) << 32;
        else
            word = (uint64_t)(unsigned char)name[0] | (uint64_t)(unsigned char)name[bytes / 2] << 8 |
                   (uint64_t)(unsigned char)name[bytes - 1] << 16;
        x = st_fold(x ^ word, UINT64_C(0x8ebc6af09c88c6e3));
        y = st_fold(y ^ word, UINT64_C(0x589965cc75374cc3));
    }
    x = st_fold(x ^ bytes, UINT64_C(0x1d8e4e27c47d124f));
    y = st_fold(y ^ bytes, UINT64_C(0xeb44accab455d165));
    *a = x < 2 ? x + 2 : x;
    *b = y;
}

/* ---- The socket: SOCK_SEQPACKET, alternately one request and one reply, each one message. */

#define ST_OPEN 1u    /* open for writing, or create: directory + name */
#define ST_SYNC 2u    /* fsync of a plain file: dev + ino */
#define ST_SETATTR 3u /* dev + ino */
#define ST_SETATTR_NAMED 4u /* directory + name; an earlier agent answers EINVAL */
/* Sets or gets an attribute of directory + name; the attribute's name begins with "user.". After the name come the
 * attribute's name, of `mode` bytes, and its new value, of `valid` bytes. To get a value, `valid` is the room for it;
 * the value follows the reply.
 */
#define ST_SETXATTR 5u
#define ST_GETXATTR 6u
#define ST_MORE_BYTES_MAX 1024u /* after the name */
#define ST_VALUE_BYTES_MAX 4096u /* after the reply */

/* ST_OPEN's `valid`: the program sent it before, to an agent that was killed; `dev` and `ino` identify the request. */
#define ST_AGAIN 1u

/* ST_SETATTR's `valid`. */
#define ST_SET_MODE 1u
#define ST_SET_UID 2u
#define ST_SET_GID 4u
#define ST_SET_ATIME 8u
#define ST_SET_MTIME 16u
#define ST_SET_ATIME_NOW 32u
#define ST_SET_MTIME_NOW 64u

struct st_request {
    uint32_t op;
    uint32_t flags; /* open's */
    uint32_t mode;  /* permissions, the caller's umask applied */
    uint32_t valid;
    uint64_t dir; /* id of the directory's record */
    uint64_t dev, ino;
    uint32_t uid, gid;
    int64_t atime_s, mtime_s;
    uint32_t atime_ns, mtime_ns;
    uint32_t name_bytes;
    uint32_t more_bytes; /* after the name */
    uint8_t name[ST_NAME_BYTES_MAX + 1]; /* only `name_bytes` of it are sent */
};

/* With ST_OPEN and status 0 the message carries the descriptor. */
struct st_reply {
    int32_t status; /* 0: done; > 0: this errno; ST_ASK_MOUNT */
    uint32_t value_bytes; /* with ST_GETXATTR */
};
#define ST_ASK_MOUNT (-1) /* make the system call as if there were no shim */

#endif
