#include "engine/fit.h"

#include "base/mem.h"
#include "model/snapshot.h"

#include <stdio.h>
#include <stdlib.h>

enum { FIT_LOGIT_BYTES = 16 << 20 };

/* Free memory of the machine, and of the device where it says how much it has. */
static uint64_t fit_free(const struct device *device)
{
    uint64_t host = mem_available_bytes(), own = device_head(device)->memory_bytes;
    if (host == 0)
        host = UINT64_MAX;
    if (own == 0)
        own = UINT64_MAX;
    return host < own ? host : own;
}

struct fit fit_make(const struct model *model, const struct device *device,
                    const struct fit_options *options)
{
    uint64_t logit_rows = FIT_LOGIT_BYTES / (4ull * model->config.vocab);
    if (logit_rows > options->chunk)
        logit_rows = options->chunk;
    if (logit_rows < options->parallel)
        logit_rows = options->parallel;
    uint64_t available = fit_free(device), limit = options->memory_bytes;
    return (struct fit){
        .model = model,
        .device = device,
        .state = {.slots = options->parallel, .kv_kind = options->kv_kind},
        .graph = {.rows = options->chunk + options->parallel - 1,
                  .segments = options->parallel,
                  .logit_rows = (uint32_t)logit_rows},
        .available = limit && limit < available ? limit : available,
        .limited = limit && limit < available,
    };
}

/* ---- bytes -------------------------------------------------------------------------------- */

/* The worst of two batches: all sequences write their last position, or the last of them reads the
 * last rows of its prompt. */
static uint64_t fit_scratch(const struct fit *fit, uint32_t ctx)
{
    const struct config *c = &fit->model->config;
    const struct ops *ops = device_ops(fit->device);
    if (!ops->attention_scratch || !c->attention_layers)
        return 0;
    struct attention_dims dims = {
        .heads = c->heads, .kv_heads = c->kv_heads, .kv_kind = fit->state.kv_kind};
    uint32_t slots = fit->state.slots, chunk = fit->graph.rows - slots + 1;
    struct segment *segment = mem_new(slots, sizeof *segment);
    for (uint32_t i = 0; i < slots; i++)
        segment[i] = (struct segment){.slot = i, .row = i, .rows = 1, .pos = ctx - 1};
    struct batch_view batch = {.rows = slots, .segments = slots, .host_segments = segment};
    uint64_t writing = ops->attention_scratch(fit->device, &dims, &batch);
    segment[slots - 1].rows = chunk < ctx ? chunk : ctx;
    segment[slots - 1].pos = ctx - segment[slots - 1].rows;
    batch.rows += segment[slots - 1].rows - 1;
    uint64_t reading = ops->attention_scratch(fit->device, &dims, &batch);
    free(segment);
    return writing > reading ? writing : reading;
}

/* With so many pages in the pool; 0: those of every sequence. */
static struct fit_bytes fit_bytes_of(const struct fit *fit, uint32_t ctx, uint64_t pages)
{
    const struct config *config = &fit->model->config;
    struct state_limits limits = fit->state;
    limits.ctx = ctx;
    limits.pages = pages;
    struct state_bytes state = state_bytes(config, &limits);
    struct fit_bytes b = {
        .weights = fit->model->bytes.total,
        .kv = state.kv,
        .states = state.delta,
        .activations = graph_bytes(config, &fit->graph),
        .scratch = fit_scratch(fit, ctx),
        .snapshots = fit->state.slots * snapshot_most_bytes(config, fit->state.kv_kind),
    };
    bool over = __builtin_add_overflow(b.kv, state.table, &b.kv);
    over |= __builtin_add_overflow(b.states, state.conv, &b.states);
    const uint64_t parts[] = {b.weights, b.kv, b.states, b.activations, b.scratch, b.snapshots};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        over |= __builtin_add_overflow(b.total, parts[i], &b.total);
    b.total = over ? UINT64_MAX : b.total;
    return b;
}

struct fit_bytes fit_bytes(const struct fit *fit, uint32_t ctx)
{
    return fit_bytes_of(fit, ctx, 0);
}

/* ---- the context -------------------------------------------------------------------------- */

static uint32_t fit_largest_within(const struct fit *fit, uint64_t available)
{
    uint32_t max = fit->model->config.max_ctx, lo = 0, hi = max / KV_PAGE;
    if (fit_bytes(fit, max).total <= available)
        return max;
    while (lo < hi) {
        uint32_t middle = lo + (hi - lo + 1) / 2;
        if (fit_bytes(fit, middle * KV_PAGE).total <= available)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo * KV_PAGE;
}

uint32_t fit_largest_ctx(const struct fit *fit)
{
    return fit_largest_within(fit, fit->available);
}

static double fit_gib(uint64_t bytes)
{
    return (double)bytes / (1 << 30);
}

static bool fit_refuse(const struct fit *fit, uint32_t ctx, struct err *err)
{
    struct fit_bytes b = fit_bytes(fit, ctx);
    uint32_t largest = fit_largest_ctx(fit);
    char advice[128] = "no context fits: use a smaller model or a machine with more memory";
    if (fit->state.slots > 1)
        snprintf(advice, sizeof advice,
                 "no context fits: have fewer sequences at a time, or a "
                 "smaller model");
    if (fit->limited)
        snprintf(advice, sizeof advice, "no context fits: raise --memory, which counts in MiB");
    if (largest)
        snprintf(advice, sizeof advice, "the largest context that fits is %u: use --ctx %u",
                 largest, largest);
    return err_set(err, ERR_RESOURCE,
                   "not enough memory: weights %.2f GiB + keys and values of %u positions %.2f GiB "
                   "+ states %.2f GiB + activations %.2f GiB + scratch %.2f GiB + snapshots %.2f "
                   "GiB, and %.2f GiB are available; %s",
                   fit_gib(b.weights), ctx, fit_gib(b.kv), fit_gib(b.states),
                   fit_gib(b.activations), fit_gib(b.scratch), fit_gib(b.snapshots),
                   fit_gib(fit->available), advice);
}

bool fit_choose_ctx(const struct fit *fit, uint32_t wanted, uint32_t *ctx, struct err *err)
{
    uint32_t max = fit->model->config.max_ctx;
    if (wanted > max)
        return err_set(err, ERR_USAGE, "a context of %u is more than the model's %u positions",
                       wanted, max);
    /* Unless told: half of what a context of one page leaves free, or all but an eighth of the
     * whole. */
    uint64_t least = fit_bytes(fit, max < KV_PAGE ? max : KV_PAGE).total;
    uint64_t most = fit->available - fit->available / 8;
    if (least < fit->available && least + (fit->available - least) / 2 > most)
        most = least + (fit->available - least) / 2;
    *ctx = wanted ? wanted : fit_largest_within(fit, most);
    if (*ctx && fit_bytes(fit, *ctx).total <= fit->available)
        return true;
    return fit_refuse(fit, *ctx ? *ctx : max, err);
}

uint64_t fit_pages(const struct fit *fit, uint32_t ctx)
{
    uint64_t least = (uint64_t)fit->state.slots * ((ctx + KV_PAGE - 1) / KV_PAGE);
    uint64_t used = fit_bytes_of(fit, ctx, least).total;
    uint64_t page = fit_bytes_of(fit, ctx, least + 1).total - used, spare = fit->available / 20;
    if (page == 0 || used > fit->available - spare)
        return least;
    return least + (spare / page < 4 * least ? spare / page : 4 * least);
}

uint64_t fit_cache_bytes(const struct fit *fit, uint32_t ctx, uint64_t pages)
{
    struct fit_bytes b = fit_bytes_of(fit, ctx, pages);
    uint64_t left = fit->available - (b.total - b.snapshots), most = mem_machine_bytes() / 10;
    most = most < b.snapshots ? b.snapshots : most;
    return left < most ? left : most;
}
