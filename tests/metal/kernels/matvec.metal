// y = W x with W in affine 4-bit groups of 64: one output row a simdgroup, 16-byte loads of codes.
// Test kernel of the emulator: packed integers, bfloat storage, vector loads, a ragged last group.
#include <metal_stdlib>
using namespace metal;

struct matvec_dims {
    uint rows;
    uint columns; // a multiple of 64
};

constant uint GROUP = 64;
constant uint ROWS_PER_THREADGROUP = 2;

kernel void matvec_q4(device const uint4 *codes [[buffer(0)]],
                      device const bfloat *scales [[buffer(1)]],
                      device const bfloat *biases [[buffer(2)]],
                      device const float *x [[buffer(3)]], device float *y [[buffer(4)]],
                      constant matvec_dims &dims [[buffer(5)]],
                      uint tile [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]])
{
    uint row = tile * ROWS_PER_THREADGROUP + simdgroup;
    if (row >= dims.rows)
        return;
    uint blocks = dims.columns / 32;
    float sum = 0.0f;
    for (uint b = lane; b < blocks; b += 32) {
        uint4 words = codes[row * blocks + b];
        uint group = row * (dims.columns / GROUP) + b * 32 / GROUP;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        float dot_product = 0.0f;
        float x_sum = 0.0f;
        for (uint w = 0; w < 4; w++) {
            for (uint k = 0; k < 8; k++) {
                float value = x[b * 32 + w * 8 + k];
                dot_product += float(words[w] >> (4 * k) & 15u) * value;
                x_sum += value;
            }
        }
        sum += scale * dot_product + bias * x_sum;
    }
    sum = simd_sum(sum);
    if (lane == 0)
        y[row] = sum;
}
