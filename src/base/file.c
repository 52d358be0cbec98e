#include "base/file.h"

#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

bool file_read(const char *path, size_t max_bytes, struct buf *out, struct err *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
    char chunk[65536];
    size_t total = 0, n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        total += n;
        if (total > max_bytes) {
            fclose(f);
            return err_set(err, ERR_INPUT, "%s is larger than the %zu bytes allowed here", path,
                           max_bytes);
        }
        buf_append(out, chunk, n);
    }
    bool bad = ferror(f);
    fclose(f);
    if (bad)
        return err_set(err, ERR_INPUT, "cannot read %s: %s", path, strerror(errno));
    if (out->full)
        return err_set(err, ERR_INPUT, "%s does not fit the buffer that it is read into", path);
    return true;
}

bool file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

bool file_map_open(const char *path, struct file_map *map, struct err *err)
{
    *map = (struct file_map){0};
    /* Without O_NONBLOCK, a pipe in place of a file would wait for its writer for ever. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return false;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return err_set(err, ERR_INPUT, "%s is not a regular file", path);
    }
    if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            close(fd);
            return err_set(err, ERR_RESOURCE, "cannot map %s (%lld bytes): %s", path,
                           (long long)st.st_size, strerror(errno));
        }
        map->data = p;
        map->bytes = (size_t)st.st_size;
    }
    close(fd);
    return true;
}

void file_map_close(struct file_map *map)
{
    if (map->data)
        munmap((void *)map->data, map->bytes);
    *map = (struct file_map){0};
}

char *file_join(const char *folder, const char *name)
{
    size_t a = strlen(folder), b = strlen(name);
    while (a > 1 && folder[a - 1] == '/')
        a--;
    char *path = mem_new(a + b + 2, 1);
    memcpy(path, folder, a);
    path[a] = '/';
    memcpy(path + a + 1, name, b);
    return path;
}
