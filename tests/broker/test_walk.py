"""The ledger holds under random walks, and the walks have teeth: they catch every one of these broken variants."""

import inspect
import types

import pytest

from broker import ledger, policy, shares, turns, waiting
from broker.records import Model
from scripts import share_walk
from scripts.random_walk import walk

BROKEN = {
    "slot freed when the client cancels": (
        "self.workers[request.worker].leases[request.id].stopping_at = now",
        "del self.workers[request.worker].leases[request.id]",
    ),
    "no attempt fence on pieces": (
        "if lease is None or lease.attempt != attempt or lease.stopping_at is not None:",
        "if lease is None or lease.stopping_at is not None:",
    ),
    "no attempt fence on done": (
        "if worker is None or lease is None or lease.attempt != message.attempt:",
        "if worker is None or lease is None:",
    ),
    "pieces relayed after a cancel": (
        "if lease is None or lease.attempt != attempt or lease.stopping_at is not None:\n            return None\n"
        "        return self.requests[id]",
        "if lease is None or lease.attempt != attempt:\n            return None\n"
        "        return self.requests.get(id, Request(id, PeerId(b'A'), '', 'm', 0, '', 1.0, 0.0))",
    ),
    "no dispatch after done": (
        "return effects + self._dispatch(self.models[worker.facts.model], now)",
        "return effects",
    ),
    "second attempt after the first piece": ("if request.streaming:\n                effects", "if False:\n                effects"),
    "deaths never charged": ("request.deaths += charge", "pass"),
    "api's running requests forgotten": (
        "            effects += self._stop_lease(request, now)\n            self._end(request, Outcome.CANCELLED, now)\n        for name",
        "            if request.worker is None:\n                self._end(request, Outcome.CANCELLED, now)\n        for name",
    ),
    "the operator's limit ignored": (
        "return not isinstance(limit, int) or self.inflight(model.name) < limit",
        "return True",
    ),
    "what is sent back stays in the line": ("        model.line.remove(request.id)\n        request.phase, request.payload", "        request.phase, request.payload"),
    "stuck cancels never found": ("lease.stopping_at < limit", "False"),
    "reservations never expire": (
        'self._deadlines.set(("reservation", id), now + self._settings.reservation_timeout)',
        "pass",
    ),
    "admission counts only who waits": ("len(model.requests), len(message.requests)", "len(model.line), len(message.requests)"),
    "the lost worker's requests go to the back": (
        "line.put_back(request.id, request.arrival)",
        "line.add(request.id, request.key, request.weight, request.priority, request.arrival)",
    ),
    "a failed dispatch keeps its lease": (
        "            del worker.leases[id]\n            if lease.stopping_at is None:",
        "            if lease.stopping_at is None:",
    ),
    "release of a submitted request": (" and request.phase is Phase.RESERVED:\n                # What", ":\n                # What"),
    "DONE of the worker and of the broker": (
        "        if lease.stopping_at is None:\n            request = self.requests[message.request]\n            effects.append",
        "        if message.request in self.requests or True:\n            request = self.requests.get(message.request)"
        " or Request(message.request, PeerId(b'A'), '', 'm', 0, '', 1.0, 0.0)\n            effects.append",
    ),
    "KV memory ignored": (
        "policy.choose_worker(wanted, request, self._read(model, request)) if wanted",
        "next((w for w in wanted if w.free > 0), None) if wanted",
    ),
    "displaced while it runs": ("        model.queue.discard(request.id, request.key)\n        if request.prefix", "        if request.prefix"),
    "the displaced are not told": ("effects.append(ToApi(request.api, self._rejected(id,", "(ToApi(request.api, self._rejected(id,"),
    "the dead are still readers": ("self.models[worker.facts.model].prefixes.forget(peer)\n        for", "for"),
    "what became stale waits on": ("if not served:", "if True:"),
    "who leaves is still a reader": ("if not self.workers[peer].leaving and", "if"),
    "the displaced keep their place": ('self._end(request, None, now, "displaced")', "pass"),
}

# Module, the line, what is written in its place: caught by the walk that looks at order and shares.
UNFAIR = {
    "weights ignored": (turns, "turn.tag + 1 / weight", "turn.tag + 1"),
    "turns cost nothing": (turns, "turn.tag + 1 / weight", "turn.tag"),
    "what was left unused is saved up": (turns, "max(ended, self._present)", "ended"),
    "a key that comes back is new": (turns, "self._ended.get(key, (0.0, 0))", "(0.0, 0)"),
    "by arrival alone": (waiting, "turns.served(key, line.weight)", "turns.leave(key)"),
    "nobody ages": (turns, "priority + (now - since) / self._step_s", "priority"),
    "everybody ages twice as fast": (turns, "(now - since) / self._step_s", "(now - since) * 2 / self._step_s"),
    "a turn does not end aging": (turns, "        self._passed_at.pop(priority, None)\n        for", "        for"),
    "priority ignored": (turns, "return max(self.at, key=", "return min(self.at, key="),
    "the oldest is displaced": (shares, "reversed(self._held[most])", "iter(self._held[most])"),
    "weights ignored in the queue": (shares, "given - 1) / self._weights[key]", "given - 1)"),
    "anybody displaces": (shares, "return mine <= theirs", "return mine <= theirs or theirs >= 1"),
    "an equal share displaces": (shares, "return mine <= theirs", "return mine <= theirs + 1"),
    "nobody displaces": (shares, "return mine <= theirs", "return False"),
    "some are displaced for nobody": (shares, "return found if len(found) == missing else []", "return found"),
    "the largest holder is not looked for again": (shares, "if over > self._bounds.get(key, -1.0):", "if key not in self._bounds:"),
}


@pytest.mark.slow
def test_the_ledger_holds_under_random_walks() -> None:
    outcomes = sum((walk(seed, 500) for seed in range(1, 100)), walk(0, 500))
    # A walk that never reaches an end says nothing about it.
    wanted = {"stop", "cancelled", "queue_full", "queue_timeout", "worker_lost", "poisoned", "broker_lost", "sent back", "displaced"}
    assert wanted <= outcomes.keys() and min(outcomes[name] for name in wanted) > 10, outcomes


def variant(before: str, after: str, where: types.ModuleType = ledger) -> type[ledger.Ledger]:
    """The ledger with one change of its source, or of a module that it is made of."""
    assert inspect.getsource(where).count(before) >= 1, "the line is not there any more"
    made = {}
    for original in (turns, shares, waiting, ledger):
        source = inspect.getsource(original)
        module = types.ModuleType(f"broken_{original.__name__}")
        exec(compile(source.replace(before, after) if original is where else source, module.__name__, "exec"), module.__dict__)
        made[original] = module
    for name in ("Ranks", "Turns"):
        setattr(made[waiting], name, getattr(made[turns], name))
    made[ledger].WaitingLine = made[waiting].WaitingLine
    made[ledger].Model = lambda name, line: Model(name, line, queue=made[shares].Shares())
    return made[ledger].Ledger


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ledger_is_caught(name: str) -> None:
    broken = variant(*BROKEN[name])
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        # Where the rarest of them are met early.
        for seed in range(103, 163):
            walk(seed, 500, broken)


IN_THE_WAY = (
    "            blocked.append((request, wanted))\n",
    "            wanted = [worker for worker in workers if worker.peer in open_]\n            blocked.append((request, wanted))\n",
)


@pytest.mark.slow
def test_who_waits_for_full_workers_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # The walk's lines are short: bounds that they reach.
    monkeypatch.setattr(policy, "LOOKAHEAD", 2)
    monkeypatch.setattr(policy, "MAX_PASSED_OVER", 2)
    for seed in range(10):
        walk(seed, 400)
    broken = variant(*IN_THE_WAY)
    with pytest.raises(AssertionError, match="while a worker could take him"):
        for seed in range(60):
            walk(seed, 400, broken)


@pytest.mark.slow
def test_order_and_shares_hold_under_random_walks() -> None:
    outcomes = sum((share_walk.walk(seed, 400) for seed in range(1, 25)), share_walk.walk(0, 400))
    assert outcomes["turns"] > 1000 and outcomes["displacing"] > 100 and outcomes["refused"] > 100, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", UNFAIR)
def test_an_unfair_ledger_is_caught(name: str) -> None:
    where, before, after = UNFAIR[name]
    broken = variant(before, after, where)
    with pytest.raises(AssertionError):
        for seed in range(60):
            share_walk.walk(seed, 400, broken)
