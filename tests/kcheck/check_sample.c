/* argmax and top: ids and values are exact. log_sum within u (8 + sqrt(vocab)) + 4 u |log_sum|:
 * the logarithm turns the relative error of the sum into an absolute one. */
#include "kcheck.h"

#include <stdio.h>
#include <stdlib.h>

struct kc_sample {
    uint32_t rows, vocab, count;
    struct kc_buf *logits, *ids, *values, *log_sum;
};

static void kc_argmax_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_sample *c = user;
    struct argmax_args args = {.rows = c->rows,
                               .vocab = c->vocab,
                               .logits = kc_at(c->logits, side),
                               .ids = kc_at(c->ids, side)};
    KC_CALL(kc, side, argmax, &args);
}

static void kc_top_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_sample *c = user;
    struct top_args args = {.rows = c->rows,
                            .vocab = c->vocab,
                            .count = c->count,
                            .logits = kc_at(c->logits, side),
                            .ids = kc_at(c->ids, side),
                            .values = kc_at(c->values, side),
                            .log_sum = kc_at(c->log_sum, side)};
    KC_CALL(kc, side, top, &args);
}

/* Rows of every temper: plain, coarse (many ties), all equal, infinite ends, a NaN. */
static float *kc_sample_logits(struct kc *kc, uint32_t rows, uint32_t vocab, bool plain)
{
    float *l = kc_normal(kc, (size_t)rows * vocab, 4);
    for (uint32_t r = 0; r < rows && !plain; r++) {
        float *row = l + (size_t)r * vocab;
        uint32_t temper = kc_between(kc, 0, 9);
        for (uint32_t i = 0; i < vocab; i++) {
            if (temper == 0)
                row[i] = roundf(row[i] / 4);
            else if (temper == 1)
                row[i] = -2.5f;
            else if (temper == 2)
                row[i] = kc_chance(kc, 0.5) ? -INFINITY : row[i];
            else if (temper == 3)
                row[i] = -INFINITY;
            else if (temper == 4)
                row[i] = row[i] > 0 ? 0.0f : -0.0f;
        }
        if (temper == 5) { /* at an end as often as between */
            uint32_t last = vocab - 1, at[] = {0, last, kc_between(kc, 0, last)};
            row[at[kc_between(kc, 0, 2)]] = NAN;
        }
        if (temper == 6)
            row[kc_between(kc, 0, vocab - 1)] = INFINITY;
        if (temper == 7 || temper == 2) /* the best one at an end */
            row[kc_chance(kc, 0.5) ? 0 : vocab - 1] = 30;
        if (temper == 8) { /* twice the best */
            row[kc_between(kc, 0, vocab - 1)] = 30;
            row[kc_between(kc, 0, vocab - 1)] = 30;
        }
    }
    return l;
}

static void kc_sample_shape(struct kc *kc, struct kc_sample *c)
{
    static const uint32_t edge[] = {1,   2,   3,   31,   32,   33,   63,    64,    65,
                                    255, 256, 257, 1023, 1025, 4097, 16383, 16384, 16385};
    c->rows = kc_between(kc, 1, 12);
    c->vocab = kc_between(kc, 1, 3000);
    if (kc->pool == KC_REAL) {
        c->rows = kc->index ? 4 : 1;
        c->vocab = 248320;
    } else if (kc->pool == KC_EDGE) {
        c->vocab = edge[kc->index];
    }
    c->count = c->vocab < 64 ? c->vocab : kc_chance(kc, 0.5) ? 20 : kc_between(kc, 1, 1024);
    c->count = c->count > c->vocab ? c->vocab : c->count;
    if (kc->pool == KC_REAL)
        c->count = 20;
    float *logits = kc_sample_logits(kc, c->rows, c->vocab, kc->bench);
    snprintf(kc->shape, sizeof kc->shape, "rows %u, vocab %u, count %u", c->rows, c->vocab,
             c->count);
    c->logits = kc_buf(kc, "logits", KC_IN, logits, (uint64_t)c->rows * c->vocab * 4);
    kc->bytes = (double)c->rows * c->vocab * 4;
    kc->flops = (double)c->rows * c->vocab;
    free(logits);
}

void kc_check_argmax(struct kc *kc)
{
    struct kc_sample c = {0};
    kc_sample_shape(kc, &c);
    c.ids = kc_buf(kc, "ids", KC_OUT, NULL, c.rows * 4);
    if (kc_run(kc, kc_argmax_program, &c))
        kc_compare_bytes(kc, c.ids);
}

void kc_check_top(struct kc *kc)
{
    struct kc_sample c = {0};
    kc_sample_shape(kc, &c);
    c.ids = kc_buf(kc, "ids", KC_OUT, NULL, (uint64_t)c.rows * c.count * 4);
    c.values = kc_buf(kc, "values", KC_OUT, NULL, (uint64_t)c.rows * c.count * 4);
    c.log_sum = kc_buf(kc, "log_sum", KC_OUT, NULL, c.rows * 4);
    if (!kc_run(kc, kc_top_program, &c))
        return;
    int got = kc->bench ? 2 : 1;
    for (uint32_t r = 0; r < c.rows; r++) {
        double want = ((const float *)c.log_sum->result[0])[r];
        kc_compare_value(kc, "log_sum", r, want, ((const float *)c.log_sum->result[got])[r],
                         KC_U * (8 + sqrt(c.vocab)) + 4 * KC_U * fabs(want));
        if (isnan(want))
            continue; /* the candidates of such a row mean nothing */
        for (uint32_t i = r * c.count; i < (r + 1) * c.count; i++) {
            kc_compare_value(kc, "ids", i, ((const int32_t *)c.ids->result[0])[i],
                             ((const int32_t *)c.ids->result[got])[i], 0);
            kc_compare_value(kc, "values", i, ((const float *)c.values->result[0])[i],
                             ((const float *)c.values->result[got])[i], 0);
        }
    }
}
