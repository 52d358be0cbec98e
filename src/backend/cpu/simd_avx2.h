/* simd.h for AVX2 + FMA. */
#include <immintrin.h>

#define LEVEL(name) avx2_##name
enum { VF = 8, SIMD_STRIP = 2 };
typedef __m256 vf;

SIMD_INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}

SIMD_INLINE vf vf_set(float x)
{
    return _mm256_set1_ps(x);
}

SIMD_INLINE vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

SIMD_INLINE vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

/* a b + c */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* The larger; b when either is a NaN. */
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

SIMD_INLINE vf vf_abs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}

SIMD_INLINE vf vf_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a 2^n for whole n in [-126, 127] */
SIMD_INLINE vf vf_scale2(vf a, vf n)
{
    __m256i e =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}

SIMD_INLINE float vf_sum(vf v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

SIMD_INLINE float vf_top(vf v)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

/* Rounds to nearest even; a NaN's payload may end as infinity's, but a NaN in KV is lost anyway. */
SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    __m256i w = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
    w = _mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    w = _mm256_srli_epi32(w, 16);
    w = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(w));
}

/* VF lanes of anything, such as two bf16 values each. */
SIMD_INLINE vf vf_load_raw(const void *p)
{
    return _mm256_castsi256_ps(_mm256_loadu_si256(p));
}

/* The first, the second of each lane's two bf16 values. */
SIMD_INLINE vf vf_first_bf16(vf v)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16));
}

SIMD_INLINE vf vf_second_bf16(vf v)
{
    __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), high));
}

/* v[0] and v[1] lane by lane: 0 of v[0], 0 of v[1], 1 of v[0], ... */
SIMD_INLINE void vf_zip(vf *v)
{
    vf a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
    v[0] = _mm256_permute2f128_ps(a, b, 0x20);
    v[1] = _mm256_permute2f128_ps(a, b, 0x31);
}

/* Lane j of vector i changes places with lane i of vector j. */
SIMD_INLINE void vf_transpose(vf *r)
{
    vf t[8];
    for (int i = 0; i < 8; i += 4) { /* 4 x 4 in each half: t[i + c] has columns c and c + 4 */
        vf a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        vf c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int c = 0; c < 4; c++) {
        r[c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x31);
    }
}

SIMD_INLINE vf vf_load_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* VF values rounded to whole numbers in [-32767, 32767], and stored. */
SIMD_INLINE void vf_store_i16(int16_t *p, vf v)
{
    __m256i w = _mm256_cvtps_epi32(v);
    w = _mm256_permute4x64_epi64(_mm256_packs_epi32(w, w), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(w));
}
