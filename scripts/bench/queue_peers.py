"""The two ends of the queue benchmark: `python -m scripts.bench.queue_peers worker|api FOLDER 1`.

As in the relay benchmark, but the worker has one slot, thousands wait for it, and what happens is requests coming,
going and taking turns. One event at a time is in flight in turns, several in cycles, always few.
"""

import secrets
import sys
from typing import Any

from common.envelope import Cancel, Dispatch, Done, Reserve, Reserved, Started, Submit
from common.generation import GenerationRequest, Summary, pack_request, pack_summary
from common.outcomes import Outcome
from scripts.bench.relay_peers import MODEL, PROMPT, ApiEnd, WorkerEnd

BATCH = 50
PAYLOAD = pack_request(GenerationRequest(PROMPT, 64))


class OneSlot(WorkerEnd):
    """The worker."""

    def turn(self, count: int) -> dict[str, Any]:
        """So many times: what runs is done, the next in line comes."""
        summary = pack_summary(Summary())
        for _ in range(count):
            (current,) = self._taken
            self.peer.send(Done(current.request, current.attempt, Outcome.STOP, 64, 0, 1), summary)
            self._taken = []
            while not self._taken:
                self._taken = [event.message for event in self.pump(10) if isinstance(event.message, Dispatch)]
            self.peer.send(Started(self._taken[0].request, self._taken[0].attempt, "batched", "bench"))
        return {}


class Crowd(ApiEnd):
    """The API process of those who wait."""

    def fill(self, count: int) -> dict[str, Any]:
        """So many more requests wait."""
        for start in range(0, count, BATCH):
            for id in self._reserved(min(BATCH, count - start)):
                self._submit(id)
        return {}

    def cycle(self, count: int) -> dict[str, Any]:
        """So many times: a place, a prompt, and the client goes again."""
        for _ in range(0, count, BATCH):
            ids = self._reserved(BATCH)
            for id in ids:
                self._submit(id)
            for id in ids:
                self.peer.send(Cancel(id))
            ended = 0
            while ended < BATCH:
                outcomes = [event.message.outcome for event in self.pump(10) if isinstance(event.message, Done)]
                if set(outcomes) - {Outcome.CANCELLED}:
                    raise RuntimeError(f"requests ended as {set(outcomes)}")
                ended += len(outcomes)
        return {}

    def _reserved(self, count: int) -> list[bytes]:
        ids = [secrets.token_bytes(16) for _ in range(count)]
        for number, id in enumerate(ids):
            self.peer.send(Reserve([id], "bench", MODEL, 0, f"key-{number}"))
        held = 0
        while held < count:
            held += sum(isinstance(event.message, Reserved) for event in self.pump(10))
        return ids

    def _submit(self, id: bytes) -> None:
        self.peer.send(Submit(id, len(PROMPT), 64, b"", "f"), PAYLOAD)


if __name__ == "__main__":
    kind = {"worker": OneSlot, "api": Crowd}[sys.argv[1]]
    kind(sys.argv[2], int(sys.argv[3])).serve()
