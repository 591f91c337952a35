/* The source's end of streams: a thread that accepts, and one for each connection, which streams_answer.c tells what
 * to say. Needs no interpreter, so a process that holds it for half a minute serves as well as an idle one.
 */

#include "streams_answer.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* Without descriptors or memory, accepting has to wait for better times. */
#define ACCEPT_PAUSE_NS 100000000

enum { UNUSED, RUNNING, ENDED };

struct connection {
    struct server *server;
    struct channel channel;
    pthread_t thread;
    int64_t since_ns;
    _Atomic bool is_known; /* its peer has greeted */
    _Atomic int fd;        /* of the channel while it is open, else -1: what a forked child closes */
    _Atomic int state;     /* from ENDED to UNUSED to RUNNING by the accepting thread, to ENDED by the connection's own */
};

struct server {
    int listener;
    int bell; /* rung by threads that end: joins them */
    int stop; /* rung once: ends every wait of every thread */
    pthread_t acceptor;
    pthread_mutex_t closing; /* guards each `fd` from being closed while another thread shuts it down */
    struct source source;
    struct connection connections[]; /* as many as its limits say */
};

static bool ring(int bell)
{
    uint64_t one = 1;
    return write(bell, &one, sizeof one) == sizeof one || errno == EAGAIN; /* full: it rings already */
}

/* ------------------------------------------------------------------ connections */

static void *serve(void *argument)
{
    struct connection *connection = argument;
    struct server *server = connection->server;
    th_answer(&server->source, &connection->channel, &connection->is_known);
    pthread_mutex_lock(&server->closing);
    atomic_store(&connection->fd, -1);
    close(connection->channel.fd);
    pthread_mutex_unlock(&server->closing);
    atomic_store(&connection->state, ENDED);
    (void)ring(server->bell); /* a write of 8 bytes to an eventfd that is open */
    return NULL;
}

/* Joins threads that have ended; returns an unused connection, or NULL. */
static struct connection *tidy(struct server *server)
{
    struct connection *unused = NULL;
    for (int64_t i = 0; i < server->source.limits.connections; i++) {
        struct connection *connection = &server->connections[i];
        if (atomic_load(&connection->state) == ENDED && pthread_join(connection->thread, NULL) == 0)
            atomic_store(&connection->state, UNUSED);
        if (unused == NULL && atomic_load(&connection->state) == UNUSED)
            unused = connection;
    }
    return unused;
}

static bool is_stranger(const struct connection *connection)
{
    return atomic_load(&connection->state) == RUNNING && !atomic_load(&connection->is_known);
}

/* While most connections are of strangers, ends those that had time to greet: they must not keep readers out. */
static void thin_out(struct server *server)
{
    const struct limits *limits = &server->source.limits;
    int64_t strangers = 0, before_ns = th_now_ns() - limits->crowded_ns;
    for (int64_t i = 0; i < limits->connections; i++)
        strangers += is_stranger(&server->connections[i]);
    if (strangers <= limits->connections / 2)
        return;
    pthread_mutex_lock(&server->closing);
    for (int64_t i = 0; i < limits->connections; i++) {
        struct connection *connection = &server->connections[i];
        int fd = atomic_load(&connection->fd);
        if (fd >= 0 && is_stranger(connection) && connection->since_ns <= before_ns)
            (void)shutdown(fd, SHUT_RDWR); /* fails only where the peer has gone already */
    }
    pthread_mutex_unlock(&server->closing);
}

/* Serves an accepted socket, or turns it away. */
static void admit(struct server *server, int fd)
{
    thin_out(server);
    struct connection *connection = tidy(server);
    struct channel channel = {fd, server->stop};
    if (connection == NULL || th_channel_prepare(fd) != 0) {
        th_turn_away(&server->source, &channel);
        close(fd);
        return;
    }
    connection->server = server;
    connection->channel = channel;
    connection->since_ns = th_now_ns();
    atomic_store(&connection->is_known, false);
    atomic_store(&connection->fd, fd);
    atomic_store(&connection->state, RUNNING);
    if (th_thread_start(&connection->thread, serve, connection) != 0) {
        atomic_store(&connection->fd, -1);
        atomic_store(&connection->state, UNUSED);
        th_turn_away(&server->source, &channel);
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
    th_served_close(&server->source.served);
    pthread_mutex_destroy(&server->closing);
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
    memcpy(server->source.incarnation, incarnation, INCARNATION_BYTES);
    server->source.limits = *limits;
    for (int64_t i = 0; i < server->source.limits.connections; i++)
        atomic_store(&server->connections[i].fd, -1);
    int error = pthread_mutex_init(&server->closing, NULL);
    if (error == 0 && (error = th_served_open(&server->source.served)) != 0)
        pthread_mutex_destroy(&server->closing);
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
    return th_served_add(&server->source.served, address, nbytes);
}

EXPORT int th_server_remove(struct server *server, uint64_t address, uint64_t nbytes)
{
    int error = th_served_remove(&server->source.served, address, nbytes);
    th_raised_tell(); /* whoever waits at a gate finds out */
    return error;
}

EXPORT void th_server_facts(struct server *server, uint64_t *connections, uint64_t *bytes_sent)
{
    *connections = 0;
    for (int64_t i = 0; i < server->source.limits.connections; i++)
        *connections += atomic_load(&server->connections[i].state) == RUNNING;
    *bytes_sent = atomic_load(&server->source.bytes_sent);
}

/* Ends and joins every thread, then frees everything. Returns 0 or errno: then nothing was freed. */
EXPORT int th_server_stop(struct server *server)
{
    if (!ring(server->stop))
        return errno;
    th_raised_tell(); /* whoever waits at a gate looks up */
    int error = pthread_join(server->acceptor, NULL);
    if (error != 0)
        return error;
    for (int64_t i = 0; i < server->source.limits.connections; i++) {
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
    for (int64_t i = 0; i < server->source.limits.connections; i++) {
        int fd = atomic_load(&server->connections[i].fd);
        if (fd >= 0)
            close(fd);
    }
}
