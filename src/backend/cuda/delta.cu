/* Gated DeltaNet.
 *
 * Few rows a segment ("step"): one block a value head does all: convolution, norms, gates,
 * recurrence and gated norm, with the head's 64 KB of state in its 512 threads' registers, read
 * and written once. The blocks of value heads that share a key head all read that key head's
 * convolution rows; the one that finishes last writes them.
 *
 * Longer segments ("scan"): the row-wise parts for all rows at once (delta_prepare), with the
 * products k.k and k.q inside each SCAN_ROWS rows; then the recurrence, whose value columns are
 * independent: a block owns 32 columns of one head and walks the rows with the state in registers,
 * 16 lanes to 2 columns. SCAN_ROWS rows share one pass over the state: its products with all their k
 * and q are formed at once, and what the rows do to each other goes through the small products, in
 * f32 and in the order of the rows; then the gated norm. */
#include "backend/cuda/ops.cuh"

enum { DIM = 128, STEP_ROWS = 8, STEP_THREADS = 512, SCAN_ROWS = 8, SCAN_COLUMNS = 32,
       SCAN_STAGES = 4, SCAN_THREADS = SCAN_COLUMNS * 8 };

struct delta_kernel_args {
    const struct segment *segments;
    uint32_t rows, segment_count;
    uint32_t key_heads, value_heads;
    float eps;
    const float *qkv, *z, *a, *b, *conv, *a_log, *dt_bias, *norm;
    float *conv_state, *state, *y;
    float *c;           /* scan: f32 [rows, C]: q^ | k^ | v */
    float2 *gate;       /* scan: [blocks, value_heads, 8]: e^g, beta */
    float *products;    /* scan: f32 [blocks, key_heads, 2, 8, 8]: k_i . k_j, then k_i . q_j */
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

/* ---- scan --------------------------------------------------------------------------------- */

/* Blocks of SCAN_ROWS rows, counted through all segments: the segment of block b and its first
 * block. */
static __device__ __forceinline__ struct segment scan_segment(const struct delta_kernel_args &a,
                                                              uint32_t b, uint32_t *first_block)
{
    uint32_t i = 0, base = 0;
    for (;; i++) {
        uint32_t n = (a.segments[i].rows + SCAN_ROWS - 1) / SCAN_ROWS;
        if (b < base + n || i + 1 == a.segment_count)
            break;
        base += n;
    }
    *first_block = base;
    return a.segments[i];
}

/* silu(convolution) of the lane's four channels for a block's rows; rows past the end give 0. */
static __device__ __forceinline__ void prepare_conv(const struct delta_kernel_args &a,
                                                    const struct segment &seg, uint32_t first,
                                                    uint32_t channel, float4 out[SCAN_ROWS])
{
    uint32_t c = channels(a);
    float4 tap[4], u[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        tap[i] = ((const float4 *)a.conv)[channel + i];
#pragma unroll
    for (int n = 0; n < SCAN_ROWS + 3; n++) {
        int64_t from = (int64_t)first - 3 + n;
        float4 v = {0, 0, 0, 0};
        if (from >= seg.rows)
            v = make_float4(0, 0, 0, 0);
        else if (from >= 0)
            v = *(const float4 *)(a.qkv + (seg.row + from) * c + channel);
        else if (seg.pos)
            v = *(const float4 *)(a.conv_state + ((uint64_t)seg.slot * 3 + 3 + from) * c + channel);
        u[n % 4] = v;
        if (n < 3)
            continue;
        float4 w = u[(n - 3) % 4], x = u[(n - 2) % 4], y = u[(n - 1) % 4];
        bool there = from < seg.rows;
        float o[4] = {tap[0].x * w.x + tap[0].y * x.x + tap[0].z * y.x + tap[0].w * v.x,
                      tap[1].x * w.y + tap[1].y * x.y + tap[1].z * y.y + tap[1].w * v.y,
                      tap[2].x * w.z + tap[2].y * x.z + tap[2].z * y.z + tap[2].w * v.z,
                      tap[3].x * w.w + tap[3].y * x.w + tap[3].z * y.w + tap[3].w * v.w};
        out[n - 3] = there ? make_float4(silu(o[0]), silu(o[1]), silu(o[2]), silu(o[3]))
                           : make_float4(0, 0, 0, 0);
    }
}

static __device__ __forceinline__ float dot4(float4 a, float4 b)
{
    return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

static __device__ __forceinline__ void prepare_store(const struct delta_kernel_args &a,
                                                     const struct segment &seg, uint32_t first,
                                                     uint32_t channel, const float4 x[SCAN_ROWS])
{
#pragma unroll
    for (int t = 0; t < SCAN_ROWS; t++)
        if (first + t < seg.rows)
            *(float4 *)(a.c + (uint64_t)(seg.row + first + t) * channels(a) + channel) = x[t];
}

/* A warp owns a block of rows of one key head (q and k: convolution, norm, products) or of one
 * value head (convolution, gates). */
static __global__ void __launch_bounds__(256) delta_prepare(const struct delta_kernel_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t base;
    struct segment seg = scan_segment(a, blockIdx.x, &base);
    uint32_t first = (blockIdx.x - base) * SCAN_ROWS;
    if (unit >= a.key_heads + a.value_heads)
        return;
    if (unit >= a.key_heads) {
        uint32_t head = unit - a.key_heads;
        uint32_t channel = (2 * a.key_heads + head) * DIM + lane * 4;
        float4 v[SCAN_ROWS];
        prepare_conv(a, seg, first, channel, v);
        prepare_store(a, seg, first, channel, v);
        if (lane < SCAN_ROWS) /* a row that is not there leaves the state as it is */
            a.gate[((uint64_t)blockIdx.x * a.value_heads + head) * SCAN_ROWS + lane] =
                first + lane < seg.rows ? delta_gate(a, seg.row + first + lane, head)
                                        : make_float2(1, 0);
        return;
    }
    float4 q[SCAN_ROWS], k[SCAN_ROWS];
    prepare_conv(a, seg, first, unit * DIM + lane * 4, q);
    prepare_conv(a, seg, first, (a.key_heads + unit) * DIM + lane * 4, k);
#pragma unroll
    for (int t = 0; t < SCAN_ROWS; t++) {
        float qs = rsqrtf(warp_sum(dot4(q[t], q[t])) + 1e-6f) * 0.08838834764831845f;
        float ks = rsqrtf(warp_sum(dot4(k[t], k[t])) + 1e-6f);
        q[t] = make_float4(q[t].x * qs, q[t].y * qs, q[t].z * qs, q[t].w * qs);
        k[t] = make_float4(k[t].x * ks, k[t].y * ks, k[t].z * ks, k[t].w * ks);
    }
    prepare_store(a, seg, first, unit * DIM + lane * 4, q);
    prepare_store(a, seg, first, (a.key_heads + unit) * DIM + lane * 4, k);
    float *to = a.products + ((uint64_t)blockIdx.x * a.key_heads + unit) * 2 * SCAN_ROWS * SCAN_ROWS;
#pragma unroll
    for (int i = 0; i < SCAN_ROWS; i++) {
        float dots[2 * SCAN_ROWS];
#pragma unroll
        for (int j = 0; j < SCAN_ROWS; j++) {
            dots[j] = dot4(k[i], k[j]);
            dots[SCAN_ROWS + j] = dot4(k[i], q[j]);
        }
        float sum = sum_transposed<2 * SCAN_ROWS>(dots);
        if (lane % 2 == 0)
            to[lane / 16 * SCAN_ROWS * SCAN_ROWS + i * SCAN_ROWS + lane / 2 % SCAN_ROWS] = sum;
    }
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
    float kk[SCAN_ROWS][SCAN_ROWS], kq[SCAN_ROWS][SCAN_ROWS];
    float2 gate[SCAN_ROWS];
};

/* What a block of the scan works on. */
struct scan_place {
    struct segment seg;
    uint32_t first_block, key_head, head, column;
};

/* Starts the copies of SCAN_ROWS rows from `first` on; rows that are not there become 0 and leave
 * the state as it is. */
static __device__ __forceinline__ void scan_fetch(const struct delta_kernel_args &a,
                                                  struct scan_stage *stage,
                                                  const struct scan_place &p, uint32_t first)
{
    uint32_t c = channels(a), i = threadIdx.x;
    if (first < p.seg.rows) {
#pragma unroll
        for (uint32_t t = i / 32; t < SCAN_ROWS; t += SCAN_THREADS / 32) {
            uint32_t n = i % 32;
            bool there = first + t < p.seg.rows;
            const float *row = a.c + (uint64_t)(p.seg.row + (there ? first + t : 0)) * c;
            copy_async(&stage->q[t][n], row + p.key_head * DIM + n * 4, there);
            copy_async(&stage->k[t][n], row + (a.key_heads + p.key_head) * DIM + n * 4, there);
            if (n < SCAN_COLUMNS / 4)
                copy_async(&stage->v[t][n],
                           row + (2 * a.key_heads + p.head) * DIM + p.column + n * 4, there);
        }
        uint64_t block = p.first_block + first / SCAN_ROWS;
        const float *products =
            a.products + (block * a.key_heads + p.key_head) * 2 * SCAN_ROWS * SCAN_ROWS;
        const float2 *gate = a.gate + (block * a.value_heads + p.head) * SCAN_ROWS;
        if (i < 2 * SCAN_ROWS * SCAN_ROWS / 4)
            copy_async(&stage->kk[0][0] + i * 4, products + i * 4, true);
        else if (i < 2 * SCAN_ROWS * SCAN_ROWS / 4 + SCAN_ROWS / 2)
            copy_async(stage->gate + (i % 32) * 2, gate + (i % 32) * 2, true);
    }
    copy_commit();
}

/* Sums v[row 8][column 2] over the 16 lanes of a half warp; the lane (part p) gets row p % 8 of
 * column p / 8. */
static __device__ __forceinline__ float scan_sum(float v[16])
{
    bool right = threadIdx.x & 8;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float send = right ? v[t * 2] : v[t * 2 + 1], keep = right ? v[t * 2 + 1] : v[t * 2];
        v[t] = keep + __shfl_xor_sync(~0u, send, 8);
    }
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
        bool upper = threadIdx.x & n;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
            v[i] = keep + __shfl_xor_sync(~0u, send, n);
        }
    }
    return v[0];
}

/* SCAN_ROWS rows. s [column 2][8]: rows part * 4.. and 64 + part * 4.. of the state. Returns o of
 * row part % 8, column part / 8 of the lane's two. */
static __device__ __forceinline__ float scan_rows(const struct scan_stage *stage, float s[2][8],
                                                  uint32_t own)
{
    uint32_t part = threadIdx.x % 16, mine = part % 8, half = threadIdx.x & 16;
    float ks[16], qs[16];
#pragma unroll
    for (int t = 0; t < SCAN_ROWS; t++) {
        float k[8], q[8];
        *(float4 *)k = stage->k[t][part];
        *(float4 *)(k + 4) = stage->k[t][16 + part];
        *(float4 *)q = stage->q[t][part];
        *(float4 *)(q + 4) = stage->q[t][16 + part];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float a = 0, b = 0;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                a += s[c][n] * k[n];
                b += s[c][n] * q[n];
            }
            ks[t * 2 + c] = a;
            qs[t * 2 + c] = b;
        }
    }
    float k_sum = scan_sum(ks), o = scan_sum(qs);
    float v = ((const float *)stage->v[mine])[own + part / 8], beta = stage->gate[mine].y, w[2][8];
#pragma unroll
    for (int t = 0; t < SCAN_ROWS; t++) { /* the state after row t, seen through each row's k, q */
        float decay = stage->gate[t].x;
        k_sum *= decay;
        float d = beta * (v - k_sum);
        w[0][t] = __shfl_sync(~0u, d, half + t);
        w[1][t] = __shfl_sync(~0u, d, half + 8 + t);
        d = part < 8 ? w[0][t] : w[1][t];
        k_sum += stage->kk[t][mine] * d;
        if (t <= mine)
            o = decay * o + stage->kq[t][mine] * d;
    }
    float decay = 1;
#pragma unroll
    for (int t = SCAN_ROWS - 1; t >= 0; t--) {
        w[0][t] *= decay;
        w[1][t] *= decay;
        decay *= stage->gate[t].x;
    }
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int n = 0; n < 8; n++)
            s[c][n] *= decay;
#pragma unroll
    for (int t = 0; t < SCAN_ROWS; t++) {
        float k[8];
        *(float4 *)k = stage->k[t][part];
        *(float4 *)(k + 4) = stage->k[t][16 + part];
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int n = 0; n < 8; n++)
                s[c][n] += k[n] * w[c][t];
    }
    return o;
}

/* A half warp owns 2 columns; lane part of it rows part * 4..+3 and 64 + part * 4..+3. */
static __global__ void __launch_bounds__(SCAN_THREADS) delta_scan(const struct delta_kernel_args a)
{
    __shared__ struct scan_stage stages[SCAN_STAGES];
    overlap_wait();
    overlap_next();
    uint32_t part = threadIdx.x % 16, own = threadIdx.x / 16 * 2;
    struct scan_place p;
    p.seg = a.segments[blockIdx.y];
    p.head = blockIdx.x / (DIM / SCAN_COLUMNS);
    p.column = blockIdx.x % (DIM / SCAN_COLUMNS) * SCAN_COLUMNS;
    p.key_head = p.head / (a.value_heads / a.key_heads);
    p.first_block = 0;
    for (uint32_t i = 0; i < blockIdx.y; i++)
        p.first_block += (a.segments[i].rows + SCAN_ROWS - 1) / SCAN_ROWS;
    float *state = a.state + ((uint64_t)p.seg.slot * a.value_heads + p.head) * DIM * DIM +
                   p.column + own;
    float s[2][8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 v = {0, 0};
        if (p.seg.pos)
            v = *(const float2 *)(state + (part * 4 + n / 4 * 64 + n % 4) * DIM);
        s[0][n] = v.x;
        s[1][n] = v.y;
    }
    for (uint32_t i = 0; i < SCAN_STAGES - 1; i++)
        scan_fetch(a, &stages[i], p, i * SCAN_ROWS);
#pragma unroll 1
    for (uint32_t first = 0, i = 0; first < p.seg.rows; first += SCAN_ROWS, i++) {
        copy_wait<SCAN_STAGES - 2>();
        __syncthreads(); /* this stage is there; the one before it has been read */
        scan_fetch(a, &stages[(i + SCAN_STAGES - 1) % SCAN_STAGES], p,
                   first + (SCAN_STAGES - 1) * SCAN_ROWS);
        float o = scan_rows(&stages[i % SCAN_STAGES], s, own);
        if (first + part % 8 < p.seg.rows)
            a.y[((uint64_t)(p.seg.row + first + part % 8) * a.value_heads + p.head) * DIM +
                p.column + own + part / 8] = o;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        *(float2 *)(state + (part * 4 + n / 4 * 64 + n % 4) * DIM) = make_float2(s[0][n], s[1][n]);
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
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < batch->segments; i++)
        blocks += cuda_ceil(batch->host_segments[i].rows, SCAN_ROWS);
    uint64_t c = (2 * a.key_heads + a.value_heads) * DIM, c_bytes = c * batch->rows * 4;
    uint64_t product_bytes = (uint64_t)blocks * a.key_heads * 2 * SCAN_ROWS * SCAN_ROWS * 4;
    char *scratch = (char *)cuda_scratch(device, SCRATCH_DELTA,
                                         c_bytes + product_bytes +
                                             (uint64_t)blocks * SCAN_ROWS * a.value_heads * sizeof(float2));
    if (!scratch)
        return;
    a.c = (float *)scratch;
    a.products = (float *)(scratch + c_bytes);
    a.gate = (float2 *)(scratch + c_bytes + product_bytes);
    cuda_launch(device, delta_prepare, dim3(blocks, cuda_ceil(a.key_heads + a.value_heads, 8)), 256,
                0, a);
    cuda_launch(device, delta_store_conv, dim3(cuda_ceil(c, 256), batch->segments), 256, 0, a);
    cuda_launch(device, delta_scan, dim3(a.value_heads * (DIM / SCAN_COLUMNS), batch->segments),
                SCAN_THREADS, 0, a);
    cuda_launch(device, delta_gated_norm, dim3(batch->rows, cuda_ceil(a.value_heads, 8)), 256, 0,
                a);
}
