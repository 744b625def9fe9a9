"""What a loaded model really takes: its caches' sizes and its number of tokens, asked of the model itself.

Owns the probe. Must never know budgets. Invariant: nothing is computed: mlx builds the graph of one short run, whose
shapes and types say all of it, and drops it again.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from worker.cache_layout import CacheBytes

# Two lengths that are shorter than any window tell what kinds of caches that are not known keep of each token.
PROBES = (1, 9)


def measured(model: nn.Module) -> tuple[CacheBytes, int]:
    """(what rows of this model keep, its vocabulary)."""
    (short, logits), (long, _) = (_run(model, length) for length in PROBES)
    token = row = 0
    windows: dict[int, int] = {}
    for before, after in zip(_flat(short), _flat(long), strict=True):
        match after:
            case RotatingKVCache():
                windows[after.max_size] = windows.get(after.max_size, 0) + _column(after)
            case ChunkedKVCache():
                windows[after.chunk_size] = windows.get(after.chunk_size, 0) + _column(after)
            case KVCache():
                token += _column(after)
            case ArraysCache():
                row += after.nbytes
            case _:
                grown = max(0, after.nbytes - before.nbytes) // (PROBES[1] - PROBES[0])
                token += grown
                row += max(0, before.nbytes - grown * PROBES[0])
    return CacheBytes(token, tuple(sorted(windows.items())), row), logits.shape[-1]


def _run(model: nn.Module, length: int) -> tuple[list[Any], mx.array]:
    cache = make_prompt_cache(model)
    logits = model(mx.zeros((1, length), mx.int32), cache=cache)
    return cache, logits


def _flat(caches: Iterable[Any]) -> list[Any]:
    """The parts of caches that are lists themselves."""
    found: list[Any] = []
    for cache in caches:
        found += _flat(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def _column(cache: Any) -> int:
    """Bytes of one token; 0 for a layer that this model does not use."""
    return 0 if cache.keys is None else cache.nbytes // cache.keys.shape[2]
