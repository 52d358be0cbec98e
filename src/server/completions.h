/* POST /v1/completions. */
#ifndef SERVER_COMPLETIONS_H
#define SERVER_COMPLETIONS_H

#include "server/answer.h"
#include "server/fields.h"

extern const struct field completions_fields[];

bool completions_handle(struct exchange *x);

#endif
