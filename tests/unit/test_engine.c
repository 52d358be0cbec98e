/* One request from prompt to end, on the demo model: stops, seeds, log-probabilities, the context's
 * end, what is reused, and what a failure leaves behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rand.h"
#include "base/utf8.h"
#include "engine/defaults.h"
#include "engine/engine.h"
#include "engine/stops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct engine *open_engine(const char *folder, uint32_t ctx, uint32_t chunk)
{
    struct engine *engine;
    struct err err = {0};
    struct engine_options options = {
        .model = folder, .backend = "cpu/ref", .threads = 1, .ctx = ctx, .chunk = chunk};
    if (!engine_open(&options, &engine, &err))
        fail_msg("%s", err.text);
    return engine;
}

static const char question[] = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
                               "<|im_start|>assistant\n<think>\n\n</think>\n\n";
static const char answer[] = "The capital of France is Paris.";

static struct token_list encode(const struct engine *engine, const char *text)
{
    struct token_list ids = {0};
    struct err err = {0};
    if (!tokenizer_encode(engine_tokenizer(engine), text, strlen(text), NULL, 0, &ids, &err))
        fail_msg("%s", err.text);
    return ids;
}

/* What on_token saw. */
struct seen {
    struct buf text;
    int tokens, ends, stop_after; /* stop_after: cancels at so many tokens, 0 never */
    uint32_t prefilled, stop_prefill;
    float logprobs[64];
    struct sampler_candidate top[64][5];
};

static bool on_token(void *user, const struct engine_token *token)
{
    struct seen *seen = user;
    assert_int_equal(utf8_valid_prefix(token->text, token->len), token->len);
    buf_append(&seen->text, token->text, token->len);
    if (token->id < 0) {
        seen->ends++;
        return true;
    }
    assert_int_equal(seen->ends, 0);
    if (seen->tokens < 64 && token->top_count == 5) {
        seen->logprobs[seen->tokens] = token->logprob;
        memcpy(seen->top[seen->tokens], token->top, sizeof seen->top[0]);
    }
    seen->tokens++;
    return seen->tokens != seen->stop_after;
}

static bool on_prefill(void *user, uint32_t done, uint32_t total)
{
    struct seen *seen = user;
    assert_true(done > seen->prefilled && done <= total);
    seen->prefilled = done;
    return !seen->stop_prefill || done < seen->stop_prefill;
}

static struct engine_request ask(const struct token_list *prompt, struct seen *seen, uint32_t max)
{
    return (struct engine_request){
        .prompt = prompt->ids,
        .prompt_len = prompt->len,
        .max_tokens = max,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
        .on_token = on_token,
        .on_prefill = on_prefill,
        .user = seen,
    };
}

static struct engine_result generate(struct engine *engine, const struct engine_request *request)
{
    struct engine_result result;
    struct err err = {0};
    if (!engine_generate(engine, request, &result, &err))
        fail_msg("%s", err.text);
    return result;
}

static void assert_text(const struct seen *seen, const char *want)
{
    assert_string_equal(seen->text.data ? seen->text.data : "", want);
}

/* ---- stop strings ------------------------------------------------------------------------- */

/* The plainest definition: the stop string that is complete first, the longest of those. */
static size_t first_stop(const char *text, const char *const *stops, size_t count, bool *hit)
{
    size_t n = strlen(text);
    *hit = false;
    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (size_t i = 0; i < count; i++) {
            size_t len = strlen(stops[i]);
            if (len <= end && len > longest && !memcmp(text + end - len, stops[i], len))
                longest = len;
        }
        if (longest) {
            *hit = true;
            return end - longest;
        }
    }
    return n;
}

static void check_stops(const char *text, const char *const *strings, size_t count,
                        struct rand *rand)
{
    struct stops stops = {.strings = strings, .count = count};
    struct buf out = {0};
    bool hit;
    size_t n = strlen(text), want = first_stop(text, strings, count, &hit);
    for (size_t done = 0; done < n;) {
        size_t piece = 1 + rand_below(rand, 4);
        piece = piece > n - done ? n - done : piece;
        stops_push(&stops, text + done, piece, &out);
        done += piece;
        assert_true(out.len <= want);
        if (!stops.hit) { /* what is withheld begins a stop string */
            size_t held = done - out.len, i = 0;
            while (i < count && strncmp(strings[i], text + out.len, held) != 0)
                i++;
            assert_true(held == 0 || i < count);
        }
    }
    stops_finish(&stops, &out);
    assert_int_equal(stops.hit, hit);
    assert_int_equal(out.len, want);
    if (want)
        assert_memory_equal(out.data, text, want);
    buf_free(&out);
    stops_free(&stops);
}

/* Pitfall 44. */
static void stops_hold_back_what_may_be_one(void **unused)
{
    (void)unused;
    struct rand rand = {1};
    char hundred[101];
    memset(hundred, 'x', 100);
    hundred[100] = 0;
    static const char *const end[] = {"END"};
    const char *const four[] = {"a", "ENJOYED", "\n\n", hundred};
    for (int round = 0; round < 20; round++) {
        check_stops("so EN", end, 1, &rand);
        check_stops("so END of", end, 1, &rand);
        check_stops("so ENJOY, EEND", end, 1, &rand);
        check_stops("so ENJOY", four, 4, &rand);
        check_stops("so ENJOYED", four, 4, &rand);
        check_stops("xxxxxx\n xxx\n\nx", four, 4, &rand);
        check_stops("text", NULL, 0, &rand);
    }
    /* Few letters make overlaps frequent. */
    for (int round = 0; round < 20000; round++) {
        char text[24], store[3][6];
        const char *strings[3];
        size_t n = rand_below(&rand, sizeof text);
        for (size_t i = 0; i < n; i++)
            text[i] = (char)('a' + rand_below(&rand, 3));
        text[n] = 0;
        for (int i = 0; i < 3; i++) {
            size_t len = 1 + rand_below(&rand, 5);
            for (size_t j = 0; j < len; j++)
                store[i][j] = (char)('a' + rand_below(&rand, 3));
            store[i][len] = 0;
            strings[i] = store[i];
        }
        check_stops(text, strings, 3, &rand);
    }
}

/* Every stretch of the known answer as the stop string, whatever tokens it begins and ends in. */
static void answers_end_before_a_stop_string(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 128, 64);
    struct token_list prompt = encode(engine, question);
    size_t n = strlen(answer);
    for (size_t start = 0; start < n; start += 2)
        for (size_t len = 1; len <= 9 && start + len <= n; len += 4) {
            char stop[16] = "";
            memcpy(stop, answer + start, len);
            const char *const stops[] = {"never there", stop};
            struct seen seen = {0};
            struct engine_request request = ask(&prompt, &seen, 20);
            request.stop = stops;
            request.stop_count = 2;
            struct engine_result result = generate(engine, &request);
            size_t want = (size_t)(strstr(answer, stop) - answer);
            assert_int_equal(seen.text.len, want);
            if (want)
                assert_memory_equal(seen.text.data, answer, want);
            assert_int_equal(result.finish, FINISH_STOP);
            assert_int_equal(result.stop_id, -1);
            assert_int_equal(seen.ends, 1);
            token_list_free(&result.ids);
            buf_free(&seen.text);
        }
    token_list_free(&prompt);
    engine_close(engine);
}

/* ---- answers ------------------------------------------------------------------------------ */

static void answers_end_at_eos_and_go_past_it_when_told(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 128, 8);
    struct token_list prompt = encode(engine, question);
    struct seen seen = {0};
    struct engine_request request = ask(&prompt, &seen, 0);
    struct engine_result result = generate(engine, &request);
    assert_text(&seen, answer);
    assert_int_equal(result.finish, FINISH_STOP);
    assert_int_equal(result.stop_id, 8174);
    assert_int_equal(result.ids.len, seen.tokens);
    assert_int_equal(seen.prefilled, prompt.len);
    token_list_free(&result.ids);
    buf_free(&seen.text);

    seen = (struct seen){0};
    request.ignore_eos = true;
    request.show_special = true;
    request.max_tokens = 12;
    result = generate(engine, &request);
    assert_int_equal(result.finish, FINISH_LENGTH);
    assert_int_equal(result.ids.len, 12);
    assert_memory_equal(seen.text.data, answer, strlen(answer));
    assert_non_null(strstr(seen.text.data, "<|im_end|>"));
    token_list_free(&result.ids);
    buf_free(&seen.text);
    token_list_free(&prompt);
    engine_close(engine);
}

/* The last position of the context is used, and no more; pitfall 5: answers of one token. */
static void answers_end_with_the_context(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 32, 64);
    struct token_list prompt = encode(engine, question);
    for (size_t n = 21; n <= 34; n++) {
        struct token_list padded = {0};
        for (size_t i = 0; i < n; i++)
            token_list_push(&padded, prompt.ids[i % prompt.len]);
        struct seen seen = {0};
        struct engine_request request = ask(&padded, &seen, 0);
        request.ignore_eos = true;
        struct engine_result result;
        struct err err = {0};
        bool ok = engine_generate(engine, &request, &result, &err);
        assert_int_equal(ok, n <= 32);
        if (ok) {
            assert_int_equal(result.ids.len, 32 - n + 1);
            assert_int_equal(result.finish, FINISH_LENGTH);
        } else {
            assert_int_equal(err.kind, ERR_RESOURCE);
        }
        token_list_free(&result.ids);
        token_list_free(&padded);
        buf_free(&seen.text);
    }
    token_list_free(&prompt);
    engine_close(engine);
}

static void same_seed_same_answer(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 128, 64);
    struct token_list prompt = encode(engine, "Once upon a time");
    struct token_list first[3];
    for (int i = 0; i < 6; i++) {
        struct seen seen = {0};
        struct engine_request request = ask(&prompt, &seen, 16);
        request.sampling = engine_sampling(engine);
        request.sampling.temperature = 1.5f;
        request.sampling.top_k = 0;
        request.sampling.seed = (uint64_t)i % 3;
        request.ignore_eos = true;
        struct engine_result result = generate(engine, &request);
        if (i < 3) {
            first[i] = result.ids;
        } else {
            assert_memory_equal(first[i - 3].ids, result.ids.ids, 16 * sizeof(int32_t));
            token_list_free(&result.ids);
        }
        buf_free(&seen.text);
    }
    assert_memory_not_equal(first[0].ids, first[1].ids, 16 * sizeof(int32_t));
    assert_memory_not_equal(first[0].ids, first[2].ids, 16 * sizeof(int32_t));
    for (int i = 0; i < 3; i++)
        token_list_free(&first[i]);
    token_list_free(&prompt);
    engine_close(engine);
}

struct score_row {
    float want[64];
    const int32_t *ids;
    size_t n, rows;
};

static bool on_score(void *user, size_t i, const float *logits)
{
    struct score_row *row = user;
    assert_int_equal(i, row->rows++);
    if (i + 1 < row->n)
        row->want[i] = sampler_logprob(logits, 8192, row->ids[i + 1]);
    return true;
}

/* Pitfall 70: what decoding reports is what scoring the whole text gives. */
static void logprobs_are_those_of_the_text(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 128, 16);
    struct token_list prompt = encode(engine, question);
    struct seen seen = {0};
    struct err err = {0};
    struct engine_request request = ask(&prompt, &seen, 7);
    request.logprobs = true;
    request.top_logprobs = 5;
    struct engine_result result = generate(engine, &request);
    assert_int_equal(result.ids.len, 7);
    assert_text(&seen, answer);
    struct token_list all = {0};
    for (size_t i = 0; i < prompt.len; i++)
        token_list_push(&all, prompt.ids[i]);
    for (size_t i = 0; i < 7; i++)
        token_list_push(&all, result.ids.ids[i]);
    struct score_row row = {.ids = all.ids, .n = all.len};
    assert_false(engine_score(engine, all.ids, all.len, 17, on_score, &row, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_true(engine_score(engine, all.ids, all.len, 5, on_score, &row, &err));
    assert_int_equal(row.rows, all.len);
    for (size_t i = 0; i < 7; i++) {
        assert_true(fabsf(seen.logprobs[i] - row.want[prompt.len - 1 + i]) < 1e-4f);
        assert_int_equal(seen.top[i][0].id, result.ids.ids[i]);
        assert_true(seen.top[i][0].logprob == seen.logprobs[i]);
        for (int k = 1; k < 5; k++)
            assert_true(seen.top[i][k].logprob <= seen.top[i][k - 1].logprob);
    }
    token_list_free(&all);
    token_list_free(&result.ids);
    buf_free(&seen.text);
    token_list_free(&prompt);
    engine_close(engine);
}

/* ---- from one request to the next --------------------------------------------------------- */

static struct engine_result run_once(struct engine *engine, const struct token_list *prompt,
                                     uint32_t max)
{
    struct seen seen = {0};
    struct engine_request request = ask(prompt, &seen, max);
    struct engine_result result = generate(engine, &request);
    buf_free(&seen.text);
    return result;
}

/* Pitfalls 4, 5, 61: reuse only where what was kept is a true prefix, with equal answers. */
static void prefixes_are_reused_when_exact(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 256, 64);
    struct engine *cold = open_engine("models/demo", 256, 64);
    struct token_list prompt = encode(engine, question);
    struct engine_result first = run_once(engine, &prompt, 20);
    assert_int_equal(first.cached_tokens, 0);

    struct engine_result again = run_once(engine, &prompt, 20);
    assert_int_equal(again.cached_tokens, prompt.len - 1);
    assert_int_equal(again.ids.len, first.ids.len);
    assert_memory_equal(again.ids.ids, first.ids.ids, first.ids.len * sizeof(int32_t));

    struct token_list next = {0}, more = encode(engine, "<|im_end|>\n<|im_start|>user\nAnd of "
                                                        "Italy?<|im_end|>\n<|im_start|>assistant\n"
                                                        "<think>\n\n</think>\n\n");
    for (size_t i = 0; i < prompt.len; i++)
        token_list_push(&next, prompt.ids[i]);
    for (size_t i = 0; i < first.ids.len; i++)
        token_list_push(&next, first.ids.ids[i]);
    for (size_t i = 0; i < more.len; i++)
        token_list_push(&next, more.ids[i]);
    struct engine_result warm = run_once(engine, &next, 20);
    struct engine_result fresh = run_once(cold, &next, 20);
    assert_int_equal(warm.cached_tokens, prompt.len + first.ids.len);
    assert_int_equal(fresh.cached_tokens, 0);
    assert_int_equal(warm.ids.len, fresh.ids.len);
    assert_memory_equal(warm.ids.ids, fresh.ids.ids, fresh.ids.len * sizeof(int32_t));

    next.ids[3] ^= 1;
    token_list_push(&next, 5);
    struct engine_result other = run_once(engine, &next, 1);
    assert_int_equal(other.cached_tokens, 0);

    token_list_free(&other.ids);
    token_list_free(&warm.ids);
    token_list_free(&fresh.ids);
    token_list_free(&again.ids);
    token_list_free(&first.ids);
    token_list_free(&more);
    token_list_free(&next);
    token_list_free(&prompt);
    engine_close(engine);
    engine_close(cold);
}

/* Pitfall 46: in the prompt and in the answer; the next request is not disturbed. */
static void requests_can_be_cancelled(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 256, 4);
    struct token_list prompt = encode(engine, question);
    struct seen seen = {.stop_prefill = 8};
    struct engine_request request = ask(&prompt, &seen, 20);
    struct engine_result result = generate(engine, &request);
    assert_int_equal(result.finish, FINISH_CANCELLED);
    assert_int_equal(result.ids.len, 0);
    assert_int_equal(seen.prefilled, 8);
    assert_int_equal(seen.ends, 0);
    token_list_free(&result.ids);

    seen = (struct seen){.stop_after = 3};
    result = generate(engine, &request);
    assert_int_equal(result.finish, FINISH_CANCELLED);
    assert_int_equal(result.cached_tokens, 0);
    assert_int_equal(result.ids.len, 3);
    token_list_free(&result.ids);
    buf_free(&seen.text);

    seen = (struct seen){0};
    result = generate(engine, &request);
    assert_text(&seen, answer);
    token_list_free(&result.ids);
    buf_free(&seen.text);
    token_list_free(&prompt);
    engine_close(engine);
}

/* A number that is not one ends the request with an error, and only that request. */
static void damaged_numbers_end_the_request(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("models/demo", 256, 64);
    struct token_list prompt = encode(engine, question);
    const struct model *model = engine_model(engine);
    const struct device_calls *calls = device_calls(model->device);
    struct span gain = model->layers[2].input_norm;
    float good, nan = NAN;
    calls->read(model->device, &good, gain, 4);
    for (int sampled = 0; sampled < 2; sampled++) {
        struct seen seen = {0};
        struct engine_request request = ask(&prompt, &seen, 20);
        struct engine_result result;
        struct err err = {0};
        request.sampling.temperature = (float)sampled;
        calls->write(model->device, gain, &nan, 4);
        assert_false(engine_generate(engine, &request, &result, &err));
        assert_int_equal(err.kind, ERR_INTERNAL);
        assert_null(result.ids.ids);
        assert_int_equal(seen.tokens, 0);
        calls->write(model->device, gain, &good, 4);
        request.sampling.temperature = 0;
        seen = (struct seen){0};
        result = generate(engine, &request);
        assert_int_equal(result.cached_tokens, 0);
        assert_text(&seen, answer);
        token_list_free(&result.ids);
        buf_free(&seen.text);
    }
    token_list_free(&prompt);
    engine_close(engine);
}

/* ---- what is refused ---------------------------------------------------------------------- */

static void expect_refusal(struct engine *engine, const struct engine_request *request)
{
    struct engine_result result;
    struct err err = {0};
    assert_false(engine_generate(engine, request, &result, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_true(strlen(err.text) > 0);
}

/* A fixture has no tokenizer and no generation_config.json: ids in, ids out, greedy. */
static void wrong_requests_are_refused(void **unused)
{
    (void)unused;
    struct engine *engine = open_engine("tests/data/fixtures/fixture-mlx", 64, 16);
    assert_null(engine_tokenizer(engine));
    assert_true(engine_sampling(engine).temperature == 0);
    int32_t ids[3] = {5, 6, 7};
    struct token_list prompt = {.ids = ids, .len = 3};
    struct seen seen = {0};
    struct engine_request good = ask(&prompt, &seen, 4), bad = good;
    bad.prompt_len = 0;
    expect_refusal(engine, &bad);
    ids[1] = 512;
    expect_refusal(engine, &good);
    ids[1] = -1;
    expect_refusal(engine, &good);
    ids[1] = 6;
    static const char *const empty[] = {""};
    bad = good;
    bad.stop = empty;
    bad.stop_count = 1;
    expect_refusal(engine, &bad);
    bad = good;
    bad.top_logprobs = 1025;
    expect_refusal(engine, &bad);
    bad = good;
    bad.sampling.temperature = NAN;
    expect_refusal(engine, &bad);
    struct engine_result result = generate(engine, &good);
    assert_true(result.ids.len > 0 || result.stop_id >= 0);
    assert_int_equal(seen.text.len, 0);
    buf_free(&seen.text);
    token_list_free(&result.ids);
    engine_close(engine);
}

static void what_cannot_open_says_why(void **unused)
{
    (void)unused;
    struct engine *engine;
    struct err err = {0};
    struct engine_options options = {.model = "models/demo", .backend = "cpu/ref", .ctx = 8193};
    assert_false(engine_open(&options, &engine, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_non_null(strstr(err.text, "8192"));
    options = (struct engine_options){.model = "models/nowhere"};
    assert_false(engine_open(&options, &engine, &err));
    assert_int_equal(err.kind, ERR_INPUT);
    options = (struct engine_options){.model = "models/demo", .backend = "abacus"};
    assert_false(engine_open(&options, &engine, &err));
    assert_int_equal(err.kind, ERR_USAGE);
}

static bool read_defaults(const char *json, struct defaults *out)
{
    char folder[] = "/tmp/calla-defaults-XXXXXX";
    assert_non_null(mkdtemp(folder));
    char *path = file_join(folder, "generation_config.json");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(json, f);
    fclose(f);
    struct config config = {.vocab = 100, .eos = {7}, .eos_count = 1};
    struct err err = {0};
    bool ok = defaults_read(folder, &config, out, &err);
    assert_int_equal(err.kind, ok ? ERR_NONE : ERR_INPUT);
    unlink(path);
    rmdir(folder);
    free(path);
    return ok;
}

static void defaults_come_from_the_folder(void **unused)
{
    (void)unused;
    struct defaults d;
    assert_true(read_defaults("{}", &d));
    assert_true(d.sampling.temperature == 0 && d.eos_count == 1);
    assert_true(read_defaults("{\"do_sample\": true, \"temperature\": 0.6, \"top_k\": 20, "
                              "\"top_p\": 0.95, \"eos_token_id\": [9, 7]}",
                              &d));
    assert_true(d.sampling.temperature == 0.6f && d.sampling.top_k == 20);
    assert_int_equal(d.eos_count, 2);
    assert_true(defaults_is_eos(&d, 7) && defaults_is_eos(&d, 9) && !defaults_is_eos(&d, 8));
    assert_true(
        read_defaults("{\"do_sample\": false, \"temperature\": 0.6, \"eos_token_id\": 3}", &d));
    assert_true(d.sampling.temperature == 0 && defaults_is_eos(&d, 3));
    assert_true(d.thinking);
    assert_true(read_defaults("{\"enable_thinking\": false}", &d) && !d.thinking);
    assert_true(read_defaults("{\"enable_thinking\": null}", &d) && d.thinking);
    assert_false(read_defaults("{\"enable_thinking\": 1}", &d));
    assert_false(read_defaults("{\"eos_token_id\": 100}", &d));
    assert_false(read_defaults("{\"eos_token_id\": [\"a\"]}", &d));
    assert_false(read_defaults("{\"top_k\": 1.5}", &d));
    assert_false(read_defaults("{\"temperature\": \"hot\"}", &d));
    assert_false(read_defaults("{\"do_sample\": true, \"temperature\": -1}", &d));
    assert_false(read_defaults("{", &d));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stops_hold_back_what_may_be_one),
        cmocka_unit_test(answers_end_before_a_stop_string),
        cmocka_unit_test(answers_end_at_eos_and_go_past_it_when_told),
        cmocka_unit_test(answers_end_with_the_context),
        cmocka_unit_test(same_seed_same_answer),
        cmocka_unit_test(logprobs_are_those_of_the_text),
        cmocka_unit_test(prefixes_are_reused_when_exact),
        cmocka_unit_test(requests_can_be_cancelled),
        cmocka_unit_test(damaged_numbers_end_the_request),
        cmocka_unit_test(wrong_requests_are_refused),
        cmocka_unit_test(what_cannot_open_says_why),
        cmocka_unit_test(defaults_come_from_the_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
