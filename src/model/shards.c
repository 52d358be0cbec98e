#include "model/shards.h"

#include "base/mem.h"
#include "model/config.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { SHARDS_INDEX_MAX = 64 << 20, SHARDS_FILES_MAX = 4096 };

static bool shards_is_skipped(const char *path)
{
    /* `visual.` is what remains of `model.visual.`. */
    static const char *const prefixes[] = {"vision_tower.", "visual.", "mtp."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(path, prefixes[i], strlen(prefixes[i])))
            return true;
    return false;
}

static int shards_compare_path(const void *a, const void *b)
{
    return strcmp(((const struct shards_tensor *)a)->path, ((const struct shards_tensor *)b)->path);
}

static int shards_compare_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct file names of the index's weight_map, sorted, into names (which point into map). */
static bool shards_list_files(const json_t *map, const char ***names, uint32_t *count,
                              struct err *err)
{
    const char *tensor;
    json_t *value;
    size_t n = 0;
    if (!json_is_object(map) || !json_object_size(map))
        return err_set(err, ERR_INPUT, "weight_map must be an object that maps tensors to files");
    *names = mem_new(json_object_size(map), sizeof **names);
    json_object_foreach((json_t *)map, tensor, value)
    {
        const char *file = json_string_value(value);
        if (!file || !*file || strchr(file, '/') || !strcmp(file, ".") || !strcmp(file, ".."))
            return err_set(err, ERR_INPUT, "weight_map of %.200s must name a file in this folder",
                           tensor);
        (*names)[n++] = file;
    }
    qsort(*names, n, sizeof **names, shards_compare_text);
    uint32_t distinct = 0;
    for (size_t i = 0; i < n; i++)
        if (!distinct || strcmp((*names)[distinct - 1], (*names)[i]) != 0)
            (*names)[distinct++] = (*names)[i];
    if (distinct > SHARDS_FILES_MAX)
        return err_set(err, ERR_INPUT, "weight_map names more than %d files", SHARDS_FILES_MAX);
    *count = distinct;
    return true;
}

static bool shards_open_files(const char *folder, const char *const *names, uint32_t count,
                              struct shards *shards, struct err *err)
{
    bool ok = true;
    for (uint32_t i = 0; i < count && ok; i++) {
        char *path = file_join(folder, names[i]);
        bool there;
        ok = file_find_regular(path, &there, err);
        if (ok && !there)
            ok = err_set(err, ERR_INPUT, "shard %s is missing; download it into %s", names[i],
                         folder);
        free(path);
    }
    shards->files = mem_new(count, sizeof *shards->files);
    for (uint32_t i = 0; i < count && ok; i++) {
        char *path = file_join(folder, names[i]);
        ok = safetensors_open(path, &shards->files[i], err);
        shards->file_count += ok;
        free(path);
    }
    return ok;
}

static bool shards_file_has(const struct safetensors *file, const char *name)
{
    for (uint32_t i = 0; i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name))
            return true;
    return false;
}

/* A name that the index promises and its shard lacks would otherwise be noticed only as a missing
 * tensor, or, with an optional one, not at all. */
static bool shards_check_index(const struct shards *shards, const json_t *map,
                               const char *const *names, struct err *err)
{
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)map, tensor, value)
    {
        const char *file = json_string_value(value);
        uint32_t i = 0;
        while (strcmp(names[i], file) != 0)
            i++;
        const struct shards_tensor *found = shards_find(shards, config_cut_prefix(tensor));
        if (found && !strcmp(found->tensor->name, tensor)) {
            const struct safetensors *home = &shards->files[i];
            if (found->tensor >= home->tensors && found->tensor < home->tensors + home->count)
                continue;
        } else if (shards_is_skipped(config_cut_prefix(tensor)) &&
                   shards_file_has(&shards->files[i], tensor)) {
            continue;
        }
        return err_set(err, ERR_INPUT,
                       "the index places tensor %.200s in shard %.200s, which does not hold it; "
                       "download both again",
                       tensor, file);
    }
    return true;
}

static bool shards_collect(struct shards *shards, struct err *err)
{
    size_t total = 0;
    for (uint32_t i = 0; i < shards->file_count; i++)
        total += shards->files[i].count;
    shards->tensors = mem_new(total, sizeof *shards->tensors);
    for (uint32_t i = 0; i < shards->file_count; i++)
        for (uint32_t j = 0; j < shards->files[i].count; j++) {
            const struct safetensors_tensor *t = &shards->files[i].tensors[j];
            const char *path = config_cut_prefix(t->name);
            if (!shards_is_skipped(path))
                shards->tensors[shards->count++] =
                    (struct shards_tensor){.path = path, .tensor = t, .data = t->data};
        }
    if (shards->count)
        qsort(shards->tensors, shards->count, sizeof *shards->tensors, shards_compare_path);
    for (uint32_t i = 1; i < shards->count; i++) {
        const struct shards_tensor *a = &shards->tensors[i - 1], *b = a + 1;
        if (!strcmp(a->path, b->path))
            return err_set(err, ERR_INPUT, "the checkpoint holds %.200s twice (also as %.200s)",
                           a->tensor->name, b->tensor->name);
    }
    return true;
}

static bool shards_open_index(const char *folder, const char *index, struct shards *shards,
                              struct err *err)
{
    struct buf bytes = {0};
    if (!file_read_regular(index, SHARDS_INDEX_MAX, &bytes, err)) {
        buf_free(&bytes);
        return false;
    }
    json_error_t where;
    json_t *root =
        json_loadb(bytes.data ? bytes.data : "", bytes.len, JSON_REJECT_DUPLICATES, &where);
    buf_free(&bytes);
    if (!root)
        return err_set(err, ERR_INPUT, "%s, line %d: %s", index, where.line, where.text);
    const json_t *map = json_object_get(root, "weight_map");
    const char **names = NULL;
    uint32_t count = 0;
    bool ok = shards_list_files(map, &names, &count, err);
    if (!ok)
        err_wrap(err, "%s", index);
    ok = ok && shards_open_files(folder, names, count, shards, err) &&
         shards_collect(shards, err) && shards_check_index(shards, map, names, err);
    free(names);
    json_decref(root);
    return ok;
}

bool shards_open(const char *folder, struct shards *shards, struct err *err)
{
    *shards = (struct shards){0};
    static const char *const single = "model.safetensors";
    char *index = file_join(folder, "model.safetensors.index.json");
    char *file = file_join(folder, single);
    bool has_index = false, has_file = false;
    bool ok = file_find_regular(index, &has_index, err) &&
              (has_index || file_find_regular(file, &has_file, err));
    if (ok && has_index)
        ok = shards_open_index(folder, index, shards, err);
    else if (ok && has_file)
        ok = shards_open_files(folder, &single, 1, shards, err) && shards_collect(shards, err);
    else if (ok)
        ok = err_set(err, ERR_INPUT,
                     "%s has neither model.safetensors nor model.safetensors.index.json; name a "
                     "folder with a whole checkpoint",
                     folder);
    free(index);
    free(file);
    if (!ok)
        shards_close(shards);
    return ok;
}

void shards_close(struct shards *shards)
{
    for (uint32_t i = 0; i < shards->file_count; i++)
        safetensors_close(&shards->files[i]);
    free(shards->files);
    free(shards->tensors);
    *shards = (struct shards){0};
}

struct shards_tensor *shards_find(const struct shards *shards, const char *path)
{
    struct shards_tensor wanted = {.path = path};
    return shards->count ? bsearch(&wanted, shards->tensors, shards->count, sizeof *shards->tensors,
                                   shards_compare_path)
                         : NULL;
}

bool shards_is_unconverted(const struct shards *shards)
{
    static const char conv[] = ".conv1d.weight", fused[] = ".experts.gate_up_proj";
    bool has_fused = false;
    for (uint32_t i = 0; i < shards->count; i++) {
        const struct safetensors_tensor *t = shards->tensors[i].tensor;
        size_t n = strlen(t->name);
        if (n >= sizeof conv && !strcmp(t->name + n - (sizeof conv - 1), conv))
            return t->rank == 3 && t->shape[2] != 1;
        if (n >= sizeof fused && !strcmp(t->name + n - (sizeof fused - 1), fused))
            has_fused = true;
    }
    return has_fused;
}
