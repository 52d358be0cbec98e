// Experts of many rows on TensorOps: a block of 32 pairs of one expert meets 64 of its dequantised
// rows at a time, both factors f16, sums in f32. The twins of the kernels of the same names in
// moe.metal, over the same lists of pairs and blocks.
#include "tensor.h"

#if __METAL_VERSION__ >= 400

// Threadgroup (64 outputs, block): act[pair] = silu(gate h) * (up h). Two products of one kind lay
// their sums out alike, so that gate and up of an output meet in one thread.
kernel void moe_gate_up_tensor(device const float *h [[buffer(0)]],
                               device const uint *order [[buffer(1)]],
                               device float *act [[buffer(2)]],
                               constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                               device const uint4 *blocks [[buffer(16)]],
                               uint2 at [[threadgroup_position_in_grid]],
                               uint index [[thread_index_in_threadgroup]])
{
    threadgroup half a[32 * 64];
    threadgroup half b[64 * 64];
    threadgroup half c[64 * 64];
    threadgroup uint pair[32];
    uint4 block = blocks[at.y];
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * TENSOR_COLUMNS;
    if (block.z == 0 || column0 >= width)
        return;
    uint pairs = d.rows * d.topk;
    if (index < block.z)
        pair[index] = order[block.y + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    constexpr auto descriptor =
        matmul2d_descriptor(32, 64, 64, false, true, false,
                            matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroups<4>> product;
    tensor_tile left(a, dextents<int, 2>(64, 32));
    tensor_tile gate_rows(b, dextents<int, 2>(64, 64));
    tensor_tile up_rows(c, dextents<int, 2>(64, 64));
    auto gate = product.get_destination_cooperative_tensor<tensor_tile, tensor_tile, float>();
    auto up = product.get_destination_cooperative_tensor<tensor_tile, tensor_tile, float>();
    for (ushort i = 0; i < gate.get_capacity(); i++) {
        if (gate.is_valid_element(i)) {
            gate[i] = 0.0f;
            up[i] = 0.0f;
        }
    }
    for (uint k0 = 0; k0 < d.hidden; k0 += TENSOR_K) {
        for (uint i = index; i < 32 * TENSOR_K; i += TENSOR_THREADS) {
            uint r = i / TENSOR_K;
            uint k = k0 + i % TENSOR_K;
            float v = 0.0f;
            if (r < block.z && k < d.hidden) {
                uint row = shared ? pair[r] - pairs : pair[r] / d.topk;
                v = h[ulong(row) * d.hidden + k];
            }
            a[i] = tensor_half(v);
        }
        uint column = column0 + index / 2;
        bool inside = column < width;
        uint k = k0 + index % 2 * 32;
        if (shared) {
            tensor_stage_weights(b + index * 32, w2, s2, b2, d.shared_gate, column, inside, k);
            tensor_stage_weights(c + index * 32, w3, s3, b3, d.shared_up, column, inside, k);
        } else {
            ulong expert = block.x;
            tensor_stage_weights(b + index * 32, w0, s0, b0, d.gate,
                                 expert * d.gate.stride + column, inside, k);
            tensor_stage_weights(c + index * 32, w1, s1, b1, d.up, expert * d.up.stride + column,
                                 inside, k);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.run(left, gate_rows, gate);
        product.run(left, up_rows, up);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (ushort i = 0; i < gate.get_capacity(); i++) {
        if (!gate.is_valid_element(i))
            continue;
        auto place = gate.get_multidimensional_index(i); // (column, row)
        uint r = uint(place[1]);
        uint column = column0 + uint(place[0]);
        if (r < block.z && column < width)
            act[ulong(pair[r]) * d.act_width + column] = silu(gate[i]) * up[i];
    }
}

// Threadgroup (64 outputs, block): out[pair] = down act[pair]. w0 down, w1 shared down.
kernel void moe_down_tensor(device const float *act [[buffer(0)]],
                            device const uint *order [[buffer(1)]],
                            device float *out [[buffer(2)]],
                            constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                            device const uint4 *blocks [[buffer(16)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]])
{
    threadgroup half a[32 * 64];
    threadgroup half b[64 * 64];
    threadgroup uint pair[32];
    uint4 block = blocks[at.y];
    if (block.z == 0)
        return;
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * TENSOR_COLUMNS;
    if (index < block.z)
        pair[index] = order[block.y + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    constexpr auto descriptor =
        matmul2d_descriptor(32, 64, 64, false, true, false,
                            matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroups<4>> product;
    tensor_tile left(a, dextents<int, 2>(64, 32));
    tensor_tile right(b, dextents<int, 2>(64, 64));
    auto sum = product.get_destination_cooperative_tensor<tensor_tile, tensor_tile, float>();
    for (ushort i = 0; i < sum.get_capacity(); i++)
        if (sum.is_valid_element(i))
            sum[i] = 0.0f;
    for (uint k0 = 0; k0 < width; k0 += TENSOR_K) {
        for (uint i = index; i < 32 * TENSOR_K; i += TENSOR_THREADS) {
            uint r = i / TENSOR_K;
            uint k = k0 + i % TENSOR_K;
            bool inside = r < block.z && k < width;
            a[i] = tensor_half(inside ? act[ulong(pair[r]) * d.act_width + k] : 0.0f);
        }
        uint column = column0 + index / 2;
        bool inside = column < d.hidden;
        uint k = k0 + index % 2 * 32;
        if (shared)
            tensor_stage_weights(b + index * 32, w1, s1, b1, d.shared_down, column, inside, k);
        else
            tensor_stage_weights(b + index * 32, w0, s0, b0, d.down,
                                 ulong(block.x) * d.down.stride + column, inside, k);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.run(left, right, sum);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (ushort i = 0; i < sum.get_capacity(); i++) {
        if (!sum.is_valid_element(i))
            continue;
        auto place = sum.get_multidimensional_index(i); // (column, row)
        uint r = uint(place[1]);
        uint column = column0 + uint(place[0]);
        if (r < block.z && column < d.hidden)
            out[ulong(pair[r]) * d.hidden + column] = sum[i];
    }
}

#endif
