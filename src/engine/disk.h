/* The prefix cache's second tier: snapshots and KV pages as files, for after a restart.
 *
 * A page's file is named after all tokens up to its end, a snapshot's after all tokens before it,
 * so prefixes share pages here too. Entries fit only the same model, page layout and format
 * version; each has a checksum, is written beside and renamed, and is dropped when it does not
 * hold. One thread makes the calls, and none of them waits for the disk, except opening, closing
 * and a write that is told to: two threads of their own write and read. */
#ifndef ENGINE_DISK_H
#define ENGINE_DISK_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct disk;
struct disk_load;

enum disk_kind { DISK_PAGE = 'p', DISK_SNAPSHOT = 's' };

/* Names a prefix by its tokens. */
struct disk_key {
    uint64_t word[2];
};

/* keys[i] names tokens[0..i); keys [n + 1]. */
void disk_name_prefixes(const int32_t *tokens, uint32_t n, struct disk_key *keys);

/* Opens the folder, made when it is missing, and lists what it has. `model` tells models apart. */
bool disk_open(const char *folder, uint64_t limit_bytes, uint64_t model, struct disk **out,
               struct err *err);
/* Waits until all is written. */
void disk_close(struct disk *disk);

/* Whether there is an entry, or will be; it counts as used. */
bool disk_has(struct disk *disk, enum disk_kind kind, struct disk_key key);

/* The longest prefix, from `least` to n tokens, of which there is a snapshot; 0: none. */
uint32_t disk_find(struct disk *disk, const struct disk_key *keys, uint32_t least, uint32_t n);

/* A snapshot of tokens[0..n), and the pages from first_page on before it. */
struct disk_load_plan {
    const int32_t *tokens;       /* [n] */
    const struct disk_key *keys; /* [n + 1] */
    uint32_t n, first_page, page_rows;
    uint64_t snapshot_bytes, page_bytes;
};

/* Begins to read it, beside the caller; the plan's arrays are copied. */
struct disk_load *disk_load_open(struct disk *disk, const struct disk_load_plan *plan);

/* PIECE: the next one, the snapshot first, then the pages in order; *bytes is the caller's (free).
 * FAILED: one is not there or does not hold; what is damaged is removed, with a line in the log. */
enum disk_load_state { DISK_LOAD_WAITS, DISK_LOAD_PIECE, DISK_LOAD_FAILED };
enum disk_load_state disk_load_take(struct disk_load *load, uint8_t **bytes);

/* At any time. */
void disk_load_close(struct disk_load *load);

/* Called from another thread whenever a load has something new; user outlives the disk. Set before
 * the first load. */
void disk_set_news(struct disk *disk, void (*news)(void *user), void *user);

/* Removes all of every prefix of up to n tokens: snapshots, pages, and what waits to be written. */
void disk_drop(struct disk *disk, const struct disk_key *keys, uint32_t n);

/* Queues an entry for writing; `bytes` (malloc) is taken over in any case. False when too much is
 * waiting already; `wait` waits instead. */
bool disk_write(struct disk *disk, enum disk_kind kind, struct disk_key key, const int32_t *tokens,
                uint32_t count, uint32_t pos, uint8_t *bytes, uint64_t n, bool wait);

/* So much waits to be written that what can come later should. */
bool disk_is_busy(struct disk *disk);

struct disk_stats {
    uint64_t bytes, bytes_max, entries, failed;
};

struct disk_stats disk_read_stats(struct disk *disk);

/* Tells a model folder from others by its files' names, sizes and samples of their bytes. */
bool disk_hash_model(const char *folder, uint64_t *hash, struct err *err);

#endif
