/* Processor time of the calling thread: limits of work are set in it, because the machine may have
 * other work. */
#ifndef UNIT_SPENT_H
#define UNIT_SPENT_H

#include <time.h>

static inline double spent_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

#endif
