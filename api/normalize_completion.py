"""A completion's or tokenization's body -> what it asks for, or an error that names the field (pure).

Owns the fields of POST /v1/completions, /tokenize and /detokenize; what they share with the chat route means the same
here. Invariant: as normalize.
"""

from dataclasses import dataclass, field
from typing import Any

from api.fields import (
    check_refused,
    ignored_fields,
    is_integer,
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
from api.normalize import DEFAULT_MAX_TOKENS, EXEMPT, take_model, take_stream, take_template_kwargs
from api.tools import Tools, checked_tools

KNOWN = frozenset(
    "model prompt max_tokens max_completion_tokens stream stream_options stop temperature top_p top_k min_p seed"
    " repetition_penalty presence_penalty frequency_penalty logit_bias n logprobs echo priority suffix best_of messages"
    " tools tool_choice parallel_tool_calls functions function_call response_format chat_template_kwargs"
    " reasoning_effort top_logprobs".split()
)
_OF_CHAT = " by /v1/completions; use /v1/chat/completions"
REFUSED = {
    "suffix": "",
    "best_of": "",
    "top_logprobs": " by /v1/completions; logprobs is the number of rivals",
    **dict.fromkeys(
        ("messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"), _OF_CHAT
    ),
    **dict.fromkeys(("response_format", "chat_template_kwargs", "reasoning_effort"), _OF_CHAT),
}
# Of /tokenize: what a raw prompt is made of, and what the prompt of a chat is.
KNOWN_OF_PROMPT = frozenset(("model", "prompt", "messages"))
KNOWN_OF_MESSAGES = KNOWN_OF_PROMPT | {
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"
}  # fmt: skip
KNOWN_OF_TOKENS = frozenset(("model", "tokens"))
# OpenAI's bound on the rivals shown per token in the text shape.
MOST_LOGPROBS = 5
# One RESERVE names all places; a request for more than any server has is refused by the broker long before this.
MOST_CHOICES = 4096


@dataclass(frozen=True)
class NormalizedCompletion:
    """A checked completion. prompts: text or token ids, at least one; n choices of each. logprobs: -1 none."""

    model: str
    prompts: list[str | list[int]]
    max_tokens: int
    stream: bool = False
    stop: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    logprobs: int = -1
    echo: bool = False
    priority: int | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormalizedTokenization:
    """What to tokenize: a raw prompt, or messages with what their template needs."""

    model: str | None
    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Tools = Tools()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormalizedDetokenization:
    """Token ids to read."""

    model: str | None
    tokens: list[int]
    ignored: tuple[str, ...] = ()


def normalize_completion(body: dict[str, Any], max_tokens: int, strict: bool = False) -> NormalizedCompletion:
    """The completion that `body` asks for. Raises RequestError for the first field that is wrong."""
    prompts = take_prompts(body.get("prompt"))
    model = take_model(body)
    check_refused(body, REFUSED)
    n = take_integer(body, "n", 1, 16) or 1
    if len(prompts) * n > MOST_CHOICES:
        raise refuse("prompt", f"prompt and n together ask for more than {MOST_CHOICES} choices")
    logprobs = take_integer(body, "logprobs", 0, MOST_LOGPROBS)
    echo = take_boolean(body, "echo", False)
    if echo and logprobs is not None:
        raise refuse("echo", "echo is not supported together with logprobs")
    return NormalizedCompletion(
        model=model,
        prompts=prompts,
        max_tokens=take_count(body, ("max_tokens", "max_completion_tokens"), DEFAULT_MAX_TOKENS, max_tokens),
        stream=take_stream(body),
        stop=take_stop(body),
        sampling=take_sampling(body),
        n=n,
        logprobs=-1 if logprobs is None else logprobs,
        echo=echo,
        priority=take_integer(body, "priority", -10, 10),
        ignored=ignored_fields(body, KNOWN, EXEMPT, strict),
    )


def take_prompts(prompt: Any) -> list[str | list[int]]:
    """A string, an array of strings, token ids, or arrays of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if is_ids(prompt):
            return [prompt]
        if all(is_ids(item) and item for item in prompt):
            return prompt
    raise refuse("prompt", "prompt must be a string, an array of strings, token ids, or arrays of token ids")


def is_ids(value: Any) -> bool:
    """Whether this is a list of what could be token ids."""
    return isinstance(value, list) and all(is_integer(item) and 0 <= item < 2**31 for item in value)


def normalize_tokenization(body: dict[str, Any], strict: bool = False) -> NormalizedTokenization:
    """What POST /tokenize asks for. Raises RequestError."""
    model = _optional_model(body)
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise refuse("prompt", "exactly one of prompt and messages is required")
    take_object(body, "chat_template_kwargs")
    if messages is not None:
        return NormalizedTokenization(
            model,
            None,
            checked_messages(messages),
            checked_tools(body),
            take_template_kwargs(body),
            ignored_fields(body, KNOWN_OF_MESSAGES, EXEMPT, strict),
        )
    if not isinstance(prompt, str):
        raise refuse("prompt", f"prompt must be a string, got {shown(prompt)}")
    return NormalizedTokenization(model, prompt, ignored=ignored_fields(body, KNOWN_OF_PROMPT, EXEMPT, strict))


def normalize_detokenization(body: dict[str, Any], strict: bool = False) -> NormalizedDetokenization:
    """What POST /detokenize asks for. Raises RequestError."""
    model = _optional_model(body)
    if not is_ids(body.get("tokens")):
        raise refuse("tokens", "tokens must be an array of token ids")
    return NormalizedDetokenization(model, body["tokens"], ignored_fields(body, KNOWN_OF_TOKENS, EXEMPT, strict))


def _optional_model(body: dict[str, Any]) -> str | None:
    return None if body.get("model") is None else take_model(body)
