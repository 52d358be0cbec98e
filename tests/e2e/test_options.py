"""What every command does with options: --help, and errors that name what was wrong."""
import os
import re
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")


def calla(*args, code=2):
    p = subprocess.run([CALLA, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, cwd=ROOT, timeout=60)
    assert p.returncode == code, p.stderr.decode()
    return p.stdout.decode() if code == 0 else p.stderr.decode()


COMMANDS = re.findall(r"^  (\w+) {2,}", calla("--help", code=0), re.M)
VALUED = {"bench": "--runs", "chat": "--system", "eval": "--ids", "info": "--ctx", "pull": "--endpoint",
          "quantize": "--bits", "run": "-p", "serve": "--port", "synth": "--seed", "tokenize": "-m"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    out = calla(command, "--help", code=0)
    assert out == calla(command, "-h", code=0)
    assert out.startswith("usage: calla " + command) and "-h, --help" in out
    assert "examples:" in out or "example:" in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_option(command):
    hint = f"Try 'calla {command} --help'."
    for wrong, named in [("--no-such", "--no-such"), ("-Z", "-Z"), ("-Zy", "-Z"), ("--help=5", "--help=5")]:
        err = calla(command, wrong)
        assert err == f"calla {command}: there is no option '{named}'\n{hint}\n"
    if command in VALUED:
        err = calla(command, VALUED[command])
        assert err == f"calla {command}: {VALUED[command]} wants a value\n{hint}\n"


def test_every_command_is_here():
    assert len(COMMANDS) == 11 and set(COMMANDS) - set(VALUED) == {"render"}


@pytest.mark.parametrize("command", [["synth", "-o", "x"], ["quantize", "-m", "x", "-o", "y"]])
@pytest.mark.parametrize("option, values, said", [
    ("--bits", ("7", "9", "1", "0", "-4", "4.0", "x", "4294967300"), "wants 2, 3, 4, 5, 6 or 8, not "),
    ("--group", ("16", "48", "96", "256", "", "64x"), "wants 32, 64 or 128, not ")])
def test_one_of_a_few_numbers(command, option, values, said):
    for value in values:
        assert calla(*command, option, value).startswith(f"calla {command[0]}: {option} {said}'{value}'\n")


@pytest.mark.parametrize("args", [["serve", "--max-body", "1T"], ["serve", "--max-body", "0"],
                                  ["serve", "--cache-ram", "1KB"], ["serve", "--cache-disk", "-1"],
                                  ["serve", "--cache-disk", "99999999999999G"], ["run", "--ctx", "0"],
                                  ["chat", "--think", "--no-think"], ["run", "--seed", "1.5"]])
def test_value_out_of_bounds(args):
    err = calla(*args)
    option = args[-2] if len(args) > 2 and args[-2].startswith("--") else args[-1]
    assert option in err
    if args[0] == "serve":
        assert "K, M or G" in err
