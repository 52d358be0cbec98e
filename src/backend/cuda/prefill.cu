/* Matrix products of many rows with tiled 4-bit weights, dense and by expert.
 *
 * A block forms WARPGROUPS * 64 outputs x N rows. Codes, scales and rows of x (f16) come through a
 * ring in shared memory; each warp decodes its 16 outputs to f16 in registers, which is the tensor
 * core's first operand, while the product of the 64 columns before is under way. f16 and not bf16:
 * 11 bits of mantissa keep routing as f32 has it, where 8 do not, and normalised rows and 4-bit
 * weights are far inside its range. Sums are f32. Expanded weights never reach memory.
 *
 * Experts: prefill_route sorts the (row, choice) pairs by expert on the device and lists tiles of
 * at most N pairs; the grid is as large as the worst case and surplus blocks leave at once. */
#include "backend/cuda/wgmma.cuh"

#include "backend/cuda/batch.cuh"

enum { STAGES = CHOICE_RING_STAGES };

/* ---- packing rows ------------------------------------------------------------------------- */

/* One block a row: h = gain ? rms_norm(x; gain) : x as f16 [rows, cols]. */
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
        packed[(uint64_t)blockIdx.x * (cols / 8) + k8] = make_uint4(
            f16_pair(v[0], v[1]), f16_pair(v[2], v[3]), f16_pair(v[4], v[5]), f16_pair(v[6], v[7]));
    }
}

/* ---- the product -------------------------------------------------------------------------- */

/* A stage of the ring: codes uint4 [tiles][32], pairs u32 [tiles][16], x f16 [N][64] (swizzled).
 * tiles: 4 a warpgroup. */
template <int N, int WARPGROUPS> struct ring_stage {
    static constexpr uint32_t tiles = WARPGROUPS * 4;
    static constexpr uint32_t pairs = tiles * 512;
    static constexpr uint32_t x = (pairs + tiles * 64 + 1023) / 1024 * 1024;
    static constexpr uint32_t bytes = x + N * 128;
    static constexpr uint32_t total = CHOICE_RING_BYTES(N, WARPGROUPS);
    static_assert(total == bytes * STAGES + 1024, "choice.h plans with another ring");
    static constexpr int x_copies = (N * 8 + WARPGROUPS * 128 - 1) / (WARPGROUPS * 128);
};

/* What this thread copies of each group of 64 columns: a chunk of codes, one of pairs (the first
 * tiles * 4 threads), chunks of x; null: zeros. */
template <int N, int WARPGROUPS> struct ring_source {
    const uint4 *codes, *pairs, *x[ring_stage<N, WARPGROUPS>::x_copies];
};

/* The chunk of x that this thread copies i-th: row and 16-byte column. */
template <int WARPGROUPS> static __device__ __forceinline__ uint32_t ring_row(int i)
{
    return (threadIdx.x + i * WARPGROUPS * 128) / 8;
}

template <int N, int WARPGROUPS>
static __device__ __forceinline__ void ring_copy(const ring_source<N, WARPGROUPS> &from, char *ring,
                                                 uint32_t g, uint32_t groups)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    if (g < groups) {
        char *to = ring + g % STAGES * stage::bytes;
        copy_async(to + threadIdx.x * 16, from.codes + g * 32, true);
        if (threadIdx.x < stage::tiles * 4)
            copy_async(to + stage::pairs + threadIdx.x * 16, from.pairs + g * 4, true);
#pragma unroll
        for (int i = 0; i < stage::x_copies; i++) {
            uint32_t row = ring_row<WARPGROUPS>(i), chunk = threadIdx.x % 8 ^ (row & 7);
            if (row < N)
                copy_async(to + stage::x + row * 128 + chunk * 16,
                           from.x[i] ? from.x[i] + g * 8 : from.codes, from.x[i]);
        }
    }
    copy_commit();
}

/* Two codes (bits 0..3 and 16..19, or HIGH: 4..7 and 20..23) as exact f16, then scaled. */
template <bool HIGH>
static __device__ __forceinline__ uint32_t decode_pair(uint32_t word, __half2 scale, __half2 bias)
{
    uint32_t code = HIGH ? (word & 0x00f000f0u) | 0x54005400u : (word & 0x000f000fu) | 0x64006400u;
    __half2 v = *reinterpret_cast<__half2 *>(&code);
    v = __hfma2(__hsub2(v, __float2half2_rn(HIGH ? 64 : 1024)), scale, bias);
    return *reinterpret_cast<uint32_t *>(&v);
}

/* The operand of a warp's tile: a[step * 4 ..] for the four steps of 16 columns. */
static __device__ __forceinline__ void decode_tile(uint32_t a[16], const char *codes,
                                                   const char *pairs)
{
    uint32_t lane = threadIdx.x % 32, tile = threadIdx.x / 32;
    uint4 w = ((const uint4 *)codes)[tile * 32 + lane];
    uint32_t upper = ((const uint32_t *)pairs)[tile * 16 + lane / 4];
    uint32_t lower = ((const uint32_t *)pairs)[tile * 16 + lane / 4 + 8];
    __half2 s0 = __float2half2_rn(bf16_low(upper)), b0 = __float2half2_rn(bf16_high(upper));
    __half2 s1 = __float2half2_rn(bf16_low(lower)), b1 = __float2half2_rn(bf16_high(lower));
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t u = (step < 2 ? w.x : w.y) >> step % 2 * 8;
        uint32_t l = (step < 2 ? w.z : w.w) >> step % 2 * 8;
        a[step * 4] = decode_pair<false>(u, s0, b0);
        a[step * 4 + 1] = decode_pair<false>(l, s1, b1);
        a[step * 4 + 2] = decode_pair<true>(u, s0, b0);
        a[step * 4 + 3] = decode_pair<true>(l, s1, b1);
    }
}

/* Starts sum += a x for one group; multiply_end waits for it. */
template <int N>
static __device__ __forceinline__ void multiply(float sum[N / 2], const uint32_t a[16],
                                                const char *x)
{
#if CUDA_WGMMA
    uint64_t b = wgmma_rows(x);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_f16<N>(sum, a + step * 4, b + step * 2);
    wgmma_commit();
#else
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const char *row = x + (j * 8 + lane / 4) * 128 + lane % 4 * 4;
            uint32_t b0 = *(const uint32_t *)(row + ((step * 2) ^ (lane / 4)) * 16);
            uint32_t b1 = *(const uint32_t *)(row + ((step * 2 + 1) ^ (lane / 4)) * 16);
            mma_f16(sum + j * 4, a + step * 4, b0, b1);
        }
#endif
}

template <int N> static __device__ __forceinline__ void multiply_end(float sum[N / 2])
{
#if CUDA_WGMMA
    wgmma_wait();
#endif
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        asm volatile("" : "+f"(sum[i])::"memory");
}

/* Waits for group g, starts the copies of a later one and decodes it. */
template <int N, int WARPGROUPS>
static __device__ __forceinline__ void product_decode(uint32_t a[16],
                                                      const ring_source<N, WARPGROUPS> &from,
                                                      char *ring, uint32_t g, uint32_t groups)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3));
    shared_fence();
    __syncthreads(); /* group g is there; group g - 2 has been multiplied everywhere */
    ring_copy<N, WARPGROUPS>(from, ring, g + STAGES - 2, groups);
    const char *at = ring + g % STAGES * stage::bytes;
    decode_tile(a, at, at + stage::pairs);
#pragma unroll
    for (int i = 0; i < 16; i++) /* now, not when it is used */
        asm volatile("" : "+r"(a[i])::"memory");
}

/* sum[j * 4 + ..]: this warp's 16 outputs x rows j * 8.., as mma's d. A group is multiplied while
 * the next one is decoded. At the loop's end nothing is under way: the compiler gives up the
 * overlap when a product crosses it. */
template <int N, int WARPGROUPS>
static __device__ __forceinline__ void
product(float sum[N / 2], const ring_source<N, WARPGROUPS> &from, uint32_t groups, char *ring)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    uint32_t a[2][16];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        sum[i] = 0;
#pragma unroll 1
    for (uint32_t g = 0; g < STAGES - 2; g++)
        ring_copy<N, WARPGROUPS>(from, ring, g, groups);
    product_decode<N, WARPGROUPS>(a[0], from, ring, 0, groups);
#pragma unroll 1
    for (uint32_t g = 0; g + 1 < groups; g += 2) {
        multiply<N>(sum, a[0], ring + g % STAGES * stage::bytes + stage::x);
        product_decode<N, WARPGROUPS>(a[1], from, ring, g + 1, groups);
        multiply_end<N>(sum);
        multiply<N>(sum, a[1], ring + (g + 1) % STAGES * stage::bytes + stage::x);
        product_decode<N, WARPGROUPS>(a[0], from, ring, g + 2, groups); /* past the end: unused */
        multiply_end<N>(sum);
    }
    if (groups % 2) {
        multiply<N>(sum, a[0], ring + (groups - 1) % STAGES * stage::bytes + stage::x);
        multiply_end<N>(sum);
    }
}

static __device__ __forceinline__ char *ring_begin(char *space)
{
    return space + (1024 - __cvta_generic_to_shared(space) % 1024) % 1024;
}

/* ---- dense -------------------------------------------------------------------------------- */

struct prefill_dense_args {
    const uint4 *data[LINEAR_MAX];
    const uint32_t *pairs[LINEAR_MAX];
    float *out[LINEAR_MAX];
    uint32_t outs[LINEAR_MAX];
    uint32_t first_tile[LINEAR_MAX + 1]; /* in tiles of a block */
    const uint4 *packed;                 /* f16 [rows, cols] */
    uint32_t rows, groups;
    bool add;
};

template <int N, int WARPGROUPS>
static __global__ void __launch_bounds__(WARPGROUPS * 128)
    prefill_dense(const struct prefill_dense_args a)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    extern __shared__ char space[];
    overlap_wait();
    overlap_next();
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * N;
    int m = 0;
    while (blockIdx.y >= a.first_tile[m + 1])
        m++;
    uint32_t tiles = (a.outs[m] + 15) / 16, tile0 = (blockIdx.y - a.first_tile[m]) * stage::tiles;
    ring_source<N, WARPGROUPS> from;
    uint64_t t = min(tile0 + warp, tiles - 1);
    from.codes = a.data[m] + t * a.groups * 32 + lane;
    t = min(tile0 + threadIdx.x / 4 % stage::tiles, tiles - 1);
    from.pairs = (const uint4 *)a.pairs[m] + t * a.groups * 4 + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < stage::x_copies; i++) {
        uint32_t row = first + ring_row<WARPGROUPS>(i);
        from.x[i] = row < a.rows ? a.packed + (uint64_t)row * a.groups * 8 + threadIdx.x % 8 : 0;
    }
    float sum[N / 2];
    product<N, WARPGROUPS>(sum, from, a.groups, ring_begin(space));
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t row = first + j * 8 + lane % 4 * 2 + n % 2;
            uint32_t o = (tile0 + warp) * 16 + lane / 4 + n / 2 * 8;
            if (row < a.rows && o < a.outs[m]) {
                float *out = a.out[m] + (uint64_t)row * a.outs[m] + o;
                *out = a.add ? *out + sum[j * 4 + n] : sum[j * 4 + n];
            }
        }
}

template <int N, int WARPGROUPS>
static void prefill_dense_run(struct device *device, struct prefill_dense_args a)
{
    for (uint32_t i = 0; i < LINEAR_MAX; i++)
        a.first_tile[i + 1] = a.first_tile[i] + cuda_ceil(a.outs[i], WARPGROUPS * 64);
    cuda_launch(device, prefill_dense<N, WARPGROUPS>,
                dim3(cuda_ceil(a.rows, N), a.first_tile[LINEAR_MAX]), WARPGROUPS * 128,
                ring_stage<N, WARPGROUPS>::total, a);
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
    cuda_fill_linear(&a, args);
    a.packed = packed;
    a.rows = args->rows;
    a.groups = cols / 64;
    a.add = args->add;
    struct choice_tile tile = choice_dense(a.rows, device->shared_limit);
    if (tile.rows == 32)
        prefill_dense_run<32, 1>(device, a);
    else if (tile.rows == 64)
        prefill_dense_run<64, 1>(device, a);
    else if (tile.warpgroups == 2)
        prefill_dense_run<128, 2>(device, a);
    else
        prefill_dense_run<128, 4>(device, a);
}

/* ---- experts ------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(ROUTE_THREADS)
    prefill_route(const uint32_t *ids, uint32_t pairs, uint32_t experts, uint32_t *list,
                  struct route_tile *tiles, uint32_t capacity, uint32_t tile_rows)
{
    overlap_wait();
    overlap_next();
    route_sort(ids, pairs, experts, list, tiles, capacity, tile_rows);
}

struct prefill_experts_args {
    struct matrix gate, up, down;
    const struct route_tile *tiles; /* null: one expert, all rows in order (the shared one) */
    const uint32_t *list;           /* pairs by expert, with tiles */
    uint32_t rows;                  /* without tiles */
    uint32_t topk;
    const uint4 *h; /* f16 [rows, hidden] */
    __half *act;    /* f16 [pairs in list's order, width] */
    float *y;       /* f32 [pairs, hidden] */
};

template <int N>
static __device__ __forceinline__ struct route_tile
experts_tile(const struct prefill_experts_args &a)
{
    struct route_tile tile = {0, blockIdx.x * N, 0, 0};
    if (a.tiles)
        tile = a.tiles[blockIdx.x];
    else
        tile.count = min((uint32_t)N, a.rows - tile.first);
    return tile;
}

static __device__ __forceinline__ uint64_t tile_of(const struct matrix &m, uint32_t item,
                                                   uint32_t tile)
{
    return (uint64_t)item * (m.stride / 16) + min(tile, m.stride / 16 - 1);
}

/* act = silu(gate h) * up h. The first half of the warps has the gate's outputs, the other half the
 * same outputs of up, which it hands over through shared memory. */
template <int N, int WARPGROUPS>
static __global__ void __launch_bounds__(WARPGROUPS * 128)
    prefill_gate_up(const struct prefill_experts_args a)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    constexpr uint32_t HALF = stage::tiles / 2, THREADS = WARPGROUPS * 64;
    extern __shared__ char space[];
    overlap_wait();
    overlap_next();
    struct route_tile part = experts_tile<N>(a);
    if (part.count == 0)
        return;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = a.gate.cols / 64;
    uint32_t tile0 = blockIdx.y * HALF, pair_tile = threadIdx.x / 4 % stage::tiles;
    const struct matrix &m = warp < HALF ? a.gate : a.up;
    const struct matrix &pair_m = pair_tile < HALF ? a.gate : a.up;
    ring_source<N, WARPGROUPS> from;
    from.codes =
        (const uint4 *)m.data + tile_of(m, part.expert, tile0 + warp % HALF) * groups * 32 + lane;
    from.pairs = (const uint4 *)pair_m.pairs +
                 tile_of(pair_m, part.expert, tile0 + pair_tile % HALF) * groups * 4 +
                 threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < stage::x_copies; i++) {
        uint32_t n = ring_row<WARPGROUPS>(i);
        from.x[i] = 0;
        if (n < part.count) {
            uint32_t row = a.tiles ? a.list[part.first + n] / a.topk : part.first + n;
            from.x[i] = a.h + (uint64_t)row * groups * 8 + threadIdx.x % 8;
        }
    }
    char *ring = ring_begin(space);
    float sum[N / 2];
    product<N, WARPGROUPS>(sum, from, groups, ring);
    float *up = (float *)ring; /* [N / 2][THREADS] */
    __syncthreads();
    if (warp >= HALF)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            up[i * THREADS + threadIdx.x - THREADS] = sum[i];
    __syncthreads();
    if (warp >= HALF)
        return;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t row = j * 8 + lane % 4 * 2 + n % 2;
            uint32_t o = (tile0 + warp) * 16 + lane / 4 + n / 2 * 8;
            float u = up[(j * 4 + n) * THREADS + threadIdx.x];
            if (row < part.count && o < a.gate.rows)
                a.act[(uint64_t)(part.first + row) * a.gate.rows + o] =
                    __float2half_rn(f16_clamp(silu(sum[j * 4 + n]) * u));
        }
}

template <int N, int WARPGROUPS>
static __global__ void __launch_bounds__(WARPGROUPS * 128)
    prefill_down(const struct prefill_experts_args a)
{
    typedef ring_stage<N, WARPGROUPS> stage;
    extern __shared__ char space[];
    overlap_wait();
    overlap_next();
    struct route_tile part = experts_tile<N>(a);
    if (part.count == 0)
        return;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = a.down.cols / 64;
    uint32_t tile0 = blockIdx.y * stage::tiles, pair_tile = threadIdx.x / 4 % stage::tiles;
    ring_source<N, WARPGROUPS> from;
    from.codes = (const uint4 *)a.down.data +
                 tile_of(a.down, part.expert, tile0 + warp) * groups * 32 + lane;
    from.pairs = (const uint4 *)a.down.pairs +
                 tile_of(a.down, part.expert, tile0 + pair_tile) * groups * 4 + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < stage::x_copies; i++) {
        uint32_t n = ring_row<WARPGROUPS>(i);
        from.x[i] = n < part.count ? (const uint4 *)a.act +
                                         (uint64_t)(part.first + n) * groups * 8 + threadIdx.x % 8
                                   : 0;
    }
    float sum[N / 2];
    product<N, WARPGROUPS>(sum, from, groups, ring_begin(space));
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t row = j * 8 + lane % 4 * 2 + n;
            if (row >= part.count)
                continue;
            uint64_t pair = a.tiles ? a.list[part.first + row] : part.first + row;
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                uint32_t o = (tile0 + warp) * 16 + lane / 4 + lower * 8;
                if (o < a.down.rows)
                    a.y[pair * a.down.rows + o] = sum[j * 4 + lower * 2 + n];
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

template <int N, int WARPGROUPS>
static void prefill_run(struct device *device, const struct prefill_experts_args &a, uint32_t tiles)
{
    size_t shared = ring_stage<N, WARPGROUPS>::total;
    cuda_launch(device, prefill_gate_up<N, WARPGROUPS>,
                dim3(tiles, cuda_ceil(a.gate.rows, WARPGROUPS * 32)), WARPGROUPS * 128, shared, a);
    cuda_launch(device, prefill_down<N, WARPGROUPS>,
                dim3(tiles, cuda_ceil(a.down.rows, WARPGROUPS * 64)), WARPGROUPS * 128, shared, a);
}

static void prefill_run_tiles(struct device *device, const struct prefill_experts_args &a,
                              uint32_t tiles, uint32_t tile_rows)
{
    if (tile_rows == 32)
        prefill_run<32, 2>(device, a, tiles);
    else if (tile_rows == 64)
        prefill_run<64, 4>(device, a, tiles);
    else
        prefill_run<128, 4>(device, a, tiles);
}

void cuda_prefill_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *d = &args->dims;
    uint64_t rows = args->rows, pairs = rows * d->topk, hidden = d->hidden;
    uint32_t tile_rows = choice_experts(pairs, d->experts, device->shared_limit).rows;
    uint32_t capacity = pairs / tile_rows + (d->experts < pairs ? d->experts : pairs);
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
                capacity, tile_rows);
    struct prefill_experts_args a = {};
    a.gate = cuda_matrix(args->gate);
    a.up = cuda_matrix(args->up);
    a.down = cuda_matrix(args->down);
    a.tiles = tiles;
    a.list = list;
    a.topk = d->topk;
    a.h = (const uint4 *)packed;
    a.act = (__half *)(packed + rows * hidden * 2);
    a.y = y;
    prefill_run_tiles(device, a, capacity, tile_rows);
    a.gate = cuda_matrix(args->shared_gate_proj);
    a.up = cuda_matrix(args->shared_up);
    a.down = cuda_matrix(args->shared_down);
    a.tiles = nullptr;
    a.rows = args->rows;
    a.act = (__half *)(packed + rows * hidden * 2 + act_bytes);
    a.y = y + pairs * hidden;
    tile_rows = choice_shared_expert(args->rows, device->shared_limit).rows;
    prefill_run_tiles(device, a, cuda_ceil(rows, tile_rows), tile_rows);
    cuda_launch(device, prefill_combine, dim3(args->rows), 256, 0, (const float *)y,
                cuda_at<const float>(args->weights), (const float *)(y + pairs * hidden),
                cuda_at<const float>(args->shared_gate), d->topk, d->hidden,
                cuda_at<float>(args->x));
}
