/* Turns logits into log-probabilities and sums them up. One log-sum a position, in double; one that
 * is not finite ends the call, so that a NaN cannot hide in a maximum. */
#include "engine/score.h"

#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* log(sum(exp(logits))), in double; NaN when a logit is NaN or all are -inf. */
static double score_log_sum(const float *logits, size_t n)
{
    double most = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++)
        if (logits[i] > most)
            most = logits[i];
    for (size_t i = 0; i < n; i++)
        sum += exp(logits[i] - most);
    return most + log(sum);
}

static bool score_check_log_sum(double log_sum, size_t i, struct err *err)
{
    return isfinite(log_sum) ||
           err_set(err, ERR_INTERNAL, "the logits after position %zu are not finite", i);
}

/* ---- a text ------------------------------------------------------------------------------- */

struct score_window {
    const int32_t *ids; /* [n] */
    size_t n, vocab;
    struct score_text *out;
    bool failed;
    struct err *err;
};

static bool score_text_row(void *user, size_t i, const float *logits)
{
    struct score_window *w = user;
    if (i + 1 == w->n)
        return true;
    double log_sum = score_log_sum(logits, w->vocab);
    if (!score_check_log_sum(log_sum, i, w->err)) {
        w->failed = true;
        return false;
    }
    w->out->nll += log_sum - logits[w->ids[i + 1]];
    w->out->predicted++;
    return true;
}

bool score_text(struct engine *engine, const int32_t *ids, size_t n, uint32_t chunk,
                struct score_text *out, struct err *err)
{
    uint32_t vocab = engine_model(engine)->config.vocab;
    memset(out, 0, sizeof *out);
    out->tokens = n;
    if (n < 2)
        return err_set(err, ERR_INPUT, "a text of %zu tokens has none to predict", n);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return err_set(err, ERR_INPUT, "token %zu is %d, outside the vocabulary of %u", i,
                           ids[i], vocab);
    size_t ctx = engine_ctx(engine);
    for (size_t done = 0; done < n; done += ctx) {
        struct score_window w = {.ids = ids + done,
                                 .n = n - done < ctx ? n - done : ctx,
                                 .vocab = vocab,
                                 .out = out,
                                 .err = err};
        if (!engine_score(engine, w.ids, w.n, chunk, score_text_row, &w, err) || w.failed)
            return false;
    }
    return true;
}

/* ---- a reference -------------------------------------------------------------------------- */

struct score_record {
    int32_t *ids; /* [n] */
    size_t n, vocab;
    const json_t *next; /* [n - 1] numbers */
    const json_t *top;  /* [n] lists, or null */
    struct score_set *out;
    bool failed;
    struct err *err;
};

static void score_compare(struct score_set *out, double got, double want)
{
    double difference = fabs(got - want);
    out->values++;
    out->sum_difference += difference;
    if (difference > out->max_difference)
        out->max_difference = difference;
}

static bool score_compare_top(struct score_record *r, const json_t *list, const float *logits,
                              double log_sum)
{
    size_t k;
    const json_t *pair;
    json_array_foreach(list, k, pair)
    {
        const json_t *id = json_array_get(pair, 0), *want = json_array_get(pair, 1);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            (size_t)json_integer_value(id) >= r->vocab || !json_is_number(want))
            return err_set(r->err, ERR_INPUT, "an entry of top is not [id, log-probability]");
        score_compare(r->out, logits[json_integer_value(id)] - log_sum, json_number_value(want));
    }
    if (json_array_size(list) == 0)
        return true;
    size_t best = 0;
    for (size_t i = 1; i < r->vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    r->out->first_choices++;
    r->out->first_equal +=
        json_integer_value(json_array_get(json_array_get(list, 0), 0)) == (json_int_t)best;
    return true;
}

static bool score_set_row(void *user, size_t i, const float *logits)
{
    struct score_record *r = user;
    double log_sum = score_log_sum(logits, r->vocab);
    r->failed = !score_check_log_sum(log_sum, i, r->err) ||
                !score_compare_top(r, json_array_get(r->top, i), logits, log_sum);
    if (r->failed || i + 1 == r->n)
        return !r->failed;
    double got = logits[r->ids[i + 1]] - log_sum;
    double want = json_number_value(json_array_get(r->next, i));
    score_compare(r->out, got, want);
    r->out->predicted++;
    r->out->nll -= got;
    r->out->reference_nll -= want;
    return true;
}

static bool score_read_record(struct score_record *r, const json_t *record, struct err *err)
{
    const json_t *ids = json_object_get(record, "ids");
    r->next = json_object_get(record, "next_logprob");
    r->top = json_object_get(record, "top");
    r->n = json_array_size(ids);
    if (r->n == 0)
        return err_set(err, ERR_INPUT, "ids is missing or empty");
    if (!json_is_array(r->next) || json_array_size(r->next) != r->n - 1)
        return err_set(err, ERR_INPUT, "next_logprob must hold %zu numbers", r->n - 1);
    if (r->top && json_array_size(r->top) != r->n)
        return err_set(err, ERR_INPUT, "top must hold %zu lists", r->n);
    r->ids = mem_new(r->n, sizeof *r->ids);
    for (size_t i = 0; i < r->n; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            (size_t)json_integer_value(id) >= r->vocab)
            return err_set(err, ERR_INPUT, "ids[%zu] is not an id below %zu", i, r->vocab);
        if (i + 1 < r->n && !json_is_number(json_array_get(r->next, i)))
            return err_set(err, ERR_INPUT, "next_logprob[%zu] is not a number", i);
        r->ids[i] = (int32_t)json_integer_value(id);
    }
    return true;
}

bool score_set(struct engine *engine, const json_t *records, uint32_t chunk, struct score_set *out,
               struct err *err)
{
    size_t i;
    const json_t *record;
    memset(out, 0, sizeof *out);
    json_array_foreach(records, i, record)
    {
        struct score_record r = {
            .vocab = engine_model(engine)->config.vocab, .out = out, .err = err};
        bool ok = score_read_record(&r, record, err) &&
                  engine_score(engine, r.ids, r.n, chunk, score_set_row, &r, err) && !r.failed;
        out->sequences++;
        out->positions += r.n;
        free(r.ids);
        if (!ok)
            return err_wrap(err, "record %zu", i);
    }
    return true;
}
