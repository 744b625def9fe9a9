"""Which workers are over their share for too long."""

from broker.overgrown import FORGIVEN_S, Overgrown
from common.ids import PeerId

A, B = PeerId(b"a"), PeerId(b"b")
OVER = {"active": 90, "cache": 20, "peak": 200, "budget": 100}
INSIDE = {"active": 80, "cache": 20, "peak": 200, "budget": 100}


def test_only_what_lasts_counts() -> None:
    core = Overgrown(30.0)
    core.reported(A, OVER, 0.0)
    core.reported(A, OVER, 29.0)
    assert not core.due(A, "m-0", 29.9)
    assert core.due(A, "m-0", 30.0) and not core.due(B, "m-1", 30.0)
    core.reported(A, INSIDE, 31.0)
    assert not core.due(A, "m-0", 31.0)
    core.reported(A, OVER, 32.0)
    assert not core.due(A, "m-0", 61.0) and core.due(A, "m-0", 62.0)


def test_a_worker_without_a_known_share_is_never_over_it() -> None:
    core = Overgrown(30.0)
    for memory in ({}, {"active": 10**12}, {"active": 10**12, "budget": 0}):
        core.reported(A, memory, 0.0)
        assert not core.due(A, "m-0", 1000.0)


def test_a_session_that_ended_is_forgotten() -> None:
    core = Overgrown(30.0)
    core.reported(A, OVER, 0.0)
    core.left(A)
    assert not core.due(A, "m-0", 100.0)


def test_who_was_replaced_lately_gets_twice_as_long_each_time() -> None:
    core = Overgrown(30.0)
    for times, now in ((0, 0.0), (1, 1000.0), (2, 2000.0)):
        peer = PeerId(bytes([times]))
        core.reported(peer, OVER, now)
        wait = 30.0 * 2**times
        assert not core.due(peer, "m-0", now + wait - 1) and core.due(peer, "m-0", now + wait)
        assert core.due(peer, "m-1", now + 30.0)
        core.replaced("m-0", now + wait)
    late = 2000.0 + 120.0 + FORGIVEN_S
    core.reported(A, OVER, late)
    assert core.due(A, "m-0", late + 30.0)
