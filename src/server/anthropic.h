/* POST /v1/messages and /v1/messages/count_tokens. */
#ifndef SERVER_ANTHROPIC_H
#define SERVER_ANTHROPIC_H

#include "server/answer.h"
#include "server/fields.h"

extern const struct field anthropic_fields[];

bool anthropic_handle(struct exchange *x);
bool anthropic_handle_count(struct exchange *x);

/* The body of /v1/messages in the common form. */
struct chat;
bool anthropic_read_chat(struct answer *answer, struct chat *chat, struct fault *fault);

#endif
