#include "cmd/fetch.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"

#include <assert.h>
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

/* 32 MiB: few enough requests for a hub's limits, small enough that eight run to the end. */
#define FETCH_SEGMENT ((uint64_t)32 << 20)

enum { FETCH_CONNECTIONS = 8, FETCH_TRIES = 8, FETCH_WAIT_MAX = 300, FETCH_DISCARD = 1 << 16 };

struct fetch_map_head {
    char magic[8];
    uint64_t bytes, segment;
    char hex[DIGEST_HEX + 8];
};

struct fetch_part { /* a file being fetched */
    const struct fetch_file *file;
    int fd, map_fd;
    uint64_t *have; /* [segments] bytes there */
    uint64_t segments;
};

enum fetch_state { FETCH_WAITING, FETCH_RUNNING, FETCH_DONE };

struct fetch_segment {
    struct fetch_part *part;
    uint64_t index, from, bytes;
    uint64_t not_before_ns;
    int failures; /* in a row without a byte gained */
    enum fetch_state state;
};

struct fetch_transfer { /* one connection */
    CURL *easy;
    struct fetch *fetch;
    struct fetch_segment *segment; /* null: idle */
    uint64_t gained, discarded;
    bool has_range, checked, refused; /* refused: fault holds what cannot pass by itself */
    uint64_t range_from, range_total;
    struct err fault;
};

struct fetch {
    const struct hub *hub;
    const char *name;
    struct fetch_part *parts;
    size_t part_count, segment_count, done;
    struct fetch_segment *segments;
    CURLM *multi;
    struct fetch_transfer transfers[FETCH_CONNECTIONS];
    uint64_t there;
};

/* ---- maps ---------------------------------------------------------------------------------- */

static char *fetch_map_path(const char *path)
{
    struct buf out = {0};
    buf_printf(&out, "%s.map", path);
    return out.data;
}

void fetch_drop_map(const char *path)
{
    char *map = fetch_map_path(path);
    unlink(map);
    free(map);
}

void fetch_drop(const char *path)
{
    fetch_drop_map(path);
    unlink(path);
}

static bool fetch_write_at(int fd, const void *bytes, size_t n, uint64_t at)
{
    const char *p = bytes;
    while (n) {
        ssize_t w = pwrite(fd, p, n, (off_t)at);
        if (w < 0 && errno == EINTR)
            continue;
        if (w <= 0)
            return false;
        p += w;
        n -= (size_t)w;
        at += (uint64_t)w;
    }
    return true;
}

static uint64_t fetch_segment_bytes(uint64_t bytes, uint64_t index)
{
    uint64_t left = bytes - index * FETCH_SEGMENT;
    return left < FETCH_SEGMENT ? left : FETCH_SEGMENT;
}

/* Takes up the counts of an earlier run when they are of the same content. */
static bool fetch_read_map(struct fetch_part *part, const struct fetch_map_head *want)
{
    struct fetch_map_head head;
    struct stat st;
    size_t n = part->segments * sizeof *part->have;
    if (fstat(part->fd, &st) || (uint64_t)st.st_size != part->file->bytes)
        return false;
    if (pread(part->map_fd, &head, sizeof head, 0) != (ssize_t)sizeof head ||
        memcmp(&head, want, sizeof head) ||
        pread(part->map_fd, part->have, n, sizeof head) != (ssize_t)n)
        return false;
    for (uint64_t i = 0; i < part->segments; i++)
        if (part->have[i] > fetch_segment_bytes(part->file->bytes, i))
            return false;
    return true;
}

static bool fetch_open_part(struct fetch_part *part, const struct fetch_file *file, struct err *err)
{
    char *map = fetch_map_path(file->path);
    *part = (struct fetch_part){.file = file, .fd = -1, .map_fd = -1};
    part->segments = (file->bytes + FETCH_SEGMENT - 1) / FETCH_SEGMENT;
    part->have = mem_new(part->segments + 1, sizeof *part->have);
    part->fd = open(file->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    part->map_fd = open(map, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    struct fetch_map_head head = {.bytes = file->bytes, .segment = FETCH_SEGMENT};
    memcpy(head.magic, "callamap", sizeof head.magic);
    snprintf(head.hex, sizeof head.hex, "%s", file->hex);
    bool ok = part->fd >= 0 && part->map_fd >= 0;
    if (ok && !fetch_read_map(part, &head)) {
        size_t n = part->segments * sizeof *part->have;
        memset(part->have, 0, n);
        ok = !ftruncate(part->fd, 0) && !ftruncate(part->fd, (off_t)file->bytes) &&
             !ftruncate(part->map_fd, 0) &&
             fetch_write_at(part->map_fd, part->have, n, sizeof head) &&
             fetch_write_at(part->map_fd, &head, sizeof head, 0);
    }
    if (!ok)
        err_set_errno(err, "cannot write %s", file->path);
    free(map);
    return ok;
}

static void fetch_close_part(struct fetch_part *part)
{
    if (part->fd >= 0)
        close(part->fd);
    if (part->map_fd >= 0)
        close(part->map_fd);
    free(part->have);
}

static bool fetch_write_have(const struct fetch_part *part, uint64_t index)
{
    return fetch_write_at(part->map_fd, &part->have[index], sizeof part->have[index],
                          sizeof(struct fetch_map_head) + index * sizeof part->have[index]);
}

/* ---- one transfer -------------------------------------------------------------------------- */

static size_t fetch_take_header(char *line, size_t size, size_t n, void *user)
{
    struct fetch_transfer *t = user;
    static const char name[] = "content-range:";
    char text[200];
    size_t len = size * n;
    snprintf(text, sizeof text, "%.*s", (int)(len < 199 ? len : 199), line);
    if (!strncmp(text, "HTTP/", 5)) /* the next answer after a redirect */
        t->has_range = false;
    if (!strncasecmp(text, name, sizeof name - 1)) {
        unsigned long long from, to, total;
        t->has_range =
            sscanf(text + sizeof name - 1, " bytes %llu-%llu/%llu", &from, &to, &total) == 3;
        if (t->has_range) {
            t->range_from = from;
            t->range_total = total;
        }
    }
    return len;
}

/* Before the first byte of a body is stored: is it the part that was asked for? */
static bool fetch_check_answer(struct fetch_transfer *t, long status)
{
    struct fetch_segment *s = t->segment;
    uint64_t *have = &s->part->have[s->index];
    const char *url = s->part->file->url;
    if (status == 206 && !t->has_range)
        return err_set(&t->fault, ERR_INPUT, "%s: a part came without its place (Content-Range)",
                       url);
    if (status == 206 && t->range_total != s->part->file->bytes)
        return err_set(&t->fault, ERR_INPUT,
                       "%s has %llu bytes, but the repository's list says %llu; try again later",
                       url, (unsigned long long)t->range_total,
                       (unsigned long long)s->part->file->bytes);
    if (status == 206 && t->range_from != s->from + *have)
        return err_set(&t->fault, ERR_INPUT, "%s: another part came than was asked for", url);
    if (status == 200 && s->part->segments > 1)
        return err_set(&t->fault, ERR_INPUT,
                       "%s: the server does not send parts of a file (Range); use another "
                       "--endpoint",
                       url);
    if (status == 200) { /* the whole small file, from its start */
        t->fetch->there -= *have;
        *have = 0;
    }
    return true;
}

static size_t fetch_take_body(char *bytes, size_t size, size_t n, void *user)
{
    struct fetch_transfer *t = user;
    struct fetch_segment *s = t->segment;
    struct fetch_part *part = s->part;
    size_t len = size * n;
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 && status != 206) { /* an error page: of no use */
        t->discarded += len;
        return t->discarded > FETCH_DISCARD ? 0 : len;
    }
    if (!t->checked && !(t->checked = fetch_check_answer(t, status))) {
        t->refused = true;
        return 0;
    }
    uint64_t have = part->have[s->index];
    if (len > s->bytes - have) {
        t->refused = !err_set(&t->fault, ERR_INPUT,
                              "%s sent more bytes than it has; try again later", part->file->url);
        return 0;
    }
    if (!fetch_write_at(part->fd, bytes, len, s->from + have)) {
        t->refused = !err_set_errno(&t->fault, "cannot write %s", part->file->path);
        return 0;
    }
    part->have[s->index] = have + len;
    t->gained += len;
    t->fetch->there += len;
    if (!fetch_write_have(part, s->index)) {
        t->refused = !err_set_errno(&t->fault, "cannot write %s.map", part->file->path);
        return 0;
    }
    return len;
}

static bool fetch_begin(struct fetch *f, struct fetch_transfer *t, struct fetch_segment *s)
{
    char range[64];
    uint64_t have = s->part->have[s->index];
    CURL *easy = t->easy;
    *t = (struct fetch_transfer){.easy = easy, .fetch = f, .segment = s};
    curl_easy_reset(easy);
    hub_set_request(f->hub, easy, s->part->file->url);
    snprintf(range, sizeof range, "%llu-%llu", (unsigned long long)(s->from + have),
             (unsigned long long)(s->from + s->bytes - 1));
    curl_easy_setopt(easy, CURLOPT_RANGE, range);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 512L * 1024);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, fetch_take_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, t);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, fetch_take_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, t);
    s->state = FETCH_RUNNING;
    return curl_multi_add_handle(f->multi, easy) == CURLM_OK;
}

/* After a transfer ended early: wait and try again, or end the work. */
static bool fetch_fail(struct fetch_transfer *t, CURLcode code, long status, struct err *err)
{
    struct fetch_segment *s = t->segment;
    bool answered = code == CURLE_OK && status != 200 && status != 206;
    if (t->refused) {
        *err = t->fault;
        return false;
    }
    s->failures = t->gained ? 1 : s->failures + 1;
    if (answered)
        hub_fail(t->fetch->hub, t->fetch->name, status, err);
    else
        err_set(err, ERR_INPUT, "%s: %s; run the same command again: it goes on from here",
                s->part->file->url,
                code == CURLE_OK ? "the answer ends early" : curl_easy_strerror(code));
    if (s->failures > FETCH_TRIES ||
        !(answered ? hub_may_retry(status) : hub_may_retry_error((int)code)))
        return false;
    curl_off_t after = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RETRY_AFTER, &after);
    double wait = 0.125 * (double)(1u << s->failures);
    if (answered && after > 0)
        wait = after < FETCH_WAIT_MAX ? (double)after : FETCH_WAIT_MAX;
    s->not_before_ns = clock_now_ns() + (uint64_t)(wait * 1e9);
    s->state = FETCH_WAITING;
    return true;
}

static bool fetch_end(struct fetch *f, struct fetch_transfer *t, CURLcode code, struct err *err)
{
    struct fetch_segment *s = t->segment;
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_multi_remove_handle(f->multi, t->easy);
    bool ok = true;
    if (!t->refused && s->part->have[s->index] == s->bytes) {
        s->state = FETCH_DONE;
        f->done++;
    } else {
        ok = fetch_fail(t, code, status, err);
    }
    t->segment = NULL;
    return ok;
}

/* ---- all ----------------------------------------------------------------------------------- */

static void fetch_list_segments(struct fetch *f)
{
    for (size_t i = 0; i < f->part_count; i++)
        f->segment_count += f->parts[i].segments;
    f->segments = mem_new(f->segment_count + 1, sizeof *f->segments);
    struct fetch_segment *s = f->segments;
    for (size_t i = 0; i < f->part_count; i++) {
        for (uint64_t j = 0; j < f->parts[i].segments; j++, s++) {
            *s = (struct fetch_segment){.part = &f->parts[i], .index = j};
            s->from = j * FETCH_SEGMENT;
            s->bytes = fetch_segment_bytes(f->parts[i].file->bytes, j);
            f->there += f->parts[i].have[j];
            if (f->parts[i].have[j] == s->bytes) {
                s->state = FETCH_DONE;
                f->done++;
            }
        }
    }
}

bool fetch_open(const struct hub *hub, const char *name, const struct fetch_file *files,
                size_t count, struct fetch **out, struct err *err)
{
    struct fetch *f = mem_new(1, sizeof *f);
    *out = NULL;
    f->hub = hub;
    f->name = name;
    f->parts = mem_new(count + 1, sizeof *f->parts);
    bool ok = true;
    while (ok && f->part_count < count) {
        ok = fetch_open_part(&f->parts[f->part_count], &files[f->part_count], err);
        f->part_count++;
    }
    f->multi = curl_multi_init();
    ok = ok && (f->multi || err_set(err, ERR_RESOURCE, "no memory for connections"));
    for (size_t i = 0; ok && i < FETCH_CONNECTIONS; i++) {
        f->transfers[i].easy = curl_easy_init();
        ok = f->transfers[i].easy || err_set(err, ERR_RESOURCE, "no memory for connections");
    }
    if (!ok) {
        fetch_close(f);
        return false;
    }
    fetch_list_segments(f);
    *out = f;
    return true;
}

void fetch_close(struct fetch *f)
{
    if (!f)
        return;
    for (size_t i = 0; i < FETCH_CONNECTIONS; i++) {
        if (f->transfers[i].segment)
            curl_multi_remove_handle(f->multi, f->transfers[i].easy);
        curl_easy_cleanup(f->transfers[i].easy);
    }
    curl_multi_cleanup(f->multi);
    for (size_t i = 0; i < f->part_count; i++)
        fetch_close_part(&f->parts[i]);
    free(f->parts);
    free(f->segments);
    free(f);
}

uint64_t fetch_bytes_there(const struct fetch *fetch)
{
    return fetch->there;
}

static bool fetch_begin_some(struct fetch *f, struct err *err)
{
    uint64_t now = clock_now_ns();
    size_t next = 0;
    for (size_t i = 0; i < FETCH_CONNECTIONS; i++) {
        if (f->transfers[i].segment)
            continue;
        while (next < f->segment_count &&
               (f->segments[next].state != FETCH_WAITING || f->segments[next].not_before_ns > now))
            next++;
        if (next == f->segment_count)
            return true;
        if (!fetch_begin(f, &f->transfers[i], &f->segments[next]))
            return err_set(err, ERR_RESOURCE, "no memory for a connection");
    }
    return true;
}

static bool fetch_end_some(struct fetch *f, struct err *err)
{
    CURLMsg *m;
    int left;
    bool ok = true;
    while (ok && (m = curl_multi_info_read(f->multi, &left))) {
        if (m->msg != CURLMSG_DONE)
            continue;
        struct fetch_transfer *t = NULL;
        CURLcode code = m->data.result;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&t);
        assert(t && t->segment);
        ok = fetch_end(f, t, code, err);
    }
    return ok;
}

bool fetch_run(struct fetch *f, fetch_progress *progress, void *user, struct err *err)
{
    while (f->done < f->segment_count) {
        int running = 0;
        if (!fetch_begin_some(f, err))
            return false;
        if (curl_multi_perform(f->multi, &running) != CURLM_OK)
            return err_set(err, ERR_INTERNAL, "the transfers cannot go on");
        if (!fetch_end_some(f, err))
            return false;
        if (!progress(user, f->there))
            return err_set(err, ERR_INPUT, "stopped; the same command goes on from here");
        if (f->done < f->segment_count)
            curl_multi_poll(f->multi, NULL, 0, 100, NULL);
    }
    return true;
}
