// Attention: norm, rotation and append; causal attention over the pages, a row at a time (decode)
// or in tiles of query rows (prefill, speculation), both split over positions.
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

// A segment of tile_min_rows rows or more goes in tiles, a shorter one row by row.
inline tile_place attend_place(device const segment_dims *segments, constant attend_dims &d,
                               uint index)
{
    return find_tile(segments, d.segments, d.tile_min_rows, d.tiled, d.tile_rows, index);
}

constant uint ATTEND_SIMDGROUPS = 4; // of a block of heads

// Threadgroup (one or two blocks of H query heads of one KV head, split, row of a short segment);
// four simdgroups a block. A simdgroup takes every fourth position; its lanes read a K row of 512
// bytes side by side, 8 dimensions each, and all H heads use what was read. A second block reads
// the same rows at the same time, so that they come from the cache. Softmax runs along; a block's
// four partial sums are then added in two halving steps. With one split y is the result; with
// more, `sums` and `stats` hold what attend_merge needs.
template <typename T, int H>
kernel void attend_split(device const segment_dims *segments [[buffer(0)]],
                         constant attend_dims &d [[buffer(1)]],
                         device const float *q [[buffer(2)]], device const float *qg [[buffer(3)]],
                         device const uint *table [[buffer(4)]],
                         device const T *k_pages [[buffer(5)]],
                         device const T *v_pages [[buffer(6)]], device float *y [[buffer(7)]],
                         device float *sums [[buffer(8)]], device float2 *stats [[buffer(9)]],
                         uint3 at [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float2 half_stats[2 * 2 * H];     // [block][simdgroup][head]: maximum, sum
    threadgroup float half_sums[2 * 2 * H * 256]; // [block][simdgroup][head][dim]
    uint group = d.heads / d.kv_heads;
    uint taken = simdgroups / ATTEND_SIMDGROUPS; // blocks of this threadgroup
    uint together = taken * uint(H);
    uint parts = (group + together - 1) / together;
    uint kv_head = at.x / parts;
    uint part_of = simdgroup % ATTEND_SIMDGROUPS;
    uint block = simdgroup / ATTEND_SIMDGROUPS;
    uint head0 = kv_head * group + at.x % parts * together + block * uint(H);
    uint last = (kv_head + 1) * group - 1;
    tile_place place = attend_place(segments, d, at.z);
    uint row = place.row;
    uint slot = segments[place.segment].slot;
    uint ctx = segments[place.segment].pos + row - segments[place.segment].row + 1;
    uint begin = at.y * d.split_positions;
    uint end = min(ctx, begin + d.split_positions);
    float query[H * 8];
    float sum[H * 8];
    float top[H];
    float total[H];
    for (int h = 0; h < H; h++) {
        uint head = min(head0 + uint(h), last);
        load_8(q + (ulong(row) * d.heads + head) * HEAD + lane * 8, query + h * 8);
        top[h] = LOWEST;
        total[h] = 0.0f;
        for (int i = 0; i < 8; i++)
            sum[h * 8 + i] = 0.0f;
    }
    for (uint p = begin + part_of; p < end; p += ATTEND_SIMDGROUPS) {
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
    for (uint half_of = ATTEND_SIMDGROUPS / 2; half_of > 0; half_of /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (part_of >= half_of && part_of < 2 * half_of)
            for (uint h = 0; h < uint(H); h++) {
                uint to = (block * 2 + part_of - half_of) * uint(H) + h;
                if (lane == 0)
                    half_stats[to] = float2(top[h], total[h]);
                for (uint i = 0; i < 8; i++)
                    half_sums[to * HEAD + lane * 8 + i] = sum[h * 8 + i];
            }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (part_of < half_of)
            for (uint h = 0; h < uint(H); h++) {
                uint from = (block * 2 + part_of) * uint(H) + h;
                float2 other = half_stats[from];
                float highest = max(top[h], other.x);
                float mine = exp(top[h] - highest);
                float others = exp(other.x - highest);
                top[h] = highest;
                total[h] = total[h] * mine + other.y * others;
                for (uint i = 0; i < 8; i++)
                    sum[h * 8 + i] =
                        sum[h * 8 + i] * mine + half_sums[from * HEAD + lane * 8 + i] * others;
            }
    }
    if (part_of != 0)
        return;
    for (uint h = 0; h < uint(H) && head0 + h <= last; h++) {
        ulong head = ulong(row) * d.heads + head0 + h;
        ulong part = (ulong(at.z) * d.heads + head0 + h) * d.splits + at.y;
        for (uint i = 0; i < 8; i++) {
            uint dim = lane * 8 + i;
            float v = sum[h * 8 + i];
            if (d.splits == 1)
                y[head * HEAD + dim] = v / total[h] * sigmoid(qg[head * 2 * HEAD + HEAD + dim]);
            else
                sums[part * HEAD + dim] = v;
        }
        if (d.splits > 1 && lane == 0)
            stats[part] = float2(top[h], total[h]);
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

// ---- tiles of query rows -------------------------------------------------------------------
//
// The query heads of one KV head are packed: packed row m is head m % group of query row
// m / group, so 32 packed rows share each K and V that they load. Simdgroup s has the packed rows
// s / 4 * 16.. and the dimensions s % 4 * 64.. of Q and of the sums, both in registers. Its
// share of the scores is a product over 64 dimensions; the four shares meet in threadgroup memory.
// One piece of memory holds, in turn, half of Q, a block of K, the shares and a block of V.

constant uint FLASH_ROWS = 32;
constant uint FLASH_THREADS = 256;
constant uint FLASH_STRIDE = 132; // of half a packed row, with 16 bytes between rows

// A block of positions from p0 on, those from end on as zeros: what lies there may be NaN.
template <typename T, int KEYS>
inline void flash_stage(threadgroup float *block, device const T *page, uint p0, uint end,
                        uint index)
{
    uint width = 16 / uint(sizeof(T)); // values in 16 bytes
    uint pieces = HEAD / width;
    for (uint i = index; i < uint(KEYS) * pieces; i += FLASH_THREADS) {
        uint key = i / pieces;
        uint at = i % pieces * width;
        uint4 words = uint4(0);
        if (p0 + key < end)
            words = *(device const uint4 *)(page + key * HEAD + at);
        *(threadgroup uint4 *)((threadgroup T *)block + key * (HEAD + width) + at) = words;
    }
}

// Half of the packed queries of a tile, divided by 16.
inline void flash_stage_q(threadgroup float *block, device const float *q, constant attend_dims &d,
                          uint row, uint rows, uint kv_head, uint half_of, uint index)
{
    uint group = d.heads / d.kv_heads;
    for (uint i = index; i < FLASH_ROWS * 32; i += FLASH_THREADS) {
        uint m = i / 32;
        float4 v = float4(0.0f);
        if (m / group < rows)
            v = *(device const float4 *)(q +
                                         (ulong(row + m / group) * d.heads + kv_head * group +
                                          m % group) *
                                             HEAD +
                                         half_of * 128 + i % 32 * 4) *
                0.0625f;
        *(threadgroup float4 *)(block + m * FLASH_STRIDE + i % 32 * 4) = v;
    }
}

// The softmax of a thread's share of a packed row: KEYS / 8 neighbouring positions.
struct flash_row {
    float top;   // of the whole row so far
    float total; // of the thread's share
};

// Adds the four shares of the scores, writes the weights, returns by what the row's earlier sums
// shrink. first: position of the thread's first key; limit: positions that the row sees.
template <int KEYS>
inline float flash_softmax(threadgroup const float *shares, threadgroup float *weights,
                           thread flash_row &row, uint m, uint lane, uint first, uint limit)
{
    float score[KEYS / 8];
    float highest = row.top;
    for (uint c = 0; c < uint(KEYS / 8); c++) {
        uint at = m * uint(KEYS) + lane % 8 * uint(KEYS / 8) + c;
        float s = 0.0f;
        for (uint part = 0; part < 4; part++)
            s += shares[part * FLASH_ROWS * uint(KEYS) + at];
        score[c] = s;
        if (first + c < limit)
            highest = max(highest, s);
    }
    for (ushort step = 4; step > 0; step /= 2)
        highest = max(highest, simd_shuffle_xor(highest, step));
    float shrink = exp(row.top - highest);
    row.top = highest;
    row.total *= shrink;
    for (uint c = 0; c < uint(KEYS / 8); c++) {
        float weight = first + c < limit ? exp(score[c] - highest) : 0.0f;
        weights[m * uint(KEYS + 4) + lane % 8 * uint(KEYS / 8) + c] = weight;
        row.total += weight;
    }
    return shrink;
}

// Threadgroup (KV head, split, tile): d.tile_rows query rows with all heads of the KV head. With
// one split y is the result; with more, `sums` and `stats` hold what attend_merge needs.
template <typename T, int KEYS>
kernel void attend_tile(device const segment_dims *segments [[buffer(0)]],
                        constant attend_dims &d [[buffer(1)]], device const float *q [[buffer(2)]],
                        device const float *qg [[buffer(3)]],
                        device const uint *table [[buffer(4)]],
                        device const T *k_pages [[buffer(5)]],
                        device const T *v_pages [[buffer(6)]], device float *y [[buffer(7)]],
                        device float *sums [[buffer(8)]], device float2 *stats [[buffer(9)]],
                        uint3 at [[threadgroup_position_in_grid]],
                        uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 memory[32 * 33]; // 16 bytes are moved at a time
    threadgroup float weights[32 * (KEYS + 4)];
    threadgroup float shrink[4 * 64]; // of 8 packed rows each, as diagonal matrices
    threadgroup float least[8];       // of the simdgroup's four rows
    threadgroup float2 final_stats[32];
    threadgroup float *block = (threadgroup float *)memory;
    uint stride = HEAD + 16 / uint(sizeof(T));
    uint group = d.heads / d.kv_heads;
    uint kv_head = at.x;
    tile_place place = attend_place(segments, d, at.z);
    uint slot = segments[place.segment].slot;
    uint pos = segments[place.segment].pos + place.row - segments[place.segment].row;
    uint begin = at.y * d.split_positions;
    uint end = min(pos + place.rows, begin + d.split_positions);
    uint corner = simdgroup / 4 * 16; // first packed row
    uint part = simdgroup % 4;        // of the dimensions
    uint m = simdgroup * 4 + lane / 8; // packed row of the thread in softmax
    uint limit = m / group < place.rows ? pos + m / group + 1 : 0;
    simdgroup_float8x8 query[2][8];
    simdgroup_float8x8 sum[2][8];
    shrink[index] = 0.0f;
    for (uint side = 0; side < 2; side++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        flash_stage_q(block, q, d, place.row, place.rows, kv_head, side, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 2 && part / 2 == side; i++)
            for (uint k = 0; k < 8; k++)
                simdgroup_load(query[i][k],
                               block + (corner + i * 8) * FLASH_STRIDE + part % 2 * 64 + k * 8,
                               FLASH_STRIDE);
    }
    for (uint i = 0; i < 2; i++)
        for (uint k = 0; k < 8; k++)
            sum[i][k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    flash_row row = {LOWEST, 0.0f};
    for (uint p0 = begin; p0 < end; p0 += uint(KEYS)) {
        ulong page = page_index(table, d.pages_max, slot, p0, d.kv_heads, kv_head);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        flash_stage<T, KEYS>(block, k_pages + page, p0, end, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup const T *tile = (threadgroup const T *)block + part * 64;
        simdgroup_float8x8 score[2][KEYS / 8];
        for (uint j = 0; j < uint(KEYS / 8); j++) {
            score[0][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            score[1][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            for (uint k = 0; k < 8; k++) {
                simdgroup_matrix<T, 8, 8> key;
                simdgroup_load(key, tile + j * 8 * stride + k * 8, stride, ulong2(0), true);
                for (uint i = 0; i < 2; i++)
                    simdgroup_multiply_accumulate(score[i][j], query[i][k], key, score[i][j]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 2; i++)
            for (uint j = 0; j < uint(KEYS / 8); j++)
                simdgroup_store(score[i][j],
                                block + (part * FLASH_ROWS + corner + i * 8) * uint(KEYS) + j * 8,
                                uint(KEYS));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float factor = flash_softmax<KEYS>(block, weights, row, m, lane,
                                           p0 + lane % 8 * uint(KEYS / 8), limit);
        if (lane % 8 == 0)
            shrink[m / 8 * 64 + m % 8 * 9] = factor;
        factor = simd_min(factor);
        if (lane == 0)
            least[simdgroup] = factor;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        flash_stage<T, KEYS>(block, v_pages + page, p0, end, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 2; i++) {
            // Mostly no row's maximum has risen: then nothing shrinks.
            uint first = corner / 4 + i * 2;
            if (min(least[first], least[first + 1]) < 1.0f) {
                simdgroup_float8x8 diagonal;
                simdgroup_load(diagonal, shrink + (corner / 8 + i) * 64, 8);
                for (uint k = 0; k < 8; k++)
                    simdgroup_multiply(sum[i][k], diagonal, sum[i][k]);
            }
        }
        for (uint j = 0; j < uint(KEYS / 8); j++) {
            simdgroup_float8x8 weight[2];
            for (uint i = 0; i < 2; i++)
                simdgroup_load(weight[i], weights + (corner + i * 8) * uint(KEYS + 4) + j * 8,
                               uint(KEYS + 4));
            for (uint k = 0; k < 8; k++) {
                simdgroup_matrix<T, 8, 8> value;
                simdgroup_load(value, tile + j * 8 * stride + k * 8, stride);
                for (uint i = 0; i < 2; i++)
                    simdgroup_multiply_accumulate(sum[i][k], weight[i], value, sum[i][k]);
            }
        }
    }
    for (ushort step = 4; step > 0; step /= 2)
        row.total += simd_shuffle_xor(row.total, step);
    if (lane % 8 == 0)
        final_stats[m] = float2(row.top, row.total);
    for (uint side = 0; side < 2; side++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 2 && part / 2 == side; i++)
            for (uint k = 0; k < 8; k++)
                simdgroup_store(sum[i][k],
                                block + (corner + i * 8) * FLASH_STRIDE + part % 2 * 64 + k * 8,
                                FLASH_STRIDE);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < FLASH_ROWS * 128; i += FLASH_THREADS) {
            uint n = i / 128;
            if (n / group >= place.rows)
                continue;
            uint head = kv_head * group + n % group;
            uint dim = side * 128 + i % 128;
            float v = block[n * FLASH_STRIDE + i % 128];
            ulong to = ulong(place.row + n / group) * d.heads + head;
            ulong local = ulong(at.z * d.tile_rows + n / group) * d.heads + head;
            if (d.splits == 1)
                y[to * HEAD + dim] =
                    v / final_stats[n].y * sigmoid(qg[to * 2 * HEAD + HEAD + dim]);
            else
                sums[(local * d.splits + at.y) * HEAD + dim] = v;
            if (d.splits > 1 && dim == 0)
                stats[local * d.splits + at.y] = final_stats[n];
        }
    }
}

#define ATTEND_TILE(name, type, keys)                                                              \
    template [[host_name(name)]] kernel void attend_tile<type, keys>(                              \
        device const segment_dims *, constant attend_dims &, device const float *,                 \
        device const float *, device const uint *, device const type *, device const type *,       \
        device float *, device float *, device float2 *, uint3, uint, uint, uint);
ATTEND_TILE("attend_tile_bf16", bfloat, 32)
ATTEND_TILE("attend_tile_f32", float, 16)

// ---- merge ---------------------------------------------------------------------------------

constant uint MERGE_SIMDGROUPS = 8;

// Threadgroup (head, tile, row of the tile): the splits' sums become y. Simdgroups take every
// eighth split, their lanes 8 dimensions each. Splits behind the row's last position have nothing
// and weigh nothing.
kernel void attend_merge(device const segment_dims *segments [[buffer(0)]],
                         constant attend_dims &d [[buffer(1)]],
                         device const float *qg [[buffer(3)]],
                         device float *y [[buffer(7)]], device const float *sums [[buffer(8)]],
                         device const float2 *stats [[buffer(9)]],
                         uint3 at [[threadgroup_position_in_grid]],
                         uint dim [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float part[8 * 256]; // [simdgroup][dim]
    tile_place place = attend_place(segments, d, at.y);
    if (at.z >= place.rows)
        return;
    ulong first = (ulong(at.y * d.tile_rows + at.z) * d.heads + at.x) * d.splits;
    float highest = LOWEST;
    for (uint s = lane; s < d.splits; s += 32)
        highest = max(highest, stats[first + s].x);
    highest = simd_max(highest);
    float all = 0.0f;
    for (uint s = lane; s < d.splits; s += 32)
        all += stats[first + s].y * exp(stats[first + s].x - highest);
    all = simd_sum(all);
    float sum[8];
    for (uint i = 0; i < 8; i++)
        sum[i] = 0.0f;
    for (uint s = simdgroup; s < d.splits; s += MERGE_SIMDGROUPS) {
        float scale = exp(stats[first + s].x - highest);
        float v[8];
        load_8(sums + (first + s) * HEAD + lane * 8, v);
        for (uint i = 0; i < 8; i++)
            sum[i] += v[i] * scale;
    }
    for (uint i = 0; i < 8; i++)
        part[simdgroup * HEAD + lane * 8 + i] = sum[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float v = 0.0f;
    for (uint s = 0; s < MERGE_SIMDGROUPS; s++)
        v += part[s * HEAD + dim];
    ulong head = ulong(place.row + at.z) * d.heads + at.x;
    y[head * HEAD + dim] = v / all * sigmoid(qg[head * 2 * HEAD + HEAD + dim]);
}
