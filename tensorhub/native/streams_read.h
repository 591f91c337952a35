/* A read over streams, as the threads share it that take part; and a stream, which is one thread's at a time. */

#ifndef TENSORHUB_STREAMS_READ_H
#define TENSORHUB_STREAMS_READ_H

#include "streams.h"

/* Why a read failed; the numbers are those of `Failure` in streams.py. */
enum failure { NO_FAILURE, LOST, REFUSED, GARBLED, LOCAL, WRONG };

struct stream {
    int fd;
    uint64_t requests; /* the number of the next one */
};

struct stream_outcome {
    uint64_t bytes_done;
    uint64_t address, nbytes; /* of the range that was refused */
    uint64_t wrong;           /* the chunk that is not what its digest says */
    int32_t failure, error, status;
    int32_t timed_out, cancelled;
    int32_t reserved;
};

struct stream_reading {
    struct batch batch;
    uint64_t total;
    int wake;             /* rung when the read is over for all its threads */
    pthread_mutex_t lock; /* guards `outcome`: the first failure counts, whole */
    struct stream_outcome outcome;
};

#endif
