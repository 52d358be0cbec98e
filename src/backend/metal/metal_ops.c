/* The ops as sequences of kernels: which kernel for which shape, its arguments, its grid.
 *
 * Invariant: the choice depends on shapes alone, and a kernel gets every argument that it declares;
 * one that it will not read gets any buffer. */
#include "backend/metal/internal.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>

static_assert(sizeof(struct segment) == sizeof(struct segment_dims), "one layout");

enum {
    METAL_FEW_ROWS = 8, /* up to here weights are read once a group of rows, not in tiles */
    METAL_SPLIT_POSITIONS = 256,
    METAL_SPLITS_MAX = 128,
    METAL_ARGMAX_PARTS = 64,
    METAL_TILE_ROWS = 32,
    METAL_TILE_COLUMNS = 64,
};

static uint32_t metal_ceil(uint64_t n, uint32_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* ---- weights ------------------------------------------------------------------------------ */

static struct matrix_dims metal_matrix(const struct weight *w)
{
    struct matrix_dims m = {
        .kind = w->kind,
        .rows = w->rows,
        .cols = w->cols,
        .bits = w->bits,
        .group = w->group,
        .stride = w->expert_stride,
        .wide = w->data.offset % 16 == 0 && (uint64_t)w->cols * w->bits / 8 % 16 == 0,
    };
    return m;
}

/* Codes, scales and biases at index.. */
static void metal_set_weight(struct device *device, int index, const struct weight *w)
{
    bool affine = w->kind == WEIGHT_AFFINE;
    metal_set(device, index, w->data);
    metal_set(device, index + 1, affine ? w->scales : w->data);
    metal_set(device, index + 2, affine ? w->biases : w->data);
}

/* ---- embed, copy -------------------------------------------------------------------------- */

static void metal_embed(struct device *device, const struct embed_args *args)
{
    struct embed_dims d = {.rows = args->batch->rows, .table = metal_matrix(args->table)};
    metal_use(device, METAL_EMBED);
    metal_set(device, 0, args->batch->tokens);
    metal_set(device, 1, args->x);
    metal_set_weight(device, 2, args->table);
    metal_set_bytes(device, 5, &d, sizeof d);
    metal_launch(device, args->batch->rows, 1, 1, 256);
}

static void metal_copy(struct device *device, struct span to, struct span from, uint64_t bytes)
{
    enum { STEP = 1 << 30 }; /* counts are 32 bits */
    bool words = (to.offset | from.offset | bytes) % 4 == 0;
    for (uint64_t done = 0; done < bytes; done += STEP) {
        uint64_t left = bytes - done < STEP ? bytes - done : STEP;
        uint32_t count = (uint32_t)(words ? left / 4 : left);
        uint32_t groups = metal_ceil(count, 1024);
        metal_use(device, words ? METAL_COPY_WORDS : METAL_COPY_BYTES);
        metal_set(device, 0, span_at(from, done));
        metal_set(device, 1, span_at(to, done));
        metal_set_bytes(device, 2, &count, sizeof count);
        metal_launch(device, groups < 1024 ? groups : 1024, 1, 1, 256);
    }
}

/* ---- linear ------------------------------------------------------------------------------- */

static struct span metal_norm(struct device *device, const struct linear_args *args, uint32_t cols,
                              struct span h)
{
    struct norm_dims d = {
        .cols = cols,
        .has_select = args->select.base != NULL,
        .has_gain = args->gain.base != NULL,
        .eps = args->eps,
    };
    if (!h.base)
        h = metal_scratch(device, METAL_SCRATCH_NORMED, 4ull * args->rows * cols);
    if (!h.base)
        return h;
    metal_use(device, METAL_NORM);
    metal_set(device, 0, args->x);
    metal_set(device, 1, d.has_select ? args->select : args->x);
    metal_set(device, 2, d.has_gain ? args->gain : args->x);
    metal_set(device, 3, h);
    metal_set_bytes(device, 4, &d, sizeof d);
    metal_launch(device, args->rows, 1, 1, 256);
    return h;
}

/* The projections of args; h, where it has a base, receives the normalised rows as well. */
static void metal_project(struct device *device, const struct linear_args *args, struct span h)
{
    uint32_t cols = args->weight[0]->cols;
    bool few = args->rows <= METAL_FEW_ROWS, write_h = h.base != NULL;
    struct span x = args->x;
    struct linear_dims d = {
        .rows = args->rows,
        .n = args->n,
        .cols = cols,
        .has_select = few && args->select.base,
        .has_gain = few && args->gain.base,
        .add = args->add,
        .write_h = write_h,
        .eps = args->eps,
    };
    if (!few && (args->select.base || args->gain.base)) {
        x = metal_norm(device, args, cols, h);
        if (!x.base)
            return;
    }
    uint32_t tiles = 0;
    for (uint32_t i = 0; i < LINEAR_MAX; i++) {
        d.first_tile[i] = tiles;
        if (i >= args->n)
            continue;
        d.matrix[i] = metal_matrix(args->weight[i]);
        tiles += metal_ceil(d.matrix[i].rows, few ? 8 : METAL_TILE_COLUMNS);
    }
    for (uint32_t i = args->n; i <= LINEAR_MAX; i++)
        d.first_tile[i] = tiles;
    int batch = args->rows == 1 ? 1 : 4;
    metal_use(device, !few ? METAL_LINEAR_TILE : batch == 1 ? METAL_LINEAR_1 : METAL_LINEAR_4);
    metal_set(device, 0, x);
    if (few) {
        metal_set(device, 1, d.has_select ? args->select : x);
        metal_set(device, 2, d.has_gain ? args->gain : x);
        metal_set(device, 20, write_h ? h : args->out[0]);
    }
    metal_set_bytes(device, 3, &d, sizeof d);
    for (uint32_t i = 0; i < LINEAR_MAX; i++) {
        uint32_t j = i < args->n ? i : 0;
        metal_set_weight(device, 4 + 4 * (int)i, args->weight[j]);
        metal_set(device, 7 + 4 * (int)i, args->out[j]);
    }
    if (few)
        metal_launch(device, tiles + write_h, metal_ceil(args->rows, (uint32_t)batch), 1, 64);
    else
        metal_launch(device, tiles, metal_ceil(args->rows, METAL_TILE_ROWS), 1, 128);
}

static void metal_linear(struct device *device, const struct linear_args *args)
{
    metal_project(device, args, (struct span){0});
}

/* ---- delta -------------------------------------------------------------------------------- */

static void metal_delta(struct device *device, const struct delta_args *args)
{
    struct delta_step_dims d = {args->dims.key_heads, args->dims.value_heads, args->dims.eps};
    const struct span in[] = {args->qkv,        args->z,     args->a,       args->b,
                              args->conv,       args->a_log, args->dt_bias, args->norm,
                              args->conv_state, args->state, args->y};
    metal_use(device, METAL_DELTA);
    metal_set(device, 0, args->batch->device_segments);
    metal_set_bytes(device, 1, &d, sizeof d);
    for (int i = 0; i < (int)(sizeof in / sizeof in[0]); i++)
        metal_set(device, 2 + i, in[i]);
    metal_launch(device, d.key_heads, args->batch->segments, 1, 512);
}

/* ---- attention ---------------------------------------------------------------------------- */

static void metal_kv_append(struct device *device, const struct kv_append_args *args)
{
    struct append_dims d = {
        .heads = args->dims.heads,
        .kv_heads = args->dims.kv_heads,
        .segments = args->batch->segments,
        .pages_max = args->batch->pages_max,
        .eps = args->dims.eps,
    };
    for (int i = 0; i < 32; i++)
        d.frequency[i] = (float)pow(args->dims.rope_theta, -2.0 * i / 64);
    metal_use(device, args->dims.kv_kind == KV_BF16 ? METAL_APPEND_BF16 : METAL_APPEND_F32);
    metal_set(device, 0, args->batch->device_segments);
    metal_set_bytes(device, 1, &d, sizeof d);
    metal_set(device, 2, args->qg);
    metal_set(device, 3, args->k);
    metal_set(device, 4, args->v);
    metal_set(device, 5, args->q_norm);
    metal_set(device, 6, args->k_norm);
    metal_set(device, 7, args->batch->page_table);
    metal_set(device, 8, args->k_pages);
    metal_set(device, 9, args->v_pages);
    metal_set(device, 10, args->q);
    metal_launch(device, args->batch->rows, d.heads + 2 * d.kv_heads, 1, 256);
}

/* Positions a split: one split up to 256, then blocks of a fixed size until there are 128 of them;
 * only then blocks grow. */
static uint32_t metal_split_positions(uint32_t ctx)
{
    uint32_t blocks = metal_ceil(ctx, METAL_SPLIT_POSITIONS);
    return metal_ceil(blocks, METAL_SPLITS_MAX) * METAL_SPLIT_POSITIONS;
}

static void metal_attention(struct device *device, const struct attention_args *args)
{
    const struct batch_view *batch = args->batch;
    uint32_t ctx = 1, group = args->dims.heads / args->dims.kv_heads;
    for (uint32_t i = 0; i < batch->segments; i++) {
        uint32_t end = batch->host_segments[i].pos + batch->host_segments[i].rows;
        ctx = end > ctx ? end : ctx;
    }
    struct attend_dims d = {
        .heads = args->dims.heads,
        .kv_heads = args->dims.kv_heads,
        .segments = batch->segments,
        .pages_max = batch->pages_max,
        .split_positions = metal_split_positions(ctx),
    };
    d.splits = metal_ceil(ctx, d.split_positions);
    uint64_t parts = (uint64_t)batch->rows * d.heads * d.splits;
    struct span sums = args->y, stats = args->y;
    if (d.splits > 1) {
        sums = metal_scratch(device, METAL_SCRATCH_ATTEND, parts * (256 + 2) * 4);
        if (!sums.base)
            return;
        stats = span_at(sums, parts * 256 * 4);
    }
    uint32_t block = group >= 3 ? 4 : group;
    int which = block == 4 ? 2 : (int)block - 1;
    int first = args->dims.kv_kind == KV_BF16 ? METAL_ATTEND_BF16_1 : METAL_ATTEND_F32_1;
    metal_use(device, (enum metal_kernel)(first + which));
    metal_set(device, 0, batch->device_segments);
    metal_set_bytes(device, 1, &d, sizeof d);
    metal_set(device, 2, args->q);
    metal_set(device, 3, args->qg);
    metal_set(device, 4, batch->page_table);
    metal_set(device, 5, args->k_pages);
    metal_set(device, 6, args->v_pages);
    metal_set(device, 7, args->y);
    metal_set(device, 8, sums);
    metal_set(device, 9, stats);
    metal_launch(device, d.kv_heads * metal_ceil(group, block), d.splits, batch->rows, 128);
    if (d.splits == 1)
        return;
    metal_use(device, METAL_ATTEND_MERGE);
    metal_set_bytes(device, 1, &d, sizeof d);
    metal_set(device, 3, args->qg);
    metal_set(device, 7, args->y);
    metal_set(device, 8, sums);
    metal_set(device, 9, stats);
    metal_launch(device, d.heads, batch->rows, 1, 256);
}

/* ---- experts ------------------------------------------------------------------------------ */

static void metal_moe_route(struct device *device, const struct moe_route_args *args)
{
    struct route_dims d = {args->rows, args->dims.experts, args->dims.topk, args->dims.renormalise};
    assert(d.experts <= 1024);
    uint64_t shared_at = 4ull * args->rows * d.experts;
    struct span logits = metal_scratch(device, METAL_SCRATCH_LOGITS, shared_at + 4ull * args->rows);
    if (!logits.base)
        return;
    struct linear_args project = {
        .rows = args->rows,
        .n = 2,
        .x = args->x,
        .gain = args->gain,
        .eps = args->dims.eps,
        .weight = {args->router, args->shared_router},
        .out = {logits, span_at(logits, shared_at)},
    };
    metal_project(device, &project, args->h);
    metal_use(device, METAL_TOPK);
    metal_set(device, 0, logits);
    metal_set(device, 1, span_at(logits, shared_at));
    metal_set(device, 2, args->ids);
    metal_set(device, 3, args->weights);
    metal_set(device, 4, args->shared_gate);
    metal_set_bytes(device, 5, &d, sizeof d);
    metal_launch(device, args->rows, 1, 1, 32);
}

/* The four weights of an expert kernel; the down kernels have two and repeat them. */
static void metal_set_experts(struct device *device, const struct weight *w[4])
{
    for (int i = 0; i < 4; i++)
        metal_set_weight(device, 4 + 3 * i, w[i]);
}

static void metal_experts_few(struct device *device, const struct moe_experts_args *args,
                              const struct expert_dims *d, struct span act,
                              const struct weight *in[4], const struct weight *out[4])
{
    metal_use(device, METAL_GATE_UP_ROWS);
    metal_set(device, 0, args->h);
    metal_set(device, 1, args->ids);
    metal_set(device, 2, act);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, in);
    metal_launch(device, metal_ceil(d->act_width, 4), d->topk + 1, d->rows, 64);
    metal_use(device, METAL_DOWN_ROWS);
    metal_set(device, 0, act);
    metal_set(device, 1, args->ids);
    metal_set(device, 2, args->x);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, out);
    metal_set(device, 16, args->weights);
    metal_set(device, 17, args->shared_gate);
    metal_launch(device, metal_ceil(d->hidden, 8), d->rows, 1, 64);
}

static void metal_experts_many(struct device *device, const struct moe_experts_args *args,
                               const struct expert_dims *d, struct span act,
                               const struct weight *in[4], const struct weight *out[4])
{
    uint64_t pairs = (uint64_t)d->rows * (d->topk + 1);
    uint64_t blocks_at = (4 * pairs + 15) / 16 * 16;
    /* Every expert can leave one block half full. */
    uint32_t blocks = metal_ceil((uint64_t)d->rows * d->topk, METAL_TILE_ROWS) + d->experts +
                      metal_ceil(d->rows, METAL_TILE_ROWS);
    struct span order = metal_scratch(device, METAL_SCRATCH_ORDER, blocks_at + 16ull * blocks);
    struct span parts = metal_scratch(device, METAL_SCRATCH_PARTS, 4 * pairs * d->hidden);
    if (!order.base || !parts.base)
        return;
    metal_use(device, METAL_SORT);
    metal_set(device, 0, args->ids);
    metal_set(device, 1, order);
    metal_set(device, 2, span_at(order, blocks_at));
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_bytes(device, 4, &blocks, sizeof blocks);
    metal_launch(device, 1, 1, 1, 1024);
    metal_use(device, METAL_GATE_UP_TILE);
    metal_set(device, 0, args->h);
    metal_set(device, 1, order);
    metal_set(device, 2, act);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, in);
    metal_set(device, 16, span_at(order, blocks_at));
    metal_launch(device, metal_ceil(d->act_width, 32), blocks, 1, 128);
    metal_use(device, METAL_DOWN_TILE);
    metal_set(device, 0, act);
    metal_set(device, 1, order);
    metal_set(device, 2, parts);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, out);
    metal_set(device, 16, span_at(order, blocks_at));
    metal_launch(device, metal_ceil(d->hidden, METAL_TILE_COLUMNS), blocks, 1, 128);
    metal_use(device, METAL_COMBINE);
    metal_set(device, 0, parts);
    metal_set(device, 2, args->x);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set(device, 16, args->weights);
    metal_set(device, 17, args->shared_gate);
    metal_launch(device, metal_ceil(d->hidden, 256), d->rows, 1, 256);
}

static void metal_moe_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *dims = &args->dims;
    struct expert_dims d = {
        .rows = args->rows,
        .hidden = dims->hidden,
        .topk = dims->topk,
        .experts = dims->experts,
        .width = dims->width,
        .shared_width = dims->shared_width,
        .gate = metal_matrix(args->gate),
        .up = metal_matrix(args->up),
        .down = metal_matrix(args->down),
        .shared_gate = metal_matrix(args->shared_gate_proj),
        .shared_up = metal_matrix(args->shared_up),
        .shared_down = metal_matrix(args->shared_down),
    };
    uint32_t width = d.width > d.shared_width ? d.width : d.shared_width;
    d.act_width = (width + 3) / 4 * 4; /* rows of activations start on 16 bytes */
    const struct weight *in[4] = {args->gate, args->up, args->shared_gate_proj, args->shared_up};
    const struct weight *out[4] = {args->down, args->shared_down, args->down, args->shared_down};
    struct span act =
        metal_scratch(device, METAL_SCRATCH_ACT, 4ull * d.rows * (d.topk + 1) * d.act_width);
    if (!act.base)
        return;
    if (d.rows <= METAL_FEW_ROWS)
        metal_experts_few(device, args, &d, act, in, out);
    else
        metal_experts_many(device, args, &d, act, in, out);
}

/* ---- sampling ----------------------------------------------------------------------------- */

static void metal_argmax(struct device *device, const struct argmax_args *args)
{
    uint32_t runs = metal_ceil(args->vocab, 256);
    struct sample_dims d = {.vocab = args->vocab,
                            .parts = runs < METAL_ARGMAX_PARTS ? runs : METAL_ARGMAX_PARTS};
    struct span parts = metal_scratch(device, METAL_SCRATCH_SAMPLE, 16ull * args->rows * d.parts);
    if (!parts.base)
        return;
    metal_use(device, METAL_ARGMAX_PART);
    metal_set(device, 0, args->logits);
    metal_set(device, 1, parts);
    metal_set_bytes(device, 2, &d, sizeof d);
    metal_launch(device, d.parts, args->rows, 1, 256);
    metal_use(device, METAL_ARGMAX_MERGE);
    metal_set(device, 0, parts);
    metal_set(device, 1, args->ids);
    metal_set_bytes(device, 2, &d, sizeof d);
    metal_launch(device, args->rows, 1, 1, 32);
}

static void metal_top(struct device *device, const struct top_args *args)
{
    struct sample_dims d = {.vocab = args->vocab, .count = args->count};
    metal_use(device, METAL_TOP);
    metal_set(device, 0, args->logits);
    metal_set(device, 1, args->ids);
    metal_set(device, 2, args->values);
    metal_set(device, 3, args->log_sum);
    metal_set_bytes(device, 4, &d, sizeof d);
    metal_launch(device, args->rows, 1, 1, 1024);
}

void metal_fill_ops(struct ops *ops)
{
    *ops = (struct ops){
        .embed = metal_embed,
        .linear = metal_linear,
        .delta = metal_delta,
        .kv_append = metal_kv_append,
        .attention = metal_attention,
        .moe_route = metal_moe_route,
        .moe_experts = metal_moe_experts,
        .argmax = metal_argmax,
        .top = metal_top,
        .copy = metal_copy,
    };
}
