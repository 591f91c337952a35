/* One-sided reads over a stream: the bytes on the wire, and the channel they pass through. docs/transport.md draws it.
 *
 * Everything on the wire is little-endian and of fixed size, so that whoever parses it needs no memory but a buffer of
 * known length. Both ends include this file; it decides the layout and nothing else.
 */

#ifndef TENSORHUB_STREAMS_H
#define TENSORHUB_STREAMS_H

#include "batch.h"

#include <endian.h>
#include <string.h>
#include <sys/types.h>

/* ------------------------------------------------------------------ greetings: 32 bytes each way, then the token
 *
 *   0       8 magic
 *   8       2 version
 *  10       2 reader: bytes of the token that follows, 0 in this version    server: status
 *  12       4 zero
 *  16      16 reader: the incarnation it wants    server: its own, if the reader named it, else zeros
 */
#define GREETING_BYTES 32
#define MAGIC "TnsrHub\n"
#define MAGIC_BYTES 8
#define WIRE_VERSION 2
#define INCARNATION_BYTES 16
/* A bearer token of any usual kind is shorter; read and dropped by servers that want none. */
#define TOKEN_BYTES_MAX 4096

/* ------------------------------------------------------------------ a request: 24 bytes, then what its kind says
 *
 *   0       4 kind
 *   4       4 ranges n
 *   8       8 number, which the reply repeats
 *  16       8 bytes of all ranges
 *
 * KIND_READ: what is asked for is there. 16 bytes for each range:
 *
 *  24 + 16 i       8 address
 *  32 + 16 i       8 bytes
 *
 * KIND_FOLLOW: each range leaves once the progress block at the source shows, for this generation, that it may. First
 * the gate of 24 bytes, then 24 for each range, whose marks do not fall:
 *
 *  24              8 address of the progress block, a multiple of 8
 *  32             16 generation
 *  48 + 24 i       8 address
 *  56 + 24 i       8 bytes
 *  64 + 24 i       8 mark: the watermark from which on it may leave
 */
#define REQUEST_BYTES 24
#define RANGE_BYTES 16
#define GATE_BYTES 24
#define GATED_RANGE_BYTES 24
#define KIND_READ 1
#define KIND_FOLLOW 2
/* As many as one call of the kernel sends or lands. */
#define REQUEST_RANGES_MAX CALL_RANGES_MAX
/* One reply takes `reply_ns` at most, see `struct limits`: what that means on a slow line depends on its size. */
#define REQUEST_BYTES_MAX (8u << 20)
/* Of all that follows the head. */
#define REQUEST_BODY_BYTES_MAX (GATE_BYTES + REQUEST_RANGES_MAX * GATED_RANGE_BYTES)
#define REQUEST_FRAME_BYTES_MAX (REQUEST_BYTES + REQUEST_BODY_BYTES_MAX)

/* ------------------------------------------------------------------ a reply: 24 bytes, then those of all ranges
 *
 *   0       4 status
 *   4       4 index of the range that is refused
 *   8       8 number
 *  16       8 bytes that follow: all of the request's, or none
 */
#define REPLY_BYTES 24

/* In greetings and replies; the numbers are those of `Status` in streams.py. */
enum status { SERVED, OTHER_VERSION, OTHER_INCARNATION, FULL, NOT_REGISTERED, MALFORMED };

static inline void th_put16(uint8_t *at, uint16_t value)
{
    value = htole16(value);
    memcpy(at, &value, sizeof value);
}

static inline void th_put32(uint8_t *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof value);
}

static inline void th_put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof value);
}

static inline uint16_t th_get16(const uint8_t *at)
{
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return le16toh(value);
}

static inline uint32_t th_get32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return le32toh(value);
}

static inline uint64_t th_get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

/* ------------------------------------------------------------------ channels
 *
 * The only way that bytes of a stream enter or leave this process. TLS is to be a second kind of channel: it needs
 * nothing but another pair of `send` and `receive`. */
struct channel {
    int fd;   /* a connected or connecting stream socket, never blocking */
    int wake; /* readable: stop waiting, at once */
};

enum wait { READY, WOKEN, LATE, WAIT_FAILED };

/* One attempt, never waits: how many bytes passed; 0 when the peer takes or has none now; -1 with errno, which is
 * ECONNRESET when the peer has ended the stream. */
ssize_t th_channel_send(const struct channel *channel, struct iovec *vectors, size_t n);
ssize_t th_channel_receive(const struct channel *channel, struct iovec *vectors, size_t n);

/* Until a send or a receive is worth trying (also because it would fail). WAIT_FAILED leaves errno. */
enum wait th_channel_wait(const struct channel *channel, short events, int64_t deadline_ns);

/* All of it, or the reason why not; WAIT_FAILED leaves errno, which is ECONNRESET at the stream's end. */
enum wait th_channel_send_all(const struct channel *channel, const uint8_t *data, size_t nbytes, int64_t deadline_ns);
enum wait th_channel_receive_all(const struct channel *channel, uint8_t *into, size_t nbytes, int64_t deadline_ns);

/* Sets what every stream needs of its socket; returns 0 or errno. */
int th_channel_prepare(int fd);

#endif
