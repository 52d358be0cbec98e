#include "model/writer.h"

#include "base/buf.h"
#include "base/mem.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

struct writer_shard {
    int fd;
    char name[48]; /* "model-00002-of-00004.safetensors" */
    char *path, *part_path;
    uint32_t first, end; /* tensors */
    uint64_t bytes;      /* of the data section, then of the file */
};

bool writer_put_file(const char *folder, const char *name, const char *text, size_t n,
                     struct err *err)
{
    char *path = file_join(folder, name);
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(text, 1, n, f) == n;
    if (f && fclose(f) != 0)
        ok = false;
    if (!ok)
        err_set_errno(err, "cannot write %s", path);
    free(path);
    return ok;
}

static bool writer_put(int fd, const void *data, uint64_t bytes, uint64_t at)
{
    const uint8_t *p = data;
    while (bytes) {
        ssize_t n = pwrite(fd, p, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            errno = ENOSPC;
        if (n <= 0)
            return false;
        p += n;
        at += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return true;
}

static void writer_plan_shards(struct writer *w, uint64_t shard_bytes)
{
    w->shards = mem_new(w->count, sizeof *w->shards);
    for (uint32_t i = 0; i < w->count; i++) {
        struct writer_shard *last = w->shard_count ? &w->shards[w->shard_count - 1] : NULL;
        if (!last || last->bytes + w->tensors[i].bytes > shard_bytes) {
            last = &w->shards[w->shard_count++];
            *last = (struct writer_shard){.fd = -1, .first = i};
        }
        last->end = i + 1;
        last->bytes += w->tensors[i].bytes;
        w->tensors[i].shard = w->shard_count - 1;
    }
    for (uint32_t i = 0; i < w->shard_count; i++) {
        struct writer_shard *s = &w->shards[i];
        if (w->shard_count == 1)
            snprintf(s->name, sizeof s->name, "model.safetensors");
        else
            snprintf(s->name, sizeof s->name, "model-%05u-of-%05u.safetensors", i + 1,
                     w->shard_count);
        s->path = file_join(w->folder, s->name);
        char part[64];
        snprintf(part, sizeof part, "%s.part", s->name);
        s->part_path = file_join(w->folder, part);
    }
}

static void writer_print_entry(struct buf *header, const struct writer_tensor *t, uint64_t begin)
{
    buf_printf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", header->len > 1 ? "," : "",
               t->name, safetensors_dtype_name(t->dtype));
    for (uint32_t i = 0; i < t->rank; i++)
        buf_printf(header, i ? ",%llu" : "%llu", (unsigned long long)t->shape[i]);
    buf_printf(header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
               (unsigned long long)(begin + t->bytes));
}

/* Places the shard's tensors, widest dtype first, so that every one is aligned without gaps, which
 * the format forbids; the header is padded with blanks to 64 bytes for the same reason. */
static bool writer_start_shard(struct writer *w, struct writer_shard *s, struct err *err)
{
    struct buf header = {0};
    uint64_t at = 0;
    buf_append_text(&header, "{\"__metadata__\":{\"format\":\"mlx\"}");
    for (uint32_t size = 8; size; size /= 2)
        for (uint32_t i = s->first; i < s->end; i++)
            if (safetensors_dtype_bytes(w->tensors[i].dtype) == size) {
                writer_print_entry(&header, &w->tensors[i], at);
                w->tensors[i].offset = at;
                at += w->tensors[i].bytes;
            }
    buf_append_char(&header, '}');
    while ((header.len + 8) % 64)
        buf_append_char(&header, ' ');
    assert(!header.full);
    for (uint32_t i = s->first; i < s->end; i++)
        w->tensors[i].offset += header.len + 8;
    s->bytes = at + header.len + 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)header.len >> 8 * i);
    s->fd = open(s->part_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    bool ok = s->fd >= 0 && writer_put(s->fd, length, 8, 0) &&
              writer_put(s->fd, header.data, header.len, 8);
    if (!ok)
        err_set_errno(err, "cannot write %s", s->part_path);
    buf_free(&header);
    return ok;
}

static bool writer_check_folder(const struct writer *w, struct err *err)
{
    if (mkdir(w->folder, 0755) != 0 && errno != EEXIST)
        return err_set_errno(err, "cannot make the folder %s", w->folder);
    static const char *const taken[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        char *path = file_join(w->folder, taken[i]);
        bool there = file_exists(path);
        free(path);
        if (there)
            return err_set(err, ERR_USAGE, "%s already holds a %s; name an empty or a new folder",
                           w->folder, taken[i]);
    }
    struct statvfs fs;
    if (statvfs(w->folder, &fs) == 0) {
        uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize;
        if (room < w->total_bytes)
            return err_set(err, ERR_RESOURCE,
                           "the checkpoint takes %llu bytes, %s has room for "
                           "%llu; name a folder on another disk",
                           (unsigned long long)w->total_bytes, w->folder, (unsigned long long)room);
    }
    return true;
}

bool writer_open(struct writer *w, const char *folder, struct writer_tensor *tensors,
                 uint32_t count, uint64_t shard_bytes, struct err *err)
{
    *w = (struct writer){
        .folder = mem_copy_text(folder, strlen(folder)), .tensors = tensors, .count = count};
    for (uint32_t i = 0; i < count; i++) {
        tensors[i].bytes = safetensors_dtype_bytes(tensors[i].dtype);
        for (uint32_t k = 0; k < tensors[i].rank; k++)
            tensors[i].bytes *= tensors[i].shape[k];
        w->total_bytes += tensors[i].bytes;
    }
    writer_plan_shards(w, shard_bytes);
    bool ok = writer_check_folder(w, err);
    for (uint32_t i = 0; i < w->shard_count && ok; i++)
        ok = writer_start_shard(w, &w->shards[i], err);
    if (!ok)
        writer_close(w);
    return ok;
}

bool writer_write(const struct writer *w, uint32_t tensor, uint64_t at, const void *data,
                  uint64_t bytes, struct err *err)
{
    const struct writer_tensor *t = &w->tensors[tensor];
    const struct writer_shard *s = &w->shards[t->shard];
    assert(at + bytes <= t->bytes);
    return writer_put(s->fd, data, bytes, t->offset + at) ||
           err_set_errno(err, "cannot write %s", s->part_path);
}

static bool writer_put_index(const struct writer *w, struct err *err)
{
    struct buf text = {0};
    buf_printf(&text, "{\n \"metadata\": {\"total_size\": %llu},\n \"weight_map\": {\n",
               (unsigned long long)w->total_bytes);
    for (uint32_t i = 0; i < w->count; i++)
        buf_printf(&text, "  \"%s\": \"%s\"%s\n", w->tensors[i].name,
                   w->shards[w->tensors[i].shard].name, i + 1 < w->count ? "," : "");
    buf_append_text(&text, " }\n}\n");
    assert(!text.full);
    bool ok = writer_put_file(w->folder, "model.safetensors.index.json", text.data, text.len, err);
    buf_free(&text);
    return ok;
}

bool writer_finish(struct writer *w, struct err *err)
{
    for (uint32_t i = 0; i < w->shard_count; i++) {
        struct writer_shard *s = &w->shards[i];
        int failed = close(s->fd);
        s->fd = -1;
        if (failed || rename(s->part_path, s->path) != 0)
            return err_set_errno(err, "cannot write %s", s->path);
    }
    return writer_put_index(w, err);
}

void writer_close(struct writer *w)
{
    for (uint32_t i = 0; i < w->shard_count; i++) {
        struct writer_shard *s = &w->shards[i];
        if (s->fd >= 0) {
            close(s->fd);
            unlink(s->part_path);
        }
        free(s->path);
        free(s->part_path);
    }
    free(w->shards);
    for (uint32_t i = 0; i < w->count; i++)
        free(w->tensors[i].name);
    free(w->tensors);
    free(w->folder);
    *w = (struct writer){0};
}
