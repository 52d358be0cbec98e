/* calla pull: fetches a model from a Hugging Face hub, checks it, and puts it where -m NAME finds
 * it. A folder of the model's own name appears only when every file in it is whole and right. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cmd/fetch.h"
#include "cmd/hub.h"
#include "cmd/store.h"

#include <curl/curl.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PULL_DEFAULT "mlx-community/Qwen3.6-35B-A3B-4bit"
#define PULL_ENDPOINT "https://huggingface.co"

/* Left free for everything else on the disk. */
#define PULL_RESERVE ((uint64_t)256 << 20)

static const char pull_help[] =
    "usage: calla pull [options] [OWNER/NAME]\n"
    "\n"
    "Fetches a model from a Hugging Face hub (default: " PULL_DEFAULT ").\n"
    "Any interruption costs nothing: the same command goes on. Sizes and checksums are verified.\n"
    "Then every command finds the model by -m OWNER/NAME.\n"
    "\n"
    "      --endpoint URL  the hub (default: " PULL_ENDPOINT ")\n"
    "  -h, --help          this text\n"
    "\n"
    "HF_TOKEN in the environment is the access token for private and gated models. Models are "
    "kept\n"
    "in $XDG_DATA_HOME/calla/models, or ~/.local/share/calla/models.\n"
    "\n"
    "examples:\n"
    "  calla pull\n"
    "  calla pull mlx-community/Qwen3.6-35B-A3B-8bit\n"
    "  HF_TOKEN=hf_... calla pull --endpoint https://hub.example.org me/my-finetune\n";

struct pull {
    const char *name;
    struct hub hub;
    struct hub_list list;
    char *folder, *partial; /* the model's place, and where it grows */
    int lock;
    struct fetch_file *missing; /* files that are not yet whole */
    size_t missing_count;
    /* Progress. */
    uint64_t start_ns, shown_ns, at_start, whole, total;
    bool terminal;
};

static volatile sig_atomic_t pull_stopped;

static void pull_stop(int signal)
{
    (void)signal;
    pull_stopped = 1;
}

/* ---- progress ------------------------------------------------------------------------------ */

static void pull_print_left(double seconds)
{
    if (seconds < 90)
        fprintf(stderr, "%.0f s left", seconds);
    else if (seconds < 5400)
        fprintf(stderr, "%.0f min left", seconds / 60);
    else
        fprintf(stderr, "%.1f h left", seconds / 3600);
}

/* A line that is drawn over on a terminal, a line every ten seconds elsewhere. */
static bool pull_show(void *user, uint64_t there)
{
    struct pull *p = user;
    uint64_t now = clock_now_ns();
    double step = p->terminal ? 0.25 : 10;
    if (pull_stopped)
        return false;
    if ((double)(now - p->shown_ns) * 1e-9 < step)
        return true;
    p->shown_ns = now;
    double seconds = clock_seconds_since(p->start_ns);
    double rate = seconds > 0 ? (double)(there - p->at_start) / seconds : 0;
    uint64_t done = p->whole + there;
    fprintf(stderr, "%s%.2f of %.2f GB, %.0f %%, %.1f MB/s, ", p->terminal ? "\r" : "",
            (double)done * 1e-9, (double)p->total * 1e-9,
            p->total ? 100.0 * (double)done / (double)p->total : 100.0, rate * 1e-6);
    if (rate > 0)
        pull_print_left((double)(p->total - done) / rate);
    else
        fputs("waiting", stderr);
    fputs(p->terminal ? "\033[K" : "\n", stderr);
    return true;
}

static void pull_show_check(void *user, uint64_t done)
{
    struct pull *p = user;
    uint64_t now = clock_now_ns();
    if (!p->terminal || now - p->shown_ns < 250000000)
        return;
    p->shown_ns = now;
    fprintf(stderr, "\rchecking, %.2f GB\033[K", (double)done * 1e-9);
}

/* ---- steps --------------------------------------------------------------------------------- */

static char *pull_path(const struct pull *p, const char *file, const char *end)
{
    struct buf out = {0};
    buf_printf(&out, "%s/%s%s", p->partial, file, end);
    return out.data;
}

/* One process at a time, and a place to write to. */
static bool pull_open_folder(struct pull *p, struct err *err)
{
    struct buf partial = {0};
    p->folder = store_folder(p->name);
    if (!p->folder)
        return err_set(err, ERR_INPUT,
                       "neither HOME nor XDG_DATA_HOME is set, so there is no "
                       "place for models; set XDG_DATA_HOME");
    buf_printf(&partial, "%s.partial", p->folder);
    p->partial = partial.data;
    if (!store_make_folder(p->partial, err))
        return false;
    char *path = pull_path(p, ".lock", "");
    p->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    bool ok = p->lock >= 0 || err_set_errno(err, "cannot write %s", path);
    if (ok && flock(p->lock, LOCK_EX | LOCK_NB))
        ok = err_set(err, ERR_INPUT, "another calla pull is fetching %s", p->name);
    free(path);
    return ok;
}

/* A checked file has its checksum beside it, as a repository may change between two runs. */
static bool pull_is_whole(const struct pull *p, const struct hub_file *f)
{
    char *path = pull_path(p, f->name, ""), *sum = pull_path(p, f->name, ".sum");
    struct stat st;
    struct buf was = {0};
    bool whole = !stat(path, &st) && (uint64_t)st.st_size == f->bytes &&
                 file_read(sum, DIGEST_HEX, &was, NULL) && was.len == strlen(f->hex) &&
                 !memcmp(was.data, f->hex, was.len);
    if (!whole)
        unlink(path);
    buf_free(&was);
    free(path);
    free(sum);
    return whole;
}

static void pull_list_missing(struct pull *p)
{
    p->missing = mem_new(p->list.count + 1, sizeof *p->missing);
    for (size_t i = 0; i < p->list.count; i++) {
        const struct hub_file *f = &p->list.files[i];
        if (pull_is_whole(p, f)) {
            p->whole += f->bytes;
            continue;
        }
        struct fetch_file *m = &p->missing[p->missing_count++];
        m->url = hub_file_url(&p->hub, p->name, p->list.revision, f->name);
        m->path = pull_path(p, f->name, ".part");
        m->bytes = f->bytes;
        m->hex = f->hex;
    }
}

static bool pull_check_disk(const struct pull *p, uint64_t there, struct err *err)
{
    struct statvfs v;
    if (statvfs(p->partial, &v))
        return err_set_errno(err, "cannot see the free space of %s", p->partial);
    uint64_t room = (uint64_t)v.f_bavail * v.f_frsize, need = p->total - p->whole - there;
    if (need && need + PULL_RESERVE > room)
        return err_set(err, ERR_RESOURCE,
                       "%s needs %.2f GB more and %s has %.2f GB free (%.2f are kept free); make "
                       "room, or set XDG_DATA_HOME to a folder on a larger disk",
                       p->name, (double)need * 1e-9, p->partial, (double)room * 1e-9,
                       (double)PULL_RESERVE * 1e-9);
    return true;
}

static bool pull_write_sum(const struct pull *p, const struct hub_file *f)
{
    char *path = pull_path(p, f->name, ".sum");
    FILE *file = fopen(path, "w");
    bool ok = file && fputs(f->hex, file) >= 0;
    if (file && fclose(file))
        ok = false;
    free(path);
    return ok;
}

/* Whole and right: it gets its name. Wrong: it goes, so that the next run fetches it anew. */
static bool pull_check_file(struct pull *p, const struct hub_file *f, struct err *err)
{
    char *part = pull_path(p, f->name, ".part"), *whole = pull_path(p, f->name, "");
    char hex[DIGEST_HEX + 1];
    bool ok = digest_file(part, f->kind, pull_show_check, p, hex, err);
    if (ok && strcmp(hex, f->hex)) {
        fetch_drop(part);
        ok = err_set(err, ERR_INPUT,
                     "%s came damaged: its checksum is %s, not %s; it was removed, run the same "
                     "command again",
                     f->name, hex, f->hex);
    }
    int fd = ok ? open(part, O_RDONLY | O_CLOEXEC) : -1;
    if (ok && (fd < 0 || fsync(fd) || !pull_write_sum(p, f) || rename(part, whole)))
        ok = err_set_errno(err, "cannot finish %s", whole);
    if (ok)
        fetch_drop_map(part);
    if (fd >= 0)
        close(fd);
    free(part);
    free(whole);
    return ok;
}

static bool pull_check_all(struct pull *p, struct err *err)
{
    bool ok = true;
    struct err first = {0};
    for (size_t i = 0; i < p->list.count && !pull_stopped; i++) {
        char *part = pull_path(p, p->list.files[i].name, ".part");
        if (file_exists(part) && !pull_check_file(p, &p->list.files[i], ok ? &first : NULL))
            ok = false;
        free(part);
    }
    if (pull_stopped)
        return err_set(err, ERR_INPUT, "stopped; the same command goes on from here");
    if (!ok)
        *err = first;
    return ok;
}

static bool pull_fetch(struct pull *p, struct err *err)
{
    struct fetch *fetch;
    if (!fetch_open(&p->hub, p->name, p->missing, p->missing_count, &fetch, err))
        return false;
    p->at_start = fetch_bytes_there(fetch);
    bool ok = pull_check_disk(p, p->at_start, err);
    if (ok && p->whole + p->at_start)
        fprintf(stderr, "going on: %.2f of %.2f GB are there\n",
                (double)(p->whole + p->at_start) * 1e-9, (double)p->total * 1e-9);
    else if (ok)
        fprintf(stderr, "fetching %s, %zu files, %.2f GB\n", p->name, p->list.count,
                (double)p->total * 1e-9);
    p->start_ns = p->shown_ns = clock_now_ns();
    ok = ok && fetch_run(fetch, pull_show, p, err);
    fetch_close(fetch);
    return ok;
}

static bool pull_lists(const struct pull *p, const char *file)
{
    for (size_t i = 0; i < p->list.count; i++)
        if (!strcmp(p->list.files[i].name, file))
            return true;
    return false;
}

/* Only the model's files stay: no sums, no lock, nothing of an earlier version. */
static bool pull_finish(struct pull *p, struct err *err)
{
    DIR *dir = opendir(p->partial);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char *path = pull_path(p, e->d_name, "");
        if (!pull_lists(p, e->d_name) && strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            unlink(path);
        free(path);
    }
    if (dir)
        closedir(dir);
    if (rename(p->partial, p->folder))
        return err_set_errno(err, "cannot rename %s to %s", p->partial, p->folder);
    return true;
}

static void pull_tell(const struct pull *p)
{
    printf("%s is at %s\n\nTalk with it:     calla chat -m %s\n"
           "Serve it:         calla serve -m %s\n",
           p->name, p->folder, p->name, p->name);
}

static bool pull_run(struct pull *p, const char *endpoint, struct err *err)
{
    if (!hub_open(&p->hub, endpoint, err))
        return false;
    p->folder = store_folder(p->name);
    char *config = p->folder ? file_join(p->folder, "config.json") : NULL;
    bool there = config && file_exists(config);
    free(config);
    if (there) {
        pull_tell(p);
        return true;
    }
    free(p->folder);
    p->folder = NULL;
    if (!hub_list(&p->hub, p->name, &p->list, err) || !pull_open_folder(p, err))
        return false;
    p->total = p->list.bytes;
    pull_list_missing(p);
    bool ok = pull_fetch(p, err) && pull_check_all(p, err);
    if (p->terminal)
        fputs("\r\033[K", stderr);
    if (!ok || !pull_finish(p, err))
        return false;
    pull_tell(p);
    return true;
}

int cmd_pull(int argc, char **argv)
{
    static const struct option options[] = {{"endpoint", required_argument, NULL, 'e'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *endpoint = PULL_ENDPOINT;
    struct pull p = {.name = PULL_DEFAULT, .lock = -1, .terminal = isatty(STDERR_FILENO)};
    struct err err = {0};
    for (int c; (c = cmd_next_option(argc, argv, ":h", options)) != -1;) {
        if (c == 'h') {
            fputs(pull_help, stdout);
            return 0;
        }
        if (c == '?')
            return err_exit_code(ERR_USAGE);
        endpoint = optarg;
    }
    if (argc - optind > 1)
        return cmd_usage("pull", "one model at a time");
    if (optind < argc)
        p.name = argv[optind];
    if (!store_is_name(p.name))
        return cmd_usage("pull", "'%s' is not a model's name; it is OWNER/NAME, as in %s", p.name,
                         PULL_DEFAULT);
    char *trimmed = mem_copy_text(endpoint, strlen(endpoint));
    for (size_t n = strlen(trimmed); n && trimmed[n - 1] == '/'; n--)
        trimmed[n - 1] = 0;
    struct sigaction stop = {.sa_handler = pull_stop};
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    bool ok = pull_run(&p, trimmed, &err);
    curl_global_cleanup();
    for (size_t i = 0; i < p.missing_count; i++) {
        free(p.missing[i].url);
        free(p.missing[i].path);
    }
    free(p.missing);
    hub_list_free(&p.list);
    free(p.folder);
    free(p.partial);
    free(trimmed);
    if (p.lock >= 0)
        close(p.lock);
    return ok ? 0 : cmd_fail("pull", &err);
}
