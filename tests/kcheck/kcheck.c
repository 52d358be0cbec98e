/* The driver: options, levels, pools, report. */
#include "kcheck.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct kc_op kc_ops[] = {
    {"embed", {2, 27}, kc_check_embed},
    {"linear", {KC_LINEAR_REAL, KC_LINEAR_EDGE}, kc_check_linear},
    {"delta", {3, 24}, kc_check_delta},
    {"kv_append", {3, 26}, kc_check_kv_append},
    {"attention", {5, 27}, kc_check_attention},
    {"moe_route", {3, 34}, kc_check_moe_route},
    {"moe_experts", {3, 39}, kc_check_moe_experts},
    {"argmax", {2, 18}, kc_check_argmax},
    {"top", {2, 18}, kc_check_top},
    {"copy", {3, 11}, kc_check_copy},
};
const int kc_op_count = sizeof kc_ops / sizeof kc_ops[0];

static const char *const kc_pool_names[KC_POOLS] = {"real", "edge", "random"};

struct kc_options {
    uint64_t seed;
    const char *op, *level, *pool, *csv, *without;
    int cases, every;
    bool bench, self_test, deterministic;
};

struct kc_totals {
    int passed, failed, skipped;
};

/* What a level did with the real cases, for the ratio of the next level. */
static double kc_seconds_below[16][16];

/* Levels whose kernels keep f32 inputs everywhere. The others may round both factors of the large
 * products (linear, moe_experts, attention) to bf16; the router never; of the delta rule's chunks
 * CUDA rounds factors to f16. */
static double kc_input_rounding(const char *level, const char *op)
{
    if (!strcmp(op, "delta"))
        return strncmp(level, "cuda", 4) ? 0 : KC_U_F16;
    static const char *const exact[] = {"cpu/ref",  "cpu/avx2", "cpu/avx512",
                                        "cpu/neon", "cpu/i8mm", "metal/simdgroup"};
    for (size_t i = 0; i < sizeof exact / sizeof exact[0]; i++)
        if (!strcmp(level, exact[i]))
            return 0;
    bool large = !strcmp(op, "linear") || !strcmp(op, "moe_experts") || !strcmp(op, "attention");
    return large ? KC_U_BF16 : 0;
}

/* The level whose bits this one promises, or null. Its ops work on this one's device. */
static const char *kc_twin(const char *level)
{
    return !strcmp(level, "cpu/i8mm") ? "cpu/neon" : NULL;
}

static uint64_t kc_case_seed(uint64_t seed, int op, int pool, int index)
{
    struct rand r = {seed ^ (uint64_t)op << 48 ^ (uint64_t)pool << 40 ^ (uint64_t)index << 8};
    rand_u64(&r);
    return rand_u64(&r);
}

/* ---- one case ----------------------------------------------------------------------------- */

static struct device *kc_open(const char *level, bool deterministic, const char *without)
{
    struct device *device = NULL;
    struct err err = {0};
    struct device_options options = {
        .name = level, .deterministic = deterministic, .without = without};
    if (!device_open(&options, &device, &err)) {
        fprintf(stderr, "kcheck: %s\n", err.text);
        exit(2);
    }
    return device;
}

static void kc_bench_line(const struct kc *kc, int op, double peak, FILE *csv)
{
    double *below = &kc_seconds_below[op][kc->index];
    double ratio = *below > 0 ? *below / kc->seconds : 0, rate = kc->bytes / kc->seconds * 1e-9;
    printf("  %-11s %-10s %10.1f us %8.2f GB/s %9.2f GFLOP/s %7.2fx %5.1f%%  %s\n", kc->op,
           kc->level, kc->seconds * 1e6, rate, kc->flops / kc->seconds * 1e-9, ratio,
           peak > 0 ? 100 * rate / peak : 0, kc->shape);
    if (csv)
        fprintf(csv, "%s,%s,%d,\"%s\",%.9g,%.6g,%.6g,%.6g,%.6g\n", kc->op, kc->level, kc->index,
                kc->shape, kc->seconds, rate, kc->flops / kc->seconds * 1e-9, ratio,
                peak > 0 ? rate / peak : 0);
    *below = kc->seconds;
}

/* Runs case `index`; true when it passed or was skipped. */
static bool kc_run_case(struct kc *kc, const struct kc_options *o, int op, struct kc_totals *totals,
                        bool quiet)
{
    uint64_t seed = kc_case_seed(o->seed, op, kc->pool, kc->index);
    kc->rand = (struct rand){seed};
    kc->failed = kc->skipped = false;
    kc->flops = kc->bytes = kc->seconds = 0;
    kc_ops[op].check(kc);
    kc_case_free(kc);
    if (kc->failed) {
        totals->failed++;
        if (!quiet)
            printf("FAIL %s %s %s[%d] (%s): %s\n"
                   "     again: build/kcheck --op %s --level %s --pool %s --seed %llu\n",
                   kc->op, kc->level, kc_pool_names[kc->pool], kc->index, kc->shape, kc->message,
                   kc->op, kc->level, kc_pool_names[kc->pool], (unsigned long long)o->seed);
    } else if (kc->skipped) {
        totals->skipped++;
        printf("SKIP %s %s %s[%d]: %s\n", kc->op, kc->level, kc_pool_names[kc->pool], kc->index,
               kc->message);
    } else {
        totals->passed++;
    }
    return !kc->failed;
}

/* ---- one op at one level ------------------------------------------------------------------ */

static int kc_pool_cases(const struct kc_options *o, int op, int pool)
{
    if (o->pool && strcmp(o->pool, kc_pool_names[pool]))
        return 0;
    if (o->bench && pool != KC_REAL)
        return 0;
    return pool == KC_RANDOM ? o->cases : kc_ops[op].cases[pool];
}

static void kc_run_op(const struct kc_options *o, int op, const char *level, double peak, FILE *csv,
                      struct kc_totals *all)
{
    struct kc_totals totals = {0};
    struct kc kc = {.op = kc_ops[op].name,
                    .level = level,
                    .bench = o->bench,
                    .deterministic = o->deterministic};
    char worst[40] = "";
    double most = 0;
    kc.input_rounding = kc_input_rounding(level, kc.op);
    kc.integer_inputs = !strncmp(level, "cpu/", 4) && strcmp(level, "cpu/ref") != 0;
    for (int pool = 0; pool < KC_POOLS; pool++) {
        int cases = kc_pool_cases(o, op, pool);
        if (cases == 0)
            continue;
        /* Afresh, because a device keeps its weights until it closes. */
        kc.ref = kc_open("cpu/ref", false, NULL);
        kc.dev = kc_open(level, o->deterministic, o->without);
        kc.ops = device_ops(kc.dev);
        kc.twin = kc_twin(level) && !o->bench
                      ? kc_open(kc_twin(level), o->deterministic, o->without)
                      : NULL;
        kc.pool = (enum kc_pool)pool;
        for (kc.index = 0; kc.index < cases; kc.index += o->every) {
            kc.worst = 0;
            kc_run_case(&kc, o, op, &totals, false);
            if (kc.worst > most) {
                most = kc.worst;
                snprintf(worst, sizeof worst, " at %s[%d]", kc_pool_names[pool], kc.index);
            }
            if (o->bench && !kc.failed && !kc.skipped)
                kc_bench_line(&kc, op, peak, csv);
        }
        device_close(kc.twin);
        device_close(kc.dev);
        device_close(kc.ref);
        kc_weights_free(&kc);
    }
    printf("%-11s %-10s %4d passed, %d failed, %d skipped; worst error %.3f of its tolerance%s\n",
           kc.op, level, totals.passed, totals.failed, totals.skipped, most, worst);
    fflush(stdout);
    all->passed += totals.passed;
    all->failed += totals.failed;
    all->skipped += totals.skipped;
}

/* GB/s of a copy far larger than the caches: the peak that the shares refer to. */
static double kc_peak(const char *level)
{
    struct kc kc = {.op = "copy", .level = level, .pool = KC_REAL, .index = 2, .bench = true};
    kc.ref = kc_open("cpu/ref", false, NULL);
    kc.dev = kc_open(level, false, NULL);
    kc.ops = device_ops(kc.dev);
    kc_check_copy(&kc);
    kc_case_free(&kc);
    device_close(kc.dev);
    device_close(kc.ref);
    return kc.failed || kc.skipped ? 0 : kc.bytes / kc.seconds * 1e-9;
}

static int kc_run_all(const struct kc_options *o)
{
    struct kc_totals all = {0};
    FILE *csv = o->csv ? fopen(o->csv, "w") : NULL;
    if (o->csv && !csv) {
        fprintf(stderr, "kcheck: cannot write '%s'\n", o->csv);
        return 2;
    }
    if (csv)
        fprintf(csv, "op,level,case,shape,seconds,GB/s,GFLOP/s,ratio to level below,"
                     "share of copy GB/s\n");
    printf("kcheck: seed %llu\n", (unsigned long long)o->seed);
    int runs = 0;
    const char *level;
    for (int l = 0; (level = device_name(l)); l++) {
        if (o->level && strcmp(o->level, level))
            continue;
        if (o->deterministic && strncmp(level, "cpu/", 4)) /* other backends refuse to be */
            continue;
        double peak = o->bench ? kc_peak(level) : 0;
        if (o->bench)
            printf("%s: a copy runs at %.1f GB/s; shares refer to it\n", level, peak);
        for (int op = 0; op < kc_op_count; op++)
            if (!o->op || !strcmp(o->op, kc_ops[op].name)) {
                kc_run_op(o, op, level, peak, csv, &all);
                runs++;
            }
    }
    if (csv)
        fclose(csv);
    if (runs == 0) {
        fprintf(stderr, "kcheck: no such op or level here\n");
        return 2;
    }
    printf("%d passed, %d failed, %d skipped\n", all.passed, all.failed, all.skipped);
    return all.failed ? 1 : 0;
}

/* ---- the check of kcheck ------------------------------------------------------------------ */

/* Plants one fault at a time into the reference and expects a case to fail. */
static int kc_self_test(const struct kc_options *o)
{
    int caught = 0;
    for (int f = 0; f < kc_fault_count; f++) {
        struct kc kc = {.level = "cpu/ref", .op = kc_faults[f].op};
        struct kc_totals totals = {0};
        int op = 0;
        while (strcmp(kc_ops[op].name, kc_faults[f].op))
            op++;
        kc.ref = kc_open("cpu/ref", false, NULL);
        kc.dev = kc_open("cpu/ref", false, NULL);
        struct ops ops = *device_ops(kc.dev);
        kc_faults[f].plant(&ops);
        kc.ops = &ops;
        bool found = false;
        for (int pool = KC_EDGE; pool < KC_POOLS && !found; pool++) {
            kc.pool = (enum kc_pool)pool;
            int cases = pool == KC_RANDOM ? o->cases : kc_ops[op].cases[pool];
            for (kc.index = 0; kc.index < cases && !found; kc.index++)
                found = !kc_run_case(&kc, o, op, &totals, true);
        }
        device_close(kc.dev);
        device_close(kc.ref);
        kc_weights_free(&kc);
        caught += found;
        printf("%-7s %-12s %s%s%.200s\n", found ? "caught" : "MISSED", kc_faults[f].op,
               kc_faults[f].name, found ? ": " : "", found ? kc.message : "");
    }
    printf("%d passed, %d failed, 0 skipped\n", caught, kc_fault_count - caught);
    return caught == kc_fault_count ? 0 : 1;
}

static void kc_help(void)
{
    printf("Checks every op of every level of this machine against the C reference.\n\n"
           "  --seed N     of all random inputs (default 1)\n"
           "  --op NAME    only this op\n"
           "  --level NAME only this level (cpu/ref, cpu/avx2, ...)\n"
           "  --pool NAME  only real, edge or random shapes\n"
           "  --cases N    random cases an op (default 20)\n"
           "  --every N    only every N-th case of a pool\n"
           "  --without NAME  the CUDA level without a technique, as calla bench --ablate has it\n"
           "  --deterministic  opens levels so, and cuts the second run of a case otherwise\n"
           "  --bench      times the real shapes; --csv FILE keeps the figures\n"
           "  --self-test  plants faults, each of which must be caught\n");
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, 0, 's'},
                                            {"op", required_argument, 0, 'o'},
                                            {"level", required_argument, 0, 'l'},
                                            {"pool", required_argument, 0, 'p'},
                                            {"cases", required_argument, 0, 'n'},
                                            {"csv", required_argument, 0, 'c'},
                                            {"bench", no_argument, 0, 'b'},
                                            {"self-test", no_argument, 0, 't'},
                                            {"deterministic", no_argument, 0, 'd'},
                                            {"help", no_argument, 0, 'h'},
                                            {"every", required_argument, 0, 'e'},
                                            {"without", required_argument, 0, 'w'},
                                            {0, 0, 0, 0}};
    struct kc_options o = {.seed = 1, .cases = 20, .every = 1};
    int c;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 's')
            o.seed = strtoull(optarg, NULL, 10);
        else if (c == 'o')
            o.op = optarg;
        else if (c == 'l')
            o.level = optarg;
        else if (c == 'p')
            o.pool = optarg;
        else if (c == 'n')
            o.cases = (int)strtol(optarg, NULL, 10);
        else if (c == 'e')
            o.every = (int)strtol(optarg, NULL, 10);
        else if (c == 'c')
            o.csv = optarg;
        else if (c == 'w')
            o.without = optarg;
        else if (c == 'b')
            o.bench = true;
        else if (c == 'd')
            o.deterministic = true;
        else if (c == 't')
            o.self_test = true;
        else {
            kc_help();
            return c == 'h' ? 0 : 2;
        }
    }
    o.every = o.every > 0 ? o.every : 1;
    if (o.bench && o.deterministic) {
        fprintf(stderr,
                "kcheck: --bench repeats calls, which --deterministic compares; choose one\n");
        return 2;
    }
    return o.self_test ? kc_self_test(&o) : kc_run_all(&o);
}
