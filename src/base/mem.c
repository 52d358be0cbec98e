#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *mem_must(void *p, size_t count, size_t size)
{
    if (!p) {
        fprintf(stderr, "calla: error: out of memory asking for %zu x %zu bytes\n", count, size);
        abort();
    }
    return p;
}

void *mem_new(size_t count, size_t size)
{
    return mem_must(calloc(count ? count : 1, size ? size : 1), count, size);
}

void *mem_grow(void *old, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        return mem_must(NULL, count, size);
    return mem_must(realloc(old, bytes ? bytes : 1), count, size);
}

void *mem_try(size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 64)
        return NULL;
    bytes = (bytes + 63) / 64 * 64;
    void *p = aligned_alloc(64, bytes ? bytes : 64);
    if (p)
        memset(p, 0, bytes ? bytes : 64);
    return p;
}

char *mem_copy_text(const char *text, size_t n)
{
    char *copy = mem_new(n + 1, 1);
    if (n)
        memcpy(copy, text, n);
    return copy;
}

uint64_t mem_machine_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
}

#ifdef __linux__
/* The value in kB of a line "NAME: n kB" in a file of /proc, in bytes; 0 when absent. */
static uint64_t mem_proc_value(const char *path, const char *name)
{
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    char line[256];
    unsigned long long kb = 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, name, strlen(name)) &&
            sscanf(line + strlen(name), ": %llu kB", &kb) == 1)
            break;
    fclose(f);
    return (uint64_t)kb * 1024;
}

uint64_t mem_available_bytes(void)
{
    return mem_proc_value("/proc/meminfo", "MemAvailable");
}

uint64_t mem_resident_bytes(void)
{
    return mem_proc_value("/proc/self/status", "VmRSS");
}
#elif defined(__APPLE__)
#include <mach/mach.h>

uint64_t mem_available_bytes(void)
{
    vm_statistics64_data_t vm;
    mach_msg_type_number_t n = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&vm, &n) != KERN_SUCCESS)
        return 0;
    return (uint64_t)(vm.free_count + vm.inactive_count + vm.purgeable_count) * vm_page_size;
}

uint64_t mem_resident_bytes(void)
{
    struct mach_task_basic_info info;
    mach_msg_type_number_t n = MACH_TASK_BASIC_INFO_COUNT;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t)&info, &n) != KERN_SUCCESS)
        return 0;
    return info.resident_size;
}
#else
uint64_t mem_available_bytes(void)
{
    return 0;
}

uint64_t mem_resident_bytes(void)
{
    return 0;
}
#endif
