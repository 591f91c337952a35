/* One-sided reads of another process's memory, and what the kernel must allow for them.
 *
 * Where a batch is followed, whoever has nothing to claim looks at the source's progress block. Says what happened, as
 * bytes and errno; what that means is `transport/local.py`'s.
 */

#include "batch.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

/* One call's bytes: deadlines and cancellation are seen between calls, and 8 MiB take about 2 ms. */
#define CALL_BYTES_MAX (8u << 20)
/* Between two looks at a source that has nothing new: an eighth of the time since it had, within these. A look takes a
 * microsecond, a wake-up some tens. */
#define NAP_NS_MIN 20000
#define NAP_NS_MAX 2000000
/* A header is rewritten in well under a microsecond, but whoever writes it may lose its processor half-way: these looks
 * take a tenth of a second or more. Torn for longer, and something else lies there. */
#define TORN_LOOKS_MAX 100
#define TORN_NAP_NS 1000000

struct outcome {
    uint64_t bytes_done;
    uint64_t wrong;    /* number of a chunk that is not what its digest says, plus 1, or 0 */
    int32_t error;     /* errno of the call that failed, or 0; EBADMSG: `wrong`; ESTALE: another generation; EPROTO: no
                          whole header */
    int32_t timed_out; /* the deadline passed with bytes left */
    int32_t cancelled;
    int32_t reserved;
};

struct reading {
    struct batch batch;
    pid_t pid;
    _Atomic int64_t risen_ns; /* when the source was last seen to have more */
};

EXPORT struct reading *th_read_open(int32_t pid, const uint64_t *remote, const uint64_t *local, const uint64_t *nbytes,
                                    uint64_t ranges, const uint64_t *firsts, uint64_t *digests, uint64_t chunks,
                                    int64_t deadline_ns, const struct follow *follow)
{
    struct reading *reading = calloc(1, sizeof *reading);
    if (reading == NULL)
        return NULL;
    if (th_batch_open(&reading->batch, remote, local, nbytes, ranges, firsts, digests, chunks, deadline_ns, follow) !=
        0) {
        free(reading);
        return NULL;
    }
    reading->pid = pid;
    reading->batch.limit = 0; /* matters only where it is followed: nothing is known to be there yet */
    reading->risen_ns = th_now_ns();
    return reading;
}

EXPORT void th_read_close(struct reading *reading)
{
    th_batch_close(&reading->batch);
    free(reading);
}

EXPORT void th_read_cancel(struct reading *reading) { atomic_store(&reading->batch.cancelled, 1); }

/* ------------------------------------------------------------------ bytes */

/* One call of the kernel for the first bytes of what is left; returns how many it read, or -1 with errno. */
static ssize_t read_some(const struct reading *reading, const struct claim *left)
{
    struct iovec remote[CALL_RANGES_MAX], local[CALL_RANGES_MAX];
    const struct batch *batch = &reading->batch;
    uint64_t wanted = left->nbytes < CALL_BYTES_MAX ? left->nbytes : CALL_BYTES_MAX, bytes;
    size_t n = th_batch_vectors(batch, batch->remote, left->from, wanted, remote, CALL_RANGES_MAX, &bytes);
    th_batch_vectors(batch, batch->local, left->from, wanted, local, CALL_RANGES_MAX, &bytes);
    return process_vm_readv(reading->pid, local, n, remote, n, 0);
}

static bool fail(struct reading *reading, int error)
{
    atomic_store(&reading->batch.error, error);
    return false;
}

/* A call may stop early, at any byte: go on exactly there. Returns whether the whole claim was read. */
static bool read_claim(struct reading *reading, const struct claim *claim)
{
    struct batch *batch = &reading->batch;
    struct claim left = *claim;
    while (left.nbytes > 0) {
        if (!th_batch_goes_on(batch))
            return false;
        ssize_t got = read_some(reading, &left);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return fail(reading, got < 0 ? errno : EFAULT);
        th_batch_landed(batch, (uint64_t)got);
        left.nbytes -= (uint64_t)got;
        th_batch_advance(batch, &left.from, (uint64_t)got);
    }
    return true;
}

/* ------------------------------------------------------------------ following */

static void nap(int64_t ns)
{
    struct timespec duration = {0, ns};
    (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &duration, NULL); /* woken early, it looks early */
}

/* One look at the source's header. False when it failed, and the batch with it. */
static bool look(struct reading *reading, uint64_t *watermark)
{
    const struct follow *follow = reading->batch.follow;
    uint8_t header[BLOCK_LOOK_BYTES];
    struct iovec local = {header, sizeof header};
    struct iovec remote = {(void *)(uintptr_t)follow->source_block, sizeof header};
    for (int looks = 0; looks < TORN_LOOKS_MAX && th_batch_goes_on(&reading->batch); looks++) {
        if (looks > 1)
            nap(TORN_NAP_NS);
        ssize_t got = process_vm_readv(reading->pid, &local, 1, &remote, 1, 0);
        if (got != sizeof header)
            return fail(reading, got < 0 ? errno : EFAULT);
        enum block_look seen = th_block_look(header, follow->generation, watermark);
        if (seen != BLOCK_TORN)
            return seen == BLOCK_SEEN ? true : fail(reading, ESTALE);
    }
    return th_batch_goes_on(&reading->batch) ? fail(reading, EPROTO) : false;
}

static void nap_until_next_look(const struct reading *reading)
{
    int64_t ns = (th_now_ns() - atomic_load(&reading->risen_ns)) / 8;
    nap(ns < NAP_NS_MIN ? NAP_NS_MIN : ns > NAP_NS_MAX ? NAP_NS_MAX : ns);
}

/* Nothing could be claimed: whether to try again, because the source has more now, or may have later. */
static bool wait_for_more(struct reading *reading)
{
    struct batch *batch = &reading->batch;
    uint64_t watermark = 0;
    if (batch->follow == NULL || !th_batch_has_more(batch) || !th_batch_goes_on(batch) || !look(reading, &watermark))
        return false;
    uint64_t known = atomic_load(&batch->limit);
    while (known < watermark)
        if (atomic_compare_exchange_weak(&batch->limit, &known, watermark)) {
            atomic_store(&reading->risen_ns, th_now_ns());
            return true;
        }
    th_batch_beat(batch);
    nap_until_next_look(reading);
    return true;
}

/* Everything of the claim was read while the source showed the granted generation: a look that comes after it says so. */
static bool settle(struct reading *reading, const struct claim *claim)
{
    uint64_t watermark;
    if (reading->batch.follow != NULL && !look(reading, &watermark))
        return false;
    for (uint64_t chunk = claim->chunk; chunk < claim->chunk_end; chunk++) {
        int error = th_batch_settle(&reading->batch, chunk);
        if (error != 0)
            return fail(reading, error);
    }
    return true;
}

/* Returns when nothing is left to claim, or the read has failed; no byte is written by this thread afterwards. */
EXPORT void th_read_run(struct reading *reading)
{
    for (;;) {
        struct claim claim;
        th_batch_claim(&reading->batch, &claim);
        if (claim.nbytes > 0 ? !(read_claim(reading, &claim) && settle(reading, &claim)) : !wait_for_more(reading))
            return;
    }
}

EXPORT void th_read_outcome(struct reading *reading, struct outcome *out)
{
    out->bytes_done = atomic_load(&reading->batch.bytes_done);
    out->wrong = atomic_load(&reading->batch.wrong);
    out->error = atomic_load(&reading->batch.error);
    out->timed_out = atomic_load(&reading->batch.timed_out);
    out->cancelled = atomic_load(&reading->batch.cancelled);
    out->reserved = 0;
}

/* ------------------------------------------------------------------ permission */

/* What a read of that process would meet: 0, or EPERM, ESRCH, ENOSYS... Access is checked before addresses are, so one
 * byte at address 0, which nobody maps, tells without reading anything. */
EXPORT int th_probe_process(int32_t pid)
{
    uint8_t byte;
    struct iovec local = {&byte, 1}, remote = {NULL, 1};
    if (process_vm_readv(pid, &local, 1, &remote, 1, 0) >= 0 || errno == EFAULT)
        return 0;
    return errno;
}

/* Where Yama restricts reads to descendants, let any process of this user read this one. Returns 0 or errno. */
EXPORT int th_allow_readers(void) { return prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) == 0 ? 0 : errno; }
