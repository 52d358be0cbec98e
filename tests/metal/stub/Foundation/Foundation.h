// The part of Foundation that the Metal backend uses, over the GNU runtime. Objects are never
// freed: the code under test is written for ARC, which this runtime has not.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Of the SDK that is played; the declarations of newer ones are not there.
#ifndef __MAC_OS_X_VERSION_MAX_ALLOWED
#define __MAC_OS_X_VERSION_MAX_ALLOWED 260100
#endif
// On which system a declaration may be used: on a Mac's target clang refuses it without a guard.
#ifdef __APPLE__
#define STUB_SINCE(version) __attribute__((availability(macos, introduced = version)))
#else
#define STUB_SINCE(version)
#endif

#define NS_ENUM(type, name) enum name : type name; enum name : type
#define NS_OPTIONS(type, name) enum name : type name; enum name : type

typedef unsigned long NSUInteger;
typedef long NSInteger;
#ifndef __APPLE__
typedef unsigned char BOOL;
#else
typedef bool BOOL;
#endif
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#ifndef nil
#define nil ((id)0)
#endif

@class NSString;

@protocol NSObject
- (NSString *)description;
@end

__attribute__((objc_root_class)) @interface NSObject <NSObject> {
    Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
- (instancetype)init;
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char *)text;
@property(readonly) const char *UTF8String;
@end

// What a literal is; the compiler knows this layout.
@interface NSConstantString : NSString {
    char *text;
    unsigned int length;
}
@end

@interface NSArray<ObjectType> : NSObject {
  @public
    id only;
}
+ (instancetype)arrayWithObject:(ObjectType)object;
@end

@interface NSURL : NSObject {
  @public
    NSString *file;
}
+ (instancetype)fileURLWithPath:(NSString *)path;
@end

@interface NSProcessInfo : NSObject
@property(class, readonly) NSProcessInfo *processInfo;
@property(readonly) NSString *operatingSystemVersionString;
@end

@interface NSError : NSObject {
  @public
    NSString *text;
    NSInteger number;
}
@property(readonly) NSString *localizedDescription;
@property(readonly) NSInteger code;
@end

#ifndef __APPLE__
@interface NSAutoreleasePool : NSObject
- (void)drain;
@end
#endif
