"""How a model writes reasoning and tool calls, read from its folder with mlx-lm's own rules.

Owns the choice of markers and parser: those of mlx-lm for this vocabulary and chat template, and which of its formats
can stream their arguments. Must never know requests or text. Invariant: a folder that says nothing of either gives a
Markup without them, and never an error: a model is served whatever its template looks like.
"""

import importlib
import importlib.util
import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.call_syntax import SYNTAXES
from worker.engine import NORMAL, CallForm, Markup
from worker.engines import mlx_lm_0_32
from worker.router import MOST, Router
from worker.tool_calls import ARGUMENTS, TAGGED_JSON

# Formats whose arguments are JSON in the text; those of the others are known when the call is whole.
FORMS = {
    "json_tools": TAGGED_JSON,
    "mistral": CallForm(
        # A name, or the older form: a list of calls.
        opens="[_" + string.ascii_letters + string.digits,
        head=re.compile(r"\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*" + ARGUMENTS),
        tail=re.compile(r"\s*(?:,|\[TOOL_CALLS\])?\s*"),
    ),
    "kimi_k2": CallForm(
        opens="",
        head=re.compile(
            r"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?(?P<name>[^<:]+):\d+\s*<\|tool_call_argument_begin\|>\s*"
            + ARGUMENTS
        ),
        tail=re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    ),
}
# These take any text for a call: its first word for the function.
LENIENT = ("glm47", "laguna")
_LENIENT_SIGN = "<arg_key>"


def read(folder: Path, tokenizer: Tokenizer) -> Markup:
    """The markup of the model in `folder`. tokenizer: its own, which the caller has read already."""
    config = _read_json(folder / "tokenizer_config.json")
    template = _template(folder, config)
    seen = _Seen(tokenizer, template)
    rules = mlx_lm_0_32.markup_rules(folder, seen)
    think_start, think_end = rules.thinking
    if not think_start and "</think>" in template:
        # Tuned to think without tokens for it.
        think_start, think_end = "<think>", "</think>"
    named = rules.defaults | config
    parser = named.get("tool_parser_type") or rules.tool_parser
    tools = _module("mlx_lm.tool_parsers", parser)
    shape = getattr(_module("mlx_lm.chat_templates", named.get("chat_template_type")), "RESPONSE_FORMAT", {})
    start, end = (tools.tool_call_start, tools.tool_call_end) if tools else ("", "")
    structure = rules.structure
    return Markup(
        think_start=think_start,
        think_end=think_end,
        tool_start=start,
        tool_end=end,
        parse=_strict(tools.parse_tool_call) if parser in LENIENT else tools and tools.parse_tool_call,
        form=FORMS.get(parser) if isinstance(parser, str) else None,
        syntax=SYNTAXES.get(parser) if tools else None,
        structure=structure,
        states=shape.get("transitions", {}),
        opening=shape.get("initial_state", NORMAL),
        router=_router(tokenizer, template, (think_start, think_end, start, end, *structure)),
    )


class _Seen:
    """A tokenizer as far as mlx-lm's rules look at it; transformers' own takes seconds and megabytes to load."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template
        self.get_vocab = tokenizer.get_vocab

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _strict(parse: Callable[..., Any]) -> Callable[[str, list[dict[str, Any]]], Any]:
    """A parser that takes anything for a call, held to the functions that are offered."""

    def parsed(text: str, tools: list[dict[str, Any]]) -> Any:
        call = parse(text, tools)
        if _LENIENT_SIGN not in text and call["name"] not in {tool["function"]["name"] for tool in tools}:
            raise ValueError("text, and no call")
        return call

    return parsed


def _router(tokenizer: Tokenizer, template: str, markers: tuple[str, ...]) -> Router:
    """The special tokens; where there are too many, those that markers and template speak of."""
    added = tokenizer.get_added_tokens_decoder()
    texts = {token: one.content for token, one in added.items() if one.special and one.content}
    if len(texts) > MOST:
        spoken = {token: text for token, text in texts.items() if text in template or any(text in m for m in markers)}
        texts = dict(list({**spoken, **texts}.items())[:MOST])
    return Router(texts)


def _module(package: str, name: object) -> Any:
    """A module of mlx-lm that a model's configuration names; None: no such one."""
    if not isinstance(name, str) or not name.isidentifier():
        return None
    return importlib.import_module(f"{package}.{name}") if importlib.util.find_spec(f"{package}.{name}") else None


def _template(folder: Path, config: dict[str, Any]) -> str:
    """The text of all the model's chat templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return "\n".join(one.read_text(encoding="utf-8", errors="replace") for one in (path, *more))
    stored = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(stored, list):
        stored = "\n".join(str(entry.get("template", "")) for entry in stored if isinstance(entry, dict))
    return stored if isinstance(stored, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        # The API, which renders with these files, is where their faults are told.
        return {}
    return value if isinstance(value, dict) else {}
