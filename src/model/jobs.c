#include "model/jobs.h"

#include "base/mem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { JOBS_THREADS_MAX = 64 };

struct jobs_shared {
    const struct jobs *jobs;
    _Atomic uint64_t next, done;
    atomic_bool failed;
    pthread_mutex_t lock; /* of err */
    struct err err;
};

static void jobs_work(struct jobs_shared *s, bool report)
{
    const struct jobs *jobs = s->jobs;
    void *scratch = mem_new(jobs->scratch_bytes, 1);
    uint64_t job;
    while (!s->failed && (job = s->next++) < jobs->count) {
        struct err err;
        if (!jobs->run(jobs->user, job, scratch, &err)) {
            pthread_mutex_lock(&s->lock);
            s->err = err;
            pthread_mutex_unlock(&s->lock);
            s->failed = true;
        }
        uint64_t done = ++s->done;
        if (report && jobs->progress)
            jobs->progress(jobs->progress_user, done, jobs->count);
    }
    free(scratch);
}

static void *jobs_start(void *user)
{
    jobs_work(user, false);
    return NULL;
}

bool jobs_run(const struct jobs *jobs, struct err *err)
{
    struct jobs_shared s = {.jobs = jobs};
    pthread_t threads[JOBS_THREADS_MAX];
    long want = jobs->threads > 0 ? jobs->threads : sysconf(_SC_NPROCESSORS_ONLN);
    int started = 0;
    pthread_mutex_init(&s.lock, NULL);
    /* Fewer threads than asked for only take longer. */
    while (started + 1 < want && started < JOBS_THREADS_MAX &&
           pthread_create(&threads[started], NULL, jobs_start, &s) == 0)
        started++;
    jobs_work(&s, true);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&s.lock);
    if (s.failed)
        return err_set(err, s.err.kind, "%s", s.err.text);
    if (jobs->progress)
        jobs->progress(jobs->progress_user, jobs->count, jobs->count);
    return true;
}
