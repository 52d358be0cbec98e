/* Opens what a model needs to speak, in an order that refuses early: sizes first, weights last.
 *
 * Invariant: no slot is in use between two calls, except by a scheduler's running requests. */
#include "engine/core.h"
#include "engine/scheduler.h"

#include "backend/device.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINE_LOGIT_BYTES = 16 << 20 };

/* What a context would take, and what there is. */
struct engine_plan {
    const struct config *config;
    struct state_limits state;
    uint64_t weights, graph, available; /* bytes */
    bool limited;                       /* available is what the caller allows, and there is more */
};

static double engine_gib(uint64_t bytes)
{
    return (double)bytes / (1 << 30);
}

static uint64_t engine_state_bytes(const struct engine_plan *plan, uint32_t ctx)
{
    struct state_limits limits = plan->state;
    limits.ctx = ctx;
    return state_bytes(plan->config, &limits);
}

static bool engine_fits(const struct engine_plan *plan, uint32_t ctx, uint64_t available)
{
    uint64_t fixed = plan->weights + plan->graph;
    return fixed <= available && engine_state_bytes(plan, ctx) <= available - fixed;
}

/* The largest context of whole pages (or the model's own) that fits; 0 when not even one page. */
static uint32_t engine_largest_ctx(const struct engine_plan *plan, uint64_t available)
{
    uint32_t lo = 0, hi = plan->config->max_ctx / KV_PAGE;
    if (engine_fits(plan, plan->config->max_ctx, available))
        return plan->config->max_ctx;
    while (lo < hi) {
        uint32_t middle = lo + (hi - lo + 1) / 2;
        if (engine_fits(plan, middle * KV_PAGE, available))
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo * KV_PAGE;
}

/* Chooses or checks the context. */
static bool engine_plan_ctx(const struct engine_plan *plan, uint32_t wanted, uint32_t *ctx,
                            struct err *err)
{
    if (wanted > plan->config->max_ctx)
        return err_set(err, ERR_USAGE, "a context of %u is more than the model's %u positions",
                       wanted, plan->config->max_ctx);
    /* Unless told: half of what the weights leave free, or all but an eighth of the whole. */
    uint64_t fixed = plan->weights + plan->graph, most = plan->available - plan->available / 8;
    if (fixed < plan->available && fixed + (plan->available - fixed) / 2 > most)
        most = fixed + (plan->available - fixed) / 2;
    *ctx = wanted ? wanted : engine_largest_ctx(plan, most);
    if (*ctx && engine_fits(plan, *ctx, plan->available))
        return true;
    uint32_t asked = *ctx ? *ctx : plan->config->max_ctx;
    uint32_t largest = engine_largest_ctx(plan, plan->available);
    char advice[96] = "no context fits: use a smaller model or a machine with more memory";
    if (plan->limited)
        snprintf(advice, sizeof advice, "no context fits: raise --memory, which counts in MiB");
    if (largest)
        snprintf(advice, sizeof advice, "the largest context that fits is %u: use --ctx %u",
                 largest, largest);
    return err_set(err, ERR_RESOURCE,
                   "not enough memory: weights %.2f GiB + context of %u %.2f GiB + activations "
                   "%.2f GiB, and %.2f GiB are available; %s",
                   engine_gib(plan->weights), asked, engine_gib(engine_state_bytes(plan, asked)),
                   engine_gib(plan->graph), engine_gib(plan->available), advice);
}

/* Every slot can have its whole context. On top come pages for what the prefix cache keeps beside
 * running requests: a twentieth of the free memory, where there is so much. */
static uint64_t engine_pages(const struct engine_plan *plan, uint32_t ctx)
{
    struct state_limits one = plan->state;
    uint64_t least = (uint64_t)plan->state.slots * ((ctx + KV_PAGE - 1) / KV_PAGE);
    one.ctx = ctx;
    one.pages = least;
    uint64_t used = plan->weights + plan->graph + state_bytes(plan->config, &one);
    one.pages = least + 1;
    uint64_t page = plan->weights + plan->graph + state_bytes(plan->config, &one) - used;
    uint64_t spare = plan->available / 20;
    if (page == 0 || used > plan->available - spare)
        return least;
    return least + (spare / page < 4 * least ? spare / page : 4 * least);
}

/* Free memory of the machine, and of the device where it says how much it has; at most `limit`. */
static uint64_t engine_available(const struct device *device, uint64_t limit)
{
    uint64_t host = mem_available_bytes(), own = device_head(device)->memory_bytes;
    if (host == 0)
        host = UINT64_MAX;
    if (own == 0)
        own = UINT64_MAX;
    own = limit && limit < own ? limit : own;
    return host < own ? host : own;
}

static struct graph_limits engine_graph_limits(struct engine *engine, const struct config *config)
{
    uint64_t fit = ENGINE_LOGIT_BYTES / (4ull * config->vocab);
    engine->logit_rows = fit > engine->chunk ? engine->chunk : (uint32_t)fit;
    if (engine->logit_rows < engine->parallel)
        engine->logit_rows = engine->parallel;
    return (struct graph_limits){.rows = engine->chunk + engine->parallel - 1,
                                 .segments = engine->parallel,
                                 .logit_rows = engine->logit_rows};
}

/* Reads the checkpoint's headers only, and decides how large everything will be. */
static bool engine_make_plan(struct engine *engine, const struct engine_options *options,
                             struct state_limits *limits, struct err *err)
{
    struct model sizes;
    if (!model_open(options->model, NULL, NULL, &sizes, err))
        return false;
    struct graph_limits graph = engine_graph_limits(engine, &sizes.config);
    struct engine_plan plan = {
        .config = &sizes.config,
        .state = {.slots = engine->parallel,
                  .kv_kind = options->kv == ENGINE_KV_F32 ? KV_F32
                             : options->kv == ENGINE_KV_BF16
                                 ? KV_BF16
                                 : device_head(engine->device)->kv_kind},
        .weights = sizes.bytes.total,
        .graph = graph_bytes(&sizes.config, &graph),
        .available = engine_available(engine->device, options->memory_bytes),
        .limited =
            options->memory_bytes && options->memory_bytes < engine_available(engine->device, 0),
    };
    bool ok = engine_plan_ctx(&plan, options->ctx, &engine->ctx, err);
    *limits = plan.state;
    limits->ctx = engine->ctx;
    if (ok)
        limits->pages = engine_pages(&plan, engine->ctx);
    model_close(&sizes);
    return ok;
}

static bool engine_open_tokenizer(struct engine *engine, const char *folder, struct err *err)
{
    char *path = file_join(folder, "tokenizer.json");
    bool there = false;
    bool ok = file_find_regular(path, &there, err) &&
              (!there || tokenizer_open(folder, &engine->tokenizer, err));
    free(path);
    if (ok && engine->tokenizer) {
        uint32_t vocab = tokenizer_vocab(engine->tokenizer);
        if (vocab < engine->defaults.sampling.vocab)
            engine->defaults.sampling.vocab = vocab;
    }
    return ok;
}

static bool engine_open_parts(struct engine *engine, const struct engine_options *options,
                              struct err *err)
{
    struct device_options device = {.name = options->backend,
                                    .threads = options->threads,
                                    .deterministic = options->deterministic,
                                    .without = options->without};
    struct model_options load = {
        .lock = options->lock,
        .huge_pages = options->huge_pages,
        .progress = options->progress,
        .progress_user = options->progress_user,
    };
    struct state_limits limits;
    if (!device_open(&device, &engine->device, err))
        return false;
    engine->chunk = options->chunk ? options->chunk : device_prefill_rows(engine->device);
    if (!engine_make_plan(engine, options, &limits, err) ||
        !(engine->has_model =
              model_open(options->model, engine->device, &load, &engine->model, err)))
        return false;
    const struct config *config = &engine->model.config;
    struct graph_limits rows = engine_graph_limits(engine, config);
    if (!defaults_read(options->model, config, &engine->defaults, err) ||
        !engine_open_tokenizer(engine, options->model, err) ||
        !(engine->has_state = state_open(&engine->model, &limits, &engine->state, err)) ||
        !graph_open(&engine->model, &engine->state, &rows, &engine->graph, err))
        return false;
    engine->logits = mem_new(config->vocab, sizeof *engine->logits);
    return true;
}

bool engine_open(const struct engine_options *options, struct engine **out, struct err *err)
{
    struct engine *engine = mem_new(1, sizeof *engine);
    engine->folder = mem_copy_text(options->model, strlen(options->model));
    engine->parallel = options->parallel ? options->parallel : 1;
    if (!engine_open_parts(engine, options, err)) {
        engine_close(engine);
        return false;
    }
    log_info("%s on %s: context %u, chunks of %u", options->model, engine_backend(engine),
             engine->ctx, engine->chunk);
    *out = engine;
    return true;
}

void engine_close(struct engine *engine)
{
    if (!engine)
        return;
    scheduler_close(engine->own);
    graph_close(engine->graph);
    if (engine->has_state)
        state_close(&engine->state);
    grammar_vocab_close(engine->grammar_vocab);
    tokenizer_close(engine->tokenizer);
    if (engine->has_model)
        model_close(&engine->model);
    if (engine->device)
        device_close(engine->device);
    free(engine->logits);
    free(engine->folder);
    free(engine);
}

const struct model *engine_model(const struct engine *engine)
{
    return &engine->model;
}

const struct tokenizer *engine_tokenizer(const struct engine *engine)
{
    return engine->tokenizer;
}

const char *engine_backend(const struct engine *engine)
{
    return device_head(engine->device)->name;
}

uint32_t engine_ctx(const struct engine *engine)
{
    return engine->ctx;
}

uint32_t engine_chunk(const struct engine *engine)
{
    return engine->chunk;
}

struct sampler_options engine_sampling(const struct engine *engine)
{
    return engine->defaults.sampling;
}

bool engine_thinks(const struct engine *engine)
{
    return engine->defaults.thinking;
}

bool engine_generate(struct engine *engine, const struct engine_request *request,
                     struct engine_result *result, struct err *err)
{
    const struct scheduler_options options = {0};
    memset(result, 0, sizeof *result);
    return (engine->own || scheduler_open(engine, &options, &engine->own, err)) &&
           scheduler_run(engine->own, request, result, err);
}

/* ---- scores ------------------------------------------------------------------------------- */

static bool engine_feed(struct engine *engine, uint32_t slot, const int32_t *tokens, uint32_t rows,
                        struct err *err)
{
    struct segment segment = {.slot = slot, .rows = rows, .pos = engine->state.slot_pos[slot]};
    struct batch batch = {.rows = rows, .segments = 1, .tokens = tokens, .segment = &segment};
    return graph_forward(engine->graph, &batch, err);
}

/* Hands on_row the logits of all `rows` rows of the batch just run, which begin at position
 * `first`; *stopped when it wants no more. */
static bool engine_score_rows(struct engine *engine, size_t first, uint32_t rows,
                              bool (*on_row)(void *user, size_t i, const float *logits), void *user,
                              bool *stopped, struct err *err)
{
    uint32_t *wanted = mem_new(engine->logit_rows, sizeof *wanted);
    bool ok = true;
    for (uint32_t row = 0; ok && !*stopped && row < rows; row += engine->logit_rows) {
        uint32_t n = rows - row < engine->logit_rows ? rows - row : engine->logit_rows;
        for (uint32_t i = 0; i < n; i++)
            wanted[i] = row + i;
        ok = graph_project(engine->graph, wanted, n, err);
        for (uint32_t i = 0; ok && !*stopped && i < n; i++) {
            ok = graph_read_logits(engine->graph, i, engine->logits, err);
            *stopped = ok && !on_row(user, first + row + i, engine->logits);
        }
    }
    free(wanted);
    return ok;
}

bool engine_score(struct engine *engine, const int32_t *ids, size_t n, uint32_t chunk,
                  bool (*on_row)(void *user, size_t i, const float *logits), void *user,
                  struct err *err)
{
    uint32_t step = chunk ? chunk : engine->chunk;
    if (step > engine->chunk)
        return err_set(err, ERR_USAGE, "chunks of %u rows, and the engine was opened for %u", step,
                       engine->chunk);
    if (n > engine->ctx)
        return err_set(err, ERR_RESOURCE,
                       "%zu tokens are more than the context of %u; use a larger --ctx or a "
                       "shorter text",
                       n, engine->ctx);
    /* What engine_generate has kept would take pages from this. */
    scheduler_close(engine->own);
    engine->own = NULL;
    uint32_t slot;
    if (!state_acquire(&engine->state, &slot, err))
        return false;
    bool ok = true, stopped = false;
    for (size_t done = 0; ok && !stopped && done < n; done += step) {
        uint32_t rows = n - done < step ? (uint32_t)(n - done) : step;
        ok = engine_feed(engine, slot, ids + done, rows, err) &&
             engine_score_rows(engine, done, rows, on_row, user, &stopped, err);
    }
    state_release(&engine->state, slot);
    return ok;
}
