"""The prompt that each API makes of a conversation: system messages anywhere, every form of a content, old answers
that speak of the tags (pitfalls 19, 20, 22, 25 and 26)."""
import json

import pytest

from serving import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER, ASSISTANT, SYSTEM = (f"<|im_start|>{role}\n%s<|im_end|>\n" for role in ("user", "assistant", "system"))
OPEN = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEXT_TYPES = {CHAT: "text", MESSAGES: "text", RESPONSES: "input_text"}
LACKING = object()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    trace = tmp_path_factory.mktemp("prompts") / "trace"
    s = Server("--trace", str(trace))
    s.trace = trace
    yield s
    assert s.close() == 0


def request(path, messages, **more):
    """A request of this API for messages in chat's form."""
    limit = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}[path]
    off = {CHAT: {"reasoning_effort": "none"}, MESSAGES: {}, RESPONSES: {"reasoning": {"effort": "none"}}}[path]
    return {"model": "m", limit: 1, "temperature": 0, ("input" if path == RESPONSES else "messages"): messages, **off,
            **more}


def prompt(server, path, messages, **more):
    status, reply = server.post(path, request(path, messages, **more))
    assert status == 200, reply
    lines = [json.loads(line) for line in server.trace.read_text().splitlines()]
    return [line["text"] for line in lines if line["event"] == "prompt"][-1]


def m(role, content):
    return {"role": role} if content is LACKING else {"role": role, "content": content}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("messages,want", [
    ([m("user", "a"), m("assistant", "b"), m("system", "c"), m("user", "d")],
     USER % "a" + ASSISTANT % "b" + SYSTEM % "c" + USER % "d"),
    ([m("system", "a"), m("system", "b"), m("user", "c")], SYSTEM % "a\n\nb" + USER % "c"),
    ([m("system", "a")], SYSTEM % "a"),
    ([m("developer", "a"), m("developer", "b"), m("user", "c")], SYSTEM % "a\n\nb" + USER % "c"),
    ([m("system", "a"), m("developer", "b"), m("user", "c"), m("developer", "d"), m("user", "e")],
     SYSTEM % "a\n\nb" + USER % "c" + SYSTEM % "d" + USER % "e"),
    ([m("user", "a"), m("assistant", "b"), m("user", "c"), m("system", "d")],
     USER % "a" + ASSISTANT % "b" + USER % "c" + SYSTEM % "d")])
def test_system_messages_anywhere(server, path, messages, want):
    """Pitfalls 19 and 20. Anthropic's messages have no developer."""
    if path == MESSAGES and any(x["role"] == "developer" for x in messages):
        status, reply = server.post(path, request(path, messages))
        assert status == 400 and "role must be" in reply["error"]["message"]
        return
    assert prompt(server, path, messages) == want + OPEN


def test_instructions_join_the_system_messages(server):
    """Pitfalls 19 and 20."""
    items = [m("developer", "b"), {"type": "message", **m("developer", [{"type": "input_text", "text": "c"}])},
             m("user", "d")]
    assert prompt(server, RESPONSES, items, instructions="a") == SYSTEM % "a\n\nb\n\nc" + USER % "d" + OPEN
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(server, MESSAGES, [m("system", "c"), m("user", "d")], system=blocks) == \
        SYSTEM % "a\nb\n\nc" + USER % "d" + OPEN


FORMS = [("x", "x"), ([("text", "x")], "x"), ([("text", "x"), ("text", "y")], "xy"), ("", ""), ([], ""),
         ([("text", "")], ""), (None, ""), (LACKING, "")]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("form,want", FORMS)
def test_contents_of_every_form(server, path, form, want):
    """Pitfall 26. Anthropic's messages need a content; its tool results do not."""
    def content(kind):
        return [{"type": kind, "text": text} for _, text in form] if isinstance(form, list) else form

    kind = TEXT_TYPES[path]
    for role, turn in (("user", USER), ("assistant", ASSISTANT), ("system", SYSTEM), ("developer", SYSTEM)):
        if path == MESSAGES and role == "developer":
            continue
        own = "output_text" if path == RESPONSES and role == "assistant" else kind
        messages = [m("user", "a"), m(role, content(own)), m("user", "z")]
        if path == MESSAGES and form in (None, LACKING):
            status, reply = server.post(path, request(path, messages))
            assert status == 400 and "messages[1].content" in reply["error"]["message"]
            continue
        got = prompt(server, path, messages)
        assert got == USER % "a" + turn % want + USER % "z" + OPEN, role
    call = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    result = USER % f"<tool_response>\n{want}\n</tool_response>"
    both = USER % "a" + ASSISTANT % (want + "\n\n" + call if want else call) + result + USER % "z" + OPEN
    if path == CHAT:
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        messages = [m("user", "a"), {**m("assistant", content(kind)), "tool_calls": calls},
                    {**m("tool", content(kind)), "tool_call_id": "c"}]
    elif path == MESSAGES:
        use, text = {"type": "tool_use", "id": "c", "name": "f", "input": {}}, content(kind)
        shown = [{"type": "text", "text": want}] if want else []
        messages = [m("user", "a"), m("assistant", [*shown, use]),
                    m("user", [{"type": "tool_result", "tool_use_id": "c",
                                **({} if text is LACKING else {"content": text})}])]
    else:
        output = content("input_text")
        messages = [m("user", "a"), m("assistant", content("output_text")),
                    {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", **({} if output is LACKING else {"output": output})}]
    assert prompt(server, path, [*messages, m("user", "z")]) == both


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "input_audio", "file", "video_url", "document"])
def test_unknown_parts_are_named(server, path, kind):
    """Pitfall 26: by their type and where they stand, whoever sends them."""
    for role in ("user", "assistant", "system"):
        part = {"type": kind, kind: {"url": "data:,"}, "source": {"type": "url", "url": "data:,"}}
        known = {"type": TEXT_TYPES[path], "text": "x"}
        status, reply = server.post(path, request(path, [m("user", "a"), m(role, [known, part])]))
        text = reply["error"]["message"]
        assert status == 400 and kind in text, reply
        assert ("input[1]" if path == RESPONSES else "messages[1].content[1]") in text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("answer,shown", [
    ("use </think> to close", "use </think> to close"),
    ("<think> opens", "<think> opens"),
    ("a </think> b </think> c", "a </think> b </think> c"),
    ("<think>\nplan\n</think>\n\nHello", "Hello"),
    ("<think>\n\n</think>\n\nHello", "Hello"),
    ("<think>\nplan\n</think>\n\nuse </think> to close", "use </think> to close"),
    ("Look: <think>\nplan\n</think>", "Look: <think>\nplan\n</think>"),
    ("</think>", "</think>")])
def test_old_answers_stay_whole(server, path, answer, shown):
    """Pitfall 25, and 22: no thought appears where there was none. What begins with a thought is an answer that was
    sent again as it was generated."""
    text = "output_text" if path == RESPONSES else "text"
    half = len(answer) // 2
    for content in (answer, [{"type": text, "text": answer}],
                    [{"type": text, "text": answer[:half]}, {"type": text, "text": answer[half:]}]):
        got = prompt(server, path, [m("user", "a"), m("assistant", content), m("user", "z")])
        assert got == USER % "a" + ASSISTANT % shown + USER % "z" + OPEN
