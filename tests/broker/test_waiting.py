"""Whose turn it is: priority that ages, then fair share by weight, then arrival."""

import itertools
import time
from collections import Counter

import pytest

from broker.policy import aging_step_s
from broker.turns import Turns
from broker.waiting import WaitingLine
from common.ids import RequestId

STEP_S = 2.0


class Line:
    """A line whose requests are named by words."""

    def __init__(self) -> None:
        self.line = WaitingLine(STEP_S)
        self.now = 0.0
        self.arrivals = itertools.count(1)

    def add(self, *names: str, key: str = "k", weight: float = 1.0, priority: int = 0) -> None:
        for name in names:
            self.line.add(RequestId(name.encode()), key, weight, priority, next(self.arrivals))

    def flood(self, key: str, count: int, **more: float) -> None:
        self.add(*(f"{key}{n}" for n in range(count)), key=key, **more)  # type: ignore[arg-type]

    def next(self) -> str:
        id = next(self.line.order(self.now))
        self.line.serve(id, self.now)
        return id.decode()

    def turns(self, count: int) -> list[str]:
        return [self.next() for _ in range(count)]

    def names(self) -> list[str]:
        return [id.decode() for id in self.line]


def test_one_key_is_served_by_priority_then_arrival() -> None:
    line = Line()
    line.add("a")
    line.add("b", priority=5)
    line.add("c", priority=-1)
    line.add("d", priority=5)
    assert line.names() == ["b", "d", "a", "c"] == line.turns(4)


def test_two_floods_are_served_by_their_weights() -> None:
    line = Line()
    line.flood("x", 100)
    line.flood("y", 100, weight=3)
    counts = Counter(name[0] for name in line.turns(80))
    assert counts == {"x": 20, "y": 60}


def test_a_single_request_goes_before_the_next_of_a_flood_whoever_had_what_before() -> None:
    line = Line()
    line.flood("x", 500)
    line.turns(200)
    line.add("single", key="y")
    assert line.next() == "single"
    # One at a time, again and again: at most one of the flood between two.
    for n in range(20):
        line.next()
        line.add(f"y{n}", key="y")
        assert f"y{n}" in line.turns(2)


def test_a_key_that_never_had_a_turn_is_not_behind_one_that_has() -> None:
    line = Line()
    line.add("x0", "x1", "x2", key="x")
    assert line.next() == "x0"
    line.add("y0", key="y")
    assert line.turns(3) == ["y0", "x1", "x2"]


def test_what_a_key_did_not_use_is_not_saved_up() -> None:
    line = Line()
    line.flood("x", 100)
    line.add("y", key="y")
    line.turns(60)
    line.flood("y", 30)
    assert Counter(name[0] for name in line.turns(20)) == {"x": 10, "y": 10}


def test_a_higher_priority_goes_first_whatever_its_key_had() -> None:
    line = Line()
    line.flood("x", 20, priority=1)
    line.add("y", key="y")
    assert line.turns(20) == [f"x{n}" for n in range(20)]


def test_standing_back_raises_a_priority_until_its_turn() -> None:
    line = Line()
    line.flood("x", 100, priority=3)
    line.flood("y", 100)
    served = []
    for _ in range(60):
        line.now += 0.5
        served.append(line.next()[0])
    # First passed over at 0.5 s, three steps of two seconds each time.
    assert [at for at, key in enumerate(served) if key == "y"] == [12, 25, 38, 51]


def test_waiting_for_ones_own_kind_raises_nothing() -> None:
    line = Line()
    line.flood("x", 100)
    for _ in range(50):
        line.now += 10.0
        line.next()
    line.add("urgent", key="x", priority=1)
    assert line.next() == "urgent"


def test_a_keys_low_priorities_take_only_its_own_turns() -> None:
    line = Line()
    for priority in range(-10, 1):
        line.add(*(f"x{priority}.{n}" for n in range(10)), key="x", priority=priority)
    for _ in range(20):
        line.now += 100.0  # everything that stood back is due by far
        line.next()
    line.add("single", key="y")
    line.now += 100.0
    assert line.next() == "single"


def test_the_default_queue_timeout_outlasts_every_difference_of_priority() -> None:
    assert aging_step_s(45.0) == pytest.approx(2.025)
    assert 20 * aging_step_s(45.0) < 45.0


def test_who_comes_back_stands_in_front_and_pays_nothing() -> None:
    line = Line()
    line.flood("x", 3)
    line.flood("y", 3, priority=5)
    line.line.put_back(RequestId(b"second"), -1)
    line.line.put_back(RequestId(b"first"), -2)
    assert line.names()[:2] == ["first", "second"] == line.turns(2)
    assert line.turns(3) == ["y0", "y1", "y2"]


def test_the_order_is_that_of_the_turns_to_come() -> None:
    line = Line()
    line.flood("x", 6, weight=2)
    line.flood("y", 4, priority=1)
    line.flood("z", 4)
    line.add("x-", key="x", priority=1)
    line.add("y-", key="y", priority=-3)
    expected = line.names()
    assert len(expected) == 16
    assert line.turns(16) == expected


def test_removed_requests_leave_no_trace() -> None:
    line = Line()
    line.flood("x", 3)
    line.add("y", key="y", priority=2)
    for name in ("y", "x0", "x2"):
        line.line.remove(RequestId(name.encode()))
    assert line.names() == ["x1"] and len(line.line) == 1
    line.line.remove(RequestId(b"x1"))
    assert line.names() == [] and not line.line and list(line.line.order(0.0)) == []
    line.line.forget()


def test_names_of_keys_that_come_and_go_are_not_kept() -> None:
    turns = Turns()
    turns.join("flood", 0)
    for number in range(5000):
        turns.join(f"k{number}", number)
        turns.served(f"k{number}", 1.0)
        turns.served("flood", 1.0)
        turns.join("flood", number)
    assert len(turns._ended) < 200 and len(turns._heap) < 200


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 10_000])
def test_a_turn_costs_the_same_however_many_wait(keys: int) -> None:
    def cost(waiting: int) -> float:
        line = Line()
        for number in range(waiting):
            line.add(f"{number}", key=f"k{number % keys}")
        best = float("inf")
        for round_ in range(3):
            began = time.process_time()
            for number in range(200):
                line.add(f"{round_}-{number}", key=f"k{number % keys}")
                line.next()
            best = min(best, time.process_time() - began)
        return best

    # A thousand times as many; a logarithm of them and colder caches are allowed.
    assert cost(10_000) < 4 * cost(10)
