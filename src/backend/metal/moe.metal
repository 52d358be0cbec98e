// Experts. Few rows: a simdgroup an output, the experts of a row side by side. More: the pairs
// (row, expert) are sorted by expert on the device, and blocks of 8, 32 or 64 pairs of one expert
// meet its dequantised weights in threadgroup memory. The shared expert counts as one more expert
// that every row chose, so that it rides along in the same launches.
#include "common.h"

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

// The lane's share of four outputs of sum over slots of weight * down(act), for 4-bit weights. The
// experts' inputs are short, so a simdgroup takes the blocks of 32 of all slots as one row: all its
// lanes have work. act: f32 [topk + 1, act_width], the shared expert last.
inline float4 moe_down_share(device const float *act, device const uint *ids,
                             device const float *weights, float shared_gate,
                             constant expert_dims &d, device const uint *w0,
                             device const bfloat *s0, device const bfloat *b0,
                             device const uint *w1, device const bfloat *s1,
                             device const bfloat *b1, uint first, uint lane)
{
    float4 sum = float4(0.0f);
    uint routed_blocks = d.width / 32;
    uint routed = d.topk * routed_blocks;
    for (uint item = lane; item < routed + d.shared_width / 32; item += 32) {
        bool shared = item >= routed;
        uint slot = shared ? d.topk : item / routed_blocks;
        uint block = shared ? item - routed : item % routed_blocks;
        uint cols = shared ? d.shared_width : d.width;
        uint group = shared ? d.shared_down.group : d.down.group;
        uint wide = shared ? d.shared_down.wide : d.down.wide;
        float factor = shared ? shared_gate : weights[slot];
        ulong row0 = shared ? 0 : ulong(ids[slot]) * d.down.stride;
        device const uint *data = shared ? w1 : w0;
        device const bfloat *scales = shared ? s1 : s0;
        device const bfloat *biases = shared ? b1 : b0;
        device const float4 *x = (device const float4 *)(act + slot * d.act_width + block * 32);
        uint4 words[4];
        float4 scale;
        float4 bias;
        for (uint r = 0; r < 4; r++) {
            ulong row = row0 + min(first + r, d.hidden - 1);
            words[r] = load_codes(data + (row * (cols / 32) + block) * 4, wide);
            ulong at = row * (cols / group) + block * 32 / group;
            scale[r] = float(scales[at]);
            bias[r] = float(biases[at]);
        }
        float4 part = float4(0.0f);
        float x_sum = 0.0f;
        for (uint w = 0; w < 8; w++) {
            float4 v = x[w];
            x_sum += v.x + v.y + v.z + v.w;
            for (uint r = 0; r < 4; r++)
                part[r] += dot(codes_4(words[r][w / 2] >> w % 2 * 16), v);
        }
        sum += factor * (scale * part + bias * x_sum);
    }
    return sum;
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
    float4 sum;
    if (matrix_is_q4(d.down) && matrix_is_q4(d.shared_down)) {
        sum = moe_down_share(from, ids + slots, weights + slots, shared_gate[at.y], d, w0, s0, b0,
                             w1, s1, b1, first, lane);
    } else {
        float part[4];
        dot_rows<4>(w1, s1, b1, d.shared_down, 0, first, from + d.topk * d.act_width, lane, part);
        for (uint r = 0; r < 4; r++)
            sum[r] = shared_gate[at.y] * part[r];
        for (uint slot = 0; slot < d.topk; slot++) {
            ulong expert = ids[slots + slot];
            dot_rows<4>(w0, s0, b0, d.down, expert * d.down.stride, first,
                        from + slot * d.act_width, lane, part);
            for (uint r = 0; r < 4; r++)
                sum[r] += weights[slots + slot] * part[r];
        }
    }
    for (uint r = 0; r < 4; r++) {
        float v = simd_sum(sum[r]);
        if (lane == 0 && first + r < d.hidden)
            x[ulong(at.y) * d.hidden + first + r] += v;
    }
}

// ---- many rows -----------------------------------------------------------------------------
//
// Pair p < rows * topk is slot p % topk of row p / topk; pair rows * topk + r is the shared expert
// of row r. `order` lists the pairs by expert; a block is up to block_rows of them of one
// expert, and blocks[i] = (expert, first in order, count). Blocks past the last have count 0.

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
    uint mine = (count + d.block_rows - 1) / d.block_rows;
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
        blocks[blocks_before + i] = uint4(index, before + i * d.block_rows,
                                          min(d.block_rows, count - i * d.block_rows), 0);
    uint shared = (d.rows + d.block_rows - 1) / d.block_rows;
    for (uint i = index; i < block_limit; i += 1024) {
        if (i >= routed && i < routed + shared)
            blocks[i] = uint4(d.experts, pairs + (i - routed) * d.block_rows,
                              min(d.block_rows, d.rows - (i - routed) * d.block_rows), 0);
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
template <int I>
kernel void moe_gate_up_tile(device const float *h [[buffer(0)]],
                             device const uint *order [[buffer(1)]],
                             device float *act [[buffer(2)]],
                             constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                             device const uint4 *blocks [[buffer(16)]],
                             uint2 at [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float4 memory[(16 * I + 64) * 9]; // a and b, then c
    threadgroup uint pair[16 * I];
    threadgroup float *a = (threadgroup float *)memory;
    threadgroup float *b = a + 16 * uint(I) * TILE_STRIDE;
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
    tile_sums<I> sums;
    tile_clear<I>(sums);
    for (uint k0 = 0; k0 < d.hidden; k0 += TILE_K) {
        for (uint i = index; i < 16 * uint(I) * 8; i += TILE_THREADS) {
            uint first = pair[min(i / 8, block.z - 1)];
            uint row = shared ? first - pairs : first / d.topk;
            *(threadgroup float4 *)(a + i / 8 * TILE_STRIDE + i % 8 * 4) =
                load_4(h + ulong(row) * d.hidden, i / 8 < block.z, k0 + i % 8 * 4, d.hidden,
                       d.hidden);
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
        tile_step<I>(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store<I>(sums, a, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 16 * uint(I) * 32; i += TILE_THREADS) {
        uint r = i / 32;
        uint column = column0 + i % 32;
        if (r < block.z && column < width)
            act[ulong(pair[r]) * d.act_width + column] =
                silu(a[r * TILE_COLUMNS + i % 32]) * a[r * TILE_COLUMNS + 32 + i % 32];
    }
}

#define EXPERT_TILE(kernel_name, name, blocks)                                                     \
    template [[host_name(name)]] kernel void kernel_name<blocks>(                                  \
        device const float *, device const uint *, device float *, constant expert_dims &,         \
        device const uint *, device const bfloat *, device const bfloat *, device const uint *,    \
        device const bfloat *, device const bfloat *, device const uint *, device const bfloat *,  \
        device const bfloat *, device const uint *, device const bfloat *, device const bfloat *,  \
        device const uint4 *, uint2, uint, uint);
EXPERT_TILE(moe_gate_up_tile, "moe_gate_up_tile_32", 2)
EXPERT_TILE(moe_gate_up_tile, "moe_gate_up_tile_64", 4)

// Threadgroup (64 outputs, block): out[pair] = down act[pair]. w0 down, w1 shared down.
template <int I>
kernel void moe_down_tile(device const float *act [[buffer(0)]],
                          device const uint *order [[buffer(1)]], device float *out [[buffer(2)]],
                          constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                          device const uint4 *blocks [[buffer(16)]],
                          uint2 at [[threadgroup_position_in_grid]],
                          uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float4 memory[(16 * I + 64) * 9]; // a and b, then c
    threadgroup uint pair[16 * I];
    threadgroup float *a = (threadgroup float *)memory;
    threadgroup float *b = a + 16 * uint(I) * TILE_STRIDE;
    uint4 block = blocks[at.y];
    if (block.z == 0)
        return;
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * TILE_COLUMNS;
    if (index < block.z)
        pair[index] = order[block.y + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_sums<I> sums;
    tile_clear<I>(sums);
    for (uint k0 = 0; k0 < width; k0 += TILE_K) {
        for (uint i = index; i < 16 * uint(I) * 8; i += TILE_THREADS) {
            device const float *row = act + ulong(pair[min(i / 8, block.z - 1)]) * d.act_width;
            *(threadgroup float4 *)(a + i / 8 * TILE_STRIDE + i % 8 * 4) =
                load_4(row, i / 8 < block.z, k0 + i % 8 * 4, width, d.act_width);
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
        tile_step<I>(sums, a, b, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    tile_store<I>(sums, a, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 16 * uint(I) * TILE_COLUMNS; i += TILE_THREADS) {
        uint r = i / TILE_COLUMNS;
        uint column = column0 + i % TILE_COLUMNS;
        if (r < block.z && column < d.hidden)
            out[ulong(pair[r]) * d.hidden + column] = a[i];
    }
}

EXPERT_TILE(moe_down_tile, "moe_down_tile_32", 2)
EXPERT_TILE(moe_down_tile, "moe_down_tile_64", 4)

// ---- blocks of 8 pairs: few rows an expert ---------------------------------------------------

// Threadgroup (16 outputs, block): act[pair] = silu(gate h) * (up h). Lanes 0..15 stage gate's
// rows, 16..31 up's.
kernel void moe_gate_up_skinny(device const float *h [[buffer(0)]],
                               device const uint *order [[buffer(1)]],
                               device float *act [[buffer(2)]],
                               constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                               device const uint4 *blocks [[buffer(16)]],
                               uint2 at [[threadgroup_position_in_grid]],
                               uint index [[thread_index_in_threadgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 memory[4 * 40 * 9];
    uint patch_floats = 40 * SKINNY_STRIDE;
    uint4 block = blocks[at.y];
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    uint column0 = at.x * 16;
    if (block.z == 0 || column0 >= width)
        return;
    threadgroup float *patches = (threadgroup float *)memory;
    threadgroup float *patch = patches + simdgroup * patch_floats;
    threadgroup float *rows = patch + SKINNY_COLUMNS * SKINNY_STRIDE;
    uint pairs = d.rows * d.topk;
    ulong from[2];
    for (uint i = 0; i < 2; i++) {
        uint pair = order[block.y + min(lane / 8 + i * 4, block.z - 1)];
        from[i] = ulong(shared ? pair - pairs : pair / d.topk) * d.hidden;
    }
    uint column = column0 + lane % 16;
    bool inside = column < width;
    skinny_sums<1> sums;
    skinny_clear<1>(sums);
    for (uint k0 = simdgroup * SKINNY_K; k0 < d.hidden; k0 += 4 * SKINNY_K) {
        threadgroup float *to = patch + lane * SKINNY_STRIDE;
        if (shared && lane < 16)
            skinny_stage_weights(to, w2, s2, b2, d.shared_gate, column, inside, k0);
        else if (shared)
            skinny_stage_weights(to, w3, s3, b3, d.shared_up, column, inside, k0);
        else if (lane < 16)
            skinny_stage_weights(to, w0, s0, b0, d.gate, ulong(block.x) * d.gate.stride + column,
                                 inside, k0);
        else
            skinny_stage_weights(to, w1, s1, b1, d.up, ulong(block.x) * d.up.stride + column,
                                 inside, k0);
        for (uint i = 0; i < 2; i++) {
            uint r = lane / 8 + i * 4;
            *(threadgroup float4 *)(rows + r * SKINNY_STRIDE + lane % 8 * 4) =
                load_4(h + from[i], r < block.z, k0 + lane % 8 * 4, d.hidden, d.hidden);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        skinny_step<1>(sums, patch);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    skinny_store<1>(sums, patch);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint r = index / 16; // 8 rows of 16 outputs: one a thread
    if (r < block.z && column < width) {
        uint c = r * SKINNY_COLUMNS + index % 16;
        float gate = skinny_total(patches, patch_floats, c);
        float up = skinny_total(patches, patch_floats, c + 16);
        act[ulong(order[block.y + r]) * d.act_width + column] = silu(gate) * up;
    }
}

// Threadgroup (32 outputs, block): out[pair] = down act[pair]. w0 down, w1 shared down.
kernel void moe_down_skinny(device const float *act [[buffer(0)]],
                            device const uint *order [[buffer(1)]],
                            device float *out [[buffer(2)]],
                            constant expert_dims &d [[buffer(3)]], EXPERT_WEIGHTS,
                            device const uint4 *blocks [[buffer(16)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 memory[4 * 40 * 9];
    uint patch_floats = 40 * SKINNY_STRIDE;
    uint4 block = blocks[at.y];
    if (block.z == 0)
        return;
    bool shared = block.x == d.experts;
    uint width = shared ? d.shared_width : d.width;
    threadgroup float *patches = (threadgroup float *)memory;
    threadgroup float *patch = patches + simdgroup * patch_floats;
    threadgroup float *rows = patch + SKINNY_COLUMNS * SKINNY_STRIDE;
    ulong from[2];
    for (uint i = 0; i < 2; i++)
        from[i] = ulong(order[block.y + min(lane / 8 + i * 4, block.z - 1)]) * d.act_width;
    uint column0 = at.x * SKINNY_COLUMNS;
    uint column = column0 + lane;
    bool inside = column < d.hidden;
    skinny_sums<1> sums;
    skinny_clear<1>(sums);
    for (uint k0 = simdgroup * SKINNY_K; k0 < width; k0 += 4 * SKINNY_K) {
        threadgroup float *to = patch + lane * SKINNY_STRIDE;
        if (shared)
            skinny_stage_weights(to, w1, s1, b1, d.shared_down, column, inside, k0);
        else
            skinny_stage_weights(to, w0, s0, b0, d.down, ulong(block.x) * d.down.stride + column,
                                 inside, k0);
        for (uint i = 0; i < 2; i++) {
            uint r = lane / 8 + i * 4;
            *(threadgroup float4 *)(rows + r * SKINNY_STRIDE + lane % 8 * 4) =
                load_4(act + from[i], r < block.z, k0 + lane % 8 * 4, width, d.act_width);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        skinny_step<1>(sums, patch);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    skinny_store<1>(sums, patch);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 8 * SKINNY_COLUMNS; i += SKINNY_THREADS) {
        uint r = i / SKINNY_COLUMNS;
        uint to = column0 + i % SKINNY_COLUMNS;
        if (r < block.z && to < d.hidden)
            out[ulong(order[block.y + r]) * d.hidden + to] =
                skinny_total(patches, patch_floats, i);
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
