#include "backend/cpu/cpu.h"

#include "base/mem.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- levels ------------------------------------------------------------------------------- */

static bool cpu_always(void)
{
    return true;
}

void cpu_fill_ref(struct ops *ops)
{
    *ops = (struct ops){
        .embed = ref_embed,
        .linear = ref_linear,
        .delta = ref_delta,
        .kv_append = ref_kv_append,
        .attention = ref_attention,
        .attention_scratch = ref_attention_scratch,
        .moe_route = ref_moe_route,
        .moe_experts = ref_moe_experts,
        .argmax = ref_argmax,
        .top = ref_top,
        .copy = ref_copy,
    };
}

#if defined(__x86_64__)
static bool cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Asks the operating system too: it must save the wide registers. */
static bool cpu_has_avx512(void)
{
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(__aarch64__)
#ifdef __linux__
#include <sys/auxv.h>

static bool cpu_has_neon(void)
{
    enum { HWCAP_DOT_PRODUCT = 1 << 20 };
    return getauxval(AT_HWCAP) & HWCAP_DOT_PRODUCT;
}

static bool cpu_has_i8mm(void)
{
    enum { HWCAP2_INT8_MATRIX = 1 << 13 }; /* HWCAP2_I8MM, which older headers lack */
    return cpu_has_neon() && getauxval(AT_HWCAP2) & HWCAP2_INT8_MATRIX;
}
#else
#include <sys/sysctl.h>

static bool cpu_has_neon(void)
{
    return true; /* every Apple chip with this architecture that runs macOS has dot products */
}

static bool cpu_has_i8mm(void) /* M2 and later */
{
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) == 0 && has;
}
#endif
#endif

/* Slowest first. Opening a level fills the table with every level up to it in turn, so each one
 * names only what it does better. */
static const struct cpu_level {
    const char *name;
    bool (*runs_here)(void);
    void (*fill)(struct ops *);
    enum kv_kind kv_kind;
} cpu_levels[] = {
    {"cpu/ref", cpu_always, cpu_fill_ref, KV_F32},
#if defined(__x86_64__)
    {"cpu/avx2", cpu_has_avx2, avx2_fill, KV_BF16},
    {"cpu/avx512", cpu_has_avx512, avx512_fill, KV_BF16},
#elif defined(__aarch64__)
    {"cpu/neon", cpu_has_neon, neon_fill, KV_BF16},
    {"cpu/i8mm", cpu_has_i8mm, i8mm_fill, KV_BF16},
#endif
};

enum { CPU_LEVELS = sizeof cpu_levels / sizeof cpu_levels[0] };

const char *cpu_level_name(int i)
{
    for (int n = 0; n < CPU_LEVELS; n++)
        if (cpu_levels[n].runs_here() && i-- == 0)
            return cpu_levels[n].name;
    return NULL;
}

/* ---- memory ------------------------------------------------------------------------------- */

/* From this size on the pages come from the system when they are first touched: a KV pool for
 * 262,144 positions costs nothing until it is used. */
static const size_t CPU_MAP_BYTES = 1 << 20;

/* Sits in the 64 bytes before an allocation. */
struct cpu_block {
    struct cpu_block *next, **link; /* link: what points here */
    size_t mapped_bytes;            /* 0: from the heap */
    char pad[64 - 3 * sizeof(void *)];
};

static_assert(sizeof(struct cpu_block) == 64, "allocations stay 64-aligned");

static bool cpu_alloc(struct device *device, uint64_t bytes, struct span *out, struct err *err)
{
    struct cpu_block *block = NULL;
    bool map = bytes >= CPU_MAP_BYTES;
    if (bytes < SIZE_MAX - sizeof *block && map) {
        block = mmap(NULL, bytes + sizeof *block, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        block = block == MAP_FAILED ? NULL : block;
    } else if (!map) {
        block = mem_try(bytes + sizeof *block, 1);
    }
    if (!block)
        return err_set(err, ERR_RESOURCE,
                       "out of memory: %s cannot have %.1f MiB more; use a shorter context or "
                       "a smaller model",
                       device->head.name, (double)bytes / (1 << 20));
    block->mapped_bytes = map ? bytes + sizeof *block : 0;
    block->next = device->blocks;
    block->link = &device->blocks;
    if (block->next)
        block->next->link = &block->next;
    device->blocks = block;
    *out = (struct span){.base = block + 1};
    return true;
}

static void cpu_free(struct device *device, struct span span)
{
    (void)device;
    if (!span.base)
        return;
    struct cpu_block *block = (struct cpu_block *)span.base - 1;
    *block->link = block->next;
    if (block->next)
        block->next->link = block->link;
    if (block->mapped_bytes)
        munmap(block, block->mapped_bytes);
    else
        free(block);
}

void *cpu_scratch(struct device *device, int slot, size_t count, size_t size)
{
    assert(slot >= 0 && slot < CPU_SCRATCH_SLOTS);
    size_t bytes;
    bool fits = !__builtin_mul_overflow(count ? count : 1, size, &bytes);
    if (fits && bytes <= device->scratch[slot].bytes)
        return device->scratch[slot].data;
    free(device->scratch[slot].data);
    device->scratch[slot].bytes = 0;
    device->scratch[slot].data = fits ? mem_try(bytes, 1) : NULL;
    if (!device->scratch[slot].data) {
        cpu_fail(
            device, ERR_RESOURCE,
            "out of memory: an operation needs %zu x %zu bytes of scratch; use smaller batches",
            count, size);
        return NULL;
    }
    device->scratch[slot].bytes = bytes;
    return device->scratch[slot].data;
}

/* ---- the stream --------------------------------------------------------------------------- */

void cpu_fail(struct device *device, enum err_kind kind, const char *fmt, ...)
{
    if (device->error.kind != ERR_NONE)
        return;
    va_list args;
    va_start(args, fmt);
    device->error.kind = kind;
    vsnprintf(device->error.text, sizeof device->error.text, fmt, args);
    va_end(args);
}

static bool cpu_load_weight(struct device *device, struct weight *w, struct err *err)
{
    (void)device;
    (void)w;
    (void)err;
    return true; /* the ops read the checkpoint's own bytes */
}

static void cpu_write(struct device *device, struct span to, const void *from, uint64_t bytes)
{
    (void)device;
    if (bytes)
        memcpy(cpu_at(to), from, bytes);
}

static void cpu_read(struct device *device, void *to, struct span from, uint64_t bytes)
{
    (void)device;
    if (bytes)
        memcpy(to, cpu_at(from), bytes);
}

static bool cpu_sync(struct device *device, struct err *err)
{
    if (device->error.kind == ERR_NONE)
        return true;
    err_set(err, device->error.kind, "%s: %s", device->head.name, device->error.text);
    device->error.kind = ERR_NONE;
    return false;
}

static void cpu_close(struct device *device)
{
    while (device->blocks)
        cpu_free(device, (struct span){.base = device->blocks + 1});
    for (int i = 0; i < CPU_SCRATCH_SLOTS; i++)
        free(device->scratch[i].data);
    pool_close(device->pool);
    free(device);
}

bool cpu_open(const char *level, const struct device_options *options, struct device **out,
              struct err *err)
{
    struct device *device = mem_new(1, sizeof *device);
    for (int i = 0; i < CPU_LEVELS && !device->head.name; i++) {
        if (!cpu_levels[i].runs_here())
            continue;
        cpu_levels[i].fill(&device->head.ops);
        if (!strcmp(cpu_levels[i].name, level)) {
            device->head.name = cpu_levels[i].name;
            device->head.kv_kind = cpu_levels[i].kv_kind;
        }
    }
    if (!device->head.name) {
        free(device);
        return err_set(err, ERR_USAGE, "this machine has no device '%s'", level);
    }
    device->deterministic = options->deterministic;
    device->threads = 1;
    if (device->head.ops.linear != ref_linear) {
        if (!pool_open(options->threads, &device->pool, err)) {
            free(device);
            return false;
        }
        device->threads = pool_threads(device->pool);
    }
    device->head.memory_bytes = mem_machine_bytes();
    device->head.calls = (struct device_calls){
        .alloc = cpu_alloc,
        .free = cpu_free,
        .load_weight = cpu_load_weight,
        .write = cpu_write,
        .read = cpu_read,
        .sync = cpu_sync,
        .close = cpu_close,
    };
    *out = device;
    return true;
}
