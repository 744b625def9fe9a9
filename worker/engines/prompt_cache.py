"""What was read of prompts, kept so that the next prompt with the same head need not read it again.

Owns the entries, their order of use and their size in bytes. Must never know requests or the batch. Invariant: the
entries together are never larger than the limit, and no lookup changes or hands out an entry itself, only a copy.

Entries are mlx-lm's own per-layer caches. Its LRUPromptCache is not used: looking up a prompt that leaves a stored
one of 32,000 tokens early took 1.1 s on the reference machine (it copies a growing list per token of the rest), a hit
does not count as use, and it holds a dict per token outside its byte limit.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, trim_prompt_cache

# Reading so few tokens costs no more than finding and copying what was read of them.
SHORTEST = 16


@dataclass(eq=False)
class _Entry:
    tokens: np.ndarray
    cache: list[Any]
    size: int


class PromptCache:
    """Least recently used first out, bounded in bytes. For one model: it is dropped with it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._entries: list[_Entry] = []

    @property
    def nbytes(self) -> int:
        """What all entries hold."""
        return sum(entry.size for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Sequence[int] | np.ndarray) -> tuple[list[Any] | None, int]:
        """(a cache of the prompt's first n tokens, n), or (None, 0). n leaves the last token to be read: its logits are
        what the reply begins with."""
        best, count = self._best(prompt)
        if best is None:
            return None, 0
        self._use(best)
        # Arrays are copied when one side writes to them.
        found = copy.deepcopy(best.cache)
        if count < len(best.tokens):
            trim_prompt_cache(found, len(best.tokens) - count)
            for layer in found:
                _cut(layer)
        return found, count

    def covers(self, prompt: Sequence[int] | np.ndarray) -> int:
        """How many of the prompt's first tokens find() would give the cache of."""
        return self._best(prompt)[1]

    def _best(self, prompt: Sequence[int] | np.ndarray) -> tuple[_Entry | None, int]:
        wanted = np.asarray(prompt, np.int64)
        best, count = None, SHORTEST - 1
        for entry in self._entries:
            usable = _usable(entry, wanted)
            if usable > count:
                best, count = entry, usable
        return best, count if best else 0

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether an entry of these tokens would be of use; one that already covers them counts as used."""
        if self.limit_bytes <= 0 or len(tokens) < SHORTEST:
            return False
        wanted = np.asarray(tokens, np.int64)
        for entry in self._entries:
            if len(entry.tokens) >= len(wanted) and common(entry.tokens, wanted) == len(wanted):
                if len(entry.tokens) == len(wanted) or can_trim_prompt_cache(entry.cache):
                    self._use(entry)
                    return False
        return True

    def put(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keep a cache that has read exactly `tokens`; it is ours from now on. Its arrays must be evaluated: what is
        not yet computed holds on to all that it is computed from."""
        entry = _Entry(np.asarray(tokens, np.int64), cache, sum(layer.nbytes for layer in cache))
        if entry.size > self.limit_bytes:
            return
        # What can be cut from the new one is not kept twice.
        if can_trim_prompt_cache(cache):
            self._entries = [old for old in self._entries if not _begins(entry.tokens, old.tokens)]
        self._entries.append(entry)
        while self.nbytes > self.limit_bytes:
            del self._entries[0]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _use(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)


def _cut(layer: Any) -> None:
    """Drop what a trimmed cache only seems to be without: its buffers are still those of the whole entry, and who writes
    to it or keeps it would copy all of them. To a multiple of its step, as it grows by."""
    if type(layer) is not KVCache or layer.keys is None:
        return
    length = -(-layer.offset // layer.step) * layer.step
    if length < layer.keys.shape[2]:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _begins(tokens: np.ndarray, head: np.ndarray) -> bool:
    return len(head) <= len(tokens) and common(tokens, head) == len(head)


def _usable(entry: _Entry, prompt: np.ndarray) -> int:
    shared = min(common(entry.tokens, prompt), len(prompt) - 1)
    # A state-space or a wrapped sliding-window cache cannot be cut back: all of it or nothing.
    return shared if shared == len(entry.tokens) or can_trim_prompt_cache(entry.cache) else 0
