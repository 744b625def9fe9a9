"""What the worker's main loop asks of an engine (pure: protocols and values).

An engine runs many requests at once and is stepped by one thread, the one that loaded it (MLX streams are
thread-local). It commits tokens and decodes them; it knows nothing of stop strings, reasoning, tools, sockets or the
broker: those are worker/running and worker/sink. It only says how its model writes such things. Every started request
yields exactly one Ended, unless it was cancelled: cancel() is the caller's own end of it and yields nothing more.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.generation import GenerationRequest, TokenLogprob
from common.ids import RequestId
from worker.call_syntax import CallSyntax
from worker.router import Router

# The states of a reply, named as mlx-lm names them. Any other is framing, whose text nobody is shown.
NORMAL, IN_REASONING, IN_TOOL = "normal", "reasoning", "tool"


@dataclass(frozen=True, slots=True)
class Committed:
    """One generated token: its id and the text that became decodable with it ("" while a character is incomplete).

    rejected_drafts: how many drafted tokens were thrown away in the pass that ended with this one.
    """

    request: RequestId
    token: int
    text: str
    logprob: TokenLogprob | None = None
    from_draft: bool = False
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine's own end of a request. text: what the detokenizer still held. reason: stop, length or failed.

    error: type name, with failed. Special tokens are Committed with text "", so that they are counted and not shown.
    """

    request: RequestId
    reason: str
    text: str = ""
    error: str = ""
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A stretch of the prompt was read: done of total tokens; cached of them came from the prompt cache."""

    request: RequestId
    done: int
    total: int
    cached: int = 0


Step = Committed | Ended | Prefilled


@dataclass(frozen=True)
class CallForm:
    """A format whose arguments are JSON as it stands, so that they can stream.

    opens: what a block can begin with, after spaces. head: a call up to its arguments, with a group "name"; it ends
    before the {. tail: what may stand between a call's arguments and the next call, or the block's end; it matches ""
    too.
    """

    opens: str
    head: re.Pattern[str]
    tail: re.Pattern[str]


@dataclass(frozen=True)
class Markup:
    """How a model writes what is not content; "" and None: it has no such thing.

    syntax: how its calls are written, where they can be forced.
    parse: (text between tool_start and tool_end, tool definitions) -> the call or list of calls, each a dict with name
    and arguments; it raises anything for a text that is none. tool_end "": a block lasts until the reply's end.
    structure: markers that only frame content. states, opening: for models that announce each part of a reply in a
    header: state -> (marker, next state), and the state in which a reply begins. router: the model's special tokens.
    """

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""
    parse: Callable[[str, list[dict[str, Any]]], Any] | None = None
    form: CallForm | None = None
    syntax: CallSyntax | None = None
    structure: Sequence[str] = ()
    states: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    opening: str = NORMAL
    router: Router = field(default_factory=Router)


@dataclass(frozen=True)
class EngineFacts:
    """What an engine can do, known after load(). abilities hold of every lane that has none of its own in
    lane_abilities. weight_bytes, kv_bytes_per_token: as measured; 0: not."""

    slots: int
    kv_tokens: int
    block: int
    context: int
    lanes: Sequence[str]
    abilities: Sequence[str]
    details: dict[str, str] = field(default_factory=dict)
    markup: Markup | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    lane_abilities: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Unsupported(Exception):
    """start(): no lane of this engine can honour the request; the text is the need that it cannot serve, then perhaps a
    colon and the reason."""


class Engine(Protocol):
    """Many requests at once, stepped. All calls come from the thread that called load()."""

    facts: EngineFacts

    def load(self, progress: Callable[[str], None]) -> None:
        """Load the weights and warm up; progress gets short lines. Raises ConfigError for a folder that is no such
        model."""

    def lane_for(self, request: GenerationRequest) -> str:
        """The lane this request would take now. Raises Unsupported."""

    def start(self, request_id: RequestId, request: GenerationRequest) -> None:
        """Take one request. Raises Unsupported; nothing is kept then."""

    def cancel(self, request_id: RequestId) -> None:
        """Stop this request before the next step; unknown ids are fine. Yields no Ended."""

    def step(self) -> list[Step]:
        """One step for all running requests, in order of commitment. Never raises for one request's sake: an exception
        here means that the engine is broken; the caller fails all its requests and rebuilds it."""

    def due_in(self) -> float:
        """Seconds until step() has something to do, as far as the engine knows; 0.0: call it at once. Only asked while
        busy. An engine that computes answers 0.0; one that waits for a clock lets the caller sleep."""

    def rebuild(self) -> None:
        """After step() raised: drop all requests, yielding no Ended for them, and be as after load()."""

    @property
    def busy(self) -> bool:
        """Whether step() has anything to do."""

    def memory(self) -> dict[str, int]:
        """Bytes: active, cache, peak."""

    def close(self) -> None:
        """Release the device's memory."""
