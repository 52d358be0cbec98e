/* The weights of a synthetic checkpoint.
 *
 * Invariant: the bytes of a chunk depend on the seed, the tensor's name and the chunk's number
 * only, so neither threads nor the order of work change them. */
#include "model/synth.h"

#include "base/bf16.h"
#include "base/mem.h"
#include "base/rand.h"
#include "model/jobs.h"
#include "model/writer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SYNTH_CHUNK = 4 << 20, SYNTH_NAME_MAX = 128 };
static const uint64_t SYNTH_SHARD_BYTES = 5000000000;

enum synth_fill {
    SYNTH_CODES,   /* u32: uniform codes are uniform bits, whatever their width */
    SYNTH_SCALES,  /* bf16: of either sign */
    SYNTH_BIASES,  /* bf16: minus the scale times the middle code, give or take half a code */
    SYNTH_NORMAL,  /* bf16: mean + spread * normal */
    SYNTH_A_LOG,   /* bf16: log of uniform 0.5 .. 8 */
    SYNTH_DT_BIAS, /* bf16: softplus of it is log-uniform 0.001 .. 0.1 */
};

struct synth_tensor { /* how to fill writer tensor number i */
    enum synth_fill fill;
    uint64_t seed; /* scales and biases of a module share theirs */
    uint32_t bits;
    float mean, spread; /* SYNTH_SCALES, SYNTH_BIASES: spread is the mean |scale| */
};

struct synth {
    const struct config *config;
    const struct synth_options *options;
    struct writer_tensor *tensors;
    struct synth_tensor *fills;
    uint32_t count, cap;
    struct writer writer;
    struct synth_chunk { /* work: [chunks] */
        uint32_t tensor;
        uint64_t at;
    } * chunks;
    uint64_t chunk_count;
};

/* ---- the list of tensors ------------------------------------------------------------------- */

static uint64_t synth_hash(uint64_t seed, const char *name)
{
    struct rand r = {.state = seed};
    uint64_t h = rand_u64(&r);
    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 0x100000001b3u;
    return h;
}

static void synth_add(struct synth *s, const char *module, const char *suffix,
                      enum safetensors_dtype dtype, const uint64_t *shape, uint32_t rank,
                      struct synth_tensor fill)
{
    char name[SYNTH_NAME_MAX];
    int n = snprintf(name, sizeof name, "language_model.%s%s", module, suffix);
    if (s->count == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 256;
        s->tensors = mem_grow(s->tensors, s->cap, sizeof *s->tensors);
        s->fills = mem_grow(s->fills, s->cap, sizeof *s->fills);
    }
    struct writer_tensor *t = &s->tensors[s->count];
    *t = (struct writer_tensor){
        .name = mem_copy_text(name, (size_t)n), .dtype = dtype, .rank = rank};
    memcpy(t->shape, shape, rank * sizeof *shape);
    fill.seed = synth_hash(s->options->seed, fill.fill == SYNTH_CODES ? name : module);
    s->fills[s->count++] = fill;
}

static void synth_add_vector(struct synth *s, const char *name, uint64_t n, enum synth_fill fill,
                             float mean, float spread)
{
    synth_add(s, name, "", SAFETENSORS_BF16, &n, 1,
              (struct synth_tensor){.fill = fill, .mean = mean, .spread = spread});
}

/* `gain` times the spread that keeps outputs as large as inputs, 1 / sqrt(cols). */
static void synth_add_matrix(struct synth *s, const char *module, uint32_t bits, uint64_t count,
                             uint64_t rows, uint64_t cols, float gain)
{
    uint64_t group = s->options->group, shape[3] = {count, rows, cols};
    const uint64_t *dims = count > 1 ? shape : shape + 1;
    uint32_t rank = count > 1 ? 3 : 2;
    float spread = gain / sqrtf((float)cols);
    if (!synth_is_quantised(s->options, (uint32_t)cols)) {
        synth_add(s, module, ".weight", SAFETENSORS_BF16, dims, rank,
                  (struct synth_tensor){.fill = SYNTH_NORMAL, .spread = spread});
        return;
    }
    /* Codes uniform on 0 .. n have the variance n (n + 2) / 12; the factor 1.04 is for scales that
     * vary from 0.5 to 1.5 times their mean. */
    float n = (float)((1u << bits) - 1), scale = spread / (sqrtf(n * (n + 2) / 12) * 1.04f);
    struct synth_tensor fill = {.fill = SYNTH_CODES, .bits = bits, .spread = scale};
    shape[2] = cols * bits / 32;
    synth_add(s, module, ".weight", SAFETENSORS_U32, dims, rank, fill);
    shape[2] = cols / group;
    fill.fill = SYNTH_SCALES;
    synth_add(s, module, ".scales", SAFETENSORS_BF16, dims, rank, fill);
    fill.fill = SYNTH_BIASES;
    synth_add(s, module, ".biases", SAFETENSORS_BF16, dims, rank, fill);
}

struct synth_linear {
    const char *name;
    uint32_t bits;
    uint64_t count, rows, cols;
    float gain;
};

static void synth_add_linears(struct synth *s, uint32_t layer, const struct synth_linear *linears,
                              size_t n)
{
    char name[SYNTH_NAME_MAX];
    for (size_t i = 0; i < n; i++) {
        const struct synth_linear *l = &linears[i];
        snprintf(name, sizeof name, "model.layers.%u.%s", layer, l->name);
        synth_add_matrix(s, name, l->bits, l->count, l->rows, l->cols, l->gain);
    }
}

static void synth_add_layer_vector(struct synth *s, uint32_t layer, const char *name, uint64_t n,
                                   enum synth_fill fill, float mean, float spread)
{
    char path[SYNTH_NAME_MAX];
    snprintf(path, sizeof path, "model.layers.%u.%s", layer, name);
    synth_add_vector(s, path, n, fill, mean, spread);
}

static void synth_add_mixer(struct synth *s, uint32_t layer)
{
    const struct config *c = s->config;
    uint64_t head = CONFIG_HEAD_DIM, dim = CONFIG_DELTA_DIM, values = c->value_heads * dim;
    uint64_t channels = 2 * c->key_heads * dim + values;
    uint32_t bits = s->options->bits;
    if (c->full_attention[layer]) {
        const struct synth_linear linears[] = {
            {"self_attn.q_proj", bits, 1, c->heads * head * 2, c->hidden, 1},
            {"self_attn.k_proj", bits, 1, c->kv_heads * head, c->hidden, 1},
            {"self_attn.v_proj", bits, 1, c->kv_heads * head, c->hidden, 1},
            {"self_attn.o_proj", bits, 1, c->hidden, c->heads * head, 2},
        };
        synth_add_linears(s, layer, linears, 4);
        synth_add_layer_vector(s, layer, "self_attn.q_norm.weight", head, SYNTH_NORMAL, 1.2f, 0.1f);
        synth_add_layer_vector(s, layer, "self_attn.k_norm.weight", head, SYNTH_NORMAL, 1.2f, 0.1f);
        return;
    }
    const struct synth_linear linears[] = {
        {"linear_attn.in_proj_qkv", bits, 1, channels, c->hidden, 1},
        {"linear_attn.in_proj_z", bits, 1, values, c->hidden, 1},
        {"linear_attn.in_proj_a", bits, 1, c->value_heads, c->hidden, 0.5f},
        {"linear_attn.in_proj_b", bits, 1, c->value_heads, c->hidden, 1},
        {"linear_attn.out_proj", bits, 1, c->hidden, values, 1},
    };
    synth_add_linears(s, layer, linears, 5);
    char path[SYNTH_NAME_MAX];
    const uint64_t taps[] = {channels, CONFIG_CONV_TAPS, 1};
    snprintf(path, sizeof path, "model.layers.%u.linear_attn.conv1d.weight", layer);
    synth_add(s, path, "", SAFETENSORS_BF16, taps, 3,
              (struct synth_tensor){.fill = SYNTH_NORMAL, .spread = 0.5f});
    synth_add_layer_vector(s, layer, "linear_attn.A_log", c->value_heads, SYNTH_A_LOG, 0, 0);
    synth_add_layer_vector(s, layer, "linear_attn.dt_bias", c->value_heads, SYNTH_DT_BIAS, 0, 0);
    synth_add_layer_vector(s, layer, "linear_attn.norm.weight", dim, SYNTH_NORMAL, 1, 0.05f);
}

static void synth_list(struct synth *s)
{
    const struct config *c = s->config;
    uint32_t bits = s->options->bits;
    synth_add_matrix(s, "model.embed_tokens", bits, 1, c->vocab, c->hidden,
                     sqrtf((float)c->hidden));
    for (uint32_t i = 0; i < c->layers; i++) {
        const struct synth_linear moe[] = {
            {"mlp.gate", 8, 1, c->experts, c->hidden, 1.5f},
            {"mlp.shared_expert_gate", 8, 1, 1, c->hidden, 1},
            {"mlp.switch_mlp.gate_proj", bits, c->experts, c->width, c->hidden, 1},
            {"mlp.switch_mlp.up_proj", bits, c->experts, c->width, c->hidden, 1},
            {"mlp.switch_mlp.down_proj", bits, c->experts, c->hidden, c->width, 2},
            {"mlp.shared_expert.gate_proj", bits, 1, c->shared_width, c->hidden, 1},
            {"mlp.shared_expert.up_proj", bits, 1, c->shared_width, c->hidden, 1},
            {"mlp.shared_expert.down_proj", bits, 1, c->hidden, c->shared_width, 1},
        };
        synth_add_layer_vector(s, i, "input_layernorm.weight", c->hidden, SYNTH_NORMAL, 1, 0.1f);
        synth_add_mixer(s, i);
        synth_add_layer_vector(s, i, "post_attention_layernorm.weight", c->hidden, SYNTH_NORMAL, 1,
                               0.1f);
        synth_add_linears(s, i, moe, 8);
    }
    synth_add_vector(s, "model.norm.weight", c->hidden, SYNTH_NORMAL, 1, 0.1f);
    if (!c->tie_embeddings)
        synth_add_matrix(s, "lm_head", bits, 1, c->vocab, c->hidden, 2.5f);
}

/* ---- the bytes ----------------------------------------------------------------------------- */

/* Scale number i of a module: what scales and biases both start from. */
static float synth_scale(struct rand *r, const struct synth_tensor *t, float *jitter)
{
    uint64_t u = rand_u64(r);
    float size = 0.5f + (float)(u & 0xffffff) * 0x1p-24f;
    *jitter = (float)(u >> 24 & 0xffffff) * 0x1p-24f - 0.5f;
    return bf16_round((u >> 63 ? -1 : 1) * size * t->spread);
}

static float synth_value(struct rand *r, const struct synth_tensor *t)
{
    float jitter, scale;
    switch (t->fill) {
    case SYNTH_SCALES:
        return synth_scale(r, t, &jitter);
    case SYNTH_BIASES:
        scale = synth_scale(r, t, &jitter);
        return -scale * ((float)((1u << t->bits) - 1) * 0.5f + jitter);
    case SYNTH_A_LOG:
        return logf(0.5f + 7.5f * (float)rand_unit(r));
    case SYNTH_DT_BIAS: {
        float dt = 0.001f * expf(logf(100) * (float)rand_unit(r));
        return logf(expm1f(dt));
    }
    default:
        return t->mean + t->spread * rand_normal(r);
    }
}

/* Chunks start at multiples of SYNTH_CHUNK, so values never straddle two. */
static void synth_fill_chunk(const struct synth_tensor *t, uint64_t at, uint8_t *out,
                             uint64_t bytes)
{
    struct rand r = {.state = t->seed ^ (at / SYNTH_CHUNK + 1) * 0xd1342543de82ef95u};
    r.state = rand_u64(&r);
    if (t->fill == SYNTH_CODES) {
        for (uint64_t i = 0; i < bytes; i += 8) {
            uint64_t u = rand_u64(&r);
            memcpy(out + i, &u, bytes - i < 8 ? bytes - i : 8);
        }
        return;
    }
    for (uint64_t i = 0; i < bytes; i += 2) {
        uint16_t h = bf16_from_f32(synth_value(&r, t));
        memcpy(out + i, &h, 2);
    }
}

static bool synth_work_chunk(void *user, uint64_t chunk, void *buffer, struct err *err)
{
    struct synth *s = user;
    const struct synth_chunk *c = &s->chunks[chunk];
    const struct writer_tensor *t = &s->writer.tensors[c->tensor];
    uint64_t bytes = t->bytes - c->at < SYNTH_CHUNK ? t->bytes - c->at : SYNTH_CHUNK;
    synth_fill_chunk(&s->fills[c->tensor], c->at, buffer, bytes);
    return writer_write(&s->writer, c->tensor, c->at, buffer, bytes, err);
}

static void synth_list_chunks(struct synth *s)
{
    for (int pass = 0; pass < 2; pass++) {
        uint64_t n = 0;
        for (uint32_t i = 0; i < s->writer.count; i++)
            for (uint64_t at = 0; at < s->writer.tensors[i].bytes; at += SYNTH_CHUNK, n++)
                if (pass)
                    s->chunks[n] = (struct synth_chunk){.tensor = i, .at = at};
        if (!pass)
            s->chunks = mem_new(n, sizeof *s->chunks);
        s->chunk_count = n;
    }
}

static bool synth_write_weights(struct synth *s, struct err *err)
{
    synth_list_chunks(s);
    bool ok = jobs_run(&(struct jobs){.count = s->chunk_count,
                                      .threads = s->options->threads,
                                      .scratch_bytes = SYNTH_CHUNK,
                                      .run = synth_work_chunk,
                                      .user = s,
                                      .progress = s->options->progress,
                                      .progress_user = s->options->progress_user},
                       err);
    free(s->chunks);
    return ok;
}

/* ---- public -------------------------------------------------------------------------------- */

bool synth_is_quantised(const struct synth_options *options, uint32_t cols)
{
    return cols % options->group == 0;
}

void synth_preset(struct config *config)
{
    *config = (struct config){
        .vocab = 248320,
        .hidden = 2048,
        .layers = 40,
        .attention_layers = 10,
        .delta_layers = 30,
        .heads = 16,
        .kv_heads = 2,
        .rope_theta = 1e7f,
        .eps = 1e-6f,
        .key_heads = 16,
        .value_heads = 32,
        .experts = 256,
        .topk = 8,
        .width = 512,
        .shared_width = 512,
        .renormalise = true,
        .max_ctx = 262144,
    };
    config->full_attention = mem_new(config->layers, sizeof *config->full_attention);
    for (uint32_t i = 0; i < config->layers; i++)
        config->full_attention[i] = i % 4 == 3;
}

bool synth_write(const struct config *config, const struct synth_options *options,
                 const char *folder, struct err *err)
{
    struct synth s = {.config = config, .options = options};
    if (config->vocab < synth_vocab_min())
        return err_set(err, ERR_USAGE, "a synthetic vocabulary has at least %u ids, not %u",
                       synth_vocab_min(), config->vocab);
    synth_list(&s);
    bool ok = writer_open(&s.writer, folder, s.tensors, s.count, SYNTH_SHARD_BYTES, err);
    if (ok) {
        ok = synth_write_weights(&s, err) && writer_finish(&s.writer, err) &&
             synth_write_texts(config, options, folder, err);
        writer_close(&s.writer);
    }
    free(s.fills);
    return ok;
}
