/* fast_tile.h for AVX-512 with VNNI: vpdpwssd multiplies 32 codes with 32 activations and adds the
 * pairs to 16 sums.
 *
 * dot4_row keeps lanes = positions of the row, two blocks at a time. dot4_panel keeps lanes = 16
 * outputs: 16 weight rows x 64 values are transposed once into 2 KB and then meet every row of the
 * tile, eight at a time, because eight sums hide the instruction's latency. */
#include "backend/cpu/dot4_x86.h"

enum { DOT4_PANEL = 16, DOT4_MANY = 8 };

/* Two blocks side by side: i16 [stride / 2][4 vectors][2 blocks][16]. */
SIMD_INLINE void dot4_order_row(const int16_t *q, uint32_t g, int16_t *row)
{
    dot4_order_apart(q, row + (size_t)(g / 2) * 2 * FAST_BLOCK + g % 2 * 16, 32);
}

/* acc[t] += two blocks of one weight row, times those of n rows of activations. `which` spreads the
 * two's steps: a half of the lanes each. */
SIMD_INLINE void dot4_row_blocks(__m512i v, const int16_t *q, size_t next, int n,
                                 const __m512 *step, __m512i which, vf *acc)
{
    const __m512i mask = _mm512_set1_epi16(15);
    __asm__("" : "+v"(v)); /* loaded once: gcc would read it from memory for each use */
    __m512i c0 = _mm512_and_si512(v, mask);
    __m512i c1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
    __m512i c2 = _mm512_and_si512(_mm512_srli_epi16(v, 8), mask);
    __m512i c3 = _mm512_srli_epi16(v, 12);
    for (int t = 0; t < n; t++) {
        const __m512i *from = (const __m512i *)(q + (size_t)t * next);
        __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), c0, _mm512_load_si512(from));
        sum = _mm512_dpwssd_epi32(sum, c1, _mm512_load_si512(from + 1));
        sum = _mm512_dpwssd_epi32(sum, c2, _mm512_load_si512(from + 2));
        sum = _mm512_dpwssd_epi32(sum, c3, _mm512_load_si512(from + 3));
        acc[t] = vf_fma(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(which, step[t]), acc[t]);
    }
}

SIMD_INLINE void dot4_row(struct fast_codes w, const struct fast_tile *x, uint32_t first, int n,
                          vf *acc)
{
    const __m512i first_two = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
    const __m512i two = _mm512_set1_epi32(2);
    __m256 constant[FAST_FEW_ROWS];
    vf odd[FAST_FEW_ROWS];
    for (int t = 0; t < n; t++) {
        constant[t] = _mm256_setzero_ps();
        odd[t] = vf_zero();
    }
    size_t next = (size_t)x->stride * FAST_BLOCK; /* from a row of activations to the next */
    const int16_t *q = x->q + first * next;
    for (uint32_t g = 0; g < x->blocks; g += 8, q += 8 * FAST_BLOCK) {
        uint32_t left = x->blocks - g;
        const uint8_t *p = w.codes + (size_t)g * (FAST_BLOCK / 2);
        __m256 scale = dot4_load_factors(w.scales + g, left);
        __m256 bias = dot4_load_factors(w.biases + g, left);
        __m512 step[FAST_FEW_ROWS];
        for (int t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * x->stride + g;
            step[t] = _mm512_castps256_ps512(_mm256_mul_ps(scale, _mm256_loadu_ps(x->scale + at)));
            constant[t] = _mm256_fmadd_ps(bias, _mm256_loadu_ps(x->sum + at), constant[t]);
        }
        __m512i which = first_two;
        if (left >= 8) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, which = _mm512_add_epi32(which, two)) {
                const uint8_t *from = p + i * FAST_BLOCK;
                _mm_prefetch((const char *)from + FAST_AHEAD, _MM_HINT_T1);
                if (i % 2)
                    dot4_row_blocks(_mm512_loadu_si512(from), q + i * 2 * FAST_BLOCK, next, n, step,
                                    which, odd);
                else
                    dot4_row_blocks(_mm512_loadu_si512(from), q + i * 2 * FAST_BLOCK, next, n, step,
                                    which, acc);
            }
        } else {
            /* Of a last odd block the other half is not there, and not read. */
            for (uint32_t i = 0; i < left; i += 2, which = _mm512_add_epi32(which, two)) {
                __mmask8 there = left - i >= 2 ? 0xff : 0x0f;
                dot4_row_blocks(_mm512_maskz_loadu_epi64(there, p + i * (FAST_BLOCK / 2)),
                                q + (size_t)i * FAST_BLOCK, next, n, step, which, acc);
            }
        }
    }
    for (int t = 0; t < n; t++)
        acc[t] = vf_add(acc[t], vf_add(odd[t], _mm512_zextps256_ps512(constant[t])));
}

/* Codes of 16 rows x block g as pairs: i16 [32 pairs][16 rows][2]. A vector takes two rows, so that
 * the last step of the transposition leaves all 16 in order. */
SIMD_INLINE void dot4_decode(const uint8_t *codes, const uint32_t row[16], uint32_t blocks,
                             uint32_t g, __m512i tile[32])
{
    const __m512i mask = _mm512_set1_epi32(0x000f000f);
    __m512i in[8], a[8], b[8], word[8];
    for (int i = 0; i < 8; i++) {
        uint32_t low = row[i < 4 ? i : i + 4], high = row[i < 4 ? i + 4 : i + 8];
        const uint8_t *p = codes + ((size_t)low * blocks + g) * (FAST_BLOCK / 2);
        const uint8_t *q = codes + ((size_t)high * blocks + g) * (FAST_BLOCK / 2);
        in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)),
                                   _mm256_loadu_si256((const __m256i *)q), 1);
    }
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        word[i] = _mm512_shuffle_i64x2(b[i], b[i + 4], 0x88);
        word[i + 4] = _mm512_shuffle_i64x2(b[i], b[i + 4], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        tile[i] = _mm512_and_si512(word[i], mask);
        tile[8 + i] = _mm512_and_si512(_mm512_srli_epi32(word[i], 4), mask);
        tile[16 + i] = _mm512_and_si512(_mm512_srli_epi32(word[i], 8), mask);
        tile[24 + i] = _mm512_srli_epi16(word[i], 12);
    }
}

/* out [n, 16] += one block of n rows of activations (a constant, up to DOT4_MANY). */
SIMD_INLINE void dot4_block(const __m512i tile[32], const struct fast_tile *x, uint32_t g,
                            uint32_t first, int n, vf scale, vf bias, float *out)
{
    const int16_t *q = x->q + ((size_t)g * x->rows + first) * FAST_BLOCK;
    __m512i acc[DOT4_MANY];
    for (int t = 0; t < n; t++)
        acc[t] = _mm512_setzero_si512();
    for (int pair = 0; pair < 32; pair++)
        for (int t = 0; t < n; t++) {
            int32_t two;
            memcpy(&two, q + t * FAST_BLOCK + 2 * pair, sizeof two);
            acc[t] = _mm512_dpwssd_epi32(acc[t], tile[pair], _mm512_set1_epi32(two));
        }
    for (int t = 0; t < n; t++) {
        size_t at = (size_t)(first + t) * x->stride + g;
        float *to = out + (first + t) * DOT4_PANEL;
        vf v = vf_fma(vf_set(x->sum[at]), bias, vf_load(to));
        vf_store(to, vf_fma(_mm512_cvtepi32_ps(acc[t]), vf_mul(vf_set(x->scale[at]), scale), v));
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
        __m512i tile[32];
        dot4_decode(w.codes, row, x->blocks, g, tile);
        vf s = vf_load(scale + (size_t)g * DOT4_PANEL), b = vf_load(bias + (size_t)g * DOT4_PANEL);
        uint32_t t = 0;
        for (; x->rows - t >= 8; t += 8)
            dot4_block(tile, x, g, t, 8, s, b, out);
        for (; x->rows - t >= 4; t += 4)
            dot4_block(tile, x, g, t, 4, s, b, out);
        for (; x->rows - t >= 2; t += 2)
            dot4_block(tile, x, g, t, 2, s, b, out);
        if (t < x->rows)
            dot4_block(tile, x, g, t, 1, s, b, out);
    }
}
