/* A small validator of JSON schemas, written apart from src/text/schema.c: what the fuzzer's
 * schemas use and no more. */
#ifndef FUZZ_VALIDATE_H
#define FUZZ_VALIDATE_H

#include <jansson.h>
#include <regex.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

static inline size_t validate_chars(const char *text)
{
    size_t n = 0;
    for (; *text; text++)
        n += ((unsigned char)*text & 0xc0) != 0x80;
    return n;
}

static inline bool validate_type_is(const char *name, const json_t *value)
{
    if (!strcmp(name, "number"))
        return json_is_number(value);
    if (!strcmp(name, "integer"))
        return json_is_integer(value) ||
               (json_is_real(value) &&
                json_real_value(value) == (double)(long long)json_real_value(value));
    if (!strcmp(name, "string"))
        return json_is_string(value);
    if (!strcmp(name, "boolean"))
        return json_is_boolean(value);
    if (!strcmp(name, "null"))
        return json_is_null(value);
    return !strcmp(name, "array") ? json_is_array(value) : json_is_object(value);
}

static inline bool validate_type(const json_t *type, const json_t *value)
{
    if (json_is_string(type))
        return validate_type_is(json_string_value(type), value);
    for (size_t i = 0; i < json_array_size(type); i++)
        if (validate_type_is(json_string_value(json_array_get(type, i)), value))
            return true;
    return false;
}

static inline bool validate_pattern(const char *pattern, const char *text)
{
    regex_t regex;
    if (regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB) != 0)
        return false;
    bool fits = regexec(&regex, text, 0, NULL, 0) == 0;
    regfree(&regex);
    return fits;
}

static inline bool validate_string(const json_t *schema, const char *text)
{
    static const char *const formats[][2] = {
        {"date", "^[0-9]{4}-[01][0-9]-[0-3][0-9]$"},
        {"time", "^[0-2][0-9]:[0-5][0-9]:[0-6][0-9](\\.[0-9]+)?(Z|[+-][0-2][0-9]:[0-5][0-9])$"},
        {"date-time",
         "^[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9](\\.[0-9]+)?(Z|"
         "[+-][0-2][0-9]:[0-5][0-9])$"},
        {"uuid", "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"},
        {"email", "^[^@ ]+@[^@ ]+$"},
        {"uri", "^[A-Za-z][A-Za-z0-9+.-]*:[^ ]+$"}};
    const json_t *min = json_object_get(schema, "minLength"),
                 *max = json_object_get(schema, "maxLength"),
                 *pattern = json_object_get(schema, "pattern"),
                 *format = json_object_get(schema, "format");
    if (min && (json_int_t)validate_chars(text) < json_integer_value(min))
        return false;
    if (max && (json_int_t)validate_chars(text) > json_integer_value(max))
        return false;
    if (pattern && !validate_pattern(json_string_value(pattern), text))
        return false;
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(formats[i][0], json_string_value(format)))
            return validate_pattern(formats[i][1], text);
    return true;
}

static inline bool validate_number(const json_t *schema, const json_t *value)
{
    const json_t *min = json_object_get(schema, "minimum"),
                 *max = json_object_get(schema, "maximum"),
                 *above = json_object_get(schema, "exclusiveMinimum"),
                 *below = json_object_get(schema, "exclusiveMaximum");
    long double n = json_is_integer(value) ? (long double)json_integer_value(value)
                                           : (long double)json_real_value(value);
    return !(min && n < (long double)json_number_value(min)) &&
           !(max && n > (long double)json_number_value(max)) &&
           !(above && n <= (long double)json_number_value(above)) &&
           !(below && n >= (long double)json_number_value(below));
}

static inline bool validate(const json_t *root, const json_t *schema, const json_t *value);

static inline bool validate_array(const json_t *root, const json_t *schema, const json_t *value)
{
    const json_t *first = json_object_get(schema, "prefixItems"),
                 *items = json_object_get(schema, "items"),
                 *min = json_object_get(schema, "minItems"),
                 *max = json_object_get(schema, "maxItems");
    json_int_t n = (json_int_t)json_array_size(value);
    if ((min && n < json_integer_value(min)) || (max && n > json_integer_value(max)))
        return false;
    for (size_t i = 0; i < (size_t)n; i++) {
        const json_t *one = i < json_array_size(first) ? json_array_get(first, i) : items;
        if (one && !validate(root, one, json_array_get(value, i)))
            return false;
    }
    return true;
}

static inline bool validate_object(const json_t *root, const json_t *schema, const json_t *value)
{
    const json_t *all = json_object_get(schema, "properties"),
                 *more = json_object_get(schema, "additionalProperties"),
                 *required = json_object_get(schema, "required");
    const char *key;
    json_t *member;
    for (size_t i = 0; i < json_array_size(required); i++)
        if (!json_object_get(value, json_string_value(json_array_get(required, i))))
            return false;
    json_object_foreach((json_t *)value, key, member)
    {
        const json_t *one = json_object_get(all, key);
        one = one ? one : more;
        if (one && !validate(root, one, member))
            return false;
    }
    return true;
}

static inline bool validate_union(const json_t *root, const json_t *list, const json_t *value)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (validate(root, json_array_get(list, i), value))
            return true;
    return false;
}

static inline bool validate_given(const json_t *schema, const json_t *value)
{
    const json_t *list = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_equal(json_array_get(list, i), value))
            return true;
    return list ? false : !one || json_equal(one, value);
}

static inline bool validate(const json_t *root, const json_t *schema, const json_t *value)
{
    if (json_is_boolean(schema))
        return json_is_true(schema);
    if (json_is_null(value) && json_is_true(json_object_get(schema, "nullable")))
        return true;
    const json_t *type = json_object_get(schema, "type"), *any = json_object_get(schema, "anyOf"),
                 *one = json_object_get(schema, "oneOf"), *all = json_object_get(schema, "allOf");
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    if (ref && !strcmp(ref, "#"))
        return validate(root, root, value);
    if (ref && !validate(root, json_object_get(json_object_get(root, "$defs"), ref + 8), value))
        return false;
    for (size_t i = 0; i < json_array_size(all); i++)
        if (!validate(root, json_array_get(all, i), value))
            return false;
    return !(type && !validate_type(type, value)) && validate_given(schema, value) &&
           !(any && !validate_union(root, any, value)) &&
           !(one && !validate_union(root, one, value)) &&
           !(json_is_string(value) && !validate_string(schema, json_string_value(value))) &&
           !(json_is_number(value) && !validate_number(schema, value)) &&
           !(json_is_array(value) && !validate_array(root, schema, value)) &&
           !(json_is_object(value) && !validate_object(root, schema, value));
}

#endif
