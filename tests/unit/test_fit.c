/* What a model takes in memory: the parts, the largest context, and that the ops take what they
 * said they would. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "engine/core.h"
#include "engine/fit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct device *open_device(const char *name, int threads)
{
    struct device *device;
    struct err err = {0};
    if (!device_open(&(struct device_options){.name = name, .threads = threads}, &device, &err))
        fail_msg("%s", err.text);
    return device;
}

/* The published model's shape; only its config and bytes are read. */
static struct model full_model(void)
{
    struct model model = {.bytes.total = 19508787456};
    model.config = (struct config){.layers = 40,
                                   .attention_layers = 10,
                                   .delta_layers = 30,
                                   .hidden = 2048,
                                   .vocab = 248320,
                                   .heads = 16,
                                   .kv_heads = 2,
                                   .key_heads = 16,
                                   .value_heads = 32,
                                   .experts = 256,
                                   .topk = 8,
                                   .max_ctx = 262144};
    return model;
}

static struct fit make(const struct model *model, const struct device *device, uint32_t parallel)
{
    return fit_make(model, device,
                    &(struct fit_options){.chunk = 512, .parallel = parallel, .kv_kind = KV_BF16});
}

/* ---- scratch ------------------------------------------------------------------------------ */

/* Runs attention of that batch on a device of its own; every position lies in one page. */
static void check_scratch(const char *level, int threads, struct attention_dims dims,
                          struct segment *segment, uint32_t segments)
{
    struct device *device = open_device(level, threads);
    uint32_t rows = 0, slots = 0, pages = 0;
    for (uint32_t i = 0; i < segments; i++) {
        segment[i].row = rows;
        segment[i].slot = slots++;
        rows += segment[i].rows;
        uint32_t need = (segment[i].pos + segment[i].rows + KV_PAGE - 1) / KV_PAGE;
        pages = need > pages ? need : pages;
    }
    size_t page = (size_t)dims.kv_heads * KV_PAGE * 256 * 4, q = (size_t)rows * dims.heads * 256;
    void *table = mem_new((size_t)slots * pages, 4), *kv = mem_try(page, 1);
    float *x = mem_try(4 * q, sizeof *x);
    assert_non_null(kv);
    assert_non_null(x);
    struct batch_view batch = {.rows = rows,
                               .segments = segments,
                               .host_segments = segment,
                               .page_table = {table, 0},
                               .pages_max = pages};
    dims.pages = 1;
    const struct attention_args args = {.batch = &batch,
                                        .dims = dims,
                                        .q = {x, 0},
                                        .qg = {x + q, 0},
                                        .k_pages = {kv, 0},
                                        .v_pages = {kv, 0},
                                        .y = {x + 3 * q, 0}};
    uint64_t said = device_ops(device)->attention_scratch(device, &dims, &batch), took = 0;
    struct err err = {0};
    device_ops(device)->attention(device, &args);
    assert_true(device_calls(device)->sync(device, &err));
    for (int i = 0; i < CPU_SCRATCH_SLOTS; i++)
        took += device->scratch[i].bytes;
    if (said != took)
        fail_msg("%s, %d threads, %u segments to %u: said %llu, took %llu", level, threads,
                 segments, segment[0].pos, (unsigned long long)said, (unsigned long long)took);
    device_close(device);
    free(table);
    free(kv);
    free(x);
}

static void attention_takes_what_it_says(void **unused)
{
    (void)unused;
    const char *name;
    static const struct attention_dims shapes[] = {
        {.heads = 16, .kv_heads = 2, .eps = 1e-6f, .kv_kind = KV_BF16},
        {.heads = 8, .kv_heads = 2, .eps = 1e-6f, .kv_kind = KV_F32},
        {.heads = 4, .kv_heads = 4, .eps = 1e-6f, .kv_kind = KV_BF16},
    };
    for (int i = 0; (name = device_name(i)); i++) {
        if (strncmp(name, "cpu/", 4))
            continue;
        bool slow = !strcmp(name, "cpu/ref");
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int threads = 1; threads <= 3; threads += 2) {
                struct segment one[] = {{.rows = 1, .pos = 0}}, page[] = {{.rows = 1, .pos = 256}},
                               far[] = {{.rows = 1, .pos = slow ? 2999 : 262143}},
                               few[] = {{.rows = 4, .pos = 253}, {.rows = 3, .pos = 700}},
                               edge[] = {{.rows = 4, .pos = 252}},
                               mixed[] = {{.rows = 1, .pos = 900}, {.rows = 40, .pos = 300}},
                               prompt[] = {{.rows = 70, .pos = 500}};
                check_scratch(name, threads, shapes[s], one, 1);
                check_scratch(name, threads, shapes[s], page, 1);
                check_scratch(name, threads, shapes[s], far, 1);
                check_scratch(name, threads, shapes[s], few, 2);
                check_scratch(name, threads, shapes[s], edge, 1);
                check_scratch(name, threads, shapes[s], mixed, 2);
                check_scratch(name, threads, shapes[s], prompt, 1);
            }
    }
}

/* ---- bytes -------------------------------------------------------------------------------- */

static void parts_of_the_full_model(void **unused)
{
    (void)unused;
    struct model model = full_model();
    struct device *device = open_device("cpu", 2);
    uint64_t before = 0;
    for (uint32_t parallel = 1; parallel <= 4; parallel++) {
        struct fit fit = make(&model, device, parallel);
        struct fit_bytes b = fit_bytes(&fit, 262144), half = fit_bytes(&fit, 131072);
        assert_int_equal(b.weights, model.bytes.total);
        assert_int_equal(b.kv, parallel * (20480ull * 262144 + 4 * 1024));
        /* 30 layers of f32 [32, 128, 128] and [3, 8192] */
        assert_int_equal(b.states, parallel * 30ull * (4 * 32 * 128 * 128 + 4 * 3 * 8192));
        assert_int_equal(b.snapshots,
                         parallel * (30ull * (4 * 32 * 128 * 128 + 4 * 3 * 8192) + 20480ull * 255));
        assert_int_equal(b.total,
                         b.weights + b.kv + b.states + b.activations + b.scratch + b.snapshots);
        /* what decoding needs grows with the positions of every stream */
        assert_true(half.scratch > 0 && b.scratch > half.scratch + half.scratch / 2);
        assert_true(b.scratch > before);
        before = b.scratch;
    }
    device_close(device);
}

static void the_largest_context_is_the_largest(void **unused)
{
    (void)unused;
    struct model model = full_model();
    struct device *device = open_device("cpu", 2);
    for (uint32_t parallel = 1; parallel <= 4; parallel += 3)
        for (uint64_t gib = 19; gib < 64; gib += 2) {
            struct fit fit = make(&model, device, parallel);
            fit.available = gib << 30;
            uint32_t largest = fit_largest_ctx(&fit), ctx;
            struct err err = {0};
            if (largest) {
                assert_true(fit_bytes(&fit, largest).total <= fit.available);
                assert_true(fit_choose_ctx(&fit, largest, &ctx, &err));
                assert_int_equal(ctx, largest);
                assert_true(fit_choose_ctx(&fit, 0, &ctx, &err));
                assert_in_range(ctx, 1, largest);
                uint64_t pages = fit_pages(&fit, ctx), cache = fit_cache_bytes(&fit, ctx, pages);
                assert_in_range(pages, parallel * (ctx / KV_PAGE), UINT64_MAX);
                assert_true(cache >= fit_bytes(&fit, ctx).snapshots);
                struct fit_bytes b = fit_bytes(&fit, ctx);
                assert_true(b.total - b.snapshots + cache <= fit.available);
            }
            if (largest == model.config.max_ctx)
                continue;
            assert_true(fit_bytes(&fit, largest + KV_PAGE).total > fit.available);
            assert_false(fit_choose_ctx(&fit, largest + KV_PAGE, &ctx, &err));
            assert_int_equal(err.kind, ERR_RESOURCE);
            char advice[64] = "no context fits";
            if (largest)
                snprintf(advice, sizeof advice, "use --ctx %u", largest);
            assert_non_null(strstr(err.text, advice));
            assert_non_null(strstr(err.text, "scratch"));
        }
    device_close(device);
}

static void sizes_past_all_memory_are_refused(void **unused)
{
    (void)unused;
    struct model model = full_model();
    model.config.max_ctx = 1 << 30;
    struct device *device = open_device("cpu", 2);
    struct fit fit = make(&model, device, 4096);
    struct err err = {0};
    uint32_t ctx;
    fit.available = 64ull << 30;
    assert_true(fit_bytes(&fit, 1 << 30).total > 1ull << 50);
    assert_false(fit_choose_ctx(&fit, 1 << 30, &ctx, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    model.bytes.total = UINT64_MAX - 5;
    assert_true(fit_bytes(&fit, KV_PAGE).total == UINT64_MAX);
    assert_int_equal(fit_largest_ctx(&fit), 0);
    device_close(device);
}

/* An engine has the sizes that were measured, and refuses by the same count. */
static void an_engine_takes_the_same(void **unused)
{
    (void)unused;
    struct device *device = open_device("cpu", 1);
    struct model model;
    struct err err = {0};
    assert_true(model_open("models/demo", NULL, NULL, &model, &err));
    for (uint32_t parallel = 1; parallel <= 4; parallel += 3) {
        struct fit fit = fit_make(&model, device,
                                  &(struct fit_options){.chunk = 64,
                                                        .parallel = parallel,
                                                        .kv_kind = device_head(device)->kv_kind});
        uint64_t mib = (fit_bytes(&fit, 2048).total >> 20) + 1;
        struct engine_options options = {.model = "models/demo",
                                         .backend = "cpu",
                                         .threads = 1,
                                         .chunk = 64,
                                         .parallel = parallel,
                                         .ctx = 2048,
                                         .memory_bytes = mib << 20};
        struct engine *engine;
        if (!engine_open(&options, &engine, &err))
            fail_msg("%s", err.text);
        assert_int_equal(engine_ctx(engine), 2048);
        assert_true(engine->cache_bytes <= mib << 20);
        engine_close(engine);
        options.memory_bytes -= 1 << 20;
        assert_false(engine_open(&options, &engine, &err));
        assert_int_equal(err.kind, ERR_RESOURCE);
        assert_non_null(strstr(err.text, "the largest context that fits is"));
    }
    model_close(&model);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_takes_what_it_says),
        cmocka_unit_test(parts_of_the_full_model),
        cmocka_unit_test(the_largest_context_is_the_largest),
        cmocka_unit_test(sizes_past_all_memory_are_refused),
        cmocka_unit_test(an_engine_takes_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
