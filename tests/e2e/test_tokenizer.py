"""`calla tokenize` against recorded ids and against the `tokenizers` package.

The vocabulary of Qwen3.6 lies in tests/data/tokenizer as published data, without a tokenizer.json.
`qwen_folder` builds one by this recipe:

1. Ids 0..255 are the single bytes: 33..126, 161..172, 174..255 in ascending order, each spelled as
   the character of that number; then all other bytes in ascending order, spelled U+0100, U+0101, ...
2. A counter starts at 256. For each merge of merges.txt in order, counter values that are ids of
   gaps.tsv are given to the text that stands there, and the next free value to the merged pair. The
   counter ends at 248044.
3. Added tokens follow, from added_tokens.tsv. Those marked as absent from tokenizer.json go into
   tokenizer_config.json only, as in the published files.

A row of gaps.tsv with id_low < id_high knows only a range for its one id: id_high is taken (so does
vectors.json). A gap without known text gets a placeholder; no merge produces it, so it never comes
out of encoding.

The reference is the `tokenizers` package; when it cannot be imported it is installed into
build/venv-tokenizers. Without a network the tests that need it are skipped; recorded ids remain.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import unicodedata

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLA = ROOT / "build" / "calla"
DATA = ROOT / "tests" / "data"
DEMO = ROOT / "models" / "demo"
LONG = bool(os.environ.get("CALLA_TEST_LONG"))
PARITY_STRINGS = 20000 if LONG else 2000
IDENTITY_STRINGS = 10000
VENV = ROOT / "build" / "venv-tokenizers"

REFERENCE = """
import json, sys
from tokenizers import Tokenizer
t = Tokenizer.from_file(sys.argv[1])
for line in sys.stdin:
    x = json.loads(line)
    if isinstance(x, str):
        print(json.dumps(t.encode(x, add_special_tokens=False).ids))
    else:
        print(json.dumps(t.decode(x, skip_special_tokens=False)))
"""


def tokenize(*args, text=b"", code=0):
    out = subprocess.run([CALLA, "tokenize", *args], input=text, capture_output=True)
    assert out.returncode == code, out.stderr.decode()
    return out


def lines_through(argv, values):
    text = "".join(json.dumps(v) + "\n" for v in values)
    out = subprocess.run(argv, input=text.encode(), capture_output=True)
    assert out.returncode == 0, out.stderr.decode()
    results = [json.loads(line) for line in out.stdout.split(b"\n") if line]
    assert len(results) == len(values)
    return results


def encode(folder, texts, *options):
    return lines_through([CALLA, "tokenize", "-m", folder, "--json", *options], texts)


def decode(folder, ids, *options):
    return lines_through([CALLA, "tokenize", "-m", folder, "--json", "--decode", *options], ids)


def tsv(name):
    for line in (DATA / "tokenizer" / name).read_text(encoding="utf-8").split("\n"):
        if line and not line.startswith("#"):
            yield line.split("\t")


def byte_spelling():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {b: chr(b) for b in plain}
    for b in range(256):
        if b not in spelling:
            spelling[b] = chr(256 + len(spelling) - len(plain))
    return spelling


def qwen_vocab():
    spelling = byte_spelling()
    gaps = {int(high): text for _, high, _, text in tsv("gaps.tsv")}
    vocab = {text: i for i, text in enumerate(spelling.values())}
    merges = []
    for line in (DATA / "tokenizer" / "merges.txt").read_text(encoding="utf-8").rstrip("\n").split("\n"):
        merges.append(line)
        while len(vocab) in gaps:
            text = gaps[len(vocab)]
            vocab[f"gap_{len(vocab)}" if text == "-" else
                  "".join(spelling[b] for b in json.loads(text).encode())] = len(vocab)
        vocab[line.replace(" ", "", 1)] = len(vocab)
    assert len(vocab) == 248044
    return vocab, merges


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    file = json.loads((DEMO / "tokenizer.json").read_text())
    file["model"]["vocab"], file["model"]["merges"] = qwen_vocab()
    file["added_tokens"] = []
    config = {"added_tokens_decoder": {}}
    for number, content, special, in_file in tsv("added_tokens.tsv"):
        token = {"content": content, "lstrip": False, "normalized": False, "rstrip": False,
                 "single_word": False, "special": special == "1"}
        config["added_tokens_decoder"][number] = token
        if in_file == "1":
            file["added_tokens"].append({"id": int(number), **token})
    (folder / "tokenizer.json").write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reference_python():
    """An interpreter that has `tokenizers`."""
    for python in (sys.executable, VENV / "bin" / "python"):
        try:
            subprocess.run([python, "-c", "import tokenizers"], check=True, capture_output=True)
            return python
        except (OSError, subprocess.CalledProcessError):
            pass
    try:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True, capture_output=True)
        subprocess.run([VENV / "bin" / "pip", "install", "-q", "--retries", "0", "--timeout", "10",
                        "tokenizers==0.22.1"], check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"the tokenizers package cannot be installed: {e}")
    return VENV / "bin" / "python"


def folder_of(name, qwen_folder):
    return DEMO if name == "demo" else qwen_folder


def reference(python, folder, values, tmp_path):
    """What `tokenizers` gives; it takes added tokens from tokenizer.json alone, so they are joined."""
    file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    known = {t["id"] for t in file["added_tokens"]}
    file["added_tokens"] += [{"id": int(i), **t} for i, t in config["added_tokens_decoder"].items()
                             if int(i) not in known]
    joined = tmp_path / "joined.json"
    joined.write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")
    return lines_through([python, "-c", REFERENCE, joined], values)


def assert_equal(got, want, inputs):
    wrong = [i for i in range(len(inputs)) if got[i] != want[i]]
    assert not wrong, (f"{len(wrong)} of {len(inputs)} differ; first: {inputs[wrong[0]]!r}: "
                       f"{got[wrong[0]]!r}, expected {want[wrong[0]]!r}")


# Material for random strings: what the pattern, form C and added tokens treat in a special way.
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>",
           "<|im_", "<", "|>", "<|audio_pad|>", "<tts_text_bos>", "<tts_text_bos_single>"]
WORDS = ["the", " quick", "Über", "naïve", "don't", "I'LL", "we'Ve", "it'\u017f", "'s", "'", "def f(x):",
         "日本語", "テスト", "中文。", "한국어", "привет", "Ελλάδα", "हिन्दी", "ภาษาไทย", "العَرَبِيَّة", "עִבְרִית",
         "tiê\u0301ng Viê\u0323t", "3.14159", "٣٤", "Ⅻ", "½", "x=1;", "//", "...", "—", "“q”", "👩\u200d👩\u200d👧", "🇳🇴"]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u0085", "\u2028", "\u1680", "\u180e",
          "\u200b", "\v", "\f", "\x1c", "\ufeff", "\0"]
MARKS = [chr(c) for c in (0x300, 0x301, 0x302, 0x323, 0x327, 0x334, 0x345, 0x5b0, 0x64b, 0x651, 0x93c, 0x94d,
                          0xe38, 0x1100, 0x1161, 0x11a8, 0xac00, 0x212b, 0x1d165, 0xfb1d, 0x958, 0x1ac1, 0x8ca)]


def any_code_point(rng):
    while True:
        plane = rng.choice([0, 0, 0, 1, 1, 2, 3, rng.randrange(17)])
        c = plane << 16 | rng.randrange(0x10000)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def random_string(rng):
    kind = rng.randrange(4)
    parts = []
    for _ in range(rng.randrange(1, 40)):
        pick = rng.random()
        if kind == 0 or pick < 0.15:
            parts.append(any_code_point(rng))
        elif pick < 0.25:
            parts.append(rng.choice(SPECIAL))
        elif pick < 0.5:
            parts.append(rng.choice(WORDS))
        elif pick < 0.7:
            parts.append(rng.choice(SPACES))
        elif pick < 0.85:
            parts.append(rng.choice(MARKS))
        else:
            parts.append(chr(rng.randrange(128)) if kind != 3 else chr(rng.randrange(0x3000)))
    return "".join(parts)


def test_demo_cases():
    cases = json.loads((DATA / "demo" / "tokenizer_cases.json").read_text())
    assert_equal(encode(DEMO, [c["text"] for c in cases]), [c["ids"] for c in cases], [c["text"] for c in cases])
    assert_equal(decode(DEMO, [c["ids"] for c in cases]), [c["decoded"] for c in cases], [c["ids"] for c in cases])


def test_qwen_vectors(qwen_folder):
    cases = json.loads((DATA / "tokenizer" / "vectors.json").read_text(encoding="utf-8"))
    texts = [c["text"] for c in cases]
    assert len(texts) == 18
    assert_equal(encode(qwen_folder, texts), [c["ids"] for c in cases], texts)
    assert_equal(decode(qwen_folder, [c["ids"] for c in cases]), texts, texts)


def test_goldens(qwen_folder):
    """Prompts of the recorded runs of the full model, by the model's own tokenizer."""
    for name in ("raw", "long"):
        golden = json.loads((DATA / "goldens" / f"golden_35b_{name}.json").read_text())
        assert encode(qwen_folder, [golden["prompt"]]) == [golden["prompt_token_ids"]], name


@pytest.mark.parametrize("name", ["demo", "qwen"])
def test_scripts_recorded(name, qwen_folder):
    """Pitfalls 55 and 56: marks belong to words, and text is put in form C. Recorded ids of
    `tokenizers` 0.22.1 for Hindi, Thai, Arabic, Hebrew, decomposed Vietnamese, jamo, U+212B, ..."""
    cases = json.loads((DATA / "tokenizer" / "scripts.json").read_text(encoding="utf-8"))
    texts = [c["text"] for c in cases]
    assert_equal(encode(folder_of(name, qwen_folder), texts), [c[name] for c in cases], texts)


@pytest.mark.parametrize("name", ["demo", "qwen"])
def test_parity(name, qwen_folder, reference_python, tmp_path):
    """Random strings of all planes: ids equal those of `tokenizers`; so does the text of the ids."""
    folder = folder_of(name, qwen_folder)
    rng = random.Random(2)
    texts = [random_string(rng) for _ in range(PARITY_STRINGS)]
    texts += [c["text"] for c in json.loads((DATA / "tokenizer" / "scripts.json").read_text(encoding="utf-8"))]
    ids = encode(folder, texts)
    assert_equal(ids, reference(reference_python, folder, texts, tmp_path), texts)
    assert_equal(decode(folder, ids), reference(reference_python, folder, ids, tmp_path), ids)


def test_every_code_point(reference_python, tmp_path):
    """Each code point between letters, digits, spaces and marks: its class and its form C."""
    texts = []
    for c in range(0x110000):
        if not 0xD800 <= c <= 0xDFFF and (LONG or c < 0x3100 or c % 16 == 5):
            ch = chr(c)
            texts.append(f"a{ch}b 1{ch}2 .{ch}. {ch} e{ch}\u0301 \u0323{ch}\u0334 \u0301{ch}\u0323")
    assert_equal(encode(DEMO, texts), reference(reference_python, DEMO, texts, tmp_path), texts)


@pytest.mark.parametrize("name", ["demo", "qwen"])
def test_garbage_ids(name, qwen_folder, reference_python, tmp_path):
    """Pitfall 41: any ids decode to the text that `tokenizers` gives, bad bytes included."""
    folder = folder_of(name, qwen_folder)
    top = 8192 if name == "demo" else 248077
    rng = random.Random(4)
    ids = [[rng.randrange(rng.choice([256, top])) for _ in range(rng.randrange(30))] for _ in range(2000)]
    assert_equal(decode(folder, ids), reference(reference_python, folder, ids, tmp_path), ids)


@pytest.mark.parametrize("name", ["demo", "qwen"])
@pytest.mark.parametrize("options", [[], ["--no-special"]])
def test_identity(name, options, qwen_folder):
    """Text in form C comes back as it was; without marks, whose order is form C's business."""
    folder = folder_of(name, qwen_folder)
    rng = random.Random(3)
    texts = []
    while len(texts) < IDENTITY_STRINGS:
        text = "".join(c for c in random_string(rng) if unicodedata.category(c)[0] != "M")
        if unicodedata.is_normalized("NFC", text):
            texts.append(text)
    ids = encode(folder, texts, *options)
    assert_equal(decode(folder, ids), texts, texts)
    if options:
        lowest_added = 8172 if name == "demo" else 248044
        assert max(max(i, default=0) for i in ids) < lowest_added


# ---- the command ----

def test_text_forms():
    want = b"1615 2143\n"
    assert tokenize("Hello world").stdout == want
    assert tokenize("Hello", "world").stdout == want
    assert tokenize(text=b"Hello world").stdout == want
    assert tokenize("--decode", "1615", "2143").stdout == b"Hello world"
    assert tokenize("-d", text=b"[1615, 2143]\n").stdout == b"Hello world"
    assert tokenize("").stdout == b"\n"
    assert tokenize("-d", text=b"").stdout == b""
    assert tokenize("--", "-d").stdout != b""


def test_special():
    assert tokenize("<|im_end|>").stdout == b"8174\n"
    plain = tokenize("--no-special", "<|im_end|>").stdout
    assert len(plain.split()) > 3 and max(map(int, plain.split())) < 8172
    assert tokenize("-d", "1615", "8174").stdout == b"Hello<|im_end|>"
    assert tokenize("-d", "--no-special", "1615", "8174").stdout == b"Hello"
    assert tokenize("-d", "1615", "999999").stdout == b"Hello"


def test_only_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    assert tokenize("-m", tmp_path, "Hello world").stdout == b"1615 2143\n"


def test_json_lines():
    out = tokenize("--json", text=b'"Hello world"\n\n"a\\u0000b"\n""')
    assert [json.loads(line) for line in out.stdout.splitlines()] == [[1615, 2143], [64, 188, 65], []]


@pytest.mark.parametrize("args, text, code, says", [
    (["--nope"], b"", 2, "--nope"),
    (["-m"], b"", 2, "-m"),
    (["--json", "x"], b"", 2, "--json"),
    (["-m", "/nowhere", "x"], b"", 3, "/nowhere"),
    (["-d", "1", "x"], b"", 3, "'x'"),
    (["-d", "--", "-1"], b"", 3, "'-1'"),
    (["-d", "99999999999"], b"", 3, "99999999999"),
    (["--json"], b'"a"\n{"b": 1}\n', 3, "line 2"),
    (["--json"], b'"\\ud83d"\n', 3, "line 1"),
    (["--json"], b'nonsense\n', 3, "line 1"),
    (["--json", "-d"], b'[1.5]\n', 3, "line 1"),
    (["--json", "-d"], b'"a"\n', 3, "line 1"),
])
def test_errors(args, text, code, says):
    err = tokenize(*args, text=text, code=code).stderr.decode()
    assert says in err and err.startswith("calla tokenize: ")


def test_help():
    out = tokenize("--help").stdout.decode()
    assert "examples:" in out and "--no-special" in out
    assert "tokenize" in subprocess.run([CALLA, "--help"], capture_output=True, check=True).stdout.decode()
