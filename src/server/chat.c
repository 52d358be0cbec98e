/* Owns the messages of a request in their common form. Every API comes through chat_prepare, so
 * that the same conversation gives the same prompt whichever way it came. */
#include "server/chat.h"

#include "base/mem.h"
#include "server/fields.h"
#include "text/refs.h"
#include "text/word.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHAT_LOW_TOKENS = 2048,
    CHAT_MEDIUM_TOKENS = 8192,
    CHAT_MAX_TOOLS = 512,
    CHAT_MAX_NAME = 128
};

void chat_init(struct chat *chat, const struct answer *a)
{
    *chat = (struct chat){.options = {.add_generation_prompt = true,
                                      .enable_thinking = engine_thinks(a->server->engine)}};
}

void chat_free(struct chat *chat)
{
    json_decref(chat->messages);
    json_decref(chat->tools);
    json_decref(chat->head_tools);
    json_decref(chat->schema);
}

const char *chat_skip_volatile(const char *text)
{
    static const char head[] = "x-anthropic-billing-header:";
    while (!strncmp(text, head, sizeof head - 1)) {
        text += strcspn(text, "\n");
        text += strspn(text, "\n");
    }
    return text;
}

static bool chat_check_part(const json_t *part, size_t message, size_t index, struct fault *fault)
{
    const json_t *type = json_object_get(part, "type");
    char where[80];
    snprintf(where, sizeof where, "messages[%zu].content[%zu]", message, index);
    if (!word_is(type, "text"))
        return fault_set(fault, where, "%s: parts of type '%.60s' are not supported; send text",
                         where, word_shown(type));
    if (!json_is_string(json_object_get(part, "text")))
        return fault_set(fault, where, "%s.text must be text", where);
    return true;
}

static bool chat_check_content(json_t *message, size_t index, struct fault *fault)
{
    json_t *content = json_object_get(message, "content");
    const json_t *role = json_object_get(message, "role");
    for (size_t i = 0; json_is_array(content) && i < json_array_size(content); i++)
        if (!chat_check_part(json_array_get(content, i), index, i, fault))
            return false;
    if (!word_is(role, "system") && !word_is(role, "developer"))
        return true;
    json_t *text =
        json_is_array(content) ? json_object_get(json_array_get(content, 0), "text") : content;
    if (json_is_string(text)) {
        const char *old = json_string_value(text), *kept = chat_skip_volatile(old);
        if (kept != old) {
            json_t *copy =
                json_stringn_nocheck(kept, json_string_length(text) - (size_t)(kept - old));
            json_string_setn_nocheck(text, json_string_value(copy), json_string_length(copy));
            json_decref(copy);
        }
    }
    return true;
}

/* The text of a content that has been checked: a string, a list of text parts, or none. */
static void chat_add_content(const json_t *content, struct buf *out)
{
    const json_t *part;
    size_t i;
    if (json_is_string(content))
        buf_append(out, json_string_value(content), json_string_length(content));
    json_array_foreach(content, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        buf_append(out, json_string_value(text), json_string_length(text));
    }
}

/* A history's answers: the thought goes by reasoning_content. An answer that was replayed as one
 * text begins with its think block, which ends where the parser ended it: at the first closing tag.
 * Any other text is taken as it is, also when it speaks of the tags. */
static void chat_tidy_assistant(json_t *message)
{
    static const char open[] = "<think>", close[] = "</think>";
    json_t *thought = json_object_get(message, "reasoning_content");
    struct buf text = {0};
    if (!json_is_string(thought)) {
        thought = json_object_get(message, "reasoning");
        if (json_is_string(thought))
            json_object_set(message, "reasoning_content", thought);
    }
    if (json_is_string(thought))
        return;
    buf_append_text(&text, "");
    chat_add_content(json_object_get(message, "content"), &text);
    const char *p = text.data, *end = p + text.len, *at = NULL;
    while (p < end && isspace((unsigned char)*p))
        p++;
    if ((size_t)(end - p) >= sizeof open - 1 && !memcmp(p, open, sizeof open - 1))
        at = memmem(p, (size_t)(end - p), close, sizeof close - 1);
    if (at) {
        p += sizeof open - 1;
        json_object_set_new(message, "reasoning_content", answer_text(p, (size_t)(at - p)));
        at += sizeof close - 1;
        json_object_set_new(message, "content", answer_text(at, (size_t)(end - at)));
    } else {
        json_object_set_new(message, "reasoning_content", json_string(""));
    }
    buf_free(&text);
}

/* A name that the prompt can hold without ending its tag. */
static bool chat_is_name(const json_t *value)
{
    const char *name = word_text(value);
    if (!name || !*name || json_string_length(value) > CHAT_MAX_NAME)
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && !strchr("_-.:/$", *name))
            return false;
    return true;
}

static bool chat_check_calls(const json_t *message, size_t index, struct fault *fault)
{
    const json_t *calls = fields_get(message, "tool_calls");
    char where[80];
    snprintf(where, sizeof where, "messages[%zu].tool_calls", index);
    if (calls && !json_is_array(calls))
        return fault_set(fault, where, "%s must be a list", where);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);
        if (!chat_is_name(json_object_get(json_object_get(call, "function"), "name")))
            return fault_set(fault, where, "%s[%zu].function.name must be a function's name", where,
                             i);
    }
    return true;
}

json_t *chat_join_text(const json_t *value, const char *where, const char *noun,
                       const char *const *types, struct fault *fault)
{
    struct buf text = {0};
    if (!value || json_is_null(value))
        return json_string("");
    if (json_is_string(value))
        return json_incref((json_t *)value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *part = json_array_get(value, i), *body = json_object_get(part, "text");
        const json_t *type = json_object_get(part, "type");
        size_t t = 0;
        while (types[t] && !word_is(type, types[t]))
            t++;
        if (!types[t] || !json_is_string(body)) {
            fault_set(fault, where, "%s[%zu]: %ss of type '%.60s' are not supported", where, i,
                      noun, word_shown(type));
            buf_free(&text);
            return NULL;
        }
        buf_append(&text, json_string_value(body), json_string_length(body));
    }
    if (!json_is_array(value)) {
        fault_set(fault, where, "%s must be text or a list of %ss", where, noun);
        return NULL;
    }
    json_t *joined = answer_buf_text(&text);
    buf_free(&text);
    return joined;
}

bool chat_check_role(const json_t *message, const char *where, struct fault *fault)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const json_t *role = json_object_get(message, "role");
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (word_is(role, roles[i]))
            return true;
    return fault_set(fault, where,
                     "%s.role is '%.60s'; use system, developer, user, assistant or tool", where,
                     word_shown(role));
}

bool chat_check_messages(json_t *messages, struct fault *fault)
{
    static const struct field fields[] = {
        {"role", FIELD_HONOURED},         {"content", FIELD_HONOURED},
        {"tool_calls", FIELD_HONOURED},   {"reasoning_content", FIELD_HONOURED},
        {"reasoning", FIELD_HONOURED},    {"name", FIELD_IGNORED},
        {"tool_call_id", FIELD_IGNORED},  {"refusal", FIELD_IGNORED},
        {"annotations", FIELD_IGNORED},   {"reasoning_details", FIELD_IGNORED},
        {"cache_control", FIELD_IGNORED}, {"id", FIELD_IGNORED},
        {"audio", FIELD_REFUSED},         {"function_call", FIELD_REFUSED},
        {"prefix", FIELD_REFUSED},        {NULL, 0}};
    if (!json_is_array(messages) || !json_array_size(messages))
        return fault_set(fault, "messages", "'messages' must be a list with at least one message");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *message = json_array_get(messages, i);
        char where[40];
        snprintf(where, sizeof where, "messages[%zu]", i);
        if (!json_is_object(message) || !json_object_get(message, "role"))
            return fault_set(fault, where, "%s must be an object with a role", where);
        if (!chat_check_role(message, where, fault) ||
            !fields_check(message, fields, where, fault) ||
            !chat_check_content(message, i, fault) || !chat_check_calls(message, i, fault))
            return false;
        if (word_is(json_object_get(message, "role"), "assistant"))
            chat_tidy_assistant(message);
    }
    return true;
}

bool chat_check_tools(const json_t *tools, struct fault *fault)
{
    if (json_array_size(tools) > CHAT_MAX_TOOLS)
        return fault_set(fault, "tools", "'tools' has more than %d entries", CHAT_MAX_TOOLS);
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i),
                     *function = json_object_get(tool, "function");
        const json_t *type = json_object_get(tool, "type");
        char where[40];
        snprintf(where, sizeof where, "tools[%zu]", i);
        if (!word_is(type, "function"))
            return fault_set(fault, where, "%s: tools of type '%.60s' are not supported", where,
                             word_shown(type));
        if (!chat_is_name(json_object_get(function, "name")))
            return fault_set(fault, where,
                             "%s.function.name must have 1 to %d letters, digits, or _ - . : / $",
                             where, CHAT_MAX_NAME);
        const json_t *schema = fields_get(function, "parameters");
        if (schema && !json_is_object(schema))
            return fault_set(fault, where, "%s.function.parameters must be a JSON schema", where);
        const json_t *broken = refs_find_broken(schema);
        if (broken)
            return fault_set(
                fault, where, "tool %s: the $ref '%.200s' in its parameters leads to nothing there",
                json_string_value(json_object_get(function, "name")), word_shown(broken));
    }
    return true;
}

static bool chat_has_tool(const struct chat *chat, const char *name)
{
    for (size_t i = 0; i < json_array_size(chat->tools); i++) {
        const json_t *function = json_object_get(json_array_get(chat->tools, i), "function");
        if (word_is(json_object_get(function, "name"), name))
            return true;
    }
    return false;
}

bool chat_read_choice(struct chat *chat, const json_t *value, struct fault *fault)
{
    static const char *const names[] = {"auto", "none", "required"};
    if (!value)
        return true;
    for (int i = 0; i < 3; i++)
        if (word_is(value, names[i])) {
            chat->choice = (enum chat_choice)i;
            if (i == CHAT_REQUIRED && !json_array_size(chat->tools))
                return fault_set(fault, "tool_choice", "'tool_choice' required needs 'tools'");
            return true;
        }
    const json_t *function = json_object_get(value, "function");
    const char *name = word_text(json_object_get(function ? function : value, "name"));
    if (!word_is(json_object_get(value, "type"), "function") || !name)
        return fault_set(fault, "tool_choice",
                         "'tool_choice' must be auto, none, required, or an object that names a "
                         "function");
    if (!chat_has_tool(chat, name))
        return fault_set(fault, "tool_choice",
                         "'tool_choice' names '%.80s', which is not in 'tools'", name);
    chat->choice = CHAT_NAMED;
    chat->name = name;
    return true;
}

bool chat_read_format(struct chat *chat, const json_t *format, const char *where,
                      struct fault *fault)
{
    const json_t *type = json_object_get(format, "type");
    if (!format || word_is(type, "text"))
        return true;
    if (word_is(type, "json_object")) {
        chat->schema = json_pack("{s:s}", "type", "object");
        return true;
    }
    if (!word_is(type, "json_schema"))
        return fault_set(fault, where, "'%s.type' must be text, json_object or json_schema", where);
    const json_t *inner = json_object_get(format, "json_schema");
    json_t *schema = json_object_get(inner ? inner : format, "schema");
    if (!json_is_object(schema))
        return fault_set(fault, where, "'%s' has no schema", where);
    chat->schema = json_incref(schema);
    return true;
}

bool chat_read_effort(struct chat *chat, const json_t *value, const char *where,
                      struct fault *fault)
{
    static const struct {
        const char *name;
        bool think;
        uint32_t tokens;
    } efforts[] = {{"none", false, 0}, {"minimal", false, 0}, {"low", true, CHAT_LOW_TOKENS},
                   {"high", true, 0},  {"xhigh", true, 0},    {"medium", true, CHAT_MEDIUM_TOKENS},
                   {"max", true, 0}};
    if (!value)
        return true;
    for (size_t i = 0; i < sizeof efforts / sizeof *efforts; i++)
        if (word_is(value, efforts[i].name)) {
            chat->options.enable_thinking = efforts[i].think;
            chat->think_tokens = efforts[i].tokens;
            return true;
        }
    return fault_set(fault, where, "'%s' must be none, minimal, low, medium, high, xhigh or max",
                     where);
}

bool chat_read_budget(struct chat *chat, const json_t *object, const char *name,
                      struct fault *fault)
{
    uint64_t n = UINT64_MAX;
    if (!fields_read_uint(object, name, 0, UINT32_MAX, &n, fault))
        return false;
    if (n == UINT64_MAX)
        return true;
    chat->options.enable_thinking = n > 0;
    chat->think_tokens = (uint32_t)n;
    return true;
}

static bool chat_make_grammar(struct chat *chat, struct answer *a, struct fault *fault)
{
    struct err err = {0};
    bool calls = chat->choice == CHAT_REQUIRED || chat->choice == CHAT_NAMED;
    if (calls && !grammar_from_tools(chat->tools, chat->name, !chat->one_call, &a->grammar, &err))
        return fault_set(fault, "tools", "%s", err.text);
    if (calls || !chat->schema)
        return true;
    bool both = json_array_size(chat->tools) && chat->choice == CHAT_AUTO;
    if (both && !grammar_from_either(chat->schema, chat->tools, !chat->one_call, &a->grammar, &err))
        return fault_set(fault, "response_format", "beside tools: %s", err.text);
    if (!both && !grammar_from_schema(chat->schema, &a->grammar, &err))
        return fault_set(fault, "response_format", "%s", err.text);
    return true;
}

bool chat_prepare(struct chat *chat, struct answer *a, struct fault *fault)
{
    struct template_prompt prompt;
    struct err err = {0};
    /* Where no call may be made the model is not told of tools. */
    json_t *known = chat->choice == CHAT_NONE ? NULL : chat->tools;
    const json_t *shown = known && json_array_size(chat->head_tools) ? chat->head_tools : known;
    if (!chat_make_grammar(chat, a, fault))
        return false;
    if (!template_render(chat->messages, shown, &chat->options, &prompt, &err))
        return fault_set(fault, "messages", "%s", err.text);
    a->prompts = mem_new(1, sizeof *a->prompts);
    a->prompt_count = 1;
    struct token_list *ids = &a->prompts[0];
    bool ok =
        template_tokenize(&prompt, engine_tokenizer(a->server->engine), ids, a->keep_at, &err) ||
        fault_from_err(fault, &err);
    a->thinking_open = prompt.thinking_open;
    a->think_tokens = prompt.thinking_open ? chat->think_tokens : 0;
    a->tools = json_incref(known);
    a->one_call = chat->one_call;
    a->no_calls = chat->choice == CHAT_NONE;
    if (a->server->trace && ok)
        trace_write(a->server->trace, a->id, "prompt",
                    json_pack("{s:o,s:I,s:[I,I]}", "text", answer_buf_text(&prompt.text), "tokens",
                              (json_int_t)ids->len, "keep_at", (json_int_t)a->keep_at[0],
                              (json_int_t)a->keep_at[1]));
    template_prompt_free(&prompt);
    return ok;
}
