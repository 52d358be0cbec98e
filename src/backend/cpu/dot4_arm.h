/* What the Arm levels of fast_tile.h share.
 *
 * An activation of 16 bits is kept as two bytes, a = 256 h + l with h signed and l not, so that a
 * code of 4 bits meets either in a product of bytes; 256 H + L joins the two sums exactly. Order of
 * a block's values: those whose codes are the low halves of the 16 bytes of the first 32 codes,
 * then those of the high halves; then the same of the other 32. Where rows are multiplied one by
 * one, a block is the 64 bytes h and then the 64 bytes l; for panels each level has its own form.
 *
 * dot4_row keeps lanes = positions of the row. Panels keep lanes = outputs: DOT4_PANEL weight rows
 * x 64 values are transposed once into DOT4_TILE vectors and then meet every row of the tile, up
 * to DOT4_MANY at a time. */
#include <arm_neon.h>

enum { DOT4_PANEL = 8, DOT4_MANY = 4 };

/* 32 values' bytes: v[0], v[1] are l and h of those of low halves, v[2], v[3] of the others. */
SIMD_INLINE uint8x16x4_t dot4_split(const int16_t *q)
{
    return vld4q_u8((const uint8_t *)q);
}

SIMD_INLINE void dot4_order_row(const int16_t *q, uint32_t g, int16_t *row)
{
    uint8_t *high = (uint8_t *)(row + (size_t)g * FAST_BLOCK), *low = high + FAST_BLOCK;
    for (int at = 0; at < FAST_BLOCK; at += 32) {
        uint8x16x4_t v = dot4_split(q + at);
        vst1q_u8(low + at, v.val[0]);
        vst1q_u8(high + at, v.val[1]);
        vst1q_u8(low + at + 16, v.val[2]);
        vst1q_u8(high + at + 16, v.val[3]);
    }
}

/* sum of codes times activations of one block, spread over four lanes */
SIMD_INLINE int32x4_t dot4_multiply(const uint8x16_t c[4], const int16_t *q)
{
    const int8_t *high = (const int8_t *)q;
    const uint8_t *low = (const uint8_t *)q + FAST_BLOCK;
    int32x4_t h = vdupq_n_s32(0);
    uint32x4_t l = vdupq_n_u32(0);
    for (int j = 0; j < 4; j++) {
        h = vdotq_s32(h, vreinterpretq_s8_u8(c[j]), vld1q_s8(high + 16 * j));
        l = vdotq_u32(l, c[j], vld1q_u8(low + 16 * j));
    }
    return vaddq_s32(vshlq_n_s32(h, 8), vreinterpretq_s32_u32(l));
}

/* Eight bf16 of an array that ends after n; zero past its end. */
SIMD_INLINE void dot4_load_factors(const uint16_t *p, uint32_t n, vf out[2])
{
    uint16_t copy[8] = {0};
    if (n < 8)
        p = memcpy(copy, p, n * sizeof *p);
    out[0] = vf_load_bf16(p);
    out[1] = vf_load_bf16(p + 4);
}

SIMD_INLINE void dot4_row(struct fast_codes w, const struct fast_tile *x, uint32_t first, int n,
                          vf *acc)
{
    const uint8x16_t mask = vdupq_n_u8(15);
    vf constant[FAST_FEW_ROWS];
    for (int t = 0; t < n; t++)
        constant[t] = vf_zero();
    for (uint32_t g = 0; g < x->blocks; g += 8) {
        uint32_t left = x->blocks - g;
        vf scale[2], bias[2];
        float step[FAST_FEW_ROWS][8];
        dot4_load_factors(w.scales + g, left, scale);
        dot4_load_factors(w.biases + g, left, bias);
        for (int t = 0; t < n; t++)
            for (int half = 0; half < 2; half++) {
                size_t at = (size_t)(first + t) * x->stride + g + 4 * half;
                vf_store(step[t] + 4 * half, vf_mul(scale[half], vf_load(x->scale + at)));
                constant[t] = vf_fma(bias[half], vf_load(x->sum + at), constant[t]);
            }
        for (uint32_t i = 0; i < 8 && i < left; i++) {
            const uint8_t *p = w.codes + (size_t)(g + i) * (FAST_BLOCK / 2);
            uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16);
            uint8x16_t c[4] = {vandq_u8(a, mask), vshrq_n_u8(a, 4), vandq_u8(b, mask),
                               vshrq_n_u8(b, 4)};
            for (int t = 0; t < n; t++) {
                const int16_t *q = x->q + ((size_t)(first + t) * x->stride + g + i) * FAST_BLOCK;
                acc[t] = vf_fma(vcvtq_f32_s32(dot4_multiply(c, q)), vf_set(step[t][i]), acc[t]);
            }
        }
    }
    for (int t = 0; t < n; t++)
        acc[t] = vf_add(acc[t], constant[t]);
}

/* to [4] += what a block of a row adds to four outputs; 256 h + l are the sums of its products. */
SIMD_INLINE void dot4_put(int32x4_t h, int32x4_t l, float step, float total, const float *scale,
                          const float *bias, float *to)
{
    vf sum = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(h, 8), l));
    vf v = vf_fma(vf_set(total), vf_load(bias), vf_load(to));
    vf_store(to, vf_fma(sum, vf_mul(vf_set(step), vf_load(scale)), v));
}

/* Each level's: the transposed codes of the rows x block g; then out [n, DOT4_PANEL] += that block
 * of n rows of activations (a constant, up to DOT4_MANY). */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[DOT4_PANEL], uint32_t blocks,
                             uint32_t g, uint8x16_t *tile);
SIMD_INLINE void dot4_block(const uint8x16_t *tile, const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, const float *scale, const float *bias,
                            float *out);

SIMD_INLINE void dot4_panel(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                            float *factors, float *out)
{
    (void)factors;
    uint32_t row[DOT4_PANEL];
    for (uint32_t r = 0; r < DOT4_PANEL; r++)
        row[r] = r < count ? r : count - 1;
    memset(out, 0, (size_t)x->rows * DOT4_PANEL * sizeof *out);
    for (uint32_t g = 0; g < x->blocks; g++) {
        uint8x16_t tile[DOT4_TILE];
        float scale[DOT4_PANEL], bias[DOT4_PANEL];
        dot4_decode(w.codes, row, x->blocks, g, tile);
        for (int r = 0; r < DOT4_PANEL; r++) {
            scale[r] = bf16_to_f32(w.scales[(size_t)row[r] * x->blocks + g]);
            bias[r] = bf16_to_f32(w.biases[(size_t)row[r] * x->blocks + g]);
        }
        uint32_t t = 0;
        for (; x->rows - t >= 4; t += 4)
            dot4_block(tile, x, g, t, 4, scale, bias, out);
        for (; x->rows - t >= 2; t += 2)
            dot4_block(tile, x, g, t, 2, scale, bias, out);
        if (t < x->rows)
            dot4_block(tile, x, g, t, 1, scale, bias, out);
    }
}
