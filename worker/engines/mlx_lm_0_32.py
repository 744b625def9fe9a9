"""The parts of mlx-lm 0.32.2 that have no promise of stability, behind names of our own.

The only module that touches them; tests/worker/test_mlx_lm_private.py fails when the pinned version or one of them
changes. Must never know requests or text. Invariant: what mlx-lm does by itself and we do not want (a wired limit,
token lists changed in place, stops that replace the model's) stays inside.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model, load_model

VERSION = "0.32.2"

# `import mlx_lm.generate` yields the function of that name, which the package binds over its module.
generate = importlib.import_module("mlx_lm.generate")

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class PromptProgress:
    """A stretch of a prompt was read."""

    uid: int
    done: int
    total: int


@dataclass(frozen=True)
class Token:
    """A row's next token with the normalized logits (V,) that it was drawn from. reason: "", stop or length."""

    uid: int
    token: int
    logprobs: mx.array
    reason: str


def load(folder: Path) -> nn.Module:
    """The model in `folder`, its weights still in the files. Raises whatever mlx-lm raises for what it cannot load."""
    model, _ = load_model(folder, lazy=True)
    return model


def unpack_quantized(model: nn.Module) -> nn.Module:
    """The model with plain layers in place of quantized ones, not yet evaluated."""
    return dequantize_model(model)


class Batch:
    """Continuous batching of one model: rows join and leave between steps. All calls from the thread that loaded it."""

    def __init__(
        self, model: nn.Module, slots: int, prefill_step: int, prefill_batch: int, stop_ids: Sequence[int]
    ) -> None:
        self._generator = generate.BatchGenerator(
            model,
            completion_batch_size=slots,
            prefill_batch_size=prefill_batch,
            prefill_step_size=prefill_step,
        )
        # The constructor raises the wired limit to the device's whole working set, which machines have panicked from.
        # Closing puts back the limit found before and does nothing else; otherwise that would happen at some later
        # time, when the object is collected.
        self._generator.close()
        self._stops = generate.StopSequences([[token] for token in stop_ids])

    def insert(self, prompt: list[int], max_tokens: int, sampler: Sampler, processors: Sequence[Processor]) -> int:
        """A new row; returns its uid. Raises ValueError for an empty prompt and for max_tokens below 1."""
        (uid,) = self._generator.insert(
            [prompt],
            max_tokens=[max_tokens],
            samplers=[sampler],
            logits_processors=[list(processors)],
            stop_sequences=[self._stops],
        )
        return uid

    def remove(self, uid: int) -> None:
        """Take a row out, queued, prefilling or decoding; the others' tokens do not change. Unknown uids are fine."""
        self._generator.remove([uid])

    def step(self) -> tuple[list[PromptProgress], list[Token]]:
        """One decode step of all rows and one stretch of prompt."""
        prompts, tokens = self._generator.next()
        return (
            [PromptProgress(item.uid, *item.progress) for item in prompts],
            [Token(item.uid, item.token, item.logprobs, item.finish_reason or "") for item in tokens],
        )

    @property
    def stream(self) -> Any:
        """The stream of the batch's arrays; work on them elsewhere would wait across streams."""
        return self._generator.stream
