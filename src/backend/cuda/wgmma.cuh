/* Tensor core instructions of sm_90a that take a whole warpgroup (4 warps), and what they need.
 *
 * Operands in shared memory are rows of 128 bytes (64 elements of 16 bits along the summed index),
 * 8 rows to 1024 bytes, 16-byte chunk c of row r stored at c ^ (r % 8): what the hardware calls a
 * 128-byte swizzle. Such a block begins at a multiple of 1024 bytes. */
#ifndef BACKEND_CUDA_WGMMA_CUH
#define BACKEND_CUDA_WGMMA_CUH

#include "backend/cuda/internal.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUDA_WGMMA 1
#else
#define CUDA_WGMMA 0
#endif

/* What this thread wrote to shared memory becomes visible to the tensor cores (then a barrier). */
static __device__ __forceinline__ void shared_fence()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if CUDA_WGMMA

/* Rows along n or m, summed index contiguous; steps of 16 elements lie 32 bytes (+2) apart. */
static __device__ __forceinline__ uint64_t wgmma_rows(const void *shared)
{
    uint64_t at = (uint64_t)__cvta_generic_to_shared(shared);
    return (at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Rows along the summed index, n contiguous, 64 columns of n to a block, blocks `apart` bytes from
 * each other; steps of 16 rows lie 2048 bytes (+128) apart. */
static __device__ __forceinline__ uint64_t wgmma_columns(const void *shared, uint32_t apart)
{
    uint64_t at = (uint64_t)__cvta_generic_to_shared(shared);
    return (at >> 4 & 0x3fff) | (uint64_t)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

static __device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define WGMMA_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(d, i) WGMMA_4(d, i), WGMMA_4(d, i + 4), WGMMA_4(d, i + 8), WGMMA_4(d, i + 12)
#define WGMMA_64(d, i) WGMMA_16(d, i), WGMMA_16(d, i + 16), WGMMA_16(d, i + 32), WGMMA_16(d, i + 48)

/* d[n / 8][4] += a b: a f16 16 x 16 a warp in registers, b f16 rows (wgmma_rows). d as in mma. */
template <int N>
static __device__ __forceinline__ void wgmma_f16(float *d, const uint32_t a[4], uint64_t b);

template <>
__device__ __forceinline__ void wgmma_f16<32>(float *d, const uint32_t a[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
                 : WGMMA_16(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_f16<64>(float *d, const uint32_t a[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
                 : WGMMA_16(d, 0), WGMMA_16(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_f16<128>(float *d, const uint32_t a[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
                 : WGMMA_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* d[8][4] (+)= a b over one step: 64 x 64, both bf16 rows in shared memory. */
static __device__ __forceinline__ void wgmma_scores(float *d, uint64_t a, uint64_t b, bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "%32, %33, p, 1, 1, 0, 0;}"
                 : WGMMA_16(d, 0), WGMMA_16(d, 16)
                 : "l"(a), "l"(b), "r"((int)add));
}

/* d[32][4] += a b over one step: a bf16 16 x 16 a warp in registers, b bf16 16 x 256
 * (wgmma_columns). */
static __device__ __forceinline__ void wgmma_values(float *d, const uint32_t a[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
                 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
                 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
                 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
                 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,"
                 "%127}, "
                 "{%128,%129,%130,%131}, %132, p, 1, 1, 1;}"
                 : WGMMA_64(d, 0), WGMMA_64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif
#endif
