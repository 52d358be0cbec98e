/* Text to ids: bad bytes replaced, added tokens cut out, then form C, pieces, BPE.
 *
 * The tokenizer is read-only once open; what an encoding needs beyond it lives in the call. */
#include "text/tokenizer.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/bpe.h"
#include "text/nfc.h"
#include "text/split.h"
#include "text/vocab.h"

#include <stdlib.h>
#include <string.h>

struct tokenizer {
    struct vocab vocab;
};

void token_list_push(struct token_list *list, int32_t id)
{
    if (list->len == list->cap) {
        list->cap = list->cap ? list->cap * 2 : 64;
        list->ids = mem_grow(list->ids, list->cap, sizeof *list->ids);
    }
    list->ids[list->len++] = id;
}

void token_list_free(struct token_list *list)
{
    free(list->ids);
    *list = (struct token_list){0};
}

bool tokenizer_open(const char *folder, struct tokenizer **out, struct err *err)
{
    struct tokenizer *t = mem_new(1, sizeof *t);
    *out = NULL;
    if (!vocab_open(folder, &t->vocab, err)) {
        tokenizer_close(t);
        return false;
    }
    *out = t;
    return true;
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    vocab_close(&tokenizer->vocab);
    free(tokenizer);
}

uint32_t tokenizer_vocab(const struct tokenizer *tokenizer)
{
    return tokenizer->vocab.count;
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text)
{
    return vocab_find(&tokenizer->vocab, text, strlen(text));
}

static uint32_t tokenizer_flags(const struct tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (uint32_t)id < tokenizer->vocab.count ? tokenizer->vocab.entries[id].flags
                                                            : 0;
}

const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *n)
{
    *n = 0;
    if (!tokenizer_flags(tokenizer, id))
        return NULL;
    const struct vocab_entry *e = &tokenizer->vocab.entries[id];
    *n = e->len;
    return tokenizer->vocab.bytes.data + e->start;
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id)
{
    return tokenizer_flags(tokenizer, id) & VOCAB_SPECIAL;
}

bool tokenizer_is_added(const struct tokenizer *tokenizer, int32_t id)
{
    return tokenizer_flags(tokenizer, id) & VOCAB_ADDED;
}

/* One encoding under way. */
struct tokenizer_job {
    const struct vocab *vocab;
    struct token_list *out;
    struct bpe bpe;
    struct buf valid; /* a stretch with its bad bytes replaced */
    struct buf nfc;   /* the stretch in form C */
};

/* Encodes a stretch without added tokens. */
static void tokenizer_encode_stretch(struct tokenizer_job *job, const char *text, size_t n)
{
    size_t good = utf8_valid_prefix(text, n);
    if (good < n) {
        buf_clear(&job->valid);
        for (;;) {
            buf_append(&job->valid, text, good);
            text += good;
            n -= good;
            if (!n)
                break;
            size_t bad = utf8_bad_length(text, n);
            buf_append(&job->valid, "\xef\xbf\xbd", 3);
            text += bad;
            n -= bad;
            good = utf8_valid_prefix(text, n);
        }
        text = job->valid.data;
        n = job->valid.len;
    }
    if (!nfc_is_plain(text, n)) {
        buf_clear(&job->nfc);
        nfc_append(&job->nfc, text, n);
        text = job->nfc.data;
        n = job->nfc.len;
    }
    while (n) {
        size_t piece = split_piece(text, n);
        bpe_encode(&job->bpe, job->vocab, text, piece, job->out);
        text += piece;
        n -= piece;
    }
}

/* Where the text from `at` on may hold added tokens: not inside plain[*k], and not past its start.
 * Steps *k over ranges that end before `at`. */
static size_t tokenizer_free_end(const struct text_range *plain, size_t count, size_t *k, size_t at,
                                 size_t n)
{
    while (*k < count && (!plain[*k].len || plain[*k].start + plain[*k].len <= at))
        ++*k;
    if (*k == count)
        return n;
    return plain[*k].start <= at ? at : plain[*k].start;
}

bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n,
                      const struct text_range *plain, size_t plain_count, struct token_list *out,
                      struct err *err)
{
    if (n > TOKENIZER_MAX_BYTES)
        return err_set(err, ERR_INPUT,
                       "a text of %zu bytes is too long to encode in one go; split it into parts "
                       "of at most %d bytes",
                       n, TOKENIZER_MAX_BYTES);
    struct tokenizer_job job = {.vocab = &tokenizer->vocab, .out = out};
    size_t from = 0, at = 0, k = 0;
    while (at < n) {
        size_t free_end = tokenizer_free_end(plain, plain_count, &k, at, n);
        if (free_end == at) {
            at = plain[k].start + plain[k].len;
            continue;
        }
        int32_t id = vocab_match_added(job.vocab, text + at, free_end - at);
        if (id < 0) {
            at++;
            continue;
        }
        tokenizer_encode_stretch(&job, text + from, at - from);
        token_list_push(out, id);
        at += job.vocab->entries[id].len;
        from = at;
    }
    tokenizer_encode_stretch(&job, text + from, n - from);
    bpe_free(&job.bpe);
    buf_free(&job.valid);
    buf_free(&job.nfc);
    return true;
}
