"""calla bench: the prompt, the digest, the arms and the table (pitfall 121)."""
import csv
import io
import json
import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
VOCAB = json.load(open(os.path.join(ROOT, "models/demo/config.json")))["text_config"]["vocab_size"]


def bench(*args, code=0):
    p = subprocess.run([CALLA, "bench", *args], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert p.returncode == code, p.stderr
    return p


def runs(*args):
    return json.loads(bench(*args, "--json").stdout)["runs"]


def fnv(ids):
    h = 0xCBF29CE484222325
    for i in ids:
        h = (h ^ i) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def test_each_token_is_the_first_choice_after_the_contract_prompt(tmp_path):
    prompt = [i * 2654435761 % 2**32 % VOCAB for i in range(40)]
    run = runs("--contexts", "40", "--decode", "8", "--backend", "cpu/ref")[0]
    assert run["digest"] == fnv(run["ids"])
    assert len(run["step_s"]) == 8 and abs(sum(run["step_s"]) - run["decode_s"]) < 1e-6
    ids = prompt + [run["first_id"]] + run["ids"]
    top = [[] if i < 39 else [[ids[i + 1], -1.0]] for i in range(len(ids) - 1)] + [[]]
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"own": [{"ids": ids, "next_logprob": [-1.0] * (len(ids) - 1), "top": top}]}))
    p = subprocess.run([CALLA, "eval", "--backend", "cpu/ref", "--reference", str(path), "--json"], cwd=ROOT,
                       capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    assert json.loads(p.stdout)["sets"]["own"]["top1_agreement"] == 1.0


def test_arms_are_the_product_of_the_lists():
    found = runs("--contexts", "5,300", "--prefill", "7", "--batch", "1,3", "--decode", "4", "--runs", "2",
                 "--backends", "cpu/ref,cpu", "--thread-counts", "1")
    assert len(found) == 2 * 2 * 3 * 2
    for run in found:
        assert len(run["ids"]) == (0 if run["context"] == 7 else 4 * run["batch"])
    digests = {}
    for run in found:
        digests.setdefault((run["context"], run["batch"]), set()).add(run["digest"])
    assert all(len(d) == 1 for d in digests.values()), digests


def test_a_batch_decodes_what_its_sequences_decode_alone():
    alone = runs("--contexts", "20", "--decode", "6", "--backend", "cpu/ref")[0]["ids"]
    together = runs("--contexts", "20", "--decode", "6", "--batch", "3", "--backend", "cpu/ref")[0]["ids"]
    assert together[::3] == alone


def test_table_names_the_machine():
    out = bench("--contexts", "16", "--decode", "2", "--peak").stdout
    assert "processors" in out and "GiB" in out and "power:" in out and "compiler" in out
    line = [x.strip() for x in out.strip().splitlines()[-1].strip("| ").split("|")]
    assert line[2] == "16" and float(line[6]) > 0.1 and line[7].endswith("%")


def test_csv():
    rows = list(csv.DictReader(io.StringIO(bench("--contexts", "16,8", "--decode", "2", "--csv").stdout)))
    assert [r["context"] for r in rows] == ["16", "8"]
    assert all(int(r["threads"]) > 0 for r in rows)
    assert all(float(r["prefill_tok_s"]) > 0 and float(r["decode_tok_s"]) > 0 for r in rows)


def test_a_technique_is_left_out_on_cuda_only():
    text = bench("--ablate", "graphs", "--contexts", "4", "--decode", "1", "--backend", "cpu", code=2)
    assert "cannot do without 'graphs'" in text.stderr and text.stdout == ""


@pytest.mark.parametrize("args, code, words", [
    (["--backend", "cpu/x", "--contexts", "4"], 2, "no device 'cpu/x' here; choose"),
    (["--backends", "cpu,cpu/x", "--contexts", "4"], 2, "no device 'cpu/x' here; choose"),
    (["--contexts", "4,,5"], 2, "--contexts"),
    (["--csv", "--json"], 2, "exclude"),
    (["--contexts", "4,9000"], 2, "more than the model's 8192"),
    (["--contexts", "4,9000", "--csv"], 2, "more than the model's 8192"),
    (["--contexts", "4", "--prefill", "20,9000", "--batch", "1,2"], 2, "more than the model's 8192"),
    (["-m", "/nowhere", "--contexts", "4"], 3, "/nowhere"),
    (["--ctx", "16", "--contexts", "4,64"], 4, "context of 16"),
    (["--contexts", "16", "--batch", "1,32", "--ctx", "2048", "--memory", "100"], 4, "not enough memory")])
def test_errors_come_before_figures(args, code, words):
    """Also those of a later line: nothing is measured, and no table is begun."""
    p = bench("--decode", "1", *args, code=code)
    assert words in p.stderr and p.stdout == ""
