/* Owns nothing. Errors name the field, what it must be, and never repeat the whole value. */
#include "server/fields.h"

#include "text/word.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool fields_is_empty(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) ||
           (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

bool fields_check(const json_t *object, const struct field *table, const char *where,
                  struct fault *fault)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        char name[128];
        snprintf(name, sizeof name, "%s%s%.60s", where ? where : "", where ? "." : "", key);
        const struct field *f = table;
        while (f->name && strcmp(f->name, key) != 0)
            f++;
        if (!f->name)
            return fault_set(fault, name, "the field '%s' is not supported", name);
        if (f->rule == FIELD_REFUSED && !fields_is_empty(value))
            return fault_set(fault, name, "the field '%s' is not supported; leave it out", name);
    }
    return true;
}

const json_t *fields_get(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    return value && !json_is_null(value) ? value : NULL;
}

bool fields_read_typed(const json_t *object, const char *name, json_type type, json_t **out,
                       struct fault *fault)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",       [JSON_ARRAY] = "a list",  [JSON_STRING] = "text",
        [JSON_INTEGER] = "a whole number", [JSON_REAL] = "a number", [JSON_TRUE] = "true or false",
        [JSON_FALSE] = "true or false",    [JSON_NULL] = "null"};
    json_t *value = json_object_get(object, name);
    *out = value && !json_is_null(value) ? value : NULL;
    if (!*out || json_typeof(*out) == type)
        return true;
    return fault_set(fault, name, "'%s' must be %s", name, names[type]);
}

bool fields_read_bool(const json_t *object, const char *name, bool *out, struct fault *fault)
{
    const json_t *value = fields_get(object, name);
    if (value && !json_is_boolean(value))
        return fault_set(fault, name, "'%s' must be true or false", name);
    if (value)
        *out = json_is_true(value);
    return true;
}

bool fields_read_uint(const json_t *object, const char *name, uint64_t lo, uint64_t hi,
                      uint64_t *out, struct fault *fault)
{
    const json_t *value = fields_get(object, name);
    if (!value)
        return true;
    double v = json_number_value(value);
    if (!json_is_number(value) || v != floor(v) || v < (double)lo || v > (double)hi)
        return fault_set(fault, name, "'%s' must be a whole number from %llu to %llu", name,
                         (unsigned long long)lo, (unsigned long long)hi);
    *out = json_is_integer(value) ? (uint64_t)json_integer_value(value) : (uint64_t)v;
    return true;
}

bool fields_read_float(const json_t *object, const char *name, double lo, double hi, float *out,
                       struct fault *fault)
{
    const json_t *value = fields_get(object, name);
    if (!value)
        return true;
    double v = json_number_value(value);
    if (!json_is_number(value) || !(v >= lo && v <= hi))
        return fault_set(fault, name, "'%s' must be a number from %g to %g", name, lo, hi);
    *out = (float)v;
    return true;
}

bool fields_read_text(const json_t *object, const char *name, const char **out, struct fault *fault)
{
    json_t *value;
    if (!fields_read_typed(object, name, JSON_STRING, &value, fault))
        return false;
    if (value && !word_text(value))
        return fault_set(fault, name, "'%s' must not hold a zero character", name);
    if (value)
        *out = json_string_value(value);
    return true;
}
