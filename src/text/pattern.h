/* Regular expressions of schemas (`pattern`, `format` by fixed ones) as parts of an automaton. */
#ifndef TEXT_PATTERN_H
#define TEXT_PATTERN_H

#include "text/automaton.h"

enum pattern_form {
    PATTERN_JSON,    /* between the quotes of a JSON string */
    PATTERN_IN_CALL, /* the same, within a tool call: no '<' */
    PATTERN_RAW,     /* raw text of a tool call: no '<' */
};

/* From `from` to `end`, one line of printable characters that match; docs/grammar.md has the
 * subset. Returns null, or why the pattern is refused. */
const char *pattern_add(struct automaton *a, const char *pattern, enum pattern_form form,
                        uint32_t from, uint32_t end);

/* The expression of a format; null when there is none by this name. */
const char *pattern_of_format(const char *format);

#endif
