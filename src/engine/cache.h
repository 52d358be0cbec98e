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

struct cache_stats {
    uint64_t bytes, entries; /* entries: snapshots */
    uint64_t hits, misses, evictions, store_failed;
};

/* At most `bytes` of snapshots and pages; the least recently used go first: to `disk`, where there
 * is one (the caller's, may be null), from where they come back. */
struct cache *cache_open(struct state *state, uint64_t bytes, struct disk *disk);
/* What is kept goes to disk. */
void cache_close(struct cache *cache);

/* Length of the longest prefix of tokens[0..n) that has a snapshot; 0: none. */
uint32_t cache_find(const struct cache *cache, const int32_t *tokens, uint32_t n);

/* Brings that snapshot, or a longer one from disk, into the slot, which is empty, and returns its
 * length; 0 leaves the slot empty. */
uint32_t cache_restore(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot);

/* Keeps what the slot holds, exactly tokens[0..n). A failure is counted, and harmless. */
void cache_store(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot);

/* Removes every snapshot that a request of these tokens could have restored or left. */
void cache_drop(struct cache *cache, const int32_t *tokens, uint32_t n);

/* Gives pages back to the pool until `pages` are free or the cache holds none; false then. */
bool cache_make_room(struct cache *cache, uint64_t pages);

struct cache_stats cache_read_stats(const struct cache *cache);

#endif
