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
    float temperature;               /* 0..100; 0: greedy */
    uint32_t top_k;                  /* 0: off */
    float top_p;                     /* 0..1; 1: off; 0 keeps the likeliest alone */
    float min_p;                     /* 0..1, a share of the likeliest's probability; 0: off */
    float repetition_penalty;        /* above 0, at most 10; over prompt and answer; 1: off */
    float presence_penalty;          /* -2..2, once for a token of the answer; 0: off */
    float frequency_penalty;         /* -2..2, for each time in the answer; 0: off */
    const struct sampler_bias *bias; /* [bias_count], -100..100, added to the logits */
    size_t bias_count;
    uint64_t seed;
    uint32_t vocab; /* at least 1; ids at and above it are never chosen (padding rows) */
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
 * top-p, min-p, draw. NaN, +infinity or no finite logit: ERR_INTERNAL. Equal logits: the lowest id
 * ranks first. The same options, seed, accepted tokens and logits give the same id.
 *
 * Penalties, for a token seen before: repetition divides a positive logit and multiplies another
 * (Keskar et al. 2019, arXiv:1909.05858); then presence + frequency * count is subtracted, where
 * count is over the answer only, as in the OpenAI API. top-p keeps the shortest list of the
 * likeliest whose probabilities, among those that top-k left, reach top_p; min-p keeps those of at
 * least min_p times the likeliest's. */
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
