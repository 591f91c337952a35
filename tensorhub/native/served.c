/* The counted union of registered ranges, as sorted stretches: a change moves what lies behind it, a question is a
 * binary search. Decides what is registered, never touches the memory itself. */

#include "served.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int th_served_open(struct served *served)
{
    memset(served, 0, sizeof *served);
    pthread_rwlockattr_t attributes;
    int error = pthread_rwlockattr_init(&attributes);
    if (error != 0)
        return error;
    /* Senders come and go without a pause: with readers preferred, a removal would never get its turn. */
    error = pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    if (error == 0)
        error = pthread_rwlock_init(&served->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    return error;
}

void th_served_close(struct served *served)
{
    pthread_rwlock_destroy(&served->lock);
    free(served->stretches);
}

/* The first stretch that ends behind the address, or n. */
static size_t first_behind(const struct served *served, uint64_t address)
{
    size_t low = 0, high = served->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (served->stretches[middle].end > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool th_served_covers(const struct served *served, uint64_t address, uint64_t nbytes)
{
    uint64_t end = address + nbytes;
    if (end < address)
        return false;
    for (size_t at = first_behind(served, address); at < served->n && served->stretches[at].start <= address; at++) {
        address = served->stretches[at].end;
        if (address >= end)
            return true;
    }
    return false;
}

static void insert(struct served *served, size_t at, struct stretch stretch)
{
    memmove(served->stretches + at + 1, served->stretches + at, (served->n - at) * sizeof *served->stretches);
    served->stretches[at] = stretch;
    served->n++;
}

static void erase(struct served *served, size_t at)
{
    served->n--;
    memmove(served->stretches + at, served->stretches + at + 1, (served->n - at) * sizeof *served->stretches);
}

/* Room for what one change may add: two cuts, and a gap before each stretch that it covers. */
static int reserve(struct served *served, size_t more)
{
    if (served->n + more <= served->room)
        return 0;
    size_t room = 2 * (served->n + more);
    struct stretch *stretches = realloc(served->stretches, room * sizeof *stretches);
    if (stretches == NULL)
        return ENOMEM;
    served->stretches = stretches;
    served->room = room;
    return 0;
}

/* Lets no stretch reach across the address. */
static void cut(struct served *served, uint64_t address)
{
    size_t at = first_behind(served, address);
    if (at == served->n || served->stretches[at].start >= address)
        return;
    struct stretch left = served->stretches[at];
    left.end = address;
    served->stretches[at].start = address;
    insert(served, at, left);
}

/* Joins stretches that touch and have the same count, between two indices, the neighbours of both included. */
static void join(struct served *served, size_t first, size_t last)
{
    size_t at = first > 0 ? first : 1;
    while (at < served->n && at <= last + 1) {
        struct stretch *left = served->stretches + at - 1, *right = left + 1;
        if (left->end == right->start && left->count == right->count) {
            left->end = right->end;
            erase(served, at);
            if (last == 0)
                return;
            last--;
        } else {
            at++;
        }
    }
}

static int add_locked(struct served *served, uint64_t address, uint64_t end)
{
    size_t covered = first_behind(served, end) - first_behind(served, address) + 1;
    int error = reserve(served, covered + 3);
    if (error != 0)
        return error;
    cut(served, address);
    cut(served, end);
    size_t first = first_behind(served, address), at = first;
    while (address < end) {
        if (at < served->n && served->stretches[at].start == address) {
            served->stretches[at].count++;
        } else {
            uint64_t stop = at < served->n && served->stretches[at].start < end ? served->stretches[at].start : end;
            insert(served, at, (struct stretch){address, stop, 1});
        }
        address = served->stretches[at++].end;
    }
    join(served, first, at);
    return 0;
}

static int remove_locked(struct served *served, uint64_t address, uint64_t end)
{
    if (!th_served_covers(served, address, end - address))
        return EINVAL;
    int error = reserve(served, 2);
    if (error != 0)
        return error;
    cut(served, address);
    cut(served, end);
    size_t first = first_behind(served, address), last = first, kept = first;
    for (; last < served->n && served->stretches[last].start < end; last++)
        if (--served->stretches[last].count > 0)
            served->stretches[kept++] = served->stretches[last];
    memmove(served->stretches + kept, served->stretches + last, (served->n - last) * sizeof *served->stretches);
    served->n -= last - kept;
    served->removals++;
    join(served, first, kept);
    return 0;
}

int th_served_add(struct served *served, uint64_t address, uint64_t nbytes)
{
    if (nbytes == 0 || address + nbytes < address)
        return EINVAL;
    pthread_rwlock_wrlock(&served->lock);
    int error = add_locked(served, address, address + nbytes);
    pthread_rwlock_unlock(&served->lock);
    return error;
}

int th_served_remove(struct served *served, uint64_t address, uint64_t nbytes)
{
    if (nbytes == 0 || address + nbytes < address)
        return EINVAL;
    pthread_rwlock_wrlock(&served->lock);
    int error = remove_locked(served, address, address + nbytes);
    pthread_rwlock_unlock(&served->lock);
    return error;
}
