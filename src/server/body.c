/* Scans the text before jansson sees it, so that what jansson allocates is bounded. The scan need
 * not judge validity: it only counts, and mends surrogates; what it misreads, jansson refuses. */
#include "server/body.h"

#include <stdlib.h>
#include <string.h>

/* The code unit of the escape \uXXXX at p[0..n); -1 when there is none. */
static int body_read_unit(const char *p, size_t n)
{
    int unit = 0;
    if (n < 6 || p[0] != '\\' || p[1] != 'u')
        return -1;
    for (size_t i = 2; i < 6; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        unit = unit << 4 | digit;
    }
    return unit;
}

/* Mends the escape at p when it is half of a pair; returns the bytes it takes. */
static size_t body_mend_escape(char *p, size_t n)
{
    int unit = body_read_unit(p, n);
    if (unit < 0)
        return n < 2 ? n : 2;
    if (unit < 0xd800 || unit > 0xdfff)
        return 6;
    int next = unit < 0xdc00 ? body_read_unit(p + 6, n - 6) : -1;
    if (next >= 0xdc00 && next <= 0xdfff)
        return 12;
    memcpy(p, "\\ufffd", 6);
    return 6;
}

static bool body_scan(char *text, size_t n, struct fault *fault)
{
    size_t depth = 0, values = 1;
    bool inside = false;
    for (size_t i = 0; i < n;) {
        char c = text[i];
        if (inside && c == '\\') {
            i += body_mend_escape(text + i, n - i);
            continue;
        }
        if (c == '"')
            inside = !inside;
        else if (!inside && (c == '[' || c == '{') && ++depth > BODY_MAX_DEPTH)
            return fault_set(fault, NULL, "the body nests more than %d arrays and objects",
                             BODY_MAX_DEPTH);
        else if (!inside && (c == ']' || c == '}') && depth > 0)
            depth--;
        if (!inside && (c == ',' || c == '[' || c == '{') && ++values > BODY_MAX_VALUES)
            return fault_set_status(fault, 413, NULL, "the body holds more than %d values",
                                    BODY_MAX_VALUES);
        i++;
    }
    return true;
}

bool body_parse(char *text, size_t n, json_t **out, struct fault *fault)
{
    if (n == 0)
        return fault_set(fault, NULL, "the request has no body; send a JSON object");
    if (!body_scan(text, n, fault))
        return false;
    json_error_t why;
    json_t *value = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (!value)
        return fault_set(fault, NULL, "the body is not valid JSON: %s (line %d, column %d)",
                         why.text, why.line, why.column);
    if (!json_is_object(value)) {
        json_decref(value);
        return fault_set(fault, NULL, "the body must be a JSON object");
    }
    *out = value;
    return true;
}
