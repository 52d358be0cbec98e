/* embed and copy: both must be exact. An affine value is one product that f32 holds exactly, and
 * one sum, so no order of work can change it. */
#include "kcheck.h"

#include <stdio.h>
#include <stdlib.h>

struct kc_embed {
    struct kc_weight *table;
    struct kc_buf *tokens, *segments, *x;
    struct segment segment;
};

static void kc_embed_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_embed *c = user;
    struct batch_view view = {.rows = c->segment.rows,
                              .segments = 1,
                              .host_segments = &c->segment,
                              .device_segments = kc_at(c->segments, side),
                              .tokens = kc_at(c->tokens, side)};
    struct embed_args args = {
        .batch = &view, .table = kc_w(c->table, side), .x = kc_at(c->x, side)};
    KC_CALL(kc, side, embed, &args);
}

void kc_check_embed(struct kc *kc)
{
    static const uint32_t edge_rows[] = {1, 2, 7, 31, 32, 33, 255, 256, 257};
    struct kc_embed c = {0};
    uint32_t rows = kc_between(kc, 1, 70), vocab = kc_between(kc, 1, 500), bits = kc_pick_bits(kc),
             group = kc_pick_group(kc);
    uint32_t cols = group * kc_between(kc, 1, 9);
    enum weight_kind kind = WEIGHT_AFFINE;
    if (kc->pool == KC_REAL) {
        rows = kc->index ? 33 : 1;
        vocab = 248320;
        cols = 2048;
        bits = 4;
        group = 64;
    } else if (kc->pool == KC_EDGE && kc->index < 18) { /* each bits and group */
        static const uint32_t all_bits[] = {2, 3, 4, 5, 6, 8};
        bits = all_bits[kc->index / 3];
        group = 32u << kc->index % 3;
        cols = group * (1 + (uint32_t)kc->index % 4);
    } else if (kc->pool == KC_EDGE) {
        rows = edge_rows[(kc->index - 18) % 9];
        kind = kc->index % 2 ? WEIGHT_BF16 : WEIGHT_F32;
        cols = kc->index % 3 ? 128 : 33;
    } else if (kc_chance(kc, 0.3)) {
        kind = kc_chance(kc, 0.5) ? WEIGHT_BF16 : WEIGHT_F32;
        cols = kc_between(kc, 1, 300);
    }
    snprintf(kc->shape, sizeof kc->shape, "rows %u, vocab %u, hidden %u, kind %d, bits %u/%u", rows,
             vocab, cols, kind, bits, group);
    int32_t tokens[300];
    for (uint32_t r = 0; r < rows; r++)
        tokens[r] = (int32_t)kc_between(kc, 0, vocab - 1);
    tokens[0] = (int32_t)vocab - 1;
    if (rows > 1)
        tokens[rows / 2] = -1;
    c.table = kc_weight(kc, kind, bits, group, 1, vocab, cols);
    kc_weight_load(kc, c.table);
    c.segment = (struct segment){.rows = rows};
    c.segments = kc_buf(kc, "segments", KC_IN, &c.segment, sizeof c.segment);
    c.tokens = kc_buf(kc, "tokens", KC_IN, tokens, rows * 4);
    c.x = kc_buf(kc, "x", KC_OUT, NULL, (uint64_t)rows * cols * 4);
    kc->bytes = (double)rows * cols * (bits / 8.0 + 4.0 / group + 4);
    kc->flops = 2.0 * rows * cols;
    if (!kc_run(kc, kc_embed_program, &c))
        return;
    const float *want = (const float *)c.x->result[0];
    const float *got = (const float *)c.x->result[kc->bench ? 2 : 1];
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        kc_compare_value(kc, "x", i, want[i], got[i], 0);
}

struct kc_copy {
    struct kc_buf *from, *to;
    uint64_t from_at, to_at, bytes;
};

static void kc_copy_program(struct kc *kc, const struct kc_side *side, void *user)
{
    const struct kc_copy *c = user;
    struct span to = span_at(kc_at(c->to, side), c->to_at);
    struct span from = span_at(kc_at(c->from, side), c->from_at);
    for (kc_time_start(kc, side); kc_time_more(kc, side);)
        side->ops->copy(side->device, to, from, c->bytes);
}

void kc_check_copy(struct kc *kc)
{
    static const uint64_t words[] = {1, 2, 3, 4, 5, 255, 256, 257, 1023, 1024, 1025};
    struct kc_copy c = {0};
    uint64_t n = kc_between(kc, 1, 5000);
    if (kc->pool == KC_REAL) /* the states of a layer; what no cache holds */
        n = (uint64_t[]){32 * 128 * 128, 3 * 8192, kc->bench ? 64 << 20 : 1 << 20}[kc->index];
    else if (kc->pool == KC_EDGE)
        n = words[kc->index];
    bool whole = kc->pool == KC_REAL;
    c.bytes = n * 4;
    c.from_at = whole ? 0 : kc_between(kc, 0, 9) * 4;
    c.to_at = whole ? 0 : kc_between(kc, 0, 9) * 4;
    uint64_t room = c.bytes + (whole ? 0 : 64);
    float *data = kc->pool == KC_REAL ? calloc(room, 1) : kc_normal(kc, room / 4, 1);
    data[0] = 1.5f;
    snprintf(kc->shape, sizeof kc->shape, "%llu bytes", (unsigned long long)c.bytes);
    c.from = kc_buf(kc, "from", KC_IN, data, room);
    c.to = kc_buf(kc, "to", KC_OUT, NULL, room);
    free(data);
    kc->bytes = 2.0 * (double)c.bytes;
    kc->flops = 0;
    if (kc_run(kc, kc_copy_program, &c))
        kc_compare_bytes(kc, c.to);
}
