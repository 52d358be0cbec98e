/* calla info: what a checkpoint is, what it takes, and whether it fits here. Reads headers only. */
#include "cmd/cmd.h"

#include "backend/device.h"
#include "base/mem.h"
#include "cmd/load.h"
#include "model/graph.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char info_help[] =
    "usage: calla info [options]\n"
    "\n"
    "Checks a checkpoint's headers and shows its architecture, its bytes by part, the bytes read "
    "for\n"
    "a decoded token, the memory that a context takes, and whether that fits here. The weights\n"
    "themselves are not read.\n"
    "\n"
    "  -m, --model MODEL   folder, or name of a pulled model (default: the demo model)\n"
    "      --ctx N         positions of context (default: the model's own)\n"
    "      --slots N       sequences at a time (default 1)\n"
    "      --chunk N       prompt rows a step (default: the device's)\n"
    "      --backend NAME  the device to fit (default: the best one here)\n"
    "      --json          print one object instead\n"
    "  -h, --help          this text\n"
    "\n"
    "examples:\n"
    "  calla info\n"
    "  calla info -m ~/models/Qwen3.6-35B-A3B-4bit --ctx 32768\n"
    "  calla info -m ~/models/Qwen3.6-35B-A3B-4bit --json | jq .memory\n";

struct info {
    char *folder;
    const char *backend;
    uint32_t ctx, slots, chunk;
    bool json;
    struct model model;
    struct state_limits limits;
    uint64_t scratch, available; /* bytes; available 0: unknown */
    char device[64];
};

/* Bytes that a context takes besides the weights: pages, states and convolution rows. */
static uint64_t info_state_bytes(const struct info *info, uint32_t ctx)
{
    struct state_limits limits = info->limits;
    limits.ctx = ctx;
    return state_bytes(&info->model.config, &limits);
}

static uint64_t info_total_bytes(const struct info *info, uint32_t ctx)
{
    uint64_t fixed = info->model.bytes.total + info->scratch, total;
    return __builtin_add_overflow(fixed, info_state_bytes(info, ctx), &total) ? UINT64_MAX : total;
}

/* In whole pages, or the model's own; 0 when not even one page fits. */
static uint32_t info_largest_ctx(const struct info *info)
{
    uint32_t max = info->model.config.max_ctx, lo = 0, hi = max / KV_PAGE;
    if (info_total_bytes(info, max) <= info->available)
        return max;
    while (lo < hi) {
        uint32_t middle = lo + (hi - lo + 1) / 2;
        if (info_total_bytes(info, middle * KV_PAGE) <= info->available)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo * KV_PAGE;
}

/* ---- text ---------------------------------------------------------------------------------- */

static double info_gib(uint64_t bytes)
{
    return (double)bytes / (1 << 30);
}

static const char *info_print_weight(const struct weight *w, char *out, size_t size)
{
    if (w->kind == WEIGHT_AFFINE)
        snprintf(out, size, "%u bits, groups of %u", w->bits, w->group);
    else
        snprintf(out, size, "%s", w->kind == WEIGHT_F32 ? "f32" : "bf16");
    return out;
}

static void info_print_architecture(const struct info *info)
{
    const struct config *c = &info->model.config;
    const struct model_bytes *b = &info->model.bytes;
    char experts[40], router[40], head[40];
    printf("model         %s\n", info->folder);
    printf("layers        %u: %u attention, %u Gated DeltaNet; hidden %u\n", c->layers,
           c->attention_layers, c->delta_layers, c->hidden);
    printf("attention     %u query heads, %u key/value heads of %d\n", c->heads, c->kv_heads,
           CONFIG_HEAD_DIM);
    printf("DeltaNet      %u value heads, %u key heads of %d\n", c->value_heads, c->key_heads,
           CONFIG_DELTA_DIM);
    printf("experts       %u of width %u, %u a token; shared one of %u\n", c->experts, c->width,
           c->topk, c->shared_width);
    printf("vocabulary    %u%s; up to %u positions\n", c->vocab,
           c->tie_embeddings ? " (head tied to the embedding)" : "", c->max_ctx);
    printf("weights       experts %s; router %s; head %s\n",
           info_print_weight(&info->model.layers[0].gate, experts, sizeof experts),
           info_print_weight(&info->model.layers[0].router, router, sizeof router),
           info_print_weight(&info->model.head, head, sizeof head));
    printf("parameters    %llu, of which %llu work on a token\n\n",
           (unsigned long long)b->parameters, (unsigned long long)b->active_parameters);
}

static void info_print_bytes(const struct info *info)
{
    const struct config *c = &info->model.config;
    const struct model_bytes *b = &info->model.bytes;
    uint64_t head = c->tie_embeddings ? b->embedding : b->head;
    const struct {
        const char *name;
        uint64_t stored, read;
    } parts[] = {
        {"embedding", b->embedding, b->embedding / c->vocab},
        {"attention", b->attention, b->attention},
        {"Gated DeltaNet", b->delta, b->delta},
        {"experts", b->experts, b->experts / c->experts * c->topk},
        {"shared experts", b->shared, b->shared},
        {"routers", b->router, b->router},
        {"head", b->head, head},
        {"norms", b->norms, b->norms},
        {"total", b->total, b->per_token},
    };
    printf("%-16s %16s %22s\n", "bytes", "stored", "read for a new token");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        printf("%-16s %16llu %22llu\n", parts[i].name, (unsigned long long)parts[i].stored,
               (unsigned long long)parts[i].read);
}

static void info_print_memory(const struct info *info)
{
    uint64_t state = info_state_bytes(info, info->ctx), total = info_total_bytes(info, info->ctx);
    uint32_t largest = info_largest_ctx(info);
    printf("\nmemory for %u x %u positions on %s\n", info->limits.slots, info->ctx, info->device);
    printf("%-16s %10.2f GiB\n", "weights", info_gib(info->model.bytes.total));
    printf("%-16s %10.2f GiB  (%s keys and values, recurrent states)\n", "context", info_gib(state),
           info->limits.kv_kind == KV_BF16 ? "bf16" : "f32");
    printf("%-16s %10.2f GiB  (%u rows a step)\n", "activations", info_gib(info->scratch),
           info->chunk);
    printf("%-16s %10.2f GiB\n", "total", info_gib(total));
    if (!info->available) {
        printf("%-16s    unknown\n", "available");
        return;
    }
    printf("%-16s %10.2f GiB\n", "available", info_gib(info->available));
    if (!largest)
        printf("It does not fit: use a smaller model or a machine with more memory.\n");
    else if (total > info->available)
        printf("It fits with a shorter context: at most %u positions.\n", largest);
    else
        printf("It fits; the largest context that fits is %u positions.\n", largest);
}

/* ---- json ---------------------------------------------------------------------------------- */

static void info_set_number(json_t *object, const char *key, uint64_t value)
{
    json_object_set_new(object, key, json_integer((json_int_t)value));
}

static json_t *info_json_bytes(const struct model_bytes *b)
{
    json_t *o = json_object();
    info_set_number(o, "embedding", b->embedding);
    info_set_number(o, "head", b->head);
    info_set_number(o, "attention", b->attention);
    info_set_number(o, "delta", b->delta);
    info_set_number(o, "experts", b->experts);
    info_set_number(o, "shared", b->shared);
    info_set_number(o, "router", b->router);
    info_set_number(o, "norms", b->norms);
    info_set_number(o, "total", b->total);
    info_set_number(o, "per_token", b->per_token);
    return o;
}

static json_t *info_json_quant(const struct weight *w)
{
    if (w->kind == WEIGHT_AFFINE)
        return json_pack("{s:s, s:i, s:i}", "kind", "affine", "bits", (int)w->bits, "group",
                         (int)w->group);
    return json_pack("{s:s}", "kind", w->kind == WEIGHT_F32 ? "f32" : "bf16");
}

static json_t *info_json_config(const struct config *c)
{
    json_t *o = json_object();
    info_set_number(o, "vocab", c->vocab);
    info_set_number(o, "hidden", c->hidden);
    info_set_number(o, "layers", c->layers);
    info_set_number(o, "attention_layers", c->attention_layers);
    info_set_number(o, "delta_layers", c->delta_layers);
    info_set_number(o, "heads", c->heads);
    info_set_number(o, "kv_heads", c->kv_heads);
    info_set_number(o, "key_heads", c->key_heads);
    info_set_number(o, "value_heads", c->value_heads);
    info_set_number(o, "experts", c->experts);
    info_set_number(o, "topk", c->topk);
    info_set_number(o, "width", c->width);
    info_set_number(o, "shared_width", c->shared_width);
    info_set_number(o, "max_ctx", c->max_ctx);
    json_object_set_new(o, "tie_embeddings", json_boolean(c->tie_embeddings));
    return o;
}

static void info_print_json(const struct info *info)
{
    const struct model *m = &info->model;
    json_t *root = json_object(), *memory = json_object(), *quant = json_object();
    uint64_t total = info_total_bytes(info, info->ctx);
    json_object_set_new(root, "model", json_string(info->folder));
    json_object_set_new(root, "config", info_json_config(&m->config));
    info_set_number(root, "parameters", m->bytes.parameters);
    info_set_number(root, "active_parameters", m->bytes.active_parameters);
    json_object_set_new(root, "bytes", info_json_bytes(&m->bytes));
    json_object_set_new(quant, "embedding", info_json_quant(&m->embed));
    json_object_set_new(quant, "head", info_json_quant(&m->head));
    json_object_set_new(quant, "experts", info_json_quant(&m->layers[0].gate));
    json_object_set_new(quant, "router", info_json_quant(&m->layers[0].router));
    json_object_set_new(root, "weights", quant);
    json_object_set_new(memory, "device", json_string(info->device));
    json_object_set_new(memory, "kv",
                        json_string(info->limits.kv_kind == KV_BF16 ? "bf16" : "f32"));
    info_set_number(memory, "ctx", info->ctx);
    info_set_number(memory, "slots", info->limits.slots);
    info_set_number(memory, "weights", m->bytes.total);
    info_set_number(memory, "context", info_state_bytes(info, info->ctx));
    info_set_number(memory, "activations", info->scratch);
    info_set_number(memory, "total", total);
    if (info->available) {
        info_set_number(memory, "available", info->available);
        info_set_number(memory, "largest_ctx", info_largest_ctx(info));
        json_object_set_new(memory, "fits", json_boolean(total <= info->available));
    }
    json_object_set_new(root, "memory", memory);
    json_dumpf(root, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(root);
}

/* ---- command ------------------------------------------------------------------------------- */

/* What the device would like and has; it is open only for this question. */
static bool info_ask_device(struct info *info, struct err *err)
{
    struct device *device;
    if (!device_open(&(struct device_options){.name = info->backend}, &device, err))
        return false;
    const struct device_head *head = device_head(device);
    uint64_t host = mem_available_bytes();
    snprintf(info->device, sizeof info->device, "%s", head->name);
    info->limits.kv_kind = head->kv_kind;
    info->chunk = info->chunk ? info->chunk : device_prefill_rows(device);
    info->available = host;
    if (head->memory_bytes && (!host || head->memory_bytes < host))
        info->available = head->memory_bytes;
    device_close(device);
    return true;
}

static bool info_gather(struct info *info, struct err *err)
{
    if (!info_ask_device(info, err) || !model_open(info->folder, NULL, NULL, &info->model, err))
        return false;
    uint32_t max = info->model.config.max_ctx;
    if (info->ctx > max)
        return err_set(err, ERR_USAGE, "--ctx %u is more than the model's %u positions", info->ctx,
                       max);
    if (!info->ctx)
        info->ctx = max;
    info->limits.slots = info->slots;
    info->scratch = graph_bytes(
        &info->model.config,
        &(struct graph_limits){.rows = info->chunk, .segments = info->slots, .logit_rows = 1});
    return true;
}

static int info_run(struct info *info)
{
    struct err err;
    char *named = info->folder;
    bool ok = load_find(named, &info->folder, &err) && info_gather(info, &err);
    free(named);
    if (ok && info->json) {
        info_print_json(info);
    } else if (ok) {
        info_print_architecture(info);
        info_print_bytes(info);
        info_print_memory(info);
    }
    model_close(&info->model);
    return ok ? 0 : cmd_fail("info", &err);
}

enum { INFO_CTX = 256, INFO_SLOTS, INFO_CHUNK, INFO_BACKEND, INFO_JSON };

static bool info_parse_option(struct info *info, int option, struct err *err)
{
    switch (option) {
    case 'm':
        free(info->folder);
        info->folder = mem_copy_text(optarg, strlen(optarg));
        return true;
    case INFO_CTX:
        return cmd_parse_u32("--ctx", optarg, 1, 1 << 30, &info->ctx, err);
    case INFO_SLOTS:
        return cmd_parse_u32("--slots", optarg, 1, 4096, &info->slots, err);
    case INFO_CHUNK:
        return cmd_parse_u32("--chunk", optarg, 1, 65536, &info->chunk, err);
    case INFO_BACKEND:
        info->backend = optarg;
        return true;
    default:
        info->json = true;
        return true;
    }
}

int cmd_info(int argc, char **argv)
{
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},
        {"ctx", required_argument, NULL, INFO_CTX},
        {"slots", required_argument, NULL, INFO_SLOTS},
        {"chunk", required_argument, NULL, INFO_CHUNK},
        {"backend", required_argument, NULL, INFO_BACKEND},
        {"json", no_argument, NULL, INFO_JSON},
        {0},
    };
    struct info info = {.slots = 1};
    struct err err;
    int option, code = -1;
    while (code < 0 && (option = cmd_next_option(argc, argv, ":m:h", options)) != -1) {
        if (option == 'h') {
            fputs(info_help, stdout);
            code = 0;
        } else if (option == '?') {
            code = err_exit_code(ERR_USAGE);
        } else if (!info_parse_option(&info, option, &err)) {
            code = cmd_usage("info", "%s", err.text);
        }
    }
    if (code < 0 && optind < argc)
        code = cmd_usage("info", "unexpected argument '%s'", argv[optind]);
    if (code < 0)
        code = info_run(&info);
    free(info.folder);
    return code;
}
