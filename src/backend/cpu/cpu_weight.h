/* Reading a weight as a checkpoint stores it. */
#ifndef BACKEND_CPU_CPU_WEIGHT_H
#define BACKEND_CPU_CPU_WEIGHT_H

#include "backend/op.h"

/* Bytes of one row's data (f32, bf16 or codes), and of one row's scales (or biases). */
size_t cpu_weight_row_bytes(const struct weight *w);
size_t cpu_weight_scale_row_bytes(const struct weight *w);

/* Row `row` of matrix `item` of w as f32 [cols]. */
void cpu_weight_read_row(const struct weight *w, uint32_t item, uint32_t row, float *out);

#endif
