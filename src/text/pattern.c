/* Owns the place in the expression while it is read. A repeated part is read once a copy.
 *
 * Invariant: control characters never match, nor does '<' in tool calls; so what is built takes a
 * part of what the expression takes. No circle of edges that take nothing is made. */
#include "text/pattern.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { PATTERN_DEPTH = 32, PATTERN_REPEAT = 1024 };

struct pattern {
    struct automaton *a;
    const char *at;
    enum pattern_form form;
    uint32_t high; /* rule: a character beyond ASCII */
    int depth;
    const char *why;
};

/* Characters: ASCII ones, and whether all others. */
struct pattern_set {
    bool has[128], high;
};

static uint32_t pattern_choice(struct pattern *p, uint32_t from, bool *empty);

static uint32_t pattern_refuse(struct pattern *p, const char *why)
{
    p->why = p->why ? p->why : why;
    return 0;
}

static void pattern_take(struct pattern *p, uint32_t from, uint32_t to,
                         const struct pattern_set *set)
{
    bool raw = p->form == PATTERN_RAW;
    for (unsigned c = 0x20, hi; c < 0x7f; c = hi + 1) {
        bool escape = !raw && (c == '"' || c == '\\');
        hi = c;
        if (!set->has[c] || (c == '<' && p->form != PATTERN_JSON))
            continue;
        if (escape) {
            uint32_t slash = automaton_add_node(p->a);
            automaton_add_byte(p->a, from, slash, '\\', '\\');
            automaton_add_byte(p->a, slash, to, (uint8_t)c, (uint8_t)c);
            continue;
        }
        while (hi + 1 < 0x7f && set->has[hi + 1] && hi + 1 != '<' &&
               (raw || (hi + 1 != '"' && hi + 1 != '\\')))
            hi++;
        automaton_add_byte(p->a, from, to, (uint8_t)c, (uint8_t)hi);
    }
    if (set->high)
        automaton_add_call(p->a, from, to, p->high);
}

static void pattern_add_range(struct pattern_set *set, unsigned lo, unsigned hi)
{
    for (unsigned c = lo; c <= hi; c++)
        set->has[c] = true;
}

/* Behind a backslash: a class or a character that stands for itself. */
static bool pattern_escape(struct pattern *p, struct pattern_set *set)
{
    struct pattern_set found = {0};
    char c = *p->at;
    switch (c | 0x20) {
    case 'd':
        pattern_add_range(&found, '0', '9');
        break;
    case 'w':
        pattern_add_range(&found, '0', '9');
        pattern_add_range(&found, 'a', 'z');
        pattern_add_range(&found, 'A', 'Z');
        found.has['_'] = true;
        break;
    case 's':
        found.has[' '] = true;
        break;
    default:
        if (!c || !strchr("\\^$.|?*+()[]{}/-\"'@#%&=!:;,<>~`_ ", c))
            return pattern_refuse(p, "has an escape that is not supported");
        found.has[(uint8_t)c] = true;
        set->has[(uint8_t)c] = true;
        p->at++;
        return true;
    }
    bool negated = c < 'a';
    for (unsigned i = 0x20; i < 0x7f; i++)
        set->has[i] |= found.has[i] != negated;
    set->high |= negated;
    p->at++;
    return true;
}

/* Behind '[', up to and with the ']'. */
static bool pattern_class(struct pattern *p, struct pattern_set *out)
{
    struct pattern_set set = {0};
    bool negated = *p->at == '^';
    p->at += negated;
    do {
        unsigned char lo = (unsigned char)*p->at;
        if (lo < 0x20 || lo >= 0x7f)
            return pattern_refuse(p, "has a class that is open or has members beyond ASCII");
        p->at++;
        if (lo == '\\') {
            if (!pattern_escape(p, &set))
                return false;
        } else if (p->at[0] == '-' && p->at[1] && p->at[1] != ']') {
            unsigned char hi = (unsigned char)p->at[1];
            if (hi == '\\' || hi < lo || hi >= 0x7f)
                return pattern_refuse(p, "has a class with a range that is not supported");
            pattern_add_range(&set, lo, hi);
            p->at += 2;
        } else {
            set.has[lo] = true;
        }
    } while (*p->at != ']');
    p->at++;
    for (unsigned i = 0x20; i < 0x7f; i++)
        out->has[i] = set.has[i] != negated;
    out->high = set.high != negated;
    return true;
}

static uint32_t pattern_group(struct pattern *p, uint32_t from, bool *empty)
{
    if (p->at[0] == '?') {
        if (p->at[1] != ':')
            return pattern_refuse(p, "has a group that looks around or has a name");
        p->at += 2;
    }
    if (p->depth >= PATTERN_DEPTH)
        return pattern_refuse(p, "nests over 32 groups");
    p->depth++;
    uint32_t to = pattern_choice(p, from, empty);
    p->depth--;
    if (to && *p->at++ != ')')
        return pattern_refuse(p, "has a group that is not closed");
    return to;
}

static uint32_t pattern_atom(struct pattern *p, uint32_t from, bool *empty)
{
    struct pattern_set set = {0};
    unsigned char c = (unsigned char)*p->at;
    *empty = false;
    if (c >= 0x80) { /* one character is one atom */
        size_t n = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
        for (; n && (unsigned char)*p->at >= 0x80; n--, p->at++) {
            uint32_t next = automaton_add_node(p->a);
            automaton_add_byte(p->a, from, next, (uint8_t)*p->at, (uint8_t)*p->at);
            from = next;
        }
        return from;
    }
    if (strchr("^$*+?{}])", c) || c < 0x20)
        return pattern_refuse(p, "has an anchor within, or a repetition of nothing");
    p->at++;
    if (c == '(')
        return pattern_group(p, from, empty);
    if (c == '.') {
        pattern_add_range(&set, 0x20, 0x7e);
        set.high = true;
    } else if (c == '[' ? !pattern_class(p, &set) : c == '\\' && !pattern_escape(p, &set)) {
        return 0;
    } else if (c != '[' && c != '\\') {
        set.has[c] = true;
    }
    uint32_t to = automaton_add_node(p->a);
    pattern_take(p, from, to, &set);
    return to;
}

/* The counts behind an atom; most < 0: any number. */
static bool pattern_counts(struct pattern *p, long *least, long *most)
{
    char c = *p->at;
    *least = c == '*' || c == '?' ? 0 : 1;
    *most = c == '*' || c == '+' ? -1 : 1;
    if (c == '{') {
        char *end;
        *least = *most = strtol(p->at + 1, &end, 10);
        if (*end == ',')
            *most = end[1] == '}' ? -1 : strtol(end + 1, &end, 10);
        end += *end == ',';
        if (*end != '}' || p->at[1] < '0' || p->at[1] > '9' || *least > PATTERN_REPEAT ||
            *most > PATTERN_REPEAT || (*most >= 0 && *most < *least))
            return pattern_refuse(p, "repeats in a way that is not supported (at most 1,024)");
        p->at = end + 1;
    } else if (c == '*' || c == '+' || c == '?') {
        p->at++;
    }
    if (*p->at == '?' && (c == '*' || c == '+' || c == '?' || c == '{'))
        p->at++; /* whether it is greedy does not matter */
    return true;
}

static uint32_t pattern_repeated(struct pattern *p, uint32_t from, bool *empty)
{
    const char *begin = p->at, *behind;
    long least, most;
    bool part;
    uint32_t to = pattern_atom(p, from, &part), end = automaton_add_node(p->a);
    behind = p->at;
    if (!to || !pattern_counts(p, &least, &most))
        return 0;
    behind = p->at;
    if (part && (most < 0 || most > 1))
        return pattern_refuse(p, "repeats something that may be empty");
    *empty = part || !least;
    if (!least)
        automaton_add_empty(p->a, from, end);
    for (long i = 1; i < least || (most > 0 && i < most); i++) {
        if (i >= least)
            automaton_add_empty(p->a, to, end);
        p->at = begin;
        to = pattern_atom(p, to, &part);
        if (p->a->full || !to)
            return to;
    }
    if (most != 0)
        automaton_add_empty(p->a, to, end);
    if (most < 0) {
        p->at = begin;
        uint32_t again = pattern_atom(p, to, &part);
        automaton_add_empty(p->a, again, to);
    }
    p->at = behind;
    return end;
}

static uint32_t pattern_choice(struct pattern *p, uint32_t from, bool *empty)
{
    uint32_t end = automaton_add_node(p->a);
    *empty = false;
    for (;;) {
        uint32_t at = automaton_add_node(p->a);
        bool all = true, part;
        automaton_add_empty(p->a, from, at);
        while (*p->at && !strchr("|)", *p->at) && !(p->at[0] == '$' && !p->at[1])) {
            at = pattern_repeated(p, at, &part);
            if (!at || p->a->full)
                return at;
            all = all && part;
        }
        automaton_add_empty(p->a, at, end);
        *empty = *empty || all;
        if (*p->at != '|')
            return end;
        p->at++;
    }
}

/* Any characters, before or behind an expression without anchors. */
static uint32_t pattern_anything(struct pattern *p, uint32_t from)
{
    struct pattern_set set = {.high = true};
    uint32_t node = automaton_add_node(p->a);
    pattern_add_range(&set, 0x20, 0x7e);
    automaton_add_empty(p->a, from, node);
    pattern_take(p, node, node, &set);
    return node;
}

const char *pattern_add(struct automaton *a, const char *pattern, enum pattern_form form,
                        uint32_t from, uint32_t end)
{
    struct pattern p = {.a = a, .at = pattern, .form = form, .high = automaton_add_rule(a)};
    size_t n = strlen(pattern);
    bool empty, closed = n && pattern[n - 1] == '$' && (n < 2 || pattern[n - 2] != '\\');
    automaton_add_points(a, a->rules[p.high].start, a->rules[p.high].end, 0x80, 0x10ffff);
    if (*p.at == '^')
        p.at++;
    else
        from = pattern_anything(&p, from);
    const char *begin = p.at;
    uint32_t to = pattern_choice(&p, from, &empty);
    if (a->full)
        return NULL; /* automaton_finish reports it */
    if (!p.why && strcmp(p.at, closed ? "$" : "") != 0)
        return "has a group that is not opened";
    /* "^a|b$" anchors each half once only. */
    int depth = 0;
    for (const char *q = begin; !p.why && *q; q++) {
        q += *q == '\\' && q[1];
        depth += (*q == '(') - (*q == ')');
        if (*q == '|' && !depth && (closed || begin > pattern))
            return "has anchors beside a choice; put the choice into a group";
    }
    if (p.why)
        return p.why;
    automaton_add_empty(a, closed ? to : pattern_anything(&p, to), end);
    return NULL;
}

#define PATTERN_TIME                                                                               \
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]" \
    ")"

const char *pattern_of_format(const char *format)
{
    static const char *const formats[][2] = {
        {"date", "^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|"
                 "(0[13578]|1[02])-31)$"},
        {"time", "^" PATTERN_TIME "$"},
        {"date-time", "^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|"
                      "(0[13578]|1[02])-31)T" PATTERN_TIME "$"},
        {"uuid", "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"},
        {"email", "^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\\.[A-Za-z0-9-]+)+$"},
        {"uri", "^[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9/][A-Za-z0-9._~:/?#@!$&'()*+,;=%-]*$"},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(formats[i][0], format))
            return formats[i][1];
    return NULL;
}
