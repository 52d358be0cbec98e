/* The ops, one file a family. */
#ifndef BACKEND_CUDA_OPS_CUH
#define BACKEND_CUDA_OPS_CUH

#include "backend/cuda/internal.cuh"

void cuda_embed(struct device *device, const struct embed_args *args);
void cuda_linear(struct device *device, const struct linear_args *args);
void cuda_delta(struct device *device, const struct delta_args *args);
void cuda_kv_append(struct device *device, const struct kv_append_args *args);
void cuda_attention(struct device *device, const struct attention_args *args);
void cuda_moe_route(struct device *device, const struct moe_route_args *args);
void cuda_moe_experts(struct device *device, const struct moe_experts_args *args);
void cuda_argmax(struct device *device, const struct argmax_args *args);
void cuda_top(struct device *device, const struct top_args *args);

/* Normalises rows: h[r] = rms_norm(x[select ? select[r] : r]; gain) or, without a gain, copies. */
void cuda_norm_rows(struct device *device, const float *x, const uint32_t *select,
                    const float *gain, float eps, uint32_t rows, uint32_t cols, float *h);

/* out[r] = W x[r] (+ out[r]) for any kind of weight and any number of rows. */
void cuda_linear_any(struct device *device, const struct matrix &w, const float *x, uint32_t rows,
                     bool add, float *out);

/* Attention of the segments with at least FLASH_ROWS rows, where the device and the shape allow. */
enum { FLASH_ROWS = 16 };
bool cuda_flash_can(const struct device *device, const struct attention_args *args);
void cuda_flash(struct device *device, const struct attention_args *args);

/* The linear op for many rows of tiled weights. */
void cuda_prefill_linear(struct device *device, const struct linear_args *args);

/* The experts op for many rows of tiled weights. */
void cuda_prefill_experts(struct device *device, const struct moe_experts_args *args);

#endif
