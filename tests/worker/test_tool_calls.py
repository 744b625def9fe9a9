"""From tool markup to calls: every format of mlx-lm, arguments that stream, and markup that is no call."""

import importlib
import json
import pkgutil
import random
from typing import Any

import pytest

from common.errors import ProtocolError
from common.generation import CONTENT, REASONING, TOOL_CALL
from tests.worker.cutting import cuts, random_cut
from worker.engine import Markup
from worker.router import Router
from worker.tool_calls import TAGGED_JSON, Event, Offer, ToolCalls, checked_calls, read_offer

# What a model would write between the markers, for each parser of mlx-lm; markers and parsers come from there.
FORMATS: dict[str, list[str]] = {
    "function_gemma": ["call:look{city:<escape>Köln<escape>,days:2}"],
    "gemma4": ['call:look{city:<|"|>Köln<|"|>,days:2}'],
    "glm47": [
        "look\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key><arg_value>2</arg_value>"
    ],
    "json_tools": ['\n{"name": "look", "arguments": {"city": "Köln", "days": 2}}\n'],
    "kimi_k2": [
        '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Köln", "days": 2}<|tool_call_end|>'
    ],
    "kimi_k3": [
        '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Köln'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|>",
        '<|open|>call tool="look"<|sep|><|open|>json type="object"<|sep|>{"city": "Köln", "days": 2}<|close|>json'
        "<|sep|><|close|>call<|sep|>",
    ],
    "laguna": ["look<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"],
    "longcat": [
        "look\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Köln</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n",
        '{"name": "look", "arguments": {"city": "Köln", "days": 2}}',
    ],
    "minicpm5": ['"look"><param name="city"><![CDATA[Köln]]></param><param name="days">2</param>'],
    "minimax_m2": [
        '\n<invoke name="look">\n<parameter name="city">Köln</parameter>\n<parameter name="days">2</parameter>\n'
        "</invoke>\n"
    ],
    "mistral": [
        'look[ARGS]{"city": "Köln", "days": 2}', '[{"name": "look", "arguments": {"city": "Köln", "days": 2}}]',
    ],  # fmt: skip
    "muse_spark": [
        '\n<atem:invoke name="look">\n<atem:parameter name="city">Köln</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n'
    ],
    "pythonic": ['[look(city="Köln", days=2)]'],
    "qwen3_coder": [
        "\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
    ],
}
TWO_CALLS = {
    "gemma4": "call:look{days:1}call:look{days:2}",
    "kimi_k2": "".join(
        f'<|tool_call_begin|>functions.look:{n}<|tool_call_argument_begin|>{{"days": {n}}}<|tool_call_end|>'
        for n in (1, 2)
    ),
    "minimax_m2": "".join(f'<invoke name="look"><parameter name="days">{n}</parameter></invoke>' for n in (1, 2)),
    "mistral": 'look[ARGS]{"days": 1}look[ARGS]{"days": 2}',
    "pythonic": "[look(days=1), look(days=2)]",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "x": True},
        },
    },
}
BARE = {"type": "function", "function": {"name": "bare"}}
OFFER = read_offer(json.dumps({"tools": [TOOL, BARE], "choice": "auto", "named": False, "parallel": True}))
ARGUMENTS = {"city": "Köln", "days": 2}
PLAIN = Markup(
    tool_start="<c>", tool_end="</c>", parse=lambda text, tools: json.loads(text), form=TAGGED_JSON
)
LOOK = '{"name": "look", "arguments": %s}'


def run(
    markup: Markup, pieces: list[str], end: str | None = None, *, home: int = CONTENT, offer: Offer = OFFER
) -> list[Event]:
    """One block's events, neighbours joined; checks that none is empty and that every character is settled."""
    calls = ToolCalls(markup, offer)
    calls.open(markup.tool_start, home)
    events = [event for piece in pieces for event in calls.feed(piece)]
    events += calls.close(markup.tool_end if end is None else end)
    fed = len(markup.tool_start + "".join(pieces) + (markup.tool_end if end is None else end))
    assert sum(event.raw for event in events) == fed or calls.enough
    joined: list[Event] = []
    for event in events:
        assert event.text or event.name or event.channel < 0, "an empty event"
        if joined and not event.name and (joined[-1].channel, joined[-1].call) == (event.channel, event.call):
            before = joined.pop()
            event = before._replace(text=before.text + event.text)
        if event.channel >= 0:
            joined.append(event._replace(raw=0))
    return joined


def called(events: list[Event]) -> list[tuple[str, Any]]:
    """(name, arguments) of events that are all calls, numbered from 0."""
    assert [(event.channel, event.call) for event in events] == [(TOOL_CALL, n) for n in range(len(events))], events
    return [(event.name, json.loads(event.text)) for event in events]


# --- The formats of mlx-lm --------------------------------------------------------------------------------------------


def markup_of(name: str) -> Markup:
    """As worker/engines/markup makes it of a model whose parser it is."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    from worker.engines import markup

    parse = markup._strict(module.parse_tool_call) if name in markup.LENIENT else module.parse_tool_call
    return Markup(
        tool_start=module.tool_call_start, tool_end=module.tool_call_end, parse=parse, form=markup.FORMS.get(name)
    )


def test_no_format_of_mlx_lm_is_left_out() -> None:
    parsers = importlib.import_module("mlx_lm.tool_parsers")
    assert {module.name for module in pkgutil.iter_modules(parsers.__path__)} == FORMATS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_call_at_every_cut(name: str) -> None:
    markup = markup_of(name)
    draw = random.Random(4)
    for text in FORMATS[name]:
        whole = run(markup, [text])
        assert called(whole) == [("look", ARGUMENTS)], text
        for pieces in [list(text), *(random_cut(text, draw) for _ in range(30))]:
            assert run(markup, pieces) == whole
        # Also where the reply ends before the block does, as after a stop string.
        assert called(run(markup, [text], "")) == [("look", ARGUMENTS)]


@pytest.mark.parametrize("name", TWO_CALLS)
def test_a_block_may_hold_several_calls(name: str) -> None:
    markup = markup_of(name)
    text = TWO_CALLS[name]
    for pieces in ([text], list(text)):
        assert called(run(markup, pieces)) == [("look", {"days": 1}), ("look", {"days": 2})]
    once = Offer(OFFER.definitions, OFFER.names, parallel=False)
    assert called(run(markup, list(text), offer=once)) == [("look", {"days": 1})]


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_is_no_call_comes_back_whole_in_every_format(name: str) -> None:
    markup = markup_of(name)
    for text in ("to call a function, write its name", "", "[1, 2]", "{}", '{"name": 5}', "👍"):
        events = run(markup, list(text))
        assert events == [Event(CONTENT, markup.tool_start + text + markup.tool_end, 0)], text


@pytest.mark.parametrize(("name", "call"), [("glm47", "bare"), ("laguna", "bare"), ("json_tools", '{"name": "bare"}')])
def test_a_call_may_have_no_arguments(name: str, call: str) -> None:
    assert called(run(markup_of(name), [call])) == [("bare", {})]


def test_parsers_are_given_definitions_that_do_not_trip_them() -> None:
    text = "bare<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>1</longcat_arg_value>"
    assert called(run(markup_of("longcat"), [text])) == [("bare", {"x": 1})]
    glm = "look<arg_key>x</arg_key><arg_value>1</arg_value>"
    assert called(run(markup_of("glm47"), [glm])) == [("look", {"x": 1})]


# --- Arguments that stream --------------------------------------------------------------------------------------------

ARGUMENT_TEXTS = [
    "{}",
    '{"a":"}"}',
    r'{ "a": "\"}{" , "b": [{"c": {}}]}',
    '{"a": "\\\\"}',
    '{"k": "é👍"}',
]


@pytest.mark.parametrize("arguments", ARGUMENT_TEXTS)
def test_arguments_stream_as_the_model_wrote_them(arguments: str) -> None:
    text = LOOK % arguments
    for pieces in cuts(text):
        assert run(PLAIN, pieces) == [Event(TOOL_CALL, arguments, 0, 0, "look")], pieces


def test_name_and_arguments_leave_while_the_block_is_open() -> None:
    calls = ToolCalls(PLAIN, OFFER)
    calls.open("<c>", CONTENT)
    assert calls.feed('{"name": "look", "arguments": {') == []
    assert [(e.text, e.name) for e in calls.feed('"a"')] == [("", "look"), ('{"a"', "")]
    assert [e.text for e in calls.feed(': "b')] == [': "b']
    assert not calls.enough and [e.text for e in calls.feed('"}}')] == ['"}']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "other", "arguments": {"a": 1}}', ("other", {"a": 1})),
        ('{"arguments": {"a": 1}, "name": "look"}', ("look", {"a": 1})),
        ('{"name": "look", "arguments": "{\\"a\\": 1}"}', ("look", {"a": 1})),
        ('{"name": "look", "parameters": {"a": 1}}', ("look", {"a": 1})),
        ('{"name": "other", "parameters": {"a": 1}}', ("other", {"a": 1})),
        ('{"name": "look", "arguments": {"a": 1}}}}\n', ("look", {"a": 1})),
    ],
)
def test_other_orders_and_slips_are_calls_too(text: str, expected: tuple[str, Any]) -> None:
    for pieces in ([text], list(text)):
        assert called(run(PLAIN, pieces)) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '{"name": "look", "arguments": {bad}}',
        '{"name": "look", "arguments": [1]}',
        '{"name": "look", "arguments": 1}',
        '{"name": "", "arguments": {}}',
        '{"nom": "look"}',
        '{"name": "other", "arguments": {"a": NaN}}',
        '{"name": "other", "arguments": {"a": 1}',
        '{"name": "other", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "look\\ud800", "arguments": {}}',
        '[{"name": "look", "arguments": {}}, 5]',
        "[]",
        "",
    ],
)
def test_what_is_no_call_comes_back_whole(text: str) -> None:
    for pieces in cuts(text, 9):
        assert run(PLAIN, pieces) == [Event(CONTENT, f"<c>{text}</c>", 0)], pieces


def test_arguments_that_broke_after_they_began_to_leave_stay_arguments() -> None:
    """OpenAI promises no valid JSON either, and what left cannot be taken back."""
    for pieces in cuts(LOOK.removesuffix("}") % '{"a": 1', 9):
        assert run(PLAIN, pieces) == [Event(TOOL_CALL, '{"a": 1', 0, 0, "look")]


def test_a_call_that_the_replys_end_cut_off_is_unfinished() -> None:
    for end, unfinished in (("", True), ("</c>", False)):
        calls = ToolCalls(PLAIN, OFFER)
        calls.open("<c>", CONTENT)
        calls.feed('{"name": "look", "arguments": {"a": ')
        calls.close(end)
        assert calls.unfinished is unfinished and calls.found == 1


def test_text_after_a_call_in_its_block_is_kept() -> None:
    for pieces in cuts((LOOK % '{"a": 1}') + "\nand so", 9):
        assert run(PLAIN, pieces) == [Event(TOOL_CALL, '{"a": 1}', 0, 0, "look"), Event(CONTENT, "and so", 0)]
    second = '{"name": "other", "arguments": {}}'
    assert called(run(PLAIN, [(LOOK % '{"a": 1}') + second])) == [("look", {"a": 1}), ("other", {})]


def test_a_call_in_reasoning_must_be_whole_and_offered() -> None:
    assert called(run(PLAIN, list(LOOK % '{"a": 1}'), home=REASONING)) == [("look", {"a": 1})]
    for text in (LOOK.removesuffix("}") % '{"a": 1}', '{"name": "other", "arguments": {}}'):
        assert run(PLAIN, list(text), home=REASONING) == [Event(REASONING, f"<c>{text}</c>", 0)]


def test_special_tokens_are_spelled_for_the_parser_and_in_what_comes_back() -> None:
    router = Router({1: "[S]", 2: "[/S]", 3: "[Q]"})
    markup = Markup(
        tool_start="[S]", tool_end="[/S]", parse=lambda text, tools: json.loads(text.replace("[Q]", '"')), router=router
    )
    start, end, quote = (router.written(token) for token in (1, 2, 3))
    text = '{"name": [Q]look[Q]}'
    for body, events in ((text, [Event(TOOL_CALL, "{}", 0, 0, "look")]), ("[Q]", [Event(CONTENT, "[S][Q][/S]", 0)])):
        calls = ToolCalls(markup, OFFER)
        calls.open(start, CONTENT)
        found = calls.feed(body.replace("[Q]", quote)) + calls.close(end)
        assert [event._replace(raw=0) for event in found] == events


def test_half_a_surrogate_pair_travels_as_an_escape() -> None:
    ((name, arguments),) = checked_calls(json.loads('{"name": "f", "arguments": {"a": "\\ud83d", "b": "é"}}'))
    assert arguments.encode() and json.loads(arguments) == {"a": "\ud83d", "b": "é"}


@pytest.mark.parametrize("text", ["{", "5", '{"tools": 5}', '[{"type": "function"}]', '[{"function": {}}]', "[5]"])
def test_tools_that_are_none_are_a_fault_of_the_sender(text: str) -> None:
    with pytest.raises(ProtocolError):
        read_offer(text)


def test_random_blocks_give_the_same_for_every_cut_and_lose_nothing() -> None:
    draw = random.Random(6)
    heads = ['{"name": "look", "arguments": ', '{"name": "no", "arguments": ']
    parts = [*heads, "{", "}", '"', "\\", '"a": 1', ",", " ", "é"]
    for _ in range(1500):
        text = "".join(draw.choices(parts, k=draw.randint(0, 9)))
        home = draw.choice([CONTENT, REASONING])
        end = draw.choice(["", "</c>"])
        whole = run(PLAIN, [text], end, home=home)
        assert whole
        if all(event.channel != TOOL_CALL for event in whole):
            assert whole == [Event(home, f"<c>{text}{end}", 0)]
        for _ in range(4):
            assert run(PLAIN, random_cut(text, draw), end, home=home) == whole, text
