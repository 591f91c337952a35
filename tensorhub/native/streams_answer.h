/* One stream's life at the source, and what all streams of a source share. */

#ifndef TENSORHUB_STREAMS_ANSWER_H
#define TENSORHUB_STREAMS_ANSWER_H

#include "served.h"
#include "streams.h"

/* Times in nanoseconds; the reasons stand with `Limits` in streams.py. */
struct limits {
    int64_t greeting_ns; /* from accepting a connection to the whole of its greeting */
    int64_t crowded_ns;  /* the same, while most connections are of peers that have not greeted */
    int64_t idle_ns;     /* between two requests, and between two bytes that a source has for one that follows */
    int64_t request_ns;  /* from the first byte of a request to its last */
    int64_t reply_ns;    /* for one reply, of at most REQUEST_BYTES_MAX */
    int64_t connections;
};

struct source {
    uint8_t incarnation[INCARNATION_BYTES];
    struct limits limits;
    struct served served;
    _Atomic uint64_t bytes_sent; /* of replies that were sent whole */
};

/* Greets a peer and answers its requests until either has enough of the other, or the channel is woken.
 * `is_known` is set once the peer has named this source. */
void th_answer(struct source *source, const struct channel *channel, _Atomic bool *is_known);

/* Tells a peer that there is no room for it, if that can be said at once; the stream's end tells the rest. */
void th_turn_away(const struct source *source, const struct channel *channel);

#endif
