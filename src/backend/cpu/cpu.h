/* The CPU device: its levels, its memory, its stream.
 *
 * Owns every allocation made through it until free or close. Ops run when they are called, so the
 * stream is empty between calls and only carries the first error to device_sync. A level is a set
 * of functions that overrides the slower level's; cpu/ref has all of them. */
#ifndef BACKEND_CPU_CPU_H
#define BACKEND_CPU_CPU_H

#include "backend/device.h"
#include "base/pool.h"

enum { CPU_SCRATCH_SLOTS = 12 };

struct cpu_block; /* an allocation, in the device's list */

struct device {
    struct device_head head;
    struct err error;   /* the stream's first error; kind ERR_NONE when there is none */
    int threads;        /* of the pool, at least 1 */
    struct pool *pool;  /* of the fast levels; null at cpu/ref */
    bool deterministic; /* as device_options says; cpu/ref is always so */
    struct cpu_block *blocks;
    struct {
        void *data; /* 64-aligned; grows to the largest size asked for, then stays */
        size_t bytes;
    } scratch[CPU_SCRATCH_SLOTS];
};

/* Name of the i-th CPU level that this machine can run, slowest first; null past the end. */
const char *cpu_level_name(int i);

/* Opens the level of that name, one of cpu_level_name. */
bool cpu_open(const char *level, const struct device_options *options, struct device **out,
              struct err *err);

/* `count` items of `size` bytes for the running op, uncleared, 64-aligned. Each slot is one buffer.
 * Null when memory is short: the stream has the error and the op returns. */
void *cpu_scratch(struct device *device, int slot, size_t count, size_t size);

/* Keeps the error for device_sync unless there is one already. */
void cpu_fail(struct device *device, enum err_kind kind, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static inline void *cpu_at(struct span s)
{
    return (char *)s.base + s.offset;
}

/* The faster levels: each puts what it does better into the table. */
void avx2_fill(struct ops *ops);
void avx512_fill(struct ops *ops);
void neon_fill(struct ops *ops);
void i8mm_fill(struct ops *ops);

/* Each family's reference functions; cpu_fill_ref makes the table of them. */
void cpu_fill_ref(struct ops *ops);
void ref_embed(struct device *, const struct embed_args *);
void ref_linear(struct device *, const struct linear_args *);
void ref_delta(struct device *, const struct delta_args *);
void ref_kv_append(struct device *, const struct kv_append_args *);
void ref_attention(struct device *, const struct attention_args *);
uint64_t ref_attention_scratch(const struct device *, const struct attention_dims *,
                               const struct batch_view *);
void ref_moe_route(struct device *, const struct moe_route_args *);
void ref_moe_experts(struct device *, const struct moe_experts_args *);
void ref_argmax(struct device *, const struct argmax_args *);
void ref_top(struct device *, const struct top_args *);
void ref_copy(struct device *, struct span to, struct span from, uint64_t bytes);

#endif
