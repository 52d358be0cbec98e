/* The ops, one file a family. */
#ifndef BACKEND_CUDA_OPS_CUH
#define BACKEND_CUDA_OPS_CUH

#include "backend/cuda/internal.cuh"

/* Where the rows' sequences and their pages are, for each kernel of the attention family. */
template <typename A>
static inline void cuda_fill_pages(A *a, const struct batch_view *batch,
                                   const struct attention_dims &dims)
{
    a->segments = cuda_at<const struct segment>(batch->device_segments);
    a->page_table = cuda_at<const uint32_t>(batch->page_table);
    a->segment_count = batch->segments;
    a->pages_max = batch->pages_max;
    a->heads = dims.heads;
    a->kv_heads = dims.kv_heads;
}

template <typename T> static inline void cuda_point(T **to, struct span at)
{
    *to = cuda_at<T>(at);
}

/* What the kernels of the attention op are told besides. */
template <typename A>
static inline void cuda_fill_attention(A *a, const struct attention_args *args)
{
    cuda_fill_pages(a, args->batch, args->dims);
    cuda_point(&a->q, args->q);
    cuda_point(&a->qg, args->qg);
    cuda_point(&a->k_pages, args->k_pages);
    cuda_point(&a->v_pages, args->v_pages);
    cuda_point(&a->y, args->y);
}

/* The matrices of a linear op and where their outputs go. */
template <typename A> static inline void cuda_fill_linear(A *a, const struct linear_args *args)
{
    for (uint32_t i = 0; i < args->n; i++) {
        cuda_point(&a->data[i], args->weight[i]->data);
        cuda_point(&a->pairs[i], args->weight[i]->scales);
        cuda_point(&a->out[i], args->out[i]);
        a->outs[i] = args->weight[i]->rows;
    }
}

template <typename A>
static inline void cuda_fill_experts(A *a, const struct moe_experts_args *args)
{
    a->gate = cuda_matrix(args->gate);
    a->up = cuda_matrix(args->up);
    a->down = cuda_matrix(args->down);
    a->shared_gate_proj = cuda_matrix(args->shared_gate_proj);
    a->shared_up = cuda_matrix(args->shared_up);
    a->shared_down = cuda_matrix(args->shared_down);
    a->hidden = args->dims.hidden;
    a->topk = args->dims.topk;
    cuda_point(&a->h, args->h);
    cuda_point(&a->ids, args->ids);
    cuda_point(&a->weights, args->weights);
    cuda_point(&a->shared_gate, args->shared_gate);
    cuda_point(&a->x, args->x);
}

void cuda_embed(struct device *device, const struct embed_args *args);
void cuda_linear(struct device *device, const struct linear_args *args);
void cuda_delta(struct device *device, const struct delta_args *args);
void cuda_kv_append(struct device *device, const struct kv_append_args *args);
void cuda_attention(struct device *device, const struct attention_args *args);
void cuda_moe_route(struct device *device, const struct moe_route_args *args);

/* Whether the router's clusters run here, on 9.0: a part of a GPU may have no room for one. */
bool cuda_route_has_clusters(void);

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

/* The same for more than BATCH_LEAST and at most BATCH_ROWS rows, as exact as one row alone; false:
 * not for this shape. */
enum { BATCH_LEAST = 4, BATCH_ROWS = 32 };
bool cuda_batch_linear(struct device *device, const struct linear_args *args);
bool cuda_batch_experts(struct device *device, const struct moe_experts_args *args);

#endif
