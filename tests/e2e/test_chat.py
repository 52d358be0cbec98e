"""`calla chat` on a pseudo-terminal, through pipes and with files (pitfalls 124 and 125)."""
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import termios
import time
import unicodedata

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLA = ROOT / "build" / "calla"
QUESTION = "What is the capital of France?"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")

pytestmark = pytest.mark.skipif(not (ROOT / "models/demo/config.json").exists(), reason="SKIP: no demo model")


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, home, *options):
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        env = dict(os.environ, HOME=str(home), TERM="xterm", LC_ALL="C.UTF-8")
        self.process = subprocess.Popen(
            [CALLA, "chat", *options], stdin=slave, stdout=slave, stderr=slave, env=env,
            start_new_session=True, preexec_fn=lambda: __import__("fcntl").ioctl(0, termios.TIOCSCTTY, 0))
        self.slave = slave
        self.raw = b""
        self.read_to = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def send(self, text):
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    def pump(self, seconds):
        if select.select([self.master], [], [], seconds)[0]:
            self.raw += os.read(self.master, 65536)

    def expect(self, pattern, seconds=60):
        """Waits until what was printed after the last match has `pattern`; returns the text up to its end."""
        end = time.monotonic() + seconds
        while True:
            text = ESCAPES.sub("", self.raw.decode("utf-8", "replace"))[self.read_to:]
            found = re.search(pattern, text)
            if found:
                self.read_to += found.end()
                return text[:found.end()]
            assert time.monotonic() < end, f"no {pattern!r} in {text[-2000:]!r}"
            self.pump(0.1)

    def prompt(self):
        return self.expect(r"(^|\n)> ")

    def finish(self, code=0):
        end = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < end:
            self.pump(0.05)
        assert self.process.poll() == code
        assert termios.tcgetattr(self.slave) == self.before, "the terminal was left changed"
        while select.select([self.master], [], [], 0)[0]:
            self.pump(0)
        assert self.raw.rfind(b"\x1b[?2004l") > self.raw.rfind(b"\x1b[?2004h"), "paste marks were left on"


def messages(path):
    return json.loads(path.read_text())["messages"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Options for answers that go on for minutes: random weights, whose likeliest token is never an end."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    subprocess.run([CALLA, "synth", "-o", folder, "--layers", "4", "--hidden", "256", "--experts", "16",
                    "--width", "128", "--vocab", "4096", "--ctx", "32768"], check=True, capture_output=True)
    return ["-m", str(folder), "--backend", "cpu/ref", "--temp", "0"]


def save(t, path):
    t.send(f"/save {path}\r")
    t.expect("messages written")
    t.prompt()
    return messages(path)


def test_answers_and_ctrl_d(tmp_path):
    with Terminal(tmp_path, "--no-think", "--temp", "0") as t:
        t.prompt()
        t.send(QUESTION + "\r")
        assert "Paris" in t.expect(r"tokens/s|\d/s")
        t.prompt()
        t.send("And of Spain?\n")
        t.expect(r"\d/s")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert [m["role"] for m in saved] == ["user", "assistant"] * 2
        assert saved[0]["content"] == QUESTION and "Paris" in saved[1]["content"]
        rendered = subprocess.run([CALLA, "render"], input=(tmp_path / "chat.json").read_bytes(), capture_output=True)
        assert rendered.returncode == 0 and QUESTION.encode() in rendered.stdout
        t.send("\x04")
        t.finish(0)


def test_a_turn_reads_what_is_new(tmp_path):
    system = "You are a friendly helper who answers in one short sentence. " * 30
    known = []
    with Terminal(tmp_path, "--no-think", "--temp", "0", "--system", system) as t:
        for text in (QUESTION, "And of Spain?", "And of Italy?"):
            t.prompt()
            t.send(text + "\r")
            found = re.search(r"prompt (\d+) tokens, (\d+) of them known", t.expect(r"known, .*\d/s"))
            known.append(tuple(map(int, found.groups())))
        t.prompt()
        t.send("\x04")
        t.finish(0)
    for (before, _), (total, reused) in zip(known, known[1:]):
        assert before - 12 <= reused < total, known  # all but the generation prompt


@pytest.mark.parametrize("thinking", [True, False])
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(tmp_path, endless, thinking):
    """Pitfall 124."""
    with Terminal(tmp_path, *endless, "--think" if thinking else "--no-think") as t:
        t.prompt()
        t.send("Tell me a long story.\r")
        t.expect(r"x\w+ x\w+ x\w+")  # words of the answer, not the progress of the prompt
        t.send("\x03")
        t.expect("stopped")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert [m["role"] for m in saved] == ["user", "assistant"]
        assert saved[1]["reasoning_content" if thinking else "content"], "the partial answer is kept"
        t.send("Again.\r")
        t.expect(r"x\w+ x\w+ x\w+")
        t.send("\x03")
        t.expect("stopped")
        t.prompt()
        t.send("\x03")
        t.finish(0)


def test_ctrl_c_twice_ends_the_chat(tmp_path, endless):
    """Pitfall 124: in the midst of an answer, with exit code 0 and the terminal as it was."""
    with Terminal(tmp_path, *endless, "--no-think") as t:
        t.prompt()
        t.send("Tell me a long story.\r")
        t.expect(r"x\w+ x\w+ x\w+")
        t.send("\x03")
        time.sleep(0.05)  # two of them at once are one to the system
        t.send("\x03")
        t.finish(0)


def test_ctrl_c_while_the_prompt_is_read(tmp_path, endless):
    """Pitfall 124: before the first token; what was asked stays in the chat."""
    with Terminal(tmp_path, *endless, "--no-think", "--chunk", "16") as t:
        t.prompt()
        t.send("\x1b[200~" + "word " * 6000 + "\x1b[201~\r")
        t.expect(r"[Rr]eading|prompt|\d+ ?%|/")
        t.send("\x03")
        t.expect("stopped")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert saved[0]["content"].startswith("word word") and len(saved) <= 2
        t.send("\x04")
        t.finish(0)


def test_ctrl_c_at_the_prompt(tmp_path):
    with Terminal(tmp_path) as t:
        t.prompt()
        for _ in range(300):  # an interrupt is not lost, whatever thread gets it
            t.send("half a mess")
            t.expect("half a mess")
            t.send("\x03")
            t.expect(r"\^C")
            t.prompt()
        t.send("\x03")
        t.expect("again")
        t.prompt()
        t.send("\x03")
        t.finish(0)


def test_ctrl_d_after_several_lines(tmp_path):
    """Pitfall 124: Ctrl-D still ends the chat after a message of several lines; arrows still work."""
    with Terminal(tmp_path, "--no-think", "--temp", "0", "-n", "4") as t:
        t.prompt()
        t.send("one\\\r")
        t.expect(r"\n\. ")
        t.send("two\x1b\rthree\r")
        t.expect(r"\d/s")
        t.prompt()
        t.send("acb\x1b[D\x1b[D\x1b[Cx\x1b[A\x1b[A\x1b[B\x1b[B\x15ab\x1b[Dc\r")
        t.expect(r"\d/s")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert saved[0]["content"] == "one\ntwo\nthree" and saved[2]["content"] == "acb"
        t.send("\x04")
        t.finish(0)


@pytest.mark.parametrize("newline", ["\r", "\n", "\r\n"])
def test_a_pasted_block_is_one_message(tmp_path, newline):
    """Pitfall 125."""
    block = ["def f():", "\treturn 1", "", "/quit", "日本 🙂 é"] + [f"line {i}" for i in range(60)]
    with Terminal(tmp_path, "--no-think", "--temp", "0", "-n", "4") as t:
        t.prompt()
        t.send("See: \x1b[200~" + newline.join(block) + "\x1b[201~")
        time.sleep(0.3)
        t.send("!\r")
        t.expect(r"\d/s")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert len(saved) == 2 and saved[0]["content"] == "See: " + "\n".join(block) + "!"
        t.send("/quit\r")
        t.finish(0)


def test_utf8_editing(tmp_path):
    """Pitfall 125: backspace takes a whole character."""
    with Terminal(tmp_path, "--no-think", "--temp", "0", "-n", "4") as t:
        t.prompt()
        t.send("日本語🙂é\x7f\x7f\x7fx\x1b[D\x1b[D\x7f\r")
        t.expect(r"\d/s")
        t.prompt()
        assert save(t, tmp_path / "chat.json")[0]["content"] == "本x"
        t.send("\x04")
        t.finish(0)


def cells(text):
    """Columns of a text: two for wide characters, none for marks."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class Row:
    """What a terminal shows of one line, for the sequences that the editor sends."""

    def __init__(self):
        self.shown, self.at = [], 0  # a string a column; "" behind a wide character

    def put(self, c):
        if unicodedata.combining(c):
            self.shown[self.at - 1] += c
            return
        width = cells(c)
        self.shown += [" "] * (self.at + width - len(self.shown))
        self.shown[self.at:self.at + width] = [c] + [""] * (width - 1)
        self.at += width

    def feed(self, text):
        for escape, n, kind, other in re.findall(r"(\x1b\[\??(\d*)([@A-Za-z]))|([^\x1b])", text, re.S):
            if other == "\r":
                self.at = 0
            elif other == "\b":
                self.at -= 1
            elif other:
                self.put(other)
            elif kind == "K":
                del self.shown[self.at:]
            elif kind == "G":
                self.at = int(n) - 1
            elif kind == "@":
                self.shown[self.at:self.at] = [" "] * int(n)
            elif kind == "P":
                del self.shown[self.at:self.at + int(n)]
            elif kind in "CD":
                self.at += int(n or 1) * (1 if kind == "C" else -1)
            else:
                assert kind in "hl", escape


def test_wide_characters_are_edited_where_they_stand(tmp_path):
    """Pitfall 125: after each key the line and the cursor's column are those of the text before it."""
    keys = {"left": "\x1b[D", "right": "\x1b[C", "home": "\x01", "end": "\x05", "rub": "\x7f", "del": "\x1b[3~"}
    text, at = [], 0
    with Terminal(tmp_path, "--no-think") as t:
        t.prompt()
        seen = len(t.raw)
        for key in ["日", "本", "x", "left", "left", "rub", "語", "right", "right", "🙂", "left", "é", "left", "left",
                    "del", "end", "rub", "home", "🙂", "ü", "right", "del", "end", "한", "rub", "rub"]:
            t.send(keys.get(key, key))
            if key in ("left", "right"):
                at = min(max(at + (1 if key == "right" else -1), 0), len(text))
            elif key in ("home", "end"):
                at = 0 if key == "home" else len(text)
            elif key == "rub":
                del text[at - 1:at]
                at -= 1
            elif key == "del":
                del text[at:at + 1]
            else:
                text.insert(at, key)
                at += 1
            end = time.monotonic() + 20
            while True:
                row = Row()
                row.feed("> " + t.raw[seen:].decode("utf-8", "ignore"))
                if "".join(row.shown).rstrip() == ("> " + "".join(text)).rstrip() and \
                        row.at == 2 + cells("".join(text[:at])):
                    break
                assert time.monotonic() < end, (key, row.shown, row.at, text, at)
                t.pump(0.05)
        t.send("\x15\x04")
        t.finish(0)


def test_commands_and_history(tmp_path):
    with Terminal(tmp_path, "--no-think", "--temp", "0", "-n", "4", "--system", "Be brief.") as t:
        t.prompt()
        for text, want in [("/help", "/save FILE"), ("/think on", "thinking is on"), ("/think off", "thinking is off"),
                           ("/think", "thinking is off"), ("/nonsense", "no command /nonsense"), ("/save", "name of a file"),
                           ("/save /nowhere/x", "cannot write"), ("/save /dev/full", "cannot write"), ("/system You are terse.", "message set"),
                           ("/stats", r"context 0 of \d+")]:
            t.send(text + "\r")
            t.expect(want)
            t.prompt()
        t.send("Hello there\r")
        t.expect(r"\d/s")
        t.prompt()
        saved = save(t, tmp_path / "chat.json")
        assert saved[0] == {"role": "system", "content": "You are terse."} and len(saved) == 3
        t.send("/reset\r")
        t.expect("anew")
        t.prompt()
        assert save(t, tmp_path / "chat.json") == saved[:1]
        t.send("/quit\r")
        t.finish(0)
    assert (tmp_path / ".calla_history").stat().st_mode & 0o777 == 0o600
    with Terminal(tmp_path, "--no-think", "--temp", "0", "-n", "4") as t:
        t.prompt()
        t.send("\x1b[A")
        t.expect("/quit")
        t.send("\r")
        t.finish(0)


def test_terminate_restores_the_terminal(tmp_path):
    with Terminal(tmp_path) as t:
        t.prompt()
        t.send("text")
        t.expect("text")
        t.process.send_signal(signal.SIGTERM)
        t.finish(0)


def run(*options, text=None):
    return subprocess.run([CALLA, "chat", *options], input=text, capture_output=True, timeout=120)


def test_pipe_is_one_message(tmp_path):
    """Pitfall 125: plain output, the end of input ends the program."""
    one = run("--no-think", "--temp", "0", text=(QUESTION + "\n").encode())
    assert one.returncode == 0 and b"Paris" in one.stdout
    assert b"\x1b" not in one.stdout + one.stderr and b"\r" not in one.stdout + one.stderr
    (tmp_path / "q.txt").write_text(QUESTION + "\n")
    again = run("--no-think", "--temp", "0", "-f", str(tmp_path / "q.txt"), text=b"")
    assert again.stdout == one.stdout and again.returncode == 0
    lines = run("--no-think", "--temp", "0", "-n", "3", text=b"/quit\nis the first line\nof three")
    assert lines.returncode == 0 and lines.stderr.count(b"answer") == 1
    thought = run("--think", "--temp", "0", "-n", "60", text=QUESTION.encode())
    assert thought.returncode == 0 and b"</think>" not in thought.stdout


def test_exit_codes(tmp_path):
    assert run(text=b" \n").returncode == 2
    assert run("--no-such", text=b"x").returncode == 2
    assert run("word", text=b"x").returncode == 2
    assert run("-n", "0", text=b"x").returncode == 2
    assert run("-f", str(tmp_path / "none"), text=b"").returncode == 3
    assert run("-m", str(tmp_path / "none"), text=b"x").returncode in (2, 3)
    assert run(text=b"\xff\xfe").returncode == 3
    assert run("--ctx", "64", text=b"word " * 500).returncode == 4
    assert run("--help").returncode == 0
