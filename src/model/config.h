/* A model's config.json, checked: sizes, layer pattern, quantisation by module. */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    CONFIG_HEAD_DIM = 256,
    CONFIG_ROPE_DIMS = 64,
    CONFIG_DELTA_DIM = 128,
    CONFIG_CONV_TAPS = 4,
    CONFIG_MAX_LAYERS = 1024,
    CONFIG_MAX_EOS = 8,
};

struct config_quant { /* bits 0: the module is not quantised */
    uint32_t bits, group;
    bool named; /* the file names this module; otherwise the default speaks */
};

struct config {
    uint32_t vocab, hidden, layers;
    bool *full_attention; /* [layers]: true attention, false Gated DeltaNet */
    uint32_t attention_layers, delta_layers;
    uint32_t heads, kv_heads;
    float rope_theta, eps;
    uint32_t key_heads, value_heads; /* Gated DeltaNet, 128 dims each */
    uint32_t experts, topk, width, shared_width;
    bool renormalise; /* norm_topk_prob, default true */
    bool tie_embeddings;
    uint32_t max_ctx; /* max_position_embeddings */
    int32_t eos[CONFIG_MAX_EOS];
    uint32_t eos_count;
    bool quantised;                    /* the file has a quantization block */
    struct config_quant quant;         /* its default */
    struct config_override *overrides; /* by module path, the prefix cut off; private to config.c */
    uint32_t override_count;
};

/* Reads and checks folder/config.json. */
bool config_open(const char *folder, struct config *config, struct err *err);
/* The same for the file at `path`. */
bool config_open_file(const char *path, struct config *config, struct err *err);
void config_close(struct config *config);

/* The part of a tensor's or module's name below the language model, which checkpoints spell
 * `language_model.model.`, `model.language_model.`, `model.` or (lm_head) `language_model.`. */
const char *config_cut_prefix(const char *name);

/* Quantisation of a module by its path below `model.` in either spelling
 * ("layers.0.mlp.gate", "embed_tokens", "lm_head"). */
struct config_quant config_quant_of(const struct config *config, const char *module);

#endif
