/* Buffers with guards and poison, weights, and the three runs of a case. */
#include "kcheck.h"

#include "base/bf16.h"
#include "base/clock.h"
#include "base/mem.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t kc_poison_bytes[4] = {0xad, 0xde, 0xc0, 0x7f}; /* a NaN; a huge index */
static const uint8_t kc_guard_byte = 0xa5;

void kc_fail(struct kc *kc, const char *fmt, ...)
{
    if (kc->failed)
        return;
    kc->failed = true;
    va_list args;
    va_start(args, fmt);
    vsnprintf(kc->message, sizeof kc->message, fmt, args);
    va_end(args);
}

/* ---- buffers ------------------------------------------------------------------------------ */

static uint8_t kc_poison_at(uint64_t i)
{
    return kc_poison_bytes[i % 4];
}

static struct device *kc_device(struct kc *kc, int side)
{
    return side ? kc->dev : kc->ref;
}

struct kc_buf *kc_buf(struct kc *kc, const char *name, enum kc_use use, const void *data,
                      uint64_t bytes)
{
    assert(kc->buf_count < KC_ITEMS);
    struct kc_buf *b = &kc->bufs[kc->buf_count++];
    *b = (struct kc_buf){.name = name, .bytes = bytes, .use = use};
    if (data) {
        b->init = mem_new(bytes, 1);
        memcpy(b->init, data, bytes);
    }
    if (use == KC_OUT || use == KC_HOST)
        for (int run = 0; run < 3; run++)
            b->result[run] = mem_new(bytes, 1);
    for (int side = 0; side < 2 && use != KC_HOST; side++) {
        struct device *device = kc_device(kc, side);
        struct err err = {0};
        if (!device_calls(device)->alloc(device, bytes + 2 * KC_GUARD, &b->span[side], &err)) {
            kc->skipped = true;
            snprintf(kc->message, sizeof kc->message, "%.300s", err.text);
            b->span[side] = (struct span){0};
        } else {
            b->span[side] = span_at(b->span[side], KC_GUARD);
        }
    }
    return b;
}

/* Guards, and the initial contents between them. */
static void kc_buf_reset(struct kc *kc, const struct kc_side *side, struct kc_buf *b)
{
    (void)kc;
    uint64_t all = b->bytes + 2 * KC_GUARD;
    uint8_t *bytes = mem_new(all, 1);
    memset(bytes, kc_guard_byte, all);
    for (uint64_t i = 0; i < b->bytes; i++)
        bytes[KC_GUARD + i] = b->init ? b->init[i] : kc_poison_at(i);
    struct span whole = kc_at(b, side);
    whole.offset -= KC_GUARD;
    device_calls(side->device)->write(side->device, whole, bytes, all);
    free(bytes);
}

/* Reads contents [bytes] and checks the guards. */
static void kc_buf_fetch(struct kc *kc, const struct kc_side *side, struct kc_buf *b, uint8_t *to)
{
    uint64_t all = b->bytes + 2 * KC_GUARD;
    uint8_t *bytes = mem_new(all, 1);
    struct span whole = kc_at(b, side);
    whole.offset -= KC_GUARD;
    device_calls(side->device)->read(side->device, bytes, whole, all);
    for (uint64_t i = 0; i < KC_GUARD; i++) {
        if (bytes[i] != kc_guard_byte)
            kc_fail(kc, "%s: wrote %d bytes before its begin", b->name, (int)(KC_GUARD - i));
        if (bytes[KC_GUARD + b->bytes + i] != kc_guard_byte)
            kc_fail(kc, "%s: wrote %d bytes behind its end", b->name, (int)i + 1);
    }
    memcpy(to, bytes + KC_GUARD, b->bytes);
    free(bytes);
}

void kc_stage_write(struct kc *kc, const struct kc_side *side, struct kc_buf *b, const void *data,
                    uint64_t bytes)
{
    assert(bytes <= b->bytes);
    (void)kc;
    device_calls(side->device)->write(side->device, kc_at(b, side), data, bytes);
}

void kc_stage_poison(struct kc *kc, const struct kc_side *side, struct kc_buf *b)
{
    kc_buf_reset(kc, side, b);
}

void kc_stage_read(struct kc *kc, const struct kc_side *side, struct kc_buf *b, void *data,
                   uint64_t bytes)
{
    uint8_t *all = mem_new(b->bytes, 1);
    kc_buf_fetch(kc, side, b, all);
    for (uint64_t i = bytes; i < b->bytes; i++)
        if (all[i] != kc_poison_at(i)) {
            kc_fail(kc, "%s: wrote behind its last row", b->name);
            break;
        }
    memcpy(data, all, bytes);
    free(all);
}

void kc_case_free(struct kc *kc)
{
    for (int i = 0; i < kc->buf_count; i++) {
        struct kc_buf *b = &kc->bufs[i];
        for (int side = 0; side < 2 && b->use != KC_HOST; side++) {
            struct device *device = kc_device(kc, side);
            struct span whole = b->span[side];
            whole.offset -= whole.base ? KC_GUARD : 0;
            if (whole.base)
                device_calls(device)->free(device, whole);
        }
        for (int run = 0; run < 3; run++)
            free(b->result[run]);
        free(b->init);
    }
    kc->buf_count = 0;
}

/* ---- weights ------------------------------------------------------------------------------ */

static void *kc_weight_memory(size_t bytes)
{
    void *p = mem_try(bytes, 1);
    assert(p);
    return p;
}

struct kc_weight *kc_weight(struct kc *kc, enum weight_kind kind, uint32_t bits, uint32_t group,
                            uint32_t count, uint32_t rows, uint32_t cols)
{
    struct kc_weight *kw = mem_new(1, sizeof *kw);
    kc->weights = mem_grow(kc->weights, (size_t)kc->weight_count + 1, sizeof *kc->weights);
    kc->weights[kc->weight_count++] = kw;
    bool affine = kind == WEIGHT_AFFINE;
    /* Experts may stand apart: halves of a fused tensor in an unquantised file. */
    uint32_t stride = count > 1 && !affine && kc_chance(kc, 0.5) ? 2 * rows : rows;
    size_t all = (size_t)count * stride, n = all * cols;
    double unit = 1 / sqrt(cols);
    struct weight *w = &kw->w[0];
    *w = (struct weight){.kind = kind,
                         .count = count,
                         .rows = rows,
                         .cols = cols,
                         .expert_stride = stride,
                         .bits = affine ? bits : 0,
                         .group = affine ? group : 0};
    if (!affine) {
        void *data = kw->memory[0] = kc_weight_memory(n * (kind == WEIGHT_F32 ? 4 : 2));
        for (size_t i = 0; i < n; i++) {
            float x = (float)(rand_normal(&kc->rand) * unit);
            if (kind == WEIGHT_F32)
                ((float *)data)[i] = x;
            else
                ((uint16_t *)data)[i] = bf16_from_f32(x);
        }
        w->data.base = data;
        return kw;
    }
    assert(cols % group == 0);
    size_t words = n / 32 * bits, groups = n / group;
    uint32_t *codes = kw->memory[0] = kc_weight_memory(words * 4);
    uint16_t *scales = kw->memory[1] = kc_weight_memory(groups * 2);
    uint16_t *biases = kw->memory[2] = kc_weight_memory(groups * 2);
    for (size_t i = 0; i < words; i++)
        codes[i] = (uint32_t)(rand_u64(&kc->rand) >> 32);
    double levels = (double)(1u << bits);
    for (size_t i = 0; i < groups; i++) {
        double scale = unit * 4 / levels * (0.25 + rand_unit(&kc->rand));
        scale = rand_u64(&kc->rand) >> 63 ? -scale : scale;
        scales[i] = bf16_from_f32((float)scale);
        biases[i] = bf16_from_f32((float)(-scale * levels * (0.3 + 0.4 * rand_unit(&kc->rand))));
    }
    w->data.base = codes;
    w->scales.base = scales;
    w->biases.base = biases;
    return kw;
}

void kc_weight_load(struct kc *kc, struct kc_weight *kw)
{
    struct err err = {0};
    kw->w[1] = kw->w[0];
    for (int side = 0; side < 2; side++) {
        struct device *device = kc_device(kc, side);
        if (!device_calls(device)->load_weight(device, &kw->w[side], &err)) {
            kc->skipped = err.kind == ERR_RESOURCE;
            if (!kc->skipped)
                kc_fail(kc, "load_weight: %.300s", err.text);
            else
                snprintf(kc->message, sizeof kc->message, "%.300s", err.text);
        }
    }
}

void kc_weights_free(struct kc *kc)
{
    for (int i = 0; i < kc->weight_count; i++) {
        for (int m = 0; m < 3; m++)
            free(kc->weights[i]->memory[m]);
        free(kc->weights[i]);
    }
    free(kc->weights);
    kc->weights = NULL;
    kc->weight_count = 0;
}

void kc_weight_bound(const struct weight *w, uint32_t item, uint32_t row, float *bound)
{
    size_t index = (size_t)item * w->expert_stride + row;
    const float *f32 = (const float *)w->data.base + index * w->cols;
    const uint16_t *bf16 = (const uint16_t *)w->data.base + index * w->cols;
    for (uint32_t k = 0; k < w->cols && w->kind != WEIGHT_AFFINE; k++)
        bound[k] = fabsf(w->kind == WEIGHT_F32 ? f32[k] : bf16_to_f32(bf16[k]));
    for (uint32_t g = 0; w->kind == WEIGHT_AFFINE && g < w->cols / w->group; g++) {
        size_t at = index * (w->cols / w->group) + g;
        float most = (float)((1u << w->bits) - 1);
        most *= fabsf(bf16_to_f32(((const uint16_t *)w->scales.base)[at]));
        most += fabsf(bf16_to_f32(((const uint16_t *)w->biases.base)[at]));
        for (uint32_t k = 0; k < w->group; k++)
            bound[g * w->group + k] = most;
    }
}

/* ---- runs --------------------------------------------------------------------------------- */

static void kc_run_side(struct kc *kc, const struct kc_side *side,
                        void (*program)(struct kc *, const struct kc_side *, void *), void *user)
{
    for (int i = 0; i < kc->buf_count; i++)
        if (kc->bufs[i].use != KC_HOST)
            kc_buf_reset(kc, side, &kc->bufs[i]);
    kc->timing = kc->bench && side->run == 1;
    program(kc, side, user);
    struct err err = {0};
    if (!device_calls(side->device)->sync(side->device, &err))
        kc_fail(kc, "device error: %.300s", err.text);
    for (int i = 0; i < kc->buf_count; i++) {
        struct kc_buf *b = &kc->bufs[i];
        if (b->use == KC_OUT)
            kc_buf_fetch(kc, side, b, b->result[side->run]);
        if (b->use != KC_IN && b->use != KC_STAGE)
            continue;
        uint8_t *now = mem_new(b->bytes, 1);
        kc_buf_fetch(kc, side, b, now);
        if (b->use == KC_IN && b->init && memcmp(now, b->init, b->bytes))
            kc_fail(kc, "%s: an input was written to", b->name);
        free(now);
    }
}

bool kc_run(struct kc *kc, void (*program)(struct kc *, const struct kc_side *, void *), void *user)
{
    if (kc->failed || kc->skipped)
        return false;
    for (int run = 0; run < 3; run++) {
        struct kc_side side = {.run = run,
                               .device = run ? kc->dev : kc->ref,
                               .ops = run == 0               ? device_ops(kc->ref)
                                      : run == 2 && kc->twin ? device_ops(kc->twin)
                                                             : kc->ops};
        kc_run_side(kc, &side, program, user);
    }
    for (int i = 0; i < kc->buf_count; i++) {
        const struct kc_buf *b = &kc->bufs[i];
        bool compare = (b->use == KC_OUT || b->use == KC_HOST) && !kc->bench;
        if (compare && memcmp(b->result[1], b->result[2], b->bytes))
            kc_fail(kc, "%s: two runs differ%s%s", b->name,
                    kc->deterministic ? ", which are cut differently" : "",
                    kc->twin ? ", the second by the level whose bits this one promises" : "");
    }
    return !kc->failed;
}

void kc_time_start(struct kc *kc, const struct kc_side *side)
{
    (void)side;
    kc->reps = kc->left = 1;
    kc->start_ns = 0;
}

/* Doubles the repetitions until they last 50 ms; the first call only warms up. */
bool kc_time_more(struct kc *kc, const struct kc_side *side)
{
    if (kc->left > 0) {
        kc->left--;
        return true;
    }
    if (!kc->timing)
        return false;
    struct err err = {0};
    if (!device_calls(side->device)->sync(side->device, &err)) {
        kc_fail(kc, "device error: %.300s", err.text);
        return false;
    }
    if (kc->start_ns) {
        double elapsed = clock_seconds_since(kc->start_ns);
        if (elapsed > 0.05) {
            kc->seconds += elapsed / (double)kc->reps;
            return false;
        }
        kc->reps *= 2;
    }
    kc->left = kc->reps - 1;
    kc->start_ns = clock_now_ns();
    return true;
}

/* ---- comparisons: of the first run, or of the second where the first was repeated for timing - */

void kc_compare_value(struct kc *kc, const char *name, size_t at, double want, double got,
                      double tolerance)
{
    if (want == got || (isnan(want) && isnan(got)))
        return;
    double share = fabs(want - got) / tolerance;
    if (isnan(share))
        share = INFINITY;
    if (share > kc->worst)
        kc->worst = share;
    if (share > 1)
        kc_fail(kc, "%s[%zu]: want %.9g, got %.9g, tolerance %.3g", name, at, want, got, tolerance);
}

void kc_compare(struct kc *kc, const struct kc_buf *b, const double *want, const double *tolerance,
                size_t n)
{
    const float *reference = (const float *)b->result[0],
                *got = (const float *)b->result[kc->bench ? 2 : 1];
    assert(n * sizeof(float) <= b->bytes);
    for (size_t i = 0; i < n; i++)
        kc_compare_value(kc, b->name, i, want ? want[i] : reference[i], got[i], tolerance[i]);
}

void kc_compare_bytes(struct kc *kc, const struct kc_buf *b)
{
    for (uint64_t i = 0; i < b->bytes; i++)
        if (b->result[0][i] != b->result[kc->bench ? 2 : 1][i]) {
            kc_fail(kc, "%s: differs at byte %llu; it must be equal", b->name,
                    (unsigned long long)i);
            return;
        }
}
