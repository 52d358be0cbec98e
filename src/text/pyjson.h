/* JSON as Python's json.dumps(value, ensure_ascii=False) writes it, which is what the model saw
 * in training: ", " and ": " between items, keys in insertion order, non-ASCII text as it is,
 * floats in the shortest spelling that reads back to the same double. */
#ifndef TEXT_PYJSON_H
#define TEXT_PYJSON_H

#include "base/buf.h"

#include <jansson.h>

void pyjson_append(struct buf *out, const json_t *value);

/* The same without spaces between items: for replies. */
void pyjson_append_compact(struct buf *out, const json_t *value);

/* text[0..n) as the inside of a JSON string, without the quotes. Each byte is treated by itself, so
 * a string may be escaped in pieces. */
void pyjson_append_escaped(struct buf *out, const char *text, size_t n);

/* A finite double as repr() spells it: 1.0, 1e+16, 1e-05, -0.0. */
void pyjson_append_real(struct buf *out, double value);

#endif
