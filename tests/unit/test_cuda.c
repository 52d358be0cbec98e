/* The CUDA backend end to end on the demo model: however rows are cut into batches, what follows
 * is the same. SKIPs where there is no such GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/device.h"
#include "base/mem.h"
#include "base/rand.h"
#include "engine/engine.h"
#include "model/graph.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CTX = 16640, ROWS = 4096, SLOTS = 8, LENGTHS = 256, CAPPED_CTX = 8192 };

static struct device *device;
static struct model model;
static struct state state;
static struct graph *graph;
static int32_t *ids;

static bool is_long(void)
{
    const char *v = getenv("CALLA_TEST_LONG");
    return v && !strcmp(v, "1");
}

static int open_all(void **unused)
{
    (void)unused;
    struct err err = {0};
    struct device_options options = {.name = "cuda"};
    struct model_options load = {0};
    if (!device_open(&options, &device, &err))
        return 0; /* the tests skip */
    struct state_limits limits = {.slots = SLOTS,
                                  .ctx = CTX,
                                  .pages = 2 * CTX / KV_PAGE,
                                  .kv_kind = device_head(device)->kv_kind};
    struct graph_limits rows = {.rows = ROWS, .segments = SLOTS, .logit_rows = SLOTS};
    if (!model_open("models/demo", device, &load, &model, &err) ||
        !state_open(&model, &limits, &state, &err) ||
        !graph_open(&model, &state, &rows, &graph, &err)) {
        print_error("%s\n", err.text);
        return 1;
    }
    struct rand rand = {17};
    ids = mem_new(CTX, sizeof *ids);
    for (int i = 0; i < CTX; i++)
        ids[i] = (int32_t)rand_below(&rand, model.config.vocab);
    return 0;
}

static int close_all(void **unused)
{
    (void)unused;
    if (!device)
        return 0;
    graph_close(graph);
    state_close(&state);
    model_close(&model);
    device_close(device);
    free(ids);
    return 0;
}

static uint32_t acquire(void)
{
    struct err err = {0};
    uint32_t slot = 0;
    if (!state_acquire(&state, &slot, &err))
        fail_msg("%s", err.text);
    return slot;
}

/* Feeds rows[i] tokens to each slot, one behind the other; the logits that follow each stand in
 * row i. */
static void feed_tokens(const uint32_t *slot, const int32_t *tokens, const uint32_t *rows,
                        uint32_t n)
{
    struct segment segments[SLOTS];
    uint32_t wanted[SLOTS], row = 0;
    struct err err = {0};
    for (uint32_t i = 0; i < n; i++) {
        segments[i] = (struct segment){
            .slot = slot[i], .row = row, .rows = rows[i], .pos = state.slot_pos[slot[i]]};
        row += rows[i];
        wanted[i] = row - 1;
    }
    struct batch batch = {.rows = row,
                          .segments = n,
                          .logit_rows = n,
                          .tokens = tokens,
                          .segment = segments,
                          .logit_row = wanted};
    if (!graph_forward(graph, &batch, &err))
        fail_msg("%s", err.text);
}

/* The same with tokens from ids + base[i] + position. */
static void feed(const uint32_t *slot, const uint32_t *base, const uint32_t *rows, uint32_t n)
{
    static int32_t tokens[ROWS];
    for (uint32_t i = 0, row = 0; i < n; row += rows[i++])
        memcpy(tokens + row, ids + base[i] + state.slot_pos[slot[i]], rows[i] * sizeof *tokens);
    feed_tokens(slot, tokens, rows, n);
}

/* Log-probabilities of row i of the last batch. */
static float *read_row(uint32_t i)
{
    struct err err = {0};
    uint32_t vocab = model.config.vocab;
    float *row = mem_new(vocab, sizeof *row);
    double most = -INFINITY, sum = 0;
    if (!graph_read_logits(graph, i, row, &err))
        fail_msg("%s", err.text);
    for (uint32_t k = 0; k < vocab; k++)
        most = row[k] > most ? row[k] : most;
    for (uint32_t k = 0; k < vocab; k++)
        sum += exp(row[k] - most);
    for (uint32_t k = 0; k < vocab; k++)
        row[k] = (float)(row[k] - most - log(sum));
    return row;
}

/* All recurrent and convolution states of a slot. */
static float *read_states(uint32_t slot, size_t *count)
{
    const struct config *c = &model.config;
    size_t delta = (size_t)c->value_heads * CONFIG_DELTA_DIM * CONFIG_DELTA_DIM;
    size_t conv =
        (2 * (size_t)c->key_heads + c->value_heads) * CONFIG_DELTA_DIM * (CONFIG_CONV_TAPS - 1);
    float *all = mem_new(c->delta_layers * (delta + conv), sizeof *all), *at = all;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        if (c->full_attention[layer])
            continue;
        device_calls(device)->read(
            device, at, span_at(state_delta(&state, layer), slot * delta * 4), delta * 4);
        device_calls(device)->read(device, at + delta,
                                   span_at(state_conv(&state, layer), slot * conv * 4), conv * 4);
        at += delta + conv;
    }
    *count = (size_t)(at - all);
    return all;
}

static double mean_difference(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += fabs((double)a[i] - b[i]);
    return sum / (double)n;
}

static double relative_difference(const float *a, const float *b, size_t n)
{
    double sum = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)b[i] * b[i];
    }
    return sqrt(sum / all);
}

static size_t pick_lengths(uint32_t *length)
{
    size_t n = 0;
    uint32_t every = is_long() ? 1 : 13, last = is_long() ? 16384 : 2048;
    for (uint32_t i = 1; i <= 200; i += i < 20 ? 1 : every)
        length[n++] = i;
    for (uint32_t power = 256; power <= last; power *= 2)
        for (uint32_t i = power - 1; i <= power + 1; i++)
            length[n++] = i;
    return n;
}

/* Pitfalls 71, 73, 74: around taps, chunks, pages and tiles; a recorded step each token. */
static void prefill_is_token_by_token(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    static float *row[LENGTHS], *states[LENGTHS];
    uint32_t length[LENGTHS], one = 1, base = 0, slot = acquire(), worst = 0;
    size_t n = pick_lengths(length), count = 0;
    for (size_t i = 0; i < n; i++) {
        while (state.slot_pos[slot] < length[i])
            feed(&slot, &base, &one, 1);
        row[i] = read_row(0);
        states[i] = read_states(slot, &count);
    }
    double most = 0, sum = 0, state_most = 0;
    for (size_t i = 0; i < n; i++) {
        state_reset(&state, slot);
        while (state.slot_pos[slot] < length[i]) {
            uint32_t left = length[i] - state.slot_pos[slot], rows = left < ROWS ? left : ROWS;
            feed(&slot, &base, &rows, 1);
        }
        float *got = read_row(0), *after = read_states(slot, &count);
        double d = mean_difference(got, row[i], model.config.vocab);
        double s = relative_difference(after, states[i], count);
        worst = d > most ? length[i] : worst;
        most = d > most || isnan(d) ? d : most;
        state_most = s > state_most || isnan(s) ? s : state_most;
        sum += d;
        free(got);
        free(after);
        free(row[i]);
        free(states[i]);
    }
    state_release(&state, slot);
    print_message("%zu lengths to %u: mean difference %.5f, at most %.5f (length %u); states at "
                  "most %.5f apart\n",
                  n, length[n - 1], sum / (double)n, most, worst, state_most);
    assert_true(sum / (double)n <= 0.01);
    assert_true(most <= 0.1);
    assert_true(state_most <= 0.05);
}

/* Pitfalls 62, 98, 104: 1 to 8 sequences of different lengths decode as each does alone. */
static void batches_are_their_sequences(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    enum { STEPS = 12 };
    static float *alone[SLOTS][STEPS];
    uint32_t slot[SLOTS], base[SLOTS], length[SLOTS], ones[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++) {
        slot[i] = acquire();
        base[i] = i * 1500;
        length[i] = i % 3 == 0 ? 3 + i : i % 3 == 1 ? 250 + i : 700 + 37 * i;
        ones[i] = 1;
        feed(&slot[i], &base[i], &length[i], 1);
        for (int t = 0; t < STEPS; t++) {
            feed(&slot[i], &base[i], ones, 1);
            alone[i][t] = read_row(0);
        }
    }
    double most = 0;
    for (uint32_t n = 1; n <= SLOTS; n++) {
        for (uint32_t i = 0; i < n; i++) {
            state_reset(&state, slot[i]);
            feed(&slot[i], &base[i], &length[i], 1);
        }
        for (int t = 0; t < STEPS; t++) {
            feed(slot, base, ones, n);
            for (uint32_t i = 0; i < n; i++) {
                float *got = read_row(i);
                double d = mean_difference(got, alone[i][t], model.config.vocab);
                most = d > most || isnan(d) ? d : most;
                free(got);
            }
        }
    }
    for (uint32_t i = 0; i < SLOTS; i++) {
        state_release(&state, slot[i]);
        for (int t = 0; t < STEPS; t++)
            free(alone[i][t]);
    }
    print_message("batches of 1 to %d: mean difference at most %.6f\n", SLOTS, most);
    assert_true(most <= 0.003);
}

enum { ANSWER = 300 };

/* Greedy answers of n sequences, [ANSWER][n]; ahead: where it can be, a step is queued before the
 * tokens of the last are read. Returns how many were. */
static uint32_t answer(const uint32_t *slot, uint32_t n, bool ahead, int32_t *out)
{
    uint32_t base[SLOTS], length[SLOTS], ones[SLOTS], followed = 0;
    struct err err = {0};
    bool queued = false;
    for (uint32_t i = 0; i < n; i++) {
        base[i] = i * 1500;
        length[i] = 3 + 59 * i;
        ones[i] = 1;
        state_reset(&state, slot[i]);
    }
    feed(slot, base, length, n);
    for (int t = 0; t < ANSWER; t++) {
        if (t && !queued)
            feed_tokens(slot, out - n, ones, n);
        queued = ahead && t + 1 < ANSWER && graph_follow(graph);
        followed += queued;
        if (!graph_read_choices(graph, out, &err))
            fail_msg("%s", err.text);
        out += n;
    }
    return followed;
}

/* Tokens, last logits and states to the bit, over the ends of pages; steps that are recorded and,
 * the first time, such as are not. */
static void steps_ahead_answer_the_same(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    static int32_t want[ANSWER * SLOTS], got[ANSWER * SLOTS];
    uint32_t slot[SLOTS], fewest = ANSWER;
    for (uint32_t i = 0; i < SLOTS; i++)
        slot[i] = acquire();
    for (uint32_t n = 1; n <= SLOTS; n++) {
        size_t count = 0;
        assert_int_equal(answer(slot, n, false, want), 0);
        float *row = read_row(n - 1), *states = read_states(slot[n - 1], &count);
        for (int round = 0; round < 2; round++) {
            uint32_t followed = answer(slot, n, true, got);
            fewest = followed < fewest ? followed : fewest;
            float *row_ahead = read_row(n - 1), *after = read_states(slot[n - 1], &count);
            assert_memory_equal(got, want, (size_t)ANSWER * n * sizeof *want);
            assert_memory_equal(row_ahead, row, model.config.vocab * sizeof *row);
            assert_memory_equal(after, states, count * sizeof *states);
            free(row_ahead);
            free(after);
        }
        free(row);
        free(states);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        state_release(&state, slot[i]);
    print_message("answers of 1 to %d sequences: at least %u of %d steps were queued ahead\n",
                  SLOTS, fewest, ANSWER);
    assert_true(fewest > ANSWER / 2);
}

/* Device memory with these bytes, or zeros. */
static struct span place(const void *data, uint64_t bytes)
{
    struct err err = {0};
    struct span at;
    if (!device_calls(device)->alloc(device, bytes, &at, &err))
        fail_msg("%s", err.text);
    if (data)
        device_calls(device)->write(device, at, data, bytes);
    return at;
}

/* Every second row is NaN, with all bits set: its ids are experts all the same, each once, its
 * weights say what it was, and its neighbours see nothing of it. */
static void rows_that_are_not_numbers_have_routes(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    enum { MOST = 130 };
    static const uint32_t counts[] = {1, 2, 8, 9, 33, 64, 65, MOST};
    const struct config *c = &model.config;
    const struct model_layer *layer = &model.layers[0];
    size_t hidden = c->hidden, topk = c->topk;
    float *x = mem_new(MOST * hidden, sizeof *x), *weights = mem_new(MOST * topk, sizeof *weights);
    uint32_t *chosen = mem_new(MOST * topk, sizeof *chosen);
    struct rand rand = {3};
    for (size_t i = 0; i < MOST * hidden; i++)
        x[i] = (float)rand_below(&rand, 2000) / 1000 - 1;
    for (size_t r = 0; r < MOST; r += 2)
        memset(x + r * hidden, 0xff, hidden * sizeof *x);
    struct moe_route_args args = {
        .dims = {c->hidden, c->experts, c->topk, c->width, c->shared_width, true, c->eps},
        .x = place(x, MOST * hidden * 4),
        .gain = layer->post_norm,
        .router = &layer->router,
        .shared_router = &layer->shared_router,
        .h = place(NULL, MOST * hidden * 4),
        .ids = place(NULL, MOST * topk * 4),
        .weights = place(NULL, MOST * topk * 4),
        .shared_gate = place(NULL, MOST * 4ull)};
    for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
        for (int renormalise = 0; renormalise < 2; renormalise++) {
            args.rows = counts[n];
            args.dims.renormalise = renormalise;
            device_ops(device)->moe_route(device, &args);
            device_calls(device)->read(device, chosen, args.ids, args.rows * topk * 4);
            device_calls(device)->read(device, weights, args.weights, args.rows * topk * 4);
            for (size_t i = 0; i < args.rows * topk; i++) {
                assert_true(chosen[i] < c->experts);
                assert_int_equal(isnan(weights[i]) != 0, i / topk % 2 == 0);
                for (size_t j = i / topk * topk; j < i; j++)
                    assert_int_not_equal(chosen[j], chosen[i]);
            }
        }
    for (const struct span *s =
             (const struct span[]){args.x, args.h, args.ids, args.weights, args.shared_gate, {0}};
         s->base; s++)
        device_calls(device)->free(device, *s);
    free(x);
    free(weights);
    free(chosen);
}

/* Of a vocabulary smaller than what is asked for, all of it, and nothing from outside. */
static void top_stays_in_its_vocabulary(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    enum { VOCAB = 5, COUNT = 20 };
    static const float logits[VOCAB] = {1, 4, -2, 4, 3};
    static const int32_t want[VOCAB] = {1, 3, 4, 0, 2};
    int32_t got[COUNT];
    struct top_args args = {.rows = 1,
                            .vocab = VOCAB,
                            .count = COUNT,
                            .logits = place(logits, sizeof logits),
                            .ids = place(NULL, COUNT * 4),
                            .values = place(NULL, COUNT * 4),
                            .log_sum = place(NULL, 4)};
    device_ops(device)->top(device, &args);
    device_calls(device)->read(device, got, args.ids, sizeof got);
    assert_memory_equal(got, want, sizeof want);
    for (int i = VOCAB; i < COUNT; i++)
        assert_in_range(got[i], 0, VOCAB - 1);
    for (const struct span *s =
             (const struct span[]){args.logits, args.ids, args.values, args.log_sum, {0}};
         s->base; s++)
        device_calls(device)->free(device, *s);
}

static void too_much_is_refused(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    struct state big;
    struct err err = {0};
    struct state_limits limits = {.slots = 4096, .ctx = 262144, .kv_kind = KV_BF16};
    assert_false(state_open(&model, &limits, &big, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    assert_non_null(strstr(err.text, "GiB are free"));
}

/* With a cap the engine refuses before it reads weights, and names a context that then opens. */
static void a_cap_names_what_fits(void **unused)
{
    (void)unused;
    if (!device)
        skip();
    struct engine *engine = NULL;
    struct engine_options options = {.model = "models/demo",
                                     .backend = "cuda",
                                     .ctx = CAPPED_CTX,
                                     .chunk = 64,
                                     .memory_bytes = 40 << 20};
    struct err err = {0};
    uint32_t largest = 0;
    assert_false(engine_open(&options, &engine, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    const char *named = strstr(err.text, "the largest context that fits is ");
    assert_non_null(named);
    assert_int_equal(sscanf(named, "the largest context that fits is %u", &largest), 1);
    assert_in_range(largest, 1, CAPPED_CTX - 1);
    options.ctx = largest;
    assert_true(engine_open(&options, &engine, &err));
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefill_is_token_by_token),
        cmocka_unit_test(batches_are_their_sequences),
        cmocka_unit_test(steps_ahead_answer_the_same),
        cmocka_unit_test(rows_that_are_not_numbers_have_routes),
        cmocka_unit_test(top_stays_in_its_vocabulary),
        cmocka_unit_test(too_much_is_refused),
        cmocka_unit_test(a_cap_names_what_fits),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
