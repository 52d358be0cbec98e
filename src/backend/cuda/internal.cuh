/* What the CUDA files share: the device, how a kernel is launched, and how weights lie in memory.
 *
 * Kernels that follow each other on the stream overlap (programmatic dependent launch): a kernel
 * may start while the one before it still runs. Each calls overlap_wait() before it touches
 * anything that the one before it wrote or reads, and overlap_next() only after that. So before
 * overlap_wait() a kernel may read whatever the kernel before its predecessor left, and weights. */
#ifndef BACKEND_CUDA_INTERNAL_CUH
#define BACKEND_CUDA_INTERNAL_CUH

extern "C" {
#include "backend/cuda/cuda.h"
#include "backend/op.h"
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>

enum cuda_scratch_slot {
    SCRATCH_NORMED,    /* normalised rows, f32 or packed bf16 */
    SCRATCH_ATTENTION, /* partial sums of split attention */
    SCRATCH_DELTA,     /* convolved rows and gates */
    SCRATCH_EXPERTS,   /* activations between the experts' two halves */
    SCRATCH_ROUTE,     /* router logits, lists of rows by expert */
    SCRATCH_PACKED,    /* experts' activations as packed bf16 */
    SCRATCH_SAMPLE,    /* partial results of argmax */
    SCRATCH_COUNTERS,  /* u32 counters, always zero between kernels */
    SCRATCH_UPLOAD,    /* a weight as the checkpoint stores it */
    SCRATCH_SLOTS,
};

enum { CUDA_COUNTERS = 1 << 16, CUDA_STAGING_BYTES = 1 << 20 };

struct cuda_block; /* an allocation, cuda.cu */

struct device {
    struct device_head head; /* first */
    cudaStream_t stream;
    int sms;
    struct err error; /* the first since the last sync */
    struct cuda_block *blocks;
    struct {
        void *data;
        uint64_t bytes;
    } scratch[SCRATCH_SLOTS];
    char *staging; /* pinned, for small transfers; writes go round it, reads use its start */
    uint64_t staged_bytes;
    const void *last_kernel; /* launched, to keep a kernel from overlapping itself */
};

/* Notes an error of the stream if it is the first. */
void cuda_fail(struct device *device, enum err_kind kind, const char *what, cudaError_t error);

/* Scratch of at least so many bytes, or null with the error noted. Grows to the largest batch seen
 * and stays, so a step of a size that has run before allocates nothing. */
void *cuda_scratch(struct device *device, enum cuda_scratch_slot slot, uint64_t bytes);

static inline uint32_t *cuda_counters(struct device *device)
{
    return (uint32_t *)device->scratch[SCRATCH_COUNTERS].data;
}

template <typename T> static inline T *cuda_at(struct span s)
{
    return s.base ? (T *)((char *)s.base + s.offset) : nullptr;
}

static inline uint32_t cuda_ceil(uint64_t n, uint64_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* Launches kernel(args) on the stream, overlapping the end of the kernel before it. */
template <typename... P, typename... A>
static inline void cuda_launch(struct device *device, void (*kernel)(P...), dim3 grid, int threads,
                               size_t shared_bytes, A... args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0)
        return;
    if (shared_bytes > 48 * 1024)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)shared_bytes);
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = device->last_kernel != (void *)kernel;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = device->stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
    if (error != cudaSuccess)
        cuda_fail(device, ERR_INTERNAL, "a kernel could not be started", error);
    device->last_kernel = (void *)kernel;
}

/* ---- weights ------------------------------------------------------------------------------ */

/* A weight as kernels see it.
 *
 * Affine weights keep scale and bias together: pairs u32, the scale's bf16 low, the bias's high.
 * 4 bits in groups of 64 ("tiled") are stored in the order in which a warp feeds its tensor cores:
 * rows padded to 16; for every 16 rows and every group of 64 columns 512 bytes, lane l's 16 bytes
 * at l * 16: row l / 4 and row l / 4 + 8, of each the 16 codes from column l % 4 * 16 on. One warp
 * reads a tile with one coalesced 16-byte load. Its 16 pairs lie at [tile][row]. */
struct matrix {
    const uint8_t *data;
    const uint32_t *pairs; /* affine: tiled [tiles, 16], else [count, rows, cols / group] */
    uint32_t kind, rows, cols, bits, group;
    uint32_t stride; /* rows from one matrix to the next */
    bool tiled;
};

static inline bool cuda_is_tiled(const struct weight *w)
{
    return w->kind == WEIGHT_AFFINE && w->bits == 4 && w->group == 64;
}

static inline struct matrix cuda_matrix(const struct weight *w)
{
    struct matrix m;
    m.data = cuda_at<const uint8_t>(w->data);
    m.pairs = cuda_at<const uint32_t>(w->scales);
    m.kind = w->kind;
    m.rows = w->rows;
    m.cols = w->cols;
    m.bits = w->bits;
    m.group = w->group;
    m.stride = w->expert_stride;
    m.tiled = cuda_is_tiled(w);
    return m;
}

#ifdef __CUDACC__

/* ---- device code -------------------------------------------------------------------------- */

static __device__ __forceinline__ void overlap_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void overlap_next()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ float bf16_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float bf16_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&v);
}

static __device__ __forceinline__ float warp_sum(float v)
{
    for (int off = 16; off; off /= 2)
        v += __shfl_xor_sync(~0u, v, off);
    return v;
}

/* Sum over the eight lanes lane / 8 * 8 .., of which all must be there. */
static __device__ __forceinline__ float sum_of_8(float v)
{
    unsigned mask = 0xffu << (threadIdx.x % 32 & 24);
    v += __shfl_xor_sync(mask, v, 1);
    v += __shfl_xor_sync(mask, v, 2);
    return v + __shfl_xor_sync(mask, v, 4);
}

/* Sum over the block; `part` is shared f32 [32]. Every thread gets it. */
static __device__ __forceinline__ float block_sum(float v, float *part)
{
    v = warp_sum(v);
    __syncthreads(); /* part may still be read from the last use */
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < (int)(blockDim.x + 31) / 32; i++)
        sum += part[i];
    return sum;
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1 / (1 + expf(-x));
}

static __device__ __forceinline__ float silu(float x)
{
    return x / (1 + expf(-x));
}

/* The segment that row belongs to; all lanes of the warp call it together. */
static __device__ __forceinline__ struct segment find_segment(const struct segment *segments,
                                                              uint32_t count, uint32_t row)
{
    uint32_t lane = threadIdx.x % 32, found = 0;
    for (uint32_t from = 0; from < count; from += 32) {
        uint32_t i = from + lane;
        bool here = i < count && row >= segments[i].row && row < segments[i].row + segments[i].rows;
        uint32_t vote = __ballot_sync(~0u, here);
        if (vote) {
            found = from + __ffs(vote) - 1;
            break;
        }
    }
    return segments[found];
}

/* Byte offset of the 4-bit code pair that holds column k of a row, and the pair's index. */
static __device__ __forceinline__ uint64_t tiled_byte(const struct matrix &m, uint64_t row,
                                                      uint32_t k)
{
    uint64_t tile = row / 16 * (m.cols / 64) + k / 64;
    uint32_t r = row % 16, t = k % 64 / 16;
    return tile * 512 + ((r % 8) * 4 + t) * 16 + r / 8 * 8 + k % 16 / 2;
}

/* One weight; row counts through all matrices (item * stride + row). Slow, for any kind. */
static __device__ __forceinline__ float matrix_at(const struct matrix &m, uint64_t row, uint32_t k)
{
    if (m.kind == WEIGHT_F32)
        return ((const float *)m.data)[row * m.cols + k];
    if (m.kind == WEIGHT_BF16)
        return __bfloat162float(((const __nv_bfloat16 *)m.data)[row * m.cols + k]);
    uint32_t code, pair;
    if (m.tiled) {
        code = m.data[tiled_byte(m, row, k)] >> (k % 2 * 4) & 15;
        pair = m.pairs[(row / 16 * (m.cols / 64) + k / 64) * 16 + row % 16];
    } else {
        const uint32_t *words = (const uint32_t *)m.data + row * (m.cols / 32 * m.bits);
        uint32_t bit = k * m.bits, shift = bit % 32;
        code = words[bit / 32] >> shift;
        if (shift + m.bits > 32)
            code |= words[bit / 32 + 1] << (32 - shift);
        code &= (1u << m.bits) - 1;
        pair = m.pairs[row * (m.cols / m.group) + k / m.group];
    }
    return bf16_low(pair) * code + bf16_high(pair);
}

/* ---- 4-bit tiles on tensor cores ---------------------------------------------------------- */

/* d += a b, a bf16 16 x 16, b bf16 16 x 8, d f32 16 x 8. */
static __device__ __forceinline__ void mma_bf16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Codes s/4 and s/4 + 4 of a word as the bf16 pair 128 + code: 0x43 is 128's exponent, and the
 * code falls on the last mantissa bits. */
static __device__ __forceinline__ uint32_t code_pair(uint32_t word, int s)
{
    return (word >> s & 0x000f000fu) | 0x43004300u;
}

/* The exact product of a tile with up to 4 rows of x: each x is split into two bf16 (16 bits of
 * mantissa), which sit in neighbouring columns of the tensor core's b. y[0] and y[1] are rows
 * lane / 4 and + 8 of the tile, for row lane % 4 of x.
 *   b: packed x as step_pack leaves it, steps 0,1 and 2,3;  x_sum: sum of the group's x */
static __device__ __forceinline__ void tile_step(float y[2], uint4 w, uint32_t pair0,
                                                 uint32_t pair1, uint4 b01, uint4 b23, float x_sum)
{
    float d[4] = {0, 0, 0, 0};
    mma_bf16(d, code_pair(w.x, 0), code_pair(w.z, 0), code_pair(w.x, 4), code_pair(w.z, 4), b01.x,
             b01.y);
    mma_bf16(d, code_pair(w.x, 8), code_pair(w.z, 8), code_pair(w.x, 12), code_pair(w.z, 12), b01.z,
             b01.w);
    mma_bf16(d, code_pair(w.y, 0), code_pair(w.w, 0), code_pair(w.y, 4), code_pair(w.w, 4), b23.x,
             b23.y);
    mma_bf16(d, code_pair(w.y, 8), code_pair(w.w, 8), code_pair(w.y, 12), code_pair(w.w, 12), b23.z,
             b23.w);
    float s0 = bf16_low(pair0), s1 = bf16_low(pair1);
    y[0] += s0 * (d[0] + d[1]) + (bf16_high(pair0) - 128 * s0) * x_sum;
    y[1] += s1 * (d[2] + d[3]) + (bf16_high(pair1) - 128 * s1) * x_sum;
}

/* Packs 8 values of x, columns k8*8.., for row r of `rows`: as tile_step reads them. Returns their
 * sum. packed: uint4 [cols/64][half 2][2 * rows][4]. */
static __device__ __forceinline__ float step_pack(uint4 *packed, uint32_t rows, uint32_t r,
                                                  uint32_t k8, const float v[8])
{
    uint32_t hi[4], lo[4];
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        float a = v[i], b = v[i + 4];
        hi[i] = bf16_pair(a, b);
        lo[i] = bf16_pair(a - bf16_low(hi[i]), b - bf16_high(hi[i]));
        sum += (bf16_low(hi[i]) + bf16_low(lo[i])) + (bf16_high(hi[i]) + bf16_high(lo[i]));
    }
    uint32_t group = k8 / 8, t = k8 % 8 / 2, half = k8 % 2;
    uint4 *to = packed + ((group * 2 + half) * 2 * rows + 2 * r) * 4 + t;
    to[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    to[4] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    return sum;
}

/* Lane's part of packed x for a group and half; columns past the rows there are give zero. */
static __device__ __forceinline__ uint4 step_load(const uint4 *packed, uint32_t rows,
                                                  uint32_t group, uint32_t half)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane / 4 >= 2 * rows)
        return make_uint4(0, 0, 0, 0);
    return packed[(group * 2 + half) * 2 * rows * 4 + lane];
}

#endif
#endif
