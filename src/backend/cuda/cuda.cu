/* The CUDA device: memory, transfers, the stream, and weights in the form that kernels read.
 *
 * Invariant: everything runs on one stream, and scratch moves only between ops. */
#include "backend/cuda/ops.cuh"

extern "C" {
#include "base/log.h"
}

#include <initializer_list>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ------------------------------------------------------------------------------- */

void cuda_fail(struct device *device, enum err_kind kind, const char *what, cudaError_t error)
{
    if (device->error.kind == ERR_NONE)
        err_set(&device->error, kind, "%s: %s (%s)", device->head.name, what,
                cudaGetErrorString(error));
    cudaGetLastError(); /* so that later calls do not report it again */
}

static void cuda_check(struct device *device, const char *what, cudaError_t error)
{
    if (error != cudaSuccess)
        cuda_fail(device, ERR_INTERNAL, what, error);
}

/* ---- memory ------------------------------------------------------------------------------- */

struct cuda_block {
    struct cuda_block *next;
    void *data;
};

static bool cuda_take(struct device *device, uint64_t bytes, void **out, struct err *err)
{
    struct cuda_block *block = (struct cuda_block *)malloc(sizeof *block);
    cudaError_t error = block ? cudaMalloc(out, bytes ? bytes : 1) : cudaErrorMemoryAllocation;
    if (error != cudaSuccess) {
        size_t left = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&left, &total);
        free(block);
        return err_set(err, ERR_RESOURCE,
                       "%s cannot have %.2f GiB more: %.2f of its %.2f GiB are free; use a shorter "
                       "context, fewer sequences or a smaller model",
                       device->head.name, bytes / 1073741824.0, left / 1073741824.0,
                       total / 1073741824.0);
    }
    block->data = *out;
    block->next = device->blocks;
    device->blocks = block;
    return true;
}

static void cuda_scratch_free(struct device *device, enum cuda_scratch_slot slot);

static bool cuda_alloc(struct device *device, uint64_t bytes, struct span *out, struct err *err)
{
    struct span span = {nullptr, 0};
    cuda_scratch_free(device, SCRATCH_UPLOAD); /* as a rule the weights are all there by now */
    if (!cuda_take(device, bytes, &span.base, err))
        return false;
    cuda_check(device, "memory could not be cleared",
               cudaMemsetAsync(span.base, 0, bytes ? bytes : 1, device->stream));
    *out = span;
    return true;
}

/* Recordings hold addresses: they end when memory goes. */
static void cuda_drop_recordings(struct device *device)
{
    for (int i = 0; i < CUDA_RECORDINGS; i++) {
        if (device->recordings[i].exec)
            cudaGraphExecDestroy(device->recordings[i].exec);
        device->recordings[i] = {};
    }
}

static void cuda_free(struct device *device, struct span span)
{
    for (struct cuda_block **link = &device->blocks; *link; link = &(*link)->next)
        if ((*link)->data == span.base) {
            struct cuda_block *block = *link;
            *link = block->next;
            cudaStreamSynchronize(device->stream);
            cuda_drop_recordings(device);
            cudaFree(block->data);
            free(block);
            return;
        }
}

static void cuda_scratch_free(struct device *device, enum cuda_scratch_slot slot)
{
    if (!device->scratch[slot].data)
        return;
    cudaStreamSynchronize(device->stream);
    cuda_drop_recordings(device);
    cudaFree(device->scratch[slot].data);
    device->scratch[slot].data = nullptr;
    device->scratch[slot].bytes = 0;
}

void *cuda_scratch(struct device *device, enum cuda_scratch_slot slot, uint64_t bytes)
{
    if (device->scratch[slot].bytes >= bytes)
        return device->scratch[slot].data;
    cuda_scratch_free(device, slot);
    cudaError_t error = cudaMalloc(&device->scratch[slot].data, bytes);
    if (error != cudaSuccess) {
        device->scratch[slot].data = nullptr;
        cuda_fail(device, ERR_RESOURCE, "out of memory for scratch; use smaller batches", error);
        return nullptr;
    }
    device->scratch[slot].bytes = bytes;
    return device->scratch[slot].data;
}

/* ---- weights ------------------------------------------------------------------------------ */

/* Joins scales and biases, and for tiled weights puts codes and pairs in tile order. One thread a
 * 16-byte piece of the result (codes) or a pair. rows: of one matrix as stored; count of them. */
static __global__ void weight_tile_codes(const uint4 *codes, uint2 *out, uint32_t rows,
                                         uint32_t groups, uint32_t padded, uint64_t total)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; /* 8-byte chunk of the result */
    if (i >= total)
        return;
    uint32_t lower = i % 2, lane = i / 2 % 32; /* lower: row + 8 */
    uint64_t tile = i / 64, tile_row = tile / groups;
    uint32_t group = tile % groups, tiles = padded / 16;
    uint64_t item = tile_row / tiles;
    uint32_t row = tile_row % tiles * 16 + lane / 4 + lower * 8;
    uint32_t v[2] = {0, 0};
    if (row < rows) {
        uint32_t word[8];
        *(uint4 *)word = codes[((item * rows + row) * groups + group) * 2];
        *(uint4 *)(word + 4) = codes[((item * rows + row) * groups + group) * 2 + 1];
#pragma unroll
        for (int n = 0; n < 16; n++) { /* digits n % 8 of v[n / 8] */
            uint32_t code = word[n / 8 * 4 + n % 4] >> (lane % 4 * 8 + n % 8 / 4 * 4) & 15;
            v[n / 8] |= code << (n % 8 * 4);
        }
    }
    out[i] = make_uint2(v[0], v[1]);
}

static __global__ void weight_join_pairs(const uint16_t *scales, const uint16_t *biases,
                                         uint32_t *out, uint32_t rows, uint32_t groups,
                                         uint32_t padded, bool tiled, uint64_t total)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total)
        return;
    uint64_t from = i;
    bool inside = true;
    if (tiled) {
        uint64_t tile = i / 16, tile_row = tile / groups;
        uint32_t row = tile_row % (padded / 16) * 16 + i % 16;
        inside = row < rows;
        from = (tile_row / (padded / 16) * rows + row) * groups + tile % groups;
    }
    out[i] = inside ? scales[from] | (uint32_t)biases[from] << 16 : 0;
}

/* Copies `count` matrices of `rows` rows, `stride` rows apart on the host, next to each other. In
 * one piece where they are one: what a copy of rows calls a row must be below 2 GB. */
static cudaError_t cuda_upload(struct device *device, void *to, struct span from,
                               const struct weight *w, uint64_t row_bytes)
{
    const char *at = (const char *)from.base + from.offset;
    uint64_t bytes = w->rows * row_bytes;
    if (w->count == 1 || w->expert_stride == w->rows)
        return cudaMemcpyAsync(to, at, w->count * bytes, cudaMemcpyHostToDevice, device->stream);
    return cudaMemcpy2DAsync(to, bytes, at, w->expert_stride * row_bytes, bytes, w->count,
                             cudaMemcpyHostToDevice, device->stream);
}

static bool cuda_load_affine(struct device *device, struct weight *w, struct err *err)
{
    bool tiled = cuda_is_tiled(w);
    uint32_t groups = w->cols / w->group, padded = tiled ? (w->rows + 15) / 16 * 16 : w->rows;
    uint64_t row_bytes = (uint64_t)w->cols / 32 * w->bits * 4, rows = (uint64_t)w->count * w->rows;
    uint64_t code_bytes = (uint64_t)w->count * padded * row_bytes;
    uint64_t pairs = (uint64_t)w->count * padded * groups;
    uint64_t code_space = (code_bytes + 255) / 256 * 256;
    void *data;
    if (!cuda_take(device, code_space + pairs * 4, &data, err))
        return false;
    char *raw = (char *)cuda_scratch(device, SCRATCH_UPLOAD,
                                     (tiled ? rows * row_bytes : 0) + rows * groups * 4);
    if (!raw)
        return device->head.calls.sync(device, err);
    uint16_t *scales = (uint16_t *)(raw + (tiled ? rows * row_bytes : 0));
    uint16_t *biases = scales + rows * groups;
    uint32_t *joined = (uint32_t *)((char *)data + code_space);
    cuda_check(device, "a weight could not be copied",
               cuda_upload(device, tiled ? (void *)raw : data, w->data, w, row_bytes));
    cuda_check(device, "scales could not be copied",
               cuda_upload(device, scales, w->scales, w, groups * 2));
    cuda_check(device, "biases could not be copied",
               cuda_upload(device, biases, w->biases, w, groups * 2));
    if (tiled)
        weight_tile_codes<<<cuda_ceil(code_bytes / 8, 256), 256, 0, device->stream>>>(
            (const uint4 *)raw, (uint2 *)data, w->rows, groups, padded, code_bytes / 8);
    weight_join_pairs<<<cuda_ceil(pairs, 256), 256, 0, device->stream>>>(
        scales, biases, joined, w->rows, groups, padded, tiled, pairs);
    cuda_check(device, "a weight could not be repacked", cudaGetLastError());
    w->data = {data, 0};
    w->scales = {data, code_space};
    w->biases = {nullptr, 0};
    w->expert_stride = padded;
    w->repacked = tiled ? data : nullptr;
    return device->head.calls.sync(device, err);
}

static bool cuda_load_weight(struct device *device, struct weight *w, struct err *err)
{
    if (w->kind == WEIGHT_AFFINE)
        return cuda_load_affine(device, w, err);
    uint64_t row_bytes = (uint64_t)w->cols * (w->kind == WEIGHT_F32 ? 4 : 2);
    void *data;
    if (!cuda_take(device, w->count * w->rows * row_bytes, &data, err))
        return false;
    cuda_check(device, "a weight could not be copied",
               cuda_upload(device, data, w->data, w, row_bytes));
    w->data = {data, 0};
    w->expert_stride = w->rows;
    return device->head.calls.sync(device, err);
}

/* ---- transfers ---------------------------------------------------------------------------- */

/* Small writes go through pinned memory and need no wait: the stream's order is enough. */
static void cuda_write(struct device *device, struct span to, const void *from, uint64_t bytes)
{
    if (!bytes)
        return;
    char *at = cuda_at<char>(to);
    uint64_t space = (bytes + 15) / 16 * 16;
    if (space > CUDA_STAGING_BYTES / 4) {
        cuda_check(device, "a copy to the device failed",
                   cudaMemcpyAsync(at, from, bytes, cudaMemcpyHostToDevice, device->stream));
        cuda_check(device, "the device failed", cudaStreamSynchronize(device->stream));
        return;
    }
    if (device->staged_bytes + space > CUDA_STAGING_BYTES) {
        cuda_check(device, "the device failed", cudaStreamSynchronize(device->stream));
        device->staged_bytes = 0;
    }
    memcpy(device->staging + device->staged_bytes, from, bytes);
    cuda_check(device, "a copy to the device failed",
               cudaMemcpyAsync(at, device->staging + device->staged_bytes, bytes,
                               cudaMemcpyHostToDevice, device->stream));
    device->staged_bytes += space;
    device->last_kernel = nullptr;
}

/* Through the two halves of the staging: the device fills one while the other is copied out. Writes
 * that lie there have left it by then, since the stream is in order. */
static cudaError_t cuda_read_staged(struct device *device, char *to, const char *from,
                                    uint64_t bytes)
{
    const uint64_t half = CUDA_STAGING_BYTES / 2;
    cudaError_t error = cudaSuccess;
    for (uint64_t at = 0; at < bytes + half && error == cudaSuccess; at += half) {
        uint64_t now = at / half % 2, before = at - half;
        if (at < bytes) {
            error = cudaMemcpyAsync(device->staging + now * half, from + at,
                                    bytes - at < half ? bytes - at : half, cudaMemcpyDeviceToHost,
                                    device->stream);
            if (error == cudaSuccess)
                error = cudaEventRecord(device->arrived[now], device->stream);
        }
        if (at == 0 || error != cudaSuccess)
            continue;
        error = cudaEventSynchronize(device->arrived[1 - now]);
        if (error == cudaSuccess)
            memcpy(to + before, device->staging + (1 - now) * half,
                   bytes - before < half ? bytes - before : half);
    }
    return error;
}

/* Memory that is not pinned costs the driver a copy of its own, a piece after the other. */
static void cuda_read(struct device *device, void *to, struct span from, uint64_t bytes)
{
    enum { LEAST_STAGED = 64 << 10 };
    if (!bytes)
        return;
    const char *at = cuda_at<const char>(from);
    cuda_check(device, "a copy from the device failed",
               bytes >= LEAST_STAGED
                   ? cuda_read_staged(device, (char *)to, at, bytes)
                   : cudaMemcpyAsync(to, at, bytes, cudaMemcpyDeviceToHost, device->stream));
    cuda_check(device, "the device failed", cudaStreamSynchronize(device->stream));
    device->staged_bytes = 0;
}

void cuda_look(struct device *device, const void *data, uint64_t bytes)
{
    void *host = malloc(bytes);
    struct span span = {(void *)data, 0};
    if (host)
        cuda_read(device, host, span, bytes);
    free(host);
}

static void cuda_copy(struct device *device, struct span to, struct span from, uint64_t bytes)
{
    if (bytes)
        cuda_check(device, "a copy on the device failed",
                   cudaMemcpyAsync(cuda_at<char>(to), cuda_at<char>(from), bytes,
                                   cudaMemcpyDeviceToDevice, device->stream));
}

/* After an error nothing runs on, and no recording stays: one may lack what failed, or its
 * scratch. */
static bool cuda_give_error(struct device *device, struct err *err)
{
    if (device->error.kind == ERR_NONE)
        return true;
    cudaStreamSynchronize(device->stream);
    cudaGetLastError();
    device->staged_bytes = 0;
    cuda_drop_recordings(device);
    err_set(err, device->error.kind, "%s", device->error.text);
    device->error.kind = ERR_NONE;
    return false;
}

static bool cuda_sync(struct device *device, struct err *err)
{
    cuda_check(device, "the device failed", cudaStreamSynchronize(device->stream));
    device->staged_bytes = 0;
    return cuda_give_error(device, err);
}

/* What the last fetch brought has been collected: its memory may go. */
static bool cuda_fetch_space(struct device *device, uint32_t bytes)
{
    if (device->fetch.space >= bytes)
        return true;
    if (device->fetch.data)
        cudaFreeHost(device->fetch.data);
    cudaError_t error = cudaMallocHost((void **)&device->fetch.data, bytes);
    device->fetch.space = error == cudaSuccess ? bytes : 0;
    if (error == cudaSuccess)
        return true;
    device->fetch.data = nullptr;
    cuda_fail(device, ERR_RESOURCE, "no pinned memory is left for a step's choices", error);
    return false;
}

/* To pinned memory: a copy to any other would wait for the stream. */
static void cuda_fetch(struct device *device, struct span from, uint32_t bytes)
{
    device->fetch.bytes = 0;
    if (!cuda_fetch_space(device, bytes))
        return;
    cudaError_t error = cudaMemcpyAsync(device->fetch.data, cuda_at<const char>(from), bytes,
                                        cudaMemcpyDeviceToHost, device->stream);
    if (error == cudaSuccess)
        error = cudaEventRecord(device->fetch.arrived, device->stream);
    cuda_check(device, "a copy from the device failed", error);
    device->fetch.bytes = error == cudaSuccess ? bytes : 0;
}

/* Waits for the event alone: what was encoded since goes on. */
static bool cuda_collect(struct device *device, void *to, struct err *err)
{
    cuda_check(device, "the device failed", cudaEventSynchronize(device->fetch.arrived));
    if (device->error.kind == ERR_NONE)
        memcpy(to, device->fetch.data, device->fetch.bytes);
    return cuda_give_error(device, err);
}

/* ---- recorded steps ----------------------------------------------------------------------- */

static bool cuda_step_begin(struct device *device, uint64_t key)
{
    struct cuda_recording *r = nullptr;
    if (device->without & (CUDA_GRAPHS | CUDA_ROUTING))
        return false;
    for (int i = 0; i < CUDA_RECORDINGS && !r; i++)
        if (device->recordings[i].key == key || device->recordings[i].key == 0)
            r = &device->recordings[i];
    device->last_kernel = nullptr;
    device->running = nullptr;
    if (!r) {
        cudaStreamSynchronize(device->stream);
        cuda_drop_recordings(device);
        r = &device->recordings[0];
    }
    if (r->exec) {
        cuda_check(device, "a recorded step could not be started",
                   cudaGraphLaunch(r->exec, device->stream));
        return true;
    }
    if (r->key == 0) {
        r->key = key;
        return false;
    }
    if (cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess)
        device->running = r;
    cudaGetLastError();
    return false;
}

static void cuda_step_end(struct device *device)
{
    struct cuda_recording *r = device->running;
    cudaGraph_t graph = nullptr;
    device->last_kernel = nullptr;
    device->running = nullptr;
    if (!r)
        return;
    cudaError_t error = cudaStreamEndCapture(device->stream, &graph);
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&r->exec, graph, 0);
        r->exec = error == cudaSuccess ? r->exec : nullptr;
    }
    if (error == cudaSuccess)
        error = cudaGraphLaunch(r->exec, device->stream);
    if (graph)
        cudaGraphDestroy(graph);
    cuda_check(device, "a step could not be recorded", error);
}

/* ---- open and close ----------------------------------------------------------------------- */

static void cuda_close(struct device *device)
{
    cudaStreamSynchronize(device->stream);
    cuda_drop_recordings(device);
    while (device->blocks) {
        struct cuda_block *block = device->blocks;
        device->blocks = block->next;
        cudaFree(block->data);
        free(block);
    }
    for (int i = 0; i < SCRATCH_SLOTS; i++)
        cudaFree(device->scratch[i].data);
    for (cudaEvent_t event : {device->arrived[0], device->arrived[1], device->fetch.arrived})
        if (event)
            cudaEventDestroy(event);
    cudaFreeHost(device->staging);
    cudaFreeHost(device->fetch.data);
    if (device->stream)
        cudaStreamDestroy(device->stream);
    free(device);
}

/* Device 0 is the one (CUDA_VISIBLE_DEVICES chooses which that is), if it is new enough. */
static bool cuda_is_here(void)
{
    int count = 0, major = 0;
    bool here =
        cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
        major >= 8;
    cudaGetLastError();
    return here;
}

extern "C" const char *cuda_level_name(int i)
{
    return i == 0 && cuda_is_here() ? "cuda" : nullptr;
}

extern "C" const char *cuda_absence(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    return error == cudaErrorInsufficientDriver
               ? "there is no NVIDIA driver, or it is older than the CUDA that this was built with"
           : error != cudaSuccess ? cudaGetErrorString(error)
           : count == 0           ? "there is no NVIDIA GPU"
                                  : "the GPU is older than compute capability 8.0";
}

static const struct {
    const char *name;
    enum cuda_technique bit;
} cuda_techniques[] = {
    {"graphs", CUDA_GRAPHS},   {"overlap", CUDA_OVERLAP}, {"routing", CUDA_ROUTING},
    {"grouped", CUDA_GROUPED}, {"batch", CUDA_BATCH},     {"packing", CUDA_PACKING},
    {"split", CUDA_SPLIT},     {"flash", CUDA_FLASH},     {"chunks", CUDA_CHUNKS},
    {"ahead", CUDA_AHEAD},
};

static bool cuda_leave_out(struct device *device, const char *name, struct err *err)
{
    char names[128] = "";
    for (const auto &technique : cuda_techniques) {
        size_t n = strlen(names);
        if (!name || !strcmp(technique.name, name)) {
            device->without = name ? technique.bit : 0;
            return true;
        }
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", technique.name);
    }
    return err_set(err, ERR_USAGE, "there is no technique '%s'; choose one of: %s", name, names);
}

static void cuda_fill(struct device *device)
{
    struct ops *ops = &device->head.ops;
    ops->embed = cuda_embed;
    ops->linear = cuda_linear;
    ops->delta = cuda_delta;
    ops->kv_append = cuda_kv_append;
    ops->attention = cuda_attention;
    ops->moe_route = cuda_moe_route;
    ops->moe_experts = cuda_moe_experts;
    ops->argmax = cuda_argmax;
    ops->top = cuda_top;
    ops->copy = cuda_copy;
    struct device_calls *calls = &device->head.calls;
    calls->alloc = cuda_alloc;
    calls->free = cuda_free;
    calls->load_weight = cuda_load_weight;
    calls->write = cuda_write;
    calls->read = cuda_read;
    calls->sync = cuda_sync;
    if (!(device->without & CUDA_AHEAD)) {
        calls->fetch = cuda_fetch;
        calls->collect = cuda_collect;
    }
    calls->close = cuda_close;
    calls->step_begin = cuda_step_begin;
    calls->step_end = cuda_step_end;
}

/* The stream, pinned memory, events, and counters that are zero. */
static cudaError_t cuda_open_parts(struct device *device)
{
    cudaError_t error = cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = cudaMallocHost((void **)&device->staging, CUDA_STAGING_BYTES);
    for (cudaEvent_t *event : {&device->arrived[0], &device->arrived[1], &device->fetch.arrived})
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    if (error != cudaSuccess)
        return error;
    void *counters = cuda_scratch(device, SCRATCH_COUNTERS, CUDA_COUNTERS * sizeof(uint32_t));
    if (!counters)
        return cudaErrorMemoryAllocation;
    /* on the stream: nothing orders another one before its kernels */
    return cudaMemsetAsync(counters, 0, CUDA_COUNTERS * sizeof(uint32_t), device->stream);
}

/* What the GPU is and has. */
static cudaError_t cuda_ask(struct device *device)
{
    cudaDeviceProp prop;
    size_t left = 0, total = 0;
    cudaError_t error = cudaSetDevice(0);
    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&prop, 0);
    if (error == cudaSuccess)
        error = cudaMemGetInfo(&left, &total);
    if (error != cudaSuccess)
        return error;
    device->head.kv_kind = KV_BF16;
    /* Larger is faster as far as measured. Scratch grows with it: the 35B model's 157 KB a row. */
    device->head.prefill_rows = total >> 36 ? 8192 : 2048;
    uint64_t scratch = device->head.prefill_rows * (160ull << 10);
    device->head.memory_bytes = left > scratch ? left - scratch : left;
    device->sms = prop.multiProcessorCount;
    device->shared_limit = choice_shared_limit((uint32_t)prop.sharedMemPerBlockOptin);
    device->warpgroups = prop.major == 9 && prop.minor == 0;
    device->clusters = device->warpgroups && cuda_route_has_clusters();
    if (device->warpgroups && !device->clusters)
        log_warn(
            "cuda: this GPU has no room for the router's clusters; slower kernels do its work");
    return error;
}

extern "C" bool cuda_open(const char *level, const struct device_options *options,
                          struct device **out, struct err *err)
{
    if (!cuda_is_here())
        return err_set(err, ERR_USAGE, "this machine has no device '%s'", level);
    struct device *device = (struct device *)calloc(1, sizeof *device);
    if (!device)
        return err_set(err, ERR_RESOURCE, "out of memory: the device's record");
    device->head.name = "cuda";
    if (!cuda_leave_out(device, options->without, err)) {
        free(device);
        return false;
    }
    cudaError_t error = cuda_ask(device);
    if (error == cudaSuccess)
        error = cuda_open_parts(device);
    if (error != cudaSuccess) {
        cudaGetLastError();
        cuda_close(device);
        return err_set(err, ERR_RESOURCE,
                       "the GPU could not be opened: %s; is it in use by others?",
                       cudaGetErrorString(error));
    }
    cuda_fill(device);
    *out = device;
    return true;
}
