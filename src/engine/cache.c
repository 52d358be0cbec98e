/* Owns the tree, its snapshots and its share of the KV pages.
 *
 * Invariants: a node's pages are those of positions from the last page boundary at or before its
 * beginning to the last one at or before its end, so the pages along a path follow each other
 * without a gap; every node but the root has a snapshot or at least two children (cache_prune);
 * `bytes` is the sum over nodes of snapshot and pages, at most `limit` after every call. */
#include "engine/cache.h"

#include "base/log.h"
#include "base/mem.h"
#include "model/snapshot.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct cache_node {
    struct cache_node *parent, *child, *sibling; /* child: the first */
    int32_t *tokens;                             /* [len], from the parent's end to this one's */
    uint32_t len, pos;                           /* pos: where it ends, in tokens from the root */
    uint32_t *page;                              /* [cache_pages] */
    uint8_t *snapshot;                           /* u8 [snapshot_bytes(pos)], or null */
    struct cache_node *newer, *older;            /* by last use, while it has a snapshot */
};

enum { CACHE_DISK_GAIN = 64 }; /* tokens that a read from disk must spare */

struct cache {
    struct state *state;
    struct disk *disk; /* or null */
    uint64_t limit;
    struct cache_node root;
    struct cache_node *newest, *oldest;
    const struct cache_node *pinned; /* being restored: not to be evicted */
    struct cache_stats stats;
    bool warned;
};

/* ---- nodes -------------------------------------------------------------------------------- */

static uint32_t cache_first_page(const struct cache_node *node)
{
    return (node->pos - node->len) / KV_PAGE;
}

static uint32_t cache_pages(const struct cache_node *node)
{
    return node->pos / KV_PAGE - cache_first_page(node);
}

static struct cache_node **cache_link(struct cache_node *node)
{
    struct cache_node **link = &node->parent->child;
    while (*link != node)
        link = &(*link)->sibling;
    return link;
}

static struct cache_node *cache_child(const struct cache_node *node, int32_t token)
{
    struct cache_node *child = node->child;
    while (child && child->tokens[0] != token)
        child = child->sibling;
    return child;
}

/* How many of tokens[0..n) the node's own stretch begins with. */
static uint32_t cache_match(const struct cache_node *node, const int32_t *tokens, uint32_t n)
{
    uint32_t i = 0, most = node->len < n ? node->len : n;
    while (i < most && node->tokens[i] == tokens[i])
        i++;
    return i;
}

static void cache_forget_use(struct cache *cache, struct cache_node *node)
{
    *(node->newer ? &node->newer->older : &cache->newest) = node->older;
    *(node->older ? &node->older->newer : &cache->oldest) = node->newer;
    node->newer = node->older = NULL;
}

static void cache_note_use(struct cache *cache, struct cache_node *node)
{
    node->older = cache->newest;
    node->newer = NULL;
    *(node->older ? &node->older->newer : &cache->oldest) = node;
    cache->newest = node;
}

static void cache_touch(struct cache *cache, struct cache_node *node)
{
    cache_forget_use(cache, node);
    cache_note_use(cache, node);
}

/* A leaf without a snapshot goes. */
static void cache_free_leaf(struct cache *cache, struct cache_node *node)
{
    assert(!node->child && !node->snapshot);
    for (uint32_t i = 0; i < cache_pages(node); i++)
        state_drop_page(cache->state, node->page[i]);
    cache->stats.bytes -= cache_pages(node) * state_page_bytes(cache->state);
    *cache_link(node) = node->sibling;
    free(node->tokens);
    free(node->page);
    free(node);
}

/* A node with one child and no snapshot becomes the beginning of that child. */
static void cache_join_child(struct cache_node *node)
{
    struct cache_node *child = node->child;
    uint32_t pages = cache_pages(node), more = cache_pages(child);
    node->tokens = mem_grow(node->tokens, (size_t)node->len + child->len, sizeof *node->tokens);
    memcpy(node->tokens + node->len, child->tokens, child->len * sizeof *child->tokens);
    node->page = mem_grow(node->page, (size_t)pages + more, sizeof *node->page);
    if (more)
        memcpy(node->page + pages, child->page, more * sizeof *child->page);
    free(child->tokens);
    free(child->page);
    child->tokens = node->tokens;
    child->page = node->page;
    child->len += node->len;
    *cache_link(node) = child;
    child->parent = node->parent;
    child->sibling = node->sibling;
    free(node);
}

/* Restores the tree's second invariant from a node that has lost its snapshot or a child. */
static void cache_prune(struct cache *cache, struct cache_node *node)
{
    while (node->parent && !node->snapshot && !node->child) {
        struct cache_node *parent = node->parent;
        cache_free_leaf(cache, node);
        node = parent;
    }
    if (node->parent && !node->snapshot && !node->child->sibling)
        cache_join_child(node);
}

static void cache_drop_snapshot(struct cache *cache, struct cache_node *node)
{
    cache->stats.bytes -= snapshot_bytes(cache->state, node->pos);
    cache->stats.entries--;
    cache_forget_use(cache, node);
    free(node->snapshot);
    node->snapshot = NULL;
    cache_prune(cache, node);
}

/* The tokens from the root to a node's end; free() releases them. */
static int32_t *cache_spell(const struct cache_node *node)
{
    int32_t *tokens = mem_new(node->pos, sizeof *tokens);
    for (; node->parent; node = node->parent)
        memcpy(tokens + node->pos - node->len, node->tokens, node->len * sizeof *tokens);
    return tokens;
}

/* The whole pages from the root to a node's end. */
static uint32_t *cache_list_pages(const struct cache_node *node)
{
    uint32_t *page = mem_new(node->pos / KV_PAGE, sizeof *page);
    for (; node->parent; node = node->parent)
        if (cache_pages(node))
            memcpy(page + cache_first_page(node), node->page, cache_pages(node) * sizeof *page);
    return page;
}

/* Hands a node's snapshot (which it loses) and those of its pages that are not there yet to the
 * disk, the pages first: a snapshot alone is of no use. */
static void cache_save(struct cache *cache, struct cache_node *node, bool wait)
{
    struct state *state = cache->state;
    int32_t *tokens = cache_spell(node);
    uint32_t *page = cache_list_pages(node);
    struct disk_key *keys = mem_new(node->pos + 1, sizeof *keys);
    bool ok = true;
    disk_name_prefixes(tokens, node->pos, keys);
    for (uint32_t i = 0; ok && i < node->pos / KV_PAGE; i++) {
        uint32_t end = (i + 1) * KV_PAGE;
        if (disk_has(cache->disk, DISK_PAGE, keys[end]))
            continue;
        uint8_t *bytes = malloc(state_page_bytes(state));
        ok = bytes && snapshot_read_page(state, page[i], bytes, NULL);
        if (ok)
            ok = disk_write(cache->disk, DISK_PAGE, keys[end], tokens + end - KV_PAGE, KV_PAGE, end,
                            bytes, state_page_bytes(state), wait);
        else
            free(bytes);
    }
    if (ok && !disk_has(cache->disk, DISK_SNAPSHOT, keys[node->pos])) {
        disk_write(cache->disk, DISK_SNAPSHOT, keys[node->pos], tokens, node->pos, node->pos,
                   node->snapshot, snapshot_bytes(state, node->pos), wait);
        node->snapshot = NULL;
    }
    free(tokens);
    free(page);
    free(keys);
}

static void cache_evict(struct cache *cache, struct cache_node *node)
{
    if (cache->disk)
        cache_save(cache, node, false);
    cache->stats.evictions++;
    cache_drop_snapshot(cache, node);
}

/* ---- the tree ----------------------------------------------------------------------------- */

/* The deepest node with a snapshot that ends within tokens[0..n); null: none. */
static struct cache_node *cache_deepest(const struct cache *cache, const int32_t *tokens,
                                        uint32_t n)
{
    const struct cache_node *node = &cache->root;
    struct cache_node *best = NULL, *child;
    while (node->pos < n && (child = cache_child(node, tokens[node->pos])) &&
           cache_match(child, tokens + node->pos, n - node->pos) == child->len) {
        if (child->snapshot)
            best = child;
        node = child;
    }
    return best;
}

/* Cuts a node after `len` tokens of its stretch; returns the new one, which ends there. */
static struct cache_node *cache_split(struct cache_node *node, uint32_t len)
{
    struct cache_node *front = mem_new(1, sizeof *front);
    uint32_t pages = cache_pages(node);
    front->parent = node->parent;
    front->len = len;
    front->pos = node->pos - node->len + len;
    *cache_link(node) = front;
    front->sibling = node->sibling;
    front->child = node;
    front->tokens = mem_new(len, sizeof *front->tokens);
    memcpy(front->tokens, node->tokens, len * sizeof *front->tokens);
    front->page = mem_new(cache_pages(front), sizeof *front->page);
    if (cache_pages(front))
        memcpy(front->page, node->page, cache_pages(front) * sizeof *front->page);
    node->parent = front;
    node->sibling = NULL;
    node->len -= len;
    memmove(node->tokens, node->tokens + len, node->len * sizeof *node->tokens);
    memmove(node->page, node->page + (pages - cache_pages(node)),
            cache_pages(node) * sizeof *node->page);
    return front;
}

/* A leaf for tokens[parent's end..n), with the slot's pages. */
static struct cache_node *cache_add(struct cache *cache, struct cache_node *parent,
                                    const int32_t *tokens, uint32_t n, uint32_t slot)
{
    struct state *state = cache->state;
    struct cache_node *node = mem_new(1, sizeof *node);
    node->parent = parent;
    node->sibling = parent->child;
    parent->child = node;
    node->pos = n;
    node->len = n - parent->pos;
    node->tokens = mem_new(node->len, sizeof *node->tokens);
    memcpy(node->tokens, tokens + parent->pos, node->len * sizeof *node->tokens);
    node->page = mem_new(cache_pages(node), sizeof *node->page);
    for (uint32_t i = 0; i < cache_pages(node); i++) {
        node->page[i] =
            state->host_table[(size_t)slot * state->pages_max + cache_first_page(node) + i];
        state_hold_page(state, node->page[i]);
    }
    cache->stats.bytes += cache_pages(node) * state_page_bytes(state);
    return node;
}

/* The node that ends exactly at n; made when there is none. */
static struct cache_node *cache_reach(struct cache *cache, const int32_t *tokens, uint32_t n,
                                      uint32_t slot)
{
    struct cache_node *node = &cache->root;
    while (node->pos < n) {
        struct cache_node *child = cache_child(node, tokens[node->pos]);
        if (!child)
            return cache_add(cache, node, tokens, n, slot);
        uint32_t same = cache_match(child, tokens + node->pos, n - node->pos);
        node = same == child->len ? child : cache_split(child, same);
    }
    return node;
}

/* ---- the calls ---------------------------------------------------------------------------- */

struct cache *cache_open(struct state *state, uint64_t bytes, struct disk *disk)
{
    struct cache *cache = mem_new(1, sizeof *cache);
    cache->state = state;
    cache->limit = bytes;
    cache->disk = disk;
    return cache;
}

void cache_close(struct cache *cache)
{
    if (!cache)
        return;
    while (cache->oldest) {
        if (cache->disk)
            cache_save(cache, cache->oldest, true);
        cache_drop_snapshot(cache, cache->oldest);
    }
    assert(!cache->root.child && cache->stats.bytes == 0);
    free(cache);
}

uint32_t cache_find(const struct cache *cache, const int32_t *tokens, uint32_t n)
{
    const struct cache_node *node = cache_deepest(cache, tokens, n);
    return node ? node->pos : 0;
}

/* The snapshot is the cache's from now on: of tokens[0..n), which the slot holds. */
static bool cache_insert(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot,
                         uint8_t *snapshot)
{
    struct cache_node *node = cache_reach(cache, tokens, n, slot);
    assert(!node->snapshot);
    node->snapshot = snapshot;
    cache->stats.bytes += snapshot_bytes(cache->state, n);
    cache->stats.entries++;
    cache_note_use(cache, node);
    while (cache->stats.bytes > cache->limit && cache->oldest != node)
        cache_evict(cache, cache->oldest);
    if (cache->stats.bytes <= cache->limit)
        return true;
    cache_drop_snapshot(cache, node);
    return false;
}

/* Reads page i of tokens from disk into the page that the slot has for it. */
static bool cache_load_page(struct cache *cache, const int32_t *tokens, const struct disk_key *keys,
                            uint32_t i, uint32_t page)
{
    struct state *state = cache->state;
    uint32_t end = (i + 1) * KV_PAGE;
    uint64_t n = state_page_bytes(state);
    uint8_t *bytes = malloc(n);
    bool ok = bytes &&
              disk_read(cache->disk, DISK_PAGE, keys[end], tokens + end - KV_PAGE, KV_PAGE, end,
                        bytes, n) &&
              snapshot_write_page(state, page, bytes, NULL);
    free(bytes);
    return ok;
}

/* Brings the disk's snapshot of tokens[0..n) into the empty slot, and into the tree; of its pages
 * those that `known` (or null) has are shared. The slot is left in any state when it fails. */
static bool cache_load(struct cache *cache, const int32_t *tokens, uint32_t n,
                       const struct disk_key *keys, const struct cache_node *known, uint32_t slot)
{
    struct state *state = cache->state;
    uint32_t have = known ? known->pos / KV_PAGE : 0;
    uint64_t bytes = snapshot_bytes(state, n);
    uint8_t *snapshot = malloc(bytes);
    bool ok =
        snapshot && disk_read(cache->disk, DISK_SNAPSHOT, keys[n], tokens, n, n, snapshot, bytes);
    if (ok && have) {
        uint32_t *page = cache_list_pages(known);
        state_attach_pages(state, slot, page, have);
        free(page);
    }
    state->slot_pos[slot] = have * KV_PAGE;
    ok = ok && cache_make_room(cache, (n + KV_PAGE - 1) / KV_PAGE - have) &&
         state_reserve(state, slot, n / KV_PAGE * KV_PAGE - have * KV_PAGE, NULL);
    for (uint32_t i = have; ok && i < n / KV_PAGE; i++)
        ok = cache_load_page(cache, tokens, keys, i,
                             state->host_table[(size_t)slot * state->pages_max + i]);
    if (!ok || !snapshot_load(state, slot, n, snapshot, NULL)) {
        free(snapshot);
        return false;
    }
    cache_insert(cache, tokens, n, slot, snapshot);
    return true;
}

/* Looks on disk for what is longer than `known`; returns its length, or 0 with the slot empty. */
static uint32_t cache_restore_from_disk(struct cache *cache, const int32_t *tokens, uint32_t n,
                                        const struct cache_node *known, uint32_t slot)
{
    struct disk_key *keys = mem_new((size_t)n + 1, sizeof *keys);
    uint32_t least = (known ? known->pos : 0) + CACHE_DISK_GAIN, found;
    disk_name_prefixes(tokens, n, keys);
    cache->pinned = known;
    while ((found = disk_find(cache->disk, keys, least, n)) &&
           !cache_load(cache, tokens, found, keys, known, slot)) {
        state_reset(cache->state, slot);
        n = found - 1; /* a shorter one may be whole */
    }
    cache->pinned = NULL;
    free(keys);
    return found;
}

uint32_t cache_restore(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot)
{
    struct state *state = cache->state;
    struct cache_node *node = cache_deepest(cache, tokens, n);
    struct err err = {0};
    uint32_t loaded = 0;
    if (node)
        cache_touch(cache, node);
    if (cache->disk && (loaded = cache_restore_from_disk(cache, tokens, n, node, slot))) {
        cache->stats.hits++;
        return loaded;
    }
    if (!node) {
        cache->stats.misses++;
        return 0;
    }
    uint32_t *page = cache_list_pages(node);
    state_attach_pages(state, slot, page, node->pos / KV_PAGE);
    free(page);
    cache->pinned = node;
    bool has_room = node->pos % KV_PAGE == 0 || cache_make_room(cache, 1);
    cache->pinned = NULL;
    if (!has_room || !snapshot_load(state, slot, node->pos, node->snapshot, &err)) {
        log_warn("a prefix of %u tokens could not be restored: %s", node->pos,
                 has_room ? err.text : "no KV page is free");
        state_reset(state, slot);
        cache->stats.misses++;
        return 0;
    }
    cache->stats.hits++;
    return node->pos;
}

static void cache_store_failed(struct cache *cache, uint32_t n, const char *why)
{
    cache->stats.store_failed++;
    if (!cache->warned)
        log_warn("a prefix of %u tokens is not kept: %s (said once)", n, why);
    cache->warned = true;
}

void cache_store(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot)
{
    struct state *state = cache->state;
    uint64_t bytes = snapshot_bytes(state, n);
    struct err err = {0};
    assert(n > 0 && state->slot_pos[slot] == n);
    struct cache_node *known = cache_deepest(cache, tokens, n);
    if (known && known->pos == n) {
        cache_touch(cache, known);
        return;
    }
    uint8_t *snapshot = bytes <= cache->limit ? malloc(bytes) : NULL;
    if (!snapshot || !snapshot_save(state, slot, snapshot, &err)) {
        free(snapshot);
        cache_store_failed(cache, n,
                           bytes > cache->limit ? "it takes more than the cache may hold"
                           : snapshot           ? err.text
                                                : "out of memory");
        return;
    }
    if (!cache_insert(cache, tokens, n, slot, snapshot))
        cache_store_failed(cache, n, "it takes more than the cache may hold");
}

void cache_drop(struct cache *cache, const int32_t *tokens, uint32_t n)
{
    struct cache_node *node;
    while ((node = cache_deepest(cache, tokens, n)))
        cache_drop_snapshot(cache, node);
    if (cache->disk) {
        struct disk_key *keys = mem_new((size_t)n + 1, sizeof *keys);
        disk_name_prefixes(tokens, n, keys);
        disk_drop(cache->disk, keys, n);
        free(keys);
    }
}

bool cache_make_room(struct cache *cache, uint64_t pages)
{
    while (cache->state->free_count < pages) {
        /* What has children gives no page back. */
        struct cache_node *leaf = cache->oldest;
        while (leaf && (leaf->child || leaf == cache->pinned))
            leaf = leaf->newer;
        if (!leaf)
            return false;
        cache_evict(cache, leaf);
    }
    return true;
}

struct cache_stats cache_read_stats(const struct cache *cache)
{
    return cache->stats;
}
