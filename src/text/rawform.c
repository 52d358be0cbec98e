/* Owns nothing: builds the automaton of raw values.
 *
 * Invariant: the parser (markup.h has its rules) reads a value that this automaton takes as one
 * value, and the same bytes. So a value may hold tags of calls
 *  - as a whole call that is closed in it: a file that documents this very form;
 *  - alone, within a line, or where nothing but other text can follow: a text about tags.
 * A value ends at the first line that begins with </parameter> outside such a call. */
#include "text/rawform.h"

#include <string.h>

/* What stood before the place in the text. */
enum rawform_context {
    RAWFORM_LINE,      /* a newline: </parameter> closes the value */
    RAWFORM_BLANK,     /* a newline and blanks */
    RAWFORM_MID,       /* other text on this line */
    RAWFORM_CALL,      /* <tool_call> and white space */
    RAWFORM_CALL_LINE, /* the same, a newline last */
    RAWFORM_QUIET,     /* a tag and white space: no tag may follow */
    RAWFORM_QUIET_LINE,
    RAWFORM_CONTEXTS,
};

enum rawform_tag {
    RAWFORM_OPEN_CALL,
    RAWFORM_CLOSE_CALL,
    RAWFORM_OPEN_FUNCTION,
    RAWFORM_CLOSE_FUNCTION,
    RAWFORM_OPEN_PARAMETER,
    RAWFORM_CLOSE_PARAMETER,
    RAWFORM_TAGS,
};

/* Behind the '<'. */
static const char *const rawform_tags[RAWFORM_TAGS] = {
    "tool_call>", "/tool_call>", "function=", "/function>", "parameter=", "/parameter>"};

enum { RAWFORM_NAME = 64 /* bytes of a name in a call within a value */ };

/* Where each byte leads; 0: nowhere. */
struct rawform_row {
    uint32_t to[128], high; /* high: characters beyond ASCII */
};

struct rawform {
    struct automaton *a;
    uint32_t end, high, name, inner; /* the value's end; rules */
    uint32_t base[RAWFORM_CONTEXTS], tag[RAWFORM_CONTEXTS];
    uint32_t function, parameter, line_parameter; /* in a lone tag's name */
    uint32_t behind_line_parameter;
    uint32_t nested, nested_call; /* behind "<function=" of a whole call */
};

static void rawform_emit(struct automaton *a, uint32_t node, const struct rawform_row *row,
                         uint32_t high)
{
    for (unsigned lo = 0, hi; lo < 128; lo = hi) {
        for (hi = lo + 1; hi < 128 && row->to[hi] == row->to[lo]; hi++)
            ;
        if (row->to[lo])
            automaton_add_byte(a, node, row->to[lo], (uint8_t)lo, (uint8_t)(hi - 1));
    }
    if (row->high)
        automaton_add_call(a, node, row->high, high);
}

static void rawform_mark(struct automaton *a, uint32_t node)
{
    a->nodes[node].text = AUTOMATON_RAW_TEXT;
    a->nodes[node].room = AUTOMATON_ANY_ROOM;
}

/* No control characters but tab and carriage return, which no tool wants; the newline and '<' are
 * set by the caller. */
static struct rawform_row rawform_all(uint32_t to)
{
    struct rawform_row row = {.high = to};
    for (unsigned c = 0x20; c < 0x7f; c++)
        row.to[c] = to;
    row.to['\t'] = row.to['\r'] = to;
    row.to['<'] = 0;
    return row;
}

/* What follows text that turned out to be no tag. */
static struct rawform_row rawform_middle(const struct rawform *r)
{
    struct rawform_row row = rawform_all(r->base[RAWFORM_MID]);
    row.to['\n'] = r->base[RAWFORM_LINE];
    row.to['<'] = r->tag[RAWFORM_MID];
    return row;
}

static bool rawform_in_call(enum rawform_context c)
{
    return c == RAWFORM_CALL || c == RAWFORM_CALL_LINE;
}

/* Where a tag leads that is complete; for the named ones, up to the '='. 0: refused. */
static uint32_t rawform_behind(struct rawform *r, enum rawform_context c, enum rawform_tag tag)
{
    uint32_t quiet = r->base[RAWFORM_QUIET], middle = r->base[RAWFORM_MID], both;
    switch (tag) {
    case RAWFORM_OPEN_CALL:
        return r->base[RAWFORM_CALL];
    case RAWFORM_CLOSE_CALL:
    case RAWFORM_CLOSE_FUNCTION:
        return c == RAWFORM_MID ? middle : quiet;
    case RAWFORM_OPEN_FUNCTION:
        both = automaton_add_node(r->a);
        automaton_add_empty(r->a, both, rawform_in_call(c) ? r->nested_call : r->nested);
        if (!rawform_in_call(c))
            automaton_add_empty(r->a, both, r->function);
        return both;
    case RAWFORM_OPEN_PARAMETER:
        return c == RAWFORM_MID ? r->parameter : rawform_in_call(c) ? 0 : r->line_parameter;
    default:
        return c == RAWFORM_LINE || c == RAWFORM_CALL_LINE ? r->end : quiet;
    }
}

/* The node has seen '<' and the first n bytes of the tags in the set. */
static void rawform_add_tags(struct rawform *r, enum rawform_context c, uint32_t node, size_t n,
                             unsigned set)
{
    struct rawform_row row = rawform_middle(r);
    unsigned done = 0;
    for (int t = 0; t < RAWFORM_TAGS; t++) {
        if (!(set >> t & 1) || done >> t & 1)
            continue;
        char next = rawform_tags[t][n];
        unsigned same = 0;
        for (int s = t; s < RAWFORM_TAGS; s++)
            if (set >> s & 1 && rawform_tags[s][n] == next)
                same |= 1u << s;
        done |= same;
        if (!rawform_tags[t][n + 1]) {
            row.to[(uint8_t)next] = rawform_behind(r, c, (enum rawform_tag)t);
            continue;
        }
        row.to[(uint8_t)next] = automaton_add_node(r->a);
        rawform_add_tags(r, c, row.to[(uint8_t)next], n + 1, same);
    }
    rawform_emit(r->a, node, &row, r->high);
    rawform_mark(r->a, node);
    if ((c == RAWFORM_LINE || c == RAWFORM_CALL_LINE) && set >> RAWFORM_CLOSE_PARAMETER & 1)
        r->a->nodes[node].leave = (uint8_t)rawform_tags[RAWFORM_CLOSE_PARAMETER][n];
}

static void rawform_add_context(struct rawform *r, enum rawform_context c)
{
    static const enum rawform_context blank[] = {RAWFORM_BLANK, RAWFORM_BLANK, RAWFORM_MID,
                                                 RAWFORM_CALL,  RAWFORM_CALL,  RAWFORM_QUIET,
                                                 RAWFORM_QUIET};
    static const enum rawform_context line[] = {
        RAWFORM_LINE,      RAWFORM_LINE,       RAWFORM_LINE,      RAWFORM_CALL_LINE,
        RAWFORM_CALL_LINE, RAWFORM_QUIET_LINE, RAWFORM_QUIET_LINE};
    struct rawform_row row = rawform_middle(r);
    row.to[' '] = row.to['\t'] = r->base[blank[c]];
    /* A carriage return is white space, but not of those that keep the line's start. */
    row.to['\r'] = c < RAWFORM_CALL ? r->base[RAWFORM_MID] : r->base[blank[c]];
    row.to['\n'] = r->base[line[c]];
    row.to['<'] = c < RAWFORM_QUIET ? r->tag[c] : 0;
    rawform_emit(r->a, r->base[c], &row, r->high);
    rawform_mark(r->a, r->base[c]);
    if (c < RAWFORM_QUIET)
        rawform_add_tags(r, c, r->tag[c], 0, (1u << RAWFORM_TAGS) - 1);
    if (c == RAWFORM_QUIET_LINE)
        automaton_add_empty(r->a, automaton_add_text(r->a, r->base[c], "</parameter>"), r->end);
}

/* A name in a tag that stands alone. */
static void rawform_add_name(struct rawform *r, uint32_t node, uint32_t behind)
{
    struct rawform_row row = rawform_middle(r);
    for (unsigned c = 0x20; c < 0x7f; c++)
        row.to[c] = c == '<' ? row.to[c] : c == '>' ? behind : node;
    row.high = node;
    rawform_emit(r->a, node, &row, r->high);
    rawform_mark(r->a, node);
}

static void rawform_add_gap(struct automaton *a, uint32_t node)
{
    for (const char *p = " \t\r\n"; *p; p++)
        automaton_add_byte(a, node, node, (uint8_t)*p, (uint8_t)*p);
}

/* A call within a value, from behind "<function=": all that it opens is closed in it. */
static void rawform_add_nested(struct rawform *r, uint32_t from, bool call)
{
    struct automaton *a = r->a;
    uint32_t first = automaton_add_node(a), more = automaton_add_node(a);
    automaton_add_call(a, from, first, r->name);
    rawform_add_gap(a, first);
    rawform_add_gap(a, more);
    uint32_t key = automaton_add_text(a, first, "<parameter="), value = automaton_add_node(a);
    automaton_add_call(a, key, value, r->name);
    automaton_add_call(a, value, more, r->inner);
    automaton_add_empty(a, automaton_add_text(a, more, "<parameter="), key);
    uint32_t done = automaton_add_text(a, more, "</function>");
    if (!call) {
        automaton_add_empty(a, done, r->base[RAWFORM_QUIET]);
        return;
    }
    automaton_add_empty(a, automaton_add_text(a, first, "</function>"), done);
    rawform_add_gap(a, done);
    automaton_add_empty(a, automaton_add_text(a, done, "</tool_call>"), r->base[RAWFORM_MID]);
}

/* A name and its '>'. */
static uint32_t rawform_name_rule(struct automaton *a)
{
    uint32_t rule = automaton_add_rule(a), at = a->rules[rule].start;
    for (int i = 0; i < RAWFORM_NAME; i++) {
        uint32_t next = automaton_add_node(a);
        automaton_add_byte(a, at, next, '!', '<' - 1);
        automaton_add_byte(a, at, next, '=', '=');
        automaton_add_byte(a, at, next, '>' + 1, '~');
        at = next;
        automaton_add_byte(a, at, a->rules[rule].end, '>', '>');
    }
    return rule;
}

/* A value within a value: no tags, up to its </parameter>. */
static uint32_t rawform_inner_rule(struct automaton *a)
{
    uint32_t rule = automaton_add_rule(a), end = automaton_add_node(a);
    uint32_t from = a->rules[rule].start;
    rawform_add_plain(a, from, end, 0, -1, 0);
    a->nodes[end].text = AUTOMATON_RAW_TEXT; /* no room: it takes none */
    automaton_add_empty(a, automaton_add_text(a, end, "</parameter>"), a->rules[rule].end);
    return rule;
}

static uint32_t rawform_high_rule(struct automaton *a)
{
    uint32_t rule = automaton_add_rule(a);
    automaton_add_points(a, a->rules[rule].start, a->rules[rule].end, 0x80, 0x10ffff);
    a->nodes[a->rules[rule].start].text = AUTOMATON_RAW_TEXT;
    return rule;
}

uint32_t rawform_add(struct automaton *a)
{
    uint32_t rule = automaton_add_rule(a);
    struct rawform r = {.a = a, .end = a->rules[rule].end, .high = rawform_high_rule(a)};
    r.name = rawform_name_rule(a);
    r.inner = rawform_inner_rule(a);
    for (int c = 0; c < RAWFORM_CONTEXTS; c++) {
        r.base[c] = automaton_add_node(a);
        r.tag[c] = c < RAWFORM_QUIET ? automaton_add_node(a) : 0;
    }
    uint32_t *const nodes[] = {&r.function, &r.parameter,   &r.line_parameter,
                               &r.nested,   &r.nested_call, &r.behind_line_parameter};
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        *nodes[i] = automaton_add_node(a);
    for (int c = 0; c < RAWFORM_CONTEXTS; c++)
        rawform_add_context(&r, (enum rawform_context)c);
    rawform_add_name(&r, r.function, r.base[RAWFORM_QUIET]);
    rawform_add_name(&r, r.parameter, r.base[RAWFORM_MID]);
    rawform_add_name(&r, r.line_parameter, r.behind_line_parameter);
    struct rawform_row row = rawform_middle(&r);
    row.to['\n'] = 0; /* <parameter=KEY> alone on its line */
    rawform_emit(a, r.behind_line_parameter, &row, r.high);
    rawform_mark(a, r.behind_line_parameter);
    rawform_add_nested(&r, r.nested, false);
    rawform_add_nested(&r, r.nested_call, true);
    automaton_add_empty(a, a->rules[rule].start, r.base[RAWFORM_LINE]);
    return rule;
}

/* ---- text without tags --------------------------------------------------------------------- */

static const char *const rawform_words[] = {"<too", "<fun", "<par", "</too", "</fun", "</par"};
static const char *const rawform_heads[] = {"",   "<",   "<t",   "<to", "<f",   "<fu", "<p",  "<pa",
                                            "</", "</t", "</to", "</f", "</fu", "</p", "</pa"};
enum {
    RAWFORM_WORDS = sizeof rawform_words / sizeof *rawform_words,
    RAWFORM_HEADS = sizeof rawform_heads / sizeof *rawform_heads,
};

/* The longest head that the text ends with after the byte; RAWFORM_HEADS: a word is spelt. */
static unsigned rawform_next(unsigned head, char c)
{
    char text[8];
    size_t n = strlen(rawform_heads[head]);
    memcpy(text, rawform_heads[head], n);
    text[n] = c;
    text[n + 1] = 0;
    for (unsigned w = 0; w < RAWFORM_WORDS; w++)
        if (!strcmp(rawform_words[w], text))
            return RAWFORM_HEADS;
    for (unsigned h = 0; h < RAWFORM_HEADS; h++)
        if (!strcmp(rawform_heads[h], text))
            return h;
    return c == '<';
}

bool rawform_has_tag(const char *text)
{
    for (unsigned w = 0; w < RAWFORM_WORDS; w++)
        if (strstr(text, rawform_words[w]))
            return true;
    return false;
}

/* Edges for one more character, from what has been spelt so far to at[]. */
static void rawform_step_plain(struct automaton *a, uint32_t node, unsigned head,
                               const uint32_t *at, uint32_t character, bool json)
{
    struct rawform_row row = {.high = at[0]};
    for (unsigned c = 0x20; c < (json ? 0x80 : 0x7f); c++) {
        unsigned next = rawform_next(head, (char)c);
        bool takes = !json || (c != '"' && c != '\\');
        row.to[c] = takes && next < RAWFORM_HEADS ? at[next] : 0;
    }
    if (!json)
        row.to['\n'] = row.to['\t'] = row.to['\r'] = at[0];
    rawform_emit(a, node, &row, character);
}

void rawform_add_plain(struct automaton *a, uint32_t from, uint32_t end, long min, long max,
                       uint32_t character)
{
    uint32_t at[RAWFORM_HEADS] = {automaton_add_node(a)}, next[RAWFORM_HEADS];
    bool json = character != 0;
    automaton_add_empty(a, from, at[0]); /* other strings may begin at `from` */
    if (!json)
        character = rawform_high_rule(a);
    for (long i = 0;; i++) {
        bool last = max < 0 ? i >= min : i == max;
        for (unsigned h = 0; h < RAWFORM_HEADS && last && max < 0; h++)
            at[h] = at[h] ? at[h] : automaton_add_node(a);
        for (unsigned h = 0; h < RAWFORM_HEADS; h++) {
            if (last)
                next[h] = at[h];
            else
                next[h] = i + 1 >= (long)strlen(rawform_heads[h]) ? automaton_add_node(a) : 0;
        }
        if (a->full)
            return;
        for (unsigned h = 0; h < RAWFORM_HEADS; h++) {
            if (!at[h])
                continue;
            if (!h || (last && max >= 0)) {
                a->nodes[at[h]].text = json ? AUTOMATON_JSON_TEXT : AUTOMATON_RAW_TEXT;
                a->nodes[at[h]].room = max < 0 ? AUTOMATON_ANY_ROOM : (uint32_t)(max - i);
            }
            if (i >= min && json)
                automaton_add_byte(a, at[h], end, '"', '"');
            else if (i >= min)
                automaton_add_empty(a, at[h], end);
            if (!last || max < 0)
                rawform_step_plain(a, at[h], h, next, character, json);
        }
        if (last)
            return;
        memcpy(at, next, sizeof at);
    }
}
