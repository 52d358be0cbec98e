/* config.json: what is accepted, and a line for what is not. */
#include "base/file.h"
#include "model/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[] = "/tmp/calla-config-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    close(fd);
    return fd < 0;
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

/* fixture-mlx's config; its text_config in *text. */
static json_t *load_base(json_t **text)
{
    json_t *root = json_load_file("tests/data/fixtures/fixture-mlx/config.json", 0, NULL);
    *text = json_object_get(root, "text_config");
    assert_non_null(*text);
    return root;
}

static bool read_back(json_t *root, struct config *config, struct err *err)
{
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    return config_open_file(path, config, err);
}

static void test_fixture(void **state)
{
    (void)state;
    struct config c;
    struct err err;
    if (!config_open("tests/data/fixtures/fixture-mlx", &c, &err))
        fail_msg("%s", err.text);
    static const bool full[] = {false, true, false, true, false};
    assert_memory_equal(c.full_attention, full, sizeof full);
    assert_int_equal(c.attention_layers, 2);
    assert_int_equal(c.delta_layers, 3);
    assert_int_equal(c.value_heads, 6);
    assert_int_equal(c.topk, 3);
    assert_true(c.rope_theta == 1e7f && c.eps == 1e-6f && c.renormalise && !c.tie_embeddings);
    assert_int_equal(c.eos_count, 2); /* pitfall: both ids, from both places, once */
    assert_int_equal(c.eos[0], 1);
    assert_int_equal(c.eos[1], 0);
    assert_int_equal(config_quant_of(&c, "embed_tokens").bits, 4);
    assert_false(config_quant_of(&c, "embed_tokens").named);
    assert_int_equal(config_quant_of(&c, "layers.3.mlp.gate").bits, 8);
    assert_true(config_quant_of(&c, "layers.3.mlp.gate").named);
    config_close(&c);
}

/* Pitfall 89: overrides under any spelling of the path. */
static void test_spellings(void **state)
{
    (void)state;
    static const char *const prefixes[] = {"language_model.model.", "model.language_model.",
                                           "model.", ""};
    for (size_t i = 0; i < 4; i++) {
        json_t *text, *root = load_base(&text);
        json_t *block = json_pack("{s:i, s:i}", "bits", 4, "group_size", 64);
        char key[64];
        snprintf(key, sizeof key, "%slayers.0.mlp.gate", prefixes[i]);
        json_object_set_new(block, key, json_pack("{s:i, s:i}", "bits", 6, "group_size", 32));
        snprintf(key, sizeof key, "%slayers.1.mlp.gate", prefixes[i]);
        json_object_set_new(block, key, json_false());
        snprintf(key, sizeof key, "%slm_head", i == 0 ? "language_model." : "");
        json_object_set_new(block, key, json_pack("{s:i, s:i}", "bits", 8, "group_size", 64));
        json_object_set_new(root, "quantization", block);
        struct config c;
        struct err err;
        if (!read_back(root, &c, &err))
            fail_msg("%s", err.text);
        assert_int_equal(config_quant_of(&c, "layers.0.mlp.gate").bits, 6);
        assert_int_equal(config_quant_of(&c, "layers.0.mlp.gate").group, 32);
        assert_int_equal(config_quant_of(&c, "layers.1.mlp.gate").bits, 0);
        assert_int_equal(config_quant_of(&c, "layers.2.mlp.gate").bits, 4);
        assert_int_equal(config_quant_of(&c, "lm_head").bits, 8);
        config_close(&c);
    }
}

/* Text fields at top level, layers by interval only, the older place of the rope's theta. */
static void test_text_only(void **state)
{
    (void)state;
    json_t *text, *root = load_base(&text);
    json_incref(text);
    json_decref(root);
    json_object_del(text, "layer_types");
    json_object_set_new(text, "full_attention_interval", json_integer(4));
    json_object_del(text, "rope_parameters");
    json_object_set_new(text, "rope_theta", json_integer(5000000));
    json_object_set_new(text, "partial_rotary_factor", json_real(0.25));
    json_object_set_new(text, "tie_word_embeddings", json_true());
    struct config c;
    struct err err;
    if (!read_back(text, &c, &err))
        fail_msg("%s", err.text);
    assert_int_equal(c.attention_layers, 1);
    assert_true(c.full_attention[3] && c.rope_theta == 5e6f && c.tie_embeddings);
    assert_false(c.quantised);
    config_close(&c);
}

static void test_bad_values(void **state)
{
    (void)state;
    static const struct {
        const char *place, *key, *value, *error; /* value null: the key is removed */
    } cases[] = {
        {"text", "hidden_size", NULL, "hidden_size is missing"},
        {"text", "hidden_size", "0", "hidden_size must be a whole number from 1 to 65536"},
        {"text", "hidden_size", "1.5", "hidden_size must be a whole number"},
        {"text", "hidden_size", "\"192\"", "hidden_size must be a whole number"},
        {"text", "vocab_size", "99999999999", "vocab_size must be a whole number"},
        {"text", "num_hidden_layers", "6", "layer_types must list 6 layers"},
        {"text", "num_hidden_layers", "1025", "num_hidden_layers must be a whole number"},
        {"text", "layer_types", "[1,2,3,4,5]", "layer_types[0] must be"},
        {"text", "layer_types", "[\"full_attention\",\"x\",\"x\",\"x\",\"x\"]", "layer_types[1]"},
        {"text", "num_key_value_heads", "3", "is not a multiple of num_key_value_heads 3"},
        {"text", "linear_num_key_heads", "4", "is not a multiple of linear_num_key_heads 4"},
        {"text", "head_dim", "128", "head_dim must be a whole number from 256 to 256"},
        {"text", "linear_key_head_dim", "64", "linear_key_head_dim must be 128"},
        {"text", "linear_conv_kernel_dim", "3", "linear_conv_kernel_dim must be 4"},
        {"text", "attention_bias", "true", "attention_bias must be false"},
        {"text", "hidden_act", "\"gelu\"", "hidden_act must be \"silu\""},
        {"text", "num_experts_per_tok", "7",
         "num_experts_per_tok must be a whole number from 1 to "
         "6"},
        {"text", "rms_norm_eps", "0", "rms_norm_eps must be a number above 0"},
        {"text", "mlp_only_layers", "[1]", "layers without experts"},
        {"text", "norm_topk_prob", "1", "norm_topk_prob must be true or false"},
        {"text", "eos_token_id", "512", "eos_token_id must be ids from 0 to 511"},
        {"root", "eos_token_id", "[1,2,3,4,5,6,7,8,9]", "more than 8 ids"},
        {"rope", "rope_type", "\"yarn\"", "rope_type \"yarn\" is not supported"},
        {"rope", "partial_rotary_factor", "0.5", "partial_rotary_factor must be 0.25"},
        {"rope", "rope_theta", "0", "rope_theta must be a number"},
        {"root", "model_type", "\"llama\"", "model_type \"llama\" is not supported"},
        {"root", "text_config", "3", "text_config must be an object"},
        {"root", "quantization", "3", "quantization must be an object"},
        {"quant", "bits", "7", "bits must be 2, 3, 4, 5, 6 or 8"},
        {"quant", "bits", "16", "bits must be a whole number from 2 to 8"},
        {"quant", "group_size", "48", "group_size must be 32, 64 or 128"},
        {"quant", "group_size", NULL, "group_size is missing"},
        {"quant", "mode", "\"mxfp4\"", "mode must be \"affine\""},
        {"quant", "quant_method", "\"fp8\"", "quant_method \"fp8\" is not supported"},
        {"quant", "lm_head", "3", "\"lm_head\" must be an object"},
        {"quant", "model.layers.0.mlp.gate", "{\"bits\":4,\"group_size\":64}",
         "layers.0.mlp.gate is listed twice with different bits"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *text, *root = load_base(&text), *place = root;
        if (!strcmp(cases[i].place, "text"))
            place = text;
        else if (!strcmp(cases[i].place, "rope"))
            place = json_object_get(text, "rope_parameters");
        else if (!strcmp(cases[i].place, "quant"))
            place = json_object_get(root, "quantization");
        if (cases[i].value)
            json_object_set_new(place, cases[i].key,
                                json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
        else
            json_object_del(place, cases[i].key);
        struct config c;
        struct err err = {0};
        assert_false(read_back(root, &c, &err));
        assert_int_equal(err.kind, ERR_INPUT);
        if (!strstr(err.text, cases[i].error) || !strstr(err.text, path))
            fail_msg("%s: wanted '%s', have '%s'", cases[i].key, cases[i].error, err.text);
    }
}

static void test_bad_json(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "{", "[]", "{\"a\":1,\"a\":2}", "\xff\xfe", "null"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct config c;
        struct err err = {0};
        FILE *f = fopen(path, "wb");
        fputs(texts[i], f);
        fclose(f);
        assert_false(config_open_file(path, &c, &err));
        assert_int_equal(err.kind, ERR_INPUT);
        assert_non_null(strstr(err.text, path));
    }
    struct config c;
    struct err err;
    assert_false(config_open("/nowhere", &c, &err));
    assert_non_null(strstr(err.text, "cannot open /nowhere/config.json"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fixture),   cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_text_only), cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_bad_json),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
