/* POST /v1/chat/completions. */
#ifndef SERVER_OPENAI_CHAT_H
#define SERVER_OPENAI_CHAT_H

#include "server/answer.h"
#include "server/fields.h"

extern const struct field openai_chat_fields[];

bool openai_chat_handle(struct exchange *x);

/* {"prompt_tokens", ...} of both OpenAI forms; a new reference. */
json_t *openai_chat_usage(const struct answer *answer);

/* How a stream of either form ends after a fault. */
void openai_chat_fail(struct answer *answer, const struct fault *fault);

/* Reads what the body says of messages, tools and thinking, as /apply-template needs it. */
struct chat;
bool openai_chat_read_chat(struct answer *answer, struct chat *chat, struct fault *fault);

#endif
