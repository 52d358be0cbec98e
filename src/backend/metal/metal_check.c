/* The start-up check of TensorOps: products of a ragged shape against plain code.
 *
 * Whether a system's matmul2d does what its description says is known on that system alone. All
 * kernels on TensorOps go through one kind of product, which the two shapes here run in both tile
 * sizes, with a last tile of rows, of outputs and of K that is not full. */
#include "backend/metal/internal.h"

#include "base/bf16.h"

#include <math.h>
#include <stdlib.h>

enum {
    METAL_CHECK_OUTPUTS = 83,
    METAL_CHECK_COLS = 96,
    METAL_CHECK_GROUP = 32,
    METAL_CHECK_GROUPS = METAL_CHECK_COLS / METAL_CHECK_GROUP,
    METAL_CHECK_ROWS = 147,
    METAL_CHECK_WORDS = METAL_CHECK_OUTPUTS * METAL_CHECK_COLS / 8,
    METAL_CHECK_PAIRS = METAL_CHECK_OUTPUTS * METAL_CHECK_GROUPS,
};

struct metal_product {
    uint32_t codes[METAL_CHECK_WORDS];
    uint16_t scales[METAL_CHECK_PAIRS], biases[METAL_CHECK_PAIRS];
    float x[METAL_CHECK_ROWS * METAL_CHECK_COLS];
    float y[METAL_CHECK_ROWS * METAL_CHECK_OUTPUTS];
};

static uint32_t metal_check_next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8; /* the low bits of such a generator are poor */
}

static void metal_check_fill(struct metal_product *p)
{
    uint32_t state = 1;
    for (int i = 0; i < METAL_CHECK_WORDS; i++)
        p->codes[i] = metal_check_next(&state) << 16 ^ metal_check_next(&state);
    for (int i = 0; i < METAL_CHECK_PAIRS; i++) {
        p->scales[i] = bf16_from_f32((float)(metal_check_next(&state) % 200 + 1) / 1024);
        p->biases[i] = bf16_from_f32(-(float)(metal_check_next(&state) % 200) / 128);
    }
    for (int i = 0; i < METAL_CHECK_ROWS * METAL_CHECK_COLS; i++)
        p->x[i] = (float)(metal_check_next(&state) % 2001) / 1000 - 1;
}

/* Compares y with the product; what both factors in f16 may cost is granted. */
static bool metal_check_product(const struct metal_product *p, uint32_t rows, struct err *err)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t o = 0; o < METAL_CHECK_OUTPUTS; o++) {
            double want = 0, magnitude = 0;
            for (uint32_t k = 0; k < METAL_CHECK_COLS; k++) {
                uint32_t at = o * METAL_CHECK_COLS + k, pair = at / METAL_CHECK_GROUP;
                double w = bf16_to_f32(p->scales[pair]) * (p->codes[at / 8] >> at % 8 * 4 & 15) +
                           bf16_to_f32(p->biases[pair]);
                double term = w * p->x[r * METAL_CHECK_COLS + k];
                want += term;
                magnitude += fabs(term);
            }
            float got = p->y[r * METAL_CHECK_OUTPUTS + o];
            if (!(fabs(want - got) <= 0x1p-10 * magnitude))
                return err_set(err, ERR_INTERNAL,
                               "metal: a product by TensorOps is wrong on this system: row %u, "
                               "column %u is %g, not %g",
                               r, o, got, want);
        }
    return true;
}

static bool metal_check_run(struct device *device, struct metal_product *p, struct span memory,
                            struct err *err)
{
    static const uint32_t rows[] = {45, METAL_CHECK_ROWS}; /* one for each of the tile sizes */
    const struct device_calls *calls = device_calls(device);
    struct span codes = memory, scales = span_at(codes, sizeof p->codes);
    struct span biases = span_at(scales, sizeof p->scales);
    struct span x = span_at(memory, offsetof(struct metal_product, x));
    struct span y = span_at(memory, offsetof(struct metal_product, y));
    struct weight w = {.kind = WEIGHT_AFFINE,
                       .count = 1,
                       .rows = METAL_CHECK_OUTPUTS,
                       .cols = METAL_CHECK_COLS,
                       .expert_stride = METAL_CHECK_OUTPUTS,
                       .bits = 4,
                       .group = METAL_CHECK_GROUP,
                       .data = codes,
                       .scales = scales,
                       .biases = biases};
    for (int i = 0; i < 2; i++) {
        struct linear_args args = {.rows = rows[i], .n = 1, .x = x, .weight = {&w}, .out = {y}};
        device_ops(device)->linear(device, &args);
        calls->read(device, p->y, y, sizeof p->y);
        if (!calls->sync(device, err) || !metal_check_product(p, rows[i], err))
            return false;
    }
    return true;
}

bool metal_check_tensor(struct device *device, struct err *err)
{
    const struct device_calls *calls = device_calls(device);
    struct metal_product *p = (struct metal_product *)calloc(1, sizeof *p);
    struct span memory = {0};
    if (!p || !calls->alloc(device, sizeof *p, &memory, err)) {
        free(p);
        return p || err_set(err, ERR_RESOURCE, "out of memory: the check of TensorOps");
    }
    metal_check_fill(p);
    calls->write(device, memory, p, sizeof *p);
    bool ok = metal_check_run(device, p, memory, err);
    calls->free(device, memory);
    free(p);
    return ok;
}
