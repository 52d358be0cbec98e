/* POST /v1/responses. */
#ifndef SERVER_RESPONSES_H
#define SERVER_RESPONSES_H

#include "server/answer.h"
#include "server/fields.h"

extern const struct field responses_fields[];

bool responses_handle(struct exchange *x);

/* The body in the common form (responses_in.c). */
struct chat;
bool responses_read_chat(struct answer *answer, struct chat *chat, struct fault *fault);

/* A function of a namespace has one name for the model, NAMESPACE__NAME. A call of one among the
 * request's `tools` gets its parts back in `name` and `namespace`. */
void responses_split_name(const json_t *tools, json_t *item);

/* Thoughts travel with a client that keeps nothing but `encrypted_content`: the text in
 * hexadecimal behind a mark. It is not encrypted, for it is no secret from its user. */
json_t *responses_wrap_thought(const struct buf *text);

#endif
