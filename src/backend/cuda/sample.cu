/* What sampling needs of the logits, so that only ids and a few values leave the device. */
#include "backend/cuda/ops.cuh"

#include <math.h>

/* Order of floats as order of unsigned integers; -0 and 0 are one value. */
static __device__ __forceinline__ uint32_t float_order(float v)
{
    uint32_t u = __float_as_uint(v + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* ---- argmax: parts of a row, merged by the block that finishes last ------------------------ */

enum { ARGMAX_PARTS = 64 };

/* Best value and lowest id as one number; NaN beats all, and no finite value gives 0. */
static __device__ unsigned long long argmax_key(float v, uint32_t i)
{
    if (isnan(v))
        return ~0ull;
    return (unsigned long long)float_order(v) << 32 | (0xfffffffeu - i);
}

static __device__ unsigned long long argmax_block(unsigned long long best, bool *finite)
{
    __shared__ unsigned long long part[32];
    __shared__ int any;
    for (int off = 16; off; off /= 2) {
        unsigned long long other = __shfl_xor_sync(~0u, best, off);
        best = other > best ? other : best;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        any = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = best;
    if (*finite)
        any = 1;
    __syncthreads();
    for (uint32_t i = 0; i < blockDim.x / 32; i++)
        best = part[i] > best ? part[i] : best;
    *finite = any;
    return best;
}

static __global__ void argmax_parts(const float *logits, uint32_t vocab, unsigned long long *parts,
                                    uint32_t *counters, int32_t *ids)
{
    __shared__ bool last;
    overlap_wait();
    overlap_next();
    const float *l = logits + (uint64_t)blockIdx.y * vocab;
    unsigned long long best = 0, *row = parts + (uint64_t)blockIdx.y * ARGMAX_PARTS * 2;
    bool finite = false;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab;
         i += blockDim.x * gridDim.x) {
        unsigned long long key = argmax_key(l[i], i);
        best = key > best ? key : best;
        finite |= isfinite(l[i]);
    }
    best = argmax_block(best, &finite);
    if (threadIdx.x == 0) {
        row[blockIdx.x * 2] = best;
        row[blockIdx.x * 2 + 1] = finite;
        __threadfence();
        last = atomicAdd(&counters[blockIdx.y], 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    best = 0;
    finite = false;
    for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        unsigned long long key = __ldcg(row + i * 2);
        best = key > best ? key : best;
        finite |= __ldcg(row + i * 2 + 1) != 0;
    }
    best = argmax_block(best, &finite);
    if (threadIdx.x == 0) {
        counters[blockIdx.y] = 0;
        ids[blockIdx.y] = best == ~0ull || !finite ? -1 : (int32_t)(0xfffffffeu - (uint32_t)best);
    }
}

void cuda_argmax(struct device *device, const struct argmax_args *args)
{
    void *parts = cuda_scratch(device, SCRATCH_SAMPLE, (uint64_t)args->rows * ARGMAX_PARTS * 16);
    if (!parts)
        return;
    cuda_launch(device, argmax_parts, dim3(ARGMAX_PARTS, args->rows), 256, 0,
                cuda_at<const float>(args->logits), args->vocab, (unsigned long long *)parts,
                cuda_counters(device), cuda_at<int32_t>(args->ids));
}

/* ---- top: one block a row ------------------------------------------------------------------ */

enum { TOP_THREADS = 1024, TOP_MAX = 1024 };

/* Inclusive sum over the block's threads. part: shared u32 [32]. */
static __device__ uint32_t block_scan(uint32_t v, uint32_t *part)
{
    uint32_t lane = threadIdx.x % 32, sum = v;
    for (int off = 1; off < 32; off *= 2) {
        uint32_t other = __shfl_up_sync(~0u, sum, off);
        sum += lane >= off ? other : 0;
    }
    __syncthreads();
    if (lane == 31)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    for (uint32_t i = 0; i < threadIdx.x / 32; i++)
        sum += part[i];
    return sum;
}

/* The order key of the count-th largest value, 8 bits at a time from the top; *equal: how many of
 * the values with that key are among the count. */
static __device__ uint32_t top_threshold(const float *l, uint32_t vocab, uint32_t count,
                                         uint32_t *equal)
{
    __shared__ uint32_t histogram[256], digit, above;
    uint32_t key = 0, mask = 0, left = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256)
            histogram[threadIdx.x] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
            uint32_t u = float_order(l[i]);
            if ((u & mask) == key)
                atomicAdd(&histogram[u >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t sum = 0, d = 255;
            while (d > 0 && sum + histogram[d] < left)
                sum += histogram[d--];
            digit = d;
            above = sum;
        }
        __syncthreads();
        key |= digit << shift;
        mask |= 255u << shift;
        left -= above;
        __syncthreads();
    }
    *equal = left;
    return key;
}

/* Descending by key, which is unique: bitonic, n a power of two. */
static __device__ void top_sort(unsigned long long *keys, uint32_t n)
{
    for (uint32_t size = 2; size <= n; size *= 2)
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            uint32_t i = threadIdx.x, j = i ^ stride;
            if (i < n && j > i) {
                bool descending = (i & size) == 0;
                unsigned long long a = keys[i], b = keys[j];
                if ((a < b) == descending) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
        }
    __syncthreads();
}

static __device__ float top_log_sum(const float *l, uint32_t vocab, float *part)
{
    __shared__ float best[32];
    float top = -INFINITY, sum = 0;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x)
        top = fmaxf(top, l[i]);
    for (int off = 16; off; off /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, off));
    if (threadIdx.x % 32 == 0)
        best[threadIdx.x / 32] = top;
    __syncthreads();
    for (uint32_t i = 0; i < blockDim.x / 32; i++)
        top = fmaxf(top, best[i]);
    if (isinf(top)) /* still the answer, unless there is a NaN */
        for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x)
            sum += isnan(l[i]) ? l[i] : 0;
    else
        for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x)
            sum += expf(l[i] - top);
    sum = block_sum(sum, part);
    return isinf(top) ? top + sum : top + logf(sum);
}

static __global__ void __launch_bounds__(TOP_THREADS)
    top_row(const float *logits, uint32_t vocab, uint32_t count, int32_t *ids, float *values,
            float *log_sum)
{
    __shared__ unsigned long long keys[TOP_MAX];
    __shared__ uint32_t scan[32], taken;
    __shared__ float part[32];
    overlap_wait();
    overlap_next();
    const float *l = logits + (uint64_t)blockIdx.x * vocab;
    float total = top_log_sum(l, vocab, part);
    if (threadIdx.x == 0)
        log_sum[blockIdx.x] = total;
    uint32_t some = min(count, vocab), equal, threshold = top_threshold(l, vocab, some, &equal);
    if (threadIdx.x == 0)
        taken = 0;
    keys[threadIdx.x] = 0;
    __syncthreads();
    uint32_t equal_before = 0, above = some - equal;
    for (uint32_t from = 0; from < vocab; from += blockDim.x) { /* in order, for ties */
        uint32_t i = from + threadIdx.x, u = i < vocab ? float_order(l[i]) : 0;
        bool here = i < vocab && u == threshold;
        unsigned long long key = (unsigned long long)u << 32 | (0xffffffffu - i);
        if (i < vocab && u > threshold)
            keys[atomicAdd(&taken, 1) % TOP_MAX] = key;
        if (__syncthreads_or(here) && equal_before < equal) {
            uint32_t rank = equal_before + block_scan(here, scan);
            if (here && rank <= equal)
                keys[(above + rank - 1) % TOP_MAX] = key;
            __syncthreads();
            if (threadIdx.x == blockDim.x - 1)
                scan[0] = rank;
            __syncthreads();
            equal_before = scan[0];
        }
    }
    uint32_t n = 1;
    while (n < count)
        n *= 2;
    __syncthreads();
    top_sort(keys, n);
    if (threadIdx.x < count) {
        uint64_t at = (uint64_t)blockIdx.x * count + threadIdx.x;
        uint32_t id = min(0xffffffffu - (uint32_t)keys[threadIdx.x], vocab - 1);
        ids[at] = (int32_t)id;
        values[at] = l[id];
    }
}

void cuda_top(struct device *device, const struct top_args *args)
{
    cuda_launch(device, top_row, dim3(args->rows), TOP_THREADS, 0,
                cuda_at<const float>(args->logits), args->vocab, args->count,
                cuda_at<int32_t>(args->ids), cuda_at<float>(args->values),
                cuda_at<float>(args->log_sum));
}
