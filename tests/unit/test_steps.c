/* What a device may record: steps of one key are the same ops with the same arguments, but for what
 * lies in device memory, whatever the positions and slots, and whether they were queued ahead. */
#include "serving.h"

#include "engine/step.h"

enum { KEYS = 64 };

static struct {
    struct ops ops; /* the device's own */
    bool open;      /* a step is being encoded */
    uint64_t key, hash;
    struct {
        uint64_t key, hash;
        uint32_t seen;
    } step[KEYS];
    uint32_t steps;
} recorded;

static void mix(const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++)
        recorded.hash = (recorded.hash ^ p[i]) * 0x100000001b3u;
}

#define MIX(field) mix(&(field), sizeof(field))

/* Of the host's segments only what the shape of a batch is. */
static void mix_batch(const struct batch_view *batch)
{
    MIX(batch->rows);
    MIX(batch->segments);
    MIX(batch->device_segments);
    MIX(batch->tokens);
    MIX(batch->page_table);
    MIX(batch->pages_max);
    for (uint32_t i = 0; i < batch->segments; i++) {
        MIX(batch->host_segments[i].row);
        MIX(batch->host_segments[i].rows);
    }
}

static void mix_attention_dims(const struct attention_dims *dims)
{
    MIX(dims->heads);
    MIX(dims->kv_heads);
    MIX(dims->rope_theta);
    MIX(dims->eps);
    MIX(dims->kv_kind);
    MIX(dims->pages);
}

static void mix_moe_dims(const struct moe_dims *dims)
{
    MIX(dims->hidden);
    MIX(dims->experts);
    MIX(dims->topk);
    MIX(dims->width);
    MIX(dims->shared_width);
    MIX(dims->renormalise);
    MIX(dims->eps);
}

static void record_embed(struct device *device, const struct embed_args *args)
{
    mix("embed", 5);
    mix_batch(args->batch);
    MIX(args->table);
    MIX(args->x);
    recorded.ops.embed(device, args);
}

static void record_linear(struct device *device, const struct linear_args *args)
{
    mix("linear", 6);
    MIX(args->rows);
    MIX(args->x);
    MIX(args->select);
    MIX(args->gain);
    MIX(args->eps);
    MIX(args->add);
    for (uint32_t i = 0; i < args->n; i++) {
        MIX(args->weight[i]);
        MIX(args->out[i]);
    }
    recorded.ops.linear(device, args);
}

static void record_delta(struct device *device, const struct delta_args *args)
{
    const struct span *spans = &args->qkv;
    mix("delta", 5);
    mix_batch(args->batch);
    MIX(args->dims.key_heads);
    MIX(args->dims.value_heads);
    MIX(args->dims.eps);
    mix(spans, (size_t)((const char *)(args + 1) - (const char *)spans)); /* spans to the end */
    recorded.ops.delta(device, args);
}

static void record_kv_append(struct device *device, const struct kv_append_args *args)
{
    const struct span *spans = &args->qg;
    mix("kv_append", 9);
    mix_batch(args->batch);
    mix_attention_dims(&args->dims);
    mix(spans, (size_t)((const char *)(args + 1) - (const char *)spans));
    recorded.ops.kv_append(device, args);
}

static void record_attention(struct device *device, const struct attention_args *args)
{
    const struct span *spans = &args->q;
    mix("attention", 9);
    mix_batch(args->batch);
    mix_attention_dims(&args->dims);
    mix(spans, (size_t)((const char *)(args + 1) - (const char *)spans));
    recorded.ops.attention(device, args);
}

static void record_moe_route(struct device *device, const struct moe_route_args *args)
{
    mix("moe_route", 9);
    MIX(args->rows);
    mix_moe_dims(&args->dims);
    MIX(args->x);
    MIX(args->gain);
    MIX(args->router);
    MIX(args->shared_router);
    MIX(args->h);
    MIX(args->ids);
    MIX(args->weights);
    MIX(args->shared_gate);
    recorded.ops.moe_route(device, args);
}

static void record_moe_experts(struct device *device, const struct moe_experts_args *args)
{
    const struct span *from = &args->h;
    mix("moe_experts", 11);
    MIX(args->rows);
    mix_moe_dims(&args->dims);
    mix(from, (size_t)((const char *)(args + 1) - (const char *)from)); /* spans and pointers */
    recorded.ops.moe_experts(device, args);
}

static bool record_begin(struct device *device, uint64_t key)
{
    (void)device;
    assert_false(recorded.open);
    recorded.open = true;
    recorded.key = key;
    recorded.hash = 0xcbf29ce484222325u;
    return false;
}

static void record_end(struct device *device)
{
    (void)device;
    assert_true(recorded.open);
    recorded.open = false;
    uint32_t i = 0;
    while (i < recorded.steps && recorded.step[i].key != recorded.key)
        i++;
    assert_in_range(i, 0, KEYS - 1);
    recorded.steps += i == recorded.steps;
    if (recorded.step[i].seen++ == 0) {
        recorded.step[i].key = recorded.key;
        recorded.step[i].hash = recorded.hash;
    }
    assert_true(recorded.step[i].hash == recorded.hash);
}

static void record_on(struct device *device)
{
    struct device_head *head = (struct device_head *)device;
    memset(&recorded, 0, sizeof recorded);
    recorded.ops = head->ops;
    head->ops.embed = record_embed;
    head->ops.linear = record_linear;
    head->ops.delta = record_delta;
    head->ops.kv_append = record_kv_append;
    head->ops.attention = record_attention;
    head->ops.moe_route = record_moe_route;
    head->ops.moe_experts = record_moe_experts;
    head->calls.step_begin = record_begin;
    head->calls.step_end = record_end;
}

/* Some at a time, of all lengths, one step a time and ahead, in whatever slots are free. */
static void steps_of_a_key_are_alike(void **unused)
{
    enum { CLIENTS = 3 };
    (void)unused;
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 1024, 64, CLIENTS);
    record_on(engine->device);
    struct rand rand = {23};
    for (int round = 0; round < 24; round++) {
        struct scheduler *scheduler = serve_schedule(engine, (struct scheduler_options){0});
        struct client c[CLIENTS] = {0};
        struct token_list prompt[CLIENTS];
        serve_set_ahead(engine, round % 3 != 0);
        for (int i = 0; i <= round % CLIENTS; i++) {
            uint32_t length = 1 + (uint32_t)rand_below(&rand, round % 4 ? 40 : 600);
            prompt[i] = noise(length, (uint64_t)(round * CLIENTS + i));
            client_submit(&c[i], scheduler, client_request(&prompt[i], 4 + (uint32_t)i * 9));
        }
        serve_all(scheduler);
        for (int i = 0; i <= round % CLIENTS; i++) {
            client_free(&c[i]);
            token_list_free(&prompt[i]);
        }
        scheduler_close(scheduler);
    }
    uint32_t often = 0;
    for (uint32_t i = 0; i < recorded.steps; i++)
        often += recorded.step[i].seen > 2;
    print_message("%u keys, %u of them more than twice\n", recorded.steps, often);
    assert_true(often >= 3 * CLIENTS); /* rows, and where their tokens lie */
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_a_key_are_alike),
    };
    return cmocka_run_group_tests(tests, tiny_make, tiny_remove);
}
