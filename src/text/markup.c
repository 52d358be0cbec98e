/* Owns nothing. Every answer depends on the text alone, never on where it was cut: a question
 * that a longer text could answer otherwise is answered MARKUP_MORE, and no question looks
 * further than a few names and gaps, but for one: markup_is_shown. */
#include "text/markup.h"

#include "base/mem.h"
#include "text/values.h"

#include <stdlib.h>
#include <string.h>

enum markup_tag {
    MARKUP_NONE,
    MARKUP_CALL,
    MARKUP_FUNCTION,
    MARKUP_PARAMETER,
    MARKUP_CALL_END,
    MARKUP_FUNCTION_END,
    MARKUP_PARAMETER_END,
};

enum markup_answer markup_read(struct markup_text *text, const char *tag)
{
    size_t n = strlen(tag), left = text->n - text->at;
    if (memcmp(text->p + text->at, tag, left < n ? left : n) != 0)
        return MARKUP_NO;
    if (left < n)
        return text->ended ? MARKUP_NO : MARKUP_MORE;
    text->at += n;
    return MARKUP_YES;
}

enum markup_answer markup_read_named(struct markup_text *text, const char *open, const char **name,
                                     size_t *n)
{
    struct markup_text t = *text;
    enum markup_answer answer = markup_read(&t, open);
    if (answer != MARKUP_YES)
        return answer;
    size_t from = t.at;
    for (; t.at < t.n && t.p[t.at] != '>'; t.at++)
        if ((unsigned char)t.p[t.at] < 0x20 || t.p[t.at] == '<' || t.at - from >= MARKUP_NAME_MAX)
            return MARKUP_NO;
    if (t.at == t.n)
        return t.ended ? MARKUP_NO : MARKUP_MORE;
    if (t.at == from)
        return MARKUP_NO;
    *name = t.p + from;
    *n = t.at - from;
    t.at++;
    *text = t;
    return MARKUP_YES;
}

static bool markup_is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

enum markup_answer markup_skip_gap(struct markup_text *text)
{
    size_t from = text->at;
    while (text->at < text->n && markup_is_space(text->p[text->at]))
        if (text->at++ - from >= MARKUP_GAP_MAX)
            return MARKUP_NO;
    return text->at < text->n || text->ended ? MARKUP_YES : MARKUP_MORE;
}

bool markup_at_end(const struct markup_text *text)
{
    return text->ended && text->at == text->n;
}

enum markup_answer markup_read_call(struct markup_text *text, bool bare, const char **name,
                                    size_t *n)
{
    struct markup_text t = *text;
    enum markup_answer answer = MARKUP_YES;
    if (!bare) {
        answer = markup_read(&t, "<tool_call>");
        if (answer == MARKUP_YES)
            answer = markup_skip_gap(&t);
    }
    if (answer == MARKUP_YES)
        answer = markup_read_named(&t, "<function=", name, n);
    if (answer != MARKUP_YES)
        return answer;
    struct markup_text behind = t;
    answer = markup_skip_gap(&t);
    if (answer != MARKUP_YES)
        return answer;
    const char *key;
    size_t key_n;
    answer = markup_read_named(&t, "<parameter=", &key, &key_n);
    if (answer == MARKUP_NO)
        answer = markup_read(&t, "</function>");
    if (answer == MARKUP_NO)
        answer = markup_read(&t, "</tool_call>");
    if (answer == MARKUP_YES)
        *text = behind;
    return answer;
}

static bool markup_is_given(const struct markup_call *call, const char *key, size_t n)
{
    char *name = mem_copy_text(key, n);
    bool given = json_object_get(call->given, name) != NULL;
    free(name);
    return given;
}

/* A call with its own <tool_call> comes next; its parameters need not have arrived. */
static enum markup_answer markup_is_next_call(struct markup_text t)
{
    const char *name;
    size_t n;
    enum markup_answer answer = markup_read(&t, "<tool_call>");
    if (answer == MARKUP_YES)
        answer = markup_skip_gap(&t);
    return answer == MARKUP_YES ? markup_read_named(&t, "<function=", &name, &n) : answer;
}

static bool markup_is_open(const struct markup_value *value, enum markup_tag tag)
{
    for (size_t i = 0; i < value->depth; i++)
        if (value->open[i] == tag)
            return true;
    return false;
}

/* A </parameter> closes nothing of a function in the value that no <tool_call> opened: that
 * function is not closed inside. */
static bool markup_is_stray(const struct markup_value *value)
{
    return value->depth && value->open[value->depth - 1] == MARKUP_FUNCTION &&
           !markup_is_open(value, MARKUP_CALL);
}

static void markup_push(struct markup_value *value, enum markup_tag tag)
{
    if (value->depth < MARKUP_DEPTH)
        value->open[value->depth++] = (unsigned char)tag;
}

/* Closes the innermost open block of this kind, and what is open in it. */
static void markup_pop(struct markup_value *value, enum markup_tag tag)
{
    for (size_t i = value->depth; i-- > 0;) {
        if (value->open[i] == tag) {
            value->depth = i;
            return;
        }
    }
}

/* Rule 2 and 4, for the text behind </parameter></function> and a gap. */
static enum markup_answer markup_ends_function(const struct markup_value *value,
                                               const struct markup_call *call, struct markup_text t)
{
    bool nested = markup_is_open(value, MARKUP_FUNCTION) && !markup_is_stray(value);
    if (markup_at_end(&t))
        return MARKUP_YES;
    enum markup_answer answer = markup_read(&t, "</tool_call>");
    if (answer == MARKUP_YES && nested) {
        answer = markup_skip_gap(&t);
        if (answer != MARKUP_YES || markup_at_end(&t))
            return answer;
        return markup_is_open(value, MARKUP_CALL) ? MARKUP_NO : markup_is_next_call(t);
    }
    if (answer != MARKUP_NO || nested)
        return answer;
    answer = markup_is_next_call(t);
    if (answer != MARKUP_NO || !call->bare)
        return answer;
    const char *name;
    size_t n;
    answer = markup_read(&t, "<function=");
    if (answer != MARKUP_YES)
        return answer == MARKUP_NO ? MARKUP_YES : answer;
    t.at -= strlen("<function=");
    answer = markup_read_named(&t, "<function=", &name, &n);
    if (answer == MARKUP_YES && !values_find_tool(call->tools, name, n))
        answer = MARKUP_NO;
    return answer;
}

/* Rule 2, for the text behind </parameter>. */
static enum markup_answer markup_ends_parameter(const struct markup_value *value,
                                                const struct markup_call *call,
                                                struct markup_text t)
{
    enum markup_answer answer = markup_skip_gap(&t);
    if (answer != MARKUP_YES || markup_at_end(&t))
        return answer;
    bool nested = value->depth || value->inline_open;
    const char *name;
    size_t n;
    answer = markup_read(&t, "</function>");
    if (answer == MARKUP_YES) {
        answer = markup_skip_gap(&t);
        return answer == MARKUP_YES ? markup_ends_function(value, call, t) : answer;
    }
    if (answer == MARKUP_NO &&
        (!markup_is_open(value, MARKUP_FUNCTION) || markup_is_stray(value))) {
        answer = markup_read_named(&t, "<parameter=", &name, &n);
        if (answer == MARKUP_YES) {
            bool known = !nested || values_find_parameter(call->function, name, n);
            return known && !markup_is_given(call, name, n) ? MARKUP_YES : MARKUP_NO;
        }
    }
    if (answer != MARKUP_NO)
        return answer;
    struct markup_text next = t;
    answer = markup_read(&t, "</tool_call>");
    if (answer == MARKUP_YES && nested) {
        answer = markup_skip_gap(&t);
        return answer == MARKUP_YES && !markup_at_end(&t) ? MARKUP_NO : answer;
    }
    return answer != MARKUP_NO || nested ? answer : markup_is_next_call(next);
}

/* Rule 3, for the text behind </function> or </tool_call>. */
static enum markup_answer markup_ends_unclosed(const struct markup_value *value,
                                               enum markup_tag tag, struct markup_text t)
{
    if (!value->line_start && !value->inline_form)
        return MARKUP_NO;
    enum markup_answer answer = markup_skip_gap(&t);
    if (answer != MARKUP_YES || markup_at_end(&t))
        return answer;
    return tag == MARKUP_FUNCTION_END ? markup_read(&t, "</tool_call>") : markup_is_next_call(t);
}

static enum markup_answer markup_value_close(struct markup_value *value,
                                             const struct markup_call *call, enum markup_tag tag,
                                             struct markup_text behind)
{
    enum markup_tag opening = MARKUP_PARAMETER;
    enum markup_answer answer = MARKUP_NO;
    if (tag == MARKUP_PARAMETER_END) {
        answer = markup_ends_parameter(value, call, behind);
        if (answer == MARKUP_NO && value->inline_open) {
            value->inline_open--;
            return MARKUP_NO;
        }
    } else {
        opening = tag == MARKUP_FUNCTION_END ? MARKUP_FUNCTION : MARKUP_CALL;
        bool empty = tag == MARKUP_FUNCTION_END && value->last == MARKUP_FUNCTION;
        if (empty)
            return MARKUP_NO; /* nothing was pushed for it */
        if (!markup_is_open(value, opening))
            answer = markup_ends_unclosed(value, tag, behind);
    }
    if (answer == MARKUP_NO)
        markup_pop(value, opening);
    return answer;
}

/* The block that a <parameter=KEY> line opens is closed soon, and not as a parameter of the call
 * would be: the value goes on behind it. */
static enum markup_answer markup_is_shown(const struct markup_call *call, struct markup_text t)
{
    static const struct markup_value fresh = {.line_start = true};
    for (size_t n = 0; n < MARKUP_SHOWN_MAX && t.at < t.n; n++, t.at++) {
        enum markup_answer answer = markup_read(&t, "</parameter>");
        if (answer == MARKUP_YES) {
            answer = markup_ends_parameter(&fresh, call, t);
            return answer == MARKUP_MORE ? answer : answer == MARKUP_YES ? MARKUP_NO : MARKUP_YES;
        }
        if (answer == MARKUP_MORE)
            return answer;
    }
    return t.at < t.n || t.ended ? MARKUP_NO : MARKUP_MORE;
}

static enum markup_answer markup_value_open(struct markup_value *value,
                                            const struct markup_call *call, enum markup_tag tag,
                                            struct markup_text behind, const char *name, size_t n)
{
    if (tag == MARKUP_FUNCTION && value->last == MARKUP_CALL)
        markup_push(value, MARKUP_CALL);
    if (tag != MARKUP_PARAMETER)
        return MARKUP_NO;
    if (value->last == MARKUP_FUNCTION)
        markup_push(value, MARKUP_FUNCTION);
    if (value->depth && value->open[value->depth - 1] == MARKUP_FUNCTION) {
        markup_push(value, MARKUP_PARAMETER);
        return MARKUP_NO;
    }
    enum markup_answer line = value->line_start ? markup_read(&behind, "\n") : MARKUP_NO;
    if (line == MARKUP_MORE)
        return MARKUP_MORE;
    if (line == MARKUP_NO) {
        value->inline_open++;
        return MARKUP_NO;
    }
    if (!value->depth && values_find_parameter(call->function, name, n) &&
        !markup_is_given(call, name, n)) {
        enum markup_answer shown = markup_is_shown(call, behind);
        if (shown != MARKUP_YES)
            return shown == MARKUP_NO ? MARKUP_YES : shown;
    }
    markup_push(value, MARKUP_PARAMETER);
    return MARKUP_NO;
}

void markup_value_note(struct markup_value *value, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\n') {
            value->line_start = true;
            value->inline_open = 0;
        } else if (p[i] != ' ' && p[i] != '\t') {
            value->line_start = false;
        }
        if (!markup_is_space(p[i]))
            value->last = MARKUP_NONE;
    }
}

/* Which tag the text begins with; `at` is then behind it. */
static enum markup_answer markup_read_any(struct markup_text *text, enum markup_tag *tag,
                                          const char **name, size_t *n)
{
    static const struct {
        const char *text;
        enum markup_tag tag;
        bool named;
    } tags[] = {
        {"</parameter>", MARKUP_PARAMETER_END, false}, {"</function>", MARKUP_FUNCTION_END, false},
        {"</tool_call>", MARKUP_CALL_END, false},      {"<parameter=", MARKUP_PARAMETER, true},
        {"<function=", MARKUP_FUNCTION, true},         {"<tool_call>", MARKUP_CALL, false},
    };
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        enum markup_answer answer = tags[i].named ? markup_read_named(text, tags[i].text, name, n)
                                                  : markup_read(text, tags[i].text);
        *tag = tags[i].tag;
        if (answer != MARKUP_NO)
            return answer;
    }
    return MARKUP_NO;
}

enum markup_answer markup_value_tag(struct markup_value *value, const struct markup_call *call,
                                    struct markup_text text, size_t *n)
{
    const char *name = NULL;
    size_t name_n = 0, from = text.at;
    enum markup_tag tag;
    enum markup_answer answer = markup_read_any(&text, &tag, &name, &name_n);
    if (answer == MARKUP_MORE)
        return MARKUP_MORE;
    if (answer == MARKUP_NO) {
        markup_value_note(value, "<", 1);
        *n = 1;
        return MARKUP_NO;
    }
    bool closing = tag >= MARKUP_CALL_END;
    answer = closing ? markup_value_close(value, call, tag, text)
                     : markup_value_open(value, call, tag, text, name, name_n);
    *n = answer == MARKUP_YES && tag != MARKUP_PARAMETER_END ? 0 : text.at - from;
    if (answer == MARKUP_NO) {
        value->last = tag;
        value->line_start = false;
    }
    return answer;
}
