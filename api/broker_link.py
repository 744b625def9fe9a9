"""The API's session with the broker, on the event loop.

Owns the peer, the table of tickets by request id and the questions for snapshots; turns messages into ticket calls
and nothing else. Never decides what a client gets. Invariant: every ticket in the table ends exactly once, at the
latest when the session is dropped (BROKER_LOST), and leaves the table then.

The descriptor is edge-triggered: it is drained when readable, after every send and from a timer, a bounded stretch at a
time, the rest by call_soon, so that a flood of tokens never keeps the loop from its connections.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq

from api.ticket import Ticket
from common import logs
from common.client import TICK_S, Dropped, Event, Peer, Received, hello
from common.envelope import (
    Cancel,
    Done,
    Goodbye,
    Message,
    Rejected,
    Release,
    Report,
    Reserve,
    Reserved,
    Snapshot,
    Stale,
    Started,
    Status,
    Submit,
    Tokens,
    TraceMarks,
)
from common.errors import ServingError
from common.generation import GenerationRequest, pack_marks, pack_request
from common.ids import RequestId
from common.outcomes import Outcome
from common.session import Joined
from common.sockets import context

REPORT_S = 1.0
# A process that has just begun, or whose broker is being restarted, is joined within a second or two; answering 503
# meanwhile would show clients a reload.
JOIN_WAIT_S = 3.0
# A broker that lives answers within a millisecond; one that does not is found out by the session within seconds.
SNAPSHOT_S = 2.0


class BrokerLink:
    """This process as a peer of the broker."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint = endpoint
        self._name = name
        self._context: zmq.Context | None = None
        self._peer: Peer | None = None
        self._watched = -1
        self._tickets: dict[RequestId, Ticket] = {}
        # Tickets of a RESERVE that is not answered yet, by its first id, which is the one that the answer names.
        self._asked: dict[RequestId, Sequence[Ticket]] = {}
        self._questions: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._report_at = 0.0
        self._pump_is_due = False
        # While messages are taken: whom to tell of theirs when all have been.
        self._pumping = False
        self._woken: dict[Callable[[], None], None] = {}
        self._joined = False
        self._came_alive = asyncio.Event()
        # What the API itself refused since the last REPORT, by status.
        self.refused: Counter[str] = Counter()
        self.lost_because = "not joined yet"

    def start(self) -> None:
        """Open the socket (in the process that uses it: contexts do not survive a fork) and begin."""
        self._context = context()
        self._peer = Peer(self._context, self._endpoint, hello("api", self._name))
        self._peer.before_close = self._unwatch
        self._watch()
        self._tick()

    def stop(self) -> None:
        """Say goodbye and close; all tickets end."""
        assert self._peer is not None and self._context is not None
        if self._timer:
            self._timer.cancel()
        self._peer.send(Goodbye("shutdown"))
        self._end_all(Outcome.BROKER_LOST)
        self._unwatch()
        self._peer.close()
        self._context.term()

    @property
    def live(self) -> bool:
        """Whether the broker can be spoken to."""
        return self._peer is not None and self._peer.live

    @property
    def running(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    async def joined(self, within_s: float = JOIN_WAIT_S) -> None:
        """Wait until the broker can be spoken to. Raises ServingError(BROKER_LOST)."""
        try:
            async with asyncio.timeout(within_s):
                await self._came_alive.wait()
        except TimeoutError:
            raise ServingError(Outcome.BROKER_LOST) from None

    def reserve(
        self, tickets: Sequence[Ticket], label: str, model: str, priority: int, key: str, weight: float
    ) -> None:
        """Ask for one place per ticket. Raises ServingError when there is no broker to ask."""
        message = Reserve([ticket.id for ticket in tickets], label, model, priority, key, weight)
        if not self._send(message):
            raise ServingError(Outcome.BROKER_LOST)
        self._tickets.update((ticket.id, ticket) for ticket in tickets)
        self._asked[tickets[0].id] = tickets

    def submit(self, ticket: Ticket, request: GenerationRequest, prefix: bytes, fingerprint: str) -> None:
        """Hand a reserved ticket's work over. Raises ServingError."""
        envelope = Submit(ticket.id, len(request.prompt), request.max_tokens, prefix, fingerprint)
        if ticket.state != "reserved" or not self._send(envelope, pack_request(request)):
            raise ServingError(ticket.outcome or Outcome.BROKER_LOST, retry_after_s=ticket.retry_after_s)
        ticket.submitted()

    def drop(self, tickets: Sequence[Ticket], outcome: Outcome = Outcome.CANCELLED) -> None:
        """Nobody waits for these any more: give back what the broker still holds for them."""
        self._asked.pop(tickets[0].id, None)
        held = [ticket for ticket in tickets if self._tickets.pop(ticket.id, None)]
        reserved: list[bytes] = [ticket.id for ticket in held if ticket.state in ("asked", "reserved")]
        if reserved:
            self._send(Release(reserved))
        for ticket in held:
            if ticket.state in ("submitted", "started"):
                self._send(Cancel(ticket.id))
            ticket.end(outcome)

    def trace(self, tickets: Sequence[Ticket], marks: list[tuple[str, float]]) -> None:
        """Leave this request's marks with the broker. Without one they are lost, as its own are."""
        placed = [ticket for ticket in tickets if ticket.placed]
        payload = pack_marks(marks) if placed else b""
        for ticket in placed:
            self._send(TraceMarks(ticket.id), payload)

    def tell(self, news: Callable[[], None]) -> None:
        """Call this now, or once when all messages that are being taken have been: those of one reply come together."""
        if self._pumping:
            self._woken[news] = None
        else:
            news()

    def cut_all(self) -> int:
        """The process ends now: cancel everything that runs; the tickets end as SHUTDOWN."""
        running = [ticket for ticket in self._tickets.values() if ticket.state != "ended"]
        for ticket in running:
            self._send(Cancel(ticket.id))
        self._end_all(Outcome.SHUTDOWN)
        return len(running)

    async def snapshot(self, timeout_s: float = SNAPSHOT_S) -> dict[str, Any]:
        """The broker's snapshot. Raises ServingError(BROKER_LOST)."""
        question = secrets.token_bytes(16)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[question] = answer
        try:
            if not self._send(Status(question)):
                raise ServingError(Outcome.BROKER_LOST)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ServingError(Outcome.BROKER_LOST) from None
        finally:
            self._questions.pop(question, None)

    def _send(self, message: Message, payload: bytes = b"") -> bool:
        if self._peer is None:
            return False
        sent = self._peer.send(message, payload)
        # A send may swallow the descriptor's edge, and a failed one has ended the session: look again either way.
        if (not sent or self._peer.backlog()) and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)
        return sent

    def _watch(self) -> None:
        assert self._peer is not None
        self._unwatch()
        self._watched = self._peer.fileno()
        asyncio.get_running_loop().add_reader(self._watched, self._pump)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = -1

    def _tick(self) -> None:
        assert self._peer is not None
        now = time.monotonic()
        if self._peer.live and now >= self._report_at:
            self._report_at = now + REPORT_S
            counters = {f"refused_{status}": count for status, count in self.refused.items()}
            self.refused.clear()
            self._peer.send(Report(len(self._tickets), 0, {}, counters, {}))
        self._pump()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _pump(self) -> None:
        assert self._peer is not None
        self._pump_is_due = False
        self._pumping = True
        try:
            self._take_all(self._peer.pump())
        finally:
            self._pumping = False
            woken, self._woken = self._woken, {}
            for tell in woken:
                tell()
        if self._peer.backlog() and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _take_all(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Received):
                self._take(event.message, event.payload)
            elif isinstance(event, Dropped):
                self._dropped(event.reason)
            elif isinstance(event, Joined):
                self._joined = True
                self._came_alive.set()
                logs.event("joined the broker", epoch=event.epoch)

    def _take(self, message: Message, payload: bytes) -> None:
        if isinstance(message, Tokens):
            ticket = self._tickets.get(RequestId(message.request))
            if ticket is not None and ticket.tokens(message, payload):
                del self._tickets[ticket.id]
                self._send(Cancel(ticket.id))
        elif isinstance(message, Done):
            # An unknown id is an answer to a CANCEL of ours: the client had gone.
            ticket = self._tickets.get(RequestId(message.request))
            if ticket is not None:
                ticket.done(message, payload)
                if ticket.state == "ended":
                    del self._tickets[ticket.id]
        elif isinstance(message, Started):
            ticket = self._tickets.get(RequestId(message.request))
            if ticket is not None:
                ticket.started(message)
        elif isinstance(message, Reserved):
            for ticket in self._asked.pop(RequestId(message.request), ()):
                ticket.reserved(message)
        elif isinstance(message, Rejected):
            self._rejected(message)
        elif isinstance(message, Stale):
            ticket = self._tickets.get(RequestId(message.request))
            if ticket is not None:
                ticket.stale(message)
        elif isinstance(message, Snapshot):
            self._answer(message, payload)

    def _rejected(self, message: Rejected) -> None:
        # To a RESERVE: all or none of its places are held. To a SUBMIT: this one request.
        request = RequestId(message.request)
        group = self._asked.pop(request, None)
        for ticket in group or filter(None, [self._tickets.get(request)]):
            self._tickets.pop(ticket.id, None)
            ticket.rejected(message)

    def _answer(self, message: Snapshot, payload: bytes) -> None:
        question = self._questions.get(message.question)
        if question is not None and not question.done():
            question.set_result(msgpack.unpackb(payload))

    def _dropped(self, reason: str) -> None:
        # Until it has joined, the peer tries every few seconds; one line for that is enough.
        level = logging.WARNING if self._joined else logging.DEBUG
        logs.event("lost the broker", level, reason=reason, requests=len(self._tickets))
        self._joined, self.lost_because = False, reason
        self._came_alive.clear()
        self._watch()
        self._end_all(Outcome.BROKER_LOST)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(ServingError(Outcome.BROKER_LOST))

    def _end_all(self, outcome: Outcome) -> None:
        tickets, self._tickets = self._tickets, {}
        self._asked.clear()
        for ticket in tickets.values():
            ticket.end(outcome)
