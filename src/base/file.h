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
