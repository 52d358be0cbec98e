#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic int log_limit = LOG_WARN;

void log_set_level(enum log_level level)
{
    atomic_store(&log_limit, (int)level);
}

void log_write(enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    if ((int)level > atomic_load(&log_limit))
        return;
    char line[2048]; /* one write a line, so that threads do not interleave */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "calla: %s: %s\n", names[level], line);
}
