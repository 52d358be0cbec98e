"""The Metal backend on Linux: its kernels and its host code over the emulator of tests/metal.

Skipped where clang 19 or libobjc is missing. What passes here has been executed by an emulator;
nothing here says that it runs on a Mac, or how fast."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "emu", "calla")
KCHECK = os.path.join(ROOT, "build", "emu", "kcheck")
KERNELS = os.path.join(ROOT, "src", "backend", "metal")
CHECK = os.path.join(ROOT, "tests", "metal", "check.py")
DATA = os.path.join(ROOT, "tests", "data")
LONG = os.environ.get("CALLA_TEST_LONG") == "1"
FAMILIES = sorted(f for f in os.listdir(KERNELS) if f.endswith(".metal"))
SIMDGROUP, TENSOR = LEVELS = ("metal/simdgroup", "metal/tensor")  # the two matrix paths

needs_clang = pytest.mark.skipif(not shutil.which("clang++-19"), reason="clang-19 is not installed")
needs_build = pytest.mark.skipif(not os.path.exists(CALLA), reason="no build/emu/calla: clang-19 or "
                                 "libobjc (package gobjc) is missing")


CACHE = tempfile.mkdtemp()  # in place of the user's cache folder


def run(*argv, ok=True, cwd=ROOT, **env):
    env.setdefault("XDG_CACHE_HOME", CACHE)
    p = subprocess.run(argv, cwd=cwd, env=dict(os.environ, **env), stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=3000)
    if ok:
        assert p.returncode == 0, (p.stdout + p.stderr).decode()[-2000:]
    return p


# ---- the kernels' text

@needs_clang
@pytest.mark.parametrize("family", FAMILIES)
def test_text_stays_in_the_subset(family):
    """As the newest version of the language, which sees all of it."""
    run(sys.executable, CHECK, "lint", os.path.join(KERNELS, family), "400")


@needs_clang
@pytest.mark.parametrize("version", ["310", "320", "400"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_version_of_the_language_takes_it(family, version):
    run(sys.executable, CHECK, "build", "fast", os.path.join(KERNELS, family), version)


@needs_clang
def test_only_listed_interfaces_are_used():
    """Selectors, classes, constants, builtins, attributes: with the version that brought them."""
    out = run(sys.executable, os.path.join(ROOT, "tests", "metal", "api.py")).stdout.decode()
    assert out.endswith(" 0 problems\n") and int(out.split()[-4]) > 100


@needs_clang
@pytest.mark.parametrize("file, old, new, problem", [
    ("Metal.h", "STUB_SINCE(26.0)", "", "MTLLanguageVersion4_0 is of macOS 26.0"),
    ("Metal.h", "- (void)endEncoding;", "- (void)endEncoding;\n- (void)useHeap:(id)h;",
     "method useHeap: is not in api.tsv"),
    ("embed.metal", "to[i] = from[i]", "to[i] = from[simd_rank(i)]", "builtin simd_rank is not"),
    ("api.tsv", "type\tbfloat\t3.1", "type\tbfloat\t3.2", "bfloat is of Metal 3.2"),
    ("api.tsv", "builtin\tdot", "builtin\tcross", "builtin cross is in no kernel")])
def test_an_unlisted_interface_is_found(tmp_path, file, old, new, problem):
    for folder in ("tests/metal", "src/backend/metal"):
        shutil.copytree(os.path.join(ROOT, folder), tmp_path / folder)
    path = next(p for p in tmp_path.rglob(file))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    p = run(sys.executable, str(tmp_path / "tests/metal/api.py"), ok=False)
    assert p.returncode == 1 and problem in p.stdout.decode()


@pytest.mark.parametrize("std, count", [("metal3.1", len(FAMILIES) - 2),
                                        ("metal3.2", len(FAMILIES) - 2),
                                        ("metal4.0", len(FAMILIES))])
def test_every_file_goes_to_the_compiler_of_a_mac(std, count):
    """TensorOps files as Metal 4 only. Here `echo` is the compiler."""
    out = run(os.path.join(ROOT, "tools", "metal_shaders.sh"), std, METAL="echo").stdout.decode()
    assert out.count(f"-std={std} -Wall -c src/backend/metal/") == count
    assert std == "metal4.0" or "_tensor" not in out


@needs_build
@pytest.mark.parametrize("family, levels", [("9", 1), ("10", 2), ("6", 0)])
def test_metal_check_says_what_it_could_check(family, levels):
    p = run(os.path.join(ROOT, "tools", "metal_check.sh"), KCHECK, "--op", "copy", ok=False,
            EMU_FAMILY=family)
    out = p.stdout.decode()
    assert f"metal-check: {levels} levels passed, 0 failed" in out
    assert out.count("SKIP metal/") == 2 - levels and (p.returncode == 0) == (levels > 0)


# ---- every op against the reference

def kcheck(*argv, level=SIMDGROUP, **env):
    out = run(KCHECK, "--level", level, *argv, **env).stdout.decode()
    closing = out.split("\n")[-2]
    assert closing.endswith("0 failed, 0 skipped") and not closing.startswith("0 passed"), out


@needs_build
def test_ops_at_ragged_shapes():
    kcheck("--pool", "edge", *([] if LONG else ["--every", "2"]))


@needs_build
@pytest.mark.parametrize("op", ["linear", "moe_route", "moe_experts"])
@pytest.mark.parametrize("mode, order, every", [("fast", "reverse", "1"), ("checked", "random", "7"),
                                                ("checked", "forward", "11"),
                                                ("fastmath", "random", "5")])
def test_products_by_tensorops(op, mode, order, every):
    kcheck("--pool", "edge", "--op", op, "--every", "1" if LONG else every, level=TENSOR,
           EMU_MODE=mode, EMU_ORDER=order, EMU_FLUSH=str(int(mode == "fastmath")))


@needs_build
@pytest.mark.parametrize("op, pool, every", [("linear", "real", "6"), ("moe_experts", "edge", "38")])
def test_tensorops_at_the_real_width(op, pool, every):
    kcheck("--pool", pool, "--op", op, "--every", "1" if LONG else every, level=TENSOR)


@needs_build
def test_ops_at_random_shapes():
    kcheck("--pool", "random", "--cases", "20" if LONG else "4")


@needs_build
@pytest.mark.parametrize("op, every", [
    ("embed", "1"), ("linear", "6"), ("delta", "2"), ("kv_append", "2"), ("attention", "2"),
    ("moe_route", "1"), ("moe_experts", "9"), ("argmax", "1"), ("top", "1")])
def test_ops_at_the_real_width(op, every):
    """One row, and one shape of many rows; of the experts an edge has those."""
    kcheck("--pool", "real", "--op", op, "--every", "1" if LONG else every)
    if op == "moe_experts":
        kcheck("--pool", "edge", "--op", op, "--every", "38")


@needs_build
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_ops_checked(order):
    """Every access: races, bounds, uninitialised memory, divergence, limits."""
    start = "1" if LONG else {"forward": "8", "reverse": "9", "random": "10"}[order]
    kcheck("--pool", "edge", "--every", start, EMU_MODE="checked", EMU_ORDER=order)


@needs_build
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_ops_with_fast_math(order):
    kcheck("--pool", "edge", "--every", "1" if LONG else "7", EMU_MODE="fastmath", EMU_ORDER=order,
           EMU_FLUSH=str(int(order == "random")))


@needs_build
def test_router_ties_in_any_order():
    """Equal rows of the router tie whatever order the hardware sums in."""
    kcheck("--pool", "edge", "--op", "moe_route", EMU_ORDER="random")


@needs_build
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_ops_without_fences(order):
    """Before macOS 15 the router's choice is a command of its own for few rows too, and the delta
    step takes the value heads of a key head in turn."""
    for op in "moe_route", "delta":
        kcheck("--pool", "edge", "--op", op, EMU_ORDER=order, EMU_SYSTEM="14.6")


# ---- the model

def evaluate(level, *argv):
    return json.loads(run(CALLA, "eval", "--json", "--backend", level, *argv).stdout)["sets"]


@needs_build
@pytest.mark.parametrize("level, folder, name, chunk", [
    (SIMDGROUP, "fixture-mlx", "mlx4", "64"), (SIMDGROUP, "fixture-hf", "bf16", "1"),
    (TENSOR, "fixture-hf", "bf16", "64")])
def test_fixtures_agree_with_transformers(level, folder, name, chunk):
    got = evaluate(level, "-m", os.path.join(DATA, "fixtures", folder), "--reference",
                   os.path.join(DATA, "fixtures", "expected.json"), "--set", name, "--chunk",
                   chunk)[name]
    assert got["positions"] == 570
    assert got["mean_difference"] <= 0.025 and got["top1_agreement"] >= 0.97


@needs_build
@pytest.mark.parametrize("level", LEVELS)
def test_demo_model_agrees_with_transformers(level):
    reference = os.path.join(DATA, "demo", "reference.json")
    names = sorted(json.load(open(reference))["held_out"])
    name = names[0] if LONG else min(names, key=lambda n: sum(
        len(r["next_logprob"]) for r in json.load(open(reference))["held_out"][n]))
    got = evaluate(level, "--reference", reference, "--set", name)[name]
    assert got["mean_difference"] <= 0.01 and got["top1_agreement"] >= 0.99
    assert abs(got["ratio"] - 1) <= 1e-3


@needs_build
@pytest.mark.parametrize("level", LEVELS)
def test_chunks_agree_with_token_by_token(tmp_path, level):
    text = tmp_path / "text"
    text.write_text("In the beginning God created the heaven and the earth. And the earth was.")
    one, many = (json.loads(run(CALLA, "eval", "--json", "--backend", level, "--chunk", n, "-f",
                                str(text)).stdout) for n in ("1", "64"))
    assert one["tokens"] == many["tokens"] > 10
    assert abs(one["perplexity"] / many["perplexity"] - 1) <= (1e-3 if level == SIMDGROUP else 1e-2)


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
@pytest.mark.parametrize("temperature, ahead", [("0.5", 0), ("0", 1)])
@pytest.mark.parametrize("system, router", [("26.1", 1), ("14.6", 2)])
def test_dispatches_of_a_decode_step(tmp_path, system, router, temperature, ahead):
    """6 a Gated DeltaNet layer, 7 an attention layer (8 past 256 positions), 4 around them: 254 or
    264 for the 35B model's 30 and 10 layers, where the published engine has 595 and more. Before
    macOS 15 the router is one more in each. One more a step, and still one command buffer, when it
    is queued before the last token was read."""
    counts = tmp_path / "counts"
    run(CALLA, "run", "--backend", SIMDGROUP, "--raw", "--temp", temperature, "-n", "7", "-p",
        "Once upon", EMU_COUNT=str(counts), EMU_SYSTEM=system)
    steps = [int(n) for n in counts.read_text().split()][3:]
    assert len(steps) >= 3 and set(steps) == {6 * (5 + router) + 2 * (6 + router) + 4 + ahead}


@needs_build
def test_dispatches_of_a_prefill(tmp_path):
    """13 a Gated DeltaNet layer, 12 an attention layer and one before them, for any chunk of 17 rows
    or more: 511 for the 35B model, and 3 for the prompt's last row."""
    counts = tmp_path / "counts"
    run(CALLA, "run", "--backend", SIMDGROUP, "--raw", "--temp", "0", "-n", "1", "-p",
        "Once upon a time there was a little girl who lived in a small house near the deep wood",
        EMU_COUNT=str(counts))
    assert int(counts.read_text().split()[0]) == 6 * 13 + 2 * 12 + 1


def test_page_of_the_model_is_computed():
    run(sys.executable, os.path.join(ROOT, "tools", "metal_model.py"), "--check",
        os.path.join(ROOT, "docs", "perf", "metal-model.md"))


# ---- what the world can do

@needs_build
@pytest.mark.parametrize("what, code, text", [
    ("device", 2, "no device 'metal' here"),
    ("compile", 5, "compiler refuses the kernels"),
    ("function", 5, "kernel embed_f32 cannot be made"),
    ("memory", 4, "no memory for a buffer"),
    ("pressure", 4, "ran out of memory"),
    ("commands", 5, "stopped a command"),
    ("timeout", 5, "took longer than the system allows"),
    ("lost", 5, "the GPU was lost"),
])
def test_failure_is_a_clean_error(what, code, text):
    p = run(CALLA, "run", "--backend", "metal", "--raw", "-n", "2", "-p", "Once", ok=False,
            EMU_FAIL=what)
    assert p.returncode == code and text in p.stderr.decode()


def answer(backend, *argv, **env):
    return run(CALLA, "run", "--backend", backend, "--raw", "--temp", "0", "-n", "2", "-p", "Once",
               *argv, ok=False, **env)


def events(path):
    """What the stub wrote into EMU_EVENTS since the last look."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


@needs_build
@pytest.mark.parametrize("kernel", ["moe_route_rows_1", "delta_f32_step"])
def test_command_that_stops_half_way_spoils_no_later_one(kernel):
    """Threadgroups that count each other start from nothing again."""
    torn, whole = (run(CALLA, "run", "--backend", SIMDGROUP, "--raw", "--temp", "0", "-n", "4",
                       "--json", "-p", "Once upon", EMU_TORN=k) for k in (kernel, ""))
    assert b"a batch of 1 requests failed" in torn.stderr
    assert json.loads(torn.stdout)["ids"] == json.loads(whole.stdout)["ids"]


@needs_build
@pytest.mark.parametrize("what, text", [("product-tensor", "a product by TensorOps is wrong"),
                                        ("compile-tensor", "compiler refuses the kernels")])
def test_tensorops_that_fail_their_check_are_left_alone(what, text):
    p = answer("metal", EMU_FAIL=what)
    warnings = [line for line in p.stderr.decode().split("\n") if "warning" in line]
    assert p.returncode == 0 and len(warnings) == 1 and text in warnings[0]
    assert "metal/simdgroup: loaded" in p.stderr.decode()
    named = answer(TENSOR, EMU_FAIL=what)
    assert named.returncode == 5 and text in named.stderr.decode()


@needs_build
@pytest.mark.parametrize("system, family, level", [
    ("14.0", "7", SIMDGROUP), ("15.0", "9", SIMDGROUP), ("26.0", "10", SIMDGROUP),
    ("26.1", "9", SIMDGROUP), ("26.1", "10", TENSOR)])
def test_system_and_gpu_choose_the_level(system, family, level):
    p = answer("metal", EMU_SYSTEM=system, EMU_FAMILY=family)
    assert p.returncode == 0 and f"{level}: loaded" in p.stderr.decode()


@needs_build
def test_gpu_older_than_the_m1_is_no_device():
    p = answer("metal", EMU_FAMILY="6")
    assert p.returncode == 2 and "no device 'metal' here" in p.stderr.decode()


# ---- compiled kernels on disk

@needs_build
def test_compiled_kernels_are_kept(tmp_path):
    log, cache = tmp_path / "events", tmp_path / "cache"
    env = {"EMU_EVENTS": str(log), "XDG_CACHE_HOME": str(cache)}
    first = answer(SIMDGROUP, **env)
    assert "archive written" in events(log)
    files = list((cache / "calla").iterdir())
    assert len(files) == 1 and files[0].name.startswith("metal-")
    again = answer(SIMDGROUP, **env)
    seen = events(log)
    assert "archive written" not in seen and "kernel compiled" not in seen
    assert seen.count("kernel stored") > 20 and first.stdout == again.stdout
    # Another system may understand kernels otherwise: it has a file of its own.
    answer(SIMDGROUP, EMU_SYSTEM="15.2", **env)
    assert len(list((cache / "calla").iterdir())) == 2


@needs_build
@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: b"garbage" + data, lambda data: data[:-40]],
    ids=["empty", "garbage", "cut"])
def test_damaged_archive_is_made_again(tmp_path, damage):
    env = {"EMU_EVENTS": str(tmp_path / "events"), "XDG_CACHE_HOME": str(tmp_path)}
    wanted = answer(SIMDGROUP, **env).stdout
    file = next((tmp_path / "calla").iterdir())
    good = file.read_bytes()
    file.write_bytes(damage(good))
    p = answer(SIMDGROUP, **env)
    assert p.returncode == 0 and p.stdout == wanted and file.read_bytes() == good
    assert p.stderr.count(b"are damaged; they are compiled again") == 1


@needs_build
@pytest.mark.parametrize("env", [{"EMU_FAIL": "archive"}, {"XDG_CACHE_HOME": "", "HOME": ""},
                                 {"XDG_CACHE_HOME": "/proc/none"}])
def test_nowhere_to_keep_compiled_kernels(env):
    p = answer(SIMDGROUP, **env)
    assert p.returncode == 0 and b"warning" not in p.stderr


# ---- memory

@needs_build
def test_weights_longer_than_a_buffer(tmp_path):
    """Buffers of 7 MB over weights of 14: a matrix across an end has one of its own."""
    log, small = tmp_path / "events", ("--json", "--ctx", "256", "--chunk", "64")
    whole = answer(SIMDGROUP, *small, EMU_EVENTS=str(log))
    one = [e for e in events(log) if e.startswith("buffer over")]
    split = answer(SIMDGROUP, *small, EMU_EVENTS=str(log), EMU_BUFFER_MAX="7000000")
    several = [int(e.split()[2]) for e in events(log) if e.startswith("buffer over")]
    assert len(one) == 1 and len(several) == 3 and max(several) <= 7000000
    assert json.loads(split.stdout)["ids"] == json.loads(whole.stdout)["ids"]


@needs_build
def test_matrix_longer_than_a_buffer_is_refused():
    p = answer(SIMDGROUP, EMU_BUFFER_MAX="500000")
    assert p.returncode == 4 and b"in one piece: its buffers are at most" in p.stderr


@needs_build
def test_too_little_memory_is_refused_before_loading(tmp_path):
    log = tmp_path / "events"
    p = answer(SIMDGROUP, "--ctx", "8192", EMU_MEMORY="70000000", EMU_EVENTS=str(log))
    assert p.returncode == 4 and b"the largest context that fits is" in p.stderr
    assert not any("buffer" in e for e in events(log))
    p = answer(SIMDGROUP, EMU_MEMORY="20000000")
    assert p.returncode == 4 and b"no context fits" in p.stderr


@needs_build
@pytest.mark.parametrize("system, fail, is_claimed", [
    ("15.0", "", True), ("14.6", "", False), ("15.0", "residency", False)])
def test_memory_is_claimed_while_in_use(tmp_path, system, fail, is_claimed):
    log = tmp_path / "events"
    p = answer(SIMDGROUP, EMU_SYSTEM=system, EMU_FAIL=fail, EMU_EVENTS=str(log))
    seen = [e for e in events(log) if e.startswith("residency")]
    assert p.returncode == 0 and bool(seen) == is_claimed
    if is_claimed:
        assert seen[0].startswith("residency of") and seen[1] == "residency requested"
        assert seen[-1] == "residency ended" and seen.count("residency ended") == 1


@needs_clang
@pytest.mark.parametrize("sdk", ["140000", "150000", "260100"])
@pytest.mark.parametrize("file", sorted(f for f in os.listdir(KERNELS) if f.endswith(".m")))
def test_host_compiles_for_a_mac_with_arc(tmp_path, file, sdk):
    """For macOS 14, with the SDK of that and of newer ones: what is newer is guarded."""
    out = tmp_path / "metal.o"
    run("clang-19", "-target", "arm64-apple-macosx14.0", "-fobjc-arc", "-fblocks", "-nostdlibinc",
        "-Wall", "-Werror", "-Wunguarded-availability", f"-D__MAC_OS_X_VERSION_MAX_ALLOWED={sdk}",
        "-Isrc", "-Itests/metal/stub", "-Itests/metal/stub/libc", "-c",
        os.path.join("src/backend/metal", file), "-o", str(out))
    assert out.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bits
