"""What cannot be written, by whichever command: exit code 4 for want of room, else 3, and the reason."""
import os
import resource
import subprocess

import pytest

from serving import Server
from test_pull import env, hub, pull, small  # noqa: F401 (fixtures)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
TINY = ["--layers", "4", "--hidden", "64", "--vocab", "512", "--experts", "4", "--topk", "2", "--width", "64",
        "--shared-width", "64", "--key-heads", "1", "--value-heads", "2"]
REQUEST = b'{"messages": [{"role": "user", "content": "Hi"}]}'


def calla(*args, code, text=b"", **kw):
    p = subprocess.run([CALLA, *args], input=text, stderr=subprocess.PIPE, cwd=ROOT, timeout=120,
                       **{"stdout": subprocess.PIPE, **kw})
    assert p.returncode == code, p.stderr.decode()
    return p.stderr.decode()


PRINTING = [["--help"], ["--version"], ["info"], ["info", "--json"], ["run", "--help"],
            ["run", "-p", "hi", "-n", "2"], ["run", "-p", "hi", "-n", "20", "--raw"],
            ["run", "-p", "hi", "-n", "2", "--json"], ["tokenize", "hi"], ["tokenize", "hi " * 30000],
            ["render"], ["chat", "--no-think", "-n", "2"], ["eval", "--ctx", "64"],
            ["bench", "--prefill", "8"], ["bench", "--prefill", "8", "--json"], ["pull", "--help"]]


@pytest.mark.parametrize("args", PRINTING, ids=lambda a: " ".join(a)[:40])
def test_standard_output_is_full(args):
    text = REQUEST if args[0] == "render" else b"Some words of a text.\n" * 5
    with open("/dev/full", "wb") as full:
        err = calla(*args, code=4, text=text, stdout=full)
    assert "cannot write standard output: No space left" in err


@pytest.mark.parametrize("args", PRINTING[2:6], ids=lambda a: " ".join(a)[:40])
def test_standard_output_is_closed(args):
    """Another reason, another code."""
    with open("/dev/null", "rb") as not_for_writing:
        err = calla(*args, code=3, stdout=not_for_writing)
    assert "cannot write standard output: Bad file descriptor" in err


def writes(name, to):
    return ["synth", "-o", str(to), *TINY] if name == "synth" else [
        "quantize", "-m", "tests/data/fixtures/fixture-hf", "-o", str(to)]


@pytest.mark.parametrize("name", ["synth", "quantize"])
def test_a_checkpoint_has_no_room(name, tmp_path):
    """The disk is full from the first byte, and from the first one past a limit."""
    to = tmp_path / "full"
    to.mkdir()
    (to / "model.safetensors.part").symlink_to("/dev/full")
    assert "No space left" in calla(*writes(name, to), code=4)
    assert "File too large" in calla(
        *writes(name, tmp_path / "limit"), code=4, restore_signals=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000)))
    assert not (tmp_path / "limit" / "config.json").exists()


@pytest.mark.parametrize("name", ["synth", "quantize"])
def test_a_checkpoint_cannot_be_there(name, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "Not a directory" in calla(*writes(name, tmp_path / "file" / "x"), code=3)


def test_a_pulled_file_has_no_room(hub, env):  # noqa: F811
    small(hub)
    out = pull(hub, env, code=4, restore_signals=False,
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000)))
    assert "cannot write" in out and "File too large" in out
    pull(hub, env)


def test_a_pulled_model_cannot_be_there(hub, env):  # noqa: F811
    small(hub)
    assert "cannot make the folder" in pull(hub, dict(env, XDG_DATA_HOME="/proc/none"), code=3)


def test_a_trace_that_cannot_be_there():
    assert "cannot write the trace to /nowhere/x: No such" in calla("serve", "--port", "0", "--trace", "/nowhere/x",
                                                                    "--cache-disk", "0", code=3)


def test_a_trace_that_is_full():
    """Answers go on; that lines are missing is said once."""
    s = Server("--trace", "/dev/full")
    try:
        for _ in range(3):
            status, _, _ = s.request("POST", "/v1/chat/completions", b'{"max_tokens": 2,' + REQUEST[1:])
            assert status == 200
        assert s.lines().count("lines are missing in the trace: No space left") == 1
    finally:
        s.close()
