/* A batch of ranges that threads work off together: claims, places, and what becomes of chunks that have landed. */

#ifndef TENSORHUB_BATCH_H
#define TENSORHUB_BATCH_H

#include "block.h"

/* What turns a batch into one that is followed: its chunks may not be at the source yet, and each is verified, counted
 * and shown to others the moment it has landed. Handed over by Python, where `_Follow` in follow.py mirrors it; nothing
 * here is written but through `done` and `told`.
 *
 * Of a verified batch, the last range of each chunk is its digest at the source, 8 bytes, and lands where the reader
 * keeps it; so it is read below the same watermark as the chunk, and after it. Between the two the source's generation is
 * looked at: what is settled was read while it was the granted one. */
struct follow {
    const uint64_t *numbers; /* of the batch's chunks in the stream, ascending */
    uint8_t *done;           /* of each chunk: 1 once it has landed, and is what its digest says */
    _Atomic uint64_t *told;  /* for whoever looks meanwhile: chunks of the verified prefix, bytes verified,
                                bytes landed with the digests among them */
    uint64_t whole;          /* chunks of the stream: the prefix, once nothing is to do */
    uint64_t source_block;   /* the source's progress block, there */
    uint64_t own_block;      /* in which the prefix is shown, or 0 */
    uint8_t generation[BLOCK_GENERATION_BYTES]; /* of the source, as granted */
    int64_t stall_ns;        /* without a byte for so long, the batch has met its deadline */
    uint64_t is_verified;
};

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
    uint64_t *digests; /* written, unless followed */
    uint64_t chunks;
    uint64_t chunk;         /* the first chunk nobody has claimed */
    uint64_t range, offset; /* the first byte behind the chunks that nobody has claimed */
    int64_t deadline_ns;
    _Atomic uint64_t bytes_done;
    _Atomic int32_t error, timed_out, cancelled;

    const struct follow *follow; /* or NULL, and then nothing below is used */
    _Atomic uint64_t limit;      /* chunks of the stream that are known to be at the source, and may be claimed */
    _Atomic int64_t moved_ns;    /* when the last byte landed */
    _Atomic uint64_t wrong;      /* number of a chunk that is not what its digest says, plus 1 */
    pthread_mutex_t show;        /* guards these, and the writing of the own block */
    int64_t shown_ns;            /* when the own block was last written */
    uint64_t prefix;             /* the first chunk of the batch that is not done */
};

/* A byte of the batch: never at the end of a range, except behind the last byte of all. */
struct place {
    uint64_t range, offset;
};

/* Bytes to read from a place in the batch on, and the chunks that are then complete. */
struct claim {
    struct place from;
    uint64_t nbytes; /* 0: nothing is left to claim, or nothing below the limit */
    uint64_t chunk, chunk_end;
};

/* Returns 0 or errno. */
int th_batch_open(struct batch *batch, const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes,
                  uint64_t ranges, const uint64_t *firsts, uint64_t *digests, uint64_t chunks, int64_t deadline_ns,
                  const struct follow *follow);
void th_batch_close(struct batch *batch);

void th_batch_claim(struct batch *batch, struct claim *claim);

/* Whether chunks are left that nobody has claimed. */
bool th_batch_has_more(struct batch *batch);

/* False once the batch was cancelled, has failed or met its deadline; notes the last. */
bool th_batch_goes_on(struct batch *batch);

/* When it meets its deadline, as things are. */
int64_t th_batch_deadline_ns(struct batch *batch);

/* So many bytes have landed; returns how many that makes. */
uint64_t th_batch_landed(struct batch *batch, uint64_t nbytes);

/* The vectors of at most `nbytes` bytes from a place on, in the memory that `addresses` tells; returns their number,
 * at most `vectors_max`, and the bytes in them. */
size_t th_batch_vectors(const struct batch *batch, const uint64_t *addresses, struct place from, uint64_t nbytes,
                        struct iovec *vectors, size_t vectors_max, uint64_t *bytes);

/* `nbytes` further; nothing is asked about a place behind the last byte. */
void th_batch_advance(const struct batch *batch, struct place *place, uint64_t nbytes);

/* Whoever waits for the source calls this now and then: the own block shows that this process lives, and waits. */
void th_batch_beat(struct batch *batch);

/* How long to wait at most until the next beat. */
#define BEAT_NS 100000000

/* A chunk has landed whole: digests it; if followed, verifies, counts and shows it. Returns 0 or errno; EBADMSG: it is
 * not what its digest says, and is noted as wrong. */
int th_batch_settle(struct batch *batch, uint64_t chunk);

#endif
