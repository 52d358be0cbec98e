/* What a model takes in memory, part by part, and which context fits: one answer for `calla info`
 * and for opening an engine.
 *
 * Counted is what grows with the model, the context or the number of sequences. Of what the ops
 * need for a moment that is decoding attention alone; the rest is bounded by the rows of a step. */
#ifndef ENGINE_FIT_H
#define ENGINE_FIT_H

#include "model/graph.h"

struct fit_options {
    uint32_t chunk, parallel; /* prompt rows a step, sequences at a time */
    enum kv_kind kv_kind;
    uint64_t memory_bytes; /* it may use at most so much; 0: what is free */
};

struct fit {
    const struct model *model; /* opened without a device will do */
    const struct device *device;
    struct state_limits state; /* of the engine, without ctx and pages */
    struct graph_limits graph; /* likewise */
    uint64_t available;        /* bytes; UINT64_MAX when unknown */
    bool limited;              /* available is what the caller allows, and there is more */
};

struct fit_bytes {
    uint64_t weights;
    uint64_t kv;     /* pages and their tables: every sequence can have its whole context */
    uint64_t states; /* recurrent states and convolution rows */
    uint64_t activations;
    uint64_t scratch;   /* of decoding attention, when every sequence is at its end */
    uint64_t snapshots; /* the least that the prefix cache needs to be of use: one a sequence */
    uint64_t total;     /* UINT64_MAX when it passes 2^64 */
};

/* Model and device are read for as long as the fit is used. */
struct fit fit_make(const struct model *model, const struct device *device,
                    const struct fit_options *options);

struct fit_bytes fit_bytes(const struct fit *fit, uint32_t ctx);

/* The largest context of whole pages (or the model's own) that fits; 0 when not even one page. */
uint32_t fit_largest_ctx(const struct fit *fit);

/* Checks the wanted context; with 0 chooses one that leaves room for other programs. ERR_RESOURCE
 * names the parts and the largest context that fits. */
bool fit_choose_ctx(const struct fit *fit, uint32_t wanted, uint32_t *ctx, struct err *err);

/* Pages of the pool: those of every sequence, and what the prefix cache can keep beside them, a
 * twentieth of the free memory where there is so much. */
uint64_t fit_pages(const struct fit *fit, uint32_t ctx);

/* Bytes of the prefix cache unless told: a tenth of the machine's memory, at most what is left. */
uint64_t fit_cache_bytes(const struct fit *fit, uint32_t ctx, uint64_t pages);

#endif
