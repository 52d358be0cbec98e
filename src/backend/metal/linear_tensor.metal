// Projections of many rows on TensorOps: tiles of 64 outputs by ROWS rows, both factors f16, sums
// in f32. The twin of linear_f32_tile, with the same arguments.
#include "tensor.h"

#if __METAL_VERSION__ >= 400

// Threadgroup (tile of 64 outputs, ROWS rows). x: f32 [rows, cols], normalised and selected.
template <int ROWS>
kernel void linear_f16_tensor(device const float *x [[buffer(0)]],
                              constant linear_dims &d [[buffer(3)]], LINEAR_MATRICES,
                              uint2 at [[threadgroup_position_in_grid]],
                              uint index [[thread_index_in_threadgroup]])
{
    threadgroup half a[ROWS * 64];
    threadgroup half b[64 * 64];
    LINEAR_CHOOSE(at.x)
    uint column0 = (at.x - d.first_tile[which]) * TENSOR_COLUMNS;
    uint row0 = at.y * uint(ROWS);
    constexpr auto descriptor =
        matmul2d_descriptor(ROWS, 64, 64, false, true, false,
                            matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroups<4>> product;
    tensor_tile left(a, dextents<int, 2>(64, ROWS));
    tensor_tile right(b, dextents<int, 2>(64, 64));
    auto sum =
        product.template get_destination_cooperative_tensor<tensor_tile, tensor_tile, float>();
    for (ushort i = 0; i < sum.get_capacity(); i++)
        if (sum.is_valid_element(i))
            sum[i] = 0.0f;
    for (uint k0 = 0; k0 < d.cols; k0 += TENSOR_K) {
        for (uint i = index; i < uint(ROWS) * TENSOR_K; i += TENSOR_THREADS) {
            uint r = row0 + i / TENSOR_K;
            uint k = k0 + i % TENSOR_K;
            bool inside = r < d.rows && k < d.cols;
            a[i] = tensor_half(inside ? x[ulong(r) * d.cols + k] : 0.0f);
        }
        uint row = column0 + index / 2;
        tensor_stage_weights(b + index * 32, data, scales, biases, m, row, row < m.rows,
                             k0 + index % 2 * 32);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.run(left, right, sum);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (ushort i = 0; i < sum.get_capacity(); i++) {
        if (!sum.is_valid_element(i))
            continue;
        auto place = sum.get_multidimensional_index(i); // (column, row)
        uint r = row0 + uint(place[1]);
        uint column = column0 + uint(place[0]);
        if (r < d.rows && column < m.rows) {
            ulong to = ulong(r) * m.rows + column;
            out[to] = d.add != 0 ? out[to] + sum[i] : sum[i];
        }
    }
}

#define LINEAR_TENSOR(name, rows)                                                                  \
    template [[host_name(name)]] kernel void linear_f16_tensor<rows>(                              \
        device const float *, constant linear_dims &, device const uint *, device const bfloat *,  \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, uint2, uint);
LINEAR_TENSOR("linear_f16_tensor_32", 32)
LINEAR_TENSOR("linear_f16_tensor_128", 128)

#endif
