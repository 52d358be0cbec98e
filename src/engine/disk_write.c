/* Owns the queue of what is to be written or removed, and the thread that does it: nobody else
 * waits for the disk, and files come and go in the order in which they were asked to. */
#include "engine/disk_core.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const uint64_t DISK_WAITING_BYTES = 512ull << 20; /* queued, at most */
static const uint64_t DISK_FREE_BYTES = 1ull << 30;      /* of the volume, left to others */

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

/* Whether the volume has room for it and more; errno when not. */
static bool disk_has_room(const struct disk *disk, uint64_t bytes)
{
    struct statvfs volume;
    if (statvfs(disk->folder, &volume) != 0)
        return true; /* the write itself will tell */
    if ((uint64_t)volume.f_bavail * volume.f_frsize >= bytes + DISK_FREE_BYTES)
        return true;
    errno = ENOSPC;
    return false;
}

static bool disk_write_file(const struct disk *disk, struct disk_job *job)
{
    char name[DISK_NAME], beside[DISK_NAME + 16];
    struct disk_header *h = &job->header;
    if (!disk_has_room(disk, h->bytes))
        return false;
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
    free(job->unlink);
    free(job->tokens);
    free(job->bytes);
    free(job);
}

/* With the lock held. */
static void disk_note_written(struct disk *disk, const struct disk_header *h)
{
    if (disk_entry(disk, (enum disk_kind)h->kind, h->key))
        return;
    disk_list(disk, (struct disk_entry){.kind = (enum disk_kind)h->kind,
                                        .model = h->model,
                                        .key = h->key,
                                        .pos = h->pos,
                                        .bytes = sizeof *h + 4ull * h->count + h->bytes,
                                        .used = ++disk->clock});
    disk_shrink(disk);
}

static void disk_do_job(struct disk *disk, struct disk_job *job)
{
    bool ok =
        job->unlink ? unlink(job->unlink) == 0 || errno == ENOENT : disk_write_file(disk, job);
    int error = errno;
    pthread_mutex_lock(&disk->lock);
    if (ok && !job->unlink)
        disk_note_written(disk, &job->header);
    if (!ok) {
        disk->stats.failed++;
        if (!disk->warned)
            log_warn("cannot %s the prefix cache in %s: %s (said once)",
                     job->unlink ? "remove from" : "write to", disk->folder, strerror(error));
        disk->warned = true;
    }
    disk->waiting -= job->header.bytes;
    pthread_cond_signal(&disk->room);
    pthread_mutex_unlock(&disk->lock);
    disk_free_job(job);
}

void *disk_writer_main(void *arg)
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

void disk_unlist(struct disk *disk, struct disk_entry *entry)
{
    char name[DISK_NAME];
    struct disk_job *job = mem_new(1, sizeof *job);
    disk_file_name(name, entry->kind, entry->model, entry->key, entry->pos);
    job->unlink = file_join(disk->folder, name);
    /* First in the queue: what waits there is not listed, so it is not this file. */
    job->next = disk->jobs;
    disk->jobs = job;
    if (!job->next)
        disk->jobs_end = &job->next;
    pthread_cond_signal(&disk->wake);
    disk->stats.bytes -= entry->bytes;
    *entry = disk->entries[--disk->count];
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

bool disk_is_busy(struct disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    bool busy = disk->waiting > DISK_WAITING_BYTES / 4;
    pthread_mutex_unlock(&disk->lock);
    return busy;
}
