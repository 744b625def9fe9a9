"""Which workers hold more memory than their share, and when one of them is to make room for a fresh process (pure).

Owns the patience: only a worker over its share in every report for so long is named, and one that was replaced for it
lately gets twice as long each time, since a share that is too small does not become larger by starting again. Must never
know requests: who drains it, and when it has nothing left, is the switchboard's affair.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from common.ids import PeerId

# A worker that went without trouble for so long starts with the first patience again.
FORGIVEN_S = 3600.0
MOST_DOUBLINGS = 6


@dataclass
class _Replaced:
    """How often a worker of this name was replaced in a row, and when last."""

    times: int
    at: float


class Overgrown:
    """The workers of one broker life."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[PeerId, float] = {}
        self._replaced: dict[str, _Replaced] = {}

    def reported(self, peer: PeerId, memory: Mapping[str, int], now: float) -> None:
        """memory: bytes as in a REPORT; without a budget nothing is too much."""
        budget = memory.get("budget", 0)
        if budget and memory.get("active", 0) + memory.get("cache", 0) > budget:
            self._since.setdefault(peer, now)
        else:
            self._since.pop(peer, None)

    def left(self, peer: PeerId) -> None:
        """Its session is over."""
        self._since.pop(peer, None)

    def due(self, peer: PeerId, name: str, now: float) -> bool:
        """Whether it has been over its share for long enough."""
        since = self._since.get(peer)
        return since is not None and now - since >= self._patience(name, now)

    def replaced(self, name: str, now: float) -> None:
        """A worker of this name is being drained for it."""
        before = self._replaced.get(name)
        times = before.times + 1 if before is not None and now - before.at < FORGIVEN_S else 1
        self._replaced[name] = _Replaced(times, now)

    def _patience(self, name: str, now: float) -> float:
        before = self._replaced.get(name)
        if before is None or now - before.at >= FORGIVEN_S:
            return self._patience_s
        return self._patience_s * 2.0 ** min(before.times, MOST_DOUBLINGS)
