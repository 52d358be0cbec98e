#!/usr/bin/env python3
"""Tests of the emulator itself. Usage: run_tests.py [-v] [part of a case's name ...]

Ends with "N passed, N failed, N skipped"; all are skipped where the emulator cannot run."""
import concurrent.futures
import pathlib
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import build  # noqa: E402
import cases_language  # noqa: E402
import cases_machine  # noqa: E402
import cases_mutants  # noqa: E402

JOBS = 2  # compilers run beside each other; the emulated machine is one


def all_cases():
    for module in (cases_mutants, cases_language, cases_machine):
        yield from module.cases()


def run_case(case):
    name, function = case
    start = time.monotonic()
    try:
        function()
        return name, None, time.monotonic() - start
    except AssertionError as e:
        return name, str(e), time.monotonic() - start
    except Exception:
        return name, traceback.format_exc(), time.monotonic() - start


def main(arguments):
    verbose = '-v' in arguments
    wanted = [a for a in arguments if a != '-v']
    chosen = [c for c in all_cases() if not wanted or any(w in c[0] for w in wanted)]
    if build.missing():
        print(f'SKIP: {build.missing()}')
        print(f'0 passed, 0 failed, {len(chosen)} skipped')
        return 0
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for name, problem, seconds in pool.map(run_case, chosen):
            if problem:
                failed += 1
                print(f'FAIL {name}\n     {problem}')
            elif verbose:
                print(f'ok   {name} ({seconds:.2f} s)')
    print(f'{len(chosen) - failed} passed, {failed} failed, 0 skipped')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
