/* Router and experts.
 *
 * Few rows ("step"): the router is one launch, whose last block of a row picks the experts; then
 * gate and up with SiLU (a block owns 16 outputs of one chosen expert), then down (a block owns 16
 * outputs, a warp an expert) with the weighted sum and the residual. Each row reads its own
 * experts. Many rows: prefill.cu. Weights that are not tiled: one warp an output. */
#include "backend/cuda/ops.cuh"

#include <math.h>

enum { STEP_ROWS = 32, ROUTER_WARPS = 8, ROUTER_LOADS = 4, GROUPS_AHEAD = 4, DOWN_WARPS = 12 };
enum { ROUTE_EXPERTS_MAX = 1024 };

/* ---- choosing ----------------------------------------------------------------------------- */

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
                uint32_t u = __float_as_uint(logits[e] + 0.0f);
                u = u & 0x80000000u ? ~u : u | 0x80000000u;
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

static __device__ __forceinline__ float dot_8bit(uint4 codes, uint32_t pair, const float4 *h,
                                                 uint32_t c16)
{
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    float dot = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 v = h[spread(c16 * 4 + i)];
        dot += (word[i] & 255) * v.x + (word[i] >> 8 & 255) * v.y + (word[i] >> 16 & 255) * v.z +
               (word[i] >> 24) * v.w;
        sum += (v.x + v.y) + (v.z + v.w);
    }
    return bf16_low(pair) * dot + bf16_high(pair) * sum;
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
    uint64_t index = e < a.experts ? e : 0;
    const uint4 *codes = (const uint4 *)m.data + index * pieces;
    const uint32_t *pairs = m.pairs + index * (a.hidden / 64);
    uint4 w[ROUTER_LOADS];
    uint32_t pair[ROUTER_LOADS];
#pragma unroll
    for (int i = 0; i < ROUTER_LOADS; i++)
        if (i * 32 + lane < pieces) {
            w[i] = __ldg(codes + i * 32 + lane);
            pair[i] = __ldg(pairs + (i * 32 + lane) / 4);
        }
    overlap_wait();
    overlap_next();
    const float4 *x = (const float4 *)(a.x + row * a.hidden);
    float square = 0;
    for (uint32_t k = threadIdx.x; k < a.hidden / 4; k += blockDim.x) {
        float4 v = x[k];
        square += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    float scale = rsqrtf(block_sum(square, part) / a.hidden + a.eps);
    for (uint32_t k = threadIdx.x; k < a.hidden / 4; k += blockDim.x) {
        float4 v = x[k], g = ((const float4 *)a.gain)[k];
        v = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
        h[spread(k)] = v;
        if (blockIdx.x == 0)
            ((float4 *)(a.h + row * a.hidden))[k] = v;
    }
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROUTER_LOADS; i++)
        if (i * 32 + lane < pieces)
            sum += dot_8bit(w[i], pair[i], h, i * 32 + lane);
    for (uint32_t i = ROUTER_LOADS * 32 + lane; i < pieces; i += 32)
        sum += dot_8bit(__ldg(codes + i), __ldg(pairs + i / 4), h, i);
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

static bool route_is_8bit(const struct weight *w)
{
    return w->kind == WEIGHT_AFFINE && w->bits == 8 && w->group == 64;
}

void cuda_moe_route(struct device *device, const struct moe_route_args *args)
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
    if (args->rows <= STEP_ROWS && route_is_8bit(args->router) &&
        route_is_8bit(args->shared_router)) {
        size_t shared = (d->hidden > d->experts ? d->hidden : d->experts) * sizeof(float);
        cuda_launch(device, route_step, dim3(cuda_ceil(d->experts + 1, ROUTER_WARPS), args->rows),
                    ROUTER_WARPS * 32, shared, a);
        return;
    }
    float *shared = a.logits + (uint64_t)args->rows * d->experts;
    cuda_norm_rows(device, a.x, nullptr, a.gain, a.eps, args->rows, d->hidden, a.h);
    cuda_linear_any(device, a.router, a.h, args->rows, false, a.logits);
    cuda_linear_any(device, a.shared_router, a.h, args->rows, false, shared);
    cuda_launch(device, route_rows, dim3(cuda_ceil(args->rows, 4)), 128, 0, a,
                (const float *)shared, args->rows);
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
 * then those of the shared expert. */
static __global__ void __launch_bounds__(256) experts_gate_up(const struct experts_args a)
{
    extern __shared__ uint4 packed[]; /* [hidden/64][2][2][4], then sums [hidden/64] */
    __shared__ float red[8][2][16];
    uint32_t groups = a.hidden / 64, warps = blockDim.x / 32;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *sums = (float *)(packed + groups * 16);
    uint32_t tiles = (a.width + 15) / 16, choice = blockIdx.x / tiles;
    uint32_t tile = blockIdx.x - min(choice, a.topk) * tiles;
    bool shared = choice >= a.topk;
    uint64_t row = blockIdx.y, expert = 0;
    if (!shared) {
        overlap_wait();
        expert = a.ids[row * a.topk + choice];
    }
    const struct matrix &gate = shared ? a.shared_gate_proj : a.gate;
    const struct matrix &up = shared ? a.shared_up : a.up;
    uint64_t at = (expert * (gate.stride / 16) + tile) * groups;
    const uint4 *data[2] = {(const uint4 *)gate.data + at * 32 + lane,
                            (const uint4 *)up.data + at * 32 + lane};
    const uint32_t *pairs[2] = {gate.pairs + at * 16 + lane / 4, up.pairs + at * 16 + lane / 4};
    uint32_t from = groups * warp / warps, to = groups * (warp + 1) / warps;
    float y[2][2] = {};
    uint4 w[2][GROUPS_AHEAD];
    uint32_t pair[2][GROUPS_AHEAD][2];
    for (uint32_t g0 = from; g0 == from || g0 < to; g0 += GROUPS_AHEAD) {
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                if (g0 + i < to) {
                    w[m][i] = __ldg(data[m] + (g0 + i) * 32);
                    pair[m][i][0] = __ldg(pairs[m] + (g0 + i) * 16);
                    pair[m][i][1] = __ldg(pairs[m] + (g0 + i) * 16 + 8);
                }
        if (g0 == from) {
            overlap_wait();
            overlap_next();
            const float4 *h = (const float4 *)(a.h + row * a.hidden);
            for (uint32_t k8 = threadIdx.x; k8 < a.hidden / 8; k8 += blockDim.x) {
                float v[8];
                *(float4 *)v = h[k8 * 2];
                *(float4 *)(v + 4) = h[k8 * 2 + 1];
                float sum = sum_of_8(step_pack(packed, 1, 0, k8, v));
                if (k8 % 8 == 0)
                    sums[k8 / 8] = sum;
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++) {
            uint32_t g = g0 + i;
            if (g >= to)
                continue;
            uint4 b01 = step_load(packed, 1, g, 0), b23 = step_load(packed, 1, g, 1);
            float sum = sums[g];
            tile_step(y[0], w[0][i], pair[0][i][0], pair[0][i][1], b01, b23, sum);
            tile_step(y[1], w[1][i], pair[1][i][0], pair[1][i][1], b01, b23, sum);
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
        for (uint32_t n = 0; n < warps; n++) {
            g += red[n][0][threadIdx.x];
            u += red[n][1][threadIdx.x];
        }
        a.act[row * (a.topk * a.width + a.shared_width) + min(choice, a.topk) * a.width + o] =
            silu(g) * u;
    }
}

/* Packs n columns of act for the warp alone. */
static __device__ __forceinline__ void down_pack(uint4 *packed, float *sums, const float *act,
                                                 uint32_t n)
{
    __syncwarp(); /* the last choice has been read */
    for (uint32_t k8 = threadIdx.x % 32; k8 < n / 8; k8 += 32) {
        float v[8];
        *(float4 *)v = ((const float4 *)act)[k8 * 2];
        *(float4 *)(v + 4) = ((const float4 *)act)[k8 * 2 + 1];
        float sum = sum_of_8(step_pack(packed, 1, 0, k8, v));
        if (k8 % 8 == 0)
            sums[k8 / 8] = sum;
    }
    __syncwarp();
}

/* A block: 16 outputs of one row; a warp takes choices warp, warp + warps, .. */
static __global__ void __launch_bounds__(DOWN_WARPS * 32) experts_down(const struct experts_args a)
{
    constexpr int AHEAD = 8;
    extern __shared__ uint4 space[]; /* a warp: packed [groups][2][2][4], sums [groups] */
    __shared__ float red[DOWN_WARPS][16];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32_t most = max(a.width, a.shared_width) / 64, tile = blockIdx.x;
    uint4 *packed = space + warp * (most * 16 + (most + 3) / 4);
    float *sums = (float *)(packed + most * 16);
    uint64_t row = blockIdx.y;
    const float *act = a.act + row * (a.topk * a.width + a.shared_width);
    float total[2] = {0, 0};
    for (uint32_t choice = warp; choice <= a.topk; choice += warps) {
        bool shared = choice == a.topk;
        const struct matrix &m = shared ? a.shared_down : a.down;
        /* the router's results: older than the kernel before this one */
        uint64_t expert = shared ? 0 : a.ids[row * a.topk + choice];
        float scale = shared ? a.shared_gate[row] : a.weights[row * a.topk + choice];
        uint32_t groups = m.cols / 64;
        uint64_t at = (expert * (m.stride / 16) + tile) * groups;
        const uint4 *data = (const uint4 *)m.data + at * 32 + lane;
        const uint32_t *pairs = m.pairs + at * 16 + lane / 4;
        float y[2] = {0, 0};
        uint4 w[AHEAD];
        uint32_t pair[AHEAD][2];
        for (uint32_t g0 = 0; g0 < groups; g0 += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (g0 + i < groups) {
                    w[i] = __ldg(data + (g0 + i) * 32);
                    pair[i][0] = __ldg(pairs + (g0 + i) * 16);
                    pair[i][1] = __ldg(pairs + (g0 + i) * 16 + 8);
                }
            if (g0 == 0) {
                overlap_wait();
                overlap_next();
                down_pack(packed, sums, act + choice * a.width, groups * 64);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (g0 + i < groups)
                    tile_step(y, w[i], pair[i][0], pair[i][1], step_load(packed, 1, g0 + i, 0),
                              step_load(packed, 1, g0 + i, 1), sums[g0 + i]);
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
    uint32_t groups = a.hidden / 64, warps = cuda_ceil(groups, GROUPS_AHEAD);
    uint32_t tiles = a.topk * cuda_ceil(a.width, 16) + cuda_ceil(a.shared_width, 16);
    uint32_t most = (a.width > a.shared_width ? a.width : a.shared_width) / 64;
    uint32_t down_warps = a.topk + 1 < DOWN_WARPS ? a.topk + 1 : DOWN_WARPS;
    cuda_launch(device, experts_gate_up, dim3(tiles, rows), (warps > 8 ? 8 : warps) * 32,
                (size_t)groups * 260, a);
    cuda_launch(device, experts_down, dim3(cuda_ceil(a.hidden, 16), rows), down_warps * 32,
                (size_t)down_warps * (most * 256 + (most + 3) / 4 * 16), a);
}

void cuda_moe_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *d = &args->dims;
    const struct weight *all[] = {args->gate,      args->up,          args->down,
                                  args->shared_up, args->shared_down, args->shared_gate_proj};
    bool tiled = true;
    for (const struct weight *w : all)
        tiled = tiled && cuda_is_tiled(w);
    if (tiled && args->rows > STEP_ROWS) {
        cuda_prefill_experts(device, args);
        return;
    }
    struct experts_args a = {};
    a.gate = cuda_matrix(args->gate);
    a.up = cuda_matrix(args->up);
    a.down = cuda_matrix(args->down);
    a.shared_gate_proj = cuda_matrix(args->shared_gate_proj);
    a.shared_up = cuda_matrix(args->shared_up);
    a.shared_down = cuda_matrix(args->shared_down);
    a.hidden = d->hidden;
    a.width = d->width;
    a.shared_width = d->shared_width;
    a.topk = d->topk;
    a.h = cuda_at<const float>(args->h);
    a.ids = cuda_at<const uint32_t>(args->ids);
    a.weights = cuda_at<const float>(args->weights);
    a.shared_gate = cuda_at<const float>(args->shared_gate);
    a.x = cuda_at<float>(args->x);
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
