/* What the loader's two steps share: the plan of a checkpoint (weights.c), and its bytes brought to
 * the device (resident.c). Private to the two. */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include "model/model.h"
#include "model/shards.h"

/* A matrix and the tensors that it is made of. `skip`: bytes of data before its first row. */
struct weights_matrix {
    struct weight *weight;
    struct shards_tensor *data, *scales, *biases;
    uint64_t skip;
};

/* A small vector, to be converted to f32. */
struct weights_vector {
    struct span *span;
    const struct shards_tensor *tensor;
    bool plus_one;
};

struct model_files {
    struct shards shards;
    struct weights_matrix *matrices; /* [matrix_count] */
    struct weights_vector *vectors;  /* [vector_count] */
    uint32_t matrix_count, vector_count;
    struct span small; /* f32: all vectors, on the device */
    uint8_t *copy;     /* anonymous memory for tensors that cannot be used in place, or null */
    uint64_t copy_bytes, copy_used;
};

/* Brings what the plan lists to model->device: vectors as f32, matrices in place or, where they
 * must move, copied. */
bool resident_load(struct model *model, const struct model_options *options, struct err *err);
void resident_free(struct model *model);

/* Bytes of one planned matrix as stored. */
uint64_t weights_matrix_bytes(const struct weights_matrix *m);

#endif
