"""Reasoning and tool calls over HTTP: a stream's deltas, joined, are the whole reply."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.harness import Harness, script
from tests.system.conftest import scripted

pytestmark = [pytest.mark.system, pytest.mark.slow]

# A template that shows tools, and opens a reasoning block when the client asks for thinking.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}{{ '<think>\n' }}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "find")
]
LOOK = ["<tool", '_call>\n{"name": "lo', 'ok", "argum', 'ents": {"city', '": "Köln', '"}}', "\n</tool_", "call>"]
FIND = ['<tool_call>{"name": "find", "arguments": {}}</tool_call>']


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    from fixtures.tiny_model import build

    with scripted(build(tmp_path_factory.mktemp("models") / "thinker", chat_template=TEMPLATE)) as harness:
        yield harness


class Reply:
    """What a client made of a reply, whole or streamed."""

    def __init__(self) -> None:
        self.content: str | None = None
        self.reasoning = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.deltas: list[str] = []

    def told(self) -> tuple[Any, ...]:
        """Everything that a whole reply and a stream must agree on; ids are random."""
        calls = [(call["name"], call["arguments"]) for _, call in sorted(self.calls.items())]
        return self.content, self.reasoning, calls, self.finish, self.usage

    def add(self, delta: dict[str, Any]) -> None:
        self.deltas += [name for name in ("content", "reasoning_content", "tool_calls") if delta.get(name)]
        if delta.get("content"):
            self.content = (self.content or "") + delta["content"]
        self.reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            call = self.calls.setdefault(part.get("index", len(self.calls)), {"name": "", "arguments": ""})
            assert ("id" in part) == (not call["name"]), "the id comes once"
            call["id"] = part.get("id", call.get("id"))
            call["name"] += part["function"].get("name", "")
            call["arguments"] += part["function"]["arguments"]


def both(harness: Harness, tokens: list[str], **fields: Any) -> tuple[Reply, Reply]:
    """The same request, whole and streamed."""
    # Escaped: a template marker of the script would otherwise be one in the prompt.
    content = script(tokens=tokens, rate=0).replace("<", "\\u003c")
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 1, **fields}
    url = harness.url + "/v1/chat/completions"
    whole, streamed = Reply(), Reply()
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    whole.add(choice["message"])
    whole.content = choice["message"]["content"]
    whole.finish, whole.usage = choice["finish_reason"], answer.json()["usage"]
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for one in event["choices"]:
                streamed.add(one["delta"])
                streamed.finish = one["finish_reason"] or streamed.finish
            streamed.usage = event.get("usage") or streamed.usage
    if not streamed.calls:
        streamed.content = streamed.content or ""
    assert streamed.told() == whole.told()
    return whole, streamed


def test_reasoning_has_its_own_field(thinker: Harness) -> None:
    whole, streamed = both(thinker, ["<th", "ink>\nI ", "see", ".</", "think", ">\n\nHi", " <b>"])
    assert (whole.reasoning, whole.content, whole.finish) == ("\nI see.", "\n\nHi <b>", "stop")
    assert whole.usage["completion_tokens"] == 7
    assert whole.usage["completion_tokens_details"]["reasoning_tokens"] == 3
    assert streamed.deltas.index("content") > streamed.deltas.index("reasoning_content")
    assert streamed.deltas.count("reasoning_content") > 1


def test_a_template_may_open_the_reasoning(thinker: Harness) -> None:
    on = {"enable_thinking": True}
    for tokens, reasoning, content in ((["I", "</think>", "Hi"], "I", "Hi"), (["only", " this"], "only this", "")):
        whole, _ = both(thinker, tokens, chat_template_kwargs=on)
        assert (whole.reasoning, whole.content) == (reasoning, content)


def test_calls_stream_as_names_and_pieces_of_arguments(thinker: Harness) -> None:
    whole, streamed = both(thinker, ["Let me ", "look.", *LOOK, *FIND], tools=TOOLS)
    assert whole.told()[:4] == ("Let me look.", "", [("look", '{"city": "Köln"}'), ("find", "{}")], "tool_calls")
    assert streamed.deltas[:2] == ["content", "content"] and streamed.deltas.count("tool_calls") > 4
    ids = [call["id"] for call in whole.calls.values()]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)


def test_a_reply_that_is_only_a_call_has_no_content(thinker: Harness) -> None:
    whole, streamed = both(thinker, [*LOOK, "\n"], tools=TOOLS, parallel_tool_calls=False, stop=["</tool"])
    assert whole.told()[:4] == (None, "", [("look", '{"city": "Köln"}')], "tool_calls")
    assert "content" not in streamed.deltas


def test_reasoning_calls_and_a_stop_string_together(thinker: Harness) -> None:
    tokens = ["<think>", "STOP", "</think>", *LOOK, "so ST", "OP", " never"]
    whole, _ = both(thinker, tokens, tools=TOOLS, stop=["STOP"])
    assert whole.told()[:4] == ("so ", "STOP", [("look", '{"city": "Köln"}')], "tool_calls")


def test_markup_that_is_no_call_comes_back_as_content(thinker: Harness) -> None:
    for text in ("<tool_call>\n{look}</tool_call>", "<tool_call> marks a call", '<tool_call>{"name": "look"'):
        whole, _ = both(thinker, list(text), tools=TOOLS)
        assert (whole.content, whole.finish, whole.calls) == (text, "stop", {})


def test_without_tools_their_markup_is_text(thinker: Harness) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert both(thinker, FIND, **fields)[0].content == FIND[0]


def test_logprobs_are_those_of_the_content(thinker: Harness) -> None:
    content = script(tokens=["<think>", "a", "</think>", "b", "c"]).replace("<", "\\u003c")
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "logprobs": True}
    reply = httpx.post(thinker.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert [one["token"] for one in reply["choices"][0]["logprobs"]["content"]] == ["b", "c"]


def test_a_call_that_nothing_can_force_is_refused_by_name(thinker: Harness) -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required",
    }  # fmt: skip
    reply = httpx.post(thinker.url + "/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice"
