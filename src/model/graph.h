/* The forward pass: the only one. Prefill, decode, batched decode and verification are the same
 * call with other row counts. After graph_open only the scratch of a device grows, to what the
 * largest batch so far took. */
#ifndef MODEL_GRAPH_H
#define MODEL_GRAPH_H

#include "model/state.h"

struct graph_limits {
    uint32_t rows;     /* a batch has at most so many */
    uint32_t segments; /* likewise */
    uint32_t logit_rows;
};

struct graph; /* activations and batch buffers */

struct batch {
    uint32_t rows, segments, logit_rows;
    const int32_t *tokens;         /* [rows] */
    const struct segment *segment; /* [segments]; slots are those of the state */
    const uint32_t *logit_row;     /* [logit_rows], ascending: rows whose logits are wanted */
};

uint64_t graph_bytes(const struct config *config, const struct graph_limits *limits);

bool graph_open(const struct model *model, struct state *state, const struct graph_limits *limits,
                struct graph **out, struct err *err);
void graph_close(struct graph *graph);

/* Reserves pages, runs the batch, and moves each segment's position on. Checks tokens against the
 * vocabulary and segments against the state first; on failure of the checks nothing changed, on a
 * device error the slots concerned must be reset by the caller. */
bool graph_forward(struct graph *graph, const struct batch *batch, struct err *err);

/* After the forward pass of a batch of one row a segment, all of whose logits were wanted, and
 * before anything of it is read: queues one more row for every segment, on the token that is its
 * argmax. So the device goes on while the host still looks at what it chose. False, and nothing
 * happens, where the device has no use for that, the batch is another, or a segment would need a
 * new page. After it graph_read_choices gives those of the batch that was followed, and the next
 * time those of the one queued; logits are of the latter only. */
bool graph_follow(struct graph *graph);

/* Puts the logits of other rows of the last batch (ascending, at most limits.logit_rows) in place
 * of those that graph_forward left: for callers that want more rows than fit at a time. */
bool graph_project(struct graph *graph, const uint32_t *row, uint32_t rows, struct err *err);

/* After graph_forward: reads logit row i to the host: f32 [vocab]. */
bool graph_read_logits(struct graph *graph, uint32_t i, float *out, struct err *err);

/* argmax of every logit row (ties to the lowest id), i32 [logit_rows] of the batch, with one wait;
 * a row whose logits hold NaN or no finite number gets -1, the others are right all the same. */
bool graph_read_choices(struct graph *graph, int32_t *tokens, struct err *err);

/* Called after the embedding (layer -1) and after every layer with x, f32 [rows, hidden]; for
 * tests and debugging. Null stops it. */
void graph_set_probe(struct graph *graph,
                     void (*probe)(void *user, int layer, const float *x, uint32_t rows),
                     void *user);

#endif
