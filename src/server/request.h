/* What the APIs' requests have in common: sampling, stop strings, limits, names. */
#ifndef SERVER_REQUEST_H
#define SERVER_REQUEST_H

#include "server/answer.h"
#include "server/fields.h"

/* model, stream: what every body has. */
bool request_read_head(struct answer *answer, struct fault *fault);

/* temperature, top_p, top_k, min_p, penalties, logit_bias, seed, under their OpenAI names. Without
 * `thinking` the model's advice for answers without thoughts is the default. */
bool request_read_sampling(struct answer *answer, bool thinking, struct fault *fault);

/* A string or a list of up to 16. */
bool request_read_stops(struct answer *answer, const char *name, struct fault *fault);

/* The token limit in the first of the named fields that is there; names end with null. */
bool request_read_limit(struct answer *answer, const char *const *names, struct fault *fault);

/* stream_options.include_usage. */
bool request_read_stream_options(struct answer *answer, struct fault *fault);

#endif
