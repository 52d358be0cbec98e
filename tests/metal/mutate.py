#!/usr/bin/env python3
"""Mutation score of the tests of the Metal kernels: mutate.py [--count N] [--seed N]

Puts one random mistake at a time into the backend's kernels (an index, a bound, a barrier, an
operator), and runs kcheck over the emulator until a case fails. Prints a line a mutant and ends with
"N of N caught". Needs build/emu/kcheck (make metal-emulated)."""
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / 'src' / 'backend' / 'metal'
FAMILIES = {'embed': ['embed', 'copy'], 'linear': ['linear'], 'delta': ['delta'],
            'attention': ['kv_append', 'attention'], 'moe': ['moe_route', 'moe_experts'],
            'sample': ['argmax', 'top']}
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


def is_caught(source, family):
    for mode, every in (('fast', '4'), ('checked', '13'), ('fast', '1')):
        for op in FAMILIES[family]:
            try:
                done = subprocess.run(
                    [ROOT / 'build/emu/kcheck', '--level', 'metal', '--pool', 'edge', '--op', op,
                     '--every', every], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    timeout=300, env=dict(os.environ, EMU_SOURCE=source, EMU_MODE=mode,
                             EMU_TIMEOUT='20000'))
            except subprocess.TimeoutExpired:
                return f'{mode} (endless)'
            if done.returncode:
                return mode
    return None


def main(arguments):
    option = dict(zip(arguments[::2], arguments[1::2]))
    count, generator = int(option.get('--count', 40)), random.Random(int(option.get('--seed', 1)))
    names = ['dims.h', 'common.h'] + [f'{f}.metal' for f in FAMILIES]
    texts = {n: re.sub(r'(?m)^#include "', '//', (KERNELS / n).read_text()) for n in names}
    sources = {f: mutants(texts[f'{f}.metal'], generator) for f in FAMILIES}
    caught, tried = 0, 0
    while tried < count:
        family = generator.choices(list(FAMILIES), [1, 4, 3, 5, 6, 3])[0]
        try:
            what, text = next(sources[family])
        except StopIteration:
            continue
        tried += 1
        with tempfile.NamedTemporaryFile('w', suffix='.metal') as file:
            file.write('\n'.join({**texts, f'{family}.metal': text}[n] for n in names))
            file.flush()
            how = is_caught(file.name, family)
        caught += how is not None
        print(f'{how or "SURVIVED":8} {family}.metal:{what}', flush=True)
    print(f'{caught} of {tried} caught')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
