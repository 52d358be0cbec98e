// Atomics, relaxed order only: Metal has no other order for read-modify-write. They exist for
// device and threadgroup memory, so the lint build declares one overload for each.
#pragma once

namespace metal
{

enum memory_order { memory_order_relaxed };

template <class T> struct atomic {
    T emu_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

// Keeps T from being deduced from the value argument.
template <class T> struct emu_same {
    typedef T type;
};
template <class T> using emu_same_t = typename emu_same<T>::type;

template <class T, class F> EMU_INLINE T emu_update(T *p, F next)
{
    T old, wanted;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do
        wanted = next(old);
    while (!__atomic_compare_exchange(p, &old, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

#define EMU_ATOMIC_UPDATE(space, name, expression)                                                 \
    template <class T>                                                                             \
    EMU_INLINE T atomic_fetch_##name##_explicit(volatile space atomic<T> *a, emu_same_t<T> v,      \
                                                memory_order)                                      \
    {                                                                                              \
        return emu_update((T *)a, [=](T old) -> T { return expression; });                         \
    }

#define EMU_ATOMICS(space)                                                                         \
    template <class T>                                                                             \
    EMU_INLINE void atomic_store_explicit(volatile space atomic<T> *a, emu_same_t<T> v,            \
                                          memory_order)                                            \
    {                                                                                              \
        __atomic_store((T *)a, &v, __ATOMIC_RELAXED);                                              \
    }                                                                                              \
    template <class T>                                                                             \
    EMU_INLINE T atomic_load_explicit(const volatile space atomic<T> *a, memory_order)             \
    {                                                                                              \
        T r;                                                                                       \
        __atomic_load((const T *)a, &r, __ATOMIC_RELAXED);                                         \
        return r;                                                                                  \
    }                                                                                              \
    template <class T>                                                                             \
    EMU_INLINE T atomic_exchange_explicit(volatile space atomic<T> *a, emu_same_t<T> v,            \
                                          memory_order)                                            \
    {                                                                                              \
        T r;                                                                                       \
        __atomic_exchange((T *)a, &v, &r, __ATOMIC_RELAXED);                                       \
        return r;                                                                                  \
    }                                                                                              \
    template <class T>                                                                             \
    EMU_INLINE bool atomic_compare_exchange_weak_explicit(                                         \
        volatile space atomic<T> *a, T *expected, emu_same_t<T> v, memory_order, memory_order)     \
    {                                                                                              \
        return __atomic_compare_exchange((T *)a, expected, &v, true, __ATOMIC_RELAXED,             \
                                         __ATOMIC_RELAXED);                                        \
    }                                                                                              \
    EMU_ATOMIC_UPDATE(space, add, old + v)                                                         \
    EMU_ATOMIC_UPDATE(space, sub, old - v)                                                         \
    EMU_ATOMIC_UPDATE(space, max, max(old, v))                                                     \
    EMU_ATOMIC_UPDATE(space, min, min(old, v))                                                     \
    EMU_ATOMIC_UPDATE(space, and, old &v)                                                          \
    EMU_ATOMIC_UPDATE(space, or, old | v)                                                          \
    EMU_ATOMIC_UPDATE(space, xor, old ^ v)

#ifdef EMU_LINT
EMU_ATOMICS(EMU_SPACE(1))
EMU_ATOMICS(EMU_SPACE(3))
#else
EMU_ATOMICS()
#endif
#undef EMU_ATOMICS
#undef EMU_ATOMIC_UPDATE

} // namespace metal
