"""The ledger holds under random walks, and the walk has teeth: it catches every one of these broken variants."""

import inspect
import types

import pytest

from broker import ledger
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
        "        return self.requests.get(id, Request(id, PeerId(b'A'), '', 'm', 0, '', 0.0))",
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
        "line.add(request.id, request.priority, request.arrival)",
        "line.add(request.id, request.priority, 10**9 + request.deaths)",
    ),
    "a failed dispatch keeps its lease": (
        "            del worker.leases[id]\n            if lease.stopping_at is None:",
        "            if lease.stopping_at is None:",
    ),
    "release of a submitted request": (" and request.phase is Phase.RESERVED:\n                self._end", ":\n                self._end"),
    "DONE of the worker and of the broker": (
        "        if lease.stopping_at is None:\n            request = self.requests[message.request]\n            effects.append",
        "        if message.request in self.requests or True:\n            request = self.requests.get(message.request)"
        " or Request(message.request, PeerId(b'A'), '', 'm', 0, '', 0.0)\n            effects.append",
    ),
    "KV memory ignored": ("policy.choose_worker(able, request)", "next((w for w in able if w.free > 0), None)"),
}


@pytest.mark.slow
def test_the_ledger_holds_under_random_walks() -> None:
    outcomes = sum((walk(seed, 500) for seed in range(1, 100)), walk(0, 500))
    # A walk that never reaches an end says nothing about it.
    wanted = {"stop", "cancelled", "queue_full", "queue_timeout", "worker_lost", "poisoned", "broker_lost", "sent back"}
    assert wanted <= outcomes.keys() and min(outcomes[name] for name in wanted) > 10, outcomes


def variant(before: str, after: str) -> type[ledger.Ledger]:
    """The ledger with one change of its source."""
    source = inspect.getsource(ledger)
    assert source.count(before) >= 1, "the line is not there any more"
    module = types.ModuleType("broken_ledger")
    exec(compile(source.replace(before, after), "broken_ledger", "exec"), module.__dict__)
    return module.Ledger


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ledger_is_caught(name: str) -> None:
    broken = variant(*BROKEN[name])
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        for seed in range(60):
            walk(seed, 500, broken)
