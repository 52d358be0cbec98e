#include "cmd/cmd.h"

#include "base/clock.h"
#include "base/file.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

int cmd_fail(const char *name, const struct err *err)
{
    fflush(stdout);
    fprintf(stderr, "calla %s: %s\n", name, err->text);
    return err_exit_code(err->kind);
}

int cmd_usage(const char *name, const char *fmt, ...)
{
    fprintf(stderr, "calla %s: ", name);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\nTry 'calla %s --help'.\n", name);
    return err_exit_code(ERR_USAGE);
}

int cmd_next_option(int argc, char **argv, const char *shorts, const struct option *longs)
{
    opterr = 0;
    int c = getopt_long(argc, argv, shorts, longs, NULL);
    const char *text = c == -1 ? "" : argv[optind - 1];
    bool is_short = c == '?' && optopt; /* for a long one optopt is 0, or the val of one that */
    for (size_t i = 0; longs[i].name && is_short; i++) /* takes no value and was given one */
        is_short = longs[i].val != optopt;
    if (c == ':')
        cmd_usage(argv[0], "%s wants a value", text);
    else if (is_short)
        cmd_usage(argv[0], "there is no option '-%c'", optopt);
    else if (c == '?')
        cmd_usage(argv[0], "there is no option '%s'", text);
    return c == ':' ? '?' : c;
}

bool cmd_parse_uint(const char *option, const char *text, uint64_t lo, uint64_t hi, uint64_t *out,
                    struct err *err)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (!*text || *end || errno || strchr(text, '-') || v < lo || v > hi)
        return err_set(err, ERR_USAGE, "%s wants a whole number from %llu to %llu, not '%s'",
                       option, (unsigned long long)lo, (unsigned long long)hi, text);
    *out = v;
    return true;
}

bool cmd_parse_u32(const char *option, const char *text, uint32_t lo, uint32_t hi, uint32_t *out,
                   struct err *err)
{
    uint64_t n;
    if (!cmd_parse_uint(option, text, lo, hi, &n, err))
        return false;
    *out = (uint32_t)n;
    return true;
}

bool cmd_parse_bytes(const char *option, const char *text, uint64_t lo, uint64_t *out,
                     struct err *err)
{
    static const char units[] = "KMG";
    char *end;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    const char *unit = *end ? strchr(units, *end) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (end == text || (*end && (!unit || end[1])) || errno || strchr(text, '-') ||
        n > UINT64_MAX >> shift || n << shift < lo)
        return err_set(err, ERR_USAGE, "%s wants a number of bytes, also with K, M or G, not '%s'",
                       option, text);
    *out = n << shift;
    return true;
}

/* One of a few numbers. */
static bool cmd_parse_choice(const char *option, const char *text, const uint32_t *values, size_t n,
                             uint32_t *out, struct err *err)
{
    char list[64] = "";
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(list);
        snprintf(list + len, sizeof list - len, "%s%u",
                 !i          ? ""
                 : i + 1 < n ? ", "
                             : " or ",
                 values[i]);
    }
    uint64_t value;
    bool ok = cmd_parse_uint(option, text, 0, UINT32_MAX, &value, NULL), found = false;
    for (size_t i = 0; ok && i < n; i++)
        found |= values[i] == value;
    if (!found)
        return err_set(err, ERR_USAGE, "%s wants %s, not '%s'", option, list, text);
    *out = (uint32_t)value;
    return true;
}

bool cmd_parse_bits(const char *option, const char *text, uint32_t *out, struct err *err)
{
    static const uint32_t bits[] = {2, 3, 4, 5, 6, 8};
    return cmd_parse_choice(option, text, bits, sizeof bits / sizeof *bits, out, err);
}

bool cmd_parse_group(const char *option, const char *text, uint32_t *out, struct err *err)
{
    static const uint32_t groups[] = {32, 64, 128};
    return cmd_parse_choice(option, text, groups, sizeof groups / sizeof *groups, out, err);
}

bool cmd_parse_float(const char *option, const char *text, double lo, double hi, double *out,
                     struct err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (!*text || *end || !isfinite(v) || v < lo || v > hi)
        return err_set(err, ERR_USAGE, "%s wants a number from %g to %g, not '%s'", option, lo, hi,
                       text);
    *out = v;
    return true;
}

bool cmd_parse_ids(const char *text, struct token_list *ids, struct err *err)
{
    static const char between[] = " \t\r\n,[]";
    ids->len = 0;
    for (text += strspn(text, between); *text; text += strspn(text, between)) {
        char *end;
        errno = 0;
        long id = strtol(text, &end, 10);
        if (end == text || errno || id < 0 || id > INT32_MAX || (*end && !strchr(between, *end)))
            return err_set(err, ERR_INPUT, "'%.*s' is not a token id",
                           (int)(strcspn(text, between) < 60 ? strcspn(text, between) : 60), text);
        token_list_push(ids, (int32_t)id);
        text = end;
    }
    return true;
}

bool cmd_read_stdin(struct buf *out, struct err *err)
{
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, stdin)) > 0)
        buf_append(out, chunk, n);
    if (ferror(stdin))
        return err_set(err, ERR_INPUT, "cannot read standard input: %s", strerror(errno));
    if (out->full)
        return err_set(err, ERR_INPUT, "standard input is larger than %d bytes", BUF_MAX_DEFAULT);
    return true;
}

void cmd_show_progress(void *user, uint64_t done, uint64_t total)
{
    uint64_t *last_ns = user, now = clock_now_ns();
    if (now - *last_ns < 200000000 && done != total)
        return;
    *last_ns = now;
    fprintf(stderr, "\r%5.1f %%\033[K%s", 100.0 * (double)done / (double)(total ? total : 1),
            done == total ? "\r\033[K" : "");
}

bool cmd_binary_path(char *out, size_t size)
{
#ifdef __APPLE__
    char raw[PATH_MAX], real[PATH_MAX];
    uint32_t n = sizeof raw;
    if (_NSGetExecutablePath(raw, &n) != 0 || !realpath(raw, real))
        return false;
    snprintf(out, size, "%s", real);
#else
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    if (n <= 0)
        return false;
    out[n] = 0;
#endif
    return true;
}

char *cmd_default_model(void)
{
    static const char *const places[] = {"../models/demo", "../../models/demo",
                                         "../share/calla/models/demo"};
    char folder[PATH_MAX];
    char *slash = cmd_binary_path(folder, sizeof folder) ? strrchr(folder, '/') : NULL;
    if (!slash)
        return NULL;
    *slash = 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char *path = file_join(folder, places[i]);
        char *config = file_join(path, "config.json");
        bool found = file_exists(config);
        free(config);
        char *real = found ? realpath(path, NULL) : NULL;
        free(path);
        if (real)
            return real;
    }
    return NULL;
}
