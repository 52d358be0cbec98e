/* Planted faults: each wraps a reference op in a mistake that kernels have really made. kcheck
 * --self-test passes when every one is caught. They run on cpu/ref only, so spans are addresses. */
#include "kcheck.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_weight.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

enum { HEAD = 256, DELTA = 128 };

static void *kc_faults_copy(struct span s, size_t bytes)
{
    void *copy = mem_new(bytes, 1);
    memcpy(copy, cpu_at(s), bytes);
    return copy;
}

static struct span kc_faults_span(void *p)
{
    return (struct span){.base = p};
}

/* ---- linear, embed ------------------------------------------------------------------------ */

/* index: the selection is ignored */
static void kc_faults_linear_index(struct device *d, const struct linear_args *in)
{
    struct linear_args args = *in;
    args.select = (struct span){0};
    ref_linear(d, &args);
}

/* bound: the last row of a matrix with 4k + 1 rows is not computed */
static void kc_faults_linear_bound(struct device *d, const struct linear_args *in)
{
    struct linear_args args = *in;
    struct weight w[LINEAR_MAX];
    for (uint32_t i = 0; i < in->n; i++) {
        w[i] = *in->weight[i];
        args.weight[i] = &w[i];
    }
    ref_linear(d, &args);
    for (uint32_t i = 0; i < in->n; i++)
        if (w[i].rows % 4 == 1 && !in->add)
            memset((float *)cpu_at(in->out[i]) + w[i].rows * in->rows - 1, 0xff, 4);
}

/* bound: one value more than there is */
static void kc_faults_linear_overrun(struct device *d, const struct linear_args *in)
{
    ref_linear(d, in);
    if (in->weight[0]->rows % 2)
        ((float *)cpu_at(in->out[0]))[in->weight[0]->rows * in->rows] = 0;
}

/* sign: scales are taken as positive */
static void kc_faults_linear_sign(struct device *d, const struct linear_args *in)
{
    struct linear_args args = *in;
    struct weight w = *in->weight[0];
    if (w.kind != WEIGHT_AFFINE) {
        ref_linear(d, in);
        return;
    }
    size_t n = (size_t)w.rows * w.cols / w.group;
    uint16_t *scales = kc_faults_copy(w.scales, n * 2);
    for (size_t i = 0; i < n; i++)
        scales[i] &= 0x7fff;
    w.scales = kc_faults_span(scales);
    args.weight[0] = &w;
    ref_linear(d, &args);
    free(scales);
}

/* precision: inputs rounded to bf16 at a level that promises f32 */
static void kc_faults_linear_rounding(struct device *d, const struct linear_args *in)
{
    ref_linear(d, in);
    float *out = cpu_at(in->out[0]);
    for (size_t i = 0; i < (size_t)in->rows * in->weight[0]->rows; i++)
        out[i] *= 1 + 0x1p-10f;
}

/* residual: it is set where it should be added to */
static void kc_faults_linear_residual(struct device *d, const struct linear_args *in)
{
    struct linear_args args = *in;
    args.add = false;
    ref_linear(d, &args);
}

/* race: the result depends on the run */
static void kc_faults_linear_race(struct device *d, const struct linear_args *in)
{
    static uint32_t run;
    ref_linear(d, in);
    uint32_t *out = cpu_at(in->out[0]);
    *out ^= ++run % 2;
}

/* input: the norm is written back into x */
static void kc_faults_linear_input(struct device *d, const struct linear_args *in)
{
    ref_linear(d, in);
    *(float *)cpu_at(in->x) += 1;
}

/* nibbles: neighbouring 4-bit codes swapped */
static void kc_faults_embed_nibbles(struct device *d, const struct embed_args *in)
{
    struct embed_args args = *in;
    struct weight w = *in->table;
    uint8_t *codes = NULL;
    if (w.bits == 4) {
        size_t n = w.rows * cpu_weight_row_bytes(&w);
        codes = kc_faults_copy(w.data, n);
        for (size_t i = 0; i < n; i++)
            codes[i] = (uint8_t)(codes[i] << 4 | codes[i] >> 4);
        w.data = kc_faults_span(codes);
    }
    args.table = &w;
    ref_embed(d, &args);
    free(codes);
}

/* ---- delta -------------------------------------------------------------------------------- */

/* stale state: a new sequence goes on from what its slot held */
static void kc_faults_delta_stale(struct device *d, const struct delta_args *in)
{
    struct delta_args args = *in;
    struct batch_view view = *in->batch;
    struct segment segments[KC_SEQS];
    memcpy(segments, view.host_segments, view.segments * sizeof *segments);
    for (uint32_t i = 0; i < view.segments; i++)
        segments[i].pos++;
    view.host_segments = segments;
    args.batch = &view;
    ref_delta(d, &args);
}

/* slot: the number of the segment is taken for it */
static void kc_faults_delta_slot(struct device *d, const struct delta_args *in)
{
    struct delta_args args = *in;
    struct batch_view view = *in->batch;
    struct segment segments[KC_SEQS];
    memcpy(segments, view.host_segments, view.segments * sizeof *segments);
    for (uint32_t i = 0; i < view.segments; i++)
        segments[i].slot = i;
    view.host_segments = segments;
    args.batch = &view;
    ref_delta(d, &args);
}

/* padded tail: the state decays once more unless a chunk is full (pitfall 71) */
static void kc_faults_delta_tail(struct device *d, const struct delta_args *in)
{
    ref_delta(d, in);
    size_t n = (size_t)in->dims.value_heads * DELTA * DELTA;
    for (uint32_t i = 0; i < in->batch->segments; i++) {
        const struct segment *s = &in->batch->host_segments[i];
        float *state = (float *)cpu_at(in->state) + s->slot * n;
        for (size_t k = 0; k < n && s->rows % 64; k++)
            state[k] *= 0.999f;
    }
}

/* order of taps: newest first */
static void kc_faults_delta_taps(struct device *d, const struct delta_args *in)
{
    struct delta_args args = *in;
    size_t n = (2 * (size_t)in->dims.key_heads + in->dims.value_heads) * DELTA;
    float *conv = kc_faults_copy(in->conv, n * 16);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < 2; j++) {
            float x = conv[i * 4 + j];
            conv[i * 4 + j] = conv[i * 4 + 3 - j];
            conv[i * 4 + 3 - j] = x;
        }
    args.conv = kc_faults_span(conv);
    ref_delta(d, &args);
    free(conv);
}

/* wrong head: value heads read key heads in turn instead of in groups; with 2 and 4 heads, as if
 * values 1 and 2 were exchanged */
static void kc_faults_delta_head(struct device *d, const struct delta_args *in)
{
    uint32_t keys = in->dims.key_heads, values = in->dims.value_heads;
    size_t channels = (2 * (size_t)keys + values) * DELTA, rows = in->batch->rows;
    struct delta_args args = *in;
    float *qkv = kc_faults_copy(in->qkv, rows * channels * 4);
    if (keys == 2 && values == 4)
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < DELTA; i++) {
                float *v = qkv + r * channels + 2 * keys * DELTA, x = v[DELTA + i];
                v[DELTA + i] = v[2 * DELTA + i];
                v[2 * DELTA + i] = x;
            }
    args.qkv = kc_faults_span(qkv);
    ref_delta(d, &args);
    free(qkv);
}

/* gate: beta is taken as 1 */
static void kc_faults_delta_beta(struct device *d, const struct delta_args *in)
{
    struct delta_args args = *in;
    size_t n = (size_t)in->batch->rows * in->dims.value_heads;
    float *b = kc_faults_copy(in->b, n * 4);
    for (size_t i = 0; i < n; i++)
        b[i] = 100;
    args.b = kc_faults_span(b);
    ref_delta(d, &args);
    free(b);
}

/* ---- kv_append, attention ----------------------------------------------------------------- */

/* truncated: K is cut to bf16 instead of rounded */
static void kc_faults_append_truncated(struct device *d, const struct kv_append_args *in)
{
    ref_kv_append(d, in);
    if (in->dims.kv_kind != KV_BF16)
        return;
    struct kv_append_args args = *in;
    size_t n = in->dims.pages * in->dims.kv_heads * KV_PAGE * HEAD;
    float *k = mem_new(n, sizeof *k), *v = mem_new(n, sizeof *v);
    memset(k, 0xff, n * sizeof *k);
    args.dims.kv_kind = KV_F32;
    args.k_pages = kc_faults_span(k);
    args.v_pages = kc_faults_span(v);
    ref_kv_append(d, &args);
    uint16_t *to = cpu_at(in->k_pages);
    const uint16_t *halves = (const uint16_t *)k;
    for (size_t i = 0; i < n; i++)
        if (halves[2 * i + 1] != 0xffff)
            to[i] = halves[2 * i + 1];
    free(k);
    free(v);
}

/* position: the row of the batch is taken for it in the rotation */
static void kc_faults_append_position(struct device *d, const struct kv_append_args *in)
{
    ref_kv_append(d, in);
    struct kv_append_args args = *in;
    struct batch_view view = *in->batch;
    struct segment segments[KC_SEQS];
    size_t n = in->dims.pages * in->dims.kv_heads * KV_PAGE * HEAD * 4;
    void *k = mem_new(n, 1), *v = mem_new(n, 1);
    uint32_t *table = mem_new((size_t)(KC_SEQS + 3) * view.pages_max, sizeof *table);
    memcpy(segments, view.host_segments, view.segments * sizeof *segments);
    for (uint32_t i = 0; i < view.segments; i++)
        segments[i].pos = 0;
    view.host_segments = segments;
    view.page_table = kc_faults_span(table); /* the pages themselves stay right */
    args.batch = &view;
    args.k_pages = kc_faults_span(k);
    args.v_pages = kc_faults_span(v);
    if (in->batch->rows <= KV_PAGE)
        ref_kv_append(d, &args);
    free(k);
    free(v);
    free(table);
}

/* base: theta of another model */
static void kc_faults_append_theta(struct device *d, const struct kv_append_args *in)
{
    struct kv_append_args args = *in;
    args.dims.rope_theta = 1e6f;
    ref_kv_append(d, &args);
}

/* wrong page: K of one page is read as that of the page before */
static void kc_faults_attention_page(struct device *d, const struct attention_args *in)
{
    struct attention_args args = *in;
    struct batch_view view = *in->batch;
    size_t n = (size_t)(KC_SEQS + 3) * view.pages_max;
    uint32_t *table = mem_new(n, sizeof *table);
    for (uint32_t i = 0; i < view.segments; i++) {
        size_t first = (size_t)view.host_segments[i].slot * view.pages_max;
        const uint32_t *from = (const uint32_t *)cpu_at(view.page_table) + first;
        for (size_t p = 0; p < view.pages_max; p++)
            table[first + p] = from[p ? p - 1 : 0];
    }
    view.page_table = kc_faults_span(table);
    args.batch = &view;
    ref_attention(d, &args);
    free(table);
}

/* causal mask, off by one: `shift` positions further */
static void kc_faults_attention_mask(struct device *d, const struct attention_args *in, int shift)
{
    struct attention_args args = *in;
    struct batch_view view = *in->batch;
    struct segment segments[KC_SEQS];
    memcpy(segments, view.host_segments, view.segments * sizeof *segments);
    for (uint32_t i = 0; i < view.segments; i++) {
        uint32_t end = segments[i].pos + segments[i].rows;
        if (shift > 0 ? end % KV_PAGE != 0 : segments[i].pos > 0)
            segments[i].pos += (uint32_t)shift;
    }
    view.host_segments = segments;
    args.batch = &view;
    ref_attention(d, &args);
}

static void kc_faults_attention_future(struct device *d, const struct attention_args *in)
{
    kc_faults_attention_mask(d, in, 1);
}

static void kc_faults_attention_self(struct device *d, const struct attention_args *in)
{
    kc_faults_attention_mask(d, in, -1);
}

/* gate order: [gate | q] instead of [q | gate] */
static void kc_faults_attention_gate(struct device *d, const struct attention_args *in)
{
    struct attention_args args = *in;
    size_t n = (size_t)in->batch->rows * in->dims.heads;
    float *qg = mem_new(n * 2 * HEAD, sizeof *qg);
    const float *from = cpu_at(in->qg);
    for (size_t i = 0; i < n; i++) {
        memcpy(qg + i * 2 * HEAD, from + i * 2 * HEAD + HEAD, HEAD * 4);
        memcpy(qg + i * 2 * HEAD + HEAD, from + i * 2 * HEAD, HEAD * 4);
    }
    args.qg = kc_faults_span(qg);
    ref_attention(d, &args);
    free(qg);
}

/* wrong head: query head j reads KV head j % kv_heads. Query heads move to where the reference
 * reads that KV head, and their results back. */
static void kc_faults_attention_head(struct device *d, const struct attention_args *in)
{
    struct attention_args args = *in;
    size_t heads = in->dims.heads, kv_heads = in->dims.kv_heads, rows = in->batch->rows;
    float *q = mem_new(rows * heads * HEAD, sizeof *q);
    float *qg = mem_new(rows * heads * 2 * HEAD, sizeof *qg);
    float *y = mem_new(rows * heads * HEAD, sizeof *y);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < heads; j++) {
            size_t to = r * heads + j % kv_heads * (heads / kv_heads) + j / kv_heads;
            memcpy(q + to * HEAD, (float *)cpu_at(in->q) + (r * heads + j) * HEAD, HEAD * 4);
            memcpy(qg + to * 2 * HEAD, (float *)cpu_at(in->qg) + (r * heads + j) * 2 * HEAD,
                   2 * HEAD * 4);
        }
    args.q = kc_faults_span(q);
    args.qg = kc_faults_span(qg);
    args.y = kc_faults_span(y);
    ref_attention(d, &args);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < heads; j++) {
            size_t from = r * heads + j % kv_heads * (heads / kv_heads) + j / kv_heads;
            memcpy((float *)cpu_at(in->y) + (r * heads + j) * HEAD, y + from * HEAD, HEAD * 4);
        }
    free(q);
    free(qg);
    free(y);
}

/* ---- moe ---------------------------------------------------------------------------------- */

/* missing renormalise */
static void kc_faults_route_sum(struct device *d, const struct moe_route_args *in)
{
    struct moe_route_args args = *in;
    args.dims.renormalise = false;
    ref_moe_route(d, &args);
}

/* tie order: of equal experts the higher id. Exact ties sit next to each other in the output, in
 * ascending order of id; each pair is turned round. */
static void kc_faults_route_ties(struct device *d, const struct moe_route_args *in)
{
    ref_moe_route(d, in);
    uint32_t *ids = cpu_at(in->ids), topk = in->dims.topk;
    const float *weights = cpu_at(in->weights);
    for (size_t r = 0; r < in->rows; r++)
        for (size_t i = r * topk; i + 1 < (r + 1) * topk; i++)
            if (weights[i] == weights[i + 1] && ids[i] < ids[i + 1]) {
                uint32_t id = ids[i];
                ids[i] = ids[i + 1];
                ids[i + 1] = id;
            }
}

/* bound: with 33 experts the last one is never seen */
static void kc_faults_route_bound(struct device *d, const struct moe_route_args *in)
{
    struct moe_route_args args = *in;
    args.dims.experts -= in->dims.experts % 32 == 1 && in->dims.topk < in->dims.experts;
    ref_moe_route(d, &args);
}

/* the shared expert without its gate */
static void kc_faults_experts_shared(struct device *d, const struct moe_experts_args *in)
{
    struct moe_experts_args args = *in;
    float *ones = mem_new(in->rows, sizeof *ones);
    for (uint32_t r = 0; r < in->rows; r++)
        ones[r] = 1;
    args.shared_gate = kc_faults_span(ones);
    ref_moe_experts(d, &args);
    free(ones);
}

/* gate order: gate and up exchanged */
static void kc_faults_experts_order(struct device *d, const struct moe_experts_args *in)
{
    struct moe_experts_args args = *in;
    args.gate = in->up;
    args.up = in->gate;
    ref_moe_experts(d, &args);
}

/* ---- sample ------------------------------------------------------------------------------- */

/* tie order: the last of equal logits */
static void kc_faults_argmax_ties(struct device *d, const struct argmax_args *in)
{
    ref_argmax(d, in);
    int32_t *ids = cpu_at(in->ids);
    for (size_t r = 0; r < in->rows; r++) {
        const float *l = (const float *)cpu_at(in->logits) + r * in->vocab;
        for (uint32_t i = in->vocab; ids[r] >= 0 && i-- > 0;)
            if (l[i] == l[ids[r]]) {
                ids[r] = (int32_t)i;
                break;
            }
    }
}

/* NaN: it loses every comparison and is not noticed */
static void kc_faults_argmax_nan(struct device *d, const struct argmax_args *in)
{
    ref_argmax(d, in);
    int32_t *ids = cpu_at(in->ids);
    for (size_t r = 0; r < in->rows; r++)
        ids[r] = ids[r] < 0 ? 0 : ids[r];
}

/* bound: the last candidate is left as it was */
static void kc_faults_top_bound(struct device *d, const struct top_args *in)
{
    float *values = cpu_at(in->values), before = values[in->rows * in->count - 1];
    ref_top(d, in);
    values[in->rows * in->count - 1] = before;
}

/* length: a multiple of 16 bytes */
static void kc_faults_copy_length(struct device *d, struct span to, struct span from,
                                  uint64_t bytes)
{
    ref_copy(d, to, from, bytes / 16 * 16);
}

/* ---- the list ----------------------------------------------------------------------------- */

#define KC_FAULTS(X)                                                                               \
    X(linear, linear_index, "index: the row selection is ignored")                                 \
    X(linear, linear_bound, "bound: last output missing")                                          \
    X(linear, linear_overrun, "bound: one output too many")                                        \
    X(linear, linear_sign, "sign: negative scales taken as positive")                              \
    X(linear, linear_rounding, "precision: bf16 where f32 is promised")                            \
    X(linear, linear_residual, "residual: set instead of added")                                   \
    X(linear, linear_race, "race: two runs differ")                                                \
    X(linear, linear_input, "input: written to")                                                   \
    X(embed, embed_nibbles, "order: codes of a byte swapped")                                      \
    X(delta, delta_stale, "stale state: position 0 does not clear it")                             \
    X(delta, delta_slot, "slot: segment number taken for it")                                      \
    X(delta, delta_tail, "padded tail: one decay too many")                                        \
    X(delta, delta_taps, "order: convolution taps reversed")                                       \
    X(delta, delta_head, "head: value heads on the wrong keys")                                    \
    X(delta, delta_beta, "gate: beta not applied")                                                 \
    X(kv_append, append_truncated, "rounding: K truncated to bf16")                                \
    X(kv_append, append_position, "position: counted from the segment's start")                    \
    X(kv_append, append_theta, "rotation: wrong base")                                             \
    X(attention, attention_page, "page: the one before")                                           \
    X(attention, attention_future, "mask: one position too many")                                  \
    X(attention, attention_self, "mask: one position too few")                                     \
    X(attention, attention_gate, "gate order: halves of qg exchanged")                             \
    X(attention, attention_head, "head: queries on the wrong KV head")                             \
    X(moe_route, route_sum, "renormalisation missing")                                             \
    X(moe_route, route_ties, "tie order: higher id first")                                         \
    X(moe_route, route_bound, "bound: last expert not seen")                                       \
    X(moe_experts, experts_shared, "gate: shared expert without it")                               \
    X(moe_experts, experts_order, "gate order: gate and up exchanged")                             \
    X(argmax, argmax_ties, "tie order: last instead of first")                                     \
    X(argmax, argmax_nan, "NaN not reported")                                                      \
    X(top, top_bound, "bound: last candidate missing")                                             \
    X(copy, copy_length, "bound: tail not copied")

#define KC_PLANT(op, fault, text)                                                                  \
    static void kc_plant_##fault(struct ops *ops)                                                  \
    {                                                                                              \
        ops->op = kc_faults_##fault;                                                               \
    }
KC_FAULTS(KC_PLANT)

#define KC_ROW(op, fault, text) {text, #op, kc_plant_##fault},
const struct kc_fault kc_faults[] = {KC_FAULTS(KC_ROW)};
const int kc_fault_count = sizeof kc_faults / sizeof kc_faults[0];
