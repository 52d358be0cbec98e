"""Many clients at once: nobody sees another's words, streams keep flowing, equal prompts give equal
answers."""
import json
import re
import statistics
import threading
import time

import pytest

from serving import CAPITAL, CLOCK, LONG, WEATHER, Server, join, parallel

WORDS = ["apple", "river", "stone", "tiger", "cloud", "bread", "chair", "green"]
ROUNDS = 200 if LONG else 6


@pytest.fixture(scope="module")
def server():
    s = Server("--parallel", "4")
    yield s
    assert s.close() == 0


def echo(word, extra=()):
    return [*extra, {"role": "user", "content": f"Repeat after me: the {word} is mine."}]


@pytest.mark.parametrize("kind", ["plain", "tools", "shared"])
def test_codewords(server, kind):
    """Pitfalls 98, 100, 101, 103: 8 clients, each with its own word, 4 at a time."""
    system = [{"role": "system", "content": "You are a careful engineer. " * 150}]
    rounds = ROUNDS if kind == "plain" else max(ROUNDS // 4, 2)

    def client(i):
        seen = 0
        for n in range(rounds):
            fields = dict(max_tokens=40, temperature=0.6, seed=n)
            if kind == "tools":
                fields.update(tools=[WEATHER, CLOCK])
            if n % 2:
                chunks = server.chat_stream(echo(WORDS[i], system if kind == "shared" else ()),
                                            **fields)
                text = join(chunks)
            else:
                reply = server.chat(echo(WORDS[i], system if kind == "shared" else ()), **fields)
                text = json.dumps(reply["choices"][0]["message"])
            others = [w for w in WORDS if w != WORDS[i] and re.search(rf"\b{w}\b", text)]
            assert not others, (WORDS[i], text)
            seen += WORDS[i] in text
        return seen
    assert sum(parallel([lambda i=i: client(i) for i in range(8)])) > 0


def test_equal_prompts_give_equal_answers(server):
    """Pitfall 62: alone, after others, and beside 7 of the same."""
    alone = server.chat()["choices"][0]["message"]["content"]
    assert all(r["choices"][0]["message"]["content"] == alone
               for r in parallel([server.chat] * 8))


def test_different_lengths_end_alone(server):
    """Pitfall 104."""
    lengths = [1, 2, 3, 5, 50, 100, 200, 400]
    bias = {"8174": -100, "8172": -100}

    def ask(n):
        return server.chat(max_tokens=n, logit_bias=bias)
    for n, reply in zip(lengths, parallel([lambda n=n: ask(n) for n in lengths])):
        assert reply["usage"]["completion_tokens"] == n
        assert reply["choices"][0]["finish_reason"] == "length"
        full = reply["choices"][0]["message"]["content"]
        assert full.startswith("The capital of France is Paris."[:len(full)])


def test_a_stream_flows_while_a_long_prompt_is_read(server):
    """The worst gap beside a prompt of most of the context. Other load on the machine adds to it, so
    the best of three tries counts."""
    gaps = []
    for attempt in range(3):
        times, go = [], threading.Event()

        def read():
            body = {"messages": [{"role": "user", "content": "Count for ever."}], "max_tokens": 700,
                    "reasoning_effort": "none", "logit_bias": {"8174": -100, "8172": -100}}
            for _ in server.stream("/v1/chat/completions", body):
                times.append(time.monotonic())
                if len(times) == 20:
                    go.set()

        def load():
            go.wait(60)
            start = time.monotonic()
            server.chat([{"role": "user", "content": f"{start} " + "hello " * 3800}], max_tokens=1)
            return start, time.monotonic()
        _, (start, end) = parallel([read, load])
        inside = [b - a for a, b in zip(times, times[1:]) if a >= start and b <= end]
        assert len(inside) > 10, "the stream stood still"
        gaps.append((max(inside), statistics.median(inside)))
    print("worst and median gap in seconds:", gaps)
    assert min(g for g, _ in gaps) < 0.25
