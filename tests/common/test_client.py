"""A peer's socket: what rings, and what has to be looked for."""

import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common import sockets
from common.client import Peer, Received, hello
from common.envelope import Heartbeat, Stop, Welcome, encode

DEADLINE_S = 10.0


class Line:
    """A peer and the ROUTER at its other end, joined."""

    def __init__(self, endpoint: str) -> None:
        self.context = sockets.context()
        self.router = sockets.router(self.context, endpoint)
        self.peer = Peer(self.context, endpoint, hello("command", "test"))
        deadline = time.monotonic() + DEADLINE_S
        while not self.router.poll(10):
            self.peer.pump()
            assert time.monotonic() < deadline
        self.id = self.router.recv_multipart()[0]
        self.say(encode(Welcome("epoch", 1000)))
        while not self.peer.live:
            self.rings()
            self.peer.pump()

    def say(self, *envelopes: bytes) -> None:
        for envelope in envelopes:
            self.router.send_multipart([self.id, envelope, b""])

    def rings(self, timeout_s: float = DEADLINE_S) -> bool:
        return bool(select.select([self.peer.fileno()], [], [], timeout_s)[0])

    def close(self) -> None:
        self.peer.close(0)
        self.router.close(0)
        self.context.term()


@pytest.fixture
def line() -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as folder:
        made = Line(f"ipc://{Path(folder) / 'front'}")
        yield made
        made.close()


def stop(number: int) -> bytes:
    return encode(Stop(number.to_bytes(16, "big"), 1))


def test_after_an_emptied_socket_there_is_no_backlog_and_what_comes_rings(line: Line) -> None:
    for number in range(200):
        assert not line.peer.pump() and not line.peer.backlog()
        line.say(stop(number))
        assert line.rings(), "a message came and nothing said so"
        found = line.peer.pump()
        while not found:
            # The descriptor may ring for the session's own sake first.
            assert line.rings()
            found = line.peer.pump()
        assert [event.message.request for event in found if isinstance(event, Received)] == [number.to_bytes(16, "big")]


def test_what_comes_while_something_is_sent_is_found_by_looking(line: Line) -> None:
    for number in range(200):
        line.say(stop(number))
        deadline = time.monotonic() + DEADLINE_S
        found: list[object] = []
        while not found:
            # A send takes in what has come, and its ring with it.
            assert line.peer.send(Heartbeat())
            if line.peer.backlog() or line.rings(0.0):
                found = [event for event in line.peer.pump() if isinstance(event, Received)]
            assert time.monotonic() < deadline
        assert len(found) == 1
    assert line.router.getsockopt(zmq.EVENTS) & zmq.POLLIN
