/* Files read whole or mapped. */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include "base/buf.h"
#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

/* Appends the whole file to out; fails when it is missing, unreadable, or larger than max_bytes. */
bool file_read(const char *path, size_t max_bytes, struct buf *out, struct err *err);

bool file_exists(const char *path);

/* For files of a model, which nobody but their owner vouches for: a pipe, folder, socket or device
 * in place of one is an error at once, never waited for or read without end. */

/* Opens a regular file for reading; -1 with the error. */
int file_open_regular(const char *path, struct err *err);
/* there: whether there is one. What is in its place otherwise, also a link to nowhere, is an error.
 * */
bool file_find_regular(const char *path, bool *there, struct err *err);
/* As file_read, of a regular file. */
bool file_read_regular(const char *path, size_t max_bytes, struct buf *out, struct err *err);

/* A read-only mapping of a whole file. The descriptor is closed at once. */
struct file_map {
    const uint8_t *data; /* u8 [bytes], page aligned; null for an empty file */
    size_t bytes;
};

bool file_map_open(const char *path, struct file_map *map, struct err *err);
void file_map_close(struct file_map *map);

/* Joins folder and name with one slash into a new string; free() releases it. */
char *file_join(const char *folder, const char *name);

#endif
