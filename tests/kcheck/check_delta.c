/* delta: chunks against one token at a time.
 *
 * Tolerances come from the recurrence in f64. Errors of S do not grow from step to step: the decay
 * is at most 1 and (I - beta k k^T) has norm at most 1 for unit k. So with T steps since the start,
 *   column j of S:  e_j = 32 u sqrt(128) (1 + sqrt(T)) kappa max_t(|S_j| + |v_j|)
 * where kappa >= 1 is how much the l2 norms magnify the convolution's rounding (its sum of
 * magnitudes over its norm). o = S^T q has |q| <= 1/sqrt(128), so its error is e_j too, and
 *   y:  |w silu(z)| r (e_j + |o_j| r rms(e)) + 16 u |y|,   r = rsqrt(mean(o^2) + eps)
 * The convolution's state must be the input rows bit by bit. */
#include "kcheck.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 128 };

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
    struct rand rand = {c->plan.seed};
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

/* Vectors of one row and head after the convolution, in f64: q^, k^, v and kappa. */
static double kc_delta_vectors(const struct kc_delta *c, const struct kc_seq *q, uint32_t t,
                               uint32_t head, double vectors[3][DIM])
{
    uint32_t key_heads = c->dims.key_heads, key = head / (c->dims.value_heads / key_heads);
    size_t base[3] = {key * DIM, (key_heads + key) * DIM, (2 * key_heads + head) * DIM};
    double kappa = 1;
    for (int part = 0; part < 3; part++) {
        double squares = 0, magnitudes = 0;
        for (size_t i = 0; i < DIM; i++) {
            size_t ch = base[part] + i;
            double sum = 0, magnitude = 0;
            for (uint32_t j = 0; j < 4; j++) {
                double x = 0; /* row t - 3 + j, or what the state held */
                if (t + j >= 3)
                    x = c->u[(q->first + t + j - 3) * c->channels + ch];
                else if (q->start)
                    x = c->conv_state[(q->slot * 3 + t + j) * c->channels + ch];
                sum += c->conv[ch * 4 + j] * x;
                magnitude += fabs(c->conv[ch * 4 + j] * x);
            }
            vectors[part][i] = sum * kc_delta_sigmoid(sum);
            squares += vectors[part][i] * vectors[part][i];
            magnitudes += magnitude * magnitude;
        }
        double scale = part == 0 ? 1 / sqrt(DIM) : 1;
        for (size_t i = 0; i < DIM && part < 2; i++)
            vectors[part][i] *= scale / sqrt(squares + 1e-6);
        if (part < 2 && sqrt(magnitudes / (squares + 1e-6)) > kappa)
            kappa = sqrt(magnitudes / (squares + 1e-6));
    }
    return kappa;
}

/* One head of one sequence: tolerances of its y rows and of its state. */
static void kc_delta_bound_head(const struct kc_delta *c, const struct kc_seq *q, uint32_t h,
                                double *y_bound, double *state_bound)
{
    static double s[DIM][DIM];
    double kappa = 1, largest[DIM] = {0}, e[DIM];
    for (size_t i = 0; i < DIM; i++)
        for (size_t j = 0; j < DIM; j++)
            s[i][j] =
                q->start
                    ? c->state[(((size_t)q->slot * c->dims.value_heads + h) * DIM + i) * DIM + j]
                    : 0;
    for (uint32_t t = 0; t < q->rows; t++) {
        double x[3][DIM], o[DIM] = {0}, d[DIM] = {0}, norms[DIM] = {0}, square = 0, errors = 0;
        size_t row = (q->first + t) * c->dims.value_heads + h;
        kappa = fmax(kappa, kc_delta_vectors(c, q, t, h, x));
        double decay = exp(-exp(c->a_log[h]) * log1p(exp((double)c->a[row] + c->dt_bias[h])));
        double beta = kc_delta_sigmoid(c->b[row]);
        for (size_t i = 0; i < DIM; i++)
            for (size_t j = 0; j < DIM; j++) {
                norms[j] += s[i][j] * s[i][j];
                s[i][j] *= decay;
                d[j] += s[i][j] * x[1][i];
            }
        for (size_t i = 0; i < DIM; i++)
            for (size_t j = 0; j < DIM; j++) {
                s[i][j] += x[1][i] * beta * (x[2][j] - d[j]);
                o[j] += s[i][j] * x[0][i];
            }
        for (size_t j = 0; j < DIM; j++) {
            largest[j] = fmax(largest[j], sqrt(norms[j]) + fabs(x[2][j]));
            e[j] = 32 * KC_U * sqrt(DIM) * (1 + sqrt(t + 1)) * kappa * largest[j];
            square += o[j] * o[j] / DIM;
            errors += e[j] * e[j] / DIM;
        }
        double r = 1 / sqrt(square + c->dims.eps);
        for (size_t j = 0; j < DIM; j++) {
            double z = c->z[row * DIM + j], gate = fabs(c->norm[j] * z * kc_delta_sigmoid(z)) * r;
            y_bound[row * DIM + j] = gate * (e[j] + fabs(o[j]) * r * sqrt(errors)) +
                                     16 * KC_U * gate * fabs(o[j]) + 1e-30;
        }
    }
    for (size_t i = 0; i < DIM; i++)
        for (size_t j = 0; j < DIM; j++)
            state_bound[(((size_t)q->slot * c->dims.value_heads + h) * DIM + i) * DIM + j] = e[j];
}

static void kc_delta_compare(struct kc *kc, const struct kc_delta *c)
{
    size_t ys = c->plan.total * c->values, states = c->plan.slots * c->values * DIM;
    double *y = mem_new(ys, sizeof *y), *state = mem_new(states, sizeof *state);
    for (uint32_t i = 0; i < c->plan.seqs; i++)
        for (uint32_t h = 0; h < c->dims.value_heads; h++)
            kc_delta_bound_head(c, &c->plan.seq[i], h, y, state);
    kc_compare(kc, c->y, NULL, y, ys);
    kc_compare(kc, c->states, NULL, state, states); /* tolerance 0 where a slot was not touched */
    kc_compare_bytes(kc, c->conv_states);
    free(y);
    free(state);
}

/* Decays of every kind: usual ones, none at all, complete (g = -30 and below), and alternating. */
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
        if (kc_chance(kc, 0.02))
            c->b[i] = kc_chance(kc, 0.5) ? 40 : -40;
    }
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
    struct kc_delta c = {.dims = {.eps = 1e-6f}};
    uint32_t gates = kc_between(kc, 0, 5), index = (uint32_t)kc->index;
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
        gates = index >= 20 ? index - 20 : gates;
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
