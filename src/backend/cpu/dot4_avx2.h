/* fast_tile.h for AVX2: vpmaddwd multiplies 16 codes with 16 activations and adds the pairs.
 *
 * dot4_row keeps lanes = positions of the row: the codes come from the checkpoint's own bytes by a
 * shift and a mask. dot4_panel keeps lanes = 8 outputs: 16 weight rows x 64 values are transposed
 * once into 2 KB and then meet every row of the tile, four at a time: 8 integer sums, 2 weights, an
 * activation pair and a product stay in registers. */
#include "backend/cpu/dot4_x86.h"

enum { DOT4_PANEL = 16, DOT4_MANY = 4 };

/* Eight factors stay in memory, from where an instruction spreads one for nothing: gcc would rather
 * pick them out of a register. */
SIMD_INLINE void dot4_keep(float step[8])
{
    __asm__("" : "+m"(*(float(*)[8])step));
}

SIMD_INLINE void dot4_order_row(const int16_t *q, uint32_t g, int16_t *row)
{
    dot4_order(q, row + (size_t)g * FAST_BLOCK);
}

/* acc[t] += block i of eight of one weight row, times that of n rows of activations. */
SIMD_INLINE void dot4_row_block(const uint8_t *p, const int16_t *q, size_t next, int n,
                                const float step[][8], int i, vf *acc)
{
    const __m256i mask = _mm256_set1_epi16(15);
    __m256i v = _mm256_loadu_si256((const __m256i *)p);
    __m256i c0 = _mm256_and_si256(v, mask);
    __m256i c1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
    __m256i c2 = _mm256_and_si256(_mm256_srli_epi16(v, 8), mask);
    __m256i c3 = _mm256_srli_epi16(v, 12);
    for (int t = 0; t < n; t++) {
        const __m256i *from = (const __m256i *)(q + (size_t)t * next);
        __m256i a = _mm256_add_epi32(_mm256_madd_epi16(c0, _mm256_load_si256(from)),
                                     _mm256_madd_epi16(c1, _mm256_load_si256(from + 1)));
        __m256i b = _mm256_add_epi32(_mm256_madd_epi16(c2, _mm256_load_si256(from + 2)),
                                     _mm256_madd_epi16(c3, _mm256_load_si256(from + 3)));
        vf sum = _mm256_cvtepi32_ps(_mm256_add_epi32(a, b));
        acc[t] = vf_fma(sum, vf_set(step[t][i]), acc[t]);
    }
}

SIMD_INLINE void dot4_row(struct fast_codes w, const struct fast_tile *x, uint32_t first, int n,
                          vf *acc)
{
    vf odd[FAST_FEW_ROWS];
    for (int t = 0; t < n; t++)
        odd[t] = vf_zero();
    size_t next = (size_t)x->stride * FAST_BLOCK; /* from a row of activations to the next */
    const int16_t *q = x->q + first * next;
    for (uint32_t g = 0; g < x->blocks; g += 8) {
        uint32_t left = x->blocks - g;
        const uint8_t *p = w.codes + (size_t)g * (FAST_BLOCK / 2);
        __m256 scale = dot4_load_factors(w.scales + g, left);
        __m256 bias = dot4_load_factors(w.biases + g, left);
        float step[FAST_FEW_ROWS][8];
        for (int t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * x->stride + g;
            vf_store(step[t], vf_mul(scale, vf_load(x->scale + at)));
            dot4_keep(step[t]);
            odd[t] = vf_fma(bias, vf_load(x->sum + at), odd[t]);
        }
        if (left >= 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++, p += FAST_BLOCK / 2, q += FAST_BLOCK) {
                if (i % 2 == 0)
                    _mm_prefetch((const char *)p + FAST_AHEAD, _MM_HINT_T1);
                if (i % 2)
                    dot4_row_block(p, q, next, n, step, i, odd);
                else
                    dot4_row_block(p, q, next, n, step, i, acc);
            }
        } else {
            for (int i = 0; i < (int)left; i++, p += FAST_BLOCK / 2, q += FAST_BLOCK)
                if (i % 2)
                    dot4_row_block(p, q, next, n, step, i, odd);
                else
                    dot4_row_block(p, q, next, n, step, i, acc);
        }
    }
    for (int t = 0; t < n; t++)
        acc[t] = vf_add(acc[t], odd[t]);
}

/* Codes of 16 rows x block g as pairs: i16 [32 pairs][16 rows][2]. */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[16], uint32_t blocks,
                             uint32_t g, __m256i tile[64])
{
    const __m256i mask = _mm256_set1_epi32(0x000f000f);
    for (int half = 0; half < 2; half++) {
        __m256i in[8], word[8];
        for (int r = 0; r < 8; r++)
            in[r] = _mm256_loadu_si256(
                (const __m256i *)(codes +
                                  ((size_t)row[half * 8 + r] * blocks + g) * (FAST_BLOCK / 2)));
        dot4_transpose(in, word);
        for (int i = 0; i < 8; i++) {
            tile[(0 + i) * 2 + half] = _mm256_and_si256(word[i], mask);
            tile[(8 + i) * 2 + half] = _mm256_and_si256(_mm256_srli_epi32(word[i], 4), mask);
            tile[(16 + i) * 2 + half] = _mm256_and_si256(_mm256_srli_epi32(word[i], 8), mask);
            tile[(24 + i) * 2 + half] = _mm256_srli_epi16(word[i], 12);
        }
    }
}

/* *sum += v, in the same register: left to choose, gcc copies and spills the sums of dot4_block. */
SIMD_INLINE void dot4_add(__m256i *sum, __m256i v)
{
    __asm__("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(v));
}

/* out [n, 16] += one block of n rows of activations (a constant, up to DOT4_MANY). */
SIMD_INLINE void dot4_block(const __m256i tile[64], const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, const float scale[16], const float bias[16],
                            float *out)
{
    const int16_t *q = x->q + ((size_t)g * x->rows + first) * FAST_BLOCK;
    __m256i acc[DOT4_MANY][2];
    for (int t = 0; t < n; t++)
        acc[t][0] = acc[t][1] = _mm256_setzero_si256();
    for (int pair = 0; pair < 32; pair++) {
        __m256i w0 = tile[2 * pair], w1 = tile[2 * pair + 1];
        for (int t = 0; t < n; t++) {
            int32_t two;
            memcpy(&two, q + t * FAST_BLOCK + 2 * pair, sizeof two);
            __m256i v = _mm256_set1_epi32(two);
            dot4_add(&acc[t][0], _mm256_madd_epi16(w0, v));
            dot4_add(&acc[t][1], _mm256_madd_epi16(w1, v));
        }
    }
    for (int t = 0; t < n; t++) {
        vf step = vf_set(x->scale[(size_t)(first + t) * x->stride + g]);
        vf sum = vf_set(x->sum[(size_t)(first + t) * x->stride + g]);
        for (int half = 0; half < 2; half++) {
            float *to = out + (first + t) * DOT4_PANEL + half * 8;
            vf v = vf_fma(sum, vf_load(bias + half * 8), vf_load(to));
            vf_store(to, vf_fma(_mm256_cvtepi32_ps(acc[t][half]),
                                vf_mul(step, vf_load(scale + half * 8)), v));
        }
    }
}

SIMD_INLINE void dot4_panel(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                            float *factors /* f32 [2, stride, 16] */, float *out)
{
    uint32_t row[DOT4_PANEL];
    for (uint32_t r = 0; r < DOT4_PANEL; r++)
        row[r] = r < count ? r : count - 1;
    float *scale = factors, *bias = factors + (size_t)x->stride * DOT4_PANEL;
    dot4_factors(w.scales, row, x->blocks, scale);
    dot4_factors(w.biases, row, x->blocks, bias);
    memset(out, 0, (size_t)x->rows * DOT4_PANEL * sizeof *out);
    for (uint32_t g = 0; g < x->blocks; g++) {
        __m256i tile[64];
        dot4_decode(w.codes, row, x->blocks, g, tile);
        const float *s = scale + (size_t)g * DOT4_PANEL, *b = bias + (size_t)g * DOT4_PANEL;
        uint32_t t = 0;
        for (; x->rows - t >= 4; t += 4)
            dot4_block(tile, x, g, t, 4, s, b, out);
        for (; x->rows - t >= 2; t += 2)
            dot4_block(tile, x, g, t, 2, s, b, out);
        if (t < x->rows)
            dot4_block(tile, x, g, t, 1, s, b, out);
    }
}
