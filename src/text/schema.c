/* Owns the build: which rule each schema has become, and where in the document the work is.
 *
 * Invariant: each schema object is built once, under its address; what a $ref leads to is built
 * after all else, so that it may lead anywhere, in chains of any length, and the size is linear in
 * the schema. Values are compact JSON with
 * at most one space behind ':' and ',': a model cannot loop on white space. Numbers have at most
 * 18 + 17 digits for the same reason. */
#include "text/schema.h"

#include "base/buf.h"
#include "base/mem.h"
#include "text/jsonform.h"
#include "text/merge.h"
#include "text/pyjson.h"
#include "text/rawform.h"
#include "text/refs.h"
#include "text/scalar.h"
#include "text/values.h"
#include "text/word.h"

#include <stdlib.h>
#include <string.h>

enum {
    SCHEMA_MAX_DEPTH = 100,
    SCHEMA_MAX_MEMBERS = 1024, /* properties of an object */
    SCHEMA_MAX_COUNT = 8192,   /* minItems, maxLength and the like */
    SCHEMA_MAX_SCHEMAS = 8192,
    SCHEMA_ALL =
        VALUES_STRING | VALUES_NUMBER | VALUES_BOOLEAN | VALUES_NULL | VALUES_ARRAY | VALUES_OBJECT
};

struct schema_known {
    const json_t *schema;
    uint32_t rule;
    const char *ref; /* of the document: where it was asked for, or null */
    bool built;
};

struct schema_build {
    struct automaton *a;
    const json_t *root;
    json_t *merged; /* schemas that are not part of the document */
    struct schema_known *known;
    size_t known_count, known_cap;
    struct jsonform form;
    struct buf path;
    unsigned depth;
    struct err *err;
};

static bool schema_value(struct schema_build *b, const json_t *schema, uint32_t *rule);

static const char *schema_place(const struct schema_build *b)
{
    return b->path.len ? b->path.data : "/";
}

bool schema_refuse(struct schema_build *b, const char *keyword, const char *why)
{
    return err_set(b->err, ERR_USAGE, "the schema's keyword %.64s at %.400s %s", keyword,
                   schema_place(b), why);
}

size_t schema_enter(struct schema_build *b, const char *key)
{
    size_t len = b->path.len;
    buf_printf(&b->path, "/%.100s", key);
    return len;
}

void schema_leave(struct schema_build *b, size_t len)
{
    b->path.len = len;
    b->path.data[len] = 0;
}

bool schema_count(struct schema_build *b, const json_t *schema, const char *key, long none,
                  long *out)
{
    const json_t *value = json_object_get(schema, key);
    *out = none;
    if (!value)
        return true;
    json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0)
        return schema_refuse(b, key, "must be a whole number of 0 or more");
    if (n > SCHEMA_MAX_COUNT)
        return schema_refuse(b, key, "is over the limit of 8192; leave it out or lower it");
    *out = (long)n;
    return true;
}

static bool schema_types(struct schema_build *b, const json_t *schema, unsigned *types)
{
    static const char *const names[] = {"string", "integer", "number", "boolean",
                                        "null",   "array",   "object"};
    const json_t *type = json_object_get(schema, "type");
    size_t count = json_is_array(type) ? json_array_size(type) : type != NULL;
    *types = 0;
    for (size_t i = 0; i < count; i++) {
        const json_t *name = json_is_array(type) ? json_array_get(type, i) : type;
        size_t k = 0;
        while (k < 7 && !word_is(name, names[k]))
            k++;
        if (k == 7)
            return schema_refuse(b, "type",
                                 "must name string, integer, number, boolean, null, "
                                 "array or object");
        *types |= 1u << k;
    }
    if (!count) {
        if (json_object_get(schema, "properties") || json_object_get(schema, "required") ||
            json_object_get(schema, "additionalProperties"))
            *types |= VALUES_OBJECT;
        if (json_object_get(schema, "items") || json_object_get(schema, "prefixItems") ||
            json_object_get(schema, "minItems") || json_object_get(schema, "maxItems"))
            *types |= VALUES_ARRAY;
        if (json_object_get(schema, "minLength") || json_object_get(schema, "maxLength") ||
            json_object_get(schema, "pattern") || json_object_get(schema, "format"))
            *types |= VALUES_STRING;
        if (scalar_has_bounds(schema))
            *types |= VALUES_NUMBER;
        if (!*types)
            *types = SCHEMA_ALL;
    } else if (json_is_true(json_object_get(schema, "nullable"))) {
        *types |= VALUES_NULL;
    }
    return true;
}

/* Keywords that say nothing about the value, or that are handled below. */
bool schema_check_keywords(struct schema_build *b, const json_t *schema)
{
    static const char *const fine[] = {"type",
                                       "properties",
                                       "required",
                                       "additionalProperties",
                                       "enum",
                                       "const",
                                       "items",
                                       "minItems",
                                       "maxItems",
                                       "prefixItems",
                                       "anyOf",
                                       "oneOf",
                                       "allOf",
                                       "$ref",
                                       "$defs",
                                       "definitions",
                                       "minLength",
                                       "maxLength",
                                       "minimum",
                                       "nullable",
                                       "title",
                                       "description",
                                       "default",
                                       "examples",
                                       "example",
                                       "$schema",
                                       "$comment",
                                       "$id",
                                       "deprecated",
                                       "readOnly",
                                       "writeOnly",
                                       "pattern",
                                       "format",
                                       "maximum",
                                       "exclusiveMinimum",
                                       "exclusiveMaximum"};
    const char *key;
    json_t *value;
    unsigned types;
    json_object_foreach((json_t *)schema, key, value)
    {
        size_t i = 0;
        while (i < sizeof fine / sizeof *fine && strcmp(fine[i], key) != 0)
            i++;
        if (i == sizeof fine / sizeof *fine)
            return schema_refuse(b, key,
                                 "is not supported in constrained answers; remove it, or state it "
                                 "in the description");
    }
    return schema_types(b, schema, &types);
}

/* JSON that is given by the schema; within calls, tags that it spells are escaped. */
static uint32_t schema_add_json(struct schema_build *b, uint32_t from, const char *json)
{
    struct buf text = {0};
    bool escapes = b->form.no_tags && rawform_has_tag(json);
    for (const char *p = json; *p; p++)
        if (escapes && *p == '<')
            buf_append_text(&text, "\\u003c");
        else
            buf_append_char(&text, *p);
    uint32_t at = automaton_add_shared(b->a, from, text.data, text.len);
    buf_free(&text);
    return at;
}

static bool schema_enum(struct schema_build *b, uint32_t from, uint32_t end, const json_t *schema)
{
    const json_t *list = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    static const char *const others[] = {
        "properties",       "items",           "anyOf",   "oneOf",   "allOf",  "$ref",
        "minLength",        "maxLength",       "minimum", "pattern", "format", "maximum",
        "exclusiveMinimum", "exclusiveMaximum"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (json_object_get(schema, others[i]))
            return schema_refuse(b, others[i], "is not supported beside enum or const");
    if (list && one)
        return schema_refuse(b, "const", "is not supported beside enum");
    if (list && (!json_is_array(list) || !json_array_size(list)))
        return schema_refuse(b, "enum", "must be a list of one value or more");
    for (size_t i = 0; i < (list ? json_array_size(list) : 1); i++) {
        const json_t *value = list ? json_array_get(list, i) : one;
        char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
        if (!text)
            return schema_refuse(b, list ? "enum" : "const", "holds a value that is not JSON");
        automaton_add_empty(b->a, schema_add_json(b, from, text), end);
        free(text);
    }
    return true;
}

static bool schema_array(struct schema_build *b, uint32_t from, uint32_t end, const json_t *schema)
{
    long min, max;
    if (!schema_count(b, schema, "minItems", 0, &min) ||
        !schema_count(b, schema, "maxItems", -1, &max))
        return false;
    const json_t *items = json_object_get(schema, "items"),
                 *first = json_object_get(schema, "prefixItems");
    size_t count = json_array_size(first);
    if (first && (!count || count > SCHEMA_MAX_MEMBERS))
        return schema_refuse(b, "prefixItems", "must be a list of 1 to 1024 schemas");
    if (max >= 0 && min > max)
        return schema_refuse(b, "minItems", "is above maxItems: nothing fits");
    uint32_t *rules = mem_new(count + 1, sizeof *rules), item = 0;
    bool ok = true;
    for (size_t i = 0; i < count && ok; i++) {
        size_t len = schema_enter(b, "prefixItems");
        ok = schema_value(b, json_array_get(first, i), &rules[i]);
        schema_leave(b, len);
    }
    size_t len = schema_enter(b, "items");
    if (!items)
        item = jsonform_any(&b->form);
    else
        ok = ok && schema_value(b, items, &item);
    schema_leave(b, len);
    if (ok)
        jsonform_items(&b->form, from, end, rules, count, item, min, max);
    free(rules);
    return ok;
}

static bool schema_is_required(const json_t *schema, const char *key)
{
    const json_t *list = json_object_get(schema, "required");
    for (size_t i = 0; i < json_array_size(list); i++)
        if (word_is(json_array_get(list, i), key))
            return true;
    return false;
}

static bool schema_check_object(struct schema_build *b, const json_t *schema)
{
    const json_t *all = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required"),
                 *more = json_object_get(schema, "additionalProperties");
    if (all && !json_is_object(all))
        return schema_refuse(b, "properties", "must be an object");
    if (json_object_size(all) > SCHEMA_MAX_MEMBERS)
        return schema_refuse(b, "properties", "has over 1024 members; split the object");
    if (required && !json_is_array(required))
        return schema_refuse(b, "required", "must be a list of names");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = word_text(json_array_get(required, i));
        if (!name || !json_object_get(all, name))
            return schema_refuse(b, "required", "names a property that properties lacks");
    }
    if (more && !json_is_boolean(more) && !json_is_object(more))
        return schema_refuse(b, "additionalProperties", "must be true, false or a schema");
    return true;
}

/* The node behind `"key": `; what follows is the value. */
static uint32_t schema_key(struct schema_build *b, uint32_t from, const char *key)
{
    struct buf text = {0};
    buf_append_char(&text, '"');
    pyjson_append_escaped(&text, key, strlen(key));
    buf_append_text(&text, "\":");
    uint32_t at = schema_add_json(b, from, text.data);
    buf_free(&text);
    return jsonform_space(b->a, at);
}

/* Two chains run beside each other, before and after the first member that is written. */
static bool schema_object(struct schema_build *b, uint32_t from, uint32_t end, const json_t *schema)
{
    struct automaton *a = b->a;
    const json_t *all = json_object_get(schema, "properties"),
                 *more = json_object_get(schema, "additionalProperties");
    if (!schema_check_object(b, schema))
        return false;
    if (!all && !json_is_object(more)) {
        if (json_is_false(more))
            automaton_add_empty(a, automaton_add_text(a, from, "{}"), end);
        else
            automaton_add_call(a, from, end, jsonform_free_object(&b->form));
        return true;
    }
    uint32_t none = jsonform_step(a, from, '{', '{'), some = automaton_add_node(a), value;
    if (!json_object_size(all) && json_is_object(more)) {
        size_t len = schema_enter(b, "additionalProperties");
        bool ok = schema_value(b, more, &value);
        schema_leave(b, len);
        automaton_add_byte(a, none, end, '}', '}');
        automaton_add_empty(a, none, some);
        jsonform_members(&b->form, some, end, value);
        return ok;
    }
    const char *key;
    json_t *property;
    json_object_foreach((json_t *)all, key, property)
    {
        size_t len = schema_enter(b, "properties"), inner = schema_enter(b, key);
        bool ok = schema_value(b, property, &value);
        schema_leave(b, inner);
        schema_leave(b, len);
        if (!ok)
            return false;
        uint32_t name = automaton_add_node(a), none2 = automaton_add_node(a),
                 some2 = automaton_add_node(a);
        automaton_add_empty(a, none, name);
        automaton_add_empty(a, jsonform_space(a, jsonform_step(a, some, ',', ',')), name);
        automaton_add_call(a, schema_key(b, name, key), some2, value);
        if (!schema_is_required(schema, key)) {
            automaton_add_empty(a, none, none2);
            automaton_add_empty(a, some, some2);
        }
        none = none2;
        some = some2;
    }
    automaton_add_byte(a, none, end, '}', '}');
    automaton_add_byte(a, some, end, '}', '}');
    return true;
}

static bool schema_typed(struct schema_build *b, uint32_t from, uint32_t end, const json_t *schema)
{
    unsigned types;
    if (!schema_types(b, schema, &types))
        return false;
    const json_t *minimum = json_object_get(schema, "minimum");
    bool bounds = scalar_has_bounds(schema) && types & (VALUES_NUMBER | VALUES_INTEGER);
    bool positive = minimum && json_is_number(minimum) && json_number_value(minimum) == 0 &&
                    !json_object_get(schema, "maximum") &&
                    !json_object_get(schema, "exclusiveMinimum") &&
                    !json_object_get(schema, "exclusiveMaximum");
    if (bounds && !positive && types & VALUES_NUMBER)
        return schema_refuse(b, minimum ? "minimum" : "maximum",
                             "and other bounds are supported for integers, and minimum 0 for "
                             "numbers; state it in the description");
    if (types & VALUES_STRING && !scalar_add_string(b, &b->form, schema, false, from, end))
        return false;
    if (bounds && !positive) {
        if (!scalar_add_integer(b, &b->form, schema, from, end))
            return false;
    } else if (types & (VALUES_NUMBER | VALUES_INTEGER)) {
        automaton_add_call(b->a, from, end,
                           jsonform_number(&b->form, !(types & VALUES_NUMBER), positive));
    }
    jsonform_words(b->a, from, end, types);
    return (!(types & VALUES_ARRAY) || schema_array(b, from, end, schema)) &&
           (!(types & VALUES_OBJECT) || schema_object(b, from, end, schema));
}

const json_t *schema_find(const struct schema_build *b, const char *ref)
{
    return refs_follow(b->root, ref);
}

/* $ref, anyOf, oneOf and allOf of one: each alone, with nothing but notes beside it. Other allOf
 * are merged. */
static bool schema_later(struct schema_build *b, const json_t *schema, const char *ref,
                         uint32_t *rule);

static bool schema_combined(struct schema_build *b, uint32_t from, uint32_t end,
                            const json_t *schema, const char *keyword)
{
    static const char *const others[] = {"type",  "properties", "items", "anyOf",    "oneOf",
                                         "allOf", "$ref",       "enum",  "required", "const"};
    const json_t *parts = json_object_get(schema, keyword);
    uint32_t rule;
    if (!strcmp(keyword, "allOf") &&
        (json_array_size(parts) > 1 || json_object_get(schema, "properties"))) {
        json_t *merged = merge_objects(b, schema);
        if (!merged)
            return false;
        json_array_append_new(b->merged, merged);
        return schema_typed(b, from, end, merged);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(others[i], keyword) != 0 && json_object_get(schema, others[i]))
            return schema_refuse(b, others[i],
                                 "is not supported beside $ref, anyOf, oneOf or allOf");
    if (!strcmp(keyword, "$ref")) {
        const json_t *target = refs_follow(b->root, word_text(parts));
        if (!target)
            return schema_refuse(b, "$ref", "must lead to a place in the same document (#/...)");
        if (!schema_later(b, target, word_text(parts), &rule))
            return false;
        automaton_add_call(b->a, from, end, rule);
        return true;
    }
    size_t count = json_array_size(parts);
    if (!count)
        return schema_refuse(b, keyword, "must be a list of one schema or more");
    for (size_t i = 0; i < count; i++) {
        size_t len = schema_enter(b, keyword);
        buf_printf(&b->path, "/%zu", i);
        bool ok = schema_value(b, json_array_get(parts, i), &rule);
        schema_leave(b, len);
        if (!ok)
            return false;
        automaton_add_call(b->a, from, end, rule);
    }
    if (json_is_true(json_object_get(schema, "nullable")))
        jsonform_words(b->a, from, end, VALUES_NULL);
    return true;
}

/* The parts of a schema that is an object, in the order in which keywords exclude each other. */
static bool schema_object_form(struct schema_build *b, uint32_t from, uint32_t end,
                               const json_t *schema)
{
    static const char *const combined[] = {"allOf", "$ref", "anyOf", "oneOf"};
    if (!schema_check_keywords(b, schema))
        return false;
    if (json_object_get(schema, "enum") || json_object_get(schema, "const"))
        return schema_enum(b, from, end, schema);
    for (size_t i = 0; i < 4; i++)
        if (json_object_get(schema, combined[i]))
            return schema_combined(b, from, end, schema, combined[i]);
    return schema_typed(b, from, end, schema);
}

static struct schema_known *schema_find_known(struct schema_build *b, const json_t *schema)
{
    for (size_t i = 0; i < b->known_count; i++)
        if (b->known[i].schema == schema)
            return &b->known[i];
    return NULL;
}

static bool schema_note(struct schema_build *b, struct schema_known known)
{
    if (b->known_count >= SCHEMA_MAX_SCHEMAS)
        return err_set(b->err, ERR_USAGE, "the schema has over %d parts at %.400s; make it smaller",
                       SCHEMA_MAX_SCHEMAS, schema_place(b));
    if (b->known_count == b->known_cap) {
        b->known_cap = b->known_cap ? b->known_cap * 2 : 64;
        b->known = mem_grow(b->known, b->known_cap, sizeof *b->known);
    }
    b->known[b->known_count++] = known;
    return true;
}

/* The rule of a schema that is built at the end. */
static bool schema_later(struct schema_build *b, const json_t *schema, const char *ref,
                         uint32_t *rule)
{
    const struct schema_known *known = schema_find_known(b, schema);
    if (json_is_boolean(schema)) /* jansson has one true and one false, which have no place */
        return schema_value(b, schema, rule);
    *rule = known ? known->rule : automaton_add_rule(b->a);
    return known || schema_note(b, (struct schema_known){schema, *rule, ref, false});
}

static bool schema_build_later(struct schema_build *b)
{
    for (size_t i = 0; i < b->known_count; i++) {
        struct schema_known known = b->known[i];
        uint32_t rule;
        if (known.built)
            continue;
        size_t len = schema_enter(b, known.ref[1] ? known.ref + 2 : "");
        bool ok = schema_value(b, known.schema, &rule);
        schema_leave(b, len);
        if (!ok)
            return false;
    }
    return true;
}

static bool schema_value(struct schema_build *b, const json_t *schema, uint32_t *rule)
{
    struct schema_known *known = schema_find_known(b, schema);
    *rule = known ? known->rule : 0;
    if (known && known->built)
        return true;
    if (!known && (json_is_true(schema) || (json_is_object(schema) && !json_object_size(schema)))) {
        *rule = jsonform_any(&b->form);
        return true;
    }
    if (!json_is_object(schema) && !json_is_false(schema))
        return err_set(b->err, ERR_USAGE, "the schema at %.400s must be an object, true or false",
                       schema_place(b));
    if (b->depth >= SCHEMA_MAX_DEPTH)
        return err_set(b->err, ERR_USAGE, "the schema nests over %d deep at %.400s; flatten it",
                       SCHEMA_MAX_DEPTH, schema_place(b));
    if (!known)
        *rule = automaton_add_rule(b->a);
    if (b->a->full || json_is_false(schema))
        return true; /* automaton_finish reports it; a rule without a way: nothing fits */
    if (known)
        known->built = true;
    else if (!schema_note(b, (struct schema_known){schema, *rule, NULL, true}))
        return false;
    b->depth++;
    bool ok = schema_object_form(b, b->a->rules[*rule].start, b->a->rules[*rule].end, schema);
    b->depth--;
    return ok;
}

struct schema_build *schema_open(struct automaton *automaton, const json_t *root, bool in_call,
                                 struct err *err)
{
    struct schema_build *b = mem_new(1, sizeof *b);
    *b = (struct schema_build){.a = automaton, .form.a = automaton, .root = root, .err = err};
    b->path.max = 4096;
    b->form.no_tags = in_call;
    b->merged = json_array();
    buf_append_text(&b->path, "");
    return b;
}

bool schema_add(struct schema_build *b, const json_t *schema, uint32_t *rule)
{
    return schema_value(b, schema, rule) && schema_build_later(b);
}

struct jsonform *schema_form(struct schema_build *b)
{
    return &b->form;
}

void schema_close(struct schema_build *b)
{
    free(b->known);
    json_decref(b->merged);
    buf_free(&b->path);
    free(b);
}

uint32_t schema_skip_lines(struct automaton *a, uint32_t from)
{
    uint32_t end = automaton_add_node(a);
    automaton_add_empty(a, from, end);
    for (int i = 0; i < 2; i++) {
        from = jsonform_step(a, from, '\n', '\n');
        automaton_add_empty(a, from, end);
    }
    return end;
}

bool schema_build(struct automaton *a, const json_t *schema, struct err *err)
{
    struct schema_build *b = schema_open(a, schema, false, err);
    uint32_t rule;
    a->root = automaton_add_rule(a);
    bool ok = schema_add(b, schema, &rule);
    if (ok) {
        uint32_t at = schema_skip_lines(a, a->rules[a->root].start);
        automaton_add_call(a, at, a->rules[a->root].end, rule);
    }
    schema_close(b);
    return ok && automaton_finish(a, "the schema", err);
}
