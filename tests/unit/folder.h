/* Temporary checkpoint folders for tests: a list of tensors and a config that a test changes and
 * then writes, in as many shards as it likes. */
#ifndef TESTS_FOLDER_H
#define TESTS_FOLDER_H

#include "base/buf.h"
#include "base/file.h"
#include "model/safetensors.h"

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FOLDER_TENSORS_MAX = 1024 };

struct folder_tensor {
    char name[160], dtype[16];
    uint64_t shape[8];
    uint32_t rank;
    const uint8_t *data; /* in `source`, or the test's own */
    uint64_t bytes;
    uint32_t shard;
};

struct folder {
    char path[32];
    struct safetensors source;
    struct folder_tensor tensors[FOLDER_TENSORS_MAX];
    uint32_t count;
    json_t *config;
};

static inline void folder_put(const char *folder, const char *name, const void *data, size_t n)
{
    char *path = file_join(folder, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
    free(path);
}

/* A new folder that holds nothing yet; the tensors and the config of `from`, to be changed. */
static inline void folder_open(struct folder *f, const char *from)
{
    struct err err;
    char *path = file_join(from, "model.safetensors");
    *f = (struct folder){.path = "/tmp/calla-test-XXXXXX"};
    assert_non_null(mkdtemp(f->path));
    if (!safetensors_open(path, &f->source, &err))
        fail_msg("%s", err.text);
    free(path);
    for (uint32_t i = 0; i < f->source.count; i++) {
        const struct safetensors_tensor *t = &f->source.tensors[i];
        struct folder_tensor *to = &f->tensors[f->count++];
        *to = (struct folder_tensor){.rank = t->rank, .data = t->data, .bytes = t->bytes};
        snprintf(to->name, sizeof to->name, "%s", t->name);
        snprintf(to->dtype, sizeof to->dtype, "%s", safetensors_dtype_name(t->dtype));
        memcpy(to->shape, t->shape, sizeof to->shape);
    }
    path = file_join(from, "config.json");
    f->config = json_load_file(path, 0, NULL);
    assert_non_null(f->config);
    free(path);
}

static inline struct folder_tensor *folder_find(struct folder *f, const char *name)
{
    for (uint32_t i = 0; i < f->count; i++)
        if (!strcmp(f->tensors[i].name, name))
            return &f->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline void folder_write_shard(struct folder *f, uint32_t shard, const char *name,
                                      uint32_t padding)
{
    struct buf out = {.max = 1u << 31};
    char *path = file_join(f->path, name);
    uint64_t at = 0;
    buf_append(&out, "\0\0\0\0\0\0\0\0{", 9);
    for (uint32_t i = 0; i < f->count; i++) {
        const struct folder_tensor *t = &f->tensors[i];
        if (t->shard != shard)
            continue;
        buf_printf(&out, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", at ? "," : "", t->name,
                   t->dtype);
        for (uint32_t k = 0; k < t->rank; k++)
            buf_printf(&out, k ? ",%llu" : "%llu", (unsigned long long)t->shape[k]);
        buf_printf(&out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                   (unsigned long long)(at + t->bytes));
        at += t->bytes;
    }
    buf_append_char(&out, '}');
    while (out.len % 8 != padding % 8)
        buf_append_char(&out, ' ');
    for (int i = 0; i < 8; i++)
        out.data[i] = (char)((out.len - 8) >> 8 * i);
    for (uint32_t i = 0; i < f->count; i++)
        if (f->tensors[i].shard == shard)
            buf_append(&out, f->tensors[i].data, f->tensors[i].bytes);
    assert_false(out.full);
    folder_put(f->path, name, out.data, out.len);
    buf_free(&out);
    free(path);
}

/* Writes config.json and the tensors: one file, or `shards` of them with an index. The data section
 * begins `misaligned` bytes past a multiple of 8. */
static inline void folder_write(struct folder *f, uint32_t shards, uint32_t misaligned)
{
    char *text = json_dumps(f->config, 0);
    folder_put(f->path, "config.json", text, strlen(text));
    free(text);
    if (!shards) {
        folder_write_shard(f, 0, "model.safetensors", misaligned);
        return;
    }
    json_t *map = json_object();
    char name[64];
    for (uint32_t i = 0; i < f->count; i++) {
        snprintf(name, sizeof name, "model-%05u-of-%05u.safetensors", f->tensors[i].shard + 1,
                 shards);
        json_object_set_new(map, f->tensors[i].name, json_string(name));
    }
    json_t *index = json_pack("{s:o}", "weight_map", map);
    text = json_dumps(index, 0);
    folder_put(f->path, "model.safetensors.index.json", text, strlen(text));
    free(text);
    json_decref(index);
    for (uint32_t i = 0; i < shards; i++) {
        snprintf(name, sizeof name, "model-%05u-of-%05u.safetensors", i + 1, shards);
        folder_write_shard(f, i, name, misaligned);
    }
}

/* The folder and the files in it. */
static inline void folder_remove(const char *folder)
{
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char *path = file_join(folder, e->d_name);
        unlink(path);
        free(path);
    }
    if (dir)
        closedir(dir);
    rmdir(folder);
}

static inline void folder_close(struct folder *f)
{
    folder_remove(f->path);
    safetensors_close(&f->source);
    json_decref(f->config);
}

#endif
