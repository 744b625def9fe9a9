"""Who holds how much of one model's queue (pure).

The queue is what can still be refused: places reserved and requests waiting that no worker ever had. Knows no phases: the
ledger says what comes and goes. A key is over its share by what it would still hold, over its weight, if it gave one up.
Finding the key that is most over costs the logarithm of the number of keys: the heap holds upper bounds, which are
corrected when they come up.
"""

import heapq
from collections import Counter, OrderedDict
from itertools import islice

from common.ids import RequestId


def may_displace(mine: float, theirs: float) -> bool:
    """Whether a key may take a place of the full queue from another.

    Both are shares (places over weight) as they would be afterwards, so that nobody is ever displaced back.
    """
    return mine <= theirs


class Shares:
    """The queue by key, each key's youngest last."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[RequestId, None]] = {}
        self._weights: dict[str, float] = {}
        self._bounds: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def held(self, key: str) -> int:
        """Places of the queue that a key holds."""
        return len(self._held.get(key, ()))

    def everything(self) -> set[RequestId]:
        """All of the queue, for checks."""
        return {request for requests in self._held.values() for request in requests}

    def add(self, request: RequestId, key: str, weight: float) -> None:
        """The youngest of its key. A weight counts from its latest mention."""
        self._held.setdefault(key, OrderedDict())[request] = None
        self._weights[key] = weight
        over = self._over(key)
        if over > self._bounds.get(key, -1.0):
            self._bound(key, over)

    def discard(self, request: RequestId, key: str) -> None:
        """It is in the queue no more, if it was."""
        requests = self._held.get(key)
        if requests is None:
            return
        requests.pop(request, None)
        if not requests:
            del self._held[key], self._weights[key], self._bounds[key]

    def displaced(self, key: str, weight: float, wanted: int, missing: int) -> list[RequestId]:
        """Whom a key that wants `wanted` places displaces so that `missing` more are there; empty: nobody may be.

        One by one the youngest of whoever is most over; all or none.
        """
        mine = (self.held(key) + wanted) / weight
        taken: Counter[str] = Counter()
        found: list[RequestId] = []
        while len(found) < missing:
            most = self._most_over(taken)
            if most is None or most == key or not may_displace(mine, self._over(most, taken[most])):
                break
            found += islice(reversed(self._held[most]), taken[most], taken[most] + 1)
            taken[most] += 1
        for other in taken:
            self._bound(other, self._over(other))
        return found if len(found) == missing else []

    def _over(self, key: str, given: int = 0) -> float:
        return (len(self._held[key]) - given - 1) / self._weights[key]

    def _most_over(self, taken: Counter[str]) -> str | None:
        while self._heap:
            bound, key = self._heap[0]
            if self._bounds.get(key) != -bound:
                heapq.heappop(self._heap)
            elif (over := self._over(key, taken[key])) < -bound:
                self._bound(key, over)
            else:
                return key
        return None

    def _bound(self, key: str, over: float) -> None:
        self._bounds[key] = over
        heapq.heappush(self._heap, (-over, key))
        if len(self._heap) > 2 * len(self._bounds) + 64:
            self._heap = [(-bound, name) for name, bound in self._bounds.items()]
            heapq.heapify(self._heap)
