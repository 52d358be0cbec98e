/* Strings and integers with the limits of a schema. */
#ifndef TEXT_SCALAR_H
#define TEXT_SCALAR_H

#include "text/jsonform.h"
#include "text/schema.h"

/* Whether the schema limits its numbers; its strings. */
bool scalar_has_bounds(const json_t *schema);
bool scalar_has_string_limits(const json_t *schema);

/* A string as JSON, or (raw) the text alone, by length, pattern or format. */
bool scalar_add_string(struct schema_build *build, struct jsonform *form, const json_t *schema,
                       bool raw, uint32_t from, uint32_t end);
/* An integer between the bounds. */
bool scalar_add_integer(struct schema_build *build, struct jsonform *form, const json_t *schema,
                        uint32_t from, uint32_t end);

#endif
