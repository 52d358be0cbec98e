"""Checkpoints from the outside: info, synth, quantize, and models of the real size in files that are
all hole (sparse), so that they cost no disk."""
import json
import os
import re
import shutil
import struct
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
FIXTURES = os.path.join(ROOT, "tests", "data", "fixtures")
SIZES = {"BF16": 2, "U32": 4, "F32": 4}


def calla(*args, code=0):
    p = subprocess.run([CALLA, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                       timeout=300)
    assert p.returncode == code, p.stderr.decode()
    return p.stdout.decode(), p.stderr.decode()


def info(folder, *args):
    return json.loads(calla("info", "-m", str(folder), "--json", *args)[0])


def write_sparse(folder, tensors, per_shard):
    """tensors: [(name, dtype, shape)]; the data is a hole."""
    names = [tensors[i:i + per_shard] for i in range(0, len(tensors), per_shard)]
    weight_map = {}
    for i, part in enumerate(names):
        file = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        header, at = {}, 0
        for name, dtype, shape in part:
            size = SIZES[dtype]
            for n in shape:
                size *= n
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return at


def full_config():
    """Qwen3.6-35B-A3B's sizes."""
    return {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "full_attention_interval": 4, "eos_token_id": 248044,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000,
                            "partial_rotary_factor": 0.25}}}


def full_modules():
    """(path, count, rows, cols, bits) of every matrix, (path, shape) of every vector."""
    matrices = [("embed_tokens", 1, 248320, 2048, 4), ("lm_head", 1, 248320, 2048, 4)]
    vectors = [("norm.weight", [2048])]
    for i in range(40):
        p = f"layers.{i}."
        if i % 4 == 3:
            matrices += [(p + "self_attn.q_proj", 1, 8192, 2048, 4),
                         (p + "self_attn.k_proj", 1, 512, 2048, 4),
                         (p + "self_attn.v_proj", 1, 512, 2048, 4),
                         (p + "self_attn.o_proj", 1, 2048, 4096, 4)]
            vectors += [(p + "self_attn.q_norm.weight", [256]),
                        (p + "self_attn.k_norm.weight", [256])]
        else:
            matrices += [(p + "linear_attn.in_proj_qkv", 1, 8192, 2048, 4),
                         (p + "linear_attn.in_proj_z", 1, 4096, 2048, 4),
                         (p + "linear_attn.in_proj_a", 1, 32, 2048, 4),
                         (p + "linear_attn.in_proj_b", 1, 32, 2048, 4),
                         (p + "linear_attn.out_proj", 1, 2048, 4096, 4)]
            vectors += [(p + "linear_attn.conv1d.weight", [8192, 4, 1]),
                        (p + "linear_attn.A_log", [32]), (p + "linear_attn.dt_bias", [32]),
                        (p + "linear_attn.norm.weight", [128])]
        matrices += [(p + "mlp.gate", 1, 256, 2048, 8),
                     (p + "mlp.shared_expert_gate", 1, 1, 2048, 8),
                     (p + "mlp.switch_mlp.gate_proj", 256, 512, 2048, 4),
                     (p + "mlp.switch_mlp.up_proj", 256, 512, 2048, 4),
                     (p + "mlp.switch_mlp.down_proj", 256, 2048, 512, 4),
                     (p + "mlp.shared_expert.gate_proj", 1, 512, 2048, 4),
                     (p + "mlp.shared_expert.up_proj", 1, 512, 2048, 4),
                     (p + "mlp.shared_expert.down_proj", 1, 2048, 512, 4)]
        vectors += [(p + "input_layernorm.weight", [2048]),
                    (p + "post_attention_layernorm.weight", [2048])]
    return matrices, vectors


def stacked(count, *shape):
    return [count, *shape] if count > 1 else list(shape)


def test_info_full_size_mlx(tmp_path):
    """Bytes by part, per token and parameters of the published 4-bit conversion."""
    matrices, vectors = full_modules()
    config, quant, tensors = full_config(), {"group_size": 64, "bits": 4}, []
    for path, count, rows, cols, bits in matrices:
        name = "language_model." + ("" if path == "lm_head" else "model.") + path
        tensors += [(name + ".weight", "U32", stacked(count, rows, cols * bits // 32)),
                    (name + ".scales", "BF16", stacked(count, rows, cols // 64)),
                    (name + ".biases", "BF16", stacked(count, rows, cols // 64))]
        if bits == 8:
            quant[name] = {"group_size": 64, "bits": 8}
    tensors += [("language_model.model." + path, "BF16", shape) for path, shape in vectors]
    tensors += [("vision_tower.blocks.0.w", "BF16", [1152, 4304])]
    config["quantization"] = quant
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_sparse(tmp_path, tensors, 500)
    d = info(tmp_path)
    assert d["parameters"] == 34_660_610_688
    assert d["active_parameters"] == 2_946_429_568
    assert d["bytes"] == {
        "embedding": 286_064_640, "head": 286_064_640, "attention": 153_364_480,
        "delta": 570_420_480, "experts": 18_119_393_280, "shared": 70_778_880,
        "router": 22_282_240 + 87_040, "norms": 331_776, "total": 19_508_787_456,
        "per_token": 1_669_561_728}
    assert d["memory"]["ctx"] == 262144
    # 20,480 bytes a position in bf16, twice that in f32
    one, two = info(tmp_path, "--ctx", "4096"), info(tmp_path, "--ctx", "8192")
    kv = 20480 * (2 if one["memory"]["kv"] == "f32" else 1)
    grown = two["memory"]["keys_and_values"] - one["memory"]["keys_and_values"]
    assert 0 <= grown - 4096 * kv <= 4096
    text, _ = calla("info", "-m", str(tmp_path))
    assert "the largest context that fits" in text or "No context fits" in text
    assert "19508787456" in text and "1669561728" in text


def test_info_counts_as_the_engine_does():
    """A model opens with the memory that info adds up, and not with a MiB less."""
    for slots in (1, 3):
        m = info("models/demo", "--ctx", "3000", "--slots", str(slots))["memory"]
        parts = ("weights", "keys_and_values", "states", "activations", "scratch", "snapshots")
        assert m["total"] == sum(m[p] for p in parts) and min(m[p] for p in parts) > 0
        mib = -(-m["total"] >> 20)
        bench = ("bench", "--prefill", "16", "--batch", str(slots), "--ctx", "3000", "--memory")
        calla(*bench, str(mib))
        calla(*bench, str(mib - 1), code=4)


def test_memory_cap():
    """--memory refuses before weights are read, and names a context that then opens."""
    small = ("bench", "--prefill", "16", "--chunk", "64", "--memory", "40", "--ctx")
    _, text = calla(*small, "8192", code=4)
    largest = int(re.search(r"the largest context that fits is (\d+)", text)[1])
    assert 0 < largest < 8192
    calla(*small, str(largest))


def test_info_full_size_hf(tmp_path):
    """The bf16 checkpoint as published: 693 text tensors of 26 shards' 1,045."""
    matrices, vectors = full_modules()
    tensors = []
    for path, count, rows, cols, _ in matrices:
        name = ("" if path == "lm_head" else "model.language_model.") + path
        if path.endswith("switch_mlp.gate_proj"):
            name = name.replace("switch_mlp.gate_proj", "experts.gate_up_proj")
            tensors.append((name, "BF16", [count, 2 * rows, cols]))
        elif path.endswith("switch_mlp.down_proj"):
            name = name.replace("switch_mlp", "experts")
            tensors.append((name, "BF16", [count, rows, cols]))
        elif not path.endswith("switch_mlp.up_proj"):
            tensors.append((name + ".weight", "BF16", [rows, cols]))
    for path, shape in vectors:
        shape = [8192, 1, 4] if "conv1d" in path else shape
        tensors.append(("model.language_model." + path, "BF16", shape))
    assert len(tensors) == 693
    tensors += [("model.visual.w", "BF16", [446_571_248]), ("mtp.w", "BF16", [844_640_768])]
    (tmp_path / "config.json").write_text(json.dumps(full_config()))
    write_sparse(tmp_path, tensors, 40)
    d = info(tmp_path)
    assert d["parameters"] == 34_660_610_688
    assert d["bytes"]["total"] == 2 * 34_660_610_688
    assert d["weights"]["experts"] == {"kind": "bf16"}


def test_info_demo():
    text, _ = calla("info")
    assert "experts       32 of width 64, 8 a token" in text and "It fits" in text
    assert calla("info", "--ctx", "9000", code=2)[1].startswith("calla info: --ctx 9000 is more")


def test_synth_is_deterministic_and_loads(tmp_path):
    sizes = ["--layers", "4", "--hidden", "256", "--experts", "16", "--width", "128", "--vocab",
             "1024", "--heads", "4", "--key-heads", "2", "--value-heads", "4"]
    a, b = tmp_path / "a", tmp_path / "b"
    calla("synth", "-o", str(a), "--seed", "3", "--threads", "1", *sizes)
    calla("synth", "-o", str(b), "--seed", "3", "--threads", "2", *sizes)
    for name in sorted(os.listdir(a)):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert not [n for n in os.listdir(a) if n.endswith(".part")]
    d = info(a)
    assert d["config"]["experts"] == 16 and d["weights"]["router"]["bits"] == 8
    out, _ = calla("run", "-m", str(a), "--raw", "-p", "hello", "-n", "8", "--temp", "0",
                   "--ignore-eos", "--json")
    assert len(json.loads(out)["ids"]) == 8
    _, err = calla("synth", "-o", str(a), *sizes, code=2)
    assert "already holds" in err
    # The config that it wrote is one that it takes.
    calla("synth", "-o", str(tmp_path / "c"), "--seed", "3", "--config", str(a / "config.json"))
    assert (a / "model.safetensors").read_bytes() == \
        (tmp_path / "c" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("bits,group", [(4, 64), (3, 32), (8, 64), (6, 32)])
def test_quantize_fixture(tmp_path, bits, group):
    out = tmp_path / "q"
    calla("quantize", "-m", f"{FIXTURES}/fixture-hf", "-o", str(out), "--bits", str(bits),
          "--group", str(group), "--module", "lm_head=6", "--module", "in_proj_a=none")
    d = info(out)
    assert d["weights"]["experts"] == {"kind": "affine", "bits": bits, "group": group}
    assert d["weights"]["router"]["bits"] == 8 and d["weights"]["head"]["bits"] == 6
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"]["language_model.model.layers.0.linear_attn.in_proj_a"] is False
    # The loader checks every shape against the config; the forward pass then runs.
    result, _ = calla("eval", "-m", str(out), "--reference",
                      os.path.join(ROOT, "tests", "data", "fixtures", "expected.json"), "--set",
                      "bf16", "--json")
    assert json.loads(result)


@pytest.mark.parametrize("rules, wrong", [(["nosuch=8"], "nosuch"), (["model.lm_head=8"], "model.lm_head"),
                                          (["lm_head=6", "switch_mlp=none", "in_proj_b=5"], "switch_mlp")])
def test_quantize_names_the_modules(tmp_path, rules, wrong):
    more = [arg for rule in rules for arg in ("--module", rule)]
    _, err = calla("quantize", "-m", f"{FIXTURES}/fixture-hf", "-o", str(tmp_path / "q"), *more, code=2)
    assert f"there is no module '{wrong}'; the modules are " in err
    named = err.split("the modules are ")[1].strip().split(", ")
    assert {"embed_tokens", "lm_head", "mlp.gate", "mlp.switch_mlp.gate_proj", "self_attn.q_proj"} <= set(named)
    assert len(named) == len(set(named)) and not (tmp_path / "q").exists()
    calla("quantize", "-m", f"{FIXTURES}/fixture-hf", "-o", str(tmp_path / "q"),
          *[arg for name in named for arg in ("--module", f"{name}=8")])


def test_quantize_refuses(tmp_path):
    _, err = calla("quantize", "-m", f"{FIXTURES}/fixture-mlx", "-o", str(tmp_path / "q"), code=3)
    assert "is quantised already" in err
    _, err = calla("quantize", "-m", "/nowhere", "-o", str(tmp_path / "q"), code=3)
    assert "/nowhere" in err
    for args in (["-m", "x"], ["-o", "x"], ["-m", "x", "-o", "y", "--bits", "7"],
                 ["-m", "x", "-o", "y", "--module", "lm_head"], ["--nonsense"]):
        calla("quantize", *args, code=2)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json", "model.safetensors"])
def test_an_empty_file_is_named_and_no_parser_talk(tmp_path, name):
    folder = tmp_path / "m"
    shutil.copytree(os.path.join(ROOT, "models", "demo"), folder)
    (folder / name).write_bytes(b"")
    _, err = calla("run", "-m", str(folder), "-p", "hi", "-n", "1", code=3)
    said = err.replace(str(folder), "")  # the folder's own name has numbers
    assert name in said and "-1" not in said and "wrong arguments" not in said


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    folder = tmp_path / "m"
    shutil.copytree(os.path.join(ROOT, "models", "demo"), folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    _, err = calla("run", "-m", str(folder), "-p", "hi", "-n", "1", code=3)
    assert f"{name} is not a regular file" in err
