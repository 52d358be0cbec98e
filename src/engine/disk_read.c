/* Owns the loads and the thread that reads for them: files are read and checked here, beside the
 * engine's thread.
 *
 * Invariant: of a load, the reading thread writes only what `lock` guards, and a piece's bytes
 * while it is `busy` with it; pieces below `read` are whole, those below `taken` are the taker's.
 * */
#include "engine/disk_core.h"

#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t DISK_AHEAD_BYTES = 64ull << 20; /* read and not taken yet, at most */

struct disk_load {
    struct disk *disk;
    struct disk_load *next;
    struct disk_load_plan plan; /* tokens and keys are the load's own */
    uint32_t count;             /* pieces: the snapshot, then pages */
    uint8_t **piece;            /* [count] */
    uint32_t read, taken;
    uint64_t ahead; /* bytes of the pieces between these */
    bool busy, failed, closed;
};

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
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        return "it is not a file";
    if (!disk_get(fd, &h, sizeof h) ||
        h.header != hash_bytes(0, &h, offsetof(struct disk_header, header)))
        return "its header is damaged";
    if (memcmp(&h, want, offsetof(struct disk_header, checksum)) != 0)
        return "it is of another kind";
    if ((uint64_t)st.st_size != sizeof h + 4ull * h.count + h.bytes)
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

/* Reads an entry about `pos` tokens, of which the last `count` are `tokens`. What is damaged is
 * removed, with a line in the log; what is gone was removed by another process. */
static bool disk_read(struct disk *disk, enum disk_kind kind, struct disk_key key,
                      const int32_t *tokens, uint32_t count, uint32_t pos, uint8_t *out,
                      uint64_t bytes)
{
    struct disk_header want = {.magic = "CALLAKV",
                               .version = DISK_VERSION,
                               .kind = kind,
                               .model = disk->model,
                               .key = key,
                               .count = count,
                               .pos = pos,
                               .bytes = bytes};
    char *path = disk_path(disk, kind, key, pos);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool gone = fd < 0 && errno == ENOENT;
    const char *wrong = fd < 0 ? "it cannot be opened" : disk_check_file(fd, &want, tokens, out);
    if (fd >= 0) {
        futimens(fd, NULL); /* the age, for the next start */
        close(fd);
    }
    if (wrong && !gone)
        log_warn("an entry of the prefix cache is dropped: %s: %s", path, wrong);
    pthread_mutex_lock(&disk->lock);
    struct disk_entry *entry = disk_entry(disk, kind, key);
    if (entry && wrong)
        disk_unlist(disk, entry);
    else if (entry)
        entry->used = ++disk->clock;
    pthread_mutex_unlock(&disk->lock);
    free(path);
    return !wrong;
}

static uint64_t disk_piece_bytes(const struct disk_load *load, uint32_t i)
{
    return i ? load->plan.page_bytes : load->plan.snapshot_bytes;
}

/* The bytes of a piece, or null. */
static uint8_t *disk_read_piece(struct disk_load *load, uint32_t i)
{
    const struct disk_load_plan *p = &load->plan;
    uint64_t bytes = disk_piece_bytes(load, i);
    uint32_t end = i ? (p->first_page + i) * p->page_rows : p->n, rows = i ? p->page_rows : p->n;
    uint8_t *out = malloc(bytes);
    if (out && disk_read(load->disk, i ? DISK_PAGE : DISK_SNAPSHOT, p->keys[end],
                         p->tokens + end - rows, rows, end, out, bytes))
        return out;
    free(out);
    return NULL;
}

static void disk_free_load(struct disk_load *load)
{
    for (uint32_t i = load->taken; i < load->read; i++)
        free(load->piece[i]);
    free(load->piece);
    free((void *)load->plan.tokens);
    free((void *)load->plan.keys);
    free(load);
}

/* The oldest load that can go on, or null. */
static struct disk_load *disk_next_load(const struct disk *disk)
{
    struct disk_load *load = disk->loads;
    while (load && (load->failed || load->read == load->count || load->ahead > DISK_AHEAD_BYTES))
        load = load->next;
    return load;
}

void *disk_reader_main(void *arg)
{
    struct disk *disk = arg;
    pthread_mutex_lock(&disk->lock);
    for (;;) {
        struct disk_load *load;
        while (!(load = disk_next_load(disk)) && !disk->closing)
            pthread_cond_wait(&disk->read_wake, &disk->lock);
        if (!load)
            break;
        load->busy = true;
        pthread_mutex_unlock(&disk->lock);
        uint8_t *bytes = disk_read_piece(load, load->read);
        pthread_mutex_lock(&disk->lock);
        load->busy = false;
        load->failed = bytes == NULL;
        if (bytes) {
            load->ahead += disk_piece_bytes(load, load->read);
            load->piece[load->read++] = bytes;
        }
        if (load->closed) {
            disk_free_load(load);
            continue;
        }
        pthread_mutex_unlock(&disk->lock);
        if (disk->news)
            disk->news(disk->news_user);
        pthread_mutex_lock(&disk->lock);
    }
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

struct disk_load *disk_load_open(struct disk *disk, const struct disk_load_plan *plan)
{
    struct disk_load *load = mem_new(1, sizeof *load), **link = &disk->loads;
    int32_t *tokens = mem_new(plan->n, sizeof *tokens);
    struct disk_key *keys = mem_new((size_t)plan->n + 1, sizeof *keys);
    memcpy(tokens, plan->tokens, plan->n * sizeof *tokens);
    memcpy(keys, plan->keys, ((size_t)plan->n + 1) * sizeof *keys);
    load->disk = disk;
    load->plan = *plan;
    load->plan.tokens = tokens;
    load->plan.keys = keys;
    load->count = 1 + plan->n / plan->page_rows - plan->first_page;
    load->piece = mem_new(load->count, sizeof *load->piece);
    pthread_mutex_lock(&disk->lock);
    while (*link)
        link = &(*link)->next;
    *link = load;
    pthread_cond_signal(&disk->read_wake);
    pthread_mutex_unlock(&disk->lock);
    return load;
}

enum disk_load_state disk_load_take(struct disk_load *load, uint8_t **bytes)
{
    struct disk *disk = load->disk;
    enum disk_load_state state = DISK_LOAD_WAITS;
    pthread_mutex_lock(&disk->lock);
    if (load->taken < load->read) {
        load->ahead -= disk_piece_bytes(load, load->taken);
        *bytes = load->piece[load->taken++];
        state = DISK_LOAD_PIECE;
        pthread_cond_signal(&disk->read_wake);
    } else if (load->failed) {
        state = DISK_LOAD_FAILED;
    }
    pthread_mutex_unlock(&disk->lock);
    return state;
}

void disk_load_close(struct disk_load *load)
{
    struct disk *disk = load->disk;
    pthread_mutex_lock(&disk->lock);
    struct disk_load **link = &disk->loads;
    while (*link != load)
        link = &(*link)->next;
    *link = load->next;
    load->closed = true;
    bool busy = load->busy; /* then the reading thread frees it */
    pthread_mutex_unlock(&disk->lock);
    if (!busy)
        disk_free_load(load);
}
