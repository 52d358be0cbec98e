// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric>.
//
// Functions exist for float, half and their vectors. bfloat has none: those names are deleted, so
// that a kernel converts to float where it computes. min, max and clamp take arguments of one
// type, as in Metal, where mixed ones are ambiguous.
#pragma once

namespace metal
{

// The float versions in one place.
namespace emu_math
{
#define EMU_MATH1(name, expression)                                                                \
    EMU_INLINE float name(float x) { return expression; }
EMU_MATH1(exp, __builtin_expf(x))
EMU_MATH1(exp2, __builtin_exp2f(x))
EMU_MATH1(exp10, __builtin_powf(10.0f, x))
EMU_MATH1(log, __builtin_logf(x))
EMU_MATH1(log2, __builtin_log2f(x))
EMU_MATH1(log10, __builtin_log10f(x))
EMU_MATH1(sqrt, __builtin_sqrtf(x))
EMU_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))
EMU_MATH1(sin, __builtin_sinf(x))
EMU_MATH1(cos, __builtin_cosf(x))
EMU_MATH1(tan, __builtin_tanf(x))
EMU_MATH1(sinh, __builtin_sinhf(x))
EMU_MATH1(cosh, __builtin_coshf(x))
EMU_MATH1(tanh, __builtin_tanhf(x))
EMU_MATH1(asin, __builtin_asinf(x))
EMU_MATH1(acos, __builtin_acosf(x))
EMU_MATH1(atan, __builtin_atanf(x))
EMU_MATH1(floor, __builtin_floorf(x))
EMU_MATH1(ceil, __builtin_ceilf(x))
EMU_MATH1(trunc, __builtin_truncf(x))
EMU_MATH1(round, __builtin_roundf(x))
EMU_MATH1(rint, __builtin_rintf(x))
EMU_MATH1(fabs, __builtin_fabsf(x))
EMU_MATH1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
EMU_MATH1(fract, x - __builtin_floorf(x))
EMU_MATH1(saturate, x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x)
#undef EMU_MATH1

#define EMU_MATH2(name, expression)                                                                \
    EMU_INLINE float name(float x, float y) { return expression; }
EMU_MATH2(pow, __builtin_powf(x, y))
EMU_MATH2(powr, __builtin_powf(x, y))
EMU_MATH2(fmod, __builtin_fmodf(x, y))
EMU_MATH2(atan2, __builtin_atan2f(x, y))
EMU_MATH2(copysign, __builtin_copysignf(x, y))
EMU_MATH2(fdim, __builtin_fdimf(x, y))
EMU_MATH2(step, y < x ? 0.0f : 1.0f)
EMU_MATH2(fmin, __builtin_fminf(x, y))
EMU_MATH2(fmax, __builtin_fmaxf(x, y))
EMU_MATH2(divide, x / y)
#undef EMU_MATH2
} // namespace emu_math

#define EMU_VECTOR1(name)                                                                          \
    template <class T, int N> EMU_INLINE vec<T, N> name(const vec<T, N> &v)                        \
    {                                                                                              \
        vec<T, N> r(0);                                                                            \
        for (int i = 0; i < N; i++)                                                                \
            r[i] = name(v[i]);                                                                     \
        return r;                                                                                  \
    }
#define EMU_VECTOR2(name)                                                                          \
    template <class T, int N>                                                                      \
    EMU_INLINE constexpr vec<T, N> name(const vec<T, N> &v, const vec<T, N> &w)                    \
    {                                                                                              \
        vec<T, N> r(0);                                                                            \
        for (int i = 0; i < N; i++)                                                                \
            r[i] = name(v[i], w[i]);                                                               \
        return r;                                                                                  \
    }                                                                                              \
    template <class T, int N>                                                                      \
    EMU_INLINE constexpr vec<T, N> name(const vec<T, N> &v, T s)                                   \
    {                                                                                              \
        return name(v, vec<T, N>(s));                                                              \
    }                                                                                              \
    template <class T, int N>                                                                      \
    EMU_INLINE constexpr vec<T, N> name(T s, const vec<T, N> &v)                                   \
    {                                                                                              \
        return name(vec<T, N>(s), v);                                                              \
    }

#define EMU_FUNCTION1(name)                                                                        \
    EMU_INLINE float name(float x) { return emu_math::name(x); }                                   \
    EMU_INLINE half name(half x) { return (half)emu_math::name((float)x); }                        \
    bfloat name(bfloat x) = delete;                                                                \
    EMU_VECTOR1(name)
#define EMU_FUNCTION2(name)                                                                        \
    EMU_INLINE float name(float x, float y) { return emu_math::name(x, y); }                       \
    EMU_INLINE half name(half x, half y) { return (half)emu_math::name((float)x, (float)y); }      \
    bfloat name(bfloat x, bfloat y) = delete;                                                      \
    EMU_VECTOR2(name)

#define EMU_FUNCTIONS                                                                              \
    EMU_FUNCTION1(exp)                                                                             \
    EMU_FUNCTION1(exp2)                                                                            \
    EMU_FUNCTION1(exp10)                                                                           \
    EMU_FUNCTION1(log)                                                                             \
    EMU_FUNCTION1(log2)                                                                            \
    EMU_FUNCTION1(log10)                                                                           \
    EMU_FUNCTION1(sqrt)                                                                            \
    EMU_FUNCTION1(rsqrt)                                                                           \
    EMU_FUNCTION1(sin)                                                                             \
    EMU_FUNCTION1(cos)                                                                             \
    EMU_FUNCTION1(tan)                                                                             \
    EMU_FUNCTION1(sinh)                                                                            \
    EMU_FUNCTION1(cosh)                                                                            \
    EMU_FUNCTION1(tanh)                                                                            \
    EMU_FUNCTION1(asin)                                                                            \
    EMU_FUNCTION1(acos)                                                                            \
    EMU_FUNCTION1(atan)                                                                            \
    EMU_FUNCTION1(floor)                                                                           \
    EMU_FUNCTION1(ceil)                                                                            \
    EMU_FUNCTION1(trunc)                                                                           \
    EMU_FUNCTION1(round)                                                                           \
    EMU_FUNCTION1(rint)                                                                            \
    EMU_FUNCTION1(fabs)                                                                            \
    EMU_FUNCTION1(sign)                                                                            \
    EMU_FUNCTION1(fract)                                                                           \
    EMU_FUNCTION1(saturate)                                                                        \
    EMU_FUNCTION2(pow)                                                                             \
    EMU_FUNCTION2(powr)                                                                            \
    EMU_FUNCTION2(fmod)                                                                            \
    EMU_FUNCTION2(atan2)                                                                           \
    EMU_FUNCTION2(copysign)                                                                        \
    EMU_FUNCTION2(fdim)                                                                            \
    EMU_FUNCTION2(step)                                                                            \
    EMU_FUNCTION2(fmin)                                                                            \
    EMU_FUNCTION2(fmax)                                                                            \
    EMU_FUNCTION2(divide)

EMU_FUNCTIONS
namespace fast
{
EMU_FUNCTIONS
}
namespace precise
{
EMU_FUNCTIONS
}
#undef EMU_FUNCTIONS

EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE half fma(half a, half b, half c) { return (half)__builtin_fmaf(a, b, c); }
bfloat fma(bfloat, bfloat, bfloat) = delete;
template <class T, int N>
EMU_INLINE vec<T, N> fma(const vec<T, N> &a, const vec<T, N> &b, const vec<T, N> &c)
{
    vec<T, N> r(0);
    for (int i = 0; i < N; i++)
        r[i] = fma(a[i], b[i], c[i]);
    return r;
}
EMU_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
EMU_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }

#define EMU_ORDERED(T)                                                                             \
    EMU_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                                 \
    EMU_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                                 \
    EMU_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }            \
    EMU_INLINE constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }                       \
    EMU_INLINE constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }                       \
    EMU_INLINE constexpr T select(T a, T b, bool c) { return c ? b : a; }
EMU_ORDERED(float)
EMU_ORDERED(half)
EMU_ORDERED(char)
EMU_ORDERED(signed char)
EMU_ORDERED(uchar)
EMU_ORDERED(short)
EMU_ORDERED(ushort)
EMU_ORDERED(int)
EMU_ORDERED(uint)
EMU_ORDERED(long)
EMU_ORDERED(ulong)
#undef EMU_ORDERED
bfloat min(bfloat, bfloat) = delete;
bfloat max(bfloat, bfloat) = delete;
bfloat clamp(bfloat, bfloat, bfloat) = delete;
EMU_VECTOR2(min)
EMU_VECTOR2(max)
template <class T, int N>
EMU_INLINE vec<T, N> clamp(const vec<T, N> &x, const vec<T, N> &low, const vec<T, N> &high)
{
    return min(max(x, low), high);
}
template <class T, int N> EMU_INLINE vec<T, N> clamp(const vec<T, N> &x, T low, T high)
{
    return min(max(x, low), high);
}
template <class T, int N>
EMU_INLINE vec<T, N> select(const vec<T, N> &a, const vec<T, N> &b, const vec<bool, N> &c)
{
    vec<T, N> r(0);
    for (int i = 0; i < N; i++)
        r[i] = c[i] ? b[i] : a[i];
    return r;
}

EMU_INLINE float abs(float x) { return __builtin_fabsf(x); }
EMU_INLINE half abs(half x) { return (half)__builtin_fabsf(x); }
EMU_INLINE int abs(int x) { return x < 0 ? -x : x; }
EMU_INLINE short abs(short x) { return (short)(x < 0 ? -x : x); }
EMU_INLINE long abs(long x) { return x < 0 ? -x : x; }
bfloat abs(bfloat) = delete;
EMU_VECTOR1(abs)

EMU_INLINE bool isnan(float x) { return __builtin_isnan(x); }
EMU_INLINE bool isinf(float x) { return __builtin_isinf(x); }
EMU_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
EMU_INLINE bool signbit(float x) { return __builtin_signbit(x); }

template <class T, int N> EMU_INLINE T dot(const vec<T, N> &a, const vec<T, N> &b)
{
    T sum = emu_convert<T>(a[0] * b[0]);
    for (int i = 1; i < N; i++)
        sum = emu_convert<T>(sum + a[i] * b[i]);
    return sum;
}
template <class T, int N> EMU_INLINE T length(const vec<T, N> &a) { return sqrt(dot(a, a)); }

template <int N> EMU_INLINE bool all(const vec<bool, N> &a)
{
    for (int i = 0; i < N; i++)
        if (!a[i])
            return false;
    return true;
}
template <int N> EMU_INLINE bool any(const vec<bool, N> &a)
{
    for (int i = 0; i < N; i++)
        if (a[i])
            return true;
    return false;
}

EMU_INLINE uint popcount(uint x) { return (uint)__builtin_popcount(x); }
EMU_INLINE int popcount(int x) { return __builtin_popcount((uint)x); }
EMU_INLINE ulong popcount(ulong x) { return (ulong)__builtin_popcountl(x); }
EMU_INLINE uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32; }
EMU_INLINE uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32; }
EMU_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMU_INLINE uint extract_bits(uint x, uint offset, uint bits)
{
    return bits >= 32 ? x >> offset : x >> offset & ((1u << bits) - 1);
}
EMU_INLINE uint mulhi(uint a, uint b) { return (uint)((ulong)a * b >> 32); }
EMU_INLINE uint rotate(uint x, uint n) { return x << (n & 31) | x >> (-n & 31); }
EMU_INLINE constexpr uint absdiff(uint a, uint b) { return a > b ? a - b : b - a; }

} // namespace metal
