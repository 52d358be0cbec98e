/* Random inputs, error bounds, and plans of batches. */
#include "kcheck.h"

#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

uint32_t kc_between(struct kc *kc, uint32_t lo, uint32_t hi)
{
    return lo + (uint32_t)rand_below(&kc->rand, (uint64_t)hi - lo + 1);
}

bool kc_chance(struct kc *kc, double p)
{
    return rand_unit(&kc->rand) < p;
}

float *kc_normal(struct kc *kc, size_t n, double scale)
{
    float *x = mem_new(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(rand_normal(&kc->rand) * scale);
    return x;
}

uint32_t kc_pick_bits(struct kc *kc)
{
    static const uint32_t bits[] = {2, 3, 4, 5, 6, 8};
    return bits[rand_below(&kc->rand, 6)];
}

uint32_t kc_pick_group(struct kc *kc)
{
    return 32u << rand_below(&kc->rand, 3);
}

double kc_dot_bound(const struct kc *kc, double sum_abs, double sum_squares, size_t n)
{
    return 4 * KC_U * (sqrt((double)n) + 8) * sum_abs +
           4 * sqrt(2 * sum_squares) * kc->input_rounding;
}

void kc_peaks(const struct kc *kc, const struct weight *w, const double *h, double *p)
{
    bool rounds = kc->integer_inputs && w->kind == WEIGHT_AFFINE && w->bits == 4 && w->group == 64;
    for (uint32_t block = 0; block < w->cols; block += 64) {
        uint32_t end = w->cols - block < 64 ? w->cols : block + 64;
        double top = 0;
        for (uint32_t k = block; k < end && rounds; k++)
            top = fmax(top, fabs(h[k]));
        for (uint32_t k = block; k < end; k++)
            p[k] = top;
    }
}

double kc_peak_bound(double sum_squares)
{
    return 4 * KC_U_I16 * sqrt(sum_squares);
}

void kc_plan_make(struct kc *kc, struct kc_plan *plan, uint32_t seqs, uint32_t rows, bool exact,
                  uint32_t resume)
{
    assert(seqs >= 1 && seqs <= KC_SEQS);
    *plan = (struct kc_plan){.seqs = seqs, .slots = seqs + 3, .seed = rand_u64(&kc->rand)};
    plan->chunked = !kc->bench;
    for (uint32_t i = 0; i < seqs; i++) {
        struct kc_seq *q = &plan->seq[i];
        bool taken = true;
        while (taken) {
            q->slot = kc_between(kc, 0, plan->slots - 1);
            taken = false;
            for (uint32_t j = 0; j < i; j++)
                taken |= plan->seq[j].slot == q->slot;
        }
        q->rows = exact ? rows : kc_between(kc, 1, rows);
        q->start = resume && kc_chance(kc, 0.5) ? kc_between(kc, 1, resume) : 0;
        q->first = plan->total;
        plan->total += q->rows;
        if (q->start + q->rows > plan->max_pos)
            plan->max_pos = q->start + q->rows;
    }
    plan->segments = kc_buf(kc, "segments", KC_STAGE, NULL, KC_SEQS * sizeof(struct segment));
    plan->tokens = kc_buf(kc, "tokens", KC_STAGE, NULL, plan->total * 4ull);
}

/* This run has to be bit-equal with one that was cut otherwise. */
static bool kc_cut_again(const struct kc *kc, const struct kc_side *side)
{
    return kc->deterministic && side->run == 2;
}

struct rand kc_cuts(const struct kc *kc, const struct kc_side *side, uint64_t seed)
{
    return (struct rand){seed ^ (kc_cut_again(kc, side) ? 0x9e3779b97f4a7c15u : 0)};
}

uint32_t kc_piece(const struct kc *kc, const struct kc_side *side, struct rand *cuts, uint32_t left)
{
    if (!kc_cut_again(kc, side))
        return left;
    return 1 + (uint32_t)rand_below(cuts, rand_below(cuts, 2) && left > 6 ? 6 : left);
}

/* How many rows of sequence i go into the next batch. */
static uint32_t kc_plan_take(const struct kc *kc, const struct kc_side *side,
                             const struct kc_plan *plan, struct rand *rand, uint32_t left,
                             bool first)
{
    if (side->run == 0)
        return first && left ? 1 : 0;
    if ((!plan->chunked && !kc_cut_again(kc, side)) || left == 0)
        return left;
    switch (rand_below(rand, 4)) {
    case 0:
        return 0;
    case 1:
        return 1;
    case 2:
        return 1 + (uint32_t)rand_below(rand, left < 9 ? left : 9);
    default:
        return 1 + (uint32_t)rand_below(rand, left);
    }
}

bool kc_plan_next(struct kc *kc, const struct kc_side *side, const struct kc_plan *plan,
                  struct rand *rand, uint32_t *done, struct segment *segments,
                  struct batch_view *view, size_t *from)
{
    uint32_t rows = 0, count = 0, left = 0;
    for (uint32_t i = 0; i < plan->seqs; i++)
        left += plan->seq[i].rows - done[i];
    if (left == 0)
        return false;
    for (uint32_t turn = 0; rows == 0; turn++)
        for (uint32_t i = 0; i < plan->seqs; i++) {
            const struct kc_seq *q = &plan->seq[i];
            uint32_t n = kc_plan_take(kc, side, plan, rand, q->rows - done[i], rows == 0);
            if (n == 0)
                continue;
            segments[count++] = (struct segment){
                .slot = q->slot, .row = rows, .rows = n, .pos = q->start + done[i]};
            for (uint32_t t = 0; t < n; t++)
                from[rows++] = q->first + done[i]++;
        }
    kc_stage_write(kc, side, plan->segments, segments, count * sizeof *segments);
    *view = (struct batch_view){.rows = rows,
                                .segments = count,
                                .host_segments = segments,
                                .device_segments = kc_at(plan->segments, side),
                                .tokens = kc_at(plan->tokens, side)};
    return true;
}

void kc_gather(struct kc *kc, const struct kc_side *side, struct kc_buf *b, const float *all,
               const size_t *from, uint32_t rows, size_t width)
{
    float *stage = mem_new(rows * width, sizeof *stage);
    for (uint32_t r = 0; r < rows; r++)
        memcpy(stage + r * width, all + from[r] * width, width * sizeof *stage);
    kc_stage_write(kc, side, b, stage, rows * width * sizeof *stage);
    free(stage);
}

void kc_scatter(struct kc *kc, const struct kc_side *side, struct kc_buf *b, void *all,
                const size_t *from, uint32_t rows, size_t width)
{
    float *stage = mem_new(rows * width, sizeof *stage), *to = all;
    kc_stage_read(kc, side, b, stage, rows * width * sizeof *stage);
    for (uint32_t r = 0; r < rows; r++)
        memcpy(to + from[r] * width, stage + r * width, width * sizeof *stage);
    free(stage);
}
