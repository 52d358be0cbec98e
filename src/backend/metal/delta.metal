// The Gated DeltaNet mixer. Short segments: convolution, gates, recurrence and gated norm in one
// kernel, token by token. Long ones: the convolution for all rows at once, the recurrence in chunks
// of 16 rows on simdgroup matrices, then the gated norm.
#include "common.h"

constant uint DIM = 128;
constant uint PART_KEYS = 32;
constant uint DELTA_THREADS = 512;

// log(1 + e^x); x itself above 20. Up to x = 0, where rounding 1 + e^x would lose what is small, as
// 2 atanh(z) with z = e^x / (2 + e^x), at most 1/3: in seven terms to a quarter of a rounding.
inline float softplus(float x)
{
    if (x > 20.0f)
        return x;
    float u = exp(x);
    if (x > 0.0f)
        return log(1.0f + u);
    float z = u / (2.0f + u);
    float w = z * z;
    float tail = 1.0f / 9.0f + w * (1.0f / 11.0f + w * (1.0f / 13.0f));
    return 2.0f * z * (1.0f + w * (1.0f / 3.0f + w * (1.0f / 5.0f + w * (1.0f / 7.0f + w * tail))));
}

// The input of the convolution `back` rows before row t of the segment. u: the segment's first row;
// older: the channel's three rows before that.
inline float delta_tap(device const float *u, float3 older, uint channels, uint channel, uint t,
                       uint back)
{
    return t >= back ? u[ulong(t - back) * channels + channel] : older[3 + t - back];
}

// The convolution's state of a channel. By atomics, because another threadgroup may write it once
// all have read it.
inline float3 step_older(device atomic_uint *state, uint channels, uint channel, bool fresh)
{
    float3 older = float3(0.0f);
    for (uint i = 0; i < 3 && !fresh; i++)
        older[i] = as_type<float>(
            atomic_load_explicit(&state[i * channels + channel], memory_order_relaxed));
    return older;
}

// The last three rows become the channel's state.
inline void step_keep(device const float *u, device atomic_uint *state, uint channels,
                      uint channel, uint rows, bool fresh)
{
    float3 older = step_older(state, channels, channel, fresh);
    for (uint back = 0; back < 3; back++)
        atomic_store_explicit(
            &state[(2 - back) * channels + channel],
            as_type<uint>(delta_tap(u, older, channels, channel, rows - 1, back)),
            memory_order_relaxed);
}

// A threadgroup has one short segment and `taken` value heads of one key head, one after the other:
// all of them, or one where threadgroups can tell which is the last to have read what they share,
// the convolution's state of q and k. That one writes it. Thread (part, j) of 4 x 128 keeps 32 keys
// of state column j in registers: the state is read once and written once however many rows the
// segment has. arrived: a count for each segment and key head.
kernel void delta_f32_step(device const segment_dims *segments [[buffer(0)]],
                           constant mixer_dims &d [[buffer(1)]],
                           device const float *qkv [[buffer(2)]],
                           device const float *z [[buffer(3)]],
                           device const float *a [[buffer(4)]],
                           device const float *b [[buffer(5)]],
                           device const float4 *conv [[buffer(6)]],
                           device const float *a_log [[buffer(7)]],
                           device const float *dt_bias [[buffer(8)]],
                           device const float *norm [[buffer(9)]],
                           device atomic_uint *conv_states [[buffer(10)]],
                           device float *states [[buffer(11)]], device float *y [[buffer(12)]],
                           device atomic_uint *arrived [[buffer(13)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint index [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float row_in[3 * 128]; // convolved q, k, v of the row
    threadgroup float predicted[512];
    threadgroup float read[512];
#if __METAL_VERSION__ >= 320
    threadgroup uint ticket[1];
#endif
    uint slot = segments[at.y].slot;
    uint first = segments[at.y].row;
    uint rows = segments[at.y].rows;
    if (rows >= d.chunk_min_rows)
        return;
    bool fresh = segments[at.y].pos == 0;
    uint ratio = d.value_heads / d.key_heads;
    uint key_head = at.x * d.taken / ratio;
    uint channels = (2 * d.key_heads + d.value_heads) * DIM;
    uint j = index % DIM;
    uint part = index / DIM;
    uint q_or_k = part * d.key_heads * DIM + key_head * DIM + j; // of parts 0 and 1
    device atomic_uint *conv_state = conv_states + ulong(slot) * 3 * channels;
    device const float *u = qkv + ulong(first) * channels;
    for (uint v = 0; v < d.taken; v++) {
        uint head = at.x * d.taken + v;
        uint channel = part < 2 ? q_or_k : (2 * d.key_heads + head) * DIM + j;
        float3 older = float3(0.0f);
        float4 taps = float4(0.0f);
        if (part < 3) {
            older = step_older(conv_state, channels, channel, fresh);
            taps = conv[channel];
        }
        device float *state = states + (ulong(slot) * d.value_heads + head) * DIM * DIM;
        float s[PART_KEYS];
        for (uint i = 0; i < PART_KEYS; i++)
            s[i] = fresh ? 0.0f : state[(part * PART_KEYS + i) * DIM + j];
        float rate = exp(a_log[head]);
        for (uint t = 0; t < rows; t++) {
            ulong row = first + t;
            if (part < 3) {
                float sum = taps.x * delta_tap(u, older, channels, channel, t, 3);
                sum += taps.y * delta_tap(u, older, channels, channel, t, 2);
                sum += taps.z * delta_tap(u, older, channels, channel, t, 1);
                sum += taps.w * delta_tap(u, older, channels, channel, t, 0);
                row_in[part * DIM + j] = silu(sum);
            }
            float decay = exp(-rate * softplus(a[row * d.value_heads + head] + dt_bias[head]));
            float beta = sigmoid(b[row * d.value_heads + head]);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float q_squares = 0.0f;
            float k_squares = 0.0f;
            for (uint i = lane; i < DIM; i += 32) {
                q_squares += row_in[i] * row_in[i];
                k_squares += row_in[DIM + i] * row_in[DIM + i];
            }
            float q_scale = rsqrt(simd_sum(q_squares) + 1.0e-6f) * 0.08838834764831845f;
            float k_scale = rsqrt(simd_sum(k_squares) + 1.0e-6f);
            threadgroup const float *q = row_in + part * PART_KEYS;
            threadgroup const float *k = row_in + DIM + part * PART_KEYS;
            float sum = 0.0f;
            for (uint i = 0; i < PART_KEYS; i++) {
                s[i] *= decay;
                sum += s[i] * (k[i] * k_scale);
            }
            predicted[index] = sum;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            sum = predicted[j] + predicted[DIM + j] + predicted[2 * DIM + j] +
                  predicted[3 * DIM + j];
            float delta = beta * (row_in[2 * DIM + j] - sum);
            float out = 0.0f;
            for (uint i = 0; i < PART_KEYS; i++) {
                s[i] += k[i] * k_scale * delta;
                out += s[i] * (q[i] * q_scale);
            }
            read[index] = out;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float squares = 0.0f;
            for (uint i = lane; i < DIM; i += 32) {
                float o = read[i] + read[DIM + i] + read[2 * DIM + i] + read[3 * DIM + i];
                squares += o * o;
            }
            float scale = rsqrt(simd_sum(squares) / float(DIM) + d.eps);
            if (part == 0) {
                float o = read[j] + read[DIM + j] + read[2 * DIM + j] + read[3 * DIM + j];
                ulong to = (row * d.value_heads + head) * DIM + j;
                y[to] = norm[j] * (o * scale) * silu(z[to]);
            }
        }
        for (uint i = 0; i < PART_KEYS; i++)
            state[(part * PART_KEYS + i) * DIM + j] = s[i];
    }
    threadgroup_barrier(mem_flags::mem_device); // every thread has read the old state
    uint first_v = (2 * d.key_heads + at.x * d.taken) * DIM;
    for (uint i = index; i < d.taken * DIM; i += DELTA_THREADS)
        step_keep(u, conv_state, channels, first_v + i, rows, fresh);
    bool is_last = true;
#if __METAL_VERSION__ >= 320
    if (d.taken < ratio)
        is_last = group_is_last(arrived + at.y * d.key_heads + key_head, ratio / d.taken, ticket,
                                index);
#endif
    if (is_last && part < 2)
        step_keep(u, conv_state, channels, q_or_k, rows, fresh);
}

// ---- long segments -------------------------------------------------------------------------

constant uint CONV_ROWS = 32;

// Threadgroup (128 channels: a head of q, k or v; tile of 32 rows), a thread a channel: what the
// recurrence reads. out: f32 [rows, channels]: q^ | k^ | v.
kernel void delta_f32_conv(device const segment_dims *segments [[buffer(0)]],
                           constant mixer_dims &d [[buffer(1)]],
                           device const float *qkv [[buffer(2)]],
                           device const float4 *conv [[buffer(6)]],
                           device const float *conv_states [[buffer(10)]],
                           device float *out [[buffer(13)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint j [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 memory[32 * 32];
    threadgroup float *tile = (threadgroup float *)memory; // [row][channel]
    tile_place place = find_tile(segments, d.segments, d.chunk_min_rows, 1, CONV_ROWS, at.y);
    uint first = segments[place.segment].row;
    bool fresh = segments[place.segment].pos == 0;
    uint channels = (2 * d.key_heads + d.value_heads) * DIM;
    uint channel = at.x * DIM + j;
    device const float *u = qkv + ulong(first) * channels;
    device const float *state = conv_states + ulong(segments[place.segment].slot) * 3 * channels;
    device float *to = out + ulong(place.row) * channels + at.x * DIM;
    uint t0 = place.row - first;
    float4 taps = conv[channel];
    float3 older = float3(0.0f);
    for (uint i = 0; i < 3 && !fresh; i++)
        older[i] = state[i * channels + channel];
    float3 before = float3(delta_tap(u, older, channels, channel, t0, 3),
                           delta_tap(u, older, channels, channel, t0, 2),
                           delta_tap(u, older, channels, channel, t0, 1));
    for (uint t = 0; t < place.rows; t++) {
        float now = u[ulong(t0 + t) * channels + channel];
        float sum = taps.x * before.x;
        sum += taps.y * before.y;
        sum += taps.z * before.z;
        sum += taps.w * now;
        before = float3(before.y, before.z, now);
        if (at.x < 2 * d.key_heads)
            tile[t * DIM + j] = silu(sum);
        else
            to[ulong(t) * channels + j] = silu(sum);
    }
    if (at.x >= 2 * d.key_heads)
        return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float factor = at.x < d.key_heads ? 0.08838834764831845f : 1.0f;
    for (uint t = simdgroup; t < place.rows; t += 4) {
        float4 x = memory[t * 32 + lane];
        float scale = rsqrt(simd_sum(dot(x, x)) + 1.0e-6f) * factor;
        *(device float4 *)(to + ulong(t) * channels + lane * 4) = x * scale;
    }
}

// The recurrence over C = 16 rows at once. With G_t the product of the chunk's decays up to row t,
// L_ti that of the decays after row i up to t (both at most 1, made by products: no exponent is
// ever positive, no difference of large logarithms taken), S the state before the chunk:
//   d_t = beta_t (v_t - G_t S^T k_t - sum_{i<t} L_ti (k_t . k_i) d_i)
//   o_t = G_t S^T q_t + sum_{i<=t} L_ti (q_t . k_i) d_i
//   S  <- G_15 S + sum_i L_15,i k_i d_i^T
// The d are found by substitution, row after row: the inverse by powers of the matrix would lose
// everything where keys repeat. Rows past the segment have decay 1 and beta 0: they change nothing.
constant uint CHUNK = 16;
constant uint CHUNK_THREADS = 128;
constant uint CHUNK_COLUMNS = 64; // of a threadgroup, 16 of a simdgroup
constant uint CHUNK_STRIDE = 132; // of q and k in threadgroup memory
constant uint CHUNK_SQUARE = 20;  // of matrices of 16 columns

// 16 rows of q or k; zeros past the segment.
inline void chunk_stage(threadgroup float *to, device const float *from, uint channels, uint rows,
                        uint index)
{
    for (uint i = index; i < CHUNK * 32; i += CHUNK_THREADS) {
        uint t = i / 32;
        float4 v = float4(0.0f);
        if (t < rows)
            v = *(device const float4 *)(from + ulong(t) * channels + i % 32 * 4);
        *(threadgroup float4 *)(to + t * CHUNK_STRIDE + i % 32 * 4) = v;
    }
}

// to [16, 16] = a k^T, one 8 x 8 block a simdgroup
inline void chunk_products(threadgroup float *to, threadgroup const float *a,
                           threadgroup const float *k, uint simdgroup)
{
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    uint row = simdgroup / 2 * 8;
    uint column = simdgroup % 2 * 8;
    for (uint i = 0; i < DIM; i += 8) {
        simdgroup_float8x8 left;
        simdgroup_float8x8 right;
        simdgroup_load(left, a + row * CHUNK_STRIDE + i, CHUNK_STRIDE);
        simdgroup_load(right, k + column * CHUNK_STRIDE + i, CHUNK_STRIDE, ulong2(0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, to + row * CHUNK_SQUARE + column, CHUNK_SQUARE);
}

// A simdgroup's 16 columns of the state: 16 blocks of keys, two of columns.
struct chunk_state {
    simdgroup_float8x8 s[16][2];
};

// product [2][2] = a S for 16 rows of q or k
inline void chunk_read(thread chunk_state &state, threadgroup const float *a,
                       thread simdgroup_float8x8 *product)
{
    for (uint i = 0; i < 4; i++)
        product[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = 0; k < 16; k++)
        for (uint i = 0; i < 2; i++) {
            simdgroup_float8x8 left;
            simdgroup_load(left, a + i * 8 * CHUNK_STRIDE + k * 8, CHUNK_STRIDE);
            for (uint j = 0; j < 2; j++)
                simdgroup_multiply_accumulate(product[i * 2 + j], left, state.s[k][j],
                                              product[i * 2 + j]);
        }
}

// S <- G_15 S + sum_i L_15,i k_i d_i^T; d: [16, 16]
inline void chunk_update(thread chunk_state &state, threadgroup const float *k,
                         threadgroup const float *patch, threadgroup const float *diagonals)
{
    simdgroup_float8x8 shrink;
    simdgroup_float8x8 d[2][2];
    for (uint i = 0; i < 2; i++) {
        simdgroup_load(shrink, diagonals + (3 + i) * 64, 8);
        for (uint j = 0; j < 2; j++) {
            simdgroup_load(d[i][j], patch + i * 8 * CHUNK_SQUARE + j * 8, CHUNK_SQUARE);
            simdgroup_multiply(d[i][j], shrink, d[i][j]);
        }
    }
    simdgroup_load(shrink, diagonals + 2 * 64, 8);
    for (uint key = 0; key < 16; key++) {
        for (uint j = 0; j < 2; j++)
            simdgroup_multiply(state.s[key][j], shrink, state.s[key][j]);
        for (uint i = 0; i < 2; i++) {
            simdgroup_float8x8 left;
            simdgroup_load(left, k + i * 8 * CHUNK_STRIDE + key * 8, CHUNK_STRIDE, ulong2(0), true);
            for (uint j = 0; j < 2; j++)
                simdgroup_multiply_accumulate(state.s[key][j], left, d[i][j], state.s[key][j]);
        }
    }
}

// The last three rows of u become the state of 128 channels; its readers ran one command earlier.
inline void delta_keep_conv(device const float *u, device float *state, uint channels, uint first,
                            uint rows, uint index)
{
    for (uint i = index; i < 3 * DIM; i += CHUNK_THREADS) {
        uint channel = first + i % DIM;
        state[i / DIM * channels + channel] = u[ulong(rows - 3 + i / DIM) * channels + channel];
    }
}

// Threadgroup (half the columns of a value head, segment), four simdgroups of 16 columns, which
// stay in registers from the segment's first row to its last. x: what delta_f32_conv wrote.
// y receives o.
kernel void delta_f32_chunk(device const segment_dims *segments [[buffer(0)]],
                            constant mixer_dims &d [[buffer(1)]],
                            device const float *qkv [[buffer(2)]],
                            device const float *a [[buffer(4)]],
                            device const float *b [[buffer(5)]],
                            device const float *a_log [[buffer(7)]],
                            device const float *dt_bias [[buffer(8)]],
                            device float *conv_states [[buffer(10)]],
                            device float *states [[buffer(11)]], device float *y [[buffer(12)]],
                            device const float *x [[buffer(13)]],
                            uint2 at [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 k_rows[16 * 33];
    threadgroup float4 q_rows[16 * 33];
    threadgroup float4 patches[4 * 16 * 5]; // of each simdgroup: [16, 16], S^T k, then d, then o
    threadgroup float kk[16 * 20];          // beta_t L_ti k_t . k_i, i < t
    threadgroup float qk[16 * 20];          // L_ti q_t . k_i, i <= t
    threadgroup float decays[16 * 20];      // [t][i]: L_ti; column 16: G_t
    threadgroup float gates[32];            // decay, then beta
    threadgroup float diagonals[5 * 64];    // matrices: G of two times 8 rows; G_15; L_15,i
    threadgroup float *k = (threadgroup float *)k_rows;
    threadgroup float *q = (threadgroup float *)q_rows;
    threadgroup float *patch = (threadgroup float *)patches + simdgroup * CHUNK * CHUNK_SQUARE;
    uint rows = segments[at.y].rows;
    if (rows < d.chunk_min_rows)
        return;
    uint head = at.x / 2;
    uint ratio = d.value_heads / d.key_heads;
    uint key_head = head / ratio;
    uint channels = (2 * d.key_heads + d.value_heads) * DIM;
    uint column = at.x % 2 * CHUNK_COLUMNS + simdgroup * 16;
    ulong first = segments[at.y].row;
    bool fresh = segments[at.y].pos == 0;
    device float *state = states + (ulong(segments[at.y].slot) * d.value_heads + head) * DIM * DIM +
                          column;
    float rate = exp(a_log[head]);
    chunk_state s;
    for (uint key = 0; key < 16; key++)
        for (uint j = 0; j < 2; j++) {
            if (fresh)
                s.s[key][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            else
                simdgroup_load(s.s[key][j], state + key * 8 * DIM + j * 8, DIM);
        }
    for (uint i = index; i < 5 * 64; i += CHUNK_THREADS)
        diagonals[i] = 0.0f;
    for (uint t0 = 0; t0 < rows; t0 += CHUNK) {
        uint n = min(CHUNK, rows - t0);
        device const float *from = x + (first + t0) * channels;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        chunk_stage(q, from + key_head * DIM, channels, n, index);
        chunk_stage(k, from + (d.key_heads + key_head) * DIM, channels, n, index);
        if (index < CHUNK) {
            ulong gate = (first + t0 + min(index, n - 1)) * d.value_heads + head;
            bool is_row = index < n;
            gates[index] = is_row ? exp(-rate * softplus(a[gate] + dt_bias[head])) : 1.0f;
            gates[CHUNK + index] = is_row ? sigmoid(b[gate]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        chunk_products(kk, k, k, simdgroup);
        chunk_products(qk, q, k, simdgroup);
        if (index < 17) { // products of decays after row `index`, or from the chunk's start
            float product = 1.0f;
            for (uint t = 0; t < CHUNK; t++) {
                if (index == 16 || t > index)
                    product *= gates[t];
                decays[t * CHUNK_SQUARE + index] = product;
                if (index == 16)
                    diagonals[t / 8 * 64 + t % 8 * 9] = product;
            }
            for (uint i = 0; i < 8 && index == 16; i++)
                diagonals[2 * 64 + i * 9] = product;
            if (index < 16)
                diagonals[(3 + index / 8) * 64 + index % 8 * 9] = product;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < CHUNK * CHUNK; i += CHUNK_THREADS) {
            uint t = i / CHUNK;
            uint to = t * CHUNK_SQUARE + i % CHUNK;
            kk[to] = i % CHUNK < t ? gates[CHUNK + t] * decays[to] * kk[to] : 0.0f;
            qk[to] = i % CHUNK <= t ? decays[to] * qk[to] : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 product[4];
        chunk_read(s, k, product);
        for (uint i = 0; i < 4; i++)
            simdgroup_store(product[i], patch + i / 2 * 8 * CHUNK_SQUARE + i % 2 * 8, CHUNK_SQUARE);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (lane < 16) { // a lane a column
            device const float *v = from + (2 * d.key_heads + head) * DIM + column + lane;
            float found[16];
            for (uint t = 0; t < CHUNK; t++) {
                uint row = t * CHUNK_SQUARE;
                float value = v[ulong(min(t, n - 1)) * channels];
                float sum = gates[CHUNK + t] * (value - decays[row + 16] * patch[row + lane]);
                for (uint i = 0; i < t; i++)
                    sum -= kk[row + i] * found[i];
                found[t] = sum;
                patch[row + lane] = sum;
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        chunk_read(s, q, product);
        for (uint i = 0; i < 2; i++) {
            simdgroup_float8x8 left;
            simdgroup_load(left, diagonals + i * 64, 8);
            for (uint j = 0; j < 2; j++)
                simdgroup_multiply(product[i * 2 + j], left, product[i * 2 + j]);
        }
        for (uint m = 0; m < 2; m++)
            for (uint j = 0; j < 2; j++) {
                simdgroup_float8x8 right;
                simdgroup_load(right, patch + m * 8 * CHUNK_SQUARE + j * 8, CHUNK_SQUARE);
                for (uint i = m; i < 2; i++) {
                    simdgroup_float8x8 left;
                    simdgroup_load(left, qk + i * 8 * CHUNK_SQUARE + m * 8, CHUNK_SQUARE);
                    simdgroup_multiply_accumulate(product[i * 2 + j], left, right,
                                                  product[i * 2 + j]);
                }
            }
        chunk_update(s, k, patch, diagonals);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 4; i++)
            simdgroup_store(product[i], patch + i / 2 * 8 * CHUNK_SQUARE + i % 2 * 8, CHUNK_SQUARE);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < n * 4; i += 32) {
            ulong to = ((first + t0 + i / 4) * d.value_heads + head) * DIM + column;
            *(device float4 *)(y + to + i % 4 * 4) =
                *(threadgroup const float4 *)(patch + i / 4 * CHUNK_SQUARE + i % 4 * 4);
        }
    }
    for (uint key = 0; key < 16; key++)
        for (uint j = 0; j < 2; j++)
            simdgroup_store(s.s[key][j], state + key * 8 * DIM + j * 8, DIM);
    if (at.x % 2 != 0)
        return;
    device const float *u = qkv + first * channels;
    device float *conv_state = conv_states + ulong(segments[at.y].slot) * 3 * channels;
    delta_keep_conv(u, conv_state, channels, (2 * d.key_heads + head) * DIM, rows, index);
    if (head % ratio == 0) {
        delta_keep_conv(u, conv_state, channels, key_head * DIM, rows, index);
        delta_keep_conv(u, conv_state, channels, (d.key_heads + key_head) * DIM, rows, index);
    }
}

// Threadgroup (8 value heads, row of a long segment), a simdgroup a head: the gated norm, in place.
kernel void delta_f32_gate(device const segment_dims *segments [[buffer(0)]],
                           constant mixer_dims &d [[buffer(1)]],
                           device const float *z [[buffer(3)]],
                           device const float *norm [[buffer(9)]], device float *y [[buffer(12)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]])
{
    uint head = at.x * 8 + simdgroup;
    if (head >= d.value_heads)
        return;
    tile_place place = find_tile(segments, d.segments, d.chunk_min_rows, 1, 1, at.y);
    ulong to = (ulong(place.row) * d.value_heads + head) * DIM + lane * 4;
    float4 o = *(device const float4 *)(y + to);
    float4 gate = *(device const float4 *)(z + to);
    float scale = rsqrt(simd_sum(dot(o, o)) / float(DIM) + d.eps);
    o *= scale * *(device const float4 *)(norm + lane * 4);
    *(device float4 *)(y + to) =
        o * float4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w));
}
