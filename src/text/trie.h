/* The tries of a vocabulary: which tokens go on with which byte. */
#ifndef TEXT_TRIE_H
#define TEXT_TRIE_H

#include "text/automaton.h"
#include "text/tokenizer.h"

/* Nodes in depth-first order; the subtree of node i is i + 1 .. skip[i] - 1. A node's tokens are
 * tokens[first[i]] .. tokens[first[i + 1] - 1]. */
struct trie {
    uint32_t count;
    uint8_t *bytes;  /* [count] */
    uint16_t *depth; /* [count], 0 for first bytes */
    uint32_t *skip;  /* [count] */
    uint32_t *first; /* [count + 1] */
    int32_t *tokens; /* by their bytes */
    uint32_t token_count;
};

/* Tokens that are whole characters of one kind of free text (enum automaton_text). */
struct trie_text {
    uint64_t *allowed; /* [words] bit set of all of them */
    uint16_t *chars;   /* [vocab] characters of each; 0 for others */
    uint32_t longest;  /* in characters */
    struct trie rest;  /* of all other tokens */
};

struct grammar_vocab {
    const struct tokenizer *tokenizer;
    uint32_t vocab, words;                   /* ids; words of a bit set of them */
    uint32_t depth;                          /* bytes of the longest token */
    struct trie all;                         /* without added tokens */
    struct trie_text texts[AUTOMATON_TEXTS]; /* 0 unused */
    int32_t byte_ids[256];                   /* -1: none */
    int32_t markers[AUTOMATON_MARKERS];      /* -1: none */
};

#endif
