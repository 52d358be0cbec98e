/* simd.h for Arm's NEON with the dot-product instructions. */
#include <arm_neon.h>

#define LEVEL(name) neon_##name
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
