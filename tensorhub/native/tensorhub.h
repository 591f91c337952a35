/* What the files of the native library share: time, threads, digests and stores.
 *
 * Decides nothing. Names that are not exported begin with `th_` all the same: the library has one name space.
 */

#ifndef TENSORHUB_H
#define TENSORHUB_H

#ifndef __linux__
#error "TensorHub's native library needs Linux: process_vm_readv, eventfd, per-thread priorities"
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define EXPORT __attribute__((visibility("default")))

/* The kernel takes no more vectors than this in one call. */
#define CALL_RANGES_MAX 1024
/* The largest chunk: nothing bigger is ever gathered to be digested. */
#define SCRATCH_BYTES_MAX (8u << 20)
/* Our threads need a few tens of KiB; thread-local storage of other libraries may need the rest. */
#define THREAD_STACK_BYTES (256u << 10)

int64_t th_now_ns(void);

/* A thread that takes no signals: they stay with the threads that expect them. Returns 0 or errno. */
int th_thread_start(pthread_t *thread, void *(*work)(void *), void *argument);

EXPORT uint64_t th_digest(uint64_t address, uint64_t nbytes);
EXPORT void th_store(uint64_t destination, const uint8_t *data, uint64_t nbytes);
EXPORT int th_digest_runs(const uint64_t *addresses, const uint64_t *nbytes, const uint64_t *firsts, uint64_t chunks,
                          uint64_t *out, _Atomic uint64_t *progress);

#endif
