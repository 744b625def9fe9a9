"""How much is read between decode steps follows the machine's speed, within its bounds."""

import pytest

from worker.engines.pace import ALONE, FIRST, LEAST, Pace


def settled(pace: Pace, fixed_s: float, per_token_s: float, steps: int = 40) -> int:
    """What is allowed after so many steps on a machine whose chunks cost so much each and per token."""
    for _ in range(steps):
        allowed = pace.allowed(True)
        pace.took(allowed, allowed, fixed_s + allowed * per_token_s)
    return pace.allowed(True)


@pytest.mark.parametrize(("fixed_s", "per_token_s"), [(0.1, 0.005), (0.01, 0.0001), (0.2, 0.001)])
def test_steps_come_to_last_as_long_as_the_target(fixed_s: float, per_token_s: float) -> None:
    tokens = settled(Pace(0.5, 100_000), fixed_s, per_token_s)
    assert fixed_s + tokens * per_token_s == pytest.approx(0.5, rel=0.05)


def test_it_slows_down_at_once_and_speeds_up_by_doubling() -> None:
    pace = Pace(0.5, 4096)
    assert settled(pace, 0, 1e-5) == 4096
    pace.took(4096, 4096, 8.0)
    assert pace.allowed(True) == 256
    pace.took(256, 256, 0.001)
    assert pace.allowed(True) == 512


def test_a_prompt_moves_on_however_slow_the_machine_and_never_faster_than_said() -> None:
    assert settled(Pace(0.001, 4096), 1.0, 0.1) == LEAST
    assert settled(Pace(0.5, 100), 0, 1e-6) == 100
    assert Pace(0.5, 5).allowed(True) == 5


def test_with_nothing_to_hold_up_more_is_read() -> None:
    pace = Pace(0.5, 4096)
    assert (pace.allowed(True), pace.allowed(False)) == (FIRST, ALONE * FIRST)


def test_the_short_end_of_a_prompt_says_nothing_of_the_speed() -> None:
    pace = Pace(0.5, 4096)
    pace.took(64, 3, 0.1)
    pace.took(64, 0, 2.0)
    assert pace.allowed(True) == FIRST
    pace.took(64, 3, 2.0)
    assert pace.allowed(True) == LEAST
