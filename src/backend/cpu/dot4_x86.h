/* What the x86 levels of fast_tile.h share. */
#include <immintrin.h>

/* Vector p to out + p * step. */
SIMD_INLINE void dot4_order_apart(const int16_t *q, int16_t *out, int step)
{
    const __m256i pair = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0,
                                          1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i v[4], a[4];
    for (int j = 0; j < 4; j++)
        v[j] = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)q + j), pair);
    a[0] = _mm256_unpacklo_epi32(v[0], v[1]);
    a[1] = _mm256_unpackhi_epi32(v[0], v[1]);
    a[2] = _mm256_unpacklo_epi32(v[2], v[3]);
    a[3] = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a[0], a[2]);
    v[1] = _mm256_unpackhi_epi64(a[0], a[2]);
    v[2] = _mm256_unpacklo_epi64(a[1], a[3]);
    v[3] = _mm256_unpackhi_epi64(a[1], a[3]);
    for (int p = 0; p < 4; p++)
        _mm256_storeu_si256((__m256i *)(out + p * step), _mm256_permutevar8x32_epi32(v[p], lanes));
}

SIMD_INLINE void dot4_order(const int16_t *q, int16_t *out)
{
    dot4_order_apart(q, out, 16);
}

SIMD_INLINE __m256 dot4_widen(const uint16_t *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

/* Eight bf16 of an array that ends after n; zero past its end. */
SIMD_INLINE __m256 dot4_load_factors(const uint16_t *p, uint32_t n)
{
    if (n >= 8)
        return dot4_widen(p);
    uint16_t copy[8] = {0};
    memcpy(copy, p, n * sizeof *p);
    return dot4_widen(copy);
}

/* 8 x 8 words: out[i] lane r = in[r] lane i. */
SIMD_INLINE void dot4_transpose(const __m256i in[8], __m256i out[8])
{
    __m256i a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

/* Scale and bias of 16 rows: f32 [blocks rounded up to 8, 16]. */
SIMD_INLINE void dot4_factors(const uint16_t *from, const uint32_t row[16], uint32_t blocks,
                              float *out)
{
    for (uint32_t g = 0; g < blocks; g += 8)
        for (int half = 0; half < 2; half++) {
            __m256i in[8], columns[8];
            for (int r = 0; r < 8; r++)
                in[r] = _mm256_castps_si256(
                    dot4_load_factors(from + (size_t)row[half * 8 + r] * blocks + g, blocks - g));
            dot4_transpose(in, columns);
            for (int i = 0; i < 8; i++)
                _mm256_storeu_ps(out + (g + (uint32_t)i) * 16 + half * 8,
                                 _mm256_castsi256_ps(columns[i]));
        }
}
