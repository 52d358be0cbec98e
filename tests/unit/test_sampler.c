/* The sampler against plain references, at extremes, and for its cost. */
#include "engine/sampler.h"

#include "spent.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { VOCAB = 50, DRAWS = 4000 };

static struct sampler_options neutral(void)
{
    return (struct sampler_options){
        .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 7, .vocab = VOCAB};
}

static void fill(float *logits, size_t n, uint64_t seed)
{
    struct rand r = {seed};
    for (size_t i = 0; i < n; i++)
        logits[i] = rand_normal(&r) * 2;
}

/* Shares of DRAWS draws that each id gets. */
static void draw_shares(const struct sampler_options *o, const float *logits, double *shares)
{
    struct err err = {0};
    struct sampler *s;
    assert_true(sampler_open(o, &s, &err));
    memset(shares, 0, VOCAB * sizeof *shares);
    for (int i = 0; i < DRAWS; i++) {
        float row[VOCAB];
        int32_t id;
        memcpy(row, logits, sizeof row);
        assert_true(sampler_pick(s, row, VOCAB, &id, &err));
        assert_in_range(id, 0, VOCAB - 1);
        shares[id] += 1.0 / DRAWS;
    }
    sampler_close(s);
}

/* The documented order by the letter, over a fully sorted list. */
static void reference_shares(const struct sampler_options *o, const float *logits, double *shares)
{
    int order[VOCAB];
    double p[VOCAB], sum = 0;
    for (int i = 0; i < VOCAB; i++) {
        int k = i;
        for (; k && logits[order[k - 1]] < logits[i]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
    int kept = o->top_k && o->top_k < VOCAB ? (int)o->top_k : VOCAB;
    for (int i = 0; i < kept; i++)
        sum += p[i] = exp((double)(logits[order[i]] - logits[order[0]]) / (double)o->temperature);
    double reached = 0;
    int by_p = 0;
    while (by_p < kept && (!by_p || reached < (double)o->top_p * sum))
        reached += p[by_p++];
    kept = o->top_p < 1 ? by_p : kept;
    while (kept > 1 && p[kept - 1] < (double)o->min_p)
        kept--;
    sum = 0;
    for (int i = 0; i < kept; i++)
        sum += p[i];
    memset(shares, 0, VOCAB * sizeof *shares);
    for (int i = 0; i < kept; i++)
        shares[order[i]] = p[i] / sum;
}

static void check_shares(const struct sampler_options *o, uint64_t seed)
{
    float logits[VOCAB];
    double got[VOCAB], want[VOCAB];
    fill(logits, VOCAB, seed);
    draw_shares(o, logits, got);
    reference_shares(o, logits, want);
    for (int i = 0; i < VOCAB; i++) {
        /* Five standard deviations of a share of DRAWS draws. */
        double bound = 5 * sqrt(want[i] * (1 - want[i]) / DRAWS);
        if (fabs(got[i] - want[i]) > bound + 1e-9)
            fail_msg("id %d: drawn %.5f, expected %.5f +- %.5f (temperature %g, top_k %u, top_p %g,"
                     " min_p %g)",
                     i, got[i], want[i], bound, (double)o->temperature, o->top_k, (double)o->top_p,
                     (double)o->min_p);
    }
}

static void filters_match_the_reference(void **state)
{
    (void)state;
    static const float temperatures[] = {0.3f, 1, 3}, top_ps[] = {0, 0.5f, 0.95f, 1},
                       min_ps[] = {0, 0.1f, 1};
    static const uint32_t top_ks[] = {0, 1, 5, 49, 50, 1000};
    struct sampler_options o = neutral();
    uint64_t seed = 1;
    for (size_t t = 0; t < 3; t++)
        for (size_t k = 0; k < 6; k++)
            for (size_t p = 0; p < 4; p++)
                for (size_t m = 0; m < 3; m++) {
                    o.temperature = temperatures[t];
                    o.top_k = top_ks[k];
                    o.top_p = top_ps[p];
                    o.min_p = min_ps[m];
                    o.seed = seed;
                    check_shares(&o, seed++);
                }
}

static void same_seed_same_tokens(void **state)
{
    (void)state;
    struct sampler_options o = neutral();
    struct sampler *a, *b, *c;
    struct err err;
    float row[VOCAB], copy[VOCAB];
    int differ = 0;
    assert_true(sampler_open(&o, &a, &err));
    assert_true(sampler_open(&o, &b, &err));
    o.seed++;
    assert_true(sampler_open(&o, &c, &err));
    for (uint64_t i = 0; i < 200; i++) {
        int32_t x, y, z;
        fill(row, VOCAB, i);
        memcpy(copy, row, sizeof row);
        assert_true(sampler_pick(a, copy, VOCAB, &x, &err));
        memcpy(copy, row, sizeof row);
        assert_true(sampler_pick(b, copy, VOCAB, &y, &err));
        memcpy(copy, row, sizeof row);
        assert_true(sampler_pick(c, copy, VOCAB, &z, &err));
        assert_int_equal(x, y);
        differ += x != z;
    }
    assert_true(differ > 20);
    sampler_close(a);
    sampler_close(b);
    sampler_close(c);
}

static int32_t pick(const struct sampler_options *o, const float *logits, size_t n)
{
    struct err err = {0};
    struct sampler *s;
    int32_t id = -1;
    float *row = malloc(n * sizeof *row);
    memcpy(row, logits, n * sizeof *row);
    assert_true(sampler_open(o, &s, &err));
    assert_true(sampler_pick(s, row, n, &id, &err));
    sampler_close(s);
    free(row);
    return id;
}

static void ties_go_to_the_lowest_id(void **state)
{
    (void)state;
    float logits[VOCAB];
    struct sampler_candidate top[VOCAB];
    struct sampler_options o = neutral();
    for (int i = 0; i < VOCAB; i++)
        logits[i] = i % 7 == 3 ? 2 : 1;
    o.temperature = 0;
    assert_int_equal(pick(&o, logits, VOCAB), 3);
    o = neutral();
    o.top_k = 1;
    assert_int_equal(pick(&o, logits, VOCAB), 3);
    o = neutral();
    o.top_p = 0;
    assert_int_equal(pick(&o, logits, VOCAB), 3);
    assert_int_equal(sampler_top(logits, VOCAB, 9, top), 9);
    static const int32_t want[] = {3, 10, 17, 24, 31, 38, 45, 0, 1};
    for (int i = 0; i < 9; i++)
        assert_int_equal(top[i].id, want[i]);
    for (uint64_t seed = 0; seed < 100; seed++) {
        o = neutral();
        o.top_k = 2;
        o.seed = seed;
        int32_t id = pick(&o, logits, VOCAB);
        assert_true(id == 3 || id == 10);
    }
}

static void padding_is_never_chosen(void **state)
{
    (void)state;
    float logits[VOCAB + 20];
    fill(logits, VOCAB + 20, 3);
    for (int i = VOCAB; i < VOCAB + 20; i++)
        logits[i] = i % 2 ? NAN : 1000;
    struct sampler_options o = neutral();
    for (uint64_t seed = 0; seed < 300; seed++) {
        o.seed = seed;
        o.temperature = seed % 3 ? 50 : 0;
        o.top_k = seed % 2 ? 40 : 0;
        assert_in_range(pick(&o, logits, VOCAB + 20), 0, VOCAB - 1);
    }
    /* A row shorter than the vocabulary is no fault either. */
    o = neutral();
    o.vocab = 1000;
    assert_in_range(pick(&o, logits, 10), 0, 9);
}

/* Pitfall 65: every combination of extremes is either refused by name or gives a token. */
static void extremes(void **state)
{
    (void)state;
    static const float values[] = {0, 1, -1, 1e9f, NAN, 1e-30f, INFINITY};
    static const uint32_t top_ks[] = {0, 1, 1000000000, UINT32_MAX};
    enum { N = sizeof values / sizeof *values };
    float logits[VOCAB];
    int accepted = 0, refused = 0;
    fill(logits, VOCAB, 5);
    for (int i = 0; i < N * N * N * 4; i++) {
        struct sampler_options o = neutral();
        struct err err = {0};
        o.temperature = values[i % N];
        o.top_p = values[i / N % N];
        o.min_p = values[i / N / N % N];
        o.top_k = top_ks[i / (N * N * N)];
        bool in_range = o.temperature >= 0 && o.temperature <= 100 && o.top_p >= 0 &&
                        o.top_p <= 1 && o.min_p >= 0 && o.min_p <= 1;
        assert_int_equal(sampler_check(&o, &err), in_range);
        if (in_range) {
            assert_in_range(pick(&o, logits, VOCAB), 0, VOCAB - 1);
            accepted++;
        } else {
            assert_int_equal(err.kind, ERR_USAGE);
            assert_true(strstr(err.text, "temperature") || strstr(err.text, "top_p") ||
                        strstr(err.text, "min_p"));
            refused++;
        }
    }
    assert_int_equal(accepted, 3 * 3 * 3 * 4);
    assert_int_equal(accepted + refused, N * N * N * 4);
}

static void refused(const char *field, const struct sampler_options *o)
{
    struct err err = {0};
    struct sampler *s = (struct sampler *)&err;
    assert_false(sampler_open(o, &s, &err));
    assert_null(s);
    assert_int_equal(err.kind, ERR_USAGE);
    assert_non_null(strstr(err.text, field));
}

static void refusals_name_the_field(void **state)
{
    (void)state;
    static const float penalties[] = {0, -1, 1e9f, NAN, INFINITY};
    struct sampler_options o;
    for (int i = 0; i < 5; i++) {
        o = neutral();
        o.repetition_penalty = penalties[i];
        refused("repetition_penalty", &o);
        if (i < 2)
            continue;
        o = neutral();
        o.presence_penalty = penalties[i];
        refused("presence_penalty", &o);
        o = neutral();
        o.frequency_penalty = penalties[i];
        refused("frequency_penalty", &o);
        o = neutral();
        o.bias = &(struct sampler_bias){3, penalties[i]};
        o.bias_count = 1;
        refused("logit_bias", &o);
    }
    static const int32_t ids[] = {-1, VOCAB, INT32_MAX};
    for (int i = 0; i < 3; i++) {
        o = neutral();
        o.bias = &(struct sampler_bias){ids[i], 1};
        o.bias_count = 1;
        refused("logit_bias", &o);
    }
}

static void bad_logits_are_internal_errors(void **state)
{
    (void)state;
    struct sampler_options options[4];
    for (int i = 0; i < 4; i++)
        options[i] = neutral();
    options[0].temperature = 0;
    options[1].top_k = 5;
    options[2].top_p = 0.5f;
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < 4; i++)
            for (int at = 0; at < VOCAB; at += 7) {
                float row[VOCAB];
                struct err err = {0};
                struct sampler *s;
                int32_t id;
                fill(row, VOCAB, 1);
                row[at] = kind == 0 ? NAN : INFINITY;
                if (kind == 2)
                    for (int k = 0; k < VOCAB; k++)
                        row[k] = -INFINITY;
                assert_true(sampler_open(&options[i], &s, &err));
                assert_false(sampler_pick(s, row, VOCAB, &id, &err));
                assert_int_equal(err.kind, ERR_INTERNAL);
                sampler_close(s);
            }
    /* -infinity beside finite ones is a mask, not a fault. */
    for (int i = 0; i < 4; i++) {
        float row[VOCAB];
        for (int k = 0; k < VOCAB; k++)
            row[k] = k == 33 ? -5 : -INFINITY;
        assert_int_equal(pick(&options[i], row, VOCAB), 33);
    }
}

/* Pitfall 64: counts equal a recount, whatever the order of accepting. */
static void penalties_match_a_recount(void **state)
{
    (void)state;
    struct rand r = {11};
    for (int round = 0; round < 200; round++) {
        struct sampler_options o = neutral();
        struct sampler_bias bias[] = {{(int32_t)rand_below(&r, VOCAB), 3.5f},
                                      {(int32_t)rand_below(&r, VOCAB), -100}};
        o.temperature = 0;
        o.repetition_penalty = 0.5f + (float)rand_unit(&r) * 2;
        o.presence_penalty = (float)rand_unit(&r) * 4 - 2;
        o.frequency_penalty = (float)rand_unit(&r) * 4 - 2;
        o.bias = bias;
        o.bias_count = 2;
        struct err err = {0};
        struct sampler *s;
        int prompt[VOCAB] = {0}, answer[VOCAB] = {0};
        assert_true(sampler_open(&o, &s, &err));
        assert_false(sampler_is_argmax(s));
        for (int i = 0; i < 60; i++) {
            int32_t id = (int32_t)rand_below(&r, VOCAB);
            bool is_prompt = i < 30;
            sampler_accept(s, id, is_prompt);
            (is_prompt ? prompt : answer)[id]++;
        }
        sampler_accept(s, VOCAB + 3, false);
        sampler_accept(s, -1, true);
        float row[VOCAB], want[VOCAB];
        fill(row, VOCAB, (uint64_t)round);
        memcpy(want, row, sizeof row);
        for (int i = 0; i < 2; i++)
            want[bias[i].id] += bias[i].bias;
        int best = 0;
        for (int i = 0; i < VOCAB; i++) {
            if (prompt[i] || answer[i])
                want[i] =
                    want[i] > 0 ? want[i] / o.repetition_penalty : want[i] * o.repetition_penalty;
            if (answer[i])
                want[i] -= o.presence_penalty + o.frequency_penalty * (float)answer[i];
            if (want[i] > want[best])
                best = i;
        }
        int32_t id;
        assert_true(sampler_pick(s, row, VOCAB, &id, &err));
        assert_int_equal(id, best);
        for (int i = 0; i < VOCAB; i++)
            assert_true(row[i] == want[i]);
        sampler_close(s);
    }
}

static void argmax_is_known_beforehand(void **state)
{
    (void)state;
    struct sampler_options o = neutral();
    struct sampler_bias bias = {1, 1};
    struct err err;
    struct sampler *s;
    for (int i = 0; i < 6; i++) {
        o = neutral();
        o.temperature = i == 0 ? 1 : 0;
        o.repetition_penalty = i == 2 ? 1.1f : 1;
        o.presence_penalty = i == 3 ? 0.1f : 0;
        o.bias = &bias;
        o.bias_count = i == 4;
        o.top_p = i == 5 ? 0.5f : 1;
        assert_true(sampler_open(&o, &s, &err));
        assert_int_equal(sampler_is_argmax(s), i == 1 || i == 5);
        sampler_close(s);
    }
}

static void logprobs_match_the_reference(void **state)
{
    (void)state;
    float row[VOCAB];
    struct sampler_candidate top[VOCAB + 5];
    for (uint64_t seed = 0; seed < 50; seed++) {
        fill(row, VOCAB, seed);
        row[seed] = seed % 3 ? row[seed] : -INFINITY;
        double sum = 0;
        for (int i = 0; i < VOCAB; i++)
            sum += exp((double)row[i]);
        assert_int_equal(sampler_top(row, VOCAB, VOCAB + 5, top), VOCAB);
        for (int i = 0; i < VOCAB; i++) {
            double want = (double)row[top[i].id] - log(sum);
            assert_true(top[i].logprob == (float)want ||
                        fabs((double)top[i].logprob - want) < 1e-5);
            assert_true(sampler_logprob(row, VOCAB, top[i].id) == top[i].logprob);
            assert_true(!i || row[top[i - 1].id] >= row[top[i].id]);
        }
    }
    assert_int_equal(sampler_top(row, VOCAB, 0, top), 0);
}

/* Choosing among the full vocabulary costs well under a decode step. */
static void cost_at_full_vocabulary(void **state)
{
    (void)state;
    enum { N = 248320, REPEATS = 50 };
    float *row = malloc(N * sizeof *row), *copy = malloc(N * sizeof *copy);
    fill(row, N, 9);
    static const struct {
        uint32_t top_k;
        float top_p;
        double limit_ms;
    } cases[] = {{20, 0.95f, 1}, {0, 0.95f, 40}, {0, 1, 10}};
    for (int c = 0; c < 3; c++) {
        struct sampler_options o = neutral();
        struct err err;
        struct sampler *s;
        int32_t id;
        double ms = 0;
        o.vocab = 248077;
        o.top_k = cases[c].top_k;
        o.top_p = cases[c].top_p;
        assert_true(sampler_open(&o, &s, &err));
        for (int i = 0; i < REPEATS; i++) {
            memcpy(copy, row, N * sizeof *row);
            double start = spent_ms();
            assert_true(sampler_pick(s, copy, N, &id, &err));
            ms += (spent_ms() - start) / REPEATS;
        }
        print_message("           top_k %u, top_p %.2f: %.3f ms a token\n", o.top_k,
                      (double)o.top_p, ms);
        /* Ten times the limit, for a sanitizer build. */
        assert_true(ms < 10 * cases[c].limit_ms);
        sampler_close(s);
    }
    free(row);
    free(copy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(filters_match_the_reference),
        cmocka_unit_test(same_seed_same_tokens),
        cmocka_unit_test(ties_go_to_the_lowest_id),
        cmocka_unit_test(padding_is_never_chosen),
        cmocka_unit_test(extremes),
        cmocka_unit_test(refusals_name_the_field),
        cmocka_unit_test(bad_logits_are_internal_errors),
        cmocka_unit_test(penalties_match_a_recount),
        cmocka_unit_test(argmax_is_known_beforehand),
        cmocka_unit_test(logprobs_match_the_reference),
        cmocka_unit_test(cost_at_full_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
