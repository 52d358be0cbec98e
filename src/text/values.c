/* Owns nothing. Numbers and containers are checked and then passed on as they were spelled, so that
 * no digit and no member is lost on the way. */
#include "text/values.h"

#include "base/mem.h"
#include "text/pyjson.h"
#include "text/refs.h"
#include "text/word.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { VALUES_DEPTH = 8 /* of $ref and anyOf; deeper says nothing */ };

const json_t *values_find_tool(const json_t *tools, const char *name, size_t n)
{
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i),
                     *function = json_object_get(tool, "function");
        if (!json_is_object(function))
            function = tool;
        const json_t *have = json_object_get(function, "name");
        if (json_is_string(have) && json_string_length(have) == n &&
            !memcmp(json_string_value(have), name, n))
            return function;
    }
    return NULL;
}

const json_t *values_find_parameter(const json_t *function, const char *key, size_t n)
{
    const json_t *all = json_object_get(json_object_get(function, "parameters"), "properties");
    if (!json_is_object(all))
        return NULL;
    char *name = mem_copy_text(key, n);
    const json_t *found = json_object_get(all, name);
    free(name);
    return found;
}

static unsigned values_type_named(const json_t *name)
{
    static const struct {
        const char *name;
        unsigned type;
    } types[] = {
        {"string", VALUES_STRING},   {"integer", VALUES_INTEGER}, {"number", VALUES_NUMBER},
        {"boolean", VALUES_BOOLEAN}, {"null", VALUES_NULL},       {"array", VALUES_ARRAY},
        {"object", VALUES_OBJECT},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (word_is(name, types[i].name))
            return types[i].type;
    return 0;
}

static unsigned values_type_of(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_STRING:
        return VALUES_STRING;
    case JSON_INTEGER:
        return VALUES_INTEGER;
    case JSON_REAL:
        return VALUES_NUMBER;
    case JSON_TRUE:
    case JSON_FALSE:
        return VALUES_BOOLEAN;
    case JSON_NULL:
        return VALUES_NULL;
    case JSON_ARRAY:
        return VALUES_ARRAY;
    case JSON_OBJECT:
        return VALUES_OBJECT;
    }
    return 0;
}

static unsigned values_collect(const json_t *root, const json_t *schema, int depth)
{
    unsigned types = 0;
    if (!json_is_object(schema) || depth > VALUES_DEPTH)
        return 0;
    const json_t *type = json_object_get(schema, "type");
    if (json_is_array(type))
        for (size_t i = 0; i < json_array_size(type); i++)
            types |= values_type_named(json_array_get(type, i));
    else
        types |= values_type_named(type);
    static const char *const unions[] = {"anyOf", "oneOf", "allOf"};
    for (size_t u = 0; u < 3; u++) {
        const json_t *list = json_object_get(schema, unions[u]);
        for (size_t i = 0; i < json_array_size(list); i++)
            types |= values_collect(root, json_array_get(list, i), depth + 1);
    }
    const char *ref = word_text(json_object_get(schema, "$ref"));
    types |= values_collect(root, refs_follow(root, ref), depth + 1);
    if (!types) {
        const json_t *list = json_object_get(schema, "enum"),
                     *one = json_object_get(schema, "const");
        for (size_t i = 0; i < json_array_size(list); i++)
            types |= values_type_of(json_array_get(list, i));
        if (one)
            types |= values_type_of(one);
        if (json_object_get(schema, "properties"))
            types |= VALUES_OBJECT;
        if (json_object_get(schema, "items"))
            types |= VALUES_ARRAY;
    }
    if (types && json_is_true(json_object_get(schema, "nullable")))
        types |= VALUES_NULL;
    return types;
}

unsigned values_types(const json_t *function, const json_t *schema)
{
    unsigned types = values_collect(json_object_get(function, "parameters"), schema, 0);
    return types ? types : VALUES_STRING;
}

static size_t values_digits(const char *p, const char *end)
{
    const char *from = p;
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    return (size_t)(p - from);
}

/* A number to JSON; Python's int() also takes leading zeros and a plus sign. */
static bool values_append_number(struct buf *out, bool integer, const char *p, size_t n)
{
    const char *end = p + n;
    bool minus = p < end && *p == '-';
    if (p < end && (*p == '-' || *p == '+'))
        p++;
    size_t whole = values_digits(p, end);
    const char *rest = p + whole;
    if (!whole)
        return false;
    for (; whole > 1 && *p == '0'; p++)
        whole--;
    const char *q = rest;
    if (q < end && *q == '.') {
        size_t k = values_digits(q + 1, end), zeros = 0;
        if (!k)
            return false;
        while (zeros < k && q[1 + zeros] == '0')
            zeros++;
        q += 1 + k;
        /* 5.0 where an integer is wanted is 5. */
        if (integer && q == end && zeros == k)
            end = q = rest;
    }
    if (q < end && (*q == 'e' || *q == 'E')) {
        q += q + 1 < end && (q[1] == '+' || q[1] == '-') ? 2 : 1;
        size_t k = values_digits(q, end);
        if (!k)
            return false;
        q += k;
    }
    if (q != end || (integer && rest != end))
        return false;
    if (minus)
        buf_append_char(out, '-');
    buf_append(out, p, (size_t)(end - p));
    return true;
}

/* Copies a Python string literal that starts at p[0], a quote, as a JSON one; returns its length or
 * 0 when it does not end. */
static size_t values_copy_python_string(struct buf *out, const char *p, size_t n)
{
    buf_append_char(out, '"');
    for (size_t i = 1; i < n; i++) {
        if (p[i] == p[0]) {
            buf_append_char(out, '"');
            return i + 1;
        }
        if (p[i] == '\\' && i + 1 < n) {
            i++;
            if (p[i] == '\'')
                buf_append_char(out, '\'');
            else
                buf_append(out, p + i - 1, 2);
        } else {
            pyjson_append_escaped(out, p + i, 1);
        }
    }
    return 0;
}

/* A Python list or dict display as JSON, as far as spelling goes; the caller checks the result. */
static bool values_from_python(struct buf *out, const char *p, size_t n)
{
    static const char *const words[][2] = {{"None", "null"}, {"True", "true"}, {"False", "false"}};
    for (size_t i = 0; i < n;) {
        if (p[i] == '\'' || p[i] == '"') {
            size_t k = values_copy_python_string(out, p + i, n - i);
            if (!k)
                return false;
            i += k;
            continue;
        }
        size_t w = 0, k = 0;
        for (; w < 3; w++) {
            k = strlen(words[w][0]);
            if (n - i >= k && !memcmp(p + i, words[w][0], k))
                break;
        }
        if (w < 3) {
            buf_append_text(out, words[w][1]);
            i += k;
        } else {
            buf_append_char(out, p[i++]);
        }
    }
    return true;
}

static bool values_is_json_container(const char *p, size_t n)
{
    json_t *value = json_loadb(p, n, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
    json_decref(value);
    return value != NULL;
}

static bool values_append_container(struct buf *out, const char *p, size_t n)
{
    if (!n || (*p != '[' && *p != '{'))
        return false;
    if (values_is_json_container(p, n)) {
        buf_append(out, p, n);
        return true;
    }
    struct buf json = {0};
    bool ok = values_from_python(&json, p, n) && !json.full &&
              values_is_json_container(json.data, json.len);
    if (ok)
        buf_append(out, json.data, json.len);
    buf_free(&json);
    return ok;
}

static bool values_is_word(const char *p, size_t n, const char *word)
{
    return n == strlen(word) && !strncasecmp(p, word, n);
}

void values_append(struct buf *out, unsigned types, const char *text, size_t n)
{
    const char *p = text;
    size_t k = n;
    while (k && strchr(" \t\r\n", *p) && *p)
        p++, k--;
    while (k && strchr(" \t\r\n", p[k - 1]) && p[k - 1])
        k--;
    /* A model leaves an optional parameter out by null also where the schema has no null. */
    bool null = types & VALUES_NULL || !(types & VALUES_STRING);
    if (null && (values_is_word(p, k, "null") || values_is_word(p, k, "None"))) {
        buf_append_text(out, "null");
        return;
    }
    for (int value = 0; types & VALUES_BOOLEAN && value < 2; value++) {
        if (values_is_word(p, k, value ? "true" : "false")) {
            buf_append_text(out, value ? "true" : "false");
            return;
        }
    }
    if (types & (VALUES_INTEGER | VALUES_NUMBER) &&
        values_append_number(out, !(types & VALUES_NUMBER), p, k))
        return;
    if (types & (VALUES_ARRAY | VALUES_OBJECT) && values_append_container(out, p, k))
        return;
    buf_append_char(out, '"');
    pyjson_append_escaped(out, text, n);
    buf_append_char(out, '"');
}
