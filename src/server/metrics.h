/* Counters of the server, in Prometheus' text form. */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include "base/buf.h"
#include "engine/scheduler.h"

#include <stdatomic.h>

enum { METRICS_BUCKETS = 16 };

struct metrics_histogram {
    atomic_uint_fast64_t counts[METRICS_BUCKETS + 1];
    atomic_uint_fast64_t sum_us;
};

struct metrics {
    atomic_uint_fast64_t replies[6]; /* by hundreds of the status */
    atomic_uint_fast64_t gone;       /* clients that left before their answer was complete */
    struct metrics_histogram first_token, per_token, duration;
};

void metrics_count_reply(struct metrics *metrics, int status);
void metrics_observe(struct metrics_histogram *histogram, double seconds);

void metrics_write(struct metrics *metrics, const struct scheduler_stats *stats, struct buf *out);

#endif
