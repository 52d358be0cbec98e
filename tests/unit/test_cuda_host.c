/* The host side of the CUDA backend, on a runtime without a GPU (fake_cuda.h): transfers, failures
 * of any call, and that no launch of any op asks more of a GPU than its kind allows. SKIPs where
 * CUDA is not built. What kernels compute is kcheck's to say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#ifndef CALLA_CUDA

static void test_cuda_is_built(void **state)
{
    (void)state;
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cuda_is_built)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

#include "fake_cuda.h"

#include "backend/device.h"
#include "base/log.h"
#include "base/rand.h"
#include "model/graph.h"

enum { SLOTS = 4, SEGMENTS = 64 };

static const struct {
    int major, minor;
    size_t shared, memory;
    int sms, clusters;
} gpus[] = {
    {8, 0, 163 << 10, 80ull << 30, 108, 0},   {8, 6, 99 << 10, 24ull << 30, 82, 0},
    {8, 9, 99 << 10, 24ull << 30, 128, 0},    {9, 0, 227 << 10, 140ull << 30, 132, 8},
    {10, 0, 227 << 10, 180ull << 30, 148, 8}, {12, 0, 99 << 10, 32ull << 30, 170, 0},
    {9, 0, 227 << 10, 18ull << 30, 16, 0}, /* a seventh of an H200 */
};
enum { GPUS = sizeof gpus / sizeof gpus[0], H200 = 3 };

static void choose_gpu(int i)
{
    fake.major = gpus[i].major;
    fake.minor = gpus[i].minor;
    fake.shared = gpus[i].shared;
    fake.memory = gpus[i].memory;
    fake.sms = gpus[i].sms;
    fake.clusters = gpus[i].clusters;
    fake.calls = fake.fail_at = 0;
    fake.launches = 0;
    fake.fault[0] = 0;
    for (int k = 0; k < fake.kernels; k++) {
        fake.kernel[k].shared = 0;
        fake.kernel[k].cluster = false;
    }
}

static struct device *open_gpu(int i)
{
    struct err err = {0};
    struct device *device = NULL;
    choose_gpu(i);
    if (!device_open(&(struct device_options){.name = "cuda"}, &device, &err))
        fail_msg("%s", err.text);
    return device;
}

static void assert_nothing_left(void)
{
    assert_int_equal(fake.blocks, 0);
    assert_int_equal(fake.pinned, 0);
    assert_int_equal(fake.streams, 0);
    assert_int_equal(fake.events, 0);
    assert_int_equal(fake.graphs, 0);
    assert_int_equal(fake.execs, 0);
}

/* ---- transfers ---------------------------------------------------------------------------- */

/* Around the limits of staging, in any order, early or as late as the stream allows. */
static void test_what_is_read_was_written(void **state)
{
    (void)state;
    enum { SPACE = 5 << 20, TURNS = 400 };
    static const uint32_t around[] = {1, 4, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};
    static uint8_t want[SPACE], got[SPACE], data[SPACE];
    for (int unlucky = 0; unlucky < 2; unlucky++) {
        struct device *device = open_gpu(H200);
        const struct device_calls *calls = device_calls(device);
        struct span space;
        struct err err = {0};
        struct rand rand = {7};
        fake.unlucky = unlucky;
        assert_true(calls->alloc(device, SPACE, &space, &err));
        memset(want, 0, SPACE);
        for (int turn = 0; turn < TURNS; turn++) {
            uint32_t size = around[rand_below(&rand, 7)] + rand_below(&rand, 5) - 2;
            size = size > 2u << 20 ? 2 << 20 : size < 1 || size > SPACE ? 1 : size;
            uint32_t at = rand_below(&rand, SPACE - size), kind = rand_below(&rand, 4);
            if (kind < 2) {
                memset(data, (int)rand_below(&rand, 256), size);
                data[size / 2] = (uint8_t)turn;
                memcpy(want + at, data, size);
                calls->write(device, span_at(space, at), data, size);
                memset(data, 0xee, size); /* the caller's again */
            } else if (kind == 2) {
                memset(got, 0xdd, size + 1);
                calls->read(device, got, span_at(space, at), size);
                assert_memory_equal(got, want + at, size);
                assert_int_equal(got[size], 0xdd);
            } else if (at + 2 * size < SPACE) {
                device_ops(device)->copy(device, span_at(space, at + size), span_at(space, at),
                                         size);
                memcpy(want + at + size, want + at, size);
            }
        }
        for (uint32_t i = 0; i < 20; i++) { /* more than the staging holds, and nobody waits */
            memset(data, (int)i, 250000);
            memset(want + i * 250000, (int)i, 250000);
            calls->write(device, span_at(space, i * 250000), data, 250000);
        }
        calls->read(device, got, space, 20 * 250000);
        assert_memory_equal(got, want, 20 * 250000);
        assert_true(calls->sync(device, &err));
        device_close(device);
        assert_nothing_left();
    }
    fake.unlucky = false;
}

/* Experts that are halves of a fused tensor lie apart; one weight of 2 GB and more is one piece. */
static void test_weights_are_copied_whole(void **state)
{
    (void)state;
    enum { COUNT = 3, ROWS = 5, COLS = 8 };
    uint16_t host[COUNT * 2 * ROWS * COLS], back[COUNT * ROWS * COLS];
    for (int i = 0; i < COUNT * 2 * ROWS * COLS; i++)
        host[i] = (uint16_t)(i * 7);
    struct device *device = open_gpu(H200);
    struct err err = {0};
    struct weight w = {.kind = WEIGHT_BF16,
                       .count = COUNT,
                       .rows = ROWS,
                       .cols = COLS,
                       .expert_stride = 2 * ROWS,
                       .data = {host, 0}};
    assert_true(device_calls(device)->load_weight(device, &w, &err));
    device_calls(device)->read(device, back, w.data, sizeof back);
    for (int e = 0; e < COUNT; e++)
        assert_memory_equal(back + e * ROWS * COLS, host + e * 2 * ROWS * COLS, ROWS * COLS * 2);
    assert_int_equal(w.expert_stride, ROWS);
    device_close(device);
    assert_nothing_left();
}

/* ---- failures ----------------------------------------------------------------------------- */

static void test_opening_fails_clean(void **state)
{
    (void)state;
    uint64_t n = 1;
    for (;; n++) {
        struct device *device = NULL;
        struct err err = {0};
        choose_gpu(H200);
        fake.fail_at = n;
        if (device_open(&(struct device_options){.name = "cuda"}, &device, &err)) {
            fake.fail_at = 0;
            device_close(device);
            assert_nothing_left();
            if (fake.calls < n)
                break;
            continue;
        }
        assert_int_equal(err.kind, ERR_RESOURCE);
        assert_non_null(strstr(err.text, "planted"));
        assert_nothing_left();
    }
    assert_true(n > 6);
}

static struct weight affine(uint32_t bits, uint32_t count, uint32_t rows, uint32_t cols)
{
    struct weight w = {.kind = WEIGHT_AFFINE, .count = count, .rows = rows, .cols = cols};
    w.bits = bits;
    w.group = 64;
    w.expert_stride = (rows + 15) / 16 * 16;
    w.data = w.scales = (struct span){(void *)4096, 0}; /* nothing looks there */
    return w;
}

static struct span nowhere(void)
{
    return (struct span){(void *)4096, 0};
}

/* A step as the graph has it: recorded the second time, replayed from then on. */
static void run_step(struct device *device, const struct weight *w)
{
    const struct device_calls *calls = device_calls(device);
    const struct linear_args args = {
        .rows = 1, .n = 1, .x = nowhere(), .weight = {w}, .out = {nowhere()}};
    const struct argmax_args argmax = {
        .rows = 1, .vocab = 100, .logits = nowhere(), .ids = nowhere()};
    if (calls->step_begin(device, 77))
        return;
    device_ops(device)->linear(device, &args);
    device_ops(device)->argmax(device, &argmax);
    calls->step_end(device);
}

/* Whichever call fails: a step that is said to be good has launched all it has to, and after one
 * that was not, the next are. */
static void test_a_failed_step_is_told_and_forgotten(void **state)
{
    (void)state;
    const struct weight w = affine(4, 1, 64, 128);
    bool reached = true;
    for (uint64_t n = 1; reached; n++) {
        struct device *device = open_gpu(H200);
        int failed = 0;
        fake.calls = 0;
        fake.fail_at = n;
        for (int step = 0; step < 6; step++) {
            struct err err = {0};
            fake.launches = 0;
            run_step(device, &w);
            if (device_calls(device)->sync(device, &err))
                assert_int_equal(fake.launches, 2);
            else
                failed++;
            assert_true(failed <= 1);
        }
        reached = fake.calls >= n;
        fake.fail_at = 0;
        device_close(device);
        assert_nothing_left();
    }
}

/* ---- steps queued ahead ------------------------------------------------------------------- */

/* What stood there when the stream came by, whatever is written after; and nothing that came after
 * is waited for. */
static void test_a_fetch_keeps_what_stood_there(void **state)
{
    (void)state;
    enum { TURNS = 600, MOST = 8192 };
    static uint8_t want[MOST], later[MOST], got[MOST + 1];
    for (int unlucky = 0; unlucky < 2; unlucky++) {
        struct device *device = open_gpu(H200);
        const struct device_calls *calls = device_calls(device);
        struct span space;
        struct err err = {0};
        struct rand rand = {5};
        fake.unlucky = unlucky;
        assert_true(calls->alloc(device, 2 * MOST, &space, &err));
        for (int turn = 0; turn < TURNS; turn++) {
            uint32_t size = 1 + rand_below(&rand, turn % 100 == 99 ? MOST : 256);
            memset(want, turn, size);
            memset(later, turn + 1, size);
            memset(got, 0xdd, size + 1);
            calls->write(device, space, want, size);
            calls->fetch(device, space, size);
            calls->write(device, space, later, size);
            device_ops(device)->copy(device, span_at(space, MOST), space, size);
            assert_true(calls->collect(device, got, &err));
            assert_memory_equal(got, want, size);
            assert_int_equal(got[size], 0xdd);
            if (unlucky)
                assert_int_equal(fake.count, 2);
        }
        calls->fetch(device, space, 1);
        calls->read(device, got, span_at(space, MOST), 1);
        assert_int_equal(got[0], later[0]);
        assert_true(calls->collect(device, got, &err)); /* also when a read has waited since */
        assert_int_equal(got[0], later[0]);
        device_close(device);
        assert_nothing_left();
    }
    fake.unlucky = false;
}

/* Whichever call fails, from before the fetch to the end of the step queued behind it: the next
 * collect says so, once, and one that is good has its bytes and all of its launches. */
static void test_a_failure_is_told_by_the_next_collect(void **state)
{
    (void)state;
    const struct weight w = affine(4, 1, 64, 128);
    bool reached = true;
    for (uint64_t n = 1; reached; n++) {
        struct device *device = open_gpu(H200);
        const struct device_calls *calls = device_calls(device);
        struct span space;
        struct err err = {0};
        int failed = 0;
        assert_true(calls->alloc(device, 4, &space, &err));
        fake.calls = 0;
        fake.fail_at = n;
        for (int32_t turn = 0; turn < 6; turn++) {
            int32_t got = -1, later = turn + 100;
            memset(&err, 0, sizeof err);
            fake.launches = 0;
            calls->write(device, space, &turn, sizeof turn);
            run_step(device, &w);
            calls->fetch(device, space, sizeof turn);
            calls->write(device, space, &later, sizeof later);
            run_step(device, &w);
            if (calls->collect(device, &got, &err)) {
                assert_int_equal(got, turn);
                assert_int_equal(fake.launches, 4);
                continue;
            }
            assert_non_null(strstr(err.text, "planted"));
            assert_int_equal(fake.execs, 0);
            assert_int_equal(fake.count, 0);
            failed++;
        }
        reached = fake.calls >= n;
        fake.fail_at = 0;
        assert_true(failed <= 1);
        assert_true(calls->sync(device, &err));
        device_close(device);
        assert_nothing_left();
    }
}

static void test_a_fetch_without_memory(void **state)
{
    (void)state;
    struct device *device = open_gpu(H200);
    const struct device_calls *calls = device_calls(device);
    struct span space;
    struct err err = {0};
    int32_t got[100], want[100] = {7, 8};
    assert_true(calls->alloc(device, sizeof want, &space, &err));
    calls->write(device, space, want, sizeof want);
    for (uint32_t count = 1; count <= 100; count += 99) { /* the first, and one that is larger */
        memset(got, 0xdd, sizeof got);
        memset(&err, 0, sizeof err);
        fake.calls = 0;
        fake.fail_at = 1;
        calls->fetch(device, space, count * 4);
        assert_false(calls->collect(device, got, &err));
        assert_int_equal(err.kind, ERR_RESOURCE);
        assert_non_null(strstr(err.text, "pinned memory"));
        assert_int_equal(got[0], (int32_t)0xdddddddd);
        calls->fetch(device, space, count * 4);
        assert_true(calls->collect(device, got, &err));
        assert_memory_equal(got, want, count * 4);
    }
    device_close(device);
    assert_nothing_left();
}

enum { CTX = 2048 };

/* The demo model, whose kernels do nothing here: every logit is 0, every choice token 0. */
static struct {
    struct device *device;
    struct model model;
    struct state state;
    struct graph *graph;
    uint32_t slot[SLOTS];
} demo;

static void open_demo(const char *without)
{
    struct err err = {0};
    struct state_limits limits = {.slots = SLOTS, .ctx = CTX, .kv_kind = KV_BF16};
    struct graph_limits rows = {.rows = 64, .segments = SLOTS, .logit_rows = SLOTS};
    choose_gpu(H200);
    if (!device_open(&(struct device_options){.name = "cuda", .without = without}, &demo.device,
                     &err) ||
        !model_open("models/demo", demo.device, &(struct model_options){0}, &demo.model, &err) ||
        !state_open(&demo.model, &limits, &demo.state, &err) ||
        !graph_open(&demo.model, &demo.state, &rows, &demo.graph, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true(state_acquire(&demo.state, &demo.slot[i], &err));
}

static void close_demo(void)
{
    graph_close(demo.graph);
    state_close(&demo.state);
    model_close(&demo.model);
    device_close(demo.device);
    assert_nothing_left();
}

static void forward_demo(uint32_t n)
{
    static const int32_t tokens[SLOTS];
    static const uint32_t wanted[SLOTS] = {0, 1, 2, 3};
    struct segment segments[SLOTS];
    struct err err = {0};
    for (uint32_t i = 0; i < n; i++)
        segments[i] = (struct segment){demo.slot[i], i, 1, demo.state.slot_pos[demo.slot[i]]};
    struct batch batch = {n, n, n, tokens, segments, wanted};
    if (!graph_forward(demo.graph, &batch, &err))
        fail_msg("%s", err.text);
}

/* Decodes n sequences from the start to behind a few pages; after each step its launches stand in
 * fake.launched. A step that opens a page is not queued ahead. */
static uint32_t decode_demo(uint32_t n, void (*look)(uint32_t step))
{
    int32_t choices[SLOTS];
    uint32_t ahead = 0;
    struct err err = {0};
    bool queued = false;
    for (uint32_t step = 0; step < 3 * KV_PAGE; step++) {
        if (!queued)
            forward_demo(n);
        fake.launches = 0;
        queued = graph_follow(demo.graph);
        ahead += queued;
        memset(choices, 0xdd, sizeof choices);
        if (!graph_read_choices(demo.graph, choices, &err))
            fail_msg("%s", err.text);
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(choices[i], 0);
        if (queued && step % KV_PAGE > 4) /* the first one chooses for the step before it, too */
            look(step);
    }
    for (uint32_t i = 0; i < n; i++)
        state_reset(&demo.state, demo.slot[i]);
    return ahead;
}

static const char *first_name[FAKE_LAUNCHED];
static dim3 first_grid[FAKE_LAUNCHED];
static int first_launches;

static void look_at_launches(uint32_t step)
{
    if (!first_launches) {
        first_launches = fake.launches;
        memcpy(first_name, fake.launched, sizeof first_name);
        memcpy(first_grid, fake.grid, sizeof first_grid);
    }
    assert_int_equal(fake.launches, first_launches);
    for (int i = 0; i < first_launches; i++)
        if (fake.launched[i] != first_name[i] ||
            memcmp(&fake.grid[i], &first_grid[i], sizeof(dim3)) != 0)
            fail_msg("step %u: %s for %s", step, fake.launched[i], first_name[i]);
}

static void look_at_recordings(uint32_t step)
{
    (void)step;
    assert_int_equal(fake.launches, first_launches);
    assert_string_equal(fake.launched[0], "of a graph");
    assert_string_not_equal(fake.launched[first_launches - 1], "of a graph"); /* the argmax */
}

/* Positions change nothing that the host says, so that a recording of one step is all of them. */
static void test_steps_ahead_are_alike_and_recorded(void **state)
{
    (void)state;
    uint32_t most = 3 * KV_PAGE - 3; /* a page is asked for by a step that is not ahead */
    for (uint32_t n = 1; n <= SLOTS; n++) {
        first_launches = 0;
        open_demo("graphs");
        assert_int_equal(decode_demo(n, look_at_launches), most);
        close_demo();
        open_demo(NULL);
        assert_int_equal(decode_demo(n, look_at_recordings), most);
        assert_int_equal(decode_demo(n, look_at_recordings), most);
        assert_true(fake.execs > 0);
        close_demo();
        open_demo("ahead");
        assert_int_equal(decode_demo(n, look_at_recordings), 0);
        close_demo();
    }
}

/* ---- launches ----------------------------------------------------------------------------- */

/* Of the family, 35B first, and wider than any of it. */
static const struct shape {
    uint32_t hidden, vocab, heads, kv_heads, key_heads, value_heads, experts, topk, width, shared;
} shapes[] = {
    {2048, 248320, 16, 2, 16, 32, 256, 8, 512, 512},
    {3072, 248320, 32, 2, 16, 64, 256, 8, 1024, 1024},
    {4096, 248320, 32, 2, 16, 64, 512, 10, 1024, 1024},
    {8192, 248320, 64, 4, 16, 64, 1024, 32, 2048, 4096},
    {128, 512, 2, 2, 2, 4, 4, 2, 64, 64},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void run_linear(struct device *device, const struct shape *s, uint32_t rows)
{
    uint32_t channels = (2 * s->key_heads + s->value_heads) * 128, values = s->value_heads * 128;
    const struct weight in[] = {affine(4, 1, channels, s->hidden), affine(4, 1, values, s->hidden),
                                affine(4, 1, s->value_heads, s->hidden),
                                affine(4, 1, s->value_heads, s->hidden)};
    const struct weight out = affine(4, 1, s->hidden, values),
                        head = affine(4, 1, s->vocab, s->hidden);
    const struct weight o = affine(4, 1, s->hidden, s->heads * 256);
    struct linear_args args = {.rows = rows, .n = 4, .x = nowhere(), .gain = nowhere()};
    for (int i = 0; i < 4; i++) {
        args.weight[i] = &in[i];
        args.out[i] = nowhere();
    }
    device_ops(device)->linear(device, &args);
    args = (struct linear_args){
        .rows = rows, .n = 1, .x = nowhere(), .weight = {&out}, .out = {nowhere()}, .add = true};
    device_ops(device)->linear(device, &args);
    args.weight[0] = &o;
    device_ops(device)->linear(device, &args);
    args = (struct linear_args){.rows = rows < 64 ? rows : 64,
                                .n = 1,
                                .x = nowhere(),
                                .select = nowhere(),
                                .gain = nowhere(),
                                .weight = {&head},
                                .out = {nowhere()}};
    device_ops(device)->linear(device, &args);
}

static void run_mixers(struct device *device, const struct shape *s, const struct batch_view *batch)
{
    const struct weight table = affine(4, 1, s->vocab, s->hidden);
    const struct embed_args embed = {.batch = batch, .table = &table, .x = nowhere()};
    const struct delta_args delta = {.batch = batch,
                                     .dims = {s->key_heads, s->value_heads, 1e-6f},
                                     .qkv = nowhere(),
                                     .z = nowhere(),
                                     .a = nowhere(),
                                     .b = nowhere(),
                                     .conv = nowhere(),
                                     .a_log = nowhere(),
                                     .dt_bias = nowhere(),
                                     .norm = nowhere(),
                                     .conv_state = nowhere(),
                                     .state = nowhere(),
                                     .y = nowhere()};
    const struct attention_dims dims = {.heads = s->heads,
                                        .kv_heads = s->kv_heads,
                                        .rope_theta = 1e7f,
                                        .eps = 1e-6f,
                                        .kv_kind = KV_BF16};
    const struct kv_append_args append = {.batch = batch,
                                          .dims = dims,
                                          .qg = nowhere(),
                                          .k = nowhere(),
                                          .v = nowhere(),
                                          .q_norm = nowhere(),
                                          .k_norm = nowhere(),
                                          .k_pages = nowhere(),
                                          .v_pages = nowhere(),
                                          .q = nowhere()};
    struct attention_args attention = {.batch = batch,
                                       .dims = dims,
                                       .q = nowhere(),
                                       .qg = nowhere(),
                                       .k_pages = nowhere(),
                                       .v_pages = nowhere(),
                                       .y = nowhere()};
    device_ops(device)->embed(device, &embed);
    device_ops(device)->delta(device, &delta);
    device_ops(device)->kv_append(device, &append);
    device_ops(device)->attention(device, &attention);
    attention.dims.kv_kind = KV_F32;
    device_ops(device)->attention(device, &attention);
}

static void run_moe(struct device *device, const struct shape *s, uint32_t rows, uint32_t bits)
{
    const struct moe_dims dims = {s->hidden, s->experts, s->topk, s->width, s->shared, true, 1e-6f};
    const struct weight router = affine(8, 1, s->experts, s->hidden),
                        one = affine(8, 1, 1, s->hidden);
    const struct weight up = affine(bits, s->experts, s->width, s->hidden);
    const struct weight down = affine(bits, s->experts, s->hidden, s->width);
    const struct weight shared_up = affine(bits, 1, s->shared, s->hidden);
    const struct weight shared_down = affine(bits, 1, s->hidden, s->shared);
    const struct moe_route_args route = {.rows = rows,
                                         .dims = dims,
                                         .x = nowhere(),
                                         .gain = nowhere(),
                                         .router = &router,
                                         .shared_router = &one,
                                         .h = nowhere(),
                                         .ids = nowhere(),
                                         .weights = nowhere(),
                                         .shared_gate = nowhere()};
    const struct moe_experts_args experts = {.rows = rows,
                                             .dims = dims,
                                             .h = nowhere(),
                                             .ids = nowhere(),
                                             .weights = nowhere(),
                                             .shared_gate = nowhere(),
                                             .gate = &up,
                                             .up = &up,
                                             .down = &down,
                                             .shared_gate_proj = &shared_up,
                                             .shared_up = &shared_up,
                                             .shared_down = &shared_down,
                                             .x = nowhere()};
    device_ops(device)->moe_route(device, &route);
    device_ops(device)->moe_experts(device, &experts);
}

static void run_all(struct device *device, const struct shape *s, uint32_t rows, uint32_t segments)
{
    struct segment segment[SEGMENTS];
    for (uint32_t i = 0; i < segments; i++)
        segment[i] = (struct segment){.slot = i,
                                      .row = rows * i / segments,
                                      .pos = i,
                                      .rows = rows * (i + 1) / segments - rows * i / segments};
    const struct batch_view batch = {.rows = rows,
                                     .segments = segments,
                                     .host_segments = segment,
                                     .device_segments = nowhere(),
                                     .tokens = nowhere(),
                                     .page_table = nowhere(),
                                     .pages_max = 1024};
    run_linear(device, s, rows);
    run_mixers(device, s, &batch);
    run_moe(device, s, rows, 4);
    run_moe(device, s, rows, 6);
    device_ops(device)->argmax(device, &(struct argmax_args){.rows = rows < 64 ? rows : 64,
                                                             .vocab = s->vocab,
                                                             .logits = nowhere(),
                                                             .ids = nowhere()});
    device_ops(device)->top(device, &(struct top_args){.rows = 1,
                                                       .vocab = s->vocab,
                                                       .count = 5,
                                                       .logits = nowhere(),
                                                       .ids = nowhere(),
                                                       .values = nowhere(),
                                                       .log_sum = nowhere()});
}

static void test_launches_are_what_each_gpu_allows(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1,  2,  3,  4,  5,   6,   7,   8,    9,    15,   16,   17,   31,
                                    32, 33, 64, 65, 100, 512, 513, 1024, 1025, 2048, 8192, 16384};
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int s = 0; s < SHAPES; s++) {
            struct device *device = open_gpu(gpu);
            for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
                for (int n = 0; n < 3; n++) {
                    uint32_t segments = n == 0 ? 1 : n == 1 ? 3 : rows[i];
                    if (segments > rows[i] || segments > SEGMENTS)
                        continue;
                    struct err err = {0};
                    fake.launches = 0;
                    run_all(device, &shapes[s], rows[i], segments);
                    if (!device_calls(device)->sync(device, &err))
                        fail_msg("GPU %d.%d, hidden %u, %u rows in %u: %s; %s", fake.major,
                                 fake.minor, shapes[s].hidden, rows[i], segments, err.text,
                                 fake.fault);
                }
            device_close(device);
            assert_nothing_left();
        }
}

static bool was_launched(const char *name)
{
    for (int i = 0; i < fake.launches; i++)
        if (strstr(fake.launched[i], name))
            return true;
    return false;
}

/* Clusters where the GPU has room for them, and says so; else what other GPUs run. */
static void test_the_router_needs_no_clusters(void **state)
{
    (void)state;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (int asked = 0; asked < 2; asked++) {
            struct err err = {0};
            struct device *device = NULL;
            choose_gpu(gpu);
            fake.fail_at = asked || fake.major != 9 ? 0 : 5; /* the question, after four others */
            assert_true(device_open(&(struct device_options){.name = "cuda"}, &device, &err));
            fake.fail_at = 0;
            for (uint32_t rows = 1; rows <= 100; rows += 33) {
                fake.launches = 0;
                run_moe(device, &shapes[0], rows, 4);
                if (!device_calls(device)->sync(device, &err))
                    fail_msg("%s; %s", err.text, fake.fault);
                assert_int_equal(was_launched("route_cluster"), gpu == H200 && asked && rows <= 64);
            }
            device_close(device);
            assert_nothing_left();
        }
}

/* Each way around a technique launches something that fits, too. */
static void test_without_each_technique(void **state)
{
    (void)state;
    static const char *const names[] = {"graphs",  "overlap", "routing", "grouped", "batch",
                                        "packing", "split",   "flash",   "chunks"};
    struct err err = {0};
    struct device *device = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        choose_gpu(H200);
        if (!device_open(&(struct device_options){.name = "cuda", .without = names[i]}, &device,
                         &err))
            fail_msg("%s", err.text);
        assert_int_equal(device_calls(device)->fetch == NULL, !strcmp(names[i], "ahead"));
        if (strcmp(names[i], "routing") != 0) /* which reads the ids */
            for (uint32_t rows = 1; rows <= 8192; rows = rows * 3 + 1) {
                run_all(device, &shapes[0], rows, 1);
                if (!device_calls(device)->sync(device, &err))
                    fail_msg("without %s, %u rows: %s; %s", names[i], rows, err.text, fake.fault);
            }
        device_close(device);
        assert_nothing_left();
    }
    choose_gpu(H200);
    assert_false(
        device_open(&(struct device_options){.name = "cuda", .without = "luck"}, &device, &err));
    assert_non_null(strstr(err.text, "graphs, overlap, routing"));
    assert_nothing_left();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_read_was_written),
        cmocka_unit_test(test_weights_are_copied_whole),
        cmocka_unit_test(test_opening_fails_clean),
        cmocka_unit_test(test_a_failed_step_is_told_and_forgotten),
        cmocka_unit_test(test_a_fetch_keeps_what_stood_there),
        cmocka_unit_test(test_a_failure_is_told_by_the_next_collect),
        cmocka_unit_test(test_a_fetch_without_memory),
        cmocka_unit_test(test_steps_ahead_are_alike_and_recorded),
        cmocka_unit_test(test_launches_are_what_each_gpu_allows),
        cmocka_unit_test(test_the_router_needs_no_clusters),
        cmocka_unit_test(test_without_each_technique),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
