// What the kernels share: sums over a threadgroup, weights by element, the segment of a row.
#ifndef BACKEND_METAL_COMMON_H
#define BACKEND_METAL_COMMON_H

#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#include "dims.h"

constant uint KIND_F32 = 1;
constant uint KIND_BF16 = 2;
constant float LOWEST = -1.0e30f; // below every score and logit that counts

inline float sigmoid(float x)
{
    float e = exp(-fabs(x));
    return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

inline float silu(float x)
{
    return x * sigmoid(x);
}

// Whether x is a NaN; by its bits, because fast math may assume that there are none.
inline bool is_nan(float x)
{
    return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u;
}

inline bool is_finite(float x)
{
    return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u;
}

// Sum over the threadgroup, for every thread. part: f32 [32], free again after the next barrier.
inline float group_sum(float v, threadgroup float *part, uint simdgroup, uint simdgroups, uint lane)
{
    v = simd_sum(v);
    if (lane == 0)
        part[simdgroup] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_sum(lane < simdgroups ? part[lane] : 0.0f);
}

// One weight; row counts through all matrices. For any kind; slow.
inline float matrix_at(device const uint *data, device const bfloat *scales,
                       device const bfloat *biases, constant matrix_dims &m, ulong row, uint k)
{
    if (m.kind == KIND_F32)
        return ((device const float *)data)[row * m.cols + k];
    if (m.kind == KIND_BF16)
        return float(((device const bfloat *)data)[row * m.cols + k]);
    device const uint *words = data + row * (m.cols / 32 * m.bits);
    uint bit = k * m.bits;
    uint shift = bit % 32;
    uint code = words[bit / 32] >> shift;
    if (shift + m.bits > 32)
        code |= words[bit / 32 + 1] << (32 - shift);
    code &= (1u << m.bits) - 1;
    ulong group = row * (m.cols / m.group) + k / m.group;
    return float(scales[group]) * float(code) + float(biases[group]);
}

inline bool matrix_is_q4(constant matrix_dims &m)
{
    return m.kind > KIND_BF16 && m.bits == 4;
}

// 32 codes of 4 bits.
inline uint4 load_codes(device const uint *p, uint wide)
{
    if (wide != 0)
        return *(device const uint4 *)p;
    return uint4(p[0], p[1], p[2], p[3]);
}

// The lane's share of the products of R matrix rows with x: its part of sum w[row_r][k] x[k].
// x: f32 [cols]. Rows past the matrix are read as its last one.
template <int R>
inline void dot_rows(device const uint *data, device const bfloat *scales,
                     device const bfloat *biases, constant matrix_dims &m, ulong first, uint row0,
                     device const float *x, uint lane, thread float *sum)
{
    ulong rows[R];
    for (int r = 0; r < R; r++) {
        sum[r] = 0.0f;
        rows[r] = first + min(row0 + uint(r), m.rows - 1);
    }
    if (!matrix_is_q4(m)) {
        for (uint k = lane; k < m.cols; k += 32)
            for (int r = 0; r < R; r++)
                sum[r] += matrix_at(data, scales, biases, m, rows[r], k) * x[k];
        return;
    }
    uint blocks = m.cols / 32;
    for (uint b = lane; b < blocks; b += 32) {
        device const float4 *xs = (device const float4 *)(x + b * 32);
        uint4 words[R];
        float part[R];
        for (int r = 0; r < R; r++) {
            words[r] = load_codes(data + (rows[r] * blocks + b) * 4, m.wide);
            part[r] = 0.0f;
        }
        float x_sum = 0.0f;
        for (uint w = 0; w < 4; w++) {
            float4 lower = xs[w * 2];
            float4 upper = xs[w * 2 + 1];
            x_sum += lower.x + lower.y + lower.z + lower.w + upper.x + upper.y + upper.z + upper.w;
            for (int r = 0; r < R; r++) {
                uint c = words[r][w];
                float4 low = float4(float(c & 15u), float(c >> 4 & 15u), float(c >> 8 & 15u),
                                    float(c >> 12 & 15u));
                float4 high = float4(float(c >> 16 & 15u), float(c >> 20 & 15u),
                                     float(c >> 24 & 15u), float(c >> 28));
                part[r] += dot(low, lower) + dot(high, upper);
            }
        }
        for (int r = 0; r < R; r++) {
            ulong group = rows[r] * (m.cols / m.group) + b * 32 / m.group;
            sum[r] += float(scales[group]) * part[r] + float(biases[group]) * x_sum;
        }
    }
}

// Index of the segment that the row belongs to.
inline uint find_segment(device const segment_dims *segments, uint count, uint row)
{
    uint i = 0;
    while (i + 1 < count && row >= segments[i + 1].row)
        i++;
    return i;
}

// ---- products of tiles: c [32 rows, 64 columns] = a b^T on simdgroup matrices -----------------
//
// Four simdgroups; a and b are staged in threadgroup memory 32 columns of K at a time, with 4
// floats of padding a row so that the rows of a column fall into different banks. Simdgroup s
// computes rows s / 2 * 16.. and columns s % 2 * 32.. of c.

constant uint TILE_ROWS = 32;
constant uint TILE_COLUMNS = 64;
constant uint TILE_K = 32;
constant uint TILE_STRIDE = 36;
constant uint TILE_THREADS = 128;

struct tile_sums {
    simdgroup_float8x8 c[2][4];
};

inline void tile_clear(thread tile_sums &sums)
{
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            sums.c[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// sums += a b^T of the staged step
inline void tile_step(thread tile_sums &sums, threadgroup const float *a,
                      threadgroup const float *b, uint simdgroup)
{
    threadgroup const float *rows = a + simdgroup / 2 * 16 * TILE_STRIDE;
    threadgroup const float *columns = b + simdgroup % 2 * 32 * TILE_STRIDE;
    for (uint k = 0; k < TILE_K; k += 8) {
        simdgroup_float8x8 left[2];
        for (uint i = 0; i < 2; i++)
            simdgroup_load(left[i], rows + i * 8 * TILE_STRIDE + k, TILE_STRIDE);
        for (uint j = 0; j < 4; j++) {
            simdgroup_float8x8 right;
            simdgroup_load(right, columns + j * 8 * TILE_STRIDE + k, TILE_STRIDE, ulong2(0), true);
            for (uint i = 0; i < 2; i++)
                simdgroup_multiply_accumulate(sums.c[i][j], left[i], right, sums.c[i][j]);
        }
    }
}

// c: f32 [32, 64] in threadgroup memory
inline void tile_store(thread tile_sums &sums, threadgroup float *c, uint simdgroup)
{
    threadgroup float *corner = c + simdgroup / 2 * 16 * TILE_COLUMNS + simdgroup % 2 * 32;
    for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 4; j++)
            simdgroup_store(sums.c[i][j], corner + i * 8 * TILE_COLUMNS + j * 8, TILE_COLUMNS);
}

// Stages 8 weights of one row from column k on; zeros outside of the matrix.
inline void tile_stage_weights(threadgroup float *to, device const uint *data,
                               device const bfloat *scales, device const bfloat *biases,
                               constant matrix_dims &m, ulong row, bool inside, uint k)
{
    if (inside && matrix_is_q4(m) && k < m.cols) {
        uint word = data[row * (m.cols / 8) + k / 8];
        ulong group = row * (m.cols / m.group) + k / m.group;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        for (uint i = 0; i < 8; i++)
            to[i] = scale * float(word >> (4 * i) & 15u) + bias;
        return;
    }
    for (uint i = 0; i < 8; i++)
        to[i] = inside && k + i < m.cols ? matrix_at(data, scales, biases, m, row, k + i) : 0.0f;
}

#endif
