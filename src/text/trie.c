/* Owns the tries. They are built once from the sorted tokens and never change, so that runs in any
 * thread may share them. */
#include "text/trie.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/grammar.h"

#include <stdlib.h>
#include <string.h>

struct trie_token {
    const uint8_t *bytes;
    uint32_t n;
    int32_t id;
};

static int trie_compare(const void *a, const void *b)
{
    const struct trie_token *x = a, *y = b;
    uint32_t n = x->n < y->n ? x->n : y->n;
    int order = memcmp(x->bytes, y->bytes, n);
    if (order)
        return order;
    if (x->n != y->n)
        return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Tokens sorted by bytes, without doubles of an id. */
static void trie_build(struct trie *trie, const struct trie_token *tokens, uint32_t count)
{
    size_t cap = 1;
    uint32_t longest = 1;
    for (uint32_t t = 0; t < count; t++) {
        cap += tokens[t].n;
        longest = tokens[t].n > longest ? tokens[t].n : longest;
    }
    trie->bytes = mem_new(cap, 1);
    trie->depth = mem_new(cap, sizeof *trie->depth);
    trie->skip = mem_new(cap, sizeof *trie->skip);
    trie->first = mem_new(cap + 1, sizeof *trie->first);
    trie->tokens = mem_new(count + 1, sizeof *trie->tokens);
    uint32_t *path = mem_new(longest, sizeof *path); /* the open node of each depth */
    uint32_t open = 0;
    for (uint32_t t = 0; t < count; t++) {
        const struct trie_token *token = &tokens[t];
        uint32_t same = 0;
        while (same < open && same < token->n && trie->bytes[path[same]] == token->bytes[same])
            same++;
        while (open > same)
            trie->skip[path[--open]] = trie->count;
        for (; open < token->n; open++) {
            path[open] = trie->count;
            trie->bytes[trie->count] = token->bytes[open];
            trie->depth[trie->count] = (uint16_t)open;
            trie->first[trie->count] = t;
            trie->count++;
        }
        trie->tokens[t] = token->id;
        trie->first[trie->count] = t + 1;
    }
    while (open)
        trie->skip[path[--open]] = trie->count;
    trie->token_count = count;
    trie->first[trie->count] = count;
    free(path);
}

static void trie_free(struct trie *trie)
{
    free(trie->bytes);
    free(trie->depth);
    free(trie->skip);
    free(trie->first);
    free(trie->tokens);
}

/* How many characters of the kind the token is; 0 when it is not made of such alone. */
static uint32_t trie_count_chars(enum automaton_text kind, const struct trie_token *token)
{
    const char *p = (const char *)token->bytes;
    uint32_t chars = 0;
    for (size_t at = 0, k; at < token->n; at += k, chars++) {
        uint32_t cp;
        k = utf8_decode(p + at, token->n - at, &cp);
        bool raw = kind == AUTOMATON_RAW_TEXT;
        if (!k || (cp < 0x20 && !(raw && (cp == '\t' || cp == '\r'))) || (raw && cp == 0x7f) ||
            cp == '<' || (!raw && (cp == '"' || cp == '\\')))
            return 0;
    }
    return chars;
}

static void trie_build_text(struct grammar_vocab *vocab, enum automaton_text kind,
                            const struct trie_token *tokens, uint32_t count)
{
    struct trie_text *text = &vocab->texts[kind];
    struct trie_token *rest = mem_new(count + 1, sizeof *rest);
    uint32_t rest_count = 0;
    text->allowed = mem_new(vocab->words, sizeof *text->allowed);
    text->chars = mem_new(vocab->vocab, sizeof *text->chars);
    for (uint32_t t = 0; t < count; t++) {
        uint32_t chars = trie_count_chars(kind, &tokens[t]);
        if (!chars) {
            rest[rest_count++] = tokens[t];
            continue;
        }
        uint32_t id = (uint32_t)tokens[t].id;
        text->allowed[id / 64] |= (uint64_t)1 << id % 64;
        text->chars[id] = (uint16_t)chars;
        text->longest = chars > text->longest ? chars : text->longest;
    }
    trie_build(&text->rest, rest, rest_count);
    free(rest);
}

struct grammar_vocab *grammar_vocab_open(const struct tokenizer *tokenizer)
{
    enum { LONGEST = UINT16_MAX }; /* bytes; a longer token is never allowed */
    struct grammar_vocab *vocab = mem_new(1, sizeof *vocab);
    vocab->tokenizer = tokenizer;
    vocab->vocab = tokenizer_vocab(tokenizer);
    vocab->words = vocab->vocab / 64 + 1;
    memset(vocab->byte_ids, 0xff, sizeof vocab->byte_ids);
    struct trie_token *tokens = mem_new(vocab->vocab + 1, sizeof *tokens);
    uint32_t count = 0;
    for (uint32_t id = 0; id < vocab->vocab; id++) {
        size_t n;
        const char *bytes = tokenizer_bytes(tokenizer, (int32_t)id, &n);
        if (!n || n > LONGEST || tokenizer_is_added(tokenizer, (int32_t)id))
            continue;
        tokens[count++] = (struct trie_token){(const uint8_t *)bytes, (uint32_t)n, (int32_t)id};
        vocab->depth = n > vocab->depth ? (uint32_t)n : vocab->depth;
        if (n == 1)
            vocab->byte_ids[(uint8_t)*bytes] = (int32_t)id;
    }
    qsort(tokens, count, sizeof *tokens, trie_compare);
    trie_build(&vocab->all, tokens, count);
    trie_build_text(vocab, AUTOMATON_JSON_TEXT, tokens, count);
    trie_build_text(vocab, AUTOMATON_RAW_TEXT, tokens, count);
    free(tokens);
    for (int m = 0; m < AUTOMATON_MARKERS; m++) {
        int32_t id = tokenizer_find(tokenizer, automaton_marker_text(m));
        vocab->markers[m] = id >= 0 && tokenizer_is_added(tokenizer, id) ? id : -1;
    }
    return vocab;
}

void grammar_vocab_close(struct grammar_vocab *vocab)
{
    if (!vocab)
        return;
    trie_free(&vocab->all);
    for (int k = AUTOMATON_NO_TEXT + 1; k < AUTOMATON_TEXTS; k++) {
        free(vocab->texts[k].allowed);
        free(vocab->texts[k].chars);
        trie_free(&vocab->texts[k].rest);
    }
    free(vocab);
}
