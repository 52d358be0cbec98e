/* One draw from a row of logits.
 *
 * The vocabulary is large (248k), so nothing here sorts it: candidates come out of a heap of the
 * size that is wanted. Invariant: `seen` lists every id that was accepted exactly once. */
#include "engine/sampler.h"

#include "base/mem.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLER_BLOCK = 256 }; /* logits whose maximum is taken at once */

struct sampler {
    struct sampler_options options;
    struct sampler_bias *bias;
    struct rand rand;
    bool penalises;
    uint32_t *answer_counts; /* [vocab], null without penalties */
    bool *is_seen;           /* [vocab] */
    int32_t *seen;           /* [seen_len] */
    size_t seen_len, seen_cap;
    struct sampler_candidate *best; /* [best_cap], scratch; logprob holds a logit, then a weight */
    size_t best_cap;
};

/* ---- options ---- */

static bool sampler_check_range(const char *field, double value, double lo, double hi,
                                struct err *err)
{
    if (value >= lo && value <= hi)
        return true;
    return err_set(err, ERR_USAGE, "%s must be a number from %g to %g, not %g", field, lo, hi,
                   value);
}

bool sampler_check(const struct sampler_options *o, struct err *err)
{
    assert(o->vocab > 0);
    if (!(o->repetition_penalty > 0 && o->repetition_penalty <= 10))
        return err_set(err, ERR_USAGE, "repetition_penalty must be above 0 and at most 10, not %g",
                       (double)o->repetition_penalty);
    for (size_t i = 0; i < o->bias_count; i++) {
        if (o->bias[i].id < 0 || (uint32_t)o->bias[i].id >= o->vocab)
            return err_set(err, ERR_USAGE, "logit_bias: token id %d is not below %u", o->bias[i].id,
                           o->vocab);
        if (!sampler_check_range("logit_bias", o->bias[i].bias, -100, 100, err))
            return false;
    }
    return sampler_check_range("temperature", o->temperature, 0, 100, err) &&
           sampler_check_range("top_p", o->top_p, 0, 1, err) &&
           sampler_check_range("min_p", o->min_p, 0, 1, err) &&
           sampler_check_range("presence_penalty", o->presence_penalty, -2, 2, err) &&
           sampler_check_range("frequency_penalty", o->frequency_penalty, -2, 2, err);
}

bool sampler_open(const struct sampler_options *options, struct sampler **out, struct err *err)
{
    *out = NULL;
    if (!sampler_check(options, err))
        return false;
    struct sampler *s = mem_new(1, sizeof *s);
    s->options = *options;
    s->rand.state = options->seed;
    s->bias = mem_new(options->bias_count, sizeof *s->bias);
    if (options->bias_count)
        memcpy(s->bias, options->bias, options->bias_count * sizeof *s->bias);
    s->options.bias = s->bias;
    s->penalises = options->repetition_penalty != 1 || options->presence_penalty != 0 ||
                   options->frequency_penalty != 0;
    if (s->penalises) {
        s->answer_counts = mem_new(options->vocab, sizeof *s->answer_counts);
        s->is_seen = mem_new(options->vocab, sizeof *s->is_seen);
    }
    *out = s;
    return true;
}

void sampler_close(struct sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->bias);
    free(sampler->answer_counts);
    free(sampler->is_seen);
    free(sampler->seen);
    free(sampler->best);
    free(sampler);
}

void sampler_accept(struct sampler *s, int32_t id, bool is_prompt)
{
    if (!s->penalises || id < 0 || (uint32_t)id >= s->options.vocab)
        return;
    if (!s->is_seen[id]) {
        if (s->seen_len == s->seen_cap) {
            s->seen_cap = s->seen_cap ? s->seen_cap * 2 : 256;
            s->seen = mem_grow(s->seen, s->seen_cap, sizeof *s->seen);
        }
        s->seen[s->seen_len++] = id;
        s->is_seen[id] = true;
    }
    s->answer_counts[id] += !is_prompt;
}

bool sampler_is_argmax(const struct sampler *s)
{
    return (s->options.temperature == 0 || s->options.top_k == 1) && !s->penalises &&
           !s->options.bias_count;
}

/* ---- selection ---- */

/* Whether a ranks below b: a lower logit, or the same and a higher id. */
static bool sampler_below(const struct sampler_candidate *a, const struct sampler_candidate *b)
{
    return a->logprob != b->logprob ? a->logprob < b->logprob : a->id > b->id;
}

/* Moves heap[i] down until the lowest of heap[0..n) is on top again. */
static void sampler_sift(struct sampler_candidate *heap, size_t n, size_t i)
{
    struct sampler_candidate moved = heap[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < n && sampler_below(&heap[child + 1], &heap[child]))
            child++;
        if (child >= n || !sampler_below(&heap[child], &moved))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moved;
}

/* The highest of x f32 [n], without NaN; n >= 1. Eight chains let the compiler use vectors: most
 * of a row is passed over by comparing maxima of blocks. */
static float sampler_max(const float *x, size_t n)
{
    enum { LANES = 8 };
    float lane[LANES];
    size_t i = 0;
    for (int j = 0; j < LANES; j++)
        lane[j] = x[0];
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] = x[i + (size_t)j] > lane[j] ? x[i + (size_t)j] : lane[j];
    for (; i < n; i++)
        lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (int j = 1; j < LANES; j++)
        lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
    return lane[0];
}

/* The k highest of logits f32 [n] into out, highest first; k <= n. Ids come in ascending order, so
 * one that equals the heap's lowest ranks below it and is passed over. */
static void sampler_select(const float *logits, size_t n, size_t k, struct sampler_candidate *out)
{
    assert(k && k <= n);
    for (size_t i = 0; i < k; i++)
        out[i] = (struct sampler_candidate){(int32_t)i, logits[i]};
    for (size_t i = k / 2; i-- > 0;)
        sampler_sift(out, k, i);
    for (size_t block = k, end; block < n; block = end) {
        end = n - block > SAMPLER_BLOCK ? block + SAMPLER_BLOCK : n;
        if (sampler_max(logits + block, end - block) <= out[0].logprob)
            continue;
        for (size_t i = block; i < end; i++) {
            if (logits[i] > out[0].logprob) {
                out[0] = (struct sampler_candidate){(int32_t)i, logits[i]};
                sampler_sift(out, k, 0);
            }
        }
    }
    for (size_t end = k; end-- > 1;) {
        struct sampler_candidate lowest = out[0];
        out[0] = out[end];
        out[end] = lowest;
        sampler_sift(out, end, 0);
    }
}

/* log(sum(exp(logits))), by way of the highest. */
static double sampler_log_sum(const float *logits, size_t n)
{
    float highest = sampler_max(logits, n);
    if (isinf(highest))
        return (double)highest;
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)expf(logits[i] - highest);
    return (double)highest + log(sum);
}

float sampler_logprob(const float *logits, size_t n, int32_t id)
{
    assert(id >= 0 && (size_t)id < n);
    if (logits[id] == -INFINITY)
        return -INFINITY;
    return (float)((double)logits[id] - sampler_log_sum(logits, n));
}

size_t sampler_top(const float *logits, size_t n, size_t count, struct sampler_candidate *out)
{
    size_t k = count < n ? count : n;
    if (!k)
        return 0;
    sampler_select(logits, n, k, out);
    double log_sum = sampler_log_sum(logits, n);
    for (size_t i = 0; i < k; i++)
        if (out[i].logprob != -INFINITY)
            out[i].logprob = (float)((double)out[i].logprob - log_sum);
    return k;
}

/* ---- the draw ---- */

static void sampler_adjust(const struct sampler *s, float *logits, size_t n)
{
    const struct sampler_options *o = &s->options;
    for (size_t i = 0; i < o->bias_count; i++)
        if ((size_t)o->bias[i].id < n)
            logits[o->bias[i].id] += o->bias[i].bias;
    for (size_t i = 0; i < s->seen_len; i++) {
        size_t id = (size_t)s->seen[i];
        if (id >= n)
            continue;
        float *x = &logits[id];
        *x = *x > 0 ? *x / o->repetition_penalty : *x * o->repetition_penalty;
        uint32_t count = s->answer_counts[id];
        if (count)
            *x -= o->presence_penalty + o->frequency_penalty * (float)count;
    }
}

/* Index of the highest logit, the lowest of equals. */
static bool sampler_find_highest(const float *logits, size_t n, size_t *at, struct err *err)
{
    float highest = sampler_max(logits, n);
    uint32_t nan = 0;
    for (size_t i = 0; i < n; i++)
        nan |= logits[i] != logits[i];
    if (nan)
        return err_set(err, ERR_INTERNAL,
                       "the logits of a token hold NaN; the forward pass failed");
    if (isinf(highest))
        return err_set(err, ERR_INTERNAL, "%s; the forward pass failed",
                       highest > 0 ? "a logit is infinite" : "no logit of a token is finite");
    size_t best = 0;
    while (logits[best] != highest)
        best++;
    *at = best;
    return true;
}

static struct sampler_candidate *sampler_scratch(struct sampler *s, size_t k)
{
    if (k > s->best_cap) {
        s->best = mem_grow(s->best, k, sizeof *s->best);
        s->best_cap = k;
    }
    return s->best;
}

/* exp of the distance to the highest logit over the temperature: 1 for the highest. */
static double sampler_weight(float logit, float highest, float temperature)
{
    return (double)expf((logit - highest) / temperature);
}

/* Draws in the order of ids from all that min-p leaves: no ranking is needed. */
static int32_t sampler_draw_all(struct sampler *s, float *logits, size_t n, float highest)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double w = sampler_weight(logits[i], highest, s->options.temperature);
        logits[i] = w >= (double)s->options.min_p ? (float)w : 0;
        sum += (double)logits[i];
    }
    double left = rand_unit(&s->rand) * sum;
    int32_t chosen = -1;
    for (size_t i = 0; i < n && left >= 0; i++) {
        if (logits[i] > 0)
            chosen = (int32_t)i;
        left -= (double)logits[i];
    }
    return chosen;
}

/* Draws from best[0..k), ranked, of which the first have to reach mass * top_p. */
static int32_t sampler_draw_ranked(struct sampler *s, size_t k, double mass)
{
    const struct sampler_options *o = &s->options;
    size_t kept = 0;
    double sum = 0;
    while (kept < k && (!kept || ((o->top_p >= 1 || sum < mass * (double)o->top_p) &&
                                  s->best[kept].logprob >= o->min_p)))
        sum += (double)s->best[kept++].logprob;
    double left = rand_unit(&s->rand) * sum;
    int32_t chosen = s->best[0].id;
    for (size_t i = 0; i < kept && left >= 0; i++) {
        if (s->best[i].logprob > 0)
            chosen = s->best[i].id;
        left -= (double)s->best[i].logprob;
    }
    return chosen;
}

/* Ranks the k highest into best, as weights; returns the sum. */
static double sampler_rank(struct sampler *s, const float *logits, size_t n, size_t k)
{
    struct sampler_candidate *best = sampler_scratch(s, k);
    sampler_select(logits, n, k, best);
    float highest = best[0].logprob;
    double sum = 0;
    for (size_t i = 0; i < k; i++) {
        best[i].logprob = (float)sampler_weight(best[i].logprob, highest, s->options.temperature);
        sum += (double)best[i].logprob;
    }
    return sum;
}

bool sampler_pick(struct sampler *s, float *logits, size_t n, int32_t *id, struct err *err)
{
    const struct sampler_options *o = &s->options;
    size_t at = 0;
    if (n > o->vocab)
        n = o->vocab;
    assert(n > 0);
    sampler_adjust(s, logits, n);
    if (!sampler_find_highest(logits, n, &at, err))
        return false;
    if (o->temperature == 0 || o->top_k == 1) {
        *id = (int32_t)at;
    } else if (o->top_k && o->top_k < n) {
        double mass = sampler_rank(s, logits, n, o->top_k);
        *id = sampler_draw_ranked(s, o->top_k, mass);
    } else if (o->top_p < 1) {
        double mass = 0, have = 0;
        for (size_t i = 0; i < n; i++)
            mass += (double)(float)sampler_weight(logits[i], logits[at], o->temperature);
        /* A few candidates nearly always hold the share; more are ranked only when they do not. */
        size_t k = n < 64 ? n : 64;
        while ((have = sampler_rank(s, logits, n, k)) < mass * (double)o->top_p && k < n)
            k = k < n / 8 ? k * 8 : n;
        *id = sampler_draw_ranked(s, k, mass);
    } else {
        *id = sampler_draw_all(s, logits, n, logits[at]);
    }
    return true;
}
