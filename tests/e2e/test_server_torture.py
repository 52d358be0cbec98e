"""Pitfall 59 and point by point what JSON and HTTP can do to a server: every API, against the address
sanitizer's build where there is one. A bad body is 400 in the API's own form, one too large 413; the
server answers right afterwards, and ends with 0."""
import json
import os
import random
import socket
import time

import pytest

from serving import CALLA, LONG, ROOT, Server

SAN = os.path.join(ROOT, "build", "san", "calla")
PATHS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input",
         "/v1/messages": "messages", "/v1/messages/count_tokens": "messages",
         "/tokenize": "content", "/detokenize": "tokens", "/apply-template": "messages"}
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server():
    s = Server(binary=SAN if os.path.exists(SAN) else CALLA,
               env={"ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1"})
    yield s
    assert s.chat()["choices"][0]["message"]["content"] == PARIS
    assert s.close() == 0


def check(server, path, body, want):
    status, _, reply = server.request("POST", path, body)
    assert status in (want if isinstance(want, tuple) else (want,)), (path, body[:80], reply[:300])
    if status != 200:
        error = json.loads(reply)["error"]
        assert error["message"] and error["type"]
        assert ("type" in json.loads(reply)) == path.startswith("/v1/messages")


BROKEN = [
    b"", b" ", b"\x00", b"{", b"}", b"[]", b"1", b'"x"', b"null", b"true", b"{]", b"{}{}", b"{},",
    b"{'a': 1}", b"{a: 1}", b'{"a" 1}', b'{"a":}', b'{"a": 1,}', b'{,"a": 1}', b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}", b'{"a": "\x1f"}', b'{"a": "\n"}', b'{"a": "\\x41"}', b'{"a": "\\u12"}',
    b'{"a": "\\', b'{"a": "b', b"/* */ {}", b"{} // x",
    # numbers
    b'{"a": 01}', b'{"a": +1}', b'{"a": .5}', b'{"a": 1.}', b'{"a": 0x10}', b'{"a": 1e}', b'{"a": --1}',
    b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e400}', b'{"a": -1e400}',
    b'{"a": 18446744073709551616}', b'{"a": -9223372036854775809}', b'{"a": ' + b"9" * 5000 + b"}",
    # bytes that are not UTF-8: cut, overlong, surrogate, past the last code point
    b'{"a": "\xc3"}', b'{"a": "\xc0\x80"}', b'{"a": "\xe0\x80\x80"}', b'{"a": "\xed\xa0\x80"}',
    b'{"a": "\xf4\x90\x80\x80"}', b'{"a": "\x80"}', b'{"\xff": 1}', b'{"a": "\xf8\x88\x80\x80\x80"}',
    # keys
    b'{"a": 1, "a": 1}', b'{"model": "m", "model": "m"}', b'{"a": {"b": 1, "b": 2}}',
    b'{"a": 1, "\\u0061": 2}', b'{"a": [{"b": {}, "b": {}}]}', b'{"a\\u0000": 1}',
    # depth
    b"[" * 100000, b'{"a":' * 100000, b'{"a":[' * 50000, b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
]


@pytest.mark.parametrize("path", PATHS)
def test_broken_bodies(server, path):
    for body in BROKEN:
        check(server, path, body, 400)


@pytest.mark.parametrize("path", PATHS)
def test_values_of_any_kind(server, path):
    """The field that matters, with every kind of value, alone and within lists and objects."""
    name = PATHS[path]
    values = [b"null", b"true", b"-1", b"1e300", b"9223372036854775807", b"-9223372036854775808", b'""',
              b'"\\u0000"', b"[]", b"{}", b"[null]", b"[[]]", b"[{}]", b'[{"role": 5}]', b'[{"role": "user"}]',
              b'[{"role": "user", "content": [[]]}]', b'[{"role": "user", "content": {"a": []}}]',
              b'[{"role": "assistant", "content": null, "tool_calls": [{"function": 5}]}]',
              b'[{"role": "tool", "content": [{"type": "text"}]}]', b'[{"type": "function_call"}]',
              b'[{"type": "reasoning", "encrypted_content": "calla1:zz"}]', b"[1e99]", b"[-1]", b'["a", 1]',
              b"[" + b"1," * 2000 + b"1]", b'[{"role": "\\ud800", "content": "\\udfff"}]',
              b'[{"role": "user", "content": "\\ud83d\\ude00 \\ud83d \\ude00"}]']
    for value in values:
        head = b'{"' + name.encode() + b'": ' + value
        for more in (b"", b', "max_tokens": 1', b', "stream": true, "max_tokens": 1'):
            check(server, path, head + more + b"}", (200, 400))


def test_depth_that_is_allowed(server):
    """The limit is of 256 levels: 250 in a tool's schema are read, and refused for what they say."""
    deep = b'{"type": "object", "properties": {"a": ' * 60 + b'{"type": "string"}' + b"}}" * 60
    body = (b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [{"type": '
            b'"function", "function": {"name": "f", "parameters": ' + deep + b"}}]}")
    check(server, "/v1/chat/completions", body, 200)


def test_sizes(server):
    check(server, "/tokenize", b'{"content": "' + b"ab " * (10 << 20) + b'"}', (200, 400))
    for body in (b" " * ((32 << 20) + 1), b'{"content": "' + b"a" * (33 << 20) + b'"}'):
        check(server, "/tokenize", body, 413)
    check(server, "/detokenize", b'{"tokens": [' + b"1," * 599000 + b"1]}", 200)
    check(server, "/detokenize", b'{"tokens": [' + b"1," * 601000 + b"1]}", 413)
    check(server, "/v1/chat/completions",
          b'{"messages": [' + b'{"role": "user", "content": ""},' * 60000 +
          b'{"role": "user", "content": "x"}]}', (200, 400))


def raw(server, head, body=b""):
    """The status line's number, or 0 for a connection that was closed without one."""
    line = server.raw(head + b"\r\n\r\n" + body).split(b"\r\n")[0]
    return int(line.split()[1]) if line.startswith(b"HTTP/") else 0


def test_heads(server):
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    for head, body, want in (
            (post + b"Content-Length: -1", b"", (400, 0)), (post + b"Content-Length: 5x", b"{}", (400, 0)),
            (post + b"Content-Length: 99999999999999999999", b"", (413, 400, 0)),
            (post + b"Content-Length: 2\r\nContent-Length: 3", b"{}", (400, 0)),
            (post + b"Transfer-Encoding: chunked", b"zz\r\n", (400, 413, 0)),
            (post + b"Transfer-Encoding: chunked", b"fffffffffffffffff\r\n", (400, 413, 0)),
            (post + b"Transfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n", (400,)),
            (post + b"Transfer-Encoding: chunked\r\nContent-Length: 2", b"2\r\n{}\r\n0\r\n\r\n", (400, 0)),
            (post + b"Content-Encoding: gzip\r\nContent-Length: 4", b"\x1f\x8b\x08\x00", (400, 415)),
            (post + b"Expect: 100-continue\r\nContent-Length: 2", b"{}", (100, 400)),
            (b"GET /health HTTP/9.9\r\nHost: localhost", b"", (400, 505, 0)), (b"GET", b"", (400, 0)),
            (b"GET /%00%ff%zz HTTP/1.1\r\nHost: localhost", b"", (404, 400)),
            (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: localhost", b"", (404, 414, 0)),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n".join(b"X%d: y" % i for i in range(
                3000)), b"", (431, 413, 0)),
            (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost", b"", (404,)),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"", (400, 0))):
        got = raw(server, head, body)
        assert got in want, (head[:80], got)


def test_slow_and_stalled_bodies(server):
    """A byte at a time is served beside others; a body that stops ends its connection, in the long form."""
    data = json.dumps({"content": "slow"}).encode()
    head = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data))
    slow = socket.create_connection((server.host, server.port), timeout=30)
    for byte in head + data:
        slow.sendall(bytes([byte]))
        time.sleep(0.005)
    assert b"200 OK" in slow.recv(4096)
    slow.close()
    if not LONG:
        return
    stalled = [socket.create_connection((server.host, server.port), timeout=200) for _ in range(3)]
    stalled[0].sendall(head + data[:3])
    stalled[1].sendall(head[:20])
    start = time.monotonic()
    for s in stalled:
        while s.recv(4096):
            pass
    assert time.monotonic() - start < 150
    assert server.get("/health")[0] == 200


def test_random_structures(server):
    """JSON that is sound and makes no sense."""
    rng = random.Random(11)
    words = ["role", "content", "type", "text", "tools", "function", "name", "parameters", "user", "input",
             "messages", "tool_use", "tool_result", "thinking", "properties", "enum", "namespace",
             "tool_reference", "reasoning", "arguments", "", "\u0000", "\ud83d", "x" * 300]
    leaf = [None, True, False, 0, -1, 1e300, 2 ** 63 - 1, "", *words]

    def value(depth):
        kind = rng.randrange(4)
        if depth == 0 or kind == 0:
            return rng.choice(leaf)
        if kind == 1:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice(words): value(depth - 1) for _ in range(rng.randrange(5))}
    fields = ["messages", "input", "tools", "tool_choice", "system", "stop", "response_format", "text",
              "logit_bias", "reasoning", "thinking", "stream_options", "prompt", "output_config",
              "chat_template_kwargs", "instructions", "content", "tokens"]
    for n in range(6000 if LONG else 500):
        path = rng.choice(list(PATHS))
        body = {"max_tokens": 1, PATHS[path]: [{"role": "user", "content": "x"}]}
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(fields)] = value(4)
        check(server, path, json.dumps(body).encode(), (200, 400))
