/* The ops as sequences of kernels: which kernel for which shape, its arguments, its grid.
 *
 * Invariant: the choice depends on shapes alone, and a kernel gets every argument that it declares;
 * one that it will not read gets any buffer. */
#include "backend/metal/choice.h"
#include "backend/metal/internal.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>

static_assert(sizeof(struct segment) == sizeof(struct segment_dims), "one layout");

enum {
    METAL_CONV_ROWS = 32,
    METAL_ARGMAX_PARTS = 64,
    METAL_TILE_COLUMNS = 64,
    METAL_TENSOR_ROWS = 128, /* in a tile; of batches of up to half as many, 32 */
    METAL_SKINNY_COLUMNS = 32,
};

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
        uint32_t groups = choice_ceil(count, 1024);
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

/* columns: outputs of a threadgroup */
static struct linear_dims metal_linear_dims(const struct linear_args *args, uint32_t columns)
{
    struct linear_dims d = {
        .rows = args->rows,
        .cols = args->weight[0]->cols,
        .has_select = args->select.base != NULL,
        .has_gain = args->gain.base != NULL,
        .add = args->add,
        .eps = args->eps,
    };
    for (uint32_t i = 0; i < LINEAR_MAX; i++) {
        d.first_tile[i + 1] = d.first_tile[i];
        if (i >= args->n)
            continue;
        d.matrix[i] = metal_matrix(args->weight[i]);
        d.first_tile[i + 1] += choice_ceil(d.matrix[i].rows, columns);
    }
    return d;
}

/* The projections of args; h, where it has a base, receives the normalised rows as well. exact:
 * both factors stay f32, however many rows there are. */
static void metal_project(struct device *device, const struct linear_args *args, struct span h,
                          bool exact)
{
    static const struct {
        enum metal_kernel kernel;
        uint32_t columns, rows, threads; /* of a threadgroup */
    } kinds[] = {
        [CHOICE_ROW] = {METAL_LINEAR_1, 8, 1, 64},
        [CHOICE_ROWS_4] = {METAL_LINEAR_4, 8, 4, 64},
        [CHOICE_SKINNY_8] = {METAL_LINEAR_SKINNY_8, METAL_SKINNY_COLUMNS, 8, 128},
        [CHOICE_SKINNY_16] = {METAL_LINEAR_SKINNY_16, METAL_SKINNY_COLUMNS, 16, 128},
        [CHOICE_TILE_32] = {METAL_LINEAR_TILE_32, METAL_TILE_COLUMNS, 32, 128},
        [CHOICE_TILE_64] = {METAL_LINEAR_TILE_64, METAL_TILE_COLUMNS, 64, 128},
    };
    enum choice_rows kind = choice_linear(args->rows);
    enum metal_kernel kernel = kinds[kind].kernel;
    uint32_t taken = kinds[kind].rows;
    bool few = kind < CHOICE_TILE_32;
    if (!few && !exact && metal_uses_tensor(device)) {
        bool tall = args->rows > METAL_TENSOR_ROWS / 2;
        kernel = tall ? METAL_LINEAR_TENSOR_128 : METAL_LINEAR_TENSOR_32;
        taken = tall ? METAL_TENSOR_ROWS : 32;
    }
    bool write_h = h.base != NULL;
    struct span x = args->x;
    struct linear_dims d = metal_linear_dims(args, kinds[kind].columns);
    d.has_select &= few;
    d.has_gain &= few;
    if (!few && (args->select.base || args->gain.base)) {
        x = metal_norm(device, args, d.cols, h);
        if (!x.base)
            return;
    }
    metal_use(device, kernel);
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
    metal_launch(device, d.first_tile[LINEAR_MAX] + (few && write_h),
                 choice_ceil(args->rows, taken), 1, kinds[kind].threads);
}

static void metal_linear(struct device *device, const struct linear_args *args)
{
    metal_project(device, args, (struct span){0}, false);
}

/* ---- delta -------------------------------------------------------------------------------- */

/* The arguments of all kernels of the mixer; one takes those that it declares. own: the counts of
 * the step, or what the convolution leaves for the chunks. */
static void metal_set_delta(struct device *device, const struct delta_args *args,
                            const struct mixer_dims *d, struct span own)
{
    const struct span in[] = {args->qkv,        args->z,     args->a,       args->b,
                              args->conv,       args->a_log, args->dt_bias, args->norm,
                              args->conv_state, args->state, args->y,       own};
    metal_set(device, 0, args->batch->device_segments);
    metal_set_bytes(device, 1, d, sizeof *d);
    for (int i = 0; i < (int)(sizeof in / sizeof in[0]); i++)
        metal_set(device, 2 + i, in[i]);
}

static void metal_delta(struct device *device, const struct delta_args *args)
{
    const struct batch_view *batch = args->batch;
    struct mixer_dims d = {
        .key_heads = args->dims.key_heads,
        .value_heads = args->dims.value_heads,
        .segments = batch->segments,
        .chunk_min_rows = CHOICE_CHUNK_MIN_ROWS,
        .eps = args->dims.eps,
    };
    uint32_t few = 0, rows = 0, tiles = 0, heads = 2 * d.key_heads + d.value_heads;
    for (uint32_t i = 0; i < batch->segments; i++) {
        uint32_t n = batch->host_segments[i].rows;
        few += n < d.chunk_min_rows;
        rows += n < d.chunk_min_rows ? 0 : n;
        tiles += n < d.chunk_min_rows ? 0 : choice_ceil(n, METAL_CONV_ROWS);
    }
    if (few) {
        uint64_t groups = (uint64_t)d.key_heads * batch->segments;
        struct span arrived = metal_scratch(device, METAL_SCRATCH_ARRIVED, 4 * groups);
        if (!arrived.base)
            return;
        d.taken = choice_delta_heads(d.value_heads / d.key_heads, groups, metal_has_fences(device));
        metal_use(device, METAL_DELTA_STEP);
        metal_set_delta(device, args, &d, arrived);
        metal_launch(device, d.value_heads / d.taken, batch->segments, 1, 512);
    }
    if (!rows)
        return;
    struct span conved = metal_scratch(device, METAL_SCRATCH_DELTA, 512ull * batch->rows * heads);
    if (!conved.base)
        return;
    metal_use(device, METAL_DELTA_CONV);
    metal_set_delta(device, args, &d, conved);
    metal_launch(device, heads, tiles, 1, 128);
    metal_use(device, METAL_DELTA_CHUNK);
    metal_set_delta(device, args, &d, conved);
    metal_launch(device, 2 * d.value_heads, batch->segments, 1, 128);
    metal_use(device, METAL_DELTA_GATE);
    metal_set_delta(device, args, &d, conved);
    metal_launch(device, choice_ceil(d.value_heads, 8), rows, 1, 256);
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

/* Attention of the segments that go in tiles, or of those that go by row. */
static void metal_attend(struct device *device, const struct attention_args *args,
                         struct attend_dims d)
{
    const struct batch_view *batch = args->batch;
    uint32_t ctx = 0, tiles = 0, group = d.heads / d.kv_heads;
    for (uint32_t i = 0; i < batch->segments; i++) {
        const struct segment *s = &batch->host_segments[i];
        if ((s->rows >= d.tile_min_rows) != d.tiled)
            continue;
        ctx = s->pos + s->rows > ctx ? s->pos + s->rows : ctx;
        tiles += choice_ceil(s->rows, d.tile_rows);
    }
    if (!tiles)
        return;
    d.split_positions = d.tiled ? choice_tile_split_positions(ctx, (uint64_t)tiles * d.kv_heads)
                                : choice_split_positions(ctx);
    d.splits = choice_ceil(ctx, d.split_positions);
    uint64_t parts = (uint64_t)tiles * d.tile_rows * d.heads * d.splits;
    struct span sums = args->y, stats = args->y;
    if (d.splits > 1) {
        sums = metal_scratch(device, METAL_SCRATCH_ATTEND, parts * (256 + 2) * 4);
        if (!sums.base)
            return;
        stats = span_at(sums, parts * 256 * 4);
    }
    bool bf16 = args->dims.kv_kind == KV_BF16;
    uint32_t block = group >= 3 ? 4 : group, blocks = group > 4 ? 2 : 1;
    int by_row =
        (bf16 ? METAL_ATTEND_BF16_1 : METAL_ATTEND_F32_1) + (block == 4 ? 2 : (int)block - 1);
    int in_tiles = bf16 ? METAL_ATTEND_TILE_BF16 : METAL_ATTEND_TILE_F32;
    metal_use(device, (enum metal_kernel)(d.tiled ? in_tiles : by_row));
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
    if (d.tiled)
        metal_launch(device, d.kv_heads, d.splits, tiles, 256);
    else
        metal_launch(device, d.kv_heads * choice_ceil(group, block * blocks), d.splits, tiles,
                     128 * blocks);
    if (d.splits == 1)
        return;
    metal_use(device, METAL_ATTEND_MERGE);
    metal_set(device, 0, batch->device_segments);
    metal_set_bytes(device, 1, &d, sizeof d);
    metal_set(device, 3, args->qg);
    metal_set(device, 7, args->y);
    metal_set(device, 8, sums);
    metal_set(device, 9, stats);
    metal_launch(device, d.heads, tiles, d.tile_rows, 256);
}

static void metal_attention(struct device *device, const struct attention_args *args)
{
    uint32_t group = args->dims.heads / args->dims.kv_heads;
    struct attend_dims d = {
        .heads = args->dims.heads,
        .kv_heads = args->dims.kv_heads,
        .segments = args->batch->segments,
        .pages_max = args->batch->pages_max,
        .tile_min_rows = choice_tile_min_rows(group),
        .tile_rows = 1,
    };
    metal_attend(device, args, d);
    d.tiled = true;
    d.tile_rows = CHOICE_FLASH_ROWS / group;
    if (d.tile_rows)
        metal_attend(device, args, d);
}

/* ---- experts ------------------------------------------------------------------------------ */

/* Up to 4 rows: the products and the choice in one command. */
static void metal_route_rows(struct device *device, const struct moe_route_args *args,
                             const struct linear_args *project, const struct route_dims *r)
{
    struct linear_dims d = metal_linear_dims(project, 8);
    struct span arrived = metal_scratch(device, METAL_SCRATCH_ARRIVED, 4);
    if (!arrived.base)
        return;
    metal_use(device, args->rows == 1 ? METAL_ROUTE_ROWS_1 : METAL_ROUTE_ROWS_4);
    metal_set(device, 0, args->x);
    metal_set(device, 2, args->gain);
    metal_set_bytes(device, 3, &d, sizeof d);
    metal_set_weight(device, 4, args->router);
    metal_set_weight(device, 8, args->shared_router);
    metal_set(device, 20, args->h);
    metal_set(device, 21, project->out[0]);
    metal_set(device, 22, arrived);
    metal_set(device, 23, args->ids);
    metal_set(device, 24, args->weights);
    metal_set(device, 25, args->shared_gate);
    metal_set_bytes(device, 26, r, sizeof *r);
    metal_launch(device, d.first_tile[LINEAR_MAX] + 1, 1, 1, 64);
}

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
    if (choice_routes_at_once(args->rows, metal_has_fences(device))) {
        metal_route_rows(device, args, &project, &d);
        return;
    }
    metal_project(device, &project, args->h, true);
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
    metal_launch(device, choice_ceil(d->act_width, 4), d->topk + 1, d->rows, 64);
    metal_use(device, METAL_DOWN_ROWS);
    metal_set(device, 0, act);
    metal_set(device, 1, args->ids);
    metal_set(device, 2, args->x);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, out);
    metal_set(device, 16, args->weights);
    metal_set(device, 17, args->shared_gate);
    metal_launch(device, choice_ceil(d->hidden, 8), d->rows, 1, 64);
}

static void metal_experts_many(struct device *device, const struct moe_experts_args *args,
                               const struct expert_dims *d, struct span act,
                               const struct weight *in[4], const struct weight *out[4])
{
    uint64_t pairs = (uint64_t)d->rows * (d->topk + 1);
    uint64_t blocks_at = (4 * pairs + 15) / 16 * 16;
    /* Every expert can leave one block half full. */
    uint32_t blocks = choice_ceil((uint64_t)d->rows * d->topk, d->block_rows) + d->experts +
                      choice_ceil(d->rows, d->block_rows);
    bool skinny = d->block_rows == 8, tensor = metal_uses_tensor(device);
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
    metal_use(device, skinny                ? METAL_GATE_UP_SKINNY
                      : tensor              ? METAL_GATE_UP_TENSOR
                      : d->block_rows == 64 ? METAL_GATE_UP_TILE_64
                                            : METAL_GATE_UP_TILE_32);
    metal_set(device, 0, args->h);
    metal_set(device, 1, order);
    metal_set(device, 2, act);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, in);
    metal_set(device, 16, span_at(order, blocks_at));
    metal_launch(device, choice_ceil(d->act_width, skinny ? 16 : tensor ? 64 : 32), blocks, 1, 128);
    metal_use(device, skinny                ? METAL_DOWN_SKINNY
                      : tensor              ? METAL_DOWN_TENSOR
                      : d->block_rows == 64 ? METAL_DOWN_TILE_64
                                            : METAL_DOWN_TILE_32);
    metal_set(device, 0, act);
    metal_set(device, 1, order);
    metal_set(device, 2, parts);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set_experts(device, out);
    metal_set(device, 16, span_at(order, blocks_at));
    metal_launch(device, choice_ceil(d->hidden, skinny ? METAL_SKINNY_COLUMNS : METAL_TILE_COLUMNS),
                 blocks, 1, 128);
    metal_use(device, METAL_COMBINE);
    metal_set(device, 0, parts);
    metal_set(device, 2, args->x);
    metal_set_bytes(device, 3, d, sizeof *d);
    metal_set(device, 16, args->weights);
    metal_set(device, 17, args->shared_gate);
    metal_launch(device, choice_ceil(d->hidden, 256), d->rows, 1, 256);
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
    enum choice_rows kind = choice_experts(d.rows, d.topk, d.experts, metal_uses_tensor(device));
    d.block_rows = kind == CHOICE_TILE_64 ? 64 : kind == CHOICE_TILE_32 ? 32 : 8;
    if (kind == CHOICE_ROW)
        metal_experts_few(device, args, &d, act, in, out);
    else
        metal_experts_many(device, args, &d, act, in, out);
}

/* ---- sampling ----------------------------------------------------------------------------- */

static void metal_argmax(struct device *device, const struct argmax_args *args)
{
    uint32_t runs = choice_ceil(args->vocab, 256);
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
