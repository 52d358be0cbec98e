/* What the CUDA files share: the device, how a kernel is launched, and how weights lie in memory.
 *
 * Kernels that follow each other on the stream overlap (programmatic dependent launch): a kernel
 * may start while the one before it still runs. Each calls overlap_wait() before it touches
 * anything that another kernel of the step wrote or reads: what it does before that is to fetch
 * weights, and states that the step before left. overlap_next() lets the next one start; a kernel
 * that calls it only after overlap_wait() also lets the next one read early what the kernel before
 * both has left. */
#ifndef BACKEND_CUDA_INTERNAL_CUH
#define BACKEND_CUDA_INTERNAL_CUH

extern "C" {
#include "backend/cuda/choice.h"
#include "backend/cuda/cuda.h"
#include "backend/op.h"
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

enum cuda_scratch_slot {
    SCRATCH_NORMED,    /* normalised rows: f32, f16 or digits */
    SCRATCH_ATTENTION, /* partial sums of split attention */
    SCRATCH_DELTA,     /* what the kernels of the chunked scan leave for each other */
    SCRATCH_EXPERTS,   /* experts' activations of few rows; their outputs, before they are summed */
    SCRATCH_ROUTE,     /* router logits, lists of rows by expert */
    SCRATCH_PACKED,    /* experts' input as digits, or as f16 with their activations */
    SCRATCH_SAMPLE,    /* partial results of argmax */
    SCRATCH_COUNTERS,  /* u32 counters, always zero between kernels */
    SCRATCH_UPLOAD,    /* a weight as the checkpoint stores it, while weights are loaded */
    SCRATCH_SLOTS,
};

enum { CUDA_COUNTERS = 1 << 16, CUDA_STAGING_BYTES = 1 << 20, CUDA_RECORDINGS = 64 };

/* What device_options can leave out, bits of device.without. Each has another way, which needs no
 * kernel of its own. */
enum cuda_technique {
    CUDA_GRAPHS = 1 << 0,  /* a decoding step is one graph; without: a launch a kernel */
    CUDA_OVERLAP = 1 << 1, /* kernels overlap; without: each waits for the end of the last */
    CUDA_ROUTING = 1 << 2, /* routes stay on the device; without: the host reads each layer's */
    CUDA_GROUPED = 1 << 3, /* prompts by expert; without: each row reads its own experts */
    CUDA_BATCH = 1 << 4,   /* a batch reads weights once; without: as few rows, or as prompts */
    CUDA_PACKING = 1 << 5, /* heads share loads in decode attention; without: each has its own */
    CUDA_SPLIT = 1 << 6,   /* decode attention in parts; without: a block a row and KV head */
    CUDA_FLASH = 1 << 7,   /* prompts' attention in tiles; without: as decoding, a row a block */
    CUDA_CHUNKS = 1 << 8,  /* prompts' delta rule in chunks; without: a token at a time */
    CUDA_AHEAD = 1 << 9,   /* a step is queued before the last one's tokens are read */
};

struct cuda_block; /* an allocation, cuda.cu */

/* A step as a CUDA graph. */
struct cuda_recording {
    uint64_t key;         /* 0: free */
    cudaGraphExec_t exec; /* null: seen once; its scratch is there, so the next can be recorded */
};

struct device {
    struct device_head head; /* first */
    cudaStream_t stream;
    int sms;
    uint32_t shared_limit; /* choice_shared_limit of this GPU */
    bool warpgroups;       /* compute capability 9.0: sm_90a code runs; elsewhere 8.0's, in which
                      * overlap_wait, clusters and warpgroup products are left out */
    bool clusters;         /* of the router */
    uint32_t without;      /* enum cuda_technique */
    struct err error;      /* the first since the last sync */
    struct cuda_block *blocks;
    struct {
        void *data;
        uint64_t bytes;
    } scratch[SCRATCH_SLOTS];
    char *staging; /* pinned: small writes go round it, large reads use its halves */
    uint64_t staged_bytes;
    cudaEvent_t arrived[2]; /* a half of a read */
    struct {
        char *data; /* pinned, [space] */
        uint32_t space, bytes;
        cudaEvent_t arrived;
    } fetch;
    struct cuda_recording recordings[CUDA_RECORDINGS];
    struct cuda_recording *running; /* being recorded */
    const void *last_kernel;        /* launched, to keep a kernel from overlapping itself */
};

/* Notes an error of the stream if it is the first. */
void cuda_fail(struct device *device, enum err_kind kind, const char *what, cudaError_t error);

/* Scratch of at least so many bytes, or null with the error noted. Grows to the largest batch seen
 * and stays, so a step of a size that has run before allocates nothing. */
void *cuda_scratch(struct device *device, enum cuda_scratch_slot slot, uint64_t bytes);

/* The host looks at device memory as routing elsewhere would have it; see CUDA_ROUTING. */
void cuda_look(struct device *device, const void *data, uint64_t bytes);

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

/* Launches kernel(args) on the stream, overlapping the end of the kernel before it: only where the
 * code that runs has overlap_wait, since without it nothing else orders the two. */
template <typename... P, typename... A>
static inline void cuda_launch(struct device *device, void (*kernel)(P...), dim3 grid, int threads,
                               size_t shared_bytes, A... args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0)
        return;
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)shared_bytes);
    if (error != cudaSuccess) {
        cuda_fail(device, ERR_INTERNAL, "a kernel needs more shared memory than this GPU has",
                  error);
        return;
    }
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = device->last_kernel != (void *)kernel;
    /* One division of L1 and shared memory for all: another one would wait for an idle SM. */
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                         cudaSharedmemCarveoutMaxShared);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = device->stream;
    config.attrs = &overlap;
    config.numAttrs = device->warpgroups && !(device->without & CUDA_OVERLAP) ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
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
 * at l * 16: row l / 4 and row l / 4 + 8, of each two words, for columns 0..31 and 32..63 of the
 * group; digit n of a word is column n % 4 * 8 + l % 4 * 2 + n / 4, so that digits n and n + 4 are
 * the neighbours that an operand register holds. One warp reads a tile with one coalesced 16-byte
 * load. Its 16 pairs lie at [tile][row]. */
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

/* 16 bytes to shared memory, zeros when not `there`; copy_wait leaves at most `pending` groups. */
static __device__ __forceinline__ void copy_async(void *to, const void *from, bool there)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(there ? 16 : 0));
}

static __device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;");
}

template <int PENDING> static __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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

static __device__ __forceinline__ float f16_clamp(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

static __device__ __forceinline__ uint32_t f16_pair(float low, float high)
{
    __half2 v = __floats2half2_rn(f16_clamp(low), f16_clamp(high));
    return *reinterpret_cast<uint32_t *>(&v);
}

static __device__ __forceinline__ float2 f16_floats(uint32_t pair)
{
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}

static __device__ __forceinline__ float warp_sum(float v)
{
    for (int off = 16; off; off /= 2)
        v += __shfl_xor_sync(~0u, v, off);
    return v;
}

/* Sums N values over the warp; lane l gets the one with index l / (32 / N). */
template <int N, int OFF = 16> static __device__ __forceinline__ float sum_transposed(float *v)
{
    if constexpr (OFF == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        v[0] += __shfl_xor_sync(~0u, v[0], OFF);
        return sum_transposed<1, OFF / 2>(v);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            bool upper = threadIdx.x & OFF;
            float send = upper ? v[i] : v[i + N / 2], keep = upper ? v[i + N / 2] : v[i];
            v[i] = keep + __shfl_xor_sync(~0u, send, OFF);
        }
        return sum_transposed<N / 2, OFF / 2>(v);
    }
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

/* Index of the 4-bit digit that holds column k of a row. */
static __device__ __forceinline__ uint64_t tiled_digit(const struct matrix &m, uint64_t row,
                                                       uint32_t k)
{
    uint64_t tile = row / 16 * (m.cols / 64) + k / 64;
    uint32_t r = row % 16, lane = r % 8 * 4 + k % 8 / 2;
    return tile * 1024 + lane * 32 + r / 8 * 16 + k % 64 / 32 * 8 + k % 32 / 8 + k % 2 * 4;
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
        uint64_t digit = tiled_digit(m, row, k);
        code = m.data[digit / 2] >> (digit % 2 * 4) & 15;
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

/* d += a b, a f16 16 x 16, b f16 16 x 8, d f32 16 x 8. */
static __device__ __forceinline__ void mma_f16(float *d, const uint32_t a[4], uint32_t b0,
                                               uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four 8 x 8 blocks of f16 from shared memory; lane i gives where row i % 8 of block i / 8 lies.
 * r[n] of lane i: row i / 4, columns i % 4 * 2 and + 1 of block n. */
static __device__ __forceinline__ void load_matrices(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* The same, each block transposed: column i / 4, rows i % 4 * 2 and + 1. */
static __device__ __forceinline__ void load_transposed(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* d += a b, a u8 16 x 32, b s8 32 x 8, d s32 16 x 8. */
static __device__ __forceinline__ void mma_u8(int d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* The product of a tile with up to 4 rows of x, exact in integers: x is scale * (256 h + l), the
 * digits h and l sitting in neighbouring columns of the tensor core's b. y[0] and y[1] are rows
 * lane / 4 and + 8 of the tile, for row lane % 4 of x.
 *   b: step_load;  x: the group's scale and the sum of its x, as step_pack leaves them */
static __device__ __forceinline__ void tile_step(float y[2], uint4 w, uint32_t pair0,
                                                 uint32_t pair1, uint4 b, float2 x)
{
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    int d[4] = {0, 0, 0, 0};
    mma_u8(d, w.x & LOW, w.z & LOW, w.x >> 4 & LOW, w.z >> 4 & LOW, b.x, b.y);
    mma_u8(d, w.y & LOW, w.w & LOW, w.y >> 4 & LOW, w.w >> 4 & LOW, b.z, b.w);
    float v0 = (float)(d[0] * 256 + d[1]) * x.x, v1 = (float)(d[2] * 256 + d[3]) * x.x;
    y[0] += bf16_low(pair0) * v0 + bf16_high(pair0) * x.y;
    y[1] += bf16_low(pair1) * v1 + bf16_high(pair1) * x.y;
}

/* Packs 8 values of x, columns k8*8.., for row r of `rows`; the 8 lanes of a group (k8 / 8) call it
 * together. Each x becomes 16 bits of the group's largest.
 *   packed: uint4 [cols/64][2 * rows][4];  scales: float2 [cols/64][rows] */
static __device__ __forceinline__ void step_pack(uint4 *packed, float2 *scales, uint32_t rows,
                                                 uint32_t r, uint32_t k8, const float v[8])
{
    unsigned mask = 0xffu << (threadIdx.x % 32 & 24);
    uint32_t group = k8 / 8, quarter = k8 % 4, high[4], low[4];
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        most = fmaxf(most, fabsf(v[i]));
    for (int off = 1; off < 8; off *= 2)
        most = fmaxf(most, __shfl_xor_sync(mask, most, off));
    float inverse = most > 0 ? 32639 / most : 0;
    int sum = 0;
#pragma unroll
    for (int t = 0; t < 4; t++) { /* columns t*2 and t*2+1: bytes 0 and 2, or 1 and 3 */
        int a = __float2int_rn(v[t * 2] * inverse), b = __float2int_rn(v[t * 2 + 1] * inverse);
        uint32_t ha = (uint32_t)(a + 128) >> 8 & 255, hb = (uint32_t)(b + 128) >> 8 & 255;
        sum += a + b;
        high[t] = (ha | hb << 16) << (quarter / 2 * 8);
        low[t] = ((a & 255) | (uint32_t)(b & 255) << 16) << (quarter / 2 * 8);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) { /* the other two bytes; each of the two lanes keeps one digit */
        uint32_t send = quarter < 2 ? low[t] : high[t], keep = quarter < 2 ? high[t] : low[t];
        high[t] = keep | __shfl_xor_sync(mask, send, 2);
    }
    uint32_t *to = (uint32_t *)(packed + (group * 2 * rows + 2 * r + quarter / 2) * 4) +
                   k8 % 8 / 4 * 2 + quarter % 2;
#pragma unroll
    for (int t = 0; t < 4; t++)
        to[t * 4] = high[t];
    for (int off = 1; off < 8; off *= 2)
        sum += __shfl_xor_sync(mask, sum, off);
    if (k8 % 8 == 0) {
        float scale = most / 32639;
        scales[group * rows + r] = make_float2(scale, scale * (float)sum);
    }
}

/* Lane's part of packed x for a group; columns past the rows there are give zero. */
static __device__ __forceinline__ uint4 step_load(const uint4 *packed, uint32_t rows,
                                                  uint32_t group)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane / 4 >= 2 * rows)
        return make_uint4(0, 0, 0, 0);
    return packed[group * 2 * rows * 4 + lane];
}

#endif
#endif
