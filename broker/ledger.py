"""The only file that moves a request (pure: events and `now` in, effects out).

Rules. (1) A request is in one phase, RESERVED -> WAITING -> RUNNING, or back from RUNNING to WAITING when its worker was lost
before its first relayed TOKENS, from WAITING to RESERVED when its model was swapped, and ends exactly once, by _end(). (2) Its place lasts as long as it does; a lease lasts until
the worker says DONE or is gone, so a cancelled request is over at once for its client while its slot comes back later.
(3) Nobody waits while a worker could take him: every event that frees something ends in _dispatch(). (4) What a worker says
counts only under a lease with the same attempt. (5) A death is charged to the requests that ran under it; two end a request.
"""

from collections.abc import Iterable

from broker import policy
from broker.deadlines import Deadlines
from broker.records import Effect, Lease, Model, Phase, Relay, Request, ToApi, ToWorker, Worker
from broker.settings import BrokerSettings
from broker.traces import Traces
from broker.waiting import WaitingLine
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
from common.ids import PeerId, RequestId
from common.outcomes import Outcome

MAX_DEATHS = 2
# After its start the broker knows nothing until pool and workers have come back to it (REJOIN_S, a connect, a HELLO).
ASSEMBLY_S = 5.0


class Ledger:
    """All requests, leases and workers of one broker life."""

    def __init__(self, settings: BrokerSettings, now: float) -> None:
        self._settings = settings
        self._born_at = now
        self.models: dict[str, Model] = {}
        self.requests: dict[RequestId, Request] = {}
        self.workers: dict[PeerId, Worker] = {}
        self.by_api: dict[PeerId, dict[RequestId, None]] = {}
        self.draining = False
        self.traces = Traces()
        self._deadlines: Deadlines[tuple[str, RequestId]] = Deadlines()
        self._arrivals = 0
        self._dispatches = 0

    # -- what is there

    def workers_of(self, model: str) -> list[Worker]:
        """Workers with a live session, leaving ones too."""
        return [worker for worker in self.workers.values() if worker.facts.model == model]

    def max_inflight(self, model: Model) -> int:
        """Requests of a model that may run at once: what the operator set, else the planned slots."""
        if isinstance(self._settings.max_inflight, int):
            return self._settings.max_inflight
        if model.plan is not None:
            return model.plan.workers * model.plan.slots
        return sum(worker.facts.slots for worker in self.workers_of(model.name))

    def may_run_more(self, model: Model) -> bool:
        """Whether the operator's limit leaves room; without one the workers' slots are the limit, planned or not."""
        limit = self._settings.max_inflight
        return not isinstance(limit, int) or self.inflight(model.name) < limit

    def inflight(self, model: str) -> int:
        """Leases held, those of ended requests too."""
        return sum(len(worker.leases) for worker in self.workers_of(model))

    def next_deadline(self) -> float | None:
        """When advance() has something to do."""
        return self._deadlines.next_at()

    # -- the api's side

    def reserve(self, api: PeerId, message: Reserve, now: float) -> list[Effect]:
        """Places for all of message.requests, or none; those of a key with more than its share may be taken for them."""
        model = self._model(message.model)
        outcome = self._refusal(model, message, now)
        effects: list[Effect] = []
        if outcome is Outcome.QUEUE_FULL:
            effects = self._displace(model, message, now)
            outcome = None if effects else outcome
        if outcome is not None:
            model.refused[outcome] = model.refused.get(outcome, 0) + 1
            self._forget_if_empty(model)
            return [ToApi(api, self._rejected(message.requests[0], outcome, model, now))]
        for id in message.requests:
            request = Request(id, api, message.label, model.name, message.priority, message.key, message.weight, now)
            model.queue.add(id, message.key, message.weight)
            self.requests[id] = model.requests[id] = request
            self.by_api.setdefault(api, {})[id] = None
            self._deadlines.set(("reservation", id), now + self._settings.reservation_timeout)
            self.traces.begin(id, message.label, model.name, now)
        return [*effects, ToApi(api, Reserved(message.requests[0], self._fingerprint(model, message.requests)))]

    def release(self, api: PeerId, ids: Iterable[RequestId], now: float) -> list[Effect]:
        """Reserved places come back; those of submitted or unknown requests stay as they are."""
        for id in ids:
            request = self.requests.get(id)
            if request is not None and request.api == api and request.phase is Phase.RESERVED:
                # What ran once has begun for its client: it counts.
                self._end(request, None if request.untouched else Outcome.CANCELLED, now)
        return []

    def submit(self, api: PeerId, message: Submit, payload: bytes, now: float) -> list[Effect]:
        """The prompt for a reserved place: into the line."""
        request = self.requests.get(message.request)
        if request is None or request.api != api:
            return [ToApi(api, Rejected(message.request, Outcome.NOT_RESERVED, 0))]
        if request.phase is not Phase.RESERVED:
            return [ToApi(api, Rejected(message.request, Outcome.DUPLICATE, 0))]
        request.payload = payload
        request.prompt_tokens, request.max_tokens = message.prompt_tokens, message.max_tokens
        request.prefix, request.fingerprint = message.prefix, message.fingerprint
        if not request.arrival:
            # One that was rendered again stands where it stood.
            self._arrivals += 1
            request.arrival = self._arrivals
            request.submitted_at = now
        self.traces.mark(request.id, "submitted", now)
        self._deadlines.drop(("reservation", request.id))
        self._deadlines.set(("total", request.id), request.reserved_at + self._settings.request_timeout)
        self._wait(request, now)
        model = self.models[request.model]
        effects = self._send_back_stale(model, [request.id], now)
        return effects + self._dispatch(model, now) + self._end_hopeless(model, now)

    def cancel(self, api: PeerId, id: RequestId, now: float) -> list[Effect]:
        """Nobody waits for it any more. Idempotent; somebody else's request is not touched."""
        request = self.requests.get(id)
        if request is None or request.api != api:
            return []
        return self._close(request, Outcome.CANCELLED, now)

    def cancel_label(self, label: str, now: float) -> tuple[int, list[Effect]]:
        """An operator ends all requests with this label; how many there were."""
        found = [request for request in self.requests.values() if request.label == label]
        return len(found), [effect for request in found for effect in self._close(request, Outcome.CANCELLED, now)]

    def api_lost(self, api: PeerId, now: float) -> list[Effect]:
        """An API process is gone: so are its clients."""
        effects: list[Effect] = []
        touched = set()
        for id in list(self.by_api.pop(api, ())):
            request = self.requests[id]
            touched.add(request.model)
            effects += self._stop_lease(request, now)
            self._end(request, Outcome.CANCELLED, now)
        for name in touched & self.models.keys():
            effects += self._dispatch(self.models[name], now)
        return effects

    # -- the workers' side

    def worker_joined(self, peer: PeerId, name: str, facts: WorkerFacts, now: float) -> list[Effect]:
        """A worker with its model loaded."""
        assert peer not in self.workers
        self.workers[peer] = Worker(peer, name, facts)
        model = self._model(facts.model)
        return self._send_back_stale(model, model.line, now) + self._dispatch(model, now)

    def worker_leaving(self, peer: PeerId, now: float) -> list[Effect]:
        """It takes no new work and finishes what it has."""
        worker = self.workers.get(peer)
        if worker is None:
            return []
        worker.leaving = True
        model = self.models[worker.facts.model]
        model.prefixes.forget(peer)
        effects = self._send_back_stale(model, model.line, now)
        return effects + self._dispatch(model, now) + self._end_hopeless(model, now)

    def worker_lost(self, peer: PeerId, now: float, *, charge: bool = True) -> list[Effect]:
        """All its slots go with it. charge: a death, and not a session that ended or a worker that was asked to go."""
        worker = self.workers.pop(peer, None)
        if worker is None:
            return []
        effects: list[Effect] = []
        self.models[worker.facts.model].prefixes.forget(peer)
        for id, lease in worker.leases.items():
            if lease.stopping_at is not None:
                continue
            request = self.requests[id]
            request.worker = None
            request.deaths += charge
            if request.streaming:
                effects += self._close(request, Outcome.WORKER_LOST, now, dispatch=False)
            elif request.deaths >= MAX_DEATHS:
                effects += self._close(request, Outcome.POISONED, now, dispatch=False)
            else:
                self._wait(request, now)
        model = self.models[worker.facts.model]
        effects += self._send_back_stale(model, model.line, now)
        effects += self._dispatch(model, now)
        return effects + self._end_hopeless(model, now)

    def dispatch_failed(self, peer: PeerId, id: RequestId, now: float) -> list[Effect]:
        """A DISPATCH could not be handed over: the request goes back uncharged, the worker is lost."""
        worker = self.workers.get(peer)
        lease = worker.leases.get(id) if worker else None
        if worker is not None and lease is not None:
            del worker.leases[id]
            if lease.stopping_at is None:
                request = self.requests[id]
                request.worker = None
                self._wait(request, now)
        return self.worker_lost(peer, now)

    def started(self, peer: PeerId, message: Started, now: float) -> list[Effect]:
        """Shape and grammar accepted."""
        request = self._wanted(peer, message.request, message.attempt)
        if request is None:
            return []
        trace = self.traces.mark(request.id, "started", now)
        if trace is not None:
            trace.workers.append(self.workers[peer].name)
            trace.lane = message.lane
        return [Relay(request.api)]

    def tokens(self, peer: PeerId, id: RequestId, attempt: int, now: float) -> list[Effect]:
        """Pieces for the client. The first ones end the chance of a second attempt, so the payload can go."""
        request = self._wanted(peer, id, attempt)
        if request is None:
            return []
        if not request.streaming:
            request.streaming = True
            request.payload = b""
            model = self.models[request.model]
            model.histograms["time_to_first_token"].observe(now - request.submitted_at)
            if not self.workers[peer].leaving and self._has_choice(model, request):
                model.prefixes.add(request.prefix, peer)
            self.traces.mark(id, "first_tokens", now)
        return [Relay(request.api)]

    def streamed_to(self, peer: PeerId, id: RequestId, attempt: int) -> PeerId | None:
        """Where pieces go of a reply whose first ones have gone; None: not such a reply, or nobody wants it."""
        request = self._wanted(peer, id, attempt)
        return request.api if request is not None and request.streaming else None

    def done(self, peer: PeerId, message: Done, payload: bytes, now: float) -> list[Effect]:
        """The one place where a slot comes back from a live worker."""
        worker = self.workers.get(peer)
        lease = worker.leases.get(message.request) if worker else None
        if worker is None or lease is None or lease.attempt != message.attempt:
            return []
        del worker.leases[message.request]
        served = self.models[worker.facts.model].tokens
        served["prompt"] += message.prompt_tokens
        served["cached"] += message.cached_tokens
        served["completion"] += message.completion_tokens
        trace = self.traces.get(RequestId(message.request))
        if trace is not None:
            trace.worker_payload = payload
        effects: list[Effect] = []
        if lease.stopping_at is None:
            request = self.requests[message.request]
            effects.append(Relay(request.api))
            self._end(request, message.outcome, now)
        return effects + self._dispatch(self.models[worker.facts.model], now)

    # -- the pool, the operator, time

    def planned(self, plans: Iterable[ModelPlan], now: float) -> list[Effect]:
        """The pool's plan, whole. A model that left it has no workers to hope for."""
        effects: list[Effect] = []
        by_name = {plan.model: plan for plan in plans}
        for name in by_name.keys() | self.models.keys():
            model = self._model(name)
            model.plan = by_name.get(name)
            effects += self._dispatch(model, now) + self._end_hopeless(model, now)
        return effects

    def drain(self) -> None:
        """Refuse what is new; what has a place goes on."""
        self.draining = True

    def advance(self, now: float) -> list[Effect]:
        """Deadlines that have come."""
        effects: list[Effect] = []
        for kind, id in list(self._deadlines.due(now)):
            request = self.requests.get(id)
            if request is None:
                continue
            if kind == "reservation":
                # One that ran, lost its worker and was sent back has begun for its client: it counts.
                outcome = Outcome.NOT_RESERVED if request.untouched else Outcome.STALE_MODEL
                effects.append(ToApi(request.api, Rejected(id, outcome, 0)))
                self._end(request, None if request.untouched else outcome, now)
            elif kind == "queue":
                effects += self._close(request, Outcome.QUEUE_TIMEOUT, now)
            else:
                effects += self._close(request, Outcome.REQUEST_TIMEOUT, now)
        return effects

    def stopping_too_long(self, now: float) -> list[Worker]:
        """Workers that were told to stop a request long ago and have not: they are stuck, whatever else they say."""
        limit = now - self._settings.stuck
        return [
            worker
            for worker in self.workers.values()
            if any(lease.stopping_at is not None and lease.stopping_at < limit for lease in worker.leases.values())
        ]

    # -- inside

    def _model(self, name: str) -> Model:
        model = self.models.get(name)
        if model is None:
            line = WaitingLine(policy.aging_step_s(self._settings.queue_timeout))
            model = self.models[name] = Model(name, line)
        return model

    def _refusal(self, model: Model, message: Reserve, now: float) -> Outcome | None:
        if self.draining:
            return Outcome.DRAINING
        if any(id in self.requests for id in message.requests) or len(set(message.requests)) != len(message.requests):
            return Outcome.DUPLICATE
        hopeless = self._hopeless(model, now)
        if hopeless is not None:
            return hopeless
        return policy.admit(
            len(model.requests), len(message.requests), self.max_inflight(model), self._settings.max_queue
        )

    def _hopeless(self, model: Model, now: float) -> Outcome | None:
        """Why nobody will ever serve this model as things stand; None: somebody does or is coming."""
        if any(not worker.leaving for worker in self.workers_of(model.name)):
            return None
        if model.plan is None:
            return None if now - self._born_at < ASSEMBLY_S else Outcome.NO_WORKER
        if model.plan.state == "failed":
            return Outcome.MODEL_FAILED
        return Outcome.NO_WORKER if model.plan.workers == 0 else None

    def _end_hopeless(self, model: Model, now: float) -> list[Effect]:
        outcome = self._hopeless(model, now)
        if outcome is None:
            return []
        waiting = [self.requests[id] for id in model.line]
        return [effect for request in waiting for effect in self._close(request, outcome, now, dispatch=False)]

    def _rejected(self, id: RequestId, outcome: Outcome, model: Model, now: float) -> Rejected:
        if outcome is Outcome.TOO_MANY_PLACES or outcome is Outcome.DUPLICATE:
            return Rejected(id, outcome, 0)
        ahead = len(model.requests) - self.max_inflight(model) + 1
        return Rejected(id, outcome, int(policy.retry_after_s(model.ended_at, max(1, ahead), now) * 1000))

    def _displace(self, model: Model, message: Reserve, now: float) -> list[Effect]:
        """Places taken from keys with more of the full queue than this one would have; empty: there are none to take."""
        wanted = len(message.requests)
        missing = len(model.requests) + wanted - self.max_inflight(model) - self._settings.max_queue
        if missing > wanted:
            # Fewer places are left than are given away, as after a plan for fewer slots: nobody comes in for one who goes.
            return []
        effects: list[Effect] = []
        for id in model.queue.displaced(message.key, message.weight, wanted, missing):
            request = self.requests[id]
            self._end(request, None, now, "displaced")
            model.refused[Outcome.QUEUE_FULL] = model.refused.get(Outcome.QUEUE_FULL, 0) + 1
            effects.append(ToApi(request.api, self._rejected(id, Outcome.QUEUE_FULL, model, now)))
        return effects

    def _wait(self, request: Request, now: float) -> None:
        request.phase = Phase.WAITING
        line = self.models[request.model].line
        if request.untouched:
            line.add(request.id, request.key, request.weight, request.priority, request.arrival)
        else:
            line.put_back(request.id, request.arrival)
        self._deadlines.set(("queue", request.id), now + self._settings.queue_timeout)

    def _wanted(self, peer: PeerId, id: RequestId, attempt: int) -> Request | None:
        worker = self.workers.get(peer)
        lease = worker.leases.get(id) if worker else None
        if lease is None or lease.attempt != attempt or lease.stopping_at is not None:
            return None
        return self.requests[id]

    def _dispatch(self, model: Model, now: float) -> list[Effect]:
        effects: list[Effect] = []
        workers = [worker for worker in self.workers_of(model.name) if not worker.leaving]
        while model.line and self.may_run_more(model):
            choice = self._next_dispatch(model, workers, effects, now)
            if choice is None:
                break
            effects.append(self._lease(*choice, now))
        return effects

    def _next_dispatch(
        self, model: Model, workers: list[Worker], effects: list[Effect], now: float
    ) -> tuple[Request, Worker] | None:
        """Who goes next, and where. Requests that no worker could ever take end here.

        A request that is blocked stands in the way only of those who want the same workers: who waits for full ones
        only is passed by, and is not passed over.
        """
        blocked: list[tuple[Request, list[Worker]]] = []
        unservable: list[Request] = []
        choice = None
        # Workers with a free slot, and how many blocked requests stand before each.
        open_ = {worker.peer: 0 for worker in workers if worker.free > 0}
        for scanned, id in enumerate(model.line.order(now) if open_ else ()):
            if not open_ or scanned >= policy.SCAN:
                break
            request = self.requests[id]
            able = [worker for worker in workers if policy.waits_for(worker, request)]
            if not able:
                # Somebody serves it, or it would have been sent back.
                unservable.append(request)
                continue
            wanted = [worker for worker in able if worker.peer in open_]
            worker = policy.choose_worker(wanted, request, self._read(model, request)) if wanted else None
            if worker is not None:
                choice = request, worker
                break
            blocked.append((request, wanted))
            for worker in wanted:
                open_[worker.peer] += 1
                if request.passed_over >= policy.MAX_PASSED_OVER or open_[worker.peer] >= policy.LOOKAHEAD:
                    del open_[worker.peer]
        for request in unservable:
            effects += self._close(request, Outcome.TOO_LONG, now, dispatch=False)
        if choice is not None:
            for request, wanted in blocked:
                request.passed_over += any(worker is choice[1] for worker in wanted)
        return choice

    def _read(self, model: Model, request: Request) -> dict[PeerId, int]:
        """How much of its prompt workers are known to have read."""
        return model.prefixes.read(request.prefix) if self._settings.prefix_routing else {}

    def _takers(self, model: Model, request: Request) -> list[Worker]:
        """Workers that serve this request and take new ones."""
        return [w for w in self.workers_of(model.name) if not w.leaving and policy.serves(w, request)]

    def _has_choice(self, model: Model, request: Request) -> bool:
        """With one worker a prefix chooses nothing."""
        return self._settings.prefix_routing and len(self._takers(model, request)) > 1

    def _count_routing(self, model: Model, request: Request, worker: Worker) -> None:
        takers = {taker.peer for taker in self._takers(model, request)}
        read = {peer: count for peer, count in model.prefixes.read(request.prefix).items() if peer in takers}
        most = max(read.values(), default=0)
        model.routed["new" if not most else "hit" if read.get(worker.peer) == most else "diverted"] += 1

    def _fingerprint(self, model: Model, ids: Iterable[RequestId]) -> str:
        """For which of its workers' fingerprints these requests should be rendered; "": there is none.

        While a model is being swapped there are two, and each gets its workers' share of the requests.
        """
        slots: dict[str, int] = {}
        for worker in self.workers_of(model.name):
            if not worker.leaving:
                slots[worker.facts.fingerprint] = slots.get(worker.facts.fingerprint, 0) + worker.facts.slots
        wanted = next(iter(slots), "")
        if len(slots) > 1:
            taken = dict.fromkeys(slots, 0)
            for request in model.requests.values():
                if request.fingerprint in taken:
                    taken[request.fingerprint] += 1
            wanted = min(slots, key=lambda name: taken[name] / slots[name])
        for id in ids:
            self.requests[id].fingerprint = wanted
        return wanted

    def _send_back_stale(self, model: Model, ids: Iterable[RequestId], now: float) -> list[Effect]:
        """Whoever waits and is served by nobody of those that take new work; while there are none, all wait for whom comes.

        Called whenever there may be such: a dispatch looks at nobody while all workers are full.
        """
        served = {worker.facts.fingerprint for worker in self.workers_of(model.name) if not worker.leaving}
        if not served:
            return []
        waiting = [self.requests[id] for id in ids]
        stale = [request for request in waiting if request.fingerprint and request.fingerprint not in served]
        return [self._send_back(request, model, now) for request in stale]

    def _send_back(self, request: Request, model: Model, now: float) -> Effect:
        """Nobody serves what it was rendered for: it is as if only reserved, but keeps its arrival."""
        model.line.remove(request.id)
        request.phase, request.payload = Phase.RESERVED, b""
        self._deadlines.drop(("queue", request.id))
        self._deadlines.set(("reservation", request.id), now + self._settings.reservation_timeout)
        self.traces.mark(request.id, "sent back", now)
        return ToApi(request.api, Stale(request.id, self._fingerprint(model, [request.id])))

    def _lease(self, request: Request, worker: Worker, now: float) -> Effect:
        model = self.models[request.model]
        model.line.serve(request.id, now)
        model.queue.discard(request.id, request.key)
        if request.prefix and self._has_choice(model, request):
            self._count_routing(model, request, worker)
        self._deadlines.drop(("queue", request.id))
        self._dispatches += 1
        worker.last_dispatch = self._dispatches
        request.phase = Phase.RUNNING
        request.attempt += 1
        request.worker = worker.peer
        request.dispatched_at = now
        if request.attempt == 1:
            model.histograms["queue_wait"].observe(now - request.submitted_at)
        self.traces.mark(request.id, "dispatched", now)
        worker.leases[request.id] = Lease(request.attempt, request.tokens)
        return ToWorker(worker.peer, Dispatch(request.id, request.attempt, request.label), request.payload)

    def _close(self, request: Request, outcome: Outcome, now: float, *, dispatch: bool = True) -> list[Effect]:
        """End a request for a reason of ours: its client is told, its slot, if it has one, is called back."""
        effects = self._stop_lease(request, now)
        effects.append(ToApi(request.api, Done(request.id, request.attempt, outcome)))
        self._end(request, outcome, now)
        return effects + (self._dispatch(self.models[request.model], now) if dispatch else [])

    def _stop_lease(self, request: Request, now: float) -> list[Effect]:
        if request.worker is None:
            return []
        self.workers[request.worker].leases[request.id].stopping_at = now
        return [ToWorker(request.worker, Stop(request.id, request.attempt))]

    def _end(self, request: Request, outcome: Outcome | None, now: float, how: str = "released") -> None:
        """The one end. outcome None: it never counted as a request, for the reason that its trace gives."""
        model = self.models[request.model]
        if request.id in model.line:
            model.line.remove(request.id)
        model.queue.discard(request.id, request.key)
        del self.requests[request.id], model.requests[request.id]
        if not model.requests:
            model.line.forget()
        mine = self.by_api.get(request.api)
        if mine is not None:
            mine.pop(request.id, None)
            if not mine:
                del self.by_api[request.api]
        for kind in ("reservation", "queue", "total"):
            self._deadlines.drop((kind, request.id))
        if outcome is not None:
            model.finished[outcome] = model.finished.get(outcome, 0) + 1
            model.ended_at.append(now)
            model.histograms["request"].observe(now - request.reserved_at)
        trace = self.traces.mark(request.id, "ended", now)
        if trace is not None:
            trace.outcome = outcome.value if outcome is not None else how

    def _forget_if_empty(self, model: Model) -> None:
        # Names come from API processes, which check them; still, a name nobody serves must not stay for ever.
        if model.plan is None and not model.requests and not self.workers_of(model.name):
            del self.models[model.name]
