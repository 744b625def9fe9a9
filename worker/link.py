"""The worker's I/O thread: speaks with the broker so that a long step never looks like a death.

Owns the Peer; hands work to the main thread through `inbox` and takes frames from it through post(). What was posted under
one session never leaves under another: every item carries the number of the session that its request came by.
"""

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from common import logs, sockets
from common.client import TICK_S, Dropped, Peer, hello
from common.envelope import Dispatch, Goodbye, Report, Stop, WorkerFacts
from common.ids import RequestId
from common.session import Joined

REPORT_S = 1.0


@dataclass(frozen=True)
class Work:
    """A DISPATCH for the main thread."""

    session: int
    request: RequestId
    attempt: int
    label: str
    payload: bytes


@dataclass(frozen=True)
class Halt:
    """A STOP for the main thread."""

    session: int
    request: RequestId
    attempt: int


@dataclass(frozen=True)
class SessionOver:
    """Everything that came by sessions up to this one is void."""

    session: int


Item = Work | Halt | SessionOver


@dataclass
class Vitals:
    """What the main thread leaves for REPORT; single attributes, written by one thread and read by the other."""

    running: int = 0
    busy_since: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    # Totals since the process began.
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("completion_tokens", "accepted_draft_tokens", "rejected_draft_tokens"), 0
        )
    )
    # Packed histograms (kind, counts) since the last hand-over; appended by one thread, taken by the other.
    histograms: deque[tuple[str, list[int]]] = field(default_factory=deque)


class Link(threading.Thread):
    """The I/O thread of one worker."""

    def __init__(self, endpoint: str, name: str, facts: WorkerFacts, vitals: Vitals) -> None:
        super().__init__(name="link", daemon=True)
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._endpoint = endpoint
        self._greeting = hello("worker", name, facts)
        self._vitals = vitals
        self._outbox: deque[tuple[int, bytes, bytes]] = deque()
        self._bell_read, self._bell_write = os.pipe()
        for end in (self._bell_read, self._bell_write):
            os.set_blocking(end, False)
        self._session = 0
        # Set for good with the first session.
        self.joined = threading.Event()
        self._leaving = False
        # In this session: the broker of the next one knows nothing of it.
        self._said_goodbye = False
        self._closing = False

    def post(self, frames: list[tuple[int, bytes, bytes]]) -> None:
        """Send these (session, envelope, payload), each if its session still lives. From the main thread."""
        self._outbox.extend(frames)
        self._ring()

    def say_goodbye(self) -> None:
        """No new work, please. From the main thread."""
        self._leaving = True
        self._ring()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is posted, say the last goodbye and end the thread."""
        self._closing = True
        self._ring()
        self.join(timeout_s)

    def run(self) -> None:
        """The thread's life."""
        context = sockets.context()
        peer = Peer(context, self._endpoint, self._greeting)
        poller = zmq.Poller()
        poller.register(self._bell_read, zmq.POLLIN)
        registered = peer.socket
        poller.register(registered, zmq.POLLIN)
        report_at = 0.0
        while True:
            if peer.socket is not registered:
                poller.unregister(registered)
                registered = peer.socket
                poller.register(registered, zmq.POLLIN)
            poller.poll(TICK_S * 1000)
            self._clear_bell()
            self._take(peer)
            closing = self._closing
            self._send_posted(peer)
            now = time.monotonic()
            if peer.live and now >= report_at:
                report_at = now + REPORT_S
                peer.send(self._report(now))
            if self._leaving:
                self._say_goodbye(peer)
            if closing and not self._outbox:
                break
        if peer.live:
            # What was counted since the last second.
            peer.send(self._report(time.monotonic()))
            # Heard as the first, the last one would be a promise to stay, and the exit after it a death.
            if self._say_goodbye(peer):
                peer.send(Goodbye("done"))
        peer.close()
        context.term()

    def _say_goodbye(self, peer: Peer) -> bool:
        """Whether this session's broker has been told, now or before."""
        if not self._said_goodbye and peer.live:
            self._said_goodbye = peer.send(Goodbye("told to end"))
        return self._said_goodbye

    def _take(self, peer: Peer) -> None:
        for event in peer.pump():
            if isinstance(event, Joined):
                self._session += 1
                self._said_goodbye = False
                self.joined.set()
                logs.event("joined the broker", epoch=event.epoch)
            elif isinstance(event, Dropped):
                self.inbox.put(SessionOver(self._session))
                logs.event("lost the broker", reason=event.reason)
            elif isinstance(event.message, Dispatch):
                message = event.message
                self.inbox.put(Work(self._session, message.request, message.attempt, message.label, event.payload))
            elif isinstance(event.message, Stop):
                self.inbox.put(Halt(self._session, event.message.request, event.message.attempt))

    def _send_posted(self, peer: Peer) -> None:
        while self._outbox:
            session, envelope, payload = self._outbox.popleft()
            if session == self._session:
                # A failed send ends the session; the next pump says so and the main thread drops the request.
                peer.send_encoded(envelope, payload)

    def _report(self, now: float) -> Report:
        vitals = self._vitals
        busy_since = vitals.busy_since
        age_ms = 0 if busy_since is None else int((now - busy_since) * 1000)
        merged: dict[str, list[int]] = {}
        while vitals.histograms:
            kind, packed = vitals.histograms.popleft()
            merged[kind] = [a + b for a, b in zip(merged.get(kind, [0] * len(packed)), packed, strict=True)]
        return Report(vitals.running, max(0, age_ms), dict(vitals.memory), dict(vitals.counters), merged)

    def _ring(self) -> None:
        try:
            os.write(self._bell_write, b"!")
        except BlockingIOError:
            return  # full: it rings already

    def _clear_bell(self) -> None:
        try:
            os.read(self._bell_read, 4096)
        except BlockingIOError:
            return
