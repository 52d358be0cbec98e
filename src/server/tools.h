/* The small endpoints: /tokenize, /detokenize, /apply-template, /v1/models, /health, /metrics,
 * /props and the page. */
#ifndef SERVER_TOOLS_H
#define SERVER_TOOLS_H

#include "server/core.h"

bool tools_handle_tokenize(struct exchange *x);
bool tools_handle_detokenize(struct exchange *x);
bool tools_handle_template(struct exchange *x);
bool tools_handle_models(struct exchange *x);
bool tools_handle_health(struct exchange *x);
bool tools_handle_metrics(struct exchange *x);
bool tools_handle_props(struct exchange *x);
bool tools_handle_page(struct exchange *x);

#endif
