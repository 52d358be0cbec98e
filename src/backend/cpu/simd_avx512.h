/* simd.h for AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>

#define LEVEL(name) avx512_##name
enum { VF = 16, SIMD_STRIP = 4 };
typedef __m512 vf;

SIMD_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}

SIMD_INLINE vf vf_set(float x)
{
    return _mm512_set1_ps(x);
}

SIMD_INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

SIMD_INLINE vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

/* a b + c */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* The larger; b when either is a NaN. */
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

SIMD_INLINE vf vf_abs(vf a)
{
    return _mm512_abs_ps(a);
}

SIMD_INLINE vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a 2^n for whole n in [-126, 127] */
SIMD_INLINE vf vf_scale2(vf a, vf n)
{
    return _mm512_scalef_ps(a, n);
}

SIMD_INLINE float vf_sum(vf v)
{
    return _mm512_reduce_add_ps(v);
}

SIMD_INLINE float vf_top(vf v)
{
    return _mm512_reduce_max_ps(v);
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}

/* Rounds to nearest even; a NaN's payload may end as infinity's, but a NaN in KV is lost anyway. */
SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    __m512i w = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
    w = _mm512_add_epi32(w, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16)));
}

/* VF lanes of anything, such as two bf16 values each. */
SIMD_INLINE vf vf_load_raw(const void *p)
{
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}

/* The first, the second of each lane's two bf16 values. */
SIMD_INLINE vf vf_first_bf16(vf v)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16));
}

SIMD_INLINE vf vf_second_bf16(vf v)
{
    __m512i high = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), high));
}

/* v[0] and v[1] lane by lane: 0 of v[0], 0 of v[1], 1 of v[0], ... */
SIMD_INLINE void vf_zip(vf *v)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    vf a = _mm512_permutex2var_ps(v[0], low, v[1]);
    v[1] = _mm512_permutex2var_ps(v[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), v[1]);
    v[0] = a;
}

/* Lane j of vector i changes places with lane i of vector j. */
SIMD_INLINE void vf_transpose(vf *r)
{
    vf t[16];
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 in each quarter: t[i + c] has columns c, c+4, ... */
        vf a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        vf c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int c = 0; c < 4; c++) { /* 4 x 4 quarters */
        vf even_a = _mm512_shuffle_f32x4(t[c], t[4 + c], 0x88);
        vf even_b = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0x88);
        vf odd_a = _mm512_shuffle_f32x4(t[c], t[4 + c], 0xdd);
        vf odd_b = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0xdd);
        r[c] = _mm512_shuffle_f32x4(even_a, even_b, 0x88);
        r[4 + c] = _mm512_shuffle_f32x4(odd_a, odd_b, 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(even_a, even_b, 0xdd);
        r[12 + c] = _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd);
    }
}

SIMD_INLINE vf vf_load_u8(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* VF values rounded to whole numbers in [-32767, 32767], and stored. */
SIMD_INLINE void vf_store_i16(int16_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
