#!/usr/bin/env python3
"""Runs every test that was built and ends with one line `N passed, N failed, N skipped`.

  tests/run.py [--long] [NAME...]     suites whose name contains a NAME; all without one

Suites: the cmocka programs of the plain and of the sanitizer build, the fuzzers (sanitizer build),
kcheck with its self-test, the Metal emulator's tests, the pytest files. --long runs full counts (CALLA_TEST_LONG=1).
The output of a suite is shown when it fails; skipped tests are listed with their reason.
"""
import concurrent.futures, glob, importlib.util, os, re, shutil, subprocess, sys, tempfile, time
import xml.etree.ElementTree as xml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SYSTEM_PYTHON = "/usr/bin/python3"
CLOSING = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped")


def use_python_with_packages():
    """bootstrap installs pytest and jinja2 for the system's Python; pyenv or conda may stand before it."""
    lacks = [m for m in ("pytest", "jinja2") if importlib.util.find_spec(m) is None]
    if lacks and os.path.exists(SYSTEM_PYTHON) and sys.executable != SYSTEM_PYTHON:
        os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON, *sys.argv])


class Result:
    def __init__(self, passed=0, failed=0, skips=(), output=""):
        self.passed, self.failed, self.skips, self.output = passed, failed, list(skips), output


def call(argv, limit, **env):
    """Runs argv; returns (exit code, output). A command past its limit counts as failed."""
    full = dict(os.environ, **env)
    full.setdefault("ASAN_OPTIONS", "allocator_may_return_null=1:detect_leaks=1")
    full.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    try:
        p = subprocess.run(argv, cwd=ROOT, env=full, stdin=subprocess.DEVNULL, timeout=limit,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return p.returncode, p.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as e:
        return -1, (e.stdout or b"").decode("utf-8", "replace") + f"\nstopped after {limit} s\n"


def run_cmocka(path, limit):
    code, out = call([path], limit, CMOCKA_MESSAGE_OUTPUT="TAP")
    result = Result(output=out)
    for fail, rest in re.findall(r"^(not )?ok \d+(.*)$", out, re.M):
        if "# SKIP" in rest:
            result.skips.append(f"{os.path.basename(path)}: {rest.replace('# SKIP', '').strip(' -')}")
        elif fail:
            result.failed += 1
        else:
            result.passed += 1
    if result.failed == 0 and (code != 0 or result.passed + len(result.skips) == 0):
        result.failed += 1
    return result


def run_counted(argv, limit):
    """A program that closes with the counts itself."""
    code, out = call(argv, limit)
    found = CLOSING.findall(out)
    if not found:
        return Result(0, 1, [], out + "\nno closing line\n")
    passed, failed, skipped = map(int, found[-1])
    if code != 0 and failed == 0:
        failed = 1
    reasons = re.findall(r"^SKIP.*$", out, re.M)
    return Result(passed, failed, (reasons + ["?"] * skipped)[:skipped], out)


def run_pytest(path, limit):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        code, out = call([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          f"--junitxml={report}", path], limit)
        if not os.path.exists(report):
            return Result(0, 1, [], out)
        result = Result(output=out)
        for case in xml.parse(report).getroot().iter("testcase"):
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                result.failed += 1
            elif skip is not None:
                result.skips.append(f"{case.get('name')}: {skip.get('message')}")
            else:
                result.passed += 1
        if code not in (0, 1, 5) and result.failed == 0:
            result.failed += 1
        return result


# Level: a processor whose best one it is.
ARM_LEVELS = {"cpu/neon": "neoverse-n1", "cpu/i8mm": "max"}


def run_arm(arg, limit):
    """kcheck of an Arm level under an emulator, where `make tests` could build it. A processor has
    no level beyond its own."""
    level, long = arg
    program, emulator = f"{ROOT}/build/arm64/kcheck", shutil.which("qemu-aarch64")
    if not os.path.exists(program) or not emulator:
        return Result(skips=["kcheck arm64: needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"])
    kcheck = [emulator, "-cpu", ARM_LEVELS[level], program]
    few = [] if long else ["--pool", "random", "--cases", "6"]
    result = run_counted([*kcheck, "--level", level, *few], limit)
    code, out = call([*kcheck, "--op", "copy", "--cases", "1"], limit)
    best = re.findall(r"^copy +(\S+)", out, re.M)[-1:]
    result.passed += best == [level]
    result.failed += best != [level]
    result.output += f"exit {code}, levels of {ARM_LEVELS[level]}:\n{out}"
    return result


def suites(long):
    limit = 5400 if long else 1800
    found = []
    for build in ("build", "build/san"):
        for path in sorted(glob.glob(f"{ROOT}/{build}/tests/test_*")):
            if not path.endswith(".d"):
                found.append((f"{build}/{os.path.basename(path)}", run_cmocka, path, limit))
    for path in sorted(glob.glob(f"{ROOT}/build/san/tests/fuzz_*")):
        if not path.endswith(".d"):
            found.append((os.path.basename(path), run_counted, [path], limit))
    kcheck = f"{ROOT}/build/kcheck"
    if os.path.exists(kcheck):
        seeds = ("1", "2", "3") if long else ("1",)
        for seed in seeds:
            found.append((f"kcheck seed {seed}", run_counted, [kcheck, "--seed", seed], limit))
        cut = [] if long else ["--pool", "random"]
        found.append(("kcheck deterministic", run_counted, [kcheck, "--deterministic", *cut], limit))
        found.append(("kcheck self-test", run_counted, [kcheck, "--self-test"], limit))
    found.append(("metal emulator", run_counted,
                  [sys.executable, f"{ROOT}/tests/metal/run_tests.py"], limit))
    for level in ARM_LEVELS:
        found.append((f"kcheck arm64 {level}", run_arm, (level, long), limit))
    for path in sorted(glob.glob(f"{ROOT}/tests/e2e/test_*.py")):
        found.append((os.path.basename(path), run_pytest, path, limit))
    return found


def main():
    args = sys.argv[1:]
    if "--help" in args or "-h" in args:
        print(__doc__)
        return 0
    long = "--long" in args
    names = [a for a in args if a != "--long"]
    if long:
        os.environ["CALLA_TEST_LONG"] = "1"
    chosen = [s for s in suites(long) if not names or any(n in s[0] for n in names)]
    total = Result()

    def timed(suite):
        start = time.monotonic()
        return suite, suite[1](suite[2], suite[3]), time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        for suite, result, seconds in pool.map(timed, chosen):
            mark = "FAIL" if result.failed else "ok"
            print(f"{mark:4} {suite[0]:40} {result.passed:5} passed {len(result.skips):3} skipped "
                  f"{result.failed:3} failed {seconds:7.1f} s", flush=True)
            for reason in result.skips:
                print(f"     SKIP {reason}")
            if result.failed:
                print("\n".join("     | " + line for line in result.output.splitlines()[-60:]))
            total.passed += result.passed
            total.failed += result.failed
            total.skips += result.skips
    if not chosen:
        print("no suite was built or none matches; run `make tests` first")
        total.failed = 1
    print(f"{total.passed} passed, {total.failed} failed, {len(total.skips)} skipped")
    return 1 if total.failed else 0


if __name__ == "__main__":
    use_python_with_packages()
    sys.exit(main())
