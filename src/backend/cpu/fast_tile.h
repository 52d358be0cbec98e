/* Activations as 16-bit integers, and products of them with 4-bit weights.
 *
 * Codes of 4 bits times integers of 16 are summed exactly in 32 bits over a group of 64, so the
 * only error beside f32's is the rounding of an activation to 1/32767 of the largest of its 64
 * neighbours: below what bf16 loses, at the price of integer instructions (16 products each on
 * AVX2, where f32 has 8).
 * Eight-bit activations would be faster still and cost 100 times this error.
 *
 * Order inside a block of 64 on x86 (Arm's: dot4_arm.h): four vectors of eight pairs; pair i of
 * vector p holds the values 8i + p and 8i + p + 4. That is what (word i >> 4p) & 0x000f000f leaves
 * of a word of eight codes, so neither the codes of a row nor those of a column of rows need a
 * shuffle. */
#ifndef BACKEND_CPU_FAST_TILE_H
#define BACKEND_CPU_FAST_TILE_H

#include "backend/cpu/cpu_weight.h"
#include "backend/cpu/fast.h"

#include <assert.h>

enum {
    FAST_BLOCK = 64,     /* values that share a scale; the group of the weights that qualify */
    FAST_TILE_ROWS = 96, /* rows of activations that are multiplied together: fits the L2 cache */
    FAST_FEW_ROWS = 4,   /* up to here weights are read as a vector's partner, not as a matrix's */
    FAST_CHUNK = 32,     /* outputs a task computes */
    /* Bytes of weights: the hardware's own prefetching stops at pages. On x86 they go into the
     * second-level cache: into the first, decoding was slower the faster the rest was. */
    FAST_AHEAD = 8192,
};

/* `rows` rows of activations. The pointers lead to scratch. */
struct fast_tile {
    uint32_t rows, cols;
    uint32_t blocks, stride; /* cols / 64; blocks rounded up to 8 */
    bool one_method;         /* of multiplying, however many rows: see fast_rows_multiply */
    int16_t *q;              /* i16, by rows [rows, stride, 64], for panels [blocks, rows, 64] */
    float *scale, *sum;      /* f32 [rows, stride]: step of q; sum of the rounded values */
    const float **row;       /* [rows]: the f32 [cols] that were rounded */
};

static inline size_t fast_align(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Bytes of a tile of FAST_TILE_ROWS rows or fewer. */
static inline size_t fast_tile_bytes(uint32_t rows, uint32_t cols)
{
    size_t blocks = cols / FAST_BLOCK, stride = (blocks + 7) / 8 * 8;
    return fast_align(rows * stride * FAST_BLOCK * 2) + 2 * fast_align(rows * stride * 4) +
           fast_align(rows * sizeof(float *));
}

/* Lays a tile out in `memory`, fast_tile_bytes of it, 64-aligned. */
static inline struct fast_tile fast_tile_place(void *memory, uint32_t rows, uint32_t cols)
{
    char *p = memory;
    struct fast_tile t = {.rows = rows, .cols = cols, .blocks = cols / FAST_BLOCK};
    t.stride = (t.blocks + 7) / 8 * 8;
    t.q = (int16_t *)p;
    p += fast_align((size_t)rows * t.stride * FAST_BLOCK * 2);
    t.scale = (float *)p;
    p += fast_align((size_t)rows * t.stride * 4);
    t.sum = (float *)p;
    p += fast_align((size_t)rows * t.stride * 4);
    t.row = (const float **)p;
    return t;
}

/* A row of 4-bit weights, or the first of some that follow each other. */
struct fast_codes {
    const uint8_t *codes;            /* u4 [rows, blocks, 64] */
    const uint16_t *scales, *biases; /* bf16 [rows, blocks] */
};

/* Whether weights are read as a vector's partner. A panel of weights sums in another order than a
 * row does, so a row's last bits depend on how many came together, unless one method is asked
 * for. */
static inline bool fast_tile_by_rows(const struct fast_tile *t)
{
    return t->rows <= FAST_FEW_ROWS || t->one_method;
}

/* Each level defines:
 *   DOT4_PANEL   outputs that dot4_panel computes
 *   dot4_order   64 rounded values, into the order that dot4_panel wants
 *   dot4_order_row  the same for dot4_row, as block g of a row [stride, 64]
 *   dot4_row     acc[i] += the products of one weight row with tile rows first..first+n-1, lane by
 *                lane: the dot product is the sum of the lanes. n is a constant up to FAST_FEW_ROWS
 *   dot4_panel   out f32 [tile rows, DOT4_PANEL] = products with `count` weight rows from w */
#if defined(__AVX512F__)
#include "backend/cpu/dot4_avx512.h"
#elif defined(__AVX2__)
#include "backend/cpu/dot4_avx2.h"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#include "backend/cpu/dot4_i8mm.h"
#elif defined(__aarch64__)
#include "backend/cpu/dot4_neon.h"
#endif

static inline struct fast_codes fast_codes_at(const struct weight *w, uint32_t item, uint32_t row)
{
    size_t index = ((size_t)item * w->expert_stride + row) * (w->cols / FAST_BLOCK);
    return (struct fast_codes){
        .codes = (const uint8_t *)cpu_at(w->data) + index * (FAST_BLOCK / 2),
        .scales = (const uint16_t *)cpu_at(w->scales) + index,
        .biases = (const uint16_t *)cpu_at(w->biases) + index,
    };
}

/* `rows` rows further on. */
static inline struct fast_codes fast_codes_next(struct fast_codes w, size_t rows, uint32_t blocks)
{
    w.codes += rows * blocks * (FAST_BLOCK / 2);
    w.scales += rows * blocks;
    w.biases += rows * blocks;
    return w;
}

/* Weights that are multiplied as integers; all others are decoded to f32. */
static inline bool fast_is_dot4(const struct weight *w)
{
    return w->kind == WEIGHT_AFFINE && w->bits == 4 && w->group == FAST_BLOCK;
}

/* Row r of the tile is x f32 [cols], which must stay as long as the tile is used. The integers
 * are left out when no weight needs them. */
SIMD_INLINE void fast_tile_set_row(struct fast_tile *t, uint32_t r, const float *x, bool quantise)
{
    t->row[r] = x;
    if (!quantise)
        return;
    for (uint32_t g = 0; g < t->blocks; g++) {
        const float *from = x + (size_t)g * FAST_BLOCK;
        vf top = vf_zero();
        for (int k = 0; k < FAST_BLOCK; k += VF)
            top = vf_max(top, vf_abs(vf_load(from + k)));
        float largest = vf_top(top), inverse = largest > 1e-30f ? 32767 / largest : 0;
        int16_t q[FAST_BLOCK];
        vf total = vf_zero();
        for (int k = 0; k < FAST_BLOCK; k += VF) {
            vf v = vf_round(vf_mul(vf_load(from + k), vf_set(inverse)));
            vf_store_i16(q + k, v);
            total = vf_add(total, v);
        }
        if (fast_tile_by_rows(t))
            dot4_order_row(q, g, t->q + (size_t)r * t->stride * FAST_BLOCK);
        else
            dot4_order(q, t->q + ((size_t)g * t->rows + r) * FAST_BLOCK);
        t->scale[(size_t)r * t->stride + g] = largest / 32767;
        t->sum[(size_t)r * t->stride + g] = largest / 32767 * vf_sum(total);
    }
    for (uint32_t g = t->blocks; g < t->stride; g++)
        t->scale[(size_t)r * t->stride + g] = t->sum[(size_t)r * t->stride + g] = 0;
}

#endif
