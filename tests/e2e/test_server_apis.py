"""/v1/messages and /v1/responses: replies, event sequences, tools, thoughts, errors."""
import json

import pytest

from serving import CAPITAL, CLOCK, WEATHER, Server

TOOLS = [{"name": t["function"]["name"], "description": t["function"]["description"],
          "input_schema": t["function"]["parameters"]} for t in (WEATHER, CLOCK)]
FLAT = [{"type": "function", **t["function"]} for t in (WEATHER, CLOCK)]


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    assert s.close() == 0


def messages(server, expect=200, **fields):
    status, reply = server.post("/v1/messages", {
        "model": "m", "max_tokens": 100, "messages": CAPITAL, "temperature": 0, **fields})
    assert status == expect, reply
    return reply


def message_stream(server, **fields):
    events = list(server.stream("/v1/messages", {
        "model": "m", "max_tokens": 100, "messages": CAPITAL, "temperature": 0, **fields}))
    for name, data, _ in events:
        assert data["type"] == name
    return [data for _, data, _ in events]


def test_message(server):
    m = messages(server)
    assert m["content"] == [{"type": "text", "text": "The capital of France is Paris."}]
    assert (m["type"], m["role"], m["model"], m["stop_reason"], m["stop_sequence"]) == \
        ("message", "assistant", "m", "end_turn", None)
    u = m["usage"]
    assert u["input_tokens"] + u["cache_read_input_tokens"] == 21 and u["output_tokens"] == 7


def test_message_events(server):
    events = message_stream(server)
    kinds = [e["type"] for e in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(e["delta"]["text"] for e in events[3:-3]) == "The capital of France is Paris."
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7


def test_thinking_blocks(server):
    fields = dict(thinking={"type": "enabled", "budget_tokens": 20})
    m = messages(server, **fields)
    kinds = [b["type"] for b in m["content"]]
    assert kinds[0] == "thinking" and m["content"][0]["thinking"] and m["content"][0]["signature"]
    events = message_stream(server, **fields)
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == kinds
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == \
        list(range(len(kinds)))
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta") == \
        m["content"][0]["thinking"]
    assert sum(d["type"] == "signature_delta" for d in deltas) == 1
    history = [*CAPITAL, {"role": "assistant", "content": m["content"]}, *CAPITAL]
    messages(server, messages=history, **fields)


def test_stop_sequence(server):
    m = messages(server, stop_sequences=["zzz", "Paris"])
    assert (m["stop_reason"], m["stop_sequence"]) == ("stop_sequence", "Paris")
    assert m["content"][0]["text"] == "The capital of France is "
    assert messages(server, max_tokens=2)["stop_reason"] == "max_tokens"


def test_tool_use(server):
    """Pitfall 52: input_json_delta."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        fields = dict(tools=TOOLS, tool_choice=choice, max_tokens=300,
                      messages=[{"role": "user", "content": "Weather in Oslo?"}])
        m = messages(server, **fields)
        assert m["stop_reason"] == "tool_use"
        uses = [b for b in m["content"] if b["type"] == "tool_use"]
        assert uses and all(b["id"].startswith("toolu_") for b in uses)
        events = message_stream(server, **fields)
        texts = {}
        for e in events:
            if e["type"] == "content_block_start":
                texts[e["index"]] = [e["content_block"], ""]
            elif e["type"] == "content_block_delta":
                assert e["delta"]["type"] == "input_json_delta"
                texts[e["index"]][1] += e["delta"]["partial_json"]
        assert [(b["name"], json.loads(t)) for b, t in texts.values()] == \
            [(b["name"], b["input"]) for b in uses]
        history = fields["messages"] + [
            {"role": "assistant", "content": m["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": b["id"],
                                          "content": [{"type": "text", "text": "3 degrees"}]}
                                         for b in uses] + [{"type": "text", "text": "So?"}]}]
        messages(server, tools=TOOLS, messages=history)


def test_billing_header_does_not_spoil_the_cache(server):
    """Pitfall 16."""
    def ask(mark):
        return messages(server, max_tokens=1, system=[
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={mark};"},
            {"type": "text", "text": "You are a careful engineer. " * 40,
             "cache_control": {"type": "ephemeral"}}])["usage"]
    ask("a1b2c")
    u = ask("d3e4f")
    assert u["cache_read_input_tokens"] > 200 and u["input_tokens"] < 20, u


def test_count_tokens(server):
    body = {"model": "m", "messages": CAPITAL, "system": "Be brief.", "tools": TOOLS}
    status, reply = server.post("/v1/messages/count_tokens", body)
    u = messages(server, **{k: body[k] for k in ("system", "tools")}, max_tokens=1)["usage"]
    assert status == 200
    assert reply["input_tokens"] == u["input_tokens"] + u["cache_read_input_tokens"]


@pytest.mark.parametrize("fields,word", [
    ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"), ({"what": 1}, "what"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
    ({"mcp_servers": [{}]}, "mcp_servers"), ({"thinking": {"type": "x"}}, "thinking"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"system": 5}, "system"),
    ({"messages": [{"role": "user", "content": "hello world " * 9000}]}, "prompt is too long")])
def test_message_errors(server, fields, word):
    """Pitfall 52: errors in Anthropic's form."""
    reply = messages(server, 400, **fields)
    assert reply["type"] == "error" and reply["error"]["type"] == "invalid_request_error"
    assert word in reply["error"]["message"]


# ---- Responses

def responses(server, expect=200, **fields):
    status, reply = server.post("/v1/responses", {
        "input": CAPITAL[0]["content"], "temperature": 0, "max_output_tokens": 100,
        "reasoning": {"effort": "none"}, **fields})
    assert status == expect, reply
    return reply


def response_events(server, **fields):
    events = list(server.stream("/v1/responses", {
        "input": CAPITAL[0]["content"], "temperature": 0, "max_output_tokens": 100,
        "reasoning": {"effort": "none"}, **fields}))
    for i, (name, data, _) in enumerate(events):
        assert data["type"] == name and data["sequence_number"] == i
    return [data for _, data, _ in events]


def test_response(server):
    r = responses(server, model="m", instructions="Be brief.")
    assert (r["object"], r["status"], r["model"]) == ("response", "completed", "m")
    assert r["output"][0]["content"][0]["type"] == "output_text"
    assert r["usage"]["total_tokens"] == r["usage"]["input_tokens"] + r["usage"]["output_tokens"]
    assert responses(server, max_output_tokens=2)["incomplete_details"] == \
        {"reason": "max_output_tokens"}


def test_response_events(server):
    """Pitfall 52: the sequence that Codex follows."""
    events = response_events(server)
    assert [e["type"] for e in events if not e["type"].endswith("text.delta")] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "The capital of France is Paris."
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text and final["usage"]["output_tokens"] == 7
    assert final["output"][0]["id"] == events[2]["item"]["id"]


def test_response_calls_and_loop(server):
    """Pitfall 20 too: developer items."""
    items = [{"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Be kind."},
             {"type": "message", "role": "user",
              "content": [{"type": "input_text", "text": "Weather in Oslo?"}]}]
    fields = dict(tools=FLAT + [{"type": "web_search"}], max_output_tokens=300,
                  reasoning={"max_tokens": 12})
    for _ in range(3):
        events = response_events(server, input=items, tool_choice="required", **fields)
        kinds = [e["type"] for e in events]
        assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
        output = events[-1]["response"]["output"]
        assert output[0]["type"] == "reasoning"
        calls = [i for i in output if i["type"] == "function_call"]
        deltas = {}
        for e in events:
            if e["type"] == "response.function_call_arguments.delta":
                deltas[e["item_id"]] = deltas.get(e["item_id"], "") + e["delta"]
        for call in calls:
            assert json.loads(call["arguments"]) and deltas[call["id"]] == call["arguments"]
        items += [{k: v for k, v in i.items() if k not in ("content", "status")}
                  if i["type"] == "reasoning" else i for i in output]
        items += [{"type": "function_call_output", "call_id": c["call_id"], "output": "3 degrees"}
                  for c in calls]
    u = responses(server, input=items, **fields)["usage"]
    assert u["input_tokens_details"]["cached_tokens"] > u["input_tokens"] / 2


def test_response_format(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}
    r = responses(server, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert isinstance(json.loads(r["output"][-1]["content"][0]["text"])["n"], int)


@pytest.mark.parametrize("fields,word", [
    ({"previous_response_id": "r"}, "previous_response_id"), ({"background": True}, "background"),
    ({"input": []}, "input"), ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ({"tools": [{"type": "mcp"}]}, "mcp"), ({"reasoning": {"effort": "much"}}, "effort"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ({"unknown": 1}, "unknown")])
def test_response_errors(server, fields, word):
    assert word in responses(server, 400, **fields)["error"]["message"]


# ---- nothing

def test_empty_messages_are_answered(server):
    """The chat format is there to go on from: all forms of an empty message give the same prompt."""
    paths = {"/v1/chat/completions": [[{"role": "user", "content": c}] for c in ("", [], None, [{"type": "text", "text": ""}])]
             + [[{"role": "user"}]],
             "/v1/messages": [[{"role": "user", "content": c}] for c in ("", [], [{"type": "text", "text": ""}])],
             "/v1/responses": ["", [{"role": "user", "content": ""}], [{"role": "user", "content": []}]]}
    tokens = set()
    for path, forms in paths.items():
        for form in forms:
            body = {"input": form, "max_output_tokens": 2} if path == "/v1/responses" else {
                "messages": form, "max_tokens": 2}
            status, reply = server.post(path, body)
            assert status == 200, (path, form, reply)
            u = reply["usage"]
            tokens.add(u["prompt_tokens"] if "prompt_tokens" in u else
                       u["input_tokens"] + u.get("cache_read_input_tokens", 0))
    assert len(tokens) == 1 and tokens.pop() > 5
    for path, key in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        status, reply = server.post(path, {key: [], **({"max_tokens": 1} if key == "messages" else {})})
        assert status == 400 and f"'{key}'" in reply["error"]["message"], "no message is not an empty one"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_an_empty_text_has_nothing_to_go_on_from(server, prompt):
    status, reply = server.post("/v1/completions", {"prompt": prompt})
    assert status == 400 and reply["error"]["param"] == "prompt" and "'prompt' is empty" in reply["error"]["message"]


# ---- what is repeated

@pytest.mark.parametrize("value", ["0.1", "0.6", "0.65", "0.7", "0.123456789012345", "1.0", "1", "0.0", "1e-05", "0.3"])
def test_numbers_come_back_as_they_came(server, value):
    """A reply repeats fields of the request; through a float of 32 bits 0.6 would be 0.6000000238418579."""
    nest = f'{{"a":[{value},-{value},{{"b":{value}}}]}}'
    body = (f'{{"input":"a","max_output_tokens":1,"temperature":{value},"top_p":{value},"metadata":{nest},"tools":'
            f'[{{"type":"function","name":"f","parameters":{{"default":{value}}}}}],"text":{{"verbosity":{value}}}}}')
    _, _, whole = server.request("POST", "/v1/responses", body)
    _, _, stream = server.request("POST", "/v1/responses", body[:-1] + ',"stream":true}')
    for reply, times in ((whole, 1), (stream, 3)):
        for part in (f'"temperature":{value},', f'"top_p":{value},', f'"metadata":{nest}', f'{{"default":{value}}}',
                     f'{{"verbosity":{value}}}'):
            assert reply.count(part.encode()) == times, (part, reply)


def test_numbers_that_were_not_sent_are_short(server):
    """Defaults and what holds without thoughts, where a client sent nothing or null."""
    for more in ({}, {"temperature": None, "top_p": None, "tools": None, "metadata": None}):
        for effort in ("none", "high"):
            status, reply = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, **more,
                                                          "reasoning": {"effort": effort}})
            assert status == 200 and len(repr(reply["temperature"])) <= 4 and len(repr(reply["top_p"])) <= 4
            assert reply["tools"] == [] and reply["metadata"] == {}


# ---- references in schemas

BROKEN = [{"properties": {"a": {"$ref": "#/$defs/x"}}}, {"$ref": "#/$defs/x", "$defs": {"y": {}}},
          {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}}}},
          {"$defs": {"y": {"properties": {"$ref": {"$ref": "#/$defs/x"}}}}},
          {"properties": {"a": {"items": [{}, {"$ref": "#/properties/a/items/x"}]}}},
          {"properties": {"a": {"additionalProperties": {"$ref": "#/properties/b"}}}},
          {"properties": {"a": {"allOf": [{"$ref": "#/$defs/x/y"}]}}, "$defs": {"x": {}}},
          {"properties": {"a": {"$ref": "#/$defs/%00"}}, "$defs": {"": {}}},
          {"properties": {"a": {"if": {"not": {"$ref": "#/$defs/a~b"}}}}, "$defs": {"a/b": {}}}]
SOUND = [{"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}},
         {"properties": {"a": {"$ref": "#/$defs/a~1b%20c%7E0"}}, "$defs": {"a/b c~": {"type": "string"}}},
         {"properties": {"a": {"$ref": "#/$defs/x/1"}}, "$defs": {"x": [{}, {"type": "string"}]}},
         {"properties": {"a": {"type": "string", "default": {"$ref": "#/no"}, "examples": [{"$ref": "#/no"}]}}},
         {"properties": {"a": {"type": "string"}}, "definitions": {"$ref": {"enum": [{"$ref": "#/no"}]}}}]


def ask_with_tool(path, name, schema, choice):
    body = {"messages": CAPITAL, "max_tokens": 1}
    tool = {"name": name, "parameters": schema}
    if path == "/v1/messages":
        choice = {"required": {"type": "any"}}.get(choice, {"type": choice})
        return {**body, "tools": [{"name": name, "input_schema": schema}], "tool_choice": choice}
    if path == "/v1/responses":
        return {"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", **tool}], "tool_choice": choice}
    return {**body, "tools": [{"type": "function", "function": tool}], "tool_choice": choice}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_reference_to_nothing_is_refused(server, path, choice):
    """Whether calls are held to the schema or not: the tool and the reference are named. What only looks like a
    reference is none, and those that lead somewhere are followed."""
    for schema in BROKEN:
        status, reply = server.post(path, ask_with_tool(path, "seek", schema, choice))
        message = reply["error"]["message"] if status == 400 else reply
        assert status == 400 and "tool seek" in message and "'#/" in message, (schema, message)
    for schema in SOUND:
        status, reply = server.post(path, ask_with_tool(path, "seek", schema, choice))
        assert status == 200, (schema, reply)
    for ref in ("other.json#/a", "#anchor"):
        schema = {"properties": {"a": {"$ref": ref}}}
        status, _ = server.post(path, ask_with_tool(path, "seek", schema, choice))
        assert status == (400 if choice == "required" else 200), ref
