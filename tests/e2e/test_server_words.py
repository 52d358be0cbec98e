"""Pitfall 59: keywords and names of requests are taken by their whole length: a zero character, at which C sees the end of a
text, makes another word of them, which is refused by its place. Texts may hold zero characters."""
import copy
import json

import pytest

from serving import CAPITAL, Server

# Where a string is content, or ignored, and may be any text.
FREE = {"content", "text", "thinking", "reasoning_content", "output", "system", "input", "description",
        "instructions", "encrypted_content", "tool_call_id", "call_id", "id", "tool_use_id", "signature", "user",
        "prompt", "title", "enum", "data"}

SCHEMA = {"type": "object", "title": "t", "properties": {
    "a": {"type": ["string", "null"]}, "b": {"$ref": "#/$defs/d"}, "c": {"type": "string", "pattern": "[a-c]+"},
    "d": {"type": "string", "format": "date"}, "e": {"enum": ["x", "y"]}, "f": {"allOf": [
        {"type": "object", "properties": {"g": {"type": "integer"}}}, {"type": "object", "properties": {
            "h": {"type": "array", "items": {"type": "boolean"}}}}]}},
    "required": ["a", "b"], "$defs": {"d": {"type": "number"}}}
FLAT = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/d"}}, "required": ["a"],
        "$defs": {"d": {"type": "number"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "t", "parameters": FLAT}}
CHAT = {"model": "m", "stop": ["xyzzy", "plugh"], "user": "u", "reasoning_effort": "none", "modalities": ["text"],
        "messages": [{"role": "system", "content": "a"}, {"role": "developer", "content": "a"},
                     {"role": "user", "content": [{"type": "text", "text": "a"}]},
                     {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [
                         {"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                     {"role": "tool", "tool_call_id": "c", "content": "a"}, *CAPITAL]}
MESSAGES = {"model": "m", "system": [{"type": "text", "text": "a"}], "stop_sequences": ["xyzzy"],
            "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "a", "signature": "s"},
                    {"type": "redacted_thinking", "data": "a"},
                    {"type": "text", "text": "a"}, {"type": "tool_use", "id": "i", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": [
                    {"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "f"}]}]}, *CAPITAL],
            "tools": [{"type": "custom", "name": "f", "description": "t", "input_schema": FLAT}]}
RESPONSES = {"model": "m", "instructions": "a", "reasoning": {"effort": "none"}, "input": [
                 {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                 {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                 {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                 {"type": "function_call", "name": "f", "namespace": "n", "arguments": "{}", "call_id": "c"},
                 {"type": "function_call_output", "call_id": "c", "output": "a"}, *CAPITAL],
             "tools": [{"type": "function", "name": "f", "description": "t", "parameters": FLAT},
                       {"type": "namespace", "name": "n", "tools": [
                           {"type": "function", "name": "g", "parameters": FLAT}]}, {"type": "web_search"}]}
FORMS = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
BODIES = {
    "chat": ("/v1/chat/completions", CHAT),
    "auto": ("/v1/chat/completions", {**CHAT, "tools": [FUNCTION], "tool_choice": "auto"}),
    "none": ("/v1/chat/completions", {"messages": CAPITAL, "tools": [FUNCTION], "tool_choice": "none"}),
    "required": ("/v1/chat/completions", {"messages": CAPITAL, "tools": [FUNCTION], "tool_choice": "required"}),
    "named": ("/v1/chat/completions", {"messages": CAPITAL, "tools": [FUNCTION], "tool_choice": {
        "type": "function", "function": {"name": "f"}}}),
    "schema": ("/v1/chat/completions", {"messages": CAPITAL, "response_format": FORMS}),
    "object": ("/v1/chat/completions", {"messages": CAPITAL, "response_format": {"type": "json_object"}}),
    "text": ("/v1/chat/completions", {"messages": CAPITAL, "response_format": {"type": "text"}, "stop": "xyzzy",
                                      "reasoning": {"effort": "none"}}),
    "template": ("/apply-template", CHAT),
    "completions": ("/v1/completions", {"model": "m", "prompt": "a", "stop": "xyzzy"}),
    "messages": ("/v1/messages", MESSAGES),
    "count": ("/v1/messages/count_tokens", {**MESSAGES, "tool_choice": {"type": "auto"}}),
    "any": ("/v1/messages", {"messages": CAPITAL, "tools": MESSAGES["tools"], "tool_choice": {"type": "any"}}),
    "tool": ("/v1/messages", {"messages": CAPITAL, "tools": MESSAGES["tools"], "tool_choice": {
        "type": "tool", "name": "f"}}),
    "format": ("/v1/messages", {"messages": CAPITAL, "thinking": {"type": "adaptive"}, "output_config": {
        "format": {"type": "json_schema", "schema": SCHEMA}}}),
    "responses": ("/v1/responses", {**RESPONSES, "tool_choice": "auto"}),
    "response text": ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}),
}


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    assert s.close() == 0


def words(value, path=()):
    """The paths to all strings."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from words(inner, (*path, key))


def is_free(at, name):
    keys = [k for k in at if isinstance(k, str)]
    # Where no form is held to, the parameters of tools are told to the model as they are; a $ref must
    # lead somewhere all the same.
    told = ("parameters" in keys or "input_schema" in keys) and keys[-1] != "$ref"
    unread = keys[0] in ("model", "stop", "stop_sequences", "modalities") and name in ("template", "count")
    return keys[-1] in FREE or unread or (told and name not in ("required", "named", "any", "tool"))


@pytest.mark.parametrize("name", BODIES)
def test_a_zero_character_makes_another_word(server, name):
    path, body = BODIES[name]
    limit = {"/v1/responses": {"max_output_tokens": 1}, "/v1/messages/count_tokens": {}, "/apply-template": {}}
    body = {**body, **limit.get(path, {"max_tokens": 1})}
    status, reply = server.post(path, body)
    assert status == 200, reply
    found = list(words(body))
    for at in found:
        for zero in ("\0", "\0x"):
            changed = copy.deepcopy(body)
            inner = changed
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] += zero
            status, reply = server.post(path, changed)
            if is_free(at, name):
                assert status == 200, (at, reply)
                continue
            assert status == 400, (at, json.dumps(reply)[:300])
            error = reply["error"]
            assert any(isinstance(k, str) and k in error["message"] for k in at), (at, error)
