"""Every template with every conversation renders to what Hugging Face's apply_chat_template gives, or both refuse it.

What CONTRACT §5 has done to messages before a template sees them is written here once more, by what is known of each
style, and not taken from api/prompt.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.messages import checked_messages
from api.prompt import EMPTY_THOUGHT, PromptSource
from api.template import TemplateComplaint
from fixtures.template_styles import CONVERSATIONS, STYLES, conversations
from fixtures.tiny_tokenizer import Family
from tests.api.conftest import FAMILIES

KNOW_DEVELOPERS = {"gptoss"}
KNOW_TOOL_CALLS = {"llama3", "qwen3", "gptoss", "diffusiongemma"}
TAKE_PARTS = {"gemma", "diffusiongemma"}
WITH_SPECIAL_TEXT = {name for name in conversations() if name.startswith("special text")}


def prepared(style: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What CONTRACT §5 promises a template of this style."""
    return [_prepared(style, dict(message)) for message in messages]


def _prepared(style: str, message: dict[str, Any]) -> dict[str, Any]:
    if message["content"] is None and style not in KNOW_TOOL_CALLS:
        message["content"] = ""
    if isinstance(message["content"], list) and style not in TAKE_PARTS:
        message["content"] = "".join(part["text"] for part in message["content"])
    if message["role"] == "developer" and style not in KNOW_DEVELOPERS:
        message["role"] = "system"
    if "tool_calls" in message:
        message["tool_calls"] = json.loads(json.dumps(message["tool_calls"]))
        for call in message["tool_calls"]:
            try:
                # Without arguments a call has none, which is what templates want to hear.
                value = json.loads(call["function"].get("arguments") or "{}")
            except (TypeError, ValueError):
                continue
            if isinstance(value, dict):
                call["function"]["arguments"] = value
    return message


def theirs(tokenizer: Any, style: str, messages: list[dict[str, Any]], tools: Any, **kwargs: Any) -> list[int] | None:
    """Hugging Face's ids; None when the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    wanted = prepared(style, messages)
    given = {"add_generation_prompt": True, "tools": tools} | kwargs
    try:
        if all(message["content"] is not None for message in wanted):
            return tokenizer.apply_chat_template(wanted, tokenize=True, return_dict=False, **given)
        # apply_chat_template drops what is null; CONTRACT §5 gives it to the template, so this goes by its renderer.
        names = tokenizer.special_tokens_map
        text = render_jinja_template([wanted], chat_template=tokenizer.chat_template, **names, **given)[0][0]
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:
        return None


def ours(source: PromptSource, messages: list[dict[str, Any]], tools: Any, **kwargs: Any) -> list[int] | None:
    """Our ids; None when the template refuses."""
    try:
        return source.chat(messages, kwargs, tools or [], 100_000).ids
    except TemplateComplaint:
        return None


def test_there_is_enough_to_compare() -> None:
    assert len(conversations()) >= 60 and len(STYLES) >= 8
    assert json.loads(CONVERSATIONS.read_text()) == conversations()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_hugging_face(
    style: str, family: Family, folder_of: Callable[..., Path], source_of: Callable[..., PromptSource]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(style, family))
    source = source_of(style, family)
    thought = source.tokens.encode(EMPTY_THOUGHT) if style == "diffusiongemma" else []
    rendered = 0
    for name, conversation in conversations().items():
        messages = checked_messages(conversation["messages"])
        tools = conversation.get("tools")
        for thinking in (False, True):
            kwargs = {"enable_thinking": thinking, "reasoning_effort": "high" if thinking else "low"}
            expected = theirs(tokenizer, style, messages, tools, **kwargs)
            found = ours(source, messages, tools, **kwargs)
            if name in WITH_SPECIAL_TEXT and expected is not None:
                # The same text; that it is no marker is test_prompt's business.
                assert found is not None, name
                assert flat(source, found) == flat(source, expected + thought), name
            else:
                assert found == (expected if expected is None else expected + thought), (name, thinking)
            rendered += expected is not None
    assert rendered >= len(conversations()) // 2


def flat(source: PromptSource, ids: list[int]) -> str:
    """The text of ids, without spaces: decoders differ in those round special tokens."""
    return source.tokens.decode(ids).replace(" ", "")
