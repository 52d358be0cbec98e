"""The Metal backend on Linux: its kernels and its host code over the emulator of tests/metal.

Skipped where clang 19 or libobjc is missing. What passes here has been executed by an emulator;
nothing here says that it runs on a Mac, or how fast."""
import json
import os
import shutil
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "emu", "calla")
KCHECK = os.path.join(ROOT, "build", "emu", "kcheck")
KERNELS = os.path.join(ROOT, "src", "backend", "metal")
CHECK = os.path.join(ROOT, "tests", "metal", "check.py")
DATA = os.path.join(ROOT, "tests", "data")
LONG = os.environ.get("CALLA_TEST_LONG") == "1"
FAMILIES = sorted(f for f in os.listdir(KERNELS) if f.endswith(".metal"))

needs_clang = pytest.mark.skipif(not shutil.which("clang++-19"), reason="clang-19 is not installed")
needs_build = pytest.mark.skipif(not os.path.exists(CALLA), reason="no build/emu/calla: clang-19 or "
                                 "libobjc (package gobjc) is missing")


def run(*argv, ok=True, cwd=ROOT, **env):
    p = subprocess.run(argv, cwd=cwd, env=dict(os.environ, **env), stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=3000)
    if ok:
        assert p.returncode == 0, (p.stdout + p.stderr).decode()[-2000:]
    return p


# ---- the kernels' text

@needs_clang
@pytest.mark.parametrize("family", FAMILIES)
def test_text_stays_in_the_subset(family):
    run(sys.executable, CHECK, "lint", os.path.join(KERNELS, family))


@needs_clang
@pytest.mark.parametrize("version", ["310", "320", "400"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_version_of_the_language_takes_it(family, version):
    run(sys.executable, CHECK, "build", "fast", os.path.join(KERNELS, family), version)


# ---- every op against the reference

def kcheck(*argv, **env):
    out = run(KCHECK, "--level", "metal", *argv, **env).stdout.decode()
    closing = out.split("\n")[-2]
    assert closing.endswith("0 failed, 0 skipped") and not closing.startswith("0 passed"), out


@needs_build
def test_ops_at_ragged_shapes():
    kcheck("--pool", "edge", *([] if LONG else ["--every", "2"]))


@needs_build
def test_ops_at_random_shapes():
    kcheck("--pool", "random", "--cases", "20" if LONG else "4")


@needs_build
@pytest.mark.parametrize("op", ["linear", "delta", "attention", "moe_experts"])
def test_ops_at_the_real_width(op):
    kcheck("--pool", "real", "--op", op, "--every", "1" if LONG else "10")


@needs_build
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_ops_checked(order):
    """Every access: races, bounds, uninitialised memory, divergence, limits."""
    start = "1" if LONG else {"forward": "13", "reverse": "17", "random": "19"}[order]
    kcheck("--pool", "edge", "--every", start, EMU_MODE="checked", EMU_ORDER=order)


@needs_build
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_ops_with_fast_math(order):
    kcheck("--pool", "edge", "--every", "1" if LONG else "7", EMU_MODE="fastmath", EMU_ORDER=order)


# ---- the model

def evaluate(*argv):
    return json.loads(run(CALLA, "eval", "--json", "--backend", "metal", *argv).stdout)["sets"]


@needs_build
@pytest.mark.parametrize("folder, name, chunk", [("fixture-mlx", "mlx4", "64"),
                                                 ("fixture-hf", "bf16", "1")])
def test_fixtures_agree_with_transformers(folder, name, chunk):
    got = evaluate("-m", os.path.join(DATA, "fixtures", folder), "--reference",
                   os.path.join(DATA, "fixtures", "expected.json"), "--set", name, "--chunk",
                   chunk)[name]
    assert got["positions"] == 570
    assert got["mean_difference"] <= 0.025 and got["top1_agreement"] >= 0.97


@needs_build
def test_demo_model_agrees_with_transformers():
    reference = os.path.join(DATA, "demo", "reference.json")
    names = sorted(json.load(open(reference))["held_out"])
    name = names[0] if LONG else min(names, key=lambda n: sum(
        len(r["next_logprob"]) for r in json.load(open(reference))["held_out"][n]))
    got = evaluate("--reference", reference, "--set", name)[name]
    assert got["mean_difference"] <= 0.01 and got["top1_agreement"] >= 0.99
    assert abs(got["ratio"] - 1) <= 1e-3


@needs_build
def test_chunks_agree_with_token_by_token(tmp_path):
    text = tmp_path / "text"
    text.write_text("In the beginning God created the heaven and the earth. And the earth was.")
    one, many = (json.loads(run(CALLA, "eval", "--json", "--backend", "metal", "--chunk", n, "-f",
                                str(text)).stdout) for n in ("1", "64"))
    assert one["tokens"] == many["tokens"] > 10
    assert abs(one["perplexity"] / many["perplexity"] - 1) <= 1e-3


@needs_build
def test_greedy_answer_is_the_reference():
    case = json.load(open(os.path.join(DATA, "demo", "reference.json")))["greedy"][0]
    n = 12
    out = json.loads(run(CALLA, "run", "--backend", "metal", "--json", "--raw", "--temp", "0", "-n",
                         str(n), "-p", case["prompt_text"]).stdout)
    for i, margin in enumerate(case["margin"][:n]):
        if margin <= 0.02:
            break
        assert out["ids"][i] == case["completion"][i]


@needs_build
def test_dispatches_of_a_decode_step(tmp_path):
    """7 a Gated DeltaNet layer, 8 an attention layer (9 past 256 positions), 4 around them: 304 for
    the 35B model's 30 and 10 layers, where the published engine has 595 and more."""
    counts = tmp_path / "counts"
    run(CALLA, "run", "--backend", "metal", "--raw", "--temp", "0", "-n", "4", "-p", "Once upon",
        EMU_COUNT=str(counts))
    steps = [int(n) for n in counts.read_text().split()][1:]
    assert set(steps) == {6 * 7 + 2 * 8 + 4}


# ---- what the world can do

@needs_build
@pytest.mark.parametrize("what, code, text", [
    ("device", 2, "no device 'metal' here"),
    ("family", 2, "no device 'metal' here"),
    ("compile", 5, "compiler refuses the kernels"),
    ("function", 5, "kernel embed_f32 cannot be made"),
    ("memory", 4, "no memory for a buffer"),
    ("pressure", 4, "ran out of memory"),
    ("commands", 5, "stopped a command"),
    ("lost", 5, "the GPU was lost"),
])
def test_failure_is_a_clean_error(what, code, text):
    p = run(CALLA, "run", "--backend", "metal", "--raw", "-n", "2", "-p", "Once", ok=False,
            EMU_FAIL=what)
    assert p.returncode == code and text in p.stderr.decode()


@needs_clang
def test_host_compiles_for_a_mac_with_arc(tmp_path):
    out = tmp_path / "metal.o"
    run("clang-19", "-target", "arm64-apple-macosx14.0", "-fobjc-arc", "-fblocks", "-nostdlibinc",
        "-Wall", "-Werror", "-Isrc", "-Itests/metal/stub", "-Itests/metal/stub/libc", "-c",
        "src/backend/metal/metal.m", "-o", str(out))
    assert out.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bits
