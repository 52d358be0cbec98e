/* What a client did wrong or met: the HTTP status, and what the APIs' error objects hold. */
#ifndef SERVER_FAULT_H
#define SERVER_FAULT_H

#include "base/err.h"

#include <jansson.h>

struct fault {
    int status;
    const char *code; /* a constant, as "context_length_exceeded"; or null */
    char param[128];  /* the field to blame, or empty */
    char text[1024];
};

/* A 400 that blames a field; param may be null. Returns false. */
bool fault_set(struct fault *fault, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Any status. Returns false. */
bool fault_set_status(struct fault *fault, int status, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Usage and input errors become 400, resource 503, internal 500. Returns false. */
bool fault_from_err(struct fault *fault, const struct err *err);

/* The `type` that OpenAI's and Anthropic's error objects name for a status. */
const char *fault_openai_type(const struct fault *fault);
const char *fault_anthropic_type(const struct fault *fault);

/* {"error": {...}} and {"type": "error", "error": {...}}; new references. */
json_t *fault_openai_json(const struct fault *fault);
json_t *fault_anthropic_json(const struct fault *fault);

#endif
