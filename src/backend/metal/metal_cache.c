/* Where the compiled kernels are kept between runs: one file a text, system and GPU, in the user's
 * cache folder. A text that changed, an update of macOS or another GPU is another file. */
#include "backend/metal/internal.h"

#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#define METAL_CACHE_FOLDER "Library/Caches"
#else
#define METAL_CACHE_FOLDER ".cache"
#endif

static uint64_t metal_cache_hash(uint64_t hash, const char *text)
{
    do
        hash = (hash ^ (uint8_t)*text) * 0x100000001b3ull; /* FNV-1a, with the final 0 */
    while (*text++);
    return hash;
}

static bool metal_cache_folder(char path[METAL_PATH_BYTES])
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;
    if (cache && *cache == '/')
        n = snprintf(path, METAL_PATH_BYTES, "%s/calla", cache);
    else if (home && *home == '/')
        n = snprintf(path, METAL_PATH_BYTES, "%s/%s/calla", home, METAL_CACHE_FOLDER);
    else
        return false;
    if (n >= METAL_PATH_BYTES - 64)
        return false;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0777); /* that it is there already is no fault */
        *slash = '/';
    }
    return mkdir(path, 0777) == 0 || errno == EEXIST;
}

bool metal_cache_path(const char *text, const char *system, const char *gpu,
                      char path[METAL_PATH_BYTES])
{
    if (!metal_cache_folder(path))
        return false;
    uint64_t hash = metal_cache_hash(0xcbf29ce484222325ull, text);
    hash = metal_cache_hash(metal_cache_hash(hash, system), gpu);
    size_t n = strlen(path);
    snprintf(path + n, METAL_PATH_BYTES - n, "/metal-%016llx.bin", (unsigned long long)hash);
    return true;
}

bool metal_cache_has(const char *path)
{
    return access(path, R_OK) == 0;
}

void metal_cache_part(const char *path, char part[METAL_PATH_BYTES])
{
    snprintf(part, METAL_PATH_BYTES, "%.*s.%ld", METAL_PATH_BYTES - 32, path, (long)getpid());
}

void metal_cache_keep(const char *part, const char *path)
{
    if (rename(part, path) == 0)
        return;
    log_info("compiled kernels cannot be kept as %s: %s; the next start compiles them again", path,
             strerror(errno));
    unlink(part);
}
