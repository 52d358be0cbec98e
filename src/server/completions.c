/* OpenAI's text completions: no chat format, no parser. In a text prompt added tokens are
 * recognised, since who writes the format by hand needs them. */
#include "server/completions.h"

#include "base/mem.h"
#include "server/openai_chat.h"
#include "server/request.h"

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

/* The prompt as it came: text, or token ids. */
static void completions_trace(const struct answer *a, const json_t *prompt, size_t tokens)
{
    trace_write(a->server->trace, a->id, "prompt",
                json_pack("{s:O,s:I}", json_is_string(prompt) ? "text" : "ids", prompt, "tokens",
                          (json_int_t)tokens));
}

static bool completions_read_prompts(struct answer *a, struct fault *fault)
{
    const json_t *prompt = fields_get(a->body, "prompt");
    bool many = json_is_array(prompt) && !json_is_integer(json_array_get(prompt, 0));
    size_t count = many ? json_array_size(prompt) : 1;
    if (!prompt || count > ANSWER_MAX_CHOICES)
        return fault_set(fault, "prompt", "'prompt' must be text, token ids, or a list of up to %d",
                         ANSWER_MAX_CHOICES);
    a->prompts = mem_new(count, sizeof *a->prompts);
    bool empty = count == 0;
    for (size_t i = 0; i < count; i++) {
        if (!completions_add_prompt(a, many ? json_array_get(prompt, i) : prompt, fault))
            return false;
        empty |= a->prompts[i].len == 0;
    }
    if (empty)
        return fault_set(fault, "prompt",
                         "'prompt' is empty: a model goes on from a token at least");
    for (size_t i = 0; i < count && a->server->trace; i++)
        completions_trace(a, many ? json_array_get(prompt, i) : prompt, a->prompts[i].len);
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

static const char *completions_finish(const struct choice *c)
{
    return c->finish == FINISH_LENGTH ? "length" : "stop";
}

/* finish: null in the middle of a stream. */
static void completions_write_choice(struct choice *c, const char *text, size_t n,
                                     const char *finish, struct buf *out)
{
    const struct answer *a = c->answer;
    buf_printf(out, "{\"index\":%zu,\"text\":", c->index);
    answer_write_json(out, answer_text(text, n));
    buf_append_text(out, ",\"logprobs\":");
    if (c->logprobs.settled)
        logprobs_write_completion(&c->logprobs, a->top_logprobs,
                                  engine_tokenizer(a->server->engine), out);
    else
        buf_append_text(out, "null");
    logprobs_clear(&c->logprobs, a->top_logprobs);
    if (finish)
        buf_printf(out, ",\"finish_reason\":\"%s\"}", finish);
    else
        buf_append_text(out, ",\"finish_reason\":null}");
}

static void completions_whole(struct answer *a, struct buf *out)
{
    answer_write_head(a, "text_completion", out);
    buf_append_text(out, ",\"choices\":[");
    for (size_t i = 0; i < a->count; i++) {
        struct choice *c = &a->choices[i];
        if (i)
            buf_append_char(out, ',');
        completions_write_choice(c, c->content.len ? c->content.data : "", c->content.len,
                                 completions_finish(c), out);
    }
    buf_append_text(out, "],\"usage\":");
    answer_write_json(out, openai_chat_usage(a));
    buf_append_char(out, '}');
}

static void completions_open(struct answer *a)
{
    buf_append_text(&a->out, ": ready\n\n");
}

static void completions_send(struct choice *c, const char *text, size_t n, const char *finish)
{
    struct buf *out = &c->answer->out;
    buf_append_text(out, "data: ");
    answer_write_head(c->answer, "text_completion", out);
    buf_append_text(out, ",\"choices\":[");
    completions_write_choice(c, text, n, finish, out);
    buf_append_text(out, "]}\n\n");
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
        buf_append_text(&a->out, "data: ");
        answer_write_head(a, "text_completion", &a->out);
        buf_append_text(&a->out, ",\"choices\":[],\"usage\":");
        answer_write_json(&a->out, openai_chat_usage(a));
        buf_append_text(&a->out, "}\n\n");
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
