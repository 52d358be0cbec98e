/* Clients of a scheduler, for tests that drive it step by step; and a model that is small enough
 * for thousands of requests. */
#ifndef TESTS_SERVING_H
#define TESTS_SERVING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/rand.h"
#include "engine/core.h"
#include "engine/scheduler.h"
#include "model/synth.h"

#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAYBE_UNUSED __attribute__((unused))

/* What came back to one request. */
struct client {
    uint64_t id;
    struct buf text;
    struct token_list ids;
    float *logprobs; /* [ids.len], when asked for */
    float *margins;  /* [ids.len]: between the two likeliest, when asked for */
    struct engine_result result;
    struct err err;
    int ends; /* calls of done */
    uint32_t prefilled, stop_prefill, stop_after;
    uint64_t last_ns, worst_gap_ns;
    uint64_t last_cpu_ns,
        worst_gap_cpu_ns; /* the same in time of the process: without other load */
    uint32_t last_step, worst_gap_steps;
    const uint32_t *step; /* counted by whoever steps, or null */
};

static MAYBE_UNUSED bool long_form(void)
{
    return getenv("CALLA_TEST_LONG") != NULL;
}

/* Processor time of this process's threads together. */
static MAYBE_UNUSED uint64_t clock_cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Rounds of a random test. A sanitizer takes ten times as long: a quarter of the short form. */
static MAYBE_UNUSED int rounds_of(int in_full, int in_short)
{
    if (long_form())
        return in_full;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return (in_short + 3) / 4;
#else
    return in_short;
#endif
}

/* Removes a folder of files. */
static MAYBE_UNUSED void folder_remove(const char *folder)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        unlink(path);
    }
    if (dir)
        closedir(dir);
    rmdir(folder);
}

static char tiny_folder[32];

/* Group set-up and tear-down: random weights, all kinds of layers. */
static MAYBE_UNUSED int tiny_make(void **unused)
{
    (void)unused;
    struct config config;
    struct err err = {0};
    const struct synth_options options = {.seed = 7, .bits = 4, .group = 32, .threads = 1};
    snprintf(tiny_folder, sizeof tiny_folder, "/tmp/calla-tiny-XXXXXX");
    if (!mkdtemp(tiny_folder))
        return 1;
    synth_preset(&config);
    config.layers = 4;
    config.delta_layers = 3;
    config.attention_layers = 1;
    config.hidden = 64;
    config.heads = 2;
    config.kv_heads = 1;
    config.key_heads = 1;
    config.value_heads = 2;
    config.experts = 4;
    config.topk = 2;
    config.width = 32;
    config.shared_width = 32;
    config.vocab = 512;
    config.max_ctx = 65536;
    bool ok = synth_write(&config, &options, tiny_folder, &err);
    config_close(&config);
    if (!ok)
        print_error("%s\n", err.text);
    return ok ? 0 : 1;
}

static MAYBE_UNUSED int tiny_remove(void **unused)
{
    (void)unused;
    folder_remove(tiny_folder);
    return 0;
}

/* Has engines work a step ahead, as on a device that goes on while the host does: what is fetched
 * is kept until it is collected, and the rest of a CPU's work is done by then. */
static bool serve_ahead;
static struct {
    uint8_t bytes[256];
    uint32_t len, count;
} fetched;

static MAYBE_UNUSED void serve_fetch(struct device *device, struct span from, uint32_t bytes)
{
    assert_int_equal(fetched.len, 0);
    assert_in_range(bytes, 1, sizeof fetched.bytes);
    device_calls(device)->read(device, fetched.bytes, from, bytes);
    fetched.len = bytes;
    fetched.count++;
}

static MAYBE_UNUSED bool serve_collect(struct device *device, void *to, struct err *err)
{
    assert_int_not_equal(fetched.len, 0);
    memcpy(to, fetched.bytes, fetched.len);
    fetched.len = 0;
    return device_calls(device)->sync(device, err);
}

static MAYBE_UNUSED void serve_set_ahead(struct engine *engine, bool ahead)
{
    struct device_calls *calls = &((struct device_head *)engine->device)->calls;
    calls->fetch = ahead ? serve_fetch : NULL;
    calls->collect = ahead ? serve_collect : NULL;
    fetched.count = 0;
}

static MAYBE_UNUSED struct engine *serve_open(const char *folder, const char *backend, uint32_t ctx,
                                              uint32_t chunk, uint32_t parallel)
{
    struct engine *engine;
    struct err err = {0};
    struct engine_options options = {.model = folder,
                                     .backend = backend,
                                     .threads = 1,
                                     .ctx = ctx,
                                     .chunk = chunk,
                                     .parallel = parallel};
    if (!engine_open(&options, &engine, &err))
        fail_msg("%s", err.text);
    serve_set_ahead(engine, serve_ahead);
    return engine;
}

static MAYBE_UNUSED struct scheduler *serve_schedule(struct engine *engine,
                                                     struct scheduler_options options)
{
    struct scheduler *scheduler;
    struct err err = {0};
    if (!scheduler_open(engine, &options, &scheduler, &err))
        fail_msg("%s", err.text);
    return scheduler;
}

static MAYBE_UNUSED void serve_encode(const struct engine *engine, const char *text,
                                      struct token_list *out)
{
    struct err err = {0};
    if (!tokenizer_encode(engine_tokenizer(engine), text, strlen(text), NULL, 0, out, &err))
        fail_msg("%s", err.text);
}

static MAYBE_UNUSED bool client_on_token(void *user, const struct engine_token *token)
{
    struct client *c = user;
    assert_int_equal(c->ends, 0);
    buf_append(&c->text, token->text, token->len);
    if (token->id < 0)
        return true;
    c->logprobs = mem_grow(c->logprobs, c->ids.len + 1, sizeof *c->logprobs);
    c->margins = mem_grow(c->margins, c->ids.len + 1, sizeof *c->margins);
    c->logprobs[c->ids.len] = token->logprob;
    c->margins[c->ids.len] =
        token->top_count >= 2 ? token->top[0].logprob - token->top[1].logprob : 1;
    token_list_push(&c->ids, token->id);
    uint64_t now = clock_now_ns();
    if (c->last_ns && now - c->last_ns > c->worst_gap_ns)
        c->worst_gap_ns = now - c->last_ns;
    c->last_ns = now;
    now = clock_cpu_ns();
    if (c->last_cpu_ns && now - c->last_cpu_ns > c->worst_gap_cpu_ns)
        c->worst_gap_cpu_ns = now - c->last_cpu_ns;
    c->last_cpu_ns = now;
    if (c->step) {
        if (c->ids.len > 1 && *c->step - c->last_step > c->worst_gap_steps)
            c->worst_gap_steps = *c->step - c->last_step;
        c->last_step = *c->step;
    }
    return c->ids.len != c->stop_after;
}

static MAYBE_UNUSED bool client_on_prefill(void *user, uint32_t done, uint32_t total)
{
    struct client *c = user;
    assert_true(done <= total);
    c->prefilled = done;
    return !c->stop_prefill || done < c->stop_prefill;
}

static MAYBE_UNUSED void client_done(void *user, const struct engine_result *result,
                                     const struct err *err)
{
    struct client *c = user;
    c->ends++;
    c->result = *result;
    c->result.ids = (struct token_list){0};
    c->err = *err;
    assert_int_equal(c->ids.len, result->ids.len);
}

static MAYBE_UNUSED void client_free(struct client *c)
{
    buf_free(&c->text);
    token_list_free(&c->ids);
    free(c->logprobs);
    free(c->margins);
    *c = (struct client){0};
}

/* `n` tokens of no meaning. */
static MAYBE_UNUSED struct token_list noise(size_t n, uint64_t seed)
{
    struct token_list list = {0};
    struct rand rand = {seed};
    for (size_t i = 0; i < n; i++)
        token_list_push(&list, (int32_t)rand_below(&rand, 500));
    return list;
}

/* Greedy, past the end of the answer, with the two likeliest. */
static MAYBE_UNUSED struct engine_request client_request(const struct token_list *prompt,
                                                         uint32_t max)
{
    return (struct engine_request){
        .prompt = prompt->ids,
        .prompt_len = prompt->len,
        .max_tokens = max,
        .ignore_eos = true,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
        .on_token = client_on_token,
        .on_prefill = client_on_prefill,
    };
}

static MAYBE_UNUSED bool client_try(struct client *c, struct scheduler *scheduler,
                                    struct engine_request request, struct err *err)
{
    request.user = c;
    return scheduler_submit(scheduler, &request, client_done, &c->id, err);
}

static MAYBE_UNUSED void client_submit(struct client *c, struct scheduler *scheduler,
                                       struct engine_request request)
{
    struct err err = {0};
    if (!client_try(c, scheduler, request, &err))
        fail_msg("%s", err.text);
}

static MAYBE_UNUSED uint32_t serve_all(struct scheduler *scheduler)
{
    uint32_t steps = 0;
    while (scheduler_step(scheduler))
        steps++;
    return steps;
}

/* One request to its end; the client is the caller's. */
static MAYBE_UNUSED struct client serve_one(struct scheduler *scheduler,
                                            struct engine_request request)
{
    struct client c = {0};
    client_submit(&c, scheduler, request);
    serve_all(scheduler);
    assert_int_equal(c.ends, 1);
    return c;
}

static MAYBE_UNUSED struct scheduler_stats serve_stats(struct scheduler *scheduler)
{
    struct scheduler_stats stats;
    scheduler_read_stats(scheduler, &stats);
    return stats;
}

static MAYBE_UNUSED uint64_t serve_failed_stores(const struct scheduler_stats *stats)
{
    return stats->store_failed_size + stats->store_failed_memory + stats->store_failed_disk;
}

static MAYBE_UNUSED void assert_same_answer(const struct client *a, const struct client *b)
{
    assert_int_equal(a->err.kind, ERR_NONE);
    assert_int_equal(b->err.kind, ERR_NONE);
    assert_int_equal(a->ids.len, b->ids.len);
    assert_memory_equal(a->ids.ids, b->ids.ids, a->ids.len * sizeof(int32_t));
    assert_string_equal(a->text.data ? a->text.data : "", b->text.data ? b->text.data : "");
}

#endif
