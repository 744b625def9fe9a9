"""Which part of a reply is content, reasoning or tool markup, however the text is cut."""

import importlib
import random
import re

import pytest

from common.generation import CONTENT, REASONING
from tests.worker.cutting import cuts, random_cut
from worker.engine import IN_REASONING, IN_TOOL, NORMAL, CallForm, Markup
from worker.reasoning import ABANDONS, BODY, CLOSES, HIDDEN, OPENS, ReasoningSplitter, Stretch
from worker.router import Router
from worker.tool_calls import TAGGED_JSON

# Short ones, so that every cut can be tried.
THINKS = Markup("<t>", "</t>")
CALLS = Markup("<t>", "</t>", "[c]", "[/c]", parse=lambda text, tools: text)
HEADED = Markup(
    tool_start="{c}",
    tool_end="{/c}",
    states={"header": [("=me:", IN_REASONING), ("=all:", NORMAL), ("{c}", IN_TOOL)], IN_REASONING: [("|", "header")]},
    opening="header",
)


def split(markup: Markup, pieces: list[str], stops: list[str] | None = None, **options: bool) -> list[Stretch]:
    """The stretches, neighbours of one kind joined."""
    splitter = ReasoningSplitter(markup, stops or [], **options)
    found: list[Stretch] = []
    for stretch in [*(one for piece in pieces for one in splitter.feed(piece)), *splitter.flush()]:
        assert stretch.text or stretch.kind in (CLOSES, ABANDONS), "an empty stretch"
        if found and found[-1].kind == stretch.kind != CLOSES and stretch.kind != OPENS:
            stretch = stretch._replace(text=found.pop().text + stretch.text)
        found.append(stretch)
    return found


def shown(stretches: list[Stretch]) -> str:
    """Content as it is, and the others in brackets."""
    forms = {CONTENT: "{}", REASONING: "({})", HIDDEN: "", OPENS: "<<", BODY: "{}", CLOSES: ">>", ABANDONS: "~~"}
    return "".join(forms[stretch.kind].format(stretch.text) for stretch in stretches)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<t>why</t>so", "(why)so"),
        ("a<t>b</t>c<t>d</t>", "a(b)c(d)"),
        ("<t>never", "(never)"),
        ("<t></t>x", "x"),
        ("</t>x", "x"),
        ("<t>a<t>b</t>c", "(a)(b)c"),
        ("x<<t>y</", "x<(y</)"),
        ("é<t>\n👍</t>\n", "é(\n👍)\n"),
        ("a < b </ c", "a < b </ c"),
    ],
)
def test_reasoning_is_told_from_content_at_every_cut(text: str, expected: str) -> None:
    for pieces in cuts(text):
        stretches = split(THINKS, pieces)
        assert shown(stretches) == expected, pieces
        assert "".join(stretch.text for stretch in stretches) == text


def test_a_template_may_begin_inside_reasoning() -> None:
    for pieces in cuts("a</t>b<t>c"):
        assert shown(split(THINKS, pieces, reasoning_open=True)) == "(a)b(c)"


def test_without_markers_it_changes_nothing() -> None:
    for options in ({}, {"reasoning_open": True}, {"tools": True}):
        assert split(Markup(), ["<t>a", "</t>"], **options) == [Stretch(CONTENT, "<t>a</t>")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a[c]b[/c]d", "a<<b>>d"),
        ("[c]b", "<<b"),
        ("[c]<t>[/c]<t>x", "<<<t>>>(x)"),
        ("<t>a[c]b[/c]d</t>e", "(a)<<b>>(d)e"),
        ("<t>a[c]b</t>e", "(a)<<b>>e"),
        ("[/c]a", "[/c]a"),
        ("[c][c]a[/c]b", "<<[c]a>>b"),
    ],
)
def test_tool_blocks_are_found_in_content_and_in_reasoning(text: str, expected: str) -> None:
    for pieces in cuts(text):
        assert shown(split(CALLS, pieces, tools=True)) == expected, pieces


def test_without_tools_their_markers_are_text() -> None:
    assert shown(split(CALLS, ["a[c]b[/c]"])) == "a[c]b[/c]"


def test_a_block_that_cannot_be_a_call_is_given_up_at_its_first_character() -> None:
    markup = Markup("<t>", "</t>", "[c]", "[/c]", form=CallForm("{", TAGGED_JSON.head, TAGGED_JSON.tail))
    for text, expected in (
        ("[c] {x[/c]", "<< {x>>"),
        ("[c]\n\tx", "<<~~\n\tx"),
        ("[c]\n\tENDx", "<<~~"),
        ("[c] x<t>y", "<< ~~x(y)"),
        ("[c][/c]x", "<<~~[/c]x"),
        ("<t>[c] x</t>y", "<< ~~(x)y"),
    ):
        for pieces in cuts(text):
            assert shown(split(markup, pieces, ["\n\tEND"], tools=True)) == expected, pieces


def test_headers_decide_and_are_not_shown() -> None:
    for text, expected in (("x=me:a|y=all:b", "(a)b"), ("=me:a|{c}b{/c}c", "(a)<<b>>c"), ("who", "")):
        for pieces in cuts(text):
            assert shown(split(HEADED, pieces, tools=True)) == expected, pieces
    assert shown(split(HEADED, ["{c}b"])) == "{c}b"


def test_markers_of_special_tokens_are_found_spelled_and_as_stand_ins() -> None:
    router = Router({7: "<|", 8: "|>"})
    markup = Markup("<|th", "|>", router=router)
    opens, closes = router.written(7), router.written(8)
    for text in (f"a{opens}thb{closes}c", "a<|thb|>c", f"a<|thb{closes}c"):
        assert shown(split(markup, list(text))) == "a(b)c"


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("<t>END</t>aENDb", False, "(END)a"),
        ("<t>aEND</t>b", True, "(a)"),
        ("[c]aEND[/c]", False, "<<a"),
        ("EN<t>D</t>EN", False, "EN(D)EN"),
        ("a</EN<t>", False, "a</EN"),
        ("a</END<t>", False, "a</"),
    ],
)
def test_stop_strings_count_outside_reasoning_unless_asked_for(text: str, in_reasoning: bool, expected: str) -> None:
    for pieces in cuts(text):
        assert shown(split(CALLS, pieces, ["END"], tools=True, stop_in_reasoning=in_reasoning)) == expected, pieces


def test_a_stop_string_halts_on_its_last_character_also_where_a_marker_may_begin() -> None:
    splitter = ReasoningSplitter(THINKS, ["<"])
    assert splitter.feed("a<") == [Stretch(CONTENT, "a")] and splitter.stopped
    assert splitter.feed("t>b") == []


def test_no_text_is_held_that_cannot_become_a_marker() -> None:
    draw = random.Random(1)
    for _ in range(300):
        splitter = ReasoningSplitter(CALLS, ["<stop"], tools=True)
        fed = given = 0
        for piece in random_cut("".join(draw.choices("<t>/[c]s x", k=40)), draw):
            fed += len(piece)
            given += sum(len(stretch.text) for stretch in splitter.feed(piece))
            assert fed - given <= 4
        assert splitter.stopped or fed == given + sum(len(stretch.text) for stretch in splitter.flush())
    splitter = ReasoningSplitter(THINKS)
    assert "".join(stretch.text for stretch in splitter.feed("<" * 50)) == "<" * 49


@pytest.mark.slow
def test_random_texts_agree_with_mlx_lms_own_machine() -> None:
    generate = importlib.import_module("mlx_lm.generate")
    machine = generate.TextStateMachine(
        {
            "normal": [("<t>", "reasoning"), ("</t>", "normal"), ("[c]", "tool")],
            "reasoning": [("</t>", "normal"), ("<t>", "reasoning")],
            "tool": [("[/c]", "normal")],
        }
    )
    kinds = {"normal": CONTENT, "reasoning": REASONING, "tool": BODY}
    draw = random.Random(2)
    for _ in range(1500):
        text = "".join(draw.choices(["<t>", "</t>", "[c]", "[/c]", "<", "t>", "/", "[", "]", "x", "\n", "é"], k=12))
        if re.search(r"<t>.*\[c]", text, re.DOTALL):
            # There ours finds calls in reasoning too.
            continue
        state = machine.make_state("normal")
        theirs: dict[int, str] = {}
        for piece in random_cut(text, draw):
            state, segments = generate.TextStateMachine.split(state, piece)
            for name, part in segments:
                theirs[kinds[name]] = theirs.get(kinds[name], "") + part
        _, rest, name = generate.TextStateMachine.flush(state)
        theirs[kinds[name]] = theirs.get(kinds[name], "") + rest
        ours: dict[int, str] = {}
        for stretch in split(CALLS, random_cut(text, draw), tools=True):
            ours[stretch.kind] = ours.get(stretch.kind, "") + stretch.text
        assert {kind: ours.get(kind, "") for kind in kinds.values()} == {
            kind: theirs.get(kind, "") for kind in kinds.values()
        }, text


@pytest.mark.slow
def test_random_texts_give_the_same_stretches_for_every_cut() -> None:
    draw = random.Random(3)
    for _ in range(400):
        parts = ["<t>", "</t>", "[c]", "[/c]", "<", "t>", "[", "c]", "{", "x", " ", "EN", "D"]
        text = "".join(draw.choices(parts, k=14))
        options = {name: draw.random() < 0.5 for name in ("tools", "reasoning_open", "stop_in_reasoning")}
        markup = draw.choice([THINKS, CALLS, Markup("<t>", "</t>", "[c]", "[/c]", form=TAGGED_JSON), HEADED])
        stops = draw.choice([[], ["END"], ["EN", "D<"]])
        whole = split(markup, [text], stops, **options)
        for _ in range(5):
            pieces = random_cut(text, draw)
            assert split(markup, pieces, stops, **options) == whole, (pieces, options)
