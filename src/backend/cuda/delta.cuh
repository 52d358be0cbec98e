/* What the two halves of Gated DeltaNet share: arguments and gates. */
#ifndef BACKEND_CUDA_DELTA_CUH
#define BACKEND_CUDA_DELTA_CUH

#include "backend/cuda/ops.cuh"

enum { DELTA_DIM = 128 };

struct delta_kernel_args {
    const struct segment *segments;
    uint32_t rows, segment_count;
    uint32_t key_heads, value_heads;
    float eps;
    const float *qkv, *z, *a, *b, *conv, *a_log, *dt_bias, *norm;
    float *conv_state, *state, *y;
    uint32_t *counters; /* step: [segments, key_heads] */
};

/* Segments of any length; delta_scan.cu. */
void cuda_delta_scan(struct device *device, const struct delta_kernel_args &args,
                     const struct batch_view *batch);

static inline __host__ __device__ uint32_t delta_channels(const struct delta_kernel_args &a)
{
    return (2 * a.key_heads + a.value_heads) * DELTA_DIM;
}

/* g (at most 0) and beta. */
static __device__ __forceinline__ float2 delta_gates(const struct delta_kernel_args &a,
                                                     uint64_t row, uint32_t head)
{
    float x = a.a[row * a.value_heads + head] + a.dt_bias[head];
    float softplus = x > 20 ? x : log1pf(expf(x));
    return make_float2(-expf(a.a_log[head]) * softplus, sigmoid(a.b[row * a.value_heads + head]));
}

#endif
