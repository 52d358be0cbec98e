/* Owns nothing: builds strings and integers as a schema limits them. */
#include "text/scalar.h"

#include "text/pattern.h"
#include "text/rawform.h"
#include "text/word.h"

#include <string.h>

bool scalar_has_bounds(const json_t *schema)
{
    return json_object_get(schema, "minimum") || json_object_get(schema, "maximum") ||
           json_object_get(schema, "exclusiveMinimum") ||
           json_object_get(schema, "exclusiveMaximum");
}

bool scalar_has_string_limits(const json_t *schema)
{
    return json_object_get(schema, "minLength") || json_object_get(schema, "maxLength") ||
           json_object_get(schema, "pattern") || json_object_get(schema, "format");
}

/* A string by its pattern or its format; not `matched` when it has neither. */
static bool scalar_add_pattern(struct schema_build *b, struct jsonform *form, const json_t *schema,
                               bool raw, uint32_t from, uint32_t end, bool *matched)
{
    const char *keyword = json_object_get(schema, "pattern") ? "pattern" : "format";
    const json_t *value = json_object_get(schema, keyword);
    const char *pattern = word_text(value);
    *matched = value != NULL;
    if (!value)
        return true;
    if (!pattern)
        return schema_refuse(b, keyword, "must be a string without a zero character");
    if (!strcmp(keyword, "format") && !(pattern = pattern_of_format(pattern)))
        return schema_refuse(b, keyword,
                             "is supported for date, time, date-time, uuid, email and uri; remove "
                             "it, or state it in the description");
    if (json_object_get(schema, "minLength") || json_object_get(schema, "maxLength") ||
        (json_object_get(schema, "format") && json_object_get(schema, "pattern")))
        return schema_refuse(b, keyword,
                             "is not supported beside minLength, maxLength, pattern or format");
    enum pattern_form kind = raw ? PATTERN_RAW : form->no_tags ? PATTERN_IN_CALL : PATTERN_JSON;
    uint32_t at = raw ? from : jsonform_step(form->a, from, '"', '"'),
             done = automaton_add_node(form->a);
    const char *why = pattern_add(form->a, pattern, kind, at, done);
    if (why)
        return schema_refuse(b, keyword, why);
    if (raw)
        automaton_add_empty(form->a, done, end);
    else
        automaton_add_byte(form->a, done, end, '"', '"');
    return true;
}

bool scalar_add_string(struct schema_build *b, struct jsonform *form, const json_t *schema,
                       bool raw, uint32_t from, uint32_t end)
{
    long min, max;
    if (!schema_count(b, schema, "minLength", 0, &min) ||
        !schema_count(b, schema, "maxLength", -1, &max))
        return false;
    if (max >= 0 && min > max)
        return schema_refuse(b, "minLength", "is above maxLength: nothing fits");
    bool matched;
    if (!scalar_add_pattern(b, form, schema, raw, from, end, &matched))
        return false;
    if (matched)
        return true;
    if (raw)
        rawform_add_plain(form->a, from, end, min, max, 0);
    else if (!min && max < 0)
        automaton_add_call(form->a, from, end, jsonform_string(form));
    else
        jsonform_string_body(form, jsonform_step(form->a, from, '"', '"'), end, min, max);
    return true;
}

/* An integer between the schema's bounds. */
bool scalar_add_integer(struct schema_build *b, struct jsonform *form, const json_t *schema,
                        uint32_t from, uint32_t end)
{
    static const char *const names[] = {"minimum", "exclusiveMinimum", "maximum",
                                        "exclusiveMaximum"};
    int64_t low = -JSONFORM_MAX, high = JSONFORM_MAX;
    for (int i = 0; i < 4; i++) {
        const json_t *value = json_object_get(schema, names[i]);
        if (!value)
            continue;
        double n = json_number_value(value);
        if (!json_is_number(value) || n > 1e17 || n < -1e17 ||
            (json_is_real(value) && n != (double)(int64_t)n))
            return schema_refuse(b, names[i], "must be a whole number of at most 17 digits");
        int64_t bound = json_is_integer(value) ? json_integer_value(value) : (int64_t)n;
        bound += i == 1 ? 1 : i == 3 ? -1 : 0;
        if (i < 2)
            low = bound > low ? bound : low;
        else
            high = bound < high ? bound : high;
    }
    if (low > high)
        return schema_refuse(b, "minimum", "is above maximum: nothing fits");
    jsonform_range(form->a, from, end, low, high);
    return true;
}
