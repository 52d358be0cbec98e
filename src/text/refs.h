/* $ref within a JSON schema: "#/$defs/a" as JSON pointers in fragments of URIs (RFC 6901, 6). */
#ifndef TEXT_REFS_H
#define TEXT_REFS_H

#include <jansson.h>

/* What `ref` names in the document; null when it leads out of it, or to nothing. */
const json_t *refs_follow(const json_t *root, const char *ref);

/* The first $ref in any schema of the document that points into it and to nothing ("#/..."), or
 * null. References to other documents and to anchors are not judged. */
const json_t *refs_find_broken(const json_t *root);

#endif
