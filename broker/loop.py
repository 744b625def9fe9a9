"""The broker's shell: two ROUTERs, bounded drains, zmq errors turned into events. One thread.

Reads clocks and sockets, decides nothing: what comes in goes to the switchboard, what it answers goes out. A send never
blocks; one that fails is reported back as an event, and a peer that takes nothing is lost (its requests end or go elsewhere).
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable

import zmq

from broker.records import Answer, Effect, Hangup, Note, Relay, ToApi, ToPool, ToWorker
from broker.switchboard import HEARTBEAT_MS, Switchboard, refusal
from common import logs, sockets
from common.envelope import Dispatch, Heartbeat, Message, encode
from common.errors import ProtocolError
from common.ids import PeerId

# Messages taken from one socket before the other gets its turn: about a millisecond of work.
DRAIN = 128
TICK_S = 0.1


class Loop:
    """Runs a switchboard on two bound sockets until stop() is called from a signal handler."""

    def __init__(
        self,
        context: zmq.Context,
        front: str,
        back: str,
        switchboard: Switchboard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._switchboard = switchboard
        self._clock = clock
        self._front = sockets.router(context, front)
        self._back = sockets.router(context, back)
        self._stopping = False
        self._bell_read, self._bell_write = os.pipe()
        os.set_blocking(self._bell_write, False)
        self._encoded_heartbeat = encode(Heartbeat())

    def stop(self) -> None:
        """Ring the bell: the loop ends after its current turn. Safe in a signal handler."""
        self._stopping = True
        try:
            os.write(self._bell_write, b"!")
        except BlockingIOError:
            return  # a full pipe wakes the loop just as well

    def run(self) -> None:
        """Serve until stopped, then tell every peer that its session is over."""
        poller = zmq.Poller()
        for readable in (self._front, self._back, self._bell_read):
            poller.register(readable, zmq.POLLIN)
        next_tick = next_heartbeat = self._clock()
        while not self._stopping:
            now = self._clock()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._carry_out(self._switchboard.tick(now), None, b"", b"", now)
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_MS / 1000
                self._heartbeat(now)
            self._poll(poller, next_tick)
            self._drain(self._back, front=False)
            self._drain(self._front, front=True)
        self._close()

    def _poll(self, poller: zmq.Poller, next_tick: float) -> None:
        deadline = self._switchboard.ledger.next_deadline()
        wake_at = next_tick if deadline is None else min(next_tick, deadline)
        poller.poll(max(0, int((wake_at - self._clock()) * 1000) + 1))

    def _drain(self, socket: zmq.Socket, *, front: bool) -> None:
        messages = []
        while len(messages) < DRAIN and (frames := sockets.receive(socket)) is not None:
            messages.append(frames)
        # Sends that follow each other wake libzmq's I/O thread once, lone ones each time; so what is only to be relayed is
        # kept until something else is to be done, and its order stays.
        relays: list[tuple[PeerId, bytes, bytes]] = []
        streamed_to, came_at = self._switchboard.streamed_to, self._clock()
        for frames in messages:
            peer = PeerId(frames[0])
            if not front and len(frames) == 3:
                to = streamed_to(peer, frames[1], came_at)
                if to is not None:
                    relays.append((to, frames[1], frames[2]))
                    continue
            self._relay(relays)
            now = self._clock()
            try:
                envelope, payload = sockets.envelope_and_payload(frames[1:])
            except ProtocolError as error:
                self._carry_out(self._switchboard.malformed_frames(peer, str(error), now), peer, b"", b"", now)
                continue
            effects = self._switchboard.receive(front, peer, envelope, payload, now)
            self._carry_out(effects, peer, envelope, payload, now)
        self._relay(relays)

    def _relay(self, relays: list[tuple[PeerId, bytes, bytes]]) -> None:
        """Send what was kept, in order, and empty the list."""
        for peer, envelope, payload in relays:
            try:
                sockets.relay(self._front, peer, envelope, payload)
            except (sockets.WouldBlock, sockets.Unreachable):
                now = self._clock()
                self._carry_out(self._switchboard.undeliverable(peer, None, now), None, b"", b"", now)
        relays.clear()

    def _carry_out(
        self, effects: list[Effect], sender: PeerId | None, envelope: bytes, payload: bytes, now: float
    ) -> None:
        """Do what the core says, in order. What failed sends cause comes after it, in order too."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case Relay(peer):
                    todo += self._send(self._front, peer, None, envelope, payload, now)
                case ToApi(peer, message, body):
                    todo += self._send(self._front, peer, message, encode(message), body, now)
                case ToWorker(peer, message, body):
                    todo += self._send(self._back, peer, message, encode(message), body, now)
                case Answer(message, body):
                    assert sender is not None
                    for socket in self._sockets_of(sender):
                        todo += self._send(socket, sender, message, encode(message), body, now)
                case ToPool(message):
                    for record in self._switchboard.roster.of_role("pool"):
                        todo += self._send(self._back, record.id, message, encode(message), b"", now)
                case Hangup(peer, reason):
                    self._hang_up(peer, reason)
                case Note(words, fields):
                    logs.event(words, logging.INFO, **fields)

    def _sockets_of(self, peer: PeerId) -> list[zmq.Socket]:
        record = self._switchboard.roster.peers.get(peer)
        if record is None:
            return []
        return [self._front if record.role in ("api", "command") else self._back]

    def _send(
        self, socket: zmq.Socket, peer: PeerId, message: Message | None, envelope: bytes, payload: bytes, now: float
    ) -> list[Effect]:
        try:
            sockets.send(socket, [peer, envelope, payload])
        except (sockets.WouldBlock, sockets.Unreachable):
            # Either errno means the same here: the peer gets nothing any more, so it is lost.
            return self._switchboard.undeliverable(peer, message if isinstance(message, Dispatch) else None, now)
        return []

    def _hang_up(self, peer: PeerId, reason: str) -> None:
        frames = [peer, encode(refusal(reason)), b""]
        for socket in (self._front, self._back):
            try:
                sockets.send(socket, frames)
            except (sockets.WouldBlock, sockets.Unreachable):
                continue  # not on this socket, or gone: there is nobody to tell

    def _heartbeat(self, now: float) -> None:
        # To everybody, unasked: it costs nothing, and the failing send is how a killed peer is noticed within a second.
        for record in list(self._switchboard.roster.peers.values()):
            for socket in self._sockets_of(record.id):
                effects = self._send(socket, record.id, None, self._encoded_heartbeat, b"", now)
                self._carry_out(effects, None, b"", b"", now)

    def _close(self) -> None:
        for record in list(self._switchboard.roster.peers.values()):
            self._hang_up(record.id, "the broker ends")
        # Long enough for the farewells to leave; a peer that does not take them notices the silence.
        self._front.close(200)
        self._back.close(200)
        os.close(self._bell_read)
        os.close(self._bell_write)
