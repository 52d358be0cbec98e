"""Wrong kernels: each is one of kernels/ with one mistake put in, and the kind of finding that must
come of it. The checked build finds all but those in UNSEEN, which says why."""
from harness import SUBJECTS

# (name, file, what the kernel says, what the mutant says, kind of the finding)
MUTANTS = [
    # -- order: a barrier that is missing, too narrow, or for the wrong memory
    ('no-barrier-after-partial-sums', 'norm.metal',
     '    threadgroup_barrier(mem_flags::mem_threadgroup);\n', '', 'race'),
    ('barrier-for-device-memory-only', 'norm.metal',
     'threadgroup_barrier(mem_flags::mem_threadgroup)',
     'threadgroup_barrier(mem_flags::mem_device)', 'race'),
    ('barrier-for-no-memory', 'norm.metal', 'threadgroup_barrier(mem_flags::mem_threadgroup)',
     'threadgroup_barrier(mem_flags::mem_none)', 'race'),
    ('simdgroup-barrier-where-threadgroup', 'norm.metal',
     'threadgroup_barrier(mem_flags::mem_threadgroup)',
     'simdgroup_barrier(mem_flags::mem_threadgroup)', 'race'),
    ('no-barrier-after-staging', 'matmul.metal',
     '        threadgroup_barrier(mem_flags::mem_threadgroup); // staged\n', '', 'race'),
    ('no-barrier-before-restaging', 'matmul.metal',
     '        threadgroup_barrier(mem_flags::mem_threadgroup); // read\n', '', 'race'),
    ('no-barrier-after-store', 'matmul.metal',
     '    threadgroup_barrier(mem_flags::mem_threadgroup); // stored\n', '', 'race'),
    ('no-barrier-in-tree', 'route.metal',
     '        threadgroup_barrier(mem_flags::mem_threadgroup); // step\n', '', 'race'),
    ('no-simdgroup-barrier', 'softmax.metal',
     '    simdgroup_barrier(mem_flags::mem_threadgroup);\n', '', 'race'),
    ('two-writers-of-equal-value', 'norm.metal', '    if (lane == 0)\n        partial[simdgroup]',
     '    if (lane < 2)\n        partial[simdgroup]', 'race'),
    ('strips-overlap-between-simdgroups', 'softmax.metal', 'strips + simdgroup * 256',
     'strips + simdgroup * 128', 'race'),
    ('threadgroups-write-one-row', 'norm.metal', 'y[base + i] = T(v)', 'y[i] = T(v)', 'race'),
    ('plain-add-where-atomic', 'route.metal',
     '            atomic_fetch_add_explicit(&counts[v], count, memory_order_relaxed);',
     '            ((device uint *)counts)[v] += count;', 'race'),
    ('store-where-atomic-add-races-with-init', 'route.metal',
     '    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (position < n)\n'
     '        atomic_fetch_add_explicit(&local[keys[position]], 1u, memory_order_relaxed);',
     '    if (position < n)\n'
     '        ((threadgroup uint *)local)[keys[position]] += 1u;', 'race'),
    # -- bounds
    ('reads-one-row-too-far', 'norm.metal', 'ulong(row) * dims.columns',
     '(ulong(row) + 1) * dims.columns', 'bounds'),
    ('loop-runs-to-and-with-the-end', 'norm.metal',
     'i < dims.columns; i += threads) {\n        float v = x[base + i] * scale',
     'i <= dims.columns; i += threads) {\n        float v = x[base + i] * scale', 'bounds'),
    ('no-row-guard', 'matvec.metal', '    if (row >= dims.rows)\n        return;\n', '', 'bounds'),
    ('no-column-guard-when-staging', 'matmul.metal', 'column0 + r < dims.n && k < dims.k ? b',
     'k < dims.k ? b', 'bounds'),
    ('negative-index', 'norm.metal', 'x[base + i] * scale', 'x[base + i - 1] * scale', 'bounds'),
    ('index-of-wrong-unit', 'matvec.metal', 'codes[row * blocks + b]',
     'codes[(row * blocks + b) * 4]', 'bounds'),
    ('tile-row-too-long', 'matmul.metal', 'a_tile + sub_row * TILE + k, TILE);',
     'a_tile + sub_row * TILE + k, TILE * 2);', 'bounds'),
    ('threadgroup-array-too-short', 'norm.metal', 'threadgroup float partial[32]',
     'threadgroup float partial[1]', 'bounds'),
    ('thread-array-index', 'softmax.metal', 'values[j] = exp(values[j] - top)',
     'values[j + 1] = exp(values[j] - top)', 'undefined'),
    ('vector-element-index', 'matvec.metal', 'words[w] >>', 'words[w + 1] >>', 'undefined'),
    # -- divergence
    ('barrier-in-a-branch', 'norm.metal',
     '    threadgroup_barrier(mem_flags::mem_threadgroup);\n',
     '    if (simdgroup == 0)\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n',
     'divergence'),
    ('return-before-barrier', 'norm.metal', '    threadgroup float partial[32];\n',
     '    threadgroup float partial[32];\n    if (index >= dims.columns)\n        return;\n',
     'divergence'),
    ('simd-sum-in-a-branch', 'matvec.metal', '    sum = simd_sum(sum);\n    if (lane == 0)\n',
     '    if (lane < 6)\n        sum = simd_sum(sum);\n    if (lane == 0)\n', 'divergence'),
    ('two-barriers-for-two-halves', 'norm.metal',
     '    threadgroup_barrier(mem_flags::mem_threadgroup);\n',
     '    if (simdgroup == 0)\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n'
     '    else\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n', 'divergence'),
    ('two-simd-sums-for-two-halves', 'matvec.metal', '    sum = simd_sum(sum);\n',
     '    if (lane < 16)\n        sum = simd_sum(sum);\n    else\n        sum = simd_sum(sum);\n',
     'divergence'),
    ('lanes-return-before-simd-sum', 'matvec.metal', '    sum = simd_sum(sum);\n',
     '    if (lane >= blocks)\n        return;\n    sum = simd_sum(sum);\n', 'divergence'),
    ('trip-count-differs-between-lanes', 'softmax.metal', 'ushort delta = 16; delta > 0;',
     'ushort delta = 16; delta > lane / 16;', 'divergence'),
    # -- memory that nobody wrote
    ('one-partial-sum-too-many', 'norm.metal', 'lane < simdgroups ? partial',
     'lane < simdgroups + 1 ? partial', 'uninitialised'),
    ('counters-not-zeroed', 'route.metal',
     'for (uint v = index; v < VALUES; v += threads)\n        atomic_store',
     'for (uint v = index; v < VALUES - 1; v += threads)\n        atomic_store', 'uninitialised'),
    # -- limits and inputs
    ('more-than-32-kib', 'matmul.metal', 'threadgroup float c_tile[16 * 16];',
     'threadgroup float c_tile[16 * 16 * 31];', 'limit'),
    ('writes-an-input', 'norm.metal', 'sum += v * v;',
     'sum += v * v;\n        ((device float *)x)[base + i] = v;', 'read-only'),
    # -- plain wrong answers, and what never ends
    ('shift-by-too-much', 'matvec.metal', '(4 * k)', '(8 * k)', 'undefined'),
    ('wrong-nibble', 'matvec.metal', '(4 * k)', '(28 - 4 * k)', 'result'),
    ('bias-forgotten', 'matvec.metal', ' + bias * x_sum', '', 'result'),
    ('shuffle-by-the-wrong-distance', 'softmax.metal', 'delta = 16; delta > 0;',
     'delta = 8; delta > 0;', 'result'),
    ('right-operand-not-transposed', 'matmul.metal', 'ulong2(0), true', 'ulong2(0), false',
     'result'),
    ('tie-to-the-highest', 'route.metal', 'where[index + step] < where[index]',
     'where[index + step] > where[index]', 'result'),
    ('inclusive-where-exclusive', 'route.metal', 'simd_prefix_exclusive_sum',
     'simd_prefix_inclusive_sum', 'result'),
    ('endless-loop', 'matvec.metal', 'b < blocks; b += 32', 'b < blocks; b += 0', 'timeout'),
    # -- TensorOps
    ('static-k-past-the-tensor', 'tensor.metal', 'int(dynamic_extent)', '32', 'violation'),
    ('scope-is-not-the-threadgroup', 'tensor.metal', 'execution_simdgroups<4>',
     'execution_simdgroups<2>', 'violation'),
    ('slice-without-its-offset', 'tensor.metal', '.slice(column0, row0)', '.slice(0, row0)',
     'race'),
    ('not-a-multiple-of-16', 'tensor.metal', 'matmul2d_descriptor(32, 32,',
     'matmul2d_descriptor(24, 24,', 'compile'),
    # -- not found, see UNSEEN
    ('divergent-calls-of-one-helper', 'norm.metal',
     'template <typename T>\nkernel void rms_norm',
     'void meet(void)\n{\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n}\n'
     'template <typename T>\nkernel void rms_norm', None),
]

UNSEEN = {
    'divergent-calls-of-one-helper':
        'a barrier inside a helper that is not inlined is one call site wherever the helper is '
        'called from, so calls of it in two branches look like one barrier',
}

# A second change, for mutants that need one.
_ALSO = {
    'divergent-calls-of-one-helper': (
        '    threadgroup_barrier(mem_flags::mem_threadgroup);\n    uint simdgroups',
        '    if (simdgroup == 0)\n        meet();\n    else\n        meet();\n    uint simdgroups'),
}


def mutate(name, text, old, new):
    assert text.count(old) >= 1, f'{name}: the text to change is not there: {old}'
    text = text.replace(old, new, 1)
    if name in _ALSO:
        assert _ALSO[name][0] in text, name
        text = text.replace(*_ALSO[name], 1)
    return text


def check_mutant(name, file, old, new, kind):
    subject = SUBJECTS[file]
    problems = subject.run(mutate(name, subject.text(), old, new), 'checked', timeout_ms=500)
    kinds = {k for k, _ in problems}
    if name in UNSEEN:
        assert not kinds, f'{name} is found now ({kinds}): take it out of UNSEEN'
    else:
        assert kind in kinds, f'{name}: wanted {kind}, got {problems or "nothing"}'


def check_subject(file, mode):
    """The kernels themselves are right, in every build and order: no false alarms."""
    subject = SUBJECTS[file]
    problems = subject.run(subject.text(), mode)
    problems += subject.run(subject.text(), mode, orders=('random',), flush_to_zero=True)
    assert not problems, problems


def cases():
    for file in SUBJECTS:
        for mode in ('fast', 'fastmath', 'checked'):
            yield f'kernel/{file}/{mode}', lambda f=file, m=mode: check_subject(f, m)
    for mutant in MUTANTS:
        yield f'mutant/{mutant[0]}', lambda m=mutant: check_mutant(*m)
