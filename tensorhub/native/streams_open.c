/* How a reader comes to a stream: it connects, greets the server, and gives the stream up when it is of no more use.
 *
 * Says how far it came, never what that means: that is `transport/stream_peers.py`.
 */

#include "streams_read.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* How an attempt to open a stream ended; the numbers are those of `Opening` in streams.py. */
enum opening { OPENED, NOT_REACHED, NOT_GREETED, TURNED_AWAY, OPENING_LATE, OPENING_OVER };

/* What became of a wait; `failed` if the wait itself did, and then `detail` is its errno. */
static enum opening after(enum wait wait, enum opening failed, int32_t *detail)
{
    *detail = wait == WAIT_FAILED ? errno : 0;
    return wait == READY ? OPENED : wait == WOKEN ? OPENING_OVER : wait == LATE ? OPENING_LATE : failed;
}

static enum opening connect_by(const struct channel *channel, int64_t connect_by_ns, int64_t deadline_ns,
                               int32_t *detail)
{
    bool patient = connect_by_ns < deadline_ns;
    enum wait wait = th_channel_wait(channel, POLLOUT, patient ? connect_by_ns : deadline_ns);
    enum opening opening = after(wait, NOT_REACHED, detail);
    if (opening == OPENING_LATE && patient) {
        *detail = ETIMEDOUT;
        return NOT_REACHED;
    }
    if (opening != OPENED)
        return opening;
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(channel->fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = errno;
    if (error == 0)
        error = th_channel_prepare(channel->fd);
    *detail = error;
    return error == 0 ? OPENED : NOT_REACHED;
}

static enum opening greet_server(const struct channel *channel, const uint8_t *incarnation, int64_t deadline_ns,
                                 int32_t *detail)
{
    uint8_t greeting[GREETING_BYTES] = MAGIC, answer[GREETING_BYTES];
    th_put16(greeting + 8, WIRE_VERSION);
    memcpy(greeting + 16, incarnation, INCARNATION_BYTES);
    enum wait wait = th_channel_send_all(channel, greeting, sizeof greeting, deadline_ns);
    if (wait == READY)
        wait = th_channel_receive_all(channel, answer, sizeof answer, deadline_ns);
    enum opening opening = after(wait, NOT_GREETED, detail);
    if (opening != OPENED)
        return opening;
    if (memcmp(answer, MAGIC, MAGIC_BYTES) != 0)
        return NOT_GREETED;
    *detail = th_get16(answer + 10);
    if (*detail == SERVED && memcmp(answer + 16, incarnation, INCARNATION_BYTES) != 0)
        *detail = OTHER_INCARNATION;
    return *detail == SERVED ? OPENED : TURNED_AWAY;
}

/* Waits until a connecting socket, which it owns from then on, is connected, and greets the server.
 * `detail` is errno, or the server's status. */
EXPORT int th_stream_open(int fd, const uint8_t *incarnation, struct stream_reading *reading, int64_t connect_by_ns,
                          struct stream **out, int32_t *detail)
{
    struct channel channel = {fd, reading->wake};
    int64_t deadline_ns = th_batch_deadline_ns(&reading->batch);
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        close(fd);
        *detail = ENOMEM;
        return NOT_REACHED;
    }
    enum opening opening = connect_by(&channel, connect_by_ns, deadline_ns, detail);
    if (opening == OPENED)
        opening = greet_server(&channel, incarnation, deadline_ns, detail);
    if (opening != OPENED) {
        close(fd);
        free(stream);
        return opening;
    }
    stream->fd = fd;
    *out = stream;
    return OPENED;
}

/* Whether an idle stream is as it was left: a byte on it, or its end, and it is of no use. */
EXPORT int th_stream_is_idle(const struct stream *stream)
{
    struct pollfd watched = {stream->fd, POLLIN | POLLRDHUP, 0};
    return poll(&watched, 1, 0) == 0;
}

EXPORT void th_stream_close(struct stream *stream)
{
    close(stream->fd);
    free(stream);
}
