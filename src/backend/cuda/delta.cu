/* Gated DeltaNet.
 *
 * Few rows a segment ("step"): one block a value head does all: convolution, norms, gates,
 * recurrence and gated norm, with the head's 64 KB of state in its 512 threads' registers, read
 * and written once. The blocks of value heads that share a key head all read that key head's
 * convolution rows; the one that finishes last writes them.
 *
 * Longer segments ("scan"): the row-wise parts for all rows at once (delta_prepare); then the
 * recurrence, whose value columns are independent: a block owns 32 columns of one head and walks
 * the rows with the state in registers, 8 lanes a column, rows coming in through shared memory
 * SCAN_ROWS at a time; then the gated norm. */
#include "backend/cuda/ops.cuh"

enum { DIM = 128, STEP_ROWS = 8, STEP_THREADS = 512, SCAN_ROWS = 16, SCAN_COLUMNS = 32 };

struct delta_kernel_args {
    const struct segment *segments;
    uint32_t rows, segment_count;
    uint32_t key_heads, value_heads;
    float eps;
    const float *qkv, *z, *a, *b, *conv, *a_log, *dt_bias, *norm;
    float *conv_state, *state, *y;
    float *c;           /* scan: f32 [rows, C]: q^ | k^ | v */
    float2 *gate;       /* scan: [rows, value_heads]: e^g, beta */
    uint32_t *counters; /* step: [segments, key_heads] */
};

static __device__ __forceinline__ uint32_t channels(const struct delta_kernel_args &a)
{
    return (2 * a.key_heads + a.value_heads) * DIM;
}

static __device__ __forceinline__ float2 delta_gate(const struct delta_kernel_args &a, uint64_t row,
                                                    uint32_t head)
{
    float x = a.a[row * a.value_heads + head] + a.dt_bias[head];
    float softplus = x > 20 ? x : log1pf(expf(x));
    return make_float2(expf(-expf(a.a_log[head]) * softplus),
                       sigmoid(a.b[row * a.value_heads + head]));
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
    uint32_t ratio = a.value_heads / a.key_heads, c = channels(a);
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
    uint32_t part = threadIdx.x / DIM, c = channels(a); /* part 0 q, 1 k, 2 v, 3 idle */
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
    overlap_wait();
    overlap_next();
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

/* ---- scan --------------------------------------------------------------------------------- */

/* A warp owns one head of q, k or v of one row: convolution, SiLU, norm; v's warps the gates. */
static __global__ void delta_prepare(const struct delta_kernel_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t c = channels(a), channel = unit * DIM + lane * 4;
    uint64_t row = blockIdx.x;
    struct segment seg = find_segment(a.segments, a.segment_count, row);
    if (channel >= c)
        return;
    const float4 *tap = (const float4 *)a.conv + channel;
    float4 sum = {0, 0, 0, 0};
    const float *taps = (const float *)tap;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int64_t from = (int64_t)row - 3 + j, before = from - seg.row;
        float4 u = {0, 0, 0, 0};
        if (before >= 0)
            u = *(const float4 *)(a.qkv + from * c + channel);
        else if (seg.pos)
            u = *(const float4 *)(a.conv_state + ((uint64_t)seg.slot * 3 + 3 + before) * c +
                                  channel);
        sum.x += taps[j] * u.x;
        sum.y += taps[4 + j] * u.y;
        sum.z += taps[8 + j] * u.z;
        sum.w += taps[12 + j] * u.w;
    }
    sum = make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
    float square = warp_sum(sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w);
    if (unit < 2 * a.key_heads) {
        float scale = rsqrtf(square + 1e-6f) * (unit < a.key_heads ? 0.08838834764831845f : 1);
        sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    } else if (lane == 0) {
        uint32_t head = unit - 2 * a.key_heads;
        a.gate[row * a.value_heads + head] = delta_gate(a, row, head);
    }
    *(float4 *)(a.c + row * c + channel) = sum;
}

/* The last three rows of u into the convolution state, after all have read the old. */
static __global__ void delta_store_conv(const struct delta_kernel_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t c = channels(a), channel = blockIdx.x * blockDim.x + threadIdx.x;
    struct segment seg = a.segments[blockIdx.y];
    float *state = a.conv_state + (uint64_t)seg.slot * 3 * c + channel, u[3];
    if (channel >= c)
        return;
    for (int n = 0; n < 3; n++) {
        int64_t from = (int64_t)seg.rows - 3 + n;
        u[n] = from >= 0 ? a.qkv[(seg.row + from) * c + channel]
                         : (seg.pos ? state[(uint64_t)(from + 3) * c] : 0);
    }
    for (int n = 0; n < 3; n++)
        state[(uint64_t)n * c] = u[n];
}

struct scan_stage {
    float4 q[SCAN_ROWS][DIM / 4], k[SCAN_ROWS][DIM / 4], v[SCAN_ROWS][SCAN_COLUMNS / 4];
    float2 gate[SCAN_ROWS];
};

static __device__ __forceinline__ void scan_copy(void *to, const void *from)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}

/* Starts the copies of rows first.. (at most SCAN_ROWS) of the segment. 256 threads. */
static __device__ __forceinline__ void scan_fetch(const struct delta_kernel_args &a,
                                                  struct scan_stage *stage, struct segment seg,
                                                  uint32_t first, uint32_t key_head, uint32_t head,
                                                  uint32_t column)
{
    uint32_t c = channels(a);
    for (uint32_t i = threadIdx.x; i < SCAN_ROWS * 72; i += blockDim.x) {
        uint32_t t = i / 72, n = i % 72;
        if (first + t >= seg.rows)
            break;
        const float *row = a.c + (uint64_t)(seg.row + first + t) * c;
        if (n < 32)
            scan_copy(&stage->q[t][n], row + key_head * DIM + n * 4);
        else if (n < 64)
            scan_copy(&stage->k[t][n - 32], row + (a.key_heads + key_head) * DIM + (n - 32) * 4);
        else
            scan_copy(&stage->v[t][n - 64],
                      row + (2 * a.key_heads + head) * DIM + column + (n - 64) * 4);
    }
    if (threadIdx.x < SCAN_ROWS && first + threadIdx.x < seg.rows)
        stage->gate[threadIdx.x] =
            a.gate[(uint64_t)(seg.row + first + threadIdx.x) * a.value_heads + head];
    asm volatile("cp.async.commit_group;");
}

/* Lane l of a warp: column l % 4 of the warp's four, key rows {p*4 + 32*i ..+3}, p = l / 4. */
static __global__ void __launch_bounds__(256) delta_scan(const struct delta_kernel_args a)
{
    __shared__ struct scan_stage stages[2];
    overlap_wait();
    overlap_next();
    uint32_t warp = threadIdx.x / 32, part = threadIdx.x % 32 / 4;
    uint32_t head = blockIdx.x / (DIM / SCAN_COLUMNS);
    uint32_t column = blockIdx.x % (DIM / SCAN_COLUMNS) * SCAN_COLUMNS;
    uint32_t own = warp * 4 + threadIdx.x % 4, key_head = head / (a.value_heads / a.key_heads);
    struct segment seg = a.segments[blockIdx.y];
    float *state = a.state + ((uint64_t)seg.slot * a.value_heads + head) * DIM * DIM + column + own;
    float s[16];
#pragma unroll
    for (int n = 0; n < 16; n++)
        s[n] = seg.pos ? state[(part * 4 + n / 4 * 32 + n % 4) * DIM] : 0;
    scan_fetch(a, &stages[0], seg, 0, key_head, head, column);
    for (uint32_t first = 0; first < seg.rows; first += SCAN_ROWS) {
        struct scan_stage *stage = &stages[first / SCAN_ROWS % 2];
        __syncthreads(); /* the other stage has been read */
        scan_fetch(a, &stages[(first / SCAN_ROWS + 1) % 2], seg, first + SCAN_ROWS, key_head, head,
                   column);
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        uint32_t rows = min((uint32_t)SCAN_ROWS, seg.rows - first);
        float *y = a.y + ((uint64_t)(seg.row + first) * a.value_heads + head) * DIM + column + own;
#pragma unroll 4
        for (uint32_t t = 0; t < rows; t++) {
            float2 gate = stage->gate[t];
            float4 k[4];
            float dot[4] = {0, 0, 0, 0};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                k[n] = stage->k[t][n * 8 + part];
                dot[0] += s[n * 4] * k[n].x;
                dot[1] += s[n * 4 + 1] * k[n].y;
                dot[2] += s[n * 4 + 2] * k[n].z;
                dot[3] += s[n * 4 + 3] * k[n].w;
            }
            float sum = (dot[0] + dot[1]) + (dot[2] + dot[3]);
            for (int off = 4; off < 32; off *= 2)
                sum += __shfl_xor_sync(~0u, sum, off);
            float d = gate.y * (((const float *)stage->v[t])[own] - gate.x * sum);
            dot[0] = dot[1] = dot[2] = dot[3] = 0;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float4 q = stage->q[t][n * 8 + part];
                dot[0] += (s[n * 4] = gate.x * s[n * 4] + k[n].x * d) * q.x;
                dot[1] += (s[n * 4 + 1] = gate.x * s[n * 4 + 1] + k[n].y * d) * q.y;
                dot[2] += (s[n * 4 + 2] = gate.x * s[n * 4 + 2] + k[n].z * d) * q.z;
                dot[3] += (s[n * 4 + 3] = gate.x * s[n * 4 + 3] + k[n].w * d) * q.w;
            }
            sum = (dot[0] + dot[1]) + (dot[2] + dot[3]);
            for (int off = 4; off < 32; off *= 2)
                sum += __shfl_xor_sync(~0u, sum, off);
            if (part == 0)
                y[(uint64_t)t * a.value_heads * DIM] = sum;
        }
    }
#pragma unroll
    for (int n = 0; n < 16; n++)
        state[(part * 4 + n / 4 * 32 + n % 4) * DIM] = s[n];
}

/* y = norm * o * rsqrt(mean(o^2) + eps) * silu(z) in place; a warp a head of a row. */
static __global__ void delta_gated_norm(const struct delta_kernel_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= a.value_heads)
        return;
    uint64_t at = ((uint64_t)blockIdx.x * a.value_heads + head) * (DIM / 4) + lane;
    float4 o = ((float4 *)a.y)[at], z = ((const float4 *)a.z)[at];
    float4 gain = ((const float4 *)a.norm)[lane];
    float scale = rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / DIM + a.eps);
    ((float4 *)a.y)[at] =
        make_float4(gain.x * o.x * scale * silu(z.x), gain.y * o.y * scale * silu(z.y),
                    gain.z * o.z * scale * silu(z.z), gain.w * o.w * scale * silu(z.w));
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
    if (longest <= STEP_ROWS && batch->segments * a.key_heads <= CUDA_COUNTERS) {
        cuda_launch(device, delta_step, dim3(a.value_heads, batch->segments), STEP_THREADS, 0, a);
        return;
    }
    uint64_t c = (2 * a.key_heads + a.value_heads) * DIM, c_bytes = c * batch->rows * 4;
    char *scratch = (char *)cuda_scratch(
        device, SCRATCH_DELTA, c_bytes + (uint64_t)batch->rows * a.value_heads * sizeof(float2));
    if (!scratch)
        return;
    a.c = (float *)scratch;
    a.gate = (float2 *)(scratch + c_bytes);
    cuda_launch(device, delta_prepare, dim3(batch->rows, cuda_ceil(c / DIM, 8)), 256, 0, a);
    cuda_launch(device, delta_store_conv, dim3(cuda_ceil(c, 256), batch->segments), 256, 0, a);
    cuda_launch(device, delta_scan, dim3(a.value_heads * (DIM / SCAN_COLUMNS), batch->segments),
                256, 0, a);
    cuda_launch(device, delta_gated_norm, dim3(batch->rows, cuda_ceil(a.value_heads, 8)), 256, 0,
                a);
}
