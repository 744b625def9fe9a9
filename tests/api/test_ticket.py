"""One request as the API sees it: every message in every state."""

import random

import pytest

from api.ticket import Ticket
from common.envelope import Done, Rejected, Reserved, Started, Tokens
from common.generation import CONTENT, Piece, Summary, pack_pieces, pack_summary
from common.ids import RequestId
from common.outcomes import Outcome

ID = RequestId(b"r" * 16)


class Wakes:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def ticket(state: str = "started") -> Ticket:
    made = Ticket(ID, Wakes(), Wakes())
    if state != "asked":
        made.reserved(Reserved(ID, "fp"))
    if state in ("submitted", "started"):
        made.submitted()
    if state == "started":
        made.started(Started(ID, 1, "batched", "w"))
    return made


def pieces(count: int = 1, text: str = "x") -> bytes:
    return pack_pieces([Piece(CONTENT, text)] * count)


def tokens(seq: int, attempt: int = 1) -> Tokens:
    return Tokens(ID, attempt, seq)


def test_the_whole_life() -> None:
    one = ticket("asked")
    one.reserved(Reserved(ID, "fp"))
    assert (one.state, one.fingerprint, one.accepted) == ("reserved", "fp", False)
    one.submitted()
    one.started(Started(ID, 1, "batched", "w"))
    assert one.accepted and (one.lane, one.worker) == ("batched", "w")
    assert not one.tokens(tokens(0), pieces(2))
    assert not one.tokens(tokens(1), pieces(1, "y"))
    one.done(Done(ID, 1, Outcome.STOP), pack_summary(Summary(5, 3, lane="serial")))
    assert (one.outcome, one.lane, one.summary.completion_tokens) == (Outcome.STOP, "serial", 3)
    assert [piece.text for piece in one.take()] == ["x", "x", "y"]
    assert one.take() == []


def test_everything_new_wakes() -> None:
    one = ticket()
    wakes = one.wake
    assert isinstance(wakes, Wakes)
    before = wakes.count
    one.tokens(tokens(0), pieces())
    one.quiet = True
    one.tokens(tokens(1), pieces())
    assert wakes.count == before + 1
    one.done(Done(ID, 1, Outcome.STOP), b"")
    assert wakes.count == before + 2


@pytest.mark.parametrize("state", ["asked", "reserved", "submitted", "started"])
def test_a_rejection_and_a_loss_end_any_state_once(state: str) -> None:
    one = ticket(state)
    one.rejected(Rejected(ID, Outcome.QUEUE_FULL, 1500))
    assert (one.outcome, one.retry_after_s) == (Outcome.QUEUE_FULL, 1.5)
    assert not one.end(Outcome.BROKER_LOST)
    assert one.outcome is Outcome.QUEUE_FULL
    other = ticket(state)
    assert other.end(Outcome.BROKER_LOST)
    other.done(Done(ID, 1, Outcome.STOP), b"")
    assert other.outcome is Outcome.BROKER_LOST


def test_no_advice_is_no_advice() -> None:
    one = ticket("asked")
    one.rejected(Rejected(ID, Outcome.NO_WORKER, 0))
    assert one.retry_after_s is None


@pytest.mark.parametrize("seq", [1, 2, 10])
def test_a_gap_breaks_the_stream(seq: int) -> None:
    one = ticket()
    assert one.tokens(tokens(seq), pieces())
    assert one.outcome is Outcome.STREAM_BROKEN
    assert not one.tokens(tokens(seq + 1), pieces())


def test_a_repeated_sequence_breaks_the_stream() -> None:
    one = ticket()
    one.tokens(tokens(0), pieces())
    assert one.tokens(tokens(0), pieces())
    assert one.outcome is Outcome.STREAM_BROKEN


def test_a_payload_that_is_no_pieces_breaks_the_stream() -> None:
    for payload in (b"", b"\xc1", b"\x93", pieces()[:-1], b"\x91\x92\xa1x\xa1x", b"\x91\x92\x00\xa1\xff"):
        one = ticket()
        assert one.tokens(tokens(0), payload)
        assert one.outcome is Outcome.STREAM_BROKEN
    one = ticket()
    one.done(Done(ID, 1, Outcome.STOP), b"\xc1")
    assert one.outcome is Outcome.STREAM_BROKEN


def test_a_second_start_is_idempotent_and_a_new_attempt_replaces_the_old() -> None:
    one = ticket()
    one.started(Started(ID, 1, "batched", "w"))
    one.started(Started(ID, 2, "serial", "w2"))
    assert (one.attempt, one.lane, one.worker) == (2, "serial", "w2")
    assert not one.tokens(tokens(0, attempt=1), pieces()), "the dead attempt's pieces are dropped"
    assert one.pieces == [] and one.outcome is None
    one.started(Started(ID, 1, "batched", "w"))
    assert one.worker == "w2"
    assert not one.tokens(tokens(0, attempt=2), pieces())
    one.done(Done(ID, 1, Outcome.ENGINE_FAILED), b"")
    assert one.outcome is None
    one.done(Done(ID, 2, Outcome.STOP), b"")
    assert one.outcome is Outcome.STOP


def test_an_attempt_after_the_first_pieces_is_not_followed() -> None:
    one = ticket()
    one.tokens(tokens(0), pieces())
    one.started(Started(ID, 2, "batched", "w2"))
    assert (one.attempt, one.worker) == (1, "w")
    assert one.tokens(tokens(0, attempt=2), pieces())
    assert one.outcome is Outcome.STREAM_BROKEN


def test_the_brokers_own_end_has_no_attempt() -> None:
    one = ticket()
    one.done(Done(ID, 0, Outcome.REQUEST_TIMEOUT), b"")
    assert one.outcome is Outcome.REQUEST_TIMEOUT and one.summary == Summary()


def test_pieces_before_the_start_are_dropped() -> None:
    one = ticket("submitted")
    assert not one.tokens(tokens(0), pieces())
    assert one.pieces == [] and one.outcome is None


def test_a_full_buffer_ends_the_stream_with_what_it_holds() -> None:
    one = ticket()
    one.bound = 64
    for seq in range(64):
        assert not one.tokens(tokens(seq), pieces(text=str(seq)))
    assert one.tokens(tokens(64), pieces())
    assert (one.outcome, one.overflowed) == (Outcome.CANCELLED, True)
    assert [piece.text for piece in one.take()] == [str(seq) for seq in range(64)]


def test_the_bound_grows_with_the_block() -> None:
    one = ticket()
    one.bound = 64
    assert not one.tokens(tokens(0), pieces(50))
    assert not one.tokens(tokens(1), pieces(50))
    assert not one.tokens(tokens(2), pieces(1))
    assert one.tokens(tokens(3), pieces(1)), "two blocks and one piece are 101"
    assert len(one.pieces) == 101


def test_without_a_bound_nothing_overflows() -> None:
    one = ticket()
    for seq in range(5000):
        assert not one.tokens(tokens(seq), pieces())
    assert len(one.take(64)) == 64 and len(one.take()) == 4936


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_messages_gives_one_outcome_and_a_prefix(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        one = ticket("asked")
        one.bound = chance.choice([0, 64])
        taken: list[Piece] = []
        outcome = None
        seqs: list[str] = []
        for _ in range(chance.randrange(60)):
            match chance.randrange(9):
                case 0:
                    one.reserved(Reserved(ID, ""))
                case 1 if one.state == "reserved":
                    one.submitted()
                case 2:
                    one.started(Started(ID, chance.randrange(1, 3), "l", "w"))
                case 3:
                    taken += one.take(chance.randrange(1, 5))
                case 4 if chance.random() < 0.1:
                    one.done(Done(ID, chance.randrange(3), chance.choice(list(Outcome))), b"")
                case 5 if chance.random() < 0.1:
                    one.end(Outcome.BROKER_LOST)
                case _:
                    seq = one.next_seq if chance.random() < 0.97 else chance.randrange(10)
                    before = len(one.pieces)
                    one.tokens(Tokens(ID, one.attempt or 1, seq), pieces(text=str(seq)))
                    if len(one.pieces) > before:
                        seqs.append(str(seq))
            assert outcome is None or one.outcome is outcome
            outcome = one.outcome
            assert (one.state == "ended") == (outcome is not None)
        got = [piece.text for piece in taken + one.take()]
        assert got == seqs == [str(n) for n in range(len(seqs))]
