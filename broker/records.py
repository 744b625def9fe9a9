"""The broker's nouns: request, lease, worker, model, and the effects that its core returns (pure).

Nothing is counted up and down: places, leases and free slots are sizes of these collections.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from broker.prefixes import Prefixes
from broker.shares import Shares
from broker.waiting import WaitingLine
from common.envelope import Message, ModelPlan, WorkerFacts
from common.histograms import BOUNDS, Histogram
from common.ids import PeerId, RequestId
from common.outcomes import Outcome


class Phase(Enum):
    """Where a request is. Its place lasts through all of them."""

    RESERVED = "reserved"
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(slots=True)
class Request:
    """One request from its RESERVE to its one end. Instants are seconds of the caller's monotonic clock."""

    id: RequestId
    api: PeerId
    label: str
    model: str
    priority: int
    key: str
    weight: float
    reserved_at: float
    phase: Phase = Phase.RESERVED
    payload: bytes = b""
    prompt_tokens: int = 0
    max_tokens: int = 0
    prefix: bytes = b""
    fingerprint: str = ""
    arrival: int = 0
    submitted_at: float = 0.0
    attempt: int = 0
    deaths: int = 0
    worker: PeerId | None = None
    dispatched_at: float = 0.0
    streaming: bool = False
    passed_over: int = 0

    @property
    def untouched(self) -> bool:
        """No worker ever had it, so its client has no status yet and may still be refused."""
        return self.attempt == 0

    @property
    def tokens(self) -> int:
        """The longest row it can become."""
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True)
class Lease:
    """One slot of one worker, held from DISPATCH until DONE or the worker's end.

    stopping_at: the request has ended for its client and the worker was told to stop; None while it is wanted.
    """

    attempt: int
    tokens: int
    stopping_at: float | None = None


@dataclass(slots=True)
class Worker:
    """A worker with a live session."""

    peer: PeerId
    name: str
    facts: WorkerFacts
    leases: dict[RequestId, Lease] = field(default_factory=dict)
    leaving: bool = False
    last_dispatch: int = 0

    @property
    def free(self) -> int:
        """Slots that may be given away."""
        return 0 if self.leaving else self.facts.slots - len(self.leases)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that is held."""
        return max((lease.tokens for lease in self.leases.values()), default=0)


@dataclass(slots=True)
class Model:
    """One served model: what is planned, who waits, who has a place. ended_at: the latest ends, for the drain rate.

    queue: the places that could still be refused. routed: dispatches by what the choice of a worker owes to prefixes.
    """

    name: str
    line: WaitingLine
    plan: ModelPlan | None = None
    queue: Shares = field(default_factory=Shares)
    prefixes: Prefixes = field(default_factory=Prefixes)
    routed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("hit", "diverted", "new"), 0))
    requests: dict[RequestId, Request] = field(default_factory=dict)
    ended_at: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    refused: dict[Outcome, int] = field(default_factory=dict)
    finished: dict[Outcome, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "cached": 0, "completion": 0})
    histograms: dict[str, Histogram] = field(default_factory=lambda: {kind: Histogram(kind) for kind in BOUNDS})


class ToApi(NamedTuple):
    """Effect: send to an api peer."""

    peer: PeerId
    message: Message
    payload: bytes = b""


class ToWorker(NamedTuple):
    """Effect: send to a worker."""

    peer: PeerId
    message: Message
    payload: bytes = b""


class ToPool(NamedTuple):
    """Effect: send to every pool there is (one)."""

    message: Message


class Relay(NamedTuple):
    """Effect: forward the message that just came, byte for byte, to an api peer."""

    peer: PeerId


class Hangup(NamedTuple):
    """Effect: tell this peer that its session is over, wherever it is connected."""

    peer: PeerId
    reason: str


class Answer(NamedTuple):
    """Effect: reply to the peer that just asked."""

    message: Message
    payload: bytes = b""


class Note(NamedTuple):
    """Effect: one line for the log."""

    words: str
    fields: dict[str, object]


Effect = ToApi | ToWorker | ToPool | Relay | Hangup | Answer | Note
