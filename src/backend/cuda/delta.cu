/* Gated DeltaNet.
 *
 * Few rows a segment ("step"): one block a value head does all: convolution, norms, gates,
 * recurrence and gated norm, with the head's 64 KB of state in its 512 threads' registers, read
 * and written once. The blocks of value heads that share a key head all read that key head's
 * convolution rows; the one that finishes last writes them.
 *
 * Longer segments: delta_scan.cu. */
#include "backend/cuda/delta.cuh"

enum { DIM = DELTA_DIM, STEP_ROWS = 8, STEP_THREADS = 512 };

/* e^g and beta. */
static __device__ __forceinline__ float2 delta_gate(const struct delta_kernel_args &a, uint64_t row,
                                                    uint32_t head)
{
    float2 gate = delta_gates(a, row, head);
    return make_float2(expf(gate.x), gate.y);
}

/* ---- step --------------------------------------------------------------------------------- */

struct step_shared {
    float qkv[3][DIM];                                /* q^, k^, v of this row */
    float sum_k[16][DIM], sum_q[16][DIM], sum_kq[16]; /* parts of S^T k, S^T q, k . q by warp */
    float d[DIM];
    float part[16];
    bool last;
};

/* The 512 threads' shares of one row's recurrence. s: rows warp * 8.. of the state, columns
 * lane * 4... Threads below DIM return o of their column. */
static __device__ __forceinline__ float step_recur(struct step_shared *sh, float4 s[8], float2 gate)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = threadIdx.x;
    float4 sk = {0, 0, 0, 0}, sq = {0, 0, 0, 0};
    float kq = 0, o = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float q = sh->qkv[0][warp * 8 + n], k = sh->qkv[1][warp * 8 + n];
        sk.x += s[n].x * k, sk.y += s[n].y * k, sk.z += s[n].z * k, sk.w += s[n].w * k;
        sq.x += s[n].x * q, sq.y += s[n].y * q, sq.z += s[n].z * q, sq.w += s[n].w * q;
        kq += k * q;
    }
    ((float4 *)sh->sum_k[warp])[lane] = sk;
    ((float4 *)sh->sum_q[warp])[lane] = sq;
    if (lane == 0)
        sh->sum_kq[warp] = kq;
    __syncthreads();
    if (i < DIM) {
        float k = 0, q = 0, product = 0;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            k += sh->sum_k[n][i];
            q += sh->sum_q[n][i];
            product += sh->sum_kq[n];
        }
        float d = gate.y * (sh->qkv[2][i] - gate.x * k);
        o = gate.x * q + d * product;
        sh->d[i] = d;
    }
    __syncthreads();
    float4 d = ((const float4 *)sh->d)[lane];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float k = sh->qkv[1][warp * 8 + n];
        s[n].x = gate.x * s[n].x + k * d.x;
        s[n].y = gate.x * s[n].y + k * d.y;
        s[n].z = gate.x * s[n].z + k * d.z;
        s[n].w = gate.x * s[n].w + k * d.w;
    }
    return o;
}

/* Writes this thread's channel's rows: v by its own block, q and k by the last to have read. */
static __device__ __forceinline__ void step_store_conv(const struct delta_kernel_args &a,
                                                       struct step_shared *sh, float *to,
                                                       const float window[3], uint32_t part)
{
    uint32_t ratio = a.value_heads / a.key_heads, c = delta_channels(a);
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *counter = a.counters + blockIdx.y * a.key_heads + blockIdx.x / ratio;
        __threadfence();
        sh->last = atomicAdd(counter, 1) == ratio - 1;
        if (sh->last)
            *counter = 0;
    }
    __syncthreads();
    if (part == 2 || (part < 2 && sh->last))
        for (int n = 0; n < 3; n++)
            to[(uint64_t)n * c] = window[n];
}

static __global__ void __launch_bounds__(STEP_THREADS) delta_step(const struct delta_kernel_args a)
{
    __shared__ struct step_shared sh;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = threadIdx.x % DIM;
    uint32_t head = blockIdx.x, key_head = head / (a.value_heads / a.key_heads);
    uint32_t part = threadIdx.x / DIM, c = delta_channels(a); /* part 0 q, 1 k, 2 v, 3 idle */
    uint32_t channel = part == 0   ? key_head * DIM + i
                       : part == 1 ? (a.key_heads + key_head) * DIM + i
                                   : (2 * a.key_heads + head) * DIM + i;
    struct segment seg = a.segments[blockIdx.y];
    bool fresh = seg.pos == 0;
    float4 *state = (float4 *)(a.state + ((uint64_t)seg.slot * a.value_heads + head) * DIM * DIM);
    float *conv_state = a.conv_state + (uint64_t)seg.slot * 3 * c + channel;
    float4 s[8], tap = {0, 0, 0, 0};
    float window[3] = {0, 0, 0};
#pragma unroll
    for (int n = 0; n < 8; n++)
        s[n] = fresh ? make_float4(0, 0, 0, 0) : state[(warp * 8 + n) * 32 + lane];
    if (part < 3) {
        tap = ((const float4 *)a.conv)[channel];
        for (int n = 0; n < 3; n++)
            window[n] = fresh ? 0 : conv_state[(uint64_t)n * c];
    }
    float gain = a.norm[i];
    overlap_next();
    overlap_wait();
    for (uint32_t t = 0; t < seg.rows; t++) {
        uint64_t row = seg.row + t;
        float v = 0, z = 0;
        if (part < 3) {
            float u = a.qkv[row * c + channel];
            v = silu(tap.x * window[0] + tap.y * window[1] + tap.z * window[2] + tap.w * u);
            window[0] = window[1];
            window[1] = window[2];
            window[2] = u;
        }
        if (part == 0)
            z = a.z[(row * a.value_heads + head) * DIM + i];
        float2 gate = delta_gate(a, row, head);
        float square = warp_sum(v * v);
        if (lane == 0)
            sh.part[warp] = square;
        __syncthreads();
        if (part < 3) {
            square = (sh.part[part * 4] + sh.part[part * 4 + 1]) +
                     (sh.part[part * 4 + 2] + sh.part[part * 4 + 3]);
            if (part < 2)
                v *= rsqrtf(square + 1e-6f) * (part == 0 ? 0.08838834764831845f : 1);
            sh.qkv[part][i] = v;
        }
        __syncthreads();
        float o = step_recur(&sh, s, gate);
        square = warp_sum(o * o);
        if (lane == 0)
            sh.part[warp] = square;
        __syncthreads();
        if (part == 0) {
            square = (sh.part[0] + sh.part[1]) + (sh.part[2] + sh.part[3]);
            a.y[(row * a.value_heads + head) * DIM + i] =
                gain * o * rsqrtf(square / DIM + a.eps) * silu(z);
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        state[(warp * 8 + n) * 32 + lane] = s[n];
    step_store_conv(a, &sh, conv_state, window, part);
}

/* ---- the op ------------------------------------------------------------------------------- */

void cuda_delta(struct device *device, const struct delta_args *args)
{
    const struct batch_view *batch = args->batch;
    struct delta_kernel_args a = {};
    a.segments = cuda_at<const struct segment>(batch->device_segments);
    a.rows = batch->rows;
    a.segment_count = batch->segments;
    a.key_heads = args->dims.key_heads;
    a.value_heads = args->dims.value_heads;
    a.eps = args->dims.eps;
    a.qkv = cuda_at<const float>(args->qkv);
    a.z = cuda_at<const float>(args->z);
    a.a = cuda_at<const float>(args->a);
    a.b = cuda_at<const float>(args->b);
    a.conv = cuda_at<const float>(args->conv);
    a.a_log = cuda_at<const float>(args->a_log);
    a.dt_bias = cuda_at<const float>(args->dt_bias);
    a.norm = cuda_at<const float>(args->norm);
    a.conv_state = cuda_at<float>(args->conv_state);
    a.state = cuda_at<float>(args->state);
    a.y = cuda_at<float>(args->y);
    a.counters = cuda_counters(device);
    uint32_t longest = 0;
    for (uint32_t i = 0; i < batch->segments; i++)
        if (batch->host_segments[i].rows > longest)
            longest = batch->host_segments[i].rows;
    bool step = longest <= STEP_ROWS || device->without & CUDA_CHUNKS;
    if (step && batch->segments * a.key_heads <= CUDA_COUNTERS) {
        cuda_launch(device, delta_step, dim3(a.value_heads, batch->segments), STEP_THREADS, 0, a);
        return;
    }
    cuda_delta_scan(device, a, batch);
}
