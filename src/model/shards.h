/* All tensors of a checkpoint folder, whichever shard they lie in, found by their path below the
 * language model ("layers.0.mlp.gate.weight", "lm_head.scales").
 *
 * Invariant: paths are unique; `used` says that the loader took the tensor. */
#ifndef MODEL_SHARDS_H
#define MODEL_SHARDS_H

#include "model/safetensors.h"

struct shards_tensor {
    const char *path; /* part of tensor->name */
    const struct safetensors_tensor *tensor;
    const uint8_t *data; /* tensor->data, or an aligned copy once one was made */
    bool used;
};

struct shards {
    struct safetensors *files; /* [file_count] */
    uint32_t file_count;
    struct shards_tensor *tensors; /* [count], ascending by path */
    uint32_t count;
};

/* Opens folder/model.safetensors, or every shard that folder/model.safetensors.index.json names.
 * Tensors of parts that text does not need (vision, multi-token prediction) are left out. */
bool shards_open(const char *folder, struct shards *shards, struct err *err);
void shards_close(struct shards *shards);

/* Null when there is no such tensor. */
struct shards_tensor *shards_find(const struct shards *shards, const char *path);

/* Hugging Face files hold the zero-centred norms' gains less 1, converted ones the gains. As mlx-lm
 * does, we go by the convolution: [channels, 1, 4] as trained, [channels, 4, 1] once converted. A
 * model without a convolution shows it in its experts, which conversion splits and renames. */
bool shards_is_unconverted(const struct shards *shards);

#endif
