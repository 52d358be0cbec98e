// A Metal device over the emulator, for the backend's host code under test.
//
// It enforces what Metal's API validation enforces and aborts with a message where that would; it
// runs committed work only in waitUntilCompleted, so that a host that forgets to wait reads old
// memory; findings of the emulator make the command buffer fail. Environment, for tests:
//   EMU_MODE   fast (default), fastmath, checked
//   EMU_ORDER  forward (default), reverse, random
//   EMU_FAIL   device, family, compile, function, memory, commands, lost: what is to go wrong
//   EMU_SOURCE a file whose text stands in for the kernels' own: wrong kernels, made by mutate.py
//   EMU_TIMEOUT milliseconds of CPU time that a dispatch may take (0: any)
//   EMU_COUNT  a file to which the number of dispatches of each wait is appended
#import <Metal/Metal.h>

#include "emu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EMU_TEXT_(x) #x
#define EMU_TEXT(x) EMU_TEXT_(x)

enum { TEXT_BYTES = 8192, WORKING_SET_GIB = 8 };

static void stub_refuse(const char *rule)
{
    fprintf(stderr, "Metal API validation: %s\n", rule);
    abort();
}

static const char *stub_setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static bool stub_fails(const char *what)
{
    return !strcmp(stub_setting("EMU_FAIL", ""), what);
}

// ---- Foundation

extern id class_createInstance(Class c, size_t extra);

@implementation NSObject
+ (instancetype)alloc
{
    return class_createInstance(self, 0);
}
+ (instancetype)new
{
    return [[self alloc] init];
}
- (instancetype)init
{
    return self;
}
- (NSString *)description
{
    return @"object";
}
@end

@implementation NSAutoreleasePool
- (void)drain
{
}
@end

@interface EmuString : NSString {
  @public
    char *copy;
}
@end
@implementation NSString
+ (instancetype)stringWithUTF8String:(const char *)text
{
    EmuString *s = [EmuString new];
    s->copy = strdup(text);
    return s;
}
- (const char *)UTF8String
{
    return "";
}
@end
@implementation EmuString
- (const char *)UTF8String
{
    return copy;
}
@end
@implementation NSConstantString
- (const char *)UTF8String
{
    return text;
}
@end

@implementation NSError
- (NSString *)localizedDescription
{
    return text;
}
- (NSInteger)code
{
    return number;
}
@end

static NSError *stub_error(NSInteger code, const char *format, ...)
{
    char text[TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    NSError *e = [NSError new];
    e->text = [NSString stringWithUTF8String:text];
    e->number = code;
    return e;
}

// ---- objects

@implementation MTLCompileOptions
@synthesize languageVersion = version, mathMode = mode, fastMathEnabled = fast;
@end

@interface EmuBuffer : NSObject <MTLBuffer> {
  @public
    uint8_t *bytes;
    NSUInteger count;
}
@end
@implementation EmuBuffer
- (NSUInteger)length
{
    return count;
}
- (void *)contents
{
    return bytes;
}
@end

@interface EmuFunction : NSObject <MTLFunction> {
  @public
    void *kernel;
    NSString *label;
}
@end
@implementation EmuFunction
- (NSString *)name
{
    return label;
}
@end

@interface EmuLibrary : NSObject <MTLLibrary> {
  @public
    void *library;
}
@end
@implementation EmuLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
{
    void *kernel = stub_fails("function") ? NULL : emu_library_kernel(library, name.UTF8String);
    if (!kernel)
        return nil;
    EmuFunction *f = [EmuFunction new];
    f->kernel = kernel;
    f->label = name;
    return f;
}
@end

@interface EmuPipeline : NSObject <MTLComputePipelineState> {
  @public
    void *kernel;
}
@end
@implementation EmuPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup
{
    return (NSUInteger)emu_kernel_threads_max(kernel);
}
@end

// One dispatch, encoded; bytes of setBytes belong to it.
struct stub_job {
    struct emu_dispatch dispatch;
    void *bytes[EMU_BUFFERS_MAX];
    struct stub_job *next;
};

@interface EmuCommands : NSObject <MTLCommandBuffer> {
  @public
    struct stub_job *first, **end;
    MTLCommandBufferStatus now;
    NSError *failure;
    bool encoding;
}
@end

@interface EmuEncoder : NSObject <MTLComputeCommandEncoder> {
  @public
    EmuCommands *commands;
    EmuPipeline *pipeline;
    bool ended;
    void *buffer[EMU_BUFFERS_MAX];
    struct {
        uint8_t data[4096];
        NSUInteger length;
    } bytes[EMU_BUFFERS_MAX];
}
@end

@implementation EmuEncoder
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state
{
    if (!state)
        stub_refuse("setComputePipelineState: nil");
    pipeline = (EmuPipeline *)state;
}
- (void)setBuffer:(id<MTLBuffer>)object offset:(NSUInteger)offset atIndex:(NSUInteger)index
{
    EmuBuffer *b = (EmuBuffer *)object;
    if (ended)
        stub_refuse("setBuffer after endEncoding");
    if (index >= EMU_BUFFERS_MAX)
        stub_refuse("setBuffer: index above 30");
    if (b && offset >= b->count)
        stub_refuse("setBuffer: offset at or past the buffer's end");
    buffer[index] = b ? b->bytes + offset : NULL;
    bytes[index].length = 0;
}
- (void)setBytes:(const void *)from length:(NSUInteger)length atIndex:(NSUInteger)index
{
    if (ended)
        stub_refuse("setBytes after endEncoding");
    if (index >= EMU_BUFFERS_MAX)
        stub_refuse("setBytes: index above 30");
    if (!length || length > sizeof bytes[index].data)
        stub_refuse("setBytes: length is not 1 to 4096");
    memcpy(bytes[index].data, from, length);
    bytes[index].length = length;
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads
{
    if (ended)
        stub_refuse("dispatch after endEncoding");
    if (!pipeline)
        stub_refuse("dispatch without a pipeline state");
    if (threads.width * threads.height * threads.depth > pipeline.maxTotalThreadsPerThreadgroup)
        stub_refuse("dispatch: more threads a threadgroup than the pipeline allows");
    if (!groups.width || !groups.height || !groups.depth)
        stub_refuse("dispatch of no threadgroups");
    static const char *const orders[] = {"forward", "reverse", "random"};
    struct stub_job *job = calloc(1, sizeof *job);
    job->dispatch = (struct emu_dispatch){
        .kernel = pipeline->kernel,
        .grid = {(uint32_t)groups.width, (uint32_t)groups.height, (uint32_t)groups.depth},
        .threads = {(uint32_t)threads.width, (uint32_t)threads.height, (uint32_t)threads.depth},
        .timeout_ms = (uint32_t)strtoul(stub_setting("EMU_TIMEOUT", "0"), NULL, 10),
        .seed = 1, // the same for each: two runs of one case must be bit-equal
    };
    for (int i = 0; i < 3; i++)
        if (!strcmp(stub_setting("EMU_ORDER", "forward"), orders[i]))
            job->dispatch.order = i;
    for (int i = 0; i < EMU_BUFFERS_MAX; i++) {
        job->dispatch.buffer[i] = buffer[i];
        if (bytes[i].length) {
            job->bytes[i] = emu_buffer_new(bytes[i].length, "setBytes");
            memcpy(job->bytes[i], bytes[i].data, bytes[i].length);
            job->dispatch.buffer[i] = job->bytes[i];
        }
    }
    *commands->end = job;
    commands->end = &job->next;
    // A host must bind all that the next kernel declares: nothing is left over from this one.
    memset(buffer, 0, sizeof buffer);
    memset(bytes, 0, sizeof bytes);
}
- (void)endEncoding
{
    if (ended)
        stub_refuse("endEncoding twice");
    ended = true;
    commands->encoding = false;
}
@end

@implementation EmuCommands
- (instancetype)init
{
    end = &first;
    return self;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder
{
    if (encoding)
        stub_refuse("a second encoder while one is open");
    if (now >= MTLCommandBufferStatusCommitted)
        stub_refuse("an encoder after commit");
    EmuEncoder *e = [EmuEncoder new];
    e->commands = self;
    encoding = true;
    return e;
}
- (void)commit
{
    if (encoding)
        stub_refuse("commit while an encoder is open");
    if (now >= MTLCommandBufferStatusCommitted)
        stub_refuse("commit twice");
    now = MTLCommandBufferStatusCommitted;
}
- (void)run
{
    unsigned count = 0;
    for (struct stub_job *job = first; job && !failure; job = job->next, count++) {
        if (!emu_dispatch(&job->dispatch))
            continue;
        const struct emu_finding *f = emu_finding(0);
        char place[64] = "";
        if (f->library)
            snprintf(place, sizeof place, " at +0x%lx", (unsigned long)f->offset);
        failure = stub_error(1, "emulator: %s: %s%s%s", f->kind, f->message,
                             f->library ? f->library : "", place);
    }
    while (first) {
        struct stub_job *job = first;
        first = job->next;
        for (int i = 0; i < EMU_BUFFERS_MAX; i++)
            if (job->bytes[i])
                emu_buffer_free(job->bytes[i]);
        free(job);
    }
    const char *path = getenv("EMU_COUNT");
    FILE *out = path ? fopen(path, "a") : NULL;
    if (out) {
        fprintf(out, "%u\n", count);
        fclose(out);
    }
}
- (void)waitUntilCompleted
{
    if (now < MTLCommandBufferStatusCommitted)
        stub_refuse("waitUntilCompleted before commit");
    if (now >= MTLCommandBufferStatusCompleted)
        return;
    if (stub_fails("commands"))
        failure = stub_error(MTLCommandBufferErrorTimeout, "Caused GPU Timeout Error");
    else if (stub_fails("lost"))
        failure = stub_error(MTLCommandBufferErrorDeviceRemoved, "Device was removed");
    else if (stub_fails("pressure"))
        failure = stub_error(MTLCommandBufferErrorOutOfMemory, "Insufficient Memory");
    else
        [self run];
    now = failure ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
}
- (MTLCommandBufferStatus)status
{
    return now;
}
- (NSError *)error
{
    return failure;
}
@end

@interface EmuQueue : NSObject <MTLCommandQueue>
@end
@implementation EmuQueue
- (id<MTLCommandBuffer>)commandBuffer
{
    return [EmuCommands new];
}
@end

// ---- the device

@interface EmuDevice : NSObject <MTLDevice>
@end
@implementation EmuDevice
- (NSUInteger)maxBufferLength
{
    return (NSUInteger)WORKING_SET_GIB << 30;
}
- (uint64_t)recommendedMaxWorkingSetSize
{
    return (uint64_t)WORKING_SET_GIB << 30;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family
{
    return family <= MTLGPUFamilyApple7 && !stub_fails("family");
}
- (id<MTLCommandQueue>)newCommandQueue
{
    return [EmuQueue new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options
{
    (void)options;
    if (!length)
        stub_refuse("a buffer of length 0");
    if (stub_fails("memory"))
        return nil;
    EmuBuffer *b = [EmuBuffer new];
    b->bytes = emu_buffer_new(length, "buffer");
    b->count = length;
    return b;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void *, NSUInteger))deallocator
{
    (void)options;
    (void)deallocator;
    NSUInteger page = (NSUInteger)sysconf(_SC_PAGESIZE);
    if ((uintptr_t)pointer % page || length % page || !length)
        stub_refuse("newBufferWithBytesNoCopy: pointer and length must be multiples of the page");
    EmuBuffer *b = [EmuBuffer new];
    b->bytes = pointer;
    b->count = length;
    emu_buffer_adopt(pointer, length, "mapped weights");
    return b;
}
// The compiler is tests/metal/check.py, which keeps what it has built.
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source
                               options:(MTLCompileOptions *)options
                                 error:(NSError **)error
{
    char made[] = "/tmp/emu-source-XXXXXX", command[1024], answer[TEXT_BYTES] = "";
    MTLLanguageVersion v = options.languageVersion;
    unsigned version = (unsigned)(v >> 16) * 100 + (unsigned)(v & 0xffff) * 10;
    const char *path = stub_setting("EMU_SOURCE", made);
    FILE *file = fdopen(mkstemp(made), "w");
    fputs(source.UTF8String, file);
    if (stub_fails("compile"))
        fputs("\nkernel void broken( {\n", file);
    fclose(file);
    snprintf(command, sizeof command, "python3 %s/check.py build %s - %u <%s 2>&1",
             EMU_TEXT(EMU_FOLDER), stub_setting("EMU_MODE", "fast"), version, path);
    FILE *compiler = popen(command, "r");
    size_t n = fread(answer, 1, sizeof answer - 1, compiler);
    int failed = pclose(compiler);
    unlink(made);
    if (n && answer[n - 1] == '\n')
        answer[n - 1] = 0;
    EmuLibrary *library = [EmuLibrary new];
    library->library = failed ? NULL : emu_library_open(answer, NULL, 0);
    if (library->library)
        return library;
    *error = stub_error(3, "%s", failed ? answer : emu_error());
    return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError **)error
{
    (void)error;
    if (!function)
        stub_refuse("newComputePipelineStateWithFunction: nil");
    EmuPipeline *p = [EmuPipeline new];
    p->kernel = ((EmuFunction *)function)->kernel;
    return p;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void)
{
    return stub_fails("device") ? nil : [EmuDevice new];
}
