/* calla run: one prompt, one answer. The answer goes to stdout, all else to stderr. */
#include "cmd/load.h"

#include "base/clock.h"
#include "base/file.h"
#include "cmd/cmd.h"
#include "text/template.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char run_help[] =
    "usage: calla run [options] [-p TEXT | -f FILE]\n"
    "\n"
    "Answers one prompt: TEXT, the content of FILE, or standard input. The answer streams to\n"
    "standard output, statistics go to standard error. The prompt becomes a user message of the\n"
    "model's chat format, unless --raw. The model's thoughts come before the answer and end with\n"
    "</think>.\n"
    "\n"
    "  -p, --prompt TEXT  the prompt\n"
    "  -f, --file FILE    read the prompt from FILE\n"
    "      --system TEXT  a system message before it\n"
    "      --think, --no-think  think before the answer, or not (default: the model's own)\n"
    "      --raw          no chat format: continue the text as it is; control tokens such as\n"
    "                     <|im_start|> in it are recognised, and shown in the answer\n"
    "  -n, --tokens N     at most N tokens (default: until the model or the context ends)\n"
    "      --temp T       temperature, 0 is greedy (default of these five: the model's own)\n"
    "      --top-k N      choose among the N likeliest; 0: all\n"
    "      --top-p P      choose among the likeliest that sum to P; 1: all\n"
    "      --min-p P      drop what is less likely than P times the likeliest; 0: none\n"
    "      --seed N       same seed, same answer (default: a new one each time)\n"
    "      --stop TEXT    end before TEXT appears in the answer; may be given several times\n"
    "      --ignore-eos   go on past the model's own end\n"
    "      --json-schema FILE\n"
    "                     the answer, after any thinking, is JSON that fits the schema in FILE\n"
    "      --json         print one object at the end: text, ids, prompt_ids, finish_reason,\n"
    "                     timings\n" LOAD_HELP "  -h, --help         this text\n"
    "\n"
    "examples:\n"
    "  calla run -p 'What is the capital of France?' --no-think --temp 0\n"
    "  calla run -m ~/models/Qwen3.6-35B-A3B-4bit -f question.txt -n 500\n"
    "  git diff | calla run --no-think --system 'Write a commit message for this change.'\n"
    "  calla run --json-schema person.json -p 'Who was J. S. Bach?'\n"
    "  calla run --raw -p 'In the beginning' -n 40 --json\n"
    "\n"
    "exit codes: 0 done, 2 wrong usage, 3 unreadable model or input, lost output, 4 not enough\n"
    "memory, context or disk, 5 internal error\n";

enum { RUN_MAX_STOPS = 64, RUN_MAX_PROMPT = 1 << 28, RUN_MAX_SCHEMA = 1 << 24 };

struct run {
    struct engine_options engine;
    const char *text, *file, *system, *schema;
    bool raw, think, no_think, ignore_eos, json;
    uint64_t tokens;
    double temp, top_p, min_p; /* NaN: the model's own */
    int64_t top_k;             /* -1: the model's own */
    uint64_t seed;
    const char *stops[RUN_MAX_STOPS];
    size_t stop_count;

    struct buf answer; /* with --json */
    bool thinking;     /* the text being printed is dimmed reasoning */
    int32_t think_end; /* id of </think>, or -1 */
    bool skip_lines;   /* line ends before a value that is all of the answer */
    bool colours;      /* stdout is a terminal */
    bool progress;     /* a progress line stands on stderr */
    int lost;          /* errno of the write that stdout refused, or 0 */
    uint64_t start_ns;
};

/* ---- prompt ------------------------------------------------------------------------------- */

static bool run_read_text(const struct run *run, struct buf *text, struct err *err)
{
    if (run->text)
        buf_append_text(text, run->text);
    else if (run->file)
        return file_read(run->file, RUN_MAX_PROMPT, text, err);
    else if (isatty(STDIN_FILENO))
        return err_set(err, ERR_USAGE, "no prompt: give -p TEXT, -f FILE or standard input");
    else
        return cmd_read_stdin(text, err);
    return true;
}

static bool run_add_message(json_t *messages, const char *role, const char *text, size_t n,
                            struct err *err)
{
    json_t *content = json_stringn(text, n);
    if (!content)
        return err_set(err, ERR_INPUT, "the %s message is not UTF-8 text", role);
    json_t *message = json_object();
    json_object_set_new(message, "role", json_string(role));
    json_object_set_new(message, "content", content);
    json_array_append_new(messages, message);
    return true;
}

/* The user's text in the chat format; what the user wrote stays plain text. */
static bool run_encode_chat(struct run *run, const struct tokenizer *tokenizer,
                            const struct buf *text, struct token_list *ids, struct err *err)
{
    struct template_options options = {.add_generation_prompt = true,
                                       .enable_thinking = run->think};
    struct template_prompt prompt = {0};
    json_t *messages = json_array();
    bool ok = (!run->system ||
               run_add_message(messages, "system", run->system, strlen(run->system), err)) &&
              run_add_message(messages, "user", text->len ? text->data : "", text->len, err) &&
              template_render(messages, NULL, &options, &prompt, err) &&
              tokenizer_encode(tokenizer, prompt.text.data, prompt.text.len, prompt.plain,
                               prompt.plain_count, ids, err);
    run->thinking = ok && prompt.thinking_open;
    template_prompt_free(&prompt);
    json_decref(messages);
    return ok;
}

static bool run_encode(struct run *run, const struct tokenizer *tokenizer, struct token_list *ids,
                       struct err *err)
{
    struct buf text = {0};
    bool ok = run_read_text(run, &text, err);
    if (ok && !tokenizer)
        ok = err_set(err, ERR_INPUT,
                     "the model folder has no tokenizer.json; 'calla eval' takes "
                     "token ids");
    if (ok && run->raw)
        ok = tokenizer_encode(tokenizer, text.len ? text.data : "", text.len, NULL, 0, ids, err);
    else if (ok)
        ok = run_encode_chat(run, tokenizer, &text, ids, err);
    buf_free(&text);
    return ok;
}

/* ---- output ------------------------------------------------------------------------------- */

static void run_clear_progress(struct run *run)
{
    if (run->progress)
        fputs("\r\033[K", stderr);
    run->progress = false;
}

static bool run_on_prefill(void *user, uint32_t done, uint32_t total)
{
    struct run *run = user;
    if (isatty(STDERR_FILENO) && clock_seconds_since(run->start_ns) > 0.5) {
        fprintf(stderr, "\rreading the prompt: %u of %u tokens\033[K", done, total);
        run->progress = true;
    }
    return true;
}

/* False, which ends the answer, when nobody reads it any more. */
static bool run_on_token(void *user, const struct engine_token *token)
{
    struct run *run = user;
    const char *text = token->text;
    size_t len = token->len;
    run_clear_progress(run);
    for (; run->skip_lines && len && *text == '\n'; len--)
        text++;
    run->skip_lines &= !len;
    if (run->json) {
        buf_append(&run->answer, text, len);
        return true;
    }
    bool dim = run->thinking && run->colours;
    if (dim)
        fputs("\033[2m", stdout);
    fwrite(text, 1, len, stdout);
    if (dim)
        fputs("\033[0m", stdout);
    if (token->id >= 0 && token->id == run->think_end)
        run->thinking = false;
    if (fflush(stdout) != 0)
        run->lost = errno;
    return !run->lost;
}

static const char *run_finish_name(enum finish finish)
{
    static const char *const names[] = {
        [FINISH_STOP] = "stop", [FINISH_LENGTH] = "length", [FINISH_CANCELLED] = "cancelled"};
    return names[finish];
}

static double run_rate(double count, double seconds)
{
    return seconds > 0 && count > 0 ? count / seconds : 0;
}

static json_t *run_json_ids(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(ids[i]));
    return list;
}

static void run_print_json(const struct run *run, const struct token_list *prompt,
                           const struct engine_result *result, double load_s)
{
    size_t n = result->ids.len;
    json_t *timings = json_pack(
        "{s:f, s:f, s:f, s:I, s:I, s:I, s:f, s:f}", "load_s", load_s, "prefill_s",
        result->prefill_s, "decode_s", result->decode_s, "prompt_tokens",
        (json_int_t)result->prompt_tokens, "cached_tokens", (json_int_t)result->cached_tokens,
        "generated_tokens", (json_int_t)n, "prefill_tokens_per_s",
        run_rate(result->prompt_tokens - result->cached_tokens, result->prefill_s),
        "decode_tokens_per_s", run_rate((double)n - 1, result->decode_s));
    json_t *object = json_object();
    json_object_set_new(object, "text",
                        json_stringn(run->answer.data ? run->answer.data : "", run->answer.len));
    json_object_set_new(object, "ids", run_json_ids(result->ids.ids, n));
    json_object_set_new(object, "prompt_ids", run_json_ids(prompt->ids, prompt->len));
    json_object_set_new(object, "finish_reason", json_string(run_finish_name(result->finish)));
    json_object_set_new(object, "timings", timings);
    json_dumpf(object, stdout, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(object);
}

static void run_print_statistics(const struct run *run, const struct engine *engine,
                                 const struct engine_result *result, double load_s)
{
    uint32_t fed = result->prompt_tokens - result->cached_tokens;
    size_t n = result->ids.len;
    fprintf(stderr,
            "%s: loaded in %.2f s; prompt %u tokens in %.2f s (%.1f/s); answer %zu tokens in "
            "%.2f s (%.1f/s), %s; seed %llu\n",
            engine_backend(engine), load_s, result->prompt_tokens, result->prefill_s,
            run_rate(fed, result->prefill_s), n, result->decode_s,
            run_rate((double)n - 1, result->decode_s), run_finish_name(result->finish),
            (unsigned long long)run->seed);
}

/* ---- the command -------------------------------------------------------------------------- */

static struct sampler_options run_sampling(const struct run *run, const struct engine *engine)
{
    struct sampler_options sampling = engine_sampling(engine);
    if (!isnan(run->temp))
        sampling.temperature = (float)run->temp;
    if (!isnan(run->top_p))
        sampling.top_p = (float)run->top_p;
    if (!isnan(run->min_p))
        sampling.min_p = (float)run->min_p;
    if (run->top_k >= 0)
        sampling.top_k = (uint32_t)run->top_k;
    sampling.seed = run->seed;
    return sampling;
}

/* The grammar of --json-schema; null without. */
static bool run_read_schema(const char *path, struct grammar **out, struct err *err)
{
    struct buf text = {0};
    json_error_t why;
    *out = NULL;
    if (!path)
        return true;
    if (!file_read(path, RUN_MAX_SCHEMA, &text, err)) {
        buf_free(&text);
        return false;
    }
    json_t *schema = json_loadb(text.len ? text.data : "", text.len,
                                JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &why);
    bool ok = schema ? grammar_from_schema(schema, out, err)
                     : err_set(err, ERR_INPUT, "not JSON: %s (line %d)", why.text, why.line);
    json_decref(schema);
    buf_free(&text);
    return ok || err_wrap(err, "--json-schema %s", path);
}

static bool run_answer(struct run *run, struct engine *engine, const struct grammar *grammar,
                       double load_s, struct err *err)
{
    struct token_list prompt = {0};
    struct engine_result result;
    run->think = !run->no_think && (run->think || engine_thinks(engine));
    if (!run_encode(run, engine_tokenizer(engine), &prompt, err)) {
        token_list_free(&prompt);
        return false;
    }
    run->think_end = tokenizer_find(engine_tokenizer(engine), "</think>");
    run->skip_lines = grammar && !run->thinking;
    run->start_ns = clock_now_ns();
    struct engine_request request = {
        .prompt = prompt.ids,
        .prompt_len = prompt.len,
        .max_tokens = (uint32_t)run->tokens,
        .sampling = run_sampling(run, engine),
        .stop = run->stops,
        .stop_count = run->stop_count,
        .ignore_eos = run->ignore_eos,
        .show_special = run->raw,
        .thinking_open = run->thinking,
        .grammar = grammar,
        .on_token = run_on_token,
        .on_prefill = run_on_prefill,
        .user = run,
    };
    bool ok = engine_generate(engine, &request, &result, err);
    run_clear_progress(run);
    if (ok && run->json)
        run_print_json(run, &prompt, &result, load_s);
    if (ok && !run->json && (!run->raw || run->colours))
        putchar('\n');
    if (fflush(stdout) != 0 && !run->lost)
        run->lost = errno;
    errno = run->lost;
    if (ok && run->lost)
        ok = err_set_errno(err, "cannot write standard output");
    if (ok)
        run_print_statistics(run, engine, &result, load_s);
    token_list_free(&result.ids);
    token_list_free(&prompt);
    buf_free(&run->answer);
    return ok;
}

enum {
    RUN_SYSTEM = 256,
    RUN_THINK,
    RUN_NO_THINK,
    RUN_RAW,
    RUN_TEMP,
    RUN_TOP_K,
    RUN_TOP_P,
    RUN_MIN_P,
    RUN_SEED,
    RUN_STOP,
    RUN_IGNORE_EOS,
    RUN_JSON,
    RUN_JSON_SCHEMA,
};

/* An option with a number. */
static bool run_number(struct run *run, int c, const char *text, struct err *err)
{
    uint64_t n = 0;
    switch (c) {
    case 'n':
        return cmd_parse_uint("-n", text, 1, UINT32_MAX, &run->tokens, err);
    case RUN_TEMP:
        return cmd_parse_float("--temp", text, 0, 100, &run->temp, err);
    case RUN_TOP_P:
        return cmd_parse_float("--top-p", text, 0, 1, &run->top_p, err);
    case RUN_MIN_P:
        return cmd_parse_float("--min-p", text, 0, 1, &run->min_p, err);
    case RUN_TOP_K:
        if (!cmd_parse_uint("--top-k", text, 0, INT32_MAX, &n, err))
            return false;
        run->top_k = (int64_t)n;
        return true;
    default:
        return cmd_parse_uint("--seed", text, 0, UINT64_MAX, &run->seed, err);
    }
}

static bool run_option(struct run *run, int c, const char *text, struct err *err)
{
    switch (c) {
    case 'p':
        run->text = text;
        return true;
    case 'f':
        run->file = text;
        return true;
    case RUN_SYSTEM:
        run->system = text;
        return true;
    case RUN_THINK:
        run->think = true;
        return true;
    case RUN_NO_THINK:
        run->no_think = true;
        return true;
    case RUN_RAW:
        run->raw = true;
        return true;
    case RUN_IGNORE_EOS:
        run->ignore_eos = true;
        return true;
    case RUN_JSON_SCHEMA:
        run->schema = text;
        return true;
    case RUN_JSON:
        run->json = true;
        return true;
    case RUN_STOP:
        if (run->stop_count == RUN_MAX_STOPS)
            return err_set(err, ERR_USAGE, "at most %d stop strings are taken", RUN_MAX_STOPS);
        run->stops[run->stop_count++] = text;
        return true;
    default:
        return run_number(run, c, text, err);
    }
}

static bool run_check(const struct run *run, int rest, char **argv, struct err *err)
{
    if (rest)
        return err_set(err, ERR_USAGE, "unexpected argument '%s'; the prompt is given with -p",
                       argv[0]);
    if (run->text && run->file)
        return err_set(err, ERR_USAGE, "-p and -f exclude each other");
    if (run->think && run->no_think)
        return err_set(err, ERR_USAGE, "--think and --no-think exclude each other");
    if (run->raw && (run->system || run->think || run->no_think))
        return err_set(err, ERR_USAGE,
                       "--system, --think and --no-think belong to the chat format, which "
                       "--raw leaves out");
    return true;
}

int cmd_run(int argc, char **argv)
{
    static const struct option longs[] = {
        LOAD_OPTIONS,
        {"prompt", required_argument, NULL, 'p'},
        {"file", required_argument, NULL, 'f'},
        {"tokens", required_argument, NULL, 'n'},
        {"system", required_argument, NULL, RUN_SYSTEM},
        {"think", no_argument, NULL, RUN_THINK},
        {"no-think", no_argument, NULL, RUN_NO_THINK},
        {"raw", no_argument, NULL, RUN_RAW},
        {"temp", required_argument, NULL, RUN_TEMP},
        {"top-k", required_argument, NULL, RUN_TOP_K},
        {"top-p", required_argument, NULL, RUN_TOP_P},
        {"min-p", required_argument, NULL, RUN_MIN_P},
        {"seed", required_argument, NULL, RUN_SEED},
        {"stop", required_argument, NULL, RUN_STOP},
        {"ignore-eos", no_argument, NULL, RUN_IGNORE_EOS},
        {"json", no_argument, NULL, RUN_JSON},
        {"json-schema", required_argument, NULL, RUN_JSON_SCHEMA},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct run run = {.temp = NAN, .top_p = NAN, .min_p = NAN, .top_k = -1};
    run.seed = clock_now_ns() % 1000000000;
    run.colours = isatty(STDOUT_FILENO);
    struct err err = {0};
    int c;
    while ((c = cmd_next_option(argc, argv, ":m:p:f:n:h", longs)) != -1) {
        bool taken;
        if (c == 'h') {
            fputs(run_help, stdout);
            return 0;
        }
        if (c == '?')
            return err_exit_code(ERR_USAGE);
        if (!load_option(c, optarg, &run.engine, &taken, &err) ||
            (!taken && !run_option(&run, c, optarg, &err)))
            return cmd_usage("run", "%s", err.text);
    }
    if (!run_check(&run, argc - optind, argv + optind, &err))
        return cmd_usage("run", "%s", err.text);
    struct engine *engine;
    struct grammar *grammar;
    uint64_t start_ns = clock_now_ns();
    if (!run_read_schema(run.schema, &grammar, &err))
        return cmd_fail("run", &err);
    if (!load_engine(&run.engine, &engine, &err)) {
        grammar_free(grammar);
        return cmd_fail("run", &err);
    }
    bool ok = run_answer(&run, engine, grammar, clock_seconds_since(start_ns), &err);
    engine_close(engine);
    grammar_free(grammar);
    return ok ? 0 : cmd_fail("run", &err);
}
