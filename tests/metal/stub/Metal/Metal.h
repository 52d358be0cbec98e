// The part of the Metal framework that the backend uses. Names and values are meant to be those of
// the SDK; only a build on a Mac compares them.
#pragma once
#import <Foundation/Foundation.h>

#ifndef __APPLE__
#include <stdbool.h>
// What @available becomes in the test build: whether EMU_SYSTEM is at least this.
bool emu_system_is(int major, int minor);
#endif

typedef struct {
    NSUInteger width, height, depth;
} MTLSize;

static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth)
{
    MTLSize size = {width, height, depth};
    return size;
}

typedef NS_OPTIONS(NSUInteger, MTLResourceOptions){
    MTLResourceStorageModeShared = 0,
};
typedef NS_ENUM(NSUInteger, MTLLanguageVersion){
    MTLLanguageVersion3_1 STUB_SINCE(14.0) = (3 << 16) + 1,
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
    MTLLanguageVersion3_2 STUB_SINCE(15.0) = (3 << 16) + 2,
#endif
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 260000
    MTLLanguageVersion4_0 STUB_SINCE(26.0) = (4 << 16),
#endif
};
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
typedef NS_ENUM(NSInteger, MTLMathMode){
    MTLMathModeSafe STUB_SINCE(15.0) = 0,
};
#endif
typedef NS_ENUM(NSInteger, MTLGPUFamily){
    MTLGPUFamilyApple7 = 1007,
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 260000
    MTLGPUFamilyApple10 = 1010,
#endif
};
typedef NS_OPTIONS(NSUInteger, MTLPipelineOption){
    MTLPipelineOptionNone = 0,
    MTLPipelineOptionFailOnBinaryArchiveMiss = 1 << 2,
};
typedef NS_ENUM(NSUInteger, MTLCommandBufferStatus){
    MTLCommandBufferStatusNotEnqueued = 0,
    MTLCommandBufferStatusEnqueued = 1,
    MTLCommandBufferStatusCommitted = 2,
    MTLCommandBufferStatusScheduled = 3,
    MTLCommandBufferStatusCompleted = 4,
    MTLCommandBufferStatusError = 5,
};
typedef NS_ENUM(NSUInteger, MTLCommandBufferError){
    MTLCommandBufferErrorNone = 0,
    MTLCommandBufferErrorTimeout = 2,
    MTLCommandBufferErrorPageFault = 3,
    MTLCommandBufferErrorOutOfMemory = 8,
    MTLCommandBufferErrorDeviceRemoved = 11,
};

@interface MTLCompileOptions : NSObject {
    MTLLanguageVersion version;
    NSInteger mode;
    BOOL fast;
}
@property(nonatomic) MTLLanguageVersion languageVersion;
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
@property(nonatomic) MTLMathMode mathMode STUB_SINCE(15.0);
#endif
@property(nonatomic) BOOL fastMathEnabled;
@end

#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
STUB_SINCE(15.0)
@protocol MTLAllocation <NSObject>
@end
@protocol MTLResource <NSObject, MTLAllocation>
@end
#else
@protocol MTLResource <NSObject>
@end
#endif

@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
@property(readonly) void *contents __attribute__((objc_returns_inner_pointer));
@end

@protocol MTLFunction <NSObject>
@property(readonly) NSString *name;
@end

@protocol MTLLibrary <NSObject>
- (id<MTLFunction>)newFunctionWithName:(NSString *)name;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@end

@protocol MTLBinaryArchive;

@interface MTLBinaryArchiveDescriptor : NSObject {
    NSURL *place;
}
@property(nonatomic, assign) NSURL *url;
@end

@interface MTLComputePipelineDescriptor : NSObject {
    id<MTLFunction> function;
    NSArray<id<MTLBinaryArchive>> *archives;
}
@property(nonatomic, assign) id<MTLFunction> computeFunction;
@property(nonatomic, assign) NSArray<id<MTLBinaryArchive>> *binaryArchives;
@end

@protocol MTLBinaryArchive <NSObject>
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                            error:(NSError **)error;
- (BOOL)serializeToURL:(NSURL *)url error:(NSError **)error;
@end

#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
STUB_SINCE(15.0)
@interface MTLResidencySetDescriptor : NSObject
@end

STUB_SINCE(15.0)
@protocol MTLResidencySet <NSObject>
- (void)requestResidency;
- (void)endResidency;
- (void)addAllocation:(id<MTLAllocation>)allocation;
- (void)removeAllAllocations;
- (void)commit;
@end
#endif

@protocol MTLComputeCommandEncoder <NSObject>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads;
- (void)endEncoding;
@end

@protocol MTLCommandBuffer <NSObject>
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (void)commit;
- (void)waitUntilCompleted;
@property(readonly) MTLCommandBufferStatus status;
@property(readonly) NSError *error;
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
- (void)addResidencySet:(id<MTLResidencySet>)set STUB_SINCE(15.0);
#endif
@end

@class MTLComputePipelineReflection;

@protocol MTLDevice <NSObject>
@property(readonly) NSString *name;
@property(readonly) NSUInteger maxBufferLength;
@property(readonly) uint64_t recommendedMaxWorkingSetSize;
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void *pointer, NSUInteger length))deallocator;
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source
                               options:(MTLCompileOptions *)options
                                 error:(NSError **)error;
- (id<MTLComputePipelineState>)
    newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                  options:(MTLPipelineOption)options
                               reflection:(MTLComputePipelineReflection *__strong *)reflection
                                    error:(NSError **)error;
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor *)descriptor
                                                 error:(NSError **)error;
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor *)descriptor
                                               error:(NSError **)error STUB_SINCE(15.0);
#endif
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void);
