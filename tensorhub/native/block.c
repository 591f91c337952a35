/* The header of a progress block, and the one word by which threads of this process learn that some header changed. */

#include "block.h"

#include <endian.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define GENERATION_AT 32
#define CHUNKS_AT 48
#define WATERMARK_AT 56
#define BEATS_AT 80
#define CHECK_AT 88

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

static void put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof value);
}

static uint64_t check_of(const uint8_t *header) { return th_digest((uint64_t)(uintptr_t)header, CHECK_AT); }

enum block_look th_block_look(const uint8_t *header, const uint8_t *generation, uint64_t *watermark)
{
    if (get64(header + CHECK_AT) != check_of(header))
        return BLOCK_TORN;
    if (memcmp(header + GENERATION_AT, generation, BLOCK_GENERATION_BYTES) != 0)
        return BLOCK_ANOTHER;
    *watermark = get64(header + WATERMARK_AT);
    return *watermark <= get64(header + CHUNKS_AT) ? BLOCK_SEEN : BLOCK_TORN;
}

bool th_block_has(const uint8_t *header, uint64_t block, const struct iovec *range)
{
    uint64_t digests = block + BLOCK_HEADER_BYTES, at = (uint64_t)(uintptr_t)range->iov_base;
    return at >= digests && (at - digests) / sizeof(uint64_t) < get64(header + CHUNKS_AT);
}

void th_block_copy(uint8_t *header, uint64_t block)
{
    const uint64_t *words = (const uint64_t *)(uintptr_t)block;
    for (size_t at = 0; at < BLOCK_LOOK_BYTES; at += BLOCK_WORD_BYTES) {
        uint64_t word = __atomic_load_n(words++, __ATOMIC_ACQUIRE);
        memcpy(header + at, &word, sizeof word);
    }
}

void th_block_show(uint64_t block, uint64_t watermark)
{
    uint8_t header[BLOCK_LOOK_BYTES];
    th_block_copy(header, block);
    put64(header + WATERMARK_AT, watermark);
    put64(header + BEATS_AT, get64(header + BEATS_AT) + 1);
    put64(header + CHECK_AT, check_of(header));
    th_store(block, header, sizeof header);
}

/* ------------------------------------------------------------------ one word for all headers
 *
 * They change hundreds of times a second, and few threads wait: each looks at its own header when woken. Without a
 * lock, so that a forked child finds nothing held. */

static _Atomic uint32_t raised, waiting;

uint32_t th_raised_count(void) { return atomic_load(&raised); }

void th_raised_tell(void)
{
    atomic_fetch_add(&raised, 1);
    if (atomic_load(&waiting) > 0)
        (void)syscall(SYS_futex, &raised, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); /* cannot fail: the word is ours */
}

/* Returns at a change, at the deadline, or for no reason: whoever waits looks again. */
void th_raised_wait(uint32_t count, int64_t deadline_ns)
{
    int64_t left = deadline_ns - th_now_ns();
    if (left <= 0)
        return;
    struct timespec timeout = {left / 1000000000, left % 1000000000};
    atomic_fetch_add(&waiting, 1);
    (void)syscall(SYS_futex, &raised, FUTEX_WAIT_PRIVATE, count, &timeout, NULL, 0);
    atomic_fetch_sub(&waiting, 1);
}
