/* Owns nothing but counters, which only ever grow and are read without a lock: a scrape may see one
 * counter a request ahead of another. */
#include "server/metrics.h"

#include "base/mem.h"

#include <inttypes.h>

static void metrics_write_failed(const struct scheduler_stats *s, struct buf *out)
{
    const struct {
        const char *reason;
        uint64_t value;
    } failed[] = {{"size", s->store_failed_size},
                  {"memory", s->store_failed_memory},
                  {"disk", s->store_failed_disk}};
    buf_append_text(out, "# HELP calla_cache_store_failed_total Entries that could not be kept.\n"
                         "# TYPE calla_cache_store_failed_total counter\n");
    for (size_t i = 0; i < sizeof failed / sizeof *failed; i++)
        buf_printf(out, "calla_cache_store_failed_total{reason=\"%s\"} %" PRIu64 "\n",
                   failed[i].reason, failed[i].value);
}

/* Upper bounds in seconds, doubling from half a millisecond. */
static double metrics_bound(int bucket)
{
    return 0.0005 * (double)(1 << bucket);
}

void metrics_count_reply(struct metrics *metrics, int status)
{
    int hundred = status / 100;
    atomic_fetch_add(&metrics->replies[hundred >= 1 && hundred <= 5 ? hundred : 0], 1);
}

void metrics_observe(struct metrics_histogram *histogram, double seconds)
{
    int bucket = 0;
    while (bucket < METRICS_BUCKETS && seconds > metrics_bound(bucket))
        bucket++;
    atomic_fetch_add(&histogram->counts[bucket], 1);
    atomic_fetch_add(&histogram->sum_us, (uint_fast64_t)(seconds > 0 ? seconds * 1e6 : 0));
}

static void metrics_write_histogram(struct metrics_histogram *h, const char *name, const char *help,
                                    struct buf *out)
{
    uint64_t total = 0;
    buf_printf(out, "# HELP calla_%s %s\n# TYPE calla_%s histogram\n", name, help, name);
    for (int i = 0; i < METRICS_BUCKETS; i++) {
        total += atomic_load(&h->counts[i]);
        buf_printf(out, "calla_%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, metrics_bound(i), total);
    }
    total += atomic_load(&h->counts[METRICS_BUCKETS]);
    buf_printf(out, "calla_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, total);
    buf_printf(out, "calla_%s_sum %.6f\ncalla_%s_count %" PRIu64 "\n", name,
               (double)atomic_load(&h->sum_us) * 1e-6, name, total);
}

static void metrics_write_value(struct buf *out, const char *type, const char *name,
                                const char *help, uint64_t value)
{
    buf_printf(out, "# HELP calla_%s %s\n# TYPE calla_%s %s\ncalla_%s %" PRIu64 "\n", name, help,
               name, type, name, value);
}

void metrics_write(struct metrics *metrics, const struct scheduler_stats *s, struct buf *out)
{
    const struct {
        const char *type, *name, *help;
        uint64_t value;
    } values[] = {
        {"counter", "requests_total", "Sequences that were accepted.", s->requests},
        {"counter", "requests_failed_total", "Sequences that ended with an error.", s->failed},
        {"counter", "requests_cancelled_total", "Sequences that were cancelled.", s->cancelled},
        {"counter", "requests_refused_total", "Sequences that found the queue full.", s->refused},
        {"counter", "prompt_tokens_total", "Prompt tokens.", s->prompt_tokens},
        {"counter", "cached_tokens_total", "Prompt tokens that were not read again.",
         s->cached_tokens},
        {"counter", "generated_tokens_total", "Tokens generated.", s->generated_tokens},
        {"counter", "steps_total", "Forward passes.", s->steps},
        {"gauge", "running", "Sequences being computed.", s->running},
        {"gauge", "queued", "Sequences that wait.", s->queued},
        {"gauge", "cache_bytes", "Memory of the prefix cache.", s->cache_bytes},
        {"gauge", "cache_entries", "Snapshots in the prefix cache.", s->cache_entries},
        {"counter", "cache_hits_total", "Prompts that found a prefix.", s->cache_hits},
        {"counter", "cache_misses_total", "Prompts that found none.", s->cache_misses},
        {"counter", "cache_evictions_total", "Entries that gave way.", s->cache_evictions},
        {"gauge", "cache_disk_bytes", "Bytes of the disk tier.", s->disk_bytes},
        {"gauge", "cache_disk_entries", "Entries of the disk tier.", s->disk_entries},
        {"counter", "cache_disk_hits_total", "Prompts that found a prefix on disk.", s->disk_hits},
        {"counter", "cache_stored_total", "Entries that were kept.", s->stored},
        {"gauge", "faults_in_a_row", "Device and numerical faults since the last good step.",
         s->faults_in_a_row},
        {"gauge", "resident_bytes", "Memory of the process.", mem_resident_bytes()},
        {"counter", "clients_gone_total", "Clients that left before the end of their answer.",
         atomic_load(&metrics->gone)},
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        metrics_write_value(out, values[i].type, values[i].name, values[i].help, values[i].value);
    buf_printf(out,
               "# HELP calla_compute_seconds_total Time in forward passes.\n"
               "# TYPE calla_compute_seconds_total counter\ncalla_compute_seconds_total %.6f\n",
               s->compute_s);
    metrics_write_failed(s, out);
    buf_append_text(out, "# HELP calla_replies_total HTTP replies by status.\n"
                         "# TYPE calla_replies_total counter\n");
    for (int i = 1; i <= 5; i++)
        buf_printf(out, "calla_replies_total{status=\"%dxx\"} %" PRIuFAST64 "\n", i,
                   atomic_load(&metrics->replies[i]));
    metrics_write_histogram(&metrics->first_token, "first_token_seconds",
                            "From the request to its first token.", out);
    metrics_write_histogram(&metrics->per_token, "token_seconds",
                            "Mean time of a token after the first, a request.", out);
    metrics_write_histogram(&metrics->duration, "request_seconds",
                            "From a request to the end of its reply.", out);
}
