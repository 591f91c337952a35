/* What the files of the native library share: time, threads, digests, and the batch of ranges that readers work off.
 *
 * Decides nothing. Names that are not exported begin with `th_` all the same: the library has one name space.
 */

#ifndef TENSORHUB_H
#define TENSORHUB_H

#ifndef __linux__
#error "TensorHub's native library needs Linux: process_vm_readv, eventfd, per-thread priorities"
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define EXPORT __attribute__((visibility("default")))

/* The kernel takes no more vectors than this in one call. */
#define CALL_RANGES_MAX 1024
/* The largest chunk: nothing bigger is ever gathered to be digested. */
#define SCRATCH_BYTES_MAX (8u << 20)
/* Our threads need a few tens of KiB; thread-local storage of other libraries may need the rest. */
#define THREAD_STACK_BYTES (256u << 10)

int64_t th_now_ns(void);

/* A thread that takes no signals: they stay with the threads that expect them. Returns 0 or errno. */
int th_thread_start(pthread_t *thread, void *(*work)(void *), void *argument);

EXPORT uint64_t th_digest(uint64_t address, uint64_t nbytes);
EXPORT int th_digest_runs(const uint64_t *addresses, const uint64_t *nbytes, const uint64_t *firsts, uint64_t chunks,
                          uint64_t *out, _Atomic uint64_t *progress);

/* ------------------------------------------------------------------ a batch of ranges */

/* Range i copies nbytes[i] bytes from remote[i] to local[i]. Worked off by any number of threads at once: each claims
 * the next few MiB until none are left.
 *
 * The first ranges may be those of chunks, chunk c being ranges firsts[c] to firsts[c + 1]. They are claimed by whole
 * chunks, and whoever has read one digests it at once, while it is in this core's cache. */
struct batch {
    pthread_mutex_t claim; /* guards chunk, range, offset: a claim takes microseconds, so nobody waits for a copy */
    const uint64_t *remote, *local, *nbytes;
    uint64_t ranges;
    const uint64_t *firsts;
    uint64_t *digests;
    uint64_t chunks;
    uint64_t chunk;         /* the first chunk nobody has claimed */
    uint64_t range, offset; /* the first byte behind the chunks that nobody has claimed */
    int64_t deadline_ns;
    _Atomic uint64_t bytes_done;
    _Atomic int32_t error, timed_out, cancelled;
};

/* A byte of the batch: never at the end of a range, except behind the last byte of all. */
struct place {
    uint64_t range, offset;
};

/* Bytes to read from a place in the batch on, and the chunks that are then complete. */
struct claim {
    struct place from;
    uint64_t nbytes; /* 0: nothing is left to claim */
    uint64_t chunk, chunk_end;
};

/* Returns 0 or errno. */
int th_batch_open(struct batch *batch, const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes,
                  uint64_t ranges, const uint64_t *firsts, uint64_t *digests, uint64_t chunks, int64_t deadline_ns);
void th_batch_close(struct batch *batch);

void th_batch_claim(struct batch *batch, struct claim *claim);

/* False once the batch was cancelled, has failed or met its deadline; notes the last. */
bool th_batch_goes_on(struct batch *batch);

/* The vectors of at most `nbytes` bytes from a place on, in the memory that `addresses` tells; returns their number,
 * at most `vectors_max`, and the bytes in them. */
size_t th_batch_vectors(const struct batch *batch, const uint64_t *addresses, struct place from, uint64_t nbytes,
                        struct iovec *vectors, size_t vectors_max, uint64_t *bytes);

/* `nbytes` further; nothing is asked about a place behind the last byte. */
void th_batch_advance(const struct batch *batch, struct place *place, uint64_t nbytes);

/* Digests the chunks of a claim that has landed; returns 0 or errno. */
int th_batch_digest(struct batch *batch, const struct claim *claim);

#endif
