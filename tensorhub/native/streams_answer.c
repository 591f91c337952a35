/* What a source says on one stream: it greets who knows it, reads requests, sends what is registered, or says why not.
 *
 * Trusts nothing it receives: every size has a limit, every wait a deadline. Copies nothing: sends go straight from
 * registered memory, and need no memory but this thread's stack.
 */

#include "streams_answer.h"

#include <errno.h>
#include <poll.h>

/* One send's bytes: a removal waits for it, and so does the look at the deadline. */
#define SEND_BYTES_MAX (1u << 20)

/* How long a thread that waits for a watermark does not notice that its reader has gone. */
#define GONE_NS 100000000

/* What was asked for. Ranges are shortened as they leave. */
struct request {
    uint64_t number, nbytes;
    uint32_t kind, n;
    uint64_t block; /* these two and the marks: only of one that follows */
    uint8_t generation[BLOCK_GENERATION_BYTES];
    struct iovec ranges[REQUEST_RANGES_MAX];
    uint64_t marks[REQUEST_RANGES_MAX];
};

/* ------------------------------------------------------------------ greeting */

/* In constant time, so that nobody learns an incarnation byte by byte: whoever knows it was told, and may read. */
static bool same_incarnation(const uint8_t *one, const uint8_t *other)
{
    uint8_t differs = 0;
    for (size_t i = 0; i < INCARNATION_BYTES; i++)
        differs |= one[i] ^ other[i];
    return differs == 0;
}

static bool send_greeting(const struct source *source, const struct channel *channel, enum status status,
                          int64_t deadline_ns)
{
    uint8_t greeting[GREETING_BYTES] = MAGIC;
    th_put16(greeting + 8, WIRE_VERSION);
    th_put16(greeting + 10, (uint16_t)status);
    if (status == SERVED)
        memcpy(greeting + 16, source->incarnation, INCARNATION_BYTES);
    return th_channel_send_all(channel, greeting, sizeof greeting, deadline_ns) == READY;
}

/* Whether the peer speaks our language and named this process. A peer that does not say the magic gets no answer. */
static bool greet(const struct source *source, const struct channel *channel, _Atomic bool *is_known)
{
    int64_t deadline_ns = th_now_ns() + source->limits.greeting_ns;
    uint8_t greeting[GREETING_BYTES], token[TOKEN_BYTES_MAX];
    if (th_channel_receive_all(channel, greeting, sizeof greeting, deadline_ns) != READY)
        return false;
    if (memcmp(greeting, MAGIC, MAGIC_BYTES) != 0)
        return false;
    uint16_t token_bytes = th_get16(greeting + 10);
    if (token_bytes > TOKEN_BYTES_MAX)
        return false;
    if (th_channel_receive_all(channel, token, token_bytes, deadline_ns) != READY)
        return false;
    enum status status = SERVED;
    if (th_get16(greeting + 8) != WIRE_VERSION)
        status = OTHER_VERSION;
    else if (!same_incarnation(greeting + 16, source->incarnation))
        status = OTHER_INCARNATION;
    if (status == SERVED)
        atomic_store(is_known, true);
    return send_greeting(source, channel, status, deadline_ns) && status == SERVED;
}

/* ------------------------------------------------------------------ requests */

static size_t body_bytes(const struct request *request)
{
    return request->kind == KIND_FOLLOW ? GATE_BYTES + request->n * (size_t)GATED_RANGE_BYTES
                                        : request->n * (size_t)RANGE_BYTES;
}

static bool parse_ranges(const uint8_t *ranges, size_t range_bytes, struct request *request)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < request->n; i++) {
        const uint8_t *range = ranges + i * range_bytes;
        uint64_t nbytes = th_get64(range + 8);
        if (nbytes == 0 || nbytes > request->nbytes - total)
            return false;
        total += nbytes;
        request->ranges[i].iov_base = (void *)(uintptr_t)th_get64(range);
        request->ranges[i].iov_len = nbytes;
    }
    return total == request->nbytes;
}

static bool parse_marks(const uint8_t *ranges, struct request *request)
{
    for (uint32_t i = 0; i < request->n; i++) {
        request->marks[i] = th_get64(ranges + i * GATED_RANGE_BYTES + RANGE_BYTES);
        if (i > 0 && request->marks[i] < request->marks[i - 1])
            return false;
    }
    return true;
}

/* Fills `request` from a whole body; false when it is not one that a reader sends. */
static bool parse_body(const uint8_t *body, struct request *request)
{
    if (request->kind == KIND_READ)
        return parse_ranges(body, RANGE_BYTES, request);
    request->block = th_get64(body);
    if (request->block % BLOCK_WORD_BYTES != 0)
        return false;
    memcpy(request->generation, body + 8, BLOCK_GENERATION_BYTES);
    return parse_ranges(body + GATE_BYTES, GATED_RANGE_BYTES, request) && parse_marks(body + GATE_BYTES, request);
}

static bool parse_head(const uint8_t *head, struct request *request)
{
    request->kind = th_get32(head);
    request->n = th_get32(head + 4);
    request->number = th_get64(head + 8);
    request->nbytes = th_get64(head + 16);
    return (request->kind == KIND_READ || request->kind == KIND_FOLLOW) && request->n > 0 &&
           request->n <= REQUEST_RANGES_MAX && request->nbytes <= REQUEST_BYTES_MAX;
}

static void send_refusal(const struct source *source, const struct channel *channel, const struct request *request,
                         enum status status, uint32_t index)
{
    uint8_t reply[REPLY_BYTES] = {0};
    th_put32(reply, (uint32_t)status);
    th_put32(reply + 4, index);
    th_put64(reply + 8, request->number);
    /* If this fails the peer sees the stream's end instead: as good. */
    (void)th_channel_send_all(channel, reply, sizeof reply, th_now_ns() + source->limits.reply_ns);
}

/* The next request; false when there is none any more, or none that can be trusted. */
static bool receive_request(const struct source *source, const struct channel *channel, struct request *request)
{
    uint8_t head[REQUEST_BYTES], body[REQUEST_BODY_BYTES_MAX];
    if (th_channel_wait(channel, POLLIN, th_now_ns() + source->limits.idle_ns) != READY)
        return false;
    int64_t deadline_ns = th_now_ns() + source->limits.request_ns;
    if (th_channel_receive_all(channel, head, sizeof head, deadline_ns) != READY)
        return false;
    if (parse_head(head, request)) {
        if (th_channel_receive_all(channel, body, body_bytes(request), deadline_ns) != READY)
            return false;
        if (parse_body(body, request))
            return true;
    }
    send_refusal(source, channel, request, MALFORMED, 0);
    return false;
}

/* ------------------------------------------------------------------ replies */

/* Index of the first range, from one on, that is not wholly registered, or n. The caller holds the lock. */
static uint32_t first_refused(const struct served *served, const struct request *request, uint32_t from)
{
    for (uint32_t i = from; i < request->n; i++)
        if (!th_served_covers(served, (uint64_t)(uintptr_t)request->ranges[i].iov_base, request->ranges[i].iov_len))
            return i;
    return request->n;
}

/* Whether the block that gates a request is registered. The caller holds the lock. */
static bool has_gate(const struct served *served, const struct request *request)
{
    return request->kind == KIND_READ || th_served_covers(served, request->block, BLOCK_LOOK_BYTES);
}

/* What is left of a reply. */
struct reply {
    uint8_t head[REPLY_BYTES];
    size_t head_sent;
    uint64_t left;
    uint32_t range;
    uint32_t ready;    /* ranges that may leave */
    uint64_t removals; /* of `served` when the ranges left were last found covered */
};

/* Finds out which ranges may leave by now: up to the next digest, which takes another look, for it says that the bytes
 * before it are those that were granted. The caller holds the lock; false: they never will. */
static bool open_gate(const struct request *request, struct reply *reply)
{
    uint8_t header[BLOCK_LOOK_BYTES];
    uint64_t watermark = 0;
    th_block_copy(header, request->block);
    switch (th_block_look(header, request->generation, &watermark)) {
    case BLOCK_SEEN:
        while (reply->ready < request->n && request->marks[reply->ready] <= watermark &&
               (reply->ready == reply->range || !th_block_has(header, request->block, &request->ranges[reply->ready])))
            reply->ready++;
        return true;
    case BLOCK_TORN:
        return true; /* whoever writes it tells when it has */
    default:
        return false;
    }
}

static ssize_t send_some(const struct channel *channel, const struct request *request, const struct reply *reply)
{
    struct iovec vectors[CALL_RANGES_MAX];
    size_t n = 0;
    uint64_t bytes = 0;
    if (reply->head_sent < REPLY_BYTES) {
        vectors[n].iov_base = (void *)(uintptr_t)(reply->head + reply->head_sent);
        vectors[n++].iov_len = REPLY_BYTES - reply->head_sent;
    }
    for (uint32_t i = reply->range; i < reply->ready && n < CALL_RANGES_MAX && bytes < SEND_BYTES_MAX; i++) {
        vectors[n] = request->ranges[i];
        if (vectors[n].iov_len > SEND_BYTES_MAX - bytes)
            vectors[n].iov_len = SEND_BYTES_MAX - bytes;
        bytes += vectors[n++].iov_len;
    }
    return th_channel_send(channel, vectors, n);
}

static void note_sent(struct request *request, struct reply *reply, size_t sent)
{
    size_t head = REPLY_BYTES - reply->head_sent;
    if (head > sent)
        head = sent;
    reply->head_sent += head;
    sent -= head;
    reply->left -= sent;
    while (sent > 0) {
        struct iovec *range = &request->ranges[reply->range];
        size_t part = range->iov_len < sent ? range->iov_len : sent;
        range->iov_base = (uint8_t *)range->iov_base + part;
        range->iov_len -= part;
        sent -= part;
        if (range->iov_len == 0)
            reply->range++;
    }
}

/* Looks and sends under one hold of the lock. Returns what `th_channel_send` does; EACCES: no longer registered; ESTALE:
 * the block shows another generation than was granted. */
static ssize_t send_served(struct source *source, const struct channel *channel, const struct request *request,
                           struct reply *reply)
{
    struct served *served = &source->served;
    pthread_rwlock_rdlock(&served->lock);
    ssize_t sent = -1;
    bool is_covered = reply->removals == served->removals ||
                      (first_refused(served, request, reply->range) == request->n && has_gate(served, request));
    if (!is_covered) {
        errno = EACCES;
    } else if (reply->range == reply->ready && !open_gate(request, reply)) {
        errno = ESTALE;
    } else {
        reply->removals = served->removals;
        sent = reply->range < reply->ready ? send_some(channel, request, reply) : 0;
    }
    pthread_rwlock_unlock(&served->lock);
    return sent;
}

/* Waits for some header of this process to change after `count`; false once nobody wants the answer any more. */
static bool wait_at_gate(const struct channel *channel, uint32_t count)
{
    th_raised_wait(count, th_now_ns() + GONE_NS);
    struct pollfd watched[2] = {{channel->fd, POLLRDHUP, 0}, {channel->wake, POLLIN, 0}};
    return poll(watched, 2, 0) == 0;
}

/* Whether the peer has everything that it asked for, or knows why not, and may ask again. */
static bool answer(struct source *source, const struct channel *channel, struct request *request)
{
    struct reply reply = {.left = request->nbytes, .ready = request->kind == KIND_READ ? request->n : 0};
    pthread_rwlock_rdlock(&source->served.lock);
    uint32_t refused = first_refused(&source->served, request, 0);
    bool is_gated = has_gate(&source->served, request);
    reply.removals = source->served.removals;
    pthread_rwlock_unlock(&source->served.lock);
    if (refused < request->n || !is_gated) {
        send_refusal(source, channel, request, NOT_REGISTERED, refused % request->n);
        return true;
    }
    th_put64(reply.head + 8, request->number);
    th_put64(reply.head + 16, request->nbytes);
    int64_t sent_ns = th_now_ns(); /* its start, or the gate's last opening: what waits then is the reader's doing */
    int64_t waited_ns = sent_ns;   /* since when the source has had nothing new for it */
    while (reply.left > 0) {
        uint32_t count = th_raised_count();
        ssize_t sent = send_served(source, channel, request, &reply);
        if (sent < 0)
            return false;
        note_sent(request, &reply, (size_t)sent);
        if (sent > 0 && reply.range == reply.ready) {
            sent_ns = waited_ns = th_now_ns(); /* another look may let more leave at once */
        } else if (reply.left > 0 && reply.range == reply.ready) {
            if (th_now_ns() - waited_ns > source->limits.idle_ns || !wait_at_gate(channel, count))
                return false;
            sent_ns = th_now_ns();
        } else if (sent == 0 && th_channel_wait(channel, POLLOUT, sent_ns + source->limits.reply_ns) != READY) {
            return false;
        }
    }
    atomic_fetch_add(&source->bytes_sent, request->nbytes);
    return true;
}

/* ------------------------------------------------------------------ a stream's life */

void th_answer(struct source *source, const struct channel *channel, _Atomic bool *is_known)
{
    struct request request;
    if (greet(source, channel, is_known))
        while (receive_request(source, channel, &request) && answer(source, channel, &request))
            continue;
}

void th_turn_away(const struct source *source, const struct channel *channel)
{
    (void)send_greeting(source, channel, FULL, th_now_ns());
}
