"""What the client gets of a model's tokens: every stage together, at every cut."""

import json
import random
import time
from dataclasses import replace

import pytest

from common.errors import ProtocolError
from common.generation import CONTENT, REASONING, TOOL_CALL, GenerationRequest, Piece, TokenLogprob
from tests.worker.cutting import cuts, random_cut
from worker.call_syntax import SYNTAXES
from worker.engine import Markup
from worker.router import MOST, Router
from worker.sink import Sink
from worker.tool_calls import TAGGED_JSON

TOOLS = json.dumps({"tools": [{"type": "function", "function": {"name": "f"}}], "choice": "auto", "parallel": True})
ONE_CALL = TOOLS.replace('"parallel": true', '"parallel": false')
MARKUP = Markup("<t>", "</t>", "[c]", "[/c]", parse=lambda text, tools: json.loads(text), form=TAGGED_JSON)
CALL = '[c]{"name": "f", "arguments": {"a": 1}}[/c]'
# One letter in the reply each, so that whole calls can be cut at every place.
F, OTHER = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}'


class Said:
    """A reply: its pieces, and what they come to."""

    def __init__(self, pieces: list[Piece], sink: Sink) -> None:
        self.pieces = pieces
        self.sink = sink
        for piece in pieces:
            assert piece.text or piece.name or piece.logprobs, "an empty piece"

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.channel == CONTENT)

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.channel == REASONING)

    @property
    def calls(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for piece in self.pieces:
            if piece.channel == TOOL_CALL:
                if piece.call == len(found):
                    assert piece.name
                    found.append((piece.name, piece.text))
                else:
                    assert piece.call == len(found) - 1 and not piece.name
                    found[-1] = found[-1][0], found[-1][1] + piece.text
        return found

    @property
    def order(self) -> list[tuple[int, str]]:
        """Channels and texts in the order in which they left, neighbours joined."""
        joined: list[tuple[int, str]] = []
        for piece in self.pieces:
            text = f"{piece.name}{piece.text}"
            if joined and joined[-1][0] == piece.channel and not piece.name:
                text = joined.pop()[1] + text
            joined.append((piece.channel, text))
        return joined


def say(pieces: list[str], markup: Markup | None = MARKUP, last: str = "", **fields: object) -> Said:
    sink = Sink(GenerationRequest([1], 100, **fields), markup)  # type: ignore[arg-type]
    said: list[Piece] = []
    for token, text in enumerate(pieces, 1000):
        said += sink.feed(token, text)
        if sink.halted:
            break
    return Said([*said, *sink.finish(last)], sink)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("hello\n", "", "hello\n", []),
        ("<t>hm</t>hello", "hm", "hello", []),
        ("<t>a</t>b<t>c", "ac", "b", []),
        (f"so [c]{F}[/c]\n", "", "so \n", [("f", "{}")]),
        (f"<t>é</t>[c]{F}[/c][c]{OTHER}[/c]👍", "é", "👍", [("f", "{}"), ("g", "{}")]),
        ("[c]{no}[/c] <t>x</t>", "x", "[c]{no}[/c] ", []),
        ("[c] is a mark<t>x</t>", "x", "[c] is a mark", []),
        (f"<t>a[c]{F}[/c]b", "ab", "", [("f", "{}")]),
        ("<t>use [c]{</t>b", "use [c]{", "b", []),
        ('[c]{"name": "f", "arguments": {"a": "<t>[c]"}}[/c]', "", "", [("f", '{"a": "<t>[c]"}')]),
        (f"[c]{F}", "", "", [("f", "{}")]),
        ("[c]{", "", "[c]{", []),
        ("a <", "", "a <", []),
    ],
)
def test_every_channel_gets_its_text_at_every_cut(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = say([text], tools=TOOLS)
    assert (whole.reasoning, whole.content, whole.calls) == (reasoning, content, calls)
    for pieces in cuts(text, 9):
        said = say(pieces, tools=TOOLS)
        assert said.order == whole.order, pieces


def test_without_markup_without_tools_and_for_raw_text_nothing_is_changed() -> None:
    text = f"<t>a</t>{CALL}"
    assert say(list(text), None, tools=TOOLS, reasoning_open=True).content == text
    assert say(list(text), raw=True).content == text
    assert say(list(text)).content == CALL


def test_in_an_answer_under_a_grammar_markers_are_only_strings() -> None:
    answer = '{"a": "<t>b</t> [c]f{}[/c] END"}'
    for before, fields in (
        ("", {}), ("", {"thinking": True}), ("<t>hm</t>", {"thinking": True}), ("hm</t>", {"reasoning_open": True}),
    ):  # fmt: skip
        for pieces in (*cuts(before + answer, 9), [before + answer], list(before + answer)):
            said = say(pieces, grammar="{}", tools=TOOLS, **fields)
            assert (said.reasoning, said.content) == ("hm" if before else "", answer), (pieces, fields)
        said = say(list(before + answer), grammar="{}", stop=["END"], **fields)
        assert (said.reasoning, said.content) == ("hm" if before else "", answer[: answer.index("END")])


def test_a_call_in_the_place_of_an_answer_is_a_call() -> None:
    able = replace(MARKUP, syntax=SYNTAXES["json_tools"])
    assert say([CALL], able, grammar="{}", tools=TOOLS).calls == [("f", '{"a": 1}')]
    assert say([CALL], grammar="{}", tools=TOOLS).content == CALL
    forced = TOOLS.replace('"auto"', '"required"')
    assert say([CALL], grammar="lark:start: x", tools=forced).calls == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("one END two", {}, [(CONTENT, "one ")]),
        ("<t>an END</t>x END y", {}, [(REASONING, "an END"), (CONTENT, "x ")]),
        ("<t>an END</t>x", {"stop_in_reasoning": True}, [(REASONING, "an ")]),
        (f"[c]{F}END[/c] x", {}, [(TOOL_CALL, "f{}")]),
        (f"[c]{OTHER}END[/c] x", {}, [(TOOL_CALL, "g{}")]),
        (f"[c]{F}[/c] x END", {}, [(TOOL_CALL, "f{}"), (CONTENT, " x ")]),
        ("a[c]{END", {}, [(CONTENT, "a[c]{")]),
        ("aEN", {}, [(CONTENT, "aEN")]),
    ],
)
def test_stop_strings_end_the_reply_and_keep_what_came_before(
    text: str, fields: dict[str, object], expected: list[tuple[int, str]]
) -> None:
    for pieces in cuts(text, 9):
        said = say(pieces, stop=["END"], tools=TOOLS, **fields)
        assert said.order == expected and said.sink.stopped == ("END" in text), pieces


def test_a_stop_string_that_the_last_flush_completes_counts() -> None:
    said = say(["aEN"], stop=["END"], last="D")
    assert said.content == "a" and said.sink.stopped


def test_the_engine_is_halted_on_the_token_that_completes_a_stop_string() -> None:
    sink = Sink(GenerationRequest([1], 9, stop=["END"]), MARKUP)
    assert sink.feed(1, "aEN") == [Piece(CONTENT, "a")] and not sink.halted
    assert sink.feed(2, "Db") == [] and sink.halted
    assert sink.feed(3, "c") == [] and sink.finish("d") == []


def test_one_call_is_enough_for_who_wants_no_parallel_ones() -> None:
    for pieces in cuts(f"a[c]{F}[/c][c]{F}[/c]", 9):
        said = say(pieces, tools=ONE_CALL)
        assert said.order == [(CONTENT, "a"), (TOOL_CALL, "f{}")] and said.sink.halted and said.sink.called


def test_only_whole_calls_make_a_reply_a_call() -> None:
    assert say([CALL], tools=TOOLS).sink.called
    assert not say(["[c]{no}[/c]"], tools=TOOLS).sink.called
    cut = say([CALL[:-6]], tools=TOOLS)
    assert cut.calls == [("f", '{"a": 1')] and not cut.sink.called


def test_tools_that_are_none_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Sink(GenerationRequest([1], 9, tools="{"), MARKUP)


# --- Special tokens ---------------------------------------------------------------------------------------------------


def test_special_tokens_make_markers_and_are_never_text() -> None:
    router = Router({1: "<|ch|>", 2: "<|end|>", 3: "<|call|>", 4: "<|q|>"})
    markup = Markup(
        "<|ch|>th", "<|end|>", "<|call|>", "<|end|>",
        parse=lambda text, tools: json.loads(text.replace("<|q|>", '"')), router=router,
    )  # fmt: skip

    def told(*tokens: int | str) -> Said:
        sink = Sink(GenerationRequest([1], 99, tools=TOOLS), markup)
        pieces: list[Piece] = []
        for one in tokens:
            pieces += sink.feed(one, "") if isinstance(one, int) else sink.feed(99, one)
        return Said([*pieces, *sink.finish()], sink)

    assert told(1, "th", "why", 2, "so").order == [(REASONING, "why"), (CONTENT, "so")]
    assert told("a", 4, "b", 2, 9, 1, "tx").order == [(CONTENT, "abtx")]
    assert told(3, '{"name":', 4, "f", 4, "}", 2, "x").order == [(TOOL_CALL, "f{}"), (CONTENT, "x")]
    assert told(3, 4, 2, "x").order == [(CONTENT, "<|call|><|q|><|end|>x")]
    assert told("<|ch|>", "thwhy<|end|>so").order == [(REASONING, "why"), (CONTENT, "so")]


def test_a_router_knows_the_longest_token_and_has_a_limit() -> None:
    router = Router({1: "<a>", 2: "<a>b"})
    assert router.forms("x<a>bc") == ["x<a>bc", f"x{router.written(2)}c"]
    assert router.forms("x") == ["x"] and router.written(5) == ""
    Router(dict.fromkeys(range(MOST), "x"))
    with pytest.raises(AssertionError):
        Router(dict.fromkeys(range(MOST + 1), "x"))


# --- Tokens and logprobs ----------------------------------------------------------------------------------------------


def with_logprobs(tokens: list[str], **fields: object) -> tuple[list[Piece], Sink]:
    sink = Sink(GenerationRequest([1], 99, **fields), MARKUP)  # type: ignore[arg-type]
    pieces = [piece for text in tokens for piece in sink.feed(0, text, TokenLogprob(text, -1.0, list(text.encode())))]
    return [*pieces, *sink.finish()], sink


@pytest.mark.parametrize(
    ("tokens", "shown", "reasoning_tokens"),
    [
        (["a", "b"], ["a", "b"], 0),
        (["<t>", "w", "hy", "</t>", "so"], ["so"], 2),
        (["<", "t", ">", "x", "</", "t>y"], ["t>y"], 1),
        (["<t>x</t>", "y"], ["y"], 1),
        (["a<t>", "b"], ["a<t>"], 1),
        (["a", CALL, "b"], ["a", "b"], 0),
        (["[c]", "{no}", "[/c]"], ["[c]", "{no}", "[/c]"], 0),
        (["", "é"], ["", "é"], 0),
        (["<t>", "", "é", "</t>", "x"], ["x"], 2),
        (["x", ""], ["x", ""], 0),
    ],
)
def test_logprobs_are_those_of_content_tokens(tokens: list[str], shown: list[str], reasoning_tokens: int) -> None:
    pieces, sink = with_logprobs(tokens, tools=TOOLS)
    assert [one.token for piece in pieces for one in piece.logprobs] == shown
    assert all(piece.channel == CONTENT for piece in pieces if piece.logprobs)
    assert sink.reasoning_tokens == reasoning_tokens


def test_logprobs_leave_with_the_last_of_their_text_and_not_beyond_a_stop() -> None:
    pieces, _ = with_logprobs(["aE", "x", "bE", "ND", "c"], stop=["END"])
    assert [(piece.text, [one.token for one in piece.logprobs]) for piece in pieces] == [
        ("a", []), ("Ex", ["aE", "x"]), ("b", []),
    ]  # fmt: skip


# --- All together -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_replies_are_the_same_at_every_cut_and_leak_no_marker() -> None:
    draw = random.Random(8)
    parts = ["<t>", "</t>", "[c]", "[/c]", F, OTHER, "{", "}", "<", "t>", "[", "c]", "x", "\n", "é👍", "END", "E", CALL]
    for _ in range(1500):
        text = "".join(draw.choices(parts, k=draw.randint(1, 10)))
        fields: dict[str, object] = {
            "tools": draw.choice(["", TOOLS, ONE_CALL]),
            "stop": draw.choice([[], ["END"], ["E", "x\n"]]),
            "reasoning_open": draw.random() < 0.3,
            "stop_in_reasoning": draw.random() < 0.3,
        }
        whole = say([text], **fields)
        for pieces in (list(text), random_cut(text, draw), random_cut(text, draw)):
            said = say(pieces, **fields)
            assert (said.order, said.sink.halted, said.sink.called) == (
                whole.order, whole.sink.halted, whole.sink.called
            ), (text, fields)  # fmt: skip
        if not fields["tools"]:
            shown = whole.content + whole.reasoning
            visible = text.replace("<t>", "").replace("</t>", "")
            # Where a < stood before a marker, what is left may look like one.
            assert "<<" in text or ("<t>" not in shown and "</t>" not in shown), text
            assert "<<" in text or whole.sink.halted or len(shown) == len(visible), text


def test_plain_text_costs_next_to_nothing() -> None:
    sink = Sink(GenerationRequest([1], 99_999, stop=["\n\nHuman:"], tools=TOOLS), MARKUP)
    began = time.process_time()
    for _ in range(5000):
        sink.feed(5, " word")
    # About 4 us on the reference machine; a step of 16 rows takes 100 ms there and 10 on a fast GPU.
    assert time.process_time() - began < 0.2
