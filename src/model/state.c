/* Owns the pools: KV pages, GDN states, convolution rows, and who holds which part of them.
 *
 * Invariants: a page is on the free stack or has an owner, never both; a slot holds exactly the
 * pages of positions 0 .. 256 * slot_pages - 1; an unused slot holds none and stands at 0. What a
 * released page or slot held is not erased: position 0 tells the ops to start from nothing. */
#include "model/state.h"

#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* a * b, or UINT64_MAX when that is more. */
static uint64_t state_times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t state_plus(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t state_pages_of(uint64_t positions)
{
    return (positions + KV_PAGE - 1) / KV_PAGE;
}

static uint64_t state_pages(const struct state_limits *limits)
{
    return limits->pages ? limits->pages : state_times(limits->slots, state_pages_of(limits->ctx));
}

/* Bytes of one layer's K pages (and of its V pages): kv_kind [pages, kv_heads, 256, 256]. */
static uint64_t state_kv_bytes(const struct config *config, const struct state_limits *limits)
{
    uint64_t element = limits->kv_kind == KV_BF16 ? 2 : 4;
    return state_times(state_pages(limits), element * config->kv_heads * KV_PAGE * CONFIG_HEAD_DIM);
}

/* f32 [slots, value_heads, 128, 128] */
static uint64_t state_delta_bytes(const struct config *config, const struct state_limits *limits)
{
    return state_times(limits->slots,
                       4ull * config->value_heads * CONFIG_DELTA_DIM * CONFIG_DELTA_DIM);
}

/* f32 [slots, 3, channels] */
static uint64_t state_conv_bytes(const struct config *config, const struct state_limits *limits)
{
    uint64_t channels = (2ull * config->key_heads + config->value_heads) * CONFIG_DELTA_DIM;
    return state_times(limits->slots, 4ull * (CONFIG_CONV_TAPS - 1) * channels);
}

static uint64_t state_table_bytes(const struct state_limits *limits)
{
    return state_times(limits->slots, 4 * state_pages_of(limits->ctx));
}

uint64_t state_page_bytes(const struct state *state)
{
    const struct config *config = &state->model->config;
    uint64_t element = state->limits.kv_kind == KV_BF16 ? 2 : 4;
    return 2ull * config->attention_layers * config->kv_heads * KV_PAGE * CONFIG_HEAD_DIM * element;
}

struct state_bytes state_bytes(const struct config *config, const struct state_limits *limits)
{
    struct state_bytes b = {
        .kv = state_times(2ull * config->attention_layers, state_kv_bytes(config, limits)),
        .delta = state_times(config->delta_layers, state_delta_bytes(config, limits)),
        .conv = state_times(config->delta_layers, state_conv_bytes(config, limits)),
        .table = state_table_bytes(limits),
    };
    b.total = state_plus(state_plus(b.kv, b.delta), state_plus(b.conv, b.table));
    return b;
}

/* A pool of no layers is a null span, which no op will see. */
static bool state_alloc(struct state *state, const char *what, uint64_t bytes, struct span *out,
                        struct err *err)
{
    struct device *device = state->model->device;
    if (bytes == 0 || device_calls(device)->alloc(device, bytes, out, err))
        return true;
    return err_wrap(err, "%s", what);
}

static bool state_open_pools(struct state *state, struct err *err)
{
    struct state_bytes bytes = state_bytes(&state->model->config, &state->limits);
    return state_alloc(state, "KV pages", bytes.kv, &state->kv, err) &&
           state_alloc(state, "GDN states", bytes.delta, &state->delta, err) &&
           state_alloc(state, "convolution rows", bytes.conv, &state->conv, err) &&
           state_alloc(state, "page table", bytes.table, &state->page_table, err);
}

static bool state_open_tables(struct state *state, struct err *err)
{
    const struct state_limits *limits = &state->limits;
    state->host_table = mem_try(limits->slots, 4 * (size_t)state->pages_max);
    state->free_pages = mem_try(limits->pages, sizeof *state->free_pages);
    state->page_refs = mem_try(limits->pages, sizeof *state->page_refs);
    if (!state->host_table || !state->free_pages || !state->page_refs)
        return err_set(err, ERR_RESOURCE,
                       "no memory for tables of %u slots and %llu KV pages; use a smaller "
                       "--ctx or --parallel",
                       limits->slots, (unsigned long long)limits->pages);
    state->slot_pos = mem_new(limits->slots, sizeof *state->slot_pos);
    state->slot_pages = mem_new(limits->slots, sizeof *state->slot_pages);
    state->slot_used = mem_new(limits->slots, sizeof *state->slot_used);
    /* The stack pops the lowest page first. */
    for (uint64_t i = 0; i < limits->pages; i++)
        state->free_pages[i] = (uint32_t)(limits->pages - 1 - i);
    state->free_count = limits->pages;
    return true;
}

static void state_count_layers(struct state *state)
{
    const struct config *config = &state->model->config;
    state->ordinal = mem_new(config->layers, sizeof *state->ordinal);
    uint32_t seen[2] = {0, 0};
    for (uint32_t layer = 0; layer < config->layers; layer++)
        state->ordinal[layer] = seen[config->full_attention[layer]]++;
}

bool state_open(const struct model *model, const struct state_limits *limits, struct state *state,
                struct err *err)
{
    assert(limits->slots > 0 && limits->ctx > 0);
    memset(state, 0, sizeof *state);
    state->model = model;
    state->limits = *limits;
    state->limits.pages = state_pages(limits);
    state->pages_max = (uint32_t)state_pages_of(limits->ctx);
    if (state->limits.pages > UINT32_MAX || state_bytes(&model->config, limits).total == UINT64_MAX)
        return err_set(err, ERR_RESOURCE,
                       "a context of %u positions for %u sequences is more than can be addressed; "
                       "use a smaller one",
                       limits->ctx, limits->slots);
    state_count_layers(state);
    if (state_open_pools(state, err) && state_open_tables(state, err))
        return true;
    state_close(state);
    return false;
}

void state_close(struct state *state)
{
    const struct span pools[] = {state->kv, state->delta, state->conv, state->page_table};
    for (size_t i = 0; i < sizeof pools / sizeof *pools; i++)
        if (pools[i].base)
            device_calls(state->model->device)->free(state->model->device, pools[i]);
    free(state->host_table);
    free(state->slot_pos);
    free(state->slot_pages);
    free(state->slot_used);
    free(state->free_pages);
    free(state->page_refs);
    free(state->ordinal);
    memset(state, 0, sizeof *state);
}

bool state_acquire(struct state *state, uint32_t *slot, struct err *err)
{
    for (uint32_t i = 0; i < state->limits.slots; i++)
        if (!state->slot_used[i]) {
            state->slot_used[i] = true;
            *slot = i;
            return true;
        }
    return err_set(err, ERR_RESOURCE, "all %u sequence slots are in use", state->limits.slots);
}

void state_hold_page(struct state *state, uint32_t page)
{
    assert(state->page_refs[page] > 0);
    state->page_refs[page]++;
}

void state_drop_page(struct state *state, uint32_t page)
{
    assert(state->page_refs[page] > 0);
    if (--state->page_refs[page] == 0)
        state->free_pages[state->free_count++] = page;
}

bool state_take_page(struct state *state, uint32_t *page)
{
    if (state->free_count == 0)
        return false;
    *page = state->free_pages[--state->free_count];
    state->page_refs[*page] = 1;
    return true;
}

/* Shrinks the slot to its first `keep` pages. */
static void state_drop_pages(struct state *state, uint32_t slot, uint32_t keep)
{
    const uint32_t *row = state->host_table + (size_t)slot * state->pages_max;
    while (state->slot_pages[slot] > keep) {
        uint32_t page = row[--state->slot_pages[slot]];
        state_drop_page(state, page);
    }
}

void state_reset(struct state *state, uint32_t slot)
{
    assert(state->slot_used[slot]);
    state_drop_pages(state, slot, 0);
    state->slot_pos[slot] = 0;
}

void state_release(struct state *state, uint32_t slot)
{
    state_reset(state, slot);
    state->slot_used[slot] = false;
}

void state_trim(struct state *state, uint32_t slot)
{
    assert(state->slot_used[slot]);
    state_drop_pages(state, slot, (uint32_t)state_pages_of(state->slot_pos[slot]));
}

/* Tells the device the slot's pages from `first` on. */
static void state_write_table(struct state *state, uint32_t slot, uint32_t first)
{
    struct device *device = state->model->device;
    uint64_t at = (uint64_t)slot * state->pages_max + first;
    device_calls(device)->write(device, span_at(state->page_table, 4 * at), state->host_table + at,
                                4ull * (state->slot_pages[slot] - first));
}

bool state_reserve(struct state *state, uint32_t slot, uint32_t rows, struct err *err)
{
    assert(state->slot_used[slot]);
    uint64_t end = (uint64_t)state->slot_pos[slot] + rows;
    if (end > state->limits.ctx)
        return err_set(err, ERR_RESOURCE,
                       "%llu positions are more than the context of %u; use a larger --ctx or a "
                       "shorter prompt",
                       (unsigned long long)end, state->limits.ctx);
    uint32_t have = state->slot_pages[slot], want = (uint32_t)state_pages_of(end);
    if (want <= have)
        return true;
    if (want - have > state->free_count)
        return err_set(err, ERR_RESOURCE,
                       "%u more KV pages of %d positions are needed and %llu are free", want - have,
                       KV_PAGE, (unsigned long long)state->free_count);
    uint32_t *row = state->host_table + (size_t)slot * state->pages_max;
    for (uint32_t i = have; i < want; i++)
        state_take_page(state, &row[i]);
    state->slot_pages[slot] = want;
    state_write_table(state, slot, have);
    return true;
}

void state_attach_pages(struct state *state, uint32_t slot, const uint32_t *page, uint32_t count)
{
    assert(state->slot_used[slot] && state->slot_pages[slot] == 0 && count <= state->pages_max);
    uint32_t *row = state->host_table + (size_t)slot * state->pages_max;
    for (uint32_t i = 0; i < count; i++) {
        state_hold_page(state, page[i]);
        row[i] = page[i];
    }
    state->slot_pages[slot] = count;
    state_write_table(state, slot, 0);
}

struct span state_k_pages(const struct state *state, uint32_t layer)
{
    assert(state->model->config.full_attention[layer]);
    uint64_t bytes = state_kv_bytes(&state->model->config, &state->limits);
    return span_at(state->kv, 2 * state->ordinal[layer] * bytes);
}

struct span state_v_pages(const struct state *state, uint32_t layer)
{
    uint64_t bytes = state_kv_bytes(&state->model->config, &state->limits);
    return span_at(state_k_pages(state, layer), bytes);
}

struct span state_delta(const struct state *state, uint32_t layer)
{
    assert(!state->model->config.full_attention[layer]);
    uint64_t bytes = state_delta_bytes(&state->model->config, &state->limits);
    return span_at(state->delta, state->ordinal[layer] * bytes);
}

struct span state_conv(const struct state *state, uint32_t layer)
{
    assert(!state->model->config.full_attention[layer]);
    uint64_t bytes = state_conv_bytes(&state->model->config, &state->limits);
    return span_at(state->conv, state->ordinal[layer] * bytes);
}
