/* Owns the tree, its snapshots and its share of the KV pages.
 *
 * Invariants: a node's pages are those of positions from the last page boundary at or before its
 * beginning to the last one at or before its end, so the pages along a path follow each other
 * without a gap; every node but the root has a snapshot or at least two children (cache_prune);
 * `bytes` is the sum over nodes of snapshot and pages, at most `limit` after every call. */
#include "engine/cache.h"

#include "base/clock.h"
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
    uint32_t saved;                   /* so many pages of its path were handed to the disk */
    struct cache_node *newer, *older; /* by last use, while it has a snapshot */
};

enum {
    CACHE_DISK_GAIN = 64,        /* tokens that a read from disk must spare */
    CACHE_SAVE_BYTES = 64 << 20, /* pages that an eviction copies for the writer, at most */
    CACHE_CLOSE_S = 10,          /* for closing: what is not handed over by then is lost */
    CACHE_LOAD_S = 10,           /* without news from the disk: reading the prompt is faster */
};

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

/* Copies pages of the node's path from `first` on that are not on disk yet to the writer, at most
 * *bytes of them; returns how many pages are there now or on their way. */
static uint32_t cache_save_pages(struct cache *cache, struct cache_node *node, uint32_t first,
                                 const int32_t *tokens, const struct disk_key *keys,
                                 uint64_t *bytes, bool wait)
{
    struct state *state = cache->state;
    uint64_t page_bytes = state_page_bytes(state);
    uint32_t *page = cache_list_pages(node), i = first;
    for (; i < node->pos / KV_PAGE; i++) {
        uint32_t end = (i + 1) * KV_PAGE;
        if (disk_has(cache->disk, DISK_PAGE, keys[end]))
            continue;
        uint8_t *copy = *bytes >= page_bytes ? malloc(page_bytes) : NULL;
        if (!copy || !snapshot_read_page(state, page[i], copy, NULL)) {
            free(copy);
            break;
        }
        if (!disk_write(cache->disk, DISK_PAGE, keys[end], tokens + end - KV_PAGE, KV_PAGE, end,
                        copy, page_bytes, wait))
            break;
        *bytes -= page_bytes;
    }
    free(page);
    return i;
}

/* Hands a node's snapshot (which it loses) to the writer, behind those of its pages that are not on
 * disk yet, at most `bytes` of them: without its pages it is of no use. */
static void cache_save(struct cache *cache, struct cache_node *node, uint64_t bytes, bool wait)
{
    int32_t *tokens = cache_spell(node);
    struct disk_key *keys = mem_new((size_t)node->pos + 1, sizeof *keys);
    disk_name_prefixes(tokens, node->pos, keys);
    if (cache_save_pages(cache, node, 0, tokens, keys, &bytes, wait) < node->pos / KV_PAGE) {
        cache->stats.failed_disk++;
    } else if (!disk_has(cache->disk, DISK_SNAPSHOT, keys[node->pos])) {
        disk_write(cache->disk, DISK_SNAPSHOT, keys[node->pos], tokens, node->pos, node->pos,
                   node->snapshot, snapshot_bytes(cache->state, node->pos), wait);
        node->snapshot = NULL;
    }
    free(tokens);
    free(keys);
}

bool cache_save_some(struct cache *cache, uint64_t bytes)
{
    if (!cache->disk || disk_is_busy(cache->disk))
        return false;
    uint64_t left = bytes;
    for (struct cache_node *node = cache->newest; node; node = node->older) {
        uint32_t pages = node->pos / KV_PAGE;
        if (node->saved == pages)
            continue;
        int32_t *tokens = cache_spell(node);
        struct disk_key *keys = mem_new((size_t)node->pos + 1, sizeof *keys);
        disk_name_prefixes(tokens, node->pos, keys);
        node->saved = cache_save_pages(cache, node, node->saved, tokens, keys, &left, false);
        free(tokens);
        free(keys);
        if (node->saved < pages)
            break;
    }
    return left < bytes;
}

static void cache_evict(struct cache *cache, struct cache_node *node)
{
    if (cache->disk)
        cache_save(cache, node, CACHE_SAVE_BYTES, false);
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
    uint64_t start_ns = clock_now_ns();
    while (cache->newest) {
        if (cache->disk && clock_seconds_since(start_ns) < CACHE_CLOSE_S)
            cache_save(cache, cache->newest, UINT64_MAX, true);
        cache_drop_snapshot(cache, cache->newest);
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

/* ---- from disk ---------------------------------------------------------------------------- */

struct cache_load {
    struct cache *cache;
    struct disk_load *read;
    const int32_t *tokens; /* the caller's, [n] */
    uint32_t n, slot, page;
    uint8_t *snapshot; /* or null: not there yet */
    uint64_t news_ns;
};

/* Pages for a load into the empty slot: shared ones that memory has, and room for the rest. */
static bool cache_prepare_slot(struct cache *cache, struct cache_node *known, uint32_t n,
                               uint32_t slot)
{
    struct state *state = cache->state;
    uint32_t have = known ? known->pos / KV_PAGE : 0;
    if (have) {
        uint32_t *page = cache_list_pages(known);
        state_attach_pages(state, slot, page, have);
        free(page);
    }
    state->slot_pos[slot] = have * KV_PAGE;
    cache->pinned = known;
    bool ok = cache_make_room(cache, n / KV_PAGE - have) &&
              state_reserve(state, slot, n / KV_PAGE * KV_PAGE - have * KV_PAGE, NULL);
    cache->pinned = NULL;
    if (!ok)
        state_reset(state, slot);
    return ok;
}

struct cache_load *cache_load_open(struct cache *cache, const int32_t *tokens, uint32_t n,
                                   uint32_t slot)
{
    if (!cache->disk || n == 0)
        return NULL;
    struct cache_node *known = cache_deepest(cache, tokens, n);
    struct disk_key *keys = mem_new((size_t)n + 1, sizeof *keys);
    disk_name_prefixes(tokens, n, keys);
    uint32_t least = (known ? known->pos : 0) + CACHE_DISK_GAIN;
    uint32_t found = disk_find(cache->disk, keys, least, n);
    struct cache_load *load = NULL;
    if (found && cache_prepare_slot(cache, known, found, slot)) {
        struct disk_load_plan plan = {.tokens = tokens,
                                      .keys = keys,
                                      .n = found,
                                      .first_page = known ? known->pos / KV_PAGE : 0,
                                      .page_rows = KV_PAGE,
                                      .snapshot_bytes = snapshot_bytes(cache->state, found),
                                      .page_bytes = state_page_bytes(cache->state)};
        load = mem_new(1, sizeof *load);
        *load = (struct cache_load){.cache = cache,
                                    .read = disk_load_open(cache->disk, &plan),
                                    .tokens = tokens,
                                    .n = found,
                                    .slot = slot,
                                    .page = plan.first_page,
                                    .news_ns = clock_now_ns()};
        if (known)
            cache_touch(cache, known);
    }
    free(keys);
    return load;
}

uint32_t cache_load_length(const struct cache_load *load)
{
    return load->n;
}

/* All pages are there: the states, and the entry in the tree. */
static bool cache_load_finish(struct cache_load *load)
{
    struct cache *cache = load->cache;
    uint32_t n = load->n;
    if ((n % KV_PAGE && !cache_make_room(cache, 1)) ||
        !snapshot_load(cache->state, load->slot, n, load->snapshot, NULL))
        return false;
    const struct cache_node *known = cache_deepest(cache, load->tokens, n);
    if (!known || known->pos != n) {
        cache_insert(cache, load->tokens, n, load->slot, load->snapshot);
        load->snapshot = NULL;
    }
    cache->stats.hits++;
    cache->stats.loads++;
    return true;
}

enum cache_load_state cache_load_step(struct cache_load *load, uint64_t until_ns)
{
    struct state *state = load->cache->state;
    const uint32_t *table = state->host_table + (size_t)load->slot * state->pages_max;
    while (!load->snapshot || load->page < load->n / KV_PAGE) {
        uint8_t *bytes;
        enum disk_load_state news = disk_load_take(load->read, &bytes);
        uint64_t now = clock_now_ns();
        if (news == DISK_LOAD_WAITS)
            return now - load->news_ns > CACHE_LOAD_S * 1000000000ull ? CACHE_LOAD_FAILED
                                                                      : CACHE_LOAD_WAITS;
        if (news == DISK_LOAD_FAILED)
            return CACHE_LOAD_FAILED;
        load->news_ns = now;
        if (!load->snapshot) {
            load->snapshot = bytes;
        } else {
            bool ok = snapshot_write_page(state, table[load->page++], bytes, NULL);
            free(bytes);
            if (!ok)
                return CACHE_LOAD_FAILED;
        }
        if (now >= until_ns)
            return CACHE_LOAD_GOES_ON;
    }
    return cache_load_finish(load) ? CACHE_LOAD_DONE : CACHE_LOAD_FAILED;
}

void cache_load_close(struct cache_load *load, bool keep)
{
    disk_load_close(load->read);
    if (!keep)
        state_reset(load->cache->state, load->slot);
    free(load->snapshot);
    free(load);
}

/* ---- storing ------------------------------------------------------------------------------ */

static void cache_store_failed(struct cache *cache, uint32_t n, uint64_t *count, const char *why)
{
    ++*count;
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
    if (bytes <= cache->limit && (!snapshot || !snapshot_save(state, slot, snapshot, &err))) {
        cache_store_failed(cache, n, &cache->stats.failed_memory,
                           snapshot ? err.text : "out of memory");
        free(snapshot);
    } else if (!snapshot || !cache_insert(cache, tokens, n, slot, snapshot)) {
        cache_store_failed(cache, n, &cache->stats.failed_size,
                           "it takes more than the cache may hold");
    } else {
        cache->stats.stored++;
    }
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
