/* How well a model predicts a text, and how closely it agrees with another engine's numbers. */
#ifndef ENGINE_SCORE_H
#define ENGINE_SCORE_H

#include "engine/engine.h"

#include <jansson.h>

struct score_text {
    size_t tokens, predicted; /* predicted: tokens that had one before them in their window */
    double nll;               /* sum of -log p over those, natural */
};

/* Scores ids in windows of at most the engine's context, each from an empty state. `chunk` as in
 * engine_score. Perplexity is exp(nll / predicted). */
bool score_text(struct engine *engine, const int32_t *ids, size_t n, uint32_t chunk,
                struct score_text *out, struct err *err);

struct score_set {
    size_t sequences, positions; /* positions: all ids */
    size_t values;               /* log-probabilities compared: every next_logprob and top entry */
    double max_difference, sum_difference; /* of log-probabilities, natural */
    size_t first_choices, first_equal;     /* positions with a top list; our argmax is its first */
    size_t predicted;                      /* entries of next_logprob */
    double nll, reference_nll;             /* sums of -log p over those */
};

/* Compares with a set of a reference file: a list of {ids, next_logprob, top}, where next_logprob
 * has one number fewer than ids, and top (may be absent) one list of [id, logprob] a position,
 * best first, of any length. Fails for what is not of that form, naming the record. */
bool score_set(struct engine *engine, const json_t *records, uint32_t chunk, struct score_set *out,
               struct err *err);

#endif
