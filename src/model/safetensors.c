#include "model/safetensors.h"

#include "base/bf16.h"
#include "base/mem.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    uint32_t bytes;
} safetensors_dtypes[SAFETENSORS_DTYPES] = {
    [SAFETENSORS_BOOL] = {"BOOL", 1},       [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_I8] = {"I8", 1},           [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1}, [SAFETENSORS_F8_E8M0] = {"F8_E8M0", 1},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_I16] = {"I16", 2},
    [SAFETENSORS_F16] = {"F16", 2},         [SAFETENSORS_BF16] = {"BF16", 2},
    [SAFETENSORS_U32] = {"U32", 4},         [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_F32] = {"F32", 4},         [SAFETENSORS_U64] = {"U64", 8},
    [SAFETENSORS_I64] = {"I64", 8},         [SAFETENSORS_F64] = {"F64", 8},
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    return safetensors_dtypes[dtype].name;
}

uint32_t safetensors_dtype_bytes(enum safetensors_dtype dtype)
{
    return safetensors_dtypes[dtype].bytes;
}

static float safetensors_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    float f;
    if (!exponent) { /* zero or subnormal: mantissa * 2^-24 */
        f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    uint32_t u = sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | mantissa << 13;
    memcpy(&f, &u, 4);
    return f;
}

float safetensors_value(const struct safetensors_tensor *tensor, uint64_t i)
{
    uint16_t h;
    float f;
    if (tensor->dtype == SAFETENSORS_F32) {
        memcpy(&f, tensor->data + 4 * i, 4);
        return f;
    }
    memcpy(&h, tensor->data + 2 * i, 2);
    return tensor->dtype == SAFETENSORS_BF16 ? bf16_to_f32(h) : safetensors_f16_to_f32(h);
}

void safetensors_print_shape(const struct safetensors_tensor *tensor, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < tensor->rank && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, i ? ", %llu" : "%llu",
                              (unsigned long long)tensor->shape[i]);
    if (n < size)
        snprintf(out + n, size - n, "]");
}

static bool safetensors_read_dtype(const json_t *entry, struct safetensors_tensor *t,
                                   struct err *err)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    for (int i = 0; dtype && i < SAFETENSORS_DTYPES; i++)
        if (!strcmp(dtype, safetensors_dtypes[i].name)) {
            t->dtype = (enum safetensors_dtype)i;
            return true;
        }
    return err_set(err, ERR_INPUT, "unknown dtype \"%.32s\"", dtype ? dtype : "");
}

/* Fills dtype, shape, bytes; *begin and *end are offsets in the data section. */
static bool safetensors_read_entry(const json_t *entry, struct safetensors_tensor *t,
                                   uint64_t *begin, uint64_t *end, struct err *err)
{
    if (!json_is_object(entry))
        return err_set(err, ERR_INPUT, "its entry is not an object");
    if (!safetensors_read_dtype(entry, t, err))
        return false;
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_RANK_MAX)
        return err_set(err, ERR_INPUT, "shape must list at most %d sizes", SAFETENSORS_RANK_MAX);
    t->rank = (uint32_t)json_array_size(shape);
    t->bytes = safetensors_dtype_bytes(t->dtype);
    for (uint32_t i = 0; i < t->rank; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return err_set(err, ERR_INPUT, "shape holds something other than sizes");
        t->shape[i] = (uint64_t)json_integer_value(size);
        if (__builtin_mul_overflow(t->bytes, t->shape[i], &t->bytes))
            return err_set(err, ERR_INPUT, "its shape overflows 64 bits");
    }
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to) ||
        json_integer_value(from) < 0 || json_integer_value(to) < json_integer_value(from))
        return err_set(err, ERR_INPUT, "data_offsets must be [begin, end] with begin <= end");
    *begin = (uint64_t)json_integer_value(from);
    *end = (uint64_t)json_integer_value(to);
    if (*end - *begin != t->bytes) {
        char text[128];
        safetensors_print_shape(t, text, sizeof text);
        return err_set(err, ERR_INPUT, "shape %s of %s takes %llu bytes, its offsets hold %llu",
                       text, safetensors_dtype_name(t->dtype), (unsigned long long)t->bytes,
                       (unsigned long long)(*end - *begin));
    }
    return true;
}

static int safetensors_compare_place(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* `data_at` is where the data section begins in the file. */
static bool safetensors_read_tensors(struct safetensors *file, json_t *header, uint64_t data_at,
                                     struct err *err)
{
    const char *name;
    json_t *entry;
    uint64_t need = data_at, have = file->map.bytes;
    file->tensors = mem_new(json_object_size(header), sizeof *file->tensors);
    json_object_foreach(header, name, entry)
    {
        if (!strcmp(name, "__metadata__"))
            continue;
        struct safetensors_tensor *t = &file->tensors[file->count++];
        uint64_t begin = 0, end = 0;
        t->name = mem_copy_text(name, strlen(name));
        if (!safetensors_read_entry(entry, t, &begin, &end, err))
            return err_wrap(err, "tensor %.200s", name);
        /* end is at most 2^63, so the sum cannot wrap. */
        if (data_at + end > need)
            need = data_at + end;
        /* Not to be followed before the comparison with `need` below. */
        t->data = (const uint8_t *)((uintptr_t)file->map.data + data_at + begin);
    }
    if (need > have)
        return err_set(err, ERR_INPUT, "truncated: have %llu, need %llu bytes; download it again",
                       (unsigned long long)have, (unsigned long long)need);
    if (need < have)
        return err_set(err, ERR_INPUT,
                       "%llu bytes follow the last tensor; the file is damaged, download it again",
                       (unsigned long long)(have - need));
    if (file->count)
        qsort(file->tensors, file->count, sizeof *file->tensors, safetensors_compare_place);
    for (uint32_t i = 1; i < file->count; i++) {
        const struct safetensors_tensor *a = &file->tensors[i - 1], *b = a + 1;
        if (a->data + a->bytes > b->data)
            return err_set(err, ERR_INPUT, "tensors %.200s and %.200s overlap", a->name, b->name);
    }
    return true;
}

static bool safetensors_read_header(struct safetensors *file, struct err *err)
{
    static const char lfs[] = "version https://git-lfs";
    const uint8_t *p = file->map.data;
    uint64_t have = file->map.bytes, length = 0;
    if (have >= sizeof lfs - 1 && !memcmp(p, lfs, sizeof lfs - 1))
        return err_set(err, ERR_INPUT,
                       "a Git LFS pointer instead of the weights; fetch them with 'git lfs pull'");
    if (have < 8)
        return err_set(err, ERR_INPUT,
                       "truncated: have %llu, need at least 8 bytes; download it "
                       "again",
                       (unsigned long long)have);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | p[i];
    if (length > SAFETENSORS_HEADER_MAX)
        return err_set(err, ERR_INPUT,
                       "its header claims %llu bytes, more than the format's %d; not a safetensors "
                       "file, or damaged",
                       (unsigned long long)length, SAFETENSORS_HEADER_MAX);
    if (length > have - 8)
        return err_set(err, ERR_INPUT,
                       "truncated: have %llu, need %llu bytes for the header alone; download it "
                       "again",
                       (unsigned long long)have, (unsigned long long)(length + 8));
    json_error_t where;
    json_t *header = json_loadb((const char *)p + 8, length, JSON_REJECT_DUPLICATES, &where);
    if (!header)
        return err_set(err, ERR_INPUT, "its header is damaged: %s", where.text);
    bool ok = json_is_object(header)
                  ? safetensors_read_tensors(file, header, 8 + length, err)
                  : err_set(err, ERR_INPUT, "its header is damaged: not a JSON object");
    json_decref(header);
    return ok;
}

bool safetensors_open(const char *path, struct safetensors *file, struct err *err)
{
    *file = (struct safetensors){0};
    if (!file_map_open(path, &file->map, err))
        return false;
    if (!safetensors_read_header(file, err)) {
        safetensors_close(file);
        return err_wrap(err, "shard %s", path);
    }
    return true;
}

void safetensors_close(struct safetensors *file)
{
    for (uint32_t i = 0; i < file->count; i++)
        free(file->tensors[i].name);
    free(file->tensors);
    file_map_close(&file->map);
    *file = (struct safetensors){0};
}
