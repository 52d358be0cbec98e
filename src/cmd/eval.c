/* calla eval: perplexity of a text, or agreement with another engine's log-probabilities. */
#include "cmd/load.h"

#include "base/file.h"
#include "cmd/cmd.h"
#include "engine/score.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char eval_help[] =
    "usage: calla eval [options] [-f FILE | --ids FILE | --reference FILE [--set NAME]]\n"
    "\n"
    "Perplexity of a text (FILE or standard input, taken as it is), or of a file of token ids; or\n"
    "how closely this engine agrees with a reference: per set the number of positions, the\n"
    "largest and the mean difference over all listed log-probabilities, how often the first\n"
    "choice is the same, the perplexity, and its ratio to the reference's.\n"
    "\n"
    "  -f, --file FILE      a text\n"
    "      --ids FILE       token ids, separated by blanks, line ends or commas\n"
    "      --reference FILE JSON: set names to lists of {ids, next_logprob, top}, at the top or\n"
    "                       under held_out. Log-probabilities are natural; top holds, for each\n"
    "                       position, [id, log-probability] pairs, best first, as many as known\n"
    "      --set NAME       only this set of it\n"
    "      --json           print one JSON object\n" LOAD_HELP "  -h, --help           this text\n"
    "\n"
    "A text longer than the context is scored in windows of the context's length.\n"
    "\n"
    "examples:\n"
    "  calla eval -f book.txt --ctx 4096\n"
    "  calla eval -m tests/data/fixtures/fixture-mlx --reference "
    "tests/data/fixtures/expected.json \\\n"
    "      --set mlx4\n"
    "  calla eval --reference tests/data/demo/reference.json --chunk 1 --json\n"
    "\n"
    "exit codes: 0 done, 2 wrong usage, 3 unreadable model or input, lost output, 4 not enough\n"
    "memory, context or disk, 5 internal error\n";

enum { EVAL_MAX_BYTES = 1 << 28 };

struct eval_options {
    struct engine_options engine;
    const char *file, *ids, *reference, *set;
    bool json;
};

static double eval_ratio(double sum, size_t n)
{
    return n ? sum / (double)n : 0;
}

static void eval_print(json_t *object)
{
    json_dumpf(object, stdout, JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(12));
    putchar('\n');
    json_decref(object);
}

/* ---- a text ------------------------------------------------------------------------------- */

static bool eval_read_ids(const struct eval_options *o, const struct engine *engine,
                          struct token_list *ids, struct err *err)
{
    struct buf text = {0};
    const char *path = o->ids ? o->ids : o->file;
    bool ok = path ? file_read(path, EVAL_MAX_BYTES, &text, err) : cmd_read_stdin(&text, err);
    const char *data = text.data ? text.data : "";
    if (ok && o->ids) {
        ok = cmd_parse_ids(data, ids, err) || err_wrap(err, "%s", path);
    } else if (ok && !engine_tokenizer(engine)) {
        ok = err_set(err, ERR_INPUT,
                     "the model folder has no tokenizer.json; give token ids with "
                     "--ids");
    } else if (ok) {
        ok = tokenizer_encode(engine_tokenizer(engine), data, text.len,
                              &(struct text_range){0, text.len}, 1, ids, err);
    }
    buf_free(&text);
    return ok;
}

static bool eval_run_text(const struct eval_options *o, struct engine *engine, struct err *err)
{
    struct token_list ids = {0};
    struct score_text result;
    bool ok = eval_read_ids(o, engine, &ids, err) &&
              score_text(engine, ids.ids, ids.len, 0, &result, err);
    token_list_free(&ids);
    if (!ok)
        return false;
    double perplexity = exp(result.nll / (double)result.predicted);
    if (o->json)
        eval_print(json_pack("{s:s, s:I, s:I, s:f, s:f}", "backend", engine_backend(engine),
                             "tokens", (json_int_t)result.tokens, "predicted",
                             (json_int_t)result.predicted, "nll", result.nll, "perplexity",
                             perplexity));
    else
        printf("%zu tokens, %zu predicted, perplexity %.4f\n", result.tokens, result.predicted,
               perplexity);
    return true;
}

/* ---- a reference -------------------------------------------------------------------------- */

static bool eval_is_set(const json_t *value)
{
    return json_is_array(value) && json_object_get(json_array_get(value, 0), "ids");
}

static json_t *eval_describe(const struct score_set *s)
{
    double perplexity = exp(eval_ratio(s->nll, s->predicted));
    double reference = exp(eval_ratio(s->reference_nll, s->predicted));
    return json_pack("{s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "sequences",
                     (json_int_t)s->sequences, "positions", (json_int_t)s->positions, "values",
                     (json_int_t)s->values, "max_difference", s->max_difference, "mean_difference",
                     eval_ratio(s->sum_difference, s->values), "top1_agreement",
                     eval_ratio((double)s->first_equal, s->first_choices), "perplexity", perplexity,
                     "reference_perplexity", reference, "ratio", perplexity / reference);
}

static void eval_print_set(const char *name, const json_t *set)
{
    printf("%-16s %9lld %11.6f %11.6f %8.2f%% %12.4f %9.6f\n", name,
           (long long)json_integer_value(json_object_get(set, "positions")),
           json_real_value(json_object_get(set, "max_difference")),
           json_real_value(json_object_get(set, "mean_difference")),
           100 * json_real_value(json_object_get(set, "top1_agreement")),
           json_real_value(json_object_get(set, "perplexity")),
           json_real_value(json_object_get(set, "ratio")));
    fflush(stdout);
}

/* Scores the sets of the file that were asked for, into `results`. */
static bool eval_sets(const struct eval_options *o, struct engine *engine, json_t *sets,
                      json_t *results, struct err *err)
{
    const char *name;
    json_t *records;
    struct buf names = {0};
    json_object_foreach(sets, name, records)
    {
        if (!eval_is_set(records))
            continue;
        buf_printf(&names, "%s%s", names.len ? ", " : "", name);
        if (o->set && strcmp(o->set, name) != 0)
            continue;
        struct score_set result;
        if (!o->json && json_object_size(results) == 0)
            printf("%-16s %9s %11s %11s %9s %12s %9s\n", "set", "positions", "max diff",
                   "mean diff", "first", "perplexity", "ratio");
        if (!score_set(engine, records, 0, &result, err)) {
            buf_free(&names);
            return err_wrap(err, "%s: set %s", o->reference, name);
        }
        json_t *described = eval_describe(&result);
        if (!o->json)
            eval_print_set(name, described);
        json_object_set_new(results, name, described);
    }
    bool found = json_object_size(results) > 0;
    if (!found && names.len)
        err_set(err, ERR_USAGE, "%s has no set '%s'; it has: %s", o->reference, o->set, names.data);
    else if (!found)
        err_set(err, ERR_INPUT, "%s holds no sets of {ids, next_logprob, top}", o->reference);
    buf_free(&names);
    return found;
}

static bool eval_run_reference(const struct eval_options *o, struct engine *engine, struct err *err)
{
    struct buf text = {0};
    json_error_t why;
    if (!file_read(o->reference, EVAL_MAX_BYTES, &text, err))
        return false;
    json_t *root = json_loadb(text.len ? text.data : "", text.len, 0, &why);
    buf_free(&text);
    if (!root)
        return err_set(err, ERR_INPUT, "%s: line %d: %s", o->reference, why.line, why.text);
    json_t *held_out = json_object_get(root, "held_out");
    json_t *results = json_object();
    bool ok = eval_sets(o, engine, held_out ? held_out : root, results, err);
    if (ok && o->json)
        eval_print(json_pack("{s:s, s:O}", "backend", engine_backend(engine), "sets", results));
    json_decref(results);
    json_decref(root);
    return ok;
}

/* ---- the command -------------------------------------------------------------------------- */

enum { EVAL_IDS = 256, EVAL_REFERENCE, EVAL_SET, EVAL_JSON };

static int eval_check(const struct eval_options *o, int rest, char **argv)
{
    if (rest)
        return cmd_usage("eval", "unexpected argument '%s'; a text is given with -f", argv[0]);
    if (!!o->file + !!o->ids + !!o->reference > 1)
        return cmd_usage("eval", "-f, --ids and --reference exclude each other");
    if (o->set && !o->reference)
        return cmd_usage("eval", "--set names a set of a --reference");
    if (!o->file && !o->ids && !o->reference && isatty(STDIN_FILENO))
        return cmd_usage("eval", "no text: give -f, --ids, --reference or standard input");
    return 0;
}

static int eval_run(const struct eval_options *o)
{
    struct err err = {0};
    struct engine *engine;
    if (!load_engine(&o->engine, &engine, &err))
        return cmd_fail("eval", &err);
    bool ok = o->reference ? eval_run_reference(o, engine, &err) : eval_run_text(o, engine, &err);
    engine_close(engine);
    return ok ? 0 : cmd_fail("eval", &err);
}

int cmd_eval(int argc, char **argv)
{
    static const struct option longs[] = {
        LOAD_OPTIONS,
        {"file", required_argument, NULL, 'f'},
        {"ids", required_argument, NULL, EVAL_IDS},
        {"reference", required_argument, NULL, EVAL_REFERENCE},
        {"set", required_argument, NULL, EVAL_SET},
        {"json", no_argument, NULL, EVAL_JSON},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct eval_options o = {0};
    struct err err = {0};
    int c;
    while ((c = cmd_next_option(argc, argv, ":m:f:h", longs)) != -1) {
        bool taken = true;
        switch (c) {
        case 'f':
            o.file = optarg;
            break;
        case EVAL_IDS:
            o.ids = optarg;
            break;
        case EVAL_REFERENCE:
            o.reference = optarg;
            break;
        case EVAL_SET:
            o.set = optarg;
            break;
        case EVAL_JSON:
            o.json = true;
            break;
        case 'h':
            fputs(eval_help, stdout);
            return 0;
        case '?':
            return err_exit_code(ERR_USAGE);
        default:
            if (!load_option(c, optarg, &o.engine, &taken, &err) || !taken)
                return cmd_usage("eval", "%s", err.text);
        }
    }
    int code = eval_check(&o, argc - optind, argv + optind);
    return code ? code : eval_run(&o);
}
