#!/usr/bin/env python3
"""Checks of style that a compiler does not make; prints a line a finding, exits 1 if there is one.

  layers     includes point down: cmd -> server -> engine -> model -> backend -> base, engine -> text -> base
  sizes      host files up to 620 lines, functions up to 90 (tests and kernels of a device excepted)
  banned     calls that overflow, lose errors or hold hidden state
  exits      only cmd/ prints for the user or ends the process (base/mem.c excepted: out of memory)
  pitfalls   every test that tests/pitfalls.md names is in the file named there
  docs       every path of the tree that a page names is there; every `LIMIT = N` of docs/kernels.md
             is in the sources so
  text       no tabs, no trailing blanks, lines up to 100 columns
  format     clang-format, where it is installed
"""
import os, re, shutil, subprocess, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BELOW = {
    "base": set(),
    "backend": {"base"},
    "text": {"base"},
    "model": {"backend", "base"},
    "engine": {"model", "backend", "text", "base"},
    "server": {"engine", "model", "backend", "text", "base"},
    "cmd": {"server", "engine", "model", "backend", "text", "base"},
}
BANNED = ("strcpy strcat sprintf vsprintf gets atoi atol atof strtok alloca system popen tmpnam "
          "asctime ctime gmtime localtime rand srand setjmp longjmp").split()
FILE_LINES, FUNCTION_LINES, COLUMNS = 620, 90, 100
found = []


def report(path, line, text):
    found.append(f"{path}:{line}: {text}")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def tracked(*patterns):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT,
                         stdout=subprocess.PIPE, check=True).stdout.decode()
    return [p for p in out.splitlines() if os.path.exists(os.path.join(ROOT, p))]


def strip_comments(text):
    """Comments and strings become blanks, so that columns and lines stay."""
    def blank(m):
        return re.sub(r"[^\n]", " ", m.group(0))
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text,
                  flags=re.S)


def check_layers(path, text):
    layer = path.split("/")[1]
    for n, line in enumerate(text.splitlines(), 1):
        m = re.match(r'\s*#\s*include\s+"([a-z0-9]+)/', line)
        if m and m.group(1) in BELOW and m.group(1) != layer and m.group(1) not in BELOW[layer]:
            report(path, n, f"{layer}/ must not include {m.group(1)}/")


def check_sizes(path, code):
    lines = code.splitlines()
    if len(lines) > FILE_LINES:
        report(path, len(lines), f"{len(lines)} lines; split the file (at most {FILE_LINES})")
    start = None
    for n, line in enumerate(lines, 1):
        if line.startswith("{"):
            start = n
        elif line.startswith("}") and start is not None:
            if n - start > FUNCTION_LINES and line.strip() == "}":
                report(path, start, f"function of {n - start} lines (at most {FUNCTION_LINES})")
            start = None


def check_calls(path, code):
    for n, line in enumerate(code.splitlines(), 1):
        for m in re.finditer(r"\b([a-z_]+)\s*\(", line):
            if m.group(1) in BANNED and not re.search(r"[.>]\s*$", line[: m.start()]):
                report(path, n, f"{m.group(1)}() is banned")
            layer = path.split("/")[1]
            if layer != "cmd" and path not in ("src/base/mem.c", "src/base/log.c"):
                if m.group(1) in ("exit", "_exit", "abort", "printf", "puts", "putchar"):
                    report(path, n, f"{m.group(1)}() outside cmd/")


def check_text(path, text):
    for n, line in enumerate(text.splitlines(), 1):
        if "\t" in line:
            report(path, n, "tab")
        if line != line.rstrip():
            report(path, n, "trailing blank")
        if len(line) > COLUMNS:
            report(path, n, f"{len(line)} columns (at most {COLUMNS})")


def check_pitfalls(path):
    for n, line in enumerate(read(path).splitlines(), 1):
        row = re.match(r"\| (\d+b?) \|.*\| (\S.*) \|$", line)
        if re.match(r"\| *\d", line) and not row:
            report(path, n, "a row is `| number | fault | test |`")
        for file, name in re.findall(r"`([a-z0-9_]+/[^`: ]+): ([^`]*)`", line):
            file = "tests/" + file
            if not os.path.isfile(os.path.join(ROOT, file)):
                report(path, n, f"there is no {file}")
            elif not re.search(r"^(static void|void|def) %s\(" % re.escape(name), read(file), re.M):
                report(path, n, f"{file} has no test {name}")


def check_docs(pages, sources):
    for path in pages:
        for n, line in enumerate(read(path).splitlines(), 1):
            for name in re.findall(r"`((?:src|tests|tools|docs|models)/[\w./-]+)`", line):
                if not os.path.exists(os.path.join(ROOT, name)):
                    report(path, n, f"there is no {name}")
            for limit in re.findall(r"`([A-Z]\w+ = \d+)`", line) if path == "docs/kernels.md" else ():
                if not any(re.search(r"\b%s\b" % limit, code) for code in sources):
                    report(path, n, f"no source says {limit}")


def check_format(paths):
    tool = shutil.which("clang-format")
    if not tool or not paths:
        return
    out = subprocess.run([tool, "--dry-run", *paths], cwd=ROOT, stderr=subprocess.PIPE,
                         stdout=subprocess.DEVNULL).stderr.decode()
    for line in out.splitlines():
        m = re.match(r"(.*?):(\d+):\d+: (?:warning|error): .*clang-format", line)
        if m:
            report(os.path.relpath(m.group(1), ROOT), m.group(2), "not as clang-format writes it")


def main():
    sources = tracked("src/*.c", "src/*.h", "tests/*.c", "tests/*.h")
    for path in sources:
        text = read(path)
        code = strip_comments(text)
        check_text(path, text)
        if path.startswith("src/"):
            check_layers(path, text)
            check_calls(path, code)
            check_sizes(path, code)
    check_pitfalls("tests/pitfalls.md")
    kernels = tracked("src/backend/*.h", "src/backend/*.c", "src/backend/*.cu", "src/backend/*.cuh")
    check_docs(tracked("*.md", "docs/*.md"), [read(path) for path in kernels])
    for path in tracked("src/*.m", "src/*.metal", "src/*.cu", "src/*.cuh", "tests/*.m", "tests/*.metal"):
        check_text(path, read(path))
    check_format([p for p in sources if "/metal/" not in p])
    for line in found:
        print(line)
    if not found:
        print(f"lint: {len(sources)} files, nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
