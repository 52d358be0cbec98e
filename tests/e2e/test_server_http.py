"""The server's HTTP: who may ask, limits, bodies of every kind, streams that are left, its end."""
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import time

import pytest

from serving import CALLA, CAPITAL, LONG, LONG_TALK, Server, parallel

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
    assert server.get("/v1/models/demo")[1] == models["data"][0]
    for name in ("any-name", "", "%00", "demo%00", "%00demo", "demo/x", "d", "x" * 1000, "%ff%fe"):
        status, reply = server.get("/v1/models/" + name)
        assert status == 404 and reply["error"]["type"] == "not_found_error", name
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
    assert 0 < after["compute_seconds_total"] - before["compute_seconds_total"] < 10


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
    (wrap(b'"x"')[:-1] + b', "user": 123456789012345678901234567890}', 200),
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


@pytest.mark.parametrize("field,value", [
    ("seed", "9223372036854775808"), ("seed", "-99999999999999999999"), ("n", "1e400"),
    ("max_completion_tokens", "1" + "0" * 30), ("top_k", "18446744073709551616"), ("temperature", "1e309"),
    ("user", "-1e999"), ("metadata", '{"a": [1, {"b": 1e400}]}'), ("stop", "[1e400]"),
    ("seed", "1" * 1000), ("logit_bias", '{"5": 99999999999999999999}')])
def test_numbers_out_of_range_name_their_field(server, field, value):
    """Pitfall 59: 2^63 and more, and huge exponents."""
    status, reply = server.post("/v1/chat/completions", wrap(b'"x"')[:-1] +
                                f', "{field}": {value}}}'.encode())
    assert status == 400 and f"'{field}'" in reply["error"]["message"], reply
    assert reply["error"]["param"] == field


def test_schemas_may_hold_large_numbers(server):
    """Tools of other programs bound unsigned numbers of 64 bits by their largest value."""
    tool = b'''[{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615}}}}}]'''
    status, reply = server.post("/apply-template", b'{"messages": [{"role": "user", "content": "x"}],'
                                b' "tools": ' + tool + b"}")
    assert status == 200 and '"maximum": 1.84467440737095' in reply["prompt"]


def test_numbers_are_short(server):
    """0.6 as a float of 32 bits is not 0.60000002384185791 to a reader."""
    props = server.get("/props")[1]
    _, _, raw = server.request("GET", "/props")
    assert props["sampling"]["temperature"] == 0.6 and b'"temperature":0.6,' in raw
    status, _, raw = server.request("POST", "/v1/chat/completions", json.dumps(
        {"messages": CAPITAL, "max_tokens": 8, "logprobs": True, "top_logprobs": 5,
         "reasoning_effort": "none"}))
    reals = re.findall(rb"-?\d+\.(\d+)", raw)
    assert status == 200 and len(reals) > 20 and max(map(len, reals)) <= 14, reals


def test_props_show_what_is_in_effect(server):
    """Pitfall 11."""
    server.chat()
    cache = server.get("/props")[1]["cache"]
    assert cache["bytes_max"] > 1 << 26 and 0 < cache["bytes"] <= cache["bytes_max"]
    assert cache["entries"] >= 1 and cache["hits"] + cache["misses"] >= 1
    assert cache["disk_bytes_max"] == 16 << 30
    assert cache["dir"] == os.path.join(server.cache.name, "calla/prefixes")
    assert os.path.isdir(cache["dir"]) and os.stat(cache["dir"]).st_mode & 0o77 == 0


def test_cache_flags(tmp_path):
    """Pitfall 11: what a flag does is shown, and what has no effect is said."""
    for argv, want in ((["--cache-disk", "0"], (None, 0)),
                       (["--cache-dir", str(tmp_path / "a"), "--cache-disk", "3M"],
                        (str(tmp_path / "a"), 3 << 20)),
                       (["--cache-dir", "/proc/none/calla"], (None, 0)),
                       (["--cache-ram", "5M"], (None, 16 << 30))):
        s = Server(*argv)
        try:
            cache = s.get("/props")[1]["cache"]
            assert (want[0] and cache["dir"], cache["disk_bytes_max"]) == want, argv
            assert cache["bytes_max"] == 5 << 20 or argv[0] != "--cache-ram"
            assert not os.path.exists(s.cache.name + "/calla") or argv[0] == "--cache-ram"
            assert argv[-1] != "/proc/none/calla" or "in memory only" in s.lines()
        finally:
            assert s.close() == 0
    for argv in (["--cache-disk", "0", "--cache-dir", str(tmp_path)], ["--cache-disk", "x"]):
        p = subprocess.run([CALLA, "serve", "--port", "0", *argv], stderr=subprocess.PIPE, timeout=60)
        assert p.returncode == 2 and b"--cache-disk" in p.stderr
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    p = subprocess.Popen([CALLA, "serve", "--port", "0"], stderr=subprocess.PIPE, env=env)
    assert b"in memory only" in p.stderr.readline()
    assert b"http://" in p.stderr.readline()
    p.terminate()
    p.stderr.close()
    assert p.wait(60) == 0


def test_lone_surrogates_become_replacements(server):
    """Pitfall 59."""
    status, reply = server.post("/tokenize", b'{"content": "a\\ud83db \\\\ud83d"}')
    assert status == 200
    _, back = server.post("/detokenize", {"tokens": reply["tokens"]})
    assert back["content"] == "a\ufffdb \\ud83d"


@pytest.mark.parametrize("text", ["Z" * 131072, "." * 50000, " " * 50000, "\n" * 50000,
                                  "\u6f22" * 200000, "e" + "\u0301" * 100000],
                         ids=["letters", "dots", "spaces", "newlines", "ideographs", "marks"])
def test_long_runs_are_tokenised(server, text):
    """Pitfall 53."""
    times = []
    for _ in range(3):  # other load comes and goes
        start = time.monotonic()
        status, reply = server.post("/tokenize", {"content": text})
        times.append(time.monotonic() - start)
        assert status == 200 and reply["count"] > 0
    assert min(times) < 1, times


def test_too_large(server):
    c = http.client.HTTPConnection(server.host, server.port, timeout=30)
    c.putrequest("POST", "/v1/chat/completions")
    c.putheader("Content-Length", str(1 << 40))
    c.endheaders()
    assert c.getresponse().status == 413
    c.close()
    assert b" 431 " in server.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"x" * 70000 +
                                  b"\r\n\r\n").split(b"\r\n")[0]


def tool(i, name="f"):
    return {"type": "function", "function": {"name": f"{name}{i}", "parameters": {}}}


@pytest.mark.parametrize("path,fields,word", [
    ("chat/completions", {"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ("chat/completions", {"tools": [tool(i) for i in range(513)]}, "tools"),
    ("chat/completions", {"tools": [tool(0, "n" * 128)]}, "name"),
    ("chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat/completions", {"n": 65}, "n"), ("chat/completions", {"model": "m" * 257}, "model"),
    ("chat/completions", {"stop": ["a"] * 17}, "stop"), ("chat/completions", {"stop": "a" * 1025}, "stop"),
    ("completions", {"prompt": [[1]] * 65}, "prompt"), ("completions", {"prompt": [[1]] * 33, "n": 2}, "n"),
    ("messages", {"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"enum": list(range(300000))}}}}, "schema"),
    ("responses", {"input": "hello world " * 9000}, "too long")])
def test_bounds(server, path, fields, word):
    """What docs/api.md lists under Bounds: one more than allowed is refused, and named."""
    base = {"chat/completions": {"messages": CAPITAL}, "completions": {"prompt": "a"}, "responses": {},
            "messages": {"messages": CAPITAL, "max_tokens": 1}}[path]
    status, reply = server.post("/v1/" + path, {**base, **fields})
    assert status == 400 and word in reply["error"]["message"], str(reply)[:300]


def test_many_small_parts_take_linear_time(server):
    """A body may hold hundreds of thousands of parts: none of them costs what all before it cost."""
    part = {"type": "text", "text": "x" * 150}
    many = [part] * 120000
    bodies = [("/v1/messages/count_tokens", {"messages": [{"role": r, "content": many}, *CAPITAL]})
              for r in ("user", "assistant")]
    bodies += [("/apply-template", {"messages": [{"role": "user", "content": many}]}),
               ("/apply-template", {"messages": [{"role": "user", "content": "x" * 100}] * 100000}),
               ("/v1/messages/count_tokens", {"system": many, "messages": CAPITAL}),
               ("/tokenize", {"content": "x y" * 2000000})]
    for path, body in bodies:
        start = time.monotonic()
        assert server.post(path, body)[0] in (200, 400), path
        assert time.monotonic() - start < 20, path


def test_references_to_tools_are_bounded(server):
    """A few bytes of a reference stand for a whole description."""
    tools = [{"name": "big", "description": "x" * 100000, "input_schema": {"type": "object"},
              "defer_loading": True}]
    for count, want in ((3, 200), (600, 400), (100, 400)):
        content = [{"type": "tool_reference", "tool_name": "big"}] * count
        status, reply = server.post("/v1/messages/count_tokens", {"tools": tools, "messages": [
            *CAPITAL, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "find", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                          "content": content}]}]})
        assert status == want, reply
        assert want == 200 or "tool_reference" in reply["error"]["message"]


def test_connections_are_bounded(server):
    """Those past the limit are turned away; those that were there are served all the same."""
    first = socket.create_connection((server.host, server.port))
    rest = []
    try:
        for _ in range(300):
            rest.append(socket.create_connection((server.host, server.port), timeout=5))
        first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in first.recv(1000)
    finally:
        for c in rest + [first]:
            c.close()
    end = time.monotonic() + 10
    while True:
        try:
            assert server.get("/health")[0] == 200
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


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


@pytest.mark.parametrize("path,headers,want", [
    (path, headers, want)
    for path in ("/v1/chat/completions", "/v1/messages", "/nothing")
    for headers, want in (
        (b"Content-Length: 2\r\nContent-Length: 3", 400), (b"Content-Length: 0\r\ncontent-length: 2", 400),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: gzip", 501), (b"Transfer-Encoding: gzip, chunked", 501),
        (b"Transfer-Encoding: identity\r\nContent-Length: 2", 501))])
def test_a_body_with_two_ends_is_refused(server, path, headers, want):
    """What follows such a request is no request: the reply, in the form of the API, is the connection's last."""
    reply = server.raw(b"POST " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n" +
                       b"{}GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, body = reply.split(b"\r\n\r\n", 1)
    assert int(head.split()[1]) == want and b"\r\nConnection: close" in head and reply.count(b"HTTP/1.1") == 1
    assert json.loads(body)["error"]["message"]


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


# ---- errors beside others, the end

def test_bad_requests_beside_good_ones(server):
    """Pitfall 106."""
    def good():
        return server.chat()["choices"][0]["message"]["content"]

    def bad():
        name = next(names)
        part = {"type": name, "image_url": {"url": "data:image/png;base64,AAAA"}}
        message = server.chat(expect=400, messages=[{"role": "user", "content": [part]}])["error"]["message"]
        return f"'{name}'" in message, message
    names = iter([f"zebra{i}" for i in range(31)] + ["image_url"])
    results = parallel([good, bad] * 32)
    assert all(r == "The capital of France is Paris." for r in results[::2])
    assert all(named for named, _ in results[1::2]), results


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


@pytest.mark.parametrize("path,body", [
    ("/v1/chat/completions", {"messages": CAPITAL}), ("/v1/completions", {"prompt": "a b"}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/v1/messages", {"messages": CAPITAL, "max_tokens": 5}), ("/v1/responses", {"input": "a b"})])
def test_each_request_is_traced_and_logged(tmp_path, path, body):
    """The prompt, what the cache gave, the raw output and its parts; one line, with its figures."""
    trace = tmp_path / "trace"
    s = Server("--trace", str(trace))
    try:
        for stream in (False, True):
            assert s.request("POST", path, json.dumps(dict(body, stream=stream)))[0] == 200
        s.wait_idle()
        time.sleep(0.2)
        lines = [l for l in s.lines().splitlines() if l.startswith(f"POST {path} 200")]
    finally:
        assert s.close() == 0
    assert len(lines) == 2
    for line in lines:
        assert re.search(r" id=\S+ prompt=[1-9]\d* cached=\d+ completion=\d+ first=\S+s rate=\S+/s "
                         r"finish=\w+$", line), line
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    ids = list(dict.fromkeys(e["id"] for e in events))
    assert len(ids) == 2 and all(i in l for i, l in zip(ids, lines))
    for one in ids:
        of = [e for e in events if e["id"] == one]
        assert of[0]["event"] == "prompt" and of[-1]["event"] == "end"
        assert of[0].get("text") or of[0]["ids"] == [1, 2, 3]
        assert {"raw", "cached_tokens", "finish", "error"} <= of[-1].keys()
    assert os.stat(trace).st_mode & 0o77 == 0, "prompts are nobody else's business"


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
