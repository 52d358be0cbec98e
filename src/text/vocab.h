/* The tables behind the tokenizer: what each id stands for, which pairs merge, and which texts are
 * added tokens. Built once from a model folder and never changed, so that threads may share it. */
#ifndef TEXT_VOCAB_H
#define TEXT_VOCAB_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bounds of what a folder can ask for. A text is compared with every added token at each place
 * where one can begin, so their number is bounded too; models have tens to hundreds. */
enum {
    VOCAB_MAX_ID = (1 << 24) - 1,
    VOCAB_MAX_ADDED = 1 << 14,
    VOCAB_MAX_FILE = 128 << 20, /* bytes of a file; the family's have 20 million at most */
};

enum vocab_flag {
    VOCAB_PRESENT = 1, /* the id has text */
    VOCAB_ADDED = 2,   /* an added token: cut out of the text before BPE */
    VOCAB_SPECIAL = 4, /* an added token that decoding can leave out */
};

struct vocab_entry {
    uint32_t start, len; /* stretch of vocab.bytes */
    uint32_t flags;      /* enum vocab_flag */
};

/* A merge: left and right become id; the lowest rank goes first. */
struct vocab_merge {
    int32_t left, right; /* left is -1 in an empty slot */
    int32_t rank, id;
};

struct vocab {
    struct buf bytes;            /* the raw bytes of all entries */
    struct vocab_entry *entries; /* [count], by id */
    uint32_t count, cap;         /* 1 + the highest id; room for */
    int32_t *slots;              /* [slot_mask + 1], open hash of ids by bytes; -1: empty */
    uint32_t slot_mask;
    struct vocab_merge *merges; /* [merge_mask + 1], open hash by (left, right) */
    uint32_t merge_mask;
    int32_t byte_ids[256]; /* ids of the single bytes */
    int32_t *added;        /* [added_count], longest text first */
    uint32_t added_count, added_cap;
    bool added_first[256]; /* whether an added token opens with this byte */
};

/* Reads folder/tokenizer.json and, where there is one, the added tokens of
 * folder/tokenizer_config.json. Release with vocab_close, after a failure too. */
bool vocab_open(const char *folder, struct vocab *vocab, struct err *err);
void vocab_close(struct vocab *vocab);

/* Id of the entry that is exactly these bytes; -1 when there is none. */
int32_t vocab_find(const struct vocab *vocab, const char *bytes, size_t n);

/* The merge of the pair, or null. */
const struct vocab_merge *vocab_find_merge(const struct vocab *vocab, int32_t left, int32_t right);

/* The longest added token that p[0..n) begins with; -1 when there is none. */
int32_t vocab_match_added(const struct vocab *vocab, const char *p, size_t n);

#endif
