/* A device that gets the next step before the host has this one's tokens: the answers, and what is
 * kept of them, are those of one step at a time. On cpu/ref equal means equal to the bit. */
#include "serving.h"

#include "engine/step.h"

static const struct scheduler_options without_cache = {.cache_bytes = 1};

static struct client answer(struct engine *engine, bool ahead, struct engine_request request)
{
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    serve_set_ahead(engine, ahead);
    struct client c = serve_one(scheduler, request);
    scheduler_close(scheduler);
    return c;
}

/* All steps of an answer but the first, and those that need a new page, are queued early. */
static void steps_are_queued_early(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 1024, 64, 2);
    for (uint32_t n = 1; n <= 600; n = n < 4 ? n + 1 : n * 12) {
        struct token_list prompt = noise(33, n);
        struct client slow = answer(engine, false, client_request(&prompt, n));
        assert_int_equal(fetched.count, 0);
        struct client fast = answer(engine, true, client_request(&prompt, n));
        uint32_t early = n < 3 ? 0 : n - 2;
        assert_in_range(fetched.count + n / 256 + 1, early, early + n / 256 + 1);
        assert_same_answer(&fast, &slow);
        client_free(&slow);
        client_free(&fast);
        token_list_free(&prompt);
    }
    engine_close(engine);
}

/* The end of the context ends an answer there, too. */
static void contexts_end_at_the_same_place(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 64, 1);
    for (uint32_t n = 500; n <= 512; n += 3) {
        struct token_list prompt = noise(n, 3);
        struct client slow = answer(engine, false, client_request(&prompt, 0));
        struct client fast = answer(engine, true, client_request(&prompt, 0));
        assert_int_equal(fast.ids.len, 512 - n + 1);
        assert_same_answer(&fast, &slow);
        client_free(&slow);
        client_free(&fast);
        token_list_free(&prompt);
    }
    engine_close(engine);
}

/* The host may choose another token than the argmax that was taken for granted. */
static void other_choices_are_read_again(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 64, 1);
    struct token_list prompt = noise(40, 3);
    struct engine_request request = client_request(&prompt, 60);
    request.sampling.vocab = 300; /* of 512: the argmax often lies outside */
    struct client slow = answer(engine, false, request);
    struct client fast = answer(engine, true, request);
    assert_true(fetched.count > 0);
    assert_same_answer(&fast, &slow);
    client_free(&slow);
    client_free(&fast);
    token_list_free(&prompt);
    engine_close(engine);
}

/* A conversation: answers that end by themselves, and turns that go on behind them from what the
 * step ahead has left in the cache. */
static void later_turns_go_on(void **unused)
{
    (void)unused;
    static const char *const question[] = {"What is the capital of France?", "And of Spain?",
                                           "Tell me a story about a fox."};
    struct engine *engine = serve_open("models/demo", "cpu/ref", 1024, 64, 2);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = {0};
    for (int turn = 0; turn < 3; turn++) {
        char text[256];
        snprintf(text, sizeof text,
                 "%s<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                 turn ? "<|im_end|>\n" : "", question[turn]);
        size_t before = prompt.len;
        serve_encode(engine, text, &prompt);
        struct engine_request request = client_request(&prompt, 80);
        request.ignore_eos = false;
        struct client cold = answer(engine, false, request);
        serve_set_ahead(engine, true);
        struct client warm = serve_one(scheduler, request);
        assert_same_answer(&warm, &cold);
        assert_int_equal(warm.result.finish, cold.result.finish);
        assert_true(warm.result.cached_tokens >= before);
        for (size_t i = 0; i < warm.ids.len; i++)
            token_list_push(&prompt, warm.ids.ids[i]);
        client_free(&cold);
        client_free(&warm);
    }
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* A turn behind an answer that a stop string ended finds as much of it in the cache as where steps
 * wait for each other: all of it, when the string was one token. */
static void turns_behind_stop_strings_go_on(void **unused)
{
    (void)unused;
    static const char *const stops[] = {".", " old", "\n", " the old harbor", "quite elsewhere"};
    static const char begin[] = "<|im_start|>user\nTell me a story about the sea.<|im_end|>\n"
                                "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    struct engine *engine = serve_open("models/demo", "cpu/ref", 1024, 64, 2);
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        uint32_t cached[2];
        for (int ahead = 0; ahead < 2; ahead++) {
            struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
            struct token_list prompt = {0}, next = {0}, one = {0};
            serve_encode(engine, begin, &prompt);
            serve_encode(engine, stops[i], &one);
            struct engine_request request = client_request(&prompt, 40);
            request.stop = &stops[i];
            request.stop_count = 1;
            serve_set_ahead(engine, ahead);
            struct client first = serve_one(scheduler, request);
            assert_true(fetched.count == 0 || (ahead && one.len > 1));
            struct buf text = {0};
            buf_printf(&text, "%s%.*s", begin, (int)first.text.len, first.text.data);
            serve_encode(engine, text.data, &next);
            uint32_t answer = (uint32_t)(next.len - prompt.len);
            serve_encode(engine, "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n", &next);
            struct client second = serve_one(scheduler, client_request(&next, 1));
            cached[ahead] = second.result.cached_tokens;
            if (one.len == 1 && first.result.finish == FINISH_STOP)
                assert_int_equal(cached[ahead], prompt.len + answer);
            client_free(&first);
            client_free(&second);
            buf_free(&text);
            token_list_free(&prompt);
            token_list_free(&next);
            token_list_free(&one);
            scheduler_close(scheduler);
        }
        assert_int_equal(cached[0], cached[1]);
    }
    engine_close(engine);
}

/* Random comings and goings: greedy and sampled requests, ends of all kinds, some give up. */
static void crowds_answer_as_alone(void **unused)
{
    enum { KINDS = 12 };
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 32, 3);
    struct token_list prompt[KINDS];
    struct engine_request request[KINDS];
    struct client alone[KINDS];
    struct rand rand = {11};
    for (int i = 0; i < KINDS; i++) {
        prompt[i] = noise(1 + rand_below(&rand, 90), (uint64_t)i);
        request[i] = client_request(&prompt[i], 1 + (uint32_t)rand_below(&rand, 40));
        request[i].sampling.temperature = i % 4 == 3 ? 1 : 0;
        request[i].sampling.seed = (uint64_t)i;
        request[i].logprobs = i % 6 == 5;
        alone[i] = answer(engine, false, request[i]);
    }
    for (int round = 0; round < rounds_of(400, 40); round++) {
        struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
        struct client c[8] = {0};
        int kind[8];
        serve_set_ahead(engine, true);
        for (int i = 0; i < 8; i++) {
            kind[i] = (int)rand_below(&rand, KINDS);
            c[i].stop_after = rand_below(&rand, 4) ? 0 : 1 + (uint32_t)rand_below(&rand, 20);
            client_submit(&c[i], scheduler, request[kind[i]]);
            for (uint64_t n = rand_below(&rand, 25); n; n--)
                scheduler_step(scheduler);
            if (!rand_below(&rand, 6))
                scheduler_cancel(scheduler, c[i].id);
        }
        serve_all(scheduler);
        for (int i = 0; i < 8; i++) {
            const struct client *a = &alone[kind[i]];
            assert_int_equal(c[i].ends, 1);
            assert_true(c[i].ids.len <= a->ids.len);
            assert_memory_equal(c[i].ids.ids, a->ids.ids, c[i].ids.len * sizeof(int32_t));
            if (c[i].result.finish != FINISH_CANCELLED)
                assert_int_equal(c[i].ids.len, a->ids.len);
            client_free(&c[i]);
        }
        scheduler_close(scheduler);
        assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    }
    for (int i = 0; i < KINDS; i++) {
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    engine_close(engine);
}

/* ---- faults ------------------------------------------------------------------------------- */

/* A device whose batch number `at` goes wrong, and that says so to who waits for it: at the next
 * collect when the batch came before the fetch, else at the next sync. */
static struct {
    void (*embed)(struct device *, const struct embed_args *);
    void (*read)(struct device *, void *, struct span, uint64_t);
    bool (*sync)(struct device *, struct err *);
    int batch, at;
    bool broken, fetched_broken, reads_fail;
} fault;

static void fault_embed(struct device *device, const struct embed_args *args)
{
    fault.embed(device, args);
    if (++fault.batch != fault.at)
        return;
    fault.broken = true;
    float *x = (float *)args->x.base + args->x.offset / sizeof(float);
    for (size_t i = 0; i < (size_t)args->batch->rows * args->table->cols; i++)
        x[i] = i % 3 ? -3 : 7; /* wrong, and still a number */
}

static bool fault_sync(struct device *device, struct err *err)
{
    bool broken = fault.broken;
    fault.broken = false;
    return broken ? err_set(err, ERR_INTERNAL, "the GPU stopped a command")
                  : fault.sync(device, err);
}

static void fault_fetch(struct device *device, struct span from, uint32_t bytes)
{
    fault.read(device, fetched.bytes, from, bytes);
    fetched.len = bytes;
    fetched.count++;
    fault.fetched_broken = fault.broken;
}

static bool fault_collect(struct device *device, void *to, struct err *err)
{
    memcpy(to, fetched.bytes, fetched.len);
    fetched.len = 0;
    return !fault.fetched_broken || fault_sync(device, err);
}

static void fault_read(struct device *device, void *to, struct span from, uint64_t bytes)
{
    fault.read(device, to, from, bytes);
    fault.broken |= fault.reads_fail && bytes > 1000;
}

static void fault_arm(struct engine *engine, bool ahead)
{
    struct device_head *head = (struct device_head *)engine->device;
    if (head->ops.embed != fault_embed) {
        fault.embed = head->ops.embed;
        fault.read = head->calls.read;
        fault.sync = head->calls.sync;
    }
    head->ops.embed = fault_embed;
    head->calls.read = fault_read;
    head->calls.sync = fault_sync;
    head->calls.fetch = ahead ? fault_fetch : NULL;
    head->calls.collect = ahead ? fault_collect : NULL;
}

/* Two answers, of which the first ends by itself and is kept while the other's next step is under
 * way; whichever batch goes wrong, once, nobody sees anything of it. */
static void faults_reach_the_step_they_belong_to(void **unused)
{
    (void)unused;
    static const char *const question[] = {"What is the capital of France?",
                                           "Tell me a story about a fox."};
    struct engine *engine = serve_open("models/demo", "cpu/ref", 512, 64, 2);
    struct token_list prompt[2] = {0};
    struct engine_request request[2];
    struct client alone[2];
    char folder[] = "/tmp/calla-ahead-XXXXXX";
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++) {
        char text[200];
        snprintf(text, sizeof text,
                 "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                 question[i]);
        serve_encode(engine, text, &prompt[i]);
        request[i] = client_request(&prompt[i], 24);
        request[i].ignore_eos = false;
        alone[i] = answer(engine, false, request[i]);
    }
    assert_true(alone[0].ids.len + 4 < alone[1].ids.len);
    /* the short form: about where the first one ends */
    int first = long_form() ? 1 : (int)alone[0].ids.len, last = long_form() ? 24 : first + 6;
    for (int at = first; at < last; at++) {
        struct scheduler *scheduler =
            serve_schedule(engine, (struct scheduler_options){.cache_dir = at % 2 ? folder : NULL});
        struct client c[2] = {0};
        fault_arm(engine, true);
        fault.batch = 0;
        fault.at = at;
        for (int i = 0; i < 2; i++)
            client_submit(&c[i], scheduler, request[i]);
        serve_all(scheduler);
        for (int i = 0; i < 2; i++) {
            assert_same_answer(&c[i], &alone[i]);
            client_free(&c[i]);
        }
        fault.at = 0;
        for (int i = 0; i < 2; i++) { /* what is kept is right, too */
            c[i] = serve_one(scheduler, request[i]);
            assert_same_answer(&c[i], &alone[i]);
            client_free(&c[i]);
        }
        scheduler_close(scheduler);
    }
    for (int i = 0; i < 2; i++) {
        client_free(&alone[i]);
        token_list_free(&prompt[i]);
    }
    folder_remove(folder);
    engine_close(engine);
}

/* Batches run and their logits cannot be read, ever: the request ends. */
static void reads_that_fail_end_the_request(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 256, 64, 1);
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    struct token_list prompt = noise(20, 3);
    struct engine_request request = client_request(&prompt, 5);
    request.sampling.temperature = 1;
    fault_arm(engine, false);
    fault.reads_fail = true;
    struct client c = {0};
    client_submit(&c, scheduler, request);
    for (int i = 0; i < 8; i++)
        scheduler_step(scheduler);
    assert_int_equal(c.ends, 1);
    assert_int_equal(c.err.kind, ERR_INTERNAL);
    fault.reads_fail = false;
    client_free(&c);
    c = serve_one(scheduler, request);
    assert_int_equal(c.ids.len, 5);
    client_free(&c);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_queued_early),
        cmocka_unit_test(contexts_end_at_the_same_place),
        cmocka_unit_test(other_choices_are_read_again),
        cmocka_unit_test(later_turns_go_on),
        cmocka_unit_test(turns_behind_stop_strings_go_on),
        cmocka_unit_test(crowds_answer_as_alone),
        cmocka_unit_test(faults_reach_the_step_they_belong_to),
        cmocka_unit_test(reads_that_fail_end_the_request),
    };
    return cmocka_run_group_tests(tests, tiny_make, tiny_remove);
}
