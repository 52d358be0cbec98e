/* The Metal device: memory, weights in place, pipelines, the command stream. The only file that
 * names Metal. Compiled with ARC on a Mac; written so that it also means the same without it.
 *
 * Invariant: `commands` and `encoder` are both there or neither; what was committed and not yet
 * waited for is in flight[], oldest first, and the host touches shared memory only when that is
 * empty and nothing is being encoded. */
#include "backend/metal/internal.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    METAL_IN_FLIGHT = 8,
    METAL_COMMANDS = 128, /* encoded before they are handed over, so that the GPU starts early */
    METAL_BYTES_MAX = 4096, /* that may travel with a command */
};

struct metal_memory {
    struct metal_memory *next;
    id<MTLBuffer> buffer;
    uint8_t *contents;
    uint64_t bytes;
    bool is_weight; /* lies in the checkpoint's mapping */
};

struct device {
    struct device_head head; /* first */
    id<MTLDevice> gpu;
    id<MTLCommandQueue> queue;
    id<MTLComputePipelineState> pipelines[METAL_KERNEL_COUNT];
    id<MTLCommandBuffer> commands;
    id<MTLComputeCommandEncoder> encoder;
    uint32_t encoded; /* into commands */
    id<MTLCommandBuffer> flight[METAL_IN_FLIGHT];
    int in_flight;
    struct err error; /* the first since the last sync */
    struct metal_memory *memory;
    uint64_t bytes; /* of all memory, weights too */
    struct {
        struct span span;
        uint64_t bytes;
    } scratch[METAL_SCRATCH_SLOTS];
};

static const char *const metal_names[METAL_KERNEL_COUNT] = {
#define METAL_KERNEL_NAME(id, name) name,
    METAL_KERNELS(METAL_KERNEL_NAME)
#undef METAL_KERNEL_NAME
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
    else
        metal_fail(device, ERR_INTERNAL, "the GPU stopped a command", why);
}

static void metal_wait_oldest(struct device *device)
{
    [device->flight[0] waitUntilCompleted];
    metal_check(device, device->flight[0]);
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
    [device->commands commit];
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

static bool metal_too_much(struct device *device, uint64_t bytes, struct err *err)
{
    uint64_t most = device->gpu.recommendedMaxWorkingSetSize;
    if (bytes > device->gpu.maxBufferLength || device->bytes + bytes > most)
        return !err_set(err, ERR_RESOURCE,
                        "%s cannot have %.2f GiB more: %.2f of the %.2f GiB that the system grants "
                        "the GPU are in use; use a shorter context, fewer sequences or a smaller "
                        "model",
                        device->head.name, bytes / 1073741824.0, device->bytes / 1073741824.0,
                        most / 1073741824.0);
    return false;
}

/* Takes the buffer into the device's list; a null buffer is an error. */
static bool metal_keep(struct device *device, id<MTLBuffer> buffer, bool is_weight,
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
    m->next = device->memory;
    device->memory = m;
    device->bytes += m->bytes;
    out->base = m;
    out->offset = 0;
    return true;
}

static bool metal_alloc(struct device *device, uint64_t bytes, struct span *out, struct err *err)
{
    bytes = bytes ? bytes : 1;
    if (metal_too_much(device, bytes, err))
        return false;
    @autoreleasepool {
        id<MTLBuffer> buffer = [device->gpu newBufferWithLength:bytes
                                                        options:MTLResourceStorageModeShared];
        if (!metal_keep(device, buffer, false, out, err))
            return false;
        memset(metal_memory_of(*out)->contents, 0, bytes);
    }
    return true;
}

static void metal_release(struct device *device, struct metal_memory **link)
{
    struct metal_memory *m = *link;
    *link = m->next;
    device->bytes -= m->bytes;
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

/* Makes host bytes [bytes] at span.base a place in a buffer, without a copy: the buffer covers the
 * whole pages around them. */
static bool metal_wrap(struct device *device, struct span *span, uint64_t bytes, struct err *err)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)span->base + span->offset, begin = at / page * page;
    uint64_t length = (at + bytes - begin + page - 1) / page * page;
    for (struct metal_memory *m = device->memory; m; m = m->next)
        if (m->is_weight && begin >= (uintptr_t)m->contents &&
            begin + length <= (uintptr_t)m->contents + m->bytes) {
            span->base = m;
            span->offset = at - (uintptr_t)m->contents;
            return true;
        }
    if (metal_too_much(device, length, err))
        return false;
    @autoreleasepool {
        id<MTLBuffer> buffer = [device->gpu newBufferWithBytesNoCopy:(void *)begin
                                                              length:length
                                                             options:MTLResourceStorageModeShared
                                                         deallocator:nil];
        if (!metal_keep(device, buffer, true, span, err))
            return false;
    }
    span->offset = at - begin;
    return true;
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

static bool metal_sync(struct device *device, struct err *err)
{
    metal_wait(device);
    if (device->error.kind == ERR_NONE)
        return true;
    err_set(err, device->error.kind, "%s", device->error.text);
    device->error.kind = ERR_NONE;
    return false;
}

/* ---- open and close ----------------------------------------------------------------------- */

static void metal_close(struct device *device)
{
    metal_wait(device);
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
    if (i)
        return NULL;
    @autoreleasepool {
        return metal_will_do(MTLCreateSystemDefaultDevice()) ? "metal" : NULL;
    }
}

/* The math mode is set, not left to the default: expert choice and log-probabilities must not hang
 * on what a fast mode does with NaN, infinity and the order of operations. */
static MTLCompileOptions *metal_compile_options(void)
{
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    options.languageVersion = MTLLanguageVersion3_1;
    if (@available(macOS 15.0, *))
        options.mathMode = MTLMathModeSafe;
    else
        options.fastMathEnabled = NO;
    return options;
}

static bool metal_make_pipelines(struct device *device, struct err *err)
{
    NSError *error = nil;
    NSString *source = [NSString stringWithUTF8String:metal_source];
    id<MTLLibrary> library = [device->gpu newLibraryWithSource:source
                                                       options:metal_compile_options()
                                                         error:&error];
    if (!library)
        return err_set(err, ERR_INTERNAL,
                       "metal: this system's compiler refuses the kernels, please report: %.700s",
                       error ? error.localizedDescription.UTF8String : "no reason given");
    for (int i = 0; i < METAL_KERNEL_COUNT; i++) {
        NSString *name = [NSString stringWithUTF8String:metal_names[i]];
        id<MTLFunction> function = [library newFunctionWithName:name];
        if (function)
            device->pipelines[i] = [device->gpu newComputePipelineStateWithFunction:function
                                                                              error:&error];
        if (!device->pipelines[i])
            return err_set(err, ERR_INTERNAL,
                           "metal: kernel %s cannot be made, please report it: %.700s",
                           metal_names[i],
                           error ? error.localizedDescription.UTF8String : "it is not there");
    }
    return true;
}

bool metal_open(const char *level, const struct device_options *options, struct device **out,
                struct err *err)
{
    (void)options;
    @autoreleasepool {
        id<MTLDevice> gpu = MTLCreateSystemDefaultDevice();
        if (!metal_will_do(gpu))
            return err_set(err, ERR_USAGE,
                           "this machine has no device '%s': it needs an Apple M1 or newer", level);
        struct device *device = (struct device *)calloc(1, sizeof *device);
        if (!device)
            return err_set(err, ERR_RESOURCE, "out of memory: the device's record");
        device->head.name = "metal";
        device->gpu = gpu;
        device->queue = [gpu newCommandQueue];
        if (!device->queue) {
            metal_close(device);
            return err_set(err, ERR_RESOURCE, "metal: the GPU gives no command queue");
        }
        if (!metal_make_pipelines(device, err)) {
            metal_close(device);
            return false;
        }
        device->head.kv_kind = KV_BF16;
        device->head.memory_bytes = gpu.recommendedMaxWorkingSetSize;
        metal_fill_ops(&device->head.ops);
        struct device_calls *calls = &device->head.calls;
        calls->alloc = metal_alloc;
        calls->free = metal_free;
        calls->load_weight = metal_load_weight;
        calls->write = metal_write;
        calls->read = metal_read;
        calls->sync = metal_sync;
        calls->close = metal_close;
        *out = device;
        return true;
    }
}
