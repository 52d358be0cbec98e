/* Synthetic checkpoints: random weights of any size of the family, in MLX form, with a tokenizer.
 *
 * For tests and measurements without a download: what such a model says means nothing, but its
 * activations stay finite and varied, its experts are all used, and its files have the names,
 * shapes and byte counts of a real one. */
#ifndef MODEL_SYNTH_H
#define MODEL_SYNTH_H

#include "model/config.h"

#include <stddef.h>

struct synth_options {
    uint64_t seed;        /* same seed and config, same bytes, whatever the number of threads */
    uint32_t bits, group; /* of all matrices but the router and the shared gate, which get 8 bits */
    int threads;          /* 0: one a core */
    void (*progress)(void *user, uint64_t done, uint64_t total); /* in chunks; or null */
    void *progress_user;
};

/* The sizes of Qwen3.6-35B-A3B. config_close releases it. */
void synth_preset(struct config *config);

/* The smallest vocabulary that a synthetic tokenizer fits. */
uint32_t synth_vocab_min(void);

/* Writes the checkpoint; fails when the folder holds one already or the disk has no room. */
bool synth_write(const struct config *config, const struct synth_options *options,
                 const char *folder, struct err *err);

/* config.json, generation_config.json, tokenizer.json and tokenizer_config.json into folder. */
bool synth_write_texts(const struct config *config, const struct synth_options *options,
                       const char *folder, struct err *err);

/* True when synth quantises a matrix with so many columns: MLX leaves out what no group divides. */
bool synth_is_quantised(const struct synth_options *options, uint32_t cols);

#endif
