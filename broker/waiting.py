"""The line of waiting requests of one model (pure).

Order: those that come back from a dead worker, then by priority, then by fair share between keys, then by arrival. A key
stands at the priority of its best request and has one place there, however many requests it has; what it is given goes to
its own best one, then its oldest. So a key is delayed by another's requests only turn by turn, and never by their number.
Both kinds of priority age (broker/turns). Every operation costs the same at ten and at ten thousand waiting requests.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from broker.turns import Ranks, Turn, Turns
from common.ids import RequestId


class _KeyLine:
    """One key's requests by priority, each oldest first, with their arrivals. level, head: where it stands in the turns."""

    __slots__ = ("head", "level", "ranks", "weight")

    def __init__(self, step_s: float) -> None:
        # Not plain dicts: finding their first entry costs as much as there were entries before it.
        self.ranks: Ranks[OrderedDict[RequestId, int]] = Ranks(step_s)
        self.weight = 1.0
        self.level: int | None = None
        self.head = -1


class WaitingLine:
    """Requests by turn. step_s: how long standing back raises a priority by one, in seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._where: dict[RequestId, tuple[str, int]] = {}
        self._returned: dict[RequestId, int] = {}
        self._keys: dict[str, _KeyLine] = {}
        self._levels: Ranks[Turns] = Ranks(step_s)
        # Also those where nobody waits now: who comes back finds what he had.
        self._turns: dict[int, Turns] = {}

    def __len__(self) -> int:
        return len(self._where) + len(self._returned)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._where or request in self._returned

    def __iter__(self) -> Iterator[RequestId]:
        """In order of service, as if nobody had stood back. The line must not be changed while iterating."""
        yield from self._returned
        yield from self._by_turns()

    def add(self, request: RequestId, key: str, weight: float, priority: int, arrival: int) -> None:
        """A request that was never served. Arrivals only grow, but for those that were rendered again."""
        assert request not in self
        line = self._keys.get(key)
        if line is None:
            line = self._keys[key] = _KeyLine(self._step_s)
        line.weight = weight
        requests = line.ranks.at.setdefault(priority, OrderedDict())
        late = [one for one, at in requests.items() if at > arrival] if requests and _latest(requests) > arrival else []
        requests[request] = arrival
        for one in late:
            requests.move_to_end(one)
        self._where[request] = (key, priority)
        self._place(key, line)

    def put_back(self, request: RequestId, arrival: int) -> None:
        """A request whose turn came to nothing: in front, and free."""
        assert request not in self
        self._returned[request] = arrival
        self._returned = dict(sorted(self._returned.items(), key=lambda item: item[1]))

    def serve(self, request: RequestId, now: float) -> None:
        """Its turn: take it out, and count it against its key."""
        if request not in self._returned:
            key, priority = self._where[request]
            line = self._keys[key]
            assert line.level is not None
            line.ranks.served(priority, now)
            self._levels.served(line.level, now)
            turns = self._turns[line.level]
            turns.served(key, line.weight)
            if not turns:
                self._levels.empty(line.level)
            line.level = None
        self.remove(request)

    def remove(self, request: RequestId) -> None:
        """Take a request out that had no turn, wherever it stands."""
        if self._returned.pop(request, None) is not None:
            return
        key, priority = self._where.pop(request)
        line = self._keys[key]
        del line.ranks.at[priority][request]
        if not line.ranks.at[priority]:
            line.ranks.empty(priority)
        self._place(key, line)

    def forget(self) -> None:
        """Nobody is here, nobody is served: what keys had does not count any more."""
        assert not self._where
        self._turns.clear()

    def order(self, now: float) -> Iterator[RequestId]:
        """In order of service. The line must not be changed while iterating."""
        yield from self._returned
        if not self._where:
            return
        line = self._keys[self._levels.at[self._levels.first(now)].first()]
        first = next(iter(line.ranks.at[line.ranks.first(now)]))
        yield first
        for request in self._by_turns():
            if request != first:
                yield request

    def heads(self) -> Iterator[RequestId]:
        """Those that have waited longest, of each key and priority."""
        if self._returned:
            yield next(iter(self._returned))
        for line in self._keys.values():
            for requests in line.ranks.at.values():
                yield next(iter(requests))

    def _place(self, key: str, line: _KeyLine) -> None:
        """Let a key stand where its best request says."""
        level = max(line.ranks.at, default=None)
        if line.level is not None and line.level != level:
            turns = self._turns[line.level]
            turns.leave(key)
            if not turns:
                self._levels.empty(line.level)
        if level is None:
            del self._keys[key]
            return
        head = next(iter(line.ranks.at[level].values()))
        if (line.level, line.head) != (level, head):
            turns = self._levels.at[level] = self._turns.setdefault(level, Turns())
            turns.join(key, head)
        line.level, line.head = level, head

    def _by_turns(self) -> Iterator[RequestId]:
        """Priority by priority; keys that have had all of one go on at their next."""
        levels = dict(self._levels.at)
        later: defaultdict[int, list[Turn]] = defaultdict(list)
        while levels or later:
            priority = max(levels.keys() | later.keys())
            coming = levels.pop(priority).order() if priority in levels else iter(())
            yield from self._at(priority, coming, later.pop(priority, []), later)

    def _at(
        self, priority: int, coming: Iterator[Turn], again: list[Turn], later: defaultdict[int, list[Turn]]
    ) -> Iterator[RequestId]:
        heapq.heapify(again)
        requests: dict[str, Iterator[RequestId]] = {}
        turn = next(coming, None)
        while turn is not None or again:
            if turn is None or (again and again[0] < turn):
                current = heapq.heappop(again)
            else:
                current, turn = turn, next(coming, None)
            line = self._keys[current.key]
            if current.key not in requests:
                requests[current.key] = iter(line.ranks.at[priority])
            request = next(requests[current.key], None)
            if request is not None:
                yield request
                heapq.heappush(again, current._replace(tag=current.tag + 1 / line.weight))
            elif (below := max((lower for lower in line.ranks.at if lower < priority), default=None)) is not None:
                head = next(iter(line.ranks.at[below].values()))
                later[below].append(self._turns.get(below, _NEW).next_turn(current.key, head))


_NEW = Turns()


def _latest(requests: OrderedDict[RequestId, int]) -> int:
    return requests[next(reversed(requests))]
