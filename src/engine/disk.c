/* Owns the list of entries, the queue of what is to be written, and the thread that writes.
 *
 * A file is a header, the tokens, the bytes. Invariants: `entries` lists files that were whole when
 * they were listed; what is in the queue is not listed yet; `lock` guards both. A crash leaves at
 * most a file with another name (removed at the next start) or, if the system itself went down, one
 * that fails its checksum. */
#include "engine/disk.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DISK_VERSION = 1,
    DISK_ENTRIES_MAX = 1 << 16,
    DISK_NAME = 64,
    DISK_SAMPLES = 64, /* of a model file, each DISK_SAMPLE bytes */
    DISK_SAMPLE = 4096,
};

static const uint64_t DISK_WAITING_BYTES = 512ull << 20; /* queued, at most */

struct disk_header {
    char magic[8];
    uint32_t version, kind;
    uint64_t model;
    struct disk_key key;
    uint32_t count, pos; /* tokens that follow; tokens before the entry's end */
    uint64_t bytes;      /* that follow them */
    uint64_t checksum;   /* of tokens and bytes */
    uint64_t header;     /* checksum of all the above */
};

static_assert(sizeof(struct disk_header) == 72, "no padding in files");

struct disk_entry {
    enum disk_kind kind;
    uint64_t model;
    struct disk_key key;
    uint32_t pos;
    uint64_t bytes; /* of the file */
    uint64_t used;  /* higher: later */
};

struct disk_job {
    struct disk_header header;
    int32_t *tokens;
    uint8_t *bytes;
    struct disk_job *next;
};

struct disk {
    char *folder;
    uint64_t limit, model, clock;
    pthread_mutex_t lock;
    pthread_cond_t wake, room; /* a job or closing; a job was done */
    pthread_t thread;
    bool has_thread, closing, warned;
    struct disk_entry *entries; /* [count] */
    size_t count, cap;
    struct disk_job *jobs, **jobs_end;
    uint64_t waiting; /* bytes in jobs, also of the one being written */
    struct disk_stats stats;
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

static void disk_file_name(char *out, enum disk_kind kind, uint64_t model, struct disk_key key,
                           uint32_t pos)
{
    snprintf(out, DISK_NAME, "%c-%016llx-%08x-%016llx%016llx", (char)kind,
             (unsigned long long)model, pos, (unsigned long long)key.word[0],
             (unsigned long long)key.word[1]);
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

static struct disk_entry *disk_entry(struct disk *disk, enum disk_kind kind, struct disk_key key)
{
    for (size_t i = 0; i < disk->count; i++) {
        struct disk_entry *e = &disk->entries[i];
        if (e->kind == kind && e->model == disk->model && disk_same(e->key, key))
            return e;
    }
    return NULL;
}

static void disk_list(struct disk *disk, struct disk_entry entry)
{
    if (disk->count == disk->cap) {
        disk->cap = disk->cap ? 2 * disk->cap : 256;
        disk->entries = mem_grow(disk->entries, disk->cap, sizeof *disk->entries);
    }
    disk->entries[disk->count++] = entry;
    disk->stats.bytes += entry.bytes;
}

static void disk_remove(struct disk *disk, struct disk_entry *entry)
{
    char name[DISK_NAME];
    disk_file_name(name, entry->kind, entry->model, entry->key, entry->pos);
    char *path = file_join(disk->folder, name);
    unlink(path);
    free(path);
    disk->stats.bytes -= entry->bytes;
    *entry = disk->entries[--disk->count];
}

/* Removes the least recently used until the rest fits. */
static void disk_shrink(struct disk *disk)
{
    while (disk->count &&
           (disk->stats.bytes > disk->limit || disk->count > (size_t)DISK_ENTRIES_MAX)) {
        struct disk_entry *oldest = disk->entries;
        for (size_t i = 1; i < disk->count; i++)
            if (disk->entries[i].used < oldest->used)
                oldest = &disk->entries[i];
        disk_remove(disk, oldest);
    }
}

/* ---- writing ------------------------------------------------------------------------------ */

static bool disk_put(int fd, const void *bytes, uint64_t n)
{
    for (const char *p = bytes; n;) {
        ssize_t done = write(fd, p, n < 1 << 30 ? n : 1 << 30);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        p += done;
        n -= (uint64_t)done;
    }
    return true;
}

static bool disk_write_file(const struct disk *disk, struct disk_job *job)
{
    char name[DISK_NAME], beside[DISK_NAME + 16];
    struct disk_header *h = &job->header;
    h->checksum = hash_bytes(hash_bytes(0, job->tokens, 4ull * h->count), job->bytes, h->bytes);
    h->header = hash_bytes(0, h, offsetof(struct disk_header, header));
    disk_file_name(name, (enum disk_kind)h->kind, h->model, h->key, h->pos);
    snprintf(beside, sizeof beside, "tmp-%ld-%s", (long)getpid(), name);
    char *from = file_join(disk->folder, beside), *to = file_join(disk->folder, name);
    int fd = open(from, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && disk_put(fd, h, sizeof *h) && disk_put(fd, job->tokens, 4ull * h->count) &&
              disk_put(fd, job->bytes, h->bytes);
    int error = errno;
    if (fd >= 0 && close(fd) != 0)
        ok = false;
    ok = ok && rename(from, to) == 0;
    if (!ok) {
        unlink(from);
        errno = error;
    }
    free(from);
    free(to);
    return ok;
}

static void disk_free_job(struct disk_job *job)
{
    free(job->tokens);
    free(job->bytes);
    free(job);
}

static void disk_do_job(struct disk *disk, struct disk_job *job)
{
    const struct disk_header *h = &job->header;
    bool ok = disk_write_file(disk, job);
    int error = errno;
    pthread_mutex_lock(&disk->lock);
    if (ok && !disk_entry(disk, (enum disk_kind)h->kind, h->key)) {
        disk_list(disk, (struct disk_entry){.kind = (enum disk_kind)h->kind,
                                            .model = h->model,
                                            .key = h->key,
                                            .pos = h->pos,
                                            .bytes = sizeof *h + 4ull * h->count + h->bytes,
                                            .used = ++disk->clock});
        disk_shrink(disk);
    }
    if (!ok) {
        disk->stats.failed++;
        if (!disk->warned)
            log_warn("cannot write the prefix cache in %s: %s (said once)", disk->folder,
                     strerror(error));
        disk->warned = true;
    }
    disk->waiting -= h->bytes;
    pthread_cond_signal(&disk->room);
    pthread_mutex_unlock(&disk->lock);
    disk_free_job(job);
}

static void *disk_main(void *arg)
{
    struct disk *disk = arg;
    pthread_mutex_lock(&disk->lock);
    for (;;) {
        while (!disk->jobs && !disk->closing)
            pthread_cond_wait(&disk->wake, &disk->lock);
        struct disk_job *job = disk->jobs;
        if (!job)
            break;
        disk->jobs = job->next;
        if (!disk->jobs)
            disk->jobs_end = &disk->jobs;
        pthread_mutex_unlock(&disk->lock);
        disk_do_job(disk, job);
        pthread_mutex_lock(&disk->lock);
    }
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

bool disk_write(struct disk *disk, enum disk_kind kind, struct disk_key key, const int32_t *tokens,
                uint32_t count, uint32_t pos, uint8_t *bytes, uint64_t n, bool wait)
{
    struct disk_job *job = mem_new(1, sizeof *job);
    job->header = (struct disk_header){.magic = "CALLAKV",
                                       .version = DISK_VERSION,
                                       .kind = kind,
                                       .model = disk->model,
                                       .key = key,
                                       .count = count,
                                       .pos = pos,
                                       .bytes = n};
    job->tokens = mem_new(count, sizeof *job->tokens);
    memcpy(job->tokens, tokens, count * sizeof *job->tokens);
    job->bytes = bytes;
    pthread_mutex_lock(&disk->lock);
    while (wait && disk->waiting > DISK_WAITING_BYTES)
        pthread_cond_wait(&disk->room, &disk->lock);
    bool fits = disk->waiting <= DISK_WAITING_BYTES;
    if (fits) {
        *disk->jobs_end = job;
        disk->jobs_end = &job->next;
        disk->waiting += n;
        pthread_cond_signal(&disk->wake);
    } else {
        disk->stats.failed++;
    }
    pthread_mutex_unlock(&disk->lock);
    if (!fits)
        disk_free_job(job);
    return fits;
}

/* ---- reading ------------------------------------------------------------------------------ */

bool disk_has(struct disk *disk, enum disk_kind kind, struct disk_key key)
{
    pthread_mutex_lock(&disk->lock);
    struct disk_entry *entry = disk_entry(disk, kind, key);
    bool has = entry != NULL;
    if (has)
        entry->used = ++disk->clock;
    for (const struct disk_job *job = disk->jobs; job && !has; job = job->next)
        has = job->header.kind == (uint32_t)kind && disk_same(job->header.key, key);
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
    for (size_t i = disk->count; i-- > 0;) {
        struct disk_entry *e = &disk->entries[i];
        if (e->kind == DISK_SNAPSHOT && e->model == disk->model && e->pos <= n &&
            disk_same(e->key, keys[e->pos]))
            disk_remove(disk, e);
    }
    pthread_mutex_unlock(&disk->lock);
}

static bool disk_get(int fd, void *bytes, uint64_t n)
{
    for (char *p = bytes; n;) {
        ssize_t done = read(fd, p, n < 1 << 30 ? n : 1 << 30);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        p += done;
        n -= (uint64_t)done;
    }
    return true;
}

/* What is wrong with the file, or null. */
static const char *disk_check_file(int fd, const struct disk_header *want, const int32_t *tokens,
                                   uint8_t *out)
{
    struct disk_header h;
    struct stat st;
    if (!disk_get(fd, &h, sizeof h) ||
        h.header != hash_bytes(0, &h, offsetof(struct disk_header, header)))
        return "its header is damaged";
    if (memcmp(&h, want, offsetof(struct disk_header, checksum)) != 0)
        return "it is of another kind";
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size != sizeof h + 4ull * h.count + h.bytes)
        return "its length is wrong";
    int32_t *own = mem_new(h.count, sizeof *own);
    bool whole = disk_get(fd, own, 4ull * h.count) && disk_get(fd, out, h.bytes);
    bool same = whole && !memcmp(own, tokens, 4ull * h.count);
    uint64_t checksum = whole ? hash_bytes(hash_bytes(0, own, 4ull * h.count), out, h.bytes) : 0;
    free(own);
    if (!whole)
        return "it cannot be read";
    if (checksum != h.checksum)
        return "its checksum is wrong";
    return same ? NULL : "it is about other tokens";
}

bool disk_read(struct disk *disk, enum disk_kind kind, struct disk_key key, const int32_t *tokens,
               uint32_t count, uint32_t pos, uint8_t *out, uint64_t bytes)
{
    char name[DISK_NAME];
    struct disk_header want = {.magic = "CALLAKV",
                               .version = DISK_VERSION,
                               .kind = kind,
                               .model = disk->model,
                               .key = key,
                               .count = count,
                               .pos = pos,
                               .bytes = bytes};
    disk_file_name(name, kind, disk->model, key, pos);
    char *path = file_join(disk->folder, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    const char *wrong = fd < 0 ? "it is gone" : disk_check_file(fd, &want, tokens, out);
    if (fd >= 0) {
        futimens(fd, NULL); /* the age, for the next start */
        close(fd);
    }
    pthread_mutex_lock(&disk->lock);
    struct disk_entry *entry = disk_entry(disk, kind, key);
    if (wrong) {
        log_warn("an entry of the prefix cache is dropped: %s: %s", path, wrong);
        if (entry)
            disk_remove(disk, entry);
    } else if (entry) {
        entry->used = ++disk->clock;
    }
    pthread_mutex_unlock(&disk->lock);
    free(path);
    return !wrong;
}

struct disk_stats disk_read_stats(struct disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    struct disk_stats stats = disk->stats;
    stats.entries = disk->count;
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
            unlink(path); /* of a process that was killed */
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
    bool ok = disk_make_folder(folder, err) && disk_list_folder(disk, err);
    if (ok && !(disk->has_thread = pthread_create(&disk->thread, NULL, disk_main, disk) == 0))
        ok = err_set(err, ERR_RESOURCE, "the cache's thread cannot start");
    if (!ok) {
        disk_close(disk);
        return false;
    }
    *out = disk;
    return true;
}

void disk_close(struct disk *disk)
{
    if (!disk)
        return;
    pthread_mutex_lock(&disk->lock);
    disk->closing = true;
    pthread_cond_signal(&disk->wake);
    pthread_mutex_unlock(&disk->lock);
    if (disk->has_thread)
        pthread_join(disk->thread, NULL);
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
    int fd = open(path, O_RDONLY | O_CLOEXEC);
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
    else
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
