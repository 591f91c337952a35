/* The plain channel: non-blocking sends and receives on a socket, and waits that end at a deadline or when woken. */

#include "streams.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

static bool none_now(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

int th_channel_prepare(int fd)
{
    int one = 1; /* requests are small, and everything waits for them */
    return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0 ? 0 : errno;
}

ssize_t th_channel_send(const struct channel *channel, struct iovec *vectors, size_t n)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = n};
    ssize_t sent = sendmsg(channel->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 && none_now(errno) ? 0 : sent;
}

ssize_t th_channel_receive(const struct channel *channel, struct iovec *vectors, size_t n)
{
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = n};
    ssize_t got = recvmsg(channel->fd, &message, MSG_DONTWAIT);
    if (got == 0) {
        errno = ECONNRESET;
        return -1;
    }
    return got < 0 && none_now(errno) ? 0 : got;
}

enum wait th_channel_wait(const struct channel *channel, short events, int64_t deadline_ns)
{
    for (;;) {
        int64_t left = deadline_ns - th_now_ns();
        if (left <= 0)
            return LATE;
        struct pollfd watched[2] = {{channel->fd, events, 0}, {channel->wake, POLLIN, 0}};
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        int ready = ppoll(watched, 2, &timeout, NULL);
        if (ready < 0 && errno != EINTR)
            return WAIT_FAILED;
        if (ready > 0)
            return watched[1].revents != 0 ? WOKEN : READY;
    }
}

enum wait th_channel_send_all(const struct channel *channel, const uint8_t *data, size_t nbytes, int64_t deadline_ns)
{
    while (nbytes > 0) {
        struct iovec left = {(void *)(uintptr_t)data, nbytes};
        ssize_t sent = th_channel_send(channel, &left, 1);
        if (sent < 0)
            return WAIT_FAILED;
        data += sent;
        nbytes -= (size_t)sent;
        enum wait wait = sent > 0 ? READY : th_channel_wait(channel, POLLOUT, deadline_ns);
        if (wait != READY)
            return wait;
    }
    return READY;
}

enum wait th_channel_receive_all(const struct channel *channel, uint8_t *into, size_t nbytes, int64_t deadline_ns)
{
    while (nbytes > 0) {
        struct iovec left = {into, nbytes};
        ssize_t got = th_channel_receive(channel, &left, 1);
        if (got < 0)
            return WAIT_FAILED;
        into += got;
        nbytes -= (size_t)got;
        enum wait wait = got > 0 ? READY : th_channel_wait(channel, POLLIN, deadline_ns);
        if (wait != READY)
            return wait;
    }
    return READY;
}
