// Atomics, relaxed order only: Metal has no other order for them. They exist for device and
// threadgroup memory, so the lint build declares one overload for each. Fences are of Metal 3.2 and
// take relaxed or seq_cst.
#pragma once

namespace metal
{

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope {
    thread_scope_thread,
    thread_scope_simdgroup,
    thread_scope_threadgroup,
    thread_scope_device
};

EMU_INLINE void atomic_thread_fence(mem_flags flags, memory_order order,
                                    thread_scope scope = thread_scope_device)
{
    bool is_for_device = ((int)flags & EMU_MEM_DEVICE) != 0;
    if (is_for_device && order == memory_order_seq_cst && scope == thread_scope_device)
        emu_device_fence();
}

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
    T old = T(0), wanted; // a guess: where it is wrong the first exchange says so
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
