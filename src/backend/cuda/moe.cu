/* Router and experts.
 *
 * Few rows ("step"): the router is one launch, in which a row's last block, or its cluster's first,
 * picks the experts; then gate and up with SiLU (a block owns 16 outputs of one chosen expert);
 * then down (a block owns 16 outputs, two warps an expert) with the weighted sum and the residual.
 * Each row reads its own experts. More rows: batch.cu, then prefill.cu. Weights that are not tiled:
 * a warp an output. */
#include "backend/cuda/ops.cuh"

#include <cooperative_groups.h>
#include <math.h>

enum { ROUTER_WARPS = 8, ROUTER_LOADS = 4, DOWN_WARPS = CHOICE_DOWN_WARPS };
enum { UP_WARPS = CHOICE_UP_WARPS, UP_GROUP = CHOICE_UP_GROUP };
enum { ROUTE_EXPERTS_MAX = 1024, ROUTE_CLUSTER = 16, ROUTE_WARPS = 17 };

/* ---- choosing ----------------------------------------------------------------------------- */

/* Order of a logit as a number above 0, which stands for none: whatever the bits of a NaN are, an
 * expert is chosen. -0 and 0 are one value. */
static __device__ __forceinline__ uint32_t route_key(float logit)
{
    uint32_t u = __float_as_uint(logit + 0.0f);
    return max(u & 0x80000000u ? ~u : u | 0x80000000u, 1u);
}

/* Picks the topk best of logits [experts] with one warp; equal ones by the lowest id. */
static __device__ void route_choose(const float *logits, uint32_t experts, uint32_t topk,
                                    bool renormalise, uint32_t *ids, float *weights)
{
    uint32_t lane = threadIdx.x % 32, taken = 0, own = 0, own_key = 0;
    float top = 0, chosen = 0, total = 0, mine = 0;
    bool search = true;
    for (uint32_t i = 0; i < topk; i++) {
        if (search) {
            own_key = 0;
            for (uint32_t n = 0, e = lane; e < experts; n++, e += 32) {
                uint32_t u = route_key(logits[e]);
                if (!(taken >> n & 1) && u > own_key) {
                    own_key = u;
                    own = e;
                }
            }
        }
        uint32_t best = __reduce_max_sync(~0u, own_key);
        uint32_t id = __reduce_min_sync(~0u, own_key == best ? own : ~0u);
        float l = logits[id];
        if (i == 0)
            top = l;
        float weight = expf(l - top);
        chosen += weight;
        search = own == id && own_key == best;
        if (search)
            taken |= 1u << (id / 32);
        if (lane == i % 32)
            mine = weight;
        if (lane == 0)
            ids[i] = id;
        if (i % 32 == 31 || i == topk - 1) /* unscaled for now */
            if (lane <= i % 32)
                weights[i - i % 32 + lane] = mine;
    }
    if (!renormalise) {
        for (uint32_t e = lane; e < experts; e += 32)
            total += expf(logits[e] - top);
        chosen = warp_sum(total);
    }
    for (uint32_t i = lane; i < topk; i += 32)
        weights[i] /= chosen;
}

/* ---- router ------------------------------------------------------------------------------- */

struct route_args {
    struct matrix router, shared_router;
    uint32_t experts, topk, hidden;
    bool renormalise;
    float eps;
    const float *x, *gain;
    float *h, *weights, *shared_gate, *logits; /* logits: f32 [rows, experts + 1] */
    uint32_t *ids, *counters;
};

/* Index of the float4 k4 of a row kept in shared memory so that lanes reading every fourth one
 * meet no bank twice. */
static __device__ __forceinline__ uint32_t spread(uint32_t k4)
{
    return k4 ^ (k4 >> 2 & 7);
}

/* Byte I of word as f32: as the last bits of 2^23, which cost less than a conversion. */
template <int I> static __device__ __forceinline__ float byte_value(uint32_t word)
{
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + I)) - 8388608.0f;
}

static __device__ __forceinline__ float dot_8bit(uint4 codes, uint32_t pair, const float4 *h,
                                                 uint32_t c16)
{
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    float dot = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 v = h[spread(c16 * 4 + i)];
        dot += byte_value<0>(word[i]) * v.x + byte_value<1>(word[i]) * v.y +
               byte_value<2>(word[i]) * v.z + byte_value<3>(word[i]) * v.w;
        sum += (v.x + v.y) + (v.z + v.w);
    }
    return bf16_low(pair) * dot + bf16_high(pair) * sum;
}

/* The lane's first pieces of 16 codes of row e of a router, and their pairs; none unless `used`. */
static __device__ __forceinline__ void route_fetch(uint4 w[ROUTER_LOADS],
                                                   uint32_t pair[ROUTER_LOADS],
                                                   const struct matrix &m, uint32_t e,
                                                   uint32_t pieces, bool used)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROUTER_LOADS; i++)
        if (used && i * 32 + lane < pieces) {
            w[i] = __ldg((const uint4 *)m.data + e * pieces + i * 32 + lane);
            pair[i] = __ldg(m.pairs + (e * pieces + i * 32 + lane) / 4);
        }
}

/* Their product with h. */
static __device__ __forceinline__ float route_dot(const uint4 w[ROUTER_LOADS],
                                                  const uint32_t pair[ROUTER_LOADS],
                                                  const float4 *h, uint32_t pieces, bool used)
{
    uint32_t lane = threadIdx.x % 32;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROUTER_LOADS; i++)
        if (used && i * 32 + lane < pieces)
            sum += dot_8bit(w[i], pair[i], h, i * 32 + lane);
    return sum;
}

/* h = rms_norm(x; gain) of a row, spread; the row's first block leaves it for the experts too. */
static __device__ __forceinline__ void route_norm(const struct route_args &a, uint64_t row,
                                                  float4 early, float4 *h, float *part)
{
    const float4 *x = (const float4 *)(a.x + row * a.hidden);
    float square = 0;
    for (uint32_t k = threadIdx.x; k < a.hidden / 4; k += blockDim.x) {
        float4 v = x[k];
        h[spread(k)] = v;
        square += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    float scale = rsqrtf(block_sum(square, part) / a.hidden + a.eps);
    for (uint32_t k = threadIdx.x; k < a.hidden / 4; k += blockDim.x) {
        float4 v = h[spread(k)], g = k == threadIdx.x ? early : ((const float4 *)a.gain)[k];
        v = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
        h[spread(k)] = v;
        if (blockIdx.x == 0)
            ((float4 *)(a.h + row * a.hidden))[k] = v;
    }
    __syncthreads();
}

/* A warp an expert (the last: the shared one); 8-bit weights in groups of 64. */
static __global__ void __launch_bounds__(ROUTER_WARPS * 32) route_step(const struct route_args a)
{
    extern __shared__ float4 h[]; /* [hidden / 4], spread */
    __shared__ float part[32];
    __shared__ bool last;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t e = blockIdx.x * ROUTER_WARPS + warp, pieces = a.hidden / 16;
    uint64_t row = blockIdx.y;
    const struct matrix &m = e < a.experts ? a.router : a.shared_router;
    uint32_t index = e < a.experts ? e : 0;
    uint4 w[ROUTER_LOADS];
    uint32_t pair[ROUTER_LOADS];
    route_fetch(w, pair, m, index, pieces, true);
    float4 early = {0, 0, 0, 0};
    if (threadIdx.x < a.hidden / 4)
        early = ((const float4 *)a.gain)[threadIdx.x];
    overlap_wait();
    overlap_next();
    route_norm(a, row, early, h, part);
    float sum = route_dot(w, pair, h, pieces, true);
    for (uint32_t i = ROUTER_LOADS * 32 + lane; i < pieces; i += 32)
        sum += dot_8bit(__ldg((const uint4 *)m.data + index * pieces + i),
                        __ldg(m.pairs + (index * pieces + i) / 4), h, i);
    sum = warp_sum(sum);
    float *logits = a.logits + row * (a.experts + 1);
    if (lane == 0 && e < a.experts)
        __stcg(logits + e, sum);
    if (lane == 0 && e == a.experts)
        a.shared_gate[row] = sigmoid(sum);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&a.counters[row], 1) == gridDim.x - 1;
        if (last)
            a.counters[row] = 0;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    float *kept = (float *)h;
    for (uint32_t i = threadIdx.x; i < a.experts; i += blockDim.x)
        kept[i] = __ldcg(logits + i);
    __syncthreads();
    if (warp == 0)
        route_choose(kept, a.experts, a.topk, a.renormalise, a.ids + row * a.topk,
                     a.weights + row * a.topk);
}

/* ---- router, few rows, with clusters -------------------------------------------------------- */

/* Picks the topk (at most 32) best of at most 256 logits with one warp; equal ones by the lowest
 * id. */
static __device__ __forceinline__ void route_choose_few(const float *logits, uint32_t experts,
                                                        uint32_t topk, bool renormalise,
                                                        uint32_t *ids, float *weights)
{
    uint32_t lane = threadIdx.x % 32, key[8], mine = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        uint32_t e = n * 32 + lane;
        key[n] = e < experts ? route_key(logits[e]) : 0;
    }
    for (uint32_t i = 0; i < topk; i++) {
        uint32_t own = 0, id = ~0u;
#pragma unroll
        for (int n = 0; n < 8; n++)
            own = max(own, key[n]);
        uint32_t best = __reduce_max_sync(~0u, own);
#pragma unroll
        for (int n = 7; n >= 0; n--)
            id = key[n] == best ? n * 32 + lane : id;
        id = __reduce_min_sync(~0u, id);
#pragma unroll
        for (int n = 0; n < 8; n++)
            key[n] = id == n * 32 + lane ? 0 : key[n];
        mine = lane == i ? id : mine;
    }
    float l = logits[mine], top = __shfl_sync(~0u, l, 0), weight = expf(l - top), total = 0;
    if (renormalise)
        total = lane < topk ? weight : 0;
    else
        for (uint32_t e = lane; e < experts; e += 32)
            total += expf(logits[e] - top);
    total = warp_sum(total);
    if (lane < topk) {
        ids[lane] = mine;
        weights[lane] = weight / total;
    }
}

static_assert(ROUTE_CLUSTER * (ROUTE_WARPS - 1) == CHOICE_CLUSTER_EXPERTS, "a warp an expert");
static_assert(ROUTER_LOADS * 512 == CHOICE_CLUSTER_COLS, "a lane's loads are a row");

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ROUTE_CLUSTER_DIMS __cluster_dims__(ROUTE_CLUSTER, 1, 1)
#else
#define ROUTE_CLUSTER_DIMS
#endif

/* A cluster a row, a warp an expert (the seventeenth of the first block: the shared one). The
 * logits meet in the first block's shared memory, and its first warp chooses. */
static __global__ void ROUTE_CLUSTER_DIMS __launch_bounds__(ROUTE_WARPS * 32)
    route_cluster(const __grid_constant__ struct route_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ float4 h[]; /* [hidden / 4], spread */
    __shared__ float part[32], logits[CHOICE_CLUSTER_EXPERTS];
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.barrier_arrive(); /* waited for before the first block's memory is written to */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = a.hidden / 16;
    bool shared = warp == ROUTE_WARPS - 1;
    uint32_t e = shared ? 0 : blockIdx.x * (ROUTE_WARPS - 1) + warp;
    bool used = shared ? blockIdx.x == 0 : e < a.experts;
    const struct matrix &m = shared ? a.shared_router : a.router;
    uint64_t row = blockIdx.y;
    uint4 w[ROUTER_LOADS];
    uint32_t pair[ROUTER_LOADS];
    route_fetch(w, pair, m, e, pieces, used);
    float4 early = {0, 0, 0, 0};
    if (threadIdx.x < a.hidden / 4)
        early = ((const float4 *)a.gain)[threadIdx.x];
    overlap_next();
    overlap_wait();
    route_norm(a, row, early, h, part);
    float sum = warp_sum(route_dot(w, pair, h, pieces, used));
    cluster.barrier_wait();
    if (lane == 0 && used) {
        if (shared)
            a.shared_gate[row] = sigmoid(sum);
        else
            cluster.map_shared_rank(logits, 0)[e] = sum;
    }
    cluster.sync();
    if (blockIdx.x == 0 && warp == 0)
        route_choose_few(logits, a.experts, a.topk, a.renormalise, a.ids + row * a.topk,
                         a.weights + row * a.topk);
#endif
}

/* ---- router, many rows --------------------------------------------------------------------- */

enum { TILE_ROWS = 32, TILE_WARPS = 9 };
static_assert(TILE_WARPS * 32 == CHOICE_ROUTE_OUTS, "a warp has 32 outputs");

/* x as two f16 (22 bits), columns 4 t.. of a step: the operands of both products. */
static __device__ __forceinline__ uint4 route_split(float4 v)
{
    __half2 h0 = __floats2half2_rn(v.x, v.y), h1 = __floats2half2_rn(v.z, v.w);
    float2 f0 = __half22float2(h0), f1 = __half22float2(h1);
    __half2 l0 = __floats2half2_rn(v.x - f0.x, v.y - f0.y);
    __half2 l1 = __floats2half2_rn(v.z - f1.x, v.w - f1.y);
    return make_uint4(*(uint32_t *)&h0, *(uint32_t *)&h1, *(uint32_t *)&l0, *(uint32_t *)&l1);
}

/* Two 8-bit codes as exact f16: bytes at and at + 1 of word. */
static __device__ __forceinline__ uint32_t route_codes(uint32_t word, int at)
{
    uint32_t u = __byte_perm(word, 0x64646464u, at ? 0x4342 : 0x4140);
    __half2 v = __hsub2(*(__half2 *)&u, __float2half2_rn(1024));
    return *(uint32_t *)&v;
}

/* 32 rows a block: norm, then a warp has 32 outputs of the router and the shared router, whose
 * codes tensor cores multiply exactly with x split in two; groups are scaled in f32. A thread's
 * codes are 16 columns in a row, so a group's columns come as (lane % 4) * 16 + step * 4. */
static __global__ void __launch_bounds__(TILE_WARPS * 32)
    route_tile(const __grid_constant__ struct route_args a, float *shared_logits, uint32_t rows)
{
    __shared__ uint4 xs[2][TILE_ROWS][17]; /* of a group: [16] pieces of 4 columns */
    __shared__ float sums[2][TILE_ROWS], scales[TILE_ROWS];
    overlap_wait();
    overlap_next();
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = a.hidden / 64;
    uint32_t row0 = blockIdx.x * TILE_ROWS;
    for (uint32_t r = warp; r < TILE_ROWS; r += TILE_WARPS) {
        const float4 *x = (const float4 *)(a.x + (uint64_t)min(row0 + r, rows - 1) * a.hidden);
        float square = 0;
#pragma unroll 4
        for (uint32_t k = lane; k < a.hidden / 4; k += 32) {
            float4 v = x[k];
            square += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        square = warp_sum(square);
        if (lane == 0)
            scales[r] = rsqrtf(square / a.hidden + a.eps);
    }
    uint32_t out[2][2]; /* tile, lower */
    const uint8_t *codes[2][2];
    const uint32_t *pairs[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            uint32_t o = out[i][lower] = warp * 32 + i * 16 + lower * 8 + lane / 4;
            const struct matrix &m = o < a.experts ? a.router : a.shared_router;
            uint64_t e = o < a.experts ? o : 0;
            codes[i][lower] = m.data + e * a.hidden + lane % 4 * 16;
            pairs[i][lower] = m.pairs + e * groups;
        }
    float y[2][4][4] = {};
    __syncthreads();
    for (uint32_t g = 0; g < groups; g++) {
        for (uint32_t i = threadIdx.x; i < TILE_ROWS * 16; i += TILE_WARPS * 32) {
            uint32_t r = i / 16, k4 = g * 16 + i % 16, row = min(row0 + r, rows - 1);
            float4 v = ((const float4 *)(a.x + (uint64_t)row * a.hidden))[k4];
            float4 gain = ((const float4 *)a.gain)[k4];
            float scale = scales[r];
            v = make_float4(v.x * scale * gain.x, v.y * scale * gain.y, v.z * scale * gain.z,
                            v.w * scale * gain.w);
            if (row0 + r < rows)
                ((float4 *)(a.h + (uint64_t)row * a.hidden))[k4] = v;
            xs[g % 2][r][i % 16] = route_split(v);
            float sum = (v.x + v.y) + (v.z + v.w);
            unsigned mask = 0xffffu << (lane & 16);
            for (int off = 8; off; off /= 2)
                sum += __shfl_xor_sync(mask, sum, off);
            if (i % 16 == 0)
                sums[g % 2][r] = sum;
        }
        uint4 w[2][2];
        uint32_t pair[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                w[i][lower] = __ldg((const uint4 *)(codes[i][lower] + g * 64));
                pair[i][lower] = __ldg(pairs[i][lower] + g);
            }
        __syncthreads();
        float d[2][4][4] = {};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t f[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t u = (&w[i][0].x)[step], l = (&w[i][1].x)[step];
                f[i][0] = route_codes(u, 0);
                f[i][1] = route_codes(l, 0);
                f[i][2] = route_codes(u, 1);
                f[i][3] = route_codes(l, 1);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint4 b = xs[g % 2][j * 8 + lane / 4][lane % 4 * 4 + step];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_f16(d[i][j], f[i], b.x, b.y);
                    mma_f16(d[i][j], f[i], b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float sum = sums[g % 2][j * 8 + lane % 4 * 2 + n % 2];
#pragma unroll
                for (int i = 0; i < 2; i++)
                    y[i][j][n] +=
                        bf16_low(pair[i][n / 2]) * d[i][j][n] + bf16_high(pair[i][n / 2]) * sum;
            }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t row = row0 + j * 8 + lane % 4 * 2 + n % 2, o = out[i][n / 2];
                if (row < rows && o < a.experts)
                    a.logits[(uint64_t)row * a.experts + o] = y[i][j][n];
                if (row < rows && o == a.experts)
                    shared_logits[row] = y[i][j][n];
            }
}

/* A warp a row, from logits [rows, experts] and the shared router's [rows]. */
static __global__ void route_rows(const struct route_args a, const float *shared, uint32_t rows)
{
    overlap_wait();
    overlap_next();
    uint64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows)
        return;
    if (threadIdx.x % 32 == 0)
        a.shared_gate[row] = sigmoid(shared[row]);
    route_choose(a.logits + row * a.experts, a.experts, a.topk, a.renormalise, a.ids + row * a.topk,
                 a.weights + row * a.topk);
}

bool cuda_route_has_clusters(void)
{
    int clusters = 0;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ROUTE_CLUSTER);
    config.blockDim = dim3(ROUTE_WARPS * 32);
    config.dynamicSmemBytes = CHOICE_CLUSTER_COLS * sizeof(float);
    cudaError_t error =
        cudaFuncSetAttribute(route_cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveClusters(&clusters, route_cluster, &config);
    cudaGetLastError();
    return error == cudaSuccess && clusters > 0;
}

static bool route_is_8bit(const struct weight *w)
{
    return w->kind == WEIGHT_AFFINE && w->bits == 8 && w->group == 64;
}

static void route_run(struct device *device, const struct moe_route_args *args)
{
    const struct moe_dims *d = &args->dims;
    struct route_args a = {};
    a.router = cuda_matrix(args->router);
    a.shared_router = cuda_matrix(args->shared_router);
    a.experts = d->experts;
    a.topk = d->topk;
    a.hidden = d->hidden;
    a.renormalise = d->renormalise;
    a.eps = d->eps;
    a.x = cuda_at<const float>(args->x);
    a.gain = cuda_at<const float>(args->gain);
    a.h = cuda_at<float>(args->h);
    a.ids = cuda_at<uint32_t>(args->ids);
    a.weights = cuda_at<float>(args->weights);
    a.shared_gate = cuda_at<float>(args->shared_gate);
    a.counters = cuda_counters(device);
    a.logits =
        (float *)cuda_scratch(device, SCRATCH_ROUTE, (uint64_t)args->rows * (d->experts + 1) * 4);
    if (!a.logits)
        return;
    if (d->experts > ROUTE_EXPERTS_MAX) {
        cuda_fail(device, ERR_INTERNAL, "more than 1024 experts", cudaErrorInvalidValue);
        return;
    }
    bool bits8 = route_is_8bit(args->router) && route_is_8bit(args->shared_router);
    enum choice_route route =
        choice_route(args->rows, d->hidden, d->experts, d->topk, bits8, device->clusters);
    if (route == CHOICE_ROUTE_CLUSTER) {
        cuda_launch(device, route_cluster, dim3(ROUTE_CLUSTER, args->rows), ROUTE_WARPS * 32,
                    d->hidden * sizeof(float), a);
        return;
    }
    if (route == CHOICE_ROUTE_STEP) {
        size_t shared = (d->hidden > d->experts ? d->hidden : d->experts) * sizeof(float);
        cuda_launch(device, route_step, dim3(cuda_ceil(d->experts + 1, ROUTER_WARPS), args->rows),
                    ROUTER_WARPS * 32, shared, a);
        return;
    }
    float *shared = a.logits + (uint64_t)args->rows * d->experts;
    if (route == CHOICE_ROUTE_TILE) {
        cuda_launch(device, route_tile, dim3(cuda_ceil(args->rows, TILE_ROWS)), TILE_WARPS * 32, 0,
                    a, shared, args->rows);
        cuda_launch(device, route_rows, dim3(cuda_ceil(args->rows, 4)), 128, 0, a,
                    (const float *)shared, args->rows);
        return;
    }
    cuda_norm_rows(device, a.x, nullptr, a.gain, a.eps, args->rows, d->hidden, a.h);
    cuda_linear_any(device, a.router, a.h, args->rows, false, a.logits);
    cuda_linear_any(device, a.shared_router, a.h, args->rows, false, shared);
    cuda_launch(device, route_rows, dim3(cuda_ceil(args->rows, 4)), 128, 0, a,
                (const float *)shared, args->rows);
}

void cuda_moe_route(struct device *device, const struct moe_route_args *args)
{
    route_run(device, args);
    if (device->without & CUDA_ROUTING)
        cuda_look(device, cuda_at<const void>(args->ids), 4ull * args->rows * args->dims.topk);
}

/* ---- experts, few rows -------------------------------------------------------------------- */

struct experts_args {
    struct matrix gate, up, down, shared_gate_proj, shared_up, shared_down;
    uint32_t hidden, width, shared_width, topk;
    const float *h, *weights, *shared_gate;
    const uint32_t *ids;
    float *act; /* f32 [rows, topk * width + shared_width] */
    float *x;
};

/* A block: 16 outputs of gate and up of one choice of one row. Tiles of the choices come first,
 * then those of the shared expert. The warps share the columns; each fetches its part of the
 * weights and packs its part of h by itself. */
static __global__ void __launch_bounds__(UP_WARPS * 32)
    experts_gate_up(const __grid_constant__ struct experts_args a)
{
    extern __shared__ uint4 space[];
    __shared__ float red[UP_WARPS][2][16];
    uint32_t groups = a.hidden / 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t from = groups * warp / UP_WARPS, n = groups * (warp + 1) / UP_WARPS - from;
    uint32_t most = (groups + UP_WARPS - 1) / UP_WARPS;
    uint4 *packed = space + warp * most * UP_GROUP; /* this warp's: x, sums, codes, pairs */
    float2 *scales = (float2 *)(packed + most * 8);
    uint4 *codes = packed + most * 9, *pairs = codes + most * 64;
    uint32_t tiles = (a.width + 15) / 16, choice = min(blockIdx.x / tiles, a.topk);
    uint32_t tile = blockIdx.x - choice * tiles;
    bool shared = choice == a.topk;
    uint64_t row = blockIdx.y, expert = 0;
    if (!shared) {
        overlap_wait();
        expert = a.ids[row * a.topk + choice];
    }
    for (int m = 0; m < 2; m++) {
        const struct matrix &w =
            m ? (shared ? a.shared_up : a.up) : (shared ? a.shared_gate_proj : a.gate);
        uint64_t at = (expert * (w.stride / 16) + tile) * groups + from;
        for (uint32_t g = 0; g < n; g++)
            copy_async(codes + (m * most + g) * 32 + lane,
                       (const uint4 *)w.data + (at + g) * 32 + lane, true);
        for (uint32_t i = lane; i < n * 4; i += 32)
            copy_async(pairs + m * most * 4 + i, (const uint4 *)w.pairs + at * 4 + i, true);
    }
    copy_commit();
    overlap_wait();
    overlap_next();
    const float4 *h = (const float4 *)(a.h + row * a.hidden + from * 64);
    for (uint32_t k8 = lane; k8 < n * 8; k8 += 32) {
        float v[8];
        *(float4 *)v = h[k8 * 2];
        *(float4 *)(v + 4) = h[k8 * 2 + 1];
        step_pack(packed, scales, 1, 0, k8, v);
    }
    copy_wait<0>();
    __syncwarp();
    float y[2][2] = {};
#pragma unroll 4
    for (uint32_t g = 0; g < n; g++) {
        uint4 b = step_load(packed, 1, g);
        float2 x = scales[g];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint32_t *pair = (const uint32_t *)(pairs + (m * most + g) * 4);
            tile_step(y[m], codes[(m * most + g) * 32 + lane], pair[lane / 4], pair[lane / 4 + 8],
                      b, x);
        }
    }
    if (lane % 4 == 0)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            red[warp][m][lane / 4] = y[m][0];
            red[warp][m][lane / 4 + 8] = y[m][1];
        }
    __syncthreads();
    uint32_t o = tile * 16 + threadIdx.x;
    if (threadIdx.x < 16 && o < (shared ? a.shared_width : a.width)) {
        float g = 0, u = 0;
#pragma unroll
        for (int w = 0; w < UP_WARPS; w++) {
            g += red[w][0][threadIdx.x];
            u += red[w][1][threadIdx.x];
        }
        a.act[row * (a.topk * a.width + a.shared_width) + choice * a.width + o] = silu(g) * u;
    }
}

/* Packs n columns of act for the warp alone. */
static __device__ __forceinline__ void down_pack(uint4 *packed, float2 *scales, const float *act,
                                                 uint32_t n)
{
    __syncwarp(); /* the last choice has been read */
    for (uint32_t k8 = threadIdx.x % 32; k8 < n / 8; k8 += 32) {
        float v[8];
        *(float4 *)v = ((const float4 *)act)[k8 * 2];
        *(float4 *)(v + 4) = ((const float4 *)act)[k8 * 2 + 1];
        step_pack(packed, scales, 1, 0, k8, v);
    }
    __syncwarp();
}

/* A block: 16 outputs of one row; two warps, each with half of the columns, take choices
 * warp / 2, warp / 2 + warps / 2, .. */
static __global__ void __launch_bounds__(DOWN_WARPS * 32)
    experts_down(const __grid_constant__ struct experts_args a)
{
    constexpr int AHEAD = 4;
    extern __shared__ uint4 space[]; /* a warp: packed [groups][2][4], scales [groups] */
    __shared__ float red[DOWN_WARPS][16];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32_t most = (max(a.width, a.shared_width) / 64 + 1) / 2, tile = blockIdx.x;
    uint4 *packed = space + warp * (most * 8 + (most + 1) / 2);
    float2 *scales = (float2 *)(packed + most * 8);
    uint64_t row = blockIdx.y;
    const float *act = a.act + row * (a.topk * a.width + a.shared_width);
    float total[2] = {0, 0};
    for (uint32_t choice = warp / 2; choice <= a.topk; choice += warps / 2) {
        bool shared = choice == a.topk;
        const struct matrix &m = shared ? a.shared_down : a.down;
        /* the router's results: older than the kernel before this one */
        uint64_t expert = shared ? 0 : a.ids[row * a.topk + choice];
        float scale = shared ? a.shared_gate[row] : a.weights[row * a.topk + choice];
        uint32_t groups = m.cols / 64, half = (groups + 1) / 2, from = warp % 2 * half;
        uint32_t n = warp % 2 ? groups - half : half;
        uint64_t at = (expert * (m.stride / 16) + tile) * groups + from;
        const uint4 *data = (const uint4 *)m.data + at * 32 + lane;
        const uint32_t *pairs = m.pairs + at * 16 + lane / 4;
        float y[2] = {0, 0};
        uint4 w[AHEAD];
        uint32_t pair[AHEAD][2];
        for (uint32_t g0 = 0; g0 == 0 || g0 < n; g0 += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (g0 + i < n) {
                    w[i] = __ldg(data + (g0 + i) * 32);
                    pair[i][0] = __ldg(pairs + (g0 + i) * 16);
                    pair[i][1] = __ldg(pairs + (g0 + i) * 16 + 8);
                }
            if (g0 == 0) {
                overlap_next();
                overlap_wait();
                down_pack(packed, scales, act + choice * a.width + from * 64, n * 64);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (g0 + i < n)
                    tile_step(y, w[i], pair[i][0], pair[i][1], step_load(packed, 1, g0 + i),
                              scales[g0 + i]);
        }
        total[0] += scale * y[0];
        total[1] += scale * y[1];
    }
    if (lane % 4 == 0) {
        red[warp][lane / 4] = total[0];
        red[warp][lane / 4 + 8] = total[1];
    }
    __syncthreads();
    uint32_t o = tile * 16 + threadIdx.x;
    if (threadIdx.x < 16 && o < a.hidden) {
        float sum = 0;
        for (uint32_t n = 0; n < warps; n++)
            sum += red[n][threadIdx.x];
        a.x[row * a.hidden + o] += sum;
    }
}

/* ---- experts, any weights ------------------------------------------------------------------ */

static __device__ float any_dot(const struct matrix &m, uint64_t row, const float *x)
{
    float sum = 0;
    for (uint32_t k = threadIdx.x % 32; k < m.cols; k += 32)
        sum += matrix_at(m, row, k) * x[k];
    return warp_sum(sum);
}

/* A warp an element of act. */
static __global__ void experts_gate_up_any(const struct experts_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t n = a.topk * a.width + a.shared_width;
    uint32_t i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    uint64_t row = blockIdx.y;
    if (i >= n)
        return;
    const float *h = a.h + row * a.hidden;
    uint32_t choice = min(i / a.width, a.topk), o = i - choice * a.width;
    float g, u;
    if (choice < a.topk) {
        uint64_t at = a.ids[row * a.topk + choice];
        g = any_dot(a.gate, at * a.gate.stride + o, h);
        u = any_dot(a.up, at * a.up.stride + o, h);
    } else {
        g = any_dot(a.shared_gate_proj, o, h);
        u = any_dot(a.shared_up, o, h);
    }
    if (threadIdx.x % 32 == 0)
        a.act[row * n + i] = silu(g) * u;
}

/* A warp an output. */
static __global__ void experts_down_any(const struct experts_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    uint64_t row = blockIdx.y;
    if (o >= a.hidden)
        return;
    const float *act = a.act + row * (a.topk * a.width + a.shared_width);
    float sum = a.shared_gate[row] * any_dot(a.shared_down, o, act + a.topk * a.width);
    for (uint32_t i = 0; i < a.topk; i++) {
        uint64_t at = (uint64_t)a.ids[row * a.topk + i] * a.down.stride + o;
        sum += a.weights[row * a.topk + i] * any_dot(a.down, at, act + i * a.width);
    }
    if (threadIdx.x % 32 == 0)
        a.x[row * a.hidden + o] += sum;
}

/* ---- the op ------------------------------------------------------------------------------- */

static void experts_step(struct device *device, const struct experts_args &a, uint32_t rows)
{
    uint32_t tiles = a.topk * cuda_ceil(a.width, 16) + cuda_ceil(a.shared_width, 16);
    uint32_t widest = a.width > a.shared_width ? a.width : a.shared_width;
    cuda_launch(device, experts_gate_up, dim3(tiles, rows), UP_WARPS * 32,
                choice_up_bytes(a.hidden), a);
    cuda_launch(device, experts_down, dim3(cuda_ceil(a.hidden, 16), rows),
                choice_down_warps(a.topk) * 32, choice_down_bytes(a.topk, widest), a);
}

void cuda_moe_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *d = &args->dims;
    const struct weight *all[] = {args->gate,      args->up,          args->down,
                                  args->shared_up, args->shared_down, args->shared_gate_proj};
    bool tiled = true, batch = args->rows > BATCH_LEAST && !(device->without & CUDA_BATCH);
    bool grouped = args->rows > CHOICE_FEW_ROWS && !(device->without & CUDA_GROUPED);
    uint32_t widest = d->width > d->shared_width ? d->width : d->shared_width;
    for (const struct weight *w : all)
        tiled = tiled && cuda_is_tiled(w);
    if (tiled && batch && cuda_batch_experts(device, args))
        return;
    if (tiled &&
        (grouped || !choice_experts_step_fits(d->hidden, d->topk, widest, device->shared_limit))) {
        cuda_prefill_experts(device, args);
        return;
    }
    struct experts_args a = {};
    cuda_fill_experts(&a, args);
    a.width = d->width;
    a.shared_width = d->shared_width;
    uint32_t n = d->topk * d->width + d->shared_width;
    a.act = (float *)cuda_scratch(device, SCRATCH_EXPERTS, (uint64_t)args->rows * n * 4);
    if (!a.act)
        return;
    if (tiled) {
        experts_step(device, a, args->rows);
        return;
    }
    cuda_launch(device, experts_gate_up_any, dim3(cuda_ceil(n, 8), args->rows), 256, 0, a);
    cuda_launch(device, experts_down_any, dim3(cuda_ceil(d->hidden, 8), args->rows), 256, 0, a);
}
