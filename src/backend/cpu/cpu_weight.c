/* The one place that knows the bits of a stored weight on the CPU. */
#include "backend/cpu/cpu_weight.h"

#include "backend/cpu/cpu.h"
#include "base/bf16.h"

#include <assert.h>
#include <string.h>

size_t cpu_weight_row_bytes(const struct weight *w)
{
    switch (w->kind) {
    case WEIGHT_F32:
        return (size_t)w->cols * 4;
    case WEIGHT_BF16:
        return (size_t)w->cols * 2;
    case WEIGHT_AFFINE:
        return (size_t)w->cols / 32 * w->bits * 4;
    case WEIGHT_NONE:
        break;
    }
    assert(!"weight has no kind");
    return 0;
}

size_t cpu_weight_scale_row_bytes(const struct weight *w)
{
    return w->kind == WEIGHT_AFFINE ? (size_t)w->cols / w->group * 2 : 0;
}

/* 32 codes fill exactly `bits` words, so a code crosses a word border only inside its block.
 * Inlined with constant bits: all positions are then known to the compiler. */
static inline void cpu_weight_read_block(const uint32_t *words, uint32_t bits, float codes[32])
{
    uint32_t mask = (1u << bits) - 1;
#pragma GCC unroll 32
    for (uint32_t k = 0; k < 32; k++) {
        uint32_t bit = k * bits, word = bit / 32, shift = bit % 32;
        uint32_t code = words[word] >> shift;
        if (shift + bits > 32)
            code |= words[word + 1] << (32 - shift);
        codes[k] = (float)(code & mask);
    }
}

static void cpu_weight_read_codes(const uint32_t *words, uint32_t bits, float codes[32])
{
    switch (bits) {
    case 2:
        cpu_weight_read_block(words, 2, codes);
        break;
    case 3:
        cpu_weight_read_block(words, 3, codes);
        break;
    case 4:
        cpu_weight_read_block(words, 4, codes);
        break;
    case 5:
        cpu_weight_read_block(words, 5, codes);
        break;
    case 6:
        cpu_weight_read_block(words, 6, codes);
        break;
    case 8:
        cpu_weight_read_block(words, 8, codes);
        break;
    default:
        assert(!"bits is none of 2, 3, 4, 5, 6, 8");
    }
}

void cpu_weight_read_row(const struct weight *w, uint32_t item, uint32_t row, float *out)
{
    assert(item < w->count && row < w->rows && w->expert_stride >= w->rows);
    size_t index = (size_t)item * w->expert_stride + row;
    const char *data = (const char *)cpu_at(w->data) + index * cpu_weight_row_bytes(w);
    if (w->kind == WEIGHT_F32) {
        memcpy(out, data, (size_t)w->cols * 4);
        return;
    }
    if (w->kind == WEIGHT_BF16) {
        const uint16_t *h = (const uint16_t *)data;
        for (uint32_t k = 0; k < w->cols; k++)
            out[k] = bf16_to_f32(h[k]);
        return;
    }
    size_t scale_bytes = index * cpu_weight_scale_row_bytes(w);
    const uint16_t *scales = (const uint16_t *)((const char *)cpu_at(w->scales) + scale_bytes);
    const uint16_t *biases = (const uint16_t *)((const char *)cpu_at(w->biases) + scale_bytes);
    const uint32_t *words = (const uint32_t *)data;
    for (uint32_t k = 0; k < w->cols; k += 32) {
        float codes[32];
        cpu_weight_read_codes(words + k / 32 * w->bits, w->bits, codes);
        float scale = bf16_to_f32(scales[k / w->group]), bias = bf16_to_f32(biases[k / w->group]);
        for (uint32_t i = 0; i < 32; i++)
            out[k + i] = scale * codes[i] + bias;
    }
}
