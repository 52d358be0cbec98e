/* The prefix cache: a request that begins where another ended answers as a cold one does, reads
 * only what is new, and leaves no page, entry or byte behind that is not accounted for. */
#include "serving.h"

#include "engine/step.h"
#include "model/snapshot.h"

#include <math.h>

/* Nothing is kept: every run is a cold one. */
static const struct scheduler_options without_cache = {.cache_bytes = 1};

static void extend(struct token_list *list, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        token_list_push(list, ids[i]);
}

static void add_noise(struct token_list *list, size_t n, uint64_t seed)
{
    struct token_list more = noise(n, seed);
    extend(list, more.ids, more.len);
    token_list_free(&more);
}

static struct token_list copy_of(const struct token_list *list, size_t n)
{
    struct token_list copy = {0};
    extend(&copy, list->ids, n);
    return copy;
}

/* ---- warm and cold ------------------------------------------------------------------------ */

/* Equal to the bit on cpu/ref. Elsewhere the first difference must be at a small margin, and
 * log-probabilities before it close. */
static void check_warm(const struct client *warm, const struct client *cold, bool exact)
{
    assert_int_equal(warm->err.kind, ERR_NONE);
    assert_int_equal(warm->ids.len, cold->ids.len);
    for (size_t i = 0; i < cold->ids.len; i++) {
        if (exact)
            assert_memory_equal(&warm->logprobs[i], &cold->logprobs[i], sizeof(float));
        if (warm->ids.ids[i] != cold->ids.ids[i]) {
            assert_true(!exact && cold->margins[i] < 0.02f);
            return;
        }
        assert_true(fabsf(warm->logprobs[i] - cold->logprobs[i]) < 0.05f);
    }
}

static void put_turn(struct token_list *history, struct rand *rand)
{
    add_noise(history, 1 + rand_below(rand, 60), rand_u64(rand));
}

/* One of: a further turn, an edit of an early message, a branch, the return to an older history,
 * the same again. */
static void change_history(struct token_list *now, struct token_list *old, struct rand *rand)
{
    size_t cut = rand_below(rand, now->len);
    switch (rand_below(rand, 6)) {
    case 0: /* edit */
        now->ids[cut] = (int32_t)rand_below(rand, 500);
        break;
    case 1: /* branch */
        now->len = cut + 1;
        put_turn(now, rand);
        break;
    case 2: /* return */
        token_list_free(now);
        *now = copy_of(old, old->len);
        break;
    case 3: /* the same again */
        break;
    default:
        put_turn(now, rand);
    }
    if (rand_below(rand, 4) == 0) {
        token_list_free(old);
        *old = copy_of(now, now->len);
    }
    if (now->len > 700)
        now->len = 1 + rand_below(rand, 100);
}

static void check_histories(const char *backend, uint64_t cache_bytes, int count, bool exact)
{
    struct engine *engine = serve_open(tiny_folder, backend, 1024, 64, 2);
    struct engine *fresh = serve_open(tiny_folder, backend, 1024, 64, 1);
    struct scheduler *warm =
        serve_schedule(engine, (struct scheduler_options){.cache_bytes = cache_bytes});
    struct scheduler *cold = serve_schedule(fresh, without_cache);
    struct rand rand = {17};
    struct token_list now = noise(30, 1), old = noise(50, 2);
    uint64_t cached = 0;
    for (int i = 0; i < count; i++) {
        struct engine_request request = client_request(&now, 1 + (uint32_t)rand_below(&rand, 6));
        request.logprobs = true;
        request.top_logprobs = 2;
        for (int k = 0; k < 2; k++)
            request.keep_at[k] = rand_below(&rand, 3) ? (uint32_t)rand_below(&rand, now.len) : 0;
        struct client a = serve_one(warm, request), b = serve_one(cold, request);
        check_warm(&a, &b, exact);
        assert_int_equal(b.result.cached_tokens, 0);
        cached += a.result.cached_tokens;
        if (rand_below(&rand, 2))
            extend(&now, a.ids.ids, a.ids.len);
        client_free(&a);
        client_free(&b);
        change_history(&now, &old, &rand);
        assert_true(serve_stats(warm).cache_bytes <= cache_bytes);
    }
    assert_true(cached > 0);
    token_list_free(&now);
    token_list_free(&old);
    scheduler_close(warm);
    scheduler_close(cold);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
    engine_close(fresh);
}

/* Pitfalls 4, 13, 61; with room for all, and with so little that most is evicted. */
static void warm_answers_are_cold_answers(void **unused)
{
    (void)unused;
    int count = rounds_of(300, 40);
    check_histories("cpu/ref", 1 << 28, count, true);
    check_histories("cpu/ref", 6 << 20, count, true);
    check_histories(NULL, 1 << 28, count, false);
}

/* Pitfalls 4, 13: states and pages after a restore and the rest are those of a cold run, byte by
 * byte, wherever the cut was. */
static void restored_states_are_equal(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 1024, 64, 2);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = noise(530, 4);
    struct state *state = &engine->state;
    static const uint32_t cuts[] = {1, 2, 3, 4, 63, 64, 65, 255, 256, 257, 511, 512, 513, 529};
    uint32_t slot[2];
    uint64_t bytes = snapshot_bytes(state, 530);
    uint8_t *a = mem_new(bytes, 1), *b = mem_new(bytes, 1);
    struct err err = {0};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        struct engine_request request = client_request(&prompt, 1);
        request.prompt_len = cuts[i] + 1;
        struct client c = serve_one(scheduler, request);
        client_free(&c);
        assert_int_equal(cache_find(scheduler->cache, prompt.ids, cuts[i]), cuts[i]);
        for (int warm = 0; warm < 2; warm++) {
            assert_true(state_acquire(state, &slot[warm], &err));
            if (warm)
                assert_int_equal(cache_restore(scheduler->cache, prompt.ids, cuts[i], slot[1]),
                                 cuts[i]);
            while (state->slot_pos[slot[warm]] < 530) {
                uint32_t pos = state->slot_pos[slot[warm]];
                struct segment segment = {
                    .slot = slot[warm], .rows = 530 - pos < 64 ? 530 - pos : 64, .pos = pos};
                struct batch batch = {.rows = segment.rows,
                                      .segments = 1,
                                      .tokens = prompt.ids + pos,
                                      .segment = &segment};
                assert_true(graph_forward(engine->graph, &batch, &err));
            }
            assert_true(snapshot_save(state, slot[warm], warm ? a : b, &err));
        }
        assert_memory_equal(a, b, bytes);
        state_release(state, slot[0]);
        state_release(state, slot[1]);
    }
    free(a);
    free(b);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* ---- what is reused ----------------------------------------------------------------------- */

/* Serves the history as a chat server does: kept at the end of the system prompt and before the
 * generation prompt (its last three tokens). Returns how many tokens were read. */
static uint32_t read_turn(struct scheduler *scheduler, const struct token_list *history,
                          uint32_t system, struct client *out)
{
    struct engine_request request = client_request(history, 5);
    request.keep_at[0] = system;
    request.keep_at[1] = (uint32_t)history->len - 3;
    *out = serve_one(scheduler, request);
    assert_int_equal(out->result.prompt_tokens, history->len);
    return out->result.prompt_tokens - out->result.cached_tokens;
}

static uint32_t read_only(struct scheduler *scheduler, const struct token_list *history,
                          uint32_t system)
{
    struct client c;
    uint32_t rows = read_turn(scheduler, history, system, &c);
    client_free(&c);
    return rows;
}

/* Pitfalls 1, 2, 5, 10, 14, 17: with the counts of tokens that are read again. */
static void what_begins_alike_is_not_read_again(void **unused)
{
    (void)unused;
    enum { SYSTEM = 300, USER = 40, OPEN = 3 };
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 2048, 256, 2);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list history = noise(SYSTEM, 1), first;
    struct client c;
    add_noise(&history, USER + OPEN, 2);
    assert_int_equal(read_turn(scheduler, &history, SYSTEM, &c), SYSTEM + USER + OPEN);
    /* the identical request, and regenerating: the generation prompt alone */
    assert_int_equal(read_only(scheduler, &history, SYSTEM), OPEN);
    first = copy_of(&history, history.len);
    /* thinking is preserved: the history goes on after the answer, whose last token was not fed */
    extend(&history, c.ids.ids, c.ids.len);
    client_free(&c);
    add_noise(&history, USER + OPEN, 3);
    assert_int_equal(read_only(scheduler, &history, SYSTEM), 1 + USER + OPEN);
    /* thinking vanishes from the history: it departs at the generation prompt */
    struct token_list stripped = copy_of(&first, first.len - OPEN);
    add_noise(&stripped, 20 + USER + OPEN, 4);
    assert_int_equal(read_only(scheduler, &stripped, SYSTEM), 20 + USER + OPEN);
    /* a tool loop whose thoughts all vanish when the next user message comes */
    struct token_list loop = copy_of(&first, first.len);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(read_turn(scheduler, &loop, SYSTEM, &c), i == 0 ? OPEN : 1 + USER + OPEN);
        extend(&loop, c.ids.ids, c.ids.len);
        client_free(&c);
        add_noise(&loop, USER + OPEN, 10 + (uint64_t)i);
    }
    struct token_list after = copy_of(&first, first.len - OPEN);
    add_noise(&after, 90 + USER + OPEN, 5);
    assert_int_equal(read_only(scheduler, &after, SYSTEM), 90 + USER + OPEN);
    /* an early message is edited, then the old history comes back */
    struct token_list edited = copy_of(&history, history.len);
    edited.ids[SYSTEM + 5] ^= 1;
    assert_int_equal(read_only(scheduler, &edited, SYSTEM), history.len - SYSTEM);
    assert_int_equal(read_only(scheduler, &history, SYSTEM), OPEN);
    /* five users behind one system prompt */
    for (uint64_t user = 0; user < 5; user++) {
        struct token_list other = copy_of(&first, SYSTEM);
        add_noise(&other, USER + OPEN, 60 + user);
        assert_int_equal(read_only(scheduler, &other, SYSTEM), USER + OPEN);
        token_list_free(&other);
    }
    token_list_free(&first);
    token_list_free(&history);
    token_list_free(&stripped);
    token_list_free(&loop);
    token_list_free(&after);
    token_list_free(&edited);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* What the device is given to read. */
static struct {
    void (*embed)(struct device *, const struct embed_args *);
    uint64_t rows;
} counted;

static void counted_embed(struct device *device, const struct embed_args *args)
{
    counted.rows += args->batch->rows;
    counted.embed(device, args);
}

/* As read_only; what is reported as read is what the device was given, beside the answer's rows. */
static uint32_t read_counted(struct scheduler *scheduler, const struct token_list *history)
{
    uint64_t before = counted.rows;
    uint32_t rows = read_only(scheduler, history, 0);
    assert_int_equal(counted.rows - before, rows + 4);
    return rows;
}

/* Pitfalls 8, 17: long prompts are kept every 4,096 tokens; stored is what was asked for. */
static void long_prompts_are_kept_on_the_way(void **unused)
{
    (void)unused;
    static const size_t sizes[] = {1000, 4000, 4096, 4097, 13000, 16000, 31000, 64000};
    size_t count = (size_t)rounds_of(8, 5);
    struct engine *engine = serve_open(tiny_folder, NULL, count == 8 ? 65536 : 16384, 512, 1);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct device_head *head = (struct device_head *)engine->device;
    counted.embed = head->ops.embed;
    head->ops.embed = counted_embed;
    for (size_t i = 0; i < count; i++) {
        struct token_list prompt = noise(sizes[i], 70 + i);
        struct scheduler_stats before = serve_stats(scheduler), stats;
        assert_int_equal(read_counted(scheduler, &prompt), sizes[i]);
        /* on the way, before the generation prompt, after the answer */
        stats = serve_stats(scheduler);
        assert_int_equal(stats.cache_entries - before.cache_entries, (sizes[i] - 1) / 4096 + 2);
        assert_int_equal(stats.stored - before.stored, (sizes[i] - 1) / 4096 + 2);
        size_t last = (sizes[i] - 1) / 4096 * 4096;
        assert_int_equal(read_counted(scheduler, &prompt),
                         sizes[i] - (last > sizes[i] - 3 ? last : sizes[i] - 3));
        /* the last line changes; what lies at most 4,096 before it is read again */
        prompt.ids[sizes[i] - 10] ^= 1;
        assert_int_equal(read_counted(scheduler, &prompt),
                         sizes[i] - (sizes[i] - 10) / 4096 * 4096);
        token_list_free(&prompt);
    }
    struct scheduler_stats stats = serve_stats(scheduler);
    assert_int_equal(serve_failed_stores(&stats), 0);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* Pitfall 8: what cannot be kept is counted, and the answer is right all the same. */
static void what_is_not_kept_is_counted(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 512, 64, 1);
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    struct token_list prompt = noise(40, 3);
    assert_int_equal(read_only(scheduler, &prompt, 0), 40);
    assert_int_equal(read_only(scheduler, &prompt, 0), 40);
    struct scheduler_stats stats = serve_stats(scheduler);
    assert_int_equal(stats.store_failed_size, 4);
    assert_int_equal(serve_failed_stores(&stats), 4);
    assert_int_equal(stats.cache_bytes + stats.cache_entries + stats.cache_hits, 0);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
}

/* ---- what is left behind ------------------------------------------------------------------ */

/* Pitfall 50: fifty streams that break off, some in the prompt, some in the answer. */
static void aborted_requests_leave_nothing(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 1024, 64, 4);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    struct token_list prompt = noise(300, 3), cold = noise(300, 8);
    assert_int_equal(read_only(scheduler, &prompt, 100), 300);
    struct scheduler_stats before = serve_stats(scheduler);
    uint64_t pages = engine->state.free_count;
    for (int i = 0; i < 50; i++) {
        struct client c = {.stop_after = i % 2 ? 1 + (uint32_t)i / 2 : 0};
        /* every other one is of a prompt that nobody has read, and ends in it */
        struct engine_request request = client_request(i % 2 ? &prompt : &cold, 60);
        c.stop_prefill = i % 2 ? 0 : 64 + (uint32_t)i * 4;
        client_submit(&c, scheduler, request);
        serve_all(scheduler);
        assert_int_equal(c.ends, 1);
        assert_int_equal(c.result.finish, FINISH_CANCELLED);
        client_free(&c);
    }
    struct scheduler_stats after = serve_stats(scheduler);
    assert_int_equal(after.cancelled - before.cancelled, 50);
    assert_int_equal(after.cache_entries, before.cache_entries + 1);
    assert_int_equal(after.running + after.queued, 0);
    /* the one entry: all of `prompt` but its last token, which the first request did not want */
    assert_true(pages - engine->state.free_count <= 1);
    token_list_free(&prompt);
    token_list_free(&cold);
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
}

/* The pool is small: what is kept gives way to running requests, whole contexts included. */
static void running_requests_come_before_the_cache(void **unused)
{
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 768, 256, 2);
    struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
    /* as if the machine had no page to spare */
    while (engine->state.free_count > 6)
        engine->state.free_count--;
    for (uint64_t i = 0; i < (long_form() ? 12 : 3); i++) {
        struct token_list a = noise(700, 2 * i), b = noise(650, 2 * i + 1);
        struct client c[2] = {0};
        client_submit(&c[0], scheduler, client_request(&a, 60));
        client_submit(&c[1], scheduler, client_request(&b, 110));
        serve_all(scheduler);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(c[k].err.kind, ERR_NONE);
            assert_int_equal(c[k].result.finish, FINISH_LENGTH);
            client_free(&c[k]);
        }
        token_list_free(&a);
        token_list_free(&b);
    }
    assert_true(serve_stats(scheduler).cache_evictions > 0);
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, 6);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_answers_are_cold_answers),
        cmocka_unit_test(restored_states_are_equal),
        cmocka_unit_test(what_begins_alike_is_not_read_again),
        cmocka_unit_test(long_prompts_are_kept_on_the_way),
        cmocka_unit_test(what_is_not_kept_is_counted),
        cmocka_unit_test(aborted_requests_leave_nothing),
        cmocka_unit_test(running_requests_come_before_the_cache),
    };
    int failed = cmocka_run_group_tests(tests, tiny_make, tiny_remove);
    serve_ahead = true;
    return failed + cmocka_run_group_tests_name("ahead", tests, tiny_make, tiny_remove);
}
