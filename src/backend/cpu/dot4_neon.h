/* fast_tile.h for NEON: sdot and udot multiply 16 bytes and add them by fours.
 *
 * An activation of 16 bits is kept as two planes of bytes, a = 256 h + l with h signed and l not,
 * so that a code of 4 bits meets either in a dot product of bytes; 256 H + L joins the two sums
 * exactly. Order of a block, in each plane: the values whose codes are the low halves of the 16
 * bytes of the first 32 codes, then those of the high halves; then the same of the other 32.
 *
 * dot4_row keeps lanes = positions of the row. dot4_panel keeps lanes = 4 outputs: 8 weight rows x
 * 64 values are transposed once into 512 bytes, and an activation's four bytes are picked out of a
 * vector by the by-element form of the instruction. */
#include <arm_neon.h>

enum { DOT4_PANEL = 8, DOT4_MANY = 4 };

static inline bool dot4_has(void)
{
    return true;
}

SIMD_INLINE void dot4_order(const int16_t *q, int16_t *out)
{
    int8_t *high = (int8_t *)out;
    uint8_t *low = (uint8_t *)out + FAST_BLOCK;
    for (int k = 0; k < FAST_BLOCK; k++) {
        int at = k / 32 * 32 + k % 2 * 16 + k % 32 / 2;
        high[at] = (int8_t)(q[k] >> 8);
        low[at] = (uint8_t)(q[k] & 255);
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

SIMD_INLINE void dot4_row(struct fast_codes w, const struct fast_tile *x, uint32_t first, int n,
                          vf *acc)
{
    const uint8x16_t mask = vdupq_n_u8(15);
    float constant[FAST_FEW_ROWS];
    for (int t = 0; t < n; t++)
        constant[t] = 0;
    for (uint32_t g = 0; g < x->blocks; g++) {
        const uint8_t *p = w.codes + (size_t)g * (FAST_BLOCK / 2);
        float scale = bf16_to_f32(w.scales[g]), bias = bf16_to_f32(w.biases[g]);
        uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16);
        uint8x16_t c[4] = {vandq_u8(a, mask), vshrq_n_u8(a, 4), vandq_u8(b, mask),
                           vshrq_n_u8(b, 4)};
        for (int t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * x->stride + g;
            const int16_t *q = x->q + ((size_t)g * x->rows + first + t) * FAST_BLOCK;
            acc[t] =
                vf_fma(vcvtq_f32_s32(dot4_multiply(c, q)), vf_set(scale * x->scale[at]), acc[t]);
            constant[t] += bias * x->sum[at];
        }
    }
    for (int t = 0; t < n; t++)
        acc[t] = vsetq_lane_f32(vgetq_lane_f32(acc[t], 0) + constant[t], acc[t], 0);
}

/* Codes of 4 rows x block g: u8 [16 quads][4 rows][4], quads in the order of the activations;
 * quad i of the tile begins at `tile` + i * step vectors. */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[4], uint32_t blocks,
                             uint32_t g, uint8x16_t *tile, int step)
{
    const uint8x16_t mask = vdupq_n_u8(15);
    for (int half = 0; half < 2; half++) {
        uint32x4_t in[4], a[4];
        for (int r = 0; r < 4; r++)
            in[r] = vreinterpretq_u32_u8(
                vld1q_u8(codes + ((size_t)row[r] * blocks + g) * (FAST_BLOCK / 2) + 16 * half));
        a[0] = vzip1q_u32(in[0], in[2]);
        a[1] = vzip2q_u32(in[0], in[2]);
        a[2] = vzip1q_u32(in[1], in[3]);
        a[3] = vzip2q_u32(in[1], in[3]);
        uint32x4_t word[4] = {vzip1q_u32(a[0], a[2]), vzip2q_u32(a[0], a[2]),
                              vzip1q_u32(a[1], a[3]), vzip2q_u32(a[1], a[3])};
        for (int i = 0; i < 4; i++) {
            uint8x16_t v = vreinterpretq_u8_u32(word[i]);
            tile[(8 * half + i) * step] = vandq_u8(v, mask);
            tile[(8 * half + 4 + i) * step] = vshrq_n_u8(v, 4);
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

/* out [n, 8] += one block of n rows of activations (a constant, up to DOT4_MANY). */
SIMD_INLINE void dot4_block(const uint8x16_t tile[32], const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, const float scale[8], const float bias[8],
                            float *out)
{
    const int16_t *q = x->q + ((size_t)g * x->rows + first) * FAST_BLOCK;
    int32x4_t h[DOT4_MANY][2];
    uint32x4_t l[DOT4_MANY][2];
    for (int t = 0; t < n; t++) {
        h[t][0] = h[t][1] = vdupq_n_s32(0);
        l[t][0] = l[t][1] = vdupq_n_u32(0);
    }
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
    for (int t = 0; t < n; t++) {
        size_t at = (size_t)(first + t) * x->stride + g;
        for (int half = 0; half < 2; half++) {
            float *to = out + (first + t) * DOT4_PANEL + half * 4;
            int32x4_t sum =
                vaddq_s32(vshlq_n_s32(h[t][half], 8), vreinterpretq_s32_u32(l[t][half]));
            vf v = vf_fma(vf_set(x->sum[at]), vf_load(bias + half * 4), vf_load(to));
            vf_store(to, vf_fma(vcvtq_f32_s32(sum),
                                vf_mul(vf_set(x->scale[at]), vf_load(scale + half * 4)), v));
        }
    }
}

SIMD_INLINE void dot4_panel(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                            float *factors, float *out)
{
    (void)factors;
    uint32_t row[DOT4_PANEL];
    for (uint32_t r = 0; r < DOT4_PANEL; r++)
        row[r] = r < count ? r : count - 1;
    memset(out, 0, (size_t)x->rows * DOT4_PANEL * sizeof *out);
    for (uint32_t g = 0; g < x->blocks; g++) {
        uint8x16_t tile[32];
        float scale[DOT4_PANEL], bias[DOT4_PANEL];
        dot4_decode(w.codes, row, x->blocks, g, tile, 2);
        dot4_decode(w.codes, row + 4, x->blocks, g, tile + 1, 2);
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
