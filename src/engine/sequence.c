/* Owns a copy of a request and everything that its answer needs on the host.
 *
 * Text goes sampler -> detokenizer (whole characters) -> stops (what cannot be part of a stop
 * string) -> on_token, so the pieces that a caller sees join to exactly the answer.
 * Invariant: tokens is the prompt followed by result.ids, and by the stop token if there is one. */
#include "engine/sequence.h"

#include "base/clock.h"
#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCE_MAX_TOP = 1024 };

/* ---- opening ------------------------------------------------------------------------------ */

static bool sequence_check(const struct engine *engine, const struct engine_request *request,
                           struct err *err)
{
    if (request->prompt_len == 0)
        return err_set(err, ERR_USAGE,
                       "the prompt is empty: a model goes on from a token at least");
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
    if (request->grammar && !engine->tokenizer)
        return err_set(err, ERR_USAGE, "this model has no tokenizer, which a grammar needs");
    if (request->top_logprobs > SEQUENCE_MAX_TOP)
        return err_set(err, ERR_USAGE, "top_logprobs is %u, at most %d are given",
                       request->top_logprobs, SEQUENCE_MAX_TOP);
    return true;
}

static void sequence_copy_stops(struct sequence *s, const struct engine_request *request)
{
    size_t bytes = 0, at = 0;
    for (size_t i = 0; i < request->stop_count; i++)
        bytes += strlen(request->stop[i]) + 1;
    s->strings = mem_new(bytes, 1);
    const char **stop = mem_new(request->stop_count, sizeof *stop);
    for (size_t i = 0; i < request->stop_count; i++) {
        size_t n = strlen(request->stop[i]) + 1;
        memcpy(s->strings + at, request->stop[i], n);
        stop[i] = s->strings + at;
        at += n;
    }
    s->request.stop = stop;
    s->stops = (struct stops){.strings = stop, .count = request->stop_count};
}

/* Whether one token may be all of a stop string. */
static bool sequence_stops_at_once(const struct sequence *s)
{
    bool found = false;
    for (size_t i = 0; s->engine->tokenizer && !found && i < s->request.stop_count; i++) {
        struct token_list ids = {0};
        const char *text = s->request.stop[i];
        struct err err = {0};
        found = tokenizer_encode(s->engine->tokenizer, text, strlen(text), NULL, 0, &ids, &err) &&
                ids.len == 1;
        token_list_free(&ids);
    }
    return found;
}

static void sequence_copy(struct sequence *s, const struct engine_request *request)
{
    size_t bias = request->sampling.bias_count;
    s->request = *request;
    s->request.prompt = NULL;
    s->prompt_len = (uint32_t)request->prompt_len;
    for (size_t i = 0; i < request->prompt_len; i++)
        token_list_push(&s->tokens, request->prompt[i]);
    s->bias = mem_new(bias, sizeof *s->bias);
    if (bias)
        memcpy(s->bias, request->sampling.bias, bias * sizeof *s->bias);
    s->request.sampling.bias = s->bias;
    sequence_copy_stops(s, request);
    s->stops_at_once = sequence_stops_at_once(s);
}

bool sequence_open(struct engine *engine, const struct engine_request *request,
                   struct sequence **out, struct err *err)
{
    struct sampler_options sampling = request->sampling;
    struct sampler *sampler;
    if (sampling.vocab == 0 || sampling.vocab > engine->defaults.sampling.vocab)
        sampling.vocab = engine->defaults.sampling.vocab;
    if (!sequence_check(engine, request, err) || !sampler_open(&sampling, &sampler, err))
        return false;
    struct sequence *s = mem_new(1, sizeof *s);
    s->engine = engine;
    s->sampler = sampler;
    sequence_copy(s, request);
    s->request.sampling.vocab = sampling.vocab;
    /* The last token needs no position of its own: it is never fed. */
    uint32_t room = engine->ctx - s->prompt_len + 1;
    s->limit = request->max_tokens && request->max_tokens < room ? request->max_tokens : room;
    s->load_most = s->prompt_len - 1;
    s->result.stop_id = -1;
    s->result.prompt_tokens = s->prompt_len;
    s->detokenizer = (struct detokenizer){.tokenizer = engine->tokenizer,
                                          .skip_special = !request->show_special};
    s->think_end = engine->tokenizer ? tokenizer_find(engine->tokenizer, "</think>") : -1;
    s->thinking = request->thinking_open && s->think_end >= 0;
    if (request->logprobs) {
        s->untouched = mem_new(engine->model.config.vocab, sizeof *s->untouched);
        s->top = mem_new(request->top_logprobs, sizeof *s->top);
    }
    for (uint32_t i = 0; i < s->prompt_len; i++)
        sampler_accept(s->sampler, s->tokens.ids[i], true);
    s->submit_ns = clock_now_ns();
    *out = s;
    return true;
}

void sequence_close(struct sequence *s)
{
    if (!s)
        return;
    sampler_close(s->sampler);
    grammar_run_close(s->grammar);
    stops_free(&s->stops);
    buf_free(&s->piece);
    buf_free(&s->text);
    token_list_free(&s->tokens);
    token_list_free(&s->result.ids);
    free((void *)s->request.stop);
    free(s->strings);
    free(s->bias);
    free(s->untouched);
    free(s->top);
    free(s);
}

/* ---- a token ------------------------------------------------------------------------------ */

/* The thinking budget is spent: "</think>" comes next, whatever the logits say. */
static bool sequence_must_end_thought(const struct sequence *s)
{
    return s->thinking && s->request.think_tokens && s->result.ids.len >= s->request.think_tokens;
}

static bool sequence_is_constrained(const struct sequence *s)
{
    return s->request.grammar && !s->thinking;
}

static bool sequence_is_stop(const struct sequence *s, int32_t id)
{
    return (!s->request.ignore_eos || s->request.grammar) &&
           defaults_is_eos(&s->engine->defaults, id);
}

bool sequence_wants_logits(const struct sequence *s, int32_t argmax)
{
    if (sequence_is_constrained(s))
        return true;
    /* Rows that pad the head are not tokens; the sampler knows to pass them over. */
    return s->request.logprobs || !sampler_is_argmax(s->sampler) ||
           (uint32_t)argmax >= s->request.sampling.vocab;
}

bool sequence_can_follow(const struct sequence *s)
{
    size_t len = s->result.ids.len + 1;
    bool ends_thought = s->thinking && s->request.think_tokens && len >= s->request.think_tokens;
    /* A step ahead feeds a token of the answer that may end it. A stop string is not in what a next
     * turn repeats, so the state must stay before it, where it can. */
    bool stops = s->stops_at_once && !s->thinking;
    return sampler_is_argmax(s->sampler) && !s->request.grammar && !s->request.logprobs &&
           len < s->limit && !ends_thought && !stops;
}

static void sequence_mask(struct sequence *s, float *logits, size_t vocab)
{
    struct engine *engine = s->engine;
    if (!engine->grammar_vocab)
        engine->grammar_vocab = grammar_vocab_open(engine->tokenizer);
    if (!s->grammar)
        s->grammar = grammar_run_open(s->request.grammar, engine->grammar_vocab);
    grammar_run_mask(s->grammar, engine->defaults.eos, engine->defaults.eos_count, logits, vocab);
}

static bool sequence_choose(struct sequence *s, int32_t argmax, float *logits,
                            struct engine_token *token, struct err *err)
{
    size_t vocab = s->engine->model.config.vocab;
    token->id = argmax;
    if (s->request.logprobs)
        memcpy(s->untouched, logits, vocab * sizeof *s->untouched);
    if (sequence_is_constrained(s))
        sequence_mask(s, logits, vocab);
    if (sequence_must_end_thought(s))
        token->id = s->think_end;
    else if (sequence_wants_logits(s, argmax) &&
             !sampler_pick(s->sampler, logits, vocab, &token->id, err))
        return false;
    /* An answer is owed: the thought ends instead of the whole. */
    if (s->thinking && s->request.grammar && defaults_is_eos(&s->engine->defaults, token->id))
        token->id = s->think_end;
    if (s->request.logprobs) {
        token->logprob = sampler_logprob(s->untouched, vocab, token->id);
        token->top_count = sampler_top(s->untouched, vocab, s->request.top_logprobs, s->top);
        token->top = s->top;
    }
    return true;
}

static void sequence_add_text(struct sequence *s, int32_t id)
{
    buf_clear(&s->piece);
    if (s->engine->tokenizer)
        detokenizer_push(&s->detokenizer, id, &s->piece);
    if (s->thinking) /* stop strings are for the answer: a thought may mention them */
        buf_append(&s->text, s->piece.data, s->piece.len);
    else
        stops_push(&s->stops, s->piece.data, s->piece.len, &s->text);
}

/* Hands the certain text over; false when the caller cancels. */
static bool sequence_emit(struct sequence *s, struct engine_token *token)
{
    token->text = s->text.data ? s->text.data : "";
    token->len = s->text.len;
    bool go_on = !s->request.on_token || s->request.on_token(s->request.user, token);
    buf_clear(&s->text);
    return go_on;
}

static void sequence_end(struct sequence *s, enum finish finish)
{
    s->result.finish = finish;
    s->phase = SEQUENCE_ENDED;
    if (s->first_ns) {
        s->result.decode_s = clock_seconds_since(s->first_ns);
        s->result.first_token_s = (double)(s->first_ns - s->submit_ns) * 1e-9;
        s->result.prefill_s = (double)(s->first_ns - s->start_ns) * 1e-9;
    }
}

/* The held rest, unless a stop string has ended the text. */
static void sequence_end_text(struct sequence *s, enum finish finish)
{
    buf_clear(&s->piece);
    if (s->engine->tokenizer)
        detokenizer_finish(&s->detokenizer, &s->piece);
    stops_push(&s->stops, s->piece.data, s->piece.len, &s->text);
    stops_finish(&s->stops, &s->text);
    sequence_emit(s, &(struct engine_token){.id = -1});
    sequence_end(s, finish);
}

void sequence_stop(struct sequence *s)
{
    sequence_end(s, FINISH_CANCELLED);
}

bool sequence_advance(struct sequence *s, int32_t argmax, float *logits, struct err *err)
{
    struct engine_token token = {0};
    assert(s->phase != SEQUENCE_ENDED);
    if (!sequence_choose(s, argmax, logits, &token, err))
        return false;
    s->phase = SEQUENCE_DECODE;
    if (!s->first_ns)
        s->first_ns = clock_now_ns();
    if (sequence_is_stop(s, token.id)) {
        s->result.stop_id = token.id;
        token_list_push(&s->tokens, token.id);
        sequence_end_text(s, FINISH_STOP);
        return true;
    }
    if (s->grammar && !grammar_run_accept(s->grammar, token.id))
        return err_set(err, ERR_INTERNAL, "token %d does not fit the grammar that allowed it",
                       token.id);
    if (token.id == s->think_end)
        s->thinking = false;
    token_list_push(&s->result.ids, token.id);
    token_list_push(&s->tokens, token.id);
    sampler_accept(s->sampler, token.id, false);
    sequence_add_text(s, token.id);
    if (!sequence_emit(s, &token))
        sequence_stop(s);
    else if (s->stops.hit || (s->grammar && grammar_run_is_done(s->grammar)))
        sequence_end_text(s, FINISH_STOP);
    else if (s->result.ids.len >= s->limit)
        sequence_end_text(s, FINISH_LENGTH);
    return true;
}
