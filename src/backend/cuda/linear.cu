/* Projections.
 *
 * Up to LINEAR_STEP_ROWS rows ("step"): a block owns 16 outputs of one matrix; its warps share the
 * columns. Each warp starts its weights' loads first, then the block normalises and packs x into
 * shared memory while they are under way, and tensor cores form exact products (tile_step).
 * Bytes of weights bound it: every weight is read once.
 * More rows: prefill.cu's matrix product. Weights that are not tiled: one warp an output. */
#include "backend/cuda/ops.cuh"

enum { LINEAR_STEP_ROWS = 4, LINEAR_STEP_GROUPS = 8, LINEAR_STEPS = 8 };

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

void cuda_linear_any(struct device *device, const struct matrix &w, const float *x, uint32_t rows,
                     bool add, float *out)
{
    cuda_launch(device, linear_any, dim3(cuda_ceil(w.rows, ANY_WARPS), cuda_ceil(rows, ANY_ROWS)),
                ANY_WARPS * 32, 0, w, x, rows, add, out);
}

/* ---- few rows ----------------------------------------------------------------------------- */

struct linear_step_args {
    const uint4 *data[LINEAR_MAX];
    const uint32_t *pairs[LINEAR_MAX];
    float *out[LINEAR_MAX];
    uint32_t outs[LINEAR_MAX];
    uint32_t first_tile[LINEAR_MAX + 1];
    const float *x, *gain;
    const uint32_t *select;
    uint32_t rows, cols;
    float eps;
    bool add;
};

/* Normalises and packs all rows of x into shared memory: packed [cols/64][2][2 rows][4] and the
 * groups' sums [cols/64][rows]. Every thread of the block takes part. */
static __device__ void linear_step_pack(const struct linear_step_args &a, uint4 *packed,
                                        float *sums, float *part)
{
    for (uint32_t r = 0; r < a.rows; r++) {
        const float *x = a.x + (uint64_t)(a.select ? a.select[r] : r) * a.cols;
        float scale = 1;
        if (a.gain) {
            float sum = 0;
            for (uint32_t k = threadIdx.x * 4; k < a.cols; k += blockDim.x * 4) {
                float4 v = *(const float4 *)(x + k);
                sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            }
            scale = rsqrtf(block_sum(sum, part) / a.cols + a.eps);
        }
        for (uint32_t k8 = threadIdx.x; k8 < a.cols / 8; k8 += blockDim.x) {
            float v[8];
            *(float4 *)v = ((const float4 *)x)[k8 * 2];
            *(float4 *)(v + 4) = ((const float4 *)x)[k8 * 2 + 1];
            if (a.gain) {
                float gain[8];
                *(float4 *)gain = ((const float4 *)a.gain)[k8 * 2];
                *(float4 *)(gain + 4) = ((const float4 *)a.gain)[k8 * 2 + 1];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[i] *= scale * gain[i];
            }
            float sum = sum_of_8(step_pack(packed, a.rows, r, k8, v));
            if (k8 % 8 == 0)
                sums[k8 / 8 * a.rows + r] = sum;
        }
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(256) linear_q4_step(const struct linear_step_args a)
{
    extern __shared__ uint4 packed[];
    __shared__ float part[32];
    __shared__ float red[8][LINEAR_STEP_ROWS][16];
    uint32_t groups = a.cols / 64, warps = blockDim.x / 32;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *sums = (float *)(packed + (uint64_t)groups * 16 * a.rows);
    int m = 0;
    while (blockIdx.x >= a.first_tile[m + 1])
        m++;
    uint32_t tile = blockIdx.x - a.first_tile[m];
    const uint4 *data = a.data[m] + (uint64_t)tile * groups * 32 + lane;
    const uint32_t *pairs = a.pairs[m] + (uint64_t)tile * groups * 16 + lane / 4;

    uint32_t from = groups * warp / warps, to = groups * (warp + 1) / warps;
    float y[2] = {0, 0};
    uint4 w[LINEAR_STEP_GROUPS];
    uint32_t pair[LINEAR_STEP_GROUPS][2];
    for (uint32_t g0 = from; g0 == from || g0 < to; g0 += LINEAR_STEP_GROUPS) {
#pragma unroll
        for (int i = 0; i < LINEAR_STEP_GROUPS; i++) {
            if (g0 + i < to) {
                w[i] = __ldg(data + (g0 + i) * 32);
                pair[i][0] = __ldg(pairs + (g0 + i) * 16);
                pair[i][1] = __ldg(pairs + (g0 + i) * 16 + 8);
            }
        }
        if (g0 == from) {
            overlap_wait();
            overlap_next();
            linear_step_pack(a, packed, sums, part);
        }
#pragma unroll
        for (int i = 0; i < LINEAR_STEP_GROUPS; i++) {
            uint32_t g = g0 + i;
            if (g < to)
                tile_step(y, w[i], pair[i][0], pair[i][1], step_load(packed, a.rows, g, 0),
                          step_load(packed, a.rows, g, 1),
                          lane % 4 < a.rows ? sums[g * a.rows + lane % 4] : 0);
        }
    }
    red[warp][lane % 4][lane / 4] = y[0];
    red[warp][lane % 4][lane / 4 + 8] = y[1];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.rows * 16; i += blockDim.x) {
        uint32_t r = i / 16, o = tile * 16 + i % 16;
        float sum = 0;
        for (uint32_t n = 0; n < warps; n++)
            sum += red[n][r][i % 16];
        if (o < a.outs[m]) {
            float *out = a.out[m] + (uint64_t)r * a.outs[m] + o;
            *out = a.add ? *out + sum : sum;
        }
    }
}

static void linear_step(struct device *device, const struct linear_args *args, uint32_t first,
                        uint32_t rows)
{
    struct linear_step_args a = {};
    a.cols = args->weight[0]->cols;
    a.rows = rows;
    a.x = cuda_at<const float>(args->x);
    a.select = cuda_at<const uint32_t>(args->select);
    if (a.select)
        a.select += first;
    else
        a.x += (uint64_t)first * a.cols;
    a.gain = cuda_at<const float>(args->gain);
    a.eps = args->eps;
    a.add = args->add;
    for (uint32_t i = 0; i < LINEAR_MAX; i++) {
        if (i < args->n) {
            struct matrix m = cuda_matrix(args->weight[i]);
            a.data[i] = (const uint4 *)m.data;
            a.pairs[i] = m.pairs;
            a.outs[i] = m.rows;
            a.out[i] = cuda_at<float>(args->out[i]) + (uint64_t)first * m.rows;
        }
        a.first_tile[i + 1] = a.first_tile[i] + (a.outs[i] + 15) / 16;
    }
    uint32_t groups = a.cols / 64, warps = cuda_ceil(groups, LINEAR_STEP_GROUPS);
    warps = warps > 8 ? 8 : warps;
    cuda_launch(device, linear_q4_step, dim3(a.first_tile[LINEAR_MAX]), warps * 32,
                (size_t)groups * rows * (256 + 4), a);
}

/* ---- the op ------------------------------------------------------------------------------- */

void cuda_linear(struct device *device, const struct linear_args *args)
{
    uint32_t cols = args->weight[0]->cols;
    bool tiled = true;
    for (uint32_t i = 0; i < args->n; i++)
        tiled = tiled && cuda_is_tiled(args->weight[i]);
    if (tiled && args->rows <= LINEAR_STEP_ROWS * LINEAR_STEPS) {
        for (uint32_t r = 0; r < args->rows; r += LINEAR_STEP_ROWS)
            linear_step(device, args, r,
                        args->rows - r < LINEAR_STEP_ROWS ? args->rows - r : LINEAR_STEP_ROWS);
        return;
    }
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
