/* A byte-level pushdown automaton: rules made of nodes, whose edges take a byte, call a rule or
 * take nothing. It is built once, checked by automaton_finish, and immutable from then on.
 *
 * Node 0 stands for "no node". Every rule has one start and one end; the end has no edges. */
#ifndef TEXT_AUTOMATON_H
#define TEXT_AUTOMATON_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    AUTOMATON_MAX_NODES = 1 << 18,
    AUTOMATON_MAX_EDGES = 1 << 20,
    AUTOMATON_MAX_DEPTH = 200,   /* calls that are open at once */
    AUTOMATON_NO_WAY = 1 << 14,  /* need of a node that cannot reach its rule's end */
    AUTOMATON_ANY_ROOM = 1 << 30 /* room of a text without a longest length */
};

enum automaton_edge_kind {
    AUTOMATON_BYTE,   /* lo..hi */
    AUTOMATON_EMPTY,  /* takes nothing */
    AUTOMATON_CALL,   /* rule, and then on at target */
    AUTOMATON_MARKER, /* the added token number lo (enum automaton_marker) */
    AUTOMATON_SPELT,  /* takes nothing; only where the vocabulary lacks marker lo */
};

enum automaton_marker {
    AUTOMATON_CALL_OPEN,  /* <tool_call> */
    AUTOMATON_CALL_CLOSE, /* </tool_call> */
    AUTOMATON_MARKERS,
};

/* Kinds of free text. From a node of such a kind, every token that is made of whole characters of
 * the kind leads to such a node again, as long as there is room for its characters and the first
 * byte is not the node's `leave`. The room is exact: more characters do not fit. The start of a
 * rule that is called for one character of the text has the kind and no room: the room for what it
 * takes is the caller's. */
enum automaton_text {
    AUTOMATON_NO_TEXT,
    AUTOMATON_JSON_TEXT, /* no '<', quote, backslash, control character */
    AUTOMATON_RAW_TEXT,  /* no '<', no control character but tab, carriage return */
    AUTOMATON_TEXTS,
};

struct automaton_edge {
    uint32_t target, next; /* next: edge of the same node, or 0 */
    uint32_t rule;
    uint8_t kind, lo, hi;
};

struct automaton_node {
    uint32_t edges; /* the first, or 0 */
    uint32_t room;  /* characters of `text` that fit */
    uint16_t need;  /* calls that are open at once on the cheapest way to the rule's end */
    uint8_t text;   /* enum automaton_text */
    uint8_t leave;  /* a byte of the kind with which the text may end, or 0 */
    bool end;
};

struct automaton_rule {
    uint32_t start, end;
};

struct automaton {
    struct automaton_node *nodes; /* [node_count] */
    struct automaton_edge *edges; /* [edge_count], 0 unused */
    struct automaton_rule *rules; /* [rule_count] */
    uint32_t node_count, edge_count, rule_count;
    uint32_t node_cap, edge_cap, rule_cap;
    uint32_t root; /* rule */
    bool full;     /* a limit was passed; what was added since is lost */
};

void automaton_open(struct automaton *a);
void automaton_close(struct automaton *a);

uint32_t automaton_add_rule(struct automaton *a);
uint32_t automaton_add_node(struct automaton *a);
void automaton_add_byte(struct automaton *a, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi);
void automaton_add_empty(struct automaton *a, uint32_t from, uint32_t to);
void automaton_add_call(struct automaton *a, uint32_t from, uint32_t to, uint32_t rule);
void automaton_add_marker(struct automaton *a, uint32_t from, uint32_t to,
                          enum automaton_marker marker);

/* A chain of new nodes that takes exactly these bytes; returns its last node. */
uint32_t automaton_add_text(struct automaton *a, uint32_t from, const char *text);
/* The same, but shares the nodes of texts that were added by this call from the same node before:
 * the part stays deterministic however many texts there are. */
uint32_t automaton_add_shared(struct automaton *a, uint32_t from, const char *bytes, size_t n);

/* Bytes of the code points lo..hi in UTF-8, without surrogates. */
void automaton_add_points(struct automaton *a, uint32_t from, uint32_t to, uint32_t lo,
                          uint32_t hi);

/* Finds what cannot end and drops it. Fails with ERR_USAGE when a limit was passed, when nothing at
 * all fits, when a value cannot end within AUTOMATON_MAX_DEPTH, and when a rule calls itself
 * without taking a byte first. `what` names the source for the message. */
bool automaton_finish(struct automaton *a, const char *what, struct err *err);

/* The bytes of a marker. */
const char *automaton_marker_text(enum automaton_marker marker);

#endif
