/* Owns nothing: reads an answer's body into its options. Ranges that sampler_check would refuse are
 * refused here, by the field's own name. */
#include "server/request.h"

#include "base/mem.h"
#include "text/word.h"

#include <stdlib.h>
#include <string.h>

enum { REQUEST_MAX_STOP_BYTES = 1024, REQUEST_MAX_NAME = 256, REQUEST_MAX_BIAS = 4096 };

bool request_read_head(struct answer *a, struct fault *fault)
{
    if (!fields_read_text(a->body, "model", &a->model, fault) ||
        !fields_read_bool(a->body, "stream", &a->stream, fault))
        return false;
    if (strlen(a->model) > REQUEST_MAX_NAME)
        return fault_set(fault, "model", "'model' is longer than %d bytes", REQUEST_MAX_NAME);
    return true;
}

bool request_read_stream_options(struct answer *a, struct fault *fault)
{
    static const struct field table[] = {
        {"include_usage", FIELD_HONOURED}, {"include_obfuscation", FIELD_IGNORED}, {NULL, 0}};
    json_t *options;
    if (!fields_read_typed(a->body, "stream_options", JSON_OBJECT, &options, fault))
        return false;
    if (!options)
        return true;
    if (!a->stream)
        return fault_set(fault, "stream_options", "'stream_options' needs \"stream\": true");
    return fields_check(options, table, "stream_options", fault) &&
           fields_read_bool(options, "include_usage", &a->include_usage, fault);
}

static bool request_read_bias(struct answer *a, struct fault *fault)
{
    json_t *bias, *value;
    const char *key;
    uint32_t vocab = engine_sampling(a->server->engine).vocab;
    if (!fields_read_typed(a->body, "logit_bias", JSON_OBJECT, &bias, fault))
        return false;
    if (!bias)
        return true;
    if (json_object_size(bias) > REQUEST_MAX_BIAS)
        return fault_set(fault, "logit_bias", "'logit_bias' has more than %d entries",
                         REQUEST_MAX_BIAS);
    a->bias = mem_new(json_object_size(bias) + 1, sizeof *a->bias);
    json_object_foreach(bias, key, value)
    {
        char *end;
        unsigned long id = strtoul(key, &end, 10);
        double amount = json_number_value(value);
        if (!*key || *end || key[0] == '-' || id >= vocab)
            return fault_set(fault, "logit_bias",
                             "'logit_bias': '%.40s' is not a token id below %u", key, vocab);
        if (!json_is_number(value) || !(amount >= -100 && amount <= 100))
            return fault_set(fault, "logit_bias", "'logit_bias' wants numbers from -100 to 100");
        a->bias[a->sampling.bias_count++] =
            (struct sampler_bias){.id = (int32_t)id, .bias = (float)amount};
    }
    a->sampling.bias = a->bias;
    return true;
}

/* top_k: 0 and -1 both mean off. */
static bool request_read_top_k(struct answer *a, struct fault *fault)
{
    const json_t *value = fields_get(a->body, "top_k");
    uint64_t n = a->sampling.top_k;
    if (json_is_integer(value) && json_integer_value(value) == -1)
        n = 0;
    else if (!fields_read_uint(a->body, "top_k", 0, INT32_MAX, &n, fault))
        return false;
    a->sampling.top_k = (uint32_t)n;
    return true;
}

static bool request_read_seed(struct answer *a, struct fault *fault)
{
    json_t *seed;
    if (!fields_read_typed(a->body, "seed", JSON_INTEGER, &seed, fault))
        return false;
    if (seed) {
        a->sampling.seed = (uint64_t)json_integer_value(seed);
    } else {
        char random[48];
        answer_make_id("", random, sizeof random);
        random[16] = 0;
        a->sampling.seed = strtoull(random, NULL, 16);
    }
    return true;
}

bool request_read_sampling(struct answer *a, bool thinking, struct fault *fault)
{
    struct sampler_options *s = &a->sampling;
    if (!thinking && s->temperature > 0) {
        s->temperature = s->temperature < 0.7f ? s->temperature : 0.7f;
        s->top_p = s->top_p < 0.8f ? s->top_p : 0.8f;
    }
    if (!fields_read_float(a->body, "temperature", 0, 100, &s->temperature, fault) ||
        !fields_read_float(a->body, "top_p", 0, 1, &s->top_p, fault) ||
        !fields_read_float(a->body, "min_p", 0, 1, &s->min_p, fault) ||
        !fields_read_float(a->body, "repetition_penalty", 1e-6, 10, &s->repetition_penalty,
                           fault) ||
        !fields_read_float(a->body, "presence_penalty", -2, 2, &s->presence_penalty, fault) ||
        !fields_read_float(a->body, "frequency_penalty", -2, 2, &s->frequency_penalty, fault) ||
        !request_read_top_k(a, fault) || !request_read_seed(a, fault) ||
        !request_read_bias(a, fault))
        return false;
    struct err err = {0};
    return sampler_check(s, &err) || fault_from_err(fault, &err);
}

static bool request_add_stop(struct answer *a, const char *name, const json_t *value,
                             struct fault *fault)
{
    if (!json_is_string(value))
        return fault_set(fault, name, "'%s' must be text or a list of texts", name);
    size_t n = json_string_length(value);
    if (n == 0 || n > REQUEST_MAX_STOP_BYTES || !word_text(value))
        return fault_set(fault, name,
                         "each text of '%s' must have 1 to %d bytes and no zero character", name,
                         REQUEST_MAX_STOP_BYTES);
    if (a->stop_count == ANSWER_MAX_STOPS)
        return fault_set(fault, name, "'%s' has more than %d texts", name, ANSWER_MAX_STOPS);
    a->stop[a->stop_count++] = json_string_value(value);
    return true;
}

bool request_read_stops(struct answer *a, const char *name, struct fault *fault)
{
    const json_t *stop = fields_get(a->body, name);
    if (!stop)
        return true;
    if (!json_is_array(stop))
        return request_add_stop(a, name, stop, fault);
    for (size_t i = 0; i < json_array_size(stop); i++)
        if (!request_add_stop(a, name, json_array_get(stop, i), fault))
            return false;
    return true;
}

bool request_read_limit(struct answer *a, const char *const *names, struct fault *fault)
{
    for (; *names; names++) {
        uint64_t n = 0;
        if (!fields_read_uint(a->body, *names, 1, UINT32_MAX, &n, fault))
            return false;
        if (n && !a->max_tokens)
            a->max_tokens = (uint32_t)n;
    }
    return true;
}
