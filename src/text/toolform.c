/* Owns nothing: builds the automaton of tool calls in the model's form.
 *
 * Invariant: what the automaton takes, the parser (parser.c) reads as calls of the given tools with
 * the same values. A parameter that may be any string is raw text (rawform.h); the values of enums
 * stand there raw when they are strings; all others are JSON by their schema. */
#include "text/schema.h"

#include "base/buf.h"
#include "base/mem.h"
#include "text/markup.h"
#include "text/rawform.h"
#include "text/scalar.h"
#include "text/values.h"
#include "text/word.h"

#include <stdlib.h>
#include <string.h>

enum { TOOLFORM_DEPTH = 16 /* of $ref and anyOf around a parameter's value */ };

/* A parameter's value while it is built. */
struct toolform {
    struct automaton *a;
    struct schema_build *b;
    const json_t *function;
    unsigned types;         /* what the parser takes the parameter for */
    uint32_t at;            /* the value's begin */
    uint32_t value, closed; /* before and behind "\n</parameter>" */
    uint32_t *raw;          /* rule of any text, + 1; 0: not built */
};

/* Whether the parser makes this value of the text. */
static bool toolform_comes_back(const struct toolform *t, const char *text, const json_t *value)
{
    struct buf out = {0};
    values_append(&out, t->types, text, strlen(text));
    json_t *read = json_loadb(out.data, out.len, JSON_DECODE_ANY, NULL);
    bool same = read && json_equal(read, value);
    json_decref(read);
    buf_free(&out);
    return same;
}

static bool toolform_word(struct toolform *t, const char *keyword, const json_t *value)
{
    char *text = json_is_string(value)
                     ? mem_copy_text(json_string_value(value), json_string_length(value))
                     : json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    bool ok = text && !rawform_has_tag(text) && toolform_comes_back(t, text, value);
    if (ok)
        automaton_add_empty(t->a, automaton_add_shared(t->a, t->at, text, strlen(text)), t->value);
    else
        schema_refuse(t->b, keyword,
                      "holds a value that a call cannot carry: one that spells a tag of calls, or "
                      "that reads as another type; change it or give the parameter one type");
    free(text);
    return ok;
}

static bool toolform_words(struct toolform *t, const json_t *schema)
{
    const json_t *list = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    if (list && one)
        return schema_refuse(t->b, "const", "is not supported beside enum");
    if (one)
        return toolform_word(t, "const", one);
    if (!json_array_size(list))
        return schema_refuse(t->b, "enum", "must be a list of one value or more");
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!toolform_word(t, "enum", json_array_get(list, i)))
            return false;
    return true;
}

static void toolform_raw(struct toolform *t)
{
    if (!*t->raw)
        *t->raw = rawform_add(t->a) + 1;
    automaton_add_call(t->a, t->at, t->closed, *t->raw - 1);
}

static bool toolform_value(struct toolform *t, const json_t *schema, int depth);

static bool toolform_any_of(struct toolform *t, const json_t *schema, const char *keyword,
                            int depth)
{
    const json_t *parts = json_object_get(schema, keyword);
    if (!json_array_size(parts))
        return schema_refuse(t->b, keyword, "must be a list of one schema or more");
    for (size_t i = 0; i < json_array_size(parts); i++) {
        size_t mark = schema_enter(t->b, keyword);
        bool ok = toolform_value(t, json_array_get(parts, i), depth + 1);
        schema_leave(t->b, mark);
        if (!ok)
            return false;
    }
    if (json_is_true(json_object_get(schema, "nullable")))
        automaton_add_empty(t->a, automaton_add_text(t->a, t->at, "null"), t->value);
    return true;
}

/* A string is raw, whatever else the value may be: what reads as another of the parameter's types
 * is taken for it. */
static bool toolform_value(struct toolform *t, const json_t *schema, int depth)
{
    static const char *const beside[] = {"type", "properties", "items", "enum", "const", "allOf"};
    const json_t *ref = json_object_get(schema, "$ref");
    const char *keyword = json_object_get(schema, "anyOf") ? "anyOf" : "oneOf";
    uint32_t rule;
    bool alone = true;
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++)
        alone = alone && !json_object_get(schema, beside[i]);
    if (json_is_false(schema))
        return true; /* without a way: it cannot be given */
    if (!json_is_object(schema) && !json_is_true(schema))
        return schema_refuse(t->b, "properties", "holds something that is not a schema");
    if (!schema_check_keywords(t->b, schema))
        return false;
    if (ref && alone && depth < TOOLFORM_DEPTH) {
        const json_t *target = schema_find(t->b, word_text(ref));
        return target ? toolform_value(t, target, depth + 1)
                      : schema_refuse(t->b, "$ref",
                                      "must lead to a place in the same document (#/...)");
    }
    if (json_object_get(schema, keyword) && alone && depth < TOOLFORM_DEPTH)
        return toolform_any_of(t, schema, keyword, depth);
    if (json_object_get(schema, "enum") || json_object_get(schema, "const"))
        return toolform_words(t, schema);
    unsigned types = values_types(t->function, schema);
    if (types & VALUES_STRING) {
        if (!scalar_has_string_limits(schema))
            toolform_raw(t);
        else if (types != VALUES_STRING || t->types & ~(unsigned)(VALUES_STRING | VALUES_NULL))
            return schema_refuse(
                t->b, "type",
                "of a parameter with lengths or patterns must be string, or string and "
                "null by anyOf");
        else
            return scalar_add_string(t->b, schema_form(t->b), schema, true, t->at, t->value);
        return true;
    }
    if (!schema_add(t->b, schema, &rule))
        return false;
    automaton_add_call(t->a, t->at, t->value, rule);
    return true;
}

static bool toolform_parameter(struct toolform *t, const char *key, const json_t *schema,
                               uint32_t from, uint32_t *out)
{
    struct automaton *a = t->a;
    uint32_t at = automaton_add_text(a, from, "<parameter=");
    t->at = automaton_add_text(a, automaton_add_text(a, at, key), ">\n");
    t->value = automaton_add_node(a);
    t->closed = automaton_add_node(a);
    t->types = values_types(t->function, schema);
    size_t outer = schema_enter(t->b, "properties"), inner = schema_enter(t->b, key);
    bool ok = toolform_value(t, schema, 0);
    schema_leave(t->b, inner);
    schema_leave(t->b, outer);
    a->nodes[t->value].text = AUTOMATON_RAW_TEXT; /* no room: it takes none */
    automaton_add_empty(a, automaton_add_text(a, t->value, "\n</parameter>"), t->closed);
    *out = automaton_add_text(a, t->closed, "\n");
    return ok;
}

static bool toolform_is_required(const json_t *list, const char *key)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (word_is(json_array_get(list, i), key))
            return true;
    return false;
}

/* What the parser takes for a name. */
static bool toolform_is_name(const char *name)
{
    size_t n = name ? strlen(name) : 0;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == '<' || name[i] == '>')
            return false;
    return n && n <= MARKUP_NAME_MAX;
}

/* The parameters are an object of `properties`; what else the schema demands of them is refused. */
static bool toolform_check(struct schema_build *b, const json_t *schema)
{
    static const char *const refused[] = {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"};
    const json_t *type = json_object_get(schema, "type"),
                 *all = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    if (schema && !json_is_null(schema) && !json_is_object(schema))
        return schema_refuse(b, "parameters", "must be an object");
    if (schema && !json_is_null(schema) && !schema_check_keywords(b, schema))
        return false;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (json_object_get(schema, refused[i]))
            return schema_refuse(b, refused[i],
                                 "is not supported for all parameters of a tool; state the "
                                 "parameters as properties");
    if (type && !word_is(type, "object"))
        return schema_refuse(b, "type", "must be object for a tool's parameters");
    if (all && !json_is_object(all))
        return schema_refuse(b, "properties", "must be an object");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = word_text(json_array_get(required, i));
        if (!name || !json_object_get(all, name))
            return schema_refuse(b, "required", "names a property that properties lacks");
    }
    return true;
}

/* "NAME>\n", the parameters in the schema's order, "</function>\n". */
static bool toolform_function(struct automaton *a, const json_t *function, uint32_t *raw,
                              uint32_t from, uint32_t end, struct err *err)
{
    const char *name = word_text(json_object_get(function, "name")), *key;
    const json_t *schema = json_object_get(function, "parameters"),
                 *all = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    if (!toolform_is_name(name))
        return err_set(err, ERR_USAGE,
                       "a tool's function needs a name of 1 to 256 bytes without '<', '>' and "
                       "control characters");
    struct schema_build *b = schema_open(a, schema, true, err);
    struct toolform t = {.a = a, .b = b, .function = function, .raw = raw};
    uint32_t at = automaton_add_shared(a, from, name, strlen(name));
    at = automaton_add_text(a, at, ">\n");
    json_t *property;
    bool ok = toolform_check(b, schema);
    json_object_foreach((json_t *)all, key, property)
    {
        uint32_t behind = 0;
        if (ok && !toolform_is_name(key))
            ok = err_set(err, ERR_USAGE,
                         "a parameter needs a name of 1 to 256 bytes without '<', '>' and control "
                         "characters");
        ok = ok && toolform_parameter(&t, key, property, at, &behind);
        if (!ok)
            break;
        if (!toolform_is_required(required, key))
            automaton_add_empty(a, at, behind);
        at = behind;
    }
    automaton_add_empty(a, automaton_add_text(a, at, "</function>\n"), end);
    schema_close(b);
    return ok || err_wrap(err, "tool %.64s", name);
}

/* One call or more of the tools, from `at` to `end`. */
static bool toolform_calls(struct automaton *a, uint32_t at, uint32_t end, const json_t *tools,
                           const char *name, bool parallel, struct err *err)
{
    uint32_t open = automaton_add_node(a), call = automaton_add_node(a),
             body = automaton_add_node(a), done = automaton_add_node(a);
    automaton_add_empty(a, at, call);
    automaton_add_marker(a, call, open, AUTOMATON_CALL_OPEN);
    uint32_t function = automaton_add_text(a, open, "\n<function=");
    size_t count = 0;
    uint32_t raw = 0;
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *f = json_object_get(tool, "function");
        f = json_is_object(f) ? f : tool;
        if (name && !word_is(json_object_get(f, "name"), name))
            continue;
        count++;
        if (!toolform_function(a, f, &raw, function, body, err))
            return false;
    }
    if (!count)
        return err_set(err, ERR_USAGE, "no tool is called %.64s; name one of tools",
                       name ? name : "anything: tools is empty");
    automaton_add_marker(a, body, done, AUTOMATON_CALL_CLOSE);
    automaton_add_empty(a, done, end);
    if (parallel)
        automaton_add_empty(a, automaton_add_text(a, done, "\n"), call);
    return true;
}

bool schema_build_tools(struct automaton *a, const json_t *tools, const char *name, bool parallel,
                        struct err *err)
{
    a->root = automaton_add_rule(a);
    struct automaton_rule root = a->rules[a->root];
    return toolform_calls(a, schema_skip_lines(a, root.start), root.end, tools, name, parallel,
                          err) &&
           automaton_finish(a, "the tools", err);
}

bool schema_build_either(struct automaton *a, const json_t *schema, const json_t *tools,
                         bool parallel, struct err *err)
{
    /* As in a call: a string that spells one would be taken for it. */
    struct schema_build *b = schema_open(a, schema, true, err);
    uint32_t rule;
    a->root = automaton_add_rule(a);
    struct automaton_rule root = a->rules[a->root];
    bool ok = schema_add(b, schema, &rule);
    schema_close(b);
    if (!ok)
        return false;
    uint32_t at = schema_skip_lines(a, root.start);
    automaton_add_call(a, at, root.end, rule);
    return toolform_calls(a, at, root.end, tools, NULL, parallel, err) &&
           automaton_finish(a, "the schema and the tools", err);
}
