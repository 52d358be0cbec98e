/* The Metal device: memory, weights in place, the command stream, open and close. Compiled with
 * ARC on a Mac; written so that it also means the same without it.
 *
 * Invariant: `commands` and `encoder` are both there or neither; what was committed and not yet
 * waited for is in flight[], oldest first, and the host touches shared memory only when that is
 * empty and nothing is being encoded; or where a fetch has been waited for, whose bytes stay. */
#include "backend/metal/metal_objects.h"

#include "base/log.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    METAL_COMMANDS = 128, /* encoded before they are handed over, so that the GPU starts early */
    METAL_BYTES_MAX = 4096, /* that may travel with a command */
};

static struct metal_memory *metal_memory_of(struct span span)
{
    return (struct metal_memory *)span.base;
}

/* ---- the stream --------------------------------------------------------------------------- */

static void metal_fail(struct device *device, enum err_kind kind, const char *what,
                       const char *why)
{
    if (device->error.kind == ERR_NONE)
        err_set(&device->error, kind, "%s: %s: %s", device->head.name, what, why);
}

static void metal_check(struct device *device, id<MTLCommandBuffer> commands)
{
    if (commands.status != MTLCommandBufferStatusError)
        return;
    NSError *error = commands.error;
    const char *why = error ? error.localizedDescription.UTF8String : "no reason given";
    NSInteger code = error ? error.code : 0;
    if (code == MTLCommandBufferErrorOutOfMemory)
        metal_fail(device, ERR_RESOURCE,
                   "the GPU ran out of memory; use a shorter context or fewer sequences", why);
    else if (code == MTLCommandBufferErrorDeviceRemoved)
        metal_fail(device, ERR_INTERNAL, "the GPU was lost; start the program again", why);
    else if (code == MTLCommandBufferErrorTimeout)
        metal_fail(device, ERR_INTERNAL, "a command took longer than the system allows", why);
    else
        metal_fail(device, ERR_INTERNAL, "the GPU stopped a command", why);
}

static void metal_wait_oldest(struct device *device)
{
    [device->flight[0] waitUntilCompleted];
    metal_check(device, device->flight[0]);
    device->waited++;
    device->in_flight--;
    for (int i = 0; i < device->in_flight; i++)
        device->flight[i] = device->flight[i + 1];
    device->flight[device->in_flight] = nil;
}

static void metal_commit(struct device *device)
{
    if (!device->encoder)
        return;
    if (device->in_flight == METAL_IN_FLIGHT)
        metal_wait_oldest(device);
    [device->encoder endEncoding];
    metal_residency_use(device);
    [device->commands commit];
    device->committed++;
    device->flight[device->in_flight++] = device->commands;
    device->encoder = nil;
    device->commands = nil;
    device->encoded = 0;
}

static void metal_wait(struct device *device)
{
    @autoreleasepool {
        metal_commit(device);
        while (device->in_flight)
            metal_wait_oldest(device);
    }
}

void metal_use(struct device *device, enum metal_kernel kernel)
{
    @autoreleasepool {
        if (!device->encoder) {
            device->commands = [device->queue commandBuffer];
            device->encoder = [device->commands computeCommandEncoder];
        }
        [device->encoder setComputePipelineState:device->pipelines[kernel]];
    }
}

void metal_set(struct device *device, int index, struct span span)
{
    [device->encoder setBuffer:metal_memory_of(span)->buffer
                        offset:span.offset
                       atIndex:(NSUInteger)index];
}

void metal_set_bytes(struct device *device, int index, const void *data, uint32_t bytes)
{
    [device->encoder setBytes:data length:bytes atIndex:(NSUInteger)index];
}

void metal_launch(struct device *device, uint32_t x, uint32_t y, uint32_t z, uint32_t threads)
{
    [device->encoder dispatchThreadgroups:MTLSizeMake(x, y, z)
                    threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
    if (++device->encoded == METAL_COMMANDS)
        @autoreleasepool {
            metal_commit(device);
        }
}

/* ---- memory ------------------------------------------------------------------------------- */

/* is_alias: the pages are counted already. */
static bool metal_too_much(struct device *device, uint64_t bytes, bool is_alias, struct err *err)
{
    uint64_t most = device->gpu.recommendedMaxWorkingSetSize, longest = device->gpu.maxBufferLength;
    if (bytes > longest)
        return !err_set(err, ERR_RESOURCE,
                        "%s cannot have %.2f GiB in one piece: its buffers are at most %.2f GiB "
                        "long; use a shorter context, fewer sequences or a smaller model",
                        device->head.name, bytes / 1073741824.0, longest / 1073741824.0);
    if (!is_alias && device->bytes + bytes > most)
        return !err_set(err, ERR_RESOURCE,
                        "%s cannot have %.2f GiB more: %.2f of the %.2f GiB that the system grants "
                        "the GPU are in use; use a shorter context, fewer sequences or a smaller "
                        "model",
                        device->head.name, bytes / 1073741824.0, device->bytes / 1073741824.0,
                        most / 1073741824.0);
    return false;
}

/* Takes the buffer into the device's list; a null buffer is an error. */
static bool metal_keep(struct device *device, id<MTLBuffer> buffer, bool is_weight, bool is_alias,
                       struct span *out, struct err *err)
{
    struct metal_memory *m = buffer ? (struct metal_memory *)calloc(1, sizeof *m) : NULL;
    if (!m)
        return err_set(err, ERR_RESOURCE,
                       "%s: the system has no memory for a buffer; use a shorter context or a "
                       "smaller model",
                       device->head.name);
    m->buffer = buffer;
    m->contents = (uint8_t *)buffer.contents;
    m->bytes = buffer.length;
    m->is_weight = is_weight;
    m->is_alias = is_alias;
    m->next = device->memory;
    device->memory = m;
    device->memory_changed = true;
    device->bytes += is_alias ? 0 : m->bytes;
    out->base = m;
    out->offset = 0;
    return true;
}

static bool metal_alloc(struct device *device, uint64_t bytes, struct span *out, struct err *err)
{
    bytes = bytes ? bytes : 1;
    if (metal_too_much(device, bytes, false, err))
        return false;
    @autoreleasepool {
        id<MTLBuffer> buffer = [device->gpu newBufferWithLength:bytes
                                                        options:MTLResourceStorageModeShared];
        if (!metal_keep(device, buffer, false, false, out, err))
            return false;
        memset(metal_memory_of(*out)->contents, 0, bytes);
    }
    return true;
}

static void metal_release(struct device *device, struct metal_memory **link)
{
    struct metal_memory *m = *link;
    *link = m->next;
    device->bytes -= m->is_alias ? 0 : m->bytes;
    device->memory_changed = true;
    m->buffer = nil;
    free(m);
}

static void metal_free(struct device *device, struct span span)
{
    if (!span.base)
        return;
    metal_wait(device);
    for (struct metal_memory **link = &device->memory; *link; link = &(*link)->next)
        if (*link == metal_memory_of(span)) {
            metal_release(device, link);
            return;
        }
}

struct span metal_scratch(struct device *device, enum metal_scratch_slot slot, uint64_t bytes)
{
    struct err err = {0};
    if (device->scratch[slot].bytes >= bytes)
        return device->scratch[slot].span;
    metal_free(device, device->scratch[slot].span);
    device->scratch[slot].bytes = 0;
    device->scratch[slot].span.base = NULL;
    if (metal_alloc(device, bytes, &device->scratch[slot].span, &err))
        device->scratch[slot].bytes = bytes;
    else
        metal_fail(device, err.kind, "scratch of an operation", err.text);
    return device->scratch[slot].span;
}

/* ---- weights ------------------------------------------------------------------------------ */

/* A buffer over the whole pages around these host bytes, without a copy. */
static bool metal_wrap_pages(struct device *device, uintptr_t at, uint64_t bytes, bool is_alias,
                             struct span *out, struct err *err)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = at / page * page;
    uint64_t length = (at + bytes - begin + page - 1) / page * page;
    if (metal_too_much(device, length, is_alias, err))
        return false;
    @autoreleasepool {
        id<MTLBuffer> buffer = [device->gpu newBufferWithBytesNoCopy:(void *)begin
                                                              length:length
                                                             options:MTLResourceStorageModeShared
                                                         deallocator:nil];
        if (!metal_keep(device, buffer, true, is_alias, out, err))
            return false;
    }
    out->offset = at - begin;
    return true;
}

/* Covers a mapping with as few buffers as the GPU's limit allows. */
static bool metal_map(struct device *device, const void *base, uint64_t bytes, struct err *err)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t most = device->gpu.maxBufferLength / page * page;
    uintptr_t end = (uintptr_t)base + bytes;
    struct span span;
    for (uintptr_t at = (uintptr_t)base / page * page; at < end; at += most)
        if (!metal_wrap_pages(device, at, end - at < most ? end - at : most, false, &span, err))
            return false;
    return true;
}

/* Makes host bytes [bytes] at span.base a place in a buffer. What lies across the end of one gets
 * a buffer of its own over the same pages. */
static bool metal_wrap(struct device *device, struct span *span, uint64_t bytes, struct err *err)
{
    uintptr_t at = (uintptr_t)span->base + span->offset;
    bool is_alias = false;
    for (struct metal_memory *m = device->memory; m; m = m->next) {
        uintptr_t begin = (uintptr_t)m->contents, end = begin + m->bytes;
        if (m->is_weight && at >= begin && at + bytes <= end) {
            span->base = m;
            span->offset = at - begin;
            return true;
        }
        is_alias = is_alias || (m->is_weight && at < end && at + bytes > begin);
    }
    return metal_wrap_pages(device, at, bytes, is_alias, span, err);
}

static bool metal_load_weight(struct device *device, struct weight *w, struct err *err)
{
    uint64_t rows = (uint64_t)(w->count - 1) * w->expert_stride + w->rows;
    if (w->kind != WEIGHT_AFFINE)
        return metal_wrap(device, &w->data, rows * w->cols * (w->kind == WEIGHT_F32 ? 4 : 2), err);
    return metal_wrap(device, &w->data, rows * (w->cols / 32) * w->bits * 4, err) &&
           metal_wrap(device, &w->scales, rows * (w->cols / w->group) * 2, err) &&
           metal_wrap(device, &w->biases, rows * (w->cols / w->group) * 2, err);
}

/* ---- transfers ---------------------------------------------------------------------------- */

static void metal_write(struct device *device, struct span to, const void *from, uint64_t bytes)
{
    if (!bytes)
        return;
    bool busy = device->encoder || device->in_flight;
    if (busy && bytes <= METAL_BYTES_MAX) {
        uint32_t count = (uint32_t)bytes;
        metal_use(device, METAL_WRITE);
        metal_set_bytes(device, 0, from, count);
        metal_set(device, 1, to);
        metal_set_bytes(device, 2, &count, sizeof count);
        metal_launch(device, (count + 255) / 256, 1, 1, 256);
        return;
    }
    metal_wait(device);
    memcpy(metal_memory_of(to)->contents + to.offset, from, bytes);
}

static void metal_read(struct device *device, void *to, struct span from, uint64_t bytes)
{
    metal_wait(device);
    if (bytes)
        memcpy(to, metal_memory_of(from)->contents + from.offset, bytes);
}

/* After an error nothing runs on, and what a command left half done is put right. */
static bool metal_give_error(struct device *device, struct err *err)
{
    if (device->error.kind == ERR_NONE)
        return true;
    metal_wait(device);
    if (device->scratch[METAL_SCRATCH_ARRIVED].bytes)
        memset(metal_memory_of(device->scratch[METAL_SCRATCH_ARRIVED].span)->contents, 0,
               device->scratch[METAL_SCRATCH_ARRIVED].bytes);
    err_set(err, device->error.kind, "%s", device->error.text);
    device->error.kind = ERR_NONE;
    return false;
}

static bool metal_sync(struct device *device, struct err *err)
{
    metal_wait(device);
    return metal_give_error(device, err);
}

static void metal_fetch(struct device *device, struct span from, uint32_t bytes)
{
    @autoreleasepool {
        metal_commit(device);
    }
    device->fetch.from = from;
    device->fetch.bytes = bytes;
    device->fetch.after = device->committed;
}

/* What was encoded since goes to the GPU first, so that it does not run dry. */
static bool metal_collect(struct device *device, void *to, struct err *err)
{
    const struct span from = device->fetch.from;
    @autoreleasepool {
        metal_commit(device);
        while (device->waited < device->fetch.after)
            metal_wait_oldest(device);
    }
    memcpy(to, metal_memory_of(from)->contents + from.offset, device->fetch.bytes);
    return metal_give_error(device, err);
}

/* ---- open and close ----------------------------------------------------------------------- */

static void metal_close(struct device *device)
{
    metal_wait(device);
    metal_idle_close(device->idle);
    device->residency = nil;
    while (device->memory)
        metal_release(device, &device->memory);
    for (int i = 0; i < METAL_KERNEL_COUNT; i++)
        device->pipelines[i] = nil;
    device->queue = nil;
    device->gpu = nil;
    free(device);
}

static bool metal_will_do(id<MTLDevice> gpu)
{
    return gpu && [gpu supportsFamily:MTLGPUFamilyApple7];
}

const char *metal_level_name(int i)
{
    @autoreleasepool {
        id<MTLDevice> gpu = MTLCreateSystemDefaultDevice();
        if (i == 0 && metal_will_do(gpu))
            return "metal/simdgroup";
        return i == 1 && metal_will_do(gpu) && metal_gpu_has_tensor(gpu) ? "metal/tensor" : NULL;
    }
}

bool metal_has_fences(const struct device *device)
{
    return device->has_fences;
}

bool metal_uses_tensor(const struct device *device)
{
    return device->uses_tensor;
}

/* Takes TensorOps into use when they compile and multiply rightly here. Whoever asked for a Metal
 * device gets one in any case; whoever named the level gets that or an error. */
static bool metal_try_tensor(struct device *device, bool is_named, struct err *err)
{
    struct err why = {0};
    device->head.name = "metal/tensor";
    device->uses_tensor = true;
    if (metal_make_tensor_pipelines(device, &why) && metal_check_tensor(device, &why))
        return true;
    if (is_named)
        return err_set(err, why.kind, "%s; --backend metal/simdgroup does without", why.text);
    log_warn("simdgroup matrices do the work of TensorOps: %s", why.text);
    device->head.name = "metal/simdgroup";
    device->uses_tensor = false;
    return true;
}

static void metal_fill_calls(struct device_calls *calls)
{
    calls->alloc = metal_alloc;
    calls->free = metal_free;
    calls->map = metal_map;
    calls->load_weight = metal_load_weight;
    calls->write = metal_write;
    calls->read = metal_read;
    calls->sync = metal_sync;
    calls->fetch = metal_fetch;
    calls->collect = metal_collect;
    calls->close = metal_close;
}

bool metal_open(const char *level, const struct device_options *options, struct device **out,
                struct err *err)
{
    @autoreleasepool {
        id<MTLDevice> gpu = MTLCreateSystemDefaultDevice();
        if (!metal_will_do(gpu))
            return err_set(err, ERR_USAGE,
                           "this machine has no device '%s': it needs an Apple M1 or newer", level);
        struct device *device = (struct device *)calloc(1, sizeof *device);
        if (!device)
            return err_set(err, ERR_RESOURCE, "out of memory: the device's record");
        device->head.name = "metal/simdgroup";
        device->head.kv_kind = KV_BF16;
        device->head.memory_bytes = gpu.recommendedMaxWorkingSetSize;
        metal_fill_ops(&device->head.ops);
        metal_fill_calls(&device->head.calls);
        device->gpu = gpu;
        device->queue = [gpu newCommandQueue];
        bool is_named = options->name && !strcmp(options->name, level);
        bool ok = device->queue || err_set(err, ERR_RESOURCE, "metal: no command queue is left");
        ok = ok && metal_residency_open(device, err) && metal_make_pipelines(device, err) &&
             (strcmp(level, "metal/tensor") || metal_try_tensor(device, is_named, err));
        if (!ok) {
            metal_close(device);
            return false;
        }
        *out = device;
        return true;
    }
}
