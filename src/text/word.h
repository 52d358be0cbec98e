/* Strings of a document that are keywords or names. A JSON string may hold a zero byte, where C
 * sees its end: "user\u0000x" is not "user". */
#ifndef TEXT_WORD_H
#define TEXT_WORD_H

#include <jansson.h>
#include <stdbool.h>
#include <string.h>

/* Null when it is no string, or holds a zero byte. */
static inline const char *word_text(const json_t *value)
{
    const char *text = json_string_value(value);
    return text && strlen(text) == json_string_length(value) ? text : NULL;
}

static inline bool word_is(const json_t *value, const char *word)
{
    const char *text = word_text(value);
    return text && !strcmp(text, word);
}

/* For messages. */
static inline const char *word_shown(const json_t *value)
{
    const char *text = word_text(value);
    if (text)
        return text;
    return json_is_string(value) ? "(text with a zero character)" : "none";
}

#endif
