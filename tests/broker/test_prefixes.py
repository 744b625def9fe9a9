"""Which worker has read what, and what the choice of a worker makes of it."""

from broker import policy
from broker.prefixes import Prefixes
from broker.records import Lease, Request, Worker
from common.envelope import WorkerFacts
from common.ids import PeerId, RequestId

A, B, C = PeerId(b"a"), PeerId(b"b"), PeerId(b"c")


def prefix(text: str) -> bytes:
    """One hash for each letter."""
    return b"".join(text[: n + 1].encode().ljust(8, b"-") for n in range(len(text)))


def test_the_longest_beginning_that_anybody_knows_counts() -> None:
    known = Prefixes()
    known.given(prefix("sys1"), A)
    known.given(prefix("sys2"), B)
    assert set(known.holders(prefix("sys9"))) == {A, B}
    assert set(known.holders(prefix("sys1more"))) == {A}
    assert not known.holders(prefix("other")) and not known.holders(b"")


def test_who_is_gone_is_forgotten() -> None:
    known = Prefixes()
    known.given(prefix("one"), A)
    known.given(prefix("on"), B)
    known.forget(A)
    assert set(known.holders(prefix("one"))) == {B} and len(known) == 2
    known.forget(B)
    assert len(known) == 0


def test_the_table_is_bounded_and_forgets_what_was_not_used() -> None:
    known = Prefixes(most=6)
    known.given(prefix("abc"), A)
    known.given(prefix("xyz"), A)
    known.given(prefix("abc"), A)
    known.given(prefix("k"), B)
    assert len(known) == 6
    assert known.holders(prefix("abc")) and known.holders(prefix("k"))
    assert known.holders(b"xyz-----") and not known.holders(b"x-------")


def worker(peer: PeerId, taken: int, slots: int = 8) -> Worker:
    made = Worker(peer, peer.decode(), WorkerFacts("m", "f", slots, 10_000, 1, 1000, ["batched"], []))
    made.leases = {RequestId(b"%d" % n): Lease(1, 10) for n in range(taken)}
    return made


def test_a_reader_is_preferred_until_it_is_too_busy() -> None:
    request = Request(RequestId(b"r"), PeerId(b"api"), "", "m", 0, "", 1.0, 0.0)

    def chosen(*taken: int, readers: tuple[PeerId, ...]) -> PeerId:
        workers = [worker(peer, count) for peer, count in zip((A, B, C), taken, strict=False)]
        found = policy.choose_worker(workers, request, readers)
        assert found is not None
        return found.peer

    assert chosen(1, 0, readers=(A,)) == A
    assert chosen(2, 0, readers=(A,)) == B
    assert chosen(3, 1, readers=(A,)) == A
    assert chosen(4, 1, readers=(A,)) == B
    assert chosen(4, 2, 3, readers=(A, C)) == C
    assert chosen(8, 7, readers=(A,)) == B
    assert chosen(1, 0, readers=()) == chosen(1, 0, readers=(C,)) == B
