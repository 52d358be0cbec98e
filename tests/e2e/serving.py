"""A calla serve of the demo model for the tests of the server, and a client of the standard library."""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.environ.get("CALLA", os.path.join(ROOT, "build", "calla"))
LONG = os.environ.get("CALLA_TEST_LONG") == "1"

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
# An answer without an end.
LONG_TALK = {"messages": [{"role": "user", "content": "Count for ever."}], "max_tokens": 6000,
             "temperature": 1, "logit_bias": {"8174": -100, "8172": -100}}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                                                    "days": {"type": "integer"}},
                   "required": ["city", "days"]}}}
CLOCK = {"type": "function", "function": {
    "name": "get_time", "description": "Time of day",
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}},
                   "required": ["zone"]}}}


def wide_demo(folder, ctx):
    """The demo model with a context of ctx. Past its own 8,192 positions it says nothing of use, and is read,
    kept and found like any other."""
    path = os.path.join(str(folder), "wide")
    shutil.copytree(os.path.join(ROOT, "models", "demo"), path)
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config["text_config"]["max_position_embeddings"] = ctx
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    return path


class Server:
    def __init__(self, *argv, env=None, binary=CALLA, common=("--threads", "1")):
        self.log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")
        # Nobody's own cache folder is touched, and nothing is known from another server.
        self.cache = tempfile.TemporaryDirectory(prefix="calla-cache-")
        self.process = subprocess.Popen(
            [binary, "serve", "--port", "0", *common, *argv], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self.log,
            env=dict(os.environ, **{"XDG_CACHE_HOME": self.cache.name, **(env or {})}))
        end = time.monotonic() + 60
        while True:
            found = re.search(r"http://(\S+):(\d+)/", self.lines())
            if found:
                break
            assert self.process.poll() is None and time.monotonic() < end, self.lines()
            time.sleep(0.02)
        self.host, self.port = "127.0.0.1", int(found.group(2))
        self.url = f"http://127.0.0.1:{self.port}"

    def lines(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return f.read()

    def close(self, number=signal.SIGTERM, limit=60, keep_log=False):
        """Ends the server; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            if not keep_log:
                self.log.close()
            self.cache.cleanup()

    def request(self, method, path, body=None, headers=None, timeout=300):
        """(status, headers, bytes)."""
        c = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            c.request(method, path, body, headers or {})
            r = c.getresponse()
            return r.status, r.headers, r.read()
        finally:
            c.close()

    def get(self, path, **kw):
        status, _, data = self.request("GET", path, **kw)
        return status, json.loads(data)

    def post(self, path, body, **kw):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        status, _, data = self.request("POST", path, data, **kw)
        return status, json.loads(data)

    def chat(self, messages=CAPITAL, expect=200, **fields):
        body = {"messages": messages, "reasoning_effort": "none", "temperature": 0,
                "max_tokens": 64, **fields}
        status, reply = self.post("/v1/chat/completions", body)
        assert status == expect, reply
        return reply

    def stream(self, path, body, headers=None):
        """Yields (event name or None, parsed data or "[DONE]", seconds since the request)."""
        start = time.monotonic()
        c = http.client.HTTPConnection(self.host, self.port, timeout=300)
        try:
            c.request("POST", path, json.dumps(dict(body, stream=True)), headers or {})
            r = c.getresponse()
            assert r.status == 200, r.read()
            assert r.headers["Content-Type"] == "text/event-stream"
            name = None
            for line in r:
                line = line.decode("utf-8").rstrip("\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
                    yield (name, data if data == "[DONE]" else json.loads(data),
                           time.monotonic() - start)
                    name = None
        finally:
            c.close()

    def chat_stream(self, messages=CAPITAL, **fields):
        body = {"messages": messages, "reasoning_effort": "none", "temperature": 0,
                "max_tokens": 64, **fields}
        return [data for _, data, _ in self.stream("/v1/chat/completions", body)]

    def metrics(self):
        _, _, text = self.request("GET", "/metrics")
        return {k: float(v) for k, v in
                re.findall(r"^calla_(\S+) (\S+)$", text.decode(), re.M)}

    def wait_idle(self, limit=5):
        """Seconds until nothing runs or waits."""
        start = time.monotonic()
        while time.monotonic() - start < limit:
            m = self.metrics()
            if m["running"] == 0 and m["queued"] == 0:
                return time.monotonic() - start
            time.sleep(0.02)
        raise AssertionError(f"still busy after {limit} s: {m}")

    def open_stream(self, body, path="/v1/chat/completions"):
        """A raw socket with the request sent."""
        data = json.dumps(dict(body, stream=True)).encode()
        s = socket.create_connection((self.host, self.port), timeout=60)
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
                  .encode() + data)
        return s

    def raw(self, data, timeout=10):
        """What comes back for bytes on a socket, until its end."""
        s = socket.create_connection((self.host, self.port), timeout=timeout)
        out, half = b"", True
        try:
            s.sendall(data)
            while True:
                piece = s.recv(65536)
                if not piece:
                    return out
                out += piece
                if b"HTTP" in out and half:
                    s.shutdown(socket.SHUT_WR)
                    half = False
        except OSError:
            return out
        finally:
            s.close()


def join(chunks, field="content", choice=0):
    return "".join((c["choices"][0]["delta"].get(field) or "") for c in chunks
                   if c != "[DONE]" and c.get("choices") and c["choices"][0]["index"] == choice)


def calls_of(chunks):
    """Tool calls joined from stream chunks."""
    calls = {}
    for c in chunks:
        if c == "[DONE]" or not c.get("choices"):
            continue
        for d in c["choices"][0]["delta"].get("tool_calls", []):
            call = calls.setdefault(d["index"], {"id": d.get("id"), "name": "", "arguments": ""})
            call["name"] += d["function"].get("name", "")
            call["arguments"] += d["function"].get("arguments", "")
    return [calls[i] for i in sorted(calls)]


def parallel(functions):
    """Runs functions at once; their results in order, or the first exception."""
    results = [None] * len(functions)

    def run(i):
        try:
            results[i] = functions[i]()
        except BaseException as e:  # noqa: handed to the caller's thread
            results[i] = e
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results
