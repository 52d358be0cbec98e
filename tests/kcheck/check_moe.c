/* moe_route and moe_experts.
 *
 * moe_route. h: u (8 + sqrt(hidden)) |h|. Logits l, with e_l = dot bound in f32 whatever the level
 * (the router is never rounded) plus what h brings. Any choice is right that is descending within
 * e_l and leaves out nothing larger than its last by more than e_l; but of experts with equal
 * router rows the lower id comes first. Weights for the ids chosen: w (4 max e_l + 16 u).
 *
 * moe_experts. Of one expert, with e_g, e_u the dot bounds of its two projections (kc_dot_bound and
 * kc_peak_bound):
 *   e_a = 1.1 e_g |u| + |silu(g)| e_u + 1.1 e_g e_u + 8 u |a|
 *   e_y = dot bound of down a  +  2 sqrt(sum w^2 e_a^2)
 * and x: sum of scale e_y over experts + 4 u (|x| + sum of |scale y|). */
#include "kcheck.h"

#include "backend/cpu/cpu_weight.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double kc_moe_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

struct kc_route {
    uint32_t rows;
    struct moe_dims dims;
    struct kc_weight *router, *shared_router;
    struct kc_buf *x, *gain, *h, *ids, *weights, *shared_gate;
};

static void kc_route_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_route *c = user;
    struct rand cuts = kc_cuts(kc, side, c->rows);
    struct moe_route_args args = {.dims = c->dims,
                                  .gain = kc_at(c->gain, side),
                                  .router = kc_w(c->router, side),
                                  .shared_router = kc_w(c->shared_router, side)};
    for (uint64_t first = 0; first < c->rows; first += args.rows) {
        args.rows = kc_piece(kc, side, &cuts, c->rows - (uint32_t)first);
        args.x = span_at(kc_at(c->x, side), first * c->dims.hidden * 4);
        args.h = span_at(kc_at(c->h, side), first * c->dims.hidden * 4);
        args.ids = span_at(kc_at(c->ids, side), first * c->dims.topk * 4);
        args.weights = span_at(kc_at(c->weights, side), first * c->dims.topk * 4);
        args.shared_gate = span_at(kc_at(c->shared_gate, side), first * 4);
        KC_CALL(kc, side, moe_route, &args);
    }
}

/* Exact logit of one expert and its bound, from h in f64. */
static double kc_route_logit(const struct weight *w, uint32_t e, const double *h, double *bound)
{
    float *row = mem_new(w->cols, sizeof *row), *most = mem_new(w->cols, sizeof *most);
    double sum = 0, magnitude = 0;
    cpu_weight_read_row(w, 0, e, row);
    kc_weight_bound(w, 0, e, most);
    for (uint32_t k = 0; k < w->cols; k++) {
        sum += row[k] * h[k];
        magnitude += most[k] * fabs(h[k]);
    }
    *bound = KC_U * (5 * (sqrt(w->cols) + 8)) * magnitude + 2 * KC_U * fabs(sum) + 1e-37;
    free(row);
    free(most);
    return sum;
}

static bool kc_route_same_row(const struct weight *w, uint32_t a, uint32_t b)
{
    size_t data = cpu_weight_row_bytes(w), scale = cpu_weight_scale_row_bytes(w);
    const char *d = w->data.base, *s = w->scales.base, *z = w->biases.base;
    return !memcmp(d + a * data, d + b * data, data) &&
           (!scale || (!memcmp(s + a * scale, s + b * scale, scale) &&
                       !memcmp(z + a * scale, z + b * scale, scale)));
}

static void kc_route_compare_choice(struct kc *kc, const struct kc_route *c, uint32_t r,
                                    const double *l, const double *e, const uint32_t *ids,
                                    const float *weights)
{
    uint32_t experts = c->dims.experts, topk = c->dims.topk;
    double chosen = 0, total = 0, top = -INFINITY, worst = 0;
    bool *taken = mem_new(experts, sizeof *taken);
    for (uint32_t i = 0; i < topk; i++) {
        if (ids[i] >= experts || taken[ids[i]]) {
            kc_fail(kc, "ids[%u, %u] = %u: no expert, or twice the same", r, i, ids[i]);
            free(taken);
            return;
        }
        taken[ids[i]] = true;
    }
    for (uint32_t i = 0; i < experts; i++) {
        top = fmax(top, l[i]);
        worst = fmax(worst, e[i]);
    }
    for (uint32_t i = 0; i < experts; i++)
        total += exp(l[i] - top);
    for (uint32_t i = 0; i < topk; i++) {
        chosen += exp(l[ids[i]] - top);
        uint32_t next = i + 1 < topk ? ids[i + 1] : ids[i];
        if (l[next] > l[ids[i]] + e[next] + e[ids[i]])
            kc_fail(kc, "ids[%u, %u]: not descending", r, i + 1);
        if (next < ids[i] && kc_route_same_row(&c->router->w[0], next, ids[i]))
            kc_fail(kc, "ids[%u, %u]: of equal experts the higher id comes first", r, i);
    }
    uint32_t last = ids[topk - 1];
    for (uint32_t i = 0; i < experts; i++) {
        if (!taken[i] && l[i] > l[last] + e[i] + e[last])
            kc_fail(kc, "ids[%u]: expert %u is better than the last one chosen", r, i);
        for (uint32_t j = 0; j < topk && !taken[i]; j++)
            if (i < ids[j] && kc_route_same_row(&c->router->w[0], i, ids[j]))
                kc_fail(kc, "ids[%u]: of equal experts the higher id was chosen", r);
    }
    for (uint32_t i = 0; i < topk; i++) {
        double want = exp(l[ids[i]] - top) / (c->dims.renormalise ? chosen : total);
        kc_compare_value(kc, "weights", r * topk + i, want, weights[i],
                         want * (4 * worst + 16 * KC_U) + 1e-37);
    }
    free(taken);
}

static void kc_route_compare(struct kc *kc, const struct kc_route *c)
{
    uint32_t hidden = c->dims.hidden, experts = c->dims.experts, topk = c->dims.topk;
    int got = kc->bench ? 2 : 1;
    double *h = mem_new(hidden, sizeof *h), *l = mem_new(experts, sizeof *l),
           *e = mem_new(experts, sizeof *e);
    const float *gain = (const float *)c->gain->init;
    for (uint32_t r = 0; r < c->rows; r++) {
        const float *x = (const float *)c->x->init + (size_t)r * hidden;
        double mean = 0;
        for (uint32_t k = 0; k < hidden; k++)
            mean += (double)x[k] * x[k] / hidden;
        for (uint32_t k = 0; k < hidden; k++) {
            size_t at = (size_t)r * hidden + k;
            h[k] = x[k] / sqrt(mean + c->dims.eps) * gain[k];
            kc_compare_value(kc, "h", at, h[k], ((const float *)c->h->result[got])[at],
                             KC_U * (8 + sqrt(hidden)) * fabs(h[k]) + 1e-37);
        }
        for (uint32_t i = 0; i < experts; i++)
            l[i] = kc_route_logit(&c->router->w[0], i, h, &e[i]);
        kc_route_compare_choice(kc, c, r, l, e, (const uint32_t *)c->ids->result[got] + r * topk,
                                (const float *)c->weights->result[got] + r * topk);
        double bound, gate = kc_route_logit(&c->shared_router->w[0], 0, h, &bound);
        kc_compare_value(kc, "shared_gate", r, kc_moe_sigmoid(gate),
                         ((const float *)c->shared_gate->result[got])[r], bound / 4 + 4 * KC_U);
    }
    free(h);
    free(l);
    free(e);
}

/* Makes router row b a copy of row a. */
static void kc_route_duplicate(struct kc_weight *kw, uint32_t a, uint32_t b)
{
    const struct weight *w = &kw->w[0];
    size_t data = cpu_weight_row_bytes(w), scale = cpu_weight_scale_row_bytes(w);
    char *d = w->data.base, *s = w->scales.base, *z = w->biases.base;
    memmove(d + b * data, d + a * data, data);
    if (scale) {
        memmove(s + b * scale, s + a * scale, scale);
        memmove(z + b * scale, z + a * scale, scale);
    }
}

enum {
    KC_MOE_ROWS = 17,
    KC_MOE_WIDE = 38, /* of the experts alone: the real width, and so few that tiles are used */
};

/* Dims of a case; kind, bits and group of its weights. The first edge cases take every row count
 * with the layout that fast kernels are made for, the next ones with any. */
static void kc_moe_shape(struct kc *kc, uint32_t *rows, struct moe_dims *dims,
                         enum weight_kind *kind, uint32_t *bits, uint32_t *group)
{
    static const uint32_t real_rows[] = {1, 4, 33},
                          edge_experts[] = {1, 2, 8, 31, 32, 33, 128, 257};
    static const uint32_t edge_rows[KC_MOE_ROWS] = {1,  2,  3,  4,  5,  7,  8,  9, 15,
                                                    16, 17, 31, 32, 33, 63, 64, 65};
    uint32_t i = (uint32_t)kc->index;
    *kind = WEIGHT_AFFINE;
    *bits = 4;
    *group = 64;
    *dims = (struct moe_dims){.eps = kc_eps(kc), .renormalise = true};
    bool wide = kc->pool == KC_EDGE && i == KC_MOE_WIDE;
    if (kc->pool == KC_REAL || wide) {
        *rows = wide ? 17 : real_rows[i];
        dims->hidden = 2048;
        dims->experts = wide ? 2 : 256;
        dims->topk = wide ? 2 : 8;
        dims->width = dims->shared_width = 512;
        return;
    }
    bool edge = kc->pool == KC_EDGE, usual = edge && i < KC_MOE_ROWS;
    *rows = edge ? edge_rows[i % KC_MOE_ROWS] : kc_between(kc, 1, 40);
    if (!usual) {
        *bits = kc_pick_bits(kc);
        *group = edge ? 32u << i % 3 : kc_pick_group(kc);
    }
    dims->hidden = *group * kc_between(kc, 1, 4);
    dims->width = *group * kc_between(kc, 1, 3);
    dims->shared_width = *group * kc_between(kc, 1, 3);
    dims->experts = edge ? edge_experts[i % 8] : kc_between(kc, 1, 40);
    if (edge && i >= 2 * KC_MOE_ROWS) { /* enough pairs an expert for the largest tiles */
        *rows = 97;
        dims->experts = i % 3 == 1 ? 1 : i % 3 == 2 ? 3 : 8;
    }
    if (edge && i == 2 * KC_MOE_ROWS + 3) { /* many rows, and little else */
        *rows = 1025;
        *bits = 4;
        *group = dims->hidden = dims->width = dims->shared_width = 64;
        dims->experts = 1;
    }
    dims->topk = kc_between(kc, 1, dims->experts < 10 ? dims->experts : 10);
    dims->renormalise = kc_chance(kc, 0.8);
    if (kc_chance(kc, 0.3) && !usual && *rows < 1000) {
        *kind = kc_chance(kc, 0.5) ? WEIGHT_BF16 : WEIGHT_F32;
        dims->hidden += kc_chance(kc, 0.5) ? 0 : 5;
        dims->width += kc_chance(kc, 0.5) ? 0 : 3;
    }
}

void kc_check_moe_route(struct kc *kc)
{
    struct kc_route c = {0};
    enum weight_kind kind;
    uint32_t bits, group;
    kc_moe_shape(kc, &c.rows, &c.dims, &kind, &bits, &group);
    if (kc->pool == KC_REAL || (kc->pool == KC_EDGE && kc->index < KC_MOE_ROWS))
        bits = 8; /* as routers have in published checkpoints */
    size_t n = (size_t)c.rows * c.dims.hidden, chosen = (size_t)c.rows * c.dims.topk * 4;
    float *x = kc_normal(kc, n, 2), *gain = kc_normal(kc, c.dims.hidden, 0.3);
    for (uint32_t k = 0; k < c.dims.hidden; k++)
        gain[k] += 1;
    c.router = kc_weight(kc, kind, bits, group, 1, c.dims.experts, c.dims.hidden);
    for (uint32_t i = 0; i < c.dims.experts / 4 && !kc->bench; i++) /* exact ties */
        kc_route_duplicate(c.router, kc_between(kc, 0, c.dims.experts - 1),
                           kc_between(kc, 0, c.dims.experts - 1));
    c.shared_router = kc_weight(kc, kind, bits, group, 1, 1, c.dims.hidden);
    kc_weight_load(kc, c.router);
    kc_weight_load(kc, c.shared_router);
    c.x = kc_buf(kc, "x", KC_IN, x, n * 4);
    c.gain = kc_buf(kc, "gain", KC_IN, gain, c.dims.hidden * 4);
    c.h = kc_buf(kc, "h", KC_OUT, NULL, n * 4);
    c.ids = kc_buf(kc, "ids", KC_OUT, NULL, chosen);
    c.weights = kc_buf(kc, "weights", KC_OUT, NULL, chosen);
    c.shared_gate = kc_buf(kc, "shared_gate", KC_OUT, NULL, c.rows * 4);
    snprintf(kc->shape, sizeof kc->shape, "rows %u, hidden %u, experts %u, topk %u, kind %d, %u/%u",
             c.rows, c.dims.hidden, c.dims.experts, c.dims.topk, kind, bits, group);
    kc->flops = 2.0 * (double)n * (c.dims.experts + 1);
    kc->bytes = 8.0 * (double)n + (c.dims.experts + 1.0) *
                                      ((double)cpu_weight_row_bytes(&c.router->w[0]) +
                                       2.0 * (double)cpu_weight_scale_row_bytes(&c.router->w[0]));
    if (kc_run(kc, kc_route_program, &c))
        kc_route_compare(kc, &c);
    free(x);
    free(gain);
}

/* ---- moe_experts -------------------------------------------------------------------------- */

struct kc_experts {
    uint32_t rows;
    struct moe_dims dims;
    struct kc_weight *gate, *up, *down, *shared_gate_proj, *shared_up, *shared_down;
    struct kc_buf *h, *ids, *weights, *shared_gate, *x;
};

static void kc_experts_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_experts *c = user;
    struct rand cuts = kc_cuts(kc, side, c->rows);
    struct moe_experts_args args = {.dims = c->dims,
                                    .gate = kc_w(c->gate, side),
                                    .up = kc_w(c->up, side),
                                    .down = kc_w(c->down, side),
                                    .shared_gate_proj = kc_w(c->shared_gate_proj, side),
                                    .shared_up = kc_w(c->shared_up, side),
                                    .shared_down = kc_w(c->shared_down, side)};
    for (uint64_t first = 0; first < c->rows; first += args.rows) {
        args.rows = kc_piece(kc, side, &cuts, c->rows - (uint32_t)first);
        args.h = span_at(kc_at(c->h, side), first * c->dims.hidden * 4);
        args.ids = span_at(kc_at(c->ids, side), first * c->dims.topk * 4);
        args.weights = span_at(kc_at(c->weights, side), first * c->dims.topk * 4);
        args.shared_gate = span_at(kc_at(c->shared_gate, side), first * 4);
        args.x = span_at(kc_at(c->x, side), first * c->dims.hidden * 4);
        KC_CALL(kc, side, moe_experts, &args);
    }
}

/* Dot of one stored row and x, and its bound. Scratch: f32 [2, cols]; peak: kc_peaks of x. */
static double kc_experts_dot(const struct kc *kc, const struct weight *w, uint32_t item,
                             uint32_t row, const double *x, const double *x_error,
                             const double *peak, float *scratch, double *bound)
{
    float *most = scratch + w->cols;
    double sum = 0, magnitude = 0, squares = 0, carried = 0, peaks = 0;
    cpu_weight_read_row(w, item, row, scratch);
    kc_weight_bound(w, item, row, most);
    for (uint32_t k = 0; k < w->cols; k++) {
        double term = scratch[k] * x[k];
        sum += term;
        magnitude += most[k] * fabs(x[k]);
        squares += term * term;
        peaks += scratch[k] * peak[k] * scratch[k] * peak[k];
        if (x_error)
            carried += scratch[k] * x_error[k] * scratch[k] * x_error[k];
    }
    *bound =
        kc_dot_bound(kc, magnitude, squares, w->cols) + kc_peak_bound(peaks) + 2 * sqrt(carried);
    return sum;
}

/* Adds one expert's share to the tolerance [hidden] and magnitude [hidden] of one row. */
static void kc_experts_bound(const struct kc *kc, const struct weight *gate,
                             const struct weight *up, const struct weight *down, uint32_t item,
                             const double *h, double scale, double *tolerance, double *magnitude)
{
    uint32_t width = gate->rows, longest = width > gate->cols ? width : gate->cols;
    double *a = mem_new(width, sizeof *a), *e_a = mem_new(width, sizeof *e_a);
    double *peak = mem_new(longest, sizeof *peak);
    float *scratch = mem_new(2 * (size_t)longest, sizeof *scratch);
    kc_peaks(kc, gate, h, peak);
    for (uint32_t o = 0; o < width; o++) {
        double e_g, e_u, g = kc_experts_dot(kc, gate, item, o, h, NULL, peak, scratch, &e_g);
        double u = kc_experts_dot(kc, up, item, o, h, NULL, peak, scratch, &e_u);
        double s = g * kc_moe_sigmoid(g);
        a[o] = s * u;
        e_a[o] = 1.1 * e_g * fabs(u) + fabs(s) * e_u + 1.1 * e_g * e_u + 8 * KC_U * fabs(a[o]);
    }
    kc_peaks(kc, down, a, peak);
    for (uint32_t o = 0; o < down->rows; o++) {
        double e, y = kc_experts_dot(kc, down, item, o, a, e_a, peak, scratch, &e);
        tolerance[o] += fabs(scale) * e;
        magnitude[o] += fabs(scale * y);
    }
    free(a);
    free(e_a);
    free(peak);
    free(scratch);
}

static void kc_experts_compare(struct kc *kc, const struct kc_experts *c)
{
    uint32_t hidden = c->dims.hidden, topk = c->dims.topk;
    double *tolerance = mem_new((size_t)c->rows * hidden, sizeof *tolerance);
    double *magnitude = mem_new(hidden, sizeof *magnitude), *h = mem_new(hidden, sizeof *h);
    for (uint32_t r = 0; r < c->rows; r++) {
        double *t = tolerance + (size_t)r * hidden;
        for (uint32_t k = 0; k < hidden; k++) {
            h[k] = ((const float *)c->h->init)[(size_t)r * hidden + k];
            magnitude[k] = fabs(((const float *)c->x->init)[(size_t)r * hidden + k]);
        }
        for (uint32_t i = r * topk; i < (r + 1) * topk; i++)
            kc_experts_bound(kc, &c->gate->w[0], &c->up->w[0], &c->down->w[0],
                             ((const uint32_t *)c->ids->init)[i], h,
                             ((const float *)c->weights->init)[i], t, magnitude);
        kc_experts_bound(kc, &c->shared_gate_proj->w[0], &c->shared_up->w[0], &c->shared_down->w[0],
                         0, h, ((const float *)c->shared_gate->init)[r], t, magnitude);
        for (uint32_t k = 0; k < hidden; k++)
            t[k] += 4 * KC_U * magnitude[k] + 1e-37;
    }
    kc_compare(kc, c->x, NULL, tolerance, (size_t)c->rows * hidden);
    free(tolerance);
    free(magnitude);
    free(h);
}

/* topk distinct experts a row; sometimes the same ones for all rows, so that one gets them all. */
static void kc_experts_inputs(struct kc *kc, struct kc_experts *c)
{
    size_t n = (size_t)c->rows * c->dims.hidden, chosen = (size_t)c->rows * c->dims.topk;
    float *h = kc_normal(kc, n, 1), *x = kc_normal(kc, n, 1);
    float *weights = mem_new(chosen, sizeof *weights), *gates = mem_new(c->rows, sizeof *gates);
    uint32_t *ids = mem_new(chosen, sizeof *ids), topk = c->dims.topk;
    bool same = !kc->bench && kc_chance(kc, 0.2);
    for (uint32_t r = 0; r < c->rows; r++) {
        gates[r] = (float)rand_unit(&kc->rand);
        for (uint32_t i = 0; i < topk; i++) {
            bool again = true;
            while (again) {
                uint32_t id = same && r ? ids[i] : kc_between(kc, 0, c->dims.experts - 1);
                again = false;
                for (uint32_t j = 0; j < i; j++)
                    again |= ids[r * topk + j] == id;
                ids[r * topk + i] = id;
            }
            weights[r * topk + i] = (float)rand_unit(&kc->rand);
        }
    }
    c->h = kc_buf(kc, "h", KC_IN, h, n * 4);
    c->x = kc_buf(kc, "x", KC_OUT, x, n * 4);
    c->ids = kc_buf(kc, "ids", KC_IN, ids, chosen * 4);
    c->weights = kc_buf(kc, "weights", KC_IN, weights, chosen * 4);
    c->shared_gate = kc_buf(kc, "shared_gate", KC_IN, gates, c->rows * 4);
    free(h);
    free(x);
    free(ids);
    free(weights);
    free(gates);
}

void kc_check_moe_experts(struct kc *kc)
{
    struct kc_experts c = {0};
    enum weight_kind kind;
    uint32_t bits, group;
    kc_moe_shape(kc, &c.rows, &c.dims, &kind, &bits, &group);
    kc_experts_inputs(kc, &c);
    uint32_t hidden = c.dims.hidden, width = c.dims.width, shared = c.dims.shared_width;
    c.gate = kc_weight(kc, kind, bits, group, c.dims.experts, width, hidden);
    c.up = kc_weight(kc, kind, bits, group, c.dims.experts, width, hidden);
    c.down = kc_weight(kc, kind, bits, group, c.dims.experts, hidden, width);
    c.shared_gate_proj = kc_weight(kc, kind, bits, group, 1, shared, hidden);
    c.shared_up = kc_weight(kc, kind, bits, group, 1, shared, hidden);
    c.shared_down = kc_weight(kc, kind, bits, group, 1, hidden, shared);
    struct kc_weight *all[] = {c.gate,      c.up,         c.down, c.shared_gate_proj,
                               c.shared_up, c.shared_down};
    for (int i = 0; i < 6; i++)
        kc_weight_load(kc, all[i]);
    snprintf(kc->shape, sizeof kc->shape,
             "rows %u, hidden %u, experts %u, topk %u, widths %u/%u, kind %d, %u/%u", c.rows,
             hidden, c.dims.experts, c.dims.topk, width, shared, kind, bits, group);
    bool *used = mem_new(c.dims.experts, sizeof *used);
    uint32_t distinct = 0;
    for (uint32_t i = 0; i < c.rows * c.dims.topk; i++) {
        uint32_t id = ((const uint32_t *)c.ids->init)[i];
        distinct += !used[id];
        used[id] = true;
    }
    free(used);
    double values = 3.0 * hidden * ((double)distinct * width + shared);
    kc->bytes = values * (kind == WEIGHT_AFFINE ? bits / 8.0 + 4.0 / group
                          : kind == WEIGHT_BF16 ? 2
                                                : 4) +
                12.0 * c.rows * hidden;
    kc->flops = 6.0 * c.rows * hidden * ((double)c.dims.topk * width + shared);
    if (kc_run(kc, kc_experts_program, &c))
        kc_experts_compare(kc, &c);
}
