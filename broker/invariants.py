"""What must be true of a ledger after every event (pure; used by tests and by `scripts/walk`, never while serving)."""

from broker import policy
from broker.ledger import Ledger
from broker.prefixes import MOST
from broker.records import Model, Phase


def check(ledger: Ledger, now: float) -> None:
    """Raises AssertionError that names the rule which is broken."""
    waiting = {id for model in ledger.models.values() for id in model.line}
    active: dict[bytes, int] = {}
    for worker in ledger.workers.values():
        assert len(worker.leases) <= worker.facts.slots, "a worker holds more leases than it has slots"
        assert len(worker.leases) * worker.longest <= worker.facts.kv_tokens or not worker.leases, "KV memory overbooked"
        for id, lease in worker.leases.items():
            if lease.stopping_at is None:
                active[id] = active.get(id, 0) + 1
                request = ledger.requests.get(id)
                assert request is not None, "a wanted lease without its request"
                assert request.worker == worker.peer and request.attempt == lease.attempt, "lease and request disagree"
    for id, request in ledger.requests.items():
        assert (id in waiting) == (request.phase is Phase.WAITING), f"{request.phase} and the line disagree"
        assert (active.get(id, 0) == 1) == (request.phase is Phase.RUNNING), f"{request.phase} and the leases disagree"
        assert (request.worker is not None) == (request.phase is Phase.RUNNING), "a worker outside of RUNNING"
        assert id in ledger.models[request.model].requests, "a request without a place"
        assert id in ledger.by_api.get(request.api, ()), "a request outlived its api"
        assert not request.streaming or request.phase is Phase.RUNNING, "streaming and not running"
        assert request.deaths < 2, "a request survived two deaths"
    assert waiting <= ledger.requests.keys(), "somebody waits who is no request"
    assert sum(len(model.requests) for model in ledger.models.values()) == len(ledger.requests), "places leaked"
    assert sum(len(ids) for ids in ledger.by_api.values()) == len(ledger.requests), "api index leaked"
    assert len(ledger._deadlines) <= 2 * len(ledger.requests), "deadlines leaked"
    for model in ledger.models.values():
        _check_model(ledger, model.name, now)
        _check_queue(model)
        taking = {worker.peer: worker for worker in ledger.workers_of(model.name) if not worker.leaving}
        assert model.prefixes.readers() <= taking.keys(), "a worker that takes nothing is remembered"
        for id in model.line if taking else ():
            served = any(policy.serves(worker, ledger.requests[id]) for worker in taking.values())
            assert served, "somebody waits who is served by nobody"


def _check_model(ledger: Ledger, name: str, now: float) -> None:
    model = ledger.models[name]
    assert len(model.line) == len(set(model.line)), "somebody waits twice"
    order = [ledger.requests[id] for id in model.line.order(now)]
    assert len(order) == len(model.line) and {request.id for request in order} == set(model.line), "the order is not the line"
    returned = [request.arrival for request in order if not request.untouched]
    assert [request.arrival for request in order[: len(returned)]] == sorted(returned), "who comes back stands not in front"
    lines: dict[tuple[str, int], list[int]] = {}
    for request in order[len(returned) :]:
        lines.setdefault((request.key, request.priority), []).append(request.arrival)
    for arrivals in lines.values():
        assert arrivals == sorted(arrivals), "a key's own requests are out of order"
    if model.line and ledger.may_run_more(model):
        for worker in ledger.workers_of(name):
            # Whoever else waits, for full workers or for another fingerprint, keeps nobody from this one.
            head = next((request for request in order if policy.waits_for(worker, request)), None)
            assert head is None or not worker.free or not policy.fits(worker, head.tokens), (
                "somebody waits while a worker could take him"
            )
    if isinstance(ledger._settings.max_inflight, int):
        assert ledger.inflight(name) <= ledger._settings.max_inflight, "more run than the operator allows"


def _check_queue(model: Model) -> None:
    refusable = {
        request.id
        for request in model.requests.values()
        if request.untouched and request.phase is not Phase.RUNNING
    }
    assert model.queue.everything() == refusable, "the queue is not what can still be refused"
    assert len(model.prefixes) <= MOST, "more prefixes than allowed are kept"
