"""One request in a worker: pieces, usage and finish."""

from common.generation import CONTENT, GenerationRequest, Piece, TokenLogprob
from common.ids import RequestId
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Prefilled
from worker.running import Running

ID = RequestId(b"r" * 16)


def running(stop: list[str] | None = None, max_tokens: int = 10) -> Running:
    return Running(ID, 1, "label", GenerationRequest([1, 2, 3], max_tokens, stop=stop or []), "batched", 0.0)


def texts(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_plain_reply_is_its_tokens() -> None:
    one = running()
    one.prefilled(Prefilled(ID, 3, 3, cached=2), 0.2)
    assert one.committed(Committed(ID, 5, "Hel"), 0.5) == [Piece(CONTENT, "Hel")]
    assert one.committed(Committed(ID, 6, ""), 0.6) == []
    pieces, finish = one.ended(Ended(ID, "stop", "lo"), 1.0)
    assert texts(pieces) == "lo"
    assert finish.outcome is Outcome.STOP
    summary = finish.summary
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (3, 2, 2)
    assert (summary.first_token_ms, summary.decode_ms, summary.lane) == (500.0, 500.0, "batched")


def test_the_cap_is_length() -> None:
    one = running()
    one.committed(Committed(ID, 5, "x"), 0.1)
    assert one.ended(Ended(ID, "length"), 0.2)[1].outcome is Outcome.LENGTH


def test_a_stop_string_halts_on_the_token_that_completes_it() -> None:
    one = running(["END"])
    assert texts(one.committed(Committed(ID, 1, "a E"), 0.1)) == "a "
    assert not one.halted
    assert one.committed(Committed(ID, 2, "ND b"), 0.2) == []
    assert one.halted
    pieces, finish = one.finish(Outcome.STOP, 0.3)
    assert (pieces, finish.summary.completion_tokens) == ([], 2)


def test_a_stop_string_completed_by_the_last_flush_counts() -> None:
    one = running(["END"])
    one.committed(Committed(ID, 1, "aEN"), 0.1)
    pieces, finish = one.ended(Ended(ID, "length", "D"), 0.2)
    assert texts(pieces) == "" and finish.outcome is Outcome.STOP


def test_held_text_that_was_no_stop_comes_out_at_the_end() -> None:
    one = running(["END"])
    one.committed(Committed(ID, 1, "aEN"), 0.1)
    pieces, finish = one.ended(Ended(ID, "length", ""), 0.2)
    assert texts(pieces) == "EN" and finish.outcome is Outcome.LENGTH


def test_a_failed_row_keeps_its_usage_and_names_the_error() -> None:
    one = running()
    one.committed(Committed(ID, 1, "a"), 0.1)
    _, finish = one.ended(Ended(ID, "failed", error="ValueError"), 0.2)
    assert finish.outcome is Outcome.ENGINE_FAILED
    assert (finish.summary.error, finish.summary.completion_tokens) == ("ValueError", 1)


def test_logprobs_leave_with_their_text() -> None:
    def logprob(token: str) -> TokenLogprob:
        return TokenLogprob(token, -1.0, list(token.encode()))

    one = running(["END"])
    first = one.committed(Committed(ID, 1, "aE", logprob("aE")), 0.1)
    assert first == [Piece(CONTENT, "a")]
    second = one.committed(Committed(ID, 2, "x", logprob("x")), 0.2)
    assert second == [Piece(CONTENT, "Ex", [logprob("aE"), logprob("x")])]
    one.committed(Committed(ID, 3, "END", logprob("END")), 0.3)
    assert one.halted
