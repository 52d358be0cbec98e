/* Constrained decoding: which tokens may come next so that the answer fits a JSON schema or is a
 * tool call of the family's format.
 *
 * A grammar is compiled once a request into a byte-level automaton and is then immutable; a run
 * walks one answer through it. Tokens are tested against the automaton through a trie of the
 * vocabulary's bytes, so a mask costs what the allowed part of the trie costs. */
#ifndef TEXT_GRAMMAR_H
#define TEXT_GRAMMAR_H

#include "base/err.h"
#include "text/tokenizer.h"

#include <jansson.h>

struct grammar;

/* A JSON value that fits the schema; `true` or {} takes any JSON value. Keywords outside the
 * supported subset fail with ERR_USAGE that names the keyword and its place; so does a schema whose
 * automaton would pass the size limit. Copies what it needs. */
bool grammar_from_schema(const json_t *schema, struct grammar **out, struct err *err);

/* One or (parallel) more tool calls in the model's format, each of a function of `tools` (the
 * OpenAI array), or of `name` alone when it is not null; arguments by the functions' schemas. */
bool grammar_from_tools(const json_t *tools, const char *name, bool parallel, struct grammar **out,
                        struct err *err);
/* Either of these: a JSON value that fits the schema, or calls of any of the tools. Strings of the
 * value spell no tags of calls ("\u003c" stands for "<" there). */
bool grammar_from_either(const json_t *schema, const json_t *tools, bool parallel,
                         struct grammar **out, struct err *err);
void grammar_free(struct grammar *grammar);

/* The trie of a tokenizer's vocabulary, made once an engine; immutable. Added tokens are never
 * allowed by a grammar unless its text needs them (<tool_call>). */
struct grammar_vocab;
struct grammar_vocab *grammar_vocab_open(const struct tokenizer *tokenizer);
void grammar_vocab_close(struct grammar_vocab *vocab);

struct grammar_run;
struct grammar_run *grammar_run_open(const struct grammar *grammar,
                                     const struct grammar_vocab *vocab);
void grammar_run_close(struct grammar_run *run);

/* Sets the logits, f32 [n], of tokens that cannot come next to -infinity. The stop ids stay as they
 * are exactly when the answer may end here. At least one token always remains. */
void grammar_run_mask(struct grammar_run *run, const int32_t *stop, size_t stop_count,
                      float *logits, size_t n);

/* The token was chosen. False: it does not fit (then it was not masked). */
bool grammar_run_accept(struct grammar_run *run, int32_t id);

/* The answer is complete and nothing may follow but a stop token. */
bool grammar_run_is_done(const struct grammar_run *run);

#endif
