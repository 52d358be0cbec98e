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

#if __METAL_VERSION__ >= 320

// Whether this threadgroup is the last of `groups` to come here; `arrived` is 0 before the first
// and after the last. What all have stored by atomics before, the last may load by atomics. Nobody
// waits for anybody: threadgroups need not run at the same time.
inline bool group_is_last(device atomic_uint *arrived, uint groups, threadgroup uint *ticket,
                          uint index)
{
    threadgroup_barrier(mem_flags::mem_device);
    if (index == 0) {
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        *ticket = atomic_fetch_add_explicit(arrived, 1u, memory_order_relaxed);
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        if (*ticket == groups - 1)
            atomic_store_explicit(arrived, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    return *ticket == groups - 1;
}

#endif

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

// Four codes of 4 bits, of 8 bits, the lowest first.
inline float4 codes_4(uint c)
{
    return float4(float(c & 15u), float(c >> 4 & 15u), float(c >> 8 & 15u), float(c >> 12 & 15u));
}

inline float4 codes_8(uint c)
{
    return float4(float(c & 255u), float(c >> 8 & 255u), float(c >> 16 & 255u), float(c >> 24));
}

// 16 bytes of codes.
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
                part[r] += dot(codes_4(c), lower) + dot(codes_4(c >> 16), upper);
            }
        }
        for (int r = 0; r < R; r++) {
            ulong group = rows[r] * (m.cols / m.group) + b * 32 / m.group;
            sum[r] += float(scales[group]) * part[r] + float(biases[group]) * x_sum;
        }
    }
}

// Rows of one segment that a threadgroup takes together.
struct tile_place {
    uint segment;
    uint row; // first, in the batch
    uint rows;
};

// Tile number `index` of the segments that have at least min_rows rows (when tiled) or fewer (when
// not), each cut into tiles of tile_rows. No rows: there is no such tile.
inline tile_place find_tile(device const segment_dims *segments, uint count, uint min_rows,
                            uint tiled, uint tile_rows, uint index)
{
    tile_place place = {0, 0, 0};
    uint left = index;
    for (uint i = 0; i < count && place.rows == 0; i++) {
        uint rows = segments[i].rows;
        if ((rows >= min_rows) != (tiled != 0))
            continue;
        uint tiles = (rows + tile_rows - 1) / tile_rows;
        if (left < tiles) {
            place.segment = i;
            place.row = segments[i].row + left * tile_rows;
            place.rows = min(tile_rows, rows - left * tile_rows);
        }
        left -= min(left, tiles);
    }
    return place;
}

// Index of the segment that the row belongs to.
inline uint find_segment(device const segment_dims *segments, uint count, uint row)
{
    uint i = 0;
    while (i + 1 < count && row >= segments[i + 1].row)
        i++;
    return i;
}

// ---- arguments that several kernels share --------------------------------------------------

#define LINEAR_MATRICES                                                                            \
    device const uint *w0 [[buffer(4)]], device const bfloat *s0 [[buffer(5)]],                    \
        device const bfloat *b0 [[buffer(6)]], device float *o0 [[buffer(7)]],                     \
        device const uint *w1 [[buffer(8)]], device const bfloat *s1 [[buffer(9)]],                \
        device const bfloat *b1 [[buffer(10)]], device float *o1 [[buffer(11)]],                   \
        device const uint *w2 [[buffer(12)]], device const bfloat *s2 [[buffer(13)]],              \
        device const bfloat *b2 [[buffer(14)]], device float *o2 [[buffer(15)]],                   \
        device const uint *w3 [[buffer(16)]], device const bfloat *s3 [[buffer(17)]],              \
        device const bfloat *b3 [[buffer(18)]], device float *o3 [[buffer(19)]]

// The matrix that a tile belongs to.
#define LINEAR_CHOOSE(tile)                                                                        \
    uint which = tile >= d.first_tile[3] ? 3 : tile >= d.first_tile[2] ? 2                         \
                 : tile >= d.first_tile[1] ? 1 : 0;                                                \
    device const uint *data = which == 0 ? w0 : which == 1 ? w1 : which == 2 ? w2 : w3;            \
    device const bfloat *scales = which == 0 ? s0 : which == 1 ? s1 : which == 2 ? s2 : s3;        \
    device const bfloat *biases = which == 0 ? b0 : which == 1 ? b1 : which == 2 ? b2 : b3;        \
    device float *out = which == 0 ? o0 : which == 1 ? o1 : which == 2 ? o2 : o3;                  \
    constant matrix_dims &m = d.matrix[which];

// Gate, up, shared gate, shared up; or down, shared down and two that repeat them.
#define EXPERT_WEIGHTS                                                                             \
    device const uint *w0 [[buffer(4)]], device const bfloat *s0 [[buffer(5)]],                    \
        device const bfloat *b0 [[buffer(6)]], device const uint *w1 [[buffer(7)]],                \
        device const bfloat *s1 [[buffer(8)]], device const bfloat *b1 [[buffer(9)]],              \
        device const uint *w2 [[buffer(10)]], device const bfloat *s2 [[buffer(11)]],              \
        device const bfloat *b2 [[buffer(12)]], device const uint *w3 [[buffer(13)]],              \
        device const bfloat *s3 [[buffer(14)]], device const bfloat *b3 [[buffer(15)]]

// Four values of a row from column k on; zeros past its end. Rows start `stride` apart.
inline float4 load_4(device const float *row, bool inside, uint k, uint cols, uint stride)
{
    float4 v = float4(0.0f);
    if (!inside)
        return v;
    if (stride % 4 == 0 && k + 4 <= cols)
        return *(device const float4 *)(row + k);
    for (uint i = 0; i < 4; i++)
        if (k + i < cols)
            v[i] = row[k + i];
    return v;
}

// ---- products of tiles: c [16 I rows, 64 columns] = a b^T on simdgroup matrices ---------------
//
// Four simdgroups; a and b are staged in threadgroup memory 32 columns of K at a time, with 4
// floats of padding a row so that the rows of a column fall into different banks. Simdgroup s
// computes rows s / 2 * 8 I.. and columns s % 2 * 32.. of c. The more rows, the more products a
// load from threadgroup memory serves: with I = 4 two, with I = 2 four thirds.

constant uint TILE_COLUMNS = 64;
constant uint TILE_K = 32;
constant uint TILE_STRIDE = 36;
constant uint TILE_THREADS = 128;

template <int I>
struct tile_sums {
    simdgroup_float8x8 c[I][4];
};

template <int I>
inline void tile_clear(thread tile_sums<I> &sums)
{
    for (int i = 0; i < I; i++)
        for (int j = 0; j < 4; j++)
            sums.c[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// sums += a b^T of the staged step
template <int I>
inline void tile_step(thread tile_sums<I> &sums, threadgroup const float *a,
                      threadgroup const float *b, uint simdgroup)
{
    threadgroup const float *rows = a + simdgroup / 2 * 8 * uint(I) * TILE_STRIDE;
    threadgroup const float *columns = b + simdgroup % 2 * 32 * TILE_STRIDE;
    for (uint k = 0; k < TILE_K; k += 8) {
        simdgroup_float8x8 left[I];
        for (uint i = 0; i < uint(I); i++)
            simdgroup_load(left[i], rows + i * 8 * TILE_STRIDE + k, TILE_STRIDE);
        for (uint j = 0; j < 4; j++) {
            simdgroup_float8x8 right;
            simdgroup_load(right, columns + j * 8 * TILE_STRIDE + k, TILE_STRIDE, ulong2(0), true);
            for (uint i = 0; i < uint(I); i++)
                simdgroup_multiply_accumulate(sums.c[i][j], left[i], right, sums.c[i][j]);
        }
    }
}

// c: f32 [16 I, 64] in threadgroup memory
template <int I>
inline void tile_store(thread tile_sums<I> &sums, threadgroup float *c, uint simdgroup)
{
    threadgroup float *corner =
        c + simdgroup / 2 * 8 * uint(I) * TILE_COLUMNS + simdgroup % 2 * 32;
    for (uint i = 0; i < uint(I); i++)
        for (uint j = 0; j < 4; j++)
            simdgroup_store(sums.c[i][j], corner + i * 8 * TILE_COLUMNS + j * 8, TILE_COLUMNS);
}

// Stages 8 weights of one row from column k on; zeros outside of the matrix.
inline void tile_stage_weights(threadgroup float *to, device const uint *data,
                               device const bfloat *scales, device const bfloat *biases,
                               constant matrix_dims &m, ulong row, bool inside, uint k)
{
    bool is_q8 = m.kind > KIND_BF16 && m.bits == 8;
    if (inside && (matrix_is_q4(m) || is_q8) && k < m.cols) {
        device const uint *words = data + row * (m.cols / 32 * m.bits) + k * m.bits / 32;
        ulong group = row * (m.cols / m.group) + k / m.group;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        float4 low = is_q8 ? codes_8(words[0]) : codes_4(words[0]);
        float4 high = is_q8 ? codes_8(words[1]) : codes_4(words[0] >> 16);
        ((threadgroup float4 *)to)[0] = scale * low + bias;
        ((threadgroup float4 *)to)[1] = scale * high + bias;
        return;
    }
    for (uint i = 0; i < 8; i++)
        to[i] = inside && k + i < m.cols ? matrix_at(data, scales, biases, m, row, k + i) : 0.0f;
}

// ---- skinny products: c [8 or 16 rows, 32 columns] = a b^T ----------------------------------
//
// Four simdgroups share K: simdgroup s takes the steps s, s + 4, .. of 32, stages its own weights
// and activations, and needs no one else until the four sums meet at the end. A lane reads one
// weight row, 16 bytes of 4-bit codes a step; the four simdgroups together read 64 in a row.

constant uint SKINNY_COLUMNS = 32;
constant uint SKINNY_K = 32;
constant uint SKINNY_STRIDE = 36;
constant uint SKINNY_THREADS = 128;

template <int R>
struct skinny_sums {
    simdgroup_float8x8 c[R][4]; // R blocks of 8 rows
};

template <int R>
inline void skinny_clear(thread skinny_sums<R> &sums)
{
    for (int i = 0; i < R; i++)
        for (int j = 0; j < 4; j++)
            sums.c[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// The lane's 32 weights from column k on; zeros outside of the matrix. `row` counts through all
// matrices.
inline void skinny_stage_weights(threadgroup float *to, device const uint *data,
                                 device const bfloat *scales, device const bfloat *biases,
                                 constant matrix_dims &m, ulong row, bool inside, uint k)
{
    threadgroup float4 *quads = (threadgroup float4 *)to;
    bool is_q8 = m.kind > KIND_BF16 && m.bits == 8;
    if (inside && (matrix_is_q4(m) || is_q8)) {
        ulong group = row * (m.cols / m.group) + k / m.group;
        float scale = float(scales[group]);
        float bias = float(biases[group]);
        device const uint *words = data + row * (m.cols / 32 * m.bits) + k / 32 * m.bits;
        for (uint part = 0; part < m.bits / 4; part++) {
            uint4 codes = load_codes(words + part * 4, m.wide);
            for (uint i = 0; i < 32 / m.bits; i++) {
                float4 c = is_q8 ? codes_8(codes[i]) : codes_4(codes[i / 2] >> i % 2 * 16);
                quads[part * 4 + i] = scale * c + bias;
            }
        }
        return;
    }
    for (uint i = 0; i < SKINNY_K; i++)
        to[i] = inside && k + i < m.cols ? matrix_at(data, scales, biases, m, row, k + i) : 0.0f;
}

// sums += a b^T of the simdgroup's staged step: 32 weight rows, then 8 R rows of activations.
template <int R>
inline void skinny_step(thread skinny_sums<R> &sums, threadgroup const float *patch)
{
    threadgroup const float *rows = patch + SKINNY_COLUMNS * SKINNY_STRIDE;
    for (uint k = 0; k < SKINNY_K; k += 8) {
        simdgroup_float8x8 left[R];
        for (uint i = 0; i < uint(R); i++)
            simdgroup_load(left[i], rows + i * 8 * SKINNY_STRIDE + k, SKINNY_STRIDE);
        for (uint j = 0; j < 4; j++) {
            simdgroup_float8x8 right;
            simdgroup_load(right, patch + j * 8 * SKINNY_STRIDE + k, SKINNY_STRIDE, ulong2(0),
                           true);
            for (uint i = 0; i < uint(R); i++)
                simdgroup_multiply_accumulate(sums.c[i][j], left[i], right, sums.c[i][j]);
        }
    }
}

// The simdgroup's sums [8 R, 32] into its patch.
template <int R>
inline void skinny_store(thread skinny_sums<R> &sums, threadgroup float *patch)
{
    for (uint i = 0; i < uint(R); i++)
        for (uint j = 0; j < 4; j++)
            simdgroup_store(sums.c[i][j], patch + i * 8 * SKINNY_COLUMNS + j * 8, SKINNY_COLUMNS);
}

// Element i of c: the sum over the four simdgroups. patches: f32 [4, patch_floats]
inline float skinny_total(threadgroup const float *patches, uint patch_floats, uint i)
{
    return patches[i] + patches[patch_floats + i] + patches[2 * patch_floats + i] +
           patches[3 * patch_floats + i];
}

#endif
