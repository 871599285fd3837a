/* The counts of programs about themselves in a run: a file in shared memory that the agent creates for each run, with
 * one slot per process. `crates/surgetank/src/shimdoor/counts.rs` is the same in Rust; a test compares the two.
 * docs/report.md says what is counted and what is not.
 *
 * Slots below `usable` are allocated before the file has a reader, so touching them cannot fail. A process takes a slot
 * by changing its state from FREE to LIVE, and adds to it without locks. The agent reads it at any time. When the
 * process has ended or the slot is DONE, the agent empties the slot and sets it FREE. Programs can write anything here:
 * no number can harm the agent. The agent does not map the file, because a program could truncate it.
 */
#ifndef SURGETANK_COUNTS_H
#define SURGETANK_COUNTS_H

#include <stdint.h>

#define ST_COUNTS_MAGIC UINT64_C(0x544e434b4e415453) /* "STANKCNT" */
#define ST_COUNTS_LAYOUT 2u
#define ST_SLOTS_MAX 4096u
#define ST_SLOTS_OFFSET 20480u
#define ST_SIZES 40u
#define ST_PROGRAM_BYTES 64u
#define ST_COMMAND_BYTES 512u

#define ST_SLOT_FREE 0u
#define ST_SLOT_LIVE 1u
#define ST_SLOT_DONE 2u

#define ST_IO_PLAIN 0u /* descriptors of plain files: directly on the tier */
#define ST_IO_MOUNT 1u /* descriptors of the mount */
#define ST_IOS 2u

struct st_io {
    uint64_t read_opens, write_opens, create_opens;
    uint64_t read_bytes, write_bytes; /* by calls that are in the sizes, and by stdio, whose calls are not seen */
    uint64_t stream_read_bytes, stream_write_bytes; /* of these, by stdio */
    uint64_t sync_calls;
    uint64_t map_calls, mapped_bytes;
    uint64_t read_ns, write_ns, sync_ns;
    uint64_t read_sizes[ST_SIZES];  /* calls that moved 2^(n-1) to 2^n - 1 bytes; 0: none; the last: that or more */
    uint64_t write_sizes[ST_SIZES];
};

/* /proc/self/io: rchar, wchar, syscr, syscw, read_bytes, write_bytes */
#define ST_KERNEL 6u

struct st_slot {
    uint32_t pid, parent;
    uint64_t begun_ns, ended_ns; /* CLOCK_MONOTONIC; 0: not yet */
    uint64_t kernel_ended[ST_KERNEL]; /* all 0: not read */
    struct st_io io[ST_IOS];
    uint8_t program[ST_PROGRAM_BYTES];
    uint8_t command[ST_COMMAND_BYTES]; /* words, each ended by a NUL */
};

struct st_counts {
    uint64_t magic;
    uint32_t layout;
    uint32_t slot_bytes;
    uint32_t usable;
    uint32_t lost; /* processes that found no slot */
    uint32_t states[ST_SLOTS_MAX];
};

#endif
