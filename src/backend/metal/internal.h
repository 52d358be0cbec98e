/* What the Objective-C files, the only ones that name Metal, offer to the ops, which are plain C.
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
    X(LINEAR_SKINNY_8, "linear_f32_skinny_8")                                                      \
    X(LINEAR_SKINNY_16, "linear_f32_skinny_16")                                                    \
    X(LINEAR_TILE_32, "linear_f32_tile_32")                                                        \
    X(LINEAR_TILE_64, "linear_f32_tile_64")                                                        \
    X(DELTA_STEP, "delta_f32_step")                                                                \
    X(DELTA_CONV, "delta_f32_conv")                                                                \
    X(DELTA_CHUNK, "delta_f32_chunk")                                                              \
    X(DELTA_GATE, "delta_f32_gate")                                                                \
    X(APPEND_BF16, "append_kv_bf16")                                                               \
    X(APPEND_F32, "append_kv_f32")                                                                 \
    X(ATTEND_BF16_1, "attend_split_bf16_1")                                                        \
    X(ATTEND_BF16_2, "attend_split_bf16_2")                                                        \
    X(ATTEND_BF16_4, "attend_split_bf16_4")                                                        \
    X(ATTEND_F32_1, "attend_split_f32_1")                                                          \
    X(ATTEND_F32_2, "attend_split_f32_2")                                                          \
    X(ATTEND_F32_4, "attend_split_f32_4")                                                          \
    X(ATTEND_TILE_BF16, "attend_tile_bf16")                                                        \
    X(ATTEND_TILE_F32, "attend_tile_f32")                                                          \
    X(ATTEND_MERGE, "attend_merge")                                                                \
    X(TOPK, "moe_topk")                                                                            \
    X(GATE_UP_ROWS, "moe_gate_up_rows")                                                            \
    X(DOWN_ROWS, "moe_down_rows")                                                                  \
    X(SORT, "moe_sort")                                                                            \
    X(GATE_UP_SKINNY, "moe_gate_up_skinny")                                                        \
    X(DOWN_SKINNY, "moe_down_skinny")                                                              \
    X(GATE_UP_TILE_32, "moe_gate_up_tile_32")                                                      \
    X(GATE_UP_TILE_64, "moe_gate_up_tile_64")                                                      \
    X(DOWN_TILE_32, "moe_down_tile_32")                                                            \
    X(DOWN_TILE_64, "moe_down_tile_64")                                                            \
    X(COMBINE, "moe_combine")                                                                      \
    X(ARGMAX_PART, "argmax_part")                                                                  \
    X(ARGMAX_MERGE, "argmax_merge")                                                                \
    X(TOP, "top_select")

/* Of the same text, where it is compiled as Metal 3.2. */
#define METAL_FENCE_KERNELS(X)                                                                     \
    X(ROUTE_ROWS_1, "moe_route_rows_1")                                                            \
    X(ROUTE_ROWS_4, "moe_route_rows_4")

/* Of the second text, which takes Metal 4; the level metal/tensor alone has them. */
#define METAL_TENSOR_KERNELS(X)                                                                    \
    X(LINEAR_TENSOR_32, "linear_f16_tensor_32")                                                    \
    X(LINEAR_TENSOR_128, "linear_f16_tensor_128")                                                  \
    X(GATE_UP_TENSOR, "moe_gate_up_tensor")                                                        \
    X(DOWN_TENSOR, "moe_down_tensor")

enum metal_kernel {
#define METAL_KERNEL_ID(id, name) METAL_##id,
    METAL_KERNELS(METAL_KERNEL_ID) METAL_FENCE_KERNELS(METAL_KERNEL_ID)
        METAL_TENSOR_KERNELS(METAL_KERNEL_ID)
#undef METAL_KERNEL_ID
        METAL_KERNEL_COUNT
};

enum metal_scratch_slot {
    METAL_SCRATCH_NORMED,  /* f32 [rows, cols] */
    METAL_SCRATCH_DELTA,   /* f32 [rows, channels]: the convolution's output */
    METAL_SCRATCH_ATTEND,  /* f32 [tiles * tile_rows, heads, splits, 256], then [..., 2] */
    METAL_SCRATCH_LOGITS,  /* f32 [rows, experts], then f32 [rows] of the shared expert */
    METAL_SCRATCH_ARRIVED, /* u32: threadgroups that are done; 0 between commands */
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

/* Whether METAL_FENCE_KERNELS are there: macOS 15 and newer. */
bool metal_has_fences(const struct device *device);

/* Whether large products run on TensorOps, in f16. */
bool metal_uses_tensor(const struct device *device);

/* Scratch of at least so many bytes. Grows to the largest batch seen and stays. When there is none
 * the error is noted, the base is null, and the op must return. */
struct span metal_scratch(struct device *device, enum metal_scratch_slot slot, uint64_t bytes);

/* Puts the ops of metal_ops.c into the table. */
void metal_fill_ops(struct ops *ops);

/* Compares products of ragged shapes by both kernels of METAL_LINEAR_TENSOR_* with plain code. */
bool metal_check_tensor(struct device *device, struct err *err);

enum { METAL_PATH_BYTES = 1024 };

/* The file for the compiled kernels of this text on this system and GPU; its folder is made. False
 * where the user has no folder for such. */
bool metal_cache_path(const char *text, const char *system, const char *gpu,
                      char path[METAL_PATH_BYTES]);
bool metal_cache_has(const char *path);
/* A file is written under its partial name and then takes its place, or is gone. */
void metal_cache_part(const char *path, char part[METAL_PATH_BYTES]);
void metal_cache_keep(const char *part, const char *path);

/* Calls `hold` at the first use and every half second until keep_ms after the last, then `let_go`;
 * one call at a time. `change`, when not null, is called in a use before `hold`. */
struct metal_idle;
bool metal_idle_open(struct device *device, void (*hold)(struct device *),
                     void (*let_go)(struct device *), uint32_t keep_ms, struct metal_idle **out,
                     struct err *err);
void metal_idle_use(struct metal_idle *idle, void (*change)(struct device *));
void metal_idle_close(struct metal_idle *idle); /* null is allowed */

/* How long the memory stays claimed after the last command: three minutes; tests shorten it. */
extern uint32_t metal_keep_ms;

/* The texts of the kernels: build/gen/metal_source.c, made from the .metal files. */
extern const char metal_source[];
extern const char metal_tensor_source[];

#endif
