/* Reads generation_config.json. Its fields are optional; a wrong type or value is an error that
 * names the field, since a default that is silently dropped changes every answer. */
#include "engine/defaults.h"

#include "base/buf.h"
#include "base/file.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool defaults_is_eos(const struct defaults *defaults, int32_t id)
{
    for (uint32_t i = 0; i < defaults->eos_count; i++)
        if (defaults->eos[i] == id)
            return true;
    return false;
}

static bool defaults_add_eos(struct defaults *d, const json_t *value, uint32_t vocab,
                             struct err *err)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) >= vocab)
        return err_set(err, ERR_INPUT, "eos_token_id must hold token ids below %u", vocab);
    int32_t id = (int32_t)json_integer_value(value);
    if (defaults_is_eos(d, id))
        return true;
    if (d->eos_count == DEFAULTS_MAX_EOS)
        return err_set(err, ERR_INPUT, "eos_token_id names too many ids");
    d->eos[d->eos_count++] = id;
    return true;
}

static bool defaults_read_eos(struct defaults *d, const json_t *root, uint32_t vocab,
                              struct err *err)
{
    const json_t *value = json_object_get(root, "eos_token_id");
    if (!value || json_is_null(value))
        return true;
    if (!json_is_array(value))
        return defaults_add_eos(d, value, vocab, err);
    size_t i;
    const json_t *item;
    json_array_foreach(value, i, item)
    {
        if (!defaults_add_eos(d, item, vocab, err))
            return false;
    }
    return true;
}

static bool defaults_read_float(const json_t *root, const char *field, float *out, struct err *err)
{
    const json_t *value = json_object_get(root, field);
    if (!value || json_is_null(value))
        return true;
    if (!json_is_number(value))
        return err_set(err, ERR_INPUT, "%s must be a number", field);
    *out = (float)json_number_value(value);
    return true;
}

static bool defaults_read_sampling(struct sampler_options *s, const json_t *root, struct err *err)
{
    float top_k = 0;
    s->temperature = 1;
    if (!defaults_read_float(root, "temperature", &s->temperature, err) ||
        !defaults_read_float(root, "top_k", &top_k, err) ||
        !defaults_read_float(root, "top_p", &s->top_p, err) ||
        !defaults_read_float(root, "min_p", &s->min_p, err) ||
        !defaults_read_float(root, "repetition_penalty", &s->repetition_penalty, err) ||
        !defaults_read_float(root, "presence_penalty", &s->presence_penalty, err) ||
        !defaults_read_float(root, "frequency_penalty", &s->frequency_penalty, err))
        return false;
    if (!(top_k >= 0 && top_k <= 1e9f && top_k == floorf(top_k)))
        return err_set(err, ERR_INPUT, "top_k must be a whole number");
    s->top_k = (uint32_t)top_k;
    if (!json_is_true(json_object_get(root, "do_sample")))
        s->temperature = 0;
    return sampler_check(s, err);
}

static bool defaults_read_thinking(struct defaults *d, const json_t *root, struct err *err)
{
    const json_t *value = json_object_get(root, "enable_thinking");
    if (value && !json_is_boolean(value) && !json_is_null(value))
        return err_set(err, ERR_INPUT, "enable_thinking must be true or false");
    d->thinking = !json_is_false(value);
    return true;
}

bool defaults_read(const char *folder, const struct config *config, struct defaults *out,
                   struct err *err)
{
    memset(out, 0, sizeof *out);
    out->thinking = true;
    out->sampling.top_p = 1;
    out->sampling.repetition_penalty = 1;
    out->sampling.vocab = config->vocab;
    out->eos_count = config->eos_count;
    memcpy(out->eos, config->eos, config->eos_count * sizeof *config->eos);

    char *path = file_join(folder, "generation_config.json");
    bool there, ok = file_find_regular(path, &there, err);
    if (ok && there) {
        struct buf text = {0};
        json_error_t error;
        json_t *root = NULL;
        ok = file_read_regular(path, 1 << 20, &text, err);
        if (ok && !(root = json_loadb(text.data ? text.data : "", text.len, JSON_REJECT_DUPLICATES,
                                      &error)))
            ok = err_set(err, ERR_INPUT, "%s: line %d: %s", path, error.line, error.text);
        else if (ok && (!defaults_read_eos(out, root, config->vocab, err) ||
                        !defaults_read_sampling(&out->sampling, root, err) ||
                        !defaults_read_thinking(out, root, err))) {
            err->kind = ERR_INPUT;
            ok = err_wrap(err, "%s", path);
        }
        json_decref(root);
        buf_free(&text);
    }
    free(path);
    return ok;
}
