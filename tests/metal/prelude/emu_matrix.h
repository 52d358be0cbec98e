// simdgroup_matrix: 8x8, two elements a lane in the layout that thread_elements() shows on Apple
// GPUs. A multiply gathers the 64 elements of each operand from the lanes.
#pragma once

namespace metal
{

template <class T, int C, int R> struct simdgroup_matrix;

// Row and first column of a lane's two elements.
EMU_INLINE void emu_matrix_place(unsigned lane, int &row, int &column)
{
    int quad = (int)lane / 4;
    row = (quad & 4) + (int)lane / 2 % 4;
    column = (quad & 2) * 2 + (int)lane % 2 * 2;
}

template <class T> struct simdgroup_matrix<T, 8, 8> {
    typedef vec<T, 2> storage_type;
    storage_type emu_pair;
    simdgroup_matrix() = default;
    EMU_INLINE explicit simdgroup_matrix(T diagonal)
    {
        int row, column;
        emu_matrix_place(emu_lane(), row, column);
        emu_pair[0] = row == column ? diagonal : T(0);
        emu_pair[1] = row == column + 1 ? diagonal : T(0);
    }
    EMU_INLINE storage_type &thread_elements() { return emu_pair; }
    EMU_INLINE const storage_type &thread_elements() const { return emu_pair; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R = C>
EMU_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value)
{
    simdgroup_matrix<T, C, R> m;
    m.emu_pair = vec<T, 2>(value);
    return m;
}

template <class T, class U>
EMU_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &m, U *p,
                               ulong stride = 8, ulong2 origin = ulong2(0), bool transpose = false)
{
    static_assert(__is_same(T, emu_plain_t<U>), "the matrix and the memory differ in type");
    int row, column;
    emu_matrix_place(emu_lane(), row, column);
    for (int j = 0; j < 2; j++)
        m.emu_pair[j] = transpose ? p[(origin.y + column + j) * stride + origin.x + row]
                                  : p[(origin.y + row) * stride + origin.x + column + j];
}
template <class T, class U>
EMU_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, U *p, ulong stride = 8,
                                ulong2 origin = ulong2(0), bool transpose = false)
{
    static_assert(__is_same(T, emu_plain_t<U>), "the matrix and the memory differ in type");
    int row, column;
    emu_matrix_place(emu_lane(), row, column);
    for (int j = 0; j < 2; j++) {
        if (transpose)
            p[(origin.y + column + j) * stride + origin.x + row] = m.emu_pair[j];
        else
            p[(origin.y + row) * stride + origin.x + column + j] = m.emu_pair[j];
    }
}

template <class A, class B, class C> struct emu_multiply_operands {
    vec<A, 2> a;
    vec<B, 2> b;
    vec<C, 2> c;
};
template <class D, class A, class B, class C>
void emu_multiply_body(void *const *in, void *const *out, unsigned count)
{
    float a[8][8], b[8][8], c[8][8];
    for (unsigned lane = 0; lane < count; lane++) {
        if (!in[lane]) {
            emu_violation("simdgroup matrix multiply while lanes are absent");
            return;
        }
        int row, column;
        emu_matrix_place(lane, row, column);
        const auto &x = *(const emu_multiply_operands<A, B, C> *)in[lane];
        for (int j = 0; j < 2; j++) {
            a[row][column + j] = (float)x.a[j];
            b[row][column + j] = (float)x.b[j];
            c[row][column + j] = (float)x.c[j];
        }
    }
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++)
            for (int j = 0; j < 8; j++)
                c[i][j] += a[i][k] * b[k][j];
    for (unsigned lane = 0; lane < count; lane++) {
        int row, column;
        emu_matrix_place(lane, row, column);
        for (int j = 0; j < 2; j++)
            (*(vec<D, 2> *)out[lane])[j] = emu_convert<D>(c[row][column + j]);
    }
}
template <class D, class A, class B, class C>
__attribute__((noinline)) void
emu_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
             const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c,
             const void *site)
{
    emu_multiply_operands<A, B, C> in{a.emu_pair, b.emu_pair, c.emu_pair};
    emu_simd_collective(site, &in, &d.emu_pair, emu_multiply_body<D, A, B, C>);
}
template <class D, class A, class B, class C>
EMU_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d,
                                              const simdgroup_matrix<A, 8, 8> &a,
                                              const simdgroup_matrix<B, 8, 8> &b,
                                              const simdgroup_matrix<C, 8, 8> &c)
{
    emu_multiply(d, a, b, c, emu_site());
}
template <class D, class A, class B>
EMU_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                   const simdgroup_matrix<B, 8, 8> &b)
{
    emu_multiply(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), emu_site());
}

} // namespace metal
