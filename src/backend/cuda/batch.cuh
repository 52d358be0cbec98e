/* Sorting (row, choice) pairs by expert, for kernels that multiply a tile of pairs at a time. */
#ifndef BACKEND_CUDA_BATCH_CUH
#define BACKEND_CUDA_BATCH_CUH

#include "backend/cuda/ops.cuh"

enum { ROUTE_THREADS = 1024, ROUTE_EXPERTS = 1024 };

/* A tile of pairs that go through one expert; count 0: none. */
struct route_tile {
    uint32_t expert, first, count, pad;
};

#ifdef __CUDACC__

/* One block of ROUTE_THREADS: list [pairs] gets the pairs (row * topk + choice) in the order of
 * their experts, and tiles [capacity] the pieces of at most tile_rows. */
static __device__ __forceinline__ void route_sort(const uint32_t *ids, uint32_t pairs,
                                                  uint32_t experts, uint32_t *list,
                                                  struct route_tile *tiles, uint32_t capacity,
                                                  uint32_t tile_rows)
{
    __shared__ uint32_t count[ROUTE_EXPERTS], next[ROUTE_EXPERTS], tile_end[ROUTE_EXPERTS];
    uint32_t e = threadIdx.x;
    count[e] = 0;
    __syncthreads();
    for (uint32_t i = e; i < pairs; i += blockDim.x)
        atomicAdd(&count[ids[i]], 1);
    __syncthreads();
    uint32_t own = count[e];
    next[e] = own;
    tile_end[e] = (own + tile_rows - 1) / tile_rows;
    for (uint32_t off = 1; off < experts; off *= 2) { /* inclusive sums */
        __syncthreads();
        uint32_t a = e >= off ? next[e - off] : 0, b = e >= off ? tile_end[e - off] : 0;
        __syncthreads();
        next[e] += a;
        tile_end[e] += b;
    }
    __syncthreads();
    uint32_t first = next[e] - own, tile = tile_end[e] - (own + tile_rows - 1) / tile_rows;
    uint32_t used = tile_end[experts - 1];
    next[e] = first;
    for (uint32_t i = 0; i < own; i += tile_rows)
        tiles[tile++] = {e, first + i, min(tile_rows, own - i), 0};
    for (uint32_t i = used + e; i < capacity; i += blockDim.x)
        tiles[i] = {0, 0, 0, 0};
    __syncthreads();
    for (uint32_t i = e; i < pairs; i += blockDim.x)
        list[atomicAdd(&next[ids[i]], 1)] = i;
}

#endif
#endif
