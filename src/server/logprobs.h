/* Log-probabilities of an answer's tokens, from where they come to where they are written: of those
 * that are content, with the bytes that are. Thoughts, calls, what a stop string cuts off and the
 * newlines that the format puts between them are not, so that the bytes join to the content.
 *
 * They are kept as numbers, 8 bytes each, and become JSON only as text that goes out: as objects
 * they would take a hundred times as much, and a request may ask for 20 a token. */
#ifndef SERVER_LOGPROBS_H
#define SERVER_LOGPROBS_H

#include "engine/engine.h"

/* What a token is in the answer's bytes: [start, end) of all that the tokens stand for, of which
 * [from, to) are content. */
struct logprobs_span {
    size_t start, end, from, to;
};

struct logprobs {
    struct sampler_candidate *list; /* [tokens, 1 + top]: the token itself, then the likeliest */
    struct logprobs_span *spans;    /* [tokens] */
    size_t tokens, cap;
    size_t settled; /* the first ones: all that will be content of them is known, and is some */

    /* The text is the tokens' bytes with U+FFFD for what is not UTF-8. Both are followed to the
     * same place: `text` there, `bytes` here, and `raw` has the bytes behind it. */
    struct buf raw;
    size_t text, bytes;
};

/* Numbers that an answer may keep until they are written. */
enum { LOGPROBS_MAX = 1 << 21 };

/* Adds a token that stands for bytes[0..n), with its `top` likeliest, of which `count` are known;
 * every token of a list has the same `top`. */
void logprobs_add(struct logprobs *l, struct sampler_candidate token,
                  const struct sampler_candidate *list, size_t count, size_t top, const char *bytes,
                  size_t n);

/* text[at .. at + len) is content, and nothing before it will be. In the order of the text. */
void logprobs_show(struct logprobs *l, size_t at, size_t len, size_t top);

/* What is content before text[at] has been shown. */
void logprobs_settle(struct logprobs *l, size_t at, size_t top);

/* Those that are settled are written. */
void logprobs_clear(struct logprobs *l, size_t top);
void logprobs_free(struct logprobs *l);

/* The list that OpenAI's chat has as "content". */
void logprobs_write_chat(const struct logprobs *l, size_t top, const struct tokenizer *tokenizer,
                         struct buf *out);

/* The object that OpenAI's completions have as "logprobs". */
void logprobs_write_completion(const struct logprobs *l, size_t top,
                               const struct tokenizer *tokenizer, struct buf *out);

#endif
