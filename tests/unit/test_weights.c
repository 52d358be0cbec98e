/* Loading checkpoints: both layouts, every way a folder can be wrong, and independence of how the
 * tensors are spread over shards. */
#include "backend/device.h"
#include "base/bf16.h"
#include "model/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HF "tests/data/fixtures/fixture-hf"
#define MLX "tests/data/fixtures/fixture-mlx"
#define DEMO "models/demo"

static struct device *open_device(void)
{
    struct device *device;
    struct err err;
    if (!device_open(&(struct device_options){.name = "cpu/ref"}, &device, &err))
        fail_msg("%s", err.text);
    return device;
}

static void open_model(const char *folder, struct device *device, struct model *model)
{
    struct err err;
    if (!model_open(folder, device, NULL, model, &err))
        fail_msg("%s", err.text);
}

static float vector_at(const struct model *model, struct span span, uint32_t i)
{
    float f;
    device_calls(model->device)->read(model->device, &f, span_at(span, 4ull * i), 4);
    return f;
}

/* The same random model in both layouts: gains agree once the Hugging Face ones got their 1, which
 * the converter rounded to bf16; the gated norm's are the same as they stand. */
static void test_layouts(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct model hf, mlx;
    open_model(HF, device, &hf);
    open_model(MLX, device, &mlx);
    assert_int_equal(hf.config.layers, 5);
    assert_false(hf.config.quantised);
    assert_true(mlx.config.quantised);
    for (uint32_t i = 0; i < hf.config.hidden; i++) {
        float want = bf16_round(vector_at(&hf, hf.layers[0].input_norm, i));
        assert_true(vector_at(&mlx, mlx.layers[0].input_norm, i) == want);
        want = bf16_round(vector_at(&hf, hf.final_norm, i));
        assert_true(vector_at(&mlx, mlx.final_norm, i) == want);
    }
    for (uint32_t i = 0; i < 128; i++)
        assert_true(vector_at(&hf, hf.layers[0].delta.norm, i) ==
                    vector_at(&mlx, mlx.layers[0].delta.norm, i));
    for (uint32_t i = 0; i < 1280 * 4; i++)
        assert_true(vector_at(&hf, hf.layers[0].delta.conv, i) ==
                    vector_at(&mlx, mlx.layers[0].delta.conv, i));
    const struct model_layer *h = &hf.layers[1], *m = &mlx.layers[1];
    assert_int_equal(h->gate.kind, WEIGHT_BF16);
    assert_int_equal(h->gate.expert_stride, 2 * h->gate.rows);
    assert_ptr_equal((uint8_t *)h->gate.data.base + 2 * 64 * 192, h->up.data.base);
    assert_int_equal(m->gate.kind, WEIGHT_AFFINE);
    assert_int_equal(m->gate.expert_stride, m->gate.rows);
    assert_int_equal(m->gate.bits, 4);
    assert_int_equal(m->router.bits, 8);
    assert_int_equal(m->router.group, 64);
    assert_int_equal(hf.bytes.parameters, mlx.bytes.parameters);
    assert_int_equal(hf.bytes.total, 9797228);
    model_close(&hf);
    model_close(&mlx);
    device_close(device);
}

static void test_demo(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct model model;
    open_model(DEMO, device, &model);
    assert_int_equal(model.config.attention_layers, 2);
    assert_int_equal(model.bytes.total, 13899296 - 8 - 45576);
    model_close(&model);
    device_close(device);
    open_model(DEMO, NULL, &model);
    assert_int_equal(model.bytes.total, 13899296 - 8 - 45576);
    model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_demo),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
