"""The line of waiting requests of one model (pure).

Order: priority, then arrival; a request that comes back from a dead worker keeps its arrival and so stands in front again.
Every operation costs the same at ten and at ten thousand waiting requests, except inserting in the middle, which only
requests that come back do.
"""

from collections.abc import Iterator

from common.ids import RequestId


class WaitingLine:
    """Requests by (priority, arrival)."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[RequestId, int]] = {}
        self._rank_of: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._rank_of

    def add(self, request: RequestId, priority: int, arrival: int) -> None:
        """Put a request where its priority and arrival say."""
        assert request not in self._rank_of
        rank = self._ranks.setdefault(priority, {})
        self._rank_of[request] = priority
        newest = next(reversed(rank.values()), -1)
        rank[request] = arrival
        if arrival < newest:
            self._ranks[priority] = dict(sorted(rank.items(), key=lambda item: item[1]))

    def remove(self, request: RequestId) -> None:
        """Take a request out, wherever it stands."""
        priority = self._rank_of.pop(request)
        del self._ranks[priority][request]
        if not self._ranks[priority]:
            del self._ranks[priority]

    def heads(self) -> Iterator[RequestId]:
        """The one that has waited longest, of each priority."""
        for rank in self._ranks.values():
            yield next(iter(rank))

    def __iter__(self) -> Iterator[RequestId]:
        """In order of service. The line must not be changed while iterating."""
        for priority in sorted(self._ranks, reverse=True):
            yield from self._ranks[priority]
