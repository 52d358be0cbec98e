// Projections. Up to 4 rows: a simdgroup takes 4 outputs, each lane reads 16 bytes of codes at a
// time, and the codes meet x unrounded in f32: scale * sum(code x) + bias * sum(x). Up to 16:
// skinny products, which read each weight once. The norm before these costs nothing: its factor
// is one number a row, applied to the finished sum, and the squares are summed on the way. Many
// rows: tiles on simdgroup matrices, weights dequantised tile by tile in threadgroup memory. All
// in f32.
#include "rows.h"

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
    uint row0 = ((at.x - d.first_tile[which]) * 2 + simdgroup) * ROW_OUTPUTS;
    if (row0 >= m.rows)
        return;
    float4 found[B];
    linear_rows<B>(x, select, gain, d, data, scales, biases, m, row0, batch0, lane, found);
    for (int b = 0; b < B; b++)
        for (uint r = 0; r < ROW_OUTPUTS; r++) {
            if (lane != 0 || row0 + r >= m.rows || batch0 + uint(b) >= d.rows)
                continue;
            ulong to = ulong(batch0 + uint(b)) * m.rows + row0 + r;
            out[to] = d.add != 0 ? out[to] + found[b][r] : found[b][r];
        }
}

#define LINEAR_ROWS(name, rows)                                                                    \
    template [[host_name(name)]] kernel void linear_f32_rows<rows>(                                \
        device const float *, device const uint *, device const float *, constant linear_dims &,   \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device float *, uint2, uint, uint);
LINEAR_ROWS("linear_f32_rows_1", 1)
LINEAR_ROWS("linear_f32_rows_4", 4)

// Threadgroup (tile of 32 outputs), all rows: at most 8 R.
template <int R>
kernel void linear_f32_skinny(device const float *x [[buffer(0)]],
                              device const uint *select [[buffer(1)]],
                              device const float *gain [[buffer(2)]],
                              constant linear_dims &d [[buffer(3)]], LINEAR_MATRICES,
                              device float *h [[buffer(20)]],
                              uint2 at [[threadgroup_position_in_grid]],
                              uint index [[thread_index_in_threadgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 memory[4 * (32 + 8 * R) * 9];
    threadgroup float row_squares[4 * 8 * R]; // [simdgroup][row]
    uint patch_floats = (32 + 8 * uint(R)) * SKINNY_STRIDE;
    if (at.x == d.first_tile[4]) { // one tile more: the normalised rows themselves
        for (uint r = simdgroup; r < d.rows; r += 4)
            linear_write_h(x, gain, d, h, r, lane);
        return;
    }
    LINEAR_CHOOSE(at.x)
    uint column0 = (at.x - d.first_tile[which]) * SKINNY_COLUMNS;
    threadgroup float *patches = (threadgroup float *)memory;
    threadgroup float *patch = patches + simdgroup * patch_floats;
    threadgroup float *rows = patch + SKINNY_COLUMNS * SKINNY_STRIDE;
    ulong from[2 * R]; // the lane stages four columns of rows lane / 8, lane / 8 + 4, ..
    float squares[2 * R];
    for (uint i = 0; i < 2 * uint(R); i++) {
        uint r = min(lane / 8 + i * 4, d.rows - 1);
        from[i] = ulong(d.has_select != 0 ? select[r] : r) * d.cols;
        squares[i] = 0.0f;
    }
    skinny_sums<R> sums;
    skinny_clear<R>(sums);
    for (uint k0 = simdgroup * SKINNY_K; k0 < d.cols; k0 += 4 * SKINNY_K) {
        skinny_stage_weights(patch + lane * SKINNY_STRIDE, data, scales, biases, m,
                             column0 + lane, column0 + lane < m.rows, k0);
        uint k = k0 + lane % 8 * 4;
        float4 g = float4(1.0f);
        if (d.has_gain != 0)
            g = load_4(gain, true, k, d.cols, d.cols);
        for (uint i = 0; i < 2 * uint(R); i++) {
            float4 v = load_4(x + from[i], lane / 8 + i * 4 < d.rows, k, d.cols, d.cols);
            squares[i] += dot(v, v);
            *(threadgroup float4 *)(rows + (lane / 8 + i * 4) * SKINNY_STRIDE + lane % 8 * 4) =
                v * g;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        skinny_step<R>(sums, patch);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    skinny_store<R>(sums, patch);
    for (uint i = 0; i < 2 * uint(R); i++) {
        float all = squares[i];
        for (ushort step = 4; step > 0; step /= 2)
            all += simd_shuffle_xor(all, step);
        if (lane % 8 == 0)
            row_squares[simdgroup * 8 * uint(R) + lane / 8 + i * 4] = all;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 8 * uint(R) * SKINNY_COLUMNS; i += SKINNY_THREADS) {
        uint r = i / SKINNY_COLUMNS;
        uint column = column0 + i % SKINNY_COLUMNS;
        if (r >= d.rows || column >= m.rows)
            continue;
        float v = skinny_total(patches, patch_floats, i);
        if (d.has_gain != 0)
            v *= rsqrt(skinny_total(row_squares, 8 * uint(R), r) / float(d.cols) + d.eps);
        ulong to = ulong(r) * m.rows + column;
        out[to] = d.add != 0 ? out[to] + v : v;
    }
}

#define LINEAR_SKINNY(name, blocks)                                                                \
    template [[host_name(name)]] kernel void linear_f32_skinny<blocks>(                            \
        device const float *, device const uint *, device const float *, constant linear_dims &,   \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device const uint *, device const bfloat *, device const bfloat *, device float *,         \
        device float *, uint2, uint, uint, uint);
LINEAR_SKINNY("linear_f32_skinny_8", 1)
LINEAR_SKINNY("linear_f32_skinny_16", 2)

// Threadgroup (tile of 64 outputs, 16 I rows). x: f32 [rows, cols], normalised and selected.
template <int I>
kernel void linear_f32_tile(device const float *x [[buffer(0)]],
                            constant linear_dims &d [[buffer(3)]], LINEAR_MATRICES,
                            uint2 at [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float4 memory[(16 * I + 64) * 9]; // a and b, then c
    threadgroup float *a = (threadgroup float *)memory;
    threadgroup float *b = a + 16 * uint(I) * TILE_STRIDE;
    LINEAR_CHOOSE(at.x)
    uint column0 = (at.x - d.first_tile[which]) * TILE_COLUMNS;
    uint row0 = at.y * 16 * uint(I);
    tile_sums<I> sums;
    tile_clear<I>(sums);
    for (uint k0 = 0; k0 < d.cols; k0 += TILE_K) {
        for (uint i = index; i < 16 * uint(I) * 8; i += TILE_THREADS) {
            uint r = row0 + i / 8;
            *(threadgroup float4 *)(a + i / 8 * TILE_STRIDE + i % 8 * 4) =
                load_4(x + ulong(r) * d.cols, r < d.rows, k0 + i % 8 * 4, d.cols, d.cols);
        }
        for (uint i = index; i < TILE_COLUMNS * 4; i += TILE_THREADS) {
            uint row = column0 + i / 4;
            tile_stage_weights(b + i / 4 * TILE_STRIDE + i % 4 * 8, data, scales, biases, m, row,
                               row < m.rows, k0 + i % 4 * 8);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_step<I>(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store<I>(sums, a, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 16 * uint(I) * TILE_COLUMNS; i += TILE_THREADS) {
        uint r = row0 + i / TILE_COLUMNS;
        uint column = column0 + i % TILE_COLUMNS;
        if (r < d.rows && column < m.rows) {
            ulong to = ulong(r) * m.rows + column;
            out[to] = d.add != 0 ? out[to] + a[i] : a[i];
        }
    }
}

#define LINEAR_TILE(name, blocks)                                                                  \
    template [[host_name(name)]] kernel void linear_f32_tile<blocks>(                              \
        device const float *, constant linear_dims &, device const uint *, device const bfloat *,  \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, device const uint *, device const bfloat *,         \
        device const bfloat *, device float *, uint2, uint, uint);
LINEAR_TILE("linear_f32_tile_32", 2)
LINEAR_TILE("linear_f32_tile_64", 4)
