/* The second step of loading: a planned checkpoint's bytes to the device.
 *
 * Invariant: a tensor's bytes stay in the mapped file unless they must move (huge pages asked for,
 * or a file that does not align them), and then exactly one copy exists. */
#include "model/weights.h"

#include "base/mem.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { RESIDENT_ALIGN = 64, RESIDENT_HUGE_PAGE = 2 << 20 };

static bool resident_must_copy(const struct shards_tensor *t, bool huge_pages)
{
    return huge_pages || (uintptr_t)t->data % safetensors_dtype_bytes(t->tensor->dtype);
}

static uint64_t resident_copied_bytes(const struct shards *shards, bool huge_pages)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < shards->count; i++)
        if (resident_must_copy(&shards->tensors[i], huge_pages))
            total += (shards->tensors[i].tensor->bytes + RESIDENT_ALIGN - 1) &
                     ~(uint64_t)(RESIDENT_ALIGN - 1);
    return total;
}

/* Takes address space for the tensors that cannot stay where they are. */
static bool resident_open_copy(struct model_files *files, bool huge_pages, struct err *err)
{
    uint64_t need = resident_copied_bytes(&files->shards, huge_pages);
    if (!need)
        return true;
    uint64_t available = mem_available_bytes();
    if (available && need > available)
        return err_set(
            err, ERR_RESOURCE,
            "%llu bytes of weights must be copied (%s), but only %llu bytes of memory "
            "are free; %s",
            (unsigned long long)need, huge_pages ? "huge pages" : "the file does not align them",
            (unsigned long long)available, huge_pages ? "leave out --huge-pages" : "free some");
    need = (need + RESIDENT_HUGE_PAGE - 1) & ~(uint64_t)(RESIDENT_HUGE_PAGE - 1);
    void *p = mmap(NULL, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_set(err, ERR_RESOURCE,
                       "cannot get %llu bytes for the weights: %s; free some memory",
                       (unsigned long long)need, strerror(errno));
    files->copy = p;
    files->copy_bytes = need;
#ifdef MADV_HUGEPAGE
    /* A kernel without huge pages gives small ones: slower, not wrong. */
    if (huge_pages)
        madvise(p, need, MADV_HUGEPAGE);
#endif
    return true;
}

/* Moves one tensor into the copy if it must, and gives the file's pages back. */
static void resident_place(struct model_files *files, struct shards_tensor *t, bool huge_pages)
{
    /* The halves of a fused tensor come here twice. */
    if (!t || t->data != t->tensor->data || !resident_must_copy(t, huge_pages))
        return;
    uint64_t bytes = t->tensor->bytes, page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint8_t *to = files->copy + files->copy_used;
    files->copy_used += (bytes + RESIDENT_ALIGN - 1) & ~(uint64_t)(RESIDENT_ALIGN - 1);
    assert(files->copy_used <= files->copy_bytes);
    memcpy(to, t->data, bytes);
    uintptr_t from = ((uintptr_t)t->data + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)t->data + bytes) / page * page;
    if (end > from)
        madvise((void *)from, end - from, MADV_DONTNEED);
    t->data = to;
}

static struct span resident_host_span(const struct shards_tensor *t, uint64_t skip)
{
    return t ? (struct span){.base = (void *)(t->data + skip)} : (struct span){0};
}

static bool resident_lock(const struct shards_tensor *t, struct err *err)
{
    if (!t || !t->tensor->bytes)
        return true;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)t->data / page * page;
    if (mlock((void *)from, (uintptr_t)t->data + t->tensor->bytes - from) == 0)
        return true;
    int why = errno;
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur == RLIM_INFINITY)
        return err_set(err, ERR_RESOURCE, "cannot lock the weights in memory: %s; leave out --lock",
                       strerror(why));
    return err_set(err, ERR_RESOURCE,
                   "cannot lock the weights in memory: the limit is %llu KiB; raise it with "
                   "'ulimit -l' or leave out --lock",
                   (unsigned long long)limit.rlim_cur / 1024);
}

/* The part of a shard's mapping that holds the text model's tensors. */
static struct span resident_used_part(const struct shards *shards, uint32_t file, uint64_t *bytes)
{
    const struct file_map *map = &shards->files[file].map;
    uint64_t first = map->bytes, end = 0;
    for (uint32_t i = 0; i < shards->count; i++) {
        const struct safetensors_tensor *t = shards->tensors[i].tensor;
        if (t->data < map->data || t->data >= map->data + map->bytes)
            continue;
        uint64_t at = (uint64_t)(t->data - map->data);
        first = at < first ? at : first;
        end = at + t->bytes > end ? at + t->bytes : end;
    }
    *bytes = end > first ? end - first : 0;
    return (struct span){.base = (void *)map->data, .offset = first};
}

/* Tells the device of all memory that holds weights. */
static bool resident_map(struct model *model, bool huge_pages, struct err *err)
{
    const struct device_calls *calls = device_calls(model->device);
    const struct model_files *files = model->files;
    for (uint32_t i = 0; calls->map && !huge_pages && i < files->shards.file_count; i++) {
        uint64_t bytes;
        struct span part = resident_used_part(&files->shards, i, &bytes);
        if (bytes &&
            !calls->map(model->device, (const uint8_t *)part.base + part.offset, bytes, err))
            return false;
    }
    return !calls->map || !files->copy ||
           calls->map(model->device, files->copy, files->copy_bytes, err);
}

static bool resident_load_matrices(struct model *model, const struct model_options *options,
                                   struct err *err)
{
    struct model_files *files = model->files;
    uint64_t done = 0;
    if (!resident_open_copy(files, options->huge_pages, err) ||
        !resident_map(model, options->huge_pages, err))
        return false;
    for (uint32_t i = 0; i < files->matrix_count; i++) {
        struct weights_matrix *m = &files->matrices[i];
        struct shards_tensor *parts[] = {m->data, m->scales, m->biases};
        for (int j = 0; j < 3; j++) {
            resident_place(files, parts[j], options->huge_pages);
            if (options->lock && !resident_lock(parts[j], err))
                return false;
        }
        m->weight->data = resident_host_span(m->data, m->skip);
        m->weight->scales = resident_host_span(m->scales, 0);
        m->weight->biases = resident_host_span(m->biases, 0);
        if (!device_calls(model->device)->load_weight(model->device, m->weight, err))
            return err_wrap(err, "tensor %s", m->data->tensor->name);
        done += weights_matrix_bytes(m);
        if (options->progress)
            options->progress(options->progress_user, done, model->bytes.total);
    }
    return true;
}

static uint64_t resident_vector_length(const struct weights_vector *v)
{
    return v->tensor->tensor->bytes / safetensors_dtype_bytes(v->tensor->tensor->dtype);
}

/* All vectors go into one allocation, each on a 64-byte boundary. */
static bool resident_load_vectors(struct model *model, struct err *err)
{
    struct model_files *files = model->files;
    struct device *device = model->device;
    uint64_t floats = 0, at = 0, step = RESIDENT_ALIGN / sizeof(float);
    for (uint32_t i = 0; i < files->vector_count; i++)
        floats += (resident_vector_length(&files->vectors[i]) + step - 1) / step * step;
    if (!device_calls(device)->alloc(device, floats * sizeof(float), &files->small, err))
        return false;
    float *host = mem_try(floats, sizeof *host);
    if (!host)
        return err_set(err, ERR_RESOURCE, "no memory for %llu bytes of norms; free some",
                       (unsigned long long)(floats * sizeof *host));
    for (uint32_t i = 0; i < files->vector_count; i++) {
        const struct weights_vector *v = &files->vectors[i];
        uint64_t n = resident_vector_length(v);
        for (uint64_t k = 0; k < n; k++)
            host[at + k] = safetensors_value(v->tensor->tensor, k) + (v->plus_one ? 1 : 0);
        *v->span = span_at(files->small, at * sizeof(float));
        at += (n + step - 1) / step * step;
    }
    device_calls(device)->write(device, files->small, host, floats * sizeof *host);
    free(host);
    return device_calls(device)->sync(device, err);
}

bool resident_load(struct model *model, const struct model_options *options, struct err *err)
{
    return resident_load_vectors(model, err) && resident_load_matrices(model, options, err);
}

void resident_free(struct model *model)
{
    struct model_files *files = model->files;
    if (files->small.base)
        device_calls(model->device)->free(model->device, files->small);
    if (files->copy)
        munmap(files->copy, files->copy_bytes);
}
