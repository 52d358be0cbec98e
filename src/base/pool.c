/* Owns the worker threads and the one job that they work on.
 *
 * A job's tasks are cut into one run for each thread, so that each reads memory of its own in
 * order: two threads that take neighbouring tasks in turn get a fifth less from a machine's memory.
 * Whoever has ended its run helps with the others'.
 * A run is published by one 64-bit store of (end, first) to its ticket, and a task is taken by
 * adding 1 to it, which returns end and index of the same moment. That keeps late workers harmless:
 * a ticket whose index is below its end belongs to the job that is running, because the caller
 * replaces fn and arg only when every task of the old job has been counted in `done`.
 * Who waits reads `job` alone, which changes once a job: a processor that polls what others write
 * for each task slows them, the more of them the more. For the same reason tasks are counted in
 * `done` a run at a time. */
#include "base/pool.h"

#include "base/clock.h"
#include "base/mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    /* Longer than what one thread does alone between two jobs of a forward pass, and than a job of
     * fewer tasks than threads: waking up costs as much as many jobs. Far shorter than a person's
     * idea of idle. */
    POOL_SPIN_NS = 1000000,
    POOL_SPINS_A_CHECK = 64, /* pauses between two looks at the clock */
    POOL_THREADS_MAX = 1024,
};

struct pool_worker {
    _Alignas(64) _Atomic uint64_t ticket; /* of its run: end << 32 | next */
    struct pool *pool;
    pthread_t thread;
    int index;
};

struct pool {
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t job; /* how many were published */
    _Alignas(64) pool_fn *fn;
    void *arg;
    _Atomic int sleepers;
    atomic_bool closing;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int threads, started;        /* started: workers, the caller not counted */
    struct pool_worker *workers; /* [threads]: the first stands for the caller */
    pthread_t caller; /* the thread that ran the last job, pinned; valid when has_caller */
    bool has_caller;
};

static inline void pool_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool pool_ticket_is_open(uint64_t t)
{
    return (uint32_t)t < t >> 32;
}

static void pool_work(struct pool *pool, int worker)
{
    for (int i = 0; i < pool->threads; i++) {
        _Atomic uint64_t *ticket = &pool->workers[(worker + i) % pool->threads].ticket;
        uint32_t finished = 0;
        while (pool_ticket_is_open(atomic_load(ticket))) {
            uint64_t t = atomic_fetch_add(ticket, 1);
            if (!pool_ticket_is_open(t))
                break;
            pool->fn(pool->arg, (uint32_t)t, worker);
            finished++;
        }
        if (finished)
            atomic_fetch_add_explicit(&pool->done, finished, memory_order_release);
    }
}

/* A worker that has seen `job` jobs published has nothing to do. */
static bool pool_is_idle(struct pool *pool, uint32_t job)
{
    return atomic_load(&pool->job) == job && !atomic_load(&pool->closing);
}

static bool pool_spin(struct pool *pool, uint32_t job)
{
    uint64_t start = clock_now_ns();
    do {
        for (int i = 0; i < POOL_SPINS_A_CHECK; i++) {
            if (!pool_is_idle(pool, job))
                return true;
            pool_pause();
        }
    } while (clock_now_ns() - start < POOL_SPIN_NS);
    return false;
}

static void pool_sleep(struct pool *pool, uint32_t job)
{
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (pool_is_idle(pool, job))
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void pool_wake(struct pool *pool)
{
    if (!atomic_load(&pool->sleepers))
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

static void *pool_main(void *arg)
{
    struct pool_worker *worker = arg;
    struct pool *pool = worker->pool;
    for (uint32_t job = 0; !atomic_load(&pool->closing);) {
        if (!pool_spin(pool, job))
            pool_sleep(pool, job);
        job = atomic_load(&pool->job); /* before the work: of a later one there is more to do */
        pool_work(pool, worker->index);
    }
    return NULL;
}

#ifdef __linux__
/* The processors that the process was started with. Kept, because a thread that this file has
 * pinned would report only its own. */
static cpu_set_t pool_set;
static pthread_once_t pool_set_once = PTHREAD_ONCE_INIT;

static void pool_read_set(void)
{
    if (sched_getaffinity(0, sizeof pool_set, &pool_set) != 0)
        CPU_ZERO(&pool_set);
}

static int pool_processors(void)
{
    pthread_once(&pool_set_once, pool_read_set);
    int n = CPU_COUNT(&pool_set);
    return n > 0 ? n : 1;
}

/* Puts a thread on the i-th processor of the process; nowhere when there are more threads. */
static void pool_pin(pthread_t thread, int i, int threads)
{
    cpu_set_t one;
    if (threads > pool_processors())
        return;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &pool_set) && i-- == 0) {
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(thread, sizeof one, &one);
            return;
        }
}
#else
static int pool_processors(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static void pool_pin(pthread_t thread, int i, int threads)
{
    (void)thread;
    (void)i;
    (void)threads;
}
#endif

bool pool_open(int threads, struct pool **out, struct err *err)
{
    if (threads < 0 || threads > POOL_THREADS_MAX)
        return err_set(err, ERR_USAGE, "%d threads asked for; choose 0 (one a processor) to %d",
                       threads, POOL_THREADS_MAX);
    if (threads == 0)
        threads = pool_processors();
    if (threads > POOL_THREADS_MAX)
        threads = POOL_THREADS_MAX;
    struct pool *pool = mem_try(1, sizeof *pool);
    struct pool_worker *workers = mem_try((size_t)threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return err_set(err, ERR_RESOURCE, "no memory for a thread pool; free some and try again");
    }
    pool->threads = threads;
    pool->workers = workers;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int i = 1; i < threads; i++) {
        struct pool_worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->index = i;
        int rc = pthread_create(&worker->thread, NULL, pool_main, worker);
        if (rc) {
            err_set(err, ERR_RESOURCE, "thread %d of %d did not start (%s); ask for fewer threads",
                    i + 1, threads, strerror(rc));
            pool_close(pool);
            return false;
        }
        pool->started = i;
        pool_pin(worker->thread, i, threads);
    }
    *out = pool;
    return true;
}

void pool_close(struct pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->closing, true);
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i <= pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}

/* The caller works too, so it gets the processor that the workers leave: beside a spinning worker
 * the scheduler may let both share one for long. */
static void pool_adopt(struct pool *pool)
{
    pthread_t self = pthread_self();
    if (pool->has_caller && pthread_equal(pool->caller, self))
        return;
    pool->caller = self;
    pool->has_caller = true;
    pool_pin(self, 0, pool->threads);
}

void pool_run(struct pool *pool, pool_fn *fn, void *arg, uint32_t tasks)
{
    if (pool->threads == 1 || tasks <= 1) {
        for (uint32_t i = 0; i < tasks; i++)
            fn(arg, i, 0);
        return;
    }
    pool_adopt(pool);
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    for (uint64_t i = 0, n = (uint64_t)pool->threads; i < n; i++)
        atomic_store_explicit(&pool->workers[i].ticket, (i + 1) * tasks / n << 32 | i * tasks / n,
                              memory_order_release);
    atomic_fetch_add(&pool->job, 1);
    pool_wake(pool);
    pool_work(pool, 0);
    /* What is left is at most one task a worker: worth spinning for, unless the machine is busy and
     * the worker is off its processor. */
    for (unsigned spins = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < tasks;) {
        if (++spins % 4096 == 0)
            sched_yield();
        pool_pause();
    }
}
