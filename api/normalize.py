"""A chat request's body -> a NormalizedChat, or an error that names the field (pure).

Owns the meaning of every field of POST /v1/chat/completions; knows nothing of models, templates or capacity. Invariant:
nothing that comes out of here can fail to pack, and the client's objects are never changed.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from api.fields import (
    check_refused,
    check_size,
    ignored_fields,
    refuse,
    shown,
    take_boolean,
    take_count,
    take_integer,
    take_object,
    take_sampling,
    take_stop,
)
from api.messages import checked_messages
from api.tools import Tools, checked_tools

DEFAULT_MAX_TOKENS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high")

KNOWN = frozenset(
    [
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "n",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "chat_template_kwargs",
        "reasoning_effort",
        "priority",
        "functions",
        "function_call",
        "best_of",
        "suffix",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
    ]
)
EXEMPT = frozenset(("user", "metadata", "store", "service_tier"))
REFUSED = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "best_of": "",
    "suffix": "",
    "modalities": "; replies are text",
    "audio": "; replies are text",
    "prediction": "",
    "web_search_options": "",
}
# What the prompt is made of is the server's to give; a client that could replace it would bring its own template.
RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "continue_final_message",
)

ONE_OBJECT = "Reply with exactly one JSON object and nothing else: no prose, no code fences."


@dataclass(frozen=True)
class ResponseFormat:
    """What the reply must be. kind: text, json_object or json_schema; schema None or empty: any object."""

    kind: str = "text"
    schema: dict[str, Any] | None = None
    strict: bool = False

    @property
    def json_mode(self) -> bool:
        """Whether the reply is to be one JSON value."""
        return self.kind != "text"


@dataclass(frozen=True)
class NormalizedChat:
    """A checked request. max_tokens: capped by the operator's limit, not yet by the context. sampling: given fields
    only.

    top_logprobs: -1 none. template_kwargs: enable_thinking first. messages: the client's, with the sentence of JSON
    mode. said: the client's alone.
    """

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool = False
    stop: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    top_logprobs: int = -1
    tools: Tools = Tools()
    response_format: ResponseFormat = ResponseFormat()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    said: list[dict[str, Any]] = field(default_factory=list)
    priority: int | None = None
    ignored: tuple[str, ...] = ()

    @cached_property
    def otherwise(self) -> list[dict[str, Any]] | None:
        """The messages with the sentence of JSON mode where no system message is needed for it; None: there is no such
        place, or no JSON is wanted. Made when it is asked for: a schema may be long, and few templates need it."""
        return with_json_sentence_in_place(self.said, self.response_format)


def normalize_chat(body: dict[str, Any], max_tokens: int, strict: bool = False) -> NormalizedChat:
    """The request that `body` (api/read_json) asks for. Raises RequestError for the first field that is wrong."""
    messages = checked_messages(body.get("messages"))
    model = take_model(body)
    check_refused(body, REFUSED)
    response_format = take_response_format(body)
    return NormalizedChat(
        model=model,
        messages=with_json_sentence(messages, response_format),
        said=messages,
        max_tokens=take_count(body, ("max_tokens", "max_completion_tokens"), DEFAULT_MAX_TOKENS, max_tokens),
        stream=take_stream(body),
        stop=take_stop(body),
        sampling=take_sampling(body),
        n=take_integer(body, "n", 1, 16) or 1,
        top_logprobs=take_logprobs(body),
        tools=checked_tools(body),
        response_format=response_format,
        template_kwargs=take_template_kwargs(body),
        priority=take_integer(body, "priority", -10, 10),
        ignored=ignored_fields(body, KNOWN, EXEMPT, strict),
    )


def take_model(body: dict[str, Any]) -> str:
    """The model's name, which is required."""
    model = body.get("model")
    if not isinstance(model, str):
        raise refuse("model", "model is required and must be a string.")
    return model


def take_stream(body: dict[str, Any]) -> bool:
    """stream; usage comes whatever stream_options says, so those are only checked."""
    take_object(body, "stream_options")
    return take_boolean(body, "stream", False)


def take_logprobs(body: dict[str, Any]) -> int:
    """-1 without logprobs, else how many rivals of each token are shown."""
    wanted = take_boolean(body, "logprobs", False)
    top = take_integer(body, "top_logprobs", 0, 20)
    if top and not wanted:
        raise refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    return (top or 0) if wanted else -1


def take_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    """Variables for the template: enable_thinking first, then the client's own, then reasoning_effort."""
    given = take_object(body, "chat_template_kwargs") or {}
    for name in RESERVED_KWARGS:
        if name in given:
            raise refuse("chat_template_kwargs", f"chat_template_kwargs may not set {name}")
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise refuse("reasoning_effort", f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}")
    kwargs: dict[str, Any] = {"enable_thinking": effort not in (None, "none"), **given}
    if kwargs["enable_thinking"] is None:
        kwargs["enable_thinking"] = False
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def take_response_format(body: dict[str, Any]) -> ResponseFormat:
    """response_format; a schema counts for json_object as well, which is how the original route reads it."""
    given = take_object(body, "response_format")
    if given is None:
        return ResponseFormat()
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refuse(
            "response_format", f"response_format.type must be text, json_object or json_schema, got {shown(kind)}"
        )
    if kind == "text":
        return ResponseFormat()
    spec = given.get("json_schema")
    if spec is None and kind == "json_schema":
        raise refuse("response_format", "response_format.json_schema is required by type json_schema")
    if spec is None:
        return ResponseFormat(kind)
    if not isinstance(spec, dict):
        raise refuse("response_format", f"response_format.json_schema must be an object, got {shown(spec)}")
    schema, strict = spec.get("schema"), spec.get("strict")
    if schema is not None and not isinstance(schema, dict):
        raise refuse("response_format", f"response_format.json_schema.schema must be an object, got {shown(schema)}")
    if strict is not None and not isinstance(strict, bool):
        raise refuse(
            "response_format", f"response_format.json_schema.strict must be true or false, got {shown(strict)}"
        )
    check_size("response_format", schema)
    return ResponseFormat(kind, schema or None, bool(strict))


def json_sentence(wanted: ResponseFormat) -> str:
    """What asks for JSON."""
    schema = f" It must match this JSON schema: {json.dumps(wanted.schema, ensure_ascii=False)}" if wanted.schema else ""
    return ONE_OBJECT + schema


def with_json_sentence(messages: list[dict[str, Any]], wanted: ResponseFormat) -> list[dict[str, Any]]:
    """`messages` with the sentence that asks for JSON: at the end of a first system message, or in front."""
    if not wanted.json_mode:
        return messages
    first = messages[0]
    if first["role"] == "system" and isinstance(first.get("content"), str):
        return [_with(first, json_sentence(wanted)), *messages[1:]]
    return [{"role": "system", "content": json_sentence(wanted)}, *messages]


def with_json_sentence_in_place(messages: list[dict[str, Any]], wanted: ResponseFormat) -> list[dict[str, Any]] | None:
    """For templates that refuse the system message: at the end of the first developer's or user's message.

    None: there is none, or no JSON is wanted.
    """
    if not wanted.json_mode:
        return None
    for index, message in enumerate(messages):
        if message["role"] in ("developer", "user") and isinstance(message.get("content"), str | list):
            return [*messages[:index], _with(message, json_sentence(wanted)), *messages[index + 1 :]]
    return None


def _with(message: dict[str, Any], sentence: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content.rstrip()}\n\n{sentence}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{sentence}"}]}
