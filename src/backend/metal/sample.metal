// What sampling needs of the logits: the largest, or the largest `count` and the log of the sum.
#include "common.h"

constant uint NONE = 0xffffffffu;

// (value, id): the better of two, ties to the lowest id; NONE loses.
inline bool is_better(float value, uint id, float other, uint other_id)
{
    return id != NONE && (other_id == NONE || value > other || (value == other && id < other_id));
}

struct best_of {
    float value;
    uint id;    // of the largest value that is not a NaN, or NONE
    uint flags; // 1: a NaN was seen; 2: a finite value was seen
};

inline best_of simd_best(best_of b)
{
    for (ushort step = 16; step > 0; step /= 2) {
        float value = simd_shuffle_xor(b.value, step);
        uint id = simd_shuffle_xor(b.id, step);
        b.flags |= simd_shuffle_xor(b.flags, step);
        if (is_better(value, id, b.value, b.id)) {
            b.value = value;
            b.id = id;
        }
    }
    return b;
}

// Threadgroup (part, row) of 256 threads: the best of every parts-th run of 256 logits.
kernel void argmax_part(device const float *logits [[buffer(0)]], device uint4 *parts [[buffer(1)]],
                        constant sample_dims &d [[buffer(2)]],
                        uint2 at [[threadgroup_position_in_grid]],
                        uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]])
{
    threadgroup uint4 found[8];
    device const float *l = logits + ulong(at.y) * d.vocab;
    best_of b;
    b.value = 0.0f;
    b.id = NONE;
    b.flags = 0;
    for (uint i = at.x * 256 + index; i < d.vocab; i += d.parts * 256) {
        float v = l[i];
        b.flags |= (is_nan(v) ? 1u : 0u) | (is_finite(v) ? 2u : 0u);
        if (!is_nan(v) && is_better(v, i, b.value, b.id)) {
            b.value = v;
            b.id = i;
        }
    }
    b = simd_best(b);
    if (lane == 0)
        found[simdgroup] = uint4(as_type<uint>(b.value), b.id, b.flags, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup != 0)
        return;
    uint4 other = found[lane % 8];
    b.value = as_type<float>(other.x);
    b.id = other.y;
    b.flags = other.z;
    b = simd_best(b);
    if (lane == 0)
        parts[at.y * d.parts + at.x] = uint4(as_type<uint>(b.value), b.id, b.flags, 0);
}

// A simdgroup a row: the best of the parts; -1 where a logit is a NaN or none is finite.
kernel void argmax_merge(device const uint4 *parts [[buffer(0)]], device int *ids [[buffer(1)]],
                         constant sample_dims &d [[buffer(2)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]])
{
    best_of b;
    b.value = 0.0f;
    b.id = NONE;
    b.flags = 0;
    for (uint i = lane; i < d.parts; i += 32) {
        uint4 part = parts[row * d.parts + i];
        b.flags |= part.z;
        if (is_better(as_type<float>(part.x), part.y, b.value, b.id)) {
            b.value = as_type<float>(part.x);
            b.id = part.y;
        }
    }
    b = simd_best(b);
    if (lane == 0)
        ids[row] = b.flags == 2 ? int(b.id) : -1;
}

// A key that orders as the logits do: NaN lowest, -0 as 0.
inline uint order_key(float v)
{
    if (is_nan(v))
        return 0;
    uint bits = as_type<uint>(v);
    if (bits == 0x80000000u)
        bits = 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// One threadgroup of 1024 threads a row. The count-th largest key is found 8 bits at a time by
// histograms; larger keys are taken, equal ones by ascending id until count are there; then a
// bitonic network sorts by (key, id).
kernel void top_select(device const float *logits [[buffer(0)]], device int *ids [[buffer(1)]],
                       device float *values [[buffer(2)]], device float *log_sum [[buffer(3)]],
                       constant sample_dims &d [[buffer(4)]],
                       uint row [[threadgroup_position_in_grid]],
                       uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]])
{
    threadgroup atomic_uint bins[256];
    threadgroup uint found[2]; // the digit, and how many keys lie above it
    threadgroup uint2 totals[32];
    threadgroup uint keys[1024];
    threadgroup uint places[1024];
    threadgroup float part[32];
    threadgroup uint flags[32];
    device const float *l = logits + ulong(row) * d.vocab;
    uint prefix = 0;
    uint above = 0; // keys larger than any with this prefix
    for (uint shift = 32; shift > 0;) {
        shift -= 8;
        if (index < 256)
            atomic_store_explicit(&bins[index], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < d.vocab; i += 1024) {
            uint key = order_key(l[i]);
            if (shift == 24 || key >> (shift + 8) == prefix)
                atomic_fetch_add_explicit(&bins[key >> shift & 255u], 1u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (index == 0) {
            uint digit = 255;
            uint larger = above;
            uint here = atomic_load_explicit(&bins[255], memory_order_relaxed);
            while (digit > 0 && larger + here < d.count) {
                larger += here;
                digit--;
                here = atomic_load_explicit(&bins[digit], memory_order_relaxed);
            }
            found[0] = digit;
            found[1] = larger;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix = prefix << 8 | found[0];
        above = found[1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // A thread looks at a run of neighbouring logits, so that its rank among equals is its place.
    uint run = (d.vocab + 1023) / 1024;
    uint begin = min(index * run, d.vocab);
    uint end = min(begin + run, d.vocab);
    uint2 mine = uint2(0, 0); // larger, equal
    for (uint i = begin; i < end; i++) {
        uint key = order_key(l[i]);
        mine.x += key > prefix ? 1u : 0u;
        mine.y += key == prefix ? 1u : 0u;
    }
    uint2 before = uint2(simd_prefix_exclusive_sum(mine.x), simd_prefix_exclusive_sum(mine.y));
    if (lane == 31)
        totals[simdgroup] = before + mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint2 total = totals[lane];
    uint2 ahead = uint2(simd_prefix_exclusive_sum(total.x), simd_prefix_exclusive_sum(total.y));
    before.x += simd_shuffle(ahead.x, ushort(simdgroup));
    before.y += simd_shuffle(ahead.y, ushort(simdgroup)) + above;
    keys[index] = 0;
    places[index] = NONE;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = begin; i < end; i++) {
        uint key = order_key(l[i]);
        uint to = key > prefix ? before.x : key == prefix ? before.y : NONE;
        if (to < d.count) {
            keys[to] = key;
            places[to] = i;
        }
        before.x += key > prefix ? 1u : 0u;
        before.y += key == prefix ? 1u : 0u;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint size = 2; size <= 1024; size *= 2) {
        for (uint step = size / 2; step > 0; step /= 2) {
            uint other = index ^ step;
            if (other > index) {
                bool ordered = keys[index] > keys[other] ||
                               (keys[index] == keys[other] && places[index] < places[other]);
                bool descending = (index & size) == 0;
                if (ordered != descending) {
                    uint key = keys[index];
                    uint place = places[index];
                    keys[index] = keys[other];
                    places[index] = places[other];
                    keys[other] = key;
                    places[other] = place;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    if (index < d.count) {
        uint place = min(places[index], d.vocab - 1);
        ids[ulong(row) * d.count + index] = int(place);
        values[ulong(row) * d.count + index] = l[place];
    }
    // Infinite ends are chosen by their bits: fast math may assume that no float is one.
    uint top = as_type<uint>(l[min(places[0], d.vocab - 1)]);
    bool is_plain = (top & 0x7f800000u) != 0x7f800000u;
    float shift_by = as_type<float>(is_plain ? top : 0u);
    uint seen = 0;
    float sum = 0.0f;
    for (uint i = index; i < d.vocab; i += 1024) {
        seen |= is_nan(l[i]) ? 1u : 0u;
        if (is_finite(l[i]))
            sum += exp(l[i] - shift_by);
    }
    seen = simd_or(seen);
    if (lane == 0)
        flags[simdgroup] = seen;
    sum = group_sum(sum, part, simdgroup, 32, lane);
    seen = simd_or(flags[lane]);
    uint result = is_plain ? as_type<uint>(shift_by + log(sum)) : top;
    if (index == 0)
        log_sum[row] = as_type<float>(seen != 0 ? 0x7fc00000u : result);
}
