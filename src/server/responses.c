/* OpenAI's Responses: output items, streamed one after another.
 *
 * Invariant: a->items holds the items that are complete, in order; at most one more is open, and
 * its index is json_array_size(a->items). */
#include "server/responses.h"

#include "server/chat.h"
#include "server/request.h"

#include <stdio.h>
#include <string.h>

enum { RESPONSES_REASONING = 1, RESPONSES_MESSAGE, RESPONSES_CALL };

static bool responses_read(struct answer *a, struct fault *fault)
{
    static const char *const limits[] = {"max_output_tokens", NULL};
    struct chat chat;
    chat_init(&chat, a);
    answer_make_id("resp_", a->id, sizeof a->id);
    a->items = json_array();
    bool ok = fields_check(a->body, responses_fields, NULL, fault) && request_read_head(a, fault) &&
              responses_read_chat(a, &chat, fault) &&
              request_read_sampling(a, chat.options.enable_thinking, fault) &&
              request_read_limit(a, limits, fault) && chat_prepare(&chat, a, fault);
    chat_free(&chat);
    return ok;
}

static json_t *responses_usage(const struct answer *a)
{
    struct answer_usage u = answer_count(a);
    return json_pack("{s:I,s:{s:I},s:I,s:{s:I},s:I}", "input_tokens", (json_int_t)u.prompt,
                     "input_tokens_details", "cached_tokens", (json_int_t)u.cached, "output_tokens",
                     (json_int_t)u.completion, "output_tokens_details", "reasoning_tokens",
                     (json_int_t)u.reasoning, "total_tokens",
                     (json_int_t)(u.prompt + u.completion));
}

/* A field of the request, or a default, for the response object that repeats it. */
static json_t *responses_echo(const struct answer *a, const char *name, json_t *fallback)
{
    const json_t *value = fields_get(a->body, name);
    if (!value)
        return fallback;
    json_decref(fallback);
    return json_incref((json_t *)value);
}

static json_t *responses_object(const struct answer *a, const char *status, json_t *error)
{
    bool ended = a->count && a->ended == a->count;
    bool cut = !strcmp(status, "incomplete");
    json_t *r = json_pack("{s:s,s:s,s:I,s:s,s:s,s:o,s:o,s:O}", "id", a->id, "object", "response",
                          "created_at", (json_int_t)a->created, "status", status, "model", a->model,
                          "error", error, "incomplete_details",
                          cut ? json_pack("{s:s}", "reason", "max_output_tokens") : json_null(),
                          "output", a->items);
    json_object_set_new(r, "usage", ended ? responses_usage(a) : json_null());
    json_object_set_new(r, "instructions", responses_echo(a, "instructions", json_null()));
    json_object_set_new(r, "metadata", responses_echo(a, "metadata", json_object()));
    json_object_set_new(r, "tools", responses_echo(a, "tools", json_array()));
    json_object_set_new(r, "tool_choice", responses_echo(a, "tool_choice", json_string("auto")));
    json_object_set_new(r, "parallel_tool_calls",
                        responses_echo(a, "parallel_tool_calls", json_true()));
    json_object_set_new(r, "max_output_tokens",
                        responses_echo(a, "max_output_tokens", json_null()));
    json_object_set_new(r, "reasoning", responses_echo(a, "reasoning", json_object()));
    json_object_set_new(
        r, "text", responses_echo(a, "text", json_pack("{s:{s:s}}", "format", "type", "text")));
    json_object_set_new(r, "temperature",
                        responses_echo(a, "temperature", answer_float(a->sampling.temperature)));
    json_object_set_new(r, "top_p", responses_echo(a, "top_p", answer_float(a->sampling.top_p)));
    json_object_set_new(r, "store", json_false());
    json_object_set_new(r, "previous_response_id", json_null());
    json_object_set_new(r, "truncation", json_string("disabled"));
    return r;
}

static void responses_send(struct answer *a, const char *type, json_t *data)
{
    json_object_set_new(data, "type", json_string(type));
    json_object_set_new(data, "sequence_number", json_integer((json_int_t)a->sequence++));
    answer_send(a, type, data);
}

static void responses_item_id(const struct answer *a, char *out, size_t size)
{
    static const char *const heads[] = {"", "rs", "msg", "fc"};
    snprintf(out, size, "%s_%s_%zu", heads[a->block_kind], a->id + strlen("resp_"),
             json_array_size(a->items));
}

static json_t *responses_reasoning_item(const struct answer *a, const struct buf *text)
{
    char id[64];
    responses_item_id(a, id, sizeof id);
    return json_pack("{s:s,s:s,s:[],s:[{s:s,s:o}],s:o,s:s}", "id", id, "type", "reasoning",
                     "summary", "content", "type", "reasoning_text", "text", answer_buf_text(text),
                     "encrypted_content", responses_wrap_thought(text), "status", "completed");
}

static json_t *responses_text_part(const struct buf *text)
{
    return json_pack("{s:s,s:o,s:[],s:[]}", "type", "output_text", "text", answer_buf_text(text),
                     "annotations", "logprobs");
}

static json_t *responses_message_item(const struct answer *a, const struct buf *text, bool done)
{
    char id[64];
    responses_item_id(a, id, sizeof id);
    json_t *content = json_array();
    if (done)
        json_array_append_new(content, responses_text_part(text));
    return json_pack("{s:s,s:s,s:s,s:s,s:o}", "id", id, "type", "message", "status",
                     done ? "completed" : "in_progress", "role", "assistant", "content", content);
}

static json_t *responses_call_item(const struct answer *a, const struct answer_call *call,
                                   bool done)
{
    char id[64];
    responses_item_id(a, id, sizeof id);
    json_t *item = json_pack("{s:s,s:s,s:s,s:o,s:s,s:o}", "id", id, "type", "function_call",
                             "status", done ? "completed" : "in_progress", "name",
                             answer_buf_text(&call->name), "call_id", call->id, "arguments",
                             done ? answer_buf_text(&call->arguments) : json_string(""));
    responses_split_name(json_object_get(a->body, "tools"), item);
    return item;
}

/* {"item_id", "output_index", "content_index"} and what follows them in `more`. */
static json_t *responses_at(const struct answer *a, bool content, json_t *more)
{
    char id[64];
    responses_item_id(a, id, sizeof id);
    json_t *at = json_pack("{s:s,s:I}", "item_id", id, "output_index",
                           (json_int_t)json_array_size(a->items));
    if (content)
        json_object_set_new(at, "content_index", json_integer(0));
    json_object_update(at, more);
    json_decref(more);
    return at;
}

static void responses_send_item(struct answer *a, const char *type, const json_t *item)
{
    responses_send(a, type,
                   json_pack("{s:I,s:O}", "output_index", (json_int_t)json_array_size(a->items),
                             "item", item));
}

/* The open item is complete: its closing events, and it joins the others. */
static void responses_close_item(struct choice *c)
{
    struct answer *a = c->answer;
    json_t *item;
    if (!a->block_open)
        return;
    struct buf *prefix = &a->prefix; /* the text of the open item */
    if (a->block_kind == RESPONSES_REASONING) {
        responses_send(a, "response.reasoning_text.done",
                       responses_at(a, true, json_pack("{s:o}", "text", answer_buf_text(prefix))));
        item = responses_reasoning_item(a, prefix);
    } else if (a->block_kind == RESPONSES_MESSAGE) {
        responses_send(
            a, "response.output_text.done",
            responses_at(a, true,
                         json_pack("{s:o,s:[]}", "text", answer_buf_text(prefix), "logprobs")));
        responses_send(
            a, "response.content_part.done",
            responses_at(a, true, json_pack("{s:o}", "part", responses_text_part(prefix))));
        item = responses_message_item(a, prefix, true);
    } else {
        const struct answer_call *call = &c->calls[c->call_count - 1];
        item = responses_call_item(a, call, true);
        responses_send(
            a, "response.function_call_arguments.done",
            responses_at(a, false,
                         json_pack("{s:O,s:O}", "arguments", json_object_get(item, "arguments"),
                                   "name", json_object_get(item, "name"))));
    }
    responses_send_item(a, "response.output_item.done", item);
    json_array_append_new(a->items, item);
    a->block_open = false;
    buf_clear(prefix);
}

static void responses_open_item(struct choice *c, int kind)
{
    struct answer *a = c->answer;
    json_t *item;
    if (a->block_open && a->block_kind == kind && kind != RESPONSES_CALL)
        return;
    responses_close_item(c);
    a->block_open = true;
    a->block_kind = kind;
    struct buf none = {0};
    if (kind == RESPONSES_CALL) {
        item = responses_call_item(a, &c->calls[c->call_count - 1], false);
    } else if (kind == RESPONSES_MESSAGE) {
        item = responses_message_item(a, &none, false);
    } else {
        item = responses_reasoning_item(a, &none);
        json_object_set_new(item, "content", json_array());
        json_object_set_new(item, "encrypted_content", json_null());
        json_object_set_new(item, "status", json_string("in_progress"));
    }
    responses_send_item(a, "response.output_item.added", item);
    json_decref(item);
    if (kind == RESPONSES_MESSAGE)
        responses_send(
            a, "response.content_part.added",
            responses_at(a, true, json_pack("{s:o}", "part", responses_text_part(&none))));
}

static void responses_event(struct choice *c, const struct parser_event *event)
{
    struct answer *a = c->answer;
    json_t *delta = json_pack("{s:o}", "delta", answer_text(event->text, event->len));
    switch (event->kind) {
    case PARSER_REASONING:
        responses_open_item(c, RESPONSES_REASONING);
        buf_append(&a->prefix, event->text, event->len);
        responses_send(a, "response.reasoning_text.delta",
                       responses_at(a, true, json_incref(delta)));
        break;
    case PARSER_CONTENT:
        responses_open_item(c, RESPONSES_MESSAGE);
        buf_append(&a->prefix, event->text, event->len);
        json_object_set_new(delta, "logprobs", json_array());
        responses_send(a, "response.output_text.delta", responses_at(a, true, json_incref(delta)));
        break;
    case PARSER_CALL_BEGIN:
        responses_open_item(c, RESPONSES_CALL);
        break;
    case PARSER_CALL_ARGS:
        responses_send(a, "response.function_call_arguments.delta",
                       responses_at(a, false, json_incref(delta)));
        break;
    case PARSER_CALL_END:
        responses_close_item(c);
        break;
    }
    json_decref(delta);
}

static void responses_open(struct answer *a)
{
    static const char *const events[] = {"response.created", "response.in_progress"};
    for (int i = 0; i < 2; i++)
        responses_send(
            a, events[i],
            json_pack("{s:o}", "response", responses_object(a, "in_progress", json_null())));
}

static void responses_end(struct choice *c)
{
    responses_close_item(c);
}

static const char *responses_status(const struct answer *a)
{
    return a->choices[0].finish == FINISH_LENGTH ? "incomplete" : "completed";
}

static void responses_close(struct answer *a)
{
    char type[40];
    snprintf(type, sizeof type, "response.%s", responses_status(a));
    responses_send(
        a, type,
        json_pack("{s:o}", "response", responses_object(a, responses_status(a), json_null())));
}

static void responses_fail(struct answer *a, const struct fault *fault)
{
    json_t *error = json_pack("{s:s,s:s}", "code", fault->code ? fault->code : "server_error",
                              "message", fault->text);
    responses_send(a, "response.failed",
                   json_pack("{s:o}", "response", responses_object(a, "failed", error)));
}

static void responses_whole(struct answer *a, struct buf *out)
{
    const struct choice *c = &a->choices[0];
    a->block_kind = RESPONSES_REASONING;
    if (c->reasoning.len)
        json_array_append_new(a->items, responses_reasoning_item(a, &c->reasoning));
    a->block_kind = RESPONSES_MESSAGE;
    if (c->content.len)
        json_array_append_new(a->items, responses_message_item(a, &c->content, true));
    a->block_kind = RESPONSES_CALL;
    for (size_t i = 0; i < c->call_count; i++)
        json_array_append_new(a->items, responses_call_item(a, &c->calls[i], true));
    answer_write_json(out, responses_object(a, responses_status(a), json_null()));
}

bool responses_handle(struct exchange *x)
{
    static const struct answer_api api = {
        .read = responses_read,
        .whole = responses_whole,
        .open = responses_open,
        .event = responses_event,
        .end = responses_end,
        .close = responses_close,
        .fail = responses_fail,
    };
    return answer_handle(x, &api);
}
