/* Many independent jobs over a few threads, for the tools that write checkpoints.
 *
 * Invariant: no job starts after one has failed, and all have ended when jobs_run returns. */
#ifndef MODEL_JOBS_H
#define MODEL_JOBS_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

struct jobs {
    uint64_t count;
    int threads;          /* 0: one a core */
    size_t scratch_bytes; /* each thread has so much, zeroed once */
    bool (*run)(void *user, uint64_t job, void *scratch, struct err *err);
    void *user;
    /* Called by the calling thread between its jobs and at the end, or null. */
    void (*progress)(void *user, uint64_t done, uint64_t total);
    void *progress_user;
};

/* Runs jobs 0 .. count-1, each once, in no certain order; fails with a failed job's error. */
bool jobs_run(const struct jobs *jobs, struct err *err);

#endif
