"""Who gives up a place of a full queue, and for whom."""

import random
from collections import Counter

import pytest

from broker.shares import Shares
from common.ids import RequestId


def shares(**held: int) -> Shares:
    """Keys of one weight; each request is named by its key and number."""
    made = Shares()
    for key, count in held.items():
        for number in range(count):
            made.add(name(key, number), key, 1.0)
    return made


def name(key: str, number: int) -> RequestId:
    return RequestId(f"{key}{number}".encode())


def test_the_youngest_of_the_largest_goes() -> None:
    assert shares(flood=5, other=2).displaced("single", 1.0, 1, 1) == [name("flood", 4)]
    assert shares(flood=5, other=4).displaced("single", 1.0, 3, 2) == [name("flood", 4), name("flood", 3)]


def test_nobody_goes_for_who_would_hold_as_much() -> None:
    assert shares(flood=5, other=4).displaced("other", 1.0, 1, 1) == []
    assert shares(flood=6, other=4).displaced("other", 1.0, 1, 1) == [name("flood", 5)]
    assert shares(flood=5).displaced("flood", 1.0, 1, 1) == []
    assert shares().displaced("single", 1.0, 1, 1) == []


def test_a_single_place_is_never_taken() -> None:
    assert shares(a=1, b=1, c=1).displaced("single", 1000.0, 1, 1) == []


def test_all_that_are_missing_or_none() -> None:
    full = shares(flood=4)
    assert full.displaced("other", 1.0, 3, 3) == []
    assert full.displaced("other", 1.0, 2, 2) == [name("flood", 3), name("flood", 2)]
    # Asking changes nothing.
    assert full.displaced("other", 1.0, 2, 2) == [name("flood", 3), name("flood", 2)]


def test_a_share_is_by_weight() -> None:
    made = Shares()
    for number in range(8):
        made.add(name("heavy", number), "heavy", 4.0)
    for number in range(4):
        made.add(name("light", number), "light", 1.0)
    assert made.displaced("heavy", 4.0, 1, 1) == [name("light", 3)]
    assert made.displaced("other", 1.0, 1, 1) == [name("light", 3)]
    # The latest weight counts.
    made.add(name("heavy", 8), "heavy", 1.0)
    assert made.displaced("other", 1.0, 1, 1) == [name("heavy", 8)]


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_is_found_whatever_came_and_went(seed: int) -> None:
    draw = random.Random(seed)
    made, mine = Shares(), {}
    weights = {key: draw.choice([0.5, 1.0, 2.0]) for key in "abcdefgh"}
    for number in range(600):
        if mine and draw.random() < 0.5:
            gone = draw.choice(list(mine))
            made.discard(gone, mine.pop(gone))
        else:
            key = draw.choice("aabcdefgh")
            made.add(name(key, number), key, weights[key])
            mine[name(key, number)] = key
        held = Counter(mine.values())
        left = {key: (count - 1) / weights[key] for key, count in held.items()}
        found = made.displaced("new", 1.0, 1, 1)
        assert bool(found) == (max(left.values(), default=0) >= 1)
        if found:
            key = mine[found[0]]
            assert left[key] == max(left.values())
            assert found[0] == [id for id, owner in mine.items() if owner == key][-1]
    assert made.everything() == mine.keys()
    assert len(made._heap) < 200
