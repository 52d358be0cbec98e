/* The ops of a fast level: written once, over simd.h, and compiled for each level. */
#ifndef BACKEND_CPU_FAST_H
#define BACKEND_CPU_FAST_H

#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

void LEVEL(embed)(struct device *, const struct embed_args *);
void LEVEL(linear)(struct device *, const struct linear_args *);
void LEVEL(delta)(struct device *, const struct delta_args *);
void LEVEL(kv_append)(struct device *, const struct kv_append_args *);
void LEVEL(attention)(struct device *, const struct attention_args *);
uint64_t LEVEL(attention_scratch)(const struct device *, const struct attention_dims *,
                                  const struct batch_view *);
void LEVEL(moe_route)(struct device *, const struct moe_route_args *);
void LEVEL(moe_experts)(struct device *, const struct moe_experts_args *);
void LEVEL(argmax)(struct device *, const struct argmax_args *);
void LEVEL(top)(struct device *, const struct top_args *);

#endif
