/* Owns nothing that outlives a call. */
#include "cmd/machine.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <glob.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

/* ---- facts -------------------------------------------------------------------------------- */

/* The text after `key` and what separates it, up to the line's end, of a file of lines. */
static bool machine_find_line(const char *path, const char *key, char *out, size_t size)
{
    char line[512];
    FILE *f = fopen(path, "r");
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        const char *value = line + strlen(key);
        value += strspn(value, " \t:=\"");
        snprintf(out, size, "%.*s", (int)strcspn(value, "\"\n"), value);
        found = true;
    }
    if (f)
        fclose(f);
    return found;
}

static void machine_read_chip(char *out, size_t size)
{
    snprintf(out, size, "unknown processor");
#ifdef __APPLE__
    size_t n = size;
    sysctlbyname("machdep.cpu.brand_string", out, &n, NULL, 0);
#else
    if (!machine_find_line("/proc/cpuinfo", "model name", out, size) &&
        !machine_find_line("/proc/cpuinfo", "Model", out, size))
        machine_find_line("/proc/cpuinfo", "CPU part", out, size);
#endif
}

static int machine_processors(void)
{
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static void machine_read_system(char *out, size_t size)
{
    struct utsname u;
    char name[96] = "";
    machine_find_line("/etc/os-release", "PRETTY_NAME", name, sizeof name);
    if (uname(&u) != 0)
        snprintf(out, size, "%s", name[0] ? name : "unknown");
    else
        snprintf(out, size, "%s%s%.32s %.64s", name, name[0] ? ", " : "", u.sysname, u.release);
}

/* A machine without a supply that tells runs on mains, unless it has a battery that drains. */
static void machine_read_power(char *out, size_t size)
{
    glob_t found;
    char text[32];
    snprintf(out, size, "unknown");
    if (glob("/sys/class/power_supply/*/online", 0, NULL, &found) == 0) {
        snprintf(out, size, "battery");
        for (size_t i = 0; i < found.gl_pathc; i++)
            if (machine_find_line(found.gl_pathv[i], "1", text, sizeof text))
                snprintf(out, size, "mains");
        globfree(&found);
    }
}

void machine_read(struct machine *out)
{
    machine_read_chip(out->chip, sizeof out->chip);
    out->processors = machine_processors();
    out->memory = mem_machine_bytes();
    machine_read_system(out->system, sizeof out->system);
    machine_read_power(out->power, sizeof out->power);
}

const char *machine_build(void)
{
#if defined(__x86_64__)
#define MACHINE_ARCH "x86-64"
#elif defined(__aarch64__)
#define MACHINE_ARCH "arm64"
#else
#define MACHINE_ARCH "another architecture"
#endif
    return "calla " CALLA_VERSION ", compiler " __VERSION__ ", " MACHINE_ARCH;
}

/* ---- memory ------------------------------------------------------------------------------- */

enum {
    MACHINE_PASSES = 4,      /* of each way to read */
    MACHINE_BYTES = 1 << 30, /* far more than any cache */
    MACHINE_PIECE = 1 << 20,
    MACHINE_PIECES = MACHINE_BYTES / MACHINE_PIECE,
    MACHINE_STEP = 128, /* bytes read between two prefetches */
    MACHINE_HUGE_PAGE = 2 << 20,
};

typedef uint64_t machine_vector __attribute__((vector_size(32)));

struct machine_pass {
    const char *data;
    uint64_t *sums; /* [pieces]: keeps the reads from being left out */
};

/* Reads a piece as `streams` runs side by side, each prefetched `ahead` bytes (0: not at all). */
static inline __attribute__((always_inline)) void
machine_read_piece(const struct machine_pass *pass, uint32_t task, size_t streams, size_t ahead)
{
    const char *piece = pass->data + (size_t)task * MACHINE_PIECE;
    machine_vector a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t at = 0; at < MACHINE_PIECE / streams; at += MACHINE_STEP)
        for (size_t s = 0; s < streams; s++) {
            const char *from = piece + s * (MACHINE_PIECE / streams) + at;
            const machine_vector *v = (const void *)from;
            if (ahead) {
                __builtin_prefetch(from + ahead);
                __builtin_prefetch(from + ahead + 64);
            }
            a ^= v[0];
            b ^= v[1];
            c ^= v[2];
            d ^= v[3];
        }
    a ^= b ^ c ^ d;
    pass->sums[task] = a[0] ^ a[1] ^ a[2] ^ a[3];
}

/* Which way gets the most depends on the processor: how far it reads ahead by itself, whether
 * across pages, and how many misses it keeps open. */
#define MACHINE_WAY(name, streams, ahead)                                                          \
    static void name(void *pass, uint32_t task, int worker)                                        \
    {                                                                                              \
        (void)worker;                                                                              \
        machine_read_piece(pass, task, streams, ahead);                                            \
    }
MACHINE_WAY(machine_read_plain, 1, 0)
MACHINE_WAY(machine_read_near, 1, 2048)
MACHINE_WAY(machine_read_page_ahead, 1, 4096)
MACHINE_WAY(machine_read_two, 2, 4096)
MACHINE_WAY(machine_read_four, 4, 1024)
MACHINE_WAY(machine_read_eight, 8, 1024)

static pool_fn *const machine_ways[] = {
    machine_read_plain, machine_read_near, machine_read_page_ahead,
    machine_read_two,   machine_read_four, machine_read_eight,
};

static void machine_write_piece(void *arg, uint32_t task, int worker)
{
    (void)worker;
    struct machine_pass *pass = arg;
    memset((char *)(uintptr_t)pass->data + (size_t)task * MACHINE_PIECE, (int)task, MACHINE_PIECE);
}

/* The best of all ways, over memory in huge pages or in small ones. */
static bool machine_measure_pages(struct pool *pool, bool huge_pages, double *best, struct err *err)
{
    size_t bytes = (size_t)MACHINE_BYTES + MACHINE_HUGE_PAGE;
    char *raw = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return err_set(err, ERR_RESOURCE, "cannot have %zu bytes to measure memory with: %s", bytes,
                       strerror(errno));
#ifdef MADV_HUGEPAGE
    madvise(raw, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge_pages;
#endif
    size_t past = (uintptr_t)raw % MACHINE_HUGE_PAGE;
    struct machine_pass pass = {
        .data = raw + (past ? MACHINE_HUGE_PAGE - past : 0),
        .sums = mem_new(MACHINE_PIECES, sizeof *pass.sums),
    };
    pool_run(pool, machine_write_piece, &pass, MACHINE_PIECES);
    for (size_t i = 0; i < MACHINE_PASSES * sizeof machine_ways / sizeof *machine_ways; i++) {
        uint64_t start = clock_now_ns();
        pool_run(pool, machine_ways[i / MACHINE_PASSES], &pass, MACHINE_PIECES);
        double rate = MACHINE_BYTES / clock_seconds_since(start);
        *best = rate > *best ? rate : *best;
    }
    free(pass.sums);
    munmap(raw, bytes);
    return true;
}

bool machine_measure_memory(int threads, double *out, struct err *err)
{
    struct pool *pool;
    if (!pool_open(threads, &pool, err))
        return false;
    *out = 0;
    bool ok =
        machine_measure_pages(pool, false, out, err) && machine_measure_pages(pool, true, out, err);
    pool_close(pool);
    return ok;
}
