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

struct cache {
    struct state *state;
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

static void cache_evict(struct cache *cache, struct cache_node *node)
{
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

struct cache *cache_open(struct state *state, uint64_t bytes)
{
    struct cache *cache = mem_new(1, sizeof *cache);
    cache->state = state;
    cache->limit = bytes;
    return cache;
}

void cache_close(struct cache *cache)
{
    if (!cache)
        return;
    while (cache->oldest)
        cache_drop_snapshot(cache, cache->oldest);
    assert(!cache->root.child && cache->stats.bytes == 0);
    free(cache);
}

uint32_t cache_find(const struct cache *cache, const int32_t *tokens, uint32_t n)
{
    const struct cache_node *node = cache_deepest(cache, tokens, n);
    return node ? node->pos : 0;
}

uint32_t cache_restore(struct cache *cache, const int32_t *tokens, uint32_t n, uint32_t slot)
{
    struct state *state = cache->state;
    struct cache_node *node = cache_deepest(cache, tokens, n);
    struct err err = {0};
    if (!node) {
        cache->stats.misses++;
        return 0;
    }
    cache_touch(cache, node);
    uint32_t pages = node->pos / KV_PAGE, *page = mem_new(pages, sizeof *page);
    for (const struct cache_node *at = node; at->parent; at = at->parent)
        if (cache_pages(at))
            memcpy(page + cache_first_page(at), at->page, cache_pages(at) * sizeof *page);
    state_attach_pages(state, slot, page, pages);
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
    struct cache_node *node = cache_reach(cache, tokens, n, slot);
    node->snapshot = snapshot;
    cache->stats.bytes += bytes;
    cache->stats.entries++;
    cache_note_use(cache, node);
    while (cache->stats.bytes > cache->limit && cache->oldest != node)
        cache_evict(cache, cache->oldest);
    if (cache->stats.bytes > cache->limit) {
        cache_drop_snapshot(cache, node);
        cache_store_failed(cache, n, "it takes more than the cache may hold");
    }
}

void cache_drop(struct cache *cache, const int32_t *tokens, uint32_t n)
{
    struct cache_node *node;
    while ((node = cache_deepest(cache, tokens, n)))
        cache_drop_snapshot(cache, node);
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
