"""The worker's I/O thread over real sockets: work comes in, frames go out, and a session's end is fenced."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common import sockets
from common.envelope import Dispatch, Done, Goodbye, Hello, Message, Refused, Report, Stop, Tokens, Welcome, WorkerFacts
from common.envelope import decode, encode
from common.outcomes import Outcome
from worker.link import Halt, Link, SessionOver, Vitals, Work

A = b"a" * 16
FACTS = WorkerFacts("m", "print", 2, 1000, 1, 500, ["batched"], [])


class FakeBroker:
    """A ROUTER that the test plays."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/b"
        self.context = sockets.context()
        self.socket = sockets.router(self.context, self.endpoint)
        self.peer = b""
        self.vitals = Vitals()
        self.link = Link(self.endpoint, "w", FACTS, self.vitals)
        self.link.start()

    def heard(self, kind: type, timeout_s: float = 10.0) -> tuple[Message, bytes]:
        """The next message of a kind; others are passed over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.socket.poll(50):
                peer, envelope, payload = self.socket.recv_multipart()
                message = decode(envelope)
                if isinstance(message, kind):
                    self.peer = peer
                    return message, payload
        raise AssertionError(f"no {kind.__name__}")

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.socket.send_multipart([self.peer, encode(message), payload])

    def welcome(self, epoch: str = "epoch") -> None:
        self.heard(Hello)
        self.say(Welcome(epoch, 1000))
        # Its first REPORT proves that the session is live.
        self.heard(Report)

    def item(self) -> object:
        return self.link.inbox.get(timeout=10)

    def close(self) -> None:
        self.link.close()
        self.context.destroy(linger=0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    broker = FakeBroker(tmp_path)
    yield broker
    broker.close()


def test_work_and_halts_come_in_and_frames_go_out_in_order(broker: FakeBroker) -> None:
    broker.welcome()
    broker.say(Dispatch(A, 1, "label"), b"prompt")
    broker.say(Stop(A, 1))
    assert broker.item() == Work(1, A, 1, "label", b"prompt")
    assert broker.item() == Halt(1, A, 1)
    broker.link.post([(1, encode(Tokens(A, 1, n)), b"%d" % n) for n in range(100)])
    broker.link.post([(1, encode(Done(A, 1, Outcome.STOP)), b"s")])
    for number in range(100):
        assert broker.heard(Tokens) == (Tokens(A, 1, number), b"%d" % number)
    assert broker.heard(Done)[1] == b"s"


def test_what_belongs_to_a_session_that_is_over_never_leaves_under_the_next(broker: FakeBroker) -> None:
    broker.welcome()
    first = broker.peer
    broker.say(Dispatch(A, 1, "label"), b"p")
    broker.item()
    broker.say(Refused("silent"))
    assert broker.item() == SessionOver(1)
    broker.link.post([(1, encode(Tokens(A, 1, 0)), b"stale")])
    broker.welcome("another")
    assert broker.peer != first
    broker.link.post([(1, encode(Tokens(A, 1, 1)), b"stale"), (2, encode(Tokens(A, 2, 0)), b"fresh")])
    assert broker.heard(Tokens) == (Tokens(A, 2, 0), b"fresh")


def test_the_report_says_how_long_a_step_has_taken(broker: FakeBroker) -> None:
    broker.vitals.running = 3
    broker.vitals.busy_since = time.monotonic() - 7.0
    broker.heard(Hello)
    broker.say(Welcome("epoch", 1000))
    report, _ = broker.heard(Report)
    assert isinstance(report, Report) and report.running == 3 and 7000 <= report.step_age_ms < 30_000


def test_it_says_goodbye_first_and_last(broker: FakeBroker) -> None:
    broker.welcome()
    broker.link.say_goodbye()
    assert broker.heard(Goodbye)[0] == Goodbye("told to end")
    broker.link.post([(1, encode(Done(A, 1, Outcome.STOP)), b"")])
    broker.link.close()
    assert broker.heard(Done) and broker.heard(Goodbye)[0] == Goodbye("done")
    assert not broker.link.is_alive()


def test_whoever_drains_says_so_again_in_a_new_session_and_says_done_only_after_it(broker: FakeBroker) -> None:
    broker.welcome()
    broker.link.say_goodbye()
    assert broker.heard(Goodbye)[0] == Goodbye("told to end")
    broker.say(Refused("silent"))
    broker.heard(Hello)
    broker.say(Welcome("another", 1000))
    assert broker.heard(Goodbye)[0] == Goodbye("told to end")
    broker.say(Refused("silent"))
    broker.heard(Hello)
    # The session begins and the thread ends in one turn, or in two: never the last word without the first.
    broker.say(Welcome("a third", 1000))
    broker.link.close()
    said = []
    while broker.socket.poll(50):
        message = decode(broker.socket.recv_multipart()[1])
        said += [message.reason] if isinstance(message, Goodbye) else []
    assert said in (["told to end", "done"], [])


def test_a_broker_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    vitals = Vitals()
    link = Link(f"ipc://{tmp_path}/none", "w", FACTS, vitals)
    link.start()
    with pytest.raises(queue.Empty):
        link.inbox.get(timeout=0.1)
    link.close()
    assert not link.is_alive()
    assert zmq.zmq_version_info()
