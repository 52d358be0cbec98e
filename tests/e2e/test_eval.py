"""calla eval: agreement with transformers on the fixtures and the demo model, and a long context."""
import json
import math
import os
import random
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
DATA = os.path.join(ROOT, "tests", "data")
EXPECTED = os.path.join(DATA, "fixtures", "expected.json")
DEMO = os.path.join(DATA, "demo", "reference.json")
LONG = os.environ.get("CALLA_TEST_LONG") == "1"


def evaluate(*argv, stdin=None, backend="cpu/ref"):
    p = subprocess.run([CALLA, "eval", "--json", "--backend", backend, *argv], input=stdin,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=3000)
    assert p.returncode == 0, p.stderr.decode()
    return json.loads(p.stdout)


@pytest.mark.parametrize("folder, name", [("fixture-hf", "bf16"), ("fixture-mlx", "mlx4")])
@pytest.mark.parametrize("chunk", ["1", "64", "512"])
def test_fixtures_agree_with_transformers(folder, name, chunk):
    sets = evaluate("-m", os.path.join(DATA, "fixtures", folder), "--reference", EXPECTED, "--set",
                    name, "--chunk", chunk)["sets"]
    assert list(sets) == [name]
    got = sets[name]
    assert got["sequences"] == 8 and got["positions"] == 570
    assert got["values"] == 570 * 16 + 570 - 8
    assert got["max_difference"] <= 1e-3
    assert got["top1_agreement"] == 1


@pytest.mark.parametrize("name", sorted(json.load(open(DEMO))["held_out"]))
def test_demo_perplexity_is_the_reference(name):
    records = json.load(open(DEMO))["held_out"][name]
    if name == "kjv" and not LONG:
        pytest.skip("the long set; CALLA_TEST_LONG=1 runs it")
    got = evaluate("--reference", DEMO, "--set", name)["sets"][name]
    listed = [v for r in records for v in r["next_logprob"]]
    want = math.exp(-sum(listed) / len(listed))
    assert abs(got["reference_perplexity"] / want - 1) < 1e-9
    assert abs(got["perplexity"] / want - 1) < 4e-4
    assert abs(got["ratio"] - got["perplexity"] / want) < 1e-9
    assert got["max_difference"] < 1e-3


# The fast levels compute in lower precision where that pays; their bounds. "cpu" is the best one here.

LEVELS = ["cpu", "cpu/avx2"]


def need(level):
    p = subprocess.run([CALLA, "eval", "--backend", level], input=b"In the beginning",
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    if p.returncode == 2:
        pytest.skip(p.stderr.decode().strip())


@pytest.mark.parametrize("folder, name", [("fixture-hf", "bf16"), ("fixture-mlx", "mlx4")])
@pytest.mark.parametrize("chunk", ["1", "7", "64", "512"])
@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("level", LEVELS)
def test_fixtures_on_a_fast_level(folder, name, chunk, kv, level):
    need(level)
    got = evaluate("-m", os.path.join(DATA, "fixtures", folder), "--reference", EXPECTED, "--set",
                   name, "--chunk", chunk, "--kv", kv, backend=level)["sets"][name]
    assert got["positions"] == 570
    assert got["mean_difference"] <= 0.025
    assert got["top1_agreement"] >= 0.97


@pytest.mark.parametrize("chunk", ["1", "512"])
@pytest.mark.parametrize("level", LEVELS)
def test_demo_on_a_fast_level(chunk, level):
    need(level)
    if chunk == "1" and not LONG:
        pytest.skip("token by token; CALLA_TEST_LONG=1 runs it")
    sets = evaluate("--reference", DEMO, "--chunk", chunk, backend=level)["sets"]
    assert sorted(sets) == sorted(json.load(open(DEMO))["held_out"])
    for name, got in sets.items():
        assert got["mean_difference"] <= 0.01, name
        assert got["top1_agreement"] >= 0.99, name
        assert abs(got["ratio"] - 1) <= 1e-3, name


def test_text_and_ids_give_the_same(tmp_path):
    text = b"In the beginning God created the heaven and the earth."
    ids = subprocess.run([CALLA, "tokenize"], input=text, stdout=subprocess.PIPE).stdout
    path = tmp_path / "ids"
    path.write_bytes(ids)
    a, b = evaluate(stdin=text), evaluate("--ids", str(path))
    assert a == b and a["tokens"] == len(ids.split()) and a["predicted"] == a["tokens"] - 1


def test_long_text_is_scored_in_windows(tmp_path):
    path = tmp_path / "ids"
    path.write_text(" ".join(str(i * 7 % 8000) for i in range(100)))
    got = evaluate("--ids", str(path), "--ctx", "40")
    assert got["predicted"] == 100 - 3


@pytest.mark.parametrize("argv, code, says", [
    (["--reference", EXPECTED, "--set", "none", "-m", "tests/data/fixtures/fixture-hf"], 2, "bf16"),
    (["--reference", "tests/data/README.md"], 3, "README.md"),
    (["--reference", "models/demo/config.json"], 3, "no sets"),
    (["--set", "x"], 2, "--reference"),
    (["-f", "a", "--ids", "b"], 2, "exclude"),
    (["-f", "/nowhere"], 3, "/nowhere"),
    (["--ids", "tests/data/README.md"], 3, "not a token id"),
    (["--reference", DEMO, "--set", "kjv", "--ctx", "100"], 4, "context"),
    (["-f", "README.md", "-m", "tests/data/fixtures/fixture-hf"], 3, "tokenizer.json"),
])
def test_errors_say_what_to_do(argv, code, says):
    p = subprocess.run([CALLA, "eval", *argv], cwd=ROOT, stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert p.returncode == code, p.stderr.decode()
    assert says in p.stderr.decode()


@pytest.mark.parametrize("record, says", [
    ({"ids": [1, 2], "next_logprob": []}, "next_logprob"),
    ({"ids": [1, 9999], "next_logprob": [-1]}, "ids[1]"),
    ({"ids": [], "next_logprob": []}, "no sets|ids"),
    ({"ids": [1, 2], "next_logprob": [-1], "top": [[]]}, "top"),
    ({"ids": [1], "next_logprob": [], "top": [[["a", -1]]]}, "top"),
    ({"ids": [1, 2], "next_logprob": ["x"]}, "next_logprob[0]"),
])
def test_damaged_references_are_named(tmp_path, record, says):
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"mine": [record]}))
    p = subprocess.run([CALLA, "eval", "--reference", str(path)], stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert p.returncode == 3
    assert any(s in p.stderr.decode() for s in says.split("|"))


def test_references_may_lack_top(tmp_path):
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"mine": [{"ids": [1, 2, 3], "next_logprob": [-9, -9]}]}))
    got = evaluate("--reference", str(path))["sets"]["mine"]
    assert got["positions"] == 3 and got["values"] == 2
