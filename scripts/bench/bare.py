"""A generator without a server round it, in a process of its own: `python -m scripts.bench.bare FOLDER SLOTS KIND`.

Generates the same prompts over the same weights, float32 on a CPU. KIND generator: mlx-lm's BatchGenerator driven by nothing but a
loop, on mlx as it comes; engine: our engine driven by a loop, computing as in a worker. Everything that HTTP, broker and
worker add is absent. Commands come line by line on stdin.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from common.envelope import encode
from common.generation import GenerationRequest, Sampling, pack_summary
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended, Prefilled
from worker.engines.batched import BatchedEngine
from worker.engines.weights import load_weights
from worker.placement import plan
from worker.plan import FLOAT32, held_precision
from worker.running import Running
from worker.seat import Seat

# As the worker's own, so that both read prompts in the same strides.
PREFILL_STEP, PREFILL_BATCH = 256, 8


class Bare:
    """What both kinds have. Commands are methods."""

    def facts(self) -> dict[str, Any]:
        """What it runs on."""
        return {"blas": device.blas_in_use()}

    def serve(self) -> None:
        """Carry out commands until stdin ends."""
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(self, command.pop("do"))(**command)), flush=True)


class BareGenerator(Bare):
    """mlx-lm's BatchGenerator, loaded."""

    def __init__(self, folder: Path, slots: int) -> None:
        found = model_files.read(folder)
        precision = held_precision(FLOAT32, found, 0, device.backend() == device.CPU)
        self._generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
            load_weights(folder, precision, lambda _: None),
            stop_tokens=[[token] for token in found.eos_ids],
            completion_batch_size=slots,
            prefill_batch_size=PREFILL_BATCH,
            prefill_step_size=PREFILL_STEP,
        )

    def generator(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """mlx-lm's BatchGenerator alone."""
        began = time.monotonic()
        self._generator.insert(prompts, max_tokens=[tokens] * len(prompts))
        left, made = len(prompts), 0
        while left:
            _, responses = self._generator.next()
            for response in responses:
                made += response.finish_reason != "stop"
                left -= response.finish_reason is not None
        return {"tokens": made, "wall_s": time.monotonic() - began}


class BareEngine(Bare):
    """Our engine, loaded."""

    def __init__(self, folder: Path, slots: int) -> None:
        self._engine = BatchedEngine(folder, slots=slots, prefill_step=PREFILL_STEP, cpu_weights=FLOAT32)
        self._engine.load(lambda _: None)
        self._requests = 0

    def engine(self, prompts: list[list[int]], tokens: int, **wanted: Any) -> dict[str, Any]:
        """The worker's engine, with its text and its checks. wanted: more fields of the requests."""
        began = time.monotonic()
        for prompt in prompts:
            self._start(prompt, tokens, **wanted)
        left, made = len(prompts), 0
        while left:
            for step in self._engine.step():
                made += isinstance(step, Committed)
                left -= isinstance(step, Ended)
        return {"tokens": made, "wall_s": time.monotonic() - began}

    def pipeline(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """The engine with everything that the worker's loop does with its steps, up to the frames' bytes."""
        began, bytes_made, made = time.monotonic(), 0, 0
        seats = {}
        for prompt in prompts:
            id = self._start(prompt, tokens, stop=["THE END", "\n\n\n\n"])
            request = GenerationRequest(prompt, tokens, stop=["THE END", "\n\n\n\n"])
            markup = self._engine.facts.markup
            running = Running(id, 1, "bench", request, "batched", began, markup)
            seats[id] = Seat(1, running, plan(request, self._engine.facts, False))
        while seats:
            steps, now = self._engine.step(), time.monotonic()
            for step in steps:
                seat = seats[step.request]
                if isinstance(step, Committed):
                    made += 1
                    seat.keep(seat.running.committed(step, now), now)
                elif isinstance(step, Prefilled):
                    seat.running.prefilled(step, now)
                elif isinstance(step, Ended):
                    pieces, finish = seats.pop(step.request).running.ended(step, now)
                    seat.keep(pieces, now)
                    bytes_made += len(pack_summary(finish.summary))
                if seat.pieces:
                    message, payload = seat.frame()
                    bytes_made += len(encode(message)) + len(payload)
        return {"tokens": made, "wall_s": time.monotonic() - began, "bytes": bytes_made}

    def first(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to one request's first token, alone."""
        began = time.monotonic()
        id = self._start(prompt, 2)
        at = 0.0
        while self._engine.busy:
            for step in self._engine.step():
                at = at or (time.monotonic() - began if isinstance(step, Committed) and step.request == id else 0.0)
        return {"first_s": at}

    def stall(self, prompts: list[list[int]], long: list[int]) -> dict[str, Any]:
        """The longest time in which a running row drew no token while a long prompt was read."""
        rows = [self._start(prompt, 4000) for prompt in prompts]
        last = dict.fromkeys(rows, 0.0)
        while not all(last.values()):
            self._step(last)
        reader, gap = self._start(long, 2), 0.0
        # The wait for the first step's end is a gap as well.
        last = dict.fromkeys(rows, time.monotonic())
        read = False
        while not read:
            before = dict(last)
            read = reader in self._step(last)
            gap = max(gap, *(last[row] - before[row] for row in rows))
        for row in (*rows, reader):
            self._engine.cancel(row)
        return {"gap_s": gap}

    def _step(self, last: dict[RequestId, float]) -> set[RequestId]:
        committed = {step.request for step in self._engine.step() if isinstance(step, Committed)}
        now = time.monotonic()
        last.update((row, now) for row in committed & last.keys())
        return committed

    def _start(self, prompt: list[int], tokens: int, **wanted: Any) -> RequestId:
        self._requests += 1
        id = RequestId(self._requests.to_bytes(16, "big"))
        self._engine.start(id, GenerationRequest(prompt, tokens, Sampling(temperature=0.0), **wanted))
        return id


if __name__ == "__main__":
    kind = {"generator": BareGenerator, "engine": BareEngine}[sys.argv[3]]
    kind(Path(sys.argv[1]), int(sys.argv[2])).serve()
