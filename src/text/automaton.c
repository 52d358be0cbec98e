/* Owns the arrays. Past a limit nothing is added any more: ids stay valid, `full` is set, and
 * automaton_finish reports it, so that builders need no check after every step. */
#include "text/automaton.h"

#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>

void automaton_open(struct automaton *a)
{
    *a = (struct automaton){0};
    a->node_cap = a->edge_cap = 1024;
    a->nodes = mem_new(a->node_cap, sizeof *a->nodes);
    a->edges = mem_new(a->edge_cap, sizeof *a->edges);
    a->node_count = a->edge_count = 1;
}

void automaton_close(struct automaton *a)
{
    free(a->nodes);
    free(a->edges);
    free(a->rules);
    *a = (struct automaton){0};
}

uint32_t automaton_add_node(struct automaton *a)
{
    if (a->node_count >= AUTOMATON_MAX_NODES) {
        a->full = true;
        return 0;
    }
    if (a->node_count == a->node_cap) {
        a->node_cap *= 2;
        a->nodes = mem_grow(a->nodes, a->node_cap, sizeof *a->nodes);
    }
    a->nodes[a->node_count] = (struct automaton_node){0};
    return a->node_count++;
}

uint32_t automaton_add_rule(struct automaton *a)
{
    if (a->rule_count == a->rule_cap) {
        a->rule_cap = a->rule_cap ? a->rule_cap * 2 : 64;
        a->rules = mem_grow(a->rules, a->rule_cap, sizeof *a->rules);
    }
    struct automaton_rule *rule = &a->rules[a->rule_count];
    rule->start = automaton_add_node(a);
    rule->end = automaton_add_node(a);
    a->nodes[rule->end].end = true;
    return a->rule_count++;
}

static void automaton_add_edge(struct automaton *a, uint32_t from, struct automaton_edge edge)
{
    if (a->full || a->edge_count >= AUTOMATON_MAX_EDGES) {
        a->full = true;
        return;
    }
    assert(from && edge.target);
    if (a->edge_count == a->edge_cap) {
        a->edge_cap *= 2;
        a->edges = mem_grow(a->edges, a->edge_cap, sizeof *a->edges);
    }
    edge.next = a->nodes[from].edges;
    a->nodes[from].edges = a->edge_count;
    a->edges[a->edge_count++] = edge;
}

void automaton_add_byte(struct automaton *a, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi)
{
    automaton_add_edge(
        a, from, (struct automaton_edge){.target = to, .kind = AUTOMATON_BYTE, .lo = lo, .hi = hi});
}

void automaton_add_empty(struct automaton *a, uint32_t from, uint32_t to)
{
    automaton_add_edge(a, from, (struct automaton_edge){.target = to, .kind = AUTOMATON_EMPTY});
}

void automaton_add_call(struct automaton *a, uint32_t from, uint32_t to, uint32_t rule)
{
    automaton_add_edge(a, from,
                       (struct automaton_edge){.target = to, .kind = AUTOMATON_CALL, .rule = rule});
}

const char *automaton_marker_text(enum automaton_marker marker)
{
    return marker == AUTOMATON_CALL_OPEN ? "<tool_call>" : "</tool_call>";
}

void automaton_add_marker(struct automaton *a, uint32_t from, uint32_t to,
                          enum automaton_marker marker)
{
    uint32_t spelt = automaton_add_node(a);
    automaton_add_edge(
        a, from,
        (struct automaton_edge){.target = to, .kind = AUTOMATON_MARKER, .lo = (uint8_t)marker});
    automaton_add_edge(
        a, from,
        (struct automaton_edge){.target = spelt, .kind = AUTOMATON_SPELT, .lo = (uint8_t)marker});
    automaton_add_empty(a, automaton_add_text(a, spelt, automaton_marker_text(marker)), to);
}

uint32_t automaton_add_text(struct automaton *a, uint32_t from, const char *text)
{
    for (; *text; text++) {
        uint32_t to = automaton_add_node(a);
        automaton_add_byte(a, from, to, (uint8_t)*text, (uint8_t)*text);
        from = to;
    }
    return from;
}

uint32_t automaton_add_shared(struct automaton *a, uint32_t from, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n && !a->full; i++) {
        uint8_t byte = (uint8_t)bytes[i];
        uint32_t e = a->nodes[from].edges;
        while (e && !(a->edges[e].kind == AUTOMATON_BYTE && a->edges[e].lo == byte &&
                      a->edges[e].hi == byte))
            e = a->edges[e].next;
        if (e) {
            from = a->edges[e].target;
            continue;
        }
        uint32_t to = automaton_add_node(a);
        automaton_add_byte(a, from, to, byte, byte);
        from = to;
    }
    return from;
}

/* The code points lo..hi that take n bytes each: ranges are cut until the trailing bytes of each
 * piece run over all their values or the leading ones are equal. */
static void automaton_add_sequence(struct automaton *a, uint32_t from, uint32_t to, uint32_t lo,
                                   uint32_t hi, unsigned n)
{
    static const uint8_t heads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (unsigned k = 1; k < n; k++) {
        uint32_t low = (1u << (6 * k)) - 1;
        if ((lo & ~low) == (hi & ~low))
            continue;
        if (lo & low) {
            automaton_add_sequence(a, from, to, lo, lo | low, n);
            automaton_add_sequence(a, from, to, (lo | low) + 1, hi, n);
            return;
        }
        if ((hi & low) != low) {
            automaton_add_sequence(a, from, to, lo, (hi & ~low) - 1, n);
            automaton_add_sequence(a, from, to, hi & ~low, hi, n);
            return;
        }
    }
    for (unsigned k = n; k-- > 0;) {
        uint32_t first = lo >> (6 * k), last = hi >> (6 * k);
        uint8_t head = k == n - 1 ? heads[n] : 0x80;
        if (k < n - 1) {
            first &= 63;
            last &= 63;
        }
        uint32_t next = k ? automaton_add_node(a) : to;
        automaton_add_byte(a, from, next, (uint8_t)(head | first), (uint8_t)(head | last));
        from = next;
    }
}

void automaton_add_points(struct automaton *a, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    static const uint32_t parts[][2] = {
        {0, 0x7f}, {0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, 0x10ffff}};
    static const unsigned sizes[] = {1, 2, 3, 3, 4};
    for (size_t i = 0; i < 5; i++) {
        uint32_t first = lo > parts[i][0] ? lo : parts[i][0];
        uint32_t last = hi < parts[i][1] ? hi : parts[i][1];
        if (first > last)
            continue;
        if (sizes[i] == 1)
            automaton_add_byte(a, from, to, (uint8_t)first, (uint8_t)last);
        else
            automaton_add_sequence(a, from, to, first, last, sizes[i]);
    }
}

/* What the way over this edge needs, by the nodes' present figures. */
static uint32_t automaton_edge_need(const struct automaton *a, const struct automaton_edge *edge)
{
    uint32_t need = a->nodes[edge->target].need;
    if (edge->kind == AUTOMATON_CALL) {
        const struct automaton_rule *rule = &a->rules[edge->rule];
        /* A call that is the last thing in its rule leaves nothing open (see grammar.c). */
        uint32_t inner = a->nodes[rule->start].need + !a->nodes[edge->target].end;
        need = inner > need ? inner : need;
    }
    return need;
}

/* The least solution of need = min over edges, by rounds until nothing changes. A round goes over
 * the nodes backwards, as chains are built forwards. */
static void automaton_find_needs(struct automaton *a)
{
    for (uint32_t n = 0; n < a->node_count; n++)
        a->nodes[n].need = a->nodes[n].end ? 0 : AUTOMATON_NO_WAY;
    for (bool again = true; again;) {
        again = false;
        for (uint32_t n = a->node_count - 1; n > 0; n--) {
            for (uint32_t e = a->nodes[n].edges; e; e = a->edges[e].next) {
                uint32_t need = automaton_edge_need(a, &a->edges[e]);
                if (need < a->nodes[n].need) {
                    a->nodes[n].need = (uint16_t)need;
                    again = true;
                }
            }
        }
    }
}

/* Unlinks edges that lead nowhere. */
static void automaton_prune(struct automaton *a)
{
    for (uint32_t n = 1; n < a->node_count; n++) {
        uint32_t *link = &a->nodes[n].edges;
        while (*link) {
            struct automaton_edge *edge = &a->edges[*link];
            if (automaton_edge_need(a, edge) > AUTOMATON_MAX_DEPTH)
                *link = edge->next;
            else
                link = &edge->next;
        }
    }
}

enum { AUTOMATON_NEW, AUTOMATON_OPEN, AUTOMATON_CLEAR };

/* Whether the nodes that can be reached from `start` without a byte form no circle through a
 * call. No rule takes the empty text, so what follows a call does not count. Circles of empty edges
 * alone do no harm, but builders make none. Explicit stack: chains can be long. */
static bool automaton_has_circle(const struct automaton *a, uint32_t start, uint8_t *colour,
                                 uint32_t *stack, uint32_t *at)
{
    size_t depth = 0;
    if (colour[start] != AUTOMATON_NEW)
        return false;
    stack[0] = start;
    at[0] = a->nodes[start].edges;
    colour[start] = AUTOMATON_OPEN;
    for (;;) {
        uint32_t e = at[depth];
        if (!e) {
            colour[stack[depth]] = AUTOMATON_CLEAR;
            if (!depth--)
                return false;
            continue;
        }
        const struct automaton_edge *edge = &a->edges[e];
        at[depth] = edge->next;
        uint32_t next = 0;
        if (edge->kind == AUTOMATON_CALL)
            next = a->rules[edge->rule].start;
        else if (edge->kind == AUTOMATON_EMPTY || edge->kind == AUTOMATON_SPELT)
            next = edge->target;
        if (!next || colour[next] == AUTOMATON_CLEAR)
            continue;
        if (colour[next] == AUTOMATON_OPEN)
            return true;
        colour[next] = AUTOMATON_OPEN;
        stack[++depth] = next;
        at[depth] = a->nodes[next].edges;
    }
}

bool automaton_finish(struct automaton *a, const char *what, struct err *err)
{
    if (a->full)
        return err_set(err, ERR_USAGE,
                       "%s is too large to constrain an answer by (over %d automaton nodes); make "
                       "its lists, lengths or repetitions smaller",
                       what, AUTOMATON_MAX_NODES);
    uint8_t *colour = mem_new(a->node_count, 1);
    uint32_t *stack = mem_new(a->node_count, sizeof *stack);
    uint32_t *at = mem_new(a->node_count, sizeof *at);
    bool circle = false;
    for (uint32_t r = 0; r < a->rule_count && !circle; r++)
        circle = automaton_has_circle(a, a->rules[r].start, colour, stack, at);
    free(colour);
    free(stack);
    free(at);
    if (circle)
        return err_set(err, ERR_USAGE,
                       "%s: a $ref leads back to itself with no object or array between; break the "
                       "circle",
                       what);
    automaton_find_needs(a);
    if (a->nodes[a->rules[a->root].start].need > AUTOMATON_MAX_DEPTH)
        return err_set(err, ERR_USAGE,
                       "%s: no finite value fits it (a required part contains itself, or nests "
                       "over %d deep)",
                       what, AUTOMATON_MAX_DEPTH);
    automaton_prune(a);
    return true;
}
