/* Synthetic checkpoints: they load at every width, do not depend on threads, and give finite,
 * varied activations. */
#include "backend/device.h"
#include "base/bf16.h"
#include "base/buf.h"
#include "base/file.h"
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

static const char *const files[] = {"model.safetensors", "model.safetensors.index.json",
                                    "config.json",       "generation_config.json",
                                    "tokenizer.json",    "tokenizer_config.json"};

enum { FILES = sizeof files / sizeof *files };

static void make_folder(char *out)
{
    memcpy(out, "/tmp/calla-synth-XXXXXX", 24);
    assert_non_null(mkdtemp(out));
}

static void remove_folder(const char *folder)
{
    for (int i = 0; i < FILES; i++) {
        char *path = file_join(folder, files[i]);
        unlink(path);
        free(path);
    }
    rmdir(folder);
}

static void small_config(struct config *config)
{
    synth_preset(config);
    config->layers = 4;
    config->delta_layers = 3;
    config->attention_layers = 1;
    config->hidden = 256;
    config->heads = 4;
    config->key_heads = 2;
    config->value_heads = 4;
    config->experts = 32;
    config->width = 128;
    config->shared_width = 128;
    config->vocab = 512;
    config->max_ctx = 4096;
}

static void write_small(const struct config *config, const struct synth_options *options,
                        const char *folder)
{
    struct err err;
    if (!synth_write(config, options, folder, &err))
        fail_msg("%s", err.text);
}

static void test_same_bytes(void **state)
{
    (void)state;
    char a[24], b[24], c[24];
    struct config config;
    small_config(&config);
    make_folder(a);
    make_folder(b);
    make_folder(c);
    write_small(&config, &(struct synth_options){.seed = 5, .bits = 4, .group = 64, .threads = 1},
                a);
    write_small(&config, &(struct synth_options){.seed = 5, .bits = 4, .group = 64, .threads = 3},
                b);
    write_small(&config, &(struct synth_options){.seed = 6, .bits = 4, .group = 64}, c);
    for (int i = 0; i < FILES; i++) {
        struct buf x = {0}, y = {0}, z = {0};
        char *path = file_join(a, files[i]);
        assert_true(file_read(path, 1 << 27, &x, NULL));
        free(path);
        path = file_join(b, files[i]);
        assert_true(file_read(path, 1 << 27, &y, NULL));
        free(path);
        path = file_join(c, files[i]);
        assert_true(file_read(path, 1 << 27, &z, NULL));
        free(path);
        assert_int_equal(x.len, y.len);
        assert_memory_equal(x.data, y.data, x.len);
        assert_int_equal(x.len, z.len);
        if (i == 0)
            assert_memory_not_equal(x.data, z.data, x.len);
        buf_free(&x);
        buf_free(&y);
        buf_free(&z);
    }
    struct err err;
    assert_false(synth_write(&config, &(struct synth_options){.bits = 4, .group = 64}, a, &err));
    assert_non_null(strstr(err.text, "already holds"));
    remove_folder(a);
    remove_folder(b);
    remove_folder(c);
    config_close(&config);
}

/* Scales of either sign; about half negative. */
static void check_signs(const struct weight *w)
{
    const uint16_t *scales = w->scales.base;
    uint32_t n = w->rows * (w->cols / w->group), negative = 0;
    for (uint32_t i = 0; i < n; i++)
        negative += bf16_to_f32(scales[i]) < 0;
    assert_in_range(negative, n * 4 / 10, n * 6 / 10);
}

static void check_forward(const struct model *model)
{
    enum { ROWS = 24 };
    struct state_limits limits = {.slots = 1, .ctx = 256, .kv_kind = KV_F32};
    struct graph_limits graph_limits = {.rows = ROWS, .segments = 1, .logit_rows = ROWS};
    struct state state;
    struct graph *graph;
    struct err err;
    uint32_t slot, wanted[ROWS], firsts = 0;
    int32_t tokens[ROWS], chosen[ROWS], last = -1;
    assert_true(state_open(model, &limits, &state, &err));
    assert_true(graph_open(model, &state, &graph_limits, &graph, &err));
    assert_true(state_acquire(&state, &slot, &err));
    for (uint32_t i = 0; i < ROWS; i++) {
        tokens[i] = (int32_t)(i * 37 % model->config.vocab);
        wanted[i] = i;
    }
    struct segment segment = {.slot = slot, .rows = ROWS};
    struct batch batch = {.rows = ROWS,
                          .segments = 1,
                          .logit_rows = ROWS,
                          .tokens = tokens,
                          .segment = &segment,
                          .logit_row = wanted};
    if (!graph_forward(graph, &batch, &err))
        fail_msg("%s", err.text);
    assert_true(graph_read_choices(graph, chosen, &err));
    float *logits = malloc(model->config.vocab * sizeof *logits);
    for (uint32_t i = 0; i < ROWS; i++) {
        double sum = 0, squares = 0;
        assert_true(graph_read_logits(graph, i, logits, &err));
        for (uint32_t k = 0; k < model->config.vocab; k++) {
            assert_true(isfinite(logits[k]));
            sum += logits[k];
            squares += (double)logits[k] * logits[k];
        }
        double n = model->config.vocab, spread = sqrt(squares / n - sum / n * (sum / n));
        assert_true(spread > 0.5 && spread < 20);
        firsts += chosen[i] != last;
        last = chosen[i];
    }
    assert_true(firsts > ROWS / 2);
    free(logits);
    graph_close(graph);
    state_close(&state);
}

static void test_loads_and_runs(void **state)
{
    (void)state;
    static const struct config_quant kinds[] = {{2, 32, false},  {3, 64, false}, {4, 64, false},
                                                {5, 128, false}, {6, 64, false}, {8, 32, false}};
    struct err err;
    struct device *device;
    assert_true(device_open(&(struct device_options){.name = "cpu/ref"}, &device, &err));
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char folder[24];
        struct config config;
        struct model model;
        make_folder(folder);
        small_config(&config);
        config.tie_embeddings = i == 1;
        config.hidden = i == 4 ? 224 : 256; /* 224: groups of 64 do not fit, so bf16 */
        write_small(
            &config,
            &(struct synth_options){.seed = 3, .bits = kinds[i].bits, .group = kinds[i].group},
            folder);
        config_close(&config);
        if (!model_open(folder, device, NULL, &model, &err))
            fail_msg("%s", err.text);
        const struct weight *down = &model.layers[3].down;
        assert_int_equal(down->bits, kinds[i].bits);
        assert_int_equal(down->group, kinds[i].group);
        check_signs(down);
        assert_int_equal(model.layers[0].router.kind, i == 4 ? WEIGHT_BF16 : WEIGHT_AFFINE);
        check_forward(&model);
        model_close(&model);
        remove_folder(folder);
    }
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_loads_and_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
