/* Byte-pair encoding of one piece of text. */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include "text/tokenizer.h"
#include "text/vocab.h"

/* Working memory, kept between pieces. Start from zero; release with bpe_free. */
struct bpe {
    struct bpe_symbol *symbols; /* [symbol_cap] */
    struct bpe_pair *heap;      /* [heap_cap], a binary heap, lowest rank first */
    size_t symbol_cap, heap_len, heap_cap;
};

/* Appends the ids of piece[0..n): bytes joined by the merge of lowest rank, leftmost first, until
 * no merge applies. Time n log n. n must be below 2^31. */
void bpe_encode(struct bpe *bpe, const struct vocab *vocab, const char *piece, size_t n,
                struct token_list *out);
void bpe_free(struct bpe *bpe);

#endif
