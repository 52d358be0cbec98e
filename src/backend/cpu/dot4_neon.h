/* fast_tile.h for NEON: sdot and udot multiply 16 bytes and add them by fours.
 *
 * Panels: an activation's four bytes are picked out of a vector by the by-element form of the
 * instruction, from blocks in the order that rows have too. */
enum { DOT4_TILE = 32 };

#include "backend/cpu/dot4_arm.h"

SIMD_INLINE void dot4_order(const int16_t *q, int16_t *out)
{
    dot4_order_row(q, 0, out);
}

/* Codes of 8 rows x block g: u8 [16 quads][8 rows][4]. */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[DOT4_PANEL], uint32_t blocks,
                             uint32_t g, uint8x16_t *tile)
{
    const uint8x16_t mask = vdupq_n_u8(15);
    for (int i = 0; i < 4; i++) {
        int rows = i % 2, half = i / 2; /* 4 rows, 16 bytes of each */
        uint32x4_t in[4], a[4];
        for (int r = 0; r < 4; r++)
            in[r] = vreinterpretq_u32_u8(vld1q_u8(
                codes + ((size_t)row[4 * rows + r] * blocks + g) * (FAST_BLOCK / 2) + 16 * half));
        a[0] = vzip1q_u32(in[0], in[2]);
        a[1] = vzip2q_u32(in[0], in[2]);
        a[2] = vzip1q_u32(in[1], in[3]);
        a[3] = vzip2q_u32(in[1], in[3]);
        uint32x4_t word[4] = {vzip1q_u32(a[0], a[2]), vzip2q_u32(a[0], a[2]),
                              vzip1q_u32(a[1], a[3]), vzip2q_u32(a[1], a[3])};
        for (int k = 0; k < 4; k++) {
            uint8x16_t v = vreinterpretq_u8_u32(word[k]);
            tile[2 * (8 * half + k) + rows] = vandq_u8(v, mask);
            tile[2 * (8 * half + 4 + k) + rows] = vshrq_n_u8(v, 4);
        }
    }
}

/* The lane of the by-element dot product is a constant of the instruction. */
#define DOT4_QUAD(i, lane)                                                                         \
    for (int half = 0; half < 2; half++) {                                                         \
        uint8x16_t w = tile[2 * (4 * (i) + (lane)) + half];                                        \
        for (int t = 0; t < n; t++) {                                                              \
            h[t][half] = vdotq_laneq_s32(h[t][half], vreinterpretq_s8_u8(w), high[t], lane);       \
            l[t][half] = vdotq_laneq_u32(l[t][half], w, low[t], lane);                             \
        }                                                                                          \
    }

SIMD_INLINE void dot4_block(const uint8x16_t *tile, const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, const float *scale, const float *bias,
                            float *out)
{
    const int16_t *q = x->q + ((size_t)g * x->rows + first) * FAST_BLOCK;
    ptrdiff_t stride = x->stride;
    const float *step = x->scale + (size_t)first * x->stride + g;
    const float *total = x->sum + (size_t)first * x->stride + g;
    int32x4_t h[DOT4_MANY][2];
    uint32x4_t l[DOT4_MANY][2];
    for (int t = 0; t < n; t++) {
        h[t][0] = h[t][1] = vdupq_n_s32(0);
        l[t][0] = l[t][1] = vdupq_n_u32(0);
    }
#pragma GCC unroll 1 /* unrolled, gcc loads ahead more than there are registers for */
    for (int i = 0; i < 4; i++) {
        int8x16_t high[DOT4_MANY];
        uint8x16_t low[DOT4_MANY];
        for (int t = 0; t < n; t++) {
            high[t] = vld1q_s8((const int8_t *)(q + t * FAST_BLOCK) + 16 * i);
            low[t] = vld1q_u8((const uint8_t *)(q + t * FAST_BLOCK) + FAST_BLOCK + 16 * i);
        }
        DOT4_QUAD(i, 0)
        DOT4_QUAD(i, 1)
        DOT4_QUAD(i, 2)
        DOT4_QUAD(i, 3)
    }
    out += first * DOT4_PANEL;
    for (int t = 0; t < n; t++)
        for (int half = 0; half < 2; half++)
            dot4_put(h[t][half], vreinterpretq_s32_u32(l[t][half]), step[t * stride],
                     total[t * stride], scale + half * 4, bias + half * 4,
                     out + t * DOT4_PANEL + half * 4);
}
