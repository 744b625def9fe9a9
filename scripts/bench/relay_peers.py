"""The two ends of the relay benchmark, each a process: `python -m scripts.bench.relay_peers worker|api FOLDER ROWS`.

The worker end feeds token frames as a worker's link does; the api end receives them as an API's link does and checks
every seq. Frames in flight are bounded through a counter in shared memory, because no real worker runs ahead of its
clients by more than a step. Neither end measures CPU: the benchmark asks the kernel for the broker's.
"""

import json
import mmap
import secrets
import select
import struct
import sys
import time
from pathlib import Path
from typing import Any

from common import runtime, sockets
from common.client import Dropped, Event, Peer, Received, hello
from common.envelope import Dispatch, Done, Reserve, Reserved, Started, Submit, Tokens, WorkerFacts, encode
from common.generation import CONTENT, GenerationRequest, Piece, Summary, pack_pieces, pack_request, pack_summary
from common.outcomes import Outcome
from scripts.bench.children import Broker

MODEL = "bench"
# A few steps of sixteen rows; far under the sockets' high-water mark.
IN_FLIGHT = 2048
PROMPT = list(range(100, 164))


class Counter:
    """One number in a file that two processes map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def get(self) -> int:
        return int(struct.unpack_from("<Q", self._map)[0])

    def set(self, value: int) -> None:
        struct.pack_into("<Q", self._map, 0, value)


class End:
    """What both ends share: the peer and the commands from stdin."""

    def __init__(self, role: str, folder: str, rows: int) -> None:
        place = runtime.runtime(Broker.PORT, folder)
        facts = WorkerFacts(MODEL, "f", rows, 2**50, 1, 2**30, ["batched"], []) if role == "worker" else None
        endpoint = place.back if role == "worker" else place.front
        self.rows = rows
        self.counter = Counter(place.folder / "received")
        self.peer = Peer(sockets.context(), endpoint, hello(role, "bench", facts))
        self._kept: list[Received] = []

    def serve(self) -> None:
        """Carry out commands until stdin ends."""
        while True:
            ready, _, _ = select.select([sys.stdin, self.peer.socket.fileno()], [], [], 0.1)
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                command = json.loads(line)
                print(json.dumps(getattr(self, command.pop("do"))(**command)), flush=True)
            self.idle()

    def idle(self) -> None:
        """Keep the session alive; what comes before the command that waits for it is kept for that command."""
        self._kept = self.pump()

    def pump(self, wait_ms: int = 0) -> list[Received]:
        """What came. Raises RuntimeError when the session is lost, which ends the benchmark."""
        if wait_ms:
            self.peer.socket.poll(wait_ms)
        events: list[Event] = self.peer.pump()
        while self.peer.backlog():
            events += self.peer.pump()
        for event in events:
            if isinstance(event, Dropped):
                raise RuntimeError(f"the session was lost: {event.reason}")
        kept, self._kept = self._kept, []
        return kept + [event for event in events if isinstance(event, Received)]

    def joined(self) -> dict[str, Any]:
        """Wait for the session."""
        while not self.peer.live:
            self.pump(10)
        return {}


class WorkerEnd(End):
    """Feeds frames."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__("worker", *arguments)
        self._taken: list[Dispatch] = []
        self._sequence = 0
        self._sent = 0

    def take(self) -> dict[str, Any]:
        """Wait until every row has its DISPATCH, and say STARTED for each."""
        self._taken, self._sequence, self._sent = [], 0, 0
        while len(self._taken) < self.rows:
            self._taken += [event.message for event in self.pump(10) if isinstance(event.message, Dispatch)]
        for one in self._taken:
            self.peer.send(Started(one.request, one.attempt, "batched", "bench"))
        return {}

    def feed(self, frames: int, per_s: float) -> dict[str, Any]:
        """So many frames, one for each row at a time; per_s 0: as fast as the api end takes them."""
        step_s = self.rows / per_s if per_s else 0.0
        due = began = pumped = time.monotonic()
        late_s = 0.0
        last = self._sent + frames
        while self._sent < last:
            if step_s:
                due += step_s
                while (left := due - time.monotonic()) > 0:
                    time.sleep(left)
                late_s = max(late_s, -left)
            while self._sent - self.counter.get() > IN_FLIGHT:
                time.sleep(0.0002)
            self._step(stamped=bool(step_s))
            if time.monotonic() - pumped > 0.25:
                pumped = time.monotonic()
                self.pump()
        return {"frames": frames, "wall_s": time.monotonic() - began, "latest_s": late_s}

    def _step(self, *, stamped: bool) -> None:
        # As a worker: everything of a step is encoded, then handed over at once. A paced frame carries its instant in
        # place of a word; both fit zmq's inline messages.
        text = str(time.monotonic_ns()) if stamped else " word"
        payload = pack_pieces([Piece(CONTENT, text)])
        envelopes = [encode(Tokens(one.request, one.attempt, self._sequence)) for one in self._taken]
        for envelope in envelopes:
            if not self.peer.send_encoded(envelope, payload):
                raise RuntimeError("the broker takes no more")
        self._sequence += 1
        self._sent += len(self._taken)

    def finish(self) -> dict[str, Any]:
        """DONE for every row."""
        for one in self._taken:
            self.peer.send(Done(one.request, one.attempt, Outcome.STOP, 64, 0, self._sequence), pack_summary(Summary()))
        return {}


class ApiEnd(End):
    """Receives them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__("api", *arguments)
        self._next: dict[bytes, int] = {}
        self._received = 0

    def submit(self) -> dict[str, Any]:
        """One request for each row; returns when all have their place."""
        ids = [secrets.token_bytes(16) for _ in range(self.rows)]
        self._next = dict.fromkeys(ids, 0)
        self._received = 0
        self.counter.set(0)
        self.peer.send(Reserve(ids, "bench", MODEL, 0, ""))
        while not any(isinstance(event.message, Reserved) for event in self.pump(10)):
            pass
        for id in ids:
            request = GenerationRequest(PROMPT, 2**20)
            self.peer.send(Submit(id, len(PROMPT), request.max_tokens, b"", "f"), pack_request(request))
        return {}

    def started(self) -> dict[str, Any]:
        """Wait for every row's STARTED."""
        count = 0
        while count < self.rows:
            for event in self.pump(10):
                if not isinstance(event.message, Started):
                    raise RuntimeError(f"{event.message} where STARTED was due")
                count += 1
        return {}

    def receive(self, frames: int, stamped: bool) -> dict[str, Any]:
        """So many frames; the latencies in µs, sorted, if they are stamped."""
        last = self._received + frames
        came: list[tuple[int, bytes]] = []
        while self._received < last:
            events = self.pump(100)
            now = time.monotonic_ns()
            for event in events:
                self._check(event)
                if stamped:
                    came.append((now, event.payload))
            self.counter.set(self._received)
        # Payloads are [[channel, text]] of a fixed length: the stamp is what follows the four bytes of head.
        latencies = sorted((now - int(payload[4:])) / 1000 for now, payload in came)
        return {"latencies_us": latencies[:: max(1, len(latencies) // 20_000)]}

    def _check(self, event: Received) -> None:
        message = event.message
        if not isinstance(message, Tokens):
            raise RuntimeError(f"{type(message).__name__} where TOKENS were due")
        if message.seq != self._next[message.request]:
            raise RuntimeError(f"a gap: seq {message.seq} where {self._next[message.request]} was due")
        self._next[message.request] += 1
        self._received += 1

    def over(self) -> dict[str, Any]:
        """Wait for every row's DONE."""
        count = 0
        while count < self.rows:
            count += sum(isinstance(event.message, Done) for event in self.pump(10))
        return {}


if __name__ == "__main__":
    kind = {"worker": WorkerEnd, "api": ApiEnd}[sys.argv[1]]
    kind(sys.argv[2], int(sys.argv[3])).serve()
