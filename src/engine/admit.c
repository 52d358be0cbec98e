/* Who leaves and who comes before a step: the cancelled end, and the head of the queue gets a slot
 * while there are any. */
#include "engine/step.h"

/* Takes one cancelled request out of the queue, or null. */
static struct sequence *admit_pop_cancelled(struct scheduler *s)
{
    struct sequence *found = NULL;
    pthread_mutex_lock(&s->lock);
    for (struct sequence **link = &s->queue; *link && !found; link = &(*link)->next)
        if (atomic_load(&(*link)->cancelled)) {
            found = *link;
            *link = found->next;
            if (!found->next)
                s->queue_end = link;
            s->stats.queued--;
            break;
        }
    pthread_mutex_unlock(&s->lock);
    return found;
}

/* Moves the head of the queue to a free slot; false when there is none of either. */
static bool admit_one(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    struct sequence *sequence = s->queue;
    uint32_t i = 0;
    while (i < s->engine->parallel && s->running[i])
        i++;
    bool admits = sequence && i < s->engine->parallel &&
                  state_acquire(&s->engine->state, &sequence->slot, NULL);
    if (admits) {
        s->queue = sequence->next;
        if (!s->queue)
            s->queue_end = &s->queue;
        sequence->next = NULL;
        s->stats.queued--;
        s->stats.running++;
        s->running[i] = sequence;
        sequence->phase = SEQUENCE_PREFILL;
    }
    pthread_mutex_unlock(&s->lock);
    return admits;
}

void admit_requests(struct scheduler *s)
{
    struct sequence *cancelled;
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] && atomic_load(&s->running[i]->cancelled)) {
            step_cancel(s, s->running[i]);
        }
    while ((cancelled = admit_pop_cancelled(s))) {
        step_cancel(s, cancelled);
    }
    while (admit_one(s))
        ;
}
