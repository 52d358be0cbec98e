"""The emulator's own test kernels (kernels/), each with inputs, a reference in plain Python, and
the dispatches that exercise it. A subject's run() returns what was wrong: findings and results."""
import math
import pathlib
import random

import emulator as emu

KERNELS = pathlib.Path(__file__).resolve().parent / 'kernels'


class Subject:
    """A kernel file under test. Subclasses give run_once(library, order, options)."""
    file = None
    version = 310

    def text(self):
        return (KERNELS / self.file).read_text()

    def run(self, text, mode, orders=('forward', 'reverse', 'random'), **options):
        """Compiles and runs `text`; returns problems as (kind, detail), at the first bad order."""
        try:
            library = emu.compile(text, mode=mode, version=self.version)
        except emu.BuildError as e:
            return [('compile', str(e))]
        for order in orders:
            problems = self.run_once(library, dict(options, order=order, seed=7))
            if problems:
                return problems
        return []

    def run_once(self, library, options):
        raise NotImplementedError


def problems_of(findings, got, wanted, tolerance=0.0):
    """Findings as problems; the result is compared only when there are none."""
    if findings:
        return [(f.kind, str(f)) for f in findings]
    for i, (g, w) in enumerate(zip(got, wanted)):
        if not abs(g - w) <= tolerance * max(1.0, abs(w)):
            return [('result', f'element {i} is {g}, not {w}')]
    return []


def floats(seed, count, low=-1.0, high=1.0):
    generator = random.Random(seed)
    data = [generator.uniform(low, high) for _ in range(count)]
    return emu.Buffer('f32', data).values()  # rounded to f32


class Norm(Subject):
    file = 'norm.metal'

    def run_once(self, library, options):
        for rows, columns, threads, gained in ((2, 300, 64, True), (3, 100, 256, False)):
            x, gain = floats(1, rows * columns, -3, 3), floats(2, columns)
            kernel = library.kernel('rms_norm_f32', {0: ('bool', gained)})
            y = emu.Buffer('f32', rows * columns, 'y')
            buffers = [emu.Buffer('f32', x, 'x'), y, emu.packed('If', columns, 1e-6)]
            if gained:
                buffers.append(emu.Buffer('f32', gain, 'gain'))
            findings = kernel.dispatch(buffers, groups=(rows,), threads=(threads,), **options)
            wanted = []
            for r in range(rows):
                row = x[r * columns:(r + 1) * columns]
                scale = 1 / math.sqrt(sum(v * v for v in row) / columns + 1e-6)
                wanted += [v * scale * (gain[i] if gained else 1) for i, v in enumerate(row)]
            problems = problems_of(findings, y.values(), wanted, 1e-5)
            if problems:
                return problems
        return []


class Matvec(Subject):
    file = 'matvec.metal'
    rows, columns = 5, 192

    def run_once(self, library, options):
        rows, columns, generator = self.rows, self.columns, random.Random(3)
        codes = [[generator.randrange(16) for _ in range(columns)] for _ in range(rows)]
        words = [sum(row[i + k] << 4 * k for k in range(8))
                 for row in codes for i in range(0, columns, 8)]
        scales = emu.Buffer('bf16', floats(4, rows * columns // 64, -0.1, 0.1), 'scales')
        biases = emu.Buffer('bf16', floats(5, rows * columns // 64), 'biases')
        x, y = floats(6, columns), emu.Buffer('f32', rows, 'y')
        findings = library.kernel('matvec_q4').dispatch(
            [emu.Buffer('u32', words, 'codes'), scales, biases, emu.Buffer('f32', x, 'x'), y,
             emu.packed('II', rows, columns)],
            groups=((rows + 1) // 2,), threads=(64,), **options)
        s, b, wanted = scales.values(), biases.values(), []
        for r in range(rows):
            group = r * (columns // 64)
            wanted.append(sum((s[group + k // 64] * codes[r][k] + b[group + k // 64]) * x[k]
                              for k in range(columns)))
        return problems_of(findings, y.values(), wanted, 1e-4)


def product(a, b, m, n, k):
    """a [m, k] times b [n, k] transposed."""
    return [math.fsum(a[i * k + x] * b[j * k + x] for x in range(k))
            for i in range(m) for j in range(n)]


class Matmul(Subject):
    file = 'matmul.metal'

    def run_once(self, library, options):
        m, n, k = 20, 18, 40
        a, b, c = floats(8, m * k), floats(9, n * k), emu.Buffer('f32', m * n, 'c')
        findings = library.kernel('matmul_f32').dispatch(
            [emu.Buffer('f32', a, 'a'), emu.Buffer('f32', b, 'b'), c, emu.packed('III', m, n, k)],
            groups=((n + 15) // 16, (m + 15) // 16), threads=(128,), **options)
        return problems_of(findings, c.values(), product(a, b, m, n, k), 1e-5)


class Route(Subject):
    file = 'route.metal'

    def run_once(self, library, options):
        n, generator = 150, random.Random(10)
        keys = [generator.randrange(64) for _ in range(n)]
        counts, starts = emu.Buffer('u32', [0] * 64, 'counts'), emu.Buffer('u32', 64, 'starts')
        findings = library.kernel('histogram').dispatch(
            [emu.Buffer('u32', keys, 'keys'), counts, emu.scalar('u32', n)],
            groups=(3,), threads=(64,), **options)
        wanted = [keys.count(v) for v in range(64)]
        problems = problems_of(findings, counts.values(), wanted)
        if problems:
            return problems
        findings = library.kernel('offsets').dispatch([counts, starts], groups=(1,), threads=(64,),
                                                      **options)
        problems = problems_of(findings, starts.values(),
                               [sum(wanted[:v]) for v in range(64)])
        if problems:
            return problems
        x, winner = [float(k % 50) for k in keys], emu.Buffer('u32', 1, 'winner')
        findings = library.kernel('largest').dispatch(
            [emu.Buffer('f32', x, 'x'), winner, emu.scalar('u32', n)], groups=(1,), threads=(64,),
            **options)
        return problems_of(findings, winner.values(), [x.index(max(x))])


class Softmax(Subject):
    file = 'softmax.metal'

    def run_once(self, library, options):
        rows, columns, simdgroups = 3, 250, 2
        x, y = floats(11, rows * columns, -9, 9), emu.Buffer('f32', rows * columns, 'y')
        findings = library.kernel('softmax').dispatch(
            [emu.Buffer('f32', x, 'x'), y, emu.packed('IIf', rows, columns, 0.5)],
            groups=(2,), threads=(32 * simdgroups,), threadgroup_bytes={0: simdgroups * 1024},
            **options)
        wanted = []
        for r in range(rows):
            e = [math.exp(0.5 * v) for v in x[r * columns:(r + 1) * columns]]
            wanted += [v / sum(e) for v in e]
        return problems_of(findings, y.values(), wanted, 1e-5)


class Tensor(Subject):
    file, version = 'tensor.metal', 400

    def run_once(self, library, options):
        m, n, k = 40, 35, 24
        a = emu.Buffer('bf16', floats(12, m * k), 'a')
        b = emu.Buffer('bf16', floats(13, n * k), 'b')
        c = emu.Buffer('f32', m * n, 'c')
        findings = library.kernel('matmul_tensor').dispatch(
            [a, b, c, emu.packed('iii', m, n, k)], groups=(2, 2), threads=(128,), **options)
        return problems_of(findings, c.values(), product(a.values(), b.values(), m, n, k), 1e-5)


SUBJECTS = {s.file: s for s in (Norm(), Matvec(), Matmul(), Route(), Softmax(), Tensor())}
