/* config.json to struct config.
 *
 * Invariant: after config_open succeeds, every size is within the bounds below, so that products of
 * two or three of them fit 64 bits, and the divisions that the model's formulas need are exact. */
#include "model/config.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CONFIG_FILE_MAX = 64 << 20,
    CONFIG_VOCAB_MAX = 1 << 22,
    CONFIG_WIDTH_MAX = 1 << 16,
    CONFIG_HEADS_MAX = 1024,
    CONFIG_EXPERTS_MAX = 4096,
    CONFIG_CTX_MAX = 1 << 30,
};

struct config_override {
    char *path;
    struct config_quant quant;
};

const char *config_cut_prefix(const char *name)
{
    static const char *const prefixes[] = {"language_model.model.", "model.language_model.",
                                           "language_model.", "model."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t n = strlen(prefixes[i]);
        if (!strncmp(name, prefixes[i], n))
            return name + n;
    }
    return name;
}

static bool config_get_uint(const json_t *object, const char *key, uint32_t lo, uint32_t hi,
                            uint32_t *out, struct err *err)
{
    const json_t *v = json_object_get(object, key);
    if (!v)
        return err_set(err, ERR_INPUT, "%s is missing", key);
    if (!json_is_integer(v) || json_integer_value(v) < lo || json_integer_value(v) > hi)
        return err_set(err, ERR_INPUT, "%s must be a whole number from %u to %u", key, lo, hi);
    *out = (uint32_t)json_integer_value(v);
    return true;
}

/* A key whose value this implementation fixes; absent is right too. */
static bool config_expect_uint(const json_t *object, const char *key, uint32_t want,
                               struct err *err)
{
    const json_t *v = json_object_get(object, key);
    if (v && (!json_is_integer(v) || json_integer_value(v) != want))
        return err_set(err, ERR_INPUT, "%s must be %u; other values are not supported", key, want);
    return true;
}

static bool config_expect_text(const json_t *object, const char *key, const char *want,
                               struct err *err)
{
    const json_t *v = json_object_get(object, key);
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), want) != 0))
        return err_set(err, ERR_INPUT, "%s must be \"%s\"; other values are not supported", key,
                       want);
    return true;
}

static bool config_expect_bool(const json_t *object, const char *key, bool want, struct err *err)
{
    const json_t *v = json_object_get(object, key);
    if (v && (!json_is_boolean(v) || json_is_true(v) != want))
        return err_set(err, ERR_INPUT, "%s must be %s; other values are not supported", key,
                       want ? "true" : "false");
    return true;
}

static bool config_get_bool(const json_t *object, const char *key, bool *out, struct err *err)
{
    const json_t *v = json_object_get(object, key);
    if (!v)
        return true;
    if (!json_is_boolean(v))
        return err_set(err, ERR_INPUT, "%s must be true or false", key);
    *out = json_is_true(v);
    return true;
}

static bool config_read_layers(const json_t *text, struct config *config, struct err *err)
{
    uint32_t interval = 4;
    if (!config_get_uint(text, "num_hidden_layers", 1, CONFIG_MAX_LAYERS, &config->layers, err))
        return false;
    if (json_object_get(text, "full_attention_interval") &&
        !config_get_uint(text, "full_attention_interval", 1, UINT32_MAX, &interval, err))
        return false;
    config->full_attention = mem_new(config->layers, sizeof *config->full_attention);
    const json_t *types = json_object_get(text, "layer_types");
    if (types && json_is_null(types))
        types = NULL;
    if (types && (!json_is_array(types) || json_array_size(types) != config->layers))
        return err_set(err, ERR_INPUT, "layer_types must list %u layers", config->layers);
    for (uint32_t i = 0; i < config->layers; i++) {
        bool full = (i + 1) % interval == 0;
        if (types) {
            const char *type = json_string_value(json_array_get(types, i));
            full = type && !strcmp(type, "full_attention");
            if (!type || (!full && strcmp(type, "linear_attention") != 0))
                return err_set(err, ERR_INPUT,
                               "layer_types[%u] must be \"linear_attention\" or \"full_attention\"",
                               i);
        }
        config->full_attention[i] = full;
        config->attention_layers += full;
    }
    config->delta_layers = config->layers - config->attention_layers;
    return true;
}

static bool config_read_heads(const json_t *text, struct config *config, struct err *err)
{
    if (!config_get_uint(text, "num_attention_heads", 1, CONFIG_HEADS_MAX, &config->heads, err) ||
        !config_get_uint(text, "num_key_value_heads", 1, CONFIG_HEADS_MAX, &config->kv_heads,
                         err) ||
        !config_get_uint(text, "linear_num_key_heads", 1, CONFIG_HEADS_MAX, &config->key_heads,
                         err) ||
        !config_get_uint(text, "linear_num_value_heads", 1, CONFIG_HEADS_MAX, &config->value_heads,
                         err))
        return false;
    if (config->heads % config->kv_heads)
        return err_set(err, ERR_INPUT,
                       "num_attention_heads %u is not a multiple of num_key_value_heads %u",
                       config->heads, config->kv_heads);
    if (config->value_heads % config->key_heads)
        return err_set(err, ERR_INPUT,
                       "linear_num_value_heads %u is not a multiple of linear_num_key_heads %u",
                       config->value_heads, config->key_heads);
    /* Other families derive head_dim from hidden / heads; this one states it. */
    uint32_t head_dim;
    return config_get_uint(text, "head_dim", CONFIG_HEAD_DIM, CONFIG_HEAD_DIM, &head_dim, err) &&
           config_expect_uint(text, "linear_key_head_dim", CONFIG_DELTA_DIM, err) &&
           config_expect_uint(text, "linear_value_head_dim", CONFIG_DELTA_DIM, err) &&
           config_expect_uint(text, "linear_conv_kernel_dim", CONFIG_CONV_TAPS, err) &&
           config_expect_bool(text, "attention_bias", false, err) &&
           config_expect_bool(text, "attn_output_gate", true, err) &&
           config_expect_text(text, "hidden_act", "silu", err);
}

/* rope_theta and the rotated share stand in rope_parameters, or beside it in older exports. */
static bool config_read_rope(const json_t *text, struct config *config, struct err *err)
{
    const json_t *rope = json_object_get(text, "rope_parameters");
    if (!json_is_object(rope))
        rope = json_object_get(text, "rope_scaling");
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (type && strcmp(type, "default") != 0)
        return err_set(err, ERR_INPUT, "rope_type \"%.64s\" is not supported, only \"default\"",
                       type);
    const json_t *theta = json_object_get(rope, "rope_theta");
    const json_t *share = json_object_get(rope, "partial_rotary_factor");
    if (!theta)
        theta = json_object_get(text, "rope_theta");
    if (!share)
        share = json_object_get(text, "partial_rotary_factor");
    double t = json_number_value(theta);
    if (!json_is_number(theta) || !(t > 1) || !(t < 1e15))
        return err_set(err, ERR_INPUT, "rope_theta must be a number above 1 and below 1e15");
    if (!json_is_number(share) ||
        fabs(json_number_value(share) * CONFIG_HEAD_DIM - CONFIG_ROPE_DIMS) > 1e-3)
        return err_set(err, ERR_INPUT,
                       "partial_rotary_factor must be 0.25 (%d of %d dims rotated); other values "
                       "are not supported",
                       CONFIG_ROPE_DIMS, CONFIG_HEAD_DIM);
    config->rope_theta = (float)t;
    const json_t *eps = json_object_get(text, "rms_norm_eps");
    double e = json_number_value(eps);
    if (!json_is_number(eps) || !(e > 0) || !(e < 1))
        return err_set(err, ERR_INPUT, "rms_norm_eps must be a number above 0 and below 1");
    config->eps = (float)e;
    return true;
}

static bool config_add_eos(struct config *config, const json_t *value, struct err *err)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) >= config->vocab)
        return err_set(err, ERR_INPUT, "eos_token_id must be ids from 0 to %u", config->vocab - 1);
    int32_t id = (int32_t)json_integer_value(value);
    for (uint32_t i = 0; i < config->eos_count; i++)
        if (config->eos[i] == id)
            return true;
    if (config->eos_count == CONFIG_MAX_EOS)
        return err_set(err, ERR_INPUT, "eos_token_id lists more than %d ids", CONFIG_MAX_EOS);
    config->eos[config->eos_count++] = id;
    return true;
}

static bool config_read_eos(const json_t *object, struct config *config, struct err *err)
{
    const json_t *v = json_object_get(object, "eos_token_id");
    if (!v || json_is_null(v))
        return true;
    if (!json_is_array(v))
        return config_add_eos(config, v, err);
    for (size_t i = 0; i < json_array_size(v); i++)
        if (!config_add_eos(config, json_array_get(v, i), err))
            return false;
    return true;
}

static bool config_read_text(const json_t *root, const json_t *text, struct config *config,
                             struct err *err)
{
    if (!config_get_uint(text, "vocab_size", 1, CONFIG_VOCAB_MAX, &config->vocab, err) ||
        !config_get_uint(text, "hidden_size", 1, CONFIG_WIDTH_MAX, &config->hidden, err) ||
        !config_read_layers(text, config, err) || !config_read_heads(text, config, err) ||
        !config_read_rope(text, config, err) ||
        !config_get_uint(text, "num_experts", 1, CONFIG_EXPERTS_MAX, &config->experts, err) ||
        !config_get_uint(text, "num_experts_per_tok", 1, config->experts, &config->topk, err) ||
        !config_get_uint(text, "moe_intermediate_size", 1, CONFIG_WIDTH_MAX, &config->width, err) ||
        !config_get_uint(text, "shared_expert_intermediate_size", 1, CONFIG_WIDTH_MAX,
                         &config->shared_width, err) ||
        !config_get_uint(text, "max_position_embeddings", 1, CONFIG_CTX_MAX, &config->max_ctx, err))
        return false;
    const json_t *dense = json_object_get(text, "mlp_only_layers");
    if (json_array_size(dense))
        return err_set(err, ERR_INPUT, "mlp_only_layers: layers without experts are not supported");
    config->renormalise = true;
    return config_expect_uint(text, "decoder_sparse_step", 1, err) &&
           config_get_bool(text, "norm_topk_prob", &config->renormalise, err) &&
           config_get_bool(root, "tie_word_embeddings", &config->tie_embeddings, err) &&
           config_get_bool(text, "tie_word_embeddings", &config->tie_embeddings, err) &&
           config_read_eos(root, config, err) && config_read_eos(text, config, err);
}

/* {"bits": 4, "group_size": 64, "mode": "affine"} */
static bool config_read_quant(const json_t *object, struct config_quant *quant, struct err *err)
{
    if (!config_get_uint(object, "bits", 2, 8, &quant->bits, err) ||
        !config_get_uint(object, "group_size", 32, 128, &quant->group, err) ||
        !config_expect_text(object, "mode", "affine", err))
        return false;
    if (quant->bits == 7)
        return err_set(err, ERR_INPUT, "bits must be 2, 3, 4, 5, 6 or 8");
    if (quant->group != 32 && quant->group != 64 && quant->group != 128)
        return err_set(err, ERR_INPUT, "group_size must be 32, 64 or 128");
    return true;
}

static int config_compare_overrides(const void *a, const void *b)
{
    return strcmp(((const struct config_override *)a)->path,
                  ((const struct config_override *)b)->path);
}

static bool config_read_overrides(json_t *block, struct config *config, struct err *err)
{
    const char *key;
    json_t *value;
    config->overrides = mem_new(json_object_size(block), sizeof *config->overrides);
    json_object_foreach(block, key, value)
    {
        if (!strcmp(key, "bits") || !strcmp(key, "group_size") || !strcmp(key, "mode"))
            continue;
        struct config_quant quant = {.named = true};
        if (json_is_true(value)) {
            quant.bits = config->quant.bits;
            quant.group = config->quant.group;
        } else if (json_is_object(value)) {
            if (!config_read_quant(value, &quant, err))
                return err_wrap(err, "%.200s", key);
        } else if (!json_is_false(value)) {
            return err_set(err, ERR_INPUT,
                           "\"%.200s\" must be an object with bits and group_size, true or false",
                           key);
        }
        const char *path = config_cut_prefix(key);
        config->overrides[config->override_count++] =
            (struct config_override){.path = mem_copy_text(path, strlen(path)), .quant = quant};
    }
    qsort(config->overrides, config->override_count, sizeof *config->overrides,
          config_compare_overrides);
    for (uint32_t i = 1; i < config->override_count; i++) {
        const struct config_override *a = &config->overrides[i - 1], *b = a + 1;
        if (!strcmp(a->path, b->path) &&
            (a->quant.bits != b->quant.bits || a->quant.group != b->quant.group))
            return err_set(err, ERR_INPUT, "%.200s is listed twice with different bits", a->path);
    }
    return true;
}

static bool config_read_quantization(const json_t *root, struct config *config, struct err *err)
{
    const char *key = "quantization";
    json_t *block = json_object_get(root, key);
    if (!block || json_is_null(block)) {
        key = "quantization_config";
        block = json_object_get(root, key);
    }
    if (!block || json_is_null(block))
        return true;
    if (!json_is_object(block))
        return err_set(err, ERR_INPUT, "%s must be an object", key);
    const char *method = json_string_value(json_object_get(block, "quant_method"));
    if (method)
        return err_set(err, ERR_INPUT,
                       "%s: quant_method \"%.64s\" is not supported; use an MLX affine or a bf16 "
                       "checkpoint",
                       key, method);
    if (!config_read_quant(block, &config->quant, err) ||
        !config_read_overrides(block, config, err))
        return err_wrap(err, "%s", key);
    config->quantised = true;
    return true;
}

static bool config_read_root(const json_t *root, struct config *config, struct err *err)
{
    if (!json_is_object(root))
        return err_set(err, ERR_INPUT, "not a JSON object");
    const json_t *text = json_object_get(root, "text_config");
    if (text && !json_is_object(text))
        return err_set(err, ERR_INPUT, "text_config must be an object");
    const char *type = json_string_value(json_object_get(root, "model_type"));
    if (!type && text)
        type = json_string_value(json_object_get(text, "model_type"));
    if (!type || (strcmp(type, "qwen3_5_moe") != 0 && strcmp(type, "qwen3_5_moe_text") != 0))
        return err_set(err, ERR_INPUT,
                       "model_type \"%.64s\" is not supported, only qwen3_5_moe and "
                       "qwen3_5_moe_text",
                       type ? type : "");
    return config_read_text(root, text ? text : root, config, err) &&
           config_read_quantization(root, config, err);
}

bool config_open_file(const char *path, struct config *config, struct err *err)
{
    *config = (struct config){0};
    struct buf bytes = {0};
    if (!file_read_regular(path, CONFIG_FILE_MAX, &bytes, err)) {
        buf_free(&bytes);
        return false;
    }
    json_error_t where;
    json_t *root =
        json_loadb(bytes.data ? bytes.data : "", bytes.len, JSON_REJECT_DUPLICATES, &where);
    buf_free(&bytes);
    if (!root)
        return err_set(err, ERR_INPUT, "%s, line %d: %s", path, where.line, where.text);
    bool ok = config_read_root(root, config, err);
    json_decref(root);
    if (!ok) {
        config_close(config);
        return err_wrap(err, "%s", path);
    }
    return true;
}

bool config_open(const char *folder, struct config *config, struct err *err)
{
    char *path = file_join(folder, "config.json");
    bool ok = config_open_file(path, config, err);
    free(path);
    return ok;
}

void config_close(struct config *config)
{
    for (uint32_t i = 0; i < config->override_count; i++)
        free(config->overrides[i].path);
    free(config->overrides);
    free(config->full_attention);
    *config = (struct config){0};
}

struct config_quant config_quant_of(const struct config *config, const char *module)
{
    if (!config->quantised)
        return (struct config_quant){0};
    struct config_override wanted = {.path = (char *)module};
    const struct config_override *found =
        bsearch(&wanted, config->overrides, config->override_count, sizeof *config->overrides,
                config_compare_overrides);
    return found ? found->quant : config->quant;
}
