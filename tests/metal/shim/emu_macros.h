// What a kernel's #include of a Metal header expands to while it is preprocessed: the macros. The
// declarations come precompiled from ../prelude, so the preprocessed text is the kernel's alone.
#pragma once

#define METAL_FUNC inline __attribute__((always_inline))

#define INFINITY metal::emu_infinity
#define NAN metal::emu_nan
#define HUGE_VALF metal::emu_infinity

#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435082228750797e-38f
#define FLT_EPSILON 1.1920928955078125e-07f
#define HALF_MAX 65504.0h
#define HALF_MIN 6.103515625e-05h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define CHAR_BIT 8
#define UCHAR_MAX 255

#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_SQRT2_F 1.41421356237309504880f
