/* Reads an index as the shim does while the agent's own writer writes it (crates/surgetank/src/shimdoor/tests.rs):
 * every result must be of one moment. usage: torn INDEX, until the file INDEX.over exists; prints how much it read.
 */
#define _GNU_SOURCE
#include "../index.c"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct st_process st_process;

/* The writer derives every field from a round's number. */
static bool is_of_one_moment(const struct st_record *record)
{
    uint64_t round = record->size_bytes;
    return record->blocks == round && record->mtime_s == (int64_t)round && record->atime_s == (int64_t)round &&
           record->ctime_s == (int64_t)round && record->mtime_ns == round % 1000 && record->atime_ns == round % 1000 &&
           record->ctime_ns == round % 1000 && record->uid == (uint32_t)round && record->gid == (uint32_t)round &&
           record->nlink == (uint32_t)(round % 7 + 1) && record->ino == 5000000 + record->id &&
           (!record->backing_ino || record->backing_ino == 9000000 + record->id);
}

int main(int count, char **words)
{
    struct stat file;
    char over[4096];
    int opened = count > 1 ? open(words[1], O_RDONLY) : -1;
    if (opened < 0 || fstat(opened, &file))
        return 2;
    snprintf(over, sizeof over, "%s.over", words[1]);
    struct st_domain domain = {.mapped_bytes = (uint64_t)file.st_size};
    domain.index = mmap(NULL, domain.mapped_bytes, PROT_READ, MAP_SHARED, opened, 0);
    uint64_t records = 0, named = 0, plain = 0, labels = 0;
    while (access(over, F_OK))
        for (int look = 0; look < 1000; look++) {
            const struct st_name *slot;
            struct st_name entry;
            struct st_record record;
            struct st_label label;
            uint32_t number;
            bool busy;
            if (st_index_name(&domain, 1, "current", 7, &slot, &entry) == ST_FOUND && entry.id &&
                st_index_read(&domain, entry.record, &record)) {
                records++;
                /* (A record that was given to another file has no content yet.) */
                if (record.flags & ST_KNOWN && !is_of_one_moment(&record))
                    return printf("torn: record %u of %lu\n", entry.record, record.id), 1;
                named += record.id == entry.id;
            }
            for (uint64_t id = 5; id < 7; id++)
                if (st_index_plain(&domain, 0, 9000000 + id, &record, &number, &busy)) {
                    plain++;
                    if (record.id != id || (record.flags & ST_KNOWN && !is_of_one_moment(&record)))
                        return printf("torn: plain file of %lu\n", id), 1;
                }
            if (st_index_directory(&domain, 5000010, &record, &number) && st_index_label(&domain, &record, number, &label)) {
                labels++;
                uint64_t bytes = record.size_bytes % 250 + 1;
                if (!is_of_one_moment(&record) || label.name_bytes != bytes)
                    return printf("torn: label of %lu\n", record.size_bytes), 1;
                for (uint64_t at = 0; at < bytes; at++)
                    if (label.name[at] != 'a' + record.size_bytes % 26)
                        return printf("torn: name in the label of %lu\n", record.size_bytes), 1;
            }
        }
    printf("%lu %lu %lu %lu\n", records, named, plain, labels);
    return 0;
}
