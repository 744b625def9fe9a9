"""How long prompts wait for company."""

import random

import pytest

from worker.engines.company import GAP_S, SHARE, Company


def test_a_lone_one_waits_for_a_gap_and_a_short_one_not_even_so_long() -> None:
    company = Company()
    assert company.due_in(5.0) == 0
    company.came(10.0, 1.0)
    assert company.due_in(10.0) == pytest.approx(GAP_S)
    assert company.due_in(10.0 + GAP_S) == pytest.approx(0, abs=1e-9) and company.due_in(11.0) == 0
    company.left()
    company.came(20.0, GAP_S)
    assert company.due_in(20.0) == pytest.approx(SHARE * GAP_S)


def test_each_arrival_prolongs_the_wait_up_to_a_share_of_the_reading() -> None:
    company = Company()
    for number in range(10):
        company.came(10.0 + number * 0.002, 0.1)
        assert company.due_in(10.0 + number * 0.002) == pytest.approx(min(GAP_S, SHARE * 0.1 * (number + 1) - number * 0.002))
    company.left()
    assert company.due_in(10.02) == 0


def test_without_a_gap_nobody_waits() -> None:
    company = Company(0.0)
    company.came(1.0, 100.0)
    assert company.due_in(1.0) == 0


def test_nobody_waits_longer_than_said() -> None:
    draw = random.Random(7)
    for _ in range(300):
        company, now, reading, first = Company(), draw.random() * 100, 0.0, None
        while first is None or company.due_in(now):
            first = now if first is None else first
            took = draw.choice((0.0, 0.001, 0.05, 3.0)) * draw.random()
            reading += took
            company.came(now, took)
            wait = company.due_in(now)
            assert 0 <= wait <= GAP_S + 1e-9 and now + wait <= max(first + SHARE * reading, now) + 1e-9
            now += draw.random() * 0.008
