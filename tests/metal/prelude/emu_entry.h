// How a compiled kernel is called: the front end appends one emu::registration a kernel, with the
// kind and index of each argument; the argument's type is deduced from the function.
#pragma once

namespace emu
{

template <int kind_, int index_ = 0, bool optional_ = false> struct arg {
    static constexpr int kind = kind_, index = index_;
    static constexpr bool optional = optional_;
};

// A position or size as the scalar or vector that the kernel declares.
template <class A> EMU_INLINE A coordinate(const unsigned *v)
{
    if constexpr (metal::EmuVector<A>) {
        A r(0);
        for (int i = 0; i < A::emu_count; i++)
            r[i] = (typename A::value_type)v[i];
        return r;
    } else {
        static_assert(__is_integral(A), "a position or size is an integer or a vector of them");
        return (A)v[0];
    }
}

template <class A> EMU_INLINE A scalar(unsigned v)
{
    static_assert(__is_same(A, ushort) || __is_same(A, uint), "this argument is ushort or uint");
    return (A)v;
}

template <class A> EMU_INLINE A pointer(void *p)
{
    if constexpr (__is_pointer(A)) {
        return (A)p;
    } else {
        static_assert(__is_lvalue_reference(A), "a buffer argument is a pointer or a reference");
        return *(__remove_reference_t(A) *)p;
    }
}

template <class A, class Q> EMU_INLINE A value(const emu_thread *t)
{
    constexpr int k = Q::kind;
    if constexpr (k == EMU_ARG_BUFFER)
        return pointer<A>(t->bindings->buffer[Q::index]);
    else if constexpr (k == EMU_ARG_THREADGROUP)
        return pointer<A>(t->bindings->threadgroup[Q::index]);
    else if constexpr (k == EMU_ARG_THREAD_POSITION_IN_GRID)
        return coordinate<A>(t->position_in_grid);
    else if constexpr (k == EMU_ARG_THREADGROUP_POSITION_IN_GRID)
        return coordinate<A>(t->threadgroup_position);
    else if constexpr (k == EMU_ARG_THREAD_POSITION_IN_THREADGROUP)
        return coordinate<A>(t->position_in_threadgroup);
    else if constexpr (k == EMU_ARG_THREADS_PER_THREADGROUP)
        return coordinate<A>(t->threadgroup_size);
    else if constexpr (k == EMU_ARG_DISPATCH_THREADS_PER_THREADGROUP)
        return coordinate<A>(t->dispatch_threadgroup_size);
    else if constexpr (k == EMU_ARG_THREADGROUPS_PER_GRID)
        return coordinate<A>(t->threadgroups_per_grid);
    else if constexpr (k == EMU_ARG_THREADS_PER_GRID)
        return coordinate<A>(t->threads_per_grid);
    else if constexpr (k == EMU_ARG_THREAD_INDEX_IN_THREADGROUP)
        return scalar<A>(t->index_in_threadgroup);
    else if constexpr (k == EMU_ARG_THREAD_INDEX_IN_SIMDGROUP)
        return scalar<A>(t->lane);
    else if constexpr (k == EMU_ARG_SIMDGROUP_INDEX_IN_THREADGROUP)
        return scalar<A>(t->simdgroup);
    else if constexpr (k == EMU_ARG_SIMDGROUPS_PER_THREADGROUP)
        return scalar<A>(t->simdgroups);
    else
        return scalar<A>(EMU_SIMD_WIDTH);
}

template <class T> struct layout {
    static constexpr emu_size bytes = sizeof(T), alignment = alignof(T);
};
template <> struct layout<void> {
    static constexpr emu_size bytes = 1, alignment = 1;
};

template <class A, class Q> constexpr emu_parameter describe()
{
    typedef __remove_pointer(__remove_reference_t(A)) Pointee;
    typedef layout<__remove_cv(Pointee)> L;
    return {Q::kind,
            Q::index,
            Q::optional,
            __is_lvalue_reference(A),
            __is_const(Pointee),
            L::bytes,
            L::alignment};
}

template <auto kernel, class... Q> struct registration {
    template <class... A> static EMU_INLINE void call(void (*f)(A...), const emu_thread *t)
    {
        f(value<A, Q>(t)...);
    }
    static void entry(const emu_thread *t) { call(kernel, t); }

    template <class... A> static void add(const char *name, void (*)(A...), int threads_max)
    {
        // One more than needed: a kernel without arguments has an empty list.
        static const emu_parameter parameters[] = {describe<A, Q>()..., emu_parameter{}};
        emu_register_kernel(name, entry, parameters, sizeof...(A), threads_max);
    }
    registration(const char *name, int threads_max) { add(name, kernel, threads_max); }
};

// The value of a function constant; zero when the pipeline has none, as its uses are guarded by
// is_function_constant_defined.
template <class T> T function_constant(int index)
{
    T value{};
    emu_function_constant(index, &value, sizeof value);
    return value;
}
inline bool function_constant_defined(int index)
{
    return emu_function_constant(index, nullptr, 0) != 0;
}

} // namespace emu
