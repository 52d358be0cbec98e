/* The router and the experts for the fast levels.
 *
 * The router works in f32: a flipped expert is the largest error that this model can make.
 *
 * Experts, few rows (decoding): every expert of every row is split by outputs.
 * Many rows (prompts): the pairs (row, expert) are sorted by expert, and a task is up to
 * FAST_TILE_ROWS rows of one expert, so its weights are decoded once and stay in the cache.
 * Both round the same activations and add the experts of a row in the same order; within a
 * product their sums run in different orders, so last bits can differ (`deterministic`: one way
 * for both). */
#include "backend/cpu/fast_rows.h"

#include <math.h>

enum {
    MOE_PASS_ROWS = 1024,  /* rows at a time: bounds the buffer of the experts' outputs */
    MOE_ROUTE_OUTPUTS = 8, /* a task of the router computes: a few tasks for each of many threads */
};

/* ---- the router --------------------------------------------------------------------------- */

struct route_work {
    const struct moe_route_args *args;
    struct fast_tile *tile; /* [tiles], f32 only */
    uint32_t tiles, chunks;
    float *logits; /* f32 [rows, experts] */
    char *scratch;
    size_t scratch_bytes;
};

static void moe_route_prepare(void *arg, uint32_t r, int worker)
{
    (void)worker;
    struct route_work *work = arg;
    const struct moe_route_args *args = work->args;
    size_t hidden = args->dims.hidden;
    float *h = (float *)cpu_at(args->h) + r * hidden;
    simd_rms_norm((const float *)cpu_at(args->x) + r * hidden, cpu_at(args->gain), hidden,
                  args->dims.eps, h);
    fast_tile_set_row(&work->tile[r / FAST_TILE_ROWS], r % FAST_TILE_ROWS, h, false);
}

static void moe_route_multiply(void *arg, uint32_t task, int worker)
{
    struct route_work *work = arg;
    const struct moe_route_args *args = work->args;
    uint32_t tile = task % work->tiles, o = task / work->tiles * MOE_ROUTE_OUTPUTS;
    uint32_t experts = args->dims.experts, left = experts - o;
    size_t first = (size_t)tile * FAST_TILE_ROWS;
    float *scratch = (float *)(work->scratch + (size_t)worker * work->scratch_bytes);
    if (o >= experts)
        fast_rows_f32(args->shared_router, 0, 0, 1, &work->tile[tile], false,
                      (float *)cpu_at(args->shared_gate) + first, 1, scratch);
    else
        fast_rows_f32(args->router, 0, o, left < MOE_ROUTE_OUTPUTS ? left : MOE_ROUTE_OUTPUTS,
                      &work->tile[tile], false, work->logits + first * experts + o, experts,
                      scratch);
}

/* Keeps the best topk sorted while walking the logits; a later equal one goes behind. */
static void moe_route_choose(void *arg, uint32_t r, int worker)
{
    (void)worker;
    struct route_work *work = arg;
    const struct moe_dims *dims = &work->args->dims;
    const float *l = work->logits + (size_t)r * dims->experts;
    uint32_t *ids = (uint32_t *)cpu_at(work->args->ids) + (size_t)r * dims->topk;
    float *weights = (float *)cpu_at(work->args->weights) + (size_t)r * dims->topk;
    float *gate = (float *)cpu_at(work->args->shared_gate) + r;
    uint32_t n = 0;
    for (uint32_t e = 0; e < dims->experts; e++) {
        if (n == dims->topk && !(l[e] > l[ids[n - 1]]))
            continue;
        uint32_t at = n < dims->topk ? n++ : n - 1;
        for (; at > 0 && l[e] > l[ids[at - 1]]; at--)
            ids[at] = ids[at - 1];
        ids[at] = e;
    }
    float top = l[ids[0]], total = 0;
    for (uint32_t i = 0; i < dims->topk; i++)
        total += weights[i] = expf(l[ids[i]] - top);
    if (!dims->renormalise) {
        total = 0;
        for (uint32_t e = 0; e < dims->experts; e++)
            total += expf(l[e] - top);
    }
    for (uint32_t i = 0; i < dims->topk; i++)
        weights[i] /= total;
    *gate = 1 / (1 + expf(-*gate));
}

void LEVEL(moe_route)(struct device *device, const struct moe_route_args *args)
{
    uint32_t rows = args->rows, hidden = args->dims.hidden, experts = args->dims.experts;
    struct route_work work = {.args = args,
                              .tiles = (rows + FAST_TILE_ROWS - 1) / FAST_TILE_ROWS,
                              .chunks = (experts + MOE_ROUTE_OUTPUTS - 1) / MOE_ROUTE_OUTPUTS + 1,
                              .scratch_bytes = fast_rows_bytes(hidden)};
    size_t tile_bytes = fast_align(FAST_TILE_ROWS * sizeof(float *));
    char *memory = cpu_scratch(device, 0, work.tiles, tile_bytes);
    work.tile = cpu_scratch(device, 1, work.tiles, sizeof *work.tile);
    work.scratch = cpu_scratch(device, 2, (size_t)device->threads, work.scratch_bytes);
    work.logits = cpu_scratch(device, 3, (size_t)rows * experts, sizeof *work.logits);
    if (!memory || !work.tile || !work.scratch || !work.logits)
        return;
    for (uint32_t i = 0; i < work.tiles; i++) {
        uint32_t left = rows - i * FAST_TILE_ROWS;
        work.tile[i] = (struct fast_tile){.rows = left < FAST_TILE_ROWS ? left : FAST_TILE_ROWS,
                                          .cols = hidden,
                                          .row = (const float **)(memory + i * tile_bytes)};
    }
    pool_run(device->pool, moe_route_prepare, &work, rows);
    pool_run(device->pool, moe_route_multiply, &work, work.chunks * work.tiles);
    pool_run(device->pool, moe_route_choose, &work, rows);
}

/* ---- experts: a few rows ------------------------------------------------------------------ */

struct few_work {
    const struct moe_experts_args *args;
    uint32_t slots;        /* topk + 1: the last is the shared expert */
    uint32_t chunks[2];    /* of a slot's width (the wider), of hidden */
    struct fast_tile *h;   /* [rows], one row each */
    struct fast_tile *act; /* [rows, slots], one row each */
    float *value;          /* f32 [rows, slots, max width]: silu(gate h) * up h */
    uint32_t width_max;
};

/* Weights of slot s of row r: gate, up, down, and which matrix of them. */
static uint32_t moe_slot(const struct moe_experts_args *args, uint32_t r, uint32_t s,
                         const struct weight *w[3])
{
    bool routed = s < args->dims.topk;
    w[0] = routed ? args->gate : args->shared_gate_proj;
    w[1] = routed ? args->up : args->shared_up;
    w[2] = routed ? args->down : args->shared_down;
    return routed ? ((const uint32_t *)cpu_at(args->ids))[(size_t)r * args->dims.topk + s] : 0;
}

static float moe_slot_scale(const struct moe_experts_args *args, uint32_t r, uint32_t s)
{
    return s < args->dims.topk
               ? ((const float *)cpu_at(args->weights))[(size_t)r * args->dims.topk + s]
               : ((const float *)cpu_at(args->shared_gate))[r];
}

/* x += scale * y, n values */
SIMD_INLINE void moe_add(float *x, const float *y, float scale, uint32_t n)
{
    uint32_t k = 0;
    for (; n - k >= VF; k += VF)
        vf_store(x + k, vf_fma(vf_load(y + k), vf_set(scale), vf_load(x + k)));
    for (; k < n; k++)
        x[k] += y[k] * scale;
}

static void moe_few_gate_up(void *arg, uint32_t task, int worker)
{
    (void)worker;
    struct few_work *work = arg;
    uint32_t pair = task / work->chunks[0], r = pair / work->slots, s = pair % work->slots;
    uint32_t o = task % work->chunks[0] * FAST_CHUNK;
    const struct weight *w[3];
    uint32_t item = moe_slot(work->args, r, s, w), width = w[0]->rows;
    if (o >= width)
        return;
    uint32_t count = width - o < FAST_CHUNK ? width - o : FAST_CHUNK;
    float g[FAST_CHUNK], u[FAST_CHUNK];
    fast_rows_few(fast_codes_at(w[0], item, o), count, &work->h[r], 0, 1, false, g, 0);
    fast_rows_few(fast_codes_at(w[1], item, o), count, &work->h[r], 0, 1, false, u, 0);
    for (uint32_t i = count; i < FAST_CHUNK; i++)
        g[i] = u[i] = 0;
    float *value = work->value + (size_t)pair * work->width_max + o;
    for (int i = 0; i < FAST_CHUNK; i += VF)
        vf_store(value + i, vf_mul(vf_silu(vf_load(g + i)), vf_load(u + i)));
}

static void moe_few_down(void *arg, uint32_t task, int worker)
{
    (void)worker;
    struct few_work *work = arg;
    uint32_t r = task / work->chunks[1], o = task % work->chunks[1] * FAST_CHUNK;
    uint32_t hidden = work->args->dims.hidden;
    uint32_t count = hidden - o < FAST_CHUNK ? hidden - o : FAST_CHUNK;
    float *x = (float *)cpu_at(work->args->x) + (size_t)r * hidden + o;
    for (uint32_t s = 0; s < work->slots; s++) {
        const struct weight *w[3];
        uint32_t item = moe_slot(work->args, r, s, w);
        float y[FAST_CHUNK] = {0};
        fast_rows_few(fast_codes_at(w[2], item, o), count, &work->act[r * work->slots + s], 0, 1,
                      false, y, 0);
        moe_add(x, y, moe_slot_scale(work->args, r, s), count);
    }
}

static void moe_experts_few(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *dims = &args->dims;
    uint32_t rows = args->rows, slots = dims->topk + 1;
    uint32_t width = dims->width > dims->shared_width ? dims->width : dims->shared_width;
    struct few_work work = {.args = args, .slots = slots};
    work.chunks[0] = (width + FAST_CHUNK - 1) / FAST_CHUNK;
    work.chunks[1] = (dims->hidden + FAST_CHUNK - 1) / FAST_CHUNK;
    work.width_max = work.chunks[0] * FAST_CHUNK;
    size_t h_bytes = fast_tile_bytes(1, dims->hidden), act_bytes = fast_tile_bytes(1, width);
    char *memory = cpu_scratch(device, 0, rows, h_bytes + slots * act_bytes);
    work.h = cpu_scratch(device, 1, rows, (1 + slots) * sizeof *work.h);
    work.value = cpu_scratch(device, 2, (size_t)rows * slots * work.width_max, sizeof(float));
    if (!memory || !work.h || !work.value)
        return;
    work.act = work.h + rows;
    for (uint32_t r = 0; r < rows; r++) {
        work.h[r] = fast_tile_place(memory, 1, dims->hidden);
        memory += h_bytes;
        fast_tile_set_row(&work.h[r], 0, (const float *)cpu_at(args->h) + (size_t)r * dims->hidden,
                          true);
        for (uint32_t s = 0; s < slots; s++, memory += act_bytes)
            work.act[r * slots + s] =
                fast_tile_place(memory, 1, s < dims->topk ? dims->width : dims->shared_width);
    }
    pool_run(device->pool, moe_few_gate_up, &work, rows * slots * work.chunks[0]);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t s = 0; s < slots; s++)
            fast_tile_set_row(&work.act[r * slots + s], 0,
                              work.value + (size_t)(r * slots + s) * work.width_max, true);
    pool_run(device->pool, moe_few_down, &work, rows * work.chunks[1]);
}

/* ---- experts: many rows ------------------------------------------------------------------- */

struct many_task {
    uint32_t expert;       /* or dims.experts: the shared one */
    uint32_t first, count; /* entries */
};

struct many_work {
    const struct moe_experts_args *args;
    uint32_t row0, rows;    /* of this pass */
    uint32_t *row;          /* [entries]: the row (of the pass) of each pair, sorted by expert */
    uint32_t *entry;        /* [rows, topk]: the other way round */
    struct many_task *task; /* [tasks] */
    uint32_t tasks;
    float *y; /* f32 [rows of the pass, then entries; hidden]: the experts' outputs */
    char *scratch;
    size_t scratch_bytes, h_bytes, act_bytes, value_bytes;
    bool one_method; /* of struct fast_tile */
};

/* Counting sort of the pairs by expert; a pass's shared rows come first, as the largest tasks. */
static void moe_many_sort(struct many_work *work, uint32_t *start /* [experts + 1] */)
{
    const struct moe_dims *dims = &work->args->dims;
    const uint32_t *ids =
        (const uint32_t *)cpu_at(work->args->ids) + (size_t)work->row0 * dims->topk;
    uint32_t pairs = work->rows * dims->topk;
    memset(start, 0, (dims->experts + 1) * sizeof *start);
    for (uint32_t i = 0; i < pairs; i++)
        start[ids[i] + 1]++;
    work->tasks = 0;
    for (uint32_t r = 0; r < work->rows; r += FAST_TILE_ROWS)
        work->task[work->tasks++] = (struct many_task){
            dims->experts, r,
            work->rows - r < FAST_TILE_ROWS ? work->rows - r : (uint32_t)FAST_TILE_ROWS};
    for (uint32_t e = 0; e < dims->experts; e++) {
        uint32_t n = start[e + 1];
        for (uint32_t i = 0; i < n; i += FAST_TILE_ROWS)
            work->task[work->tasks++] = (struct many_task){
                e, start[e] + i, n - i < FAST_TILE_ROWS ? n - i : (uint32_t)FAST_TILE_ROWS};
        start[e + 1] += start[e];
    }
    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t at = start[ids[i]]++;
        work->row[at] = i / dims->topk;
        work->entry[i] = at;
    }
}

static void moe_many_task(void *arg, uint32_t index, int worker)
{
    struct many_work *work = arg;
    const struct moe_experts_args *args = work->args;
    const struct many_task *task = &work->task[index];
    uint32_t hidden = args->dims.hidden;
    bool shared = task->expert == args->dims.experts;
    const struct weight *gate = shared ? args->shared_gate_proj : args->gate;
    const struct weight *up = shared ? args->shared_up : args->up;
    const struct weight *down = shared ? args->shared_down : args->down;
    uint32_t item = shared ? 0 : task->expert, width = gate->rows, n = task->count;
    char *memory = work->scratch + (size_t)worker * work->scratch_bytes;
    struct fast_tile h = fast_tile_place(memory, n, hidden);
    memory += work->h_bytes;
    struct fast_tile act = fast_tile_place(memory, n, width);
    memory += work->act_bytes;
    h.one_method = act.one_method = work->one_method;
    float *value = (float *)memory; /* f32 [n, width] */
    memory += work->value_bytes;
    float *g = (float *)memory, *u = g + FAST_TILE_ROWS * FAST_CHUNK; /* f32 [n, FAST_CHUNK] */
    memory += 2 * FAST_TILE_ROWS * FAST_CHUNK * sizeof(float);
    for (uint32_t i = 0; i < n; i++) {
        size_t r = work->row0 + (shared ? task->first + i : work->row[task->first + i]);
        fast_tile_set_row(&h, i, (const float *)cpu_at(args->h) + r * hidden,
                          fast_is_dot4(gate) || fast_is_dot4(up));
    }
    for (uint32_t o = 0; o < width; o += FAST_CHUNK) {
        uint32_t count = width - o < FAST_CHUNK ? width - o : FAST_CHUNK;
        fast_rows_multiply(gate, item, o, count, &h, false, g, FAST_CHUNK, memory);
        fast_rows_multiply(up, item, o, count, &h, false, u, FAST_CHUNK, memory);
        for (uint32_t i = 0; i < n; i++) {
            float v[FAST_CHUNK];
            for (int k = 0; k < FAST_CHUNK; k += VF)
                vf_store(v + k, vf_mul(vf_silu(vf_load(g + i * FAST_CHUNK + k)),
                                       vf_load(u + i * FAST_CHUNK + k)));
            memcpy(value + (size_t)i * width + o, v, count * sizeof *v);
        }
    }
    for (uint32_t i = 0; i < n; i++)
        fast_tile_set_row(&act, i, value + (size_t)i * width, fast_is_dot4(down));
    float *y = work->y + (size_t)((shared ? 0 : work->rows) + task->first) * hidden;
    for (uint32_t o = 0; o < hidden; o += FAST_CHUNK)
        fast_rows_multiply(down, item, o, hidden - o < FAST_CHUNK ? hidden - o : FAST_CHUNK, &act,
                           false, y + o, hidden, memory);
}

/* x of one row += its experts' outputs, in the order of its ids, then the shared one's. */
static void moe_many_sum(void *arg, uint32_t r, int worker)
{
    (void)worker;
    struct many_work *work = arg;
    const struct moe_experts_args *args = work->args;
    uint32_t topk = args->dims.topk, hidden = args->dims.hidden;
    float *x = (float *)cpu_at(args->x) + (size_t)(work->row0 + r) * hidden;
    for (uint32_t s = 0; s <= topk; s++) {
        size_t at = s < topk ? work->rows + work->entry[r * topk + s] : r;
        const float *y = work->y + at * hidden;
        moe_add(x, y, moe_slot_scale(args, work->row0 + r, s), hidden);
    }
}

static void moe_experts_many(struct device *device, const struct moe_experts_args *args)
{
    const struct moe_dims *dims = &args->dims;
    uint32_t rows = args->rows < MOE_PASS_ROWS ? args->rows : (uint32_t)MOE_PASS_ROWS;
    uint32_t width = dims->width > dims->shared_width ? dims->width : dims->shared_width;
    uint32_t longest = dims->hidden > width ? dims->hidden : width;
    size_t pairs = (size_t)rows * dims->topk;
    struct many_work work = {
        .args = args,
        .one_method = device->deterministic,
        .h_bytes = fast_tile_bytes(FAST_TILE_ROWS, dims->hidden),
        .act_bytes = fast_tile_bytes(FAST_TILE_ROWS, width),
        .value_bytes = fast_align((size_t)FAST_TILE_ROWS * width * sizeof(float)),
    };
    work.scratch_bytes = work.h_bytes + work.act_bytes + work.value_bytes +
                         2 * FAST_TILE_ROWS * FAST_CHUNK * sizeof(float) + fast_rows_bytes(longest);
    uint32_t *start = cpu_scratch(device, 0, dims->experts + 1, sizeof *start);
    work.row = cpu_scratch(device, 1, 2 * pairs, sizeof *work.row);
    work.task = cpu_scratch(device, 2, dims->experts + (rows + pairs) / FAST_TILE_ROWS + 2,
                            sizeof *work.task);
    work.y = cpu_scratch(device, 3, (rows + pairs) * dims->hidden, sizeof *work.y);
    work.scratch = cpu_scratch(device, 4, (size_t)device->threads, work.scratch_bytes);
    if (!start || !work.row || !work.task || !work.y || !work.scratch)
        return;
    work.entry = work.row + pairs;
    for (; work.row0 < args->rows; work.row0 += work.rows) {
        work.rows = args->rows - work.row0 < rows ? args->rows - work.row0 : rows;
        moe_many_sort(&work, start);
        pool_run(device->pool, moe_many_task, &work, work.tasks);
        pool_run(device->pool, moe_many_sum, &work, work.rows);
    }
}

void LEVEL(moe_experts)(struct device *device, const struct moe_experts_args *args)
{
    bool integers = fast_is_dot4(args->gate) && fast_is_dot4(args->up) &&
                    fast_is_dot4(args->down) && fast_is_dot4(args->shared_gate_proj) &&
                    fast_is_dot4(args->shared_up) && fast_is_dot4(args->shared_down);
    if (integers && args->rows <= FAST_FEW_ROWS)
        moe_experts_few(device, args);
    else
        moe_experts_many(device, args);
}
