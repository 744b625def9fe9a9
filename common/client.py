"""A peer of the broker over one DEALER: the non-blocking shell round common/session, for every process but the broker.

Owns the socket, the session and the reconnecting under fresh identities. Never blocks, never sleeps and starts no thread:
the owner polls fileno() (which changes after every Dropped), and calls pump() when it is readable, after sending, and at
least every TICK_S. BrokerClient adds blocking question and answer for commands.
"""

import os
import secrets
import socket as _socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from common import __version__, sockets
from common.envelope import (
    Admin,
    AdminReply,
    Heartbeat,
    Hello,
    Message,
    Snapshot,
    Status,
    TraceQuery,
    Welcome,
    WorkerFacts,
    decode,
    encode,
)
from common.errors import MillpondError, ProtocolError
from common.session import Effect, Joined, Lost, Send, Session

TICK_S = 0.25
# After a session ended: long enough not to spin on a broker that refuses, short enough to be back within its restart.
REJOIN_S = 0.2
# Messages taken per pump, so that a flood cannot keep the owner from its other work.
DRAIN = 512


@dataclass(frozen=True)
class Dropped:
    """The session ended (reason); what came through it is void. fileno() changes now."""

    reason: str


@dataclass(frozen=True)
class Received:
    """A message of a live session; what keeps the session itself (WELCOME, HEARTBEAT, REFUSED) is not among them."""

    message: Message
    payload: bytes


Event = Joined | Dropped | Received
_OF_SESSIONS = (Welcome, Heartbeat)


def hello(role: str, name: str, worker: WorkerFacts | None = None) -> Hello:
    """This process's HELLO."""
    return Hello(__version__, role, name, os.getpid(), _socket.gethostname(), worker)  # type: ignore[arg-type]


class Peer:
    """One peer over many sessions."""

    def __init__(
        self, context: zmq.Context, endpoint: str, greeting: Hello, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self.greeting = greeting
        self._clock = clock
        self._rejoin_at = 0.0
        self._unsent_hello: Message | None = None
        self.malformed = 0
        # Called while the descriptor of fileno() is still open, just before it is not: an event loop that watched it a
        # moment longer would take whatever gets the same number next, a client's connection say, for it.
        self.before_close: Callable[[], None] = lambda: None
        self._pending: list[Event] = []
        # The last thing done with the socket was to find it empty, so whatever comes rings at fileno().
        self._drained = False
        self._socket = sockets.dealer(context, endpoint)
        self._new_session()

    @property
    def live(self) -> bool:
        """Whether messages may be sent."""
        return self._session.live

    @property
    def epoch(self) -> str:
        """The broker's life that this session belongs to."""
        return self._session.epoch

    def fileno(self) -> int:
        """The descriptor to poll for reading; edge-triggered, so pump() until backlog() is False."""
        return self._socket.fileno()

    @property
    def socket(self) -> zmq.Socket:
        """The socket, for a zmq.Poller."""
        return self._socket

    def send(self, message: Message, payload: bytes = b"") -> bool:
        """Hand a message over. False: there is no live session (any more); Dropped comes from the next pump()."""
        if not self._session.live:
            return False
        return self._give(encode(message), payload)

    def send_encoded(self, envelope: bytes, payload: bytes) -> bool:
        """As send(), for an envelope that is bytes already."""
        return self._session.live and self._give(envelope, payload)

    def backlog(self) -> bool:
        """Whether more waits than the last pump() took, or may have come unheard while something was sent."""
        return not self._drained and sockets.readable(self._socket)

    def pump(self) -> list[Event]:
        """Take what waits, keep the session alive, come back under a new identity when it is over."""
        now = self._clock()
        events, self._pending = self._pending, []
        if self._session.state == "over":
            if now < self._rejoin_at:
                return events
            self._new_session()
        if self._unsent_hello is not None:
            self._say_hello()
        for _ in range(DRAIN):
            frames = sockets.receive(self._socket)
            self._drained = frames is None
            if frames is None:
                break
            try:
                envelope, payload = sockets.envelope_and_payload(frames)
                message = decode(envelope)
            except ProtocolError:
                self.malformed += 1
                continue
            effects = self._session.heard(message, now)
            if effects:
                events += self._carry_out(effects)
                if self._session.state == "over":
                    return events
            if self._session.live and not isinstance(message, _OF_SESSIONS):
                events.append(Received(message, payload))
        effects = self._session.tick(now)
        return events + self._carry_out(effects) if effects else events

    def close(self, linger_ms: int = sockets.PEER_LINGER_MS) -> None:
        """Close the socket; what was handed over still leaves within linger_ms."""
        self._socket.close(linger_ms)

    def _new_session(self) -> None:
        self._session = Session(self.greeting)
        (effect,) = self._session.open(self._clock())
        assert isinstance(effect, Send)
        self._unsent_hello = effect.message
        self._say_hello()

    def _say_hello(self) -> None:
        # IMMEDIATE makes this fail until the connection stands; the session's own deadline bounds the tries.
        assert self._unsent_hello is not None
        self._drained = False
        try:
            sockets.send(self._socket, [encode(self._unsent_hello), b""])
            self._unsent_hello = None
        except sockets.WouldBlock:
            return

    def _give(self, envelope: bytes, payload: bytes) -> bool:
        self._drained = False
        try:
            sockets.send(self._socket, [envelope, payload])
        except sockets.WouldBlock:
            self._pending += self._carry_out(self._session.end("the broker takes no more"))
            return False
        self._session.sent(self._clock())
        return True

    def _carry_out(self, effects: list[Effect]) -> list[Event]:
        events: list[Event] = []
        for effect in effects:
            if isinstance(effect, Send):
                self._give(encode(effect.message), b"")
            elif isinstance(effect, Lost):
                # The fresh socket is there at once, so that fileno() is never stale; it says HELLO after REJOIN_S.
                self.before_close()
                self._socket.close(0)
                self._socket = sockets.dealer(self._context, self._endpoint)
                self._drained = False
                self._unsent_hello = None
                self._rejoin_at = self._clock() + REJOIN_S
                events.append(Dropped(effect.reason))
            else:
                events.append(effect)
        return events


class BrokerClient:
    """Blocking questions to the broker, for commands and tests. Raises NoBroker when nobody answers in time."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._context = sockets.context()
        self._peer = Peer(self._context, endpoint, hello("command", name))

    def __enter__(self) -> "BrokerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._peer.close(0)
        self._context.term()

    def snapshot(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The broker's snapshot (broker/snapshot describes it)."""
        question = secrets.token_bytes(16)
        return msgpack.unpackb(self._answer(Status(question), question, timeout_s).payload)

    def traces(self, label: str, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The traces of recent requests with this label (broker/traces describes them)."""
        question = secrets.token_bytes(16)
        return msgpack.unpackb(self._answer(TraceQuery(question, label), question, timeout_s).payload)

    def admin(
        self,
        action: str,
        target: str = "",
        count: int = 0,
        source: str = "",
        timeout_s: float = 5.0,
        told: Callable[[str], None] = lambda text: None,
    ) -> AdminReply | None:
        """Ask for an administrative act; the reply says whether it was done. told: called with what happens meanwhile.

        None: it is still under way after timeout_s. Raises NoBroker when nobody has answered anything by then.
        """
        question = secrets.token_bytes(16)
        message = Admin(question, action, target, count, source)  # type: ignore[arg-type]
        heard = False
        for event in self._ask(message, timeout_s):
            reply = event.message
            if isinstance(reply, AdminReply) and reply.question == question:
                if reply.final:
                    return reply
                heard = True
                told(reply.text)
        if heard:
            return None
        raise NoBroker(f"the broker did not answer within {timeout_s:g} s")

    def _answer(self, message: Message, question: bytes, timeout_s: float) -> Received:
        for event in self._ask(message, timeout_s):
            if isinstance(event.message, Snapshot | AdminReply) and event.message.question == question:
                return event
        raise NoBroker(f"the broker did not answer within {timeout_s:g} s")

    def _ask(self, message: Message, timeout_s: float) -> Iterator[Received]:
        deadline = time.monotonic() + timeout_s
        asked = False
        while (left := deadline - time.monotonic()) > 0:
            if not asked and self._peer.live:
                asked = self._peer.send(message)
            for event in self._peer.pump():
                if isinstance(event, Dropped):
                    asked = False
                elif isinstance(event, Received):
                    yield event
            if asked or not self._peer.live:
                self._peer.socket.poll(min(left, 0.05) * 1000)


class NoBroker(MillpondError):
    """No broker answers at this endpoint."""
