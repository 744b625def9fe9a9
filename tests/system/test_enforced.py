"""JSON schemas and tool choices that a real engine is held to, over HTTP: a model of random weights would never say so by
itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from scripts.harness import Harness
from tests.system.test_pipeline import TEMPLATE

pytestmark = [pytest.mark.system, pytest.mark.slow]

CALLS = "{# <tool_call> {{ tool_call.name }} #}"
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "find")
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
HELLO: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 1.0, "max_tokens": 200}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    from fixtures.tiny_model import build

    folder: Path = build(
        tmp_path_factory.mktemp("models") / "caller", chat_template=CALLS + TEMPLATE,
        extra_tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    )  # fmt: skip
    with Harness("--api-processes", "1", "--slots", "8", model=folder) as harness:
        yield openai.OpenAI(base_url=harness.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    wanted = HELLO | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    choice = client.chat.completions.create(**wanted).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name in ("look", "find")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    arguments, content = "", ""
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for one in chunk.choices:
            content += one.delta.content or ""
            arguments += "".join(part.function.arguments or "" for part in one.delta.tool_calls or [] if part.function)
    assert (arguments, content) == (call.function.arguments, "")


def test_a_named_function_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "find"}}
    reply = client.chat.completions.create(**HELLO, tools=TOOLS, tool_choice=named, n=4)
    assert {[call.function.name for call in one.message.tool_calls or []][0] for one in reply.choices} == {"find"}


def test_thinking_comes_before_an_answer_that_is_json(client: openai.OpenAI) -> None:
    # Random weights never close their reasoning by themselves: the end of it is made likely.
    tokens = client.post("/../tokenize", body={"model": "m", "prompt": "</think>"}, cast_to=dict)["tokens"]
    reply = client.chat.completions.create(
        **HELLO, response_format=FORMAT, reasoning_effort="low", logit_bias={str(tokens[0]): 8}
    )
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(message.content or ""), SCHEMA)
    assert "</think>" not in (message.content or "") and hasattr(message, "reasoning_content")


def test_a_call_that_no_format_can_hold_is_refused_before_it_starts(client: openai.OpenAI) -> None:
    broken: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "wrong"}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**HELLO, tools=broken, tool_choice="required")
    assert refused.value.param == "tools" and "tools[0].function.parameters" in str(refused.value)
