"""The API's session on the event loop: what it watches, and what it must not."""

import asyncio
import fcntl
import os
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


def connection_with(number: int) -> tuple[socket.socket, socket.socket] | None:
    """A connection whose near end has this descriptor, which zmq frees in a thread of its own; None if it stays taken.

    Something else may have got the number first: a thread of zmq opens sockets when it likes.
    """
    near, far = socket.socketpair()
    deadline = time.monotonic() + 2
    with near:
        while time.monotonic() < deadline:
            # The lowest free one from this on.
            got = fcntl.fcntl(near.fileno(), fcntl.F_DUPFD_CLOEXEC, number)
            if got == number:
                return socket.socket(fileno=got), far
            os.close(got)
            time.sleep(0.001)
    far.close()
    return None


def test_a_connection_that_gets_a_lost_sessions_descriptor_is_heard(endpoint: str) -> None:
    def lose(link: BrokerLink) -> tuple[socket.socket, socket.socket] | None:
        peer = link._peer
        assert peer is not None
        number = peer.fileno()
        # As a send does that the broker does not take; the link hears of it in its next turn.
        peer._pending += peer._carry_out(peer._session.end("the broker takes no more"))
        return connection_with(number)

    async def work() -> bytes:
        loop = asyncio.get_running_loop()
        for _ in range(5):
            link = BrokerLink(endpoint, "api-1")
            link.start()
            connection = lose(link)
            if connection is None:
                link.stop()
                continue
            near, far = connection
            heard: asyncio.Future[bytes] = loop.create_future()
            transport, _ = await loop.connect_accepted_socket(lambda: Heard(heard), near)
            link._pump()
            far.sendall(b"request")
            try:
                return await asyncio.wait_for(heard, 5)
            finally:
                transport.close()
                far.close()
                link.stop()
        raise AssertionError("none of five lost sessions' descriptors was free for a connection")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(work()) == b"request"
