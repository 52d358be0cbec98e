/* Reference: what sampling needs of the logits. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/ref_math.h"

#include <assert.h>

void ref_argmax(struct device *device, const struct argmax_args *args)
{
    (void)device;
    int32_t *ids = cpu_at(args->ids);
    for (uint32_t r = 0; r < args->rows; r++) {
        const float *l = (const float *)cpu_at(args->logits) + (size_t)r * args->vocab;
        bool nan = false, finite = false;
        uint32_t best = 0;
        for (uint32_t i = 0; i < args->vocab; i++) {
            nan |= isnan(l[i]) != 0;
            finite |= isfinite(l[i]) != 0;
            best = l[i] > l[best] ? i : best;
        }
        ids[r] = nan || !finite ? -1 : (int32_t)best;
    }
}

/* log(sum(exp(l))); an infinite maximum is the answer itself, a NaN anywhere gives NaN. */
static double ref_top_log_sum(const float *l, uint32_t vocab)
{
    double top = l[0], total = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (isnan(l[i]))
            return NAN;
        top = fmax(top, l[i]);
    }
    if (isinf(top))
        return top;
    for (uint32_t i = 0; i < vocab; i++)
        total += exp(l[i] - top);
    return top + log(total);
}

/* Keeps the best `count` sorted while walking the row; a later equal logit goes behind. */
static void ref_top_row(const float *l, uint32_t vocab, uint32_t count, int32_t *ids, float *values)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (n == count && !(l[i] > values[n - 1]))
            continue;
        uint32_t at = n < count ? n++ : n - 1;
        for (; at > 0 && l[i] > values[at - 1]; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = l[i];
        ids[at] = (int32_t)i;
    }
}

void ref_top(struct device *device, const struct top_args *args)
{
    (void)device;
    assert(args->count >= 1 && args->count <= 1024 && args->count <= args->vocab);
    float *values = cpu_at(args->values), *log_sum = cpu_at(args->log_sum);
    int32_t *ids = cpu_at(args->ids);
    for (size_t r = 0; r < args->rows; r++) {
        const float *l = (const float *)cpu_at(args->logits) + r * args->vocab;
        ref_top_row(l, args->vocab, args->count, ids + r * args->count, values + r * args->count);
        log_sum[r] = (float)ref_top_log_sum(l, args->vocab);
    }
}
