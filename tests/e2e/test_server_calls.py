"""Calls that the grammar holds to the form, in every API, streamed and whole (pitfalls 28, 29, 31, 37 and 38). What a
free answer's calls become is tested with a scripted model in tests/unit/test_answers.c."""
import json

import pytest

from serving import CLOCK, LONG, WEATHER, Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = [{"role": "user", "content": "Weather in Oslo?"}]
VALUES = {"i": -12, "n": 1.5, "b": True, "z": None, "l": [1, 2, 3], "o": {"a": {"b": [True, None]}, "c": "x"},
          "e": "x", "t": "true", "s": "007", "q": "a \"b\" \\ \U0001f642"}
TYPES = {"i": "integer", "n": "number", "b": "boolean", "z": ["string", "null"], "l": "array", "o": "object"}
PUT = {"type": "function", "function": {"name": "put", "description": "Keeps values", "parameters": {
    "type": "object", "required": list(VALUES), "properties": {
        name: {**({"type": TYPES[name]} if name in TYPES else {}), "enum": [value]} for name, value in VALUES.items()}}}}


@pytest.fixture(scope="module")
def server():
    """The same answer to the same request, whatever the cache holds."""
    s = Server("--deterministic")
    yield s
    assert s.close() == 0


def body(path, tools, choice, limit, thinking=0, **more):
    functions = [t["function"] for t in tools]
    named = isinstance(choice, dict)
    if path == CHAT:
        return {"messages": ASK, "tools": tools, "max_tokens": limit, "temperature": 0, "thinking_budget": thinking,
                "tool_choice": {"type": "function", "function": choice} if named else choice, **more}
    if path == MESSAGES:
        return {"model": "m", "messages": ASK, "max_tokens": limit, "temperature": 0,
                "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in functions],
                "tool_choice": {"type": "tool", **choice} if named else {"type": "any" if choice == "required" else choice},
                **({"thinking": {"type": "enabled", "budget_tokens": thinking}} if thinking else {}), **more}
    return {"input": ASK, "tools": [{"type": "function", **f} for f in functions], "max_output_tokens": limit,
            "temperature": 0, "tool_choice": {"type": "function", **choice} if named else choice,
            "reasoning": {"max_tokens": thinking}, **more}


def whole(server, path, request):
    """(thought, text, [(name, arguments)], why it ended) of a reply that is no stream."""
    status, r = server.post(path, request)
    assert status == 200, r
    if path == CHAT:
        m, end = r["choices"][0]["message"], r["choices"][0]["finish_reason"]
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in m.get("tool_calls", [])]
        assert len({c["id"] for c in m.get("tool_calls", [])}) == len(calls)
        return m.get("reasoning_content", ""), m["content"] or "", calls, end
    if path == MESSAGES:
        uses = [b for b in r["content"] if b["type"] == "tool_use"]
        assert len({b["id"] for b in uses}) == len(uses)
        return ("".join(b.get("thinking", "") for b in r["content"]), "".join(b.get("text", "") for b in r["content"]),
                [(b["name"], b["input"]) for b in uses], r["stop_reason"])
    items = {k: [i for i in r["output"] if i["type"] == k] for k in ("reasoning", "message", "function_call")}
    assert len({i["call_id"] for i in items["function_call"]}) == len(items["function_call"])
    return ("".join(i["content"][0]["text"] for i in items["reasoning"]),
            "".join(i["content"][0]["text"] for i in items["message"]),
            [(i["name"], json.loads(i["arguments"])) for i in items["function_call"]], r["status"])


def streamed(server, path, request):
    """The same, put together from the events as a client does."""
    thought, text, calls, end = "", "", [], None
    for name, e, _ in server.stream(path, request):
        if e == "[DONE]":
            continue
        if path == CHAT:
            c = e["choices"][0]
            thought += c["delta"].get("reasoning_content") or ""
            text += c["delta"].get("content") or ""
            end = c["finish_reason"] or end
            for d in c["delta"].get("tool_calls", []):
                if "id" in d:
                    calls.append([d["function"]["name"], ""])
                assert d["index"] == len(calls) - 1
                calls[-1][1] += d["function"].get("arguments", "")
        elif path == MESSAGES:
            if name == "content_block_start" and e["content_block"]["type"] == "tool_use":
                calls.append([e["content_block"]["name"], ""])
            d = e.get("delta", {})
            thought += d.get("thinking", "")
            text += d.get("text", "")
            end = d.get("stop_reason", end)
            if "partial_json" in d:
                calls[-1][1] += d["partial_json"]
        else:
            if name == "response.output_item.added" and e["item"]["type"] == "function_call":
                calls.append([e["item"]["name"], ""])
            thought += e["delta"] if name == "response.reasoning_text.delta" else ""
            text += e["delta"] if name == "response.output_text.delta" else ""
            if name == "response.function_call_arguments.delta":
                calls[-1][1] += e["delta"]
            end = e.get("response", {}).get("status", end)
    return thought, text, [(n, json.loads(a)) for n, a in calls], end


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("choice", ["required", {"name": "put"}])
@pytest.mark.parametrize("thinking", [0, 16])
def test_values_keep_their_types(server, path, choice, thinking):
    """Pitfalls 29 and 37: required and named choices, after a thought and without."""
    request = body(path, [PUT], choice, 600, thinking, **({} if path == MESSAGES else {"parallel_tool_calls": False}))
    if path == MESSAGES and choice == "required":
        request["tool_choice"]["disable_parallel_tool_use"] = True
    for ask in (whole, streamed):
        thought, text, calls, end = ask(server, path, request)
        assert bool(thought) == bool(thinking) and text == ""
        assert json.dumps(calls) == json.dumps([("put", VALUES)])
        assert end in ("tool_calls", "tool_use", "completed")


def test_one_function_many_times(server):
    """Pitfalls 29 and 38: an answer that may not end goes on calling; each call has its arguments and its id."""
    request = body(CHAT, [WEATHER], "required", 300, logit_bias={"8174": -100, "8172": -100})
    thought, text, calls, end = whole(server, CHAT, request)
    assert len(calls) > 3 and end == "length"
    for name, arguments in calls[:-1]:
        assert name == "get_weather"
        assert isinstance(arguments["city"], str) and isinstance(arguments["days"], int) and len(arguments) == 2
    assert streamed(server, CHAT, request) == (thought, text, calls, end)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_cut_anywhere(server, path):
    """Pitfalls 28 and 31: the limit may come after any token, within a tag or a value; both forms tell the same."""
    ends = set()
    for limit in range(1, 70, 1 if LONG else 9):
        request = body(path, [WEATHER, PUT], "required", limit, 8)
        got = whole(server, path, request)
        assert streamed(server, path, request) == got, limit
        ends.add(got[3])
    assert ends & {"length", "max_tokens", "incomplete"}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_streams_are_whole_answers(server, path):
    """Pitfall 28: 200 answers of the model's own at a high temperature, with tools at hand and the tag that opens a
    call made likely; eight of them in the short form."""
    opener = server.post("/tokenize", {"content": "<tool_call>", "parse_special": True})[1]["tokens"][0]
    called = 0
    for seed in range(200 if LONG else 8):
        more = {"temperature": 1 if path == MESSAGES else 1.5}
        if path != MESSAGES:
            more["seed"] = seed
        if path == CHAT:
            more["logit_bias"] = {str(opener): seed % 4 * 3}
        request = body(path, [WEATHER, CLOCK], "auto", 60, seed % 3 * 8, **more)
        if path == MESSAGES:  # has no seed: another text for another answer
            request.update(temperature=0, messages=[{"role": "user", "content": f"Weather in Oslo on day {seed}?"}])
        got = whole(server, path, request)
        assert streamed(server, path, request) == got, seed
        called += bool(got[2])
    assert called or path != CHAT
