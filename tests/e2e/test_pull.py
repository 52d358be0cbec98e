"""calla pull against a hub of our own that breaks in every way a network can.

The hub answers the list and redirects to a second server under another host name, as the real one
does; either can be told to misbehave."""
import hashlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
DEMO = os.path.join(ROOT, "models", "demo")
TOKEN = "hf_aSecretThatMustStaySecret"
NAME = "maker/Model-1.0"
MIB = 1 << 20


class Hub:
    """Two servers. `files` is name -> bytes; the hooks change what is answered."""

    def __init__(self):
        self.files, self.revision = {}, "a" * 40
        self.claims = {}          # name -> changes of its entry in the list
        self.list_status = []     # statuses for the next lists, then 200
        self.file_status = []     # statuses for the next files, then the file
        self.retry_after = None
        self.limit = None         # how many bytes of a body before the connection is dropped
        self.rate = None          # bytes a second for a connection
        self.twist = None         # function (handler, name, body, first, last) -> True when it answered
        self.seen = []            # (server, path, headers)
        self.served = 0
        self.active = self.most = 0   # bodies being sent: now, and at most
        self.lock = threading.Lock()
        self.api, self.cdn = self.serve("api"), self.serve("cdn")
        self.url = f"http://127.0.0.1:{self.api.server_port}"

    def serve(self, kind):
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *a):
                pass

            def do_GET(self):
                with hub.lock:
                    hub.seen.append((kind, self.path, dict(self.headers)))
                try:
                    hub.answer(self, kind)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    def close(self):
        for server in (self.api, self.cdn):
            server.shutdown()
            server.server_close()

    def add(self, name, body):
        self.files[name] = body

    def entry(self, name, body):
        out = {"rfilename": name, "size": len(body),
               "blobId": hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()}
        if name.endswith(".safetensors"):
            out["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
        out.update(self.claims.get(name, {}))
        return out

    def status(self, handler, status):
        body = json.dumps({"error": f"status {status}"}).encode()
        handler.send_response(status)
        if self.retry_after is not None:
            handler.send_header("Retry-After", str(self.retry_after))
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def answer(self, handler, kind):
        if handler.path.startswith("/api/models/"):
            with self.lock:
                status = self.list_status.pop(0) if self.list_status else 200
            if status == 200 and handler.path != f"/api/models/{NAME}/revision/main?blobs=true":
                status = 404
            if status != 200:
                return self.status(handler, status)
            body = json.dumps({"sha": self.revision, "siblings": [
                self.entry(n, b) for n, b in self.files.items()]}).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            return handler.wfile.write(body)
        name = handler.path.split(f"/{NAME}/resolve/{self.revision}/")[-1]
        with self.lock:
            status = self.file_status.pop(0) if self.file_status else 200
        if status != 200 or name not in self.files:
            return self.status(handler, status if status != 200 else 404)
        if kind == "api":
            handler.send_response(302)
            handler.send_header("Location", f"http://localhost:{self.cdn.server_port}{handler.path}")
            handler.send_header("Content-Range", "bytes 0-0/1")  # of the redirect: means nothing
            handler.send_header("Content-Length", "0")
            return handler.end_headers()
        return self.send(handler, name)

    def send(self, handler, name):
        body = self.files[name]
        m = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        first, last = (int(m[1]), min(int(m[2]), len(body) - 1)) if m else (0, len(body) - 1)
        if self.twist and self.twist(handler, name, body, first, last):
            handler.close_connection = True
            return
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        handler.send_header("Content-Length", str(last - first + 1))
        handler.end_headers()
        end = last + 1
        limit = self.limit() if self.limit else end - first
        if end - first > limit:
            end = first + limit
            handler.close_connection = True
        with self.lock:
            self.active += len(body) > MIB
            self.most = max(self.most, self.active)
        try:
            self.send_body(handler, body, first, end)
        finally:
            with self.lock:
                self.active -= len(body) > MIB

    def send_body(self, handler, body, first, end):
        step = 1 << 16
        for at in range(first, end, step):
            piece = body[at:min(at + step, end)]
            handler.wfile.write(piece)
            with self.lock:
                self.served += len(piece)
            if self.rate:
                time.sleep(len(piece) / self.rate)

    def paths(self, kind):
        return [p for k, p, _ in self.seen if k == kind]


@pytest.fixture
def hub():
    h = Hub()
    yield h
    h.close()


@pytest.fixture
def env(tmp_path):
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_")) and "proxy" not in k.lower()}
    return dict(keep, HOME=str(tmp_path / "home"), XDG_DATA_HOME=str(tmp_path / "data"))


def folder(env, name=NAME):
    return os.path.join(env["XDG_DATA_HOME"], "calla", "models", *name.split("/"))


def command(hub, *more):
    return [CALLA, "pull", "--endpoint", hub.url, *more, NAME]


def pull(hub, env, code=0, **kw):
    p = subprocess.run(command(hub), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, **kw)
    out = (p.stdout + p.stderr).decode()
    assert TOKEN not in out
    assert p.returncode == code, out
    if code:
        assert not os.path.exists(folder(env))
    return out


def small(hub):
    hub.add("config.json", b'{"model_type": "qwen3_5_moe"}')
    hub.add("model.safetensors", random.Random(1).randbytes(300000))


def large(hub, mib=70):
    small(hub)
    hub.add("model.safetensors", random.Random(2).randbytes(mib * MIB))


def check_whole(hub, env):
    names = sorted(os.listdir(folder(env)))
    assert names == sorted(n for n in hub.files if "/" not in n and n[0] != "." and n != "README.md")
    for name in names:
        assert open(os.path.join(folder(env), name), "rb").read() == hub.files[name], name
    assert not os.path.exists(folder(env) + ".partial")


def test_a_pulled_model_answers(hub, env):
    for name in os.listdir(DEMO):
        hub.add(name, open(os.path.join(DEMO, name), "rb").read())
    hub.add(".gitattributes", b"*")
    hub.add("images/cat.json", b"no")
    out = pull(hub, env)
    check_whole(hub, env)
    assert folder(env) in out and f"calla chat -m {NAME}" in out and f"calla serve -m {NAME}" in out
    requests = len(hub.seen)
    assert folder(env) in pull(hub, env)
    assert len(hub.seen) == requests, "a model that is there is not asked for again"
    for name in (NAME, NAME.split("/")[1]):
        p = subprocess.run([CALLA, "run", "-m", name, "--temp", "0", "-n", "4", "-p", "Hi"], env=env,
                           capture_output=True, timeout=60)
        assert p.returncode == 0 and p.stdout, p.stderr
    for argv in (["info", "-m", NAME], ["tokenize", "-m", NAME, "Hi"]):
        assert subprocess.run([CALLA, *argv], env=env, capture_output=True, timeout=60).returncode == 0


def test_the_token_stays_with_the_endpoint(hub, env):
    small(hub)
    env["HF_TOKEN"] = TOKEN
    p = subprocess.run([CALLA, "-v", "-v", *command(hub)[1:]], env=env, capture_output=True, timeout=60)
    assert p.returncode == 0 and TOKEN.encode() not in p.stdout + p.stderr
    auth = {kind: {h.get("Authorization") for k, _, h in hub.seen if k == kind} for kind in ("api", "cdn")}
    assert auth == {"api": {"Bearer " + TOKEN}, "cdn": {None}}
    for path, _, names in os.walk(env["XDG_DATA_HOME"]):
        assert not any(TOKEN.encode() in open(os.path.join(path, n), "rb").read() for n in names)


def test_a_token_is_not_sent_in_the_clear(env):
    env["HF_TOKEN"] = TOKEN
    p = subprocess.run([CALLA, "pull", "--endpoint", "http://hub.invalid", NAME], env=env, capture_output=True)
    assert p.returncode == 2 and b"not https" in p.stderr and TOKEN.encode() not in p.stderr
    env["HF_TOKEN"] = "two\nlines"
    p = subprocess.run([CALLA, "pull", "--endpoint", "http://127.0.0.1:9", NAME], env=env, capture_output=True)
    assert p.returncode == 2 and b"control" in p.stderr


def test_large_files_come_in_parts_at_the_same_time(hub, env):
    large(hub)
    hub.rate = 40 * MIB
    pull(hub, env)
    check_whole(hub, env)
    ranges = [h["Range"] for k, p, h in hub.seen if k == "cdn" and p.endswith("model.safetensors")]
    assert sorted(ranges) == ["bytes=0-33554431", "bytes=33554432-67108863", "bytes=67108864-73400319"]
    assert hub.most == 3, "the three parts come at the same time"


def test_dropped_connections(hub, env):
    large(hub)
    chance = random.Random(3)
    hub.limit = lambda: chance.randrange(1, 6 * MIB)
    pull(hub, env)
    check_whole(hub, env)
    assert len(hub.paths("cdn")) > 8
    assert hub.served < 1.3 * 70 * MIB, "what came is kept"


@pytest.mark.parametrize("line", [b"", b"HT", b"HTTP/1.", b"HTTP/1.1 20", b"TP/1.1 206 Partial Content\r\n"])
def test_an_answer_cut_in_its_first_line(hub, env, line):
    cuts = [line, line]

    def cut(handler, name, body, first, last):
        if not cuts:
            return False
        handler.wfile.write(cuts.pop())
        return True

    large(hub)
    hub.twist = cut
    pull(hub, env)
    check_whole(hub, env)
    assert not cuts


def test_kill_and_go_on(hub, env):
    large(hub)
    rounds = 20 if os.environ.get("CALLA_TEST_LONG") else 3
    hub.rate = 8 * MIB
    for i in range(rounds):
        p = subprocess.Popen(command(hub), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(0.15 + 0.6 * random.Random(i).random() / (rounds / 3))
        other = subprocess.run(command(hub), env=env, capture_output=True, timeout=60)
        assert other.returncode == 3 and b"another calla pull" in other.stderr
        p.send_signal(signal.SIGKILL)
        p.communicate()
        q = subprocess.run([CALLA, "run", "-m", NAME, "-p", "x"], env=env, capture_output=True)
        assert q.returncode == 3 and f"go on with: calla pull {NAME}".encode() in q.stderr
    hub.rate = None
    assert "going on" in pull(hub, env)
    check_whole(hub, env)
    assert hub.served < 2 * 70 * MIB


def test_interrupt_says_that_it_goes_on(hub, env):
    large(hub)
    hub.rate = 4 * MIB
    p = subprocess.Popen(command(hub), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(0.5)
    p.send_signal(signal.SIGINT)
    out = p.communicate(timeout=20)[0]
    assert p.returncode == 3 and b"goes on from here" in out
    hub.rate = None
    pull(hub, env)
    check_whole(hub, env)


@pytest.mark.parametrize("status,words", [(401, "HF_TOKEN"), (403, "accept its terms"), (404, "check the name")])
@pytest.mark.parametrize("place", ["list_status", "file_status"])
def test_refusals_end_it_at_once(hub, env, status, words, place):
    small(hub)
    setattr(hub, place, [status] * 20)
    out = pull(hub, env, code=3)
    assert words in out and str(status) in out
    assert len(hub.seen) <= 1 + len(hub.files), "asking again would not help"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("place", ["list_status", "file_status"])
def test_passing_trouble_is_waited_out(hub, env, status, place):
    small(hub)
    setattr(hub, place, [status, status])
    pull(hub, env)
    check_whole(hub, env)


def test_retry_after_is_kept(hub, env):
    small(hub)
    hub.file_status, hub.retry_after = [503] * 2, 2
    start = time.monotonic()
    pull(hub, env)
    assert 2 <= time.monotonic() - start < 5


def test_limits_that_stay_are_told(hub, env):
    small(hub)
    hub.list_status = [429] * 9
    hub.retry_after = 1
    assert "429" in pull(hub, env, code=3)


def test_no_server(env):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    p = subprocess.run([CALLA, "pull", "--endpoint", f"http://127.0.0.1:{port}", NAME], env=env,
                       capture_output=True, timeout=60)
    assert p.returncode == 3 and b"cannot reach" in p.stderr


def respond(handler, status, headers, body):
    handler.send_response(status)
    for key, value in headers.items():
        handler.send_header(key, str(value))
    handler.end_headers()
    handler.wfile.write(body)
    return True


def lie_total(h, name, body, a, b):
    return respond(h, 206, {"Content-Range": f"bytes {a}-{b}/{len(body) + 5}", "Content-Length": b - a + 1}, body[a:b + 1])


def lie_start(h, name, body, a, b):
    return respond(h, 206, {"Content-Range": f"bytes {a + 1}-{b}/{len(body)}", "Content-Length": b - a}, body[a + 1:b + 1])


def lie_place(h, name, body, a, b):
    return respond(h, 206, {"Content-Length": b - a + 1}, body[a:b + 1])


def lie_more(h, name, body, a, b):
    more = body[a:b + 1] + b"more"
    return respond(h, 206, {"Content-Range": f"bytes {a}-{b}/{len(body)}", "Content-Length": len(more)}, more)


def lie_whole(h, name, body, a, b):
    return respond(h, 200, {"Content-Length": len(body)}, body) if name.endswith("tensors") else False


@pytest.mark.parametrize("lie,words", [(lie_total, "list says"), (lie_start, "another part"), (lie_place, "Content-Range"),
                                       (lie_more, "more bytes"), (lie_whole, "Range")])
def test_lies_about_lengths(hub, env, lie, words):
    large(hub, 40)
    hub.twist = lie
    assert words in pull(hub, env, code=3)
    hub.twist = None
    pull(hub, env)
    check_whole(hub, env)


def test_answers_shorter_than_promised(hub, env):
    """A body that ends early without an error of the connection is continued, not taken as whole."""
    small(hub)
    count = [0]

    def short(h, name, body, a, b):
        count[0] += 1
        end = min(b + 1, a + 100000)
        return respond(h, 206, {"Content-Range": f"bytes {a}-{b}/{len(body)}", "Content-Length": end - a}, body[a:end])

    hub.twist = short
    pull(hub, env)
    check_whole(hub, env)
    assert count[0] == 4


def test_a_server_without_ranges_serves_small_files(hub, env):
    small(hub)
    cut = [True]

    def whole(h, name, body, a, b):
        end = len(body) // 2 if cut[0] and name.endswith("tensors") else len(body)
        cut[0] = cut[0] and not name.endswith("tensors")
        return respond(h, 200, {"Content-Length": len(body)}, body[:end])

    hub.twist = whole
    pull(hub, env)
    check_whole(hub, env)


@pytest.mark.parametrize("name,claim", [("model.safetensors", {"lfs": {"sha256": "0" * 64, "size": 300000}}),
                                        ("config.json", {"blobId": "0" * 40})])
def test_a_wrong_checksum_is_not_kept(hub, env, name, claim):
    small(hub)
    hub.claims[name] = claim
    assert "damaged" in pull(hub, env, code=3)
    hub.claims.clear()
    hub.seen.clear()
    pull(hub, env)
    check_whole(hub, env)
    assert [p.split("/")[-1] for p in hub.paths("cdn")] == [name], "the right file was kept"


def test_a_new_version_between_two_runs(hub, env):
    small(hub)
    hub.claims["config.json"] = {"blobId": "0" * 40}
    pull(hub, env, code=3)
    hub.claims.clear()
    hub.revision = "b" * 40
    hub.add("model.safetensors", random.Random(9).randbytes(300000))
    pull(hub, env)
    check_whole(hub, env)


def test_a_full_disk_is_told_before_the_first_byte(hub, env):
    small(hub)
    hub.claims["model.safetensors"] = {"lfs": {"sha256": "0" * 64, "size": 10 << 40}}
    out = pull(hub, env, code=4)
    assert "GB free" in out and hub.paths("cdn") == []


@pytest.mark.parametrize("listing", [b"<html>", b"[]", b'{"sha": "x", "siblings": []}',
                                     b'{"sha": "' + b"a" * 40 + b'", "siblings": [{}]}',
                                     b'{"sha": "' + b"a" * 40 + b'", "siblings": [{"rfilename": "config.json"}]}',
                                     b'{"sha": "' + b"a" * 40 + b'", "siblings": [{"rfilename": "config.json", "size": -1}]}',
                                     b"[" * 100000])
def test_a_list_that_is_none(hub, env, listing):
    hub.answer = lambda handler, kind: respond(handler, 200, {"Content-Length": len(listing)}, listing)
    pull(hub, env, code=3)


def test_names_that_leave_the_folder_are_not_fetched(hub, env):
    small(hub)
    for name in ("../evil.json", "/etc/evil.json", "a/../../evil.json", "..json", ".evil.json", "a\\b.json"):
        hub.add(name, b"evil")
    pull(hub, env)
    assert sorted(os.listdir(folder(env))) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["", "x", "a/b/c", "../x", "a/..", "a b/c", "/x", "x/", "a/b?c"])
def test_names_that_are_none(env, name):
    p = subprocess.run([CALLA, "pull", "--endpoint", "http://127.0.0.1:9", name], env=env, capture_output=True)
    assert p.returncode == 2 and b"OWNER/NAME" in p.stderr


def test_the_hugging_face_cache_is_found(env, tmp_path):
    cache = tmp_path / "home/.cache/huggingface/hub/models--maker--Model-1.0"
    snapshot = cache / "snapshots" / ("c" * 40)
    shutil.copytree(DEMO, cache / "blobs")
    snapshot.mkdir(parents=True)
    for name in os.listdir(DEMO):
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", name))
    argv = [CALLA, "run", "-m", NAME, "--temp", "0", "-n", "2", "-p", "Hi"]
    assert subprocess.run(argv, env=env, capture_output=True, timeout=60).returncode == 0
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("c" * 40)
    assert subprocess.run(argv, env=env, capture_output=True, timeout=60).returncode == 0
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "home/.cache/huggingface", moved)
    assert subprocess.run(argv, env=env, capture_output=True, timeout=60).returncode == 3
    assert subprocess.run(argv, env=dict(env, HF_HOME=str(moved)), capture_output=True, timeout=60).returncode == 0
    assert subprocess.run(argv, env=dict(env, HF_HUB_CACHE=str(moved / "hub")), capture_output=True, timeout=60).returncode == 0
