/* OpenAI's chat completions, as whole replies and as chunks. */
#include "server/openai_chat.h"

#include "server/chat.h"
#include "server/request.h"
#include "text/pyjson.h"
#include "text/word.h"

#include <string.h>

const struct field openai_chat_fields[] = {
    {"messages", FIELD_HONOURED},
    {"model", FIELD_HONOURED},
    {"stream", FIELD_HONOURED},
    {"stream_options", FIELD_HONOURED},
    {"max_tokens", FIELD_HONOURED},
    {"max_completion_tokens", FIELD_HONOURED},
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
    {"top_logprobs", FIELD_HONOURED},
    {"tools", FIELD_HONOURED},
    {"tool_choice", FIELD_HONOURED},
    {"parallel_tool_calls", FIELD_HONOURED},
    {"response_format", FIELD_HONOURED},
    {"reasoning_effort", FIELD_HONOURED},
    {"reasoning", FIELD_HONOURED},
    {"chat_template_kwargs", FIELD_HONOURED},
    {"enable_thinking", FIELD_HONOURED},
    {"preserve_thinking", FIELD_HONOURED},
    {"thinking_budget", FIELD_HONOURED},
    {"user", FIELD_IGNORED},
    {"metadata", FIELD_IGNORED},
    {"store", FIELD_IGNORED},
    {"service_tier", FIELD_IGNORED},
    {"safety_identifier", FIELD_IGNORED},
    {"prompt_cache_key", FIELD_IGNORED},
    {"prompt_cache_retention", FIELD_IGNORED},
    {"prompt_cache_options", FIELD_IGNORED},
    {"verbosity", FIELD_IGNORED},
    {"cache_prompt", FIELD_IGNORED},
    {"include_reasoning", FIELD_IGNORED},
    {"functions", FIELD_REFUSED},
    {"function_call", FIELD_REFUSED},
    {"audio", FIELD_REFUSED},
    {"modalities", FIELD_HONOURED},
    {"prediction", FIELD_REFUSED},
    {"moderation", FIELD_REFUSED},
    {"web_search_options", FIELD_REFUSED},
    {NULL, 0},
};

/* reasoning: {effort, max_tokens, enabled}, as OpenRouter's clients send it. */
static bool openai_chat_read_reasoning(struct answer *a, struct chat *chat, struct fault *fault)
{
    static const struct field table[] = {
        {"effort", FIELD_HONOURED}, {"max_tokens", FIELD_HONOURED}, {"enabled", FIELD_HONOURED},
        {"exclude", FIELD_IGNORED}, {"summary", FIELD_IGNORED},     {NULL, 0}};
    json_t *reasoning;
    if (!fields_read_typed(a->body, "reasoning", JSON_OBJECT, &reasoning, fault))
        return false;
    return !reasoning ||
           (fields_check(reasoning, table, "reasoning", fault) &&
            fields_read_bool(reasoning, "enabled", &chat->options.enable_thinking, fault) &&
            chat_read_effort(chat, fields_get(reasoning, "effort"), "reasoning.effort", fault) &&
            chat_read_budget(chat, reasoning, "max_tokens", fault));
}

static bool openai_chat_read_thinking(struct answer *a, struct chat *chat, struct fault *fault)
{
    static const struct field table[] = {{"enable_thinking", FIELD_HONOURED},
                                         {"preserve_thinking", FIELD_HONOURED},
                                         {"thinking_budget", FIELD_HONOURED},
                                         {"add_vision_id", FIELD_IGNORED},
                                         {NULL, 0}};
    struct err err = {0};
    json_t *kwargs;
    if (!chat_read_effort(chat, fields_get(a->body, "reasoning_effort"), "reasoning_effort",
                          fault) ||
        !openai_chat_read_reasoning(a, chat, fault) ||
        !fields_read_typed(a->body, "chat_template_kwargs", JSON_OBJECT, &kwargs, fault))
        return false;
    if (kwargs && (!fields_check(kwargs, table, "chat_template_kwargs", fault) ||
                   !chat_read_budget(chat, kwargs, "thinking_budget", fault)))
        return false;
    if (!chat_read_budget(chat, a->body, "thinking_budget", fault))
        return false;
    return template_read_options(a->body, &chat->options, &err) || fault_from_err(fault, &err);
}

static bool openai_chat_check_modalities(const struct answer *a, struct fault *fault)
{
    const json_t *list = fields_get(a->body, "modalities");
    if (!list || (json_array_size(list) == 1 && word_is(json_array_get(list, 0), "text")))
        return true;
    return fault_set(fault, "modalities", "'modalities' may only be [\"text\"]");
}

bool openai_chat_read_chat(struct answer *a, struct chat *chat, struct fault *fault)
{
    json_t *messages = json_object_get(a->body, "messages"), *tools;
    bool parallel = true;
    if (!chat_check_messages(messages, fault) ||
        !fields_read_typed(a->body, "tools", JSON_ARRAY, &tools, fault) ||
        !chat_check_tools(tools, fault))
        return false;
    chat->messages = json_incref(messages);
    chat->tools = json_incref(tools);
    if (!chat_read_choice(chat, fields_get(a->body, "tool_choice"), fault) ||
        !fields_read_bool(a->body, "parallel_tool_calls", &parallel, fault) ||
        !chat_read_format(chat, fields_get(a->body, "response_format"), "response_format", fault))
        return false;
    chat->one_call = !parallel || chat->choice == CHAT_NAMED;
    return openai_chat_read_thinking(a, chat, fault);
}

static bool openai_chat_read_all(struct answer *a, struct chat *chat, struct fault *fault)
{
    static const char *const limits[] = {"max_completion_tokens", "max_tokens", NULL};
    uint64_t n = 1, top = 0;
    if (!fields_check(a->body, openai_chat_fields, NULL, fault) || !request_read_head(a, fault) ||
        !request_read_stream_options(a, fault) || !openai_chat_read_chat(a, chat, fault) ||
        !request_read_sampling(a, chat->options.enable_thinking, fault) ||
        !request_read_stops(a, "stop", fault) || !request_read_limit(a, limits, fault) ||
        !fields_read_uint(a->body, "n", 1, ANSWER_MAX_CHOICES, &n, fault) ||
        !fields_read_bool(a->body, "logprobs", &a->logprobs, fault) ||
        !fields_read_uint(a->body, "top_logprobs", 0, 20, &top, fault) ||
        !openai_chat_check_modalities(a, fault))
        return false;
    if (top && !a->logprobs)
        return fault_set(fault, "top_logprobs", "'top_logprobs' needs \"logprobs\": true");
    a->n = (size_t)n;
    a->top_logprobs = (uint32_t)top;
    return chat_prepare(chat, a, fault);
}

static bool openai_chat_read(struct answer *a, struct fault *fault)
{
    struct chat chat;
    chat_init(&chat, a);
    answer_make_id("chatcmpl-", a->id, sizeof a->id);
    bool ok = openai_chat_read_all(a, &chat, fault);
    chat_free(&chat);
    return ok;
}

json_t *openai_chat_usage(const struct answer *a)
{
    struct answer_usage u = answer_count(a);
    return json_pack("{s:I,s:I,s:I,s:{s:I},s:{s:I}}", "prompt_tokens", (json_int_t)u.prompt,
                     "completion_tokens", (json_int_t)u.completion, "total_tokens",
                     (json_int_t)(u.prompt + u.completion), "prompt_tokens_details",
                     "cached_tokens", (json_int_t)u.cached, "completion_tokens_details",
                     "reasoning_tokens", (json_int_t)u.reasoning);
}

static const char *openai_chat_finish(const struct choice *c)
{
    if (c->finish == FINISH_LENGTH)
        return "length";
    return c->call_count ? "tool_calls" : "stop";
}

static json_t *openai_chat_message(const struct choice *c)
{
    bool silent = c->call_count && !c->content.len;
    json_t *message = json_pack("{s:s,s:o}", "role", "assistant", "content",
                                silent ? json_null() : answer_buf_text(&c->content));
    if (c->reasoning.len)
        json_object_set_new(message, "reasoning_content", answer_buf_text(&c->reasoning));
    json_object_set_new(message, "refusal", json_null());
    if (!c->call_count)
        return message;
    json_t *calls = json_array();
    for (size_t i = 0; i < c->call_count; i++)
        json_array_append_new(calls, json_pack("{s:s,s:s,s:{s:o,s:o}}", "id", c->calls[i].id,
                                               "type", "function", "function", "name",
                                               answer_buf_text(&c->calls[i].name), "arguments",
                                               answer_buf_text(&c->calls[i].arguments)));
    json_object_set_new(message, "tool_calls", calls);
    return message;
}

static void openai_chat_write_logprobs(struct choice *c, struct buf *out)
{
    const struct answer *a = c->answer;
    buf_append_text(out, "{\"content\":");
    logprobs_write_chat(&c->logprobs, a->top_logprobs, engine_tokenizer(a->server->engine), out);
    buf_append_text(out, ",\"refusal\":null}");
    logprobs_clear(&c->logprobs, a->top_logprobs);
}

static void openai_chat_write_choice(struct choice *c, struct buf *out)
{
    buf_printf(out, "{\"index\":%zu,\"message\":", c->index);
    answer_write_json(out, openai_chat_message(c));
    buf_append_text(out, ",\"logprobs\":");
    if (c->answer->logprobs)
        openai_chat_write_logprobs(c, out);
    else
        buf_append_text(out, "null");
    buf_printf(out, ",\"finish_reason\":\"%s\"}", openai_chat_finish(c));
}

static void openai_chat_whole(struct answer *a, struct buf *out)
{
    answer_write_head(a, "chat.completion", out);
    buf_append_text(out, ",\"choices\":[");
    for (size_t i = 0; i < a->count; i++) {
        if (i)
            buf_append_char(out, ',');
        openai_chat_write_choice(&a->choices[i], out);
    }
    buf_append_text(out, "],\"usage\":");
    answer_write_json(out, openai_chat_usage(a));
    buf_append_char(out, '}');
}

/* Opens a chunk up to the inside of "delta": {. */
static void openai_chat_begin(struct choice *c)
{
    struct answer *a = c->answer;
    buf_append(&a->out, a->prefix.data, a->prefix.len);
    buf_printf(&a->out, "\"choices\":[{\"index\":%zu,\"delta\":{", c->index);
}

/* Closes it, with the logprobs that have come since the last one. */
static void openai_chat_finish_chunk(struct choice *c, const char *finish)
{
    struct answer *a = c->answer;
    buf_append_text(&a->out, "}");
    if (c->logprobs.settled) {
        buf_append_text(&a->out, ",\"logprobs\":");
        openai_chat_write_logprobs(c, &a->out);
    }
    if (finish)
        buf_printf(&a->out, ",\"finish_reason\":\"%s\"}]", finish);
    else
        buf_append_text(&a->out, ",\"finish_reason\":null}]");
    buf_append_text(&a->out, a->include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
}

static void openai_chat_open(struct answer *a)
{
    buf_append_text(&a->prefix, "data: ");
    answer_write_head(a, "chat.completion.chunk", &a->prefix);
    buf_append_char(&a->prefix, ',');
    for (size_t i = 0; i < a->count; i++) {
        openai_chat_begin(&a->choices[i]);
        buf_append_text(&a->out, "\"role\":\"assistant\",\"content\":\"\"");
        openai_chat_finish_chunk(&a->choices[i], NULL);
    }
}

static void openai_chat_event(struct choice *c, const struct parser_event *event)
{
    struct buf *out = &c->answer->out;
    if (event->kind == PARSER_CALL_END)
        return;
    openai_chat_begin(c);
    switch (event->kind) {
    case PARSER_REASONING:
        buf_append_text(out, "\"reasoning_content\":");
        answer_append_quoted(out, event->text, event->len);
        break;
    case PARSER_CONTENT:
        buf_append_text(out, "\"content\":");
        answer_append_quoted(out, event->text, event->len);
        break;
    case PARSER_CALL_BEGIN:
        buf_printf(out,
                   "\"tool_calls\":[{\"index\":%zu,\"id\":\"%s\",\"type\":\"function\","
                   "\"function\":{\"name\":",
                   event->call, c->calls[event->call].id);
        answer_append_quoted(out, event->text, event->len);
        buf_append_text(out, ",\"arguments\":\"\"}}]");
        break;
    case PARSER_CALL_ARGS:
        buf_printf(out, "\"tool_calls\":[{\"index\":%zu,\"function\":{\"arguments\":", event->call);
        answer_append_quoted(out, event->text, event->len);
        buf_append_text(out, "}}]");
        break;
    case PARSER_CALL_END:
        break;
    }
    openai_chat_finish_chunk(c, NULL);
}

static void openai_chat_end(struct choice *c)
{
    openai_chat_begin(c);
    openai_chat_finish_chunk(c, openai_chat_finish(c));
}

static void openai_chat_close(struct answer *a)
{
    if (a->include_usage) {
        buf_append(&a->out, a->prefix.data, a->prefix.len);
        buf_append_text(&a->out, "\"choices\":[],\"usage\":");
        answer_write_json(&a->out, openai_chat_usage(a));
        buf_append_text(&a->out, "}\n\n");
    }
    buf_append_text(&a->out, "data: [DONE]\n\n");
}

void openai_chat_fail(struct answer *a, const struct fault *fault)
{
    answer_send(a, NULL, fault_openai_json(fault));
    buf_append_text(&a->out, "data: [DONE]\n\n");
}

bool openai_chat_handle(struct exchange *x)
{
    static const struct answer_api api = {
        .read = openai_chat_read,
        .whole = openai_chat_whole,
        .open = openai_chat_open,
        .event = openai_chat_event,
        .end = openai_chat_end,
        .close = openai_chat_close,
        .fail = openai_chat_fail,
    };
    return answer_handle(x, &api);
}
