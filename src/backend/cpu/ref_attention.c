/* Reference: q/k norm, rotation and the append to the KV pages; causal attention over them. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/ref_math.h"
#include "base/bf16.h"

#include <assert.h>
#include <string.h>

enum { DIM = 256, ROTATED = 64 };

/* Element index of (position, kv head) in a layer's pages, for the sequence in `slot`. 64 bits:
 * ten layers of 262,144 positions pass 2^31 elements. */
static uint64_t ref_attention_kv_index(const struct batch_view *batch,
                                       const struct attention_dims *dims, uint32_t slot,
                                       uint32_t pos, uint32_t kv_head)
{
    const uint32_t *table = cpu_at(batch->page_table);
    assert(pos / KV_PAGE < batch->pages_max);
    uint64_t page = table[(uint64_t)slot * batch->pages_max + pos / KV_PAGE];
    assert(page < dims->pages);
    return ((page * dims->kv_heads + kv_head) * KV_PAGE + pos % KV_PAGE) * DIM;
}

/* Rotates the pairs (x_i, x_i+32). Frequency and angle are rounded to f32, as the published model
 * code does: at large positions the rounding is part of what the model was trained with. */
static void ref_attention_rope(float *x, uint32_t pos, float theta)
{
    for (int i = 0; i < ROTATED / 2; i++) {
        float frequency = (float)pow(theta, -2.0 * i / ROTATED);
        float angle = (float)pos * frequency;
        double c = cos(angle), s = sin(angle), lo = x[i], hi = x[i + ROTATED / 2];
        x[i] = (float)(lo * c - hi * s);
        x[i + ROTATED / 2] = (float)(hi * c + lo * s);
    }
}

static void ref_attention_store(struct span pages, enum kv_kind kind, uint64_t at, const float *x)
{
    if (kind == KV_F32) {
        memcpy((float *)cpu_at(pages) + at, x, DIM * sizeof *x);
        return;
    }
    uint16_t *to = (uint16_t *)cpu_at(pages) + at;
    for (int k = 0; k < DIM; k++)
        to[k] = bf16_from_f32(x[k]);
}

static void ref_attention_load(struct span pages, enum kv_kind kind, uint64_t at, float *x)
{
    if (kind == KV_F32) {
        memcpy(x, (const float *)cpu_at(pages) + at, DIM * sizeof *x);
        return;
    }
    const uint16_t *from = (const uint16_t *)cpu_at(pages) + at;
    for (int k = 0; k < DIM; k++)
        x[k] = bf16_to_f32(from[k]);
}

void ref_kv_append(struct device *device, const struct kv_append_args *args)
{
    (void)device;
    const struct attention_dims *dims = &args->dims;
    for (uint32_t i = 0; i < args->batch->segments; i++) {
        const struct segment *s = &args->batch->host_segments[i];
        for (uint32_t t = 0; t < s->rows; t++) {
            size_t row = (size_t)s->row + t;
            uint32_t pos = s->pos + t;
            const float *qg = (const float *)cpu_at(args->qg) + row * dims->heads * 2 * DIM;
            float *q = (float *)cpu_at(args->q) + row * dims->heads * DIM;
            for (uint32_t j = 0; j < dims->heads; j++) {
                ref_rms_norm(qg + (size_t)j * 2 * DIM, cpu_at(args->q_norm), DIM, dims->eps,
                             q + (size_t)j * DIM);
                ref_attention_rope(q + (size_t)j * DIM, pos, dims->rope_theta);
            }
            for (uint32_t j = 0; j < dims->kv_heads; j++) {
                size_t from = (row * dims->kv_heads + j) * DIM;
                uint64_t at = ref_attention_kv_index(args->batch, dims, s->slot, pos, j);
                float k[DIM];
                ref_rms_norm((const float *)cpu_at(args->k) + from, cpu_at(args->k_norm), DIM,
                             dims->eps, k);
                ref_attention_rope(k, pos, dims->rope_theta);
                ref_attention_store(args->k_pages, dims->kv_kind, at, k);
                ref_attention_store(args->v_pages, dims->kv_kind, at,
                                    (const float *)cpu_at(args->v) + from);
            }
        }
    }
}

/* One row and one KV head: the `group` query heads that read it.
 * scores: f64 [group, pos + 1], then their sums f64 [group, DIM]. */
static void ref_attention_group(const struct attention_args *args, uint32_t slot, size_t row,
                                uint32_t pos, uint32_t kv_head, double *scores)
{
    const struct attention_dims *dims = &args->dims;
    uint32_t group = dims->heads / dims->kv_heads;
    size_t ctx = (size_t)pos + 1, head = row * dims->heads + (size_t)kv_head * group;
    const float *q = (const float *)cpu_at(args->q) + head * DIM;
    const float *qg = (const float *)cpu_at(args->qg) + head * 2 * DIM;
    float *y = (float *)cpu_at(args->y) + head * DIM;
    float x[DIM];
    for (uint32_t p = 0; p < ctx; p++) {
        ref_attention_load(args->k_pages, dims->kv_kind,
                           ref_attention_kv_index(args->batch, dims, slot, p, kv_head), x);
        for (uint32_t j = 0; j < group; j++)
            scores[j * ctx + p] = ref_dot(q + (size_t)j * DIM, x, DIM) / 16;
    }
    for (uint32_t j = 0; j < group; j++) {
        double top = scores[j * ctx], total = 0;
        for (size_t p = 1; p < ctx; p++)
            top = fmax(top, scores[j * ctx + p]);
        for (size_t p = 0; p < ctx; p++)
            total += scores[j * ctx + p] = exp(scores[j * ctx + p] - top);
        for (size_t p = 0; p < ctx; p++)
            scores[j * ctx + p] /= total;
    }
    double *sum = scores + group * ctx; /* [group, DIM] */
    memset(sum, 0, (size_t)group * DIM * sizeof *sum);
    for (uint32_t p = 0; p < ctx; p++) {
        ref_attention_load(args->v_pages, dims->kv_kind,
                           ref_attention_kv_index(args->batch, dims, slot, p, kv_head), x);
        for (uint32_t j = 0; j < group; j++)
            for (int k = 0; k < DIM; k++)
                sum[j * DIM + k] += scores[j * ctx + p] * x[k];
    }
    for (uint32_t j = 0; j < group; j++)
        for (int k = 0; k < DIM; k++)
            y[j * DIM + k] = (float)(sum[j * DIM + k] * ref_sigmoid(qg[j * 2 * DIM + DIM + k]));
}

uint64_t ref_attention_scratch(const struct device *device, const struct attention_dims *dims,
                               const struct batch_view *batch)
{
    (void)device;
    uint64_t longest = 0, group = dims->heads / dims->kv_heads;
    for (uint32_t i = 0; i < batch->segments; i++) {
        uint64_t ctx = (uint64_t)batch->host_segments[i].pos + batch->host_segments[i].rows;
        longest = ctx > longest ? ctx : longest;
    }
    return group * (longest + DIM) * sizeof(double);
}

void ref_attention(struct device *device, const struct attention_args *args)
{
    const struct attention_dims *dims = &args->dims;
    double *scores = cpu_scratch(device, 0, ref_attention_scratch(device, dims, args->batch), 1);
    if (!scores)
        return;
    for (uint32_t i = 0; i < args->batch->segments; i++) {
        const struct segment *s = &args->batch->host_segments[i];
        for (uint32_t t = 0; t < s->rows; t++)
            for (uint32_t j = 0; j < dims->kv_heads; j++)
                ref_attention_group(args, s->slot, (size_t)s->row + t, s->pos + t, j, scores);
    }
}
