/* The residency set, where the system has them (macOS 15): all buffers of the device, claimed
 * while it works and for a while after. Without one everything works, only the first command
 * after a pause may be slower.
 *
 * Invariant: the set is touched only under the lock of metal_idle.c, or before and after its
 * thread lives; buffers that came or went since the last commit are waiting in `pending`. */
#include "backend/metal/metal_objects.h"

#include "base/log.h"

#if METAL_SDK >= 150000

uint32_t metal_keep_ms = 180000;

static void metal_residency_hold(struct device *device)
{
    if (@available(macOS 15.0, *))
        [(id<MTLResidencySet>)device->residency requestResidency];
}

static void metal_residency_let_go(struct device *device)
{
    if (@available(macOS 15.0, *))
        [(id<MTLResidencySet>)device->residency endResidency];
}

/* Brings the set up to the list of memory. */
static void metal_residency_change(struct device *device)
{
    if (@available(macOS 15.0, *)) {
        id<MTLResidencySet> set = (id<MTLResidencySet>)device->residency;
        [set removeAllAllocations];
        for (struct metal_memory *m = device->memory; m; m = m->next)
            [set addAllocation:m->buffer];
        [set commit];
    }
    device->memory_changed = false;
}

bool metal_residency_open(struct device *device, struct err *err)
{
    if (@available(macOS 15.0, *)) {
        NSError *error = nil;
        MTLResidencySetDescriptor *descriptor = [[MTLResidencySetDescriptor alloc] init];
        id<MTLResidencySet> set = [device->gpu newResidencySetWithDescriptor:descriptor
                                                                       error:&error];
        if (!set) {
            log_info("the GPU's memory is not kept resident: %s",
                     error ? error.localizedDescription.UTF8String : "no reason given");
            return true;
        }
        device->residency = set;
        [device->queue addResidencySet:set];
        return metal_idle_open(device, metal_residency_hold, metal_residency_let_go, metal_keep_ms,
                               &device->idle, err);
    }
    return true;
}

void metal_residency_use(struct device *device)
{
    if (device->idle)
        metal_idle_use(device->idle, device->memory_changed ? metal_residency_change : NULL);
}

#else

bool metal_residency_open(struct device *device, struct err *err)
{
    (void)device;
    (void)err;
    return true;
}

void metal_residency_use(struct device *device)
{
    (void)device;
}

#endif
