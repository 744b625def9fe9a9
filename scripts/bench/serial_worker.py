"""The serial lanes in a process of their own: `python -m scripts.bench.serial_worker DIFFUSION LLAMA`.

The worker's real loop and engines; only the link to the broker is left out, whose thread takes nothing of a reply's time
between two blocks. Commands come line by line on stdin.
"""

import json
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.envelope import Done, decode
from common.generation import GenerationRequest, Sampling, pack_request
from common.ids import RequestId
from worker import device
from worker.engine import Ended
from worker.engines.batched import BatchedEngine
from worker.engines.diffusion import DiffusionGemma
from worker.engines.serial import SerialEngine
from worker.engines.text import Texts
from worker.generators import Block
from worker.link import Item, Vitals, Work
from worker.loop import WorkerLoop

PROMPT = list(range(40, 72))


class Timed(DiffusionGemma):
    """With the time that was spent in it."""

    spent_s = 0.0

    def generate(self, *arguments: Any) -> Iterator[Block]:
        blocks = super().generate(*arguments)
        while True:
            began = time.perf_counter()
            block = next(blocks, None)
            self.spent_s += time.perf_counter() - began
            if block is None:
                return
            yield block


class Link:
    """A link that holds one request, and whose frames go nowhere. ended: called when its reply has."""

    def __init__(self, work: Work) -> None:
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.inbox.put(work)
        self.ended: Callable[[], None] = lambda: None

    def post(self, frames: list[tuple[int, bytes, bytes]]) -> None:
        """Look for the reply's end."""
        if any(isinstance(decode(envelope), Done) for _, envelope, _ in frames):
            self.ended()

    def say_goodbye(self) -> None:
        """To nobody."""


class Lanes:
    """Both engines, loaded."""

    def __init__(self, diffusion: Path, llama: Path) -> None:
        def make(texts: Texts, progress: Callable[[str], None]) -> Timed:
            self._timed = Timed(diffusion, texts, progress)
            return self._timed

        self._serial = SerialEngine(diffusion, make)
        self._speculative = BatchedEngine(llama, slots=1, context=1024, draft=llama, draft_tokens=4)
        for engine in (self._serial, self._speculative):
            engine.load(lambda words: None)

    def facts(self) -> dict[str, Any]:
        """What it runs on."""
        return {"blas": device.blas_in_use()}

    def reply(self, seed: int, tokens: int) -> dict[str, float]:
        """A reply of block diffusion through the worker's loop: seconds in all, and in the generator."""
        request = GenerationRequest(PROMPT, tokens, Sampling(seed=seed))
        link = Link(Work(1, RequestId(bytes(16)), 1, "bench", pack_request(request)))
        loop = WorkerLoop(self._serial, link, Vitals(), "bench")  # type: ignore[arg-type]
        link.ended = lambda: loop.leave(0.0)
        self._timed.spent_s = 0.0
        began = time.perf_counter()
        loop.run()
        return {"whole_s": time.perf_counter() - began, "generator_s": self._timed.spent_s}

    def speculate(self, number: int) -> dict[str, int]:
        """Draft tokens of one reply, accepted and rejected."""
        prompt = [5 + (number * 37 + place) % 300 for place in range(20)]
        self._speculative.start(RequestId(bytes(16)), GenerationRequest(prompt, 100, Sampling(temperature=0.0)))
        ends: list[Ended] = []
        while self._speculative.busy:
            ends += [step for step in self._speculative.step() if isinstance(step, Ended)]
        return {"accepted": ends[0].accepted_draft_tokens, "rejected": ends[0].rejected_draft_tokens}

    def serve(self) -> None:
        """Carry out commands until stdin ends."""
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(self, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    Lanes(Path(sys.argv[1]), Path(sys.argv[2])).serve()
