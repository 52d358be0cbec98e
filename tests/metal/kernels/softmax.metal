// Softmax of rows of at most 256 columns, one row a simdgroup; the row stays in registers. The
// scaled scores go through a strip of dynamic threadgroup memory that only the simdgroup sees.
// Test kernel of the emulator: thread arrays, shuffles, simdgroup_barrier, [[threadgroup(0)]].
#include <metal_stdlib>
using namespace metal;

struct softmax_dims {
    uint rows;
    uint columns;
    float scale;
};

kernel void softmax(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                    constant softmax_dims &dims [[buffer(2)]],
                    threadgroup float *strips [[threadgroup(0)]],
                    uint tile [[threadgroup_position_in_grid]],
                    uint simdgroups [[simdgroups_per_threadgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]])
{
    uint row = tile * simdgroups + simdgroup;
    bool active = row < dims.rows;
    threadgroup float *strip = strips + simdgroup * 256;
    for (uint i = lane; i < 256; i += 32) {
        bool inside = active && i < dims.columns;
        strip[i] = inside ? x[row * dims.columns + i] * dims.scale : -1.0e30f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float values[8];
    float top = -1.0e30f;
    for (uint j = 0; j < 8; j++) {
        values[j] = strip[lane * 8 + j];
        top = max(top, values[j]);
    }
    for (ushort delta = 16; delta > 0; delta /= 2)
        top = max(top, simd_shuffle_xor(top, delta));
    float sum = 0.0f;
    for (uint j = 0; j < 8; j++) {
        values[j] = exp(values[j] - top);
        sum += values[j];
    }
    sum = simd_sum(sum);
    for (uint j = 0; j < 8; j++) {
        uint column = lane * 8 + j;
        if (active && column < dims.columns)
            y[row * dims.columns + column] = values[j] / sum;
    }
}
