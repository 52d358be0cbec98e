// Products of up to 4 rows with a matrix, a simdgroup four outputs: what linear.metal and
// route.metal share.
#ifndef BACKEND_METAL_ROWS_H
#define BACKEND_METAL_ROWS_H

#include "common.h"

constant uint ROW_OUTPUTS = 4; // of a simdgroup

// The lane's share of the products of 4 weight rows with B rows x[from[b]..] * gain, and of the
// squares of x. For codes of BITS bits: 16 bytes of them at a time. The four rows are the elements
// of one vector, so that equal rows give equal sums whatever the compiler reorders: the router's
// ties depend on it.
template <int B, int BITS>
inline void linear_codes_share(device const uint *data, device const bfloat *scales,
                               device const bfloat *biases, constant matrix_dims &m,
                               thread const ulong *rows, device const float *x,
                               thread const ulong *from, device const float *gain, bool has_gain,
                               uint lane, thread float4 *sum, thread float *squares)
{
    uint blocks = m.cols * uint(BITS) / 128;
    for (uint block = lane; block < blocks; block += 32) {
        uint4 words[ROW_OUTPUTS];
        float4 part[B];
        float x_sum[B];
        float4 scale;
        float4 bias;
        uint k0 = block * (128 / uint(BITS));
        for (uint r = 0; r < ROW_OUTPUTS; r++) {
            words[r] = load_codes(data + (rows[r] * blocks + block) * 4, m.wide);
            ulong group = rows[r] * (m.cols / m.group) + k0 / m.group;
            scale[r] = float(scales[group]);
            bias[r] = float(biases[group]);
        }
        for (int b = 0; b < B; b++) {
            x_sum[b] = 0.0f;
            part[b] = float4(0.0f);
        }
        for (uint w = 0; w < 32 / uint(BITS); w++) {
            uint k = k0 + w * 4;
            float4 codes[ROW_OUTPUTS];
            for (uint r = 0; r < ROW_OUTPUTS; r++)
                codes[r] = BITS == 8 ? codes_8(words[r][w % 4])
                                     : codes_4(words[r][w / 2] >> w % 2 * 16);
            for (int b = 0; b < B; b++) {
                float4 v = *(device const float4 *)(x + from[b] + k);
                squares[b] += dot(v, v);
                v = has_gain ? v * *(device const float4 *)(gain + k) : v;
                x_sum[b] += v.x + v.y + v.z + v.w;
                for (uint i = 0; i < 4; i++)
                    part[b] += float4(codes[0][i], codes[1][i], codes[2][i], codes[3][i]) * v[i];
            }
        }
        for (int b = 0; b < B; b++)
            sum[b] += scale * part[b] + bias * x_sum[b];
    }
}

// The same for any weights.
template <int B>
inline void linear_share(device const uint *data, device const bfloat *scales,
                         device const bfloat *biases, constant matrix_dims &m, uint row0,
                         device const float *x, thread const ulong *from,
                         device const float *gain, bool has_gain, uint lane,
                         thread float4 *sum, thread float *squares)
{
    ulong rows[ROW_OUTPUTS];
    for (uint r = 0; r < ROW_OUTPUTS; r++)
        rows[r] = min(row0 + r, m.rows - 1);
    for (int b = 0; b < B; b++) {
        squares[b] = 0.0f;
        sum[b] = float4(0.0f);
    }
    if (matrix_is_q4(m)) {
        linear_codes_share<B, 4>(data, scales, biases, m, rows, x, from, gain, has_gain, lane, sum,
                                 squares);
    } else if (m.kind > KIND_BF16 && m.bits == 8) {
        linear_codes_share<B, 8>(data, scales, biases, m, rows, x, from, gain, has_gain, lane, sum,
                                 squares);
    } else {
        for (uint k = lane; k < m.cols; k += 32) {
            float4 w;
            for (uint r = 0; r < ROW_OUTPUTS; r++)
                w[r] = matrix_at(data, scales, biases, m, rows[r], k);
            for (int b = 0; b < B; b++) {
                float v = x[from[b] + k];
                squares[b] += v * v;
                v = has_gain ? v * gain[k] : v;
                sum[b] += w * v;
            }
        }
    }
}

// Sum over the simdgroup in an order that is the same for every call, which simd_sum does not
// promise: equal router rows must tie.
inline float4 linear_ordered_sum(float4 v)
{
    for (ushort step = 16; step > 0; step /= 2)
        v += simd_shuffle_xor(v, step);
    return v;
}

// What the kernels by row do: threadgroup (tile, group of B rows), two simdgroups. found[b]: the
// four outputs from row0 on of row batch0 + b, for all lanes.
template <int B>
inline void linear_rows(device const float *x, device const uint *select, device const float *gain,
                        constant linear_dims &d, device const uint *data,
                        device const bfloat *scales, device const bfloat *biases,
                        constant matrix_dims &m, uint row0, uint batch0, uint lane,
                        thread float4 *found)
{
    ulong from[B];
    for (int b = 0; b < B; b++) {
        uint r = min(batch0 + uint(b), d.rows - 1);
        from[b] = ulong(d.has_select != 0 ? select[r] : r) * d.cols;
    }
    float squares[B];
    linear_share<B>(data, scales, biases, m, row0, x, from, gain, d.has_gain != 0, lane, found,
                    squares);
    for (int b = 0; b < B; b++) {
        float scale = 1.0f;
        if (d.has_gain != 0)
            scale = rsqrt(linear_ordered_sum(float4(squares[b])).x / float(d.cols) + d.eps);
        found[b] = linear_ordered_sum(found[b]) * scale;
    }
}

// h[r] = x[r] * scale * gain, written by one simdgroup (the router's input).
inline void linear_write_h(device const float *x, device const float *gain,
                           constant linear_dims &d, device float *h, uint row, uint lane)
{
    device const float *from = x + ulong(row) * d.cols;
    float squares = 0.0f;
    for (uint k = lane; k < d.cols; k += 32)
        squares += from[k] * from[k];
    float scale = rsqrt(simd_sum(squares) / float(d.cols) + d.eps);
    for (uint k = lane; k < d.cols; k += 32)
        h[ulong(row) * d.cols + k] = from[k] * scale * gain[k];
}

#endif
