/* delta: chunks against one token at a time.
 *
 * Tolerances come from the recurrence in f64, which carries along how far rounding may have led,
 * in units of u. Errors of S do not grow from step to step: the decay is at most 1, and so is the
 * norm of (I - beta k k^T) for unit k. What the steps add is independent, so squares add up:
 *   element:  E_ij^2 <- decay^2 E_ij^2 + (decay beta k_i E_j)^2 + own_ij^2,  E_j: of the column
 *   own_ij = e_decay |S_ij| + e_k,i |d_j| + |k_i| e_d,j + 2 |S_ij|
 *   e_d,j = beta (e_v,j + M_j (4 + e_k + sqrt(128))),  M_j = max(decay M_j, |S_j| + |v_j|)
 * M holds what a chunk still sees of its first row; e_k is the relative error of k: about 4.4 times
 * how much the norm magnifies the convolution's rounding, and 12 more. The tolerance is SURE times
 * that.
 * o = S^T q has
 *   e_j = |q| (E_j + M_j (e_q + sqrt(128)))
 *   y:  |w silu(z)| r (e_j + |o_j| r rms(e)) + 16 u |y|,   r = rsqrt(mean(o^2) + eps)
 * Levels that round the factors of products to f16 (CUDA) are held by a coarser one, for S and o:
 *   e_j = 32 u sqrt(128) (1 + sqrt(rows)) kappa max(|S_j| + |v_j|),  kappa: that magnification
 * The convolution's state must be the input rows bit by bit. */
#include "kcheck.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 128, SURE = 2 };

struct kc_delta {
    struct delta_dims dims;
    size_t channels, values; /* C; value_heads * 128 */
    struct kc_plan plan;
    float *u, *z, *a, *b; /* [total, ...] */
    float *conv, *a_log, *dt_bias, *norm;
    float *conv_state, *state; /* before */
    struct kc_buf *qkv, *z_rows, *a_rows, *b_rows, *y_rows;
    struct kc_buf *conv_in, *a_log_in, *dt_bias_in, *norm_in, *conv_states, *states, *y;
};

static void kc_delta_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_delta *c = user;
    struct rand rand = kc_cuts(kc, side, c->plan.seed);
    uint32_t done[KC_SEQS] = {0};
    struct segment segments[KC_SEQS];
    struct batch_view view;
    size_t *from = mem_new(c->plan.total, sizeof *from);
    while (kc_plan_next(kc, side, &c->plan, &rand, done, segments, &view, from)) {
        kc_gather(kc, side, c->qkv, c->u, from, view.rows, c->channels);
        kc_gather(kc, side, c->z_rows, c->z, from, view.rows, c->values);
        kc_gather(kc, side, c->a_rows, c->a, from, view.rows, c->dims.value_heads);
        kc_gather(kc, side, c->b_rows, c->b, from, view.rows, c->dims.value_heads);
        kc_stage_poison(kc, side, c->y_rows);
        struct delta_args args = {
            .batch = &view,
            .dims = c->dims,
            .qkv = kc_at(c->qkv, side),
            .z = kc_at(c->z_rows, side),
            .a = kc_at(c->a_rows, side),
            .b = kc_at(c->b_rows, side),
            .conv = kc_at(c->conv_in, side),
            .a_log = kc_at(c->a_log_in, side),
            .dt_bias = kc_at(c->dt_bias_in, side),
            .norm = kc_at(c->norm_in, side),
            .conv_state = kc_at(c->conv_states, side),
            .state = kc_at(c->states, side),
            .y = kc_at(c->y_rows, side),
        };
        KC_CALL(kc, side, delta, &args);
        kc_scatter(kc, side, c->y_rows, c->y->result[side->run], from, view.rows, c->values);
    }
    free(from);
}

static double kc_delta_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* A row's vectors for one head, after convolution and norms. Errors count in u. */
struct kc_delta_row {
    double q[DIM], k[DIM], v[DIM];
    double k_error[DIM], v_error[DIM];
    double q_length, q_relative, k_relative; /* errors of whole vectors, over their lengths */
    double kappa;                            /* the larger one of q and k */
    double decay, decay_relative, beta;
};

/* 128 channels from `base` on: silu(convolution), and the sum of the convolution's magnitudes. */
static void kc_delta_conv(const struct kc_delta *c, const struct kc_seq *q, uint32_t t, size_t base,
                          double *x, double *magnitude)
{
    for (size_t ch = base; ch < base + DIM; ch++) {
        double sum = 0, all = 0;
        for (uint32_t j = 0; j < 4; j++) {
            double u = 0; /* row t - 3 + j, or what the state held */
            if (t + j >= 3)
                u = c->u[(q->first + t + j - 3) * c->channels + ch];
            else if (q->start)
                u = c->conv_state[(q->slot * 3 + t + j) * c->channels + ch];
            sum += c->conv[ch * 4 + j] * u;
            all += fabs(c->conv[ch * 4 + j] * u);
        }
        x[ch - base] = sum * kc_delta_sigmoid(sum);
        magnitude[ch - base] = all;
    }
}

/* Brings x to length `scale`; error: in the magnitudes, out the elements' errors. Returns the error
 * of the whole over its length. */
static double kc_delta_norm(double *x, double *error, double scale, double *kappa)
{
    double squares = 1e-6, errors = 0, magnitudes = 0;
    for (size_t i = 0; i < DIM; i++) {
        squares += x[i] * x[i];
        magnitudes += error[i] * error[i];
        error[i] = 4.4 * error[i] + 4 * fabs(x[i]);
        errors += error[i] * error[i];
    }
    double relative = sqrt(errors / squares) + 12;
    for (size_t i = 0; i < DIM; i++) {
        x[i] *= scale / sqrt(squares);
        error[i] = error[i] * scale / sqrt(squares) + relative * fabs(x[i]);
    }
    *kappa = fmax(*kappa, sqrt(magnitudes / squares));
    return relative;
}

static void kc_delta_read_row(const struct kc_delta *c, const struct kc_seq *q, uint32_t t,
                              uint32_t head, struct kc_delta_row *r)
{
    uint32_t key_heads = c->dims.key_heads, key = head / (c->dims.value_heads / key_heads);
    size_t row = (q->first + t) * c->dims.value_heads + head;
    double q_error[DIM], squares = 0;
    kc_delta_conv(c, q, t, key * DIM, r->q, q_error);
    kc_delta_conv(c, q, t, (key_heads + key) * DIM, r->k, r->k_error);
    kc_delta_conv(c, q, t, (2 * key_heads + head) * DIM, r->v, r->v_error);
    r->kappa = 1;
    r->q_relative = kc_delta_norm(r->q, q_error, 1 / sqrt(DIM), &r->kappa);
    r->k_relative = kc_delta_norm(r->k, r->k_error, 1, &r->kappa);
    for (size_t i = 0; i < DIM; i++) {
        squares += r->q[i] * r->q[i];
        r->v_error[i] = 4.4 * r->v_error[i] + 4 * fabs(r->v[i]);
    }
    r->q_length = sqrt(squares);
    double a = c->a[row], bias = c->dt_bias[head], rate = exp(c->a_log[head]);
    double exponent = rate * log1p(exp(a + bias));
    r->decay = exp(-exponent);
    r->decay_relative =
        2 + 8 * exponent + 2 * rate * kc_delta_sigmoid(a + bias) * (fabs(a) + fabs(bias));
    r->beta = kc_delta_sigmoid(c->b[row]);
}

/* A head's state in f64 and how far from it rounding may lead: squares of errors, in u. */
struct kc_delta_track {
    double s[DIM][DIM], error[DIM][DIM];
    double column_error[DIM];
    double most[DIM];           /* M */
    double kappa, largest[DIM]; /* of all rows so far, for levels that round factors */
};

static void kc_delta_step(struct kc_delta_track *w, const struct kc_delta_row *r)
{
    w->kappa = fmax(w->kappa, r->kappa);
    for (size_t j = 0; j < DIM; j++) {
        double squares = 0, d = 0, decay = r->decay, decay_error = decay * r->decay_relative;
        for (size_t i = 0; i < DIM; i++) {
            squares += w->s[i][j] * w->s[i][j];
            d += decay * w->s[i][j] * r->k[i];
        }
        d = r->beta * (r->v[j] - d);
        w->largest[j] = fmax(w->largest[j], sqrt(squares) + fabs(r->v[j]));
        w->most[j] = fmax(decay * w->most[j], sqrt(squares) + fabs(r->v[j]));
        double d_error = r->beta * (r->v_error[j] + w->most[j] * (4 + r->k_relative + sqrt(DIM)));
        for (size_t i = 0; i < DIM; i++) {
            double from = decay * r->beta * r->k[i], before = w->s[i][j];
            w->s[i][j] = decay * before + r->k[i] * d;
            double own = decay_error * fabs(before) + r->k_error[i] * fabs(d) +
                         fabs(r->k[i]) * d_error + 2 * fabs(w->s[i][j]);
            w->error[i][j] =
                decay * decay * w->error[i][j] + from * from * w->column_error[j] + own * own;
        }
        double own =
            decay_error * sqrt(squares) + r->k_relative * fabs(d) + d_error + 2 * w->most[j];
        w->column_error[j] = decay * decay * w->column_error[j] + own * own;
    }
}

/* Tolerances of one row of y: out f64 [128]. */
static void kc_delta_bound_row(const struct kc *kc, const struct kc_delta *c, size_t row,
                               uint32_t t, const struct kc_delta_track *w,
                               const struct kc_delta_row *r, double *bound)
{
    double o[DIM] = {0}, e[DIM], square = 0, errors = 0;
    for (size_t j = 0; j < DIM; j++) {
        for (size_t i = 0; i < DIM; i++)
            o[j] += w->s[i][j] * r->q[i];
        e[j] = SURE * KC_U * r->q_length *
               (sqrt(w->column_error[j]) + w->most[j] * (r->q_relative + sqrt(DIM)));
        if (kc->input_rounding > 0)
            e[j] = 32 * KC_U * sqrt(DIM) * (1 + sqrt(t + 1)) * w->kappa * w->largest[j];
        square += o[j] * o[j] / DIM;
        errors += e[j] * e[j] / DIM;
    }
    double scale = 1 / sqrt(square + c->dims.eps);
    for (size_t j = 0; j < DIM; j++) {
        double z = c->z[row * DIM + j], gate = fabs(c->norm[j] * z * kc_delta_sigmoid(z)) * scale;
        bound[j] = gate * (e[j] + fabs(o[j]) * scale * sqrt(errors)) +
                   16 * KC_U * gate * fabs(o[j]) + 1e-30;
    }
}

/* One head of one sequence: tolerances of its y rows and of its state. */
static void kc_delta_bound_head(const struct kc *kc, const struct kc_delta *c,
                                const struct kc_seq *q, uint32_t h, double *y_bound,
                                double *state_bound)
{
    static struct kc_delta_track w;
    struct kc_delta_row r;
    size_t state = ((size_t)q->slot * c->dims.value_heads + h) * DIM * DIM;
    memset(&w, 0, sizeof w);
    for (size_t i = 0; i < DIM * DIM && q->start; i++)
        w.s[i / DIM][i % DIM] = c->state[state + i];
    for (uint32_t t = 0; t < q->rows; t++) {
        size_t row = (q->first + t) * c->dims.value_heads + h;
        kc_delta_read_row(c, q, t, h, &r);
        kc_delta_step(&w, &r);
        kc_delta_bound_row(kc, c, row, t, &w, &r, y_bound + row * DIM);
    }
    for (size_t i = 0; i < DIM * DIM; i++) {
        state_bound[state + i] = SURE * KC_U * sqrt(w.error[i / DIM][i % DIM]);
        if (kc->input_rounding > 0)
            state_bound[state + i] =
                32 * KC_U * sqrt(DIM) * (1 + sqrt(q->rows)) * w.kappa * w.largest[i % DIM];
    }
}

static void kc_delta_compare(struct kc *kc, const struct kc_delta *c)
{
    size_t ys = c->plan.total * c->values, states = c->plan.slots * c->values * DIM;
    double *y = mem_new(ys, sizeof *y), *state = mem_new(states, sizeof *state);
    for (uint32_t i = 0; i < c->plan.seqs; i++)
        for (uint32_t h = 0; h < c->dims.value_heads; h++)
            kc_delta_bound_head(kc, c, &c->plan.seq[i], h, y, state);
    kc_compare(kc, c->y, NULL, y, ys);
    kc_compare(kc, c->states, NULL, state, states); /* tolerance 0 where a slot was not touched */
    kc_compare_bytes(kc, c->conv_states);
    free(y);
    free(state);
}

/* Every row like the first, in q and k: from the fourth row on keys are equal, bit by bit. */
static void kc_delta_equal_keys(struct kc_delta *c)
{
    for (size_t row = 1; row < c->plan.total; row++)
        memcpy(c->u + row * c->channels, c->u, (c->channels - c->values) * sizeof *c->u);
}

/* Decays of every kind: usual ones, none at all, complete (g = -30 and below), and alternating.
 * Then equal keys with beta = 1, where a chunk's triangular system is as far from diagonal as can
 * be: without decay, and with a complete one now and then. */
static void kc_delta_gates(struct kc *kc, struct kc_delta *c, uint32_t kind)
{
    uint32_t heads = c->dims.value_heads;
    for (size_t i = 0; i < (size_t)c->plan.total * heads; i++) {
        size_t row = i / heads;
        if (kind == 1)
            c->a[i] = -60; /* softplus 0: g = 0 */
        else if (kind == 2)
            c->a[i] = 40;
        else if (kind == 3)
            c->a[i] = row % 2 ? 40 : -60;
        else if (kind == 4 || kind == 5)
            c->a[i] = kind == 5 && kc_chance(kc, 0.1) ? 200 : -60;
        if (kind == 4 || kind == 5)
            c->b[i] = 40;
        if (kc_chance(kc, 0.02))
            c->b[i] = kc_chance(kc, 0.5) ? 40 : -40;
    }
    if (kind == 4 || kind == 5)
        kc_delta_equal_keys(c);
    for (uint32_t h = 0; h < heads; h++) {
        c->a_log[h] = (float)log(0.01 + 16 * rand_unit(&kc->rand));
        if (kind == 2 || kind == 3)
            c->a_log[h] = 0;
    }
}

static void kc_delta_inputs(struct kc *kc, struct kc_delta *c, uint32_t gates)
{
    size_t total = c->plan.total, slots = c->plan.slots, heads = c->dims.value_heads;
    c->u = kc_normal(kc, total * c->channels, 1);
    c->z = kc_normal(kc, total * c->values, 1.5);
    c->a = kc_normal(kc, total * heads, 2);
    c->b = kc_normal(kc, total * heads, 1.5);
    c->conv = kc_normal(kc, c->channels * 4, 0.5);
    c->a_log = kc_normal(kc, heads, 1);
    c->dt_bias = kc_normal(kc, heads, 1);
    c->norm = kc_normal(kc, DIM, 0.2);
    c->conv_state = kc_normal(kc, slots * 3 * c->channels, 1);
    c->state = kc_normal(kc, slots * c->values * DIM, 0.3);
    for (size_t i = 0; i < DIM; i++)
        c->norm[i] += 1;
    kc_delta_gates(kc, c, gates);
    c->qkv = kc_buf(kc, "qkv", KC_STAGE, NULL, total * c->channels * 4);
    c->z_rows = kc_buf(kc, "z", KC_STAGE, NULL, total * c->values * 4);
    c->a_rows = kc_buf(kc, "a", KC_STAGE, NULL, total * heads * 4);
    c->b_rows = kc_buf(kc, "b", KC_STAGE, NULL, total * heads * 4);
    c->y_rows = kc_buf(kc, "y", KC_STAGE, NULL, total * c->values * 4);
    c->conv_in = kc_buf(kc, "conv", KC_IN, c->conv, c->channels * 16);
    c->a_log_in = kc_buf(kc, "a_log", KC_IN, c->a_log, heads * 4);
    c->dt_bias_in = kc_buf(kc, "dt_bias", KC_IN, c->dt_bias, heads * 4);
    c->norm_in = kc_buf(kc, "norm", KC_IN, c->norm, DIM * 4);
    c->conv_states = kc_buf(kc, "conv_state", KC_OUT, c->conv_state, slots * 3 * c->channels * 4);
    c->states = kc_buf(kc, "state", KC_OUT, c->state, slots * c->values * DIM * 4);
    c->y = kc_buf(kc, "y", KC_HOST, NULL, total * c->values * 4);
}

void kc_check_delta(struct kc *kc)
{
    static const uint32_t edge_rows[] = {1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17, 31,
                                         32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 64, 64};
    static const uint32_t edge_heads[][2] = {{1, 1}, {1, 2}, {2, 4}, {2, 2}, {1, 4}, {3, 6}};
    struct kc_delta c = {.dims = {.eps = kc_eps(kc)}};
    uint32_t gates = kc_between(kc, 0, 7), index = (uint32_t)kc->index;
    if (kc->pool == KC_REAL) { /* decode of 1 and of 4, a prefill */
        c.dims.key_heads = 16;
        c.dims.value_heads = 32;
        kc_plan_make(kc, &c.plan, index == 1 ? 4 : 1, index == 2 ? 128 : 1, true,
                     index < 2 ? 9 : 0);
        gates = 0;
    } else if (kc->pool == KC_EDGE) {
        c.dims.key_heads = edge_heads[index % 6][0];
        c.dims.value_heads = edge_heads[index % 6][1];
        kc_plan_make(kc, &c.plan, index % 4 == 3 ? 2 : 1, edge_rows[index], true, 5 * (index % 2));
        c.plan.chunked &= index % 3 == 0; /* else the length itself is the edge */
        gates = index >= 18 ? index - 18 : gates;
    } else {
        const uint32_t *heads = edge_heads[kc_between(kc, 0, 5)];
        c.dims.key_heads = heads[0];
        c.dims.value_heads = heads[1];
        kc_plan_make(kc, &c.plan, kc_between(kc, 1, 5), kc_chance(kc, 0.2) ? 150 : 40, false, 9);
    }
    c.values = c.dims.value_heads * DIM;
    c.channels = 2 * c.dims.key_heads * DIM + c.values;
    kc_delta_inputs(kc, &c, gates);
    snprintf(kc->shape, sizeof kc->shape, "heads %u/%u, sequences %u, rows %u, gates %u%s",
             c.dims.key_heads, c.dims.value_heads, c.plan.seqs, c.plan.total, gates,
             c.plan.chunked ? ", chunks" : "");
    kc->flops = 8.0 * c.plan.total * (double)c.values * DIM;
    kc->bytes = 4 * (c.plan.total * (double)(c.channels + 2 * c.values) +
                     2.0 * c.plan.seqs * (double)(c.values * DIM + 3 * c.channels));
    if (kc_run(kc, kc_delta_program, &c))
        kc_delta_compare(kc, &c);
    float *all[] = {c.u, c.z, c.a, c.b, c.conv, c.a_log, c.dt_bias, c.norm, c.conv_state, c.state};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}
