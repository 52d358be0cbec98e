"""Many clients at once: nobody sees another's words, streams keep flowing, equal prompts give equal
answers."""
import json
import re
import statistics
import threading
import time

import pytest

from serving import CAPITAL, CLOCK, LONG, WEATHER, Server, join, parallel

WORDS = ["apple", "river", "stone", "tiger", "cloud", "bread", "chair", "pepper"]
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
    strange = []

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
            strange.extend((i, n, w, fields) for w in others)
            seen += WORDS[i] in text
        return seen
    seen = sum(parallel([lambda i=i: client(i) for i in range(8)]))
    assert seen > 0 and len(strange) <= 8 * rounds / 100, (seen, strange)
    # The words are ordinary ones. One that the model says alone too is its own.
    for i, n, word, fields in strange:
        reply = server.chat(echo(WORDS[i], system if kind == "shared" else ()), **fields)
        assert word in json.dumps(reply["choices"][0]["message"]), (WORDS[i], n, word)
    print(f"{8 * rounds} requests, {seen} with their own word, {len(strange)} of the model's own")


def test_equal_prompts_give_equal_answers(server):
    """Pitfall 62: alone, after others, and beside 7 of the same."""
    alone = server.chat()["choices"][0]["message"]["content"]
    assert all(r["choices"][0]["message"]["content"] == alone
               for r in parallel([server.chat] * 8))


STORY = [{"role": "user", "content": "Tell me a long story about a fox, a lighthouse and the sea."}]


def told(server, n=1):
    """[(token, logprob, margin to the next best)] of n answers asked for at once."""
    replies = parallel([lambda: server.chat(STORY, max_tokens=200, logprobs=True, top_logprobs=2)] * n)
    return [[(t["token"], t["logprob"], t["logprob"] - t["top_logprobs"][1]["logprob"])
             for t in r["choices"][0]["logprobs"]["content"]] for r in replies]


def test_eight_at_once_part_at_small_margins_only():
    """Rows are batched differently alone and beside others: the first difference is at a near tie."""
    s = Server("--parallel", "8")
    try:
        alone = told(s)[0]
        assert len(alone) > 10
        for answer in told(s, 8):
            for (token, logprob, margin), other in zip(alone, answer):
                if token != other[0]:
                    assert margin < 0.02, (token, other, margin)
                    break
                assert abs(logprob - other[1]) < 0.05
    finally:
        assert s.close() == 0


def test_eight_at_once_are_equal_to_the_bit_when_asked():
    """--deterministic: beside others, cold and warm, in prompts of other sizes."""
    s = Server("--parallel", "8", "--deterministic")
    try:
        alone = told(s)[0]
        other = [lambda n=n: s.chat([{"role": "user", "content": f"{n} " * n}], max_tokens=60)
                 for n in range(1, 200, 60)]
        answers = parallel([lambda: told(s, 8), *other])[0]
        assert all(a == alone for a in answers) and told(s)[0] == alone
    finally:
        assert s.close() == 0


@pytest.fixture(scope="module")
def exact():
    s = Server("--parallel", "8", "--deterministic")
    yield s
    assert s.close() == 0


ENDLESS = {"8174": -100, "8172": -100}


def spoken(server, prompt, n, **fields):
    """(token, log-probability) of n tokens, past the answer's end."""
    reply = server.chat([{"role": "user", "content": prompt}], max_tokens=n, logit_bias=ENDLESS, logprobs=True,
                        **fields)
    assert reply["usage"]["completion_tokens"] == n and reply["choices"][0]["finish_reason"] == "length"
    return [(t["token"], t["logprob"]) for t in reply["choices"][0]["logprobs"]["content"]]


def test_different_lengths_end_alone(exact):
    """Pitfall 104: a batch of eight whose members end one after another; each says what it says alone."""
    lengths = [1, 2, 3, 5, 50, 100, 200, 400]
    prompts = [f"Tell me about the {w}." for w in WORDS]
    alone = [spoken(exact, p, n) for p, n in zip(prompts, lengths)]
    for _ in range(20 if LONG else 3):
        together = parallel([lambda p=p, n=n: spoken(exact, p, n) for p, n in zip(prompts, lengths)])
        assert together == alone
        prompts, lengths, alone = ([*x[1:], x[0]] for x in (prompts, lengths, alone))


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER, CLOCK], "tool_choice": "required"}], ids=["text", "calls"])
def test_many_behind_one_long_prompt(exact, tools):
    """Pitfalls 100 and 101: eight at once behind 4k of shared system prompt (1k in the short form), which one of them
    reads; each answers or calls as on a server that keeps nothing and serves one at a time."""
    system = {"role": "system", "content": f"You are a careful engineer{'.' * bool(tools)} of some kind. " * (450 if LONG else 110)}

    def ask(server, word):
        reply = server.chat([system, {"role": "user", "content": f"The word is {word}. Weather in Rome?"}],
                            max_tokens=60, **tools)
        m, u = reply["choices"][0]["message"], reply["usage"]
        assert u["prompt_tokens"] > (4096 if LONG else 1000)
        return [m["content"], [c["function"] for c in m.get("tool_calls", [])]], \
            u["prompt_tokens_details"]["cached_tokens"]
    together = parallel([lambda w=w: ask(exact, w) for w in WORDS] * (10 if LONG else 2))
    assert sum(cached > (4000 if LONG else 900) for _, cached in together) >= len(together) - 1
    alone = Server("--parallel", "1", "--deterministic", "--cache-ram", "1", "--cache-disk", "0")
    try:
        for i, word in enumerate(WORDS if LONG else WORDS[:2]):
            want, cached = ask(alone, word)
            assert cached == 0 and all(got == want for got, _ in together[i::8]), (want, together[i::8])
    finally:
        assert alone.close() == 0


def test_answers_do_not_depend_on_history(exact):
    """Pitfall 62: at the start, after ten others, and beside three: the same to the last bit."""
    def ask():
        return spoken(exact, "Say something about the sea and the land.", 60)
    first = ask()
    for n in range(10):
        spoken(exact, f"{n} " * (3 + 40 * n), 5)
    assert ask() == first
    others = [lambda n=n: spoken(exact, f"Other {n} " * (1 + 30 * n), 100) for n in range(3)]
    assert parallel([ask, *others])[0] == first


def test_short_requests_in_used_slots(exact):
    """Pitfall 103: one after another and all slots full; the first tokens are those of a server that has served
    nobody."""
    def ask(server, ids):
        reply = server.post("/v1/completions", {"prompt": ids, "max_tokens": 2, "temperature": 0, "logprobs": 3})[1]
        return reply["choices"][0]["logprobs"]
    prompts = [[(17 * i + 5 * k) % 8000 for k in range(1 + i % 4)] for i in range(24)]
    used = parallel([lambda part=prompts[i::8]: [ask(exact, p) for p in part] for i in range(8)] * 4)
    for i in range(0, 24, 1 if LONG else 5):
        fresh = Server("--parallel", "1", "--deterministic", "--cache-disk", "0")
        try:
            want = ask(fresh, prompts[i])
        finally:
            assert fresh.close() == 0
        assert all(used[k][i // 8] == want for k in range(i % 8, 32, 8)), prompts[i]


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
