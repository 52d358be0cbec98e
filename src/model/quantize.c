#include "model/quantize.h"

#include "base/bf16.h"
#include "base/mem.h"
#include "model/jobs.h"
#include "model/model.h"
#include "model/shards.h"
#include "model/writer.h"

#include <assert.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUANTIZE_NAME_MAX = 192, QUANTIZE_BLOCK_WEIGHTS = 1 << 20, QUANTIZE_TEXT_MAX = 1 << 28 };
static const uint64_t QUANTIZE_SHARD_BYTES = 5000000000;

/* ---- rows ---------------------------------------------------------------------------------- */

/* codes: u8 [group] */
static void quantize_group(const float *w, uint32_t group, uint32_t bits, uint8_t *codes,
                           uint16_t *scale_out, uint16_t *bias_out)
{
    float n = (float)((1u << bits) - 1), lo = w[0], hi = w[0];
    for (uint32_t i = 1; i < group; i++) {
        lo = w[i] < lo ? w[i] : lo;
        hi = w[i] > hi ? w[i] : hi;
    }
    float s = fmaxf((hi - lo) / n, 1e-7f), edge = hi, scale = -s, bias = 0;
    if (fabsf(lo) > fabsf(hi)) {
        edge = lo;
        scale = s;
    }
    float q0 = roundf(edge / scale);
    if (q0 != 0) {
        scale = edge / q0;
        bias = edge;
    }
    for (uint32_t i = 0; i < group; i++) {
        float q = roundf((w[i] - bias) / scale);
        codes[i] = (uint8_t)(q > 0 ? (q < n ? q : n) : 0); /* a NaN becomes 0 */
    }
    *scale_out = bf16_from_f32(scale);
    *bias_out = bf16_from_f32(bias);
}

void quantize_row(const float *w, uint32_t cols, uint32_t bits, uint32_t group, uint32_t *codes,
                  uint16_t *scales, uint16_t *biases)
{
    uint8_t q[128];
    uint64_t pending = 0; /* codes not yet a whole word, the first lowest */
    uint32_t held = 0;
    assert(group <= sizeof q && cols % group == 0);
    for (uint32_t k = 0; k < cols; k += group) {
        quantize_group(w + k, group, bits, q, scales + k / group, biases + k / group);
        for (uint32_t i = 0; i < group; i++) {
            pending |= (uint64_t)q[i] << held;
            held += bits;
            if (held >= 32) {
                *codes++ = (uint32_t)pending;
                pending >>= 32;
                held -= 32;
            }
        }
    }
}

/* ---- the list of what is written ----------------------------------------------------------- */

/* A source tensor's rows first, first + 1, .. of each of `count` matrices that lie `stride` rows
 * apart, and where they go. bits 0: bytes are copied, or a norm's gains plus 1. */
struct quantize_part {
    const struct safetensors_tensor *source;
    uint64_t count, rows, cols, stride, first;
    uint32_t bits;
    bool plus_one;
    uint32_t target; /* codes (scales and biases follow), or the copy, in the writer's list */
};

struct quantize_block {
    uint32_t part;
    uint64_t row, rows; /* of count * rows */
};

struct quantize {
    const struct quantize_options *options;
    struct quantize_part *parts;
    struct writer_tensor *tensors;
    uint32_t part_count, tensor_count;
    struct quantize_block *blocks;
    uint64_t block_count;
    json_t *overrides; /* module path -> {bits, group_size} or false */
    json_t *modules;   /* paths of the matrices, below the model, as keys */
    struct writer writer;
};

static bool quantize_rule_fits(const struct quantize_rule *rule, const char *module)
{
    size_t n = strlen(module), m = strlen(rule->suffix);
    return m <= n && !strcmp(module + n - m, rule->suffix) && (m == n || module[n - m - 1] == '.');
}

static uint32_t quantize_bits_of(const struct quantize_options *o, const char *module)
{
    uint32_t bits = o->bits;
    for (uint32_t i = 0; i < o->rule_count; i++)
        if (quantize_rule_fits(&o->rules[i], module))
            bits = o->rules[i].bits;
    return bits;
}

static void quantize_add_tensor(struct quantize *q, const char *name, enum safetensors_dtype dtype,
                                uint32_t rank, const uint64_t *shape)
{
    struct writer_tensor *t = &q->tensors[q->tensor_count++];
    *t = (struct writer_tensor){
        .name = mem_copy_text(name, strlen(name)), .dtype = dtype, .rank = rank};
    memcpy(t->shape, shape, rank * sizeof *shape);
}

static const char *quantize_full_name(char *out, const char *path)
{
    bool head = !strncmp(path, "lm_head", 7);
    snprintf(out, QUANTIZE_NAME_MAX, "language_model.%s%s", head ? "" : "model.", path);
    return out;
}

/* A matrix, or the experts' matrices, of the module `path` (below the model). */
static void quantize_add_matrix(struct quantize *q, const char *path, struct quantize_part part,
                                bool stacked)
{
    char module[QUANTIZE_NAME_MAX], name[QUANTIZE_NAME_MAX + 16];
    uint64_t shape[3] = {part.count, part.rows, part.cols}, group = q->options->group;
    const uint64_t *dims = stacked ? shape : shape + 1;
    uint32_t rank = stacked ? 3 : 2, wanted = quantize_bits_of(q->options, path);
    part.bits = part.cols % group ? 0 : wanted;
    part.target = q->tensor_count;
    json_object_set_new(q->modules, path, json_null());
    quantize_full_name(module, path);
    snprintf(name, sizeof name, "%s.weight", module);
    if (!part.bits) {
        if (!wanted)
            json_object_set_new(q->overrides, module, json_false());
        quantize_add_tensor(q, name, part.source->dtype, rank, dims);
    } else {
        if (part.bits != q->options->bits)
            json_object_set_new(
                q->overrides, module,
                json_pack("{s:i, s:i}", "group_size", (int)group, "bits", (int)part.bits));
        shape[2] = part.cols * part.bits / 32;
        quantize_add_tensor(q, name, SAFETENSORS_U32, rank, dims);
        shape[2] = part.cols / group;
        snprintf(name, sizeof name, "%s.scales", module);
        quantize_add_tensor(q, name, SAFETENSORS_BF16, rank, dims);
        snprintf(name, sizeof name, "%s.biases", module);
        quantize_add_tensor(q, name, SAFETENSORS_BF16, rank, dims);
    }
    q->parts[q->part_count++] = part;
}

/* A norm, a convolution, A_log or dt_bias: bytes as they are, but for the norms' 1, for which F16
 * would be too coarse: F32 then. */
static void quantize_add_vector(struct quantize *q, const char *path,
                                const struct safetensors_tensor *t, bool unconverted)
{
    static const char gated[] = "linear_attn.norm.weight", norm[] = "norm.weight";
    char name[QUANTIZE_NAME_MAX];
    size_t n = strlen(path);
    struct quantize_part part = {
        .source = t, .count = 1, .rows = 1, .stride = 1, .target = q->tensor_count};
    part.cols = t->bytes / safetensors_dtype_bytes(t->dtype);
    bool is_norm = n >= sizeof norm - 1 && !strcmp(path + n - (sizeof norm - 1), norm);
    bool is_gated = n >= sizeof gated - 1 && !strcmp(path + n - (sizeof gated - 1), gated);
    part.plus_one = unconverted && is_norm && !is_gated;
    uint64_t shape[SAFETENSORS_RANK_MAX];
    memcpy(shape, t->shape, sizeof shape);
    if (t->rank == 3) { /* [channels, 1, 4] becomes [channels, 4, 1] */
        shape[1] = t->shape[1] * t->shape[2];
        shape[2] = 1;
    }
    enum safetensors_dtype dtype =
        part.plus_one && t->dtype == SAFETENSORS_F16 ? SAFETENSORS_F32 : t->dtype;
    quantize_add_tensor(q, quantize_full_name(name, path), dtype, t->rank, shape);
    q->parts[q->part_count++] = part;
}

static void quantize_add_source(struct quantize *q, const struct shards_tensor *s, bool unconverted)
{
    static const char fused[] = ".mlp.experts.gate_up_proj", down[] = ".mlp.experts.down_proj",
                      weight[] = ".weight";
    const struct safetensors_tensor *t = s->tensor;
    char path[QUANTIZE_NAME_MAX];
    size_t n = strlen(s->path);
    if (t->rank == 3 && n > sizeof fused && !strcmp(s->path + n - (sizeof fused - 1), fused)) {
        struct quantize_part part = {.source = t,
                                     .count = t->shape[0],
                                     .rows = t->shape[1] / 2,
                                     .cols = t->shape[2],
                                     .stride = t->shape[1]};
        int layer = (int)(n - (sizeof fused - 1));
        snprintf(path, sizeof path, "%.*s.mlp.switch_mlp.gate_proj", layer, s->path);
        quantize_add_matrix(q, path, part, true);
        part.first = part.rows;
        snprintf(path, sizeof path, "%.*s.mlp.switch_mlp.up_proj", layer, s->path);
        quantize_add_matrix(q, path, part, true);
        return;
    }
    bool is_down = n > sizeof down && !strcmp(s->path + n - (sizeof down - 1), down);
    bool is_stack = t->rank == 3 && (is_down || strstr(s->path, ".mlp.switch_mlp."));
    if (t->rank != 2 && !is_stack) {
        quantize_add_vector(q, s->path, t, unconverted);
        return;
    }
    struct quantize_part part = {.source = t, .count = is_stack ? t->shape[0] : 1};
    part.rows = part.stride = t->shape[t->rank - 2];
    part.cols = t->shape[t->rank - 1];
    if (is_down)
        snprintf(path, sizeof path, "%.*s.mlp.switch_mlp.down_proj", (int)(n - (sizeof down - 1)),
                 s->path);
    else
        snprintf(path, sizeof path, "%.*s", (int)(n - (sizeof weight - 1)), s->path);
    quantize_add_matrix(q, path, part, is_stack);
}

static uint64_t quantize_block_rows(const struct quantize_part *part)
{
    uint64_t rows = QUANTIZE_BLOCK_WEIGHTS / part->cols;
    return rows ? rows : 1;
}

static void quantize_list_blocks(struct quantize *q)
{
    for (int pass = 0; pass < 2; pass++) {
        uint64_t n = 0;
        for (uint32_t i = 0; i < q->part_count; i++) {
            uint64_t total = q->parts[i].count * q->parts[i].rows;
            uint64_t step = quantize_block_rows(&q->parts[i]);
            for (uint64_t row = 0; row < total; row += step, n++)
                if (pass)
                    q->blocks[n] = (struct quantize_block){
                        .part = i, .row = row, .rows = total - row < step ? total - row : step};
        }
        if (!pass)
            q->blocks = mem_new(n, sizeof *q->blocks);
        q->block_count = n;
    }
}

/* ---- the bytes ----------------------------------------------------------------------------- */

/* Row number `row` of a part's count * rows, in the mapped source. */
static const uint8_t *quantize_source_row(const struct quantize_part *p, uint64_t row)
{
    uint64_t at = row / p->rows * p->stride + p->first + row % p->rows;
    return p->source->data + at * p->cols * safetensors_dtype_bytes(p->source->dtype);
}

static void quantize_read_row(const struct quantize_part *p, uint64_t row, float *out)
{
    const uint8_t *from = quantize_source_row(p, row);
    if (p->source->dtype == SAFETENSORS_F32) {
        memcpy(out, from, p->cols * sizeof *out);
        return;
    }
    for (uint64_t k = 0; k < p->cols; k++) {
        uint16_t h;
        memcpy(&h, from + 2 * k, 2);
        out[k] = bf16_to_f32(h);
    }
}

/* The gains of a norm, with the 1 that Hugging Face leaves out. Scratch: 4 bytes a gain. */
static bool quantize_write_gains(const struct quantize *q, const struct quantize_part *p,
                                 void *scratch, struct err *err)
{
    bool bf16 = q->tensors[p->target].dtype == SAFETENSORS_BF16;
    float *f = scratch;
    uint16_t *h = scratch;
    for (uint64_t k = 0; k < p->cols; k++) {
        float gain = safetensors_value(p->source, k) + 1;
        if (bf16)
            h[k] = bf16_from_f32(gain);
        else
            f[k] = gain;
    }
    return writer_write(&q->writer, p->target, 0, scratch, p->cols * (bf16 ? 2 : 4), err);
}

static bool quantize_copy_block(const struct quantize *q, const struct quantize_part *p,
                                const struct quantize_block *b, uint8_t *scratch, struct err *err)
{
    uint64_t row_bytes = p->cols * safetensors_dtype_bytes(p->source->dtype);
    for (uint64_t i = 0; i < b->rows; i++)
        memcpy(scratch + i * row_bytes, quantize_source_row(p, b->row + i), row_bytes);
    return writer_write(&q->writer, p->target, b->row * row_bytes, scratch, b->rows * row_bytes,
                        err);
}

/* Largest scratch: one block's codes at 8 bits, its scales and biases at groups of 32, one row. */
static size_t quantize_scratch_bytes(const struct quantize *q)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < q->part_count; i++) {
        uint64_t weights = quantize_block_rows(&q->parts[i]) * q->parts[i].cols;
        uint64_t bytes = weights * 4 + q->parts[i].cols * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static bool quantize_run_block(void *user, uint64_t job, void *scratch, struct err *err)
{
    struct quantize *q = user;
    const struct quantize_block *b = &q->blocks[job];
    const struct quantize_part *p = &q->parts[b->part];
    if (p->plus_one)
        return quantize_write_gains(q, p, scratch, err);
    if (!p->bits)
        return quantize_copy_block(q, p, b, scratch, err);
    uint32_t cols = (uint32_t)p->cols, group = q->options->group;
    uint64_t words = p->cols * p->bits / 32, groups = p->cols / group;
    float *row = scratch; /* f32 [cols], then u32 [rows, words], bf16 [rows, groups] twice */
    uint32_t *codes = (uint32_t *)(row + cols);
    uint16_t *scales = (uint16_t *)(codes + b->rows * words), *biases = scales + b->rows * groups;
    for (uint64_t i = 0; i < b->rows; i++) {
        quantize_read_row(p, b->row + i, row);
        quantize_row(row, cols, p->bits, group, codes + i * words, scales + i * groups,
                     biases + i * groups);
    }
    return writer_write(&q->writer, p->target, b->row * words * 4, codes, b->rows * words * 4,
                        err) &&
           writer_write(&q->writer, p->target + 1, b->row * groups * 2, scales,
                        b->rows * groups * 2, err) &&
           writer_write(&q->writer, p->target + 2, b->row * groups * 2, biases,
                        b->rows * groups * 2, err);
}

/* ---- small files --------------------------------------------------------------------------- */

static bool quantize_copy_texts(const char *from, const char *to, struct err *err)
{
    static const char *const names[] = {
        "tokenizer.json",      "tokenizer_config.json",   "generation_config.json",
        "chat_template.jinja", "special_tokens_map.json", "vocab.json",
        "merges.txt",          "added_tokens.json"};
    bool ok = true;
    for (size_t i = 0; i < sizeof names / sizeof *names && ok; i++) {
        char *path = file_join(from, names[i]);
        struct buf text = {0};
        bool there;
        ok = file_find_regular(path, &there, err);
        if (ok && there)
            ok = file_read_regular(path, QUANTIZE_TEXT_MAX, &text, err) &&
                 writer_put_file(to, names[i], text.data ? text.data : "", text.len, err);
        buf_free(&text);
        free(path);
    }
    return ok;
}

/* The source's config with the quantization block, which mlx-lm wants twice. */
static bool quantize_put_config(const struct quantize *q, const char *from, const char *to,
                                struct err *err)
{
    char *path = file_join(from, "config.json");
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    free(path);
    assert(root); /* config_open has read it before */
    json_t *block = json_pack("{s:i, s:i, s:s}", "group_size", (int)q->options->group, "bits",
                              (int)q->options->bits, "mode", "affine");
    json_object_update(block, q->overrides);
    json_object_set(root, "quantization", block);
    json_object_set_new(root, "quantization_config", block);
    char *text = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    bool ok = writer_put_file(to, "config.json", text, strlen(text), err);
    free(text);
    return ok;
}

/* ---- public -------------------------------------------------------------------------------- */

static int quantize_compare_place(const void *a, const void *b)
{
    const struct shards_tensor *x = *(const struct shards_tensor *const *)a;
    const struct shards_tensor *y = *(const struct shards_tensor *const *)b;
    return x->data < y->data ? -1 : x->data > y->data;
}

/* Lists the parts in the order of the source's bytes, so that a disk is read in one sweep. */
static void quantize_list(struct quantize *q, const struct shards *shards, bool drop_head)
{
    bool unconverted = shards_is_unconverted(shards);
    const struct shards_tensor **order = mem_new(shards->count, sizeof *order);
    /* A fused tensor becomes two parts of three tensors each. */
    q->parts = mem_new(2 * (size_t)shards->count, sizeof *q->parts);
    q->tensors = mem_new(6 * (size_t)shards->count, sizeof *q->tensors);
    q->overrides = json_object();
    q->modules = json_object();
    for (uint32_t i = 0; i < shards->count; i++)
        order[i] = &shards->tensors[i];
    qsort(order, shards->count, sizeof *order, quantize_compare_place);
    for (uint32_t i = 0; i < shards->count; i++)
        if (!drop_head || strncmp(order[i]->path, "lm_head", 7) != 0)
            quantize_add_source(q, order[i], unconverted);
    free(order);
    quantize_list_blocks(q);
}

/* A rule that no module fits is a mistake that nothing else would show. */
static bool quantize_check_rules(const struct quantize *q, struct err *err)
{
    const char *path;
    json_t *value;
    for (uint32_t i = 0; i < q->options->rule_count; i++) {
        const struct quantize_rule *rule = &q->options->rules[i];
        bool fits = false;
        json_object_foreach(q->modules, path, value) fits |= quantize_rule_fits(rule, path);
        if (fits)
            continue;
        json_t *names = json_object();
        struct buf list = {0};
        json_object_foreach(q->modules, path, value)
        {
            const char *name = path;
            if (!strncmp(name, "layers.", 7)) /* they are the same in every layer */
                name += 7 + strcspn(name + 7, ".") + 1;
            if (json_object_get(names, name))
                continue;
            json_object_set_new(names, name, json_null());
            buf_printf(&list, "%s%s", list.len ? ", " : "", name);
        }
        err_set(err, ERR_USAGE, "there is no module '%s'; the modules are %s", rule->suffix,
                list.data ? list.data : "none");
        json_decref(names);
        buf_free(&list);
        return false;
    }
    return true;
}

static bool quantize_check_source(const char *from, bool *tied, struct err *err)
{
    struct model model;
    if (!model_open(from, NULL, NULL, &model, err))
        return false;
    bool quantised = model.config.quantised;
    *tied = model.config.tie_embeddings;
    model_close(&model);
    return !quantised ||
           err_set(err, ERR_INPUT, "%s is quantised already; start from the bf16 checkpoint", from);
}

bool quantize_checkpoint(const char *from, const char *to, const struct quantize_options *options,
                         struct err *err)
{
    struct quantize q = {.options = options};
    struct shards shards;
    bool tied;
    if (!quantize_check_source(from, &tied, err) || !shards_open(from, &shards, err))
        return false;
    quantize_list(&q, &shards, tied);
    bool ok = quantize_check_rules(&q, err);
    if (!ok) /* the writer, which would own the list, was not opened */
        q.writer = (struct writer){.tensors = q.tensors, .count = q.tensor_count};
    ok = ok && writer_open(&q.writer, to, q.tensors, q.tensor_count, QUANTIZE_SHARD_BYTES, err);
    if (ok) {
        ok = jobs_run(&(struct jobs){.count = q.block_count,
                                     .threads = options->threads,
                                     .scratch_bytes = quantize_scratch_bytes(&q),
                                     .run = quantize_run_block,
                                     .user = &q,
                                     .progress = options->progress,
                                     .progress_user = options->progress_user},
                      err) &&
             writer_finish(&q.writer, err) && quantize_copy_texts(from, to, err) &&
             quantize_put_config(&q, from, to, err);
    }
    writer_close(&q.writer);
    json_decref(q.overrides);
    json_decref(q.modules);
    free(q.parts);
    free(q.blocks);
    shards_close(&shards);
    return ok;
}
