#!/usr/bin/env python3
"""Command line of the emulator.

  check.py lint FILE.metal [VERSION]           prints what leaves the subset; exits 1 if anything does
  check.py build MODE FILE.metal [VERSION]     prints the path of the compiled library

FILE.metal may be - for the standard input. MODE: fast, fastmath or checked. VERSION: 310 (default), 320 or 400. Exit code 1: it does not
compile, the compiler's messages are on the error stream."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import build  # noqa: E402


def main(arguments):
    if not 2 <= len(arguments) <= 4 or arguments[0] not in ('lint', 'build'):
        print(__doc__, file=sys.stderr)
        return 2
    if build.missing():
        print(build.missing(), file=sys.stderr)
        return 3
    rest = arguments[1:] if arguments[0] == 'lint' else arguments[2:]
    version = int(rest[1]) if len(rest) > 1 else 310
    path = build.source_path(sys.stdin.read()) if rest[0] == '-' else pathlib.Path(rest[0]).resolve()
    if arguments[0] == 'lint':
        found = build.lint(path, version)
        print('\n'.join(found), end='\n' if found else '')
        return 1 if found else 0
    try:
        print(build.kernel_library(path, arguments[1], version))
    except build.BuildError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
