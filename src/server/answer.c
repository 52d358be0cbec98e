/* Owns a request that generates. The connection's thread creates it, submits its choices and works
 * off its mailbox; the engine's thread posts.
 *
 * Invariant: the engine's thread touches only `box`, `left` and `refs` of an answer, and each
 * submitted choice holds a reference until its `done`; so an answer outlives every callback, and
 * the grammar and the prompts in it outlive the request. */
#include "server/answer.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "server/body.h"
#include "server/stream.h"
#include "text/pyjson.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/random.h>
#endif

void answer_make_id(const char *prefix, char *out, size_t size)
{
    unsigned char bytes[12] = {0};
    if (getentropy(bytes, sizeof bytes) != 0) {
        uint64_t now = clock_now_ns();
        memcpy(bytes, &now, sizeof now);
    }
    char hex[25];
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
    snprintf(out, size, "%s%s", prefix, hex);
}

json_t *answer_text(const char *text, size_t n)
{
    if (utf8_valid_prefix(text, n) == n)
        return json_stringn_nocheck(text, n);
    struct buf mended = {0};
    for (size_t at = 0; at < n;) {
        size_t good = utf8_valid_prefix(text + at, n - at);
        buf_append(&mended, text + at, good);
        at += good;
        if (at == n)
            break;
        buf_append_text(&mended, "\xef\xbf\xbd");
        at += utf8_bad_length(text + at, n - at);
    }
    json_t *value = json_stringn_nocheck(mended.data, mended.len);
    buf_free(&mended);
    return value;
}

json_t *answer_float(float value)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    return json_real(strtod(text, NULL));
}

void answer_append_quoted(struct buf *out, const char *text, size_t n)
{
    buf_append_char(out, '"');
    pyjson_append_escaped(out, text, n);
    buf_append_char(out, '"');
}

void answer_write_json(struct buf *out, json_t *value)
{
    pyjson_append_compact(out, value);
    json_decref(value);
}

void answer_write_head(const struct answer *a, const char *object, struct buf *out)
{
    buf_printf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", a->id, object,
               (long long)a->created);
    answer_append_quoted(out, a->model, strlen(a->model));
}

static struct answer *answer_new(struct exchange *x, const struct answer_api *api, json_t *body)
{
    struct answer *a = mem_new(1, sizeof *a);
    a->server = x->server;
    a->exchange = x;
    a->api = api;
    a->body = body;
    atomic_init(&a->refs, 1);
    a->box.wake[0] = a->box.wake[1] = -1;
    a->created = (int64_t)time(NULL);
    a->n = 1;
    a->model = x->server->options.model_name;
    a->sampling = engine_sampling(x->server->engine);
    a->think_end = tokenizer_find(engine_tokenizer(x->server->engine), "</think>");
    a->start_ns = x->start_ns;
    a->deadline_ns = x->start_ns + x->server->options.request_timeout_s * 1000000000ull;
    return a;
}

static void answer_free_choice(struct choice *c)
{
    if (c->parser)
        parser_close(c->parser);
    for (size_t i = 0; i < c->call_count; i++) {
        buf_free(&c->calls[i].name);
        buf_free(&c->calls[i].arguments);
    }
    free(c->calls);
    logprobs_free(&c->logprobs);
    buf_free(&c->reasoning);
    buf_free(&c->content);
    buf_free(&c->tail);
    buf_free(&c->raw);
}

static void answer_unref(struct answer *a)
{
    if (atomic_fetch_sub(&a->refs, 1) != 1)
        return;
    for (size_t i = 0; i < a->count; i++)
        answer_free_choice(&a->choices[i]);
    free(a->choices);
    for (size_t i = 0; i < a->prompt_count; i++)
        token_list_free(&a->prompts[i]);
    free(a->prompts);
    free(a->bias);
    grammar_free(a->grammar);
    json_decref(a->tools);
    json_decref(a->items);
    json_decref(a->body);
    buf_free(&a->out);
    buf_free(&a->prefix);
    if (a->box.wake[0] >= 0)
        mailbox_free(&a->box);
    free(a);
}

static void answer_list(struct answer *a)
{
    struct server *server = a->server;
    pthread_mutex_lock(&server->lock);
    a->next = server->answers;
    if (a->next)
        a->next->prev = a;
    server->answers = a;
    if (server->closing)
        mailbox_shut(&a->box);
    pthread_mutex_unlock(&server->lock);
}

static void answer_unlist(struct answer *a)
{
    struct server *server = a->server;
    pthread_mutex_lock(&server->lock);
    if (a->next)
        a->next->prev = a->prev;
    if (a->prev)
        a->prev->next = a->next;
    else if (server->answers == a)
        server->answers = a->next;
    pthread_mutex_unlock(&server->lock);
}

void answer_stop_all(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    server->closing = true;
    for (struct answer *a = server->answers; a; a = a->next)
        mailbox_shut(&a->box);
    pthread_mutex_unlock(&server->lock);
}

void answer_leave(struct answer *a)
{
    atomic_store(&a->left, true);
    for (size_t i = 0; i < a->count; i++)
        if (a->choices[i].submitted && !a->choices[i].ended)
            scheduler_cancel(a->server->scheduler, a->choices[i].id);
    if (a->box.wake[0] >= 0)
        answer_unlist(a);
    answer_unref(a);
}

/* The engine's thread. */
static bool answer_on_token(void *user, const struct engine_token *token)
{
    struct choice *c = user;
    if (atomic_load(&c->answer->left))
        return false;
    struct mail *mail = mail_new(MAIL_TOKEN, c->index, token->text, token->len, token->top_count);
    mail->id = token->id;
    mail->logprob = token->logprob;
    if (token->top_count)
        memcpy(mail->top, token->top, token->top_count * sizeof *token->top);
    return mailbox_post(&c->answer->box, mail);
}

/* The engine's thread. */
static bool answer_on_prefill(void *user, uint32_t done, uint32_t total)
{
    struct choice *c = user;
    (void)done;
    (void)total;
    return !atomic_load(&c->answer->left);
}

/* The engine's thread, once a submitted choice. */
static void answer_on_done(void *user, const struct engine_result *result, const struct err *err)
{
    struct choice *c = user;
    struct answer *a = c->answer;
    bool bad = err && err->kind != ERR_NONE;
    struct mail *mail =
        mail_new(MAIL_DONE, c->index, bad ? err->text : "", bad ? strlen(err->text) : 0, 0);
    mail->error = bad ? err->kind : ERR_NONE;
    mail->finish = result->finish;
    mail->stop_id = result->stop_id;
    mail->prompt_tokens = result->prompt_tokens;
    mail->cached_tokens = result->cached_tokens;
    mail->completion_tokens = (uint32_t)result->ids.len;
    mail->first_token_s = result->first_token_s;
    mail->prefill_s = result->prefill_s;
    mail->decode_s = result->decode_s;
    mailbox_post(&a->box, mail);
    answer_unref(a);
}

static bool answer_submit_choice(struct choice *c, struct fault *fault)
{
    struct answer *a = c->answer;
    struct engine_request request = {
        .prompt = c->prompt->ids,
        .prompt_len = c->prompt->len,
        .max_tokens = a->max_tokens,
        .sampling = a->sampling,
        .stop = a->stop,
        .stop_count = a->stop_count,
        .logprobs = a->logprobs,
        .top_logprobs = a->top_logprobs,
        .keep_at = {a->keep_at[0], a->keep_at[1]},
        .thinking_open = a->thinking_open,
        .think_tokens = a->think_tokens,
        .grammar = a->grammar,
        .on_token = answer_on_token,
        .on_prefill = answer_on_prefill,
        .user = c,
    };
    request.sampling.seed += c->index % a->n;
    struct err err = {0};
    atomic_fetch_add(&a->refs, 1);
    if (!scheduler_submit(a->server->scheduler, &request, answer_on_done, &c->id, &err)) {
        atomic_fetch_sub(&a->refs, 1);
        return fault_from_err(fault, &err);
    }
    c->submitted = true;
    return true;
}

static bool answer_check_room(const struct answer *a, struct fault *fault)
{
    uint32_t ctx = engine_ctx(a->server->engine);
    for (size_t i = 0; i < a->prompt_count; i++) {
        if (a->prompts[i].len > ctx)
            return fault_set_status(fault, 400, "context_length_exceeded",
                                    "prompt is too long: %zu tokens > %u maximum",
                                    a->prompts[i].len, ctx);
    }
    if (a->prompt_count * a->n > ANSWER_MAX_CHOICES)
        return fault_set(fault, "n", "%zu answers were asked for; at most %d are given",
                         a->prompt_count * a->n, ANSWER_MAX_CHOICES);
    const struct server_options *o = &a->server->options;
    if (a->prompt_count * a->n > (size_t)o->queue + o->parallel)
        return fault_set(
            fault, "n",
            "'n' asks for %zu answers, and this server holds %u at a time (%u in work, "
            "%u waiting): ask for fewer, or start it with a larger --queue",
            a->prompt_count * a->n, o->queue + o->parallel, o->parallel, o->queue);
    return true;
}

static bool answer_submit(struct answer *a, struct fault *fault)
{
    struct err err = {0};
    if (!answer_check_room(a, fault))
        return false;
    if (!mailbox_open(&a->box, &err))
        return fault_from_err(fault, &err);
    answer_list(a);
    a->count = a->prompt_count * a->n;
    a->choices = mem_new(a->count, sizeof *a->choices);
    for (size_t i = 0; i < a->count; i++) {
        struct choice *c = &a->choices[i];
        c->answer = a;
        c->index = i;
        c->prompt = &a->prompts[i / a->n];
        c->prompt_tokens = (uint32_t)c->prompt->len;
        c->thinking = a->thinking_open && !a->raw;
        stream_open_choice(c);
    }
    for (size_t i = 0; i < a->count; i++)
        if (!answer_submit_choice(&a->choices[i], fault))
            return false;
    return true;
}

struct answer_usage answer_count(const struct answer *a)
{
    struct answer_usage usage = {0};
    for (size_t i = 0; i < a->count; i++) {
        const struct choice *c = &a->choices[i];
        /* The prompt is counted once, however many answers it gets. */
        usage.prompt += i % a->n ? 0 : c->prompt_tokens;
        usage.cached += i % a->n ? 0 : c->cached_tokens;
        usage.completion += c->completion_tokens;
        usage.reasoning += c->reasoning_tokens;
    }
    return usage;
}

void answer_describe(const struct answer *a, char *out, size_t size)
{
    static const char *const ends[] = {"stop", "length", "cancelled"};
    if (!a->count)
        return;
    struct answer_usage usage = answer_count(a);
    double first = 0, decode = 0;
    for (size_t i = 0; i < a->count; i++) {
        first = a->choices[i].first_token_s > first ? a->choices[i].first_token_s : first;
        decode = a->choices[i].decode_s > decode ? a->choices[i].decode_s : decode;
    }
    bool ended = a->ended == a->count;
    uint64_t rest = usage.completion > a->count ? usage.completion - a->count : 0;
    snprintf(out, size,
             " id=%s prompt=%llu cached=%llu completion=%llu first=%.3fs rate=%.1f/s finish=%s",
             a->id, (unsigned long long)usage.prompt, (unsigned long long)usage.cached,
             (unsigned long long)usage.completion, first, decode > 0 ? (double)rest / decode : 0,
             a->failed ? "error"
             : ended   ? ends[a->choices[0].finish]
                       : "gone");
}

/* The exchange's answer with the parsed body; null with the fault. */
static struct answer *answer_begin(struct exchange *x, const struct answer_api *api,
                                   struct fault *fault)
{
    json_t *body = NULL;
    if (!engine_tokenizer(x->server->engine)) {
        fault_set_status(fault, 501, NULL, "the model folder has no tokenizer.json");
        return NULL;
    }
    if (!body_parse(x->body.data, x->body.len, &body, fault))
        return NULL;
    buf_free(&x->body);
    return x->answer = answer_new(x, api, body);
}

struct answer *answer_read_only(struct exchange *x,
                                bool (*read)(struct answer *answer, struct fault *fault),
                                struct fault *fault)
{
    struct answer *a = answer_begin(x, NULL, fault);
    return a && read(a, fault) ? a : NULL;
}

bool answer_handle(struct exchange *x, const struct answer_api *api)
{
    struct fault fault = {0};
    struct answer *a = answer_begin(x, api, &fault);
    if (!a || !api->read(a, &fault) || !answer_submit(a, &fault))
        return exchange_reply_fault(x, &fault);
    if (a->stream)
        return exchange_reply_stream(x, stream_read, a);
    if (!stream_collect(a))
        return false;
    if (a->failed)
        return exchange_reply_fault(x, &a->fault);
    struct buf whole = {0};
    api->whole(a, &whole);
    if (!whole.full)
        return exchange_reply_buf(x, 200, "application/json", &whole);
    buf_free(&whole);
    fault_set_status(&fault, 400, "reply_too_large",
                     "the reply is larger than %d bytes; ask for fewer answers or tokens, or for "
                     "a stream",
                     BUF_MAX_DEFAULT);
    return exchange_reply_fault(x, &fault);
}
