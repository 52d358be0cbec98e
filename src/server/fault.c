/* Owns nothing: faults to the error objects that clients of each API know how to read. */
#include "server/fault.h"

#include "base/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Messages quote what a client sent and may be cut anywhere: what is no longer UTF-8 is dropped. */
static void fault_mend(char *text)
{
    size_t n = strlen(text), good;
    while ((good = utf8_valid_prefix(text, n)) < n) {
        size_t bad = utf8_bad_length(text + good, n - good);
        memmove(text + good, text + good + bad, n - good - bad + 1);
        n -= bad;
    }
}

static void fault_write(struct fault *fault, int status, const char *code, const char *fmt,
                        va_list ap)
{
    fault->status = status;
    fault->code = code;
    fault->param[0] = 0;
    vsnprintf(fault->text, sizeof fault->text, fmt, ap);
    fault_mend(fault->text);
}

bool fault_set(struct fault *fault, const char *param, const char *fmt, ...)
{
    char name[sizeof fault->param];
    snprintf(name, sizeof name, "%s", param ? param : "");
    va_list ap;
    va_start(ap, fmt);
    fault_write(fault, 400, NULL, fmt, ap);
    va_end(ap);
    snprintf(fault->param, sizeof fault->param, "%s", name);
    fault_mend(fault->param);
    return false;
}

bool fault_set_status(struct fault *fault, int status, const char *code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fault_write(fault, status, code, fmt, ap);
    va_end(ap);
    return false;
}

bool fault_from_err(struct fault *fault, const struct err *err)
{
    switch (err->kind) {
    case ERR_RESOURCE:
        return fault_set_status(fault, 503, "overloaded", "%s", err->text);
    case ERR_INTERNAL:
        return fault_set_status(fault, 500, "internal_error", "%s", err->text);
    default:
        return fault_set(fault, NULL, "%s", err->text);
    }
}

const char *fault_openai_type(const struct fault *fault)
{
    switch (fault->status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    default:
        return fault->status < 500 ? "invalid_request_error" : "server_error";
    }
}

const char *fault_anthropic_type(const struct fault *fault)
{
    switch (fault->status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
        return "overloaded_error";
    default:
        return fault->status < 500 ? "invalid_request_error" : "api_error";
    }
}

json_t *fault_openai_json(const struct fault *fault)
{
    return json_pack("{s:{s:s,s:s,s:o,s:o}}", "error", "message", fault->text, "type",
                     fault_openai_type(fault), "param",
                     fault->param[0] ? json_string(fault->param) : json_null(), "code",
                     fault->code ? json_string(fault->code) : json_null());
}

json_t *fault_anthropic_json(const struct fault *fault)
{
    return json_pack("{s:s,s:{s:s,s:s}}", "type", "error", "error", "type",
                     fault_anthropic_type(fault), "message", fault->text);
}
