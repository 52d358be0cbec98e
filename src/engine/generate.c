/* One request from prompt to end: prefill in chunks, then a token at a time.
 *
 * Text goes sampler -> detokenizer (whole characters) -> stops (what cannot be part of a stop
 * string) -> on_token, so the pieces that a caller sees join to exactly the answer. */
#include "engine/core.h"
#include "engine/stops.h"

#include "base/clock.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

enum { GENERATE_MAX_TOP = 1024 };

struct generation {
    struct engine *engine;
    const struct engine_request *request;
    struct engine_result *result;
    struct sampler *sampler;
    struct detokenizer detokenizer;
    struct stops stops;
    struct buf piece;              /* text of the newest token, before stops */
    struct buf text;               /* text that on_token will see next */
    struct sampler_candidate *top; /* [request->top_logprobs] */
    float *untouched;              /* f32 [vocab]: logits as the model gave them, for logprobs */
    uint32_t limit;                /* tokens to generate, at most */
    uint64_t start_ns;
};

static bool generate_check(const struct engine *engine, const struct engine_request *request,
                           struct err *err)
{
    if (request->prompt_len == 0)
        return err_set(err, ERR_USAGE, "the prompt is empty");
    if (request->prompt_len > engine->ctx)
        return err_set(err, ERR_RESOURCE,
                       "the prompt has %zu tokens and the context holds %u; use a larger --ctx or "
                       "a shorter prompt",
                       request->prompt_len, engine->ctx);
    uint32_t vocab = engine->model.config.vocab;
    for (size_t i = 0; i < request->prompt_len; i++)
        if (request->prompt[i] < 0 || (uint32_t)request->prompt[i] >= vocab)
            return err_set(err, ERR_USAGE, "prompt token %zu is %d, outside the vocabulary of %u",
                           i, request->prompt[i], vocab);
    for (size_t i = 0; i < request->stop_count; i++)
        if (!request->stop[i][0])
            return err_set(err, ERR_USAGE, "a stop string is empty");
    if (request->top_logprobs > GENERATE_MAX_TOP)
        return err_set(err, ERR_USAGE, "top_logprobs is %u, at most %d are given",
                       request->top_logprobs, GENERATE_MAX_TOP);
    return true;
}

/* How many tokens of the prompt the slot holds already; it is emptied when that is of no use. */
static uint32_t generate_reuse(struct engine *engine, const struct engine_request *request)
{
    size_t held = engine->held.len;
    if (held < request->prompt_len &&
        (held == 0 || !memcmp(engine->held.ids, request->prompt, held * sizeof *request->prompt)))
        return (uint32_t)held;
    engine_forget(engine);
    return 0;
}

/* Feeds the prompt; *cancelled when on_prefill wanted no more. */
static bool generate_prefill(struct generation *g, bool *cancelled, struct err *err)
{
    const struct engine_request *request = g->request;
    uint32_t total = (uint32_t)request->prompt_len;
    uint32_t done = generate_reuse(g->engine, request);
    g->result->prompt_tokens = total;
    g->result->cached_tokens = done;
    while (done < total) {
        uint32_t rows = total - done < g->engine->chunk ? total - done : g->engine->chunk;
        if (!engine_feed(g->engine, request->prompt + done, rows, done + rows == total, err))
            return false;
        done += rows;
        if (request->on_prefill && !request->on_prefill(request->user, done, total)) {
            *cancelled = true;
            return true;
        }
    }
    for (uint32_t i = 0; i < total; i++)
        sampler_accept(g->sampler, request->prompt[i], true);
    return true;
}

/* The next token from the logits of the last row fed. */
static bool generate_choose(struct generation *g, struct engine_token *token, struct err *err)
{
    struct engine *engine = g->engine;
    const struct engine_request *request = g->request;
    size_t vocab = engine->model.config.vocab;
    if (sampler_is_argmax(g->sampler) && !request->logprobs) {
        if (!graph_read_argmax(engine->graph, 0, &token->id, err))
            return false;
        /* Rows that pad the head are not tokens; the sampler knows to pass them over. */
        if ((uint32_t)token->id < engine->defaults.sampling.vocab)
            return true;
    }
    if (!graph_read_logits(engine->graph, 0, engine->logits, err))
        return false;
    if (request->logprobs)
        memcpy(g->untouched, engine->logits, vocab * sizeof *g->untouched);
    if (!sampler_pick(g->sampler, engine->logits, vocab, &token->id, err))
        return false;
    if (request->logprobs) {
        token->logprob = sampler_logprob(g->untouched, vocab, token->id);
        token->top_count = sampler_top(g->untouched, vocab, request->top_logprobs, g->top);
        token->top = g->top;
    }
    return true;
}

static void generate_add_text(struct generation *g, int32_t id)
{
    buf_clear(&g->piece);
    if (g->engine->tokenizer)
        detokenizer_push(&g->detokenizer, id, &g->piece);
    stops_push(&g->stops, g->piece.data, g->piece.len, &g->text);
}

/* Hands the certain text over; false when the caller cancels. */
static bool generate_emit(struct generation *g, struct engine_token *token)
{
    token->text = g->text.data ? g->text.data : "";
    token->len = g->text.len;
    bool go_on = !g->request->on_token || g->request->on_token(g->request->user, token);
    buf_clear(&g->text);
    return go_on;
}

/* The held rest, unless a stop string has ended the text. */
static void generate_emit_rest(struct generation *g)
{
    buf_clear(&g->piece);
    if (g->engine->tokenizer)
        detokenizer_finish(&g->detokenizer, &g->piece);
    stops_push(&g->stops, g->piece.data, g->piece.len, &g->text);
    stops_finish(&g->stops, &g->text);
    generate_emit(g, &(struct engine_token){.id = -1});
}

static bool generate_decode(struct generation *g, struct err *err)
{
    struct engine_result *result = g->result;
    for (;;) {
        struct engine_token token = {0};
        if (!generate_choose(g, &token, err))
            return false;
        if (result->ids.len == 0)
            result->first_token_s = clock_seconds_since(g->start_ns);
        if (!g->request->ignore_eos && defaults_is_eos(&g->engine->defaults, token.id)) {
            result->finish = FINISH_STOP;
            result->stop_id = token.id;
            break;
        }
        token_list_push(&result->ids, token.id);
        sampler_accept(g->sampler, token.id, false);
        generate_add_text(g, token.id);
        if (!generate_emit(g, &token)) {
            result->finish = FINISH_CANCELLED;
            return true;
        }
        if (g->stops.hit) {
            result->finish = FINISH_STOP;
            break;
        }
        if (result->ids.len == g->limit) {
            result->finish = FINISH_LENGTH;
            break;
        }
        if (!engine_feed(g->engine, &token.id, 1, true, err))
            return false;
    }
    generate_emit_rest(g);
    return true;
}

static bool generate_run(struct generation *g, struct err *err)
{
    bool cancelled = false;
    if (!generate_prefill(g, &cancelled, err))
        return false;
    if (cancelled) {
        g->result->finish = FINISH_CANCELLED;
        return true;
    }
    if (!generate_decode(g, err))
        return false;
    g->result->prefill_s = g->result->first_token_s;
    g->result->decode_s = clock_seconds_since(g->start_ns) - g->result->first_token_s;
    return true;
}

bool engine_generate(struct engine *engine, const struct engine_request *request,
                     struct engine_result *result, struct err *err)
{
    memset(result, 0, sizeof *result);
    result->stop_id = -1;
    struct sampler_options sampling = request->sampling;
    if (sampling.vocab == 0 || sampling.vocab > engine->defaults.sampling.vocab)
        sampling.vocab = engine->defaults.sampling.vocab;
    struct generation g = {
        .engine = engine,
        .request = request,
        .result = result,
        .detokenizer = {.tokenizer = engine->tokenizer, .skip_special = !request->show_special},
        .stops = {.strings = request->stop, .count = request->stop_count},
        .start_ns = clock_now_ns(),
    };
    if (!generate_check(engine, request, err) || !sampler_open(&sampling, &g.sampler, err))
        return false;
    /* The last token needs no position of its own: it is never fed. */
    uint32_t room = engine->ctx - (uint32_t)request->prompt_len + 1;
    g.limit = request->max_tokens && request->max_tokens < room ? request->max_tokens : room;
    if (request->logprobs) {
        g.untouched = mem_new(engine->model.config.vocab, sizeof *g.untouched);
        g.top = mem_new(request->top_logprobs, sizeof *g.top);
    }
    bool ok = generate_run(&g, err);
    if (!ok) {
        engine_forget(engine);
        token_list_free(&result->ids);
        memset(result, 0, sizeof *result);
    }
    sampler_close(g.sampler);
    stops_free(&g.stops);
    buf_free(&g.piece);
    buf_free(&g.text);
    free(g.untouched);
    free(g.top);
    return ok;
}
