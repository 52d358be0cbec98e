/* Byte-level BPE from a model folder's tokenizer.json. */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;

/* The longest text that is encoded in one go; the working memory is up to 64 bytes a byte. */
enum { TOKENIZER_MAX_BYTES = 1 << 25 };

struct token_list {
    int32_t *ids; /* [len] */
    size_t len, cap;
};

void token_list_push(struct token_list *list, int32_t id);
void token_list_free(struct token_list *list);

/* A stretch of text in bytes. */
struct text_range {
    size_t start, len;
};

/* Reads folder/tokenizer.json, and added tokens from folder/tokenizer_config.json too. */
bool tokenizer_open(const char *folder, struct tokenizer **out, struct err *err);
void tokenizer_close(struct tokenizer *tokenizer);

/* Number of ids, 1 + the highest. */
uint32_t tokenizer_vocab(const struct tokenizer *tokenizer);

/* Appends the ids of text[0..n). Added tokens ("<|im_end|>", "<think>") are recognised only where
 * they touch none of the `plain` ranges (ascending, not overlapping); inside these they are plain
 * text: that is how what users type never becomes a control token. Text that is not UTF-8 has
 * each bad sequence replaced by U+FFFD. Time is near linear in n for every input. Fails only for
 * n > TOKENIZER_MAX_BYTES, with ERR_INPUT. Thread-safe. */
bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n,
                      const struct text_range *plain, size_t plain_count, struct token_list *out,
                      struct err *err);

/* Id of an added token by its exact text, or of a vocabulary entry; -1 when there is none. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text);

/* The bytes that id stands for; null and n = 0 for an id without text. */
const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *n);

/* True for added tokens marked special: `<|im_end|>`, not `<think>`. */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);
bool tokenizer_is_added(const struct tokenizer *tokenizer, int32_t id);

/* Ids to UTF-8 as a stream: never emits part of a character; invalid bytes become U+FFFD. */
struct detokenizer {
    const struct tokenizer *tokenizer;
    bool skip_special;
    char held[4]; /* an unfinished sequence */
    size_t held_len;
};

/* Appends the text that is now certain. */
void detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out);
/* Appends U+FFFD for an unfinished sequence, if there is one. */
void detokenizer_finish(struct detokenizer *d, struct buf *out);

#endif
