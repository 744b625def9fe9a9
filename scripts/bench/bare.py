"""The engine without Millpond round it, in a process of its own: `python -m scripts.bench.bare FOLDER SLOTS`.

Generates the same prompts two ways over the same float32 weights: mlx-lm's BatchGenerator driven by nothing but a loop,
and our engine driven by a loop. Everything that HTTP, broker and worker add is absent. Commands come line by line on
stdin.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended
from worker.engines.batched import BatchedEngine
from worker.engines.weights import load_weights
from worker.plan import FLOAT32

# As the worker's own, so that both read prompts in the same strides.
PREFILL_STEP, PREFILL_BATCH = 256, 8


class Bare:
    """Both engines, loaded."""

    def __init__(self, folder: Path, slots: int) -> None:
        facts = model_files.read(folder)
        self._generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
            load_weights(folder, FLOAT32, lambda _: None),
            stop_tokens=[[token] for token in facts.eos_ids],
            completion_batch_size=slots,
            prefill_batch_size=PREFILL_BATCH,
            prefill_step_size=PREFILL_STEP,
        )
        self._engine = BatchedEngine(folder, slots=slots, prefill_step=PREFILL_STEP, cpu_weights=FLOAT32)
        self._engine.load(lambda _: None)
        self._requests = 0

    def facts(self) -> dict[str, Any]:
        """What it runs on."""
        return {"blas": device.blas_in_use()}

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

    def engine(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """The worker's engine, with its text and its checks."""
        began = time.monotonic()
        for prompt in prompts:
            self._requests += 1
            id = RequestId(self._requests.to_bytes(16, "big"))
            self._engine.start(id, GenerationRequest(prompt, tokens, Sampling(temperature=0.0)))
        left, made = len(prompts), 0
        while left:
            for step in self._engine.step():
                made += isinstance(step, Committed)
                left -= isinstance(step, Ended)
        return {"tokens": made, "wall_s": time.monotonic() - began}

    def serve(self) -> None:
        """Carry out commands until stdin ends."""
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(self, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    Bare(Path(sys.argv[1]), int(sys.argv[2])).serve()
