// RMS norm of one row a threadgroup, in f32; the gain is optional by a function constant.
// Test kernel of the emulator: two-level reduction, barriers, templates, dynamic sizes.
#include <metal_stdlib>
using namespace metal;

struct norm_dims {
    uint columns;
    float eps;
};

constant bool has_gain [[function_constant(0)]];

template <typename T>
kernel void rms_norm(device const float *x [[buffer(0)]], device T *y [[buffer(1)]],
                     constant norm_dims &dims [[buffer(2)]],
                     device const float *gain [[buffer(3), function_constant(has_gain)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint index [[thread_index_in_threadgroup]],
                     uint threads [[threads_per_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partial[32];
    ulong base = ulong(row) * dims.columns;
    float sum = 0.0f;
    for (uint i = index; i < dims.columns; i += threads) {
        float v = x[base + i];
        sum += v * v;
    }
    sum = simd_sum(sum);
    if (lane == 0)
        partial[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint simdgroups = (threads + 31) / 32;
    sum = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
    float scale = rsqrt(sum / float(dims.columns) + dims.eps);
    for (uint i = index; i < dims.columns; i += threads) {
        float v = x[base + i] * scale;
        if (has_gain)
            v *= gain[i];
        y[base + i] = T(v);
    }
}

template [[host_name("rms_norm_f32")]] kernel void
rms_norm<float>(device const float *, device float *, constant norm_dims &, device const float *,
                uint, uint, uint, uint, uint);
template [[host_name("rms_norm_f16")]] kernel void
rms_norm<half>(device const float *, device half *, constant norm_dims &, device const float *,
               uint, uint, uint, uint, uint);
