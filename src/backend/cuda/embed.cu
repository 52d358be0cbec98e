/* Embedding: one block a row, one thread a value; the table is read where the tokens point. */
#include "backend/cuda/ops.cuh"

static __global__ void embed_any(struct matrix table, const int32_t *tokens, float *x)
{
    overlap_wait();
    overlap_next();
    uint32_t row = blockIdx.x;
    uint64_t token = (uint32_t)max(tokens[row], 0);
    for (uint32_t k = threadIdx.x; k < table.cols; k += blockDim.x)
        x[(uint64_t)row * table.cols + k] = matrix_at(table, token, k);
}

void cuda_embed(struct device *device, const struct embed_args *args)
{
    struct matrix table = cuda_matrix(args->table);
    cuda_launch(device, embed_any, dim3(args->batch->rows), 256, 0, table,
                cuda_at<const int32_t>(args->batch->tokens), cuda_at<float>(args->x));
}
