/* What happened to each request, a JSON object a line: the rendered prompt, the cache decision, the
 * raw output, the parser's events. For finding out why an answer is as it is. */
#ifndef SERVER_TRACE_H
#define SERVER_TRACE_H

#include "base/err.h"

#include <jansson.h>

struct trace;

/* Opens the file for appending. */
bool trace_open(const char *path, struct trace **out, struct err *err);
void trace_close(struct trace *trace);

/* Writes {"time": ..., "id": id, "event": event, ...fields} and takes `fields` over. Does nothing
 * with a null trace. Thread-safe. */
void trace_write(struct trace *trace, const char *id, const char *event, json_t *fields);

#endif
