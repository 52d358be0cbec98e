"""Builds what the emulator runs: its runtime, the precompiled preludes, kernel libraries.

Everything lands in build/metal/ under the name of a hash of what it was made from, so that a
second build of the same text is a look-up. clang-19 is optional: missing() says what is not there.
"""
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import threading

from msl import lint as msl_lint
from msl.lex import SourceError
from msl.rewrite import rewrite

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parents[1] / 'build' / 'metal'
CXX, CC = 'clang++-19', 'clang-19'
VERSIONS = (310, 320, 400)  # of the language: macOS 14, 15, 26

LANGUAGE = ['-std=c++20', '-nostdinc', '-nostdinc++', '-mf16c', '-fno-exceptions', '-fno-rtti',
            '-fno-threadsafe-statics', '-fno-math-errno', '-fPIC',
            # Any call may hold a barrier: none is copied into two paths.
            '-Xclang', '-fconvergent-functions']
WARNINGS = ['-Wall', '-Wno-unknown-pragmas', '-Wno-unused-function', '-Wno-unused-variable',
            '-Wno-unused-const-variable', '-Wno-duplicate-decl-specifier', '-Wno-missing-braces',
            '-Wno-unused-but-set-variable', '-Wno-pass-failed', '-Werror=return-type',
            '-ftemplate-backtrace-limit=6']
UNDEFINED = ('array-bounds,shift,integer-divide-by-zero,float-cast-overflow,'
             'signed-integer-overflow,return,unreachable,alignment,local-bounds')
MODES = {
    'fast': ['-O2', '-ffp-contract=off'],
    # What Metal's default math mode allows the compiler, as far as clang for x86 does the same.
    'fastmath': ['-O2', '-ffast-math', '-mfma'],
    # Every access and every undefined operation calls runtime/hooks.c. A read that a write to the
    # same address follows would be left out without the last option, and `sum[i] += x` is where
    # uninitialised memory is read.
    'checked': ['-O1', '-g', '-DEMU_CHECKED', '-fsanitize=thread', f'-fsanitize={UNDEFINED}',
                '-ffp-contract=off', '-ftrivial-auto-var-init=pattern', '-mllvm',
                '-tsan-instrument-func-entry-exit=0', '-mllvm',
                '-tsan-instrument-read-before-write=1'],
    'lint': ['-DEMU_LINT'],
}


class BuildError(Exception):
    """The kernel does not compile; the message is the compiler's, with the kernel's own lines."""


_lock = threading.Lock()


def missing():
    """Why the emulator cannot run here, or None."""
    if platform.machine() not in ('x86_64', 'amd64') or platform.system() != 'Linux':
        return 'the emulator needs Linux on x86-64'
    for tool in (CXX, CC, 'addr2line'):
        if not shutil.which(tool):
            return f'{tool} is not installed (apt-get install clang-19 binutils)'
    return None


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr.strip() or f'{command[0]} failed')
    return done


def _digest(*parts):
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:24]


def _make(path, command):
    """Runs `command` with the output path appended; others see the file only when it is whole."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f'{path.name}.{os.getpid()}.{threading.get_ident()}')
        run(command + ['-o', str(partial)])
        os.replace(partial, path)
    return path


def _text(*directories):
    files = sorted(p for d in directories for p in (HERE / d).rglob('*')
                   if p.is_file() and p.suffix != '.pyc')
    return '\0'.join(p.read_text() for p in files)


_PRELUDE_TEXT = _text('prelude') + (HERE / 'runtime' / 'emu_abi.h').read_text()
_RUNTIME_TEXT = _text('runtime')
_FRONT_END_TEXT = _text('msl', 'shim')


def runtime():
    """The path of the runtime library."""
    sources = sorted(str(p) for p in (HERE / 'runtime').glob('*.c'))
    command = [CC, '-std=c11', '-D_GNU_SOURCE', '-O2', '-g', '-Wall', '-Wextra', '-fPIC', '-shared',
               *sources, '-lm', '-ldl']
    with _lock:
        return _make(OUT / f'libemu-{_digest(_RUNTIME_TEXT, *command)}.so', command)


def _flags(mode):
    return LANGUAGE + MODES[mode]


def prelude(mode):
    """The path of the precompiled declarations; its flags must be those of the kernels."""
    command = [CXX, *_flags(mode), '-Xclang', '-fno-pch-timestamp',
               '-Wno-pragma-system-header-outside-header', '-x', 'c++-header',
               str(HERE / 'prelude' / 'emu_metal.h')]
    with _lock:
        return _make(OUT / f'prelude-{mode}-{_digest(_PRELUDE_TEXT, *command)}.pch', command)


def preprocess(path, version, defines=(), includes=()):
    command = [CXX, '-std=c++20', '-nostdinc', '-nostdinc++', '-E', '-x', 'c++', '-D__METAL__=1',
               f'-D__METAL_VERSION__={version}', '-D__METAL_MACOS__=1', f'-I{HERE / "shim"}',
               *(f'-I{d}' for d in includes), *(f'-D{d}' for d in defines), str(path)]
    return run(command).stdout


def source_path(source):
    """A file for `source`, which is a path or the text itself."""
    if isinstance(source, pathlib.Path):
        return source
    path = OUT / 'text' / f'{_digest(source)}.metal'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return path


def kernel_library(source, mode, version=310, defines=(), includes=()):
    """Compiles a path or text; returns the path of the shared library."""
    preprocessed = preprocess(source_path(source), version, defines, includes)
    flags = _flags(mode) + WARNINGS
    name = _digest(preprocessed, mode, _PRELUDE_TEXT, _FRONT_END_TEXT, *flags)
    path = OUT / 'kernels' / f'{name}.so'
    if path.exists():
        return path
    try:
        rewritten = rewrite(preprocessed)
    except SourceError as e:
        raise BuildError(str(e)) from e
    text = OUT / 'kernels' / f'{name}.cpp'
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(rewritten)
    return _make(path, [CXX, *flags, '-include-pch', str(prelude(mode)), '-x', 'c++', str(text),
                        '-shared', '-nostdlib', '-fno-sanitize-link-runtime',
                        '-Wl,-Bsymbolic'])


def lint(source, version=310, defines=(), includes=()):
    """Everything in which the text leaves the conservative subset: a list of messages."""
    path = source_path(source)
    try:
        preprocessed = preprocess(path, version, defines, includes)
        found = msl_lint.check(preprocessed, path.read_text(), str(HERE / 'shim'))
        rewritten = rewrite(preprocessed, lint=True)
    except (BuildError, SourceError) as e:
        return [str(e)]
    text = OUT / 'lint' / f'{_digest(rewritten)}.cpp'
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(rewritten)
    command = [CXX, *_flags('lint'), *WARNINGS, '-Wvla', '-Wpre-c++17-compat',
               '-Wpre-c++20-compat', '-include-pch', str(prelude('lint')), '-fsyntax-only', '-x',
               'c++', str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stderr.splitlines():
        if (': error: ' in line or ': warning: ' in line) and not msl_lint.is_allowed(line):
            found.append(msl_lint.readable(line))
    if done.returncode and not found:
        found.append(done.stderr.strip())
    return found
