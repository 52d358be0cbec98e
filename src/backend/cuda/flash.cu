/* Attention of many rows: a pass over the pages for 128 (row, head) pairs at a time.
 *
 * A block owns one KV head and FLASH_PAIRS / group rows of a segment with the `group` query heads
 * that share it, so every K and V row it loads serves all of them. Two warpgroups have 64 pairs
 * each. Per 64 positions: scores = Q K^T on tensor cores (bf16 in, f32 sums), online softmax in
 * registers, whose weights are at once the operand of the product with V; both products' other
 * operands lie in shared memory, loaded two stages deep while the last stage is used. The scores of
 * the next 64 positions are formed while the softmax of these runs. */
#include "backend/cuda/wgmma.cuh"

#include "backend/cuda/ops.cuh"

#include <math.h>

enum { DIM = 256, POSITIONS = 64, PAIRS = 128, PART = 64 * 128 /* bytes: 64 rows of 64 dims */ };

struct flash_args {
    const struct segment *segments;
    const uint32_t *page_table;
    uint32_t segment_count, pages_max, heads, kv_heads, group;
    const float *q, *qg;
    const __nv_bfloat16 *k_pages, *v_pages;
    float *y;
};

/* Shared memory: Q [2][4 parts], then two stages of K [4 parts] and V [4 parts]. */
enum { FLASH_Q = 2 * 4 * PART, FLASH_STAGE = 8 * PART, FLASH_BYTES = FLASH_Q + 2 * FLASH_STAGE };

/* Block b counts rows through the long segments; returns the first row within *seg. */
static __device__ __forceinline__ bool flash_place(const struct flash_args &a, uint32_t b,
                                                   uint32_t rows, struct segment *seg,
                                                   uint32_t *first)
{
    for (uint32_t i = 0; i < a.segment_count; i++) {
        struct segment s = a.segments[i];
        uint32_t n = s.rows < FLASH_ROWS ? 0 : (s.rows + rows - 1) / rows;
        if (b < n) {
            *seg = s;
            *first = (n - 1 - b) * rows; /* the longest first */
            return true;
        }
        b -= n;
    }
    return false;
}

#if CUDA_WGMMA

/* Pair m of the block: row m / group, head m % group. */
static __device__ __forceinline__ void flash_load_q(const struct flash_args &a,
                                                    const struct segment &seg, uint32_t first,
                                                    char *shared)
{
    for (uint32_t i = threadIdx.x; i < PAIRS * 32; i += blockDim.x) {
        uint32_t m = i / 32, chunk = i % 32, row = first + m / a.group;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < seg.rows) {
            uint64_t at = (uint64_t)(seg.row + row) * a.heads + blockIdx.y * a.group + m % a.group;
            const float4 *from = (const float4 *)(a.q + at * DIM) + chunk * 2;
            float4 x = from[0], y = from[1];
            v = make_uint4(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w), bf16_pair(y.x, y.y),
                           bf16_pair(y.z, y.w));
        }
        *(uint4 *)(shared + m / 64 * 4 * PART + chunk / 8 * PART + m % 64 * 128 +
                   (chunk % 8 ^ (m & 7)) * 16) = v;
    }
}

/* Starts the copies of 64 positions of K or V; those from `end` on become 0. */
static __device__ __forceinline__ void flash_fetch(const struct flash_args &a,
                                                   const __nv_bfloat16 *pages,
                                                   const uint32_t *table, uint32_t pos,
                                                   uint32_t end, char *to)
{
    if (pos < end) {
        uint64_t page = table[pos / KV_PAGE];
        const __nv_bfloat16 *from =
            pages + ((page * a.kv_heads + blockIdx.y) * KV_PAGE + pos % KV_PAGE) * DIM;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t n = threadIdx.x / 32 + i * 8, chunk = threadIdx.x % 32;
            bool there = pos + n < end;
            copy_async(to + chunk / 8 * PART + n * 128 + (chunk % 8 ^ (n & 7)) * 16,
                       from + (there ? n : 0) * DIM + chunk * 8, there);
        }
    }
}

struct flash_state {
    float out[DIM / 2];     /* [32][4]: 16 pairs a warp x 256 dims */
    float top[2], total[2]; /* of pairs lane / 4 and + 8; base-2 exponents */
};

/* Softmax of this warp's scores [8][4] at positions pos..; leaves the weights as operands. */
static __device__ __forceinline__ void flash_softmax(struct flash_state *s, float score[32],
                                                     uint32_t weight[16], uint32_t pos,
                                                     const uint32_t ctx[2], bool edge)
{
    uint32_t lane = threadIdx.x % 32;
    float fade[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s->top[h];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float *v = &score[j * 4 + h * 2 + n];
                *v *= 0.0625f * 1.4426950408889634f;
                if (edge && pos + j * 8 + lane % 4 * 2 + n >= ctx[h])
                    *v = -INFINITY;
                top = fmaxf(top, *v);
            }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        fade[h] = exp2f(s->top[h] - top);
        s->top[h] = top;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float a = exp2f(score[j * 4 + h * 2] - top), b = exp2f(score[j * 4 + h * 2 + 1] - top);
            uint32_t pair = bf16_pair(a, b);
            weight[j / 2 * 4 + j % 2 * 2 + h] = pair;
            sum += bf16_low(pair) + bf16_high(pair);
        }
        s->total[h] = s->total[h] * fade[h] + sum;
    }
    if (__any_sync(~0u, fade[0] != 1 || fade[1] != 1))
#pragma unroll
        for (int j = 0; j < DIM / 8; j++) {
            s->out[j * 4] *= fade[0];
            s->out[j * 4 + 1] *= fade[0];
            s->out[j * 4 + 2] *= fade[1];
            s->out[j * 4 + 3] *= fade[1];
        }
}

static __device__ __forceinline__ void flash_scores(float score[32], const char *q, const char *k)
{
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < DIM / 16; step++)
        wgmma_scores(score, wgmma_rows(q + step / 4 * PART) + step % 4 * 2,
                     wgmma_rows(k + step / 4 * PART) + step % 4 * 2, step > 0);
    wgmma_commit();
}

static __device__ __forceinline__ void flash_values(struct flash_state *s,
                                                    const uint32_t weight[16], const char *v)
{
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < POSITIONS / 16; step++)
        wgmma_values(s->out, weight + step * 4, wgmma_columns(v, PART) + step * 128);
    wgmma_commit();
}

/* After wgmma_wait: the compiler must not have moved uses of the results before it. */
template <int N> static __device__ __forceinline__ void flash_settle(float *d)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* One tile: its scores are there; those of the next are formed while this one's softmax runs. now
 * and next: the stages of this tile and the next. */
static __device__ __forceinline__ void flash_step(const struct flash_args &a, struct flash_state *s,
                                                  float score[32], float ahead[32], const char *q,
                                                  char *now, char *next, const uint32_t *table,
                                                  uint32_t pos, uint32_t end, const uint32_t ctx[2],
                                                  uint32_t least)
{
    uint32_t weight[16];
    __syncthreads(); /* this tile's K and the last one's V have been read */
    flash_fetch(a, a.k_pages, table, pos + 2 * POSITIONS, end, now);
    flash_fetch(a, a.v_pages, table, pos + POSITIONS, end, next + 4 * PART);
    copy_commit();
    copy_wait<1>();
    shared_fence();
    __syncthreads();
    flash_scores(ahead, q, next);
    flash_softmax(s, score, weight, pos, ctx, pos + POSITIONS > least);
    flash_values(s, weight, now + 4 * PART);
    wgmma_wait();
    flash_settle<32>(ahead);
    flash_settle<DIM / 2>(s->out);
}

/* y = out / total * sigmoid(gate), for the pairs of this lane. */
static __device__ __forceinline__ void flash_store(const struct flash_args &a,
                                                   struct flash_state *s,
                                                   const struct segment &seg, uint32_t first,
                                                   uint32_t pair0)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = s->total[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        uint32_t m = pair0 + h * 8, row = first + m / a.group;
        if (row >= seg.rows)
            continue;
        uint64_t at = (uint64_t)(seg.row + row) * a.heads + blockIdx.y * a.group + m % a.group;
        const float2 *gate = (const float2 *)(a.qg + at * 2 * DIM + DIM);
        float2 *y = (float2 *)(a.y + at * DIM);
#pragma unroll
        for (int j = 0; j < DIM / 8; j++) {
            float2 g = gate[j * 4 + lane % 4];
            y[j * 4 + lane % 4] = make_float2(s->out[j * 4 + h * 2] / total * sigmoid(g.x),
                                              s->out[j * 4 + h * 2 + 1] / total * sigmoid(g.y));
        }
    }
}

#endif

static __global__ void __launch_bounds__(256, 1) attention_flash(const struct flash_args a)
{
#if CUDA_WGMMA
    extern __shared__ char space[];
    overlap_wait();
    overlap_next();
    char *shared = space + (1024 - __cvta_generic_to_shared(space) % 1024) % 1024;
    uint32_t rows = PAIRS / a.group, first;
    struct segment seg;
    if (!flash_place(a, blockIdx.x, rows, &seg, &first))
        return;
    uint32_t group = threadIdx.x / 128, lane = threadIdx.x % 32;
    uint32_t pair0 = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    uint32_t ctx[2] = {seg.pos + min(first + pair0 / a.group, seg.rows - 1) + 1,
                       seg.pos + min(first + (pair0 + 8) / a.group, seg.rows - 1) + 1};
    uint32_t least = seg.pos + first + 1, end = seg.pos + min(first + rows, seg.rows);
    const uint32_t *table = a.page_table + (uint64_t)seg.slot * a.pages_max;
    char *stages = shared + FLASH_Q;
    const char *q = shared + group * 4 * PART;
    flash_fetch(a, a.k_pages, table, 0, end, stages);
    copy_commit();
    flash_fetch(a, a.k_pages, table, POSITIONS, end, stages + FLASH_STAGE);
    flash_fetch(a, a.v_pages, table, 0, end, stages + 4 * PART);
    copy_commit();
    flash_load_q(a, seg, first, shared);
    struct flash_state s;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        s.out[i] = 0;
    s.top[0] = s.top[1] = -1e30f; /* below every score, and its difference to itself is a number */
    s.total[0] = s.total[1] = 0;
    float score[2][32];
    copy_wait<1>();
    shared_fence();
    __syncthreads();
    flash_scores(score[0], q, stages);
    wgmma_wait();
    flash_settle<32>(score[0]);
#pragma unroll 1
    for (uint32_t pos = 0; pos < end; pos += 2 * POSITIONS) {
        flash_step(a, &s, score[0], score[1], q, stages, stages + FLASH_STAGE, table, pos, end, ctx,
                   least);
        if (pos + POSITIONS < end)
            flash_step(a, &s, score[1], score[0], q, stages + FLASH_STAGE, stages, table,
                       pos + POSITIONS, end, ctx, least);
    }
    flash_store(a, &s, seg, first, pair0);
#endif
}

bool cuda_flash_can(const struct device *device, const struct attention_args *args)
{
    uint32_t group = args->dims.heads / args->dims.kv_heads;
    return device->warpgroups && !(device->without & CUDA_FLASH) && args->dims.kv_kind == KV_BF16 &&
           group <= 8 && (group & (group - 1)) == 0;
}

void cuda_flash(struct device *device, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    struct flash_args a = {};
    cuda_fill_attention(&a, args);
    a.group = a.heads / a.kv_heads;
    uint32_t rows = PAIRS / a.group, blocks = 0;
    for (uint32_t i = 0; i < batch->segments; i++)
        if (batch->host_segments[i].rows >= FLASH_ROWS)
            blocks += cuda_ceil(batch->host_segments[i].rows, rows);
    cuda_launch(device, attention_flash, dim3(blocks, a.kv_heads), 256, FLASH_BYTES + 1024, a);
}
