/* JSON schemas and tools as automata. docs/grammar.md lists the keywords. */
#ifndef TEXT_SCHEMA_H
#define TEXT_SCHEMA_H

#include "text/jsonform.h"

#include <jansson.h>

/* Adds the rules of a value that fits, and finishes the automaton. */
bool schema_build(struct automaton *automaton, const json_t *schema, struct err *err);

/* The same step by step, for automata of several values: $ref leads into root. In a call, no JSON
 * string spells a tag of calls. */
struct schema_build;
struct schema_build *schema_open(struct automaton *automaton, const json_t *root, bool in_call,
                                 struct err *err);
bool schema_add(struct schema_build *build, const json_t *schema, uint32_t *rule);
/* The value of a keyword that counts, `none` when it is not there. */
bool schema_count(struct schema_build *build, const json_t *schema, const char *key, long none,
                  long *out);
struct jsonform *schema_form(struct schema_build *build);
/* Refuses keywords that are not supported, and types that are none. */
bool schema_check_keywords(struct schema_build *build, const json_t *schema);
/* The schema that a $ref leads to, or null. */
const json_t *schema_find(const struct schema_build *build, const char *ref);
/* Parts of the path in messages: enter returns what leave takes. */
size_t schema_enter(struct schema_build *build, const char *key);
void schema_leave(struct schema_build *build, size_t mark);
bool schema_refuse(struct schema_build *build, const char *keyword, const char *why);
void schema_close(struct schema_build *build);

/* Up to two newlines, as they stand between a thought and the answer; returns the node behind. */
uint32_t schema_skip_lines(struct automaton *automaton, uint32_t from);

/* In toolform.c: adds the rules of calls in the model's form (see grammar_from_tools), and
 * finishes. */
bool schema_build_tools(struct automaton *automaton, const json_t *tools, const char *name,
                        bool parallel, struct err *err);
/* Also there: a value that fits the schema, or calls. */
bool schema_build_either(struct automaton *automaton, const json_t *schema, const json_t *tools,
                         bool parallel, struct err *err);

#endif
