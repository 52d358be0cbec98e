// The choice of experts: the best topk of a row's logits. For up to 4 rows the router's products
// and the choice are one command where the language has fences between threadgroups (Metal 3.2).
#include "rows.h"

constant uint ROUTE_EXPERTS = 1024; // at most

// A simdgroup chooses for one row; ties go to the lowest id. l: f32 [experts]; ids and weights of
// the row: [topk].
inline void route_choose(threadgroup const float *l, float shared_logit, device uint *ids,
                         device float *weights, device float *shared_gate,
                         constant route_dims &d, uint lane)
{
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
        if (lane == 0 && d.topk > 32) { // rare: more than a lane each
            weights[i] = e;
            ids[i] = id;
        }
    }
    float total = 0.0f;
    for (uint e = lane; e < d.experts; e += 32)
        total += exp(l[e] - top);
    total = simd_sum(total);
    float scale = 1.0f / (d.renormalise != 0 ? chosen : total);
    if (lane < d.topk && d.topk <= 32) {
        weights[lane] = mine * scale;
        ids[lane] = my_id;
    }
    if (lane == 0) {
        for (uint i = 0; i < d.topk && d.topk > 32; i++)
            weights[i] *= scale;
        *shared_gate = sigmoid(shared_logit);
    }
}

// The choice from logits that an earlier command left; a simdgroup a row.
kernel void moe_topk(device const float *logits [[buffer(0)]],
                     device const float *shared_logits [[buffer(1)]],
                     device uint *ids [[buffer(2)]], device float *weights [[buffer(3)]],
                     device float *shared_gate [[buffer(4)]], constant route_dims &d [[buffer(5)]],
                     uint row [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float l[1024];
    for (uint e = lane; e < d.experts; e += 32)
        l[e] = logits[ulong(row) * d.experts + e];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    ulong first = ulong(row) * d.topk;
    route_choose(l, shared_logits[row], ids + first, weights + first, shared_gate + row, d, lane);
}

#if __METAL_VERSION__ >= 320

// Threadgroup (tile of 8 logits, or one more for h), two simdgroups, all rows: at most B. The
// threadgroup that is last done with its logits chooses, a simdgroup a row at a time. logits: the
// bits of f32 [rows, experts + 1], the shared expert's last. w0 router, w1 shared router.
template <int B>
kernel void moe_route_rows(device const float *x [[buffer(0)]],
                           device const float *gain [[buffer(2)]],
                           constant linear_dims &d [[buffer(3)]],
                           device const uint *w0 [[buffer(4)]],
                           device const bfloat *s0 [[buffer(5)]],
                           device const bfloat *b0 [[buffer(6)]],
                           device const uint *w1 [[buffer(8)]],
                           device const bfloat *s1 [[buffer(9)]],
                           device const bfloat *b1 [[buffer(10)]],
                           device float *h [[buffer(20)]],
                           device atomic_uint *logits [[buffer(21)]],
                           device atomic_uint *arrived [[buffer(22)]],
                           device uint *ids [[buffer(23)]],
                           device float *weights [[buffer(24)]],
                           device float *shared_gate [[buffer(25)]],
                           constant route_dims &r [[buffer(26)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint index [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float chosen_from[(B > 1 ? 2 : 1) * 1024]; // of each simdgroup
    threadgroup uint ticket[1];
    if (at.x == d.first_tile[4]) {
        for (uint b = simdgroup; b < d.rows; b += 2)
            linear_write_h(x, gain, d, h, b, lane);
        return;
    }
    bool shared = at.x >= d.first_tile[1];
    constant matrix_dims &m = d.matrix[shared ? 1 : 0];
    uint row0 = ((shared ? 0 : at.x) * 2 + simdgroup) * ROW_OUTPUTS;
    if (row0 < m.rows) {
        float4 found[B];
        linear_rows<B>(x, w0, gain, d, shared ? w1 : w0, shared ? s1 : s0, shared ? b1 : b0, m,
                       row0, 0, lane, found);
        for (uint b = 0; b < d.rows && lane == 0; b++)
            for (uint i = 0; i < ROW_OUTPUTS && row0 + i < m.rows; i++)
                atomic_store_explicit(
                    &logits[b * (r.experts + 1) + (shared ? r.experts : row0 + i)],
                    as_type<uint>(found[b][i]), memory_order_relaxed);
    }
    if (!group_is_last(arrived, d.first_tile[4], ticket, index))
        return;
    threadgroup float *l = chosen_from + (B > 1 ? simdgroup * ROUTE_EXPERTS : 0);
    for (uint b = simdgroup; b < d.rows; b += 2) {
        device atomic_uint *from = logits + b * (r.experts + 1);
        for (uint e = lane; e < r.experts; e += 32)
            l[e] = as_type<float>(atomic_load_explicit(&from[e], memory_order_relaxed));
        float shared_logit =
            as_type<float>(atomic_load_explicit(&from[r.experts], memory_order_relaxed));
        simdgroup_barrier(mem_flags::mem_threadgroup);
        route_choose(l, shared_logit, ids + b * r.topk, weights + b * r.topk, shared_gate + b, r,
                     lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

#define ROUTE_ROWS(name, rows)                                                                     \
    template [[host_name(name)]] kernel void moe_route_rows<rows>(                                 \
        device const float *, device const float *, constant linear_dims &, device const uint *,   \
        device const bfloat *, device const bfloat *, device const uint *, device const bfloat *,  \
        device const bfloat *, device float *, device atomic_uint *, device atomic_uint *,         \
        device uint *, device float *, device float *, constant route_dims &, uint2, uint, uint,   \
        uint);
ROUTE_ROWS("moe_route_rows_1", 1)
ROUTE_ROWS("moe_route_rows_4", 4)

#endif
