/* A pool of threads that run one job at a time.
 *
 * A job is a function and a count of tasks; whoever is free takes the next task, the calling thread
 * too. Results must not depend on which worker runs a task. Workers wait for a job by spinning for
 * a short while and then sleep, so an idle process uses no processor time. */
#ifndef BASE_POOL_H
#define BASE_POOL_H

#include "base/err.h"

#include <stdint.h>

struct pool;

/* task in 0..tasks-1; worker in 0..threads-1 names the thread, for scratch of its own. */
typedef void pool_fn(void *arg, uint32_t task, int worker);

/* `threads` counts the caller of pool_run: 1 starts none. 0 means one a processor that this process
 * may use. */
bool pool_open(int threads, struct pool **out, struct err *err);
void pool_close(struct pool *pool);

int pool_threads(const struct pool *pool);

/* Runs all tasks and returns when they are done. One thread at a time may call it, and no task may.
 * On Linux the workers and the calling thread are each pinned to one processor (unless there are
 * more of them than processors), so call it from a thread whose children need not run elsewhere. */
void pool_run(struct pool *pool, pool_fn *fn, void *arg, uint32_t tasks);

#endif
