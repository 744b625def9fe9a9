"""One request in a worker: pieces, usage and finish."""

import json

import pytest

from common.generation import CONTENT, REASONING, TOOL_CALL, GenerationRequest, Piece, TokenLogprob
from common.ids import RequestId
from common.outcomes import Outcome
from worker.engine import Committed, Ended, Markup, Prefilled
from worker.running import Running

ID = RequestId(b"r" * 16)
MARKUP = Markup("<t>", "</t>", "[c]", "[/c]", parse=lambda text, tools: json.loads(text))
TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
CALL = '[c]{"name": "f", "arguments": {}}[/c]'


def running(
    stop: list[str] | None = None, max_tokens: int = 10, lane: str = "batched", **fields: object
) -> Running:
    request = GenerationRequest([1, 2, 3], max_tokens, stop=stop or [], **fields)  # type: ignore[arg-type]
    return Running(ID, 1, "label", request, lane, 0.0, MARKUP)


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


# --- Finish reason ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "own", "outcome"),
    [
        ("x", "length", Outcome.LENGTH),
        ("x", "stop", Outcome.STOP),
        ("xEND", "length", Outcome.STOP),
        (CALL, "length", Outcome.TOOL_CALLS),
        (CALL, "stop", Outcome.TOOL_CALLS),
        (f"{CALL}END", "length", Outcome.TOOL_CALLS),
        (CALL.removesuffix("[/c]"), "length", Outcome.TOOL_CALLS),
        ("[c]{", "length", Outcome.LENGTH),
        ("<t>x", "length", Outcome.LENGTH),
        (CALL, "failed", Outcome.ENGINE_FAILED),
    ],
)
def test_calls_come_before_a_stop_and_that_before_the_engines_reason(text: str, own: str, outcome: Outcome) -> None:
    one = running(["END"], tools=TOOLS)
    one.committed(Committed(ID, 1, text), 0.1)
    assert one.ended(Ended(ID, own), 0.2)[1].outcome is outcome


def test_a_call_counts_when_a_stop_string_halts_the_engine() -> None:
    one = running(["END"], tools=TOOLS)
    pieces = one.committed(Committed(ID, 1, f"{CALL}END"), 0.1)
    assert one.halted and [piece.name for piece in pieces] == ["f"]
    assert one.finish(Outcome.STOP, 0.2)[1].outcome is Outcome.TOOL_CALLS


def test_an_end_from_outside_is_never_a_call() -> None:
    one = running(tools=TOOLS)
    one.committed(Committed(ID, 1, CALL), 0.1)
    assert one.finish(Outcome.CANCELLED, 0.2)[1].outcome is Outcome.CANCELLED


# --- Usage ------------------------------------------------------------------------------------------------------------


def test_usage_is_live_and_counts_what_is_not_shown() -> None:
    one = running()
    assert (one.usage.prompt, one.usage.completion) == (3, 0)
    said = []
    for count, text in enumerate(["<t>", "wh", "", "y", "</t>", "", "so"], 1):
        said += one.committed(Committed(ID, 0, text), 0.1)
        assert one.usage.completion == count
    assert [(piece.channel, piece.text) for piece in said] == [(REASONING, "wh"), (REASONING, "y"), (CONTENT, "so")]
    summary = one.finish(Outcome.ENGINE_FAILED, 0.2, "KeyError")[1].summary
    assert (summary.completion_tokens, summary.reasoning_tokens, summary.error) == (7, 3, "KeyError")


def test_what_was_held_back_is_delivered_with_every_end() -> None:
    for outcome in (Outcome.ENGINE_FAILED, Outcome.SHUTDOWN, Outcome.CANCELLED):
        one = running(["END"])
        one.committed(Committed(ID, 0, "aEN"), 0.1)
        pieces, finish = one.finish(outcome, 0.2)
        assert (texts(pieces), finish.outcome) == ("EN", outcome)


def test_the_last_prompt_token_is_never_cached() -> None:
    for cached, counted in ((0, 0), (2, 2), (3, 2)):
        one = running()
        one.prefilled(Prefilled(ID, 3, 3, cached), 0.1)
        assert one.finish(Outcome.STOP, 0.2)[1].summary.cached_tokens == counted


def test_the_lane_is_corrected_by_what_ran() -> None:
    for accepted, rejected, lane in ((0, 0, "serial"), (2, 1, "serial+spec")):
        one = running(lane="serial+spec")
        one.committed(Committed(ID, 0, "a"), 0.1)
        assert one.lane == "serial+spec"
        summary = one.ended(Ended(ID, "stop", "", "", accepted, rejected), 0.2)[1].summary
        assert summary.lane == lane
        assert (summary.accepted_draft_tokens, summary.rejected_draft_tokens) == (accepted, rejected)
    one = running(lane="serial+spec")
    one.committed(Committed(ID, 0, "a", from_draft=True), 0.1)
    summary = one.finish(Outcome.CANCELLED, 0.2)[1].summary
    assert (summary.lane, summary.accepted_draft_tokens) == ("serial+spec", 1)


def test_a_call_leaves_as_a_named_piece() -> None:
    one = running(tools=TOOLS)
    pieces = one.committed(Committed(ID, 0, f"a{CALL}"), 0.1)
    assert pieces == [Piece(CONTENT, "a"), Piece(TOOL_CALL, "{}", [], 0, "f")]


def test_drafts_are_counted_as_they_come_and_by_the_engines_own_count() -> None:
    one = running(lane="serial+spec")
    one.committed(Committed(ID, 5, "a", from_draft=True), 0.1)
    one.committed(Committed(ID, 6, "b", rejected_drafts=2), 0.1)
    cut = running(lane="serial+spec")
    cut.committed(Committed(ID, 6, "b", rejected_drafts=2), 0.1)
    summary = one.ended(Ended(ID, "stop", accepted_draft_tokens=1, rejected_draft_tokens=3), 0.2)[1].summary
    assert (summary.accepted_draft_tokens, summary.rejected_draft_tokens, summary.lane) == (1, 3, "serial+spec")
    assert cut.finish(Outcome.CANCELLED, 0.2)[1].summary.rejected_draft_tokens == 2


def test_the_trace_says_why_this_lane_where_there_was_a_choice() -> None:
    request = GenerationRequest([1, 2, 3], 5)
    for reasons, mark in ((("batched: taken",), "taken"), (("serial+spec: busy", "batched: taken"), "taken (serial+spec: busy; batched: taken)")):
        one = Running(ID, 1, "label", request, "batched", 0.0, MARKUP, reasons)
        assert one.finish(Outcome.STOP, 0.1)[1].summary.marks[0] == (mark, 0.0)
