// Projections. Few rows: a simdgroup takes 4 outputs, each lane reads 16 bytes of codes at a time,
// and the codes meet x unrounded in f32: scale * sum(code x) + bias * sum(x). The norm before the
// projection costs nothing: its factor is one number a row, applied to the finished sum, and the
// squares are summed by the lanes on their way. Many rows: tiles on simdgroup matrices, weights
// dequantised tile by tile in threadgroup memory, all in f32.
#include "common.h"

// h[r] = rms_norm(x[select[r]]; gain), or the row itself. A threadgroup a row.
kernel void linear_norm_f32(device const float *x [[buffer(0)]],
                            device const uint *select [[buffer(1)]],
                            device const float *gain [[buffer(2)]], device float *h [[buffer(3)]],
                            constant norm_dims &d [[buffer(4)]],
                            uint row [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float part[32];
    ulong source = d.has_select != 0 ? select[row] : row;
    device const float *from = x + source * d.cols;
    device float *to = h + ulong(row) * d.cols;
    float squares = 0.0f;
    for (uint k = index; k < d.cols; k += threads)
        squares += from[k] * from[k];
    squares = group_sum(squares, part, simdgroup, simdgroups, lane);
    float scale = d.has_gain != 0 ? rsqrt(squares / float(d.cols) + d.eps) : 1.0f;
    for (uint k = index; k < d.cols; k += threads)
        to[k] = d.has_gain != 0 ? from[k] * scale * gain[k] : from[k];
}

constant int ROW_OUTPUTS = 4; // of a simdgroup

// The lane's share of the products of 4 weight rows with B rows x[from[b]..] * gain, and of the
// squares of x.
template <int B>
inline void linear_share(device const uint *data, device const bfloat *scales,
                         device const bfloat *biases, constant matrix_dims &m, uint row0,
                         device const float *x, thread const ulong *from,
                         device const float *gain, bool has_gain, uint lane,
                         thread float *sum, thread float *squares)
{
    ulong rows[ROW_OUTPUTS];
    for (int r = 0; r < ROW_OUTPUTS; r++)
        rows[r] = min(row0 + uint(r), m.rows - 1);
    for (int b = 0; b < B; b++) {
        squares[b] = 0.0f;
        for (int r = 0; r < ROW_OUTPUTS; r++)
            sum[b * ROW_OUTPUTS + r] = 0.0f;
    }
    if (!matrix_is_q4(m)) {
        for (uint k = lane; k < m.cols; k += 32) {
            float w[ROW_OUTPUTS];
            for (int r = 0; r < ROW_OUTPUTS; r++)
                w[r] = matrix_at(data, scales, biases, m, rows[r], k);
            for (int b = 0; b < B; b++) {
                float v = x[from[b] + k];
                squares[b] += v * v;
                v = has_gain ? v * gain[k] : v;
                for (int r = 0; r < ROW_OUTPUTS; r++)
                    sum[b * ROW_OUTPUTS + r] += w[r] * v;
            }
        }
        return;
    }
    uint blocks = m.cols / 32;
    for (uint block = lane; block < blocks; block += 32) {
        uint4 words[ROW_OUTPUTS];
        float part[B * ROW_OUTPUTS];
        float x_sum[B];
        for (int r = 0; r < ROW_OUTPUTS; r++)
            words[r] = load_codes(data + (rows[r] * blocks + block) * 4, m.wide);
        for (int b = 0; b < B; b++) {
            x_sum[b] = 0.0f;
            for (int r = 0; r < ROW_OUTPUTS; r++)
                part[b * ROW_OUTPUTS + r] = 0.0f;
        }
        for (uint w = 0; w < 8; w++) {
            uint k = block * 32 + w * 4;
            float4 codes[ROW_OUTPUTS];
            for (int r = 0; r < ROW_OUTPUTS; r++) {
                uint c = words[r][w / 2] >> (w % 2 * 16);
                codes[r] = float4(float(c & 15u), float(c >> 4 & 15u), float(c >> 8 & 15u),
                                  float(c >> 12 & 15u));
            }
            for (int b = 0; b < B; b++) {
                float4 v = *(device const float4 *)(x + from[b] + k);
                squares[b] += dot(v, v);
                v = has_gain ? v * *(device const float4 *)(gain + k) : v;
                x_sum[b] += v.x + v.y + v.z + v.w;
                for (int r = 0; r < ROW_OUTPUTS; r++)
                    part[b * ROW_OUTPUTS + r] += dot(codes[r], v);
            }
        }
        for (int r = 0; r < ROW_OUTPUTS; r++) {
            ulong group = rows[r] * (m.cols / m.group) + block * 32 / m.group;
            float scale = float(scales[group]);
            float bias = float(biases[group]);
            for (int b = 0; b < B; b++)
                sum[b * ROW_OUTPUTS + r] += scale * part[b * ROW_OUTPUTS + r] + bias * x_sum[b];
        }
    }
}

// What both kernels for few rows do: threadgroup (tile, group of B rows), two simdgroups.
template <int B>
inline void linear_rows(device const float *x, device const uint *select, device const float *gain,
                        constant linear_dims &d, device const uint *data,
                        device const bfloat *scales, device const bfloat *biases,
                        device float *out, constant matrix_dims &m, uint row0, uint batch0,
                        uint lane)
{
    ulong from[B];
    for (int b = 0; b < B; b++) {
        uint r = min(batch0 + uint(b), d.rows - 1);
        from[b] = ulong(d.has_select != 0 ? select[r] : r) * d.cols;
    }
    float sum[B * ROW_OUTPUTS];
    float squares[B];
    linear_share<B>(data, scales, biases, m, row0, x, from, gain, d.has_gain != 0, lane, sum,
                    squares);
    for (int b = 0; b < B; b++) {
        float scale = 1.0f;
        if (d.has_gain != 0)
            scale = rsqrt(simd_sum(squares[b]) / float(d.cols) + d.eps);
        for (int r = 0; r < ROW_OUTPUTS; r++) {
            float v = simd_sum(sum[b * ROW_OUTPUTS + r]) * scale;
            uint row = row0 + uint(r);
            if (lane == 0 && row < m.rows && batch0 + uint(b) < d.rows) {
                ulong at = ulong(batch0 + uint(b)) * m.rows + row;
                out[at] = d.add != 0 ? out[at] + v : v;
            }
        }
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

template <int B>
kernel void linear_f32_rows(device const float *x [[buffer(0)]],
                            device const uint *select [[buffer(1)]],
                            device const float *gain [[buffer(2)]],
                            constant linear_dims &d [[buffer(3)]], LINEAR_MATRICES,
                            device float *h [[buffer(20)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]])
{
    uint batch0 = at.y * uint(B);
    if (at.x == d.first_tile[4]) { // one tile more: the normalised rows themselves
        for (uint b = simdgroup; b < uint(B); b += 2)
            if (batch0 + b < d.rows)
                linear_write_h(x, gain, d, h, batch0 + b, lane);
        return;
    }
    LINEAR_CHOOSE(at.x)
    uint row0 = ((at.x - d.first_tile[which]) * 2 + simdgroup) * uint(ROW_OUTPUTS);
    if (row0 < m.rows)
        linear_rows<B>(x, select, gain, d, data, scales, biases, out, m, row0, batch0, lane);
}

template [[host_name("linear_f32_rows_1")]] kernel void
linear_f32_rows<1>(device const float *, device const uint *, device const float *,
                   constant linear_dims &, device const uint *, device const bfloat *,
                   device const bfloat *, device float *, device const uint *,
                   device const bfloat *, device const bfloat *, device float *,
                   device const uint *, device const bfloat *, device const bfloat *,
                   device float *, device const uint *, device const bfloat *,
                   device const bfloat *, device float *, device float *, uint2, uint, uint);
template [[host_name("linear_f32_rows_4")]] kernel void
linear_f32_rows<4>(device const float *, device const uint *, device const float *,
                   constant linear_dims &, device const uint *, device const bfloat *,
                   device const bfloat *, device float *, device const uint *,
                   device const bfloat *, device const bfloat *, device float *,
                   device const uint *, device const bfloat *, device const bfloat *,
                   device float *, device const uint *, device const bfloat *,
                   device const bfloat *, device float *, device float *, uint2, uint, uint);

// Threadgroup (tile of 64 outputs, 32 rows). x: f32 [rows, cols], normalised and selected already.
kernel void linear_f32_tile(device const float *x [[buffer(0)]],
                            constant linear_dims &d [[buffer(3)]], LINEAR_MATRICES,
                            uint2 at [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float a[32 * 36];
    threadgroup float b[64 * 36];
    threadgroup float c[32 * 64];
    LINEAR_CHOOSE(at.x)
    uint column0 = (at.x - d.first_tile[which]) * TILE_COLUMNS;
    uint row0 = at.y * TILE_ROWS;
    tile_sums sums;
    tile_clear(sums);
    for (uint k0 = 0; k0 < d.cols; k0 += TILE_K) {
        for (uint i = index; i < TILE_ROWS * TILE_K; i += TILE_THREADS) {
            uint r = row0 + i / TILE_K;
            uint k = k0 + i % TILE_K;
            bool inside = r < d.rows && k < d.cols;
            a[i / TILE_K * TILE_STRIDE + i % TILE_K] = inside ? x[ulong(r) * d.cols + k] : 0.0f;
        }
        for (uint i = index; i < TILE_COLUMNS * 4; i += TILE_THREADS) {
            uint row = column0 + i / 4;
            tile_stage_weights(b + i / 4 * TILE_STRIDE + i % 4 * 8, data, scales, biases, m, row,
                               row < m.rows, k0 + i % 4 * 8);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_step(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store(sums, c, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < TILE_ROWS * TILE_COLUMNS; i += TILE_THREADS) {
        uint r = row0 + i / TILE_COLUMNS;
        uint column = column0 + i % TILE_COLUMNS;
        if (r < d.rows && column < m.rows) {
            ulong to = ulong(r) * m.rows + column;
            out[to] = d.add != 0 ? out[to] + c[i] : c[i];
        }
    }
}
