/* kv_append and attention: chunks against one token at a time, scattered slots and pages.
 *
 * kv_append. q and k before rounding to storage:
 *   e = 24 u (|x| + |x'|) + 4 u angle (|x| + |x'|)  for a rotated pair (x, x'), else 24 u |x|
 * The angle is an f32 product of position and an f32 frequency; its error grows with the position.
 * In bf16 pages a value may differ from the exact one by half a unit in its last place and e.
 * Everything else in the pages stays bit by bit.
 *
 * attention. With s the scores, p the weights, N positions:
 *   e_s = dot bound of q.k / 16 over 256 terms + 2 u |s|;  e_p / p = 2 max e_s + u (16 + sqrt(N))
 *   y:  sigmoid(gate) (e_p/p sum p|v| + 4 sqrt(2) u_in sqrt(sum p^2 v^2)) + 8 u |y|
 * When kv_append runs before, q and k bring their own error (one unit of bf16 where k may round
 * the other way): e_s += (24 u + 2^-8 if bf16) sqrt(sum q^2 k^2) / 16 + 8 u pos sum_rot|q k| / 16.
 * Positions that nobody may read hold NaN. */
#include "kcheck.h"

#include "base/bf16.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 256, ROTATED = 64 };

struct kc_attention {
    struct attention_dims dims;
    struct kc_plan plan;
    uint32_t pages_max;
    bool append; /* kv_append before each attention call */
    bool attend;
    uint32_t *table;       /* [slots, pages_max] */
    float *qg, *k, *v, *q; /* [total, ...]; q only without append */
    double *keys, *values; /* exact or stored, [seq, max_pos, kv_heads, DIM] */
    double *queries;       /* [total, heads, DIM] */
    struct kc_buf *qg_rows, *k_rows, *v_rows, *q_rows, *y_rows;
    struct kc_buf *q_norm, *k_norm, *page_table, *k_pages, *v_pages, *q_all, *y_all;
};

static void kc_attention_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_attention *c = user;
    struct rand rand = kc_cuts(kc, side, c->plan.seed);
    uint32_t done[KC_SEQS] = {0};
    struct segment segments[KC_SEQS];
    struct batch_view view;
    size_t *from = mem_new(c->plan.total, sizeof *from), q_width = (size_t)c->dims.heads * DIM;
    while (kc_plan_next(kc, side, &c->plan, &rand, done, segments, &view, from)) {
        view.page_table = kc_at(c->page_table, side);
        view.pages_max = c->pages_max;
        kc_gather(kc, side, c->qg_rows, c->qg, from, view.rows, 2 * q_width);
        kc_stage_poison(kc, side, c->q_rows);
        if (c->append) {
            size_t kv_width = (size_t)c->dims.kv_heads * DIM;
            kc_gather(kc, side, c->k_rows, c->k, from, view.rows, kv_width);
            kc_gather(kc, side, c->v_rows, c->v, from, view.rows, kv_width);
            struct kv_append_args args = {.batch = &view,
                                          .dims = c->dims,
                                          .qg = kc_at(c->qg_rows, side),
                                          .k = kc_at(c->k_rows, side),
                                          .v = kc_at(c->v_rows, side),
                                          .q_norm = kc_at(c->q_norm, side),
                                          .k_norm = kc_at(c->k_norm, side),
                                          .k_pages = kc_at(c->k_pages, side),
                                          .v_pages = kc_at(c->v_pages, side),
                                          .q = kc_at(c->q_rows, side)};
            KC_CALL(kc, side, kv_append, &args);
            kc_scatter(kc, side, c->q_rows, c->q_all->result[side->run], from, view.rows, q_width);
        } else {
            kc_gather(kc, side, c->q_rows, c->q, from, view.rows, q_width);
        }
        if (!c->attend)
            continue;
        kc_stage_poison(kc, side, c->y_rows);
        struct attention_args args = {.batch = &view,
                                      .dims = c->dims,
                                      .q = kc_at(c->q_rows, side),
                                      .qg = kc_at(c->qg_rows, side),
                                      .k_pages = kc_at(c->k_pages, side),
                                      .v_pages = kc_at(c->v_pages, side),
                                      .y = kc_at(c->y_rows, side)};
        KC_CALL(kc, side, attention, &args);
        kc_scatter(kc, side, c->y_rows, c->y_all->result[side->run], from, view.rows, q_width);
    }
    free(from);
}

/* ---- exact values ------------------------------------------------------------------------- */

static size_t kc_attention_page_index(const struct kc_attention *c, const struct kc_seq *q,
                                      uint32_t pos, uint32_t kv_head)
{
    size_t page = c->table[(size_t)q->slot * c->pages_max + pos / KV_PAGE];
    return ((page * c->dims.kv_heads + kv_head) * KV_PAGE + pos % KV_PAGE) * DIM;
}

/* x = rope(rms_norm(from; gain), pos) and, when wanted, the tolerance of each value. */
static void kc_attention_rotate(const struct attention_dims *dims, const float *from,
                                const float *gain, uint32_t pos, double *x, double *tolerance)
{
    double mean = 0, n[DIM];
    for (int i = 0; i < DIM; i++)
        mean += (double)from[i] * from[i] / DIM;
    for (int i = 0; i < DIM; i++) {
        n[i] = x[i] = from[i] / sqrt(mean + dims->eps) * gain[i];
        if (tolerance)
            tolerance[i] = 24 * KC_U * fabs(n[i]) + 1e-37;
    }
    for (int i = 0; i < ROTATED / 2; i++) {
        float frequency = (float)pow(dims->rope_theta, -2.0 * i / ROTATED);
        float angle = (float)pos * frequency;
        int j = i + ROTATED / 2;
        x[i] = n[i] * cos(angle) - n[j] * sin(angle);
        x[j] = n[j] * cos(angle) + n[i] * sin(angle);
        if (tolerance)
            tolerance[i] = tolerance[j] =
                (24 + 4 * angle) * KC_U * (fabs(n[i]) + fabs(n[j])) + 1e-37;
    }
}

static double kc_attention_half_unit(double x) /* of bf16's last place */
{
    int exponent;
    frexp(x, &exponent);
    return x == 0 ? 0 : ldexp(1, exponent - 9);
}

/* Compares q and the pages with exact values; what was not appended must not have changed. */
static void kc_attention_compare_append(struct kc *kc, struct kc_attention *c, const float *q_gain,
                                        const float *k_gain)
{
    size_t heads = c->dims.heads, kv_heads = c->dims.kv_heads;
    size_t cells = c->dims.pages * kv_heads * KV_PAGE * DIM;
    bool bf16 = c->dims.kv_kind == KV_BF16, *written = mem_new(cells, sizeof *written);
    int got = kc->bench ? 2 : 1;
    for (uint32_t s = 0; s < c->plan.seqs; s++)
        for (uint32_t t = 0; t < c->plan.seq[s].rows; t++) {
            const struct kc_seq *seq = &c->plan.seq[s];
            size_t row = seq->first + t;
            uint32_t pos = seq->start + t;
            double x[DIM], e[DIM];
            for (size_t h = 0; h < heads; h++) {
                const float *q = (const float *)c->q_all->result[got] + (row * heads + h) * DIM;
                kc_attention_rotate(&c->dims, c->qg + (row * heads + h) * 2 * DIM, q_gain, pos, x,
                                    e);
                for (size_t i = 0; i < DIM; i++)
                    kc_compare_value(kc, "q", (row * heads + h) * DIM + i, x[i], q[i], e[i]);
            }
            for (uint32_t h = 0; h < kv_heads; h++) {
                size_t at = kc_attention_page_index(c, seq, pos, h),
                       in = (row * kv_heads + h) * DIM;
                kc_attention_rotate(&c->dims, c->k + in, k_gain, pos, x, e);
                for (size_t i = 0; i < DIM; i++) {
                    written[at + i] = true;
                    double k = bf16 ? bf16_to_f32(((uint16_t *)c->k_pages->result[got])[at + i])
                                    : ((float *)c->k_pages->result[got])[at + i];
                    double v = bf16 ? bf16_to_f32(((uint16_t *)c->v_pages->result[got])[at + i])
                                    : ((float *)c->v_pages->result[got])[at + i];
                    float want_v = bf16 ? bf16_round(c->v[in + i]) : c->v[in + i];
                    /* The rounding to bf16 is granted; what is left must be within e. */
                    double half = bf16 ? kc_attention_half_unit(x[i]) : 0;
                    k = fabs(k - x[i]) <= half ? x[i] : k > x[i] ? k - half : k + half;
                    kc_compare_value(kc, "k_pages", at + i, x[i], k, e[i]);
                    kc_compare_value(kc, "v_pages", at + i, want_v, v, 0);
                }
            }
        }
    size_t item = bf16 ? 2 : 4;
    for (size_t i = 0; i < cells; i++)
        if (!written[i] &&
            (memcmp(c->k_pages->result[got] + i * item, c->k_pages->init + i * item, item) ||
             memcmp(c->v_pages->result[got] + i * item, c->v_pages->init + i * item, item))) {
            kc_fail(kc, "pages: element %zu is nobody's and was changed", i);
            break;
        }
    free(written);
}

/* Tolerances of y of one row and head. keys, values: what the head may read, f64 [ctx, stride]. */
static void kc_attention_bound_head(const struct kc *kc, const struct kc_attention *c,
                                    const double *q, const double *keys, const double *values,
                                    size_t stride, uint32_t ctx, const float *gate, double *bound)
{
    double *s = mem_new(ctx, sizeof *s), top = -INFINITY, total = 0, e_s = 0;
    bool bf16 = c->dims.kv_kind == KV_BF16;
    for (uint32_t p = 0; p < ctx; p++) {
        double sum = 0, magnitude = 0, squares = 0, rotated = 0;
        for (size_t i = 0; i < DIM; i++) {
            double x = q[i] * keys[p * stride + i];
            sum += x;
            magnitude += fabs(x);
            squares += x * x;
            rotated += i < ROTATED ? fabs(x) : 0;
        }
        s[p] = sum / 16;
        top = fmax(top, s[p]);
        double e = kc_dot_bound(kc, magnitude, squares, DIM) / 16 + 2 * KC_U * fabs(s[p]);
        if (c->append)
            e += (24 * KC_U + (bf16 ? 0x1p-8 : 0)) * sqrt(squares) / 16 +
                 8 * KC_U * ctx * rotated / 16;
        e_s = fmax(e_s, e);
    }
    for (uint32_t p = 0; p < ctx; p++)
        total += s[p] = exp(s[p] - top);
    for (size_t i = 0; i < DIM; i++) {
        double sum = 0, magnitude = 0, squares = 0;
        for (uint32_t p = 0; p < ctx; p++) {
            double x = s[p] / total * values[p * stride + i];
            sum += x;
            magnitude += fabs(x);
            squares += x * x;
        }
        double open = 1 / (1 + exp(-(double)gate[i]));
        bound[i] = open * ((2 * e_s + KC_U * (16 + sqrt(ctx))) * magnitude +
                           4 * sqrt(2 * squares) * kc->input_rounding) +
                   8 * KC_U * fabs(open * sum) + 1e-37;
    }
    free(s);
}

static void kc_attention_compare(struct kc *kc, const struct kc_attention *c)
{
    size_t heads = c->dims.heads, kv_heads = c->dims.kv_heads, n = c->plan.total * heads * DIM;
    double *bound = mem_new(n, sizeof *bound);
    for (uint32_t s = 0; s < c->plan.seqs; s++)
        for (uint32_t t = 0; t < c->plan.seq[s].rows; t++)
            for (size_t h = 0; h < heads; h++) {
                size_t row = (c->plan.seq[s].first + t) * heads + h;
                size_t base =
                    ((size_t)s * c->plan.max_pos * kv_heads + h / (heads / kv_heads)) * DIM;
                kc_attention_bound_head(
                    kc, c, c->queries + row * DIM, c->keys + base, c->values + base, kv_heads * DIM,
                    c->plan.seq[s].start + t + 1, c->qg + row * 2 * DIM + DIM, bound + row * DIM);
            }
    kc_compare(kc, c->y_all, NULL, bound, n);
    free(bound);
}

/* ---- inputs ------------------------------------------------------------------------------- */

static void kc_attention_put(struct kc_attention *c, uint8_t *pages, size_t at, double *x)
{
    for (size_t i = 0; i < DIM; i++) {
        if (c->dims.kv_kind == KV_BF16) {
            ((uint16_t *)pages)[at + i] = bf16_from_f32((float)x[i]);
            x[i] = bf16_round((float)x[i]);
        } else {
            ((float *)pages)[at + i] = (float)x[i];
            x[i] = (float)x[i];
        }
    }
}

/* keys and values of every position that a row of this case reads; in the pages go those that are
 * there before: all of them without append, else the ones before the plan's start. */
static void kc_attention_fill(struct kc *kc, struct kc_attention *c, const float *k_gain,
                              uint8_t *k_pages, uint8_t *v_pages)
{
    size_t kv_heads = c->dims.kv_heads;
    for (uint32_t s = 0; s < c->plan.seqs; s++) {
        const struct kc_seq *seq = &c->plan.seq[s];
        for (uint32_t pos = 0; pos < seq->start + seq->rows; pos++)
            for (uint32_t h = 0; h < kv_heads; h++) {
                size_t to = (((size_t)s * c->plan.max_pos + pos) * kv_heads + h) * DIM;
                double *k = c->keys + to, *v = c->values + to;
                if (pos < seq->start || !c->append) {
                    for (size_t i = 0; i < DIM; i++) {
                        k[i] = rand_normal(&kc->rand);
                        v[i] = rand_normal(&kc->rand);
                    }
                    size_t at = kc_attention_page_index(c, seq, pos, h);
                    kc_attention_put(c, k_pages, at, k);
                    kc_attention_put(c, v_pages, at, v);
                    continue;
                }
                size_t in = ((seq->first + pos - seq->start) * kv_heads + h) * DIM;
                kc_attention_rotate(&c->dims, c->k + in, k_gain, pos, k, NULL);
                for (size_t i = 0; i < DIM; i++)
                    v[i] = c->v[in + i];
            }
    }
}

/* Distinct random pages for every position of every sequence; the table's rest is no page. */
static void kc_attention_pages(struct kc *kc, struct kc_attention *c)
{
    c->pages_max = (c->plan.max_pos + KV_PAGE - 1) / KV_PAGE + kc_between(kc, 0, 2);
    uint32_t first[KC_SEQS], n = 2;
    for (uint32_t s = 0; s < c->plan.seqs; s++) {
        first[s] = c->attend ? 0 : c->plan.seq[s].start / KV_PAGE; /* what kv_append reaches */
        n += (c->plan.seq[s].start + c->plan.seq[s].rows - 1) / KV_PAGE - first[s] + 1;
    }
    c->dims.pages = n;
    uint32_t *order = mem_new(n, sizeof *order);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = kc_between(kc, 0, i);
        order[i] = order[j];
        order[j] = i;
    }
    c->table = mem_new((size_t)c->plan.slots * c->pages_max, sizeof *c->table);
    memset(c->table, 0xff, (size_t)c->plan.slots * c->pages_max * sizeof *c->table);
    uint32_t next = 0;
    for (uint32_t s = 0; s < c->plan.seqs; s++)
        for (uint32_t p = first[s]; p * KV_PAGE < c->plan.seq[s].start + c->plan.seq[s].rows; p++)
            c->table[c->plan.seq[s].slot * c->pages_max + p] = order[next++];
    free(order);
}

static void kc_attention_inputs(struct kc *kc, struct kc_attention *c)
{
    size_t total = c->plan.total, heads = c->dims.heads, kv_heads = c->dims.kv_heads;
    size_t item = c->dims.kv_kind == KV_BF16 ? 2 : 4;
    size_t q_bytes = total * heads * DIM * 4, kv_bytes = total * kv_heads * DIM * 4;
    kc_attention_pages(kc, c);
    float *q_gain = kc_normal(kc, DIM, 0.2), *k_gain = kc_normal(kc, DIM, 0.2);
    for (size_t i = 0; i < DIM; i++) {
        q_gain[i] += 1;
        k_gain[i] += 1;
    }
    c->qg = kc_normal(kc, total * heads * 2 * DIM, 1.5);
    c->q = kc_normal(kc, total * heads * DIM, 1);
    c->k = kc_normal(kc, total * kv_heads * DIM, 2);
    c->v = kc_normal(kc, total * kv_heads * DIM, 1);
    size_t positions = c->attend ? (size_t)c->plan.seqs * c->plan.max_pos * kv_heads * DIM : 0;
    c->keys = mem_new(positions, sizeof *c->keys);
    c->values = mem_new(positions, sizeof *c->values);
    c->queries = mem_new(total * heads * DIM, sizeof *c->queries);
    size_t page_bytes = c->dims.pages * kv_heads * KV_PAGE * DIM * item;
    uint8_t *k_pages = mem_new(page_bytes, 1), *v_pages = mem_new(page_bytes, 1);
    memset(k_pages, 0xff, page_bytes); /* NaN in both kinds */
    memset(v_pages, 0xff, page_bytes);
    if (c->attend)
        kc_attention_fill(kc, c, k_gain, k_pages, v_pages);
    for (size_t i = 0; i < page_bytes && !c->attend; i++)
        k_pages[i] = v_pages[i] = (uint8_t)(i * 151 >> 3);
    for (uint32_t s = 0; s < c->plan.seqs; s++)
        for (uint32_t t = 0; t < c->plan.seq[s].rows; t++)
            for (size_t h = 0; h < heads; h++) {
                size_t row = (c->plan.seq[s].first + t) * heads + h;
                if (c->append)
                    kc_attention_rotate(&c->dims, c->qg + row * 2 * DIM, q_gain,
                                        c->plan.seq[s].start + t, c->queries + row * DIM, NULL);
                for (size_t i = 0; i < DIM && !c->append; i++)
                    c->queries[row * DIM + i] = c->q[row * DIM + i];
            }
    c->qg_rows = kc_buf(kc, "qg", KC_STAGE, NULL, 2 * q_bytes);
    c->k_rows = kc_buf(kc, "k", KC_STAGE, NULL, kv_bytes);
    c->v_rows = kc_buf(kc, "v", KC_STAGE, NULL, kv_bytes);
    c->q_rows = kc_buf(kc, "q", KC_STAGE, NULL, q_bytes);
    c->y_rows = kc_buf(kc, "y", KC_STAGE, NULL, q_bytes);
    c->q_norm = kc_buf(kc, "q_norm", KC_IN, q_gain, DIM * 4);
    c->k_norm = kc_buf(kc, "k_norm", KC_IN, k_gain, DIM * 4);
    c->page_table = kc_buf(kc, "page_table", KC_IN, c->table, c->plan.slots * c->pages_max * 4ull);
    c->k_pages = kc_buf(kc, "k_pages", c->append ? KC_OUT : KC_IN, k_pages, page_bytes);
    c->v_pages = kc_buf(kc, "v_pages", c->append ? KC_OUT : KC_IN, v_pages, page_bytes);
    c->q_all = kc_buf(kc, "q", KC_HOST, NULL, q_bytes);
    c->y_all = kc_buf(kc, "y", KC_HOST, NULL, q_bytes);
    free(q_gain);
    free(k_gain);
    free(k_pages);
    free(v_pages);
}

static void kc_attention_free(struct kc_attention *c)
{
    void *all[] = {c->table, c->qg, c->k, c->v, c->q, c->keys, c->values, c->queries};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* An edge of attention alone: a row at the end of more blocks than a warp or simdgroup has lanes */
enum { KC_ATTENTION_FAR = 26 };

static void kc_attention_shape(struct kc *kc, struct kc_attention *c)
{
    static const uint32_t edge_heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {8, 1}, {6, 2}, {16, 2}};
    static const uint32_t edge_rows[] = {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 129};
    static const uint32_t edge_ctx[] = {0, 1, 31, 32, 63, 64, 127, 255, 256, 257, 511, 513};
    uint32_t index = (uint32_t)kc->index;
    const uint32_t *heads = edge_heads[kc_between(kc, 0, 5)];
    c->dims = (struct attention_dims){.rope_theta = 1e7f, .eps = kc_eps(kc)};
    c->dims.kv_kind = device_head(kc->dev)->kv_kind;
    bool both = !strncmp(kc->level, "cpu/", 4) || !strncmp(kc->level, "metal", 5);
    if (both && !kc->bench)
        c->dims.kv_kind = kc_chance(kc, 0.5) ? KV_BF16 : KV_F32;
    if (kc->pool == KC_REAL) { /* decode of one and of four, a short prefill; then far away */
        static const struct {
            uint32_t seqs, rows, ctx;
        } real[] = {{1, 1, 2000}, {4, 1, 700}, {1, 40, 300}, {1, 1, 16384}, {1, 32, 4096}};
        heads = edge_heads[5];
        kc_plan_make(kc, &c->plan, real[index].seqs, real[index].rows, true, 1);
        for (uint32_t i = 0; i < c->plan.seqs; i++)
            c->plan.seq[i].start = real[index].ctx + 100 * i;
    } else if (kc->pool == KC_EDGE) {
        heads = edge_heads[index % 6];
        bool one = index < 12 || index == KC_ATTENTION_FAR;
        kc_plan_make(kc, &c->plan, one ? 1 : 2, one ? 1 : edge_rows[index - 12], true, 0);
        c->plan.seq[0].start = index == KC_ATTENTION_FAR ? 8449 : edge_ctx[index % 12];
        c->plan.chunked &= index % 2 == 0;
    } else {
        kc_plan_make(kc, &c->plan, kc_between(kc, 1, 4), kc_chance(kc, 0.2) ? 300 : 40, false, 300);
    }
    c->plan.max_pos = 0;
    if (!c->attend && kc->pool != KC_EDGE && kc_chance(kc, 0.3)) /* pages near must not matter */
        c->plan.seq[0].start += kc_between(kc, 1, 262000 - 3000);
    for (uint32_t i = 0; i < c->plan.seqs; i++) {
        uint32_t end = c->plan.seq[i].start + c->plan.seq[i].rows;
        c->plan.max_pos = end > c->plan.max_pos ? end : c->plan.max_pos;
    }
    c->dims.heads = heads[0];
    c->dims.kv_heads = heads[1];
    snprintf(kc->shape, sizeof kc->shape, "heads %u/%u, sequences %u, rows %u, ctx %u, %s%s%s",
             heads[0], heads[1], c->plan.seqs, c->plan.total, c->plan.max_pos,
             c->dims.kv_kind == KV_BF16 ? "bf16" : "f32", c->plan.chunked ? ", chunks" : "",
             c->append && c->attend ? ", after kv_append" : "");
}

void kc_check_kv_append(struct kc *kc)
{
    struct kc_attention c = {.append = true};
    kc_attention_shape(kc, &c);
    kc_attention_inputs(kc, &c);
    size_t item = c.dims.kv_kind == KV_BF16 ? 2 : 4;
    kc->bytes = c.plan.total * (double)DIM *
                (3.0 * 4 * c.dims.heads + (8.0 + 2 * (double)item) * c.dims.kv_heads);
    kc->flops = c.plan.total * (double)DIM * 6 * (c.dims.heads + c.dims.kv_heads);
    if (kc_run(kc, kc_attention_program, &c))
        kc_attention_compare_append(kc, &c, (const float *)c.q_norm->init,
                                    (const float *)c.k_norm->init);
    kc_attention_free(&c);
}

void kc_check_attention(struct kc *kc)
{
    struct kc_attention c = {.attend = true};
    c.append = kc->index % 2 && !kc->bench;
    kc_attention_shape(kc, &c);
    kc_attention_inputs(kc, &c);
    size_t item = c.dims.kv_kind == KV_BF16 ? 2 : 4;
    kc->bytes = c.plan.total * (double)DIM * 4 * 3 * c.dims.heads;
    for (uint32_t i = 0; i < c.plan.seqs; i++) {
        const struct kc_seq *q = &c.plan.seq[i];
        kc->bytes += 2.0 * (q->start + q->rows) * (double)item * c.dims.kv_heads * DIM;
        kc->flops += 4.0 * q->rows * (q->start + q->rows / 2.0) * c.dims.heads * DIM;
    }
    if (kc_run(kc, kc_attention_program, &c))
        kc_attention_compare(kc, &c);
    kc_attention_free(&c);
}
