/* A CUDA runtime without a GPU, for the host side of the backend: it stands in for libcudart in the
 * test that includes it.
 *
 * Device memory is host memory. Copies and memsets are queued and done as late as the order of
 * the stream allows (or, by chance, earlier), so that what relies on luck is seen. Kernels do
 * nothing, but their launches are held against what a GPU of the kind allows, and counted. Any call
 * can be made to fail. What is not given back is counted too. */
#ifndef TESTS_FAKE_CUDA_H
#define TESTS_FAKE_CUDA_H

#include <cuda_runtime_api.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FAKE_QUEUE = 1024,
    FAKE_KERNELS = 256,
    FAKE_EVENTS = 4,
    FAKE_LAUNCHED = 4096,
    FAKE_PINNED = 4
};

struct fake_copy {
    char *to;
    const char *from; /* null: memset 0 */
    char *held;       /* the source's bytes, when it was not pinned */
    size_t bytes;
    int event; /* 1 + its index: reached here */
};

static struct fake {
    /* the GPU */
    int major, minor;
    size_t shared, memory;
    int sms, clusters; /* clusters of 16 blocks that run at a time */
    /* the calls */
    uint64_t calls, fail_at; /* 0: none */
    bool unlucky;            /* nothing is done before it must be */
    uint32_t luck;
    /* what there is of each */
    int blocks, pinned, streams, events, graphs, execs;
    struct {
        char *at;
        size_t bytes;
    } pinned_block[FAKE_PINNED];
    bool event_used[FAKE_EVENTS];
    /* the stream */
    struct fake_copy queue[FAKE_QUEUE];
    uint32_t first, count;
    bool capturing;
    /* kernels */
    struct {
        const void *host;
        const char *name;
        size_t shared; /* set by cudaFuncSetAttribute */
        bool cluster;
    } kernel[FAKE_KERNELS];
    int kernels;
    const char *launched[FAKE_LAUNCHED]; /* names, in order; those of a graph when it is launched */
    dim3 grid[FAKE_LAUNCHED];            /* of each; none of a graph's */
    int launches, captured;
    char fault[256]; /* the first launch that a GPU would refuse */
} fake;

/* Whether this call is the one that fails. */
static bool fake_fails(void)
{
    return ++fake.calls == fake.fail_at;
}

#define FAKE_CALL()                                                                                \
    do {                                                                                           \
        if (fake_fails())                                                                          \
            return cudaErrorMemoryAllocation;                                                      \
    } while (0)

/* ---- the stream --------------------------------------------------------------------------- */

static void fake_do_one(void)
{
    struct fake_copy *c = &fake.queue[fake.first];
    if (c->to && c->from)
        memcpy(c->to, c->held ? c->held : c->from, c->bytes);
    else if (c->to)
        memset(c->to, 0, c->bytes);
    free(c->held);
    fake.first = (fake.first + 1) % FAKE_QUEUE;
    fake.count--;
}

static void fake_do_all(void)
{
    while (fake.count)
        fake_do_one();
}

static void fake_add(struct fake_copy copy)
{
    if (fake.count == FAKE_QUEUE)
        fake_do_one();
    fake.queue[(fake.first + fake.count++) % FAKE_QUEUE] = copy;
    fake.luck = fake.luck * 1664525 + 1013904223;
    while (!fake.unlucky && fake.count && fake.luck >> 30 == 0) {
        fake_do_one();
        fake.luck = fake.luck * 1664525 + 1013904223;
    }
}

static bool fake_is_pinned(const void *at)
{
    for (int i = 0; i < FAKE_PINNED; i++)
        if (fake.pinned_block[i].at && (const char *)at >= fake.pinned_block[i].at &&
            (const char *)at < fake.pinned_block[i].at + fake.pinned_block[i].bytes)
            return true;
    return false;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    (void)stream;
    FAKE_CALL();
    if (fake.capturing)
        return cudaErrorStreamCaptureUnsupported;
    struct fake_copy copy = {.to = to, .from = from, .bytes = bytes};
    if (kind == cudaMemcpyHostToDevice && !fake_is_pinned(from)) {
        copy.held = malloc(bytes);
        memcpy(copy.held, from, bytes);
    }
    fake_add(copy);
    if (kind == cudaMemcpyDeviceToHost && !fake_is_pinned(to))
        fake_do_all();
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    if (width > to_pitch || width > from_pitch || to_pitch > INT32_MAX || from_pitch > INT32_MAX)
        return cudaErrorInvalidPitchValue;
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; i < height && error == cudaSuccess; i++)
        error = cudaMemcpyAsync((char *)to + i * to_pitch, (const char *)from + i * from_pitch,
                                width, kind, stream);
    return error;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    FAKE_CALL();
    if (value != 0)
        return cudaErrorInvalidValue;
    fake_add((struct fake_copy){.to = at, .bytes = bytes});
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    FAKE_CALL();
    if (fake.capturing)
        return cudaErrorStreamCaptureUnsupported;
    fake_do_all();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    (void)flags;
    FAKE_CALL();
    *stream = malloc(1);
    fake.streams++;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    fake_do_all();
    fake.streams--;
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    FAKE_CALL();
    for (intptr_t i = 0; i < FAKE_EVENTS; i++)
        if (!fake.event_used[i]) {
            fake.event_used[i] = true;
            fake.events++;
            *event = (cudaEvent_t)(i + 1);
            return cudaSuccess;
        }
    return cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    fake.event_used[(intptr_t)event - 1] = false;
    fake.events--;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)stream;
    FAKE_CALL();
    fake_add((struct fake_copy){.event = (int)(intptr_t)event});
    return cudaSuccess;
}

/* Up to its last record and not a step further. */
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    FAKE_CALL();
    uint32_t last = 0;
    for (uint32_t i = 0; i < fake.count; i++)
        if (fake.queue[(fake.first + i) % FAKE_QUEUE].event == (int)(intptr_t)event)
            last = i + 1;
    while (last--)
        fake_do_one();
    return cudaSuccess;
}

/* ---- memory ------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **at, size_t bytes)
{
    FAKE_CALL();
    if (fake.capturing)
        return cudaErrorStreamCaptureUnsupported;
    if (bytes > fake.memory || !(*at = malloc(bytes)))
        return cudaErrorMemoryAllocation;
    fake.blocks++;
    return cudaSuccess;
}

cudaError_t cudaFree(void *at)
{
    fake_do_all();
    fake.blocks -= at != NULL;
    free(at);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **at, size_t bytes)
{
    FAKE_CALL();
    for (int i = 0; i < FAKE_PINNED; i++)
        if (!fake.pinned_block[i].at) {
            *at = fake.pinned_block[i].at = malloc(bytes);
            fake.pinned_block[i].bytes = bytes;
            fake.pinned++;
            return cudaSuccess;
        }
    return cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *at)
{
    fake_do_all();
    for (int i = 0; i < FAKE_PINNED; i++)
        if (at && fake.pinned_block[i].at == at) {
            fake.pinned_block[i].at = NULL;
            fake.pinned--;
        }
    free(at);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    FAKE_CALL();
    *left = *total = fake.memory;
    return cudaSuccess;
}

/* ---- the device --------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    (void)device;
    *value = attr == cudaDevAttrComputeCapabilityMajor ? fake.major : 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    (void)device;
    FAKE_CALL();
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    (void)device;
    FAKE_CALL();
    memset(prop, 0, sizeof *prop);
    prop->major = fake.major;
    prop->minor = fake.minor;
    prop->sharedMemPerBlockOptin = fake.shared;
    prop->totalGlobalMem = fake.memory;
    prop->multiProcessorCount = fake.sms;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory (planted)" : "another error";
}

/* ---- graphs ------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)stream, (void)mode;
    FAKE_CALL();
    fake.capturing = true;
    fake.captured = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    (void)stream;
    fake.capturing = false;
    FAKE_CALL();
    *graph = malloc(sizeof(int));
    *(int *)*graph = fake.captured;
    fake.graphs++;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    FAKE_CALL();
    *exec = malloc(sizeof(int));
    *(int *)*exec = *(int *)graph;
    fake.execs++;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    fake.graphs--;
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    fake.execs--;
    free(exec);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    (void)stream;
    FAKE_CALL();
    for (int i = 0; i < *(int *)exec && fake.launches < FAKE_LAUNCHED; i++)
        fake.launched[fake.launches++] = "of a graph";
    return cudaSuccess;
}

/* ---- kernels ------------------------------------------------------------------------------ */

/* What compiled kernels call besides; no header of C declares it. */
void **__cudaRegisterFatBinary(void *binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *tid, void *bid, void *block, void *grid, int *warp);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
cudaError_t __cudaGetKernel(void *kernel, const void *host);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t stream);

void **__cudaRegisterFatBinary(void *binary)
{
    return binary;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *tid, void *bid, void *block, void *grid, int *warp)
{
    (void)handle, (void)device, (void)threads, (void)tid, (void)bid, (void)block, (void)grid;
    (void)warp;
    if (fake.kernels < FAKE_KERNELS) {
        fake.kernel[fake.kernels].host = host;
        fake.kernel[fake.kernels++].name = name;
    }
}

static int fake_find(const void *host)
{
    for (int i = 0; i < fake.kernels; i++)
        if (fake.kernel[i].host == host)
            return i;
    return 0;
}

cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attr, int value)
{
    FAKE_CALL();
    int k = fake_find(host);
    if (attr == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || (size_t)value > fake.shared)
            return cudaErrorInvalidValue;
        fake.kernel[k].shared = (size_t)value;
    }
    if (attr == cudaFuncAttributeNonPortableClusterSizeAllowed)
        fake.kernel[k].cluster = true;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *host,
                                           const cudaLaunchConfig_t *config)
{
    FAKE_CALL();
    if (!fake.kernel[fake_find(host)].cluster || config->gridDim.x % 16 != 0)
        return cudaErrorInvalidValue;
    *clusters = fake.clusters;
    return cudaSuccess;
}

/* Shared memory that a kernel declares for itself is at most so much where it asks for much. */
static size_t fake_declared(const char *name)
{
    return strstr(name, "scan_") || strstr(name, "prefill_") ? 0 : 1536;
}

static bool fake_check(int k, const cudaLaunchConfig_t *c)
{
    const char *name = fake.kernel[k].name, *what = NULL;
    bool hopper = fake.major == 9 && fake.minor == 0;
    size_t shared = c->dynamicSmemBytes;
    if (c->blockDim.x * c->blockDim.y * c->blockDim.z > 1024)
        what = "threads";
    if (c->gridDim.x > INT32_MAX || c->gridDim.y > 65535 || c->gridDim.z > 65535)
        what = "grid";
    if (shared > 48 << 10 && shared > fake.kernel[k].shared)
        what = "shared memory that was not asked for";
    if (shared > 48 << 10 && shared + fake_declared(name) > fake.shared)
        what = "shared memory";
    if (c->numAttrs && !hopper)
        what = "an attribute that the code does not obey";
    if (!hopper && (fake.kernel[k].cluster || strstr(name, "attention_flash")))
        what = "code of 9.0";
    if (strstr(name, "route_cluster") && (!fake.kernel[k].cluster || !fake.clusters))
        what = "a cluster";
    if (what && !fake.fault[0])
        snprintf(fake.fault, sizeof fake.fault, "%s: %s (grid %u %u %u, %u threads, %zu bytes)",
                 name, what, c->gridDim.x, c->gridDim.y, c->gridDim.z, c->blockDim.x, shared);
    return !what;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args)
{
    (void)args;
    FAKE_CALL();
    int k = fake_find(host);
    if (!fake_check(k, config))
        return cudaErrorInvalidValue;
    if (fake.capturing)
        fake.captured++;
    else if (fake.launches < FAKE_LAUNCHED) {
        fake.grid[fake.launches] = config->gridDim;
        fake.launched[fake.launches++] = fake.kernel[k].name;
    }
    return cudaSuccess;
}

/* Of the weights' kernels, which are launched the plain way. */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    (void)grid, (void)block, (void)shared, (void)stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    (void)grid, (void)block, (void)shared, (void)stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void *kernel, const void *host)
{
    *(const void **)kernel = host;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t stream)
{
    (void)kernel, (void)grid, (void)block, (void)args, (void)shared, (void)stream;
    return cudaSuccess;
}

#endif
