/* Matrix products of many rows with tiled 4-bit weights, dense and by expert.
 *
 * A block forms 128 outputs x 128 rows, 8 warps of 32 outputs x 64 rows. Rows of x come as packed
 * bf16 (prefill_pack) through a three-stage ring in shared memory; weights go from memory straight
 * to registers, since their tiles are in the order of the tensor core's operand, and are decoded
 * there to bf16 (one rounding). Sums are f32. Expanded weights never reach memory.
 *
 * Packed bf16: 16-byte chunk g * 8 + half * 4 + t of a row holds columns g * 64 + t * 16 + half * 8
 * + (0,4,1,5,2,6,3,7), which is the order in which tile codes pair up (code_pair).
 *
 * Experts: prefill_route sorts the (row, choice) pairs by expert on the device and lists the tiles
 * of 128 pairs; the grid is as large as the worst case and surplus blocks leave at once. */
#include "backend/cuda/ops.cuh"

enum { TILE_ROWS = 128, TILE_OUTS = 128, STAGES = 3, ROUTE_THREADS = 1024, ROUTE_EXPERTS = 1024 };

/* ---- packing rows ------------------------------------------------------------------------- */

static __device__ __forceinline__ uint4 pack_chunk(const float v[8])
{
    return make_uint4(bf16_pair(v[0], v[4]), bf16_pair(v[1], v[5]), bf16_pair(v[2], v[6]),
                      bf16_pair(v[3], v[7]));
}

/* One block a row: h = gain ? rms_norm(x; gain) : x as packed bf16 [rows, cols]. */
static __global__ void prefill_pack(const float *x, const uint32_t *select, const float *gain,
                                    float eps, uint32_t cols, uint4 *packed)
{
    __shared__ float part[32];
    overlap_wait();
    overlap_next();
    const float4 *from =
        (const float4 *)(x + (uint64_t)(select ? select[blockIdx.x] : blockIdx.x) * cols);
    float scale = 1;
    if (gain) {
        float sum = 0;
        for (uint32_t k = threadIdx.x; k < cols / 4; k += blockDim.x) {
            float4 v = from[k];
            sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        scale = rsqrtf(block_sum(sum, part) / cols + eps);
    }
    for (uint32_t k8 = threadIdx.x; k8 < cols / 8; k8 += blockDim.x) {
        float v[8];
        *(float4 *)v = from[k8 * 2];
        *(float4 *)(v + 4) = from[k8 * 2 + 1];
        for (int i = 0; i < 8; i++)
            v[i] *= gain ? scale * gain[k8 * 8 + i] : 1;
        packed[(uint64_t)blockIdx.x * (cols / 8) + k8 / 8 * 8 + k8 % 2 * 4 + k8 % 8 / 2] =
            pack_chunk(v);
    }
}

/* ---- the product -------------------------------------------------------------------------- */

static __device__ __forceinline__ void copy_async(uint4 *to, const uint4 *from, bool there)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(there ? 16 : 0));
}

static __device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;");
}

/* Two codes and their group's scale and bias as a bf16 pair. */
static __device__ __forceinline__ uint32_t decode_pair(uint32_t word, int s, __nv_bfloat162 scale,
                                                       __nv_bfloat162 bias)
{
    uint32_t code = code_pair(word, s);
    __nv_bfloat162 v = *reinterpret_cast<__nv_bfloat162 *>(&code);
    v = __hfma2(__hsub2(v, __float2bfloat162_rn(128)), scale, bias);
    return *reinterpret_cast<uint32_t *>(&v);
}

static __device__ __forceinline__ __nv_bfloat162 twice(uint32_t bits)
{
    uint32_t v = __byte_perm(bits, bits, 0x1010);
    return *reinterpret_cast<__nv_bfloat162 *>(&v);
}

/* What a warp multiplies with: two tiles of 16 outputs. */
struct tile_source {
    const uint4 *data;
    const uint32_t *pairs;
};

struct tile_words {
    uint4 word[2];
    uint32_t pair[2][2];
};

static __device__ __forceinline__ void load_words(struct tile_words *w,
                                                  const struct tile_source source[2], uint32_t g)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        w->word[i] = __ldg(source[i].data + g * 32 + lane);
        w->pair[i][0] = __ldg(source[i].pairs + g * 16 + lane / 4);
        w->pair[i][1] = __ldg(source[i].pairs + g * 16 + lane / 4 + 8);
    }
}

/* The four registers of a's operand for two steps: tile i, half of the group. */
static __device__ __forceinline__ void decode_half(uint32_t a[8], const struct tile_words &w, int i,
                                                   int half)
{
    uint32_t upper = half ? w.word[i].y : w.word[i].x, lower = half ? w.word[i].w : w.word[i].z;
    __nv_bfloat162 s0 = twice(w.pair[i][0]), b0 = twice(w.pair[i][0] >> 16);
    __nv_bfloat162 s1 = twice(w.pair[i][1]), b1 = twice(w.pair[i][1] >> 16);
#pragma unroll
    for (int step = 0; step < 2; step++) {
        a[step * 4] = decode_pair(upper, step * 8, s0, b0);
        a[step * 4 + 1] = decode_pair(lower, step * 8, s1, b1);
        a[step * 4 + 2] = decode_pair(upper, step * 8 + 4, s0, b0);
        a[step * 4 + 3] = decode_pair(lower, step * 8 + 4, s1, b1);
    }
}

/* sum[i][j]: tile i x rows j * 8.. of the warp's 64. from[4]: this thread's rows of packed x, its
 * chunk already added; null for a row that is not there. */
static __device__ __forceinline__ void product(float sum[2][8][4], const struct tile_source w[2],
                                               const uint4 *const from[4], uint32_t groups,
                                               uint4 *ring)
{
    uint32_t lane = threadIdx.x % 32, row0 = threadIdx.x / 128 * 64;
    uint32_t row = threadIdx.x / 8, chunk = (threadIdx.x % 8) ^ ((row & 1) * 4);
    const uint4 *any = from[0] ? from[0] : from[1] ? from[1] : (const uint4 *)w[0].data;
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        if (s < groups)
#pragma unroll
            for (int i = 0; i < 4; i++)
                copy_async(ring + s * 1024 + (row + i * 32) * 8 + chunk,
                           from[i] ? from[i] + s * 8 : any, from[i]);
        copy_commit();
    }
    struct tile_words now, next;
    load_words(&next, w, 0);
    for (uint32_t g = 0; g < groups; g++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        uint32_t ahead = g + STAGES - 1;
        if (ahead < groups)
#pragma unroll
            for (int i = 0; i < 4; i++)
                copy_async(ring + ahead % STAGES * 1024 + (row + i * 32) * 8 + chunk,
                           from[i] ? from[i] + ahead * 8 : any, from[i]);
        copy_commit();
        now = next;
        if (g + 1 < groups)
            load_words(&next, w, g + 1);
        const uint4 *stage = ring + g % STAGES * 1024 + (row0 + lane / 4) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[2][8];
            decode_half(a[0], now, 0, half);
            decode_half(a[1], now, 1, half);
            uint32_t at = (half * 4 + lane % 4) ^ ((lane / 4 & 1) * 4);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint4 b = stage[j * 64 + at];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_bf16(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b.x, b.y);
                    mma_bf16(sum[i][j], a[i][4], a[i][5], a[i][6], a[i][7], b.z, b.w);
                }
            }
        }
    }
}

/* ---- dense -------------------------------------------------------------------------------- */

struct prefill_dense_args {
    const uint4 *data[LINEAR_MAX];
    const uint32_t *pairs[LINEAR_MAX];
    float *out[LINEAR_MAX];
    uint32_t outs[LINEAR_MAX];
    uint32_t first_tile[LINEAR_MAX + 1]; /* in tiles of TILE_OUTS */
    const uint4 *packed;                 /* bf16 [rows, cols] */
    uint32_t rows, groups;
    bool add;
};

static __global__ void __launch_bounds__(256, 2) prefill_dense(const struct prefill_dense_args a)
{
    extern __shared__ uint4 ring[];
    overlap_wait();
    overlap_next();
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * TILE_ROWS;
    int m = 0;
    while (blockIdx.y >= a.first_tile[m + 1])
        m++;
    uint32_t tiles = (a.outs[m] + 15) / 16;
    uint32_t tile = (blockIdx.y - a.first_tile[m]) * (TILE_OUTS / 16) + warp % 4 * 2;
    struct tile_source w[2];
    for (int i = 0; i < 2; i++) {
        uint64_t t = min(tile + i, tiles - 1);
        w[i].data = a.data[m] + t * a.groups * 32;
        w[i].pairs = a.pairs[m] + t * a.groups * 16;
    }
    const uint4 *from[4];
    for (int i = 0; i < 4; i++) {
        uint32_t row = first + threadIdx.x / 8 + i * 32;
        from[i] = row < a.rows ? a.packed + (uint64_t)row * a.groups * 8 + threadIdx.x % 8 : 0;
    }
    float sum[2][8][4] = {};
    product(sum, w, from, a.groups, ring);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t row = first + warp / 4 * 64 + j * 8 + lane % 4 * 2 + n % 2;
                uint32_t o = (tile + i) * 16 + lane / 4 + n / 2 * 8;
                if (row < a.rows && o < a.outs[m]) {
                    float *out = a.out[m] + (uint64_t)row * a.outs[m] + o;
                    *out = a.add ? *out + sum[i][j][n] : sum[i][j][n];
                }
            }
}

void cuda_prefill_linear(struct device *device, const struct linear_args *args)
{
    struct prefill_dense_args a = {};
    uint32_t cols = args->weight[0]->cols;
    uint4 *packed = (uint4 *)cuda_scratch(device, SCRATCH_NORMED, (uint64_t)args->rows * cols * 2);
    if (!packed)
        return;
    cuda_launch(device, prefill_pack, dim3(args->rows), 256, 0, cuda_at<const float>(args->x),
                cuda_at<const uint32_t>(args->select), cuda_at<const float>(args->gain), args->eps,
                cols, packed);
    for (uint32_t i = 0; i < LINEAR_MAX; i++) {
        if (i < args->n) {
            struct matrix m = cuda_matrix(args->weight[i]);
            a.data[i] = (const uint4 *)m.data;
            a.pairs[i] = m.pairs;
            a.outs[i] = m.rows;
            a.out[i] = cuda_at<float>(args->out[i]);
        }
        a.first_tile[i + 1] = a.first_tile[i] + cuda_ceil(a.outs[i], TILE_OUTS);
    }
    a.packed = packed;
    a.rows = args->rows;
    a.groups = cols / 64;
    a.add = args->add;
    cuda_launch(device, prefill_dense,
                dim3(cuda_ceil(args->rows, TILE_ROWS), a.first_tile[LINEAR_MAX]), 256,
                STAGES * 1024 * sizeof(uint4), a);
}

/* ---- experts ------------------------------------------------------------------------------ */

/* A tile of pairs that go through one expert; count 0: none. */
struct route_tile {
    uint32_t expert, first, count, pad;
};

/* One block: list [pairs] gets the pairs (row * topk + choice) in the order of their experts, and
 * tiles the pieces of at most TILE_ROWS. */
static __global__ void __launch_bounds__(ROUTE_THREADS)
    prefill_route(const uint32_t *ids, uint32_t pairs, uint32_t experts, uint32_t *list,
                  struct route_tile *tiles, uint32_t capacity)
{
    __shared__ uint32_t count[ROUTE_EXPERTS], next[ROUTE_EXPERTS], tile_end[ROUTE_EXPERTS];
    overlap_wait();
    overlap_next();
    uint32_t e = threadIdx.x;
    count[e] = 0;
    __syncthreads();
    for (uint32_t i = e; i < pairs; i += blockDim.x)
        atomicAdd(&count[ids[i]], 1);
    __syncthreads();
    uint32_t own = count[e];
    next[e] = own;
    tile_end[e] = (own + TILE_ROWS - 1) / TILE_ROWS;
    for (uint32_t off = 1; off < ROUTE_EXPERTS; off *= 2) { /* inclusive sums */
        __syncthreads();
        uint32_t a = e >= off ? next[e - off] : 0, b = e >= off ? tile_end[e - off] : 0;
        __syncthreads();
        next[e] += a;
        tile_end[e] += b;
    }
    __syncthreads();
    uint32_t first = next[e] - own, tile = tile_end[e] - (own + TILE_ROWS - 1) / TILE_ROWS;
    uint32_t used = tile_end[experts - 1];
    next[e] = first;
    for (uint32_t i = 0; i < own; i += TILE_ROWS)
        tiles[tile++] = {e, first + i, min((uint32_t)TILE_ROWS, own - i), 0};
    for (uint32_t i = used + e; i < capacity; i += blockDim.x)
        tiles[i] = {0, 0, 0, 0};
    __syncthreads();
    for (uint32_t i = e; i < pairs; i += blockDim.x)
        list[atomicAdd(&next[ids[i]], 1)] = i;
}

struct prefill_experts_args {
    struct matrix gate, up, down;
    const struct route_tile *tiles; /* null: one expert, all rows in order (the shared one) */
    const uint32_t *list;           /* pairs by expert, with tiles */
    uint32_t rows;                  /* without tiles */
    uint32_t topk;
    const uint4 *h;     /* packed bf16 [rows, hidden] */
    __nv_bfloat16 *act; /* packed bf16 [pairs in list's order, width] */
    float *y;           /* f32 [pairs, hidden] */
};

static __device__ __forceinline__ struct route_tile
experts_tile(const struct prefill_experts_args &a)
{
    struct route_tile tile = {0, blockIdx.x * TILE_ROWS, 0, 0};
    if (a.tiles)
        tile = a.tiles[blockIdx.x];
    else
        tile.count = min((uint32_t)TILE_ROWS, a.rows - tile.first);
    return tile;
}

static __device__ __forceinline__ struct tile_source tile_of(const struct matrix &m, uint32_t item,
                                                             uint32_t tile)
{
    uint32_t groups = m.cols / 64;
    uint64_t at = ((uint64_t)item * (m.stride / 16) + min(tile, m.stride / 16 - 1)) * groups;
    return {(const uint4 *)m.data + at * 32, m.pairs + at * 16};
}

/* act = silu(gate h) * up h. A warp's two tiles are the same 16 outputs of gate and up. */
static __global__ void __launch_bounds__(256, 2)
    prefill_gate_up(const struct prefill_experts_args a)
{
    extern __shared__ uint4 ring[];
    overlap_wait();
    overlap_next();
    struct route_tile part = experts_tile(a);
    if (part.count == 0)
        return;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t tile = blockIdx.y * 4 + warp % 4, groups = a.gate.cols / 64;
    struct tile_source w[2] = {tile_of(a.gate, part.expert, tile),
                               tile_of(a.up, part.expert, tile)};
    const uint4 *from[4];
    for (int i = 0; i < 4; i++) {
        uint32_t n = threadIdx.x / 8 + i * 32;
        from[i] = 0;
        if (n < part.count) {
            uint32_t row = a.tiles ? a.list[part.first + n] / a.topk : part.first + n;
            from[i] = a.h + (uint64_t)row * groups * 8 + threadIdx.x % 8;
        }
    }
    float sum[2][8][4] = {};
    product(sum, w, from, groups, ring);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t row = warp / 4 * 64 + j * 8 + lane % 4 * 2 + n % 2;
            uint32_t o = tile * 16 + lane / 4 + n / 2 * 8;
            uint32_t chunk = o / 64 * 8 + n / 2 * 4 + tile % 4, in = lane / 4;
            if (row < part.count && o < a.gate.rows)
                a.act[((uint64_t)(part.first + row) * (a.gate.rows / 8) + chunk) * 8 +
                      (in < 4 ? in * 2 : in * 2 - 7)] =
                    __float2bfloat16_rn(silu(sum[0][j][n]) * sum[1][j][n]);
        }
}

static __global__ void __launch_bounds__(256, 2) prefill_down(const struct prefill_experts_args a)
{
    extern __shared__ uint4 ring[];
    overlap_wait();
    overlap_next();
    struct route_tile part = experts_tile(a);
    if (part.count == 0)
        return;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = a.down.cols / 64;
    uint32_t tile = blockIdx.y * (TILE_OUTS / 16) + warp % 4 * 2;
    struct tile_source w[2] = {tile_of(a.down, part.expert, tile),
                               tile_of(a.down, part.expert, tile + 1)};
    const uint4 *from[4];
    for (int i = 0; i < 4; i++) {
        uint32_t n = threadIdx.x / 8 + i * 32;
        from[i] = n < part.count ? (const uint4 *)a.act + (uint64_t)(part.first + n) * groups * 8 +
                                       threadIdx.x % 8
                                 : 0;
    }
    float sum[2][8][4] = {};
    product(sum, w, from, groups, ring);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t row = warp / 4 * 64 + j * 8 + lane % 4 * 2 + n;
            if (row >= part.count)
                continue;
            uint64_t pair = a.tiles ? a.list[part.first + row] : part.first + row;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int lower = 0; lower < 2; lower++) {
                    uint32_t o = (tile + i) * 16 + lane / 4 + lower * 8;
                    if (o < a.down.rows)
                        a.y[pair * a.down.rows + o] = sum[i][j][lower * 2 + n];
                }
        }
}

/* x[r] += sum_i weights[r][i] y[r][i] + shared_gate[r] shared[r]; a block a row. */
static __global__ void prefill_combine(const float *y, const float *weights, const float *shared,
                                       const float *shared_gate, uint32_t topk, uint32_t hidden,
                                       float *x)
{
    overlap_wait();
    overlap_next();
    uint64_t row = blockIdx.x;
    for (uint32_t k = threadIdx.x; k < hidden; k += blockDim.x) {
        float sum = shared_gate[row] * shared[row * hidden + k];
        for (uint32_t i = 0; i < topk; i++)
            sum += weights[row * topk + i] * y[(row * topk + i) * hidden + k];
        x[row * hidden + k] += sum;
    }
}

static void prefill_run(struct device *device, const struct prefill_experts_args &a, uint32_t tiles)
{
    size_t shared = STAGES * 1024 * sizeof(uint4);
    cuda_launch(device, prefill_gate_up, dim3(tiles, cuda_ceil(a.gate.rows, TILE_OUTS / 2)), 256,
                shared, a);
    cuda_launch(device, prefill_down, dim3(tiles, cuda_ceil(a.down.rows, TILE_OUTS)), 256, shared,
                a);
}

void cuda_prefill_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *d = &args->dims;
    uint64_t rows = args->rows, pairs = rows * d->topk, hidden = d->hidden;
    uint32_t capacity = pairs / TILE_ROWS + (d->experts < pairs ? d->experts : pairs);
    uint64_t tile_bytes = (uint64_t)capacity * sizeof(struct route_tile);
    uint64_t act_bytes = pairs * d->width * 2, shared_bytes = rows * d->shared_width * 2;
    char *route = (char *)cuda_scratch(device, SCRATCH_ROUTE, tile_bytes + pairs * 4);
    char *packed =
        (char *)cuda_scratch(device, SCRATCH_PACKED, rows * hidden * 2 + act_bytes + shared_bytes);
    float *y = (float *)cuda_scratch(device, SCRATCH_EXPERTS, (pairs + rows) * hidden * 4);
    if (!route || !packed || !y)
        return;
    struct route_tile *tiles = (struct route_tile *)route;
    uint32_t *list = (uint32_t *)(route + tile_bytes);
    cuda_launch(device, prefill_pack, dim3(args->rows), 256, 0, cuda_at<const float>(args->h),
                (const uint32_t *)nullptr, (const float *)nullptr, 0.0f, d->hidden,
                (uint4 *)packed);
    cuda_launch(device, prefill_route, dim3(1), ROUTE_THREADS, 0,
                cuda_at<const uint32_t>(args->ids), (uint32_t)pairs, d->experts, list, tiles,
                capacity);
    struct prefill_experts_args a = {};
    a.gate = cuda_matrix(args->gate);
    a.up = cuda_matrix(args->up);
    a.down = cuda_matrix(args->down);
    a.tiles = tiles;
    a.list = list;
    a.topk = d->topk;
    a.h = (const uint4 *)packed;
    a.act = (__nv_bfloat16 *)(packed + rows * hidden * 2);
    a.y = y;
    prefill_run(device, a, capacity);
    a.gate = cuda_matrix(args->shared_gate_proj);
    a.up = cuda_matrix(args->shared_up);
    a.down = cuda_matrix(args->shared_down);
    a.tiles = nullptr;
    a.rows = args->rows;
    a.act = (__nv_bfloat16 *)(packed + rows * hidden * 2 + act_bytes);
    a.y = y + pairs * hidden;
    prefill_run(device, a, cuda_ceil(rows, TILE_ROWS));
    cuda_launch(device, prefill_combine, dim3(args->rows), 256, 0, (const float *)y,
                cuda_at<const float>(args->weights), (const float *)(y + pairs * hidden),
                cuda_at<const float>(args->shared_gate), d->topk, d->hidden,
                cuda_at<float>(args->x));
}
