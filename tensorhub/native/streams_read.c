/* The reader's end of streams: threads that ask for what they claim of a batch, and land it where it belongs.
 *
 * The next requests are on their way while the current reply arrives; bytes land in place; each chunk is digested the
 * moment it is complete. Says what happened, never what it means: that is `transport/tcp.py`. A stream on which
 * anything went wrong is never used again, so no late byte can land in a later read.
 */

#include "streams_read.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Asked for ahead of what has landed, on one stream; one request at least. With 2 MiB both ends wait for each other so
 * often that a byte costs a fifth more; more than 8 MiB saves nothing. Long lines will need a window here that grows
 * with the line. */
#define AHEAD_BYTES (8u << 20)
/* Requests of tiny ranges are this many thousands of them: 100 000 are asked for in a dozen turns. */
#define AHEAD_REQUESTS_MAX 8
/* A second stream to a source pays where the processors are the limit. Where a line is, it only makes chunks of one
 * stretch arrive side by side instead of one after the other, and all that follow wait for both. */
#define FAST_BYTES_PER_S 1000000000
#define FAST_LOOK_NS_MIN 5000000
#define FAST_LOOK_NS_MAX 100000000

EXPORT int th_streams_open(const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes, uint64_t ranges,
                           const uint64_t *firsts, uint64_t *digests, uint64_t chunks, int64_t deadline_ns,
                           const struct follow *follow, struct stream_reading **out)
{
    struct stream_reading *reading = calloc(1, sizeof *reading);
    if (reading == NULL)
        return ENOMEM;
    int error =
        th_batch_open(&reading->batch, remote, local, nbytes, ranges, firsts, digests, chunks, deadline_ns, follow);
    if (error == 0 && (error = pthread_mutex_init(&reading->lock, NULL)) != 0)
        th_batch_close(&reading->batch);
    if (error != 0) {
        free(reading);
        return error;
    }
    reading->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (reading->wake < 0) {
        error = errno;
        th_batch_close(&reading->batch);
        pthread_mutex_destroy(&reading->lock);
        free(reading);
        return error;
    }
    for (uint64_t i = 0; i < ranges; i++)
        reading->total += nbytes[i];
    *out = reading;
    return 0;
}

EXPORT void th_streams_close(struct stream_reading *reading)
{
    close(reading->wake);
    th_batch_close(&reading->batch);
    pthread_mutex_destroy(&reading->lock);
    free(reading);
}

/* Every thread of the read stops waiting: it is cancelled, has failed, or is done. */
static void wake_all(struct stream_reading *reading)
{
    uint64_t one = 1;
    (void)!write(reading->wake, &one, sizeof one); /* fails only where it rings already */
}

EXPORT void th_streams_cancel(struct stream_reading *reading)
{
    atomic_store(&reading->batch.cancelled, 1);
    wake_all(reading);
}

/* Nobody could begin: whoever waits to join returns, at once and without a failure of its own. */
EXPORT void th_streams_give_up(struct stream_reading *reading)
{
    atomic_store(&reading->batch.error, 1);
    wake_all(reading);
}

EXPORT void th_streams_outcome(struct stream_reading *reading, struct stream_outcome *out)
{
    pthread_mutex_lock(&reading->lock);
    *out = reading->outcome;
    pthread_mutex_unlock(&reading->lock);
    out->bytes_done = atomic_load(&reading->batch.bytes_done);
    out->timed_out = atomic_load(&reading->batch.timed_out);
    out->cancelled = atomic_load(&reading->batch.cancelled);
}

static void fail(struct stream_reading *reading, struct stream_outcome outcome)
{
    pthread_mutex_lock(&reading->lock);
    if (reading->outcome.failure == NO_FAILURE)
        reading->outcome = outcome;
    pthread_mutex_unlock(&reading->lock);
    atomic_store(&reading->batch.error, 1);
    wake_all(reading);
}

/* ------------------------------------------------------------------ asking and landing */

/* A part of a claim, of at most what one request may ask for. */
struct asked {
    struct place from;
    uint64_t number, nbytes;
    uint64_t chunk, chunk_end; /* of its claim */
    bool begins_claim;
};

/* One thread's part in a read: a queue of what was asked for and has not landed. */
struct lander {
    struct stream_reading *reading;
    struct stream *stream;
    struct channel channel;
    struct claim claim; /* what is left of it to ask for, from `next` on */
    struct place next;
    uint64_t claim_left;
    uint64_t marked; /* the chunk that the next range to ask for belongs to, where it is followed */
    struct asked asked[AHEAD_REQUESTS_MAX]; /* a ring */
    size_t first, n;
    uint64_t ahead_bytes;
    uint8_t frame[REQUEST_FRAME_BYTES_MAX]; /* the request that is being sent */
    size_t frame_at, frame_bytes;
    uint8_t head[REPLY_BYTES]; /* of the reply that is being received */
    size_t head_bytes;
    struct place landing;
    uint64_t landing_left;
    uint64_t chunk; /* the first of the claim that has not landed whole */
};

enum step { MOVED, STUCK, FAILED };

static enum step failed(struct lander *lander, enum failure failure, int error)
{
    fail(lander->reading, (struct stream_outcome){.failure = failure, .error = error});
    return FAILED;
}

static bool claim_more(struct lander *lander)
{
    th_batch_claim(&lander->reading->batch, &lander->claim);
    lander->next = lander->claim.from;
    lander->claim_left = lander->claim.nbytes;
    lander->marked = lander->claim.chunk;
    return lander->claim_left > 0;
}

static size_t put_ranges(uint8_t *at, size_t range_bytes, const struct iovec *ranges, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        th_put64(at + i * range_bytes, (uint64_t)(uintptr_t)ranges[i].iov_base);
        th_put64(at + i * range_bytes + 8, ranges[i].iov_len);
    }
    return n * range_bytes;
}

/* The gate, and ranges that each may leave once the source's watermark has passed their chunk. */
static size_t put_gated(struct lander *lander, uint8_t *at, const struct iovec *ranges, size_t n)
{
    const struct batch *batch = &lander->reading->batch;
    const struct follow *follow = batch->follow;
    th_put64(at, follow->source_block);
    memcpy(at + 8, follow->generation, BLOCK_GENERATION_BYTES);
    for (size_t i = 0; i < n; i++) {
        while (lander->next.range + i >= batch->firsts[lander->marked + 1])
            lander->marked++;
        th_put64(at + GATE_BYTES + i * GATED_RANGE_BYTES + RANGE_BYTES, follow->numbers[lander->marked] + 1);
    }
    return GATE_BYTES + put_ranges(at + GATE_BYTES, GATED_RANGE_BYTES, ranges, n);
}

/* Puts the next request into the frame, claiming more if need be; false when there is nothing to ask for now. */
static bool next_request(struct lander *lander)
{
    struct batch *batch = &lander->reading->batch;
    if (lander->n == AHEAD_REQUESTS_MAX || (lander->n > 0 && lander->ahead_bytes >= AHEAD_BYTES))
        return false;
    bool begins_claim = lander->claim_left == 0;
    if (begins_claim && !claim_more(lander))
        return false;
    struct iovec ranges[REQUEST_RANGES_MAX];
    uint64_t wanted = lander->claim_left < REQUEST_BYTES_MAX ? lander->claim_left : REQUEST_BYTES_MAX, nbytes;
    size_t n = th_batch_vectors(batch, batch->remote, lander->next, wanted, ranges, REQUEST_RANGES_MAX, &nbytes);
    struct asked *asked = &lander->asked[(lander->first + lander->n) % AHEAD_REQUESTS_MAX];
    *asked = (struct asked){lander->next,         lander->stream->requests++, nbytes, lander->claim.chunk,
                            lander->claim.chunk_end, begins_claim};
    uint8_t *body = lander->frame + REQUEST_BYTES;
    size_t body_bytes = batch->follow != NULL ? put_gated(lander, body, ranges, n)
                                              : put_ranges(body, RANGE_BYTES, ranges, n);
    th_put32(lander->frame, batch->follow != NULL ? KIND_FOLLOW : KIND_READ);
    th_put32(lander->frame + 4, (uint32_t)n);
    th_put64(lander->frame + 8, asked->number);
    th_put64(lander->frame + 16, nbytes);
    lander->claim_left -= nbytes;
    th_batch_advance(batch, &lander->next, nbytes);
    lander->n++;
    lander->ahead_bytes += nbytes;
    lander->frame_at = 0;
    lander->frame_bytes = REQUEST_BYTES + body_bytes;
    return true;
}

static enum step ask(struct lander *lander)
{
    if (lander->frame_at == lander->frame_bytes && !next_request(lander))
        return STUCK;
    struct iovec left = {lander->frame + lander->frame_at, lander->frame_bytes - lander->frame_at};
    ssize_t sent = th_channel_send(&lander->channel, &left, 1);
    if (sent < 0)
        return failed(lander, LOST, errno);
    lander->frame_at += (size_t)sent;
    return sent > 0 ? MOVED : STUCK;
}

/* Notes which range the source refused, as it was asked for. */
static enum step refused(struct lander *lander, const struct asked *asked, int status, uint32_t index)
{
    const struct batch *batch = &lander->reading->batch;
    struct stream_outcome outcome = {.failure = REFUSED, .status = status};
    struct iovec ranges[REQUEST_RANGES_MAX];
    uint64_t bytes;
    size_t n =
        th_batch_vectors(batch, batch->remote, asked->from, asked->nbytes, ranges, REQUEST_RANGES_MAX, &bytes);
    if (index >= n)
        return failed(lander, GARBLED, 0);
    outcome.address = (uint64_t)(uintptr_t)ranges[index].iov_base;
    outcome.nbytes = ranges[index].iov_len;
    fail(lander->reading, outcome);
    return FAILED;
}

static enum step land_head(struct lander *lander, const struct asked *asked)
{
    struct iovec left = {lander->head + lander->head_bytes, REPLY_BYTES - lander->head_bytes};
    ssize_t got = th_channel_receive(&lander->channel, &left, 1);
    if (got < 0)
        return failed(lander, LOST, errno);
    lander->head_bytes += (size_t)got;
    if (lander->head_bytes < REPLY_BYTES)
        return got > 0 ? MOVED : STUCK;
    uint32_t status = th_get32(lander->head);
    if (th_get64(lander->head + 8) != asked->number)
        return failed(lander, GARBLED, 0);
    if (status != SERVED)
        return refused(lander, asked, (int)status, th_get32(lander->head + 4));
    if (th_get64(lander->head + 16) != asked->nbytes)
        return failed(lander, GARBLED, 0);
    lander->landing = asked->from;
    lander->landing_left = asked->nbytes;
    if (asked->begins_claim)
        lander->chunk = asked->chunk;
    return MOVED;
}

/* Settles the chunks that have landed whole; false once the read has failed. */
static bool settle(struct lander *lander, const struct asked *asked)
{
    struct batch *batch = &lander->reading->batch;
    while (lander->chunk < asked->chunk_end && lander->landing.range >= batch->firsts[lander->chunk + 1]) {
        int error = th_batch_settle(batch, lander->chunk);
        if (error != 0) {
            struct stream_outcome outcome = {.failure = error == EBADMSG ? WRONG : LOCAL, .error = error};
            outcome.wrong = error == EBADMSG ? batch->follow->numbers[lander->chunk] : 0;
            fail(lander->reading, outcome);
            return false;
        }
        lander->chunk++;
    }
    return true;
}

/* Whoever lands the last byte of the batch lets the others go: one may wait for a connection it needs no more. */
static enum step land_bytes(struct lander *lander, const struct asked *asked)
{
    struct batch *batch = &lander->reading->batch;
    struct iovec vectors[CALL_RANGES_MAX];
    uint64_t bytes;
    size_t n = th_batch_vectors(batch, batch->local, lander->landing, lander->landing_left, vectors, CALL_RANGES_MAX,
                                &bytes);
    ssize_t got = th_channel_receive(&lander->channel, vectors, n);
    if (got < 0)
        return failed(lander, errno == EFAULT ? LOCAL : LOST, errno);
    uint64_t landed = th_batch_landed(batch, (uint64_t)got); /* also what turns out to be wrong */
    th_batch_advance(batch, &lander->landing, (uint64_t)got);
    lander->landing_left -= (uint64_t)got;
    if (!settle(lander, asked))
        return FAILED;
    if (lander->landing_left == 0) {
        lander->first = (lander->first + 1) % AHEAD_REQUESTS_MAX;
        lander->n--;
        lander->ahead_bytes -= asked->nbytes;
        lander->head_bytes = 0;
    }
    if (got > 0 && landed == lander->reading->total)
        wake_all(lander->reading);
    return got > 0 ? MOVED : STUCK;
}

static enum step land(struct lander *lander)
{
    if (lander->n == 0)
        return STUCK;
    const struct asked *asked = &lander->asked[lander->first];
    return lander->head_bytes < REPLY_BYTES ? land_head(lander, asked) : land_bytes(lander, asked);
}

/* Takes part in a read until nothing is left to claim, or it failed, was cancelled or met its deadline; no byte is
 * written by this thread afterwards. Returns 1 if the stream may be used again: nothing is on its way on it. */
EXPORT int th_stream_run(struct stream *stream, struct stream_reading *reading)
{
    struct lander lander; /* 17 KiB, of which little needs to be zero */
    memset(&lander, 0, offsetof(struct lander, frame));
    lander.frame_at = lander.frame_bytes = lander.head_bytes = 0;
    lander.reading = reading;
    lander.stream = stream;
    lander.channel = (struct channel){stream->fd, reading->wake};
    for (;;) {
        if (!th_batch_goes_on(&reading->batch))
            break;
        enum step asking = ask(&lander), landing = asking == FAILED ? FAILED : land(&lander);
        if (landing == FAILED)
            break;
        if (asking == MOVED || landing == MOVED)
            continue;
        bool sending = lander.frame_at < lander.frame_bytes;
        if (lander.n == 0 && !sending)
            return 1;
        short events = (short)(POLLIN | (sending ? POLLOUT : 0));
        int64_t until_ns = th_batch_deadline_ns(&reading->batch);
        if (reading->batch.follow != NULL && until_ns > th_now_ns() + BEAT_NS)
            until_ns = th_now_ns() + BEAT_NS;
        if (th_channel_wait(&lander.channel, events, until_ns) == WAIT_FAILED)
            failed(&lander, LOCAL, errno);
        th_batch_beat(&reading->batch);
    }
    return 0;
}

/* Whether another stream to the same source pays: returns once bytes come so fast, or with 0 once the read is over. */
EXPORT int th_streams_wait_fast(struct stream_reading *reading)
{
    uint64_t before = atomic_load(&reading->batch.bytes_done);
    int64_t look_ns = FAST_LOOK_NS_MIN;
    while (th_batch_goes_on(&reading->batch) && th_batch_has_more(&reading->batch)) {
        int64_t began_ns = th_now_ns();
        struct pollfd watched = {reading->wake, POLLIN, 0};
        struct timespec timeout = {0, look_ns};
        if (ppoll(&watched, 1, &timeout, NULL) > 0)
            return 0;
        uint64_t now = atomic_load(&reading->batch.bytes_done);
        if ((double)(now - before) * 1e9 >= (double)(th_now_ns() - began_ns) * FAST_BYTES_PER_S)
            return 1;
        before = now;
        look_ns = 2 * look_ns < FAST_LOOK_NS_MAX ? 2 * look_ns : FAST_LOOK_NS_MAX;
    }
    return 0;
}
