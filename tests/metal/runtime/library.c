/* Loaded kernel libraries and the kernels in them.
 *
 * A library is loaded from a private copy of its file: dlopen gives one handle a path, and each
 * set of function-constant values needs its own initialised constants. */
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct library **libraries;
static int library_count;
static char error_text[512];

/* Of the library whose constructors run. */
static struct library *loading;
static const struct emu_constant *loading_constants;
static int loading_constant_count;

const char *emu_error(void)
{
    return error_text;
}

void emu_register_kernel(const char *name, emu_entry entry, const struct emu_parameter *parameters,
                         int count, int threads_max)
{
    struct library *l = loading;
    l->kernels = realloc(l->kernels, (size_t)(l->kernel_count + 1) * sizeof *l->kernels);
    if (!l->kernels)
        abort();
    l->kernels[l->kernel_count++] = (struct kernel){
        .name = name,
        .entry = entry,
        .parameters = parameters,
        .parameter_count = count,
        .threads_max = threads_max ? threads_max : EMU_THREADS_MAX,
        .library = l,
    };
}

int emu_function_constant(int index, void *out, emu_size bytes)
{
    for (int i = 0; i < loading_constant_count; i++) {
        const struct emu_constant *c = &loading_constants[i];
        if (c->index != index)
            continue;
        if (out && bytes <= sizeof c->value)
            memcpy(out, c->value, bytes);
        return 1;
    }
    return 0;
}

static bool library_copy(const char *from, char *to, size_t to_bytes)
{
    const char *directory = getenv("TMPDIR");
    snprintf(to, to_bytes, "%s/emu-XXXXXX", directory ? directory : "/tmp");
    int fd = mkstemp(to);
    FILE *in = fopen(from, "rb"), *out = fd < 0 ? NULL : fdopen(fd, "wb");
    bool ok = in && out;
    char block[65536];
    size_t n;
    while (ok && (n = fread(block, 1, sizeof block, in)) > 0)
        ok = fwrite(block, 1, n, out) == n;
    if (!ok)
        snprintf(error_text, sizeof error_text, "%s: %s", from, strerror(errno));
    if (in)
        fclose(in);
    if (out)
        ok = fclose(out) == 0 && ok;
    return ok;
}

static int library_measure(struct dl_phdr_info *info, size_t bytes, void *argument)
{
    (void)bytes;
    struct library *l = argument;
    if (info->dlpi_addr != l->low)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && end > l->high)
            l->high = end;
    }
    return 1;
}

void *emu_library_open(const char *path, const struct emu_constant *constants, int count)
{
    char copy[256];
    if (!library_copy(path, copy, sizeof copy))
        return NULL;
    struct library *l = calloc(1, sizeof *l);
    libraries = realloc(libraries, (size_t)(library_count + 1) * sizeof(struct library *));
    if (!l || !libraries)
        abort();
    l->path = strdup(path);
    loading = l;
    loading_constants = constants;
    loading_constant_count = count;
    l->handle = dlopen(copy, RTLD_NOW | RTLD_LOCAL);
    loading = NULL;
    loading_constant_count = 0;
    unlink(copy);
    struct link_map *map;
    if (!l->handle || dlinfo(l->handle, RTLD_DI_LINKMAP, &map)) {
        snprintf(error_text, sizeof error_text, "%s: %s", path, dlerror());
        free(l->kernels);
        free(l->path);
        free(l);
        return NULL;
    }
    l->low = map->l_addr;
    dl_iterate_phdr(library_measure, l);
    libraries[library_count++] = l;
    return l;
}

const struct library *library_of(const void *address)
{
    for (int i = 0; i < library_count; i++)
        if ((uintptr_t)address >= libraries[i]->low && (uintptr_t)address < libraries[i]->high)
            return libraries[i];
    return NULL;
}

void *emu_library_kernel(void *library, const char *name)
{
    struct library *l = library;
    for (int i = 0; i < l->kernel_count; i++)
        if (!strcmp(l->kernels[i].name, name))
            return &l->kernels[i];
    snprintf(error_text, sizeof error_text, "%s: no kernel named %s", l->path, name);
    return NULL;
}

const char *emu_library_kernel_name(void *library, int i)
{
    struct library *l = library;
    return i >= 0 && i < l->kernel_count ? l->kernels[i].name : NULL;
}

int emu_kernel_threads_max(void *kernel)
{
    return ((struct kernel *)kernel)->threads_max;
}
