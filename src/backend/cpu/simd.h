/* Vectors of f32 as wide as the level that a file is compiled for, under one set of names, so that
 * an op is written once (fast_<family>.h) and compiled for each level (avx2_<family>.c, ...).
 *
 *   vf         VF floats; vf_load / vf_store need no alignment
 *   LEVEL(f)   the level's name of f: avx2_f, avx512_f, neon_f, i8mm_f
 *
 * Each level's header defines the primitives that differ in instructions; the rest is below. */
#ifndef BACKEND_CPU_SIMD_H
#define BACKEND_CPU_SIMD_H

#include "base/bf16.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIMD_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
#include "backend/cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "backend/cpu/simd_avx2.h"
#elif defined(__aarch64__)
#include "backend/cpu/simd_neon.h"
#endif

SIMD_INLINE vf vf_zero(void)
{
    return vf_set(0);
}

/* e^x within 2 ulp for x in [-87, 88]; below, about 1e-38; a NaN stays a NaN. Cody-Waite reduction
 * to |r| <= ln(2) / 2, then the Taylor series, whose next term is below 1e-8 there. */
SIMD_INLINE vf vf_exp(vf x)
{
    x = vf_min(vf_set(88.0f), vf_max(vf_set(-87.0f), x));
    vf n = vf_round(vf_mul(x, vf_set(1.44269504f)));
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.0f / 5040);
    p = vf_fma(p, r, vf_set(1.0f / 720));
    p = vf_fma(p, r, vf_set(1.0f / 120));
    p = vf_fma(p, r, vf_set(1.0f / 24));
    p = vf_fma(p, r, vf_set(1.0f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_scale2(p, n);
}

SIMD_INLINE vf vf_sigmoid(vf x)
{
    return vf_div(vf_set(1), vf_add(vf_set(1), vf_exp(vf_sub(vf_zero(), x))));
}

SIMD_INLINE vf vf_silu(vf x)
{
    return vf_mul(x, vf_sigmoid(x));
}

/* sum of a[k] b[k]; n any */
SIMD_INLINE float simd_dot(const float *a, const float *b, size_t n)
{
    vf s0 = vf_zero(), s1 = vf_zero(), s2 = vf_zero(), s3 = vf_zero();
    size_t k = 0;
    for (; n - k >= 4 * VF; k += 4 * VF) {
        s0 = vf_fma(vf_load(a + k), vf_load(b + k), s0);
        s1 = vf_fma(vf_load(a + k + VF), vf_load(b + k + VF), s1);
        s2 = vf_fma(vf_load(a + k + 2 * VF), vf_load(b + k + 2 * VF), s2);
        s3 = vf_fma(vf_load(a + k + 3 * VF), vf_load(b + k + 3 * VF), s3);
    }
    for (; n - k >= VF; k += VF)
        s0 = vf_fma(vf_load(a + k), vf_load(b + k), s0);
    float sum = vf_sum(vf_add(vf_add(s0, s1), vf_add(s2, s3)));
    for (; k < n; k++)
        sum += a[k] * b[k];
    return sum;
}

/* out = x * scale * gain, n any */
SIMD_INLINE void simd_scale(const float *x, float scale, const float *gain, size_t n, float *out)
{
    size_t k = 0;
    for (; n - k >= VF; k += VF)
        vf_store(out + k, vf_mul(vf_mul(vf_load(x + k), vf_set(scale)), vf_load(gain + k)));
    for (; k < n; k++)
        out[k] = x[k] * scale * gain[k];
}

/* out[k] = x[k] * rsqrt(mean(x^2) + eps) * gain[k]; out may be x. */
SIMD_INLINE void simd_rms_norm(const float *x, const float *gain, size_t n, float eps, float *out)
{
    float scale = 1 / __builtin_sqrtf(simd_dot(x, x, n) / (float)n + eps);
    simd_scale(x, scale, gain, n, out);
}

#endif
