"""A session begins with HELLO and WELCOME, and what ends it ends it once."""

from common.envelope import Heartbeat, Hello, Refused, Welcome
from common.session import HEARTBEAT_S, SILENCE_S, WELCOME_S, Joined, Lost, Send, Session

HELLO = Hello("0.1.0", "api", "api-1", 1, "host")


def live(now: float = 0.0) -> Session:
    session = Session(HELLO)
    assert session.open(now) == [Send(HELLO)]
    assert session.heard(Welcome("epoch", 1000), now) == [Joined("epoch")]
    return session


def test_a_welcome_makes_it_live() -> None:
    session = live()
    assert session.live and session.epoch == "epoch"


def test_no_welcome_in_time_ends_it() -> None:
    session = Session(HELLO)
    session.open(0.0)
    assert session.tick(WELCOME_S) == []
    assert session.tick(WELCOME_S + 0.01) == [Lost("no welcome")]
    assert session.tick(100.0) == []


def test_a_heartbeat_is_due_only_after_an_idle_interval() -> None:
    session = live()
    assert session.tick(HEARTBEAT_S - 0.01) == []
    session.sent(0.5)
    assert session.tick(HEARTBEAT_S) == []
    assert session.tick(0.5 + HEARTBEAT_S) == [Send(Heartbeat())]


def test_silence_ends_it_once() -> None:
    session = live()
    session.heard(Heartbeat(), 3.0)
    assert not any(isinstance(effect, Lost) for effect in session.tick(3.0 + SILENCE_S))
    assert session.tick(3.01 + SILENCE_S) == [Lost("silence")]
    assert session.tick(100.0) == [] and session.heard(Heartbeat(), 100.0) == []
    assert not session.live


def test_refused_ends_it_at_any_time() -> None:
    greeting = Session(HELLO)
    greeting.open(0.0)
    assert greeting.heard(Refused("version"), 0.1) == [Lost("refused: version")]
    assert live().heard(Refused("silent"), 1.0) == [Lost("refused: silent")]


def test_another_epoch_in_a_live_session_ends_it() -> None:
    session = live()
    assert session.heard(Welcome("epoch", 1000), 1.0) == []
    assert session.heard(Welcome("another", 1000), 1.0) == [Lost("welcomed twice")]


def test_the_owner_can_end_it() -> None:
    session = live()
    assert session.end("full") == [Lost("full")]
    assert session.end("full") == []
