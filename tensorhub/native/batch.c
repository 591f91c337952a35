/* A batch of ranges: which bytes whoever asks reads next, where they lie, and what becomes of chunks that have landed.
 *
 * Arithmetic and digests only: moves no byte, and does not know how bytes come from the source.
 */

#include "batch.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

/* Claimed at once behind the chunks: deadlines and cancellation are seen in between, and 8 MiB take about 2 ms. */
#define CLAIM_BYTES_MAX (8u << 20)
/* Chunks claimed at once: about what a core's own cache holds, so that they are digested out of it. One at least. */
#define CHUNKS_BYTES_MAX (1u << 20)

int th_batch_open(struct batch *batch, const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes,
                  uint64_t ranges, const uint64_t *firsts, uint64_t *digests, uint64_t chunks, int64_t deadline_ns,
                  const struct follow *follow)
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
    batch->follow = follow;
    batch->limit = UINT64_MAX;
    batch->moved_ns = batch->shown_ns = th_now_ns();
    int error = pthread_mutex_init(&batch->claim, NULL);
    if (error == 0 && (error = pthread_mutex_init(&batch->show, NULL)) != 0)
        pthread_mutex_destroy(&batch->claim);
    return error;
}

void th_batch_close(struct batch *batch)
{
    pthread_mutex_destroy(&batch->show);
    pthread_mutex_destroy(&batch->claim);
}

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

static bool is_there(const struct batch *batch, uint64_t chunk)
{
    return batch->follow == NULL || batch->follow->numbers[chunk] < atomic_load(&batch->limit);
}

static void claim_chunks(struct batch *batch, struct claim *claim)
{
    if (!is_there(batch, batch->chunk))
        return;
    claim->from.range = batch->firsts[batch->chunk];
    claim->chunk = batch->chunk;
    uint64_t next = bytes_of_next_chunk(batch);
    do {
        claim->nbytes += next;
        batch->chunk++;
        if (batch->chunk == batch->chunks || !is_there(batch, batch->chunk))
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

bool th_batch_has_more(struct batch *batch)
{
    pthread_mutex_lock(&batch->claim);
    bool more = batch->chunk < batch->chunks;
    pthread_mutex_unlock(&batch->claim);
    return more;
}

int64_t th_batch_deadline_ns(struct batch *batch)
{
    if (batch->follow == NULL)
        return batch->deadline_ns;
    return atomic_load(&batch->moved_ns) + batch->follow->stall_ns;
}

bool th_batch_goes_on(struct batch *batch)
{
    if (atomic_load(&batch->cancelled) || atomic_load(&batch->error) || atomic_load(&batch->timed_out))
        return false;
    if (th_now_ns() < th_batch_deadline_ns(batch))
        return true;
    atomic_store(&batch->timed_out, 1);
    return false;
}

uint64_t th_batch_landed(struct batch *batch, uint64_t nbytes)
{
    if (batch->follow != NULL && nbytes > 0) {
        atomic_store(&batch->moved_ns, th_now_ns());
        atomic_fetch_add(&batch->follow->told[2], nbytes);
    }
    return atomic_fetch_add(&batch->bytes_done, nbytes) + nbytes;
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

static int digest_ranges(const struct batch *batch, uint64_t first, uint64_t last, uint64_t *digest)
{
    if (is_one_run(batch, first, last)) {
        *digest = th_digest(batch->local[first], bytes_of(batch, first, last));
        return 0;
    }
    uint64_t whole[2] = {0, last - first};
    return th_digest_runs(batch->local + first, batch->nbytes + first, whole, 1, digest, NULL);
}

static uint64_t watermark_of(const struct batch *batch)
{
    const struct follow *follow = batch->follow;
    return batch->prefix < batch->chunks ? follow->numbers[batch->prefix] : follow->whole;
}

/* The caller holds `show`. */
static void show_prefix(struct batch *batch)
{
    if (batch->follow->own_block != 0)
        th_block_show(batch->follow->own_block, watermark_of(batch));
    batch->shown_ns = th_now_ns();
}

/* Counts a chunk, and shows the prefix if that made it longer. */
static void show(struct batch *batch, uint64_t chunk, uint64_t nbytes)
{
    const struct follow *follow = batch->follow;
    pthread_mutex_lock(&batch->show);
    follow->done[chunk] = 1;
    atomic_fetch_add(&follow->told[1], nbytes);
    if (chunk == batch->prefix) {
        while (batch->prefix < batch->chunks && follow->done[batch->prefix])
            batch->prefix++;
        show_prefix(batch);
        atomic_store(&follow->told[0], watermark_of(batch));
    }
    pthread_mutex_unlock(&batch->show);
}

void th_batch_beat(struct batch *batch)
{
    if (batch->follow == NULL)
        return;
    pthread_mutex_lock(&batch->show);
    if (th_now_ns() - batch->shown_ns >= BEAT_NS)
        show_prefix(batch);
    pthread_mutex_unlock(&batch->show);
}

int th_batch_settle(struct batch *batch, uint64_t chunk)
{
    const struct follow *follow = batch->follow;
    uint64_t first = batch->firsts[chunk], last = batch->firsts[chunk + 1], digest;
    if (follow == NULL)
        return digest_ranges(batch, first, last, batch->digests + chunk);
    if (follow->is_verified) {
        uint64_t claimed;
        memcpy(&claimed, (const void *)(uintptr_t)batch->local[--last], sizeof claimed);
        int error = digest_ranges(batch, first, last, &digest);
        if (error != 0)
            return error;
        if (digest != le64toh(claimed)) {
            atomic_store(&batch->wrong, follow->numbers[chunk] + 1);
            return EBADMSG;
        }
    }
    show(batch, chunk, bytes_of(batch, first, last));
    return 0;
}
