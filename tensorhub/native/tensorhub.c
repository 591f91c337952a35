/* What must not need the interpreter: digests, copies, stores, and the heartbeat.
 *
 * Decides nothing about weights: callers hand over addresses they own, already checked in Python. Holds no Python
 * object and no global but the digest function, which is bound once at load.
 */

#include "block.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Raised with every change of a signature in this library; `binding.py` refuses a stale build. */
#define ABI 9
/* What is kept of a reply that was not expected: enough for a refusal with its reason. */
#define REPLY_BYTES_MAX 4096

int64_t th_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail: the clock exists and the pointer is ours */
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

EXPORT int th_abi(void) { return ABI; }

/* ------------------------------------------------------------------ threads */

int th_thread_start(pthread_t *thread, void *(*work)(void *), void *argument)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    error = pthread_attr_setstacksize(&attributes, THREAD_STACK_BYTES);
    if (error == 0) {
        sigfillset(&all); /* a new thread inherits the mask */
        error = pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    if (error == 0) {
        error = pthread_create(thread, &attributes, work, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL); /* cannot fail: SIG_SETMASK is valid, and so is the mask */
    }
    pthread_attr_destroy(&attributes);
    return error;
}

/* ------------------------------------------------------------------ digests */

typedef uint64_t (*digest_function)(const void *, size_t);
static digest_function xxh3;

EXPORT void th_bind_xxh3(void *function) { memcpy(&xxh3, &function, sizeof xxh3); }

EXPORT uint64_t th_digest(uint64_t address, uint64_t nbytes) { return xxh3((const void *)(uintptr_t)address, nbytes); }

static uint64_t gathered_bytes(const uint64_t *nbytes, uint64_t first, uint64_t last)
{
    uint64_t total = 0;
    for (uint64_t run = first; run < last; run++)
        total += nbytes[run];
    return total;
}

/* Chunk c is runs firsts[c] to firsts[c + 1]. Returns 0, ENOMEM, or EMSGSIZE for a chunk too large to gather.
 *
 * `progress`, unless NULL, is told the chunks done so far, each after its digest is in place; a second word behind it, set
 * by whoever wants no more, ends the work early. */
EXPORT int th_digest_runs(const uint64_t *addresses, const uint64_t *nbytes, const uint64_t *firsts, uint64_t chunks,
                          uint64_t *out, _Atomic uint64_t *progress)
{
    uint64_t scratch_bytes = 0;
    for (uint64_t c = 0; c < chunks; c++) {
        if (firsts[c + 1] - firsts[c] == 1)
            continue;
        uint64_t total = gathered_bytes(nbytes, firsts[c], firsts[c + 1]);
        if (total > SCRATCH_BYTES_MAX)
            return EMSGSIZE;
        if (total > scratch_bytes)
            scratch_bytes = total;
    }
    uint8_t *scratch = NULL;
    if (scratch_bytes > 0 && (scratch = malloc(scratch_bytes)) == NULL)
        return ENOMEM;
    for (uint64_t c = 0; c < chunks; c++) {
        if (progress != NULL && atomic_load(progress + 1) != 0)
            break;
        if (firsts[c + 1] - firsts[c] == 1) {
            out[c] = th_digest(addresses[firsts[c]], nbytes[firsts[c]]);
        } else {
            uint64_t filled = 0;
            for (uint64_t run = firsts[c]; run < firsts[c + 1]; run++) {
                memcpy(scratch + filled, (const void *)(uintptr_t)addresses[run], nbytes[run]);
                filled += nbytes[run];
            }
            out[c] = xxh3(scratch, filled);
        }
        if (progress != NULL)
            atomic_store(progress, c + 1);
    }
    free(scratch);
    return 0;
}

/* ------------------------------------------------------------------ copies within this process */

EXPORT void th_copy(uint64_t destination, uint64_t source, uint64_t nbytes)
{
    memmove((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, nbytes);
}

EXPORT void th_copy_ranges(const uint64_t *sources, const uint64_t *destinations, const uint64_t *nbytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        memcpy((void *)(uintptr_t)destinations[i], (const void *)(uintptr_t)sources[i], nbytes[i]);
}

/* Sets differs[i] where range i of the two differs; returns how many do. */
EXPORT uint64_t th_compare_ranges(const uint64_t *left, const uint64_t *right, const uint64_t *nbytes, uint64_t n,
                                  uint8_t *differs)
{
    uint64_t found = 0;
    for (uint64_t i = 0; i < n; i++) {
        differs[i] = memcmp((const void *)(uintptr_t)left[i], (const void *)(uintptr_t)right[i], nbytes[i]) != 0;
        found += differs[i];
    }
    return found;
}

/* Everything stored before is visible to whoever sees these bytes; threads that wait for a header look again. By words,
 * where both ends are at their bounds, as headers are: others of this process read them meanwhile. */
EXPORT void th_store(uint64_t destination, const uint8_t *data, uint64_t nbytes)
{
    if ((destination | nbytes) % BLOCK_WORD_BYTES == 0) {
        uint64_t *words = (uint64_t *)(uintptr_t)destination;
        for (uint64_t at = 0; at < nbytes; at += BLOCK_WORD_BYTES) {
            uint64_t word;
            memcpy(&word, data + at, sizeof word);
            __atomic_store_n(words++, word, __ATOMIC_RELEASE);
        }
    } else {
        atomic_thread_fence(memory_order_release);
        memcpy((void *)(uintptr_t)destination, data, nbytes);
    }
    th_raised_tell();
}

/* ------------------------------------------------------------------ priority */

/* Linux keeps a nice value per thread, although POSIX says per process. Returns 0 or errno. */
EXPORT int th_lower_priority(int32_t nice_value)
{
    id_t thread = (id_t)syscall(SYS_gettid);
    if (setpriority(PRIO_PROCESS, thread, nice_value) != 0)
        return errno;
    errno = 0;
    int now = getpriority(PRIO_PROCESS, thread);
    if (now == -1 && errno != 0)
        return errno;
    return now == nice_value ? 0 : EINVAL;
}

/* ------------------------------------------------------------------ heartbeat */

/* Why a beat ended; the numbers are those of `_ENDINGS` in __init__.py. */
enum ending { BEATING, STOPPED, SEND_FAILED, RECEIVE_FAILED, PEER_CLOSED, ACK_TIMEOUT, WRONG_REPLY, WAIT_FAILED };

struct beat {
    int fd, wake;
    pthread_t thread;
    uint8_t *request, *expected;
    uint32_t request_bytes, expected_bytes;
    int64_t interval_ns, ack_timeout_ns;
    _Atomic int64_t acknowledged_ns;
    _Atomic int32_t ending; /* written last: what it explains is complete once it is seen */
    int32_t error;          /* errno behind the ending, or 0 */
    uint32_t reply_bytes;   /* of a reply that was not expected */
    uint8_t reply[REPLY_BYTES_MAX];
};

static int end(struct beat *beat, int ending, int error)
{
    beat->error = error;
    atomic_store(&beat->ending, ending);
    return ending;
}

/* Waits for `events` on the socket (0: only for time to pass). Returns BEATING once they are there or the deadline
 * passed without any being asked for; else the ending. */
static int wait_for(struct beat *beat, short events, int64_t deadline_ns)
{
    for (;;) {
        int64_t left = deadline_ns - th_now_ns();
        if (left <= 0)
            return events == 0 ? BEATING : end(beat, ACK_TIMEOUT, 0);
        struct pollfd watched[2] = {{beat->wake, POLLIN, 0}, {events == 0 ? -1 : beat->fd, events, 0}};
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        if (ppoll(watched, 2, &timeout, NULL) < 0 && errno != EINTR)
            return end(beat, WAIT_FAILED, errno);
        if (watched[0].revents != 0)
            return end(beat, STOPPED, 0);
        if (watched[1].revents != 0)
            return BEATING; /* also for errors: the next send or recv says which */
    }
}

static bool again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

static int send_all(struct beat *beat, int64_t deadline_ns)
{
    uint32_t sent = 0;
    while (sent < beat->request_bytes) {
        ssize_t n = send(beat->fd, beat->request + sent, beat->request_bytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && !again(errno))
            return end(beat, SEND_FAILED, errno);
        if (n >= 0)
            sent += (uint32_t)n;
        else if (wait_for(beat, POLLOUT, deadline_ns) != BEATING)
            return beat->ending;
    }
    return BEATING;
}

static int receive_all(struct beat *beat, uint8_t *into, uint32_t nbytes, int64_t deadline_ns)
{
    uint32_t got = 0;
    while (got < nbytes) {
        ssize_t n = recv(beat->fd, into + got, nbytes - got, MSG_DONTWAIT);
        if (n == 0)
            return end(beat, PEER_CLOSED, 0);
        if (n < 0 && !again(errno))
            return end(beat, RECEIVE_FAILED, errno);
        if (n > 0)
            got += (uint32_t)n;
        else if (wait_for(beat, POLLIN, deadline_ns) != BEATING)
            return beat->ending;
    }
    return BEATING;
}

/* One length-prefixed frame. Anything but the expected one ends the beat and is kept, cut to what fits. */
static int receive_reply(struct beat *beat, int64_t deadline_ns)
{
    uint8_t frame[4 + REPLY_BYTES_MAX];
    int ending = receive_all(beat, frame, 4, deadline_ns);
    if (ending != BEATING)
        return ending;
    uint32_t length = (uint32_t)frame[0] << 24 | (uint32_t)frame[1] << 16 | (uint32_t)frame[2] << 8 | frame[3];
    if (length > REPLY_BYTES_MAX)
        return end(beat, WRONG_REPLY, EMSGSIZE);
    ending = receive_all(beat, frame + 4, length, deadline_ns);
    if (ending != BEATING)
        return ending;
    if (length + 4 == beat->expected_bytes && memcmp(frame, beat->expected, beat->expected_bytes) == 0)
        return BEATING;
    memcpy(beat->reply, frame + 4, length);
    beat->reply_bytes = length;
    return end(beat, WRONG_REPLY, 0);
}

static void *beat_until_told(void *argument)
{
    struct beat *beat = argument;
    int ending = BEATING;
    while (ending == BEATING) {
        int64_t sent_ns = th_now_ns(); /* before the first byte leaves: a lease counted from here is never too long */
        ending = send_all(beat, sent_ns + beat->ack_timeout_ns);
        if (ending == BEATING)
            ending = receive_reply(beat, sent_ns + beat->ack_timeout_ns);
        if (ending == BEATING) {
            atomic_store(&beat->acknowledged_ns, sent_ns);
            ending = wait_for(beat, 0, sent_ns + beat->interval_ns);
        }
    }
    return NULL;
}

/* Wakes and joins. Returns 0 or errno. */
static int end_thread(struct beat *beat)
{
    uint64_t one = 1;
    if (write(beat->wake, &one, sizeof one) != sizeof one)
        return errno;
    return pthread_join(beat->thread, NULL);
}

static void release(struct beat *beat)
{
    if (beat->fd >= 0)
        close(beat->fd);
    if (beat->wake >= 0)
        close(beat->wake);
    free(beat->request);
    free(beat->expected);
    free(beat);
}

static uint8_t *duplicate(const uint8_t *data, uint32_t nbytes)
{
    uint8_t *copy = malloc(nbytes);
    if (copy != NULL)
        memcpy(copy, data, nbytes);
    return copy;
}

static int check_stream(int fd)
{
    int kind = 0;
    socklen_t length = sizeof kind;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &length) != 0)
        return errno;
    return kind == SOCK_STREAM ? 0 : EPROTOTYPE;
}

/* Frames are whole, with their length prefix. The socket is duplicated; the caller's stays its own. 0 or errno. */
EXPORT int th_beat_start(int fd, const uint8_t *request, uint32_t request_bytes, const uint8_t *expected,
                         uint32_t expected_bytes, int64_t interval_ns, int64_t ack_timeout_ns, struct beat **out)
{
    int error = check_stream(fd);
    if (error != 0)
        return error;
    struct beat *beat = calloc(1, sizeof *beat);
    if (beat == NULL)
        return ENOMEM;
    beat->request = duplicate(request, request_bytes);
    beat->expected = duplicate(expected, expected_bytes);
    beat->request_bytes = request_bytes;
    beat->expected_bytes = expected_bytes;
    beat->interval_ns = interval_ns;
    beat->ack_timeout_ns = ack_timeout_ns;
    beat->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    error = beat->fd < 0 ? errno : 0;
    beat->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (error == 0 && beat->wake < 0)
        error = errno;
    if (error == 0 && (beat->request == NULL || beat->expected == NULL))
        error = ENOMEM;
    if (error == 0)
        error = th_thread_start(&beat->thread, beat_until_told, beat);
    if (error != 0) {
        release(beat);
        return error;
    }
    *out = beat;
    return 0;
}

EXPORT int64_t th_beat_acknowledged_ns(struct beat *beat) { return atomic_load(&beat->acknowledged_ns); }

/* The ending (BEATING while it goes on), its errno, and the unexpected reply, copied to `reply` if there is one. */
EXPORT int th_beat_ending(struct beat *beat, int32_t *error, uint8_t *reply, uint32_t *reply_bytes)
{
    int ending = atomic_load(&beat->ending);
    *error = ending == BEATING ? 0 : beat->error;
    *reply_bytes = ending == BEATING ? 0 : beat->reply_bytes;
    memcpy(reply, beat->reply, *reply_bytes);
    return ending;
}

/* Ends and joins the thread, then frees everything; the handle is invalid afterwards. 0 or errno. */
EXPORT int th_beat_stop(struct beat *beat)
{
    int error = end_thread(beat);
    if (error == 0)
        release(beat);
    return error;
}

/* In a forked child, where the thread does not exist: only gives descriptors and memory back. */
EXPORT void th_beat_forget(struct beat *beat) { release(beat); }
