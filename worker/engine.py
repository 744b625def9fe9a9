"""What the worker's main loop asks of an engine (pure: protocols and values).

An engine runs many requests at once and is stepped by one thread, the one that loaded it (MLX streams are
thread-local). It commits tokens and decodes them; it knows nothing of stop strings, reasoning, tools, sockets or the
broker: those are worker/running and worker/sink. Every started request yields exactly one Ended, unless it was
cancelled: cancel() is the caller's own end of it and yields nothing more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.generation import GenerationRequest, TokenLogprob
from common.ids import RequestId


@dataclass(frozen=True, slots=True)
class Committed:
    """One generated token: its id and the text that became decodable with it ("" while a character is incomplete)."""

    request: RequestId
    token: int
    text: str
    logprob: TokenLogprob | None = None
    from_draft: bool = False


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
class EngineFacts:
    """What an engine can do, known after load()."""

    slots: int
    kv_tokens: int
    block: int
    context: int
    lanes: Sequence[str]
    abilities: Sequence[str]
    details: dict[str, str] = field(default_factory=dict)


class Unsupported(Exception):
    """start(): no lane of this engine can honour the request; the text says which need it cannot serve."""


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
