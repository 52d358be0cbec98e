/* Fetching files in parts, several at a time, so that any interruption loses next to nothing.
 *
 * A file is cut into segments. Its bytes go to PATH as they come, at their place; PATH.map counts
 * for each segment the bytes that are there. A count is written after the bytes that it counts, so
 * a process that is killed leaves a map that is true or a little low. What a power failure can
 * break, the caller's checksum finds. */
#ifndef CMD_FETCH_H
#define CMD_FETCH_H

#include "cmd/hub.h"

struct fetch_file {
    char *url, *path;
    uint64_t bytes;
    const char *hex; /* names the content: a map of other content is not taken up */
};

struct fetch;

/* Opens what is there of the files and begins nothing yet. On failure *out is null. */
bool fetch_open(const struct hub *hub, const char *name, const struct fetch_file *files,
                size_t count, struct fetch **out, struct err *err);
void fetch_close(struct fetch *fetch);

uint64_t fetch_bytes_there(const struct fetch *fetch);

/* Called several times a second; false stops the work. */
typedef bool fetch_progress(void *user, uint64_t there);

/* Fetches all that is missing. What can pass by itself is tried again; the rest ends it. */
bool fetch_run(struct fetch *fetch, fetch_progress *progress, void *user, struct err *err);

/* Removes a map whose file is whole, or both when the content is wrong. */
void fetch_drop_map(const char *path);
void fetch_drop(const char *path);

#endif
