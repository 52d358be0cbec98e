/* Slots, pages and what exhaustion leaves behind, on a device that only has memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rand.h"
#include "model/state.h"

#include <stdlib.h>
#include <string.h>

static bool alloc(struct device *device, uint64_t bytes, struct span *out, struct err *err)
{
    (void)device;
    if (bytes > 1u << 30)
        return err_set(err, ERR_RESOURCE, "no memory");
    *out = (struct span){calloc(1, bytes), 0};
    return true;
}

static void release(struct device *device, struct span span)
{
    (void)device;
    free(span.base);
}

static void write_bytes(struct device *device, struct span to, const void *from, uint64_t bytes)
{
    (void)device;
    memcpy((char *)to.base + to.offset, from, bytes);
}

static struct device_head device = {
    .name = "memory only",
    .calls = {.alloc = alloc, .free = release, .write = write_bytes},
};

static bool pattern[5] = {false, true, false, true, false};
static const struct model model = {
    .device = (struct device *)&device,
    .config = {.layers = 5,
               .full_attention = pattern,
               .attention_layers = 2,
               .delta_layers = 3,
               .kv_heads = 2,
               .key_heads = 2,
               .value_heads = 6},
};

static struct state open_state(uint32_t slots, uint32_t ctx, uint64_t pages)
{
    struct state state;
    struct err err;
    struct state_limits limits = {.slots = slots, .ctx = ctx, .pages = pages, .kv_kind = KV_BF16};
    assert_true(state_open(&model, &limits, &state, &err));
    return state;
}

static uint32_t acquire(struct state *state)
{
    struct err err;
    uint32_t slot;
    assert_true(state_acquire(state, &slot, &err));
    return slot;
}

static void slots_are_taken_and_given_back(void **unused)
{
    (void)unused;
    struct state state = open_state(3, 1000, 0);
    struct err err;
    uint32_t slot;
    assert_int_equal(state.limits.pages, 3 * 4);
    assert_int_equal(acquire(&state), 0);
    assert_int_equal(acquire(&state), 1);
    assert_int_equal(acquire(&state), 2);
    assert_false(state_acquire(&state, &slot, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    state_release(&state, 1);
    assert_int_equal(acquire(&state), 1);
    assert_int_equal(state.slot_pos[1], 0);
    state_close(&state);
}

static void pages_follow_positions(void **unused)
{
    (void)unused;
    struct state state = open_state(2, 1000, 0);
    struct err err;
    uint32_t slot = acquire(&state);
    const uint32_t *table = state.page_table.base;
    assert_true(state_reserve(&state, slot, 256, &err));
    assert_int_equal(state.slot_pages[slot], 1);
    assert_true(state_reserve(&state, slot, 257, &err));
    assert_int_equal(state.slot_pages[slot], 2);
    assert_int_equal(state.free_count, 6);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(table[i], state.host_table[i]);
    state_trim(&state, slot);
    assert_int_equal(state.slot_pages[slot], 0);
    state.slot_pos[slot] = 256;
    assert_true(state_reserve(&state, slot, 744, &err));
    assert_int_equal(state.slot_pages[slot], 4);
    state_trim(&state, slot);
    assert_int_equal(state.slot_pages[slot], 1);
    state_reset(&state, slot);
    assert_int_equal(state.free_count, 8);
    assert_int_equal(state.slot_pos[slot], 0);
    state_close(&state);
}

/* A refused reservation leaves everything as it was, be it the pool or the context that ends. */
static void exhaustion_changes_nothing(void **unused)
{
    (void)unused;
    struct state state = open_state(2, 1000, 3);
    struct err err;
    uint32_t a = acquire(&state), b = acquire(&state);
    assert_true(state_reserve(&state, a, 300, &err));
    state.slot_pos[a] = 300;
    assert_false(state_reserve(&state, b, 257, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    assert_int_equal(state.slot_pages[b], 0);
    assert_int_equal(state.free_count, 1);
    assert_false(state_reserve(&state, a, 701, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    assert_int_equal(state.slot_pages[a], 2);
    assert_false(state_reserve(&state, a, UINT32_MAX, &err));
    assert_true(state_reserve(&state, b, 256, &err));
    assert_int_equal(state.free_count, 0);
    state_release(&state, a);
    assert_int_equal(state.free_count, 2);
    state_close(&state);
}

/* Random traffic: every page has one owner or is free. */
static void pages_are_never_shared_or_lost(void **unused)
{
    (void)unused;
    enum { SLOTS = 4, PAGES = 13 };
    struct state state = open_state(SLOTS, 2000, PAGES);
    struct rand rand = {7};
    struct err err;
    for (uint32_t i = 0; i < SLOTS; i++)
        acquire(&state);
    for (int step = 0; step < 5000; step++) {
        uint32_t slot = (uint32_t)rand_below(&rand, SLOTS);
        uint32_t rows = 1 + (uint32_t)rand_below(&rand, 400);
        if (rand_below(&rand, 5) == 0)
            state_reset(&state, slot);
        else if (state_reserve(&state, slot, rows, &err) && rand_below(&rand, 4))
            state.slot_pos[slot] += rows;
        else
            state_trim(&state, slot);
        int owners[PAGES] = {0};
        for (uint64_t i = 0; i < state.free_count; i++)
            owners[state.free_pages[i]]++;
        for (uint32_t s = 0; s < SLOTS; s++)
            for (uint32_t i = 0; i < state.slot_pages[s]; i++)
                owners[state.host_table[s * state.pages_max + i]]++;
        for (int i = 0; i < PAGES; i++)
            assert_int_equal(owners[i], 1);
    }
    state_close(&state);
}

static void layers_have_their_own_memory(void **unused)
{
    (void)unused;
    struct state state = open_state(2, 1000, 5);
    uint64_t kv = 5ull * 2 * 256 * 256 * 2, conv = 2ull * 3 * (2 * 2 + 6) * 128 * 4;
    uint64_t delta = 2ull * 6 * 128 * 128 * 4;
    assert_int_equal(state_k_pages(&state, 1).offset, 0);
    assert_int_equal(state_v_pages(&state, 1).offset, kv);
    assert_int_equal(state_k_pages(&state, 3).offset, 2 * kv);
    assert_int_equal(state_v_pages(&state, 3).offset, 3 * kv);
    assert_int_equal(state_delta(&state, 0).offset, 0);
    assert_int_equal(state_delta(&state, 4).offset, 2 * delta);
    assert_int_equal(state_conv(&state, 2).offset, conv);
    assert_int_equal(state_bytes(&model.config, &state.limits).total,
                     4 * kv + 3 * delta + 3 * conv + 2 * 4 * 4);
    state_close(&state);
}

/* Pitfall 83: the full model at its native context, for two sequences, passes 2^32 elements. */
static void sizes_are_64_bit(void **unused)
{
    (void)unused;
    struct model large = model;
    bool layers[40];
    for (int i = 0; i < 40; i++)
        layers[i] = i % 4 == 3;
    large.config.layers = 40;
    large.config.full_attention = layers;
    large.config.attention_layers = 10;
    large.config.delta_layers = 30;
    struct state_limits limits = {.slots = 2, .ctx = 262144, .kv_kind = KV_BF16};
    assert_true(state_bytes(&large.config, &limits).total > 2 * 20480ull * 262144);
    uint32_t ordinal[40];
    for (uint32_t i = 0; i < 40; i++)
        ordinal[i] = layers[i] ? i / 4 : i - i / 4;
    struct state state = {.model = &large, .limits = limits, .ordinal = ordinal};
    state.limits.pages = 2048;
    assert_int_equal(state_v_pages(&state, 39).offset, 19 * 2048ull * 2 * 256 * 256 * 2);
    assert_int_equal(state_delta(&state, 38).offset, 29 * 2ull * 6 * 128 * 128 * 4);
    limits.ctx = UINT32_MAX;
    limits.slots = UINT32_MAX;
    struct err err;
    assert_false(state_open(&large, &limits, &state, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
}

/* Memory that cannot be had is an error, and nothing is left behind. */
static void a_failed_open_frees_all(void **unused)
{
    (void)unused;
    struct state state;
    struct err err;
    struct state_limits limits = {.slots = 1, .ctx = 1 << 24, .kv_kind = KV_F32};
    assert_false(state_open(&model, &limits, &state, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_taken_and_given_back),
        cmocka_unit_test(pages_follow_positions),
        cmocka_unit_test(exhaustion_changes_nothing),
        cmocka_unit_test(pages_are_never_shared_or_lost),
        cmocka_unit_test(layers_have_their_own_memory),
        cmocka_unit_test(sizes_are_64_bit),
        cmocka_unit_test(a_failed_open_frees_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
