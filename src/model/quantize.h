/* MLX affine quantisation, and whole checkpoints from Hugging Face bf16 to it. */
#ifndef MODEL_QUANTIZE_H
#define MODEL_QUANTIZE_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

/* One row of `cols` weights to codes u32 [cols * bits / 32], scales and biases bf16 [cols / group].
 * bits in {2, 3, 4, 5, 6, 8}, group in {32, 64, 128}, cols a multiple of group. Per group, in f32:
 *   n = 2^bits - 1, s = max((max - min) / n, 1e-7)
 *   edge = min, scale = s    when |min| > |max|, else    edge = max, scale = -s
 *   q0 = round(edge / scale); scale = edge / q0, bias = edge    (q0 = 0: bias = 0)
 *   code = clamp(round((w - bias) / scale), 0, n)
 * so that the end of larger magnitude and zero are both hit. Rounding is half away from zero, as in
 * MLX's GPU kernel, which made the published checkpoints; scale and bias are rounded to bf16
 * last. */
void quantize_row(const float *w, uint32_t cols, uint32_t bits, uint32_t group, uint32_t *codes,
                  uint16_t *scales, uint16_t *biases);

/* Bits for the modules whose path ends in `suffix` ("mlp.gate", "lm_head"); 0: left as they are. A
 * suffix of no module is an error that names the modules. */
struct quantize_rule {
    const char *suffix;
    uint32_t bits;
};

struct quantize_options {
    uint32_t bits, group;
    const struct quantize_rule *rules; /* [rule_count]; the last that fits decides */
    uint32_t rule_count;
    int threads;                                                 /* 0: one a core */
    void (*progress)(void *user, uint64_t done, uint64_t total); /* or null */
    void *progress_user;
};

/* Checks the checkpoint in `from`, which must not be quantised, and writes it to `to` in MLX form:
 * matrices whose width the group divides are quantised, fused experts are taken apart, norm gains
 * get their 1, vision and multi-token prediction are left out, tokenizer and other small files are
 * copied. Memory stays bounded: the source is mapped and goes through in blocks of rows. */
bool quantize_checkpoint(const char *from, const char *to, const struct quantize_options *options,
                         struct err *err);

#endif
