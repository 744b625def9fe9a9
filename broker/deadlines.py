"""Deadlines in a heap, so that nothing is scanned per event (pure).

A key has at most one deadline; setting it again or dropping it leaves a stale heap entry, which is skipped when it comes up
and swept out when stale entries outnumber live ones.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Below this many entries sweeping is not worth its own cost.
_SWEEP_AT = 64


class Deadlines(Generic[K]):
    """Instants by key."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """`key` is due at `at`, and at no other instant."""
        self._at[key] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))
        if len(self._heap) > 2 * len(self._at) + _SWEEP_AT:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """`key` is due no more; unknown keys are fine."""
        self._at.pop(key, None)

    def next_at(self) -> float | None:
        """The earliest instant, None when there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[K]:
        """The keys whose instant has come, each once, removed as they are given."""
        while (at := self.next_at()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            yield key
