/* allOf of several objects as one. */
#ifndef TEXT_MERGE_H
#define TEXT_MERGE_H

#include "text/schema.h"

/* A new schema with the properties of the schema itself and of all parts of its allOf, as they are
 * written; null, with the error set, when a part is more than an object of properties, or when two
 * parts say different things of one property. */
json_t *merge_objects(struct schema_build *build, const json_t *schema);

#endif
