"""A broker for tests of the API: a real ROUTER in a thread, told by each test how to behave.

Speaks common/envelope and records everything it hears. Knows nothing of workers: what a worker would say, the script
says.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import msgpack
import zmq

from common import sockets
from common.envelope import (
    Done,
    Heartbeat,
    Hello,
    Message,
    Rejected,
    Reserve,
    Reserved,
    Snapshot,
    Started,
    Status,
    Submit,
    Tokens,
    Welcome,
    decode,
    encode,
)
from common.generation import CONTENT, GenerationRequest, Piece, Summary, pack_pieces, pack_summary, unpack_request
from common.histograms import BOUNDS, Histogram
from common.outcomes import Outcome

Script = Callable[["FakeBroker", Message, bytes], None]
DEADLINE_S = 10.0


def words(*texts: str) -> list[Piece]:
    """Content pieces."""
    return [Piece(CONTENT, text) for text in texts]


class FakeBroker:
    """One life of a broker. script: called in the broker's thread for every message but HELLO, STATUS and REPORT."""

    def __init__(self, endpoint: str, script: Script | None = None) -> None:
        self.script = script or answer("Hello", " there")
        self.snapshot = ready_snapshot()
        self.heard: list[Message] = []
        self.requests: dict[bytes, GenerationRequest] = {}
        self._news = threading.Condition()
        self._outbox: deque[tuple[Message, bytes]] = deque()
        self._peer = b""
        self._beat_at = 0.0
        self._stop = threading.Event()
        self._silent = threading.Event()
        self._context = sockets.context()
        self._socket = sockets.router(self._context, endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._socket.close(0)
        self._context.term()

    # What a script or a test says

    def send(self, message: Message, payload: bytes = b"") -> None:
        self._outbox.append((message, payload))

    def reserve_all(self, message: Reserve, fingerprint: str = "") -> None:
        self.send(Reserved(message.requests[0], fingerprint))

    def start(self, request: bytes, attempt: int = 1, worker: str = "demo-0") -> None:
        self.send(Started(request, attempt, "batched", worker))

    def tokens(self, request: bytes, seq: int, pieces: list[Piece], attempt: int = 1) -> None:
        self.send(Tokens(request, attempt, seq), pack_pieces(pieces))

    def done(self, request: bytes, outcome: Outcome = Outcome.STOP, attempt: int = 1, **summary: object) -> None:
        facts = {"prompt_tokens": 7, "completion_tokens": 2, "lane": "batched"} | summary
        self.send(Done(request, attempt, outcome), pack_summary(Summary(**facts)))  # type: ignore[arg-type]

    # What it heard

    def forget(self) -> None:
        with self._news:
            self.heard.clear()
            self.requests.clear()

    def wait_for(self, kind: type, count: int = 1) -> list[Message]:
        """The first `count` messages of this kind, waiting for them."""
        deadline = time.monotonic() + DEADLINE_S
        with self._news:
            while len(found := [m for m in self.heard if isinstance(m, kind)]) < count:
                assert self._news.wait(deadline - time.monotonic()), f"no {kind.__name__}; heard {self.heard}"
            return found

    def count(self, kind: type) -> int:
        with self._news:
            return sum(isinstance(message, kind) for message in self.heard)

    def fall_silent(self, last_words: Message) -> None:
        """Answer nothing more after this, as a stopped process would."""
        self._silent.set()
        self.send(last_words)

    def _run(self) -> None:
        while not self._stop.is_set():
            if time.monotonic() - self._beat_at > 0.5 and self._peer and not self._silent.is_set():
                self._beat_at = time.monotonic()
                self._outbox.append((Heartbeat(), b""))
            while self._outbox:
                message, payload = self._outbox.popleft()
                try:
                    sockets.send(self._socket, [self._peer, encode(message), payload])
                except sockets.Unreachable:
                    pass
            if self._socket.poll(2):
                self._take()

    def _take(self) -> None:
        while (frames := self._receive()) is not None:
            peer, envelope, payload = frames
            message = decode(envelope)
            if self._silent.is_set():
                continue
            if isinstance(message, Hello):
                self._peer = peer
                sockets.send(self._socket, [peer, encode(Welcome("epoch", 1000)), b""])
            elif isinstance(message, Status):
                sockets.send(self._socket, [peer, encode(Snapshot(message.question)), msgpack.packb(self.snapshot)])
            else:
                # The script first: a test that has seen the message may rely on its having been answered.
                self.script(self, message, payload)
            with self._news:
                if isinstance(message, Submit):
                    self.requests[message.request] = unpack_request(payload)
                self.heard.append(message)
                self._news.notify_all()

    def _receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None


def ready_snapshot() -> dict[str, object]:
    worker = {
        "name": "demo-0",
        "pid": 1,
        "host": "here",
        "model": "tiny",
        "state": "ready",
        "lanes": ["batched"],
        "slots": 4,
        "running": 0,
        "kv_tokens": 1000,
        "kv_tokens_used": 0,
        "memory": {"active": 0, "cache": 0, "peak": 0, "budget": 0},
        "step_age_ms": 0,
        "restarts": 0,
    }
    model = {
        "name": "tiny",
        "state": "ready",
        "workers": 1,
        "slots": 4,
        "context": 4096,
        "lanes": ["batched"],
        "abilities": ["sampling", "seed", "penalties", "logit_bias", "logprobs"],
        "fingerprint": "",
        "running": 0,
        "waiting": 0,
        "finished": {},
        "refused": {},
        "tokens": {"prompt": 0, "cached": 0, "completion": 0},
        "prefix_routing": {"hit": 0, "diverted": 0, "new": 0},
        "histograms": {kind: Histogram(kind).packed() for kind in BOUNDS},
    }
    return {
        "workers": [worker],
        "queue": {"waiting": 0, "reserved": 0, "oldest_ms": 0},
        "limits": {"max_inflight": 4, "max_queue": 32},
        "refused": {},
        "finished": {},
        "epoch": "epoch",
        "version": "0",
        "models": [model],
        "draining": False,
        "api_refused": {},
    }


def answer(*texts: str, outcome: Outcome = Outcome.STOP, **summary: object) -> Script:
    """Reserve everything and answer every request with these pieces."""

    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        if isinstance(message, Reserve):
            broker.reserve_all(message)
        elif isinstance(message, Submit):
            broker.start(message.request)
            for seq, text in enumerate(texts):
                broker.tokens(message.request, seq, words(text))
            broker.done(message.request, outcome, **summary)

    return script


def only_reserve(broker: FakeBroker, message: Message, payload: bytes) -> None:
    """Give places, never start anything."""
    if isinstance(message, Reserve):
        broker.reserve_all(message)


def start_and_wait(*texts: str) -> Script:
    """Reserve, start, send these pieces, and then nothing."""

    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.start(message.request)
            for seq, text in enumerate(texts):
                broker.tokens(message.request, seq, words(text))

    return script


def reject(outcome: Outcome, retry_after_ms: int = 0) -> Script:
    """Refuse every RESERVE."""

    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        if isinstance(message, Reserve):
            broker.send(Rejected(message.requests[0], outcome, retry_after_ms))

    return script


def end_at_once(outcome: Outcome, **summary: object) -> Script:
    """Reserve, then end every request before it was started."""

    def script(broker: FakeBroker, message: Message, payload: bytes) -> None:
        only_reserve(broker, message, payload)
        if isinstance(message, Submit):
            broker.done(message.request, outcome, **summary)

    return script
