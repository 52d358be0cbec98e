/* Projections.
 *
 * Up to LINEAR_STEP_ROWS rows ("step"): tiles of 16 outputs go round the blocks; warps of a block
 * share the columns, and tensor cores form exact products (tile_step). Bytes of weights bound it:
 * every weight is read once, and the first while the kernel before still runs. More rows: batch.cu,
 * then prefill.cu; a few more in steps where batch.cu does not take the shape. Weights that are not
 * tiled: a warp an output, or blocks of 64 x 64 in f32. */
#include "backend/cuda/ops.cuh"

enum { LINEAR_STEP_ROWS = CHOICE_STEP_ROWS };
enum { STEP_WARPS = CHOICE_STEP_WARPS, STEP_ROUND = CHOICE_STEP_ROUND };

/* ---- any rows, any weight ----------------------------------------------------------------- */

static __global__ void norm_rows_f32(const float *x, const uint32_t *select, const float *gain,
                                     float eps, uint32_t cols, float *h)
{
    __shared__ float part[32];
    overlap_wait();
    overlap_next();
    const float *from = x + (uint64_t)(select ? select[blockIdx.x] : blockIdx.x) * cols;
    float sum = 0;
    for (uint32_t k = threadIdx.x; k < cols; k += blockDim.x)
        sum += from[k] * from[k];
    float scale = gain ? rsqrtf(block_sum(sum, part) / cols + eps) : 1;
    for (uint32_t k = threadIdx.x; k < cols; k += blockDim.x)
        h[(uint64_t)blockIdx.x * cols + k] = from[k] * scale * (gain ? gain[k] : 1);
}

void cuda_norm_rows(struct device *device, const float *x, const uint32_t *select,
                    const float *gain, float eps, uint32_t rows, uint32_t cols, float *h)
{
    cuda_launch(device, norm_rows_f32, dim3(rows), 256, 0, x, select, gain, eps, cols, h);
}

enum { ANY_ROWS = 8, ANY_WARPS = 8 };

/* One warp an output and ANY_ROWS rows of x: each weight is decoded once for them. */
static __global__ void linear_any(struct matrix w, const float *x, uint32_t rows, bool add,
                                  float *out)
{
    overlap_wait();
    overlap_next();
    uint32_t o = blockIdx.x * ANY_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first = blockIdx.y * ANY_ROWS, n = min((uint32_t)ANY_ROWS, rows - first);
    if (o >= w.rows)
        return;
    float sum[ANY_ROWS] = {0};
    x += (uint64_t)first * w.cols;
    for (uint32_t k = lane; k < w.cols; k += 32) {
        float v = matrix_at(w, o, k);
#pragma unroll
        for (int r = 0; r < ANY_ROWS; r++)
            if (r < n)
                sum[r] += v * x[(uint64_t)r * w.cols + k];
    }
#pragma unroll
    for (int r = 0; r < ANY_ROWS; r++) {
        float total = warp_sum(sum[r]);
        if (r < n && lane == 0) {
            float *to = out + (uint64_t)(first + r) * w.rows + o;
            *to = add ? *to + total : total;
        }
    }
}

enum { F32_TILE = 64, F32_STEP = 32 };

/* 64 outputs x 64 rows a block in f32, 4 x 4 a thread; weights are decoded into shared memory. */
static __global__ void __launch_bounds__(256)
    linear_f32_tile(struct matrix w, const float *x, uint32_t rows, bool add, float *out)
{
    __shared__ float xs[F32_STEP][F32_TILE + 4], ws[F32_STEP][F32_TILE + 4];
    overlap_wait();
    overlap_next();
    uint32_t row0 = blockIdx.y * F32_TILE, out0 = blockIdx.x * F32_TILE;
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16, k = threadIdx.x % F32_STEP;
    float sum[4][4] = {};
    for (uint32_t k0 = 0; k0 < w.cols; k0 += F32_STEP) {
        for (uint32_t r = threadIdx.x / F32_STEP; r < F32_TILE; r += 256 / F32_STEP) {
            bool inside = k0 + k < w.cols;
            xs[k][r] = inside && row0 + r < rows ? x[(uint64_t)(row0 + r) * w.cols + k0 + k] : 0;
            ws[k][r] = inside && out0 + r < w.rows ? matrix_at(w, out0 + r, k0 + k) : 0;
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < F32_STEP; i++) {
            float4 a = *(const float4 *)&xs[i][ty * 4], b = *(const float4 *)&ws[i][tx * 4];
            const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int o = 0; o < 4; o++)
                    sum[r][o] += av[r] * bv[o];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int o = 0; o < 4; o++) {
            uint32_t row = row0 + ty * 4 + r, at = out0 + tx * 4 + o;
            if (row < rows && at < w.rows) {
                float *to = out + (uint64_t)row * w.rows + at;
                *to = add ? *to + sum[r][o] : sum[r][o];
            }
        }
}

void cuda_linear_any(struct device *device, const struct matrix &w, const float *x, uint32_t rows,
                     bool add, float *out)
{
    if (rows > 2 * ANY_ROWS && w.rows >= F32_TILE / 4) {
        cuda_launch(device, linear_f32_tile,
                    dim3(cuda_ceil(w.rows, F32_TILE), cuda_ceil(rows, F32_TILE)), 256, 0, w, x,
                    rows, add, out);
        return;
    }
    cuda_launch(device, linear_any, dim3(cuda_ceil(w.rows, ANY_WARPS), cuda_ceil(rows, ANY_ROWS)),
                ANY_WARPS * 32, 0, w, x, rows, add, out);
}

/* ---- few rows ----------------------------------------------------------------------------- */

struct linear_step_args {
    const uint4 *data[LINEAR_MAX];
    const uint4 *pairs[LINEAR_MAX];
    float *out[LINEAR_MAX];
    uint32_t outs[LINEAR_MAX];
    uint32_t first_tile[LINEAR_MAX + 1];
    const float *x, *gain;
    const uint32_t *select;
    uint32_t rows, cols, slots, share;
    float eps;
    bool add;
};

/* Where a warp's part of a tile comes from: matrix m's tile, groups first.. */
static __device__ __forceinline__ void step_fetch(const struct linear_step_args &a, uint4 *slot,
                                                  uint32_t at, uint32_t first, uint32_t n,
                                                  uint32_t most)
{
    uint32_t lane = threadIdx.x % 32, groups = a.cols / 64;
    if (at < a.first_tile[LINEAR_MAX]) {
        int m = 0;
        while (at >= a.first_tile[m + 1])
            m++;
        uint64_t from = (uint64_t)(at - a.first_tile[m]) * groups + first;
        for (uint32_t g = 0; g < n; g++)
            copy_async(slot + g * 32 + lane, a.data[m] + (from + g) * 32 + lane, true);
        for (uint32_t i = lane; i < n * 4; i += 32)
            copy_async(slot + most * 32 + i, a.pairs[m] + from * 4 + i, true);
    }
    copy_commit();
}

/* Waits for the oldest of `slots` fetches. */
static __device__ __forceinline__ void step_arrived(uint32_t slots)
{
    switch (slots) {
    case 1:
        copy_wait<0>();
        break;
    case 2:
        copy_wait<1>();
        break;
    case 3:
        copy_wait<2>();
        break;
    case 4:
        copy_wait<3>();
        break;
    default:
        copy_wait<4>();
        break;
    }
    __syncwarp();
}

/* Packs groups from..to of all rows (times gain) and leaves their sums of squares. */
static __device__ __forceinline__ void step_pack_own(const struct linear_step_args &a,
                                                     uint4 *packed, float2 *scales, float *squares,
                                                     uint32_t from, uint32_t to,
                                                     const float early[8])
{
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t r = 0; r < a.rows; r++) {
        const float4 *x = (const float4 *)(a.x + (uint64_t)(a.select ? a.select[r] : r) * a.cols);
        float square = 0;
        for (uint32_t k8 = from * 8 + lane; k8 < to * 8; k8 += 32) {
            float v[8], gain[8];
            *(float4 *)v = x[k8 * 2];
            *(float4 *)(v + 4) = x[k8 * 2 + 1];
#pragma unroll
            for (int i = 0; i < 8; i++)
                square += v[i] * v[i];
            if (a.gain && k8 >= from * 8 + 32) {
                *(float4 *)gain = ((const float4 *)a.gain)[k8 * 2];
                *(float4 *)(gain + 4) = ((const float4 *)a.gain)[k8 * 2 + 1];
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] *= !a.gain ? 1 : k8 < from * 8 + 32 ? early[i] : gain[i];
            step_pack(packed, scales, a.rows, r, k8, v);
        }
        square = warp_sum(square);
        if (lane == 0)
            squares[r] = square;
    }
    __syncwarp();
}

/* Output o of a tile for row r: the sum over the warps that shared it. index: the tile's place in
 * red. */
static __device__ __forceinline__ void step_finish(const struct linear_step_args &a,
                                                   const float *red,
                                                   const float squares[][LINEAR_STEP_ROWS],
                                                   uint32_t tile, uint32_t index, uint32_t r,
                                                   uint32_t o)
{
    if (tile >= a.first_tile[LINEAR_MAX])
        return;
    float sum = 0, square = 0;
    for (uint32_t w = 0; w < a.share; w++)
        sum += red[((index * a.share + w) * a.rows + r) * 16 + o];
#pragma unroll
    for (int w = 0; w < STEP_WARPS; w++)
        square += squares[w][r];
    if (a.gain)
        sum *= rsqrtf(square / a.cols + a.eps);
    int m = 0;
    while (tile >= a.first_tile[m + 1])
        m++;
    o += (tile - a.first_tile[m]) * 16;
    if (o < a.outs[m]) {
        float *out = a.out[m] + (uint64_t)r * a.outs[m] + o;
        *out = a.add ? *out + sum : sum;
    }
}

/* A block an SM, walking tiles gridDim.x apart, warps / a.share at a time; a.share warps share the
 * columns of one, and each fetches its part of the next `slots` by itself, the first ones before
 * the kernel before has ended. The norm's scale is applied to the sums, so nothing waits for it. */
static __global__ void __launch_bounds__(STEP_WARPS * 32)
    linear_q4_step(const __grid_constant__ struct linear_step_args a)
{
    extern __shared__ uint4 space[];
    __shared__ float squares[STEP_WARPS][LINEAR_STEP_ROWS];
    uint32_t groups = a.cols / 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t own = warp % a.share, lanes = STEP_WARPS / a.share, end = a.first_tile[LINEAR_MAX];
    uint32_t from = groups * own / a.share, n = groups * (own + 1) / a.share - from;
    uint32_t most = (groups + a.share - 1) / a.share, stride = lanes * gridDim.x;
    float *red = (float *)space; /* f32 [STEP_ROUND][STEP_WARPS][rows][16] */
    uint4 *packed = space + STEP_ROUND * STEP_WARPS * 4 * a.rows;
    float2 *scales = (float2 *)(packed + groups * 8 * a.rows);
    uint4 *slot0 =
        packed + groups * 8 * a.rows + (groups * a.rows + 1) / 2 + warp * a.slots * most * 36;
    uint32_t at = blockIdx.x + warp / a.share * gridDim.x;
    for (uint32_t i = 0; i < a.slots; i++)
        step_fetch(a, slot0 + i * most * 36, at + i * stride, from, n, most);
    uint32_t first = groups * warp / STEP_WARPS, last = groups * (warp + 1) / STEP_WARPS;
    float gain[8] = {};
    if (a.gain && first * 8 + lane < last * 8) {
        *(float4 *)gain = ((const float4 *)a.gain)[(first * 8 + lane) * 2];
        *(float4 *)(gain + 4) = ((const float4 *)a.gain)[(first * 8 + lane) * 2 + 1];
    }
    overlap_next();
    overlap_wait();
    step_pack_own(a, packed, scales, squares[warp], first, last, gain);
    __syncthreads();
    uint32_t rounds = (end + stride - 1 - blockIdx.x) / stride;
    for (uint32_t round = 0; round < rounds; round++, at += stride) {
        uint4 *slot = slot0 + round % a.slots * most * 36;
        float y[2] = {0, 0};
        step_arrived(a.slots);
#pragma unroll 4
        for (uint32_t g = 0; g < n; g++) { /* lane % 4: the row whose product it gets */
            const uint32_t *pair = (const uint32_t *)(slot + most * 32 + g * 4);
            tile_step(y, slot[g * 32 + lane], pair[lane / 4], pair[lane / 4 + 8],
                      step_load(packed, a.rows, from + g),
                      scales[(from + g) * a.rows + min(lane % 4, a.rows - 1)]);
        }
        __syncwarp();
        step_fetch(a, slot, at + a.slots * stride, from, n, most);
        if (lane % 4 < a.rows) {
            float *to = red + ((round % STEP_ROUND * STEP_WARPS + warp) * a.rows + lane % 4) * 16;
            to[lane / 4] = y[0];
            to[lane / 4 + 8] = y[1];
        }
        if (round % STEP_ROUND != STEP_ROUND - 1 && round + 1 < rounds)
            continue;
        __syncthreads();
        uint32_t count = (round % STEP_ROUND + 1) * lanes;
        uint32_t base = blockIdx.x + (round - round % STEP_ROUND) * stride;
        for (uint32_t i = threadIdx.x; i < count * a.rows * 16; i += blockDim.x)
            step_finish(a, red, squares, base + i / (a.rows * 16) * gridDim.x, i / (a.rows * 16),
                        i / 16 % a.rows, i % 16);
        __syncthreads();
    }
}

/* All rows, as many at a time as fit; false: not even one does. */
static bool linear_step(struct device *device, const struct linear_args *args)
{
    struct linear_step_args all = {};
    all.cols = args->weight[0]->cols;
    all.x = cuda_at<const float>(args->x);
    all.select = cuda_at<const uint32_t>(args->select);
    all.gain = cuda_at<const float>(args->gain);
    all.eps = args->eps;
    all.add = args->add;
    cuda_fill_linear(&all, args);
    for (uint32_t i = 0; i < LINEAR_MAX; i++)
        all.first_tile[i + 1] = all.first_tile[i] + (all.outs[i] + 15) / 16;
    uint32_t tiles = all.first_tile[LINEAR_MAX], sms = device->sms;
    for (uint32_t first = 0; first < args->rows;) {
        struct choice_step step =
            choice_step(all.cols / 64, tiles, args->rows - first, sms, device->shared_limit);
        if (!step.rows)
            return false;
        struct linear_step_args a = all;
        a.rows = step.rows;
        a.share = step.share;
        a.slots = step.slots;
        if (a.select)
            a.select += first;
        else
            a.x += (uint64_t)first * a.cols;
        for (uint32_t i = 0; i < args->n; i++)
            a.out[i] += (uint64_t)first * a.outs[i];
        cuda_launch(device, linear_q4_step, dim3(tiles < sms ? tiles : sms), STEP_WARPS * 32,
                    step.shared_bytes, a);
        first += step.rows;
    }
    return true;
}

/* ---- the op ------------------------------------------------------------------------------- */

void cuda_linear(struct device *device, const struct linear_args *args)
{
    uint32_t cols = args->weight[0]->cols;
    bool tiled = true, batch = args->rows > BATCH_LEAST && !(device->without & CUDA_BATCH);
    for (uint32_t i = 0; i < args->n; i++)
        tiled = tiled && cuda_is_tiled(args->weight[i]);
    if (tiled && batch && cuda_batch_linear(device, args))
        return;
    if (tiled && args->rows <= CHOICE_FEW_ROWS && linear_step(device, args))
        return;
    const float *x = cuda_at<const float>(args->x);
    const uint32_t *select = cuda_at<const uint32_t>(args->select);
    const float *gain = cuda_at<const float>(args->gain);
    if (tiled) {
        cuda_prefill_linear(device, args);
        return;
    }
    if (gain || select) {
        float *h = (float *)cuda_scratch(device, SCRATCH_NORMED, (uint64_t)args->rows * cols * 4);
        if (!h)
            return;
        cuda_norm_rows(device, x, select, gain, args->eps, args->rows, cols, h);
        x = h;
    }
    for (uint32_t i = 0; i < args->n; i++)
        cuda_linear_any(device, cuda_matrix(args->weight[i]), x, args->rows, args->add,
                        cuda_at<float>(args->out[i]));
}
