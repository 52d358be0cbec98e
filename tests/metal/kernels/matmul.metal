// C = A B^T on simdgroup matrices: a 16 x 16 tile a threadgroup of four simdgroups, K in steps of
// 16 staged in threadgroup memory, edges zero-filled. A is [m, k], B is [n, k], C is [m, n].
// Test kernel of the emulator: staging, two barriers a step, simdgroup_load and store.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

struct matmul_dims {
    uint m, n, k;
};

constant uint TILE = 16;

kernel void matmul_f32(device const float *a [[buffer(0)]], device const float *b [[buffer(1)]],
                       device float *c [[buffer(2)]], constant matmul_dims &dims [[buffer(3)]],
                       uint2 tile [[threadgroup_position_in_grid]],
                       uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float a_tile[16 * 16];
    threadgroup float b_tile[16 * 16];
    threadgroup float c_tile[16 * 16];
    uint row0 = tile.y * TILE;
    uint column0 = tile.x * TILE;
    uint sub_row = simdgroup / 2 * 8;
    uint sub_column = simdgroup % 2 * 8;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k0 = 0; k0 < dims.k; k0 += TILE) {
        for (uint i = index; i < TILE * TILE; i += 128) {
            uint r = i / TILE;
            uint k = k0 + i % TILE;
            a_tile[i] = row0 + r < dims.m && k < dims.k ? a[(row0 + r) * dims.k + k] : 0.0f;
            b_tile[i] = column0 + r < dims.n && k < dims.k ? b[(column0 + r) * dims.k + k] : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // staged
        for (uint k = 0; k < TILE; k += 8) {
            simdgroup_float8x8 left;
            simdgroup_float8x8 right;
            simdgroup_load(left, a_tile + sub_row * TILE + k, TILE);
            simdgroup_load(right, b_tile + sub_column * TILE + k, TILE, ulong2(0), true);
            simdgroup_multiply_accumulate(sum, left, right, sum);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // read
    }
    simdgroup_store(sum, c_tile + sub_row * TILE + sub_column, TILE);
    threadgroup_barrier(mem_flags::mem_threadgroup); // stored
    for (uint i = index; i < TILE * TILE; i += 128) {
        uint r = row0 + i / TILE;
        uint column = column0 + i % TILE;
        if (r < dims.m && column < dims.n)
            c[r * dims.n + column] = c_tile[i];
    }
}
