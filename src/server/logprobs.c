/* Owns the numbers of one choice. Ids below 0 stand for what is not known. */
#include "server/logprobs.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "server/answer.h"
#include "text/pyjson.h"

#include <stdlib.h>
#include <string.h>

void logprobs_add(struct logprobs *l, struct sampler_candidate token,
                  const struct sampler_candidate *list, size_t count, size_t top, const char *bytes,
                  size_t n)
{
    if (l->tokens == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 16;
        l->list = mem_grow(l->list, l->cap * (1 + top), sizeof *l->list);
        l->spans = mem_grow(l->spans, l->cap, sizeof *l->spans);
    }
    size_t start = l->bytes + l->raw.len;
    l->spans[l->tokens] = (struct logprobs_span){start, start + n, SIZE_MAX, 0};
    struct sampler_candidate *row = l->list + l->tokens++ * (1 + top);
    row[0] = token;
    for (size_t i = 0; i < top; i++)
        row[1 + i] = i < count ? list[i] : (struct sampler_candidate){.id = -1};
    buf_append(&l->raw, bytes, n);
}

/* Follows both to text[at]. */
static void logprobs_follow(struct logprobs *l, size_t at)
{
    size_t i = 0, n = l->raw.len;
    while (l->text < at && i < n) {
        size_t good = utf8_valid_prefix(l->raw.data + i, n - i);
        good = good < at - l->text ? good : at - l->text;
        l->text += good;
        i += good;
        if (l->text == at || i == n)
            break;
        i += utf8_bad_length(l->raw.data + i, n - i);
        l->text += strlen("\xef\xbf\xbd");
    }
    buf_consume(&l->raw, i);
    l->bytes += i;
}

/* Those that end before this place have all of their content. */
static void logprobs_decide(struct logprobs *l, size_t top)
{
    size_t next = l->settled, width = 1 + top;
    if (!l->tokens)
        return;
    for (; next < l->tokens && l->spans[next].end <= l->bytes; next++) {
        if (l->spans[next].from >= l->spans[next].to)
            continue;
        l->spans[l->settled] = l->spans[next];
        memmove(l->list + l->settled * width, l->list + next * width, width * sizeof *l->list);
        l->settled++;
    }
    size_t rest = l->tokens - next;
    memmove(l->spans + l->settled, l->spans + next, rest * sizeof *l->spans);
    memmove(l->list + l->settled * width, l->list + next * width, rest * width * sizeof *l->list);
    l->tokens = l->settled + rest;
}

void logprobs_show(struct logprobs *l, size_t at, size_t len, size_t top)
{
    logprobs_follow(l, at);
    size_t from = l->bytes;
    logprobs_follow(l, at + len);
    for (size_t i = l->settled; i < l->tokens; i++) {
        struct logprobs_span *s = &l->spans[i];
        size_t lo = s->start > from ? s->start : from, hi = s->end < l->bytes ? s->end : l->bytes;
        if (lo >= hi)
            continue;
        s->from = s->from < lo ? s->from : lo;
        s->to = hi;
    }
    logprobs_decide(l, top);
}

void logprobs_settle(struct logprobs *l, size_t at, size_t top)
{
    logprobs_follow(l, at);
    logprobs_decide(l, top);
}

void logprobs_clear(struct logprobs *l, size_t top)
{
    size_t rest = l->tokens - l->settled;
    if (!l->tokens)
        return;
    memmove(l->spans, l->spans + l->settled, rest * sizeof *l->spans);
    memmove(l->list, l->list + l->settled * (1 + top), rest * (1 + top) * sizeof *l->list);
    l->tokens = rest;
    l->settled = 0;
}

void logprobs_free(struct logprobs *l)
{
    free(l->list);
    free(l->spans);
    buf_free(&l->raw);
    *l = (struct logprobs){0};
}

static void logprobs_write_number(const struct sampler_candidate *c, struct buf *out)
{
    json_t *value =
        answer_float(c->logprob < -9999 ? -9999 : c->logprob); /* JSON has no infinity */
    pyjson_append_real(out, json_real_value(value));
    json_decref(value);
}

/* The bytes of a token; of the answer's own those that are content. */
static const char *logprobs_bytes(const struct sampler_candidate *c,
                                  const struct logprobs_span *span,
                                  const struct tokenizer *tokenizer, size_t *n)
{
    const char *bytes = tokenizer_bytes(tokenizer, c->id, n);
    if (!span)
        return bytes;
    *n = span->to - span->from;
    return bytes + (span->from - span->start);
}

/* A part of a character has no text of its own, and becomes U+FFFD; returns its length. */
static size_t logprobs_write_text(const struct sampler_candidate *c,
                                  const struct logprobs_span *span,
                                  const struct tokenizer *tokenizer, struct buf *out)
{
    size_t n;
    const char *bytes = logprobs_bytes(c, span, tokenizer, &n);
    json_t *text = answer_text(n ? bytes : "", n);
    answer_append_quoted(out, json_string_value(text), json_string_length(text));
    n = json_string_length(text);
    json_decref(text);
    return n;
}

/* {"token": ..., "logprob": ..., "bytes": [...]} but for its last brace. */
static void logprobs_open_entry(const struct sampler_candidate *c, const struct logprobs_span *span,
                                const struct tokenizer *tokenizer, struct buf *out)
{
    size_t n;
    const char *bytes = logprobs_bytes(c, span, tokenizer, &n);
    buf_append_text(out, "{\"token\":");
    logprobs_write_text(c, span, tokenizer, out);
    buf_append_text(out, ",\"logprob\":");
    logprobs_write_number(c, out);
    buf_append_text(out, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++)
        buf_printf(out, i ? ",%u" : "%u", (unsigned)(unsigned char)bytes[i]);
    buf_append_char(out, ']');
}

void logprobs_write_chat(const struct logprobs *l, size_t top, const struct tokenizer *tokenizer,
                         struct buf *out)
{
    buf_append_char(out, '[');
    for (size_t t = 0; t < l->settled; t++) {
        const struct sampler_candidate *row = l->list + t * (1 + top);
        if (t)
            buf_append_char(out, ',');
        logprobs_open_entry(row, &l->spans[t], tokenizer, out);
        buf_append_text(out, ",\"top_logprobs\":[");
        for (size_t i = 1; i <= top && row[i].id >= 0; i++) {
            if (i > 1)
                buf_append_char(out, ',');
            logprobs_open_entry(&row[i], NULL, tokenizer, out);
            buf_append_char(out, '}');
        }
        buf_append_text(out, "]}");
    }
    buf_append_char(out, ']');
}

/* {"text": logprob}. Parts of characters share a text: the likeliest has the name. */
static void logprobs_write_top(const struct sampler_candidate *row, size_t top,
                               const struct tokenizer *tokenizer, struct buf *out)
{
    struct buf name = {0}, names = {0}; /* each name between two zero bytes */
    buf_append_char(out, '{');
    buf_append_char(&names, 0);
    for (size_t i = 1; i <= top && row[i].id >= 0; i++) {
        buf_clear(&name);
        buf_append_char(&name, 0);
        logprobs_write_text(&row[i], NULL, tokenizer, &name);
        buf_append_char(&name, 0);
        if (memmem(names.data, names.len, name.data, name.len))
            continue;
        buf_append(&names, name.data + 1, name.len - 1);
        if (out->data[out->len - 1] != '{')
            buf_append_char(out, ',');
        buf_append(out, name.data + 1, name.len - 2);
        buf_append_char(out, ':');
        logprobs_write_number(&row[i], out);
    }
    buf_append_char(out, '}');
    buf_free(&name);
    buf_free(&names);
}

void logprobs_write_completion(const struct logprobs *l, size_t top,
                               const struct tokenizer *tokenizer, struct buf *out)
{
    struct buf values = {0}, tops = {0}, offsets = {0};
    size_t offset = 0;
    buf_append_text(out, "{\"tokens\":[");
    for (size_t t = 0; t < l->settled; t++) {
        const struct sampler_candidate *row = l->list + t * (1 + top);
        if (t) {
            buf_append_char(out, ',');
            buf_append_char(&values, ',');
            buf_append_char(&tops, ',');
            buf_append_char(&offsets, ',');
        }
        buf_printf(&offsets, "%zu", offset);
        offset += logprobs_write_text(row, &l->spans[t], tokenizer, out);
        logprobs_write_number(row, &values);
        logprobs_write_top(row, top, tokenizer, &tops);
    }
    buf_append_text(out, "],\"token_logprobs\":[");
    buf_append(out, values.data, values.len);
    buf_append_text(out, "],\"top_logprobs\":[");
    buf_append(out, tops.data, tops.len);
    buf_append_text(out, "],\"text_offset\":[");
    buf_append(out, offsets.data, offsets.len);
    buf_append_text(out, "]}");
    buf_free(&values);
    buf_free(&tops);
    buf_free(&offsets);
}
