"""Marks round special-token text, and taking them out again."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.special_text import WINDOW, SpecialText, any_of, changed, free_marks, occurrences, strings, unmarked

WORDS = ["<a>", "<ab>", "<|x|>", "[I]", "aa", ".*"]


@given(st.text(alphabet="<>ab|x[]I.*", max_size=30))
def test_the_pattern_finds_the_leftmost_longest_word(text: str) -> None:
    match = any_of(WORDS).search(text)
    firsts = [(text.find(word), -len(word), word) for word in WORDS if word in text]
    assert (match and (match.start(), match[0])) == (firsts and (min(firsts)[0], min(firsts)[2]) or None)


def test_no_words_find_nothing() -> None:
    assert any_of([]).search("anything") is None
    assert SpecialText([]).marked("x", ("(", ")")) == "x"


def test_words_are_found_across_windows() -> None:
    for shift in range(6):
        text = "y" * (WINDOW - shift) + "<|x|>" + "y" * WINDOW
        assert SpecialText(WORDS).within({"k": [text]}) == {"<|x|>"}


def test_keys_count_as_text() -> None:
    value = {"<a>": [1, {"b": "x[I]y"}], "n": None}
    assert SpecialText(WORDS).within(value) == {"<a>", "[I]"}
    assert SpecialText(WORDS).marked(value, ("(", ")")) == {"(<a>)": [1, {"b": "x([I])y"}], "n": None}
    assert sorted(strings(value)) == ["<a>", "b", "n", "x[I]y"]


@given(st.text(alphabet="<a>b|x", max_size=40))
def test_unmarking_gives_the_text_back_and_says_where_words_stood(text: str) -> None:
    marks = free_marks(text)
    plain, spans = unmarked(SpecialText(WORDS).marked(text, marks), marks)
    assert plain == text
    assert [text[start:stop] for start, stop in spans] == [match[0] for match in any_of(WORDS).finditer(text)]
    assert spans == occurrences(WORDS, text)


def test_lone_and_crossed_marks_only_vanish() -> None:
    marks = ("(", ")")
    assert unmarked("a)b(c", marks) == ("abc", [])
    assert unmarked("((x)y)", marks) == ("xy", [(0, 1)])
    assert unmarked("()", marks) == ("", [])


def test_marks_are_not_in_the_text() -> None:
    taken = "\U00100000\U00100002"
    assert free_marks(taken) == ("\U00100001", "\U00100003")


def test_nothing_is_changed_in_place() -> None:
    value: dict[str, Any] = {"a": ["b"]}
    assert changed(value, str.upper) == {"A": ["B"]} and value == {"a": ["b"]}
