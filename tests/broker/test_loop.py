"""The broker's shell over real sockets, in a thread: what the core decides leaves, and failed sends come back as events."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from broker.loop import Loop
from broker.settings import BrokerSettings
from broker.switchboard import Switchboard
from common import sockets
from common.client import BrokerClient, Dropped, Peer, Received, hello
from common.envelope import Dispatch, Done, Reserve, Reserved, Submit, Tokens, WorkerFacts
from common.outcomes import Outcome
from common.session import Joined

A = b"a" * 16
FACTS = WorkerFacts("m", "print", 2, 1000, 1, 500, ["batched"], [])


class Broker:
    """A broker in a thread of the test."""

    def __init__(self, folder: Path) -> None:
        self.front, self.back = f"ipc://{folder}/f", f"ipc://{folder}/b"
        self.context = sockets.context()
        self.peers: list[Peer] = []
        self.events: dict[int, list[object]] = {}
        self.start("epoch")

    def start(self, epoch: str) -> None:
        self.core = Switchboard(BrokerSettings(), epoch, time.monotonic())
        self.loop = Loop(self.context, self.front, self.back, self.core)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()

    def peer(self, role: str) -> Peer:
        endpoint = self.front if role == "api" else self.back
        peer = Peer(self.context, endpoint, hello(role, role, FACTS if role == "worker" else None))
        self.peers.append(peer)
        assert isinstance(self.next(peer), Joined)
        return peer

    def next(self, peer: Peer, timeout_s: float = 10.0) -> object:
        """The next event of a peer."""
        deadline = time.monotonic() + timeout_s
        queue = self.events.setdefault(id(peer), [])
        while not queue and time.monotonic() < deadline:
            queue += peer.pump()
            if not queue:
                peer.socket.poll(20)
        assert queue, "nothing came"
        return queue.pop(0)

    def close(self) -> None:
        for peer in self.peers:
            peer.close(0)
        if self.thread.is_alive():
            self.stop()
        # Whatever a failed test left open must not keep the others waiting.
        self.context.destroy(linger=0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    yield broker
    broker.close()


def test_a_request_and_its_pieces_cross_the_broker_untouched(broker: Broker) -> None:
    api, worker = broker.peer("api"), broker.peer("worker")
    api.send(Reserve([A], "label", "m", 0, ""))
    assert broker.next(api) == Received(Reserved(A, "print"), b"")
    api.send(Submit(A, 1, 1, b"", ""), b"\xffprompt")
    assert broker.next(worker) == Received(Dispatch(A, 1, "label"), b"\xffprompt")
    for sequence in range(1000):
        worker.send(Tokens(A, 1, sequence), b"%d" % sequence)
    worker.send(Done(A, 1, Outcome.STOP), b"summary")
    for sequence in range(1000):
        assert broker.next(api) == Received(Tokens(A, 1, sequence), b"%d" % sequence)
    assert broker.next(api) == Received(Done(A, 1, Outcome.STOP), b"summary")


def test_a_peer_that_is_gone_is_noticed_by_the_next_heartbeat(broker: Broker) -> None:
    api, worker = broker.peer("api"), broker.peer("worker")
    api.send(Reserve([A], "label", "m", 0, ""))
    broker.next(api)
    api.send(Submit(A, 1, 1, b"", ""), b"p")
    broker.next(worker)
    worker.send(Tokens(A, 1, 0), b"x")
    broker.next(api)
    worker.close(0)
    event = broker.next(api, 2.5)
    assert isinstance(event, Received) and event.message == Done(A, 1, Outcome.WORKER_LOST)


def test_a_restarted_broker_finds_peers_that_come_back_by_themselves(broker: Broker) -> None:
    api = broker.peer("api")
    broker.stop()
    assert isinstance(broker.next(api), Dropped)
    broker.start("another")
    event = broker.next(api)
    assert isinstance(event, Joined) and event.epoch == "another"


def test_junk_costs_its_sender_only(broker: Broker) -> None:
    api = broker.peer("api")
    stranger = broker.context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(broker.front)
    for frames in ([b"one"], [b"\x01junk", b""], [b"", b"", b""], [b"\x01" * 100_000, b"x"]):
        stranger.send_multipart(frames)
    assert stranger.poll(5000)
    api.send(Reserve([A], "label", "m", 0, ""))
    assert broker.next(api).message.request == A  # type: ignore[attr-defined]
    stranger.close()


def test_a_command_gets_the_snapshot(broker: Broker) -> None:
    broker.peer("worker")
    with BrokerClient(broker.front, "test") as client:
        assert client.snapshot()["workers"][0]["state"] == "ready"
        assert client.admin("drain").done
        assert client.snapshot()["draining"]
