// The embedding lookup and plain copies.
#include "common.h"

// x[r] = table[tokens[r]]: a threadgroup a row, any kind of table.
kernel void embed_f32(device const int *tokens [[buffer(0)]], device float *x [[buffer(1)]],
                      device const uint *data [[buffer(2)]],
                      device const bfloat *scales [[buffer(3)]],
                      device const bfloat *biases [[buffer(4)]],
                      constant embed_dims &d [[buffer(5)]],
                      uint row [[threadgroup_position_in_grid]],
                      uint index [[thread_index_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]])
{
    ulong token = ulong(max(tokens[row], 0));
    for (uint k = index; k < d.table.cols; k += threads)
        x[ulong(row) * d.table.cols + k] =
            matrix_at(data, scales, biases, d.table, token, k);
}

kernel void copy_words(device const uint *from [[buffer(0)]], device uint *to [[buffer(1)]],
                       constant uint &count [[buffer(2)]], uint i [[thread_position_in_grid]],
                       uint threads [[threads_per_grid]])
{
    for (ulong k = i; k < count; k += threads)
        to[k] = from[k];
}

kernel void copy_bytes(device const uchar *from [[buffer(0)]], device uchar *to [[buffer(1)]],
                       constant uint &count [[buffer(2)]], uint i [[thread_position_in_grid]],
                       uint threads [[threads_per_grid]])
{
    for (ulong k = i; k < count; k += threads)
        to[k] = from[k];
}

// Up to 4096 bytes that travel with the command itself.
kernel void write_bytes(constant uchar *from [[buffer(0)]], device uchar *to [[buffer(1)]],
                        constant uint &count [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    if (i < count)
        to[i] = from[i];
}
