// Experts. Few rows: a simdgroup an output, the experts of a row side by side. Many rows: the
// pairs (row, expert) are sorted by expert on the device, and tiles of 32 pairs of one expert meet
// its dequantised weights in threadgroup memory. The shared expert counts as one more expert that
// every row chose, so that it rides along in the same launches.
#include "common.h"

// The best topk of logits [experts] (at most 1024), a simdgroup a row. Ties go to the lowest id.
kernel void moe_topk(device const float *logits [[buffer(0)]],
                     device const float *shared_logits [[buffer(1)]],
                     device uint *ids [[buffer(2)]], device float *weights [[buffer(3)]],
                     device float *shared_gate [[buffer(4)]], constant route_dims &d [[buffer(5)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]])
{
    device const float *l = logits + ulong(row) * d.experts;
    uint taken = 0; // bit i: expert i * 32 + lane
    float top = 0.0f;
    float chosen = 0.0f;
    float mine = 0.0f; // of the chosen expert number `lane`
    uint my_id = 0;
    for (uint i = 0; i < d.topk; i++) {
        float best = 0.0f;
        uint id = 0xffffffffu;
        for (uint e = lane; e < d.experts; e += 32) {
            bool is_free = (taken >> (e / 32) & 1u) == 0;
            if (is_free && (id == 0xffffffffu || l[e] > best)) {
                best = l[e];
                id = e;
            }
        }
        for (ushort step = 16; step > 0; step /= 2) {
            float other = simd_shuffle_xor(best, step);
            uint other_id = simd_shuffle_xor(id, step);
            bool wins = other_id != 0xffffffffu &&
                        (id == 0xffffffffu || other > best || (other == best && other_id < id));
            best = wins ? other : best;
            id = wins ? other_id : id;
        }
        if (id % 32 == lane)
            taken |= 1u << (id / 32);
        if (i == 0)
            top = best;
        float e = exp(best - top);
        chosen += e;
        if (i == lane) {
            mine = e;
            my_id = id;
        }
        if (lane == 0 && d.topk > 32) // rare: more than a lane each
            weights[ulong(row) * d.topk + i] = e;
        if (lane == 0 && d.topk > 32)
            ids[ulong(row) * d.topk + i] = id;
    }
    float total = 0.0f;
    for (uint e = lane; e < d.experts; e += 32)
        total += exp(l[e] - top);
    total = simd_sum(total);
    float scale = 1.0f / (d.renormalise != 0 ? chosen : total);
    if (lane < d.topk && d.topk <= 32) {
        weights[ulong(row) * d.topk + lane] = mine * scale;
        ids[ulong(row) * d.topk + lane] = my_id;
    }
    if (lane == 0) {
        for (uint i = 0; i < d.topk && d.topk > 32; i++)
            weights[ulong(row) * d.topk + i] *= scale;
        shared_gate[row] = sigmoid(shared_logits[row]);
    }
}

#define EXPERT_WEIGHTS                                                                             \
    device const uint *w0 [[buffer(4)]], device const bfloat *s0 [[buffer(5)]],                    \
        device const bfloat *b0 [[buffer(6)]], device const uint *w1 [[buffer(7)]],                \
        device const bfloat *s1 [[buffer(8)]], device const bfloat *b1 [[buffer(9)]],              \
        device const uint *w2 [[buffer(10)]], device const bfloat *s2 [[buffer(11)]],              \
        device const bfloat *b2 [[buffer(12)]], device const uint *w3 [[buffer(13)]],              \
        device const bfloat *s3 [[buffer(14)]], device const bfloat *b3 [[buffer(15)]]

// Threadgroup (4 outputs, slot, row), two simdgroups: act = silu(gate h) * (up h). Slot topk is
// the shared expert. w0 gate, w1 up, w2 shared gate, w3 shared up.
kernel void moe_gate_up_rows(device const float *h [[buffer(0)]],
                             device const uint *ids [[buffer(1)]],
                             device float *act [[buffer(2)]],
                             constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                             uint3 at [[threadgroup_position_in_grid]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]])
{
    bool shared = at.y == d.topk;
    uint width = shared ? d.shared_width : d.width;
    uint first = at.x * 4 + simdgroup * 2;
    if (first >= width)
        return;
    device const float *x = h + ulong(at.z) * d.hidden;
    float gate[2];
    float up[2];
    if (shared) {
        dot_rows<2>(w2, s2, b2, d.shared_gate, 0, first, x, lane, gate);
        dot_rows<2>(w3, s3, b3, d.shared_up, 0, first, x, lane, up);
    } else {
        ulong expert = ids[ulong(at.z) * d.topk + at.y];
        dot_rows<2>(w0, s0, b0, d.gate, expert * d.gate.stride, first, x, lane, gate);
        dot_rows<2>(w1, s1, b1, d.up, expert * d.up.stride, first, x, lane, up);
    }
    device float *to = act + (ulong(at.z) * (d.topk + 1) + at.y) * d.act_width + first;
    for (int r = 0; r < 2; r++) {
        float g = simd_sum(gate[r]);
        float v = silu(g) * simd_sum(up[r]);
        if (lane == 0 && first + uint(r) < width)
            to[r] = v;
    }
}

// Threadgroup (8 outputs, row), two simdgroups: x += sum over slots of weight * down(act).
// w0 down, w1 shared down.
kernel void moe_down_rows(device const float *act [[buffer(0)]],
                          device const uint *ids [[buffer(1)]], device float *x [[buffer(2)]],
                          constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                          device const float *weights [[buffer(16)]],
                          device const float *shared_gate [[buffer(17)]],
                          uint2 at [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]])
{
    uint first = at.x * 8 + simdgroup * 4;
    if (first >= d.hidden)
        return;
    ulong slots = ulong(at.y) * d.topk;
    device const float *from = act + ulong(at.y) * (d.topk + 1) * d.act_width;
    float sum[4];
    float part[4];
    dot_rows<4>(w1, s1, b1, d.shared_down, 0, first, from + d.topk * d.act_width, lane, sum);
    for (int r = 0; r < 4; r++)
        sum[r] *= shared_gate[at.y];
    for (uint slot = 0; slot < d.topk; slot++) {
        ulong expert = ids[slots + slot];
        dot_rows<4>(w0, s0, b0, d.down, expert * d.down.stride, first, from + slot * d.act_width,
                    lane, part);
        for (int r = 0; r < 4; r++)
            sum[r] += weights[slots + slot] * part[r];
    }
    for (int r = 0; r < 4; r++) {
        float v = simd_sum(sum[r]);
        if (lane == 0 && first + uint(r) < d.hidden)
            x[ulong(at.y) * d.hidden + first + uint(r)] += v;
    }
}

// ---- many rows -----------------------------------------------------------------------------
//
// Pair p < rows * topk is slot p % topk of row p / topk; pair rows * topk + r is the shared expert
// of row r. `order` lists the pairs by expert; a block is up to 32 of them of one expert, and
// blocks[i] = (expert, first in order, count). Blocks past the last have count 0.

// One threadgroup of 1024 threads: counts, a scan over the experts, the block list, the order.
// The order inside an expert is whatever the atomics give: no pair's result depends on it.
kernel void moe_sort(device const uint *ids [[buffer(0)]], device uint *order [[buffer(1)]],
                     device uint4 *blocks [[buffer(2)]], constant expert_dims &d [[buffer(3)]],
                     constant uint &block_limit [[buffer(4)]],
                     uint index [[thread_index_in_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]])
{
    threadgroup atomic_uint counts[1024];
    threadgroup uint2 totals[32];
    uint pairs = d.rows * d.topk;
    atomic_store_explicit(&counts[index], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < pairs; i += 1024)
        atomic_fetch_add_explicit(&counts[ids[i]], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint count = atomic_load_explicit(&counts[index], memory_order_relaxed);
    uint mine = (count + TILE_ROWS - 1) / TILE_ROWS;
    uint before = simd_prefix_exclusive_sum(count);
    uint blocks_before = simd_prefix_exclusive_sum(mine);
    if (lane == 31)
        totals[simdgroup] = uint2(before + count, blocks_before + mine);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint2 total = totals[lane];
    uint rows_ahead = simd_prefix_exclusive_sum(total.x);
    uint blocks_ahead = simd_prefix_exclusive_sum(total.y);
    uint routed = simd_sum(total.y);
    before += simd_shuffle(rows_ahead, ushort(simdgroup));
    blocks_before += simd_shuffle(blocks_ahead, ushort(simdgroup));
    for (uint i = 0; i < mine; i++)
        blocks[blocks_before + i] = uint4(index, before + i * TILE_ROWS,
                                          min(TILE_ROWS, count - i * TILE_ROWS), 0);
    uint shared = (d.rows + TILE_ROWS - 1) / TILE_ROWS;
    for (uint i = index; i < block_limit; i += 1024) {
        if (i >= routed && i < routed + shared)
            blocks[i] = uint4(d.experts, pairs + (i - routed) * TILE_ROWS,
                              min(TILE_ROWS, d.rows - (i - routed) * TILE_ROWS), 0);
        else if (i >= routed + shared)
            blocks[i] = uint4(0);
    }
    for (uint i = index; i < d.rows; i += 1024)
        order[pairs + i] = pairs + i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_store_explicit(&counts[index], before, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < pairs; i += 1024)
        order[atomic_fetch_add_explicit(&counts[ids[i]], 1u, memory_order_relaxed)] = i;
}

// Threadgroup (32 outputs, block): act[pair] = silu(gate h) * (up h). Columns 0..31 of the tile are
// gate's rows, 32..63 up's.
kernel void moe_gate_up_tile(device const float *h [[buffer(0)]],
                             device const uint *order [[buffer(1)]],
                             device float *act [[buffer(2)]],
                             constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                             device const uint4 *blocks [[buffer(16)]],
                             uint2 at [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float a[32 * 36];
    threadgroup float b[64 * 36];
    threadgroup float c[32 * 64];
    threadgroup uint pair[32];
    uint4 block = blocks[at.y];
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * 32;
    if (block.z == 0 || column0 >= width)
        return;
    uint pairs = d.rows * d.topk;
    if (index < block.z)
        pair[index] = order[block.y + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_sums sums;
    tile_clear(sums);
    for (uint k0 = 0; k0 < d.hidden; k0 += TILE_K) {
        for (uint i = index; i < TILE_ROWS * TILE_K; i += TILE_THREADS) {
            uint r = i / TILE_K;
            uint k = k0 + i % TILE_K;
            float v = 0.0f;
            if (r < block.z && k < d.hidden) {
                uint row = shared ? pair[r] - pairs : pair[r] / d.topk;
                v = h[ulong(row) * d.hidden + k];
            }
            a[r * TILE_STRIDE + i % TILE_K] = v;
        }
        for (uint i = index; i < TILE_COLUMNS * 4; i += TILE_THREADS) {
            uint column = column0 + i / 4 % 32;
            bool inside = column < width;
            bool is_gate = i < 128;
            threadgroup float *to = b + i / 4 * TILE_STRIDE + i % 4 * 8;
            uint k = k0 + i % 4 * 8;
            if (shared && is_gate)
                tile_stage_weights(to, w2, s2, b2, d.shared_gate, column, inside, k);
            else if (shared)
                tile_stage_weights(to, w3, s3, b3, d.shared_up, column, inside, k);
            else if (is_gate)
                tile_stage_weights(to, w0, s0, b0, d.gate, ulong(block.x) * d.gate.stride + column,
                                   inside, k);
            else
                tile_stage_weights(to, w1, s1, b1, d.up, ulong(block.x) * d.up.stride + column,
                                   inside, k);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_step(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store(sums, c, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < TILE_ROWS * 32; i += TILE_THREADS) {
        uint r = i / 32;
        uint column = column0 + i % 32;
        if (r < block.z && column < width)
            act[ulong(pair[r]) * d.act_width + column] =
                silu(c[r * TILE_COLUMNS + i % 32]) * c[r * TILE_COLUMNS + 32 + i % 32];
    }
}

// Threadgroup (64 outputs, block): out[pair] = down act[pair]. w0 down, w1 shared down.
kernel void moe_down_tile(device const float *act [[buffer(0)]],
                          device const uint *order [[buffer(1)]], device float *out [[buffer(2)]],
                          constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                          device const uint4 *blocks [[buffer(16)]],
                          uint2 at [[threadgroup_position_in_grid]],
                          uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float a[32 * 36];
    threadgroup float b[64 * 36];
    threadgroup float c[32 * 64];
    threadgroup uint pair[32];
    uint4 block = blocks[at.y];
    if (block.z == 0)
        return;
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * TILE_COLUMNS;
    if (index < block.z)
        pair[index] = order[block.y + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_sums sums;
    tile_clear(sums);
    for (uint k0 = 0; k0 < width; k0 += TILE_K) {
        for (uint i = index; i < TILE_ROWS * TILE_K; i += TILE_THREADS) {
            uint r = i / TILE_K;
            uint k = k0 + i % TILE_K;
            bool inside = r < block.z && k < width;
            a[r * TILE_STRIDE + i % TILE_K] = inside ? act[ulong(pair[r]) * d.act_width + k] : 0.0f;
        }
        for (uint i = index; i < TILE_COLUMNS * 4; i += TILE_THREADS) {
            uint column = column0 + i / 4;
            bool inside = column < d.hidden;
            threadgroup float *to = b + i / 4 * TILE_STRIDE + i % 4 * 8;
            uint k = k0 + i % 4 * 8;
            if (shared)
                tile_stage_weights(to, w1, s1, b1, d.shared_down, column, inside, k);
            else
                tile_stage_weights(to, w0, s0, b0, d.down, ulong(block.x) * d.down.stride + column,
                                   inside, k);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_step(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store(sums, c, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < TILE_ROWS * TILE_COLUMNS; i += TILE_THREADS) {
        uint r = i / TILE_COLUMNS;
        uint column = column0 + i % TILE_COLUMNS;
        if (r < block.z && column < d.hidden)
            out[ulong(pair[r]) * d.hidden + column] = c[i];
    }
}

// x[r] += sum over slots of weight * out[pair] + shared_gate * out[shared pair], in slot order.
kernel void moe_combine(device const float *out [[buffer(0)]], device float *x [[buffer(2)]],
                        constant expert_dims &d [[buffer(3)]],
                        device const float *weights [[buffer(16)]],
                        device const float *shared_gate [[buffer(17)]],
                        uint2 at [[threadgroup_position_in_grid]],
                        uint index [[thread_index_in_threadgroup]])
{
    uint k = at.x * 256 + index;
    if (k >= d.hidden)
        return;
    ulong pair = ulong(at.y) * d.topk;
    float sum = shared_gate[at.y] * out[(ulong(d.rows) * d.topk + at.y) * d.hidden + k];
    for (uint slot = 0; slot < d.topk; slot++)
        sum += weights[pair + slot] * out[(pair + slot) * d.hidden + k];
    x[ulong(at.y) * d.hidden + k] += sum;
}
