#include "base/file.h"

#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static bool file_read_all(int fd, const char *path, size_t max_bytes, struct buf *out,
                          struct err *err)
{
    char chunk[65536];
    size_t total = 0;
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_set(err, ERR_INPUT, "cannot read %s: %s", path, strerror(errno));
        if (n == 0)
            break;
        total += (size_t)n;
        if (total > max_bytes)
            return err_set(err, ERR_INPUT, "%s is larger than the %zu bytes allowed here", path,
                           max_bytes);
        buf_append(out, chunk, (size_t)n);
    }
    if (out->full)
        return err_set(err, ERR_INPUT, "%s does not fit the buffer that it is read into", path);
    return true;
}

bool file_read(const char *path, size_t max_bytes, struct buf *out, struct err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
    bool ok = file_read_all(fd, path, max_bytes, out, err);
    close(fd);
    return ok;
}

int file_open_regular(const char *path, struct err *err)
{
    /* Without O_NONBLOCK, a pipe in place of a file would wait for its writer for ever. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
        return fd;
    if (fd < 0 && errno != ENXIO) /* a socket, or a device that is not there */
        err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
    else
        err_set(err, ERR_INPUT, "%s is not a regular file", path);
    if (fd >= 0)
        close(fd);
    return -1;
}

bool file_find_regular(const char *path, bool *there, struct err *err)
{
    struct stat st;
    *there = false;
    if (lstat(path, &st) != 0) {
        if (errno == ENOENT)
            return true;
        return err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
    }
    if (stat(path, &st) != 0)
        return err_set(err, ERR_INPUT, "%s is a link that leads nowhere: %s", path,
                       strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(err, ERR_INPUT, "%s is not a regular file", path);
    *there = true;
    return true;
}

bool file_read_regular(const char *path, size_t max_bytes, struct buf *out, struct err *err)
{
    int fd = file_open_regular(path, err);
    bool ok = fd >= 0 && file_read_all(fd, path, max_bytes, out, err);
    if (fd >= 0)
        close(fd);
    return ok;
}

bool file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

bool file_map_open(const char *path, struct file_map *map, struct err *err)
{
    *map = (struct file_map){0};
    struct stat st;
    int fd = file_open_regular(path, err);
    if (fd < 0)
        return false;
    if (fstat(fd, &st) != 0) {
        close(fd);
        return err_set(err, ERR_INPUT, "cannot open %s: %s", path, strerror(errno));
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
