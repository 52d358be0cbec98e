/* linear: out = W rms_norm(x) (+ out). Tolerance: kc_dot_bound of each output, kc_peak_bound
 * where inputs become integers, and 4 u |out|. */
#include "kcheck.h"

#include "backend/cpu/cpu_weight.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>

struct kc_linear {
    uint32_t rows, n, cols;
    float eps;
    bool add;
    struct kc_weight *w[LINEAR_MAX];
    struct kc_buf *x, *gain, *select, *out[LINEAR_MAX];
};

static void kc_linear_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_linear *c = user;
    struct linear_args args = {.n = c->n, .eps = c->eps, .add = c->add};
    struct rand cuts = kc_cuts(kc, side, c->rows);
    if (c->gain)
        args.gain = kc_at(c->gain, side);
    for (uint64_t first = 0; first < c->rows; first += args.rows) {
        args.rows = kc_piece(kc, side, &cuts, c->rows - (uint32_t)first);
        if (c->select)
            args.select = span_at(kc_at(c->select, side), first * 4);
        args.x = span_at(kc_at(c->x, side), c->select ? 0 : first * c->cols * 4);
        for (uint32_t i = 0; i < c->n; i++) {
            args.weight[i] = kc_w(c->w[i], side);
            args.out[i] = span_at(kc_at(c->out[i], side), first * args.weight[i]->rows * 4);
        }
        KC_CALL(kc, side, linear, &args);
    }
}

/* Tolerances of out[i] [rows, w->rows] from h [rows, cols], the exact input of the product. */
static void kc_linear_bound(const struct kc *kc, const struct kc_linear *c, uint32_t i,
                            const double *h, double *tolerance)
{
    const struct weight *w = &c->w[i]->w[0];
    float *row = mem_new(c->cols, sizeof *row), *bound = mem_new(c->cols, sizeof *bound);
    double *peak = mem_new((size_t)c->rows * c->cols, sizeof *peak);
    for (uint32_t r = 0; r < c->rows; r++)
        kc_peaks(kc, w, h + (size_t)r * c->cols, peak + (size_t)r * c->cols);
    const float *want = (const float *)c->out[i]->result[0];
    for (uint32_t o = 0; o < w->rows; o++) {
        cpu_weight_read_row(w, 0, o, row);
        kc_weight_bound(w, 0, o, bound);
        for (uint32_t r = 0; r < c->rows; r++) {
            double sum = 0, squares = 0, peaks = 0;
            for (uint32_t k = 0; k < c->cols; k++) {
                double hk = h[(size_t)r * c->cols + k], pk = peak[(size_t)r * c->cols + k];
                sum += bound[k] * fabs(hk);
                squares += row[k] * hk * row[k] * hk;
                peaks += row[k] * pk * row[k] * pk;
            }
            size_t at = (size_t)r * w->rows + o;
            double before = c->add ? ((const float *)c->out[i]->init)[at] : 0;
            tolerance[at] = kc_dot_bound(kc, sum, squares, c->cols) + kc_peak_bound(peaks) +
                            4 * KC_U * (fabs(want[at]) + fabs(before)) + 1e-37;
        }
    }
    free(row);
    free(bound);
    free(peak);
}

struct kc_linear_shape {
    uint32_t rows, cols, n, out[LINEAR_MAX];
    enum weight_kind kind;
    uint32_t bits, group;
    bool norm, add, select;
};

/* The 35B model's projections. */
static const struct kc_linear_shape kc_linear_real[KC_LINEAR_REAL] = {
    {1, 2048, 4, {8192, 4096, 32, 32}, WEIGHT_AFFINE, 4, 64, true, false, false},
    {1, 4096, 1, {2048}, WEIGHT_AFFINE, 4, 64, false, true, false},
    {1, 2048, 3, {8192, 512, 512}, WEIGHT_AFFINE, 4, 64, true, false, false},
    {1, 2048, 1, {248320}, WEIGHT_AFFINE, 4, 64, true, false, true},
    {4, 2048, 4, {8192, 4096, 32, 32}, WEIGHT_AFFINE, 4, 64, true, false, false},
    {4, 4096, 1, {2048}, WEIGHT_AFFINE, 4, 64, false, true, false},
    {33, 4096, 1, {2048}, WEIGHT_AFFINE, 4, 64, false, true, false},
    {33, 2048, 3, {8192, 512, 512}, WEIGHT_AFFINE, 4, 64, true, false, false},
    {2, 2048, 1, {8192}, WEIGHT_BF16, 0, 0, true, false, false},
    {2, 2048, 1, {8192}, WEIGHT_AFFINE, 8, 64, true, false, false},
    {8, 2048, 4, {8192, 4096, 32, 32}, WEIGHT_AFFINE, 4, 64, true, false, false}, /* batches */
    {16, 4096, 1, {2048}, WEIGHT_AFFINE, 4, 64, false, true, false},
    {32, 2048, 3, {8192, 512, 512}, WEIGHT_AFFINE, 4, 64, true, false, false},
};

static struct kc_linear_shape kc_linear_edge(int index)
{
    static const uint32_t bits[] = {2, 3, 4, 5, 6, 8};
    static const uint32_t rows[] = {1,  2,  3,  4,  5,  7,  8,  9,  15,  16,  17, 31,
                                    32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129};
    static const uint32_t outs[] = {1, 2, 3, 7, 15, 31, 33, 63, 65, 129};
    uint32_t i = (uint32_t)index;
    if (i < 18) /* each bits and group */
        return (struct kc_linear_shape){.rows = 1 + i % 3 * 8,
                                        .cols = (32u << i % 3) * (1 + i % 5),
                                        .n = 1,
                                        .out = {5 + i},
                                        .kind = WEIGHT_AFFINE,
                                        .bits = bits[i / 3],
                                        .group = 32u << i % 3,
                                        .norm = i % 2};
    if (i < 41) /* row counts */
        return (struct kc_linear_shape){.rows = rows[i - 18],
                                        .cols = i % 2 ? 512 : 320,
                                        .n = 1 + i % 2,
                                        .out = {66, 3},
                                        .kind = WEIGHT_AFFINE,
                                        .bits = i % 5 == 4 ? 8 : 4,
                                        .group = 64,
                                        .norm = i % 3 == 0,
                                        .add = i % 3 == 1,
                                        .select = i % 3 == 2};
    if (i < 51) /* output counts */
        return (struct kc_linear_shape){.rows = i % 2 ? 1 : 18,
                                        .cols = 64,
                                        .n = 1,
                                        .out = {outs[i - 41]},
                                        .kind = WEIGHT_AFFINE,
                                        .bits = 4,
                                        .group = 64};
    if (i >= 67) /* many rows */
        return (struct kc_linear_shape){.rows = 957 + i,
                                        .cols = 64,
                                        .n = 1,
                                        .out = {17},
                                        .kind = WEIGHT_AFFINE,
                                        .bits = 4,
                                        .group = 64};
    if (i >= 63) /* wider than the 35B model's: what fits a block's memory, and what does not */
        return (struct kc_linear_shape){.rows = i % 2 ? 6 : 4,
                                        .cols = i < 65 ? 8192 : 16384,
                                        .n = 1,
                                        .out = {i % 2 ? 40 : 2200},
                                        .kind = WEIGHT_AFFINE,
                                        .bits = 4,
                                        .group = 64,
                                        .norm = i % 2};
    return (struct kc_linear_shape){.rows = i % 2 ? 1 : 17, /* odd widths, no quantisation */
                                    .cols = (uint32_t[]){1, 3, 33, 65, 100, 257}[i % 6],
                                    .n = 2,
                                    .out = {i - 43, 33},
                                    .kind = i % 4 < 2 ? WEIGHT_F32 : WEIGHT_BF16,
                                    .norm = i % 3 == 0};
}

static struct kc_linear_shape kc_linear_random(struct kc *kc)
{
    struct kc_linear_shape s = {.rows = kc_between(kc, 1, kc_chance(kc, 0.5) ? 8 : 80),
                                .n = kc_between(kc, 1, LINEAR_MAX),
                                .kind = WEIGHT_AFFINE,
                                .bits = kc_pick_bits(kc),
                                .group = kc_pick_group(kc),
                                .norm = kc_chance(kc, 0.5),
                                .add = kc_chance(kc, 0.3),
                                .select = kc_chance(kc, 0.3)};
    s.cols = s.group * kc_between(kc, 1, 8);
    for (uint32_t i = 0; i < s.n; i++)
        s.out[i] = kc_between(kc, 1, 150);
    if (kc_chance(kc, 0.3))
        s.kind = kc_chance(kc, 0.5) ? WEIGHT_F32 : WEIGHT_BF16;
    return s;
}

/* Inputs of the case, and h, the exact rows that the products see. */
static void kc_linear_inputs(struct kc *kc, const struct kc_linear_shape *s, struct kc_linear *c,
                             double *h)
{
    uint32_t source = s->select ? s->rows + 5 : s->rows;
    uint32_t *select = mem_new(s->rows, sizeof *select);
    float *x = kc_normal(kc, (size_t)source * s->cols, exp2(kc_between(kc, 0, 6) - 3.0));
    float *gain = kc_normal(kc, s->cols, 0.3);
    for (uint32_t k = 0; k < s->cols; k++)
        gain[k] += 1;
    for (uint32_t r = 0; r < s->rows; r++)
        select[r] = s->select ? kc_between(kc, 0, source - 1) : r;
    c->x = kc_buf(kc, "x", KC_IN, x, (uint64_t)source * s->cols * 4);
    c->gain = s->norm ? kc_buf(kc, "gain", KC_IN, gain, s->cols * 4) : NULL;
    c->select = s->select ? kc_buf(kc, "select", KC_IN, select, s->rows * 4) : NULL;
    for (uint32_t r = 0; r < s->rows; r++) {
        const float *from = x + (size_t)select[r] * s->cols;
        double mean = 0;
        for (uint32_t k = 0; k < s->cols; k++)
            mean += (double)from[k] * from[k] / s->cols;
        for (uint32_t k = 0; k < s->cols; k++)
            h[(size_t)r * s->cols + k] =
                s->norm ? from[k] / sqrt(mean + c->eps) * gain[k] : from[k];
    }
    free(x);
    free(gain);
    free(select);
}

void kc_check_linear(struct kc *kc)
{
    struct kc_linear_shape s = kc->pool == KC_REAL   ? kc_linear_real[kc->index]
                               : kc->pool == KC_EDGE ? kc_linear_edge(kc->index)
                                                     : kc_linear_random(kc);
    struct kc_linear c = {
        .rows = s.rows, .n = s.n, .cols = s.cols, .eps = kc_eps(kc), .add = s.add};
    snprintf(kc->shape, sizeof kc->shape,
             "rows %u, cols %u, outs %u+%u+%u+%u, kind %d, bits %u/%u%s%s%s", s.rows, s.cols,
             s.out[0], s.out[1], s.out[2], s.out[3], s.kind, s.bits, s.group,
             s.norm ? ", norm" : "", s.add ? ", add" : "", s.select ? ", select" : "");
    double *h = mem_new((size_t)s.rows * s.cols, sizeof *h);
    kc_linear_inputs(kc, &s, &c, h);
    for (uint32_t i = 0; i < s.n; i++) {
        size_t n = (size_t)s.rows * s.out[i];
        float *before = kc_normal(kc, n, 1);
        c.w[i] = kc_weight(kc, s.kind, s.bits, s.group, 1, s.out[i], s.cols);
        kc_weight_load(kc, c.w[i]);
        c.out[i] = kc_buf(kc, (const char *[]){"out0", "out1", "out2", "out3"}[i], KC_OUT,
                          s.add ? before : NULL, n * 4);
        free(before);
        kc->flops += 2.0 * (double)n * s.cols;
        kc->bytes += (double)n * 4 +
                     (double)s.out[i] * (double)cpu_weight_row_bytes(&c.w[i]->w[0]) +
                     2.0 * s.out[i] * (double)cpu_weight_scale_row_bytes(&c.w[i]->w[0]);
    }
    kc->bytes += (double)s.rows * s.cols * 4;
    if (kc_run(kc, kc_linear_program, &c))
        for (uint32_t i = 0; i < s.n; i++) {
            size_t n = (size_t)s.rows * s.out[i];
            double *tolerance = mem_new(n, sizeof *tolerance);
            kc_linear_bound(kc, &c, i, h, tolerance);
            kc_compare(kc, c.out[i], NULL, tolerance, n);
            free(tolerance);
        }
    free(h);
}
