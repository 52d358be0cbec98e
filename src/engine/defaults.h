/* What a model folder says about generation: sampling defaults and the ids that end an answer. */
#ifndef ENGINE_DEFAULTS_H
#define ENGINE_DEFAULTS_H

#include "engine/sampler.h"
#include "model/config.h"

enum { DEFAULTS_MAX_EOS = 2 * CONFIG_MAX_EOS };

struct defaults {
    struct sampler_options sampling; /* vocab is the caller's to set */
    int32_t eos[DEFAULTS_MAX_EOS];   /* those of config.json and generation_config.json together */
    uint32_t eos_count;
    bool thinking; /* whether answers begin with a thought, unless told */
};

/* Reads folder/generation_config.json; a folder without one samples greedily, and thinks. Beside
 * transformers' keys it may hold `enable_thinking`, for models that were not trained to think. */
bool defaults_read(const char *folder, const struct config *config, struct defaults *out,
                   struct err *err);

bool defaults_is_eos(const struct defaults *defaults, int32_t id);

#endif
