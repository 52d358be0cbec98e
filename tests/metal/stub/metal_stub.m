// A Metal device over the emulator, for the backend's host code under test.
//
// It enforces what Metal's API validation enforces and aborts with a message where that would; it
// runs committed work only in waitUntilCompleted, so that a host that forgets to wait reads old
// memory; findings of the emulator make the command buffer fail. Environment, for tests:
//   EMU_MODE   fast (default), fastmath, checked
//   EMU_ORDER  forward (default), reverse, random
//   EMU_FLUSH  1: denormal numbers count as zero, as GPUs do in a fast mode
//   EMU_SYSTEM the version of macOS that is played: 26.1, as new as any, unless it is set
//   EMU_FAMILY the Apple family of the GPU: 10 unless it is set
//   EMU_FAIL   device, compile, compile-tensor, product-tensor, function, memory, archive,
//              residency, commands, timeout, pressure, lost: what is to go wrong
//   EMU_TORN   a kernel: its first command stops half way through its threadgroups, with an error
//   EMU_PATCH, EMU_TENSOR_PATCH   files of kernels that stand in for those of their names in the
//              first and the second text: wrong ones, made by mutate.py
//   EMU_TIMEOUT milliseconds of CPU time that a dispatch may take (0: any)
//   EMU_MEMORY, EMU_BUFFER_MAX   bytes of the working set and of a buffer at most (8 GiB each)
//   EMU_EVENTS a file to which what happens to archives, buffers and residency is appended
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

enum { TEXT_BYTES = 8192 };

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

static uint64_t stub_number(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);
    return value && *value ? strtoull(value, NULL, 10) : otherwise;
}

static void stub_event(const char *format, ...)
{
    const char *path = getenv("EMU_EVENTS");
    FILE *out = path ? fopen(path, "a") : NULL;
    if (!out)
        return;
    va_list list;
    va_start(list, format);
    vfprintf(out, format, list);
    va_end(list);
    fclose(out);
}

bool emu_system_is(int major, int minor)
{
    int own_major = 26, own_minor = 1;
    sscanf(stub_setting("EMU_SYSTEM", "26.1"), "%d.%d", &own_major, &own_minor);
    return own_major > major || (own_major == major && own_minor >= minor);
}

// The SDK declares `what` with API_AVAILABLE(macos(major.0)): only a guarded call may get here.
static void stub_since(int major, const char *what)
{
    if (emu_system_is(major, 0))
        return;
    fprintf(stderr, "unrecognized selector: %s is of macOS %d\n", what, major);
    abort();
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

@implementation NSArray
+ (instancetype)arrayWithObject:(id)object
{
    NSArray *a = [NSArray new];
    a->only = object;
    return a;
}
@end

@implementation NSURL
+ (instancetype)fileURLWithPath:(NSString *)path
{
    NSURL *u = [NSURL new];
    u->file = path;
    return u;
}
@end

@implementation NSProcessInfo
+ (NSProcessInfo *)processInfo
{
    return [NSProcessInfo new];
}
- (NSString *)operatingSystemVersionString
{
    char text[64];
    snprintf(text, sizeof text, "Version %s (Build 0)", stub_setting("EMU_SYSTEM", "26.1"));
    return [NSString stringWithUTF8String:text];
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
@synthesize languageVersion = version, fastMathEnabled = fast;
- (void)setMathMode:(MTLMathMode)value
{
    stub_since(15, "mathMode");
    mode = value;
}
- (MTLMathMode)mathMode
{
    return mode;
}
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
    void *library, *patch;
}
@end
@implementation EmuLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
{
    void *kernel = patch ? emu_library_kernel(patch, name.UTF8String) : NULL;
    if (!kernel && !stub_fails("function"))
        kernel = emu_library_kernel(library, name.UTF8String);
    if (!kernel)
        return nil;
    EmuFunction *f = [EmuFunction new];
    f->kernel = kernel;
    f->label = name;
    return f;
}
@end

// Its file is a list of kernel names; one that begins with anything else is damaged.
static const char stub_archive_magic[] = "emulated archive\n";

@implementation MTLBinaryArchiveDescriptor
@synthesize url = place;
@end
@implementation MTLComputePipelineDescriptor
@synthesize computeFunction = function, binaryArchives = archives;
@end

@interface EmuArchive : NSObject <MTLBinaryArchive> {
  @public
    char names[4096]; // each with a newline before and after
}
@end
@implementation EmuArchive
- (bool)holds:(NSString *)name
{
    char line[128];
    snprintf(line, sizeof line, "\n%s\n", name.UTF8String);
    return strstr(names, line) != NULL;
}
- (bool)load:(const char *)path
{
    char text[sizeof names] = "";
    FILE *in = fopen(path, "r");
    size_t n = in ? fread(text, 1, sizeof text - 1, in) : 0, magic = sizeof stub_archive_magic - 1;
    if (in)
        fclose(in);
    if (n < magic || memcmp(text, stub_archive_magic, magic))
        return false;
    snprintf(names, sizeof names, "%s", text + magic - 1);
    return true;
}
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                            error:(NSError **)error
{
    (void)error;
    size_t n = strlen(names);
    snprintf(names + n, sizeof names - n, "%s%s\n", n ? "" : "\n",
             descriptor.computeFunction.name.UTF8String);
    return YES;
}
- (BOOL)serializeToURL:(NSURL *)url error:(NSError **)error
{
    FILE *out = stub_fails("archive") ? NULL : fopen(url->file.UTF8String, "w");
    if (!out) {
        *error = stub_error(1, "no place for the archive");
        return NO;
    }
    fprintf(out, "%.*s%s", (int)sizeof stub_archive_magic - 2, stub_archive_magic, names);
    fclose(out);
    stub_event("archive written\n");
    return YES;
}
@end

@implementation MTLResidencySetDescriptor
@end

@interface EmuResidency : NSObject <MTLResidencySet> {
    unsigned waiting, committed;
    NSUInteger bytes;
}
@end
@implementation EmuResidency
- (void)addAllocation:(id<MTLAllocation>)allocation
{
    waiting++;
    bytes += ((id<MTLBuffer>)allocation).length;
}
- (void)removeAllAllocations
{
    waiting = 0;
    bytes = 0;
}
- (void)commit
{
    committed = waiting;
    stub_event("residency of %u buffers\n", committed);
}
- (void)requestResidency
{
    if (!committed)
        stub_refuse("requestResidency before any commit: nothing would become resident");
    stub_event("residency requested\n");
}
- (void)endResidency
{
    stub_event("residency ended\n");
}
@end

@interface EmuPipeline : NSObject <MTLComputePipelineState> {
  @public
    void *kernel;
    NSString *label;
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
    bool is_torn;
    struct stub_job *next;
};

static bool stub_tears(const char *kernel)
{
    static bool is_over;
    bool tears = !is_over && !strcmp(stub_setting("EMU_TORN", ""), kernel);
    is_over = is_over || tears;
    return tears;
}

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
        .flush_to_zero = *stub_setting("EMU_FLUSH", "0") == '1',
        .seed = 1, // the same for each: two runs of one case must be bit-equal
    };
    job->is_torn = stub_tears(pipeline->label.UTF8String);
    if (job->is_torn)
        job->dispatch.grid[0] = job->dispatch.grid[0] / 2 | 1; // no pair of them is whole
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
        bool is_wrong = emu_dispatch(&job->dispatch) > 0;
        if (job->is_torn)
            failure = stub_error(MTLCommandBufferErrorPageFault, "Caused GPU Address Fault Error");
        if (!is_wrong)
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
        failure = stub_error(MTLCommandBufferErrorPageFault, "Caused GPU Address Fault Error");
    else if (stub_fails("timeout"))
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
- (void)addResidencySet:(id<MTLResidencySet>)set
{
    stub_since(15, "addResidencySet:");
    if (!set)
        stub_refuse("addResidencySet: nil");
}
@end

// ---- the device

// The compiler is tests/metal/check.py, which keeps what it has built. Null, with the reason in
// answer, when it refuses the file.
static void *stub_compile(const char *path, unsigned version, char answer[TEXT_BYTES])
{
    char command[1024];
    snprintf(command, sizeof command, "python3 %s/check.py build %s - %u <%s 2>&1",
             EMU_TEXT(EMU_FOLDER), stub_setting("EMU_MODE", "fast"), version, path);
    FILE *compiler = popen(command, "r");
    size_t n = fread(answer, 1, TEXT_BYTES - 1, compiler);
    int failed = pclose(compiler);
    answer[n - (n && answer[n - 1] == '\n')] = 0;
    void *library = failed ? NULL : emu_library_open(answer, NULL, 0);
    if (!failed && !library)
        snprintf(answer, TEXT_BYTES, "%s", emu_error());
    return library;
}

@interface EmuDevice : NSObject <MTLDevice>
@end
@implementation EmuDevice
- (NSUInteger)maxBufferLength
{
    return stub_number("EMU_BUFFER_MAX", 8ull << 30);
}
- (uint64_t)recommendedMaxWorkingSetSize
{
    return stub_number("EMU_MEMORY", 8ull << 30);
}
- (BOOL)supportsFamily:(MTLGPUFamily)family
{
    return family <= 1000 + strtol(stub_setting("EMU_FAMILY", "10"), NULL, 10);
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
    if (length > self.maxBufferLength)
        stub_refuse("newBufferWithLength: longer than maxBufferLength");
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
    if (length > self.maxBufferLength)
        stub_refuse("newBufferWithBytesNoCopy: longer than maxBufferLength");
    stub_event("buffer over %lu mapped bytes\n", length);
    EmuBuffer *b = [EmuBuffer new];
    b->bytes = pointer;
    b->count = length;
    emu_buffer_adopt(pointer, length, "mapped weights");
    return b;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source
                               options:(MTLCompileOptions *)options
                                 error:(NSError **)error
{
    char made[] = "/tmp/emu-source-XXXXXX", answer[TEXT_BYTES] = "";
    MTLLanguageVersion v = options.languageVersion;
    unsigned version = (unsigned)(v >> 16) * 100 + (unsigned)(v & 0xffff) * 10;
    bool tensor = v == MTLLanguageVersion4_0;
    const char *patch = stub_setting(tensor ? "EMU_TENSOR_PATCH" : "EMU_PATCH", NULL);
    FILE *file = fdopen(mkstemp(made), "w");
    fputs(source.UTF8String, file);
    if (v >= MTLLanguageVersion3_2)
        stub_since(15, "MTLLanguageVersion3_2");
    if (tensor)
        stub_since(26, "MTLLanguageVersion4_0");
    if (stub_fails("compile") || (tensor && stub_fails("compile-tensor")))
        fputs("\nkernel void broken( {\n", file);
    fclose(file);
    EmuLibrary *library = [EmuLibrary new];
    library->library = stub_compile(made, version, answer);
    unlink(made);
    if (library->library && patch)
        library->patch = stub_compile(patch, version, answer);
    if (library->library && (!patch || library->patch))
        return library;
    *error = stub_error(3, "%s", answer);
    return nil;
}
- (id<MTLComputePipelineState>)
    newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                  options:(MTLPipelineOption)options
                               reflection:(MTLComputePipelineReflection *__strong *)reflection
                                    error:(NSError **)error
{
    EmuFunction *function = (EmuFunction *)descriptor.computeFunction;
    NSArray *archives = descriptor.binaryArchives;
    if (!function)
        stub_refuse("newComputePipelineStateWithDescriptor: without a computeFunction");
    if (reflection)
        stub_refuse("newComputePipelineStateWithDescriptor: reflection was not asked for");
    bool is_stored = archives && [(EmuArchive *)archives->only holds:function->label];
    if (!is_stored && options & MTLPipelineOptionFailOnBinaryArchiveMiss) {
        *error = stub_error(1, "not in the archive");
        return nil;
    }
    stub_event("kernel %s\n", is_stored ? "stored" : "compiled");
    EmuPipeline *p = [EmuPipeline new];
    p->kernel = function->kernel;
    p->label = function->label;
    return p;
}
- (NSString *)name
{
    return [NSString stringWithUTF8String:"Emulated GPU"];
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor *)descriptor
                                                 error:(NSError **)error
{
    EmuArchive *a = [EmuArchive new];
    if (!descriptor.url || [a load:descriptor.url->file.UTF8String])
        return a;
    *error = stub_error(1, "not an archive");
    return nil;
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor *)descriptor
                                               error:(NSError **)error
{
    stub_since(15, "newResidencySetWithDescriptor:");
    *error = stub_error(1, "no residency");
    return stub_fails("residency") || !descriptor ? nil : [EmuResidency new];
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void)
{
    emu_break_products(stub_fails("product-tensor"));
    return stub_fails("device") ? nil : [EmuDevice new];
}
