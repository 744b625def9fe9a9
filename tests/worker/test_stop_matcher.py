"""Stop strings: the first complete match wins, nothing of it leaks, and the cuts of the text make no difference."""

import itertools
import random

import pytest

from worker.stop_matcher import StopMatcher


def reply(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(piece) for piece in pieces)
    return out + ("" if matcher.matched else matcher.flush()), matcher.matched


def cuts(text: str) -> list[list[str]]:
    """Every way of cutting the text."""
    ways = []
    for marks in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        pieces, start = [], 0
        for at, mark in enumerate(marks, 1):
            if mark:
                pieces.append(text[start:at])
                start = at
        ways.append([*pieces, text[start:]])
    return ways


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        ([], "anything", "anything", None),
        (["END"], "before END after", "before ", "END"),
        (["END"], "no EN here E", "no EN here E", None),
        (["END"], "EEND", "E", "END"),
        (["abc", "b"], "xabcx", "xa", "b"),
        (["b", "abc"], "xabcx", "xa", "b"),
        (["abc", "bc"], "xabcx", "x", "abc"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["é👍"], "xé👍y", "x", "é👍"),
        (["x"], "x", "", "x"),
        (["aa"], "baab", "b", "aa"),
    ],
)
def test_every_cut_gives_the_same_reply(stops: list[str], text: str, expected: str, matched: str | None) -> None:
    for pieces in cuts(text[:12]) if len(text) <= 12 else [[text], list(text)]:
        assert reply(stops, pieces) == (expected, matched), pieces


def test_random_texts_agree_with_their_characters_one_by_one() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        text = "".join(draw.choices("ab\n", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("ab\n", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        expected = reply(stops, list(text))
        pieces, rest = [], text
        while rest:
            length = draw.randint(1, len(rest))
            pieces.append(rest[:length])
            rest = rest[length:]
        assert reply(stops, pieces) == expected, (stops, pieces)
        assert expected[1] is not None or expected[0] == text


def test_text_is_held_no_longer_than_it_may_be_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("xS") == "x"
    assert matcher.feed("T") == ""
    assert matcher.feed("A") == "STA"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == "" and matcher.flush() == ""


def test_an_empty_stop_string_is_a_broken_promise_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])
