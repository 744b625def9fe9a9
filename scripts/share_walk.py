"""Order and fairness under random walks: many keys, few slots, nobody dies. Part of `scripts/walk`.

Beside the ledger stands a second, slow opinion of what is fair, which looks at everything after every event and shares no
code with the ledger. Checked: of two keys that both wait at one priority neither gets ahead of its share by more than a turn
each; a lower priority goes first only when it has stood back for long enough, and then does; a full queue is given up by
whoever holds most of it, the youngest first, for those who hold less, and never otherwise; what is displaced ends once.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

from broker import invariants
from broker.ledger import Ledger
from broker.records import Effect, Phase, Request, ToApi, ToWorker
from broker.settings import BrokerSettings
from common.envelope import Dispatch, Done, Rejected, Reserve, Reserved, Submit, WorkerFacts
from common.outcomes import Outcome

MODEL, API, WORKER = "m", b"api", b"worker"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5, "e": 5.0}
QUEUE_TIMEOUT_S = 45.0
# What docs/api.md promises: two seconds of standing back for one of priority.
STEP_S = QUEUE_TIMEOUT_S * 0.9 / 20
ROUNDING = 1e-6


@dataclass
class Client:
    """A request: reserved, sent, running, over."""

    key: str
    state: str = "reserved"


class StoodBack:
    """Since when each priority has been passed over, from nothing but who was served while who waited."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._overdue: Counter[int] = Counter()

    def served(self, priority: int, waiting: set[int], now: float) -> None:
        """`waiting`: all priorities at which somebody waited, the served one too."""
        for higher in waiting:
            if higher > priority:
                stood = now - self._since.get(priority, now)
                assert stood >= (higher - priority) * STEP_S - ROUNDING, "a lower priority went first before its time"
        self._since.pop(priority, None)
        self._overdue.pop(priority, None)
        for other in waiting - {priority}:
            if other < priority:
                self._since.setdefault(other, now)
            if now - self._since.get(other, now) > (max(waiting) - other + 2) * STEP_S:
                self._overdue[other] += 1
                assert self._overdue[other] <= len(waiting), "a lower priority starves"
        self.keep(waiting)

    def keep(self, waiting: set[int]) -> None:
        """Forget those at which nobody waits any more."""
        for gone in self._since.keys() - waiting:
            del self._since[gone]
            self._overdue.pop(gone, None)


class ShareWalk:
    """One walk. Everything that happens is drawn from one seeded generator."""

    def __init__(self, seed: int, ledger: type[Ledger] = Ledger) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.slots = self.random.choice([1, 1, 2, 4])
        self.queue = self.random.choice([2, 6, 20])
        self.settings = BrokerSettings(max_queue=self.queue, queue_timeout=QUEUE_TIMEOUT_S, request_timeout=1e6)
        self.ledger = ledger(self.settings, 0.0)
        self.keys = self.random.sample(sorted(WEIGHTS), self.random.choice([2, 3, 5]))
        self.flooder = self.random.choice([*self.keys, None])
        self.priorities = self.random.choice([[0], [0], [0, 0, 1], [-5, 0, 0, 5]])
        self.numbers = itertools.count(1)
        self.clients: dict[bytes, Client] = {}
        self.outcomes: Counter[str] = Counter()
        # How often each of two keys had a turn since both began to wait at this priority.
        self.together: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
        # Turns that others had at the priority at which a key waits, since its own last one or since it came.
        self.passed: dict[str, tuple[int, Counter[str]]] = {}
        self.stood_back = StoodBack()
        self.stood_back_within = {key: StoodBack() for key in self.keys}
        self.turns = 0
        facts = WorkerFacts(MODEL, "f", self.slots, 2**40, 1, 100, ["batched"], [])
        self.deliver(self.ledger.worker_joined(WORKER, "w", facts, 0.0))

    # -- the second opinion

    def waiting(self) -> dict[str, list[Request]]:
        """Who waits, by key."""
        found: dict[str, list[Request]] = {}
        for request in self.ledger.requests.values():
            if request.phase is Phase.WAITING:
                found.setdefault(request.key, []).append(request)
        return found

    def queued(self) -> Counter[str]:
        """Places by key that could still be refused."""
        return Counter(r.key for r in self.ledger.requests.values() if r.phase is not Phase.RUNNING)

    def dispatched(self, id: bytes, before: dict[str, list[Request]]) -> None:
        """`before`: who waited when it was chosen."""
        request = self.ledger.requests[id]
        best = {key: max(r.priority for r in requests) for key, requests in before.items()}
        mine = before[request.key]
        self.stood_back.served(best[request.key], set(best.values()), self.now)
        self.stood_back_within[request.key].served(request.priority, {r.priority for r in mine}, self.now)
        older = [r for r in mine if r.priority == request.priority and r.arrival < request.arrival]
        assert not older, "a key's younger request went before its older one"
        for pair, (_, counts) in self.together.items():
            if request.key in pair:
                counts[request.key] += 1
                one, other = ((counts[key] / WEIGHTS[key]) for key in pair)
                most = sum(1 / WEIGHTS[key] for key in pair)
                assert abs(one - other) <= most + ROUNDING, f"{pair} had {dict(counts)} turns"
        for key, (level, counts) in self.passed.items():
            if key != request.key and level == best[request.key]:
                counts[request.key] += 1
                most = 1 + WEIGHTS[request.key] / WEIGHTS[key]
                assert counts[request.key] <= most + ROUNDING, f"{key} saw {dict(counts)} pass"
        self.passed.pop(request.key, None)
        self.turns += 1

    def look(self) -> None:
        """Who waits beside whom, after every event."""
        invariants.check(self.ledger, self.now)
        waiting = self.waiting()
        best = {key: max(r.priority for r in requests) for key, requests in waiting.items()}
        self.stood_back.keep(set(best.values()))
        for key in self.keys:
            if self.passed.get(key, (None,))[0] != best.get(key):
                self.passed.pop(key, None)
            if key in best:
                self.passed.setdefault(key, (best[key], Counter()))
            self.stood_back_within[key].keep({r.priority for r in waiting.get(key, ())})
        for pair in itertools.combinations(self.keys, 2):
            levels = {best.get(key) for key in pair}
            level = levels.pop()
            if levels or level is None:
                self.together.pop(pair, None)
            elif pair not in self.together or self.together[pair][0] != level:
                self.together[pair] = level, Counter()

    # -- what happens

    def deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToApi) and isinstance(effect.message, (Done, Rejected)):
                self.over(effect.message.request, effect.message.outcome.value)

    def over(self, id: bytes, how: str) -> None:
        client = self.clients[id]
        assert client.state != "over", f"a second end: {how}"
        assert how != "queue_full" or client.state in ("reserved", "sent"), f"displaced while {client.state}"
        client.state = "over"
        self.outcomes[how] += 1

    def act(self, effects: list[Effect], before: dict[str, list[Request]] | None = None) -> None:
        """Carry effects out; every dispatch is judged by who waited before it, where that is known."""
        self.deliver(effects)
        before = before or {}
        for effect in effects:
            if isinstance(effect, ToWorker) and isinstance(effect.message, Dispatch):
                id = effect.message.request
                self.clients[id].state = "running"
                if before:
                    self.dispatched(id, before)
                    before = {key: left for key, all_ in before.items() if (left := [r for r in all_ if r.id != id])}
        self.look()

    def ask(self) -> None:
        flood = self.flooder is not None and self.random.random() < 0.8
        key = self.flooder if flood and self.flooder else self.random.choice(self.keys)
        count = self.random.choice([1] * 9 + [2, 3])
        ids = [b"%016d" % next(self.numbers) for _ in range(count)]
        weight, places = WEIGHTS[key], self.slots + self.queue
        queued, total = self.queued(), len(self.ledger.requests)
        youngest = {
            other: [r.id for r in self.ledger.requests.values() if r.key == other and r.phase is not Phase.RUNNING][::-1]
            for other in self.keys
        }
        effects = self.ledger.reserve(API, Reserve(ids, "l", MODEL, self.random.choice(self.priorities), key, weight), self.now)
        answer = effects[-1]
        assert isinstance(answer, ToApi)
        given = isinstance(answer.message, Reserved)
        displaced = [effect.message.request for effect in effects[:-1] if isinstance(effect, ToApi)]
        missing = total + count - places
        expected: list[bytes] | None = []
        mine = (queued[key] + count) / weight
        for _ in range(missing):
            left, other = max(((queued[other] - 1) / WEIGHTS[other], other) for other in self.keys)
            rivals = [k for k in self.keys if abs((queued[k] - 1) / WEIGHTS[k] - left) < ROUNDING]
            # Of two who hold as much either may give; what is asked is that the one who gave was one of them.
            gave = self.clients[displaced[len(expected)]].key if len(expected or ()) < len(displaced) else other
            assert gave in rivals, f"{gave} was displaced, {rivals} hold more"
            if (queued[gave] - 1) / WEIGHTS[gave] < mine - ROUNDING:
                expected = None
                break
            expected.append(youngest[gave].pop(0))
            queued[gave] -= 1
        assert given == (expected is not None), f"{key} was {'given' if given else 'refused'} {count} places"
        assert displaced == (expected or []), "not the youngest of whoever is most over was displaced"
        self.outcomes["displacing"] += bool(displaced)
        if given:
            self.clients.update((id, Client(key)) for id in ids)
            self.act(effects)
        else:
            assert len(effects) == 1, "displaced for nobody"
            self.outcomes["refused"] += 1

    def submit(self) -> None:
        found = [id for id, client in self.clients.items() if client.state == "reserved"]
        if not found:
            return
        id = self.random.choice(found)
        self.clients[id].state = "sent"
        effects = self.ledger.submit(API, Submit(id, 1, 9, b"", "f"), b"p", self.now)
        # It was alone, or nobody could be served.
        self.act(effects, {self.clients[id].key: [self.ledger.requests[id]]})

    def cancel(self) -> None:
        found = [id for id, client in self.clients.items() if client.state in ("reserved", "sent")]
        if not found:
            return
        id = self.random.choice(found)
        if self.clients[id].state == "reserved" and self.random.random() < 0.5:
            self.ledger.release(API, [id], self.now)
            self.over(id, "released")
            self.look()
        else:
            self.act(self.ledger.cancel(API, id, self.now))

    def finish(self) -> None:
        running = list(self.ledger.workers[WORKER].leases.items())
        if running:
            id, lease = self.random.choice(running)
            before = self.waiting()
            self.over(id, "stop")
            self.act(self.ledger.done(WORKER, Done(id, lease.attempt, Outcome.STOP), b"", self.now), before)

    def turn(self) -> None:
        """One random event."""
        self.now += self.random.choice([0.0, 0.0, 0.1, 1.0])
        draw = self.random.random()
        if draw < 0.40:
            self.ask()
        elif draw < 0.75:
            self.submit()
        elif draw < 0.78:
            self.cancel()
        else:
            self.finish()
        self.act(self.ledger.advance(self.now))

    def settle(self) -> None:
        """All come to an end; then nothing may be left."""
        while any(client.state in ("reserved", "sent") for client in self.clients.values()):
            self.submit()
            self.finish()
        while self.ledger.workers[WORKER].leases:
            self.finish()
        assert not self.ledger.requests, f"{len(self.ledger.requests)} requests never ended"
        assert all(client.state == "over" for client in self.clients.values()), "a client was never answered"
        assert len(self.ledger.models[MODEL].line) == 0 and not self.ledger.models[MODEL].queue.everything()


def walk(seed: int, steps: int, ledger: type[Ledger] = Ledger) -> Counter[str]:
    """One walk of `steps` events; how its requests ended, and "turns". Raises AssertionError."""
    one = ShareWalk(seed, ledger)
    for _ in range(steps):
        one.turn()
    one.settle()
    one.outcomes["turns"] = one.turns
    return one.outcomes
