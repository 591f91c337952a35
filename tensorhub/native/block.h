/* A progress block's header, as `pipeline/exposure.py` lays it out: looked at by readers, raised by a relaying reader.
 *
 * Decides whether a header is whole and of the generation that was granted, and nothing else. */

#ifndef TENSORHUB_BLOCK_H
#define TENSORHUB_BLOCK_H

#include "tensorhub.h"

/* What a look needs: everything but the padding. The check covers the bytes before it. */
#define BLOCK_LOOK_BYTES 96
#define BLOCK_HEADER_BYTES 128
#define BLOCK_GENERATION_BYTES 16
/* Headers are written and read by words within their process; their check says whether the words belong together. */
#define BLOCK_WORD_BYTES 8

/* TORN: caught half-written, look again. ANOTHER: not of the generation that was granted, or no longer. */
enum block_look { BLOCK_SEEN, BLOCK_TORN, BLOCK_ANOTHER };

/* What these BLOCK_LOOK_BYTES say to a reader that was granted `generation`; `watermark` is set where BLOCK_SEEN. */
enum block_look th_block_look(const uint8_t *header, const uint8_t *generation, uint64_t *watermark);

/* A header of this process, BLOCK_LOOK_BYTES of it: every word as it was or as it is, and all that was stored before the
 * ones that it shows is visible from here on. Both addresses are multiples of BLOCK_WORD_BYTES. */
void th_block_copy(uint8_t *header, uint64_t block);

/* Whether a range begins among the digests of the block, whose whole header this is. */
bool th_block_has(const uint8_t *header, uint64_t block, const struct iovec *range);

/* Shows `watermark` in the header at `block`, which nobody else writes, one beat more, and wakes whoever waits for it.
 * Everything that was stored before is visible to whoever sees it. */
void th_block_show(uint64_t block, uint64_t watermark);

/* ------------------------------------------------------------------ waiting for any header of this process to change
 *
 * `th_raised_count` before a look, and `th_raised_wait` with that count after one that found too little: a change in
 * between is never slept over. */
uint32_t th_raised_count(void);
void th_raised_wait(uint32_t count, int64_t deadline_ns);
void th_raised_tell(void);

#endif
