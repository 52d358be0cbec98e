// Barriers, and the functions in which the lanes of a simdgroup exchange values.
//
// Each wrapper asks emu_site() for the address of its own call: lanes complete an operation
// together only when they are at the same source call. Where Metal leaves the result undefined (a
// source lane out of range or absent) the lane gets 0xA5 bytes.
#pragma once

namespace metal
{

enum class mem_flags {
    mem_none = 0,
    mem_device = EMU_MEM_DEVICE,
    mem_threadgroup = EMU_MEM_THREADGROUP,
    mem_texture = 4,
};
EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b)
{
    return (mem_flags)((int)a | (int)b);
}

EMU_INLINE void threadgroup_barrier(mem_flags flags)
{
    emu_threadgroup_barrier((int)flags, emu_site());
}
EMU_INLINE void simdgroup_barrier(mem_flags flags)
{
    emu_simdgroup_barrier((int)flags, emu_site());
}

// ---- reductions

template <class T, class Op> void emu_reduce_body(void *const *in, void *const *out, unsigned count)
{
    // Any order of summation is right; the runtime picks where it begins.
    unsigned first = emu_first_lane();
    T sum{};
    bool any = false;
    for (unsigned k = 0; k < count; k++) {
        const T *x = (const T *)in[(first + k) % count];
        if (x)
            sum = any ? Op::apply(sum, *x) : *x;
        any = any || x;
    }
    for (unsigned i = 0; i < count; i++)
        if (in[i])
            *(T *)out[i] = sum;
}
template <class T, class Op> __attribute__((noinline)) T emu_reduce(T x, const void *site)
{
    T r;
    emu_simd_collective(site, &x, &r, emu_reduce_body<T, Op>);
    return r;
}

#define EMU_REDUCTION(name, expression)                                                            \
    struct emu_op_##name {                                                                         \
        template <class T> static T apply(T a, T b)                                                \
        {                                                                                          \
            if constexpr (EmuVector<T>) {                                                          \
                for (int i = 0; i < T::emu_count; i++)                                             \
                    a[i] = apply(a[i], b[i]);                                                      \
                return a;                                                                          \
            } else {                                                                               \
                return emu_convert<T>(expression);                                                 \
            }                                                                                      \
        }                                                                                          \
    };                                                                                             \
    template <class T> EMU_INLINE T simd_##name(T x)                                               \
    {                                                                                              \
        return emu_reduce<T, emu_op_##name>(x, emu_site());                                        \
    }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a *b)
EMU_REDUCTION(max, max(a, b))
EMU_REDUCTION(min, min(a, b))
EMU_REDUCTION(and, a &b)
EMU_REDUCTION(or, a | b)
EMU_REDUCTION(xor, a ^ b)
#undef EMU_REDUCTION

// ---- permutations

template <class T> struct emu_sent {
    T value;
    int argument;
};
template <class T, class From>
void emu_permute_body(void *const *in, void *const *out, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        if (!in[i])
            continue;
        int source = From::lane((int)i, ((const emu_sent<T> *)in[i])->argument);
        if (source >= 0 && source < (int)count && in[source])
            *(T *)out[i] = ((const emu_sent<T> *)in[source])->value;
        else
            __builtin_memset(out[i], 0xA5, sizeof(T));
    }
}
template <class T, class From>
__attribute__((noinline)) T emu_permute(T x, int argument, const void *site)
{
    emu_sent<T> sent{x, argument};
    T r;
    emu_simd_collective(site, &sent, &r, emu_permute_body<T, From>);
    return r;
}

#define EMU_PERMUTATION(name, expression)                                                          \
    struct emu_from_##name {                                                                       \
        static int lane(int i, int a) { return expression; }                                       \
    };                                                                                             \
    template <class T> EMU_INLINE T name(T x, ushort a)                                            \
    {                                                                                              \
        return emu_permute<T, emu_from_##name>(x, a, emu_site());                                  \
    }
EMU_PERMUTATION(simd_shuffle, a)
EMU_PERMUTATION(simd_broadcast, a)
EMU_PERMUTATION(simd_shuffle_xor, i ^ a)
EMU_PERMUTATION(simd_shuffle_down, i + a)
EMU_PERMUTATION(simd_shuffle_up, i - a)
EMU_PERMUTATION(simd_shuffle_rotate_down, (i + a) & 31)
EMU_PERMUTATION(simd_shuffle_rotate_up, (i - a) & 31)
EMU_PERMUTATION(quad_shuffle, (i & ~3) | (a & 3))
EMU_PERMUTATION(quad_broadcast, (i & ~3) | (a & 3))
EMU_PERMUTATION(quad_shuffle_xor, (i & ~3) | ((i ^ a) & 3))
#undef EMU_PERMUTATION

template <class T> EMU_INLINE T quad_sum(T x)
{
    x = emu_convert<T>(x + quad_shuffle_xor(x, 1));
    return emu_convert<T>(x + quad_shuffle_xor(x, 2));
}
template <class T> EMU_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort delta)
{
    T r = simd_shuffle_up(x, delta);
    return emu_lane() < delta ? fill : r;
}
template <class T> EMU_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort delta)
{
    T r = simd_shuffle_down(x, delta);
    return emu_lane() + delta >= EMU_SIMD_WIDTH ? fill : r;
}

// ---- scans

template <class T, class Op, bool inclusive>
void emu_scan_body(void *const *in, void *const *out, unsigned count)
{
    T sum = Op::template identity<T>();
    for (unsigned i = 0; i < count; i++) {
        if (!in[i])
            continue;
        T next = Op::apply(sum, *(const T *)in[i]);
        *(T *)out[i] = inclusive ? next : sum;
        sum = next;
    }
}
template <class T, class Op, bool inclusive>
__attribute__((noinline)) T emu_scan(T x, const void *site)
{
    T r;
    emu_simd_collective(site, &x, &r, emu_scan_body<T, Op, inclusive>);
    return r;
}
#define EMU_SCAN(name, first)                                                                      \
    struct emu_scan_##name : emu_op_##name {                                                       \
        template <class T> static T identity() { return T(first); }                                \
    };                                                                                             \
    template <class T> EMU_INLINE T simd_prefix_inclusive_##name(T x)                              \
    {                                                                                              \
        return emu_scan<T, emu_scan_##name, true>(x, emu_site());                                  \
    }                                                                                              \
    template <class T> EMU_INLINE T simd_prefix_exclusive_##name(T x)                              \
    {                                                                                              \
        return emu_scan<T, emu_scan_##name, false>(x, emu_site());                                 \
    }
EMU_SCAN(sum, 0)
EMU_SCAN(product, 1)
#undef EMU_SCAN

// ---- votes

struct emu_vote_result {
    uint yes, active;
};
inline void emu_vote_body(void *const *in, void *const *out, unsigned count)
{
    emu_vote_result r{0, 0};
    for (unsigned i = 0; i < count; i++) {
        r.active |= in[i] ? 1u << i : 0;
        r.yes |= in[i] && *(const bool *)in[i] ? 1u << i : 0;
    }
    for (unsigned i = 0; i < count; i++)
        if (in[i])
            *(emu_vote_result *)out[i] = r;
}
inline __attribute__((noinline)) emu_vote_result emu_vote(bool x, const void *site)
{
    emu_vote_result r;
    emu_simd_collective(site, &x, &r, emu_vote_body);
    return r;
}
struct simd_vote {
    typedef ulong vote_t;
    ulong emu_bits;
    explicit simd_vote(ulong bits = 0) : emu_bits(bits) {}
    explicit operator vote_t() const { return emu_bits; }
    bool all() const { return (uint)emu_bits == ~0u; }
    bool any() const { return emu_bits != 0; }
};
EMU_INLINE simd_vote simd_ballot(bool x) { return simd_vote(emu_vote(x, emu_site()).yes); }
EMU_INLINE bool simd_any(bool x) { return emu_vote(x, emu_site()).yes != 0; }
EMU_INLINE bool simd_all(bool x)
{
    emu_vote_result r = emu_vote(x, emu_site());
    return r.yes == r.active;
}
EMU_INLINE simd_vote simd_active_threads_mask()
{
    return simd_vote(emu_vote(true, emu_site()).active);
}
EMU_INLINE bool simd_is_first()
{
    return (uint)__builtin_ctz(emu_vote(true, emu_site()).active) == emu_lane();
}
template <class T> EMU_INLINE T simd_broadcast_first(T x)
{
    uint active = emu_vote(true, emu_site()).active;
    return simd_shuffle(x, (ushort)__builtin_ctz(active));
}

} // namespace metal
