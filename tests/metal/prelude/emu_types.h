// Scalar types, the type traits of <metal_type_traits>, and numeric_limits.
#pragma once

#define EMU_INLINE inline __attribute__((always_inline))

#ifdef EMU_LINT
// The lint build gives each address space its own pointer type; see msl/rewrite.py.
#define EMU_SPACE(n) __attribute__((address_space(n)))
#endif

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal
{

// The macros INFINITY and NAN become these names, which the lint looks for.
static constexpr float emu_infinity = __builtin_inff();
static constexpr float emu_nan = __builtin_nanf("");

template <class T, T v> struct integral_constant {
    static constexpr T value = v;
    typedef T value_type;
    constexpr operator T() const { return v; }
    constexpr T operator()() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<is_same_v<A, B>> {};

template <bool c, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
    typedef T type;
};
template <bool c, class T = void> using enable_if_t = typename enable_if<c, T>::type;

template <bool c, class A, class B> struct conditional {
    typedef A type;
};
template <class A, class B> struct conditional<false, A, B> {
    typedef B type;
};
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;

#define EMU_TRANSFORM(name, builtin)                                                               \
    template <class T> struct name {                                                               \
        typedef builtin(T) type;                                                                   \
    };                                                                                             \
    template <class T> using name##_t = builtin(T);
EMU_TRANSFORM(remove_cv, __remove_cv)
EMU_TRANSFORM(remove_const, __remove_const)
EMU_TRANSFORM(remove_reference, __remove_reference_t)
EMU_TRANSFORM(remove_pointer, __remove_pointer)
EMU_TRANSFORM(decay, __decay)
#undef EMU_TRANSFORM

// remove_addrspace: the qualifiers exist as types in the lint build only.
template <class T> struct remove_addrspace {
    typedef T type;
};
#ifdef EMU_LINT
#define EMU_STRIP(n)                                                                               \
    template <class T> struct remove_addrspace<EMU_SPACE(n) T> {                                   \
        typedef T type;                                                                            \
    };                                                                                             \
    template <class T> struct remove_addrspace<const EMU_SPACE(n) T> {                             \
        typedef const T type;                                                                      \
    };
EMU_STRIP(1)
EMU_STRIP(2)
EMU_STRIP(3)
#undef EMU_STRIP
#endif
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
// The element type behind a pointer, without const and address space.
template <class T> using emu_plain_t = __remove_cv(remove_addrspace_t<T>);

template <class T> constexpr bool emu_is_small_float = __is_same(T, half) || __is_same(T, bfloat);

#define EMU_TRAIT(name, condition)                                                                 \
    template <class T> constexpr bool name##_v = condition;                                        \
    template <class T> struct name : bool_constant<name##_v<T>> {};
EMU_TRAIT(is_integral, __is_integral(T))
EMU_TRAIT(is_floating_point, __is_floating_point(T) || emu_is_small_float<__remove_cv(T)>)
EMU_TRAIT(is_signed, __is_signed(T))
EMU_TRAIT(is_unsigned, __is_unsigned(T))
EMU_TRAIT(is_arithmetic, __is_arithmetic(T) || emu_is_small_float<__remove_cv(T)>)
EMU_TRAIT(is_pointer, __is_pointer(T))
EMU_TRAIT(is_enum, __is_enum(T))
#undef EMU_TRAIT

template <class A, class B> constexpr bool is_convertible_v = __is_convertible_to(A, B);
template <class A, class B> struct is_convertible : bool_constant<is_convertible_v<A, B>> {};

template <class T> using uniform = T;
template <class T> EMU_INLINE constexpr T make_uniform(T x) { return x; }

template <class T, T... values> struct integer_sequence {};
template <size_t... values> using index_sequence = integer_sequence<size_t, values...>;
template <size_t n>
using make_index_sequence = __make_integer_seq<integer_sequence, size_t, n>;

// A conversion that Metal performs silently where clang asks for a cast.
template <class To, class From> EMU_INLINE constexpr To emu_convert(From x)
{
    if constexpr (__is_same(To, From))
        return x;
    else if constexpr (emu_is_small_float<To> && emu_is_small_float<From>)
        return (To)(float)x;
    else
        return (To)x;
}

template <class T> struct numeric_limits;

template <class T, T smallest, T largest> struct emu_integer_limits {
    static constexpr bool is_specialized = true, is_integer = true;
    static constexpr T min() { return smallest; }
    static constexpr T lowest() { return smallest; }
    static constexpr T max() { return largest; }
};
template <> struct numeric_limits<bool> : emu_integer_limits<bool, false, true> {};
template <> struct numeric_limits<char> : emu_integer_limits<char, -128, 127> {};
template <> struct numeric_limits<signed char> : emu_integer_limits<signed char, -128, 127> {};
template <> struct numeric_limits<uchar> : emu_integer_limits<uchar, 0, 255> {};
template <> struct numeric_limits<short> : emu_integer_limits<short, -32768, 32767> {};
template <> struct numeric_limits<ushort> : emu_integer_limits<ushort, 0, 65535> {};
template <>
struct numeric_limits<int> : emu_integer_limits<int, -__INT_MAX__ - 1, __INT_MAX__> {};
template <> struct numeric_limits<uint> : emu_integer_limits<uint, 0, ~0u> {};
template <>
struct numeric_limits<long> : emu_integer_limits<long, -__LONG_MAX__ - 1, __LONG_MAX__> {};
template <> struct numeric_limits<ulong> : emu_integer_limits<ulong, 0, ~0ul> {};

#define EMU_FLOAT_LIMITS(type, smallest, largest, step)                                            \
    template <> struct numeric_limits<type> {                                                      \
        static constexpr bool is_specialized = true, is_integer = false;                           \
        static constexpr type min() { return (type)smallest; }                                     \
        static constexpr type lowest() { return (type) - largest; }                                \
        static constexpr type max() { return (type)largest; }                                      \
        static constexpr type epsilon() { return (type)step; }                                     \
        static constexpr type infinity() { return (type)emu_infinity; }                            \
        static constexpr type quiet_NaN() { return (type)emu_nan; }                                \
    };
EMU_FLOAT_LIMITS(float, __FLT_MIN__, __FLT_MAX__, __FLT_EPSILON__)
EMU_FLOAT_LIMITS(half, 6.103515625e-5f, 65504.0f, 0.0009765625f)
EMU_FLOAT_LIMITS(bfloat, 1.17549435e-38f, 3.3895314e38f, 0.0078125f)
#undef EMU_FLOAT_LIMITS

} // namespace metal
