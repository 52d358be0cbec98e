/* calla: the command line. */
#include "cmd/cmd.h"

#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const struct cmd commands[] = {
    {"bench", "how fast prompts are read and answers written here", cmd_bench},
    {"chat", "talk with the model", cmd_chat},
    {"eval", "perplexity of a text; agreement with a reference", cmd_eval},
    {"info", "what a checkpoint is, what it takes, whether it fits here", cmd_info},
    {"pull", "fetch a model from a Hugging Face hub", cmd_pull},
    {"quantize", "turn a bf16 checkpoint into MLX affine form", cmd_quantize},
    {"render", "a chat request to the exact prompt that the model sees", cmd_render},
    {"run", "answer one prompt", cmd_run},
    {"serve", "HTTP: the OpenAI, Anthropic and Responses APIs, and a chat page", cmd_serve},
    {"synth", "write a synthetic checkpoint with random weights", cmd_synth},
    {"tokenize", "turn text into token ids and back", cmd_tokenize},
    {NULL, NULL, NULL},
};

static int main_help(FILE *out)
{
    fprintf(out, "calla %s - local inference for the qwen3_5_moe family\n\n", CALLA_VERSION);
    fprintf(out, "usage: calla [-v] COMMAND [options]\n\ncommands:\n");
    for (const struct cmd *c = commands; c->name; c++)
        fprintf(out, "  %-10s %s\n", c->name, c->summary);
    fprintf(
        out,
        "\n'calla COMMAND --help' shows a command's options and examples.\n"
        "Commands that need a model and are given none use the demo model.\n"
        "\nexit codes: 0 done, 2 wrong usage, 3 damaged or unfit input, or what cannot be read or\n"
        "written, 4 too little memory, context or disk, 5 internal fault\n");
    return 0;
}

static int main_run(int argc, char **argv)
{
    int i = 1;
    for (; i < argc && !strcmp(argv[i], "-v"); i++)
        log_set_level(i == 1 ? LOG_INFO : LOG_DEBUG);
    if (i >= argc) {
        main_help(stderr);
        return err_exit_code(ERR_USAGE);
    }
    if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h") || !strcmp(argv[i], "help"))
        return main_help(stdout);
    if (!strcmp(argv[i], "--version")) {
        printf("calla %s\n", CALLA_VERSION);
        return 0;
    }
    for (const struct cmd *c = commands; c->name; c++)
        if (!strcmp(argv[i], c->name))
            return c->run(argc - i, argv + i);
    fprintf(stderr, "calla: there is no command '%s'\nTry 'calla --help'.\n", argv[i]);
    return err_exit_code(ERR_USAGE);
}

int main(int argc, char **argv)
{
    int code = main_run(argc, argv);
    struct err err;
    bool lost = ferror(stdout);
    errno = 0;
    lost |= fflush(stdout) != 0;
    if (code || !lost)
        return code;
    if (!errno) { /* an earlier write failed, and its reason is gone: another one will tell */
        clearerr(stdout);
        putchar('\n');
        fflush(stdout);
    }
    if (errno)
        err_set_errno(&err, "cannot write standard output");
    else
        err_set(&err, ERR_INPUT, "cannot write standard output: an earlier write failed");
    fprintf(stderr, "calla: %s\n", err.text);
    return err_exit_code(err.kind);
}
