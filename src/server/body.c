/* Scans the text before jansson sees it, so that what jansson allocates is bounded. The scan need
 * not judge validity: it only counts, and mends surrogates and long numbers; what it misreads,
 * jansson refuses. */
#include "server/body.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BODY_MAX_NUMBER = 400 /* characters: more than any double needs */ };

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

/* The number at text[at..), whose end goes to *end. jansson refuses whole numbers beyond 64 bits.
 * They occur in the schemas of tools and mean no harm, so they become reals of the same length,
 * with "e2" for the last two digits. False: it is too large for a double. */
static bool body_mend_number(char *text, size_t at, size_t n, size_t *end)
{
    size_t i = at;
    bool whole = true;
    for (; i < n && strchr("+-.0123456789eE", text[i]) && text[i]; i++)
        whole = whole && (i == at || (text[i] >= '0' && text[i] <= '9'));
    *end = i;
    if (i - at < 5 || i - at > BODY_MAX_NUMBER)
        return i - at < 5;
    char copy[BODY_MAX_NUMBER + 1];
    memcpy(copy, text + at, i - at);
    copy[i - at] = 0;
    if (isinf(strtod(copy, NULL)))
        return false;
    errno = 0;
    strtoll(copy, NULL, 10);
    if (whole && errno == ERANGE)
        memcpy(text + i - 2, "e2", 2);
    return true;
}

/* Where the scan is. */
struct body_scan {
    char *text;
    size_t n, depth, values;
    size_t string, string_len; /* the newest string */
    size_t key, key_len;       /* the newest one that names a member of the body itself */
};

/* Moves behind the string that opens at text[at]. */
static size_t body_scan_string(struct body_scan *s, size_t at)
{
    size_t i = at + 1;
    while (i < s->n && s->text[i] != '"')
        i += s->text[i] == '\\' ? body_mend_escape(s->text + i, s->n - i) : 1;
    i = i < s->n ? i : s->n;
    s->string = at + 1;
    s->string_len = i - at - 1;
    return i + 1;
}

/* What stands at text[at] outside of strings; returns what comes next, or 0 with the fault. */
static size_t body_scan_byte(struct body_scan *s, size_t at, struct fault *fault)
{
    char c = s->text[at];
    size_t end;
    if ((c == '[' || c == '{') && ++s->depth > BODY_MAX_DEPTH)
        return fault_set(fault, NULL, "the body nests more than %d arrays and objects",
                         BODY_MAX_DEPTH);
    if ((c == ']' || c == '}') && s->depth > 0)
        s->depth--;
    if ((c == ',' || c == '[' || c == '{') && ++s->values > BODY_MAX_VALUES)
        return fault_set_status(fault, 413, NULL, "the body holds more than %d values",
                                BODY_MAX_VALUES);
    if (c == ':' && s->depth == 1) {
        s->key = s->string;
        s->key_len = s->string_len < 60 ? s->string_len : 60;
    }
    if (c != '-' && (c < '0' || c > '9'))
        return at + 1;
    if (body_mend_number(s->text, at, s->n, &end))
        return end;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)s->key_len, s->text + s->key);
    return fault_set(fault, name, "'%s' holds a number that is too large or too long", name);
}

static bool body_scan(char *text, size_t n, struct fault *fault)
{
    struct body_scan s = {.text = text, .n = n, .values = 1};
    for (size_t i = 0; i < n;) {
        i = text[i] == '"' ? body_scan_string(&s, i) : body_scan_byte(&s, i, fault);
        if (!i)
            return false;
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
