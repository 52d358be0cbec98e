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

/* Slowest first: the last level of the last backend that this machine has is the default. Metal
 * stands first, so it is not, until a Mac has run metal-check. */
static const struct device_backend {
    bool deterministic, without;      /* it can be, it can do; see device_options */
    const char *(*level_name)(int i); /* that this machine can open; null past the end */
    bool (*open)(const char *level, const struct device_options *options, struct device **out,
                 struct err *err);
} device_backends[] = {
#ifdef CALLA_METAL
    {false, false, metal_level_name, metal_open},
#endif
    {true, false, cpu_level_name, cpu_open},
#ifdef CALLA_CUDA
    {false, true, cuda_level_name, cuda_open},
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

/* Why a backend that others have is not here, as " (reason)"; empty where nothing is known. */
static void device_absence(const char *name, char *text, size_t size)
{
    text[0] = 0;
    if (!device_matches("cuda", name))
        return;
#ifdef CALLA_CUDA
    snprintf(text, size, " (%s)", cuda_absence());
#else
    snprintf(text, size, " (this program was built without nvcc)");
#endif
}

bool device_open(const struct device_options *options, struct device **out, struct err *err)
{
    const struct device_backend *backend = NULL, *found_backend = NULL;
    const char *level, *found = NULL, *refused = NULL;
    char names[256] = "";
    for (int i = 0; (level = device_level(i, &backend)); i++) {
        if (options->deterministic && !backend->deterministic) {
            refused = device_matches(level, options->name) ? level : refused;
            continue;
        }
        size_t n = strlen(names);
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", level);
        if (device_matches(level, options->name)) {
            found = level;
            found_backend = backend;
        }
    }
    if (!found && refused)
        return err_set(
            err, ERR_USAGE,
            "'%s' cannot be deterministic: it multiplies few rows by another method than "
            "many; choose one of: %s",
            refused, names);
    if (!found) {
        char reason[128];
        device_absence(options->name, reason, sizeof reason);
        return err_set(err, ERR_USAGE, "no device '%s' here%s; choose one of: %s", options->name,
                       reason, names);
    }
    if (options->without && !found_backend->without)
        return err_set(err, ERR_USAGE,
                       "'%s' cannot do without '%s': techniques are left out on cuda only", found,
                       options->without);
    return found_backend->open(found, options, out, err);
}

void device_close(struct device *device)
{
    if (device)
        device_calls(device)->close(device);
}
