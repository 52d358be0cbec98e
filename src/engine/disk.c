/* Owns the list of entries; disk_write.c and disk_read.c have the threads that touch files.
 *
 * A file is a header, the tokens, the bytes. Invariants: `entries` lists files that were whole when
 * they were listed; what is in the queue is not listed yet; `lock` guards both, and is never held
 * while the disk is waited for, so that the calls return at once (except opening and closing). A
 * crash leaves at most a file with another name (removed at the next start) or, if the system
 * itself went down, one that fails its checksum. */
#include "engine/disk_core.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DISK_ENTRIES_MAX = 1 << 16,
    DISK_SAMPLES = 64, /* of a model file, each DISK_SAMPLE bytes */
    DISK_SAMPLE = 4096,
};

/* ---- names -------------------------------------------------------------------------------- */

void disk_name_prefixes(const int32_t *tokens, uint32_t n, struct disk_key *keys)
{
    uint64_t a = 0x243f6a8885a308d3u, b = 0x13198a2e03707344u;
    for (uint32_t i = 0; i <= n; i++) {
        keys[i] = (struct disk_key){{hash_end(a), hash_end(b)}};
        if (i == n)
            break;
        a = hash_step(a, (uint32_t)tokens[i]);
        b = hash_end(b ^ (uint32_t)tokens[i]);
    }
}

void disk_file_name(char *out, enum disk_kind kind, uint64_t model, struct disk_key key,
                    uint32_t pos)
{
    snprintf(out, DISK_NAME, "%c-%016llx-%08x-%016llx%016llx", (char)kind,
             (unsigned long long)model, pos, (unsigned long long)key.word[0],
             (unsigned long long)key.word[1]);
}

char *disk_path(const struct disk *disk, enum disk_kind kind, struct disk_key key, uint32_t pos)
{
    char name[DISK_NAME];
    disk_file_name(name, kind, disk->model, key, pos);
    return file_join(disk->folder, name);
}

static bool disk_parse_name(const char *name, struct disk_entry *out)
{
    char kind, back[DISK_NAME];
    unsigned long long model, a, b;
    unsigned pos;
    if (sscanf(name, "%c-%16llx-%8x-%16llx%16llx", &kind, &model, &pos, &a, &b) != 5 ||
        (kind != DISK_PAGE && kind != DISK_SNAPSHOT))
        return false;
    *out = (struct disk_entry){
        .kind = (enum disk_kind)kind, .model = model, .key = {{a, b}}, .pos = pos};
    disk_file_name(back, out->kind, model, out->key, pos);
    return !strcmp(back, name);
}

static bool disk_same(struct disk_key a, struct disk_key b)
{
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

/* ---- the list (with the lock held) -------------------------------------------------------- */

struct disk_entry *disk_entry(struct disk *disk, enum disk_kind kind, struct disk_key key)
{
    for (size_t i = 0; i < disk->count; i++) {
        struct disk_entry *e = &disk->entries[i];
        if (e->kind == kind && e->model == disk->model && disk_same(e->key, key))
            return e;
    }
    return NULL;
}

void disk_list(struct disk *disk, struct disk_entry entry)
{
    if (disk->count == disk->cap) {
        disk->cap = disk->cap ? 2 * disk->cap : 256;
        disk->entries = mem_grow(disk->entries, disk->cap, sizeof *disk->entries);
    }
    disk->entries[disk->count++] = entry;
    disk->stats.bytes += entry.bytes;
}

void disk_shrink(struct disk *disk)
{
    while (disk->count &&
           (disk->stats.bytes > disk->limit || disk->count > (size_t)DISK_ENTRIES_MAX)) {
        struct disk_entry *oldest = disk->entries;
        for (size_t i = 1; i < disk->count; i++)
            if (disk->entries[i].used < oldest->used)
                oldest = &disk->entries[i];
        disk_unlist(disk, oldest);
    }
}

/* ---- asking ------------------------------------------------------------------------------- */

bool disk_has(struct disk *disk, enum disk_kind kind, struct disk_key key)
{
    pthread_mutex_lock(&disk->lock);
    struct disk_entry *entry = disk_entry(disk, kind, key);
    bool has = entry != NULL;
    if (has)
        entry->used = ++disk->clock;
    for (const struct disk_job *job = disk->jobs; job && !has; job = job->next)
        has = !job->unlink && job->header.kind == (uint32_t)kind && disk_same(job->header.key, key);
    pthread_mutex_unlock(&disk->lock);
    return has;
}

uint32_t disk_find(struct disk *disk, const struct disk_key *keys, uint32_t least, uint32_t n)
{
    uint32_t best = 0;
    pthread_mutex_lock(&disk->lock);
    for (size_t i = 0; i < disk->count; i++) {
        const struct disk_entry *e = &disk->entries[i];
        if (e->kind == DISK_SNAPSHOT && e->model == disk->model && e->pos >= least && e->pos <= n &&
            e->pos > best && disk_same(e->key, keys[e->pos]))
            best = e->pos;
    }
    pthread_mutex_unlock(&disk->lock);
    return best;
}

void disk_drop(struct disk *disk, const struct disk_key *keys, uint32_t n)
{
    pthread_mutex_lock(&disk->lock);
    for (struct disk_job *job = disk->jobs; job; job = job->next) {
        const struct disk_header *h = &job->header;
        if (!job->unlink && h->pos <= n && disk_same(h->key, keys[h->pos]))
            job->unlink = disk_path(disk, (enum disk_kind)h->kind, h->key, h->pos);
    }
    for (size_t i = disk->count; i-- > 0;) {
        struct disk_entry *e = &disk->entries[i];
        if (e->model == disk->model && e->pos <= n && disk_same(e->key, keys[e->pos]))
            disk_unlist(disk, e);
    }
    pthread_mutex_unlock(&disk->lock);
}

struct disk_stats disk_read_stats(struct disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    struct disk_stats stats = disk->stats;
    stats.entries = disk->count;
    stats.bytes_max = disk->limit;
    pthread_mutex_unlock(&disk->lock);
    return stats;
}

/* ---- opening ------------------------------------------------------------------------------ */

/* Makes the folder and those above it. */
static bool disk_make_folder(const char *folder, struct err *err)
{
    char *path = mem_copy_text(folder, strlen(folder));
    bool ok = true;
    for (char *p = path + 1; ok; p++) {
        if (*p != '/' && *p)
            continue;
        char end = *p;
        *p = 0;
        ok = mkdir(path, 0700) == 0 || errno == EEXIST;
        if (!ok)
            err_set(err, ERR_RESOURCE, "cannot make the folder %s: %s", path, strerror(errno));
        *p = end;
        if (!end)
            break;
    }
    free(path);
    return ok;
}

static int disk_compare_age(const void *a, const void *b)
{
    const struct disk_entry *x = a, *y = b;
    return x->used < y->used ? -1 : x->used > y->used;
}

/* What a process was writing when it was killed. */
static void disk_remove_left(const char *path, const char *name)
{
    long pid = strtol(name + strlen("tmp-"), NULL, 10);
    if (pid <= 0 || pid == getpid() || (kill((pid_t)pid, 0) != 0 && errno == ESRCH))
        unlink(path);
}

static bool disk_list_folder(struct disk *disk, struct err *err)
{
    DIR *dir = opendir(disk->folder);
    struct dirent *item;
    if (!dir)
        return err_set(err, ERR_RESOURCE, "cannot read the folder %s: %s", disk->folder,
                       strerror(errno));
    while ((item = readdir(dir))) {
        struct disk_entry entry;
        struct stat st;
        char *path = file_join(disk->folder, item->d_name);
        if (!strncmp(item->d_name, "tmp-", 4)) {
            disk_remove_left(path, item->d_name);
        } else if (disk_parse_name(item->d_name, &entry) && stat(path, &st) == 0) {
            entry.bytes = (uint64_t)st.st_size;
            entry.used = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec;
            disk_list(disk, entry);
        }
        free(path);
    }
    closedir(dir);
    if (disk->count)
        qsort(disk->entries, disk->count, sizeof *disk->entries, disk_compare_age);
    for (size_t i = 0; i < disk->count; i++)
        disk->entries[i].used = ++disk->clock;
    disk_shrink(disk);
    return true;
}

bool disk_open(const char *folder, uint64_t limit_bytes, uint64_t model, struct disk **out,
               struct err *err)
{
    struct disk *disk = mem_new(1, sizeof *disk);
    disk->folder = mem_copy_text(folder, strlen(folder));
    disk->limit = limit_bytes;
    disk->model = model;
    disk->jobs_end = &disk->jobs;
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->wake, NULL);
    pthread_cond_init(&disk->room, NULL);
    pthread_cond_init(&disk->read_wake, NULL);
    bool ok = disk_make_folder(folder, err) && disk_list_folder(disk, err);
    disk->has_writer = ok && !pthread_create(&disk->writer, NULL, disk_writer_main, disk);
    disk->has_reader = ok && !pthread_create(&disk->reader, NULL, disk_reader_main, disk);
    if (ok && !(disk->has_writer && disk->has_reader))
        ok =
            err_set(err, ERR_RESOURCE,
                    "the threads of the disk cache cannot start; leave it out with --cache-disk 0");
    if (!ok) {
        disk_close(disk);
        return false;
    }
    *out = disk;
    return true;
}

void disk_set_news(struct disk *disk, void (*news)(void *user), void *user)
{
    disk->news = news;
    disk->news_user = user;
}

void disk_close(struct disk *disk)
{
    if (!disk)
        return;
    pthread_mutex_lock(&disk->lock);
    disk->closing = true;
    assert(!disk->loads);
    pthread_cond_signal(&disk->wake);
    pthread_cond_signal(&disk->read_wake);
    pthread_mutex_unlock(&disk->lock);
    if (disk->has_writer)
        pthread_join(disk->writer, NULL);
    if (disk->has_reader)
        pthread_join(disk->reader, NULL);
    pthread_cond_destroy(&disk->read_wake);
    pthread_cond_destroy(&disk->wake);
    pthread_cond_destroy(&disk->room);
    pthread_mutex_destroy(&disk->lock);
    free(disk->entries);
    free(disk->folder);
    free(disk);
}

/* ---- models ------------------------------------------------------------------------------- */

static bool disk_hash_file(const char *path, uint64_t *hash, struct err *err)
{
    uint8_t sample[DISK_SAMPLE];
    struct stat st;
    int fd = file_open_regular(path, err);
    bool ok = fd >= 0 && fstat(fd, &st) == 0;
    for (int i = 0; ok && i < DISK_SAMPLES; i++) {
        /* the first at the beginning, where the layout is, the last at the end */
        off_t last = st.st_size > DISK_SAMPLE ? st.st_size - DISK_SAMPLE : 0;
        ssize_t n = pread(fd, sample, sizeof sample, last / (DISK_SAMPLES - 1) * i);
        ok = n >= 0;
        *hash = ok ? hash_bytes(*hash, sample, (size_t)n) : *hash;
    }
    if (ok)
        *hash = hash_bytes(*hash, &st.st_size, sizeof st.st_size);
    else if (fd >= 0)
        err_set(err, ERR_INPUT, "cannot read %s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return ok;
}

static bool disk_is_of_model(const char *name)
{
    size_t n = strlen(name), end = strlen(".safetensors");
    return !strcmp(name, "config.json") || (n > end && !strcmp(name + n - end, ".safetensors"));
}

bool disk_hash_model(const char *folder, uint64_t *hash, struct err *err)
{
    DIR *dir = opendir(folder);
    struct dirent *item;
    bool ok = dir != NULL;
    *hash = 0;
    if (!ok)
        return err_set(err, ERR_INPUT, "cannot read the folder %s: %s", folder, strerror(errno));
    while (ok && (item = readdir(dir))) {
        if (!disk_is_of_model(item->d_name))
            continue;
        uint64_t one = hash_bytes(0, item->d_name, strlen(item->d_name));
        char *path = file_join(folder, item->d_name);
        ok = disk_hash_file(path, &one, err);
        *hash += one; /* in any order */
        free(path);
    }
    closedir(dir);
    return ok;
}
