/* Which bytes of this process's memory may be sent: the counted union of registered ranges. */

#ifndef TENSORHUB_SERVED_H
#define TENSORHUB_SERVED_H

#include "tensorhub.h"

/* A stretch of memory that `count` registrations cover; 0 is never kept. */
struct stretch {
    uint64_t start, end;
    uint32_t count;
};

/* Stretches rise, and two that touch differ in their count: there are at most twice as many as distinct ranges.
 *
 * Whoever sends holds the lock to read from before it looks until its bytes are out of the memory; a removal holds it
 * to write. So memory is untouched once a removal has returned, and a removal waits for one non-blocking send. */
struct served {
    pthread_rwlock_t lock;
    struct stretch *stretches;
    size_t n, room;
    uint64_t removals; /* unchanged: what was covered still is */
};

/* These four return 0 or errno: ENOMEM; EINVAL for a removal of what is not covered. */
int th_served_open(struct served *served);
int th_served_add(struct served *served, uint64_t address, uint64_t nbytes);
int th_served_remove(struct served *served, uint64_t address, uint64_t nbytes);
void th_served_close(struct served *served);

/* Whether every byte is registered. The caller holds the lock. */
bool th_served_covers(const struct served *served, uint64_t address, uint64_t nbytes);

#endif
