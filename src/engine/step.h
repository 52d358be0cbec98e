/* The inside of a scheduler: what scheduler.c (queue, thread) and step.c (batches) share. */
#ifndef ENGINE_STEP_H
#define ENGINE_STEP_H

#include "engine/cache.h"
#include "engine/sequence.h"

#include <pthread.h>

struct scheduler {
    struct engine *engine;
    struct cache *cache;
    struct disk *disk;         /* the cache's second tier, or null */
    struct sequence **running; /* [engine->parallel] */
    uint32_t turn;             /* the running request that is served first when rows are short */
    uint32_t prefill_rows;     /* from the options; 0: by time */
    double row_s;              /* seconds that a prompt row takes, about; 0: not known yet */

    /* the batch, [engine->chunk + parallel - 1] and [parallel] */
    int32_t *tokens, *choices;
    struct segment *segments;
    uint32_t *logit_row;
    struct sequence **member, **asking; /* of each segment; of each logit row; null: has ended */
    struct batch batch;
    bool ahead; /* the batch is queued on the device already: it followed the one before */

    pthread_mutex_t lock;
    pthread_cond_t wake; /* something was queued or cancelled, or closing */
    pthread_t thread;
    bool has_thread, closing;
    struct sequence *queue, **queue_end;
    uint32_t queue_max;
    uint64_t next_id;
    uint64_t events; /* submissions, cancellations, news from the disk */
    struct scheduler_stats stats;
};

/* The request leaves: its slot and pages go back, its caller hears of it. */
void step_end(struct scheduler *scheduler, struct sequence *sequence, const struct err *err);
/* The same for one that was cancelled. */
void step_cancel(struct scheduler *scheduler, struct sequence *sequence);

/* Ends what was cancelled, wherever it is; then the queue's first get the free slots (admit.c). */
void admit_requests(struct scheduler *scheduler);

/* Nothing runs: more of the cache goes to disk; false when all has. */
bool step_save(struct scheduler *scheduler);

#endif
