/* One sequence is measured through engine_generate, as a user gets it. Several are driven step by
 * step through the same forward pass. Owns all that it opens until it returns. */
#include "cmd/measure.h"

#include "backend/device.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cmd/cmd.h"
#include "cmd/load.h"
#include "cmd/machine.h"
#include "engine/fit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEASURE_WARM_STEPS = 2 };

int32_t measure_prompt_id(uint32_t i, uint32_t vocab)
{
    return (int32_t)(i * 2654435761u % vocab);
}

static int32_t *measure_prompt(uint32_t n, uint32_t first, uint32_t vocab)
{
    int32_t *ids = mem_new(n, sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = measure_prompt_id(first + i, vocab);
    return ids;
}

static void measure_add_id(struct measure *m, int32_t id)
{
    token_list_push(&m->ids, id);
    m->digest = (m->digest ^ (uint32_t)id) * 0x100000001b3u;
}

static void measure_begin(const struct measure_options *options, struct measure *m)
{
    free(m->step_s);
    m->step_s = mem_new(options->decode + 1, sizeof *m->step_s);
    m->ids.len = 0;
    m->digest = 0xcbf29ce484222325u;
}

void measure_free(struct measure *m)
{
    free(m->step_s);
    token_list_free(&m->ids);
}

/* ---- one sequence ------------------------------------------------------------------------- */

struct measure_clock {
    struct measure *m;
    uint32_t tokens;
    uint64_t last_ns;
};

static bool measure_on_token(void *user, const struct engine_token *token)
{
    struct measure_clock *c = user;
    uint64_t now = clock_now_ns();
    if (token->id < 0)
        return true;
    if (c->tokens++ > 0) {
        c->m->step_s[c->tokens - 2] = (double)(now - c->last_ns) * 1e-9;
        measure_add_id(c->m, token->id);
    } else {
        c->m->prefill_s = (double)(now - c->last_ns) * 1e-9;
        c->m->first_id = token->id;
    }
    c->last_ns = now;
    return true;
}

static bool measure_pass(struct engine *engine, const int32_t *prompt, uint32_t n, uint32_t steps,
                         struct measure *m, struct err *err)
{
    struct measure_clock c = {.m = m};
    struct engine_request request = {
        .prompt = prompt,
        .prompt_len = n,
        .max_tokens = steps + 1,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
        .ignore_eos = true,
        .on_token = measure_on_token,
        .user = &c,
    };
    struct engine_result result;
    c.last_ns = clock_now_ns();
    if (!engine_generate(engine, &request, &result, err))
        return false;
    token_list_free(&result.ids);
    m->decode_s = 0;
    for (uint32_t i = 0; i < steps; i++)
        m->decode_s += m->step_s[i];
    return true;
}

static uint32_t measure_ctx(const struct measure_options *o)
{
    return o->engine.ctx ? o->engine.ctx : o->context + o->decode + 1;
}

static bool measure_one(const struct measure_options *options, struct measure *m, struct err *err)
{
    struct engine *engine;
    struct engine_options open = options->engine;
    uint64_t start = clock_now_ns();
    uint32_t warm = options->decode < MEASURE_WARM_STEPS ? options->decode : MEASURE_WARM_STEPS;
    open.ctx = measure_ctx(options);
    if (!load_engine(&open, &engine, err))
        return false;
    m->load_s = clock_seconds_since(start);
    m->token_bytes = engine_model(engine)->bytes.per_token;
    snprintf(m->backend, sizeof m->backend, "%s", engine_backend(engine));
    uint32_t vocab = engine_model(engine)->config.vocab;
    /* Another prompt to warm up: one that the engine holds already would not be read again. */
    int32_t *other = measure_prompt(options->context, options->context, vocab);
    int32_t *prompt = measure_prompt(options->context, 0, vocab);
    measure_begin(options, m);
    bool ok = measure_pass(engine, other, options->context, warm, m, err);
    measure_begin(options, m);
    ok = ok && measure_pass(engine, prompt, options->context, options->decode, m, err);
    m->resident = mem_resident_bytes();
    free(other);
    free(prompt);
    engine_close(engine);
    return ok;
}

/* ---- several ------------------------------------------------------------------------------ */

struct measure_many {
    const struct measure_options *options;
    struct device *device;
    struct model model;
    struct state state;
    struct graph *graph;
    bool has_model, has_state;
    uint32_t chunk;
    struct segment *segment; /* [batch], one row each */
    uint32_t *row;           /* [batch]: 0, 1, ... */
    int32_t *token;          /* [batch]: newest of each sequence */
    bool ahead;              /* the step behind the newest tokens is queued already */
};

/* The newest tokens of sequences from..to-1. */
static bool measure_read_tokens(struct measure_many *many, uint32_t from, uint32_t to,
                                struct err *err)
{
    if (!graph_read_choices(many->graph, many->token + from, err))
        return false;
    for (uint32_t s = from; s < to; s++)
        if (many->token[s] < 0)
            return err_set(err, ERR_INTERNAL, "sequence %u: the model's output is not a number", s);
    return true;
}

/* Sequence s reads its own prompt, so that experts are chosen as for different users. */
static bool measure_prefill(struct measure_many *many, uint32_t s, struct err *err)
{
    uint32_t n = many->options->context, slot = many->segment[s].slot, last = 0;
    int32_t *prompt = measure_prompt(n, s * n, many->model.config.vocab);
    bool ok = true;
    for (uint32_t done = 0; ok && done < n;) {
        uint32_t rows = n - done < many->chunk ? n - done : many->chunk;
        last = rows - 1;
        struct segment segment = {.slot = slot, .rows = rows, .pos = done};
        struct batch batch = {.rows = rows,
                              .segments = 1,
                              .logit_rows = done + rows == n,
                              .tokens = prompt + done,
                              .segment = &segment,
                              .logit_row = &last};
        ok = graph_forward(many->graph, &batch, err);
        done += rows;
    }
    free(prompt);
    return ok && measure_read_tokens(many, s, s + 1, err);
}

static bool measure_forward(struct measure_many *many, struct err *err)
{
    uint32_t n = many->options->batch;
    for (uint32_t s = 0; s < n; s++)
        many->segment[s].pos = many->state.slot_pos[many->segment[s].slot];
    struct batch batch = {.rows = n,
                          .segments = n,
                          .logit_rows = n,
                          .tokens = many->token,
                          .segment = many->segment,
                          .logit_row = many->row};
    return graph_forward(many->graph, &batch, err);
}

/* As the engine steps: where the device can, the next step is queued before this one's tokens are
 * read. */
static bool measure_step(struct measure_many *many, bool last, struct err *err)
{
    if (!many->ahead && !measure_forward(many, err))
        return false;
    many->ahead = !last && graph_follow(many->graph);
    return measure_read_tokens(many, 0, many->options->batch, err);
}

static bool measure_many_pass(struct measure_many *many, uint32_t steps, struct measure *m,
                              struct err *err)
{
    measure_begin(many->options, m);
    uint64_t start = clock_now_ns();
    for (uint32_t s = 0; s < many->options->batch; s++) {
        state_reset(&many->state, many->segment[s].slot);
        if (!measure_prefill(many, s, err))
            return false;
    }
    m->prefill_s = clock_seconds_since(start);
    m->first_id = many->token[0];
    start = clock_now_ns();
    for (uint32_t i = 0; i < steps; i++) {
        uint64_t step = clock_now_ns();
        if (!measure_step(many, i + 1 == steps, err))
            return false;
        m->step_s[i] = clock_seconds_since(step);
        for (uint32_t s = 0; s < many->options->batch; s++)
            measure_add_id(m, many->token[s]);
    }
    m->decode_s = clock_seconds_since(start);
    return true;
}

static bool measure_open_device(const struct measure_options *o, struct device **out,
                                struct err *err)
{
    struct device_options device = {.name = o->engine.backend,
                                    .threads = o->engine.threads,
                                    .deterministic = o->engine.deterministic,
                                    .without = o->engine.without};
    return device_open(&device, out, err);
}

/* From the checkpoint's headers, before it is loaded. */
static bool measure_sizes(const struct measure_options *o, const struct device *device,
                          const char *folder, struct state_limits *state,
                          struct graph_limits *graph, struct err *err)
{
    struct model sizes;
    if (!model_open(folder, NULL, NULL, &sizes, err))
        return false;
    const struct fit_options wanted = {
        .chunk = o->engine.chunk ? o->engine.chunk : device_prefill_rows(device),
        .parallel = o->batch,
        .kv_kind = engine_kv_kind(&o->engine, device),
        .memory_bytes = o->engine.memory_bytes,
    };
    struct fit fit = fit_make(&sizes, device, &wanted);
    uint32_t ctx = measure_ctx(o);
    bool ok = fit_choose_ctx(&fit, ctx, &ctx, err);
    if (ok && o->context + o->decode > ctx)
        ok = err_set(err, ERR_RESOURCE,
                     "a context of %u does not hold a prompt of %u and %u tokens after it; use a "
                     "larger --ctx",
                     ctx, o->context, o->decode);
    *state = fit.state;
    *graph = fit.graph;
    state->ctx = ctx;
    model_close(&sizes);
    return ok;
}

static bool measure_many_open(struct measure_many *many, const char *folder, struct err *err)
{
    const struct measure_options *o = many->options;
    struct model_options load = {.lock = o->engine.lock, .huge_pages = o->engine.huge_pages};
    if (!measure_open_device(o, &many->device, err))
        return false;
    many->chunk = many->chunk ? many->chunk : device_prefill_rows(many->device);
    struct state_limits state;
    struct graph_limits graph;
    if (!measure_sizes(o, many->device, folder, &state, &graph, err) ||
        !(many->has_model = model_open(folder, many->device, &load, &many->model, err)) ||
        !(many->has_state = state_open(&many->model, &state, &many->state, err)) ||
        !graph_open(&many->model, &many->state, &graph, &many->graph, err))
        return false;
    for (uint32_t s = 0; s < o->batch; s++) {
        many->row[s] = s;
        many->segment[s] = (struct segment){.row = s, .rows = 1};
        if (!state_acquire(&many->state, &many->segment[s].slot, err))
            return false;
    }
    return true;
}

static bool measure_batch(const struct measure_options *options, const char *folder,
                          struct measure *m, struct err *err)
{
    struct measure_many many = {
        .options = options,
        .chunk = options->engine.chunk,
        .segment = mem_new(options->batch, sizeof *many.segment),
        .row = mem_new(options->batch, sizeof *many.row),
        .token = mem_new(options->batch, sizeof *many.token),
    };
    uint64_t start = clock_now_ns();
    bool ok = measure_many_open(&many, folder, err);
    if (ok) {
        uint32_t warm = options->decode < MEASURE_WARM_STEPS ? options->decode : MEASURE_WARM_STEPS;
        m->load_s = clock_seconds_since(start);
        m->token_bytes = many.model.bytes.per_token;
        snprintf(m->backend, sizeof m->backend, "%s", device_head(many.device)->name);
        ok = measure_many_pass(&many, warm, m, err) &&
             measure_many_pass(&many, options->decode, m, err);
        m->resident = mem_resident_bytes();
    }
    graph_close(many.graph);
    if (many.has_state)
        state_close(&many.state);
    if (many.has_model)
        model_close(&many.model);
    if (many.device)
        device_close(many.device);
    free(many.segment);
    free(many.row);
    free(many.token);
    return ok;
}

bool measure_run(const struct measure_options *options, struct measure *out, struct err *err)
{
    memset(out, 0, sizeof *out);
    if (options->batch == 1)
        return measure_one(options, out, err);
    char *found;
    bool ok =
        load_find(options->engine.model, &found, err) && measure_batch(options, found, out, err);
    free(found);
    return ok;
}

bool measure_check(const struct measure_options *options, struct err *err)
{
    struct device *device;
    struct state_limits state;
    struct graph_limits graph;
    char *found;
    if (!load_find(options->engine.model, &found, err))
        return false;
    bool ok = measure_open_device(options, &device, err);
    if (ok) {
        ok = measure_sizes(options, device, found, &state, &graph, err);
        device_close(device);
    }
    free(found);
    return ok;
}

/* ---- the memory --------------------------------------------------------------------------- */

static bool measure_copy(struct device *device, double *out, struct err *err)
{
    enum { COPIES = 8, BYTES = 1 << 30 };
    struct span from, to;
    if (!device_calls(device)->alloc(device, BYTES, &from, err) ||
        !device_calls(device)->alloc(device, BYTES, &to, err))
        return false;
    *out = 0;
    for (int i = 0; i < COPIES; i++) {
        uint64_t start = clock_now_ns();
        device_ops(device)->copy(device, to, from, BYTES);
        if (!device_calls(device)->sync(device, err))
            return false;
        double rate = 2.0 * BYTES / clock_seconds_since(start);
        *out = rate > *out ? rate : *out;
    }
    return true;
}

bool measure_peak(const struct engine_options *options, double *out, struct err *err)
{
    struct device_options open = {.name = options->backend, .threads = options->threads};
    struct device *device;
    if (!device_open(&open, &device, err))
        return false;
    bool cpu = !strncmp(device_head(device)->name, "cpu", 3);
    bool ok = cpu || measure_copy(device, out, err);
    device_close(device);
    return cpu ? machine_measure_memory(options->threads, out, err) : ok;
}
