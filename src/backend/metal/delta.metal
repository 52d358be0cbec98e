// The Gated DeltaNet mixer: convolution, gates, recurrence and gated norm in one kernel.
//
// A threadgroup has one key head of one segment, and takes the value heads that read it one after
// the other, so that the convolution state of its channels has one reader and writer. Thread
// (part, j) of 4 x 128 keeps 32 keys of state column j in registers: the state is read once and
// written once however many rows the segment has.
#include "common.h"

constant uint DIM = 128;
constant uint PART_KEYS = 32;
constant uint DELTA_THREADS = 512;

// log(1 + e^x) without loss where e^x is small; x itself above 20.
inline float softplus(float x)
{
    if (x > 20.0f)
        return x;
    float u = exp(x);
    if (u < 0.01f)
        return u * (1.0f - u * (0.5f - u * (0.33333333f - u * 0.25f)));
    return log(1.0f + u);
}

// The input of the convolution `back` rows before row t of the segment. u: the segment's first row.
inline float delta_tap(device const float *u, device const float *state, uint channels,
                       uint channel, uint t, uint back, bool fresh)
{
    if (t >= back)
        return u[ulong(t - back) * channels + channel];
    return fresh ? 0.0f : state[(3 + t - back) * channels + channel];
}

kernel void delta_f32_step(device const segment_dims *segments [[buffer(0)]],
                           constant delta_step_dims &d [[buffer(1)]],
                           device const float *qkv [[buffer(2)]],
                           device const float *z [[buffer(3)]],
                           device const float *a [[buffer(4)]],
                           device const float *b [[buffer(5)]],
                           device const float4 *conv [[buffer(6)]],
                           device const float *a_log [[buffer(7)]],
                           device const float *dt_bias [[buffer(8)]],
                           device const float *norm [[buffer(9)]],
                           device float *conv_states [[buffer(10)]],
                           device float *states [[buffer(11)]], device float *y [[buffer(12)]],
                           uint2 at [[threadgroup_position_in_grid]],
                           uint index [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float row_in[3 * 128]; // convolved q, k, v of the row
    threadgroup float predicted[512];
    threadgroup float read[512];
    uint key_head = at.x;
    uint slot = segments[at.y].slot;
    uint first = segments[at.y].row;
    uint rows = segments[at.y].rows;
    bool fresh = segments[at.y].pos == 0;
    uint ratio = d.value_heads / d.key_heads;
    uint channels = (2 * d.key_heads + d.value_heads) * DIM;
    uint j = index % DIM;
    uint part = index / DIM;
    device float *conv_state = conv_states + ulong(slot) * 3 * channels;
    device const float *u = qkv + ulong(first) * channels;
    for (uint v = 0; v < ratio; v++) {
        uint head = key_head * ratio + v;
        device float *state = states + (ulong(slot) * d.value_heads + head) * DIM * DIM;
        float s[PART_KEYS];
        for (uint i = 0; i < PART_KEYS; i++)
            s[i] = fresh ? 0.0f : state[(part * PART_KEYS + i) * DIM + j];
        float rate = exp(a_log[head]);
        for (uint t = 0; t < rows; t++) {
            ulong row = first + t;
            if (part < 3) {
                uint channel = part == 0   ? key_head * DIM + j
                               : part == 1 ? (d.key_heads + key_head) * DIM + j
                                           : (2 * d.key_heads + head) * DIM + j;
                float4 taps = conv[channel];
                float sum = taps.x * delta_tap(u, conv_state, channels, channel, t, 3, fresh);
                sum += taps.y * delta_tap(u, conv_state, channels, channel, t, 2, fresh);
                sum += taps.z * delta_tap(u, conv_state, channels, channel, t, 1, fresh);
                sum += taps.w * delta_tap(u, conv_state, channels, channel, t, 0, fresh);
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
    // The last three rows become the convolution's state, after every thread has read the old one.
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = index; i < (2 + ratio) * DIM; i += DELTA_THREADS) {
        uint group = i / DIM;
        uint channel = group == 0   ? key_head * DIM + j
                       : group == 1 ? (d.key_heads + key_head) * DIM + j
                                    : (2 * d.key_heads + key_head * ratio + group - 2) * DIM + j;
        float last[3];
        for (uint back = 0; back < 3; back++)
            last[back] = delta_tap(u, conv_state, channels, channel, rows - 1, back, fresh);
        for (uint back = 0; back < 3; back++)
            conv_state[(2 - back) * channels + channel] = last[back];
    }
}
