/* Reference: the router and the experts. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_weight.h"
#include "backend/cpu/ref_math.h"

#include <assert.h>
#include <string.h>

/* The best `topk` of logits [experts], by repeated search: > keeps the lowest of equal ids. */
static void ref_moe_choose(const float *logits, const struct moe_dims *dims, uint32_t *ids,
                           float *weights)
{
    double total = 0, chosen = 0, top = logits[0];
    for (uint32_t e = 1; e < dims->experts; e++)
        top = fmax(top, logits[e]);
    for (uint32_t e = 0; e < dims->experts; e++)
        total += exp(logits[e] - top);
    for (uint32_t i = 0; i < dims->topk; i++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t e = 0; e < dims->experts; e++) {
            bool taken = false;
            for (uint32_t j = 0; j < i; j++)
                taken |= ids[j] == e;
            if (!taken && (best == UINT32_MAX || logits[e] > logits[best]))
                best = e;
        }
        ids[i] = best;
        chosen += exp(logits[best] - top);
    }
    for (uint32_t i = 0; i < dims->topk; i++)
        weights[i] = (float)(exp(logits[ids[i]] - top) / (dims->renormalise ? chosen : total));
}

void ref_moe_route(struct device *device, const struct moe_route_args *args)
{
    const struct moe_dims *dims = &args->dims;
    size_t hidden = dims->hidden, experts = dims->experts;
    const float *x = cpu_at(args->x), *gain = cpu_at(args->gain);
    float *h = cpu_at(args->h), *weights = cpu_at(args->weights);
    float *shared_gate = cpu_at(args->shared_gate);
    uint32_t *ids = cpu_at(args->ids);
    float *w = cpu_scratch(device, 0, hidden, sizeof *w);
    float *logits = cpu_scratch(device, 1, args->rows * experts, sizeof *logits);
    if (!w || !logits)
        return;
    assert(dims->topk <= dims->experts);
    for (size_t r = 0; r < args->rows; r++)
        ref_rms_norm(x + r * hidden, gain, hidden, dims->eps, h + r * hidden);
    for (uint32_t e = 0; e < experts; e++) {
        cpu_weight_read_row(args->router, 0, e, w);
        for (size_t r = 0; r < args->rows; r++)
            logits[r * experts + e] = (float)ref_dot(w, h + r * hidden, hidden);
    }
    cpu_weight_read_row(args->shared_router, 0, 0, w);
    for (size_t r = 0; r < args->rows; r++) {
        shared_gate[r] = (float)ref_sigmoid(ref_dot(w, h + r * hidden, hidden));
        ref_moe_choose(logits + r * experts, dims, ids + r * dims->topk, weights + r * dims->topk);
    }
}

/* The rows that go through one expert, and the scratch of doing so. */
struct ref_moe_work {
    size_t rows;
    uint32_t *row; /* [rows] */
    float *scale;  /* [rows] */
    float *w[2];   /* decoded weight rows, [max(hidden, widths)] */
    float *act;    /* [rows, width] */
    double *sum;   /* [all rows, hidden] */
};

/* sum[row] += scale * down(silu(gate h) * up h) for the rows of the work list. */
static void ref_moe_expert(const struct moe_experts_args *args, struct ref_moe_work *work,
                           const struct weight *gate, const struct weight *up,
                           const struct weight *down, uint32_t item)
{
    size_t hidden = args->dims.hidden, width = gate->rows;
    const float *h = cpu_at(args->h);
    for (uint32_t o = 0; o < width; o++) {
        cpu_weight_read_row(gate, item, o, work->w[0]);
        cpu_weight_read_row(up, item, o, work->w[1]);
        for (size_t i = 0; i < work->rows; i++) {
            const float *from = h + work->row[i] * hidden;
            double g = ref_dot(work->w[0], from, hidden), u = ref_dot(work->w[1], from, hidden);
            work->act[i * width + o] = (float)(ref_silu(g) * u);
        }
    }
    for (uint32_t o = 0; o < hidden; o++) {
        cpu_weight_read_row(down, item, o, work->w[0]);
        for (size_t i = 0; i < work->rows; i++)
            work->sum[work->row[i] * hidden + o] +=
                work->scale[i] * ref_dot(work->w[0], work->act + i * width, width);
    }
}

/* Experts in ascending order whatever the batch, so that a row's result does not depend on its
 * neighbours. */
void ref_moe_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *dims = &args->dims;
    size_t rows = args->rows, hidden = dims->hidden;
    size_t width = dims->width > dims->shared_width ? dims->width : dims->shared_width;
    size_t longest = hidden > width ? hidden : width;
    const uint32_t *ids = cpu_at(args->ids);
    const float *weights = cpu_at(args->weights), *shared_gate = cpu_at(args->shared_gate);
    float *x = cpu_at(args->x);
    struct ref_moe_work work = {
        .row = cpu_scratch(device, 0, rows, sizeof *work.row),
        .scale = cpu_scratch(device, 1, rows, sizeof *work.scale),
        .w = {cpu_scratch(device, 2, longest, sizeof(float)),
              cpu_scratch(device, 3, longest, sizeof(float))},
        .act = cpu_scratch(device, 4, rows * width, sizeof *work.act),
        .sum = cpu_scratch(device, 5, rows * hidden, sizeof *work.sum),
    };
    if (!work.row || !work.scale || !work.w[0] || !work.w[1] || !work.act || !work.sum)
        return;
    memset(work.sum, 0, rows * hidden * sizeof *work.sum);
    for (uint32_t e = 0; e < dims->experts; e++) {
        work.rows = 0;
        for (uint32_t i = 0; i < rows * dims->topk; i++)
            if (ids[i] == e) {
                work.row[work.rows] = i / dims->topk;
                work.scale[work.rows++] = weights[i];
            }
        if (work.rows)
            ref_moe_expert(args, &work, args->gate, args->up, args->down, e);
    }
    for (uint32_t r = 0; r < rows; r++) {
        work.row[r] = r;
        work.scale[r] = shared_gate[r];
    }
    work.rows = rows;
    ref_moe_expert(args, &work, args->shared_gate_proj, args->shared_up, args->shared_down, 0);
    for (size_t i = 0; i < rows * hidden; i++)
        x[i] = (float)(x[i] + work.sum[i]);
}
