/* Owns the queue, the lock, the thread and the numbers; a step's work is in step.c.
 *
 * Threads that submit and cancel touch only what `lock` guards: the queue, the marks of running
 * requests and the numbers; the rest belongs to the thread that steps. Invariant: running[i] is
 * null or holds a slot of its own, and only the stepping thread changes it, under the lock. */
#include "engine/step.h"

#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { SCHEDULER_QUEUE = 64 };

/* ---- opening ------------------------------------------------------------------------------ */

/* A folder that cannot be used costs the second tier, not the service. */
static struct disk *scheduler_open_disk(const struct engine *engine,
                                        const struct scheduler_options *options)
{
    struct disk *disk = NULL;
    struct err err = {0};
    uint64_t model, limit = options->cache_disk_bytes ? options->cache_disk_bytes : 16ull << 30;
    if (!options->cache_dir)
        return NULL;
    if (!disk_hash_model(engine->folder, &model, &err) ||
        !disk_open(options->cache_dir, limit,
                   hash_step(model, (uint64_t)engine->state.limits.kv_kind), &disk, &err))
        log_warn("the prefix cache stays in memory only: %s", err.text);
    return disk;
}

/* From the disk's thread. */
static void scheduler_on_news(void *user)
{
    struct scheduler *s = user;
    pthread_mutex_lock(&s->lock);
    s->events++;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

bool scheduler_open(struct engine *engine, const struct scheduler_options *options,
                    struct scheduler **out, struct err *err)
{
    (void)err;
    struct scheduler *s = mem_new(1, sizeof *s);
    uint32_t parallel = engine->parallel;
    uint64_t cache_bytes = options->cache_bytes ? options->cache_bytes : engine->cache_bytes;
    s->engine = engine;
    s->disk = scheduler_open_disk(engine, options);
    if (s->disk)
        disk_set_news(s->disk, scheduler_on_news, s);
    s->cache = cache_open(&engine->state, cache_bytes, s->disk);
    s->stats.cache_bytes_max = cache_bytes;
    s->prefill_rows = options->prefill_rows;
    s->running = mem_new(parallel, sizeof *s->running);
    s->tokens = mem_new((size_t)engine->chunk + parallel, sizeof *s->tokens);
    s->choices = mem_new(parallel, sizeof *s->choices);
    s->segments = mem_new(parallel, sizeof *s->segments);
    s->logit_row = mem_new(parallel, sizeof *s->logit_row);
    s->member = mem_new(parallel, sizeof *s->member);
    s->asking = mem_new(parallel, sizeof *s->asking);
    s->queue_end = &s->queue;
    s->queue_max = options->queue ? options->queue : SCHEDULER_QUEUE;
    s->next_id = 1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    *out = s;
    return true;
}

void scheduler_close(struct scheduler *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->wake);
    bool has_thread = s->has_thread;
    pthread_mutex_unlock(&s->lock);
    if (has_thread)
        pthread_join(s->thread, NULL);
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i]) {
            step_cancel(s, s->running[i]);
        }
    while (s->queue) {
        struct sequence *sequence = s->queue;
        s->queue = sequence->next;
        step_cancel(s, sequence);
    }
    cache_close(s->cache);
    disk_close(s->disk);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s->running);
    free(s->tokens);
    free(s->choices);
    free(s->segments);
    free(s->logit_row);
    free(s->member);
    free(s->asking);
    free(s);
}

/* ---- requests come ------------------------------------------------------------------------ */

static bool scheduler_enqueue(struct scheduler *s, struct sequence *sequence, uint64_t *id,
                              struct err *err)
{
    pthread_mutex_lock(&s->lock);
    /* Those that can start at the next step do not count as waiting. */
    uint32_t slots = s->engine->parallel - s->stats.running;
    bool fits = !s->closing && s->stats.queued < s->queue_max + slots;
    if (fits) {
        sequence->id = s->next_id++;
        if (id)
            *id = sequence->id;
        *s->queue_end = sequence;
        s->queue_end = &sequence->next;
        s->stats.queued++;
        s->stats.requests++;
        s->events++;
    } else {
        s->stats.refused++;
        err_set(err, ERR_RESOURCE, "%u requests are waiting already; try again later",
                s->stats.queued);
    }
    pthread_mutex_unlock(&s->lock);
    return fits;
}

static bool scheduler_take(struct scheduler *s, const struct engine_request *request,
                           scheduler_done *done, void *done_user, uint64_t *id, struct err *err)
{
    struct sequence *sequence;
    if (!sequence_open(s->engine, request, &sequence, err))
        return false;
    sequence->done = done;
    sequence->done_user = done_user;
    if (scheduler_enqueue(s, sequence, id, err))
        return true;
    sequence_close(sequence);
    return false;
}

bool scheduler_submit(struct scheduler *s, const struct engine_request *request,
                      scheduler_done *done, uint64_t *id, struct err *err)
{
    return scheduler_take(s, request, done, request->user, id, err);
}

/* What it is woken for changed under the lock, which is not needed any more. */
void scheduler_wake(struct scheduler *s)
{
    pthread_cond_signal(&s->wake);
}

void scheduler_cancel(struct scheduler *s, uint64_t id)
{
    pthread_mutex_lock(&s->lock);
    for (struct sequence *q = s->queue; q; q = q->next)
        if (q->id == id)
            atomic_store(&q->cancelled, true);
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] && s->running[i]->id == id)
            atomic_store(&s->running[i]->cancelled, true);
    s->events++;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

/* ---- who drives it ------------------------------------------------------------------------ */

static void *scheduler_main(void *arg)
{
    struct scheduler *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->closing) {
        pthread_mutex_unlock(&s->lock);
        bool worked = scheduler_step(s) || step_save(s);
        pthread_mutex_lock(&s->lock);
        while (!worked && !s->closing && !s->queue)
            pthread_cond_wait(&s->wake, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

bool scheduler_start(struct scheduler *s, struct err *err)
{
    assert(!s->has_thread);
    int error = pthread_create(&s->thread, NULL, scheduler_main, s);
    if (error)
        return err_set(err, ERR_RESOURCE, "the engine's thread cannot start: %s", strerror(error));
    s->has_thread = true;
    return true;
}

void scheduler_read_stats(struct scheduler *s, struct scheduler_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    pthread_mutex_unlock(&s->lock);
    if (s->disk) {
        struct disk_stats disk = disk_read_stats(s->disk);
        out->store_failed_disk += disk.failed;
        out->disk_bytes = disk.bytes;
        out->disk_bytes_max = disk.bytes_max;
        out->disk_entries = disk.entries;
    }
}

/* What scheduler_run waits for. */
struct scheduler_outcome {
    struct engine_result *result;
    struct err *err;
    bool ended, failed;
};

static void scheduler_take_outcome(void *user, const struct engine_result *result,
                                   const struct err *err)
{
    struct scheduler_outcome *outcome = user;
    outcome->ended = true;
    outcome->failed = err->kind != ERR_NONE;
    if (outcome->failed) {
        err_set(outcome->err, err->kind, "%s", err->text);
        return;
    }
    *outcome->result = *result;
    outcome->result->ids = (struct token_list){0};
    for (size_t i = 0; i < result->ids.len; i++)
        token_list_push(&outcome->result->ids, result->ids.ids[i]);
}

bool scheduler_run(struct scheduler *s, const struct engine_request *request,
                   struct engine_result *result, struct err *err)
{
    struct scheduler_outcome outcome = {.result = result, .err = err};
    assert(!s->has_thread);
    memset(result, 0, sizeof *result);
    if (!scheduler_take(s, request, scheduler_take_outcome, &outcome, NULL, err))
        return false;
    while (!outcome.ended)
        scheduler_step(s);
    return !outcome.failed;
}
