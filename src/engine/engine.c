/* Opens what a model needs to speak, in an order that refuses early: sizes first, weights last.
 *
 * Invariant: no slot is in use between two calls, except by a scheduler's running requests. */
#include "engine/core.h"
#include "engine/fit.h"
#include "engine/scheduler.h"

#include "backend/device.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

enum kv_kind engine_kv_kind(const struct engine_options *options, const struct device *device)
{
    return options->kv == ENGINE_KV_F32    ? KV_F32
           : options->kv == ENGINE_KV_BF16 ? KV_BF16
                                           : device_head(device)->kv_kind;
}

/* Reads the checkpoint's headers only, and decides how large everything will be. */
static bool engine_choose_sizes(struct engine *engine, const struct engine_options *options,
                                struct state_limits *state, struct graph_limits *graph,
                                struct err *err)
{
    struct model sizes;
    if (!model_open(options->model, NULL, NULL, &sizes, err))
        return false;
    const struct fit_options wanted = {
        .chunk = engine->chunk,
        .parallel = engine->parallel,
        .kv_kind = engine_kv_kind(options, engine->device),
        .memory_bytes = options->memory_bytes,
    };
    struct fit fit = fit_make(&sizes, engine->device, &wanted);
    bool ok = fit_choose_ctx(&fit, options->ctx, &engine->ctx, err);
    if (ok) {
        *state = fit.state;
        *graph = fit.graph;
        state->ctx = engine->ctx;
        state->pages = fit_pages(&fit, engine->ctx);
        engine->cache_bytes = fit_cache_bytes(&fit, engine->ctx, state->pages);
        engine->logit_rows = graph->logit_rows;
    }
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
    struct state_limits state;
    struct graph_limits graph;
    if (!device_open(&device, &engine->device, err))
        return false;
    engine->chunk = options->chunk ? options->chunk : device_prefill_rows(engine->device);
    if (!engine_choose_sizes(engine, options, &state, &graph, err) ||
        !(engine->has_model =
              model_open(options->model, engine->device, &load, &engine->model, err)))
        return false;
    const struct config *config = &engine->model.config;
    if (!defaults_read(options->model, config, &engine->defaults, err) ||
        !engine_open_tokenizer(engine, options->model, err) ||
        !(engine->has_state = state_open(&engine->model, &state, &engine->state, err)) ||
        !graph_open(&engine->model, &engine->state, &graph, &engine->graph, err))
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
