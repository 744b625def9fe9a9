"""What a batch weighs up: reading the weights once more, copying caches, padding.

Owns these measures. Must never know rows or requests. Invariant: none of them changes anything.
"""

import time

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def weight_bytes(model: nn.Module) -> int:
    """What a step reads of the model."""
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


def copied_per_s() -> float:
    """Bytes that a growing array is copied at, into memory that is new to the process."""
    half = mx.zeros((4 << 20,))
    mx.eval(half)
    begun = time.monotonic()
    whole = mx.concatenate([half, half])
    mx.eval(whole)
    return whole.nbytes / max(time.monotonic() - begun, 1e-6)


def read_well_together(unread: list[int], step: int) -> bool:
    """Whether prompts with so many tokens left may be read as one rectangle of at most `step` columns.

    No more than half of it may be padding, and no more than two steps' work: the rows that decode wait for it.
    """
    chunks = [min(length, step) for length in unread]
    area = len(chunks) * max(chunks)
    return area <= 2 * step and area <= 2 * sum(chunks)
