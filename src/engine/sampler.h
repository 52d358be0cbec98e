/* From logits to a token. */
#ifndef ENGINE_SAMPLER_H
#define ENGINE_SAMPLER_H

#include "base/err.h"
#include "base/rand.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sampler_bias {
    int32_t id;
    float bias;
};

struct sampler_options {
    float temperature;                         /* 0: greedy */
    uint32_t top_k;                            /* 0: off */
    float top_p;                               /* 1: off */
    float min_p;                               /* 0: off */
    float repetition_penalty;                  /* 1: off */
    float presence_penalty, frequency_penalty; /* 0: off */
    const struct sampler_bias *bias;           /* [bias_count], added to the logits */
    size_t bias_count;
    uint64_t seed;
    uint32_t vocab; /* ids at and above this are never chosen (padding rows) */
};

/* Fails, naming the field, for NaN and for values outside the documented ranges. */
bool sampler_check(const struct sampler_options *options, struct err *err);

struct sampler; /* the options, the random state, and counts of the tokens seen */

bool sampler_open(const struct sampler_options *options, struct sampler **out, struct err *err);
void sampler_close(struct sampler *sampler);

/* Counts a token of the prompt or of the answer for the penalties. */
void sampler_accept(struct sampler *sampler, int32_t id, bool is_prompt);

/* True when the choice is the plain argmax, so that the logits need not leave the device. */
bool sampler_is_argmax(const struct sampler *sampler);

/* Chooses from logits f32 [n], which it may overwrite. Order: bias, penalties, temperature, top-k,
 * top-p, min-p, draw. NaN or no finite logit: ERR_INTERNAL. */
bool sampler_pick(struct sampler *sampler, float *logits, size_t n, int32_t *id, struct err *err);

struct sampler_candidate {
    int32_t id;
    float logprob;
};

/* log-softmax of id among logits f32 [n], before any of the above. */
float sampler_logprob(const float *logits, size_t n, int32_t id);
/* The `count` likeliest ids, best first, ties to the lowest id; returns how many. */
size_t sampler_top(const float *logits, size_t n, size_t count, struct sampler_candidate *out);

#endif
