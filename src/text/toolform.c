/* Owns nothing: builds the automaton of tool calls in the model's form.
 *
 * Invariant: what the automaton takes, the parser (parser.c) reads as calls of the given tools. A
 * parameter that may be any string is raw text up to the first "\n</parameter>"; all other values
 * are JSON by their schema, and the values of a string enum stand there raw. */
#include "text/schema.h"

#include "base/mem.h"
#include "text/values.h"

#include <stdlib.h>
#include <string.h>

/* Raw text that ends at the first "\n</parameter>": node k has seen its first k bytes. An end
 * right at the beginning is the empty text. */
static void toolform_raw(struct automaton *a, uint32_t from, uint32_t end)
{
    static const char close[] = "\n</parameter>";
    enum { CLOSE = sizeof close - 1 };
    uint32_t nodes[CLOSE + 1], rest = automaton_add_rule(a);
    automaton_add_points(a, a->rules[rest].start, a->rules[rest].end, 0x80, 0x10ffff);
    for (int k = 0; k < CLOSE; k++)
        nodes[k] = automaton_add_node(a);
    nodes[CLOSE] = end;
    a->nodes[a->rules[rest].start].text = AUTOMATON_RAW_TEXT;
    automaton_add_empty(a, from, nodes[1]);
    for (int k = 0; k < CLOSE; k++) {
        uint8_t next = (uint8_t)close[k];
        a->nodes[nodes[k]].text = AUTOMATON_RAW_TEXT;
        a->nodes[nodes[k]].room = AUTOMATON_ANY_ROOM;
        a->nodes[nodes[k]].leave = k ? next : 0;
        automaton_add_byte(a, nodes[k], nodes[k + 1], next, next);
        automaton_add_call(a, nodes[k], nodes[0], rest);
        if (k)
            automaton_add_byte(a, nodes[k], nodes[1], '\n', '\n');
        /* All other ASCII; no control characters but these, which no tool wants. */
        automaton_add_byte(a, nodes[k], nodes[0], '\t', '\t');
        automaton_add_byte(a, nodes[k], nodes[0], '\r', '\r');
        if (next > ' ')
            automaton_add_byte(a, nodes[k], nodes[0], ' ', next - 1);
        automaton_add_byte(a, nodes[k], nodes[0], next > ' ' ? next + 1 : ' ', 0x7e);
    }
}

static const json_t *toolform_strings(const json_t *schema)
{
    const json_t *list = json_object_get(schema, "enum");
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!json_is_string(json_array_get(list, i)) ||
            strchr(json_string_value(json_array_get(list, i)), '\n'))
            return NULL;
    return json_array_size(list) ? list : NULL;
}

static bool toolform_parameter(struct automaton *a, struct schema_build *b, const json_t *function,
                               const char *key, const json_t *schema, uint32_t from, uint32_t *out)
{
    uint32_t at = automaton_add_text(a, from, "<parameter=");
    at = automaton_add_text(a, automaton_add_text(a, at, key), ">\n");
    uint32_t closed = automaton_add_node(a);
    const json_t *strings = toolform_strings(schema);
    unsigned types = values_types(function, schema);
    if (!strings && types & VALUES_STRING && !json_object_get(schema, "const")) {
        toolform_raw(a, at, closed);
    } else {
        uint32_t value = automaton_add_node(a), rule;
        for (size_t i = 0; i < json_array_size(strings); i++) {
            const char *text = json_string_value(json_array_get(strings, i));
            automaton_add_empty(a, automaton_add_shared(a, at, text, strlen(text)), value);
        }
        if (!strings) {
            if (!schema_add(b, schema, &rule))
                return false;
            automaton_add_call(a, at, value, rule);
        }
        automaton_add_empty(a, automaton_add_text(a, value, "\n</parameter>"), closed);
    }
    *out = automaton_add_text(a, closed, "\n");
    return true;
}

static bool toolform_is_required(const json_t *list, const char *key)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name && !strcmp(name, key))
            return true;
    }
    return false;
}

/* "NAME>\n", the parameters in the schema's order, "</function>\n". */
static bool toolform_function(struct automaton *a, const json_t *function, uint32_t from,
                              uint32_t end, struct err *err)
{
    const char *name = json_string_value(json_object_get(function, "name")), *key;
    const json_t *schema = json_object_get(function, "parameters"),
                 *all = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    if (!name || !*name || strpbrk(name, ">\n"))
        return err_set(err, ERR_USAGE, "a tool's function needs a name without '>' and newlines");
    struct schema_build *b = schema_open(a, schema, err);
    uint32_t at = automaton_add_shared(a, from, name, strlen(name));
    at = automaton_add_text(a, at, ">\n");
    json_t *property;
    bool ok = true;
    json_object_foreach((json_t *)all, key, property)
    {
        uint32_t behind = 0;
        if (strpbrk(key, ">\n"))
            ok = err_set(err, ERR_USAGE, "a parameter's name must not hold '>' or a newline");
        ok = ok && toolform_parameter(a, b, function, key, property, at, &behind);
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

bool schema_build_tools(struct automaton *a, const json_t *tools, const char *name, bool parallel,
                        struct err *err)
{
    a->root = automaton_add_rule(a);
    uint32_t at = schema_skip_lines(a, a->rules[a->root].start), open = automaton_add_node(a),
             call = automaton_add_node(a), body = automaton_add_node(a),
             done = automaton_add_node(a);
    automaton_add_empty(a, at, call);
    automaton_add_marker(a, call, open, AUTOMATON_CALL_OPEN);
    uint32_t function = automaton_add_text(a, open, "\n<function=");
    size_t count = 0;
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *f = json_object_get(tool, "function");
        f = json_is_object(f) ? f : tool;
        const char *have = json_string_value(json_object_get(f, "name"));
        if (name && (!have || strcmp(have, name) != 0))
            continue;
        count++;
        if (!toolform_function(a, f, function, body, err))
            return false;
    }
    if (!count)
        return err_set(err, ERR_USAGE, "no tool is called %.64s; name one of tools",
                       name ? name : "anything: tools is empty");
    automaton_add_marker(a, body, done, AUTOMATON_CALL_CLOSE);
    automaton_add_empty(a, done, a->rules[a->root].end);
    if (parallel)
        automaton_add_empty(a, automaton_add_text(a, done, "\n"), call);
    return automaton_finish(a, "the tools", err);
}
