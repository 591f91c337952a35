/* The source's end of streams: threads that send registered memory to whoever names this process's incarnation.
 *
 * Needs no interpreter, so a process that holds it for half a minute serves as well as an idle one. Trusts nothing it
 * receives: every size has a limit, every wait a deadline. Copies nothing: sends go straight from registered memory.
 */

#include "served.h"
#include "streams.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* One send's bytes: a removal waits for it, and so does the look at the deadline. */
#define SEND_BYTES_MAX (1u << 20)
/* Without descriptors or memory, accepting has to wait for better times. */
#define ACCEPT_PAUSE_NS 100000000

/* Times in nanoseconds; the reasons stand with `Limits` in streams.py. */
struct limits {
    int64_t greeting_ns; /* from accepting a connection to the whole of its greeting */
    int64_t idle_ns;     /* between two requests */
    int64_t request_ns;  /* from the first byte of a request to its last */
    int64_t reply_ns;    /* for one reply, of at most REQUEST_BYTES_MAX */
    int64_t connections;
};

enum { UNUSED, RUNNING, ENDED };

struct connection {
    struct server *server;
    struct channel channel;
    pthread_t thread;
    _Atomic int fd;    /* of the channel while it is open, else -1: what a forked child closes */
    _Atomic int state; /* from ENDED to UNUSED to RUNNING by the accepting thread, to ENDED by the connection's own */
};

struct server {
    int listener;
    int bell; /* rung by threads that end: joins them */
    int stop; /* rung once: ends every wait of every thread */
    pthread_t acceptor;
    uint8_t incarnation[INCARNATION_BYTES];
    struct limits limits;
    struct served served;
    _Atomic uint64_t bytes_sent;
    struct connection connections[]; /* `limits.connections` of them */
};

/* What was asked for, on the stack of the thread that answers. */
struct request {
    uint64_t number, nbytes;
    uint32_t n;
    struct iovec ranges[REQUEST_RANGES_MAX];
};

static bool ring(int bell)
{
    uint64_t one = 1;
    return write(bell, &one, sizeof one) == sizeof one || errno == EAGAIN; /* full: it rings already */
}

/* ------------------------------------------------------------------ greeting */

/* In constant time, so that nobody learns an incarnation byte by byte: whoever knows it was told, and may read. */
static bool same_incarnation(const uint8_t *one, const uint8_t *other)
{
    uint8_t differs = 0;
    for (size_t i = 0; i < INCARNATION_BYTES; i++)
        differs |= one[i] ^ other[i];
    return differs == 0;
}

static bool send_greeting(const struct server *server, const struct channel *channel, enum status status,
                          int64_t deadline_ns)
{
    uint8_t greeting[GREETING_BYTES] = MAGIC;
    th_put16(greeting + 8, WIRE_VERSION);
    th_put16(greeting + 10, (uint16_t)status);
    if (status == SERVED)
        memcpy(greeting + 16, server->incarnation, INCARNATION_BYTES);
    return th_channel_send_all(channel, greeting, sizeof greeting, deadline_ns) == READY;
}

/* Whether the peer speaks our language and named this process. A peer that does not say the magic gets no answer. */
static bool greet(const struct server *server, const struct channel *channel)
{
    int64_t deadline_ns = th_now_ns() + server->limits.greeting_ns;
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
    else if (!same_incarnation(greeting + 16, server->incarnation))
        status = OTHER_INCARNATION;
    return send_greeting(server, channel, status, deadline_ns) && status == SERVED;
}

/* ------------------------------------------------------------------ requests */

/* Fills `request` from a whole frame; false when it is not one that a reader sends. */
static bool parse_ranges(const uint8_t *ranges, struct request *request)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < request->n; i++) {
        uint64_t address = th_get64(ranges + i * RANGE_BYTES), nbytes = th_get64(ranges + i * RANGE_BYTES + 8);
        if (nbytes == 0 || nbytes > request->nbytes - total)
            return false;
        total += nbytes;
        request->ranges[i].iov_base = (void *)(uintptr_t)address;
        request->ranges[i].iov_len = nbytes;
    }
    return total == request->nbytes;
}

static bool parse_head(const uint8_t *head, struct request *request)
{
    request->n = th_get32(head + 4);
    request->number = th_get64(head + 8);
    request->nbytes = th_get64(head + 16);
    return th_get32(head) == KIND_READ && request->n > 0 && request->n <= REQUEST_RANGES_MAX &&
           request->nbytes <= REQUEST_BYTES_MAX;
}

static void send_refusal(const struct server *server, const struct channel *channel, const struct request *request,
                         enum status status, uint32_t index)
{
    uint8_t reply[REPLY_BYTES] = {0};
    th_put32(reply, (uint32_t)status);
    th_put32(reply + 4, index);
    th_put64(reply + 8, request->number);
    /* If this fails the peer sees the stream's end instead: as good. */
    (void)th_channel_send_all(channel, reply, sizeof reply, th_now_ns() + server->limits.reply_ns);
}

/* The next request; false when there is none any more, or none that can be trusted. */
static bool receive_request(const struct server *server, const struct channel *channel, struct request *request)
{
    uint8_t frame[REQUEST_RANGES_MAX * RANGE_BYTES];
    if (th_channel_wait(channel, POLLIN, th_now_ns() + server->limits.idle_ns) != READY)
        return false;
    int64_t deadline_ns = th_now_ns() + server->limits.request_ns;
    if (th_channel_receive_all(channel, frame, REQUEST_BYTES, deadline_ns) != READY)
        return false;
    if (parse_head(frame, request)) {
        if (th_channel_receive_all(channel, frame, request->n * RANGE_BYTES, deadline_ns) != READY)
            return false;
        if (parse_ranges(frame, request))
            return true;
    }
    send_refusal(server, channel, request, MALFORMED, 0);
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

/* What is left of a reply. Ranges are shortened as they leave. */
struct reply {
    uint8_t head[REPLY_BYTES];
    size_t head_sent;
    uint64_t left;
    uint32_t range;
    uint64_t removals; /* of `served` when the ranges left were last found covered */
};

static ssize_t send_some(const struct channel *channel, const struct request *request, const struct reply *reply)
{
    struct iovec vectors[CALL_RANGES_MAX];
    size_t n = 0;
    uint64_t bytes = 0;
    if (reply->head_sent < REPLY_BYTES)
        vectors[n++] = (struct iovec){(void *)(uintptr_t)(reply->head + reply->head_sent), REPLY_BYTES - reply->head_sent};
    for (uint32_t i = reply->range; i < request->n && n < CALL_RANGES_MAX && bytes < SEND_BYTES_MAX; i++) {
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

/* Looks and sends under one hold of the lock. Returns what `th_channel_send` does; EACCES: no longer registered. */
static ssize_t send_served(struct server *server, const struct channel *channel, const struct request *request,
                           struct reply *reply)
{
    struct served *served = &server->served;
    pthread_rwlock_rdlock(&served->lock);
    ssize_t sent = -1;
    if (reply->removals == served->removals || first_refused(served, request, reply->range) == request->n) {
        reply->removals = served->removals;
        sent = send_some(channel, request, reply);
    } else {
        errno = EACCES;
    }
    pthread_rwlock_unlock(&served->lock);
    return sent;
}

/* Whether the peer has everything that it asked for, or knows why not, and may ask again. */
static bool answer(struct server *server, const struct channel *channel, struct request *request)
{
    struct reply reply = {.left = request->nbytes};
    pthread_rwlock_rdlock(&server->served.lock);
    uint32_t refused = first_refused(&server->served, request, 0);
    reply.removals = server->served.removals;
    pthread_rwlock_unlock(&server->served.lock);
    if (refused < request->n) {
        send_refusal(server, channel, request, NOT_REGISTERED, refused);
        return true;
    }
    th_put64(reply.head + 8, request->number);
    th_put64(reply.head + 16, request->nbytes);
    int64_t deadline_ns = th_now_ns() + server->limits.reply_ns;
    while (reply.left > 0) {
        ssize_t sent = send_served(server, channel, request, &reply);
        if (sent < 0)
            return false;
        note_sent(request, &reply, (size_t)sent);
        if (sent == 0 && th_channel_wait(channel, POLLOUT, deadline_ns) != READY)
            return false;
    }
    atomic_fetch_add(&server->bytes_sent, request->nbytes);
    return true;
}

/* ------------------------------------------------------------------ connections */

static void *serve(void *argument)
{
    struct connection *connection = argument;
    struct server *server = connection->server;
    struct request request;
    if (greet(server, &connection->channel))
        while (receive_request(server, &connection->channel, &request) &&
               answer(server, &connection->channel, &request))
            continue;
    atomic_store(&connection->fd, -1);
    close(connection->channel.fd);
    atomic_store(&connection->state, ENDED);
    (void)ring(server->bell); /* a write of 8 bytes to an eventfd that is open */
    return NULL;
}

/* Joins threads that have ended; returns an unused connection, or NULL. */
static struct connection *tidy(struct server *server)
{
    struct connection *unused = NULL;
    for (int64_t i = 0; i < server->limits.connections; i++) {
        struct connection *connection = &server->connections[i];
        if (atomic_load(&connection->state) == ENDED && pthread_join(connection->thread, NULL) == 0)
            atomic_store(&connection->state, UNUSED);
        if (unused == NULL && atomic_load(&connection->state) == UNUSED)
            unused = connection;
    }
    return unused;
}

/* Serves an accepted socket, or turns it away. */
static void admit(struct server *server, int fd)
{
    struct connection *connection = tidy(server);
    struct channel channel = {fd, server->stop};
    if (connection == NULL || th_channel_prepare(fd) != 0) {
        (void)send_greeting(server, &channel, FULL, th_now_ns()); /* whatever fits at once; the end tells the rest */
        close(fd);
        return;
    }
    connection->server = server;
    connection->channel = channel;
    atomic_store(&connection->fd, fd);
    atomic_store(&connection->state, RUNNING);
    if (th_thread_start(&connection->thread, serve, connection) != 0) {
        atomic_store(&connection->fd, -1);
        atomic_store(&connection->state, UNUSED);
        (void)send_greeting(server, &channel, FULL, th_now_ns());
        close(fd);
    }
}

static bool out_of_resources(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

static void *accept_until_told(void *argument)
{
    struct server *server = argument;
    int64_t pause_until_ns = 0;
    for (;;) {
        int64_t pause = pause_until_ns - th_now_ns();
        struct timespec timeout = {0, pause > 0 ? pause : 0};
        struct pollfd watched[3] = {
            {server->stop, POLLIN, 0}, {server->bell, POLLIN, 0}, {pause > 0 ? -1 : server->listener, POLLIN, 0}};
        int ready = ppoll(watched, 3, pause > 0 ? &timeout : NULL, NULL);
        if (ready < 0 && errno != EINTR) { /* no memory in the kernel */
            pause_until_ns = th_now_ns() + ACCEPT_PAUSE_NS;
            continue;
        }
        if (ready <= 0)
            continue;
        if (watched[0].revents != 0)
            return NULL;
        uint64_t rings;
        if (watched[1].revents != 0 && read(server->bell, &rings, sizeof rings) == sizeof rings)
            (void)tidy(server);
        if (watched[2].revents == 0)
            continue;
        int fd = accept4(server->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0)
            admit(server, fd);
        else if (out_of_resources(errno))
            pause_until_ns = th_now_ns() + ACCEPT_PAUSE_NS;
        /* every other error is that of one connection, which is gone */
    }
}

/* ------------------------------------------------------------------ the server */

static void release(struct server *server)
{
    close(server->listener);
    if (server->bell >= 0)
        close(server->bell);
    if (server->stop >= 0)
        close(server->stop);
    th_served_close(&server->served);
    free(server);
}

/* Serves on a listening, non-blocking socket, which it owns from then on, also when it fails. Returns 0 or errno. */
EXPORT int th_server_start(int listener, const uint8_t *incarnation, const struct limits *limits, struct server **out)
{
    struct server *server = calloc(1, sizeof *server + (size_t)limits->connections * sizeof *server->connections);
    if (server == NULL) {
        close(listener);
        return ENOMEM;
    }
    server->listener = listener;
    memcpy(server->incarnation, incarnation, INCARNATION_BYTES);
    server->limits = *limits;
    for (int64_t i = 0; i < server->limits.connections; i++)
        atomic_store(&server->connections[i].fd, -1);
    int error = th_served_open(&server->served);
    if (error != 0) {
        close(listener);
        free(server);
        return error;
    }
    server->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    server->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->bell < 0 || server->stop < 0)
        error = errno;
    if (error == 0)
        error = th_thread_start(&server->acceptor, accept_until_told, server);
    if (error != 0) {
        release(server);
        return error;
    }
    *out = server;
    return 0;
}

/* Both return 0 or errno; once the second has returned, no byte of the range is touched, unless it is covered still. */
EXPORT int th_server_add(struct server *server, uint64_t address, uint64_t nbytes)
{
    return th_served_add(&server->served, address, nbytes);
}

EXPORT int th_server_remove(struct server *server, uint64_t address, uint64_t nbytes)
{
    return th_served_remove(&server->served, address, nbytes);
}

EXPORT void th_server_facts(struct server *server, uint64_t *connections, uint64_t *bytes_sent)
{
    *connections = 0;
    for (int64_t i = 0; i < server->limits.connections; i++)
        *connections += atomic_load(&server->connections[i].state) == RUNNING;
    *bytes_sent = atomic_load(&server->bytes_sent);
}

/* Ends and joins every thread, then frees everything. Returns 0 or errno: then nothing was freed. */
EXPORT int th_server_stop(struct server *server)
{
    if (!ring(server->stop))
        return errno;
    int error = pthread_join(server->acceptor, NULL);
    if (error != 0)
        return error;
    for (int64_t i = 0; i < server->limits.connections; i++) {
        struct connection *connection = &server->connections[i];
        if (atomic_load(&connection->state) != UNUSED && (error = pthread_join(connection->thread, NULL)) != 0)
            return error;
    }
    release(server);
    return 0;
}

/* In a forked child, where no thread of it exists: closes the copies of its descriptors, or the port and the streams
 * would outlive the parent. The memory stays: the lock in it may be held by a thread that is not here. */
EXPORT void th_server_forget(struct server *server)
{
    close(server->listener);
    close(server->bell);
    close(server->stop);
    for (int64_t i = 0; i < server->limits.connections; i++) {
        int fd = atomic_load(&server->connections[i].fd);
        if (fd >= 0)
            close(fd);
    }
}
