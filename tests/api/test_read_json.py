"""Reading bodies: what is JSON here, and what is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.read_json import BadBody, deeper_than, read_object


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'\xef\xbb\xbf {"a": 1}\r\n', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": "\\ud83d\\ude42"}', {"a": "🙂"}),
        ('{"a": "é🙂\u2028"}'.encode(), {"a": "é🙂\u2028"}),
        (b'{"a": 1' + b"0" * 4000 + b"}", {"a": 10**4000}),
        (b'{"a": -0.0, "b": 1e-400}', {"a": -0.0, "b": 0.0}),
        (b'{"\\u005cud800": "\\\\ud800"}', {"\\ud800": "\\ud800"}),
    ],
)
def test_what_is_read(body: bytes, value: object) -> None:
    assert read_object(body) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\xef\xbb\xbf", "not valid JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        ("{}".encode("utf-16"), "UTF-8"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1' + b"0" * 4300 + b"}", "4,300 digits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"a": ' + b"[" * 129 + b"]" * 129 + b"}", "128 levels"),
        (b'{"messages": ' + b"[" * 65 + b"]" * 65 + b"}", "64 levels"),
        (b'{"a": ' + b"[" * 100_000, "128 levels"),
        (b'{"a": ' * 100_000, "128 levels"),
    ],
)
def test_what_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(BadBody, match=why):
        read_object(body)


def test_nesting_up_to_the_limit_is_read() -> None:
    read_object(b'{"a": ' + b"[" * 128 + b"]" * 128 + b"}")
    read_object(b'{"messages": ' + b"[" * 64 + b"]" * 64 + b"}")
    assert deeper_than([[]], 1) and not deeper_than([[]], 2) and not deeper_than(1, 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_reason(body: bytes) -> None:
    try:
        assert isinstance(read_object(body), dict)
    except BadBody as error:
        assert str(error)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s, max_size=3)),
    )
)
def test_any_object_is_read_as_it_was_written(value: dict[str, object]) -> None:
    for ascii_only in (True, False):
        try:
            body = json.dumps(value, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:
            continue
        assert read_object(body) == value


@pytest.mark.parametrize("filling", [b"[]," * 500_001, b"0," * 4_000_001])
def test_a_body_of_millions_of_values_is_refused_unread(filling: bytes) -> None:
    with pytest.raises(BadBody, match="more than"):
        read_object(b'{"x":[' + filling + b"0]}")
