#include "cmd/load.h"

#include "base/clock.h"
#include "cmd/cmd.h"
#include "cmd/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool load_option(int c, const char *text, struct engine_options *options, bool *taken,
                 struct err *err)
{
    uint64_t n = 0;
    *taken = true;
    switch (c) {
    case 'm':
        options->model = text;
        return true;
    case LOAD_BACKEND:
        options->backend = text;
        return true;
    case LOAD_THREADS:
        if (!cmd_parse_uint("--threads", text, 1, 1024, &n, err))
            return false;
        options->threads = (int)n;
        return true;
    case LOAD_CTX:
        return cmd_parse_u32("--ctx", text, 1, UINT32_MAX, &options->ctx, err);
    case LOAD_CHUNK:
        return cmd_parse_u32("--chunk", text, 1, 16384, &options->chunk, err);
    case LOAD_KV:
        if (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0)
            return err_set(err, ERR_USAGE, "--kv wants f32 or bf16, not '%s'", text);
        options->kv = text[0] == 'f' ? ENGINE_KV_F32 : ENGINE_KV_BF16;
        return true;
    case LOAD_MEMORY:
        if (!cmd_parse_uint("--memory", text, 1, UINT32_MAX, &n, err))
            return false;
        options->memory_bytes = n << 20;
        return true;
    case LOAD_LOCK:
        options->lock = true;
        return true;
    case LOAD_HUGE_PAGES:
        options->huge_pages = true;
        return true;
    case LOAD_DETERMINISTIC:
        options->deterministic = true;
        return true;
    default:
        *taken = false;
        return true;
    }
}

struct load_progress {
    uint64_t start_ns;
    bool shown;
};

/* Only loads that one waits for are worth a line. */
static void load_show_progress(void *user, uint64_t done, uint64_t total)
{
    struct load_progress *progress = user;
    if (clock_seconds_since(progress->start_ns) < 0.5)
        return;
    progress->shown = true;
    fprintf(stderr, "\rloading %.1f of %.1f GB\033[K", (double)done * 1e-9, (double)total * 1e-9);
}

bool load_find(const char *named, char **out, struct err *err)
{
    if (named)
        return store_find(named, out, err);
    *out = cmd_default_model();
    return *out ||
           err_set(err, ERR_USAGE, "the demo model is not there; name a model with -m MODEL");
}

bool load_engine(const struct engine_options *options, struct engine **out, struct err *err)
{
    struct engine_options full = *options;
    struct load_progress progress = {.start_ns = clock_now_ns()};
    char *found;
    if (!load_find(options->model, &found, err))
        return false;
    full.model = found;
    if (isatty(STDERR_FILENO)) {
        full.progress = load_show_progress;
        full.progress_user = &progress;
    }
    bool ok = engine_open(&full, out, err);
    if (progress.shown)
        fputs("\r\033[K", stderr);
    free(found);
    return ok;
}
