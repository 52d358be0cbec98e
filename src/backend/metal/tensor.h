// What the kernels on TensorOps (Metal 4) share: the tiles of a product and how they are staged.
//
// c [ROWS, 64] += a b^T, 64 columns of K at a time: a [ROWS, 64] and b [64, 64] are f16 in
// threadgroup memory, zero outside of the matrices, so that a step never reaches past a tensor's
// extents (what lies there is undefined). c is a cooperative tensor in f32. The shapes are those
// that every version of matmul2d takes: N is a multiple of 16, the operands are tensors over
// threadgroup memory, of one type and not const.
#ifndef BACKEND_METAL_TENSOR_H
#define BACKEND_METAL_TENSOR_H

#include "common.h"

#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace mpp::tensor_ops;

constant uint TENSOR_COLUMNS = 64;
constant uint TENSOR_K = 64;
constant uint TENSOR_THREADS = 128;

typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> tensor_tile;

// f16 and not bf16: 11 bits of mantissa keep the routing of f32, where 8 do not, and normalised
// rows and 4-bit weights are far inside its range; what is not is held at the largest number.
inline half tensor_half(float v)
{
    return half(clamp(v, -65504.0f, 65504.0f));
}

// Stages 32 weights of one row from column k on, k a multiple of 32; zeros outside of the matrix.
inline void tensor_stage_weights(threadgroup half *to, device const uint *data,
                                 device const bfloat *scales, device const bfloat *biases,
                                 constant matrix_dims &m, ulong row, bool inside, uint k)
{
    if (inside && matrix_is_q4(m) && k < m.cols) {
        uint4 words = load_codes(data + (row * (m.cols / 32) + k / 32) * 4, m.wide);
        ulong group = row * (m.cols / m.group) + k / m.group;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        for (uint i = 0; i < 32; i++)
            to[i] = tensor_half(scale * float(words[i / 8] >> (i % 8 * 4) & 15u) + bias);
        return;
    }
    for (uint i = 0; i < 32; i++) {
        float w = 0.0f;
        if (inside && k + i < m.cols)
            w = matrix_at(data, scales, biases, m, row, k + i);
        to[i] = tensor_half(w);
    }
}

#endif
#endif
