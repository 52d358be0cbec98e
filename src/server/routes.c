/* Every endpoint. */
#include "server/anthropic.h"
#include "server/completions.h"
#include "server/core.h"
#include "server/openai_chat.h"
#include "server/responses.h"
#include "server/tools.h"

const struct route route_table[] = {
    {"POST", "/v1/chat/completions", ROUTE_BODY, openai_chat_handle},
    {"POST", "/v1/completions", ROUTE_BODY, completions_handle},
    {"POST", "/v1/responses", ROUTE_BODY, responses_handle},
    {"POST", "/v1/messages", ROUTE_BODY | ROUTE_ANTHROPIC, anthropic_handle},
    {"POST", "/v1/messages/count_tokens", ROUTE_BODY | ROUTE_ANTHROPIC, anthropic_handle_count},
    {"GET", "/v1/models", 0, tools_handle_models},
    {"GET", "/v1/models/", ROUTE_PREFIX, tools_handle_models},
    {"POST", "/tokenize", ROUTE_BODY, tools_handle_tokenize},
    {"POST", "/detokenize", ROUTE_BODY, tools_handle_detokenize},
    {"POST", "/apply-template", ROUTE_BODY, tools_handle_template},
    {"GET", "/health", ROUTE_OPEN, tools_handle_health},
    {"GET", "/metrics", 0, tools_handle_metrics},
    {"GET", "/props", 0, tools_handle_props},
    {"GET", "/", ROUTE_OPEN, tools_handle_page},
    {NULL, NULL, 0, NULL},
};
