/* Anthropic's messages to the common form: blocks become texts, thoughts, calls and tool results.
 * Volatile head lines go here, as they come in a system block of their own. */
#include "server/anthropic.h"

#include "server/chat.h"
#include "server/request.h"
#include "text/word.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ANTHROPIC_MAX_TOLD = 512, ANTHROPIC_MAX_TOLD_BYTES = 8 << 20 };

const struct field anthropic_fields[] = {
    {"model", FIELD_HONOURED},
    {"messages", FIELD_HONOURED},
    {"system", FIELD_HONOURED},
    {"max_tokens", FIELD_HONOURED},
    {"stream", FIELD_HONOURED},
    {"stop_sequences", FIELD_HONOURED},
    {"temperature", FIELD_HONOURED},
    {"top_p", FIELD_HONOURED},
    {"top_k", FIELD_HONOURED},
    {"tools", FIELD_HONOURED},
    {"tool_choice", FIELD_HONOURED},
    {"thinking", FIELD_HONOURED},
    {"output_config", FIELD_HONOURED},
    {"output_format", FIELD_HONOURED},
    {"metadata", FIELD_IGNORED},
    {"service_tier", FIELD_IGNORED},
    {"cache_control", FIELD_IGNORED},
    {"context_management", FIELD_IGNORED},
    {"betas", FIELD_IGNORED},
    {"inference_geo", FIELD_IGNORED},
    {"diagnostics", FIELD_IGNORED},
    {"speed", FIELD_IGNORED},
    {"user_profile_id", FIELD_IGNORED},
    {"workspace_id", FIELD_IGNORED},
    {"container", FIELD_REFUSED},
    {"mcp_servers", FIELD_REFUSED},
    {NULL, 0},
};

static const json_t *anthropic_type(const json_t *block)
{
    return json_object_get(block, "type");
}

/* The system prompt: its blocks joined by newlines, without the volatile ones. */
static bool anthropic_read_system(struct chat *chat, const json_t *system, struct fault *fault)
{
    struct buf text = {0};
    if (!system)
        return true;
    if (!json_is_string(system) && !json_is_array(system))
        return fault_set(fault, "system", "'system' must be text or a list of blocks");
    size_t count = json_is_array(system) ? json_array_size(system) : 1;
    for (size_t i = 0; i < count; i++) {
        const json_t *block = json_array_get(system, i);
        const json_t *part = json_is_string(system) ? system : json_object_get(block, "text");
        if (!json_is_string(part) || (block && !word_is(anthropic_type(block), "text"))) {
            buf_free(&text);
            return fault_set(fault, "system",
                             "system[%zu]: blocks of type '%.60s' are not "
                             "supported",
                             i, word_shown(anthropic_type(block)));
        }
        const char *kept = chat_skip_volatile(json_string_value(part));
        size_t n = json_string_length(part) - (size_t)(kept - json_string_value(part));
        if (n && text.len)
            buf_append_text(&text, "\n");
        buf_append(&text, kept, n);
    }
    if (text.len)
        json_array_append_new(chat->messages, json_pack("{s:s,s:o}", "role", "system", "content",
                                                        answer_buf_text(&text)));
    buf_free(&text);
    return true;
}

/* A message whose text is still being put together. */
struct anthropic_open {
    json_t *message; /* borrowed; or null: none is open */
    struct buf text;
};

static void anthropic_begin_message(struct chat *chat, const char *role,
                                    struct anthropic_open *open)
{
    open->message = json_pack("{s:s,s:s}", "role", role, "content", "");
    json_array_append_new(chat->messages, open->message);
}

static void anthropic_end_message(struct anthropic_open *open)
{
    if (open->message)
        json_object_set_new(open->message, "content", answer_buf_text(&open->text));
    open->message = NULL;
    buf_clear(&open->text);
}

/* What the model reads of a tool that was not in the head: the line that Claude Code's ToolSearch
 * announces. */
static json_t *anthropic_describe_tool(const json_t *tools, const char *name)
{
    json_t *line = NULL;
    for (size_t i = 0; !line && i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i);
        if (word_is(json_object_get(tool, "name"), name))
            line = json_pack("{s:O*,s:s,s:O*}", "description", json_object_get(tool, "description"),
                             "name", name, "parameters", json_object_get(tool, "input_schema"));
    }
    if (!line)
        line = json_pack("{s:s}", "name", name);
    char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER);
    json_t *part = json_pack(
        "{s:s,s:o}", "type", "text", "text",
        json_sprintf("<functions>\n<function>%s</function>\n</functions>\n", text ? text : "{}"));
    free(text);
    json_decref(line);
    return part;
}

/* A tool result's content with what tool_reference blocks stand for in their place; null after
 * fault_set. All that a request has of these is bounded, as a few bytes stand for many. */
static json_t *anthropic_resolve(struct chat *chat, const json_t *tools, json_t *content,
                                 struct fault *fault)
{
    if (!json_is_array(content))
        return content ? json_incref(content) : json_null();
    json_t *parts = json_array();
    for (size_t i = 0; i < json_array_size(content); i++) {
        json_t *part = json_array_get(content, i);
        const char *name = word_text(json_object_get(part, "tool_name"));
        if (!name || !word_is(anthropic_type(part), "tool_reference")) {
            json_array_append(parts, part);
            continue;
        }
        json_t *told = anthropic_describe_tool(tools, name);
        json_array_append_new(parts, told);
        chat->told_bytes += json_string_length(json_object_get(told, "text"));
        if (++chat->told > ANTHROPIC_MAX_TOLD || chat->told_bytes > ANTHROPIC_MAX_TOLD_BYTES) {
            json_decref(parts);
            fault_set(fault, "messages",
                      "the tool_reference blocks stand for more than %d tools or %d bytes",
                      ANTHROPIC_MAX_TOLD, ANTHROPIC_MAX_TOLD_BYTES);
            return NULL;
        }
    }
    return parts;
}

static bool anthropic_add_result(struct chat *chat, const json_t *tools, const json_t *block,
                                 const char *where, struct fault *fault)
{
    static const char *const types[] = {"text", NULL};
    json_t *content = anthropic_resolve(chat, tools, json_object_get(block, "content"), fault);
    json_t *text = content ? chat_join_text(content, where, "block", types, fault) : NULL;
    json_decref(content);
    if (!text)
        return false;
    json_array_append_new(chat->messages, json_pack("{s:s,s:o}", "role", "tool", "content", text));
    return true;
}

static bool anthropic_add_call(json_t *message, const json_t *block, const char *where,
                               struct fault *fault)
{
    json_t *name = json_object_get(block, "name"), *input = json_object_get(block, "input");
    json_t *calls = json_object_get(message, "tool_calls");
    if (!json_is_string(name) || (input && !json_is_object(input)))
        return fault_set(fault, where, "%s needs a name and an input object", where);
    if (!calls)
        json_object_set_new(message, "tool_calls", calls = json_array());
    json_array_append_new(calls,
                          json_pack("{s:s,s:{s:O,s:o}}", "type", "function", "function", "name",
                                    name, "arguments", input ? json_incref(input) : json_object()));
    return true;
}

/* One block of an assistant's message, which is open. */
static bool anthropic_add_own(struct anthropic_open *open, const json_t *block, const char *where,
                              struct fault *fault)
{
    const json_t *type = anthropic_type(block);
    json_t *thought = json_object_get(block, "thinking");
    if (word_is(type, "thinking") && json_is_string(thought)) {
        json_object_set(open->message, "reasoning_content", thought);
        return true;
    }
    if (word_is(type, "redacted_thinking"))
        return true;
    if (word_is(type, "tool_use"))
        return anthropic_add_call(open->message, block, where, fault);
    return fault_set(fault, where, "%s: blocks of type '%.60s' are not supported", where,
                     word_shown(type));
}

static bool anthropic_add_block(struct chat *chat, const json_t *tools, const char *role,
                                const json_t *block, const char *where, struct anthropic_open *open,
                                struct fault *fault)
{
    const json_t *text = json_object_get(block, "text");
    const json_t *type = anthropic_type(block);
    if (word_is(type, "text") && json_is_string(text)) {
        if (!open->message)
            anthropic_begin_message(chat, role, open);
        buf_append(&open->text, json_string_value(text), json_string_length(text));
        return true;
    }
    if (!strcmp(role, "assistant"))
        return anthropic_add_own(open, block, where, fault);
    if (!word_is(type, "tool_result"))
        return fault_set(fault, where, "%s: blocks of type '%.60s' are not supported", where,
                         word_shown(type));
    anthropic_end_message(open);
    return anthropic_add_result(chat, tools, block, where, fault);
}

static bool anthropic_add_blocks(struct chat *chat, const json_t *tools, const char *role,
                                 const json_t *blocks, size_t index, struct fault *fault)
{
    struct anthropic_open open = {0};
    bool ok = true;
    if (!strcmp(role, "assistant") || !json_array_size(blocks))
        anthropic_begin_message(chat, role, &open);
    for (size_t i = 0; ok && i < json_array_size(blocks); i++) {
        char where[80];
        snprintf(where, sizeof where, "messages[%zu].content[%zu]", index, i);
        ok = anthropic_add_block(chat, tools, role, json_array_get(blocks, i), where, &open, fault);
    }
    anthropic_end_message(&open);
    buf_free(&open.text);
    return ok;
}

static bool anthropic_read_messages(struct chat *chat, const json_t *body, struct fault *fault)
{
    const json_t *messages = json_object_get(body, "messages"), *tools = fields_get(body, "tools");
    if (!json_is_array(messages) || !json_array_size(messages))
        return fault_set(fault, "messages", "'messages' must be a list with at least one message");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *message = json_array_get(messages, i);
        const char *role = word_text(json_object_get(message, "role"));
        json_t *content = json_object_get(message, "content");
        if (!role || (strcmp(role, "user") && strcmp(role, "assistant") && strcmp(role, "system")))
            return fault_set(fault, "messages",
                             "messages[%zu].role must be user, assistant or system", i);
        if (json_is_string(content))
            json_array_append_new(chat->messages,
                                  json_pack("{s:s,s:O}", "role", role, "content", content));
        else if (!json_is_array(content))
            return fault_set(fault, "messages", "messages[%zu].content must be text or blocks", i);
        else if (!anthropic_add_blocks(chat, tools, role, content, i, fault))
            return false;
    }
    return true;
}

/* A tool with defer_loading is left out of the head, which stays the same when the client adds more
 * of them: the model reads of it where a tool_reference names it. */
static bool anthropic_read_tools(struct chat *chat, const json_t *tools, struct fault *fault)
{
    if (!tools)
        return true;
    if (!json_is_array(tools))
        return fault_set(fault, "tools", "'tools' must be a list");
    chat->tools = json_array();
    chat->head_tools = json_array();
    for (size_t i = 0; i < json_array_size(tools); i++) {
        json_t *tool = json_array_get(tools, i), *function = json_object();
        bool deferred = false;
        const json_t *type = json_object_get(tool, "type");
        json_t *name = json_object_get(tool, "name"), *text = json_object_get(tool, "description");
        json_t *schema = json_object_get(tool, "input_schema");
        json_array_append_new(chat->tools,
                              json_pack("{s:s,s:o}", "type", "function", "function", function));
        if (type && !word_is(type, "custom"))
            return fault_set(fault, "tools", "tools[%zu]: tools of type '%.60s' are not supported",
                             i, word_shown(type));
        json_object_set(function, "name", name);
        if (json_is_string(text))
            json_object_set(function, "description", text);
        if (schema)
            json_object_set(function, "parameters", schema);
        if (!fields_read_bool(tool, "defer_loading", &deferred, fault))
            return false;
        if (!deferred)
            json_array_append(chat->head_tools, json_array_get(chat->tools, i));
    }
    return chat_check_tools(chat->tools, fault);
}

static bool anthropic_read_choice(struct chat *chat, const json_t *choice, struct fault *fault)
{
    const json_t *type = anthropic_type(choice);
    if (!choice)
        return true;
    if (!fields_read_bool(choice, "disable_parallel_tool_use", &chat->one_call, fault))
        return false;
    if (word_is(type, "tool")) {
        const char *name = word_text(json_object_get(choice, "name"));
        json_t *named =
            json_pack("{s:s,s:{s:s}}", "type", "function", "function", "name", name ? name : "");
        bool ok = chat_read_choice(chat, named, fault);
        json_decref(named);
        chat->name = name; /* the body keeps it */
        chat->one_call = true;
        return ok;
    }
    bool any = word_is(type, "any");
    if (!any && !word_is(type, "auto") && !word_is(type, "none"))
        return fault_set(fault, "tool_choice",
                         "'tool_choice.type' must be auto, any, tool or none");
    json_t *name = json_string(any ? "required" : word_text(type));
    bool ok = chat_read_choice(chat, name, fault);
    json_decref(name);
    return ok;
}

/* Without the field there are no thoughts: who did not ask may not expect their blocks. */
static bool anthropic_read_thinking(struct chat *chat, const json_t *body, struct fault *fault)
{
    json_t *thinking, *config;
    if (!fields_read_typed(body, "thinking", JSON_OBJECT, &thinking, fault) ||
        !fields_read_typed(body, "output_config", JSON_OBJECT, &config, fault))
        return false;
    const json_t *type = anthropic_type(thinking);
    bool on = word_is(type, "enabled") || word_is(type, "adaptive");
    if (thinking && !on && !word_is(type, "disabled"))
        return fault_set(fault, "thinking",
                         "'thinking.type' must be enabled, adaptive or disabled");
    if (!chat_read_effort(chat, fields_get(config, "effort"), "output_config.effort", fault) ||
        !chat_read_budget(chat, thinking, "budget_tokens", fault))
        return false;
    chat->options.enable_thinking = on;
    const json_t *format = fields_get(config, "format");
    return chat_read_format(chat, format ? format : fields_get(body, "output_format"),
                            "output_config.format", fault);
}

bool anthropic_read_chat(struct answer *a, struct chat *chat, struct fault *fault)
{
    chat->messages = json_array();
    return anthropic_read_system(chat, fields_get(a->body, "system"), fault) &&
           anthropic_read_messages(chat, a->body, fault) &&
           chat_check_messages(chat->messages, fault) &&
           anthropic_read_tools(chat, fields_get(a->body, "tools"), fault) &&
           anthropic_read_choice(chat, fields_get(a->body, "tool_choice"), fault) &&
           anthropic_read_thinking(chat, a->body, fault);
}
