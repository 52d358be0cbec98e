/* simd.h for Arm's NEON with the dot-product instructions, and with the int8 matrix ones. */
#include <arm_neon.h>

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define LEVEL(name) i8mm_##name
#else
#define LEVEL(name) neon_##name
#endif
enum { VF = 4, SIMD_STRIP = 4 };
typedef float32x4_t vf;

SIMD_INLINE vf vf_load(const float *p)
{
    return vld1q_f32(p);
}

SIMD_INLINE void vf_store(float *p, vf v)
{
    vst1q_f32(p, v);
}

SIMD_INLINE vf vf_set(float x)
{
    return vdupq_n_f32(x);
}

SIMD_INLINE vf vf_add(vf a, vf b)
{
    return vaddq_f32(a, b);
}

SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return vsubq_f32(a, b);
}

SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return vmulq_f32(a, b);
}

SIMD_INLINE vf vf_div(vf a, vf b)
{
    return vdivq_f32(a, b);
}

/* a b + c */
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}

/* The larger; b when either is a NaN. */
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

SIMD_INLINE vf vf_min(vf a, vf b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

SIMD_INLINE vf vf_abs(vf a)
{
    return vabsq_f32(a);
}

SIMD_INLINE vf vf_round(vf a)
{
    return vrndnq_f32(a);
}

/* a 2^n for whole n in [-126, 127] */
SIMD_INLINE vf vf_scale2(vf a, vf n)
{
    int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(e));
}

SIMD_INLINE float vf_sum(vf v)
{
    return vaddvq_f32(v);
}

SIMD_INLINE float vf_top(vf v)
{
    return vmaxvq_f32(v);
}

SIMD_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

/* Rounds to nearest even; a NaN's payload may end as infinity's, but a NaN in KV is lost anyway. */
SIMD_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    uint32x4_t w = vreinterpretq_u32_f32(v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(w, 16), vdupq_n_u32(1));
    w = vaddq_u32(w, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    vst1_u16(p, vshrn_n_u32(w, 16));
}

/* VF lanes of anything, such as two bf16 values each. */
SIMD_INLINE vf vf_load_raw(const void *p)
{
    return vreinterpretq_f32_u16(vld1q_u16(p));
}

/* The first, the second of each lane's two bf16 values. */
SIMD_INLINE vf vf_first_bf16(vf v)
{
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(v), 16));
}

SIMD_INLINE vf vf_second_bf16(vf v)
{
    uint32x4_t high = vdupq_n_u32(0xffff0000);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), high));
}

/* v[0] and v[1] lane by lane: 0 of v[0], 0 of v[1], 1 of v[0], ... */
SIMD_INLINE void vf_zip(vf *v)
{
    vf a = vzip1q_f32(v[0], v[1]);
    v[1] = vzip2q_f32(v[0], v[1]);
    v[0] = a;
}

/* Lane j of vector i changes places with lane i of vector j. */
SIMD_INLINE void vf_transpose(vf *r)
{
    float64x2_t even_a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1]));
    float64x2_t even_b = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3]));
    float64x2_t odd_a = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
    float64x2_t odd_b = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vtrn1q_f64(even_a, even_b));
    r[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd_a, odd_b));
    r[2] = vreinterpretq_f32_f64(vtrn2q_f64(even_a, even_b));
    r[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd_a, odd_b));
}

SIMD_INLINE vf vf_load_u8(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    uint16x8_t wide = vmovl_u8(vcreate_u8(four));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}

/* VF values rounded to whole numbers in [-32767, 32767], and stored. */
SIMD_INLINE void vf_store_i16(int16_t *p, vf v)
{
    vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(v)));
}
