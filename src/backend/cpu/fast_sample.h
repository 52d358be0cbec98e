/* What sampling needs of the logits, for the fast levels: rows are cut into pieces that workers
 * scan; a row with anything but finite values goes the reference's careful way. */
#include "backend/cpu/fast.h"
#include "base/pool.h"

#include <assert.h>
#include <math.h>

enum { SAMPLE_PIECE = 16384 };

struct sample_work {
    const float *logits; /* f32 [rows, vocab] */
    uint32_t vocab, pieces, count;
    float *top;    /* f32 [rows, pieces]: largest; NaN when the piece has a NaN or an infinity */
    double *total; /* f64 [rows, pieces]: sum of exp(logit - top of the row) */
    int32_t *ids;  /* out */
    float *values, *log_sum;
};

static const float *sample_piece(const struct sample_work *work, uint32_t task, uint32_t *n)
{
    uint32_t r = task / work->pieces, first = task % work->pieces * SAMPLE_PIECE;
    *n = work->vocab - first < SAMPLE_PIECE ? work->vocab - first : (uint32_t)SAMPLE_PIECE;
    return work->logits + (size_t)r * work->vocab + first;
}

static void sample_top(void *arg, uint32_t task, int worker)
{
    (void)worker;
    struct sample_work *work = arg;
    uint32_t n, i = 0;
    const float *l = sample_piece(work, task, &n);
    vf top = vf_set(l[0]), odd = vf_zero(); /* odd: 0 as long as everything is finite */
    for (; n - i >= VF; i += VF) {
        vf v = vf_load(l + i);
        top = vf_max(v, top);
        odd = vf_fma(v, vf_zero(), odd);
    }
    float best = vf_top(top), bad = vf_sum(odd);
    for (; i < n; i++) {
        best = l[i] > best ? l[i] : best;
        bad += l[i] * 0;
    }
    work->top[task] = best + bad;
}

/* Largest of row r and, in *piece, the first piece that has it; NaN when the row is not finite. */
static float sample_row_top(const struct sample_work *work, uint32_t r, uint32_t *piece)
{
    const float *top = work->top + (size_t)r * work->pieces;
    *piece = 0;
    for (uint32_t i = 0; i < work->pieces; i++) {
        if (isnan(top[i]))
            return NAN;
        if (top[i] > top[*piece])
            *piece = i;
    }
    return top[*piece];
}

void LEVEL(argmax)(struct device *device, const struct argmax_args *args)
{
    struct sample_work work = {.logits = cpu_at(args->logits),
                               .vocab = args->vocab,
                               .pieces = (args->vocab + SAMPLE_PIECE - 1) / SAMPLE_PIECE,
                               .ids = cpu_at(args->ids)};
    work.top = cpu_scratch(device, 0, (size_t)args->rows * work.pieces, sizeof *work.top);
    if (!work.top)
        return;
    pool_run(device->pool, sample_top, &work, args->rows * work.pieces);
    for (uint32_t r = 0; r < args->rows; r++) {
        uint32_t piece;
        float top = sample_row_top(&work, r, &piece);
        if (isnan(top)) {
            ref_argmax(device, args);
            return;
        }
        const float *l = work.logits + (size_t)r * work.vocab;
        uint32_t i = piece * SAMPLE_PIECE;
        while (l[i] != top)
            i++;
        work.ids[r] = (int32_t)i;
    }
}

static void sample_sum(void *arg, uint32_t task, int worker)
{
    (void)worker;
    struct sample_work *work = arg;
    uint32_t n, i = 0, piece;
    const float *l = sample_piece(work, task, &n);
    float top = sample_row_top(work, task / work->pieces, &piece);
    double total = 0;
    while (n - i >= VF) { /* f32 sums of 32 vectors, f64 beyond */
        vf sum = vf_zero();
        for (int k = 0; k < 32 && n - i >= VF; k++, i += VF)
            sum = vf_add(sum, vf_exp(vf_sub(vf_load(l + i), vf_set(top))));
        total += (double)vf_sum(sum);
    }
    for (; i < n; i++)
        total += (double)expf(l[i] - top);
    work->total[task] = total;
}

/* The best `count` of a row, sorted while walking; blocks with nothing better are skipped whole. */
static void sample_best(void *arg, uint32_t r, int worker)
{
    (void)worker;
    struct sample_work *work = arg;
    const float *l = work->logits + (size_t)r * work->vocab;
    int32_t *ids = work->ids + (size_t)r * work->count;
    float *values = work->values + (size_t)r * work->count;
    uint32_t n = 0;
    for (uint32_t i = 0; i < work->vocab; i++) {
        while (n == work->count && work->vocab - i >= 4 * VF) {
            vf a = vf_max(vf_load(l + i), vf_load(l + i + VF));
            vf b = vf_max(vf_load(l + i + 2 * VF), vf_load(l + i + 3 * VF));
            if (vf_top(vf_max(a, b)) > values[n - 1])
                break;
            i += 4 * VF;
        }
        if (i == work->vocab)
            break;
        if (n == work->count && !(l[i] > values[n - 1]))
            continue;
        uint32_t at = n < work->count ? n++ : n - 1;
        for (; at > 0 && l[i] > values[at - 1]; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = l[i];
        ids[at] = (int32_t)i;
    }
}

void LEVEL(top)(struct device *device, const struct top_args *args)
{
    assert(args->count >= 1 && args->count <= 1024 && args->count <= args->vocab);
    struct sample_work work = {.logits = cpu_at(args->logits),
                               .vocab = args->vocab,
                               .pieces = (args->vocab + SAMPLE_PIECE - 1) / SAMPLE_PIECE,
                               .count = args->count,
                               .ids = cpu_at(args->ids),
                               .values = cpu_at(args->values),
                               .log_sum = cpu_at(args->log_sum)};
    uint32_t tasks = args->rows * work.pieces;
    work.top = cpu_scratch(device, 0, tasks, sizeof *work.top);
    work.total = cpu_scratch(device, 1, tasks, sizeof *work.total);
    if (!work.top || !work.total)
        return;
    pool_run(device->pool, sample_top, &work, tasks);
    for (uint32_t i = 0; i < tasks; i++)
        if (isnan(work.top[i])) {
            ref_top(device, args);
            return;
        }
    pool_run(device->pool, sample_sum, &work, tasks);
    pool_run(device->pool, sample_best, &work, args->rows);
    for (uint32_t r = 0; r < args->rows; r++) {
        double total = 0;
        uint32_t piece;
        for (uint32_t i = 0; i < work.pieces; i++)
            total += work.total[(size_t)r * work.pieces + i];
        work.log_sum[r] = (float)(sample_row_top(&work, r, &piece) + log(total));
    }
}
