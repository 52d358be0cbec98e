/* The text files of a synthetic checkpoint: config, generation defaults, tokenizer.
 *
 * The tokenizer is byte-level BPE: ids 0..255 are the bytes in the family's order, then come a few
 * merges of frequent English letters, and the added tokens of Qwen3.6 have their real ids when the
 * vocabulary is large enough, else the last ones. The ids between are filler words (a blank, an x
 * and letters that count) that decode to text but that no merge produces; ids after the added
 * tokens have no text, as in the real one. */
#include "model/synth.h"

#include "base/buf.h"
#include "base/utf8.h"
#include "model/writer.h"

#include <assert.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* The added tokens of Qwen3.6 in the order of their ids, the first of which is 248044. */
static const struct {
    const char *text;
    bool special;
} synth_added[] = {
    {"<|endoftext|>", true},      {"<|im_start|>", true},
    {"<|im_end|>", true},         {"<|object_ref_start|>", true},
    {"<|object_ref_end|>", true}, {"<|box_start|>", true},
    {"<|box_end|>", true},        {"<|quad_start|>", true},
    {"<|quad_end|>", true},       {"<|vision_start|>", true},
    {"<|vision_end|>", true},     {"<|vision_pad|>", true},
    {"<|image_pad|>", true},      {"<|video_pad|>", true},
    {"<tool_call>", false},       {"</tool_call>", false},
    {"<|fim_prefix|>", false},    {"<|fim_middle|>", false},
    {"<|fim_suffix|>", false},    {"<|fim_pad|>", false},
    {"<|repo_name|>", false},     {"<|file_sep|>", false},
    {"<tool_response>", false},   {"</tool_response>", false},
    {"<think>", false},           {"</think>", false},
    {"<|audio_start|>", true},    {"<|audio_end|>", true},
    {"<tts_pad>", true},          {"<tts_text_bos>", true},
    {"<tts_text_eod>", true},     {"<tts_text_bos_single>", true},
    {"<|audio_pad|>", true},
};

static const char *const synth_merges[][2] = {
    {"\xc4\xa0", "t"}, {"h", "e"}, {"i", "n"},        {"e", "r"},          {"a", "n"},
    {"\xc4\xa0", "a"}, {"o", "n"}, {"r", "e"},        {"\xc4\xa0t", "he"}, {"\xc4\xa0", "s"},
    {"\xc4\xa0", "o"}, {"a", "t"}, {"e", "n"},        {"\xc4\xa0", "w"},   {"n", "d"},
    {"i", "s"},        {"o", "r"}, {"\xc4\xa0", "c"}, {"e", "s"},          {"\xc4\xa0", "in"},
    {"in", "g"},       {"o", "f"},
};

enum {
    SYNTH_ADDED = sizeof synth_added / sizeof *synth_added,
    SYNTH_MERGES = sizeof synth_merges / sizeof *synth_merges,
    SYNTH_REAL_VOCAB = 248320,
    SYNTH_REAL_ADDED = 248044,
    SYNTH_END_OF_TEXT = 0, /* in synth_added */
    SYNTH_END_OF_TURN = 2,
};

uint32_t synth_vocab_min(void)
{
    return 256 + SYNTH_MERGES + SYNTH_ADDED;
}

static uint32_t synth_added_id(const struct config *config, uint32_t i)
{
    uint32_t first = config->vocab >= SYNTH_REAL_VOCAB ? (uint32_t)SYNTH_REAL_ADDED
                                                       : config->vocab - SYNTH_ADDED;
    return first + i;
}

static bool synth_put_json(const char *folder, const char *name, json_t *root, size_t indent,
                           struct err *err)
{
    char *text = json_dumps(root, indent ? JSON_INDENT(indent) : JSON_COMPACT);
    json_decref(root);
    assert(text); /* all of it is our own, valid UTF-8 */
    bool ok = writer_put_file(folder, name, text, strlen(text), err);
    free(text);
    return ok;
}

/* ---- config -------------------------------------------------------------------------------- */

static json_t *synth_json_eos(const struct config *config)
{
    return json_pack("[i, i]", (int)synth_added_id(config, SYNTH_END_OF_TURN),
                     (int)synth_added_id(config, SYNTH_END_OF_TEXT));
}

static json_t *synth_json_text(const struct config *c)
{
    json_t *types = json_array();
    for (uint32_t i = 0; i < c->layers; i++)
        json_array_append_new(
            types, json_string(c->full_attention[i] ? "full_attention" : "linear_attention"));
    json_t *rope = json_pack("{s:s, s:f, s:f, s:[i, i, i], s:b}", "rope_type", "default",
                             "rope_theta", (double)c->rope_theta, "partial_rotary_factor", 0.25,
                             "mrope_section", 11, 11, 10, "mrope_interleaved", 1);
    json_t *text = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
        "model_type", "qwen3_5_moe_text", "vocab_size", (int)c->vocab, "hidden_size",
        (int)c->hidden, "num_hidden_layers", (int)c->layers, "num_attention_heads", (int)c->heads,
        "num_key_value_heads", (int)c->kv_heads, "head_dim", CONFIG_HEAD_DIM,
        "linear_num_key_heads", (int)c->key_heads, "linear_num_value_heads", (int)c->value_heads,
        "linear_key_head_dim", CONFIG_DELTA_DIM, "linear_value_head_dim", CONFIG_DELTA_DIM,
        "linear_conv_kernel_dim", CONFIG_CONV_TAPS, "num_experts", (int)c->experts,
        "num_experts_per_tok", (int)c->topk, "moe_intermediate_size", (int)c->width,
        "shared_expert_intermediate_size", (int)c->shared_width, "max_position_embeddings",
        (int)c->max_ctx);
    json_object_set_new(text, "rms_norm_eps", json_real((double)c->eps));
    json_object_set_new(text, "norm_topk_prob", json_boolean(c->renormalise));
    json_object_set_new(text, "tie_word_embeddings", json_boolean(c->tie_embeddings));
    json_object_set_new(text, "hidden_act", json_string("silu"));
    json_object_set_new(text, "attention_bias", json_false());
    json_object_set_new(text, "attn_output_gate", json_true());
    json_object_set_new(text, "dtype", json_string("bfloat16"));
    json_object_set_new(text, "eos_token_id", json_integer(synth_added_id(c, SYNTH_END_OF_TEXT)));
    json_object_set_new(text, "layer_types", types);
    json_object_set_new(text, "rope_parameters", rope);
    return text;
}

static bool synth_put_config(const struct config *c, const struct synth_options *options,
                             const char *folder, struct err *err)
{
    json_t *root =
        json_pack("{s:[s], s:s, s:b}", "architectures", "Qwen3_5MoeForConditionalGeneration",
                  "model_type", "qwen3_5_moe", "tie_word_embeddings", (int)c->tie_embeddings);
    json_t *quant = json_pack("{s:i, s:i, s:s}", "group_size", (int)options->group, "bits",
                              (int)options->bits, "mode", "affine");
    static const char *const eight_bits[] = {"mlp.gate", "mlp.shared_expert_gate"};
    for (uint32_t i = 0; i < c->layers && synth_is_quantised(options, c->hidden); i++)
        for (int k = 0; k < 2; k++) {
            struct buf path = {0};
            buf_printf(&path, "language_model.model.layers.%u.%s", i, eight_bits[k]);
            json_object_set_new(
                quant, path.data,
                json_pack("{s:i, s:i}", "group_size", (int)options->group, "bits", 8));
            buf_free(&path);
        }
    json_object_set_new(root, "eos_token_id", synth_json_eos(c));
    json_object_set_new(root, "text_config", synth_json_text(c));
    json_object_set_new(root, "quantization", quant);
    return synth_put_json(folder, "config.json", root, 1, err);
}

static bool synth_put_generation(const struct config *c, const char *folder, struct err *err)
{
    json_t *root = json_pack("{s:b, s:f, s:i, s:f, s:o, s:i}", "do_sample", 1, "temperature", 1.0,
                             "top_k", 20, "top_p", 0.95, "eos_token_id", synth_json_eos(c),
                             "pad_token_id", (int)synth_added_id(c, SYNTH_END_OF_TEXT));
    return synth_put_json(folder, "generation_config.json", root, 1, err);
}

/* ---- tokenizer ----------------------------------------------------------------------------- */

/* Byte-level BPE spells bytes as characters: printable Latin-1 ones as themselves, the others as
 * U+0100 on; ids follow the same order. `order` gets the 256 characters by id. */
static void synth_list_bytes(uint32_t order[256])
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < 256; b++)
        if ((b >= 33 && b <= 126) || (b >= 161 && b != 173))
            order[n++] = b;
    for (uint32_t other = 0; n < 256; other++)
        order[n++] = 256 + other;
}

static json_t *synth_json_vocab(const struct config *config)
{
    json_t *vocab = json_object();
    uint32_t order[256], id = 0;
    char text[32];
    synth_list_bytes(order);
    for (; id < 256; id++) {
        text[utf8_encode(order[id], text)] = 0;
        json_object_set_new(vocab, text, json_integer(id));
    }
    for (uint32_t i = 0; i < SYNTH_MERGES; i++) {
        struct buf joined = {0};
        buf_printf(&joined, "%s%s", synth_merges[i][0], synth_merges[i][1]);
        json_object_set_new(vocab, joined.data, json_integer(id++));
        buf_free(&joined);
    }
    for (; id < synth_added_id(config, 0); id++) {
        char word[16] = "\xc4\xa0x";
        size_t n = strlen(word);
        for (uint32_t rest = id; rest; rest /= 26)
            word[n++] = (char)('a' + rest % 26);
        json_object_set_new(vocab, word, json_integer(id));
    }
    return vocab;
}

static json_t *synth_json_added(const struct config *config, uint32_t i, bool with_id)
{
    json_t *token = json_pack("{s:s, s:b, s:b, s:b, s:b, s:b}", "content", synth_added[i].text,
                              "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0,
                              "special", (int)synth_added[i].special);
    if (with_id)
        json_object_set_new(token, "id", json_integer(synth_added_id(config, i)));
    return token;
}

static bool synth_put_tokenizer(const struct config *config, const char *folder, struct err *err)
{
    static const char split[] =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "
        "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    json_t *merges = json_array(), *added = json_array();
    for (uint32_t i = 0; i < SYNTH_MERGES; i++)
        json_array_append_new(merges, json_pack("[s, s]", synth_merges[i][0], synth_merges[i][1]));
    for (uint32_t i = 0; i < SYNTH_ADDED; i++)
        json_array_append_new(added, synth_json_added(config, i, true));
    json_t *root = json_pack(
        "{s:s, s:n, s:n, s:o, s:{s:s}, s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]},"
        " s:n, s:{s:s, s:b, s:b, s:b}, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}}",
        "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer", "type",
        "NFC", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern",
        "Regex", split, "behavior", "Isolated", "invert", 0, "type", "ByteLevel",
        "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0, "post_processor", "decoder",
        "type", "ByteLevel", "add_prefix_space", 1, "trim_offsets", 1, "use_regex", 1, "model",
        "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
        "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab", synth_json_vocab(config),
        "merges", merges);
    assert(root);
    return synth_put_json(folder, "tokenizer.json", root, 0, err);
}

static bool synth_put_tokenizer_config(const struct config *config, const char *folder,
                                       struct err *err)
{
    json_t *added = json_object();
    for (uint32_t i = 0; i < SYNTH_ADDED; i++) {
        struct buf id = {0};
        buf_printf(&id, "%u", synth_added_id(config, i));
        json_object_set_new(added, id.data, synth_json_added(config, i, false));
        buf_free(&id);
    }
    json_t *root = json_pack(
        "{s:b, s:o, s:n, s:b, s:s, s:s, s:i, s:s, s:n}", "add_prefix_space", 0,
        "added_tokens_decoder", added, "bos_token", "clean_up_tokenization_spaces", 0, "eos_token",
        synth_added[SYNTH_END_OF_TURN].text, "pad_token", synth_added[SYNTH_END_OF_TEXT].text,
        "model_max_length", (int)config->max_ctx, "tokenizer_class", "Qwen2Tokenizer", "unk_token");
    assert(root);
    return synth_put_json(folder, "tokenizer_config.json", root, 1, err);
}

/* config.json comes last: a folder without it is not taken for a model. */
bool synth_write_texts(const struct config *config, const struct synth_options *options,
                       const char *folder, struct err *err)
{
    return synth_put_generation(config, folder, err) && synth_put_tokenizer(config, folder, err) &&
           synth_put_tokenizer_config(config, folder, err) &&
           synth_put_config(config, options, folder, err);
}
