/* Keeps the device's memory resident for a while after the last command.
 *
 * The system may take pages from a GPU that has been idle for a second; the next request then
 * waits until gigabytes of weights are mapped again. So a thread renews the claim every half
 * second until `keep_ms` have passed since the last use, and then lets go, once. */
#include "backend/metal/internal.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdlib.h>

enum { METAL_IDLE_PERIOD_MS = 500 };

struct metal_idle {
    pthread_t thread;
    pthread_mutex_t lock; /* of everything below, and held while the calls are made */
    pthread_cond_t changed;
    void (*hold)(struct device *);
    void (*let_go)(struct device *);
    struct device *device;
    uint64_t last_ns, keep_ns;
    bool is_held, ends;
};

/* Waits for a change or for the next period; the lock is held. */
static void metal_idle_wait(struct metal_idle *idle)
{
    struct timespec until;
    if (!idle->is_held) {
        pthread_cond_wait(&idle->changed, &idle->lock);
        return;
    }
    uint64_t period = METAL_IDLE_PERIOD_MS * 1000000ull;
    period = period < idle->keep_ns ? period : idle->keep_ns;
    clock_gettime(CLOCK_REALTIME, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + period;
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    pthread_cond_timedwait(&idle->changed, &idle->lock, &until);
}

static void *metal_idle_run(void *arg)
{
    struct metal_idle *idle = (struct metal_idle *)arg;
    pthread_mutex_lock(&idle->lock);
    while (!idle->ends) {
        metal_idle_wait(idle);
        if (idle->ends || !idle->is_held)
            continue;
        if (clock_now_ns() - idle->last_ns < idle->keep_ns) {
            idle->hold(idle->device);
        } else {
            idle->let_go(idle->device);
            idle->is_held = false;
        }
    }
    pthread_mutex_unlock(&idle->lock);
    return NULL;
}

bool metal_idle_open(struct device *device, void (*hold)(struct device *),
                     void (*let_go)(struct device *), uint32_t keep_ms, struct metal_idle **out,
                     struct err *err)
{
    struct metal_idle *idle = (struct metal_idle *)calloc(1, sizeof *idle);
    if (!idle)
        return err_set(err, ERR_RESOURCE, "out of memory: the record of residency");
    idle->device = device;
    idle->hold = hold;
    idle->let_go = let_go;
    idle->keep_ns = keep_ms * 1000000ull;
    pthread_mutex_init(&idle->lock, NULL);
    pthread_cond_init(&idle->changed, NULL);
    if (pthread_create(&idle->thread, NULL, metal_idle_run, idle)) {
        free(idle);
        return err_set(err, ERR_RESOURCE, "the system has no thread for the GPU's memory");
    }
    *out = idle;
    return true;
}

void metal_idle_use(struct metal_idle *idle, void (*change)(struct device *))
{
    pthread_mutex_lock(&idle->lock);
    idle->last_ns = clock_now_ns();
    if (change)
        change(idle->device);
    if (!idle->is_held) {
        idle->hold(idle->device);
        idle->is_held = true;
        pthread_cond_signal(&idle->changed);
    }
    pthread_mutex_unlock(&idle->lock);
}

void metal_idle_close(struct metal_idle *idle)
{
    if (!idle)
        return;
    pthread_mutex_lock(&idle->lock);
    idle->ends = true;
    pthread_cond_signal(&idle->changed);
    pthread_mutex_unlock(&idle->lock);
    pthread_join(idle->thread, NULL);
    if (idle->is_held)
        idle->let_go(idle->device);
    pthread_cond_destroy(&idle->changed);
    pthread_mutex_destroy(&idle->lock);
    free(idle);
}
