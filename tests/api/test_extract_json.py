"""JSON mode's reduction of a reply to its first JSON value."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.extract_json import WORK_FLOOR, WORK_PER_CHARACTER, extract_json

ROWS = [
    ('{"a":1}', '{"a": 1}'),
    ('[1,"two",3.5]', '[1, "two", 3.5]'),
    ('Well: {"a":1} so there.', '{"a": 1}'),
    ('```json\n{"a":1}\n```', '{"a": 1}'),
    ('```\n{"a":1}\n```', '{"a": 1}'),
    ('```json{"a":1}```', '{"a": 1}'),
    ('```JSON\n{"a":1}\n```', '{"a": 1}'),
    ('\u3000```json {"a":1} ```\u2003', '{"a": 1}'),
    ("```json\r\n[]\r\n```\r\n", "[]"),
    ('text\n```json\n{"a":1}\n```\nmore', '{"a": 1}'),
    ('{"a":1}\n```', '{"a": 1}'),
    ('```json\n{"a":1}', '{"a": 1}'),
    ("```", "```"),
    ("``````", "``````"),
    ("```json\n```", "```json\n```"),
    ("no value", "no value"),
    ("  kept \n", "  kept \n"),
    ("", ""),
    ("5", "5"),
    ('"text"', '"text"'),
    ("null", "null"),
    ('{name} then {"a":1}', '{"a": 1}'),
    ('{"a": {"b":1}', '{"b": 1}'),
    ("[1, 2,] [3]", "[3]"),
    ("{'a': 1} [\"b\"]", '["b"]'),
    ("[01] [1]", "[1]"),
    ("[True] [true]", "[true]"),
    ("{} []", "{}"),
    ("[] {}", "[]"),
    ('{"a":1,"b":2,"a":3}', '{"a": 3, "b": 2}'),
    ('{ "a" :\t[ 1 ,\n2 ] }', '{"a": [1, 2]}'),
    ('{"a": "x\ny"} {"b":2}', '{"b": 2}'),
    ('{"s":"\\u00e9\\ud83d\\ude00\\/"}', '{"s": "é😀/"}'),
    ('{"s":"é\u2028😀"}', '{"s": "é\u2028😀"}'),
    ('{"s":"\\ud800x"}', '{"s": "\ufffdx"}'),
    ('{"\\udc00":1}', '{"\ufffd": 1}'),
    ("[1e400, -1e400, NaN]", "[Infinity, -Infinity, NaN]"),
    (
        "[1.0, 1e5, -0, -0.0, 123456789012345678901234567890]",
        "[1.0, 100000.0, 0, -0.0, 123456789012345678901234567890]",
    ),
    ('{"t":"[not] {it}"}', '{"t": "[not] {it}"}'),
    ('{"a":1}{"b":2}', '{"a": 1}'),
    ("[" + "9" * 4300 + "]", "[" + "9" * 4300 + "]"),
    ("[" + "9" * 4301 + "] [7]", "[7]"),
    ("[" * 1024 + "]" * 1024, "[" * 1024 + "]" * 1024),
    ("[" * 1023 + "[],[]" + "]" * 1023, "[" * 1023 + "[], []" + "]" * 1023),
    ("[" * 1024 + "[],[]" + "]" * 1024, "[" * 1024 + "[],[]" + "]" * 1024),
    ("[" * 1025 + "]" * 1025, "[" * 1025 + "]" * 1025),
    ('{"a":' * 1024 + "1" + "}" * 1024, '{"a": ' * 1024 + "1" + "}" * 1024),
    ('{"a":' * 1025 + "1" + "}" * 1025, '{"a":' * 1025 + "1" + "}" * 1025),
    ('["' + "[" * 3000 + '"]', '["' + "[" * 3000 + '"]'),
    ('["\\"' + "{" * 3000 + '",1]', '["\\"' + "{" * 3000 + '", 1]'),
    ("[" * 100_000, "[" * 100_000),
]


@pytest.mark.parametrize(("text", "result"), ROWS)
def test_a_reply_becomes_its_first_value(text: str, result: str) -> None:
    assert extract_json(text) == result


@pytest.mark.slow
def test_the_work_is_bounded_whatever_comes() -> None:
    hostile = [
        '{"a":"' * 50_000,
        '["' + "[" * 200_000,
        "[1," * 100_000,
        '{"k":[' * 60_000 + "x",
        "[" + ",".join(["1"] * 100_000) + "x" * 3,
        ('["' + "a" * 1000) * 300,
        "[" + "9" * 500_000,
        "[" * 900 + "1," * 100_000 + "9" * 5000,
    ]
    began = time.process_time()
    for text in hostile:
        assert extract_json(text) == text
    assert time.process_time() - began < 2


@pytest.mark.slow
def test_past_the_budget_the_reply_stays_as_it_is() -> None:
    # Each start is read to the end of the text before it fails; the value lies behind more of that than is allowed.
    text = "[" + "1," * 200_000 + "[" * 250 + ' {"a":1}'
    many = ("[" + "1," * 4000) * 290 + '{"a":1}'
    assert extract_json(many) == many
    assert extract_json(text) in (text, '{"a": 1}')


def by_cpython(text: str) -> str:
    """CONTRACT §6 word by word, without bounds."""
    inner = text.strip()
    if inner.startswith("```"):
        inner = inner[3:].removeprefix("json").strip()
    if inner.endswith("```"):
        inner = inner[:-3].strip()
    for at, character in enumerate(inner):
        if character in "[{":
            try:
                value, _ = json.JSONDecoder().raw_decode(inner, at)
            except ValueError:
                continue
            return "".join(
                "\ufffd" if "\ud800" <= c <= "\udfff" else c for c in json.dumps(value, ensure_ascii=False)
            )
    return text


WORDS = ["```", "json", '"a":', "1", "-0", "1e5", "true", "null", "NaN", "\\ud800", "\\u00e9", "é", "[1]", "{}"]
PARTS = st.sampled_from([*'[]{}",: \n\\', *WORDS])


@settings(max_examples=400)
@given(st.lists(PARTS, max_size=25).map("".join) | st.text(max_size=20))
def test_a_reply_becomes_what_cpythons_decoder_finds_first(text: str) -> None:
    assert extract_json(text) == by_cpython(text)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=6).map("".join), st.integers(1000, 30_000))
def test_no_repetition_reads_more_than_the_budget(part: str, times: int) -> None:
    text = part * times
    read = 0
    decode = json.JSONDecoder().raw_decode

    def counting(inner: str, at: int) -> tuple[object, int]:
        nonlocal read
        try:
            value, end = decode(inner, at)
        except json.JSONDecodeError as error:
            read += error.pos - at
            raise
        except (ValueError, RecursionError):
            read += len(inner) - at
            raise
        read += end - at
        return value, end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.extract_json._decode", counting)
        extract_json(text)
    # The attempt that uses the budget up may read on to the end.
    assert read <= WORK_PER_CHARACTER * len(text) + WORK_FLOOR + len(text)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_a_container_alone_is_written_as_cpython_writes_it(value: object) -> None:
    text = json.dumps(value)
    expected = (
        json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
        if isinstance(value, (list, dict))
        else text
    )
    assert extract_json(text).replace("\ufffd", "?") == expected.replace("\ufffd", "?")
