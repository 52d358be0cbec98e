/* Quantisation against MLX's own results, and its error bound at every width. */
#include "base/bf16.h"
#include "base/rand.h"
#include "model/quantize.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "folder.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { COLS_MAX = 256 };

static uint32_t code_at(const uint32_t *words, uint32_t bits, uint32_t k)
{
    uint64_t at = (uint64_t)k * bits, pair = words[at / 32];
    if (at % 32 + bits > 32)
        pair |= (uint64_t)words[at / 32 + 1] << 32;
    return (uint32_t)(pair >> at % 32) & ((1u << bits) - 1);
}

static float number_at(const json_t *list, size_t i)
{
    return (float)json_number_value(json_array_get(list, i));
}

/* What MLX made of a group is on the grid: making it again gives the same scale and bias, and with
 * 4 bits the same codes (with 8, where the bf16 scale is coarse beside a step, one code off). */
static void check_row(const json_t *item, uint32_t row)
{
    uint32_t cols = (uint32_t)json_integer_value(json_object_get(item, "cols"));
    uint32_t bits = (uint32_t)json_integer_value(json_object_get(item, "bits"));
    uint32_t group = (uint32_t)json_integer_value(json_object_get(item, "group_size"));
    uint32_t words = cols * bits / 32, groups = cols / group;
    uint32_t want[COLS_MAX], codes[COLS_MAX];
    uint16_t scales[COLS_MAX], biases[COLS_MAX];
    float values[COLS_MAX];
    for (uint32_t i = 0; i < words; i++)
        want[i] = (uint32_t)json_integer_value(
            json_array_get(json_object_get(item, "codes"), row * words + i));
    for (uint32_t k = 0; k < cols; k++) {
        values[k] = number_at(json_object_get(item, "expected"), row * cols + k);
        float scale = number_at(json_object_get(item, "scales"), row * groups + k / group);
        float bias = number_at(json_object_get(item, "biases"), row * groups + k / group);
        assert_true(scale * (float)code_at(want, bits, k) + bias == values[k]);
    }
    quantize_row(values, cols, bits, group, codes, scales, biases);
    for (uint32_t i = 0; i < groups; i++) {
        assert_true(bf16_to_f32(scales[i]) ==
                    number_at(json_object_get(item, "scales"), row * groups + i));
        assert_true(bf16_to_f32(biases[i]) ==
                    number_at(json_object_get(item, "biases"), row * groups + i));
    }
    for (uint32_t k = 0; k < cols; k++)
        assert_in_range(code_at(codes, bits, k) + 1, code_at(want, bits, k) + (bits == 4),
                        code_at(want, bits, k) + 2 - (bits == 4));
}

static void test_mlx_results(void **state)
{
    (void)state;
    json_t *root = json_load_file("tests/data/goldens/quant_fixture.json", 0, NULL);
    const json_t *cases = json_object_get(root, "cases");
    assert_int_equal(json_array_size(cases), 6);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *item = json_array_get(cases, i);
        for (uint32_t r = 0; r < json_integer_value(json_object_get(item, "rows")); r++)
            check_row(item, r);
    }
    json_decref(root);
}

/* The ramps -16, -15.5 .. 15.5, whose inputs are known: halves go away from zero. */
static void test_mlx_ramps(void **state)
{
    (void)state;
    json_t *root = json_load_file("tests/data/goldens/quant_fixture.json", 0, NULL);
    static const struct {
        size_t index;
        uint32_t bits;
    } ramps[] = {{0, 4}, {5, 8}};
    for (size_t i = 0; i < 2; i++) {
        const json_t *item = json_array_get(json_object_get(root, "cases"), ramps[i].index);
        const json_t *want = json_object_get(item, "codes");
        uint32_t bits = ramps[i].bits, codes[16];
        uint16_t scale, bias;
        float w[64];
        for (int k = 0; k < 64; k++)
            w[k] = -16 + 0.5f * (float)k;
        quantize_row(w, 64, bits, 64, codes, &scale, &bias);
        assert_int_equal(json_array_size(want), 64 * bits / 32);
        for (uint32_t k = 0; k < 64 * bits / 32; k++)
            assert_int_equal(codes[k], json_integer_value(json_array_get(want, k)));
        assert_true(bf16_to_f32(scale) == number_at(json_object_get(item, "scales"), 0));
        assert_true(bf16_to_f32(bias) == number_at(json_object_get(item, "biases"), 0));
    }
    json_decref(root);
}

/* Half a step; up to one more where an end that is not the edge falls half a step outside the
 * codes; and the bf16 rounding of a scale times its code, and of the bias. */
static void test_error_bound(void **state)
{
    (void)state;
    static const uint32_t bits[] = {2, 3, 4, 5, 6, 8}, groups[] = {32, 64, 128};
    struct rand r = {.state = 11};
    uint32_t negative = 0, total = 0;
    for (int n = 0; n < 300; n++) {
        uint32_t b = bits[n % 6], group = groups[n / 6 % 3], codes[COLS_MAX];
        uint16_t scales[COLS_MAX], biases[COLS_MAX];
        float w[COLS_MAX], size = expf(8 * rand_normal(&r) / 4), mean = 0.1f * rand_normal(&r);
        for (int k = 0; k < COLS_MAX; k++)
            w[k] = size * (rand_normal(&r) + mean);
        quantize_row(w, COLS_MAX, b, group, codes, scales, biases);
        for (uint32_t k = 0; k < COLS_MAX; k++) {
            float scale = bf16_to_f32(scales[k / group]), bias = bf16_to_f32(biases[k / group]);
            float code = (float)code_at(codes, b, k), step = fabsf(scale);
            float bound = 1.01f * step + (step * code + fabsf(bias)) / 256;
            assert_true(fabsf(scale * code + bias - w[k]) <= bound);
            negative += scale < 0;
            total++;
        }
    }
    assert_in_range(negative, total / 3, total * 2 / 3);
}

static void test_odd_groups(void **state)
{
    (void)state;
    float w[64] = {0};
    uint32_t codes[16];
    uint16_t scale, bias;
    quantize_row(w, 64, 4, 64, codes, &scale, &bias);
    for (uint32_t k = 0; k < 64; k++)
        assert_true(bf16_to_f32(scale) * (float)code_at(codes, 4, k) + bf16_to_f32(bias) == 0);
    for (int k = 0; k < 64; k++)
        w[k] = k == 5 ? NAN : 1;
    quantize_row(w, 64, 8, 64, codes, &scale, &bias); /* no trap, no code out of range */
    for (int k = 0; k < 64; k++)
        w[k] = -3;
    quantize_row(w, 64, 4, 64, codes, &scale, &bias);
    assert_true(bf16_to_f32(bias) == -3 && code_at(codes, 4, 9) == 0);
}

/* Gain k of a test's norms, in f32 and in each dtype's bits: exact in all of them. */
static float gain_at(uint32_t k)
{
    return ldexpf(1 + (float)(k % 8) / 8, (int)(k % 7) - 6) * (k % 2 ? -1 : 1);
}

static void gain_put(const char *dtype, uint32_t k, uint8_t *out)
{
    float f = gain_at(k);
    uint16_t h = (uint16_t)((k % 2) << 15 | (9 + k % 7) << 10 | (k % 8) << 7);
    if (!strcmp(dtype, "BF16"))
        h = bf16_from_f32(f);
    if (!strcmp(dtype, "F32"))
        memcpy(out + 4 * (size_t)k, &f, 4);
    else
        memcpy(out + 2 * (size_t)k, &h, 2);
}

static bool ends_in(const char *text, const char *end)
{
    return strlen(text) >= strlen(end) && !strcmp(text + strlen(text) - strlen(end), end);
}

/* Norms of every dtype get their 1, but for the gated one. */
static void test_norm_dtypes(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"BF16", "F16", "F32"};
    for (int d = 0; d < 3; d++) {
        static struct folder f;
        static uint8_t gains[4 * 4096];
        struct quantize_options options = {.bits = 4, .group = 64, .threads = 1};
        struct safetensors file;
        struct err err;
        uint32_t norms = 0;
        for (uint32_t k = 0; k < 4096; k++)
            gain_put(dtypes[d], k, gains);
        folder_open(&f, "tests/data/fixtures/fixture-hf");
        for (uint32_t i = 0; i < f.count; i++) {
            struct folder_tensor *t = &f.tensors[i];
            if (!ends_in(t->name, "norm.weight") || strstr(t->name, "visual") ||
                strstr(t->name, "mtp"))
                continue;
            snprintf(t->dtype, sizeof t->dtype, "%s", dtypes[d]);
            t->data = gains;
            t->bytes = t->shape[0] * (d == 2 ? 4 : 2);
            norms++;
        }
        folder_write(&f, 0, 0);
        char *out = file_join(f.path, "q"), *path = file_join(out, "model.safetensors");
        if (!quantize_checkpoint(f.path, out, &options, &err) ||
            !safetensors_open(path, &file, &err))
            fail_msg("%s: %s", dtypes[d], err.text);
        for (uint32_t i = 0; i < file.count; i++) {
            const struct safetensors_tensor *t = &file.tensors[i];
            if (!ends_in(t->name, "norm.weight"))
                continue;
            bool gated = ends_in(t->name, "linear_attn.norm.weight");
            for (uint32_t k = 0; k < t->shape[0]; k++) {
                float want = gain_at(k) + (gated ? 0 : 1);
                assert_true(safetensors_value(t, k) == (d == 0 ? bf16_round(want) : want));
            }
            norms--;
        }
        assert_int_equal(norms, 0);
        safetensors_close(&file);
        free(path);
        folder_remove(out);
        free(out);
        folder_close(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mlx_results), cmocka_unit_test(test_mlx_ramps),
        cmocka_unit_test(test_error_bound), cmocka_unit_test(test_odd_groups),
        cmocka_unit_test(test_norm_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
