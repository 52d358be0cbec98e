/* calla quantize: a Hugging Face bf16 checkpoint to MLX affine form. */
#include "cmd/cmd.h"

#include "base/clock.h"
#include "cmd/load.h"
#include "model/quantize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char quantize_help[] =
    "usage: calla quantize -m DIR -o DIR [options]\n"
    "\n"
    "Reads a bf16 checkpoint as published on Hugging Face and writes it with its matrices in "
    "MLX's\n"
    "affine form. Vision and multi-token prediction are left out. Needs little memory: the source "
    "is\n"
    "read block by block.\n"
    "\n"
    "  -m, --model MODEL   the bf16 checkpoint: a folder, or the name of a pulled model\n"
    "  -o, --output DIR    the folder to write; made when missing\n"
    "      --bits N        2, 3, 4 (default), 5, 6 or 8\n"
    "      --group N       weights that share a scale: 32, 64 (default) or 128\n"
    "      --module M=N    other bits for the modules whose path ends in M; N = none leaves them\n"
    "                      in bf16. May be given several times, the last that fits decides; the\n"
    "                      router (mlp.gate) and mlp.shared_expert_gate have 8 unless told\n"
    "      --threads N     default: one a core\n"
    "  -h, --help          this text\n"
    "\n"
    "examples:\n"
    "  calla quantize -m Qwen3.6-35B-A3B -o Qwen3.6-35B-A3B-4bit\n"
    "  calla quantize -m Qwen3.6-35B-A3B -o q6 --bits 6 --module lm_head=8 --module "
    "embed_tokens=8\n"
    "  calla quantize -m Qwen3.6-35B-A3B -o q4 --module linear_attn.in_proj_a=none\n";

enum { QUANTIZE_RULES_MAX = 64 };

struct quantize_request {
    const char *from, *to;
    struct quantize_options options;
    struct quantize_rule rules[QUANTIZE_RULES_MAX];
};

enum { QUANTIZE_BITS = 256, QUANTIZE_GROUP, QUANTIZE_MODULE, QUANTIZE_THREADS };

/* "lm_head=6"; cuts the argument at the sign. */
static bool quantize_parse_rule(struct quantize_request *r, char *text, struct err *err)
{
    char *sign = strchr(text, '=');
    if (!sign || sign == text)
        return err_set(err, ERR_USAGE, "--module wants NAME=BITS, not '%s'", text);
    if (r->options.rule_count == QUANTIZE_RULES_MAX)
        return err_set(err, ERR_USAGE, "--module may be given at most %d times",
                       QUANTIZE_RULES_MAX - 2);
    struct quantize_rule *rule = &r->rules[r->options.rule_count++];
    *sign = 0;
    rule->suffix = text;
    rule->bits = 0;
    return !strcmp(sign + 1, "none") || cmd_parse_bits("--module", sign + 1, &rule->bits, err);
}

static bool quantize_parse_option(struct quantize_request *r, int option, struct err *err)
{
    uint64_t n;
    switch (option) {
    case 'm':
        r->from = optarg;
        return true;
    case 'o':
        r->to = optarg;
        return true;
    case QUANTIZE_BITS:
        return cmd_parse_bits("--bits", optarg, &r->options.bits, err);
    case QUANTIZE_GROUP:
        return cmd_parse_group("--group", optarg, &r->options.group, err);
    case QUANTIZE_MODULE:
        return quantize_parse_rule(r, optarg, err);
    default:
        if (!cmd_parse_uint("--threads", optarg, 1, 64, &n, err))
            return false;
        r->options.threads = (int)n;
        return true;
    }
}

static int quantize_run(struct quantize_request *request)
{
    struct err err;
    uint64_t last_ns = 0, start = clock_now_ns();
    request->options.rules = request->rules;
    if (isatty(STDERR_FILENO)) {
        request->options.progress = cmd_show_progress;
        request->options.progress_user = &last_ns;
    }
    char *from;
    bool ok = load_find(request->from, &from, &err) &&
              quantize_checkpoint(from, request->to, &request->options, &err);
    free(from);
    if (!ok)
        return cmd_fail("quantize", &err);
    fprintf(stderr, "wrote %s in %.1f s; try: calla info -m %s\n", request->to,
            clock_seconds_since(start), request->to);
    return 0;
}

int cmd_quantize(int argc, char **argv)
{
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"output", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},
        {"bits", required_argument, NULL, QUANTIZE_BITS},
        {"group", required_argument, NULL, QUANTIZE_GROUP},
        {"module", required_argument, NULL, QUANTIZE_MODULE},
        {"threads", required_argument, NULL, QUANTIZE_THREADS},
        {0},
    };
    struct quantize_request request = {
        .options = {.bits = 4, .group = 64, .rule_count = 2},
        .rules = {{"mlp.gate", 8}, {"mlp.shared_expert_gate", 8}},
    };
    struct err err;
    int option;
    while ((option = cmd_next_option(argc, argv, ":m:o:h", options)) != -1) {
        if (option == 'h') {
            fputs(quantize_help, stdout);
            return 0;
        }
        if (option == '?')
            return err_exit_code(ERR_USAGE);
        if (!quantize_parse_option(&request, option, &err))
            return cmd_usage("quantize", "%s", err.text);
    }
    if (optind < argc)
        return cmd_usage("quantize", "unexpected argument '%s'", argv[optind]);
    if (!request.from || !request.to)
        return cmd_usage("quantize", "name the source with -m DIR and the folder to write with "
                                     "-o DIR");
    return quantize_run(&request);
}
