/* Invariant: a choice's text passes through exactly one place (stream_on_event), streamed or not,
 * so both forms of a reply say the same. */
#include "server/stream.h"

#include "base/clock.h"
#include "base/mem.h"
#include "text/pyjson.h"

#include <string.h>

enum { STREAM_TAIL = 4096 };

static struct answer_call *stream_add_call(struct choice *c, const char *name, size_t n)
{
    if (c->call_count == c->call_cap) {
        c->call_cap = c->call_cap ? 2 * c->call_cap : 4;
        c->calls = mem_grow(c->calls, c->call_cap, sizeof *c->calls);
    }
    struct answer_call *call = &c->calls[c->call_count++];
    *call = (struct answer_call){0};
    answer_make_id("call_", call->id, sizeof call->id);
    buf_append(&call->name, name, n);
    return call;
}

static void stream_trace_event(const struct choice *c, const struct parser_event *event)
{
    static const char *const kinds[] = {"reasoning", "content", "call_begin", "call_args",
                                        "call_end"};
    if (c->answer->server->trace)
        trace_write(c->answer->server->trace, c->answer->id, "parsed",
                    json_pack("{s:I,s:s,s:o}", "choice", (json_int_t)c->index, "kind",
                              kinds[event->kind], "text", answer_text(event->text, event->len)));
}

static void stream_keep(struct choice *c, const struct parser_event *event)
{
    switch (event->kind) {
    case PARSER_REASONING:
        buf_append(&c->reasoning, event->text, event->len);
        break;
    case PARSER_CONTENT:
        buf_append(&c->content, event->text, event->len);
        break;
    case PARSER_CALL_BEGIN:
        stream_add_call(c, event->text, event->len);
        break;
    case PARSER_CALL_ARGS:
        buf_append(&c->calls[event->call].arguments, event->text, event->len);
        break;
    case PARSER_CALL_END:
        break;
    }
}

static void stream_on_event(void *user, const struct parser_event *event)
{
    struct choice *c = user;
    struct answer *a = c->answer;
    if (c->cut)
        return;
    stream_trace_event(c, event);
    if (event->kind == PARSER_CALL_BEGIN && a->one_call && c->call_count == 1)
        c->cut = true;
    else if (a->one_call && c->call_count == 1 && event->kind == PARSER_CONTENT)
        c->cut = true; /* text behind the one call could not be told from a second call's */
    if (c->cut) {
        scheduler_cancel(a->server->scheduler, c->id);
        return;
    }
    stream_keep(c, event);
    if (a->logprobs && event->kind == PARSER_CONTENT)
        logprobs_show(&c->logprobs, event->at, event->len, a->top_logprobs);
    if (a->stream && a->api->event)
        a->api->event(c, event);
}

void stream_open_choice(struct choice *c)
{
    struct parser_options options = {
        .thinking_open = c->answer->thinking_open,
        .no_calls = c->answer->no_calls,
        .tools = c->answer->tools,
        .on_event = stream_on_event,
        .user = c,
    };
    if (!c->answer->raw)
        c->parser = parser_open(&options);
}

static void stream_fail(struct answer *a, const struct fault *fault)
{
    if (a->failed)
        return;
    a->failed = true;
    a->fault = *fault;
}

/* Numbers that wait to be written, over the choices. */
static uint64_t stream_count_logprobs(const struct answer *a)
{
    uint64_t tokens = 0;
    for (size_t i = 0; i < a->count; i++)
        tokens += a->choices[i].logprobs.tokens;
    return tokens * (1 + a->top_logprobs);
}

static void stream_add_logprob(struct choice *c, const struct mail *mail)
{
    struct answer *a = c->answer;
    const struct tokenizer *tokenizer = engine_tokenizer(a->server->engine);
    struct fault fault;
    size_t n;
    const char *bytes = tokenizer_bytes(tokenizer, mail->id, &n);
    if (stream_count_logprobs(a) >= LOGPROBS_MAX) {
        fault_set_status(&fault, 400, "too_many_logprobs",
                         "the answer has more than %d log-probabilities; ask for fewer tokens, "
                         "answers or 'top_logprobs', or for a stream",
                         LOGPROBS_MAX);
        stream_fail(a, &fault);
        return;
    }
    if (tokenizer_is_special(tokenizer, mail->id)) /* has no text */
        n = 0;
    logprobs_add(&c->logprobs, (struct sampler_candidate){mail->id, mail->logprob}, mail->top,
                 mail->top_count, a->top_logprobs, bytes, n);
}

static void stream_take_token(struct choice *c, const struct mail *mail)
{
    struct answer *a = c->answer;
    if (mail->id >= 0) {
        c->completion_tokens++;
        if (a->logprobs)
            stream_add_logprob(c, mail);
        if (c->thinking) {
            c->reasoning_tokens++;
            c->thinking = mail->id != a->think_end;
        }
        if (a->stop_count && !c->thinking) {
            size_t n;
            const char *bytes = tokenizer_bytes(engine_tokenizer(a->server->engine), mail->id, &n);
            buf_append(&c->tail, bytes, n);
            if (c->tail.len > 2 * STREAM_TAIL)
                buf_consume(&c->tail, c->tail.len - STREAM_TAIL);
        }
    }
    if (a->server->trace)
        buf_append(&c->raw, mail->text, mail->len);
    if (c->parser) {
        parser_feed(c->parser, mail->text, mail->len);
        if (a->logprobs)
            logprobs_settle(&c->logprobs, parser_judged(c->parser), a->top_logprobs);
    } else if (mail->len) {
        c->text_len += mail->len;
        stream_on_event(c, &(struct parser_event){PARSER_CONTENT, 0, mail->text, mail->len,
                                                  c->text_len - mail->len});
    }
}

/* The stop string that the generated text ends with: the one whose end comes first. */
static const char *stream_find_stop(const struct choice *c)
{
    const struct answer *a = c->answer;
    const char *best = NULL;
    size_t best_end = SIZE_MAX, best_len = 0;
    for (size_t i = 0; i < a->stop_count; i++) {
        size_t n = strlen(a->stop[i]);
        const char *at = c->tail.len ? memmem(c->tail.data, c->tail.len, a->stop[i], n) : NULL;
        size_t end = at ? (size_t)(at - c->tail.data) + n : SIZE_MAX;
        if (at && (end < best_end || (end == best_end && n > best_len))) {
            best = a->stop[i];
            best_end = end;
            best_len = n;
        }
    }
    return best;
}

static void stream_trace_end(const struct choice *c, const struct mail *mail)
{
    if (c->answer->server->trace)
        trace_write(c->answer->server->trace, c->answer->id, "end",
                    json_pack("{s:I,s:o,s:i,s:I,s:I,s:I,s:o}", "choice", (json_int_t)c->index,
                              "raw", answer_buf_text(&c->raw), "finish", (int)mail->finish,
                              "prompt_tokens", (json_int_t)mail->prompt_tokens, "cached_tokens",
                              (json_int_t)mail->cached_tokens, "completion_tokens",
                              (json_int_t)mail->completion_tokens, "error",
                              answer_text(mail->text, mail->len)));
}

static void stream_take_end(struct choice *c, const struct mail *mail)
{
    struct answer *a = c->answer;
    struct fault fault;
    c->ended = true;
    a->ended++;
    c->finish = mail->finish;
    c->cached_tokens = mail->cached_tokens;
    c->first_token_s = mail->first_token_s;
    c->decode_s = mail->decode_s;
    stream_trace_end(c, mail);
    if (mail->error) {
        fault_set_status(&fault, 500, "internal_error", "%s", mail->text);
        stream_fail(a, &fault);
        return;
    }
    if (mail->finish == FINISH_CANCELLED && !c->cut) {
        bool slow = a->box.overflowed;
        fault_set_status(&fault, slow ? 408 : 503, NULL, "%s",
                         slow ? "the client reads too slowly; the answer was ended"
                              : "the server is shutting down");
        stream_fail(a, &fault);
        return;
    }
    if (c->cut)
        c->finish = FINISH_STOP;
    else if (c->parser)
        parser_finish(c->parser);
    if (a->logprobs)
        logprobs_settle(&c->logprobs, SIZE_MAX, a->top_logprobs);
    if (c->cut)
        c->finish = FINISH_STOP;
    else if (mail->finish == FINISH_STOP && mail->stop_id < 0)
        c->stop = stream_find_stop(c);
    struct metrics *metrics = &a->server->metrics;
    metrics_observe(&metrics->first_token, mail->first_token_s);
    if (mail->completion_tokens > 1)
        metrics_observe(&metrics->per_token, mail->decode_s / (mail->completion_tokens - 1));
    if (a->stream)
        a->api->end(c);
}

/* Waits for mail and works it off; false when the client has gone. *idle: something is to be sent
 * all the same. A failure is in a->failed. */
static bool stream_step(struct answer *a, uint64_t deadline_ns, bool *idle)
{
    struct mail *mail = NULL;
    struct fault fault;
    uint64_t until = deadline_ns < a->deadline_ns ? deadline_ns : a->deadline_ns;
    /* Only now: a stream's head and first event have been sent. */
    if (!a->woken)
        scheduler_wake(a->server->scheduler);
    a->woken = true;
    *idle = false;
    switch (mailbox_take(&a->box, a->exchange->fd, until, &mail)) {
    case MAILBOX_HALF:
        *idle = true;
        return true;
    case MAILBOX_GONE:
        return false;
    case MAILBOX_CLOSED:
        fault_set_status(&fault, 503, NULL, "the server is shutting down");
        stream_fail(a, &fault);
        return true;
    case MAILBOX_TIMEOUT:
        if (clock_now_ns() >= a->deadline_ns) {
            fault_set_status(&fault, 504, "timeout", "the answer took longer than %u seconds",
                             a->server->options.request_timeout_s);
            stream_fail(a, &fault);
        } else {
            *idle = true;
        }
        return true;
    case MAILBOX_MAIL:
        break;
    }
    for (struct mail *next; mail; mail = next) {
        next = mail->next;
        struct choice *c = &a->choices[mail->choice];
        if (mail->kind == MAIL_DONE)
            stream_take_end(c, mail);
        else if (!a->failed && !c->cut)
            stream_take_token(c, mail);
        mail_free(mail);
    }
    return true;
}

bool stream_collect(struct answer *a)
{
    bool idle;
    while (!a->failed && a->ended < a->count) {
        uint64_t probe_ns = a->sent_ns + a->server->options.comment_ms * 1000000ull;
        if (!stream_step(a, a->box.half ? probe_ns : UINT64_MAX, &idle))
            return false;
        if (idle && !exchange_probe(a->exchange))
            return false;
        a->sent_ns = idle ? clock_now_ns() : a->sent_ns;
    }
    return true;
}

/* Fills a->out with what comes next; false when the client has gone. */
static bool stream_fill(struct answer *a)
{
    bool idle;
    if (!a->opened) {
        a->opened = true;
        a->api->open(a);
        return true;
    }
    if (a->failed || a->ended == a->count) {
        if (a->failed)
            a->api->fail(a, &a->fault);
        else
            a->api->close(a);
        a->closed = true;
        return true;
    }
    if (!stream_step(a, a->sent_ns + a->server->options.comment_ms * 1000000ull, &idle))
        return false;
    if (idle)
        buf_append_text(&a->out, ": still working\n\n");
    return true;
}

ssize_t stream_read(void *user, uint64_t pos, char *out, size_t max)
{
    struct answer *a = user;
    (void)pos;
    exchange_touch(a->exchange);
    while (a->out_at == a->out.len) {
        buf_clear(&a->out);
        a->out_at = 0;
        if (a->closed)
            return MHD_CONTENT_READER_END_OF_STREAM;
        if (!stream_fill(a))
            return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    exchange_touch(a->exchange);
    a->sent_ns = clock_now_ns();
    size_t n = a->out.len - a->out_at < max ? a->out.len - a->out_at : max;
    memcpy(out, a->out.data + a->out_at, n);
    a->out_at += n;
    return (ssize_t)n;
}

void answer_send(struct answer *a, const char *event, json_t *data)
{
    if (event)
        buf_printf(&a->out, "event: %s\n", event);
    buf_append_text(&a->out, "data: ");
    pyjson_append_compact(&a->out, data);
    buf_append_text(&a->out, "\n\n");
    json_decref(data);
}
