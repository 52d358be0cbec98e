#!/usr/bin/env python3
"""Mutation score of the tests of the Metal kernels:
    mutate.py [--count N] [--seed N] [--kcheck PROGRAM]

Puts one random mistake at a time into the backend's kernels (an index, a bound, a barrier, an
operator), spread over the files by their length, and runs kcheck over the emulator, the ops of that
file only, until a case fails. Prints a line a mutant and ends with "N of N caught". Needs
build/emu/kcheck (make metal-emulated), made from the same kernels."""
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / 'src' / 'backend' / 'metal'
# The two texts that are compiled, as the Makefile joins them.
PLAIN = ['dims.h', 'common.h', 'rows.h', 'embed.metal', 'linear.metal', 'delta.metal',
         'attention.metal', 'route.metal', 'moe.metal', 'sample.metal']
TENSOR = ['dims.h', 'common.h', 'tensor.h', 'linear_tensor.metal', 'moe_tensor.metal']
OPS = {'embed.metal': ['embed', 'copy'], 'linear.metal': ['linear'], 'delta.metal': ['delta'],
       'attention.metal': ['attention', 'kv_append'], 'moe.metal': ['moe_experts'],
       'route.metal': ['moe_route'], 'rows.h': ['linear', 'moe_route'],
       'sample.metal': ['argmax', 'top'], 'common.h': ['linear', 'moe_experts', 'attention'],
       'tensor.h': ['linear', 'moe_experts'], 'linear_tensor.metal': ['linear'],
       'moe_tensor.metal': ['moe_experts']}
# Pool and every n-th case of it: a quick look at all methods first.
STAGES = [('fast', 'edge', '4'), ('checked', 'edge', '13'), ('fast', 'real', '10'),
          ('fast', 'edge', '1'), ('checked', 'edge', '4')]
CPU_SECONDS = 200  # of one op in one stage; without a mistake it takes 40 at most
BARRIER = re.compile(r'^ *threadgroup_barrier\(.*\);.*\n', re.M)
CHANGES = [  # (kind, pattern, replacement)
    ('bound', r' < ', ' <= '), ('bound', r' >= ', ' > '), ('operator', r' \+ ', ' - '),
    ('operator', r' \* ', ' + '), ('operator', r' \+= ', ' = '), ('operator', r' % ', ' / '),
    ('index', r'\[(\w+)\]', r'[\1 + 1]'), ('index', r'\b32\b', '31'),
    ('operator', r' && ', ' || '), ('operator', r' == ', ' != ')]


def mutants(text, generator):
    """All of them, as (description, text), in random order."""
    found = [('barrier', m.start(), m.end(), '') for m in BARRIER.finditer(text)]
    for kind, pattern, new in CHANGES:
        found += [(kind, m.start(), m.end(), m.expand(new)) for m in re.finditer(pattern, text)]
    generator.shuffle(found)
    for kind, start, end, new in found:
        line_start = text.rfind('\n', 0, start) + 1
        line = text[line_start:text.find('\n', start)]
        # Comments, argument lists, host names and the preprocessor are no computation.
        if '[[' in line or line.lstrip().startswith(('//', '#', 'template', 'constant', 'kernel')):
            continue
        if '//' in text[line_start:start]:
            continue
        number = text.count('\n', 0, start) + 1
        yield f'{number}: {kind}: {line.strip()} -> {new.strip() or "removed"}', \
            text[:start] + new + text[end:]


def is_caught(kcheck, source, name):
    """In which stage a case fails, or None."""
    is_tensor = name in TENSOR[2:]
    level, patch = ('metal/tensor', 'EMU_TENSOR_PATCH') if is_tensor else \
        ('metal/simdgroup', 'EMU_PATCH')
    for mode, pool, every in STAGES:
        for op in OPS[name]:
            # Processor time: the machine may have other things to do.
            done = subprocess.run(
                ['sh', '-c', f'ulimit -t {CPU_SECONDS}; exec "$@"', 'sh', kcheck, '--level', level,
                 '--pool', pool, '--op', op, '--every', every], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(os.environ, **{patch: source}, EMU_MODE=mode, EMU_TIMEOUT='20000'))
            if done.returncode:
                return f'{mode} {pool} {op}'
    return None


def choose(count, seed):
    """(file, description, text of a patch) of each mutant."""
    generator = random.Random(seed)
    texts = {n: re.sub(r'(?m)^#include "', '//', (KERNELS / n).read_text())
             for n in dict.fromkeys(PLAIN + TENSOR)}
    sources = {n: list(mutants(texts[n], generator)) for n in OPS}
    chosen = []
    while len(chosen) < count:
        name = generator.choices(list(OPS), [len(sources[n]) for n in OPS])[0]
        what, text = sources[name].pop()
        names = TENSOR if name in TENSOR[2:] else PLAIN
        # A file alone needs the headers; a header needs all files.
        if not name.endswith('.h'):
            names = [n for n in names if n.endswith('.h') or n == name]
        chosen.append((name, what, '\n'.join(text if n == name else texts[n] for n in names)))
    return chosen


def main(arguments):
    option = dict(zip(arguments[::2], arguments[1::2]))
    kcheck = option.get('--kcheck', str(ROOT / 'build' / 'emu' / 'kcheck'))
    chosen = choose(int(option.get('--count', 40)), int(option.get('--seed', 1)))
    caught = 0
    for name, what, text in chosen:
        with tempfile.NamedTemporaryFile('w', suffix='.metal') as file:
            file.write(text)
            file.flush()
            how = is_caught(kcheck, file.name, name)
        caught += how is not None
        print(f'{how or "SURVIVED":24} {name}:{what}', flush=True)
    print(f'{caught} of {len(chosen)} caught')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
