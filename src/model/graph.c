/* The forward pass: embed, then per layer a mixer and the experts, then the head.
 *
 * Owns the activations and the device's copy of a batch. All of it is laid out once by
 * graph_layout; layers run one after another, so every kind of layer uses the same scratch, and x
 * is the only thing that lives from one layer to the next.
 *
 * Invariant: after graph_forward a slot's pages, states and position stand at the same place, or
 * the call failed before it touched any of them (device errors excepted, see graph.h). */
#include "model/graph.h"

#include "base/mem.h"

#include <assert.h>
#include <stdlib.h>

struct graph_attention { /* between the projections of an attention layer */
    struct span qg;      /* f32 [rows, heads, 512]: q and gate of each head */
    struct span k, v;    /* f32 [rows, kv_heads, 256] */
    struct span q;       /* f32 [rows, heads, 256], normalised and rotated */
    struct span y;       /* f32 [rows, heads * 256] */
};

struct graph_delta {  /* between the projections of a Gated DeltaNet layer */
    struct span qkv;  /* f32 [rows, channels] */
    struct span z;    /* f32 [rows, value_heads * 128] */
    struct span a, b; /* f32 [rows, value_heads] */
    struct span y;    /* f32 [rows, value_heads * 128] */
};

struct graph_moe {
    struct span h;           /* f32 [rows, hidden]: the normalised x that router and experts see */
    struct span ids;         /* u32 [rows, topk] */
    struct span weights;     /* f32 [rows, topk] */
    struct span shared_gate; /* f32 [rows] */
};

struct graph_memory {
    struct span segments;  /* struct segment [limits.segments] */
    struct span tokens;    /* i32 [limits.rows] */
    struct span select;    /* u32 [limits.logit_rows]: rows whose logits are wanted */
    struct span chosen[2]; /* i32 [limits.logit_rows]: argmax of each; of this batch and the last */
    struct span logits;    /* f32 [limits.logit_rows, vocab] */
    struct span x;         /* f32 [rows, hidden]: the residual stream */
    struct graph_attention attention;
    struct graph_delta delta;
    struct graph_moe moe;
    uint64_t bytes;
};

struct graph {
    const struct model *model;
    struct state *state;
    struct device *device;
    struct graph_limits limits;
    struct graph_memory memory;
    struct span base;        /* u8 [memory.bytes]: all of the above */
    struct batch_view batch; /* the running batch as the ops see it */
    uint32_t logit_rows;     /* rows of memory.logits that are set */
    struct segment *follow;  /* [limits.segments]: segments of a batch that follows another */
    uint32_t chosen;         /* memory.chosen that the running batch's choices go to */
    bool is_chosen;          /* they are there, or encoded */
    uint32_t awaited;        /* choices of the batch before, fetched and not read yet */
    float *probe_x;          /* f32 [limits.rows, hidden] on the host, while a probe is set */
    void (*probe)(void *user, int layer, const float *x, uint32_t rows);
    void *probe_user;
};

/* ---- memory ------------------------------------------------------------------------------- */

struct graph_cursor {
    struct span base;
    uint64_t used;
};

/* The next f32, i32 or u32 [rows, cols], at a multiple of 256 bytes (the widest alignment that a
 * device asks of a tensor). */
static struct span graph_place(struct graph_cursor *cursor, uint64_t rows, uint64_t cols)
{
    struct span place = span_at(cursor->base, cursor->used);
    cursor->used += (4 * rows * cols + 255) / 256 * 256;
    return place;
}

static void graph_layout(const struct config *c, const struct graph_limits *limits,
                         struct span base, struct graph_memory *m)
{
    uint64_t rows = limits->rows;
    uint64_t channels = (2ull * c->key_heads + c->value_heads) * CONFIG_DELTA_DIM;
    struct graph_cursor fixed = {base, 0};
    m->segments = graph_place(&fixed, limits->segments, sizeof(struct segment) / 4);
    m->tokens = graph_place(&fixed, rows, 1);
    m->select = graph_place(&fixed, limits->logit_rows, 1);
    for (int i = 0; i < 2; i++)
        m->chosen[i] = graph_place(&fixed, limits->logit_rows, 1);
    m->logits = graph_place(&fixed, limits->logit_rows, c->vocab);
    m->x = graph_place(&fixed, rows, c->hidden);

    struct graph_cursor attention = fixed;
    m->attention.qg = graph_place(&attention, rows, 2ull * c->heads * CONFIG_HEAD_DIM);
    m->attention.k = graph_place(&attention, rows, (uint64_t)c->kv_heads * CONFIG_HEAD_DIM);
    m->attention.v = graph_place(&attention, rows, (uint64_t)c->kv_heads * CONFIG_HEAD_DIM);
    m->attention.q = graph_place(&attention, rows, (uint64_t)c->heads * CONFIG_HEAD_DIM);
    m->attention.y = graph_place(&attention, rows, (uint64_t)c->heads * CONFIG_HEAD_DIM);

    struct graph_cursor delta = fixed;
    m->delta.qkv = graph_place(&delta, rows, channels);
    m->delta.z = graph_place(&delta, rows, (uint64_t)c->value_heads * CONFIG_DELTA_DIM);
    m->delta.a = graph_place(&delta, rows, c->value_heads);
    m->delta.b = graph_place(&delta, rows, c->value_heads);
    m->delta.y = graph_place(&delta, rows, (uint64_t)c->value_heads * CONFIG_DELTA_DIM);

    struct graph_cursor moe = fixed;
    m->moe.h = graph_place(&moe, rows, c->hidden);
    m->moe.ids = graph_place(&moe, rows, c->topk);
    m->moe.weights = graph_place(&moe, rows, c->topk);
    m->moe.shared_gate = graph_place(&moe, rows, 1);

    uint64_t most = attention.used > delta.used ? attention.used : delta.used;
    m->bytes = most > moe.used ? most : moe.used;
}

uint64_t graph_bytes(const struct config *config, const struct graph_limits *limits)
{
    struct graph_memory memory;
    graph_layout(config, limits, (struct span){0}, &memory);
    return memory.bytes;
}

bool graph_open(const struct model *model, struct state *state, const struct graph_limits *limits,
                struct graph **out, struct err *err)
{
    assert(limits->rows > 0 && limits->segments > 0 && limits->logit_rows > 0);
    struct span base;
    uint64_t bytes = graph_bytes(&model->config, limits);
    if (!device_calls(model->device)->alloc(model->device, bytes, &base, err))
        return err_wrap(err, "activations of %u rows", limits->rows);
    struct graph *graph = mem_new(1, sizeof *graph);
    graph->model = model;
    graph->state = state;
    graph->device = model->device;
    graph->limits = *limits;
    graph->base = base;
    graph->follow = mem_new(limits->segments, sizeof *graph->follow);
    graph_layout(&model->config, limits, base, &graph->memory);
    *out = graph;
    return true;
}

void graph_close(struct graph *graph)
{
    if (!graph)
        return;
    device_calls(graph->device)->free(graph->device, graph->base);
    free(graph->probe_x);
    free(graph->follow);
    free(graph);
}

/* ---- the forward pass --------------------------------------------------------------------- */

/* x += out * delta(qkv, z, a, b of norm(x)) */
static void graph_delta_layer(struct graph *graph, uint32_t layer)
{
    const struct ops *ops = device_ops(graph->device);
    const struct config *c = &graph->model->config;
    const struct model_delta *w = &graph->model->layers[layer].delta;
    const struct graph_delta *m = &graph->memory.delta;
    struct span x = graph->memory.x; /* f32 [rows, hidden] */
    const struct linear_args project = {
        .rows = graph->batch.rows,
        .n = 4,
        .x = x,
        .gain = graph->model->layers[layer].input_norm,
        .eps = c->eps,
        .weight = {&w->qkv, &w->z, &w->a, &w->b},
        .out = {m->qkv, m->z, m->a, m->b},
    };
    const struct delta_args mix = {
        .batch = &graph->batch,
        .dims = {.key_heads = c->key_heads, .value_heads = c->value_heads, .eps = c->eps},
        .qkv = m->qkv,
        .z = m->z,
        .a = m->a,
        .b = m->b,
        .conv = w->conv,
        .a_log = w->a_log,
        .dt_bias = w->dt_bias,
        .norm = w->norm,
        .conv_state = state_conv(graph->state, layer),
        .state = state_delta(graph->state, layer),
        .y = m->y,
    };
    const struct linear_args add_out = {
        .rows = graph->batch.rows,
        .n = 1,
        .x = m->y,
        .weight = {&w->out},
        .out = {x},
        .add = true,
    };
    ops->linear(graph->device, &project);
    ops->delta(graph->device, &mix);
    ops->linear(graph->device, &add_out);
}

/* x += o * attention(q|gate, k, v of norm(x)) */
static void graph_attention_layer(struct graph *graph, uint32_t layer)
{
    const struct ops *ops = device_ops(graph->device);
    const struct config *c = &graph->model->config;
    const struct model_attention *w = &graph->model->layers[layer].attention;
    const struct graph_attention *m = &graph->memory.attention;
    struct span x = graph->memory.x; /* f32 [rows, hidden] */
    const struct attention_dims dims = {
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .rope_theta = c->rope_theta,
        .eps = c->eps,
        .kv_kind = graph->state->limits.kv_kind,
        .pages = graph->state->limits.pages,
    };
    const struct linear_args project = {
        .rows = graph->batch.rows,
        .n = 3,
        .x = x,
        .gain = graph->model->layers[layer].input_norm,
        .eps = c->eps,
        .weight = {&w->q, &w->k, &w->v},
        .out = {m->qg, m->k, m->v},
    };
    const struct kv_append_args append = {
        .batch = &graph->batch,
        .dims = dims,
        .qg = m->qg,
        .k = m->k,
        .v = m->v,
        .q_norm = w->q_norm,
        .k_norm = w->k_norm,
        .k_pages = state_k_pages(graph->state, layer),
        .v_pages = state_v_pages(graph->state, layer),
        .q = m->q,
    };
    const struct attention_args mix = {
        .batch = &graph->batch,
        .dims = dims,
        .q = m->q,
        .qg = m->qg,
        .k_pages = append.k_pages,
        .v_pages = append.v_pages,
        .y = m->y,
    };
    const struct linear_args add_out = {
        .rows = graph->batch.rows,
        .n = 1,
        .x = m->y,
        .weight = {&w->o},
        .out = {x},
        .add = true,
    };
    ops->linear(graph->device, &project);
    ops->kv_append(graph->device, &append);
    ops->attention(graph->device, &mix);
    ops->linear(graph->device, &add_out);
}

/* x += experts(norm(x)) */
static void graph_moe_layer(struct graph *graph, uint32_t layer)
{
    const struct ops *ops = device_ops(graph->device);
    const struct config *c = &graph->model->config;
    const struct model_layer *w = &graph->model->layers[layer];
    const struct graph_moe *m = &graph->memory.moe;
    struct span x = graph->memory.x; /* f32 [rows, hidden] */
    const struct moe_dims dims = {
        .hidden = c->hidden,
        .experts = c->experts,
        .topk = c->topk,
        .width = c->width,
        .shared_width = c->shared_width,
        .renormalise = c->renormalise,
        .eps = c->eps,
    };
    const struct moe_route_args route = {
        .rows = graph->batch.rows,
        .dims = dims,
        .x = x,
        .gain = w->post_norm,
        .router = &w->router,
        .shared_router = &w->shared_router,
        .h = m->h,
        .ids = m->ids,
        .weights = m->weights,
        .shared_gate = m->shared_gate,
    };
    const struct moe_experts_args add_experts = {
        .rows = graph->batch.rows,
        .dims = dims,
        .h = m->h,
        .ids = m->ids,
        .weights = m->weights,
        .shared_gate = m->shared_gate,
        .gate = &w->gate,
        .up = &w->up,
        .down = &w->down,
        .shared_gate_proj = &w->shared_gate_proj,
        .shared_up = &w->shared_up,
        .shared_down = &w->shared_down,
        .x = x,
    };
    ops->moe_route(graph->device, &route);
    ops->moe_experts(graph->device, &add_experts);
}

/* Chooses the rows that graph_head takes. */
static void graph_select(struct graph *graph, const uint32_t *row, uint32_t rows)
{
    graph->logit_rows = rows;
    graph->is_chosen = false;
    device_calls(graph->device)->write(graph->device, graph->memory.select, row, 4ull * rows);
}

/* logits = head * norm(x[select]) */
static void graph_head(struct graph *graph)
{
    uint32_t rows = graph->logit_rows;
    const struct graph_memory *m = &graph->memory;
    const struct linear_args head = {
        .rows = rows,
        .n = 1,
        .x = m->x,
        .select = m->select,
        .gain = graph->model->final_norm,
        .eps = graph->model->config.eps,
        .weight = {&graph->model->head},
        .out = {m->logits},
    };
    if (rows > 0)
        device_ops(graph->device)->linear(graph->device, &head);
}

/* chosen = argmax of every row of logits */
static void graph_choose(struct graph *graph)
{
    if (graph->is_chosen)
        return;
    graph->is_chosen = true;
    const struct argmax_args args = {
        .rows = graph->logit_rows,
        .vocab = graph->model->config.vocab,
        .logits = graph->memory.logits, /* f32 [logit_rows, vocab] */
        .ids = graph->memory.chosen[graph->chosen],
    };
    device_ops(graph->device)->argmax(graph->device, &args);
}

static void graph_call_probe(struct graph *graph, int layer)
{
    if (!graph->probe)
        return;
    uint64_t bytes = 4ull * graph->batch.rows * graph->model->config.hidden;
    device_calls(graph->device)->read(graph->device, graph->probe_x, graph->memory.x, bytes);
    graph->probe(graph->probe_user, layer, graph->probe_x, graph->batch.rows);
}

static void graph_layers(struct graph *graph)
{
    const struct embed_args embed = {
        .batch = &graph->batch,
        .table = &graph->model->embed,
        .x = graph->memory.x,
    };
    device_ops(graph->device)->embed(graph->device, &embed);
    graph_call_probe(graph, -1);
    for (uint32_t layer = 0; layer < graph->model->config.layers; layer++) {
        if (graph->model->layers[layer].full_attention)
            graph_attention_layer(graph, layer);
        else
            graph_delta_layer(graph, layer);
        graph_moe_layer(graph, layer);
        graph_call_probe(graph, (int)layer);
    }
}

/* ---- a batch ------------------------------------------------------------------------------ */

static bool graph_check_segments(const struct graph *graph, const struct batch *batch,
                                 struct err *err)
{
    const struct state *state = graph->state;
    uint32_t row = 0;
    for (uint32_t i = 0; i < batch->segments; i++) {
        const struct segment *s = &batch->segment[i];
        if (s->slot >= state->limits.slots || !state->slot_used[s->slot])
            return err_set(err, ERR_INTERNAL, "segment %u: slot %u is not in use", i, s->slot);
        for (uint32_t j = 0; j < i; j++)
            if (batch->segment[j].slot == s->slot)
                return err_set(err, ERR_INTERNAL, "segments %u and %u: both of slot %u", j, i,
                               s->slot);
        if (s->row != row || s->rows == 0 || s->rows > batch->rows - row)
            return err_set(err, ERR_INTERNAL,
                           "segment %u: rows %u+%u do not follow row %u of a batch of %u", i,
                           s->row, s->rows, row, batch->rows);
        if (s->pos != state->slot_pos[s->slot])
            return err_set(err, ERR_INTERNAL, "segment %u: position %u, and slot %u stands at %u",
                           i, s->pos, s->slot, state->slot_pos[s->slot]);
        row += s->rows;
    }
    if (row != batch->rows)
        return err_set(err, ERR_INTERNAL, "segments cover %u of %u rows", row, batch->rows);
    return true;
}

static bool graph_check_selection(const struct graph *graph, uint32_t batch_rows,
                                  const uint32_t *row, uint32_t rows, struct err *err)
{
    if (rows > graph->limits.logit_rows)
        return err_set(err, ERR_INTERNAL, "logits of %u rows were asked for, at most %u fit", rows,
                       graph->limits.logit_rows);
    for (uint32_t i = 0; i < rows; i++)
        if (row[i] >= batch_rows || (i > 0 && row[i] <= row[i - 1]))
            return err_set(err, ERR_INTERNAL, "logit row %u: %u is out of order in a batch of %u",
                           i, row[i], batch_rows);
    return true;
}

static bool graph_check_batch(const struct graph *graph, const struct batch *batch, struct err *err)
{
    const struct graph_limits *limits = &graph->limits;
    if (batch->rows == 0 || batch->rows > limits->rows || batch->segments > limits->segments)
        return err_set(err, ERR_INTERNAL,
                       "a batch of %u rows in %u segments, where 1 to %u rows in at most %u fit",
                       batch->rows, batch->segments, limits->rows, limits->segments);
    uint32_t vocab = graph->model->config.vocab;
    for (uint32_t i = 0; i < batch->rows; i++)
        if (batch->tokens[i] < 0 || (uint32_t)batch->tokens[i] >= vocab)
            return err_set(err, ERR_USAGE,
                           "token %d is not in the model's vocabulary of %u; is this the model's "
                           "own tokenizer?",
                           batch->tokens[i], vocab);
    return graph_check_segments(graph, batch, err);
}

/* Takes the pages for the whole batch, or none. */
static bool graph_reserve(struct graph *graph, const struct batch *batch, struct err *err)
{
    for (uint32_t i = 0; i < batch->segments; i++) {
        if (state_reserve(graph->state, batch->segment[i].slot, batch->segment[i].rows, err))
            continue;
        for (uint32_t j = 0; j < i; j++)
            state_trim(graph->state, batch->segment[j].slot);
        return false;
    }
    return true;
}

static void graph_upload(struct graph *graph, const struct segment *segment, uint32_t segments,
                         uint32_t rows, struct span tokens)
{
    const struct graph_memory *m = &graph->memory;
    graph->batch = (struct batch_view){
        .rows = rows,
        .segments = segments,
        .host_segments = segment,
        .device_segments = m->segments,
        .tokens = tokens,
        .page_table = graph->state->page_table,
        .pages_max = graph->state->pages_max,
    };
    device_calls(graph->device)
        ->write(graph->device, m->segments, segment, sizeof *segment * (uint64_t)segments);
}

/* Decoding steps of one shape and one place of the tokens differ only in what lies on the device,
 * so a device may record one and repeat it. The key is unique while the graph lives. */
static void graph_step(struct graph *graph)
{
    enum { RECORDED_ROWS = 64 };
    const struct device_calls *calls = device_calls(graph->device);
    uint32_t rows = graph->batch.rows;
    bool recorded = calls->step_begin && rows == graph->batch.segments && rows <= RECORDED_ROWS &&
                    graph->logit_rows <= RECORDED_ROWS && !graph->probe;
    uint32_t place = graph->awaited ? 1 + graph->chosen : 0;
    uint64_t key = (uint64_t)(uintptr_t)graph << 18 | place << 16 | rows << 8 | graph->logit_rows;
    if (recorded && calls->step_begin(graph->device, key))
        return;
    graph_layers(graph);
    graph_head(graph);
    if (recorded)
        calls->step_end(graph->device);
}

static void graph_move_on(struct graph *graph)
{
    for (uint32_t i = 0; i < graph->batch.segments; i++) {
        const struct segment *s = &graph->batch.host_segments[i];
        graph->state->slot_pos[s->slot] += s->rows;
    }
}

bool graph_forward(struct graph *graph, const struct batch *batch, struct err *err)
{
    if (!graph_check_batch(graph, batch, err) ||
        !graph_check_selection(graph, batch->rows, batch->logit_row, batch->logit_rows, err) ||
        !graph_reserve(graph, batch, err))
        return false;
    assert(!graph->awaited);
    device_calls(graph->device)
        ->write(graph->device, graph->memory.tokens, batch->tokens, 4ull * batch->rows);
    graph_upload(graph, batch->segment, batch->segments, batch->rows, graph->memory.tokens);
    graph_select(graph, batch->logit_row, batch->logit_rows);
    graph_step(graph);
    graph_move_on(graph);
    return true;
}

/* One more row for each segment, in its last page; false when one has no room or no logits. */
static bool graph_make_follow(struct graph *graph)
{
    const struct state *state = graph->state;
    uint32_t n = graph->batch.segments;
    if (graph->batch.rows != n || graph->logit_rows != n)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = graph->batch.host_segments[i].slot, pos = state->slot_pos[slot];
        if (pos >= (uint64_t)state->slot_pages[slot] * KV_PAGE)
            return false;
        graph->follow[i] = (struct segment){.slot = slot, .row = i, .rows = 1, .pos = pos};
    }
    return true;
}

bool graph_follow(struct graph *graph)
{
    const struct device_calls *calls = device_calls(graph->device);
    assert(!graph->awaited);
    if (!calls->fetch || !graph_make_follow(graph))
        return false;
    uint32_t n = graph->batch.segments;
    struct span chosen = graph->memory.chosen[graph->chosen];
    graph_choose(graph);
    calls->fetch(graph->device, chosen, 4 * n);
    graph_upload(graph, graph->follow, n, n, chosen);
    graph->awaited = n;
    graph->chosen ^= 1;
    graph->is_chosen = false;
    graph_step(graph);
    graph_choose(graph);
    graph_move_on(graph);
    return true;
}

bool graph_project(struct graph *graph, const uint32_t *row, uint32_t rows, struct err *err)
{
    if (!graph_check_selection(graph, graph->batch.rows, row, rows, err))
        return false;
    graph_select(graph, row, rows);
    graph_head(graph);
    return true;
}

/* ---- results ------------------------------------------------------------------------------ */

bool graph_read_logits(struct graph *graph, uint32_t i, float *out, struct err *err)
{
    assert(i < graph->logit_rows);
    uint64_t bytes = 4ull * graph->model->config.vocab;
    device_calls(graph->device)
        ->read(graph->device, out, span_at(graph->memory.logits, i * bytes), bytes);
    return device_calls(graph->device)->sync(graph->device, err);
}

bool graph_read_choices(struct graph *graph, int32_t *tokens, struct err *err)
{
    const struct device_calls *calls = device_calls(graph->device);
    if (graph->awaited) {
        graph->awaited = 0;
        return calls->collect(graph->device, tokens, err);
    }
    if (graph->logit_rows) {
        graph_choose(graph);
        calls->read(graph->device, tokens, graph->memory.chosen[graph->chosen],
                    4ull * graph->logit_rows);
    }
    return calls->sync(graph->device, err);
}

void graph_set_probe(struct graph *graph,
                     void (*probe)(void *user, int layer, const float *x, uint32_t rows),
                     void *user)
{
    uint64_t count = (uint64_t)graph->limits.rows * graph->model->config.hidden;
    if (probe && !graph->probe_x)
        graph->probe_x = mem_new(count, sizeof *graph->probe_x);
    graph->probe = probe;
    graph->probe_user = user;
}
