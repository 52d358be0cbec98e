/* What a tool's JSON schema says about a parameter, and raw text to a JSON value of that type. */
#ifndef TEXT_VALUES_H
#define TEXT_VALUES_H

#include "base/buf.h"

#include <jansson.h>

enum values_type {
    VALUES_STRING = 1,
    VALUES_INTEGER = 2,
    VALUES_NUMBER = 4,
    VALUES_BOOLEAN = 8,
    VALUES_NULL = 16,
    VALUES_ARRAY = 32,
    VALUES_OBJECT = 64,
};

/* The function object of the tool called name[0..n) in an OpenAI tools array ({"function": {...}}
 * or the object itself); null when there is none. */
const json_t *values_find_tool(const json_t *tools, const char *name, size_t n);

/* The schema of parameter key[0..n) of a function object; null when it declares none. */
const json_t *values_find_parameter(const json_t *function, const char *key, size_t n);

/* Set of values_type that the schema of a parameter allows, through type lists, anyOf, oneOf,
 * allOf, enum, const, nullable and $ref into the function's parameters. VALUES_STRING when it
 * says nothing. */
unsigned values_types(const json_t *function, const json_t *schema);

/* Appends text[0..n) as JSON. The non-string types are tried first, in their JSON or Python
 * spelling; "null" is null unless only strings are allowed; what fits none is a JSON string of
 * the raw text. */
void values_append(struct buf *out, unsigned types, const char *text, size_t n);

#endif
