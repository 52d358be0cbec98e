/* fast_tile.h for NEON with the int8 matrix instructions (FEAT_I8MM): smmla multiplies 2 x 8 bytes
 * with 8 x 2, twice the products of sdot.
 *
 * Panels: one operand holds h of eight activations in one half and l in the other, the other one
 * eight codes of each of two weight rows, so an instruction serves both bytes of an activation and
 * two outputs, for any number of rows. Both halves of an operand have the same sign: a panel's
 * activations keep l - 128, and the sums of l begin with 128 times the sum of the codes. The sums
 * are those of dot4_neon.h then, and what is made of them too: cpu/i8mm gives the bits of
 * cpu/neon, which kcheck sees to. */
enum { DOT4_TILE = 36 };

#include "backend/cpu/dot4_arm.h"

SIMD_INLINE uint8x16_t dot4_zip1(uint8x16_t a, uint8x16_t b)
{
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

SIMD_INLINE uint8x16_t dot4_zip2(uint8x16_t a, uint8x16_t b)
{
    return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

/* Panels: i8 [8 eights][h, l - 128][8]. */
SIMD_INLINE void dot4_order(const int16_t *q, int16_t *out)
{
    const uint8x16_t sign = vdupq_n_u8(128);
    uint8_t *to = (uint8_t *)out;
    for (int at = 0; at < FAST_BLOCK; at += 32)
        for (int i = 0; i < 2; i++, to += 32) {
            uint8x16x4_t v = dot4_split(q + at);
            uint8x16_t high = v.val[2 * i + 1], low = veorq_u8(v.val[2 * i], sign);
            vst1q_u8(to, dot4_zip1(high, low));
            vst1q_u8(to + 16, dot4_zip2(high, low));
        }
}

/* Codes of 8 rows x block g: u8 [8 eights][4 pairs of rows][2][8]; then i32 [4 pairs][4] that the
 * sums begin with. */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[DOT4_PANEL], uint32_t blocks,
                             uint32_t g, uint8x16_t *tile)
{
    const uint8x16_t mask = vdupq_n_u8(15);
    const uint8x16_t shift = vcombine_u8(vdup_n_u8(0), vdup_n_u8(128));
    for (int p = 0; p < 4; p++) {
        const uint8_t *even = codes + ((size_t)row[2 * p] * blocks + g) * (FAST_BLOCK / 2);
        const uint8_t *odd = codes + ((size_t)row[2 * p + 1] * blocks + g) * (FAST_BLOCK / 2);
        uint32x4_t start = vdupq_n_u32(0);
        for (int half = 0; half < 2; half++) {
            uint8x16_t a = vld1q_u8(even + 16 * half), b = vld1q_u8(odd + 16 * half);
            uint8x16_t first = dot4_zip1(a, b), last = dot4_zip2(a, b);
            uint8x16_t c[4] = {vandq_u8(first, mask), vandq_u8(last, mask), vshrq_n_u8(first, 4),
                               vshrq_n_u8(last, 4)};
            for (int i = 0; i < 4; i++) {
                start = vmmlaq_u32(start, shift, c[i]);
                tile[4 * (4 * half + i) + p] = c[i];
            }
        }
        tile[32 + p] = vreinterpretq_u8_u32(start);
    }
}

SIMD_INLINE void dot4_block(const uint8x16_t *tile, const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, const float *scale, const float *bias,
                            float *out)
{
    const int8_t *q = (const int8_t *)(x->q + ((size_t)g * x->rows + first) * FAST_BLOCK);
    ptrdiff_t stride = x->stride;
    const float *step = x->scale + (size_t)first * x->stride + g;
    const float *total = x->sum + (size_t)first * x->stride + g;
    int32x4_t acc[DOT4_MANY][4]; /* of a pair of outputs: h of both, l of both */
    for (int t = 0; t < n; t++)
        for (int p = 0; p < 4; p++)
            acc[t][p] = vreinterpretq_s32_u8(tile[32 + p]);
#pragma GCC unroll 1 /* unrolled, gcc loads ahead more than there are registers for */
    for (int i = 0; i < 8; i++) {
        int8x16_t v[DOT4_MANY];
        for (int t = 0; t < n; t++)
            v[t] = vld1q_s8(q + 2 * FAST_BLOCK * t + 16 * i);
        for (int p = 0; p < 4; p++)
            for (int t = 0; t < n; t++)
                acc[t][p] = vmmlaq_s32(acc[t][p], v[t], vreinterpretq_s8_u8(tile[4 * i + p]));
    }
    out += first * DOT4_PANEL;
    for (int t = 0; t < n; t++)
        for (int half = 0; half < 2; half++) {
            int64x2_t a = vreinterpretq_s64_s32(acc[t][2 * half]);
            int64x2_t b = vreinterpretq_s64_s32(acc[t][2 * half + 1]);
            dot4_put(vreinterpretq_s32_s64(vuzp1q_s64(a, b)),
                     vreinterpretq_s32_s64(vuzp2q_s64(a, b)), step[t * stride], total[t * stride],
                     scale + half * 4, bias + half * 4, out + t * DOT4_PANEL + half * 4);
        }
}
