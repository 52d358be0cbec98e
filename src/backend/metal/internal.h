/* What metal.m, the only file that names Metal, offers to the ops, which are plain C.
 *
 * A span's base is a struct metal_memory. Commands are encoded one after the other into one
 * command buffer; the GPU runs them in that order, each after the one before it has finished. */
#ifndef BACKEND_METAL_INTERNAL_H
#define BACKEND_METAL_INTERNAL_H

#include "backend/metal/dims.h"
#include "backend/metal/metal.h"

#define METAL_KERNELS(X)                                                                           \
    X(EMBED, "embed_f32")                                                                          \
    X(COPY_WORDS, "copy_words")                                                                    \
    X(COPY_BYTES, "copy_bytes")                                                                    \
    X(WRITE, "write_bytes")                                                                        \
    X(NORM, "linear_norm_f32")                                                                     \
    X(LINEAR_1, "linear_f32_rows_1")                                                               \
    X(LINEAR_4, "linear_f32_rows_4")                                                               \
    X(LINEAR_TILE, "linear_f32_tile")                                                              \
    X(DELTA, "delta_f32_step")                                                                     \
    X(APPEND_BF16, "append_kv_bf16")                                                               \
    X(APPEND_F32, "append_kv_f32")                                                                 \
    X(ATTEND_BF16_1, "attend_split_bf16_1")                                                        \
    X(ATTEND_BF16_2, "attend_split_bf16_2")                                                        \
    X(ATTEND_BF16_4, "attend_split_bf16_4")                                                        \
    X(ATTEND_F32_1, "attend_split_f32_1")                                                          \
    X(ATTEND_F32_2, "attend_split_f32_2")                                                          \
    X(ATTEND_F32_4, "attend_split_f32_4")                                                          \
    X(ATTEND_MERGE, "attend_merge")                                                                \
    X(TOPK, "moe_topk")                                                                            \
    X(GATE_UP_ROWS, "moe_gate_up_rows")                                                            \
    X(DOWN_ROWS, "moe_down_rows")                                                                  \
    X(SORT, "moe_sort")                                                                            \
    X(GATE_UP_TILE, "moe_gate_up_tile")                                                            \
    X(DOWN_TILE, "moe_down_tile")                                                                  \
    X(COMBINE, "moe_combine")                                                                      \
    X(ARGMAX_PART, "argmax_part")                                                                  \
    X(ARGMAX_MERGE, "argmax_merge")                                                                \
    X(TOP, "top_select")

enum metal_kernel {
#define METAL_KERNEL_ID(id, name) METAL_##id,
    METAL_KERNELS(METAL_KERNEL_ID)
#undef METAL_KERNEL_ID
        METAL_KERNEL_COUNT
};

enum metal_scratch_slot {
    METAL_SCRATCH_NORMED,  /* f32 [rows, cols] */
    METAL_SCRATCH_ATTEND,  /* f32 [rows, heads, splits, 256], then f32 [rows, heads, splits, 2] */
    METAL_SCRATCH_LOGITS,  /* f32 [rows, experts], then f32 [rows] of the shared expert */
    METAL_SCRATCH_ACT,     /* f32 [rows * (topk + 1), width] */
    METAL_SCRATCH_PARTS,   /* f32 [rows * (topk + 1), hidden] */
    METAL_SCRATCH_ORDER,   /* u32 [rows * (topk + 1)], then u32 [blocks, 4] */
    METAL_SCRATCH_SAMPLE,  /* u32 [rows, parts, 4] */
    METAL_SCRATCH_SLOTS,
};

struct device;

/* Begins a command: what follows until metal_launch belongs to this kernel. */
void metal_use(struct device *device, enum metal_kernel kernel);
void metal_set(struct device *device, int index, struct span span);
void metal_set_bytes(struct device *device, int index, const void *data, uint32_t bytes);
void metal_launch(struct device *device, uint32_t x, uint32_t y, uint32_t z, uint32_t threads);

/* Scratch of at least so many bytes. Grows to the largest batch seen and stays. When there is none
 * the error is noted, the base is null, and the op must return. */
struct span metal_scratch(struct device *device, enum metal_scratch_slot slot, uint64_t bytes);

/* Puts the ops of metal_ops.c into the table. */
void metal_fill_ops(struct ops *ops);

/* The text of the kernels: build/gen/metal_source.c, made from the .metal files. */
extern const char metal_source[];

#endif
