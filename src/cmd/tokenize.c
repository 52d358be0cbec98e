/* calla tokenize: text to ids and back, for a look at what a model sees and for scripts. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "cmd/load.h"
#include "text/tokenizer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct tokenize_options {
    bool decode, json, no_special;
};

static const char tokenize_help[] =
    "usage: calla tokenize [-m DIR] [options] [TEXT...]\n"
    "       calla tokenize --decode [-m DIR] [options] [ID...]\n"
    "\n"
    "Prints the token ids of a text, or the text of token ids. Without TEXT or ID reads standard\n"
    "input to its end. Several TEXTs are joined by single spaces. The text is taken as it is: a\n"
    "final newline counts, and no chat template is applied.\n"
    "\n"
    "  -m, --model MODEL folder (tokenizer.json is enough) or pulled model (default: the demo "
    "model)\n"
    "  -d, --decode      ids to text; an id without text gives nothing\n"
    "      --json        line by line: each line of standard input is a JSON string, each line\n"
    "                    out a JSON array of its ids; with --decode the other way round\n"
    "      --no-special  added tokens such as <|im_end|> are ordinary text; with --decode,\n"
    "                    special tokens are left out\n"
    "  -h, --help        this text\n"
    "\n"
    "examples:\n"
    "  calla tokenize 'Hello world'\n"
    "  calla tokenize -m ~/models/Qwen3.6-35B-A3B-4bit < README.md | wc -w\n"
    "  calla tokenize 'Hello world' | calla tokenize --decode\n"
    "  echo '\"two\\nlines\"' | calla tokenize --json\n"
    "\n"
    "exit codes: 0 done, 2 wrong usage, 3 unreadable model or input, lost output, 4 not\n"
    "enough memory or disk\n";

static bool tokenize_encode(const struct tokenizer *tokenizer, const char *text, size_t n,
                            const struct tokenize_options *options, struct token_list *ids,
                            struct err *err)
{
    struct text_range all = {0, n};
    ids->len = 0;
    return tokenizer_encode(tokenizer, text, n, &all, options->no_special, ids, err);
}

static void tokenize_decode(const struct tokenizer *tokenizer, const struct token_list *ids,
                            const struct tokenize_options *options, struct buf *out)
{
    struct detokenizer d = {.tokenizer = tokenizer, .skip_special = options->no_special};
    buf_clear(out);
    for (size_t i = 0; i < ids->len; i++)
        detokenizer_push(&d, ids->ids[i], out);
    detokenizer_finish(&d, out);
}

/* The plain forms: one text in, one text out. */
static bool tokenize_whole(const struct tokenizer *tokenizer, const struct buf *in,
                           const struct tokenize_options *options, struct err *err)
{
    struct token_list ids = {0};
    struct buf out = {0};
    bool ok = true;
    if (options->decode) {
        ok = cmd_parse_ids(in->data ? in->data : "", &ids, err);
        tokenize_decode(tokenizer, &ids, options, &out);
        if (ok && isatty(STDOUT_FILENO) && out.len && out.data[out.len - 1] != '\n')
            buf_append_char(&out, '\n');
    } else {
        ok = tokenize_encode(tokenizer, in->data ? in->data : "", in->len, options, &ids, err);
        for (size_t i = 0; i < ids.len; i++)
            buf_printf(&out, "%s%d", i ? " " : "", ids.ids[i]);
        buf_append_char(&out, '\n');
    }
    if (ok && out.len)
        fwrite(out.data, 1, out.len, stdout);
    buf_free(&out);
    token_list_free(&ids);
    return ok;
}

/* One value of the JSON form; the result as a new JSON value, or null. */
static json_t *tokenize_json_value(const struct tokenizer *tokenizer, json_t *value,
                                   const struct tokenize_options *options, struct err *err)
{
    struct token_list ids = {0};
    json_t *result = NULL;
    if (options->decode) {
        size_t i;
        json_t *item;
        bool ok = json_is_array(value);
        json_array_foreach(value, i, item)
        {
            json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
            ok = ok && id >= 0 && id <= INT32_MAX;
            if (ok)
                token_list_push(&ids, (int32_t)id);
        }
        struct buf text = {0};
        tokenize_decode(tokenizer, &ids, options, &text);
        if (ok)
            result = json_stringn(text.data ? text.data : "", text.len);
        else
            err_set(err, ERR_INPUT, "not a JSON array of token ids");
        buf_free(&text);
    } else if (!json_is_string(value)) {
        err_set(err, ERR_INPUT, "not a JSON string");
    } else if (tokenize_encode(tokenizer, json_string_value(value), json_string_length(value),
                               options, &ids, err)) {
        result = json_array();
        for (size_t i = 0; i < ids.len; i++)
            json_array_append_new(result, json_integer(ids.ids[i]));
    }
    token_list_free(&ids);
    return result;
}

static bool tokenize_lines(const struct tokenizer *tokenizer, FILE *in,
                           const struct tokenize_options *options, struct err *err)
{
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t n;
    bool ok = true;
    while (ok && (n = getline(&line, &cap, in)) >= 0) {
        number++;
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        json_error_t why;
        json_t *value = json_loadb(line, (size_t)n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
        json_t *result = value ? tokenize_json_value(tokenizer, value, options, err) : NULL;
        if (!value)
            err_set(err, ERR_INPUT, "not JSON: %s", why.text);
        ok = result && json_dumpf(result, stdout, JSON_ENCODE_ANY | JSON_COMPACT) == 0;
        if (result)
            putchar('\n');
        else
            err_wrap(err, "line %zu", number);
        json_decref(value);
        json_decref(result);
    }
    free(line);
    return ok;
}

static int tokenize_run(const char *folder, int argc, char **argv,
                        const struct tokenize_options *options)
{
    struct err err = {0};
    struct tokenizer *tokenizer;
    struct buf in = {0};
    if (!tokenizer_open(folder, &tokenizer, &err))
        return cmd_fail("tokenize", &err);
    bool ok;
    if (options->json) {
        ok = tokenize_lines(tokenizer, stdin, options, &err);
    } else {
        ok = argc || cmd_read_stdin(&in, &err);
        for (int i = 0; i < argc; i++) {
            buf_append_text(&in, i ? " " : "");
            buf_append_text(&in, argv[i]);
        }
        ok = ok && tokenize_whole(tokenizer, &in, options, &err);
    }
    buf_free(&in);
    tokenizer_close(tokenizer);
    return ok ? 0 : cmd_fail("tokenize", &err);
}

int cmd_tokenize(int argc, char **argv)
{
    enum { OPT_JSON = 256, OPT_NO_SPECIAL };
    static const struct option longs[] = {
        {"model", required_argument, NULL, 'm'}, {"decode", no_argument, NULL, 'd'},
        {"json", no_argument, NULL, OPT_JSON},   {"no-special", no_argument, NULL, OPT_NO_SPECIAL},
        {"help", no_argument, NULL, 'h'},        {NULL, 0, NULL, 0},
    };
    struct tokenize_options options = {0};
    const char *named = NULL;
    int c;
    while ((c = cmd_next_option(argc, argv, ":m:dh", longs)) != -1) {
        switch (c) {
        case 'm':
            named = optarg;
            break;
        case 'd':
            options.decode = true;
            break;
        case OPT_JSON:
            options.json = true;
            break;
        case OPT_NO_SPECIAL:
            options.no_special = true;
            break;
        case 'h':
            fputs(tokenize_help, stdout);
            return 0;
        default:
            return err_exit_code(ERR_USAGE);
        }
    }
    if (options.json && optind < argc)
        return cmd_usage("tokenize", "--json reads standard input; it takes no TEXT or ID");
    char *found;
    struct err err;
    if (!load_find(named, &found, &err))
        return cmd_fail("tokenize", &err);
    int code = tokenize_run(found, argc - optind, argv + optind, &options);
    free(found);
    return code;
}
