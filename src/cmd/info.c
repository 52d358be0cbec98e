/* calla info: what a checkpoint is, what it takes, and whether it fits here. Reads headers only. */
#include "cmd/cmd.h"

#include "backend/device.h"
#include "base/mem.h"
#include "cmd/load.h"
#include "engine/fit.h"

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
    struct device *device;
    struct model model;
    struct fit fit;
};

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

static void info_print_part(const char *name, uint64_t bytes, const char *note)
{
    printf("%-16s %10.2f GiB%s\n", name, info_gib(bytes), note);
}

static void info_print_memory(const struct info *info)
{
    struct fit_bytes b = fit_bytes(&info->fit, info->ctx);
    uint64_t available = info->fit.available;
    uint32_t largest = fit_largest_ctx(&info->fit);
    printf("\nmemory for %u x %u positions on %s, %u rows of a prompt a step\n", info->slots,
           info->ctx, device_head(info->device)->name, info->chunk);
    info_print_part("weights", b.weights, "");
    info_print_part("keys and values", b.kv,
                    info->fit.state.kv_kind == KV_BF16 ? "  (bf16)" : "  (f32)");
    info_print_part("states", b.states, "");
    info_print_part("activations", b.activations, "");
    info_print_part("scratch", b.scratch, "  (of decoding attention)");
    info_print_part("snapshots", b.snapshots,
                    "  (the prefix cache takes more where there is more)");
    info_print_part("total", b.total, "");
    if (available == UINT64_MAX) {
        printf("%-16s    unknown\n", "available");
        return;
    }
    info_print_part("available", available, "");
    if (!largest)
        printf("No context fits: use a smaller model or a machine with more memory.\n");
    else if (b.total > available)
        printf("It does not fit; the largest context that fits is %u positions.\n", largest);
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

static json_t *info_json_memory(const struct info *info)
{
    json_t *o = json_object();
    struct fit_bytes b = fit_bytes(&info->fit, info->ctx);
    json_object_set_new(o, "device", json_string(device_head(info->device)->name));
    json_object_set_new(o, "kv", json_string(info->fit.state.kv_kind == KV_BF16 ? "bf16" : "f32"));
    info_set_number(o, "ctx", info->ctx);
    info_set_number(o, "slots", info->slots);
    info_set_number(o, "weights", b.weights);
    info_set_number(o, "keys_and_values", b.kv);
    info_set_number(o, "states", b.states);
    info_set_number(o, "activations", b.activations);
    info_set_number(o, "scratch", b.scratch);
    info_set_number(o, "snapshots", b.snapshots);
    info_set_number(o, "total", b.total);
    if (info->fit.available != UINT64_MAX) {
        info_set_number(o, "available", info->fit.available);
        info_set_number(o, "largest_ctx", fit_largest_ctx(&info->fit));
        json_object_set_new(o, "fits", json_boolean(b.total <= info->fit.available));
    }
    return o;
}

static void info_print_json(const struct info *info)
{
    const struct model *m = &info->model;
    json_t *root = json_object(), *quant = json_object();
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
    json_object_set_new(root, "memory", info_json_memory(info));
    json_dumpf(root, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(root);
}

/* ---- command ------------------------------------------------------------------------------- */

static bool info_gather(struct info *info, struct err *err)
{
    const struct device_options options = {.name = info->backend};
    if (!device_open(&options, &info->device, err) ||
        !model_open(info->folder, NULL, NULL, &info->model, err))
        return false;
    uint32_t max = info->model.config.max_ctx;
    if (info->ctx > max)
        return err_set(err, ERR_USAGE, "--ctx %u is more than the model's %u positions", info->ctx,
                       max);
    if (!info->ctx)
        info->ctx = max;
    if (!info->chunk)
        info->chunk = device_prefill_rows(info->device);
    info->fit = fit_make(&info->model, info->device,
                         &(struct fit_options){.chunk = info->chunk,
                                               .parallel = info->slots,
                                               .kv_kind = device_head(info->device)->kv_kind});
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
    device_close(info->device);
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
