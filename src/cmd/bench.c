/* calla bench: how fast prompts are read and answers written on this machine.
 *
 * An arm is one measurement of one backend, thread count, context and batch, and runs in a process
 * of its own: this binary again, which prints what it measured as one line of JSON. The parent
 * orders the arms, keeps their figures and prints them; it opens no model. */
#include "cmd/cmd.h"
#include "cmd/load.h"
#include "cmd/machine.h"
#include "cmd/measure.h"

#include "base/mem.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char bench_help[] =
    "usage: calla bench [options]\n"
    "\n"
    "Measures how fast a prompt is read (prefill) and tokens are generated after it (decode), and\n"
    "prints a table with what it was measured on. Each line is a process of its own, warmed up "
    "with\n"
    "a prompt of the same length. Loading is not counted.\n"
    "  prefill   tokens of the prompt / time from its start until the first token is out\n"
    "  decode    tokens after the first / time from the first token to the last one\n"
    "  digest    64-bit FNV-1a of the decoded ids: equal digests, equal tokens\n"
    "Prompt token i is (i * 2654435761 mod 2^32) mod vocabulary; the choice is greedy.\n"
    "\n"
    "      --contexts LIST  prompt lengths (default: 256,512,1024)\n"
    "      --prefill LIST   prompt lengths without decoding; alone, they replace the contexts\n"
    "      --decode N       tokens to generate (default: 64)\n"
    "      --batch LIST     sequences at a time (default: 1); rates are of all together\n"
    "      --backends LIST  instead of --backend: several, in turn\n"
    "      --thread-counts LIST  instead of --threads: several, in turn\n"
    "      --runs N         every line so often, up and down the list; medians are printed\n"
    "      --ablate LIST    every line again without each of these techniques (CUDA only): "
    "graphs,\n"
    "                       overlap, routing, grouped, batch, packing, split, flash, chunks,\n"
    "                       ahead\n"
    "      --peak           measure the memory's bandwidth too, and the share of it that reading\n"
    "                       the weights for each token comes to\n"
    "      --csv            print CSV, a line a run\n"
    "      --json           print one JSON object with every run, step times and tokens\n" LOAD_HELP
    "  -h, --help           this text\n"
    "\n"
    "examples:\n"
    "  calla bench -m DIR --peak\n"
    "  calla bench -m DIR --backends cpu/avx2,cpu/avx512 --thread-counts 1,2 --runs 3\n"
    "  calla bench -m DIR --contexts 256 --batch 1,4,8 --csv\n"
    "\n"
    "exit codes: 0 done, 2 wrong usage, 3 unreadable model, lost output, 4 not enough memory,\n"
    "context or disk, 5 internal error\n";

enum { BENCH_LIST = 32, BENCH_RUNS_MAX = 99, BENCH_DECODE_MAX = 65536 };

struct bench_list {
    uint32_t n, value[BENCH_LIST];
};

struct bench_names {
    char *text; /* the option's; names are cut at its commas */
    uint32_t n;
    const char *name[BENCH_LIST];
};

struct bench_options {
    struct engine_options engine;
    struct bench_list contexts, prefill, batch, threads;
    struct bench_names backends, ablate;
    uint32_t decode, runs;
    bool peak, csv, json;
    const char *arm; /* "check", "peak" or "run": this process does that for one arm */
};

/* ---- an arm, in its own process ----------------------------------------------------------- */

static void bench_print_json(json_t *object, size_t flags)
{
    json_dumpf(object, stdout, JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9) | flags);
    putchar('\n');
    json_decref(object);
}

static double bench_rate(double n, double seconds)
{
    return seconds > 0 ? n / seconds : 0;
}

static json_t *bench_describe(const struct measure_options *o, const struct measure *m)
{
    char digest[24];
    json_t *steps = json_array(), *ids = json_array();
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)m->digest);
    for (uint32_t i = 0; i < o->decode; i++)
        json_array_append_new(steps, json_real(m->step_s[i]));
    for (size_t i = 0; i < m->ids.len; i++)
        json_array_append_new(ids, json_integer(m->ids.ids[i]));
    return json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:s, s:I, s:I, s:i, s:o, s:o}",
        "backend", m->backend, "without", o->engine.without ? o->engine.without : "", "context",
        (int)o->context, "batch", (int)o->batch, "decode", (int)o->decode, "load_s", m->load_s,
        "prefill_s", m->prefill_s, "prefill_tok_s",
        bench_rate((double)o->context * o->batch, m->prefill_s), "decode_s", m->decode_s,
        "decode_tok_s", bench_rate((double)o->decode * o->batch, m->decode_s), "digest", digest,
        "token_bytes", (json_int_t)m->token_bytes, "resident_bytes", (json_int_t)m->resident,
        "first_id", (int)m->first_id, "step_s", steps, "ids", ids);
}

static int bench_run_arm(const struct bench_options *o)
{
    struct err err = {0};
    double peak;
    if (!strcmp(o->arm, "peak")) {
        if (!measure_peak(&o->engine, &peak, &err))
            return cmd_fail("bench", &err);
        bench_print_json(json_pack("{s:f}", "peak", peak), JSON_COMPACT);
        return 0;
    }
    struct measure_options options = {.engine = o->engine,
                                      .context = o->contexts.value[0],
                                      .decode = o->decode,
                                      .batch = o->batch.value[0]};
    if (!strcmp(o->arm, "check")) {
        if (!measure_check(&options, &err))
            return cmd_fail("bench", &err);
        bench_print_json(json_object(), JSON_COMPACT);
        return 0;
    }
    struct measure m;
    bool ok = measure_run(&options, &m, &err);
    if (ok)
        bench_print_json(bench_describe(&options, &m), JSON_COMPACT);
    measure_free(&m);
    return ok ? 0 : cmd_fail("bench", &err);
}

/* ---- starting arms ------------------------------------------------------------------------ */

struct bench_arm {
    const char *backend; /* or null: the best one */
    const char *without; /* a technique, or null: nothing is left out */
    uint32_t threads;    /* 0: one a processor */
    uint32_t context, decode, batch;
    double peak;  /* of this backend and thread count; 0: not measured */
    json_t *runs; /* array of what the processes printed */
};

/* Reads the child's one object and waits for its end; null with *code set when it failed. */
static json_t *bench_read_child(pid_t child, int from, int *code)
{
    struct buf text = {0};
    char piece[65536];
    ssize_t n;
    int status = 0;
    while ((n = read(from, piece, sizeof piece)) > 0 || (n < 0 && errno == EINTR))
        if (n > 0)
            buf_append(&text, piece, (size_t)n);
    close(from);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    json_t *object = json_loadb(text.data ? text.data : "", text.len, 0, NULL);
    buf_free(&text);
    *code = WIFEXITED(status) ? WEXITSTATUS(status) : err_exit_code(ERR_INTERNAL);
    if (*code == 0 && object)
        return object;
    if (WIFSIGNALED(status))
        fprintf(stderr, "calla bench: the measuring process was ended by signal %d (%s)\n",
                WTERMSIG(status), strsignal(WTERMSIG(status)));
    *code = *code ? *code : err_exit_code(ERR_INTERNAL);
    json_decref(object);
    return NULL;
}

/* This command line again, followed by what makes it one arm: the last of an option counts. */
static json_t *bench_start(int argc, char **argv, const char *kind, const struct bench_arm *arm,
                           int *code)
{
    char path[PATH_MAX], number[4][16];
    int ends[2];
    const uint32_t values[4] = {arm->context, arm->decode, arm->batch, arm->threads};
    for (int i = 0; i < 4; i++)
        snprintf(number[i], sizeof number[i], "%u", values[i]);
    const char **args = mem_new((size_t)argc + 18, sizeof *args);
    int n = 0;
    args[n++] = path;
    for (int i = 0; i < argc; i++)
        args[n++] = argv[i];
    const char *own[] = {"--arm",    kind,      "--contexts", number[0],
                         "--decode", number[1], "--batch",    number[2]};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        args[n++] = own[i];
    if (arm->threads) {
        args[n++] = "--threads";
        args[n++] = number[3];
    }
    if (arm->backend) {
        args[n++] = "--backend";
        args[n++] = arm->backend;
    }
    if (arm->without) {
        args[n++] = "--without";
        args[n++] = arm->without;
    }
    *code = err_exit_code(ERR_INTERNAL);
    json_t *result = NULL;
    if (!cmd_binary_path(path, sizeof path) || pipe(ends) != 0) {
        fprintf(stderr, "calla bench: cannot start a process: %s\n", strerror(errno));
        free(args);
        return NULL;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execv(path, (char **)args);
        fprintf(stderr, "calla bench: cannot start %s: %s\n", path, strerror(errno));
        _exit(err_exit_code(ERR_INTERNAL));
    }
    if (child < 0)
        fprintf(stderr, "calla bench: cannot start a process: %s\n", strerror(errno));
    close(ends[1]);
    if (child > 0)
        result = bench_read_child(child, ends[0], code);
    else
        close(ends[0]);
    free(args);
    return result;
}

/* ---- printing ----------------------------------------------------------------------------- */

static double bench_figure(const json_t *run, const char *key)
{
    return json_number_value(json_object_get(run, key));
}

static int bench_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_median(const struct bench_arm *arm, const char *key)
{
    double v[BENCH_RUNS_MAX];
    size_t n = json_array_size(arm->runs);
    for (size_t i = 0; i < n; i++)
        v[i] = bench_figure(json_array_get(arm->runs, i), key);
    qsort(v, n, sizeof *v, bench_compare);
    return n ? (v[(n - 1) / 2] + v[n / 2]) / 2 : 0;
}

/* Share of the memory's bandwidth that the weights of the decoded tokens come to. With several
 * sequences the experts read depend on their routes, so no share is given. */
static double bench_share(const struct bench_arm *arm, double decode_tok_s)
{
    double bytes = bench_figure(json_array_get(arm->runs, 0), "token_bytes");
    return arm->peak > 0 && arm->batch == 1 ? decode_tok_s * bytes / arm->peak : 0;
}

/* The threads that an arm ran with; 0: it has none of its own. */
static int bench_threads(const struct bench_arm *arm, const struct machine *machine)
{
    const char *backend =
        json_string_value(json_object_get(json_array_get(arm->runs, 0), "backend"));
    if (strncmp(backend, "cpu", 3))
        return 0;
    if (!strcmp(backend, "cpu/ref"))
        return 1;
    return arm->threads ? (int)arm->threads : machine->processors;
}

static void bench_print_line(const struct bench_arm *arm, const struct machine *machine)
{
    const json_t *first = json_array_get(arm->runs, 0);
    const char *backend = json_string_value(json_object_get(first, "backend"));
    char threads[16] = "-", decode[16] = "-", share[16] = "-", peak[16] = "-", name[48];
    double rate = bench_median(arm, "decode_tok_s");
    snprintf(name, sizeof name, "%s%s%s", backend, arm->without ? " -" : "",
             arm->without ? arm->without : "");
    if (bench_threads(arm, machine))
        snprintf(threads, sizeof threads, "%d", bench_threads(arm, machine));
    if (arm->decode)
        snprintf(decode, sizeof decode, "%.2f", rate);
    if (arm->peak > 0)
        snprintf(peak, sizeof peak, "%.1f", arm->peak * 1e-9);
    if (bench_share(arm, rate) > 0)
        snprintf(share, sizeof share, "%.0f %%", 100 * bench_share(arm, rate));
    printf("| %-10s | %7s | %7u | %5u | %13.2f | %12s | %9s | %6s | %s |\n", name, threads,
           arm->context, arm->batch, bench_median(arm, "prefill_tok_s"), decode, peak, share,
           arm->decode ? json_string_value(json_object_get(first, "digest")) : "-");
    fflush(stdout);
}

static void bench_print_head(const struct machine *machine, const struct bench_options *o)
{
    printf("%s, %d processors, %.1f GiB, power: %s\n%s\n%s\nmodel: %s\n\n", machine->chip,
           machine->processors, (double)machine->memory / (1 << 30), machine->power,
           machine->system, machine_build(), o->engine.model ? o->engine.model : "demo");
    printf("| backend    | threads | context | batch | prefill tok/s | decode tok/s | peak GB/s |"
           "  share | digest           |\n"
           "|---|---:|---:|---:|---:|---:|---:|---:|---|\n");
    fflush(stdout);
}

static void bench_print_csv(const struct bench_arm *arm, const struct machine *machine, size_t run)
{
    const json_t *r = json_array_get(arm->runs, run);
    double rate = bench_figure(r, "decode_tok_s");
    printf("%s,%d,%u,%u,%zu,%.6f,%.3f,%.6f,%.3f,%.3f,%.4f,%s,%s\n",
           json_string_value(json_object_get(r, "backend")), bench_threads(arm, machine),
           arm->context, arm->batch, run, bench_figure(r, "prefill_s"),
           bench_figure(r, "prefill_tok_s"), bench_figure(r, "decode_s"), rate, arm->peak * 1e-9,
           bench_share(arm, rate), json_string_value(json_object_get(r, "digest")),
           json_string_value(json_object_get(r, "without")));
    fflush(stdout);
}

static json_t *bench_describe_all(const struct bench_options *o, const struct machine *machine,
                                  const struct bench_arm *arms, uint32_t n)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++)
        for (size_t k = 0; k < json_array_size(arms[i].runs); k++) {
            json_t *run = json_array_get(arms[i].runs, k);
            json_object_set_new(run, "run", json_integer((json_int_t)k));
            json_object_set_new(run, "threads", json_integer(bench_threads(&arms[i], machine)));
            json_object_set_new(run, "peak_bytes_s", json_real(arms[i].peak));
            json_array_append(list, run);
        }
    return json_pack("{s:i, s:s, s:s, s:i, s:I, s:s, s:s, s:s, s:o}", "schema_version", 1, "model",
                     o->engine.model ? o->engine.model : "demo", "chip", machine->chip,
                     "processors", machine->processors, "memory_bytes", (json_int_t)machine->memory,
                     "system", machine->system, "power", machine->power, "build", machine_build(),
                     "runs", list);
}

/* ---- all arms ----------------------------------------------------------------------------- */

/* Arm i: techniques change first, then contexts, batches, threads, backends. */
static struct bench_arm bench_arm_at(const struct bench_options *o, uint32_t i)
{
    uint32_t techniques = 1 + o->ablate.n, contexts = o->contexts.n + o->prefill.n;
    uint32_t without = i % techniques, c = i / techniques % contexts;
    i /= techniques * contexts;
    bool decode = c < o->contexts.n;
    return (struct bench_arm){
        .backend = o->backends.name[i / o->batch.n / o->threads.n],
        .without = without ? o->ablate.name[without - 1] : NULL,
        .threads = o->threads.value[i / o->batch.n % o->threads.n],
        .batch = o->batch.value[i % o->batch.n],
        .context = decode ? o->contexts.value[c] : o->prefill.value[c - o->contexts.n],
        .decode = decode ? o->decode : 0,
        .runs = json_array(),
    };
}

/* Positions, then sequences: what the arms of one backend need grows with these. */
static bool bench_needs_more(const struct bench_arm *a, const struct bench_arm *b)
{
    uint64_t x = (uint64_t)a->context + a->decode, y = (uint64_t)b->context + b->decode;
    return x != y ? x > y : a->batch > b->batch;
}

/* Before anything is printed: what cannot work ends the command at once. Of the arms that differ in
 * nothing else, the largest is tried. */
static bool bench_check(int argc, char **argv, struct bench_arm *arms, uint32_t n, int *code)
{
    for (uint32_t i = 0; i < n; i++) {
        bool largest = true;
        for (uint32_t k = 0; k < n; k++) {
            bool alike = arms[k].backend == arms[i].backend && arms[k].without == arms[i].without &&
                         arms[k].threads == arms[i].threads;
            largest &= !alike || (k < i ? bench_needs_more(&arms[i], &arms[k])
                                        : !bench_needs_more(&arms[k], &arms[i]));
        }
        json_t *fine = largest ? bench_start(argc, argv, "check", &arms[i], code) : NULL;
        json_decref(fine);
        if (largest && !fine)
            return false;
    }
    return true;
}

/* Arms of one backend and thread count share a measurement of the memory. */
static bool bench_find_peak(int argc, char **argv, struct bench_arm *arms, uint32_t i, int *code)
{
    for (uint32_t k = 0; k < i; k++)
        if (arms[k].backend == arms[i].backend && arms[k].threads == arms[i].threads) {
            arms[i].peak = arms[k].peak;
            return true;
        }
    json_t *found = bench_start(argc, argv, "peak", &arms[i], code);
    arms[i].peak = bench_figure(found, "peak");
    json_decref(found);
    return found != NULL;
}

static int bench_run_all(const struct bench_options *o, int argc, char **argv)
{
    struct machine machine;
    machine_read(&machine);
    uint32_t n = o->backends.n * o->threads.n * o->batch.n * (o->contexts.n + o->prefill.n) *
                 (1 + o->ablate.n);
    struct bench_arm *arms = mem_new(n, sizeof *arms);
    for (uint32_t i = 0; i < n; i++)
        arms[i] = bench_arm_at(o, i);
    int code = 0;
    bool fine = bench_check(argc, argv, arms, n, &code);
    if (fine && o->csv)
        printf("backend,threads,context,batch,run,prefill_s,prefill_tok_s,decode_s,decode_tok_s,"
               "peak_gb_s,share,digest,without\n");
    else if (fine && !o->json)
        bench_print_head(&machine, o);
    for (uint32_t i = 0; o->peak && code == 0 && i < n; i++)
        bench_find_peak(argc, argv, arms, i, &code);
    for (uint32_t run = 0; code == 0 && run < o->runs; run++)
        for (uint32_t k = 0; code == 0 && k < n; k++) {
            struct bench_arm *arm = &arms[run % 2 ? n - 1 - k : k];
            json_t *result = bench_start(argc, argv, "run", arm, &code);
            if (!result)
                break;
            json_array_append_new(arm->runs, result);
            if (o->csv)
                bench_print_csv(arm, &machine, run);
            else if (!o->json && o->runs == 1)
                bench_print_line(arm, &machine);
        }
    for (uint32_t i = 0; i < n && !o->json && !o->csv && o->runs > 1; i++)
        if (json_array_size(arms[i].runs))
            bench_print_line(&arms[i], &machine);
    if (o->json && code == 0)
        bench_print_json(bench_describe_all(o, &machine, arms, n), JSON_INDENT(1));
    for (uint32_t i = 0; i < n; i++)
        json_decref(arms[i].runs);
    free(arms);
    return code;
}

/* ---- the command -------------------------------------------------------------------------- */

enum {
    BENCH_CONTEXTS = 256,
    BENCH_PREFILL,
    BENCH_DECODE,
    BENCH_BATCH,
    BENCH_BACKENDS,
    BENCH_ABLATE,
    BENCH_WITHOUT,
    BENCH_THREADS,
    BENCH_RUNS,
    BENCH_PEAK,
    BENCH_CSV,
    BENCH_JSON,
    BENCH_ARM,
};

static bool bench_parse_list(const char *option, const char *text, uint64_t hi,
                             struct bench_list *list, struct err *err)
{
    char item[24];
    uint64_t value;
    list->n = 0;
    for (const char *p = text;; p++) {
        size_t len = strcspn(p, ",");
        snprintf(item, sizeof item, "%.*s", len < 23 ? (int)len : 23, p);
        if (!cmd_parse_uint(option, item, 1, hi, &value, err))
            return false;
        if (list->n == BENCH_LIST)
            return err_set(err, ERR_USAGE, "%s has more than %d values", option, BENCH_LIST);
        list->value[list->n++] = (uint32_t)value;
        p += len;
        if (!*p)
            return true;
    }
}

static bool bench_parse_names(const char *option, const char *text, struct bench_names *names,
                              struct err *err)
{
    free(names->text);
    names->text = mem_copy_text(text, strlen(text));
    names->n = 0;
    for (char *p = names->text; p;) {
        if (names->n == BENCH_LIST)
            return err_set(err, ERR_USAGE, "%s has more than %d names", option, BENCH_LIST);
        names->name[names->n++] = p;
        p = strchr(p, ',');
        if (p)
            *p++ = 0;
    }
    return true;
}

static bool bench_option(int c, struct bench_options *o, struct err *err)
{
    bool taken = true;
    switch (c) {
    case BENCH_CONTEXTS:
        return bench_parse_list("--contexts", optarg, UINT32_MAX / 2, &o->contexts, err);
    case BENCH_PREFILL:
        return bench_parse_list("--prefill", optarg, UINT32_MAX / 2, &o->prefill, err);
    case BENCH_BATCH:
        return bench_parse_list("--batch", optarg, 1024, &o->batch, err);
    case BENCH_THREADS:
        return bench_parse_list("--thread-counts", optarg, 1024, &o->threads, err);
    case BENCH_BACKENDS:
        return bench_parse_names("--backends", optarg, &o->backends, err);
    case BENCH_ABLATE:
        return bench_parse_names("--ablate", optarg, &o->ablate, err);
    case BENCH_WITHOUT:
        o->engine.without = optarg;
        return true;
    case BENCH_DECODE:
        return cmd_parse_u32("--decode", optarg, 0, BENCH_DECODE_MAX, &o->decode, err);
    case BENCH_RUNS:
        return cmd_parse_u32("--runs", optarg, 1, BENCH_RUNS_MAX, &o->runs, err);
    case BENCH_PEAK:
        o->peak = true;
        return true;
    case BENCH_CSV:
        o->csv = true;
        return true;
    case BENCH_JSON:
        o->json = true;
        return true;
    case BENCH_ARM:
        o->arm = optarg;
        return true;
    default:
        return load_option(c, optarg, &o->engine, &taken, err) && taken;
    }
}

static int bench_dispatch(struct bench_options *o, int argc, char **argv)
{
    if (o->csv && o->json)
        return cmd_usage("bench", "--csv and --json exclude each other");
    if (o->contexts.n == 0 && o->prefill.n == 0)
        o->contexts = (struct bench_list){3, {256, 512, 1024}};
    if (o->arm)
        return bench_run_arm(o);
    if (o->backends.n == 0) {
        o->backends.n = 1;
        o->backends.name[0] = o->engine.backend;
    }
    if (o->threads.n == 0)
        o->threads = (struct bench_list){1, {(uint32_t)o->engine.threads}};
    return bench_run_all(o, argc, argv);
}

int cmd_bench(int argc, char **argv)
{
    static const struct option longs[] = {
        LOAD_OPTIONS,
        {"contexts", required_argument, NULL, BENCH_CONTEXTS},
        {"prefill", required_argument, NULL, BENCH_PREFILL},
        {"decode", required_argument, NULL, BENCH_DECODE},
        {"batch", required_argument, NULL, BENCH_BATCH},
        {"backends", required_argument, NULL, BENCH_BACKENDS},
        {"ablate", required_argument, NULL, BENCH_ABLATE},
        {"without", required_argument, NULL, BENCH_WITHOUT}, /* of an arm, as is --arm */
        {"thread-counts", required_argument, NULL, BENCH_THREADS},
        {"runs", required_argument, NULL, BENCH_RUNS},
        {"peak", no_argument, NULL, BENCH_PEAK},
        {"csv", no_argument, NULL, BENCH_CSV},
        {"json", no_argument, NULL, BENCH_JSON},
        {"arm", required_argument, NULL, BENCH_ARM},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct bench_options o = {.batch = {1, {1}}, .decode = 64, .runs = 1};
    struct err err = {0};
    int c, code = 0;
    while (code == 0 && (c = cmd_next_option(argc, argv, ":m:h", longs)) != -1) {
        if (c == 'h') {
            fputs(bench_help, stdout);
            code = -1;
            break;
        }
        if (c == '?')
            code = err_exit_code(ERR_USAGE);
        else if (!bench_option(c, &o, &err))
            code = cmd_usage("bench", "%s", err.text);
    }
    if (code == 0 && optind < argc)
        code = cmd_usage("bench", "unexpected argument '%s'", argv[optind]);
    if (code == 0)
        code = bench_dispatch(&o, argc, argv);
    free(o.backends.text);
    free(o.ablate.text);
    return code < 0 ? 0 : code;
}
