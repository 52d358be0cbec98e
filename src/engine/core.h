/* The inside of struct engine, for the files of engine/ only. */
#ifndef ENGINE_CORE_H
#define ENGINE_CORE_H

#include "engine/defaults.h"
#include "engine/engine.h"

struct engine {
    struct device *device;
    struct model model;
    struct state state; /* one slot, always acquired */
    struct graph *graph;
    struct tokenizer *tokenizer; /* or null */
    struct defaults defaults;
    bool has_model, has_state;
    uint32_t ctx, chunk, slot;
    uint32_t logit_rows;    /* rows whose logits fit at a time */
    struct token_list held; /* the tokens that the slot holds, one a position */
    float *logits;          /* f32 [vocab] on the host */
};

/* Runs rows tokens, which follow what the slot holds; the logits wanted are of the last row, or of
 * none. A failure resets the slot. */
bool engine_feed(struct engine *engine, const int32_t *tokens, uint32_t rows, bool want_logits,
                 struct err *err);

/* Makes the slot empty. */
void engine_forget(struct engine *engine);

#endif
