/* A checkpoint folder to struct model, in two steps: a plan that looks at names, shapes and dtypes
 * only, then the bytes.
 *
 * Invariant: nothing of the size of the weights is allocated, locked or handed to the device before
 * the plan of the whole checkpoint stands and every tensor is accounted for. */
#include "model/weights.h"

#include "base/mem.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

struct weights_loader {
    const char *folder;
    struct model *model;
    struct model_files *files;
    bool plus_one; /* norm gains are stored less 1 */
    struct err *err;
};

enum { WEIGHTS_PATH_MAX = 160 };

/* ---- plan: vectors ------------------------------------------------------------------------- */

static struct shards_tensor *weights_take(struct weights_loader *l, const char *path)
{
    struct shards_tensor *t = shards_find(&l->files->shards, path);
    if (!t) {
        err_set(l->err, ERR_INPUT,
                "the checkpoint in %s has no tensor %s; a shard is missing from the index or the "
                "config belongs to another model",
                l->folder, path);
        return NULL;
    }
    t->used = true;
    return t;
}

static bool weights_bad_shape(struct weights_loader *l, const struct shards_tensor *t,
                              const char *wanted)
{
    char have[128];
    safetensors_print_shape(t->tensor, have, sizeof have);
    return err_set(l->err, ERR_INPUT, "tensor %s is %s %s, but config.json asks for %s",
                   t->tensor->name, safetensors_dtype_name(t->tensor->dtype), have, wanted);
}

/* A vector of n floats, or the taps of a convolution as [n/4, 1, 4] or [n/4, 4, 1]: both lie in
 * memory as 4 taps a channel, oldest first. */
static bool weights_plan_vector(struct weights_loader *l, const char *path, uint64_t n,
                                bool plus_one, uint64_t *part, struct span *span)
{
    const struct shards_tensor *found = weights_take(l, path);
    if (!found)
        return false;
    const struct safetensors_tensor *t = found->tensor;
    uint64_t elements = 1;
    for (uint32_t i = 0; i < t->rank; i++)
        elements *= t->shape[i];
    bool shaped = elements == n && (t->rank == 1 || (t->rank == 3 && t->shape[0] == n / 4));
    bool typed =
        t->dtype == SAFETENSORS_F32 || t->dtype == SAFETENSORS_BF16 || t->dtype == SAFETENSORS_F16;
    if (!shaped || !typed) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, "%llu values of F32, BF16 or F16", (unsigned long long)n);
        return weights_bad_shape(l, found, wanted);
    }
    struct model_files *files = l->files;
    files->vectors[files->vector_count++] =
        (struct weights_vector){.span = span, .tensor = found, .plus_one = plus_one};
    *part += t->bytes;
    l->model->bytes.parameters += n;
    l->model->bytes.active_parameters += n;
    return true;
}

/* ---- plan: matrices ------------------------------------------------------------------------ */

static bool weights_has_shape(const struct safetensors_tensor *t, uint32_t count, uint64_t rows,
                              uint64_t cols)
{
    if (t->rank == 2)
        return count == 1 && t->shape[0] == rows && t->shape[1] == cols;
    return t->rank == 3 && t->shape[0] == count && t->shape[1] == rows && t->shape[2] == cols;
}

static bool weights_plan_plain(struct weights_loader *l, const struct shards_tensor *data,
                               uint32_t fused, struct weight *w)
{
    enum safetensors_dtype dtype = data->tensor->dtype;
    if ((dtype != SAFETENSORS_BF16 && dtype != SAFETENSORS_F32) ||
        !weights_has_shape(data->tensor, w->count, (uint64_t)fused * w->rows, w->cols)) {
        char wanted[96];
        if (w->count > 1)
            snprintf(wanted, sizeof wanted, "BF16 [%u, %u, %u]", w->count, fused * w->rows,
                     w->cols);
        else
            snprintf(wanted, sizeof wanted, "BF16 [%u, %u]", fused * w->rows, w->cols);
        return weights_bad_shape(l, data, wanted);
    }
    w->kind = dtype == SAFETENSORS_F32 ? WEIGHT_F32 : WEIGHT_BF16;
    return true;
}

/* The bits and group that the shapes of codes [.., rows, cols * bits / 32] and scales
 * [.., rows, cols / group] speak of; zeros when they fit none. */
static struct config_quant weights_quant_of_shapes(const struct weight *w,
                                                   const struct safetensors_tensor *data,
                                                   const struct safetensors_tensor *scales)
{
    static const uint32_t bits[] = {2, 3, 4, 5, 6, 8}, groups[] = {32, 64, 128};
    struct config_quant q = {0};
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++)
        if (weights_has_shape(data, w->count, w->rows, (uint64_t)w->cols * bits[i] / 32) &&
            (uint64_t)w->cols * bits[i] % 32 == 0)
            q.bits = bits[i];
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (w->cols % groups[i] == 0 &&
            weights_has_shape(scales, w->count, w->rows, w->cols / groups[i]))
            q.group = groups[i];
    return q;
}

static bool weights_plan_affine(struct weights_loader *l, const char *module,
                                struct config_quant claim, struct weights_matrix *m)
{
    struct weight *w = m->weight;
    char path[WEIGHTS_PATH_MAX], have[128], wanted[192];
    snprintf(path, sizeof path, "%s.scales", module);
    if (!(m->scales = weights_take(l, path)))
        return false;
    snprintf(path, sizeof path, "%s.biases", module);
    if (!(m->biases = weights_take(l, path)))
        return false;
    const struct safetensors_tensor *data = m->data->tensor, *scales = m->scales->tensor;
    if (data->dtype != SAFETENSORS_U32)
        return weights_bad_shape(l, m->data, "U32 codes, since the module has scales");
    struct config_quant q = weights_quant_of_shapes(w, data, scales);
    if (!q.bits || !q.group) {
        snprintf(wanted, sizeof wanted,
                 "codes of %u x [%u, %u] weights in 2, 3, 4, 5, 6 or 8 bits with scales for groups "
                 "of 32, 64 or 128",
                 w->count, w->rows, w->cols);
        return weights_bad_shape(l, q.bits ? m->scales : m->data, wanted);
    }
    if (!claim.bits)
        return err_set(l->err, ERR_INPUT,
                       "tensor %s holds %u-bit codes, but config.json says that it is not "
                       "quantised; take config.json from the same checkpoint as the weights",
                       data->name, q.bits);
    if (q.bits != claim.bits || q.group != claim.group)
        return err_set(l->err, ERR_INPUT,
                       "tensor %s: config.json claims %u bits in groups of %u, its shape holds %u "
                       "bits in groups of %u; take config.json from the same checkpoint",
                       data->name, claim.bits, claim.group, q.bits, q.group);
    safetensors_print_shape(scales, have, sizeof have);
    if (scales->dtype != SAFETENSORS_BF16)
        return weights_bad_shape(l, m->scales, "BF16 scales");
    if (m->biases->tensor->dtype != SAFETENSORS_BF16 ||
        !weights_has_shape(m->biases->tensor, w->count, w->rows, w->cols / q.group)) {
        snprintf(wanted, sizeof wanted, "BF16 biases shaped as the scales, %s", have);
        return weights_bad_shape(l, m->biases, wanted);
    }
    w->kind = WEIGHT_AFFINE;
    w->bits = q.bits;
    w->group = q.group;
    return true;
}

uint64_t weights_matrix_bytes(const struct weights_matrix *m)
{
    const struct weight *w = m->weight;
    uint64_t n = m->data->tensor->bytes;
    /* Where a tensor holds two matrices, half of it each. */
    n = n / w->expert_stride * w->rows;
    return n + (m->scales ? m->scales->tensor->bytes + m->biases->tensor->bytes : 0);
}

/* Plans `count` matrices [rows, cols] of `module`. `fused` > 1: the tensor holds fused matrices one
 * below the other, of which this is number `index`; such tensors have no ".weight". */
static bool weights_plan_matrix(struct weights_loader *l, const char *module, uint32_t count,
                                uint64_t rows, uint64_t cols, uint32_t fused, uint32_t index,
                                uint64_t *part, struct weight *w)
{
    struct model_files *files = l->files;
    struct weights_matrix m = {.weight = w};
    char path[WEIGHTS_PATH_MAX];
    assert(rows <= UINT32_MAX / 2 && cols <= UINT32_MAX);
    *w = (struct weight){.count = count,
                         .rows = (uint32_t)rows,
                         .cols = (uint32_t)cols,
                         .expert_stride = (uint32_t)(fused ? fused * rows : rows)};
    snprintf(path, sizeof path, fused ? "%s" : "%s.weight", module);
    if (!(m.data = weights_take(l, path)))
        return false;
    struct config_quant claim = config_quant_of(&l->model->config, module);
    snprintf(path, sizeof path, "%s.scales", module);
    if (!fused && (shards_find(&files->shards, path) || m.data->tensor->dtype == SAFETENSORS_U32)) {
        if (!weights_plan_affine(l, module, claim, &m))
            return false;
    } else if (claim.bits && claim.named) {
        /* The default alone claims nothing: modules that no group fits stay unquantised. */
        return err_set(l->err, ERR_INPUT,
                       "tensor %s: config.json claims %u bits for this module, but it has no "
                       "scales; take config.json from the same checkpoint",
                       m.data->tensor->name, claim.bits);
    } else if (!weights_plan_plain(l, m.data, fused ? fused : 1, w)) {
        return false;
    }
    m.skip = index * rows * cols * (w->kind == WEIGHT_F32 ? 4 : 2);
    files->matrices[files->matrix_count++] = m;
    *part += weights_matrix_bytes(&m);
    l->model->bytes.parameters += count * rows * cols;
    return true;
}

/* ---- plan: the parts of the model ---------------------------------------------------------- */

/* "layers.N.name" into path, which has WEIGHTS_PATH_MAX bytes. */
static const char *weights_path(char *path, uint32_t layer, const char *name)
{
    snprintf(path, WEIGHTS_PATH_MAX, "layers.%u.%s", layer, name);
    return path;
}

struct weights_linear {
    const char *name;
    uint64_t rows, cols;
    struct weight *weight;
};

static bool weights_plan_linears(struct weights_loader *l, uint32_t layer, uint64_t *part,
                                 const struct weights_linear *linears, size_t n)
{
    char path[WEIGHTS_PATH_MAX];
    for (size_t i = 0; i < n; i++) {
        if (!weights_plan_matrix(l, weights_path(path, layer, linears[i].name), 1, linears[i].rows,
                                 linears[i].cols, 0, 0, part, linears[i].weight))
            return false;
        l->model->bytes.active_parameters += linears[i].rows * linears[i].cols;
    }
    return true;
}

static bool weights_plan_attention(struct weights_loader *l, uint32_t layer,
                                   struct model_attention *a)
{
    const struct config *c = &l->model->config;
    uint64_t dim = CONFIG_HEAD_DIM, *part = &l->model->bytes.attention;
    const struct weights_linear linears[] = {
        {"self_attn.q_proj", c->heads * dim * 2, c->hidden, &a->q},
        {"self_attn.k_proj", c->kv_heads * dim, c->hidden, &a->k},
        {"self_attn.v_proj", c->kv_heads * dim, c->hidden, &a->v},
        {"self_attn.o_proj", c->hidden, c->heads * dim, &a->o},
    };
    char path[WEIGHTS_PATH_MAX];
    return weights_plan_linears(l, layer, part, linears, 4) &&
           weights_plan_vector(l, weights_path(path, layer, "self_attn.q_norm.weight"), dim,
                               l->plus_one, part, &a->q_norm) &&
           weights_plan_vector(l, weights_path(path, layer, "self_attn.k_norm.weight"), dim,
                               l->plus_one, part, &a->k_norm);
}

static bool weights_plan_delta(struct weights_loader *l, uint32_t layer, struct model_delta *d)
{
    const struct config *c = &l->model->config;
    uint64_t dim = CONFIG_DELTA_DIM, values = c->value_heads * dim, *part = &l->model->bytes.delta;
    uint64_t channels = 2 * c->key_heads * dim + values;
    const struct weights_linear linears[] = {
        {"linear_attn.in_proj_qkv", channels, c->hidden, &d->qkv},
        {"linear_attn.in_proj_z", values, c->hidden, &d->z},
        {"linear_attn.in_proj_a", c->value_heads, c->hidden, &d->a},
        {"linear_attn.in_proj_b", c->value_heads, c->hidden, &d->b},
        {"linear_attn.out_proj", c->hidden, values, &d->out},
    };
    char path[WEIGHTS_PATH_MAX];
    /* The gated norm's gain is stored as it is in both layouts: never plus 1. */
    return weights_plan_linears(l, layer, part, linears, 5) &&
           weights_plan_vector(l, weights_path(path, layer, "linear_attn.conv1d.weight"),
                               channels * CONFIG_CONV_TAPS, false, part, &d->conv) &&
           weights_plan_vector(l, weights_path(path, layer, "linear_attn.A_log"), c->value_heads,
                               false, part, &d->a_log) &&
           weights_plan_vector(l, weights_path(path, layer, "linear_attn.dt_bias"), c->value_heads,
                               false, part, &d->dt_bias) &&
           weights_plan_vector(l, weights_path(path, layer, "linear_attn.norm.weight"), dim, false,
                               part, &d->norm);
}

static bool weights_plan_experts(struct weights_loader *l, uint32_t layer, struct model_layer *out)
{
    const struct config *c = &l->model->config;
    uint64_t *part = &l->model->bytes.experts;
    char path[WEIGHTS_PATH_MAX];
    l->model->bytes.active_parameters += 3ull * c->topk * c->width * c->hidden;
    weights_path(path, layer, "mlp.experts.gate_up_proj");
    if (shards_find(&l->files->shards, path))
        return weights_plan_matrix(l, path, c->experts, c->width, c->hidden, 2, 0, part,
                                   &out->gate) &&
               weights_plan_matrix(l, path, c->experts, c->width, c->hidden, 2, 1, part,
                                   &out->up) &&
               weights_plan_matrix(l, weights_path(path, layer, "mlp.experts.down_proj"),
                                   c->experts, c->hidden, c->width, 1, 0, part, &out->down);
    return weights_plan_matrix(l, weights_path(path, layer, "mlp.switch_mlp.gate_proj"), c->experts,
                               c->width, c->hidden, 0, 0, part, &out->gate) &&
           weights_plan_matrix(l, weights_path(path, layer, "mlp.switch_mlp.up_proj"), c->experts,
                               c->width, c->hidden, 0, 0, part, &out->up) &&
           weights_plan_matrix(l, weights_path(path, layer, "mlp.switch_mlp.down_proj"), c->experts,
                               c->hidden, c->width, 0, 0, part, &out->down);
}

static bool weights_plan_layer(struct weights_loader *l, uint32_t layer)
{
    struct model *model = l->model;
    const struct config *c = &model->config;
    struct model_layer *out = &model->layers[layer];
    struct model_bytes *bytes = &model->bytes;
    const struct weights_linear routers[] = {
        {"mlp.gate", c->experts, c->hidden, &out->router},
        {"mlp.shared_expert_gate", 1, c->hidden, &out->shared_router},
    };
    const struct weights_linear shared[] = {
        {"mlp.shared_expert.gate_proj", c->shared_width, c->hidden, &out->shared_gate_proj},
        {"mlp.shared_expert.up_proj", c->shared_width, c->hidden, &out->shared_up},
        {"mlp.shared_expert.down_proj", c->hidden, c->shared_width, &out->shared_down},
    };
    char path[WEIGHTS_PATH_MAX];
    out->full_attention = c->full_attention[layer];
    if (!weights_plan_vector(l, weights_path(path, layer, "input_layernorm.weight"), c->hidden,
                             l->plus_one, &bytes->norms, &out->input_norm) ||
        !weights_plan_vector(l, weights_path(path, layer, "post_attention_layernorm.weight"),
                             c->hidden, l->plus_one, &bytes->norms, &out->post_norm))
        return false;
    if (!(out->full_attention ? weights_plan_attention(l, layer, &out->attention)
                              : weights_plan_delta(l, layer, &out->delta)))
        return false;
    return weights_plan_linears(l, layer, &bytes->router, routers, 2) &&
           weights_plan_linears(l, layer, &bytes->shared, shared, 3) &&
           weights_plan_experts(l, layer, out);
}

static bool weights_plan_head(struct weights_loader *l)
{
    struct model *model = l->model;
    const struct config *c = &model->config;
    struct model_bytes *bytes = &model->bytes;
    static const char *const parts[] = {"lm_head.weight", "lm_head.scales", "lm_head.biases"};
    bytes->active_parameters += (uint64_t)c->vocab * c->hidden;
    if (!c->tie_embeddings)
        return weights_plan_matrix(l, "lm_head", 1, c->vocab, c->hidden, 0, 0, &bytes->head,
                                   &model->head);
    /* Some exports of a tied model write the head all the same. */
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        struct shards_tensor *t = shards_find(&l->files->shards, parts[i]);
        if (t)
            t->used = true;
    }
    return true;
}

static bool weights_plan(struct weights_loader *l)
{
    struct model *model = l->model;
    const struct config *c = &model->config;
    struct model_bytes *b = &model->bytes;
    struct model_files *files = l->files;
    files->matrices = mem_new(2 + 14 * (size_t)c->layers, sizeof *files->matrices);
    files->vectors = mem_new(1 + 6 * (size_t)c->layers, sizeof *files->vectors);
    model->layers = mem_new(c->layers, sizeof *model->layers);
    l->plus_one = shards_is_unconverted(&files->shards);
    if (!weights_plan_matrix(l, "embed_tokens", 1, c->vocab, c->hidden, 0, 0, &b->embedding,
                             &model->embed) ||
        !weights_plan_head(l) ||
        !weights_plan_vector(l, "norm.weight", c->hidden, l->plus_one, &b->norms,
                             &model->final_norm))
        return false;
    for (uint32_t i = 0; i < c->layers; i++)
        if (!weights_plan_layer(l, i))
            return false;
    for (uint32_t i = 0; i < files->shards.count; i++)
        if (!files->shards.tensors[i].used)
            return err_set(l->err, ERR_INPUT,
                           "tensor %s is not part of the model that config.json describes",
                           files->shards.tensors[i].tensor->name);
    b->total = b->embedding + b->head + b->attention + b->delta + b->experts + b->shared +
               b->router + b->norms;
    uint64_t head = c->tie_embeddings ? b->embedding : b->head;
    b->per_token = b->embedding / c->vocab + head + b->attention + b->delta +
                   b->experts / c->experts * c->topk + b->shared + b->router + b->norms;
    return true;
}

/* ---- public -------------------------------------------------------------------------------- */

bool model_open(const char *folder, struct device *device, const struct model_options *options,
                struct model *model, struct err *err)
{
    static const struct model_options none = {0};
    *model = (struct model){.device = device};
    if (!config_open(folder, &model->config, err))
        return false;
    model->files = mem_new(1, sizeof *model->files);
    struct weights_loader l = {.folder = folder, .model = model, .files = model->files, .err = err};
    bool ok = shards_open(folder, &model->files->shards, err) && weights_plan(&l);
    if (ok && device)
        ok = resident_load(model, options ? options : &none, err);
    if (ok && model->config.tie_embeddings)
        model->head = model->embed;
    if (!ok)
        model_close(model);
    return ok;
}

void model_close(struct model *model)
{
    struct model_files *files = model->files;
    if (files) {
        resident_free(model);
        shards_close(&files->shards);
        free(files->matrices);
        free(files->vectors);
        free(files);
    }
    free(model->layers);
    config_close(&model->config);
    *model = (struct model){0};
}
