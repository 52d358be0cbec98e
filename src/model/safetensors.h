/* One safetensors file, mapped and checked: an 8-byte little-endian header length, a JSON header,
 * then the tensors' bytes. Format: https://github.com/huggingface/safetensors#format
 *
 * Invariant: after safetensors_open succeeds, every tensor's bytes lie inside the mapping, overlap
 * no other tensor's, and are as many as shape times dtype say. They need not be aligned to the
 * dtype: MLX writes headers of any length. */
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include "base/err.h"
#include "base/file.h"

#include <stdbool.h>
#include <stdint.h>

enum { SAFETENSORS_RANK_MAX = 8, SAFETENSORS_HEADER_MAX = 100000000 };

enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_F32,
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_DTYPES,
};

struct safetensors_tensor {
    char *name;
    enum safetensors_dtype dtype;
    uint32_t rank;
    uint64_t shape[SAFETENSORS_RANK_MAX];
    const uint8_t *data; /* in the mapping */
    uint64_t bytes;
};

struct safetensors {
    struct file_map map;
    struct safetensors_tensor *tensors; /* [count], ascending by address */
    uint32_t count;
};

bool safetensors_open(const char *path, struct safetensors *file, struct err *err);
void safetensors_close(struct safetensors *file);

const char *safetensors_dtype_name(enum safetensors_dtype dtype);
uint32_t safetensors_dtype_bytes(enum safetensors_dtype dtype);

/* Value i of a tensor of F32, BF16 or F16. */
float safetensors_value(const struct safetensors_tensor *tensor, uint64_t i);

/* "[32, 64, 8]" into out, cut to size. */
void safetensors_print_shape(const struct safetensors_tensor *tensor, char *out, size_t size);

#endif
