/* Owns the file. A line is written in one call, under a lock, and flushed. */
#include "server/trace.h"

#include "base/log.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct trace {
    FILE *file;
    bool warned;
    pthread_mutex_t lock;
};

bool trace_open(const char *path, struct trace **out, struct err *err)
{
    /* What users wrote is for the owner's eyes. */
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    FILE *file = fd >= 0 ? fdopen(fd, "a") : NULL;
    if (!file) {
        err_set_errno(err, "cannot write the trace to %s", path);
        if (fd >= 0)
            close(fd);
        return false;
    }
    struct trace *trace = mem_new(1, sizeof *trace);
    trace->file = file;
    pthread_mutex_init(&trace->lock, NULL);
    *out = trace;
    return true;
}

void trace_close(struct trace *trace)
{
    if (!trace)
        return;
    fclose(trace->file);
    pthread_mutex_destroy(&trace->lock);
    free(trace);
}

void trace_write(struct trace *trace, const char *id, const char *event, json_t *fields)
{
    if (trace) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        json_t *line =
            json_pack("{s:f,s:s,s:s}", "time", (double)now.tv_sec + (double)now.tv_nsec * 1e-9,
                      "id", id, "event", event);
        json_object_update(line, fields);
        char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
        pthread_mutex_lock(&trace->lock);
        bool ok = text && fprintf(trace->file, "%s\n", text) > 0 && fflush(trace->file) == 0;
        if (!ok && !trace->warned)
            log_warn("lines are missing in the trace: %s (said once)",
                     text ? strerror(errno) : "a field is not UTF-8");
        trace->warned |= !ok;
        pthread_mutex_unlock(&trace->lock);
        free(text);
        json_decref(line);
    }
    json_decref(fields);
}
