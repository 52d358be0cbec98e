/* Stop strings in streaming text: what could be the beginning of one is withheld until it is
 * certain. Feeding the text in any pieces gives the same output. */
#ifndef ENGINE_STOPS_H
#define ENGINE_STOPS_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>

struct stops {
    const char *const *strings; /* [count], none empty; the caller's */
    size_t count;
    struct buf held; /* the longest end of the text that begins a stop string */
    bool hit;        /* a stop string is complete; later text is dropped */
};

/* Appends to out what can no longer be part of a stop string. The string that is complete first
 * ends the text (the longest of those, when several end at once); neither it nor what follows is
 * emitted. */
void stops_push(struct stops *stops, const char *text, size_t n, struct buf *out);

/* The text has ended: appends what is still withheld. */
void stops_finish(struct stops *stops, struct buf *out);

void stops_free(struct stops *stops);

#endif
