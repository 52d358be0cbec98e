/* Log-probabilities of an answer's tokens, from where they come to where they are written.
 *
 * They are kept as numbers, 8 bytes each, and become JSON only as text that goes out: as objects
 * they would take a hundred times as much, and a request may ask for 20 a token. */
#ifndef SERVER_LOGPROBS_H
#define SERVER_LOGPROBS_H

#include "engine/engine.h"

struct logprobs {
    struct sampler_candidate *list; /* [tokens, 1 + top]: the token itself, then the likeliest */
    size_t tokens, cap;
};

/* Numbers that an answer may keep until they are written. */
enum { LOGPROBS_MAX = 1 << 21 };

/* Adds a token with its `top` likeliest, of which `count` are known; every token of a list has the
 * same `top`. */
void logprobs_add(struct logprobs *l, struct sampler_candidate token,
                  const struct sampler_candidate *list, size_t count, size_t top);

/* Those that are kept are written, or not wanted. */
void logprobs_clear(struct logprobs *l);

/* The list that OpenAI's chat has as "content". */
void logprobs_write_chat(const struct logprobs *l, size_t top, const struct tokenizer *tokenizer,
                         struct buf *out);

/* The object that OpenAI's completions have as "logprobs". */
void logprobs_write_completion(const struct logprobs *l, size_t top,
                               const struct tokenizer *tokenizer, struct buf *out);

#endif
