/* The scalar functions and sums that the reference families share. Doubles throughout, so that a
 * faster version is compared with something clearly more exact than itself. */
#ifndef BACKEND_CPU_REF_MATH_H
#define BACKEND_CPU_REF_MATH_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* sum a[k] b[k]. Eight partial sums let the compiler use vector units; the order is fixed. */
static inline double ref_dot(const float *a, const float *b, size_t n)
{
    double part[8] = {0};
    for (size_t k = 0; k < n / 8 * 8; k += 8)
        for (size_t i = 0; i < 8; i++)
            part[i] += (double)a[k + i] * b[k + i];
    for (size_t k = n / 8 * 8; k < n; k++)
        part[k % 8] += (double)a[k] * b[k];
    return ((part[0] + part[4]) + (part[2] + part[6])) +
           ((part[1] + part[5]) + (part[3] + part[7]));
}

static inline double ref_sigmoid(double x)
{
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

static inline double ref_silu(double x)
{
    return x * ref_sigmoid(x);
}

/* log(1 + e^x); x itself above 20, as transformers does. */
static inline double ref_softplus(double x)
{
    return x > 20 ? x : log1p(exp(x));
}

/* out[k] = x[k] * rsqrt(mean(x^2) + eps) * gain[k]; out may be x. */
static inline void ref_rms_norm(const float *x, const float *gain, size_t n, float eps, float *out)
{
    double scale = 1 / sqrt(ref_dot(x, x, n) / (double)n + eps);
    for (size_t k = 0; k < n; k++)
        out[k] = (float)(x[k] * scale * gain[k]);
}

#endif
