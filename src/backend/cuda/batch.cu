/* Matrix products of more than BATCH_LEAST and at most BATCH_ROWS rows with tiled 4-bit weights:
 * sequences that decode together.
 *
 * Products are those of one row (tile_step: exact digits on 8-bit tensor cores), four rows at a
 * time, so a sequence gets in a batch what it gets alone. What bounds them is bytes of weights;
 * each is read once for all rows that want it, straight into the registers of the warp that
 * multiplies it, a step ahead.
 *
 *   batch_pack:    a row a block: norm, digits. With up to PACK_SETS sets batch_linear does that.
 *   batch_linear:  digits of up to 32 rows in shared memory; blocks walk tiles of 16 outputs, whose
 *                  columns the warps share.
 *   experts:       batch_route sorts the pairs into tiles of four rows of one expert; gate_up has
 *                  16 outputs of both a warp, down twice 16; batch_combine sums a row's choices. */
#include "backend/cuda/batch.cuh"

enum { BATCH_WARPS = 8, BATCH_THREADS = BATCH_WARPS * 32, SET = CHOICE_SET };
enum { LINEAR_WARPS = CHOICE_BATCH_WARPS, LINEAR_THREADS = LINEAR_WARPS * 32 };
enum { PACK_SETS = 2 /* with so many sets a block, each packs its rows by itself */ };
enum { BATCH_AHEAD = 4, DOWN_AHEAD = 4, DOWN_TILES = 2 };

/* Rows as digits (step_pack of one row each), before the norm's scale, as one row alone has it. */
struct batch_rows {
    uint4 *digits;  /* [rows, groups, 8] */
    float2 *scales; /* [rows, groups] */
    float *norms;   /* [rows]: what the norm scales by; 1 without one */
};

static __device__ __forceinline__ void pack_row(const struct batch_rows &to, uint32_t row,
                                                const float *x, const float *gain, float eps,
                                                uint32_t cols, float *part)
{
    uint32_t groups = cols / 64;
    float scale = 1;
    if (gain) {
        float sum = 0;
        for (uint32_t k = threadIdx.x; k < cols / 4; k += blockDim.x) {
            float4 v = ((const float4 *)x)[k];
            sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        scale = rsqrtf(block_sum(sum, part) / cols + eps);
    }
    if (threadIdx.x == 0)
        to.norms[row] = scale;
    for (uint32_t k8 = threadIdx.x; k8 < cols / 8; k8 += blockDim.x) {
        float v[8];
        *(float4 *)v = ((const float4 *)x)[k8 * 2];
        *(float4 *)(v + 4) = ((const float4 *)x)[k8 * 2 + 1];
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] *= gain ? gain[k8 * 8 + i] : 1;
        step_pack(to.digits + (uint64_t)row * groups * 8, to.scales + (uint64_t)row * groups, 1, 0,
                  k8, v);
    }
}

/* ---- projections -------------------------------------------------------------------------- */

static __global__ void batch_pack(const struct batch_rows to, const float *x,
                                  const uint32_t *select, const float *gain, float eps,
                                  uint32_t cols)
{
    __shared__ float part[32];
    overlap_wait();
    overlap_next();
    uint64_t row = select ? select[blockIdx.x] : blockIdx.x;
    pack_row(to, blockIdx.x, x + row * cols, gain, eps, cols, part);
}

struct batch_linear_args {
    const uint4 *data[LINEAR_MAX];
    const uint32_t *pairs[LINEAR_MAX];
    float *out[LINEAR_MAX];
    uint32_t outs[LINEAR_MAX];
    uint32_t first_tile[LINEAR_MAX + 1];
    struct batch_rows packed; /* with more than PACK_SETS */
    const float *x, *gain;    /* else */
    const uint32_t *select;
    uint32_t rows, groups;
    float eps;
    bool add;
};

/* A warp's part of a tile: G groups. */
template <int G> struct tile_part {
    uint4 codes[G];
    uint32_t pairs[G][2];
};

template <int G>
static __device__ __forceinline__ void load_part(struct tile_part<G> *part, const uint4 *data,
                                                 const uint32_t *pairs, uint64_t at, uint32_t n)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < G; g++)
        if (g < n) {
            part->codes[g] = __ldg(data + (at + g) * 32 + lane);
            part->pairs[g][0] = __ldg(pairs + (at + g) * 16 + lane / 4);
            part->pairs[g][1] = __ldg(pairs + (at + g) * 16 + lane / 4 + 8);
        }
}

/* The matrix of tile `tile` of all. */
static __device__ __forceinline__ int linear_matrix(const struct batch_linear_args &a,
                                                    uint32_t tile)
{
    int m = 0;
    while (tile >= a.first_tile[m + 1])
        m++;
    return m;
}

template <int G>
static __device__ __forceinline__ void linear_load(const struct batch_linear_args &a,
                                                   struct tile_part<G> *part, uint32_t tile,
                                                   uint32_t from, uint32_t n)
{
    if (tile >= a.first_tile[LINEAR_MAX])
        return;
    int m = linear_matrix(a, tile);
    uint64_t at = (uint64_t)(tile - a.first_tile[m]) * a.groups + from;
    load_part<G>(part, a.data[m], a.pairs[m], at, n);
}

/* Sums the warps' parts of a tile for the block's rows. red: f32 [warps][ROWS][16]. */
template <int SETS>
static __device__ __forceinline__ void linear_finish(const struct batch_linear_args &a,
                                                     const float *red, const float *norms,
                                                     uint32_t tile, uint32_t row0, uint32_t rows)
{
    constexpr int ROWS = SETS * SET;
    int m = linear_matrix(a, tile);
    for (uint32_t i = threadIdx.x; i < rows * 16; i += LINEAR_THREADS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < LINEAR_WARPS; w++)
            sum += red[w * ROWS * 16 + i];
        uint32_t o = (tile - a.first_tile[m]) * 16 + i % 16;
        if (o < a.outs[m]) {
            float *out = a.out[m] + (uint64_t)(row0 + i / 16) * a.outs[m] + o;
            sum *= norms[i / 16];
            *out = a.add ? *out + sum : sum;
        }
    }
}

/* Digits and norms of the block's rows. x: uint4 [groups][ROWS][8]; scales: [groups][ROWS];
 * squares: scratch f32 [ROWS][groups]. */
template <int SETS>
static __device__ __forceinline__ void linear_pack(const struct batch_linear_args &a, uint4 *x,
                                                   float2 *scales, float *squares, float *norms,
                                                   uint32_t row0, uint32_t rows)
{
    constexpr int ROWS = SETS * SET;
    uint32_t pieces = a.groups * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t i = threadIdx.x; i < ROWS * pieces; i += LINEAR_THREADS) {
        uint32_t r = i / pieces, k8 = i % pieces;
        float v[8] = {}, square = 0;
        if (r < rows) {
            uint64_t row = a.select ? a.select[row0 + r] : row0 + r;
            const float4 *from = (const float4 *)(a.x + row * a.groups * 64) + k8 * 2;
            *(float4 *)v = from[0];
            *(float4 *)(v + 4) = from[1];
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            square += v[n] * v[n];
            v[n] *= a.gain ? a.gain[k8 * 8 + n] : 1;
        }
        unsigned mask = 0xffu << (lane & 24);
        for (int off = 1; off < 8; off *= 2)
            square += __shfl_xor_sync(mask, square, off);
        if (k8 % 8 == 0)
            squares[r * a.groups + k8 / 8] = square;
        step_pack(x, scales, ROWS, r, k8, v);
    }
    __syncthreads();
    if (warp < ROWS) {
        float sum = 0;
        for (uint32_t g = lane; g < a.groups; g += 32)
            sum += squares[warp * a.groups + g];
        sum = warp_sum(sum);
        if (lane == 0)
            norms[warp] = a.gain ? rsqrtf(sum / (a.groups * 64) + a.eps) : 1;
    }
}

/* The same from what batch_pack left. */
template <int SETS>
static __device__ __forceinline__ void linear_copy(const struct batch_linear_args &a, uint4 *x,
                                                   float2 *scales, float *norms, uint32_t row0,
                                                   uint32_t rows)
{
    constexpr int ROWS = SETS * SET;
    for (uint32_t i = threadIdx.x; i < a.groups * ROWS * 8; i += LINEAR_THREADS) {
        uint32_t g = i / (ROWS * 8), r = i / 8 % ROWS;
        uint64_t row = row0 + (r < rows ? r : 0);
        copy_async(x + i, a.packed.digits + (row * a.groups + g) * 8 + i % 8, r < rows);
    }
    copy_commit();
    for (uint32_t i = threadIdx.x; i < a.groups * ROWS; i += LINEAR_THREADS) {
        uint32_t g = i / ROWS, r = i % ROWS;
        scales[i] = make_float2(0, 0);
        if (r < rows)
            scales[i] = a.packed.scales[(uint64_t)(row0 + r) * a.groups + g];
    }
    if (threadIdx.x < rows)
        norms[threadIdx.x] = a.packed.norms[row0 + threadIdx.x];
    copy_wait<0>();
}

/* blockIdx.y: which SETS * 4 rows. G: at least what a warp gets of the groups. */
template <int SETS, int G>
static __global__ void __launch_bounds__(LINEAR_THREADS, 1)
    batch_linear(const __grid_constant__ struct batch_linear_args a)
{
    constexpr int ROWS = SETS * SET;
    extern __shared__ uint4 x[]; /* [groups][ROWS][8] */
    __shared__ float norms[ROWS];
    float2 *scales = (float2 *)(x + a.groups * ROWS * 8); /* [groups][ROWS] */
    float *red = (float *)(scales + a.groups * ROWS);     /* [2][warps][ROWS][16] */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = blockIdx.y * ROWS;
    uint32_t rows = min((uint32_t)ROWS, a.rows - row0), end = a.first_tile[LINEAR_MAX];
    uint32_t from = a.groups * warp / LINEAR_WARPS;
    uint32_t n = a.groups * (warp + 1) / LINEAR_WARPS - from;
    struct tile_part<G> part, next;
    linear_load<G>(a, &next, blockIdx.x, from, n);
    overlap_wait();
    overlap_next();
    if constexpr (SETS <= PACK_SETS)
        linear_pack<SETS>(a, x, scales, red, norms, row0, rows);
    else
        linear_copy<SETS>(a, x, scales, norms, row0, rows);
    __syncthreads();
    uint32_t buffer = 0;
    for (uint32_t tile = blockIdx.x; tile < end; tile += gridDim.x, buffer ^= 1) {
        part = next;
        linear_load<G>(a, &next, tile + gridDim.x, from, n);
        float y[SETS][2] = {}, *own = red + (buffer * LINEAR_WARPS + warp) * ROWS * 16;
#pragma unroll
        for (int g = 0; g < G; g++)
            if (g < n)
#pragma unroll
                for (int s = 0; s < SETS; s++)
                    tile_step(y[s], part.codes[g], part.pairs[g][0], part.pairs[g][1],
                              x[((from + g) * ROWS + s * SET) * 8 + lane],
                              scales[(from + g) * ROWS + s * SET + lane % 4]);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            own[(s * SET + lane % 4) * 16 + lane / 4] = y[s][0];
            own[(s * SET + lane % 4) * 16 + lane / 4 + 8] = y[s][1];
        }
        __syncthreads(); /* the other half of red has been read */
        linear_finish<SETS>(a, red + buffer * LINEAR_WARPS * ROWS * 16, norms, tile, row0, rows);
    }
}

template <int SETS, int G>
static void linear_run(struct device *device, const struct batch_linear_args &a)
{
    uint32_t tiles = a.first_tile[LINEAR_MAX];
    uint32_t blocks = tiles < (uint32_t)device->sms ? tiles : device->sms;
    blocks = cuda_ceil(tiles, cuda_ceil(tiles, blocks)); /* as many tiles each */
    cuda_launch(device, batch_linear<SETS, G>, dim3(blocks, cuda_ceil(a.rows, SETS * SET)),
                LINEAR_THREADS, choice_batch_bytes(a.groups, SETS), a);
}

template <int G>
static void linear_run_sets(struct device *device, const struct batch_linear_args &a, uint32_t sets)
{
    if (sets == 2)
        linear_run<2, G>(device, a);
    else if (sets == 4)
        linear_run<4, G>(device, a);
    else
        linear_run<8, G>(device, a);
}

static bool batch_rows_open(struct device *device, enum cuda_scratch_slot slot, uint64_t rows,
                            uint64_t groups, struct batch_rows *out)
{
    char *at = (char *)cuda_scratch(device, slot, rows * (groups * 136 + 4));
    out->digits = (uint4 *)at;
    out->scales = (float2 *)(at + rows * groups * 128);
    out->norms = (float *)(out->scales + rows * groups);
    return at;
}

bool cuda_batch_linear(struct device *device, const struct linear_args *args)
{
    struct batch_linear_args a = {};
    uint32_t cols = args->weight[0]->cols;
    a.rows = args->rows;
    a.groups = cols / 64;
    a.add = args->add;
    a.x = cuda_at<const float>(args->x);
    a.select = cuda_at<const uint32_t>(args->select);
    a.gain = cuda_at<const float>(args->gain);
    a.eps = args->eps;
    uint32_t sets = choice_batch_sets(a.rows, a.groups, device->shared_limit);
    if (a.rows > BATCH_ROWS || a.groups > 4 * LINEAR_WARPS || !sets)
        return false;
    if (sets > PACK_SETS) {
        if (!batch_rows_open(device, SCRATCH_NORMED, a.rows, a.groups, &a.packed))
            return true;
        cuda_launch(device, batch_pack, dim3(a.rows), 256, 0, a.packed, a.x, a.select, a.gain,
                    a.eps, cols);
    }
    cuda_fill_linear(&a, args);
    for (uint32_t i = 0; i < LINEAR_MAX; i++)
        a.first_tile[i + 1] = a.first_tile[i] + (a.outs[i] + 15) / 16;
    if (a.groups <= 2 * LINEAR_WARPS)
        linear_run_sets<2>(device, a, sets);
    else
        linear_run_sets<4>(device, a, sets);
    return true;
}

/* ---- experts ------------------------------------------------------------------------------ */

struct batch_experts_args {
    struct matrix gate, up, down, shared_gate_proj, shared_up, shared_down;
    uint32_t rows, hidden, topk, experts, capacity;
    const uint32_t *ids;
    const float *h, *weights, *shared_gate;
    struct batch_rows packed; /* h */
    struct route_tile *tiles; /* [capacity]; after them the shared expert's, by row */
    uint32_t *list;           /* [pairs], by expert */
    float *act, *shared_act;  /* f32 [pairs in list's order, width], [rows, shared_width] */
    float *y, *shared_y;      /* f32 [pairs, hidden], [rows, hidden] */
    float *x;
};

/* The first block sorts, the others pack a row of h each. */
static __global__ void __launch_bounds__(ROUTE_THREADS)
    batch_route(const __grid_constant__ struct batch_experts_args a)
{
    overlap_wait();
    overlap_next();
    if (blockIdx.x == 0)
        route_sort(a.ids, a.rows * a.topk, a.experts, a.list, a.tiles, a.capacity, SET);
    else
        pack_row(a.packed, blockIdx.x - 1, a.h + (uint64_t)(blockIdx.x - 1) * a.hidden, nullptr, 0,
                 a.hidden, nullptr);
}

/* A tile's expert, or the shared one with rows in order; false: none. */
static __device__ __forceinline__ bool experts_tile(const struct batch_experts_args &a,
                                                    struct route_tile *tile, bool *shared)
{
    *shared = blockIdx.x >= a.capacity;
    if (*shared) {
        uint32_t first = (blockIdx.x - a.capacity) * SET;
        *tile = {0, first, min((uint32_t)SET, a.rows - first), 0};
    } else {
        *tile = a.tiles[blockIdx.x];
    }
    return tile->count > 0;
}

/* act = silu(gate h) * up h: 16 outputs of both a warp. */
static __global__ void __launch_bounds__(BATCH_THREADS, 2)
    batch_gate_up(const __grid_constant__ struct batch_experts_args a)
{
    extern __shared__ uint4 x[]; /* [groups][SET][8] */
    uint32_t groups = a.hidden / 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float2 *scales = (float2 *)(x + groups * SET * 8); /* [groups][SET] */
    struct route_tile tile;
    bool shared;
    overlap_wait();
    overlap_next();
    if (!experts_tile(a, &tile, &shared))
        return;
    const struct matrix &gate = shared ? a.shared_gate_proj : a.gate;
    const struct matrix &up = shared ? a.shared_up : a.up;
    uint32_t o = blockIdx.y * BATCH_WARPS + warp, stored = gate.stride / 16;
    uint64_t at = ((uint64_t)tile.expert * stored + min(o, stored - 1)) * groups;
    struct tile_part<BATCH_AHEAD> part[2], next[2];
    load_part(&next[0], (const uint4 *)gate.data, gate.pairs, at, groups);
    load_part(&next[1], (const uint4 *)up.data, up.pairs, at, groups);
    for (uint32_t i = threadIdx.x; i < groups * SET * 8; i += BATCH_THREADS) {
        uint32_t g = i / (SET * 8), r = i / 8 % SET;
        bool there = r < tile.count;
        uint64_t row = tile.first + (there ? r : 0);
        if (!shared)
            row = a.list[row] / a.topk;
        copy_async(x + i, a.packed.digits + (row * groups + g) * 8 + i % 8, there);
        if (i % 8 == 0)
            scales[g * SET + r] = there ? a.packed.scales[row * groups + g] : make_float2(0, 0);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float y[2][2] = {};
#pragma unroll 1
    for (uint32_t g0 = 0; g0 < groups; g0 += BATCH_AHEAD) {
        uint32_t later = g0 + BATCH_AHEAD, left = later < groups ? groups - later : 0;
        part[0] = next[0];
        part[1] = next[1];
        load_part(&next[0], (const uint4 *)gate.data, gate.pairs, at + later, left);
        load_part(&next[1], (const uint4 *)up.data, up.pairs, at + later, left);
#pragma unroll
        for (int g = 0; g < BATCH_AHEAD; g++)
            if (g0 + g < groups) {
                uint4 b = x[(g0 + g) * SET * 8 + lane];
                float2 s = scales[(g0 + g) * SET + lane % 4];
#pragma unroll
                for (int m = 0; m < 2; m++)
                    tile_step(y[m], part[m].codes[g], part[m].pairs[g][0], part[m].pairs[g][1], b,
                              s);
            }
    }
    if (lane % 4 >= tile.count)
        return;
    float *act = (shared ? a.shared_act : a.act) + (uint64_t)(tile.first + lane % 4) * gate.rows;
    for (int n = 0; n < 2; n++)
        if (o * 16 + lane / 4 + n * 8 < gate.rows)
            act[o * 16 + lane / 4 + n * 8] = silu(y[0][n]) * y[1][n];
}

/* y = down act: DOWN_TILES tiles of 16 outputs a warp. */
static __global__ void __launch_bounds__(BATCH_THREADS, 3)
    batch_down(const __grid_constant__ struct batch_experts_args a)
{
    extern __shared__ uint4 x[]; /* [SET][groups][8] */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct route_tile tile;
    bool shared;
    overlap_wait();
    overlap_next();
    if (!experts_tile(a, &tile, &shared))
        return;
    const struct matrix &m = shared ? a.shared_down : a.down;
    uint32_t groups = m.cols / 64, stored = m.stride / 16;
    uint32_t o = (blockIdx.y * BATCH_WARPS + warp) * DOWN_TILES;
    struct batch_rows packed = {x, (float2 *)(x + SET * groups * 8), nullptr};
    struct tile_part<DOWN_AHEAD> part, next;
    uint64_t first = (uint64_t)tile.expert * stored;
    load_part(&next, (const uint4 *)m.data, m.pairs, (first + min(o, stored - 1)) * groups, groups);
    const float *act = (shared ? a.shared_act : a.act) + (uint64_t)tile.first * m.cols;
    for (uint32_t i = threadIdx.x; i < SET * groups * 8; i += BATCH_THREADS) {
        uint32_t r = i / (groups * 8), k8 = i % (groups * 8);
        float v[8] = {};
        if (r < tile.count) {
            *(float4 *)v = ((const float4 *)(act + r * m.cols))[k8 * 2];
            *(float4 *)(v + 4) = ((const float4 *)(act + r * m.cols))[k8 * 2 + 1];
        }
        step_pack(packed.digits + r * groups * 8, packed.scales + r * groups, 1, 0, k8, v);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < DOWN_TILES; i++) {
        float y[2] = {};
        uint32_t now = min(o + i, stored - 1), then = min(o + i + 1, stored - 1);
#pragma unroll 1
        for (uint32_t g0 = 0; g0 < groups; g0 += DOWN_AHEAD) {
            bool more = g0 + DOWN_AHEAD < groups;
            part = next;
            if (more)
                load_part(&next, (const uint4 *)m.data, m.pairs,
                          (first + now) * groups + g0 + DOWN_AHEAD, groups - g0 - DOWN_AHEAD);
            else if (i + 1 < DOWN_TILES)
                load_part(&next, (const uint4 *)m.data, m.pairs, (first + then) * groups, groups);
#pragma unroll
            for (int g = 0; g < DOWN_AHEAD; g++)
                if (g0 + g < groups)
                    tile_step(y, part.codes[g], part.pairs[g][0], part.pairs[g][1],
                              x[(lane / 8 * groups + g0 + g) * 8 + lane % 8],
                              packed.scales[lane % 4 * groups + g0 + g]);
        }
        if (lane % 4 < tile.count) {
            uint64_t row = tile.first + lane % 4;
            float *to =
                shared ? a.shared_y + row * a.hidden : a.y + (uint64_t)a.list[row] * a.hidden;
            for (int n = 0; n < 2; n++)
                if ((o + i) * 16 + lane / 4 + n * 8 < a.hidden)
                    to[(o + i) * 16 + lane / 4 + n * 8] = y[n];
        }
    }
}

enum { COMBINE_THREADS = 128 };

/* x[r] += sum_i weights[r][i] y[r][i] + shared_gate[r] shared[r]; four outputs a thread. */
static __global__ void __launch_bounds__(COMBINE_THREADS)
    batch_combine(const __grid_constant__ struct batch_experts_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t k = blockIdx.y * COMBINE_THREADS + threadIdx.x;
    uint64_t row = blockIdx.x;
    if (k >= a.hidden / 4)
        return;
    float4 *x = (float4 *)(a.x + row * a.hidden) + k;
    float4 sum = *x, v = ((const float4 *)(a.shared_y + row * a.hidden))[k];
    float w = a.shared_gate[row];
    sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
#pragma unroll 4
    for (uint32_t i = 0; i < a.topk; i++) {
        uint64_t pair = row * a.topk + i;
        v = ((const float4 *)(a.y + pair * a.hidden))[k];
        w = a.weights[pair];
        sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
    }
    *x = sum;
}

/* Scratch for a batch's experts; false with the error noted. */
static bool experts_open(struct device *device, const struct moe_dims *d,
                         struct batch_experts_args *a)
{
    uint64_t rows = a->rows, pairs = rows * d->topk;
    a->capacity = pairs / SET + (d->experts < pairs ? d->experts : pairs);
    uint64_t tile_bytes = (uint64_t)a->capacity * sizeof(struct route_tile);
    char *route = (char *)cuda_scratch(device, SCRATCH_ROUTE, tile_bytes + pairs * 4);
    a->act = (float *)cuda_scratch(
        device, SCRATCH_EXPERTS,
        (pairs * d->width + rows * d->shared_width + (pairs + rows) * d->hidden) * 4);
    a->tiles = (struct route_tile *)route;
    a->list = (uint32_t *)(route + tile_bytes);
    a->shared_act = a->act + pairs * d->width;
    a->y = a->shared_act + rows * d->shared_width;
    a->shared_y = a->y + pairs * d->hidden;
    return batch_rows_open(device, SCRATCH_PACKED, rows, d->hidden / 64, &a->packed) && route &&
           a->act;
}

bool cuda_batch_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *d = &args->dims;
    struct batch_experts_args a = {};
    if (args->rows > BATCH_ROWS || d->experts > ROUTE_EXPERTS || d->hidden > 64 * 64)
        return false;
    cuda_fill_experts(&a, args);
    a.rows = args->rows;
    a.experts = d->experts;
    if (!experts_open(device, d, &a))
        return true;
    uint32_t tiles = a.capacity + cuda_ceil(a.rows, SET), groups = d->hidden / 64;
    uint32_t width = d->width > d->shared_width ? d->width : d->shared_width;
    cuda_launch(device, batch_route, dim3(1 + a.rows), ROUTE_THREADS, 0, a);
    cuda_launch(device, batch_gate_up, dim3(tiles, cuda_ceil(width, 16 * BATCH_WARPS)),
                BATCH_THREADS, groups * SET * 136, a);
    cuda_launch(device, batch_down,
                dim3(tiles, cuda_ceil(d->hidden, 16 * BATCH_WARPS * DOWN_TILES)), BATCH_THREADS,
                (size_t)cuda_ceil(width, 64) * SET * 136, a);
    cuda_launch(device, batch_combine, dim3(a.rows, cuda_ceil(d->hidden, 4 * COMBINE_THREADS)),
                COMBINE_THREADS, 0, a);
    return true;
}
