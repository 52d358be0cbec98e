/* Many requests on one engine.
 *
 * One thread at a time drives the device through scheduler_step: the thread that scheduler_start
 * makes (a server), or the caller's own loop (engine_generate). Each step forms one batch: all
 * decoding rows, plus prefill rows up to a budget that bounds the longest gap between two tokens
 * of a running stream. Callbacks come from inside a step and must not block.
 *
 * Invariants: the state of a request is never seen by another; a request that fails or is
 * cancelled gives its slot and pages back within two steps and leaves the rest as they were. */
#ifndef ENGINE_SCHEDULER_H
#define ENGINE_SCHEDULER_H

#include "engine/engine.h"

struct scheduler;

struct scheduler_options {
    uint32_t queue;        /* requests that may wait; 0: 64 */
    uint32_t prefill_rows; /* prefill rows in a step while streams are running; 0: the default */
    uint64_t cache_bytes;  /* RAM of the prefix cache; 0: see fit_cache_bytes */
    const char *cache_dir; /* null: no disk tier; one that cannot be used is a line in the log */
    uint64_t cache_disk_bytes; /* 0: 16 GiB */
};

bool scheduler_open(struct engine *engine, const struct scheduler_options *options,
                    struct scheduler **out, struct err *err);
/* Cancels everything, joins the thread. */
void scheduler_close(struct scheduler *scheduler);

/* Called once when a request has ended, also after an error (err->kind is not ERR_NONE then; the
 * result holds what was generated before). Both pointers are valid during the call only. */
typedef void scheduler_done(void *user, const struct engine_result *result, const struct err *err);

/* Queues a copy of the request. The thread of scheduler_start begins with it when it is awake, and
 * is not woken by this. Its on_token, on_prefill and `done` are called with request->user from
 * inside scheduler_step. Fails with ERR_USAGE (bad sampling options, a prompt that does not
 * fit the context, in the message's numbers) or ERR_RESOURCE (the queue is full: try again later);
 * then `done` is not called. `id` names the request for scheduler_cancel. Thread-safe. */
bool scheduler_submit(struct scheduler *scheduler, const struct engine_request *request,
                      scheduler_done *done, uint64_t *id, struct err *err);

/* To be called after submitting. A thread that is woken may get the processor of the one that woke
 * it, which then stands still for a forward pass: so what is urgent is done before. Thread-safe. */
void scheduler_wake(struct scheduler *scheduler);

/* Ends a request in any phase (queued, prefill, decode); its `done` comes with FINISH_CANCELLED.
 * Unknown or ended ids are ignored. Thread-safe. */
void scheduler_cancel(struct scheduler *scheduler, uint64_t id);

/* Runs one batch; false when there is nothing to do. */
bool scheduler_step(struct scheduler *scheduler);

/* Starts the thread that steps for ever and sleeps when there is nothing to do. */
bool scheduler_start(struct scheduler *scheduler, struct err *err);

struct scheduler_stats {
    uint64_t requests, failed, cancelled, refused;
    uint64_t prompt_tokens, cached_tokens, generated_tokens, steps;
    double compute_s; /* in forward passes */
    uint32_t running, queued;
    uint64_t cache_bytes, cache_bytes_max, cache_entries, cache_hits, cache_misses, cache_evictions;
    uint64_t disk_bytes, disk_bytes_max, disk_entries; /* max 0: there is no disk tier */
    uint64_t disk_hits;
    /* Entries of the cache that were kept; and those that were not, for want of what. */
    uint64_t stored, store_failed_size, store_failed_memory, store_failed_disk;
    uint32_t faults_in_a_row; /* numerical or device faults since the last good step */
};

/* Thread-safe. */
void scheduler_read_stats(struct scheduler *scheduler, struct scheduler_stats *out);

#endif
