// Counts how many of n keys have each of 64 values, then the exclusive sums of the counts.
// Test kernels of the emulator: atomics on both memories, a tree in threadgroup memory, scans.
#include <metal_stdlib>
using namespace metal;

constant uint VALUES = 64;

kernel void histogram(device const uint *keys [[buffer(0)]],
                      device atomic_uint *counts [[buffer(1)]],
                      constant uint &n [[buffer(2)]],
                      uint position [[thread_position_in_grid]],
                      uint index [[thread_index_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]])
{
    threadgroup atomic_uint local[64];
    for (uint v = index; v < VALUES; v += threads)
        atomic_store_explicit(&local[v], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (position < n)
        atomic_fetch_add_explicit(&local[keys[position]], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint v = index; v < VALUES; v += threads) {
        uint count = atomic_load_explicit(&local[v], memory_order_relaxed);
        if (count > 0)
            atomic_fetch_add_explicit(&counts[v], count, memory_order_relaxed);
    }
}

kernel void offsets(device const uint *counts [[buffer(0)]], device uint *starts [[buffer(1)]],
                    uint index [[thread_index_in_threadgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup uint totals[2];
    uint before = simd_prefix_exclusive_sum(counts[index]);
    if (lane == 31)
        totals[simdgroup] = before + counts[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    starts[index] = before + (simdgroup == 1 ? totals[0] : 0u);
}

// The largest value and its lowest index, by a tree over 64 threads.
kernel void largest(device const float *x [[buffer(0)]], device uint *winner [[buffer(1)]],
                    constant uint &n [[buffer(2)]],
                    uint index [[thread_index_in_threadgroup]])
{
    threadgroup float best[64];
    threadgroup uint where[64];
    float top = -3.0e38f;
    uint at = 0;
    for (uint i = index; i < n; i += 64) {
        if (x[i] > top) {
            top = x[i];
            at = i;
        }
    }
    best[index] = top;
    where[index] = at;
    threadgroup_barrier(mem_flags::mem_threadgroup); // filled
    for (uint step = 32; step > 0; step /= 2) {
        if (index < step) {
            float other = best[index + step];
            bool wins = other > best[index] ||
                        (other == best[index] && where[index + step] < where[index]);
            if (wins) {
                best[index] = other;
                where[index] = where[index + step];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // step
    }
    if (index == 0)
        winner[0] = where[0];
}
