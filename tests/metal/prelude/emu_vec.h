// Vectors with their swizzles, packed vectors, small matrices (column major) and array.
//
// Conversions between vectors of different element types are explicit, as in Metal; a scalar
// converts to a vector of equal elements. The front end turns `v.zyx` into v.emu_get<2,1,0>(), and
// before an assignment into v.emu_at<2,1,0>().
#pragma once

namespace metal
{

// clang lets the reference that operator[] returns point one past the end, so the checked build
// looks itself.
EMU_INLINE constexpr int emu_checked(int i, int count)
{
#ifdef EMU_CHECKED
    if (!__builtin_is_constant_evaluated() && (i < 0 || i >= count))
        emu_index_outside();
#endif
    return i;
}

template <class T, int N> struct vec;

template <class T> struct emu_vec_traits {
    static constexpr int count = 1;
    static constexpr bool is_vec = false;
    typedef T element;
};
template <class T, int N> struct emu_vec_traits<vec<T, N>> {
    static constexpr int count = N;
    static constexpr bool is_vec = true;
    typedef T element;
};

template <class T>
concept EmuScalar = is_arithmetic_v<T> || __is_enum(T);
template <class T>
concept EmuVector = emu_vec_traits<__remove_cvref(T)>::is_vec;

// The assignable swizzle.
template <class V, int... I> struct emu_swizzle {
    V &v;
    typedef typename emu_vec_traits<V>::element T;
    typedef vec<T, (int)sizeof...(I)> R;

    EMU_INLINE constexpr operator R() const { return R(v[I]...); }
    EMU_INLINE constexpr emu_swizzle &operator=(R r)
    {
        int k = 0;
        ((v[I] = r[k++]), ...);
        return *this;
    }
#define EMU_ASSIGN(op)                                                                             \
    template <class B> EMU_INLINE constexpr emu_swizzle &operator op##=(const B & b)               \
    {                                                                                              \
        return *this = (R)(R(*this) op b);                                                         \
    }
    EMU_ASSIGN(+)
    EMU_ASSIGN(-)
    EMU_ASSIGN(*)
    EMU_ASSIGN(/)
    EMU_ASSIGN(&)
    EMU_ASSIGN(|)
    EMU_ASSIGN(^)
#undef EMU_ASSIGN
};

#define EMU_VEC_MEMBERS(N)                                                                         \
    typedef T value_type;                                                                          \
    static constexpr int emu_count = N;                                                            \
    vec() = default;                                                                               \
    template <class S>                                                                             \
        requires EmuScalar<S>                                                                      \
    EMU_INLINE constexpr vec(S s) : emu_element{}                                                  \
    {                                                                                              \
        for (int i = 0; i < N; i++)                                                                \
            emu_element[i] = emu_convert<T>(s);                                                    \
    }                                                                                              \
    template <class U>                                                                             \
        requires(!__is_same(U, T))                                                                 \
    EMU_INLINE constexpr explicit vec(const vec<U, N> &o) : emu_element{}                          \
    {                                                                                              \
        for (int i = 0; i < N; i++)                                                                \
            emu_element[i] = emu_convert<T>(o[i]);                                                 \
    }                                                                                              \
    template <class A, class B, class... C>                                                        \
        requires((emu_vec_traits<A>::count + emu_vec_traits<B>::count +                            \
                  (0 + ... + emu_vec_traits<C>::count)) == N)                                      \
    EMU_INLINE constexpr vec(const A &a, const B &b, const C &...c) : emu_element{}                \
    {                                                                                              \
        int k = 0;                                                                                 \
        emu_put(k, a);                                                                             \
        emu_put(k, b);                                                                             \
        (emu_put(k, c), ...);                                                                      \
    }                                                                                              \
    template <class A> EMU_INLINE constexpr void emu_put(int &k, const A &a)                       \
    {                                                                                              \
        if constexpr (EmuVector<A>)                                                                \
            for (int i = 0; i < emu_vec_traits<A>::count; i++)                                     \
                emu_element[k++] = emu_convert<T>(a[i]);                                           \
        else                                                                                       \
            emu_element[k++] = emu_convert<T>(a);                                                  \
    }                                                                                              \
    EMU_INLINE constexpr T &operator[](int i) { return emu_element[emu_checked(i, N)]; }           \
    EMU_INLINE constexpr const T &operator[](int i) const                                          \
    {                                                                                              \
        return emu_element[emu_checked(i, N)];                                                     \
    }                                                                                              \
    template <int... I> EMU_INLINE constexpr vec<T, (int)sizeof...(I)> emu_get() const             \
    {                                                                                              \
        return vec<T, (int)sizeof...(I)>(emu_element[I]...);                                       \
    }                                                                                              \
    template <int... I> EMU_INLINE constexpr emu_swizzle<vec, I...> emu_at() { return {*this}; }

// The array is the member that constructors write: constant expressions read only through it.
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
    union {
        T emu_element[2];
        struct {
            T x, y;
        };
        struct {
            T r, g;
        };
    };
    EMU_VEC_MEMBERS(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
    union {
        T emu_element[3];
        struct {
            T x, y, z;
        };
        struct {
            T r, g, b;
        };
    };
    EMU_VEC_MEMBERS(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
    union {
        T emu_element[4];
        struct {
            T x, y, z, w;
        };
        struct {
            T r, g, b, a;
        };
    };
    EMU_VEC_MEMBERS(4)
};
#undef EMU_VEC_MEMBERS

// The type of an operation on vectors: both of one type, or one a scalar. Two different vector
// types have none, so that the operation does not compile.
template <class A, class B> struct emu_common;
template <class T, int N> struct emu_common<vec<T, N>, vec<T, N>> {
    typedef vec<T, N> type;
};
template <class T, int N, class S>
    requires EmuScalar<S>
struct emu_common<vec<T, N>, S> {
    typedef vec<T, N> type;
};
template <class T, int N, class S>
    requires EmuScalar<S>
struct emu_common<S, vec<T, N>> {
    typedef vec<T, N> type;
};
template <class A, class B> using emu_common_t = typename emu_common<A, B>::type;

#define EMU_BINARY(op)                                                                             \
    template <class A, class B>                                                                    \
        requires(EmuVector<A> || EmuVector<B>)                                                     \
    EMU_INLINE constexpr emu_common_t<A, B> operator op(const A &a, const B &b)                    \
    {                                                                                              \
        typedef emu_common_t<A, B> R;                                                              \
        R x(a), y(b), r(0);                                                                        \
        for (int i = 0; i < R::emu_count; i++)                                                     \
            r[i] = emu_convert<typename R::value_type>(x[i] op y[i]);                              \
        return r;                                                                                  \
    }                                                                                              \
    template <class T, int N, class B>                                                             \
    EMU_INLINE constexpr vec<T, N> &operator op##=(vec<T, N> &a, const B & b)                      \
    {                                                                                              \
        return a = a op b;                                                                         \
    }
EMU_BINARY(+)
EMU_BINARY(-)
EMU_BINARY(*)
EMU_BINARY(/)
EMU_BINARY(%)
EMU_BINARY(&)
EMU_BINARY(|)
EMU_BINARY(^)
EMU_BINARY(<<)
EMU_BINARY(>>)
#undef EMU_BINARY

#define EMU_COMPARE(op)                                                                            \
    template <class A, class B>                                                                    \
        requires(EmuVector<A> || EmuVector<B>)                                                     \
    EMU_INLINE constexpr vec<bool, emu_common_t<A, B>::emu_count> operator op(const A &a,          \
                                                                              const B &b)          \
    {                                                                                              \
        typedef emu_common_t<A, B> R;                                                              \
        R x(a), y(b);                                                                              \
        vec<bool, R::emu_count> r(false);                                                          \
        for (int i = 0; i < R::emu_count; i++)                                                     \
            r[i] = x[i] op y[i];                                                                   \
        return r;                                                                                  \
    }
EMU_COMPARE(==)
EMU_COMPARE(!=)
EMU_COMPARE(<)
EMU_COMPARE(>)
EMU_COMPARE(<=)
EMU_COMPARE(>=)
EMU_COMPARE(&&)
EMU_COMPARE(||)
#undef EMU_COMPARE

#define EMU_UNARY(op, result)                                                                      \
    template <class T, int N> EMU_INLINE constexpr vec<result, N> operator op(const vec<T, N> &a)  \
    {                                                                                              \
        vec<result, N> r(0);                                                                       \
        for (int i = 0; i < N; i++)                                                                \
            r[i] = emu_convert<result>(op a[i]);                                                   \
        return r;                                                                                  \
    }
EMU_UNARY(-, T)
EMU_UNARY(+, T)
EMU_UNARY(~, T)
EMU_UNARY(!, bool)
#undef EMU_UNARY

// Aligned as its element: what a buffer of three floats a vertex holds.
template <class T, int N> struct packed_vec {
    T emu_element[N];
    packed_vec() = default;
    EMU_INLINE constexpr packed_vec(const vec<T, N> &v) : emu_element{}
    {
        for (int i = 0; i < N; i++)
            emu_element[i] = v[i];
    }
    EMU_INLINE constexpr operator vec<T, N>() const
    {
        vec<T, N> v(0);
        for (int i = 0; i < N; i++)
            v[i] = emu_element[i];
        return v;
    }
    EMU_INLINE constexpr T &operator[](int i) { return emu_element[i]; }
    EMU_INLINE constexpr const T &operator[](int i) const { return emu_element[i]; }
};

template <class T, int C, int R> struct matrix {
    vec<T, R> columns[C];
    matrix() = default;
    EMU_INLINE constexpr explicit matrix(T diagonal) : columns{}
    {
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++)
                columns[c][r] = c == r ? diagonal : T(0);
    }
    template <class... A>
        requires(sizeof...(A) == C)
    EMU_INLINE constexpr matrix(const A &...a) : columns{vec<T, R>(a)...}
    {
    }
    EMU_INLINE constexpr vec<T, R> &operator[](int i) { return columns[i]; }
    EMU_INLINE constexpr const vec<T, R> &operator[](int i) const { return columns[i]; }
};
template <class T, int C, int R>
EMU_INLINE constexpr matrix<T, C, R> operator*(const matrix<T, C, R> &m, T s)
{
    matrix<T, C, R> r(T(0));
    for (int c = 0; c < C; c++)
        r[c] = m[c] * s;
    return r;
}
template <class T, int C, int R>
EMU_INLINE constexpr matrix<T, C, R> operator*(T s, const matrix<T, C, R> &m)
{
    return m * s;
}
template <class T, int C, int R>
EMU_INLINE constexpr vec<T, R> operator*(const matrix<T, C, R> &m, const vec<T, C> &v)
{
    vec<T, R> r(T(0));
    for (int c = 0; c < C; c++)
        r += m[c] * v[c];
    return r;
}

template <class T, size_t N> struct array {
    T emu_element[N];
    EMU_INLINE constexpr T &operator[](size_t i) { return emu_element[emu_checked(i, N)]; }
    EMU_INLINE constexpr const T &operator[](size_t i) const
    {
        return emu_element[emu_checked(i, N)];
    }
    EMU_INLINE constexpr size_t size() const { return N; }
};

template <class To, class From> EMU_INLINE constexpr To as_type(const From &x)
{
    static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
    return __builtin_bit_cast(To, x);
}

} // namespace metal

using metal::as_type;
using metal::matrix;
using metal::vec;

#define EMU_VECTOR_NAMES(T)                                                                        \
    typedef metal::vec<T, 2> T##2;                                                                 \
    typedef metal::vec<T, 3> T##3;                                                                 \
    typedef metal::vec<T, 4> T##4;                                                                 \
    typedef metal::packed_vec<T, 2> packed_##T##2;                                                 \
    typedef metal::packed_vec<T, 3> packed_##T##3;                                                 \
    typedef metal::packed_vec<T, 4> packed_##T##4;
EMU_VECTOR_NAMES(bool)
EMU_VECTOR_NAMES(char)
EMU_VECTOR_NAMES(uchar)
EMU_VECTOR_NAMES(short)
EMU_VECTOR_NAMES(ushort)
EMU_VECTOR_NAMES(int)
EMU_VECTOR_NAMES(uint)
EMU_VECTOR_NAMES(long)
EMU_VECTOR_NAMES(ulong)
EMU_VECTOR_NAMES(half)
EMU_VECTOR_NAMES(float)
EMU_VECTOR_NAMES(bfloat)
#undef EMU_VECTOR_NAMES

#define EMU_MATRIX_NAMES(T)                                                                        \
    typedef metal::matrix<T, 2, 2> T##2x2;                                                         \
    typedef metal::matrix<T, 2, 4> T##2x4;                                                         \
    typedef metal::matrix<T, 3, 3> T##3x3;                                                         \
    typedef metal::matrix<T, 4, 2> T##4x2;                                                         \
    typedef metal::matrix<T, 4, 4> T##4x4;
EMU_MATRIX_NAMES(half)
EMU_MATRIX_NAMES(float)
#undef EMU_MATRIX_NAMES
