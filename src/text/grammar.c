/* Owns a run: the sets of places that an answer may be at, interned as states with their moves and
 * masks remembered. A place is a node of the automaton and a stack of nodes to return to; stacks
 * share their tails, so equal stacks have equal ids.
 *
 * Invariant: from every place that is kept, the answer can be ended with at most
 * AUTOMATON_MAX_DEPTH open calls; so each state that has not ended has a next byte, and every
 * byte has a token. A call that is the last thing in its rule leaves nothing on the stack. */
#include "text/grammar.h"

#include "base/mem.h"
#include "text/automaton.h"
#include "text/schema.h"
#include "text/trie.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RUN_MAX_PLACES = 4096, /* of a state; ways beyond are closed */
    RUN_SOFT_STATES = 8192,
    RUN_HARD_STATES = 65536, /* a walk through the trie stops here */
    RUN_SOFT_STACKS = 65536,
    RUN_MASKS = 256, /* kept at a time */
    RUN_MOVES = 256 + AUTOMATON_MARKERS,
    RUN_UNKNOWN = 0, /* of moves */
    RUN_DEAD = 1,    /* the state without places */
};

struct grammar {
    struct automaton automaton;
};

struct run_stack {
    uint32_t node, below, depth;
};

struct run_place {
    uint32_t node, stack;
};

struct run_state {
    struct run_place *places; /* [count], sorted; only nodes that take bytes */
    uint32_t count;
    bool may_end;
    uint32_t *moves; /* [RUN_MOVES] or null */
    uint64_t *mask;  /* [words] or null */
};

struct grammar_run {
    const struct automaton *automaton;
    const struct grammar_vocab *vocab;
    struct run_stack *stacks; /* 0: empty */
    uint32_t stack_count, stack_cap;
    struct run_state *states; /* 0 unused, 1 dead */
    uint32_t state_count, state_cap;
    uint32_t *stack_slots, *state_slots; /* open hashes; 0: empty */
    uint32_t stack_mask, state_mask;
    uint32_t now;
    uint32_t masked[RUN_MASKS]; /* ring of the states that have masks; 0: none */
    size_t mask_count;
    uint32_t *walk; /* [vocab->depth + 1] states along a path of the trie */

    /* The places of the state being made, all those seen in seen[]. */
    struct run_place *work, *seen;
    uint32_t work_count, seen_mask;
    struct run_place *fresh;
    uint32_t fresh_count;
    bool fresh_end;
};

/* Hands the grammar over when it was built, or frees it. */
static bool grammar_finish(struct grammar *grammar, bool built, struct grammar **out)
{
    *out = built ? grammar : NULL;
    if (!built)
        grammar_free(grammar);
    return built;
}

static struct grammar *grammar_new(void)
{
    struct grammar *grammar = mem_new(1, sizeof *grammar);
    automaton_open(&grammar->automaton);
    return grammar;
}

bool grammar_from_schema(const json_t *schema, struct grammar **out, struct err *err)
{
    struct grammar *grammar = grammar_new();
    return grammar_finish(grammar, schema_build(&grammar->automaton, schema, err), out);
}

bool grammar_from_tools(const json_t *tools, const char *name, bool parallel, struct grammar **out,
                        struct err *err)
{
    struct grammar *grammar = grammar_new();
    return grammar_finish(grammar,
                          schema_build_tools(&grammar->automaton, tools, name, parallel, err), out);
}

bool grammar_from_either(const json_t *schema, const json_t *tools, bool parallel,
                         struct grammar **out, struct err *err)
{
    struct grammar *grammar = grammar_new();
    return grammar_finish(
        grammar, schema_build_either(&grammar->automaton, schema, tools, parallel, err), out);
}

void grammar_free(struct grammar *grammar)
{
    if (!grammar)
        return;
    automaton_close(&grammar->automaton);
    free(grammar);
}

static uint32_t run_hash(uint32_t h, uint32_t a, uint32_t b)
{
    uint64_t x = ((uint64_t)a << 32 | b) + ((uint64_t)h << 17) + h;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(x ^ x >> 31);
}

static uint32_t run_push_stack(struct grammar_run *run, uint32_t node, uint32_t below)
{
    if (run->stack_count * 2 > run->stack_mask) {
        run->stack_mask = run->stack_mask * 2 + 1;
        free(run->stack_slots);
        run->stack_slots = mem_new((size_t)run->stack_mask + 1, sizeof *run->stack_slots);
        for (uint32_t s = 1; s < run->stack_count; s++) {
            uint32_t h = run_hash(1, run->stacks[s].node, run->stacks[s].below);
            while (run->stack_slots[h & run->stack_mask])
                h++;
            run->stack_slots[h & run->stack_mask] = s;
        }
    }
    uint32_t h = run_hash(1, node, below), s;
    for (; (s = run->stack_slots[h & run->stack_mask]); h++)
        if (run->stacks[s].node == node && run->stacks[s].below == below)
            return s;
    if (run->stack_count == run->stack_cap) {
        run->stack_cap *= 2;
        run->stacks = mem_grow(run->stacks, run->stack_cap, sizeof *run->stacks);
    }
    run->stack_slots[h & run->stack_mask] = run->stack_count;
    run->stacks[run->stack_count] = (struct run_stack){node, below, run->stacks[below].depth + 1};
    return run->stack_count++;
}

/* Notes a place to be looked at, once. */
static void run_reach(struct grammar_run *run, uint32_t node, uint32_t stack)
{
    if (run->stacks[stack].depth + run->automaton->nodes[node].need > AUTOMATON_MAX_DEPTH)
        return;
    if (run->work_count >= RUN_MAX_PLACES * 4)
        return;
    uint32_t h = run_hash(2, node, stack);
    for (; run->seen[h & run->seen_mask].node; h++) {
        const struct run_place *p = &run->seen[h & run->seen_mask];
        if (p->node == node && p->stack == stack)
            return;
    }
    run->seen[h & run->seen_mask] = (struct run_place){node, stack};
    run->work[run->work_count++] = (struct run_place){node, stack};
}

static void run_forget_seen(struct grammar_run *run)
{
    for (uint32_t i = 0; i < run->work_count; i++) {
        uint32_t h = run_hash(2, run->work[i].node, run->work[i].stack);
        for (; run->seen[h & run->seen_mask].node; h++)
            run->seen[h & run->seen_mask] = (struct run_place){0, 0};
    }
    run->work_count = run->fresh_count = 0;
    run->fresh_end = false;
}

/* Follows all edges that take nothing, from the places in work. */
static void run_close(struct grammar_run *run)
{
    const struct automaton *a = run->automaton;
    for (uint32_t i = 0; i < run->work_count; i++) {
        struct run_place place = run->work[i];
        bool takes = false;
        if (a->nodes[place.node].end) {
            if (place.stack)
                run_reach(run, run->stacks[place.stack].node, run->stacks[place.stack].below);
            else
                run->fresh_end = true;
        }
        for (uint32_t e = a->nodes[place.node].edges; e; e = a->edges[e].next) {
            const struct automaton_edge *edge = &a->edges[e];
            bool known = run->vocab->markers[edge->kind >= AUTOMATON_MARKER ? edge->lo : 0] >= 0;
            if (edge->kind == AUTOMATON_BYTE || (edge->kind == AUTOMATON_MARKER && known)) {
                takes = true;
            } else if (edge->kind == AUTOMATON_EMPTY || (edge->kind == AUTOMATON_SPELT && !known)) {
                run_reach(run, edge->target, place.stack);
            } else if (edge->kind == AUTOMATON_CALL) {
                uint32_t stack = place.stack;
                if (!a->nodes[edge->target].end) {
                    if (run->stacks[stack].depth + 1 > AUTOMATON_MAX_DEPTH)
                        continue;
                    stack = run_push_stack(run, edge->target, stack);
                }
                run_reach(run, a->rules[edge->rule].start, stack);
            }
        }
        if (takes && run->fresh_count < RUN_MAX_PLACES)
            run->fresh[run->fresh_count++] = place;
    }
}

static int run_compare(const void *a, const void *b)
{
    const struct run_place *x = a, *y = b;
    if (x->node != y->node)
        return x->node < y->node ? -1 : 1;
    return x->stack < y->stack ? -1 : x->stack > y->stack;
}

static uint32_t run_hash_state(const struct run_place *places, uint32_t count, bool end)
{
    uint32_t h = count * 2 + end;
    for (uint32_t i = 0; i < count; i++)
        h = run_hash(h, places[i].node, places[i].stack);
    return h;
}

/* The state of the places in work. */
static uint32_t run_intern(struct grammar_run *run)
{
    run_close(run);
    if (!run->fresh_count && !run->fresh_end) {
        run_forget_seen(run);
        return RUN_DEAD;
    }
    if (run->fresh_count > 1)
        qsort(run->fresh, run->fresh_count, sizeof *run->fresh, run_compare);
    if (run->state_count * 2 > run->state_mask) {
        run->state_mask = run->state_mask * 2 + 1;
        free(run->state_slots);
        run->state_slots = mem_new((size_t)run->state_mask + 1, sizeof *run->state_slots);
        for (uint32_t s = 2; s < run->state_count; s++) {
            const struct run_state *st = &run->states[s];
            uint32_t h = run_hash_state(st->places, st->count, st->may_end);
            while (run->state_slots[h & run->state_mask])
                h++;
            run->state_slots[h & run->state_mask] = s;
        }
    }
    size_t bytes = run->fresh_count * sizeof *run->fresh;
    uint32_t h = run_hash_state(run->fresh, run->fresh_count, run->fresh_end), s;
    for (; (s = run->state_slots[h & run->state_mask]); h++) {
        const struct run_state *st = &run->states[s];
        if (st->count == run->fresh_count && st->may_end == run->fresh_end &&
            !memcmp(st->places, run->fresh, bytes)) {
            run_forget_seen(run);
            return s;
        }
    }
    if (run->state_count == run->state_cap) {
        run->state_cap *= 2;
        run->states = mem_grow(run->states, run->state_cap, sizeof *run->states);
    }
    s = run->state_count++;
    run->state_slots[h & run->state_mask] = s;
    struct run_state *state = &run->states[s];
    *state = (struct run_state){.count = run->fresh_count, .may_end = run->fresh_end};
    state->places = mem_new(run->fresh_count + 1, sizeof *state->places);
    memcpy(state->places, run->fresh, bytes);
    run_forget_seen(run);
    return s;
}

/* The state after a symbol: a byte, or 256 + a marker. */
static uint32_t run_move(struct grammar_run *run, uint32_t from, unsigned symbol)
{
    if (from == RUN_DEAD)
        return RUN_DEAD;
    if (!run->states[from].moves)
        run->states[from].moves = mem_new(RUN_MOVES, sizeof(uint32_t));
    uint32_t known = run->states[from].moves[symbol];
    if (known != RUN_UNKNOWN)
        return known;
    const struct automaton *a = run->automaton;
    for (uint32_t i = 0; i < run->states[from].count; i++) {
        struct run_place place = run->states[from].places[i];
        for (uint32_t e = a->nodes[place.node].edges; e; e = a->edges[e].next) {
            const struct automaton_edge *edge = &a->edges[e];
            bool fits = symbol < 256 ? edge->kind == AUTOMATON_BYTE && edge->lo <= symbol &&
                                           symbol <= edge->hi
                                     : edge->kind == AUTOMATON_MARKER && edge->lo == symbol - 256;
            if (fits)
                run_reach(run, edge->target, place.stack);
        }
    }
    uint32_t to = run_intern(run);
    run->states[from].moves[symbol] = to;
    return to;
}

static void run_clear_states(struct grammar_run *run)
{
    for (uint32_t s = 0; s < run->state_count; s++) {
        free(run->states[s].places);
        free(run->states[s].moves);
        free(run->states[s].mask);
    }
    memset(run->states, 0, 2 * sizeof *run->states);
    run->state_count = 2;
    memset(run->masked, 0, sizeof run->masked);
    memset(run->state_slots, 0, ((size_t)run->state_mask + 1) * sizeof *run->state_slots);
}

/* Copies a stack of the old table into the new one. */
static uint32_t run_copy_stack(struct grammar_run *run, const struct run_stack *old, uint32_t id)
{
    uint32_t nodes[AUTOMATON_MAX_DEPTH + 1], n = 0, stack = 0;
    for (; id; id = old[id].below)
        nodes[n++] = old[id].node;
    while (n)
        stack = run_push_stack(run, nodes[--n], stack);
    return stack;
}

/* Forgets everything but where the answer stands, so that a long answer keeps a bounded memory. */
static void run_trim(struct grammar_run *run)
{
    if (run->state_count < RUN_SOFT_STATES && run->stack_count < RUN_SOFT_STACKS)
        return;
    struct run_state now = run->states[run->now];
    run->states[run->now].places = NULL;
    struct run_stack *old = run->stacks;
    run_clear_states(run);
    run->stack_cap = 1024;
    run->stacks = mem_new(run->stack_cap, sizeof *run->stacks);
    run->stack_count = 1;
    memset(run->stack_slots, 0, ((size_t)run->stack_mask + 1) * sizeof *run->stack_slots);
    for (uint32_t i = 0; i < now.count; i++)
        run_reach(run, now.places[i].node, run_copy_stack(run, old, now.places[i].stack));
    uint32_t s = run_intern(run);
    run->states[s].may_end = now.may_end;
    run->now = s;
    free(now.places);
    free(old);
}

struct grammar_run *grammar_run_open(const struct grammar *grammar,
                                     const struct grammar_vocab *vocab)
{
    struct grammar_run *run = mem_new(1, sizeof *run);
    run->automaton = &grammar->automaton;
    run->vocab = vocab;
    run->stack_cap = run->state_cap = 1024;
    run->stack_mask = run->state_mask = 4095;
    run->stacks = mem_new(run->stack_cap, sizeof *run->stacks);
    run->states = mem_new(run->state_cap, sizeof *run->states);
    run->stack_slots = mem_new((size_t)run->stack_mask + 1, sizeof *run->stack_slots);
    run->state_slots = mem_new((size_t)run->state_mask + 1, sizeof *run->state_slots);
    run->stack_count = 1;
    run->state_count = 2;
    run->seen_mask = RUN_MAX_PLACES * 8 - 1;
    run->work = mem_new(RUN_MAX_PLACES * 4, sizeof *run->work);
    run->seen = mem_new((size_t)run->seen_mask + 1, sizeof *run->seen);
    run->fresh = mem_new(RUN_MAX_PLACES, sizeof *run->fresh);
    run->walk = mem_new(vocab->depth + 2, sizeof *run->walk);
    run_reach(run, run->automaton->rules[run->automaton->root].start, 0);
    run->now = run_intern(run);
    assert(run->now != RUN_DEAD);
    return run;
}

void grammar_run_close(struct grammar_run *run)
{
    if (!run)
        return;
    run_clear_states(run);
    free(run->states);
    free(run->stacks);
    free(run->stack_slots);
    free(run->state_slots);
    free(run->work);
    free(run->seen);
    free(run->fresh);
    free(run->walk);
    free(run);
}

static void run_allow(uint64_t *mask, int32_t id)
{
    if (id >= 0)
        mask[id / 64] |= (uint64_t)1 << id % 64;
}

/* Tries the tokens below the nodes [i, end) of the trie; i is at depth 0. */
static void run_walk(struct grammar_run *run, const struct trie *trie, uint32_t i, uint32_t end,
                     uint64_t *mask)
{
    run->walk[0] = run->now;
    while (i < end && run->state_count < RUN_HARD_STATES) {
        uint32_t d = trie->depth[i], to = run_move(run, run->walk[d], trie->bytes[i]);
        if (to == RUN_DEAD) {
            i = trie->skip[i];
            continue;
        }
        for (uint32_t t = trie->first[i]; t < trie->first[i + 1]; t++)
            run_allow(mask, trie->tokens[t]);
        run->walk[d + 1] = to;
        i++;
    }
}

/* The tokens that begin with the byte may leave the text: tried one by one. */
static void run_walk_leaving(struct grammar_run *run, uint8_t byte, uint64_t *mask)
{
    const struct trie *all = &run->vocab->all;
    uint32_t i = 0;
    while (i < all->count && all->bytes[i] != byte)
        i = all->skip[i];
    if (i == all->count)
        return;
    for (uint32_t t = all->first[i]; t < all->first[all->skip[i]]; t++)
        mask[all->tokens[t] / 64] &= ~((uint64_t)1 << all->tokens[t] % 64);
    run_walk(run, all, i, all->skip[i], mask);
}

/* Where free text is expected, the tokens that are nothing but free text are known beforehand, and
 * only the others are tried. */
static void run_walk_text(struct grammar_run *run, uint64_t *mask)
{
    const struct grammar_vocab *vocab = run->vocab;
    const struct run_state *state = &run->states[run->now];
    uint32_t kind = AUTOMATON_NO_TEXT, room = 0, others = 0, leave_count = 0;
    uint8_t leave[256];
    bool leaves[256] = {false};
    for (uint32_t i = 0; i < state->count; i++) {
        const struct automaton_node *node = &run->automaton->nodes[state->places[i].node];
        if (!node->text || (kind && kind != node->text)) {
            others++;
            continue;
        }
        kind = node->text;
        room = node->room > room ? node->room : room;
        if (node->leave && !leaves[node->leave])
            leave[leave_count++] = node->leave;
        leaves[node->leave] = true;
    }
    const struct trie_text *text = &vocab->texts[kind];
    if (!kind || (room < text->longest && others)) {
        run_walk(run, &vocab->all, 0, vocab->all.count, mask);
        return;
    }
    memcpy(mask, text->allowed, vocab->words * sizeof *mask);
    for (uint32_t id = 0; room < text->longest && id < vocab->vocab; id++)
        if (text->chars[id] > room)
            mask[id / 64] &= ~((uint64_t)1 << id % 64);
    run_walk(run, &text->rest, 0, text->rest.count, mask);
    for (uint32_t i = 0; i < leave_count; i++)
        run_walk_leaving(run, leave[i], mask);
}

/* The mask of the state; the oldest ones are made again when many are kept. */
static const uint64_t *run_mask(struct grammar_run *run)
{
    const struct grammar_vocab *vocab = run->vocab;
    if (run->states[run->now].mask)
        return run->states[run->now].mask;
    uint64_t *mask = mem_new(vocab->words, sizeof *mask);
    run_walk_text(run, mask);
    for (unsigned byte = 0; byte < 256; byte++)
        if (vocab->byte_ids[byte] >= 0 && run_move(run, run->now, byte) != RUN_DEAD)
            run_allow(mask, vocab->byte_ids[byte]);
    for (unsigned m = 0; m < AUTOMATON_MARKERS; m++)
        if (vocab->markers[m] >= 0 && run_move(run, run->now, 256 + m) != RUN_DEAD)
            run_allow(mask, vocab->markers[m]);
    uint32_t *slot = &run->masked[run->mask_count++ % RUN_MASKS];
    free(run->states[*slot].mask);
    run->states[*slot].mask = NULL;
    *slot = run->now;
    run->states[run->now].mask = mask;
    return mask;
}

void grammar_run_mask(struct grammar_run *run, const int32_t *stop, size_t stop_count,
                      float *logits, size_t n)
{
    run_trim(run);
    const uint64_t *mask = run_mask(run);
    bool may_end = run->states[run->now].may_end;
    float kept[16];
    assert(stop_count <= 16);
    for (size_t i = 0; i < stop_count; i++)
        kept[i] = stop[i] >= 0 && (size_t)stop[i] < n ? logits[stop[i]] : 0;
    for (size_t w = 0; w * 64 < n; w++) {
        uint64_t bits = w < run->vocab->words ? mask[w] : 0;
        size_t count = n - w * 64 < 64 ? n - w * 64 : 64;
        for (size_t i = 0; bits != UINT64_MAX && i < count; i++)
            if (!(bits >> i & 1))
                logits[w * 64 + i] = -INFINITY;
    }
    for (size_t i = 0; i < stop_count; i++)
        if (stop[i] >= 0 && (size_t)stop[i] < n)
            logits[stop[i]] = may_end ? kept[i] : -INFINITY;
}

bool grammar_run_accept(struct grammar_run *run, int32_t id)
{
    uint32_t state = run->now;
    size_t n;
    const char *bytes = tokenizer_bytes(run->vocab->tokenizer, id, &n);
    if (!n)
        return false;
    unsigned m = 0;
    while (m < AUTOMATON_MARKERS && (id < 0 || run->vocab->markers[m] != id))
        m++;
    if (m < AUTOMATON_MARKERS)
        state = run_move(run, state, 256 + m);
    else if (tokenizer_is_added(run->vocab->tokenizer, id))
        return false;
    for (size_t i = 0; m == AUTOMATON_MARKERS && i < n; i++)
        state = run_move(run, state, (uint8_t)bytes[i]);
    if (state == RUN_DEAD)
        return false;
    run->now = state;
    return true;
}

bool grammar_run_is_done(const struct grammar_run *run)
{
    const struct run_state *state = &run->states[run->now];
    return state->may_end && !state->count;
}
