/* The kernels, compiled by this system, and the archive of the results on disk.
 *
 * An archive that cannot be read, or lacks a kernel, is made anew; one that cannot be written costs
 * time at the next start and nothing else.
 *
 * The math mode is set, not left to the default: expert choice and log-probabilities must not hang
 * on what a fast mode does with NaN, infinity and the order of operations. */
#include "backend/metal/metal_objects.h"

#include "base/log.h"

static const char *const metal_names[METAL_KERNEL_COUNT] = {
#define METAL_KERNEL_NAME(id, name) name,
    METAL_KERNELS(METAL_KERNEL_NAME) METAL_FENCE_KERNELS(METAL_KERNEL_NAME)
        METAL_TENSOR_KERNELS(METAL_KERNEL_NAME)
#undef METAL_KERNEL_NAME
};

bool metal_gpu_has_tensor(id<MTLDevice> gpu)
{
#if METAL_SDK >= 260000
    if (@available(macOS 26.1, *))
        return [gpu supportsFamily:MTLGPUFamilyApple10];
#endif
    (void)gpu;
    return false;
}

static bool metal_system_has_fences(void)
{
#if METAL_SDK >= 150000
    if (@available(macOS 15.0, *))
        return true;
#endif
    return false;
}

static void metal_set_math(MTLCompileOptions *options)
{
#if METAL_SDK >= 150000
    if (@available(macOS 15.0, *)) {
        options.mathMode = MTLMathModeSafe;
        return;
    }
#endif
    options.fastMathEnabled = NO;
}

static MTLCompileOptions *metal_compile_options(bool tensor)
{
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    options.languageVersion = MTLLanguageVersion3_1;
#if METAL_SDK >= 150000
    if (@available(macOS 15.0, *))
        options.languageVersion = MTLLanguageVersion3_2;
#endif
#if METAL_SDK >= 260000
    if (@available(macOS 26.1, *))
        if (tensor)
            options.languageVersion = MTLLanguageVersion4_0;
#endif
    metal_set_math(options);
    return options;
}

static id<MTLLibrary> metal_compile(struct device *device, bool tensor, struct err *err)
{
    NSError *error = nil;
    NSString *source = [NSString stringWithUTF8String:tensor ? metal_tensor_source : metal_source];
    id<MTLLibrary> library = [device->gpu newLibraryWithSource:source
                                                       options:metal_compile_options(tensor)
                                                         error:&error];
    if (!library)
        err_set(err, ERR_INTERNAL,
                "metal: this system's compiler refuses the kernels, please report: %.700s",
                error ? error.localizedDescription.UTF8String : "no reason given");
    return library;
}

/* ---- the archive -------------------------------------------------------------------------- */

struct metal_archive {
    id<MTLBinaryArchive> archive; /* nil: compiled kernels are not kept */
    bool is_new;
    char path[METAL_PATH_BYTES];
};

/* path: null for an empty one */
static id<MTLBinaryArchive> metal_archive_load(struct device *device, const char *path)
{
    NSError *error = nil;
    MTLBinaryArchiveDescriptor *descriptor = [[MTLBinaryArchiveDescriptor alloc] init];
    if (path)
        descriptor.url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path]];
    return [device->gpu newBinaryArchiveWithDescriptor:descriptor error:&error];
}

static void metal_archive_renew(struct device *device, struct metal_archive *a)
{
    if (!a->is_new)
        log_warn("the compiled kernels in %s are damaged; they are compiled again", a->path);
    a->is_new = true;
    a->archive = metal_archive_load(device, NULL);
}

static void metal_archive_open(struct device *device, const char *text, struct metal_archive *a)
{
    NSString *system = [NSProcessInfo processInfo].operatingSystemVersionString;
    if (!metal_cache_path(text, system.UTF8String, device->gpu.name.UTF8String, a->path))
        return;
    a->is_new = !metal_cache_has(a->path);
    a->archive = metal_archive_load(device, a->is_new ? NULL : a->path);
    if (!a->archive && !a->is_new)
        metal_archive_renew(device, a);
}

static void metal_archive_save(const struct metal_archive *a)
{
    char part[METAL_PATH_BYTES];
    NSError *error = nil;
    if (!a->archive || !a->is_new)
        return;
    metal_cache_part(a->path, part);
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:part]];
    if ([a->archive serializeToURL:url error:&error])
        metal_cache_keep(part, a->path);
    else
        log_info("compiled kernels cannot be kept as %s: %s", a->path,
                 error ? error.localizedDescription.UTF8String : "no reason given");
}

/* ---- the pipelines ------------------------------------------------------------------------ */

static id<MTLComputePipelineState> metal_make_one(struct device *device, id<MTLFunction> function,
                                                  const struct metal_archive *a, NSError **error)
{
    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor alloc] init];
    MTLPipelineOption option = MTLPipelineOptionNone;
    descriptor.computeFunction = function;
    if (a->archive) {
        descriptor.binaryArchives = [NSArray arrayWithObject:a->archive];
        if (a->is_new)
            [a->archive addComputePipelineFunctionsWithDescriptor:descriptor error:error];
        else
            option = MTLPipelineOptionFailOnBinaryArchiveMiss;
    }
    return [device->gpu newComputePipelineStateWithDescriptor:descriptor
                                                      options:option
                                                   reflection:NULL
                                                        error:error];
}

static bool metal_make_all(struct device *device, id<MTLLibrary> library, int first, int end,
                           const struct metal_archive *a, struct err *err)
{
    for (int i = first; i < end; i++) {
        NSError *error = nil;
        NSString *name = [NSString stringWithUTF8String:metal_names[i]];
        id<MTLFunction> function = [library newFunctionWithName:name];
        device->pipelines[i] = function ? metal_make_one(device, function, a, &error) : nil;
        if (!device->pipelines[i])
            return err_set(err, ERR_INTERNAL,
                           "metal: kernel %s cannot be made, please report it: %.700s",
                           metal_names[i],
                           error ? error.localizedDescription.UTF8String : "it is not there");
    }
    return true;
}

static bool metal_make_range(struct device *device, int first, int end, bool tensor,
                             struct err *err)
{
    struct metal_archive a = {.archive = nil};
    id<MTLLibrary> library = metal_compile(device, tensor, err);
    if (!library)
        return false;
    metal_archive_open(device, tensor ? metal_tensor_source : metal_source, &a);
    bool ok = metal_make_all(device, library, first, end, &a, err);
    if (!ok && a.archive && !a.is_new) {
        metal_archive_renew(device, &a);
        ok = metal_make_all(device, library, first, end, &a, err);
    }
    if (ok)
        metal_archive_save(&a);
    return ok;
}

bool metal_make_pipelines(struct device *device, struct err *err)
{
    device->has_fences = metal_system_has_fences();
    int end = device->has_fences ? METAL_LINEAR_TENSOR_32 : METAL_ROUTE_ROWS_1;
    return metal_make_range(device, 0, end, false, err);
}

bool metal_make_tensor_pipelines(struct device *device, struct err *err)
{
    return metal_make_range(device, METAL_LINEAR_TENSOR_32, METAL_KERNEL_COUNT, true, err);
}
