// Attention: norm, rotation and append; causal attention over the pages, split over positions.
//
// The pages are [pages, kv_heads, 256 positions, 256] in f32 or bf16; T is their type.
#include "common.h"

constant uint HEAD = 256;
constant uint PAGE = 256;
constant uint ROTATED = 64;

// Element index of a position of a sequence in the layer's pages.
inline ulong page_index(device const uint *table, uint pages_max, uint slot, uint pos,
                        uint kv_heads, uint kv_head)
{
    ulong page = table[ulong(slot) * pages_max + pos / PAGE];
    return ((page * kv_heads + kv_head) * PAGE + pos % PAGE) * HEAD;
}

// Threadgroup (row, head): a query head, then the K heads, then the V heads; a thread a dimension.
template <typename T>
kernel void append_kv(device const segment_dims *segments [[buffer(0)]],
                      constant append_dims &d [[buffer(1)]], device const float *qg [[buffer(2)]],
                      device const float *k [[buffer(3)]], device const float *v [[buffer(4)]],
                      device const float *q_norm [[buffer(5)]],
                      device const float *k_norm [[buffer(6)]],
                      device const uint *table [[buffer(7)]], device T *k_pages [[buffer(8)]],
                      device T *v_pages [[buffer(9)]], device float *q [[buffer(10)]],
                      uint2 at [[threadgroup_position_in_grid]],
                      uint dim [[thread_index_in_threadgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float part[32];
    threadgroup float pair[64];
    ulong row = at.x;
    uint segment = find_segment(segments, d.segments, at.x);
    uint pos = segments[segment].pos + at.x - segments[segment].row;
    bool is_q = at.y < d.heads;
    uint kv_head = (at.y - d.heads) % d.kv_heads;
    ulong page = 0;
    if (!is_q)
        page = page_index(table, d.pages_max, segments[segment].slot, pos, d.kv_heads, kv_head);
    if (at.y >= d.heads + d.kv_heads) {
        v_pages[page + dim] = T(v[(row * d.kv_heads + kv_head) * HEAD + dim]);
        return;
    }
    float x = is_q ? qg[(row * d.heads + at.y) * 2 * HEAD + dim]
                   : k[(row * d.kv_heads + kv_head) * HEAD + dim];
    float squares = group_sum(x * x, part, simdgroup, 8, lane);
    x *= rsqrt(squares / float(HEAD) + d.eps) * (is_q ? q_norm[dim] : k_norm[dim]);
    if (dim < ROTATED)
        pair[dim] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (dim < ROTATED) {
        // Positions go to 262,144 radians: the fast functions are not exact enough there.
        float angle = float(pos) * d.frequency[dim % (ROTATED / 2)];
        float other = pair[dim < ROTATED / 2 ? dim + ROTATED / 2 : dim - ROTATED / 2];
        float s = precise::sin(angle);
        x = x * precise::cos(angle) + (dim < ROTATED / 2 ? -other * s : other * s);
    }
    if (is_q)
        q[(row * d.heads + at.y) * HEAD + dim] = x;
    else
        k_pages[page + dim] = T(x);
}

template [[host_name("append_kv_bf16")]] kernel void
append_kv<bfloat>(device const segment_dims *, constant append_dims &, device const float *,
                  device const float *, device const float *, device const float *,
                  device const float *, device const uint *, device bfloat *, device bfloat *,
                  device float *, uint2, uint, uint, uint);
template [[host_name("append_kv_f32")]] kernel void
append_kv<float>(device const segment_dims *, constant append_dims &, device const float *,
                 device const float *, device const float *, device const float *,
                 device const float *, device const uint *, device float *, device float *,
                 device float *, uint2, uint, uint, uint);

// 8 neighbouring values of a page row: 16 bytes of bf16.
inline void load_8(device const bfloat *p, thread float *x)
{
    uint4 words = *(device const uint4 *)p;
    for (uint i = 0; i < 4; i++) {
        x[2 * i] = as_type<float>(words[i] << 16);
        x[2 * i + 1] = as_type<float>(words[i] & 0xffff0000u);
    }
}

inline void load_8(device const float *p, thread float *x)
{
    float4 low = *(device const float4 *)p;
    float4 high = *(device const float4 *)(p + 4);
    for (uint i = 0; i < 4; i++) {
        x[i] = low[i];
        x[4 + i] = high[i];
    }
}

constant uint ATTEND_SIMDGROUPS = 4;

// Threadgroup (block of H query heads of one KV head, split, row), four simdgroups. A simdgroup
// takes every fourth position; its lanes read a K row of 512 bytes side by side, 8 dimensions each,
// and all H heads use what was read. Softmax runs along; the four partial sums meet at the end.
// With one split y is the result; with more, `sums` and `stats` hold what attend_merge needs.
template <typename T, int H>
kernel void attend_split(device const segment_dims *segments [[buffer(0)]],
                         constant attend_dims &d [[buffer(1)]],
                         device const float *q [[buffer(2)]], device const float *qg [[buffer(3)]],
                         device const uint *table [[buffer(4)]],
                         device const T *k_pages [[buffer(5)]],
                         device const T *v_pages [[buffer(6)]], device float *y [[buffer(7)]],
                         device float *sums [[buffer(8)]], device float2 *stats [[buffer(9)]],
                         uint3 at [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float2 group_stats[4 * H];      // [simdgroup][head]: maximum, sum
    threadgroup float group_sums[4 * H * 256]; // [simdgroup][head][dim]
    uint group = d.heads / d.kv_heads;
    uint blocks = (group + uint(H) - 1) / uint(H);
    uint kv_head = at.x / blocks;
    uint head0 = kv_head * group + at.x % blocks * uint(H);
    uint heads = min(uint(H), (kv_head + 1) * group - head0);
    uint row = at.z;
    uint segment = find_segment(segments, d.segments, row);
    uint ctx = segments[segment].pos + row - segments[segment].row + 1;
    uint begin = at.y * d.split_positions;
    uint end = min(ctx, begin + d.split_positions);
    float query[H * 8];
    float sum[H * 8];
    float top[H];
    float total[H];
    for (int h = 0; h < H; h++) {
        uint head = head0 + min(uint(h), heads - 1);
        load_8(q + (ulong(row) * d.heads + head) * HEAD + lane * 8, query + h * 8);
        top[h] = LOWEST;
        total[h] = 0.0f;
        for (int i = 0; i < 8; i++)
            sum[h * 8 + i] = 0.0f;
    }
    for (uint p = begin + simdgroup; p < end; p += ATTEND_SIMDGROUPS) {
        uint slot = segments[segment].slot;
        ulong from = page_index(table, d.pages_max, slot, p, d.kv_heads, kv_head) + lane * 8;
        float key[8];
        float value[8];
        load_8(k_pages + from, key);
        load_8(v_pages + from, value);
        for (int h = 0; h < H; h++) {
            float score = 0.0f;
            for (int i = 0; i < 8; i++)
                score += query[h * 8 + i] * key[i];
            score = simd_sum(score) * 0.0625f;
            float highest = max(top[h], score);
            float shrink = exp(top[h] - highest);
            float weight = exp(score - highest);
            top[h] = highest;
            total[h] = total[h] * shrink + weight;
            for (int i = 0; i < 8; i++)
                sum[h * 8 + i] = sum[h * 8 + i] * shrink + weight * value[i];
        }
    }
    for (int h = 0; h < H; h++) {
        if (lane == 0)
            group_stats[simdgroup * uint(H) + uint(h)] = float2(top[h], total[h]);
        uint to = (simdgroup * uint(H) + uint(h)) * HEAD + lane * 8;
        for (uint i = 0; i < 8; i++)
            group_sums[to + i] = sum[uint(h) * 8 + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = 0; h < heads; h++) {
        float highest = LOWEST;
        for (uint s = 0; s < ATTEND_SIMDGROUPS; s++)
            highest = max(highest, group_stats[s * uint(H) + h].x);
        float scale[4];
        float all = 0.0f;
        for (uint s = 0; s < ATTEND_SIMDGROUPS; s++) {
            scale[s] = exp(group_stats[s * uint(H) + h].x - highest);
            all += group_stats[s * uint(H) + h].y * scale[s];
        }
        ulong head = ulong(row) * d.heads + head0 + h;
        for (uint dim = index; dim < HEAD; dim += 128) {
            float v = 0.0f;
            for (uint s = 0; s < ATTEND_SIMDGROUPS; s++)
                v += group_sums[(s * uint(H) + h) * HEAD + dim] * scale[s];
            if (d.splits == 1)
                y[head * HEAD + dim] = v / all * sigmoid(qg[head * 2 * HEAD + HEAD + dim]);
            else
                sums[(head * d.splits + at.y) * HEAD + dim] = v;
        }
        if (d.splits > 1 && index == 0)
            stats[head * d.splits + at.y] = float2(highest, all);
    }
}

#define ATTEND(name, type, count)                                                                  \
    template [[host_name(name)]] kernel void attend_split<type, count>(                            \
        device const segment_dims *, constant attend_dims &, device const float *,                 \
        device const float *, device const uint *, device const type *, device const type *,       \
        device float *, device float *, device float2 *, uint3, uint, uint, uint);
ATTEND("attend_split_bf16_1", bfloat, 1)
ATTEND("attend_split_bf16_2", bfloat, 2)
ATTEND("attend_split_bf16_4", bfloat, 4)
ATTEND("attend_split_f32_1", float, 1)
ATTEND("attend_split_f32_2", float, 2)
ATTEND("attend_split_f32_4", float, 4)

// Threadgroup (head, row), a thread a dimension: the splits' sums become y. Splits behind the
// row's last position have nothing and weigh nothing.
kernel void attend_merge(constant attend_dims &d [[buffer(1)]],
                         device const float *qg [[buffer(3)]],
                         device float *y [[buffer(7)]], device const float *sums [[buffer(8)]],
                         device const float2 *stats [[buffer(9)]],
                         uint2 at [[threadgroup_position_in_grid]],
                         uint dim [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    ulong head = ulong(at.y) * d.heads + at.x;
    float highest = LOWEST;
    for (uint s = lane; s < d.splits; s += 32)
        highest = max(highest, stats[head * d.splits + s].x);
    highest = simd_max(highest);
    float all = 0.0f;
    float v = 0.0f;
    for (uint s = 0; s < d.splits; s++) {
        float2 part = stats[head * d.splits + s];
        float scale = exp(part.x - highest);
        all += part.y * scale;
        v += sums[(head * d.splits + s) * HEAD + dim] * scale;
    }
    y[head * HEAD + dim] = v / all * sigmoid(qg[head * 2 * HEAD + HEAD + dim]);
}
