"""Requests as coding agents sent them to a running server (tests/data/clients: shape, fields and names
are theirs, texts are not), and what such agents need of the replies."""
import copy
import glob
import json
import os

import pytest

from serving import ROOT, Server

FILES = sorted(glob.glob(os.path.join(ROOT, "tests", "data", "clients", "*.json")))
LAST = {"/v1/responses": ("response.completed", "response.incomplete"),
        "/v1/messages": ("message_stop",), "/v1/chat/completions": (None,)}


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    assert s.close() == 0


def load(name):
    with open(name if "/" in name else f"{ROOT}/tests/data/clients/{name}.json") as f:
        return json.load(f)


def limited(path, body, tokens=12):
    name = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    return dict(body, **{name: tokens, "stream": True})


def ask(server, path, body):
    """(cached, read) tokens of a request; its stream must end as it should."""
    plain = path.split("?")[0]
    events = list(server.stream(path, limited(plain, body)))
    assert events[-1][0] in LAST[plain], events[-1]
    if plain == "/v1/responses":
        u = events[-1][1]["response"]["usage"]
        cached = u["input_tokens_details"]["cached_tokens"]
        return cached, u["input_tokens"] - cached
    if plain == "/v1/messages":
        u = [e for _, e, _ in events if e["type"] == "message_delta"][-1]["usage"]
        return u["cache_read_input_tokens"], u["input_tokens"]
    u = [e for _, e, _ in events if e != "[DONE]" and e.get("usage")][-1]["usage"]
    cached = u["prompt_tokens_details"]["cached_tokens"]
    return cached, u["prompt_tokens"] - cached


@pytest.mark.parametrize("name", FILES, ids=[os.path.basename(f)[:-5] for f in FILES])
def test_requests_are_accepted(server, name):
    """And each goes on from the one before: the head of instructions and tools is not read again."""
    client = load(name)
    for i, body in enumerate(client["requests"]):
        cached, read = ask(server, client["path"], body)
        if i:
            assert cached > read, (i, cached, read)


def prompt_of(server, tmp_path, body, path):
    trace = tmp_path / "trace"
    trace.unlink(missing_ok=True)
    s = Server("--trace", str(trace))
    try:
        ask(s, path, body)
    finally:
        assert s.close() == 0
    return json.loads(trace.read_text().splitlines()[0])["text"]


def test_functions_of_a_namespace(server, tmp_path):
    """The model knows them by one name; the client gets its two parts back, and sends them again."""
    client = load("codex")
    body = dict(client["requests"][0], tool_choice={"type": "function",
                                                    "name": "multi_agent_v1__wait_agent"})
    events = list(server.stream("/v1/responses", limited("/v1/responses", body, 400)))
    items = [e["item"] for name, e, _ in events if name in ("response.output_item.added",
                                                            "response.output_item.done")]
    calls = [i for i in items if i["type"] == "function_call"]
    assert calls and all((c["namespace"], c["name"]) == ("multi_agent_v1", "wait_agent")
                         for c in calls)
    assert all("namespace" not in i for i in items if i["type"] != "function_call")
    text = prompt_of(server, tmp_path, client["requests"][1], client["path"])
    assert "<function=multi_agent_v1__wait_agent>" in text and "<function=get_goal>" in text
    for wrong in ([{"type": "namespace", "name": "x"}], [{"type": "namespace", "tools": []}],
                  [{"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "y"}]}],
                  [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}],
                  [{"type": "namespace", "name": "x", "tools": [5]}], [5], [{"type": "custom"}]):
        status, reply = server.post("/v1/responses", dict(body, tools=wrong, stream=False,
                                                          tool_choice="auto"))
        assert status == 400 and "tools[0]" in reply["error"]["message"], reply


def test_deferred_tools(server, tmp_path):
    """A tool with defer_loading is not in the head, which the next such tool does not change; where a
    tool_reference names it the model reads what it is."""
    client = load("claude-code")
    body = client["requests"][1]
    text = prompt_of(server, tmp_path, body, client["path"])
    head, rest = text.split("<|im_end|>", 1)
    assert '"WebFetch"' not in head and '"ToolSearch"' in head
    assert rest.count('<functions>\n<function>{"description":') == 1 and '"name":"WebFetch"' in rest
    more = copy.deepcopy(body)
    more["tools"].append({"name": "later", "input_schema": {}, "defer_loading": True})
    ask(server, client["path"], body)
    cached, read = ask(server, client["path"], more)
    assert cached > read
    # It can be called, and one that the list does not have is named and no more.
    more["tool_choice"] = {"type": "tool", "name": "later"}
    more.pop("thinking", None)
    events = list(server.stream(client["path"], limited("/v1/messages", more, 200)))
    uses = [e["content_block"] for _, e, _ in events if e["type"] == "content_block_start"]
    assert [u["name"] for u in uses if u["type"] == "tool_use"] == ["later"]
    lost = copy.deepcopy(body)
    lost["messages"][-1]["content"][0]["content"] = [
        {"type": "text", "text": "found: "}, {"type": "tool_reference", "tool_name": "gone"}]
    assert '<function>{"name":"gone"}</function>' in prompt_of(server, tmp_path, lost,
                                                               client["path"])
    for wrong in ({"type": "tool_reference"}, {"type": "image"}, 5):
        lost["messages"][-1]["content"][0]["content"] = [wrong]
        assert server.post(client["path"], lost)[0] == 400
