"""The wire: every message that crosses the broker, and its bytes (pure).

A message is two frames, [envelope][payload]. The envelope is one version byte followed by a msgpack array
[tag, fields…]; the payload is opaque here and to the broker (common/generation knows it). decode() accepts nothing but a
whole message of this version whose fields have the declared types: everything else is a ProtocolError, so that a peer's
mistake is counted and never a crash. Durations travel as remaining milliseconds, never as instants.

Golden bytes of every message lie in fixtures/wire/; a change here re-records them and raises VERSION where an old peer
would misread the new bytes.
"""

from typing import Annotated, Literal

import msgspec

from common.errors import ProtocolError
from common.outcomes import Outcome

VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
# As long as Linux allows a path to be.
Folder = Annotated[str, msgspec.Meta(max_length=4096)]
Role = Literal["api", "worker", "pool", "command"]


class _Message(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages: a msgpack array, whole or not at all."""


class WorkerFacts(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """What a worker says of itself once its model is loaded and warm.

    slots: requests at once. kv_tokens: rows x longest row that its memory holds. block: tokens committed at a time (1 for
    autoregressive lanes). context: tokens of prompt and reply together. fingerprint: of the files that make prompts.
    folder: where those files lie, for the API, which has to render for a model that it did not start with.
    weight_bytes, kv_bytes_per_token: measured after loading, as kv_tokens is; 0: not measured.
    """

    model: Name
    fingerprint: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    kv_tokens: Count
    block: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    context: Count
    lanes: list[Name]
    abilities: list[Name]
    blas: Name = ""
    folder: Folder = ""
    weight_bytes: Count = 0
    kv_bytes_per_token: Count = 0


class Hello(_Message, tag=1):
    """peer -> broker, first message of a session."""

    version: Name
    role: Role
    name: Name
    pid: Count
    host: Name
    worker: WorkerFacts | None = None


class Welcome(_Message, tag=2):
    """broker -> peer: the session is live. epoch names this life of the broker."""

    epoch: Name
    heartbeat_ms: Count


class Refused(_Message, tag=3):
    """broker -> peer: the session is over; drop everything and come back under a new id."""

    reason: Name


class Heartbeat(_Message, tag=4):
    """both ways, only when nothing else was sent for an interval."""


class Report(_Message, tag=5):
    """peer -> broker, every second. step_age_ms: since the engine's last finished step while it has work, else 0."""

    running: Count
    step_age_ms: Count
    memory: dict[Name, Count]
    counters: dict[Name, Count]
    histograms: dict[Name, list[Count]]


class Goodbye(_Message, tag=6):
    """peer -> broker: leaving on purpose; no new work. Not a death."""

    reason: Name


class Reserve(_Message, tag=7):
    """api -> broker: one place for each of `requests`, all or none. label: the client's x-request-id. weight: of its key."""

    requests: Annotated[list[Id], msgspec.Meta(min_length=1, max_length=65536)]
    label: Name
    model: Name
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)]
    key: Name
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0


class Reserved(_Message, tag=8):
    """broker -> api: the places of the RESERVE whose first id is `request` are held. fingerprint "" : not known yet."""

    request: Id
    fingerprint: Name


class Rejected(_Message, tag=9):
    """broker -> api: no place (RESERVE) or the place is gone (SUBMIT). retry_after_ms 0: no advice."""

    request: Id
    outcome: Outcome
    retry_after_ms: Count


class Release(_Message, tag=10):
    """api -> broker: reserved places given back."""

    requests: Annotated[list[Id], msgspec.Meta(min_length=1, max_length=65536)]


class Submit(_Message, tag=11):
    """api -> broker, payload GenerationRequest. prefix: 8-byte hashes of the prompt's head at growing lengths, for routing."""

    request: Id
    prompt_tokens: Count
    max_tokens: Count
    prefix: Annotated[bytes, msgspec.Meta(max_length=1024)]
    fingerprint: Name


class Dispatch(_Message, tag=12):
    """broker -> worker, payload as submitted: one slot taken. attempt counts from 1."""

    request: Id
    attempt: Count
    label: Name


class Stop(_Message, tag=13):
    """broker -> worker: end this request at the next step and say DONE."""

    request: Id
    attempt: Count


class Started(_Message, tag=14):
    """worker -> broker -> api: shape and grammar accepted; the reply will come."""

    request: Id
    attempt: Count
    lane: Name
    worker: Name


class Cancel(_Message, tag=15):
    """api -> broker: nobody waits any more; idempotent."""

    request: Id


class Tokens(_Message, tag=16):
    """worker -> broker -> api, payload list[Piece]. seq counts from 0 within an attempt, without gaps."""

    request: Id
    attempt: Count
    seq: Count


class Done(_Message, tag=17):
    """worker -> broker -> api, payload Summary (empty when the broker ended it). Exactly one per dispatch and per request."""

    request: Id
    attempt: Count
    outcome: Outcome
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0


class ModelPlan(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """What the pool means to run of one model. state: starting (some worker is or will be), ready, failed."""

    model: Name
    workers: Count
    slots: Count
    state: Literal["starting", "ready", "failed"]
    context: Count
    kv_tokens: Count


class Child(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """One worker process as its parent sees it. exit: return code, negative for a signal; log: its last lines."""

    name: Name
    model: Name
    pid: Count
    state: Literal["loading", "ready", "backoff", "failed", "stopping"]
    restarts: Count
    exit: int | None
    log: list[str]


class PoolState(_Message, tag=18):
    """pool -> broker, at every change and once a second: all of it, so that a lost one is repaired by the next."""

    models: list[ModelPlan]
    children: list[Child]


# question of an Order that nobody waits for.
NO_QUESTION = bytes(16)


class Order(_Message, tag=19):
    """broker -> pool: kill (a worker found stuck; count is its pid), or what an ADMIN with this question asks for."""

    action: Literal["kill", "restart", "roll", "scale", "swap", "drain"]
    target: Name
    count: Count
    reason: Name
    question: Id = NO_QUESTION
    source: Folder = ""


class Status(_Message, tag=20):
    """api or command -> broker: asks for the snapshot."""

    question: Id


class Snapshot(_Message, tag=21):
    """broker -> api or command, payload: msgpack map (broker/snapshot)."""

    question: Id


class Admin(_Message, tag=22):
    """command -> broker, local ipc only. target: a model, a worker, or "" for all.

    drain: without a target no new requests at all; else this worker leaves when it has finished. restart: end and start.
    roll: restart one after the other without a gap. scale: `count` workers. swap: the model in the folder `source` instead.
    cancel: all requests whose label is `target`.
    """

    question: Id
    action: Literal["drain", "restart", "roll", "scale", "swap", "cancel"]
    target: Name
    count: Count
    source: Folder = ""


class AdminReply(_Message, tag=23):
    """broker -> command, pool -> broker -> command: what has happened. final: nothing more comes, and done says whether
    what was asked for is so now; before it, what has happened so far."""

    question: Id
    done: bool
    text: str
    final: bool = True


class TraceMarks(_Message, tag=24):
    """api -> broker at a request's end, payload: its own marks (common/generation), kept unopened for `millpond trace`."""

    request: Id


class TraceQuery(_Message, tag=25):
    """command -> broker: the traces of all recent requests with this label; answered by SNAPSHOT with a list."""

    question: Id
    label: Name


class Stale(_Message, tag=26):
    """broker -> api: no worker serves what this request was rendered for any more. Its place is kept and it stands
    where it stood; render it for `fingerprint` and SUBMIT it again."""

    request: Id
    fingerprint: Name


Message = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | Report
    | Goodbye
    | Reserve
    | Reserved
    | Rejected
    | Release
    | Submit
    | Dispatch
    | Stop
    | Started
    | Cancel
    | Tokens
    | Done
    | PoolState
    | Order
    | Status
    | Snapshot
    | Admin
    | AdminReply
    | TraceMarks
    | TraceQuery
    | Stale
)

_PREFIX = bytes([VERSION])
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def encode(message: Message) -> bytes:
    """The envelope's bytes. Raises OverflowError or UnicodeEncodeError for values that msgpack has no room for."""
    return _PREFIX + _encode(message)


def decode(envelope: bytes) -> Message:
    """The message in `envelope`. Raises ProtocolError for another version, an unknown tag, wrong or missing fields."""
    if envelope[:1] != _PREFIX:
        raise ProtocolError(f"envelope version {envelope[0] if envelope else 'missing'}, this is version {VERSION}")
    try:
        # A copy of some thirty bytes costs less than a memoryview that spares it.
        return _decode(envelope[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None
