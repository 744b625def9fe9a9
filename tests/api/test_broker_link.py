"""The API's session on the event loop: what it watches, and what it must not."""

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from api.broker_link import BrokerLink


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as folder:
        yield f"ipc://{Path(folder) / 'front'}"


class Heard(asyncio.Protocol):
    def __init__(self, data: "asyncio.Future[bytes]") -> None:
        self.data = data

    def data_received(self, data: bytes) -> None:
        self.data.set_result(data)


def pair_with(number: int) -> tuple[socket.socket, socket.socket, list[socket.socket]]:
    """A connection one of whose ends has this descriptor, which zmq frees in a thread of its own; and others."""
    others: list[socket.socket] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        near, far = socket.socketpair()
        if near.fileno() == number:
            return near, far, others
        if far.fileno() == number:
            return far, near, others
        others += [near, far]
        if len(others) > 200:
            for one in others:
                one.close()
            others.clear()
            time.sleep(0.01)
    raise AssertionError(f"descriptor {number} stays taken")


def test_a_connection_that_gets_a_lost_sessions_descriptor_is_heard(endpoint: str) -> None:
    async def work() -> bytes:
        link = BrokerLink(endpoint, "api-1")
        link.start()
        peer = link._peer
        assert peer is not None
        number = peer.fileno()
        # As a send does that the broker does not take; the link hears of it in its next turn.
        peer._pending += peer._carry_out(peer._session.end("the broker takes no more"))
        loop = asyncio.get_running_loop()
        near, far, others = pair_with(number)
        heard: asyncio.Future[bytes] = loop.create_future()
        transport, _ = await loop.connect_accepted_socket(lambda: Heard(heard), near)
        link._pump()
        far.sendall(b"request")
        try:
            return await asyncio.wait_for(heard, 5)
        finally:
            transport.close()
            for one in (far, *others):
                one.close()
            link.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(work()) == b"request"
