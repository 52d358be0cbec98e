#!/usr/bin/env python3
"""What the backend uses of Apple's interfaces, held against api.tsv: api.py [--list]

The host compiles only against the stub headers, so what they declare bounds what it can use: each
declaration must be on the list, with the macOS version of the list as its guard, and each of the
list must be declared. The kernels: every function, type and attribute that their text does not
define itself must be on the list, and be no newer than any version of the language that sees it.
Ends with "N names, N problems"; --list prints what is in use."""
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import build  # noqa: E402
from msl.lex import find_close, is_attribute, tokenize  # noqa: E402

KERNELS = HERE.parents[1] / 'src' / 'backend' / 'metal'
HEADERS = ('Foundation/Foundation.h', 'Metal/Metal.h')
OLDEST_SYSTEM = '14.0'  # nothing up to here needs a guard
LANGUAGES = {310: '3.1', 320: '3.2', 400: '4.0'}  # __METAL_VERSION__ of each
_KEYWORDS = set('''if for while return sizeof switch else case constexpr static_assert template
    typename operator alignof'''.split())
_DECLARED = re.compile(r'\b(?:struct|class|typedef[^;]*?|using)\s+(?:alignas\([^)]*\)\s*)?'
                       r'([A-Za-z_]\w*)\s*(?:[;{:=<]|$)', re.M)


def read_list():
    """{(kind, name): (version, sdk)}"""
    rows = [line.split('\t') for line in (HERE / 'api.tsv').read_text().splitlines()
            if line and not line.startswith('#')]
    return {(kind, name): (since, sdk) for kind, name, since, sdk in rows}


def version(text):
    return tuple(int(part) for part in text.split('.'))


# ---- the host

def selector(text):
    """`- (T)one:(A)a two:(B)b` -> one:two:"""
    text = re.sub(r'STUB_SINCE\([\d.]*\)|__attribute__\(\(.*?\)\)', '', text)
    text = re.sub(r'^\s*[-+]\s*', '', text)
    while True:  # types in brackets, the inner ones first
        shorter = re.sub(r'\([^()]*\)', '', text)
        if shorter == text:
            break
        text = shorter
    names = re.findall(r'(\w+)\s*:', text)
    return ''.join(n + ':' for n in names) if names else text.split()[0].rstrip(';')


def declarations(header):
    """(kind, name, guard or None, SDK or None) of what a stub header declares."""
    text = re.sub(r'//.*', '', (HERE / 'stub' / header).read_text())
    text = re.sub(r'\\\n', ' ', text)
    sdk, pending, owner_guard, statement = [], None, None, ''
    for line in text.split('\n'):
        directive = re.match(r'\s*#\s*(\w+)(.*)', line)
        if directive:
            word, rest = directive.groups()
            found = re.search(r'MAX_ALLOWED >= (\d\d)', rest)
            if word.startswith('if'):
                sdk.append(found.group(1) + '.0' if found else None)
            elif word == 'else' and sdk:
                sdk[-1] = None
            elif word == 'endif' and sdk:
                sdk.pop()
            continue
        newest = next((s for s in reversed(sdk) if s), None)
        owner = re.match(r'\s*(?:__attribute__\(\(\w+\)\)\s*)?@(interface|protocol)\s+(\w+)(.*)', line)
        if re.match(r'\s*STUB_SINCE\(([\d.]+)\)\s*$', line):
            pending = re.search(r'\(([\d.]+)\)', line).group(1)
        elif owner:
            if not owner.group(3).strip().endswith(';'):
                owner_guard, pending = pending, None
                yield owner.group(1), owner.group(2), owner_guard, newest
        elif line.startswith('@end'):
            owner_guard = None
        else:
            statement += ' ' + line.strip()
            if not re.search(r'[;{},]\s*$', statement):
                continue
            if statement.lstrip()[:1] in '-+' and not statement.rstrip().endswith(';'):
                continue
            yield from one_declaration(statement.strip(), owner_guard, newest)
            statement = ''


def one_declaration(text, owner_guard, sdk):
    found = re.search(r'STUB_SINCE\(([\d.]+)\)', text)
    guard = found.group(1) if found else owner_guard
    constant = re.match(r'(MTL\w+|NS\w+)\s*(?:STUB_SINCE\([\d.]+\))?\s*=', text)
    function = re.match(r'[\w<> ]+[ >*](MTL\w+)\([^)]*\)\s*;', text)
    if text[:1] in '-+' and not text.startswith('--'):
        yield 'method', selector(text), guard, sdk
    elif text.startswith('@property'):
        text = re.sub(r'__attribute__\(\(.*?\)\)|STUB_SINCE\([\d.]+\)', '', text)
        yield 'property', re.search(r'(\w+)\s*;', text).group(1), guard, sdk
    elif constant:
        yield 'constant', constant.group(1), guard, sdk
    elif function:
        yield 'function', function.group(1), guard, sdk


def check_host(listed):
    seen = {}
    for header in HEADERS:
        for kind, name, guard, sdk in declarations(header):
            seen[kind, name] = None
            if (kind, name) not in listed:
                yield f'{header}: {kind} {name} is not in api.tsv'
                continue
            since, first_sdk = listed[kind, name]
            if version(since) > version(guard or OLDEST_SYSTEM):
                yield f'{header}: {kind} {name} is of macOS {since} and is guarded for {guard}'
            if version(first_sdk) > version(sdk or OLDEST_SYSTEM):
                yield f'{header}: {kind} {name} came with SDK {first_sdk}; its #if says {sdk}'
    for kind, name in listed:
        if kind in ('method', 'property', 'constant', 'function', 'interface', 'protocol') and \
                (kind, name) not in seen:
            yield f'api.tsv: {kind} {name} is in no stub header'


# ---- the kernels

def library_types():
    """Types that the emulator's library declares."""
    text = '\n'.join(p.read_text() for p in sorted((HERE / 'prelude').glob('*.h')))
    names = {n for n in _DECLARED.findall(text) if not n.startswith('emu') and len(n) > 1}
    return names - {'matrix', 'metal'} | {
        f'{t}{n}' for t in 'bool char uchar short ushort int uint long ulong half float'.split()
        for n in (2, 3, 4)} | {'simdgroup_float8x8', 'simdgroup_half8x8', 'atomic_uint', 'bfloat',
                               'half', 'mem_flags', 'tensor_inline', 'execution_simdgroups'}


def used_by(path, language):
    """(kind, name, line) of what the text takes from the language's library."""
    text = build.preprocess(path, language)
    tokens = [t for t in tokenize(text) if not t.file.startswith(str(HERE / 'shim'))]
    own, used, types, attribute_end = set(), [], library_types(), 0
    for i, t in enumerate(tokens[:-1]):
        before, after = (tokens[i - 1].text if i else ''), tokens[i + 1].text
        if is_attribute(tokens, i):
            attribute_end = find_close(tokens, i)
            used.append(('attribute', tokens[i + 2].text, tokens[i + 2]))
        if t.kind != 'name' or t.text in _KEYWORDS or i < attribute_end:
            continue
        if t.text in types:
            used.append(('type', t.text, t))
        elif before in ('struct', 'typename', 'class') or after in ('(', '[', ';', '=', ',', ')') and (
                tokens[i - 1].kind == 'name' and before not in _KEYWORDS
                and before not in ('else', 'return')):
            own.add(t.text)
        elif after == '(' or (after == '<' and len(t.text) > 2 and
                              tokens[i + 2].kind in ('name', 'number')):
            used.append(('builtin', t.text, t))
    own |= {tokens[i].text for i in range(1, len(tokens) - 1) if tokens[i + 1].text == '(' and
            tokens[i - 1].text in ('>', '*', '&') and tokens[i].kind == 'name' and
            tokens[find_close(tokens, i + 1) + 1].text == '{'}
    for kind, name, t in used:
        if kind == 'attribute' or name not in own:
            yield kind, name, f'{pathlib.Path(t.file).name}:{t.line}'


def check_kernels(listed, in_use):
    used_names = set()
    for path in sorted(KERNELS.glob('*.metal')):
        said = set()
        for number, language in LANGUAGES.items():
            for kind, name, place in used_by(path, number):
                used_names.add((kind, name))
                in_use.add((kind, name))
                if (kind, name) in said:
                    continue
                said.add((kind, name))
                if (kind, name) not in listed:
                    yield f'{place}: {kind} {name} is not in api.tsv'
                elif version(listed[kind, name][0]) > version(language):
                    yield f'{place}: {kind} {name} is of Metal {listed[kind, name][0]}'
    for kind, name in listed:
        if kind in ('builtin', 'type', 'attribute') and (kind, name) not in used_names:
            yield f'api.tsv: {kind} {name} is in no kernel'


def main(arguments):
    listed, in_use = read_list(), set()
    problems = list(check_host(listed)) + list(check_kernels(listed, in_use))
    if '--list' in arguments:
        print('\n'.join(sorted(f'{k}\t{n}' for k, n in in_use)))
    print('\n'.join(problems), end='\n' if problems else '')
    print(f'{len(listed)} names, {len(problems)} problems')
    return 1 if problems else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
