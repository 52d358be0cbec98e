/* The device's record, for the Objective-C files: metal.m (memory, stream, open and close),
 * metal_pipelines.m (the kernels, compiled), metal_residency.m. */
#ifndef BACKEND_METAL_OBJECTS_H
#define BACKEND_METAL_OBJECTS_H

#include "backend/metal/internal.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

/* What the SDK declares that this is compiled with; on which system it then runs is asked at run
 * time. The oldest SDK that will do is that of macOS 14. */
#define METAL_SDK __MAC_OS_X_VERSION_MAX_ALLOWED

enum { METAL_IN_FLIGHT = 8 };

struct metal_memory {
    struct metal_memory *next;
    id<MTLBuffer> buffer;
    uint8_t *contents;
    uint64_t bytes;
    bool is_weight; /* lies in the checkpoint's mapping */
    bool is_alias;  /* its pages belong to other buffers as well: counted there */
};

struct device {
    struct device_head head; /* first */
    id<MTLDevice> gpu;
    id<MTLCommandQueue> queue;
    id<MTLComputePipelineState> pipelines[METAL_KERNEL_COUNT];
    bool has_fences, uses_tensor;
    id<MTLCommandBuffer> commands;
    id<MTLComputeCommandEncoder> encoder;
    uint32_t encoded; /* into commands */
    id<MTLCommandBuffer> flight[METAL_IN_FLIGHT];
    int in_flight;
    uint64_t committed, waited; /* command buffers since the device was opened */
    struct {
        struct span from;
        uint32_t bytes;
        uint64_t after; /* committed buffers that make these bytes */
    } fetch;
    struct err error; /* the first since the last sync */
    struct metal_memory *memory;
    uint64_t bytes;      /* of all memory, weights too */
    bool memory_changed; /* since the residency set was brought up to it */
    id residency;        /* MTLResidencySet, or nil */
    struct metal_idle *idle;
    struct {
        struct span span;
        uint64_t bytes;
    } scratch[METAL_SCRATCH_SLOTS];
};

/* Whether the system and the GPU have TensorOps that are worth it: macOS 26.1, an M5 or newer. */
bool metal_gpu_has_tensor(id<MTLDevice> gpu);

/* Compiles the kernels of the first text, or of the second one. */
bool metal_make_pipelines(struct device *device, struct err *err);
bool metal_make_tensor_pipelines(struct device *device, struct err *err);

/* Claims all memory while commands run; does nothing where the system has no residency sets. */
bool metal_residency_open(struct device *device, struct err *err);
void metal_residency_use(struct device *device);

#endif
