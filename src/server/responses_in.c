/* The items of a Responses request to messages in the common form. What one answer consists of,
 * a thought, a text and calls, comes as items of their own here and is put together again, since
 * the prompt has them in one turn. */
#include "server/responses.h"

#include "server/chat.h"
#include "server/request.h"
#include "text/word.h"

#include <stdio.h>
#include <string.h>

static const char responses_mark[] = "calla1:";

const struct field responses_fields[] = {
    {"input", FIELD_HONOURED},
    {"instructions", FIELD_HONOURED},
    {"model", FIELD_HONOURED},
    {"stream", FIELD_HONOURED},
    {"max_output_tokens", FIELD_HONOURED},
    {"temperature", FIELD_HONOURED},
    {"top_p", FIELD_HONOURED},
    {"top_k", FIELD_HONOURED},
    {"min_p", FIELD_HONOURED},
    {"presence_penalty", FIELD_HONOURED},
    {"frequency_penalty", FIELD_HONOURED},
    {"seed", FIELD_HONOURED},
    {"tools", FIELD_HONOURED},
    {"tool_choice", FIELD_HONOURED},
    {"parallel_tool_calls", FIELD_HONOURED},
    {"reasoning", FIELD_HONOURED},
    {"text", FIELD_HONOURED},
    {"include", FIELD_IGNORED},
    {"store", FIELD_IGNORED},
    {"stream_options", FIELD_IGNORED},
    {"metadata", FIELD_IGNORED},
    {"client_metadata", FIELD_IGNORED},
    {"user", FIELD_IGNORED},
    {"safety_identifier", FIELD_IGNORED},
    {"prompt_cache_key", FIELD_IGNORED},
    {"prompt_cache_retention", FIELD_IGNORED},
    {"prompt_cache_options", FIELD_IGNORED},
    {"service_tier", FIELD_IGNORED},
    {"truncation", FIELD_IGNORED},
    {"max_tool_calls", FIELD_IGNORED},
    {"previous_response_id", FIELD_REFUSED},
    {"conversation", FIELD_REFUSED},
    {"background", FIELD_REFUSED},
    {"prompt", FIELD_REFUSED},
    {"top_logprobs", FIELD_REFUSED},
    {"access_programs", FIELD_REFUSED},
    {"background_options", FIELD_REFUSED},
    {"context_management", FIELD_REFUSED},
    {"image", FIELD_REFUSED},
    {"moderation", FIELD_REFUSED},
    {NULL, 0},
};

json_t *responses_wrap_thought(const struct buf *text)
{
    struct buf out = {0};
    buf_append_text(&out, responses_mark);
    for (size_t i = 0; i < text->len; i++)
        buf_printf(&out, "%02x", (unsigned char)text->data[i]);
    json_t *value = answer_buf_text(&out);
    buf_free(&out);
    return value;
}

/* The thought in encrypted_content, or null when it is not one of ours. */
static json_t *responses_unwrap_thought(const json_t *value)
{
    static const char digits[] = "0123456789abcdef";
    const char *p = word_text(value), *hi, *lo;
    struct buf out = {0};
    if (!p || strncmp(p, responses_mark, sizeof responses_mark - 1) != 0)
        return NULL;
    for (p += sizeof responses_mark - 1; p[0] && p[1]; p += 2) {
        if (!(hi = strchr(digits, p[0])) || !(lo = strchr(digits, p[1])))
            break;
        buf_append_char(&out, (char)((hi - digits) << 4 | (lo - digits)));
    }
    json_t *text = answer_buf_text(&out);
    buf_free(&out);
    return text;
}

/* Text of a string or of a list of text parts. */
static json_t *responses_read_text(const json_t *value, const char *where, struct fault *fault)
{
    static const char *const types[] = {"input_text",     "output_text",  "text",
                                        "reasoning_text", "summary_text", NULL};
    return chat_join_text(value, where, "part", types, fault);
}

/* The answer that is being put together: the last message when it is the assistant's and does not
 * have what comes yet. */
static json_t *responses_open_answer(struct chat *chat, const char *lacking)
{
    json_t *last = json_array_get(chat->messages, json_array_size(chat->messages) - 1);
    bool calls = json_object_get(last, "tool_calls") != NULL;
    bool text = json_string_length(json_object_get(last, "content")) > 0;
    bool fits = word_is(json_object_get(last, "role"), "assistant") &&
                (!strcmp(lacking, "call") || (!calls && !text));
    if (!fits) {
        last = json_pack("{s:s,s:s}", "role", "assistant", "content", "");
        json_array_append_new(chat->messages, last);
    }
    return last;
}

static bool responses_add_message(struct chat *chat, const json_t *item, const char *where,
                                  struct fault *fault)
{
    json_t *role = json_object_get(item, "role");
    if (!chat_check_role(item, where, fault))
        return false;
    json_t *text = responses_read_text(json_object_get(item, "content"), where, fault);
    if (!text)
        return false;
    if (word_is(role, "assistant"))
        json_object_set_new(responses_open_answer(chat, "text"), "content", text);
    else
        json_array_append_new(chat->messages,
                              json_pack("{s:O,s:o}", "role", role, "content", text));
    return true;
}

/* The name by which the model knows a function of a namespace. */
static json_t *responses_join_name(const char *space, const char *name)
{
    size_t n = strlen(space);
    bool joined = n >= 2 && !strcmp(space + n - 2, "__");
    return json_sprintf("%s%s%s", space, joined ? "" : "__", name);
}

void responses_split_name(const json_t *tools, json_t *item)
{
    const char *called = json_string_value(json_object_get(item, "name"));
    for (size_t i = 0; called && i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *inner = json_object_get(tool, "tools");
        const char *space = word_text(json_object_get(tool, "name"));
        for (size_t k = 0; space && k < json_array_size(inner); k++) {
            json_t *name = json_object_get(json_array_get(inner, k), "name");
            json_t *joined = responses_join_name(space, json_string_value(name));
            bool same = !strcmp(called, json_string_value(joined));
            json_decref(joined);
            if (same) {
                json_object_set(item, "name", name);
                json_object_set_new(item, "namespace", json_string(space));
                return;
            }
        }
    }
}

static bool responses_add_call(struct chat *chat, const json_t *item, const char *where,
                               struct fault *fault)
{
    json_t *name = json_object_get(item, "name"), *text = json_object_get(item, "arguments");
    if (!word_text(name) || (text && !json_is_string(text)))
        return fault_set(fault, where, "%s needs a name and arguments as text", where);
    if (fields_get(item, "namespace") && !word_text(fields_get(item, "namespace")))
        return fault_set(fault, where, "%s.namespace must be a name", where);
    json_t *answer = responses_open_answer(chat, "call"),
           *calls = json_object_get(answer, "tool_calls");
    const char *space = word_text(json_object_get(item, "namespace"));
    if (!calls)
        json_object_set_new(answer, "tool_calls", calls = json_array());
    json_array_append_new(
        calls,
        json_pack("{s:s,s:{s:o,s:o}}", "type", "function", "function", "name",
                  space ? responses_join_name(space, json_string_value(name)) : json_incref(name),
                  "arguments", text ? json_incref(text) : json_string("")));
    return true;
}

static bool responses_add_thought(struct chat *chat, const json_t *item, const char *where,
                                  struct fault *fault)
{
    json_t *text = responses_unwrap_thought(json_object_get(item, "encrypted_content"));
    if (!text)
        text = responses_read_text(json_object_get(item, "content"), where, fault);
    if (!text)
        return false;
    if (json_string_length(text))
        json_object_set(responses_open_answer(chat, "thought"), "reasoning_content", text);
    json_decref(text);
    return true;
}

static bool responses_add_item(struct chat *chat, const json_t *item, size_t index,
                               struct fault *fault)
{
    const json_t *type = fields_get(item, "type");
    char where[40];
    snprintf(where, sizeof where, "input[%zu]", index);
    if ((!type && json_object_get(item, "role")) || word_is(type, "message"))
        return responses_add_message(chat, item, where, fault);
    if (word_is(type, "function_call"))
        return responses_add_call(chat, item, where, fault);
    if (word_is(type, "reasoning"))
        return responses_add_thought(chat, item, where, fault);
    if (word_is(type, "function_call_output")) {
        json_t *text = responses_read_text(json_object_get(item, "output"), where, fault);
        if (text)
            json_array_append_new(chat->messages,
                                  json_pack("{s:s,s:o}", "role", "tool", "content", text));
        return text != NULL;
    }
    return fault_set(fault, where, "%s: items of type '%.60s' are not supported", where,
                     word_shown(type));
}

static bool responses_read_input(struct answer *a, struct chat *chat, struct fault *fault)
{
    const json_t *input = fields_get(a->body, "input");
    json_t *told;
    if (!fields_read_typed(a->body, "instructions", JSON_STRING, &told, fault))
        return false;
    if (told && json_string_length(told))
        json_array_append_new(chat->messages,
                              json_pack("{s:s,s:O}", "role", "system", "content", told));
    if (json_is_string(input)) {
        json_array_append_new(chat->messages,
                              json_pack("{s:s,s:O}", "role", "user", "content", input));
        return true;
    }
    if (!json_is_array(input) || !json_array_size(input))
        return fault_set(fault, "input", "'input' must be text or a list of items");
    for (size_t i = 0; i < json_array_size(input); i++)
        if (!responses_add_item(chat, json_array_get(input, i), i, fault))
            return false;
    return true;
}

/* Functions become tools. Searches that OpenAI would run are left out: Codex lists them by default,
 * and a model that is not told of a tool does not call it. */
static void responses_add_tool(struct chat *chat, const json_t *tool, const char *space)
{
    static const char *const kept[] = {"name", "description", "parameters", "strict"};
    json_t *function = json_object();
    for (size_t k = 0; k < sizeof kept / sizeof *kept; k++)
        if (fields_get(tool, kept[k]))
            json_object_set(function, kept[k], json_object_get(tool, kept[k]));
    const char *name = word_text(json_object_get(function, "name"));
    if (space && name)
        json_object_set_new(function, "name", responses_join_name(space, name));
    json_array_append_new(chat->tools,
                          json_pack("{s:s,s:o}", "type", "function", "function", function));
}

static bool responses_read_tool(struct chat *chat, const json_t *tool, size_t index,
                                struct fault *fault)
{
    const json_t *type = json_object_get(tool, "type"), *inner = json_object_get(tool, "tools");
    const char *space = word_text(json_object_get(tool, "name"));
    if (word_is(type, "function"))
        responses_add_tool(chat, tool, NULL);
    if (word_is(type, "function") || !strncmp(word_shown(type), "web_search", 10))
        return true;
    if (!word_is(type, "namespace"))
        return fault_set(fault, "tools", "tools[%zu]: tools of type '%.60s' are not supported",
                         index, word_shown(type));
    if (!space || !json_is_array(inner))
        return fault_set(fault, "tools", "tools[%zu]: a namespace needs a name and tools", index);
    for (size_t i = 0; i < json_array_size(inner); i++) {
        const json_t *one = json_array_get(inner, i);
        const json_t *kind = json_object_get(one, "type");
        if (!word_is(kind, "function"))
            return fault_set(fault, "tools",
                             "tools[%zu].tools[%zu]: tools of type '%.60s' are not supported",
                             index, i, word_shown(kind));
        responses_add_tool(chat, one, space);
    }
    return true;
}

static bool responses_read_tools(struct answer *a, struct chat *chat, struct fault *fault)
{
    json_t *tools;
    if (!fields_read_typed(a->body, "tools", JSON_ARRAY, &tools, fault))
        return false;
    if (!tools)
        return true;
    chat->tools = json_array();
    for (size_t i = 0; i < json_array_size(tools); i++)
        if (!responses_read_tool(chat, json_array_get(tools, i), i, fault))
            return false;
    return chat_check_tools(chat->tools, fault);
}

static bool responses_read_rest(struct answer *a, struct chat *chat, struct fault *fault)
{
    static const struct field reasoning_fields[] = {{"effort", FIELD_HONOURED},
                                                    {"max_tokens", FIELD_HONOURED},
                                                    {"summary", FIELD_IGNORED},
                                                    {"generate_summary", FIELD_IGNORED},
                                                    {"context", FIELD_IGNORED},
                                                    {"mode", FIELD_IGNORED},
                                                    {NULL, 0}};
    static const struct field text_fields[] = {
        {"format", FIELD_HONOURED}, {"verbosity", FIELD_IGNORED}, {NULL, 0}};
    json_t *reasoning, *text;
    bool parallel = true;
    if (!fields_read_typed(a->body, "reasoning", JSON_OBJECT, &reasoning, fault) ||
        !fields_read_typed(a->body, "text", JSON_OBJECT, &text, fault) ||
        !fields_check(reasoning, reasoning_fields, "reasoning", fault) ||
        !fields_check(text, text_fields, "text", fault) ||
        !chat_read_effort(chat, fields_get(reasoning, "effort"), "reasoning.effort", fault) ||
        !chat_read_budget(chat, reasoning, "max_tokens", fault) ||
        !chat_read_format(chat, fields_get(text, "format"), "text.format", fault) ||
        !fields_read_bool(a->body, "parallel_tool_calls", &parallel, fault) ||
        !chat_read_choice(chat, fields_get(a->body, "tool_choice"), fault))
        return false;
    chat->one_call = !parallel || chat->choice == CHAT_NAMED;
    return true;
}

bool responses_read_chat(struct answer *a, struct chat *chat, struct fault *fault)
{
    chat->messages = json_array();
    return responses_read_input(a, chat, fault) && chat_check_messages(chat->messages, fault) &&
           responses_read_tools(a, chat, fault) && responses_read_rest(a, chat, fault);
}
