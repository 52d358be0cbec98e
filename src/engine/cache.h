/* The prefix cache: what requests have read stays, so that the next one that begins alike goes on
 * from there.
 *
 * A radix tree over tokens. A node ends at one position and owns (with others) the whole KV pages
 * of its stretch; where it also has a snapshot, a request can begin. Recurrent states cannot be
 * rewound, so a request restores the deepest snapshot on its path. One thread uses it at a time. */
#ifndef ENGINE_CACHE_H
#define ENGINE_CACHE_H

#include "engine/disk.h"
#include "model/state.h"

struct cache;
struct cache_load;

struct cache_stats {
    uint64_t bytes, entries; /* entries: snapshots */
    uint64_t hits, misses, evictions;
    uint64_t loads;  /* hits that came from disk */
    uint64_t stored; /* snapshots; and those that were not, for want of: */
    uint64_t failed_size, failed_memory, failed_disk;
};

/* At most `bytes` of snapshots and pages; the least recently used go first: to `disk`, where there
 * is one (the caller's, may be null), from where they come back. */
struct cache *cache_open(struct state *state, uint64_t bytes, struct disk *disk);
/* What is kept goes to disk, the newest first, for ten seconds at most. No load is open. */
void cache_close(struct cache *cache);

/* Length of the longest prefix of tokens[0..n) that has a snapshot; 0: none. */
uint32_t cache_find(const struct cache *cache, const int32_t *tokens, uint32_t n);

/* Brings that snapshot into the slot, which is empty, and returns its length; 0 leaves the slot
 * empty. */
uint32_t cache_restore(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot);

/* Begins to bring a snapshot of a prefix of tokens[0..n) from disk into the empty slot, when it is
 * longer than what memory has; else null. The tokens stay where they are until it is closed. */
struct cache_load *cache_load_open(struct cache *cache, const int32_t *tokens, uint32_t n,
                                   uint32_t slot);
/* Length of that prefix. */
uint32_t cache_load_length(const struct cache_load *load);

/* Puts what the disk has given by now into the slot, until about until_ns; it never waits for the
 * disk. WAITS: for the disk (see disk_set_news); GOES_ON: there is more to put in now; DONE: the
 * slot stands at the prefix's end; FAILED: it does not hold, or takes too long. */
enum cache_load_state {
    CACHE_LOAD_WAITS,
    CACHE_LOAD_GOES_ON,
    CACHE_LOAD_DONE,
    CACHE_LOAD_FAILED,
};
enum cache_load_state cache_load_step(struct cache_load *load, uint64_t until_ns);

/* After DONE with `keep`; without, at any time, and the slot is empty then. */
void cache_load_close(struct cache_load *load, bool keep);

/* Copies up to `bytes` of pages that are not on disk yet to its writer, so that an eviction finds
 * little to do. True: some were, there may be more. */
bool cache_save_some(struct cache *cache, uint64_t bytes);

/* Keeps what the slot holds, exactly tokens[0..n). A failure is counted, and harmless. */
void cache_store(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot);

/* Removes every snapshot that a request of these tokens could have restored or left. */
void cache_drop(struct cache *cache, const int32_t *tokens, uint32_t n);

/* Gives pages back to the pool until `pages` are free or the cache holds none; false then. */
bool cache_make_room(struct cache *cache, uint64_t pages);

struct cache_stats cache_read_stats(const struct cache *cache);

#endif
