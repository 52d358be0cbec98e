"""The official openai and anthropic packages, unmodified, against calla serve.

They are installed once into a virtual environment under build/ (or CALLA_CLIENTS, a folder of one that
has them); where that cannot be done the tests are skipped."""
import os
import subprocess
import sys

import pytest

from serving import ROOT, Server

HOME = os.environ.get("CALLA_CLIENTS", os.path.join(ROOT, "build", "clients"))
PYTHON = os.path.join(HOME, "bin", "python")


@pytest.fixture(scope="module")
def python():
    check = [PYTHON, "-c", "import openai, anthropic, pydantic"]
    if os.path.exists(PYTHON) and subprocess.run(check, stderr=subprocess.DEVNULL).returncode == 0:
        return PYTHON
    try:
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True, timeout=120,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run([PYTHON, "-m", "pip", "install", "-q", "openai", "anthropic", "pydantic"],
                       check=True, timeout=240, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError) as e:
        pytest.skip(f"the openai and anthropic packages cannot be installed here: {e}")
    return PYTHON


@pytest.fixture(scope="module")
def server():
    s = Server("--api-key", "secret")
    yield s
    assert s.close() == 0


HEAD = """
import json, sys
import openai, anthropic, pydantic
URL = sys.argv[1]
oa = openai.OpenAI(base_url=URL + "/v1", api_key="secret", max_retries=0)
an = anthropic.Anthropic(base_url=URL, api_key="secret", max_retries=0)
USER = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
COLD = {"temperature": 0} # no argument of the package any more
FAST = dict(model="m", temperature=0, reasoning_effort="none", max_tokens=300)
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12},
    "days": {"type": "integer"}}, "required": ["city", "days"]}}}
OWN = {"name": "get_weather", "description": "Weather", "input_schema": TOOL["function"]["parameters"]}
class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    people: int
def raises(kind, call):
    try:
        call()
    except kind as e:
        return e
    raise AssertionError(f"{kind} was not raised")
"""

SCRIPTS = {
    "openai_chat": """
r = oa.chat.completions.create(messages=USER, **FAST)
assert r.choices[0].message.content == PARIS and r.usage.completion_tokens == 7
""",
    "openai_stream": """
with oa.chat.completions.create(messages=USER, stream=True, stream_options={"include_usage": True},
                                **FAST) as s:
    chunks = list(s)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == PARIS
assert chunks[-1].usage.completion_tokens == 7
with oa.chat.completions.stream(messages=USER, **FAST) as s:
    for event in s:
        pass
    assert s.get_final_completion().choices[0].message.content == PARIS
""",
    "openai_tools": """
history = [{"role": "user", "content": "Weather in Oslo?"}]
for turn in range(3):
    r = oa.chat.completions.create(messages=history, tools=[TOOL], tool_choice="required",
                                   parallel_tool_calls=False, **FAST)
    m = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and len(m.tool_calls) == 1
    assert set(json.loads(m.tool_calls[0].function.arguments)) == {"city", "days"}
    history += [m, {"role": "tool", "tool_call_id": m.tool_calls[0].id, "content": "3 degrees"}]
r = oa.chat.completions.create(messages=history, tools=[TOOL], **FAST)
assert r.choices[0].message
""",
    "openai_two_calls": """
# The end of the answer is biased against, so that calls follow each other until the limit.
ask = dict(messages=[{"role": "user", "content": "Weather in Oslo and Rome?"}], tools=[TOOL],
           tool_choice="required", logit_bias={"8174": -100, "8172": -100}, **FAST)
calls = oa.chat.completions.create(**ask).choices[0].message.tool_calls
assert len(calls) >= 2 and len({c.id for c in calls}) == len(calls)
for c in calls[:2]:
    assert set(json.loads(c.function.arguments)) == {"city", "days"}
seen = {}
for chunk in oa.chat.completions.create(stream=True, **ask):
    for d in chunk.choices[0].delta.tool_calls or []:
        seen[d.index] = seen.get(d.index, "") + (d.function.arguments or "")
assert [seen[i] for i in sorted(seen)] == [c.function.arguments for c in calls]
""",
    "openai_structured": """
r = oa.chat.completions.parse(messages=USER, response_format=City, **FAST)
assert isinstance(r.choices[0].message.parsed, City)
""",
    "openai_logprobs": """
r = oa.chat.completions.create(messages=USER, logprobs=True, top_logprobs=3, **FAST)
tokens = r.choices[0].logprobs.content
assert "".join(t.token for t in tokens) == PARIS and len(tokens[0].top_logprobs) == 3
""",
    "openai_completions_and_models": """
assert oa.completions.create(model="m", prompt="Once", max_tokens=5).usage.completion_tokens <= 5
assert [m.id for m in oa.models.list()] == ["demo"] and oa.models.retrieve("demo").id == "demo"
raises(openai.NotFoundError, lambda: oa.models.retrieve("x"))
""",
    "openai_errors": """
e = raises(openai.BadRequestError, lambda: oa.chat.completions.create(
    messages=USER, extra_body={"magic": 1}, **FAST))
assert e.body["param"] == "magic"
e = raises(openai.BadRequestError, lambda: oa.chat.completions.create(
    messages=[{"role": "user", "content": "hello world " * 9000}], **FAST))
assert e.code == "context_length_exceeded"
raises(openai.NotFoundError, lambda: oa.files.list())
bad = openai.OpenAI(base_url=URL + "/v1", api_key="wrong", max_retries=0)
raises(openai.AuthenticationError, lambda: bad.models.list())
""",
    "openai_responses": """
r = oa.responses.create(model="m", input="What is the capital of France?", temperature=0,
                        reasoning={"effort": "none"})
assert r.output_text == PARIS
with oa.responses.stream(model="m", input="What is the capital of France?", temperature=0,
                         reasoning={"effort": "none"}) as s:
    kinds = [e.type for e in s]
    assert s.get_final_response().output_text == PARIS
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
flat = {"type": "function", **TOOL["function"], "strict": True}
items = [{"role": "user", "content": "Weather in Oslo?"}]
for turn in range(2):
    with oa.responses.stream(model="m", input=items, tools=[flat], tool_choice="required",
            temperature=0, parallel_tool_calls=False, reasoning={"effort": "none"}) as s:
        list(s)
        r = s.get_final_response()
    call = [i for i in r.output if i.type == "function_call"][0]
    assert set(json.loads(call.arguments)) == {"city", "days"}
    items += [{"type": "function_call", "name": call.name, "arguments": call.arguments,
               "call_id": call.call_id},
              {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}]
r = oa.responses.parse(model="m", input=items, text_format=City, temperature=0,
                       reasoning={"effort": "none"})
assert isinstance(r.output_parsed, City)
""",
    "anthropic_message": """
m = an.messages.create(model="m", max_tokens=100, messages=USER, extra_body=COLD)
assert m.content[0].text == PARIS and m.stop_reason == "end_turn"
assert an.messages.count_tokens(model="m", messages=USER).input_tokens == 21
""",
    "anthropic_stream": """
with an.messages.stream(model="m", max_tokens=100, messages=USER, extra_body=COLD) as s:
    assert "".join(s.text_stream) == PARIS
    assert s.get_final_message().usage.output_tokens == 7
with an.messages.stream(model="m", max_tokens=2000, messages=USER,
                        thinking={"type": "enabled", "budget_tokens": 1024},
                        extra_body={**COLD, "thinking": {"type": "enabled", "budget_tokens": 30}}) as s:
    m = s.get_final_message()
assert m.content[0].type == "thinking" and m.content[0].thinking and m.content[0].signature
""",
    "anthropic_tools": """
history = [{"role": "user", "content": "Weather in Oslo?"}]
for turn in range(2):
    with an.messages.stream(model="m", max_tokens=300, messages=history, tools=[OWN], extra_body=COLD,
            tool_choice={"type": "any", "disable_parallel_tool_use": True}) as s:
        m = s.get_final_message()
    uses = [b for b in m.content if b.type == "tool_use"]
    assert m.stop_reason == "tool_use" and len(uses) == 1 and set(uses[0].input) == {"city", "days"}
    history += [{"role": "assistant", "content": m.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": uses[0].id,
                                              "content": "3 degrees"}]}]
assert an.messages.create(model="m", max_tokens=20, messages=history, tools=[OWN]).content is not None
""",
    "anthropic_errors": """
raises(anthropic.BadRequestError, lambda: an.messages.create(
    model="m", max_tokens=5, messages=USER, extra_body={"magic": 1}))
e = raises(anthropic.BadRequestError, lambda: an.messages.create(
    model="m", max_tokens=5, messages=[{"role": "user", "content": "hello world " * 9000}]))
assert "prompt is too long" in str(e)
bad = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
raises(anthropic.AuthenticationError, lambda: bad.messages.create(
    model="m", max_tokens=5, messages=USER))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_client(python, server, name):
    p = subprocess.run([python, "-c", HEAD + SCRIPTS[name], server.url], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=120)
    assert p.returncode == 0, p.stdout.decode()[-3000:]
