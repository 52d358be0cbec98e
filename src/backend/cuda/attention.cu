/* Attention over KV pages.
 *
 * kv_append: a warp a head of a row; normalises, rotates, writes pages.
 *
 * attention ("split"): a block owns one row, one KV head (all query heads that share it, up to 8,
 * use each K and V row it loads) and one part of the positions; a warp takes four positions at a
 * time, 16 bytes of K and of V a lane, keeping an online softmax in registers; warps merge through
 * shared memory, parts in attention_merge, which also applies the gate. The number of parts is
 * fixed by the batch's shape; how many are used is computed on the device from the position.
 *
 * Segments of many rows: flash.cu. */
#include "backend/cuda/ops.cuh"

#include <math.h>

enum { DIM = 256, ROTATED = 64, PART_MIN = 64, WARPS = 8, MERGE_PARTS = 1024 };

/* ---- q/k norm, rotation, append ----------------------------------------------------------- */

struct append_args {
    const struct segment *segments;
    const uint32_t *page_table;
    uint32_t segment_count, pages_max, heads, kv_heads;
    float eps;
    bool f32;
    float frequency[ROTATED / 2];
    const float *qg, *k, *v, *q_norm, *k_norm;
    void *k_pages, *v_pages;
    float *q;
};

static __device__ __forceinline__ void append_store(void *pages, bool f32, uint64_t at, uint32_t i,
                                                    float v)
{
    if (f32)
        ((float *)pages)[at + i] = v;
    else
        ((__nv_bfloat16 *)pages)[at + i] = __float2bfloat16_rn(v);
}

/* Lane l holds dims l, l + 32, ...: the rotated pairs (l, l + 32) are its first two. */
static __global__ void attention_append(const __grid_constant__ struct append_args a)
{
    overlap_next();
    overlap_wait();
    uint32_t unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t row = blockIdx.x;
    struct segment seg = find_segment(a.segments, a.segment_count, row);
    if (unit >= a.heads + a.kv_heads)
        return;
    bool is_q = unit < a.heads;
    uint32_t head = is_q ? unit : unit - a.heads, pos = seg.pos + (row - seg.row);
    const float *from =
        is_q ? a.qg + (row * a.heads + head) * 2 * DIM : a.k + (row * a.kv_heads + head) * DIM;
    const float *gain = is_q ? a.q_norm : a.k_norm;
    float x[8], square = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        x[n] = from[lane + n * 32];
        square += x[n] * x[n];
    }
    float scale = rsqrtf(warp_sum(square) / DIM + a.eps), sine, cosine;
#pragma unroll
    for (int n = 0; n < 8; n++)
        x[n] *= scale * gain[lane + n * 32];
    sincosf((float)pos * a.frequency[lane], &sine, &cosine);
    float low = x[0], high = x[1];
    x[0] = low * cosine - high * sine;
    x[1] = high * cosine + low * sine;
    if (is_q) {
        for (int n = 0; n < 8; n++)
            a.q[(row * a.heads + head) * DIM + lane + n * 32] = x[n];
        return;
    }
    uint64_t page = a.page_table[(uint64_t)seg.slot * a.pages_max + pos / KV_PAGE];
    uint64_t at = ((page * a.kv_heads + head) * KV_PAGE + pos % KV_PAGE) * DIM;
    const float *v = a.v + (row * a.kv_heads + head) * DIM;
    for (int n = 0; n < 8; n++) {
        append_store(a.k_pages, a.f32, at, lane + n * 32, x[n]);
        append_store(a.v_pages, a.f32, at, lane + n * 32, v[lane + n * 32]);
    }
}

void cuda_kv_append(struct device *device, const struct kv_append_args *args)
{
    struct append_args a = {};
    cuda_fill_pages(&a, args->batch, args->dims);
    a.eps = args->dims.eps;
    a.f32 = args->dims.kv_kind == KV_F32;
    for (int i = 0; i < ROTATED / 2; i++)
        a.frequency[i] = (float)pow(args->dims.rope_theta, -2.0 * i / ROTATED);
    a.qg = cuda_at<const float>(args->qg);
    a.k = cuda_at<const float>(args->k);
    a.v = cuda_at<const float>(args->v);
    a.q_norm = cuda_at<const float>(args->q_norm);
    a.k_norm = cuda_at<const float>(args->k_norm);
    a.k_pages = cuda_at<void>(args->k_pages);
    a.v_pages = cuda_at<void>(args->v_pages);
    a.q = cuda_at<float>(args->q);
    cuda_launch(device, attention_append,
                dim3(args->batch->rows, cuda_ceil(a.heads + a.kv_heads, 6)), 192, 0, a);
}

/* ---- attention ---------------------------------------------------------------------------- */

struct split_args {
    const struct segment *segments;
    const uint32_t *page_table;
    uint32_t segment_count, pages_max, heads, kv_heads, parts;
    uint32_t first; /* row of the batch; results in between count rows from it */
    const float *q, *qg;
    const void *k_pages, *v_pages;
    float *sum;    /* f32 [rows, heads, parts, 256] */
    float2 *state; /* [rows, heads, parts]: maximum (of base-2 exponents), sum of weights */
    float *y;
};

/* Positions a part takes, for a row that sees ctx of them: a multiple of 32. */
static __device__ __forceinline__ uint32_t part_positions(uint32_t ctx, uint32_t parts)
{
    uint32_t n = (ctx + parts - 1) / parts;
    n = (n + 31) / 32 * 32;
    return max(n, (uint32_t)PART_MIN);
}

/* Dims lane * 8.. of a row of K or V. */
template <bool F32>
static __device__ __forceinline__ void load_raw(uint4 raw[F32 ? 2 : 1], const void *pages,
                                                uint64_t at)
{
    uint32_t lane = threadIdx.x % 32;
    const uint4 *from = (const uint4 *)((const char *)pages + at * (F32 ? 4 : 2));
    for (int i = 0; i < (F32 ? 2 : 1); i++)
        raw[i] = from[lane * (F32 ? 2 : 1) + i];
}

template <bool F32>
static __device__ __forceinline__ void expand(float x[8], const uint4 raw[F32 ? 2 : 1])
{
    const uint32_t *u = (const uint32_t *)raw;
    if (F32)
        for (int i = 0; i < 8; i++)
            x[i] = __uint_as_float(u[i]);
    else
        for (int i = 0; i < 4; i++) {
            x[i * 2] = bf16_low(u[i]);
            x[i * 2 + 1] = bf16_high(u[i]);
        }
}

/* The warp's running softmax over P heads: sum [head][own 8 dims]; top and total belong to the head
 * that the lane has after sum_transposed (index = position * P + head). */
template <int P> struct softmax_state {
    float sum[P][8], top, total;
};

template <bool F32, int P>
static __device__ __forceinline__ void attend_four(struct softmax_state<P> *s, const float q[P][8],
                                                   const struct split_args &a, uint64_t base,
                                                   uint32_t left)
{
    constexpr int N = 4 * P, SPREAD = 32 / N;
    uint4 k[4][F32 ? 2 : 1], v[4][F32 ? 2 : 1];
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < 4; p++) {
        load_raw<F32>(k[p], a.k_pages, base + min((uint32_t)p, left - 1) * DIM);
        load_raw<F32>(v[p], a.v_pages, base + min((uint32_t)p, left - 1) * DIM);
    }
    float score[N], x[8];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        expand<F32>(x, k[p]);
#pragma unroll
        for (int h = 0; h < P; h++) {
            float dot = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                dot += q[h][i] * x[i];
            score[p * P + h] = dot;
        }
    }
    float own = sum_transposed<N>(score);
    uint32_t index = lane / SPREAD;
    if (index / P >= left)
        own = -INFINITY;
    float top = own;
    top = fmaxf(top, __shfl_xor_sync(~0u, top, P * SPREAD));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2 * P * SPREAD));
    top = fmaxf(top, s->top);
    float weight = exp2f(own - top), fade = exp2f(s->top - top);
    s->total = s->total * fade + weight;
    bool faded = __any_sync(~0u, s->top != top);
    s->top = top;
    if (faded)
#pragma unroll
        for (int h = 0; h < P; h++) {
            float f = __shfl_sync(~0u, fade, h * SPREAD);
#pragma unroll
            for (int i = 0; i < 8; i++)
                s->sum[h][i] *= f;
        }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        expand<F32>(x, v[p]);
#pragma unroll
        for (int h = 0; h < P; h++) {
            float w = __shfl_sync(~0u, weight, (p * P + h) * SPREAD);
#pragma unroll
            for (int i = 0; i < 8; i++)
                s->sum[h][i] += w * x[i];
        }
    }
}

/* Merges the warps' states and writes the part's result for P heads from `at` on. */
template <int P>
static __device__ void merge_warps(struct softmax_state<P> *s, const struct split_args &a,
                                   uint64_t at, uint32_t part)
{
    extern __shared__ float merge[]; /* [WARPS][P][256] */
    __shared__ float tops[WARPS][P], totals[WARPS][P];
    constexpr int SPREAD = 32 / (4 * P);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    s->total += __shfl_xor_sync(~0u, s->total, P * SPREAD);
    s->total += __shfl_xor_sync(~0u, s->total, 2 * P * SPREAD);
    if (lane % SPREAD == 0 && lane / SPREAD < P) {
        tops[warp][lane / SPREAD] = s->top;
        totals[warp][lane / SPREAD] = s->total;
    }
#pragma unroll
    for (int h = 0; h < P; h++) {
        float4 *to = (float4 *)(merge + ((uint64_t)warp * P + h) * DIM + lane * 8);
        to[0] = make_float4(s->sum[h][0], s->sum[h][1], s->sum[h][2], s->sum[h][3]);
        to[1] = make_float4(s->sum[h][4], s->sum[h][5], s->sum[h][6], s->sum[h][7]);
    }
    __syncthreads();
    for (int h = 0; h < P; h++) {
        float top = -INFINITY, total = 0, sum = 0;
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[w][h]);
        for (int w = 0; w < WARPS; w++) {
            float f = exp2f(tops[w][h] - top);
            total += f * totals[w][h];
            sum += f * merge[((uint64_t)w * P + h) * DIM + threadIdx.x];
        }
        uint64_t to = (at + h) * a.parts + part;
        a.sum[to * DIM + threadIdx.x] = sum;
        if (threadIdx.x == 0)
            a.state[to] = make_float2(top, total);
    }
}

template <bool F32, int P>
static __global__ void __launch_bounds__(WARPS * 32) attention_split(const struct split_args a)
{
    overlap_next();
    overlap_wait();
    uint32_t group = a.heads / a.kv_heads, kv_head = blockIdx.y / (group / P);
    uint32_t head = kv_head * group + blockIdx.y % (group / P) * P;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t row = a.first + blockIdx.z;
    struct segment seg = find_segment(a.segments, a.segment_count, row);
    uint32_t ctx = seg.pos + (row - seg.row) + 1, n = part_positions(ctx, a.parts);
    uint64_t from = (uint64_t)blockIdx.x * n;
    if (from >= ctx)
        return;
    uint32_t to = min((uint64_t)ctx, from + n);
    const uint32_t *table = a.page_table + (uint64_t)seg.slot * a.pages_max;
    float q[P][8];
#pragma unroll
    for (int h = 0; h < P; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) /* / 16, and exponents to base 2 */
            q[h][i] = a.q[(row * a.heads + head + h) * DIM + lane * 8 + i] *
                      (0.0625f * 1.4426950408889634f);
    struct softmax_state<P> s = {};
    s.top = -1e30f; /* below every score, and its difference to itself is a number */
    for (uint32_t pos = from + warp * 4; pos < to; pos += WARPS * 4) {
        uint64_t page = table[pos / KV_PAGE];
        uint64_t base = ((page * a.kv_heads + kv_head) * KV_PAGE + pos % KV_PAGE) * DIM;
        attend_four<F32, P>(&s, q, a, base, to - pos);
    }
    merge_warps<P>(&s, a, (uint64_t)blockIdx.z * a.heads + head, blockIdx.x);
}

/* A block a head of a row: sums the parts in use and applies the gate. Four groups of 64 threads
 * share the parts, a thread has four dims. */
static __global__ void __launch_bounds__(DIM) attention_merge(const struct split_args a)
{
    __shared__ float scale[MERGE_PARTS], totals[DIM / 32];
    __shared__ float4 sums[4][DIM / 4];
    overlap_next();
    overlap_wait();
    uint64_t row = a.first + blockIdx.y, at = row * a.heads + blockIdx.x;
    uint64_t from = ((uint64_t)blockIdx.y * a.heads + blockIdx.x) * a.parts;
    struct segment seg = find_segment(a.segments, a.segment_count, row);
    uint32_t ctx = seg.pos + (row - seg.row) + 1, n = part_positions(ctx, a.parts);
    uint32_t used = (ctx + n - 1) / n, part = threadIdx.x / 64, i = threadIdx.x % 64;
    float top = -INFINITY, total = 0;
    for (uint32_t p = threadIdx.x % 32; p < used; p += 32) /* every warp, for itself */
        top = fmaxf(top, a.state[from + p].x);
    for (int off = 16; off; off /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, off));
    for (uint32_t p = threadIdx.x; p < used; p += DIM) {
        float2 s = a.state[from + p];
        float f = exp2f(s.x - top);
        scale[p] = f;
        total += f * s.y;
    }
    total = block_sum(total, totals);
    float4 sum = {0, 0, 0, 0};
    const float4 *values = (const float4 *)a.sum + from * (DIM / 4) + i;
#pragma unroll 4
    for (uint32_t p = part; p < used; p += 4) {
        float4 v = values[(uint64_t)p * (DIM / 4)];
        float f = scale[p];
        sum.x += f * v.x, sum.y += f * v.y, sum.z += f * v.z, sum.w += f * v.w;
    }
    sums[part][i] = sum;
    __syncthreads();
    float out = 0;
    for (int p = 0; p < 4; p++)
        out += ((const float *)sums[p])[threadIdx.x];
    a.y[at * DIM + threadIdx.x] = out / total * sigmoid(a.qg[at * 2 * DIM + DIM + threadIdx.x]);
}

template <bool F32, int P>
static void attention_run(struct device *device, const struct split_args &a, uint32_t rows)
{
    cuda_launch(device, attention_split<F32, P>, dim3(a.parts, a.heads / P, rows), WARPS * 32,
                (size_t)WARPS * P * DIM * 4, a);
}

template <bool F32>
static void attention_pack(struct device *device, const struct split_args &a, uint32_t rows)
{
    uint32_t group = device->without & CUDA_PACKING ? 1 : a.heads / a.kv_heads;
    if (group % 8 == 0)
        attention_run<F32, 8>(device, a, rows);
    else if (group % 4 == 0)
        attention_run<F32, 4>(device, a, rows);
    else if (group % 2 == 0)
        attention_run<F32, 2>(device, a, rows);
    else
        attention_run<F32, 1>(device, a, rows);
}

/* Enough parts that a decoding batch fills the GPU; one where rows alone do. */
static uint32_t attention_parts(const struct device *device, uint32_t rows, uint32_t kv_heads)
{
    uint32_t blocks = rows * kv_heads, parts = device->sms / blocks;
    parts = device->without & CUDA_SPLIT ? 1 : parts;
    return parts < 1 ? 1 : parts > MERGE_PARTS ? MERGE_PARTS : parts;
}

/* `rows` rows from a.first on, each by itself. */
static void attention_rows(struct device *device, struct split_args a, uint32_t rows, bool f32)
{
    a.parts = attention_parts(device, rows, a.kv_heads);
    uint64_t partials = (uint64_t)rows * a.heads * a.parts;
    char *scratch = (char *)cuda_scratch(device, SCRATCH_ATTENTION, partials * (DIM * 4 + 8));
    if (!scratch)
        return;
    a.sum = (float *)scratch;
    a.state = (float2 *)(scratch + partials * DIM * 4);
    if (f32)
        attention_pack<true>(device, a, rows);
    else
        attention_pack<false>(device, a, rows);
    cuda_launch(device, attention_merge, dim3(a.heads, rows), DIM, 0, a);
}

void cuda_attention(struct device *device, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    struct split_args a = {};
    cuda_fill_attention(&a, args);
    bool f32 = args->dims.kv_kind == KV_F32, flash = cuda_flash_can(device, args), some = false;
    for (uint32_t i = 0, rows = 0; i < batch->segments; i++) { /* runs of short segments */
        const struct segment *seg = &batch->host_segments[i];
        bool is_long = flash && seg->rows >= FLASH_ROWS;
        some |= is_long;
        if (!is_long) {
            a.first = rows ? a.first : seg->row;
            rows += seg->rows;
        }
        if (rows && (is_long || i + 1 == batch->segments)) {
            attention_rows(device, a, rows, f32);
            rows = 0;
        }
    }
    if (some)
        cuda_flash(device, args);
}
