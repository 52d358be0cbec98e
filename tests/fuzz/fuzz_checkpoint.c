/* Mutated checkpoints: the loader takes each one or refuses it in one printable line.
 *
 *   fuzz_checkpoint [COUNT [SEED]]     default 1000 and 1
 *
 * Headers, configs and indexes of the demo model and the fixtures are changed as bytes and as
 * JSON; the weights are a hole in the file, so a case costs little. A crash ends the program; run
 * it under the sanitizers. Case i depends on the sum of the seed and i only, so
 * `fuzz_checkpoint 1 SUM` repeats it. */
#include "backend/device.h"
#include "base/file.h"
#include "base/rand.h"
#include "model/model.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct base {
    const char *folder;
    struct buf header; /* JSON of model.safetensors */
    struct buf config, index;
    uint64_t data_bytes;
};

static struct base bases[] = {
    {.folder = "models/demo"},
    {.folder = "tests/data/fixtures/fixture-hf"},
    {.folder = "tests/data/fixtures/fixture-mlx"},
};

enum { BASES = sizeof bases / sizeof *bases, TEXT_MAX = 1 << 26 };

static char folder[] = "/tmp/calla-fuzz-XXXXXX";

static void die(const char *what)
{
    fprintf(stderr, "fuzz_checkpoint: %s\n", what);
    exit(1);
}

static void read_text(const char *from, const char *name, struct buf *out)
{
    struct err err;
    char *path = file_join(from, name);
    if (!file_read(path, TEXT_MAX, out, &err))
        die(err.text);
    free(path);
}

static void read_base(struct base *b)
{
    struct buf whole = {0};
    read_text(b->folder, "config.json", &b->config);
    read_text(b->folder, "model.safetensors.index.json", &b->index);
    read_text(b->folder, "model.safetensors", &whole);
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--)
        n = n << 8 | (uint8_t)whole.data[i];
    buf_append(&b->header, whole.data + 8, n);
    b->data_bytes = whole.len - 8 - n;
    buf_free(&whole);
}

/* ---- mutations ----------------------------------------------------------------------------- */

static void mutate_bytes(struct rand *r, struct buf *text)
{
    static const char pieces[] = "{}[]\",:0123456789-+.eE\\u\xff\x01 ntf";
    for (uint64_t n = 1 + rand_below(r, 4); n && text->len > 8; n--) {
        size_t at = rand_below(r, text->len), cut = 1 + rand_below(r, 16);
        switch (rand_below(r, 4)) {
        case 0: /* one byte */
            text->data[at] = pieces[rand_below(r, sizeof pieces - 1)];
            break;
        case 1: /* a bit */
            text->data[at] ^= (char)(1 << rand_below(r, 8));
            break;
        case 2: /* a stretch is gone */
            if (at + cut < text->len) {
                memmove(text->data + at, text->data + at + cut, text->len - at - cut);
                text->len -= cut;
            }
            break;
        default: /* a stretch over another */
            if (at + cut < text->len)
                memmove(text->data + rand_below(r, text->len - cut), text->data + at, cut);
        }
    }
}

static json_t *random_value(struct rand *r)
{
    static const json_int_t numbers[] = {0,  1,  -1,  2,         3,          7,         8,
                                         64, 65, 512, 1ll << 31, 1ll << 32,  1ll << 40, 1ll << 62,
                                         16, 32, 256, 1025,      4294967295, 65537,     INT64_MAX};
    static const char *const texts[] = {"",
                                        "BF16",
                                        "F32",
                                        "U32",
                                        "F16",
                                        "affine",
                                        "U8",
                                        "full_attention",
                                        "model-00001-of-00001.safetensors",
                                        "../x",
                                        "qwen3_5_moe",
                                        "\n\x7f\t",
                                        "I64"};
    switch (rand_below(r, 8)) {
    case 0:
        return json_null();
    case 1:
        return json_boolean(rand_below(r, 2));
    case 2:
        return json_real(rand_normal(r) * 1e3);
    case 3:
        return json_array();
    case 4:
        return json_object();
    case 5:
        return json_string(texts[rand_below(r, sizeof texts / sizeof *texts)]);
    default:
        return json_integer(numbers[rand_below(r, sizeof numbers / sizeof *numbers)]);
    }
}

static void mutate_object(struct rand *r, json_t *object, uint64_t pick)
{
    static const char *const prefixes[] = {"model.", "language_model.", "mtp.", "vision_tower.",
                                           ""};
    const char *key = "";
    void *iter = json_object_iter(object);
    for (uint64_t i = 0; iter && i <= pick; i++, iter = json_object_iter_next(object, iter))
        key = json_object_iter_key(iter);
    char name[200];
    snprintf(name, sizeof name, "%s%.150s", prefixes[rand_below(r, 5)], key);
    json_t *value = json_object_get(object, key);
    switch (rand_below(r, 4)) {
    case 0:
        json_object_set_new(object, key, random_value(r));
        break;
    case 1:
        json_object_del(object, key);
        break;
    case 2: /* renamed */
        json_object_set(object, name, value);
        break;
    default:
        json_object_set_new(object, name, random_value(r));
    }
}

/* Goes down a random path and changes what is there. */
static void mutate_node(struct rand *r, json_t *node)
{
    size_t n = json_is_object(node) ? json_object_size(node) : json_array_size(node);
    if (!n)
        return;
    uint64_t pick = rand_below(r, n);
    json_t *child = NULL;
    if (json_is_object(node)) {
        void *iter = json_object_iter(node);
        for (uint64_t i = 0; i < pick; i++)
            iter = json_object_iter_next(node, iter);
        child = json_object_iter_value(iter);
    } else {
        child = json_array_get(node, pick);
    }
    bool deeper = json_is_object(child) || json_is_array(child);
    if (deeper && rand_below(r, 4) != 0)
        mutate_node(r, child);
    else if (json_is_object(node))
        mutate_object(r, node, pick);
    else if (json_is_integer(child) && rand_below(r, 2))
        json_array_set_new(
            node, pick, json_integer(json_integer_value(child) + (json_int_t)rand_below(r, 9) - 4));
    else if (rand_below(r, 4))
        json_array_set_new(node, pick, random_value(r));
    else
        json_array_append_new(node, random_value(r));
}

static void mutate_json(struct rand *r, struct buf *text)
{
    json_t *root = json_loadb(text->data, text->len, 0, NULL);
    for (uint64_t n = 1 + rand_below(r, 3); n; n--)
        mutate_node(r, root);
    char *out = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (!out)
        return;
    buf_clear(text);
    buf_append_text(text, out);
    free(out);
}

/* ---- a case -------------------------------------------------------------------------------- */

static void put(const char *name, const struct buf *text, uint64_t hole, int64_t length)
{
    char *path = file_join(folder, name);
    FILE *f = fopen(path, "wb");
    if (!f)
        die("cannot write in /tmp");
    for (int i = 0; length >= 0 && i < 8; i++)
        fputc((int)((uint64_t)length >> 8 * i & 255), f);
    fwrite(text->data, 1, text->len, f);
    fclose(f);
    if (length >= 0 && truncate(path, (off_t)(8 + text->len + hole)) != 0)
        die("cannot size a file in /tmp");
    free(path);
}

static void copy_text(struct buf *to, const struct buf *from)
{
    buf_clear(to);
    buf_append(to, from->data, from->len);
}

static void write_case(struct rand *r, const struct base *b)
{
    struct buf header = {0}, config = {0}, index = {0};
    copy_text(&header, &b->header);
    copy_text(&config, &b->config);
    copy_text(&index, &b->index);
    uint64_t hole = b->data_bytes, kind = rand_below(r, 10);
    int64_t skew = 0;
    struct buf *target = kind < 4 ? &header : kind < 8 ? &config : &index;
    if (kind == 9 && rand_below(r, 2))
        skew = (int64_t)rand_below(r, 1ull << rand_below(r, 62));
    else if (kind == 9)
        hole -= rand_below(r, hole);
    else if (rand_below(r, 3))
        mutate_json(r, target);
    else
        mutate_bytes(r, target);
    put("model.safetensors", &header, hole, (int64_t)header.len + skew);
    put("config.json", &config, 0, -1);
    char *path = file_join(folder, "model.safetensors.index.json");
    unlink(path);
    free(path);
    if (kind == 8 || rand_below(r, 2))
        put("model.safetensors.index.json", &index, 0, -1);
    buf_free(&header);
    buf_free(&config);
    buf_free(&index);
}

static bool one_line(const struct err *err)
{
    if (!err->text[0] || (err->kind != ERR_INPUT && err->kind != ERR_RESOURCE))
        return false;
    for (const char *p = err->text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            return false;
    return true;
}

static void remove_folder(void)
{
    static const char *const names[] = {"model.safetensors", "config.json",
                                        "model.safetensors.index.json"};
    for (int i = 0; i < 3; i++) {
        char *path = file_join(folder, names[i]);
        unlink(path);
        free(path);
    }
    rmdir(folder);
}

int main(int argc, char **argv)
{
    uint64_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint64_t loaded = 0, failed = 0;
    struct device *device;
    struct err err;
    if (!mkdtemp(folder))
        die("cannot make a folder in /tmp");
    if (!device_open(&(struct device_options){.name = "cpu/ref"}, &device, &err))
        die(err.text);
    for (int i = 0; i < BASES; i++)
        read_base(&bases[i]);
    for (uint64_t i = 0; i < count; i++) {
        struct rand r = {.state = (seed + i) * 0x9e3779b97f4a7c15u};
        struct model model;
        write_case(&r, &bases[rand_below(&r, BASES)]);
        err = (struct err){0};
        if (model_open(folder, rand_below(&r, 4) ? NULL : device, NULL, &model, &err)) {
            loaded++;
            model_close(&model);
        } else if (!one_line(&err)) {
            failed++;
            printf("seed %" PRIu64 ": '%s'\n", seed + i, err.text);
        }
    }
    for (int i = 0; i < BASES; i++) {
        buf_free(&bases[i].header);
        buf_free(&bases[i].config);
        buf_free(&bases[i].index);
    }
    device_close(device);
    remove_folder();
    printf("%" PRIu64 " loaded, %" PRIu64 " refused\n", loaded, count - loaded);
    printf("%" PRIu64 " passed, %" PRIu64 " failed, 0 skipped\n", count - failed, failed);
    return failed != 0;
}
