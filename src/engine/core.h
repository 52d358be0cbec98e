/* The inside of struct engine, for the files of engine/ only. */
#ifndef ENGINE_CORE_H
#define ENGINE_CORE_H

#include "engine/defaults.h"
#include "engine/engine.h"

struct scheduler;

struct engine {
    char *folder; /* the model's */
    struct device *device;
    struct model model;
    struct state state; /* options.parallel slots */
    struct graph *graph;
    struct tokenizer *tokenizer; /* or null */
    struct defaults defaults;
    bool has_model, has_state;
    uint32_t ctx, chunk, parallel;
    uint64_t cache_bytes;                /* of a prefix cache, unless told */
    uint32_t logit_rows;                 /* rows whose logits fit at a time, at least `parallel` */
    float *logits;                       /* f32 [vocab] on the host */
    struct grammar_vocab *grammar_vocab; /* made when a request first needs it */
    struct scheduler *own;               /* engine_generate's, made when first needed */
};

/* Runs one request on a scheduler that no thread drives; the result is the caller's. */
bool scheduler_run(struct scheduler *scheduler, const struct engine_request *request,
                   struct engine_result *result, struct err *err);

#endif
