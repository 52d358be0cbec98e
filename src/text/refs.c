/* Owns nothing. */
#include "text/refs.h"

#include "base/mem.h"
#include "text/word.h"

#include <stdlib.h>

static int refs_digit(char c)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    const char *at = c ? strchr(digits, c) : NULL;
    return !at ? -1 : at - digits < 16 ? (int)(at - digits) : (int)(at - digits) - 6;
}

/* The fragment with its %XX resolved; null when one is a zero byte. */
static char *refs_decode(const char *fragment)
{
    char *text = mem_copy_text(fragment, strlen(fragment)), *out = text;
    for (const char *p = text; *p; p++) {
        int hi = *p == '%' ? refs_digit(p[1]) : -1, lo = hi < 0 ? -1 : refs_digit(p[2]);
        *out++ = lo < 0 ? *p : (char)(hi << 4 | lo);
        p += lo < 0 ? 0 : 2;
        if (!out[-1]) {
            free(text);
            return NULL;
        }
    }
    *out = 0;
    return text;
}

/* Ends the part of a pointer that begins at `part` and resolves its escapes; returns the next. */
static char *refs_cut(char *part)
{
    char *out = part, *p = part;
    for (; *p && *p != '/'; p++) {
        bool escape = p[0] == '~' && (p[1] == '0' || p[1] == '1');
        *out++ = escape ? (*++p == '0' ? '~' : '/') : *p;
    }
    char *next = *p ? p + 1 : NULL;
    *out = 0;
    return next;
}

static const json_t *refs_step(const json_t *at, const char *part)
{
    if (!json_is_array(at))
        return json_object_get(at, part);
    bool number = *part && part[strspn(part, "0123456789")] == 0;
    return number ? json_array_get(at, (size_t)strtoul(part, NULL, 10)) : NULL;
}

const json_t *refs_follow(const json_t *root, const char *ref)
{
    char *text = ref && *ref == '#' ? refs_decode(ref + 1) : NULL;
    const json_t *at = text && (!*text || *text == '/') ? root : NULL;
    for (char *part = text && *text ? text + 1 : NULL, *next; at && part; part = next) {
        next = refs_cut(part);
        at = refs_step(at, part);
    }
    free(text);
    return at;
}

static bool refs_is_in(const char *key, const char *const *names)
{
    while (*names && strcmp(*names, key) != 0)
        names++;
    return *names;
}

static const json_t *refs_search(const json_t *root, const json_t *schema);

/* In each of the values, which are schemas. */
static const json_t *refs_search_all(const json_t *root, const json_t *values)
{
    const json_t *found = NULL;
    const char *key;
    json_t *value;
    for (size_t i = 0; !found && i < json_array_size(values); i++)
        found = refs_search(root, json_array_get(values, i));
    json_object_foreach((json_t *)values, key, value)
    {
        if (found)
            break;
        found = refs_search(root, value);
    }
    return found;
}

static const json_t *refs_search(const json_t *root, const json_t *schema)
{
    /* Values of schemas, which may hold anything, and of other keywords are passed over. */
    static const char *const one[] = {"items",
                                      "additionalItems",
                                      "additionalProperties",
                                      "unevaluatedItems",
                                      "unevaluatedProperties",
                                      "contains",
                                      "propertyNames",
                                      "not",
                                      "if",
                                      "then",
                                      "else",
                                      NULL};
    static const char *const many[] = {"properties",
                                       "patternProperties",
                                       "dependentSchemas",
                                       "$defs",
                                       "definitions",
                                       "anyOf",
                                       "oneOf",
                                       "allOf",
                                       "items",
                                       "prefixItems",
                                       NULL};
    const json_t *ref = json_object_get(schema, "$ref"), *found = NULL;
    const char *text = json_string_value(ref), *key;
    json_t *value;
    if (text && (!strncmp(text, "#/", 2)) && !refs_follow(root, word_text(ref)))
        return ref;
    json_object_foreach((json_t *)schema, key, value)
    {
        if (json_is_object(value) && refs_is_in(key, one))
            found = refs_search(root, value);
        else if (refs_is_in(key, many))
            found = refs_search_all(root, value);
        if (found)
            break;
    }
    return found;
}

const json_t *refs_find_broken(const json_t *root)
{
    return refs_search(root, root);
}
