/* JSON schemas and tools as automata. docs/grammar.md lists the keywords. */
#ifndef TEXT_SCHEMA_H
#define TEXT_SCHEMA_H

#include "text/automaton.h"

#include <jansson.h>

/* Adds the rules of a value that fits, and finishes the automaton. */
bool schema_build(struct automaton *automaton, const json_t *schema, struct err *err);

/* The same step by step, for automata of several values: $ref leads into root. */
struct schema_build;
struct schema_build *schema_open(struct automaton *automaton, const json_t *root, struct err *err);
bool schema_add(struct schema_build *build, const json_t *schema, uint32_t *rule);
void schema_close(struct schema_build *build);

/* Up to two newlines, as they stand between a thought and the answer; returns the node behind. */
uint32_t schema_skip_lines(struct automaton *automaton, uint32_t from);

/* In toolform.c: adds the rules of calls in the model's form (see grammar_from_tools), and
 * finishes. */
bool schema_build_tools(struct automaton *automaton, const json_t *tools, const char *name,
                        bool parallel, struct err *err);

#endif
