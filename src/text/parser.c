/* Owns the text that cannot be judged yet (`pend`, a kilobyte or two between feeds), the value
 * being read when its type needs it whole, and the deltas of the running feed.
 *
 * Invariant: what a step does depends on the text alone. A step that needs more text changes
 * nothing, so feeding in other pieces takes the same steps. Each step takes at least a byte or
 * leaves a state that the next step leaves forwards, and looks at a bounded stretch ahead:
 * linear time.
 *
 * A thought ends at the first </think>; a call in an open thought is a call, and the thought
 * goes on after it. In a thought, a call of a function that the request did not declare is taken
 * for the model talking about calls. Newlines that the form itself puts around thoughts and
 * calls are dropped: those that begin or end a thought, begin the content, or stand before or
 * behind a call. */
#include "text/parser.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/markup.h"
#include "text/pyjson.h"
#include "text/values.h"

#include <stdlib.h>

enum parser_state {
    PARSER_IN_TEXT,
    PARSER_IN_CALL,   /* between parameters */
    PARSER_IN_VALUE,  /* in a parameter's value */
    PARSER_CALL_DONE, /* behind </function> */
};

enum { PARSER_DELTA_MAX = 1 << 16 /* bytes gathered into one event */ };

struct parser {
    struct parser_options options;
    struct buf pend;
    size_t judged; /* bytes of the text before pend */
    enum parser_state state;

    bool thinking;         /* in an open thought */
    bool thought, content; /* some has been given out */
    bool after_call;       /* only newlines since the last call */
    size_t newlines;       /* held: part of the text only if text follows */

    size_t calls;            /* begun so far */
    struct markup_call call; /* `given` is owned */
    size_t arguments;        /* given out for this call */

    struct markup_value value;
    bool value_begun;   /* the newline after the opening tag is behind us */
    bool value_newline; /* held: dropped when the value ends here */
    bool value_streams; /* a string that goes out as it comes */
    unsigned value_types;
    struct buf value_text; /* otherwise: what there is of it */

    struct buf delta;
    enum parser_event_kind delta_kind;
    size_t delta_at;
};

static void parser_flush(struct parser *parser)
{
    if (!parser->delta.len)
        return;
    struct parser_event event = {parser->delta_kind, 0, parser->delta.data, parser->delta.len,
                                 parser->delta_at};
    if (event.kind != PARSER_REASONING && event.kind != PARSER_CONTENT)
        event.call = parser->calls - 1;
    parser->options.on_event(parser->options.user, &event);
    buf_clear(&parser->delta);
}

/* The buffer to which text of this kind is appended. */
static struct buf *parser_delta(struct parser *parser, enum parser_event_kind kind)
{
    if (parser->delta_kind != kind || parser->delta.len > PARSER_DELTA_MAX)
        parser_flush(parser);
    parser->delta_kind = kind;
    return &parser->delta;
}

static void parser_mark(struct parser *parser, enum parser_event_kind kind, const char *text,
                        size_t n)
{
    parser_flush(parser);
    struct parser_event event = {kind, parser->calls - 1, text, n, 0};
    parser->options.on_event(parser->options.user, &event);
}

/* `at`: where the text is in all of it. What is given out of one kind without a break lies there
 * without a break, since what is dropped stands between kinds. */
static void parser_add_text(struct parser *parser, const char *text, size_t n, size_t at)
{
    enum parser_event_kind kind = parser->thinking ? PARSER_REASONING : PARSER_CONTENT;
    bool *some = parser->thinking ? &parser->thought : &parser->content;
    for (; *some && parser->newlines; parser->newlines--) {
        struct buf *out = parser_delta(parser, kind);
        parser->delta_at = out->len ? parser->delta_at : at - parser->newlines;
        buf_append_char(out, '\n');
    }
    parser->newlines = 0;
    parser->after_call = false;
    *some = true;
    struct buf *out = parser_delta(parser, kind);
    parser->delta_at = out->len ? parser->delta_at : at;
    buf_append(out, text, n);
}

static void parser_begin_call(struct parser *parser, bool bare, const char *name, size_t n)
{
    parser->newlines = 0;
    parser->calls++;
    parser_mark(parser, PARSER_CALL_BEGIN, name, n);
    parser->call = (struct markup_call){
        .tools = parser->options.tools,
        .function = values_find_tool(parser->options.tools, name, n),
        .given = json_object(),
        .bare = bare,
    };
    parser->arguments = 0;
    parser->state = PARSER_IN_CALL;
}

static void parser_end_call(struct parser *parser)
{
    buf_append_text(parser_delta(parser, PARSER_CALL_ARGS), parser->arguments ? "}" : "{}");
    parser_mark(parser, PARSER_CALL_END, "", 0);
    json_decref((json_t *)parser->call.given);
    parser->call.given = NULL;
    parser->after_call = true;
    parser->newlines = 0;
}

static void parser_begin_value(struct parser *parser, const char *key, size_t n)
{
    char *name = mem_copy_text(key, n);
    json_object_set_new_nocheck((json_t *)parser->call.given, name, json_true());
    free(name);
    const json_t *schema = values_find_parameter(parser->call.function, key, n);
    parser->value_types = values_types(parser->call.function, schema);
    parser->value_streams = parser->value_types == VALUES_STRING;
    struct buf *out = parser_delta(parser, PARSER_CALL_ARGS);
    buf_append_text(out, parser->arguments++ ? ", \"" : "{\"");
    pyjson_append_escaped(out, key, n);
    buf_append_text(out, parser->value_streams ? "\": \"" : "\": ");
    parser->value = (struct markup_value){.line_start = true};
    parser->value_begun = parser->value_newline = false;
    parser->state = PARSER_IN_VALUE;
}

static void parser_add_value(struct parser *parser, const char *text, size_t n)
{
    struct buf *out = parser_delta(parser, PARSER_CALL_ARGS);
    if (parser->value_streams) {
        pyjson_append_escaped(out, text, n);
        return;
    }
    buf_append(&parser->value_text, text, n);
    /* A string that may be null streams once it cannot be null any more. */
    if (parser->value_types == (VALUES_STRING | VALUES_NULL) && parser->value_text.len > 16) {
        parser->value_streams = true;
        buf_append_char(out, '"');
        pyjson_append_escaped(out, parser->value_text.data, parser->value_text.len);
        buf_clear(&parser->value_text);
    }
}

/* Data of the value: of a run of newlines, the last is held back. */
static void parser_take_value(struct parser *parser, const char *text, size_t n)
{
    if (!n)
        return;
    if (parser->value_newline)
        parser_add_value(parser, "\n", 1);
    parser->value_newline = text[n - 1] == '\n';
    parser_add_value(parser, text, n - parser->value_newline);
}

static void parser_end_value(struct parser *parser)
{
    struct buf *out = parser_delta(parser, PARSER_CALL_ARGS);
    const struct buf *value = &parser->value_text;
    if (parser->value_streams)
        buf_append_char(out, '"');
    else
        values_append(out, parser->value_types, value->data ? value->data : "", value->len);
    buf_clear(&parser->value_text);
    parser->state = PARSER_IN_CALL;
}

/* A call begins at the text's '<'. */
static enum markup_answer parser_try_call(struct parser *parser, struct markup_text *text,
                                          bool bare)
{
    const char *name;
    size_t n;
    struct markup_text t = *text;
    if (parser->options.no_calls)
        return MARKUP_NO;
    enum markup_answer answer = markup_read_call(&t, bare, &name, &n);
    if (answer != MARKUP_YES)
        return answer;
    const json_t *tools = parser->options.tools;
    bool declared = values_find_tool(tools, name, n) != NULL;
    if (!declared && (bare || (parser->thinking && json_array_size(tools))))
        return MARKUP_NO;
    parser_begin_call(parser, bare, name, n);
    *text = t;
    return MARKUP_YES;
}

/* The steps below read on in `text` and answer MARKUP_MORE, having changed nothing, when they
 * need more of it. */

static enum markup_answer parser_step_think(struct parser *parser, struct markup_text *text)
{
    if (parser->thinking) {
        enum markup_answer answer = markup_read(text, "</think>");
        if (answer == MARKUP_YES) {
            parser->thinking = false;
            parser->newlines = 0;
        }
        if (answer != MARKUP_NO)
            return answer;
    }
    if (parser->thought || parser->content || parser->calls)
        return MARKUP_NO;
    enum markup_answer answer = markup_read(text, "<think>");
    if (answer == MARKUP_YES) {
        parser->thinking = true;
        parser->newlines = 0;
    }
    return answer;
}

static enum markup_answer parser_step_tag(struct parser *parser, struct markup_text *text)
{
    enum markup_answer answer = parser_step_think(parser, text);
    if (answer == MARKUP_NO)
        answer = parser_try_call(parser, text, false);
    return answer == MARKUP_NO ? parser_try_call(parser, text, true) : answer;
}

static enum markup_answer parser_step_text(struct parser *parser, struct markup_text *text)
{
    const char *p = text->p + text->at;
    size_t left = text->n - text->at, n = 0;
    if (*p == '\n') {
        parser->newlines++;
        text->at++;
        return MARKUP_YES;
    }
    if (*p == '<') {
        enum markup_answer answer = parser_step_tag(parser, text);
        if (answer != MARKUP_NO)
            return answer;
        n = 1;
    }
    while (n < left && p[n] != '<' && p[n] != '\n')
        n++;
    parser_add_text(parser, p, n, parser->judged + text->at);
    text->at += n;
    return MARKUP_YES;
}

static enum markup_answer parser_step_call(struct parser *parser, struct markup_text *text)
{
    const char *key;
    size_t n;
    struct markup_text t = *text;
    enum markup_answer answer = markup_skip_gap(&t);
    if (answer == MARKUP_YES)
        answer = markup_read_named(&t, "<parameter=", &key, &n);
    if (answer == MARKUP_YES) {
        parser_begin_value(parser, key, n);
        *text = t;
    }
    if (answer != MARKUP_NO)
        return answer;
    answer = markup_read(&t, "</function>");
    if (answer == MARKUP_MORE)
        return answer;
    if (answer == MARKUP_YES)
        *text = t;
    parser_end_call(parser);
    parser->state = PARSER_CALL_DONE;
    return MARKUP_YES;
}

static enum markup_answer parser_step_done(struct parser *parser, struct markup_text *text)
{
    struct markup_text t = *text;
    enum markup_answer answer = markup_skip_gap(&t);
    if (answer == MARKUP_YES)
        answer = markup_read(&t, "</tool_call>");
    if (answer == MARKUP_MORE)
        return answer;
    if (answer == MARKUP_YES)
        *text = t;
    parser->state = PARSER_IN_TEXT;
    return MARKUP_YES;
}

static enum markup_answer parser_step_value(struct parser *parser, struct markup_text *text)
{
    const char *p = text->p + text->at;
    size_t left = text->n - text->at, n = 0;
    if (!parser->value_begun) {
        parser->value_begun = true;
        parser->value.inline_form = *p != '\n';
        text->at += *p == '\n';
        return MARKUP_YES;
    }
    if (*p == '<') {
        enum markup_answer answer = markup_value_tag(&parser->value, &parser->call, *text, &n);
        if (answer == MARKUP_YES) {
            parser_end_value(parser);
            text->at += n;
        }
        if (answer != MARKUP_NO)
            return answer;
    } else {
        while (n < left && p[n] != '<')
            n++;
        markup_value_note(&parser->value, p, n);
    }
    parser_take_value(parser, p, n);
    text->at += n;
    return MARKUP_YES;
}

static void parser_run(struct parser *parser, bool ended)
{
    struct markup_text text = {parser->pend.data, parser->pend.len, 0, ended};
    if (!ended)
        text.n -= utf8_incomplete_tail(text.p, text.n);
    enum markup_answer answer = MARKUP_YES;
    while (answer == MARKUP_YES && text.at < text.n) {
        switch (parser->state) {
        case PARSER_IN_TEXT:
            answer = parser_step_text(parser, &text);
            break;
        case PARSER_IN_CALL:
            answer = parser_step_call(parser, &text);
            break;
        case PARSER_IN_VALUE:
            answer = parser_step_value(parser, &text);
            break;
        case PARSER_CALL_DONE:
            answer = parser_step_done(parser, &text);
            break;
        }
    }
    parser_flush(parser);
    buf_consume(&parser->pend, text.at);
    parser->judged += text.at;
}

struct parser *parser_open(const struct parser_options *options)
{
    struct parser *parser = mem_new(1, sizeof *parser);
    parser->options = *options;
    parser->thinking = options->thinking_open;
    return parser;
}

void parser_feed(struct parser *parser, const char *text, size_t n)
{
    if (!n)
        return;
    buf_append(&parser->pend, text, n);
    parser_run(parser, false);
}

size_t parser_judged(const struct parser *parser)
{
    return parser->judged - parser->newlines;
}

void parser_finish(struct parser *parser)
{
    if (parser->pend.len)
        parser_run(parser, true);
    if (parser->state == PARSER_IN_VALUE)
        parser_end_value(parser);
    if (parser->state == PARSER_IN_CALL)
        parser_end_call(parser);
    parser->state = PARSER_IN_TEXT;
    if (parser->newlines && !parser->after_call)
        parser_add_text(parser, "", 0, parser->judged);
    parser_flush(parser);
}

void parser_close(struct parser *parser)
{
    if (!parser)
        return;
    json_decref((json_t *)parser->call.given);
    buf_free(&parser->pend);
    buf_free(&parser->value_text);
    buf_free(&parser->delta);
    free(parser);
}
