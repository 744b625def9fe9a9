"""Whose turn it is: priorities that age, and keys of one priority by virtual time (pure).

Ranks: the highest priority goes first, but a priority that stands back behind a higher one rises by one for each `step_s`,
until it has had a turn. Time spent waiting for one's own kind does not count, or a long queue would make everybody equal.

Turns is start-time fair queueing. A turn costs a key 1/weight of virtual time; the key that is least far goes first. A key
that comes anew starts at the present, so what it left unused is not saved up; a key that comes back at once starts where
its last turn ended, so coming one at a time gains nothing. Every operation costs the logarithm of the number of keys.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Below this many entries sweeping is not worth its own cost.
_SWEEP_AT = 64


class Ranks(Generic[T]):
    """What waits, by priority. at: priority -> what waits there; an entry is put in by the owner and taken out by empty()."""

    def __init__(self, step_s: float) -> None:
        self.at: dict[int, T] = {}
        self._step_s = step_s
        self._passed_at: dict[int, float] = {}

    def first(self, now: float) -> int:
        """The priority whose turn it is. Raises ValueError when nothing waits."""
        if not self._passed_at:
            return max(self.at)
        return max(self.at, key=lambda priority: (self._risen(priority, now), -priority))

    def served(self, priority: int, now: float) -> None:
        """It had a turn: those below have stood back since now, if not longer."""
        self._passed_at.pop(priority, None)
        for lower in self.at:
            if lower < priority:
                self._passed_at.setdefault(lower, now)

    def empty(self, priority: int) -> None:
        """Nothing waits there any more."""
        del self.at[priority]
        self._passed_at.pop(priority, None)

    def _risen(self, priority: int, now: float) -> float:
        since = self._passed_at.get(priority)
        return priority if since is None else priority + (now - since) / self._step_s


class Turn(NamedTuple):
    """A key in the order of turns. tag: virtual time at which its turn begins. last: number of its latest turn, so that of
    two with one tag it is the one that had none for longer. arrival: of its oldest request."""

    tag: float
    last: int
    arrival: int
    key: str


class Turns:
    """The keys that wait at one priority, and how far each has come."""

    def __init__(self) -> None:
        self._present = 0.0
        self._count = 0
        self._ended: dict[str, tuple[float, int]] = {}
        self._turns: dict[str, Turn] = {}
        self._heap: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def next_turn(self, key: str, arrival: int) -> Turn:
        """Where a key stands, or would if it came now."""
        ended, last = self._ended.get(key, (0.0, 0))
        return Turn(max(ended, self._present), last, arrival, key)

    def join(self, key: str, arrival: int) -> None:
        """Something of this key waits here now; or its oldest request is another one than before."""
        known = self._turns.get(key)
        turn = self.next_turn(key, arrival) if known is None else known._replace(arrival=arrival)
        self._turns[key] = turn
        heapq.heappush(self._heap, turn)
        if len(self._heap) > 2 * len(self._turns) + _SWEEP_AT:
            self._heap = [entry for entry in self._heap if self._turns.get(entry.key) is entry]
            heapq.heapify(self._heap)

    def leave(self, key: str) -> None:
        """Nothing of this key waits here any more."""
        del self._turns[key]

    def served(self, key: str, weight: float) -> None:
        """A key that waited here had its turn, and stands here no more until it joins again."""
        turn = self._turns.pop(key)
        self._present = max(self._present, turn.tag)
        self._count += 1
        self._ended[key] = turn.tag + 1 / weight, self._count
        if len(self._ended) > 2 * len(self._turns) + _SWEEP_AT:
            self._ended = {name: end for name, end in self._ended.items() if end[0] > self._present or name in self._turns}

    def first(self) -> str:
        """The key whose turn it is. Raises IndexError when none waits."""
        while self._turns.get(self._heap[0].key) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].key

    def order(self) -> Iterator[Turn]:
        """All keys by their next turn; the first few cost the same however many there are."""
        ahead = [(self._heap[0], 0)] if self._heap else []
        while ahead:
            turn, at = heapq.heappop(ahead)
            if self._turns.get(turn.key) is turn:
                yield turn
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(self._heap):
                    heapq.heappush(ahead, (self._heap[child], child))
