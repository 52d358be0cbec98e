/* The forward pass on the fixtures and the demo model: against transformers, and against itself
 * however the same tokens are cut into batches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/device.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rand.h"
#include "model/graph.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const fixture_folder[] = {"tests/data/fixtures/fixture-hf",
                                             "tests/data/fixtures/fixture-mlx"};
static const char *const fixture_key[] = {"bf16", "mlx4"};
static const char *backend = "cpu/ref";

enum { VOCAB = 512, ROWS = 320, SLOTS = 5 };

struct world {
    struct device *device;
    struct model model;
    struct state state;
    struct graph *graph;
};

static void open_world_pages(struct world *w, const char *folder, uint32_t rows, uint64_t pages)
{
    struct err err = {0};
    struct device_options device = {.name = backend, .threads = 1};
    struct model_options load = {0};
    memset(w, 0, sizeof *w);
    if (!device_open(&device, &w->device, &err) ||
        !model_open(folder, w->device, &load, &w->model, &err))
        fail_msg("%s", err.text);
    struct state_limits limits = {.slots = SLOTS, .ctx = 1024, .pages = pages, .kv_kind = KV_F32};
    struct graph_limits graph = {.rows = rows, .segments = SLOTS, .logit_rows = rows};
    if (!state_open(&w->model, &limits, &w->state, &err) ||
        !graph_open(&w->model, &w->state, &graph, &w->graph, &err))
        fail_msg("%s", err.text);
}

static void open_world(struct world *w, const char *folder)
{
    open_world_pages(w, folder, ROWS, 0);
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
    struct err err = {0};
    uint32_t slot;
    if (!state_acquire(&w->state, &slot, &err))
        fail_msg("%s", err.text);
    return slot;
}

static void log_softmax(float *row, uint32_t n)
{
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        most = row[i] > most ? row[i] : most;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(row[i] - most);
    for (uint32_t i = 0; i < n; i++)
        row[i] = (float)(row[i] - most - log(sum));
}

/* Part of a batch: rows tokens that go on in `slot`, and where their log-probabilities go. */
struct part {
    uint32_t slot, rows;
    const int32_t *tokens;
    float *out; /* f32 [rows, vocab] */
};

static void forward(struct world *w, const struct part *parts, uint32_t n)
{
    struct segment segments[SLOTS];
    int32_t tokens[ROWS];
    uint32_t wanted[ROWS], rows = 0;
    struct err err = {0};
    for (uint32_t i = 0; i < n; i++) {
        segments[i] = (struct segment){.slot = parts[i].slot,
                                       .row = rows,
                                       .rows = parts[i].rows,
                                       .pos = w->state.slot_pos[parts[i].slot]};
        memcpy(tokens + rows, parts[i].tokens, parts[i].rows * sizeof *tokens);
        rows += parts[i].rows;
    }
    for (uint32_t i = 0; i < rows; i++)
        wanted[i] = i;
    struct batch batch = {.rows = rows,
                          .segments = n,
                          .logit_rows = rows,
                          .tokens = tokens,
                          .segment = segments,
                          .logit_row = wanted};
    if (!graph_forward(w->graph, &batch, &err))
        fail_msg("%s", err.text);
    uint32_t row = 0, vocab = w->model.config.vocab;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < parts[i].rows; j++, row++) {
            float *out = parts[i].out + (size_t)j * vocab;
            if (!graph_read_logits(w->graph, row, out, &err))
                fail_msg("%s", err.text);
            log_softmax(out, vocab);
        }
}

/* Feeds n tokens to an empty slot in chunks; out f32 [n, vocab]. */
static void score(struct world *w, uint32_t slot, const int32_t *ids, uint32_t n, uint32_t chunk,
                  float *out)
{
    state_reset(&w->state, slot);
    for (uint32_t done = 0; done < n; done += chunk) {
        struct part part = {.slot = slot,
                            .rows = n - done < chunk ? n - done : chunk,
                            .tokens = ids + done,
                            .out = out + (size_t)done * w->model.config.vocab};
        forward(w, &part, 1);
    }
}

static float worst(const float *a, const float *b, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++) {
        float d = fabsf(a[i] - b[i]);
        most = d > most || isnan(d) ? d : most;
    }
    return most;
}

static double mean(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += fabs((double)a[i] - b[i]);
    return sum / (double)n;
}

/* A NaN is never within bounds. */
static void assert_below(float value, float bound, const char *what)
{
    if (!(value <= bound))
        fail_msg("%s: %g exceeds %g", what, value, bound);
}

static json_t *read_expected(void)
{
    json_error_t error;
    json_t *root = json_load_file("tests/data/fixtures/expected.json", 0, &error);
    assert_non_null(root);
    return root;
}

static uint32_t read_ids(const json_t *record, int32_t *ids, uint32_t max)
{
    const json_t *list = json_object_get(record, "ids");
    uint32_t n = (uint32_t)json_array_size(list);
    assert_true(n <= max);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return n;
}

static float *new_rows(uint32_t rows)
{
    return mem_new((size_t)rows * VOCAB, sizeof(float));
}

static void random_ids(int32_t *ids, uint32_t n, uint64_t seed)
{
    struct rand rand = {seed};
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)rand_below(&rand, VOCAB);
}

/* ---- against transformers ----------------------------------------------------------------- */

static float compare_record(const json_t *record, const float *out, uint32_t n)
{
    const json_t *next = json_object_get(record, "next_logprob");
    const json_t *top = json_object_get(record, "top");
    float most = 0;
    for (uint32_t i = 0; i < n; i++) {
        size_t k;
        const json_t *pair;
        json_array_foreach(json_array_get(top, i), k, pair)
        {
            json_int_t id = json_integer_value(json_array_get(pair, 0));
            float want = (float)json_real_value(json_array_get(pair, 1));
            float one = worst(out + (size_t)i * VOCAB + id, &want, 1);
            most = one > most || isnan(one) ? one : most;
        }
        if (i + 1 < n) {
            json_int_t id =
                json_integer_value(json_array_get(json_object_get(record, "ids"), i + 1));
            float want = (float)json_real_value(json_array_get(next, i));
            float one = worst(out + (size_t)i * VOCAB + id, &want, 1);
            most = one > most || isnan(one) ? one : most;
        }
    }
    return most;
}

static void fixtures_match_transformers(void **unused)
{
    (void)unused;
    json_t *expected = read_expected();
    float *out = new_rows(ROWS);
    int32_t ids[ROWS];
    for (int f = 0; f < 2; f++) {
        struct world w;
        open_world(&w, fixture_folder[f]);
        uint32_t slot = acquire(&w);
        float most = 0;
        size_t i;
        const json_t *record;
        json_array_foreach(json_object_get(expected, fixture_key[f]), i, record)
        {
            uint32_t n = read_ids(record, ids, ROWS);
            score(&w, slot, ids, n, ROWS, out);
            float one = compare_record(record, out, n);
            most = one > most || isnan(one) ? one : most;
        }
        print_message("%s: largest difference %.6f\n", fixture_folder[f], most);
        assert_below(most, 1e-3f, fixture_folder[f]);
        close_world(&w);
    }
    free(out);
    json_decref(expected);
}

/* ---- however the tokens are cut ----------------------------------------------------------- */

/* Lengths below the convolution's taps, at and around chunk lengths, each in chunks of many sizes
 * against the whole. The reference differs by 1e-4 at most. A fast level has other methods for few
 * rows than for many, and a routing flip of a random model moves a whole row: a mean of 0.025. */
static void compare_chunks(bool fast)
{
#ifdef __SANITIZE_ADDRESS__
    bool all = false; /* takes an hour, and finds no more than the short form */
#else
    bool all = getenv("CALLA_TEST_LONG") != NULL;
#endif
    static const uint32_t lengths[] = {1, 2, 3, 4, 5, 63, 64, 65, 129, 193, 257, 300};
    static const uint32_t chunks[] = {1, 2, 3, 7, 64, 128, 256};
    float *whole = new_rows(ROWS), *cut = new_rows(ROWS);
    int32_t ids[ROWS];
    for (int f = 0; f < 2; f++) {
        struct world w;
        open_world(&w, fixture_folder[f]);
        uint32_t slot = acquire(&w);
        random_ids(ids, ROWS, 11);
        float most = 0;
        double most_mean = 0;
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            uint32_t n = lengths[l];
            score(&w, slot, ids, n, ROWS, whole);
            for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
                /* Small chunks of long texts, and long texts of both layouts, only add time. */
                bool slow = (chunks[c] < 64 && n > 65 && n != 257) || (f == 0 && n > 65);
                if (chunks[c] >= n || (slow && !all))
                    continue;
                score(&w, slot, ids, n, chunks[c], cut);
                float one = worst(whole, cut, (size_t)n * VOCAB);
                double one_mean = mean(whole, cut, (size_t)n * VOCAB);
                most = one > most || isnan(one) ? one : most;
                most_mean = one_mean > most_mean ? one_mean : most_mean;
            }
        }
        print_message("%s, %s: largest difference %g, largest mean %g\n", fixture_folder[f],
                      device_head(w.device)->name, most, most_mean);
        if (fast)
            assert_below((float)most_mean, 0.025f, fixture_folder[f]);
        else
            assert_below(most, 1e-4f, fixture_folder[f]);
        close_world(&w);
    }
    free(whole);
    free(cut);
}

/* Pitfalls 71, 73, 74. */
static void chunking_does_not_matter(void **unused)
{
    (void)unused;
    compare_chunks(false);
}

/* Calls `run` on each level of this machine but the reference. */
static void on_fast_levels(void (*run)(bool fast))
{
    for (int i = 0; device_name(i); i++)
        if (!strncmp(device_name(i), "cpu/", 4) && strcmp(device_name(i), "cpu/ref") != 0) {
            backend = device_name(i);
            run(true);
        }
    backend = "cpu/ref";
}

/* Pitfalls 71, 73, 74. */
static void chunking_matters_little_on_fast_levels(void **unused)
{
    (void)unused;
    on_fast_levels(compare_chunks);
}

/* Pitfalls 62, 98, 104: sequences of different lengths in random batches give what each gives
 * alone, also when their pages lie out of order in the pool and when some end early. */
static void batches_do_not_mix_sequences(void **unused)
{
    (void)unused;
    static const uint32_t lengths[SLOTS] = {300, 17, 290, 3, 150};
    struct world w;
    struct rand rand = {5};
    int32_t ids[SLOTS][ROWS];
    float *alone[SLOTS], *together[SLOTS];
    uint32_t slots[SLOTS], done[SLOTS] = {0};
    open_world(&w, fixture_folder[1]);
    for (int i = 0; i < SLOTS; i++) {
        slots[i] = acquire(&w);
        random_ids(ids[i], ROWS, 100 + (uint64_t)i);
        alone[i] = new_rows(lengths[i]);
        together[i] = new_rows(lengths[i]);
        score(&w, slots[i], ids[i], lengths[i], 100, alone[i]);
    }
    for (int i = 0; i < SLOTS; i++)
        state_reset(&w.state, slots[i]);
    for (uint64_t i = 0; i < w.state.free_count; i++) /* the highest page is taken first */
        w.state.free_pages[i] = (uint32_t)i;
    for (;;) {
        struct part parts[SLOTS];
        uint32_t n = 0, room = ROWS;
        for (uint32_t i = 0; i < SLOTS; i++) {
            uint32_t left = lengths[i] - done[i];
            uint32_t rows = (uint32_t)rand_below(&rand, 40);
            rows = rows > left ? left : rows;
            rows = rows > room ? room : rows;
            if (rows == 0)
                continue;
            parts[n++] = (struct part){.slot = slots[i],
                                       .rows = rows,
                                       .tokens = ids[i] + done[i],
                                       .out = together[i] + (size_t)done[i] * VOCAB};
            done[i] += rows;
            room -= rows;
        }
        bool all = true;
        for (int i = 0; i < SLOTS; i++)
            all = all && done[i] == lengths[i];
        if (n)
            forward(&w, parts, n);
        if (all)
            break;
    }
    const uint32_t *table = w.state.host_table + (size_t)slots[0] * w.state.pages_max;
    assert_true(table[1] < table[0]);
    for (int i = 0; i < SLOTS; i++) {
        assert_below(worst(alone[i], together[i], (size_t)lengths[i] * VOCAB), 1e-4f, "sequence");
        free(alone[i]);
        free(together[i]);
    }
    close_world(&w);
}

/* Pitfall 103: what a slot held before does not show. */
static void a_freed_slot_starts_afresh(void **unused)
{
    (void)unused;
    struct world w;
    int32_t ids[ROWS], other[ROWS];
    float *fresh = new_rows(8), *again = new_rows(ROWS);
    open_world(&w, fixture_folder[1]);
    random_ids(ids, ROWS, 3);
    random_ids(other, ROWS, 4);
    uint32_t slot = acquire(&w);
    for (uint32_t n = 1; n <= 8; n++) {
        score(&w, slot, ids, n, n, fresh);
        score(&w, slot, other, 290, 64, again);
        state_release(&w.state, slot);
        assert_int_equal(acquire(&w), slot);
        score(&w, slot, ids, n, 1, again);
        assert_below(worst(fresh, again, (size_t)n * VOCAB), 1e-4f, "reused slot");
    }
    free(fresh);
    free(again);
    close_world(&w);
}

/* Logits of rows asked for afterwards are those of asking at once. */
static void projecting_later_gives_the_same(void **unused)
{
    (void)unused;
    struct world w;
    struct err err = {0};
    int32_t ids[20];
    float *all = new_rows(20), row[VOCAB];
    open_world(&w, fixture_folder[1]);
    random_ids(ids, 20, 6);
    score(&w, acquire(&w), ids, 20, 20, all);
    for (uint32_t i = 0; i < 20; i += 3) {
        uint32_t wanted[2] = {i, 19};
        assert_true(graph_project(w.graph, wanted, i < 19 ? 2 : 1, &err));
        assert_true(graph_read_logits(w.graph, 0, row, &err));
        log_softmax(row, VOCAB);
        assert_memory_equal(row, all + (size_t)i * VOCAB, sizeof row);
    }
    free(all);
    close_world(&w);
}

/* ---- layer by layer ----------------------------------------------------------------------- */

struct probe {
    const json_t *header;
    const uint8_t *data;
    float most;
    int layers;
};

static const float *probe_tensor(const struct probe *probe, const char *name)
{
    const json_t *entry = json_object_get(probe->header, name);
    assert_non_null(entry);
    json_int_t start =
        json_integer_value(json_array_get(json_object_get(entry, "data_offsets"), 0));
    return (const float *)(const void *)(probe->data + start);
}

/* Relative to the largest element of the row: single elements can be near 0. */
static float relative(const float *got, const float *want, uint32_t rows, uint32_t cols)
{
    float most = 0;
    for (uint32_t r = 0; r < rows; r++) {
        float scale = 0;
        for (uint32_t i = 0; i < cols; i++)
            scale = fmaxf(scale, fabsf(want[(size_t)r * cols + i]));
        float one = worst(got + (size_t)r * cols, want + (size_t)r * cols, cols) / scale;
        most = one > most || isnan(one) ? one : most;
    }
    return most;
}

static void on_layer(void *user, int layer, const float *x, uint32_t rows)
{
    struct probe *probe = user;
    char name[32] = "embedding";
    if (layer >= 0)
        snprintf(name, sizeof name, "layer.%d", layer);
    float one = relative(x, probe_tensor(probe, name), rows, 256);
    print_message("%s: %.2e\n", name, one);
    probe->most = one > probe->most || isnan(one) ? one : probe->most;
    probe->layers++;
}

static void compare_layers(bool fast)
{
    (void)fast; /* the bound is the same */
    struct world w;
    struct err err = {0};
    struct file_map map;
    assert_true(file_map_open("tests/data/demo/probe.safetensors", &map, &err));
    uint64_t header_bytes;
    memcpy(&header_bytes, map.data, 8);
    json_t *header = json_loadb((const char *)map.data + 8, header_bytes, 0, NULL);
    assert_non_null(header);
    struct probe probe = {.header = header, .data = map.data + 8 + header_bytes};
    int32_t ids[21];
    memcpy(ids, probe_tensor(&probe, "ids"), sizeof ids);
    open_world(&w, "models/demo");
    uint32_t wanted[21], slot = acquire(&w);
    for (uint32_t i = 0; i < 21; i++)
        wanted[i] = i;
    struct segment segment = {.slot = slot, .rows = 21};
    struct batch batch = {.rows = 21,
                          .segments = 1,
                          .logit_rows = 21,
                          .tokens = ids,
                          .segment = &segment,
                          .logit_row = wanted};
    graph_set_probe(w.graph, on_layer, &probe);
    assert_true(graph_forward(w.graph, &batch, &err));
    assert_int_equal(probe.layers, 9);
    float *logits = mem_new(21ull * 8192, sizeof *logits);
    for (uint32_t i = 0; i < 21; i++)
        assert_true(graph_read_logits(w.graph, i, logits + i * 8192ull, &err));
    float one = relative(logits, probe_tensor(&probe, "logits"), 21, 8192);
    print_message("logits: %.2e\n", one);
    assert_below(probe.most, 2e-3f, "layer outputs");
    assert_below(one, 2e-3f, "logits");
    free(logits);
    close_world(&w);
    json_decref(header);
    file_map_close(&map);
}

/* Pitfall 79. */
static void layers_match_transformers(void **unused)
{
    (void)unused;
    compare_layers(false);
}

/* Pitfall 79. */
static void layers_match_on_fast_levels(void **unused)
{
    (void)unused;
    on_fast_levels(compare_layers);
}

/* ---- what can go wrong -------------------------------------------------------------------- */

static void damaged_numbers_are_an_error(void **unused)
{
    (void)unused;
    struct world w;
    struct err err = {0};
    int32_t ids[4] = {1, 2, 3, 4}, before[4], after[4];
    float *out = new_rows(4), nan = NAN, gain;
    open_world(&w, fixture_folder[0]);
    uint32_t slot = acquire(&w);
    const struct device_calls *calls = device_calls(w.device);
    score(&w, slot, ids, 4, 4, out);
    assert_true(graph_read_choices(w.graph, before, &err));
    calls->read(w.device, &gain, w.model.layers[1].input_norm, 4);
    calls->write(w.device, w.model.layers[1].input_norm, &nan, 4);
    score(&w, slot, ids, 4, 4, out);
    assert_true(graph_read_choices(w.graph, after, &err));
    for (int i = 0; i < 4; i++)
        assert_int_equal(after[i], -1);
    calls->write(w.device, w.model.layers[1].input_norm, &gain, 4);
    score(&w, slot, ids, 4, 4, out);
    assert_true(graph_read_choices(w.graph, after, &err));
    assert_memory_equal(before, after, sizeof before);
    free(out);
    close_world(&w);
}

/* Refused batches change nothing. Pitfall 88: also one that does not fit half way. */
static void wrong_batches_are_refused(void **unused)
{
    (void)unused;
    struct world w;
    struct err err = {0};
    int32_t ids[ROWS];
    uint32_t row[2] = {0, 0};
    float *out = new_rows(ROWS);
    open_world_pages(&w, fixture_folder[1], ROWS, 2);
    random_ids(ids, ROWS, 9);
    uint32_t a = acquire(&w), b = acquire(&w);
    struct segment s[2] = {{.slot = a, .rows = 2}, {.slot = b, .row = 2, .rows = 2}};
    struct batch good = {
        .rows = 4, .segments = 2, .logit_rows = 1, .tokens = ids, .segment = s, .logit_row = row};

    struct batch bad = good;
    bad.rows = ROWS + 1;
    assert_false(graph_forward(w.graph, &bad, &err));
    bad = good;
    bad.rows = 5;
    assert_false(graph_forward(w.graph, &bad, &err));
    bad = good;
    bad.logit_rows = 2;
    assert_false(graph_forward(w.graph, &bad, &err));
    struct segment wrong[2] = {s[0], s[1]};
    bad = good;
    bad.segment = wrong;
    wrong[1].slot = a;
    assert_false(graph_forward(w.graph, &bad, &err));
    wrong[1].slot = SLOTS - 1;
    assert_false(graph_forward(w.graph, &bad, &err));
    wrong[1] = s[1];
    wrong[1].pos = 1;
    assert_false(graph_forward(w.graph, &bad, &err));
    int32_t tokens[4] = {1, 2, VOCAB, 3};
    bad = good;
    bad.tokens = tokens;
    assert_false(graph_forward(w.graph, &bad, &err));
    assert_int_equal(err.kind, ERR_USAGE);

    s[0].rows = 3;
    s[1] = (struct segment){.slot = b, .row = 3, .rows = 257};
    bad = good;
    bad.rows = 260;
    assert_false(graph_forward(w.graph, &bad, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    assert_int_equal(w.state.free_count, 2);
    assert_int_equal(w.state.slot_pos[a], 0);

    struct part parts[2] = {{.slot = a, .rows = 4, .tokens = ids, .out = out},
                            {.slot = b, .rows = 256, .tokens = ids, .out = out + 4 * VOCAB}};
    forward(&w, parts, 2);
    assert_below(worst(out, out + 4 * VOCAB, 4 * VOCAB), 1e-4f, "after refusals");
    free(out);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixtures_match_transformers),
        cmocka_unit_test(chunking_does_not_matter),
        cmocka_unit_test(chunking_matters_little_on_fast_levels),
        cmocka_unit_test(batches_do_not_mix_sequences),
        cmocka_unit_test(a_freed_slot_starts_afresh),
        cmocka_unit_test(projecting_later_gives_the_same),
        cmocka_unit_test(layers_match_transformers),
        cmocka_unit_test(layers_match_on_fast_levels),
        cmocka_unit_test(damaged_numbers_are_an_error),
        cmocka_unit_test(wrong_batches_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
