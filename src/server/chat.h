/* From messages, in OpenAI's form, to the prompt of an answer. */
#ifndef SERVER_CHAT_H
#define SERVER_CHAT_H

#include "server/answer.h"
#include "text/template.h"

enum chat_choice { CHAT_AUTO, CHAT_NONE, CHAT_REQUIRED, CHAT_NAMED };

struct chat {
    json_t *messages; /* owned; chat_free */
    json_t *tools;    /* OpenAI form, or null; owned */
    json_t
        *head_tools; /* those among them that the prompt begins with; null or empty: all; owned */
    enum chat_choice choice;
    const char *name; /* with CHAT_NAMED */
    bool one_call;
    json_t *schema; /* the content must fit it; or null; owned */
    struct template_options options;
    uint32_t think_tokens;   /* 0: no limit */
    size_t told, told_bytes; /* descriptions of tools in the midst of messages: Anthropic's */
};

/* Thinking is as the model has it by default, a generation prompt is added. */
void chat_init(struct chat *chat, const struct answer *answer);
void chat_free(struct chat *chat);

/* That the message has one of the five roles. */
bool chat_check_role(const json_t *message, const char *where, struct fault *fault);

/* Checks and tidies messages in place: content parts must be text, texts of roles and names sound,
 * `reasoning` counts as reasoning_content, volatile head lines go. */
bool chat_check_messages(json_t *messages, struct fault *fault);

/* Checks a tools array of OpenAI's chat form. */
bool chat_check_tools(const json_t *tools, struct fault *fault);

/* tool_choice as OpenAI's chat form has it: text, or {"type": "function", "function": {...}}. */
bool chat_read_choice(struct chat *chat, const json_t *value, struct fault *fault);

/* response_format, or Responses' text.format. */
bool chat_read_format(struct chat *chat, const json_t *format, const char *where,
                      struct fault *fault);

/* "none" and "minimal" turn thinking off, "low" and "medium" bound it, the rest does not. */
bool chat_read_effort(struct chat *chat, const json_t *value, const char *where,
                      struct fault *fault);

/* A number of tokens to think with; 0 turns thinking off. */
bool chat_read_budget(struct chat *chat, const json_t *object, const char *name,
                      struct fault *fault);

/* Renders and tokenises into answer->prompts[0], and sets what follows from it. */
bool chat_prepare(struct chat *chat, struct answer *answer, struct fault *fault);

/* The text of a string, or of a list of objects whose `type` is among `types` (null ends them),
 * joined by nothing; "" for null or nothing. `noun` names such an object in errors. A new
 * reference, or null after fault_set. */
json_t *chat_join_text(const json_t *value, const char *where, const char *noun,
                       const char *const *types, struct fault *fault);

/* Text without the lines at its head that change with each request of a coding agent
 * ("x-anthropic-billing-header: ..."); they would keep every prompt from being reused. */
const char *chat_skip_volatile(const char *text);

#endif
