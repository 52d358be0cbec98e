"""The emulated machine itself: what a dispatch may bind, and what positions its threads see."""
import emulator as emu

_COPY = '''#include <metal_stdlib>
using namespace metal;
kernel void copy(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                 constant uint &n [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    if (i < n)
        y[i] = x[i];
}
'''
_PLACE = '''#include <metal_stdlib>
using namespace metal;
kernel void place(device uint *out [[buffer(0)]], uint2 at [[thread_position_in_grid]],
                  uint2 size [[threads_per_grid]], uint2 group [[threads_per_threadgroup]],
                  uint2 full [[dispatch_threads_per_threadgroup]])
{
    out[at.y * size.x + at.x] = at.y << 16 | at.x << 8 | group.x << 4 | full.x;
}
'''
_ORDER = '''#include <metal_stdlib>
using namespace metal;
kernel void order(device atomic_uint *next [[buffer(0)]], device uint *rank [[buffer(1)]],
                  uint i [[thread_position_in_grid]])
{
    rank[i] = atomic_fetch_add_explicit(next, 1u, memory_order_relaxed);
}
'''

# A compiler likes to make two paths of this, each with its own copy of the barrier.
_TWO_TESTS = '''#include <metal_stdlib>
using namespace metal;
kernel void two_tests(device float *x [[buffer(0)]], uint i [[thread_index_in_threadgroup]])
{
    threadgroup float low[64];
    float v = x[i] * 2.0f;
    if (i < 64)
        low[i] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < 64)
        v = v * cos(v) + low[63 - i] * sin(v);
    x[i] = v;
}
'''

# The array is longer where it is declared than where it is used: nothing but the machine sees it.
_ARRAY = '''#include <metal_stdlib>
using namespace metal;
template <int N>
inline void fill(thread float *sum, device const float *x)
{
    for (int i = 0; i < N; i++)
        sum[i] = x[i];
}
kernel void through(device float *x [[buffer(0)]], uint i [[thread_index_in_threadgroup]])
{
    float sum[4];
    fill<LENGTH>(sum, x);
    x[i] = sum[0] + sum[1] + sum[2] + sum[3];
}
'''

# The threadgroup that comes last adds up what all have stored. FENCE stands where one belongs.
_LAST = '''#include <metal_stdlib>
using namespace metal;
kernel void last(device atomic_uint *stored [[buffer(0)]], device atomic_uint *arrived [[buffer(1)]],
                 device uint *sum [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                 uint groups [[threadgroups_per_grid]], uint i [[thread_index_in_threadgroup]])
{
    threadgroup uint ticket[1];
    atomic_store_explicit(&stored[group * 64 + i], group * 64 + i, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_device);
    if (i == 0) {
        FENCE_AFTER
        ticket[0] = atomic_fetch_add_explicit(arrived, 1u, memory_order_relaxed);
        FENCE_BEFORE
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    if (ticket[0] + 1 != groups || i != 0)
        return;
    uint all = 0;
    for (uint k = 0; k < groups * 64; k++)
        all += atomic_load_explicit(&stored[k], memory_order_relaxed);
    sum[0] = all;
}
'''
_FENCE = 'atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);'


def dispatch_copy(buffers, threads=(32,)):
    findings = emu.compile(_COPY).kernel('copy').dispatch(buffers, groups=(1,), threads=threads)
    return {f.kind for f in findings}


def x_y_n(n=8):
    return [emu.Buffer('f32', [1.0] * n, 'x'), emu.Buffer('f32', n, 'y'), emu.scalar('u32', n)]


def check_binding(index, entry, kind):
    buffers = x_y_n()
    buffers[index] = entry(buffers[index])
    assert dispatch_copy(buffers) == {kind}


def check_too_many_threads():
    assert dispatch_copy(x_y_n(), threads=(1056,)) == {'limit'}


def check_ragged_grid():
    out = emu.Buffer('u32', 7 * 3, 'out')
    kernel = emu.compile(_PLACE).kernel('place')
    assert not kernel.dispatch([out], grid=(7, 3), threads=(4, 2))
    wanted = [y << 16 | x << 8 | (4 if x < 4 else 3) << 4 | 4 for y in range(3) for x in range(7)]
    assert out.values() == wanted


def check_orders_differ():
    kernel, seen = emu.compile(_ORDER).kernel('order'), []
    for order in emu.ORDERS:
        rank = emu.Buffer('u32', 128, 'rank')
        next_rank = emu.Buffer('u32', [0], 'next')
        assert not kernel.dispatch([next_rank, rank], groups=(2,), threads=(64,), order=order)
        assert sorted(rank.values()) == list(range(128))
        seen.append(rank.values())
    assert seen[0] == list(range(128)) and seen[1] == seen[0][::-1] and seen[2] not in seen[:2]


def check_barrier_between_tests():
    for mode in ('fast', 'fastmath', 'checked'):
        kernel = emu.compile(_TWO_TESTS, mode).kernel('two_tests')
        assert not kernel.dispatch([emu.Buffer('f32', [1.0] * 256)], groups=(1,), threads=(256,))


def check_array_through_a_pointer():
    for length, kinds in (4, set()), (5, {'bounds'}):
        kernel = emu.compile(_ARRAY.replace('LENGTH', str(length)), 'checked').kernel('through')
        found = kernel.dispatch([emu.Buffer('f32', [1.0] * 8)], groups=(1,), threads=(1,))
        assert {f.kind for f in found} == kinds, found


def check_order_between_threadgroups():
    for after, before, kinds in ((_FENCE, _FENCE, set()), ('', _FENCE, {'order'}),
                                 (_FENCE, '', {'order'}), ('', '', {'order'}),
                                 (_FENCE.replace('seq_cst', 'relaxed'), _FENCE, {'order'}),
                                 (_FENCE.replace('scope_device', 'scope_threadgroup'), _FENCE,
                                  {'order'})):
        text = _LAST.replace('FENCE_AFTER', after).replace('FENCE_BEFORE', before)
        kernel = emu.compile(text, 'checked', version=320).kernel('last')
        for order in emu.ORDERS:
            buffers = [emu.Buffer('u32', 256), emu.Buffer('u32', [0]), emu.Buffer('u32', 1)]
            found = kernel.dispatch(buffers, groups=(4,), threads=(64,), order=order)
            assert {f.kind for f in found} == kinds, (after, before, found)
            assert buffers[2].values() == [sum(range(256))]


def cases():
    yield 'machine/order-between-threadgroups', check_order_between_threadgroups
    yield 'machine/array-through-a-pointer', check_array_through_a_pointer
    yield 'machine/barrier-between-tests', check_barrier_between_tests
    yield 'machine/nothing-bound', lambda: check_binding(0, lambda b: None, 'binding')
    yield 'machine/unaligned-offset', lambda: check_binding(0, lambda b: (b, 2), 'binding')
    yield 'machine/argument-too-small', lambda: check_binding(
        2, lambda b: emu.Buffer('u8', [8, 0], 'n'), 'binding')
    yield 'machine/input-too-short', lambda: check_binding(
        0, lambda b: emu.Buffer('f32', [1.0] * 7, 'x'), 'bounds')
    yield 'machine/too-many-threads', check_too_many_threads
    yield 'machine/ragged-grid', check_ragged_grid
    yield 'machine/orders-differ', check_orders_differ
