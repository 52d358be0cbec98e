/* Loading checkpoints: both layouts, every way a folder can be wrong, and independence of how the
 * tensors are spread over shards. */
#include "backend/device.h"
#include "base/bf16.h"
#include "base/rand.h"
#include "model/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <sys/resource.h>

#include "folder.h"

#define HF "tests/data/fixtures/fixture-hf"
#define MLX "tests/data/fixtures/fixture-mlx"
#define DEMO "models/demo"

static struct device *open_device(void)
{
    struct device *device;
    struct err err;
    if (!device_open(&(struct device_options){.name = "cpu/ref"}, &device, &err))
        fail_msg("%s", err.text);
    return device;
}

static void open_model(const char *folder, struct device *device, struct model *model)
{
    struct err err;
    if (!model_open(folder, device, NULL, model, &err))
        fail_msg("%s", err.text);
}

static float vector_at(const struct model *model, struct span span, uint32_t i)
{
    float f;
    device_calls(model->device)->read(model->device, &f, span_at(span, 4ull * i), 4);
    return f;
}

/* The same random model in both layouts: gains agree once the Hugging Face ones got their 1, which
 * the converter rounded to bf16; the gated norm's are the same as they stand. */
static void test_layouts(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct model hf, mlx;
    open_model(HF, device, &hf);
    open_model(MLX, device, &mlx);
    assert_int_equal(hf.config.layers, 5);
    assert_false(hf.config.quantised);
    assert_true(mlx.config.quantised);
    for (uint32_t i = 0; i < hf.config.hidden; i++) {
        float want = bf16_round(vector_at(&hf, hf.layers[0].input_norm, i));
        assert_true(vector_at(&mlx, mlx.layers[0].input_norm, i) == want);
        want = bf16_round(vector_at(&hf, hf.final_norm, i));
        assert_true(vector_at(&mlx, mlx.final_norm, i) == want);
    }
    for (uint32_t i = 0; i < 128; i++)
        assert_true(vector_at(&hf, hf.layers[0].delta.norm, i) ==
                    vector_at(&mlx, mlx.layers[0].delta.norm, i));
    for (uint32_t i = 0; i < 1280 * 4; i++)
        assert_true(vector_at(&hf, hf.layers[0].delta.conv, i) ==
                    vector_at(&mlx, mlx.layers[0].delta.conv, i));
    const struct model_layer *h = &hf.layers[1], *m = &mlx.layers[1];
    assert_int_equal(h->gate.kind, WEIGHT_BF16);
    assert_int_equal(h->gate.expert_stride, 2 * h->gate.rows);
    assert_ptr_equal((uint8_t *)h->gate.data.base + 2 * 64 * 192, h->up.data.base);
    assert_int_equal(m->gate.kind, WEIGHT_AFFINE);
    assert_int_equal(m->gate.expert_stride, m->gate.rows);
    assert_int_equal(m->gate.bits, 4);
    assert_int_equal(m->router.bits, 8);
    assert_int_equal(m->router.group, 64);
    assert_int_equal(hf.bytes.parameters, mlx.bytes.parameters);
    assert_int_equal(hf.bytes.total, 9797228);
    model_close(&hf);
    model_close(&mlx);
    device_close(device);
}

static void test_demo(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct model model;
    open_model(DEMO, device, &model);
    assert_int_equal(model.config.attention_layers, 2);
    assert_int_equal(model.bytes.total, 13899296 - 8 - 45576);
    model_close(&model);
    device_close(device);
    open_model(DEMO, NULL, &model);
    assert_int_equal(model.bytes.total, 13899296 - 8 - 45576);
    model_close(&model);
}

/* ---- the same whatever the files look like --------------------------------------------------- */

static void same_bytes(struct span a, struct span b, uint64_t bytes)
{
    assert_int_equal(!a.base, !b.base);
    if (bytes && memcmp((uint8_t *)a.base + a.offset, (uint8_t *)b.base + b.offset, bytes) != 0)
        fail_msg("weights differ");
}

static void same_weight(const struct weight *a, const struct weight *b)
{
    uint64_t n = (uint64_t)a->rows * a->cols;
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->bits, b->bits);
    assert_int_equal(a->group, b->group);
    assert_int_equal(a->expert_stride, b->expert_stride);
    if (a->kind != WEIGHT_AFFINE) {
        same_bytes(a->data, b->data, n * (a->kind == WEIGHT_F32 ? 4 : 2));
        return;
    }
    same_bytes(a->data, b->data, a->count * n * a->bits / 8);
    same_bytes(a->scales, b->scales, a->count * n / a->group * 2);
    same_bytes(a->biases, b->biases, a->count * n / a->group * 2);
}

static void same_models(const struct model *a, const struct model *b)
{
    assert_memory_equal(&a->bytes, &b->bytes, sizeof a->bytes);
    same_weight(&a->embed, &b->embed);
    same_weight(&a->head, &b->head);
    same_bytes(a->final_norm, b->final_norm, 4 * a->config.hidden);
    for (uint32_t i = 0; i < a->config.layers; i++) {
        const struct model_layer *x = &a->layers[i], *y = &b->layers[i];
        same_bytes(x->input_norm, y->input_norm, 4 * a->config.hidden);
        same_bytes(x->post_norm, y->post_norm, 4 * a->config.hidden);
        same_weight(&x->router, &y->router);
        same_weight(&x->shared_router, &y->shared_router);
        same_weight(&x->gate, &y->gate);
        same_weight(&x->up, &y->up);
        same_weight(&x->down, &y->down);
        same_weight(&x->shared_up, &y->shared_up);
        if (x->full_attention) {
            same_weight(&x->attention.q, &y->attention.q);
            same_weight(&x->attention.o, &y->attention.o);
            same_bytes(x->attention.k_norm, y->attention.k_norm, 4 * 256);
        } else {
            same_weight(&x->delta.qkv, &y->delta.qkv);
            same_weight(&x->delta.a, &y->delta.a);
            same_bytes(x->delta.a_log, y->delta.a_log, 4 * a->config.value_heads);
            same_bytes(x->delta.conv, y->delta.conv, 4 * 4 * 1280);
        }
    }
}

/* Pitfall 92: tensors spread over shards at random, parts of a module in different ones; and data
 * sections that begin anywhere, as MLX writes them. */
static void test_shuffled_shards(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct rand r = {.state = 92};
    for (int n = 0; n < 12; n++) {
        const char *from = n % 3 == 2 ? HF : MLX;
        struct model whole, parts;
        static struct folder f;
        folder_open(&f, from);
        for (uint32_t i = 0; i < f.count; i++) {
            uint32_t j = (uint32_t)rand_below(&r, f.count);
            struct folder_tensor t = f.tensors[i];
            f.tensors[i] = f.tensors[j];
            f.tensors[j] = t;
        }
        /* Now and then one file without an index. */
        uint32_t shards = n % 4 ? 1 + (uint32_t)rand_below(&r, 5) : 0;
        for (uint32_t i = 0; i < f.count && shards; i++)
            f.tensors[i].shard = i < shards ? i : (uint32_t)rand_below(&r, shards);
        folder_write(&f, shards, (uint32_t)n);
        struct model_options options = {.huge_pages = n % 2};
        struct err err;
        open_model(from, device, &whole);
        if (!model_open(f.path, device, &options, &parts, &err))
            fail_msg("%s", err.text);
        same_models(&whole, &parts);
        assert_int_equal((uintptr_t)parts.layers[0].down.data.base % 2, 0);
        model_close(&whole);
        model_close(&parts);
        folder_close(&f);
    }
    device_close(device);
}

/* Names with every prefix that checkpoints use, and parts that text does not need. */
static void test_spellings(void **state)
{
    (void)state;
    static const char *const prefixes[] = {"language_model.model.", "model.language_model.",
                                           "model."};
    static const char *const skipped[] = {"vision_tower.blocks.0.w",
                                          "model.visual.w",
                                          "mtp.fc.weight",
                                          "language_model.mtp.fc.weight",
                                          "language_model.vision_tower.w",
                                          "language_model.model.visual.w"};
    struct device *device = open_device();
    struct model plain;
    open_model(MLX, device, &plain);
    for (int n = 0; n < 3; n++) {
        static struct folder f;
        struct model model;
        folder_open(&f, MLX);
        for (uint32_t i = 0; i < f.count; i++) {
            char name[160];
            const char *path = config_cut_prefix(f.tensors[i].name);
            bool head = !strncmp(path, "lm_head", 7);
            snprintf(name, sizeof name, "%s%s", head ? "" : prefixes[n], path);
            memcpy(f.tensors[i].name, name, sizeof name);
        }
        for (int i = 0; i < 6; i++) {
            struct folder_tensor *t = &f.tensors[f.count++];
            *t = (struct folder_tensor){.dtype = "F16",
                                        .rank = 1,
                                        .shape = {4},
                                        .bytes = 8,
                                        .data = (const uint8_t *)"12345678"};
            snprintf(t->name, sizeof t->name, "%s", skipped[i]);
        }
        if (n == 2) { /* a text-only export: no text_config either */
            json_t *text = json_incref(json_object_get(f.config, "text_config"));
            json_object_set(text, "quantization", json_object_get(f.config, "quantization"));
            json_object_set(text, "eos_token_id", json_object_get(f.config, "eos_token_id"));
            json_decref(f.config);
            f.config = text;
        }
        folder_write(&f, 0, 0);
        open_model(f.path, device, &model);
        same_models(&plain, &model);
        model_close(&model);
        folder_close(&f);
    }
    model_close(&plain);
    device_close(device);
}

static void test_tied_head(void **state)
{
    (void)state;
    struct device *device = open_device();
    for (int keep = 0; keep < 2; keep++) {
        static struct folder f;
        struct model model;
        folder_open(&f, HF);
        json_object_set_new(json_object_get(f.config, "text_config"), "tie_word_embeddings",
                            json_true());
        if (!keep)
            *folder_find(&f, "lm_head.weight") = f.tensors[--f.count];
        folder_write(&f, 0, 0);
        open_model(f.path, device, &model);
        same_weight(&model.embed, &model.head);
        assert_int_equal(model.bytes.head, 0);
        assert_int_equal(model.bytes.total, 9797228 - 512 * 192 * 2);
        model_close(&model);
        folder_close(&f);
    }
    device_close(device);
}

/* ---- other bits ------------------------------------------------------------------------------ */

/* Gives a module other bits: random codes of the right size, and an override when `named`. */
static void set_bits(struct folder *f, const char *module, uint64_t cols, uint32_t bits, bool named)
{
    static const uint8_t zeros[1 << 20];
    char name[160];
    snprintf(name, sizeof name, "language_model.%s.weight", module);
    struct folder_tensor *t = folder_find(f, name);
    t->shape[t->rank - 1] = cols * bits / 32;
    t->bytes = 4;
    for (uint32_t i = 0; i < t->rank; i++)
        t->bytes *= t->shape[i];
    assert_true(t->bytes <= sizeof zeros);
    t->data = zeros;
    snprintf(name, sizeof name, "language_model.%s", module);
    if (named)
        json_object_set_new(json_object_get(f->config, "quantization"), name,
                            json_pack("{s:i, s:i}", "bits", (int)bits, "group_size", 64));
}

/* Pitfall 95: the embedding and the head at 6 bits over a body at 4; and a mixture. */
static void test_mixed_bits(void **state)
{
    (void)state;
    struct device *device = open_device();
    static struct folder f;
    struct model model;
    folder_open(&f, MLX);
    set_bits(&f, "model.embed_tokens", 192, 6, true);
    set_bits(&f, "lm_head", 192, 6, true);
    set_bits(&f, "model.layers.2.mlp.switch_mlp.down_proj", 64, 3, true);
    set_bits(&f, "model.layers.1.self_attn.v_proj", 192, 5, true);
    set_bits(&f, "model.layers.4.mlp.gate", 192, 2, true);
    folder_write(&f, 0, 0);
    open_model(f.path, device, &model);
    assert_int_equal(model.embed.bits, 6);
    assert_int_equal(model.head.bits, 6);
    assert_int_equal(model.layers[0].gate.bits, 4);
    assert_int_equal(model.layers[0].router.bits, 8);
    assert_int_equal(model.layers[2].down.bits, 3);
    assert_int_equal(model.layers[1].attention.v.bits, 5);
    assert_int_equal(model.layers[4].router.bits, 2);
    model_close(&model);
    folder_close(&f);
    device_close(device);
}

/* `false`: a bf16 module inside a quantised file. */
static void test_unquantised_module(void **state)
{
    (void)state;
    static struct folder f;
    static struct safetensors hf;
    struct model model;
    struct err err;
    folder_open(&f, MLX);
    assert_true(safetensors_open(HF "/model.safetensors", &hf, &err));
    for (int named = 0; named < 2; named++) {
        struct folder_tensor *t =
            folder_find(&f, "language_model.model.layers.1.self_attn.k_proj.weight");
        for (uint32_t i = 0; i < hf.count; i++)
            if (strstr(hf.tensors[i].name, "layers.1.self_attn.k_proj.weight"))
                t->data = hf.tensors[i].data;
        t->shape[1] = 192;
        t->bytes = 512 * 192 * 2;
        memcpy(t->dtype, "BF16", 5);
        if (!named) {
            *folder_find(&f, "language_model.model.layers.1.self_attn.k_proj.scales") =
                f.tensors[--f.count];
            *folder_find(&f, "language_model.model.layers.1.self_attn.k_proj.biases") =
                f.tensors[--f.count];
        } else {
            json_object_set_new(json_object_get(f.config, "quantization"),
                                "model.language_model.layers.1.self_attn.k_proj", json_false());
        }
        folder_write(&f, 0, 0);
        open_model(f.path, NULL, &model);
        assert_int_equal(model.layers[1].attention.k.kind, WEIGHT_BF16);
        assert_int_equal(model.layers[1].attention.q.kind, WEIGHT_AFFINE);
        model_close(&model);
    }
    safetensors_close(&hf);
    folder_close(&f);
}

/* ---- errors ---------------------------------------------------------------------------------- */

#define L0 "language_model.model.layers.0."

static void break_missing(struct folder *f)
{
    *folder_find(f, L0 "mlp.gate.biases") = f->tensors[--f->count];
}

static void break_extra(struct folder *f)
{
    f->tensors[f->count] = f->tensors[0];
    snprintf(f->tensors[f->count++].name, 160, "language_model.model.layers.5.surplus");
}

static void break_twice(struct folder *f)
{
    f->tensors[f->count] = *folder_find(f, L0 "mlp.gate.scales");
    snprintf(f->tensors[f->count++].name, 160, "model.layers.0.mlp.gate.scales");
}

static void break_bits(struct folder *f) /* pitfalls 89 and 91 */
{
    json_object_set_new(json_object_get(f->config, "quantization"),
                        "language_model.model.layers.0.mlp.switch_mlp.up_proj",
                        json_pack("{s:i, s:i}", "bits", 8, "group_size", 64));
}

static void break_group(struct folder *f)
{
    json_object_set_new(json_object_get(f->config, "quantization"), "language_model.lm_head",
                        json_pack("{s:i, s:i}", "bits", 4, "group_size", 32));
}

static void break_false(struct folder *f)
{
    json_object_set_new(json_object_get(f->config, "quantization"), "lm_head", json_false());
}

static void break_block(struct folder *f)
{
    json_object_del(f->config, "quantization");
    json_object_del(f->config, "quantization_config");
}

static void break_codes(struct folder *f)
{
    set_bits(f, "model.layers.0.mlp.gate", 192 + 4, 8, false);
}

static void break_scales(struct folder *f)
{
    memcpy(folder_find(f, L0 "mlp.gate.scales")->dtype, "F16", 4);
}

static void break_biases(struct folder *f)
{
    struct folder_tensor *t = folder_find(f, L0 "mlp.gate.biases");
    t->shape[0] = 3;
    t->shape[1] = 6;
}

static void break_data(struct folder *f)
{
    memcpy(folder_find(f, "language_model.lm_head.weight")->dtype, "I32", 4);
}

static void break_norm(struct folder *f)
{
    memcpy(folder_find(f, L0 "input_layernorm.weight")->dtype, "I16", 4);
}

static void break_sizes(struct folder *f)
{
    json_object_set_new(json_object_get(f->config, "text_config"), "moe_intermediate_size",
                        json_integer(128));
}

static void break_vocab(struct folder *f)
{
    json_object_set_new(json_object_get(f->config, "text_config"), "vocab_size",
                        json_integer(4000000));
}

static void test_errors(void **state)
{
    (void)state;
    static const struct {
        void (*break_it)(struct folder *);
        const char *error;
    } cases[] = {
        {break_missing, "has no tensor layers.0.mlp.gate.biases"},
        {break_extra, "tensor language_model.model.layers.5.surplus is not part of the model"},
        {break_twice, "twice (also as "},
        {break_bits,
         "mlp.switch_mlp.up_proj.weight: config.json claims 8 bits in groups of 64, its "
         "shape holds 4 bits in groups of 64"},
        {break_group, "language_model.lm_head.weight: config.json claims 4 bits in groups of 32, "
                      "its shape holds 4 bits in groups of 64"},
        {break_false, "lm_head.weight holds 4-bit codes, but config.json says that it is not "
                      "quantised"},
        {break_block, "holds 4-bit codes, but config.json says that it is not quantised"},
        {break_codes, "layers.0.mlp.gate.weight is U32 [6, 49], but config.json asks for codes of "
                      "1 x [6, 192] weights"},
        {break_scales, "mlp.gate.scales is F16 [6, 3], but config.json asks for BF16 scales"},
        {break_biases, "mlp.gate.biases is BF16 [3, 6], but config.json asks for BF16 biases "
                       "shaped as the scales, [6, 3]"},
        {break_data, "lm_head.weight is I32 [512, 24], but config.json asks for U32 codes"},
        {break_norm, "input_layernorm.weight is I16 [192], but config.json asks for 192 values"},
        {break_sizes, "but config.json asks for codes of 6 x [128, 192] weights"},
        {break_vocab, "embed_tokens.weight is U32 [512, 24], but config.json asks for codes of "
                      "1 x [4000000, 192] weights"},
    };
    struct device *device = open_device();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static struct folder f;
        struct model model;
        struct err err = {0};
        folder_open(&f, MLX);
        cases[i].break_it(&f);
        folder_write(&f, 0, 0);
        assert_false(model_open(f.path, device, NULL, &model, &err));
        assert_int_equal(err.kind, ERR_INPUT);
        if (!strstr(err.text, cases[i].error))
            fail_msg("wanted '%s', have '%s'", cases[i].error, err.text);
        folder_close(&f);
    }
    device_close(device);
}

static void expect_error(const struct folder *f, const char *text)
{
    struct model model;
    struct err err = {0};
    assert_false(model_open(f->path, NULL, NULL, &model, &err));
    assert_int_equal(err.kind, ERR_INPUT);
    if (!strstr(err.text, text))
        fail_msg("wanted '%s', have '%s'", text, err.text);
}

static void put_index(const struct folder *f, const char *text)
{
    folder_put(f->path, "model.safetensors.index.json", text, strlen(text));
}

/* Pitfall 94, and the other ways in which shards and index fail each other. */
static void test_bad_shards(void **state)
{
    (void)state;
    static struct folder f;
    char text[128], path[96];
    folder_open(&f, MLX);
    expect_error(&f, "cannot open");
    for (uint32_t i = 0; i < f.count; i++)
        f.tensors[i].shard = i % 3;
    folder_write(&f, 3, 0);
    snprintf(path, sizeof path, "%s/model-00003-of-00003.safetensors", f.path);
    struct buf bytes = {0};
    assert_true(file_read(path, 1 << 27, &bytes, NULL));
    assert_int_equal(truncate(path, (off_t)bytes.len - 1000), 0);
    snprintf(text, sizeof text,
             "model-00003-of-00003.safetensors: truncated: have %zu, need %zu bytes; download it "
             "again",
             bytes.len - 1000, bytes.len);
    expect_error(&f, text);
    buf_free(&bytes);
    unlink(path);
    expect_error(&f, "shard model-00003-of-00003.safetensors is missing");

    put_index(&f, "{}");
    expect_error(&f, "weight_map must be an object");
    put_index(&f, "{\"weight_map\": {\"a\": \"../x\"}}");
    expect_error(&f, "weight_map of a must name a file in this folder");
    put_index(&f, "{\"weight_map\": {\"a\": 3}}");
    expect_error(&f, "weight_map of a must name a file in this folder");
    put_index(&f, "{\"weight_map\": ");
    expect_error(&f, "index.json, line 1");
    put_index(&f, "{\"weight_map\": {\"a\": \"model-00001-of-00003.safetensors\"}}");
    expect_error(&f, "the index places tensor a in shard model-00001-of-00003.safetensors, which "
                     "does not hold it");
    put_index(&f, "{\"weight_map\": {\"mtp.a\": \"model-00001-of-00003.safetensors\"}}");
    expect_error(&f, "the index places tensor mtp.a in shard");
    folder_close(&f);

    folder_open(&f, MLX);
    folder_put(f.path, "config.json", "{", 1);
    expect_error(&f, "config.json, line 1");
    folder_write(&f, 0, 0);
    snprintf(path, sizeof path, "%s/model.safetensors", f.path);
    unlink(path);
    expect_error(&f, "has neither model.safetensors nor model.safetensors.index.json");
    folder_close(&f);
}

/* The same tensor in two shards: which one would count? */
static void test_same_in_two_shards(void **state)
{
    (void)state;
    static struct folder f;
    folder_open(&f, MLX);
    for (uint32_t i = 0; i < f.count; i++)
        f.tensors[i].shard = i % 2;
    f.tensors[f.count] = f.tensors[5];
    f.tensors[f.count++].shard = 0;
    folder_write(&f, 2, 0);
    expect_error(&f, "twice (also as");
    folder_close(&f);
}

/* A limit that is too low is named; root may lock what it likes, so the error is only there for
 * others. */
static void test_lock(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct rlimit old, low;
    struct model model;
    struct err err;
    getrlimit(RLIMIT_MEMLOCK, &old);
    low = old;
    low.rlim_cur = 65536;
    setrlimit(RLIMIT_MEMLOCK, &low);
    if (model_open(DEMO, device, &(struct model_options){.lock = true}, &model, &err))
        model_close(&model);
    else
        assert_non_null(strstr(err.text, "the limit is 64 KiB; raise it with 'ulimit -l'"));
    setrlimit(RLIMIT_MEMLOCK, &old);
    device_close(device);
}

static void count_progress(void *user, uint64_t done, uint64_t total)
{
    uint64_t *last = user;
    assert_true(done > *last && done <= total);
    *last = done;
}

static void test_progress(void **state)
{
    (void)state;
    struct device *device = open_device();
    struct model model;
    uint64_t last = 0;
    struct model_options options = {
        .huge_pages = true, .progress = count_progress, .progress_user = &last};
    assert_true(model_open(DEMO, device, &options, &model, NULL));
    assert_true(last > model.bytes.total * 9 / 10);
    model_close(&model);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_demo),
        cmocka_unit_test(test_shuffled_shards),
        cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_tied_head),
        cmocka_unit_test(test_mixed_bits),
        cmocka_unit_test(test_unquantised_module),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_bad_shards),
        cmocka_unit_test(test_same_in_two_shards),
        cmocka_unit_test(test_lock),
        cmocka_unit_test(test_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
