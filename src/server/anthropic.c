/* Anthropic's replies: content blocks, streamed one after another.
 *
 * Invariant: at most one block is open; block numbers count up from 0 in the order of events. */
#include "server/anthropic.h"

#include "server/body.h"
#include "server/chat.h"
#include "server/request.h"

#include <string.h>

enum { ANTHROPIC_THINKING = 1, ANTHROPIC_TEXT, ANTHROPIC_TOOL };

static bool anthropic_read_all(struct answer *a, struct chat *chat, struct fault *fault)
{
    static const char *const limits[] = {"max_tokens", NULL};
    if (!fields_check(a->body, anthropic_fields, NULL, fault) || !request_read_head(a, fault) ||
        !anthropic_read_chat(a, chat, fault) ||
        !request_read_sampling(a, chat->options.enable_thinking, fault) ||
        !request_read_stops(a, "stop_sequences", fault) || !request_read_limit(a, limits, fault))
        return false;
    if (!a->max_tokens)
        return fault_set(fault, "max_tokens", "max_tokens: Field required");
    return chat_prepare(chat, a, fault);
}

static bool anthropic_read(struct answer *a, struct fault *fault)
{
    struct chat chat;
    chat_init(&chat, a);
    answer_make_id("msg_", a->id, sizeof a->id);
    bool ok = anthropic_read_all(a, &chat, fault);
    chat_free(&chat);
    return ok;
}

static const char *anthropic_finish(const struct choice *c)
{
    if (c->finish == FINISH_LENGTH)
        return "max_tokens";
    if (c->call_count)
        return "tool_use";
    return c->stop ? "stop_sequence" : "end_turn";
}

/* input_tokens are those that were read; what the cache gave is counted beside them. */
static json_t *anthropic_usage(const struct answer *a)
{
    struct answer_usage u = answer_count(a);
    return json_pack("{s:I,s:I,s:I,s:I}", "input_tokens", (json_int_t)(u.prompt - u.cached),
                     "cache_creation_input_tokens", (json_int_t)0, "cache_read_input_tokens",
                     (json_int_t)u.cached, "output_tokens", (json_int_t)u.completion);
}

static json_t *anthropic_stop_text(const struct choice *c)
{
    return c->stop ? json_string(c->stop) : json_null();
}

static void anthropic_tool_id(const struct answer_call *call, char *out, size_t size)
{
    snprintf(out, size, "toolu_%s", call->id + strlen("call_"));
}

static json_t *anthropic_message(const struct answer *a, json_t *content, json_t *reason,
                                 json_t *stop)
{
    return json_pack("{s:s,s:s,s:s,s:s,s:o,s:o,s:o,s:o}", "id", a->id, "type", "message", "role",
                     "assistant", "model", a->model, "content", content, "stop_reason", reason,
                     "stop_sequence", stop, "usage", anthropic_usage(a));
}

static void anthropic_whole(struct answer *a, struct buf *out)
{
    const struct choice *c = &a->choices[0];
    json_t *content = json_array();
    if (c->reasoning.len)
        json_array_append_new(content,
                              json_pack("{s:s,s:o,s:s}", "type", "thinking", "thinking",
                                        answer_buf_text(&c->reasoning), "signature", a->id));
    if (c->content.len)
        json_array_append_new(
            content, json_pack("{s:s,s:o}", "type", "text", "text", answer_buf_text(&c->content)));
    for (size_t i = 0; i < c->call_count; i++) {
        char id[48];
        anthropic_tool_id(&c->calls[i], id, sizeof id);
        const struct buf *text = &c->calls[i].arguments;
        json_t *input = json_loadb(text->data ? text->data : "", text->len, JSON_ALLOW_NUL, NULL);
        json_array_append_new(content, json_pack("{s:s,s:s,s:o,s:o}", "type", "tool_use", "id", id,
                                                 "name", answer_buf_text(&c->calls[i].name),
                                                 "input", input ? input : json_object()));
    }
    answer_write_json(out, anthropic_message(a, content, json_string(anthropic_finish(c)),
                                             anthropic_stop_text(c)));
}

static void anthropic_open(struct answer *a)
{
    json_t *message = anthropic_message(a, json_array(), json_null(), json_null());
    answer_send(a, "message_start",
                json_pack("{s:s,s:o}", "type", "message_start", "message", message));
    answer_send(a, "ping", json_pack("{s:s}", "type", "ping"));
}

static void anthropic_delta(struct answer *a, json_t *delta)
{
    answer_send(a, "content_block_delta",
                json_pack("{s:s,s:I,s:o}", "type", "content_block_delta", "index",
                          (json_int_t)a->block, "delta", delta));
}

static void anthropic_close_block(struct answer *a)
{
    if (!a->block_open)
        return;
    if (a->block_kind == ANTHROPIC_THINKING)
        anthropic_delta(a, json_pack("{s:s,s:s}", "type", "signature_delta", "signature", a->id));
    answer_send(
        a, "content_block_stop",
        json_pack("{s:s,s:I}", "type", "content_block_stop", "index", (json_int_t)a->block));
    a->block++;
    a->block_open = false;
}

static void anthropic_open_block(struct answer *a, int kind, json_t *block)
{
    anthropic_close_block(a);
    a->block_open = true;
    a->block_kind = kind;
    answer_send(a, "content_block_start",
                json_pack("{s:s,s:I,s:o}", "type", "content_block_start", "index",
                          (json_int_t)a->block, "content_block", block));
}

static void anthropic_begin_call(struct choice *c, const struct parser_event *event)
{
    char id[48];
    anthropic_tool_id(&c->calls[event->call], id, sizeof id);
    anthropic_open_block(c->answer, ANTHROPIC_TOOL,
                         json_pack("{s:s,s:s,s:o,s:{}}", "type", "tool_use", "id", id, "name",
                                   answer_text(event->text, event->len), "input"));
}

static void anthropic_event(struct choice *c, const struct parser_event *event)
{
    struct answer *a = c->answer;
    switch (event->kind) {
    case PARSER_REASONING:
        if (!a->block_open || a->block_kind != ANTHROPIC_THINKING)
            anthropic_open_block(
                a, ANTHROPIC_THINKING,
                json_pack("{s:s,s:s,s:s}", "type", "thinking", "thinking", "", "signature", ""));
        anthropic_delta(a, json_pack("{s:s,s:o}", "type", "thinking_delta", "thinking",
                                     answer_text(event->text, event->len)));
        break;
    case PARSER_CONTENT:
        if (!a->block_open || a->block_kind != ANTHROPIC_TEXT)
            anthropic_open_block(a, ANTHROPIC_TEXT,
                                 json_pack("{s:s,s:s}", "type", "text", "text", ""));
        anthropic_delta(a, json_pack("{s:s,s:o}", "type", "text_delta", "text",
                                     answer_text(event->text, event->len)));
        break;
    case PARSER_CALL_BEGIN:
        anthropic_begin_call(c, event);
        break;
    case PARSER_CALL_ARGS:
        anthropic_delta(a, json_pack("{s:s,s:o}", "type", "input_json_delta", "partial_json",
                                     answer_text(event->text, event->len)));
        break;
    case PARSER_CALL_END:
        anthropic_close_block(a);
        break;
    }
}

static void anthropic_end(struct choice *c)
{
    struct answer *a = c->answer;
    anthropic_close_block(a);
    answer_send(a, "message_delta",
                json_pack("{s:s,s:{s:s,s:o},s:o}", "type", "message_delta", "delta", "stop_reason",
                          anthropic_finish(c), "stop_sequence", anthropic_stop_text(c), "usage",
                          anthropic_usage(a)));
}

static void anthropic_close(struct answer *a)
{
    answer_send(a, "message_stop", json_pack("{s:s}", "type", "message_stop"));
}

static void anthropic_fail(struct answer *a, const struct fault *fault)
{
    answer_send(a, "error", fault_anthropic_json(fault));
}

bool anthropic_handle(struct exchange *x)
{
    static const struct answer_api api = {
        .read = anthropic_read,
        .whole = anthropic_whole,
        .open = anthropic_open,
        .event = anthropic_event,
        .end = anthropic_end,
        .close = anthropic_close,
        .fail = anthropic_fail,
    };
    return answer_handle(x, &api);
}

static bool anthropic_read_count(struct answer *a, struct fault *fault)
{
    struct chat chat;
    chat_init(&chat, a);
    bool ok = fields_check(a->body, anthropic_fields, NULL, fault) &&
              anthropic_read_chat(a, &chat, fault) && chat_prepare(&chat, a, fault);
    chat_free(&chat);
    return ok;
}

bool anthropic_handle_count(struct exchange *x)
{
    struct fault fault = {0};
    struct answer *a = answer_read_only(x, anthropic_read_count, &fault);
    if (!a)
        return exchange_reply_fault(x, &fault);
    return exchange_reply_json(x, 200,
                               json_pack("{s:I}", "input_tokens", (json_int_t)a->prompts[0].len));
}
