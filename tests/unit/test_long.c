/* Long contexts on a small random model: numbers stay finite, and how the tokens are cut into
 * batches does not matter, neither after a long prompt nor far behind in the context. */
#include "backend/device.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rand.h"
#include "model/graph.h"
#include "model/synth.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CTX = 262144, ROWS = 512, VOCAB = 512, TAIL = 41, PAGE = 256, PLANTED = 8 };

static char folder[] = "/tmp/calla-long-XXXXXX";

struct world {
    struct device *device;
    struct model model;
    struct state state;
    struct graph *graph;
};

/* Not under the sanitizers: there the short form takes as long, and finds as much. */
static bool is_long(void)
{
#ifdef __SANITIZE_ADDRESS__
    return false;
#else
    return getenv("CALLA_TEST_LONG") != NULL;
#endif
}

static void open_world(struct world *w, const char *backend, uint64_t pages, enum kv_kind kind)
{
    struct err err = {0};
    memset(w, 0, sizeof *w);
    struct state_limits limits = {.slots = 3, .ctx = CTX, .pages = pages, .kv_kind = kind};
    struct graph_limits graph = {.rows = ROWS, .segments = 3, .logit_rows = ROWS};
    if (!device_open(&(struct device_options){.name = backend}, &w->device, &err) ||
        !model_open(folder, w->device, NULL, &w->model, &err) ||
        !state_open(&w->model, &limits, &w->state, &err) ||
        !graph_open(&w->model, &w->state, &graph, &w->graph, &err))
        fail_msg("%s", err.text);
}

static void close_world(struct world *w)
{
    graph_close(w->graph);
    state_close(&w->state);
    model_close(&w->model);
    device_close(w->device);
}

static uint32_t acquire(struct world *w)
{
    uint32_t slot;
    assert_true(state_acquire(&w->state, &slot, NULL));
    return slot;
}

/* One segment; the logits of its last `wanted` rows go to out, f32 [wanted, VOCAB]. */
static void forward(struct world *w, uint32_t slot, const int32_t *ids, uint32_t rows,
                    uint32_t wanted, float *out)
{
    struct err err = {0};
    uint32_t logit_row[ROWS];
    for (uint32_t i = 0; i < wanted; i++)
        logit_row[i] = rows - wanted + i;
    struct segment segment = {.slot = slot, .rows = rows, .pos = w->state.slot_pos[slot]};
    struct batch batch = {.rows = rows,
                          .segments = 1,
                          .logit_rows = wanted,
                          .tokens = ids,
                          .segment = &segment,
                          .logit_row = logit_row};
    if (!graph_forward(w->graph, &batch, &err))
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < wanted; i++) {
        float *row = out + (size_t)i * VOCAB;
        if (!graph_read_logits(w->graph, i, row, &err))
            fail_msg("%s", err.text);
        for (uint32_t k = 0; k < VOCAB; k++)
            if (!isfinite(row[k]))
                fail_msg("position %u: a logit is not finite", segment.pos + rows - wanted + i);
    }
}

static void random_ids(int32_t *ids, uint32_t n, uint64_t seed)
{
    struct rand rand = {seed};
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)rand_below(&rand, VOCAB);
}

/* `to` (empty) becomes what `from` is: its pages are shared, its states copied. */
static void fork_slot(struct world *w, uint32_t from, uint32_t to)
{
    const struct device_calls *calls = device_calls(w->device);
    const struct config *c = &w->model.config;
    uint64_t delta = (uint64_t)c->value_heads * 128 * 128 * 4;
    uint64_t conv = 3ull * (2 * c->key_heads + c->value_heads) * 128 * 4;
    uint32_t pos = w->state.slot_pos[from];
    assert_int_equal(pos % PAGE, 0);
    const uint32_t *pages = w->state.host_table + (size_t)from * w->state.pages_max;
    state_attach_pages(&w->state, to, pages, pos / PAGE);
    uint8_t *bytes = mem_new(delta > conv ? delta : conv, 1);
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        if (c->full_attention[layer])
            continue;
        struct span all = state_delta(&w->state, layer);
        calls->read(w->device, bytes, span_at(all, from * delta), delta);
        calls->write(w->device, span_at(all, to * delta), bytes, delta);
        all = state_conv(&w->state, layer);
        calls->read(w->device, bytes, span_at(all, from * conv), conv);
        calls->write(w->device, span_at(all, to * conv), bytes, conv);
    }
    free(bytes);
    w->state.slot_pos[to] = pos;
}

/* Feeds TAIL tokens to three slots of equal content: at once, in pieces of 7, one by one. On the
 * reference all agree within 1e-4; on a fast level, whose methods differ by row count and where
 * a routing flip moves a row, within a mean of 0.025. */
static void compare_cuts(struct world *w, uint32_t first, const char *what, uint32_t tail)
{
    static float out[3][TAIL * VOCAB];
    static const uint32_t cuts[3] = {TAIL, 7, 1};
    int32_t ids[TAIL];
    uint32_t slots[3] = {first, acquire(w), acquire(w)};
    bool exact = !strcmp(device_head(w->device)->name, "cpu/ref");
    fork_slot(w, first, slots[1]);
    fork_slot(w, first, slots[2]);
    random_ids(ids, tail, 77);
    double sum = 0, most = 0;
    for (int s = 0; s < 3; s++)
        for (uint32_t done = 0; done < tail; done += cuts[s]) {
            uint32_t n = tail - done < cuts[s] ? tail - done : cuts[s];
            forward(w, slots[s], ids + done, n, n, out[s] + (size_t)done * VOCAB);
        }
    for (int s = 1; s < 3; s++)
        for (size_t i = 0; i < (size_t)tail * VOCAB; i++) {
            double d = fabs((double)out[s][i] - out[0][i]);
            sum += d;
            most = d > most ? d : most;
        }
    double mean = sum / (2.0 * tail * VOCAB);
    print_message("%s, %s: largest difference %.2e, mean %.2e\n", what,
                  device_head(w->device)->name, most, mean);
    if (exact ? most > 1e-4 : mean > 0.025)
        fail_msg("%s: the cuts differ by %g, %g on average", what, most, mean);
    state_release(&w->state, slots[1]);
    state_release(&w->state, slots[2]);
}

/* Pitfalls 74, 76 and 85: prompts of every power of two and its neighbours, in chunks whose last
 * one may be a single row; finite at each chunk's end. */
static void run_prompt(const char *backend, enum kv_kind kind, uint32_t length)
{
    struct world w;
    char what[64];
    int32_t ids[ROWS];
    float *out = mem_new(VOCAB, sizeof *out);
    open_world(&w, backend, length / PAGE + 8, kind);
    uint32_t slot = acquire(&w);
    for (uint32_t done = 0; done < length; done += ROWS) {
        random_ids(ids, ROWS, done + 1);
        forward(&w, slot, ids, length - done < ROWS ? length - done : ROWS, 1, out);
    }
    snprintf(what, sizeof what, "after %u tokens", length);
    compare_cuts(&w, slot, what, TAIL);
    free(out);
    close_world(&w);
}

static void long_prompts_stay_finite(void **state)
{
    (void)state;
    run_prompt("cpu/ref", KV_F32, 2048);
    run_prompt("cpu", KV_F32, is_long() ? 65536 : 8192);
    run_prompt("cpu", KV_BF16, is_long() ? 102400 : 8192);
}

/* Pitfalls 74 and 85. */
static void lengths_around_powers_of_two(void **state)
{
    (void)state;
    uint32_t top = is_long() ? 16 : 11;
    struct world w;
    int32_t ids[ROWS];
    float *cut = mem_new(VOCAB, sizeof *cut), *other = mem_new(VOCAB, sizeof *other);
    open_world(&w, "cpu", 2 * ((1u << top) / PAGE + 2), KV_F32);
    uint32_t slots[2] = {acquire(&w), acquire(&w)};
    for (uint32_t k = 9; k <= top; k++)
        for (uint32_t length = (1u << k) - 1; length <= (1u << k) + 1; length++) {
            /* From one random start, in chunks of 512 and of 384: only the last row is compared. */
            for (int s = 0; s < 2; s++) {
                uint32_t rows = s ? 384 : 512;
                state_reset(&w.state, slots[s]);
                for (uint32_t done = 0; done < length; done += rows) {
                    uint32_t n = length - done < rows ? length - done : rows;
                    for (uint32_t i = 0; i < n; i++)
                        ids[i] = (int32_t)((done + i) * 2654435761u >> 7) % VOCAB;
                    forward(&w, slots[s], ids, n, 1, s ? other : cut);
                }
            }
            double sum = 0;
            for (uint32_t i = 0; i < VOCAB; i++)
                sum += fabs((double)cut[i] - other[i]);
            if (!(sum / VOCAB <= 0.025))
                fail_msg("%u tokens: chunks of 512 and 384 differ by %g", length, sum / VOCAB);
        }
    free(cut);
    free(other);
    close_world(&w);
}

static void plant_page(struct world *w, uint32_t page, struct rand *rand, float *values)
{
    const struct config *c = &w->model.config;
    const struct device_calls *calls = device_calls(w->device);
    uint64_t n = (uint64_t)c->kv_heads * PAGE * 256;
    for (uint32_t layer = 0; layer < c->layers; layer++)
        for (int v = 0; v < 2 && c->full_attention[layer]; v++) {
            struct span pages =
                v ? state_v_pages(&w->state, layer) : state_k_pages(&w->state, layer);
            for (uint64_t i = 0; i < n; i++)
                values[i] = (float)rand_normal(rand);
            calls->write(w->device, span_at(pages, page * n * 4), values, n * 4);
        }
}

/* Pitfall 76: far behind in the context, up to the last position. Random keys and values stand in
 * for the text before, a few pages over and over: what is checked is attention and rotation at
 * these positions. */
static void deep_positions(void **state)
{
    (void)state;
    static const uint32_t positions[] = {32768, 261888, 81920, 100096, 131072, 199936};
    static const char *const backends[] = {"cpu", "cpu/ref"};
    struct rand rand = {8};
    float *values = mem_new(PAGE * 256, sizeof *values);
    uint32_t *pages = mem_new(CTX / PAGE, sizeof *pages);
    for (int b = 0; b < 2; b++) {
        struct world w;
        open_world(&w, backends[b], PLANTED + 8, KV_F32);
        uint32_t planted[PLANTED];
        for (int i = 0; i < PLANTED; i++) {
            assert_true(state_take_page(&w.state, &planted[i]));
            plant_page(&w, planted[i], &rand, values);
        }
        for (uint32_t i = 0; i < CTX / PAGE; i++)
            pages[i] = planted[rand_below(&rand, PLANTED)];
        for (uint32_t i = 0; i < (is_long() ? 6 : 2); i++) {
            char what[64];
            uint32_t slot = acquire(&w);
            state_attach_pages(&w.state, slot, pages, positions[i] / PAGE);
            w.state.slot_pos[slot] = positions[i];
            snprintf(what, sizeof what, "at position %u", positions[i]);
            compare_cuts(&w, slot, what, b && !is_long() ? 3 : 15);
            state_release(&w.state, slot);
        }
        close_world(&w);
    }
    free(values);
    free(pages);
}

static int make_model(void **state)
{
    (void)state;
    struct config config;
    struct err err = {0};
    synth_preset(&config);
    config.layers = 4;
    config.delta_layers = 3;
    config.attention_layers = 1;
    config.hidden = 128;
    config.heads = 2;
    config.kv_heads = config.key_heads = 1;
    config.value_heads = 2;
    config.experts = 16;
    config.topk = 4;
    config.width = config.shared_width = 64;
    config.vocab = VOCAB;
    config.max_ctx = CTX;
    if (!mkdtemp(folder))
        return -1;
    struct synth_options options = {.seed = 9, .bits = 4, .group = 64, .threads = 1};
    bool ok = synth_write(&config, &options, folder, &err);
    config_close(&config);
    if (!ok)
        print_error("%s\n", err.text);
    return ok ? 0 : -1;
}

static int remove_model(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "model.safetensors.index.json",
                                        "config.json",       "generation_config.json",
                                        "tokenizer.json",    "tokenizer_config.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *path = file_join(folder, files[i]);
        unlink(path);
        free(path);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_prompts_stay_finite),
        cmocka_unit_test(lengths_around_powers_of_two),
        cmocka_unit_test(deep_positions),
    };
    return cmocka_run_group_tests(tests, make_model, remove_model);
}
