/* A batch of ranges: which bytes whoever asks reads next, where they lie, and the digests of chunks that have landed.
 *
 * Arithmetic and digests only: moves no byte, and does not know how bytes come from the source.
 */

#include "tensorhub.h"

#include <errno.h>
#include <string.h>

/* Claimed at once behind the chunks: deadlines and cancellation are seen in between, and 8 MiB take about 2 ms. */
#define CLAIM_BYTES_MAX (8u << 20)
/* Chunks claimed at once: about what a core's own cache holds, so that they are digested out of it. One at least. */
#define CHUNKS_BYTES_MAX (1u << 20)

int th_batch_open(struct batch *batch, const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes,
                  uint64_t ranges, const uint64_t *firsts, uint64_t *digests, uint64_t chunks, int64_t deadline_ns)
{
    memset(batch, 0, sizeof *batch);
    batch->remote = remote;
    batch->local = local;
    batch->nbytes = nbytes;
    batch->ranges = ranges;
    batch->firsts = firsts;
    batch->digests = digests;
    batch->chunks = chunks;
    batch->range = chunks > 0 ? firsts[chunks] : 0;
    batch->deadline_ns = deadline_ns;
    return pthread_mutex_init(&batch->claim, NULL);
}

void th_batch_close(struct batch *batch) { pthread_mutex_destroy(&batch->claim); }

/* ------------------------------------------------------------------ claims */

static uint64_t bytes_of(const struct batch *batch, uint64_t first, uint64_t last)
{
    uint64_t total = 0;
    for (uint64_t range = first; range < last; range++)
        total += batch->nbytes[range];
    return total;
}

static uint64_t bytes_of_next_chunk(const struct batch *batch)
{
    return bytes_of(batch, batch->firsts[batch->chunk], batch->firsts[batch->chunk + 1]);
}

static void claim_chunks(struct batch *batch, struct claim *claim)
{
    claim->from.range = batch->firsts[batch->chunk];
    claim->chunk = batch->chunk;
    uint64_t next = bytes_of_next_chunk(batch);
    do {
        claim->nbytes += next;
        batch->chunk++;
        if (batch->chunk == batch->chunks)
            break;
        next = bytes_of_next_chunk(batch);
    } while (claim->nbytes + next <= CHUNKS_BYTES_MAX);
    claim->chunk_end = batch->chunk;
}

static void claim_bytes(struct batch *batch, struct claim *claim)
{
    claim->from.range = batch->range;
    claim->from.offset = batch->offset;
    while (batch->range < batch->ranges && claim->nbytes < CLAIM_BYTES_MAX) {
        uint64_t left = batch->nbytes[batch->range] - batch->offset;
        uint64_t room = CLAIM_BYTES_MAX - claim->nbytes;
        uint64_t length = left < room ? left : room;
        claim->nbytes += length;
        batch->offset += length;
        if (length == left) {
            batch->range++;
            batch->offset = 0;
        }
    }
}

void th_batch_claim(struct batch *batch, struct claim *claim)
{
    memset(claim, 0, sizeof *claim);
    pthread_mutex_lock(&batch->claim);
    if (batch->chunk < batch->chunks)
        claim_chunks(batch, claim);
    else
        claim_bytes(batch, claim);
    pthread_mutex_unlock(&batch->claim);
}

bool th_batch_goes_on(struct batch *batch)
{
    if (atomic_load(&batch->cancelled) || atomic_load(&batch->error) || atomic_load(&batch->timed_out))
        return false;
    if (th_now_ns() < batch->deadline_ns)
        return true;
    atomic_store(&batch->timed_out, 1);
    return false;
}

/* ------------------------------------------------------------------ places */

size_t th_batch_vectors(const struct batch *batch, const uint64_t *addresses, struct place from, uint64_t nbytes,
                        struct iovec *vectors, size_t vectors_max, uint64_t *bytes)
{
    size_t n = 0;
    uint64_t taken = 0;
    while (n < vectors_max && taken < nbytes) {
        uint64_t length = batch->nbytes[from.range] - from.offset;
        if (length > nbytes - taken)
            length = nbytes - taken;
        vectors[n].iov_base = (void *)(uintptr_t)(addresses[from.range] + from.offset);
        vectors[n].iov_len = length;
        taken += length;
        n++;
        from.range++;
        from.offset = 0;
    }
    *bytes = taken;
    return n;
}

void th_batch_advance(const struct batch *batch, struct place *place, uint64_t nbytes)
{
    place->offset += nbytes;
    while (place->range < batch->ranges && place->offset >= batch->nbytes[place->range])
        place->offset -= batch->nbytes[place->range++];
}

/* ------------------------------------------------------------------ digests */

/* Whether the ranges follow each other in local memory: then their bytes are one run. */
static bool is_one_run(const struct batch *batch, uint64_t first, uint64_t last)
{
    for (uint64_t range = first; range + 1 < last; range++)
        if (batch->local[range] + batch->nbytes[range] != batch->local[range + 1])
            return false;
    return true;
}

int th_batch_digest(struct batch *batch, const struct claim *claim)
{
    for (uint64_t c = claim->chunk; c < claim->chunk_end; c++) {
        uint64_t first = batch->firsts[c], last = batch->firsts[c + 1];
        if (is_one_run(batch, first, last)) {
            batch->digests[c] = th_digest(batch->local[first], bytes_of(batch, first, last));
            continue;
        }
        uint64_t whole[2] = {0, last - first};
        int error = th_digest_runs(batch->local + first, batch->nbytes + first, whole, 1, batch->digests + c, NULL);
        if (error != 0)
            return error;
    }
    return 0;
}
