/* Owns nothing; every function appends to the caller's buffer. Recursion follows the nesting of the
 * value, which jansson's parser bounds at 2,048. */
#include "text/pyjson.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void pyjson_append_escaped(struct buf *out, const char *text, size_t n)
{
    size_t start = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        buf_append(out, text + start, i - start);
        start = i + 1;
        static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
        const char *at = c ? strchr(from, c) : NULL;
        if (at)
            buf_append(out, (char[]){'\\', to[at - from]}, 2);
        else
            buf_printf(out, "\\u%04x", c);
    }
    buf_append(out, text + start, n - start);
}

/* The fewest decimal digits that read back as v > 0: v = digits * 10^(exponent - count + 1).
 * Just above a power of two the doubles are twice as far apart as below it, so there the nearest
 * decimal of a length can miss although the next larger one reads back: both are tried. */
static uint64_t pyjson_shortest(double v, int *count, int *exponent)
{
    for (int n = 1;; n++) {
        char text[40];
        snprintf(text, sizeof text, "%.*e", n - 1, v);
        char *e = strchr(text, 'e');
        *exponent = (int)strtol(e + 1, NULL, 10);
        uint64_t digits = 0;
        for (const char *p = text; p < e; p++)
            if (*p >= '0' && *p <= '9')
                digits = digits * 10 + (uint64_t)(*p - '0');
        *count = n;
        if (n == 17)
            return digits;
        for (uint64_t up = 0; up < 2; up++) {
            snprintf(text, sizeof text, "%llue%d", (unsigned long long)(digits + up),
                     *exponent - n + 1);
            if (strtod(text, NULL) == v)
                return digits + up;
        }
    }
}

void pyjson_append_real(struct buf *out, double value)
{
    if (value == 0) {
        buf_append_text(out, 1 / value < 0 ? "-0.0" : "0.0");
        return;
    }
    if (value < 0)
        buf_append_char(out, '-');
    int count, exponent;
    uint64_t n = pyjson_shortest(value < 0 ? -value : value, &count, &exponent);
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    exponent += len - count; /* 9.99 rounded up to 10.0 */
    while (len > 1 && digits[len - 1] == '0')
        len--;
    if (exponent < -4 || exponent >= 16) {
        buf_append(out, digits, 1);
        if (len > 1) {
            buf_append_char(out, '.');
            buf_append(out, digits + 1, (size_t)len - 1);
        }
        buf_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        buf_append(out, "0.000", (size_t)(1 - exponent));
        buf_append(out, digits, (size_t)len);
    } else {
        for (int i = 0; i <= exponent || i < len; i++) {
            if (i == exponent + 1)
                buf_append_char(out, '.');
            buf_append_char(out, i < len ? digits[i] : '0');
        }
        if (len <= exponent + 1)
            buf_append_text(out, ".0");
    }
}

static void pyjson_append_string(struct buf *out, const char *text, size_t n)
{
    buf_append_char(out, '"');
    pyjson_append_escaped(out, text, n);
    buf_append_char(out, '"');
}

static void pyjson_write(struct buf *out, const json_t *value, const char *comma, const char *colon)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: {
        const char *key, *sep = "";
        json_t *item;
        buf_append_char(out, '{');
        json_object_foreach((json_t *)value, key, item)
        {
            buf_append_text(out, sep);
            pyjson_append_string(out, key, strlen(key));
            buf_append_text(out, colon);
            pyjson_write(out, item, comma, colon);
            sep = comma;
        }
        buf_append_char(out, '}');
        break;
    }
    case JSON_ARRAY:
        buf_append_char(out, '[');
        for (size_t i = 0; i < json_array_size(value); i++) {
            if (i)
                buf_append_text(out, comma);
            pyjson_write(out, json_array_get(value, i), comma, colon);
        }
        buf_append_char(out, ']');
        break;
    case JSON_STRING:
        pyjson_append_string(out, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        buf_printf(out, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        pyjson_append_real(out, json_real_value(value));
        break;
    case JSON_TRUE:
        buf_append_text(out, "true");
        break;
    case JSON_FALSE:
        buf_append_text(out, "false");
        break;
    case JSON_NULL:
        buf_append_text(out, "null");
        break;
    }
}

void pyjson_append(struct buf *out, const json_t *value)
{
    pyjson_write(out, value, ", ", ": ");
}

void pyjson_append_compact(struct buf *out, const json_t *value)
{
    pyjson_write(out, value, ",", ":");
}
