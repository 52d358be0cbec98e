// The subset of <metal_tensor> and MetalPerformancePrimitives that a matrix product needs: inline
// tensors, slices, matmul2d over one simdgroup or a whole threadgroup, cooperative tensors.
//
// A cooperative tensor scatters its elements over the threads in an order that is none of the
// hardware's, with one slot that is never valid, and begins as NaN: code that assumes a layout or
// an initial value fails. A static K that reaches past the tensor's K is undefined on hardware and
// a violation here.
#pragma once

namespace metal
{

inline constexpr size_t dynamic_extent = ~(size_t)0;

template <class I, size_t... E> struct extents {
    typedef I index_type;
    static constexpr int emu_rank = sizeof...(E);
    I emu_extent[sizeof...(E)];
    constexpr extents() = default;
    template <class... A>
        requires(sizeof...(A) == sizeof...(E))
    EMU_INLINE constexpr extents(A... a) : emu_extent{(I)a...}
    {
    }
    EMU_INLINE constexpr I extent(int i) const { return emu_extent[i]; }
};
template <class I, class S> struct emu_dynamic_extents;
template <class I, size_t... S> struct emu_dynamic_extents<I, integer_sequence<size_t, S...>> {
    typedef extents<I, (S * 0 + dynamic_extent)...> type;
};
template <class I, size_t rank>
using dextents = typename emu_dynamic_extents<I, make_index_sequence<rank>>::type;

struct tensor_inline {};

template <class T, class E, class Tag = tensor_inline> struct tensor {
    typedef T element_type;
    typedef emu_plain_t<T> value_type;
    typedef typename E::index_type index_type;
    T *emu_data;
    E emu_extents;
    index_type emu_strides[E::emu_rank];

    EMU_INLINE constexpr tensor(T *data, E e) : emu_data(data), emu_extents(e), emu_strides{}
    {
        index_type stride = 1;
        for (int i = 0; i < E::emu_rank; i++) {
            emu_strides[i] = stride;
            stride *= e.emu_extent[i];
        }
    }
    template <class S, size_t rank>
    EMU_INLINE constexpr tensor(T *data, E e, array<S, rank> strides)
        : emu_data(data), emu_extents(e), emu_strides{}
    {
        static_assert(rank == E::emu_rank, "one stride a dimension");
        for (size_t i = 0; i < rank; i++)
            emu_strides[i] = strides[i];
    }
    template <class... O> EMU_INLINE constexpr tensor slice(O... offsets) const
    {
        tensor r = *this;
        index_type o[] = {(index_type)offsets...};
        for (int i = 0; i < E::emu_rank; i++) {
            r.emu_data += (long)o[i] * emu_strides[i];
            r.emu_extents.emu_extent[i] = max((index_type)0, emu_extents.emu_extent[i] - o[i]);
        }
        return r;
    }
    EMU_INLINE constexpr index_type get_extent(int i) const { return emu_extents.emu_extent[i]; }
    EMU_INLINE constexpr E get_extents() const { return emu_extents; }
};
template <class T, class E> tensor(T *, E) -> tensor<T, E>;
template <class T, class E, class S, size_t n> tensor(T *, E, array<S, n>) -> tensor<T, E>;

template <int n> struct execution_simdgroups {
    static constexpr int emu_threads = n * EMU_SIMD_WIDTH;
};
typedef execution_simdgroups<1> execution_simdgroup;

} // namespace metal

namespace mpp::tensor_ops
{
using namespace metal;

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int emu_m, emu_n, emu_k;
    bool emu_transpose_left, emu_transpose_right, emu_relaxed;
    mode emu_mode;
    constexpr matmul2d_descriptor(int m, int n, int k = (int)dynamic_extent,
                                  bool transpose_left = false, bool transpose_right = false,
                                  bool relaxed = false, mode how = mode::multiply)
        : emu_m(m), emu_n(n), emu_k(k), emu_transpose_left(transpose_left),
          emu_transpose_right(transpose_right), emu_relaxed(relaxed), emu_mode(how)
    {
    }
};

// An M x N tile over `threads` threads.
template <class T, int M, int N, int threads> struct cooperative_tensor {
    static constexpr int emu_used = (M * N + threads - 1) / threads, emu_capacity = emu_used + 1;
    static constexpr int emu_turn = 37; // odd, so that t * 37 meets every thread of a power of two
    T emu_element[emu_capacity];
    ushort emu_thread;

    // Element i of thread t; each i is one permutation of the threads.
    static EMU_INLINE int emu_position(int t, int i)
    {
        return i * threads + (t * emu_turn + i * 11) % threads;
    }
    EMU_INLINE ushort get_capacity() const { return emu_capacity; }
    EMU_INLINE bool is_valid_element(ushort i) const
    {
        return i < emu_used && emu_position(emu_thread, i) < M * N;
    }
    EMU_INLINE T &operator[](ushort i) { return emu_element[i]; }
    EMU_INLINE const T &operator[](ushort i) const { return emu_element[i]; }
    EMU_INLINE array<int, 2> get_multidimensional_index(ushort i) const
    {
        int e = emu_position(emu_thread, i);
        return array<int, 2>{e % N, e / N};
    }
    template <class X> EMU_INLINE void store(X t) const
    {
        for (ushort i = 0; i < emu_capacity; i++) {
            array<int, 2> at = get_multidimensional_index(i);
            if (is_valid_element(i) && at[0] < t.get_extent(0) && at[1] < t.get_extent(1))
                t.emu_data[(long)at[0] * t.emu_strides[0] + (long)at[1] * t.emu_strides[1]] =
                    emu_convert<typename X::value_type>(emu_element[i]);
        }
    }
    template <class X> EMU_INLINE void load(X t)
    {
        for (ushort i = 0; i < emu_capacity; i++) {
            array<int, 2> at = get_multidimensional_index(i);
            if (is_valid_element(i) && at[0] < t.get_extent(0) && at[1] < t.get_extent(1))
                emu_element[i] = emu_convert<T>(
                    t.emu_data[(long)at[0] * t.emu_strides[0] + (long)at[1] * t.emu_strides[1]]);
        }
    }
};

// The operand types that matmul2d accepts.
template <class A, class B, class C> constexpr bool emu_types_are_allowed()
{
    bool halves = __is_same(A, half) && __is_same(B, half);
    bool bfloats = __is_same(A, bfloat) && __is_same(B, bfloat);
    bool floats = __is_same(A, float) || __is_same(B, float);
    return (halves && (__is_same(C, half) || __is_same(C, float))) ||
           (bfloats && (__is_same(C, bfloat) || __is_same(C, float))) ||
           (floats && __is_same(C, float));
}

template <auto descriptor, class Scope> struct matmul2d {
    static constexpr int emu_threads = Scope::emu_threads;
    static_assert(descriptor.emu_m % 16 == 0 || descriptor.emu_n % 16 == 0,
                  "M or N of a matmul2d must be a multiple of 16");

    template <class A, class B, class T>
    EMU_INLINE auto get_destination_cooperative_tensor() const
    {
        cooperative_tensor<T, descriptor.emu_m, descriptor.emu_n, emu_threads> c;
        __builtin_memset((void *)c.emu_element, 0xFF, sizeof c.emu_element);
        c.emu_thread = (ushort)(emu_index_in_threadgroup() % emu_threads);
        return c;
    }

    template <class A, class B, class C> struct emu_operands {
        const A *a;
        const B *b;
    };

    // [row][k] of the left, [k][column] of the right, whichever way they are stored.
    template <class A> static EMU_INLINE float emu_left(const A &a, long row, long k)
    {
        return (float)a.emu_data[descriptor.emu_transpose_left
                                     ? row * a.emu_strides[0] + k * a.emu_strides[1]
                                     : k * a.emu_strides[0] + row * a.emu_strides[1]];
    }
    template <class B> static EMU_INLINE float emu_right(const B &b, long k, long column)
    {
        return (float)b.emu_data[descriptor.emu_transpose_right
                                     ? k * b.emu_strides[0] + column * b.emu_strides[1]
                                     : column * b.emu_strides[0] + k * b.emu_strides[1]];
    }
    // The body's reads are not instrumented: it says what it will touch.
    template <class X> static void emu_touch_rows(const X &x, long rows, long columns)
    {
#ifdef EMU_CHECKED // only then has it been told of the writes before
        for (long r = 0; r < rows && columns > 0; r++)
            emu_touch((const void *)(x.emu_data + r * x.emu_strides[1]),
                      (emu_size)columns * sizeof(typename X::value_type), 0);
#endif
    }

    template <class A, class B, class C>
    static void emu_body(void *const *in, void *const *out, unsigned count)
    {
        typedef emu_operands<A, B, C> Operands;
        for (unsigned t = 0; t < count; t++) {
            if (!in[t] || ((const Operands *)in[t])->a->emu_data !=
                              ((const Operands *)in[0])->a->emu_data ||
                ((const Operands *)in[t])->b->emu_data != ((const Operands *)in[0])->b->emu_data) {
                emu_violation("matmul2d: the threads of its scope do not pass the same tensors");
                return;
            }
        }
        const A &a = *((const Operands *)in[0])->a;
        const B &b = *((const Operands *)in[0])->b;
        constexpr bool tl = descriptor.emu_transpose_left, tr = descriptor.emu_transpose_right;
        long left_k = a.get_extent(tl ? 1 : 0), right_k = b.get_extent(tr ? 0 : 1);
        long k_end = left_k < right_k ? left_k : right_k;
        if (descriptor.emu_k >= 0) {
            if (descriptor.emu_k > k_end)
                emu_violation("matmul2d: its static K reaches past the K of a tensor");
            k_end = descriptor.emu_k < k_end ? descriptor.emu_k : k_end;
        }
        if (emu_products_are_broken())
            k_end--;
        long rows = a.get_extent(tl ? 0 : 1), columns = b.get_extent(tr ? 1 : 0);
        rows = rows < descriptor.emu_m ? rows : descriptor.emu_m;
        columns = columns < descriptor.emu_n ? columns : descriptor.emu_n;
        tl ? emu_touch_rows(a, k_end, rows) : emu_touch_rows(a, rows, k_end);
        tr ? emu_touch_rows(b, columns, k_end) : emu_touch_rows(b, k_end, columns);
        for (unsigned t = 0; t < count; t++) {
            C &c = *(C *)out[t];
            for (ushort i = 0; i < c.get_capacity(); i++) {
                if (!c.is_valid_element(i))
                    continue;
                array<int, 2> at = c.get_multidimensional_index(i);
                bool add = descriptor.emu_mode == matmul2d_descriptor::mode::multiply_accumulate;
                float sum = add ? (float)c[i] : 0.0f;
                for (long k = 0; at[1] < rows && at[0] < columns && k < k_end; k++)
                    sum += emu_left(a, at[1], k) * emu_right(b, k, at[0]);
                c[i] = emu_convert<__remove_reference_t(decltype(c[i]))>(sum);
            }
        }
    }

    template <class A, class B, class C>
    static __attribute__((noinline)) void emu_run(const A &a, const B &b, C &c, const void *site)
    {
        emu_operands<A, B, C> in{&a, &b};
        if constexpr (emu_threads == EMU_SIMD_WIDTH)
            emu_simd_collective(site, &in, &c, emu_body<A, B, C>);
        else
            emu_group_collective(site, &in, &c, emu_body<A, B, C>, emu_threads);
    }

    template <class A, class B, class C> EMU_INLINE void run(const A &a, const B &b, C &c) const
    {
        static_assert(emu_types_are_allowed<typename A::value_type, typename B::value_type,
                                            __remove_reference_t(decltype(c[0]))>(),
                      "matmul2d has no product of these types");
        emu_run<A, B, C>(a, b, c, emu_site());
    }
};

} // namespace mpp::tensor_ops
