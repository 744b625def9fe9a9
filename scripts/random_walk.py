"""`scripts/walk [walks] [steps] [first seed]`: the ledger under a seeded random walk, with invariants after every event.

Each seed also takes the walk of scripts/share_walk, where nothing breaks and order and fairness are what is looked at.

Fake API processes, workers that obey late, go mute, wedge or die, a pool, lost messages of dead sessions, broker restarts.
Checked beside broker/invariants: every request ends exactly once at its client, no piece after the end, no hole and no
mixture of attempts in a stream, nobody runs more than its slots, poison runs at most twice, all counts return to zero.
"""

import itertools
import random
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from broker import invariants
from broker.ledger import Ledger
from broker.records import Effect, Phase, Relay, ToApi, ToWorker
from broker.settings import BrokerSettings
from common.envelope import (
    Dispatch,
    Done,
    ModelPlan,
    Rejected,
    Reserve,
    Reserved,
    Stale,
    Started,
    Stop,
    Submit,
    WorkerFacts,
)
from common.outcomes import Outcome
from scripts import share_walk

SETTINGS = BrokerSettings(
    max_queue=5, queue_timeout=8.0, request_timeout=40.0, reservation_timeout=4.0, silence=5.0, stuck=6.0
)
CONTEXT = 100
MODEL = "m"
# One key asks as often as all the others together, which makes it the one that is displaced.
KEYS = {"flood": 1.0, "other": 1.0, "heavy": 2.0}


@dataclass
class Fake:
    """A worker process: what runs, what it was told to stop, and how it is (ok, mute, wedged)."""

    slots: int
    kv_tokens: int
    running: dict[tuple[bytes, int], int] = field(default_factory=dict)
    stopping: set[tuple[bytes, int]] = field(default_factory=set)
    mode: str = "ok"
    fingerprint: str = "f"


@dataclass
class Client:
    """A request as its API process sees it."""

    tokens: int
    state: str = "asked"  # asked, reserved, sent, over
    attempt: int = 0
    pieces: int = 0
    again: str = ""


class Walk:
    """One walk. Everything that happens is drawn from one seeded generator."""

    def __init__(self, seed: int, ledger: type[Ledger] = Ledger) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.make = ledger
        limit = self.random.choice(["auto", 3, 100])
        self.settings = BrokerSettings(**{**SETTINGS.__dict__, "max_inflight": limit})
        self.ledger = ledger(self.settings, self.now)
        self.numbers = itertools.count(1)
        self.workers: dict[bytes, Fake] = {}
        self.inbox: dict[bytes, deque[Dispatch | Stop]] = defaultdict(deque)
        self.wire: deque[tuple[bytes, str, tuple]] = deque()  # from workers, in order
        self.clients: dict[bytes, dict[bytes, Client]] = {b"A": {}, b"B": {}}
        self.poison: set[bytes] = set()
        self.ran: Counter[bytes] = Counter()
        self.dispatched: set[bytes] = set()
        self.outcomes: Counter[str] = Counter()
        self.planned = self.random.randint(1, 3)
        self.plan()
        for _ in range(self.planned):
            self.join()

    # -- effects

    def deliver(self, effects: list[Effect], relayed: tuple[str, tuple] = ("", ())) -> None:
        """Carry effects to the fakes, as the loop would."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, ToWorker):
                if isinstance(effect.message, Dispatch):
                    self.dispatched.add(effect.message.request)
                if effect.peer in self.workers:
                    self.inbox[effect.peer].append(effect.message)
                elif isinstance(effect.message, Dispatch):
                    todo += self.ledger.dispatch_failed(effect.peer, effect.message.request, self.now)
                else:
                    todo += self.ledger.worker_lost(effect.peer, self.now)
            elif isinstance(effect, ToApi):
                self.to_client(effect.peer, effect.message)
            elif isinstance(effect, Relay):
                kind, fields = relayed
                assert kind in ("tokens", "done", "started"), f"{kind} is not to be relayed"
                if kind == "tokens":
                    self.piece(effect.peer, *fields)
                elif kind == "done":
                    self.over(effect.peer, fields[0], fields[2])

    def to_client(self, api: bytes, message: object) -> None:
        match message:
            case Reserved():
                client = self.clients[api].get(message.request)
                if client is not None and client.state == "asked":
                    client.state = "reserved"
            case Stale():
                client = self.clients[api].get(message.request)
                if client is not None:
                    assert client.state == "sent" and not client.pieces, "sent back in the middle of a reply"
                    client.state, client.again = "reserved", message.fingerprint
                    self.outcomes["sent back"] += 1
            case Rejected():
                if message.outcome is Outcome.QUEUE_FULL and self.clients[api].get(message.request):
                    assert message.request not in self.dispatched, "displaced after its dispatch"
                    self.outcomes["displaced"] += self.clients[api][message.request].state != "asked"
                self.over(api, message.request, message.outcome)
            case Done():
                self.over(api, message.request, message.outcome)

    def over(self, api: bytes, id: bytes, outcome: Outcome) -> None:
        client = self.clients[api].get(id)
        if client is None:
            return
        assert client.state != "over", f"a second end: {outcome}"
        client.state = "over"
        self.outcomes[outcome.value] += 1

    def piece(self, api: bytes, id: bytes, attempt: int, sequence: int) -> None:
        client = self.clients[api].get(id)
        if client is None:
            return
        assert client.state == "sent", f"a piece while {client.state}"
        if client.pieces:
            assert attempt == client.attempt, "two attempts in one stream"
        client.attempt = attempt
        assert sequence == client.pieces, "a hole in the stream"
        client.pieces += 1

    # -- what happens

    def plan(self, *, failed: bool = False) -> None:
        slots = 2
        state = "failed" if failed else "ready" if self.workers else "starting"
        self.deliver(self.ledger.planned([ModelPlan(MODEL, self.planned, slots, state, CONTEXT, 0)], self.now))

    def join(self) -> None:
        name = b"w%06d" % next(self.numbers)
        fake = Fake(self.random.randint(1, 3), self.random.choice([CONTEXT, 2 * CONTEXT, 300]))
        # A swap now and then.
        fake.fingerprint = self.random.choice("ffffffg")
        self.rejoin(name, fake)

    def rejoin(self, name: bytes, fake: Fake) -> None:
        fake.running.clear()
        fake.stopping.clear()
        self.workers[name] = fake
        facts = WorkerFacts(MODEL, fake.fingerprint, fake.slots, fake.kv_tokens, 1, CONTEXT, ["batched"], [])
        self.deliver(self.ledger.worker_joined(name, name.decode(), facts, self.now))

    def gone(self, peer: bytes, *, noticed: bool) -> None:
        """A worker process dies; another is started."""
        del self.workers[peer]
        self.inbox.pop(peer, None)
        if noticed:
            self.wire = deque(item for item in self.wire if item[0] != peer)
            self.deliver(self.ledger.worker_lost(peer, self.now))
        self.join()

    def ask(self) -> None:
        api = self.random.choice([b"A", b"B"])
        count = self.random.choice([1] * 12 + [2, 3, 3, 40])
        ids = [b"%016d" % next(self.numbers) for _ in range(count)]
        for id in ids:
            self.clients[api][id] = Client(self.random.choice([5, 20, CONTEXT]))
        key = self.random.choice(["flood", "flood", *KEYS])
        message = Reserve(ids, "label", MODEL, self.random.choice([0, 0, 0, 1, -1]), key, KEYS[key])
        effects = self.ledger.reserve(api, message, self.now)
        answer = effects[-1]
        assert isinstance(answer, ToApi)
        self.deliver(effects)
        reserved = isinstance(answer.message, Reserved)
        if reserved:
            model = self.ledger.models[MODEL]
            places = len(model.requests)
            assert places <= self.ledger.max_inflight(model) + SETTINGS.max_queue, "more places than there are"
        for id in ids[1:]:
            if reserved:
                self.clients[api][id].state = "reserved"
            else:
                self.over(api, id, Outcome.QUEUE_FULL)

    def some_client(self, state: str) -> tuple[bytes, bytes] | None:
        found = [(api, id) for api, them in self.clients.items() for id, c in them.items() if c.state == state]
        return self.random.choice(found) if found else None

    def submit(self) -> None:
        found = self.some_client("reserved")
        if found is None:
            return
        api, id = found
        client = self.clients[api][id]
        client.state = "sent"
        if self.random.random() < 0.03:
            self.poison.add(id)
        fingerprint = client.again or self.random.choice(["", "f", "f", "f", "f", "f", "f", "g", "old"])
        prefix = self.random.choice([b"", b"head-one", b"head-onelonger-1", b"head-two"])
        effects = self.ledger.submit(api, Submit(id, 1, client.tokens - 1, prefix, fingerprint), b"p", self.now)
        self.deliver(effects)

    def cancel(self) -> None:
        found = self.some_client(self.random.choice(["reserved", "sent"]))
        if found is None:
            return
        api, id = found
        if self.random.random() < 0.1 and self.clients[api][id].state == "sent":
            # A RELEASE that comes after the SUBMIT gives nothing back.
            assert self.ledger.release(api, [id], self.now) == [] and id in self.ledger.requests
        elif self.clients[api][id].state == "reserved" and self.random.random() < 0.5:
            self.deliver(self.ledger.release(api, [id], self.now))
            self.clients[api][id].state = "over"
            self.outcomes["released"] += 1
        else:
            self.deliver(self.ledger.cancel(api, id, self.now))

    def step(self, peer: bytes, finish: float, hasty: bool = False) -> None:
        """One step of a worker: obey, run, speak."""
        fake = self.workers[peer]
        if fake.mode == "mute" or fake.mode == "wedged":
            return
        while self.inbox[peer]:
            message = self.inbox[peer].popleft()
            if isinstance(message, Dispatch):
                fake.running[message.request, message.attempt] = 0
                self.ran[message.request] += 1
                assert len(fake.running) <= fake.slots, "a worker got more than its slots"
            else:
                fake.stopping.add((message.request, message.attempt))
        if any(id in self.poison for id, _ in fake.running):
            self.gone(peer, noticed=True)
            return
        for key, count in list(fake.running.items()):
            if self.random.random() < 0.02:
                # A confused worker: what it says of another attempt than the leased one is nobody's.
                stale = (key[0], key[1] + self.random.choice([-1, 1]))
                self.wire.append((peer, "tokens", (*stale, count)))
                self.wire.append((peer, "done", (*stale, Outcome.STOP)))
            if key in fake.stopping and (hasty or self.random.random() < 0.4):
                del fake.running[key]
                self.wire.append((peer, "done", (*key, Outcome.CANCELLED)))
            elif self.random.random() < finish:
                del fake.running[key]
                self.wire.append((peer, "done", (*key, Outcome.STOP)))
            else:
                if count == 0 and self.random.random() < 0.5:
                    self.wire.append((peer, "started", key))
                self.wire.append((peer, "tokens", (*key, count)))
                fake.running[key] = count + 1
        fake.stopping &= fake.running.keys()

    def hear(self) -> None:
        """The broker takes one message of a worker."""
        if not self.wire:
            return
        peer, kind, fields = self.wire.popleft()
        if peer not in self.ledger.workers:
            return  # the switchboard answers REFUSED to a session that is over
        if kind == "tokens":
            effects = self.ledger.tokens(peer, fields[0], fields[1], self.now)
        elif kind == "started":
            effects = self.ledger.started(peer, Started(*fields, "batched", "w"), self.now)
        else:
            effects = self.ledger.done(peer, Done(*fields), b"", self.now)
        self.deliver(effects, (kind, fields))

    def time_passes(self) -> None:
        """Deadlines, and what the roster would find: silence of mute workers, wedged ones, unnoticed deaths."""
        self.deliver(self.ledger.advance(self.now))
        for peer in list(self.ledger.workers):
            fake = self.workers.get(peer)
            if fake is None or fake.mode != "ok":
                if self.random.random() < 0.1:
                    self.deliver(self.ledger.worker_lost(peer, self.now))
                    if fake is not None:
                        self.workers.pop(peer)
                        self.inbox.pop(peer, None)
                        self.join()
        for worker in self.ledger.stopping_too_long(self.now):
            self.deliver(self.ledger.worker_lost(worker.peer, self.now))
            fake = self.workers.pop(worker.peer, None)
            self.inbox.pop(worker.peer, None)
            if fake is not None:
                self.join()

    def api_dies(self) -> None:
        api = self.random.choice([b"A", b"B"])
        self.clients[api].clear()
        self.deliver(self.ledger.api_lost(api, self.now))

    def leave(self) -> None:
        """A worker says GOODBYE; a successor comes."""
        peer = self.random.choice(list(self.workers))
        if peer in self.ledger.workers:
            self.deliver(self.ledger.worker_leaving(peer, self.now))
            self.join()

    def broker_dies(self) -> None:
        """All state is lost: clients get BROKER_LOST, workers drop everything and come back."""
        self.ledger = self.make(self.settings, self.now)
        self.wire.clear()
        self.inbox.clear()
        for them in self.clients.values():
            self.outcomes["broker_lost"] += sum(client.state != "over" for client in them.values())
            them.clear()
        if self.random.random() < 0.5:
            self.plan()
        for peer, fake in list(self.workers.items()):
            del self.workers[peer]
            self.rejoin(b"w%06d" % next(self.numbers), fake)
        self.plan()

    def check(self) -> None:
        invariants.check(self.ledger, self.now)
        for worker in self.ledger.workers.values():
            for lease in worker.leases.values():
                held = lease.stopping_at is not None and self.now - lease.stopping_at > SETTINGS.stuck + 3.0
                assert not held, "a slot was not called back"
        for request in self.ledger.requests.values():
            limit = SETTINGS.reservation_timeout if request.phase is Phase.RESERVED else SETTINGS.request_timeout
            limit = max(limit, SETTINGS.request_timeout * bool(request.arrival))
            assert self.now - request.reserved_at <= limit + 0.6, f"{request.phase} for longer than allowed"
        live = {id for them in self.clients.values() for id, client in them.items() if client.state != "over"}
        assert set(self.ledger.requests) <= live, "a request outlived its client"

    def turn(self) -> None:
        """One random event."""
        self.now += self.random.choice([0.0, 0.0, 0.1, 0.5])
        draw = self.random.random()
        if draw < 0.09:
            self.ask()
        elif draw < 0.30:
            self.submit()
        elif draw < 0.36:
            self.cancel()
        elif draw < 0.363:
            self.api_dies()
        elif draw < 0.368:
            self.leave()
        elif draw < 0.374:
            self.gone(self.random.choice(list(self.workers)), noticed=self.random.random() < 0.5)
        elif draw < 0.388:
            self.workers[self.random.choice(list(self.workers))].mode = self.random.choice(["ok", "mute", "wedged"])
        elif draw < 0.390:
            self.broker_dies()
        elif draw < 0.392:
            self.planned = self.random.choice([0, 1, 2, 3])
            self.plan(failed=self.random.random() < 0.3)
        elif draw < 0.70:
            self.step(self.random.choice(list(self.workers)), finish=0.15)
        else:
            for _ in range(self.random.randint(1, 4)):
                self.hear()
        self.check()
        self.time_passes()
        self.check()

    def settle(self) -> None:
        """Everybody behaves; then nothing may be left."""
        for fake in self.workers.values():
            fake.mode = "ok"
        for _ in range(300):
            self.now += 0.2
            for peer in list(self.workers):
                if peer in self.workers:
                    self.step(peer, finish=1.0, hasty=True)
            while self.wire:
                self.hear()
            for api, id in [(a, i) for a, them in self.clients.items() for i, c in them.items() if c.state == "reserved"]:
                self.deliver(self.ledger.release(api, [id], self.now))
                self.clients[api][id].state = "over"
            self.time_passes()
            self.check()
        assert not self.ledger.requests, f"{len(self.ledger.requests)} requests never ended"
        assert self.ledger.inflight(MODEL) == 0, "a slot leaked"
        assert len(self.ledger._deadlines) == 0, "a deadline leaked"
        for them in self.clients.values():
            assert all(client.state == "over" for client in them.values()), "a client was never answered"
        assert all(self.ran[id] <= 2 for id in self.poison), "poison ran more than twice"


def walk(seed: int, steps: int, ledger: type[Ledger] = Ledger) -> Counter[str]:
    """One walk of `steps` events; how its requests ended. Raises AssertionError."""
    one = Walk(seed, ledger)
    for _ in range(steps):
        one.turn()
    one.settle()
    return one.outcomes


def main(arguments: list[str]) -> int:
    """Many walks; says at which seed a rule broke."""
    walks, steps, first = (int(arguments[i]) if len(arguments) > i else default for i, default in enumerate((300, 500, 0)))
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(first, first + walks):
        try:
            outcomes += walk(seed, steps) + share_walk.walk(seed, steps)
        except AssertionError as error:
            print(f"seed {seed}: {error}", file=sys.stderr)
            raise
    print(f"{walks} walks of {steps} steps held in {time.monotonic() - began:.1f} s: {dict(outcomes.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
