/* Many requests on one engine: each answers as if it were alone, whoever comes, goes or fails
 * beside it. On cpu/ref, whose rows do not depend on each other, equal means equal to the bit. */
#include "serving.h"

#include "engine/step.h"

#include <math.h>
#include <pthread.h>
#include <unistd.h>

enum { CLIENTS = 8 };

/* Nothing is kept: every run is a cold one. */
static const struct scheduler_options without_cache = {.cache_bytes = 1};

static const char *const codewords[CLIENTS] = {"apple", "river",  "stone", "candle",
                                               "tiger", "window", "cloud", "pepper"};

static void ask_for(const struct engine *engine, int who, struct token_list *out)
{
    char text[256];
    snprintf(text, sizeof text,
             "<|im_start|>user\nThe code word is %s. What is the code word?<|im_end|>\n"
             "<|im_start|>assistant\n<think>\n\n</think>\n\n",
             codewords[who]);
    serve_encode(engine, text, out);
}

/* What each of them answers alone, a step at a time. */
static void answer_alone(struct engine *engine, const struct engine_request *request, int n,
                         struct client *out)
{
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    serve_set_ahead(engine, false);
    for (int i = 0; i < n; i++)
        out[i] = serve_one(scheduler, request[i]);
    serve_set_ahead(engine, serve_ahead);
    scheduler_close(scheduler);
}

/* Pitfalls 98, 100, 103, 104: eight at once, that end at different times, in slots used before. */
static void requests_together_answer_as_alone(void **unused)
{
    (void)unused;
    static const uint32_t lengths[CLIENTS] = {1, 2, 3, 5, 12, 16, 20, 30};
    struct engine *engine = serve_open("models/demo", "cpu/ref", 512, 64, CLIENTS);
    struct token_list prompt[CLIENTS] = {0};
    struct engine_request request[CLIENTS];
    struct client alone[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        ask_for(engine, i, &prompt[i]);
        request[i] = client_request(&prompt[i], lengths[i]);
    }
    answer_alone(engine, request, CLIENTS, alone);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    int rounds = long_form() ? 200 : 3;
    for (int round = 0; round < rounds; round++) {
        struct client c[CLIENTS] = {0};
        for (int i = 0; i < CLIENTS; i++) {
            int who = (i + round) % CLIENTS;
            client_submit(&c[who], scheduler, request[who]);
            if (round % 2)
                scheduler_step(scheduler);
        }
        serve_all(scheduler);
        for (int i = 0; i < CLIENTS; i++) {
            assert_same_answer(&c[i], &alone[i]);
            for (int j = 0; j < CLIENTS; j++)
                if (j != i && c[i].text.data && !strstr(alone[i].text.data, codewords[j]))
                    assert_null(strstr(c[i].text.data, codewords[j]));
            client_free(&c[i]);
        }
    }
    struct scheduler_stats stats = serve_stats(scheduler);
    assert_int_equal(stats.requests, rounds * CLIENTS);
    assert_int_equal(stats.running + stats.queued + stats.failed + stats.cancelled, 0);
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    for (int i = 0; i < CLIENTS; i++) {
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    engine_close(engine);
}

/* Pitfall 101: the same behind a system prompt that all share, and that is read once. */
static void a_shared_prefix_is_read_once(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 2048, 128, CLIENTS);
    struct token_list prompt[CLIENTS] = {0}, system = noise(long_form() ? 1500 : 600, 3);
    struct engine_request request[CLIENTS];
    struct client alone[CLIENTS], c[CLIENTS] = {0};
    for (int i = 0; i < CLIENTS; i++) {
        for (size_t j = 0; j < system.len; j++)
            token_list_push(&prompt[i], system.ids[j]);
        for (int j = 0; j < 20; j++)
            token_list_push(&prompt[i], 100 + (i * 37 + j * 11) % 300);
        request[i] = client_request(&prompt[i], 8);
        request[i].keep_at[0] = (uint32_t)system.len;
    }
    answer_alone(engine, request, CLIENTS, alone);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    for (int i = 0; i < CLIENTS; i++)
        client_submit(&c[i], scheduler, request[i]);
    serve_all(scheduler);
    uint64_t cached = 0;
    for (int i = 0; i < CLIENTS; i++)
        cached += c[i].result.cached_tokens;
    assert_int_equal(cached, (CLIENTS - 1) * system.len);
    for (int i = 0; i < CLIENTS; i++) {
        assert_same_answer(&c[i], &alone[i]);
        client_free(&c[i]);
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    token_list_free(&system);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* Pitfalls 61, 62: first, after ten others, beside three others: the same to the last bit. */
static void answers_do_not_depend_on_history(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 32, 4);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = {0}, other[13];
    prompt = noise(25, 1);
    struct engine_request request = client_request(&prompt, 24);
    request.logprobs = true;
    request.top_logprobs = 2;
    struct client first = serve_one(scheduler, request), c[4] = {0};
    for (int i = 0; i < 13; i++)
        other[i] = noise(20 + 9 * (size_t)i, 100 + (uint64_t)i);
    for (int i = 0; i < 10; i++) {
        struct client passing = serve_one(scheduler, client_request(&other[i], 3));
        client_free(&passing);
    }
    struct client again = serve_one(scheduler, request);
    assert_same_answer(&first, &again);
    assert_memory_equal(first.logprobs, again.logprobs, first.ids.len * sizeof(float));
    for (int i = 1; i < 4; i++)
        client_submit(&c[i], scheduler, client_request(&other[9 + i], 30));
    for (int i = 0; i < 4; i++)
        scheduler_step(scheduler);
    client_submit(&c[0], scheduler, request);
    serve_all(scheduler);
    assert_same_answer(&first, &c[0]);
    assert_memory_equal(first.logprobs, c[0].logprobs, first.ids.len * sizeof(float));
    for (int i = 0; i < 4; i++)
        client_free(&c[i]);
    for (int i = 0; i < 13; i++)
        token_list_free(&other[i]);
    client_free(&again);
    client_free(&first);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* ---- coming and going --------------------------------------------------------------------- */

static void a_full_queue_refuses(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 256, 64, 2);
    struct scheduler *scheduler =
        serve_schedule(engine, (struct scheduler_options){.queue = 3, .cache_bytes = 1});
    struct token_list prompt = {0};
    struct client c[8] = {0};
    struct err err = {0};
    prompt = noise(25, 1);
    for (int i = 0; i < 8; i++) {
        bool taken = client_try(&c[i], scheduler, client_request(&prompt, 4), &err);
        assert_int_equal(taken, i < 5);
    }
    assert_int_equal(err.kind, ERR_RESOURCE);
    assert_int_equal(serve_stats(scheduler).queued, 5);
    scheduler_step(scheduler);
    assert_int_equal(serve_stats(scheduler).running, 2);
    assert_int_equal(serve_stats(scheduler).queued, 3);
    assert_false(client_try(&c[5], scheduler, client_request(&prompt, 4), &err));
    serve_all(scheduler);
    assert_true(client_try(&c[5], scheduler, client_request(&prompt, 4), &err));
    serve_all(scheduler);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(c[i].ends, i < 6);
        client_free(&c[i]);
    }
    assert_int_equal(serve_stats(scheduler).refused, 4);
    /* What is wrong is refused before it is queued, and named. */
    struct engine_request bad = client_request(&prompt, 4);
    bad.sampling.temperature = NAN;
    assert_false(client_try(&c[0], scheduler, bad, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_non_null(strstr(err.text, "temperature"));
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* Pitfalls 46, 47: queued, while its prompt is read, while it answers; nobody else notices. */
static void requests_are_cancelled_in_every_phase(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 32, 2);
    struct token_list prompt = {0}, big = noise(400, 9);
    prompt = noise(25, 1);
    struct engine_request request = client_request(&prompt, 60);
    struct client alone;
    answer_alone(engine, &request, 1, &alone);
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    struct client a = {0}, reading = {0}, queued = {0}, after = {0}, answering = {0};
    client_submit(&a, scheduler, request);
    client_submit(&reading, scheduler, client_request(&big, 4));
    client_submit(&queued, scheduler, request);
    client_submit(&after, scheduler, request);
    scheduler_step(scheduler);
    scheduler_step(scheduler);
    assert_in_range(reading.prefilled, 1, 399);
    scheduler_cancel(scheduler, queued.id);
    scheduler_cancel(scheduler, 12345);
    scheduler_step(scheduler);
    assert_int_equal(queued.ends, 1);
    assert_int_equal(queued.result.finish, FINISH_CANCELLED);
    scheduler_cancel(scheduler, reading.id);
    uint32_t before = reading.prefilled;
    scheduler_step(scheduler);
    assert_int_equal(reading.ends, 1);
    assert_int_equal(reading.prefilled, before);
    assert_int_equal(reading.result.finish, FINISH_CANCELLED);
    scheduler_step(scheduler);
    assert_int_equal(serve_stats(scheduler).running, 2);
    assert_true(after.ids.len > 0 || after.prefilled > 0);
    client_submit(&answering, scheduler, request);
    while (after.ends == 0 && after.ids.len < 5)
        scheduler_step(scheduler);
    scheduler_cancel(scheduler, after.id);
    scheduler_step(scheduler);
    assert_int_equal(after.ends, 1);
    assert_int_equal(after.result.finish, FINISH_CANCELLED);
    assert_in_range(after.ids.len, 1, 59);
    serve_all(scheduler);
    assert_same_answer(&a, &alone);
    assert_same_answer(&answering, &alone);
    assert_int_equal(serve_stats(scheduler).cancelled, 3);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    /* closing cancels what is left, once each */
    struct client left[4] = {0};
    for (int i = 0; i < 4; i++)
        client_submit(&left[i], scheduler, request);
    scheduler_step(scheduler);
    scheduler_close(scheduler);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(left[i].ends, 1);
        client_free(&left[i]);
    }
    client_free(&a);
    client_free(&reading);
    client_free(&queued);
    client_free(&after);
    client_free(&answering);
    client_free(&alone);
    token_list_free(&big);
    token_list_free(&prompt);
    engine_close(engine);
}

/* A stream gets a token every step while a long prompt is read beside it, and a short prompt does
 * not wait for the long one's end. */
static void streams_go_on_while_prompts_are_read(void **unused)
{
    (void)unused;
    uint32_t n = long_form() ? 8000 : 1500, step = 0;
    struct engine *engine = serve_open("models/demo", NULL, 8192, 512, 3);
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    struct token_list prompt = {0}, big = noise(n, 5);
    struct client stream = {.step = &step}, reader = {0}, late = {0};
    ask_for(engine, 0, &prompt);
    client_submit(&stream, scheduler, client_request(&prompt, 4000));
    while (stream.ids.len < 3 && scheduler_step(scheduler))
        step++;
    client_submit(&reader, scheduler, client_request(&big, 1));
    scheduler_step(scheduler);
    step++;
    client_submit(&late, scheduler, client_request(&prompt, 2));
    uint32_t rows = 0, most = 0;
    while (!reader.ends) {
        rows = reader.prefilled;
        assert_true(scheduler_step(scheduler));
        step++;
        if (reader.prefilled - rows > most)
            most = reader.prefilled - rows;
        if (late.ends && !reader.ends)
            late.stop_after = 1; /* marks that it came first */
    }
    assert_int_equal(late.stop_after, 1);
    assert_true(most <= 512);
    assert_int_equal(stream.worst_gap_steps, 1);
    print_message(
        "worst gap %.0f ms, %.0f ms of them computing; at most %u prompt rows a step, %s\n",
        (double)stream.worst_gap_ns * 1e-6, (double)stream.worst_gap_cpu_ns * 1e-6, most,
        engine_backend(engine));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* The engine has this thread alone, and does nothing but compute: what else the machine does is
     * not counted. */
    assert_true(stream.worst_gap_cpu_ns <= 250000000);
#endif
    scheduler_cancel(scheduler, stream.id);
    serve_all(scheduler);
    client_free(&stream);
    client_free(&reader);
    client_free(&late);
    token_list_free(&big);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* ---- faults ------------------------------------------------------------------------------- */

/* Pitfalls 86, 106: a number that is not one ends its request, and leaves nothing behind. */
static void a_nan_ends_one_request(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 64, 4);
    struct token_list prompt[4] = {0};
    struct engine_request request[4];
    struct client alone[4], c[4] = {0};
    for (int i = 0; i < 4; i++) {
        prompt[i] = noise(20 + 3 * (size_t)i, 50 + (uint64_t)i);
        request[i] = client_request(&prompt[i], 30);
    }
    answer_alone(engine, request, 4, alone);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    for (int i = 0; i < 4; i++)
        client_submit(&c[i], scheduler, request[i]);
    while (c[2].ids.len < 4)
        scheduler_step(scheduler);
    const float nan = NAN;
    const struct device_calls *calls = device_calls(engine->device);
    uint64_t bytes = 4ull * engine->model.config.value_heads * 128 * 128;
    calls->write(engine->device,
                 span_at(state_delta(&engine->state, 1), scheduler->running[2]->slot * bytes), &nan,
                 4);
    scheduler_step(scheduler);
    if (serve_ahead) /* the step before this one was queued already */
        scheduler_step(scheduler);
    assert_int_equal(c[2].ends, 1);
    assert_int_equal(c[2].err.kind, ERR_INTERNAL);
    serve_all(scheduler);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            assert_same_answer(&c[i], &alone[i]);
    assert_int_equal(serve_stats(scheduler).failed, 1);
    assert_int_equal(serve_stats(scheduler).faults_in_a_row, 0);
    client_free(&c[2]);
    c[2] = serve_one(scheduler, request[2]);
    assert_int_equal(c[2].result.cached_tokens, 0);
    assert_same_answer(&c[2], &alone[2]);
    for (int i = 0; i < 4; i++) {
        client_free(&c[i]);
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
}

/* A device that fails when told: from `after` batches on, `times` times, those with `slot` in them
 * (or any), of more than `rows` rows, and that reach beyond `pos`. */
static struct {
    void (*embed)(struct device *, const struct embed_args *);
    bool (*sync)(struct device *, struct err *);
    int after, times, slot;
    uint32_t rows, pos;
    bool broken;
} faulty;

static void faulty_embed(struct device *device, const struct embed_args *args)
{
    bool hit = false;
    for (uint32_t i = 0; i < args->batch->segments; i++) {
        const struct segment *segment = &args->batch->host_segments[i];
        hit |= (faulty.slot < 0 || (int)segment->slot == faulty.slot) &&
               segment->pos + segment->rows > faulty.pos;
    }
    if (hit && args->batch->rows > faulty.rows && --faulty.after < 0 && faulty.times-- > 0)
        faulty.broken = true;
    faulty.embed(device, args);
}

static bool faulty_sync(struct device *device, struct err *err)
{
    if (!faulty.broken)
        return faulty.sync(device, err);
    faulty.broken = false;
    return err_set(err, ERR_RESOURCE, "out of device memory");
}

static void faulty_take(struct engine *engine)
{
    struct device_head *head = (struct device_head *)engine->device;
    faulty.embed = head->ops.embed;
    faulty.sync = head->calls.sync;
    head->ops.embed = faulty_embed;
    head->calls.sync = faulty_sync;
    faulty.slot = -1;
    faulty.after = 0;
    faulty.times = 1 << 20;
}

/* Pitfalls 88, 109: an error of a batch, which names no request: once, and it passes unseen;
 * always with one request in it, and that request alone ends. The next one is served. */
static void device_errors_end_the_request_that_causes_them(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 16, 4);
    struct token_list prompt[4] = {0};
    struct engine_request request[4];
    struct client alone[4];
    for (int i = 0; i < 4; i++) {
        prompt[i] = noise(20 + 3 * (size_t)i, 50 + (uint64_t)i);
        request[i] = client_request(&prompt[i], 12);
    }
    answer_alone(engine, request, 4, alone);
    faulty_take(engine);
    for (int round = 0; round < 24; round++) {
        bool passing = round % 2 == 0;
        struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
        struct client c[4] = {0};
        faulty.after = round;
        faulty.times = passing ? 1 : 1 << 20;
        faulty.slot = passing ? -1 : 1;
        for (int i = 0; i < 4; i++)
            client_submit(&c[i], scheduler, request[i]);
        serve_all(scheduler);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(c[i].ends, 1);
            if (passing || i != 1 || c[i].err.kind == ERR_NONE)
                assert_same_answer(&c[i], &alone[i]);
            else
                assert_non_null(strstr(c[i].err.text, "out of device memory"));
        }
        if (!passing && round < 8)
            assert_int_equal(c[1].err.kind, ERR_RESOURCE);
        faulty.times = 0;
        struct client next = serve_one(scheduler, request[1]);
        assert_same_answer(&next, &alone[1]);
        client_free(&next);
        for (int i = 0; i < 4; i++)
            client_free(&c[i]);
        scheduler_close(scheduler);
        assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    }
    /* Nothing works any more: every request ends, and the count says that it sticks. */
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    faulty.after = 0;
    faulty.times = 1 << 20;
    faulty.slot = -1;
    struct client c[4] = {0};
    for (int i = 0; i < 4; i++)
        client_submit(&c[i], scheduler, request[i]);
    serve_all(scheduler);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(c[i].err.kind, ERR_RESOURCE);
        client_free(&c[i]);
    }
    assert_true(serve_stats(scheduler).faults_in_a_row >= 4);
    scheduler_close(scheduler);
    for (int i = 0; i < 4; i++) {
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    engine_close(engine);
}

/* Pitfall 109: too little memory for a chunk is enough for a smaller one. */
static void a_retry_reads_less_at_a_time(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 32, 4);
    struct token_list prompt[4] = {0};
    struct engine_request request[4];
    struct client alone[4], c[4] = {0};
    for (int i = 0; i < 4; i++) {
        prompt[i] = noise(150 + 30 * (size_t)i, 60 + (uint64_t)i);
        request[i] = client_request(&prompt[i], 12);
    }
    answer_alone(engine, request, 4, alone);
    faulty_take(engine);
    faulty.rows = 8;
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    client_submit(&c[0], scheduler, request[0]);
    assert_true(serve_all(scheduler) < 100);
    for (int i = 1; i < 4; i++)
        client_submit(&c[i], scheduler, request[i]);
    assert_true(serve_all(scheduler) < 400);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(c[i].ends, 1);
        assert_same_answer(&c[i], &alone[i]);
    }
    assert_int_equal(serve_stats(scheduler).failed, 0);
    assert_int_equal(serve_stats(scheduler).faults_in_a_row, 0);
    faulty.rows = 0; /* no chunk is small enough */
    client_free(&c[0]);
    c[0] = serve_one(scheduler, request[0]);
    assert_int_equal(c[0].err.kind, ERR_RESOURCE);
    faulty.times = 0;
    client_free(&c[0]);
    c[0] = serve_one(scheduler, request[0]);
    assert_same_answer(&c[0], &alone[0]);
    for (int i = 0; i < 4; i++) {
        client_free(&c[i]);
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
}

/* Pitfalls 88, 109: what fails at a place that is reached only after batches that are good ends its
 * request too, in a prompt and in an answer; those that stay before it are answered. */
static void an_error_at_a_position_ends_its_request(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 16, 4);
    struct token_list prompt[4] = {0};
    struct engine_request request[4];
    struct client alone[4];
    for (int i = 0; i < 4; i++) {
        prompt[i] = noise(i == 1 ? 150 : 20 + 3 * (size_t)i, 50 + (uint64_t)i);
        request[i] = client_request(&prompt[i], 40);
    }
    answer_alone(engine, request, 4, alone);
    faulty_take(engine);
    faulty.rows = 0;
    for (uint32_t pos = 70; pos <= 170; pos += 100) { /* in the prompt; in the answer */
        struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
        struct client c[4] = {0};
        faulty.pos = pos;
        for (int i = 0; i < 4; i++)
            client_submit(&c[i], scheduler, request[i]);
        uint32_t steps = 0;
        while (steps < 1000 && scheduler_step(scheduler))
            steps++;
        assert_true(steps < 1000);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(c[i].ends, 1);
            if (i != 1)
                assert_same_answer(&c[i], &alone[i]);
            client_free(&c[i]);
        }
        assert_int_equal(serve_stats(scheduler).failed, 1);
        scheduler_close(scheduler);
        assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    }
    faulty.pos = 0;
    for (int i = 0; i < 4; i++) {
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    engine_close(engine);
}

/* ---- thinking ----------------------------------------------------------------------------- */

/* Pitfall 70b: after the budget "</think>" comes, and then an answer. */
static void a_thinking_budget_ends_the_thought(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open("models/demo", "cpu/ref", 512, 64, 1);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = {0};
    int32_t end = tokenizer_find(engine_tokenizer(engine), "</think>");
    serve_encode(engine,
                 "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
                 "<|im_start|>assistant\n<think>\n",
                 &prompt);
    for (uint32_t budget = 1; budget < 6; budget++) {
        struct engine_request request = client_request(&prompt, 12);
        request.thinking_open = true;
        request.think_tokens = budget;
        request.logprobs = budget % 2;
        struct client c = serve_one(scheduler, request);
        uint32_t at = 0;
        while (at < c.ids.len && c.ids.ids[at] != end)
            at++;
        assert_true(at <= budget && c.ids.len == 12);
        client_free(&c);
    }
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* Pitfalls 67, 68: the schema binds the answer, not the thought, whose budget still holds. */
static void a_grammar_begins_after_the_thought(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open("models/demo", "cpu/ref", 512, 64, 2);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = {0};
    struct grammar *grammar;
    struct err err = {0};
    json_t *schema =
        json_pack("{s:s, s:{s:{s:s}}, s:[s], s:b}", "type", "object", "properties", "capital",
                  "type", "boolean", "required", "capital", "additionalProperties", 0);
    if (!grammar_from_schema(schema, &grammar, &err))
        fail_msg("%s", err.text);
    json_decref(schema);
    serve_encode(engine,
                 "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
                 "<|im_start|>assistant\n<think>\n",
                 &prompt);
    for (int i = 0; i < 4; i++) {
        struct engine_request request = client_request(&prompt, 60);
        request.thinking_open = i > 0;
        request.think_tokens = i == 1 ? 3 : 8;
        request.grammar = grammar;
        request.sampling.temperature = i == 3 ? 1 : 0;
        struct client beside = {0};
        client_submit(&beside, scheduler, client_request(&prompt, 10));
        struct client c = serve_one(scheduler, request);
        assert_int_equal(c.err.kind, ERR_NONE);
        assert_int_equal(c.result.finish, FINISH_STOP);
        const char *json = strstr(c.text.data, "</think>");
        assert_int_equal(json != NULL, i > 0);
        json = json ? json + strlen("</think>") : c.text.data;
        json_error_t where;
        json_t *value = json_loads(json, 0, &where);
        if (!value || !json_is_boolean(json_object_get(value, "capital")))
            fail_msg("not what was asked for: %s", c.text.data);
        json_decref(value);
        client_free(&c);
        client_free(&beside);
    }
    grammar_free(grammar);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* ---- threads ------------------------------------------------------------------------------ */

struct caller {
    pthread_t thread;
    struct scheduler *scheduler;
    const struct token_list *prompt;
    const struct client *alone;
    uint64_t seed;
    int rounds;
    bool wrong;
};

struct waiting {
    struct client client;
    atomic_int ends;
};

static void waiting_done(void *user, const struct engine_result *result, const struct err *err)
{
    struct waiting *w = user;
    client_done(&w->client, result, err);
    atomic_store(&w->ends, 1);
}

static void *caller_main(void *arg)
{
    struct caller *caller = arg;
    struct rand rand = {caller->seed};
    for (int i = 0; i < caller->rounds; i++) {
        struct waiting w = {0};
        struct engine_request request = client_request(caller->prompt, 12);
        request.user = &w;
        uint64_t id;
        if (!scheduler_submit(caller->scheduler, &request, waiting_done, &id, NULL)) {
            caller->wrong = true;
            break;
        }
        scheduler_wake(caller->scheduler);
        bool cancel = rand_below(&rand, 3) == 0;
        if (cancel) {
            usleep((useconds_t)rand_below(&rand, 20000));
            scheduler_cancel(caller->scheduler, id);
        }
        while (!atomic_load(&w.ends))
            usleep(200);
        struct scheduler_stats stats;
        scheduler_read_stats(caller->scheduler, &stats);
        bool whole = w.client.result.finish != FINISH_CANCELLED;
        caller->wrong |= !whole && !cancel;
        caller->wrong |= whole && (w.client.ids.len != caller->alone->ids.len ||
                                   memcmp(w.client.ids.ids, caller->alone->ids.ids,
                                          w.client.ids.len * sizeof(int32_t)) != 0);
        client_free(&w.client);
    }
    return NULL;
}

/* Callers of their own threads, of whom some give up; for the thread sanitizer too. */
static void callers_in_threads_get_their_own_answers(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 256, 32, 3);
    struct token_list prompt[6] = {0};
    struct client alone[6];
    struct caller caller[6];
    struct engine_request request[6];
    struct err err = {0};
    for (int i = 0; i < 6; i++) {
        prompt[i] = noise(20 + 3 * (size_t)i, 50 + (uint64_t)i);
        request[i] = client_request(&prompt[i], 12);
    }
    answer_alone(engine, request, 6, alone);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    assert_true(scheduler_start(scheduler, &err));
    for (int i = 0; i < 6; i++) {
        caller[i] = (struct caller){.scheduler = scheduler,
                                    .prompt = &prompt[i],
                                    .alone = &alone[i],
                                    .seed = (uint64_t)i,
                                    .rounds = long_form() ? 200 : 8};
        assert_int_equal(pthread_create(&caller[i].thread, NULL, caller_main, &caller[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(caller[i].thread, NULL);
        assert_false(caller[i].wrong);
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_together_answer_as_alone),
        cmocka_unit_test(a_shared_prefix_is_read_once),
        cmocka_unit_test(answers_do_not_depend_on_history),
        cmocka_unit_test(a_full_queue_refuses),
        cmocka_unit_test(requests_are_cancelled_in_every_phase),
        cmocka_unit_test(streams_go_on_while_prompts_are_read),
        cmocka_unit_test(a_nan_ends_one_request),
        cmocka_unit_test(device_errors_end_the_request_that_causes_them),
        cmocka_unit_test(a_retry_reads_less_at_a_time),
        cmocka_unit_test(an_error_at_a_position_ends_its_request),
        cmocka_unit_test(a_thinking_budget_ends_the_thought),
        cmocka_unit_test(a_grammar_begins_after_the_thought),
        cmocka_unit_test(callers_in_threads_get_their_own_answers),
    };
    const struct CMUnitTest ahead[] = {
        cmocka_unit_test(requests_together_answer_as_alone),
        cmocka_unit_test(a_shared_prefix_is_read_once),
        cmocka_unit_test(answers_do_not_depend_on_history),
        cmocka_unit_test(requests_are_cancelled_in_every_phase),
        cmocka_unit_test(a_nan_ends_one_request),
        cmocka_unit_test(device_errors_end_the_request_that_causes_them),
        cmocka_unit_test(a_retry_reads_less_at_a_time),
        cmocka_unit_test(an_error_at_a_position_ends_its_request),
        cmocka_unit_test(a_thinking_budget_ends_the_thought),
        cmocka_unit_test(a_grammar_begins_after_the_thought),
        cmocka_unit_test(callers_in_threads_get_their_own_answers),
    };
    int failed = cmocka_run_group_tests(tests, tiny_make, tiny_remove);
    serve_ahead = true;
    return failed + cmocka_run_group_tests(ahead, tiny_make, tiny_remove);
}
