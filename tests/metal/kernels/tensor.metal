// C = A B^T by TensorOps: a 32 x 32 tile a threadgroup of four simdgroups, edges by slices.
// Test kernel of the emulator, for Metal 4 only.
#include <metal_stdlib>
using namespace metal;

#if __METAL_VERSION__ >= 400
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;

struct tensor_dims {
    int m, n, k;
};

kernel void matmul_tensor(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]],
                          device float *c [[buffer(2)]], constant tensor_dims &dims [[buffer(3)]],
                          uint2 tile [[threadgroup_position_in_grid]])
{
    int row0 = int(tile.y) * 32;
    int column0 = int(tile.x) * 32;
    auto left = tensor(a, dextents<int, 2>(dims.k, dims.m)).slice(0, row0);
    auto right = tensor(b, dextents<int, 2>(dims.k, dims.n)).slice(0, column0);
    auto out = tensor(c, dextents<int, 2>(dims.n, dims.m)).slice(column0, row0);
    constexpr auto descriptor = matmul2d_descriptor(32, 32, int(dynamic_extent), false, true);
    matmul2d<descriptor, execution_simdgroups<4>> product;
    auto sum = product.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
    product.run(left, right, sum);
    sum.store(out);
}
#endif
