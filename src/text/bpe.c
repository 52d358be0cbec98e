/* Merging with a heap of candidate pairs over a linked list of symbols.
 *
 * Invariant: every adjacent pair that has a merge is in the heap. Pairs whose symbols have changed
 * since stay there as well, and are recognised when they come up: the symbol at their place no
 * longer has the ids that they were made from. */
#include "text/bpe.h"

#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>

struct bpe_symbol {
    int32_t id; /* -1 when merged into its left neighbour */
    int32_t prev, next;
};

struct bpe_pair {
    int32_t rank, at; /* `at` is the left symbol's place */
    int32_t left, right, id;
};

static bool bpe_before(const struct bpe_pair *a, const struct bpe_pair *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void bpe_push(struct bpe *bpe, struct bpe_pair pair)
{
    if (bpe->heap_len == bpe->heap_cap) {
        bpe->heap_cap = bpe->heap_cap ? bpe->heap_cap * 2 : 64;
        bpe->heap = mem_grow(bpe->heap, bpe->heap_cap, sizeof *bpe->heap);
    }
    size_t i = bpe->heap_len++;
    while (i && bpe_before(&pair, &bpe->heap[(i - 1) / 2])) {
        bpe->heap[i] = bpe->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    bpe->heap[i] = pair;
}

static struct bpe_pair bpe_pop(struct bpe *bpe)
{
    struct bpe_pair top = bpe->heap[0], last = bpe->heap[--bpe->heap_len];
    size_t i = 0, n = bpe->heap_len;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < n && bpe_before(&bpe->heap[child + 1], &bpe->heap[child]))
            child++;
        if (child >= n || !bpe_before(&bpe->heap[child], &last))
            break;
        bpe->heap[i] = bpe->heap[child];
        i = child;
    }
    if (n)
        bpe->heap[i] = last;
    return top;
}

/* Offers the pair whose left symbol is at `at`, when it has a merge. */
static void bpe_offer(struct bpe *bpe, const struct vocab *vocab, int32_t at)
{
    if (at < 0 || bpe->symbols[at].next < 0)
        return;
    int32_t left = bpe->symbols[at].id, right = bpe->symbols[bpe->symbols[at].next].id;
    const struct vocab_merge *m = vocab_find_merge(vocab, left, right);
    if (m)
        bpe_push(bpe, (struct bpe_pair){m->rank, at, left, right, m->id});
}

void bpe_encode(struct bpe *bpe, const struct vocab *vocab, const char *piece, size_t n,
                struct token_list *out)
{
    assert(n < INT32_MAX);
    if (n > bpe->symbol_cap) {
        bpe->symbol_cap = n + n / 2;
        bpe->symbols = mem_grow(bpe->symbols, bpe->symbol_cap, sizeof *bpe->symbols);
    }
    struct bpe_symbol *s = bpe->symbols;
    int32_t count = (int32_t)n;
    for (int32_t i = 0; i < count; i++)
        s[i] = (struct bpe_symbol){vocab->byte_ids[(unsigned char)piece[i]], i - 1,
                                   i + 1 < count ? i + 1 : -1};
    bpe->heap_len = 0;
    for (int32_t i = 0; i + 1 < count; i++)
        bpe_offer(bpe, vocab, i);
    while (bpe->heap_len) {
        struct bpe_pair p = bpe_pop(bpe);
        int32_t right = s[p.at].next;
        if (s[p.at].id != p.left || right < 0 || s[right].id != p.right)
            continue;
        s[p.at].id = p.id;
        s[p.at].next = s[right].next;
        s[right].id = -1;
        if (s[right].next >= 0)
            s[s[right].next].prev = p.at;
        bpe_offer(bpe, vocab, s[p.at].prev);
        bpe_offer(bpe, vocab, p.at);
    }
    for (int32_t i = n ? 0 : -1; i >= 0; i = s[i].next)
        token_list_push(out, s[i].id);
}

void bpe_free(struct bpe *bpe)
{
    free(bpe->symbols);
    free(bpe->heap);
    *bpe = (struct bpe){0};
}
