/* What the model writes, taken apart as it streams: reasoning, content, tool calls.
 *
 * Feeding the text in any pieces gives the same events but for how deltas are cut. Nothing is
 * ever lost: text that turns out not to be a call is content. */
#ifndef TEXT_PARSER_H
#define TEXT_PARSER_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

enum parser_event_kind {
    PARSER_REASONING,  /* text: more of the think block */
    PARSER_CONTENT,    /* text: more of the answer */
    PARSER_CALL_BEGIN, /* call: index; text: the function's name */
    PARSER_CALL_ARGS,  /* call; text: more of the arguments' JSON object */
    PARSER_CALL_END,   /* call */
};

struct parser_event {
    enum parser_event_kind kind;
    size_t call;
    const char *text; /* not zero-terminated */
    size_t len;
    size_t at; /* of content: where it begins in all of the text that was fed; it is a copy */
};

struct parser_options {
    bool thinking_open;  /* the prompt ended inside a think block */
    bool no_calls;       /* what looks like a call is text */
    const json_t *tools; /* OpenAI tools array for value types and bare-call recovery; may be null.
                          * Borrowed: it outlives the parser. */
    void (*on_event)(void *user, const struct parser_event *event);
    void *user;
};

struct parser;

struct parser *parser_open(const struct parser_options *options);
void parser_feed(struct parser *parser, const char *text, size_t n);
/* How much of the text fed has been judged: what of it is content has been given out. */
size_t parser_judged(const struct parser *parser);
/* The text is complete: closes what is open, flushes what is held. */
void parser_finish(struct parser *parser);
void parser_close(struct parser *parser);

#endif
