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


def test_each_workers_longest_beginning_counts() -> None:
    known = Prefixes()
    known.add(prefix("sys1"), A)
    known.add(prefix("sys2"), B)
    assert known.read(prefix("sys9")) == {A: 192, B: 192}
    assert known.read(prefix("sys1more")) == {A: 256, B: 192}
    assert known.read(prefix("other")) == known.read(b"") == {}


def test_who_is_gone_is_forgotten() -> None:
    known = Prefixes()
    known.add(prefix("one"), A)
    known.add(prefix("on"), B)
    known.forget(A)
    assert known.read(prefix("one")) == {B: 128} and len(known) == 2
    known.forget(B)
    assert len(known) == 0


def test_the_table_is_bounded_and_forgets_what_was_not_used() -> None:
    known = Prefixes(most=6)
    known.add(prefix("abc"), A)
    known.add(prefix("xyz"), A)
    known.add(prefix("abc"), A)
    known.add(prefix("k"), B)
    assert len(known) == 6
    assert known.read(prefix("abc")) == {A: 192} and known.read(prefix("k")) == {B: 64}
    assert known.read(prefix("xy")) == {A: 128} and known.read(prefix("x")) == {}


def worker(peer: PeerId, taken: int, slots: int = 8) -> Worker:
    made = Worker(peer, peer.decode(), WorkerFacts("m", "f", slots, 10_000, 1, 1000, ["batched"], []))
    made.leases = {RequestId(b"%d" % n): Lease(1, 10) for n in range(taken)}
    return made


def test_a_reader_is_preferred_while_what_it_has_read_is_worth_its_rows() -> None:
    request = Request(RequestId(b"r"), PeerId(b"api"), "", "m", 0, "", 1.0, 0.0)

    def chosen(*taken: int, read: dict[PeerId, int]) -> PeerId:
        workers = [worker(peer, count) for peer, count in zip((A, B, C), taken, strict=False)]
        found = policy.choose_worker(workers, request, read)
        assert found is not None
        return found.peer

    row = policy.ROW_TOKENS
    assert chosen(1, 0, read={}) == chosen(1, 0, read={C: 5000}) == B
    assert chosen(0, 0, read={B: 64}) == chosen(3, 3, read={B: 64}) == B
    assert chosen(1, 0, read={A: row - 64}) == B
    assert chosen(1, 0, read={A: row + 64}) == A
    assert chosen(4, 1, read={A: 3 * row + 64}) == A
    assert chosen(5, 1, read={A: 3 * row + 64}) == B
    # What the idlest has read itself counts as well.
    assert chosen(2, 0, read={A: 2 * row + 64, B: 128}) == B
    assert chosen(4, 2, 3, read={A: 512, C: 512}) == C
    # Nobody waits for a reader that is full.
    assert chosen(8, 7, read={A: 100 * row}) == B
