#!/usr/bin/env python3
"""Mixed traffic against a sanitizer build of calla serve, for as long as asked.

  tests/e2e/soak.py BINARY SECONDS [SEED]

Clients of all APIs ask at once: conversations that grow, are edited, branch and come back; long prompts, tools,
schemas, several answers; requests that are broken, streams that are left or hardly read. Caches
are so small that entries are evicted, to disk too. Checked all the time: no reply but those that the request may
get, known answers, nobody's words in another's reply. At the end the server is idle, ends with 0, and its log has no report.
"""
import collections
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
import threading
import time

from serving import CAPITAL, CLOCK, ROOT, WEATHER, Server

PARIS = "The capital of France is Paris."
# Of no language: a word that the model may say by itself tells nothing.
WORDS = ["brixol", "quenva", "zumtar", "plyndo", "vorgel", "kwistu", "ojmera", "frubak", "gnilpo",
         "tezqua"]
FLAT = [{"type": "function", **t["function"]} for t in (WEATHER, CLOCK)]
OWN = [{"name": t["name"], "input_schema": t["parameters"]} for t in FLAT]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                           "old": {"type": "boolean"}},
          "required": ["name", "old"], "additionalProperties": False}
REPORT = re.compile(r"WARNING: ThreadSanitizer|ERROR: \w+Sanitizer|runtime error:|"
                    r"SUMMARY: \w+Sanitizer")
BUSY = (200, 503)


def environment(binary):
    """Reports go to the log and do not end the server; what is not ours is in the suppressions."""
    return {"TSAN_OPTIONS": f"exitcode=66 second_deadlock_stack=1 history_size=4 "
                            f"suppressions={ROOT}/tests/e2e/tsan.supp",
            "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
            "UBSAN_OPTIONS": "print_stacktrace=1"}


class Client:
    """One client: its own word, its own conversation, its own choice of what to do next."""

    def __init__(self, soak, index):
        self.soak, self.server = soak, soak.server
        self.rng = random.Random(soak.seed * 100 + index)
        self.word = WORDS[index % len(WORDS)]
        self.talk, self.kept = [], []

    def check(self, status, reply, allowed=BUSY):
        assert status in allowed, (status, str(reply)[:400])
        text = json.dumps(reply)
        others = [w for w in WORDS if w != self.word and re.search(rf"\b{w}\b", text)]
        assert not others, (self.word, text[:2000])

    def post(self, path, body, allowed=BUSY):
        status, reply = self.server.post(path, body, timeout=900)
        self.check(status, reply, allowed)
        return reply if status == 200 else None

    def sample(self):
        r = self.rng
        return r.choice([{"temperature": 0}, {"seed": r.randrange(99)},
                         {"temperature": 1.5, "top_p": 0.9, "min_p": 0.05, "seed": 1},
                         {"temperature": 0.8, "presence_penalty": 1, "frequency_penalty": 0.5},
                         {"repetition_penalty": 1.2, "top_k": 5}])

    def turn(self):
        """The conversation changes: a further turn, an edit, a branch, the return, a new one."""
        r = self.rng
        kind = r.randrange(8)
        user = {"role": "user", "content": f"Repeat after me: the {self.word} is mine. " +
                "hello " * r.choice([0, 0, 20, 300])}
        if not self.talk or len(self.talk) > 24 or kind == 0:
            shared = [{"role": "system", "content": "You are a careful engineer. " * 60}]
            self.talk = [*(shared if r.random() < 0.5 else []), user]
        elif kind == 1:
            self.talk[-1] = user
        elif kind == 2 and self.kept:
            self.talk = list(self.kept)
        elif kind == 3:
            self.talk = self.talk[:-2] or [user]
        elif self.talk[-1]["role"] == "assistant":
            self.talk.append(user)
        if self.talk[-1]["role"] != "user":
            self.talk.append(user)
        if r.random() < 0.2:
            self.kept = list(self.talk)

    # ---- what a client does

    def chat(self):
        self.turn()
        thinks = self.rng.choice([{"reasoning_effort": "none"}, {"thinking_budget": 12}])
        reply = self.post("/v1/chat/completions", {"messages": self.talk, "max_tokens": 40,
                                                   **thinks, **self.sample()})
        if reply:
            self.talk.append(reply["choices"][0]["message"])

    def chat_stream(self):
        self.turn()
        body = {"messages": self.talk, "max_tokens": 60, "stream": True, "reasoning_effort": "none",
                "stream_options": {"include_usage": True}, **self.sample()}
        self.read("/v1/chat/completions", body, b"[DONE]")

    def read(self, path, body, last):
        status, _, data = self.server.request("POST", path, json.dumps(body), timeout=900)
        self.check(status, data.decode("utf-8"))
        assert status != 200 or last in data, data[-500:]

    def known_answer(self):
        reply = self.post("/v1/chat/completions", {"messages": CAPITAL, "temperature": 0,
                                                   "reasoning_effort": "none"})
        if reply:
            assert reply["choices"][0]["message"]["content"] == PARIS, reply

    def tools(self):
        body = {"messages": [{"role": "user", "content": f"Weather in {self.word}?"}],
                "tools": [WEATHER, CLOCK], "tool_choice": self.rng.choice(["auto", "required"]),
                "parallel_tool_calls": self.rng.random() < 0.5, "max_tokens": 80,
                "reasoning_effort": "none", **self.sample()}
        if self.rng.random() < 0.5:
            self.read("/v1/chat/completions", {**body, "stream": True}, b"[DONE]")
        else:
            self.post("/v1/chat/completions", body)

    def schema(self):
        reply = self.post("/v1/chat/completions", {
            "messages": CAPITAL, "max_tokens": 120, "thinking_budget": 8, **self.sample(),
            "response_format": {"type": "json_schema", "json_schema": {"name": "x",
                                                                       "schema": SCHEMA}}})
        if reply and reply["choices"][0]["finish_reason"] == "stop":
            assert set(json.loads(reply["choices"][0]["message"]["content"])) == {"name", "old"}

    def responses(self):
        body = {"model": "m", "input": [{"role": "user", "content": f"The {self.word} is mine."}],
                "instructions": "Be brief.", "tools": FLAT if self.rng.random() < 0.5 else [],
                "max_output_tokens": 50, "stream": True, "store": False}
        self.read("/v1/responses", body, b"event: response.")

    def messages(self):
        body = {"model": "m", "max_tokens": 50, "system": "Be brief.", "stream": True,
                "messages": [{"role": "user", "content": f"The {self.word} is mine."}]}
        if self.rng.random() < 0.5:
            body.update(tools=OWN, thinking={"type": "enabled", "budget_tokens": 20})
        self.read("/v1/messages", body, b"event: message_stop")
        self.post("/v1/messages/count_tokens", {"model": "m", "messages": body["messages"]})

    def completions(self):
        self.post("/v1/completions", {"prompt": [f"The {self.word} is", [5, 6, 7]], "n": 2,
                                      "max_tokens": 12, "logprobs": 3, **self.sample()})

    def long_prompt(self):
        size = self.rng.choice(self.soak.sizes)
        start = self.rng.choice(["a", "b", "c", str(self.rng.random())])
        self.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": start + " hello" * size}], "max_tokens": 3,
            "reasoning_effort": "none"})

    def leave(self):
        """A stream or a whole reply that is left at any moment, politely or not."""
        r = self.rng
        body = {"messages": [{"role": "user", "content": f"{r.choice('xyz')} Count for ever." +
                              " hello" * r.choice([0, 0, 500, 2000])}],
                "max_tokens": 600, "logit_bias": {"8174": -100, "8172": -100},
                "stream": r.random() < 0.7}
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as s:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                      + str(len(data)).encode() + b"\r\n\r\n" + data[:r.choice([5, 10 ** 6])])
            time.sleep(r.choice([0, 0.01, 0.1, 0.5, 2]))
            if r.random() < 0.5:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def read_slowly(self):
        body = {"messages": CAPITAL, "max_tokens": 300, "temperature": 1.5,
                "logit_bias": {"8174": -100, "8172": -100}}
        with self.server.open_stream(body) as s:
            s.settimeout(900)
            end = time.monotonic() + self.rng.choice([1, 5, 10])
            while time.monotonic() < end and s.recv(200):
                time.sleep(0.1)

    def broken(self):
        r = self.rng
        data = bytearray(json.dumps({"messages": CAPITAL, "max_tokens": 2, "tools": [WEATHER],
                                     "temperature": 1, "stop": ["a"], "stream": False}).encode())
        for _ in range(r.randint(1, 4)):
            at = r.randrange(len(data))
            data[at:at + r.randint(0, 9)] = r.choice([b"", b"null", b"\xff", b"[[", b"}", b"-1e9"])
        path = r.choice(["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions",
                         "/tokenize", "/apply-template"])
        status, _, _ = self.server.request("POST", path, bytes(data), timeout=900)
        assert status in (200, 400, 503), status

    def look(self):
        for path in ("/metrics", "/health", "/props", "/v1/models", "/"):
            status, _, _ = self.server.request("GET", path, timeout=900)
            assert status == 200, (path, status)
        reply = self.post("/tokenize", {"content": f"{self.word} " * 200})
        back = self.post("/detokenize", {"tokens": reply["tokens"]})
        assert back["content"] == f"{self.word} " * 200

    ALL = [(chat, 8), (chat_stream, 8), (known_answer, 4), (tools, 3), (schema, 2), (responses, 3),
           (messages, 3), (completions, 2), (long_prompt, 2), (leave, 6), (read_slowly, 1),
           (broken, 4), (look, 2)]

    def run(self):
        acts, weights = zip(*self.ALL)
        while time.monotonic() < self.soak.end and not self.soak.failed:
            act, start = self.rng.choices(acts, weights)[0], time.monotonic()
            try:
                act(self)
            except Exception as e:  # the first one ends the soak
                time.sleep(2)
                if self.soak.woken > start:
                    continue
                self.soak.failed.append(f"{act.__name__}: {type(e).__name__}: {e}")
                return
            self.soak.done[act.__name__] += 1


class Soak:
    def __init__(self, binary, seconds, seed=1, clients=10, sizes=(700, 2000, 3800)):
        self.seed, self.sizes = seed, sizes
        self.failed, self.done = [], collections.Counter()
        self.woken = 0  # when the whole machine, or this and the server, last went on after a stop
        with tempfile.TemporaryDirectory() as folder:
            self.server = Server("-m", f"{ROOT}/models/demo", "--parallel", "4", "--queue", "6",
                                 "--cache-ram", "12M", "--cache-dir", folder, "--cache-disk", "40M", "--quiet",
                                 binary=binary, env=environment(binary))
            self.end = time.monotonic() + seconds
            threading.Thread(target=self.watch, daemon=True).start()
            threads = [threading.Thread(target=Client(self, i).run) for i in range(clients)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.finish()

    def watch(self):
        """A stop longer than the server's patience breaks connections; its time does not count."""
        while True:
            before = time.monotonic()
            time.sleep(1)
            if time.monotonic() - before > 20:
                self.woken = time.monotonic()
                self.end += self.woken - before

    def finish(self):
        s = self.server
        try:
            if not self.failed:
                s.wait_idle(120)
                self.metrics = s.metrics()
        except Exception as e:
            self.failed.append(f"at the end: {type(e).__name__}: {e}")
        log = s.log.name
        code, text = s.close(limit=300, keep_log=True), open(log, errors="replace").read()
        s.log.close()
        if code != 0:
            self.failed.append(f"exit code {code}")
        reports = REPORT.findall(text)
        if reports:
            self.failed.append(f"{len(reports)} lines of sanitizer reports")
        if self.failed:
            self.failed.append(text[-20000:])


def main():
    binary, seconds = os.path.abspath(sys.argv[1]), float(sys.argv[2])
    soak = Soak(binary, seconds, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    print(dict(soak.done), sum(soak.done.values()), "requests or groups of them")
    if not soak.failed:
        print({k: int(v) for k, v in soak.metrics.items() if "cache" in k or "requests" in k or
               "tokens" in k or k in ("steps_total", "clients_gone_total")})
    print("\n".join(soak.failed) or f"{seconds:.0f} s without a report")
    return 1 if soak.failed else 0


if __name__ == "__main__":
    sys.exit(main())
