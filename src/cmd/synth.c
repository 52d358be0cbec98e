/* calla synth: a synthetic checkpoint of any size of the family. */
#include "cmd/cmd.h"

#include "base/clock.h"
#include "base/mem.h"
#include "model/synth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char synth_help[] =
    "usage: calla synth -o DIR [options]\n"
    "\n"
    "Writes a checkpoint in MLX form with random, well-scaled weights and a tokenizer: for tests "
    "and\n"
    "measurements without a download. The same options and seed give the same bytes.\n"
    "\n"
    "  -o, --output DIR       the folder to write; made when missing\n"
    "      --config FILE      take the sizes from this config.json (default: Qwen3.6-35B-A3B's)\n"
    "      --seed N           default 1\n"
    "      --bits N           2, 3, 4 (default), 5, 6 or 8; router and shared gate always have 8\n"
    "      --group N          32, 64 (default) or 128\n"
    "      --threads N        default: one a core\n"
    "  -h, --help             this text\n"
    "\n"
    "Sizes, each over what the config says:\n"
    "      --layers N  --interval N (every N-th layer is full attention)  --hidden N  --vocab N\n"
    "      --heads N  --kv-heads N  --key-heads N  --value-heads N  --ctx N\n"
    "      --experts N  --topk N  --width N  --shared-width N  --tie\n"
    "\n"
    "examples:\n"
    "  calla synth -o /data/synth-35b                       19.5 GB, the full size\n"
    "  calla synth -o tiny --layers 4 --hidden 256 --experts 16 --width 128 --vocab 4096\n"
    "  calla synth -o tiny6 --layers 4 --bits 6 --seed 7\n";

enum {
    SYNTH_CONFIG = 256,
    SYNTH_SEED,
    SYNTH_BITS,
    SYNTH_GROUP,
    SYNTH_THREADS,
    SYNTH_INTERVAL,
    SYNTH_TIE,
    SYNTH_SIZES, /* + index in synth_sizes */
};

static const struct synth_size {
    const char *name;
    size_t field; /* of struct config, u32 */
    uint32_t hi;
} synth_sizes[] = {
    {"layers", offsetof(struct config, layers), CONFIG_MAX_LAYERS},
    {"hidden", offsetof(struct config, hidden), 65536},
    {"vocab", offsetof(struct config, vocab), 1 << 22},
    {"heads", offsetof(struct config, heads), 1024},
    {"kv-heads", offsetof(struct config, kv_heads), 1024},
    {"key-heads", offsetof(struct config, key_heads), 1024},
    {"value-heads", offsetof(struct config, value_heads), 1024},
    {"ctx", offsetof(struct config, max_ctx), 1 << 30},
    {"experts", offsetof(struct config, experts), 4096},
    {"topk", offsetof(struct config, topk), 4096},
    {"width", offsetof(struct config, width), 65536},
    {"shared-width", offsetof(struct config, shared_width), 65536},
};

enum { SYNTH_SIZE_COUNT = sizeof synth_sizes / sizeof *synth_sizes };

struct synth_request {
    const char *output, *config_path;
    uint32_t sizes[SYNTH_SIZE_COUNT]; /* 0: as the config says */
    uint32_t interval;
    bool tie;
    struct synth_options options;
};

/* The sizes asked for, over those of the config; fails on combinations that the model rules out. */
static bool synth_apply(const struct synth_request *request, struct config *c, struct err *err)
{
    for (int i = 0; i < SYNTH_SIZE_COUNT; i++)
        if (request->sizes[i])
            *(uint32_t *)((char *)c + synth_sizes[i].field) = request->sizes[i];
    c->tie_embeddings |= request->tie;
    if (request->sizes[0] || request->interval) {
        uint32_t interval = request->interval ? request->interval : 4;
        free(c->full_attention);
        c->full_attention = mem_new(c->layers, sizeof *c->full_attention);
        c->attention_layers = c->layers / interval;
        c->delta_layers = c->layers - c->attention_layers;
        for (uint32_t i = 0; i < c->layers; i++)
            c->full_attention[i] = (i + 1) % interval == 0;
    }
    if (c->heads % c->kv_heads || c->value_heads % c->key_heads)
        return err_set(err, ERR_USAGE,
                       "heads must be a multiple of kv-heads, and value-heads one "
                       "of key-heads");
    if (c->topk > c->experts)
        return err_set(err, ERR_USAGE, "--topk %u is more than the %u experts", c->topk,
                       c->experts);
    return true;
}

static bool synth_parse_option(struct synth_request *r, int option, const char *text,
                               struct err *err)
{
    uint64_t n;
    switch (option) {
    case 'o':
        r->output = text;
        return true;
    case SYNTH_CONFIG:
        r->config_path = text;
        return true;
    case SYNTH_TIE:
        r->tie = true;
        return true;
    case SYNTH_SEED:
        return cmd_parse_uint("--seed", text, 0, UINT64_MAX, &r->options.seed, err);
    case SYNTH_BITS:
        return cmd_parse_bits("--bits", text, &r->options.bits, err);
    case SYNTH_GROUP:
        return cmd_parse_group("--group", text, &r->options.group, err);
    case SYNTH_THREADS:
        if (!cmd_parse_uint("--threads", text, 1, 64, &n, err))
            return false;
        r->options.threads = (int)n;
        return true;
    case SYNTH_INTERVAL:
        return cmd_parse_u32("--interval", text, 1, UINT32_MAX, &r->interval, err);
    default: {
        const struct synth_size *size = &synth_sizes[option - SYNTH_SIZES];
        char name[32];
        snprintf(name, sizeof name, "--%s", size->name);
        return cmd_parse_u32(name, text, 1, size->hi, &r->sizes[option - SYNTH_SIZES], err);
    }
    }
}

static int synth_run_request(struct synth_request *request)
{
    struct err err;
    struct config config;
    uint64_t last_ns = 0, start = clock_now_ns();
    if (!request->config_path)
        synth_preset(&config);
    else if (!config_open_file(request->config_path, &config, &err))
        return cmd_fail("synth", &err);
    if (isatty(STDERR_FILENO)) {
        request->options.progress = cmd_show_progress;
        request->options.progress_user = &last_ns;
    }
    bool ok = synth_apply(request, &config, &err) &&
              synth_write(&config, &request->options, request->output, &err);
    config_close(&config);
    if (!ok)
        return cmd_fail("synth", &err);
    fprintf(stderr, "wrote %s in %.1f s; try: calla info -m %s\n", request->output,
            clock_seconds_since(start), request->output);
    return 0;
}

int cmd_synth(int argc, char **argv)
{
    static const struct option fixed[] = {
        {"output", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},
        {"config", required_argument, NULL, SYNTH_CONFIG},
        {"seed", required_argument, NULL, SYNTH_SEED},
        {"bits", required_argument, NULL, SYNTH_BITS},
        {"group", required_argument, NULL, SYNTH_GROUP},
        {"threads", required_argument, NULL, SYNTH_THREADS},
        {"interval", required_argument, NULL, SYNTH_INTERVAL},
        {"tie", no_argument, NULL, SYNTH_TIE},
    };
    enum { FIXED = sizeof fixed / sizeof *fixed };
    struct option options[FIXED + SYNTH_SIZE_COUNT + 1] = {0};
    memcpy(options, fixed, sizeof fixed);
    for (int i = 0; i < SYNTH_SIZE_COUNT; i++)
        options[FIXED + i] =
            (struct option){synth_sizes[i].name, required_argument, NULL, SYNTH_SIZES + i};
    struct synth_request request = {.options = {.seed = 1, .bits = 4, .group = 64}};
    struct err err;
    int option;
    while ((option = cmd_next_option(argc, argv, ":o:h", options)) != -1) {
        if (option == 'h') {
            fputs(synth_help, stdout);
            return 0;
        }
        if (option == '?')
            return err_exit_code(ERR_USAGE);
        if (!synth_parse_option(&request, option, optarg, &err))
            return cmd_usage("synth", "%s", err.text);
    }
    if (optind < argc)
        return cmd_usage("synth", "unexpected argument '%s'", argv[optind]);
    if (!request.output)
        return cmd_usage("synth", "name the folder to write with -o DIR");
    return synth_run_request(&request);
}
