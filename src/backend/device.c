/* Which backends this binary has. A backend adds a line to the table; its levels are named
 * "backend" or "backend/level". */
#include "backend/device.h"

#include "backend/cpu/cpu.h"
#ifdef CALLA_CUDA
#include "backend/cuda/cuda.h"
#endif
#ifdef CALLA_METAL
#include "backend/metal/metal.h"
#endif

#include <stdio.h>
#include <string.h>

/* Slowest first: the last level of the last backend that this machine has is the default. */
static const struct device_backend {
    const char *(*level_name)(int i); /* that this machine can open; null past the end */
    bool (*open)(const char *level, const struct device_options *options, struct device **out,
                 struct err *err);
} device_backends[] = {
#ifdef CALLA_METAL
    {metal_level_name, metal_open}, /* first, not the default, until a Mac has run metal-check */
#endif
    {cpu_level_name, cpu_open},
#ifdef CALLA_CUDA
    {cuda_level_name, cuda_open},
#endif
};

enum { DEVICE_BACKENDS = sizeof device_backends / sizeof device_backends[0] };

/* The i-th level over all backends, and its backend. */
static const char *device_level(int i, const struct device_backend **backend)
{
    for (int b = 0; b < DEVICE_BACKENDS; b++) {
        const char *name;
        for (int n = 0; (name = device_backends[b].level_name(n)); n++)
            if (i-- == 0) {
                *backend = &device_backends[b];
                return name;
            }
    }
    return NULL;
}

const char *device_name(int i)
{
    const struct device_backend *backend;
    return device_level(i, &backend);
}

/* A level answers to its own name and to its backend's ("cpu/ref" to "cpu"). */
static bool device_matches(const char *level, const char *name)
{
    size_t n = name ? strlen(name) : 0;
    return !name || (!strncmp(level, name, n) && (level[n] == 0 || level[n] == '/'));
}

bool device_open(const struct device_options *options, struct device **out, struct err *err)
{
    const struct device_backend *backend = NULL, *found_backend = NULL;
    const char *level, *found = NULL;
    char names[256] = "";
    for (int i = 0; (level = device_level(i, &backend)); i++) {
        size_t n = strlen(names);
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", level);
        if (device_matches(level, options->name)) {
            found = level;
            found_backend = backend;
        }
    }
    if (!found)
        return err_set(err, ERR_USAGE, "no device '%s' here; choose one of: %s", options->name,
                       names);
    return found_backend->open(found, options, out, err);
}

void device_close(struct device *device)
{
    if (device)
        device_calls(device)->close(device);
}
