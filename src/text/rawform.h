/* Raw text of tool calls: values that stand between <parameter=KEY> and </parameter> unescaped. */
#ifndef TEXT_RAWFORM_H
#define TEXT_RAWFORM_H

#include "text/automaton.h"

/* The rule of a value with the tag that closes it, from behind "<parameter=KEY>\n". */
uint32_t rawform_add(struct automaton *a);

/* Strings that spell no tag of a call, nor the first four letters of one ("<fun", "</par"), from
 * `from` to `end`, min..max characters (max < 0: any number). With a `character` rule, JSON: that
 * is what is neither plain ASCII nor the quote, and the quote leads to `end`. Without (0): raw
 * text, and nothing leads there. */
void rawform_add_plain(struct automaton *a, uint32_t from, uint32_t end, long min, long max,
                       uint32_t character);

/* Whether the text spells a tag of a call or its first four letters. */
bool rawform_has_tag(const char *text);

#endif
