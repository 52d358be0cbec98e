/* Which fields a request object may have, and reading them. A field that is not in the table is
 * refused by its name: a request must not seem to be honoured when it is not. */
#ifndef SERVER_FIELDS_H
#define SERVER_FIELDS_H

#include "server/fault.h"

#include <stddef.h>
#include <stdint.h>

enum field_rule {
    FIELD_HONOURED,
    FIELD_IGNORED, /* accepted without effect: it steers nothing that exists here */
    FIELD_REFUSED, /* known, and an error unless it is null, false, or empty */
};

struct field {
    const char *name; /* null ends a table */
    enum field_rule rule;
};

/* `where` names the object in errors, or is null for the body itself. */
bool fields_check(const json_t *object, const struct field *table, const char *where,
                  struct fault *fault);

/* Each reads object[name] when it is there and not null, else leaves *out as it is. Bounds are
 * inclusive. */
bool fields_read_bool(const json_t *object, const char *name, bool *out, struct fault *fault);
bool fields_read_uint(const json_t *object, const char *name, uint64_t lo, uint64_t hi,
                      uint64_t *out, struct fault *fault);
bool fields_read_float(const json_t *object, const char *name, double lo, double hi, float *out,
                       struct fault *fault);
/* Text without a zero byte; the object keeps it. */
bool fields_read_text(const json_t *object, const char *name, const char **out,
                      struct fault *fault);

/* The field, or null when it is absent or null. */
const json_t *fields_get(const json_t *object, const char *name);

/* As fields_get, and an error when it is there and is not of the type. *out is borrowed. */
bool fields_read_typed(const json_t *object, const char *name, json_type type, json_t **out,
                       struct fault *fault);

#endif
