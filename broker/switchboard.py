"""From message to ledger and roster (pure: bytes and `now` in, effects out).

Knows which role may say what and nothing of sockets. A peer's mistake (no HELLO, wrong role, bytes that are no message) is
counted and answered with REFUSED; only the sender's own session suffers from it.
"""

import msgpack

from broker.ledger import Ledger
from broker.overgrown import Overgrown
from broker.records import Answer, Effect, Hangup, Note, Relay, ToApi, ToPool, Worker
from broker.roster import PeerRecord, Roster
from broker.settings import BrokerSettings
from broker.snapshot import snapshot
from common import __version__
from common.envelope import (
    Admin,
    AdminReply,
    Cancel,
    Dispatch,
    Done,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Order,
    PoolState,
    Refused,
    Release,
    Report,
    Reserve,
    Snapshot,
    Started,
    Status,
    Submit,
    Tokens,
    TraceMarks,
    TraceQuery,
    Welcome,
    decode,
)
from common.errors import ProtocolError
from common.ids import PeerId

HEARTBEAT_MS = 1000
# A lost order to replace a drained worker is given again.
ORDER_AGAIN_S = 5.0
FRONT_ROLES = frozenset({"api", "command"})
# What an API process refuses without asking the broker, by status, as its REPORT counts it.
API_REFUSALS = frozenset(f"refused_{status}" for status in (400, 401, 403, 404, 405, 408, 413))

_ALLOWED: dict[str, tuple[type, ...]] = {
    "api": (Reserve, Release, Submit, Cancel, Status, Report, TraceMarks, Heartbeat, Goodbye),
    "worker": (Started, Tokens, Done, Report, Heartbeat, Goodbye),
    "pool": (PoolState, AdminReply, Report, Heartbeat, Goodbye),
    "command": (Status, TraceQuery, Admin, Heartbeat, Goodbye),
}


class Switchboard:
    """One broker life: its ledger, its roster, its epoch."""

    def __init__(self, settings: BrokerSettings, epoch: str, now: float) -> None:
        self._settings = settings
        self.epoch = epoch
        self.ledger = Ledger(settings, now)
        self.roster = Roster(settings.silence, settings.stuck)
        self.overgrown = Overgrown(settings.memory_patience)
        # Workers that drain to be replaced, and when the pool may next be told that one has nothing left.
        self._replacing: dict[PeerId, float] = {}
        self.malformed = 0
        self.api_refused: dict[str, int] = {}
        # Commands that wait for the pool, by their question.
        self._asked: dict[bytes, PeerId] = {}

    # -- what the loop reports

    def receive(self, front: bool, peer: PeerId, envelope: bytes, payload: bytes, now: float) -> list[Effect]:
        """A message came in by the front (apis, commands) or the back (workers, pool)."""
        try:
            message = decode(envelope)
        except ProtocolError as error:
            return self._mistake(peer, str(error), now)
        if isinstance(message, Hello):
            return self._hello(front, peer, message, now)
        record = self.roster.peers.get(peer)
        if record is None:
            return [Hangup(peer, "say HELLO first")]
        if not isinstance(message, _ALLOWED[record.role]):
            return self._mistake(peer, f"{type(message).__name__} from a peer of role {record.role}", now)
        record.heard_at = now
        return self._act(record, message, payload, now)

    def streamed_to(self, peer: PeerId, envelope: bytes, now: float) -> PeerId | None:
        """The api peer to which a message from the back is to be relayed and nothing else is to be done; None: receive()
        it. A short way for what comes a thousand times as often as anything else."""
        try:
            message = decode(envelope)
        except ProtocolError:
            return None
        record = self.roster.peers.get(peer)
        if type(message) is not Tokens or record is None or record.role != "worker":
            return None
        api = self.ledger.streamed_to(peer, message.request, message.attempt)
        if api is not None:
            record.heard_at = now
        return api

    def malformed_frames(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """Not even two frames."""
        return self._mistake(peer, reason, now)

    def undeliverable(self, peer: PeerId, message: Message | None, now: float) -> list[Effect]:
        """A send failed: the peer is gone, or takes nothing any more. message None: what failed was a relayed one."""
        record = self.roster.peers.get(peer)
        if record is None:
            return []
        effects: list[Effect] = []
        if isinstance(message, Dispatch):
            effects += self.ledger.dispatch_failed(peer, message.request, now)
        return effects + self._lost(record, "does not take messages", now, kill=True)

    def tick(self, now: float) -> list[Effect]:
        """Deadlines, silence, stuck engines."""
        effects = self.ledger.advance(now)
        for record in self.roster.silent(now):
            effects += self._lost(record, f"silent for {now - record.heard_at:.1f} s", now, kill=True)
        for record in self.roster.stuck():
            assert record.report is not None
            effects += self._lost(record, f"engine stuck for {record.report.step_age_ms / 1000:.1f} s", now, kill=True)
        for worker in self.ledger.stopping_too_long(now):
            effects += self._lost(self.roster.peers[worker.peer], "does not stop a request", now, kill=True)
        return effects + self._replace_overgrown(now)

    def snapshot(self, now: float) -> dict[str, object]:
        """As broker/snapshot describes it."""
        whole = snapshot(self.ledger, self.roster, self._settings.max_queue, now)
        return whole | {"epoch": self.epoch, "malformed": self.malformed, "api_refused": dict(self.api_refused)}

    # -- inside

    def _act(self, record: PeerRecord, message: Message, payload: bytes, now: float) -> list[Effect]:
        ledger, peer = self.ledger, record.id
        match message:
            case Tokens():
                return ledger.tokens(peer, message.request, message.attempt, now)
            case Heartbeat():
                return []
            case Report():
                return self._report(record, message, now)
            case Reserve():
                return ledger.reserve(peer, message, now)
            case Submit():
                return ledger.submit(peer, message, payload, now)
            case Started():
                return ledger.started(peer, message, now)
            case Done():
                return ledger.done(peer, message, payload, now)
            case Cancel():
                return ledger.cancel(peer, message.request, now)
            case Release():
                return ledger.release(peer, message.requests, now)
            case TraceQuery():
                return [Answer(Snapshot(message.question), msgpack.packb(ledger.traces.labelled(message.label)))]
            case TraceMarks():
                trace = ledger.traces.get(message.request)
                if trace is not None:
                    trace.api_payload = payload
                return []
            case Status():
                return [Answer(Snapshot(message.question), msgpack.packb(self.snapshot(now)))]
            case PoolState():
                return self._pool_state(message, now)
            case Goodbye():
                return self._goodbye(record, message, now)
            case Admin():
                return self._admin(peer, message, now)
            case AdminReply():
                return self._pool_answers(message)
        raise AssertionError(f"{type(message).__name__} is allowed and has no case")

    def _hello(self, front: bool, peer: PeerId, hello: Hello, now: float) -> list[Effect]:
        if peer in self.roster.peers:
            return self._mistake(peer, "HELLO twice", now)
        if front != (hello.role in FRONT_ROLES):
            return self._mistake(peer, f"role {hello.role} on the wrong socket", now)
        if hello.version != __version__:
            return [Hangup(peer, f"version {hello.version}, the broker is {__version__}")]
        if (hello.worker is not None) != (hello.role == "worker"):
            return self._mistake(peer, "worker facts and role do not agree", now)
        effects: list[Effect] = [Answer(Welcome(self.epoch, HEARTBEAT_MS))]
        for older in self.roster.replaces(hello):
            effects += self._lost(older, "replaced by a newer session", now, charge=older.pid != hello.pid)
        self.roster.join(peer, hello, now)
        if hello.role != "command":
            effects.append(Note(f"{hello.role} joined", {"name": hello.name, "pid": hello.pid}))
        if hello.worker is not None:
            effects += self.ledger.worker_joined(peer, hello.name, hello.worker, now)
        return effects

    def _report(self, record: PeerRecord, report: Report, now: float) -> list[Effect]:
        record.report, record.reported_at = report, now
        if record.role == "api":
            for cause, count in report.counters.items():
                # A cause that no API of this version names would let a peer grow the table.
                if cause in API_REFUSALS:
                    self.api_refused[cause] = self.api_refused.get(cause, 0) + count
        elif record.role == "worker":
            self.overgrown.reported(record.id, report.memory, now)
            model = self.ledger.models[self.ledger.workers[record.id].facts.model]
            for kind, packed in report.histograms.items():
                if kind not in model.histograms or not model.histograms[kind].add(packed):
                    self.malformed += 1
        return []

    def _pool_state(self, state: PoolState, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in self.roster.exited(state.children):
            effects += self._lost(record, "its process ended", now)
        return effects + self.ledger.planned(state.models, now)

    def _goodbye(self, record: PeerRecord, message: Goodbye, now: float) -> list[Effect]:
        note = Note(f"{record.role} leaves", {"name": record.name, "reason": message.reason})
        if record.role == "worker":
            # It stays connected while it finishes what it has; its second GOODBYE says that it is done. That it takes
            # nothing new says less: we drain one of our own accord, and its first GOODBYE comes after that.
            if record.said_goodbye:
                return self._lost(record, "left", now, charge=False)
            record.said_goodbye = True
            return [note, *self.ledger.worker_leaving(record.id, now)]
        return self._lost(record, "left", now)

    def _pool_answers(self, reply: AdminReply) -> list[Effect]:
        command = self._asked.pop(reply.question, None) if reply.final else self._asked.get(reply.question)
        # Nobody any more: the command did not wait for the end.
        return [] if command is None else [Relay(command)]

    def _admin(self, peer: PeerId, message: Admin, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match message.action:
            case "drain" if not message.target:
                self.ledger.drain()
                text = "new requests are refused"
            case "cancel":
                count, effects = self.ledger.cancel_label(message.target, now)
                text = f"{count} request{'s' * (count != 1)} cancelled"
                if count == 0:
                    return [Answer(AdminReply(message.question, False, f"no request {message.target!r}"))]
            case _ if not self.roster.of_role("pool"):
                return [Answer(AdminReply(message.question, False, "there is no pool to carry it out"))]
            case _ if (leaving := self._leaves_for_its_memory(message.target)) is not None:
                # The pool still counts it among those that serve.
                text = f"{leaving} is being replaced for its memory; ask again"
                return [Answer(AdminReply(message.question, False, text))]
            case action:
                # Only the pool knows what becomes of it, and says so.
                self._asked[message.question] = peer
                reason = "asked by a command"
                return [ToPool(Order(action, message.target, message.count, reason, message.question, message.source))]
        return [*effects, Answer(AdminReply(message.question, True, text))]

    def _replace_overgrown(self, now: float) -> list[Effect]:
        """Drain workers that stay over their share, and have the pool start those again that have nothing left."""
        effects: list[Effect] = []
        if not self.roster.of_role("pool"):
            return effects
        for record in self.roster.of_role("worker"):
            worker = self.ledger.workers[record.id]
            if record.id in self._replacing:
                # Who has said GOODBYE has been told.
                if not (worker.leases or record.said_goodbye) and now >= self._replacing[record.id]:
                    self._replacing[record.id] = now + ORDER_AGAIN_S
                    effects.append(ToPool(Order("restart", record.name, record.pid, "over its share of memory")))
            elif self.overgrown.due(record.id, record.name, now) and self._may_leave(record, worker):
                self.overgrown.replaced(record.name, now)
                self._replacing[record.id] = now
                memory = dict(record.report.memory) if record.report else {}
                effects.append(Note("worker over its share of memory; it drains", {"worker": record.name, **memory}))
                effects += self.ledger.worker_leaving(record.id, now)
        return effects

    def _may_leave(self, record: PeerRecord, worker: Worker) -> bool:
        """One at a time, beside another that takes work; who is alone goes in a moment without any.

        Not while another worker of the model leaves or comes, nor while the pool changes what there is. Only a child of
        the pool: who was started by hand would drain, and nobody could start it again.
        """
        child = self.roster.children.get(record.name)
        if child is None or child.pid != record.pid or self._asked:
            return False
        model = worker.facts.model
        coming = ("loading", "backoff", "stopping")
        if any(child.model == model and child.state in coming for child in self.roster.children.values()):
            return False
        others = [other for other in self.ledger.workers_of(model) if other is not worker]
        if any(other.leaving for other in others):
            return False
        return bool(others) or not worker.leases

    def _leaves_for_its_memory(self, target: str) -> str | None:
        """Name of a worker that drains for its memory, of the model that is meant ("": any), by its name or a worker's."""
        child = self.roster.children.get(target)
        model = child.model if child is not None else target
        draining = (self.ledger.workers[peer] for peer in self._replacing)
        return next((worker.name for worker in draining if not target or worker.facts.model == model), None)

    def _mistake(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        self.malformed += 1
        record = self.roster.peers.get(peer)
        if record is None:
            return [Hangup(peer, reason), Note("a peer's mistake", {"reason": reason})]
        return self._lost(record, reason, now, kill=True)

    def _lost(
        self, record: PeerRecord, reason: str, now: float, *, charge: bool = True, kill: bool = False
    ) -> list[Effect]:
        """A session is over: whoever it was drops everything on REFUSED; a worker that does not react is killed."""
        if self.roster.leave(record.id) is None:
            return []
        effects: list[Effect] = [Hangup(record.id, reason)]
        if record.role != "command":
            effects.append(Note(f"{record.role} lost", {"name": record.name, "pid": record.pid, "reason": reason}))
        if record.role == "worker":
            self.overgrown.left(record.id)
            self._replacing.pop(record.id, None)
            effects += self.ledger.worker_lost(record.id, now, charge=charge)
            if kill:
                effects.append(ToPool(Order("kill", record.name, record.pid, reason)))
        elif record.role == "api":
            effects += self.ledger.api_lost(record.id, now)
        elif record.role == "command":
            self._asked = {question: peer for question, peer in self._asked.items() if peer != record.id}
        elif not self.roster.of_role("pool"):
            text = "the pool left meanwhile; millpond status shows how far it came"
            effects += [ToApi(peer, AdminReply(question, False, text)) for question, peer in self._asked.items()]
            self._asked = {}
        return effects


def refusal(reason: str) -> Refused:
    """The REFUSED of a Hangup."""
    return Refused(reason[:512])
