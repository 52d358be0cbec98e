/* A request body to a JSON value, with everything that it can hold bounded. */
#ifndef SERVER_BODY_H
#define SERVER_BODY_H

#include "server/fault.h"

#include <stddef.h>

enum {
    BODY_MAX_DEPTH = 256,    /* arrays and objects inside each other */
    BODY_MAX_VALUES = 600000 /* values in all: each costs up to 150 bytes of memory */
};

/* Parses text[0..n), which it may change: the escape of a lone surrogate becomes \ufffd, because
 * JavaScript clients that cut a string in an emoji send one for ever after. Duplicate keys, invalid
 * UTF-8, numbers out of range and all else that is not one JSON object fail with 400. */
bool body_parse(char *text, size_t n, json_t **out, struct fault *fault);

#endif
