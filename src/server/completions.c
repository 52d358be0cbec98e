/* OpenAI's text completions: no chat format, no parser. In a text prompt added tokens are
 * recognised, since who writes the format by hand needs them. */
#include "server/completions.h"

#include "base/mem.h"
#include "server/openai_chat.h"
#include "server/request.h"

#include <stdlib.h>
#include <string.h>

const struct field completions_fields[] = {
    {"prompt", FIELD_HONOURED},
    {"model", FIELD_HONOURED},
    {"stream", FIELD_HONOURED},
    {"stream_options", FIELD_HONOURED},
    {"max_tokens", FIELD_HONOURED},
    {"temperature", FIELD_HONOURED},
    {"top_p", FIELD_HONOURED},
    {"top_k", FIELD_HONOURED},
    {"min_p", FIELD_HONOURED},
    {"presence_penalty", FIELD_HONOURED},
    {"frequency_penalty", FIELD_HONOURED},
    {"repetition_penalty", FIELD_HONOURED},
    {"logit_bias", FIELD_HONOURED},
    {"seed", FIELD_HONOURED},
    {"stop", FIELD_HONOURED},
    {"n", FIELD_HONOURED},
    {"logprobs", FIELD_HONOURED},
    {"user", FIELD_IGNORED},
    {"cache_prompt", FIELD_IGNORED},
    {"best_of", FIELD_REFUSED},
    {"echo", FIELD_REFUSED},
    {"suffix", FIELD_REFUSED},
    {NULL, 0},
};

static bool completions_add_ids(struct answer *a, const json_t *ids, struct token_list *out,
                                struct fault *fault)
{
    uint32_t vocab = engine_sampling(a->server->engine).vocab;
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= vocab)
            return fault_set(fault, "prompt", "'prompt' holds what is not a token id below %u",
                             vocab);
        token_list_push(out, (int32_t)json_integer_value(id));
    }
    return true;
}

/* One prompt: text, or a list of token ids. */
static bool completions_add_prompt(struct answer *a, const json_t *prompt, struct fault *fault)
{
    struct token_list *out = &a->prompts[a->prompt_count++];
    struct err err = {0};
    if (json_is_array(prompt))
        return completions_add_ids(a, prompt, out, fault);
    if (!json_is_string(prompt))
        return fault_set(fault, "prompt", "'prompt' must be text, token ids, or a list of these");
    return tokenizer_encode(engine_tokenizer(a->server->engine), json_string_value(prompt),
                            json_string_length(prompt), NULL, 0, out, &err) ||
           fault_from_err(fault, &err);
}

static bool completions_read_prompts(struct answer *a, struct fault *fault)
{
    const json_t *prompt = fields_get(a->body, "prompt");
    bool many = json_is_array(prompt) && !json_is_integer(json_array_get(prompt, 0));
    size_t count = many ? json_array_size(prompt) : 1;
    if (!prompt || count == 0 || count > ANSWER_MAX_CHOICES)
        return fault_set(fault, "prompt", "'prompt' must be text, token ids, or a list of up to %d",
                         ANSWER_MAX_CHOICES);
    a->prompts = mem_new(count, sizeof *a->prompts);
    for (size_t i = 0; i < count; i++)
        if (!completions_add_prompt(a, many ? json_array_get(prompt, i) : prompt, fault))
            return false;
    return true;
}

static bool completions_read(struct answer *a, struct fault *fault)
{
    static const char *const limits[] = {"max_tokens", NULL};
    uint64_t n = 1, top = UINT64_MAX;
    answer_make_id("cmpl-", a->id, sizeof a->id);
    a->raw = true;
    if (!fields_check(a->body, completions_fields, NULL, fault) || !request_read_head(a, fault) ||
        !request_read_stream_options(a, fault) || !request_read_sampling(a, true, fault) ||
        !request_read_stops(a, "stop", fault) || !request_read_limit(a, limits, fault) ||
        !fields_read_uint(a->body, "n", 1, ANSWER_MAX_CHOICES, &n, fault) ||
        !fields_read_uint(a->body, "logprobs", 0, 20, &top, fault))
        return false;
    if (!a->max_tokens)
        a->max_tokens = 16; /* OpenAI's default */
    a->n = (size_t)n;
    a->logprobs = top != UINT64_MAX;
    a->top_logprobs = a->logprobs ? (uint32_t)top : 0;
    return completions_read_prompts(a, fault);
}

static json_t *completions_logprobs(const struct choice *c)
{
    if (!c->answer->logprobs || !c->logprobs)
        return json_null();
    json_t *tokens = json_array(), *values = json_array(), *tops = json_array(),
           *offsets = json_array();
    size_t offset = 0;
    for (size_t i = 0; i < json_array_size(c->logprobs); i++) {
        const json_t *entry = json_array_get(c->logprobs, i);
        json_t *token = json_object_get(entry, "token"), *top = json_object();
        const json_t *list = json_object_get(entry, "top_logprobs");
        json_array_append(tokens, token);
        json_array_append(values, json_object_get(entry, "logprob"));
        json_array_append_new(offsets, json_integer((json_int_t)offset));
        offset += json_string_length(token);
        for (size_t k = 0; k < json_array_size(list); k++) {
            const json_t *item = json_array_get(list, k);
            json_object_set(top, json_string_value(json_object_get(item, "token")),
                            json_object_get(item, "logprob"));
        }
        json_array_append_new(tops, top);
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "tokens", tokens, "token_logprobs", values,
                     "top_logprobs", tops, "text_offset", offsets);
}

static json_t *completions_choice(const struct choice *c, json_t *text, const char *finish)
{
    return json_pack("{s:I,s:o,s:o,s:o}", "index", (json_int_t)c->index, "text", text, "logprobs",
                     completions_logprobs(c), "finish_reason",
                     finish ? json_string(finish) : json_null());
}

static json_t *completions_object(const struct answer *a, json_t *choices)
{
    return json_pack("{s:s,s:s,s:I,s:s,s:o}", "id", a->id, "object", "text_completion", "created",
                     (json_int_t)a->created, "model", a->model, "choices", choices);
}

static const char *completions_finish(const struct choice *c)
{
    return c->finish == FINISH_LENGTH ? "length" : "stop";
}

static json_t *completions_whole(struct answer *a)
{
    json_t *choices = json_array();
    for (size_t i = 0; i < a->count; i++)
        json_array_append_new(choices, completions_choice(&a->choices[i],
                                                          answer_buf_text(&a->choices[i].content),
                                                          completions_finish(&a->choices[i])));
    json_t *whole = completions_object(a, choices);
    json_object_set_new(whole, "usage", openai_chat_usage(a));
    return whole;
}

static void completions_open(struct answer *a)
{
    buf_append_text(&a->out, ": ready\n\n");
}

static void completions_send(struct choice *c, const char *text, size_t n, const char *finish)
{
    json_t *choice = completions_choice(c, answer_text(text, n), finish);
    answer_send(c->answer, NULL, completions_object(c->answer, json_pack("[o]", choice)));
    json_decref(c->logprobs);
    c->logprobs = NULL;
}

static void completions_event(struct choice *c, const struct parser_event *event)
{
    completions_send(c, event->text, event->len, NULL);
}

static void completions_end(struct choice *c)
{
    completions_send(c, "", 0, completions_finish(c));
}

static void completions_close(struct answer *a)
{
    if (a->include_usage) {
        json_t *last = completions_object(a, json_array());
        json_object_set_new(last, "usage", openai_chat_usage(a));
        answer_send(a, NULL, last);
    }
    buf_append_text(&a->out, "data: [DONE]\n\n");
}

bool completions_handle(struct exchange *x)
{
    static const struct answer_api api = {
        .read = completions_read,
        .whole = completions_whole,
        .open = completions_open,
        .event = completions_event,
        .end = completions_end,
        .close = completions_close,
        .fail = openai_chat_fail,
    };
    return answer_handle(x, &api);
}
