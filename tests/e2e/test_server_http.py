"""The server's HTTP: who may ask, limits, bodies of every kind, streams that are left, its end."""
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import time

import pytest

from serving import CALLA, CAPITAL, LONG, Server, join, parallel

LONG_TALK = {"messages": [{"role": "user", "content": "Count for ever."}], "max_tokens": 6000,
             "temperature": 1, "logit_bias": {"8174": -100, "8172": -100}}


@pytest.fixture(scope="module")
def server():
    s = Server("--parallel", "4")
    yield s
    assert s.close() == 0


def test_endpoints(server):
    status, headers, page = server.request("GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and b"<html" in page
    assert server.get("/health") == (200, {"status": "ok", "running": 0, "queued": 0,
                                           "faults_in_a_row": 0})
    models = server.get("/v1/models")[1]
    assert models["data"][0]["id"] == "demo" and models["data"][0]["context_length"] == 8192
    assert server.get("/v1/models/any-name")[1]["id"] == "any-name"
    props = server.get("/props")[1]
    assert props["parallel"] == 4 and props["context"] == 8192 and props["vocab"] == 8192
    assert server.request("HEAD", "/health")[0] == 200
    assert server.request("GET", "/nothing")[0] == 404
    assert server.request("GET", "/v1/chat/completions")[0] == 405
    assert server.request("DELETE", "/health")[0] == 405


def test_metrics_count(server):
    before = server.metrics()
    u = server.chat()["usage"]
    after = server.metrics()
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == u["prompt_tokens"]
    assert after["generated_tokens_total"] > before["generated_tokens_total"]
    assert after["requests_total"] == before["requests_total"] + 1


def test_one_line_a_request(server):
    server.chat()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        lines = [l for l in server.lines().splitlines() if l.startswith("POST /v1/chat/comp")]
        if lines:
            break
        time.sleep(0.05)
    assert re.search(r" 200 \S+s id=\S+ prompt=21 cached=\d+ completion=7 first=\S+s rate=\S+/s "
                     r"finish=stop$", lines[-1]), lines[-1]


# ---- who may ask

def test_foreign_hosts_and_origins(server):
    for headers, want in (({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
                          ({"Host": "evil.example"}, 403), ({"Host": "127.0.0.1.evil"}, 403),
                          ({"Origin": server.url, "Host": f"127.0.0.1:{server.port}"}, 200),
                          ({"Host": "localhost:1"}, 200), ({}, 200)):
        assert server.request("GET", "/props", headers=headers)[0] == want, headers
    _, headers, _ = server.request("GET", "/props")
    assert "Access-Control-Allow-Origin" not in headers


def test_keys_and_cors():
    s = Server("--cors", "http://app.example", env={"CALLA_API_KEY": "secret"})
    try:
        key = {"Authorization": "Bearer secret"}
        for headers, want in (({}, 401), ({"Authorization": "Bearer wrong"}, 401),
                              ({"Authorization": "Bearer secretx"}, 401), (key, 200),
                              ({"x-api-key": "secret"}, 200), ({"Host": "any.example", **key}, 200)):
            assert s.request("GET", "/v1/models", headers=headers)[0] == want, headers
        assert s.request("GET", "/health")[0] == 200 and s.request("GET", "/")[0] == 200
        status, headers, _ = s.request("OPTIONS", "/v1/chat/completions",
                                       headers={"Origin": "http://app.example"})
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == "http://app.example"
        assert s.request("GET", "/v1/models", headers={"Origin": "http://b.example", **key})[0] == 403
        body = json.dumps({"messages": CAPITAL, "max_tokens": 1})
        assert s.request("POST", "/v1/messages", body)[0] == 401
    finally:
        assert s.close() == 0


def test_other_addresses_need_a_key():
    p = subprocess.run([CALLA, "serve", "--host", "0.0.0.0", "--port", "0"],
                       stderr=subprocess.PIPE, timeout=30)
    assert p.returncode == 2 and b"--api-key" in p.stderr


def test_taken_port_is_an_error(server):
    p = subprocess.run([CALLA, "serve", "--port", str(server.port)], stderr=subprocess.PIPE,
                       timeout=60)
    assert p.returncode == 2 and b"in use" in p.stderr


# ---- bodies

def wrap(content):
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": ' + content + b"}]}"


@pytest.mark.parametrize("body,want", [
    (b"", 400), (b"{", 400), (b"[]", 400), (b"5", 400), (b"null", 400), (b"\xef\xbb\xbf{}", 400),
    (b"{}" * 2, 400), (b"[" * 10000, 400), (b'{"a":' * 10000, 400),
    (wrap(b"[" * 5000 + b"]" * 5000), 400), (wrap(b'"a\xff"'), 400), (wrap(b'"\xed\xa0\x80"'), 400),
    (wrap(b'"lone \\ud83d end"'), 200), (wrap(b'"\\udc00\\ud800"'), 200),
    (wrap(b'"\\ud83d\\ude00"'), 200), (wrap(b'"nul \\u0000 in"'), 200), (wrap(b'"\x00"'), 400),
    (wrap(b'"a", "role": "x"'), 400), (wrap(b"1e400"), 400), (wrap(b"9223372036854775808"), 400),
    (b'{"messages": [], "messages": []}', 400), (wrap(b'"x"')[:-1] + b', "n": 1e300}', 400),
    (wrap(b'"x"')[:-1] + b', "seed": 99999999999999999999}', 400),
    (wrap(b'"x"')[:-1] + b', "seed": 9223372036854775807}', 200),
    (wrap(b'"x"')[:-1] + b', "seed": -9223372036854775808}', 200),
    (wrap(b'"x"')[:-1] + b', "max_tokens\\u0000": 1}', 400), (wrap(b"NaN"), 400),
    (wrap(b'"x"')[:-1] + b', "temperature": NaN}', 400),
    (wrap(b'"x"')[:-1] + b', "stop": "a\\u0000"}', 400),
    (b'{"messages": [' + b"1," * 700000 + b"1]}", 413)])
def test_torture(server, body, want):
    """Pitfall 59."""
    status, _, reply = server.request("POST", "/v1/chat/completions", body)
    assert status == want, reply[:300]
    if want != 200:
        assert json.loads(reply)["error"]["message"]


def test_lone_surrogates_become_replacements(server):
    """Pitfall 59."""
    status, reply = server.post("/tokenize", b'{"content": "a\\ud83db \\\\ud83d"}')
    assert status == 200
    _, back = server.post("/detokenize", {"tokens": reply["tokens"]})
    assert back["content"] == "a\ufffdb \\ud83d"


@pytest.mark.parametrize("text", ["Z" * 131072, "." * 50000, " " * 50000, "\n" * 50000,
                                  "\u6f22" * 200000, "e" + "\u0301" * 100000])
def test_long_runs_are_tokenised(server, text):
    """Pitfall 53."""
    start = time.monotonic()
    status, reply = server.post("/tokenize", {"content": text})
    assert status == 200 and reply["count"] > 0 and time.monotonic() - start < 3


def test_too_large(server):
    c = http.client.HTTPConnection(server.host, server.port, timeout=30)
    c.putrequest("POST", "/v1/chat/completions")
    c.putheader("Content-Length", str(1 << 40))
    c.endheaders()
    assert c.getresponse().status == 413
    c.close()
    assert b" 431 " in server.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"x" * 70000 +
                                  b"\r\n\r\n").split(b"\r\n")[0]


def test_chunked_body_past_the_limit():
    s = Server("--max-body", "10K")
    try:
        def pieces():
            for _ in range(40):
                yield b" " * 1000
        c = http.client.HTTPConnection(s.host, s.port, timeout=30)
        c.request("POST", "/v1/chat/completions", pieces(), encode_chunked=True,
                  headers={"Transfer-Encoding": "chunked"})
        assert c.getresponse().status == 413
        c.close()
    finally:
        assert s.close() == 0


def test_fuzz(server):
    """Random damage of requests and of raw HTTP: an answer or a closed connection, never a crash."""
    rng = random.Random(7)
    base = json.dumps({"model": "m", "messages": CAPITAL, "max_tokens": 1, "stop": ["x"],
                       "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                       "tool_choice": "auto", "stream": False, "temperature": 1}).encode()
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
             "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template"]
    values = [b"null", b"true", b"-1", b"1e99", b'""', b"[]", b"{}", b'"\\u0000"', b"[[]]", b"{\"a\":1}"]
    for _ in range(4000 if LONG else 400):
        body = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            kind = rng.randrange(4)
            if kind == 0:
                body[at] = rng.randrange(256)
            elif kind == 1:
                del body[at:at + rng.randint(1, 20)]
            elif kind == 2:
                body[at:at] = rng.choice(values)
            else:
                colons = [m.end() for m in re.finditer(rb": ", bytes(body))]
                if colons:
                    at = rng.choice(colons)
                    end = re.search(rb"[,}]", bytes(body[at:]))
                    body[at:at + (end.start() if end else 0)] = rng.choice(values)
        status, _, reply = server.request("POST", rng.choice(paths), bytes(body))
        assert status in (200, 400, 413), (status, reply, bytes(body))
        json.loads(reply) if status != 200 or not reply.startswith(b"data") else None
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{}   "
    for _ in range(1000 if LONG else 100):
        data = bytearray(head)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(data))
            data[at:at + rng.randint(0, 3)] = bytes(rng.randrange(256)
                                                    for _ in range(rng.randint(0, 6)))
        server.raw(bytes(data), timeout=5) if b"\r\n\r\n" in data else None
    assert server.get("/health")[0] == 200
    assert server.chat()["choices"][0]["message"]["content"] == "The capital of France is Paris."


# ---- clients that leave

def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_leaving_ends_the_request(server):
    """Pitfall 46: in decode, in prefill, and while it waits; streamed and not."""
    for hard in (False, True):
        s = server.open_stream(LONG_TALK)
        assert b"200 OK" in s.recv(4096)
        reset(s) if hard else s.close()
        assert server.wait_idle() < 2
    long = dict(LONG_TALK, messages=[{"role": "user", "content": f"{time.time()} " + "hello " * 3500}])
    s = server.open_stream(long)
    time.sleep(0.1)
    s.close()
    assert server.wait_idle() < 2
    data = json.dumps(LONG_TALK).encode()
    s = socket.create_connection((server.host, server.port))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
              + str(len(data)).encode() + b"\r\n\r\n" + data)
    time.sleep(0.3)
    assert server.metrics()["running"] == 1
    s.close()
    assert server.wait_idle() < 2


def test_leaving_the_queue_spares_the_others():
    """Pitfall 47; and 503 with Retry-After when the queue is full."""
    s = Server("--parallel", "1", "--queue", "1")
    try:
        a = s.open_stream(dict(LONG_TALK, max_tokens=300))
        a.recv(100)
        while s.metrics()["running"] != 1:
            time.sleep(0.01)
        b = s.open_stream(LONG_TALK)
        while s.metrics()["queued"] != 1:
            time.sleep(0.01)
        status, headers, reply = s.request("POST", "/v1/chat/completions",
                                           json.dumps({"messages": CAPITAL}))
        assert status == 503 and headers["Retry-After"], reply
        b.close()
        out = b""
        while b"[DONE]" not in out:
            piece = a.recv(65536)
            assert piece, out[-300:]
            out += piece
        assert b'"finish_reason":"length"' in out
        a.close()
        assert s.wait_idle() < 2
    finally:
        assert s.close() == 0


def test_aborted_streams_leave_nothing():
    """Pitfall 50: 50 aborted streams. Pages of keys and values are touched first, and count once."""
    s = Server()
    try:
        parallel([lambda i=i: s.chat([{"role": "user", "content": f"{i} " + "hello " * 3500}],
                                     max_tokens=1) for i in range(4)])

        def abort():
            c = s.open_stream(dict(LONG_TALK, seed=1))
            c.recv(2000)
            c.close()
        for _ in range(50):
            abort()
        s.wait_idle()
        before = s.metrics()
        for _ in range(50):
            abort()
        s.wait_idle()
        after = s.metrics()
        assert after["resident_bytes"] < before["resident_bytes"] * 1.02
        assert after["cache_entries"] == before["cache_entries"]
    finally:
        assert s.close() == 0


def test_slow_reader_does_not_hold_the_engine(server):
    s = server.open_stream(dict(LONG_TALK, max_tokens=3000))
    start = time.monotonic()
    for _ in range(3):
        server.chat()
    assert time.monotonic() - start < 5
    s.close()
    server.wait_idle()


def test_slow_body_is_served(server):
    data = json.dumps({"messages": CAPITAL, "max_tokens": 1}).encode()
    s = socket.create_connection((server.host, server.port))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
              + str(len(data)).encode() + b"\r\n\r\n")
    for i in range(0, len(data), 10):
        s.sendall(data[i:i + 10])
        time.sleep(0.02)
    assert b"200 OK" in s.recv(4096)
    s.close()


def test_headers_come_at_once(server):
    long = dict(LONG_TALK, messages=[{"role": "user", "content": f"{time.time()} " + "hello " * 3500}])
    start = time.monotonic()
    s = server.open_stream(long)
    first = s.recv(4096)
    waited = time.monotonic() - start
    s.close()
    assert b"200 OK" in first and waited < 0.25
    server.wait_idle()


# ---- errors beside others, the end

def test_bad_requests_beside_good_ones(server):
    """Pitfall 106."""
    def good():
        return server.chat()["choices"][0]["message"]["content"]

    def bad():
        return server.chat(expect=400, messages=[{"role": "user", "content": [{"type": "zebra"}]}])
    results = parallel([good, bad] * 8)
    assert all(r == "The capital of France is Paris." for r in results[::2])
    assert all("zebra" in r["error"]["message"] for r in results[1::2])


def test_it_ends_after_what_runs():
    s = Server()
    a = s.open_stream(dict(LONG_TALK, max_tokens=200))
    a.recv(10)
    s.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    out = b""
    while True:
        piece = a.recv(65536)
        if not piece:
            break
        out += piece
    assert b"[DONE]" in out and b'"finish_reason":"length"' in out
    assert s.close() == 0


def test_a_second_signal_ends_it_now():
    s = Server()
    a = s.open_stream(LONG_TALK)
    a.recv(10)
    s.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    start = time.monotonic()
    assert s.close(signal.SIGTERM) == 0 and time.monotonic() - start < 5
    out = b""
    try:
        while piece := a.recv(65536):
            out += piece
    except ConnectionResetError:
        pass
    assert b"shutting down" in out


def test_a_body_that_does_not_arrive_does_not_hold_the_end():
    s = Server()
    waiting = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(3)]
    for w in waiting:
        w.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                  b"Content-Length: 100\r\n\r\n{")
    time.sleep(0.3)
    start = time.monotonic()
    assert s.close() == 0 and time.monotonic() - start < 5
    for w in waiting:
        w.close()


def test_trace(tmp_path):
    path = tmp_path / "trace"
    s = Server("--trace", str(path))
    try:
        reply = s.chat()
    finally:
        assert s.close() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["id"] for line in lines} == {reply["id"]}
    assert [line["event"] for line in lines][0] == "prompt" and lines[-1]["event"] == "end"
    assert lines[0]["text"].endswith("<think>\n\n</think>\n\n")
    assert lines[-1]["raw"] == "The capital of France is Paris."
    assert lines[-1]["cached_tokens"] == 0
    assert "".join(l["text"] for l in lines if l["event"] == "parsed") == lines[-1]["raw"]


def test_disk_cache_survives_a_restart(tmp_path):
    talk = [{"role": "user", "content": "Tell me about the sea, please. " * 40}]
    cached = []
    for _ in range(2):
        s = Server("--cache-dir", str(tmp_path))
        try:
            cached.append(s.chat(talk, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert s.get("/props")[1]["cache"]["dir"] == str(tmp_path)
        finally:
            assert s.close() == 0
    assert cached[0] == 0 and cached[1] > 300
