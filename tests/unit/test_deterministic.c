/* A deterministic engine: the same bits however a sequence is cut, whoever is beside it, and
 * whether its beginning was read or kept. For every CPU level of this machine. Single ops are held
 * to the same by `kcheck --deterministic`. */
#include "serving.h"

#include "backend/device.h"

enum { MANY = 8, IDS = 300 };

static const char *const folders[] = {"models/demo", "tests/data/fixtures/fixture-mlx",
                                      "tests/data/fixtures/fixture-hf"};

static struct engine *open_deterministic(const char *folder, const char *backend, uint32_t chunk,
                                         uint32_t parallel)
{
    struct engine *engine;
    struct err err = {0};
    struct engine_options options = {.model = folder,
                                     .backend = backend,
                                     .threads = 2,
                                     .ctx = 768,
                                     .chunk = chunk,
                                     .parallel = parallel,
                                     .deterministic = true};
    if (!engine_open(&options, &engine, &err))
        fail_msg("%s", err.text);
    return engine;
}

/* The i-th level of this machine that can be deterministic. */
static const char *level_of(int i)
{
    const char *name;
    for (int n = 0; (name = device_name(n)); n++)
        if (!strncmp(name, "cpu/", 4) && i-- == 0)
            return name;
    return NULL;
}

/* The short form takes the model with 4-bit weights, whose kernels have two methods, and leaves the
 * others and the slow reference to the long one. */
static bool left_out(const char *level, size_t folder)
{
    return !long_form() && (folder != 1 || !strcmp(level, "cpu/ref"));
}

/* ---- one sequence, cut in several ways ---------------------------------------------------- */

struct rows {
    float *logits; /* f32 [IDS, vocab] */
    size_t vocab, count;
};

static bool keep_row(void *user, size_t i, const float *logits)
{
    struct rows *rows = user;
    memcpy(rows->logits + i * rows->vocab, logits, rows->vocab * sizeof *logits);
    rows->count++;
    return true;
}

static struct rows score(struct engine *engine, const struct token_list *ids, uint32_t chunk)
{
    struct rows rows = {.vocab = engine_model(engine)->config.vocab};
    struct err err = {0};
    rows.logits = mem_new(ids->len * rows.vocab, sizeof *rows.logits);
    if (!engine_score(engine, ids->ids, ids->len, chunk, keep_row, &rows, &err))
        fail_msg("%s", err.text);
    assert_int_equal(rows.count, ids->len);
    return rows;
}

/* 300 positions: more than a page, so that the last rows attend to two. */
static void chunks_do_not_change_a_bit(void **unused)
{
    (void)unused;
    static const uint32_t chunks[] = {1, 2, 3, 4, 5, 7, 33, 97, 300};
    const char *level;
    for (int l = 0; (level = level_of(l)); l++)
        for (size_t f = 0; f < sizeof folders / sizeof *folders; f++) {
            if (left_out(level, f))
                continue;
            struct engine *engine = open_deterministic(folders[f], level, IDS, 1);
            struct token_list ids = noise(IDS, 11);
            struct rows want = score(engine, &ids, 64);
            size_t count = long_form() ? sizeof chunks / sizeof *chunks : 4;
            for (size_t c = 0; c < count; c++) {
                uint32_t chunk = chunks[long_form() ? c : (c * 3 + (size_t)l + f) % 9];
                struct rows got = score(engine, &ids, chunk);
                if (memcmp(got.logits, want.logits, IDS * want.vocab * sizeof(float)))
                    fail_msg("%s, %s: chunks of %u and of 64 differ", level, folders[f], chunk);
                free(got.logits);
            }
            free(want.logits);
            token_list_free(&ids);
            engine_close(engine);
        }
}

/* ---- many requests ------------------------------------------------------------------------ */

static void assert_same_bits(const struct client *a, const struct client *b)
{
    assert_same_answer(a, b);
    assert_memory_equal(a->logprobs, b->logprobs, a->ids.len * sizeof *a->logprobs);
    assert_memory_equal(a->margins, b->margins, a->ids.len * sizeof *a->margins);
}

static struct engine_request ask(const struct token_list *prompt)
{
    struct engine_request request = client_request(prompt, 12);
    request.logprobs = true;
    request.top_logprobs = 2;
    return request;
}

/* Alone and cold; eight alike at once, cold; again, from the cache; beside others. */
static void company_and_cache_do_not_change_a_bit(void **unused)
{
    (void)unused;
    const char *level;
    for (int l = 0; (level = level_of(l)); l++)
        for (size_t f = 0; f < sizeof folders / sizeof *folders; f++) {
            if (left_out(level, f))
                continue;
            struct token_list prompt = noise(270, 5), other = noise(90, 6);
            struct engine *engine = open_deterministic(folders[f], level, 50, MANY);
            struct scheduler *cold =
                serve_schedule(engine, (struct scheduler_options){.cache_bytes = 1});
            struct client alone = serve_one(cold, ask(&prompt)), c[MANY] = {0}, beside = {0};
            for (int i = 0; i < MANY; i++)
                client_submit(&c[i], cold, ask(&prompt));
            serve_all(cold);
            for (int i = 0; i < MANY; i++) {
                assert_same_bits(&c[i], &alone);
                client_free(&c[i]);
            }
            scheduler_close(cold);
            struct scheduler *warm = serve_schedule(engine, (struct scheduler_options){0});
            for (int round = 0; round < 2; round++) {
                client_submit(&beside, warm, ask(&other));
                for (int i = 0; i < MANY - 1; i++) {
                    client_submit(&c[i], warm, ask(&prompt));
                    for (int step = 0; step < round * i % 3; step++)
                        scheduler_step(warm);
                }
                serve_all(warm);
                for (int i = 0; i < MANY - 1; i++) {
                    assert_same_bits(&c[i], &alone);
                    assert_true(round == 0 || c[i].result.cached_tokens > 0);
                    client_free(&c[i]);
                }
                client_free(&beside);
            }
            client_free(&alone);
            token_list_free(&prompt);
            token_list_free(&other);
            scheduler_close(warm);
            engine_close(engine);
        }
}

/* Other backends promise nothing, and say so. */
static void a_backend_that_cannot_refuses(void **unused)
{
    (void)unused;
    const char *name;
    struct device *device;
    struct err err = {0};
    for (int i = 0; (name = device_name(i)); i++)
        if (strncmp(name, "cpu/", 4)) {
            assert_false(device_open(&(struct device_options){.name = name, .deterministic = true},
                                     &device, &err));
            assert_int_equal(err.kind, ERR_USAGE);
            assert_non_null(strstr(err.text, "deterministic"));
        }
    if (!device_open(&(struct device_options){.deterministic = true}, &device, &err))
        fail_msg("%s", err.text);
    assert_memory_equal(device_head(device)->name, "cpu/", 4);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_do_not_change_a_bit),
        cmocka_unit_test(company_and_cache_do_not_change_a_bit),
        cmocka_unit_test(a_backend_that_cannot_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
